"""Tensors of requests: shapes of the contract, padding where it belongs, and what the oracle makes of them."""

import numpy as np
import pytest

from loadtest.shapes import Mix, Shape, together
from loadtest.sizes import parse_sizes
from loadtest.tensors import Composer, Layer, marked

LAYER = Layer(5, 7, 11)
SHAPE = Shape((2, 3), (4, 1), (3, 1))


def composed(shape: Shape, **more: object) -> dict[str, np.ndarray]:
    """Seeded."""
    return Composer(LAYER, **more).compose(shape, np.random.default_rng(1))  # type: ignore[arg-type]


def test_padded() -> None:
    """A batch axis, the longest entry's rows, zeros beyond the others, and how many keys count."""
    tensors = composed(SHAPE)
    assert {name: one.shape for name, one in tensors.items()} == {
        "queries": (2, 3, 5), "keys": (2, 4, 7), "values": (2, 4, 11), "valid_lens": (2,),
    }  # fmt: skip
    assert (tensors["queries"][0, 2:] == 0).all()
    assert (tensors["keys"][1, 1:] == 0).all()
    assert (tensors["keys"][0] != 0).all()
    assert tensors["valid_lens"].tolist() == [3, 1]
    assert tensors["queries"].dtype == np.float32


def test_packed() -> None:
    """Rows behind each other, and their numbers."""
    tensors = composed(Shape((2, 3), (4, 1)), form="packed")
    assert {name: one.shape for name, one in tensors.items()} == {
        "queries": (5, 5), "query_lens": (2,), "keys": (5, 7), "values": (5, 11), "valid_lens": (2,),
    }  # fmt: skip
    assert tensors["query_lens"].tolist() == [2, 3]
    assert tensors["valid_lens"].tolist() == [4, 1]


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        (Shape((3, 3)), {"queries"}),
        (Shape((2, 3)), {"queries", "valid_lens"}),
        (Shape((3, 3), (4, 4)), {"queries", "keys", "values"}),
        (Shape((3, 3), None, (1, 2)), {"queries", "valid_lens"}),
    ],
    ids=["self", "self_of_unequal_lengths", "cross", "self_with_padding"],
)
def test_only_what_is_needed(shape: Shape, names: set[str]) -> None:
    """Lengths are sent where they say something."""
    assert set(composed(shape)) == names


def test_complete() -> None:
    """A bare graph wants all four, with a length for each query; self-attention sends its queries three times."""
    tensors = Composer(Layer(5, 5, 5), complete=True).compose(Shape((2, 3)), np.random.default_rng(1))
    assert (tensors["keys"] == tensors["queries"]).all()
    assert (tensors["values"] == tensors["queries"]).all()
    assert tensors["valid_lens"].tolist() == [[2, 2, 2], [3, 3, 3]]


def test_marked_is_a_copy() -> None:
    """The tensors stay what they were."""
    tensors = composed(SHAPE)
    before = tensors["queries"].copy()
    assert marked(tensors, 6)["queries"][-1, -1, -1] == np.float32(7e-6)
    assert (tensors["queries"] == before).all()


class TestMix:
    def test_draws_each_entry(self) -> None:
        """Every entry has its own lengths, and no more valid keys than keys."""
        mix = Mix(*map(parse_sizes, ("3", "uniform:min=1,max=9", "uniform:min=1,max=9", "uniform:min=1,max=9")))
        shapes = mix.draw(np.random.default_rng(1), 50)
        assert {len(shape.queries) for shape in shapes} == {3}
        assert len({shape.queries for shape in shapes}) > 40
        assert all(v <= k for shape in shapes for v, k in zip(shape.valid or (), shape.keys or (), strict=True))

    def test_self_attention_has_no_keys(self) -> None:
        """Without sizes of keys there are none."""
        (shape,) = Mix(parse_sizes("2"), parse_sizes("5")).draw(np.random.default_rng(1), 1)
        assert shape == Shape((5, 5))
        assert shape.num_tokens == 10


def test_tokens_are_those_that_count() -> None:
    """Queries and valid keys, no padding."""
    assert SHAPE.num_tokens == 2 + 3 + 3 + 1
    assert together([SHAPE, Shape((7,), (2,))]).num_tokens == SHAPE.num_tokens + 9
