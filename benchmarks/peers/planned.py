"""The figures of `benchmarks/ragged.py`, which is in process and has no peers, for the same results file."""

import re
import subprocess
import sys
from typing import Any

from benchmarks.peers.contestants import GRAPH, ROOT
from benchmarks.peers.exchange import Unavailable


def measure() -> dict[str, Any]:
    """What that benchmark prints, run in a process of its own.

    Raises:
        Unavailable: it failed.
    """
    command = [sys.executable, "-m", "benchmarks.ragged", str(GRAPH.parent)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise Unavailable(f"ragged.py: {ended.stderr.strip()[-200:]}")
    return parse(ended.stdout)


def parse(printed: str) -> dict[str, Any]:
    """The request, both times and their ratio.

    Raises:
        Unavailable: something of that is missing.
    """
    found = {name: re.search(rf"^{name}\s+([\d.]+)", printed, re.MULTILINE) for name in ("padded", "planned", "ratio")}
    if not all(found.values()):
        raise Unavailable(f"ragged.py printed {printed[:200]!r}")
    padded, planned, ratio = (float(match[1]) for match in found.values() if match)
    return {"request": printed.splitlines()[0], "padded_ms": padded, "planned_ms": planned, "ratio": ratio}
