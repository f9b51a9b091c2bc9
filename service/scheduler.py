"""Who is computed when: a bounded queue in front of the workers, deadlines, and clients that leave.

The only async core of the service. A request is planned into tasks, each one engine call or a share of one. It has at
most as many tasks queued as there are workers, so that the calls of a large one and small requests take turns.
"""

import asyncio
import math
import time
from collections.abc import Callable
from typing import Final, final

from service.calls import Calls, Observer, expired
from service.errors import Overloaded, ServiceError
from service.planner import Limits, plan
from service.run import Done, Job, Run
from service.slots import Slots

# A call that takes much longer keeps small requests waiting; one much shorter spends its time on being a call.
CALL_S: Final = 0.02


@final
class Scheduler:
    """Runs jobs on threads and, small ones, on the event loop; at most `max_queue` more may wait.

    Args:
        slots: engine calls at once.
        max_queue: jobs that wait beyond this process's share of those.
        workspace_bytes: most that the scores of one call may take.
        observer: is told about the calls.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        slots: Slots,
        max_queue: int,
        workspace_bytes: int,
        observer: Observer,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._workers = slots.share
        self._max_queue = max_queue
        self._limits = Limits(workspace_bytes, CALL_S)
        self._clock = clock
        self._calls = Calls(slots, self._limits, observer, clock)
        self._is_open = False
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
        calls = plan(job.inputs, job.layer, job.engine.cost, self._limits, need_weights=job.need_weights)
        self._admit()
        loop = asyncio.get_running_loop()
        self._open(loop)
        answer: asyncio.Future[Done] = loop.create_future()
        run = Run(job, calls, self._clock(), lambda outcome: _deliver(answer, outcome))
        try:
            outcome = await self._calls.try_alone(run)
            done = _result(outcome) if outcome is not None else await self._queued(run, answer)
        finally:
            self._calls.drop(run, self._release)
        self._note(done.compute_s)
        return done

    @property
    def queued(self) -> int:
        """Jobs that wait for a worker."""
        return max(0, self._pending - self._workers)

    def close(self) -> None:
        """Ends the workers, after what they are computing."""
        self._calls.close()

    async def _queued(self, run: Run, answer: "asyncio.Future[Done]") -> Done:
        # Timers count in milliseconds: one more, so that none is early.
        remaining_s = max(0.0, run.job.deadline - self._clock()) + 0.001
        timer = answer.get_loop().call_later(remaining_s, _deliver, answer, expired())
        self._calls.start(run)
        try:
            return await answer
        finally:
            timer.cancel()

    def _open(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._is_open:
            self._is_open = True
            self._calls.open(loop)

    def _admit(self) -> None:
        if self._pending >= self._workers + self._max_queue:
            wait_s = math.ceil(self.queued * (self._mean_compute_s or 0.0) / self._workers)
            raise Overloaded(
                f"{self.queued} requests are waiting, the limit is {self._max_queue}; retry later", max(1, wait_s)
            )
        self._pending += 1

    def _note(self, compute_s: float) -> None:
        mean_s = self._mean_compute_s
        self._mean_compute_s = compute_s if mean_s is None else mean_s + 0.1 * (compute_s - mean_s)

    def _release(self) -> None:
        self._pending -= 1


def _result(outcome: Done | ServiceError) -> Done:
    if isinstance(outcome, ServiceError):
        raise outcome
    return outcome


def _deliver(answer: "asyncio.Future[Done]", outcome: Done | ServiceError) -> None:
    """The outcome to who waits for it, unless nobody does any more."""
    if answer.done():
        return
    if isinstance(outcome, Done):
        answer.set_result(outcome)
    else:
        answer.set_exception(outcome)
