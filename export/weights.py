"""A layer's parameters, read back from its portable graph.

An exporter names weights as it likes and keeps them transposed, so each is recognised by what it multiplies.
Imports onnx and numpy only.
"""

from collections.abc import Mapping
from typing import Any, Final

import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

_PROJECTED: Final = {"queries": "W_q", "keys": "W_k", "values": "W_v"}
# What these do to their first input changes no value; the others of their inputs are shapes and axes.
_RESHAPING: Final = ("Cast", "Expand", "Reshape", "Slice", "Transpose", "Unsqueeze")
_BIAS: Final = ".bias"


def weights_of(graph: onnx.GraphProto) -> dict[str, NDArray[Any]]:
    """The layer's parameters by the names that it gives them."""
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    makers = {output: node for node in graph.node for output in node.output}
    weights = {name[name.index("W_") :]: array for name, array in arrays.items() if name.endswith(_BIAS)}
    for node in graph.node:
        if node.op_type == "MatMul" and node.input[1] in arrays:
            array = arrays[node.input[1]]
            weights[f"{_name(node, _read(node.input[0], makers), array.shape[1])}.weight"] = array.T
    return weights


def _name(node: onnx.NodeProto, reads: frozenset[str], num_outputs: int) -> str:
    if node.input[0] in _PROJECTED:
        return _PROJECTED[node.input[0]]
    if reads == {"queries", "keys"} and num_outputs == 1:
        return "attention.w_v"
    if len(reads) == 1:
        (read,) = reads
        return f"attention.{_PROJECTED[read]}"
    return "W_o"


def _read(name: str, makers: Mapping[str, onnx.NodeProto]) -> frozenset[str]:
    # Which of the inputs a value depends on.
    if name in _PROJECTED:
        return frozenset({name})
    node = makers.get(name)
    if node is None:
        return frozenset()
    inputs = node.input[:1] if node.op_type in _RESHAPING else node.input
    return frozenset[str]().union(*(_read(one, makers) for one in inputs))
