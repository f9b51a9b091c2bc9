"""Every way a request or a start-up can fail, drawn on the arrows of the data flow.

    HTTP request -> route        NotFound MethodNotAllowed Unauthorized Forbidden ModelNotFound InvalidParameter
      -> codec chosen            UnsupportedMediaType NotAcceptable
      -> body read               BodyTooLarge TooSlow
      -> Codec.decode            MalformedBody (InvalidShape InvalidDtype where a format can say so)
      -> AttentionInputs.parse   MalformedBody InvalidShape InvalidDtype InvalidValidLens NonFinite EmptyAxis
      -> Admission               Overloaded AnswerTooLarge
      -> Scheduler.submit        NotReady Draining Overloaded DeadlineExceeded
      -> Engine.run              EngineFailure
      -> AttentionOutput         Overflow
      -> Codec.encode
      (anything unforeseen)      Internal

    load -> repository, artefact, engine                    ModelNotFound InvalidArtifact
    mha serve -> settings, device, repository, artefacts    StartupError (ArtifactError)

`code` is stable and part of the API; HTTP numbers live in `service.http.errors` alone. Imports nothing of the project.
"""

from collections.abc import Sequence
from typing import ClassVar


class ServiceError(Exception):
    """A request that gets no answer. The message says what, where, got, want, and is shown to the client."""

    code: ClassVar[str] = "internal"


class MalformedBody(ServiceError):
    """The bytes are not what their media type says, or a field is missing, unknown or of the wrong kind."""

    code = "malformed_body"


class InvalidParameter(ServiceError):
    """A query parameter is unknown or has a value that means nothing."""

    code = "invalid_parameter"


class Unauthorized(ServiceError):
    """Keys are required, and the request carries none or a wrong one."""

    code = "unauthorized"


class Forbidden(ServiceError):
    """The key is known, and not good for this."""

    code = "forbidden"


class NotFound(ServiceError):
    """No route has this path."""

    code = "not_found"


class ModelNotFound(ServiceError):
    """No model of this name and version is served."""

    code = "model_not_found"


class MethodNotAllowed(ServiceError):
    """The path exists, for other methods, which `allowed` lists."""

    code = "method_not_allowed"

    def __init__(self, message: str, allowed: Sequence[str]) -> None:
        super().__init__(message)
        self.allowed = allowed


class InvalidArtifact(ServiceError):
    """A model cannot be loaded as it lies in the repository; what was served before still is."""

    code = "invalid_artifact"


class NotAcceptable(ServiceError):
    """No media type of the Accept header can be produced."""

    code = "not_acceptable"


class BodyTooLarge(ServiceError):
    """The body is longer than the server takes."""

    code = "body_too_large"


class TooSlow(ServiceError):
    """The client takes too long to send its request."""

    code = "too_slow"


class AnswerTooLarge(ServiceError):
    """The answer would be longer than the server gives."""

    code = "answer_too_large"


class UnsupportedMediaType(ServiceError):
    """No codec reads this Content-Type or Content-Encoding."""

    code = "unsupported_media_type"


class InvalidShape(ServiceError):
    """A tensor has the wrong rank or an axis of the wrong size, or its rows have different lengths."""

    code = "invalid_shape"


class InvalidDtype(ServiceError):
    """A tensor holds elements of a type that has no meaning there."""

    code = "invalid_dtype"


class InvalidValidLens(ServiceError):
    """A valid length is below 0 or beyond the number of keys."""

    code = "invalid_valid_lens"


class NonFinite(ServiceError):
    """A value that would be used is nan or infinite in float32."""

    code = "non_finite"


class Overflow(ServiceError):
    """The result does not fit its dtype."""

    code = "overflow"


class EmptyAxis(ServiceError):
    """An axis has size 0."""

    code = "empty_axis"


class Overloaded(ServiceError):
    """The queue is full. `retry_after_s` is when a place is likely to be free."""

    code = "overloaded"

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NotReady(ServiceError):
    """Models are still being loaded."""

    code = "not_ready"


class Draining(ServiceError):
    """The server is about to end and wants no new work."""

    code = "draining"


class DeadlineExceeded(ServiceError):
    """The request's time ran out before it was computed."""

    code = "deadline_exceeded"


class EngineFailure(ServiceError):
    """The runtime failed on a valid request."""

    code = "engine_failure"


class Internal(ServiceError):
    """A defect of the service; the message is opaque on purpose."""

    code = "internal"


class StartupError(Exception):
    """The server cannot start. The message names the setting, file or library, and what to do."""


class ArtifactError(StartupError):
    """An artefact or repository cannot be read, is not whole, or is refused by the runtime."""
