"""What parent and children say to each other: one JSON object a line, over a pair of connected sockets.

child to parent     {"ask": 7, "subject": "metrics", "content": null}       wants the other children's answers
parent to children  {"tell": 9, "subject": "metrics", "content": null}
child to parent     {"reply": 9, "content": ...} or {"reply": 9, "error": {"code": ..., "message": ...}}
parent to child     {"answer": 7, "content": [...]} or {"answer": 7, "error": ...}
child to parent     {"note": "ready", "content": ...}                       wants no answer
"""

from collections.abc import Mapping
from typing import Any, Final

import orjson

from service.errors import Internal, InvalidArtifact, ModelNotFound, NotReady, ServiceError

Message = Mapping[str, Any]
CHANGE: Final = "change"
"""The subject of a question that changes what is served, everywhere or nowhere. Children are told `prepare`, with the
same content, and then `commit` or `discard`."""
PREPARE: Final = "prepare"
COMMIT: Final = "commit"
DISCARD: Final = "discard"
DRAIN: Final = "drain"
RELOAD: Final = "reload"
END: Final = "end"
READY: Final = "ready"

_BY_CODE: Final = {error.code: error for error in (InvalidArtifact, ModelNotFound, NotReady)}


def line(message: Message) -> bytes:
    """A message as it is sent."""
    return orjson.dumps(message) + b"\n"


def parse(sent: bytes | bytearray) -> dict[str, Any]:
    """A message as it was sent."""
    message: dict[str, Any] = orjson.loads(sent)
    return message


def error_content(error: ServiceError) -> dict[str, str]:
    """An error, to be raised again at the other end."""
    return {"code": error.code, "message": str(error)}


def error_of(content: Mapping[str, str]) -> ServiceError:
    """The error that was sent."""
    return _BY_CODE.get(content["code"], Internal)(content["message"])
