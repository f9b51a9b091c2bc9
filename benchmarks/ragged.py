"""What it is worth to know which keys are padding: `python benchmarks/ragged.py models/attention/1`.

One request of 32 rows, 16 queries and 512 keys each, of which log-normally many count (about 68 of 512 on average), in
process. `padded` is one call of the whole batch on every CPU, as a server that sees opaque tensors makes it; `planned`
is what the service does: the parts of the request, as many one-thread calls side by side as there are CPUs. Figures are
medians of rounds that alternate, and their ratio is the claim: such machines are shared, so seconds mean little alone.
"""

import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from service.artifact import read_artifact
from service.assembly import Assembly, Share, gather
from service.cpus import usable_cpus
from service.engine import EngineCall
from service.engine.cpu import CpuEngine
from service.planner import Limits, Load, Part, plan
from service.scheduler import CALL_S
from service.settings import Settings
from service.tensors import AttentionInputs, WireTensors

ROUNDS = 21
BATCH, NUM_QUERIES, NUM_KV = 32, 16, 512


def main(folder: Path) -> None:
    """Prints the medians and the median of the ratios."""
    artifact = read_artifact(folder.resolve(), "layer", 1)
    layer, cpus = artifact.layer, usable_cpus()
    rng = np.random.default_rng(0)
    tensors = {
        "queries": rng.standard_normal((BATCH, NUM_QUERIES, layer.query_size), np.float32),
        "keys": rng.standard_normal((BATCH, NUM_KV, layer.key_size), np.float32),
        "values": rng.standard_normal((BATCH, NUM_KV, layer.value_size), np.float32),
        "valid_lens": np.clip(rng.lognormal(np.log(62), 0.75, BATCH), 1, NUM_KV).astype(np.int64),
    }
    inputs = AttentionInputs.parse(WireTensors(tensors), layer)
    wide, narrow = CpuEngine(artifact, cpus, cpus), CpuEngine(artifact, 1, 1)
    limits = Limits(Settings().workspace_bytes, CALL_S)

    def padded() -> object:
        valid_lens = inputs.valid_lens.reshape(BATCH, NUM_QUERIES)
        return wide.run(EngineCall(inputs.queries.padded(), inputs.keys.padded(), inputs.values.padded(), valid_lens))

    def planned() -> object:
        parts = plan(inputs, layer, narrow.cost, limits).parts
        assembly = Assembly(inputs, layer, len(parts))

        def compute(part: Part) -> None:
            result = narrow.run(gather([Share(inputs, part)], Load.of(part)))
            assembly.place(part, result.output, None)

        list(pool.map(compute, parts))
        return assembly.answer()

    with ThreadPoolExecutor(cpus) as pool:
        rounds = [(seconds(padded), seconds(planned)) for _ in range(ROUNDS)][1:]
    padded_ms, planned_ms = (statistics.median(column) * 1000 for column in zip(*rounds, strict=True))
    ratio = statistics.median(one / other for one, other in rounds)
    mean = float(inputs.extents.mean())
    sys.stdout.write(
        f"{BATCH} x {NUM_QUERIES} x {NUM_KV}, {mean:.0f} keys valid on average, {cpus} CPUs\n"
        f"padded  {padded_ms:8.2f} ms\nplanned {planned_ms:8.2f} ms\nratio   {ratio:8.2f}\n"
    )


def seconds(work: Callable[[], object]) -> float:
    """How long one call takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python benchmarks/ragged.py ARTEFACT_FOLDER, as models/attention/1")
    main(Path(sys.argv[1]))
