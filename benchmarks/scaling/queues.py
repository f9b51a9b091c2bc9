"""Replicas behind a load balancer, request by request: who waits how long, and who is refused.

Pure: arrivals, service times and the generator of random numbers are arguments. Imports numpy alone.

Within a replica whoever is free takes the oldest, so the next to start is known when it arrives, and each request is
one step: no event beside arrivals and departures is needed. A refusal costs its replica time, too; it delays those that
come after it, and not those that have been let in, which is a little less than in truth.
"""

import heapq
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]
# Which replica, by how many requests each has in hand.
Choose = Callable[[Sequence[int]], int]

# The part of `most_wait_s` that may be waited for by estimate: as `service/admission.py` has it.
MARGIN: Final = 0.7
# Of each replica, where connections stay.
CONNECTIONS: Final = 32


@final
@dataclass(frozen=True, slots=True)
class Fleet:
    """Replicas that are all alike.

    Attributes:
        replicas: how many there are.
        workers: requests that each computes at once.
        estimate_s: what admission takes one request for.
        most_wait_s: beyond which nobody is let in (`--max-queue-ms`); infinite means that nobody is refused.
        refusal_s: time of a worker that a refusal takes.
    """

    replicas: int
    workers: int = 1
    estimate_s: float = 1.0
    most_wait_s: float = math.inf
    refusal_s: float = 0.0

    @property
    def most_in_hand(self) -> int:
        """Requests that one replica lets in at most: those before the last would keep it waiting for long enough."""
        if math.isinf(self.most_wait_s):
            return sys.maxsize
        return max(self.workers, math.floor(MARGIN * self.most_wait_s * self.workers / self.estimate_s) + 1)


@final
@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of the requests, in order of arrival.

    Attributes:
        waits_s: until a worker began; nan where the request was refused.
        latencies_s: until it was answered; nan where it was refused.
        busy_s: what the workers of each replica had to do, refusals included.
        capacity_s: what those of one could have done from the first arrival to the last.
    """

    waits_s: Floats
    latencies_s: Floats
    busy_s: Floats
    capacity_s: float

    def after(self, settling: float) -> "Outcome":
        """Without the first requests, this part of them, in which the queues filled. Work is still that of all."""
        first = round(settling * len(self.waits_s))
        return Outcome(self.waits_s[first:], self.latencies_s[first:], self.busy_s, self.capacity_s)

    @property
    def utilisation(self) -> float:
        """Work by time. Beyond 1 where some of it is done after the last arrival."""
        return float(self.busy_s.mean()) / self.capacity_s

    @property
    def refused(self) -> float:
        """The share of requests that was not let in."""
        return float(np.isnan(self.waits_s).mean())

    def mean_wait_s(self) -> float:
        """Of those that were let in."""
        return float(np.nanmean(self.waits_s))

    def wait_s(self, share: float) -> float:
        """What this share of those that were let in waited at most."""
        return float(np.nanquantile(self.waits_s, share))

    def latency_s(self, share: float) -> float:
        """Within which this share of those that were let in was answered."""
        return float(np.nanquantile(self.latencies_s, share))


def simulate(arrivals_s: Floats, services_s: Floats, fleet: Fleet, choose: Choose) -> Outcome:
    """What becomes of requests that arrive then and take so long.

    Args:
        arrivals_s: (N,), ascending.
        services_s: (N,), of a worker.
        fleet: who answers.
        choose: the load balancer.
    """
    free_s = [[0.0] * fleet.workers for _ in range(fleet.replicas)]  # a heap for each: when its workers are free
    in_hand = [0] * fleet.replicas
    busy_s = [0.0] * fleet.replicas
    departures: list[tuple[float, int]] = []
    most = fleet.most_in_hand
    waits_s, latencies_s = [], []
    for arrival, service in zip(arrivals_s.tolist(), services_s.tolist(), strict=True):
        while departures and departures[0][0] <= arrival:
            in_hand[heapq.heappop(departures)[1]] -= 1
        replica = choose(in_hand)
        workers = free_s[replica]
        begin = max(arrival, workers[0])
        if in_hand[replica] >= most:
            heapq.heapreplace(workers, begin + fleet.refusal_s)
            busy_s[replica] += fleet.refusal_s
            waits_s.append(math.nan)
            latencies_s.append(math.nan)
            continue
        end = begin + service
        heapq.heapreplace(workers, end)
        heapq.heappush(departures, (end, replica))
        in_hand[replica] += 1
        busy_s[replica] += service
        waits_s.append(begin - arrival)
        latencies_s.append(end - arrival)
    capacity_s = float(arrivals_s[-1] - arrivals_s[0]) * fleet.workers
    return Outcome(np.array(waits_s), np.array(latencies_s), np.array(busy_s), capacity_s)


def poisson(rate: float, count: int, rng: np.random.Generator) -> Floats:
    """When so many requests arrive, of clients that do not know of each other."""
    return np.cumsum(rng.exponential(1 / rate, count))


def service_times(mean_s: float, variation: float, count: int, rng: np.random.Generator) -> Floats:
    """Times with that mean, and that ratio of standard deviation to mean: 0 are all alike, 1 are exponential."""
    if variation == 0:
        return np.full(count, mean_s)
    shape = 1 / variation**2
    return rng.gamma(shape, mean_s / shape, count)


def at_random(replicas: int, rng: np.random.Generator) -> Choose:
    """Any replica."""
    drawn = _drawn(replicas, rng)
    return lambda _: next(drawn)


def in_turn(replicas: int, _: np.random.Generator) -> Choose:
    """One after the other."""
    turn = -1

    def choose(_: Sequence[int]) -> int:
        nonlocal turn
        turn = (turn + 1) % replicas
        return turn

    return choose


def of_two(replicas: int, rng: np.random.Generator) -> Choose:
    """The one with less in hand of two that are drawn: the power of two choices."""
    drawn = _drawn(replicas, rng)

    def choose(in_hand: Sequence[int]) -> int:
        one, other = next(drawn), next(drawn)
        return one if in_hand[one] <= in_hand[other] else other

    return choose


def least_busy(replicas: int, rng: np.random.Generator) -> Choose:
    """One with the least in hand of all; where several have, the next after one that is drawn."""
    drawn = _drawn(replicas, rng)

    def choose(in_hand: Sequence[int]) -> int:
        least, first = min(in_hand), next(drawn)
        return next(index for index in itertools.chain(range(first, replicas), range(first)) if in_hand[index] == least)

    return choose


def by_connection(replicas: int, rng: np.random.Generator) -> Choose:
    """That of the request's connection: so many for each replica, which landed anywhere and stay there."""
    landed = rng.integers(replicas, size=CONNECTIONS * replicas).tolist()
    drawn = _drawn(len(landed), rng)
    return lambda _: landed[next(drawn)]


BALANCERS: Final[dict[str, Callable[[int, np.random.Generator], Choose]]] = {
    "connection": by_connection, "random": at_random, "turn": in_turn, "two": of_two, "least": least_busy,
}  # fmt: skip


def _drawn(below: int, rng: np.random.Generator) -> Iterator[int]:
    while True:  # thousands at once, since to draw one takes longer than a step of the simulation
        yield from rng.integers(below, size=4096).tolist()
