"""Whether one more request may come in: by the work that waits and by the bytes that are held, not by how many wait.

On the event loop alone. Work is counted in seconds of the engines' cost models. How fast it goes is observed, since
those were measured on an idle machine: with others computing, reading and writing it is another pace.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, final

from service.errors import Overloaded

_WINDOW_S: Final = 0.25
# When a busy time ends, what each worker has in hand is not yet done; among so many done that does not matter.
_WINDOW_CALLS: Final = 4
# How far one window moves the pace: a few seconds after a change it is the new one.
_WEIGHT: Final = 0.3


@final
class Admission:
    """A bounded queue, seen from its door.

    Args:
        workers: engine calls at once of this process.
        most_wait_s: beyond which nobody is let in; who comes when nobody waits always is.
        most_bytes: of bodies and answers held at once; who comes when none are held always may.
        clock: seconds, monotonic.
    """

    def __init__(self, workers: int, most_wait_s: float, most_bytes: float, clock: Callable[[], float]) -> None:
        self._workers = workers
        self._most_wait_s = most_wait_s
        self._most_bytes = most_bytes
        self._pace = _Pace(workers, clock)
        self._pending_s = 0.0
        self._pending = 0
        self._held_bytes = 0

    @property
    def waiting(self) -> int:
        """Requests beyond those that the workers may have in hand."""
        return max(0, self._pending - self._workers)

    @property
    def wait_s(self) -> float:
        """How long who comes now is likely to wait."""
        return self._pending_s / self._pace.work_s_per_s if self._pending >= self._workers else 0.0

    @property
    def held_bytes(self) -> int:
        """Of bodies and answers."""
        return self._held_bytes

    def check(self) -> None:
        """Refuses if who comes now would wait for too long.

        Raises:
            Overloaded: it would.
        """
        wait_s = self.wait_s
        if wait_s > self._most_wait_s:
            raise Overloaded(
                f"who comes now waits for {wait_s:.3g} s, the limit is {self._most_wait_s:g} s (max_queue_ms); "
                "retry later",
                _retry_after_s(wait_s),
            )

    def enter(self, work_s: float) -> None:
        """Lets in so much work.

        Raises:
            Overloaded: it would wait for too long.
        """
        self.check()
        self._pending_s += work_s
        self._pending += 1
        if self._pending >= self._workers:
            self._pace.note_busy()

    def leave(self, work_s: float, *, done: bool) -> None:
        """So much work is done, or will not be."""
        self._pending -= 1
        # Sums of floats that are taken apart again do not end at 0 by themselves.
        self._pending_s = max(0.0, self._pending_s - work_s) if self._pending else 0.0
        self._pace.note_done(work_s if done else 0.0, still_busy=self._pending >= self._workers)

    @contextmanager
    def holding(self) -> Iterator["Held"]:
        """What one request holds, until it is over."""
        held = Held(self)
        try:
            yield held
        finally:
            self._held_bytes -= held.num_bytes

    def hold(self, more: int) -> None:
        """Lets in so many bytes.

        Raises:
            Overloaded: too many are held already.
        """
        if self._held_bytes > 0 and self._held_bytes + more > self._most_bytes:
            raise Overloaded(
                f"{self._held_bytes} bytes of other requests are held and {more} more are wanted, "
                f"the limit is {self._most_bytes:.0f} (max_queue_bytes); retry later",
                _retry_after_s(self.wait_s),
            )
        self._held_bytes += more


@final
class Held:
    """The bytes that one request holds."""

    def __init__(self, admission: Admission) -> None:
        self.num_bytes = 0
        self._admission = admission

    def grow_to(self, num_bytes: int) -> None:
        """Holds so many in all.

        Raises:
            Overloaded: others hold too many.
        """
        if num_bytes > self.num_bytes:
            self._admission.hold(num_bytes - self.num_bytes)
            self.num_bytes = num_bytes


@final
class _Pace:
    """Seconds of work that are done in a second while every worker has something to do."""

    def __init__(self, workers: int, clock: Callable[[], float]) -> None:
        self.work_s_per_s = float(workers)
        self._least_done = _WINDOW_CALLS * workers
        self._clock = clock
        self._busy_since: float | None = None
        self._done = 0
        self._done_s = 0.0

    def note_busy(self) -> None:
        """Every worker has something to do."""
        if self._busy_since is None:
            self._begin()

    def note_done(self, work_s: float, *, still_busy: bool) -> None:
        """So much more is done."""
        if self._busy_since is None:
            return
        self._done += work_s > 0
        self._done_s += work_s
        elapsed_s = self._clock() - self._busy_since
        if elapsed_s >= _WINDOW_S and self._done >= self._least_done:
            self.work_s_per_s += _WEIGHT * (self._done_s / elapsed_s - self.work_s_per_s)
            self._begin()
        if not still_busy:
            self._busy_since = None

    def _begin(self) -> None:
        self._busy_since, self._done, self._done_s = self._clock(), 0, 0.0


def _retry_after_s(wait_s: float) -> int:
    """In whole seconds, as the header has it."""
    return max(1, math.ceil(wait_s))
