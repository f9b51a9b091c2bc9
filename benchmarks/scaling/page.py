"""The document: its text with a figure in each place. Pure but for where things lie."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from benchmarks.peers.contestants import ROOT

TEMPLATE: Final = Path(__file__).parent / "page.md"
DOCUMENT: Final = ROOT / "docs" / "scaling.md"
_PLACE: Final = re.compile(r"\{\{([a-z0-9-]+)\}\}")
_UNFINISHED: Final = re.compile(r"@@([a-z0-9-]+)@@")


def filled(template: str, figures: Mapping[str, str]) -> str:
    """The text with its figures; @@name@@ where there is none yet."""
    return _PLACE.sub(lambda place: figures.get(place[1], f"@@{place[1]}@@"), template)


def places(template: str) -> list[str]:
    """The names of the figures that a text wants, once each."""
    return list(dict.fromkeys(_PLACE.findall(template)))


def unfinished(text: str) -> list[str]:
    """The names of those that it still wants."""
    return list(dict.fromkeys(_UNFINISHED.findall(text)))
