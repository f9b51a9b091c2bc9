"""The importance of every head over many entries: computed entry by entry, kept in a file, and gone on with."""

import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, final

import numpy as np

from heads.contributions import contributions, look, output_of
from heads.errors import HeadsError
from heads.importance import Scores, Wanted, scores
from heads.inputs import Inputs
from heads.source import Source
from heads.statistics import agreement, means

FORMAT: Final = "mha-heads-ranking/1"
_SAVE_EVERY_S: Final = 2.0
# What has to be the same for a file to be gone on with.
_SETTINGS: Final = ("layer", "inputs", "wanted")


@final
@dataclass(frozen=True, slots=True)
class Question:
    """What is to be ranked, and on which entries.

    Attributes:
        source: the layer.
        inputs: all entries there are.
        wanted: of each of them.
        entries: which of them are looked at, in ascending order.
        seed: by which they were drawn, and intervals are.
        wanted_digest: of the files of targets and gradients.
    """

    source: Source
    inputs: Inputs
    wanted: Sequence[Wanted]
    entries: Sequence[int]
    seed: int
    wanted_digest: str

    @property
    def settings(self) -> dict[str, Any]:
        """Those of `_SETTINGS`, as JSON has them."""
        return dict(zip(_SETTINGS, (self.source.digest, self.inputs.digest, self.wanted_digest), strict=True))


def drawn(count: int, sample: int | None, seed: int) -> list[int]:
    """So many of `count` entries, by seed, in ascending order; all of them without a number, or where it is no less."""
    if sample is None or sample >= count:
        return list(range(count))
    return sorted(np.random.default_rng(seed).choice(count, sample, replace=False).tolist())


def rank(question: Question, path: Path, done: Callable[[int], None]) -> dict[str, Any]:
    """The report on all entries; what is in the file already is not computed again.

    The file is written every other second and at the end, so that little is lost where this is interrupted.

    Args:
        question: what is asked.
        path: of the report.
        done: is told how many entries there are, whenever there are more.

    Raises:
        HeadsError: the file is no report on this question, or cannot be written.
    """
    found = _begun(path, question)
    done(len(found))
    saved_s = time.monotonic()
    try:
        for entry in question.entries:
            if entry in found:
                continue
            found[entry] = _scores_of(question, entry)
            done(len(found))
            if time.monotonic() > saved_s + _SAVE_EVERY_S:
                _write(path, report(question, found))
                saved_s = time.monotonic()
    finally:
        complete = report(question, found)
        _write(path, complete)
    return complete


def report(question: Question, found: Mapping[int, Scores]) -> dict[str, Any]:
    """What is known after some entries, as JSON has it."""
    methods = list(next(iter(found.values()), {}))
    by_method = {name: [found[entry][name] for entry in sorted(found)] for name in methods}
    summary = {name: _summary(samples, question.seed) for name, samples in by_method.items()}
    return {
        "format": FORMAT,
        "complete": len(found) == len(question.entries),
        **question.settings,
        "seed": question.seed,
        "entries": list(question.entries),
        "origin": dict(question.source.origin),
        "num_heads": question.source.layer.num_heads,
        "methods": summary,
        "agreement": {
            f"{one} and {other}": agreement(
                *([head["mean"] for head in summary[name]["heads"]] for name in (one, other))
            )
            for one, other in itertools.combinations(methods, 2)
        },
        "scores": {str(entry): found[entry] for entry in sorted(found)},
    }


def order(ranked: Mapping[str, Any], method: str) -> list[int]:
    """All heads of a report by that method, the one that matters least first.

    Raises:
        HeadsError: the report has no such method.
    """
    if method not in ranked["methods"]:
        raise HeadsError(f"--by {method}: the ranking has {', '.join(ranked['methods'])}")
    least_first: list[int] = ranked["methods"][method]["order"][::-1]
    return least_first


def read_ranking(path: Path, source: Source) -> dict[str, Any]:
    """A complete report on this layer.

    Raises:
        HeadsError: it is none.
    """
    found = _read(path)
    if found is None:
        raise HeadsError(f"--ranking {path}: no such file; `mha heads rank` writes it")
    if found["layer"] != source.digest:
        raise HeadsError(f"--ranking {path}: is of another layer")
    if not found["complete"]:
        raise HeadsError(f"--ranking {path}: is not complete; run `mha heads rank` again, it goes on")
    return found


def _summary(samples: list[list[float]], seed: int) -> dict[str, Any]:
    of_heads = means(samples, seed)
    by_mean = sorted(range(len(of_heads)), key=lambda head: -of_heads[head].mean)
    return {"heads": [asdict(one) for one in of_heads], "order": by_mean}


def _scores_of(question: Question, entry: int) -> Scores:
    layer = question.source.layer
    of_heads = contributions(layer, look(layer, question.inputs.entries[entry]).features)
    return scores(of_heads, output_of(layer, of_heads), question.wanted[entry])


def _begun(path: Path, question: Question) -> dict[int, Scores]:
    found = _read(path)
    if found is None:
        return {}
    differing = [name for name in _SETTINGS if found[name] != question.settings[name]]
    if differing:
        raise HeadsError(
            f"--out {path}: is a ranking with other {' and '.join(differing)}; choose another, or remove it"
        )
    wanted = set(question.entries)
    return {int(entry): scores for entry, scores in found["scores"].items() if int(entry) in wanted}


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise HeadsError(f"{path}: is no ranking that `mha heads rank` wrote: {error}") from error
    wanted = {*_SETTINGS, "methods", "scores", "complete"}
    if not isinstance(found, dict) or found.get("format") != FORMAT or not wanted <= set(found):
        raise HeadsError(f"{path}: is no ranking that `mha heads rank` wrote")
    return found


def _write(path: Path, content: Mapping[str, Any]) -> None:
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        unfinished.write_text(json.dumps(content) + "\n")
        unfinished.replace(path)
    except OSError as error:
        raise HeadsError(f"--out {path}: {error.strerror}") from error
