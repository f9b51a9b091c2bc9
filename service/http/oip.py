"""`POST /v2/models/{model}/infer`: the Open Inference Protocol's inference, as a plain ASGI application."""

import asyncio
from collections.abc import Sequence
from typing import Final, final

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from service.admission import Held
from service.artifact import Layer
from service.codec import Body, Chunk
from service.codec.oip import InferRequest, InferResponse, decode_request, encode_response
from service.errors import UnsupportedMediaType
from service.http.body import ENCODINGS, byte_count, deflate, inflate, read_body
from service.http.inference import Inference
from service.http.state import ServerState
from service.tensors import AttentionInputs

OIP_INFER_ROUTES: Final = ("/v2/models/{model}/infer", "/v2/models/{model}/versions/{version}/infer")

_SHORT_HEADER_BYTES: Final = 16 * 1024
_JSON: Final = "application/json"
_BINARY: Final = "application/octet-stream"


@final
class OipInferEndpoint:
    """Answers infer requests. `Content-Type` is not asked for: clients of the protocol often send none."""

    def __init__(self, state: ServerState, route: str) -> None:
        self.route = route
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request. Every `ServiceError` goes up to the boundary, which answers it."""
        with self._state.admission.holding() as held:
            await self._answer(Inference(self._state, scope, send, held), scope, receive)

    async def _answer(self, inference: Inference, scope: Scope, receive: Receive) -> None:
        headers = Headers(scope=scope)
        inference.check(headers)
        model = self._state.served().find(scope["path_params"]["model"], scope["path_params"].get("version"))
        body = await self._read(scope, headers, receive, inference.held)
        header_length = _header_length(headers)
        request, inputs = await inference.decode(
            _kind(header_length), len(body), lambda: _decode(body, header_length, model.artifact.layer)
        )
        timeout_s = request.timeout_us / 1e6 if request.timeout_us else None
        output = await inference.compute(model, inputs, request.weights, timeout_s)
        name, version = model.artifact.name, model.artifact.version
        form = _BINARY if all(request.outputs.values()) else _JSON
        response = await inference.encode(form, output, lambda done: encode_response(name, version, request, done))
        inference.record(model, len(inputs.queries))
        await _send_answer(inference, response, answer_encoding(headers))

    async def _read(self, scope: Scope, headers: Headers, receive: Receive, held: Held) -> Body:
        encoding = headers.get("content-encoding", "identity").lower()
        if encoding not in ("identity", *ENCODINGS):
            raise UnsupportedMediaType(f"Content-Encoding: got {encoding[:64]!r}, want {' or '.join(ENCODINGS)}")
        max_bytes = self._state.settings.max_body_bytes
        body = await read_body(scope, headers, receive, self._state.body_limits, held)
        if encoding == "identity":
            return body
        held.grow_to(held.num_bytes + max_bytes)  # what it inflates to is known when it has
        return await asyncio.to_thread(inflate, body, encoding, max_bytes)


def answer_encoding(headers: Headers) -> str | None:
    """The compression that was asked for: exactly one named in Accept-Encoding.

    HTTP libraries name all that they know with every request. Compressing floats for them would cost more than it
    saves; who means it names one (docs/decisions/0006-compression-when-asked.md).
    """
    named = [coding.partition(";")[0].strip().lower() for coding in headers.get("accept-encoding", "").split(",")]
    wanted = [coding for coding in named if coding not in ("", "identity")]
    return wanted[0] if len(wanted) == 1 and wanted[0] in ENCODINGS else None


def _kind(header_length: int | None) -> str:
    # With a long JSON part the body is JSON in all that matters, whatever follows.
    return _JSON if header_length is None or header_length > _SHORT_HEADER_BYTES else _BINARY


def _header_length(headers: Headers) -> int | None:
    stated = headers.get("inference-header-content-length")
    return None if stated is None else byte_count("Inference-Header-Content-Length", stated)


def _decode(body: Body, header_length: int | None, layer: Layer) -> tuple[InferRequest, AttentionInputs]:
    request = decode_request(body, header_length)
    return request, AttentionInputs.parse(request.tensors, layer)


async def _send_answer(inference: Inference, response: InferResponse, encoding: str | None) -> None:
    chunks: Sequence[Chunk] = response.chunks
    headers: list[tuple[str, str]] = []
    if encoding is not None:
        chunks = (await asyncio.to_thread(deflate, chunks, encoding),)
        headers.append(("content-encoding", encoding))
    if response.header_length is not None:
        headers.append(("inference-header-content-length", str(response.header_length)))
    await inference.answer(_JSON if response.header_length is None else _BINARY, chunks, headers)
