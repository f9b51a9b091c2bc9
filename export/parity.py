"""The gate: does ONNX Runtime compute what torch and the float64 oracle compute?

Runs in a process of its own (`python -m export.parity`), so that a crash of the runtime fails the export instead of
ending it, and so that what is tested is the file, not the object it was written from.
"""

import json
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
from safetensors.torch import load_file, save_file

from export.convert import rebuild
from export.errors import ParityError
from export.oracle import Oracle
from export.parity_grid import CASES, Case, Inputs, draw
from export.signature import LOWERINGS, LayerSpec, LoweringSpec
from model.attention import MultiHeadAttention, split_heads

LIMIT: Final = 1e-5
"""Largest error against each witness, relative to the largest value of the expected tensor, in float32."""

Arrays = Mapping[str, NDArray[Any]]

_LAYER_FILE: Final = "layer.safetensors"
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
    wanted = [(lowering.name, case.name) for lowering, case in comparisons()]
    if [(result.lowering, result.name) for result in results] != wanted:
        raise ParityError(f"parity: {len(results)} comparisons ran, want {len(wanted)}, each once")
    failed = [result for result in results if not result.worst <= LIMIT]
    if failed:
        worst = failed[0]
        raise ParityError(
            f"parity: {len(failed)} of {len(results)} comparisons are beyond {LIMIT:g}; lowering {worst.lowering} on "
            f"'{worst.name}' (batch {worst.batch}, {worst.num_queries} queries, {worst.num_kv} keys): error against "
            f"torch {worst.error_torch:.2e}, against the float64 oracle {worst.error_oracle:.2e}"
        )
    return ParityReport(LIMIT, max(result.worst for result in results), tuple(results))


def run_grid(candidate: Path, reference: Path) -> Iterator[CaseResult]:
    """Each comparison, measured on the graphs in `candidate`."""
    spec = LayerSpec(**json.loads((reference / _SPEC_FILE).read_text()))
    witnesses = _witnesses(spec, reference)
    sessions = {lowering.name: _session(candidate / lowering.file) for lowering in LOWERINGS}
    for seed, case in enumerate(CASES):
        yield from _measure(case, draw(case, spec, witnesses.oracle, seed), witnesses, sessions)


@final
@dataclass(frozen=True, slots=True)
class _Witnesses:
    layer: MultiHeadAttention
    oracle: Oracle


def _witnesses(spec: LayerSpec, reference: Path) -> _Witnesses:
    state = load_file(reference / _LAYER_FILE)
    layer = rebuild(spec)
    layer.load_state_dict(state)
    return _Witnesses(layer, Oracle({name: tensor.numpy() for name, tensor in state.items()}, spec.num_heads))


def _session(file: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1  # threads that wait for so little work cost more than they do
    options.log_severity_level = 3
    return ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])


def _measure(
    case: Case, inputs: Inputs, witnesses: _Witnesses, sessions: Mapping[str, ort.InferenceSession]
) -> Iterator[CaseResult]:
    from_torch, from_oracle = _torch_answers(witnesses.layer, inputs), _oracle_answers(witnesses.oracle, inputs)
    known: dict[str, NDArray[Any]] = {
        "queries": inputs.queries,
        "keys": inputs.keys,
        "values": inputs.values,
        "valid_lens": inputs.full_valid_lens(),
    }
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
    return float(np.abs(got.astype(np.float64) - want).max()) / max(scale, float(np.finfo(np.float32).tiny))


def _main(candidate: str, reference: str) -> None:
    torch.set_num_threads(1)
    for result in run_grid(Path(candidate), Path(reference)):
        sys.stdout.write(json.dumps(asdict(result)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _main(*sys.argv[1:])
