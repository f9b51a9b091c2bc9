"""What is said about a model, and the words it is said in. Read by people, clients and load testers."""

from typing import Any, Final, final

from pydantic import BaseModel, Field

from service.artifact import Calibration, Layer
from service.catalog import ServedModel
from service.engine.device import Device
from service.settings import Settings


@final
class ErrorBody(BaseModel):
    """The body of every answer that is not 2xx."""

    error: str = Field(description="What, where, got, want.", examples=["keys: last axis is 96, the model expects 128"])
    code: str = Field(description="Stable slug, for programs.", examples=["invalid_shape"])
    request_id: str = Field(description="Also in the X-Request-Id header and in the server's log.")


@final
class ParityView(BaseModel):
    """What the export's gate measured against torch and a float64 oracle."""

    limit: float
    max_error: float
    cases: int


@final
class Limits(BaseModel):
    """What the server takes."""

    max_body_bytes: int
    max_answer_bytes: int
    max_connections: int
    max_head_bytes: int
    head_timeout_s: float
    min_body_rate: int
    keep_alive_s: int
    timeout_ms: int
    max_queue_ms: int
    max_queue_bytes: int
    workspace_bytes: int


@final
class ModelView(BaseModel):
    """One version of a model."""

    name: str
    version: int
    layer: Layer
    precision: str
    calibration: Calibration
    digest: str = Field(description="sha256 of model.onnx.")
    device: str
    parity: ParityView
    limits: Limits
    media_types: list[str]


@final
class ModelList(BaseModel):
    """The newest version of every model, which is the one that answers when no version is named."""

    models: list[ModelView]


@final
class ModelVersions(BaseModel):
    """Every version of one model, ascending; the last is the default."""

    name: str
    versions: list[ModelView]


NOT_YET: Final[dict[int | str, dict[str, Any]]] = {503: {"model": ErrorBody, "description": "not_ready, draining"}}
MEDIA_TYPES: Final = ("application/json", "application/vnd.safetensors", "application/x-npz")


def model_view(model: ServedModel, device: Device, settings: Settings) -> ModelView:
    """One served model as the API shows it."""
    manifest = model.artifact.manifest
    return ModelView(
        name=model.artifact.name,
        version=model.artifact.version,
        layer=manifest.layer,
        precision=manifest.precision,
        calibration=manifest.calibration,
        digest=model.artifact.digest,
        device=device.name,
        parity=ParityView(
            limit=manifest.parity.limit, max_error=manifest.parity.max_error, cases=len(manifest.parity.cases)
        ),
        limits=Limits(**{name: getattr(settings, name) for name in Limits.model_fields}),
        media_types=list(MEDIA_TYPES),
    )
