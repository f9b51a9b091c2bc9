"""The GPU's benchmark, run to its end where there is no GPU."""

import json
from pathlib import Path

from click.testing import CliRunner

from benchmarks.gpu import MEASURES, main


def run(repository: Path, out: Path, *flags: str) -> str:
    """What it says of a model."""
    sizes = ["--rounds", "1", "--tokens", "300", "--count", "8"]
    result = CliRunner().invoke(main, [str(repository / "odd" / "1"), "--out", str(out), *sizes, *flags])
    assert isinstance(result.exception, SystemExit | None)
    return result.output


class TestMain:
    def test_measures_everything_on_a_cpu_too(self, repository: Path, tmp_path: Path) -> None:
        """Each measure ends, and stands in the results with the machine."""
        run(repository, tmp_path / "gpu.json", "--device", "cpu")
        results = json.loads((tmp_path / "gpu.json").read_text())
        assert set(MEASURES) <= set(results)
        assert results["machine"]["gpu"] is None
        assert results["tiles"]["ratio"] > 0

    def test_without_a_gpu_says_what_is_missing(self, repository: Path, tmp_path: Path) -> None:
        """No figures, and a sentence."""
        assert "Error: device: cuda was asked for, but " in run(repository, tmp_path / "gpu.json")
        assert not (tmp_path / "gpu.json").exists()
