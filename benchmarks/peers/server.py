"""A server process and everything that it starts: brought up, stopped while others are measured, and ended.

The processes are found by their descent and by their session: some peers' workers lose the one, some the other.
"""

import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final, final

import numpy as np
import psutil

from benchmarks.peers.contestants import BENCH, GRAPH, HERE, Contestant, Setup
from benchmarks.peers.exchange import Unavailable, post
from benchmarks.peers.forms import CODECS
from benchmarks.peers.workloads import dense

START_S: Final = 90.0
_END_S: Final = 5.0
_POLL_S: Final = 0.1


@final
class Server:
    """One contestant in one setup, listening on `port` of the loopback interface once `await_ready` returns."""

    def __init__(self, contestant: Contestant, setup: Setup, port: int, process: "subprocess.Popen[bytes]") -> None:
        self.contestant = contestant
        self.setup = setup
        self.port = port
        self._process = process

    @classmethod
    def start(cls, contestant: Contestant, setup: Setup) -> "Server":
        """Starts it; what it prints goes to `.bench/logs`."""
        port = _free_port()
        programs = BENCH / "venvs" / (contestant.environment_name or "") / "bin"
        command = [part.format(bin=programs, port=port) for part in contestant.command]
        environment = {
            **os.environ, **setup.environment(), **contestant.variables,
            "BENCH_MODEL": str(GRAPH), "BENCH_PORT": str(port),
        }  # fmt: skip
        with _log(contestant).open("wb") as log:
            process = subprocess.Popen(
                command, cwd=HERE / "servers", env=environment, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        return cls(contestant, setup, port, process)

    def await_ready(self, timeout_s: float = START_S) -> None:
        """Returns once a small request is answered with 200.

        Raises:
            Unavailable: it ended, or time ran out; with the last line of its log.
        """
        form = next(iter(self.contestant.routes))
        codec = CODECS[form]
        body = codec.encode(dense(1, 1)(np.random.default_rng(0)))
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                post(self.port, self.contestant.routes[form], codec.media_type, body)
            except (OSError, Unavailable):
                time.sleep(_POLL_S)
            else:
                return
        raise Unavailable(f"did not start: {_last_line(_log(self.contestant))}")

    def pause(self) -> None:
        """Stops every process of it, if it is one that takes CPU while nobody asks it anything."""
        if self.contestant.polls:
            _signal(self._members(), signal.SIGSTOP)

    def resume(self) -> None:
        """Undoes `pause`."""
        if self.contestant.polls:
            _signal(self._members(), signal.SIGCONT)

    def cpu_s(self) -> float:
        """The CPU time that its processes have taken so far."""
        total = 0.0
        for one in self._members():
            with suppress(psutil.NoSuchProcess):
                times = one.cpu_times()
                total += times.user + times.system
        return total

    def end(self) -> None:
        """Asks it to end, and ends what is left of it after 5 s."""
        self.resume()
        members = self._members()
        self._process.terminate()
        psutil.wait_procs(members, _END_S)
        _signal([*members, *self._members()], signal.SIGKILL)
        self._process.wait()

    def _members(self) -> list[psutil.Process]:
        members = {one for one in psutil.process_iter() if _session(one.pid) == self._process.pid}
        with suppress(psutil.NoSuchProcess):
            members.update(psutil.Process(self._process.pid).children(recursive=True))
        return list(members)


def _signal(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for one in processes:
        with suppress(psutil.NoSuchProcess):  # psutil knows a process that got the number of another one
            one.send_signal(number)


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def _free_port() -> int:
    """A port that is free with the one after it, which MLServer takes too; below those that clients are given."""
    while True:
        port = 20_000 + 2 * secrets.randbelow(5_000)
        if _is_free(port) and _is_free(port + 1):
            return port


def _is_free(port: int) -> bool:
    with socket.socket() as one:
        try:
            one.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _log(contestant: Contestant) -> Path:
    folder = BENCH / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{contestant.environment_name or contestant.name}.log"


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:200] if lines else "it said nothing"
