"""What every inference route does between reading a body and writing an answer: decode, compute, encode, count.

Protocols differ in how they read and write, not in what happens between.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, TypeVar, final

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Scope, Send

from service.admission import Held
from service.artifact import Layer
from service.assembly import answer_bytes
from service.catalog import ServedModel
from service.codec import Chunk
from service.errors import AnswerTooLarge, ServiceError
from service.http.extensions import ON_LEAVE, ON_STAGE, RESPOND
from service.http.state import ServerState
from service.run import Done, Job
from service.tensors import AttentionInputs, AttentionOutput
from service.traces import Stage
from service.wanted import WantedWeights

_T = TypeVar("_T")

# Up to this many bytes are read and written on the event loop, because a hop to another thread would cost more. Judging
# binary tensors takes about 0.05 ms a megabyte (benchmarks/decode.py), JSON some 2 ms, npz as much for its checksums.
_INLINE_BYTES: Final = 64 * 1024
_INLINE_BINARY_BYTES: Final = 4 * 1024 * 1024
_BINARY: Final = ("application/octet-stream", "application/vnd.safetensors")
# Small pieces are joined: one write is cheaper than several.
_JOINED_BYTES: Final = 16 * 1024
_NO_ATTRIBUTES: Final[Mapping[str, str | int]] = {}


@final
class Inference:
    """One inference request, from the moment its route was chosen; each stage is timed."""

    def __init__(self, state: ServerState, scope: Scope, send: Send, held: Held) -> None:
        self.held = held
        self._state = state
        self._scope = scope
        self._send = send
        self._arrived = time.perf_counter()
        self._seconds: dict[str, float] = {}
        self._note: Callable[[Stage], None] | None = scope.get("extensions", {}).get(ON_STAGE, {}).get("note")
        self._calls = 0

    def check(self, headers: Headers) -> None:
        """Refuses what need not be read to be refused.

        Raises:
            Unauthorized, Forbidden: keys are required and the request has none that is known, and good for this.
            Overloaded: it would wait for too long.
        """
        if self._state.secrets.api_keys is not None:
            self._state.secrets.api_keys.check(headers, "infer")
        self._state.admission.check()

    async def decode(self, media_type: str, size_bytes: int, work: Callable[[], _T]) -> _T:
        """What `work` makes of the body."""
        self._state.metrics.received_bytes.add((media_type,), size_bytes)
        return await self._timed("decode", media_type, size_bytes, work)

    async def compute(
        self, model: ServedModel, inputs: AttentionInputs, weights: WantedWeights | None, timeout_s: float | None
    ) -> AttentionOutput:
        """The answer, computed within `timeout_s` or the server's own limit, whichever is less."""
        if weights is not None:
            weights.check(model.artifact.layer)
        longest_s = self._state.settings.timeout_ms / 1000
        deadline = self._arrived + (longest_s if timeout_s is None else min(timeout_s, longest_s))
        self._hold_answer(inputs, model.artifact.layer, weights)
        submitted = time.perf_counter()
        job = Job(model.engine, model.artifact.layer, inputs, weights, deadline)
        try:
            with self._ended_when_client_leaves():
                done = await self._state.scheduler.submit(job)
        except ServiceError:
            model.statistics.failed(time.perf_counter() - self._arrived)
            raise
        began = submitted + done.queue_s
        self._staged("queue", submitted, began)
        what: dict[str, str | int] = {"mha.model": model.artifact.name, "mha.version": model.artifact.version}
        self._staged("compute", began, began + done.compute_s, {**what, "mha.engine_calls": done.calls})
        self._calls = done.calls
        self._count(inputs, done)
        return done.output

    async def encode(self, media_type: str, output: AttentionOutput, work: Callable[[AttentionOutput], _T]) -> _T:
        """What `work` makes of the answer."""
        size_bytes = sum(tensor.nbytes for tensor in output.named().values())
        return await self._timed("encode", media_type, size_bytes, lambda: work(output))

    async def answer(self, media_type: str, chunks: Sequence[Chunk], headers: Sequence[tuple[str, str]]) -> None:
        """Sends the answer with its own headers and the stages' times."""
        size_bytes = sum(map(len, chunks))
        self._state.metrics.sent_bytes.add((media_type,), size_bytes)
        named = (("content-type", media_type), ("content-length", str(size_bytes)), *headers, self._server_timing())
        encoded = [(name.encode(), value.encode()) for name, value in named]
        if size_bytes <= _JOINED_BYTES:
            chunks = (b"".join(chunks),)
        respond = self._scope.get("extensions", {}).get(RESPOND)
        if respond is not None:
            await respond["respond"](200, encoded, chunks)
            return
        await self._send({"type": "http.response.start", "status": 200, "headers": encoded})
        *first, last = chunks
        for chunk in first:
            await self._send({"type": "http.response.body", "body": bytes(chunk), "more_body": True})
        # ASGI has bytes here, and there are servers that pickle them.
        await self._send({"type": "http.response.body", "body": bytes(last), "more_body": False})

    def record(self, model: ServedModel, batch: int) -> None:
        """Counts the request as answered, in the metrics and in the model's statistics."""
        for stage, seconds in self._seconds.items():
            self._state.metrics.stage_seconds.observe((stage,), seconds)
        total_s = time.perf_counter() - self._arrived
        model.statistics.answered(batch, self._calls, self._seconds, total_s, now_ms=time.time_ns() // 1_000_000)

    def _hold_answer(self, inputs: AttentionInputs, layer: Layer, weights: WantedWeights | None) -> None:
        """Counts the answer as held, or refuses to make it."""
        num_bytes = answer_bytes(inputs, layer, weights)
        most_bytes = self._state.settings.max_answer_bytes
        if num_bytes > most_bytes:
            what = "output and weights" if weights else "output"
            raise AnswerTooLarge(f"{what} take {num_bytes} bytes, the limit is {most_bytes} (max_answer_bytes)")
        self.held.grow_to(self.held.num_bytes + num_bytes)

    @contextmanager
    def _ended_when_client_leaves(self) -> Iterator[None]:
        """Lets what is awaited inside end with `ClientDisconnect` once nobody waits for the answer."""
        extension = self._scope.get("extensions", {}).get(ON_LEAVE)
        task = asyncio.current_task()
        if extension is None or task is None:
            yield
            return
        left = False

        def leave() -> None:
            nonlocal left
            left = True
            task.cancel()

        extension["watch"](leave)
        try:
            yield
        except asyncio.CancelledError:
            if not left:
                raise
            task.uncancel()
            raise ClientDisconnect from None
        finally:
            extension["watch"](None)

    def _count(self, inputs: AttentionInputs, done: Done) -> None:
        metrics = self._state.metrics
        metrics.queries.add(("valid",), len(inputs.queries.data))
        metrics.queries.add(("computed",), done.computed_queries)
        metrics.keys.add(("received",), len(inputs.keys.data))
        metrics.keys.add(("valid",), int(inputs.extents.sum()))
        metrics.keys.add(("computed",), done.computed_keys)

    def _server_timing(self) -> tuple[str, str]:
        # Durations in milliseconds, as browsers and load testers read them.
        return "server-timing", ", ".join(f"{stage};dur={s * 1000:.3f}" for stage, s in self._seconds.items())

    async def _timed(self, stage: str, media_type: str, size_bytes: int, work: Callable[[], _T]) -> _T:
        most_bytes = _INLINE_BINARY_BYTES if media_type in _BINARY else _INLINE_BYTES
        started = time.perf_counter()
        try:
            return work() if size_bytes <= most_bytes else await asyncio.to_thread(work)
        finally:
            self._staged(stage, started, time.perf_counter())

    def _staged(
        self, stage: str, began_s: float, ended_s: float, attributes: Mapping[str, str | int] = _NO_ATTRIBUTES
    ) -> None:
        self._seconds[stage] = ended_s - began_s
        if self._note is not None:
            self._note(Stage(stage, began_s, ended_s, attributes))
