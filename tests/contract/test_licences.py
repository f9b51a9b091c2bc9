"""The audit's parts on made-up metadata, and the page of licences against what is installed."""

import json
import re
from collections.abc import Callable
from email import message_from_string
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from packaging.utils import canonicalize_name

from deploy.audit import (
    CLEAN,
    FOUND,
    READ,
    UNAUDITED,
    Advisories,
    AuditError,
    Part,
    Pin,
    advisories,
    closure,
    document,
    licence_of,
    main,
    parts,
    refused,
    requirements,
    status,
)

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "licences.md"

Installed = Callable[..., None]


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder of installed distributions, empty at first."""
    return tmp_path


@pytest.fixture
def installed(site: Path) -> Installed:
    """Installs a distribution of nothing but metadata."""

    def install(name: str, *requires: str, extras: tuple[str, ...] = ()) -> None:
        folder = site / f"{name.replace('-', '_')}-1.0.dist-info"
        folder.mkdir()
        fields = [f"Name: {name}", "Version: 1.0", "License-Expression: MIT"]
        fields += [f"Provides-Extra: {extra}" for extra in extras] + [f"Requires-Dist: {line}" for line in requires]
        (folder / "METADATA").write_text("\n".join(fields) + "\n")

    return install


@pytest.fixture(scope="module")
def everything() -> list[Part]:
    """What is installed; the page is that of the cpu extra."""
    if not list(distributions(name="onnxruntime")):
        pytest.skip("the cpu extra is not installed")
    return parts("cpu")


def names(site: Path, root: str, *extras: str) -> list[str]:
    """What the closure finds there."""

    def find(name: str) -> Distribution:
        for one in distributions(name=name, path=[str(site)]):
            return one
        raise PackageNotFoundError(name)

    return [pin.name for pin in closure(root, extras, find)]


def pin(name: str = "leaf", version: str = "1.0", licence: str | None = "MIT") -> Pin:
    return Pin(name, version, licence)


def answer(*entries: dict[str, Any]) -> str:
    """As pip-audit writes it."""
    return json.dumps({"dependencies": entries, "fixes": []})


class TestClosure:
    def test_follows_what_is_required_by_what_is_required(self, site: Path, installed: Installed) -> None:
        """Everything below the root is found once, by name, the root left out, however names are spelled."""
        installed("root", "Middle_One", "twig")
        installed("middle-one", "leaf>=1", "twig")
        installed("leaf")
        installed("twig")
        assert names(site, "Root") == ["leaf", "middle-one", "twig"]

    def test_takes_no_extra_that_nobody_asked_for(self, site: Path, installed: Installed) -> None:
        """Of the root's extras those named are followed; what others would bring is not."""
        installed("root", "one; extra == 'a'", "other; extra == 'b'", extras=("a", "b"))
        installed("one")
        assert names(site, "root", "a") == ["one"]

    def test_takes_the_extras_that_a_requirement_names(self, site: Path, installed: Installed) -> None:
        """`middle[fast]` brings what middle's extra requires, and what middle requires without it."""
        installed("root", "middle[fast]")
        installed("middle", "leaf", "quick; extra == 'fast'", "slow; extra == 'slow'", extras=("fast", "slow"))
        installed("leaf")
        installed("quick")
        assert names(site, "root") == ["leaf", "middle", "quick"]

    def test_skips_what_another_machine_would_need(self, site: Path, installed: Installed) -> None:
        """A marker that is false here ends the way there."""
        installed("root", "absent; python_version < '3'", "leaf; python_version >= '3'")
        installed("leaf")
        assert names(site, "root") == ["leaf"]

    def test_ends_in_a_circle(self, site: Path, installed: Installed) -> None:
        """Distributions that require each other are each found once."""
        installed("root", "one")
        installed("one", "other")
        installed("other", "one", "root")
        assert names(site, "root") == ["one", "other"]

    def test_what_is_missing_is_named(self, site: Path, installed: Installed) -> None:
        """A requirement that is not installed is an error, not a shorter list."""
        installed("root", "absent")
        with pytest.raises(AuditError, match="absent is required and not installed"):
            names(site, "root")


class TestLicenceOf:
    @pytest.mark.parametrize(
        ("fields", "licence"),
        [
            pytest.param(
                "License-Expression: MIT OR Apache-2.0\nClassifier: License :: OSI Approved :: BSD License\nLicense: x",
                "MIT OR Apache-2.0",
                id="expression first",
            ),
            pytest.param(
                "Classifier: Typing :: Typed\nClassifier: License :: OSI Approved :: MIT License\nLicense: x",
                "MIT License",
                id="then the classifier",
            ),
            pytest.param(
                "Classifier: License :: OSI Approved :: MIT License\nClassifier: License :: Public Domain",
                "MIT License AND Public Domain",
                id="all classifiers",
            ),
            pytest.param("License: BSD-3-Clause\n        Copyright", "BSD-3-Clause", id="then the field's first line"),
            pytest.param("License: UNKNOWN", None, id="UNKNOWN is not a licence"),
            pytest.param("License:", None, id="nor is nothing"),
            pytest.param("Summary: MIT", None, id="silent"),
        ],
    )
    def test_choice(self, fields: str, licence: str | None) -> None:
        """The newest kind of statement that there is counts; without any the licence is unknown."""
        assert licence_of(message_from_string(f"Name: leaf\n{fields}\n")) == licence

    def test_metadata_goes_before_what_was_read(self) -> None:
        """What somebody read in a licence file holds only as long as the metadata is silent."""
        assert licence_of(message_from_string("Name: PySimdJSON\n")) == READ["pysimdjson"]
        assert licence_of(message_from_string("Name: pysimdjson\nLicense-Expression: GPL-3.0-only\n")) == "GPL-3.0-only"

    @pytest.mark.parametrize("name", READ)
    def test_what_was_read_still_stands_there(self, name: str) -> None:
        """The licence files of the distributions whose metadata is silent say what was read in them."""
        files = [file for file in distribution(name).files or () if "licenses" in file.parts]
        text = " ".join(" ".join(file.read_text().split()) for file in files)
        assert "Permission is hereby granted, free of charge" in text
        assert "Apache License 2.0" in text


class TestRefused:
    @pytest.mark.parametrize(
        "licence",
        ["MIT", "MPL-2.0 AND (Apache-2.0 OR MIT)", "Apache-2.0 AND Apache-2.0 WITH LLVM-exception", "BSD License"],
    )
    def test_listed(self, licence: str) -> None:
        """An expression passes whose every licence is on the list."""
        assert refused([pin(licence=licence)]) == []

    @pytest.mark.parametrize(
        "licence",
        [
            "GPL-3.0-only",
            "MIT AND (Zlib AND GPL-3.0-only)",
            "MIT OR GPL-3.0-only",
            "MIT WITH Commons-Clause",
            "BUSL-1.1",
        ],
    )
    def test_not_listed(self, licence: str) -> None:
        """One licence that is not on the list is enough, as an alternative as well."""
        assert refused([pin(), pin(licence=licence)]) == [
            f"leaf 1.0: licence is {licence}, want those on the list in deploy/audit.py"
        ]

    def test_unknown(self) -> None:
        """A licence that nobody states is refused."""
        assert refused([pin(licence=None)]) == [
            "leaf 1.0: licence is unknown, want those on the list in deploy/audit.py"
        ]

    @pytest.mark.parametrize(("name", "count"), [("nvidia-cublas", 0), ("nvidiaish", 1), ("tritonclient", 1)])
    def test_cuda(self, name: str, count: int) -> None:
        """NVIDIA's own wheels may be proprietary; nothing else may, however it is called."""
        assert len(refused([pin(name, licence="LicenseRef-NVIDIA-Proprietary")])) == count


class TestRequirements:
    def test_pins_with_hashes(self) -> None:
        """Each line is a public version and a hash, and nothing says where a wheel came from."""
        part = Part("Some", "some.txt", [pin("Leaf_One"), pin("torch", "2.13.0+cpu")])
        lines = requirements(part, {"leaf-one": "a" * 64, "torch": "b" * 64}).splitlines()
        assert [line for line in lines if not line.startswith("#")] == [
            f"Leaf_One==1.0 --hash=sha256:{'a' * 64}",
            f"torch==2.13.0 --hash=sha256:{'b' * 64}",
        ]
        assert not re.search(r"://|index|find-links", "\n".join(lines))

    def test_a_missing_hash_is_an_error(self) -> None:
        """No pin goes without its hash."""
        with pytest.raises(AuditError, match="no wheel was downloaded for leaf"):
            requirements(Part("Some", "some.txt", [pin()]), {})


class TestAdvisories:
    def test_clean(self) -> None:
        """What was asked about and has no hole is neither a hole nor unaudited, however the answer spells it."""
        text = answer({"name": "Leaf_One", "version": "1.0", "vulns": []})
        assert advisories(text, ["leaf-one"]) == Advisories([], [])

    def test_holes(self) -> None:
        """Each hole is a line with what it is in, its number, and the versions without it."""
        holes = [{"id": "PYSEC-1", "fix_versions": ["1.1", "2.0"]}, {"id": "PYSEC-2", "fix_versions": []}]
        known = advisories(answer({"name": "leaf", "version": "1.0", "vulns": holes}), ["leaf"])
        assert known.holes == ["leaf 1.0: PYSEC-1, mended in 1.1, 2.0", "leaf 1.0: PYSEC-2, mended in no version"]
        assert known.unaudited == []

    def test_skipped_is_not_clean(self) -> None:
        """What pip-audit skipped, calling that no known vulnerability, is unaudited."""
        text = answer({"name": "leaf", "skip_reason": "Dependency not found on PyPI and could not be audited"})
        assert advisories(text, ["leaf"]) == Advisories([], ["leaf"])

    def test_left_out_is_not_clean(self) -> None:
        """What the answer does not mention is unaudited."""
        text = answer({"name": "leaf", "version": "1.0", "vulns": []})
        assert advisories(text, ["twig", "leaf", "root"]).unaudited == ["root", "twig"]

    def test_no_answer_is_not_clean(self) -> None:
        """Where there is no answer, everything is unaudited."""
        assert advisories("\n", ["leaf"]) == Advisories([], ["leaf"])


class TestStatus:
    @pytest.mark.parametrize(
        ("refusals", "known", "want"),
        [
            pytest.param([], Advisories([], []), CLEAN, id="clean"),
            pytest.param([], Advisories(["hole"], []), FOUND, id="hole"),
            pytest.param(["licence"], Advisories([], []), FOUND, id="licence"),
            pytest.param([], Advisories([], ["leaf"]), UNAUDITED, id="unaudited"),
            pytest.param(["licence"], Advisories([], ["leaf"]), FOUND, id="licence, unaudited"),
            pytest.param([], Advisories(["hole"], ["leaf"]), FOUND, id="hole, another unaudited"),
        ],
    )
    def test_what_was_found_comes_first(self, refusals: list[str], known: Advisories, want: int) -> None:
        """A finding is 1 even if something else could not be looked for; that alone is 3; only clean is 0."""
        assert status(refusals, known) == want


class TestInstalled:
    def test_page(self, everything: list[Part]) -> None:
        """docs/licences.md has the names and licences of what is installed."""
        assert PAGE.read_text() == document(everything), "python -m deploy.audit --markdown docs/licences.md"

    def test_command_writes_the_page(self, everything: list[Part], tmp_path: Path) -> None:
        """`--markdown` writes the page and nothing else, without a network."""
        result = CliRunner().invoke(main, ["--markdown", str(tmp_path / "page.md")])
        assert (result.exit_code, result.output) == (0, "")
        assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("page.md", document(everything))]

    def test_licences(self, everything: list[Part]) -> None:
        """Every licence is on the list."""
        assert [line for part in everything for line in refused(part.pins)] == []

    def test_parts(self, everything: list[Part]) -> None:
        """The service's part is without torch, no other repeats anything of it, and none has what tests need."""
        service, export, loadtest, heads = ({one.key for one in part.pins} for part in everything)
        assert {"fastapi", "onnxruntime", "starlette"} <= service
        assert {"torch", "onnx", "sympy"} <= export
        assert {"hdrhistogram", "plotly"} <= loadtest
        assert {"matplotlib", "pillow"} <= heads
        assert not service & export
        assert not (service | export) & loadtest
        assert not (service | export | loadtest) & heads
        assert not {"pytest", "mha-service"} & (service | export | loadtest | heads)

    def test_pinned(self, everything: list[Part]) -> None:
        """constraints.txt has a version for all of it, but for what torch's ordinary wheel brings."""
        lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
        pinned = {canonicalize_name(line.partition("==")[0]) for line in lines}
        assert {one.key for part in everything for one in part.pins if not one.for_cuda} <= pinned
