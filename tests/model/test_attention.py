"""The layer against the float64 oracle, the seeds' code and torch's attention, and the properties that hold exactly.

Sizes are distinct primes, or products of them, so that no two axes can be confused: B 2, Q 3, K 5, H 7, D 11, and 13,
17, 19 for the sizes of queries, keys and values.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from model.attention import MultiHeadAttention, merge_heads, seeded_layer, split_heads
from tests.model.d2l_seeds import AdditiveAttention, LazyMultiHeadAttention, SizedMultiHeadAttention
from tests.oracle import multi_head_attention

B, Q, K, H, D = 2, 3, 5, 7, 11
QUERY_SIZE, KEY_SIZE, VALUE_SIZE = 13, 17, 19

# Float32 rounds to 6e-8; sums here have at most 77 terms of order 1, and errors of the four layers of sums add up.
FLOAT32 = {"rtol": 1e-5, "atol": 1e-6}
FLOAT64 = {"rtol": 1e-12, "atol": 1e-13}

VALID_LENS = {
    "all": None,
    "per_row": torch.tensor([3, 5]),
    "per_query": torch.tensor([[1, 2, 3], [4, 5, 2]]),
    "zero_row": torch.tensor([0, 2]),
    "zero_query": torch.tensor([[0, 5, 1], [3, 0, 0]]),
    "int32": torch.tensor([2, 4], dtype=torch.int32),
    "uint8": torch.tensor([[5, 1, 0], [2, 2, 2]], dtype=torch.uint8),
}
valid_lens_cases = pytest.mark.parametrize("valid_lens", VALID_LENS.values(), ids=VALID_LENS.keys())
scorings = pytest.mark.parametrize("scoring", ["dot_product", "additive"])
biases = pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])


def layer_of(scoring: str = "dot_product", bias: bool = True) -> MultiHeadAttention:
    sizes = {"query_size": QUERY_SIZE, "key_size": KEY_SIZE, "value_size": VALUE_SIZE}
    return seeded_layer(H * D, H, seed=23, bias=bias, scoring=scoring, **sizes)


def inputs_of(seed: int = 29, num_keys: int = K) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = ((B, Q, QUERY_SIZE), (B, num_keys, KEY_SIZE), (B, num_keys, VALUE_SIZE))
    queries, keys, values = (torch.randn(shape, generator=random) for shape in shapes)
    return queries, keys, values


def oracle(layer: nn.Module, inputs: tuple[Tensor, ...], valid_lens: Tensor | None) -> tuple[np.ndarray, np.ndarray]:
    weights = {name: tensor.numpy() for name, tensor in layer.state_dict().items()}
    lengths = None if valid_lens is None else valid_lens.numpy()
    return multi_head_attention(weights, H, *(x.numpy() for x in inputs), lengths)


class TestAgainstTheOracle:
    @valid_lens_cases
    @scorings
    @biases
    @torch.no_grad()
    def test_float64_agrees_to_the_last_digits(self, bias: bool, scoring: str, valid_lens: Tensor | None) -> None:
        """Cast to float64, output and weights are those of the equations but for float64 rounding."""
        layer, inputs = layer_of(scoring, bias).double(), tuple(x.double() for x in inputs_of())
        got = layer(*inputs, valid_lens, need_weights=True)
        for ours, want in zip(got, oracle(layer, inputs, valid_lens), strict=True):
            np.testing.assert_allclose(ours.numpy(), want, **FLOAT64)

    @valid_lens_cases
    @scorings
    @torch.no_grad()
    def test_float32_agrees_to_rounding(self, scoring: str, valid_lens: Tensor | None) -> None:
        """In float32, output and weights are those of the equations but for float32 rounding."""
        layer, inputs = layer_of(scoring), inputs_of()
        got = layer(*inputs, valid_lens, need_weights=True)
        for ours, want in zip(got, oracle(layer, inputs, valid_lens), strict=True):
            np.testing.assert_allclose(ours.numpy(), want, **FLOAT32)

    @torch.no_grad()
    def test_scoring_size_other_than_head_size(self) -> None:
        """Additive scoring may have a size of its own."""
        torch.manual_seed(31)
        sizes = {"query_size": QUERY_SIZE, "key_size": KEY_SIZE, "value_size": VALUE_SIZE}
        layer = MultiHeadAttention(H * D, H, scoring="additive", scoring_size=23, **sizes).eval()
        assert layer.attention.W_q.weight.shape == (23, D)
        got, want = layer(*inputs_of()), oracle(layer, inputs_of(), None)[0]
        np.testing.assert_allclose(got.numpy(), want, **FLOAT32)


class TestAgainstTheSeeds:
    @valid_lens_cases
    @biases
    @torch.no_grad()
    def test_state_dict_loads_unchanged_both_ways(self, bias: bool, valid_lens: Tensor | None) -> None:
        """A state dict of the first seed loads strictly here, and back, and the answers are equal to rounding."""
        ours = layer_of(bias=bias)
        seed = SizedMultiHeadAttention(KEY_SIZE, QUERY_SIZE, VALUE_SIZE, H * D, H, 0.5, bias).eval()
        ours.load_state_dict(seed.state_dict())
        torch.testing.assert_close(ours(*inputs_of(), valid_lens), seed(*inputs_of(), valid_lens), **FLOAT32)
        seed.load_state_dict(layer_of(bias=bias).state_dict())
        torch.testing.assert_close(
            layer_of(bias=bias)(*inputs_of(), valid_lens), seed(*inputs_of(), valid_lens), **FLOAT32
        )

    @torch.no_grad()
    def test_lazy_seed_loads_into_a_lazy_layer(self) -> None:
        """A state dict of the second seed loads into a layer whose sizes were left out, and settles them."""
        seed = LazyMultiHeadAttention(H * D, H, 0.5).eval()
        want = seed(*inputs_of(), VALID_LENS["per_query"])
        ours = MultiHeadAttention(H * D, H, 0.5).eval()
        ours.load_state_dict(seed.state_dict())
        torch.testing.assert_close(ours(*inputs_of(), VALID_LENS["per_query"]), want, **FLOAT32)

    @valid_lens_cases
    @torch.no_grad()
    def test_additive_scoring_is_the_seeds(self, valid_lens: Tensor | None) -> None:
        """With one head, additive scoring is d2l's AdditiveAttention between the projections, under the same names."""
        seed = SizedMultiHeadAttention(KEY_SIZE, QUERY_SIZE, VALUE_SIZE, D, 1, 0.5)
        seed.attention = AdditiveAttention(D, D, 23, 0.5)
        sizes = {"query_size": QUERY_SIZE, "key_size": KEY_SIZE, "value_size": VALUE_SIZE}
        ours = MultiHeadAttention(D, 1, scoring="additive", scoring_size=23, **sizes)
        ours.load_state_dict(seed.state_dict())
        got, want = ours.eval()(*inputs_of(), valid_lens), seed.eval()(*inputs_of(), valid_lens)
        torch.testing.assert_close(got, want, **FLOAT32)


class TestAgainstTorch:
    @pytest.mark.parametrize("valid_lens", [None, VALID_LENS["per_query"]], ids=["all", "per_query"])
    @torch.no_grad()
    def test_scaled_dot_product_attention(self, valid_lens: Tensor | None) -> None:
        """The second witness: torch's own attention on the same projections, wherever no row is empty."""
        layer, (queries, keys, values) = layer_of(), inputs_of()
        mask = None if valid_lens is None else (torch.arange(K) < valid_lens[..., None])[:, None]
        projected = (layer.W_q(queries), layer.W_k(keys), layer.W_v(values))
        heads = nn.functional.scaled_dot_product_attention(*(split_heads(x, H) for x in projected), attn_mask=mask)
        torch.testing.assert_close(layer(queries, keys, values, valid_lens), layer.W_o(merge_heads(heads)), **FLOAT32)


class TestWeights:
    @valid_lens_cases
    @scorings
    @torch.no_grad()
    def test_rows_sum_to_one_and_vanish_beyond_the_length(self, scoring: str, valid_lens: Tensor | None) -> None:
        """Every row sums to 1; beyond a length above 0 weights are exactly 0, and at length 0 all are 1 / K."""
        _, weights = layer_of(scoring)(*inputs_of(), valid_lens, need_weights=True)
        assert weights.shape == (B, H, Q, K)
        torch.testing.assert_close(weights.sum(-1), torch.ones(B, H, Q))
        lengths = torch.full((B,), K) if valid_lens is None else valid_lens
        lengths = (lengths[:, None] if lengths.dim() == 1 else lengths).expand(B, Q)[:, None].expand(B, H, Q)
        beyond = torch.arange(K) >= lengths[..., None]
        assert (weights[beyond & (lengths > 0)[..., None]] == 0).all()
        torch.testing.assert_close(weights[lengths == 0], torch.full_like(weights[lengths == 0], 1 / K))

    @torch.no_grad()
    def test_are_returned_only_when_asked_for(self) -> None:
        """The output is the same whether weights are asked for or not, and alone unless they are."""
        layer = layer_of()
        alone = layer(*inputs_of())
        assert torch.equal(alone, layer(*inputs_of(), need_weights=True)[0])


class TestLengthZero:
    @pytest.mark.parametrize("valid_lens", [torch.tensor([0, 0]), torch.zeros(B, Q).long()], ids=["rows", "queries"])
    @torch.no_grad()
    def test_is_the_mean_of_the_values(self, valid_lens: Tensor) -> None:
        """A query with nothing to attend to gets the mean of all K projected values, through W_o."""
        layer, (queries, keys, values) = layer_of(), inputs_of()
        want = layer.W_o(layer.W_v(values).mean(1, keepdim=True)).expand(B, Q, H * D)
        torch.testing.assert_close(layer(queries, keys, values, valid_lens), want, **FLOAT32)


class TestPadding:
    @given(garbage=st.floats(-1e6, 1e6), seed=st.integers(0, 2**32), extra=st.integers(0, 3))
    @settings(max_examples=30, deadline=None)
    @torch.no_grad()
    def test_finite_garbage_beyond_the_length_changes_nothing(self, garbage: float, seed: int, extra: int) -> None:
        """Whatever finite keys and values stand beyond the length, and however many, the output is the same."""
        layer, (queries, keys, values), valid_lens = layer_of(), inputs_of(seed), torch.tensor([3, 5])
        want = layer(queries, keys, values, valid_lens)
        padded_keys, padded_values = (nn.functional.pad(x, (0, 0, 0, extra), value=garbage) for x in (keys, values))
        padded_keys[0, 3:], padded_values[0, 3:] = garbage, garbage
        got = layer(queries, padded_keys, padded_values, valid_lens)
        torch.testing.assert_close(got, want, **FLOAT32)

    @torch.no_grad()
    def test_row_is_what_it_is_alone_and_trimmed(self) -> None:
        """A padded row in a batch gives what its valid keys give in a batch of one without lengths."""
        layer, (queries, keys, values), valid_lens = layer_of(), inputs_of(), torch.tensor([2, 4])
        batched = layer(queries, keys, values, valid_lens)
        for row, length in enumerate(valid_lens):
            alone = layer(queries[row : row + 1], keys[row : row + 1, :length], values[row : row + 1, :length])
            torch.testing.assert_close(batched[row : row + 1], alone, **FLOAT32)


class TestPermutation:
    @given(order=st.permutations(range(4)), scoring=st.sampled_from(["dot_product", "additive"]))
    @settings(max_examples=30, deadline=None)
    @torch.no_grad()
    def test_of_valid_keys_permutes_weights_and_keeps_the_output(self, order: list[int], scoring: str) -> None:
        """Keys and values have no order: shuffling the valid ones moves their weights and changes nothing else."""
        layer, (queries, keys, values), valid_lens = layer_of(scoring), inputs_of(), torch.tensor([4, 4])
        order = [*order, 4]
        output, weights = layer(queries, keys, values, valid_lens, need_weights=True)
        shuffled = layer(queries, keys[:, order], values[:, order], valid_lens, need_weights=True)
        torch.testing.assert_close(shuffled, (output, weights[..., order]), **FLOAT32)


class TestLazySizes:
    @torch.no_grad()
    def test_first_forward_settles_them(self) -> None:
        """Sizes left out are those of the first inputs."""
        layer = MultiHeadAttention(H * D, H).eval()
        assert layer(*inputs_of()).shape == (B, Q, H * D)
        sizes = [layer.W_q.in_features, layer.W_k.in_features, layer.W_v.in_features]
        assert sizes == [QUERY_SIZE, KEY_SIZE, VALUE_SIZE]

    def test_given_sizes_are_kept(self) -> None:
        """A size that was given is not lazy."""
        layer = MultiHeadAttention(H * D, H, key_size=KEY_SIZE)
        assert layer.W_k.weight.shape == (H * D, KEY_SIZE)
        assert isinstance(layer.W_q, nn.LazyLinear)
        assert isinstance(layer.W_v, nn.LazyLinear)


class TestState:
    @scorings
    @torch.no_grad()
    def test_forward_writes_none(self, scoring: str) -> None:
        """A forward leaves attributes, parameters, buffers and inputs as they were: threads may share a layer."""
        layer, inputs = layer_of(scoring), inputs_of()
        before = [dict(vars(module)) for module in layer.modules()]
        values_before = [x.clone() for x in (*layer.state_dict().values(), *inputs)]
        layer(*inputs, VALID_LENS["zero_query"], need_weights=True)
        assert [dict(vars(module)) for module in layer.modules()] == before
        assert all(map(torch.equal, (*layer.state_dict().values(), *inputs), values_before))

    def test_names_are_the_seeds(self) -> None:
        """The state dict has the names that d2l's checkpoints have, and no others."""
        projections = {f"W_{letter}.{kind}" for letter in "qkvo" for kind in ("weight", "bias")}
        scoring = {"attention.W_q.weight", "attention.W_k.weight", "attention.w_v.weight"}
        assert layer_of().state_dict().keys() == projections
        assert layer_of("additive").state_dict().keys() == projections | scoring

    def test_head_size(self) -> None:
        """head_size is num_hiddens / num_heads."""
        assert layer_of().head_size == D


class TestDropout:
    @torch.no_grad()
    def test_only_in_training(self) -> None:
        """In eval mode dropout does nothing; in training it drops weights, so two forwards differ."""
        layer = MultiHeadAttention(H * D, H, dropout=0.5)
        first = layer(*inputs_of())
        assert not torch.equal(first, layer(*inputs_of()))
        layer.eval()
        assert torch.equal(layer(*inputs_of()), layer(*inputs_of()))

    @torch.no_grad()
    def test_returned_weights_are_before_it(self) -> None:
        """As in the seeds, the weights that are returned sum to 1 even in training."""
        layer = layer_of()
        layer.train().dropout.p = 0.5
        _, weights = layer(*inputs_of(), need_weights=True)
        torch.testing.assert_close(weights.sum(-1), torch.ones(B, H, Q))


class TestHeads:
    def test_split_takes_consecutive_features(self) -> None:
        """Head i gets the i-th block of D features, and merging is the inverse."""
        x = torch.arange(B * Q * H * D).reshape(B, Q, H * D)
        heads = split_heads(x, H)
        assert heads.shape == (B, H, Q, D)
        assert torch.equal(heads[:, 2], x[..., 2 * D : 3 * D])
        assert torch.equal(merge_heads(heads), x)


class TestConstructor:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            pytest.param({"num_hiddens": 77, "num_heads": 5}, "multiple of num_heads, got 77 and 5", id="indivisible"),
            pytest.param({"num_hiddens": 77, "num_heads": 0}, "got 77 and 0", id="no_heads"),
            pytest.param({"num_hiddens": 0, "num_heads": 7}, "got 0 and 7", id="no_hiddens"),
            pytest.param({"num_hiddens": -77, "num_heads": 7}, "got -77 and 7", id="negative_hiddens"),
            pytest.param({"query_size": 0}, "input size must be positive, got 0", id="no_query_size"),
            pytest.param({"value_size": -3}, "input size must be positive, got -3", id="negative_value_size"),
            pytest.param({"scoring": "bilinear"}, "'bilinear', want one of dot_product, additive", id="scoring"),
            pytest.param({"scoring_size": 3}, "only additive scoring has one", id="scoring_size"),
        ],
    )
    def test_refuses(self, arguments: dict[str, object], message: str) -> None:
        """Arguments that make no layer are refused with what was got."""
        with pytest.raises(ValueError, match=message):
            MultiHeadAttention(**{"num_hiddens": 77, "num_heads": 7, **arguments})


class TestSeededLayer:
    def test_same_seed_same_weights(self) -> None:
        """The same arguments give the same weights; another seed gives others; the mode is eval."""
        first, again, other = (seeded_layer(77, 7, seed=seed).W_q.weight for seed in (3, 3, 5))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)
        assert not seeded_layer(77, 7, seed=3).training

    def test_leaves_the_random_state(self) -> None:
        """The caller's random numbers go on as if nothing had been drawn."""
        torch.manual_seed(3)
        want = torch.rand(5)
        torch.manual_seed(3)
        seeded_layer(77, 7, seed=11)
        assert torch.equal(torch.rand(5), want)
