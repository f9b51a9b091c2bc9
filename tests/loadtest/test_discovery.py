"""Finding out what a server serves: ours by its own list, others by the metadata of the Open Inference Protocol."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from loadtest.discovery import discover
from loadtest.errors import LoadTestError
from loadtest.plan import Options, prepare
from loadtest.target import parse_target
from loadtest.tensors import Composer, Layer
from loadtest.workload import Composed

Answers = dict[str, Any]
INPUTS = ("queries", "keys", "values", "valid_lens")


@pytest.fixture
def serve() -> Iterator[Callable[[Answers], str]]:
    """Starts a server that answers these paths with JSON, and any other with 404; returns its address."""
    servers: list[ThreadingHTTPServer] = []

    def start(answers: Answers) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = answers.get(self.path)
                content = json.dumps(found).encode()
                self.send_response(404 if found is None else 200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def model(name: str, version: int = 1, size: int = 5) -> dict[str, Any]:
    """As our server describes one."""
    layer = {"query_size": size, "key_size": 7, "value_size": 11}
    return {"name": name, "version": version, "layer": layer, "precision": "fp32", "parity": {"limit": 1e-6}}


def ours(*models: dict[str, Any]) -> Answers:
    """What our server answers that serves these."""
    by_name = {one["name"]: one for one in models}
    return {
        "/v1/models": {"models": list(by_name.values())},
        **{
            f"/v1/models/{name}": {"name": name, "versions": [one for one in models if one["name"] == name]}
            for name in by_name
        },
    }


def foreign(name: str, *inputs: str, size: int = 5) -> Answers:
    """What a server of the other protocol answers."""
    described = [{"name": one, "datatype": "FP32", "shape": [-1, -1, size]} for one in inputs]
    return {f"/v2/models/{name}": {"name": name, "inputs": described}}


class TestOurs:
    def test_the_only_model(self, serve: Callable[[Answers], str]) -> None:
        """Needs no name; its sizes are known."""
        served = discover(parse_target(serve(ours(model("one")))), None, None)
        assert (served.name, served.layer, served.is_ours) == ("one", Layer(5, 7, 11), True)
        assert served.path("json") == ("/v1/attention", {"model": "one", "version": None})
        assert served.path("oip-binary") == ("/v2/models/one/infer", {})

    def test_version_that_is_named(self, serve: Callable[[Answers], str]) -> None:
        """That one's sizes, and its address."""
        url = serve(ours(model("one", 1, size=5), model("one", 2, size=6)))
        assert discover(parse_target(url), None, None).layer.query_size == 6
        served = discover(parse_target(url), "one", "1")
        assert served.layer.query_size == 5
        assert served.path("oip-json")[0] == "/v2/models/one/versions/1/infer"

    def test_several_want_a_name(self, serve: Callable[[Answers], str]) -> None:
        """Those there are are named."""
        with pytest.raises(LoadTestError, match="serves one, two; name one with --model"):
            discover(parse_target(serve(ours(model("one"), model("two")))), None, None)


class TestForeign:
    def test_bare_graph_gets_every_input(self, serve: Callable[[Answers], str]) -> None:
        """As Triton serves an exported folder: self-attention sends its tokens as queries, keys and values."""
        url = serve(foreign("attention", *INPUTS))
        plan = prepare(Options(url, model="attention", protocol="oip-binary"))
        assert plan.target.path == "/v2/models/attention/infer"
        assert isinstance(plan.workload, Composed)
        assert plan.workload.composer == Composer(Layer(5, 5, 5), complete=True)
        assert set(plan.workload.tensors(0)) == {"queries", "keys", "values", "valid_lens"}

    def test_speaks_no_other_protocol(self, serve: Callable[[Answers], str]) -> None:
        """And says which it does."""
        url = serve(foreign("attention", *INPUTS))
        with pytest.raises(LoadTestError, match="use --protocol oip-binary"):
            prepare(Options(url, model="attention"))

    @pytest.mark.parametrize(
        ("answers", "name", "said"),
        [
            ({}, None, "bring a --body"),
            ({}, "attention", "inputs unknown"),
            (foreign("attention", "image"), "attention", r"has inputs \['image'\], want"),
            (foreign("attention", *INPUTS, size=-1), "attention", "does not tell its sizes"),
        ],
        ids=["nothing", "no_such_model", "another_kind", "no_sizes"],
    )  # fmt: skip
    def test_what_cannot_be_asked(
        self, serve: Callable[[Answers], str], answers: Answers, name: str | None, said: str
    ) -> None:
        """Is said, with what to do."""
        with pytest.raises(LoadTestError, match=said):
            discover(parse_target(serve(answers)), name, None)


@pytest.mark.parametrize("url", ["", "ftp://host", "http://", "http://host:port", "http:///path"])
def test_no_address(url: str) -> None:
    """Is refused with an example of one."""
    with pytest.raises(LoadTestError, match=r"want one like http://127\.0\.0\.1:8000"):
        parse_target(url)


def test_address_without_a_scheme() -> None:
    """Is an http one; the path and the query stay."""
    target = parse_target("localhost:9000/predict?x=1")
    assert (target.url, target.base) == ("http://localhost:9000/predict?x=1", "http://localhost:9000")
    assert parse_target("https://[::1]/").base == "https://[::1]:443"
