"""`python -m tests.hostile`: fuzzes every form of body, guided by coverage, and keeps what reached something new."""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import click

from tests.hostile.forms import FORMS, archive, kept

_LONGEST_BYTES: Final = 4096
_ROOT: Final = Path(__file__).parents[2]
# Of an archive's entries, so that the same bodies make the same archive.
_WHEN: Final = (1980, 1, 1, 0, 0, 0)


def fuzz(name: str, seconds: int, folder: Path) -> None:
    """Fuzzes one form from what was kept of it, and keeps the new with the old.

    Raises:
        click.ClickException: a body was found that is neither read nor refused; the message says where it is.
    """
    found = folder / "found"
    found.mkdir()
    _write(found, [*FORMS[name].good, *(kept(name) if archive(name).exists() else ())])
    findings = Path(tempfile.mkdtemp(prefix=f"mha-{name}-"))
    arguments = [
        f"-max_total_time={seconds}", f"-max_len={_LONGEST_BYTES}", "-timeout=10", "-rss_limit_mb=2048",
        "-use_value_profile=1", f"-artifact_prefix={findings}/", str(found),
    ]  # fmt: skip
    if _run(name, folder / "log", arguments) != 0:
        raise click.ClickException(f"{name}: a finding in {findings}:\n{_end_of(folder / 'log')}")
    findings.rmdir()
    _keep(name, found)


def _run(name: str, log: Path, arguments: Sequence[str]) -> int:
    with log.open("wb") as file:
        command = [sys.executable, "-m", "tests.hostile.target", name, *arguments]
        return subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, cwd=_ROOT, check=False).returncode


def _end_of(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-30:])


def _write(folder: Path, bodies: Iterable[bytes]) -> None:
    for body in bodies:
        (folder / hashlib.sha256(body).hexdigest()[:16]).write_bytes(body)


def _keep(name: str, folder: Path) -> None:
    """All that is kept of the form from now on."""
    with zipfile.ZipFile(archive(name), "w", zipfile.ZIP_DEFLATED, compresslevel=9) as files:
        for path in sorted(folder.iterdir()):
            files.writestr(zipfile.ZipInfo(path.name, _WHEN), path.read_bytes(), zipfile.ZIP_DEFLATED)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("forms", nargs=-1, type=click.Choice(list(FORMS)))
@click.option("--seconds", default=600, show_default=True, type=click.IntRange(1), help="For each form.")
def main(forms: Sequence[str], seconds: int) -> None:
    """Fuzzes these forms of body, or all, and adds what reached new code to the archives beside this module."""
    if find_spec("atheris") is None:
        raise click.ClickException("atheris is not installed: pip install -e '.[fuzz]'")
    os.environ["PYTHONPATH"] = str(_ROOT)
    for name in forms or FORMS:
        with tempfile.TemporaryDirectory() as place:
            fuzz(name, seconds, Path(place))
            (summary,) = [
                line
                for line in (Path(place) / "log").read_text(errors="replace").splitlines()
                if line.startswith("Done ")
            ]
        click.echo(f"{name}: {summary.removeprefix('Done ')}; {len(kept(name))} bodies kept")


if __name__ == "__main__":
    main()
