"""Scores and the masked softmax, on numbers that can be checked by hand."""

import math

import pytest
import torch

from model.scoring import AdditiveAttention, DotProductAttention, masked_softmax

B, H, Q, K, D, S = 2, 3, 5, 7, 11, 13


def scores_of(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn((B, H, Q, K), generator=torch.Generator().manual_seed(17)).to(dtype)


class TestMaskedSoftmax:
    def test_without_lengths_is_softmax(self) -> None:
        """None means that all K keys are valid."""
        assert torch.equal(masked_softmax(scores_of(), None), scores_of().softmax(-1))
        assert torch.equal(masked_softmax(scores_of(), torch.tensor([K, K])), scores_of().softmax(-1))

    def test_by_hand(self) -> None:
        """Scores 0, ln 2, ln 3 at length 2 give 1/3, 2/3 and exactly 0."""
        scores = torch.tensor([0.0, math.log(2), math.log(3)]).reshape(1, 1, 1, 3)
        weights = masked_softmax(scores, torch.tensor([2]))
        torch.testing.assert_close(weights.flatten(), torch.tensor([1 / 3, 2 / 3, 0.0]))
        assert weights.flatten()[2] == 0

    def test_length_per_row_is_the_same_for_each_query(self) -> None:
        """Lengths (B,) are lengths (B, Q) with equal queries."""
        per_row = torch.tensor([2, 6])
        per_query = per_row[:, None].expand(B, Q)
        assert torch.equal(masked_softmax(scores_of(), per_row), masked_softmax(scores_of(), per_query))

    def test_length_per_query_goes_to_its_query(self) -> None:
        """Query i of row b sees the first valid_lens[b, i] keys, in every head."""
        lengths = torch.tensor([[1, 2, 3, 4, 5], [7, 6, 5, 4, 3]])
        seen = (masked_softmax(scores_of(), lengths) > 0).sum(-1)
        assert torch.equal(seen, lengths[:, None].expand(B, H, Q))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
    def test_length_zero_is_uniform(self, dtype: torch.dtype) -> None:
        """With no valid key all K weigh the same, whatever the scores and the dtype."""
        weights = masked_softmax(scores_of(dtype) * 1000, torch.tensor([0, 0]))
        torch.testing.assert_close(weights, torch.full((B, H, Q, K), 1 / K, dtype=dtype))

    @pytest.mark.parametrize("low", [-2e6, -1e9, -1e30], ids=str)
    def test_scores_below_minus_a_million_still_ignore_padding(self, low: float) -> None:
        """Where the seeds' -1e6 would outweigh very low valid scores, padding still weighs exactly 0."""
        scores = torch.full((1, 1, 1, 3), low)
        assert masked_softmax(scores, torch.tensor([2])).flatten().tolist() == [0.5, 0.5, 0.0]

    def test_leaves_the_scores(self) -> None:
        """The caller's scores are not written to, unlike by the seeds."""
        scores = scores_of()
        masked_softmax(scores, torch.tensor([1, 2]))
        assert torch.equal(scores, scores_of())


class TestDotProductAttention:
    def test_by_hand(self) -> None:
        """Two equal vectors of four twos score 16 / sqrt(4)."""
        ones = torch.full((1, 1, 1, 4), 2.0)
        assert DotProductAttention()(ones, ones).item() == 8.0

    def test_shape(self) -> None:
        """Scores are (B, H, Q, K)."""
        assert DotProductAttention()(torch.zeros(B, H, Q, D), torch.zeros(B, H, K, D)).shape == (B, H, Q, K)


class TestAdditiveAttention:
    @torch.no_grad()
    def test_by_hand(self) -> None:
        """With all parameters 1, a query of sum 3 and a key of sum 2 score S tanh(5)."""
        layer = AdditiveAttention(2, S)
        for parameter in layer.parameters():
            parameter.fill_(1.0)
        score = layer(torch.tensor([[[[1.0, 2.0]]]]), torch.tensor([[[[3.0, -1.0]]]]))
        assert score.item() == pytest.approx(S * math.tanh(5), rel=1e-6)

    @torch.no_grad()
    def test_shape_and_names(self) -> None:
        """Scores are (B, H, Q, K), and the three parameters carry d2l's names."""
        layer = AdditiveAttention(D, S)
        assert layer(torch.zeros(B, H, Q, D), torch.zeros(B, H, K, D)).shape == (B, H, Q, K)
        shapes = {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()}
        assert shapes == {"W_q.weight": (S, D), "W_k.weight": (S, D), "w_v.weight": (1, S)}
