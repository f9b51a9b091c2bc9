"""What is measured at the start, with graphs that take as long as a test says."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from service.artifact import Layer
from service.engine import EngineCall
from service.engine.warmup import Choice, measure
from service.repository import Repository


@pytest.fixture(scope="module")
def layer(repository: Path) -> Layer:
    """Some layer."""
    return Repository(repository).read("odd", 1).layer


def taking(monkeypatch: pytest.MonkeyPatch, seconds: Mapping[str, float]) -> Callable[[str, EngineCall], object]:
    """Runs graphs on a clock of its own, on which each takes so long, and the first call of each a second more."""
    now = [0.0]
    seen = set()

    def run(name: str, call: EngineCall) -> object:
        now[0] += seconds[name] * call.queries.shape[1]
        if (name, call.queries.shape) not in seen:
            seen.add((name, call.queries.shape))
            now[0] += 1
        return None

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return run


class TestMeasure:
    @pytest.mark.parametrize(
        ("full", "masked", "faster"), [(1.0, 2.0, "full"), (2.0, 1.0, "masked"), (1.0, 0.99, "full")], ids=str
    )
    def test_takes_what_is_faster(
        self, monkeypatch: pytest.MonkeyPatch, layer: Layer, full: float, masked: float, faster: str
    ) -> None:
        """The graph that is faster by more than measuring is off, and the time of the fastest; no first call counts."""
        measured = measure(layer, [1, 2, 4], taking(monkeypatch, {"full": full, "masked": masked}))
        assert measured["faster"] == [faster] * 3
        assert measured["seconds"] == pytest.approx([min(full, masked) * length for length in (1, 2, 4)])
        assert measured["flops"] == sorted(measured["flops"])

    def test_never_falls(self, monkeypatch: pytest.MonkeyPatch, layer: Layer) -> None:
        """A larger call that was measured to be faster is as slow as the smaller one."""
        seconds = {3: 5.0, 7: 1.0}
        now = [0.0]

        def run(_: str, call: EngineCall) -> object:
            now[0] += seconds[call.queries.shape[1]]
            return None

        monkeypatch.setattr(time, "perf_counter", lambda: now[0])
        assert measure(layer, [3, 7], run)["seconds"] == pytest.approx([5.0, 5.0])


class TestChoice:
    def test_is_that_of_the_size_at_or_below(self) -> None:
        """Below the first bound the first, from a bound on the next, beyond the last the last."""
        choice = Choice([10.0, 20.0], ["a", "b", "c"])
        assert [choice.at(size) for size in (0, 9, 10, 19, 20, 1e9)] == ["a", "a", "b", "b", "c", "c"]
