"""Who may come in: by the work that waits, at the pace that it goes, and by the bytes that are held."""

import math
from contextlib import suppress

import pytest

from service.admission import Admission
from service.errors import Overloaded


class Clock:
    """Time that is moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    """The clock."""
    return Clock()


def door(clock: Clock, *, workers: int = 2, most_wait_s: float = 1.43, most_bytes: float = math.inf) -> Admission:
    """An admission on that clock, where a turn is half a second, and nobody is to be told to wait for more than one."""
    return Admission(workers, 0.5, most_wait_s, most_bytes, clock)


def work_through(admission: Admission, clock: Clock, work_s: float, took_s: float, times: int) -> None:
    """Lets so many pieces of work be done by two workers, each in `took_s`, while one more always waits."""
    places = [admission.enter(work_s) for _ in range(3)]
    for _ in range(times):
        clock.now += took_s / 2
        admission.note_done(work_s)
        admission.leave(places.pop(0))
        places.append(admission.enter(work_s))
    for place in places:
        admission.leave(place)


class TestWait:
    def test_nobody_waits_while_a_worker_is_free(self, clock: Clock) -> None:
        """However long what runs takes, the last worker is there for who comes."""
        admission = door(clock)
        admission.enter(1e6)
        assert admission.wait_s == 0
        admission.enter(1e-3)
        assert admission.wait_s > 0.2

    def test_is_the_work_by_the_number_of_workers(self, clock: Clock) -> None:
        """Until more is known, each worker does a second of work in a second."""
        admission = door(clock)
        for _ in range(4):
            admission.enter(0.3)
        assert admission.wait_s == pytest.approx(0.6)
        assert admission.waiting == 2

    def test_small_ones_pass_between_the_turns_of_large_ones(self, clock: Clock) -> None:
        """Behind hours of work a small request waits for one turn of each; one as large waits for all of it."""
        admission = door(clock)
        for _ in range(2):
            admission.enter(7200)
        assert admission.wait_s == pytest.approx(0.5)
        admission.enter(0.1)
        with pytest.raises(Overloaded, match="the wait is 3"):
            admission.enter(3600)

    def test_what_is_done_is_not_waited_for(self, clock: Clock) -> None:
        """Behind large ones that are nearly done, one as large waits for the rest of them."""
        admission = door(clock)
        places = [admission.enter(1.8) for _ in range(2)]
        with pytest.raises(Overloaded, match=r"the wait is 1\.8 s"):
            admission.enter(1.8)
        for place in places:
            place.note_done(1.5)
        admission.enter(1.8)
        with pytest.raises(Overloaded, match=r"the wait is 1\.2 s"):
            admission.enter(1.8)

    def test_more_work_than_was_thought_leaves_none(self, clock: Clock) -> None:
        """A request whose calls took part in others' may have done more than it was let in with."""
        admission = door(clock, workers=1)
        admission.enter(1).note_done(3)
        admission.enter(1)
        assert admission.enter(1).left_s == 1

    def test_refuses_beyond_the_limit_and_says_when_to_come_back(self, clock: Clock) -> None:
        """The advice is the wait, in whole seconds; one who leaves makes room."""
        admission = door(clock)
        places = [admission.enter(0.45) for _ in range(5)]
        with pytest.raises(Overloaded, match=r"the wait is 1.1\d* s, the limit is 1.43 s \(max_queue_ms\)") as refused:
            admission.enter(0.001)
        assert refused.value.retry_after_s == 2
        admission.leave(places[2])
        admission.enter(0.001)

    def test_one_that_is_larger_than_the_limit_is_let_in_where_nobody_waits(self, clock: Clock) -> None:
        """The bound is on what stands before a request, not on the request."""
        admission = door(clock, most_wait_s=0.1)
        admission.enter(50)
        admission.enter(50)
        with pytest.raises(Overloaded):
            admission.check()

    def test_is_none_when_all_have_left(self, clock: Clock) -> None:
        """Sums that do not come out even leave nothing behind."""
        admission = door(clock)
        for _ in range(1000):
            for place in [admission.enter(0.1) for _ in range(3)]:
                admission.leave(place)
        admission.enter(0)
        admission.enter(0)
        assert admission.wait_s == 0


class TestPace:
    @pytest.mark.parametrize(("work_s", "took_s"), [(0.1, 0.3), (0.4, 0.2)], ids=["slower", "faster"])
    def test_other_than_the_model_is_learnt(self, clock: Clock, work_s: float, took_s: float) -> None:
        """Where work takes three times as long as it should, or half, as where small requests share calls, waits do."""
        admission = door(clock)
        work_through(admission, clock, work_s, took_s, times=200)
        for _ in range(4):
            admission.enter(work_s)
        assert admission.wait_s == pytest.approx(2 * took_s, rel=0.05)

    def test_idle_time_says_nothing(self, clock: Clock) -> None:
        """A worker that had nothing to do was not slow."""
        admission = door(clock)
        for _ in range(50):
            place = admission.enter(0.1)
            clock.now += 10
            admission.note_done(0.1)
            admission.leave(place)
            clock.now += 10
        for _ in range(4):
            admission.enter(0.3)
        assert admission.wait_s == pytest.approx(0.6)

    def test_work_that_was_dropped_was_not_done(self, clock: Clock) -> None:
        """Clients that leave do not make workers look fast."""
        admission = door(clock)
        places = [admission.enter(0.1) for _ in range(3)]
        for number in range(400):
            if number % 2:
                clock.now += 0.1  # in which two workers could do two
                admission.note_done(0.1)
            admission.leave(places.pop(0))
            places.append(admission.enter(0.1))
        assert admission.wait_s == pytest.approx(0.3, rel=0.05)

    def test_work_that_costs_nothing_says_nothing(self, clock: Clock) -> None:
        """However much of it is done, nobody waits for it, and the pace stays one."""
        admission = door(clock)
        work_through(admission, clock, work_s=0.0, took_s=1.0, times=20_000)
        for _ in range(4):
            admission.enter(0.3)
        assert admission.wait_s == pytest.approx(0.6)


class TestBytes:
    def test_are_held_until_a_request_is_over(self, clock: Clock) -> None:
        """A body grows, an answer is added, and all of it goes at the end, also of a request that failed."""
        admission = door(clock, most_bytes=100)
        with suppress(ValueError), admission.holding() as held:
            held.grow_to(30)
            held.grow_to(20)  # it never shrinks
            held.grow_to(50)
            assert admission.held_bytes == 50
            raise ValueError
        assert admission.held_bytes == 0

    def test_beyond_the_limit_who_comes_later_is_refused(self, clock: Clock) -> None:
        """The message has all three numbers; what was held before still is."""
        admission = door(clock, most_bytes=100)
        with admission.holding() as first, admission.holding() as second:
            first.grow_to(70)
            with pytest.raises(Overloaded, match=r"70 bytes of other requests are held and 31 more .* limit is 100"):
                second.grow_to(31)
            second.grow_to(30)
            assert admission.held_bytes == 100

    def test_one_may_hold_more_when_nobody_else_holds_any(self, clock: Clock) -> None:
        """Else there would be requests that never fit although their body may be as long."""
        admission = door(clock, most_bytes=100)
        with admission.holding() as held:
            held.grow_to(150)
            assert admission.held_bytes == 150
