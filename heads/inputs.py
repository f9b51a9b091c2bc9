"""What a layer is looked at with: tensors in a file, as one would post them, and names of their tokens."""

import hashlib
import json
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file
from torch import Tensor

from export.convert import spec_of
from heads.errors import HeadsError
from model.attention import MultiHeadAttention
from service.artifact import Layer
from service.codec import Codec
from service.codec.json import JsonCodec
from service.codec.npz import NpzCodec
from service.codec.safetensors import SafetensorsCodec
from service.errors import ServiceError
from service.tensors import AttentionInputs

_MOST_BYTES: Final = 2**36  # that an archive may inflate to: one's own file needs no guard
_CODECS: Final[dict[str, Codec]] = {
    ".json": JsonCodec(),
    ".npz": NpzCodec(_MOST_BYTES),
    ".safetensors": SafetensorsCodec(),
}


@final
@dataclass(frozen=True, slots=True)
class Entry:
    """One batch entry without its padding. float32; Q queries, K keys.

    Attributes:
        queries: (Q, query_size).
        keys: (K, key_size).
        values: (K, value_size).
        valid_lens: (Q,) int64, in 0..K.
        is_self: whether the queries are the keys.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    valid_lens: Tensor
    is_self: bool


@final
@dataclass(frozen=True, slots=True)
class Inputs:
    """Entries, and the sha256 of the file that they come from."""

    entries: tuple[Entry, ...]
    digest: str


def read_inputs(file: Path, layer: MultiHeadAttention, *, with_padding: bool = False) -> Inputs:
    """The entries of a .npz, .safetensors or .json file: queries, and if wanted keys, values, valid_lens, query_lens.

    The service's rules hold (docs/api.md). Without keys, and with one valid length an entry, queries beyond that length
    are padding as the keys are, and left out.

    Args:
        file: of the tensors.
        layer: that they are for.
        with_padding: whether keys stay that no query reads, as zeros, to be shown.

    Raises:
        HeadsError: there is no such file, or what it holds are not inputs of this layer.
    """
    if file.suffix not in _CODECS:
        raise HeadsError(f"{file}: got a {file.suffix or 'file without suffix'}, want {', '.join(_CODECS)}")
    try:
        content = file.read_bytes()
        wire = _CODECS[file.suffix].decode(content)
        inputs = AttentionInputs.parse(wire, Layer(**asdict(spec_of(layer))))
    except OSError as error:
        raise HeadsError(f"{file}: {error.strerror}") from error
    except ServiceError as error:
        raise HeadsError(f"{file}: {error}") from error
    lens = wire.tensors.get("valid_lens")
    one_length_an_entry = isinstance(lens, np.ndarray) and lens.ndim == 1
    entries = _entries(inputs, one_length_an_entry, with_padding)
    return Inputs(tuple(entries), hashlib.sha256(content).hexdigest())


def _entries(inputs: AttentionInputs, one_length_an_entry: bool, with_padding: bool) -> Iterator[Entry]:
    is_self = inputs.keys is inputs.queries
    for row, (start, length) in enumerate(zip(inputs.queries.starts, inputs.queries.lengths, strict=True)):
        queries, lens = inputs.queries.entry(row), inputs.valid_lens[start : start + length]
        if is_self and one_length_an_entry and lens[0] > 0:
            queries, lens = queries[: lens[0]], lens[: lens[0]]
        # A row of length 0 averages all keys, so that then none may be left out.
        extent = int(inputs.extents[row])
        padding = int(inputs.keys.lengths[row]) - extent if with_padding else 0
        keys, values = inputs.keys.entry(row)[:extent], inputs.values.entry(row)[:extent]
        # Copies, since the file's own memory is read only.
        yield Entry(_copy(queries), _copy(keys, padding), _copy(values, padding), _copy(lens), is_self)


def _copy(array: NDArray[Any], padding: int = 0) -> Tensor:
    return torch.from_numpy(np.pad(array, ((0, padding), *((0, 0),) * (array.ndim - 1))))


@final
@dataclass(frozen=True, slots=True)
class Labels:
    """Names of the queries and of the keys of one entry; empty where there are none."""

    queries: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()


def read_labels(file: Path, entry: int, sizes: Entry) -> Labels:
    """The labels of an entry, from a JSON file.

    It holds a list of texts for queries and keys alike, or {"queries": [...], "keys": [...]}; or a list of either, one
    for each entry.

    Raises:
        HeadsError: it is no such file, or there are fewer labels than tokens.
    """
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise HeadsError(f"--labels {file}: {error}") from error
    if isinstance(content, list) and content and not isinstance(content[0], str):
        if entry >= len(content):
            raise HeadsError(f"--labels {file}: has {len(content)} entries, want number {entry}, counted from 0")
        content = content[entry]
    of = content if isinstance(content, dict) else {"queries": content, "keys": content}
    wanted = {"queries": len(sizes.queries), "keys": len(sizes.keys)}
    unknown = sorted(of.keys() - wanted.keys())
    if unknown:
        raise HeadsError(f"--labels {file}: got {unknown}, want queries and keys")
    found = {name: _texts(file, name, of[name], count) for name, count in wanted.items() if name in of}
    return Labels(**found)


def _texts(file: Path, name: str, labels: Any, count: int) -> tuple[str, ...]:
    if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
        raise HeadsError(f"--labels {file}: {name}: want a list of texts")
    if len(labels) < count:
        raise HeadsError(f"--labels {file}: {name}: {len(labels)} labels for {count} tokens")
    return tuple(labels[:count])


def read_outputs(file: Path, option: str, entries: Sequence[Entry], num_hiddens: int) -> list[Tensor]:
    """What each entry's output should be, or a gradient by it: the tensor `output` of a .npz or .safetensors file.

    Returns:
        (Q, num_hiddens) of each entry, from (B, Q or more, num_hiddens), or packed (sum Q, num_hiddens).

    Raises:
        HeadsError: there is no such file, or its tensor does not fit the entries.
    """
    lengths = [len(entry.queries) for entry in entries]
    try:
        tensors = dict(np.load(file, allow_pickle=False)) if file.suffix == ".npz" else load_file(file)
        output = torch.from_numpy(np.asarray(tensors["output"], np.float32))
    except (OSError, ValueError, TypeError, KeyError, zipfile.BadZipFile, SafetensorError) as error:
        raise HeadsError(f"{option} {file}: {error}; want .npz or .safetensors with a tensor 'output'") from error
    if not output.isfinite().all():
        raise HeadsError(f"{option} {file}: holds nan or infinite values")
    if output.shape == (sum(lengths), num_hiddens):
        return list(torch.split(output, lengths))
    if output.ndim == 3 and output.shape[::2] == (len(lengths), num_hiddens) and output.shape[1] >= max(lengths):
        return [one[:length] for one, length in zip(output, lengths, strict=True)]
    raise HeadsError(
        f"{option} {file}: shape is {tuple(output.shape)}, want ({len(lengths)}, {max(lengths)} or more, "
        f"{num_hiddens}) or packed ({sum(lengths)}, {num_hiddens})"
    )
