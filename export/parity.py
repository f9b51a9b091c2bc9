"""The gate: does ONNX Runtime compute what torch and the float64 oracle compute?

Runs in a process of its own (`python -m export.parity`), so that a crash of the runtime fails the export instead of
ending it, and so that what is tested is the file, not the object it was written from.
"""

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import onnxruntime as ort
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file

from export.calibration import Calibration, Source
from export.convert import rebuild, spec_of
from export.errors import ParityError
from export.oracle import Oracle
from export.parity_grid import CASES, Case, Inputs, draw
from export.precision import ACTIVATION_STEPS, WEIGHT_STEPS, at_precision
from export.signature import LOWERINGS, MASKED, LayerSpec, LoweringSpec
from model.attention import MultiHeadAttention, split_heads

LIMITS: Final = {"fp32": 1e-5, "fp16": 2**-8, "int8": 1 / ACTIVATION_STEPS}
"""Largest error against each witness on the grid, relative to the largest value of the expected tensor.

fp16: the eight values between an input and the output that are rounded by up to 2^-11 each. int8: one step of an
activation, which may fall to either side where float32 and the witness differ; the witnesses round as the graph does.
"""

CALIBRATION_LIMITS: Final = {"fp32": 1e-5, "fp16": 2**-8, "int8": 0.02}
"""Largest error against the float64 oracle of the layer itself, unrounded, on the calibration input."""

Arrays = Mapping[str, NDArray[Any]]

_LAYER_FILE: Final = "layer.safetensors"
_CALIBRATION_FILE: Final = "calibration.safetensors"
_TINY: Final = float(np.finfo(np.float32).tiny)
_SPEC_FILE: Final = "layer.json"


@final
@dataclass(frozen=True, slots=True)
class CaseResult:
    """Errors of one lowering on one case: the largest of all its outputs, relative to the scale of each."""

    lowering: str
    name: str
    batch: int
    num_queries: int
    num_kv: int
    error_torch: float
    error_oracle: float

    @property
    def worst(self) -> float:
        """The larger of the errors; nan when either is nan, so that it never passes."""
        return float(np.max((self.error_torch, self.error_oracle)))


@final
@dataclass(frozen=True, slots=True)
class CalibrationReport:
    """What the precision costs on the calibration input: absolute errors over the largest value expected."""

    source: Source
    limit: float
    max_error: float
    mean_error: float


@final
@dataclass(frozen=True, slots=True)
class ParityReport:
    """What the gate measured, all within `limit`."""

    limit: float
    max_error: float
    cases: tuple[CaseResult, ...]


def comparisons() -> list[tuple[LoweringSpec, Case]]:
    """Every case with every lowering it applies to, in the order in which they are measured.

    A case with padding is nothing that a lowering without a mask could be asked.
    """
    return [(lowering, case) for case in CASES for lowering in LOWERINGS if _applies(case, lowering)]


def _applies(case: Case, lowering: LoweringSpec) -> bool:
    return case.every_key_counts or lowering.masks or "queries" not in lowering.inputs


def save_reference(layer: MultiHeadAttention, precision: str, calibration: Calibration, folder: Path) -> None:
    """Writes the layer in float32, its precision and the calibration input for the gate's process to `folder`."""
    save_file({name: tensor.contiguous() for name, tensor in layer.state_dict().items()}, folder / _LAYER_FILE)
    (folder / _SPEC_FILE).write_text(json.dumps({"layer": asdict(spec_of(layer)), "precision": precision}))
    save_arrays(_feed(calibration.inputs), folder / _CALIBRATION_FILE)


def check_parity(
    candidate: Path, reference: Path, precision: str, source: Source, on_case: Callable[[CaseResult], None]
) -> tuple[ParityReport, CalibrationReport]:
    """Runs the grid and the calibration in a process of their own.

    Args:
        candidate: folder of the graphs under test.
        reference: folder that `save_reference` wrote.
        precision: of the graphs; decides the limits.
        source: of the calibration input, for its report.
        on_case: called after each case, for progress.

    Raises:
        ParityError: a case or the calibration is beyond the limit, or the process died.
    """
    command = [sys.executable, "-m", "export.parity", str(candidate), str(reference)]
    with subprocess.Popen(  # noqa: S603  # our own interpreter and module
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        if process.stdout is None or process.stderr is None:
            raise ParityError("the parity process has no output")
        results, errors = [], (math.nan, math.nan)
        for line in process.stdout:
            said = json.loads(line)
            if "calibration" in said:
                errors = said["calibration"]
                continue
            results.append(CaseResult(**said))
            on_case(results[-1])
        complaint = process.stderr.read()
    if process.returncode:
        raise ParityError(f"the parity process ended with {process.returncode}: {complaint.strip()[-2000:]}")
    report = _judge(results, LIMITS[precision])
    return report, _judge_calibration(CalibrationReport(source, CALIBRATION_LIMITS[precision], *errors), precision)


def _judge_calibration(report: CalibrationReport, precision: str) -> CalibrationReport:
    if not report.max_error <= report.limit:
        source = ", ".join(str(value) for value in report.source.values())
        raise ParityError(
            f"calibration: the largest error of {precision} on this input ({source}) is {report.max_error:.2%} of the "
            f"largest output, the limit is {report.limit:.2%}; choose another --precision, or give --calibration the "
            "inputs that this layer is meant for"
        )
    return report


def _judge(results: list[CaseResult], limit: float) -> ParityReport:
    wanted = [(lowering.name, case.name) for lowering, case in comparisons()]
    if [(result.lowering, result.name) for result in results] != wanted:
        raise ParityError(f"parity: {len(results)} comparisons ran, want {len(wanted)}, each once")
    failed = [result for result in results if not result.worst <= limit]
    if failed:
        worst = failed[0]
        raise ParityError(
            f"parity: {len(failed)} of {len(results)} comparisons are beyond {limit:g}; lowering {worst.lowering} on "
            f"'{worst.name}' (batch {worst.batch}, {worst.num_queries} queries, {worst.num_kv} keys): error against "
            f"torch {worst.error_torch:.2e}, against the float64 oracle {worst.error_oracle:.2e}"
        )
    return ParityReport(limit, max(result.worst for result in results), tuple(results))


def run_grid(candidate: Path, reference: Path) -> Iterator[CaseResult]:
    """Each comparison, measured on the graphs in `candidate`."""
    layer, precision = _reference(reference)
    witnesses = _witnesses(layer, precision)
    sessions = {lowering.name: _session(candidate / lowering.file) for lowering in LOWERINGS}
    for seed, case in enumerate(CASES):
        yield from _measure(case, draw(case, spec_of(layer), witnesses.oracle, seed), witnesses, sessions)


def calibrate(candidate: Path, reference: Path) -> tuple[float, float]:
    """Largest and mean error of `masked` on the calibration input, over the largest value the oracle expects."""
    layer, _ = _reference(reference)
    oracle, session = Oracle(_arrays(layer), layer.num_heads), _session(candidate / MASKED.file)
    tensors = load_arrays(reference / _CALIBRATION_FILE)
    largest, total, scale, count = 0.0, 0.0, 0.0, 0
    for row in range(len(tensors["queries"])):  # one at a time: the oracle holds all scores of a call in float64
        feed = {name: tensor[row : row + 1] for name, tensor in tensors.items()}
        want, _ = oracle.attend(**feed)
        error = np.abs(session.run(["output"], feed)[0] - want)
        # In this order, a nan among the errors stays.
        largest, scale = float(np.max([error.max(), largest])), max(scale, float(np.abs(want).max()))
        total, count = total + float(error.sum()), count + error.size
    scale = max(scale, _TINY)
    return largest / scale, total / count / scale


@final
@dataclass(frozen=True, slots=True)
class _Witnesses:
    layer: MultiHeadAttention
    oracle: Oracle


def _reference(reference: Path) -> tuple[MultiHeadAttention, str]:
    described = json.loads((reference / _SPEC_FILE).read_text())
    layer = rebuild(LayerSpec(**described["layer"]))
    layer.load_state_dict(load_file(reference / _LAYER_FILE))
    return layer, described["precision"]


def _witnesses(layer: MultiHeadAttention, precision: str) -> _Witnesses:
    steps = (ACTIVATION_STEPS, WEIGHT_STEPS) if precision == "int8" else None
    return _Witnesses(at_precision(layer, precision), Oracle(_arrays(layer), layer.num_heads, steps))


def _arrays(layer: MultiHeadAttention) -> Arrays:
    return {name: tensor.numpy() for name, tensor in layer.state_dict().items()}


def _session(file: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1  # threads that wait for so little work cost more than they do
    options.log_severity_level = 3
    return ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])


def _measure(
    case: Case, inputs: Inputs, witnesses: _Witnesses, sessions: Mapping[str, ort.InferenceSession]
) -> Iterator[CaseResult]:
    from_torch, from_oracle = _torch_answers(witnesses.layer, inputs), _oracle_answers(witnesses.oracle, inputs)
    known = _feed(inputs)
    for lowering in LOWERINGS:
        if not _applies(case, lowering):
            continue
        names = list(lowering.outputs)
        answers = sessions[lowering.name].run(names, {name: known[name] for name in lowering.inputs})
        got = dict(zip(names, answers, strict=True))
        known |= got  # what `project` answers is what `attend` is given: the pair is proved, not each half
        yield CaseResult(
            lowering=lowering.name,
            name=case.name,
            batch=case.batch,
            num_queries=case.num_queries,
            num_kv=case.num_kv,
            error_torch=_largest_error(got, from_torch),
            error_oracle=_largest_error(got, from_oracle),
        )


def _feed(inputs: Inputs) -> dict[str, NDArray[Any]]:
    given = {"queries": inputs.queries, "keys": inputs.keys, "values": inputs.values}
    return {**given, "valid_lens": inputs.full_valid_lens()}


def _largest_error(got: Arrays, want: Arrays) -> float:
    return float(np.max([relative_error(array, want[name]) for name, array in got.items()]))


def _torch_answers(layer: MultiHeadAttention, inputs: Inputs) -> Arrays:
    queries, keys, values = map(torch.from_numpy, (inputs.queries, inputs.keys, inputs.values))
    lens = None if inputs.valid_lens is None else torch.from_numpy(inputs.valid_lens)
    with torch.inference_mode():
        output, weights = layer(queries, keys, values, lens, need_weights=True)
        projected = (split_heads(layer.W_k(keys), layer.num_heads), split_heads(layer.W_v(values), layer.num_heads))
    return {name: tensor.numpy() for name, tensor in _named(output, weights, *projected).items()}


def _oracle_answers(oracle: Oracle, inputs: Inputs) -> Arrays:
    answer = oracle.attend(inputs.queries, inputs.keys, inputs.values, inputs.full_valid_lens())
    return _named(*answer, *oracle.project(inputs.keys, inputs.values))


def _named(*answers: Any) -> dict[str, Any]:
    return dict(zip(("output", "weights", "projected_keys", "projected_values"), answers, strict=True))


def relative_error(got: NDArray[np.floating], want: NDArray[np.floating]) -> float:
    """Largest absolute difference over the largest absolute value wanted; inf when the shapes differ."""
    if got.shape != want.shape:
        return float("inf")
    scale = float(np.abs(want).max())
    return float(np.abs(got.astype(np.float64) - want).max()) / max(scale, _TINY)


def _main(candidate: str, reference: str) -> None:
    torch.set_num_threads(1)
    for result in run_grid(Path(candidate), Path(reference)):
        sys.stdout.write(json.dumps(asdict(result)) + "\n")
        sys.stdout.flush()
    sys.stdout.write(json.dumps({"calibration": calibrate(Path(candidate), Path(reference))}) + "\n")


if __name__ == "__main__":
    _main(*sys.argv[1:])
