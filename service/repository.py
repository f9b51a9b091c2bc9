"""A folder of artefacts, `<name>/<version>/`: which are there, and the reading of them."""

from pathlib import Path
from typing import Final, final

from service.artifact import Artifact, read_artifact
from service.errors import ArtifactError

# At the root of a volume there may be one that only root can list.
_LOST: Final = "lost+found"
_HINT: Final = "export one with: mha export --num-hiddens 100 --num-heads 5 --out"


@final
class Repository:
    """The artefacts below one folder. Hidden folders (half-written exports) and a file system's own are not seen."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def versions(self) -> dict[str, list[int]]:
        """Versions of every model, ascending; a name without a version is left out.

        Raises:
            ArtifactError: the folder is not there or cannot be read.
        """
        try:
            found = {entry.name: _versions(entry) for entry in sorted(self._folder.iterdir()) if _is_visible(entry)}
        except OSError as error:
            raise ArtifactError(f"models: {self._folder}: {error.strerror}; {_HINT} {self._folder}") from error
        return {name: versions for name, versions in found.items() if versions}

    def read(self, name: str, version: int) -> Artifact:
        """One artefact, verified.

        Raises:
            ArtifactError: it is not there, or not whole.
        """
        return read_artifact(self._folder / name / str(version), name, version)

    def relative(self, message: str) -> str:
        """A message without the repository's own path, which is nobody's business outside."""
        return message.replace(f"{self._folder}/", "")

    def read_all(self) -> list[Artifact]:
        """Every artefact, verified.

        Raises:
            ArtifactError: there is none, or one is not whole.
        """
        artifacts = [self.read(name, version) for name, versions in self.versions().items() for version in versions]
        if not artifacts:
            raise ArtifactError(f"models: {self._folder} holds no artefact; {_HINT} {self._folder}")
        return artifacts


def _is_visible(entry: Path) -> bool:
    return entry.is_dir() and not entry.name.startswith(".") and entry.name != _LOST


def _versions(folder: Path) -> list[int]:
    return sorted(int(entry.name) for entry in folder.iterdir() if entry.is_dir() and _is_version(entry.name))


def _is_version(name: str) -> bool:
    return name.isascii() and name.isdecimal() and name == str(int(name)) and int(name) > 0
