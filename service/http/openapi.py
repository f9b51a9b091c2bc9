"""The OpenAPI entry of the inference endpoint, which FastAPI cannot derive from a plain ASGI application.

Its example is made for the sizes of the model being served, so that it can be sent as it is.
"""

from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from service.artifact import Layer
from service.http.errors import STATUS
from service.http.state import ServerState
from service.http.views import MEDIA_TYPES, ErrorBody

_ERROR_REF: Final = {"$ref": "#/components/schemas/ErrorBody"}
_BINARY: Final = {"schema": {"type": "string", "format": "binary"}}

_DESCRIPTION: Final = """\
Multi-head attention of `queries` (B, Q, query_size) over `keys` (B, K, key_size) and `values` (B, K, value_size).

`valid_lens`, (B,) or (B, Q), says how many keys count; what stands beyond is padding and changes nothing. A length of 0
gives uniform weights over all K keys. Absent: `valid_lens` means all K, `values` are the keys, `keys` are the queries.
The answer holds `output` (B, Q, num_hiddens), and `weights` (B, H, Q, K) if asked for, in the dtype of the queries.
JSON's `null` means absent."""


def install_openapi(app: FastAPI, state: ServerState) -> None:
    """Makes `app.openapi()` describe every route, examples included."""

    def openapi() -> dict[str, Any]:
        schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        schema["paths"]["/v1/attention"] = {"post": _attention(state)}
        schemas = schema.setdefault("components", {}).setdefault("schemas", {})
        schemas["ErrorBody"] = ErrorBody.model_json_schema()
        return schema

    app.openapi = openapi  # type: ignore[method-assign]  # the way FastAPI documents


def _attention(state: ServerState) -> dict[str, Any]:
    tensors = {name: {"type": ["array", "null"]} for name in ("keys", "values", "valid_lens")}
    request_schema = {
        "type": "object",
        "required": ["queries"],
        "properties": {"queries": {"type": "array"}, **tensors},
        "additionalProperties": False,
    }
    answer_schema = {"type": "object", "properties": {"output": {"type": "array"}, "weights": {"type": "array"}}}
    json_body = {"schema": request_schema, "example": _example(_newest_layer(state))}
    binary = dict.fromkeys(MEDIA_TYPES[1:], _BINARY)
    return {
        "tags": ["inference"],
        "summary": "Attention",
        "operationId": "attention",
        "description": _DESCRIPTION,
        "parameters": _parameters(),
        "requestBody": {"required": True, "content": {MEDIA_TYPES[0]: json_body, **binary}},
        "responses": {
            "200": {"description": "The answer.", "content": {MEDIA_TYPES[0]: {"schema": answer_schema}, **binary}},
            **_error_responses(),
        },
    }


def _parameters() -> list[dict[str, Any]]:
    rows = (
        ("model", {"type": "string"}, "Name of the model; may be left out if only one is served."),
        ("version", {"type": "integer"}, "Version; the newest if left out."),
        ("need_weights", {"type": "boolean"}, "Whether the attention weights are wanted, too."),
        ("timeout_ms", {"type": "integer", "minimum": 1}, "Give up (504) after this long."),
    )
    return [
        {"name": name, "in": "query", "required": False, "schema": schema, "description": text}
        for name, schema, text in rows
    ]


def _error_responses() -> dict[str, Any]:
    codes: dict[int, list[str]] = {}
    for code, status in STATUS.items():
        if code not in ("not_found", "method_not_allowed"):
            codes.setdefault(status, []).append(code)
    return {
        str(status): {"description": ", ".join(names), "content": {"application/json": {"schema": _ERROR_REF}}}
        for status, names in sorted(codes.items())
    }


def _newest_layer(state: ServerState) -> Layer | None:
    if state.catalog is None:
        return None
    return state.catalog.versions(state.catalog.names()[0])[-1].artifact.layer


def _example(layer: Layer | None) -> dict[str, Any]:
    if layer is None:
        return {}
    return {
        "queries": [[[0.5] * layer.query_size]],
        "keys": [[[1.0] * layer.key_size, [0.25] * layer.key_size]],
        "values": [[[1.0] * layer.value_size, [0.25] * layer.value_size]],
        "valid_lens": [2],
    }
