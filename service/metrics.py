"""What Prometheus reads at `/metrics`. One instance a server, with a registry of its own."""

from collections.abc import Iterator, Sequence
from typing import Any, Final, Protocol, final

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.samples import Sample

from service.tally import Counters, Histograms

_BUCKETS_S: Final = (
    *(0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
_BUCKETS_ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)

RELEASES: Final = ("idle", "freed", "joined", "slice")
QUERY_KINDS: Final = ("valid", "computed")
KEY_KINDS: Final = ("received", "valid", "computed")
STAGES: Final = ("decode", "queue", "compute", "encode")
# What is not a sum over a server's processes.
_OF_THE_SERVER: Final = (
    "mha_workers", "mha_ready", "mha_model_info", "process_start_time_seconds", "process_max_fds",
)  # fmt: skip

# What is worse for some processes than for others, where the worst counts.
_WORST_OF_ALL: Final = ("mha_queue_wait_seconds",)

# Families by name, each with its samples: name, labels, value.
Families = Sequence[tuple[str, Sequence[tuple[str, dict[str, str], float]]]]


class Queue(Protocol):
    """What there is to tell about a queue."""

    @property
    def waiting(self) -> int:
        """Requests."""

    @property
    def wait_s(self) -> float:
        """Seconds until who comes now has a turn."""

    @property
    def held_bytes(self) -> int:
        """Bytes."""


@final
class Metrics:
    """The service's own counts and times. Durations in seconds, sizes in bytes.

    All is written on the event loop, except by `called`.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.requests = Counters(
            "mha_requests", "Answered requests; code is ok or the error's.", ("route", "method", "status", "code"), ()
        )
        self.request_seconds = Histograms(
            "mha_request_seconds", "From the request's head to the end of its answer.", ("route",), _BUCKETS_S, ()
        )
        self.stage_seconds = Histograms(
            "mha_stage_seconds", "Time of one stage of an inference request.", ("stage",), _BUCKETS_S, _each(STAGES)
        )
        self.received_bytes = Counters("mha_received_bytes", "Bytes of inference request bodies.", ("media_type",), ())
        self.sent_bytes = Counters("mha_sent_bytes", "Bytes of inference answers.", ("media_type",), ())
        self.calls = Counters(
            "mha_engine_calls",
            "Engine calls, by why each was made when it was: idle (a worker was free), freed (it waited for one), "
            "joined (several requests share it), slice (one of several of a request).",
            ("release",),
            _each(RELEASES),
        )
        self.call_rows = Histograms("mha_call_rows", "Batch entries of an engine call.", (), _BUCKETS_ROWS, ((),))
        self.queries = Counters(
            "mha_queries", "Queries of answered requests: valid, computed (padding included).", ("kind",),
            _each(QUERY_KINDS),
        )  # fmt: skip
        self.keys = Counters(
            "mha_keys",
            "Keys of answered requests: received, valid (within a length), computed (padding and repeats included).",
            ("kind",),
            _each(KEY_KINDS),
        )
        for family in (
            self.requests, self.request_seconds, self.stage_seconds, self.received_bytes, self.sent_bytes, self.calls,
            self.call_rows, self.queries, self.keys,
        ):  # fmt: skip
            self.registry.register(family)
        self.in_flight = 0
        in_flight = Gauge("mha_requests_in_flight", "Requests being answered.", registry=self.registry)
        in_flight.set_function(lambda: self.in_flight)
        self._queued = Gauge("mha_queue_requests", "Requests waiting for a worker.", registry=self.registry)
        self._wait = Gauge(
            "mha_queue_wait_seconds", "How long who comes now is likely to wait.", registry=self.registry
        )
        self._held = Gauge("mha_held_bytes", "Bytes of bodies and answers held.", registry=self.registry)
        self.workers = Gauge("mha_workers", "Engine calls that may run at once.", registry=self.registry)
        self.ready = Gauge("mha_ready", "1 while the server takes requests, else 0.", registry=self.registry)
        self.model_info = Gauge(
            "mha_model_info", "1 for each model served.", ["model", "version", "digest", "device"],
            registry=self.registry,
        )  # fmt: skip

    def show(self, queue: Queue) -> None:
        """Lets the gauges of the queue tell of this one."""
        self._queued.set_function(lambda: queue.waiting)
        self._wait.set_function(lambda: queue.wait_s)
        self._held.set_function(lambda: queue.held_bytes)

    def called(self, release: str, rows: int) -> None:
        """An engine call was made. From any thread, one at a time."""
        self.calls.add((release,))
        self.call_rows.observe((), rows)

    def dump(self) -> Families:
        """Every sample as JSON has it, for `exposition` in another process of the server."""
        return [
            (family.name, [(sample.name, sample.labels, sample.value) for sample in family.samples])
            for family in self.registry.collect()
        ]

    def exposition(self, others: Sequence[Families] = ()) -> bytes:
        """Everything in Prometheus' text format: this process's, and what `dump` made of the server's others."""
        return generate_latest(_Merged(self.registry, others))


@final
class _Merged:
    """A registry and other processes' samples: sums, but for what is one number of the whole server."""

    def __init__(self, registry: CollectorRegistry, others: Sequence[Families]) -> None:
        self._registry = registry
        self._others = others

    def collect(self) -> Iterator[Metric]:
        """Every family, once."""
        elsewhere: dict[str, dict[tuple[Any, ...], float]] = {}
        for families in self._others:
            for name, samples in families:
                sums = elsewhere.setdefault(name, {})
                for sample, labels, value in samples:
                    key = (sample, *sorted(labels.items()))
                    sums[key] = _together(name, sums.get(key, 0.0), value)
        for family in self._registry.collect():
            if family.name not in _OF_THE_SERVER:
                sums = elsewhere.pop(family.name, {})
                family.samples = [
                    sample._replace(value=_together(family.name, sample.value, sums.pop(_key(sample), 0.0)))
                    for sample in family.samples
                ]
                for (name, *pairs), value in sums.items():
                    family.add_sample(name, dict(pairs), value)
            yield family


def _together(family: str, one: float, other: float) -> float:
    return max(one, other) if family in _WORST_OF_ALL else one + other


def _key(sample: Sample) -> tuple[Any, ...]:
    return sample.name, *sorted(sample.labels.items())


def _each(names: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [(name,) for name in names]
