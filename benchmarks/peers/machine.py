"""What the figures were measured on, and with which versions."""

import platform
import subprocess
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.peers.contestants import HERE, ROOT, Contestant
from service.cpus import usable_cpus

# What decides how fast a processor multiplies, in float32 and in int8.
_INSTRUCTIONS: Final = ("avx2", "avx512f", "avx_vnni", "avx512_vnni", "amx_int8")


def description() -> dict[str, Any]:
    """The machine."""
    return {
        "cpu": _cpu("model name"),
        "instructions": [name for name in _INSTRUCTIONS if name in _cpu("flags").split()],
        "cores": usable_cpus(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def commit() -> dict[str, Any]:
    """The commit that is checked out, and whether files differ from it."""
    return {"commit": _git("rev-parse", "HEAD"), "modified": bool(_git("status", "--porcelain"))}


def versions(contestant: Contestant) -> dict[str, str]:
    """The packages in its environment."""
    if contestant.environment_name is None:
        return dict(sorted((one.metadata["Name"], one.version) for one in distributions()))
    pins = (HERE / "requirements" / f"{contestant.environment_name}.txt").read_text().split()
    return dict(pin.split("==") for pin in pins)


def _cpu(field: str) -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "unknown")


def _git(*arguments: str) -> str:
    ended = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return ended.stdout.strip()
