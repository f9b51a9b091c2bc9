"""What is asked of a server beside the load: descriptions, metrics, one answer for reference."""

import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

import orjson

from loadtest.errors import LoadTestError
from loadtest.protocols import Body
from loadtest.target import Target

_TIMEOUT_S = 10.0


def get(target: Target, timeout_s: float = _TIMEOUT_S) -> bytes | None:
    """What lies at the target; None where nothing does (404, 405).

    Raises:
        LoadTestError: it cannot be reached, or answers something else than 2xx.
    """
    try:
        return _open(target, None, {}, timeout_s)[1]
    except urllib.error.HTTPError as error:
        if error.code in (404, 405):
            return None
        raise LoadTestError(f"{target.url}: {error.code} {_said(error)}") from error


def get_json(target: Target) -> Any:
    """The JSON that lies at the target; None where nothing does, or something else.

    Raises:
        LoadTestError: as `get`.
    """
    content = get(target)
    try:
        return None if content is None else orjson.loads(content)
    except orjson.JSONDecodeError:
        return None


def post(target: Target, body: Body, content: bytes, timeout_s: float) -> tuple[Mapping[str, str], bytes]:
    """The headers, in lower case, and the body of the answer to one request.

    Raises:
        LoadTestError: the answer is none, or not 2xx.
    """
    try:
        return _open(target, content, {"Content-Type": body.media_type, **body.headers}, timeout_s)
    except urllib.error.HTTPError as error:
        raise LoadTestError(f"{target.url}: {error.code} {_said(error)}") from error


def _open(
    target: Target, content: bytes | None, headers: Mapping[str, str], timeout_s: float
) -> tuple[Mapping[str, str], bytes]:
    request = urllib.request.Request(target.url, content, {**headers, **dict(target.headers)})  # noqa: S310  # parse_target has checked
    try:
        with urllib.request.urlopen(request, timeout=timeout_s, context=target.tls()) as answer:  # noqa: S310
            return {name.lower(): value for name, value in answer.headers.items()}, answer.read()
    except urllib.error.HTTPError:
        raise
    except (OSError, ValueError) as error:
        raise LoadTestError(f"{target.url}: {getattr(error, 'reason', error)}") from error


def _said(error: urllib.error.HTTPError) -> str:
    return error.read(300).decode(errors="replace").strip()
