"""What the documents say is what there is: settings, routes, errors, metrics, and examples that run."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from heads.cli import heads
from loadtest.cli import measure
from service.http.errors import STATUS
from service.http.parameters import NAMES
from service.http.views import MEDIA_TYPES
from service.settings import Settings, environment_name, flag_name
from service.start import codecs
from tests.image.engines import IMAGE, RUN
from tests.served import ServerProcess

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
API = (ROOT / "docs" / "api.md").read_text()
LOADTEST = (ROOT / "docs" / "loadtest.md").read_text()
SETTINGS = (ROOT / "docs" / "settings.md").read_text()


def table_rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.fixture(scope="module")
def openapi(server: ServerProcess) -> dict[str, Any]:
    """What the server says of itself."""
    answer: dict[str, Any] = server.client.get("/openapi.json").json()
    return answer


def example_of(path: str, operation: dict[str, Any]) -> tuple[str, Any]:
    """The address and JSON body of an operation's own example."""
    for parameter in operation.get("parameters", ()):
        if parameter["in"] == "path":
            path = path.replace(f"{{{parameter['name']}}}", parameter["example"])
    content = operation.get("requestBody", {}).get("content", {})
    return path, content.get("application/json", {}).get("example")


class TestSettings:
    @pytest.mark.parametrize("setting", Settings.model_fields)
    def test_documented(self, setting: str) -> None:
        """Every setting has a row with its flag, variable and default."""
        (row,) = (row for row in table_rows(SETTINGS) if row[0] == f"`{flag_name(setting)}`")
        assert row[1] == f"`{environment_name(setting)}`"
        default = Settings.model_fields[setting].default
        assert row[2] == ("none" if default is None else f"`{default}`".replace(".0`", "`"))

    def test_nothing_else_is(self) -> None:
        """No row is about a setting that does not exist."""
        assert sum(row[0].startswith("`--") for row in table_rows(SETTINGS)) == len(Settings.model_fields)


class TestLoadTest:
    def test_every_option_is_documented(self) -> None:
        """Each has a row, and no row is about an option that does not exist."""
        rows = [row[0] for row in table_rows(LOADTEST) if row[0].startswith("`--")]
        documented = {flag for row in rows for flag in re.findall(r"(?<![\w-])--?[\w-]+", row)}
        options = {flag for option in measure.params for flag in option.opts if flag.startswith("-")}
        assert documented == options


class TestHeads:
    @pytest.mark.parametrize("name", sorted(heads.commands))
    def test_every_option_is_documented(self, name: str) -> None:
        """Each is named by the document, and the document names no other."""
        documented = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", (ROOT / "docs" / "heads.md").read_text()))
        options = {
            command: {flag for option in heads.commands[command].params for flag in option.opts if flag[:2] == "--"}
            for command in heads.commands
        }
        assert options[name] <= documented
        assert documented <= set().union(*options.values())


class TestContainer:
    def test_run_as_the_image_is_tested(self) -> None:
        """The README runs a container with the flags that `make test-image` gives it."""
        (line,) = re.findall(r"^docker (.*)$", README, re.MULTILINE)
        words = shlex.split(line)
        assert tuple(words[: len(RUN)]) == RUN
        assert words[len(RUN) :: 2] == ["--publish", "--volume", IMAGE.partition("/")[2]]
        assert words[len(RUN) + 3].endswith(":/models:ro")


class TestRoutes:
    def test_every_route_is_documented(self, openapi: dict[str, Any]) -> None:
        """Each route of the OpenAPI description is in docs/api.md, with its method."""
        for path, methods in openapi["paths"].items():
            for method in methods:
                assert f"`{method.upper()} {path}`" in API, path

    def test_every_documented_route_answers(self, server: ServerProcess) -> None:
        """Each GET that docs/api.md names is answered with 200."""
        for path in re.findall(r"`GET (/[^`]*)`", API):
            url = path.replace("{name}", "attention").replace("{model}", "attention").replace("{version}", "1")
            assert server.client.get(url).status_code == 200, path

    def test_docs_page_needs_nobody_else(self, server: ServerProcess) -> None:
        """The documentation page loads from this server alone, and what it loads is there."""
        page = server.client.get("/docs").text
        loaded = re.findall(r'(?:src|href)="([^"]+)"', page) + re.findall(r"url: '([^']+)'", page)
        assert len(loaded) >= 4
        for url in loaded:
            assert "//" not in url
            assert server.client.get(f"/{url}").status_code == 200, url

    def test_parameters(self, openapi: dict[str, Any]) -> None:
        """Every query parameter of inference is in docs/api.md and in the OpenAPI description."""
        described = [parameter["name"] for parameter in openapi["paths"]["/v1/attention"]["post"]["parameters"]]
        assert described == list(NAMES)
        assert all(any(row[0] == f"`{name}`" for row in table_rows(API)) for name in NAMES)

    def test_media_types(self, openapi: dict[str, Any]) -> None:
        """Every codec is in docs/api.md, in the OpenAPI description and in /v1/models."""
        media_types = set(codecs(Settings()))
        assert media_types == set(MEDIA_TYPES)
        assert media_types == set(openapi["paths"]["/v1/attention"]["post"]["requestBody"]["content"])
        assert all(f"`{media_type}`" in API for media_type in media_types)


class TestErrors:
    @pytest.mark.parametrize(("code", "status"), STATUS.items(), ids=STATUS)
    def test_documented(self, code: str, status: int) -> None:
        """Every code has a row with its status."""
        assert [str(status), f"`{code}`"] in [row[:2] for row in table_rows(API)]

    def test_described(self, openapi: dict[str, Any]) -> None:
        """The OpenAPI entry of inference lists every status it can answer."""
        responses = openapi["paths"]["/v1/attention"]["post"]["responses"]
        assert set(responses) == {"200", *(str(status) for status in STATUS.values() if status != 405)}


def test_metrics_are_documented(server: ServerProcess) -> None:
    """Every metric of ours that the server exposes is in docs/api.md, and every one there is exposed."""
    exposed = set(re.findall(r"^# TYPE (mha_\w+) ", server.client.get("/metrics").text, re.MULTILINE))
    documented = set(re.findall(r"`(mha_\w+)`", API))
    assert {name for name in exposed if not name.endswith("_created")} == documented


class TestExamples:
    def test_every_route_has_one_that_runs(self, lone_server: ServerProcess) -> None:
        """Each route's own example, sent as it is, is answered with 200."""
        described = lone_server.client.get("/openapi.json").json()["paths"]
        # What unloads comes last, and is undone.
        for path in sorted(described, key=lambda path: (path.endswith("unload"), path)):
            for method, operation in described[path].items():
                url, body = example_of(path, operation)
                response = lone_server.client.request(method, url, json=body)
                assert response.status_code == 200, f"{method} {url}: {response.text}"
        assert lone_server.client.post("/v2/repository/models/attention/load").status_code == 200

    @pytest.mark.parametrize(
        "block",
        re.findall(r"```python\n(.*?)```", README + API, re.DOTALL),
        ids=["safetensors", "packed", "tritonclient"],
    )
    def test_python_runs(self, lone_server: ServerProcess, capsys: pytest.CaptureFixture[str], block: str) -> None:
        """The documents' Python runs as it stands but for the port, and prints the shapes its comments promise."""
        code = block.replace("127.0.0.1:8000", lone_server.url.removeprefix("http://"))
        assert code != block
        exec(compile(code, "README.md", "exec"), {})  # noqa: S102  # our own document
        promised = re.findall(r"# (\(.*?\))", "\n".join(line for line in block.splitlines() if "print" in line))
        assert capsys.readouterr().out.splitlines() == promised

    def test_links_lead_somewhere(self) -> None:
        """Every relative link of the documents points to a file that exists."""
        for document in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
            for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", document.read_text()):
                assert (document.parent / target).exists(), f"{document.name}: {target}"
