"""npz bodies, against numpy."""

import io
import zipfile
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.codec.npz import NpzCodec
from service.errors import BodyTooLarge, InvalidDtype, MalformedBody, ServiceError
from service.tensors import AttentionOutput
from tests.strategies import INTEGER_DTYPES, Array, any_bits, examples

LIMIT_BYTES = 64 * 1024
CODEC = NpzCodec(LIMIT_BYTES)

drawn = examples(60)

numpy_floats = st.sampled_from([np.dtype(dtype) for dtype in (np.float16, np.float32, np.float64)])
every_dtype = st.one_of(numpy_floats, st.sampled_from([np.dtype(dtype) for dtype in INTEGER_DTYPES.values()]))


def encoded(output: Array, weights: Array | None = None) -> bytes:
    """The body of an answer."""
    return b"".join(CODEC.encode(AttentionOutput(output, weights)))


def written(save: Callable[..., None] = np.savez, **tensors: Any) -> bytes:
    """An archive that numpy wrote."""
    file = io.BytesIO()
    save(file, **tensors)
    return file.getvalue()


def archive(*entries: tuple[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    """An archive of these entries."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as target:
        for name, data in entries:
            target.writestr(name, data)
    return file.getvalue()


def npy(header: str, data: bytes = b"", version: bytes = b"\1\0") -> bytes:
    """An npy file with this header."""
    text = header.encode("latin-1") + b"\n"
    size = len(text).to_bytes(2 if version == b"\1\0" else 4, "little")
    return b"\x93NUMPY" + version + size + text + data


def described(descr: str = "'<f4'", shape: str = "(1, 1, 2)", fortran: str = "False") -> str:
    """An npy header."""
    return f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}}}"


class TestEncode:
    @given(output=any_bits(numpy_floats), weights=any_bits(numpy_floats, rank=4))
    @drawn
    def test_numpy_reads_the_same_bits(self, output: Array, weights: Array) -> None:
        """`numpy.load` finds names, dtypes, shapes and every bit, without unpickling."""
        with np.load(io.BytesIO(encoded(output, weights)), allow_pickle=False) as read:
            assert list(read) == ["output", "weights"]
            for name, want in (("output", output), ("weights", weights)):
                assert read[name].dtype == want.dtype
                assert read[name].shape == want.shape
                assert read[name].tobytes() == want.tobytes()

    def test_bfloat16_is_refused(self) -> None:
        """An npz has no bfloat16, and says what has."""
        with pytest.raises(InvalidDtype, match="npz cannot hold bfloat16; accept safetensors"):
            encoded(np.ones((1, 2, 3), ml_dtypes.bfloat16))


class TestDecode:
    @given(
        queries=any_bits(every_dtype),
        lens=any_bits(every_dtype, rank=2),
        save=st.sampled_from([np.savez, np.savez_compressed]),
        order=st.sampled_from("CF"),
        swapped=st.booleans(),
    )
    @drawn
    def test_what_numpy_wrote_is_read_bit_for_bit(
        self, queries: Array, lens: Array, save: Callable[..., None], order: Any, swapped: bool
    ) -> None:
        """Stored or deflated, in C or Fortran order, of either byte order: the same numbers in native order."""
        sent = np.array(queries, order=order)
        if swapped:
            sent = sent.astype(sent.dtype.newbyteorder())
        tensors = CODEC.decode(written(save, queries=sent, valid_lens=lens)).tensors
        assert list(tensors) == ["queries", "valid_lens"]
        for name, want in (("queries", queries), ("valid_lens", lens)):
            assert tensors[name].dtype == want.dtype
            assert tensors[name].dtype.isnative
            assert tensors[name].shape == want.shape
            assert tensors[name].tobytes() == want.tobytes()

    def test_names_need_no_suffix(self) -> None:
        """An entry is named with `.npy` or without."""
        data = npy(described(), bytes(8))
        assert list(CODEC.decode(archive(("queries", data), ("keys.npy", data))).tensors) == ["queries", "keys"]

    def test_version_2_of_npy(self) -> None:
        """Headers of npy 2.0 are read, too."""
        data = npy(described(), np.array([3, 5], np.float32).tobytes(), version=b"\2\0")
        assert CODEC.decode(archive(("queries.npy", data))).tensors["queries"].tolist() == [[[3, 5]]]

    def test_an_empty_archive_is_no_tensor(self) -> None:
        """An archive of nothing is read as nothing."""
        assert CODEC.decode(archive()).tensors == {}

    def test_all_that_the_limit_allows(self) -> None:
        """Entries that together inflate to just the limit are read."""
        header_bytes = len(npy(described(shape="(16000,)")))
        data = npy(described("'|u1'", f"({LIMIT_BYTES - header_bytes},)"), bytes(LIMIT_BYTES - header_bytes))
        assert len(data) == LIMIT_BYTES
        assert CODEC.decode(archive(("keys.npy", data), method=zipfile.ZIP_DEFLATED)).tensors["keys"].sum() == 0

    @pytest.mark.parametrize(
        ("sent", "error", "message"),
        [
            pytest.param(b"", MalformedBody, "body: not an npz archive", id="empty"),
            pytest.param(b"PK\3\4", MalformedBody, "body: not an npz archive", id="cut_off"),
            pytest.param(npy(described(), bytes(8)), MalformedBody, "body: not an npz archive", id="npy_alone"),
            pytest.param(archive(("keys.npy", b"")), MalformedBody, "keys|body", id="empty_entry"),
            pytest.param(archive(("keys.npy", b"no npy file at all")), MalformedBody, "keys|body", id="no_npy"),
            pytest.param(
                archive(("keys.npy", npy(described(), bytes(8), version=b"\3\0"))),
                MalformedBody,
                r"keys: npy version is \(3, 0\)",
                id="npy_version",
            ),
            pytest.param(archive(("keys.npy", npy("{"))), MalformedBody, "keys", id="header_no_literal"),
            pytest.param(archive(("keys.npy", npy("[1]"))), MalformedBody, "keys", id="header_no_dict"),
            pytest.param(archive(("keys.npy", npy("exit()"))), MalformedBody, "keys", id="header_code"),
            pytest.param(archive(("keys.npy", npy(" " * 5000))), MalformedBody, "keys", id="header_too_long"),
            pytest.param(
                archive(("keys.npy", npy("(" * 3000 + ")" * 3000))), MalformedBody, "keys", id="header_bottomless"
            ),
            pytest.param(archive(("keys.npy", npy(described("'|O'"), bytes(8)))), InvalidDtype, "keys: ", id="objects"),
            pytest.param(archive(("keys.npy", npy(described("'<U2'"), bytes(8)))), InvalidDtype, "keys: ", id="text"),
            pytest.param(
                archive(("keys.npy", npy(described("[('a', '<f4')]"), bytes(8)))), InvalidDtype, "keys: ", id="records"
            ),
            pytest.param(
                archive(("keys.npy", npy(described("'<c8'"), bytes(16)))), InvalidDtype, "keys: ", id="complex"
            ),
            pytest.param(
                archive(("keys.npy", npy(described("'<f3'"), bytes(6)))), MalformedBody, "keys", id="no_dtype"
            ),
            pytest.param(
                archive(("keys.npy", npy(described(), bytes(7)))), MalformedBody, "keys: holds 7", id="data_cut"
            ),
            pytest.param(
                archive(("keys.npy", npy(described(), bytes(9)))), MalformedBody, "keys: holds 9 bytes", id="left_over"
            ),
            pytest.param(
                archive(("keys.npy", npy(described(shape="(-1, -2)"), bytes(8)))),
                MalformedBody,
                r"keys: shape \(-1, -2\) has a negative size",
                id="negative",
            ),
            pytest.param(
                archive(("keys.npy", npy(described(shape="(0, 10**30)".replace("10**30", "1" + "0" * 30))))),
                MalformedBody,
                "keys",
                id="larger_than_any",
            ),
            pytest.param(
                archive(("keys.npy", npy(described(), bytes(8))), ("keys", npy(described(), bytes(8)))),
                MalformedBody,
                "keys: given twice",
                id="name_twice",
            ),
            pytest.param(
                archive(*((f"t{index}.npy", npy(described(), bytes(8))) for index in range(17))),
                MalformedBody,
                "the archive has 17 entries, want at most 16",
                id="many_entries",
            ),
            pytest.param(
                archive(("keys.npy", npy(described(), bytes(8))), method=zipfile.ZIP_BZIP2),
                MalformedBody,
                "keys: want stored or deflated entries",
                id="bzip2",
            ),
            pytest.param(
                archive(("keys.npy", bytes(LIMIT_BYTES + 1)), method=zipfile.ZIP_DEFLATED),
                BodyTooLarge,
                f"inflates to {LIMIT_BYTES + 1} bytes, the limit is {LIMIT_BYTES}",
                id="bomb",
            ),
            pytest.param(
                archive(*((f"{n}.npy", bytes(LIMIT_BYTES // 2 + 1)) for n in "ab"), method=zipfile.ZIP_DEFLATED),
                BodyTooLarge,
                "inflates to",
                id="bomb_of_two",
            ),
        ],
    )
    def test_refuses(self, sent: bytes, error: type[ServiceError], message: str) -> None:
        """What is no archive of plain arrays within the limit is refused, naming the array."""
        with pytest.raises(error, match=message):
            CODEC.decode(sent)

    def test_pickled_objects_are_never_loaded(self) -> None:
        """An array of objects is refused before anything is unpickled."""
        with pytest.raises(InvalidDtype, match="keys: dtype is object, want numbers"):
            CODEC.decode(written(keys=np.array([_Bomb()], object)))

    def test_bfloat16_of_numpy_is_refused(self) -> None:
        """An npz that numpy wrote has bfloat16 as raw bytes, which nobody can tell from others."""
        with pytest.raises(InvalidDtype, match="keys: dtype is"):
            CODEC.decode(written(keys=np.ones((1, 1, 2), ml_dtypes.bfloat16)))

    @pytest.mark.parametrize("position", [0, 5, 40], ids=["first", "middle", "later"])
    def test_data_that_rotted_is_refused(self, position: int) -> None:
        """One other bit in the data is found by the archive's checksum."""
        sent = bytearray(written(keys=np.ones((1, 5, 7), np.float32)))
        sent[sent.index(np.float32(1).tobytes() * 3) + position] ^= 1
        with pytest.raises(MalformedBody, match="body: not an npz archive: Bad CRC-32"):
            CODEC.decode(bytes(sent))


class _Bomb:
    def __reduce__(self) -> Any:
        return pytest.fail, ("unpickled",)
