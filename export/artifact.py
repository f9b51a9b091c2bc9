"""The artefact folder: manifest, graphs, Triton's config.pbtxt, and their atomic publication.

    <repository>/<name>/config.pbtxt
    <repository>/<name>/<version>/manifest.json  model.onnx  weights.onnx  full.onnx  ...

The manifest's schema stands here and, read by other code, in `service.artifact`; a contract test proves they agree.
"""

import hashlib
import importlib.metadata
import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, final

from export import signature
from export.errors import PublicationError
from export.inspection import GraphFacts
from export.parity import CalibrationReport, ParityReport
from export.signature import MASKED, WEIGHTS, LayerSpec, LoweringSpec, TensorSpec

FORMAT: Final = 2
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_TOOLS: Final = ("mha-service", "torch", "onnx", "onnxscript", "onnxruntime")


@final
@dataclass(frozen=True, slots=True)
class Lowering:
    """One graph of an artefact: what it is, its bytes and what was read from it."""

    spec: LoweringSpec
    data: bytes
    facts: GraphFacts


@final
@dataclass(frozen=True, slots=True)
class Destination:
    """Where an artefact goes.

    Raises:
        PublicationError: the name or version is not one, or the version exists and `force` is not set.
    """

    repository: Path
    name: str
    version: int
    force: bool

    @property
    def folder(self) -> Path:
        """`<repository>/<name>/<version>`."""
        return self.repository / self.name / str(self.version)

    def check(self) -> None:
        """Refuses, before any work is done, what publication would refuse."""
        if not _NAME.fullmatch(self.name):
            raise PublicationError(
                f"name: got {self.name!r}, want letters, digits, '_', '-' and '.', not starting with '-' or '.'"
            )
        if self.version < 1:
            raise PublicationError(f"version: got {self.version}, want 1 or more")
        if self.folder.exists() and not self.force:
            raise PublicationError(f"{self.folder} exists: choose another --version, or overwrite it with --force")


def manifest(
    spec: LayerSpec,
    source: Mapping[str, Any],
    precision: str,
    lowerings: tuple[Lowering, ...],
    reports: tuple[ParityReport, CalibrationReport],
) -> dict[str, Any]:
    """The manifest as JSON values. It holds no time and no path, so the same weights give the same folder."""
    parity, calibration = reports
    return {
        "format": FORMAT,
        "layer": asdict(spec),
        "precision": precision,
        "opset": signature.OPSET,
        "signature": {
            "inputs": [_tensor_entry(tensor) for tensor in signature.tensors(spec, WEIGHTS.inputs)],
            "outputs": [_tensor_entry(tensor) for tensor in signature.tensors(spec, WEIGHTS.outputs)],
        },
        "lowerings": [_lowering_entry(lowering) for lowering in lowerings],
        "source": dict(source),
        "tools": {tool: importlib.metadata.version(tool) for tool in _TOOLS},
        "calibration": asdict(calibration),
        "parity": {**asdict(parity), "cases": [asdict(case) for case in parity.cases]},
    }


def _tensor_entry(tensor: TensorSpec) -> dict[str, Any]:
    return {"name": tensor.name, "datatype": tensor.datatype, "axes": list(tensor.axes)}


def _lowering_entry(lowering: Lowering) -> dict[str, Any]:
    return {
        "name": lowering.spec.name,
        "file": lowering.spec.file,
        "inputs": list(lowering.spec.inputs),
        "outputs": list(lowering.spec.outputs),
        "size_bytes": len(lowering.data),
        "sha256": hashlib.sha256(lowering.data).hexdigest(),
        "operators": lowering.facts.operators,
    }


@contextmanager
def staging(destination: Destination) -> Iterator[Path]:
    """A folder beside the final one, on the same file system, gone afterwards unless it was published.

    Raises:
        PublicationError: the repository cannot be written.
    """
    parent = destination.folder.parent
    created = not parent.exists()
    try:
        parent.mkdir(parents=True, exist_ok=True)
        # The leading dot keeps a half-written folder out of every listing of the repository.
        folder = Path(tempfile.mkdtemp(prefix=".staging-", dir=parent))
    except OSError as error:
        raise PublicationError(f"{parent}: {error.strerror}") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if created and not any(parent.iterdir()):
            parent.rmdir()


def write_graphs(folder: Path, lowerings: tuple[Lowering, ...]) -> None:
    """Writes each graph to its file in `folder`."""
    for lowering in lowerings:
        (folder / lowering.spec.file).write_bytes(lowering.data)


def publish(staged: Path, destination: Destination, content: Mapping[str, Any]) -> None:
    """Completes a staged folder with its manifest and renames it into place.

    Raises:
        PublicationError: the version exists (perhaps since a moment ago) and `force` is not set.
    """
    (staged / "manifest.json").write_text(json.dumps(content, indent=2) + "\n")
    staged.chmod(0o755)  # mkdtemp makes it private; a server usually runs as another user
    try:
        _rename_into_place(staged, destination)
    except OSError as error:
        raise PublicationError(f"{destination.folder}: cannot be published: {error.strerror}") from error
    _write_config(destination, content)


def _rename_into_place(staged: Path, destination: Destination) -> None:
    if not destination.force or not destination.folder.exists():
        staged.rename(destination.folder)  # refuses a folder that is not empty, so no race can overwrite
        return
    with tempfile.TemporaryDirectory(prefix=".replaced-", dir=destination.folder.parent) as bin_folder:
        replaced = Path(bin_folder) / "old"
        destination.folder.rename(replaced)
        try:
            staged.rename(destination.folder)
        except OSError:
            replaced.rename(destination.folder)
            raise


def _write_config(destination: Destination, content: Mapping[str, Any]) -> None:
    target = destination.folder.parent / "config.pbtxt"
    with tempfile.NamedTemporaryFile("w", dir=target.parent, prefix=".config-", delete=False) as file:
        file.write(triton_config(destination.name, content["layer"]))
    written = Path(file.name)
    written.chmod(0o644)
    written.replace(target)


def triton_config(name: str, layer: Mapping[str, Any]) -> str:
    """Triton's model configuration for `model.onnx` of this layer, as protobuf text."""
    spec = LayerSpec(**layer)
    blocks = [
        f'name: "{name}"',
        'platform: "onnxruntime_onnx"',
        "max_batch_size: 0",
        _config_tensors("input", signature.tensors(spec, MASKED.inputs)),
        _config_tensors("output", signature.tensors(spec, MASKED.outputs)),
    ]
    return "\n".join(blocks) + "\n"


def _config_tensors(field: str, tensors: tuple[TensorSpec, ...]) -> str:
    entries = [
        f'  {{\n    name: "{tensor.name}"\n    data_type: TYPE_{tensor.datatype}\n    dims: [ {_dims(tensor)} ]\n  }}'
        for tensor in tensors
    ]
    return f"{field} [\n" + ",\n".join(entries) + "\n]"


def _dims(tensor: TensorSpec) -> str:
    return ", ".join("-1" if isinstance(axis, str) else str(axis) for axis in tensor.axes)
