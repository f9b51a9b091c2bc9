"""What Prometheus reads."""

from dataclasses import dataclass

import pytest
from prometheus_client.parser import text_string_to_metric_families

from service.metrics import RELEASES, STAGES, Metrics


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample of an exposition, by name and labels."""
    families = text_string_to_metric_families(metrics.exposition().decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


@dataclass(frozen=True)
class Queue:
    """A queue, as far as metrics tell of it."""

    waiting: int
    wait_s: float = 0.25
    held_bytes: int = 17


class TestExposition:
    def test_counts_what_it_was_told(self) -> None:
        """Counters, gauges and histograms come out under their public names, with their labels."""
        metrics = Metrics()
        metrics.requests.add(("/v1/attention", "POST", "200", "ok"), 7)
        metrics.show(Queue(3))
        metrics.workers.set(2)
        metrics.ready.set(1)
        metrics.request_seconds.observe(("/v1/attention",), 0.003)
        metrics.received_bytes.add(("application/json",), 11)
        metrics.sent_bytes.add(("application/json",), 13)
        metrics.model_info.labels("attention", "1", "abc", "cpu").set(1)
        found = samples(metrics)
        answered = (("code", "ok"), ("method", "POST"), ("route", "/v1/attention"), ("status", "200"))
        assert found["mha_requests_total", answered] == 7
        assert found["mha_queue_requests", ()] == 3
        assert found["mha_workers", ()] == 2
        assert found["mha_ready", ()] == 1
        assert found["mha_requests_in_flight", ()] == 0
        assert found["mha_request_seconds_count", (("route", "/v1/attention"),)] == 1
        assert found["mha_request_seconds_bucket", (("le", "0.0025"), ("route", "/v1/attention"))] == 0
        assert found["mha_request_seconds_bucket", (("le", "0.005"), ("route", "/v1/attention"))] == 1
        assert found["mha_received_bytes_total", (("media_type", "application/json"),)] == 11
        assert found["mha_sent_bytes_total", (("media_type", "application/json"),)] == 13
        model = (("device", "cpu"), ("digest", "abc"), ("model", "attention"), ("version", "1"))
        assert found["mha_model_info", model] == 1

    @pytest.mark.parametrize(
        ("value", "below", "above"),
        [
            pytest.param(0.00001, None, "5e-05", id="below_the_first"),
            pytest.param(0.0025, "0.001", "0.0025", id="on_a_bound"),
            pytest.param(0.0026, "0.0025", "0.005", id="between"),
            pytest.param(31.0, "30.0", "+Inf", id="beyond_the_last"),
        ],
    )
    def test_histogram_counts_up_to_each_bound(self, value: float, below: str | None, above: str) -> None:
        """Buckets are cumulative, and a value on a bound is within it, as Prometheus wants."""
        metrics = Metrics()
        metrics.stage_seconds.observe(("queue",), value)
        found = samples(metrics)
        stage = ("stage", "queue")
        assert found["mha_stage_seconds_bucket", (("le", above), stage)] == 1
        assert found["mha_stage_seconds_bucket", (("le", "+Inf"), stage)] == 1
        assert below is None or found["mha_stage_seconds_bucket", (("le", below), stage)] == 0
        assert found["mha_stage_seconds_sum", (stage,)] == value

    @pytest.mark.parametrize("release", RELEASES)
    def test_calls_are_counted_by_release(self, release: str) -> None:
        """Every reason is there from the start; a call counts its rows, too."""
        metrics = Metrics()
        assert samples(metrics)["mha_engine_calls_total", (("release", release),)] == 0
        metrics.called(release, 3)
        metrics.called(release, 5)
        found = samples(metrics)
        assert found["mha_engine_calls_total", (("release", release),)] == 2
        assert found["mha_call_rows_sum", ()] == 8
        assert found["mha_call_rows_bucket", (("le", "4.0"),)] == 1

    @pytest.mark.parametrize("stage", STAGES)
    def test_every_stage_is_there_from_the_start(self, stage: str) -> None:
        """A stage that no request has reached has a count of 0, so that rates of it can be asked for."""
        assert samples(Metrics())["mha_stage_seconds_count", (("stage", stage),)] == 0

    def test_tells_of_the_process(self) -> None:
        """Memory, CPU time and open files of the process are exported, too."""
        names = {name for name, _ in samples(Metrics())}
        assert {"process_resident_memory_bytes", "process_cpu_seconds_total", "process_open_fds"} <= names

    def test_every_metric_is_documented_and_ours(self) -> None:
        """Each metric has a help text, and a name that says whose it is."""
        for family in text_string_to_metric_families(Metrics().exposition().decode()):
            assert family.documentation
            assert family.name.startswith(("mha_", "process_"))

    def test_instances_share_nothing(self) -> None:
        """Two servers in one process count for themselves."""
        first, second = Metrics(), Metrics()
        first.show(Queue(5))
        assert samples(second)["mha_queue_requests", ()] == 0
