"""A change is made by all processes or by none, whatever one of them does."""

import subprocess
import sys

import pytest

FOUND = {"breaks": "internal: prepare: ZeroDivisionError", "refuses": "invalid_artifact: no good"}
SILENT = "not_ready: a process of the server did not answer; nothing changed"


def said(case: str) -> list[str]:
    """Every line of the toy processes; the server must end well."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.service.processes.toy", case],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    lines = [line for line in run.stdout.splitlines() if not line.startswith("{")]
    assert lines, run.stderr
    return lines


def of(lines: list[str], child: int) -> list[str]:
    """What one child said."""
    return [line[2:] for line in lines if line.startswith(str(child))]


def test_all_prepare_before_any_commits() -> None:
    """Two changes at once are made one after the other."""
    lines = said("behaves")
    told = [line for line in lines if line[2:] in ("prepare", "commit")]
    assert [sorted(told[first : first + 3]) for first in range(0, 12, 3)] == [
        [f"{child} {what}" for child in range(3)] for what in ("prepare", "commit", "prepare", "commit")
    ]
    assert of(lines, 0)[-2:] == ["changed", "changed"]
    assert "0 metrics [1, 2]" in lines


@pytest.mark.parametrize("case", ["refuses", "breaks"])
def test_a_process_that_cannot(case: str) -> None:
    """Its reason reaches whoever asked, and nobody commits."""
    lines = said(case)
    assert "commit" not in " ".join(lines)
    for child in range(3):
        assert [what for what in of(lines, child) if what in ("prepare", "discard")] == ["prepare", "discard"] * 2
    assert of(lines, 0)[-2:] == [FOUND[case]] * 2


@pytest.mark.parametrize("case", ["sleeps", "dies"])
def test_a_process_that_does_not_answer(case: str) -> None:
    """Nobody commits while it may still; others' counts are there without it."""
    lines = said(case)
    assert of(lines, 0)[-2] == SILENT
    assert of(lines, 1)[:2] == ["prepare", "discard"]
    assert f"0 metrics [1{'' if case == 'sleeps' else ', 2'}]" in lines


def test_a_process_that_hangs() -> None:
    """One whose event loop does not come round is killed and replaced; those that do are left alone."""
    lines = said("hangs")
    assert of(lines, 2) == ["replaced"]
    assert not [line for line in lines if line[0] in "01"]
