"""A page of memory that all processes of a server share: who is ready, who computes how much, who closed what.

Each number has one writer, so there is no lock.
"""

import mmap
import socket
from dataclasses import dataclass
from typing import Final, final

_CELL_BYTES: Final = 8


@final
class Board:
    """Numbers of `num_seats` processes. Made before they are forked.

    Attributes:
        num_seats: processes.
    """

    def __init__(self, num_seats: int) -> None:
        self.num_seats = num_seats
        self._cells = memoryview(mmap.mmap(-1, _CELL_BYTES * (1 + 4 * num_seats))).cast("q")
        self._ready = self._cells[1 : 1 + num_seats]
        self._running = self._cells[1 + num_seats : 1 + 2 * num_seats]
        self._closed = self._cells[1 + 2 * num_seats : 1 + 3 * num_seats]
        self._beats = self._cells[1 + 3 * num_seats :]

    @property
    def started(self) -> bool:
        """Whether all processes have been ready at the same time, once."""
        return bool(self._cells[0])

    @property
    def all_ready(self) -> bool:
        """Whether all are ready now."""
        return all(self._ready)

    def note_started(self) -> None:
        """All are ready for the first time."""
        self._cells[0] = 1

    def clear(self, seat: int) -> None:
        """A new process takes the seat."""
        self._ready[seat] = self._running[seat] = self._closed[seat] = self._beats[seat] = 0

    def is_ready(self, seat: int) -> bool:
        """Whether that process is."""
        return bool(self._ready[seat])

    def set_ready(self, seat: int, ready: bool) -> None:
        """Says so of a process."""
        self._ready[seat] = ready

    def closed(self, seat: int) -> int:
        """How many of its connections have ended."""
        return self._closed[seat]

    def count_closed(self, seat: int) -> None:
        """One more of its connections has."""
        self._closed[seat] += 1

    def beat(self, seat: int) -> None:
        """A process has come round once more."""
        self._beats[seat] += 1

    def beats(self, seat: int) -> int:
        """How often it has."""
        return self._beats[seat]

    def set_running(self, seat: int, calls: int) -> None:
        """How many engine calls a process computes at this moment."""
        self._running[seat] = calls

    def running_elsewhere(self, seat: int) -> int:
        """How many all others do."""
        return sum(self._running) - self._running[seat]


@final
@dataclass(frozen=True, slots=True)
class Seat:
    """What one process has of the others.

    Attributes:
        index: which of the board's seats.
        board: the shared numbers.
        deal: a socket that brings connections; its end means that no more will come.
        pipe: a socket for messages to and from the parent.
        replaces: whether it takes the place of a process that died.
        unloaded: the models that were unloaded before it began.
    """

    index: int
    board: Board
    deal: socket.socket
    pipe: socket.socket
    replaces: bool = False
    unloaded: frozenset[str] = frozenset()

    def running(self) -> int:
        """How many engine calls the other processes compute now."""
        return self.board.running_elsewhere(self.index)

    def note(self, running: int) -> None:
        """Tells the others how many this one does."""
        self.board.set_running(self.index, running)
