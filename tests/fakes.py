"""Engines that misbehave on purpose, at the `Engine` seam, and a server around one: `python -m tests.fakes slow`."""

import sys
import time
from collections.abc import Callable

import numpy as np

from service.engine import Engine, EngineCall, EngineResult
from service.settings import load_settings
from service.start import start

SLOW_S = 0.4


class SlowEngine:
    """Answers zeros, `SLOW_S` later."""

    def run(self, call: EngineCall) -> EngineResult:
        time.sleep(SLOW_S)
        return EngineResult(np.zeros_like(call.queries), None)


class FailingEngine:
    """Raises what a runtime would."""

    def run(self, call: EngineCall) -> EngineResult:
        raise RuntimeError("CUDA failure 700 in /secret/path: illegal memory access")


class BrokenAnswerEngine:
    """Answers something that no code expects: a defect of the service, not of the engine."""

    def run(self, call: EngineCall) -> EngineResult:
        return EngineResult(None, None)  # type: ignore[arg-type]


ENGINES: dict[str, Callable[[], Engine]] = {
    "slow": SlowEngine,
    "failing": FailingEngine,
    "broken-answer": BrokenAnswerEngine,
}


def _main(engine: str, flags: list[str]) -> None:
    given = {
        flag.removeprefix("--").replace("-", "_"): value for flag, value in zip(flags[::2], flags[1::2], strict=True)
    }
    settings = load_settings(given, {}).settings
    make = ENGINES[engine]
    sys.exit(0 if start(settings, lambda _: make()) else 1)


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2:])
