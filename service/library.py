"""What of the repository is served: loading, unloading and reloading while requests run.

A change builds the new engines first and then replaces the catalog by one assignment. A request holds its model, so one
version answers it from start to end, and an old engine goes when its last request has.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from service.artifact import Artifact
from service.catalog import Catalog, ServedModel
from service.engine import Engine
from service.errors import ArtifactError, InvalidArtifact, ModelNotFound, NotReady
from service.repository import Repository

EngineFactory = Callable[[Artifact], Engine]


@final
@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One version in the repository, whether it is served, and why not."""

    name: str
    version: int
    ready: bool
    reason: str


@final
@dataclass(frozen=True, slots=True)
class _Change:
    """What will be served, and why the name will not be if it is taken out."""

    name: str
    catalog: Catalog
    reason: str | None


@final
class Library:
    """A repository and the models loaded from it; reading needs no lock.

    A change is prepared and then committed or discarded, so that several processes can make it all or none. Whoever
    prepares one sees to it that no other is.
    """

    def __init__(self, repository: Repository, make_engine: EngineFactory) -> None:
        self._repository = repository
        self._make_engine = make_engine
        self._changing = threading.Lock()
        self._catalog: Catalog | None = None
        self._prepared: _Change | None = None
        self._reasons: dict[str, str] = {}

    @property
    def is_loaded(self) -> bool:
        """Whether the first loading is over."""
        return self._catalog is not None

    def catalog(self) -> Catalog:
        """What is served now.

        Raises:
            NotReady: models are still being loaded.
        """
        if self._catalog is None:
            raise NotReady("models are still being loaded; GET /health/ready says when they are")
        return self._catalog

    def start(self, artifacts: list[Artifact]) -> None:
        """Loads the models that a server starts with.

        Raises:
            ArtifactError: the runtime refuses one of them.
        """
        with self._changing:
            self._catalog = Catalog(ServedModel(artifact, self._make_engine(artifact)) for artifact in artifacts)

    def prepare_load(self, name: str) -> None:
        """Gets ready to serve every version of a name that the repository holds now: `commit` does it.

        Versions that have not changed are kept.

        Raises:
            ModelNotFound: the repository has no such name.
            InvalidArtifact: a version is not whole, or the runtime refuses it.
        """
        with self._changing:
            catalog = self.catalog()
            versions = self._stored().get(name)
            if versions is None:
                raise ModelNotFound(f"model {name[:64]!r} is not in the repository")
            try:
                models = [self._load(catalog, self._repository.read(name, version)) for version in versions]
            except ArtifactError as error:
                reason = self._repository.relative(str(error))
                self._reasons[name] = reason
                raise InvalidArtifact(f"model {name!r} was not loaded: {reason}") from error
            self._prepared = _Change(name, catalog.replacing(name, models), None)

    def prepare_unload(self, name: str) -> None:
        """Gets ready to serve no version of a name: `commit` does it, and requests that run are answered.

        Raises:
            ModelNotFound: no such name is served.
        """
        with self._changing:
            catalog = self.catalog()
            catalog.versions(name)
            self._prepared = _Change(name, catalog.replacing(name, []), "unloaded")

    def commit(self) -> None:
        """Serves what was prepared last."""
        with self._changing:
            change, self._prepared = self._prepared, None
            if change is None:
                return
            self._catalog = change.catalog
            if change.reason is None:
                self._reasons.pop(change.name, None)
            else:
                self._reasons[change.name] = change.reason

    def discard(self) -> None:
        """Forgets what was prepared; what was served before still is."""
        with self._changing:
            self._prepared = None

    def index(self) -> list[IndexEntry]:
        """Every version in the repository or served, by name and version.

        Raises:
            InvalidArtifact: the repository cannot be read.
        """
        catalog = self.catalog()
        served = {(name, model.artifact.version) for name in catalog.names() for model in catalog.versions(name)}
        stored = {(name, version) for name, versions in self._stored().items() for version in versions}
        return [
            IndexEntry(*entry, ready=entry in served, reason="" if entry in served else self._reason(entry[0]))
            for entry in sorted(served | stored)
        ]

    def _stored(self) -> dict[str, list[int]]:
        try:
            return self._repository.versions()
        except ArtifactError as error:
            raise InvalidArtifact("the repository cannot be read; what is loaded is still served") from error

    def _load(self, catalog: Catalog, artifact: Artifact) -> ServedModel:
        served = catalog.get(artifact.name, artifact.version)
        if served is not None and served.artifact.manifest == artifact.manifest:
            return served
        return ServedModel(artifact, self._make_engine(artifact))

    def _reason(self, name: str) -> str:
        return self._reasons.get(name, "not loaded")
