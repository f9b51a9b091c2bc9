"""Finding a served model by name and version."""

from pathlib import Path

import pytest

from service.artifact import Artifact
from service.catalog import Catalog, ServedModel
from service.errors import ModelNotFound
from service.repository import Repository
from tests.fakes import FailingEngine


@pytest.fixture(scope="module")
def artifact(repository: Path) -> Artifact:
    """Any artefact."""
    return Repository(repository).read("odd", 1)


@pytest.fixture
def several(artifact: Artifact) -> Catalog:
    """Two names, one of them in versions 1, 2 and 10."""
    return catalog(artifact, ("wide", 10), ("wide", 2), ("wide", 1), ("deep", 3))


def catalog(artifact: Artifact, *models: tuple[str, int]) -> Catalog:
    """A catalog of models of these names and versions, in this order."""
    return Catalog(
        ServedModel(artifact.model_copy(update={"name": name, "version": version}), FailingEngine())
        for name, version in models
    )


def found(catalog: Catalog, name: str | None, version: str | None) -> tuple[str, int]:
    """The name and version of what is found."""
    artifact = catalog.find(name, version).artifact
    return artifact.name, artifact.version


class TestListing:
    def test_names_are_sorted(self, several: Catalog) -> None:
        """Names come sorted, whatever order they were given in."""
        assert several.names() == ["deep", "wide"]

    def test_versions_ascend_as_numbers(self, several: Catalog) -> None:
        """2 comes before 10."""
        assert [model.artifact.version for model in several.versions("wide")] == [1, 2, 10]

    def test_unknown_name(self, several: Catalog) -> None:
        """A name that is not served is refused with those that are."""
        with pytest.raises(ModelNotFound, match="model 'narrow' is not served; want one of: deep, wide"):
            several.versions("narrow")

    def test_empty(self) -> None:
        """A catalog of nothing says so."""
        with pytest.raises(ModelNotFound, match="model 'any' is not served; want one of: none"):
            Catalog([]).versions("any")


class TestFind:
    def test_newest_unless_a_version_is_named(self, several: Catalog) -> None:
        """Without a version, the numerically newest is taken."""
        assert found(several, "wide", None) == ("wide", 10)

    def test_named_version(self, several: Catalog) -> None:
        """With a version, that one."""
        assert found(several, "wide", "2") == ("wide", 2)

    def test_only_model_needs_no_name(self, artifact: Artifact) -> None:
        """Where one name is served, it need not be given, whatever its versions."""
        only = catalog(artifact, ("wide", 1), ("wide", 2))
        assert found(only, None, None) == ("wide", 2)
        assert found(only, None, "1") == ("wide", 1)

    def test_no_name_among_several(self, several: Catalog) -> None:
        """Where several are served, a request must choose."""
        with pytest.raises(ModelNotFound, match=r"no model named, and 2 are served; want \?model= one of: deep, wide"):
            several.find(None, None)

    @pytest.mark.parametrize(
        "version", ["3", "02", "2.0", "latest", ""], ids=["unknown", "leading_zero", "fraction", "word", "empty"]
    )
    def test_unknown_version(self, several: Catalog, version: str) -> None:
        """A version is its number, written as the folder is; another is refused with those there are."""
        with pytest.raises(ModelNotFound, match=f"model 'wide' has no version '{version}'; want one of: 1, 2, 10"):
            several.find("wide", version)

    def test_long_names_are_cut_in_the_message(self, several: Catalog) -> None:
        """What a client sends is not echoed at any length."""
        with pytest.raises(ModelNotFound) as unknown:
            several.find("x" * 1000, None)
        with pytest.raises(ModelNotFound) as version:
            several.find("wide", "9" * 1000)
        assert max(len(str(unknown.value)), len(str(version.value))) < 150
