"""Which artefacts a folder holds: by name and version, not by what else lies about."""

import shutil
from pathlib import Path

import pytest

from service.errors import StartupError
from service.repository import Repository


def versions(folder: Path, *entries: str) -> dict[str, list[int]]:
    """The versions of a repository with these folders."""
    for entry in entries:
        (folder / entry).mkdir(parents=True)
    return Repository(folder).versions()


class TestVersions:
    def test_are_in_numeric_order(self, tmp_path: Path) -> None:
        """2 comes before 10."""
        assert versions(tmp_path, "m/10", "m/2", "m/1") == {"m": [1, 2, 10]}

    def test_names_are_sorted(self, tmp_path: Path) -> None:
        """Models come in the order of their names."""
        assert list(versions(tmp_path, "b/1", "c/1", "a/1")) == ["a", "b", "c"]

    @pytest.mark.parametrize(
        "entry",
        [
            pytest.param(".hidden/1", id="hidden_model"),
            pytest.param("m/.staging-x7", id="staging"),
            pytest.param("m/.replaced-x7", id="replaced"),
            pytest.param("m/latest", id="word"),
            pytest.param("m/0", id="zero"),
            pytest.param("m/-1", id="negative"),
            pytest.param("m/01", id="leading_zero"),
            pytest.param("m/1.5", id="fraction"),
            pytest.param("m/\u00b2", id="superscript"),
            pytest.param("m/\u0661", id="arabic_digit"),
            pytest.param("empty", id="no_versions"),
            pytest.param("lost+found/1", id="of_the_file_system"),
        ],
    )
    def test_what_is_none_is_not_seen(self, tmp_path: Path, entry: str) -> None:
        """Half-written exports and whatever is not a positive number are not versions."""
        assert versions(tmp_path, entry, "m/7") == {"m": [7]}

    def test_files_are_not_seen(self, tmp_path: Path) -> None:
        """A file is neither a model nor a version, Triton's config.pbtxt included."""
        (tmp_path / "README").write_text("")
        (tmp_path / "m").mkdir()
        (tmp_path / "m" / "config.pbtxt").write_text("")
        (tmp_path / "m" / "3").write_text("")
        assert versions(tmp_path, "m/7") == {"m": [7]}

    def test_of_an_empty_folder(self, tmp_path: Path) -> None:
        """An empty folder has none."""
        assert versions(tmp_path) == {}

    def test_of_a_missing_folder(self, tmp_path: Path) -> None:
        """A folder that is not there is named, with the command that makes one."""
        missing = tmp_path / "nowhere"
        with pytest.raises(StartupError, match=f"models: {missing}: No such file.*mha export .*--out {missing}"):
            versions(missing)

    def test_of_a_file(self, tmp_path: Path) -> None:
        """A file in the folder's place is named."""
        (tmp_path / "models").write_text("")
        with pytest.raises(StartupError, match="models: Not a directory"):
            versions(tmp_path / "models")


class TestReading:
    def test_all(self, repository: Path) -> None:
        """Every artefact is read, in the order of name and version."""
        artifacts = Repository(repository).read_all()
        assert [(artifact.name, artifact.version) for artifact in artifacts] == [
            ("additive", 1), ("attention", 1), ("odd", 1),
        ]  # fmt: skip

    def test_several_versions(self, repository: Path, tmp_path: Path) -> None:
        """Every version of a name is read, the numerically newest last."""
        for version in (10, 2):
            shutil.copytree(repository / "odd" / "1", tmp_path / "odd" / str(version))
        artifacts = Repository(tmp_path).read_all()
        assert [artifact.version for artifact in artifacts] == [2, 10]

    def test_one(self, repository: Path) -> None:
        """One artefact is read by name and version."""
        assert Repository(repository).read("odd", 1).layer.key_size == 13

    def test_one_that_is_not_there(self, repository: Path) -> None:
        """A version that is not there names the file that is missing."""
        with pytest.raises(StartupError, match=r"odd/7/manifest\.json: No such file"):
            Repository(repository).read("odd", 7)

    def test_none(self, tmp_path: Path) -> None:
        """A repository without an artefact says how to make one."""
        with pytest.raises(StartupError, match=f"models: {tmp_path} holds no artefact; export one with: mha export"):
            Repository(tmp_path).read_all()

    def test_one_that_is_not_whole_stops_all(self, repository: Path, tmp_path: Path) -> None:
        """A broken artefact is an error, not a model less."""
        shutil.copytree(repository / "odd" / "1", tmp_path / "odd" / "1")
        (tmp_path / "broken" / "1").mkdir(parents=True)
        with pytest.raises(StartupError, match=r"broken/1/manifest\.json"):
            Repository(tmp_path).read_all()
