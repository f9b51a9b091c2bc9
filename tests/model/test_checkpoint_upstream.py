"""Layers cut out of published models: the layer we load answers what the module that its weights come from answers.

The modules are the real ones of transformers and torch, tiny and drawn at random, saved as they save themselves.
Sizes are distinct primes, or products of them. Nothing is downloaded.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

from model.checkpoint import CheckpointError, load_layer

HEADS, NUM_HIDDENS = 7, 7 * 11


def assert_same_function(got: Tensor, want: Tensor) -> None:
    """Equal to float32 rounding: 1e-5 of the largest value."""
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * want.abs().max().item())


def draw_parameters(module: nn.Module) -> None:
    """Parameters far from the zeros and ones that upstream starts from, so that a lost bias shows."""
    random = torch.Generator().manual_seed(23)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.3, generator=random)


# Hugging Face models

TEXT = {"vocab_size": 29, "max_position_embeddings": 31, "num_hidden_layers": 2}
VISION = {"image_size": 6, "patch_size": 3, "num_hidden_layers": 1}
SIDES = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 37, "decoder_ffn_dim": 37}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZE = {"hidden_size": NUM_HIDDENS, "num_attention_heads": HEADS, "intermediate_size": 37}


def bert() -> nn.Module:
    return transformers.BertModel(transformers.BertConfig(**TEXT, **SIZE, **TOKENS))


def roberta() -> nn.Module:
    return transformers.RobertaModel(transformers.RobertaConfig(**TEXT, **SIZE, **TOKENS))


def distilbert() -> nn.Module:
    sizes = {"dim": NUM_HIDDENS, "n_heads": HEADS, "n_layers": 1, "hidden_dim": 37}
    config = transformers.DistilBertConfig(vocab_size=29, max_position_embeddings=31, **sizes, **TOKENS)
    return transformers.DistilBertModel(config)


def gpt2() -> nn.Module:
    sizes = {"n_embd": NUM_HIDDENS, "n_head": HEADS, "n_layer": 2, "n_positions": 31}
    return transformers.GPT2Model(transformers.GPT2Config(vocab_size=29, **sizes, **TOKENS))


def clip() -> nn.Module:
    vision = {"hidden_size": 39, "num_attention_heads": 3, "intermediate_size": 41}
    config = transformers.CLIPConfig(text_config={**TEXT, **SIZE, **TOKENS}, vision_config={**VISION, **vision})
    return transformers.CLIPModel(config)


def bart() -> nn.Module:
    heads = {"encoder_attention_heads": HEADS, "decoder_attention_heads": 11}
    tokens = {**TOKENS, "decoder_start_token_id": 2, "forced_eos_token_id": 2}
    config = transformers.BartConfig(
        vocab_size=29, max_position_embeddings=31, d_model=NUM_HIDDENS, **SIDES, **heads, **tokens
    )
    return transformers.BartModel(config)


def whisper() -> nn.Module:
    heads = {"encoder_attention_heads": HEADS, "decoder_attention_heads": 11}
    lengths = {"num_mel_bins": 43, "max_source_positions": 5, "max_target_positions": 31}
    config = transformers.WhisperConfig(
        vocab_size=29, d_model=2 * NUM_HIDDENS, **SIDES, **heads, **lengths, **TOKENS, decoder_start_token_id=2
    )
    return transformers.WhisperModel(config)


def opt() -> nn.Module:
    sizes = {"hidden_size": NUM_HIDDENS, "num_attention_heads": HEADS, "ffn_dim": 37}
    config = transformers.OPTConfig(**TEXT, **sizes, **TOKENS, word_embed_proj_dim=NUM_HIDDENS)
    return transformers.OPTModel(config)


def vit() -> nn.Module:
    return transformers.ViTModel(transformers.ViTConfig(**VISION, **SIZE))


IDS = torch.randint(3, 29, (2, 5), generator=torch.Generator().manual_seed(31))
MASK = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
PIXELS = torch.randn((2, 3, 6, 6), generator=torch.Generator().manual_seed(37))
SOUND = torch.randn((2, 43, 10), generator=torch.Generator().manual_seed(41))
PADDED_TEXT = {"input_ids": IDS, "attention_mask": MASK}
TRANSLATION = {**PADDED_TEXT, "decoder_input_ids": IDS[:, :3]}
TRANSCRIPTION = {"input_features": SOUND, "decoder_input_ids": IDS[:, :3]}

PADDED = torch.tensor([3, 5])
CAUSAL = torch.tensor([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]])
CAUSAL_PADDED = torch.minimum(CAUSAL, PADDED[:, None])


@dataclass(frozen=True)
class Upstream:
    """A published model, and one of its attention layers: where the file and the module have it, and what it sees."""

    model: Callable[[], nn.Module]
    inputs: Mapping[str, Tensor]
    layout: str
    prefix: str
    modules: tuple[str, str, str, str]
    valid_lens: Tensor | None
    num_heads: int = HEADS


def of_modules(prefix: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{prefix}.{name}" for name in names)


def proj(prefix: str) -> tuple[str, ...]:
    return of_modules(prefix, "q_proj", "k_proj", "v_proj", "out_proj")


BERT_MODULES = of_modules("encoder.layer.1.attention", "self.query", "self.key", "self.value", "output.dense")
DISTILBERT_MODULES = of_modules("transformer.layer.0.attention", "q_lin", "k_lin", "v_lin", "out_lin")
GPT2_MODULES = of_modules("h.1.attn", "c_attn", "c_attn", "c_attn", "c_proj")
VIT_MODULES = of_modules("layers.0.attention", "q_proj", "k_proj", "v_proj", "o_proj")
CLIP_TEXT, CLIP_VISION = (f"{side}_model.encoder.layers.0.self_attn" for side in ("text", "vision"))
SEEN_BY_CLIP = {**PADDED_TEXT, "pixel_values": PIXELS}

UPSTREAM = {
    "bert": Upstream(bert, PADDED_TEXT, "bert", "encoder.layer.1.attention", BERT_MODULES, PADDED),
    "roberta": Upstream(roberta, PADDED_TEXT, "bert", "encoder.layer.1.attention", BERT_MODULES, PADDED),
    "vit": Upstream(vit, {"pixel_values": PIXELS}, "bert", "encoder.layer.0.attention", VIT_MODULES, None),
    "distilbert": Upstream(
        distilbert, PADDED_TEXT, "distilbert", "transformer.layer.0.attention", DISTILBERT_MODULES, PADDED
    ),
    "gpt2": Upstream(gpt2, {"input_ids": IDS}, "gpt2", "h.1.attn", GPT2_MODULES, CAUSAL),
    "gpt2_padded": Upstream(gpt2, PADDED_TEXT, "gpt2", "h.1.attn", GPT2_MODULES, CAUSAL_PADDED),
    "clip_text": Upstream(clip, SEEN_BY_CLIP, "proj", CLIP_TEXT, proj(CLIP_TEXT), CAUSAL_PADDED),
    "clip_vision": Upstream(clip, SEEN_BY_CLIP, "proj", CLIP_VISION, proj(CLIP_VISION), None, 3),
    **{
        f"bart_{name}": Upstream(bart, TRANSLATION, "proj", prefix, proj(prefix), valid_lens, heads)
        for name, prefix, valid_lens, heads in (
            ("encoder", "encoder.layers.0.self_attn", PADDED, HEADS),
            ("decoder", "decoder.layers.0.self_attn", CAUSAL[:, :3], 11),
            ("cross", "decoder.layers.0.encoder_attn", PADDED, 11),
        )
    },
    **{
        f"whisper_{name}": Upstream(whisper, TRANSCRIPTION, "proj", prefix, proj(prefix), None, heads)
        for name, prefix, heads in (
            ("encoder", "encoder.layers.0.self_attn", HEADS),
            ("cross", "decoder.layers.0.encoder_attn", 11),
        )
    },
    "opt": Upstream(
        opt,
        PADDED_TEXT,
        "proj",
        "decoder.layers.1.self_attn",
        proj("decoder.layers.1.self_attn"),
        CAUSAL_PADDED,
    ),
}


def watch(model: nn.Module, upstream: Upstream) -> tuple[list[Tensor], Tensor]:
    """What the model's own attention layer gets as queries, keys and values, and what its last projection answers."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    *projections, output = upstream.modules
    for name in upstream.modules:
        model.get_submodule(name).register_forward_hook(
            lambda _, args, out, name=name: seen.update({name: (*args, out)})
        )
    with torch.no_grad():
        model(**upstream.inputs)
    return [seen[name][0] for name in projections], seen[output][1]


class TestUpstreamModels:
    @pytest.mark.parametrize("upstream", UPSTREAM.values(), ids=UPSTREAM.keys())
    @torch.no_grad()
    def test_layer_is_the_models_own(self, upstream: Upstream, tmp_path: Path) -> None:
        """A layer cut out of a published model answers what that model's sub-layer answers, masks as valid_lens."""
        model = upstream.model().eval()
        model.set_attn_implementation("eager")
        draw_parameters(model)
        model.save_pretrained(tmp_path)
        loaded = load_layer(tmp_path / "model.safetensors", prefix=upstream.prefix)
        assert (loaded.layout, loaded.prefix) == (upstream.layout, upstream.prefix)
        assert loaded.layer.num_heads == upstream.num_heads
        inputs, want = watch(model, upstream)
        assert_same_function(loaded.layer(*inputs, upstream.valid_lens), want)

    def test_llama_is_refused(self, tmp_path: Path) -> None:
        """A Llama-like model has the right names but rotary positions: the config.json it is saved with says so."""
        config = transformers.LlamaConfig(**TEXT, **SIZE, **TOKENS, head_dim=2)
        transformers.LlamaModel(config).save_pretrained(tmp_path)
        with pytest.raises(
            CheckpointError, match=r"config.json: rope_parameters is .*: rotary .* not compute the same"
        ):
            load_layer(tmp_path / "model.safetensors", prefix="layers.0")


class TestTorchModule:
    @pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
    @pytest.mark.parametrize("sizes", [{}, {"kdim": 17, "vdim": 19}], ids=["packed", "separate"])
    @torch.no_grad()
    def test_layer_is_torchs(self, sizes: dict[str, int], bias: bool, tmp_path: Path) -> None:
        """nn.MultiheadAttention, with one packed projection or with sizes of their own for keys and values."""
        module = nn.MultiheadAttention(NUM_HIDDENS, HEADS, bias=bias, batch_first=True, **sizes).eval()
        draw_parameters(module)
        save_file(module.state_dict(), tmp_path / "layer.safetensors")
        loaded = load_layer(tmp_path / "layer.safetensors", num_heads=HEADS)
        assert (loaded.layout, loaded.prefix) == ("torch", "")
        queries, keys = torch.randn(2, 3, NUM_HIDDENS), torch.randn(2, 5, sizes.get("kdim", NUM_HIDDENS))
        values, valid_lens = torch.randn(2, 5, sizes.get("vdim", NUM_HIDDENS)), torch.tensor([2, 5])
        padding = torch.arange(5) >= valid_lens[:, None]
        want, _ = module(queries, keys, values, key_padding_mask=padding)
        assert_same_function(loaded.layer(queries, keys, values, valid_lens), want)
