"""Is the graph what the contract promises? Axes, opset, operators, names and dtypes are read back from it."""

from collections import Counter
from dataclasses import dataclass
from typing import Final, final

import onnx

from export import signature
from export.errors import InspectionError
from export.signature import OPSET, LayerSpec, TensorSpec

_DATATYPES: Final[dict[int, str]] = {onnx.TensorProto.FLOAT: "FP32", onnx.TensorProto.INT64: "INT64"}


@final
@dataclass(frozen=True, slots=True)
class GraphFacts:
    """What was read from a graph: its opset and how often it uses each operator."""

    opset: int
    operators: dict[str, int]


def inspect(model: onnx.ModelProto, spec: LayerSpec, *, with_weights: bool) -> GraphFacts:
    """Checks a graph against the contract.

    Raises:
        InspectionError: the checker or shape inference refuses it, an axis that must be symbolic is fixed, an
            operator is not standard, or a name or dtype differs.
    """
    _check_valid(model)
    _check_standard(model)
    graph = model.graph
    _check_tensors("inputs", graph.input, signature.inputs(spec))
    _check_tensors("outputs", graph.output, signature.outputs(spec, with_weights=with_weights))
    return GraphFacts(
        opset=model.opset_import[0].version,
        operators=dict(sorted(Counter(node.op_type for node in graph.node).items())),
    )


def _check_valid(model: onnx.ModelProto) -> None:
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise InspectionError(f"graph: {error}") from error


def _check_standard(model: onnx.ModelProto) -> None:
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    if opsets != {"": OPSET}:
        raise InspectionError(f"graph: opsets are {opsets}, want only the standard one at {OPSET}")
    foreign = sorted({f"{node.domain}::{node.op_type}" for node in model.graph.node if node.domain})
    if foreign or model.functions:
        raise InspectionError(f"graph: has operators or functions that are not standard: {foreign}")


def _check_tensors(side: str, got: list[onnx.ValueInfoProto], want: tuple[TensorSpec, ...]) -> None:
    found = tuple(_tensor_spec(value) for value in got)
    if found != want:
        raise InspectionError(f"graph: {side} are {found}, want {want}")


def _tensor_spec(value: onnx.ValueInfoProto) -> TensorSpec:
    tensor = value.type.tensor_type
    axes = tuple(dim.dim_param or dim.dim_value for dim in tensor.shape.dim)
    return TensorSpec(value.name, _DATATYPES.get(tensor.elem_type, f"onnx type {tensor.elem_type}"), axes)
