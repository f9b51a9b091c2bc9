"""`python -m tests.image`: builds the image, runs it, posts tensors to it, and ends it."""

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, final

import click
import httpx
import numpy as np
from safetensors.numpy import load, save

from model.attention import seeded_layer
from tests.conftest import publish, weights_of
from tests.image.engines import Container, Engine, engine_of
from tests.oracle import multi_head_attention
from tests.served import free_port

_MOST_BYTES: Final = 350_000_000
_MOST_READY_S: Final = 3.0
_SAFETENSORS: Final = "application/vnd.safetensors"
# What the runtime must not hold: the tools that made the artefact, and what could make more.
_ABSENT: Final = ("torch", "onnx", "onnxscript", "pip")
_COMPILERS: Final = ("cc", "gcc", "g++", "clang", "ld")


@final
class Report:
    """What was looked at, and whether it was as it should be."""

    def __init__(self) -> None:
        self.failed = 0

    def check(self, what: str, *, holds: bool, got: object = "") -> None:
        """One thing."""
        self.failed += not holds
        click.echo(f"  {'ok  ' if holds else 'FAIL'} {what}{f': {got}' if got != '' else ''}")


def look_at(config: dict[str, Any], size_bytes: int, report: Report) -> None:
    """The image as it lies there."""
    report.check("size unpacked below 350 MB", holds=size_bytes < _MOST_BYTES, got=f"{size_bytes / 1e6:.0f} MB")
    report.check("user is not root", holds=config["User"].split(":")[0] not in ("", "0", "root"), got=config["User"])
    report.check("signal that ends it", holds=config.get("StopSignal") == "SIGTERM")
    report.check("health check", holds=config["Healthcheck"]["Test"] == ["CMD", "mha", "health"])
    labels = [f"org.opencontainers.image.{name}" for name in ("title", "description", "licenses")]
    report.check("labels", holds=all(config["Labels"].get(label) for label in labels))


def use(container: Container, url: str, started: float, report: Report) -> None:
    """The container as its clients see it."""
    ready_s = _seconds_until_ready(url, started)
    report.check("ready within 3 s", holds=ready_s <= _MOST_READY_S, got=f"{ready_s:.2f} s")
    layer = seeded_layer(100, 5, seed=0)
    queries = np.random.default_rng(0).standard_normal((2, 7, 100), np.float32)
    lengths = np.array([3, 7])
    want, _ = multi_head_attention(weights_of(layer), 5, queries, queries, queries, lengths)
    body = save({"queries": queries, "valid_lens": lengths})
    answer = httpx.post(f"{url}/v1/attention", content=body, headers={"Content-Type": _SAFETENSORS})
    right = answer.status_code == 200 and float(np.abs(load(answer.content)["output"] - want).max()) < 1e-5
    report.check("tensors are answered as the oracle does", holds=right, got=answer.status_code)
    for what in ("live", "ready", "startup"):
        asked = container.run("mha", "health", "--of", what)
        report.check(f"mha health --of {what}, inside", holds=asked.returncode == 0, got=asked.stdout.strip())
    found = container.run(
        "python3", "-c", f"import importlib.util as u; print([n for n in {_ABSENT} if u.find_spec(n)])"
    )
    report.check(f"none of {', '.join(_ABSENT)}", holds=found.stdout.strip() == "[]", got=found.stdout.strip())
    tools = container.run("sh", "-c", f"for tool in {' '.join(_COMPILERS)}; do command -v $tool; done; true")
    report.check("no compiler", holds=tools.stdout.strip() == "", got=tools.stdout.strip())
    who = container.run("python3", "-c", "import os; print(os.getuid())")
    report.check("runs as that user", holds=who.stdout.strip() == "10001", got=who.stdout.strip())
    settings = container.run("mha", "serve", "--print-settings")
    report.check("settings by MHA_*", holds="MHA_MODELS" in settings.stdout and settings.returncode == 0)


def end(container: Container, url: str, report: Report) -> None:
    """The container on its way out: what is on its way is answered, ready says no, and the exit status is 0."""
    with httpx.Client(base_url=url) as client:
        client.get("/health/live")
        container.terminate()
        time.sleep(0.3)
        report.check("not ready once it is told to end", holds=client.get("/health/ready").status_code == 503)
        report.check("alive until it has ended", holds=client.get("/health/live").status_code == 200)
        body = save({"queries": np.ones((1, 2, 100), np.float32)})
        late = client.post("/v1/attention", content=body, headers={"Content-Type": _SAFETENSORS})
        report.check("who still comes is answered", holds=late.status_code == 200, got=late.status_code)
    status = container.server.process.wait(30)
    report.check("exit status 0", holds=status == 0, got=status)
    lines = container.server.log_path.read_text().splitlines()
    strange = [line for line in lines if not _is_event(line)]
    report.check("its output is JSON lines", holds=bool(lines) and not strange, got=strange[:3] or len(lines))


def _is_event(line: str) -> bool:
    try:
        return "event" in json.loads(line)
    except ValueError:
        return False


def _seconds_until_ready(url: str, started: float) -> float:
    while time.monotonic() < started + 30:
        try:
            if httpx.get(f"{url}/health/ready").status_code == 200:
                break
        except httpx.TransportError:
            pass
        time.sleep(0.02)
    return time.monotonic() - started


@contextmanager
def _container(engine: Engine, folder: Path) -> Iterator[tuple[Container, str]]:
    publish(seeded_layer(100, 5, seed=0), folder / "models", "attention", 1)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    port = free_port()
    with engine.running(port, folder / "models", folder / "log") as container:
        yield container, f"http://127.0.0.1:{port}"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--engine", type=click.Choice(["docker", "podman", "buildah"]), help="By default what works here.")
@click.option("--build/--no-build", default=True, show_default=True, help="Build the image first.")
def main(engine: str | None, build: bool) -> None:
    """Builds the image for real, runs it, posts tensors to it, and ends it."""
    chosen, report = engine_of(engine), Report()
    if build:
        chosen.build()
    click.echo("the image")
    look_at(chosen.config(), chosen.size_bytes(), report)
    with tempfile.TemporaryDirectory() as place, _container(chosen, Path(place)) as (container, url):
        click.echo("in use")
        use(container, url, container.server.started_at, report)
        click.echo("its end")
        end(container, url, report)
    if report.failed:
        sys.exit(f"{report.failed} not as they should be")


if __name__ == "__main__":
    main()
