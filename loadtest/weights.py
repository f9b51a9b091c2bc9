"""The layer of an artefact as the float64 oracle has it, from the weights in its portable graph."""

import hashlib
from pathlib import Path

import onnx
import orjson
from google.protobuf.message import DecodeError

from export.oracle import Oracle
from export.weights import weights_of
from loadtest.errors import LoadTestError


def read_layer(artifact: Path, digest: str | None) -> Oracle:
    """The oracle of the layer in that folder.

    Args:
        artifact: a version's folder, with manifest.json and model.onnx.
        digest: sha256 that its model.onnx must have, if known.

    Raises:
        LoadTestError: it cannot be read, holds no float32 layer, or has another digest.
    """
    path = artifact / "model.onnx"
    try:
        content = path.read_bytes()
        manifest = orjson.loads((artifact / "manifest.json").read_bytes())
        graph = onnx.load_from_string(content).graph
        num_heads, precision = manifest["layer"]["num_heads"], manifest["precision"]
    except (OSError, KeyError, orjson.JSONDecodeError, DecodeError) as error:
        raise LoadTestError(f"artefact: {artifact}: {error}; want a folder like models/attention/1") from error
    found = hashlib.sha256(content).hexdigest()
    if digest is not None and digest != found:
        raise LoadTestError(f"artefact: {path} has sha256 {found}, the server serves {digest}")
    if precision != "fp32":
        raise LoadTestError(
            f"artefact: {artifact} is {precision}; want the fp32 one, or none: the server is asked then"
        )
    return Oracle(weights_of(graph), num_heads)
