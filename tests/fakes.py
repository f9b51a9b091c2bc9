"""Engines that misbehave on purpose, at the `Engine` seam, and a server around one: `python -m tests.fakes slow`."""

import itertools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from service.cost import CostModel
from service.engine import Engine, EngineCall, EngineResult, Floats, Projected
from service.errors import ArtifactError
from service.settings import load_settings
from service.start import start

SLOW_S = 0.4
# So that every request is one call, and none so small that the event loop computes it.
NOTHING = CostModel.linear(call_s=0.002, flop_s=0.0)


class Unprojecting:
    """The half of an engine that these have no use for."""

    fault: str | None = None

    def project(self, keys: Floats, values: Floats) -> Projected:
        raise NotImplementedError

    def attend(self, queries: Floats, projected: Projected, valid_lens: NDArray[np.int64] | None) -> Floats:
        raise NotImplementedError


class SlowEngine(Unprojecting):
    """Answers zeros, `SLOW_S` later."""

    cost = NOTHING

    def run(self, call: EngineCall) -> EngineResult:
        time.sleep(SLOW_S)
        return EngineResult(np.zeros_like(call.queries), None)


class FailingEngine(Unprojecting):
    """Raises what a runtime would."""

    cost = NOTHING

    def run(self, call: EngineCall) -> EngineResult:
        raise RuntimeError("CUDA failure 700 in /secret/path: illegal memory access")


class PoisonedEngine(Unprojecting):
    """Fails from the second call on, for good: as a GPU does after an illegal access to its memory."""

    cost = NOTHING

    def __init__(self) -> None:
        self._calls = 0

    def run(self, call: EngineCall) -> EngineResult:
        self._calls += 1
        if self._calls > 1:
            self.fault = "CUDA failure 700 in /secret/path: illegal memory access"
            raise RuntimeError(self.fault)
        return EngineResult(np.zeros_like(call.queries), None)


class FlakyEngine(Unprojecting):
    """Answers zeros, and fails every third time."""

    cost = NOTHING

    def __init__(self) -> None:
        self._calls = itertools.count(1)

    def run(self, call: EngineCall) -> EngineResult:
        time.sleep(0.002)
        if next(self._calls) % 3 == 0:
            raise RuntimeError("out of memory")
        return EngineResult(np.zeros_like(call.queries), None)


class HangingEngine(Unprojecting):
    """Does not return from a call until the file named by `GATE` is there."""

    cost = NOTHING

    def run(self, call: EngineCall) -> EngineResult:
        gate = Path(os.environ["GATE"])
        while not gate.exists():
            time.sleep(0.01)
        return EngineResult(np.zeros_like(call.queries), None)


class DefectiveEngine(Unprojecting):
    """Breaks where none expects it, before anything is computed: a defect of the service, not of the engine."""

    @property
    def cost(self) -> CostModel:
        raise RuntimeError("no cost in /secret/path")

    def run(self, call: EngineCall) -> EngineResult:
        raise NotImplementedError


def gated_engine() -> Engine:
    """An engine that takes to load until the file named by `GATE` is there."""
    gate = Path(os.environ["GATE"])
    while not gate.exists():
        time.sleep(0.01)
    return SlowEngine()


def refused_engine() -> Engine:
    """No engine: as when the runtime refuses a graph."""
    raise ArtifactError("the runtime refuses it")


ENGINES: dict[str, Callable[[], Engine]] = {
    "slow": SlowEngine,
    "failing": FailingEngine,
    "defective": DefectiveEngine,
    "poisoned": PoisonedEngine,
    "flaky": FlakyEngine,
    "hanging": HangingEngine,
    "gated": gated_engine,
    "refusing": refused_engine,
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
