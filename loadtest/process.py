"""The processes that send, and how the one that counts speaks to them.

A process makes its bodies, says that it is ready, and then sends one share after another. Ended requests come back as
records several times a second, so that memory does not grow with the length of a test.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from multiprocessing.connection import wait
from typing import Any, Final, final

import uvloop

from loadtest.driver import Driver, Kept, Said, Usage
from loadtest.errors import LoadTestError
from loadtest.level import Share
from loadtest.records import Records, parse
from loadtest.target import Target
from loadtest.workload import Workload, share

_PATIENCE_S: Final = 0.1
# A tenth of the senders' weight: less would let their records pile up where the server takes all cores.
_NICENESS: Final = 10


@final
@dataclass(frozen=True, slots=True)
class Stock:
    """The bodies of one process.

    Attributes:
        process: its number.
        bodies: how many it holds.
        size_bytes: of all of them.
        tokens: of all of them.
    """

    process: int
    bodies: int
    size_bytes: int
    tokens: int


@final
@dataclass(frozen=True, slots=True)
class Recipe:
    """What a process needs to make its bodies.

    Attributes:
        target: where requests go.
        workload: makes bodies.
        bodies: how many all processes shall hold.
        most_bytes: how much all of them may take.
    """

    target: Target
    workload: Workload
    bodies: int
    most_bytes: int


@final
class Processes:
    """Processes that are ready to send. Made by `started`."""

    def __init__(self, pipes: Sequence[Pipe], stocks: Sequence[Stock]) -> None:
        self._pipes = pipes
        self.stocks = stocks

    def __len__(self) -> int:
        return len(self._pipes)

    def send(
        self,
        shares: Sequence[Share],
        count: Callable[[Records], None],
        *,
        compare: Callable[[int, Kept], None],
        hear: Callable[[Said], None],
        meanwhile: Callable[[], None],
    ) -> list[Usage]:
        """Sends a share from each process, and returns what that took.

        Args:
            shares: one a process.
            count: is given records as they come.
            compare: is given a process's number and an answer that it has kept.
            hear: is given what refusals said.
            meanwhile: is called some ten times a second.

        Raises:
            LoadTestError: a process has ended.
        """
        for pipe, one in zip(self._pipes, shares, strict=True):
            pipe.send(one)
        usages: dict[int, Usage] = {}
        while len(usages) < len(self._pipes):
            ready = wait(self._pipes, _PATIENCE_S)
            for process, pipe in enumerate(self._pipes):
                if pipe not in ready:
                    continue
                message = _received(pipe)
                if isinstance(message, bytes):
                    count(parse(message))
                elif isinstance(message, Kept):
                    compare(process, message)
                elif isinstance(message, Said):
                    hear(message)
                else:
                    usages[process] = message
            meanwhile()
        return [usages[process] for process in range(len(self._pipes))]


@contextmanager
def started(recipe: Recipe, processes: int) -> Iterator[Processes]:
    """That many processes with their bodies made; they end with the context.

    From here on the process that calls this gives way to them, for as long as it runs: on a core that they share, each
    time it counts would make requests a millisecond late.

    Raises:
        LoadTestError: one of them failed.
    """
    context = multiprocessing.get_context("spawn")
    pairs = [context.Pipe() for _ in range(processes)]
    workers = [
        context.Process(target=_work, args=(recipe, process, processes, theirs), daemon=True)
        for process, (_, theirs) in enumerate(pairs)
    ]
    try:
        for worker, (_, theirs) in zip(workers, pairs, strict=True):
            worker.start()
            theirs.close()
        _give_way()
        pipes = [ours for ours, _ in pairs]
        yield Processes(pipes, [_received(pipe) for pipe in pipes])
        for pipe in pipes:
            pipe.send(None)
        for worker in workers:
            worker.join(5)
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.kill()


def _give_way() -> None:
    if hasattr(os, "nice"):  # Windows has none
        os.nice(_NICENESS)


def _received(pipe: Pipe) -> Any:
    try:
        return pipe.recv()
    except (EOFError, OSError) as error:
        raise LoadTestError("a process that sends has ended; what it said is above") from error


def _end_with_parent() -> None:
    # A daemon ends when its parent ends well; one that is killed would leave it sending for ever.
    parent = multiprocessing.parent_process()
    assert parent is not None  # noqa: S101  # it is a child
    wait([parent.sentinel])
    os._exit(1)


def _work(recipe: Recipe, process: int, processes: int, pipe: Pipe) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all; who counts decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    count = -(-recipe.bodies // processes)
    bodies = share(recipe.workload, process, processes, count, recipe.most_bytes // processes)
    size_bytes = sum(len(made.body.content) for made in bodies)
    pipe.send(Stock(process, len(bodies), size_bytes, sum(made.shape.num_tokens for made in bodies)))
    while (task := pipe.recv()) is not None:
        pipe.send(uvloop.run(Driver(task, recipe.target, bodies, pipe.send, pipe.send).run()))
