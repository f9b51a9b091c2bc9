"""`python -m tests.chaos.soak`: mixed requests for a quarter of an hour; memory, descriptors and threads level off.

Every answer is compared with the oracle, every refusal and every client that leaves is accounted for.
"""

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, final

import click
import numpy as np
import torch
import uvloop

from model.attention import seeded_layer
from tests.chaos.clients import Clients, Question, garbage, head_of
from tests.conftest import publish, weights_of
from tests.oracle import multi_head_attention
from tests.served import ServerProcess, serving

SIZE, HEADS, NAME = 64, 4, "layer"
_CONNECTIONS: Final = 6
_QUESTIONS: Final = 150
# Of the time, before which everything that is made once has been made.
_SETTLING: Final = 0.25
_MORE_MEMORY: Final = 0.05
_MORE_DESCRIPTORS: Final = 16
_SAMPLES: Final = 120


@final
@dataclass(frozen=True)
class Sample:
    """What the server's processes hold at one moment."""

    at_s: float
    memory_bytes: int
    descriptors: int
    threads: int

    @classmethod
    def of(cls, server: ServerProcess, at_s: float) -> "Sample":
        """Of all of them, now."""
        members = server.members()
        return cls(
            round(at_s, 1),
            sum(one.memory_info().rss for one in members),
            sum(one.num_fds() for one in members),
            sum(one.num_threads() for one in members),
        )


def verdicts(samples: Sequence[Sample]) -> dict[str, bool]:
    """What was promised, and whether it held: once settled, the second half compared with the first."""
    settled = [sample for sample in samples if sample.at_s >= _SETTLING * samples[-1].at_s]
    half = len(settled) // 2
    before, after = settled[:half], settled[half:]

    def most(of: Sequence[Sample], what: str) -> int:
        return max(getattr(sample, what) for sample in of)

    return {
        "memory levels off": most(after, "memory_bytes") <= (1 + _MORE_MEMORY) * most(before, "memory_bytes"),
        "descriptors level off": most(after, "descriptors") <= most(before, "descriptors") + _MORE_DESCRIPTORS,
        "threads level off": most(after, "threads") <= most(before, "threads"),
    }


def questions(count: int) -> list[Question]:
    """Requests of many shapes, mostly small, and their answers."""
    rng = np.random.default_rng(0)
    layer = seeded_layer(SIZE, HEADS, seed=1)
    made = []
    for _ in range(count):
        shape = (int(rng.integers(1, 4)), int(min(2 + rng.exponential(25), 200)), SIZE)
        queries = rng.standard_normal(shape, np.float32)
        made.append(Question.of(queries, multi_head_attention(weights_of(layer), HEADS, queries, queries, queries)[0]))
    return made


async def soak(server: ServerProcess, asked: Sequence[Question], seconds: float) -> tuple[Clients, list[Sample]]:
    """Sends for so long, with nonsense and clients that leave in between, and looks now and then."""
    clients, samples = Clients(server.url, asked), []
    started = time.monotonic()
    load = asyncio.create_task(clients.closed_loop(_CONNECTIONS, seconds))
    nasty = asyncio.create_task(_trouble(server.url, asked[0].body))
    with click.progressbar(length=int(seconds), label="soak") as bar:
        while not load.done():
            await asyncio.sleep(seconds / _SAMPLES)
            samples.append(Sample.of(server, time.monotonic() - started))
            bar.update(int(samples[-1].at_s) - bar.pos)
    nasty.cancel()
    await load
    return clients, samples


async def _trouble(url: str, body: bytes) -> None:
    """Clients that vanish, send half, or send nonsense, ten a second, for as long as nobody says stop."""
    what = [
        head_of(len(body)) + body,
        head_of(len(body)) + body[: len(body) // 2],
        b"nonsense\r\n\r\n",
        head_of(3) + b"abc",
    ]
    number = 0
    while True:
        await garbage(url, what[number % len(what)], then_close=True, wait_s=1)
        number += 1
        await asyncio.sleep(0.1)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--seconds", default=900, show_default=True, type=click.IntRange(10), help="How long.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write every sample there, as JSON.")
def main(seconds: int, out: Path | None) -> None:
    """Sends mixed requests to a real server on loopback, and tells whether what it holds levels off."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        publish(seeded_layer(SIZE, HEADS, seed=1), folder / "models", NAME, 1)
        asked = questions(_QUESTIONS)
        with serving(folder / "log", "--models", str(folder / "models")) as server:
            clients, samples = uvloop.run(soak(server, asked, seconds))
    held = verdicts(samples)
    held["all are answered right"] = clients.account.only() and clients.account.is_complete()
    click.echo(f"{clients.account}")
    for number in np.linspace(0, len(samples) - 1, 7, dtype=int):
        one = samples[number]
        click.echo(
            f"  {one.at_s:6.0f} s  {one.memory_bytes / 2**20:7.1f} MiB  "
            f"{one.descriptors} descriptors  {one.threads} threads"
        )
    for what, holds in held.items():
        click.echo(f"  {'ok  ' if holds else 'FAIL'} {what}")
    if out is not None:
        out.write_text(json.dumps([asdict(sample) for sample in samples], indent=1) + "\n")
    if not all(held.values()):
        sys.exit("not as promised")


if __name__ == "__main__":
    main()
