"""Whether answers under load are right: compared with float64, or with what the server answers when nobody else asks.

With the artefact at hand, references are computed from its weights by the float64 oracle of the export. Without it the
server is asked once for each of them before the clock starts: that shows whether load changes answers, and not whether
they were right before.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, final

import numpy as np

from export.oracle import Oracle
from loadtest.driver import MOST_REFERENCES, Kept
from loadtest.errors import LoadTestError
from loadtest.process import Stock
from loadtest.protocols import read_output
from loadtest.shapes import Shape
from loadtest.target import Target
from loadtest.tensors import Array
from loadtest.web import post
from loadtest.workload import Composed

Kind = Literal["float64", "the server alone"]
_TIMEOUT_S: Final = 60.0


@final
class References:
    """Outputs that are wanted, and how far answers were from them.

    Args:
        kind: where they come from.
        outputs: by index of the body.
        workload: that the bodies are of.
        processes: that send them.
        tolerance: largest difference, as a part of the largest output.
    """

    def __init__(
        self, kind: Kind, outputs: Mapping[int, Array], workload: Composed, processes: int, tolerance: float
    ) -> None:
        self.kind = kind
        self._outputs = outputs
        self._workload = workload
        self._processes = processes
        self.tolerance = tolerance
        self.compared = 0
        self.wrong: list[str] = []
        self.max_error = 0.0

    def anew(self) -> "References":
        """The same outputs, and nothing compared yet."""
        return References(self.kind, self._outputs, self._workload, self._processes, self.tolerance)

    def compare(self, process: int, kept: Kept) -> None:
        """Looks at one answer that a process has kept. One that is not 2xx is counted elsewhere."""
        if kept.status // 100 != 2:
            return
        self.compared += 1
        index = process + kept.body * self._processes
        want = self._outputs[index]
        try:
            got = read_output(self._workload.protocol, kept.headers, kept.content)
        except LoadTestError as error:
            self.wrong.append(str(error))
            return
        if want.ndim == 2:  # packed; JSON has a list for each entry
            got = got.reshape(-1, got.shape[-1])
        if got.shape != want.shape:
            self.wrong.append(f"body {index}: output has shape {got.shape}, want {want.shape}")
            return
        off = float(np.abs(got - want).max() / np.abs(want).max())
        self.max_error = max(self.max_error, off)
        if not off <= self.tolerance:
            self.wrong.append(f"body {index}: output is off by {off:.2g} of the largest, at most {self.tolerance:.2g}")


def indices(stocks: Sequence[Stock]) -> list[int]:
    """Of the bodies whose answers are compared: the first few of each process."""
    return [
        stock.process + place * len(stocks) for stock in stocks for place in range(min(MOST_REFERENCES, stock.bodies))
    ]


def from_server(target: Target, workload: Composed, of: Sequence[int]) -> dict[int, Array]:
    """What the server answers to these bodies one at a time.

    Raises:
        LoadTestError: one is not answered.
    """
    outputs = {}
    for index in of:
        body = workload.make(index).body
        headers, content = post(target, body, bytes(body.fresh(0)), _TIMEOUT_S)
        outputs[index] = read_output(workload.protocol, headers, content)
    return outputs


def from_weights(artifact: Path, digest: str | None, workload: Composed, of: Sequence[int]) -> dict[int, Array]:
    """What the layer of an artefact computes in float64.

    Args:
        artifact: its folder.
        digest: of the model that is served, if that is known; another one is refused.
        workload: that the bodies are of.
        of: indices of bodies.

    Raises:
        LoadTestError: the artefact cannot be read, or is not what is served.
    """
    try:
        from loadtest.weights import read_layer  # noqa: PLC0415  # wants onnx, which only this needs
    except ImportError as error:
        raise LoadTestError(f"--artifact: {error}; pip install 'mha-service[export]'") from error
    layer = read_layer(artifact, digest)
    return {index: _output(layer, workload.tensors(index), workload.make(index).shape) for index in of}


def _output(layer: Oracle, tensors: Mapping[str, Array], shape: Shape) -> Array:
    packed = "query_lens" in tensors
    queries = _entries(tensors["queries"], shape.queries, packed=packed)
    # In self-attention only the queries that are there are keys, and not their padding.
    keys, values = (
        _entries(tensors.get(name, tensors["queries"]), shape.keys or shape.queries, packed=packed)
        for name in ("keys", "values")
    )
    outputs = [
        layer.attend(
            one[None], keys[entry][None, :length], values[entry][None, :length], np.full((1, len(one)), length)
        )
        for entry, (one, length) in enumerate(zip(queries, shape.valid_lens, strict=True))
    ]
    parts = [output[0] for output, _ in outputs]
    return np.concatenate(parts) if packed else np.stack(parts)


def _entries(rows: Array, lengths: Sequence[int], *, packed: bool) -> Sequence[Array]:
    return np.split(rows, np.cumsum(lengths)[:-1]) if packed else list(rows)
