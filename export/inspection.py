"""Is the graph what the contract promises? Axes, opset, operators, names and dtypes are read back from it."""

from collections import Counter
from dataclasses import dataclass
from typing import Final, final

import onnx

from export import signature
from export.errors import InspectionError
from export.signature import FUSED_OPERATORS, FUSED_OPSETS, OPSET, LayerSpec, LoweringSpec, TensorSpec

_DATATYPES: Final[dict[int, str]] = {onnx.TensorProto.FLOAT: "FP32", onnx.TensorProto.INT64: "INT64"}


@final
@dataclass(frozen=True, slots=True)
class GraphFacts:
    """What was read from a graph: its opset and how often it uses each operator, `domain.operator` if not standard."""

    opset: int
    operators: dict[str, int]


def inspect(model: onnx.ModelProto, spec: LayerSpec, lowering: LoweringSpec) -> GraphFacts:
    """Checks the graph of a lowering against the contract.

    Raises:
        InspectionError: the checker or shape inference refuses it, an axis that must be symbolic is fixed, an
            operator is not one that this lowering may use, or a name or dtype differs.
    """
    _check_valid(model)
    operators = Counter(f"{node.domain}.{node.op_type}" if node.domain else node.op_type for node in model.graph.node)
    _check_operators(model, operators, lowering)
    _check_tensors("inputs", model.graph.input, signature.tensors(spec, lowering.inputs))
    _check_tensors("outputs", model.graph.output, signature.tensors(spec, lowering.outputs))
    return GraphFacts(opset=OPSET, operators=dict(sorted(operators.items())))


def _check_valid(model: onnx.ModelProto) -> None:
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise InspectionError(f"graph: {error}") from error


def _check_operators(model: onnx.ModelProto, operators: Counter[str], lowering: LoweringSpec) -> None:
    allowed = {"": OPSET} if lowering.portable else {"": OPSET, **FUSED_OPSETS}
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    if opsets.get("") != OPSET or not opsets.items() <= allowed.items():
        raise InspectionError(f"graph: opsets are {opsets}, want {allowed} at most")
    domains = {node.domain for node in model.graph.node if node.domain}
    foreign = sorted(name for name in operators if "." in name and name not in FUSED_OPERATORS)
    if foreign or model.functions or not domains <= allowed.keys():
        raise InspectionError(f"graph: has operators or functions that {lowering.name} may not use: {foreign}")


def _check_tensors(side: str, got: list[onnx.ValueInfoProto], want: tuple[TensorSpec, ...]) -> None:
    found = tuple(_tensor_spec(value) for value in got)
    if found != want:
        raise InspectionError(f"graph: {side} are {found}, want {want}")


def _tensor_spec(value: onnx.ValueInfoProto) -> TensorSpec:
    tensor = value.type.tensor_type
    axes = tuple(dim.dim_param or dim.dim_value for dim in tensor.shape.dim)
    return TensorSpec(value.name, _DATATYPES.get(tensor.elem_type, f"onnx type {tensor.elem_type}"), axes)
