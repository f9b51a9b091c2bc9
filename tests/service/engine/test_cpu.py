"""The CPU engine on real artefacts, against the float64 oracle."""

import dataclasses
import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from model.attention import MultiHeadAttention
from service.artifact import Artifact, Layer
from service.engine import EngineCall, EngineResult, Projected
from service.engine.cpu import CpuEngine
from service.errors import StartupError
from service.repository import Repository
from tests.conftest import weights_of
from tests.oracle import multi_head_attention

# Of the largest value: sums of up to 100 float32 terms in four layers, as in tests/service/test_properties.py.
RELATIVE = 1e-5

Arrays = Mapping[str, "np.ndarray[Any, Any]"]

MODELS = ["attention", "odd", "additive"]


@pytest.fixture(scope="module")
def parameters(
    seeds_layer: MultiHeadAttention, odd_layer: MultiHeadAttention, additive_layer: MultiHeadAttention
) -> dict[str, Arrays]:
    """The parameters of each model, for the oracle."""
    layers = {"attention": seeds_layer, "odd": odd_layer, "additive": additive_layer}
    return {name: weights_of(layer) for name, layer in layers.items()}


@pytest.fixture(scope="module", params=MODELS)
def artifact(request: pytest.FixtureRequest, repository: Path) -> Artifact:
    """Each of the three artefacts."""
    return Repository(repository).read(request.param, 1)


class TestTiles:
    @pytest.mark.parametrize("every_key", [True, False], ids=["every_key", "some_keys"])
    def test_attend_to_projected_keys(self, artifact: Artifact, parameters: dict[str, Arrays], every_key: bool) -> None:
        """Keys that were projected piece by piece, attended to by some queries, give the oracle's output."""
        wanted = call(artifact.layer, (1, 5, 11), seed=53)
        lens = np.full((1, 5), 11) if every_key else wanted.valid_lens
        engine = CpuEngine(artifact, 1, 1)
        pieces = [engine.project(wanted.keys[:, part], wanted.values[:, part]) for part in (slice(0, 7), slice(7, 11))]
        projected = Projected(*(np.concatenate(sides, axis=2) for sides in zip(*map(_sides, pieces), strict=True)))
        got = engine.attend(wanted.queries[:, 1:4], projected, None if every_key else lens[:, 1:4])
        output, _ = multi_head_attention(
            parameters[artifact.name], artifact.layer.num_heads, wanted.queries, wanted.keys, wanted.values, lens
        )
        np.testing.assert_allclose(got, output[:, 1:4], rtol=0, atol=RELATIVE * np.abs(output).max())


def _sides(projected: Projected) -> tuple[Any, Any]:
    return projected.keys, projected.values


class TestUnmasked:
    @pytest.mark.parametrize("length", [2, 17, 67], ids=str)
    @pytest.mark.parametrize("alone", [True, False], ids=["alone", "not_alone"])
    def test_no_lengths_are_all_keys(self, artifact: Artifact, length: int, alone: bool) -> None:
        """Whichever graph and number of threads was measured to be best: the answer is that of full lengths."""
        wanted = dataclasses.replace(call(artifact.layer, (2, length, length), seed=59), need_weights=False)
        engine = CpuEngine(artifact, 1, 2)
        full = engine.run(dataclasses.replace(wanted, valid_lens=np.full((2, length), length)))
        got = engine.run(dataclasses.replace(wanted, valid_lens=None, alone=alone))
        atol = RELATIVE * np.abs(full.output).max()
        np.testing.assert_allclose(got.output, full.output, rtol=0, atol=atol)


class TestCost:
    def test_is_measured(self, artifact: Artifact) -> None:
        """Points ascend from next to nothing to real work, none of it negative."""
        points = CpuEngine(artifact, 1, 1).cost.points
        assert len(points) == 5
        assert all(flops < later and 0 < s <= later_s for (flops, s), (later, later_s) in pairwise(points))


def call(layer: Layer, shape: tuple[int, int, int], seed: int, *, need_weights: bool = True) -> EngineCall:
    """Standard normal inputs of (B, Q, K), with a length for every query, 0 and K among them."""
    batch, num_queries, num_kv = shape
    rng = np.random.default_rng(seed)
    queries = rng.standard_normal((batch, num_queries, layer.query_size), np.float32)
    keys = rng.standard_normal((batch, num_kv, layer.key_size), np.float32)
    values = rng.standard_normal((batch, num_kv, layer.value_size), np.float32)
    valid_lens = rng.integers(0, num_kv + 1, (batch, num_queries))
    valid_lens.flat[:1], valid_lens.flat[1:2] = 0, num_kv
    return EngineCall(queries, keys, values, valid_lens, need_weights)


SHAPES = [
    pytest.param((1, 1, 1), id="one_of_each"),
    pytest.param((2, 3, 5), id="small"),
    pytest.param((3, 7, 2), id="more_queries_than_keys"),
    pytest.param((13, 1, 3), id="wide_batch"),
    pytest.param((1, 2, 101), id="long"),
]


class TestRun:
    @pytest.mark.parametrize("shape", SHAPES)
    def test_agrees_with_the_equations(
        self, artifact: Artifact, parameters: dict[str, Arrays], shape: tuple[int, int, int]
    ) -> None:
        """Output and weights of any batch, number of queries and of keys are the oracle's, to float32 rounding."""
        wanted = call(artifact.layer, shape, seed=37)
        result = CpuEngine(artifact, 1, 1).run(wanted)
        output, weights = multi_head_attention(
            parameters[artifact.name], artifact.layer.num_heads, wanted.queries, wanted.keys, wanted.values,
            wanted.valid_lens,
        )  # fmt: skip
        assert result.weights is not None
        for got, want in ((result.output, output), (result.weights, weights)):
            assert got.dtype == np.float32
            np.testing.assert_allclose(got, want, rtol=0, atol=RELATIVE * np.abs(want).max())
            assert got.shape == want.shape

    def test_weights_come_only_when_asked_for(self, artifact: Artifact) -> None:
        """Without need_weights the answer has none, and the output is the same to rounding."""
        engine = CpuEngine(artifact, 1, 1)
        alone = engine.run(call(artifact.layer, (2, 3, 5), seed=41, need_weights=False))
        both = engine.run(call(artifact.layer, (2, 3, 5), seed=41))
        assert alone.weights is None
        atol = RELATIVE * np.abs(both.output).max()
        np.testing.assert_allclose(alone.output, both.output, rtol=0, atol=atol)

    @pytest.mark.parametrize("threads", [1, 2], ids=["one_thread", "two_threads"])
    def test_from_several_threads_is_what_it_is_one_by_one(self, artifact: Artifact, threads: int) -> None:
        """Calls of many shapes at once give, bit for bit, what each gives alone."""
        engine = CpuEngine(artifact, threads, threads)
        shapes = [(batch, num_queries, num_kv) for batch in (1, 3) for num_queries in (2, 5) for num_kv in (1, 7, 11)]
        calls = [
            call(artifact.layer, shape, seed, need_weights=bool(seed % 2)) for seed, shape in enumerate(shapes * 5)
        ]
        one_by_one = [engine.run(each) for each in calls]
        with ThreadPoolExecutor(5) as pool:
            at_once = list(pool.map(engine.run, calls))
        assert all(map(_same, at_once, one_by_one))

    def test_writes_to_no_input(self, artifact: Artifact) -> None:
        """Inputs may be read-only views of a body."""
        wanted = call(artifact.layer, (2, 3, 5), seed=43)
        for tensor in (wanted.queries, wanted.keys, wanted.values, wanted.valid_lens):
            tensor.flags.writeable = False
        engine = CpuEngine(artifact, 1, 1)
        assert _same(engine.run(wanted), engine.run(wanted))

    def test_inputs_the_graph_does_not_take_fail_the_call_alone(self, artifact: Artifact) -> None:
        """The runtime refuses a wrong size by raising; the engine goes on."""
        engine = CpuEngine(artifact, 1, 1)
        good = call(artifact.layer, (2, 3, 5), seed=47)
        bad = EngineCall(good.queries[..., :-1], good.keys, good.values, good.valid_lens, need_weights=False)
        want = engine.run(good)
        with pytest.raises(Exception, match="INVALID_ARGUMENT"):
            engine.run(bad)
        assert _same(engine.run(good), want)


def _same(one: EngineResult, other: EngineResult) -> bool:
    if (one.weights is None) != (other.weights is None):
        return False
    same_weights = one.weights is None or bool(np.array_equal(one.weights, other.weights))  # type: ignore[arg-type]
    return bool(np.array_equal(one.output, other.output)) and same_weights


def with_graph(artifact: Artifact, graph: bytes) -> Artifact:
    """The artefact with another model.onnx, its digest put right."""
    first, *rest = artifact.manifest.lowerings
    changed = first.model_copy(update={"sha256": hashlib.sha256(graph).hexdigest()})
    manifest = artifact.manifest.model_copy(update={"lowerings": [changed, *rest]})
    return artifact.model_copy(update={"manifest": manifest, "graphs": {**artifact.graphs, first.file: graph}})


def _renamed(data: bytes) -> bytes:
    model = onnx.load_from_string(data)
    model.graph.node[0].op_type = "NoSuchOperator"
    return model.SerializeToString()


def _later_opset(data: bytes) -> bytes:
    model = onnx.load_from_string(data)
    model.opset_import[0].version = 997
    return model.SerializeToString()


def _later_ir(data: bytes) -> bytes:
    model = onnx.load_from_string(data)
    model.ir_version = 997
    return model.SerializeToString()


def _without_initializers(data: bytes) -> bytes:
    model = onnx.load_from_string(data)
    model.graph.ClearField("initializer")
    return model.SerializeToString()


def _external_weights(data: bytes) -> bytes:
    model = onnx.load_from_string(data)
    tensor = max(model.graph.initializer, key=lambda tensor: tensor.ByteSize())
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="weights.bin")
    return model.SerializeToString()


def _ints(data: bytes) -> bytes:
    model = onnx.load_from_string(data)
    model.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.INT32
    return model.SerializeToString()


def _other_size(data: bytes) -> bytes:
    model = onnx.load_from_string(data)
    (weight,) = (tensor for tensor in model.graph.initializer if tuple(tensor.dims) == (17, 21))
    weight.CopyFrom(onnx.numpy_helper.from_array(np.ones((19, 21), np.float32), weight.name))
    model.graph.input[2].type.tensor_type.shape.dim[2].dim_value = 19
    return model.SerializeToString()


def _other_name(data: bytes) -> bytes:
    model = onnx.load_from_string(data)
    for names in (node.input for node in model.graph.node):
        names[:] = ["lengths" if name == "valid_lens" else name for name in names]
    model.graph.input[3].name = "lengths"
    return model.SerializeToString()


class TestGraphThatCannotBeServed:
    @pytest.mark.parametrize(
        "spoil",
        [
            pytest.param(lambda _: b"no graph", id="no_protobuf"),
            pytest.param(lambda _: b"", id="empty"),
            pytest.param(lambda data: data[: len(data) // 2], id="cut_off"),
            pytest.param(_renamed, id="unknown_operator"),
            pytest.param(_later_opset, id="later_opset"),
            pytest.param(_later_ir, id="later_ir_version"),
            pytest.param(_without_initializers, id="no_weights"),
            pytest.param(_external_weights, id="external_weights"),
            pytest.param(_ints, id="other_input_type"),
        ],
    )
    def test_stops_the_start(self, repository: Path, spoil: Any) -> None:
        """A graph that the runtime refuses is a StartupError that names the model."""
        artifact = Repository(repository).read("odd", 1)
        spoiled = with_graph(artifact, spoil(artifact.graph("masked")))
        with pytest.raises(StartupError, match=r"^odd/1: onnxruntime refuses the graph 'masked': "):
            CpuEngine(spoiled, 1, 1)

    @pytest.mark.parametrize(
        "spoil",
        [
            pytest.param(_other_size, id="other_size"),
            pytest.param(_other_name, id="other_name"),
        ],
    )
    def test_that_cannot_be_run_stops_the_start_too(self, repository: Path, spoil: Any) -> None:
        """A graph that loads but takes other inputs than the manifest says is found by the warm-up."""
        artifact = Repository(repository).read("odd", 1)
        spoiled = with_graph(artifact, spoil(artifact.graph("masked")))
        with pytest.raises(StartupError, match=r"^odd/1: onnxruntime cannot run the graph: "):
            CpuEngine(spoiled, 1, 1)

    @pytest.mark.parametrize("name", ["masked", "weights", "full", "project", "attend", "attend_full"])
    def test_artefact_without_one_of_its_graphs(self, repository: Path, name: str) -> None:
        """Every graph is needed, and a start without one of them says which."""
        artifact = Repository(repository).read("odd", 1)
        others = [lowering for lowering in artifact.manifest.lowerings if lowering.name != name]
        manifest = artifact.manifest.model_copy(update={"lowerings": others})
        with pytest.raises(StartupError, match=f"odd/1: has no lowering '{name}'"):
            CpuEngine(artifact.model_copy(update={"manifest": manifest}), 1, 1)

    @pytest.mark.parametrize("name", ["weights", "full", "project", "attend", "attend_full"])
    def test_any_graph_that_is_refused_stops_the_start(self, repository: Path, name: str) -> None:
        """Graphs that few requests need are run at the start as well, so that none fails in the middle of the night."""
        artifact = Repository(repository).read("odd", 1)
        (lowering,) = (lowering for lowering in artifact.manifest.lowerings if lowering.name == name)
        graphs = {**artifact.graphs, lowering.file: _renamed(artifact.graph(name))}
        with pytest.raises(StartupError, match=f"^odd/1: onnxruntime refuses the graph '{name}': "):
            CpuEngine(artifact.model_copy(update={"graphs": graphs}), 1, 1)
