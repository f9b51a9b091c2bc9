"""`mha serve`, `mha health` and `mha inspect`."""

import json
import os
import ssl
from http.client import HTTPException
from pathlib import Path
from typing import Any, Literal, get_args, get_origin
from urllib.error import HTTPError
from urllib.request import urlopen

import click
from pydantic.fields import FieldInfo

from service.artifact import Artifact, Calibration, read_artifact
from service.errors import StartupError
from service.repository import Repository
from service.settings import LoadedSettings, Settings, environment_name, flag_name, load_settings


def _options(command: click.Command) -> click.Command:
    """Adds a flag for every setting, from the settings' own table."""
    for setting, field in Settings.model_fields.items():
        command.params.append(_option(setting, field))
    return command


def _option(setting: str, field: FieldInfo) -> click.Option:
    default = "" if field.default is None else f"  [default: {field.default}]"
    return click.Option(
        [flag_name(setting)],
        type=_click_type(field.annotation),
        help=f"{field.description}{default}",
    )


def _click_type(annotation: Any) -> Any:
    if get_origin(annotation) is Literal:
        return click.Choice(get_args(annotation))
    return {int: click.INT, float: click.FLOAT}.get(annotation, click.STRING)


@_options
@click.command("serve")
@click.option("--print-settings", is_flag=True, help="Show the effective settings and where each comes from, and end.")
@click.pass_context
def serve(context: click.Context, /, print_settings: bool, **flags: Any) -> None:
    """Serve every artefact of a model repository over HTTP.

    Each flag is also an environment variable: --max-body-bytes is MHA_MAX_BODY_BYTES. A flag wins.
    """
    try:
        loaded = load_settings({name: value for name, value in flags.items() if value is not None}, os.environ)
        if print_settings:
            _print_settings(loaded)
            return
        ended_well = _serve(loaded.settings)
    except StartupError as error:
        raise click.ClickException(str(error)) from error
    context.exit(0 if ended_well else 1)


def _serve(settings: Settings) -> bool:
    from service.start import start  # noqa: PLC0415  # the server's imports cost a second that --help need not pay

    return start(settings)


def _print_settings(loaded: LoadedSettings) -> None:
    width = max(map(len, loaded.origins))
    for setting, origin in loaded.origins.items():
        value = getattr(loaded.settings, setting)
        click.echo(
            f"{setting:{width}}  {'' if value is None else value!s:12}  {origin:11}  {environment_name(setting)}"
        )


@click.command("health")
@click.option(
    "--url", help="Of the server.  [default: what the MHA_* settings of this environment say, on this machine]"
)
@click.option(
    "--of",
    "what",
    type=click.Choice(["live", "ready", "startup"]),
    default="live",
    help="What to ask for.  [default: live]",
)
@click.option("--timeout-s", default=2.0, type=click.FloatRange(0.1), help="How long to wait.  [default: 2]")
def health(url: str | None, what: str, timeout_s: float) -> None:
    """Ask a server how it is; the exit status is 0 if it is well, and 1 if not.

    For a container's health check, which finds the port and TLS in the same settings as the server.
    """
    try:
        base = url or _own_url(load_settings({}, os.environ).settings)
        answer = urlopen(f"{base.rstrip('/')}/health/{what}", timeout=timeout_s, context=_any_certificate())  # noqa: S310
    except StartupError as error:
        raise click.ClickException(str(error)) from error
    except HTTPError as error:
        raise click.ClickException(f"{what}: {error.code} {error.read(1000).decode(errors='replace')}") from error
    except (OSError, HTTPException, ValueError) as error:
        raise click.ClickException(f"{what}: {error}") from error
    click.echo(answer.read(1000))


def _own_url(settings: Settings) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)  # noqa: S104
    scheme = "http" if settings.tls_certificate is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{settings.port}"


def _any_certificate() -> ssl.SSLContext:
    # It is made out to the name that clients use; nothing is sent but the question.
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


@click.command("inspect")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the whole manifest as JSON.")
def inspect(folder: Path, as_json: bool) -> None:
    """Show what an artefact holds: sizes, heads, axes, parity, digest, operators.

    FOLDER is a version (models/attention/1), or a model's folder, whose newest version is shown. Every file's digest
    is checked. Needs neither torch nor onnx nor a server.
    """
    try:
        artifact = _find(folder)
    except StartupError as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps(artifact.manifest.model_dump(), indent=2))
        return
    rows = _rows(artifact)
    width = max(len(key) for key, _ in rows)
    for key, value in rows:
        click.echo(f"{key:{width}}  {value}")


def _calibration(calibration: Calibration) -> str:
    source = ", ".join(f"{key} {value}" for key, value in calibration.source.items())
    errors = f"largest error {calibration.max_error:.1e} of the largest output, mean {calibration.mean_error:.1e}"
    return f"{errors}, limit {calibration.limit:.0e}; {source}"


def _find(folder: Path) -> Artifact:
    folder = folder.resolve()
    if (folder / "manifest.json").exists() or folder.name.isdecimal():
        version = int(folder.name) if folder.name.isdecimal() else 0
        return read_artifact(folder, folder.parent.name, version)
    versions = Repository(folder.parent).versions().get(folder.name, [])
    if not versions:
        raise StartupError(f"{folder}: holds no artefact; want a folder like models/attention/1")
    return Repository(folder.parent).read(folder.name, versions[-1])


def _rows(artifact: Artifact) -> list[tuple[str, str]]:
    manifest, layer = artifact.manifest, artifact.layer
    parity = manifest.parity
    sizes = f"{layer.num_hiddens} hiddens, {layer.num_heads} heads of {layer.head_size}"
    rows = [
        ("model", f"{artifact.name}, version {artifact.version}"),
        ("layer", f"{sizes}, {layer.scoring}, {'bias' if layer.bias else 'no bias'}"),
        ("precision", manifest.precision),
        ("calibration", _calibration(manifest.calibration)),
        ("source", ", ".join(f"{key} {value}" for key, value in manifest.source.items())),
        ("parity", f"{len(parity.cases)} cases, largest error {parity.max_error:.1e}, limit {parity.limit:.0e}"),
        ("opset", str(manifest.opset)),
    ]
    for side, tensors in (("input", manifest.signature.inputs), ("output", manifest.signature.outputs)):
        rows += [(side, f"{tensor.name} {tensor.datatype} ({', '.join(map(str, tensor.axes))})") for tensor in tensors]
    for lowering in manifest.lowerings:
        operators = ", ".join(f"{name} {count}" for name, count in lowering.operators.items())
        rows.append((lowering.file, f"{lowering.size_bytes:,} bytes, sha256 {lowering.sha256} (checked)"))
        rows.append(("", operators))
    rows.append(("tools", ", ".join(f"{tool} {version}" for tool, version in manifest.tools.items())))
    return rows
