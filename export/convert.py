"""A torch layer becomes an ONNX graph: deterministic, one file. `export.lowerings` says what each graph computes."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import onnx
import onnxscript  # noqa: F401  # torch wants it, and would say so only in the middle of an export
import torch
from torch import Tensor

from export.errors import ConversionError
from export.lowerings import lowered
from export.signature import BATCH, NUM_KV, NUM_QUERIES, OPSET, LayerSpec, LoweringSpec, TensorSpec, tensors
from model.attention import MultiHeadAttention

# Sizes at least 2 and all different: with equal ones torch may tie two axes together, with 1 it may fix one.
_EXAMPLE_SIZES: Final = {BATCH: 2, NUM_QUERIES: 3, NUM_KV: 5}
_DTYPES: Final = {"FP32": torch.float32, "INT64": torch.int64}


def spec_of(layer: MultiHeadAttention) -> LayerSpec:
    """Sizes and kind of a layer whose lazy sizes are settled."""
    return LayerSpec(
        num_hiddens=layer.num_hiddens,
        num_heads=layer.num_heads,
        head_size=layer.head_size,
        query_size=layer.W_q.in_features,
        key_size=layer.W_k.in_features,
        value_size=layer.W_v.in_features,
        bias=layer.W_o.bias is not None,
        scoring=layer.scoring,
        scoring_size=layer.scoring_size,
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
        head_size=spec.head_size,
    ).eval()


def to_onnx(layer: MultiHeadAttention, lowering: LoweringSpec) -> onnx.ModelProto:
    """One graph of a layer in eval mode, with dynamic batch, num_queries and num_kv.

    The same weights give the same bytes: everything torch notes about the machine and the call is stripped.

    Raises:
        ConversionError: torch gave up; its reason is in the message.
    """
    inputs = tensors(spec_of(layer), lowering.inputs)
    try:
        with _quiet_exporter():
            program = torch.onnx.export(
                lowered(layer, lowering.name).eval(),
                tuple(_example(tensor) for tensor in inputs),
                dynamo=True,
                opset_version=OPSET,
                dynamic_shapes={tensor.name: _dynamic_axes(tensor) for tensor in inputs},
                output_names=lowering.outputs,
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


def _example(tensor: TensorSpec) -> Tensor:
    sizes = [_EXAMPLE_SIZES[axis] if isinstance(axis, str) else axis for axis in tensor.axes]
    return torch.zeros(sizes, dtype=_DTYPES[tensor.datatype])


def _dynamic_axes(tensor: TensorSpec) -> dict[int, str]:
    return {index: axis for index, axis in enumerate(tensor.axes) if isinstance(axis, str)}


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
