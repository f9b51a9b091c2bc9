"""A server's life as a process: how it starts, what stops it from starting, and how it ends."""

import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import save

from tests.e2e.test_body_limits import connected, head, reply
from tests.served import ServerProcess, clean_environment, serving, serving_fake

BODY = {"queries": [[[0.5] * 100]]}
GOOD = save({"queries": np.ones((1, 2, 100), np.float32)})


def failed_start(*flags: str, **settings: str) -> str:
    """What a server that does not start says; it must end with 1."""
    run = subprocess.run(
        [sys.executable, "-m", "mha", "serve", *flags], env=clean_environment(**settings),
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert run.returncode == 1, run.stdout + run.stderr
    assert "Traceback" not in run.stderr
    return run.stderr


def accepts(server: ServerProcess) -> bool:
    """Whether one can connect."""
    try:
        connected(server).close()
    except ConnectionRefusedError:
        return False
    return True


class TestStart:
    def test_environment_and_flags(self, tmp_path: Path, seeds_repository: Path) -> None:
        """Settings come from the environment, flags win, and the effective ones are what the server does."""
        with serving(tmp_path / "log", MHA_MODELS=str(seeds_repository), MHA_MAX_BODY_BYTES="1000") as server:
            (model,) = server.client.get("/v1/models").json()["models"]
            assert model["limits"]["max_body_bytes"] == 1000
            assert server.client.post("/v1/attention", json={"queries": [[[0.5] * 1000]]}).status_code == 413

    def test_ipv6(self, tmp_path: Path, seeds_repository: Path) -> None:
        """An IPv6 address can be listened on."""
        with serving(tmp_path / "log", "--models", str(seeds_repository), "--host", "::1") as server:
            assert server.url.startswith("http://[::1]:")
            assert server.client.get("/health/live").status_code == 200

    def test_port_is_taken(self, seeds_repository: Path) -> None:
        """A taken port is named, with what to do."""
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            says = failed_start("--models", str(seeds_repository), "--port", str(port))
        assert f"cannot listen on 127.0.0.1 port {port}: Address already in use" in says

    def test_no_models(self, tmp_path: Path) -> None:
        """A repository that is not there, or empty, says how to export a model."""
        assert "No such file or directory; export one with: mha export" in failed_start(
            "--models", str(tmp_path / "no")
        )
        assert "holds no artefact; export one with: mha export" in failed_start("--models", str(tmp_path))

    def test_damaged_artefact(self, tmp_path: Path, seeds_repository: Path) -> None:
        """A graph whose digest differs stops the start-up."""
        folder = Path(shutil.copytree(seeds_repository / "attention" / "1", tmp_path / "attention" / "1"))
        damaged = bytearray((folder / "model.onnx").read_bytes())
        damaged[len(damaged) // 2] ^= 1
        (folder / "model.onnx").write_bytes(damaged)
        assert "sha256 is" in failed_start("--models", str(tmp_path))

    def test_cuda_that_is_not_there(self, seeds_repository: Path) -> None:
        """CUDA that was asked for and is missing stops the start-up and says what is missing."""
        says = failed_start("--models", str(seeds_repository), "--device", "cuda")
        assert "device: cuda was asked for, but" in says
        assert any(part in says for part in ("wheel:", "driver:", "library:"))

    def test_auto_says_why(self, tmp_path: Path, seeds_repository: Path) -> None:
        """The log names the device that auto took, and the reason."""
        with serving(tmp_path / "log", "--models", str(seeds_repository)) as server:
            ready = server.wait_for_event("ready")
        assert ready["device"] in ("cpu", "cuda")
        assert ready["reason"]

    def test_typo_in_the_environment(self) -> None:
        """A variable that is no setting stops the start-up with the nearest one."""
        assert "MHA_MODLS: no such setting; the nearest is MHA_MODELS" in failed_start(MHA_MODLS="x")


class TestEnd:
    def test_idle_server_ends_at_once(self, tmp_path: Path, seeds_repository: Path) -> None:
        """SIGTERM ends a server with exit status 0, kept-alive connections or not."""
        with serving(tmp_path / "log", "--models", str(seeds_repository)) as server:
            assert server.client.post("/v1/attention", json=BODY).status_code == 200
            assert server.stop() == 0

    @pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
    def test_accepted_requests_are_answered(self, tmp_path: Path, seeds_repository: Path, sig: signal.Signals) -> None:
        """What is being computed and what waits when the signal comes is answered."""
        flags = ("--models", str(seeds_repository), "--workers", "1")
        with (
            serving_fake(tmp_path / "log", "slow", *flags) as server,
            httpx.Client(base_url=server.url, timeout=30) as client,
            ThreadPoolExecutor(3) as pool,
        ):
            asked = [pool.submit(client.post, "/v1/attention", json=BODY) for _ in range(3)]
            server.wait_until_in_flight(3)
            assert server.stop(sig) == 0
            assert [answer.result().status_code for answer in asked] == [200, 200, 200]

    @pytest.mark.parametrize("processes", ["1", "2"])
    @pytest.mark.parametrize("begun", [0, 20], ids=["silent", "in_the_head"])
    def test_connection_that_was_there_before_may_ask(
        self, tmp_path: Path, seeds_repository: Path, processes: str, begun: int
    ) -> None:
        """A client that connected in time is answered, though its request comes when nobody can connect any more."""
        flags = ("--models", str(seeds_repository), "--processes", processes, "--drain-delay-s", "0.2")
        request = head(f"Content-Length: {len(GOOD)}") + GOOD
        with serving(tmp_path / "log", *flags) as server, connected(server) as connection:
            connection.sendall(request[:begun])
            time.sleep(0.1)
            server.process.terminate()
            while accepts(server):
                time.sleep(0.01)
            time.sleep(0.2)
            connection.sendall(request[begun:])
            answer = reply(connection)
            assert (answer.status_code, answer.headers["connection"]) == (200, "close")
            assert connection.recv(1) == b""
            assert server.process.wait(10) == 0

    def test_connection_that_never_asks_is_not_waited_for(self, tmp_path: Path, seeds_repository: Path) -> None:
        """A second later the server has ended."""
        flags = ("--models", str(seeds_repository), "--drain-delay-s", "0")
        with serving(tmp_path / "log", *flags) as server, connected(server):
            time.sleep(0.1)
            server.process.terminate()
            assert server.process.wait(5) == 0

    def test_second_signal_ends_it_now(self, tmp_path: Path, seeds_repository: Path) -> None:
        """A second signal does not wait for the drain delay."""
        with serving(tmp_path / "log", "--models", str(seeds_repository), "--drain-delay-s", "600") as server:
            server.process.send_signal(signal.SIGTERM)
            assert server.client.get("/health/live").status_code == 200
            assert server.stop(signal.SIGTERM) == 0
