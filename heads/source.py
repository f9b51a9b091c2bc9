"""The layer that a command is about, with its weights: from an artefact, or from a checkpoint."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import onnx
import torch
from google.protobuf.message import DecodeError

from export.convert import rebuild, spec_of
from export.pipeline import checkpoint_source
from export.signature import LayerSpec
from export.weights import weights_of
from heads.errors import HeadsError
from model.attention import MultiHeadAttention
from model.checkpoint import CheckpointError, load_layer


@final
@dataclass(frozen=True, slots=True)
class Source:
    """A layer in eval mode, float32, and where it comes from.

    Attributes:
        layer: the layer.
        origin: as a manifest's `source` says it.
        folder: of the artefact; None where it comes from a checkpoint.
    """

    layer: MultiHeadAttention
    origin: Mapping[str, Any]
    folder: Path | None

    @property
    def digest(self) -> str:
        """sha256 of the sizes and parameters: the same for the same layer, however it was stored."""
        digest = hashlib.sha256(repr(spec_of(self.layer)).encode())
        for name, tensor in sorted(self.layer.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()


def from_artifact(folder: Path) -> Source:
    """The layer in an artefact's folder, such as models/attention/1.

    Raises:
        HeadsError: it is none, was changed since, or its weights are not float32.
    """
    path = folder / "model.onnx"
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        content = path.read_bytes()
        wanted = next(one["sha256"] for one in manifest["lowerings"] if one["file"] == path.name)
        spec, precision, origin = LayerSpec(**manifest["layer"]), manifest["precision"], manifest["source"]
        weights = weights_of(onnx.load_from_string(content).graph)
    except (OSError, ValueError, KeyError, TypeError, StopIteration, DecodeError) as error:
        raise HeadsError(f"--model {folder}: {error}; want an artefact's folder, such as models/attention/1") from error
    if hashlib.sha256(content).hexdigest() != wanted:
        raise HeadsError(f"--model {path}: is not what its manifest says; export it again")
    if precision != "fp32":
        raise HeadsError(f"--model {folder}: its projections are {precision}; want the layer as fp32 exported it")
    layer = rebuild(spec)
    layer.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in weights.items()})
    return Source(layer, origin, folder)


def from_checkpoint(path: Path, prefix: str | None, layout: str, num_heads: int | None) -> Source:
    """The layer at a prefix of a checkpoint, as `mha export` reads it.

    Raises:
        HeadsError: there is none.
    """
    try:
        loaded = load_layer(path, prefix=prefix, layout=layout, num_heads=num_heads)
    except CheckpointError as error:
        raise HeadsError(f"--checkpoint {error}") from error
    return Source(loaded.layer, checkpoint_source(path, loaded), None)
