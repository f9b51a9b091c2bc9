"""A published folder, copied and then tampered with in every way that must stop a start."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from service.artifact import Manifest, read_artifact
from service.errors import StartupError

Edit = Callable[[dict[str, Any]], None]

FILES = ["model.onnx", "weights.onnx", "full.onnx", "project.onnx", "attend.onnx", "attend_full.onnx"]


@pytest.fixture
def folder(repository: Path, tmp_path: Path) -> Path:
    """A copy of the `odd` model's version 1."""
    return Path(shutil.copytree(repository / "odd" / "1", tmp_path / "odd" / "1"))


def edit(folder: Path, change: Edit) -> None:
    """Changes a copy's manifest."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def refused(folder: Path, message: str) -> None:
    """Reading the folder fails with this message."""
    with pytest.raises(StartupError, match=message):
        read_artifact(folder, "odd", 1)


class TestReading:
    def test_what_was_published(self, folder: Path) -> None:
        """A whole folder gives the layer's sizes, the digest of model.onnx and the bytes of every graph."""
        artifact = read_artifact(folder, "odd", 1)
        layer = artifact.layer
        assert (artifact.name, artifact.version) == ("odd", 1)
        assert (layer.num_hiddens, layer.num_heads, layer.head_size) == (21, 3, 7)
        assert (layer.query_size, layer.key_size, layer.value_size) == (11, 13, 17)
        manifest = json.loads((folder / "manifest.json").read_text())
        for lowering in manifest["lowerings"]:
            assert artifact.graph(lowering["name"]) == (folder / lowering["file"]).read_bytes()
        assert artifact.graph("masked") == (folder / "model.onnx").read_bytes()
        assert artifact.digest == manifest["lowerings"][0]["sha256"]
        assert artifact.manifest.model_dump(mode="json") == manifest

    def test_later_changes_of_the_files_do_not_matter(self, folder: Path) -> None:
        """The bytes that were checked are the bytes that are kept."""
        artifact = read_artifact(folder, "odd", 1)
        kept = artifact.graph("masked")
        (folder / "model.onnx").write_bytes(b"other")
        assert artifact.graph("masked") == kept != b"other"

    def test_digest_is_that_of_masked(self, folder: Path) -> None:
        """Whatever the order of the lowerings, the digest is that of the portable graph."""
        edit(folder, lambda manifest: manifest["lowerings"].reverse())
        artifact = read_artifact(folder, "odd", 1)
        assert artifact.digest == hashlib.sha256((folder / "model.onnx").read_bytes()).hexdigest()

    @pytest.mark.parametrize("name", ["model.onnx", "Masked", ""], ids=["file", "case", "empty"])
    def test_no_such_lowering(self, folder: Path, name: str) -> None:
        """Asking for a lowering that is not there says which."""
        with pytest.raises(StartupError, match=f"odd/1: has no lowering '{name}'; export it again"):
            read_artifact(folder, "odd", 1).graph(name)


class TestTampered:
    @pytest.mark.parametrize("file", FILES)
    def test_graph(self, folder: Path, file: str) -> None:
        """One other bit in a graph is found by its digest."""
        data = bytearray((folder / file).read_bytes())
        data[len(data) // 2] ^= 1
        (folder / file).write_bytes(data)
        refused(folder, f"{file}: sha256 is [0-9a-f]{{64}}, the manifest says [0-9a-f]{{64}}; export it again")

    @pytest.mark.parametrize("file", [*FILES, "manifest.json"])
    def test_missing_file(self, folder: Path, file: str) -> None:
        """A file that is not there is named."""
        (folder / file).unlink()
        refused(folder, f"{file}: No such file or directory")

    def test_file_that_is_a_folder(self, folder: Path) -> None:
        """A folder in the place of a graph is named."""
        (folder / "model.onnx").unlink()
        (folder / "model.onnx").mkdir()
        refused(folder, "model.onnx: Is a directory")

    def test_no_folder(self, tmp_path: Path) -> None:
        """A folder that is not there says how one is made."""
        refused(tmp_path / "nowhere", "manifest.json: No such file or directory; `mha export` writes artefacts")


MANIFESTS = [
    pytest.param(lambda m: m.update(format=1), "format: Input should be 2", id="other_format"),
    pytest.param(lambda m: m.pop("format"), "format: Field required", id="no_format"),
    pytest.param(lambda m: m.update(quantised=True), "quantised: Extra inputs are not permitted", id="unknown_field"),
    pytest.param(lambda m: m["layer"].update(rotary=1), r"layer\.rotary: Extra inputs", id="unknown_field_within"),
    pytest.param(lambda m: m["layer"].update(num_heads=0), r"layer\.num_heads: .*greater than 0", id="no_heads"),
    pytest.param(
        lambda m: m["layer"].update(num_heads="3"), r"layer\.num_heads: .*valid integer", id="text_for_number"
    ),
    pytest.param(lambda m: m["layer"].update(scoring="cosine"), r"layer\.scoring: .*'additive'", id="other_scoring"),
    pytest.param(
        lambda m: m.update(precision="fp8"), "precision: Input should be 'fp32', 'fp16' or 'int8'", id="other_precision"
    ),
    pytest.param(lambda m: m["lowerings"][0].pop("sha256"), r"lowerings\.0\.sha256: Field required", id="no_digest"),
    pytest.param(lambda m: m["lowerings"][2].pop("name"), r"lowerings\.2\.name: Field required", id="no_name"),
    pytest.param(lambda m: m["lowerings"][3].pop("inputs"), r"lowerings\.3\.inputs: Field required", id="no_inputs"),
]

FILES_OUTSIDE = [
    pytest.param("../2/model.onnx", id="parent"),
    pytest.param("sub/model.onnx", id="below"),
    pytest.param("", id="empty"),
    pytest.param(".", id="dot"),
]


class TestManifest:
    @pytest.mark.parametrize(("change", "message"), MANIFESTS)
    def test_that_does_not_follow_the_schema(self, folder: Path, change: Edit, message: str) -> None:
        """A manifest of another format or with a field too many, too few or wrong is refused, naming the field."""
        edit(folder, change)
        refused(folder, f"manifest.json: {message}.*not written by this version of `mha export`")

    @pytest.mark.parametrize(
        "data",
        [
            pytest.param(b"", id="empty"),
            pytest.param(b'{"format": 1', id="cut_off"),
            pytest.param(b"\xff\xfe\x00", id="no_text"),
            pytest.param(b"[1]", id="no_object"),
        ],
    )
    def test_that_is_no_json_object(self, folder: Path, data: bytes) -> None:
        """Broken JSON is refused as such."""
        (folder / "manifest.json").write_bytes(data)
        refused(folder, "manifest.json: the file: .*not written by this version")

    @pytest.mark.parametrize("file", FILES_OUTSIDE)
    def test_that_points_out_of_its_folder(self, folder: Path, file: str) -> None:
        """A graph's file lies in the artefact's own folder, or it is refused."""
        edit(folder, lambda manifest: manifest["lowerings"][0].update(file=file))
        refused(folder, f"manifest.json: file '{file}' is not in the artefact's folder")

    def test_that_points_to_an_absolute_path(self, folder: Path, tmp_path: Path) -> None:
        """An absolute path is not in the folder, even if a file with the right digest stands there."""
        elsewhere = tmp_path / "model.onnx"
        shutil.copy(folder / "model.onnx", elsewhere)
        edit(folder, lambda manifest: manifest["lowerings"][0].update(file=str(elsewhere)))
        refused(folder, "is not in the artefact's folder")

    @pytest.mark.parametrize("file", ["..", "model\0.onnx", "m" * 300], ids=["dots", "null", "too_long"])
    def test_with_a_file_that_cannot_be_one(self, folder: Path, file: str) -> None:
        """A name that no file can have is an error of the start, not a crash."""
        edit(folder, lambda manifest: manifest["lowerings"][0].update(file=file))
        with pytest.raises(StartupError):
            read_artifact(folder, "odd", 1)

    def test_cannot_be_changed(self, folder: Path) -> None:
        """A manifest that was read stays what it was."""
        manifest = Manifest.model_validate_json((folder / "manifest.json").read_bytes())
        with pytest.raises(ValueError, match="frozen"):
            manifest.opset = 7  # type: ignore[misc]
