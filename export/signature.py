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

MODEL_FILE: Final = "model.onnx"
WEIGHTS_FILE: Final = "weights.onnx"


@final
@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Sizes and kind of a layer: all that is needed to rebuild it around its weights."""

    num_hiddens: int
    num_heads: int
    query_size: int
    key_size: int
    value_size: int
    bias: bool
    scoring: str
    scoring_size: int | None

    @property
    def head_size(self) -> int:
        """Features each head sees."""
        return self.num_hiddens // self.num_heads


@final
@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output: a str axis is symbolic and dynamic, an int axis is fixed."""

    name: str
    datatype: str
    axes: tuple[str | int, ...]


def inputs(spec: LayerSpec) -> tuple[TensorSpec, ...]:
    """The four inputs of every graph, in order."""
    return (
        TensorSpec("queries", "FP32", (BATCH, NUM_QUERIES, spec.query_size)),
        TensorSpec("keys", "FP32", (BATCH, NUM_KV, spec.key_size)),
        TensorSpec("values", "FP32", (BATCH, NUM_KV, spec.value_size)),
        TensorSpec("valid_lens", "INT64", (BATCH, NUM_QUERIES)),
    )


def outputs(spec: LayerSpec, *, with_weights: bool) -> tuple[TensorSpec, ...]:
    """`output`, followed by `weights` in the graph that has them."""
    output = TensorSpec("output", "FP32", (BATCH, NUM_QUERIES, spec.num_hiddens))
    weights = TensorSpec("weights", "FP32", (BATCH, spec.num_heads, NUM_QUERIES, NUM_KV))
    return (output, weights) if with_weights else (output,)
