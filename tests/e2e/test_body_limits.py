"""Bodies beyond the limit, that lie about their length, that never end, or that cost more memory than they should."""

import http.client
import socket
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest

from model.attention import MultiHeadAttention
from tests.conftest import weights_of
from tests.e2e.test_bad_input import (
    MALFORMED,
    SHAPE,
    SIZE,
    TOO_LARGE,
    archive,
    check_refused,
    directory,
    entry,
    file_of,
    npy_of,
    of_queries,
    post,
)
from tests.e2e.test_natural_endpoint import JSON, NPZ, READ, SAFETENSORS, WRITE, Tensors, ask, close
from tests.oracle import multi_head_attention
from tests.served import ServerProcess, serving

LIMIT = 1_000_000
QUERY = "model=attention"
_RNG = np.random.default_rng(0)
SMALL: Tensors = {"queries": _RNG.standard_normal((1, 3, 100), np.float32)}
# Almost the limit: a number takes 4 bytes in binary and about 20 in JSON, where it is written as a double.
LARGE: dict[str, Tensors] = {
    JSON: {"queries": _RNG.standard_normal((17, 27, 100), np.float32)},
    SAFETENSORS: {"queries": _RNG.standard_normal((83, 30, 100), np.float32)},
    NPZ: {"queries": _RNG.standard_normal((83, 30, 100), np.float32)},
}


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory, seeds_repository: Path) -> Iterator[ServerProcess]:
    """A real server that takes bodies of up to a million bytes."""
    log = tmp_path_factory.mktemp("limited") / "log"
    with serving(log, "--models", str(seeds_repository), "--max-body-bytes", str(LIMIT)) as server:
        yield server


@pytest.fixture(scope="module")
def expected(seeds_layer: MultiHeadAttention) -> np.ndarray:
    """The oracle's output for the small tensors."""
    queries = SMALL["queries"]
    output, _ = multi_head_attention(weights_of(seeds_layer), seeds_layer.num_heads, queries, queries, queries)
    return output


@pytest.fixture
def client(limited: ServerProcess, expected: np.ndarray) -> Iterator[httpx.Client]:
    """A client of that server. Whatever a test sends, the next good request must be answered, and right."""
    yield limited.client
    assert close(ask(limited.client, SMALL)["output"], expected)


def fitted(codec: str, size_bytes: int) -> bytes:
    """The large tensors in a body of exactly this size, filled up as the format allows."""
    body = WRITE[codec](LARGE[codec])
    rest = size_bytes - len(body)
    if codec == JSON:
        return body + b" " * rest
    if codec == NPZ:
        return bytes(rest) + body
    (header_bytes,) = struct.unpack_from("<Q", body)
    end = 8 + header_bytes
    return struct.pack("<Q", header_bytes + rest) + body[8:end] + b" " * rest + body[end:]


def in_chunks(body: bytes) -> Iterator[bytes]:
    """The body in pieces, which the client then sends without a Content-Length."""
    for start in range(0, len(body), 65_537):
        yield body[start : start + 65_537]


@pytest.mark.parametrize("codec", [JSON, SAFETENSORS, NPZ])
@pytest.mark.parametrize("chunked", [False, True], ids=["announced", "chunked"])
class TestLimit:
    def test_at_the_limit(self, client: httpx.Client, codec: str, chunked: bool) -> None:
        """A body of exactly the limit is read and answered, with or without a Content-Length."""
        body = fitted(codec, LIMIT)
        response = post(client, in_chunks(body) if chunked else body, codec, QUERY)
        assert response.status_code == 200, response.text
        output = READ[codec](response.content)["output"]
        np.testing.assert_array_equal(output, ask(client, LARGE[codec], codec)["output"])

    def test_beyond_the_limit(self, client: httpx.Client, codec: str, chunked: bool) -> None:
        """A body of one byte more is refused, with the limit."""
        body = fitted(codec, LIMIT + 1)
        response = post(client, in_chunks(body) if chunked else body, codec, QUERY)
        what = f"more than {LIMIT} bytes came" if chunked else f"{LIMIT + 1} bytes are announced"
        check_refused(response, TOO_LARGE, f"body: {what}, the limit is {LIMIT}")


# Over a bare socket: what no client library would send.


def connected(server: ServerProcess) -> socket.socket:
    """A new connection."""
    address = urlsplit(server.url)
    return socket.create_connection((address.hostname, address.port), timeout=10)


def head(*lines: str) -> bytes:
    """The head of a request that sends a safetensors body."""
    first = (f"POST /v1/attention?{QUERY} HTTP/1.1", "Host: x", f"Content-Type: {SAFETENSORS}")
    return "\r\n".join((*first, *lines, "", "")).encode()


def reply(connection: socket.socket) -> httpx.Response:
    """The next response."""
    raw = http.client.HTTPResponse(connection)
    raw.begin()
    return httpx.Response(raw.status, headers=raw.getheaders(), content=raw.read())


@pytest.mark.parametrize("length", [LIMIT + 1, 10**12, 10**18 - 1])
def test_refused_before_it_is_sent(client: httpx.Client, limited: ServerProcess, length: int) -> None:
    """A body that announces too much is refused by its head alone."""
    with connected(limited) as connection:
        connection.sendall(head(f"Content-Length: {length}"))
        check_refused(reply(connection), TOO_LARGE, f"{length} bytes are announced, the limit is {LIMIT}")


def test_never_asked_to_continue(client: httpx.Client, limited: ServerProcess) -> None:
    """A client that waits for 100 Continue is told 413 instead, and need not send a byte."""
    with connected(limited) as connection:
        connection.sendall(head(f"Content-Length: {LIMIT + 1}", "Expect: 100-continue"))
        assert connection.recv(12) == b"HTTP/1.1 413"


def test_a_body_without_end(client: httpx.Client, limited: ServerProcess) -> None:
    """A stream of chunks is refused once it passes the limit, while its client goes on."""
    with connected(limited) as connection:
        connection.sendall(head("Transfer-Encoding: chunked"))
        for _ in range(17):
            connection.sendall(b"10000\r\n" + bytes(0x10000) + b"\r\n")
        check_refused(reply(connection), TOO_LARGE, f"more than {LIMIT} bytes came")


@pytest.mark.parametrize(
    "lines",
    [
        *(
            pytest.param([f"Content-Length: {text}"], id=f"length {text!r}")
            for text in ("-1", "+5", "abc", "1e3", "0x10", "5, 6", "5 6", str(2**64), "9" * 99)
        ),
        # uint64, so the HTTP parser takes them.
        pytest.param([f"Content-Length: {2**63}"], id="length 2**63"),
        pytest.param([f"Content-Length: {2**64 - 1}"], id="length 2**64 - 1"),
        pytest.param(["Content-Length: 5", "Content-Length: 6"], id="two lengths"),
        pytest.param(["Content-Length: 5", "Transfer-Encoding: chunked"], id="a length and chunks"),
        pytest.param(["Transfer-Encoding: gzip"], id="an unknown transfer encoding"),
        pytest.param(["Transfer-Encoding: chunked", "", "XYZ\r\n"], id="a chunk of no size"),
        pytest.param(["Transfer-Encoding: chunked", "", f"{'f' * 17}\r\n"], id="a chunk of 2**68 bytes"),
    ],
)
def test_nonsense_about_the_length(client: httpx.Client, limited: ServerProcess, lines: list[str]) -> None:
    """A length that is none, two, or beyond all bounds is refused, whether the HTTP parser or the service finds it."""
    with connected(limited) as connection:
        connection.sendall(head(*lines))
        assert reply(connection).status_code in {400, 413}


def test_more_than_announced(client: httpx.Client, limited: ServerProcess) -> None:
    """Bytes beyond the announced length end the connection: they can be no request of their own."""
    body = WRITE[SAFETENSORS](SMALL)
    with connected(limited) as connection:
        connection.sendall(head(f"Content-Length: {len(body) - 4}") + body)
        assert reply(connection).status_code == 400
        assert connection.recv(1) == b""


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize("framing", ["Content-Length: 500000", "Transfer-Encoding: chunked"])
def test_client_vanishes(client: httpx.Client, limited: ServerProcess, framing: str, reset: bool) -> None:
    """A client that leaves in the middle of its body is noted in the log, and nothing else happens."""
    request_id = f"{framing[:7]}-{reset}"
    with connected(limited) as connection:
        connection.sendall(head(framing, f"X-Request-Id: {request_id}") + b"40000\r\n" + bytes(200_000))
        if reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    event = logged(limited, request_id)
    assert (event["status"], event["code"], event["level"]) == (None, "client_disconnected", "info")


def logged(server: ServerProcess, request_id: str) -> dict[str, Any]:
    """The log line of that request, once it is there."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for event in server.events():
            if event["event"] == "request" and event["request_id"] == request_id:
                return event
        time.sleep(0.01)
    raise AssertionError(f"no log line of request {request_id}")


# What a body costs.

METHOD = 10  # in a zip directory's entry, as SIZE is


def bomb(stated_bytes: int) -> bytes:
    """An archive of almost the limit that inflates to 900 MiB of zeros, whatever its directory states."""
    squeeze = zlib.compressobj(9, wbits=-15)
    block = squeeze.compress(bytes(2**20)) + squeeze.flush(zlib.Z_FULL_FLUSH)  # so that it can be repeated
    packed = directory(of_queries(block * 900), METHOD, b"\x08\0")
    return directory(packed, SIZE, struct.pack("<I", stated_bytes))


HONEST_BOMB, LYING_BOMB = bomb(900 * 2**20), bomb(LIMIT // 2)


def test_npz_bomb(client: httpx.Client) -> None:
    """An archive that says that it inflates beyond the limit is refused by its directory, with both sizes."""
    words = (f"inflates to {900 * 2**20} bytes", f"the limit is {LIMIT}")
    check_refused(post(client, HONEST_BOMB, NPZ, QUERY), TOO_LARGE, *words)


def test_lying_npz_bomb(client: httpx.Client) -> None:
    """An archive that inflates beyond what it says is read as far as it says, and found out."""
    check_refused(post(client, LYING_BOMB, NPZ, QUERY), MALFORMED, "CRC", "queries")


def test_more_entries_than_simdjson_counts(server: ServerProcess) -> None:
    """A list longer than the 16,777,215 that a tape can state is refused.

    pysimdjson would write a Python list of it past the end of its memory, and end the process.
    """
    body = b'{"queries": [[[1]]], "valid_lens": [' + b"1," * 16_777_299 + b"1]}"
    check_refused(post(server.client, body, JSON, QUERY), SHAPE, "valid_lens: 16777300 numbers")
    ask(server.client, SMALL)


def filled(before: bytes, unit: bytes, after: bytes) -> bytes:
    """A body of the limit, or a unit less."""
    return before + unit * ((LIMIT - len(before) - len(after)) // len(unit)) + after


# How much one request may hold beyond what the server held before, in limits.
#
# JSON, for a byte of `1,1,1,`: the body 1; simdjson's copy 1, its tape 8 (two words a number) and its index 4 (a word a
# token); doubles 4, and float32 from them 2. Nothing else may depend on the body: a Python object for each list or
# number takes 28 to 80 bytes. Measured: 19 at most.
JSON_LIMITS = 1 + 1 + 8 + 4 + 4 + 2
# Binary: the body 1, what it inflates to 1, the copies of the zip reader 2, and float32 from float16 2. Measured: 5.
BINARY_LIMITS = 1 + 1 + 2 + 2
HEAP_LIMITS = 2  # what allocators round up to and keep

HOSTILE = {
    "safetensors of a giant shape": (SAFETENSORS, file_of({"queries": entry(shape=[2**31] * 3)}, bytes(LIMIT - 200))),
    "safetensors of a giant header": (SAFETENSORS, struct.pack("<Q", LIMIT - 8) + filled(b"", b"[", b"")[8:]),
    "safetensors of a thousand names": (
        SAFETENSORS,
        file_of({f"{n}": entry(shape=[0], data_offsets=[0, 0]) for n in range(1000)}, bytes(LIMIT - 2**16)),
    ),
    "safetensors of float16": (SAFETENSORS, WRITE[SAFETENSORS]({"queries": np.zeros((1, 1, 499_900), np.float16)})),
    "npz bomb": (NPZ, HONEST_BOMB),
    "npz bomb that lies": (NPZ, LYING_BOMB),
    "npz of a giant shape": (NPZ, of_queries(npy_of(shape="(1000000000, 1000000000, 100)", data=bytes(LIMIT - 400)))),
    "npz of many entries": (NPZ, archive(*((f"{number}", b"") for number in range(LIMIT // 110)))),
    "npz of float16": (NPZ, WRITE[NPZ]({"queries": np.zeros((1, 1, 499_800), np.float16)})),
    "JSON 1,1,1": (JSON, filled(b'{"queries": [[[', b"1,", b"1]]]}")),
    "JSON 1,1,1 lengths": (JSON, filled(b'{"valid_lens": [', b"1,", b"1]}")),
    "JSON 1,1,1 lengths and true": (JSON, filled(b'{"valid_lens": [', b"1,", b"true]}")),
    "JSON 1,1,1 and a list": (JSON, filled(b'{"queries": [[[', b"1,", b"[1]]]]}")),
    "JSON [],[],[]": (JSON, filled(b'{"queries": [', b"[],", b"[]]}")),
    "JSON [],[],[] lengths": (JSON, filled(b'{"valid_lens": [', b"[],", b"[]]}")),
    "JSON [[1]],[[1]],[[1]]": (JSON, filled(b'{"queries": [', b"[[1]],", b"[[1]]]}")),
    "JSON [[[[": (JSON, filled(b'{"queries": ', b"[", b"")),
    "JSON nested 900 deep": (JSON, filled(b'{"queries": [', b"[" * 900 + b"]" * 900 + b",", b"1]}")),
    "JSON of one name": (JSON, filled(b'{"', b"k", b'": 1}')),
    "JSON of one name again and again": (JSON, filled(b"{", b'"keys":1,', b'"keys":1}')),
    "JSON of one string": (JSON, filled(b'{"queries": "', b"1", b'"}')),
}


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory, seeds_repository: Path) -> Iterator[tuple[ServerProcess, int]]:
    """A server of its own that has answered good requests of the limit's size, and its peak then, in bytes."""
    log = tmp_path_factory.mktemp("warm") / "log"
    flags = ("--models", str(seeds_repository), "--max-body-bytes", str(LIMIT))
    # One heap for all threads: glibc gives each its own, and what these keep depends on who happened to decode.
    with serving(log, *flags, MALLOC_ARENA_MAX="1") as server:
        for _ in range(10):
            for codec, tensors in LARGE.items():
                ask(server.client, tensors, codec)
        yield server, server.peak_memory_bytes()


def peak_bytes(server: ServerProcess, codec: str, body: bytes) -> int:
    """The most memory the server held during this refused request."""
    with suppress(OSError):  # where a kernel cannot, the peak is that of all requests so far, which is no less strict
        Path(f"/proc/{server.process.pid}/clear_refs").write_text("5")  # proc(5): resets VmHWM
    assert post(server.client, body, codec, QUERY).status_code in {400, 413, 422}
    return server.peak_memory_bytes()


@pytest.mark.parametrize(("codec", "body"), HOSTILE.values(), ids=HOSTILE)
def test_memory(warm: tuple[ServerProcess, int], codec: str, body: bytes) -> None:
    """However hostile a body, and however often it comes, it costs no more than a fixed multiple of the limit."""
    server, warm_bytes = warm
    assert LIMIT * 0.65 < len(body) <= LIMIT
    held_bytes = max(server.memory_bytes(), warm_bytes)
    # The median, because on a busy machine a thread may still hold one body while the next is read.
    peak = median(peak_bytes(server, codec, body) for _ in range(21))
    assert peak - held_bytes <= LIMIT * ((JSON_LIMITS if codec == JSON else BINARY_LIMITS) + HEAP_LIMITS)
    # Nothing adds up: a heap grown by many small objects (binary) may be of no use for few large ones (JSON), no more.
    assert peak - warm_bytes <= LIMIT * (JSON_LIMITS + BINARY_LIMITS + HEAP_LIMITS)
