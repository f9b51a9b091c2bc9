"""A server process's view of the others: asking them, changing something everywhere, and answering them."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Protocol, final

import structlog

from service.errors import Internal, ServiceError
from service.processes import messages
from service.processes.board import Seat
from service.processes.messages import CHANGE, COMMIT, PREPARE, READY, Message

Handlers = Mapping[str, Callable[[Any], Awaitable[Any]]]
"""What a process does when it is told a subject: from the content to the reply, or a `ServiceError`."""

_LONGEST_LINE: Final = 64 * 1024 * 1024
_log = structlog.get_logger(__name__)


class Siblings(Protocol):
    """The other processes of this server."""

    @property
    def all_ready(self) -> bool:
        """Whether every other process is ready."""

    @property
    def started(self) -> bool:
        """Whether every process has once been ready."""

    async def open(self) -> None:
        """Starts to listen to them."""

    def note_ready(self, content: Any) -> None:
        """This one is. `content` is for the log of whoever says that the server is."""

    def note_unready(self) -> None:
        """This one is no longer."""

    async def ask(self, subject: str) -> list[Any]:
        """The other processes' replies. One that does not reply is left out."""

    async def change(self, content: Any) -> None:
        """Changes what is served by every process, this one included, or by none.

        Raises:
            ServiceError: why it was not changed.
        """


@final
class NoSiblings:
    """The only process there is."""

    started = True
    all_ready = True

    def __init__(self, handlers: Handlers) -> None:
        self._handlers = handlers
        self._changing = asyncio.Lock()

    async def open(self) -> None:
        """There is nobody to listen to."""

    def note_ready(self, content: Any) -> None:
        """The whole server is ready."""
        _log.info("ready", **content)

    def note_unready(self) -> None:
        """Nobody need know."""

    async def ask(self, subject: str) -> list[Any]:  # noqa: ARG002
        """No reply."""
        return []

    async def change(self, content: Any) -> None:
        """See `Siblings`."""
        async with self._changing:
            await self._handlers[PREPARE](content)
            await self._handlers[COMMIT](content)


@final
class Sibling:
    """One of several processes, at one end of a pipe to their parent."""

    def __init__(self, seat: Seat, handlers: Handlers) -> None:
        self._seat = seat
        self._handlers = handlers
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def all_ready(self) -> bool:
        """Whether every process is ready."""
        return self._seat.board.all_ready

    @property
    def started(self) -> bool:
        """Whether every process has once been ready."""
        return self._seat.board.started

    async def open(self) -> None:
        """Starts to listen to the parent."""
        reader, self._writer = await asyncio.open_unix_connection(sock=self._seat.pipe, limit=_LONGEST_LINE)
        self._spawn(self._listen(reader))

    def note_ready(self, content: Any) -> None:
        """This process is ready."""
        self._seat.board.set_ready(self._seat.index, ready=True)
        self._send({"note": READY, "content": content})

    def note_unready(self) -> None:
        """This process is no longer ready."""
        self._seat.board.set_ready(self._seat.index, ready=False)

    async def ask(self, subject: str, content: Any = None) -> Any:
        """What the parent answers: a list of the other processes' replies."""
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self._send({"ask": number, "subject": subject, "content": content})
        try:
            return await answer
        finally:
            del self._asked[number]

    async def change(self, content: Any) -> None:
        """See `Siblings`."""
        await self.ask(CHANGE, content)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        while sent := await reader.readline():
            message = messages.parse(sent)
            if "answer" in message:
                self._resolve(message)
            else:
                self._spawn(self._reply(message))
        for answer in self._asked.values():  # the parent is gone, and this process soon will be
            if not answer.done():
                answer.set_exception(Internal("the server is ending"))

    def _resolve(self, message: Message) -> None:
        answer = self._asked.get(message["answer"])
        if answer is None or answer.done():
            return
        if "error" in message:
            answer.set_exception(messages.error_of(message["error"]))
        else:
            answer.set_result(message["content"])

    async def _reply(self, message: Message) -> None:
        try:
            content = await self._handlers[message["subject"]](message["content"])
        except ServiceError as error:
            self._send({"reply": message["tell"], "error": messages.error_content(error)})
        except Exception as error:  # noqa: BLE001  # whoever asked waits for a reply
            _log.error("a message was not understood", subject=message["subject"], exc_info=True)
            opaque = Internal(f"{message['subject']}: {type(error).__name__}")
            self._send({"reply": message["tell"], "error": messages.error_content(opaque)})
        else:
            self._send({"reply": message["tell"], "content": content})

    def _send(self, message: Message) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(messages.line(message))

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
