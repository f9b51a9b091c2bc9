"""Who is computed when: a door in front of the workers, deadlines, and clients that leave.

The only async core of the service. A request is planned into tasks, each one engine call or a share of one. It has at
most as many tasks queued as there are workers, so that the calls of a large one and small requests take turns.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final, final

from service.admission import Admission
from service.calls import Calls, Observer, expired
from service.errors import DeadlineExceeded, ServiceError
from service.planner import Limits, plan
from service.run import Done, Job, Run
from service.slots import Slots

# A call that takes much longer keeps small requests waiting; one much shorter spends its time on being a call.
CALL_S: Final = 0.02
# A request is refused at once if its time could not suffice even were the cost model this far too high.
_HOPELESS: Final = 2.0


@final
class Scheduler:
    """Runs jobs on threads and, small ones, on the event loop, as far as they are admitted.

    Args:
        slots: engine calls at once.
        admission: who may come in.
        workspace_bytes: most that the scores of one call may take.
        observer: is told about the calls.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        slots: Slots,
        admission: Admission,
        workspace_bytes: int,
        observer: Observer,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._workers = slots.total
        self.admission = admission
        self._limits = Limits(workspace_bytes, CALL_S)
        self._clock = clock
        self._calls = Calls(slots, self._limits, observer, admission.note_done, clock)
        self._is_open = False

    async def submit(self, job: Job) -> Done:
        """The job's answer.

        Raises:
            Overloaded: too much waits already.
            DeadlineExceeded: the job's time ran out before its answer was there, or cannot suffice; calls still queued
                are not computed.
            EngineFailure: the engine failed.
            Overflow: the result does not fit.
        """
        calls = plan(job.inputs, job.layer, job.engine.cost, self._limits, need_weights=job.weights is not None)
        work_s = calls.seconds(job.layer, job.engine.cost)
        self._check_hope(job, work_s)
        place = self.admission.enter(work_s)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Done] = loop.create_future()
        run = None
        try:
            # It takes room for its answer, so it is made only now that it may come in.
            run = Run(job, calls, place, self._clock(), lambda outcome: _deliver(answer, outcome))
            self._open(loop)
            outcome = await self._calls.try_alone(run)
            return _result(outcome) if outcome is not None else await self._queued(run, answer)
        finally:
            if run is None:
                self.admission.leave(place)
            else:
                self._calls.drop(run, lambda: self.admission.leave(place))

    @property
    def longest_call_s(self) -> float:
        """For how long the oldest engine call of a worker has been running."""
        return self._calls.longest_s

    def close(self) -> None:
        """Ends the workers, after what they are computing."""
        self._calls.close()

    def _check_hope(self, job: Job, work_s: float) -> None:
        least_s = work_s / self._workers
        remaining_s = job.deadline - self._clock()
        if 0 < _HOPELESS * remaining_s < least_s:  # one whose time is over already is told so where all are
            raise DeadlineExceeded(
                f"the request takes about {least_s:.3g} s on {self._workers} workers, and has {remaining_s:.3g} s; "
                "raise timeout_ms, or send less"
            )

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
