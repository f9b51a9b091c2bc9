"""Spans of requests, for who wants to see where one request's time went. The only file that sees OpenTelemetry.

Spans are made when a request is over, from times that were taken anyway: none is open while it is served. Where they
go, how many are kept, and under which name is said in OpenTelemetry's own variables (`OTEL_EXPORTER_OTLP_ENDPOINT`,
`OTEL_TRACES_SAMPLER`, `OTEL_SERVICE_NAME`). A `traceparent` header (W3C Trace Context) makes the caller's span the
parent.
"""

import importlib.metadata
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, final

from service.errors import StartupError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

EXTRA: Final = "otel"
_NEEDED: Final = ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")
# What W3C Trace Context says of a caller's span.
_CONTEXT: Final = (b"traceparent", b"tracestate")
_FAILED: Final = 500
_LAST_S: Final = 3.0


@final
@dataclass(frozen=True, slots=True)
class Stage:
    """One part of a request; seconds of `time.perf_counter`, and what there is to say of it."""

    name: str
    began_s: float
    ended_s: float
    attributes: Mapping[str, str | int] = field(default_factory=dict)


@final
@dataclass(frozen=True, slots=True)
class Trace:
    """A request that is over.

    Attributes:
        method, route, status, code: as the metrics have them.
        headers: the request's own.
        whole: from its head to the end of its answer.
        stages: within it.
    """

    method: str
    route: str
    status: int
    code: str
    headers: Sequence[tuple[bytes, bytes]]
    whole: Stage
    stages: Sequence[Stage]


@final
class Traces:
    """Sends a span for each request, and one below it for each of its stages.

    Args:
        provider: of the spans; ended by `close`.
    """

    def __init__(self, provider: "TracerProvider") -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415

        self._provider = provider
        self._tracer = provider.get_tracer("mha-service")
        self._propagator = TraceContextTextMapPropagator()

    def record(self, trace: Trace) -> str:
        """Hands the spans over, unless they are not sampled; returns the trace's id, 32 hex digits."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, format_trace_id, set_span_in_context  # noqa: PLC0415

        start_of_clock_ns = time.time_ns() - time.perf_counter_ns()

        def at(seconds: float) -> int:
            return start_of_clock_ns + int(seconds * 1e9)

        carried = {name.decode(): value.decode("latin-1") for name, value in trace.headers if name in _CONTEXT}
        span = self._tracer.start_span(
            f"{trace.method} {trace.route}",
            self._propagator.extract(carried),
            SpanKind.SERVER,
            start_time=at(trace.whole.began_s),
            attributes={
                "http.request.method": trace.method,
                "http.route": trace.route,
                "http.response.status_code": trace.status,
                **trace.whole.attributes,
            },
        )
        if span.is_recording():
            below = set_span_in_context(span)
            for stage in trace.stages:
                began, ended = at(stage.began_s), at(stage.ended_s)
                self._tracer.start_span(stage.name, below, start_time=began, attributes=stage.attributes).end(ended)
            if trace.code != "ok":
                span.set_attribute("error.type", trace.code)
            if trace.status >= _FAILED:
                span.set_status(Status(StatusCode.ERROR, trace.code))
        span.end(at(trace.whole.ended_s))
        return format_trace_id(span.get_span_context().trace_id)

    def close(self) -> None:
        """Sends what has not been sent. Blocks until then, but not for long: nobody may be there to take it."""
        # A thread that the interpreter does not wait for: the exporter itself would try for ten seconds.
        sending = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        sending.start()
        sending.join(_LAST_S)


def check_tracing(is_installed: Callable[[str], bool]) -> None:
    """Makes sure that spans can be sent.

    Raises:
        StartupError: a distribution is missing.
    """
    missing = [name for name in _NEEDED if not is_installed(name)]
    if missing:
        raise StartupError(f"traces: otlp needs {', '.join(missing)}: pip install 'mha-service[{EXTRA}]'")


def otlp_traces() -> Traces:
    """Spans in batches over OTLP and HTTP, from a thread of this process."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource  # noqa: PLC0415
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

    ours = {"service.name": "mha-service", "service.version": importlib.metadata.version("mha-service")}
    provider = TracerProvider(
        # What the environment says wins.
        resource=Resource.create({**ours, **OTELResourceDetector().detect().attributes}),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Traces(provider)
