"""The HTML report of `mha loadtest`, in a real browser: its charts are there and carry the numbers of the JSON."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page

from tests.browser import browser, needs_browser
from tests.served import clean_environment, serving

pytestmark = needs_browser
PHONE = {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, seeds_repository: Path) -> Path:
    """Of a report as JSON and as a page: two levels of a real run."""
    folder = tmp_path_factory.mktemp("report")
    with serving(folder / "log", "--models", str(seeds_repository)) as server:
        command = [sys.executable, "-m", "mha", "loadtest", server.url, "--rate", "40,80", "--duration", "5"]
        files = ["--json", str(folder / "report.json"), "--html", str(folder / "report.html")]
        ended = subprocess.run([*command, "--slo", "p50=1s", *files], env=clean_environment(), check=False, timeout=120)
    assert ended.returncode in (0, 3)  # beside other tests the generator may have been late, and says so
    return folder


@pytest.fixture(scope="module")
def report(folder: Path) -> dict[str, Any]:
    """In numbers."""
    read: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return read


@pytest.fixture
def page(folder: Path) -> Iterator[Page]:
    """Opened, in a browser that may fetch nothing else."""
    with browser() as opened:
        page = opened.new_page(viewport={"width": 1200, "height": 900})
        faults: list[str] = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("request", lambda request: faults.append(request.url) if request.url.startswith("http") else None)
        page.goto((folder / "report.html").as_uri())
        page.wait_for_selector("#stages .main-svg")
        yield page
        assert faults == []


def drawn(page: Page, chart: str) -> list[dict[str, Any]]:
    """What plotly has drawn."""
    lines = "data.map(one => ({name: one.name, x: Array.from(one.x), y: Array.from(one.y)}))"
    data: list[dict[str, Any]] = page.evaluate(f"document.getElementById('{chart}').{lines}")
    return data


def test_throughput_and_latency_of_each_level(page: Page, report: dict[str, Any]) -> None:
    """A point a level for each percentile."""
    lines = drawn(page, "throughput")
    assert [line["name"] for line in lines] == ["p50", "p90", "p99"]
    for line in lines:
        assert line["x"] == [level["per_second"]["requests"] for level in report["levels"]]
        assert line["y"] == [level["latency_ms"][line["name"]] for level in report["levels"]]


def test_distribution_ends_at_the_largest(page: Page, report: dict[str, Any]) -> None:
    """A line a level."""
    lines = drawn(page, "distribution")
    assert [line["name"] for line in lines] == [level["load"] for level in report["levels"]]
    for line, level in zip(lines, report["levels"], strict=True):
        assert line["y"] == level["curve"]["ms"]
        assert line["y"][-1] == pytest.approx(level["latency_ms"]["max"], rel=0.002)


def test_time_line_has_every_window(page: Page, report: dict[str, Any]) -> None:
    """Medians, tails and answers a second."""
    windows = [window for level in report["levels"] for window in level["windows"]]
    lines = {line["name"]: line["y"] for line in drawn(page, "timeline")}
    assert lines["p50"] == [window["p50_ms"] for window in windows]
    assert lines["p99"] == [window["p99_ms"] for window in windows]
    assert lines["answers/s"] == [window["answers_a_second"] for window in windows]


def test_where_the_time_went_adds_up(page: Page, report: dict[str, Any]) -> None:
    """The parts of each level are the client's mean."""
    parts = drawn(page, "stages")
    assert [part["name"] for part in parts] == ["decode", "queue", "compute", "encode", "other work", "gap"]
    for place, level in enumerate(report["levels"]):
        assert sum(part["y"][place] for part in parts) == pytest.approx(level["service_ms"]["mean"], rel=0.01)


def test_tables_and_verdict(page: Page, report: dict[str, Any]) -> None:
    """They say what the terminal says, and the whole report is in the page as JSON."""
    assert page.inner_text("#verdict") == ("; ".join(report["verdict"]["reasons"]) or "Nothing to object to.")
    assert page.locator("table").first.locator("tbody tr").count() == 2
    assert "40/s poisson" in page.inner_text("body")
    assert (
        json.loads(page.inner_text("#report") or page.evaluate("document.getElementById('report').textContent"))
        == report
    )


def test_fits_a_phone(page: Page) -> None:
    """Nothing but its own tables is wider than the screen."""
    page.set_viewport_size(PHONE)
    page.wait_for_timeout(300)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


def test_dark(page: Page) -> None:
    """Who prefers it gets a dark page."""
    page.emulate_media(color_scheme="dark")
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert max(int(part) for part in background[4:-1].split(",")) < 64
