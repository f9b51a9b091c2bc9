"""Reading a request's body, never further than the limit, and its compression."""

import asyncio
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope

from service.admission import Held
from service.codec import Body, Chunk
from service.errors import BodyTooLarge, MalformedBody
from service.http.extensions import READ_WHOLE
from service.http.streams import Pace

_DIGITS_MAX: Final = 18
# zlib's own codes: 31 is gzip, 15 the zlib container that HTTP calls deflate.
_WINDOW_BITS: Final[Mapping[str, int]] = {"gzip": 31, "deflate": 15}
ENCODINGS: Final = tuple(_WINDOW_BITS)


@final
@dataclass(frozen=True, slots=True)
class BodyLimits:
    """How long a body may be, in bytes, and at how many bytes a second it has to come (0 for no limit)."""

    max_bytes: int
    min_rate: int


async def read_body(scope: Scope, headers: Headers, receive: Receive, limits: BodyLimits, held: Held) -> Body:
    """The whole body, without a copy where its length was announced. What is too long is refused before a byte is read.

    Raises:
        Overloaded: others hold too many bytes.
        BodyTooLarge: it announces, or turns out to have, too many itself.
        TooSlow: it does not come fast enough.
        MalformedBody: Content-Length is no number.
        ClientDisconnect: the client left before the end.
    """
    announced = byte_count("Content-Length", headers.get("content-length", "0"))
    if announced > limits.max_bytes:
        raise _too_large(f"{announced} bytes are announced", limits.max_bytes)
    held.grow_to(announced)
    extension = scope.get("extensions", {}).get(READ_WHOLE)
    if announced and extension is not None and "transfer-encoding" not in headers:
        whole: Body = await extension["read"](announced)
        return whole
    message = await _next(receive)
    if not message.get("more_body", False):
        return _checked(message.get("body", b""), limits.max_bytes)
    return await _read_on(bytearray(message.get("body", b"")), receive, limits, held)


async def _read_on(body: bytearray, receive: Receive, limits: BodyLimits, held: Held) -> bytearray:
    """A body that comes in pieces, to its end."""
    loop, pace = asyncio.get_running_loop(), Pace(limits.min_rate)
    look_at = loop.time() + pace.window_s
    more = True
    while more:
        if loop.time() >= look_at:
            pace.check(len(body))
            look_at = loop.time() + pace.window_s
        try:
            async with asyncio.timeout_at(look_at):
                message = await _next(receive)
        except TimeoutError:
            continue
        body += message.get("body", b"")
        more = message.get("more_body", False)
        held.grow_to(len(_checked(body, limits.max_bytes)))
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
