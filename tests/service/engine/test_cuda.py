"""The engine of a GPU with the CPU's provider in its place: what is bound, staged, kept, compared and given back.

What only a GPU shows, its kernels, streams and clocks, is not tested here.
"""

import dataclasses
import gc
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from model.attention import MultiHeadAttention
from service.artifact import Artifact
from service.cost import CostModel
from service.engine import EngineCall, EngineResult, Floats, Projected
from service.engine.cpu import CpuEngine
from service.engine.cuda import CudaEngine
from service.engine.pinned import PinnedMemory
from service.engine.sessions import CPU, Provider
from service.errors import StartupError
from service.repository import Repository
from tests.conftest import weights_of
from tests.oracle import multi_head_attention
from tests.service.engine.ordinary import Ordinary
from tests.service.engine.test_cpu import RELATIVE, call

Arrays = Mapping[str, "np.ndarray[Any, Any]"]


@pytest.fixture(scope="module", params=["attention", "odd", "additive"])
def name(request: pytest.FixtureRequest) -> str:
    """Each of the three models."""
    return str(request.param)


@pytest.fixture(scope="module")
def artifact(name: str, repository: Path) -> Artifact:
    """Its artefact."""
    return Repository(repository).read(name, 1)


@pytest.fixture(scope="module")
def parameters(
    name: str, seeds_layer: MultiHeadAttention, odd_layer: MultiHeadAttention, additive_layer: MultiHeadAttention
) -> Arrays:
    """Its parameters, for the oracle."""
    return weights_of({"attention": seeds_layer, "odd": odd_layer, "additive": additive_layer}[name])


@pytest.fixture(scope="module")
def reference(artifact: Artifact) -> CpuEngine:
    """What it is compared with at the start."""
    return CpuEngine(artifact, 1, 1)


@pytest.fixture
def source() -> Ordinary:
    """Where its pinned memory comes from."""
    return Ordinary()


@pytest.fixture
def engine(artifact: Artifact, reference: CpuEngine, source: Ordinary) -> CudaEngine:
    """The engine."""
    return CudaEngine(artifact, CPU, PinnedMemory(source), reference)


class TestRun:
    @pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 5), (13, 1, 3), (2, 400, 101)], ids=str)
    def test_agrees_with_the_equations(
        self, engine: CudaEngine, source: Ordinary, parameters: Arrays, artifact: Artifact, shape: tuple[int, int, int]
    ) -> None:
        """Output and weights are the oracle's, below and above the size that is staged, and lie in pinned memory."""
        wanted = call(artifact.layer, shape, seed=61)
        result = engine.run(wanted)
        alone = engine.run(dataclasses.replace(wanted, need_weights=False))
        output, weights = multi_head_attention(
            parameters, artifact.layer.num_heads, wanted.queries, wanted.keys, wanted.values, wanted.valid_lens
        )
        assert result.weights is not None
        assert alone.weights is None
        for got, want in ((result.output, output), (result.weights, weights), (alone.output, output)):
            assert got.shape == want.shape
            np.testing.assert_allclose(got, want, rtol=0, atol=RELATIVE * np.abs(want).max())
            assert got.ctypes.data in source.blocks

    def test_no_lengths_are_all_keys(self, engine: CudaEngine, artifact: Artifact) -> None:
        """Whichever graph was measured to be faster."""
        wanted = dataclasses.replace(call(artifact.layer, (2, 17, 31), seed=67), need_weights=False)
        full = engine.run(dataclasses.replace(wanted, valid_lens=np.full((2, 17), 31)))
        got = engine.run(dataclasses.replace(wanted, valid_lens=None))
        np.testing.assert_allclose(got.output, full.output, rtol=0, atol=RELATIVE * np.abs(full.output).max())

    def test_from_several_threads_is_what_it_is_one_by_one(self, engine: CudaEngine, artifact: Artifact) -> None:
        """Calls of many shapes at once give, bit for bit, what each gives alone: no two share a buffer."""
        shapes = [(batch, num_queries, num_kv) for batch in (1, 3) for num_queries in (2, 200) for num_kv in (1, 150)]
        calls = [call(artifact.layer, shape, seed) for seed, shape in enumerate(shapes * 5)]
        one_by_one = [engine.run(each).output.copy() for each in calls]
        with ThreadPoolExecutor(5) as pool:
            at_once = list(pool.map(engine.run, calls))
        assert all(np.array_equal(got.output, want) for got, want in zip(at_once, one_by_one, strict=True))


class TestTiles:
    @pytest.mark.parametrize("every_key", [True, False], ids=["every_key", "some_keys"])
    def test_agree_with_the_equations(
        self, engine: CudaEngine, artifact: Artifact, parameters: Arrays, every_key: bool
    ) -> None:
        """Queries that attend to what was projected before give the oracle's output."""
        wanted = call(artifact.layer, (1, 5, 11), seed=71)
        lens = np.full((1, 5), 11) if every_key else wanted.valid_lens
        projected = engine.project(wanted.keys, wanted.values)
        got = engine.attend(wanted.queries[:, 1:4], projected, None if every_key else lens[:, 1:4])
        output, _ = multi_head_attention(
            parameters, artifact.layer.num_heads, wanted.queries, wanted.keys, wanted.values, lens
        )
        np.testing.assert_allclose(got, output[:, 1:4], rtol=0, atol=RELATIVE * np.abs(output).max())

    def test_send_what_they_share_once(
        self, engine: CudaEngine, artifact: Artifact, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """However many tiles attend to them, keys and values cross once, and go when the request does."""
        sent: list[Any] = []
        make = ort.OrtValue.ortvalue_from_numpy

        def counted(*args: Any) -> ort.OrtValue:
            value = make(*args)
            sent.append(weakref.ref(value))
            return value

        monkeypatch.setattr(ort.OrtValue, "ortvalue_from_numpy", counted)
        wanted = call(artifact.layer, (1, 5, 11), seed=73)
        projected = engine.project(wanted.keys, wanted.values)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(engine.attend, [wanted.queries] * 20, [projected] * 20, [None] * 20))
        assert len(sent) == 2
        assert all(value() is not None for value in sent)
        del projected
        gc.collect()
        assert all(value() is None for value in sent)


class TestCost:
    def test_is_measured(self, engine: CudaEngine) -> None:
        """Points ascend, further out than a CPU's."""
        points = engine.cost.points
        assert len(points) == 5
        assert all(seconds > 0 for _, seconds in points)

    def test_is_recalled(self, artifact: Artifact, reference: CpuEngine) -> None:
        """What another process measured is taken as it is."""
        known = {"flops": [1.0, 2.0], "seconds": [3.0, 4.0], "faster": ["full", "masked"]}
        engine = CudaEngine(artifact, CPU, PinnedMemory(Ordinary()), reference, lambda _, __: known)
        assert engine.cost == CostModel(((1.0, 3.0), (2.0, 4.0)))


class Wrong:
    """A reference that disagrees in one place."""

    def __init__(self, right: CpuEngine, place: str, error: float) -> None:
        self._right = right
        self._place = place
        self._error = error

    @property
    def cost(self) -> CostModel:
        return self._right.cost

    def run(self, wanted: EngineCall) -> EngineResult:
        result = self._right.run(wanted)
        place = "weights" if wanted.need_weights else "full" if wanted.valid_lens is None else "masked"
        if place != self._place:
            return result
        if result.weights is not None:
            return EngineResult(result.output, self._spoilt(result.weights))
        return EngineResult(self._spoilt(result.output), None)

    def project(self, keys: Floats, values: Floats) -> Projected:
        projected = self._right.project(keys, values)
        return Projected(projected.keys, self._spoilt(projected.values)) if self._place == "project" else projected

    def attend(self, queries: Floats, projected: Projected, valid_lens: NDArray[np.int64] | None) -> Floats:
        output = self._right.attend(queries, projected, valid_lens)
        return self._spoilt(output) if self._place == ("attend_full" if valid_lens is None else "attend") else output

    def _spoilt(self, tensor: Floats) -> Floats:
        spoilt = tensor.copy()
        spoilt.flat[-1] += self._error * np.abs(tensor).max()
        return spoilt


class TestComparison:
    """A GPU that computes something else than the export's gate approved of must not serve."""

    @pytest.mark.parametrize("place", ["weights", "masked", "full", "attend", "attend_full"])
    @pytest.mark.parametrize("error", [1e-3, float("nan")], ids=["off", "nan"])
    def test_any_graph_that_differs_stops_the_start(
        self, artifact: Artifact, reference: CpuEngine, place: str, error: float
    ) -> None:
        """One element off by a thousandth, or no number at all, and the message says in which graph."""
        wrong = Wrong(reference, place, error)
        named = "masked" if place == "full" else place  # both answer calls without lengths; it is tried first
        with pytest.raises(StartupError, match=rf"/1: the graph '{named}' on CPU\w+ is off by \S+ of"):
            CudaEngine(artifact, CPU, PinnedMemory(Ordinary()), wrong)

    def test_projections_that_differ_stop_the_start(self, artifact: Artifact, reference: CpuEngine) -> None:
        """What only tiles use is compared as well."""
        with pytest.raises(StartupError, match="the graph 'project' on"):
            CudaEngine(artifact, CPU, PinnedMemory(Ordinary()), Wrong(reference, "project", 1e-3))

    def test_tf32_is_allowed_its_digits(self, artifact: Artifact, reference: CpuEngine) -> None:
        """Asked for, three decimal digits are enough; two are not."""
        tf32 = Provider("CPUExecutionProvider", "cpu", {"use_tf32": "1"})
        CudaEngine(artifact, tf32, PinnedMemory(Ordinary()), Wrong(reference, "masked", 1e-3))
        with pytest.raises(StartupError, match="is off by"):
            CudaEngine(artifact, tf32, PinnedMemory(Ordinary()), Wrong(reference, "masked", 1e-2))
