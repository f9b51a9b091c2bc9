"""The graph itself: its promises read back, and its answers on sizes that no export has seen."""

import dataclasses

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch

from export.artifact import triton_config
from export.convert import serialise, spec_of, to_onnx
from export.errors import InspectionError
from export.inspection import inspect
from export.signature import FULL, LOWERINGS, MASKED, WEIGHTS, LoweringSpec
from model.attention import MultiHeadAttention, seeded_layer
from tests.conftest import weights_of
from tests.oracle import multi_head_attention


@pytest.fixture(scope="module", params=["attention", "odd", "additive"])
def layer(request: pytest.FixtureRequest) -> MultiHeadAttention:
    """Each of the three layers."""
    name = {"attention": "seeds_layer"}.get(request.param, f"{request.param}_layer")
    layer: MultiHeadAttention = request.getfixturevalue(name)
    return layer


@pytest.fixture(scope="module")
def graphs(layer: MultiHeadAttention) -> dict[str, onnx.ModelProto]:
    """The exported graph of every lowering."""
    return {lowering.name: to_onnx(layer, lowering) for lowering in LOWERINGS}


@pytest.fixture(params=LOWERINGS, ids=lambda lowering: lowering.name)
def lowering(request: pytest.FixtureRequest) -> LoweringSpec:
    """Each lowering."""
    lowering: LoweringSpec = request.param
    return lowering


@pytest.fixture
def graph(graphs: dict[str, onnx.ModelProto], lowering: LoweringSpec) -> onnx.ModelProto:
    """The graph of that lowering."""
    return graphs[lowering.name]


def test_promises(graph: onnx.ModelProto, lowering: LoweringSpec, layer: MultiHeadAttention) -> None:
    """Dynamic axes are symbolic by name, valid_lens are (batch, num_queries) int64, the rest float32."""
    heads = layer.num_heads
    want = {
        "queries": ["batch", "num_queries", layer.W_q.in_features],
        "keys": ["batch", "num_kv", layer.W_k.in_features],
        "values": ["batch", "num_kv", layer.W_v.in_features],
        "valid_lens": ["batch", "num_queries"],
        "projected_keys": ["batch", heads, "num_kv", layer.head_size],
        "projected_values": ["batch", heads, "num_kv", layer.head_size],
        "output": ["batch", "num_queries", layer.num_hiddens],
        "weights": ["batch", heads, "num_queries", "num_kv"],
    }
    for values, names in ((graph.graph.input, lowering.inputs), (graph.graph.output, lowering.outputs)):
        assert [value.name for value in values] == list(names)
        for value in values:
            kind = value.type.tensor_type
            assert [dim.dim_param or dim.dim_value for dim in kind.shape.dim] == want[value.name]
            wants_ints = value.name == "valid_lens"
            assert kind.elem_type == (onnx.TensorProto.INT64 if wants_ints else onnx.TensorProto.FLOAT)


def test_operators(graph: onnx.ModelProto, lowering: LoweringSpec, layer: MultiHeadAttention) -> None:
    """Operators are standard at opset 20, but for one fused one where there is neither a mask nor another scoring."""
    fused = [node.op_type for node in graph.graph.node if node.domain]
    wants_fused = lowering.name in ("full", "attend_full") and layer.scoring == "dot_product"
    assert fused == (["MultiHeadAttention"] if wants_fused else [])
    opsets = {entry.domain: entry.version for entry in graph.opset_import}
    assert opsets == ({"": 20, "com.microsoft": 1} if wants_fused else {"": 20})
    assert not graph.functions


def test_tells_nothing_of_the_machine(graph: onnx.ModelProto) -> None:
    """No path, stack trace or note of torch is left in the bytes."""
    data = serialise(graph)
    for trace in (b"stack_trace", b"site-packages", b".py", b"/root", b"/home"):
        assert trace not in data
    assert not any(node.metadata_props for node in graph.graph.node)


@pytest.mark.parametrize(
    ("batch", "num_queries", "num_kv"),
    [(1, 1, 1), (1, 1, 19), (23, 1, 2), (2, 29, 3), (3, 5, 131)],
    ids=str,
)
def test_any_size(
    graphs: dict[str, onnx.ModelProto],
    lowering: LoweringSpec,
    layer: MultiHeadAttention,
    batch: int,
    num_queries: int,
    num_kv: int,
) -> None:
    """Every batch, number of queries and of keys gives the oracle's answer, lengths 0 included where there is a mask.

    What `attend` and `attend_full` are given is what `project` answered.
    """
    rng = np.random.default_rng(batch * num_queries * num_kv)
    feed = {
        "queries": rng.standard_normal((batch, num_queries, layer.W_q.in_features), np.float32),
        "keys": rng.standard_normal((batch, num_kv, layer.W_k.in_features), np.float32),
        "values": rng.standard_normal((batch, num_kv, layer.W_v.in_features), np.float32),
    }
    if lowering.masks:
        feed["valid_lens"] = rng.integers(0, num_kv + 1, (batch, num_queries))
    output, weights = multi_head_attention(weights_of(layer), layer.num_heads, **feed)
    projected = run(graphs["project"], {name: feed[name] for name in ("keys", "values")})
    feed |= dict(zip(("projected_keys", "projected_values"), projected, strict=True))
    answers = run(graphs[lowering.name], {name: feed[name] for name in lowering.inputs})
    expected = {"output": output, "weights": weights, **_projected(layer, feed)}
    for name, got in zip(lowering.outputs, answers, strict=True):
        want = expected[name]
        assert got.shape == want.shape
        assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()


def run(graph: onnx.ModelProto, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    """All answers of a graph."""
    session = ort.InferenceSession(serialise(graph), providers=["CPUExecutionProvider"])
    return list(session.run(None, feed))


def _projected(layer: MultiHeadAttention, feed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    parameters = {name: array.astype(np.float64) for name, array in weights_of(layer).items()}
    answers = {}
    for name, projection in (("keys", "W_k"), ("values", "W_v")):
        flat = feed[name] @ parameters[f"{projection}.weight"].T + parameters.get(f"{projection}.bias", 0.0)
        heads = flat.reshape(*flat.shape[:2], layer.num_heads, layer.head_size)
        answers[f"projected_{name}"] = heads.transpose(0, 2, 1, 3)
    return answers


class TestInspectionRefuses:
    @pytest.fixture
    def small(self) -> tuple[onnx.ModelProto, MultiHeadAttention]:
        """A fresh graph to break, of `masked`."""
        layer = seeded_layer(6, 2, seed=5)
        return to_onnx(layer, MASKED), layer

    def test_renamed_axis(self, small: tuple[onnx.ModelProto, MultiHeadAttention]) -> None:
        """A symbolic axis under another name."""
        model, layer = small
        model.graph.input[1].type.tensor_type.shape.dim[1].dim_param = "length"
        with pytest.raises(InspectionError, match="length"):
            inspect(model, spec_of(layer), MASKED)

    def test_foreign_operator(self, small: tuple[onnx.ModelProto, MultiHeadAttention]) -> None:
        """Another domain in a graph that must be portable, even if no operator of it is used."""
        model, layer = small
        model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
        with pytest.raises(InspectionError, match=r"opsets are .*com\.microsoft"):
            inspect(model, spec_of(layer), MASKED)

    def test_fused_graph_where_a_portable_one_was_promised(self) -> None:
        """The graph of `full` under a name that promises standard operators."""
        layer = seeded_layer(6, 2, seed=5)
        with pytest.raises(InspectionError, match=r"opsets are .*com\.microsoft"):
            inspect(to_onnx(layer, FULL), spec_of(layer), dataclasses.replace(FULL, portable=True))

    def test_operator_that_is_not_on_the_list(self) -> None:
        """A graph that may use fused operators may use those that are listed, no other."""
        layer = seeded_layer(6, 2, seed=5)
        model = to_onnx(layer, FULL)
        (fused,) = (node for node in model.graph.node if node.domain)
        fused.op_type = "PackedAttention"
        with pytest.raises(InspectionError, match=r"full may not use: \['com\.microsoft\.PackedAttention'\]"):
            inspect(model, spec_of(layer), FULL)

    def test_invalid_graph(self, small: tuple[onnx.ModelProto, MultiHeadAttention]) -> None:
        """What the onnx checker refuses."""
        model, layer = small
        model.graph.node[0].input[0] = "nowhere"
        with pytest.raises(InspectionError, match="nowhere"):
            inspect(model, spec_of(layer), MASKED)

    def test_missing_weights_output(self, small: tuple[onnx.ModelProto, MultiHeadAttention]) -> None:
        """A graph without the weights where they were promised."""
        model, layer = small
        with pytest.raises(InspectionError, match="outputs are"):
            inspect(model, spec_of(layer), WEIGHTS)


def test_lazy_layer_exports() -> None:
    """A layer whose sizes were settled by its first forward exports as any other."""
    layer = MultiHeadAttention(6, 2).eval()
    with torch.inference_mode():
        layer(torch.zeros(1, 2, 5), torch.zeros(1, 3, 7), torch.zeros(1, 3, 11))
    model = to_onnx(layer, MASKED)
    inspect(model, spec_of(layer), MASKED)
    assert spec_of(layer).key_size == 7


def test_triton_config() -> None:
    """Triton's configuration names the tensors, types and axes of model.onnx; -1 is a dynamic axis."""
    layer = {
        "num_hiddens": 21, "num_heads": 3, "head_size": 7, "query_size": 11, "key_size": 13, "value_size": 17,
        "bias": True, "scoring": "dot_product", "scoring_size": None,
    }  # fmt: skip
    text = triton_config("odd", layer)
    assert " ".join(text.split()) == (
        'name: "odd" platform: "onnxruntime_onnx" max_batch_size: 0 '
        'input [ { name: "queries" data_type: TYPE_FP32 dims: [ -1, -1, 11 ] }, '
        '{ name: "keys" data_type: TYPE_FP32 dims: [ -1, -1, 13 ] }, '
        '{ name: "values" data_type: TYPE_FP32 dims: [ -1, -1, 17 ] }, '
        '{ name: "valid_lens" data_type: TYPE_INT64 dims: [ -1, -1 ] } ] '
        'output [ { name: "output" data_type: TYPE_FP32 dims: [ -1, -1, 21 ] } ]'
    )
