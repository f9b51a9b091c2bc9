"""Several processes behind one port are one server: one count, one set of models, one readiness, and none is missed."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest

from model.attention import MultiHeadAttention
from tests.conftest import weights_of
from tests.oracle import multi_head_attention
from tests.served import ServerProcess, serving

NUM_PROCESSES = 3
CONNECTIONS = 12
BODY = {"queries": [[[0.5] * 100]]}
WAIT_S = 20.0


@pytest.fixture
def repository(tmp_path: Path, seeds_repository: Path) -> Path:
    """A repository of `attention` that a test may change."""
    return Path(shutil.copytree(seeds_repository, tmp_path / "models"))


@pytest.fixture
def family(tmp_path: Path, repository: Path) -> Iterator[ServerProcess]:
    """A server of three processes."""
    with serving(tmp_path / "log", "--models", str(repository), "--processes", str(NUM_PROCESSES)) as server:
        yield server


def children(server: ServerProcess) -> list[psutil.Process]:
    """The processes that serve."""
    return server.members()[1:]


def connected(server: ServerProcess, stack: ExitStack, number: int = CONNECTIONS) -> list[httpx.Client]:
    """Clients with one connection each, all open at once, so that every process has some."""
    clients = [stack.enter_context(httpx.Client(base_url=server.url, timeout=30)) for _ in range(number)]
    for client in clients:
        client.get("/health/live")
    return clients


def eventually(holds: Callable[[], bool]) -> None:
    """Returns once something holds."""
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_ready(server: ServerProcess) -> bool:
    """Asked on a new connection, as a probe does."""
    return httpx.get(f"{server.url}/health/ready", timeout=30).status_code == 200


def metric(exposition: str, start: str) -> float:
    """The sum of the samples whose line starts so."""
    return sum(float(line.rsplit(" ", 1)[1]) for line in exposition.splitlines() if line.startswith(start))


class TestConnections:
    def test_are_dealt_out_evenly(self, family: ServerProcess) -> None:
        """Each process has its share of connections that are open at once, also after some have closed."""
        port = int(family.url.rsplit(":", 1)[1])

        def shares() -> list[int]:
            held = [
                [one for one in child.net_connections("tcp") if one.laddr and one.laddr.port == port]
                for child in children(family)
            ]
            return [sum(one.status == psutil.CONN_ESTABLISHED for one in each) for each in held]

        with ExitStack() as stack:
            clients = connected(family, stack)
            assert shares() == [CONNECTIONS // NUM_PROCESSES] * NUM_PROCESSES
            for client in clients[::NUM_PROCESSES]:  # those of one process
                client.close()
            eventually(lambda: sum(shares()) == CONNECTIONS - CONNECTIONS // NUM_PROCESSES)
            connected(family, stack, CONNECTIONS // NUM_PROCESSES)
            assert shares() == [CONNECTIONS // NUM_PROCESSES] * NUM_PROCESSES

    def test_all_answer_alike(self, family: ServerProcess, seeds_layer: MultiHeadAttention) -> None:
        """Whatever process computes it, the answer is the oracle's."""
        queries = np.random.default_rng(0).standard_normal((2, 5, 100), np.float32)
        expected, _ = multi_head_attention(weights_of(seeds_layer), seeds_layer.num_heads, queries, queries, queries)
        with ExitStack() as stack:
            for client in connected(family, stack):
                output = client.post("/v1/attention", json={"queries": queries.tolist()}).json()["output"]
                assert np.abs(np.array(output) - expected).max() < 1e-5 * np.abs(expected).max()


class TestCounts:
    def test_are_those_of_the_whole_server(self, family: ServerProcess) -> None:
        """Metrics and statistics are sums over processes, whichever is asked; what is no sum is not added up."""
        with ExitStack() as stack:
            clients = connected(family, stack)
            for client in clients:
                assert client.post("/v1/attention", json=BODY).status_code == 200
            for client in clients[:NUM_PROCESSES]:
                told = client.get("/metrics").text
                answered = 'mha_requests_total{code="ok",method="POST",route="/v1/attention",status="200"}'
                assert metric(told, answered) == CONNECTIONS
                assert metric(told, "mha_queries_total") == 2 * CONNECTIONS  # valid and computed
                assert metric(told, 'mha_stage_seconds_count{stage="compute"}') == CONNECTIONS
                assert metric(told, 'mha_stage_seconds_bucket{le="+Inf",stage="compute"}') == CONNECTIONS
                assert metric(told, "mha_ready ") == 1
                assert metric(told, "mha_model_info") == 1
                (statistics,) = client.get("/v2/models/attention/stats").json()["model_stats"]
                assert statistics["inference_count"] == CONNECTIONS
                assert statistics["inference_stats"]["success"]["count"] == CONNECTIONS
                (of_one,) = statistics["batch_stats"]
                assert (of_one["batch_size"], of_one["compute_infer"]["count"]) == (1, CONNECTIONS)

    def test_memory_is_that_of_all_that_serve(self, family: ServerProcess) -> None:
        """`process_resident_memory_bytes` is about the sum of what the processes hold."""
        told = metric(family.client.get("/metrics").text, "process_resident_memory_bytes ")
        assert told == pytest.approx(sum(one.memory_info().rss for one in children(family)), rel=0.1)


class TestModels:
    def test_load_and_unload_are_everywhere(self, family: ServerProcess) -> None:
        """After the answer to a change no process serves what was before, whoever was asked for it."""
        with ExitStack() as stack:
            clients = connected(family, stack)
            for change, status in (("unload", 404), ("load", 200), ("unload", 404), ("load", 200)):
                assert clients[0].post(f"/v2/repository/models/attention/{change}").status_code == 200
                assert {client.post("/v1/attention", json=BODY).status_code for client in clients} == {status}
                clients = clients[1:] + clients[:1]

    def test_a_broken_version_changes_nothing_anywhere(self, family: ServerProcess, repository: Path) -> None:
        """A version that cannot be loaded is refused with its reason, and every process serves what it did."""
        broken = Path(shutil.copytree(repository / "attention" / "1", repository / "attention" / "2"))
        (broken / "model.onnx").write_bytes(b"no graph")
        with ExitStack() as stack:
            clients = connected(family, stack)
            refusal = clients[0].post("/v2/repository/models/attention/load")
            assert (refusal.status_code, refusal.json()["code"]) == (422, "invalid_artifact")
            assert "attention/2/model.onnx" in refusal.json()["error"]
            answers = [client.post("/v1/attention", json=BODY) for client in clients]
            assert {(answer.status_code, answer.headers["mha-version"]) for answer in answers} == {(200, "1")}
            missing = clients[0].post("/v2/repository/models/nothing/load")
            assert (missing.status_code, missing.json()["code"]) == (404, "model_not_found")


class TestDeath:
    def test_a_process_that_dies_is_replaced(self, family: ServerProcess) -> None:
        """The others go on; clients whose connection broke are served on a new one."""
        with ExitStack() as stack:
            clients = connected(family, stack)
            victim = children(family)[1]
            victim.kill()
            family.wait_for_event("a process died and is replaced")
            assert {client.post("/v1/attention", json=BODY).status_code for client in clients} == {200}
            eventually(lambda: is_ready(family))
            assert victim.pid not in [child.pid for child in children(family)]
            assert len(children(family)) == NUM_PROCESSES
            assert {client.post("/v1/attention", json=BODY).status_code for client in connected(family, stack)} == {200}

    def test_ready_waits_for_the_replacement(self, family: ServerProcess) -> None:
        """While one process is missing, ready is 503 and says why; live and startup stay 200."""
        (first, *others) = children(family)
        first.suspend()  # so that it is not what answers
        first.kill()
        family.wait_for_event("a process died and is replaced")
        with httpx.Client(base_url=family.url) as client:
            statuses = [client.get(f"/health/{kind}").status_code for kind in ("live", "startup")]
            assert statuses == [200, 200]
        eventually(lambda: is_ready(family))
        assert {child.pid for child in others} <= {child.pid for child in children(family)}

    def test_the_replacement_serves_what_the_others_do(self, family: ServerProcess) -> None:
        """A model that was unloaded stays so."""
        assert family.client.post("/v2/repository/models/attention/unload").status_code == 200
        family.client.close()
        for child in children(family):
            child.kill()
        eventually(lambda: len(children(family)) == NUM_PROCESSES and is_ready(family))
        with ExitStack() as stack:
            answers = [client.post("/v1/attention", json=BODY) for client in connected(family, stack)]
        assert {answer.status_code for answer in answers} == {404}

    def test_children_do_not_outlive_their_parent(self, family: ServerProcess) -> None:
        """When the parent is killed, its children end."""
        orphans = children(family)
        family.process.kill()
        _, alive = psutil.wait_procs(orphans, WAIT_S)
        assert alive == []

    def test_one_that_cannot_start_stops_the_start(self, tmp_path: Path, seeds_repository: Path) -> None:
        """A graph that the runtime refuses ends all processes, with status 1 and the reason."""
        command = [sys.executable, "-m", "tests.fakes", "refusing", "--models", str(seeds_repository), "--port", "0"]
        run = subprocess.run(
            [*command, "--processes", "3", "--log-format", "json"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert run.returncode == 1
        assert "the runtime refuses it" in run.stdout + run.stderr


class TestEnd:
    def test_under_load_nothing_is_lost(self, tmp_path: Path, repository: Path) -> None:
        """Of requests on new connections until the end, each is answered, or was never accepted."""
        flags = ("--models", str(repository), "--processes", str(NUM_PROCESSES), "--drain-delay-s", "0.5")
        with serving(tmp_path / "log", *flags) as server:
            url = server.url
            outcomes: list[int | str] = []

            def ask() -> None:
                while True:
                    try:
                        outcomes.append(httpx.post(f"{url}/v1/attention", json=BODY, timeout=30).status_code)
                    except httpx.ConnectError:
                        return
                    except httpx.TransportError as error:
                        outcomes.append(repr(error))
                        return

            threads = [threading.Thread(target=ask) for _ in range(4)]
            for thread in threads:
                thread.start()
            time.sleep(0.5)
            before = len(outcomes)
            assert server.stop() == 0
            for thread in threads:
                thread.join()
        assert set(outcomes) == {200}
        assert 0 < before < len(outcomes)

    def test_a_terminal_signals_every_process(self, tmp_path: Path, repository: Path) -> None:
        """Ctrl-C reaches parent and children at once; it counts as one signal, so the drain delay holds."""
        command = [
            sys.executable, "-m", "mha", "serve", "--port", "0", "--log-format", "json", "--models", str(repository),
            "--processes", "2", "--drain-delay-s", "1",
        ]  # fmt: skip
        log = tmp_path / "log"
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
            try:
                deadline = time.monotonic() + WAIT_S
                while b'"ready"' not in log.read_bytes() and time.monotonic() < deadline:
                    time.sleep(0.05)
                began = time.monotonic()
                os.killpg(process.pid, signal.SIGINT)
                assert process.wait(WAIT_S) == 0
                assert time.monotonic() - began > 1
            finally:
                process.kill()
        assert b"Traceback" not in log.read_bytes()
