"""Calibration files: what is read, and what each mistake is told."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from export.calibration import read_calibration, standard_normal
from export.errors import CalibrationError
from export.signature import LayerSpec

SPEC = LayerSpec(
    num_hiddens=6, num_heads=2, head_size=3, query_size=5, key_size=7, value_size=11, bias=False,
    scoring="dot_product", scoring_size=None,
)  # fmt: skip

Arrays = dict[str, np.ndarray]


def good() -> Arrays:
    """Inputs of 2 rows, 3 queries and 13 keys."""
    rng = np.random.default_rng(0)
    return {
        "queries": rng.standard_normal((2, 3, 5), np.float32),
        "keys": rng.standard_normal((2, 13, 7), np.float32),
        "values": rng.standard_normal((2, 13, 11), np.float32),
    }


def written(folder: Path, suffix: str, tensors: Arrays) -> Path:
    file = folder / f"inputs{suffix}"
    if suffix == ".npz":
        np.savez(file, **tensors)
    else:
        save_file(tensors, file)
    return file


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"], ids=["npz", "safetensors"])
@pytest.mark.parametrize(
    "lens",
    [None, np.array([13, 0], np.int32), np.array([[1, 2, 3], [0, 13, 7]], np.uint8)],
    ids=["no lengths", "a length per row", "a length per query"],
)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64], ids=["half", "single", "double"])
def test_reads(tmp_path: Path, suffix: str, lens: np.ndarray | None, dtype: type[np.floating]) -> None:
    """Floats of any width become float32, lengths int64; the source is the file's name and digest."""
    tensors = {name: tensor.astype(dtype) for name, tensor in good().items()}
    file = written(tmp_path, suffix, tensors if lens is None else {**tensors, "valid_lens": lens})
    calibration = read_calibration(file, SPEC)
    for name, tensor in tensors.items():
        got = getattr(calibration.inputs, name)
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, tensor.astype(np.float32))
    if lens is None:
        assert calibration.inputs.valid_lens is None
    else:
        np.testing.assert_array_equal(calibration.inputs.valid_lens, lens)
    assert calibration.source["file"] == file.name
    assert len(str(calibration.source["sha256"])) == 64


def change(**changes: np.ndarray | None) -> Callable[[], Arrays]:
    """Good inputs with some replaced, added or, with None, left out."""
    return lambda: {name: one for name, one in {**good(), **changes}.items() if one is not None}


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        pytest.param(change(values=None), r"got \['keys', 'queries'\], want queries, keys, values", id="missing"),
        pytest.param(change(mask=np.zeros(2)), "got .*'mask'.*, want queries", id="unknown"),
        pytest.param(change(keys=np.zeros((2, 13, 5), np.float32)), r"keys: got shape \(2, 13, 5\)", id="size"),
        pytest.param(change(keys=np.zeros((13, 7), np.float32)), r"keys: got shape \(13, 7\)", id="rank"),
        pytest.param(change(queries=np.zeros((2, 0, 5), np.float32)), "queries: got shape .* none empty", id="empty"),
        pytest.param(
            change(queries=np.zeros((2, 3, 5), np.int64)), "queries: got dtype int64, want a float", id="ints"
        ),
        pytest.param(change(queries=np.full((2, 3, 5), np.nan)), "queries: holds nan or infinite", id="nan"),
        pytest.param(change(values=np.zeros((2, 17, 11))), "do not belong together", id="fewer keys than values"),
        pytest.param(change(queries=np.zeros((3, 3, 5))), "do not belong together", id="batch"),
        pytest.param(change(valid_lens=np.array([14, 0])), "valid_lens: got 0 to 14, want 0 to 13", id="too long"),
        pytest.param(change(valid_lens=np.array([1, -1])), "valid_lens: got -1 to 1, want 0 to 13", id="negative"),
        pytest.param(change(valid_lens=np.array([1.0, 2.0])), "valid_lens: got dtype float64", id="float lengths"),
        pytest.param(
            change(valid_lens=np.array([1, 2, 3])), r"valid_lens: got shape \(3,\), want \(2,\)", id="lengths"
        ),
    ],
)
def test_refuses(tmp_path: Path, tensors: Callable[[], Arrays], says: str) -> None:
    """What is not an input of this layer is refused by file, name, got and want."""
    file = written(tmp_path, ".npz", tensors())
    with pytest.raises(CalibrationError, match=rf"--calibration .*inputs\.npz: .*{says}"):
        read_calibration(file, SPEC)


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        pytest.param("nowhere.npz", None, "no such file", id="no file, npz"),
        pytest.param("nowhere.safetensors", None, "[Nn]o such file", id="no file, safetensors"),
        pytest.param("inputs.txt", b"", "got a .txt, want .npz or .safetensors", id="suffix"),
        pytest.param("inputs", b"", "got a file without suffix", id="no suffix"),
        pytest.param("inputs.npz", b"no archive", "cannot be read", id="no archive"),
        pytest.param("inputs.npz", b"", "cannot be read", id="empty archive"),
        pytest.param("inputs.safetensors", b"\x08\0\0\0\0\0\0\0no json!", "cannot be read", id="no header"),
    ],
)
def test_unreadable(tmp_path: Path, name: str, data: bytes | None, says: str) -> None:
    """A file that cannot be read says why."""
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(CalibrationError, match=says):
        read_calibration(tmp_path / name, SPEC)


def test_pickles_are_not_run(tmp_path: Path) -> None:
    """An npz with objects is refused without loading them."""
    np.savez(tmp_path / "inputs.npz", **{**good(), "keys": np.array([{}], dtype=object)})
    with pytest.raises(CalibrationError, match=r"cannot be read: .*allow_pickle"):
        read_calibration(tmp_path / "inputs.npz", SPEC)


def test_default_is_the_same_every_time() -> None:
    """The default is standard normal, every key valid, and its seed is its source."""
    one, other = standard_normal(SPEC), standard_normal(SPEC)
    np.testing.assert_array_equal(one.inputs.keys, other.inputs.keys)
    assert one.inputs.values.shape == (4, 64, 11)
    assert one.inputs.valid_lens is None
    assert abs(one.inputs.keys.std() - 1) < 0.05
    assert one.source == {"kind": "standard normal", "seed": 0}
