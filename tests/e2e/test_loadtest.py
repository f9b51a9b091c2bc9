"""`mha loadtest` as a user runs it: against a server whose times are known, and against ours."""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from loadtest.protocols import PROTOCOLS
from tests.loadtest.test_arrivals import CRITICAL, kolmogorov_smirnov
from tests.served import ServerProcess, clean_environment, free_port, serving, serving_fake, wait_until

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers" / "servers"
SHORT = ("--duration", "1", "--warmup", "0.2")
RAGGED = ("--batch", "3", "--queries", "uniform:min=1,max=7")
RAGGED_CROSS = (*RAGGED, "--keys", "uniform:min=2,max=9", "--valid-lens", "uniform:min=1,max=9")
PACKED = (*RAGGED, "--keys", "uniform:min=2,max=9", "--form", "packed")
NAMES = {(): "self", RAGGED: "self_ragged", RAGGED_CROSS: "cross_padded", PACKED: "cross_packed"}


@dataclass(frozen=True)
class Run:
    """One run of the command."""

    status: int
    printed: str
    report: dict[str, Any]

    @property
    def level(self) -> dict[str, Any]:
        """The only one."""
        (level,) = self.report["levels"]
        assert isinstance(level, dict)
        return level


def loadtest(folder: Path, url: str, *flags: str) -> Run:
    """Runs it, and reads its report."""
    path = folder / "report.json"
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "mha", "loadtest", url, "--json", str(path), *flags]
    ended = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, check=False, timeout=200)
    assert "Traceback" not in ended.stderr
    report = json.loads(path.read_text()) if path.exists() else {}
    return Run(ended.returncode, ended.stdout + ended.stderr, report)


@dataclass
class Known:
    """A server whose times are known."""

    url: str
    process: "subprocess.Popen[str]"
    came_path: Path

    def came(self) -> np.ndarray:
        """When requests came; ends it."""
        self.process.terminate()
        self.process.wait(10)
        return np.array(json.loads(self.came_path.read_text()))


@contextmanager
def known_server(folder: Path, *flags: str) -> Iterator[Known]:
    """One with these times."""
    command = [sys.executable, "-m", "tests.loadtest.known_server", str(folder / "came"), *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield Known(f"http://127.0.0.1:{int(process.stdout.readline())}", process, folder / "came")
        finally:
            process.kill()


@pytest.fixture
def body(tmp_path: Path) -> str:
    """A file to send."""
    path = tmp_path / "body.bin"
    path.write_bytes(b"a body")
    return str(path)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, seeds_repository: Path) -> Iterator[ServerProcess]:
    """The seeds' layer, served."""
    with serving(tmp_path_factory.mktemp("server") / "log", "--models", str(seeds_repository)) as process:
        yield process


class TestStall:
    """Service takes 5 ms; 4 s after the first request, which a warm-up of 1 s precedes, nobody is answered for 1 s."""

    STALL = ("--service-ms", "5", "--stall-at", "4", "--stall-s", "1")
    TIMES = ("--duration", "8", "--warmup", "1")

    def test_open_loop_shows_it(self, tmp_path: Path, body: str) -> None:
        """An eighth of the requests is due in the stall, and waits for the rest of it: the 99th percentile is what is
        left of it when eight hundredths are over."""  # noqa: D205, D209  # one sentence
        with known_server(tmp_path, *self.STALL) as known:
            run = loadtest(tmp_path, known.url, "--body", body, "--rate", "200", "--arrivals", "constant", *self.TIMES)
        assert run.status == 0, run.printed
        assert run.level["latency_ms"]["p99"] == pytest.approx(5 + 1000 * (1 - 0.08), rel=0.05)
        assert run.level["latency_ms"]["max"] == pytest.approx(1005, rel=0.05)
        assert run.level["requests"]["answered"] == 1600

    def test_closed_loop_hides_it(self, tmp_path: Path, body: str) -> None:
        """Four in flight are four that wait: of thousands no percent, and those that would have come are missing."""
        with known_server(tmp_path, *self.STALL) as known:
            run = loadtest(tmp_path, known.url, "--body", body, "--concurrency", "4", *self.TIMES)
        assert run.level["latency_ms"]["p99"] < 100
        assert run.level["latency_ms"]["max"] == pytest.approx(1005, rel=0.05)
        stalled = [window for window in run.level["windows"] if window["answers_a_second"] < 100]
        assert len(stalled) in (1, 2)

    def test_the_late_ones_are_not_the_generators(self, tmp_path: Path, body: str) -> None:
        """Its own lag stays small, so the run is valid: requests were sent when they were due, into the stall."""
        with known_server(tmp_path, *self.STALL) as known:
            run = loadtest(tmp_path, known.url, "--body", body, "--rate", "200", *self.TIMES)
            came = known.came()
        assert run.level["lag_ms"]["p99"] < 50
        stall = came[(came >= came[0] + 4) & (came < came[0] + 5)]
        assert 130 < len(stall) < 270


class TestArrivals:
    def test_are_poisson_at_the_server(self, tmp_path: Path, body: str) -> None:
        """Kolmogorov and Smirnov have nothing to say against the gaps between requests as the server saw them."""
        with known_server(tmp_path) as known:
            loadtest(tmp_path, known.url, "--body", body, "--rate", "100", "--duration", "10", "--warmup", "0")
            came = known.came()
        assert kolmogorov_smirnov(np.diff(came), 100) < CRITICAL

    def test_processes_share_one_schedule(self, tmp_path: Path, body: str) -> None:
        """Two that send make the same arrivals as one."""
        rate = ("--rate", "50", "--duration", "4", "--warmup", "0", "--seed", "3")
        arrived = []
        for processes in ("1", "2"):
            with known_server(tmp_path) as known:
                loadtest(tmp_path, known.url, "--body", body, *rate, "--processes", processes)
                came = known.came()
                arrived.append(came - came[0])
        assert len(arrived[0]) == len(arrived[1])
        assert np.median(np.abs(arrived[0] - arrived[1])) < 0.01

    def test_trace_is_sent_as_it_was(self, tmp_path: Path, server: ServerProcess) -> None:
        """Every request of it, with its sizes."""
        trace = tmp_path / "trace"
        trace.write_text("".join(f"{number / 20} 2x{3 + number % 5}x7x5\n" for number in range(20)))
        run = loadtest(tmp_path, server.url, "--trace", str(trace), "--check-every", "0")
        assert run.level["requests"]["answered"] == 20
        assert run.level["per_second"]["rows"] * run.level["seconds"] == pytest.approx(40)
        assert run.level["per_second"]["queries"] * run.level["seconds"] == pytest.approx(2 * 4 * (3 + 4 + 5 + 6 + 7))


class TestOurServer:
    def test_with_no_option_but_the_address(self, tmp_path: Path, server: ServerProcess) -> None:
        """It finds out what is served, runs half a minute, and prints tables; times are shortened here."""
        run = loadtest(tmp_path, server.url, "--duration", "2", "--warmup", "0.5")
        assert run.status == 0, run.printed
        assert [level["load"] for level in run.report["levels"]] == ["1 in flight", "4 in flight", "16 in flight"]
        assert "What clients saw" in run.printed
        assert "Where the time went" in run.printed
        for level in run.report["levels"]:
            told = level["server"]["requests"]["ok"]
            assert told == pytest.approx(level["per_second"]["requests"] * level["server"]["seconds"], rel=0.2)
            assert level["server"]["request_ms"] < level["service_ms"]["mean"]

    @pytest.mark.parametrize(
        ("protocol", "shapes"),
        [
            *((protocol, shapes) for protocol in PROTOCOLS for shapes in ((), RAGGED_CROSS, RAGGED)),
            *((protocol, PACKED) for protocol in PROTOCOLS if not protocol.startswith("oip")),
        ],
        ids=lambda value: value if isinstance(value, str) else NAMES[value],
    )
    def test_every_protocol_is_answered_right(
        self, tmp_path: Path, server: ServerProcess, seeds_repository: Path, protocol: str, shapes: Sequence[str]
    ) -> None:
        """Compared with float64 from the weights of the artefact, under load."""
        run = loadtest(
            tmp_path, server.url, "--protocol", protocol, *shapes, "--concurrency", "4", "--duration", "0.7",
            "--warmup", "0.1", "--artifact", str(seeds_repository / "attention" / "1"), "--check-every", "3",
            "--bodies", "24",
        )  # fmt: skip
        assert run.status == 0, run.printed
        compared = run.level["compared"]
        assert (compared["with"], compared["wrong"]) == ("float64", 0)
        assert compared["answers"] > 5
        assert 0 < compared["max_error"] < 1e-5
        assert run.level["requests"]["answered"] == run.level["requests"]["sent"]

    def test_without_the_artefact_it_compares_with_the_server_alone(
        self, tmp_path: Path, server: ServerProcess
    ) -> None:
        """And says so."""
        run = loadtest(
            tmp_path, server.url, "--concurrency", "8", "--duration", "1", "--warmup", "0.2", "--check-every", "5"
        )
        assert run.level["compared"]["with"] == "the server alone"
        assert run.level["compared"]["answers"] > 3
        assert run.level["compared"]["wrong"] == 0

    def test_wrong_answers_fail(self, tmp_path: Path, seeds_repository: Path) -> None:
        """A server that answers zeros is as fast as can be, and of no use."""
        with serving_fake(tmp_path / "log", "slow", "--models", str(seeds_repository)) as server:
            run = loadtest(
                tmp_path, server.url, "--concurrency", "2", "--duration", "2", "--warmup", "0",
                "--artifact", str(seeds_repository / "attention" / "1"), "--check-every", "1",
            )  # fmt: skip
        assert run.status == 1
        assert "answers are wrong: body" in run.printed

    def test_refusals_and_failures_are_apart(self, tmp_path: Path, seeds_repository: Path) -> None:
        """What is refused is counted as that, is no latency, and counts against the SLO's errors."""
        flags = ("--models", str(seeds_repository), "--workers", "1", "--max-queue-ms", "0")
        with serving_fake(tmp_path / "log", "slow", *flags) as server:
            run = loadtest(
                tmp_path, server.url, "--rate", "20", "--duration", "3", "--warmup", "0.5", "--check-every", "0",
                "--slo", "p50=1s",
            )  # fmt: skip
        requests = run.level["requests"]
        assert requests["refused"] > 20
        assert requests["answered"] + requests["refused"] == requests["sent"]
        assert run.level["latency_ms"]["count"] == requests["answered"]
        assert run.status == 1
        assert "SLO missed: errors" in run.printed
        assert run.level["server"]["requests"]["overloaded"] > 20

    def test_refusals_are_told(self, tmp_path: Path, server: ServerProcess) -> None:
        """With what the server said, once for each status."""
        (tmp_path / "body.json").write_text('{"queries": [[[1]]]}')
        url, body = f"{server.url}/v1/attention", str(tmp_path / "body.json")
        run = loadtest(tmp_path, url, "--body", body, "--concurrency", "1", "--duration", "0.5", "--warmup", "0")
        assert run.status == 1
        assert run.level["requests"]["failed"] == run.level["requests"]["sent"] > 0
        assert "queries: last axis is 1, the model expects 100" in run.level["said"]["422"]
        assert "nothing was answered; the server said" in run.printed

    def test_find_max(self, tmp_path: Path) -> None:
        """Where a server of known times is asked for what it cannot do, the search says so."""
        (tmp_path / "body.bin").write_bytes(b"a body")
        with known_server(tmp_path, "--service-ms", "20") as known:
            common = ("--body", str(tmp_path / "body.bin"), "--find-max", "--rate", "1", "--duration", "2")
            run = loadtest(tmp_path, known.url, *common, "--warmup", "0.1", "--slo", "p99=10ms")
        assert run.status == 1
        assert "found no rate that keeps p99=10ms,errors=1%; not even 0.0625 requests a second do" in run.printed
        assert run.report["search"]["highest"] is None

    def test_find_max_of_ours(self, tmp_path: Path, server: ServerProcess) -> None:
        """It finds a rate between one that passes and one that fails, and says so."""
        flags = ("--find-max", "--rate", "100", "--resolution", "0.5", "--slo", "p99=100ms")
        run = loadtest(tmp_path, server.url, *flags, "--duration", "2", "--warmup", "0.2", "--check-every", "0")
        assert run.status in (0, 3), run.printed
        search = run.report["search"]
        found = search["highest"]
        assert found == max(one["rate"] for one in search["rates"] if one["passed"])
        assert found < min(one["rate"] for one in search["rates"] if not one["passed"]) <= 1.5 * found
        assert sum(one["levels"] for one in search["rates"]) == len(run.report["levels"])
        assert f"found: {found:.4g} requests a second keep p99=100ms" in run.printed

    @pytest.mark.parametrize(
        ("flags", "load", "said"),
        [
            (("--scenario", "single-stream"), "1 in flight", "single-stream: p90 latency"),
            (("--scenario", "multi-stream"), "multi-stream of 8", "multi-stream: p99 latency"),
            (("--scenario", "server", "--rate", "30"), "30/s poisson", "server: answers a second"),
            (("--scenario", "offline", "--samples", "300"), "offline, 300 samples", "offline: answers a second"),
        ],
        ids=["single-stream", "multi-stream", "server", "offline"],
    )
    def test_scenarios(self, tmp_path: Path, server: ServerProcess, flags: Sequence[str], load: str, said: str) -> None:
        """MLPerf's four, each with its own figure."""
        run = loadtest(tmp_path, server.url, *flags, "--duration", "3", "--warmup", "0.5")
        assert run.status in (0, 3), run.printed  # beside other tests the generator may have been late, and says so
        assert run.level["load"] == load
        assert said in run.printed

    def test_offline_sends_each_sample_once(self, tmp_path: Path, server: ServerProcess) -> None:
        """All of them are due at once, so latency grows to the time that all take."""
        run = loadtest(tmp_path, server.url, "--scenario", "offline", "--samples", "500", "--check-every", "0")
        assert run.level["requests"]["answered"] == 500
        assert run.level["latency_ms"]["max"] == pytest.approx(1000 * run.level["seconds"], rel=0.05)

    def test_group_ends_with_its_last(self, tmp_path: Path, body: str) -> None:
        """Eight samples of 20 ms at once take 20 ms and count as one query of multi-stream."""
        with known_server(tmp_path, "--service-ms", "20") as known:
            run = loadtest(
                tmp_path, known.url, "--body", body, "--scenario", "multi-stream", "--duration", "2", "--warmup", "0.2"
            )
        assert 60 < run.level["requests"]["answered"] <= 100
        assert 20 < run.level["latency_ms"]["p50"] < 40


class TestPeer:
    def test_any_server_by_its_own_body(self, tmp_path: Path, seeds_repository: Path) -> None:
        """The server that one writes in an afternoon is driven as it wants to be."""
        port = free_port()
        setup = {"MODEL": seeds_repository / "attention" / "1" / "model.onnx", "PORT": port, "PROCESSES": 1}
        setup |= {"CALLERS": 2, "THREADS": 1, "BATCH": 1, "WAIT_MS": 1}
        environment = clean_environment(**{f"BENCH_{name}": str(value) for name, value in setup.items()})
        tokens = np.random.default_rng(1).standard_normal((1, 4, 100)).tolist()
        body = {"queries": tokens, "keys": tokens, "values": tokens, "valid_lens": [3]}
        (tmp_path / "body.json").write_text(json.dumps(body))
        url = f"http://127.0.0.1:{port}/"
        with subprocess.Popen([sys.executable, "obvious.py"], cwd=PEERS, env=environment) as process:
            try:
                wait_until(lambda: answers(f"{url}ready"))
                run = loadtest(tmp_path, url, "--body", str(tmp_path / "body.json"), "--concurrency", "4", *SHORT)
            finally:
                process.terminate()
        assert run.status == 0, run.printed
        assert run.level["requests"]["answered"] == run.level["requests"]["sent"] > 50
        assert run.level["server"] is None


def answers(url: str) -> bool:
    """Whether somebody does."""
    with contextlib.suppress(httpx.TransportError):
        httpx.get(url)
        return True
    return False


class TestReportsCompared:
    def test_slower_server_is_a_regression(self, tmp_path: Path, body: str) -> None:
        """Exit status 1, with the interval; the same server is none."""
        reports = []
        for name, service_ms in (("fast", "10"), ("slow", "14"), ("again", "10")):
            with known_server(tmp_path, "--service-ms", service_ms) as known:
                loadtest(
                    tmp_path, known.url, "--body", body, "--concurrency", "2", "--duration", "6", "--warmup", "0.5"
                )
            reports.append((tmp_path / "report.json").rename(tmp_path / f"{name}.json"))
        worse = compared(reports[0], reports[1])
        assert worse.returncode == 1
        assert worse.stdout.count("worse") == 3
        assert compared(reports[0], reports[2], "--threshold", "0.1").returncode == 0

    def test_what_is_no_report(self, tmp_path: Path) -> None:
        """Is named."""
        (tmp_path / "other.json").write_text("{}")
        ended = compared(tmp_path / "other.json", tmp_path / "missing.json")
        assert ended.returncode == 1
        assert "no report of this command" in ended.stderr


def compared(old: Path, new: Path, *flags: str) -> "subprocess.CompletedProcess[str]":
    """What `compare` says."""
    command = [sys.executable, "-m", "mha", "loadtest", "compare", str(old), str(new), *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


class TestMistakes:
    @pytest.mark.parametrize(
        ("flags", "said"),
        [
            (("--rate", "5", "--concurrency", "2"), "--concurrency and --rate: each says how requests come"),
            (("--rate", "fast"), "--rate: got 'fast'"),
            (("--queries", "many"), "sizes: got 'many'"),
            (("--find-max",), "--find-max: want --slo"),
            (("--scenario", "server"), "want --rate"),
            (("--slo", "99"), "slo: got '99'"),
            (("--form", "packed", "--valid-lens", "3"), "packed keys have no padding"),
            (("--form", "packed", "--protocol", "oip-json"), "oip-json has no packed tensors"),
            (("--model", "absent"), "model: got 'absent'"),
            (("--version", "7"), "version: got 7"),
            (("--header", "nonsense"), "header: got 'nonsense'"),
            (("--body", "/no/such/file"), "body: /no/such/file"),
            (("--trace", "/no/such/file"), "trace: /no/such/file"),
            (("--artifact", "/no/such/folder"), "artefact: /no/such/folder"),
            (("--html", "/no/such/folder/page.html"), "cannot be written"),
        ],
        ids=lambda value: value[0].strip("-") if isinstance(value, tuple) else "",
    )
    def test_is_said(self, tmp_path: Path, server: ServerProcess, flags: Sequence[str], said: str) -> None:
        """What was given and what is wanted, before anything is measured."""
        run = loadtest(tmp_path, server.url, *flags)
        assert run.status == 1
        assert said in run.printed

    def test_nobody_listens(self, tmp_path: Path) -> None:
        """The address is named."""
        run = loadtest(tmp_path, f"http://127.0.0.1:{free_port()}")
        assert run.status == 1
        assert "Connection refused" in run.printed

    def test_server_that_ends_meanwhile(self, tmp_path: Path, body: str) -> None:
        """Requests that broke are counted, and the test ends when it should."""
        with known_server(tmp_path, "--service-ms", "5") as known:
            command = [sys.executable, "-m", "mha", "loadtest", known.url, "--body", body, "--concurrency", "2"]
            flags = ["--duration", "3", "--warmup", "0", "--json", str(tmp_path / "report.json")]
            with subprocess.Popen([*command, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as running:
                assert running.stderr is not None
                came = known.came_path
                while not came.exists() and running.poll() is None:
                    try:
                        known.process.wait(2.5)
                    except subprocess.TimeoutExpired:
                        known.process.terminate()
                assert running.wait(60) in (0, 1)
        level = json.loads((tmp_path / "report.json").read_text())["levels"][0]
        assert level["requests"]["answered"] > 50
        assert level["requests"]["broken"] > 5

    def test_that_is_killed_leaves_nobody_behind(self, tmp_path: Path, body: str) -> None:
        """What sends ends with what counts."""
        with known_server(tmp_path, "--service-ms", "5") as known:
            command = [sys.executable, "-m", "mha", "loadtest", known.url, "--body", body, "--duration", "60"]
            with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
                process = psutil.Process(running.pid)
                wait_until(lambda: any("spawn_main" in " ".join(one.cmdline()) for one in process.children()))
                time.sleep(0.5)
                children = process.children()
                # Meanwhile it counts when they have nothing to send.
                assert process.nice() > max(child.nice() for child in children)
                running.kill()
            assert psutil.wait_procs(children, timeout=10)[1] == []

    def test_secrets_stay_out_of_the_report(self, tmp_path: Path, body: str) -> None:
        """A header that was given is sent, and not told."""
        with known_server(tmp_path) as known:
            run = loadtest(
                tmp_path, known.url, "--body", body, "-H", "X-API-Key: hunter2", "--concurrency", "1",
                "--duration", "0.5", "--html", str(tmp_path / "page.html"),
            )  # fmt: skip
        assert run.status == 0, run.printed
        assert (
            "hunter2" not in (tmp_path / "report.json").read_text() + (tmp_path / "page.html").read_text() + run.printed
        )

    def test_generator_that_is_too_slow_says_so(self, tmp_path: Path, body: str) -> None:
        """A rate that no process can send makes the run invalid, and the exit status 3."""
        with known_server(tmp_path) as known:
            run = loadtest(
                tmp_path, known.url, "--body", body, "--rate", "200000", "--duration", "0.5", "--warmup", "0"
            )
        assert run.status == 3, run.printed
        assert "INVALID" in run.printed


def test_help_is_complete() -> None:
    """It names every way in, `compare` too."""
    ended = subprocess.run(
        [sys.executable, "-m", "mha", "loadtest", "--help"], capture_output=True, text=True, check=True, timeout=60
    )
    assert "mha loadtest compare old.json new.json" in ended.stdout
    assert "--find-max" in ended.stdout
