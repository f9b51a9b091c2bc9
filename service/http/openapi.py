"""OpenAPI entries of the inference routes, which FastAPI cannot derive from plain ASGI applications.

Every example is made for a model that is being served, so that it can be sent as it is.
"""

from collections.abc import Iterable
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from service.artifact import Artifact, Layer
from service.errors import MethodNotAllowed, NotAcceptable, NotFound
from service.http.attention import AttentionEndpoint
from service.http.errors import STATUS
from service.http.oip import OIP_INFER_ROUTES
from service.http.state import ServerState
from service.http.views import MEDIA_TYPES, ErrorBody

Schema = dict[str, Any]

_ERROR: Final = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}}
_BINARY: Final = {"schema": {"type": "string", "format": "binary"}}
_ANY_OBJECT: Final = {"type": "object"}
_HEADS: Final = r"^\d{1,4}(,\d{1,4})*$"
_ELSEWHERE: Final = frozenset({NotFound.code, MethodNotAllowed.code})

_ATTENTION: Final = """\
Multi-head attention of `queries` (B, Q, query_size) over `keys` (B, K, key_size) and `values` (B, K, value_size).

`valid_lens`, (B,) or (B, Q), says how many keys count; what stands beyond is padding and changes nothing. A length of 0
gives uniform weights over all K keys. Absent: `valid_lens` means all K, `values` are the keys, `keys` are the queries.
The answer holds `output` (B, Q, num_hiddens), and `weights` (B, H, Q, K) if asked for (of some
`heads`, or their mean (B, Q, K)), in the dtype of the queries. JSON's `null` means absent."""

_INFER: Final = """\
The Open Inference Protocol's inference, JSON with the binary tensor extension. Inputs and rules are those of
`/v1/attention`; name the output `weights` to get it, and give the parameters `need_weights` ("mean") and `heads`
("0,3") to get less of it. Data is flat or nested; FP16 and BF16 exist only as binary."""


def install_openapi(app: FastAPI, state: ServerState) -> None:
    """Makes `app.openapi()` describe every route, examples included."""

    def openapi() -> Schema:
        schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        artifact = _example_artifact(state)
        paths = schema["paths"]
        paths[AttentionEndpoint.route] = {"post": _attention(artifact)}
        for path in OIP_INFER_ROUTES:
            paths[path] = {"post": _infer(path, artifact)}
        if artifact is not None:
            _use_example(paths.values(), artifact)
        schema.setdefault("components", {}).setdefault("schemas", {})["ErrorBody"] = ErrorBody.model_json_schema()
        return schema

    app.openapi = openapi  # type: ignore[method-assign]  # the way FastAPI documents


def _attention(artifact: Artifact | None) -> Schema:
    tensors = {name: {"type": ["array", "null"]} for name in ("keys", "values", "valid_lens")}
    request = {
        "type": "object",
        "required": ["queries"],
        "properties": {"queries": {"type": "array"}, **tensors},
        "additionalProperties": False,
    }
    answer = {"type": "object", "properties": {"output": {"type": "array"}, "weights": {"type": "array"}}}
    example = {} if artifact is None else _attention_example(artifact.layer)
    binary = dict.fromkeys(MEDIA_TYPES[1:], _BINARY)
    return {
        "tags": ["inference"],
        "summary": "Attention",
        "operationId": "attention",
        "description": _ATTENTION,
        "parameters": _query_parameters(artifact),
        "requestBody": {
            "required": True,
            "content": {MEDIA_TYPES[0]: {"schema": request, "example": example}, **binary},
        },
        "responses": {
            "200": {"description": "The answer.", "content": {MEDIA_TYPES[0]: {"schema": answer}, **binary}},
            **_errors(_ELSEWHERE),
        },
    }


def _infer(path: str, artifact: Artifact | None) -> Schema:
    names = ("model", "version") if "{version}" in path else ("model",)
    example = {} if artifact is None else _infer_example(artifact.layer)
    octets = {"application/octet-stream": _BINARY}
    return {
        "tags": ["inference"],
        "summary": "Infer",
        "operationId": "oip_infer_version" if "{version}" in path else "oip_infer",
        "description": _INFER,
        "parameters": [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
        + [
            {
                "name": "Inference-Header-Content-Length",
                "in": "header",
                "required": False,
                "schema": {"type": "integer", "minimum": 0},
                "description": "Bytes of JSON before the binary tensors; left out if all of the body is JSON.",
            }
        ],
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _ANY_OBJECT, "example": example}, **octets},
        },
        "responses": {
            "200": {
                "description": "The answer.",
                "content": {"application/json": {"schema": _ANY_OBJECT}, **octets},
            },
            **_errors(_ELSEWHERE | {NotAcceptable.code}),
        },
    }


def _query_parameters(artifact: Artifact | None) -> list[Schema]:
    rows = (
        ("model", {"type": "string"}, "Name of the model; may be left out if only one is served."),
        ("version", {"type": "integer", "minimum": 1}, "Version; the newest if left out."),
        (
            "need_weights",
            {"type": "string", "enum": ["true", "false", "mean"]},
            "Whether the attention weights are wanted, too: of each head, or their mean over heads, (B, Q, K).",
        ),
        ("heads", {"type": "string", "pattern": _HEADS}, "Of these heads alone, such as 0,3; in this order."),
        ("timeout_ms", {"type": "integer", "minimum": 1}, "Give up (504) after this long."),
    )
    parameters: list[Schema] = [
        {"name": name, "in": "query", "required": False, "schema": schema, "description": text}
        for name, schema, text in rows
    ]
    if artifact is not None:
        parameters[0]["example"] = artifact.name
    return parameters


def _errors(left_out: Iterable[str]) -> Schema:
    codes: dict[int, list[str]] = {}
    for code, status in STATUS.items():
        if code not in left_out:
            codes.setdefault(status, []).append(code)
    return {
        str(status): {"description": ", ".join(names), "content": _ERROR} for status, names in sorted(codes.items())
    }


def _example_artifact(state: ServerState) -> Artifact | None:
    models = list(state.served()) if state.library.is_loaded else []
    return models[0].artifact if models else None


def _use_example(paths: Iterable[Schema], artifact: Artifact) -> None:
    # Path parameters get the name and version of a model that is there.
    values = {"model": artifact.name, "name": artifact.name, "version": str(artifact.version)}
    parameters = (one for path in paths for operation in path.values() for one in operation.get("parameters", ()))
    for parameter in parameters:
        if parameter["in"] == "path":
            parameter["schema"].pop("examples", None)
            parameter["example"] = values[parameter["name"]]


def _attention_example(layer: Layer) -> Schema:
    return {
        "queries": [[[0.5] * layer.query_size]],
        "keys": [[[1.0] * layer.key_size, [0.25] * layer.key_size]],
        "values": [[[1.0] * layer.value_size, [0.25] * layer.value_size]],
        "valid_lens": [2],
    }


def _infer_example(layer: Layer) -> Schema:
    return {
        "id": "example",
        "inputs": [
            {
                "name": "queries",
                "datatype": "FP32",
                "shape": [1, 1, layer.query_size],
                "data": [0.5] * layer.query_size,
            },
            {"name": "keys", "datatype": "FP32", "shape": [1, 2, layer.key_size], "data": [1.0] * (2 * layer.key_size)},
            {
                "name": "values",
                "datatype": "FP32",
                "shape": [1, 2, layer.value_size],
                "data": [1.0] * (2 * layer.value_size),
            },
            {"name": "valid_lens", "datatype": "INT64", "shape": [1], "data": [2]},
        ],
        "outputs": [{"name": "output"}],
    }
