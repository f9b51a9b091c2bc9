"""Export from end to end: convert, inspect, prove, publish; each step a gate, nothing published before the last."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from export.artifact import Destination, Lowering, manifest, publish, staging, write_graphs
from export.convert import serialise, spec_of, to_onnx
from export.errors import ExportError
from export.inspection import inspect
from export.parity import CaseResult, check_parity, save_reference
from export.signature import LOWERINGS, LoweringSpec
from model.attention import MultiHeadAttention


class Progress(Protocol):
    """Told what happens, as it happens."""

    def step(self, what: str) -> None:
        """A step begins."""

    def case(self, result: CaseResult) -> None:
        """A lowering was measured on a parity case."""


def export_layer(
    layer: MultiHeadAttention, source: Mapping[str, Any], destination: Destination, progress: Progress
) -> dict[str, Any]:
    """Publishes a layer in eval mode as an artefact, and returns its manifest.

    Args:
        layer: its lazy sizes settled.
        source: where the weights come from, for the manifest.
        destination: must have passed `check`.
        progress: is told each step and each parity result.

    Raises:
        ExportError: a gate failed; nothing was published.
    """
    _refuse_unfit_weights(layer)
    spec = spec_of(layer)
    with staging(destination) as staged, tempfile.TemporaryDirectory() as reference:
        lowerings = tuple(_lower(layer, lowering, progress) for lowering in LOWERINGS)
        write_graphs(staged, lowerings)
        progress.step("check against torch and the float64 oracle")
        save_reference(layer, spec, Path(reference))
        report = check_parity(staged, Path(reference), progress.case)
        content = manifest(spec, source, lowerings, report)
        progress.step("publish")
        publish(staged, destination, content)
    return content


def _lower(layer: MultiHeadAttention, lowering: LoweringSpec, progress: Progress) -> Lowering:
    progress.step(f"convert and inspect {lowering.file}")
    model = to_onnx(layer, lowering)
    return Lowering(lowering, serialise(model), inspect(model, spec_of(layer), lowering))


def _refuse_unfit_weights(layer: MultiHeadAttention) -> None:
    for name, parameter in layer.named_parameters():
        if not parameter.isfinite().all():
            raise ExportError(f"{name}: holds nan or infinite values, want finite weights")
