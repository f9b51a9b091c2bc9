"""The graph itself: its promises read back, and its answers on sizes that no export has seen."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch

from export.artifact import triton_config
from export.convert import serialise, spec_of, to_onnx
from export.errors import InspectionError
from export.inspection import inspect
from model.attention import MultiHeadAttention, seeded_layer
from tests.conftest import weights_of
from tests.oracle import multi_head_attention

STANDARD = {"": 20}


@pytest.fixture(scope="module", params=["attention", "odd", "additive"])
def layer(request: pytest.FixtureRequest) -> MultiHeadAttention:
    """Each of the three layers."""
    name = {"attention": "seeds_layer"}.get(request.param, f"{request.param}_layer")
    layer: MultiHeadAttention = request.getfixturevalue(name)
    return layer


@pytest.fixture(scope="module", params=[False, True], ids=["output", "output and weights"])
def with_weights(request: pytest.FixtureRequest) -> bool:
    """Both graphs."""
    return bool(request.param)


@pytest.fixture(scope="module")
def graph(layer: MultiHeadAttention, with_weights: bool) -> onnx.ModelProto:
    """The exported graph."""
    return to_onnx(layer, with_weights=with_weights)


def test_promises(graph: onnx.ModelProto, layer: MultiHeadAttention, with_weights: bool) -> None:
    """Dynamic axes are symbolic by name, valid_lens are (batch, num_queries) int64, operators are standard."""
    shapes = {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*graph.graph.input, *graph.graph.output)
    }
    assert shapes["queries"] == ["batch", "num_queries", layer.W_q.in_features]
    assert shapes["keys"] == ["batch", "num_kv", layer.W_k.in_features]
    assert shapes["values"] == ["batch", "num_kv", layer.W_v.in_features]
    assert shapes["valid_lens"] == ["batch", "num_queries"]
    assert shapes["output"] == ["batch", "num_queries", layer.num_hiddens]
    assert shapes.get("weights") == (["batch", layer.num_heads, "num_queries", "num_kv"] if with_weights else None)
    assert graph.graph.input[3].type.tensor_type.elem_type == onnx.TensorProto.INT64
    assert {entry.domain: entry.version for entry in graph.opset_import} == STANDARD
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
    graph: onnx.ModelProto, layer: MultiHeadAttention, with_weights: bool, batch: int, num_queries: int, num_kv: int
) -> None:
    """Every batch, number of queries and number of keys gives the oracle's answer, lengths 0 included."""
    rng = np.random.default_rng(batch * num_queries * num_kv)
    feed = {
        "queries": rng.standard_normal((batch, num_queries, layer.W_q.in_features), np.float32),
        "keys": rng.standard_normal((batch, num_kv, layer.W_k.in_features), np.float32),
        "values": rng.standard_normal((batch, num_kv, layer.W_v.in_features), np.float32),
        "valid_lens": rng.integers(0, num_kv + 1, (batch, num_queries)),
    }
    session = ort.InferenceSession(serialise(graph), providers=["CPUExecutionProvider"])
    answers = session.run(None, feed)
    expected = multi_head_attention(weights_of(layer), layer.num_heads, **feed)
    for got, want in zip(answers, expected, strict=False):
        assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()
    assert len(answers) == (2 if with_weights else 1)


class TestInspectionRefuses:
    @pytest.fixture
    def small(self) -> tuple[onnx.ModelProto, MultiHeadAttention]:
        """A fresh graph to break."""
        layer = seeded_layer(6, 2, seed=5)
        return to_onnx(layer, with_weights=False), layer

    def test_renamed_axis(self, small: tuple[onnx.ModelProto, MultiHeadAttention]) -> None:
        """A symbolic axis under another name."""
        model, layer = small
        model.graph.input[1].type.tensor_type.shape.dim[1].dim_param = "length"
        with pytest.raises(InspectionError, match="length"):
            inspect(model, spec_of(layer), with_weights=False)

    def test_foreign_operator(self, small: tuple[onnx.ModelProto, MultiHeadAttention]) -> None:
        """An operator of another domain, even where its opset is declared."""
        model, layer = small
        model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
        with pytest.raises(InspectionError, match=r"com\.microsoft"):
            inspect(model, spec_of(layer), with_weights=False)

    def test_invalid_graph(self, small: tuple[onnx.ModelProto, MultiHeadAttention]) -> None:
        """What the onnx checker refuses."""
        model, layer = small
        model.graph.node[0].input[0] = "nowhere"
        with pytest.raises(InspectionError, match="nowhere"):
            inspect(model, spec_of(layer), with_weights=False)

    def test_missing_weights_output(self, small: tuple[onnx.ModelProto, MultiHeadAttention]) -> None:
        """A graph without the weights where they were promised."""
        model, layer = small
        with pytest.raises(InspectionError, match="outputs are"):
            inspect(model, spec_of(layer), with_weights=True)


def test_lazy_layer_exports() -> None:
    """A layer whose sizes were settled by its first forward exports as any other."""
    layer = MultiHeadAttention(6, 2).eval()
    with torch.inference_mode():
        layer(torch.zeros(1, 2, 5), torch.zeros(1, 3, 7), torch.zeros(1, 3, 11))
    model = to_onnx(layer, with_weights=False)
    inspect(model, spec_of(layer), with_weights=False)
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
