"""What export published, read back and verified: the manifest's schema as the service needs it.

The same schema is written in `export.artifact`; a contract test proves that they agree. Imports pydantic only.
"""

import hashlib
from pathlib import Path
from typing import Final, Literal, final

from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError

from service.errors import ArtifactError

FORMAT: Final = 2


class _Frozen(BaseModel):
    # Unknown fields are an error: a manifest of a later format must not be half understood.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


@final
class Layer(_Frozen):
    """Sizes and kind of the exported layer.

    All heads together have `projected_size` features: num_hiddens, or less where heads were pruned.
    """

    num_hiddens: PositiveInt
    num_heads: PositiveInt
    head_size: PositiveInt
    query_size: PositiveInt
    key_size: PositiveInt
    value_size: PositiveInt
    bias: bool
    scoring: Literal["dot_product", "additive"]
    scoring_size: PositiveInt | None

    @property
    def projected_size(self) -> int:
        """Features of a projected query, key or value: H * D."""
        return self.num_heads * self.head_size


@final
class Tensor(_Frozen):
    """One input or output of the graph; a str axis is dynamic."""

    name: str
    datatype: str
    axes: list[str | int]


@final
class Signature(_Frozen):
    """Inputs and outputs in order."""

    inputs: list[Tensor]
    outputs: list[Tensor]


@final
class Lowering(_Frozen):
    """One graph of the artefact: what it is called, takes and answers."""

    name: str
    file: str
    inputs: list[str]
    outputs: list[str]
    size_bytes: PositiveInt
    sha256: str
    operators: dict[str, int]


@final
class ParityCase(_Frozen):
    """Errors of one lowering on one case of the export's parity grid, relative to the scale of what was expected."""

    lowering: str
    name: str
    batch: PositiveInt
    num_queries: PositiveInt
    num_kv: PositiveInt
    error_torch: float
    error_oracle: float


@final
class Parity(_Frozen):
    """What the export's gate measured."""

    limit: float
    max_error: float
    cases: list[ParityCase]


@final
class Calibration(_Frozen):
    """What the precision costs on the calibration input: errors against the float64 oracle, over the largest output."""

    source: dict[str, str | int]
    limit: float
    max_error: float
    mean_error: float


@final
class Manifest(_Frozen):
    """`manifest.json`."""

    format: Literal[2]
    layer: Layer
    precision: Literal["fp32", "fp16", "int8"]
    opset: PositiveInt
    signature: Signature
    lowerings: list[Lowering]
    source: dict[str, str | int]
    tools: dict[str, str]
    calibration: Calibration
    parity: Parity


@final
class Artifact(_Frozen):
    """A verified artefact. `graphs` maps each lowering's file to its bytes, whose digest has been checked."""

    name: str
    version: int
    manifest: Manifest
    graphs: dict[str, bytes]

    @property
    def layer(self) -> Layer:
        """Sizes and kind of the layer."""
        return self.manifest.layer

    @property
    def digest(self) -> str:
        """sha256 of the portable graph that answers the output alone, `masked`."""
        return self._lowering("masked").sha256

    def graph(self, name: str) -> bytes:
        """The bytes of a lowering, by its name.

        Raises:
            ArtifactError: the artefact has no such lowering.
        """
        return self.graphs[self._lowering(name).file]

    def _lowering(self, name: str) -> Lowering:
        for lowering in self.manifest.lowerings:
            if lowering.name == name:
                return lowering
        raise ArtifactError(f"{self.name}/{self.version}: has no lowering {name!r}; export it again")


def read_artifact(folder: Path, name: str, version: int) -> Artifact:
    """Reads and verifies one artefact folder.

    The bytes that were hashed are the bytes that are returned, so no later change of the file matters.

    Raises:
        ArtifactError: a file is missing, the manifest does not follow the schema, or a digest differs.
    """
    manifest = _read_manifest(folder / "manifest.json")
    return Artifact(
        name=name,
        version=version,
        manifest=manifest,
        graphs={lowering.file: _read_graph(folder, lowering) for lowering in manifest.lowerings},
    )


def _read_manifest(path: Path) -> Manifest:
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ArtifactError(f"{path}: {error.strerror}; `mha export` writes artefacts") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise ArtifactError(
            f"{path}: {where}: {first['msg']}; it was not written by this version of `mha export`"
        ) from error


def _read_graph(folder: Path, lowering: Lowering) -> bytes:
    path = folder / lowering.file
    if path.parent != folder or "\0" in lowering.file:
        raise ArtifactError(f"{folder / 'manifest.json'}: file {lowering.file!r} is not in the artefact's folder")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ArtifactError(f"{path}: {error.strerror}") from error
    digest = hashlib.sha256(data).hexdigest()
    if digest != lowering.sha256:
        raise ArtifactError(f"{path}: sha256 is {digest}, the manifest says {lowering.sha256}; export it again")
    return data
