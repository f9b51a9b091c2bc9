"""Requests that are refused before their bodies have come: what becomes of the rest, and of the connection."""

import hashlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from tests.e2e.test_bad_input import check_refused
from tests.e2e.test_body_limits import connected, head, reply
from tests.served import ServerProcess, serving

KEY = "a key of the tests"
KEYED = f"X-API-Key: {KEY}"
GOOD = save({"queries": np.ones((1, 2, 100), np.float32)})
UNAUTHORIZED = (401, "unauthorized")


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory, seeds_repository: Path) -> Iterator[ServerProcess]:
    """A server that refuses by the head alone who has no key."""
    folder = tmp_path_factory.mktemp("keyed")
    keys = folder / "keys"
    keys.write_text(f"tests:{hashlib.sha256(KEY.encode()).hexdigest()}\n")
    flags = ("--models", str(seeds_repository), "--processes", "1", "--min-body-rate", "1000", "--keep-alive-s", "1")
    with serving(folder / "log", *flags, MHA_API_KEYS_FILE=str(keys)) as server:
        yield server


def is_answered(connection: socket.socket) -> bool:
    """Whether a good request on this connection gets its answer."""
    connection.sendall(head(f"Content-Length: {len(GOOD)}", KEYED) + GOOD)
    return reply(connection).status_code == 200


def ends_though_bytes_trickle(connection: socket.socket) -> bool:
    """Whether the server ends a connection on which a byte comes now and then."""
    connection.settimeout(0.2)
    for _ in range(60):
        try:
            connection.send(b"a")
            return connection.recv(1) == b""
        except TimeoutError:
            continue
        except ConnectionError:
            return True
    return False


class TestRest:
    @pytest.mark.parametrize("rest", [1, 65_535, 65_536, 65_537, 3_000_000])
    @pytest.mark.parametrize("arrived", [0, 1, 70_000])
    def test_connection_is_good_for_the_next_request(self, keyed: ServerProcess, arrived: int, rest: int) -> None:
        """The answer comes at once; when the rest has come, to the byte, the next request is answered."""
        with connected(keyed) as connection:
            connection.sendall(head(f"Content-Length: {arrived + rest}") + bytes(arrived))
            check_refused(reply(connection), UNAUTHORIZED)
            connection.sendall(bytes(rest))
            assert is_answered(connection)

    def test_next_request_may_come_with_the_rest(self, keyed: ServerProcess) -> None:
        """What follows the body in the same packet is not lost."""
        with connected(keyed) as connection:
            connection.sendall(head("Content-Length: 200"))
            check_refused(reply(connection), UNAUTHORIZED)
            connection.sendall(bytes(200) + head(f"Content-Length: {len(GOOD)}", KEYED) + GOOD)
            assert reply(connection).status_code == 200

    def test_time_for_the_rest_is_not_idle_time(self, keyed: ServerProcess) -> None:
        """A rest that takes longer than a connection may be idle is waited for, and the connection used on."""
        with connected(keyed) as connection:
            connection.sendall(head("Content-Length: 30000"))
            check_refused(reply(connection), UNAUTHORIZED)
            for _ in range(3):
                time.sleep(0.6)
                connection.sendall(bytes(10_000))
            assert is_answered(connection)

    def test_slow_rest_is_not_waited_for(self, keyed: ServerProcess) -> None:
        """One that comes more slowly than bodies may ends the connection."""
        with connected(keyed) as connection:
            connection.sendall(head("Content-Length: 500000"))
            check_refused(reply(connection), UNAUTHORIZED)
            assert ends_though_bytes_trickle(connection)

    def test_client_that_goes_instead_of_sending_it(self, keyed: ServerProcess) -> None:
        """Nobody waits for a rest whose client has left."""
        with connected(keyed) as connection:
            connection.sendall(head("Content-Length: 500000") + bytes(1000))
            check_refused(reply(connection), UNAUTHORIZED)
        with connected(keyed) as connection:
            assert is_answered(connection)


class TestEnd:
    @pytest.mark.parametrize("line", ["Connection: close", "Expect: 100-continue"])
    def test_connection_ends_where_the_rest_is_in_doubt(self, keyed: ServerProcess, line: str) -> None:
        """Who closes anyhow, or waits to be told to go on, gets the answer and then the end."""
        with connected(keyed) as connection:
            connection.sendall(head("Content-Length: 500000", line))
            answer = reply(connection)
            check_refused(answer, UNAUTHORIZED)
            assert answer.headers["connection"] == "close"
            assert connection.recv(1) == b""
