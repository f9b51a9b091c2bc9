"""The artefact's schema is written twice, by export and by the service: this is the proof that they agree."""

import dataclasses
import json
import typing
from pathlib import Path
from typing import Any

import pytest

from export.artifact import FORMAT as EXPORT_FORMAT
from export.parity import CalibrationReport, CaseResult, ParityReport
from export.precision import PRECISIONS
from export.signature import LayerSpec, TensorSpec
from service.artifact import (
    FORMAT,
    Artifact,
    Calibration,
    Layer,
    Lowering,
    Manifest,
    Parity,
    ParityCase,
    Tensor,
    read_artifact,
)


@pytest.fixture(params=["attention", "odd", "additive"])
def folder(request: pytest.FixtureRequest, repository: Path) -> Path:
    """An exported folder of each kind of layer."""
    return repository / request.param / "1"


def test_service_reads_what_export_wrote(folder: Path) -> None:
    """Every field that export wrote arrives in the service with its value, and none is missing."""
    written = json.loads((folder / "manifest.json").read_text())
    read = read_artifact(folder, folder.parent.name, 1)
    assert isinstance(read, Artifact)
    assert read.manifest.model_dump() == written


def test_same_format() -> None:
    """Both sides mean the same version of the schema."""
    assert EXPORT_FORMAT == FORMAT


def test_same_precisions(folder: Path) -> None:
    """The service reads an artefact of every precision that export can write, and of no other."""
    written = json.loads((folder / "manifest.json").read_text())
    assert typing.get_args(Manifest.model_fields["precision"].annotation) == PRECISIONS
    for precision in PRECISIONS:
        assert Manifest.model_validate_json(json.dumps({**written, "precision": precision})).precision == precision


@pytest.mark.parametrize(
    ("written", "read", "beside"),
    [
        pytest.param(LayerSpec, Layer, {"head_size"}, id="layer"),
        pytest.param(TensorSpec, Tensor, set(), id="tensor"),
        pytest.param(CaseResult, ParityCase, set(), id="parity case"),
        pytest.param(ParityReport, Parity, set(), id="parity"),
        pytest.param(CalibrationReport, Calibration, set(), id="calibration"),
    ],
)
def test_same_fields(written: Any, read: Any, beside: set[str]) -> None:
    """The two sides name the same fields."""
    names = {field.name for field in dataclasses.fields(written)} | beside
    assert names == set(read.model_fields)


def test_every_field_is_needed(folder: Path) -> None:
    """A manifest without any one of its fields is refused: the service reads no half-understood artefact."""
    written = json.loads((folder / "manifest.json").read_text())
    for field in Manifest.model_fields:
        assert field in written
        with pytest.raises(ValueError, match=field):
            Manifest.model_validate_json(json.dumps({name: written[name] for name in written if name != field}))
    assert set(written["lowerings"][0]) == set(Lowering.model_fields)
