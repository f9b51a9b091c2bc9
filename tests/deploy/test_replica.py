"""A replica without the server around it: what it is told by settings, what it serves, and what it says of itself."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load, save
from starlette.types import Message

from deploy.replica import AskOthers, Replica, settings_of
from model.attention import MultiHeadAttention
from service.artifact import Artifact
from service.engine import Engine
from service.errors import NotReady, StartupError
from service.library import EngineFactory
from tests.conftest import weights_of
from tests.fakes import PoisonedEngine, SlowEngine
from tests.oracle import multi_head_attention

QUERIES = np.random.default_rng(0).standard_normal((2, 5, 100), np.float32)
NAME = "attention"


@pytest.fixture
def stored(tmp_path: Path, seeds_repository: Path) -> Path:
    """A repository of a test's own with two versions of the seeds' layer."""
    for version in ("1", "2"):
        shutil.copytree(seeds_repository / NAME / "1", tmp_path / "models" / NAME / version)
    return tmp_path / "models"


async def nobody(_: str) -> list[Any]:
    """The other replicas, where there are none."""
    return []


def zeros(_: Artifact) -> Engine:
    """An engine that needs no warming up."""
    return SlowEngine()


def replica(
    models: Path, cpus: int = 1, others: AskOthers = nobody, engine: EngineFactory | None = zeros, **settings: str
) -> Replica:
    """A replica of that repository."""
    return Replica.start(settings_of({"MHA_MODELS": str(models), **settings}), cpus, others, engine)


def run(work: Callable[[httpx.AsyncClient], Awaitable[Any]], one: Replica) -> Any:
    """What becomes of `work`, with a client of the replica's application. A replica has one event loop, so once."""

    async def asking() -> Any:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(one.app), base_url="http://replica") as client:
            return await work(client)

    return asyncio.run(asking())


async def ask(client: httpx.AsyncClient) -> httpx.Response:
    """The answer to `QUERIES`."""
    headers = {"Content-Type": "application/vnd.safetensors"}
    return await client.post("/v1/attention", content=save({"queries": QUERIES}), headers=headers)


class TestSettings:
    @pytest.mark.parametrize(
        ("setting", "value", "want"),
        [
            ("MHA_TLS_CERTIFICATE", "some.pem", "the server around the replicas speaks TLS"),
            ("MHA_TLS_KEY", "some.pem", "the server around the replicas speaks TLS"),
            ("MHA_PROCESSES", "2", "a replica is one process, so have more"),
            ("MHA_WORKER", "2", "the nearest is MHA_WORKERS"),
        ],
        ids=["certificate", "key", "processes", "unknown"],
    )
    def test_that_a_replica_cannot_keep_stop_it(self, setting: str, value: str, want: str) -> None:
        """What would be set and not done is refused before anything starts."""
        with pytest.raises(StartupError, match=want):
            settings_of({setting: value})

    def test_name_the_repository_wherever_a_replica_runs(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """A relative folder is that of whoever deploys, since replicas have working directories of their own."""
        monkeypatch.chdir(tmp_path)
        assert settings_of({"MHA_MODELS": "some"}).models == tmp_path / "some"

    @pytest.mark.parametrize(("settings", "want"), [({}, 3), ({"MHA_WORKERS": "5"}, 5)], ids=["cpus", "set"])
    def test_follow_the_cpus_of_the_replica(self, stored: Path, settings: dict[str, str], want: int) -> None:
        """Engine calls at once are the CPUs that the replica was given, not the machine's, unless a setting says."""
        metrics = run(lambda client: client.get("/metrics"), replica(stored, 3, **settings)).text
        assert f"\nmha_workers {want}.0\n" in metrics


class TestReplica:
    def test_answers_as_the_oracle_does(self, stored: Path, seeds_layer: MultiHeadAttention) -> None:
        """With the newest version, from the start."""
        answer = run(ask, replica(stored, engine=None))
        want, _ = multi_head_attention(weights_of(seeds_layer), 5, QUERIES, QUERIES, QUERIES)
        assert answer.status_code == 200
        np.testing.assert_allclose(load(answer.content)["output"], want, rtol=0, atol=1e-5)

    def test_answers_in_bytes(self, stored: Path) -> None:
        """Also what is long: there are servers that pickle the messages of ASGI, and memoryviews cannot be."""
        sent: list[Message] = []
        body = save({"queries": np.ones((1, 61, 100), np.float32)})
        headers = [(b"content-type", b"application/vnd.safetensors"), (b"content-length", b"%d" % len(body))]
        scope = {
            "type": "http", "method": "POST", "path": "/v1/attention", "query_string": b"", "headers": headers,
        }  # fmt: skip

        async def receive() -> Message:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Message) -> None:
            sent.append(message)

        asyncio.run(replica(stored).app(scope, receive, send))
        start, *pieces = sent
        assert start["status"] == 200
        assert {type(piece["body"]) for piece in pieces} == {bytes}
        assert load(b"".join(piece["body"] for piece in pieces))["output"].shape == (1, 61, 100)

    def test_refuses_to_start_with_what_is_broken(self, stored: Path) -> None:
        """A replica that cannot serve is never counted as one."""
        (stored / NAME / "2" / "model.onnx").write_bytes(b"broken")
        with pytest.raises(StartupError, match=r"model\.onnx"):
            replica(stored)

    def test_serves_what_the_repository_holds_when_it_is_told(self, stored: Path, tmp_path: Path) -> None:
        """A version that has come is served and one that has gone is not, once the replica reads again."""
        (stored / NAME / "2").rename(tmp_path / "aside")
        one = replica(stored)

        async def versions(client: httpx.AsyncClient) -> list[str]:
            before = await ask(client)
            (tmp_path / "aside").rename(stored / NAME / "2")
            unread = await ask(client)
            await one.reread()
            after = await ask(client)
            (stored / NAME / "2").rename(tmp_path / "aside")
            await one.reread()
            return [answer.headers["mha-version"] for answer in (before, unread, after, await ask(client))]

        assert run(versions, one) == ["1", "1", "2", "1"]

    def test_unloads_a_name_that_has_gone(self, stored: Path) -> None:
        """The others are served as before."""
        shutil.copytree(stored / NAME, stored / "other")
        one = replica(stored)
        shutil.rmtree(stored / NAME)
        asyncio.run(one.reread())
        models = run(lambda client: client.get("/v1/models"), one).json()["models"]
        assert [model["name"] for model in models] == ["other"]

    @pytest.mark.parametrize("broken", ["graph", "repository"])
    def test_keeps_what_it_serves_if_the_new_is_broken(self, stored: Path, broken: str) -> None:
        """To fail would have the server around it replace one good replica after the other by none."""
        one = replica(stored)
        if broken == "graph":
            (stored / NAME / "2" / "model.onnx").write_bytes(b"broken")
        else:
            shutil.rmtree(stored)
        asyncio.run(one.reread())
        assert run(ask, one).headers["mha-version"] == "2"

    @pytest.mark.parametrize("what", ["load", "unload"])
    def test_does_not_change_alone(self, stored: Path, what: str) -> None:
        """A request reaches one replica of several, so what it would change is refused, and what to do is said."""
        answer = run(lambda client: client.post(f"/v2/repository/models/{NAME}/{what}"), replica(stored))
        assert answer.status_code == 403
        assert "user_config" in answer.json()["error"]

    def test_counts_for_the_others_too(self, stored: Path) -> None:
        """Whichever replica a scrape reaches, it shows the sum of all."""
        other = replica(stored)
        run(ask, other)

        async def ask_other(subject: str) -> list[Any]:
            return [await other.reply(subject)]

        metrics = run(lambda client: client.get("/metrics"), replica(stored, others=ask_other)).text
        (counted,) = (line for line in metrics.splitlines() if line.startswith("mha_requests_total"))
        assert counted.endswith(" 1.0")

    def test_is_unhealthy_once_its_device_computes_no_more(self, stored: Path) -> None:
        """Then only another replica can help; until then it is healthy."""
        one = replica(stored, engine=lambda _: PoisonedEngine())

        async def statuses(client: httpx.AsyncClient) -> list[int]:
            one.check_health()
            first = await ask(client)
            one.check_health()
            return [first.status_code, (await ask(client)).status_code]

        assert run(statuses, one) == [200, 500]
        with pytest.raises(NotReady, match="computes no more"):
            one.check_health()
