"""Artefacts made once, and servers of them, shared by all tests."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from export.artifact import Destination
from export.parity import CaseResult
from export.pipeline import export_layer
from model.attention import MultiHeadAttention, seeded_layer
from tests.served import ServerProcess, serving


class Silent:
    """A progress that says nothing."""

    def step(self, what: str) -> None:
        """A step begins."""

    def case(self, result: CaseResult) -> None:
        """A case was measured."""


def publish(layer: MultiHeadAttention, repository: Path, name: str, version: int = 1) -> None:
    """Exports a layer through the whole gate."""
    export_layer(layer, {"kind": "test"}, Destination(repository, name, version, force=False), Silent())


def weights_of(layer: MultiHeadAttention) -> dict[str, np.ndarray]:
    """The layer's parameters by name, for the oracle."""
    return {name: tensor.detach().numpy() for name, tensor in layer.state_dict().items()}


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread() -> None:
    # Two cores are shared with the servers under test.
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def seeds_layer() -> MultiHeadAttention:
    """The layer of the seeds' example: 100 hiddens, 5 heads, no bias."""
    return seeded_layer(100, 5, seed=0)


@pytest.fixture(scope="session")
def odd_layer() -> MultiHeadAttention:
    """A layer with a bias in which no two sizes are equal: 3 heads of 7, inputs of 11, 13 and 17."""
    return seeded_layer(21, 3, seed=1, bias=True, query_size=11, key_size=13, value_size=17)


@pytest.fixture(scope="session")
def additive_layer() -> MultiHeadAttention:
    """A layer with additive scoring: 2 heads of 5, inputs of 10."""
    return seeded_layer(10, 2, seed=2, scoring="additive")


@pytest.fixture(scope="session")
def seeds_repository(tmp_path_factory: pytest.TempPathFactory, seeds_layer: MultiHeadAttention) -> Path:
    """A repository that holds the seeds' layer alone, as `attention/1`."""
    repository = tmp_path_factory.mktemp("seeds")
    publish(seeds_layer, repository, "attention")
    return repository


@pytest.fixture(scope="session")
def repository(
    tmp_path_factory: pytest.TempPathFactory,
    seeds_repository: Path,
    odd_layer: MultiHeadAttention,
    additive_layer: MultiHeadAttention,
) -> Path:
    """A repository of three models: `attention` (the seeds'), `odd` and `additive`."""
    folder = tmp_path_factory.mktemp("repository")
    (folder / "attention").symlink_to(seeds_repository / "attention")
    publish(odd_layer, folder, "odd")
    publish(additive_layer, folder, "additive")
    return folder


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Iterator[ServerProcess]:
    """A real server of the three models."""
    with serving(tmp_path_factory.mktemp("server") / "log", "--models", str(repository)) as process:
        yield process


@pytest.fixture(scope="session")
def lone_server(tmp_path_factory: pytest.TempPathFactory, seeds_repository: Path) -> Iterator[ServerProcess]:
    """A server of the example layer alone, as `make serve` starts it."""
    with serving(tmp_path_factory.mktemp("lone") / "log", "--models", str(seeds_repository)) as process:
        yield process


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two self-signed certificates for localhost, with their keys."""
    folder = tmp_path_factory.mktemp("certificates")
    for name in ("one", "two"):
        made = (
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
            "-keyout", f"{name}.key", "-out", f"{name}.pem", "-days", "2", "-subj", f"/CN={name}",
            "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
        )  # fmt: skip
        subprocess.run(made, cwd=folder, check=True, capture_output=True)
    protected = ("openssl", "ec", "-in", "one.key", "-aes128", "-passout", "pass:secret", "-out", "protected.key")
    subprocess.run(protected, cwd=folder, check=True, capture_output=True)
    return folder
