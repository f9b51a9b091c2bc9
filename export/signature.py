"""The contract of an exported graph: names, dtypes and axes, in one place.

Everything that writes or checks a graph reads it here. Imports nothing of the project.
"""

from dataclasses import dataclass
from typing import Final, final

OPSET: Final = 20
"""Lowest opset that holds every operator used (torch's own default), so that older runtimes load the file too."""

BATCH: Final = "batch"
NUM_QUERIES: Final = "num_queries"
NUM_KV: Final = "num_kv"

FUSED_OPSETS: Final = {"com.microsoft": 1}
"""Domains beside the standard one that a lowering which is not portable may use, with their versions."""

FUSED_OPERATORS: Final = frozenset({"com.microsoft.MultiHeadAttention"})
"""Operators of those domains that it may use."""


@final
@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Sizes and kind of a layer: all that is needed to rebuild it around its weights."""

    num_hiddens: int
    num_heads: int
    head_size: int
    query_size: int
    key_size: int
    value_size: int
    bias: bool
    scoring: str
    scoring_size: int | None


@final
@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output: a str axis is symbolic and dynamic, an int axis is fixed."""

    name: str
    datatype: str
    axes: tuple[str | int, ...]


@final
@dataclass(frozen=True, slots=True)
class LoweringSpec:
    """One graph of an artefact: what it takes and answers, by name, and whether standard operators are all it needs.

    A lowering without `valid_lens` among its inputs is for calls in which every key of every row counts.
    """

    name: str
    file: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    portable: bool

    @property
    def masks(self) -> bool:
        """Whether it knows of valid lengths."""
        return "valid_lens" in self.inputs


_CALL: Final = ("queries", "keys", "values")
_PROJECTED: Final = ("projected_keys", "projected_values")

MASKED: Final = LoweringSpec("masked", "model.onnx", (*_CALL, "valid_lens"), ("output",), portable=True)
WEIGHTS: Final = LoweringSpec("weights", "weights.onnx", (*_CALL, "valid_lens"), ("output", "weights"), portable=True)
FULL: Final = LoweringSpec("full", "full.onnx", _CALL, ("output",), portable=False)
PROJECT: Final = LoweringSpec("project", "project.onnx", ("keys", "values"), _PROJECTED, portable=True)
ATTEND: Final = LoweringSpec(
    "attend", "attend.onnx", ("queries", *_PROJECTED, "valid_lens"), ("output",), portable=True
)
ATTEND_FULL: Final = LoweringSpec(
    "attend_full", "attend_full.onnx", ("queries", *_PROJECTED), ("output",), portable=False
)

LOWERINGS: Final = (MASKED, WEIGHTS, FULL, PROJECT, ATTEND, ATTEND_FULL)
"""Every graph of an artefact, `project` before those that take what it answers."""


def tensors(spec: LayerSpec, names: tuple[str, ...]) -> tuple[TensorSpec, ...]:
    """The named tensors of a layer, inputs and outputs of any of its lowerings."""
    projected = (BATCH, spec.num_heads, NUM_KV, spec.head_size)
    known = {
        "queries": ("FP32", (BATCH, NUM_QUERIES, spec.query_size)),
        "keys": ("FP32", (BATCH, NUM_KV, spec.key_size)),
        "values": ("FP32", (BATCH, NUM_KV, spec.value_size)),
        "valid_lens": ("INT64", (BATCH, NUM_QUERIES)),
        "projected_keys": ("FP32", projected),
        "projected_values": ("FP32", projected),
        "output": ("FP32", (BATCH, NUM_QUERIES, spec.num_hiddens)),
        "weights": ("FP32", (BATCH, spec.num_heads, NUM_QUERIES, NUM_KV)),
    }
    return tuple(TensorSpec(name, *known[name]) for name in names)
