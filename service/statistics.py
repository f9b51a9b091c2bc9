"""What one served model has done since it was loaded. Written and read on the event loop alone."""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self, final


@final
@dataclass(slots=True)
class Duration:
    """How often something happened, and how long it took in all."""

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """One more time."""
        self.count += 1
        self.seconds += seconds

    def merge(self, other: Mapping[str, Any]) -> None:
        """Adds what `asdict` made of another."""
        self.count += other["count"]
        self.seconds += other["seconds"]

    @property
    def nanoseconds(self) -> int:
        """The time in all."""
        return round(self.seconds * 1e9)


@final
@dataclass(slots=True)
class Stages:
    """Time of the stages of requests that were answered."""

    decode: Duration = field(default_factory=Duration)
    queue: Duration = field(default_factory=Duration)
    compute: Duration = field(default_factory=Duration)
    encode: Duration = field(default_factory=Duration)

    def add(self, seconds: dict[str, float]) -> None:
        """One request's stages, by name."""
        self.decode.add(seconds["decode"])
        self.queue.add(seconds["queue"])
        self.compute.add(seconds["compute"])
        self.encode.add(seconds["encode"])

    def merge(self, other: Mapping[str, Any]) -> None:
        """Adds what `asdict` made of another."""
        self.decode.merge(other["decode"])
        self.queue.merge(other["queue"])
        self.compute.merge(other["compute"])
        self.encode.merge(other["encode"])


@final
@dataclass(slots=True)
class ModelStatistics:
    """Counts and times of one version of a model.

    Attributes:
        rows: batch entries answered.
        calls: engine calls they took.
        last_answer_ms: when, in milliseconds of the epoch; 0 if never.
        success: requests answered, from their head to their answer.
        failure: requests that failed once they had reached the queue.
        stages: of the answered ones.
        by_batch: of the answered ones, by the size of their batch.
    """

    rows: int = 0
    calls: int = 0
    last_answer_ms: int = 0
    success: Duration = field(default_factory=Duration)
    failure: Duration = field(default_factory=Duration)
    stages: Stages = field(default_factory=Stages)
    by_batch: dict[int, Stages] = field(default_factory=dict)

    def answered(self, batch: int, calls: int, seconds: dict[str, float], total_s: float, now_ms: int) -> None:
        """A request was answered."""
        self.rows += batch
        self.calls += calls
        self.last_answer_ms = now_ms
        self.success.add(total_s)
        self.stages.add(seconds)
        of_batch = self.by_batch.get(batch)
        if of_batch is None:
            of_batch = self.by_batch[batch] = Stages()
        of_batch.add(seconds)

    def dump(self) -> dict[str, Any]:
        """As JSON has it, for `merged_with` in another process."""
        return {**asdict(self), "by_batch": [[batch, asdict(stages)] for batch, stages in self.by_batch.items()]}

    def merged_with(self, others: Iterable[Mapping[str, Any]]) -> Self:
        """These and what `dump` made of others, together."""
        merged = copy.deepcopy(self)
        for other in others:
            merged.rows += other["rows"]
            merged.calls += other["calls"]
            merged.last_answer_ms = max(merged.last_answer_ms, other["last_answer_ms"])
            merged.success.merge(other["success"])
            merged.failure.merge(other["failure"])
            merged.stages.merge(other["stages"])
            for batch, stages in other["by_batch"]:
                merged.by_batch.setdefault(batch, Stages()).merge(stages)
        return merged

    def failed(self, total_s: float) -> None:
        """A request failed in the queue or in the engine."""
        self.failure.add(total_s)
