"""Dashboard, alerts and documents speak of metrics that exist, and a real Prometheus understands every query."""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from service.settings import Settings, environment_name
from tests.served import ServerProcess, free_port, serving

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
RULES = DEPLOY / "prometheus" / "alerts.yml"
DASHBOARD = DEPLOY / "grafana" / "mha-service.json"
WATCHING = ROOT / "docs" / "observability.md"
DOCUMENTS = [
    DASHBOARD, RULES, ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(DEPLOY.rglob("*.yaml"))
]  # fmt: skip
# A name of ours, or one of the process' own; part of a path, a module or a pattern is something else.
METRIC = re.compile(r"(?<![\w./-])(?:mha|process)_[a-z_]+(?![\w*(=/.])")
# What a histogram adds to the name that documents call it by.
SUFFIXES = ("_bucket", "_sum", "_count")
LIMIT = 'instance=~"$instance"'

promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool here (Debian: prometheus)")
prometheus = pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus here")


def panels() -> list[dict[str, Any]]:
    """Of the dashboard, in its order."""
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return found


def queries(panel: dict[str, Any]) -> list[str]:
    """Of one panel."""
    return [target["expr"] for target in panel.get("targets", ())]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, seeds_repository: Path) -> Iterator[ServerProcess]:
    """A server with nothing special about it."""
    with serving(tmp_path_factory.mktemp("watched") / "log", "--models", str(seeds_repository)) as server:
        yield server


@pytest.fixture(scope="module")
def exposed(watched: ServerProcess) -> set[str]:
    """The names of all samples after one request."""
    _ask(watched)
    lines = watched.client.get("/metrics").text.splitlines()
    return {re.split(r"[{ ]", line, maxsplit=1)[0] for line in lines if not line.startswith("#")}


def _ask(server: ServerProcess) -> None:
    assert server.client.post("/v1/attention", json={"queries": [[[0.5] * 100]]}).status_code == 200


class TestNames:
    @pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
    def test_every_metric_exists(self, path: Path, exposed: set[str]) -> None:
        """What is named as a metric is in /metrics after one request."""
        families = {name.removesuffix(suffix) for name in exposed for suffix in SUFFIXES}
        assert set(METRIC.findall(path.read_text())) <= exposed | families

    def test_they_are_found(self) -> None:
        """The dashboard and the alerts name metrics at all."""
        assert len(set(METRIC.findall(DASHBOARD.read_text()))) > 15
        assert len(set(METRIC.findall(RULES.read_text()))) > 4


class TestDashboard:
    def test_documented(self) -> None:
        """docs/observability.md has each panel with its description and its queries, and no other."""
        lines = WATCHING.read_text().partition("## Alerts")[0].splitlines()
        _, *rows = (re.split(r"(?<!\\)\|", line)[1:-1] for line in lines if line.startswith("| "))
        assert [tuple(cell.strip().replace(r"\|", "|") for cell in row) for row in rows] == [
            (panel["title"], panel["description"], "<br>".join(f"`{_unlimited(query)}`" for query in queries(panel)))
            if queries(panel)
            else (f"**{panel['title']}**", "", "")
            for panel in panels()
        ]

    def test_every_query_can_be_limited_to_a_server(self) -> None:
        """Each selector of a query has the dashboard's variable."""
        for query in (query for panel in panels() for query in queries(panel)):
            assert query.count(LIMIT) == len(METRIC.findall(query)) + query.count("up{"), query

    def test_nothing_lies_upon_anything(self) -> None:
        """Panels have ids of their own, and places of their own within 24 columns."""
        assert len({panel["id"] for panel in panels()}) == len(panels())
        taken: set[tuple[int, int]] = set()
        for panel in panels():
            place = panel["gridPos"]
            columns, rows = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
            cells = {(column, row) for column in columns for row in rows}
            assert columns.stop <= 24
            assert not cells & taken, panel["title"]
            taken |= cells


def _unlimited(query: str) -> str:
    return query.replace(f"{{{LIMIT}}}", "").replace(f"{LIMIT}, ", "").replace(f", {LIMIT}", "")


class TestAlerts:
    @promtool
    def test_fire_when_they_should(self) -> None:
        """Prometheus' own tool finds the rules right, and each fires and keeps still as alerts_test.yml says."""
        for command in (("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml")):
            ran = subprocess.run(["promtool", *command], cwd=RULES.parent, capture_output=True, text=True, check=False)
            assert ran.returncode == 0, ran.stdout + ran.stderr

    def test_each_is_tested_and_documented(self) -> None:
        """Each has a case in which it fires, one in which it does not, and a row in the document with its severity."""
        tests = yaml.safe_load((RULES.parent / "alerts_test.yml").read_text())["tests"]
        cases = {(case["alertname"], bool(case["exp_alerts"])) for test in tests for case in test["alert_rule_test"]}
        (group,) = yaml.safe_load(RULES.read_text())["groups"]
        rules = {rule["alert"]: rule["labels"]["severity"] for rule in group["rules"]}
        assert cases == {(name, fires) for name in rules for fires in (True, False)}
        rows = re.findall(r"^\| `(\w+)` \|.*\| (\w+) \|$", WATCHING.read_text(), re.MULTILINE)
        assert dict(rows) == rules


@pytest.fixture
def scraped(tmp_path: Path, watched: ServerProcess) -> Iterator[str]:
    """A real Prometheus with our configuration, which scrapes the server under test every half second."""
    address = f"127.0.0.1:{free_port()}"
    config = (DEPLOY / "prometheus" / "prometheus.yml").read_text()
    config = config.replace("mha-service:8000", watched.url.removeprefix("http://")).replace(": 5s", ": 500ms")
    (tmp_path / "prometheus.yml").write_text(config)
    shutil.copy(RULES, tmp_path)
    command = ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, f"--web.listen-address={address}"], cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            yield f"http://{address}"
        finally:
            process.terminate()
            process.wait(30)


@prometheus
def test_every_query_is_answered(scraped: str, watched: ServerProcess) -> None:
    """A real Prometheus that has scraped a server in use answers every query of the dashboard, and raises no alarm."""
    missing = [
        query.replace("$instance", ".*").replace("$__rate_interval", "10s")
        for panel in panels()
        for query in queries(panel)
    ]
    deadline = time.monotonic() + 60
    with httpx.Client(base_url=scraped) as asking:
        while missing and time.monotonic() < deadline:
            _ask(watched)
            time.sleep(0.2)
            try:
                missing = [query for query in missing if not _answer(asking, query)]
            except httpx.TransportError:
                continue  # it is still starting
        assert not missing
        groups = asking.get("/api/v1/rules").json()["data"]["groups"]
        states = [rule["state"] for group in groups for rule in group["rules"]]
        assert states == ["inactive"] * 7


def _answer(asking: httpx.Client, query: str) -> list[Any]:
    said = asking.get("/api/v1/query", params={"query": query})
    if said.status_code == 503:
        return []  # it is still starting
    assert said.json()["status"] == "success", (query, said.text)
    return [one for one in said.json()["data"]["result"] if one["value"][1] != "NaN"]


class TestCompose:
    def test_settings_exist(self) -> None:
        """Each MHA_* of the service is a setting, and it has the time to end that they give it."""
        service = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["mha-service"]
        ours = {name for name in service["environment"] if name.startswith("MHA_")}
        assert ours <= {environment_name(setting) for setting in Settings.model_fields}
        spent_s = sum(float(service["environment"][f"MHA_DRAIN_{what}_S"]) for what in ("DELAY", "TIMEOUT"))
        assert float(service["stop_grace_period"].removesuffix("s")) > spent_s

    def test_what_is_mounted_is_there(self) -> None:
        """Files and folders of ours exist, and are mounted so that they cannot be written."""
        services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
        mounts = [volume for one in services.values() for volume in one.get("volumes", ()) if volume.startswith(".")]
        assert len(mounts) == 3
        for mount in mounts:
            source, _, mode = mount.split(":")
            assert (DEPLOY / source).exists(), mount
            assert mode == "ro"

    def test_scraped_where_it_listens(self) -> None:
        """Prometheus scrapes the service by its name and port, and Grafana asks Prometheus by its."""
        services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
        config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
        (target,) = config["scrape_configs"][0]["static_configs"][0]["targets"]
        name, _, port = target.partition(":")
        assert f"127.0.0.1:{port}:{port}" in services[name]["ports"]
        source = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text())
        assert source["datasources"][0]["url"] == "http://prometheus:9090"
