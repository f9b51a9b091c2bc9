"""A real server process on a real port, for tests that speak HTTP."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import httpx
import psutil

START_LIMIT_S = 30.0


class ServerProcess:
    """One `mha serve` (or another command that logs as it does), its log, and a client for it."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.log_path = log
        self._log_file = log.open("wb")
        self.started_at = time.monotonic()
        self.process = subprocess.Popen(
            command, env=environment, stdout=self._log_file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )
        self._client: httpx.Client | None = None

    @property
    def url(self) -> str:
        """Where it listens, from its own log."""
        return str(self.wait_for_event("listening")["url"])

    @property
    def client(self) -> httpx.Client:
        """A keep-alive client."""
        if self._client is None:
            self._client = httpx.Client(base_url=self.url, timeout=60)
        return self._client

    def events(self) -> list[dict[str, Any]]:
        """Every complete JSON log line so far."""
        lines = self.log_path.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    def wait_for_event(self, name: str) -> dict[str, Any]:
        """The first log line of that event, once it is there."""
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            for event in self.events():
                if event["event"] == name:
                    return event
            if self.process.poll() is not None:
                break
            time.sleep(0.01)
        raise AssertionError(f"no event {name!r}; the log is:\n{self.log_path.read_text()}")

    def wait_ready(self) -> Self:
        """Returns once models are loaded."""
        self.wait_for_event("ready")
        return self

    def metric(self, start: str) -> float:
        """The sum of the samples in /metrics that start so."""
        lines = self.client.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(start))

    def wait_until_more(self, start: str, than: float) -> None:
        """Returns once a metric is above that."""
        deadline = time.monotonic() + START_LIMIT_S
        while self.metric(start) <= than:
            assert time.monotonic() < deadline, f"{start} does not rise above {than}"
            time.sleep(0.005)

    def wait_until_in_flight(self, requests: int) -> None:
        """Returns once it answers that many requests at the same time, beside the one that asks for it."""
        self.wait_until_more("mha_requests_in_flight", requests)

    def peak_memory_bytes(self) -> int:
        """The most memory that its processes have ever held (the sum of VmHWM)."""
        return sum(_peak_bytes(one.pid) for one in self.members())

    def memory_bytes(self) -> int:
        """The memory that its processes hold now (the sum of RSS)."""
        return sum(int(one.memory_info().rss) for one in self.members())

    def members(self) -> list[psutil.Process]:
        """The process that was started, and those that it has started."""
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children()]

    def stop(self, sig: signal.Signals = signal.SIGTERM) -> int:
        """Ends the process, and returns its exit status."""
        if self._client is not None:
            self._client.close()
        if self.process.poll() is None:
            self.process.send_signal(sig)
        try:
            return self.process.wait(60)
        finally:
            self._log_file.close()


def free_port() -> int:
    """A port on loopback that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def wait_until(is_so: Callable[[], bool]) -> None:
    """Returns once it is so."""
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def clean_environment(**settings: str) -> dict[str, str]:
    """The environment without any `MHA_*`, plus these."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MHA_")}
    return {**inherited, **settings}


@contextmanager
def serving(log: Path, *flags: str, **settings: str) -> Iterator[ServerProcess]:
    """`mha serve --port 0` with these flags and `MHA_*` settings, ready."""
    command = [sys.executable, "-m", "mha", "serve", "--port", "0", "--log-format", "json", *flags]
    server = ServerProcess(command, clean_environment(**settings), log)
    try:
        yield server.wait_ready()
    finally:
        server.stop()


@contextmanager
def serving_fake(log: Path, engine: str, *flags: str, **environment: str) -> Iterator[ServerProcess]:
    """A real server around one of the engines of `tests.fakes`, ready."""
    # One process, so that every request meets the same engine.
    alone = ("--port", "0", "--log-format", "json", "--processes", "1")
    command = [sys.executable, "-m", "tests.fakes", engine, *alone, *flags]
    server = ServerProcess(command, clean_environment(**environment), log)
    try:
        yield server.wait_ready()
    finally:
        server.stop()
