"""One replica of the service inside a server that is not ours: the application without sockets, signals or processes.

Connections, TLS, how many replicas there are, and when each of them starts and ends is that server's business. Must not
import it, so that all of this is tested without.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, NoReturn, Self, final

import structlog
from starlette.types import ASGIApp

from service.engine.device import choose_device, missing_for_cuda
from service.errors import ArtifactError, Forbidden, ServiceError, StartupError
from service.http.app import create_app
from service.http.secrets import Secrets
from service.http.siblings import handlers, load, unload
from service.http.state import ServerState
from service.library import EngineFactory, Library
from service.processes.sibling import NoSiblings
from service.repository import Repository
from service.settings import Settings, load_settings
from service.start import check_installed, engines, server_state

AskOthers = Callable[[str], Awaitable[list[Any]]]
"""From a subject to what the other replicas reply; one that does not reply is left out."""

_log: Final = structlog.get_logger(__name__)


def settings_of(environment: Mapping[str, str]) -> Settings:
    """The settings of every replica, from the `MHA_*` variables that `mha serve` has, too.

    Raises:
        StartupError: see `load_settings`, or one asks for what only the server around the replicas can do.
    """
    settings = load_settings({}, environment).settings
    if settings.tls_certificate is not None or settings.tls_key is not None:
        # Whoever sets these and gets plain HTTP sends keys in the open.
        raise StartupError("MHA_TLS_CERTIFICATE: got a file, want none: the server around the replicas speaks TLS")
    if settings.processes > 1:
        raise StartupError(f"MHA_PROCESSES: got {settings.processes}, want 1: a replica is one process, so have more")
    # Replicas have working directories of their own.
    return settings.model_copy(update={"models": settings.models.absolute()})


@final
class Replica:
    """A loaded model repository and the application in front of it.

    Args:
        state: of the application, before it has siblings.
        repository: what is to be served.
        ask_others: asks the other replicas, for what is known of all of them together.
    """

    def __init__(self, state: ServerState, repository: Repository, ask_others: AskOthers) -> None:
        self._state = state
        self._repository = repository
        self._handlers = handlers(state, drain=_nothing, end=_nothing)
        self._alone = NoSiblings(self._handlers)
        state.siblings = _Others(self._alone, ask_others)
        self.app: ASGIApp = create_app(state, load=_nothing, give_up=_nothing)

    @classmethod
    def start(
        cls, settings: Settings, cpus: int, ask_others: AskOthers, make_engine: EngineFactory | None = None
    ) -> Self:
        """Loads all models, so that a replica that cannot serve is never counted as one.

        Args:
            settings: of every replica.
            cpus: that this one was given, which is less than what it could use where several share a machine.
            ask_others: see the class.
            make_engine: the engine of an artefact; None means ONNX Runtime.

        Raises:
            StartupError: something is wrong with the settings, the device or the repository.
        """
        check_installed(settings)
        device = choose_device(settings.device, missing_for_cuda)
        if device.name == "cpu" and not settings.workers:
            settings = settings.model_copy(update={"workers": cpus})
        repository = Repository(settings.models)
        library = Library(repository, make_engine or engines(device, settings, cpus))
        library.start(repository.read_all())
        return cls(server_state(settings, device, library, Secrets.read(settings)), repository, ask_others)

    async def reread(self) -> None:
        """Serves what the repository holds now, and reads the API keys again.

        A model that cannot be loaded is served as before, and the log says why.
        """
        self._state.secrets.reload()
        try:
            stored = await asyncio.to_thread(self._repository.versions)
        except ArtifactError as error:
            _log.error("not read again", reason=str(error))
            return
        gone = [name for name in self._state.served().names() if name not in stored]
        for change in (*map(load, stored), *map(unload, gone)):
            try:
                await self._alone.change(change)
            except ServiceError as error:
                _log.error("not changed", **change, reason=str(error))
        _log.info("read again", models=self._state.names())

    def check_health(self) -> None:
        """Refuses where this replica had better be replaced: its device or a call of its engine is stuck for good.

        Raises:
            NotReady: it is.
        """
        self._state.check_ready()

    async def reply(self, subject: str) -> Any:
        """What this replica says when another asks."""
        return await self._handlers[subject](None)


@final
class _Others:
    """The other replicas, as the routes of this one see them: they may be asked, and are not changed from here."""

    started = True
    all_ready = True

    def __init__(self, alone: NoSiblings, ask_others: AskOthers) -> None:
        self._alone = alone
        self._ask_others = ask_others

    async def open(self) -> None:
        await self._alone.open()

    def note_ready(self, content: Any) -> None:
        self._alone.note_ready(content)

    def note_unready(self) -> None:
        self._alone.note_unready()

    async def ask(self, subject: str) -> list[Any]:
        return await self._ask_others(subject)

    async def change(self, content: Any) -> NoReturn:
        # One that starts a moment later would read the repository, and know nothing of it.
        raise Forbidden(
            f"{content['do']} {content['name']}: models are changed in all replicas together: change what the "
            "repository holds, then the deployment's user_config"
        )


def _nothing() -> None:
    """Starts and ends are somebody else's."""
