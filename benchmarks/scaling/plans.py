"""The fleets of the document, simulated at measured costs. Pure, and seeded: the same costs give the same figures."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from benchmarks.scaling.queues import BALANCERS, Fleet, Outcome, poisson, service_times, simulate

RATE: Final = 10_000.0
UTILISATIONS: Final = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
BOUNDS_S: Final = (0.005, 0.02)
SHAPES: Final = ("dense-16", "dense-128")
ZONES: Final = 3
# The part of the requests in which queues fill.
SETTLING: Final = 0.2
COUNT: Final = 200_000
_MOST_WAIT_S: Final = 2.0
# Where the search for enough of them ends, though it be in vain.
_MOST_REPLICAS: Final = 100_000
_ONE_QUEUE: Final = "one"
_COMPARED: Final = ("random", "two", _ONE_QUEUE)
_Costs = Mapping[str, Any]


def plan(costs: _Costs, say: Callable[[str], None], count: int = COUNT) -> dict[str, Any]:
    """What the tables of simulations hold, each simulation of so many requests, give or take."""
    found = {}
    for name, part in {"balancing": balancing, "fewest": fewest, "failure": failure}.items():
        found[name] = part(costs, count)
        say(f"simulated: {name}")
    return found


def balancing(costs: _Costs, count: int) -> list[dict[str, Any]]:
    """The wait by utilisation and balancer, at the rate of the document."""
    cost_s = _cost_s(costs, "dense-128")
    rows = []
    for utilisation in UTILISATIONS:
        replicas = math.ceil(RATE * cost_s / utilisation)
        outcomes = {name: _run(RATE, cost_s, replicas, name, count) for name in (*BALANCERS, _ONE_QUEUE)}
        alike = _run(RATE, cost_s, replicas, "two", count, variation=0.0)
        rows.append(
            {
                "utilisation": utilisation, "replicas": replicas,
                **{name: _summary(outcome) for name, outcome in outcomes.items()}, "two_alike": _summary(alike),
            }
        )  # fmt: skip
    return rows


def fewest(costs: _Costs, count: int) -> list[dict[str, Any]]:
    """The fewest replicas with which the p99 wait is within a bound, by shape, bound and balancer."""
    return [
        {
            "shape": shape, "bound_s": bound_s,
            **{name: _fewest(_cost_s(costs, shape), bound_s, name, count // 2) for name in _COMPARED},
        }
        for shape in SHAPES for bound_s in BOUNDS_S
    ]  # fmt: skip


def failure(costs: _Costs, count: int) -> list[dict[str, Any]]:
    """What a zone of three is missed by, by the utilisation before: all that comes is the others' from then on."""
    cost_s, refusal_s = _cost_s(costs, "dense-128"), costs["refusals"]["self-128"]["cpu_s"]
    rows = []
    for utilisation in (0.5, 0.6, 0.65, 0.7, 0.8):
        each = math.ceil(RATE * cost_s / utilisation / ZONES)
        left = (ZONES - 1) * each
        outcome = _run(RATE, cost_s, left, "two", 4 * count, refusal_s=refusal_s, most_wait_s=0.5)
        rows.append(
            {"before": utilisation, "after": RATE * cost_s / left, "replicas": ZONES * each, **_summary(outcome)}
        )
    return rows


def _fewest(cost_s: float, bound_s: float, balancer: str, count: int) -> int:
    def is_enough(replicas: int) -> bool:
        return _run(RATE, cost_s, replicas, balancer, count).wait_s(0.99) <= bound_s

    least = math.floor(RATE * cost_s)
    most = least + 1
    while not is_enough(most) and most < _MOST_REPLICAS:
        least, most = most, 2 * most
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (least, middle) if is_enough(middle) else (middle, most)
    return most


def _run(
    rate: float,
    cost_s: float,
    replicas: int,
    balancer: str,
    count: int,
    *,
    variation: float = 1.0,
    refusal_s: float = 0.0,
    most_wait_s: float = _MOST_WAIT_S,
) -> Outcome:
    """One simulation; `one` is one queue for all replicas, as if they were workers of one."""
    rng = np.random.default_rng(0)
    pooled = balancer == _ONE_QUEUE
    fleet = Fleet(1 if pooled else replicas, replicas if pooled else 1, cost_s, most_wait_s, refusal_s)
    choose = BALANCERS["random" if pooled else balancer](fleet.replicas, rng)
    arrivals_s, services_s = poisson(rate, count, rng), service_times(cost_s, variation, count, rng)
    return simulate(arrivals_s, services_s, fleet, choose).after(SETTLING)


def _summary(outcome: Outcome) -> dict[str, float]:
    return {
        "wait_p50_s": outcome.wait_s(0.5), "wait_p99_s": outcome.wait_s(0.99), "latency_p99_s": outcome.latency_s(0.99),
        "refused": outcome.refused, "utilisation": outcome.utilisation,
    }  # fmt: skip


def _cost_s(costs: _Costs, kind: str) -> float:
    return float(costs["kinds"][kind]["cpu_s"])
