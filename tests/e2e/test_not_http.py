"""What is not HTTP, or not quite, gets the error body too, and harms no one else."""

import json
import socket

import pytest

from tests.served import ServerProcess

NOT_HTTP = [
    pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", id="a TLS hello"),
    pytest.param(b"hello\r\n\r\n", id="words"),
    pytest.param(b"GET\r\n\r\n", id="half a request line"),
    pytest.param(b"GET / HTTP/9.9\r\n\r\n", id="a version from elsewhere"),
    pytest.param(b"GET / HTTP/1.1\r\nno colon\r\n\r\n", id="a header without a colon"),
    pytest.param(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", id="a negative length"),
    pytest.param(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", id="a chunk of no length"),
]


@pytest.mark.parametrize("sent", NOT_HTTP)
def test_is_refused_in_our_words(server: ServerProcess, sent: bytes) -> None:
    """The answer is 400 with error, code and request id, the connection is closed, and the next client is served."""
    host, port = server.url.removeprefix("http://").rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(sent)
        received = b""
        while chunk := connection.recv(65536):
            received += chunk
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert b"connection: close" in head
    refused = json.loads(body)
    assert set(refused) == {"error", "code", "request_id"}
    assert refused["code"] == "malformed_body"
    assert f"x-request-id: {refused['request_id']}".encode() in head
    assert server.client.get("/health/live").status_code == 200
