"""The Open Inference Protocol's infer request and response: JSON, with Triton's binary tensor extension.

Pure. Spec: kserve/open-inference-protocol, inference_rest.md, and Triton's extension_binary_data.md. A body is a
JSON header followed by the bytes of each binary tensor, in the order of the header, with nothing between.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import ml_dtypes
import numpy as np
import orjson

from service.codec import Body, Chunk
from service.codec.binary import memory_of, view
from service.codec.json_arrays import (
    array,
    count_lists,
    is_array,
    is_object,
    kind_of,
    parse_object,
    refuse_hidden_lists,
)
from service.errors import InvalidDtype, InvalidParameter, InvalidShape, MalformedBody
from service.sequences import Array
from service.tensors import AttentionOutput, WireTensors, refuse_unknown
from service.wanted import WantedWeights

DATATYPES: Final[Mapping[str, np.dtype[Any]]] = {
    "FP16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "INT8": np.dtype("i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "UINT8": np.dtype("u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "BOOL": np.dtype("?"),
}
# Packed tensors have no place in a signature of three axes.
INPUT_NAMES: Final = ("queries", "keys", "values", "valid_lens")
OUTPUT_NAMES: Final = ("output", "weights")

_NAMES: Final = {dtype: name for name, dtype in DATATYPES.items()}
_BINARY_ONLY: Final = ("FP16", "BF16")
_REQUEST_FIELDS: Final = ("id", "parameters", "inputs", "outputs")
_INPUT_FIELDS: Final = ("name", "shape", "datatype", "parameters", "data")
_OUTPUT_FIELDS: Final = ("name", "parameters")
_LARGEST: Final = 2**63
_MAX_AXES: Final = 8
_MAX_FIELDS: Final = 64


@final
@dataclass(frozen=True, slots=True)
class InferRequest:
    """An infer request, its tensors not judged yet.

    Attributes:
        id: to be echoed; None if there was none.
        tensors: views of the body where they came as binary.
        outputs: what is asked for, in order; True where the client wants it binary.
        weights: which of them, if they are among the outputs.
        timeout_us: `parameters.timeout`, in microseconds; None if there was none.
    """

    id: str | None
    tensors: WireTensors
    outputs: Mapping[str, bool]
    weights: WantedWeights | None
    timeout_us: int | None


@final
@dataclass(frozen=True, slots=True)
class InferResponse:
    """A response's body; `header_length` is None where all of it is JSON."""

    chunks: Sequence[Chunk]
    header_length: int | None


def decode_request(body: Body, header_length: int | None) -> InferRequest:
    """The request in a body.

    Args:
        body: decompressed.
        header_length: of `Inference-Header-Content-Length`; None without it, and then all of the body is JSON.

    Raises:
        MalformedBody: not the protocol. InvalidShape, InvalidDtype: a tensor is not what it declares.
        InvalidParameter: a parameter means nothing, or asks for an extension that is not here.
    """
    length = _header_length(body, header_length)
    text = bytes(memoryview(body)[:length])
    request = _fields("body", parse_object(text, "inputs"), _REQUEST_FIELDS)
    parameters = _parameters("parameters", request.get("parameters"))
    _refuse_sequences(parameters)
    inputs = _read_inputs(request.get("inputs"), memoryview(body)[length:])
    outputs = request.get("outputs")
    # Beside the data there are the lists of inputs and outputs, and a shape for each input.
    arrays = [(name, entry.json, count_lists(entry.nested)) for name, entry in inputs.items() if entry.json is not None]
    refuse_hidden_lists(text, 1 + len(inputs) + is_array(outputs), arrays)
    _count("parameters", parameters, "priority")  # judged now, honoured once the queue knows priorities
    binary_by_default = _flag("parameters", parameters, "binary_data_output", default=False)
    asked = _asked_weights(parameters)
    requested = _requested(outputs, binary_by_default, with_weights=asked is not None)
    return InferRequest(
        id=_identifier(request.get("id")),
        tensors=WireTensors({name: tensor.values for name, tensor in inputs.items()}),
        outputs=requested,
        weights=(asked or WantedWeights()) if "weights" in requested else None,
        timeout_us=_count("parameters", parameters, "timeout"),
    )


def encode_response(model: str, version: int, request: InferRequest, output: AttentionOutput) -> InferResponse:
    """The response to a request: each tensor as JSON or as its own memory, as it was asked for.

    Raises:
        InvalidDtype: an answer in half precision was asked for as JSON, which the protocol does not have.
    """
    entries: list[dict[str, Any]] = []
    binary: list[Chunk] = []
    tensors = output.named()
    for name, wants_binary in request.outputs.items():
        tensor = tensors[name]
        entry: dict[str, Any] = {"name": name, "datatype": _NAMES[tensor.dtype], "shape": tensor.shape}
        if wants_binary:
            entry["parameters"] = {"binary_data_size": tensor.nbytes}
            binary.append(memory_of(tensor))
        else:
            _refuse_binary_only(f"output {name!r}", entry["datatype"])
            entry["data"] = np.ascontiguousarray(tensor).reshape(-1)
        entries.append(entry)
    response: dict[str, Any] = {"model_name": model, "model_version": str(version), "outputs": entries}
    if request.id is not None:
        response["id"] = request.id
    header = orjson.dumps(response, option=orjson.OPT_SERIALIZE_NUMPY)
    return InferResponse((header, *binary), len(header) if binary else None)


def _header_length(body: Body, stated: int | None) -> int:
    if stated is None:
        return len(body)
    if stated > len(body):
        raise MalformedBody(f"Inference-Header-Content-Length: got {stated}, the body has {len(body)} bytes")
    if stated == 0:
        raise MalformedBody(
            "Inference-Header-Content-Length: 0 means a raw binary request, which only models with one input take; "
            "send a JSON header that names the inputs"
        )
    return stated


def _identifier(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise MalformedBody(f"id: want a string, got {kind_of(value)}")
    return value


# Inputs


@final
@dataclass(frozen=True, slots=True)
class _Input:
    """One input read; `json` is where its numbers came from, and `nested` how, if they came as JSON."""

    values: Array
    json: Any = None
    nested: tuple[int, ...] = ()


def _read_inputs(inputs: Any, data: memoryview) -> dict[str, _Input]:
    if not is_array(inputs):
        raise MalformedBody(f"inputs: want a list of tensors, got {'nothing' if inputs is None else kind_of(inputs)}")
    read: dict[str, _Input] = {}
    for index, value in enumerate(inputs):
        where = f"inputs[{index}]"
        entry = _fields(where, value, _INPUT_FIELDS)
        name = _text(where, entry, "name")
        refuse_unknown((name,), INPUT_NAMES)
        if name in read:
            raise MalformedBody(f"inputs: {name!r} is given twice")
        read[name], data = _read_input(name, _text(where, entry, "datatype"), entry, data)
    if len(data):
        raise MalformedBody(f"body: {len(data)} bytes behind the header belong to no input")
    return read


def _read_input(name: str, datatype: str, entry: Mapping[str, Any], data: memoryview) -> tuple[_Input, memoryview]:
    """The input, and the binary data that is left."""
    if datatype not in DATATYPES:
        raise InvalidDtype(f"{name}: datatype is {datatype[:32]!r}, want one of {', '.join(DATATYPES)}")
    shape = _shape(name, entry.get("shape"))
    parameters = _parameters(f"{name}: parameters", entry.get("parameters"))
    if any(parameter.startswith("shared_memory") for parameter in parameters):
        raise InvalidParameter(f"{name}: shared memory is not offered; send the tensor in the body")
    size = _count(name, parameters, "binary_data_size")
    if (size is None) == (entry.get("data") is None):
        raise MalformedBody(f"{name}: want either data or parameters.binary_data_size")
    if size is None:
        return _from_json(name, datatype, shape, entry["data"]), data
    return _Input(_from_binary(name, datatype, shape, data, size)), data[size:]


def _from_binary(name: str, datatype: str, shape: tuple[int, ...], data: memoryview, size: int) -> Array:
    dtype = DATATYPES[datatype]
    want = math.prod(shape) * dtype.itemsize
    if size != want:
        raise InvalidShape(f"{name}: binary_data_size is {size}, shape {list(shape)} of {datatype} wants {want}")
    if size > len(data):
        raise MalformedBody(f"{name}: binary_data_size is {size}, but {len(data)} bytes are left in the body")
    return view(name, data[:size], dtype, shape)


def _from_json(name: str, datatype: str, shape: tuple[int, ...], value: Any) -> _Input:
    _refuse_binary_only(name, datatype)
    dtype = DATATYPES[datatype]
    data = array(name, value, integers=dtype.kind != "f")
    if data.size != math.prod(shape):
        raise InvalidShape(f"{name}: data has {data.size} elements, shape {list(shape)} wants {math.prod(shape)}")
    if data.shape not in (shape, (data.size,)):
        raise InvalidShape(f"{name}: data is nested as {list(data.shape)}, want {list(shape)} or one flat list")
    with np.errstate(over="ignore"):  # what becomes infinite is refused, where it counts, as not finite
        typed = data.astype(dtype) if dtype.kind == "f" else data
    return _Input(typed.reshape(shape), value, data.shape)


def _shape(name: str, value: Any) -> tuple[int, ...]:
    sizes = value.as_list() if is_array(value) and len(value) <= _MAX_AXES else None
    if sizes is None or not all(type(size) is int and 0 <= size < _LARGEST for size in sizes):
        raise MalformedBody(f"{name}: shape: want a list of at most {_MAX_AXES} sizes")
    return tuple(sizes)


# Outputs


def _asked_weights(parameters: Mapping[str, Any]) -> WantedWeights | None:
    """By the request's own parameters, since clients of the protocol can give none with an output."""
    need_weights, heads = parameters.get("need_weights"), parameters.get("heads")
    if not isinstance(need_weights, bool | str | None):
        raise InvalidParameter(f'need_weights: want true, false or "mean", got {kind_of(need_weights)}')
    if type(heads) not in (int, str, type(None)):
        raise InvalidParameter(f'heads: want text such as "0,3", or one number, got {kind_of(heads)}')
    return WantedWeights.parse(
        str(need_weights) if need_weights is not None else None, str(heads) if heads is not None else None
    )


def _requested(outputs: Any, binary_by_default: bool, *, with_weights: bool) -> Mapping[str, bool]:
    """The outputs asked for. None named means all that parameters ask for: the output, and weights if they do."""
    if outputs is None or (is_array(outputs) and len(outputs) == 0):
        return dict.fromkeys(OUTPUT_NAMES if with_weights else OUTPUT_NAMES[:1], binary_by_default)
    if not is_array(outputs):
        raise MalformedBody(f"outputs: want a list, got {kind_of(outputs)}")
    requested: dict[str, bool] = {}
    for index, value in enumerate(outputs):
        where = f"outputs[{index}]"
        entry = _fields(where, value, _OUTPUT_FIELDS)
        name = _text(where, entry, "name")
        if name not in OUTPUT_NAMES or name in requested:
            raise MalformedBody(f"{where}: got {name[:64]!r}, want each of {' and '.join(OUTPUT_NAMES)} at most once")
        requested[name] = _wants_binary(where, entry, binary_by_default)
    if with_weights and "weights" not in requested:
        raise InvalidParameter("need_weights or heads: weights are not among the outputs; name them, or no output")
    return requested


def _wants_binary(where: str, entry: Mapping[str, Any], default: bool) -> bool:
    parameters = _parameters(f"{where}: parameters", entry.get("parameters"))
    if "classification" in parameters or any(name.startswith("shared_memory") for name in parameters):
        raise InvalidParameter(f"{where}: classification and shared memory are not offered")
    return _flag(where, parameters, "binary_data", default)


def _refuse_binary_only(where: str, datatype: str) -> None:
    if datatype in _BINARY_ONLY:
        raise InvalidDtype(f"{where}: {datatype} exists only as binary data, not in JSON")


# Parts of JSON


def _fields(where: str, value: Any, known: Sequence[str] | None) -> dict[str, Any]:
    """The members of an object, each named once; if `known` is given, no other."""
    if not is_object(value):
        raise MalformedBody(f"{where}: want an object, got {kind_of(value)}")
    fields: dict[str, Any] = {}
    for name in value:
        if known is not None and name not in known:
            raise MalformedBody(f"{where}: unknown field {name[:64]!r}, want {', '.join(known)}")
        if name in fields or len(fields) == _MAX_FIELDS:
            raise MalformedBody(f"{where}: {name[:64]!r} is given twice, or there are more than {_MAX_FIELDS} fields")
        fields[name] = value[name]
    return fields


def _text(where: str, entry: Mapping[str, Any], field: str) -> str:
    value = entry.get(field)
    if not isinstance(value, str):
        raise MalformedBody(f"{where}: {field}: want a string, got {'nothing' if value is None else kind_of(value)}")
    return value


def _parameters(where: str, value: Any) -> dict[str, Any]:
    return {} if value is None else _fields(where, value, known=None)


def _count(where: str, parameters: Mapping[str, Any], name: str) -> int | None:
    value = parameters.get(name)
    if value is not None and (type(value) is not int or not 0 <= value < _LARGEST):
        raise InvalidParameter(f"{where}: {name}: want a number of 0 or more, got {kind_of(value)}")
    return value


def _flag(where: str, parameters: Mapping[str, Any], name: str, default: bool) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise InvalidParameter(f"{where}: {name}: want true or false, got {kind_of(value)}")
    return value


def _refuse_sequences(parameters: Mapping[str, Any]) -> None:
    if any(parameters.get(name) for name in ("sequence_id", "sequence_start", "sequence_end")):
        raise InvalidParameter("parameters: sequences are not offered; every request stands alone")
