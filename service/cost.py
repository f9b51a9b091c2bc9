"""What an engine call costs: seconds from rates measured on this machine, bytes from the shapes alone.

Pure; the engine measures at warm-up. Shape letters: B batch, Q queries, K key-value pairs, H heads.
"""

from dataclasses import dataclass
from typing import Final, final

from service.artifact import Layer

_FLOAT_BYTES: Final = 4


@final
@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of a call: a constant, and a rate for each floating-point operation.

    Attributes:
        call_s: of a call that computes next to nothing.
        flop_s: of one operation in a call that computes much.
    """

    call_s: float
    flop_s: float

    def row_s(self, layer: Layer, num_queries: int, num_kv: int) -> float:
        """Seconds that one batch entry adds to a call."""
        return row_flops(layer, num_queries, num_kv) * self.flop_s


def row_flops(layer: Layer, num_queries: int, num_kv: int) -> int:
    """Floating-point operations of one batch entry: four projections, the scores, and the average of the values."""
    hiddens = layer.num_hiddens
    projected = num_queries * (layer.query_size + hiddens) + num_kv * (layer.key_size + layer.value_size)
    return 2 * hiddens * projected + 2 * num_queries * num_kv * hiddens * (1 + _score_size(layer))


def score_bytes(layer: Layer, num_queries: int, num_kv: int) -> int:
    """Bytes that the scores of one batch entry take at their peak: what softmax reads, and what it writes."""
    return 2 * _FLOAT_BYTES * layer.num_heads * num_queries * num_kv * _score_size(layer)


def _score_size(layer: Layer) -> int:
    # Additive scoring holds a vector for every score, before its tanh and after.
    return layer.scoring_size or 1
