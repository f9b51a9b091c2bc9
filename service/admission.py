"""Whether one more request may come in: by the work that waits and by the bytes that are held, not by how many wait.

Work is counted in seconds of the engines' cost models. How fast it goes is observed, since those were measured on an
idle machine: with others computing, reading and writing it is another pace.

Requests take turns, so that small ones pass between the calls of a large one. Behind others, a request is therefore
kept waiting by each of them for as long as it computes itself, or for one turn if that is longer, and no longer than
what is left of the other. All on the event loop but for what notes that a call has ended.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, final

from service.errors import Overloaded

# A wait can be told to a third: measured at ten times what could be done, on a machine that others use, too, the
# longest were so much longer than told.
_MARGIN: Final = 0.7
_WINDOW_S: Final = 0.25
# When a busy time ends, what each worker has in hand is not yet done; among so many calls that does not matter.
_WINDOW_CALLS: Final = 4
# How far one window moves the pace: a second after a change it is nearly the new one.
_WEIGHT: Final = 0.5


@final
class Place:
    """Of one request among those that were let in.

    Attributes:
        work_s: that it was let in with.
        done_s: of it, in calls that have ended.
    """

    __slots__ = ("done_s", "work_s")

    def __init__(self, work_s: float) -> None:
        self.work_s = work_s
        self.done_s = 0.0

    @property
    def left_s(self) -> float:
        """Still to be done."""
        return max(0.0, self.work_s - self.done_s)

    def note_done(self, work_s: float) -> None:
        """A call of so much of it has ended. From any thread, one at a time."""
        self.done_s += work_s


@final
class Admission:
    """A bounded queue, seen from its door.

    Args:
        workers: engine calls at once of this process.
        turn_s: seconds of work after which it is another request's turn.
        most_wait_s: beyond which nobody is let in; who comes while a worker is free always is.
        most_bytes: of bodies and answers held at once; who comes when none are held always may.
        clock: seconds, monotonic.
    """

    def __init__(
        self, workers: int, turn_s: float, most_wait_s: float, most_bytes: float, clock: Callable[[], float]
    ) -> None:
        self._workers = workers
        self._turn_s = turn_s
        self._most_wait_s = most_wait_s
        self._most_bytes = most_bytes
        self._pace = _Pace(workers, clock)
        self._places: set[Place] = set()
        self._turns_s = 0.0
        self._held_bytes = 0

    @property
    def waiting(self) -> int:
        """Requests beyond those that the workers may have in hand."""
        return max(0, len(self._places) - self._workers)

    @property
    def wait_s(self) -> float:
        """How long a small request that comes now is likely to wait."""
        return self._wait_s(0.0)

    @property
    def held_bytes(self) -> int:
        """Of bodies and answers."""
        return self._held_bytes

    def check(self) -> None:
        """Refuses if even a small request would wait for too long.

        Raises:
            Overloaded: it would.
        """
        self._check(0.0)

    def enter(self, work_s: float) -> Place:
        """Lets in so much work; returns its place, to be given to `leave`.

        Raises:
            Overloaded: it would wait for too long.
        """
        self._check(work_s)
        place = Place(work_s)
        self._places.add(place)
        self._turns_s += min(work_s, self._turn_s)
        if len(self._places) >= self._workers:
            self._pace.note_busy()
        return place

    def leave(self, place: Place) -> None:
        """That work is done, or will not be."""
        self._places.remove(place)
        self._turns_s -= min(place.work_s, self._turn_s)
        if not self._places:
            self._turns_s = 0.0  # sums of floats that are taken apart again do not end there by themselves
        if len(self._places) < self._workers:
            self._pace.note_idle()

    def note_done(self, work_s: float) -> None:
        """A call of so much work has ended. From any thread, one at a time."""
        self._pace.note_done(work_s)

    def _wait_s(self, work_s: float) -> float:
        if len(self._places) < self._workers:
            return 0.0
        is_small = work_s <= self._turn_s
        ahead_s = self._turns_s if is_small else sum(min(other.left_s, work_s) for other in self._places)
        return ahead_s / self._pace.work_s_per_s

    def _check(self, work_s: float) -> None:
        wait_s = self._wait_s(work_s)
        if wait_s > _MARGIN * self._most_wait_s:
            raise Overloaded(
                f"the wait is {wait_s:.3g} s, the limit is {self._most_wait_s:g} s (max_queue_ms); retry later",
                _retry_after_s(wait_s),
            )

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
        self._least_calls = _WINDOW_CALLS * workers
        self._clock = clock
        self._busy_since: float | None = None
        self._calls = 0
        self._done_s = 0.0

    def note_busy(self) -> None:
        """Every worker has something to do."""
        if self._busy_since is None:
            self._begin()

    def note_idle(self) -> None:
        """One of them has not."""
        self._busy_since = None

    def note_done(self, work_s: float) -> None:
        """So much more is done."""
        since = self._busy_since
        if since is None:
            return
        self._calls += 1
        self._done_s += work_s
        elapsed_s = self._clock() - since
        if elapsed_s >= _WINDOW_S and self._calls >= self._least_calls and self._done_s > 0:
            self.work_s_per_s += _WEIGHT * (self._done_s / elapsed_s - self.work_s_per_s)
            self._begin()

    def _begin(self) -> None:
        self._busy_since, self._calls, self._done_s = self._clock(), 0, 0.0


def _retry_after_s(wait_s: float) -> int:
    """In whole seconds, as the header has it."""
    return max(1, math.ceil(wait_s))
