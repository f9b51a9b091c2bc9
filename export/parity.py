"""The gate: does ONNX Runtime compute what torch and the float64 oracle compute?

Runs in a process of its own (`python -m export.parity`), so that a crash of the runtime fails the export instead of
ending it, and so that what is tested is the file, not the object it was written from.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, final

import numpy as np
import onnxruntime as ort
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from export.convert import rebuild
from export.errors import ParityError
from export.oracle import Oracle
from export.parity_grid import CASES, Case, Inputs, draw
from export.signature import MODEL_FILE, WEIGHTS_FILE, LayerSpec
from model.attention import MultiHeadAttention

LIMIT: Final = 1e-5
"""Largest error against each witness, relative to the largest value of the expected tensor, in float32."""

_LAYER_FILE: Final = "layer.safetensors"
_SPEC_FILE: Final = "layer.json"


@final
@dataclass(frozen=True, slots=True)
class CaseResult:
    """Errors of one case, relative to the scale of what was expected."""

    name: str
    batch: int
    num_queries: int
    num_kv: int
    error_torch: float
    error_oracle: float
    error_weights: float

    @property
    def worst(self) -> float:
        """The largest of the errors; nan when any is nan, so that it never passes."""
        errors = (self.error_torch, self.error_oracle, self.error_weights)
        return float(np.max(errors))


@final
@dataclass(frozen=True, slots=True)
class ParityReport:
    """What the gate measured, all within `limit`."""

    limit: float
    max_error: float
    cases: tuple[CaseResult, ...]


def save_reference(layer: MultiHeadAttention, spec: LayerSpec, folder: Path) -> None:
    """Writes the layer for the gate's process to `folder`."""
    save_file({name: tensor.contiguous() for name, tensor in layer.state_dict().items()}, folder / _LAYER_FILE)
    (folder / _SPEC_FILE).write_text(json.dumps(asdict(spec)))


def check_parity(candidate: Path, reference: Path, on_case: Callable[[CaseResult], None]) -> ParityReport:
    """Runs the grid in a process of its own.

    Args:
        candidate: folder of the graphs under test.
        reference: folder that `save_reference` wrote.
        on_case: called after each case, for progress.

    Raises:
        ParityError: a case is beyond the limit, or the process died.
    """
    command = [sys.executable, "-m", "export.parity", str(candidate), str(reference)]
    with subprocess.Popen(  # noqa: S603  # our own interpreter and module
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        if process.stdout is None or process.stderr is None:
            raise ParityError("the parity process has no output")
        results = []
        for line in process.stdout:
            results.append(CaseResult(**json.loads(line)))
            on_case(results[-1])
        complaint = process.stderr.read()
    if process.returncode:
        raise ParityError(f"the parity process ended with {process.returncode}: {complaint.strip()[-2000:]}")
    return _judge(results)


def _judge(results: list[CaseResult]) -> ParityReport:
    if len(results) != len(CASES):
        raise ParityError(f"parity: {len(results)} cases ran, want {len(CASES)}")
    failed = [result for result in results if not result.worst <= LIMIT]
    if failed:
        worst = failed[0]
        raise ParityError(
            f"parity: {len(failed)} of {len(results)} cases are beyond {LIMIT:g}; '{worst.name}' "
            f"(batch {worst.batch}, {worst.num_queries} queries, {worst.num_kv} keys): error against torch "
            f"{worst.error_torch:.2e}, against the float64 oracle {worst.error_oracle:.2e}, of the weights "
            f"{worst.error_weights:.2e}"
        )
    return ParityReport(LIMIT, max(result.worst for result in results), tuple(results))


def run_grid(candidate: Path, reference: Path) -> Iterator[CaseResult]:
    """Each case of the grid, measured on the graphs in `candidate`."""
    spec = LayerSpec(**json.loads((reference / _SPEC_FILE).read_text()))
    witnesses = _witnesses(spec, reference)
    graphs = _Graphs(_session(candidate / MODEL_FILE), _session(candidate / WEIGHTS_FILE))
    for seed, case in enumerate(CASES):
        yield _measure(case, draw(case, spec, witnesses.oracle, seed), witnesses, graphs)


@final
@dataclass(frozen=True, slots=True)
class _Witnesses:
    layer: MultiHeadAttention
    oracle: Oracle


@final
@dataclass(frozen=True, slots=True)
class _Graphs:
    plain: ort.InferenceSession
    weighted: ort.InferenceSession


def _witnesses(spec: LayerSpec, reference: Path) -> _Witnesses:
    state = load_file(reference / _LAYER_FILE)
    layer = rebuild(spec)
    layer.load_state_dict(state)
    return _Witnesses(layer, Oracle({name: tensor.numpy() for name, tensor in state.items()}, spec.num_heads))


def _session(file: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    return ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])


def _measure(case: Case, inputs: Inputs, witnesses: "_Witnesses", graphs: "_Graphs") -> CaseResult:
    lens = inputs.full_valid_lens()
    feed = {"queries": inputs.queries, "keys": inputs.keys, "values": inputs.values, "valid_lens": lens}
    (output,) = graphs.plain.run(["output"], feed)
    output_beside_weights, weights = graphs.weighted.run(["output", "weights"], feed)
    witness = _torch_output(witnesses.layer, inputs)
    expected, expected_weights = witnesses.oracle.attend(inputs.queries, inputs.keys, inputs.values, lens)
    return CaseResult(
        name=case.name,
        batch=case.batch,
        num_queries=case.num_queries,
        num_kv=case.num_kv,
        error_torch=relative_error(output, witness),
        error_oracle=float(np.max([relative_error(output, expected), relative_error(output_beside_weights, expected)])),
        error_weights=relative_error(weights, expected_weights),
    )


def _torch_output(layer: MultiHeadAttention, inputs: Inputs) -> NDArray[np.float32]:
    lens = None if inputs.valid_lens is None else torch.from_numpy(inputs.valid_lens)
    with torch.inference_mode():
        output = layer(*map(torch.from_numpy, (inputs.queries, inputs.keys, inputs.values)), lens)
    array: NDArray[np.float32] = output.numpy()
    return array


def relative_error(got: NDArray[np.floating], want: NDArray[np.floating]) -> float:
    """Largest absolute difference over the largest absolute value wanted; inf when the shapes differ."""
    if got.shape != want.shape:
        return float("inf")
    scale = float(np.abs(want).max())
    return float(np.abs(got.astype(np.float64) - want).max()) / max(scale, float(np.finfo(np.float32).tiny))


def _main(candidate: str, reference: str) -> None:
    for result in run_grid(Path(candidate), Path(reference)):
        sys.stdout.write(json.dumps(asdict(result)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _main(*sys.argv[1:])
