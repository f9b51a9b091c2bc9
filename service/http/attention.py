"""`POST /v1/attention`: the natural endpoint, as a plain ASGI application.

A FastAPI route would cost more than the layer does on a small request (docs/decisions/0003).
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar, final

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from service.artifact import Layer
from service.catalog import ServedModel
from service.codec import Body, Chunk, Codec
from service.http.body import read_body
from service.http.negotiation import answer_codec, request_codec
from service.http.parameters import InferenceParameters
from service.http.state import ServerState
from service.scheduler import Job
from service.tensors import AttentionInputs

_T = TypeVar("_T")

# Below this a hop to another thread costs more than decoding or encoding does.
INLINE_BYTES: Final = 64 * 1024


@final
class AttentionEndpoint:
    """Answers inference requests in any codec."""

    route: Final = "/v1/attention"

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request. Every `ServiceError` goes up to the boundary, which answers it."""
        arrived = time.perf_counter()
        state = self._state
        headers = Headers(scope=scope)
        if state.api_keys is not None:
            state.api_keys.check(headers)
        parameters = InferenceParameters.parse(scope["query_string"])
        model = state.served().find(parameters.model, parameters.version)
        codec = request_codec(headers, state.codecs)
        answering = answer_codec(headers, state.codecs, codec)
        body = await read_body(headers, receive, state.settings.max_body_bytes)
        state.metrics.received_bytes.labels(codec.media_type).inc(len(body))
        stages = _Stages()
        inputs = await stages.timed("decode", len(body), lambda: _decode(codec, body, model.artifact.layer))
        done = await state.scheduler.submit(
            Job(model.engine, inputs, parameters.need_weights, arrived + self._timeout_s(parameters))
        )
        stages.record("queue", done.queue_s)
        stages.record("compute", done.compute_s)
        answer_bytes = sum(tensor.nbytes for tensor in done.output.named().values())
        chunks = await stages.timed("encode", answer_bytes, lambda: answering.encode(done.output))
        self._observe(stages, answering, chunks)
        await _send(send, chunks, _headers(model, answering, stages, chunks))

    def _timeout_s(self, parameters: InferenceParameters) -> float:
        longest = self._state.settings.timeout_ms
        return min(parameters.timeout_ms or longest, longest) / 1000

    def _observe(self, stages: "_Stages", answering: Codec, chunks: Sequence[Chunk]) -> None:
        metrics = self._state.metrics
        for stage, seconds in stages.seconds.items():
            metrics.stage_seconds.labels(stage).observe(seconds)
        metrics.sent_bytes.labels(answering.media_type).inc(sum(map(len, chunks)))


@final
class _Stages:
    """How long each stage of one request took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def record(self, stage: str, seconds: float) -> None:
        self.seconds[stage] = seconds

    async def timed(self, stage: str, size_bytes: int, work: Callable[[], _T]) -> _T:
        """Does the work here if it is small, else in a thread, and records how long it took."""
        started = time.perf_counter()
        try:
            if size_bytes <= INLINE_BYTES:
                return work()
            return await asyncio.to_thread(work)
        finally:
            self.record(stage, time.perf_counter() - started)

    def server_timing(self) -> bytes:
        """The header that browsers and load testers read; durations in milliseconds."""
        return ", ".join(f"{stage};dur={seconds * 1000:.3f}" for stage, seconds in self.seconds.items()).encode()


def _decode(codec: Codec, body: Body, layer: Layer) -> AttentionInputs:
    return AttentionInputs.parse(codec.decode(body), layer)


def _headers(
    model: ServedModel, answering: Codec, stages: _Stages, chunks: Sequence[Chunk]
) -> list[tuple[bytes, bytes]]:
    return [
        (b"content-type", answering.media_type.encode()),
        (b"content-length", str(sum(map(len, chunks))).encode()),
        (b"server-timing", stages.server_timing()),
        (b"mha-model", model.artifact.name.encode()),
        (b"mha-version", str(model.artifact.version).encode()),
    ]


async def _send(send: Send, chunks: Sequence[Chunk], headers: list[tuple[bytes, bytes]]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    *head, last = chunks
    for chunk in head:
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": last, "more_body": False})
