"""The models being served, each with the engine that computes it; immutable, so a swap is one assignment."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import final

from service.artifact import Artifact
from service.engine import Engine
from service.errors import ModelNotFound
from service.statistics import ModelStatistics


@final
@dataclass(frozen=True, slots=True)
class ServedModel:
    """An artefact, its engine, and what they have done so far."""

    artifact: Artifact
    engine: Engine
    statistics: ModelStatistics = field(default_factory=ModelStatistics)


@final
class Catalog:
    """Served models by name and version."""

    def __init__(self, models: Iterable[ServedModel]) -> None:
        self._models: dict[str, dict[int, ServedModel]] = {}
        for model in sorted(models, key=lambda model: (model.artifact.name, model.artifact.version)):
            self._models.setdefault(model.artifact.name, {})[model.artifact.version] = model

    def names(self) -> list[str]:
        """Names, sorted."""
        return list(self._models)

    def __iter__(self) -> Iterator[ServedModel]:
        for versions in self._models.values():
            yield from versions.values()

    def get(self, name: str, version: int) -> ServedModel | None:
        """One model, or None."""
        return self._models.get(name, {}).get(version)

    def replacing(self, name: str, models: Iterable[ServedModel]) -> "Catalog":
        """This catalog with these models, and no others, under a name."""
        return Catalog([*(model for model in self if model.artifact.name != name), *models])

    def versions(self, name: str) -> list[ServedModel]:
        """Every version of a name, ascending.

        Raises:
            ModelNotFound: no such name.
        """
        if name not in self._models:
            raise ModelNotFound(f"model {name[:64]!r} is not served; want one of: {self._listing()}")
        return list(self._models[name].values())

    def find(self, name: str | None, version: str | None) -> ServedModel:
        """One model: the only one if no name is given, its newest version if no version is given.

        Raises:
            ModelNotFound: no such name or version, or no name where several are served.
        """
        if name is None:
            name = self._only_name()
        versions = self.versions(name)
        if version is None:
            return versions[-1]
        for model in versions:
            if str(model.artifact.version) == version:
                return model
        served = ", ".join(str(model.artifact.version) for model in versions)
        raise ModelNotFound(f"model {name!r} has no version {version[:64]!r}; want one of: {served}")

    def _only_name(self) -> str:
        if len(self._models) != 1:
            raise ModelNotFound(
                f"no model named, and {len(self._models)} are served; want ?model= one of: {self._listing()}"
            )
        return next(iter(self._models))

    def _listing(self) -> str:
        return ", ".join(self._models) or "none"
