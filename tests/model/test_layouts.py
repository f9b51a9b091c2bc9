"""Recognition of layers by tensor names, and of what a config.json says, on the names that published files have."""

import re

import pytest

from model.layouts import LAYOUTS, Place, config_of, configured_heads, find_layers, other_function


def linears(prefix: str, *modules: str) -> list[str]:
    return [f"{prefix}{module}.{kind}" for module in modules for kind in ("weight", "bias")]


# What stands in the files of the Hugging Face hub, of torch.nn.TransformerEncoder and of the seeds.
PUBLISHED = {
    "bert-base-uncased": (
        [
            *linears("bert.encoder.layer.0.attention.self.", "query", "key", "value"),
            *linears("bert.encoder.layer.0.attention.", "output.dense"),
            "bert.encoder.layer.0.attention.output.LayerNorm.gamma",
            "bert.encoder.layer.0.attention.output.LayerNorm.beta",
            *linears("bert.encoder.layer.0.", "intermediate.dense", "output.dense"),
        ],
        "bert.encoder.layer.0.attention (bert)",
    ),
    "google/vit-base-patch16-224": (
        [
            *linears("vit.encoder.layer.0.attention.attention.", "query", "key", "value"),
            *linears("vit.encoder.layer.0.attention.", "output.dense"),
            *linears("vit.encoder.layer.0.", "intermediate.dense", "output.dense", "layernorm_before"),
        ],
        "vit.encoder.layer.0.attention (bert)",
    ),
    "distilbert-base-uncased": (
        [
            *linears("distilbert.transformer.layer.0.attention.", "q_lin", "k_lin", "v_lin", "out_lin"),
            *linears("distilbert.transformer.layer.0.", "ffn.lin1", "ffn.lin2", "sa_layer_norm"),
        ],
        "distilbert.transformer.layer.0.attention (distilbert)",
    ),
    "gpt2": (
        ["h.0.attn.bias", *linears("h.0.attn.", "c_attn", "c_proj"), *linears("h.0.mlp.", "c_fc", "c_proj")],
        "h.0.attn (gpt2)",
    ),
    "openai/clip-vit-base-patch32": (
        [
            *linears("text_model.encoder.layers.0.self_attn.", "q_proj", "k_proj", "v_proj", "out_proj"),
            *linears("text_model.encoder.layers.0.", "mlp.fc1", "layer_norm1"),
        ],
        "text_model.encoder.layers.0.self_attn (proj)",
    ),
    "torch.nn.TransformerEncoder": (
        [
            *("layers.0.self_attn.in_proj_weight", "layers.0.self_attn.in_proj_bias"),
            *linears("layers.0.self_attn.", "out_proj"),
            *linears("layers.0.", "linear1", "linear2", "norm1"),
        ],
        "layers.0.self_attn (torch)",
    ),
    "d2l.TransformerEncoder": (
        [f"blks.block0.attention.W_{letter}.weight" for letter in "qkvo"],
        "blks.block0.attention (d2l)",
    ),
    "d2l.MultiHeadAttention": ([f"W_{letter}.weight" for letter in "qkvo"], "the top of the file (d2l)"),
}


class TestFindLayers:
    @pytest.mark.parametrize(("names", "found"), PUBLISHED.values(), ids=PUBLISHED.keys())
    def test_finds_the_published_layer(self, names: list[str], found: str) -> None:
        """Each published file's names give one layer, with nothing missing and nothing left over."""
        (place,) = find_layers(names)
        assert str(place) == found
        assert place.missing(names) == []
        assert place.left_over(names) == []

    def test_every_layout_is_published(self) -> None:
        """No layout goes untested here, and the layouts are the documented ones."""
        assert LAYOUTS == ("d2l", "torch", "bert", "distilbert", "gpt2", "proj")
        assert {found.partition(" (")[2].rstrip(")") for _, found in PUBLISHED.values()} == set(LAYOUTS)

    def test_orders_numbers_as_numbers(self) -> None:
        """Layer 2 comes before layer 10."""
        names = [f"h.{number}.attn.c_attn.weight" for number in (10, 2, 1)]
        assert [place.prefix for place in find_layers(names)] == ["h.1.attn", "h.2.attn", "h.10.attn"]

    def test_layout_narrows(self) -> None:
        """With a layout named, layers of others are not looked at."""
        names = ["a.q_lin.weight", "b.q_proj.weight"]
        assert [place.prefix for place in find_layers(names, "proj")] == ["b"]

    @pytest.mark.parametrize("absent", ["q_proj", "k_proj", "v_proj", "out_proj"])
    def test_an_incomplete_layer_is_found(self, absent: str) -> None:
        """A layer that lacks a tensor is still recognised, so that the missing one can be named."""
        names = [f"a.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "out_proj") if name != absent]
        (place,) = find_layers(names)
        assert place.missing(names) == [f"a.{absent}.weight"]

    def test_a_mark_must_be_a_whole_name(self) -> None:
        """`xq_proj.weight` is not `q_proj.weight`."""
        assert find_layers(["a.xq_proj.weight", "q_proj.weight.scale"]) == ()


class TestPlace:
    @pytest.mark.parametrize(
        ("ancestor", "under"),
        [
            pytest.param("", True, id="top"),
            pytest.param("encoder.layer.10", True, id="ancestor"),
            pytest.param("encoder.layer.10.", True, id="trailing_dot"),
            pytest.param("encoder.layer.10.attention", True, id="itself"),
            pytest.param("encoder.layer.1", False, id="not_at_a_dot"),
            pytest.param("layer.10", False, id="not_from_the_top"),
            pytest.param("encoder.layer.10.attention.self", False, id="below"),
        ],
    )
    def test_under(self, ancestor: str, under: bool) -> None:
        """An ancestor ends at a dot of the prefix and starts at the top."""
        (place,) = find_layers(["encoder.layer.10.attention.self.query.weight"])
        assert isinstance(place, Place)
        assert place.under(ancestor) is under


CLIP = {"text_config": {"num_attention_heads": 2}, "vision_config": {"num_attention_heads": 3}}
BART = {"encoder_attention_heads": 5, "decoder_attention_heads": 7}
PAIR = {"encoder": {"num_attention_heads": 11}, "decoder": {"n_head": 13}, "num_heads": 17}


class TestConfiguredHeads:
    @pytest.mark.parametrize(
        ("config", "prefix", "found"),
        [
            pytest.param({"num_attention_heads": 3}, "encoder.layer.0", ("num_attention_heads", 3), id="bert"),
            pytest.param({"n_head": 3}, "h.0.attn", ("n_head", 3), id="gpt2"),
            pytest.param({"n_heads": 3}, "transformer.layer.0", ("n_heads", 3), id="distilbert"),
            pytest.param({"num_heads": 3}, "", ("num_heads", 3), id="num_heads"),
            pytest.param(CLIP, "text_model.encoder.layers.0", ("num_attention_heads", 2), id="clip_text"),
            pytest.param(CLIP, "vision_model.encoder.layers.0", ("num_attention_heads", 3), id="clip_vision"),
            pytest.param(CLIP, "visual.layers.0", None, id="clip_neither"),
            pytest.param(BART, "model.encoder.layers.0", ("encoder_attention_heads", 5), id="bart_encoder"),
            pytest.param(BART, "decoder.layers.0.encoder_attn", ("decoder_attention_heads", 7), id="bart_decoder"),
            pytest.param(BART, "layers.0", None, id="bart_neither"),
            pytest.param(PAIR, "encoder.encoder.layer.0", ("num_attention_heads", 11), id="nested_encoder"),
            pytest.param(PAIR, "decoder.h.0.attn", ("n_head", 13), id="nested_decoder"),
            pytest.param({"num_attention_heads": None, "n_head": 3}, "", ("n_head", 3), id="null_is_absent"),
            pytest.param({"hidden_size": 3}, "", None, id="no_key"),
            pytest.param({"text_config": None, "n_head": 3}, "text_model", ("n_head", 3), id="null_part"),
            pytest.param({"encoder": "bert", "n_head": 3}, "encoder.layer.0", ("n_head", 3), id="part_is_a_name"),
            pytest.param({**BART, "n_head": 3}, "encoder.layers.0", ("encoder_attention_heads", 5), id="own_key_first"),
        ],
    )
    def test_key_is_picked_by_the_prefix(
        self, config: dict[str, object], prefix: str, found: tuple[str, object] | None
    ) -> None:
        """The part of the config that the prefix stands in gives the number of heads, by the key it uses."""
        assert configured_heads(config_of(config, prefix), prefix) == found


class TestOtherFunction:
    @pytest.mark.parametrize(
        ("config", "said"),
        [
            pytest.param({"rope_theta": 1e4}, "rope_theta is 10000.0: rotary", id="mistral"),
            pytest.param({"rope_parameters": {"rope_type": "default"}}, "rope_parameters is .*: rotary", id="llama"),
            pytest.param({"rope_scaling": None}, "rope_scaling is None: rotary", id="llama2"),
            pytest.param({"model_type": "llama"}, "model_type is 'llama': rotary", id="llama1"),
            pytest.param({"rotary_dim": 64}, "rotary_dim is 64: rotary", id="gptj"),
            pytest.param({"rotary_value": False}, "rotary_value is False: rotary", id="roformer"),
            pytest.param({"position_embedding_type": "rotary"}, "position_embedding_type is 'rotary'", id="esm"),
            pytest.param({"position_embedding_type": "relative_key"}, "'relative_key': positions", id="relative_key"),
            pytest.param({"position_embedding_type": "relative_key_query"}, "relative_key_query", id="key_query"),
            pytest.param({"position_embedding_type": "alibi"}, "'alibi': positions", id="jina"),
            pytest.param({"has_relative_attention_bias": True}, "has_relative_attention_bias is True", id="layoutlmv3"),
            pytest.param({"model_type": "gpt_neo"}, "'gpt_neo': scores are not divided", id="gpt_neo"),
            pytest.param({"scale_attn_weights": False}, "scale_attn_weights is False: scores", id="unscaled"),
            pytest.param({"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx is True", id="inverse_layer"),
        ],
    )
    def test_says_why(self, config: dict[str, object], said: str) -> None:
        """A config of another function is told by the key and value that give it away."""
        assert re.search(said, other_function(config) or "")

    @pytest.mark.parametrize(
        "config",
        [
            pytest.param({}, id="empty"),
            pytest.param({"model_type": "bert", "position_embedding_type": "absolute"}, id="bert"),
            pytest.param(
                {"model_type": "gpt2", "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}, id="gpt2"
            ),
        ],
    )
    def test_none_for_the_same_function(self, config: dict[str, object]) -> None:
        """What published BERT and GPT-2 configs say is no reason to refuse."""
        assert other_function(config) is None
