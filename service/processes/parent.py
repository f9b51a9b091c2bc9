"""The parent of several server processes: it accepts connections and deals them out, and serves none itself.

One thread and no event loop, so that it can fork at any time: at the start, and again when a process has died.
"""

import os
import selectors
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn, final

import structlog

from service.errors import NotReady
from service.processes import messages
from service.processes.board import Board, Seat
from service.processes.messages import CHANGE, COMMIT, DISCARD, DRAIN, END, PREPARE, READY, RELOAD, Message

Serve = Callable[[Seat], bool]
"""Serves at a seat until told to stop; whether it ended as it should."""

_log = structlog.get_logger(__name__)
_ACCEPTED_AT_ONCE: Final = 64
_SENT_AT_ONCE: Final = 256 * 1024
# To answer about itself takes a process milliseconds; to load a model, as long as the model is large.
_REPLY_S: Final = 2.0
_CHANGE_S: Final = 120.0
# A process that dies again and again is replaced ever more slowly.
_LONGEST_PAUSE_S: Final = 30.0
# A process whose event loop has not come round for so long does nothing any more, and its clients wait for nothing.
_HUNG_S: Final = 30.0
# What is still there so long after the time to finish has run out is killed.
_GRACE_S: Final = 5.0


@final
@dataclass(eq=False)
class _Child:
    """A process, and what it was dealt."""

    seat: int
    pid: int
    deal: socket.socket
    pipe: socket.socket
    replaces: bool
    dealt: int = 0
    unread: bytearray = field(default_factory=bytearray)
    told_ready: bool = False
    beats: int = 0
    beat_at: float = field(default_factory=time.monotonic)


@final
@dataclass(eq=False)
class _Round:
    """A message to several children, and their replies."""

    waiting: set[_Child]
    until: float
    then: Callable[[list[Message]], None]
    replies: list[Message] = field(default_factory=list)


@final
class Parent:
    """Deals the connections of a listening socket to `num_children` processes, and replaces those that die.

    Args:
        listener: from `bind`. Closed when the server stops accepting.
        num_children: processes.
        serve: what each does.
        drain_delay_s: after the first signal, seconds in which connections are still accepted.
        drain_timeout_s: after that, seconds for what was accepted to be answered.
    """

    def __init__(
        self,
        listener: socket.socket,
        num_children: int,
        serve: Serve,
        drain_delay_s: float,
        drain_timeout_s: float,
    ) -> None:
        self._listener = listener
        self._num_children = num_children
        self._serve = serve
        self._drain_delay_s = drain_delay_s
        self._drain_timeout_s = drain_timeout_s
        self._board = Board(num_children)
        self._children: dict[int, _Child] = {}
        self._selector = selectors.DefaultSelector()
        self._signals, self._signalled = socket.socketpair()
        self._rounds: dict[int, _Round] = {}
        self._changes: deque[tuple[_Child, Message]] = deque()
        self._is_changing = False
        self._unloaded: set[str] = set()
        self._last_number = 0
        self._last_dealt = 0
        self._deaths = 0
        self._replace_at: dict[int, float] = {}
        self._stop_at: float | None = None
        self._kill_at: float | None = None
        self._is_accepting = True
        self._ended_well = True

    def run(self) -> bool:
        """Returns when every process has ended; whether all ended as they should."""
        self._signals.settimeout(0)
        self._signalled.settimeout(0)
        self._listener.settimeout(0)
        wake_before = signal.set_wakeup_fd(self._signalled.fileno())
        handled = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGHUP)
        before = {number: signal.signal(number, lambda *_: None) for number in handled}
        self._selector.register(self._signals, selectors.EVENT_READ, self._on_signals)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        try:
            for seat in range(self._num_children):
                self._fork(seat, replaces=False)
            while self._children or (self._replace_at and self._stop_at is None):
                for key, _ in self._selector.select(self._pause_s()):
                    key.data()
                self._on_time(time.monotonic())
        finally:
            signal.set_wakeup_fd(wake_before)
            for number, handler in before.items():
                signal.signal(number, handler)
            for one in (self._selector, self._signals, self._signalled, self._listener):
                one.close()
        return self._ended_well

    # Connections.

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # out of descriptors, or the client has left
                _log.warning("a connection was not accepted", reason=error.strerror)
                return
            with connection:
                self._deal(connection)

    def _deal(self, connection: socket.socket) -> None:
        """Gives a connection to the ready process with the fewest."""
        for child in sorted(self._children.values(), key=self._burden):
            try:
                socket.send_fds(child.deal, [b"c"], [connection.fileno()])
            except OSError:  # it is dying, or has not taken hundreds of them
                continue
            child.dealt += 1
            self._last_dealt = child.seat
            return

    def _burden(self, child: _Child) -> tuple[bool, int, int]:
        num_open = child.dealt - self._board.closed(child.seat)
        # Among equals in turn.
        return not self._board.is_ready(child.seat), num_open, (child.seat - self._last_dealt - 1) % self._num_children

    # Life and death.

    def _fork(self, seat: int, *, replaces: bool) -> None:
        with ExitStack() as pairs:
            deal, dealt = (pairs.enter_context(one) for one in socket.socketpair())
            pipe, piped = (pairs.enter_context(one) for one in socket.socketpair())
            self._board.clear(seat)
            pid = os.fork()
            pairs.pop_all()  # whoever got this far closes one end of each
        if pid == 0:
            deal.close()
            pipe.close()
            self._become(Seat(seat, self._board, dealt, piped, replaces, frozenset(self._unloaded)))
        dealt.close()
        piped.close()
        deal.settimeout(0)
        pipe.settimeout(_REPLY_S)
        child = self._children[seat] = _Child(seat, pid, deal, pipe, replaces)
        self._selector.register(pipe, selectors.EVENT_READ, lambda: self._receive(child))

    def _become(self, seat: Seat) -> NoReturn:
        """The rest of a child's life."""
        ended_well = False
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the parent passes it on
            for other in self._children.values():
                other.deal.close()
                other.pipe.close()
            for one in (self._selector, self._signals, self._signalled, self._listener):
                one.close()
            ended_well = self._serve(seat)
        except Exception:  # noqa: BLE001  # a child has no caller to whom it could be raised
            _log.error("a process could not start", exc_info=True)
        finally:
            with suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(0 if ended_well else 1)

    def _on_signals(self) -> None:
        for number in self._signals.recv(64):
            if number == signal.SIGCHLD:
                self._bury()
            elif number == signal.SIGHUP:
                self._tell(self._children.values(), RELOAD)
            elif self._stop_at is None:
                self._stop_at = time.monotonic() + self._drain_delay_s
                self._kill_at = self._stop_at + self._drain_timeout_s + _GRACE_S
                self._tell(self._children.values(), DRAIN)
            else:
                self._stop_at = time.monotonic()
                self._kill_at = self._stop_at + _GRACE_S
                self._tell(self._children.values(), END)

    def _bury(self) -> None:
        for child in list(self._children.values()):
            pid, status = os.waitpid(child.pid, os.WNOHANG)
            if pid == 0:
                continue
            self._forget(child)
            if self._stop_at is not None:
                self._ended_well = self._ended_well and status == 0
            elif not self._board.started and not child.replaces:
                self._give_up()
            else:
                self._mourn(child, status)

    def _forget(self, child: _Child) -> None:
        del self._children[child.seat]
        with suppress(KeyError):  # the end of the pipe may have been seen before
            self._selector.unregister(child.pipe)
        child.pipe.close()
        child.deal.close()
        self._board.clear(child.seat)
        for one in self._rounds.values():
            one.waiting.discard(child)
        for number in list(self._rounds):
            self._end_if_complete(number)

    def _mourn(self, child: _Child, status: int) -> None:
        pause_s = self._replace_soon(child.seat)
        code = os.waitstatus_to_exitcode(status)
        _log.error("a process died and is replaced", pid=child.pid, exit_status=code, in_seconds=pause_s)

    def _replace_soon(self, seat: int) -> float:
        """Plans a new process for a seat; returns in how many seconds."""
        pause_s = min(_LONGEST_PAUSE_S, 0.5 * 2.0**self._deaths - 0.5)
        self._deaths += 1
        self._replace_at[seat] = time.monotonic() + pause_s
        return pause_s

    def _replace(self, seat: int) -> None:
        del self._replace_at[seat]
        try:
            self._fork(seat, replaces=True)
        except OSError as error:  # no more processes, descriptors or memory, for now
            pause_s = self._replace_soon(seat)
            _log.error("a process could not be replaced", reason=error.strerror, again_in_seconds=pause_s)

    def _give_up(self) -> None:
        """A process could not start, and has said why."""
        self._ended_well = False
        self._stop_at = time.monotonic()
        self._kill_at = self._stop_at + _GRACE_S
        self._tell(self._children.values(), END)

    # Time.

    def _pause_s(self) -> float | None:
        moments = [one.until for one in self._rounds.values()]
        moments += [child.beat_at + _HUNG_S for child in self._children.values()]
        if self._stop_at is None:
            moments += self._replace_at.values()
        elif self._is_accepting:
            moments.append(self._stop_at)
        elif self._kill_at is not None:
            moments.append(self._kill_at)
        return max(0.0, min(moments) - time.monotonic()) if moments else None

    def _on_time(self, now: float) -> None:
        for child in [child for child in self._children.values() if now >= child.beat_at + _HUNG_S]:
            self._listen_to_heart(child, now)
        for number in [number for number, one in self._rounds.items() if now >= one.until]:
            self._end(number)
        if self._stop_at is None:
            for seat in [seat for seat, moment in self._replace_at.items() if now >= moment]:
                self._replace(seat)
        elif self._is_accepting and now >= self._stop_at:
            self._stop_accepting()
        elif self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            self._ended_well = False
            for child in self._children.values():
                _log.error("a process did not end and is killed", pid=child.pid)
                os.kill(child.pid, signal.SIGKILL)

    def _listen_to_heart(self, child: _Child, now: float) -> None:
        beats = self._board.beats(child.seat)
        if beats == child.beats:
            _log.error("a process hangs and is killed", pid=child.pid, silent_seconds=_HUNG_S)
            os.kill(child.pid, signal.SIGKILL)  # SIGCHLD says when it is over
        child.beats, child.beat_at = beats, now

    def _stop_accepting(self) -> None:
        # A process reads everything it was dealt before it sees the end of it.
        self._accept()  # whoever is connected already does not know that nobody has accepted
        self._is_accepting = False
        self._selector.unregister(self._listener)
        self._listener.close()
        for child in self._children.values():
            child.deal.close()

    # Messages.

    def _receive(self, child: _Child) -> None:
        if self._children.get(child.seat) is not child:
            return  # buried since the selector saw something of it
        try:
            arrived = child.pipe.recv(_SENT_AT_ONCE)
        except OSError:
            arrived = b""
        if not arrived:  # it has died, or soon will have: SIGCHLD says when
            self._selector.unregister(child.pipe)
            return
        child.unread += arrived
        *lines, child.unread = child.unread.split(b"\n")
        for sent in lines:
            self._understand(child, messages.parse(sent))

    def _understand(self, child: _Child, message: Message) -> None:
        if "reply" in message:
            one = self._rounds.get(message["reply"])
            if one is not None and child in one.waiting:
                one.waiting.discard(child)
                one.replies.append(message)
                self._end_if_complete(message["reply"])
        elif message.get("note") == READY:
            child.told_ready = True
            self._note_ready(child, message["content"])
        elif message["subject"] == CHANGE:
            self._changes.append((child, message))
            self._change_next()
        else:
            others = [other for other in self._children.values() if other is not child and other.told_ready]
            self._ask(others, message["subject"], None, _REPLY_S, lambda replies: self._answer(child, message, replies))

    def _note_ready(self, child: _Child, content: Any) -> None:
        self._deaths = 0
        if child.replaces:
            _log.info("a process is ready in the place of one that died", pid=child.pid)
        if not self._board.started and self._board.all_ready:
            self._board.note_started()
            _log.info("ready", **content, processes=self._num_children)

    def _answer(self, child: _Child, asked: Message, replies: list[Message]) -> None:
        contents = [reply["content"] for reply in replies if "content" in reply]
        self._send(child, {"answer": asked["ask"], "content": contents})

    def _change_next(self) -> None:
        """Begins the next change, unless one is going on: first everybody prepares, then all commit or none."""
        if self._is_changing or not self._changes:
            return
        self._is_changing = True
        child, message = self._changes.popleft()
        members = [one for one in self._children.values() if one.told_ready]

        def prepared(replies: list[Message]) -> None:
            errors = [reply["error"] for reply in replies if "error" in reply]
            if not errors and len(replies) < len(members):
                errors = [messages.error_content(NotReady("a process of the server did not answer; nothing changed"))]
            subject = DISCARD if errors else COMMIT
            if not errors:
                self._remember(message["content"])
            self._ask(members, subject, message["content"], _CHANGE_S, lambda _: done(errors))

        def done(errors: list[Any]) -> None:
            outcome = {"error": errors[0]} if errors else {"content": None}
            self._send(child, {"answer": message["ask"], **outcome})
            self._is_changing = False
            self._change_next()

        self._ask(members, PREPARE, message["content"], _CHANGE_S, prepared)

    def _remember(self, change: Any) -> None:
        """What a process that is forked later has to know of a change."""
        if change["do"] == "unload":
            self._unloaded.add(change["name"])
        else:
            self._unloaded.discard(change["name"])

    def _ask(
        self,
        children: list[_Child],
        subject: str,
        content: Any,
        timeout_s: float,
        then: Callable[[list[Message]], None],
    ) -> None:
        number = self._tell(children, subject, content)
        self._rounds[number] = _Round(
            {child for child in children if child.seat in self._children}, time.monotonic() + timeout_s, then
        )
        self._end_if_complete(number)

    def _tell(self, children: Iterable[_Child], subject: str, content: Any = None) -> int:
        self._last_number += 1
        for child in list(children):
            self._send(child, {"tell": self._last_number, "subject": subject, "content": content})
        return self._last_number

    def _send(self, child: _Child, message: Message) -> None:
        with suppress(OSError):  # it is dying, which is noticed elsewhere
            child.pipe.sendall(messages.line(message))

    def _end_if_complete(self, number: int) -> None:
        one = self._rounds.get(number)
        if one is not None and not one.waiting:
            self._end(number)

    def _end(self, number: int) -> None:
        one = self._rounds.pop(number, None)  # what one round ends with may have ended another
        if one is not None:
            one.then(one.replies)
