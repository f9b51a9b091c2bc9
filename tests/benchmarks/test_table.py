"""README's table: wins, losses, and contestants that could not be measured."""

from typing import Any

import orjson
import pytest

from benchmarks.peers.results import RESULTS
from benchmarks.peers.table import END, README, START, render, replaced


def lane(name: str, requests: int, p50_us: int = 1000, form: str = "raw", unavailable: str | None = None) -> Any:
    figures = {"requests": requests, "duration_us": 1_000_000, "p50_us": p50_us}
    return {"name": name, "form": form, "rounds": [figures] * 3, "unavailable": unavailable}


def results(*lanes: Any, name: str = "dense-16", measure: str = "rate", **changes: Any) -> dict[str, Any]:
    return {
        "partial": False, "date": "2031-07-05T03:02:01+00:00", "commit": "f00d" * 10, "modified": False,
        "machine": {"cpu": "Abacus", "cores": 2, "memory_gib": 7.5, "python": "3.11.13"},
        "rounds": 3, "seconds": 5.0, "packages": {"mosec": {"mosec": "1.2.3"}}, "unavailable": {},
        "workloads": [{"name": name, "connections": 32, "measure": measure, "rows": 1, "lanes": list(lanes)}],
        **changes,
    }  # fmt: skip


def cells(table: str, row: int = 0) -> dict[str, str]:
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    return dict(zip(lines[0], lines[2 + row], strict=True))


class TestCells:
    def test_win(self) -> None:
        """Twice the rate is 2.00, with its spread, and stands in no bold."""
        row = cells(render(results(lane("mha-service", 2000), lane("mosec", 1000))))
        assert row["mha-service"] == "2,000/s"
        assert row["mosec"] == "2.00 (2.00 to 2.00)"

    def test_loss_is_in_bold(self) -> None:
        """Where the peer is faster, the cell says so, and loudly."""
        row = cells(render(results(lane("mha-service", 800), lane("mosec", 1000))))
        assert row["mosec"] == "**0.80** (0.80 to 0.80)"

    def test_latency_counts_the_other_way_round(self) -> None:
        """Half the latency is twice as fast."""
        lanes = lane("mha-service", 1, p50_us=2000), lane("mosec", 1, p50_us=4000)
        row = cells(render(results(*lanes, name="latency-128", measure="latency")))
        assert (row["mha-service"], row["mosec"]) == ("2.00 ms", "2.00 (2.00 to 2.00)")

    def test_overhead_is_that_of_each(self) -> None:
        """Each server's cell is what it adds to the call in process, whose own time stands in its column."""
        lanes = lane("mha-service", 1, 700), lane("in process", 1, 500), lane("mosec", 1, 900)
        row = cells(render(results(*lanes, name="tiny", measure="overhead")))
        assert row["in process"] == "0.50 ms"
        assert row["mha-service"] == "+0.20 ms (+0.20 to +0.20)"
        assert row["mosec"] == "+0.40 ms (+0.40 to +0.40)"

    def test_lower_overhead_of_a_peer_is_in_bold(self) -> None:
        """A peer that adds less than ours is a loss like any other."""
        lanes = lane("mha-service", 1, 700), lane("in process", 1, 500), lane("mosec", 1, 600)
        row = cells(render(results(*lanes, name="tiny", measure="overhead")))
        assert row["mosec"] == "**+0.10 ms (+0.10 to +0.10)**"

    def test_each_form_of_ours_is_a_row(self) -> None:
        """Packed and padded requests of ours stand against the same figures of a peer."""
        lanes = lane("mha-service", 3000, form="packed"), lane("mha-service", 2000, form="safetensors")
        table = render(results(*lanes, lane("mosec", 1000)))
        assert cells(table, 0)["mosec"].startswith("3.00")
        assert cells(table, 1)["mosec"].startswith("2.00")


class TestInProcess:
    def test_int8_stands_with_its_error(self) -> None:
        """What int8 gains is never shown without what it costs."""
        int8 = {
            "request": "(1, 2, 3)", "fp32_ms": 3.0, "int8_ms": 1.5, "ratio": 2.0, "least": 1.9, "most": 2.1,
            "error": 0.0191,
        }  # fmt: skip
        table = render(results(lane("mha-service", 1), int8=int8))
        assert "3.00 ms in fp32, 1.50 ms in int8, 2.0 times as fast (1.90 to 2.10), largest error 1.9%" in table

    def test_instructions_are_named(self) -> None:
        """What the arithmetic depends on stands beside the processor's name."""
        machine = {"cpu": "Abacus", "instructions": ["beads"], "cores": 2, "memory_gib": 7.5, "python": "3.11.13"}
        assert "Abacus with beads, 2 cores" in render(results(lane("mha-service", 1), machine=machine))


class TestMissing:
    def test_contestant_that_could_not_be_installed_is_named(self) -> None:
        """Its cells point to the reason; nobody is left out in silence."""
        table = render(results(lane("mha-service", 1), unavailable={"mosec": "cannot be installed: no wheel"}))
        assert cells(table)["mosec"] == "-<sup>1</sup>"
        assert "<sup>1</sup> mosec: cannot be installed: no wheel" in table

    def test_lane_that_failed_is_named(self) -> None:
        """So does one that was installed and failed, also where figures of some rounds are there."""
        lanes = lane("mha-service", 1), lane("mosec", 1, unavailable="HTTP 500: oh")
        assert "<sup>1</sup> mosec: HTTP 500: oh" in render(results(*lanes))

    def test_same_reason_is_told_once(self) -> None:
        """Rows that fail for one reason share its note."""
        lanes = lane("mha-service", 2, form="packed"), lane("mha-service", 1, form="safetensors")
        assert render(results(*lanes, lane("mosec", 1, unavailable="gone"))).count("mosec: gone") == 1

    def test_ours_is_named_too(self) -> None:
        """A form that the service refuses is a row that says so."""
        table = render(results(lane("mha-service", 0, unavailable="HTTP 422: keys"), lane("mosec", 1)))
        assert cells(table)["mha-service"] == "-<sup>1</sup>"
        assert "mha-service: HTTP 422: keys" in table


class TestAround:
    def test_partial_run_warns(self) -> None:
        """A run with few rounds cannot be mistaken for the real one."""
        assert "partial" in render(results(lane("mha-service", 1), partial=True)).splitlines()[0]

    def test_circumstances_are_told(self) -> None:
        """Machine, versions, date and commit stand below the table."""
        last = render(results(lane("mha-service", 1), modified=True)).splitlines()[-1]
        for fact in ("Abacus", "2 cores", "3.11.13", "mosec 1.2.3", "2031-07-05", "f00df00df00d with changes"):
            assert fact in last

    def test_only_what_is_between_the_markers_changes(self) -> None:
        """The rest of the document stays as it is, and writing twice changes nothing."""
        text = f"above\n{START}\nold\n{END}\nbelow\n"
        once = replaced(text, "new\n")
        assert once == f"above\n{START}\nnew\n{END}\nbelow\n"
        assert replaced(once, "new\n") == once

    @pytest.mark.parametrize(
        "text",
        [
            pytest.param("nothing", id="none"),
            pytest.param(f"{START} without an end", id="no_end"),
            pytest.param(f"{END}{START}", id="wrong_order"),
            pytest.param(f"{START}{END}{START}{END}", id="twice"),
        ],
    )
    def test_markers_must_be_there_once(self, text: str) -> None:
        """A document without a place for the table is not written to."""
        with pytest.raises(ValueError, match="once each"):
            replaced(text, "new\n")

    def test_readme_is_that_of_the_results(self) -> None:
        """README shows the committed results, or nothing while there are none."""
        text = README.read_text()
        table = render(orjson.loads(RESULTS.read_bytes())) if RESULTS.exists() else ""
        assert text == replaced(text, table)
