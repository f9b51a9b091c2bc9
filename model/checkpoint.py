"""Weights of one attention layer, from the files people have, into a `MultiHeadAttention`.

Imports torch only. `model.weights_file` opens files, `model.layouts` knows the names; here tensors are checked and the
layer is built.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from model.attention import MultiHeadAttention
from model.layouts import LAYOUTS, SCORING, Place, config_of, configured_heads, find_layers, other_function
from model.weights_file import CheckpointError, Tensors, listed, open_tensors, read_config

__all__ = ["LAYOUTS", "CheckpointError", "LoadedLayer", "load_layer"]

State = Mapping[str, Tensor]  # a layer's state dict

_DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_BIASES: Final = frozenset({"W_q.bias", "W_k.bias", "W_v.bias", "W_o.bias"})


@dataclass(frozen=True, slots=True)
class LoadedLayer:
    """A layer in eval mode, float32, with where it came from: the layout and its prefix, "" for the top of the file."""

    layer: MultiHeadAttention
    layout: str
    prefix: str


def load_layer(
    path: Path, *, prefix: str | None = None, layout: str = "auto", num_heads: int | None = None
) -> LoadedLayer:
    """The attention layer that stands at `prefix` in a file, as the same function of queries, keys and values.

    The layer has a bias on all four projections or on none. Where a file has only some (Whisper's k_proj and Qwen2's
    o_proj have none), the absent ones are zeros, which is exact. Half precision and float64 are cast to float32.

    Args:
        path: `.safetensors`, of which only the layer is read; or `.pt`, `.pth`, `.bin` with a dict of tensors, at the
            top or under "state_dict" or "model".
        prefix: any dotted ancestor of the layer's tensors, with or without trailing dot, above no other layer. None
            will do where the file has one layer.
        layout: one of `LAYOUTS`, or "auto" to tell it from the names.
        num_heads: None to look it up in the `config.json` beside the file.

    Raises:
        CheckpointError: the file cannot be read, no or several layers match, a tensor is missing, left over or of the
            wrong shape or dtype, the number of heads is unknown or does not divide, or `config.json` says that
            the model computes something else with these weights, such as rotary positions.
    """
    try:
        return _load_layer(path, prefix or "", layout, num_heads)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _load_layer(path: Path, prefix: str, layout: str, num_heads: int | None) -> LoadedLayer:
    with open_tensors(path) as tensors:
        place = _pick_place(tensors, prefix, layout)
        state = _read_state(tensors, place)
    config = config_of(read_config(path.with_name("config.json")), place.prefix)
    if (reason := other_function(config)) is not None:
        raise CheckpointError(f"config.json: {reason}; this layer would not compute the same function")
    _check_sizes(state, place)
    num_heads = _look_up_heads(config, place.prefix) if num_heads is None else num_heads
    _check_heads(state, place, num_heads)
    return LoadedLayer(_build_layer(state, num_heads), place.naming.layout, place.prefix)


# From tensors to the layer's state


def _pick_place(tensors: Tensors, prefix: str, layout: str) -> Place:
    if layout not in ("auto", *LAYOUTS):
        raise CheckpointError(f"layout is {layout!r}, want auto or one of {listed(LAYOUTS)}")
    places = find_layers(tensors, layout)
    if not places:
        known = listed(LAYOUTS) if layout == "auto" else layout
        raise CheckpointError(f"no attention layer of a known layout ({known}); tensors are {listed(list(tensors))}")
    matching = [place for place in places if place.under(prefix)]
    if not matching:
        raise CheckpointError(f"no attention layer below prefix {prefix!r}, want one of {listed(places)}")
    if len(matching) > 1:
        raise CheckpointError(f"{len(matching)} layers match, pass --prefix with one of {listed(matching)}")
    return matching[0]


def _read_state(tensors: Tensors, place: Place) -> State:
    """The layer's state dict, but for biases that the file does not have; sizes are not checked yet."""
    if missing := place.missing(tensors):
        raise CheckpointError(f"{listed(missing)}: missing beside the other tensors of the layer at {place}")
    if left_over := place.left_over(tensors):
        raise CheckpointError(f"{listed(left_over)}: left over, the layer at {place} has no place for it")
    return {key: _read(tensors, place, key) for key in place.present(tensors)}


def _read(tensors: Tensors, place: Place, key: str) -> Tensor:
    name, part, num_axes = place.origin(key), place.naming.tensors[key].part, 1 if key in _BIASES else 2
    tensor = tensors[name]()
    _check_kind(name, tensor, num_axes)
    if place.naming.transposed and num_axes == 2:
        tensor = tensor.t()
    return _as_float32(name, tensor if part is None else _third(name, tensor, part))


def _check_kind(name: str, tensor: Tensor, num_axes: int) -> None:
    if tensor.dtype not in _DTYPES:
        raise CheckpointError(f"{name}: dtype is {tensor.dtype}, want one of {listed(_DTYPES)}")
    if tensor.layout is not torch.strided or tensor.is_meta:
        raise CheckpointError(f"{name}: is sparse or has no data, want a dense tensor")
    if tensor.dim() != num_axes or not tensor.numel():
        raise CheckpointError(f"{name}: shape is {tuple(tensor.shape)}, want {num_axes} axes, none empty")


def _third(name: str, tensor: Tensor, part: int) -> Tensor:
    if tensor.shape[0] % 3:
        raise CheckpointError(f"{name}: packs W_q, W_k and W_v in {tensor.shape[0]} rows, want a multiple of 3")
    return tensor.chunk(3)[part]


def _as_float32(name: str, tensor: Tensor) -> Tensor:
    cast = tensor.to(torch.float32)
    if not cast.isfinite().all():
        what = "beyond float32" if tensor.isfinite().all() else "that are not finite"
        raise CheckpointError(f"{name}: has values {what}")
    return cast


# From the state to the layer


def _check_sizes(state: State, place: Place) -> None:
    num_hiddens = len(state["W_q.weight"])
    for key in ("W_k.weight", "W_v.weight"):
        if (rows := len(state[key])) < num_hiddens:
            few = f"{rows} rows where {place.origin('W_q.weight')} has {num_hiddens}"
            raise CheckpointError(
                f"{place.origin(key)}: {few}; grouped-query or multi-query attention has no place here"
            )
        _check_shape(state, place, key, (num_hiddens, state[key].shape[1]))
    _check_shape(state, place, "W_o.weight", (num_hiddens, num_hiddens))
    for key in sorted(_BIASES & state.keys()):
        _check_shape(state, place, key, (num_hiddens,))


def _check_heads(state: State, place: Place, num_heads: int) -> None:
    num_hiddens = len(state["W_q.weight"])
    if num_heads < 1 or num_hiddens % num_heads:
        name = place.origin("W_q.weight")
        raise CheckpointError(
            f"num_heads is {num_heads}, want a divisor of num_hiddens, which {name} says is {num_hiddens}"
        )
    if (scoring_size := _scoring_size(state)) is not None:
        projection = (scoring_size, num_hiddens // num_heads)
        for key, want in zip(SCORING, (projection, projection, (1, scoring_size)), strict=True):
            _check_shape(state, place, key, want)


def _check_shape(state: State, place: Place, key: str, want: tuple[int, ...]) -> None:
    if (got := tuple(state[key].shape)) != want:
        raise CheckpointError(f"{place.origin(key)}: as {key} its shape is {got}, want {want}")


def _scoring_size(state: State) -> int | None:
    return len(state[SCORING[0]]) if SCORING[0] in state else None


def _look_up_heads(config: Mapping[str, object], prefix: str) -> int:
    found = configured_heads(config, prefix)
    if found is None:
        raise CheckpointError("no config.json beside it gives the number of heads, pass --num-heads")
    key, value = found
    if type(value) is not int or value < 1:
        raise CheckpointError(f"config.json: {key} is {value!r}, want a positive integer")
    return value


def _build_layer(state: State, num_heads: int) -> MultiHeadAttention:
    num_hiddens, scoring_size, bias = len(state["W_q.weight"]), _scoring_size(state), bool(_BIASES & state.keys())
    with torch.device("meta"):  # draws no random numbers
        layer = MultiHeadAttention(
            num_hiddens,
            num_heads,
            bias=bias,
            query_size=state["W_q.weight"].shape[1],
            key_size=state["W_k.weight"].shape[1],
            value_size=state["W_v.weight"].shape[1],
            scoring="dot_product" if scoring_size is None else "additive",
            scoring_size=scoring_size,
        )
    absent = {key: torch.zeros(num_hiddens) for key in _BIASES} if bias else {}
    layer.to_empty(device="cpu").load_state_dict({**absent, **state})
    return layer.eval()
