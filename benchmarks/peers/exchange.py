"""One request and its answer: how a server is found ready, and its answers right, before it is measured."""

import http.client
from collections.abc import Sequence
from typing import Final

import numpy as np
import orjson

_TIMEOUT_S: Final = 30.0
# float32 sums of 512 and 2048 terms, in another order where a peer batches or the service trims.
_RTOL: Final = 1e-4
_ATOL: Final = 1e-5


class Unavailable(Exception):
    """A contestant that cannot be measured, and why; the results say so."""


def post(port: int, path: str, media_type: str, body: bytes) -> bytes:
    """The body of the answer.

    Raises:
        Unavailable: the status is not 200.
        OSError: nobody answers.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
    try:
        connection.request("POST", path, body, {"Content-Type": media_type})
        response = connection.getresponse()
        answer = response.read()
    except http.client.HTTPException as error:
        raise Unavailable(f"no HTTP answer: {error!r}") from error
    finally:
        connection.close()
    if response.status != http.client.OK:
        raise Unavailable(f"HTTP {response.status}: {_reason(answer)}")
    return answer


def _reason(answer: bytes) -> str:
    """The text of an error in JSON, without what differs each time; else how the answer begins."""
    try:
        document = orjson.loads(answer)
    except orjson.JSONDecodeError:
        document = None
    text = document["error"] if isinstance(document, dict) and "error" in document else answer.decode(errors="replace")
    return str(text)[:200]


def check(outputs: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> float:
    """The largest difference between a contestant's outputs and those computed in process.

    Raises:
        Unavailable: an output has another size, or is another one.
    """
    largest = 0.0
    for output, want in zip(outputs, wanted, strict=True):
        if output.size != want.size:
            raise Unavailable(f"wrong answer: {output.size} numbers, want {want.size}")
        if not np.allclose(output.ravel(), want.ravel(), _RTOL, _ATOL):
            raise Unavailable(f"wrong answer: off by {np.abs(output.ravel() - want.ravel()).max():.3g}")
        largest = max(largest, float(np.abs(output.ravel() - want.ravel()).max()))
    return largest
