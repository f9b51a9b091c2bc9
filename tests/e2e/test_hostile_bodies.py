"""Thousands of bodies that fuzzers found, sent to a real server: each is answered or refused, and the next one, too."""

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.hostile.forms import FORMS, Sent, kept
from tests.served import ServerProcess, serving

LEAST = 2000
LIMIT = 1024 * 1024
# Of each body that was kept.
_SPOILED = 4
# A client may ask for an answer within a microsecond.
ALLOWED = {200, 400, 404, 413, 415, 422, 504}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Iterator[ServerProcess]:
    """A server of its own, which takes bodies of up to a megabyte."""
    log = tmp_path_factory.mktemp("target") / "log"
    flags = ("--models", str(repository), "--max-body-bytes", str(LIMIT))
    with serving(log, *flags, MALLOC_ARENA_MAX="1") as server:
        yield server


@pytest.fixture(autouse=True)
def _goes_on(target: ServerProcess) -> Iterator[None]:
    """Whatever came before, a good body of any form is answered."""
    yield
    for form in FORMS.values():
        assert _post(target.client, form.sent(form.good[0])).status_code == 200


def hostile(name: str) -> list[bytes]:
    """The bodies of a form that were kept, each as it is and with other stretches replaced, removed or doubled."""
    rng = random.Random(0)  # noqa: S311  # the same ones each time
    bodies = kept(name)
    return list(dict.fromkeys([*bodies, *(_spoiled(body, rng) for body in bodies for _ in range(_SPOILED))]))


def _spoiled(body: bytes, rng: random.Random) -> bytes:
    for _ in range(rng.randint(1, 3)):
        begin = rng.randint(0, len(body))
        end = rng.randint(begin, min(len(body), begin + 16))
        stretch = rng.choice([b"", body[begin:end] * 2, rng.randbytes(rng.randint(1, 16))])
        body = body[:begin] + stretch + body[end:]
    return body


def _post(client: httpx.Client, sent: Sent) -> httpx.Response:
    return client.post(sent.path, content=sent.body, headers=dict(sent.headers))


def test_there_are_enough() -> None:
    """Two thousand distinct ones and more, of every form some."""
    assert all(len(hostile(name)) >= 100 for name in FORMS)
    assert sum(len(hostile(name)) for name in FORMS) >= LEAST


@pytest.mark.parametrize("name", FORMS)
def test_each_is_answered_or_refused(target: ServerProcess, name: str) -> None:
    """No status means that the server failed, every refusal says its code, and memory stays near what a body may be."""
    form = FORMS[name]
    for good in form.good:
        assert _post(target.client, form.sent(good)).status_code == 200
    before_bytes, before_events = target.peak_memory_bytes(), len(target.events())
    statuses: Counter[int] = Counter()
    for body in hostile(name):
        response = _post(target.client, form.sent(body))
        statuses[response.status_code] += 1
        assert response.status_code in ALLOWED, (name, body[:200], response.text[:500])
        if response.status_code != 200:
            assert response.json()["code"] != "internal"
    assert statuses[504] <= 0.1 * statuses.total()
    assert target.process.poll() is None
    assert not [event for event in target.events()[before_events:] if event["level"] in ("error", "critical")]
    assert target.peak_memory_bytes() - before_bytes <= 16 * LIMIT
