"""`python -m tests.chaos`: every scenario, its account, and whether what was promised held. Minutes, on loopback."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, final

import click
import httpx
import numpy as np
import torch
import uvloop

from model.attention import MultiHeadAttention, seeded_layer
from tests.chaos.clients import Account, Clients, Question, garbage, head_of
from tests.conftest import publish, weights_of
from tests.oracle import multi_head_attention
from tests.served import ServerProcess, clean_environment, serving, serving_fake

SIZE, HEADS, TOKENS = 32, 2, 64
# To refuse a request costs 0.5 to 1.5 ms of a core when caches are cold, and at ten times what can be done there are
# nine of them for each answer: of small work they take their part. So large ones are checked, as many rows as take a
# quarter of a second of a core, and small ones are told of.
WORK_S: Final = 0.25
LONG, SHORT, NARROW, WIDE = 512, 192, 8, 128
MAX_QUEUE_MS: Final = 500
_ROUNDS: Final = 5
# Some thirty answers of a quarter of a second, so that one more or less is three percent.
_LOAD_S: Final = 10.0
NAME: Final = "layer"
Check = tuple[str, bool]


@final
@dataclass
class Scene:
    """Where a scenario plays: a folder of its own, the repository, the questions, and what is found out."""

    folder: Path
    models: Path
    questions: Sequence[Question]
    figures: dict[str, Any] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)

    def check(self, what: str, *, holds: bool) -> None:
        """Something that was promised."""
        self.checks.append((what, holds))

    @contextlib.contextmanager
    def server(self, *flags: str) -> Iterator[ServerProcess]:
        """A real server."""
        number = len(list(self.folder.glob("log*")))
        quiet = ("--models", str(self.models), "--max-queue-ms", str(MAX_QUEUE_MS))
        with serving(self.folder / f"log{number}", *quiet, *flags) as server:
            yield server


async def overload(scene: Scene) -> None:
    """Twice and ten times what the server can do: it goes on at full speed, refuses the rest, and stays reachable."""
    layer = seeded_layer(WIDE, HEADS, seed=1, scoring="additive", query_size=NARROW, key_size=NARROW, value_size=NARROW)
    scene.models = scene.folder / "models"
    publish(layer, scene.models, NAME, 1)
    with _apart(scene) as (server, cores):
        one_row = Clients(server.url, _questions([layer], (1, LONG, NARROW), 1))
        await one_row.closed_loop(1, 2)
        rows = max(1, round(WORK_S / min(one_row.account.computed_s)))
        questions = _questions([layer], (rows, LONG, NARROW), 2)
        scene.figures["large requests"] = f"{rows} rows of {LONG} tokens"
        scene.figures["cores of the server"] = cores
        # One is computed and one waits, for each core.
        rounds = [await _round(server.url, questions, 2 * cores) for _ in range(_ROUNDS)]
        # Machines that others use, too, change their pace within a minute: each round is compared with its own peak.
        scene.figures["peaks_per_s"] = [round(one[1].goodput, 1) for one in rounds]
        scene.check("at capacity all are answered right", holds=all(one[1].account.only() for one in rounds))
        for times in (2, 10):
            loads = [one[times] for one in rounds]
            ratios = [one[times].goodput / one[1].goodput for one in rounds]
            queued_s = max(load.account.queued_p99_s() for load in loads)
            health_s = max(float(np.quantile(load.healths_s, 0.99)) for load in loads)
            scene.figures[f"at {times} times"] = {
                "goodput_of_peak": round(float(np.median(ratios)), 3), "each": [round(ratio, 3) for ratio in ratios],
                "queue_p99_ms": round(queued_s * 1e3), "health_p99_ms": round(health_s * 1e3, 1),
                "accounts": [str(load.account) for load in loads],
            }  # fmt: skip
            right = all(load.account.only("overloaded") for load in loads)
            scene.check(f"{times} times: each is answered right or refused", holds=right)
            complete = all(load.account.is_complete() for load in loads)
            scene.check(f"{times} times: every request is accounted for", holds=complete)
            scene.check(f"{times} times: health p99 within 100 ms", holds=health_s <= 0.1)
            scene.check(f"{times} times: goodput at least 90 % of the peak", holds=float(np.median(ratios)) >= 0.9)
            scene.check(f"{times} times: queue p99 within its bound", holds=queued_s <= MAX_QUEUE_MS / 1e3)
        small = await _round(server.url, _questions([layer], (1, SHORT, NARROW), 2), 2 * cores)
        scene.figures["of small requests"] = {
            "peak_per_s": round(small[1].goodput, 1),
            "goodput_of_peak": {times: round(small[times].goodput / small[1].goodput, 3) for times in (2, 10)},
        }
        right = all(load.account.only("overloaded") and load.account.is_complete() for load in small.values())
        scene.check("small ones: each is answered right or refused, and accounted for", holds=right)
        after = Clients(server.url, questions)
        await after.closed_loop(cores, 2)
        scene.check("afterwards all are answered", holds=after.account.only())


@contextlib.contextmanager
def _apart(scene: Scene) -> Iterator[tuple[ServerProcess, int]]:
    """A server with all cores but the last, and how many; its clients have that: what they cost is not its to pay."""
    cores = sorted(os.sched_getaffinity(0))
    its_own = cores[:-1] or cores
    os.sched_setaffinity(0, its_own)
    try:
        with scene.server() as server:
            os.sched_setaffinity(0, cores[-1:])
            yield server, len(its_own)
    finally:
        os.sched_setaffinity(0, cores)


@final
@dataclass(frozen=True)
class _Load:
    """What came of one load: answers a second, what became of each request, and how long health took to answer."""

    goodput: float
    account: Account
    healths_s: list[float]


async def _round(url: str, questions: Sequence[Question], connections: int) -> dict[int, _Load]:
    """The peak, twice and ten times as much, one after the other, watched alike."""

    async def watched(load: Callable[[Clients], Awaitable[float]]) -> _Load:
        clients, healths_s = Clients(url, questions), list[float]()
        watching = asyncio.create_task(_watch(url, healths_s))
        goodput = await load(clients)
        watching.cancel()
        clients.close()
        return _Load(goodput, clients.account, healths_s)

    peak = await watched(lambda clients: clients.closed_loop(connections, _LOAD_S))
    loads = {1: peak}
    for times in (2, 10):
        loads[times] = await watched(lambda clients: clients.open_loop(times * peak.goodput, _LOAD_S))  # noqa: B023  # awaited at once
    return loads


async def kill(scene: Scene) -> None:
    """Kill -9 of a process, then of all: only requests in flight break, and what comes back answers right."""
    with scene.server("--processes", "2") as server:
        clients = Clients(server.url, scene.questions, keep_alive=False)
        load = asyncio.create_task(clients.open_loop(60, 6))
        await asyncio.sleep(1.5)
        os.kill(server.members()[1].pid, signal.SIGKILL)
        await load
        scene.figures["one process"] = str(clients.account)
        scene.check("one process: right or broken", holds=clients.account.only("broken"))
        scene.check("one process: few break", holds=clients.account.outcomes["broken"] <= 8)
        scene.check("one process: all accounted for", holds=clients.account.is_complete())
        port = server.url.rpartition(":")[2]
    command = [sys.executable, "-m", "mha", "serve", "--models", str(scene.models), "--port", port]
    command += ["--log-format", "json"]
    first = ServerProcess(command, clean_environment(), scene.folder / "first.log").wait_ready()
    clients = Clients(first.url, scene.questions, keep_alive=False)
    load = asyncio.create_task(clients.open_loop(60, 8))
    await asyncio.sleep(1.5)
    first.process.kill()
    # In a thread, so that clients go on asking while there is nobody.
    await asyncio.to_thread(first.process.wait)
    second = ServerProcess(command, clean_environment(), scene.folder / "second.log")
    await asyncio.to_thread(second.wait_ready)
    before = clients.account.answered
    await load
    second.stop()
    scene.figures["the whole server"] = str(clients.account)
    allowed = ("broken", "not accepted", "not_ready")
    scene.check("the whole server: right, broken or not accepted", holds=clients.account.only(*allowed))
    scene.check("the whole server: answers again", holds=clients.account.answered > before + 50)
    scene.check("the whole server: all accounted for", holds=clients.account.is_complete())
    scene.check("the whole server: it was gone", holds=clients.account.outcomes["not accepted"] > 0)


async def terminate(scene: Scene) -> None:
    """SIGTERM in the middle of traffic, twenty times: whoever was accepted is answered, and the exit status is 0."""
    lost, statuses, outcomes = 0, set(), Counter[str]()
    for _ in range(20):
        with scene.server("--drain-delay-s", "0.3") as server:
            clients = Clients(server.url, scene.questions, keep_alive=False)
            load = asyncio.create_task(clients.open_loop(80, 1.2))
            await asyncio.sleep(0.5)
            server.process.terminate()
            await load
            statuses.add(await asyncio.to_thread(server.process.wait, 30))
            outcomes += clients.account.outcomes
            lost += clients.account.sent - clients.account.answered - clients.account.outcomes["not accepted"]
            scene.check("all accounted for", holds=clients.account.is_complete())
    scene.figures["outcomes"], scene.figures["lost"] = dict(outcomes), lost
    scene.check("nothing accepted is lost in 20 ends", holds=lost == 0)
    scene.check("exit status 0", holds=statuses == {0})


async def hostile(scene: Scene) -> None:
    """Clients that vanish, send half a body, a byte now and then, or nonsense: the others are answered all the same."""
    body = scene.questions[0].body
    whole, half = head_of(len(body)) + body, head_of(len(body)) + body[: len(body) // 2]
    rng = np.random.default_rng(0)
    with scene.server("--head-timeout-s", "2") as server:
        clients = Clients(server.url, scene.questions)
        load = asyncio.create_task(clients.open_loop(40, 8))
        nasty = []
        for number in range(200):
            noise = rng.bytes(int(rng.integers(1, 5000)))
            what, closes = [
                (whole, True), (half, True), (half, False), (noise, False), (head_of(len(noise)) + noise, False),
                (b"GET / HTTP/1.1\r\nX: ", False), (b"", False),
            ][number % 7]  # fmt: skip
            nasty.append(asyncio.create_task(garbage(server.url, what, then_close=closes, wait_s=20)))
            await asyncio.sleep(0.03)
        dripping = asyncio.create_task(_drip(server.url, half))
        await load
        await asyncio.gather(*nasty, dripping)
        scene.figures["beside 201 of them"] = str(clients.account)
        scene.check("all others are answered right", holds=clients.account.only("overloaded"))
        scene.check("all accounted for", holds=clients.account.is_complete())
        ready = await asyncio.to_thread(httpx.get, server.url + "/health/ready")
        metrics = await asyncio.to_thread(httpx.get, server.url + "/metrics")
        scene.check("still ready", holds=ready.status_code == 200)
        lines = metrics.text.splitlines()
        held = [float(line.split()[1]) for line in lines if line.startswith("mha_held_bytes ")]
        scene.check("nothing is held any more", holds=held == [0.0])
        log = server.log_path.read_text()
        scene.check("no internal error in the log", holds='"code":"internal"' not in log and "Traceback" not in log)


async def failing(scene: Scene) -> None:
    """An engine that fails now and then: each failure is one request's own, and the server goes on."""
    with serving_fake(scene.folder / "failing.log", "flaky", "--models", str(scene.models)) as server:
        zeros = [replace(question, right=(np.zeros_like(question.right[0]),)) for question in scene.questions]
        clients = Clients(server.url, zeros)
        await clients.open_loop(100, 4)
        scene.figures["every third call fails"] = str(clients.account)
        scene.check("answered or engine_failure", holds=clients.account.only("engine_failure", "overloaded"))
        scene.check(
            "both happened", holds=min(clients.account.answered, clients.account.outcomes["engine_failure"]) > 50
        )
        scene.check("all accounted for", holds=clients.account.is_complete())
    with serving_fake(scene.folder / "slow.log", "slow", "--models", str(scene.models), "--workers", "2") as server:
        clients = Clients(server.url, zeros)
        await clients.open_loop(50, 4)
        scene.figures["every call takes 0.4 s"] = str(clients.account)
        scene.check("slow: answered or refused", holds=clients.account.only("overloaded"))
        scene.check("slow: all accounted for", holds=clients.account.is_complete())


async def swap(scene: Scene) -> None:
    """A version comes and goes under traffic: every answer is that of one version, whole."""
    models = scene.folder / "swapped"
    shutil.copytree(scene.models, models)
    aside = scene.folder / "aside"
    (models / NAME / "2").rename(aside)
    scene.models = models
    with scene.server() as server:
        clients = Clients(server.url, scene.questions)
        load = asyncio.create_task(clients.open_loop(60, 6))
        changes = 0
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as operator:
            while not load.done():
                newest = models / NAME / "2"
                if newest.exists():
                    newest.rename(aside)
                else:
                    aside.rename(newest)
                answer = await operator.post(f"/v2/repository/models/{NAME}/load", json={})
                changes += answer.status_code == 200
                await asyncio.sleep(0.1)
        await load
        scene.figures["under changes"] = f"{changes} changes, {clients.account}"
        scene.check("every answer is one version's", holds=clients.account.only("overloaded"))
        scene.check("it changed at least 5 times", holds=changes >= 5)
        scene.check("all accounted for", holds=clients.account.is_complete())


SCENARIOS: Final[dict[str, Callable[[Scene], Coroutine[Any, Any, None]]]] = {
    "overload": overload, "kill": kill, "terminate": terminate, "hostile": hostile, "failing": failing, "swap": swap,
}  # fmt: skip


async def _watch(url: str, seconds: list[float]) -> None:
    """Asks whether the server is alive, twenty times a second, each time over a new connection."""
    host, port = url.removeprefix("http://").split(":")
    while True:
        started = time.perf_counter()
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
        writer.close()
        seconds.append(time.perf_counter() - started if answer.startswith(b"HTTP/1.1 200") else 30.0)
        await asyncio.sleep(0.05)


async def _drip(url: str, what: bytes) -> None:
    """A client that sends ten bytes a second."""
    host, port = url.removeprefix("http://").split(":")
    with contextlib.suppress(OSError):
        _, writer = await asyncio.open_connection(host, int(port))
        for first in range(0, 100, 10):
            writer.write(what[first : first + 10])
            await writer.drain()
            await asyncio.sleep(1)
        writer.close()


def _store(folder: Path, layers: Sequence[MultiHeadAttention]) -> Path:
    """A repository with these versions of a layer."""
    for version, layer in enumerate(layers, 1):
        publish(layer, folder, NAME, version)
    return folder


def _questions(layers: Sequence[MultiHeadAttention], shape: tuple[int, int, int], count: int) -> list[Question]:
    """Requests for self-attention, and what each of the layers answers."""
    rng = np.random.default_rng(0)
    questions = []
    for _ in range(count):
        queries = rng.standard_normal(shape, np.float32)
        right = [multi_head_attention(weights_of(one), HEADS, queries, queries, queries)[0] for one in layers]
        questions.append(Question.of(queries, *right))
    return questions


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--only", multiple=True, type=click.Choice(list(SCENARIOS)), help="These scenarios.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures there, as JSON.")
def main(only: Sequence[str], out: Path | None) -> None:
    """Misuses a real server on loopback, for minutes, and says what became of every request."""
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        layers = [seeded_layer(SIZE, HEADS, seed=version, scoring="additive") for version in (1, 2)]
        models = _store(folder / "models", layers)
        questions = _questions(layers, (1, TOKENS, SIZE), 8)
        for name in only or SCENARIOS:
            (folder / name).mkdir()
            scene = Scene(folder / name, models, questions)
            click.echo(f"{name}: {SCENARIOS[name].__doc__}")
            uvloop.run(SCENARIOS[name](scene))
            for what, holds in dict.fromkeys(scene.checks):
                click.echo(f"  {'ok  ' if holds else 'FAIL'} {what}")
            click.echo(f"  {json.dumps(scene.figures)}")
            results[name] = {"figures": scene.figures, "checks": dict(scene.checks)}
    if out is not None:
        out.write_text(json.dumps(results, indent=2) + "\n")
    failed = [name for name, result in results.items() if not all(result["checks"].values())]
    if failed:
        sys.exit(f"not as promised: {', '.join(failed)}")


if __name__ == "__main__":
    main()
