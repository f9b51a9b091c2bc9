"""What reading a binary body costs beyond copying it once: `python benchmarks/decode.py`.

The body is three float32 tensors of (8, 128, 512), 6 MiB, as the Open Inference Protocol sends them. `decode` makes
tensors of them, `parse` judges these (shapes, dtypes, every value finite). Each figure is the median of rounds that
alternate with a copy of the same bytes, since such machines are shared and noisy.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

from service.artifact import Layer
from service.codec.oip import decode_request
from service.tensors import AttentionInputs

ROUNDS = 200
SHAPE = (8, 128, 512)
NAMES = ("queries", "keys", "values")


def body() -> tuple[bytes, int]:
    """A request body and the length of its JSON header."""
    rng = np.random.default_rng(0)
    tensors = [rng.standard_normal(SHAPE, np.float32) for _ in NAMES]
    entries = [
        {"name": name, "datatype": "FP32", "shape": SHAPE, "parameters": {"binary_data_size": tensor.nbytes}}
        for name, tensor in zip(NAMES, tensors, strict=True)
    ]
    header = json.dumps({"inputs": entries}).encode()
    header += b" " * (-len(header) % 64)  # as a client that cares for alignment would
    return header + b"".join(tensor.tobytes() for tensor in tensors), len(header)


def seconds(work: Callable[[], object]) -> float:
    """How long one call takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main() -> None:
    """Prints the medians in milliseconds."""
    data, length = body()
    layer = Layer(
        num_hiddens=512, num_heads=8, head_size=64, query_size=512, key_size=512, value_size=512,
        bias=False, scoring="dot_product", scoring_size=None,
    )  # fmt: skip
    target = np.empty(len(data), np.uint8)
    source = np.frombuffer(data, np.uint8)
    works: dict[str, Callable[[], object]] = {
        "memcpy": lambda: np.copyto(target, source),
        "decode": lambda: decode_request(data, length),
        "decode and parse": lambda: AttentionInputs.parse(decode_request(data, length).tensors, layer),
    }
    rounds = [{name: seconds(work) for name, work in works.items()} for _ in range(ROUNDS)]
    for name in works:
        median_ms = statistics.median(one[name] for one in rounds) * 1000
        sys.stdout.write(f"{name:18} {median_ms:.3f} ms\n")


if __name__ == "__main__":
    main()
