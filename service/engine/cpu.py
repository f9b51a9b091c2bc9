"""An artefact's graphs on the CPU: which of them computes a call, on how many threads."""

import dataclasses
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from service.artifact import Artifact
from service.cost import CostModel, row_flops
from service.engine import EngineCall, EngineResult, Floats, Projected, Recall, find_out_anew
from service.engine.sessions import CPU, REFUSALS, Sessions
from service.engine.warmup import call_of, feed_of, least_s, measure, unmasked_choice
from service.errors import ArtifactError

# From next to nothing to real work; the longest takes a fraction of a second also for wide layers.
_MEASURED_LENGTHS: Final = (1, 4, 16, 64, 128)
# What several threads must save to be worth the cores that they take from everything else.
_LEAST_WIDE_GAIN: Final = 0.8


@final
class CpuEngine:
    """The graphs of one artefact. ONNX Runtime's `run` may be called from several threads at once.

    Which graph is faster where every key counts, and from which size on several threads are, is measured at the start.
    Every graph is run once then. Those that are seldom needed are not kept, since each holds the weights in memory, and
    are loaded again when they first are.

    Args:
        artifact: verified.
        threads: of each call.
        threads_alone: of a call that has the machine to itself.
        recall: what was measured under a name, which the second argument measures if nobody has yet: processes of one
            server need not each do it, least of all at the same time.

    Raises:
        ArtifactError: the runtime refuses a graph or cannot run it.
    """

    def __init__(self, artifact: Artifact, threads: int, threads_alone: int, recall: Recall = find_out_anew) -> None:
        self._sessions = Sessions(artifact, CPU, threads_alone if threads_alone > threads else 0)
        self._threads = threads
        self._threads_alone = threads_alone
        self._layer = artifact.layer
        try:
            measured = recall(f"{artifact.digest} cpu {threads} {threads_alone}", self._measure)
            self._unmasked = unmasked_choice(measured)
            self._alone_from_flops = measured["alone_from_flops"]
            self.cost = CostModel(tuple(zip(measured["flops"], measured["seconds"], strict=True)))
            self._try()
        except (*REFUSALS, ValueError) as error:  # ValueError: the graph's inputs have other names
            raise ArtifactError(
                f"{artifact.name}/{artifact.version}: onnxruntime cannot run the graph: {error}"
            ) from error

    @property
    def fault(self) -> None:
        """A CPU goes on after any failure."""
        return

    def run(self, call: EngineCall) -> EngineResult:
        """The layer's answer to one call."""
        if call.need_weights:
            output, weights = self._run("weights", self._threads, feed_of("weights", call))
            return EngineResult(output, weights)
        rows, num_queries = call.queries.shape[:2]
        flops = rows * row_flops(self._layer, num_queries, call.keys.shape[1])
        threads = self._threads_alone if call.alone and flops >= self._alone_from_flops else self._threads
        name = "masked" if call.valid_lens is not None else self._unmasked.at(flops)
        return EngineResult(self._run(name, threads, feed_of(name, call))[0], None)

    def project(self, keys: Floats, values: Floats) -> Projected:
        """The projections of keys and values."""
        return Projected(*self._run("project", self._threads, {"keys": keys, "values": values}))

    def attend(self, queries: Floats, projected: Projected, valid_lens: NDArray[np.int64] | None) -> Floats:
        """The output of queries that attend to projected keys and values."""
        feed = {"queries": queries, "projected_keys": projected.keys, "projected_values": projected.values}
        if valid_lens is None:
            return self._run("attend_full", self._threads, feed)[0]
        return self._run("attend", self._threads, {**feed, "valid_lens": valid_lens})[0]

    def _run(self, name: str, threads: int, feed: dict[str, Any]) -> list[Floats]:
        graph = self._sessions.graph(name, threads)
        results: list[Floats] = graph.session.run(graph.outputs, feed)
        return results

    def _measure(self) -> dict[str, Any]:
        """Which graph, how many threads and how long, from small calls to larger ones. As JSON has it."""
        layer = self._layer
        measured = measure(layer, _MEASURED_LENGTHS, self._run_narrow)
        alone_from_flops = float("inf")
        if self._threads_alone > self._threads:
            alone = [least_s(["full"], call_of(layer, length), self._run_wide)[0] for length in _MEASURED_LENGTHS]
            alone_from_flops = _from_where(measured["flops"], alone, measured["seconds"])
        return {**measured, "alone_from_flops": alone_from_flops}

    def _run_narrow(self, name: str, call: EngineCall) -> object:
        return self._run(name, self._threads, feed_of(name, call))

    def _run_wide(self, name: str, call: EngineCall) -> object:
        return self._run(name, self._threads_alone, feed_of(name, call))

    def _try(self) -> None:
        """Runs every graph, and forgets those that are seldom needed."""
        call = call_of(self._layer, 2)
        for name in ("full", "masked"):
            self._run_narrow(name, call)
        if self._alone_from_flops < float("inf"):
            self._run_wide("full", call)
        self.run(dataclasses.replace(call, need_weights=True))
        projected = self.project(call.keys, call.values)
        self.attend(call.queries, projected, np.full((1, 2), 2))
        self.attend(call.queries, projected, None)
        self._sessions.forget({"weights", "project", "attend", "attend_full"})


def _from_where(flops: list[float], alone: list[float], narrow: list[float]) -> float:
    """The size from which on the first is faster by enough; infinite if it is not at the largest."""
    start = float("inf")
    for size, alone_s, narrow_s in zip(reversed(flops), reversed(alone), reversed(narrow), strict=True):
        if alone_s > _LEAST_WIDE_GAIN * narrow_s:
            break
        start = size
    return start
