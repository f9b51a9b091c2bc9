"""`python -m tests.scale`: every scenario on one Ray cluster, its account, and whether what was promised held."""

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, final

import click
import numpy as np
import psutil
import torch
import uvloop

from model.attention import MultiHeadAttention, seeded_layer
from tests.chaos.clients import Account, Clients, Question
from tests.conftest import publish, weights_of
from tests.oracle import multi_head_attention
from tests.scale.cluster import Machines, running
from tests.served import serving

SIZE, HEADS, NAME = 32, 2, "layer"
SMALL, LARGE = 8, 160
ROWS: Final = 8
_CONNECTIONS: Final = 8
_MANY: Final = 160
_QUESTIONS: Final = 4
_SECONDS: Final = 6.0
# By the service, in its own words, and with Retry-After.
_REFUSED: Final = ("overloaded",)
# What Ray's proxy says for a replica that has died with the request, and what a connection that ends says.
_BROKEN: Final = ("status 500", "broken")


@final
@dataclass
class Scene:
    """The machines, the repository, the questions, and what is found out."""

    machines: Machines
    folder: Path
    models: Path
    small: Sequence[Question]
    large: Sequence[Question]
    second: Any = None
    figures: dict[str, Any] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def check(self, what: str, *, holds: bool) -> None:
        """Something that was promised."""
        click.echo(f"  {'ok  ' if holds else 'FAIL'} {what}")
        if not holds:
            self.failed.append(what)

    def figure(self, what: str, value: Any) -> None:
        """Something that was measured."""
        click.echo(f"       {what}: {value}")
        self.figures[what] = value

    def check_account(self, what: str, account: Account, *allowed: str) -> None:
        """That every request was answered right, or was what it may have been."""
        self.figure(what, str(account))
        self.check(f"{what}: right{''.join(f' or {one}' for one in allowed)}", holds=account.only(*allowed))
        self.check(f"{what}: every request accounted for", holds=account.is_complete())


@final
@dataclass(frozen=True)
class _Pace:
    """How fast something answers."""

    one_ms: float
    large_per_s: float


async def throughput(scene: Scene) -> None:
    """The plain server, then one replica, then two that come because there is work: how fast each of them is."""
    alone = ("--processes", "1", "--workers", "1", "--threads-per-call", "1")
    with serving(scene.folder / "plain.log", "--models", str(scene.models), *alone) as server:
        plain = await _pace(scene, "plain server", server.url)
    await scene.machines.deploy(1, 1)
    one = await _pace(scene, "1 replica", scene.machines.url)
    scene.second = scene.machines.add_node()
    await scene.machines.deploy(1, 2)
    scaling = await _load_until(scene, scene.large, scene.machines.until_running(2))
    scene.check_account("while a second replica comes", scaling, *_REFUSED)
    nodes = {replica.node for replica in scene.machines.replicas()}
    scene.check("a second replica came because there was work, on the other node", holds=len(nodes) == 2)
    await scene.machines.deploy(2, 2)
    before = _cpu_s(scene)
    two = await _pace(scene, "2 replicas", scene.machines.url)
    computed_s = [after - then for after, then in zip(_cpu_s(scene), before, strict=True)]
    scene.check("both replicas compute", holds=min(computed_s) > max(computed_s) / 3)
    scene.figure("2 replicas to 1", round(two.large_per_s / one.large_per_s, 2))
    scene.figure("1 replica to the plain server", round(one.large_per_s / plain.large_per_s, 2))
    scene.figure("latency that Ray adds to one connection, ms", round(one.one_ms - plain.one_ms, 2))


async def overload(scene: Scene) -> None:
    """More than two replicas can do: the service itself refuses, with Retry-After; Ray's queue does not hide it."""
    clients = Clients(scene.machines.url, scene.large)
    await clients.closed_loop(_MANY, _SECONDS)
    clients.close()
    scene.check_account(f"{_MANY} connections", clients.account, *_REFUSED)
    scene.check("some are refused", holds=clients.account.outcomes["overloaded"] > 0)


async def kill(scene: Scene) -> None:
    """SIGKILL of a replica under load: only what it had in hand breaks, and another takes its place."""
    victim = scene.machines.replicas()[0]

    async def change() -> None:
        await asyncio.sleep(1)
        os.kill(victim.pid, signal.SIGKILL)
        await scene.machines.until_running(2, without=victim.pid)
        await asyncio.sleep(1)

    await _check_loss(scene, "a replica killed", change())


async def lose_node(scene: Scene) -> None:
    """A node goes under load: the other answers alone, until there is one more."""
    (lost,) = (one for one in scene.machines.replicas() if one.node == scene.second.node_ip_address)

    async def change() -> None:
        await asyncio.sleep(1)
        await asyncio.to_thread(scene.machines.lose, scene.second)
        await scene.machines.until_running(1, without=lost.pid)
        await asyncio.sleep(2)

    await _check_loss(scene, "a node lost", change())
    scene.second = scene.machines.add_node()
    account = await _load_until(scene, scene.large, scene.machines.until_running(2))
    scene.check_account("while a node joins", account, *_REFUSED)


async def roll(scene: Scene) -> None:
    """Version 2 comes and goes under load, with user_config: every answer is that of one version, none is lost."""
    newest, aside = scene.models / NAME / "2", scene.folder / "aside"
    seen = []

    async def change() -> None:
        for version in (1, 2, 1, 2):
            (newest if version == 1 else aside).rename(aside if version == 1 else newest)
            await scene.machines.deploy(2, 2, reread=True)
            only = [replace(question, right=question.right[version - 1 : version]) for question in scene.small]
            clients = Clients(scene.machines.url, only)
            await clients.closed_loop(2, 1)
            seen.append(clients.account)
            clients.close()

    before = [replica.pid for replica in scene.machines.replicas()]
    scene.check_account("while versions change", await _load_until(scene, scene.large, change()), *_REFUSED)
    scene.check("after each change all answers are the new version's", holds=all(one.only() for one in seen))
    after = [replica.pid for replica in scene.machines.replicas()]
    scene.check("no replica was replaced for it", holds=sorted(before) == sorted(after))


async def shrink(scene: Scene) -> None:
    """From two replicas to one under load: what the one that ends has accepted is answered."""

    async def change() -> None:
        await asyncio.sleep(1)
        await scene.machines.deploy(1, 1)
        await scene.machines.until_running(1)
        await asyncio.sleep(2)

    scene.check_account("while a replica ends", await _load_until(scene, scene.large, change()), *_REFUSED)


SCENARIOS: Final[tuple[Callable[[Scene], Coroutine[Any, Any, None]], ...]] = (
    throughput, overload, kill, lose_node, roll, shrink,
)  # fmt: skip


async def _pace(scene: Scene, what: str, url: str) -> _Pace:
    warm, single, many = (Clients(url, questions) for questions in (scene.large, scene.small, scene.large))
    await warm.closed_loop(_CONNECTIONS, 2)
    await single.closed_loop(1, _SECONDS / 2)
    per_s = await many.closed_loop(_CONNECTIONS, _SECONDS)
    for how, clients in (("warming up", warm), ("one connection", single), ("many", many)):
        clients.close()
        scene.check_account(f"{what}, {how}", clients.account)
    pace = _Pace(float(np.median(single.account.answered_s)) * 1e3, per_s)
    scene.figure(f"{what}, one connection, small requests, median ms", round(pace.one_ms, 2))
    scene.figure(f"{what}, {_CONNECTIONS} connections, large requests a second", round(pace.large_per_s, 1))
    return pace


async def _check_loss(scene: Scene, what: str, change: Awaitable[None]) -> None:
    account = await _load_until(scene, scene.large, change)
    scene.check_account(what, account, *_BROKEN, *_REFUSED)
    broken = sum(account.outcomes[outcome] for outcome in _BROKEN)
    # Each connection asks again when it has its answer: more would mean that a dead replica was asked again.
    scene.check(f"{what}: no more broke than were in flight", holds=broken <= _CONNECTIONS)
    after = Clients(scene.machines.url, scene.large)
    await after.closed_loop(_CONNECTIONS, 2)
    after.close()
    scene.check(f"{what}: afterwards all are answered right", holds=after.account.only() and after.account.answered > 0)


async def _load_until(scene: Scene, questions: Sequence[Question], change: Awaitable[None]) -> Account:
    """What becomes of requests while something happens."""
    clients = Clients(scene.machines.url, questions)
    happening = asyncio.ensure_future(change)

    async def client(number: int) -> None:
        while not happening.done():
            await clients.ask(number)
            number += 1

    try:
        await asyncio.gather(*(client(number) for number in range(_CONNECTIONS)))
        await happening
    finally:
        happening.cancel()
        clients.close()
    return clients.account


def _cpu_s(scene: Scene) -> list[float]:
    return [
        sum(psutil.Process(one.pid).cpu_times()[:2])
        for one in sorted(scene.machines.replicas(), key=lambda one: one.pid)
    ]


def _questions(layers: Sequence[MultiHeadAttention], tokens: int, rows: int = 1) -> list[Question]:
    """Requests for self-attention, and what each of the layers answers. Rows beyond the first are like it."""
    rng = np.random.default_rng(0)
    questions = []
    for _ in range(_QUESTIONS):
        queries = rng.standard_normal((1, tokens, SIZE), np.float32)
        right = [multi_head_attention(weights_of(one), HEADS, queries, queries, queries)[0] for one in layers]
        questions.append(Question.of(queries.repeat(rows, 0), *(one.repeat(rows, 0) for one in right)))
    return questions


async def _play(scene: Scene) -> None:
    for scenario in SCENARIOS:
        began = time.monotonic()
        click.echo(f"{scenario.__name__}: {scenario.__doc__}")
        await scenario(scene)
        click.echo(f"       {time.monotonic() - began:.0f} s")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures there, as JSON.")
def main(out: Path | None) -> None:
    """Runs the service on a Ray cluster on loopback, takes parts of it away, and accounts for every request."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        folder = Path(place)
        click.echo("exporting two versions of a layer, and working out what is right")
        layers = [seeded_layer(SIZE, HEADS, seed=version, scoring="additive") for version in (1, 2)]
        for version, layer in enumerate(layers, 1):
            publish(layer, folder / "models", NAME, version)
        small, large = _questions(layers, SMALL), _questions(layers, LARGE, ROWS)
        click.echo("starting a Ray cluster")
        with running(folder / "ray", folder / "models") as machines:
            scene = Scene(machines, folder, folder / "models", small, large)
            uvloop.run(_play(scene))
    if out is not None:
        out.write_text(json.dumps({"figures": scene.figures, "failed": scene.failed}, indent=2) + "\n")
    if scene.failed:
        sys.exit(f"not as promised: {', '.join(scene.failed)}")


if __name__ == "__main__":
    main()
