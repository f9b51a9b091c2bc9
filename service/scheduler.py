"""Who computes when: a bounded queue in front of a pool of worker threads. The only async core of the service.

A worker plans a request, runs it and assembles its answer, so the event loop is entered once per request.
"""

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import final

from service.engine import Engine
from service.errors import DeadlineExceeded, EngineFailure, Overloaded
from service.planner import assemble, plan
from service.tensors import AttentionInputs, AttentionOutput


@final
@dataclass(frozen=True, slots=True)
class Job:
    """One valid request. `deadline` is on the scheduler's clock, in seconds."""

    engine: Engine
    inputs: AttentionInputs
    need_weights: bool
    deadline: float


@final
@dataclass(frozen=True, slots=True)
class Done:
    """An answer, and how long it waited and was computed."""

    output: AttentionOutput
    queue_s: float
    compute_s: float


@final
class Scheduler:
    """Runs jobs on `workers` threads; at most `max_queue` more may wait.

    Args:
        workers: engine calls at once.
        max_queue: jobs that wait beyond those.
        on_queue: told the number of waiting jobs whenever it changes, on the event loop.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        workers: int,
        max_queue: int,
        on_queue: Callable[[int], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._workers = workers
        self._max_queue = max_queue
        self._on_queue = on_queue
        self._clock = clock
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="engine")
        self._pending = 0
        self._mean_compute_s: float | None = None

    async def submit(self, job: Job) -> Done:
        """The job's answer.

        Raises:
            Overloaded: the queue is full.
            DeadlineExceeded: the job's time ran out before its answer was there; it is not computed if still queued.
            EngineFailure: the engine failed.
            Overflow: the result does not fit.
        """
        self._admit()
        submitted = self._clock()
        try:
            future = self._pool.submit(self._run, job, submitted)
        except RuntimeError:  # the pool is closed
            self._release()
            raise
        try:
            done = await self._answer(future, job.deadline - submitted)
        finally:
            self._release_after(future)
        self._note(done.compute_s)
        return done

    @property
    def queued(self) -> int:
        """Jobs that wait for a worker."""
        return max(0, self._pending - self._workers)

    def close(self) -> None:
        """Ends the workers, after what they are computing."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _admit(self) -> None:
        if self._pending >= self._workers + self._max_queue:
            wait_s = math.ceil(self.queued * (self._mean_compute_s or 0.0) / self._workers)
            raise Overloaded(
                f"{self.queued} requests are waiting, the limit is {self._max_queue}; retry later", max(1, wait_s)
            )
        self._pending += 1
        self._on_queue(self.queued)

    def _note(self, compute_s: float) -> None:
        mean_s = self._mean_compute_s
        self._mean_compute_s = compute_s if mean_s is None else mean_s + 0.1 * (compute_s - mean_s)

    def _release_after(self, future: "Future[Done]") -> None:
        if future.done():
            self._release()
            return
        # The client has its answer (its time ran out), but a worker still computes: the place is not free yet.
        loop = asyncio.get_running_loop()
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(self._release))

    def _release(self) -> None:
        self._pending -= 1
        self._on_queue(self.queued)

    async def _answer(self, future: "Future[Done]", timeout_s: float) -> Done:
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), timeout_s)
        except TimeoutError:
            raise _expired() from None

    def _run(self, job: Job, submitted: float) -> Done:
        started = self._clock()
        if started >= job.deadline:
            raise _expired()
        call = plan(job.inputs, job.need_weights)
        try:
            result = job.engine.run(call)
        except Exception as error:  # the engine loop: whatever a runtime raises is this one request's failure
            raise EngineFailure("the engine failed on this request; the server's log has the reason") from error
        output = assemble(job.inputs, result)
        return Done(output, started - submitted, self._clock() - started)


def _expired() -> DeadlineExceeded:
    return DeadlineExceeded("the request's time ran out before it was computed; raise timeout_ms, or send less")
