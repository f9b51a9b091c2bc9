"""ONNX Runtime behind the `Engine` contract."""

import statistics
import time
from typing import Any, Final, final

import numpy as np
import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from service.artifact import Artifact, Layer
from service.cost import CostModel, row_flops
from service.engine import EngineCall, EngineResult
from service.engine.device import DeviceName
from service.errors import ArtifactError

_PROVIDERS: Final[dict[DeviceName, list[Any]]] = {
    "cpu": ["CPUExecutionProvider"],
    # TF32 is off because it costs three decimal digits; memory grows by what is asked, since shapes vary.
    "cuda": [("CUDAExecutionProvider", {"use_tf32": "0", "arena_extend_strategy": "kSameAsRequested"})],
}
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
# Long enough to be work, short enough that measuring takes a fraction of a second also for wide layers.
_WORK_LENGTH: Final = 64
_MEASURED_CALLS: Final = 5
_PROVIDER_NAMES: Final = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


@final
class OnnxEngine:
    """Sessions over the verified bytes of an artefact: one that answers the output, one that adds the weights.

    ONNX Runtime's `run` may be called from several threads at once; each call uses `threads` of them.

    Raises:
        ArtifactError: the runtime refuses a graph or cannot run it, or would compute on another device than asked.
    """

    def __init__(self, artifact: Artifact, device: DeviceName, threads: int) -> None:
        self._plain = _session(artifact, "masked", device, threads)
        self._weighted = _session(artifact, "weights", device, threads)
        try:
            self.cost = self._measure(artifact.layer)
        except (*_REFUSALS, ValueError) as error:  # ValueError: the graph's inputs have other names
            raise ArtifactError(
                f"{artifact.name}/{artifact.version}: onnxruntime cannot run the graph: {error}"
            ) from error

    def run(self, call: EngineCall) -> EngineResult:
        """The layer's answer to one call."""
        feed = {"queries": call.queries, "keys": call.keys, "values": call.values, "valid_lens": call.valid_lens}
        if call.need_weights:
            output, weights = self._weighted.run(["output", "weights"], feed)
            return EngineResult(output, weights)
        (output,) = self._plain.run(["output"], feed)
        return EngineResult(output, None)

    def _measure(self, layer: Layer) -> CostModel:
        """Warms both graphs up, and times a call that is next to nothing and one that is real work."""
        self.run(_call(layer, 1, need_weights=True))
        call_s = self._median_s(_call(layer, 1))
        work_s = self._median_s(_call(layer, _WORK_LENGTH))
        return CostModel(call_s, max(work_s - call_s, 1e-9) / row_flops(layer, _WORK_LENGTH, _WORK_LENGTH))

    def _median_s(self, call: EngineCall) -> float:
        seconds = []
        for _ in range(_MEASURED_CALLS):
            started = time.perf_counter()
            self.run(call)
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds)


def _call(layer: Layer, length: int, *, need_weights: bool = False) -> EngineCall:
    queries, keys, values = (
        np.zeros((1, length, size), np.float32) for size in (layer.query_size, layer.key_size, layer.value_size)
    )
    return EngineCall(queries, keys, values, np.full((1, length), length, np.int64), need_weights)


def _session(artifact: Artifact, lowering: str, device: DeviceName, threads: int) -> ort.InferenceSession:
    where = f"{artifact.name}/{artifact.version}"
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads  # an explicit count also keeps the runtime from pinning threads to cores
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.log_severity_level = 3
    # A memory pattern is kept for every shape ever seen, and shapes vary without end (onnxruntime#11118).
    options.enable_mem_pattern = False
    # Threads that spin while they wait take the cores that other calls could use.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if device != "cpu":
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    try:
        session = ort.InferenceSession(artifact.graph(lowering), options, providers=_PROVIDERS[device])
    except _REFUSALS as error:
        raise ArtifactError(f"{where}: onnxruntime refuses the graph: {error}") from error
    used = session.get_providers()
    if used[0] != _PROVIDER_NAMES[device]:
        raise ArtifactError(f"{where}: onnxruntime would compute on {used[0]} instead of {_PROVIDER_NAMES[device]}")
    return session
