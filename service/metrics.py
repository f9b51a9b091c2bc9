"""What Prometheus reads at `/metrics`. One instance a server, with a registry of its own."""

from typing import Final, final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

_BUCKETS_S: Final = (
    *(0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)

_BUCKETS_ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)

RELEASES: Final = ("idle", "freed", "joined", "slice")
QUERY_KINDS: Final = ("valid", "computed")
KEY_KINDS: Final = ("received", "valid", "computed")
STAGES: Final = ("decode", "queue", "compute", "encode")


@final
class Metrics:
    """The service's own counts and times. Durations in seconds, sizes in bytes."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.requests = Counter(
            "mha_requests", "Answered requests; code is ok or the error's.", ["route", "method", "status", "code"],
            registry=self.registry,
        )  # fmt: skip
        self.request_seconds = Histogram(
            "mha_request_seconds", "From the request's head to the end of its answer.", ["route"],
            buckets=_BUCKETS_S, registry=self.registry,
        )  # fmt: skip
        self.stage_seconds = Histogram(
            "mha_stage_seconds", "Time of one stage of an inference request.", ["stage"],
            buckets=_BUCKETS_S, registry=self.registry,
        )  # fmt: skip
        self.in_flight = Gauge("mha_requests_in_flight", "Requests being answered.", registry=self.registry)
        self.queued = Gauge("mha_queue_requests", "Requests waiting for a worker.", registry=self.registry)
        self.workers = Gauge("mha_workers", "Engine calls that may run at once.", registry=self.registry)
        self.received_bytes = Counter(
            "mha_received_bytes", "Bytes of inference request bodies.", ["media_type"], registry=self.registry
        )
        self.sent_bytes = Counter(
            "mha_sent_bytes", "Bytes of inference answers.", ["media_type"], registry=self.registry
        )
        self.calls = Counter(
            "mha_engine_calls",
            "Engine calls, by why each was made when it was: idle (a worker was free), freed (it waited for one), "
            "joined (several requests share it), slice (one of several of a request).",
            ["release"],
            registry=self.registry,
        )
        self.call_rows = Histogram(
            "mha_call_rows", "Batch entries of an engine call.", buckets=_BUCKETS_ROWS, registry=self.registry
        )
        self.queries = Counter(
            "mha_queries", "Queries of answered requests: valid, computed (padding included).", ["kind"],
            registry=self.registry,
        )  # fmt: skip
        self.keys = Counter(
            "mha_keys",
            "Keys of answered requests: received, valid (within a length), computed (padding and repeats included).",
            ["kind"],
            registry=self.registry,
        )
        self.ready = Gauge("mha_ready", "1 while the server takes requests, else 0.", registry=self.registry)
        self.model_info = Gauge(
            "mha_model_info", "1 for each model served.", ["model", "version", "digest", "device"],
            registry=self.registry,
        )  # fmt: skip
        # Looked up once, because every request needs them all.
        self.stages = {stage: self.stage_seconds.labels(stage) for stage in STAGES}
        self.keys_of_kind = {kind: self.keys.labels(kind) for kind in KEY_KINDS}
        self.queries_of_kind = {kind: self.queries.labels(kind) for kind in QUERY_KINDS}
        self._calls_of_release = {release: self.calls.labels(release) for release in RELEASES}

    def called(self, release: str, rows: int) -> None:
        """An engine call was made. From any thread."""
        self._calls_of_release[release].inc()
        self.call_rows.observe(rows)

    def queue_changed(self, waiting: int) -> None:
        """So many requests wait."""
        self.queued.set(waiting)

    def exposition(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)
