"""Which calls are made of what waits, and where: on the event loop, shared, or tile by tile. No test sleeps."""

import asyncio
import math
import sys
import threading
from typing import final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.admission import Admission
from service.calls import SMALL_S
from service.cost import CostModel, row_flops
from service.engine import Engine, EngineCall, EngineResult, Floats, Projected
from service.errors import DeadlineExceeded, EngineFailure, Internal, Overflow
from service.planner import Limits
from service.run import Done, Job
from service.scheduler import Scheduler
from service.slots import NoOthers, Slots
from service.tensors import AttentionInputs, WireTensors
from service.wanted import WantedWeights
from tests.service.test_scheduler import (
    HOUR_S,
    SHARED,
    SMALL,
    TURN_S,
    Clock,
    EngineOf,
    GatedEngine,
    Seen,
    _raise,
    answer_of,
    job,
    large_job,
    mark_of,
    run,
    scheduler,
    settled,
    started,
    submitted,
)
from tests.strategies import LAYER, Array, costs, examples, limits, packed_request


class TestSmall:
    def test_is_computed_on_the_event_loop(self) -> None:
        """A call that is shorter than its hand-over to a thread would be runs where it arrived."""

        async def test(clock: Clock) -> None:
            threads: list[threading.Thread] = []

            def note(call: EngineCall) -> EngineResult:
                threads.append(threading.current_thread())
                return answer_of(call)

            pool = scheduler(clock)
            assert mark_of(await pool.submit(job(EngineOf(note, SMALL), clock.time() + HOUR_S, 7))) == 7
            assert threads == [threading.current_thread()]
            pool.close()

        run(test)

    @pytest.mark.parametrize("count", [1, 5], ids=["one", "several"])
    def test_does_not_wait_for_busy_workers(self, count: int) -> None:
        """While every worker computes something long, small ones are answered by the event loop, each in its turn."""

        async def test(clock: Clock) -> None:
            pool, gated = scheduler(clock), GatedEngine()
            long = submitted(pool, job(gated, clock.time() + HOUR_S))
            await started(gated)
            small = [pool.submit(job(EngineOf(answer_of, SMALL), clock.time() + HOUR_S, mark)) for mark in range(count)]
            assert [mark_of(done) for done in await asyncio.gather(*small)] == list(range(count))
            assert not long.done()
            gated.gate.set()
            await long
            pool.close()

        run(test)

    def test_many_are_the_workers(self) -> None:
        """Where several compete, a worker computes them, so that the event loop can read and write meanwhile."""

        async def test(clock: Clock) -> None:
            threads: set[str] = set()

            def note(call: EngineCall) -> EngineResult:
                threads.add(threading.current_thread().name)
                return answer_of(call)

            pool, engine = scheduler(clock), EngineOf(note, SMALL)
            answers = await asyncio.gather(*(pool.submit(job(engine, clock.time() + HOUR_S, n)) for n in range(13)))
            assert [mark_of(done) for done in answers] == list(range(13))
            assert threads == {"engine-0"}
            pool.close()

        run(test)

    def test_time_that_ran_out_is_noticed(self) -> None:
        """A small job that comes too late is refused like any other."""

        async def test(clock: Clock) -> None:
            pool, calls = scheduler(clock), []

            def note(call: EngineCall) -> EngineResult:
                calls.append(call)
                return answer_of(call)

            with pytest.raises(DeadlineExceeded):
                await pool.submit(job(EngineOf(note, SMALL), clock.time() - 1))
            assert calls == []
            pool.close()

        run(test)

    def test_that_fails_does_so_alone(self) -> None:
        """What the engine raises on the event loop is that job's failure, and its place is free again."""

        async def test(clock: Clock) -> None:
            pool = scheduler(clock)
            with pytest.raises(EngineFailure):
                await pool.submit(job(EngineOf(_raise(MemoryError()), SMALL), clock.time() + HOUR_S))
            with pytest.raises(Overflow):
                await pool.submit(job(EngineOf(lambda call: answer_of(call, np.nan), SMALL), clock.time() + HOUR_S))
            assert mark_of(await pool.submit(job(EngineOf(answer_of, SMALL), clock.time() + HOUR_S, 7))) == 7
            pool.close()

        run(test)


class TestShared:
    def test_requests_that_wait_share_a_call(self) -> None:
        """What waits while a worker is busy is one call where that is faster; each gets its own answer and padding."""

        async def test(clock: Clock) -> None:
            seen = Seen()
            admission = Admission(1, TURN_S, math.inf, math.inf, clock.time)
            pool = Scheduler(Slots(1, 1, NoOthers()), admission, 2**62, seen, clock.time)
            engine = GatedEngine(SHARED)
            first = submitted(pool, job(engine, clock.time() + HOUR_S, 0))
            await started(engine)
            others = [submitted(pool, job(engine, clock.time() + HOUR_S, mark)) for mark in range(1, 8)]
            longer = submitted(pool, large_job(engine, clock.time() + HOUR_S, num_rows=3, mark=20))
            await settled()
            engine.gate.set()
            answers = await asyncio.gather(first, *others)
            assert [mark_of(done) for done in answers] == list(range(8))
            done = await longer
            assert done.output.output[:, 0, 0].tolist() == [20, 21, 22]
            assert seen.calls == [("idle", 1), ("joined", 10)]
            assert answers[1].computed_keys == 3  # all have 3 keys, and no row of the longer request reads more
            assert done.computed_keys == 3 * 3
            pool.close()

        run(test)

    def test_models_never_share_one(self) -> None:
        """Jobs of two engines are never in one call, however cheap that would be."""

        async def test(clock: Clock) -> None:
            pool = scheduler(clock)
            gated, one, two = GatedEngine(SHARED), GatedEngine(SHARED), GatedEngine(SHARED)
            one.gate.set()
            two.gate.set()
            first = submitted(pool, job(gated, clock.time() + HOUR_S))
            await started(gated)
            tasks = [submitted(pool, job((one, two)[n % 2], clock.time() + HOUR_S, n)) for n in range(8)]
            await settled()
            gated.gate.set()
            assert [mark_of(done) for done in await asyncio.gather(*tasks)] == list(range(8))
            await first
            assert {float(mark) % 2 for call in one.calls for mark in call.queries[:, 0, 0]} == {0}
            assert {float(mark) % 2 for call in two.calls for mark in call.queries[:, 0, 0]} == {1}
            assert len(one.calls) < 4
            pool.close()

        run(test)

    def test_one_that_fails_does_so_alone(self) -> None:
        """A call that fails is tried again for each that shared it: only the one that cannot be computed fails."""

        async def test(clock: Clock) -> None:
            def fail_on_five(call: EngineCall) -> EngineResult:
                if (call.queries == 5).any():
                    raise RuntimeError("out of memory")
                return answer_of(call)

            pool, gated = scheduler(clock), GatedEngine()
            engine = EngineOf(fail_on_five, SHARED)
            first = submitted(pool, job(gated, clock.time() + HOUR_S))
            await started(gated)
            tasks = [submitted(pool, job(engine, clock.time() + HOUR_S, mark)) for mark in range(8)]
            await settled()
            gated.gate.set()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(outcome) for outcome in outcomes] == [Done] * 5 + [EngineFailure] + [Done] * 2
            assert [mark_of(done) for done in outcomes if isinstance(done, Done)] == [0, 1, 2, 3, 4, 6, 7]
            await first
            pool.close()

        run(test)

    def test_one_that_overflows_does_so_alone(self) -> None:
        """A result that is not finite refuses its own request, not those in the same call."""

        async def test(clock: Clock) -> None:
            def overflow_on_five(call: EngineCall) -> EngineResult:
                result = answer_of(call)
                result.output[call.queries[:, 0, 0] == 5] = np.inf
                return result

            pool, gated = scheduler(clock), GatedEngine()
            engine = EngineOf(overflow_on_five, SHARED)
            first = submitted(pool, job(gated, clock.time() + HOUR_S))
            await started(gated)
            tasks = [submitted(pool, job(engine, clock.time() + HOUR_S, mark)) for mark in range(8)]
            await settled()
            gated.gate.set()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(outcome) for outcome in outcomes] == [Done] * 5 + [Overflow] + [Done] * 2
            await first
            pool.close()

        run(test)


class TestCrowd:
    def test_each_gets_its_own_answer(self) -> None:
        """Thousands of small jobs from many clients, on the event loop and in shared calls of two threads at once."""
        # Threads take turns as often as they can, so that what is not guarded breaks.
        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)

        async def test(clock: Clock) -> None:
            small_and_shared = CostModel.linear(call_s=SMALL_S / 2, flop_s=0.0)
            pool, engine = scheduler(clock, workers=2), EngineOf(answer_of, small_and_shared)

            async def client(first: int) -> None:
                for mark in range(first, first + 200):
                    assert mark_of(await pool.submit(job(engine, clock.time() + HOUR_S, mark))) == mark

            await asyncio.gather(*(client(200 * number) for number in range(32)))
            pool.close()

        try:
            run(test)
        finally:
            sys.setswitchinterval(before)


class TestTiled:
    def test_projects_once_and_attends_tile_by_tile(self) -> None:
        """A row that is too long for a call: its keys are projected first, then every tile finds them there."""

        async def test(clock: Clock) -> None:
            seen = Seen()
            admission = Admission(2, TURN_S, math.inf, math.inf, clock.time)
            pool = Scheduler(Slots(2, 2, NoOthers()), admission, 2**62, seen, clock.time)
            engine = ProjectingEngine(CostModel.linear(0.0, 0.19 / row_flops(LAYER, 89, 97)))
            done = await pool.submit(tiled_job(engine, clock.time() + HOUR_S))
            assert engine.attended_early == 0
            assert done.output.output[0, :, 0].tolist() == list(range(89))
            assert done.calls == len(seen.calls) == engine.num_projected + engine.num_attended
            assert engine.num_projected > 1
            assert engine.num_attended > 1
            assert done.computed_keys == 97
            assert done.computed_queries == 89
            assert set(seen.calls) == {("slice", 1)}
            pool.close()

        run(test)


@final
class ProjectingEngine:
    """Projects keys to their position, and attends to the queries' own mark once every key is there."""

    fault = None

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self.num_projected = 0
        self.num_attended = 0
        self.attended_early = 0

    def run(self, call: EngineCall) -> EngineResult:
        """Not for rows as long as these."""
        raise NotImplementedError

    def project(self, keys: Floats, values: Floats) -> Projected:
        """Ones, where the room had anything."""
        self.num_projected += 1
        shape = (1, LAYER.num_heads, keys.shape[1], LAYER.head_size)
        return Projected(np.full(shape, 7, np.float32), np.full(shape, 7, np.float32))

    def attend(self, queries: Floats, projected: Projected, valid_lens: Array | None) -> Floats:
        """The queries' first number in every place."""
        self.num_attended += 1
        self.attended_early += int((projected.keys != 7).any() or (projected.values != 7).any())
        return np.repeat(queries[:, :, :1], LAYER.num_hiddens, axis=-1)


def tiled_job(engine: Engine, deadline: float) -> Job:
    """A job of one row of 89 queries, each marked by its position, and 97 keys."""
    tensors = {
        "queries": np.repeat(np.arange(89, dtype=np.float32)[None, :, None], LAYER.query_size, axis=-1),
        "keys": np.ones((1, 97, LAYER.key_size), np.float32),
        "values": np.ones((1, 97, LAYER.value_size), np.float32),
    }
    return Job(engine, LAYER, AttentionInputs.parse(WireTensors(tensors), LAYER), None, deadline)


class TestDefect:
    def test_costs_its_requests_and_nothing_else(self) -> None:
        """Where the service itself breaks around a call, those in it are told, and the thread goes on."""

        async def test(clock: Clock) -> None:
            seen = BreakingOnce()
            admission = Admission(1, TURN_S, math.inf, math.inf, clock.time)
            pool = Scheduler(Slots(1, 1, NoOthers()), admission, 2**62, seen, clock.time)
            engine = EngineOf(answer_of)
            threads = threading.active_count()
            with pytest.raises(Internal, match="internal error"):
                await pool.submit(job(engine, clock.time() + HOUR_S))
            for mark in range(3):
                assert mark_of(await pool.submit(job(engine, clock.time() + HOUR_S, mark))) == mark
            assert threading.active_count() == threads + 1
            assert admission.wait_s == 0
            pool.close()

        run(test)

    @pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), MemoryError()], ids=repr)
    def test_whatever_an_engine_raises_is_that_calls_failure(self, error: BaseException) -> None:
        """Also what would end a thread."""

        async def test(clock: Clock) -> None:
            pool = scheduler(clock)
            for _ in range(3):
                with pytest.raises(EngineFailure):
                    await pool.submit(job(EngineOf(_raise(error)), clock.time() + HOUR_S))
            assert mark_of(await pool.submit(job(EngineOf(answer_of), clock.time() + HOUR_S, 7))) == 7
            pool.close()

        run(test)

    def test_says_for_how_long_a_call_runs(self) -> None:
        """The oldest of those that run now, and nothing when none does."""

        async def test(clock: Clock) -> None:
            pool, engine = scheduler(clock), GatedEngine()
            assert pool.longest_call_s == 0
            waiting = submitted(pool, job(engine, clock.time() + 10 * HOUR_S))
            await started(engine)
            clock.move(HOUR_S)
            assert pool.longest_call_s == pytest.approx(HOUR_S, abs=10)
            engine.gate.set()
            await waiting
            await settled()
            assert pool.longest_call_s == 0
            pool.close()

        run(test)


@final
class BreakingOnce:
    """An observer with a defect that shows the first time."""

    def __init__(self) -> None:
        self._broken = False

    def called(self, release: str, rows: int) -> None:
        """A call."""
        if not self._broken:
            self._broken = True
            raise ZeroDivisionError


@final
class CountingEngine:
    """Counts the queries and keys of every call."""

    fault = None

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self.queries = 0
        self.keys = 0
        self._lock = threading.Lock()

    def run(self, call: EngineCall) -> EngineResult:
        """Zeros."""
        (batch, num_queries), num_kv = call.queries.shape[:2], call.keys.shape[1]
        self._count(batch * num_queries, batch * num_kv)
        weights = np.zeros((batch, LAYER.num_heads, num_queries, num_kv), np.float32) if call.need_weights else None
        return EngineResult(np.zeros((batch, num_queries, LAYER.num_hiddens), np.float32), weights)

    def project(self, keys: Floats, values: Floats) -> Projected:
        """Zeros."""
        self._count(0, keys.shape[1])
        shape = (1, LAYER.num_heads, keys.shape[1], LAYER.head_size)
        return Projected(np.zeros(shape, np.float32), np.zeros(shape, np.float32))

    def attend(self, queries: Floats, projected: Projected, valid_lens: Array | None) -> Floats:
        """Zeros."""
        self._count(queries.shape[1], 0)
        return np.zeros((1, queries.shape[1], LAYER.num_hiddens), np.float32)

    def _count(self, queries: int, keys: int) -> None:
        with self._lock:
            self.queries += queries
            self.keys += keys


class TestWaste:
    @given(
        seeds=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=12),
        cost=costs,
        limits=limits,
        workers=st.integers(1, 3),
        need_weights=st.booleans(),
    )
    @examples(60)
    def test_that_is_reported_is_what_was_run(
        self, seeds: list[int], cost: CostModel, limits: Limits, workers: int, need_weights: bool
    ) -> None:
        """However requests are grouped, shared and tiled: what they say was computed for them adds up to the calls."""
        engine = CountingEngine(cost)

        async def test(clock: Clock) -> None:
            admission = Admission(workers, TURN_S, math.inf, math.inf, clock.time)
            slots = Slots(workers, workers, NoOthers())
            pool = Scheduler(slots, admission, limits.workspace_bytes, Seen(), clock.time)
            requests = [packed_request(LAYER, seed) for seed in seeds]
            jobs = [
                Job(
                    engine,
                    LAYER,
                    AttentionInputs.parse(request.wire(), LAYER),
                    WantedWeights() if need_weights else None,
                    clock.time() + 1e12,
                )
                for request in requests
            ]
            done = await asyncio.gather(*map(pool.submit, jobs))
            pool.close()
            assert sum(each.computed_queries for each in done) == engine.queries
            assert sum(each.computed_keys for each in done) == engine.keys
            assert engine.queries >= sum(len(each.inputs.queries.data) for each in jobs)

        run(test)
