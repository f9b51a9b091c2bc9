"""The load generator wrk, and what it counted."""

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from benchmarks.peers.contestants import HERE
from benchmarks.peers.exchange import Unavailable

_MARK: Final = "figures "
_TROUBLES: Final = ("connect", "read", "write", "status", "timeout")
Figures = Mapping[str, int]  # requests, duration_us, p50_us, p90_us, p99_us, max_us, and the troubles


@final
@dataclass(frozen=True, slots=True)
class Target:
    """Where to post, and the folder of bodies (files named 0, 1, ...) to post in turn."""

    url: str
    media_type: str
    folder: Path
    num_bodies: int


def load(target: Target, connections: int, seconds: float) -> Figures:
    """What wrk counts in that time with so many connections, each with one request in flight.

    Raises:
        Unavailable: a request was not answered with 2xx.
    """
    whole_s = max(1, round(seconds))  # wrk knows whole seconds only
    command = [
        "wrk", "--threads=1", f"--connections={connections}", f"--duration={whole_s}s", "--timeout=30s",
        f"--script={HERE / 'post.lua'}", target.url, "--",
        str(target.folder), str(target.num_bodies), target.media_type,
    ]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, timeout=whole_s + 60, check=False)
    if ended.returncode != 0:
        raise Unavailable(f"wrk: {(ended.stderr or ended.stdout).strip()[:200]}")
    return parse(ended.stdout)


def parse(printed: str) -> Figures:
    """The figures in what wrk and `post.lua` printed.

    Raises:
        Unavailable: there are none, or they tell of answers that are not 2xx, or of none at all.
    """
    lines = [line.removeprefix(_MARK) for line in printed.splitlines() if line.startswith(_MARK)]
    if len(lines) != 1:
        raise Unavailable(f"wrk printed {len(lines)} lines of figures, want 1")
    figures: dict[str, Any] = json.loads(lines[0])
    troubles = {name: figures[name] for name in _TROUBLES if figures[name]}
    if troubles or not figures["requests"]:
        raise Unavailable(f"{figures['requests']} requests answered, troubles: {troubles or 'none'}")
    return figures
