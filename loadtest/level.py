"""One amount of load: how requests come, for how long."""

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
