"""The exported graph in ONNX Runtime, with the options of `service.engine.sessions`, for every peer alike."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import onnxruntime as ort


@final
@dataclass(frozen=True, slots=True)
class Setup:
    """How a server is to run; it comes from the environment, which every kind of worker process inherits."""

    model: str
    port: int
    processes: int  # worker processes, where the peer has them
    callers: int  # engine calls at once in each of them
    threads: int  # of one call
    batch: int
    wait_ms: int

    @classmethod
    def read(cls) -> "Setup":
        """The setup that the driver asks for."""
        return cls(
            os.environ["BENCH_MODEL"],
            *(
                int(os.environ[f"BENCH_{name}"])
                for name in ("PORT", "PROCESSES", "CALLERS", "THREADS", "BATCH", "WAIT_MS")
            ),
        )


@final
class Attention:
    """The layer, one call on `threads` threads."""

    def __init__(self, model: str, threads: int) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        options.enable_mem_pattern = False
        options.enable_cpu_mem_arena = False
        options.add_session_config_entry("session.intra_op.allow_spinning", "1" if threads > 1 else "0")
        if threads > 1:
            options.add_session_config_entry("session.intra_op.spin_duration_us", "200")
            options.add_session_config_entry("session.force_spinning_stop", "1")
        self._session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def __call__(self, feed: Mapping[str, np.ndarray]) -> np.ndarray:
        """The output, (B, Q, 512)."""
        (output,) = self._session.run(["output"], dict(feed))
        return output

    def batch(self, feeds: Sequence[Mapping[str, np.ndarray]]) -> list[np.ndarray]:
        """The output of each request; those of equal shape, as in every workload, run as one call."""
        if len(feeds) == 1:
            return [self(feeds[0])]
        if len({(feed["queries"].shape, feed["keys"].shape) for feed in feeds}) > 1:
            return [self(feed) for feed in feeds]
        merged = {name: np.concatenate([feed[name] for feed in feeds]) for name in feeds[0]}
        return np.split(self(merged), len(feeds))
