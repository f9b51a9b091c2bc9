"""Entries as they are posted: every form, without padding, and mistakes named."""

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch

from heads.errors import HeadsError
from heads.inputs import Entry, Labels, read_inputs, read_labels, read_outputs
from model.attention import seeded_layer

LAYER = seeded_layer(6, 2, seed=0)
RNG = np.random.default_rng(0)
QUERIES, KEYS = RNG.standard_normal((2, 3, 6), np.float32), RNG.standard_normal((2, 4, 6), np.float32)


def entries(path: Path) -> tuple[Entry, ...]:
    """Of a file."""
    return read_inputs(path, LAYER).entries


def test_cross_attention_ends_at_the_longest_valid_length(tmp_path: Path) -> None:
    """Keys that no query reads are left out; of a row that averages them all, none."""
    np.savez(tmp_path / "x.npz", queries=QUERIES, keys=KEYS, valid_lens=np.array([[1, 2, 1], [3, 0, 1]]))
    first, second = entries(tmp_path / "x.npz")
    assert (first.queries.shape, first.keys.shape, first.values.shape) == ((3, 6), (2, 6), (2, 6))
    assert second.keys.shape == (4, 6)
    assert first.valid_lens.tolist() == [1, 2, 1]
    assert not first.is_self
    np.testing.assert_array_equal(first.keys, KEYS[0, :2])


def test_padding_stays_where_it_is_to_be_shown(tmp_path: Path) -> None:
    """As zeros, whatever stood there, so that nothing of it can reach a result."""
    keys = KEYS.copy()
    keys[0, 2:] = np.nan
    np.savez(tmp_path / "x.npz", queries=QUERIES, keys=keys, valid_lens=np.array([2, 3]))
    first, second = read_inputs(tmp_path / "x.npz", LAYER, with_padding=True).entries
    assert first.keys.shape == second.values.shape == (4, 6)
    np.testing.assert_array_equal(first.keys[:2], KEYS[0, :2])
    assert not first.keys[2:].any()
    assert not second.keys[3:].any()


def test_self_attention_leaves_padded_queries_out(tmp_path: Path) -> None:
    """One length an entry is that of its queries, too; lengths of each query say nothing of padding."""
    safetensors.numpy.save_file({"queries": QUERIES, "valid_lens": np.array([2, 3])}, tmp_path / "x.safetensors")
    assert [len(one.queries) for one in entries(tmp_path / "x.safetensors")] == [2, 3]
    np.savez(tmp_path / "x.npz", queries=QUERIES, valid_lens=np.array([[1, 2, 1], [1, 1, 1]]))
    assert [len(one.queries) for one in entries(tmp_path / "x.npz")] == [3, 3]


def test_lists_of_unequal_length(tmp_path: Path) -> None:
    """JSON has them as they are."""
    ragged = {"queries": [QUERIES[0, :1].tolist(), QUERIES[1].tolist()]}
    (tmp_path / "x.json").write_text(json.dumps(ragged))
    first, second = entries(tmp_path / "x.json")
    assert (len(first.queries), len(second.queries)) == (1, 3)
    assert first.is_self
    torch.testing.assert_close(second.keys, torch.from_numpy(QUERIES[1]))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("x.npy", b"", "got a .npy, want .json, .npz, .safetensors"),
        ("x.npz", b"no archive", "x.npz"),
        ("x.json", b'{"queries": [[[1, 2]]]}', "last axis is 2, the model expects 6"),
        ("x.json", b'{"quer": []}', "did you mean queries"),
        ("absent.json", None, "No such file"),
    ],
)
def test_mistakes(tmp_path: Path, name: str, content: bytes | None, said: str) -> None:
    """Said with the file, as the service would say them."""
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(HeadsError, match=said) as mistake:
        read_inputs(tmp_path / name, LAYER)
    assert name in str(mistake.value)


class TestLabels:
    """Of an entry with two queries and three keys."""

    SIZES = Entry(torch.zeros(2, 6), torch.zeros(3, 6), torch.zeros(3, 6), torch.zeros(2), is_self=False)

    @pytest.mark.parametrize(
        ("content", "labels"),
        [
            (["a", "b", "c", "d"], Labels(("a", "b"), ("a", "b", "c"))),
            ({"keys": ["x", "y", "z"]}, Labels((), ("x", "y", "z"))),
            ([["no"], ["a", "b", "c"]], Labels(("a", "b"), ("a", "b", "c"))),
            ([{}, {"queries": ["p", "q"], "keys": ["x", "y", "z"]}], Labels(("p", "q"), ("x", "y", "z"))),
        ],
    )
    def test_forms(self, tmp_path: Path, content: object, labels: Labels) -> None:
        """One list for both, one each, or one for each entry, of which this is number 1."""
        (tmp_path / "labels.json").write_text(json.dumps(content))
        assert read_labels(tmp_path / "labels.json", 1, self.SIZES) == labels

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            ('["a", "b"]', "keys: 2 labels for 3 tokens"),
            ('{"key": []}', r"got \['key'\], want queries and keys"),
            ('{"keys": [1, 2, 3]}', "want a list of texts"),
            ('[["a"]]', "has 1 entries, want number 1"),
            ("7", "want a list of texts"),
            ("{", "labels.json"),
        ],
    )
    def test_mistakes(self, tmp_path: Path, content: str, said: str) -> None:
        """Named."""
        (tmp_path / "labels.json").write_text(content)
        with pytest.raises(HeadsError, match=said):
            read_labels(tmp_path / "labels.json", 1, self.SIZES)


class TestOutputs:
    """What an output should be."""

    ENTRIES = tuple(
        Entry(torch.zeros(length, 6), torch.zeros(3, 6), torch.zeros(3, 6), torch.zeros(length), is_self=False)
        for length in (2, 3)
    )

    def test_padded_and_packed(self, tmp_path: Path) -> None:
        """As the service answers either."""
        padded = RNG.standard_normal((2, 4, 6), np.float32)
        np.savez(tmp_path / "padded.npz", output=padded)
        packed = np.concatenate([padded[0, :2], padded[1, :3]])
        safetensors.numpy.save_file({"output": packed}, tmp_path / "packed.safetensors")
        for name in ("padded.npz", "packed.safetensors"):
            first, second = read_outputs(tmp_path / name, "--target", self.ENTRIES, 6)
            np.testing.assert_array_equal(first, padded[0, :2])
            np.testing.assert_array_equal(second, padded[1, :3])

    @pytest.mark.parametrize(
        ("tensors", "said"),
        [
            ({"output": np.zeros((2, 2, 6), np.float32)}, r"shape is \(2, 2, 6\), want \(2, 3 or more, 6\) or packed"),
            ({"output": np.full((2, 3, 6), np.nan, np.float32)}, "nan or infinite"),
            ({"outputs": np.zeros((2, 3, 6), np.float32)}, "with a tensor 'output'"),
        ],
    )
    def test_mistakes(self, tmp_path: Path, tensors: dict[str, np.ndarray], said: str) -> None:
        """Named with the option."""
        np.savez(tmp_path / "x.npz", **tensors)
        with pytest.raises(HeadsError, match=said) as mistake:
            read_outputs(tmp_path / "x.npz", "--target", self.ENTRIES, 6)
        assert str(mistake.value).startswith("--target")

    def test_no_file(self, tmp_path: Path) -> None:
        """Named, too."""
        with pytest.raises(HeadsError, match=r"--gradients .*absent\.npz"):
            read_outputs(tmp_path / "absent.npz", "--gradients", self.ENTRIES, 6)
