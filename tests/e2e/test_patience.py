"""Clients that are slow, silent, talkative or too many: each limit on a connection, on a real socket."""

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.e2e.test_bad_input import check_refused
from tests.e2e.test_body_limits import connected, head, reply
from tests.served import ServerProcess, serving

MOST_CONNECTIONS = 8
HEAD_TIMEOUT_S = 1.0
MAX_HEAD_BYTES = 4096


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory, seeds_repository: Path) -> Iterator[ServerProcess]:
    """A server with little patience, in one process."""
    flags = (
        "--models", str(seeds_repository), "--processes", "1", "--max-connections", str(MOST_CONNECTIONS),
        "--head-timeout-s", str(HEAD_TIMEOUT_S), "--max-head-bytes", str(MAX_HEAD_BYTES), "--keep-alive-s", "1",
        "--min-body-rate", "1000",
    )  # fmt: skip
    with serving(tmp_path_factory.mktemp("strict") / "log", *flags) as server:
        yield server


@pytest.fixture(autouse=True)
def _goes_on(strict: ServerProcess) -> Iterator[None]:
    """Whatever a client does, the next one is answered."""
    yield
    deadline = time.monotonic() + 5
    while httpx.get(strict.url + "/health/ready").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def ended(connection: socket.socket, within_s: float) -> float:
    """After how many seconds the server has closed a connection on which it says nothing."""
    started = time.monotonic()
    connection.settimeout(within_s)
    assert connection.recv(1) == b""
    return time.monotonic() - started


class TestHead:
    def test_silence_is_ended(self, strict: ServerProcess) -> None:
        """A connection on which nothing is asked is closed without a word."""
        with connected(strict) as connection:
            assert HEAD_TIMEOUT_S / 2 < ended(connection, 10 * HEAD_TIMEOUT_S) < 5 * HEAD_TIMEOUT_S

    @pytest.mark.parametrize("later", [False, True], ids=["first_request", "later_request"])
    def test_byte_by_byte_is_refused(self, strict: ServerProcess, later: bool) -> None:
        """A head that trickles in is refused once its time is over, on a fresh connection or a used one."""
        with connected(strict) as connection:
            if later:
                connection.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert b"200 OK" in connection.recv(65536)
            started = time.monotonic()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(0.1)
            answer = b""
            for byte in b"GET /health/live HTTP/1.1\r\nX-Slow: " + b"a" * 100:
                connection.send(bytes([byte]))
                try:
                    answer = connection.recv(65536)
                    break
                except TimeoutError:
                    continue
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert b'"code":"too_slow"' in answer
            assert HEAD_TIMEOUT_S / 2 < time.monotonic() - started < 5 * HEAD_TIMEOUT_S

    @pytest.mark.parametrize("size", [MAX_HEAD_BYTES + 1, 200_000, 3_000_000])
    def test_too_long_is_refused(self, strict: ServerProcess, size: int) -> None:
        """One long header is refused, whether it comes in one piece or never ends; the limit is in the message."""
        with connected(strict) as connection:
            try:
                connection.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"a" * size)
                connection.sendall(b"\r\n\r\n")
            except (BrokenPipeError, ConnectionResetError):
                pass  # the answer came before all of it was sent
            connection.settimeout(10)
            try:
                answer = connection.recv(65536)
            except ConnectionResetError:  # closed with bytes unread: then the answer may be lost on its way
                assert size > 65536
                return
            assert answer.startswith(b"HTTP/1.1 400 ")
            assert f"longer than {MAX_HEAD_BYTES} bytes (max_head_bytes)".encode() in answer

    def test_just_short_enough_is_answered(self, strict: ServerProcess) -> None:
        """A head of almost the limit is a head like any other."""
        answer = strict.client.get("/health/live", headers={"X-Long": "a" * (MAX_HEAD_BYTES - 300)})
        assert answer.status_code == 200

    def test_idle_connection_is_closed(self, strict: ServerProcess) -> None:
        """After an answer a connection is kept for a while, and not longer."""
        with connected(strict) as connection:
            connection.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"200 OK" in connection.recv(65536)
            assert 0.5 < ended(connection, 10) < 5


class TestBody:
    @pytest.mark.parametrize("framing", ["Content-Length: 500000", "Transfer-Encoding: chunked"])
    def test_that_trickles_is_refused(self, strict: ServerProcess, framing: str) -> None:
        """A body slower than the least rate is refused after a few seconds, with the rate and the least one."""
        with connected(strict) as connection:
            connection.sendall(head(framing))
            connection.settimeout(0.2)
            for _ in range(60):
                connection.send(b"1\r\na\r\n")
                try:
                    data = connection.recv(65536)
                    break
                except TimeoutError:
                    continue
            else:
                pytest.fail("it was never refused")
            assert data.startswith(b"HTTP/1.1 408 ")
            assert b"bytes a second, the least is 1000 (min_body_rate)" in data
            assert b"\r\nconnection: close\r\n" in data.lower()

    def test_that_stops_is_refused(self, strict: ServerProcess) -> None:
        """So is one that stops in the middle."""
        with connected(strict) as connection:
            connection.sendall(head("Content-Length: 500000") + bytes(300_000))
            connection.settimeout(20)
            check_refused(reply(connection), (408, "too_slow"), "min_body_rate")


class TestConnections:
    def test_beyond_the_limit_are_refused(self, strict: ServerProcess) -> None:
        """The next one is told so by its head alone; health is answered all the same, as are those that came before."""
        with ExitStack() as stack:
            held = [stack.enter_context(connected(strict)) for _ in range(MOST_CONNECTIONS)]
            for connection in held:
                connection.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert b"200 OK" in connection.recv(65536)
            with connected(strict) as one_more:
                one_more.settimeout(10)
                one_more.sendall(head("Content-Length: 1000000") + bytes(500_000))
                answer = one_more.recv(65536)
                assert answer.startswith(b"HTTP/1.1 429 ")
                assert f"{MOST_CONNECTIONS} connections are open, the limit (max_connections)".encode() in answer
                assert b"\r\nretry-after: 1\r\n" in answer.lower()
            with connected(strict) as monitor:
                monitor.sendall(b"GET /health/ready HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert b"200 OK" in monitor.recv(65536)
            held[0].sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"200 OK" in held[0].recv(65536)

    def test_many_slow_ones_do_not_keep_others_away(self, strict: ServerProcess) -> None:
        """Connections that never ask make room by themselves."""
        with ExitStack() as stack:
            silent = [stack.enter_context(connected(strict)) for _ in range(MOST_CONNECTIONS)]
            for connection in silent:
                ended(connection, 10 * HEAD_TIMEOUT_S)
            assert httpx.get(strict.url + "/health/ready").status_code == 200
