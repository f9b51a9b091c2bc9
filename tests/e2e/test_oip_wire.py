"""The protocol on the wire, for what tritonclient does not do: other clients' habits, bombs, compression."""

import gzip
import json
import signal
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.served import ServerProcess, serving

INFER = "/v2/models/attention/infer"
REQUEST = {
    "id": "7",
    "inputs": [
        {"name": "queries", "datatype": "FP32", "shape": [1, 2, 100], "data": [0.5] * 200},
        {"name": "valid_lens", "datatype": "UINT8", "shape": [1], "data": [1]},
    ],
}
BODY = json.dumps(REQUEST).encode()


def answer(server: ServerProcess) -> np.ndarray:
    """The answer to `REQUEST`."""
    return np.array(server.client.post(INFER, content=BODY).json()["outputs"][0]["data"])


class TestOtherClients:
    def test_cplusplus_habits(self, server: ServerProcess) -> None:
        """A stated header length on pure JSON, an Expect header and no Content-Type are all taken."""
        headers = {"Inference-Header-Content-Length": str(len(BODY)), "Expect": ""}
        request = server.client.build_request("POST", INFER, content=BODY, headers=headers)
        assert "content-type" not in request.headers
        response = server.client.send(request)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "application/json"
        assert "inference-header-content-length" not in response.headers
        answered = response.json()
        assert list(answered["outputs"][0]) == ["name", "datatype", "shape", "data"]
        assert (answered["id"], answered["model_name"], answered["model_version"]) == ("7", "attention", "1")

    @pytest.mark.parametrize("content_type", ["application/json", "application/octet-stream", "text/plain"])
    def test_content_type_is_not_asked_for(self, server: ServerProcess, content_type: str) -> None:
        """Whatever a client calls the body, it is read as the protocol says."""
        assert server.client.post(INFER, content=BODY, headers={"Content-Type": content_type}).status_code == 200

    def test_by_version(self, server: ServerProcess) -> None:
        """The routes with a version answer as those without; a version that is not there is 404."""
        assert server.client.post("/v2/models/attention/versions/1/infer", content=BODY).status_code == 200
        response = server.client.post("/v2/models/attention/versions/2/infer", content=BODY)
        assert (response.status_code, response.json()["code"]) == (404, "model_not_found")

    def test_null_fields(self, server: ServerProcess) -> None:
        """Fields that a client fills with null are as if they were absent."""
        inputs = [{**entry, "parameters": None} for entry in REQUEST["inputs"]]  # type: ignore[arg-type]
        body = {"id": None, "parameters": None, "outputs": None, "inputs": inputs}
        response = server.client.post(INFER, json=body)
        assert response.status_code == 200, response.text
        assert "id" not in response.json()

    def test_raw_binary_request(self, server: ServerProcess) -> None:
        """A raw binary request is told that the model has several inputs."""
        headers = {"Inference-Header-Content-Length": "0"}
        response = server.client.post(INFER, content=bytes(400), headers=headers)
        assert response.status_code == 400
        assert "only models with one input take" in response.json()["error"]

    @pytest.mark.parametrize("stated", ["-1", "1e3", "", "9" * 30], ids=["negative", "float", "empty", "giant"])
    def test_header_length_is_no_number(self, server: ServerProcess, stated: str) -> None:
        """A header length that is no number is refused."""
        headers = {"Inference-Header-Content-Length": stated}
        response = server.client.post(INFER, content=BODY, headers=headers)
        assert (response.status_code, response.json()["code"]) == (400, "malformed_body")


class TestCompressedRequests:
    @pytest.mark.parametrize(
        ("encoding", "compress"),
        [pytest.param("gzip", gzip.compress, id="gzip"), pytest.param("deflate", zlib.compress, id="deflate")],
    )
    def test_header_length_counts_what_is_inflated(
        self, server: ServerProcess, encoding: str, compress: Callable[[bytes], bytes]
    ) -> None:
        """The header length is that of the JSON before compression."""
        values = np.full((1, 2, 100), 0.5, np.float32)
        entry = {"name": "queries", "datatype": "FP32", "shape": [1, 2, 100]}
        header = json.dumps({"inputs": [{**entry, "parameters": {"binary_data_size": 800}}, REQUEST["inputs"][1]]})
        headers = {"Content-Encoding": encoding, "Inference-Header-Content-Length": str(len(header))}
        body = compress(header.encode() + values.tobytes())
        response = server.client.post(INFER, content=body, headers=headers)
        assert response.status_code == 200, response.text
        np.testing.assert_array_equal(response.json()["outputs"][0]["data"], answer(server))

    @pytest.mark.parametrize(
        ("encoding", "body", "says"),
        [
            pytest.param("gzip", BODY, "not gzip", id="not compressed"),
            pytest.param("deflate", gzip.compress(BODY), "not deflate", id="another compression"),
            pytest.param("gzip", gzip.compress(BODY)[:-9], "cut short", id="cut short"),
            pytest.param("gzip", gzip.compress(BODY) + b"more", "more stands behind", id="trailing bytes"),
            pytest.param("gzip", b"", "cut short", id="empty"),
        ],
    )
    def test_broken(self, server: ServerProcess, encoding: str, body: bytes, says: str) -> None:
        """A body that is not what its encoding says is malformed."""
        response = server.client.post(INFER, content=body, headers={"Content-Encoding": encoding})
        assert (response.status_code, response.json()["code"]) == (400, "malformed_body")
        assert says in response.json()["error"]

    @pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, deflate"])
    def test_unknown_encoding(self, server: ServerProcess, encoding: str) -> None:
        """An encoding that is not offered names those that are."""
        response = server.client.post(INFER, content=BODY, headers={"Content-Encoding": encoding})
        assert (response.status_code, response.json()["code"]) == (415, "unsupported_media_type")
        assert "want gzip or deflate" in response.json()["error"]


class TestBombs:
    LIMIT = 1_000_000

    @pytest.fixture
    def small(self, tmp_path: Path, seeds_repository: Path) -> Iterator[ServerProcess]:
        """A server that takes a megabyte."""
        flags = ("--models", str(seeds_repository), "--max-body-bytes", str(self.LIMIT))
        with serving(tmp_path / "log", *flags) as server:
            yield server

    @pytest.mark.parametrize("encoding", ["gzip", "deflate"])
    def test_costs_no_more_than_the_limit(self, small: ServerProcess, encoding: str) -> None:
        """A body of 0.4 MB that inflates to 400 MB is refused, and memory does not grow beyond the limit."""
        deflater = zlib.compressobj(9, wbits=31 if encoding == "gzip" else 15)
        bomb = b"".join(deflater.compress(bytes(1_000_000)) for _ in range(400)) + deflater.flush()
        assert len(bomb) < self.LIMIT
        small.client.post(INFER, content=gzip.compress(bytes(900_000)), headers={"Content-Encoding": "gzip"})
        before = small.peak_memory_bytes()
        for _ in range(20):
            response = small.client.post(INFER, content=bomb, headers={"Content-Encoding": encoding})
            assert (response.status_code, response.json()["code"]) == (413, "body_too_large")
        # The body itself and what inflates from it, each at most the limit, and as much again for the allocator.
        assert small.peak_memory_bytes() - before <= 4 * self.LIMIT
        assert small.client.post(INFER, content=BODY).status_code == 200

    def test_inflated_size_counts(self, small: ServerProcess) -> None:
        """A body is measured by what inflates from it: at the limit it is read, one byte beyond it is not."""
        for length, status in ((self.LIMIT, 400), (self.LIMIT + 1, 413)):
            body = gzip.compress(b" " * length)
            assert small.client.post(INFER, content=body, headers={"Content-Encoding": "gzip"}).status_code == status


class TestCompressedAnswers:
    @pytest.mark.parametrize(
        ("accept", "encoding"),
        [
            pytest.param("gzip", "gzip", id="asked for gzip"),
            pytest.param("deflate", "deflate", id="asked for deflate"),
            pytest.param("gzip;q=1.0, identity", "gzip", id="gzip or nothing"),
            pytest.param("", None, id="nothing asked for"),
            pytest.param("gzip, deflate", None, id="what Python's HTTP libraries send unasked"),
            pytest.param("gzip, deflate, br, zstd", None, id="what a browser sends unasked"),
            pytest.param("br", None, id="an encoding that is not offered"),
            pytest.param("*", None, id="anything"),
        ],
    )
    def test_only_when_one_is_named(self, server: ServerProcess, accept: str, encoding: str | None) -> None:
        """An answer is compressed only for who names one encoding."""
        response = server.client.post(INFER, content=BODY, headers={"Accept-Encoding": accept})
        assert response.headers.get("content-encoding") == encoding
        np.testing.assert_array_equal(response.json()["outputs"][0]["data"], answer(server))

    @pytest.mark.parametrize(
        "path", ["/v2", "/v2/models/attention", "/v2/health/ready", "/v2/models/stats", "/v1/models"]
    )
    def test_nothing_else_is(self, server: ServerProcess, path: str) -> None:
        """Metadata and health are never compressed: clients read them raw."""
        response = server.client.get(path, headers={"Accept-Encoding": "gzip"})
        assert response.status_code == 200
        assert "content-encoding" not in response.headers

    def test_errors_are_not(self, server: ServerProcess) -> None:
        """An error is plain JSON whatever was asked for."""
        response = server.client.post(INFER, content=b"{", headers={"Accept-Encoding": "gzip"})
        assert response.status_code == 400
        assert "content-encoding" not in response.headers
        assert set(response.json()) == {"error", "code", "request_id"}


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        pytest.param("GET", "/v2/models/nowhere", 404, "model_not_found", id="metadata of an unknown model"),
        pytest.param("GET", "/v2/models/odd/versions/x", 404, "model_not_found", id="a version that is no number"),
        pytest.param("GET", "/v2/models/nowhere/stats", 404, "model_not_found", id="statistics of an unknown model"),
        pytest.param("GET", "/v2/models/odd/infer", 405, "method_not_allowed", id="GET infer"),
        pytest.param("POST", "/v2/models/odd", 405, "method_not_allowed", id="POST metadata"),
        pytest.param("GET", "/v2/repository/index", 405, "method_not_allowed", id="GET index"),
        pytest.param("GET", "/v2/", 404, "not_found", id="a trailing slash"),
        pytest.param("GET", "/v2/systemsharedmemory/status", 404, "not_found", id="shared memory"),
        pytest.param("POST", "/v2/models/odd/generate", 404, "not_found", id="generate"),
        pytest.param("POST", "/v2/repository/models/..%2Fodd/load", 404, "not_found", id="a name with a slash"),
        pytest.param("POST", "/v2/repository/models/../load", 404, "not_found", id="a name that goes up"),
        pytest.param("POST", "/v2/repository/models/.hidden/load", 404, "model_not_found", id="a hidden name"),
    ],
)
def test_what_is_not_there(server: ServerProcess, method: str, path: str, status: int, code: str) -> None:
    """What the protocol could have and we have not is a clear error, with `error` in its body."""
    response = server.client.request(method, path)
    assert (response.status_code, response.json()["code"]) == (status, code)
    assert response.json()["error"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        pytest.param(b"", 200, id="empty, as tritonclient sends it"),
        pytest.param(b"{}", 200, id="an empty object"),
        pytest.param(b'{"ready": true}', 200, id="only ready ones"),
        pytest.param(b"[1", 400, id="not JSON"),
        pytest.param(b"[]", 400, id="no object"),
        pytest.param(b" " * 70_000, 413, id="too long"),
    ],
)
def test_index_body(server: ServerProcess, body: bytes, status: int) -> None:
    """The index takes an empty body, or an object of bounded size."""
    assert server.client.post("/v2/repository/index", content=body).status_code == status


def test_not_ready_is_503_with_an_error(tmp_path: Path, seeds_repository: Path) -> None:
    """While the server drains, ready and model ready answer 503 with the error body."""
    with serving(tmp_path / "log", "--models", str(seeds_repository), "--drain-delay-s", "5") as server:
        assert server.client.get("/v2/health/ready").json() == {"ready": True}
        server.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 1
        while server.client.get("/v2/health/ready").status_code == 200:  # the signal is on its way to every process
            assert time.monotonic() < deadline
        for path in ("/v2/health/ready", "/v2/models/attention/ready"):
            response = server.client.get(path)
            assert (response.status_code, response.json()["code"]) == (503, "draining")
        assert server.client.get("/v2/health/live").json() == {"live": True}
        assert server.client.post(INFER, content=BODY).status_code == 200
        server.process.send_signal(signal.SIGTERM)


def test_logs_name_the_route(server: ServerProcess) -> None:
    """Logs and metrics name the route's template, not the path a client chose."""
    server.client.post(INFER, content=BODY, headers={"X-Request-Id": "wire-1"})
    deadline = time.monotonic() + 10  # the line is written once the answer is out
    lines: list[dict[str, Any]] = []
    while not lines and time.monotonic() < deadline:
        lines = [event for event in server.events() if event.get("request_id") == "wire-1"]
    assert lines[0]["route"] == "/v2/models/{model}/infer"
    assert 'route="/v2/models/{model}/infer"' in server.client.get("/metrics").text
