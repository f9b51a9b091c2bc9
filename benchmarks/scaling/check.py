"""The simulated queue beside a real one: one core, Poisson arrivals, the same arrivals for both.

What the simulation knows of the server is what a request takes: what the core spent on each in that very run, since
at part of the load that is more than at all of it, and how much it varies: as engine calls over a lone connection. All
else (threads that share a core, a loop that reads and writes for others, calls
that are shared) is what the comparison tells of.
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import psutil
import uvloop

from benchmarks.scaling.costs import CONNECTIONS, cpu_s, one_core, question, server_core
from benchmarks.scaling.figures import deviation
from benchmarks.scaling.queues import Fleet, Floats, Outcome, at_random, poisson, simulate
from tests.chaos.clients import Account, Clients, Question
from tests.served import ServerProcess

_ALONE_S: Final = 2.0
MAX_QUEUE_MS: Final = 500


@final
@dataclass(frozen=True, slots=True)
class Served:
    """One open-loop run.

    Attributes:
        capacity: answers a second, just before: of which the load is a part.
        alone_s: engine calls over a lone connection.
        sent_s: when each request was sent.
        late_s: how much later than it was due.
        elapsed_s: from the first request to the last answer.
        cpu_s: of the server's processes, in that time.
        core_s: of whoever computed on the server's core: much more than the server's means that it was disturbed.
        account: what became of them.
    """

    capacity: float
    alone_s: Sequence[float]
    sent_s: Floats
    late_s: Floats
    elapsed_s: float
    cpu_s: float
    core_s: float
    account: Account


def check(
    models: Path, length: int, loads: Sequence[float], seconds: float, refusal_s: float
) -> Iterator[dict[str, Any]]:
    """Measured and simulated figures of self-attention, for so long at each part of capacity; seconds but for shares.

    Args:
        models: the repository.
        length: of the only row of a request.
        loads: parts of capacity.
        seconds: of each load.
        refusal_s: what a refusal costs.
    """
    asked = question(length)
    with (
        tempfile.TemporaryDirectory() as place,
        one_core(Path(place), models, "--max-queue-ms", str(MAX_QUEUE_MS)) as server,
    ):
        for load in loads:
            served = uvloop.run(_serve(server, asked, load, seconds))
            yield {"length": length, "load": load, **compared(served, refusal_s)}


def compared(served: Served, refusal_s: float) -> dict[str, Any]:
    """What was measured, what the simulation says of the same arrivals, and how far off it is."""
    rng = np.random.default_rng(0)
    account = served.account
    cost_s = (served.cpu_s - account.outcomes["overloaded"] * refusal_s) / account.answered
    drawn_s = rng.choice(np.asarray(served.alone_s), len(served.sent_s))
    services_s = np.maximum(0.0, drawn_s + cost_s - statistics.mean(served.alone_s))
    fleet = Fleet(1, estimate_s=cost_s, most_wait_s=MAX_QUEUE_MS / 1e3, refusal_s=refusal_s)
    simulated = simulate(served.sent_s, services_s, fleet, at_random(1, rng))
    return {
        "capacity_per_s": served.capacity,
        "requests": len(served.sent_s),
        "late_p99_s": float(np.quantile(served.late_s, 0.99)),
        "cost_s": cost_s,
        "busy": served.cpu_s / served.elapsed_s,
        "others": (served.core_s - served.cpu_s) / served.elapsed_s,
        "outcomes": dict(account.outcomes),
        "measured": _figures(account.queued_s, account.answered_s, 1 - account.answered / account.sent),
        "simulated": _of(simulated),
    }


def line(row: dict[str, Any]) -> str:
    """One comparison, to be read while it runs."""
    parts = [f"(1, {row['length']}, {row['length']}) at {row['load']:.0%} of {row['capacity_per_s']:.0f}/s"]
    for figure in ("wait_mean_s", "wait_p99_s", "latency_mean_s", "latency_p99_s"):
        measured, simulated = row["measured"][figure] * 1e3, row["simulated"][figure] * 1e3
        parts.append(f"{figure[:-2]} {measured:.2f} ms, simulated {simulated:.2f} ({deviation(row, figure):+.0%})")
    parts.append(f"refused {row['measured']['refused']:.1%}, simulated {row['simulated']['refused']:.1%}")
    parts.append(f"the core was busy {row['busy']:.0%}, {row['cost_s'] * 1e3:.2f} ms for each request")
    parts.append(f"others took {row['others']:.0%} of it, sent late p99 {row['late_p99_s'] * 1e3:.2f} ms")
    return "\n  ".join(parts)


async def _serve(server: ServerProcess, asked: Question, load: float, seconds: float) -> Served:
    # Capacity anew before each load, since such machines change their pace.
    alone, many, clients = (Clients(server.url, [asked]) for _ in range(3))
    await alone.closed_loop(1, _ALONE_S)
    capacity = await many.closed_loop(CONNECTIONS, _ALONE_S)
    due_s = poisson(load * capacity, max(1, round(load * capacity * seconds)), np.random.default_rng(1))
    before, core_before, began = cpu_s(server), _core_s(), time.perf_counter()
    sent_s = await open_loop(clients, due_s)
    elapsed_s, spent_s, core_s = time.perf_counter() - began, cpu_s(server) - before, _core_s() - core_before
    for one in (alone, many, clients):
        one.close()
    return Served(
        capacity, alone.account.computed_s, sent_s, sent_s - due_s, elapsed_s, spent_s, core_s, clients.account
    )


def _core_s() -> float:
    """For how long the server's core has been computing for anybody."""
    times = psutil.cpu_times(percpu=True)[server_core()]
    return float(times.user + times.nice + times.system + times.irq + times.softirq + times.steal)


async def open_loop(clients: Clients, due_s: Floats) -> Floats:
    """Asks when it is time, whatever became of those before; returns when each was sent."""
    began = time.perf_counter()
    sent_s, tasks = [], []
    for number, due in enumerate(due_s.tolist()):
        # Timers count in milliseconds, so this core is kept busy instead: the server has its own.
        while (now := time.perf_counter() - began) < due:  # noqa: ASYNC110  # see above
            await asyncio.sleep(0)
        sent_s.append(now)
        tasks.append(asyncio.create_task(clients.ask(number)))
    await asyncio.gather(*tasks)
    return np.array(sent_s)


def _of(outcome: Outcome) -> dict[str, float]:
    let_in = ~np.isnan(outcome.waits_s)
    return _figures(outcome.waits_s[let_in], outcome.latencies_s[let_in], outcome.refused)


def _figures(
    waits_s: Sequence[float] | Floats, latencies_s: Sequence[float] | Floats, refused: float
) -> dict[str, float]:
    return {
        "wait_mean_s": float(np.mean(waits_s)), "wait_p99_s": float(np.quantile(waits_s, 0.99)),
        "latency_mean_s": float(np.mean(latencies_s)), "latency_p99_s": float(np.quantile(latencies_s, 0.99)),
        "refused": refused,
    }  # fmt: skip
