"""`mha export` as a person runs it: what it prints, what it leaves behind, and what each mistake is told."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from model.attention import seeded_layer


def mha(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mha", *arguments], capture_output=True, text=True, check=False, cwd=cwd
    )


class TestExport:
    def test_twice_gives_the_same_bytes(self, tmp_path: Path) -> None:
        """Two runs, in processes of their own, publish identical bytes; the summary is a table with the digest."""
        arguments = ["--num-hiddens", "6", "--num-heads", "2", "--seed", "3", "--bias", "--key-size", "5"]
        runs = [mha("export", "--out", str(tmp_path / folder), *arguments) for folder in "ab"]
        for run in runs:
            assert run.returncode == 0, run.stderr
        files = sorted(file.name for file in (tmp_path / "a" / "attention" / "1").iterdir())
        assert len(files) == 7
        for file in files:
            one, other = ((tmp_path / folder / "attention" / "1" / file).read_bytes() for folder in "ab")
            assert one == other
        digest = json.loads((tmp_path / "a/attention/1/manifest.json").read_text())["lowerings"][0]["sha256"]
        assert digest in runs[0].stdout
        assert "104 comparisons with torch and a float64 oracle" in runs[0].stdout
        assert "check against torch" in runs[0].stderr  # progress, away from the summary

    def test_broken_weight_publishes_nothing(self, tmp_path: Path) -> None:
        """A checkpoint with a nan exits with 1, names the tensor and leaves no folder."""
        state = dict(seeded_layer(6, 2, seed=1).state_dict())
        state["W_v.weight"] = state["W_v.weight"].clone()
        state["W_v.weight"][2, 3] = torch.nan
        save_file(state, tmp_path / "broken.safetensors")
        run = mha(
            "export", "--out", str(tmp_path / "models"), "--checkpoint", str(tmp_path / "broken.safetensors"),
            "--num-heads", "2",
        )  # fmt: skip
        assert run.returncode == 1
        assert "W_v.weight" in run.stderr
        assert "Nothing was published." in run.stderr
        assert not (tmp_path / "models").exists()

    def test_checkpoint_keeps_its_provenance(self, tmp_path: Path) -> None:
        """The manifest says which file, which layer of it and which layout the weights came from."""
        layer = seeded_layer(6, 2, seed=1)
        save_file(
            {f"encoder.{name}": tensor for name, tensor in layer.state_dict().items()}, tmp_path / "w.safetensors"
        )
        run = mha(
            "export", "--out", str(tmp_path / "models"), "--checkpoint", str(tmp_path / "w.safetensors"),
            "--num-heads", "2",
        )  # fmt: skip
        assert run.returncode == 0, run.stderr
        source = json.loads((tmp_path / "models/attention/1/manifest.json").read_text())["source"]
        assert source["kind"] == "checkpoint"
        assert (source["file"], source["layout"], source["prefix"]) == ("w.safetensors", "d2l", "encoder")

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            pytest.param([], "missing --num-hiddens and --num-heads", id="nothing given"),
            pytest.param(["--num-hiddens", "6"], "missing --num-heads", id="half given"),
            pytest.param(["--num-hiddens", "0", "--num-heads", "1"], "0 is not in the range", id="size 0"),
            pytest.param(["--prefix", "encoder"], "--prefix and --layout need --checkpoint", id="prefix without file"),
            pytest.param(
                ["--checkpoint", "w.pt", "--bias", "--seed", "1"], "--bias, --seed: the checkpoint decides", id="both"
            ),
            pytest.param(["--scoring", "cosine"], "'cosine' is not one of", id="unknown scoring"),
            pytest.param(["--precision", "int4"], "'int4' is not", id="unknown precision"),
        ],
    )
    def test_usage(self, tmp_path: Path, arguments: list[str], says: str) -> None:
        """A command that cannot be meant exits with 2 and says what is wrong."""
        run = mha("export", *arguments, cwd=tmp_path)
        assert run.returncode == 2
        assert says in run.stderr

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            pytest.param(["--num-hiddens", "7", "--num-heads", "2"], "multiple of num_heads, got 7 and 2", id="heads"),
            pytest.param(["--checkpoint", "nowhere.pt"], "nowhere.pt: no such file", id="no file"),
            pytest.param(["--num-hiddens", "6", "--num-heads", "2", "--name", "a/b"], "name: got 'a/b'", id="name"),
            pytest.param(
                ["--num-hiddens", "6", "--num-heads", "2", "--precision", "int8", "--calibration", "nowhere.npz"],
                "--calibration nowhere.npz: no such file",
                id="no calibration",
            ),
            pytest.param(
                ["--num-hiddens", "6", "--num-heads", "2", "--calibration", "."],
                "--calibration .: got a file without suffix, want .npz or .safetensors",
                id="calibration is a folder",
            ),
        ],
    )
    def test_refused(self, tmp_path: Path, arguments: list[str], says: str) -> None:
        """What can be meant but not done exits with 1 and publishes nothing."""
        run = mha("export", *arguments, cwd=tmp_path)
        assert run.returncode == 1
        assert says in run.stderr
        assert "Nothing was published." in run.stderr
        assert not list(tmp_path.iterdir())

    def test_existing_version(self, seeds_repository: Path) -> None:
        """An existing version is refused before any work is done."""
        run = mha("export", "--num-hiddens", "6", "--num-heads", "2", "--out", str(seeds_repository))
        assert run.returncode == 1
        assert "exists: choose another --version, or overwrite it with --force" in run.stderr
