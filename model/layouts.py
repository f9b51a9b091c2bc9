"""How published models name things: the tensors of an attention layer, and the keys of their `config.json`.

A new kind of file is a new row of a table here. Data and pure functions on strings: imports the standard library only.
A name is local when it stands below the layer's prefix, as `self.query.weight` below `encoder.layer.0.attention`.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final

# Keys of additive scoring, in this layer's state dict and in d2l's.
SCORING: Final = ("attention.W_q.weight", "attention.W_k.weight", "attention.w_v.weight")


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a file keeps one tensor: its local name, and which third of the first axis if q, k and v are packed."""

    local: str
    part: int | None = None


@dataclass(frozen=True, slots=True)
class Naming:
    """One way to name a layer's tensors; a layout has one or several.

    Attributes:
        layout: what users call it.
        tensors: for each name in this layer's state dict, where it is stored.
        marks: local names, any of which says that a layer is here.
        ignored: local names of tensors known not to be part of attention.
        transposed: weights are (in, out), as in Hugging Face's Conv1D.
    """

    layout: str
    tensors: Mapping[str, Stored]
    marks: tuple[str, ...]
    ignored: tuple[str, ...] = ()
    transposed: bool = False

    @property
    def known(self) -> frozenset[str]:
        """Every local name that may stand below the prefix."""
        return frozenset((*(stored.local for stored in self.tensors.values()), *self.ignored))


@dataclass(frozen=True, slots=True)
class Place:
    """A layer found in a file: how it is named and the prefix it stands below, without trailing dot, "" for the top."""

    naming: Naming
    prefix: str

    def __str__(self) -> str:
        return f"{self.prefix or 'the top of the file'} ({self.naming.layout})"

    def name(self, local: str) -> str:
        """The name in the file."""
        return f"{self.prefix}.{local}" if self.prefix else local

    def origin(self, key: str) -> str:
        """The name in the file of the tensor that holds `key` of the layer's state dict."""
        return self.name(self.naming.tensors[key].local)

    def present(self, names: Collection[str]) -> list[str]:
        """The keys of the layer's state dict that a file with these tensors has."""
        return [key for key in self.naming.tensors if self.origin(key) in names]

    def missing(self, names: Collection[str]) -> list[str]:
        """Tensors that should stand beside the ones found. Biases may be absent, and scoring if all of it is."""
        keys = [key for key in self.naming.tensors if key.endswith(".weight")]
        if not any(self.name(key) in names for key in SCORING):
            keys = [key for key in keys if key not in SCORING]
        return [name for key in keys if (name := self.origin(key)) not in names]

    def left_over(self, names: Collection[str]) -> list[str]:
        """Tensors below the prefix that the naming does not know."""
        known = {self.name(local) for local in self.naming.known}
        return [name for name in names if is_below(name, self.prefix) and name not in known]

    def under(self, ancestor: str) -> bool:
        """Whether `ancestor`, with or without trailing dot, is this prefix or a dotted ancestor of it."""
        return is_below(self.prefix, ancestor.removesuffix("."))


def is_below(name: str, ancestor: str) -> bool:
    """Whether `ancestor` is `name` or stands above it at a dot; "" stands above everything."""
    return not ancestor or name == ancestor or name.startswith(ancestor + ".")


def _linear(projection: str, module: str) -> dict[str, Stored]:
    return {f"{projection}.{kind}": Stored(f"{module}.{kind}") for kind in ("weight", "bias")}


def _linears(query: str, key: str, value: str, output: str) -> dict[str, Stored]:
    return {**_linear("W_q", query), **_linear("W_k", key), **_linear("W_v", value), **_linear("W_o", output)}


def _packed(kind: str, local: str) -> dict[str, Stored]:
    return {f"{projection}.{kind}": Stored(local, part) for part, projection in enumerate(("W_q", "W_k", "W_v"))}


_BERT_NORM: Final = tuple(f"output.LayerNorm.{name}" for name in ("weight", "bias", "gamma", "beta"))

NAMINGS: Final = (
    # Dive into Deep Learning. W_q and W_k are no marks: additive scoring has tensors of the same names one level below.
    Naming(
        "d2l",
        {**_linears("W_q", "W_k", "W_v", "W_o"), **{name: Stored(name) for name in SCORING}},
        marks=("W_v.weight", "W_o.weight"),
    ),
    # torch.nn.MultiheadAttention, then the same with kdim or vdim.
    Naming(
        "torch",
        {**_packed("weight", "in_proj_weight"), **_packed("bias", "in_proj_bias"), **_linear("W_o", "out_proj")},
        marks=("in_proj_weight", "in_proj_bias"),
    ),
    Naming(
        "torch",
        {
            **{f"W_{letter}.weight": Stored(f"{letter}_proj_weight") for letter in "qkv"},
            **_packed("bias", "in_proj_bias"),
            **_linear("W_o", "out_proj"),
        },
        marks=("q_proj_weight", "k_proj_weight", "v_proj_weight"),
    ),
    # BERT and RoBERTa, then ViT, whose inner module is `attention` and not `self`.
    *(
        Naming(
            "bert",
            _linears(f"{inner}.query", f"{inner}.key", f"{inner}.value", "output.dense"),
            marks=(f"{inner}.query.weight", f"{inner}.key.weight", f"{inner}.value.weight"),
            ignored=_BERT_NORM,
        )
        for inner in ("self", "attention")
    ),
    Naming(
        "distilbert",
        _linears("q_lin", "k_lin", "v_lin", "out_lin"),
        marks=("q_lin.weight", "k_lin.weight", "v_lin.weight"),
    ),
    # The ignored ones are buffers with the causal mask, present in files of older versions.
    Naming(
        "gpt2",
        {**_packed("weight", "c_attn.weight"), **_packed("bias", "c_attn.bias"), **_linear("W_o", "c_proj")},
        marks=("c_attn.weight", "c_attn.bias"),
        ignored=("bias", "masked_bias"),
        transposed=True,
    ),
    # CLIP, BART, OPT and Whisper, then those that say o_proj.
    *(
        Naming(
            "proj",
            _linears("q_proj", "k_proj", "v_proj", output),
            marks=("q_proj.weight", "k_proj.weight", "v_proj.weight"),
        )
        for output in ("out_proj", "o_proj")
    ),
)
LAYOUTS: Final = tuple(dict.fromkeys(naming.layout for naming in NAMINGS))


def find_layers(names: Collection[str], layout: str = "auto") -> tuple[Place, ...]:
    """The layers among a file's tensor names, ordered by prefix with numbers as numbers; `layout` narrows the search.

    Where two namings of one layout fit a prefix, the one of which more tensors are present is taken.
    """
    namings = [naming for naming in NAMINGS if layout in ("auto", naming.layout)]
    marked = [Place(naming, prefix) for naming in namings for prefix in _marked_prefixes(naming, names)]
    places: dict[tuple[str, str], Place] = {}
    for place in sorted(marked, key=lambda place: len(place.present(names)), reverse=True):
        places.setdefault((place.naming.layout, place.prefix), place)
    return tuple(sorted(places.values(), key=lambda place: _natural(place.prefix)))


def _marked_prefixes(naming: Naming, names: Collection[str]) -> set[str]:
    ends = tuple("." + mark for mark in naming.marks)
    dotted = ["." + name for name in names]
    return {name.removesuffix(end)[1:] for name in dotted for end in ends if name.endswith(end)}


def _natural(prefix: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", prefix)]


# config.json: the part of a model a dotted name stands in, and how that part's keys are called.
_SUBCONFIGS: Final = {
    "text_model": "text_config",
    "language_model": "text_config",
    "vision_model": "vision_config",
    "vision_tower": "vision_config",
    "encoder": "encoder",
    "decoder": "decoder",
}
_HEADS_BY_SIDE: Final = {"encoder": "encoder_attention_heads", "decoder": "decoder_attention_heads"}
_HEADS: Final = ("num_attention_heads", "n_head", "n_heads", "num_heads")


def config_of(config: Mapping[str, object], prefix: str) -> Mapping[str, object]:
    """The part of a model's config.json that describes the layer at `prefix`: a nested one, or all of it."""
    nested = (config.get(_SUBCONFIGS.get(part, "")) for part in prefix.split("."))
    return next((part for part in nested if isinstance(part, dict)), config)


def configured_heads(config: Mapping[str, object], prefix: str) -> tuple[str, object] | None:
    """The key that gives the number of heads and its value as it stands there, unchecked; None if there is no key.

    An encoder or decoder that has a key of its own is known by the first of these words in the prefix.
    """
    sides = (_HEADS_BY_SIDE[part] for part in prefix.split(".") if part in _HEADS_BY_SIDE)
    return next(((key, config[key]) for key in (*sides, *_HEADS) if config.get(key) is not None), None)


def _present(_: object) -> bool:
    return True


def _positional(value: object) -> bool:
    return isinstance(value, str) and value.startswith(("relative", "rotary", "rope", "alibi"))


_ROTARY: Final = "rotary positions turn queries and keys"
_RELATIVE: Final = "positions enter the scores"
_SCALE: Final = "scores are not divided by the square root of the head size alone"

# What makes published attention another function of the same weights: key, values, why.
# A rope key counts even when null: Llama 2's config.json has `"rope_scaling": null`, and Llama 1's has no such key.
_OTHER_FUNCTIONS: Final[tuple[tuple[str, Callable[[object], bool], str], ...]] = (
    ("rope_theta", _present, _ROTARY),
    ("rope_parameters", _present, _ROTARY),
    ("rope_scaling", _present, _ROTARY),
    ("rotary_dim", _present, _ROTARY),
    ("rotary_value", _present, _ROTARY),
    ("model_type", lambda value: value == "llama", _ROTARY),
    ("position_embedding_type", _positional, _RELATIVE),
    ("has_relative_attention_bias", bool, _RELATIVE),
    ("model_type", lambda value: value == "gpt_neo", _SCALE),
    ("scale_attn_weights", lambda value: value is False, _SCALE),
    ("scale_attn_by_inverse_layer_idx", bool, _SCALE),
)


def other_function(config: Mapping[str, object]) -> str | None:
    """Why a model with this config.json computes another function of its attention weights; None if nothing says so."""
    said = ((key, why) for key, applies, why in _OTHER_FUNCTIONS if key in config and applies(config[key]))
    return next((f"{key} is {config[key]!r}: {why}" for key, why in said), None)
