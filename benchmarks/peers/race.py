"""One workload, all contestants: the best setup of each, then rounds in which they take turns."""

import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, final

from benchmarks.peers import limit, wrk
from benchmarks.peers.contestants import LIMIT, Contestant, Setup
from benchmarks.peers.exchange import Unavailable, check, post
from benchmarks.peers.figures import speed
from benchmarks.peers.forms import CODECS
from benchmarks.peers.server import Server
from benchmarks.peers.workloads import Form, Workload
from benchmarks.peers.wrk import Figures, Target

WARM_UP_S: Final = 2.0  # a server that stood still has timers to catch up with
TUNE_S: Final = 2.0
Say = Callable[[str], None]


@final
@dataclass
class Lane:
    """One contestant asked in one form, and what was counted; or why it could not be."""

    name: str
    form: Form | None = None
    setup: Setup | None = None
    body_bytes: int = 0
    largest_error: float = 0.0
    rounds: list[Figures] = field(default_factory=list)
    unavailable: str | None = None

    def record(self) -> dict[str, Any]:
        """For the results file."""
        return asdict(self)


@final
class Race:
    """The bodies and the right answers of one workload, and the measuring of contestants with them."""

    def __init__(self, workload: Workload, folder: Path, say: Say) -> None:
        self.workload = workload
        self._folder = folder
        self._say = say
        self._requests = workload.requests()
        self._feeds = limit.feeds(self._requests)
        self._wanted = limit.outputs(self._requests)

    def run(self, contestants: Sequence[Contestant], rounds: int, seconds: float) -> list[Lane]:
        """A lane for each contestant and form, and one in process; they take turns, backwards in every other round."""
        with ExitStack() as stack:
            turns, unavailable = [self._in_process()], []
            for contestant in contestants:
                try:
                    turns += self._enter(contestant, stack)
                except Unavailable as error:
                    self._say(f"  {contestant.name}: {error}")
                    unavailable.append(Lane(contestant.name, unavailable=str(error)))
            for number in range(rounds):
                for turn in turns if number % 2 == 0 else reversed(turns):
                    others = {other.server for other in turns if other.server} - {turn.server}
                    self._take(turn, seconds, others)
            return [*(turn.lane for turn in turns), *unavailable]

    def _enter(self, contestant: Contestant, stack: ExitStack) -> "list[_Turn]":
        forms = contestant.forms(self.workload)
        if not forms:
            raise Unavailable("accepts no form of this workload")
        server = Server.start(contestant, self._best_setup(contestant, forms[-1]))
        stack.callback(server.end)
        server.await_ready()
        turns = [self._turn(server, form) for form in forms]
        server.pause()
        return turns

    def _best_setup(self, contestant: Contestant, form: Form) -> Setup:
        setups = contestant.setups(self.workload)
        if len(setups) == 1:
            return setups[0]
        return self._fastest(setups, lambda setup: self._try(contestant, setup, form), contestant.name)

    def _fastest(self, setups: Sequence[Setup], measured: Callable[[Setup], Figures], name: str) -> Setup:
        speeds, reasons = {}, []
        for setup in setups:
            try:
                speeds[setup] = speed(measured(setup), self.workload.measure, self.workload.rows)
            except Unavailable as error:
                reasons.append(str(error))
                self._say(f"  {name}: {setup}: {error}")
        if not speeds:
            raise Unavailable(reasons[0])
        return max(speeds, key=speeds.__getitem__)

    def _try(self, contestant: Contestant, setup: Setup, form: Form) -> Figures:
        server = Server.start(contestant, setup)
        try:
            server.await_ready()
            turn = self._turn(server, form)
            if turn.lane.unavailable:
                raise Unavailable(turn.lane.unavailable)
            turn.load(WARM_UP_S)
            return turn.load(TUNE_S)
        finally:
            server.end()

    def _turn(self, server: Server, form: Form) -> "_Turn":
        codec, path = CODECS[form], server.contestant.routes[form]
        bodies = [codec.encode(tensors) for tensors in self._requests]
        lane = Lane(server.contestant.name, form, server.setup, len(bodies[0]))
        try:
            answers = [codec.decode(post(server.port, path, codec.media_type, body)) for body in bodies]
            lane.largest_error = check(answers, self._wanted)
        except (Unavailable, OSError) as error:
            lane.unavailable = str(error)
            self._say(f"  {lane.name}, {form}: {error}")
        target = Target(
            f"http://127.0.0.1:{server.port}{path}", codec.media_type, self._written(form, bodies), len(bodies)
        )
        return _Turn(lane, lambda seconds: wrk.load(target, self.workload.connections, seconds), server)

    def _written(self, form: Form, bodies: Sequence[bytes]) -> Path:
        folder = self._folder / form
        folder.mkdir(exist_ok=True)
        for number, body in enumerate(bodies):
            (folder / str(number)).write_bytes(body)
        return folder

    def _in_process(self) -> "_Turn":
        setups = limit.IDLE if self.workload.connections == 1 else limit.LOADED
        setup = self._fastest(setups, lambda setup: limit.load(self._feeds, setup, TUNE_S), LIMIT)
        return _Turn(Lane(LIMIT, setup=setup), lambda seconds: limit.load(self._feeds, setup, seconds), None)

    def _take(self, turn: "_Turn", seconds: float, others: Iterable[Server]) -> None:
        if turn.lane.unavailable:
            return
        try:
            if turn.server:
                turn.server.resume()
                turn.server.await_ready()
            with suppress(Unavailable):  # a proxy may have given up on workers that stood still; it gets over that
                turn.load(WARM_UP_S)
            before_s = sum(other.cpu_s() for other in others)
            figures = turn.load(seconds)
            idle_us = round((sum(other.cpu_s() for other in others) - before_s) * 1e6)
        except Unavailable as error:
            turn.lane.unavailable = str(error)
            self._say(f"  {turn.lane.name}: {error}")
            return
        finally:
            if turn.server:
                turn.server.pause()
        turn.lane.rounds.append({**figures, "others_cpu_us": idle_us})
        rate = figures["requests"] / (figures["duration_us"] / 1e6)
        self._say(
            f"  {turn.lane.name:12} {turn.lane.form or '':14} {rate:9.1f}/s  p50 {figures['p50_us'] / 1000:8.2f} ms"
        )


@final
@dataclass(frozen=True, slots=True)
class _Turn:
    """A lane, how to load it, and the server to wake up for that."""

    lane: Lane
    load: Callable[[float], Figures]
    server: Server | None


def race(
    workload: Workload, contestants: Sequence[Contestant], rounds: int, seconds: float, say: Say
) -> dict[str, Any]:
    """What was counted of one workload, for the results file."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        lanes = Race(workload, Path(folder), say).run(contestants, rounds, seconds)
    return {
        "name": workload.name, "connections": workload.connections, "measure": workload.measure,
        "rows": workload.rows, "lanes": [lane.record() for lane in lanes],
    }  # fmt: skip
