"""`python -m benchmarks.peers`: measures the service and its peers, and writes every raw figure to a results file."""

import datetime
import shutil
import signal
import sys
from pathlib import Path
from typing import Any, Final

import click
import orjson

from benchmarks.peers import planned, precision
from benchmarks.peers.contestants import CONTESTANTS, OURS, ROOT, Contestant
from benchmarks.peers.environments import export_graphs, prepare
from benchmarks.peers.exchange import Unavailable
from benchmarks.peers.machine import commit, description, versions
from benchmarks.peers.race import race
from benchmarks.peers.results import RESULTS
from benchmarks.peers.workloads import WORKLOADS

_FEW_ROUNDS: Final = 3
_FEW_SECONDS: Final = 5.0


def _say(line: str) -> None:
    click.echo(line, err=True)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--only", multiple=True, type=click.Choice([one.name for one in CONTESTANTS]), help="These contestants.")
@click.option("--workload", "names", multiple=True, type=click.Choice([one.name for one in WORKLOADS]))
@click.option("--rounds", default=_FEW_ROUNDS, type=click.IntRange(1), help="Turns that each contestant takes.")
@click.option("--seconds", default=_FEW_SECONDS, type=click.FloatRange(1), help="How long a turn lasts.")
@click.option("--out", default=RESULTS, type=click.Path(dir_okay=False, path_type=Path), help="The results file.")
@click.option("--again", is_flag=True, help="Put the chosen workloads into the results file that is there.")
def main(only: tuple[str, ...], names: tuple[str, ...], rounds: int, seconds: float, out: Path, **how: bool) -> None:
    """Measures the service and its peers on the same graph; `make bench` runs this and renders README's table.

    The first run installs every peer below .bench. A run with fewer rounds, shorter turns or not all contestants and
    workloads is marked as partial in the results. With --again a whole run is kept but for the workloads named, which
    were disturbed or have changed: on the same machine, with the same rounds, and each says when it was measured.
    """
    if shutil.which("wrk") is None:
        sys.exit("wrk is not installed (Debian and Ubuntu: apt-get install wrk)")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # not before its servers have ended
    earlier = _earlier(out, only, rounds, seconds) if how["again"] else None
    chosen = [one for one in CONTESTANTS if not only or one.name in only or one.name == OURS]
    workloads = [one for one in WORKLOADS if not names or one.name in names]
    try:
        export_graphs()
        in_process, int8 = planned.measure(), precision.measure()
    except Unavailable as error:
        sys.exit(str(error))
    ready, unavailable = _prepared(chosen)
    partial = rounds < _FEW_ROUNDS or seconds < _FEW_SECONDS or bool(only or names)
    results: dict[str, Any] = {
        "format": 1, "partial": partial, "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **commit(), "machine": description(), "rounds": rounds, "seconds": seconds,
        "packages": {one.name: versions(one) for one in ready}, "unavailable": unavailable,
        "planned": in_process, "int8": int8, "workloads": [],
    }  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    if earlier is not None:
        measured = {"date": results["date"], **commit()}
        results = earlier
    for workload in workloads:
        _say(f"{workload.title}")
        raced = race(workload, ready, rounds, seconds, _say)
        if earlier is None:
            results["workloads"].append(raced)
        else:
            results["workloads"] = [
                {**raced, "again": measured} if one["name"] == workload.name else one for one in results["workloads"]
            ]
        # After each, since an hour's figures are worth keeping when the next workload fails.
        out.write_bytes(orjson.dumps(results, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    _say(f"written: {out.relative_to(ROOT) if out.is_relative_to(ROOT) else out}")


def _earlier(out: Path, only: tuple[str, ...], rounds: int, seconds: float) -> dict[str, Any]:
    """The results that are there, if a workload measured now may stand among them."""
    if not out.exists():
        sys.exit(f"--again: {out} is not there")
    earlier: dict[str, Any] = orjson.loads(out.read_bytes())
    same = {"machine": description(), "rounds": rounds, "seconds": seconds}
    different = [name for name, value in same.items() if earlier[name] != value]
    if only or different:
        sys.exit(f"--again: want all contestants and the same {', '.join(different) or 'ones'} as in {out}")
    return earlier


def _prepared(contestants: list[Contestant]) -> tuple[list[Contestant], dict[str, str]]:
    """Those that could be installed, and why the others could not."""
    ready, unavailable = [], {}
    for contestant in contestants:
        try:
            prepare(contestant)
        except Unavailable as error:
            unavailable[contestant.name] = str(error)
            _say(f"{contestant.name}: {error}")
        else:
            ready.append(contestant)
    return ready, unavailable


if __name__ == "__main__":
    main()
