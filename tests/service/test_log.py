"""Log lines, in processes of their own, because logging is configured once a process."""

import json
import subprocess
import sys
from typing import Any

import pytest

from service.log import Sampled

SETUP = """
import logging
import structlog
from service.log import configure_logging
configure_logging({level!r}, {log_format!r})
log = structlog.get_logger("service.test")
uvicorn, library = logging.getLogger("uvicorn.error"), logging.getLogger("library")
"""
FAIL = """
try:
    raise ValueError("broken\\nin two")
except ValueError:
    {}
"""


def output_of(code: str, level: str = "info", log_format: str = "json") -> str:
    """What a process that logs writes to stdout; it writes nothing to stderr."""
    script = SETUP.format(level=level, log_format=log_format) + code
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == ""
    return done.stdout


def lines_of(code: str, level: str = "info", log_format: str = "json") -> list[dict[str, Any]]:
    """Each line, which is one JSON object."""
    return [json.loads(line) for line in output_of(code, level, log_format).splitlines()]


class TestJson:
    def test_one_line_an_event(self) -> None:
        """Our events, uvicorn's and any library's are one JSON object a line, with event, level and UTC time."""
        code = """
log.info("ready", models=["a/1"], port=1013)
uvicorn.warning("bad request from %s", "client")
library.error("two\\nlines", extra={"k": 1})
"""
        ours, uvicorns, others = lines_of(code)
        assert all(line.pop("timestamp").endswith("Z") for line in (ours, uvicorns, others))
        assert ours == {"event": "ready", "level": "info", "models": ["a/1"], "port": 1013}
        assert uvicorns == {"event": "bad request from client", "level": "warning"}
        assert others == {"event": "two\nlines", "level": "error"}

    @pytest.mark.parametrize(
        "logging",
        [
            pytest.param('log.error("failed", exc_info=True)', id="ours"),
            pytest.param('log.exception("failed")', id="ours_exception"),
            pytest.param('uvicorn.error("failed", exc_info=True)', id="uvicorn"),
            pytest.param('library.exception("failed")', id="library"),
        ],
    )
    def test_an_exception_stands_on_its_events_line(self, logging: str) -> None:
        """A traceback is a field of its event, not lines of its own."""
        (line,) = lines_of(FAIL.format(logging))
        assert line["event"] == "failed"
        assert line["exception"].startswith("Traceback (most recent call last):\n")
        assert line["exception"].endswith("ValueError: broken\nin two")

    def test_warnings_of_python_are_events(self) -> None:
        """What a library warns of is a line like others, not text on stderr."""
        (line,) = lines_of("import warnings\nwarnings.warn('numpy has news')")
        assert line["level"] == "warning"
        assert "UserWarning: numpy has news" in line["event"]

    def test_auto_is_json_where_there_is_no_terminal(self) -> None:
        """`auto` writes JSON into a pipe."""
        (line,) = lines_of('log.info("ready")', log_format="auto")
        assert line["event"] == "ready"


class TestConsole:
    def test_is_text(self) -> None:
        """`console` writes lines for people."""
        line = output_of('log.info("ready", port=1013)', log_format="console")
        assert not line.startswith("{")
        assert "ready" in line
        assert "1013" in line


class TestLevel:
    @pytest.mark.parametrize(
        ("level", "want"),
        [
            pytest.param("debug", ["debug", "info", "warning", "error"], id="debug"),
            pytest.param("info", ["info", "warning", "error"], id="info"),
            pytest.param("warning", ["warning", "error"], id="warning"),
            pytest.param("error", ["error"], id="error"),
        ],
    )
    def test_is_the_least_that_is_logged(self, level: str, want: list[str]) -> None:
        """What is below the level is not written, ours or others'."""
        code = "for each in (log, library):\n    each.debug('x'); each.info('x'); each.warning('x'); each.error('x')"
        assert [line["level"] for line in lines_of(code, level)] == want * 2

    @pytest.mark.parametrize("level", ["debug", "info"])
    def test_uvicorns_chatter_is_left_out(self, level: str) -> None:
        """Of uvicorn only warnings are written; its own start and stop lines say less than ours."""
        code = "uvicorn.info('Started server process'); uvicorn.warning('Invalid HTTP request received.')"
        assert [line["event"] for line in lines_of(code, level)] == ["Invalid HTTP request received."]


class TestSampled:
    def test_one_a_period_tells_of_the_others(self) -> None:
        """The first is written; then one a period, with the number of those that were left out since."""
        times = iter([0.0, 0.0, 0.1, 0.9, 1.0, 1.5, 7.0, 7.5])
        sampled = Sampled(1.0, lambda: next(times))
        assert [sampled.turn() for _ in range(7)] == [0, None, None, 2, None, 1, None]
