"""What the Open Inference Protocol says of a server and its models, in the protocol's own words and fields.

Spec: kserve/open-inference-protocol, inference_rest.md; Triton, docs/protocol/extension_model_configuration.md and
extension_statistics.md. Fields that perf_analyzer reads without asking are all here.
"""

from typing import Any, Final

from service.artifact import Artifact, Tensor
from service.catalog import ServedModel
from service.library import IndexEntry
from service.statistics import Duration, ModelStatistics, Stages

EXTENSIONS: Final = ("binary_tensor_data", "model_configuration", "model_repository", "parameters", "statistics")
PLATFORM: Final = "onnxruntime_onnx"
_OPTIONAL: Final = ("keys", "values", "valid_lens")


def model_metadata(model: ServedModel, versions: list[ServedModel]) -> dict[str, Any]:
    """Names, types and shapes; -1 is a dynamic axis."""
    signature = model.artifact.manifest.signature
    return {
        "name": model.artifact.name,
        "versions": [str(one.artifact.version) for one in versions],
        "platform": PLATFORM,
        "inputs": [_metadata_tensor(tensor) for tensor in signature.inputs],
        "outputs": [_metadata_tensor(tensor) for tensor in signature.outputs],
    }


def model_config(model: ServedModel) -> dict[str, Any]:
    """The configuration in Triton's terms. Batching is the service's own, so there is no batch axis to add."""
    signature = model.artifact.manifest.signature
    return {
        "name": model.artifact.name,
        "platform": PLATFORM,
        "backend": "onnxruntime",
        "version_policy": {"all": {}},
        "max_batch_size": 0,
        "input": [{**_config_tensor(tensor), "optional": tensor.name in _OPTIONAL} for tensor in signature.inputs],
        "output": [_config_tensor(tensor) for tensor in signature.outputs],
        "model_transaction_policy": {"decoupled": False},
        "response_cache": {"enable": False},
    }


def model_statistics(artifact: Artifact, statistics: ModelStatistics) -> dict[str, Any]:
    """Counts and times since the model was loaded; nanoseconds."""
    never = Duration()
    return {
        "name": artifact.name,
        "version": str(artifact.version),
        "last_inference": statistics.last_answer_ms,
        "inference_count": statistics.rows,
        "execution_count": statistics.calls,
        "inference_stats": {
            "success": _duration(statistics.success),
            "fail": _duration(statistics.failure),
            "queue": _duration(statistics.stages.queue),
            **_compute(statistics.stages),
            "cache_hit": _duration(never),
            "cache_miss": _duration(never),
        },
        "response_stats": {},
        "batch_stats": [
            {"batch_size": batch, **_compute(stages)} for batch, stages in sorted(statistics.by_batch.items())
        ],
        "memory_usage": [],
    }


def index_entry(entry: IndexEntry) -> dict[str, Any]:
    """One line of the repository index."""
    return {
        "name": entry.name,
        "version": str(entry.version),
        "state": "READY" if entry.ready else "UNAVAILABLE",
        "reason": entry.reason,
    }


def _metadata_tensor(tensor: Tensor) -> dict[str, Any]:
    # The graph's own valid_lens are (batch, num_queries); a request may have (batch,), or other integers.
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": _shape(tensor)}


def _config_tensor(tensor: Tensor) -> dict[str, Any]:
    return {"name": tensor.name, "data_type": f"TYPE_{tensor.datatype}", "dims": _shape(tensor)}


def _shape(tensor: Tensor) -> list[int]:
    return [-1 if isinstance(axis, str) else axis for axis in tensor.axes]


def _compute(stages: Stages) -> dict[str, Any]:
    return {
        "compute_input": _duration(stages.decode),
        "compute_infer": _duration(stages.compute),
        "compute_output": _duration(stages.encode),
    }


def _duration(duration: Duration) -> dict[str, int]:
    return {"count": duration.count, "ns": duration.nanoseconds}
