"""`python -m benchmarks.scaling`: measure, check, plan, page, figures, simulate."""

import datetime
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click
import numpy as np

from benchmarks.peers.contestants import ROOT
from benchmarks.peers.machine import commit, description
from benchmarks.scaling import queues
from benchmarks.scaling.figures import named
from benchmarks.scaling.page import DOCUMENT, TEMPLATE, filled, unfinished
from benchmarks.scaling.plans import SETTLING
from benchmarks.scaling.plans import plan as planned
from benchmarks.scaling.queues import BALANCERS, Fleet

RESULTS: Final = ROOT / "benchmarks" / "results" / "scaling.json"
BOUNDS: Final = RESULTS.parent / "bounds.json"
_MODELS: Final = click.argument("models", type=click.Path(exists=True, file_okay=False, path_type=Path))
_OUT: Final = click.option("--out", default=RESULTS, type=click.Path(dir_okay=False, path_type=Path), help="Results.")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
def main() -> None:
    """The figures of docs/scaling.md. MODELS is a repository of one layer: 512 hiddens, 8 heads, seed 0."""


@main.command()
@_MODELS
@click.option("--rounds", default=5, type=click.IntRange(1), help="Of which the median counts.")
@click.option("--seconds", default=4.0, type=click.FloatRange(1), help="Of a round.")
@_OUT
def measure(models: Path, rounds: int, seconds: float, out: Path) -> None:
    """Measures what requests cost a real server on one core (wants wrk and a second core)."""
    from benchmarks.scaling import costs  # noqa: PLC0415  # torch, which the other commands do not need

    _put(out, "costs", costs.measure(models, rounds, seconds, _say) | {"rounds": rounds, "seconds": seconds})


@main.command()
@_MODELS
@click.option(
    "--length", "lengths", multiple=True, default=(16, 128), type=click.IntRange(1), help="Of self-attention."
)
@click.option("--load", "loads", multiple=True, default=(0.3, 0.5, 0.7, 0.9, 1.5), help="Parts of capacity.")
@click.option("--seconds", default=60.0, type=click.FloatRange(1), help="Of each load.")
@_OUT
def check(models: Path, lengths: Sequence[int], loads: Sequence[float], seconds: float, out: Path) -> None:
    """Compares the simulated queue with a real server's on one core (wants a second core)."""
    from benchmarks.scaling import check as checking  # noqa: PLC0415  # as above

    refusals = _read(out).get("costs", {}).get("refusals", {})
    refusals_s = {int(name.removeprefix("self-")): figures["cpu_s"] for name, figures in refusals.items()}
    rows = []
    for length in lengths:
        for row in checking.check(models, length, loads, seconds, refusals_s.get(length, 0.0)):
            _say(checking.line(row))
            rows.append(row)
    _put(out, "check", {"seconds": seconds, "max_queue_ms": checking.MAX_QUEUE_MS, "rows": rows})


@main.command()
@_OUT
def plan(out: Path) -> None:
    """Simulates the fleets of the document at the costs that `measure` found."""
    costs = _read(out).get("costs")
    if costs is None:
        sys.exit(f"{out} has no costs: measure first")
    _put(out, "plan", planned(costs, _say))


@main.command()
@_OUT
def figures(out: Path) -> None:
    """Prints every figure of the document by name; those that have still to be measured are left out."""
    for name, text in named(_read(out), _start_s()).items():
        click.echo(f"{name}\n{text}\n" if "\n" in text else f"{name} = {text}")


@main.command()
@click.option("--check", "only_check", is_flag=True, help="Change nothing; fail if the document differs.")
@_OUT
def page(only_check: bool, out: Path) -> None:
    """Writes docs/scaling.md: page.md with its figures. What has still to be measured stands there as @@name@@."""
    text = filled(TEMPLATE.read_text(), named(_read(out), _start_s()))
    if not only_check:
        DOCUMENT.write_text(text)
    elif text != DOCUMENT.read_text():
        sys.exit("docs/scaling.md is not what its results say: python -m benchmarks.scaling page")
    for name in unfinished(text):
        _say(f"unfinished: {name}")


@main.command()
@click.option("--rate", default=10_000.0, type=click.FloatRange(0, min_open=True), help="Requests a second.")
@click.option("--service-ms", default=3.0, type=click.FloatRange(0, min_open=True), help="Mean time of a request.")
@click.option("--variation", default=1.0, type=click.FloatRange(0), help="Its standard deviation by its mean.")
@click.option("--replicas", default=50, type=click.IntRange(1))
@click.option("--workers", default=1, type=click.IntRange(1), help="Requests at once of each replica.")
@click.option("--balancer", default="two", type=click.Choice(list(BALANCERS)))
@click.option("--max-queue-ms", default=2000.0, type=click.FloatRange(0), help="The service's own setting.")
@click.option("--refusal-ms", default=0.0, type=click.FloatRange(0), help="What a refusal takes of a worker.")
@click.option("--count", default=200_000, type=click.IntRange(10), help="Requests.")
@click.option("--seed", default=0)
def simulate(balancer: str, rate: float, count: int, seed: int, **sizes: float) -> None:
    """Simulates one fleet."""
    rng = np.random.default_rng(seed)
    mean_s = sizes["service_ms"] / 1e3
    fleet = Fleet(
        int(sizes["replicas"]), int(sizes["workers"]), mean_s, sizes["max_queue_ms"] / 1e3, sizes["refusal_ms"] / 1e3
    )
    arrivals_s = queues.poisson(rate, count, rng)
    services_s = queues.service_times(mean_s, sizes["variation"], count, rng)
    outcome = queues.simulate(arrivals_s, services_s, fleet, BALANCERS[balancer](fleet.replicas, rng)).after(SETTLING)
    click.echo(
        f"utilisation {outcome.utilisation:.1%}\n"
        f"wait        p50 {outcome.wait_s(0.5) * 1e3:.2f} ms, p99 {outcome.wait_s(0.99) * 1e3:.2f} ms\n"
        f"latency     p50 {outcome.latency_s(0.5) * 1e3:.2f} ms, p99 {outcome.latency_s(0.99) * 1e3:.2f} ms\n"
        f"refused     {outcome.refused:.2%}\n"
        f"goodput     {rate * (1 - outcome.refused):,.0f}/s"
    )


def _start_s() -> float:
    return float(_read(BOUNDS)["start"]["median_s"])


def _say(line: str) -> None:
    click.echo(line, err=True)


def _read(path: Path) -> dict[str, Any]:
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return results


def _put(path: Path, name: str, found: dict[str, Any]) -> None:
    """Keeps what was found beside what others found, with when and on what."""
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    results = _read(path) | {name: {**found, "date": date, **commit(), "machine": description()}}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=2) + "\n")
    _say(f"written: {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}")


if __name__ == "__main__":
    main()
