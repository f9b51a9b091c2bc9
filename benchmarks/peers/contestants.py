"""Who is measured: how each server is started, which forms it accepts where, and the setups worth trying."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final, final

from benchmarks.peers.workloads import Form, Workload
from service.cpus import usable_cpus

ROOT: Final = Path(__file__).parents[2]
HERE: Final = Path(__file__).parent
BENCH: Final = ROOT / ".bench"
MODELS: Final = BENCH / "models"
GRAPH: Final = MODELS / "attention" / "1" / "model.onnx"
INT8: Final = BENCH / "int8" / "attention" / "1" / "model.onnx"
OURS: Final = "mha-service"
LIMIT: Final = "in process"


@final
@dataclass(frozen=True, slots=True)
class Setup:
    """What is tuned: worker processes, engine calls at once in each, threads of a call, and batching."""

    processes: int = 1
    callers: int = 1
    threads: int = 1
    batch: int = 1
    wait_ms: int = 1

    def environment(self) -> dict[str, str]:
        """As the scripts in `servers/` read it."""
        return {f"BENCH_{name.upper()}": str(value) for name, value in asdict(self).items()}


# Measured on two cores: one-thread calls side by side win under load; a lone call may want all threads.
CPUS: Final = usable_cpus()
WORKER_PROCESSES: Final = Setup(processes=CPUS)
WORKER_THREADS: Final = Setup(callers=CPUS)
WIDE_CALL: Final = Setup(threads=CPUS)


@final
@dataclass(frozen=True, slots=True)
class Contestant:
    """A server.

    Attributes:
        environment_name: the folder of its environment and the name of its requirements; None is our own.
        command: with {bin} and {port} to be filled in; it runs in `servers/`.
        routes: the path for each form that it accepts.
        loaded, idle: the setups to try with many connections and with one.
        variables: of its environment.
        polls: it takes CPU while it is idle, and is stopped while others are measured. The supervisors of some of
            those that do not poll take a pause for a crash.
    """

    name: str
    environment_name: str | None
    command: Sequence[str]
    routes: Mapping[Form, str]
    loaded: Sequence[Setup]
    idle: Sequence[Setup]
    variables: Mapping[str, str] = field(default_factory=dict)
    polls: bool = False

    def forms(self, workload: Workload) -> Sequence[Form]:
        """The forms that it is asked in."""
        if self.name == OURS:
            return workload.ours
        return [form for form in workload.theirs if form in self.routes][:1]

    def setups(self, workload: Workload) -> Sequence[Setup]:
        """The setups of which the best one counts."""
        return self.idle if workload.connections == 1 else self.loaded


def _peer(name: str, key: str, script: str, routes: Mapping[Form, str], *loaded: Setup, **rest: object) -> Contestant:
    command = ("{bin}/python", script)
    return Contestant(name, key, command, routes, loaded, (loaded[0], WIDE_CALL), **rest)  # type: ignore[arg-type]


CONTESTANTS: Final = (
    Contestant(
        OURS, None,
        (
            sys.executable, str(ROOT / "mha.py"), "serve", "--models", str(MODELS), "--port", "{port}",
            "--log-level", "warning",  # no line for each request, which the peers do not write either
        ),
        dict.fromkeys(("safetensors", "self-attention", "packed", "json"), "/v1/attention"),
        (Setup(),), (Setup(),),
    ),
    _peer(
        "FastAPI", "obvious", "obvious.py", {"raw": "/", "json": "/"}, WORKER_THREADS, WORKER_PROCESSES,
    ),
    _peer(
        "mosec", "mosec", "mosec_server.py", {"raw": "/inference", "json": "/json"},
        WORKER_PROCESSES, Setup(processes=CPUS, batch=16, wait_ms=1), Setup(processes=CPUS, batch=16, wait_ms=5),
    ),
    _peer("LitServe", "litserve", "litserve_server.py", {"raw": "/raw", "json": "/json"}, WORKER_PROCESSES, polls=True),
    _peer(
        "MLServer", "mlserver", "mlserver_server.py", {"raw": "/raw", "oip-json": "/v2/models/attention/infer"},
        WORKER_PROCESSES, WORKER_THREADS,
    ),
    _peer(
        "Ray Serve", "rayserve", "rayserve_server.py", {"raw": "/", "json": "/"}, WORKER_PROCESSES,
        polls=True,
        variables={
            # Its documented settings for throughput; the defaults are several times slower at (1, 16, 16).
            "RAY_SERVE_ENABLE_HA_PROXY": "1",
            "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
            "RAY_worker_niceness": "0",  # Ray's workers give way to every other process, the load generator included
            "RAY_USAGE_STATS_ENABLED": "0",
        },
    ),
    Contestant(
        "BentoML", "bentoml",
        ("{bin}/bentoml", "serve", "bentoml_server:Layer", "--host", "127.0.0.1", "--port", "{port}", "--quiet"),
        {"raw": "/attend", "json": "/attend"}, (WORKER_PROCESSES, WORKER_THREADS), (WORKER_PROCESSES, WIDE_CALL),
        variables={"BENTOML_DO_NOT_TRACK": "True"},
    ),
)  # fmt: skip
