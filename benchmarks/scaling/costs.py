"""What requests cost a real server on one core: CPU seconds of its processes by what they answered meanwhile.

wrk asks from the other cores over loopback, with enough connections that the server's core is never idle. What a
request's stages take is told by a single connection, since of several each one's would include the others'.
"""

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import httpx
import numpy as np
import torch
from prometheus_client.parser import text_string_to_metric_families
from safetensors.numpy import save

from benchmarks.peers import wrk
from benchmarks.peers.forms import CODECS
from benchmarks.peers.workloads import Tensors, dense, ragged, self_attention
from benchmarks.peers.wrk import Target
from model.attention import seeded_layer
from tests.chaos.clients import Clients, Question
from tests.served import ServerProcess, serving

Say = Callable[[str], None]
SIZE, NUM_HEADS = 512, 8
# Enough to keep a core busy, and few beside what is answered in a round: those in flight at its end are lost.
CONNECTIONS: Final = 8
_STAGES: Final = ("decode", "queue", "compute", "encode")
_SETTLING_S: Final = 1.0
# Refuses soon: what waits is a few of the requests.
_SHORT_QUEUE_MS: Final = "20"
_CROWD: Final = 48
_CORES: Final = frozenset(os.sched_getaffinity(0))


@final
@dataclass(frozen=True, slots=True)
class Kind:
    """Requests of one shape in one form.

    Attributes:
        name: in the results.
        tensors: makes a request's tensors.
        media_type: of the body.
        encode: makes the body.
    """

    name: str
    tensors: Callable[[np.random.Generator], Tensors]
    media_type: str
    encode: Callable[[Tensors], bytes]

    def bodies(self, count: int = 8) -> list[bytes]:
        """Distinct ones, the same each time."""
        rng = np.random.default_rng(0)
        return [self.encode(self.tensors(rng)) for _ in range(count)]


def _kind(name: str, tensors: Callable[[np.random.Generator], Tensors], form: Any = "safetensors") -> Kind:
    return Kind(name, tensors, CODECS[form].media_type, CODECS[form].encode)


def _halves(tensors: Tensors) -> bytes:
    return save({name: tensor.astype(np.float16) for name, tensor in tensors.items()})


KINDS: Final = (
    *(_kind(f"dense-{length}", dense(length, length)) for length in (16, 32, 64, 128)),
    *(_kind(f"self-{length}", self_attention(length), "self-attention") for length in (16, 128)),
    *(Kind(f"half-{n}", dense(n, n), CODECS["safetensors"].media_type, _halves) for n in (16, 128)),
    *(_kind(f"json-{length}", dense(length, length), "json") for length in (16, 128)),
    _kind("padded", ragged), _kind("packed", ragged, "packed"),
)  # fmt: skip


@final
@dataclass(frozen=True, slots=True)
class Reading:
    """What a server has used and counted so far."""

    cpu_s: float
    requests: float
    sent_bytes: float
    stages_s: Mapping[str, float]

    @classmethod
    def of(cls, server: ServerProcess) -> "Reading":
        """Now."""
        return cls.parse(httpx.get(f"{server.url}/metrics").text, cpu_s(server))

    @classmethod
    def parse(cls, exposition: str, cpu_s: float) -> "Reading":
        """From the text of /metrics."""
        samples = [sample for family in text_string_to_metric_families(exposition) for sample in family.samples]

        def total(name: str, **labels: str) -> float:
            return sum(
                sample.value for sample in samples
                if sample.name == name and labels.items() <= sample.labels.items()
            )  # fmt: skip

        return cls(
            cpu_s, total("mha_requests_total", route="/v1/attention", code="ok"),
            total("mha_sent_bytes_total"),
            {stage: total("mha_stage_seconds_sum", stage=stage) for stage in _STAGES},
        )  # fmt: skip

    def each_since(self, before: "Reading") -> dict[str, Any]:
        """For each request answered since then.

        Raises:
            ValueError: there was none.
        """
        requests = self.requests - before.requests
        if requests <= 0:
            raise ValueError("nothing was answered")
        return {
            "requests": int(requests),
            "cpu_s": (self.cpu_s - before.cpu_s) / requests,
            "sent_bytes": (self.sent_bytes - before.sent_bytes) / requests,
            "stages_s": {name: (value - before.stages_s[name]) / requests for name, value in self.stages_s.items()},
        }


def server_core() -> int:
    """The core that the server has: the first of those that this process was started with."""
    return min(_CORES)


@contextmanager
def one_core(folder: Path, models: Path, *flags: str) -> Iterator[ServerProcess]:
    """A server on the first core, while this process, and what it starts, has the others."""
    others = _CORES - {server_core()}
    os.sched_setaffinity(0, {server_core()})
    try:
        with serving(folder / f"log{len(list(folder.glob('log*')))}", "--models", str(models), *flags) as server:
            os.sched_setaffinity(0, others or _CORES)
            yield server
    finally:
        os.sched_setaffinity(0, _CORES)


def measure(models: Path, rounds: int, seconds: float, say: Say) -> dict[str, Any]:
    """Every figure: of each kind, of a new connection, of a refusal, and memory."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        with one_core(folder, models) as server:
            idle_bytes = server.memory_bytes()
            kinds = {kind.name: _of_kind(server, kind, folder, (rounds, seconds), say) for kind in KINDS}
            memory = {"idle_bytes": idle_bytes, "peak_bytes": server.peak_memory_bytes()}
            heads = _heads(server)
            connection_s = _connection(server, rounds, seconds)
            say(f"a new connection: {connection_s * 1e6:.0f} us")
        refusals = {}
        for length in (16, 128):
            with one_core(folder, models, "--max-queue-ms", _SHORT_QUEUE_MS) as server:
                answer_s = kinds[f"self-{length}"]["cpu_s"]
                refusals[f"self-{length}"] = _refusal(server, length, answer_s, seconds)
            say(f"a refusal of self-{length}: {refusals[f'self-{length}']['cpu_s'] * 1e6:.0f} us")
    return {"kinds": kinds, "memory": memory, "heads": heads, "connection_s": connection_s, "refusals": refusals}


def question(length: int) -> Question:
    """Self-attention of one row, and its right answer by torch."""
    torch.set_num_threads(1)
    queries = np.random.default_rng(0).standard_normal((1, length, SIZE), np.float32)
    tensor = torch.from_numpy(queries)
    with torch.no_grad():
        right = seeded_layer(SIZE, NUM_HEADS, seed=0)(tensor, tensor, tensor).numpy()
    return Question.of(queries, right)


def _of_kind(server: ServerProcess, kind: Kind, folder: Path, how: tuple[int, float], say: Say) -> dict[str, Any]:
    """The median round by its CPU time, with the stages of a lone connection."""
    bodies = kind.bodies()
    place = folder / kind.name
    place.mkdir()
    for number, body in enumerate(bodies):
        (place / str(number)).write_bytes(body)
    target = Target(f"{server.url}/v1/attention", kind.media_type, place, len(bodies))
    rounds, seconds = how
    wrk.load(target, CONNECTIONS, _SETTLING_S)
    each = sorted((_window(server, target, CONNECTIONS, seconds) for _ in range(rounds)), key=lambda one: one["cpu_s"])
    median = each[len(each) // 2]
    # Whatever else the machine did meanwhile only made the others longer.
    lone = [_window(server, target, 1, seconds) for _ in range(rounds)]
    alone = min(lone, key=lambda one: one["stages_s"]["compute"])
    say(f"{kind.name}: {median['cpu_s'] * 1e6:.0f} us of CPU, {alone['stages_s']['compute'] * 1e6:.0f} us computing")
    return {
        **median, "least_s": each[0]["cpu_s"], "most_s": each[-1]["cpu_s"], "alone": alone,
        "received_bytes": statistics.mean(map(len, bodies)),
    }  # fmt: skip


def _window(server: ServerProcess, target: Target, connections: int, seconds: float) -> dict[str, Any]:
    before, began = Reading.of(server), time.perf_counter()
    counted = wrk.load(target, connections, seconds)
    elapsed_s = time.perf_counter() - began
    each = Reading.of(server).each_since(before)
    busy = each["cpu_s"] * each["requests"] / elapsed_s
    return {**each, "per_s": counted["requests"] / counted["duration_us"] * 1e6, "busy": busy}


def _heads(server: ServerProcess) -> dict[str, int]:
    """Bytes of the heads of a request and of its answer, as an ordinary client and the server write them."""
    headers = {"Content-Type": CODECS["safetensors"].media_type}
    answer = httpx.post(f"{server.url}/v1/attention", content=KINDS[0].bodies(1)[0], headers=headers)
    answer.raise_for_status()
    lines = {"request": answer.request.headers.raw, "answer": answer.headers.raw}
    first = {"request": len("POST /v1/attention HTTP/1.1\r\n"), "answer": len("HTTP/1.1 200 OK\r\n")}
    return {
        name: first[name] + sum(len(key) + len(value) + len(": \r\n") for key, value in raw) + len("\r\n")
        for name, raw in lines.items()
    }


def _connection(server: ServerProcess, rounds: int, seconds: float) -> float:
    """CPU seconds that a request costs more if it opens a connection, and closes it: the median of rounds in turn."""
    asked = question(16)

    def each_s(*, keep_alive: bool) -> float:
        before = Reading.of(server)
        clients = Clients(server.url, [asked], keep_alive=keep_alive)
        asyncio.run(_closed_loop(clients, CONNECTIONS, seconds))
        return float(Reading.of(server).each_since(before)["cpu_s"])

    return statistics.median(each_s(keep_alive=False) - each_s(keep_alive=True) for _ in range(rounds))


def _refusal(server: ServerProcess, length: int, answer_s: float, seconds: float) -> dict[str, Any]:
    """CPU seconds of a refusal: what is left of all when the answers have had theirs."""
    clients = Clients(server.url, [question(length)])
    before = cpu_s(server)
    asyncio.run(_closed_loop(clients, _CROWD, seconds))
    spent_s = cpu_s(server) - before
    outcomes = clients.account.outcomes
    refused = outcomes["overloaded"]
    left_s = spent_s - outcomes["answered"] * answer_s
    return {"outcomes": dict(outcomes), "cpu_s": left_s / refused if refused else 0.0}


async def _closed_loop(clients: Clients, connections: int, seconds: float) -> None:
    await clients.closed_loop(connections, seconds)
    clients.close()


def cpu_s(server: ServerProcess) -> float:
    """CPU time of its processes so far."""
    times = [one.cpu_times() for one in server.members()]
    return float(sum(one.user + one.system for one in times))
