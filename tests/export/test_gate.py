"""The export gate as a whole: what it publishes, and that a broken layer, graph or process publishes nothing."""

import functools
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from export import pipeline
from export.artifact import Destination
from export.convert import to_onnx
from export.errors import ExportError, InspectionError, ParityError, PublicationError
from export.pipeline import export_layer
from export.signature import LOWERINGS, LoweringSpec
from model.attention import MultiHeadAttention, seeded_layer
from tests.conftest import Silent


@pytest.fixture
def layer() -> MultiHeadAttention:
    """A small layer: 2 heads of 3."""
    return seeded_layer(6, 2, seed=5)


def destination(folder: Path, *, version: int = 1, force: bool = False) -> Destination:
    return Destination(folder, "small", version, force)


def everything_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@functools.cache
def converted_once(lowering: LoweringSpec) -> onnx.ModelProto:
    return to_onnx(seeded_layer(6, 2, seed=5), lowering)


@pytest.fixture
def conversion_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer is converted once for all tests: torch takes seconds for each graph, and the gate is the topic."""
    monkeypatch.setattr(pipeline, "to_onnx", corrupted("none of them", lambda _: None))


def corrupted(name: str, corrupt: Callable[[onnx.ModelProto], None]) -> Callable[..., onnx.ModelProto]:
    """`to_onnx` of `layer`, with something done to the graph of one lowering."""

    def convert(_: MultiHeadAttention, lowering: LoweringSpec) -> onnx.ModelProto:
        model = onnx.ModelProto()
        model.CopyFrom(converted_once(lowering))
        if lowering.name == name:
            corrupt(model)
        return model

    return convert


def nudge_weight(model: onnx.ModelProto) -> None:
    tensor = next(entry for entry in model.graph.initializer if len(entry.dims) == 2)
    values = onnx.numpy_helper.to_array(tensor).copy()
    values[0, 0] += 1e-3
    tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))


def drop_mask(model: onnx.ModelProto) -> None:
    (softmax,) = (node for node in model.graph.node if node.op_type == "Softmax")
    (where,) = (node for node in model.graph.node if softmax.input[0] in node.output)
    scores, masked = where.input[1], where.output[0]
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            if name == masked:
                node.input[index] = scores
    model.graph.node.remove(where)


def scale_twice(model: onnx.ModelProto) -> None:
    (fused,) = (node for node in model.graph.node if node.op_type == "MultiHeadAttention")
    (scale,) = (attribute for attribute in fused.attribute if attribute.name == "scale")
    scale.f *= 2


def fix_batch(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2


@pytest.mark.usefixtures("conversion_is_free")
class TestPublication:
    def test_folder_has_what_the_design_says(self, layer: MultiHeadAttention, tmp_path: Path) -> None:
        """A version holds the lowerings and the manifest, the model's folder Triton's configuration, nothing else."""
        export_layer(layer, {"kind": "test"}, destination(tmp_path), Silent())
        assert everything_below(tmp_path) == [
            "small",
            "small/1",
            "small/1/attend.onnx",
            "small/1/attend_full.onnx",
            "small/1/full.onnx",
            "small/1/manifest.json",
            "small/1/model.onnx",
            "small/1/project.onnx",
            "small/1/weights.onnx",
            "small/config.pbtxt",
        ]

    def test_manifest_tells_the_truth(self, layer: MultiHeadAttention, tmp_path: Path) -> None:
        """Sizes are the layer's, digests and tensors the files', and every parity case is within the limit."""
        manifest = export_layer(layer, {"kind": "test"}, destination(tmp_path), Silent())
        folder = tmp_path / "small" / "1"
        assert manifest == json.loads((folder / "manifest.json").read_text())
        assert manifest["layer"]["num_hiddens"] == 6
        assert manifest["layer"]["head_size"] == 3
        for entry in manifest["lowerings"]:
            data = (folder / entry["file"]).read_bytes()
            graph = onnx.load_from_string(data).graph
            assert hashlib.sha256(data).hexdigest() == entry["sha256"]
            assert entry["inputs"] == [tensor.name for tensor in graph.input]
            assert entry["outputs"] == [tensor.name for tensor in graph.output]
        names = [entry["name"] for entry in manifest["lowerings"]]
        assert names == ["masked", "weights", "full", "project", "attend", "attend_full"]
        assert {case["lowering"] for case in manifest["parity"]["cases"]} == set(names)
        assert len(manifest["parity"]["cases"]) == 104
        assert 0 < manifest["parity"]["max_error"] <= manifest["parity"]["limit"] == 1e-5

    def test_folder_can_be_read_by_others(self, layer: MultiHeadAttention, tmp_path: Path) -> None:
        """A server that runs as another user can read the artefact."""
        export_layer(layer, {"kind": "test"}, destination(tmp_path), Silent())
        for path in (tmp_path / "small").rglob("*"):
            assert path.stat().st_mode & 0o004

    def test_existing_version_stays(self, layer: MultiHeadAttention, tmp_path: Path) -> None:
        """A version is never overwritten without force, and the error says how to go on."""
        export_layer(layer, {"kind": "test"}, destination(tmp_path), Silent())
        before = (tmp_path / "small/1/model.onnx").read_bytes()
        with pytest.raises(PublicationError, match=r"exists: choose another --version.*--force"):
            destination(tmp_path).check()
        with pytest.raises(PublicationError, match="cannot be published"):  # as in a race, past the first check
            export_layer(layer, {"kind": "other"}, destination(tmp_path), Silent())
        assert json.loads((tmp_path / "small/1/manifest.json").read_text())["source"] == {"kind": "test"}
        assert (tmp_path / "small/1/model.onnx").read_bytes() == before
        assert not list((tmp_path / "small").glob(".*"))

    def test_force_replaces(self, layer: MultiHeadAttention, tmp_path: Path) -> None:
        """With force the new artefact takes the old one's place, and no trace of the old one is left."""
        export_layer(layer, {"kind": "test"}, destination(tmp_path), Silent())
        forced = destination(tmp_path, force=True)
        forced.check()
        export_layer(layer, {"kind": "other"}, forced, Silent())
        assert json.loads((tmp_path / "small/1/manifest.json").read_text())["source"] == {"kind": "other"}
        assert not list((tmp_path / "small").glob(".*"))


def test_same_weights_same_bytes(layer: MultiHeadAttention, tmp_path: Path) -> None:
    """Two exports of equal weights are the same folder, byte for byte."""
    twin = seeded_layer(6, 2, seed=5)
    for folder, one in ((tmp_path / "a", layer), (tmp_path / "b", twin)):
        export_layer(one, {"kind": "test"}, destination(folder), Silent())
    for file in ("manifest.json", *(lowering.file for lowering in LOWERINGS)):
        assert (tmp_path / "a/small/1" / file).read_bytes() == (tmp_path / "b/small/1" / file).read_bytes()


@pytest.mark.usefixtures("conversion_is_free")
class TestFailurePublishesNothing:
    @pytest.mark.parametrize(
        ("name", "corrupt", "error", "says"),
        [
            *(
                pytest.param(
                    lowering.name,
                    nudge_weight,
                    ParityError,
                    f"comparisons are beyond 1e-05; lowering {lowering.name} on",
                    id=f"a weight of {lowering.name} is off by 0.001",
                )
                for lowering in LOWERINGS
            ),
            pytest.param("masked", drop_mask, ParityError, "lowering masked on", id="masked does not mask"),
            pytest.param("attend", drop_mask, ParityError, "lowering attend on", id="attend does not mask"),
            pytest.param("full", scale_twice, ParityError, "lowering full on", id="full has another scale"),
            pytest.param("attend_full", scale_twice, ParityError, "lowering attend_full on", id="attend_full too"),
            pytest.param("masked", fix_batch, InspectionError, "inputs are", id="the batch axis is fixed"),
        ],
    )
    def test_broken_graph(
        self,
        layer: MultiHeadAttention,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        name: str,
        corrupt: Callable[[onnx.ModelProto], None],
        error: type[ExportError],
        says: str,
    ) -> None:
        """A graph that is not the layer stops at its gate and leaves the repository as it was."""
        monkeypatch.setattr(pipeline, "to_onnx", corrupted(name, corrupt))
        with pytest.raises(error, match=says):
            export_layer(layer, {"kind": "test"}, destination(tmp_path), Silent())
        assert everything_below(tmp_path) == []

    def test_unfit_weight(self, layer: MultiHeadAttention, tmp_path: Path) -> None:
        """A weight that is not finite is refused by name."""
        with torch.no_grad():
            layer.W_k.weight[1, 2] = np.nan
        with pytest.raises(ExportError, match=r"W_k\.weight: holds nan or infinite"):
            export_layer(layer, {"kind": "test"}, destination(tmp_path), Silent())
        assert everything_below(tmp_path) == []

    def test_parity_process_dies(
        self, layer: MultiHeadAttention, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A process that ends without its results fails the export, with what it said."""
        monkeypatch.setattr("export.parity._SPEC_FILE", "elsewhere.json")  # the child looks for layer.json
        with pytest.raises(ParityError, match=r"(?s)parity process ended with 1.*layer\.json"):
            export_layer(layer, {"kind": "test"}, destination(tmp_path), Silent())
        assert everything_below(tmp_path) == []

    @pytest.mark.parametrize(
        ("name", "version", "says"),
        [
            pytest.param("../up", 1, "name: got '../up'", id="name leaves the repository"),
            pytest.param(".hidden", 1, "name: got '.hidden'", id="hidden name"),
            pytest.param("", 1, "name: got ''", id="no name"),
            pytest.param("small", 0, "version: got 0", id="version 0"),
        ],
    )
    def test_unusable_destination(self, tmp_path: Path, name: str, version: int, says: str) -> None:
        """A name or version that a repository cannot hold is refused before any work."""
        with pytest.raises(PublicationError, match=says):
            Destination(tmp_path, name, version, force=False).check()

    def test_repository_that_cannot_be_written(self, layer: MultiHeadAttention, tmp_path: Path) -> None:
        """A file in the place of the repository is a clear error."""
        (tmp_path / "file").write_text("")
        with pytest.raises(PublicationError, match="file"):
            export_layer(layer, {"kind": "test"}, destination(tmp_path / "file"), Silent())
