"""A ranking that is interrupted goes on where it was, and only with what it was begun with."""

import dataclasses
import json
from pathlib import Path

import pytest

from heads import ranking
from heads.errors import HeadsError
from heads.importance import Wanted
from heads.inputs import Inputs
from heads.ranking import Question, drawn, order, rank, read_ranking
from heads.source import Source
from tests.heads.made import entries_of, layer_of


def question() -> Question:
    """Twelve entries of a layer."""
    layer = layer_of()
    inputs = Inputs(tuple(entries_of(layer, 12)), "digest of a file")
    return Question(Source(layer, {"kind": "test"}, None), inputs, [Wanted()] * 12, range(12), 0, "none")


class Interrupted(Exception):
    """Somebody pressed the keys."""


def test_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted after five entries: those are in the file, are not computed again, and the end is the same."""
    asked, whole = question(), rank(question(), tmp_path / "whole.json", lambda _: None)

    def interrupt(done: int) -> None:
        if done == 5:
            raise Interrupted

    with pytest.raises(Interrupted):
        rank(asked, tmp_path / "r.json", interrupt)
    kept = json.loads((tmp_path / "r.json").read_text())
    assert not kept["complete"]
    assert len(kept["scores"]) == 5
    looks: list[int] = []
    look = ranking.look
    monkeypatch.setattr(ranking, "look", lambda layer, entry: (looks.append(1), look(layer, entry))[1])
    assert rank(asked, tmp_path / "r.json", lambda _: None) == whole
    assert len(looks) == 7


def test_is_saved_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only at the end: whoever is killed loses seconds."""
    monkeypatch.setattr(ranking, "_SAVE_EVERY_S", 0.0)
    seen: list[int] = []

    def look(done: int) -> None:
        if (tmp_path / "r.json").exists():
            seen.append(len(json.loads((tmp_path / "r.json").read_text())["scores"]))

    rank(question(), tmp_path / "r.json", look)
    assert seen == list(range(1, 12))


def test_another_question_is_refused(tmp_path: Path) -> None:
    """Rather than mixed with the old answers."""
    asked = question()
    rank(asked, tmp_path / "r.json", lambda _: None)
    with pytest.raises(HeadsError, match="with other wanted; choose another, or remove it"):
        rank(dataclasses.replace(asked, wanted_digest="another"), tmp_path / "r.json", lambda _: None)
    other = dataclasses.replace(asked, inputs=Inputs(asked.inputs.entries, "another"))
    with pytest.raises(HeadsError, match="with other inputs"):
        rank(other, tmp_path / "r.json", lambda _: None)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": "mha-heads-ranking/1", "methods": {}}'])
def test_what_is_no_ranking(tmp_path: Path, content: str) -> None:
    """Is not overwritten."""
    (tmp_path / "r.json").write_text(content)
    with pytest.raises(HeadsError, match="is no ranking"):
        rank(question(), tmp_path / "r.json", lambda _: None)
    assert (tmp_path / "r.json").read_text() == content


def test_is_read_back(tmp_path: Path) -> None:
    """By who prunes, if it is complete and of that layer."""
    asked = question()
    found = rank(asked, tmp_path / "r.json", lambda _: None)
    assert read_ranking(tmp_path / "r.json", asked.source) == found
    least_first = order(found, "leave-one-out")
    means = [found["methods"]["leave-one-out"]["heads"][head]["mean"] for head in least_first]
    assert means == sorted(means)
    with pytest.raises(HeadsError, match="--by loss: the ranking has leave-one-out, gradient"):
        order(found, "loss")
    with pytest.raises(HeadsError, match="of another layer"):
        read_ranking(tmp_path / "r.json", Source(layer_of(bias=False), {}, None))
    with pytest.raises(HeadsError, match="no such file"):
        read_ranking(tmp_path / "absent.json", asked.source)
    (tmp_path / "half.json").write_text(json.dumps({**found, "complete": False}))
    with pytest.raises(HeadsError, match="not complete"):
        read_ranking(tmp_path / "half.json", asked.source)


def test_sample_is_seeded() -> None:
    """Some of them, ascending, the same for the same seed."""
    assert drawn(5, None, 0) == drawn(5, 9, 0) == [0, 1, 2, 3, 4]
    chosen = drawn(100, 10, 3)
    assert len(chosen) == 10
    assert chosen == sorted(chosen) == drawn(100, 10, 3) != drawn(100, 10, 4)
