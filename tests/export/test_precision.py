"""Lower precisions: what the graphs compute, what they may not depend on, and what is said of their error."""

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.reference
import onnxruntime as ort
import pytest
import torch

from export import pipeline
from export.artifact import Destination
from export.convert import serialise, spec_of, to_onnx
from export.errors import ParityError
from export.inspection import inspect
from export.oracle import Oracle
from export.parity import CalibrationReport, _judge_calibration
from export.pipeline import Precision, export_layer
from export.precision import ACTIVATION_STEPS, WEIGHT_STEPS, at_precision
from export.signature import LOWERINGS, MASKED, WEIGHTS, LoweringSpec
from model.attention import MultiHeadAttention, seeded_layer
from tests.conftest import Silent, weights_of
from tests.oracle import multi_head_attention

Arrays = dict[str, np.ndarray]


def layer_of(scoring: str) -> MultiHeadAttention:
    """A layer of 2 heads of 5 with a bias, no two inputs of equal size."""
    return seeded_layer(10, 2, seed=3, bias=True, query_size=7, key_size=11, value_size=13, scoring=scoring)


@functools.cache
def converted(scoring: str, precision: str, lowering: LoweringSpec) -> onnx.ModelProto:
    """Its graph. Torch takes seconds for each, so that all tests share them."""
    return to_onnx(at_precision(layer_of(scoring), precision), lowering)


def conversion(
    precision: str, spoiled: str = "", spoil: Callable[[onnx.ModelProto], None] = lambda _: None
) -> Callable[..., onnx.ModelProto]:
    """`to_onnx` of the dot-product layer without the wait, one lowering spoiled."""

    def convert(_: MultiHeadAttention, lowering: LoweringSpec) -> onnx.ModelProto:
        model = onnx.ModelProto()
        model.CopyFrom(converted("dot_product", precision, lowering))
        if lowering.name == spoiled:
            spoil(model)
        return model

    return convert


@pytest.fixture(params=["dot_product", "additive"])
def scoring(request: pytest.FixtureRequest) -> str:
    """Either scoring."""
    return str(request.param)


@pytest.fixture
def layer(scoring: str) -> MultiHeadAttention:
    """The layer in float32."""
    return layer_of(scoring)


@pytest.fixture(params=["fp16", "int8"])
def precision(request: pytest.FixtureRequest) -> str:
    """Each precision below float32."""
    return str(request.param)


@pytest.fixture
def session(scoring: str, precision: str) -> ort.InferenceSession:
    """The graph with weights, at that precision."""
    return loaded(converted(scoring, precision, WEIGHTS))


def loaded(graph: onnx.ModelProto) -> ort.InferenceSession:
    return ort.InferenceSession(serialise(graph), providers=["CPUExecutionProvider"])


def drawn(layer: MultiHeadAttention, batch: int, num_queries: int, num_kv: int, seed: int = 0) -> Arrays:
    """Standard normal inputs, every key valid."""
    rng = np.random.default_rng(seed)
    sizes = (layer.W_q.in_features, layer.W_k.in_features, layer.W_v.in_features)
    lengths = (num_queries, num_kv, num_kv)
    tensors = [
        rng.standard_normal((batch, length, size), np.float32) for length, size in zip(lengths, sizes, strict=True)
    ]
    feed = dict(zip(("queries", "keys", "values"), tensors, strict=True))
    return {**feed, "valid_lens": np.full((batch, num_queries), num_kv, np.int64)}


class TestGraphs:
    @pytest.mark.parametrize("lowering", LOWERINGS, ids=lambda lowering: lowering.name)
    def test_keep_the_contract(self, precision: str, lowering: LoweringSpec) -> None:
        """Inputs, outputs and their float32 are those of fp32, operators still standard where they must be."""
        facts = inspect(converted("dot_product", precision, lowering), spec_of(layer_of("dot_product")), lowering)
        projections = {"project": 2, "attend": 2, "attend_full": 2}.get(lowering.name, 4)
        kind, each = {"fp16": ("Cast", 2), "int8": ("QuantizeLinear", 1)}[precision]
        assert facts.operators[kind] == projections * each

    def test_length_0_is_uniform(self, session: ort.InferenceSession, layer: MultiHeadAttention) -> None:
        """A row of length 0 has weight 1 / K on every key, in a batch with rows of other lengths."""
        feed = drawn(layer, 3, 2, 7)
        feed["valid_lens"] = np.array([[0, 0], [0, 3], [7, 1]])
        _, weights = session.run(None, feed)
        np.testing.assert_allclose(weights[0], 1 / 7, rtol=1e-6)
        np.testing.assert_allclose(weights[1, :, 0], 1 / 7, rtol=1e-6)
        assert (weights[1, :, 1, 3:] == 0).all()
        assert (weights[2, :, 1, 1:] == 0).all()
        np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-6)

    @pytest.mark.parametrize("scale", [1e-30, 1.0, 1e4], ids=["tiny", "normal", "large"])
    def test_never_overflow_the_mask(
        self, session: ort.InferenceSession, layer: MultiHeadAttention, scale: float
    ) -> None:
        """Scores of any size leave what is masked at exactly 0, and every answer finite."""
        feed = drawn(layer, 2, 5, 11)
        feed["queries"], feed["keys"] = feed["queries"] * np.float32(scale), feed["keys"] * np.float32(min(scale, 1e2))
        feed["valid_lens"] = np.array([[3, 1, 0, 11, 2]] * 2)
        output, weights = session.run(None, feed)
        assert np.isfinite(output).all()
        beyond = np.arange(11) >= np.where(feed["valid_lens"] == 0, 11, feed["valid_lens"])[:, None, :, None]
        assert (weights[np.broadcast_to(beyond, weights.shape)] == 0).all()
        np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-6)

    def test_row_does_not_depend_on_its_batch(self, session: ort.InferenceSession, layer: MultiHeadAttention) -> None:
        """Beside a row that is a thousand times as large, a row's answer is what it is alone: its steps are its own."""
        feed = drawn(layer, 2, 3, 5)
        for name in ("queries", "keys", "values"):
            feed[name][1] *= 1000
        together = session.run(["output"], feed)[0][0]
        alone = session.run(["output"], {name: tensor[:1] for name, tensor in feed.items()})[0][0]
        np.testing.assert_allclose(together, alone, rtol=0, atol=1e-6 * np.abs(alone).max())

    def test_zeros_give_zeros(self, session: ort.InferenceSession, layer: MultiHeadAttention) -> None:
        """Inputs of zeros have no largest value to take a step from, and give what the biases alone give."""
        feed = {name: np.zeros_like(tensor) for name, tensor in drawn(layer, 1, 2, 3).items()}
        want, _ = multi_head_attention(weights_of(layer), layer.num_heads, **feed)
        np.testing.assert_allclose(session.run(["output"], feed)[0], want, rtol=0, atol=2**-7 * np.abs(want).max())

    def test_same_layer_same_bytes(self, layer: MultiHeadAttention, precision: str) -> None:
        """Two conversions give the same bytes."""
        again = to_onnx(at_precision(layer, precision), WEIGHTS)
        assert serialise(again) == serialise(converted(layer.scoring, precision, WEIGHTS))

    def test_layer_stays_as_it_was(self, layer: MultiHeadAttention, precision: str) -> None:
        """Lowering the precision changes a copy."""
        before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
        at_precision(layer, precision)
        assert all(torch.equal(before[name], tensor) for name, tensor in layer.state_dict().items())


class TestInt8:
    def test_agrees_with_the_rounded_oracle(self, layer: MultiHeadAttention) -> None:
        """The graph is the oracle whose inputs and weights are rounded, far closer than it is to the unrounded one."""
        feed = drawn(layer, 3, 5, 7, seed=11)
        graph = loaded(converted(layer.scoring, "int8", WEIGHTS))
        rounded, plain = (
            Oracle(weights_of(layer), layer.num_heads, steps).attend(**feed)
            for steps in ((ACTIVATION_STEPS, WEIGHT_STEPS), None)
        )
        got = graph.run(None, feed)
        for one, want, true in zip(got, rounded, plain, strict=True):
            scale = np.abs(want).max()
            assert np.abs(one - want).max() <= 1e-5 * scale
            assert np.abs(one - true).max() >= 1e-4 * scale

    def test_standard_says_the_same(self, layer: MultiHeadAttention) -> None:
        """ONNX's own reference computes the graph to the same answer: ONNX Runtime's integer kernels are no dialect."""
        feed = drawn(layer, 3, 5, 7, seed=19)
        graph = converted(layer.scoring, "int8", WEIGHTS)
        want = onnx.reference.ReferenceEvaluator(graph).run(None, feed)
        for one, other in zip(loaded(graph).run(None, feed), want, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * np.abs(other).max())

    def test_steps_never_saturate(self) -> None:
        """Two products of the largest activation and weight fit 16 bits, which CPUs without VNNI add them in."""
        assert 2 * 255 * WEIGHT_STEPS < 2**15
        layer = at_precision(seeded_layer(6, 2, seed=5), "int8")
        largest = layer.W_q.weight.abs().amax()
        assert largest == WEIGHT_STEPS

    def test_error_of_the_measured_size(self) -> None:
        """At 512 hiddens and 8 heads the largest error is below 2 % of the largest output."""
        layer = seeded_layer(512, 8, seed=0)
        feed = drawn(layer, 2, 61, 67)
        output = loaded(to_onnx(at_precision(layer, "int8"), MASKED)).run(None, feed)[0]
        want, _ = Oracle(weights_of(layer), 8).attend(**feed)
        assert 0.002 < np.abs(output - want).max() / np.abs(want).max() < 0.02


class TestManifest:
    def test_error_is_real(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
        """The manifest's errors are those which the tests' own oracle finds on the same inputs; so is their source."""
        monkeypatch.setattr(pipeline, "to_onnx", conversion(precision))
        layer = layer_of("dot_product")
        feed = drawn(layer, 3, 5, 7, seed=23)
        feed["valid_lens"] = np.array([0, 3, 7])
        file = tmp_path / "own.npz"
        np.savez(file, **feed)
        manifest = export_layer(
            layer, {"kind": "test"}, Destination(tmp_path, "low", 1, force=False), Silent(), Precision(precision, file)
        )
        output = ort.InferenceSession(tmp_path / "low/1/model.onnx", providers=["CPUExecutionProvider"]).run(
            None, {**feed, "valid_lens": np.repeat(feed["valid_lens"][:, None], 5, axis=1)}
        )[0]
        want, _ = multi_head_attention(weights_of(layer), 2, **feed)
        error, scale = np.abs(output - want), np.abs(want).max()
        assert manifest["precision"] == precision
        assert manifest["calibration"]["max_error"] == pytest.approx(error.max() / scale, rel=1e-3)
        assert manifest["calibration"]["mean_error"] == pytest.approx(error.mean() / scale, rel=1e-3)
        assert manifest["calibration"]["max_error"] > 1e-5
        assert manifest["calibration"]["source"] == {
            "kind": "file", "file": "own.npz", "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        }  # fmt: skip

    def test_too_large_an_error_publishes_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A precision that costs more than its limit stops the export, and says what can be done."""
        monkeypatch.setitem(pipeline.check_parity.__globals__["CALIBRATION_LIMITS"], "int8", 1e-4)
        layer = seeded_layer(6, 2, seed=5)
        with pytest.raises(
            ParityError, match=r"largest error of int8 on this input \(standard normal, 0\) is .*limit is"
        ):
            export_layer(
                layer, {"kind": "test"}, Destination(tmp_path, "low", 1, force=False), Silent(), Precision("int8", None)
            )
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("error", [0.0201, np.nan, np.inf], ids=["just beyond", "nan", "inf"])
    def test_never_passes(self, error: float) -> None:
        """An error beyond the limit, or nan, is refused."""
        with pytest.raises(ParityError, match="choose another --precision"):
            _judge_calibration(CalibrationReport({"kind": "test"}, 0.02, error, 0.0), "int8")


def drop_mask(model: onnx.ModelProto) -> None:
    """Every query may see every key."""
    (less,) = (node for node in model.graph.node if node.op_type == "Less")
    less.op_type = "Equal"  # position == length: nearly nothing is kept


def other_step(model: onnx.ModelProto) -> None:
    """The weights of one projection are 3 % too large."""
    (tensor, *_) = (
        entry
        for entry in model.graph.initializer
        if len(entry.dims) == 1 and entry.dims[0] == 10 and entry.name.endswith("step")
    )
    tensor.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor) * np.float32(1.03), tensor.name))


@pytest.mark.parametrize(
    ("precision", "corrupt"),
    [
        pytest.param("fp16", drop_mask, id="fp16 with another mask"),
        pytest.param("int8", drop_mask, id="int8 with another mask"),
        pytest.param("int8", other_step, id="int8 with another step"),
    ],
)
def test_gate_still_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, corrupt: Callable[[onnx.ModelProto], None]
) -> None:
    """A wide tolerance is no blindness: a wrong mask or weight fails the gate at every precision."""
    monkeypatch.setattr(pipeline, "to_onnx", conversion(precision, "attend", corrupt))
    destination = Destination(tmp_path, "low", 1, force=False)
    with pytest.raises(ParityError, match="lowering attend on"):
        export_layer(layer_of("dot_product"), {"kind": "test"}, destination, Silent(), Precision(precision, None))
    assert not list(tmp_path.iterdir())
