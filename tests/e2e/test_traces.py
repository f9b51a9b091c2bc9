"""Spans of requests, received by a real collector of OTLP over HTTP."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from service.errors import StartupError
from service.traces import check_tracing
from tests.served import ServerProcess, serving

STAGES = ["decode", "queue", "compute", "encode"]
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
BODY = {"queries": [[[0.5] * 100] * 3]}


class Collector:
    """Takes what is sent to it."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.requests: list[ExportTraceServiceRequest] = []

    def spans(self) -> list[Span]:
        """All of them."""
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def resources(self) -> list[dict[str, Any]]:
        """What each sender says of itself."""
        return [_attributes(one.resource) for request in self.requests for one in request.resource_spans]


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a port of its own."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.requests.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(server.server_port)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def traced(log: Path, models: Path, url: str, *flags: str, **environment: str) -> Iterator[ServerProcess]:
    """A server that sends its spans there."""
    flags = ("--models", str(models), "--traces", "otlp", *flags)
    with serving(log, *flags, OTEL_EXPORTER_OTLP_ENDPOINT=url, **environment) as server:
        yield server


def _attributes(holder: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in holder.attributes}


@pytest.mark.parametrize("processes", ["1", "2"])
def test_span_and_stages(tmp_path: Path, seeds_repository: Path, processes: str) -> None:
    """A request is a span below its caller's, its stages are spans below it, in order and within it."""
    with collecting() as collector:
        with traced(tmp_path / "log", seeds_repository, collector.url, "--processes", processes) as server:
            headers = {"traceparent": CALLER, "x-request-id": "mine"}
            assert server.client.post("/v1/attention", json=BODY, headers=headers).status_code == 200
        spans = {span.name: span for span in collector.spans()}
        whole = spans.pop("POST /v1/attention")
        assert whole.kind == Span.SPAN_KIND_SERVER
        assert whole.trace_id.hex() == CALLER.split("-")[1]
        assert whole.parent_span_id.hex() == CALLER.split("-")[2]
        said = _attributes(whole)
        assert said["http.response.status_code"] == 200
        assert said["http.route"] == "/v1/attention"
        assert said["mha.request_id"] == "mine"
        assert list(spans) == STAGES
        before = whole.start_time_unix_nano
        for span in spans.values():
            assert span.parent_span_id == whole.span_id
            assert before <= span.start_time_unix_nano <= span.end_time_unix_nano <= whole.end_time_unix_nano
            before = span.start_time_unix_nano
        assert _attributes(spans["compute"]) == {"mha.model": "attention", "mha.version": 1, "mha.engine_calls": 1}
        assert [one["service.name"] for one in collector.resources()] == ["mha-service"]
        (line,) = (event for event in server.events() if event["event"] == "request")
        assert line["trace_id"] == whole.trace_id.hex()


def test_refusal_and_quiet_routes(tmp_path: Path, seeds_repository: Path) -> None:
    """A refused request says its code; health and metrics have no spans; the environment names the service."""
    with collecting() as collector:
        name = {"OTEL_SERVICE_NAME": "attention-of-mine"}
        with traced(tmp_path / "log", seeds_repository, collector.url, **name) as server:
            assert server.client.post("/v1/attention", json={"keys": []}).status_code == 400
            assert server.client.get("/v1/nowhere").status_code == 404
            for quiet in ("/health/ready", "/v2/health/live", "/metrics"):
                assert server.client.get(quiet).status_code == 200
        codes = {span.name: _attributes(span)["error.type"] for span in collector.spans() if span.kind == 2}
        assert codes == {"POST /v1/attention": "malformed_body", "GET other": "not_found"}
        assert all(span.status.code == Status.STATUS_CODE_UNSET for span in collector.spans())
        assert {one["service.name"] for one in collector.resources()} == {"attention-of-mine"}


def test_unsampled(tmp_path: Path, seeds_repository: Path) -> None:
    """A caller that does not sample its trace has none of it sent."""
    with collecting() as collector:
        with traced(tmp_path / "log", seeds_repository, collector.url) as server:
            for flags in ("00", "01"):
                server.client.post("/v1/attention", json=BODY, headers={"traceparent": CALLER[:-2] + flags})
        assert len(collector.spans()) == 1 + len(STAGES)


def test_off(tmp_path: Path, seeds_repository: Path) -> None:
    """Nothing is sent by default, whatever the environment says."""
    with collecting() as collector:
        flags = ("--models", str(seeds_repository))
        with serving(tmp_path / "log", *flags, OTEL_EXPORTER_OTLP_ENDPOINT=collector.url) as server:
            server.client.post("/v1/attention", json=BODY)
        assert not collector.requests
        (line,) = (event for event in server.events() if event["event"] == "request")
        assert "trace_id" not in line


def test_collector_that_is_not_there(tmp_path: Path, seeds_repository: Path) -> None:
    """Requests are answered, and the server ends as it should, though nobody takes its spans."""
    with traced(tmp_path / "log", seeds_repository, "http://127.0.0.1:9") as server:
        assert server.client.post("/v1/attention", json=BODY).status_code == 200
        assert server.stop() == 0
    assert any("export" in event["event"].lower() for event in server.events())


def test_package_that_is_not_there() -> None:
    """The start-up says what to install."""
    with pytest.raises(StartupError, match=r"opentelemetry-sdk.*pip install 'mha-service\[otel\]'"):
        check_tracing(lambda name: name != "opentelemetry-sdk")
