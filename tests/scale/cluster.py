"""A Ray cluster of nodes on this machine, each with an address of its own on loopback, and what runs on it."""

import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import httpx
import psutil
from ray.cluster_utils import Cluster

from tests.served import free_port

_ROOT: Final = Path(__file__).parents[2]
_LIMIT_S: Final = 120.0
_LOOK_S: Final = 0.2
_STORE_BYTES: Final = 80 * 2**20
_APP, _DEPLOYMENT = "mha", "Attention"
_VARIABLES: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # Ray's workers give way to every other process, the clients included
    # The proxy would send all to the replica on its own node for as long as that one takes them.
    "RAY_SERVE_PROXY_PREFER_LOCAL_NODE_ROUTING": "0",
}


@final
@dataclass(frozen=True)
class RunningReplica:
    """One that Ray counts as running."""

    pid: int
    node: str


@final
class Machines:
    """The nodes, and the service on them. What it starts is ended by `running`.

    Args:
        cluster: with one node.
        port: of Ray's proxy, which is on that node alone, so that the loss of another loses no client's connection.
        models: the repository.
    """

    def __init__(self, cluster: Any, port: int, models: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._cluster = cluster
        self._port = port
        self._models = models
        self._api = httpx.Client(base_url=f"http://{cluster.head_node.webui_url}/api/serve", timeout=_LIMIT_S)
        self._revision = 0

    def add_node(self) -> Any:
        """One more, with one CPU."""
        address = f"127.0.0.{len(self._cluster.list_all_nodes()) + 2}"
        return self._cluster.add_node(num_cpus=1, object_store_memory=_STORE_BYTES, node_ip_address=address)

    def lose(self, node: Any) -> None:
        """Ends a node as a power cut would."""
        self._cluster.remove_node(node, allow_graceful=False)

    async def deploy(self, least: int, most: int, *, reread: bool = False) -> None:
        """From so many to so many replicas; they read the repository again if they are told to. Waits for all of it."""
        self._revision += reread
        await asyncio.to_thread(self._put, least, most)
        await self.until(lambda: self._status() == "RUNNING", f"{least} to {most} replicas")

    async def until_running(self, count: int, without: int | None = None) -> None:
        """Waits for so many replicas, none of which has that pid."""

        def holds() -> bool:
            pids = [replica.pid for replica in self.replicas()]
            return len(pids) == count and without not in pids

        await self.until(holds, f"{count} replicas")

    async def until(self, holds: Callable[[], bool], what: str) -> None:
        """Waits for a condition, for as long as a machine with other work may need."""
        deadline = time.monotonic() + _LIMIT_S
        while not await asyncio.to_thread(holds):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {what} within {_LIMIT_S:.0f} s: {self._details()}")
            await asyncio.sleep(_LOOK_S)

    def replicas(self) -> list[RunningReplica]:
        """Those that Ray counts as running."""
        deployments = self._details().get("deployments", {})
        found = deployments.get(_DEPLOYMENT, {}).get("replicas", [])
        return [RunningReplica(one["pid"], one["node_ip"]) for one in found if one["state"] == "RUNNING"]

    def _status(self) -> str:
        return str(self._details().get("status"))

    def _details(self) -> dict[str, Any]:
        applications: dict[str, Any] = self._api.get("/applications/").raise_for_status().json()["applications"]
        return dict(applications.get(_APP, {}))

    def _put(self, least: int, most: int) -> None:
        self._api.put("/applications/", json=self._config(least, most)).raise_for_status()

    def _config(self, least: int, most: int) -> dict[str, Any]:
        """As deploy/ray_serve.yaml, quicker to see that there is work, and on loopback."""
        variables = {"MHA_MODELS": str(self._models), "PYTHONPATH": str(_ROOT)}
        scaling = {
            "min_replicas": least, "max_replicas": most, "target_ongoing_requests": 2,
            "upscale_delay_s": 1, "metrics_interval_s": 0.5, "look_back_period_s": 2,
        }  # fmt: skip
        deployment = {"name": _DEPLOYMENT, "autoscaling_config": scaling, "user_config": {"revision": self._revision}}
        application = {
            "name": _APP, "route_prefix": "/", "import_path": "deploy.ray_serve:app",
            "runtime_env": {"env_vars": variables}, "deployments": [deployment],
        }  # fmt: skip
        return {
            "proxy_location": "HeadOnly",
            "http_options": {"host": "127.0.0.1", "port": self._port},
            "applications": [application],
        }


@contextmanager
def running(folder: Path, models: Path) -> Iterator[Machines]:
    """One node with one CPU; whatever was started on it and on others is ended."""
    os.environ.update(_VARIABLES)
    # Ray starts programs of its own by name.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    before = set(psutil.Process().children(recursive=True))
    cluster = Cluster()
    started = set[psutil.Process]()
    try:
        # Not 127.0.0.1, for which Ray puts the address of the machine in the network, where nothing listens.
        cluster.add_node(
            num_cpus=1, object_store_memory=_STORE_BYTES, node_ip_address="127.0.0.2", include_dashboard=True,
            dashboard_host="127.0.0.1", dashboard_port=free_port(), temp_dir=str(folder),
        )  # fmt: skip
        yield Machines(cluster, free_port(), models)
    finally:
        started |= set(psutil.Process().children(recursive=True)) - before
        try:
            cluster.shutdown()
        finally:
            _end(started)


def _end(processes: set[psutil.Process]) -> None:
    """Those of them that are still there, a moment later."""
    _, alive = psutil.wait_procs(processes, timeout=10)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=10)
