"""What a GPU gives, and what the engine adds to it: `python -m benchmarks.gpu models/attention/1`, or `make bench-gpu`.

In process, each figure a ratio of two ways that alternate within one run: medians of rounds, with their spread.
`benchmarks/results/gpu.json` gets them. With `--device cpu` everything runs as well, to see that it does; the figures
then say nothing.
"""

import ctypes
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, final

import click
import numpy as np
import onnxruntime as ort

from benchmarks.peers.figures import Spread
from benchmarks.peers.machine import commit, description
from service.artifact import Artifact, read_artifact
from service.assembly import Assembly, Share, gather
from service.cpus import usable_cpus
from service.engine import EngineCall
from service.engine.cpu import CpuEngine
from service.engine.cuda import CudaEngine
from service.engine.device import DeviceName, choose_device, missing_for_cuda
from service.engine.pinned import CudaHost, PageLocked, PinnedMemory
from service.engine.sessions import CPU, Provider, Sessions, cuda
from service.engine.warmup import feed_of
from service.errors import StartupError
from service.planner import Limits, Load, Part, plan
from service.scheduler import CALL_S
from service.settings import Settings
from service.start import CUDA_WORKERS
from service.tensors import AttentionInputs, WireTensors

RESULTS: Final = Path(__file__).parent / "results" / "gpu.json"
SHAPES: Final = ((1, 16, 16), (1, 128, 128), (16, 16, 16), (16, 512, 512))
_MIB: Final = 2**20
_Work = Callable[[], object]


@final
class _NoPages:
    """Pins nothing, where there is no CUDA runtime to do it."""

    def allocate(self, _: int) -> int | None:
        return None

    def free(self, _: int) -> None:
        raise NotImplementedError


@final
@dataclass(frozen=True)
class Bench:
    """What is measured, on what, and how often."""

    artifact: Artifact
    provider: Provider
    source: PageLocked
    engine: CudaEngine
    rounds: int
    tokens: int
    count: int

    def compare(self, ours: _Work, theirs: _Work) -> dict[str, float]:
        """How many times as fast ours is, and what it takes, after one round that does not count."""
        pairs = [(_seconds(ours), _seconds(theirs)) for _ in range(1 + self.rounds)][1:]
        spread = Spread.of([other / one for one, other in pairs])
        ours_ms = statistics.median(one for one, _ in pairs) * 1e3
        return {"ratio": spread.median, "least": spread.least, "most": spread.most, "ms": ours_ms}


def bound(bench: Bench) -> dict[str, Any]:
    """The engine against the runtime's plain `run`, which allocates and pages everything anew."""
    sessions = Sessions(bench.artifact, bench.provider)
    graph = sessions.graph("masked", 1)

    def compared(shape: tuple[int, int, int]) -> dict[str, float]:
        call = _call(bench.artifact, shape)
        plain = feed_of("masked", call)
        return bench.compare(lambda: bench.engine.run(call), lambda: graph.session.run(graph.outputs, plain))

    return {str(shape): compared(shape) for shape in SHAPES}


def against_cpu(bench: Bench) -> dict[str, Any]:
    """The GPU against every CPU of the machine."""
    wide = CpuEngine(bench.artifact, usable_cpus(), usable_cpus())

    def compared(shape: tuple[int, int, int]) -> dict[str, float]:
        call = _call(bench.artifact, shape)
        return bench.compare(lambda: bench.engine.run(call), lambda: wide.run(call))

    return {str(shape): compared(shape) for shape in SHAPES}


def tiles(bench: Bench) -> dict[str, Any]:
    """A long row in tiles: projected keys that stay on the device, against keys that are sent with every tile."""
    call = _call(bench.artifact, (1, bench.tokens, bench.tokens))
    parts = [slice(first, first + 256) for first in range(0, bench.tokens, 256)]
    graph = Sessions(bench.artifact, bench.provider).graph("attend_full", 1)

    def kept() -> None:
        projected = bench.engine.project(call.keys, call.values)
        for part in parts:
            bench.engine.attend(call.queries[:, part], projected, None)

    def sent() -> None:
        projected = bench.engine.project(call.keys, call.values)
        shared = {"projected_keys": projected.keys, "projected_values": projected.values}
        for part in parts:
            graph.session.run(graph.outputs, {"queries": call.queries[:, part], **shared})

    return bench.compare(kept, sent)


def ragged(bench: Bench) -> dict[str, Any]:
    """32 rows, 16 queries and 512 keys each, 68 of them valid on average: planned against one padded call."""
    layer, batch, num_queries, num_kv = bench.artifact.layer, 32, 16, 512
    call = _call(bench.artifact, (batch, num_queries, num_kv))
    lens = np.clip(np.random.default_rng(0).lognormal(np.log(62), 0.75, batch), 1, num_kv).astype(np.int64)
    wire = {"queries": call.queries, "keys": call.keys, "values": call.values, "valid_lens": lens}
    inputs = AttentionInputs.parse(WireTensors(wire), layer)
    padded = replace(call, valid_lens=np.repeat(lens[:, None], num_queries, axis=1))
    limits = Limits(Settings().workspace_bytes, CALL_S)

    def planned() -> object:
        parts = plan(inputs, layer, bench.engine.cost, limits).parts
        assembly = Assembly(inputs, layer, len(parts))

        def compute(part: Part) -> None:
            assembly.place(part, bench.engine.run(gather([Share(inputs, part)], Load.of(part))).output, None)

        list(pool.map(compute, parts))
        return assembly.answer()

    with ThreadPoolExecutor(CUDA_WORKERS) as pool:
        return bench.compare(planned, lambda: bench.engine.run(padded))


def memory(bench: Bench) -> dict[str, Any]:
    """Device memory over random shapes, batch 1 to 8 and lengths 1 to 512, for both ways to let an arena grow."""
    return {strategy: _growth(bench, strategy) for strategy in ("kNextPowerOfTwo", "kSameAsRequested")}


def _growth(bench: Bench, strategy: str) -> dict[str, float]:
    provider = bench.provider
    if provider != CPU:
        provider = replace(provider, options={**provider.options, "arena_extend_strategy": strategy})
    before = _device_bytes(provider)
    reference = CpuEngine(bench.artifact, 1, 1)
    engine = CudaEngine(bench.artifact, provider, PinnedMemory(bench.source), reference)
    rng = np.random.default_rng(0)
    taken = []
    for _ in range(bench.count):
        shape = (int(rng.integers(1, 9)), int(rng.integers(1, 513)), int(rng.integers(1, 513)))
        engine.run(_call(bench.artifact, shape))
        taken.append(_device_bytes(provider) - before)
    first, later = max(taken[: len(taken) // 4]), max(taken[len(taken) // 4 :])
    return {"first_quarter_mib": first / _MIB, "later_mib": later / _MIB}


MEASURES: Final[dict[str, Callable[[Bench], dict[str, Any]]]] = {
    "bound": bound, "against_cpu": against_cpu, "tiles": tiles, "ragged": ragged, "memory": memory,
}  # fmt: skip


def _call(artifact: Artifact, shape: tuple[int, int, int]) -> EngineCall:
    """Some numbers of (batch, queries, keys), all keys valid but the last."""
    batch, num_queries, num_kv = shape
    layer = artifact.layer
    rng = np.random.default_rng(0)
    queries = rng.standard_normal((batch, num_queries, layer.query_size), np.float32)
    keys = rng.standard_normal((batch, num_kv, layer.key_size), np.float32)
    values = rng.standard_normal((batch, num_kv, layer.value_size), np.float32)
    return EngineCall(queries, keys, values, np.full((batch, num_queries), max(1, num_kv - 1)))


def _seconds(work: _Work) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _device_bytes(provider: Provider) -> int:
    """What is taken of the device's memory, by whomever; 0 without one."""
    if provider.memory == "cpu":
        return 0
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    ctypes.CDLL("libcudart.so.13").cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
    return total.value - free.value


def _gpu() -> str:
    asked = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


@contextmanager
def _said(say: Callable[[str], None], name: str, results: dict[str, Any]) -> Iterator[None]:
    say(f"{name} ...")
    yield
    say(f"{name}: {json.dumps(results[name], indent=1)}")


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--device", default="cuda", type=click.Choice(["cuda", "cpu"]), help="cpu only shows that it runs.")
@click.option("--rounds", default=21, type=click.IntRange(1), help="Of each comparison.")
@click.option("--tokens", default=16384, type=click.IntRange(256), help="Of the long row.")
@click.option("--count", default=10_000, type=click.IntRange(4), help="Random shapes.")
@click.option("--tf32", is_flag=True, help="Let the GPU multiply in TF32.")
@click.option("--out", default=RESULTS, type=click.Path(dir_okay=False, path_type=Path), help="The results file.")
def main(folder: Path, device: DeviceName, tf32: bool, out: Path, **sizes: int) -> None:
    """Measures the artefact in FOLDER, one version of a model, on a GPU."""
    try:
        choose_device(device, missing_for_cuda)
    except StartupError as error:
        raise click.ClickException(str(error)) from error
    artifact = read_artifact(folder.resolve(), folder.resolve().parent.name, int(folder.resolve().name))
    provider = cuda(tf32=tf32) if device == "cuda" else CPU
    source: PageLocked = CudaHost() if device == "cuda" else _NoPages()
    engine = CudaEngine(artifact, provider, PinnedMemory(source), CpuEngine(artifact, 1, 1))
    bench = Bench(artifact, provider, source, engine, **sizes)
    results: dict[str, Any] = {
        "machine": {**description(), "gpu": _gpu() if device == "cuda" else None, "onnxruntime": ort.__version__},
        "commit": commit(),
        "tf32": tf32,
    }
    for name, measure in MEASURES.items():
        with _said(lambda line: click.echo(line, err=True), name, results):
            results[name] = measure(bench)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
