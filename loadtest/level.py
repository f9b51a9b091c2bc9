"""One amount of load: how requests come, for how long; and the share of it that one process sends."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

from loadtest.arrivals import Process

Kind = Literal["closed", "open", "trace", "multi-stream", "offline"]


@final
@dataclass(frozen=True, slots=True)
class Level:
    """One amount of load.

    Attributes:
        kind: "closed" keeps `concurrency` requests in flight; "open" sends `rate` a second whatever becomes of them;
            "trace" sends when the trace says; "multi-stream" sends `samples` at once and waits for the last of them;
            "offline" has `samples` due at once and sends them over `concurrency` connections.
        warmup_s: sent before, and not counted.
        seconds: counted.
    """

    kind: Kind
    seconds: float
    warmup_s: float = 0.0
    concurrency: int = 1
    rate: float = 0.0
    process: Process = "poisson"
    samples: int = 8
    trace: Path | None = None

    @property
    def is_open(self) -> bool:
        """Whether requests come whatever becomes of those before."""
        return self.kind in ("open", "trace", "offline")

    @property
    def key(self) -> str:
        """Short and the same for the same load, for tables and `compare`."""
        match self.kind:
            case "closed":
                return f"{self.concurrency} in flight"
            case "open":
                return f"{self.rate:g}/s {self.process}"
            case "trace":
                return f"trace {self.trace.name if self.trace else ''}"
            case "multi-stream":
                return f"multi-stream of {self.samples}"
            case "offline":
                return f"offline, {self.samples} samples"


@final
@dataclass(frozen=True, slots=True)
class Share:
    """The part of a level that one process sends.

    Attributes:
        process, processes: this one's number, of how many.
        begins_s: on the monotonic clock, which all processes of a machine share.
        check_every: each so many requests one answer is kept for comparison; 0 keeps none.
        most_connections: of this process.
        timeout_s: how long an answer is waited for.
        seed: of the arrivals.
    """

    level: Level
    process: int
    processes: int
    begins_s: float
    check_every: int
    most_connections: int
    timeout_s: float
    seed: int

    @property
    def counts_from_s(self) -> float:
        """End of the warm-up."""
        return self.begins_s + self.level.warmup_s

    @property
    def ends_s(self) -> float:
        """Nothing is due from here on."""
        return self.counts_from_s + self.level.seconds
