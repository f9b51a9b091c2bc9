"""The inputs on which a graph must agree with its layer: one row of `CASES` for each way shapes and lengths can be odd.

Pure: a case and an oracle give the same arrays on every machine.
"""

from dataclasses import dataclass
from typing import Final, Literal, final

import numpy as np
from numpy.typing import NDArray

from export.oracle import Oracle
from export.signature import LayerSpec

LARGE_SCORE: Final = 1e4
_CANDIDATES: Final = 256

Lengths = Literal["absent", "zero", "one", "full", "mixed", "per_query"]


@final
@dataclass(frozen=True, slots=True)
class Case:
    """One point of the grid; `lengths` says how valid_lens are drawn."""

    name: str
    batch: int
    num_queries: int
    num_kv: int
    lengths: Lengths
    large_scores: bool = False

    @property
    def every_key_counts(self) -> bool:
        """Whether no row has padding, so that a lowering without a mask must give the same answer."""
        return self.lengths in ("absent", "full")


@final
@dataclass(frozen=True, slots=True)
class Inputs:
    """Arrays of one case. valid_lens as a caller gives them: None, (B,) or (B, Q)."""

    queries: NDArray[np.float32]
    keys: NDArray[np.float32]
    values: NDArray[np.float32]
    valid_lens: NDArray[np.int64] | None

    def full_valid_lens(self) -> NDArray[np.int64]:
        """valid_lens as the graph takes them: (B, Q)."""
        batch, num_queries, _ = self.queries.shape
        return full_valid_lens(self.valid_lens, batch, num_queries, self.keys.shape[1])


def full_valid_lens(lens: NDArray[np.int64] | None, batch: int, num_queries: int, num_kv: int) -> NDArray[np.int64]:
    """None, (B,) or (B, Q) as (B, Q)."""
    if lens is None:
        return np.full((batch, num_queries), num_kv, np.int64)
    column = lens[:, None] if lens.ndim == 1 else lens
    return np.ascontiguousarray(np.broadcast_to(column, (batch, num_queries)), np.int64)


CASES: Final = (
    Case("one of each", 1, 1, 1, "absent"),
    Case("no lengths", 2, 3, 5, "absent"),
    Case("one query", 3, 1, 7, "mixed"),
    Case("one key", 5, 3, 1, "mixed"),
    Case("as many queries as keys", 3, 7, 7, "mixed"),
    Case("more queries than keys", 2, 11, 3, "mixed"),
    Case("length 0", 3, 2, 5, "zero"),
    Case("length 1", 3, 2, 5, "one"),
    Case("length K", 3, 2, 5, "full"),
    Case("lengths per query", 5, 7, 11, "per_query"),
    Case("wide batch", 31, 2, 3, "per_query"),
    Case("long", 1, 17, 257, "mixed"),
    Case("large scores", 2, 5, 7, "mixed", large_scores=True),
    Case("large scores per query", 3, 5, 11, "per_query", large_scores=True),
    Case("one query, no padding", 3, 1, 7, "full"),
    Case("one key, no padding", 5, 3, 1, "absent"),
    Case("more queries than keys, no padding", 2, 11, 3, "full"),
    Case("wide batch, no padding", 31, 2, 3, "absent"),
    Case("large scores, no padding", 2, 5, 7, "full", large_scores=True),
    # Fused kernels work in blocks that fit a core's cache; these two reach beyond the first one in either direction.
    Case("many queries, no padding", 1, 131, 257, "absent"),
    Case("many keys, no padding", 1, 17, 2053, "absent"),
)


def draw(case: Case, spec: LayerSpec, oracle: Oracle, seed: int) -> Inputs:
    """Standard normal inputs of a case; with large scores, queries scaled until the largest score is 1e4.

    Additive scores are bounded by their own weights; there the queries are ten times as large, which saturates them.
    """
    rng = np.random.default_rng(seed)
    keys = rng.standard_normal((case.batch, case.num_kv, spec.key_size), np.float32)
    values = rng.standard_normal((case.batch, case.num_kv, spec.value_size), np.float32)
    lens = _valid_lens(case, rng)
    if case.large_scores and spec.scoring == "dot_product":
        candidates = rng.standard_normal((case.batch, _CANDIDATES, spec.query_size), np.float32)
        per_query = full_valid_lens(lens, case.batch, case.num_queries, case.num_kv)
        queries = _with_large_scores(candidates, keys, per_query, oracle)
    else:
        queries = rng.standard_normal((case.batch, case.num_queries, spec.query_size), np.float32)
        queries *= 10 if case.large_scores else 1
    return Inputs(queries, keys, values, lens)


def _valid_lens(case: Case, rng: np.random.Generator) -> NDArray[np.int64] | None:
    fixed = {"zero": 0, "one": 1, "full": case.num_kv}
    if case.lengths == "absent":
        return None
    if case.lengths in fixed:
        return np.full(case.batch, fixed[case.lengths], np.int64)
    per_query = case.lengths == "per_query"
    lens = rng.integers(0, case.num_kv + 1, (case.batch, case.num_queries) if per_query else case.batch)
    edges = np.array([0, 1, case.num_kv])  # every drawn case holds the edges, as far as they fit
    flat = lens.reshape(-1)
    flat[: len(edges)] = edges[: len(flat)]
    return lens


def _with_large_scores(
    candidates: NDArray[np.float32], keys: NDArray[np.float32], lens: NDArray[np.int64], oracle: Oracle
) -> NDArray[np.float32]:
    # A float32 score of 1e4 is off by about 1e-3, so two keys that nearly tie would differ by 1e-3 in weight whatever
    # the implementation. The candidates whose weights move least with their scores test the range, not the tie.
    candidates = _scaled(candidates, keys, oracle)
    scores = oracle.scores(candidates, keys)  # (B, H, candidates, K)
    chosen = np.empty((*lens.shape, candidates.shape[-1]), np.float32)
    for row, query in np.ndindex(lens.shape):
        condition = _condition(scores[row, :, :, : max(1, int(lens[row, query]))])
        best = int(condition.argsort(kind="stable")[query])  # the query-th best, so that queries differ
        chosen[row, query] = candidates[row, best]
    return _scaled(chosen, keys, oracle)


def _scaled(queries: NDArray[np.float32], keys: NDArray[np.float32], oracle: Oracle) -> NDArray[np.float32]:
    for _ in range(3):  # scores are not quite proportional to queries where there is a bias
        largest = float(np.abs(oracle.scores(queries, keys)).max())
        queries = queries * np.float32(LARGE_SCORE / largest)
    return queries


def _condition(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    # How far a relative change of the scores (H, candidates, n) moves a weight, in the worst head, by candidate.
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights = powers / powers.sum(axis=-1, keepdims=True)
    moved = (weights * (1 - weights)).max(axis=-1) * np.abs(scores).max(axis=-1)
    worst: NDArray[np.float64] = moved.max(axis=0)
    return worst
