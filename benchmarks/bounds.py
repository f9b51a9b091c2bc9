"""What the service promises to stay within: `python -m benchmarks.bounds models` for a repository of one 512/8 layer.

Memory of a very long request and of ten thousand shapes, a small request's wait beside a large one, and the time to
start. Unlike throughput these are bounds on one server, so no peer is needed. Every request goes to a real process over
loopback; `benchmarks/results/bounds.json` gets the figures.
"""

import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, final

import click
import httpx
import numpy as np
import psutil
import safetensors.numpy

from model.attention import MultiHeadAttention, seeded_layer

RESULTS: Final = Path(__file__).parent / "results" / "bounds.json"
SIZE, NUM_HEADS = 512, 8
HEADERS: Final = {"Content-Type": "application/vnd.safetensors"}
_GIB: Final = 2**30
_START_S: Final = 60.0
_CONNECTIONS: Final = 4

Array = np.ndarray[Any, Any]
Say = Callable[[str], None]


@final
class Server:
    """One `mha serve` on a free port, and how to ask it."""

    def __init__(self, models: Path) -> None:
        command = [sys.executable, "-m", "mha", "serve", "--models", str(models), "--port", "0", "--log-format", "json"]
        self.started = time.perf_counter()
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.url = self._await("listening")["url"]
        self._await("ready")
        self.ready_s = time.perf_counter() - self.started
        # The log of every request has to go somewhere.
        threading.Thread(target=self._drain, daemon=True).start()

    def ask(self, client: httpx.Client, tensors: dict[str, Array]) -> bytes:
        """The answer, which has to be one."""
        response = client.post(f"{self.url}/v1/attention", content=safetensors.numpy.save(tensors), headers=HEADERS)
        response.raise_for_status()
        return response.content

    def memory_bytes(self) -> int:
        """What its processes hold now, together. Pages that they share are counted for each."""
        return sum(int(one.memory_info().rss) for one in self._members())

    def peak_bytes(self) -> int:
        """The sum of the most that each of them has ever held."""
        statuses = [Path(f"/proc/{one.pid}/status").read_text() for one in self._members()]
        return sum(int(status.partition("VmHWM:")[2].split()[0]) * 1024 for status in statuses)

    def end(self) -> None:
        """Ends it, and waits for that."""
        self._process.terminate()
        self._process.wait(60)

    def _members(self) -> list[psutil.Process]:
        parent = psutil.Process(self._process.pid)
        return [parent, *parent.children()]

    def _await(self, event: str) -> dict[str, Any]:
        deadline = time.perf_counter() + _START_S
        assert self._process.stdout is not None  # noqa: S101  # asked for above
        while time.perf_counter() < deadline and (line := self._process.stdout.readline()):
            fields: dict[str, Any] = json.loads(line)
            if fields["event"] == event:
                return fields
        sys.exit(f"the server did not become {event}")

    def _drain(self) -> None:
        assert self._process.stdout is not None  # noqa: S101
        for _ in self._process.stdout:
            pass


@contextmanager
def served(models: Path) -> Iterator[Server]:
    """A server that is ended afterwards."""
    server = Server(models)
    try:
        yield server
    finally:
        server.end()


def start(models: Path, say: Say) -> dict[str, float]:
    """Seconds from the start of the process until it is ready, of seven starts."""
    seconds = []
    for _ in range(7):
        with served(models) as server:
            seconds.append(server.ready_s)
    say(f"start to ready: median {statistics.median(seconds):.2f} s, worst {max(seconds):.2f} s")
    return {"median_s": statistics.median(seconds), "worst_s": max(seconds)}


def long(models: Path, say: Say) -> dict[str, float]:
    """Peak memory over one self-attention of 16,384 tokens, and the error of sampled rows against float64."""
    tokens = np.random.default_rng(0).standard_normal((1, 16384, SIZE), np.float32)
    with served(models) as server, httpx.Client(timeout=600) as client:
        began = time.perf_counter()
        answer = safetensors.numpy.load(server.ask(client, {"queries": tokens}))["output"]
        seconds, peak_bytes = time.perf_counter() - began, server.peak_bytes()
    rows = np.random.default_rng(1).choice(16384, 16, replace=False)
    want = _rows_in_float64(seeded_layer(SIZE, NUM_HEADS, seed=0), tokens[0], rows)
    error = float(np.abs(answer[0, rows] - want).max() / np.abs(want).max())
    say(f"(1, 16384, 16384): peak {peak_bytes / _GIB:.2f} GiB, {seconds:.1f} s, error of 16 rows {error:.1e}")
    return {"peak_bytes": peak_bytes, "seconds": seconds, "relative_error": error}


def shapes(models: Path, say: Say, count: int = 10_000) -> dict[str, float]:
    """Memory over requests of random shapes: batch 1 to 8, lengths 1 to 512."""
    rng = np.random.default_rng(0)
    sizes = [(rng.integers(1, 9), rng.integers(1, 513), rng.integers(1, 513)) for _ in range(count)]
    pool = np.random.default_rng(1).standard_normal(8 * 512 * SIZE, np.float32)
    memory: list[int] = []
    # As many connections as the server may have processes, so that each meets the shapes.
    with served(models) as server, ExitStack() as stack:
        clients = [stack.enter_context(httpx.Client(timeout=600)) for _ in range(_CONNECTIONS)]
        for number, (batch, num_queries, num_kv) in enumerate(sizes):
            queries, keys = (pool[: batch * n * SIZE].reshape(batch, n, SIZE) for n in (num_queries, num_kv))
            lens = rng.integers(0, num_kv + 1, batch)
            server.ask(clients[number % _CONNECTIONS], {"queries": queries, "keys": keys, "valid_lens": lens})
            memory.append(server.memory_bytes())
            if number % 500 == 499:
                say(f"{number + 1} of {count} shapes: {memory[-1] / _GIB:.3f} GiB")
    first, later = max(memory[: count // 4]), max(memory[count // 4 :])
    growth = later / first - 1
    say(f"{count} shapes: {first / _GIB:.3f} GiB in the first quarter, {growth:+.1%} after it")
    return {"count": count, "first_quarter_bytes": first, "later_bytes": later, "growth": growth}


def beside(models: Path, say: Say, seconds: float = 15.0) -> dict[str, float]:
    """The p99 of (1, 16, 16) at 50 a second, alone and while another client sends (16, 512, 512) without a pause."""
    large = {"queries": np.random.default_rng(0).standard_normal((16, 512, SIZE), np.float32)}
    with served(models) as server:
        alone_s = _p99(server, seconds)
        done = threading.Event()
        sent: list[int] = []
        thread = threading.Thread(target=_stream, args=(server, large, done, sent))
        thread.start()
        beside_s = _p99(server, seconds)
        done.set()
        thread.join()
    say(f"(1, 16, 16) p99: alone {alone_s * 1e3:.1f} ms, beside {len(sent)} large ones {beside_s * 1e3:.1f} ms")
    return {"alone_s": alone_s, "beside_s": beside_s, "large_requests": len(sent)}


def _p99(server: Server, seconds: float, rate: float = 50.0) -> float:
    """On a schedule, timed from when each was due: a stall delays all that were due in it."""
    small = {"queries": np.random.default_rng(2).standard_normal((1, 16, SIZE), np.float32)}
    latencies = []
    with httpx.Client(timeout=60) as client:
        server.ask(client, small)
        began = time.perf_counter()
        for number in range(int(seconds * rate)):
            due = began + number / rate
            time.sleep(max(0.0, due - time.perf_counter()))
            server.ask(client, small)
            latencies.append(time.perf_counter() - due)
    return float(np.quantile(latencies, 0.99))


def _stream(server: Server, tensors: dict[str, Array], done: threading.Event, sent: list[int]) -> None:
    with httpx.Client(timeout=60) as client:
        while not done.is_set():
            sent.append(len(server.ask(client, tensors)))


def _rows_in_float64(layer: MultiHeadAttention, tokens: Array, rows: Array) -> Array:
    """Self-attention of chosen rows, from the equations."""
    weights = {name: tensor.detach().numpy().astype(np.float64) for name, tensor in layer.state_dict().items()}
    every = tokens.astype(np.float64)
    queries, keys, values = (
        (x @ weights[f"W_{name}.weight"].T).reshape(len(x), NUM_HEADS, -1) for name, x in
        (("q", every[rows]), ("k", every), ("v", every))
    )  # fmt: skip
    scores = np.einsum("qhd,khd->hqk", queries, keys) / np.sqrt(queries.shape[-1])
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    heads = np.einsum("hqk,khd->qhd", powers / powers.sum(-1, keepdims=True), values)
    return heads.reshape(len(rows), -1) @ weights["W_o.weight"].T


MEASURES: Final[dict[str, Callable[[Path, Say], dict[str, float]]]] = {
    "start": start, "long": long, "beside": beside, "shapes": shapes,
}  # fmt: skip


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("models", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--only", multiple=True, type=click.Choice(list(MEASURES)), help="These measures.")
@click.option("--out", default=RESULTS, type=click.Path(dir_okay=False, path_type=Path), help="The results file.")
def main(models: Path, only: Sequence[str], out: Path) -> None:
    """Measures the bounds of a server of MODELS: one layer of 512 hiddens and 8 heads, exported with seed 0."""
    results: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    for name in only or MEASURES:
        results[name] = MEASURES[name](models, lambda line: click.echo(line, err=True))
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
