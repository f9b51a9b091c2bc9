"""Every code of the error table, from a real server that has a reason to say it, in the answer and in the log."""

import hashlib
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.http.errors import STATUS
from tests.e2e.test_bad_input import check_refused
from tests.e2e.test_body_limits import connected, head, logged, reply
from tests.fakes import SLOW_S
from tests.served import ServerProcess, clean_environment, serving, serving_fake

Make = pytest.TempPathFactory

GOOD = {"queries": [[[0.5] * 100]]}
KEY = "correct horse battery staple"
LIMIT_S = 10


def ask(server: ServerProcess, body: Any = GOOD, query: str = "model=attention", **headers: str) -> httpx.Response:
    """One request on a connection of its own, so that several can be sent at once."""
    with httpx.Client(base_url=server.url, timeout=30) as client:
        return client.post(f"/v1/attention?{query}", json=body, headers=headers)


def changed(**fields: Any) -> dict[str, Any]:
    """The good body with other fields."""
    return {**GOOD, **fields}


# Servers, each with a reason for some of the codes.


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: Make, seeds_repository: Path) -> Iterator[ServerProcess]:
    """A server that asks for a key."""
    folder = tmp_path_factory.mktemp("keyed")
    keys = folder / "keys"
    keys.write_text(f"# of the tests\n\ntests:{hashlib.sha256(KEY.encode()).hexdigest()}\n")
    with serving(folder / "log", "--models", str(seeds_repository), MHA_API_KEYS_FILE=str(keys)) as server:
        yield server


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: Make, seeds_repository: Path) -> Iterator[ServerProcess]:
    """A server that waits for a request's head half a second."""
    log = tmp_path_factory.mktemp("hasty") / "log"
    with serving(log, "--models", str(seeds_repository), "--head-timeout-s", "0.5") as server:
        yield server


@pytest.fixture(scope="module")
def modest(tmp_path_factory: Make, seeds_repository: Path) -> Iterator[ServerProcess]:
    """A server that gives short answers: one token's output, and no weight more."""
    log = tmp_path_factory.mktemp("modest") / "log"
    with serving(log, "--models", str(seeds_repository), "--max-answer-bytes", "400") as server:
        yield server


@pytest.fixture(scope="module")
def slow(tmp_path_factory: Make, seeds_repository: Path) -> Iterator[ServerProcess]:
    """A server that computes one request at a time, slowly, and lets none wait."""
    log = tmp_path_factory.mktemp("slow") / "log"
    with serving_fake(
        log, "slow", "--models", str(seeds_repository), "--workers", "1", "--max-queue-ms", "0"
    ) as server:
        yield server


@pytest.fixture(scope="module")
def slow_with_queue(tmp_path_factory: Make, seeds_repository: Path) -> Iterator[ServerProcess]:
    """A server that computes one request at a time, slowly, while others wait."""
    log = tmp_path_factory.mktemp("slow-with-queue") / "log"
    with serving_fake(log, "slow", "--models", str(seeds_repository), "--workers", "1") as server:
        yield server


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: Make, seeds_repository: Path) -> Iterator[ServerProcess]:
    """A server that gives a request less time than it takes."""
    log = tmp_path_factory.mktemp("impatient") / "log"
    with serving_fake(log, "slow", "--models", str(seeds_repository), "--timeout-ms", "100") as server:
        yield server


@pytest.fixture(scope="module")
def failing(tmp_path_factory: Make, seeds_repository: Path) -> Iterator[ServerProcess]:
    """A server whose runtime fails."""
    log = tmp_path_factory.mktemp("failing") / "log"
    with serving_fake(log, "failing", "--models", str(seeds_repository)) as server:
        yield server


@pytest.fixture(scope="module")
def broken(tmp_path_factory: Make, seeds_repository: Path) -> Iterator[ServerProcess]:
    """A server with a defect."""
    log = tmp_path_factory.mktemp("broken") / "log"
    with serving_fake(log, "defective", "--models", str(seeds_repository)) as server:
        yield server


@pytest.fixture
def damaged(tmp_path: Path, seeds_repository: Path) -> Iterator[ServerProcess]:
    """A server whose repository was damaged after it started."""
    repository = tmp_path / "models"
    shutil.copytree(seeds_repository, repository)
    with serving(tmp_path / "log", "--models", str(repository)) as server:
        (repository / "attention" / "1" / "model.onnx").write_bytes(b"")
        yield server


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """Where a file lets the server below load its models."""
    return tmp_path / "gate"


@pytest.fixture
def loading(tmp_path: Path, gate: Path, seeds_repository: Path) -> Iterator[ServerProcess]:
    """A server that accepts connections, and loads its models until the gate is open."""
    command = [sys.executable, "-m", "tests.fakes", "gated", "--models", str(seeds_repository)]
    flags = ["--port", "0", "--log-format", "json", "--log-level", "debug"]
    server = ServerProcess([*command, *flags], clean_environment(GATE=str(gate)), tmp_path / "log")
    try:
        answered(server, "/health/live", 200)
        yield server
    finally:
        gate.touch()
        server.stop()


@pytest.fixture(scope="module")
def draining(tmp_path_factory: Make, seeds_repository: Path) -> Iterator[ServerProcess]:
    """A server that was told to end, and still accepts connections for a while."""
    log = tmp_path_factory.mktemp("draining") / "log"
    flags = ("--models", str(seeds_repository), "--drain-delay-s", "60", "--log-level", "debug")
    with serving(log, *flags) as server:
        server.process.send_signal(signal.SIGTERM)
        answered(server, "/health/ready", 503)
        yield server  # `serving` sends the second signal, which ends it at once


def answered(server: ServerProcess, path: str, status: int) -> None:
    """Returns once the server answers so."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        try:
            if httpx.get(server.url + path).status_code == status:
                return
        except httpx.ConnectError:
            # "listening" is logged just before the socket listens.
            time.sleep(0.01)
    raise AssertionError(f"{path} did not answer {status}; the log is:\n{server.log_path.read_text()}")


# How each code is produced.


def too_large(server: ServerProcess) -> httpx.Response:
    with connected(server) as connection:
        connection.sendall(head("Content-Length: 99999999999"))
        return reply(connection)


def head_that_does_not_end(server: ServerProcess) -> httpx.Response:
    with connected(server) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nX-")
        return reply(connection)


def overloaded(server: ServerProcess) -> httpx.Response:
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: ask(server), range(2))
    return first if first.status_code != 200 else second


def expired_in_the_queue(server: ServerProcess) -> httpx.Response:
    with ThreadPoolExecutor(2) as pool:
        patient = pool.submit(ask, server)
        impatient = pool.submit(ask, server, query="model=attention&timeout_ms=100")
        assert patient.result().status_code == 200
        return impatient.result()


Produce = Callable[[ServerProcess], httpx.Response]

CASES: dict[str, tuple[int, str, Produce]] = {
    "malformed_body": (400, "server", lambda server: ask(server, {})),
    "invalid_parameter": (400, "server", lambda server: ask(server, query="nonsense=1")),
    "unauthorized": (401, "keyed", ask),
    "forbidden": (
        403,
        "keyed",
        lambda server: server.client.post("/v2/repository/index", headers={"X-API-Key": KEY}),
    ),
    "not_found": (404, "server", lambda server: server.client.get("/v1/nonsense")),
    "model_not_found": (404, "server", lambda server: ask(server, query="model=nonsense")),
    "method_not_allowed": (405, "server", lambda server: server.client.delete("/v1/attention")),
    "not_acceptable": (406, "server", lambda server: ask(server, Accept="image/png")),
    "too_slow": (408, "hasty", head_that_does_not_end),
    "body_too_large": (413, "server", too_large),
    "answer_too_large": (413, "modest", lambda server: ask(server, query="model=attention&need_weights=true")),
    "unsupported_media_type": (415, "server", lambda server: ask(server, **{"Content-Encoding": "gzip"})),
    "invalid_shape": (422, "server", lambda server: ask(server, {"queries": [[[0.5] * 99]]})),
    "invalid_dtype": (422, "server", lambda server: ask(server, {"queries": [[["0.5"] * 100]]})),
    "invalid_valid_lens": (422, "server", lambda server: ask(server, changed(valid_lens=[2]))),
    "non_finite": (422, "server", lambda server: ask(server, {"queries": [[[1e39] * 100]]})),
    "overflow": (422, "server", lambda server: ask(server, {"queries": [[[3e38] * 100]]})),
    "invalid_artifact": (422, "damaged", lambda server: server.client.post("/v2/repository/models/attention/load")),
    "empty_axis": (422, "server", lambda server: ask(server, {"queries": [[]]})),
    "overloaded": (429, "slow", overloaded),
    "engine_failure": (500, "failing", ask),
    "internal": (500, "broken", ask),
    "not_ready": (503, "loading", ask),
    "draining": (503, "draining", lambda server: server.client.get("/health/ready")),
    "deadline_exceeded": (504, "slow_with_queue", expired_in_the_queue),
}


# What is refused before it is a request has no line in the log: who sends nonsense must not be able to fill it.
OUTSIDE = ("too_slow",)


@pytest.mark.parametrize("code", list(STATUS))
def test_code(request: pytest.FixtureRequest, code: str) -> None:
    """A real request gets every code of the table, with its status, and the log has a line that says the same."""
    status, fixture, produce = CASES[code]
    server = request.getfixturevalue(fixture)
    response = produce(server)
    check_refused(response, (status, code))
    if code in OUTSIDE:
        return
    event = logged(server, response.json()["request_id"])
    assert (event["status"], event["code"]) == (status, code)


def test_retry_after(slow: ServerProcess) -> None:
    """A server that has no place says in whole seconds, at least one, when to come back."""
    response = overloaded(slow)
    assert response.status_code == 429
    assert response.headers["retry-after"].isdecimal()
    assert int(response.headers["retry-after"]) >= 1


def test_refusals_under_load_share_log_lines(tmp_path: Path, seeds_repository: Path) -> None:
    """Each is counted and has its answer; the log has one line a second, which tells how many had none."""
    flags = ("--models", str(seeds_repository), "--workers", "1", "--max-queue-ms", "0")
    with serving_fake(tmp_path / "log", "slow", *flags) as server, ThreadPoolExecutor(8) as pool:
        first = [answer for answer in pool.map(lambda _: ask(server), range(24)) if answer.status_code == 429]
        time.sleep(1)
        second = [answer for answer in pool.map(lambda _: ask(server), range(8)) if answer.status_code == 429]
        assert len(first) > 10
        lines = [event for event in server.events() if event["event"] == "request" and event["code"] == "overloaded"]
        assert len(lines) < len(first)
        assert sum(1 + line["unlogged"] for line in lines) in range(len(first) + 1, len(first + second) + 1)
        metrics = server.client.get("/metrics").text
        counted = next(line for line in metrics.splitlines() if 'code="overloaded"' in line)
        assert float(counted.split()[-1]) == len(first + second)


def test_answer_that_is_just_short_enough(modest: ServerProcess) -> None:
    """An answer of exactly the limit is given; the message of one beyond has both numbers."""
    assert ask(modest).status_code == 200
    response = ask(modest, query="model=attention&need_weights=true")
    check_refused(response, (413, "answer_too_large"), "output and weights take 420 bytes, the limit is 400")


class TestKeys:
    @pytest.mark.parametrize(
        "headers",
        [
            pytest.param({"Authorization": f"Bearer {KEY}"}, id="bearer"),
            pytest.param({"authorization": f"bEARER   {KEY}"}, id="bearer in other case"),
            pytest.param({"X-API-Key": KEY}, id="X-API-Key"),
        ],
    )
    def test_known(self, keyed: ServerProcess, headers: dict[str, str]) -> None:
        """A known key in either header is let in."""
        assert ask(keyed, **headers).status_code == 200

    @pytest.mark.parametrize(
        "headers",
        [
            pytest.param({}, id="none"),
            pytest.param({"Authorization": "Bearer wrong"}, id="wrong bearer"),
            pytest.param({"Authorization": "Bearer"}, id="bearer of nothing"),
            pytest.param({"Authorization": f"Basic {KEY}"}, id="another scheme"),
            pytest.param({"Authorization": KEY}, id="no scheme"),
            pytest.param({"X-API-Key": "wrong"}, id="wrong X-API-Key"),
            pytest.param({"X-API-Key": ""}, id="empty X-API-Key"),
            pytest.param({"X-API-Key": KEY.upper()}, id="key in other case"),
            pytest.param({"X-API-Key": hashlib.sha256(KEY.encode()).hexdigest()}, id="the line of the file"),
            pytest.param({"Authorization": "Bearer wrong", "X-API-Key": KEY}, id="wrong bearer, known X-API-Key"),
        ],
    )
    def test_unknown(self, keyed: ServerProcess, headers: dict[str, str]) -> None:
        """No key or a wrong one is refused, with the scheme that is wanted, before anything else is judged."""
        response = ask(keyed, {}, query="nonsense=1", **headers)
        check_refused(response, (401, "unauthorized"), "API key")
        assert response.headers["www-authenticate"] == "Bearer"

    @pytest.mark.parametrize(
        "path",
        [
            "/health/live",
            "/health/ready",
            "/health/startup",
            "/metrics",
            "/v1/models",
            "/v2",
            "/v2/models/attention",
            "/docs",
            "/openapi.json",
        ],
    )
    def test_reading_is_open(self, keyed: ServerProcess, path: str) -> None:
        """What only reads needs no key."""
        assert keyed.client.get(path).status_code == 200

    @pytest.mark.parametrize(
        "path",
        [
            "/v2/models/attention/infer",
            "/v2/repository/index",
            "/v2/repository/models/attention/load",
            "/v2/repository/models/attention/unload",
        ],
    )
    def test_the_protocol_is_closed(self, keyed: ServerProcess, path: str) -> None:
        """Inference by the other protocol, and the repository, want a key, too."""
        check_refused(keyed.client.post(path), (401, "unauthorized"), "API key")

    def test_stay_out_of_the_log(self, keyed: ServerProcess) -> None:
        """Neither a known key nor a wrong one is ever logged."""
        for key in (KEY, "wrong-but-private"):
            logged(keyed, ask(keyed, **{"X-API-Key": key}).headers["x-request-id"])
        log = keyed.log_path.read_text()
        assert KEY not in log
        assert "wrong-but-private" not in log


class TestServerFaults:
    def test_engine_failure_keeps_its_reason(self, failing: ServerProcess) -> None:
        """What a runtime says stays in the log: it may name paths and devices."""
        body = ask(failing).json()
        assert body["error"] == "the engine failed on this request; the server's log has the reason"
        failures = [event for event in failing.events() if event["event"] == "engine failure"]
        (failure,) = (event for event in failures if event["request_id"] == body["request_id"])
        assert "illegal memory access" in failure["exception"]

    def test_internal_is_opaque(self, broken: ServerProcess) -> None:
        """A defect is answered with nothing but the request id under which the log has its traceback."""
        body = ask(broken).json()
        assert body["error"] == "internal error; the server's log has it under this request_id"
        (event,) = (
            event
            for event in broken.events()
            if event["event"] == "internal error" and event["request_id"] == body["request_id"]
        )
        assert "/secret/path" in event["exception"]

    def test_goes_on(self, failing: ServerProcess, broken: ServerProcess) -> None:
        """A request that fails takes neither its worker nor the server with it."""
        for server in (failing, broken):
            statuses = [server.client.post("/v1/attention", json=GOOD).status_code for _ in range(20)]
            assert statuses == [500] * 20
            assert server.client.get("/health/ready").status_code == 200


class TestLife:
    def test_loading(self, loading: ServerProcess, gate: Path) -> None:
        """While models load the server is alive and not ready; then it is both, and stays started."""
        needs_models = ("/health/ready", "/health/startup", "/v1/models", "/v1/models/attention")
        for path in ("/health/live", "/metrics", "/openapi.json"):
            assert loading.client.get(path).status_code == 200
        for path in needs_models:
            check_refused(loading.client.get(path), (503, "not_ready"), "models are still being loaded")
        gate.touch()
        loading.wait_ready()
        for path in needs_models:
            assert loading.client.get(path).status_code == 200
        assert ask(loading).status_code == 200

    def test_draining(self, draining: ServerProcess) -> None:
        """A server about to end says so to its load balancer, and answers all who still come."""
        check_refused(draining.client.get("/health/ready"), (503, "draining"), "send new requests elsewhere")
        for path in ("/health/live", "/health/startup", "/metrics", "/v1/models"):
            assert draining.client.get(path).status_code == 200
        assert ask(draining).status_code == 200


class TestHealth:
    def test_device_that_computes_no_more(self, tmp_path: Path, seeds_repository: Path) -> None:
        """After an error that stays, the server is neither live nor ready, and says so without naming a path."""
        with serving_fake(tmp_path / "log", "poisoned", "--models", str(seeds_repository)) as server:
            assert ask(server).status_code == 200
            assert server.client.get("/health/live").status_code == 200
            assert ask(server).status_code == 500
            for path in ("/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready"):
                check_refused(server.client.get(path), (503, "not_ready"), "its device computes no more")
            assert server.client.get("/health/startup").status_code == 200

    def test_call_that_does_not_return(self, tmp_path: Path, seeds_repository: Path) -> None:
        """A server whose call hangs beyond all time-outs is not ready until it returns; it stays live."""
        gate = tmp_path / "gate"
        flags = ("--models", str(seeds_repository), "--timeout-ms", "100", "--workers", "1")
        with serving_fake(tmp_path / "log", "hanging", *flags, GATE=str(gate)) as server:
            check_refused(ask(server), (504, "deadline_exceeded"))
            assert server.client.get("/health/ready").status_code == 200
            answered(server, "/health/ready", 503)
            check_refused(server.client.get("/health/ready"), (503, "not_ready"), "an engine call has not returned for")
            assert server.client.get("/health/live").status_code == 200
            gate.touch()
            answered(server, "/health/ready", 200)


class TestDeadline:
    def test_of_the_server(self, impatient: ServerProcess) -> None:
        """The server's own limit holds, and no request can ask for more."""
        for query in ("", "timeout_ms=60000"):
            check_refused(ask(impatient, query=query), (504, "deadline_exceeded"), "timeout_ms")

    def test_of_the_request(self, slow_with_queue: ServerProcess) -> None:
        """A request may ask for less time than the server gives, and is told when it is over, not later."""
        response = ask(slow_with_queue, query="timeout_ms=50")
        check_refused(response, (504, "deadline_exceeded"), "timeout_ms")
        assert 50 <= logged(slow_with_queue, response.json()["request_id"])["duration_ms"] < SLOW_S * 1000
        assert ask(slow_with_queue).status_code == 200
