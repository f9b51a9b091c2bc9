"""Every setting, once: its name, type, default and meaning. Flags, environment, docs and checks follow from it.

`max_body_bytes` is the flag `--max-body-bytes` and the environment variable `MHA_MAX_BODY_BYTES`; a flag wins.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from service.errors import StartupError

PREFIX: Final = "MHA_"


@final
class Settings(BaseModel):
    """The effective settings of a server."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    models: Path = Field(Path("models"), description="Model repository: a folder of <name>/<version>/.")
    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 for every interface.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where to compute. auto takes cuda if all of it is there, and says why."
    )
    tf32: Literal["off", "on"] = Field(
        "off", description="Whether a GPU may multiply in TF32: faster, and three decimal digits instead of seven."
    )
    processes: int = Field(
        0,
        ge=0,
        description="Server processes among which connections are dealt out; 0 means one for each engine call at once, "
        "at most 4, and 1 with a GPU or outside Linux.",
    )
    workers: int = Field(
        0,
        ge=0,
        description="Engine calls at once, over all processes; 0 means the CPUs the container grants, "
        "and 2 with a GPU.",
    )
    threads_per_call: int = Field(
        0, ge=0, description="CPU threads of one engine call; 0 means 1, and every CPU for a call that runs alone."
    )
    max_queue_ms: int = Field(
        2_000,
        ge=0,
        description="Longest that a request is likely to wait for a worker; beyond it the answer is 429.",
    )
    max_queue_bytes: int = Field(
        1024 * 1024 * 1024,
        ge=1,
        description="Most bytes of bodies and answers held at once, over all processes; beyond it the answer is 429.",
    )
    workspace_bytes: int = Field(
        128 * 1024 * 1024, ge=1, description="Most memory that the scores of one engine call may take."
    )
    max_body_bytes: int = Field(
        64 * 1024 * 1024, ge=1, description="Longest request body; beyond it the answer is 413."
    )
    max_answer_bytes: int = Field(
        256 * 1024 * 1024, ge=1, description="Longest answer, as float32; a request for more is refused with 413."
    )
    max_connections: int = Field(
        1_000,
        ge=1,
        description="Connections open at once, over all processes; the next is answered with 429 and closed.",
    )
    max_head_bytes: int = Field(
        32 * 1024, ge=256, description="Longest line and headers of a request; beyond it the answer is 400."
    )
    head_timeout_s: float = Field(
        10.0, gt=0, allow_inf_nan=False, description="Seconds in which a request's line and headers have to come."
    )
    min_body_rate: int = Field(
        64 * 1024, ge=0, description="Bytes a second at which a body has to come, else 408; 0 for no limit."
    )
    keep_alive_s: int = Field(75, ge=0, description="Seconds after an answer until an idle connection is closed.")
    timeout_ms: int = Field(
        30_000,
        ge=1,
        description="Longest time a request may take from its arrival; also the most that ?timeout_ms= may ask.",
    )
    drain_delay_s: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="After SIGTERM, seconds in which connections are still accepted while ready says no.",
    )
    drain_timeout_s: float = Field(
        30.0, ge=0, allow_inf_nan=False, description="After the drain delay, seconds for accepted requests to finish."
    )
    api_keys_file: Path | None = Field(
        None, description="File of `name:sha256` or `name:sha256:infer,repository` lines; if set, a key is needed."
    )
    tls_certificate: Path | None = Field(
        None, description="PEM file with the certificate, and those that lead to a root; with tls_key, serves HTTPS."
    )
    tls_key: Path | None = Field(None, description="PEM file with the certificate's private key.")
    cors_origins: str | None = Field(
        None, description="Origins whose pages may use the API in a browser, separated by commas; * is every one."
    )
    traces: Literal["off", "otlp"] = Field(
        "off", description="otlp sends a span for each request to where OTEL_EXPORTER_OTLP_ENDPOINT says."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least level that is logged.")
    log_format: Literal["auto", "json", "console"] = Field(
        "auto", description="auto is console on a terminal, json elsewhere."
    )


Origin = Literal["flag", "environment", "default"]


@final
@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """Settings, and where each value came from."""

    settings: Settings
    origins: Mapping[str, Origin]


def environment_name(setting: str) -> str:
    """`max_body_bytes` as `MHA_MAX_BODY_BYTES`."""
    return PREFIX + setting.upper()


def flag_name(setting: str) -> str:
    """`max_body_bytes` as `--max-body-bytes`."""
    return "--" + setting.replace("_", "-")


def load_settings(flags: Mapping[str, Any], environment: Mapping[str, str]) -> LoadedSettings:
    """Flags over environment over defaults.

    Args:
        flags: by setting, without those not given.
        environment: usually `os.environ`.

    Raises:
        StartupError: an `MHA_*` variable is no setting (the nearest is named), or a value does not fit.
    """
    known = {environment_name(setting): setting for setting in Settings.model_fields}
    for name in environment:
        if name.startswith(PREFIX) and name not in known:
            near = difflib.get_close_matches(name.upper(), known, n=1, cutoff=0.0)
            raise StartupError(f"{name}: no such setting; the nearest is {near[0]} (all: mha serve --print-settings)")
    # An empty variable is as good as none: compose files pass those that are not set as empty.
    from_environment = {setting: environment[name] for name, setting in known.items() if environment.get(name)}
    try:
        settings = Settings.model_validate({**from_environment, **flags})
    except ValidationError as error:
        raise StartupError(_complaint(error, flags)) from error
    return LoadedSettings(settings, {setting: _origin(setting, flags, from_environment) for setting in known.values()})


def _origin(setting: str, flags: Mapping[str, Any], from_environment: Mapping[str, str]) -> Origin:
    if setting in flags:
        return "flag"
    return "environment" if setting in from_environment else "default"


def _complaint(error: ValidationError, flags: Mapping[str, Any]) -> str:
    first = error.errors()[0]
    setting = str(first["loc"][0])
    name = flag_name(setting) if setting in flags else environment_name(setting)
    return f"{name}: got {first['input']!r}: {first['msg']}"
