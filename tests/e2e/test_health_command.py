"""`mha health`, which a container's health check runs: it finds the server by the settings, and its status says all."""

import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.served import ServerProcess, clean_environment, serving


def health(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """The command, run in an environment with these settings."""
    command = [sys.executable, "-m", "mha", "health", *arguments]
    environment = clean_environment(**settings)
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("what", ["live", "ready", "startup"])
def test_of_a_server_that_is_well(server: ServerProcess, what: str) -> None:
    """Each of the three questions is answered with 0."""
    asked = health("--url", server.url, "--of", what)
    assert (asked.returncode, asked.stderr) == (0, "")
    assert "true" in asked.stdout


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])  # noqa: S104  # nothing listens there
def test_finds_the_server_by_its_settings(server: ServerProcess, host: str) -> None:
    """Without an address it asks this machine at the settings' port, also where the server listens everywhere."""
    port = str(urlsplit(server.url).port)
    assert health(MHA_PORT=port, MHA_HOST=host).returncode == 0


def test_over_tls(tmp_path: Path, certificates: Path, seeds_repository: Path) -> None:
    """With a certificate in the settings it asks over TLS, whatever name the certificate is made out to."""
    settings = {"MHA_TLS_CERTIFICATE": str(certificates / "one.pem"), "MHA_TLS_KEY": str(certificates / "one.key")}
    with serving(tmp_path / "log", "--models", str(seeds_repository), **settings) as server:
        assert health(MHA_PORT=str(urlsplit(server.url).port), **settings).returncode == 0


def test_of_a_server_that_is_not_ready(tmp_path: Path, seeds_repository: Path) -> None:
    """A refusal is 1, with the server's own reason."""
    with serving(tmp_path / "log", "--models", str(seeds_repository), "--drain-delay-s", "5") as server:
        url = server.url
        server.process.terminate()
        time.sleep(0.5)
        asked = health("--url", url, "--of", "ready")
        assert asked.returncode == 1
        assert asked.stderr.startswith("Error: ready: 503 ")
        assert "draining" in asked.stderr
        assert health("--url", url).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "settings", "says"),
    [
        pytest.param([], {"MHA_PORT": "1"}, "refused", id="nobody"),
        pytest.param(["--url", "nonsense"], {}, "unknown url type", id="no_url"),
        pytest.param(["--of", "mind"], {}, "'mind' is not one of", id="no_question"),
        pytest.param([], {"MHA_PORT": "one"}, "MHA_PORT: got 'one'", id="no_port"),
    ],
)
def test_of_nobody(arguments: list[str], settings: dict[str, str], says: str) -> None:
    """Where there is nobody to ask, or nothing to ask, it says why."""
    asked = health(*arguments, **settings)
    assert asked.returncode != 0
    assert says in asked.stderr
    assert "Traceback" not in asked.stderr
