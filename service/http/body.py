"""Reading a request's body, never further than the limit."""

from typing import Final

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

from service.codec import Body
from service.errors import BodyTooLarge, MalformedBody

_DIGITS_MAX: Final = 18


async def read_body(headers: Headers, receive: Receive, max_bytes: int) -> Body:
    """The whole body. One that announces too much is refused before a byte is read.

    Raises:
        BodyTooLarge: it announces, or turns out to have, more than `max_bytes`.
        MalformedBody: Content-Length is no number.
        ClientDisconnect: the client left before the end.
    """
    announced = headers.get("content-length", "0")
    if not (announced.isascii() and announced.isdecimal()):
        raise MalformedBody(f"Content-Length: got {announced[:32]!r}, want a number of bytes")
    if len(announced) > _DIGITS_MAX or int(announced) > max_bytes:
        raise _too_large(f"{announced[:32]} bytes are announced", max_bytes)
    message = await _next(receive)
    if not message.get("more_body", False):
        return _checked(message.get("body", b""), max_bytes)
    body = bytearray(message.get("body", b""))
    while message.get("more_body", False):
        message = await _next(receive)
        body += message.get("body", b"")
        _checked(body, max_bytes)
    return body


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
