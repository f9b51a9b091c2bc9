"""Who computes when: a bounded queue in front of a pool of worker threads. The only async core of the service.

A request is planned into parts, each one engine call. It has at most as many calls queued as there are workers, so that
the calls of a large one and small requests take turns.
"""

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, final

from service.artifact import Layer
from service.assembly import Assembly, gather
from service.engine import Engine
from service.errors import DeadlineExceeded, EngineFailure, Overloaded
from service.planner import Limits, Part, plan
from service.tensors import AttentionInputs, AttentionOutput

# A call that takes much longer keeps small requests waiting; one much shorter spends its time on being a call.
CALL_S: Final = 0.02


@final
@dataclass(frozen=True, slots=True)
class Job:
    """One valid request for a layer and its engine. `deadline` is on the scheduler's clock, in seconds."""

    engine: Engine
    layer: Layer
    inputs: AttentionInputs
    need_weights: bool
    deadline: float


@final
@dataclass(frozen=True, slots=True)
class Done:
    """An answer, and how it came about.

    Attributes:
        output: the answer.
        queue_s: seconds until its first call began.
        compute_s: seconds from then until its last call ended.
        calls: engine calls it took.
        computed_keys: keys that were computed, over all rows and calls, padding included.
    """

    output: AttentionOutput
    queue_s: float
    compute_s: float
    calls: int
    computed_keys: int


@final
class Scheduler:
    """Runs jobs on `workers` threads; at most `max_queue` more may wait.

    Args:
        workers: engine calls at once.
        max_queue: jobs that wait beyond those.
        workspace_bytes: most that the scores of one call may take.
        on_queue: told the number of waiting jobs whenever it changes, on the event loop.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        workers: int,
        max_queue: int,
        workspace_bytes: int,
        on_queue: Callable[[int], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._workers = workers
        self._max_queue = max_queue
        self._limits = Limits(workspace_bytes, CALL_S)
        self._on_queue = on_queue
        self._clock = clock
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="engine")
        self._pending = 0
        self._mean_compute_s: float | None = None

    async def submit(self, job: Job) -> Done:
        """The job's answer.

        Raises:
            Overloaded: the queue is full.
            DeadlineExceeded: the job's time ran out before its answer was there; calls still queued are not computed.
            EngineFailure: the engine failed.
            Overflow: the result does not fit.
        """
        parts = plan(job.inputs, job.layer, job.engine.cost, self._limits)
        self._admit()
        run = _Run(job, parts, self._clock)
        try:
            async with asyncio.timeout(job.deadline - run.submitted):
                done = await run.on(self._pool, self._workers)
        except TimeoutError:
            raise _expired() from None
        finally:
            self._release_after(run.unfinished())
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

    def _release_after(self, unfinished: Sequence["Future[None]"]) -> None:
        # The client may have its answer already (its time ran out), but while a worker computes, the place is not free.
        remaining = len(unfinished)
        if not remaining:
            self._release()
            return
        loop = asyncio.get_running_loop()

        def one_finished() -> None:
            nonlocal remaining
            remaining -= 1
            if not remaining:
                self._release()

        for future in unfinished:
            future.add_done_callback(lambda _: loop.call_soon_threadsafe(one_finished))

    def _release(self) -> None:
        self._pending -= 1
        self._on_queue(self.queued)


@final
class _Run:
    """One job on the workers: its parts, the calls made of them, and its answer."""

    def __init__(self, job: Job, parts: list[Part], clock: Callable[[], float]) -> None:
        self.submitted = clock()
        self._job = job
        self._parts = parts
        self._clock = clock
        self._assembly = Assembly(job.inputs, job.layer, len(parts), job.need_weights)
        self._futures: list[Future[None]] = []
        self._placing = threading.Lock()
        self._placed = 0
        self._began: float | None = None
        self._ended = self.submitted
        self._output: AttentionOutput | None = None

    async def on(self, pool: ThreadPoolExecutor, workers: int) -> Done:
        """The answer, computed with at most `workers` calls in the pool at once."""
        remaining = iter(self._parts)
        if len(self._parts) == 1:
            await self._lane(remaining, pool)
        else:
            await self._lanes(remaining, pool, min(workers, len(self._parts)))
        if self._output is None or self._began is None:
            raise RuntimeError("every call has ended, and there is no answer")
        computed_keys = sum(part.num_rows * part.num_kv for part in self._parts)
        queue_s, compute_s = self._began - self.submitted, self._ended - self._began
        return Done(self._output, queue_s, compute_s, len(self._parts), computed_keys)

    def unfinished(self) -> list["Future[None]"]:
        """Calls that a worker still computes; those that still waited are dropped."""
        return [future for future in self._futures if not (future.done() or future.cancel())]

    async def _lanes(self, remaining: Iterator[Part], pool: ThreadPoolExecutor, width: int) -> None:
        try:
            async with asyncio.TaskGroup() as lanes:
                for _ in range(width):
                    lanes.create_task(self._lane(remaining, pool))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _lane(self, remaining: Iterator[Part], pool: ThreadPoolExecutor) -> None:
        for part in remaining:
            future = pool.submit(self._compute, part)
            self._futures.append(future)
            await asyncio.wrap_future(future)

    def _compute(self, part: Part) -> None:
        began = self._clock()
        if began >= self._job.deadline:
            raise _expired()
        call = gather(self._job.inputs, part, self._job.need_weights)
        try:
            result = self._job.engine.run(call)
        except Exception as error:  # the engine loop: whatever a runtime raises is this one request's failure
            raise EngineFailure("the engine failed on this request; the server's log has the reason") from error
        self._assembly.place(part, result)
        if self._is_last(began):
            self._output = self._assembly.answer()
            self._ended = self._clock()

    def _is_last(self, began: float) -> bool:
        with self._placing:
            self._placed += 1
            self._began = began if self._began is None else min(self._began, began)
            return self._placed == len(self._parts)


def _expired() -> DeadlineExceeded:
    return DeadlineExceeded("the request's time ran out before it was computed; raise timeout_ms, or send less")
