"""The simulated queue against what is known of queues in closed form, and against the service's own door."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest

from benchmarks.scaling.queues import (
    BALANCERS,
    MARGIN,
    Fleet,
    Outcome,
    at_random,
    in_turn,
    least_busy,
    poisson,
    service_times,
    simulate,
)  # fmt: skip
from service import admission
from service.admission import Admission
from service.errors import Overloaded

# The standard error of the mean wait is 3 % then, for exponential times at 0.8 (twice that for more uneven ones).
COUNT = 200_000
MEAN_S = 0.003


def outcome(utilisation: float, variation: float, fleet: Fleet, balancer: str = "random", seed: int = 1) -> Outcome:
    """Of so much work for a fleet, once its queues have filled."""
    rng = np.random.default_rng(seed)
    arrivals_s = poisson(utilisation * fleet.replicas * fleet.workers / MEAN_S, COUNT, rng)
    services_s = service_times(MEAN_S, variation, COUNT, rng)
    return simulate(arrivals_s, services_s, fleet, BALANCERS[balancer](fleet.replicas, rng)).after(0.1)


def pollaczek_khinchine_s(utilisation: float, variation: float) -> float:
    """The mean wait of M/G/1."""
    return MEAN_S * utilisation / (1 - utilisation) * (1 + variation**2) / 2


def erlang_c_s(utilisation: float, workers: int) -> float:
    """The mean wait of M/M/c."""
    offered = utilisation * workers
    last = offered**workers / math.factorial(workers) / (1 - utilisation)
    waits = last / (sum(offered**k / math.factorial(k) for k in range(workers)) + last)
    return waits * MEAN_S / (workers * (1 - utilisation))


def refused_by_full_queue(utilisation: float, most: int) -> float:
    """The share that M/M/1/K refuses."""
    return utilisation**most / sum(utilisation**k for k in range(most + 1))


class TestClosedForms:
    @pytest.mark.parametrize("utilisation", [0.3, 0.6, 0.8])
    @pytest.mark.parametrize("variation", [pytest.param(0, id="alike"), pytest.param(1, id="exponential"), 2])
    def test_mean_wait_of_one_worker(self, utilisation: float, variation: float) -> None:
        """Pollaczek and Khinchine's formula, for service times that are alike, exponential, and more uneven."""
        want_s = pollaczek_khinchine_s(utilisation, variation)
        got = outcome(utilisation, variation, Fleet(1))
        assert got.mean_wait_s() == pytest.approx(want_s, rel=0.1)
        assert got.utilisation == pytest.approx(utilisation, rel=0.02)

    def test_quantile_of_one_worker(self) -> None:
        """The latency of M/M/1 is exponential with the mean of service over what is idle."""
        got = outcome(0.7, 1, Fleet(1))
        assert got.latency_s(0.99) == pytest.approx(MEAN_S / 0.3 * math.log(100), rel=0.05)

    @pytest.mark.parametrize("workers", [2, 7, 31])
    def test_mean_wait_of_several_workers(self, workers: int) -> None:
        """Erlang's C, from two workers to many."""
        assert outcome(0.8, 1, Fleet(1, workers)).mean_wait_s() == pytest.approx(erlang_c_s(0.8, workers), rel=0.1)

    @pytest.mark.parametrize("utilisation", [0.7, 0.95, 1.5])
    def test_refusals_of_a_full_queue(self, utilisation: float) -> None:
        """A replica that lets in K refuses what M/M/1/K does, below its capacity and beyond."""
        fleet = Fleet(1, estimate_s=MEAN_S, most_wait_s=7.5 * MEAN_S / MARGIN)
        assert fleet.most_in_hand == 8
        want = refused_by_full_queue(utilisation, 8)
        assert outcome(utilisation, 1, fleet).refused == pytest.approx(want, rel=0.05)

    def test_random_landing_is_as_many_single_queues(self) -> None:
        """Poisson arrivals that are split at random are Poisson arrivals at each replica."""
        got = outcome(0.7, 1, Fleet(11), "random")
        assert got.mean_wait_s() == pytest.approx(pollaczek_khinchine_s(0.7, 1), rel=0.1)


class TestBalancers:
    def test_the_more_is_known_the_shorter_the_wait(self) -> None:
        """Connections that stay are worst, then random, in turn, two choices, the least busy, and one queue for all."""
        alone = [outcome(0.8, 1, Fleet(13), name).wait_s(0.99) for name in ("connection", "random", "turn", "two")]
        most = [outcome(0.8, 1, Fleet(13), "least").wait_s(0.99), outcome(0.8, 1, Fleet(1, 13)).wait_s(0.99)]
        assert all(one > other for one, other in itertools.pairwise([*alone, *most]))

    @pytest.mark.parametrize("name", BALANCERS)
    def test_every_replica_is_used(self, name: str) -> None:
        """Nobody is left out, even where all are idle most of the time."""
        assert outcome(0.1, 1, Fleet(5), name).busy_s.min() > 0

    def test_turns_come_round(self) -> None:
        """In turn is 0, 1, 2, and 0 again, whatever they have in hand."""
        choose = in_turn(3, np.random.default_rng(0))
        assert [choose([9, 0, 0]) for _ in range(4)] == [0, 1, 2, 0]

    @pytest.mark.parametrize("in_hand", [pytest.param([2, 1, 3], id="one"), pytest.param([1, 1, 1], id="several")])
    def test_least_is_least(self, in_hand: Sequence[int]) -> None:
        """A replica with the least in hand, and each of those in time."""
        choose = least_busy(3, np.random.default_rng(0))
        chosen = {choose(in_hand) for _ in range(100)}
        assert chosen == {index for index, count in enumerate(in_hand) if count == 1}


class TestRefusals:
    @pytest.mark.parametrize(
        ("workers", "estimate_s", "most_wait_s"), [(1, 0.0043, 0.5), (3, 0.0131, 0.5), (5, 0.9, 1)]
    )
    def test_as_many_are_let_in_as_by_the_service(self, workers: int, estimate_s: float, most_wait_s: float) -> None:
        """The service's own door, while nothing is done, lets in as many of a size as the simulation does."""
        door = Admission(workers, 1.0, most_wait_s, math.inf, lambda: 0.0)
        for _ in range(Fleet(1, workers, estimate_s, most_wait_s).most_in_hand):
            door.enter(estimate_s)
        with pytest.raises(Overloaded):
            door.enter(estimate_s)

    def test_margin_is_the_service_s(self) -> None:
        """The simulation refuses at the same part of the bound."""
        assert admission._MARGIN == MARGIN

    def test_no_bound_refuses_nobody(self) -> None:
        """However long the queue."""
        assert outcome(1.5, 0, Fleet(1)).refused == 0

    def test_waits_stay_within_the_bound(self) -> None:
        """At twice what can be done, those that are let in wait as long as the door says, and half are refused."""
        got = outcome(2, 0, Fleet(1, estimate_s=MEAN_S, most_wait_s=0.1))
        assert MARGIN * 0.1 - MEAN_S <= got.wait_s(0.99) <= MARGIN * 0.1 + MEAN_S
        assert got.refused == pytest.approx(0.5, abs=0.01)

    def test_refusals_cost_answers(self) -> None:
        """Nine refusals of a hundredth of a request for each answer take their part."""
        free, dear = (
            outcome(10, 0, Fleet(1, estimate_s=MEAN_S, most_wait_s=0.1, refusal_s=cost_s))
            for cost_s in (0, MEAN_S / 100)
        )
        answered = (1 - dear.refused) / (1 - free.refused)
        assert answered == pytest.approx((1 - 0.1) / (1 - 0.01), rel=0.01)


def test_same_seed_same_outcome() -> None:
    """Nothing but the generator is random."""
    one, other = (outcome(0.9, 1, Fleet(3), "two", seed=5) for _ in range(2))
    np.testing.assert_array_equal(one.waits_s, other.waits_s)


def test_requests_by_hand() -> None:
    """Three requests and one worker, on paper."""
    got = simulate(
        np.array([0.0, 1.0, 5.0]), np.array([2.0, 2.0, 1.0]), Fleet(1), at_random(1, np.random.default_rng(0))
    )
    assert got.waits_s.tolist() == [0.0, 1.0, 0.0]
    assert got.latencies_s.tolist() == [2.0, 3.0, 1.0]
    assert got.utilisation == 1.0
