"""A torch layer becomes an ONNX graph: portable, deterministic, one file.

The decomposed form (MatMul, Where, Softmax, MatMul) is kept on purpose: it is the only one in standard operators that
gives a row of length 0 the seeds' answer; fused attention operators return zeros there (docs/decisions/0002).
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import onnx
import onnxscript  # noqa: F401  # torch wants it, and would say so only in the middle of an export
import torch
from torch import Tensor, nn

from export.errors import ConversionError
from export.signature import BATCH, NUM_KV, NUM_QUERIES, OPSET, LayerSpec
from model.attention import MultiHeadAttention
from model.scoring import AdditiveAttention


@final
class _Exported(nn.Module):
    """The layer as the graph has it: valid_lens always given, as (B, Q)."""

    def __init__(self, layer: MultiHeadAttention, with_weights: bool) -> None:
        super().__init__()
        self.layer = layer
        self.with_weights = with_weights

    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Tensor
    ) -> Tensor | tuple[Tensor, Tensor]:
        answer: Tensor | tuple[Tensor, Tensor] = self.layer(queries, keys, values, valid_lens, self.with_weights)
        return answer


def spec_of(layer: MultiHeadAttention) -> LayerSpec:
    """Sizes and kind of a layer whose lazy sizes are settled."""
    scoring = layer.attention
    return LayerSpec(
        num_hiddens=layer.num_hiddens,
        num_heads=layer.num_heads,
        query_size=layer.W_q.in_features,
        key_size=layer.W_k.in_features,
        value_size=layer.W_v.in_features,
        bias=layer.W_o.bias is not None,
        scoring=layer.scoring,
        scoring_size=scoring.w_v.in_features if isinstance(scoring, AdditiveAttention) else None,
    )


def rebuild(spec: LayerSpec) -> MultiHeadAttention:
    """A layer of that spec in eval mode, its weights still to be loaded."""
    return MultiHeadAttention(
        spec.num_hiddens,
        spec.num_heads,
        bias=spec.bias,
        query_size=spec.query_size,
        key_size=spec.key_size,
        value_size=spec.value_size,
        scoring=spec.scoring,
        scoring_size=spec.scoring_size,
    ).eval()


def to_onnx(layer: MultiHeadAttention, *, with_weights: bool) -> onnx.ModelProto:
    """The graph of a layer in eval mode, with dynamic batch, num_queries and num_kv.

    The same weights give the same bytes: everything torch notes about the machine and the call is stripped.

    Raises:
        ConversionError: torch gave up; its reason is in the message.
    """
    spec = spec_of(layer)
    output_names = ["output", "weights"] if with_weights else ["output"]
    try:
        with _quiet_exporter():
            program = torch.onnx.export(
                _Exported(layer, with_weights).eval(),
                _example(spec),
                dynamo=True,
                opset_version=OPSET,
                dynamic_shapes={
                    "queries": {0: BATCH, 1: NUM_QUERIES},
                    "keys": {0: BATCH, 1: NUM_KV},
                    "values": {0: BATCH, 1: NUM_KV},
                    "valid_lens": {0: BATCH, 1: NUM_QUERIES},
                },
                output_names=output_names,
                external_data=False,
                verbose=False,
            )
    except torch.onnx.errors.OnnxExporterError as error:
        raise ConversionError(f"torch.onnx.export: {error}") from error
    if program is None:
        raise ConversionError("torch.onnx.export returned no program")
    model = program.model_proto
    _strip(model)
    return model


def serialise(model: onnx.ModelProto) -> bytes:
    """The bytes of a graph, equal for equal graphs."""
    data: bytes = model.SerializeToString(deterministic=True)
    return data


def _example(spec: LayerSpec) -> tuple[Tensor, ...]:
    # Sizes at least 2 and all different: with equal ones torch may tie two axes together, with 1 it may fix one.
    batch, num_queries, num_kv = 2, 3, 5
    return (
        torch.zeros(batch, num_queries, spec.query_size),
        torch.zeros(batch, num_kv, spec.key_size),
        torch.zeros(batch, num_kv, spec.value_size),
        torch.full((batch, num_queries), num_kv, dtype=torch.int64),
    )


def _strip(model: onnx.ModelProto) -> None:
    model.ClearField("metadata_props")
    model.ClearField("doc_string")
    graph = model.graph
    graph.ClearField("metadata_props")
    graph.ClearField("doc_string")
    graph.ClearField("value_info")
    for part in (*graph.node, *graph.initializer, *graph.input, *graph.output):
        part.ClearField("metadata_props")
        part.ClearField("doc_string")


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    # torch warns that torchvision is absent and that shared axis names are shared: neither is news to a user.
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
