"""What the processes of one server ask each other, and what each does when it is told something."""

import asyncio
from collections.abc import Callable
from typing import Any, Final

from service.http.state import ServerState
from service.processes.messages import COMMIT, DISCARD, DRAIN, END, PREPARE, RELOAD
from service.processes.sibling import Handlers

METRICS: Final = "metrics"
STATISTICS: Final = "statistics"


def load(name: str) -> dict[str, str]:
    """The change that loads a model."""
    return {"do": "load", "name": name}


def unload(name: str) -> dict[str, str]:
    """The change that unloads a model."""
    return {"do": "unload", "name": name}


def handlers(state: ServerState, drain: Callable[[], None], end: Callable[[], None]) -> Handlers:
    """The handlers of a process.

    Args:
        state: its own.
        drain: it is no longer ready.
        end: it ends at once.
    """

    async def metrics(_: Any) -> Any:
        return state.metrics.dump()

    async def statistics(_: Any) -> Any:
        return {_key(model.artifact.name, model.artifact.version): model.statistics.dump() for model in state.served()}

    async def prepare(change: Any) -> None:
        do = state.library.prepare_unload if change["do"] == "unload" else state.library.prepare_load
        await asyncio.to_thread(do, change["name"])

    async def commit(_: Any) -> None:
        state.library.commit()
        state.announce_models()

    async def discard(_: Any) -> None:
        state.library.discard()

    async def stop_being_ready(_: Any) -> None:
        drain()

    async def reload(_: Any) -> None:
        state.secrets.reload()

    async def stop(_: Any) -> None:
        end()

    return {
        METRICS: metrics, STATISTICS: statistics, PREPARE: prepare, COMMIT: commit, DISCARD: discard,
        DRAIN: stop_being_ready, RELOAD: reload, END: stop,
    }  # fmt: skip


async def statistics_elsewhere(state: ServerState) -> Callable[[str, int], list[Any]]:
    """What the other processes have counted, by a model's name and version."""
    answers = await state.siblings.ask(STATISTICS)
    return lambda name, version: [answer[key] for answer in answers if (key := _key(name, version)) in answer]


def _key(name: str, version: int) -> str:
    return f"{name}/{version}"
