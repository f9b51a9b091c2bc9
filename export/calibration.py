"""The input on which an export measures what its precision costs: standard normal, or a file of the user's own.

numpy only, and safetensors to read its files.
"""

import hashlib
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import safetensors
from numpy.typing import NDArray
from safetensors.numpy import load_file

from export.errors import CalibrationError
from export.parity_grid import Inputs
from export.signature import LayerSpec

Source = dict[str, str | int]

_DEFAULT_SHAPE: Final = (4, 64, 64)
_DEFAULT_SEED: Final = 0


@final
@dataclass(frozen=True, slots=True)
class Calibration:
    """Inputs and where they come from, as the manifest says it."""

    inputs: Inputs
    source: Source


def standard_normal(spec: LayerSpec) -> Calibration:
    """4 rows of 64 queries and 64 keys, all valid, from a fixed seed."""
    rng = np.random.default_rng(_DEFAULT_SEED)
    batch, num_queries, num_kv = _DEFAULT_SHAPE
    queries = rng.standard_normal((batch, num_queries, spec.query_size), np.float32)
    keys = rng.standard_normal((batch, num_kv, spec.key_size), np.float32)
    values = rng.standard_normal((batch, num_kv, spec.value_size), np.float32)
    return Calibration(Inputs(queries, keys, values, None), {"kind": "standard normal", "seed": _DEFAULT_SEED})


def read_calibration(file: Path, spec: LayerSpec) -> Calibration:
    """The inputs in a .npz or .safetensors file: queries, keys, values and perhaps valid_lens, as the service has them.

    Raises:
        CalibrationError: the file cannot be read, or what it holds are not inputs of this layer.
    """
    try:
        inputs = _parse(_load(file), spec)
    except CalibrationError as error:
        raise CalibrationError(f"--calibration {file}: {error}") from error
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    return Calibration(inputs, {"kind": "file", "file": file.name, "sha256": digest})


def _load(file: Path) -> dict[str, NDArray[Any]]:
    readers: dict[str, Callable[[Path], dict[str, NDArray[Any]]]] = {".npz": _load_npz, ".safetensors": load_file}
    if file.suffix not in readers:
        raise CalibrationError(f"got a {file.suffix or 'file without suffix'}, want .npz or .safetensors")
    try:
        return readers[file.suffix](file)
    except FileNotFoundError as error:
        raise CalibrationError("no such file") from error
    except OSError as error:
        raise CalibrationError(error.strerror or str(error)) from error
    # What each library says of bytes that are not its format, or of dtypes that numpy lacks.
    except (zipfile.BadZipFile, safetensors.SafetensorError, ValueError, EOFError, KeyError, TypeError) as error:
        raise CalibrationError(f"cannot be read: {error}") from error


def _load_npz(file: Path) -> dict[str, NDArray[Any]]:
    with zipfile.ZipFile(file):  # np.load would take a .npy under this name, too
        pass
    with np.load(file, allow_pickle=False) as archive:
        return dict(archive)


def _parse(tensors: Mapping[str, NDArray[Any]], spec: LayerSpec) -> Inputs:
    missing = [name for name in ("queries", "keys", "values") if name not in tensors]
    unknown = sorted(tensors.keys() - {"queries", "keys", "values", "valid_lens"})
    if missing or unknown:
        raise CalibrationError(f"got {sorted(tensors)}, want queries, keys, values and perhaps valid_lens")
    sizes = {"queries": spec.query_size, "keys": spec.key_size, "values": spec.value_size}
    queries, keys, values = (_floats(name, tensors[name], size) for name, size in sizes.items())
    batch, num_queries, num_kv = queries.shape[0], queries.shape[1], keys.shape[1]
    if keys.shape[0] != batch or values.shape[:2] != keys.shape[:2]:
        shapes = ", ".join(f"{name} {tensors[name].shape}" for name in sizes)
        raise CalibrationError(f"shapes {shapes} do not belong together")
    lens = tensors.get("valid_lens")
    return Inputs(queries, keys, values, None if lens is None else _lengths(lens, (batch, num_queries), num_kv))


def _floats(name: str, tensor: NDArray[Any], size: int) -> NDArray[np.float32]:
    if tensor.dtype.kind != "f":
        raise CalibrationError(f"{name}: got dtype {tensor.dtype}, want a float")
    if tensor.ndim != 3 or 0 in tensor.shape or tensor.shape[-1] != size:
        raise CalibrationError(f"{name}: got shape {tensor.shape}, want three axes, none empty, the last {size}")
    if not np.isfinite(tensor).all():
        raise CalibrationError(f"{name}: holds nan or infinite values")
    return np.ascontiguousarray(tensor, np.float32)


def _lengths(lens: NDArray[Any], rows: tuple[int, int], num_kv: int) -> NDArray[np.int64]:
    if lens.dtype.kind not in "iu":
        raise CalibrationError(f"valid_lens: got dtype {lens.dtype}, want an integer")
    if lens.shape not in (rows[:1], rows):
        raise CalibrationError(f"valid_lens: got shape {lens.shape}, want {rows[:1]} or {rows}")
    if lens.min() < 0 or lens.max() > num_kv:
        raise CalibrationError(f"valid_lens: got {lens.min()} to {lens.max()}, want 0 to {num_kv}")
    return lens.astype(np.int64)
