"""The document's figures: each from what was measured, each in its place, and none forgotten."""

import asyncio
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks.scaling.__main__ import RESULTS, _read, _start_s, main
from benchmarks.scaling.check import MAX_QUEUE_MS, Served, compared, open_loop
from benchmarks.scaling.costs import KINDS, SIZE, Reading
from benchmarks.scaling.figures import cores, flops, goodput, named, replicas, wire_bytes
from benchmarks.scaling.page import DOCUMENT, TEMPLATE, filled, places, unfinished
from benchmarks.scaling.plans import plan
from benchmarks.scaling.queues import Fleet, at_random, simulate
from tests.chaos.clients import Account
from tests.served import ServerProcess

MACHINE = {"cpu": "a processor", "cores": 2, "python": "3.11.7"}
WHEN = {"date": "2026-11-30T12:00:00+00:00", "commit": "0123456789abcdef", "modified": False, "machine": MACHINE}
EXPOSITION = """\
# TYPE mha_requests counter
mha_requests_total{{route="/v1/attention",method="POST",status="200",code="ok"}} {ok}
mha_requests_total{{route="/v1/attention",method="POST",status="429",code="overloaded"}} 900
mha_requests_total{{route="/metrics",method="GET",status="200",code="ok"}} 70
# TYPE mha_sent_bytes counter
mha_sent_bytes_total{{media_type="a"}} {sent}
mha_sent_bytes_total{{media_type="b"}} 30
# TYPE mha_stage_seconds histogram
mha_stage_seconds_sum{{stage="decode"}} 1
mha_stage_seconds_sum{{stage="compute"}} {compute}
"""


def kind(cpu_s: float, received_bytes: float = 2e5) -> dict[str, Any]:
    stages_s = {"decode": cpu_s / 7, "queue": 0.0, "compute": cpu_s / 2, "encode": cpu_s / 9}
    return {"cpu_s": cpu_s, "received_bytes": received_bytes, "sent_bytes": 7e4, "alone": {"stages_s": stages_s}}


def costs() -> dict[str, Any]:
    """As `measure` writes them."""
    kinds = {one.name: kind(0.001 + 0.00001 * number) for number, one in enumerate(KINDS)}
    kinds["self-128"] = kind(0.002, 1e5)
    kinds["dense-128"] = kind(0.003, 3e5)
    return {
        **WHEN, "kinds": kinds, "memory": {"idle_bytes": 2**27, "peak_bytes": 2**28}, "connection_s": 0.0002,
        "heads": {"request": 200, "answer": 300},
        "refusals": {"self-16": {"cpu_s": 0.0001}, "self-128": {"cpu_s": 0.0003}},
    }  # fmt: skip


def served(count: int = 3000) -> Served:
    """A run of a server that does what the simulation says."""
    rng = np.random.default_rng(3)
    sent_s = np.cumsum(rng.exponential(0.004, count))
    outcome = simulate(sent_s, np.full(count, 0.003), Fleet(1), at_random(1, rng))
    account = Account(sent=count, queued_s=outcome.waits_s.tolist(), answered_s=outcome.latencies_s.tolist())
    account.outcomes["answered"] = count
    return Served(
        1 / 0.003, [0.002, 0.002], sent_s, np.zeros(count), float(sent_s[-1]), count * 0.003, count * 0.003, account
    )


@pytest.fixture(scope="module")
def planned() -> dict[str, Any]:
    """Few requests, since only their way into the document counts here."""
    return plan(costs(), lambda _: None, 10_000)


class TestCosts:
    def test_what_a_request_costs_is_what_was_used_since(self) -> None:
        """Differences of what was counted, by answers to inference alone: not refusals, not other routes."""
        before = Reading.parse(EXPOSITION.format(ok=10, sent=1000, compute=5), 7.0)
        each = Reading.parse(EXPOSITION.format(ok=30, sent=5000, compute=6), 8.0).each_since(before)
        assert each["requests"] == 20
        assert each["cpu_s"] == pytest.approx(1 / 20)
        assert each["sent_bytes"] == pytest.approx(200)
        assert each["stages_s"]["compute"] == pytest.approx(1 / 20)
        assert each["stages_s"]["decode"] == 0

    def test_nothing_answered_is_no_figure(self) -> None:
        """Nothing is divided by nothing."""
        reading = Reading.parse(EXPOSITION.format(ok=10, sent=0, compute=0), 7.0)
        with pytest.raises(ValueError, match="nothing was answered"):
            reading.each_since(reading)

    def test_server_s_own_metrics_are_read(self, lone_server: ServerProcess) -> None:
        """The names that are looked for are those that a server exposes."""
        body = {"queries": np.zeros((1, 3, 100)).tolist()}
        before = Reading.of(lone_server)
        lone_server.client.post("/v1/attention", json=body).raise_for_status()
        each = Reading.of(lone_server).each_since(before)
        assert each["requests"] == 1
        assert each["sent_bytes"] > 300
        assert each["stages_s"]["compute"] > 0


class TestArithmetic:
    def test_cores_and_replicas(self) -> None:
        """10,000 requests of 3 ms keep 30 cores busy; at 70 % that is 43."""
        assert cores(0.003) == pytest.approx(30)
        assert replicas(0.003) == 43

    def test_bytes_on_the_wire(self) -> None:
        """A full frame has 1,448 bytes and takes 1,538."""
        assert wire_bytes(1300, 148) == pytest.approx(1538)

    def test_operations(self) -> None:
        """Four projections and two products of scores, two operations a multiplication."""
        length = 37
        want = 4 * 2 * length * SIZE * SIZE + 2 * 2 * length * length * SIZE
        assert flops(length) == pytest.approx(want, rel=0.001)

    def test_what_refusals_leave(self) -> None:
        """Answers and refusals together are the whole capacity; below it all is answered, far beyond it nothing."""
        answers = goodput(5, 0.04)
        assert answers + (5 - answers) * 0.04 == pytest.approx(1)
        assert goodput(0.6, 0.04) == 0.6
        assert goodput(30, 0.04) == 0


class TestCheck:
    def test_a_server_that_is_as_simulated_does_not_deviate(self) -> None:
        """What each takes and how it varies is all the simulation has to know."""
        got = compared(served(), 0.0)
        assert got["simulated"] == pytest.approx(got["measured"])
        assert got["measured"]["wait_mean_s"] > 0

    def test_a_slower_server_deviates(self) -> None:
        """Where each takes twice as long, the simulated waits are longer, and some are refused at the door."""
        run = served()
        got = compared(replace(run, cpu_s=2 * run.cpu_s), 0.0)
        assert got["simulated"]["refused"] > 0
        assert got["measured"]["wait_mean_s"] < got["simulated"]["wait_mean_s"] < MAX_QUEUE_MS / 1e3

    def test_requests_are_sent_when_due(self) -> None:
        """None before, and each once, whatever became of the others."""

        class Deaf:
            numbers: list[int] = []  # noqa: RUF012  # of this test alone

            async def ask(self, number: int) -> None:
                self.numbers.append(number)
                await asyncio.sleep(0.05)

        due_s = np.array([0.0, 0.01, 0.011, 0.03])
        sent_s = asyncio.run(open_loop(Deaf(), due_s))  # type: ignore[arg-type]
        assert (sent_s >= due_s).all()
        assert Deaf.numbers == [0, 1, 2, 3]


class TestPlan:
    def test_more_knowledge_needs_fewer_replicas(self, planned: dict[str, Any]) -> None:
        """One queue, better of two, random."""
        for row in planned["fewest"]:
            assert row["one"] <= row["two"] <= row["random"]

    def test_a_zone_of_three_is_half_as_much_again(self, planned: dict[str, Any]) -> None:
        """What was used before the failure, times 3/2, but for whole replicas."""
        for row in planned["failure"]:
            assert row["after"] <= 1.5 * row["before"] + 0.001


class TestPage:
    def test_every_figure_has_a_place_and_every_place_a_figure(self, planned: dict[str, Any]) -> None:
        """With all measured, nothing is unfinished, and nothing is told that the text does not want."""
        rows = [{"length": 128, "load": load, **compared(served(), 0.0)} for load in (0.5, 1.5)]
        check = {"seconds": 8.0, "max_queue_ms": MAX_QUEUE_MS, "rows": rows}
        template = TEMPLATE.read_text()
        figures = named({"costs": costs(), "check": check, "plan": planned}, 1.0)
        assert set(figures) == set(places(template))
        assert unfinished(filled(template, figures)) == []
        assert "nan" not in re.findall(r"\w+", "\n".join(figures.values()))

    def test_what_is_missing_can_be_seen(self) -> None:
        """A figure that was not measured leaves its name."""
        text = filled("{{one}} and {{another}}", {"one": "1"})
        assert text == "1 and @@another@@"
        assert unfinished(text) == ["another"]

    @pytest.mark.skipif(not RESULTS.exists(), reason="not measured yet: python -m benchmarks.scaling measure")
    def test_document_is_that_of_the_results(self) -> None:
        """docs/scaling.md is the text with the figures of the results file: python -m benchmarks.scaling page."""
        assert DOCUMENT.read_text() == filled(TEMPLATE.read_text(), named(_read(RESULTS), _start_s()))


class TestSimulateCommand:
    def test_prints_what_there_is_to_know(self) -> None:
        """Utilisation, waits, latencies, refusals, goodput, the same each time."""
        arguments = ["simulate", "--rate", "700", "--service-ms", "1", "--replicas", "1", "--count", "5000"]
        one, other = (CliRunner().invoke(main, arguments) for _ in range(2))
        assert one.exit_code == 0
        assert one.output == other.output
        assert re.search(r"utilisation (6[5-9]|7[0-5])\.", one.output)
        assert "refused     0.00%" in one.output
