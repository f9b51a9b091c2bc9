"""The one table from error codes to statuses, and the one error body.

Every answer that is not 2xx, on every route and also for unknown paths and crashes, is made here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NoReturn, final

import orjson
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request

from service.errors import (
    AnswerTooLarge,
    BodyTooLarge,
    DeadlineExceeded,
    Draining,
    EmptyAxis,
    EngineFailure,
    Forbidden,
    Internal,
    InvalidArtifact,
    InvalidDtype,
    InvalidParameter,
    InvalidShape,
    InvalidValidLens,
    MalformedBody,
    MethodNotAllowed,
    ModelNotFound,
    NonFinite,
    NotAcceptable,
    NotFound,
    NotReady,
    Overflow,
    Overloaded,
    ServiceError,
    TooSlow,
    Unauthorized,
    UnsupportedMediaType,
)

STATUS: Final[Mapping[str, int]] = {
    MalformedBody.code: 400,
    InvalidParameter.code: 400,
    Unauthorized.code: 401,
    Forbidden.code: 403,
    NotFound.code: 404,
    ModelNotFound.code: 404,
    InvalidArtifact.code: 422,
    MethodNotAllowed.code: 405,
    NotAcceptable.code: 406,
    TooSlow.code: 408,
    BodyTooLarge.code: 413,
    AnswerTooLarge.code: 413,
    UnsupportedMediaType.code: 415,
    InvalidShape.code: 422,
    InvalidDtype.code: 422,
    InvalidValidLens.code: 422,
    NonFinite.code: 422,
    Overflow.code: 422,
    EmptyAxis.code: 422,
    Overloaded.code: 429,
    EngineFailure.code: 500,
    Internal.code: 500,
    NotReady.code: 503,
    Draining.code: 503,
    DeadlineExceeded.code: 504,
}


@final
@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """What a request that failed is answered.

    Attributes:
        status: by the table.
        headers: lower-case, `content-length` and the request's id among them.
        body: JSON.
        closes: whether the connection has to end, because the rest of the request is not waited for.
    """

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    closes: bool


def error_answer(error: ServiceError, request_id: str) -> ErrorAnswer:
    """The answer to a request that failed."""
    body = orjson.dumps({"error": str(error), "code": error.code, "request_id": request_id})
    headers = (
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        *_headers(error),
        (b"x-request-id", request_id.encode()),
    )
    return ErrorAnswer(STATUS[error.code], headers, body, closes=isinstance(error, TooSlow))


def from_http_exception(request: Request, error: Exception) -> NoReturn:
    """Raises Starlette's own 404 or 405 as ours, for the boundary to answer."""
    if not isinstance(error, HTTPException):
        raise error
    where = f"{request.method} {request.url.path[:256]}"
    if error.status_code == 405:
        allowed = sorted((error.headers or {}).get("Allow", "").split(", "))
        raise MethodNotAllowed(f"{where}: want {', '.join(allowed)}", allowed)
    raise NotFound(f"{where}: no such route; GET /docs lists them")


def from_validation_error(_: Request, error: Exception) -> NoReturn:
    """Raises FastAPI's complaint about a parameter as ours, for the boundary to answer."""
    if not isinstance(error, RequestValidationError):
        raise error
    first = error.errors()[0]
    raise InvalidParameter(f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}")


def _headers(error: ServiceError) -> tuple[tuple[bytes, bytes], ...]:
    if isinstance(error, Overloaded):
        return ((b"retry-after", b"%d" % error.retry_after_s),)
    if isinstance(error, Unauthorized):
        return ((b"www-authenticate", b"Bearer"),)
    if isinstance(error, MethodNotAllowed):
        return ((b"allow", ", ".join(error.allowed).encode()),)
    return ()
