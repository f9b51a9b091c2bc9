"""An artefact's graphs on a GPU: what crosses to it and back, and the proof that it computes the same as a CPU.

Nothing here names CUDA but the defaults, so that all of it can be tested where there is none.
"""

import dataclasses
import threading
import weakref
from collections.abc import Sequence
from typing import Any, Final, final

import numpy as np
import onnxruntime as ort
import structlog
from numpy.typing import NDArray

from service.artifact import Artifact
from service.cost import CostModel, row_flops
from service.engine import Engine, EngineCall, EngineResult, Floats, Projected, Recall, find_out_anew
from service.engine.pinned import PinnedMemory
from service.engine.sessions import REFUSALS, Provider, Sessions
from service.engine.warmup import call_of, feed_of, measure, unmasked_choice
from service.errors import ArtifactError

_log = structlog.get_logger(__name__)
# A GPU is as fast with one token as with hundreds, so the line has to be found further out than on a CPU.
_MEASURED_LENGTHS: Final = (1, 16, 64, 256, 1024)
# A driver sends what is shorter along with the command.
_STAGED_FROM_BYTES: Final = 64 * 1024
# (batch, queries, keys) on which the GPU is compared with the CPU: kernels differ by size and by the number of rows.
_COMPARED: Final = ((2, 5, 7), (3, 33, 130))
# With TF32 a factor has 10 bits of mantissa.
_TF32_ERROR: Final = 4 * 2.0**-10
_OnDevice = tuple[ort.OrtValue, ort.OrtValue]


@final
class CudaEngine:
    """The graphs of one artefact on a GPU. Calls may come from several threads at once; each has a stream of its own.

    Projected keys and values stay on the device for as long as somebody holds them here, so that tiles of one request
    do not send them again and again.

    Args:
        artifact: verified.
        provider: of the GPU.
        memory: that it reads and writes by itself.
        reference: the same artefact on the CPU; asked once, for a few small calls.
        recall: what was measured under a name, which the second argument measures if nobody has yet.

    Raises:
        ArtifactError: the runtime refuses a graph, cannot run it, or computes something else than the CPU does.
    """

    def __init__(
        self,
        artifact: Artifact,
        provider: Provider,
        memory: PinnedMemory,
        reference: Engine,
        recall: Recall = find_out_anew,
    ) -> None:
        self._artifact = artifact
        self._layer = artifact.layer
        self._provider = provider
        self._memory = memory
        self._sessions = Sessions(artifact, provider)
        self._fault: str | None = None
        self._sending = threading.Lock()
        self._sent: weakref.WeakKeyDictionary[Projected, _OnDevice] = weakref.WeakKeyDictionary()
        try:
            measured = recall(f"{artifact.digest} {provider}", self._measure)
            self._unmasked = unmasked_choice(measured)
            self.cost = CostModel(tuple(zip(measured["flops"], measured["seconds"], strict=True)))
            self._compare(reference)
        except (*REFUSALS, ValueError) as error:  # ValueError: the graph's inputs have other names
            raise ArtifactError(f"{self._where}: onnxruntime cannot run the graph: {error}") from error

    @property
    def fault(self) -> str | None:
        """Why the GPU computes no more. Some of CUDA's errors stay with a process until its end."""
        return self._fault

    def run(self, call: EngineCall) -> EngineResult:
        """The layer's answer to one call."""
        batch, num_queries = call.queries.shape[:2]
        output = (batch, num_queries, self._layer.num_hiddens)
        if call.need_weights:
            weights = (batch, self._layer.num_heads, num_queries, call.keys.shape[1])
            return EngineResult(*self._run("weights", feed_of("weights", call), output, weights))
        flops = batch * row_flops(self._layer, num_queries, call.keys.shape[1])
        name = "masked" if call.valid_lens is not None else self._unmasked.at(flops)
        return EngineResult(self._run(name, feed_of(name, call), output)[0], None)

    def project(self, keys: Floats, values: Floats) -> Projected:
        """The projections of keys and values."""
        shape = (1, self._layer.num_heads, keys.shape[1], self._layer.head_size)
        return Projected(*self._run("project", {"keys": keys, "values": values}, shape, shape))

    def attend(self, queries: Floats, projected: Projected, valid_lens: NDArray[np.int64] | None) -> Floats:
        """The output of queries that attend to projected keys and values."""
        keys, values = self._on_device(projected)
        feed: dict[str, Any] = {"queries": queries, "projected_keys": keys, "projected_values": values}
        name = "attend_full"
        if valid_lens is not None:
            name, feed["valid_lens"] = "attend", valid_lens
        return self._run(name, feed, (1, queries.shape[1], self._layer.num_hiddens))[0]

    @property
    def _where(self) -> str:
        return f"{self._artifact.name}/{self._artifact.version}"

    def _run(self, name: str, feed: dict[str, Any], *shapes: tuple[int, ...]) -> list[Floats]:
        """A graph's results, of these shapes, in pinned memory."""
        try:
            return self._bound(name, feed, shapes)
        except REFUSALS:
            self._probe()
            raise

    def _probe(self) -> None:
        """After a failure: finds out whether it was that call's, or everyone's from now on."""
        call = call_of(self._layer, 1)
        try:
            self._bound("full", feed_of("full", call), [(1, 1, self._layer.num_hiddens)])
        except REFUSALS as error:
            _log.error("the device computes no more", model=self._where, reason=str(error))
            self._fault = str(error)

    def _bound(self, name: str, feed: dict[str, Any], shapes: Sequence[tuple[int, ...]]) -> list[Floats]:
        graph = self._sessions.graph(name, threads=1)
        binding = graph.session.io_binding()
        for key, tensor in feed.items():
            if isinstance(tensor, ort.OrtValue):
                binding.bind_ortvalue_input(key, tensor)
            else:
                binding.bind_cpu_input(key, self._staged(tensor))
        results = [self._memory.empty(shape) for shape in shapes]
        for key, result in zip(graph.outputs, results, strict=True):
            binding.bind_output(key, "cpu", 0, np.float32, result.shape, result.ctypes.data)
        graph.session.run_with_iobinding(binding)
        return results

    def _staged(self, tensor: NDArray[Any]) -> NDArray[Any]:
        """A tensor where the device can read it: as it is, if that is as fast."""
        is_short = tensor.nbytes < _STAGED_FROM_BYTES
        return tensor if is_short or tensor.dtype != np.float32 else self._memory.copy(tensor)

    def _on_device(self, projected: Projected) -> _OnDevice:
        with self._sending:
            sent = self._sent.get(projected)
            if sent is None:
                sent = (self._send(projected.keys), self._send(projected.values))
                self._sent[projected] = sent
            return sent

    def _send(self, tensor: Floats) -> ort.OrtValue:
        return ort.OrtValue.ortvalue_from_numpy(self._staged(tensor), self._provider.memory, 0)

    def _measure(self) -> dict[str, Any]:
        output = self._layer.num_hiddens
        return measure(
            self._layer,
            _MEASURED_LENGTHS,
            lambda name, call: self._run(name, feed_of(name, call), (*call.queries.shape[:2], output)),
        )

    def _compare(self, reference: Engine) -> None:
        """Runs every graph, on lengths from 0 to all keys, and compares with what the export's gate has approved of."""
        # Both answers are that close to the truth.
        limit = 2 * self._artifact.manifest.parity.limit
        if self._provider.options.get("use_tf32") == "1":
            limit = max(limit, _TF32_ERROR)
        for shape in _COMPARED:
            call = self._example(shape)
            for graph, got, want in self._answers(call, reference):
                error = float(np.abs(got - want).max() / np.abs(want).max())
                if not error <= limit:  # nan is an error, too
                    raise ArtifactError(
                        f"{self._where}: the graph {graph!r} on {self._provider.name} is off by {error:.1e} of the "
                        f"largest value, (batch, queries, keys) {shape}; want at most {limit:.1e}"
                    )
        self._sessions.forget({"weights", "project", "attend", "attend_full"})

    def _answers(self, call: EngineCall, reference: Engine) -> list[tuple[str, Floats, Floats]]:
        """Every graph's name, its answer here, and the reference's."""
        weighted = dataclasses.replace(call, need_weights=True)
        got, want = self.run(weighted), reference.run(weighted)
        if got.weights is None or want.weights is None:
            raise RuntimeError("weights were asked for and are not there")
        answers = [("weights", got.output, want.output), ("weights", got.weights, want.weights)]
        unmasked = dataclasses.replace(call, valid_lens=None)
        of_all = reference.run(unmasked).output
        shape = of_all.shape
        answers += [
            ("masked", self.run(call).output, reference.run(call).output),
            ("masked", self._run("masked", feed_of("masked", unmasked), shape)[0], of_all),
            ("full", self._run("full", feed_of("full", unmasked), shape)[0], of_all),
        ]
        keys, values, queries = call.keys[:1], call.values[:1], call.queries[:1]
        lens = None if call.valid_lens is None else call.valid_lens[:1]
        ours, theirs = self.project(keys, values), reference.project(keys, values)
        return [
            *answers,
            ("project", ours.keys, theirs.keys),
            ("project", ours.values, theirs.values),
            ("attend", self.attend(queries, ours, lens), reference.attend(queries, theirs, lens)),
            ("attend_full", self.attend(queries, ours, None), reference.attend(queries, theirs, None)),
        ]

    def _example(self, shape: tuple[int, int, int]) -> EngineCall:
        """Standard normal inputs; lengths from 0 to K, each entry's first query of length 0."""
        batch, num_queries, num_kv = shape
        rng = np.random.default_rng(0)
        layer = self._layer
        queries = rng.standard_normal((batch, num_queries, layer.query_size), np.float32)
        keys = rng.standard_normal((batch, num_kv, layer.key_size), np.float32)
        values = rng.standard_normal((batch, num_kv, layer.value_size), np.float32)
        lens = np.linspace(0, num_kv, num_queries).round().astype(np.int64)
        return EngineCall(queries, keys, values, np.tile(lens, (batch, 1)))
