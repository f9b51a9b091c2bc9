"""How bodies arrive: in pieces, behind one another, asked for first. Each is read to its end and no further."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import safetensors.numpy

from tests.served import ServerProcess

SIZE = 100
LIMIT_S = 20


def request(num_queries: int, mark: float, *lines: str) -> tuple[bytes, bytes]:
    """Head and body of a request of one entry, all of whose numbers are the mark."""
    body = safetensors.numpy.save({"queries": np.full((1, num_queries, SIZE), mark, np.float32)})
    head = [
        "POST /v1/attention HTTP/1.1", "Host: x", "Content-Type: application/vnd.safetensors",
        f"Content-Length: {len(body)}", *lines, "", "",
    ]  # fmt: skip
    return "\r\n".join(head).encode(), body


@contextmanager
def connection(server: ServerProcess) -> Iterator[socket.socket]:
    """A plain connection."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=LIMIT_S) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield sock


def answers(sock: socket.socket, count: int) -> list[tuple[int, bytes]]:
    """Status and body of the next answers."""
    file = sock.makefile("rb")
    found = []
    for _ in range(count):
        status = int(file.readline().split()[1])
        headers = dict(line.lower().split(b": ", 1) for line in iter(lambda: file.readline().strip(), b""))
        found.append((status, file.read(int(headers.get(b"content-length", b"0")))))
    return found


def output_of(answer: tuple[int, bytes]) -> np.ndarray:
    """The output of an answer that has to be one."""
    status, body = answer
    assert status == 200, body
    return safetensors.numpy.load(body)["output"]


@pytest.fixture(scope="module")
def expected(lone_server: ServerProcess) -> np.ndarray:
    """What marks of 1 give: every query the same row, and twice the mark twice the row."""
    head, body = request(1, 1.0)
    with connection(lone_server) as sock:
        sock.sendall(head + body)
        return output_of(answers(sock, 1)[0])[0, 0]


def test_after_a_large_body_comes_the_next_request(lone_server: ServerProcess, expected: np.ndarray) -> None:
    """A connection goes on after a body of several pieces: large and small ones in turn, each with its own answer."""
    with connection(lone_server) as sock:
        for mark, num_queries in enumerate([3001, 1, 1009, 2, 2003], 1):
            head, body = request(num_queries, mark)
            sock.sendall(head + body)
            output = output_of(answers(sock, 1)[0])
            assert output.shape == (1, num_queries, SIZE)
            np.testing.assert_allclose(output[0, -1], mark * expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sizes", [(1, 2, 3), (2003, 1), (1, 2003), (1009, 2003, 1009)], ids=str)
def test_requests_sent_behind_one_another(
    lone_server: ServerProcess, expected: np.ndarray, sizes: tuple[int, ...]
) -> None:
    """Pipelined requests are answered in their order, whatever their sizes."""
    with connection(lone_server) as sock:
        sent = b"".join(b"".join(request(num_queries, mark)) for mark, num_queries in enumerate(sizes, 1))
        # The answers are read after all was sent, which fits the sockets' buffers.
        sock.sendall(sent)
        for mark, (num_queries, answer) in enumerate(zip(sizes, answers(sock, len(sizes)), strict=True), 1):
            output = output_of(answer)
            assert output.shape == (1, num_queries, SIZE)
            np.testing.assert_allclose(output[0, -1], mark * expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cut", [0, 1, 7, 4096, -1], ids=str)
def test_a_body_in_two_pieces(lone_server: ServerProcess, expected: np.ndarray, cut: int) -> None:
    """Wherever a body is cut, and also right behind its head, the rest is waited for."""
    head, body = request(53, 2.0)
    with connection(lone_server) as sock:
        sock.sendall(head + body[:cut])
        time.sleep(0.05)
        sock.sendall(body[cut:])
        np.testing.assert_allclose(output_of(answers(sock, 1)[0])[0, 0], 2 * expected, rtol=1e-4, atol=1e-5)


def test_a_body_byte_by_byte(lone_server: ServerProcess, expected: np.ndarray) -> None:
    """The smallest pieces make a body, too."""
    head, body = request(1, 3.0)
    with connection(lone_server) as sock:
        sock.sendall(head)
        for position in range(len(body)):
            sock.sendall(body[position : position + 1])
        np.testing.assert_allclose(output_of(answers(sock, 1)[0])[0, 0], 3 * expected, rtol=1e-4, atol=1e-5)


def test_a_body_that_is_asked_for(lone_server: ServerProcess, expected: np.ndarray) -> None:
    """Who expects 100 Continue is told to, and then answered."""
    head, body = request(1009, 1.0, "Expect: 100-continue")
    with connection(lone_server) as sock:
        sock.sendall(head)
        assert answers(sock, 1) == [(100, b"")]
        sock.sendall(body)
        np.testing.assert_allclose(output_of(answers(sock, 1)[0])[0, 7], expected, rtol=1e-4, atol=1e-5)


def test_refusal_of_a_large_body_keeps_the_connection(lone_server: ServerProcess) -> None:
    """A body that was read to its end and means nothing is refused, and the connection serves the next request."""
    head, body = request(1009, 1.0)
    with connection(lone_server) as sock:
        sock.sendall(head.replace(b"vnd.safetensors", b"json") + b"[" * len(body))
        status, refusal = answers(sock, 1)[0]
        assert (status, json.loads(refusal)["code"]) == (400, "malformed_body")
        sock.sendall(b"".join(request(2, 1.0)))
        assert output_of(answers(sock, 1)[0]).shape == (1, 2, SIZE)


def test_announced_memory_is_not_taken(lone_server: ServerProcess) -> None:
    """Clients that announce the longest body and send nothing cost next to no memory."""
    before = lone_server.memory_bytes()
    head = b"\r\n".join(
        [b"POST /v1/attention HTTP/1.1", b"Host: x", b"Content-Type: application/vnd.safetensors",
         b"Content-Length: 67108864", b"", b"12345678"]
    )  # fmt: skip
    sockets = []
    try:
        for _ in range(20):
            host, port = lone_server.url.removeprefix("http://").split(":")
            sockets.append(socket.create_connection((host, int(port)), timeout=LIMIT_S))
            sockets[-1].sendall(head)
        assert lone_server.client.get("/health/ready").status_code == 200
        assert lone_server.memory_bytes() - before < 20 * 2 * 1024 * 1024
    finally:
        for sock in sockets:
            sock.close()


def test_head_of_the_last_request(lone_server: ServerProcess) -> None:
    """An answer without a body arrives, also where the connection is closed behind it."""
    with connection(lone_server) as sock:
        sock.sendall(b"HEAD /health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        received = b"".join(iter(lambda: sock.recv(65536), b""))
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert body == b""
