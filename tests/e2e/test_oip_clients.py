"""The protocol as its own clients speak it: tritonclient, blocking and asyncio, against a real server."""

import asyncio
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.http
import tritonclient.http.aio
from tritonclient.utils import InferenceServerException

from model.attention import MultiHeadAttention
from tests.conftest import publish, weights_of
from tests.oracle import multi_head_attention
from tests.served import ServerProcess, clean_environment, serving, serving_fake

Tensors = dict[str, np.ndarray]
DATATYPES = {"float32": "FP32", "float64": "FP64", "float16": "FP16", "bfloat16": "BF16", "int32": "INT32"}


class Client:
    """Either client, its calls awaited where they have to be, so that one test says what both do."""

    def __init__(self, module: Any, url: str) -> None:
        self._module = module
        self._loop = asyncio.new_event_loop()
        self._client = self._run(self._connect, module, url)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._client, name)
        return lambda *arguments, **named: self._run(method, *arguments, **named)

    def ask(
        self,
        tensors: Tensors,
        outputs: dict[str, bool] | None = None,
        *,
        model: str = "attention",
        json: tuple[str, ...] = (),
        **named: Any,
    ) -> Any:
        """Infers; `outputs` by name, True for binary; the inputs in `json` go as JSON."""
        sent = []
        for name, values in tensors.items():
            tensor = self._module.InferInput(name, list(values.shape), DATATYPES.get(values.dtype.name, "INT64"))
            tensor.set_data_from_numpy(values, binary_data=name not in json)
            sent.append(tensor)
        asked = None
        if outputs is not None:
            asked = [self._module.InferRequestedOutput(name, binary_data=binary) for name, binary in outputs.items()]
        return self.infer(model, sent, outputs=asked, **named)

    def close(self) -> None:
        self._run(self._client.close)
        self._loop.close()

    def _run(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        result = function(*arguments, **named)
        return self._loop.run_until_complete(result) if inspect.isawaitable(result) else result

    @staticmethod
    def _connect(module: Any, url: str) -> Any:
        if module is tritonclient.http:
            return module.InferenceServerClient(url)

        async def connect() -> Any:  # aiohttp wants its session made inside a loop
            return module.InferenceServerClient(url)

        return connect()


@pytest.fixture(params=[tritonclient.http, tritonclient.http.aio], ids=["blocking", "asyncio"])
def client(request: pytest.FixtureRequest, server: ServerProcess) -> Iterator[Client]:
    """Each client, connected to the server of three models."""
    client = Client(request.param, server.url.removeprefix("http://"))
    yield client
    client.close()


@pytest.fixture
def tensors(seeds_layer: MultiHeadAttention) -> Tensors:
    """Three rows of lengths 0, 3 and 7."""
    rng = np.random.default_rng(0)
    sizes = {"queries": (3, 5, 100), "keys": (3, 7, 100), "values": (3, 7, 100)}
    drawn = {name: rng.standard_normal(shape, np.float32) for name, shape in sizes.items()}
    return {**drawn, "valid_lens": np.array([0, 3, 7])}


@pytest.fixture
def expected(seeds_layer: MultiHeadAttention, tensors: Tensors) -> tuple[np.ndarray, np.ndarray]:
    """The oracle's output and weights."""
    return multi_head_attention(weights_of(seeds_layer), seeds_layer.num_heads, **tensors)


def close(got: np.ndarray, want: np.ndarray, limit: float = 1e-5) -> bool:
    difference = np.abs(got.astype(np.float64) - want).max()
    return got.shape == want.shape and bool(difference <= limit * np.abs(want).max())


class TestMetadata:
    def test_health(self, client: Client) -> None:
        """Live, ready, and ready by model; a model that is not served is not ready."""
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("odd")
        assert client.is_model_ready("odd", "1")
        assert not client.is_model_ready("odd", "2")
        assert not client.is_model_ready("nowhere")

    def test_server(self, client: Client) -> None:
        """Exactly the extensions that exist are advertised."""
        metadata = client.get_server_metadata()
        assert metadata["name"] == "mha-service"
        assert metadata["extensions"] == [
            "binary_tensor_data",
            "model_configuration",
            "model_repository",
            "parameters",
            "statistics",
        ]

    @pytest.mark.parametrize("version", ["", "1"], ids=["newest", "by version"])
    def test_model(self, client: Client, version: str) -> None:
        """Names, datatypes and shapes of the layer; -1 where an axis is dynamic."""
        metadata = client.get_model_metadata("odd", version)
        assert metadata["versions"] == ["1"]
        assert {tensor["name"]: (tensor["datatype"], tensor["shape"]) for tensor in metadata["inputs"]} == {
            "queries": ("FP32", [-1, -1, 11]),
            "keys": ("FP32", [-1, -1, 13]),
            "values": ("FP32", [-1, -1, 17]),
            "valid_lens": ("INT64", [-1, -1]),
        }
        assert {tensor["name"]: tensor["shape"] for tensor in metadata["outputs"]} == {
            "output": [-1, -1, 21],
            "weights": [-1, 3, -1, -1],
        }

    @pytest.mark.parametrize("version", ["", "1"], ids=["newest", "by version"])
    def test_config(self, client: Client, version: str) -> None:
        """What perf_analyzer looks for is there, and says which inputs may be left out."""
        config = client.get_model_config("odd", version)
        assert config["max_batch_size"] == 0
        assert config["model_transaction_policy"] == {"decoupled": False}
        assert config["response_cache"] == {"enable": False}
        assert {entry["name"]: entry["optional"] for entry in config["input"]} == {
            "queries": False,
            "keys": True,
            "values": True,
            "valid_lens": True,
        }


class TestInfer:
    @pytest.mark.parametrize(
        "json",
        [
            pytest.param((), id="all binary"),
            pytest.param(("queries", "keys", "values", "valid_lens"), id="all JSON"),
            pytest.param(("keys", "valid_lens"), id="mixed"),
        ],
    )
    @pytest.mark.parametrize(
        "outputs",
        [
            pytest.param(None, id="none named"),
            pytest.param({"output": True, "weights": True}, id="both binary"),
            pytest.param({"output": False, "weights": False}, id="both JSON"),
            pytest.param({"weights": False, "output": True}, id="mixed"),
            pytest.param({"weights": True}, id="weights alone"),
        ],
    )
    def test_any_mix(
        self,
        client: Client,
        tensors: Tensors,
        expected: tuple[np.ndarray, np.ndarray],
        json: tuple[str, ...],
        outputs: dict[str, bool] | None,
    ) -> None:
        """Every mix of JSON and binary both ways gives the oracle's answer; weights only for who names them."""
        answer = client.ask(tensors, outputs, json=json, request_id="job-7")
        assert answer.get_response()["id"] == "job-7"
        assert answer.get_response()["model_version"] == "1"
        asked_for = ["output"] if outputs is None else list(outputs)
        assert [entry["name"] for entry in answer.get_response()["outputs"]] == asked_for
        for name, want in zip(("output", "weights"), expected, strict=True):
            if name in asked_for:
                assert close(answer.as_numpy(name), want)
            else:
                assert answer.as_numpy(name) is None

    @pytest.mark.parametrize("sent", [None, "gzip", "deflate"])
    @pytest.mark.parametrize("answered", [None, "gzip", "deflate"])
    def test_compression(
        self,
        client: Client,
        tensors: Tensors,
        expected: tuple[np.ndarray, np.ndarray],
        sent: str | None,
        answered: str | None,
    ) -> None:
        """Either direction may be compressed."""
        answer = client.ask(
            tensors, {"output": True}, request_compression_algorithm=sent, response_compression_algorithm=answered
        )
        assert close(answer.as_numpy("output"), expected[0])

    @pytest.mark.parametrize(
        ("dtype", "precision"),
        [
            pytest.param(np.dtype(np.float16), 2**-11, id="FP16"),
            pytest.param(np.dtype(ml_dtypes.bfloat16), 2**-8, id="BF16"),
            pytest.param(np.dtype(np.float64), 0, id="FP64"),
        ],
    )
    def test_other_precisions(
        self, client: Client, tensors: Tensors, seeds_layer: MultiHeadAttention, dtype: np.dtype[Any], precision: float
    ) -> None:
        """Half, bfloat16 and double are cast, and answered in the queries' own type."""
        typed = {name: values.astype(dtype) if values.dtype.kind == "f" else values for name, values in tensors.items()}
        answer = client.ask(typed, {"output": True})
        assert answer.get_output("output")["datatype"] == DATATYPES[dtype.name]
        exact = {name: values.astype(np.float64) if name != "valid_lens" else values for name, values in typed.items()}
        want, _ = multi_head_attention(weights_of(seeds_layer), seeds_layer.num_heads, **exact)
        # One rounding to the answer's type, and float32's own error over a sum of 100 products.
        assert close(answer.as_numpy("output"), want, precision + 1e-5)

    @pytest.mark.parametrize("dtype", [np.int32, np.int64], ids=["INT32", "INT64"])
    def test_integer_lengths(
        self, client: Client, tensors: Tensors, expected: tuple[np.ndarray, np.ndarray], dtype: type
    ) -> None:
        """Lengths are taken in any integer type."""
        tensors["valid_lens"] = tensors["valid_lens"].astype(dtype)
        assert close(client.ask(tensors).as_numpy("output"), expected[0])

    def test_optional_inputs(self, client: Client, tensors: Tensors) -> None:
        """Keys, values and lengths may be left out, as at the natural endpoint."""
        queries = tensors["queries"]
        explicit = {"queries": queries, "keys": queries, "values": queries, "valid_lens": np.full(3, 5)}
        alone = client.ask({"queries": queries}).as_numpy("output")
        np.testing.assert_allclose(alone, client.ask(explicit).as_numpy("output"), rtol=0, atol=1e-6)

    def test_same_as_the_natural_endpoint(self, client: Client, server: ServerProcess, tensors: Tensors) -> None:
        """Both protocols give the same answer to the last bit, and the same words to the same mistake."""
        body = {name: values.tolist() for name, values in tensors.items()}
        natural = server.client.post("/v1/attention?model=attention", json=body).json()
        np.testing.assert_array_equal(client.ask(tensors).as_numpy("output"), np.array(natural["output"], np.float32))
        body["valid_lens"] = [0, 3, 8]
        refused = server.client.post("/v1/attention?model=attention", json=body).json()
        with pytest.raises(InferenceServerException) as error:
            client.ask({**tensors, "valid_lens": np.array([0, 3, 8])})
        assert error.value.message() == refused["error"]


class TestErrors:
    @pytest.mark.parametrize(
        ("change", "status", "says"),
        [
            pytest.param({"keys": np.zeros((3, 7, 96), np.float32)}, 422, "keys: last axis is 96", id="invalid_shape"),
            pytest.param({"valid_lens": np.array([0, 3, -1])}, 422, "valid_lens[2]: got -1", id="invalid_valid_lens"),
            pytest.param(
                {"queries": np.zeros((3, 5, 100), np.int32)}, 422, "queries: dtype is int32", id="invalid_dtype"
            ),
            pytest.param(
                {"keys": np.zeros((3, 0, 100), np.float32)}, 422, "keys: shape is (3, 0, 100)", id="empty_axis"
            ),
            pytest.param({"values": np.full((3, 7, 100), np.nan, np.float32)}, 422, "is not finite", id="non_finite"),
            pytest.param({"values": np.full((3, 7, 100), 3e38, np.float32)}, 422, "overflows float32", id="overflow"),
            pytest.param({"mask": np.zeros((3, 7), np.float32)}, 400, "unknown tensor 'mask'", id="malformed_body"),
        ],
    )
    def test_tensors(self, client: Client, tensors: Tensors, change: Tensors, status: int, says: str) -> None:
        """Every fault of a tensor arrives as the client's own exception, with our status and text."""
        with pytest.raises(InferenceServerException) as error:
            client.ask({**tensors, **change})
        assert error.value.status() == str(status)
        assert says in error.value.message()

    def test_unknown_model(self, client: Client, tensors: Tensors) -> None:
        """A model or version that is not served."""
        for named, says in ((("nowhere", ""), "'nowhere' is not served"), (("odd", "9"), "has no version '9'")):
            with pytest.raises(InferenceServerException, match=says) as error:
                client.ask(tensors, model=named[0], model_version=named[1])
            assert error.value.status() == "404"

    def test_parameters(self, client: Client, tensors: Tensors) -> None:
        """Extensions that are not offered are refused rather than ignored."""
        with pytest.raises(InferenceServerException, match="sequences are not offered"):
            client.ask(tensors, sequence_id=5)

    def test_half_precision_as_json(self, client: Client, tensors: Tensors) -> None:
        """An FP16 answer cannot be JSON."""
        half = {name: values.astype(np.float16) if name != "valid_lens" else values for name, values in tensors.items()}
        with pytest.raises(InferenceServerException, match="FP16 exists only as binary"):
            client.ask(half, {"output": False})

    def test_time_ran_out(self, client: Client, tensors: Tensors) -> None:
        """`timeout` is in microseconds; one is too few."""
        with pytest.raises(InferenceServerException, match="time ran out") as error:
            client.ask(tensors, timeout=1)
        assert error.value.status() == "504"

    def test_no_key(self, tmp_path: Path, seeds_repository: Path, tensors: Tensors) -> None:
        """Without a key nothing is inferred or loaded; with one it is."""
        keys = tmp_path / "keys"
        keys.write_text(f"tests:{hashlib.sha256(b'open sesame').hexdigest()}\n")
        with serving(tmp_path / "log", "--models", str(seeds_repository), MHA_API_KEYS_FILE=str(keys)) as server:
            client = Client(tritonclient.http, server.url.removeprefix("http://"))
            for call in (lambda: client.ask(tensors), lambda: client.load_model("attention")):
                with pytest.raises(InferenceServerException, match="an API key is required") as error:
                    call()
                assert error.value.status() == "401"
            answer = client.ask(tensors, headers={"Authorization": "Bearer open sesame"})
            assert answer.as_numpy("output").shape == (3, 5, 100)
            client.close()

    def test_too_large(self, tmp_path: Path, seeds_repository: Path, tensors: Tensors) -> None:
        """A body over the limit arrives as 413 with the limit."""
        flags = ("--models", str(seeds_repository), "--max-body-bytes", "2000")
        with serving(tmp_path / "log", *flags) as server:
            client = Client(tritonclient.http, server.url.removeprefix("http://"))
            with pytest.raises(InferenceServerException, match="the limit is 2000") as error:
                client.ask(tensors)
            client.close()
        assert error.value.status() == "413"

    def test_overloaded(self, tmp_path: Path, seeds_repository: Path, tensors: Tensors) -> None:
        """A full queue arrives as 429."""
        flags = ("--models", str(seeds_repository), "--workers", "1", "--max-queue-ms", "0")
        with serving_fake(tmp_path / "log", "slow", *flags) as server:
            address = server.url.removeprefix("http://")
            patient, refused = (Client(tritonclient.http.aio, address) for _ in range(2))
            with ThreadPoolExecutor(1) as pool:
                running = pool.submit(patient.ask, tensors)
                server.wait_until_in_flight(1)
                with pytest.raises(InferenceServerException, match="retry later") as error:
                    refused.ask(tensors)
                running.result()
            patient.close()
            refused.close()
        assert error.value.status() == "429"

    def test_not_ready(self, tmp_path: Path, seeds_repository: Path, tensors: Tensors) -> None:
        """While models load, inference arrives as 503, and the server says that it is not ready."""
        gate = tmp_path / "gate"
        command = [sys.executable, "-m", "tests.fakes", "gated", "--models", str(seeds_repository)]
        server = ServerProcess(
            [*command, "--port", "0", "--log-format", "json"], clean_environment(GATE=str(gate)), tmp_path / "log"
        )
        client = Client(tritonclient.http, server.url.removeprefix("http://"))
        assert client.is_server_live()
        assert not client.is_server_ready()
        with pytest.raises(InferenceServerException, match="still being loaded") as error:
            client.ask(tensors)
        assert error.value.status() == "503"
        client.close()
        gate.touch()
        server.wait_ready()
        server.stop()

    @pytest.mark.parametrize(
        ("engine", "status", "says"),
        [
            pytest.param("failing", "500", "the engine failed on this request", id="engine_failure"),
            pytest.param("defective", "500", "internal error|the engine failed", id="internal"),
        ],
    )
    def test_server_faults(
        self, tmp_path: Path, seeds_repository: Path, tensors: Tensors, engine: str, status: str, says: str
    ) -> None:
        """A fault of the server arrives as an exception with an opaque text."""
        with serving_fake(tmp_path / "log", engine, "--models", str(seeds_repository)) as server:
            client = Client(tritonclient.http, server.url.removeprefix("http://"))
            with pytest.raises(InferenceServerException, match=says) as error:
                client.ask(tensors)
            client.close()
        assert error.value.status() == status
        assert "secret" not in error.value.message()


class TestStatistics:
    def test_counts_are_true(self, client: Client, server: ServerProcess, tensors: Tensors) -> None:
        """Rows, calls and failures are counted, on both protocols, and every field a client reads is there."""

        def read() -> dict[str, Any]:
            (entry,) = client.get_inference_statistics("attention")["model_stats"]
            return dict(entry)

        before = read()
        for _ in range(3):
            client.ask(tensors)
        body = {name: values[:2].tolist() for name, values in tensors.items()}
        assert server.client.post("/v1/attention?model=attention", json=body).status_code == 200
        with pytest.raises(InferenceServerException):
            client.ask(tensors, timeout=1)
        after = read()
        assert (after["name"], after["version"]) == ("attention", "1")
        assert after["inference_count"] - before["inference_count"] == 3 * 3 + 2
        assert after["execution_count"] - before["execution_count"] == 4
        assert after["last_inference"] > 1_700_000_000_000
        stats = {
            name: after["inference_stats"][name]["count"] - before["inference_stats"][name]["count"]
            for name in after["inference_stats"]
        }
        assert stats == {
            "success": 4, "fail": 1, "queue": 4, "compute_input": 4, "compute_infer": 4, "compute_output": 4,
            "cache_hit": 0, "cache_miss": 0,
        }  # fmt: skip
        times = after["inference_stats"]
        assert times["success"]["ns"] >= times["compute_infer"]["ns"] > 0
        assert {entry["batch_size"] for entry in after["batch_stats"]} >= {2, 3}

    def test_all_models(self, client: Client) -> None:
        """Without a name every model is told, and with a version just that one."""
        names = {entry["name"] for entry in client.get_inference_statistics()["model_stats"]}
        assert names == {"attention", "odd", "additive"}
        (entry,) = client.get_inference_statistics("odd", "1")["model_stats"]
        assert entry["name"] == "odd"


@pytest.mark.parametrize("module", [tritonclient.http, tritonclient.http.aio], ids=["blocking", "asyncio"])
def test_repository(
    tmp_path: Path, seeds_repository: Path, odd_layer: MultiHeadAttention, tensors: Tensors, module: Any
) -> None:
    """A model is listed, unloaded, loaded again, and one that appears later is loaded without a restart."""
    repository = tmp_path / "models"
    repository.mkdir()
    (repository / "attention").symlink_to(seeds_repository / "attention")
    with serving(tmp_path / "log", "--models", str(repository)) as server:
        client = Client(module, server.url.removeprefix("http://"))
        ready = {"name": "attention", "version": "1", "state": "READY", "reason": ""}
        assert client.get_model_repository_index() == [ready]
        client.unload_model("attention")
        assert client.get_model_repository_index() == [{**ready, "state": "UNAVAILABLE", "reason": "unloaded"}]
        assert not client.is_model_ready("attention")
        assert client.is_server_ready()
        with pytest.raises(InferenceServerException, match="is not served"):
            client.ask(tensors)
        client.load_model("attention")
        assert client.ask(tensors).as_numpy("output").shape == (3, 5, 100)
        publish(odd_layer, repository, "odd")
        assert [entry["state"] for entry in client.get_model_repository_index()] == ["READY", "UNAVAILABLE"]
        client.load_model("odd")
        assert client.is_model_ready("odd")
        with pytest.raises(InferenceServerException, match="'nowhere' is not in the repository"):
            client.load_model("nowhere")
        with pytest.raises(InferenceServerException, match="'nowhere' is not served"):
            client.unload_model("nowhere")
        with pytest.raises(InferenceServerException, match="'config' is not offered"):
            client.load_model("odd", config="{}")
        client.close()
