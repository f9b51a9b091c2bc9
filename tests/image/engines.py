"""What builds and runs images here: docker or podman, or Debian's buildah in a chroot, which needs no registry.

buildah's base is made by debootstrap; what it runs has the network of this machine and a root that can be written.
"""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol, final

import psutil

from tests.served import ServerProcess, clean_environment

IMAGE: Final = "localhost/mha-service:cpu"
_ROOT: Final = Path(__file__).parents[2]
_BASE: Final = "localhost/mha-base:bookworm"
_PACKAGES: Final = "python3,python3-venv,ca-certificates"
# What Debian's slim images do without, too.
_SUPERFLUOUS: Final = ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale")
# Long enough to ask it how it is meanwhile.
_DRAIN: Final = "MHA_DRAIN_DELAY_S=2"
# As in the README.
RUN: Final = ("run", "--rm", "--init", "--read-only")
_PIP_KEYS: Final = ("index-url", "extra-index-url", "trusted-host", "cert")


class Container(Protocol):
    """A container that runs the image as it is meant to be run."""

    @property
    def server(self) -> ServerProcess:
        """What it runs: its log, and a client for it."""

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Runs a command in it."""

    def terminate(self) -> None:
        """Sends its main process the signal that the image names."""


class Engine(Protocol):
    """Builds the image, looks into it, and runs it."""

    def build(self) -> None:
        """Builds it as `make image` does."""

    def config(self) -> dict[str, Any]:
        """Its configuration, as Docker names its parts."""

    def size_bytes(self) -> int:
        """All its files, unpacked."""

    def running(self, port: int, models: Path, log: Path) -> Any:
        """A container with these models, listening on that port of this machine, until the context ends."""


def engine_of(name: str | None) -> Engine:
    """The engine of that name, or the first that works here.

    Raises:
        SystemExit: there is none.
    """
    if name in (None, "docker") and shutil.which("docker") and _works("docker", "info"):
        return Docker("docker")
    if name == "podman":
        return Docker("podman")
    if name in (None, "buildah") and os.getuid() == 0 and all(map(shutil.which, ("buildah", "podman", "debootstrap"))):
        return Buildah()
    raise SystemExit("want docker, or as root Debian's buildah, podman and debootstrap (apt-get install them)")


@final
class Docker:
    """docker, or podman, which takes the same words."""

    def __init__(self, name: str) -> None:
        self._name = name

    def build(self) -> None:
        """With its own idea of the base, from its registry."""
        _make_image(self._name, [])

    def config(self) -> dict[str, Any]:
        """By `inspect`."""
        config: dict[str, Any] = json.loads(_said(self._name, "image", "inspect", IMAGE))[0]["Config"]
        return config

    def size_bytes(self) -> int:
        """As it says."""
        return int(json.loads(_said(self._name, "image", "inspect", IMAGE))[0]["Size"])

    @contextmanager
    def running(self, port: int, models: Path, log: Path) -> Iterator["_DockerContainer"]:
        """With a root that cannot be written."""
        name = f"mha-test-{os.getpid()}"
        command = [
            self._name, *RUN, "--name", name, "--publish", f"127.0.0.1:{port}:8000",
            "--env", _DRAIN, "--volume", f"{models}:/models:ro", IMAGE,
        ]  # fmt: skip
        container = _DockerContainer(self._name, name, ServerProcess(command, clean_environment(), log))
        try:
            yield container
        finally:
            subprocess.run([self._name, "rm", "--force", name], capture_output=True, check=False)


@final
class _DockerContainer:
    def __init__(self, engine: str, name: str, server: ServerProcess) -> None:
        self.server = server
        self._engine = engine
        self._name = name

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return _ran(self._engine, "exec", self._name, *command)

    def terminate(self) -> None:
        subprocess.run([self._engine, "kill", "--signal", "TERM", self._name], check=True, capture_output=True)


@final
class Buildah:
    """Debian's buildah, as root, without isolation but a chroot."""

    _buildah: Final = ("buildah", "--storage-driver", "vfs")

    def build(self) -> None:
        """On a base from Debian; pip finds its packages as it does on this machine, by a file that does not stay."""
        if not _works(*self._buildah, "inspect", "--type", "image", _BASE):
            _import_base()
        with tempfile.TemporaryDirectory() as place:
            pip = Path(place) / "pip.conf"
            pip.write_text(_pip_configuration())
            mounts = [f"--volume={pip}:/etc/pip.conf:ro"]
            certificates = Path("/etc/ssl/certs/ca-certificates.crt")
            if certificates.exists():
                mounts.append(f"--volume={certificates}:{certificates}:ro")
            flags = [
                "--isolation=chroot",
                "--network=host",
                "--layers",
                "--format=docker",
                f"--build-arg=BASE={_BASE}",
                *mounts,
            ]
            _make_image(" ".join(self._buildah), flags)

    def config(self) -> dict[str, Any]:
        """By `inspect`."""
        said = json.loads(_said(*self._buildah, "inspect", "--type", "image", IMAGE))
        config: dict[str, Any] = said["Docker"]["config"]
        return config

    def size_bytes(self) -> int:
        """Counted."""
        with self._mounted() as (_, root):
            return sum(path.lstat().st_size for path in root.rglob("*") if path.is_file() and not path.is_symlink())

    @contextmanager
    def running(self, port: int, models: Path, log: Path) -> Iterator["_BuildahContainer"]:
        """With the image's user and environment; entry point and command are read from it, since buildah does not."""
        config = self.config()
        with self._mounted() as (name, _):
            command = [
                *self._buildah, "run", "--isolation", "chroot", "--network", "host", "--env", f"MHA_PORT={port}",
                "--env", _DRAIN, "--volume", f"{models}:/models:ro", name, "--", *config["Entrypoint"], *config["Cmd"],
            ]  # fmt: skip
            container = _BuildahContainer(self._buildah, name, port, ServerProcess(command, clean_environment(), log))
            try:
                yield container
            finally:
                if container.server.process.poll() is None:
                    container.terminate()
                    container.server.process.wait(30)

    @contextmanager
    def _mounted(self) -> Iterator[tuple[str, Path]]:
        name = _said(*self._buildah, "from", "--pull-never", IMAGE).strip()
        try:
            yield name, Path(_said(*self._buildah, "mount", name).strip())
        finally:
            subprocess.run([*self._buildah, "rm", name], check=True, capture_output=True)


@final
class _BuildahContainer:
    def __init__(self, buildah: Sequence[str], name: str, port: int, server: ServerProcess) -> None:
        self.server = server
        self._buildah = buildah
        self._name = name
        self._port = port

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        alike = ("run", "--isolation", "chroot", "--network", "host", "--env", f"MHA_PORT={self._port}", self._name)
        return _ran(*self._buildah, *alike, "--", *command)

    def terminate(self) -> None:
        # buildah passes no signals on: the service is the first process below it that is not buildah itself.
        below = psutil.Process(self.server.process.pid).children(recursive=True)
        next(process for process in below if "buildah" not in process.name()).terminate()


def _import_base() -> None:
    with tempfile.TemporaryDirectory() as place:
        root = Path(place) / "root"
        subprocess.run(["debootstrap", "--variant=minbase", f"--include={_PACKAGES}", "bookworm", root], check=True)
        for folder in _SUPERFLUOUS:
            shutil.rmtree(root / folder, ignore_errors=True)
        packed = Path(place) / "root.tar"
        subprocess.run(["tar", "--directory", root, "--create", "--file", packed, "."], check=True)
        subprocess.run(["podman", "--storage-driver", "vfs", "import", packed, _BASE], check=True)


def _pip_configuration() -> str:
    """This machine's own, as far as it says where packages are."""
    lines = _said("python3", "-m", "pip", "config", "list").splitlines()
    entries = dict(line.split("=", 1) for line in lines)
    wanted = {key: value.strip("'") for key in _PIP_KEYS if (value := entries.get(f"global.{key}"))}
    return "\n".join(["[global]", *(f"{key} = {value}" for key, value in wanted.items()), ""])


def _make_image(engine: str, flags: Sequence[str]) -> None:
    command = ["make", "image", f"ENGINE={engine}", f"IMAGE={IMAGE}", f"IMAGE_FLAGS={' '.join(flags)}"]
    if subprocess.run(command, cwd=_ROOT, check=False).returncode != 0:
        raise SystemExit("the image was not built")


def _works(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout


def _ran(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, check=False, text=True, timeout=60)
