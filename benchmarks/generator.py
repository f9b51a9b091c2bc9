"""How good the load generator is: `python -m benchmarks.generator models` for a repository of one 512/8 layer.

Three questions. How many requests a second it sends from one core, to a server on another that computes nothing; beside
it, what general HTTP clients manage. Whether its figures are those of wrk in a closed loop. Whether `--find-max` lands
where a fine sweep does. `benchmarks/results/generator.json` gets the answers.
"""

import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import click
import httpx
import numpy as np
import uvloop
from safetensors.numpy import save

from benchmarks.bounds import Server, served
from benchmarks.peers.machine import commit, description
from benchmarks.peers.wrk import Target, load

RESULTS: Final = Path(__file__).parent / "results" / "generator.json"
SIZE: Final = 512
MEDIA_TYPE: Final = "application/vnd.safetensors"
SLO: Final = "p99=100ms"
CONNECTIONS: Final = 32
_AGREEMENT_ROUNDS: Final = 6
_SEARCHES: Final = 3
# Around what the search has found, in steps of three percent.
_STEPS: Final = range(-8, 9)
_STEP: Final = 1.03
Report = dict[str, Any]


def loadtest(url: str, *flags: str, core: int | None = None) -> Report:
    """The report of one run, on one core if that is named."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "mha", "loadtest", url, "--json", file.name, *flags]
        pinned = command if core is None else ["taskset", "--cpu-list", str(core), *command]
        ended = subprocess.run(pinned, capture_output=True, text=True, check=False)
        # An SLO that is missed and a generator that is too slow are answers here.
        if not Path(file.name).stat().st_size:
            raise SystemExit(f"{' '.join(command)}: {ended.stdout}{ended.stderr}")
        report: Report = json.loads(Path(file.name).read_text())
        return report


@contextmanager
def echo(core: int) -> Iterator[str]:
    """The address of a server on that core that answers whatever comes with as many bytes, and computes nothing."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.loadtest.known_server", f"{folder}/came", "--describe", str(SIZE)]
        pinned = ["taskset", "--cpu-list", str(core), *command, "--answer-bytes", str(16 * SIZE * 4)]
        with subprocess.Popen(pinned, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None  # noqa: S101  # asked for above
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
            process.terminate()


def capacity() -> dict[str, Any]:
    """Requests a second of (1, 16, 16) from one core: how many at most, and whether 2,000 of them are in time."""
    cores = sorted(os.sched_getaffinity(0))
    theirs, ours = cores[0], cores[-1]
    cross = ("--keys", "16", "--check-every", "0")
    with echo(theirs) as url:
        found: dict[str, Any] = {}
        for name, shape in (("queries alone, 32 KiB", ("--check-every", "0")), ("all three, 96 KiB", cross)):
            closed = loadtest(url, *shape, "--concurrency", str(CONNECTIONS), core=ours)["levels"][0]
            steady = loadtest(url, *shape, "--rate", "2000", core=ours)["levels"][0]
            found[name] = {
                "at_most": closed["per_second"]["requests"],
                "at_2000": {name: steady[name] for name in ("lag_ms", "latency_ms", "generator", "faults")},
            }
        os.sched_setaffinity(0, {ours})
        found["clients"] = {name: asyncio.run(rate(url)) for name, rate in CLIENTS.items()}
        os.sched_setaffinity(0, cores)
    return found


async def _repeated(ask: Callable[[], Awaitable[None]], seconds: float = 4.0) -> float:
    """Answers a second, with as many in flight."""
    ends, answered = time.monotonic() + seconds, 0

    async def one() -> None:
        nonlocal answered
        while time.monotonic() < ends:
            await ask()
            answered += 1

    await asyncio.gather(*(one() for _ in range(CONNECTIONS)))
    return answered / seconds


def _content() -> bytes:
    return save({"queries": np.ones((1, 16, SIZE), np.float32)})


async def _aiohttp(url: str) -> float:
    content = _content()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=CONNECTIONS)) as session:

        async def ask() -> None:
            async with session.post(url, data=content, headers={"Content-Type": MEDIA_TYPE}) as answer:
                await answer.read()

        return await _repeated(ask)


async def _httpx(url: str) -> float:
    content = _content()
    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=CONNECTIONS)) as client:

        async def ask() -> None:
            await client.post(url, content=content, headers={"Content-Type": MEDIA_TYPE})

        return await _repeated(ask)


CLIENTS: Final[dict[str, Callable[[str], Any]]] = {"aiohttp": _aiohttp, "httpx": _httpx}


def agreement(server: Server) -> dict[str, Any]:
    """Answers a second and median by us and by wrk, in turn, as ratios."""
    url = f"{server.url}/v1/attention"
    return {f"(1, {size}, {size})": _agreement(server.url, url, size) for size in (16, 128)}


def _agreement(base: str, url: str, size: int) -> dict[str, Any]:
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        rng = np.random.default_rng(0)
        for number in range(8):
            body = save({"queries": rng.standard_normal((1, size, SIZE), np.float32)})
            (Path(folder) / str(number)).write_bytes(body)

        def by_wrk() -> dict[str, float]:
            found = load(Target(url, MEDIA_TYPE, Path(folder), 8), CONNECTIONS, 8)
            return {"answers_s": 1e6 * found["requests"] / found["duration_us"], "p50_ms": found["p50_us"] / 1e3}

        def by_us() -> dict[str, float]:
            shape = ("--queries", str(size), "--check-every", "0", "--concurrency", str(CONNECTIONS))
            found = loadtest(base, *shape)["levels"][0]
            return {"answers_s": found["per_second"]["requests"], "p50_ms": found["latency_ms"]["p50"]}

        asks = [("wrk", by_wrk), ("ours", by_us)]
        for _ in range(_AGREEMENT_ROUNDS):
            rounds.append({name: ask() for name, ask in asks})
            asks.reverse()  # the machine drifts
    ratios = {
        name: statistics.median(one["ours"][name] / one["wrk"][name] for one in rounds)
        for name in ("answers_s", "p50_ms")
    }
    return {"ratios": ratios, "rounds": rounds}


def search(server: Server) -> dict[str, Any]:
    """What `--find-max` finds, and between its runs fine sweeps around what it found first, in the same minutes."""
    shape = ("--queries", "64", "--check-every", "0", "--slo", SLO)

    def found(seed: int) -> float:
        report = loadtest(server.url, *shape, "--find-max", "--rate", "50", "--seed", str(seed))
        return float(report["search"]["highest"])

    by_search = [found(0)]
    rates = [by_search[0] * _STEP**step for step in _STEPS]
    passed: list[tuple[float, bool]] = []
    for seed in range(1, _SEARCHES):
        for rate in rates:
            level = loadtest(server.url, *shape, "--rate", str(rate), "--seed", str(100 * seed))["levels"][0]
            passed.append((rate, not level["slo_missed"]))
        by_search.append(found(seed))
    by_sweep = limit(passed)
    return {
        "by_search": by_search, "by_sweep": by_sweep, "ratio": statistics.median(by_search) / by_sweep,
        "swept": [{"rate": rate, "passed": [one for of, one in passed if of == rate]} for rate in rates],
    }  # fmt: skip


def limit(passed: Sequence[tuple[float, bool]]) -> float:
    """The rate below which levels passed and above which they failed, with the fewest exceptions.

    Near it some pass and some fail, by chance. Of several such rates, the middle of them.
    """
    rates = sorted({rate for rate, _ in passed})
    between = [(low * high) ** 0.5 for low, high in itertools.pairwise(rates)]
    exceptions = [sum((rate < edge) != one for rate, one in passed) for edge in between]
    best = [edge for edge, count in zip(between, exceptions, strict=True) if count == min(exceptions)]
    return float(statistics.median(best))


@click.command()
@click.argument("models", type=click.Path(exists=True, path_type=Path))
@click.option("--only", type=click.Choice(["capacity", "agreement", "search"]), help="One of the questions.")
def main(models: Path, only: str | None) -> None:
    """Measure the load generator on this machine (half an hour; wants wrk and nothing else running)."""
    uvloop.install()
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if only in (None, "capacity"):
        found["capacity"] = capacity()
    if only in (None, "agreement", "search"):
        with served(models) as server:
            for name, ask in {"agreement": agreement, "search": search}.items():
                if only in (None, name):
                    found[name] = ask(server)
    found |= {"machine": description(), **commit()}
    RESULTS.write_text(json.dumps(found, indent=2) + "\n")
    click.echo(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
