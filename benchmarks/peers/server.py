"""A server process and everything that it starts: brought up, stopped while others are measured, and ended.

The processes are found by their session, which all of a server's processes share: some peers give each worker a process
group of its own.
"""

import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Final, final

import numpy as np
import psutil

from benchmarks.peers.contestants import BENCH, GRAPH, HERE, Contestant, Setup
from benchmarks.peers.exchange import Unavailable, post
from benchmarks.peers.forms import CODECS
from benchmarks.peers.workloads import dense

START_S: Final = 90.0
_END_S: Final = 15.0
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
        """Stops every process of it, so that it takes no CPU from the one that is measured."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Undoes `pause`."""
        self._signal(signal.SIGCONT)

    def end(self) -> None:
        """Asks it to end, and ends what is left of it after 15 s."""
        self.resume()
        self._process.terminate()
        deadline = time.monotonic() + _END_S
        while self._members() and time.monotonic() < deadline:
            self._process.poll()
            time.sleep(_POLL_S)
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _members(self) -> list[psutil.Process]:
        # The session has the number of the process that began it, and outlives it.
        return [one for one in psutil.process_iter() if _session(one.pid) == self._process.pid]

    def _signal(self, number: signal.Signals) -> None:
        for one in self._members():
            try:
                one.send_signal(number)
            except psutil.NoSuchProcess:
                continue


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def _log(contestant: Contestant) -> Path:
    folder = BENCH / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{contestant.environment_name or contestant.name}.log"


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:200] if lines else "it said nothing"
