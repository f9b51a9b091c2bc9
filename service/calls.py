"""Tasks that wait, and the threads that compute them.

Nothing waits for a timer: whoever is free takes what is there, and tasks of several requests join where one call is
faster than many. A small request that nobody else competes with is computed on the event loop, because to hand it over
costs as much as to compute it; so are small ones that would wait for workers that all compute something long. One lock
guards all that waits or runs.
"""

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, final

import structlog

from service.assembly import Share, gather, gather_keys, gather_tile
from service.errors import DeadlineExceeded, Draining, EngineFailure, Internal, ServiceError
from service.planner import Limits, Load, Part, Projecting, join, may_join
from service.run import Done, Release, Run, Task
from service.slots import Slots

_log = structlog.get_logger(__name__)
# What is computed on the event loop keeps it from everything else for so long.
SMALL_S: Final = 0.001
# More waiting tasks than this are not looked at when a call is put together.
_MOST_JOINED: Final = 16


class Observer(Protocol):
    """Told what is computed. Returns at once; called from any thread, one at a time."""

    def called(self, release: Release, rows: int) -> None:
        """An engine call of so many batch entries was made.

        idle: it found a worker free. freed: it waited for one. joined: several requests share it. slice: it is one of
        several calls of one request.
        """


@final
@dataclass(frozen=True, slots=True)
class _Batch:
    """The tasks of one engine call, what it holds where it can be shared, and whether nothing else runs or waits."""

    tasks: list[Task]
    load: Load | None
    alone: bool


@final
class Calls:
    """Computes runs on threads, one for each slot of the server, and on the event loop.

    Args:
        slots: how many may run at once.
        limits: of one call.
        observer: is told about every call.
        note_done: is told how much work each was, in seconds by the cost model; from any thread, one at a time.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        slots: Slots,
        limits: Limits,
        observer: Observer,
        note_done: Callable[[float], None],
        clock: Callable[[], float],
    ) -> None:
        self._slots = slots
        self._workers = slots.total
        self._limits = limits
        self._observer = observer
        self._note_done = note_done
        self._clock = clock
        self._changed = threading.Condition(threading.Lock())
        self._waiting: deque[Task] = deque()
        self._asleep = 0
        self._computing_long = 0
        self._running_since: dict[int, float] = {}
        self._closing = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_comes = False
        self._arriving = 0
        self._answers: list[Run] = []
        self._answers_announced = False
        # Daemons, so that a second signal can end the process while they compute.
        self._threads = [
            threading.Thread(target=self._work, name=f"engine-{index}", daemon=True) for index in range(self._workers)
        ]

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Starts the threads; answers are delivered on that loop."""
        self._loop = loop
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Ends the threads, after what they are computing; what waits is refused as `Draining`."""
        with self._changed:
            self._closing = True
            while self._waiting:
                task = self._waiting.popleft()
                task.run.outcome = task.run.outcome or Draining("the server ended before this was computed")
                self._answers.append(task.run)
            self._changed.notify_all()
        self._announce_answers()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    @property
    def longest_s(self) -> float:
        """For how long the oldest call of a thread has been running."""
        now = self._clock()
        with self._changed:
            return max((now - since for since in self._running_since.values()), default=0.0)

    async def try_alone(self, run: Run) -> Done | ServiceError | None:
        """The outcome of a small run that is alone, computed here and now; None where it has to be queued.

        On the event loop. With nobody else there is nothing to queue for, and no thread to be woken.
        """
        piece = run.only_piece
        if piece is None or run.work_s > SMALL_S:
            return None
        self._arriving += 1
        try:
            await asyncio.sleep(0)  # whatever has arrived together with it gets here, too
            with self._changed:
                others = self._slots.taken > self._computing_long or any(task.is_small for task in self._waiting)
            is_alone = self._arriving == 1 and not others
        finally:
            self._arriving -= 1
        return self._compute_alone(run, piece) if is_alone else None

    def _compute_alone(self, run: Run, piece: Part) -> Done | ServiceError:
        now = self._clock()
        if now >= run.job.deadline:
            return expired()
        run.began = now
        load = Load.of(piece)
        task = Task(run, piece, load, is_small=True, release="idle")
        with self._changed:
            alone = self._slots.is_idle() and not self._waiting
            self._slots.take()
        fault = _fault_of(lambda: _compute_and_place([task], load, alone=alone))
        with self._changed:
            self._slots.give()
            self._wake_one()
            if fault is None:
                self._observer.called("idle", piece.num_rows)
                self._note_done(run.work_s)
        if fault is not None:
            return fault
        run.count(piece, load, 0)
        fault = _fault_of(lambda: run.finish(self._clock()))
        return fault or run.outcome or expired()

    def start(self, run: Run) -> None:
        """Queues the first tasks of a run. On the event loop."""
        with self._changed:
            self._queue(run, self._workers)
            calls_loop = self._wants_loop() and not self._loop_comes
            self._loop_comes = self._loop_comes or calls_loop
        if calls_loop and self._loop is not None:
            self._loop.call_soon(self._compute_on_loop)

    def drop(self, run: Run, release: Callable[[], None]) -> None:
        """Takes a run out that was answered or given up, and releases its place. On the event loop.

        While something of it is being computed, its place is not free, so that waits for the end.
        """
        with self._changed:
            run.dropped = True
            if not run.is_complete:
                for task in [task for task in self._waiting if task.run is run]:
                    self._waiting.remove(task)
            if run.running:
                run.release = release
                return
        release()

    def _queue(self, run: Run, most: int) -> None:
        """Queues tasks of a run, and wakes a worker for each. Under the lock."""
        is_small = run.only_piece is not None and run.work_s <= SMALL_S
        for piece in run.next_pieces(most):
            free = self._asleep > len(self._waiting) and self._slots.is_free()
            release: Release = "slice" if run.num_tasks > 1 else "idle" if free else "freed"
            self._waiting.append(Task(run, piece, _shareable(run, piece), is_small, release))
            self._wake_one()

    def _wake_one(self) -> None:
        """Wakes a thread if there is something for it: one that finds no slot would only take Python's lock."""
        if self._waiting and self._asleep and self._slots.is_free():
            self._changed.notify()

    def _wants_loop(self) -> bool:
        """Whether a small task waits for workers that all compute something long."""
        is_busy = self._computing_long == self._slots.taken and not self._slots.is_free()
        return is_busy and any(task.is_small for task in self._waiting)

    def _work(self) -> None:
        """A thread's life."""
        while (batch := self._next()) is not None:
            is_long = not batch.tasks[0].is_small
            self._compute(batch)
            with self._changed:
                self._computing_long -= is_long
                self._running_since.pop(threading.get_ident())
            self._announce_answers()

    def _next(self) -> _Batch | None:
        """What a thread is to compute; None when there will be nothing more."""
        with self._changed:
            while not (self._closing or (self._waiting and self._slots.is_free())):
                self._asleep += 1
                self._changed.wait()
                self._asleep -= 1
            if self._closing:
                return None
            batch = self._take(self._waiting[0])
            self._computing_long += not batch.tasks[0].is_small
            self._running_since[threading.get_ident()] = self._clock()
            self._wake_one()  # a slot that another process gave back is announced to nobody
            return batch

    def _compute_on_loop(self) -> None:
        """Computes one call of small tasks that would wait for long ones. Once each time the loop comes round."""
        with self._changed:
            first = next((task for task in self._waiting if task.is_small), None) if self._wants_loop() else None
            batch = self._take(first) if first is not None else None
        if batch is not None:
            self._compute(batch)
        self._deliver_answers()
        with self._changed:
            self._wake_one()
            self._loop_comes = self._wants_loop()
        if self._loop_comes and self._loop is not None:
            self._loop.call_soon(self._compute_on_loop)

    def _take(self, first: Task) -> _Batch:
        """A waiting task, and what joins it. Under the lock."""
        self._waiting.remove(first)
        tasks, load = [first], first.load
        if load is not None and self._waiting:
            load = self._join(tasks, load)
        alone = len(tasks) == first.run.num_tasks == 1 and self._slots.is_idle() and not self._waiting
        self._slots.take()
        for task in tasks:
            task.run.running += 1
        return _Batch(tasks, load, alone)

    def _join(self, tasks: list[Task], load: Load) -> Load:
        # The other workers get their share of what waits.
        most = min(len(self._waiting) // self._slots.share, _MOST_JOINED)
        job = tasks[0].run.job
        others = [task for task in itertools.islice(self._waiting, most) if task.run.job.engine is job.engine]
        loads = [(task, task.load) for task in others if task.load is not None]
        load, chosen = join(load, [other for _, other in loads], job.layer, job.engine.cost, self._limits)
        for index in chosen:
            self._waiting.remove(loads[index][0])
            tasks.append(loads[index][0])
        return load

    def _compute(self, batch: _Batch) -> None:
        try:
            began = self._clock()
            live = [task for task in batch.tasks if self._begin(task, began)]
            if live:
                self._call(live, batch, began)
        except Exception:  # noqa: BLE001  # a defect here must cost these requests, and neither others nor the thread
            _log.error("internal error", exc_info=True)
            for task in batch.tasks:
                if not task.is_over:
                    task.run.outcome = task.run.outcome or Internal("internal error; the server's log has it")
                    self._end(task)
        finally:
            with self._changed:
                self._slots.give()

    def _begin(self, task: Task, now: float) -> bool:
        """Whether a task is still of use; if not, it has been ended."""
        run = task.run
        if run.is_over:
            self._end(task)
            return False
        if now >= run.job.deadline:
            run.outcome = expired()
            self._end(task)
            return False
        if run.began is None:
            run.began = now
        return True

    def _call(self, tasks: list[Task], batch: _Batch, began: float) -> None:
        fault = _fault_of(lambda: _compute_and_place(tasks, batch.load, alone=batch.alone))
        if fault is not None and len(tasks) > 1:
            for task in tasks:  # which of them it was is not known, so each is tried alone
                self._call([task], _Batch([task], task.load, alone=False), began)
            return
        if fault is None:
            release: Release = "joined" if len(tasks) > 1 else tasks[0].release
            with self._changed:
                self._observer.called(release, sum(task.num_rows for task in tasks))
                self._note_work(tasks)
        for task in tasks:
            self._settle(task, batch.load, fault)

    def _note_work(self, tasks: Sequence[Task]) -> None:
        """A call has ended well. Under the lock."""
        work_s = [task.work_s for task in tasks]
        self._note_done(sum(work_s))
        for task, done_s in zip(tasks, work_s, strict=True):
            task.run.place.note_done(done_s)

    def _settle(self, task: Task, load: Load | None, fault: ServiceError | None) -> None:
        """Notes that a task was computed, or why it failed; queues what follows it, or makes the answer."""
        run = task.run
        is_last = False
        with self._changed:
            if fault is not None:
                run.outcome = run.outcome or fault
            else:
                following = run.count(task.piece, load, self._workers)
                is_last = run.is_complete and not run.is_over
                if not run.is_over:
                    self._queue(run, following)
        if is_last:
            run.outcome = _fault_of(lambda: run.finish(self._clock())) or run.outcome
        self._end(task)

    def _end(self, task: Task) -> None:
        with self._changed:
            task.is_over = True
            task.run.running -= 1
            if task.run.outcome is not None or (task.run.release is not None and not task.run.running):
                self._answers.append(task.run)

    def _announce_answers(self) -> None:
        """Wakes the event loop if there are answers; one wake-up serves all that come until it is awake."""
        with self._changed:
            if not self._answers or self._answers_announced or self._loop is None:
                return
            self._answers_announced = True
        self._loop.call_soon_threadsafe(self._deliver_answers)

    def _deliver_answers(self) -> None:
        """Hands outcomes over and releases places. On the event loop."""
        with self._changed:
            runs, self._answers, self._answers_announced = self._answers, [], False
        for run in runs:
            if run.outcome is not None:
                run.deliver(run.outcome)
            if run.release is not None and not run.running:
                release, run.release = run.release, None
                release()


def _shareable(run: Run, piece: Projecting | Part) -> Load | None:
    """What a piece brings into a call that it may share; None where it has its call for itself."""
    if isinstance(piece, Projecting) or piece.projected or run.job.weights is not None:
        return None
    load = Load.of(piece)
    return load if may_join(load, run.job.layer, run.job.engine.cost) else None


def expired() -> DeadlineExceeded:
    """The refusal of a request whose time ran out."""
    return DeadlineExceeded("the request's time ran out before it was computed; raise timeout_ms, or send less")


def _fault_of(work: Callable[[], None]) -> ServiceError | None:
    """Why some work failed, or None."""
    try:
        work()
    except ServiceError as error:
        return error
    except BaseException as error:  # noqa: BLE001  # the engine loop: whatever a runtime raises is this call's failure
        failure = EngineFailure("the engine failed on this request; the server's log has the reason")
        failure.__cause__ = error
        return failure
    return None


def _compute_and_place(tasks: Sequence[Task], load: Load | None, *, alone: bool) -> None:
    """One engine call, and its results' places."""
    run, piece = tasks[0].run, tasks[0].piece
    engine, inputs = run.job.engine, run.job.inputs
    if isinstance(piece, Projecting):
        run.projections.place(piece, engine.project(*gather_keys(inputs, piece)))
    elif piece.projected:
        queries, valid_lens = gather_tile(Share(inputs, piece))
        run.assembly.place(piece, engine.attend(queries, run.projections.of(piece), valid_lens), None)
    else:
        _compute_shared(tasks, Load.of(piece) if load is None else load, alone=alone)


def _compute_shared(tasks: Sequence[Task], load: Load, *, alone: bool) -> None:
    job = tasks[0].run.job
    shares = [Share(task.run.job.inputs, task.piece) for task in tasks if isinstance(task.piece, Part)]
    result = job.engine.run(gather(shares, load, need_weights=job.weights is not None, alone=alone))
    first = 0
    for task, share in zip(tasks, shares, strict=True):
        rows = slice(first, first + share.part.num_rows)
        weights = None if result.weights is None else result.weights[rows]
        task.run.assembly.place(share.part, result.output[rows], weights)
        first = rows.stop
