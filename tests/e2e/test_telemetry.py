"""Nothing of ours tells anybody what it does."""

from pathlib import Path

from tests.served import serving

# What onnxruntime leaves behind where it reports: an id, and events that have not been sent yet.
LEFT_BEHIND = ".cache/Microsoft"


def test_runtime_reports_nothing(tmp_path: Path, seeds_repository: Path) -> None:
    """A server that has loaded and computed leaves no id and no events in the home folder."""
    home = tmp_path / "home"
    home.mkdir()
    # As good as not set: this process has it set, since it has imported ours.
    environment = {"HOME": str(home), "ORT_DISABLE_TELEMETRY": ""}
    with serving(tmp_path / "log", "--models", str(seeds_repository), **environment) as server:
        assert server.client.post("/v1/attention", json={"queries": [[[0.5] * 100]]}).status_code == 200
    assert not (home / LEFT_BEHIND).exists()
