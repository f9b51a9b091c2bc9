"""How widely and how far heads look."""

import pytest
import torch

from heads.measures import habits


def test_even_single_and_distant() -> None:
    """All keys alike; one key, its own; one key, the farthest."""
    weights = torch.stack([torch.full((4, 4), 0.25), torch.eye(4), torch.eye(4).flip(1)])
    even, own, far = habits(weights, torch.full((4,), 4))
    assert (even.entropy_bits, even.evenness, even.most) == pytest.approx((2, 1, 0.25))
    assert (own.entropy_bits, own.evenness, own.reach, own.most) == pytest.approx((0, 0, 0, 1))
    assert far.reach == pytest.approx((3 + 1 + 1 + 3) / 4)
    assert even.reach == pytest.approx((1.5 + 1 + 1 + 1.5) / 4)


def test_keys_that_do_not_count() -> None:
    """Evenness is over those that do; with a length of 0 all of them do, and with one key there is no choice."""
    weights = torch.tensor([[[0.5, 0.5, 0, 0], [0.25, 0.25, 0.25, 0.25], [1, 0, 0, 0]]])
    (only,) = habits(weights, torch.tensor([2, 0, 1]))
    assert only.evenness == pytest.approx(1)
    assert only.entropy_bits == pytest.approx((1 + 2 + 0) / 3)
