"""Clients that leave while they wait: their place is free at once, and hardly anything more is computed for them."""

import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import safetensors.numpy
from safetensors.numpy import save

from tests.e2e.test_body_limits import connected, logged
from tests.fakes import SLOW_S
from tests.served import ServerProcess, serving, serving_fake

WORKERS = 2
LARGE = save({"queries": np.random.default_rng(0).standard_normal((1, 12_000, 100), np.float32)})
SMALL = save({"queries": np.random.default_rng(1).standard_normal((1, 3, 100), np.float32)})
PATHS = {"natural": "/v1/attention", "OIP": "/v2/models/attention/infer"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, seeds_repository: Path) -> Iterator[ServerProcess]:
    """A server in one process, so that its metrics are those of the calls in question."""
    log = tmp_path_factory.mktemp("left") / "log"
    flags = ("--models", str(seeds_repository), "--workers", str(WORKERS), "--processes", "1")
    with serving(log, *flags) as process:
        yield process


@pytest.fixture
def slow(tmp_path: Path, seeds_repository: Path) -> Iterator[ServerProcess]:
    """A server that computes one request at a time, slowly."""
    with serving_fake(tmp_path / "log", "slow", "--models", str(seeds_repository), "--workers", "1") as process:
        yield process


def sent(server: ServerProcess, request_id: str, body: bytes, form: str = "natural") -> socket.socket:
    """A connection on which a request was sent."""
    lines = [f"POST {PATHS[form]} HTTP/1.1", "Host: localhost", f"X-Request-Id: {request_id}"]
    if form == "natural":
        lines.append("Content-Type: application/vnd.safetensors")
    else:
        header, body = oip(body)
        lines.append(f"Inference-Header-Content-Length: {header}")
    connection = connected(server)
    connection.sendall("\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body)
    return connection


def oip(body: bytes) -> tuple[int, bytes]:
    """The same request for the other protocol: the length of its header, and the body."""
    queries = safetensors.numpy.load(body)["queries"]
    tensor = {"name": "queries", "shape": list(queries.shape), "datatype": "FP32"}
    header = f'{{"inputs": [{str(tensor)[:-1]}, "parameters": {{"binary_data_size": {queries.nbytes}}}}}]}}'
    encoded = header.replace("'", '"').encode()
    return len(encoded), encoded + queries.tobytes()


def leave(connection: socket.socket, *, reset: bool) -> None:
    """Closes it, politely or not."""
    if reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("form", PATHS)
@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
def test_between_slices(server: ServerProcess, form: str, reset: bool) -> None:
    """Of a request in a hundred slices no more than those in hand are computed once its client has left."""
    before = server.metric("mha_engine_calls_total")
    connection = sent(server, f"between-{form}-{reset}", LARGE, form)
    server.wait_until_more("mha_engine_calls_total", before + 2)
    leave(connection, reset=reset)
    event = logged(server, f"between-{form}-{reset}")
    left_at = server.metric("mha_engine_calls_total")
    assert (event["status"], event["code"]) == (None, "client_disconnected")
    time.sleep(0.5)
    assert server.metric("mha_engine_calls_total") <= left_at + WORKERS
    assert server.metric("mha_engine_calls_total") < before + 60
    assert server.metric("mha_held_bytes") == 0
    assert server.metric("mha_queue_wait_seconds") == 0


def test_is_counted(server: ServerProcess) -> None:
    """A client that left is a request with status 499."""
    before = server.metric('mha_requests_total{code="client_disconnected"')
    calls = server.metric("mha_engine_calls_total")
    connection = sent(server, "counted", LARGE)
    server.wait_until_more("mha_engine_calls_total", calls)
    leave(connection, reset=False)
    logged(server, "counted")
    assert server.metric('mha_requests_total{code="client_disconnected"') == before + 1


def test_in_the_queue(slow: ServerProcess) -> None:
    """One that waits and leaves is never computed, so that who comes after it need not wait for it."""
    first = sent(slow, "first", SMALL)
    slow.wait_until_in_flight(1)
    for number in range(20):
        leave(sent(slow, f"gone-{number}", SMALL), reset=bool(number % 2))
    started = time.monotonic()
    answer = httpx.post(
        f"{slow.url}/v1/attention", content=SMALL, headers={"Content-Type": "application/vnd.safetensors"}
    )
    assert answer.status_code == 200
    assert time.monotonic() - started < 3 * SLOW_S
    first.close()
    assert slow.metric("mha_engine_calls_total") == 2


def test_the_next_on_a_connection_is_served(server: ServerProcess) -> None:
    """A connection that has carried many answers still notices when its client leaves."""
    with httpx.Client(base_url=server.url, headers={"Content-Type": "application/vnd.safetensors"}) as client:
        for _ in range(5):
            assert client.post("/v1/attention", content=SMALL).status_code == 200
    assert server.metric("mha_requests_in_flight") == 1  # the one that asks
