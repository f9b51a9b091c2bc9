"""One request on its way through the workers: its tasks, what they have made so far, and its outcome.

Nothing here waits, locks or knows of threads. `service.calls` touches a run under its lock, except for the places in
the answer's arrays, which are each task's own.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, final

from service.admission import Place
from service.artifact import Layer
from service.assembly import Assembly, Projections
from service.engine import Engine
from service.errors import ServiceError
from service.planner import Load, Part, Plan, Projecting
from service.tensors import AttentionInputs, AttentionOutput
from service.wanted import WantedWeights

Piece = Projecting | Part
Release = Literal["idle", "freed", "joined", "slice"]


@final
@dataclass(frozen=True, slots=True)
class Job:
    """One valid request for a layer and its engine. `deadline` is on the scheduler's clock, in seconds."""

    engine: Engine
    layer: Layer
    inputs: AttentionInputs
    weights: WantedWeights | None
    deadline: float


@final
@dataclass(frozen=True, slots=True)
class Done:
    """An answer, and how it came about.

    Attributes:
        output: the answer.
        queue_s: seconds until its first call began.
        compute_s: seconds from then until its last call ended.
        calls: engine calls it had a share in.
        computed_queries, computed_keys: that were computed for it, over all rows and calls, padding included.
    """

    output: AttentionOutput
    queue_s: float
    compute_s: float
    calls: int
    computed_queries: int
    computed_keys: int


@final
class Run:
    """A job and its plan.

    Attributes:
        job: what is asked.
        projections, assembly: where results are placed.
        num_tasks: engine calls in all.
        only_piece: the part of a run that has no other and nothing to project; else None.
        place: among those that were let in; its work is that of all pieces by the cost model, one after the other.
        running: how many of them are being computed.
        dropped: nobody waits for it any more.
        began: when its first call began, on the scheduler's clock.
        outcome: the answer, or why there is none; None until then.
        deliver: to be called with the outcome on the event loop.
        release: to be called on the event loop when nothing of it runs any more; None until it was dropped.
    """

    def __init__(
        self, job: Job, calls: Plan, place: Place, submitted: float, deliver: Callable[[Done | ServiceError], None]
    ) -> None:
        self.job = job
        self.place = place
        self.projections = Projections(job.layer, job.inputs, calls.projections)
        self.assembly = Assembly(job.inputs, job.layer, len(calls.parts), job.weights)
        self.num_tasks = len(calls.projections) + len(calls.parts)
        self.only_piece = calls.parts[0] if self.num_tasks == 1 else None
        self.running = 0
        self.dropped = False
        self.began: float | None = None
        self.outcome: Done | ServiceError | None = None
        self.deliver = deliver
        self.release: Callable[[], None] | None = None
        self._submitted = submitted
        self._projecting: Iterator[Piece] = iter(calls.projections)
        self._parts: Iterator[Piece] = iter(calls.parts)
        self._unprojected = len(calls.projections)
        self._unplaced = len(calls.parts)
        self._computed_queries = 0
        self._computed_keys = 0

    @property
    def work_s(self) -> float:
        """Of all pieces, in seconds by the cost model."""
        return self.place.work_s

    @property
    def is_over(self) -> bool:
        """Whether nothing more needs to be computed for it."""
        return self.dropped or self.outcome is not None

    @property
    def is_complete(self) -> bool:
        """Whether every part was placed."""
        return not self._unplaced

    def next_pieces(self, most: int) -> list[Piece]:
        """Up to so many pieces that may be computed now: parts only when every projection is there."""
        return list(itertools.islice(self._projecting if self._unprojected else self._parts, most))

    def count(self, piece: Piece, call: Load | None, workers: int) -> int:
        """Notes a piece as computed, in a call of that load; returns how many more may be queued for it."""
        if isinstance(piece, Projecting):
            self._computed_keys += piece.keys.stop - piece.keys.start
            self._unprojected -= 1
            return 1 if self._unprojected else workers
        load = Load.of(piece) if call is None else call
        self._computed_queries += piece.num_rows * load.num_queries
        self._computed_keys += 0 if piece.projected else piece.num_rows * load.num_kv
        self._unplaced -= 1
        return 1

    def finish(self, now: float) -> None:
        """Makes the answer of what was placed.

        Raises:
            Overflow: the result does not fit.
        """
        output = self.assembly.answer()
        began = self._submitted if self.began is None else self.began
        self.outcome = Done(
            output, began - self._submitted, now - began, self.num_tasks, self._computed_queries, self._computed_keys
        )


@final
@dataclass(slots=True, eq=False)
class Task:
    """One piece of a run, waiting for its turn.

    Attributes:
        load: what it brings into a call that it shares; None where it cannot share one.
        is_small: whether the event loop may compute it.
        release: why it will be computed when it is, unless it joins others.
        is_over: whether it was computed, or will not be.
    """

    run: Run
    piece: Piece
    load: Load | None
    is_small: bool
    release: Release
    is_over: bool = False

    @property
    def work_s(self) -> float:
        """Seconds by the cost model, as a call of its own."""
        run = self.run
        return run.work_s if run.num_tasks == 1 else self.piece.seconds(run.job.layer, run.job.engine.cost)

    @property
    def num_rows(self) -> int:
        """Batch entries of its call."""
        return self.piece.num_rows if isinstance(self.piece, Part) else 1
