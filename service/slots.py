"""How many engine calls may run at once: so many in the whole server, whose processes take them as they need them."""

from typing import Protocol, final


class Others(Protocol):
    """The other processes of the server."""

    def running(self) -> int:
        """How many engine calls they compute now."""

    def note(self, running: int) -> None:
        """Tells them how many this process does."""


@final
class NoOthers:
    """The only process there is."""

    def running(self) -> int:
        """None."""
        return 0

    def note(self, running: int) -> None:
        """Nobody is told."""


@final
class Slots:
    """The engine calls of one process. All under the lock of whoever uses it.

    A process may always compute its share, and more as far as the others leave CPUs idle: so a process that was dealt
    the large requests is not confined to its share, and no message is needed. Two that look at the same moment may
    exceed the total for the length of a call.

    Args:
        total: of the server.
        share: of this process, at least 1.
        others: what they are doing.
    """

    def __init__(self, total: int, share: int, others: Others) -> None:
        self.share = share
        self.total = total
        self.taken = 0
        self._others = others

    def is_free(self) -> bool:
        """Whether one more call may run."""
        return self.taken < self.share or self.taken + self._others.running() < self.total

    def is_idle(self) -> bool:
        """Whether nothing runs in the whole server."""
        return self.taken == 0 and self._others.running() == 0

    def take(self) -> None:
        """A call begins."""
        self.taken += 1
        self._others.note(self.taken)

    def give(self) -> None:
        """A call has ended."""
        self.taken -= 1
        self._others.note(self.taken)
