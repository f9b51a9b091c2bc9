"""Reading a request's body, never further than the limit, and its compression."""

import zlib
from collections.abc import Mapping, Sequence
from typing import Final

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope

from service.codec import Body, Chunk
from service.errors import BodyTooLarge, MalformedBody
from service.http.extensions import READ_WHOLE

_DIGITS_MAX: Final = 18
# zlib's own codes: 31 is gzip, 15 the zlib container that HTTP calls deflate.
_WINDOW_BITS: Final[Mapping[str, int]] = {"gzip": 31, "deflate": 15}
ENCODINGS: Final = tuple(_WINDOW_BITS)


async def read_body(scope: Scope, headers: Headers, receive: Receive, max_bytes: int) -> Body:
    """The whole body, without a copy where its length was announced. What is too long is refused before a byte is read.

    Raises:
        BodyTooLarge: it announces, or turns out to have, more than `max_bytes`.
        MalformedBody: Content-Length is no number.
        ClientDisconnect: the client left before the end.
    """
    announced = byte_count("Content-Length", headers.get("content-length", "0"))
    if announced > max_bytes:
        raise _too_large(f"{announced} bytes are announced", max_bytes)
    extension = scope.get("extensions", {}).get(READ_WHOLE)
    if announced and extension is not None and "transfer-encoding" not in headers:
        whole: Body = await extension["read"](announced)
        return whole
    message = await _next(receive)
    if not message.get("more_body", False):
        return _checked(message.get("body", b""), max_bytes)
    body = bytearray(message.get("body", b""))
    while message.get("more_body", False):
        message = await _next(receive)
        body += message.get("body", b"")
        _checked(body, max_bytes)
    return body


def byte_count(header: str, value: str) -> int:
    """The number in a header that counts bytes; one of absurd length counts as 10^18.

    Raises:
        MalformedBody: it is no number.
    """
    if not (value.isascii() and value.isdecimal()):
        raise MalformedBody(f"{header}: got {value[:32]!r}, want a number of bytes")
    return int(value) if len(value) <= _DIGITS_MAX else 10**_DIGITS_MAX


def inflate(body: Body, encoding: str, max_bytes: int) -> Body:
    """A gzip or deflate body, never further than the limit.

    Raises:
        MalformedBody: it is not of that encoding, or cut short. BodyTooLarge: it inflates to more than `max_bytes`.
    """
    inflater = zlib.decompressobj(_WINDOW_BITS[encoding])
    try:
        inflated = inflater.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise MalformedBody(f"body: not {encoding}: {error}") from error
    if len(inflated) > max_bytes:
        raise _too_large(f"more than {max_bytes} bytes inflate from it", max_bytes)
    if not inflater.eof or inflater.unused_data:
        raise MalformedBody(f"body: the {encoding} stream is cut short, or more stands behind it")
    return inflated


def deflate(chunks: Sequence[Chunk], encoding: str) -> bytes:
    """The chunks as one gzip or deflate body; the fastest level, since floats hardly shrink."""
    deflater = zlib.compressobj(level=1, wbits=_WINDOW_BITS[encoding])
    return b"".join([*(deflater.compress(chunk) for chunk in chunks), deflater.flush()])


async def _next(receive: Receive) -> Message:
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    return message


def _checked(body: Body, max_bytes: int) -> Body:
    if len(body) > max_bytes:
        raise _too_large(f"more than {max_bytes} bytes came", max_bytes)
    return body


def _too_large(what: str, max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"body: {what}, the limit is {max_bytes} (max_body_bytes)")
