"""Known holes in what the service runs on, and its licences: `python -m deploy.audit`, or `make audit`.

constraints.txt says which versions are installed, not whether they should be. This reads the metadata of what is
installed, asks pip-audit for holes that are known in it, and writes pins with hashes that can be audited where this
machine cannot. It must not import the service: what it looks at may be what is broken.
"""

import hashlib
import json
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageMetadata, PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, final

import click
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

PROJECT: Final = "mha-service"
CLEAN, FOUND, FAILED, UNAUDITED = 0, 1, 2, 3

# Whoever passes these on owes a notice, or for MPL-2.0 the source of the licensed files, which are not changed here.
# Nothing else is on the list on purpose: a licence that is new to it is read by somebody once, then added or avoided.
# BSL-1.0 is Boost's, not the Business Source License. Below are the same licences in the words of older metadata.
ALLOWED: Final = frozenset({
    "0BSD", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0", "MIT",
    "MIT-CMU", "MPL-2.0", "PSF-2.0", "Zlib",
    "3-Clause BSD License", "Apache Software License", "BSD License", "MIT License",
    "Python Software Foundation License",
})  # fmt: skip

# Their metadata is silent; this is what the licence file that they install says.
READ: Final = {"pysimdjson": "MIT AND Apache-2.0"}

# torch's ordinary wheel and the gpu extra bring these. Some are NVIDIA's own, proprietary, and installed from NVIDIA's
# wheels by whoever wants a GPU; the service neither needs nor passes them on, so no list of licences can decide here.
_CUDA: Final = re.compile(r"(cuda|nvidia)-.+|triton")

_HEAD: Final = """\
# Licences of what it runs on

mha-service is Apache-2.0. These are the distributions that it installs, and the licences that their metadata states
(older metadata does not say whether one may choose; several of its licences are joined by AND). The versions are in
[constraints.txt](../constraints.txt). `make audit` refuses a licence that is not on the list in
[deploy/audit.py](../deploy/audit.py). What a wheel bundles beyond that (onnxruntime and torch bundle much) is named in
the licence files that it installs. `python -m deploy.audit --markdown docs/licences.md` writes this page.
"""
_FOOT: Final = """\
Not listed: what torch's ordinary wheel and `onnxruntime-gpu` bring for CUDA. Of that, triton is MIT, `cuda-bindings`
and `cuda-pathfinder` are Apache-2.0; most of `nvidia-*` is proprietary, under NVIDIA's own terms.
"""

Find = Callable[[str], Distribution]


class AuditError(click.ClickException):
    """The audit could not be made, which is neither a finding nor a clean bill."""

    exit_code = FAILED


@final
@dataclass(frozen=True, slots=True)
class Pin:
    """An installed distribution: its name as it spells it, its version, and the licence it states, if it does."""

    name: str
    version: str
    licence: str | None

    @property
    def key(self) -> str:
        """Its name as every index and wheel normalises it."""
        return canonicalize_name(self.name)

    @property
    def public_version(self) -> str:
        """The version without what a local build adds (`+cpu`): advisories know no other."""
        return Version(self.version).public

    @property
    def for_cuda(self) -> bool:
        """Whether it is there for GPUs only."""
        return _CUDA.fullmatch(self.key) is not None


@final
@dataclass(frozen=True, slots=True)
class Part:
    """Distributions that are installed for one purpose, and the file that lists them."""

    title: str
    file: str
    pins: Sequence[Pin]


@final
@dataclass(frozen=True, slots=True)
class Advisories:
    """What is known: a line for each hole, and the names that nobody said anything about."""

    holes: Sequence[str]
    unaudited: Sequence[str]


def parts(extra: str, find: Find = distribution) -> list[Part]:
    """The service with one of its exclusive extras, and what export, the load tester and pictures need beyond that."""
    service = closure(PROJECT, [extra], find)
    export = _beyond([service], closure(PROJECT, ["export"], find))
    loadtest = _beyond([service, export], closure(PROJECT, ["loadtest"], find))
    heads = _beyond([service, export, loadtest], closure(PROJECT, ["heads"], find))
    return [
        Part(f"The service (`.[{extra}]`)", "requirements-audit.txt", service),
        Part("What export needs beyond it (`.[export]`)", "requirements-audit-export.txt", export),
        Part("What the load tester needs beyond both (`.[loadtest]`)", "requirements-audit-loadtest.txt", loadtest),
        Part("What pictures of heads need beyond those (`.[heads]`)", "requirements-audit-heads.txt", heads),
    ]


def _beyond(known: Sequence[Sequence[Pin]], pins: Sequence[Pin]) -> list[Pin]:
    keys = {pin.key for some in known for pin in some}
    return [pin for pin in pins if pin.key not in keys]


def closure(root: str, extras: Sequence[str], find: Find = distribution) -> list[Pin]:
    """All that the root with these extras requires on this machine, directly or not, by name; without the root.

    Raises:
        AuditError: something that is required is not installed.
    """
    seen: set[tuple[str, str]] = set()
    found: dict[str, Pin] = {}
    waiting: list[tuple[str, str]] = [(canonicalize_name(root), extra) for extra in ("", *extras)]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        installed = _installed(name, find)
        found[name] = Pin(installed.metadata["Name"], installed.version, licence_of(installed.metadata))
        waiting += _required(installed, extra)
    del found[canonicalize_name(root)]
    return [found[name] for name in sorted(found)]


def licence_of(metadata: PackageMetadata) -> str | None:
    """The licence that metadata states: its expression, else its classifiers, else the first line of the old field.

    Several classifiers are joined by AND: they do not say whether one may choose. Where there is nothing, it is what
    was read in the licence file, or None.
    """
    classifiers = [line for line in metadata.get_all("Classifier") or () if line.startswith("License ::")]
    for stated in (
        metadata.get_all("License-Expression"),
        [line.rpartition(" :: ")[2] for line in classifiers],
        [text.strip().partition("\n")[0] for text in metadata.get_all("License") or ()],
    ):
        if stated and set(stated).isdisjoint({"", "UNKNOWN"}):
            return " AND ".join(stated)
    return READ.get(canonicalize_name(metadata["Name"]))


def refused(pins: Sequence[Pin]) -> list[str]:
    """A line for each licence that is unknown or not on the list."""
    return [
        f"{pin.name} {pin.version}: licence is {pin.licence or 'unknown'}, want those on the list in deploy/audit.py"
        for pin in pins
        if not pin.for_cuda and not (pin.licence and _on_the_list(pin.licence))
    ]


def requirements(part: Part, digests: Mapping[str, str]) -> str:
    """The part as pins with hashes, in pip's format; nothing in it says where they came from.

    Raises:
        AuditError: a digest is missing.
    """
    missing = [pin.name for pin in part.pins if pin.key not in digests]
    if missing:
        raise AuditError(f"no wheel was downloaded for {', '.join(missing)}")
    return "\n".join([
        f"# {part.title}. The hashes are of the wheels for Python {platform.python_version()}, {platform.machine()}.",
        f"# pip-audit --strict --disable-pip --require-hashes -r {part.file}",
        *(f"{pin.name}=={pin.public_version} --hash=sha256:{digests[pin.key]}" for pin in part.pins),
    ]) + "\n"  # fmt: skip


def advisories(answer: str, names: Collection[str]) -> Advisories:
    """What pip-audit's JSON says of these normalised names.

    What it skipped or left out is unaudited. pip-audit itself calls that "no known vulnerabilities", with status 0:
    it does so for all of them where the advisories' address answers 404.
    """
    entries = json.loads(answer)["dependencies"] if answer.strip() else []
    audited = {canonicalize_name(entry["name"]): entry["vulns"] for entry in entries if "skip_reason" not in entry}
    versions = {canonicalize_name(entry["name"]): entry.get("version", "") for entry in entries}
    return Advisories(
        holes=[
            f"{name} {versions[name]}: {hole['id']}, mended in {', '.join(hole['fix_versions']) or 'no version'}"
            for name, holes in audited.items()
            for hole in holes
        ],
        unaudited=sorted(set(names) - set(audited)),
    )


def status(refusals: Sequence[str], known: Advisories) -> int:
    """The exit status: what was found comes before what could not be looked for."""
    if refusals or known.holes:
        return FOUND
    return UNAUDITED if known.unaudited else CLEAN


def table(pins: Sequence[Pin]) -> str:
    """Name, version and licence, in columns."""
    rows = [
        ("distribution", "version", "licence"),
        *((pin.name, pin.version, pin.licence or "unknown") for pin in pins),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "".join(f"{name:{widths[0]}}  {version:{widths[1]}}  {licence}\n" for name, version, licence in rows)


def document(everything: Sequence[Part]) -> str:
    """The page of licences, without versions: they are constraints.txt's."""
    return "\n".join([_HEAD, *(_section(part) for part in everything), _FOOT])


@click.command()
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), default=".audit", show_default=True,
    help="The folder for licences.txt and the pins with hashes.",
)  # fmt: skip
@click.option(
    "--extra", type=click.Choice(["cpu", "gpu"]), default="cpu", show_default=True,
    help="Which of the exclusive extras is installed.",
)  # fmt: skip
@click.option(
    "--markdown", type=click.Path(dir_okay=False, path_type=Path),
    help="Write the list of licences there as a page, and do nothing else.",
)  # fmt: skip
@click.pass_context
def main(ctx: click.Context, out: Path, extra: str, markdown: Path | None) -> None:
    """Look for known holes and unwelcome licences in what the service runs on.

    \b
    Exit status:
      0  every distribution was audited; no hole is known, all licences are on the list
      1  a hole is known, or a licence is not on the list
      2  the audit could not be made
      3  licences are on the list and the pins are written, but advisories could not be had
    """  # noqa: D301  # \b is click's
    everything = parts(extra)
    if markdown:
        markdown.write_text(document(everything))
        return
    out.mkdir(parents=True, exist_ok=True)
    refusals = _report_licences(everything, out)
    _write_requirements(everything, out)
    known = _report_advisories(everything, out)
    ctx.exit(status(refusals, known))


def _installed(name: str, find: Find) -> Distribution:
    try:
        return find(name)
    except PackageNotFoundError:
        raise AuditError(f"{name} is required and not installed; install the cpu or gpu extra, and export") from None


def _required(installed: Distribution, extra: str) -> Iterator[tuple[str, str]]:
    """What one distribution asks for on this machine if one of its extras, or none, is wanted."""
    for requirement in map(Requirement, installed.requires or ()):
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            for wanted in ("", *requirement.extras):
                yield canonicalize_name(requirement.name), wanted


def _on_the_list(licence: str) -> bool:
    """Whether every licence that the expression names is. One of a choice is no exception: nobody has chosen."""
    return all(one.strip("() ") in ALLOWED for one in re.split(r"\b(?:AND|OR)\b", licence))


def _section(part: Part) -> str:
    rows = [f"| {pin.name} | {pin.licence or 'unknown'} |" for pin in part.pins if not pin.for_cuda]
    return "\n".join([f"## {part.title}", "", "| distribution | licence |", "|---|---|", *rows, ""])


def _report_licences(everything: Sequence[Part], out: Path) -> list[str]:
    text = "\n".join(f"{part.title}\n\n{table(part.pins)}" for part in everything)
    (out / "licences.txt").write_text(text)
    click.echo(text)
    refusals = [line for part in everything for line in refused(part.pins)]
    for line in refusals:
        click.echo(line, err=True)
    return refusals


def _write_requirements(everything: Sequence[Part], out: Path) -> None:
    digests = _digests([pin for part in everything for pin in part.pins])
    for part in everything:
        (out / part.file).write_text(requirements(part, digests))
        click.echo(f"{out / part.file}: {len(part.pins)} pins with hashes")


def _digests(pins: Sequence[Pin]) -> dict[str, str]:
    """The SHA-256 of each one's wheel, as pip gets it for this machine, by normalised name."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    with TemporaryDirectory() as folder:
        done = subprocess.run(  # noqa: S603  # our own environment's pip
            [*pip, "--dest", folder, *(f"{pin.name}=={pin.version}" for pin in pins)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise AuditError(f"pip cannot get the wheels of what is installed:\n{done.stderr.strip()}")
        return {parse_wheel_filename(wheel.name)[0]: _sha256(wheel) for wheel in Path(folder).iterdir()}


def _sha256(wheel: Path) -> str:
    with wheel.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _report_advisories(everything: Sequence[Part], out: Path) -> Advisories:
    names = {pin.key for part in everything for pin in part.pins}
    known = advisories(_ask([out / part.file for part in everything]), names)
    for line in known.holes:
        click.echo(line, err=True)
    if known.unaudited:
        some = len(known.unaudited) < len(names)
        which = f"{', '.join(known.unaudited)} of" if some else "any of"
        files = " ".join(f"-r {out / part.file}" for part in everything)
        click.echo(
            f"NOT AUDITED: advisories could not be had for {which} the {len(names)} distributions, so nothing is known "
            f"about holes there. Where they can be had:\n  pip-audit --strict --disable-pip --require-hashes {files}",
            err=True,
        )
    elif not known.holes:
        click.echo(f"No hole is known in any of the {len(names)} distributions.")
    return known


def _ask(files: Sequence[Path]) -> str:
    """pip-audit's JSON, or nothing if it has none; then its last words are shown.

    Its status does not tell a hole from a connection that failed: both are 1.
    """
    if find_spec("pip_audit") is None:
        raise AuditError("pip-audit is not installed; install the audit extra")
    options = ["--format", "json", "--progress-spinner", "off", "--disable-pip", "--require-hashes"]
    named = [word for file in files for word in ("--requirement", str(file))]
    done = subprocess.run(  # noqa: S603  # our own environment's pip-audit
        [sys.executable, "-m", "pip_audit", *options, *named], capture_output=True, text=True, check=False
    )
    if done.returncode and not done.stdout.strip():
        click.echo(f"pip-audit: {(done.stderr.strip().splitlines() or ['no answer'])[-1]}", err=True)
    return done.stdout


if __name__ == "__main__":
    main(prog_name="python -m deploy.audit")
