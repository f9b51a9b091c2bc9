"""The environment of each peer, made on demand below `.bench/venvs`, and the graph that all of them serve."""

import subprocess
import sys
from pathlib import Path

from benchmarks.peers.contestants import BENCH, GRAPH, HERE, INT8, ROOT, Contestant
from benchmarks.peers.exchange import Unavailable


def prepare(contestant: Contestant) -> None:
    """Installs its pinned requirements, unless they are there.

    Raises:
        Unavailable: they cannot be installed on this Python; with the last line of what pip says.
    """
    if contestant.environment_name is None:
        return
    folder = BENCH / "venvs" / contestant.environment_name
    requirements = HERE / "requirements" / f"{contestant.environment_name}.txt"
    installed = folder / "installed.txt"
    if installed.exists() and installed.read_text() == requirements.read_text():
        return
    _run([sys.executable, "-m", "venv", "--clear", str(folder)])
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    _run([*pip, "--requirement", str(requirements)])
    installed.write_text(requirements.read_text())


def export_graphs() -> None:
    """Exports the layer of 512 hiddens and 8 heads, in fp32 and in int8.

    Anew each time, since what is there may be another version's.

    Raises:
        Unavailable: the export failed.
    """
    sizes = ["--num-hiddens", "512", "--num-heads", "8", "--seed", "0"]
    name = ["--name", "attention", "--version", "1", "--force"]
    for graph, precision in ((GRAPH, "fp32"), (INT8, "int8")):
        where = ["--precision", precision, "--out", str(graph.parents[2])]
        _run([sys.executable, str(ROOT / "mha.py"), "export", *sizes, *name, *where])


def _run(command: list[str], cwd: Path = ROOT) -> None:
    ended = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        lines = (ended.stderr or ended.stdout).strip().splitlines() or ["no word"]
        raise Unavailable(f"cannot be made ready: {lines[-1][:200]}")
