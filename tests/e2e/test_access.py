"""Who is let in, and how: keys and their scopes, TLS, pages from elsewhere; and what SIGHUP changes."""

import hashlib
import shutil
import signal
import ssl
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import load, save

from model.attention import MultiHeadAttention
from tests.conftest import weights_of
from tests.e2e.test_bad_input import check_refused
from tests.oracle import multi_head_attention
from tests.served import ServerProcess, clean_environment, serving

GOOD = {"queries": [[[0.5] * 100]]}
INFER, LOAD = "/v1/attention?model=attention", "/v2/repository/models/attention/load"
PROCESSES = pytest.mark.parametrize("processes", ["1", "2"])


def line(name: str, key: str, scopes: str = "") -> str:
    """A line of the keys' file."""
    return f"{name}:{hashlib.sha256(key.encode()).hexdigest()}{scopes}\n"


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    """Whether something comes to hold."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if holds():
            return True
        time.sleep(0.02)
    return False


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory, seeds_repository: Path) -> Iterator[ServerProcess]:
    """A server with a key for each purpose."""
    folder = tmp_path_factory.mktemp("scopes")
    keys = [line("user", "u"), line("operator", "o", ":repository"), line("both", "b", ":infer,repository")]
    (folder / "keys").write_text("".join(keys))
    flags = ("--models", str(seeds_repository), "--api-keys-file", str(folder / "keys"))
    with serving(folder / "log", *flags) as server:
        yield server


class TestScopes:
    @pytest.mark.parametrize(
        ("key", "path", "allowed"),
        [
            ("u", INFER, True), ("u", LOAD, False), ("u", "/v2/repository/index", False),
            ("o", INFER, False), ("o", LOAD, True), ("o", "/v2/models/attention/infer", False),
            ("b", INFER, True), ("b", LOAD, True),
        ],
    )  # fmt: skip
    def test_each_key_is_good_for_its_own(self, keyed: ServerProcess, key: str, path: str, allowed: bool) -> None:
        """A key without a scope gets 403, with the scope that is missing; one with it gets an answer."""
        body = GOOD if path == INFER else {}
        response = keyed.client.post(path, json=body, headers={"X-API-Key": key})
        if allowed:
            assert response.status_code == 200, response.text
        else:
            scope = "repository" if "repository" in path else "infer"
            check_refused(response, (403, "forbidden"), f"it wants the scope '{scope}'")


class TestKeysFile:
    @pytest.mark.parametrize(
        ("text", "complaint"),
        [
            ("", "holds no key"),
            ("a:xyz\n", "line 1: want name:sha256"),
            (line("a", "k", ":admin"), "line 1: want name:sha256"),
            (line("a", "k", ":"), "line 1: want name:sha256"),
            (line("a", "k") + line("a", "other"), "line 2: there is a key named 'a' already"),
        ],
        ids=["empty", "no_digest", "no_such_scope", "empty_scope", "twice"],
    )
    def test_that_is_none_stops_the_start(
        self, tmp_path: Path, seeds_repository: Path, text: str, complaint: str
    ) -> None:
        """The message has the line, and never the digest of a key."""
        (tmp_path / "keys").write_text(text)
        log = tmp_path / "log"
        flags = ["--models", str(seeds_repository), "--api-keys-file", str(tmp_path / "keys"), "--port", "0"]
        server = ServerProcess([*_command(), *flags], clean_environment(), log)
        assert server.process.wait(30) == 1
        assert complaint in log.read_text()
        assert hashlib.sha256(b"k").hexdigest() not in log.read_text()
        server.stop()


class TestReload:
    @PROCESSES
    def test_keys(self, tmp_path: Path, seeds_repository: Path, processes: str) -> None:
        """SIGHUP takes the file as it is now, in every process; a broken one changes nothing and is logged."""
        keys = tmp_path / "keys"
        keys.write_text(line("old", "old"))
        flags = ("--models", str(seeds_repository), "--api-keys-file", str(keys), "--processes", processes)
        with serving(tmp_path / "log", *flags) as server:

            def status(key: str) -> int:
                return httpx.post(server.url + INFER, json=GOOD, headers={"X-API-Key": key}).status_code

            assert (status("old"), status("new")) == (200, 401)
            keys.write_text(line("new", "new"))
            assert (status("old"), status("new")) == (200, 401)
            server.process.send_signal(signal.SIGHUP)
            assert within(10, lambda: {status("new") for _ in range(8)} == {200})
            assert {status("old") for _ in range(8)} == {401}
            keys.write_text("nonsense\n")
            server.process.send_signal(signal.SIGHUP)
            failed = server.wait_for_event("not reloaded")
            assert failed["what"] == "API keys"
            assert "line 1" in failed["reason"]
            assert status("new") == 200

    @PROCESSES
    def test_with_nothing_to_reload_it_goes_on(self, tmp_path: Path, seeds_repository: Path, processes: str) -> None:
        """A terminal that hangs up ends nothing."""
        with serving(tmp_path / "log", "--models", str(seeds_repository), "--processes", processes) as server:
            for member in server.members():
                member.send_signal(signal.SIGHUP)
            time.sleep(0.3)
            assert httpx.post(server.url + INFER, json=GOOD).status_code == 200


class TestTls:
    @PROCESSES
    def test_serves_tensors_of_every_size(
        self, tmp_path: Path, certificates: Path, seeds_repository: Path, seeds_layer: MultiHeadAttention,
        processes: str,
    ) -> None:  # fmt: skip
        """Over HTTPS, with the certificate checked, answers are the oracle's, also of bodies in many pieces."""
        files = ("--tls-certificate", str(certificates / "one.pem"), "--tls-key", str(certificates / "one.key"))
        with serving(tmp_path / "log", "--models", str(seeds_repository), "--processes", processes, *files) as server:
            assert server.url.startswith("https://")
            trusted = ssl.create_default_context(cafile=certificates / "one.pem")
            with httpx.Client(base_url=server.url, verify=trusted, timeout=60) as client:
                for num_tokens in (1, 3, 900):
                    queries = np.random.default_rng(num_tokens).standard_normal((2, num_tokens, 100), np.float32)
                    answer = client.post(
                        INFER, content=save({"queries": queries}),
                        headers={"Content-Type": "application/vnd.safetensors"},
                    )  # fmt: skip
                    output, _ = multi_head_attention(
                        weights_of(seeds_layer), seeds_layer.num_heads, queries, queries, queries
                    )
                    got = load(answer.content)["output"]
                    np.testing.assert_allclose(got, output, rtol=0, atol=1e-5 * np.abs(output).max())
            plain = server.url.replace("https", "http")
            with pytest.raises(httpx.TransportError):
                httpx.get(plain + "/health/live")

    def test_certificate_is_renewed(self, tmp_path: Path, certificates: Path, seeds_repository: Path) -> None:
        """After SIGHUP new connections get the new certificate; a pair that does not fit changes nothing."""
        pem, key = tmp_path / "pem", tmp_path / "key"
        shutil.copy(certificates / "one.pem", pem)
        shutil.copy(certificates / "one.key", key)
        flags = ("--models", str(seeds_repository), "--tls-certificate", str(pem), "--tls-key", str(key))
        with serving(tmp_path / "log", *flags) as server:
            port = int(server.url.rpartition(":")[2])

            def shown() -> str:
                return ssl.get_server_certificate(("127.0.0.1", port))

            one, two = ((certificates / f"{name}.pem").read_text() for name in ("one", "two"))
            assert shown().split() == one.split()
            shutil.copy(certificates / "two.pem", pem)
            server.process.send_signal(signal.SIGHUP)
            assert server.wait_for_event("not reloaded")["what"] == "certificate"
            assert shown().split() == one.split()
            shutil.copy(certificates / "two.key", key)
            server.process.send_signal(signal.SIGHUP)
            assert within(10, lambda: all(shown().split() == two.split() for _ in range(8)))

    @pytest.mark.parametrize(
        ("files", "complaint"),
        [
            ({"--tls-certificate": "one.pem"}, "tls_key: TLS wants a certificate and its key"),
            ({"--tls-key": "one.key"}, "tls_certificate: TLS wants a certificate and its key"),
            ({"--tls-certificate": "none.pem", "--tls-key": "one.key"}, "none.pem: No such file or directory"),
            ({"--tls-certificate": "one.pem", "--tls-key": "two.key"}, "cannot be used: KEY_VALUES_MISMATCH"),
            ({"--tls-certificate": "one.key", "--tls-key": "one.key"}, "cannot be used: "),
            ({"--tls-certificate": "one.pem", "--tls-key": "protected.key"}, "the key wants a pass phrase"),
        ],
        ids=["no_key", "no_certificate", "missing_file", "two_pairs", "no_pem", "pass_phrase"],
    )
    def test_files_that_do_not_do_stop_the_start(
        self, tmp_path: Path, certificates: Path, seeds_repository: Path, files: dict[str, str], complaint: str
    ) -> None:
        """The message names the setting or the file, and nobody is asked for a pass phrase."""
        log = tmp_path / "log"
        flags = [text for flag, name in files.items() for text in (flag, str(certificates / name))]
        command = [*_command(), "--models", str(seeds_repository), "--port", "0", *flags]
        server = ServerProcess(command, clean_environment(), log)
        assert server.process.wait(30) == 1
        assert complaint in log.read_text()
        server.stop()


class TestCors:
    def test_is_off_unless_set(self, server: ServerProcess) -> None:
        """No answer says that a page from elsewhere may read it."""
        answer = server.client.get("/v1/models", headers={"Origin": "https://example.org"})
        assert not [name for name in answer.headers if name.startswith("access-control")]

    def test_of_named_origins(self, tmp_path: Path, seeds_repository: Path) -> None:
        """Pages of a named origin may ask and read, errors and inference included; those of others may not."""
        flags = ("--models", str(seeds_repository), "--cors-origins", "https://one.example, https://two.example")
        with serving(tmp_path / "log", *flags) as server:
            ours, others = {"Origin": "https://two.example"}, {"Origin": "https://three.example"}
            for answer in (
                server.client.get("/v1/models", headers=ours),
                server.client.post(INFER, json=GOOD, headers=ours),
                server.client.post(INFER, json={}, headers=ours),
                server.client.get("/nowhere", headers=ours),
            ):
                assert answer.headers["access-control-allow-origin"] == "https://two.example"
                assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
            assert "access-control-allow-origin" not in server.client.get("/v1/models", headers=others).headers
            asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "X-API-Key"}
            preflight = server.client.options(INFER, headers={**ours, **asked})
            assert preflight.status_code == 200
            assert "x-api-key" in preflight.headers["access-control-allow-headers"].lower()
            assert server.client.options(INFER, headers={**others, **asked}).status_code == 400


def _command() -> list[str]:
    return [sys.executable, "-m", "mha", "serve", "--log-format", "json"]
