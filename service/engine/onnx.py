"""ONNX Runtime behind the `Engine` contract: which of an artefact's graphs computes a call, on how many threads."""

import bisect
import dataclasses
import threading
import time
from typing import Any, Final, final

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from service.artifact import Artifact, Layer
from service.cost import CostModel, row_flops
from service.engine import EngineCall, EngineResult, Floats, Projected, Recall, find_out_anew
from service.engine.device import DeviceName
from service.errors import ArtifactError

_PROVIDERS: Final[dict[DeviceName, list[Any]]] = {
    "cpu": ["CPUExecutionProvider"],
    # TF32 is off because it costs three decimal digits; memory grows by what is asked, since shapes vary.
    "cuda": [("CUDAExecutionProvider", {"use_tf32": "0", "arena_extend_strategy": "kSameAsRequested"})],
}
_PROVIDER_NAMES: Final = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
# The runtime's exceptions share no base class below Exception.
_REFUSALS: Final = (
    ort_errors.EPFail,
    ort_errors.Fail,
    ort_errors.InvalidArgument,
    ort_errors.InvalidGraph,
    ort_errors.InvalidProtobuf,
    ort_errors.NotImplemented,
    ort_errors.RuntimeException,
    RuntimeError,
)
_OF_TILES: Final = ("attend", "attend_full")
# From next to nothing to real work; the longest takes a fraction of a second also for wide layers.
_MEASURED_LENGTHS: Final = (1, 4, 16, 64)
_MEASURED_CALLS: Final = 5
# What several threads must save to be worth the cores that they take from everything else.
_LEAST_WIDE_GAIN: Final = 0.8


@final
class OnnxEngine:
    """The graphs of one artefact. ONNX Runtime's `run` may be called from several threads at once.

    Which graph is faster where every key counts, and from which size on several threads are, is measured at the start.
    Every graph is run once then. Those that are seldom needed are not kept, since each holds the weights in memory, and
    are loaded again when they first are.

    Args:
        artifact: verified.
        device: where to compute.
        threads: of each call.
        threads_alone: of a call that has the machine to itself.
        recall: what was measured under a name, which the second argument measures if nobody has yet: processes of one
            server need not each do it, least of all at the same time.

    Raises:
        ArtifactError: the runtime refuses a graph or cannot run it, or would compute on another device than asked.
    """

    def __init__(
        self,
        artifact: Artifact,
        device: DeviceName,
        threads: int,
        threads_alone: int,
        recall: Recall = find_out_anew,
    ) -> None:
        self._sessions = _Sessions(artifact, device)
        self._threads = threads
        self._threads_alone = threads_alone
        layer = artifact.layer
        try:
            name = f"{artifact.digest} {device} {threads} {threads_alone}"
            measured = recall(name, lambda: self._measure(layer))
            self._unmasked_choice = _Choice(tuple(measured["flops"][1:]), tuple(measured["faster"]))
            self._alone_from_flops = measured["alone_from_flops"]
            self.cost = CostModel(tuple(zip(measured["flops"], measured["seconds"], strict=True)))
            self._try(layer)
        except (*_REFUSALS, ValueError) as error:  # ValueError: the graph's inputs have other names
            raise ArtifactError(
                f"{artifact.name}/{artifact.version}: onnxruntime cannot run the graph: {error}"
            ) from error
        self._layer = layer

    def run(self, call: EngineCall) -> EngineResult:
        """The layer's answer to one call."""
        if call.need_weights:
            output, weights = self._sessions.run("weights", self._threads, _masked_feed(call))
            return EngineResult(output, weights)
        rows, num_queries = call.queries.shape[:2]
        flops = rows * row_flops(self._layer, num_queries, call.keys.shape[1])
        threads = self._threads_alone if call.alone and flops >= self._alone_from_flops else self._threads
        name = "masked" if call.valid_lens is not None else self._unmasked_choice.at(flops)
        return EngineResult(self._run(name, threads, call), None)

    def project(self, keys: Floats, values: Floats) -> Projected:
        """The projections of keys and values."""
        return Projected(*self._sessions.run("project", self._threads, {"keys": keys, "values": values}))

    def attend(self, queries: Floats, projected: Projected, valid_lens: NDArray[np.int64] | None) -> Floats:
        """The output of queries that attend to projected keys and values."""
        feed = {"queries": queries, "projected_keys": projected.keys, "projected_values": projected.values}
        if valid_lens is None:
            return self._sessions.run("attend_full", self._threads, feed)[0]
        return self._sessions.run("attend", self._threads, {**feed, "valid_lens": valid_lens})[0]

    def _run(self, name: str, threads: int, call: EngineCall) -> Floats:
        feed = _masked_feed(call) if name == "masked" else _feed(call)
        return self._sessions.run(name, threads, feed)[0]

    def _measure(self, layer: Layer) -> dict[str, Any]:
        """Measures which graph, how many threads and how long, from small calls to larger ones. As JSON has it."""
        flops = [float(row_flops(layer, length, length)) for length in _MEASURED_LENGTHS]
        calls = [_call(layer, length) for length in _MEASURED_LENGTHS]
        seconds = {name: [self._least_s(name, self._threads, call) for call in calls] for name in ("full", "masked")}
        faster = ["full" if full <= masked else "masked" for full, masked in zip(*seconds.values(), strict=True)]
        best = [min(pair) for pair in zip(*seconds.values(), strict=True)]
        alone_from_flops = float("inf")
        if self._threads_alone > self._threads:
            alone = [self._least_s("full", self._threads_alone, call) for call in calls]
            alone_from_flops = _from_where(flops, alone, best)
        ascending = np.maximum.accumulate(best)  # a slow moment while the first was measured is no property of it
        return {
            "flops": flops, "seconds": ascending.tolist(), "faster": faster, "alone_from_flops": alone_from_flops,
        }  # fmt: skip

    def _try(self, layer: Layer) -> None:
        """Runs every graph, and forgets those that are seldom needed."""
        call = _call(layer, 2)
        for name in ("full", "masked"):
            self._run(name, self._threads, call)
        if self._alone_from_flops < float("inf"):
            self._run("full", self._threads_alone, call)
        self.run(dataclasses.replace(call, need_weights=True))
        projected = self.project(call.keys, call.values)
        self.attend(call.queries, projected, np.full((1, 2), 2))
        self.attend(call.queries, projected, None)
        self._sessions.forget({"weights", "project", "attend", "attend_full"})

    def _least_s(self, name: str, threads: int, call: EngineCall) -> float:
        """The shortest of a few calls: whatever else the machine did meanwhile only made the others longer."""
        seconds = []
        for _ in range(1 + _MEASURED_CALLS):
            started = time.perf_counter()
            self._run(name, threads, call)
            seconds.append(time.perf_counter() - started)
        return min(seconds)


@final
class _Choice:
    """What was fastest at measured sizes: `at` answers for the size at or below."""

    def __init__(self, bounds: tuple[float, ...], names: tuple[str, ...]) -> None:
        self._bounds = bounds
        self._names = names

    def at(self, flops: float) -> str:
        """The name for a call of so many operations."""
        return self._names[bisect.bisect_right(self._bounds, flops, hi=len(self._names) - 1)]


@final
class _Sessions:
    """Sessions by graph and number of threads, each made when it is first needed."""

    def __init__(self, artifact: Artifact, device: DeviceName) -> None:
        self._artifact = artifact
        self._device = device
        self._making = threading.Lock()
        self._made: dict[tuple[str, int], tuple[ort.InferenceSession, list[str]]] = {}

    def run(self, name: str, threads: int, feed: dict[str, Any]) -> list[Floats]:
        """Every output of a graph."""
        made = self._made.get((name, threads))
        session, outputs = made if made is not None else self._make(name, threads)
        results: list[Floats] = session.run(outputs, feed)
        return results

    def forget(self, names: set[str]) -> None:
        """Drops sessions; they are made again when they are needed."""
        with self._making:
            self._made = {key: made for key, made in self._made.items() if key[0] not in names}

    def _make(self, name: str, threads: int) -> tuple[ort.InferenceSession, list[str]]:
        with self._making:
            if (name, threads) not in self._made:
                session = _session(self._artifact, name, self._device, threads)
                self._made[name, threads] = (session, [output.name for output in session.get_outputs()])
            return self._made[name, threads]


def _feed(call: EngineCall) -> dict[str, Any]:
    return {"queries": call.queries, "keys": call.keys, "values": call.values}


def _masked_feed(call: EngineCall) -> dict[str, Any]:
    lens = call.valid_lens
    if lens is None:
        lens = np.full(call.queries.shape[:2], call.keys.shape[1])
    return {**_feed(call), "valid_lens": lens}


def _from_where(flops: list[float], alone: list[float], narrow: list[float]) -> float:
    """The size from which on the first is faster by enough; infinite if it is not at the largest."""
    start = float("inf")
    for size, alone_s, narrow_s in zip(reversed(flops), reversed(alone), reversed(narrow), strict=True):
        if alone_s > _LEAST_WIDE_GAIN * narrow_s:
            break
        start = size
    return start


def _call(layer: Layer, length: int) -> EngineCall:
    queries, keys, values = (
        np.zeros((1, length, size), np.float32) for size in (layer.query_size, layer.key_size, layer.value_size)
    )
    return EngineCall(queries, keys, values, None)


def _session(artifact: Artifact, name: str, device: DeviceName, threads: int) -> ort.InferenceSession:
    where = f"{artifact.name}/{artifact.version}"
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads  # an explicit count also keeps the runtime from pinning threads to cores
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.log_severity_level = 3
    # A memory pattern is kept for every shape ever seen, and shapes vary without end (onnxruntime#11118).
    options.enable_mem_pattern = False
    # An arena keeps the most that any mix of shapes has needed, for each session; over 10,000 shapes there was no end
    # to that. Tiles are as large as the workspace lets them be, and pages fresh from the system would double their time
    # (docs/decisions/0009-small-calls.md, "Bounds").
    options.enable_cpu_mem_arena = name in _OF_TILES
    # Threads that spin while they wait take the cores that other calls could use.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if device != "cpu":
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    try:
        session = ort.InferenceSession(artifact.graph(name), options, providers=_PROVIDERS[device])
    except _REFUSALS as error:
        raise ArtifactError(f"{where}: onnxruntime refuses the graph {name!r}: {error}") from error
    used = session.get_providers()
    if used[0] != _PROVIDER_NAMES[device]:
        raise ArtifactError(f"{where}: onnxruntime would compute on {used[0]} instead of {_PROVIDER_NAMES[device]}")
    return session
