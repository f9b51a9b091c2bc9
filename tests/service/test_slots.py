"""How many engine calls may run at once in one of several processes."""

from service.slots import NoOthers, Slots


class Busy:
    """Others that compute so many calls, and what they were told."""

    def __init__(self, calls: int = 0) -> None:
        self.calls = calls
        self.told: list[int] = []

    def running(self) -> int:
        return self.calls

    def note(self, running: int) -> None:
        self.told.append(running)


def taken_until_full(slots: Slots) -> int:
    """How many may be taken."""
    while slots.is_free():
        slots.take()
    return slots.taken


def test_the_only_process_has_them_all() -> None:
    assert taken_until_full(Slots(3, 3, NoOthers())) == 3


def test_a_share_is_always_there() -> None:
    """However busy the others are."""
    assert taken_until_full(Slots(4, 2, Busy(4))) == 2
    assert taken_until_full(Slots(4, 2, Busy(100))) == 2


def test_what_the_others_leave_may_be_taken() -> None:
    others = Busy()
    assert taken_until_full(Slots(4, 1, others)) == 4
    others.calls = 1
    assert taken_until_full(Slots(4, 1, others)) == 3


def test_the_others_are_told() -> None:
    others = Busy()
    slots = Slots(4, 2, others)
    slots.take()
    slots.take()
    slots.give()
    assert others.told == [1, 2, 1]


def test_idle_means_the_whole_server() -> None:
    others = Busy()
    slots = Slots(2, 1, others)
    assert slots.is_idle()
    others.calls = 1
    assert not slots.is_idle()
    others.calls = 0
    slots.take()
    assert not slots.is_idle()
