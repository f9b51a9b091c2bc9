"""An exported folder is also an entry of a Triton repository: its config.pbtxt, read with Triton's own definition."""

import importlib.util
from importlib.metadata import files
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx
import pytest
from google.protobuf import text_format


@pytest.fixture(scope="module")
def model_config() -> ModuleType:
    """Triton's model_config.proto as tritonclient carries it; taken by file, because its package wants grpc."""
    (file,) = (one for one in files("tritonclient") or () if str(one).endswith("grpc/model_config_pb2.py"))
    spec = importlib.util.spec_from_file_location("model_config_pb2", Path(str(file.locate())))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shapes(tensors: Any) -> dict[str, tuple[str, list[int]]]:
    """Datatype and shape of a graph's tensors, -1 for a dynamic axis."""
    names = {onnx.TensorProto.FLOAT: "TYPE_FP32", onnx.TensorProto.INT64: "TYPE_INT64"}
    return {
        tensor.name: (
            names[tensor.type.tensor_type.elem_type],
            [-1 if dim.dim_param else dim.dim_value for dim in tensor.type.tensor_type.shape.dim],
        )
        for tensor in tensors
    }


@pytest.mark.parametrize("name", ["attention", "odd", "additive"])
def test_agrees_with_the_graph(repository: Path, model_config: ModuleType, name: str) -> None:
    """Names, datatypes and dims are those of model.onnx, and nothing in the file is unknown to Triton."""
    text = (repository / name / "config.pbtxt").read_text()
    config = text_format.Parse(text, model_config.ModelConfig())
    graph = onnx.load(repository / name / "1" / "model.onnx").graph
    types = model_config.DataType.Name
    assert (config.name, config.platform, config.max_batch_size) == (name, "onnxruntime_onnx", 0)
    for configured, tensors in ((config.input, graph.input), (config.output, graph.output)):
        assert {one.name: (types(one.data_type), list(one.dims)) for one in configured} == shapes(tensors)
