"""Export from end to end: convert, inspect, prove, publish; each step a gate, nothing published before the last."""

import hashlib
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, final

from export.artifact import Destination, Lowering, manifest, publish, staging, write_graphs
from export.calibration import Calibration, read_calibration, standard_normal
from export.convert import serialise, spec_of, to_onnx
from export.errors import ExportError
from export.inspection import inspect
from export.parity import CaseResult, check_parity, save_reference
from export.precision import at_precision
from export.signature import LOWERINGS, LayerSpec, LoweringSpec
from model.attention import MultiHeadAttention
from model.checkpoint import LoadedLayer


@final
@dataclass(frozen=True, slots=True)
class Precision:
    """A precision of `export.precision`, and the file whose inputs its error is measured on; None: standard normal."""

    name: str
    calibration_file: Path | None

    def calibration(self, spec: LayerSpec) -> Calibration:
        """The calibration input for a layer."""
        return standard_normal(spec) if self.calibration_file is None else read_calibration(self.calibration_file, spec)


FP32: Final = Precision("fp32", None)


class Progress(Protocol):
    """Told what happens, as it happens."""

    def step(self, what: str) -> None:
        """A step begins."""

    def case(self, result: CaseResult) -> None:
        """A lowering was measured on a parity case."""


def export_layer(
    layer: MultiHeadAttention,
    source: Mapping[str, Any],
    destination: Destination,
    progress: Progress,
    precision: Precision = FP32,
) -> dict[str, Any]:
    """Publishes a layer in eval mode as an artefact, and returns its manifest.

    Args:
        layer: its lazy sizes settled.
        source: where the weights come from, for the manifest.
        destination: must have passed `check`.
        progress: is told each step and each parity result.
        precision: of the projections, and the input its error is measured on.

    Raises:
        ExportError: a gate failed; nothing was published.
    """
    _refuse_unfit_weights(layer)
    spec = spec_of(layer)
    calibration = precision.calibration(spec)
    lowered = at_precision(layer, precision.name)
    with staging(destination) as staged, tempfile.TemporaryDirectory() as reference:
        lowerings = tuple(_lower(lowered, lowering, progress) for lowering in LOWERINGS)
        write_graphs(staged, lowerings)
        progress.step("check against torch and the float64 oracle")
        save_reference(layer, precision.name, calibration, Path(reference))
        reports = check_parity(staged, Path(reference), precision.name, calibration.source, progress.case)
        content = manifest(spec, source, precision.name, lowerings, reports)
        progress.step("publish")
        publish(staged, destination, content)
    return content


def checkpoint_source(path: Path, loaded: LoadedLayer) -> dict[str, Any]:
    """Where a layer comes from that was read from a checkpoint, for the manifest."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {
        "kind": "checkpoint", "file": path.name, "sha256": digest, "layout": loaded.layout, "prefix": loaded.prefix,
    }  # fmt: skip


def _lower(layer: MultiHeadAttention, lowering: LoweringSpec, progress: Progress) -> Lowering:
    progress.step(f"convert and inspect {lowering.file}")
    model = to_onnx(layer, lowering)
    return Lowering(lowering, serialise(model), inspect(model, spec_of(layer), lowering))


def _refuse_unfit_weights(layer: MultiHeadAttention) -> None:
    for name, parameter in layer.named_parameters():
        if not parameter.isfinite().all():
            raise ExportError(f"{name}: holds nan or infinite values, want finite weights")
