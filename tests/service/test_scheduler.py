"""The queue and its workers, with engines that wait for the test. No test sleeps: time is moved by hand."""

import asyncio
import math
import threading
from collections.abc import Callable, Coroutine
from typing import Any, final

import numpy as np
import pytest

from service.admission import Admission
from service.cost import CostModel, row_flops
from service.engine import Engine, EngineCall, EngineResult
from service.errors import DeadlineExceeded, Draining, EngineFailure, Overflow, Overloaded
from service.run import Done, Job
from service.scheduler import Scheduler
from service.slots import NoOthers, Slots
from service.tensors import AttentionInputs, WireTensors
from tests.fakes import Unprojecting
from tests.strategies import LAYER

HOUR_S = 3600.0
FLOPS = row_flops(LAYER, 2, 5)  # of a row of a large job; a job of `job()` has a few less
# In all three, a call of twice the work takes more than twice as long, so that no two jobs share one.
# Rows of different lengths are calls of their own, and none is so small that the event loop computes it.
WORK = CostModel(((0.0, 0.0), (FLOPS, 2e-3), (10 * FLOPS, 40e-3)))
# A job of `job()` takes 1.7 ms: too long for the event loop.
APART = CostModel(((0.0, 1.7e-3), (FLOPS, 1.7e-3), (2 * FLOPS, 9e-3)))
# It is so small that the event loop computes it.
SMALL = CostModel(((0.0, 5e-4), (FLOPS, 5e-4), (2 * FLOPS, 9e-3)))
# It takes 2 ms whatever is in it, so all that wait share a call.
SHARED = CostModel.linear(call_s=2e-3, flop_s=0.0)
TURN_S = 0.04
LIMIT_S = 30  # until a test that hangs is given up


@final
class Clock(asyncio.SelectorEventLoop):
    """An event loop whose time can be moved on, so that its timers are due at once."""

    def __init__(self) -> None:
        super().__init__()
        self._moved_s = 0.0

    def time(self) -> float:
        """Seconds, as the loop's timers and the scheduler see them."""
        return super().time() + self._moved_s

    def move(self, seconds: float) -> None:
        """Lets that much time have passed."""
        self._moved_s += seconds


@final
class Seen:
    """Remembers what a scheduler does."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def called(self, release: str, rows: int) -> None:
        """A call."""
        self.calls.append((release, rows))


@final
class GatedEngine(Unprojecting):
    """Computes the queries' first number in every place, once the gate is open; counts its calls."""

    def __init__(self, cost: CostModel = APART) -> None:
        self.cost = cost
        self.started = threading.Semaphore(0)
        self.gate = threading.Event()
        self.calls: list[EngineCall] = []

    def run(self, call: EngineCall) -> EngineResult:
        """The answer, after the gate was opened."""
        self.calls.append(call)
        self.started.release()
        assert self.gate.wait(LIMIT_S)
        return answer_of(call)


@final
class EngineOf(Unprojecting):
    """Runs what it is given."""

    def __init__(self, run: Callable[[EngineCall], EngineResult], cost: CostModel = APART) -> None:
        self.run = run
        self.cost = cost


def answer_of(call: EngineCall, value: float | None = None) -> EngineResult:
    """A result that can be told from others."""
    mark = call.queries[:, :, :1] if value is None else np.full((*call.queries.shape[:2], 1), value)
    return EngineResult(np.repeat(mark, LAYER.num_hiddens, axis=-1).astype(np.float32), None)


def job(engine: Engine, deadline: float, mark: float = 1.0) -> Job:
    """A job whose answer is its mark."""
    tensors = {
        "queries": np.full((1, 2, LAYER.query_size), mark, np.float32),
        "keys": np.ones((1, 3, LAYER.key_size), np.float32),
        "values": np.ones((1, 3, LAYER.value_size), np.float32),
    }
    return Job(engine, LAYER, AttentionInputs.parse(WireTensors(tensors), LAYER), None, deadline)


def run(test: Callable[[Clock], Coroutine[Any, Any, None]]) -> None:
    """Runs an async test on a clock of its own."""
    with asyncio.Runner(loop_factory=Clock) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, Clock)
        runner.run(asyncio.wait_for(test(loop), HOUR_S * 1000))


def scheduler(clock: Clock, workers: int = 1, most_wait_s: float = math.inf) -> Scheduler:
    """A scheduler on that clock."""
    admission = Admission(workers, TURN_S, most_wait_s, math.inf, clock.time)
    return Scheduler(Slots(workers, workers, NoOthers()), admission, 2**62, Seen(), clock.time)


def submitted(scheduler: Scheduler, job: Job) -> "asyncio.Task[Done]":
    """A job on its way."""
    return asyncio.create_task(scheduler.submit(job))


async def started(engine: GatedEngine) -> None:
    """Returns once one more call of the engine runs."""
    assert await asyncio.to_thread(engine.started.acquire, timeout=LIMIT_S)


async def settled() -> None:
    """Lets every task that can go on do so."""
    for _ in range(10):
        await asyncio.sleep(0)


def mark_of(done: Done) -> float:
    """The mark of the job that this is the answer of."""
    return float(done.output.output[0, 0, 0])


class TestAnswer:
    def test_is_the_jobs_own(self) -> None:
        """Whoever waits gets the answer to what they asked, in whatever order workers come to it."""

        async def test(clock: Clock) -> None:
            pool = scheduler(clock, workers=3)
            engine = EngineOf(answer_of)
            jobs = [job(engine, clock.time() + HOUR_S, mark) for mark in range(89)]
            answers = await asyncio.gather(*(pool.submit(job) for job in jobs))
            assert [mark_of(done) for done in answers] == list(range(89))
            pool.close()

        run(test)

    def test_says_how_long_it_waited_and_was_computed(self) -> None:
        """Times are those of the clock: 5 s in the queue behind another job, 7 s in the engine."""

        async def test(clock: Clock) -> None:
            pool, gated = scheduler(clock), GatedEngine()

            def slow(call: EngineCall) -> EngineResult:
                clock.move(7)
                return answer_of(call)

            first = submitted(pool, job(gated, clock.time() + HOUR_S))
            await started(gated)
            second = submitted(pool, job(EngineOf(slow), clock.time() + HOUR_S))
            await settled()
            clock.move(5)
            gated.gate.set()
            await first
            done = await second
            assert done.queue_s == pytest.approx(5, abs=1)
            assert done.compute_s == pytest.approx(7, abs=1)
            pool.close()

        run(test)

    def test_workers_compute_at_once(self) -> None:
        """As many calls run side by side as there are workers."""

        async def test(clock: Clock) -> None:
            pool, engine = scheduler(clock, workers=3, most_wait_s=0), GatedEngine()
            tasks = [submitted(pool, job(engine, clock.time() + HOUR_S)) for _ in range(3)]
            for _ in tasks:
                await started(engine)
            engine.gate.set()
            await asyncio.gather(*tasks)
            pool.close()

        run(test)


class TestQueue:
    def test_full_is_overloaded(self) -> None:
        """Who would wait for too long is refused, and nothing else is disturbed."""

        async def test(clock: Clock) -> None:
            # Each takes 1.7 ms, two at a time: the seventh would wait for 5.1 ms.
            pool, engine = scheduler(clock, workers=2, most_wait_s=6.25e-3), GatedEngine()
            tasks = [submitted(pool, job(engine, clock.time() + HOUR_S, mark)) for mark in range(6)]
            await settled()
            with pytest.raises(
                Overloaded, match=r"the wait is 0.0051 s, the limit is 0.00625 s \(max_queue_ms\)"
            ) as refused:
                await pool.submit(job(engine, clock.time() + HOUR_S))
            assert refused.value.retry_after_s == 1
            engine.gate.set()
            assert [mark_of(done) for done in await asyncio.gather(*tasks)] == list(range(6))
            assert len(engine.calls) == 6
            pool.close()

        run(test)

    def test_of_no_time_takes_as_many_as_there_are_workers(self) -> None:
        """A limit of 0 means that nobody waits."""

        async def test(clock: Clock) -> None:
            pool, engine = scheduler(clock, workers=2, most_wait_s=0), GatedEngine()
            tasks = [submitted(pool, job(engine, clock.time() + HOUR_S)) for _ in range(2)]
            await settled()
            with pytest.raises(Overloaded):
                await pool.submit(job(engine, clock.time() + HOUR_S))
            engine.gate.set()
            await asyncio.gather(*tasks)
            assert mark_of(await pool.submit(job(engine, clock.time() + HOUR_S, 7))) == 7
            pool.close()

        run(test)

    def test_one_large_request_weighs_as_much_as_its_parts(self) -> None:
        """What counts is work: behind one request of many milliseconds waits who would wait behind several."""

        async def test(clock: Clock) -> None:
            pool, engine = scheduler(clock, most_wait_s=4e-3), GatedEngine(WORK)
            large = submitted(pool, large_job(engine, clock.time() + HOUR_S))
            await settled()
            with pytest.raises(Overloaded):
                await pool.submit(job(engine, clock.time() + HOUR_S))
            engine.gate.set()
            await large
            pool.close()

        run(test)

    def test_weighs_what_is_left_of_a_large_request(self) -> None:
        """Who would wait too long for all of it is let in when most of its calls have ended."""

        async def test(clock: Clock) -> None:
            allowed, seen = threading.Semaphore(0), threading.Semaphore(0)

            def one_by_one(call: EngineCall) -> EngineResult:
                seen.release()
                assert allowed.acquire(timeout=LIMIT_S)
                return answer_of(call)

            engine = EngineOf(one_by_one, WORK)
            pool = Scheduler(
                Slots(1, 1, NoOthers()), Admission(1, 0.0, 8e-3, math.inf, clock.time), 2**62, Seen(), clock.time
            )
            first = submitted(pool, large_job(engine, clock.time() + HOUR_S))
            await settled()
            with pytest.raises(Overloaded):
                await pool.submit(large_job(engine, clock.time() + HOUR_S))
            allowed.release(3)
            for _ in range(4):
                assert await asyncio.to_thread(seen.acquire, timeout=LIMIT_S)
            second = submitted(pool, large_job(engine, clock.time() + HOUR_S))
            allowed.release(20)
            assert [done.calls for done in await asyncio.gather(first, second)] == [5, 5]
            pool.close()

        run(test)


class TestHopeless:
    def test_request_whose_time_cannot_suffice_is_refused_at_once(self) -> None:
        """Work of many times the time that is left is not begun; the message has both."""

        async def test(clock: Clock) -> None:
            pool, engine = scheduler(clock, workers=2), GatedEngine(CostModel.linear(call_s=100.0, flop_s=0.0))
            with pytest.raises(DeadlineExceeded, match=r"takes about 50 s on 2 workers, and has (20|19.*) s"):
                await pool.submit(job(engine, clock.time() + 20))
            assert engine.calls == []
            engine.gate.set()
            await pool.submit(job(engine, clock.time() + 30))  # a cost model may be off
            pool.close()

        run(test)


class TestDeadline:
    def test_passed_while_queued_is_not_computed(self) -> None:
        """A job whose time runs out in the queue is answered at once, gives its place back and is never computed."""

        async def test(clock: Clock) -> None:
            pool, engine = scheduler(clock), GatedEngine()
            first = submitted(pool, job(engine, clock.time() + 2 * HOUR_S))
            await started(engine)
            late = submitted(pool, job(engine, clock.time() + 1, mark=5))
            await settled()
            assert pool.admission.waiting == 1
            clock.move(2)
            with pytest.raises(DeadlineExceeded, match="time ran out before it was computed; raise timeout_ms"):
                await late
            assert pool.admission.waiting == 0
            engine.gate.set()
            await first
            pool.close()
            assert [call.queries[0, 0, 0] for call in engine.calls] == [1]

        run(test)

    def test_found_passed_by_the_worker_is_not_computed(self) -> None:
        """A worker that comes to a job too late does not begin it, even where the event loop has not noticed."""

        async def test(_: Clock) -> None:
            now = [0.0]  # the scheduler's own time, of which the event loop knows nothing
            admission = Admission(1, TURN_S, math.inf, math.inf, lambda: now[0])
            pool, engine = Scheduler(Slots(1, 1, NoOthers()), admission, 2**62, Seen(), lambda: now[0]), GatedEngine()
            first = submitted(pool, job(engine, deadline=2 * HOUR_S))
            await started(engine)
            late = submitted(pool, job(engine, deadline=HOUR_S, mark=5))
            await settled()
            now[0] = HOUR_S
            engine.gate.set()
            with pytest.raises(DeadlineExceeded):
                await late
            await first
            assert [call.queries[0, 0, 0] for call in engine.calls] == [1]
            pool.close()

        run(test)

    def test_passed_while_computed_still_holds_the_place(self) -> None:
        """A client whose time is up gets its answer, but the worker is not free before the engine is."""

        async def test(clock: Clock) -> None:
            pool, engine = scheduler(clock, most_wait_s=0), GatedEngine()
            slow = submitted(pool, job(engine, clock.time() + 1))
            await started(engine)
            clock.move(2)
            with pytest.raises(DeadlineExceeded):
                await slow
            with pytest.raises(Overloaded):
                await pool.submit(job(engine, clock.time() + HOUR_S))
            engine.gate.set()
            await _free(pool, engine, clock)
            pool.close()

        run(test)

    def test_already_passed_is_refused(self) -> None:
        """A job that comes too late is not computed though a worker is free."""

        async def test(clock: Clock) -> None:
            pool, engine = scheduler(clock), GatedEngine()
            engine.gate.set()
            with pytest.raises(DeadlineExceeded):
                await pool.submit(job(engine, clock.time() - 1))
            assert engine.calls == []
            pool.close()

        run(test)


async def _free(pool: Scheduler, engine: GatedEngine, clock: Clock) -> None:
    # The place comes back through the event loop, a moment after the engine has returned.
    while True:
        try:
            done = await pool.submit(job(engine, clock.time() + HOUR_S, 7))
        except Overloaded:
            await asyncio.sleep(0)
        else:
            assert mark_of(done) == 7
            return


class TestClientThatLeft:
    def test_while_queued_frees_its_place(self) -> None:
        """A job that is cancelled in the queue is not computed, and its place is free at once."""

        async def test(clock: Clock) -> None:
            pool, engine = scheduler(clock), GatedEngine()
            first = submitted(pool, job(engine, clock.time() + HOUR_S))
            await started(engine)
            left = submitted(pool, job(engine, clock.time() + HOUR_S, mark=5))
            await settled()
            left.cancel()
            await settled()
            next_one = submitted(pool, job(engine, clock.time() + HOUR_S, mark=7))
            await settled()
            engine.gate.set()
            await first
            assert mark_of(await next_one) == 7
            assert [call.queries[0, 0, 0] for call in engine.calls] == [1, 7]
            pool.close()

        run(test)

    def test_while_computed_holds_its_place(self) -> None:
        """A job that is cancelled while it runs holds its worker until the engine is done."""

        async def test(clock: Clock) -> None:
            pool, engine = scheduler(clock, most_wait_s=0), GatedEngine()
            left = submitted(pool, job(engine, clock.time() + HOUR_S))
            await started(engine)
            left.cancel()
            await settled()
            with pytest.raises(Overloaded):
                await pool.submit(job(engine, clock.time() + HOUR_S))
            engine.gate.set()
            await _free(pool, engine, clock)
            pool.close()

        run(test)

    def test_of_a_small_one_leaves_no_trace(self) -> None:
        """A job that is cancelled before it began does not stand in the way of those that come alone after it."""

        async def test(clock: Clock) -> None:
            threads: list[threading.Thread] = []

            def note(call: EngineCall) -> EngineResult:
                threads.append(threading.current_thread())
                return answer_of(call)

            pool = scheduler(clock)
            left = submitted(pool, job(EngineOf(note, SMALL), clock.time() + HOUR_S))
            await asyncio.sleep(0)  # it has arrived, and looks whether others have
            left.cancel()
            await settled()
            await pool.submit(job(EngineOf(note, SMALL), clock.time() + HOUR_S))
            assert threads == [threading.current_thread()]
            pool.close()

        run(test)

    def test_of_many_scattered_parts(self) -> None:
        """Of two requests whose rows are scattered over calls, one that leaves takes all of its own and no other."""

        async def test(clock: Clock) -> None:
            pool, engine = scheduler(clock, workers=2), GatedEngine(WORK)
            busy = [submitted(pool, job(engine, clock.time() + HOUR_S)) for _ in range(2)]
            await started(engine)
            await started(engine)
            lens = [5, 1, 5, 1, 3, 5, 3]
            stays = submitted(pool, large_job(engine, clock.time() + HOUR_S, mark=10, valid_lens=lens))
            leaves = submitted(pool, large_job(engine, clock.time() + HOUR_S, mark=30, valid_lens=lens))
            await settled()
            leaves.cancel()
            await settled()
            engine.gate.set()
            await asyncio.gather(*busy)
            assert (await stays).output.output[:, 0, 0].tolist() == [10, 11, 12, 13, 14, 15, 16]
            assert not any((call.queries >= 30).any() for call in engine.calls)
            pool.close()

        run(test)


def _raise(error: BaseException) -> Callable[[EngineCall], EngineResult]:
    def run(_: EngineCall) -> EngineResult:
        raise error

    return run


class TestFailure:
    @pytest.mark.parametrize(
        "fail",
        [
            pytest.param(_raise(RuntimeError("CUDA failure 700 in /secret")), id="runtime_error"),
            pytest.param(_raise(MemoryError()), id="memory_error"),
            pytest.param(_raise(KeyError("output")), id="defect"),
        ],
    )
    def test_is_this_requests_alone(self, fail: Callable[[EngineCall], EngineResult]) -> None:
        """Whatever the engine raises is an EngineFailure that tells nothing of it; the next job is answered."""

        async def test(clock: Clock) -> None:
            pool = scheduler(clock, most_wait_s=0)
            with pytest.raises(EngineFailure) as failed:
                await pool.submit(job(EngineOf(fail), clock.time() + HOUR_S))
            assert str(failed.value) == "the engine failed on this request; the server's log has the reason"
            assert mark_of(await pool.submit(job(EngineOf(answer_of), clock.time() + HOUR_S, 7))) == 7
            pool.close()

        run(test)

    @pytest.mark.parametrize("value", [np.nan, np.inf], ids=["nan", "inf"])
    def test_result_that_overflows_is_no_engine_failure(self, value: float) -> None:
        """A result that is not finite is the request's Overflow."""

        async def test(clock: Clock) -> None:
            pool = scheduler(clock)
            with pytest.raises(Overflow):
                await pool.submit(job(EngineOf(lambda call: answer_of(call, value)), clock.time() + HOUR_S))
            assert pool.admission.waiting == 0
            pool.close()

        run(test)


def large_job(
    engine: Engine, deadline: float, num_rows: int = 5, mark: float = 1.0, valid_lens: list[int] | None = None
) -> Job:
    """A job of rows that differ in length, row n marked `mark + n`: a call for each length, where calls are free."""
    lens = np.arange(1, num_rows + 1) if valid_lens is None else np.array(valid_lens)
    num_rows = len(lens)
    tensors = {
        "queries": np.full((num_rows, 2, LAYER.query_size), mark, np.float32),
        "keys": np.ones((num_rows, 97, LAYER.key_size), np.float32),
        "values": np.ones((num_rows, 97, LAYER.value_size), np.float32),
        "valid_lens": lens,
    }
    tensors["queries"] += np.arange(num_rows, dtype=np.float32)[:, None, None]
    return Job(engine, LAYER, AttentionInputs.parse(WireTensors(tensors), LAYER), None, deadline)


class TestLargeRequest:
    @pytest.mark.parametrize("workers", [1, 2, 3], ids=str)
    def test_is_answered_from_its_parts(self, workers: int) -> None:
        """Rows that were computed in different calls, by any number of workers, arrive in their places."""

        async def test(clock: Clock) -> None:
            pool = scheduler(clock, workers)
            done = await pool.submit(large_job(EngineOf(answer_of, WORK), clock.time() + HOUR_S))
            assert done.calls == 5
            assert done.computed_keys == 1 + 2 + 3 + 4 + 5
            assert done.output.output[:, 0, 0].tolist() == [1, 2, 3, 4, 5]
            pool.close()

        run(test)

    def test_lets_small_ones_pass(self) -> None:
        """A small request that comes while a large one is computed waits for one call of it, not for all."""

        async def test(clock: Clock) -> None:
            pool, engine = scheduler(clock), GatedEngine(WORK)
            large = submitted(pool, large_job(engine, clock.time() + HOUR_S))
            await started(engine)
            small = submitted(pool, job(engine, clock.time() + HOUR_S, mark=89))
            await settled()
            engine.gate.set()
            await asyncio.gather(large, small)
            marks = [float(call.queries[0, 0, 0]) for call in engine.calls]
            assert sorted(marks) == [1, 2, 3, 4, 5, 89]
            assert marks.index(89) <= 2
            pool.close()

        run(test)

    def test_that_fails_in_part_fails_once(self) -> None:
        """A call that fails ends the request: what is left of it is not computed, and the next job is answered."""

        async def test(clock: Clock) -> None:
            calls: list[EngineCall] = []

            def fail_second(call: EngineCall) -> EngineResult:
                calls.append(call)
                if len(calls) == 2:
                    raise RuntimeError("out of memory")
                return answer_of(call)

            pool, engine = scheduler(clock), EngineOf(fail_second, WORK)
            with pytest.raises(EngineFailure):
                await pool.submit(large_job(engine, clock.time() + HOUR_S))
            assert len(calls) == 2
            assert pool.admission.waiting == 0
            assert mark_of(await pool.submit(job(engine, clock.time() + HOUR_S, 7))) == 7
            pool.close()

        run(test)

    def test_whose_time_runs_out_is_left_there(self) -> None:
        """Of a request whose deadline passes between its calls, no further call is made."""

        async def test(clock: Clock) -> None:
            pool, engine = scheduler(clock), GatedEngine(WORK)
            late = submitted(pool, large_job(engine, clock.time() + 1))
            await started(engine)
            clock.move(2)
            with pytest.raises(DeadlineExceeded):
                await late
            engine.gate.set()
            assert mark_of(await pool.submit(job(engine, clock.time() + HOUR_S, 7))) == 7
            assert [float(call.queries[0, 0, 0]) for call in engine.calls] == [1, 7]
            pool.close()

        run(test)


class TestClose:
    def test_ends_the_workers_after_what_they_compute(self) -> None:
        """close() lets running calls finish, refuses what is queued and leaves no thread."""

        async def test(clock: Clock) -> None:
            before = set(threading.enumerate())
            pool, engine = scheduler(clock), GatedEngine()
            running = submitted(pool, job(engine, clock.time() + HOUR_S))
            await started(engine)
            queued = submitted(pool, job(engine, clock.time() + HOUR_S, mark=5))
            await settled()
            workers = {thread for thread in threading.enumerate() if thread.name.startswith("engine")} - before
            assert len(workers) == 1
            closing = asyncio.create_task(asyncio.to_thread(pool.close))
            with pytest.raises(Draining):
                await queued
            engine.gate.set()
            await closing
            assert mark_of(await running) == 1
            assert not any(thread.is_alive() for thread in workers)
            assert len(engine.calls) == 1

        run(test)

    def test_of_an_idle_scheduler(self) -> None:
        """close() of a scheduler that never worked returns at once, and so does a second one."""

        async def test(clock: Clock) -> None:
            pool = scheduler(clock)
            pool.close()
            pool.close()

        run(test)
