"""What a start decides from the device, before anything is computed."""

from pathlib import Path

import pytest

from service import start as starting
from service.engine.device import Device
from service.errors import StartupError
from service.http.secrets import Secrets
from service.library import Library
from service.repository import Repository
from service.settings import Settings
from service.start import server_state, start


def workers(settings: Settings, device: Device, models: Path) -> float:
    """How many engine calls at once a server says that it makes."""
    state = server_state(
        settings, device, Library(Repository(models), lambda _: pytest.fail("nothing is loaded")), Secrets()
    )
    return state.metrics.workers._value.get()  # type: ignore[no-any-return]  # of the gauge, which has no reader


class TestGpu:
    def test_is_served_by_one_process(self, monkeypatch: pytest.MonkeyPatch, repository: Path) -> None:
        """Asked for more, the start is refused: CUDA cannot be used on both sides of a fork."""
        monkeypatch.setattr(starting, "missing_for_cuda", lambda: None)
        with pytest.raises(StartupError, match=r"^processes: got 2, want 1: "):
            start(Settings(models=repository, port=0, device="cuda", processes=2))

    def test_makes_two_calls_at_once_unless_told(self, repository: Path) -> None:
        """What else waits is put together; and a number that was asked for is a number."""
        gpu = Device("cuda", "asked for")
        assert workers(Settings(), gpu, repository) == 2
        assert workers(Settings(workers=5), gpu, repository) == 5
