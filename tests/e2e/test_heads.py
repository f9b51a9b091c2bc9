"""`mha heads` from the command line: pictures, rankings, and smaller layers that are served."""

import json
import re
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from heads.prune import Settings, Trial
from heads.source import from_artifact
from mha import main
from model.attention import MultiHeadAttention
from tests.conftest import weights_of
from tests.e2e.test_natural_endpoint import ask, close, drawn
from tests.oracle import multi_head_attention
from tests.served import clean_environment, serving, wait_until

ROOT = Path(__file__).parents[2]
SEEDS = ROOT / "examples" / "seeds.json"


def heads(*arguments: str | Path, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """`mha heads`, run."""
    command = [sys.executable, "-m", "mha", "heads", *map(str, arguments)]
    environment = clean_environment() | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=240
    )


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, seeds_layer: MultiHeadAttention) -> Path:
    """Sixty-four entries of 5 queries over up to 7 keys."""
    path = tmp_path_factory.mktemp("inputs") / "inputs.npz"
    np.savez(path, **drawn(seeds_layer, batch=64))
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, seeds_repository: Path) -> Path:
    """The seeds' layer, in a repository that these tests may add to."""
    folder = tmp_path_factory.mktemp("models")
    shutil.copytree(seeds_repository / "attention", folder / "attention")
    return folder


class TestShow:
    """Pictures and habits."""

    def test_seeds_example(self, tmp_path: Path, seeds_repository: Path) -> None:
        """Its keys are all alike, so that every head reads the three that count evenly, and the rest not at all."""
        ended = heads("show", SEEDS, "--model", seeds_repository / "attention" / "1", "--out", tmp_path / "heads.png")
        assert ended.returncode == 0, ended.stderr
        assert f"drawn: {tmp_path / 'heads.png'}" in ended.stdout
        rows = re.findall(r"^\s+(\d)\s+([\d.]+) bits\s+(\d+)%\s+(\S+)\s+([\d.]+)", ended.stdout, re.MULTILINE)
        assert rows == [(str(head), "1.58", "100", "-", "0.333") for head in range(5)]
        signature, width, height = struct.unpack(">8s8xII", (tmp_path / "heads.png").read_bytes()[:24])
        assert signature == b"\x89PNG\r\n\x1a\n"
        assert width > 600
        assert height > 300
        ended = heads("show", SEEDS, "--model", seeds_repository / "attention" / "1", "--out", tmp_path / "heads.svg")
        assert ended.returncode == 0, ended.stderr
        # The three keys that do not count are there, hatched.
        drawing = (tmp_path / "heads.svg").read_text()
        assert re.search(r"<pattern", drawing)
        assert {str(key) for key in range(6)} <= set(re.findall(r">(\d)</text>", drawing))

    def test_chosen_heads_with_labels(self, tmp_path: Path, seeds_repository: Path, inputs: Path) -> None:
        """As SVG, whose text is that of the labels; the same picture has the same bytes."""
        labels = {"queries": ["one", "two", "three", "four", "five"], "keys": ["a", "b", "c", "d", "e", "f", "$g$"]}
        (tmp_path / "labels.json").write_text(json.dumps([labels] * 64))
        flags = ("--model", seeds_repository / "attention" / "1", "--heads", "4,1", "--entry", "2")
        for name in ("one.svg", "two.svg"):
            ended = heads("show", inputs, *flags, "--labels", tmp_path / "labels.json", "--out", tmp_path / name)
            assert ended.returncode == 0, ended.stderr
        drawing = (tmp_path / "one.svg").read_text()
        assert drawing == (tmp_path / "two.svg").read_text()
        assert "head 4" in drawing
        assert "head 1" in drawing
        assert "head 0" not in drawing
        assert "three" in drawing

    def test_from_a_checkpoint(self, tmp_path: Path, seeds_layer: MultiHeadAttention, inputs: Path) -> None:
        """The same habits as from the artefact, since it is the same layer."""
        torch.save(seeds_layer.state_dict(), tmp_path / "layer.pt")
        source = ("--checkpoint", tmp_path / "layer.pt", "--num-heads", "5")
        ended = heads("show", inputs, *source, "--out", tmp_path / "heads.png")
        assert ended.returncode == 0, ended.stderr
        tensors = {name: tensor[:1] for name, tensor in np.load(inputs).items()}
        _, weights = multi_head_attention(weights_of(seeds_layer), 5, **tensors)
        largest = re.findall(r"^\s+\d.*\s([\d.]+)\s*$", ended.stdout, re.MULTILINE)
        assert [float(one) for one in largest] == pytest.approx(weights[0].max(axis=(1, 2)), abs=6e-4)


class TestRank:
    """Importance, from the command line."""

    def test_three_methods_side_by_side(
        self, tmp_path: Path, seeds_repository: Path, seeds_layer: MultiHeadAttention, inputs: Path
    ) -> None:
        """With a target all three; the report holds what is printed, each with its interval."""
        tensors = dict(np.load(inputs))
        weights = weights_of(seeds_layer)
        without = {**weights, "W_o.weight": weights["W_o.weight"].copy()}
        without["W_o.weight"][:, 60:80] = 0
        target, _ = multi_head_attention(without, 5, **tensors)
        np.savez(tmp_path / "target.npz", output=target)
        flags = ("--model", seeds_repository / "attention" / "1", "--target", tmp_path / "target.npz")
        ended = heads("rank", inputs, *flags, "--out", tmp_path / "ranking.json")
        assert ended.returncode == 0, ended.stderr
        report = json.loads((tmp_path / "ranking.json").read_text())
        assert list(report["methods"]) == ["leave-one-out", "gradient", "loss"]
        # What the target lacks is what it is nearer to without.
        assert report["methods"]["loss"]["order"][-1] == 3
        assert report["methods"]["loss"]["heads"][3]["high"] < 0
        whole, _ = multi_head_attention(weights, 5, **tensors)
        changes = np.linalg.norm((whole - target).reshape(64, -1), axis=1) / np.linalg.norm(
            whole.reshape(64, -1), axis=1
        )
        of_head = report["methods"]["leave-one-out"]["heads"][3]
        assert of_head["mean"] == pytest.approx(changes.mean(), rel=1e-4)
        assert of_head["low"] < of_head["mean"] < of_head["high"]
        assert f"{of_head['mean']:.4f}  {of_head['low']:.4f} to {of_head['high']:.4f}" in ended.stdout
        assert "leave-one-out and gradient agree to" in ended.stdout

    def test_killed_and_gone_on_with(self, tmp_path: Path, seeds_layer: MultiHeadAttention) -> None:
        """A ranking of many entries that was ended in the middle keeps what it had, and goes on to the end."""
        torch.save(seeds_layer.state_dict(), tmp_path / "layer.pt")
        np.savez(tmp_path / "many.npz", queries=np.random.default_rng(0).standard_normal((600, 300, 100), np.float32))
        rest = ("--checkpoint", tmp_path / "layer.pt", "--num-heads", "5", "--out")
        command = [sys.executable, "-m", "mha", "heads", "rank", tmp_path / "many.npz", *rest, tmp_path / "killed.json"]
        with subprocess.Popen(list(map(str, command)), cwd=ROOT, stdout=subprocess.DEVNULL) as running:
            wait_until((tmp_path / "killed.json").exists)
            running.send_signal(signal.SIGKILL)
        begun = json.loads((tmp_path / "killed.json").read_text())
        assert 0 < len(begun["scores"]) < 600
        ended = heads("rank", tmp_path / "many.npz", *rest, tmp_path / "killed.json")
        assert ended.returncode == 0, ended.stderr
        whole = json.loads((tmp_path / "killed.json").read_text())
        assert whole["complete"]
        assert len(whole["scores"]) == 600
        assert begun["scores"].items() <= whole["scores"].items()


class TestPrune:
    """Smaller layers."""

    @pytest.mark.parametrize("refit", [False, True], ids=["as it was", "refitted"])
    def test_is_served_beside_the_whole_one(
        self, tmp_path: Path, models: Path, seeds_layer: MultiHeadAttention, inputs: Path, refit: bool
    ) -> None:
        """As the next version, which answers what the whole layer does with those heads zero, weights included; or,
        refitted, something nearer to the whole one."""  # noqa: D205, D209  # one sentence
        before = {folder.name for folder in (models / "attention").iterdir() if folder.is_dir()}
        flags = ["--refit"] if refit else []
        ended = heads("prune", inputs, "--model", models / "attention" / "1", "--heads", "4,1,2", *flags)
        assert ended.returncode == 0, ended.stderr
        (version,) = {folder.name for folder in (models / "attention").iterdir() if folder.is_dir()} - before
        manifest = json.loads((models / "attention" / version / "manifest.json").read_text())
        assert manifest["layer"] == {
            "num_hiddens": 100, "num_heads": 3, "head_size": 20, "query_size": 100, "key_size": 100, "value_size": 100,
            "bias": False, "scoring": "dot_product", "scoring_size": None,
        }  # fmt: skip
        source = manifest["source"]
        assert (source["kept_heads"], source["of_heads"]) == ("1,2,4", 5)
        assert source["refitted"] == ("yes" if refit else "no")
        # Of those on which W_o was fitted: there it has to be nearer.
        fitted_on = np.random.default_rng(0).permutation(64)[:32]
        tensors = {name: tensor[fitted_on] for name, tensor in np.load(inputs).items()}
        zeroed = {name: tensor.copy() for name, tensor in weights_of(seeds_layer).items()}
        zeroed["W_o.weight"][:, 0:20] = zeroed["W_o.weight"][:, 60:80] = 0
        whole, weights = multi_head_attention(weights_of(seeds_layer), 5, **tensors)
        pruned, _ = multi_head_attention(zeroed, 5, **tensors)
        with serving(tmp_path / "log", "--models", str(models)) as server:
            answer = ask(server.client, tensors, version=version, need_weights="true")
            assert close(ask(server.client, tensors, version="1")["output"], whole)
            packed = {name: tensors[name][0] for name in ("queries", "keys", "values")}
            packed |= {"query_lens": np.array([5]), "valid_lens": np.array([7])}
            alone = ask(server.client, packed, version=version)["output"]
            served = server.client.get("/v1/models/attention").json()
        assert close(answer["weights"], weights[:, [1, 2, 4]])
        assert alone.shape == (5, 100)
        assert served["versions"][-1]["layer"]["num_heads"] == 3
        if refit:
            assert np.abs(answer["output"] - pruned).max() > 1e-3
            assert np.linalg.norm(answer["output"] - whole) < np.linalg.norm(pruned - whole)
        else:
            assert np.abs(answer["output"] - pruned).max() <= 1e-6 * np.abs(pruned).max()

    def test_max_error_keeps_as_few_as_it_allows(self, models: Path, inputs: Path, tmp_path: Path) -> None:
        """One fewer would be beyond it, by the sweep of the same inputs."""
        model = ("--model", models / "attention" / "1")
        swept = heads("prune", inputs, *model, "--sweep", "--shape", "none", "--report", tmp_path / "sweep.json")
        assert swept.returncode == 0, swept.stderr
        points = json.loads((tmp_path / "sweep.json").read_text())["curves"]["greedy"]
        bound = (points[2]["error"] + points[3]["error"]) / 2
        ended = heads("prune", inputs, *model, "--max-error", bound, "--out", tmp_path / "out", "--name", "small")
        assert ended.returncode == 0, ended.stderr
        manifest = json.loads((tmp_path / "out" / "small" / "1" / "manifest.json").read_text())
        assert manifest["source"]["kept_heads"] == ",".join(map(str, points[2]["heads"]))
        assert float(manifest["source"]["held_out_error"]) == pytest.approx(points[2]["error"], rel=1e-3)
        # Pruned again, it says which heads of the first layer are left.
        again = heads("prune", inputs, "--model", tmp_path / "out" / "small" / "1", "--heads", "0,2")
        assert again.returncode == 0, again.stderr
        twice = json.loads((tmp_path / "out" / "small" / "2" / "manifest.json").read_text())
        assert twice["source"]["kept_heads"] == f"{points[2]['heads'][0]},{points[2]['heads'][2]}"
        assert (twice["source"]["of_heads"], twice["layer"]["num_heads"]) == (5, 2)
        refused = heads("prune", inputs, *model, "--max-error", "1e-6", "--out", tmp_path / "none")
        assert refused.returncode == 1
        assert "without even one of 5 heads the error is" in refused.stderr
        assert not (tmp_path / "none").exists()

    def test_sweep(self, models: Path, inputs: Path, tmp_path: Path, seeds_layer: MultiHeadAttention) -> None:
        """Errors by every way, chance among them, and speed; on the terminal, as JSON and drawn."""
        files = ("--report", tmp_path / "sweep.json", "--plot", tmp_path / "sweep.svg")
        ended = heads("prune", inputs, "--model", models / "attention" / "1", "--sweep", *files, "--shape", "1x32x32")
        assert ended.returncode == 0, ended.stderr
        report = json.loads((tmp_path / "sweep.json").read_text())
        assert set(report["curves"]) == {"greedy", "leave-one-out", "gradient", "random"}
        for points in report["curves"].values():
            assert [point["kept"] for point in points] == [5, 4, 3, 2, 1]
            assert points[0]["error"] == pytest.approx(0, abs=1e-9)
        assert report["fitted_on"]["entries"] == report["held_out"]["entries"] == 32
        assert set(report["faster"]) == {"1", "2", "3", "4", "5"}
        assert report["faster"]["5"] == pytest.approx(1, abs=0.01)
        # One head of five is the fastest there is. By how much is for the benchmark to say, not for a test.
        assert report["faster"]["1"] > 1
        for count, ratio in report["faster"].items():
            assert re.search(rf"^\s+{count}\s.*{ratio:.2f}x", ended.stdout, re.MULTILINE)
        drawing = (tmp_path / "sweep.svg").read_text()
        assert all(name in drawing for name in ("heads kept", "nine of ten random choices", "times faster"))
        # Of one point the error itself, by the oracle, on the entries that were held out.
        (kept,) = [point for point in report["curves"]["greedy"] if point["kept"] == 2]
        tensors = dict(np.load(inputs))
        others = np.sort(np.random.default_rng(0).permutation(64)[32:])
        held_out = {name: tensor[others] for name, tensor in tensors.items()}
        zeroed = {name: tensor.copy() for name, tensor in weights_of(seeds_layer).items()}
        for head in set(range(5)) - set(kept["heads"]):
            zeroed["W_o.weight"][:, 20 * head : 20 * head + 20] = 0
        whole, _ = multi_head_attention(weights_of(seeds_layer), 5, **held_out)
        pruned, _ = multi_head_attention(zeroed, 5, **held_out)
        assert kept["error"] == pytest.approx(np.linalg.norm(pruned - whole) / np.linalg.norm(whole), rel=1e-4)

    def test_by_a_ranking(self, models: Path, inputs: Path, tmp_path: Path) -> None:
        """What was ranked decides who goes first."""
        model = models / "attention" / "1"
        ranked = heads("rank", inputs, "--model", model, "--out", tmp_path / "ranking.json")
        assert ranked.returncode == 0, ranked.stderr
        settings = Settings(
            inputs, None, {"--target": None, "--gradients": None}, tmp_path / "ranking.json", "gradient",
            refit=False, seed=0,
        )  # fmt: skip
        order = json.loads((tmp_path / "ranking.json").read_text())["methods"]["gradient"]["order"]
        points = Trial(from_artifact(model), settings).points
        assert [set(point.heads) for point in points] == [set(order[:kept]) for kept in (5, 4, 3, 2, 1)]


class TestMistakes:
    """Said in one line, with nothing written."""

    @pytest.mark.parametrize(
        ("arguments", "status", "said"),
        [
            (("show", "IN"), 2, "give either --model, an artefact's folder, or --checkpoint"),
            (("show", "IN", "--model", "M", "--prefix", "x"), 2, "need --checkpoint"),
            (("show", "IN", "--model", "nowhere"), 1, "want an artefact's folder, such as models/attention/1"),
            (("show", "IN", "--checkpoint", "absent.pt"), 1, "absent.pt"),
            (("show", "absent.npz", "--model", "M"), 1, "absent.npz: No such file"),
            (("show", "IN", "--model", "M", "--entry", "64"), 1, "has 64, counted from 0"),
            (("show", "IN", "--model", "M", "--heads", "0,5"), 1, "got '0,5', want some of 0 to 4"),
            (("show", "IN", "--model", "M", "--heads", "0,0"), 1, "each once"),
            (("show", "IN", "--model", "M", "--heads", ""), 1, "want some of 0 to 4"),
            (("show", "IN", "--model", "M", "--out", "x.gif"), 1, "got .gif, want .png, .svg, .pdf"),
            (("show", "IN", "--model", "M", "--out", "no/x.png"), 1, "no such folder"),
            (("show", "IN", "--model", "M", "--labels", "absent.json"), 1, "absent.json"),
            (("rank", "IN", "--model", "M", "--out", "no/x.json"), 1, "no such folder"),
            (("rank", "IN", "--model", "M", "--target", "absent.npz"), 1, "--target absent.npz"),
            (("prune", "IN", "--model", "M"), 2, "give one of --keep, --max-error, --heads and --sweep"),
            (("prune", "IN", "--model", "M", "--keep", "2", "--sweep"), 2, "give one of"),
            (("prune", "IN", "--model", "M", "--keep", "2", "--plot", "x.png"), 2, "are of --sweep"),
            (("prune", "IN", "--model", "M", "--keep", "5"), 1, "the layer has 5 heads"),
            (("prune", "IN", "--model", "M", "--keep", "2", "--by", "loss"), 1, "wants --target"),
            (("prune", "IN", "--model", "M", "--keep", "2", "--version", "1"), 1, "exists: choose another --version"),
            (("prune", "IN", "--model", "M", "--sweep", "--shape", "1x2"), 2, "want batch, queries and keys"),
            (("prune", "IN", "--model", "M", "--sweep", "--report", "no/x.json"), 1, "no such folder"),
            (("prune", "IN", "--model", "M", "--keep", "2", "--ranking", "absent.json"), 1, "no such file"),
        ],
        ids=lambda value: " ".join(value)[:60] if isinstance(value, tuple) else None,
    )
    def test_is_said(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, models: Path, inputs: Path,
        arguments: Sequence[str], status: int, said: str,
    ) -> None:  # fmt: skip
        """What, where, got, want."""
        monkeypatch.chdir(tmp_path)
        names = {"IN": str(inputs), "M": str(models / "attention" / "1")}
        ended = CliRunner().invoke(main, ["heads", *(names.get(argument, argument) for argument in arguments)])
        assert isinstance(ended.exception, SystemExit)
        assert ended.exit_code == status, ended.output
        assert said in ended.stderr
        assert list(tmp_path.iterdir()) == []

    def test_other_precisions(self, models: Path, inputs: Path, tmp_path: Path) -> None:
        """Rounded weights are not the layer's."""
        shutil.copytree(models / "attention" / "1", tmp_path / "1")
        manifest = json.loads((tmp_path / "1" / "manifest.json").read_text())
        (tmp_path / "1" / "manifest.json").write_text(json.dumps({**manifest, "precision": "int8"}))
        ended = heads("show", inputs, "--model", tmp_path / "1", "--out", tmp_path / "x.png")
        assert ended.returncode == 1
        assert "its projections are int8; want the layer as fp32 exported it" in ended.stderr

    def test_changed_artefact(self, models: Path, inputs: Path, tmp_path: Path) -> None:
        """Bytes that the manifest does not know are not looked at."""
        shutil.copytree(models / "attention" / "1", tmp_path / "1")
        graph = bytearray((tmp_path / "1" / "model.onnx").read_bytes())
        graph[len(graph) // 2] ^= 1
        (tmp_path / "1" / "model.onnx").write_bytes(bytes(graph))
        ended = heads("show", inputs, "--model", tmp_path / "1", "--out", tmp_path / "x.png")
        assert ended.returncode == 1
        assert "is not what its manifest says" in ended.stderr


@pytest.mark.parametrize("command", ["", "show", "rank", "prune"])
def test_help(command: str) -> None:
    """Every command says what it does, and what each of its options is."""
    ended = CliRunner().invoke(main, ["heads", *([command] if command else []), "--help"])
    assert ended.exit_code == 0
    shown = ended.output.split("Options:")[1]
    options = re.findall(r"^  (?:-h, )?(--[a-z-]+)(.*(?:\n {4,}.*)*)", shown, re.MULTILINE)
    assert len(options) >= (1 if not command else 9)
    assert all(re.search(r"[A-Za-z]{2,} [a-zA-Z]", said) for _, said in options)


def test_lazily_imported() -> None:
    """`mha --help` names the command, and imports nothing for it."""
    code = "import sys; from mha import main; main(['--help'], standalone_mode=False); print('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "heads" in ended.stdout
    assert ended.stdout.strip().endswith("False")
