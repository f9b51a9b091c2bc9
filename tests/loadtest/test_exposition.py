"""What lies between two looks at /metrics."""

import pytest

from loadtest.exposition import Exposition, between

BEFORE = {
    ("mha_stage_seconds_sum", (("stage", "queue"),)): 1.0,
    ("mha_stage_seconds_count", (("stage", "queue"),)): 100.0,
    ("mha_request_seconds_sum", (("route", "/v1/attention"),)): 3.0,
    ("mha_request_seconds_count", (("route", "/v1/attention"),)): 100.0,
    ("mha_request_seconds_sum", (("route", "/metrics"),)): 50.0,
    ("mha_request_seconds_count", (("route", "/metrics"),)): 1.0,
    ("mha_requests_total", (("route", "/v1/attention"), ("code", "ok"))): 100.0,
    ("mha_keys_total", (("kind", "valid"),)): 0.0,
    ("mha_keys_total", (("kind", "computed"),)): 0.0,
    ("process_cpu_seconds_total", ()): 10.0,
}
AFTER = {
    ("mha_stage_seconds_sum", (("stage", "queue"),)): 1.5,
    ("mha_stage_seconds_count", (("stage", "queue"),)): 200.0,
    ("mha_request_seconds_sum", (("route", "/v1/attention"),)): 4.0,
    ("mha_request_seconds_count", (("route", "/v1/attention"),)): 200.0,
    ("mha_request_seconds_sum", (("route", "/metrics"),)): 90.0,
    ("mha_request_seconds_count", (("route", "/metrics"),)): 2.0,
    ("mha_requests_total", (("route", "/v1/attention"), ("code", "ok"))): 190.0,
    ("mha_requests_total", (("route", "/v1/attention"), ("code", "overloaded"))): 7.0,
    ("mha_requests_total", (("route", "/metrics"), ("code", "ok"))): 2.0,
    ("mha_keys_total", (("kind", "valid"),)): 300.0,
    ("mha_keys_total", (("kind", "computed"),)): 400.0,
    ("process_cpu_seconds_total", ()): 16.0,
    ("process_resident_memory_bytes", ()): 123.0,
}
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def look(at_s: float, samples: Samples) -> Exposition:
    """One of these samples."""
    return Exposition(at_s, {(name, frozenset(labels)): value for (name, labels), value in samples.items()})


def test_is_of_the_time_between_alone() -> None:
    """Means of what has been added, of inference alone; what is not told is None."""
    told = between(look(100, BEFORE), look(104, AFTER))
    assert told is not None
    assert told["stages_ms"] == {"decode": None, "queue": pytest.approx(5), "compute": None, "encode": None}
    assert told["request_ms"] == pytest.approx(10)
    assert told["requests"] == {"ok": 90, "overloaded": 7}
    assert told["padding"] == {"queries": None, "keys": pytest.approx(0.25)}
    assert (told["busy_cores"], told["memory_bytes"], told["rows_a_call"]) == (1.5, 123, None)


@pytest.mark.parametrize(
    ("before", "after"),
    [(None, None), (look(1, {}), look(2, {})), (look(1, BEFORE), None)],
    ids=["nothing", "another_server", "gone"],
)
def test_of_a_server_that_does_not_tell(before: Exposition | None, after: Exposition | None) -> None:
    """Nothing is known, and nothing made up."""
    assert between(before, after) is None
