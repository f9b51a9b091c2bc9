"""Files of weights and what stands beside them, read without running anything in them.

Imports torch and safetensors only. Pickles are read with `weights_only=True`.
"""

import json
import pickle
import re
import struct
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

Tensors = Mapping[str, Callable[[], Tensor]]  # a file's tensors by name, each read when called

_MOST_LISTED: Final = 8


class CheckpointError(ValueError):
    """A file that gives no layer, or not the same function. The message says what, where, got and want."""


def listed(items: Sequence[object]) -> str:
    """The first few, and how many more."""
    shown = ", ".join(str(item) for item in items[:_MOST_LISTED]) or "none"
    more = len(items) - _MOST_LISTED
    return f"{shown} and {more} more" if more > 0 else shown


def open_tensors(path: Path) -> AbstractContextManager[Tensors]:
    """The tensors of a `.safetensors` file or of a torch pickle, readable inside the context.

    Raises:
        CheckpointError: another suffix, no file, or not a file of tensors alone.
    """
    opener = _OPENERS.get(path.suffix.lower())
    if opener is None:
        raise CheckpointError(f"suffix is {path.suffix!r}, want one of {listed(list(_OPENERS))}")
    if not path.is_file():
        raise CheckpointError("is not a file" if path.exists() else "no such file")
    return opener(path)


@contextmanager
def _open_safetensors(path: Path) -> Iterator[Tensors]:
    try:
        opened: Any = safe_open(path, framework="pt")  # its methods have no types
        with opened as file:
            names: list[str] = file.keys()
            yield {name: partial(file.get_tensor, name) for name in names}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"damaged, or not a safetensors file: {error}") from error


@contextmanager
def _open_pickle(path: Path) -> Iterator[Tensors]:
    yield _tensors_in(_unpickle(path))


_OPENERS: Final[Mapping[str, Callable[[Path], AbstractContextManager[Tensors]]]] = {
    ".safetensors": _open_safetensors,
    ".pt": _open_pickle,
    ".pth": _open_pickle,
    ".bin": _open_pickle,
}

# A damaged pickle is a random program. These are what torch.load raised on mutated files, with their relatives.
_DAMAGE: Final = (
    *(ArithmeticError, AssertionError, AttributeError, EOFError, ImportError, LookupError, MemoryError),
    *(OSError, RuntimeError, TypeError, ValueError, struct.error),
)


def _unpickle(path: Path) -> object:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch warns of, such as a pickle's protocol, is judged below
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        asked = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"it asks for {asked[1]}" if asked else "it is not a pickle of tensors alone"
        raise CheckpointError(f"refused, {what}; save a state_dict: torch.save(model.state_dict(), path)") from error
    except _DAMAGE as error:
        first_line = str(error).partition("\n")[0]
        raise CheckpointError(f"damaged, or not written by torch.save: {type(error).__name__} {first_line}") from error


def _tensors_in(loaded: object) -> Tensors:
    if not isinstance(loaded, dict):
        raise CheckpointError(f"holds a {type(loaded).__name__}, want a dict of tensors")
    nested = (loaded.get(key) for key in ("state_dict", "model"))
    entries = next((entry for entry in nested if isinstance(entry, dict)), loaded)
    for name, value in entries.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise CheckpointError(f"entry {name!r} is a {type(value).__name__}, want names and tensors alone")
    return {name: tensor.detach for name, tensor in entries.items()}


def read_config(path: Path) -> Mapping[str, object]:
    """A `config.json`, empty if there is none.

    Raises:
        CheckpointError: it cannot be read, or is no JSON object.
    """
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"config.json beside it cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"config.json beside it holds a {type(config).__name__}, want an object")
    return config
