"""What a file may look like and everything it can have wrong, one defect at a time, on small files of our own making.

Whether a layer computes what its model computed is asked in test_checkpoint_upstream.py. Sizes are distinct primes, or
products of them.
"""

import json
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file
from torch import Tensor, nn

from model.attention import MultiHeadAttention, seeded_layer
from model.checkpoint import LAYOUTS, CheckpointError, LoadedLayer, load_layer

HEADS, NUM_HIDDENS = 7, 7 * 11
SIZES = {"query_size": 13, "key_size": 17, "value_size": 19}


class TestOwnLayer:
    @pytest.mark.parametrize("scoring", ["dot_product", "additive"])
    @pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
    def test_round_trip(self, bias: bool, scoring: str, tmp_path: Path) -> None:
        """A layer saved under d2l's names comes back equal to the bit, in eval mode."""
        layer = seeded_layer(NUM_HIDDENS, HEADS, seed=3, bias=bias, scoring=scoring, **SIZES)
        save_file(layer.state_dict(), tmp_path / "layer.safetensors")
        loaded = load_layer(tmp_path / "layer.safetensors", num_heads=HEADS)
        assert isinstance(loaded, LoadedLayer)
        assert isinstance(loaded.layer, MultiHeadAttention)
        assert (loaded.layout, loaded.layer.scoring, loaded.layer.training) == ("d2l", scoring, False)
        want = layer.state_dict()
        assert loaded.layer.state_dict().keys() == want.keys()
        assert all(torch.equal(tensor, want[name]) for name, tensor in loaded.layer.state_dict().items())

    def test_scoring_size_is_the_tensors(self, tmp_path: Path) -> None:
        """Additive scoring of a size other than the head size keeps it."""
        layer = MultiHeadAttention(NUM_HIDDENS, HEADS, scoring="additive", scoring_size=23, **SIZES)
        save_file(layer.state_dict(), tmp_path / "layer.safetensors")
        loaded = load_layer(tmp_path / "layer.safetensors", num_heads=HEADS)
        assert loaded.layer.state_dict()["attention.w_v.weight"].shape == (1, 23)


# One layer in a file of our making, which a test then spoils.

PREFIX = "decoder.layers.3.self_attn"


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def proj_tensors(prefix: str = PREFIX) -> dict[str, Tensor]:
    sizes = {"q_proj": 13, "k_proj": 17, "v_proj": 19, "out_proj": NUM_HIDDENS}
    weights = {f"{prefix}.{name}.weight": random(NUM_HIDDENS, size) for name, size in sizes.items()}
    return {**weights, **{f"{prefix}.{name}.bias": random(NUM_HIDDENS) for name in sizes}}


def d2l_tensors() -> dict[str, Tensor]:
    return seeded_layer(NUM_HIDDENS, HEADS, seed=3, scoring="additive", **SIZES).state_dict()


def torch_tensors() -> dict[str, Tensor]:
    return nn.MultiheadAttention(NUM_HIDDENS, HEADS).state_dict()


def gpt2_tensors() -> dict[str, Tensor]:
    weights = {"c_attn.weight": random(NUM_HIDDENS, 3 * NUM_HIDDENS), "c_proj.weight": random(NUM_HIDDENS, NUM_HIDDENS)}
    return {**weights, "c_attn.bias": random(3 * NUM_HIDDENS), "c_proj.bias": random(NUM_HIDDENS)}


def saved(folder: Path, tensors: Mapping[str, Tensor], name: str = "layer.safetensors") -> Path:
    path = folder / name
    if path.suffix == ".safetensors":
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    else:
        torch.save(dict(tensors), path)
    return path


class TestBiases:
    @pytest.mark.parametrize("absent", [["k_proj"], ["out_proj"], ["q_proj", "v_proj"]], ids="+".join)
    def test_absent_ones_are_zeros(self, absent: list[str], tmp_path: Path) -> None:
        """Where some projections have a bias, those that have none get zeros, which changes no answer."""
        tensors = {
            name: x for name, x in proj_tensors().items() if name.split(".")[-2:] not in [[a, "bias"] for a in absent]
        }
        state = load_layer(saved(tmp_path, tensors), num_heads=HEADS).layer.state_dict()
        ours = {"q_proj": "W_q", "k_proj": "W_k", "v_proj": "W_v", "out_proj": "W_o"}
        for theirs, name in ours.items():
            want = torch.zeros(NUM_HIDDENS) if theirs in absent else tensors[f"{PREFIX}.{theirs}.bias"]
            assert torch.equal(state[f"{name}.bias"], want)

    def test_none_at_all(self, tmp_path: Path) -> None:
        """A file without any bias gives a layer without any."""
        tensors = {name: x for name, x in proj_tensors().items() if name.endswith("weight")}
        state = load_layer(saved(tmp_path, tensors), num_heads=HEADS).layer.state_dict()
        assert not any(name.endswith("bias") for name in state)


class TestKnownStrangers:
    def test_gpt2_mask_buffers_are_ignored(self, tmp_path: Path) -> None:
        """Older GPT-2 files have the causal mask beside the weights; it is neither read nor refused."""
        buffers = {"bias": torch.ones(1, 1, 5, 5, dtype=torch.uint8), "masked_bias": torch.tensor(-1e4)}
        assert load_layer(saved(tmp_path, {**gpt2_tensors(), **buffers}), num_heads=HEADS).layout == "gpt2"

    def test_bert_norm_is_ignored(self, tmp_path: Path) -> None:
        """BERT keeps the norm that follows attention below the same prefix, as gamma and beta in its oldest files."""
        names = {"q_proj": "self.query", "k_proj": "self.key", "v_proj": "self.value", "out_proj": "output.dense"}
        tensors = proj_tensors("a")
        for old, new in names.items():
            tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
        norm = {f"a.output.LayerNorm.{name}": random(NUM_HIDDENS) for name in ("gamma", "beta", "weight", "bias")}
        assert load_layer(saved(tmp_path, {**tensors, **norm}), num_heads=HEADS).layout == "bert"

    def test_bias_k_has_no_place(self, tmp_path: Path) -> None:
        """add_bias_kv adds a key that this layer cannot have."""
        module = nn.MultiheadAttention(NUM_HIDDENS, HEADS, add_bias_kv=True)
        save_file(module.state_dict(), tmp_path / "layer.safetensors")
        with pytest.raises(CheckpointError, match=r"bias_k, bias_v: left over, .* has no place for it"):
            load_layer(tmp_path / "layer.safetensors", num_heads=HEADS)


class TestDtypes:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
    def test_are_cast_to_float32(self, dtype: torch.dtype, tmp_path: Path) -> None:
        """The layer is float32 and has the file's values, rounded only from float64."""
        tensors = {name: tensor.to(dtype) for name, tensor in proj_tensors().items()}
        state = load_layer(saved(tmp_path, tensors), num_heads=HEADS).layer.state_dict()
        assert torch.equal(state["W_k.weight"], tensors[f"{PREFIX}.k_proj.weight"].to(torch.float32))
        assert {tensor.dtype for tensor in state.values()} == {torch.float32}


class TestOwnership:
    def test_layer_outlives_the_file(self, tmp_path: Path) -> None:
        """The layer owns its memory: a file overwritten in place afterwards changes nothing."""
        path = saved(tmp_path, proj_tensors())
        layer = load_layer(path, num_heads=HEADS).layer
        with path.open("r+b") as file:
            file.seek(-NUM_HIDDENS, os.SEEK_END)
            file.write(b"\xff" * NUM_HIDDENS)
        assert torch.equal(layer.W_v.weight, proj_tensors()[f"{PREFIX}.v_proj.weight"])

    def test_draws_no_random_numbers(self, tmp_path: Path) -> None:
        """Loading leaves the caller's random state as it was."""
        path = saved(tmp_path, proj_tensors())
        torch.manual_seed(3)
        want = torch.rand(5)
        torch.manual_seed(3)
        load_layer(path, num_heads=HEADS)
        assert torch.equal(torch.rand(5), want)

    def test_reads_only_the_layer(self, tmp_path: Path) -> None:
        """Of a safetensors file only the layer's tensors are read: another that torch cannot hold does not matter."""
        raw = save(proj_tensors())
        size = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + size])
        end = max(entry["data_offsets"][1] for entry in header.values())
        header["lm_head.weight"] = {"dtype": "F4", "shape": [2, 4], "data_offsets": [end, end + 4]}
        packed = json.dumps(header).encode()
        path = tmp_path / "layer.safetensors"
        path.write_bytes(len(packed).to_bytes(8, "little") + packed + raw[8 + size :] + b"\0" * 4)
        assert load_layer(path, num_heads=HEADS).prefix == PREFIX


class TestPickles:
    @pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".PT"])
    @pytest.mark.parametrize("wrap", [None, "state_dict", "model"], ids=["plain", "state_dict", "model"])
    def test_dict_of_tensors(self, wrap: str | None, suffix: str, tmp_path: Path) -> None:
        """A dict of tensors is read at the top or, beside other things, under `state_dict` or `model`."""
        tensors = proj_tensors()
        torch.save(tensors if wrap is None else {"epoch": 3, wrap: tensors}, tmp_path / f"layer{suffix}")
        loaded = load_layer(tmp_path / f"layer{suffix}", num_heads=HEADS)
        assert torch.equal(loaded.layer.W_q.weight, tensors[f"{PREFIX}.q_proj.weight"])

    def test_old_format_and_parameters(self, tmp_path: Path) -> None:
        """The format of torch before the zip archive, and Parameters in place of tensors, are read as well."""
        tensors = {name: nn.Parameter(tensor) for name, tensor in proj_tensors().items()}
        torch.save(tensors, tmp_path / "layer.pt", _use_new_zipfile_serialization=False)
        loaded = load_layer(tmp_path / "layer.pt", num_heads=HEADS)
        assert torch.equal(loaded.layer.W_q.weight, tensors[f"{PREFIX}.q_proj.weight"])

    @pytest.mark.parametrize("zipped", [False, True], ids=["old_format", "zip"])
    def test_malicious_one_does_not_execute(self, zipped: bool, tmp_path: Path) -> None:
        """A pickle that would call a function is refused by the function's name, and the call does not happen."""
        victim = tmp_path / "victim"

        class Malicious:
            def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
                return os.mkdir, (str(victim),)

        torch.save({"a": Malicious()}, tmp_path / "layer.pt", _use_new_zipfile_serialization=zipped)
        with pytest.raises(CheckpointError, match=r"refused, it asks for posix.mkdir; save a state_dict"):
            load_layer(tmp_path / "layer.pt")
        assert not victim.exists()

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            pytest.param(
                nn.Linear(2, 3),
                r"asks for torch.nn.modules.linear.Linear; save a state_dict: torch.save\(",
                id="module",
            ),
            pytest.param(
                nn.LazyLinear(3).state_dict(), "asks for torch.nn.parameter.UninitializedParameter", id="lazy"
            ),
            pytest.param([torch.ones(2)], "holds a list, want a dict of tensors", id="list"),
            pytest.param(torch.ones(2), "holds a Tensor, want a dict of tensors", id="tensor"),
            pytest.param({"epoch": 3}, "entry 'epoch' is a int, want names and tensors alone", id="not_a_tensor"),
            pytest.param({"model": {5: torch.ones(2)}}, "entry 5 is a Tensor, want names and tensors", id="not_a_name"),
            pytest.param({}, "no attention layer .* tensors are none", id="empty"),
        ],
    )
    def test_other_content_is_refused(self, content: object, message: str, tmp_path: Path) -> None:
        """What is not a dict of tensors is refused, with what to do about it."""
        torch.save(content, tmp_path / "layer.pt")
        with pytest.raises(CheckpointError, match=message):
            load_layer(tmp_path / "layer.pt")

    def test_plain_pickle_is_refused_quietly(self, tmp_path: Path) -> None:
        """A pickle that torch did not write gives the error alone, without torch's warning about its protocol."""
        (tmp_path / "layer.bin").write_bytes(pickle.dumps({"a": 1}, protocol=4))
        with pytest.raises(CheckpointError, match=r"refused, it is not a pickle of tensors alone|damaged"):
            load_layer(tmp_path / "layer.bin")


class TestFiles:
    @pytest.mark.parametrize(
        ("name", "message"),
        [
            pytest.param(
                "layer.onnx", r"layer.onnx: suffix is '.onnx', want one of .safetensors, .pt, .pth, .bin", id="suffix"
            ),
            pytest.param("layer", r"suffix is '', want one of", id="no_suffix"),
            pytest.param("layer.safetensors", r"layer.safetensors: no such file", id="missing"),
            pytest.param("layer.pt", r"layer.pt: no such file", id="missing_pickle"),
            pytest.param("folder.safetensors", r"folder.safetensors: is not a file", id="folder"),
        ],
    )
    def test_unreadable_paths(self, name: str, message: str, tmp_path: Path) -> None:
        """A path that is no file of a known kind is refused by its name."""
        (tmp_path / "folder.safetensors").mkdir()
        with pytest.raises(CheckpointError, match=message):
            load_layer(tmp_path / name)

    @pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
    @pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.99], ids=["empty", "start", "half", "all_but_the_end"])
    def test_truncated(self, share: float, suffix: str, tmp_path: Path) -> None:
        """A file whose end is missing is called damaged."""
        path = saved(tmp_path, proj_tensors(), f"layer{suffix}")
        os.truncate(path, int(share * path.stat().st_size))
        with pytest.raises(CheckpointError, match="damaged"):
            load_layer(path, num_heads=HEADS)

    @given(data=st.data(), suffix=st.sampled_from([".safetensors", ".pt", ".bin"]))
    @settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_damage_never_escapes(self, data: st.DataObject, suffix: str, tmp_path: Path) -> None:
        """Whatever bytes are changed in the file of an unfinished layer, the answer is a CheckpointError."""
        path = tmp_path / f"layer{suffix}"
        torch.save({"a.q_proj.weight": random(2, 3)}, path, _use_new_zipfile_serialization=suffix == ".pt")
        if suffix == ".safetensors":
            saved(tmp_path, {"a.q_proj.weight": random(2, 3)})
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(content)
        with pytest.raises(CheckpointError):
            load_layer(path, num_heads=1)


class TestPrefix:
    @pytest.mark.parametrize("prefix", [PREFIX, PREFIX + ".", "decoder", "decoder.layers.3.", "", None])
    def test_any_ancestor_of_one_layer_will_do(self, prefix: str | None, tmp_path: Path) -> None:
        """A prefix picks the layer below it, wherever it ends, and none is needed for the only one."""
        assert load_layer(saved(tmp_path, proj_tensors()), prefix=prefix, num_heads=HEADS).prefix == PREFIX

    def test_one_is_not_ten(self, tmp_path: Path) -> None:
        """`layers.1` does not match `layers.10`."""
        tensors = {**proj_tensors("layers.1.a"), **proj_tensors("layers.10.a")}
        assert load_layer(saved(tmp_path, tensors), prefix="layers.1", num_heads=HEADS).prefix == "layers.1.a"

    def test_no_match_lists_what_there_is(self, tmp_path: Path) -> None:
        """An unknown prefix is answered by the prefixes that exist."""
        tensors = {**proj_tensors("layers.2.a"), **proj_tensors("layers.10.a")}
        message = r"no attention layer below prefix 'layers.3', want one of layers.2.a \(proj\), layers.10.a \(proj\)$"
        with pytest.raises(CheckpointError, match=message):
            load_layer(saved(tmp_path, tensors), prefix="layers.3", num_heads=HEADS)

    def test_several_matches_are_listed_up_to_a_cap(self, tmp_path: Path) -> None:
        """Where several layers match, the first are named and the rest are counted."""
        tensors = {f"h.{number}.q_proj.weight": random(2, 3) for number in range(11)}
        message = r"11 layers match, pass --prefix with one of h.0 \(proj\), h.1 \(proj\), .*h.7 \(proj\) and 3 more$"
        with pytest.raises(CheckpointError, match=message):
            load_layer(saved(tmp_path, tensors))

    def test_other_layers_are_not_left_over(self, tmp_path: Path) -> None:
        """Only tensors below the layer's own prefix count: a sibling whose name begins alike does not."""
        tensors = {**proj_tensors("a.attn"), "a.attn_norm.weight": random(3), "b.scale": random(5)}
        assert load_layer(saved(tmp_path, tensors), num_heads=HEADS).prefix == "a.attn"


class TestLayout:
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_named_layout_is_looked_for_alone(self, layout: str, tmp_path: Path) -> None:
        """A named layout finds the layers named so; a file of another gives an error that names what was looked for."""
        path = saved(tmp_path, proj_tensors())
        if layout == "proj":
            assert load_layer(path, layout=layout, num_heads=HEADS).layout == "proj"
            return
        with pytest.raises(CheckpointError, match=rf"known layout \({layout}\); tensors are .*\.k_proj\.bias"):
            load_layer(path, layout=layout, num_heads=HEADS)

    def test_unknown_layout(self, tmp_path: Path) -> None:
        """A layout that does not exist is answered by those that do."""
        with pytest.raises(CheckpointError, match="layout is 'tensorflow', want auto or one of d2l, torch, bert"):
            load_layer(saved(tmp_path, proj_tensors()), layout="tensorflow")

    def test_no_layer_at_all(self, tmp_path: Path) -> None:
        """A file without attention is answered by the layouts known and a few of its own names."""
        tensors = {f"conv{number}.weight": random(2, 3) for number in range(11)}
        message = r"known layout \(d2l, torch, bert, distilbert, gpt2, proj\); tensors are conv0.weight.* and 3 more"
        with pytest.raises(CheckpointError, match=message):
            load_layer(saved(tmp_path, tensors))


def q(name: str) -> str:
    return f"{PREFIX}.{name}"


NAN, INFINITE = random(NUM_HIDDENS, 17), random(NUM_HIDDENS)
NAN[3, 5], INFINITE[7] = torch.nan, torch.inf

SPOILT: dict[str, tuple[Callable[[], dict[str, Tensor]], str, Tensor | None, str]] = {
    "grouped_keys": (
        proj_tensors,
        q("k_proj.weight"),
        random(11, 17),
        r": 11 rows where .*q_proj.weight has 77; grouped-",
    ),
    "grouped_values": (
        proj_tensors,
        q("v_proj.weight"),
        random(7, 19),
        r": 7 rows where .*q_proj.weight has 77; grouped-",
    ),
    "more_keys": (
        proj_tensors,
        q("k_proj.weight"),
        random(79, 17),
        r": as W_k.weight its shape is \(79, 17\), want \(77, 17\)",
    ),
    "more_values": (
        proj_tensors,
        q("v_proj.weight"),
        random(79, 19),
        r": as W_v.weight .* \(79, 19\), want \(77, 19\)",
    ),
    "output_rows": (
        proj_tensors,
        q("out_proj.weight"),
        random(73, 77),
        r": as W_o.weight .* \(73, 77\), want \(77, 77\)",
    ),
    "output_columns": (
        proj_tensors,
        q("out_proj.weight"),
        random(77, 73),
        r": as W_o.weight .* \(77, 73\), want \(77, 77\)",
    ),
    "bias_size": (proj_tensors, q("v_proj.bias"), random(73), r": as W_v.bias its shape is \(73,\), want \(77,\)"),
    "missing_weight": (
        proj_tensors,
        q("v_proj.weight"),
        None,
        r": missing beside the other tensors of the layer at decoder",
    ),
    "missing_output": (proj_tensors, q("out_proj.weight"), None, r": missing beside"),
    "left_over": (
        proj_tensors,
        q("q_norm.weight"),
        random(11),
        r": left over, the layer at decoder.* has no place for it",
    ),
    "integer": (
        proj_tensors,
        q("q_proj.weight"),
        random(77, 13).to(torch.int8),
        r": dtype is torch.int8, want one of torch.fl",
    ),
    "float8": (
        proj_tensors,
        q("q_proj.weight"),
        random(77, 13).to(torch.float8_e4m3fn),
        r": dtype is torch.float8_e4m3fn",
    ),
    "complex": (proj_tensors, q("q_proj.weight"), random(77, 13).to(torch.complex64), r": dtype is torch.complex64"),
    "nan": (proj_tensors, q("k_proj.weight"), NAN, r": has values that are not finite"),
    "infinite_bias": (proj_tensors, q("k_proj.bias"), INFINITE, r": has values that are not finite"),
    "overflow": (proj_tensors, q("k_proj.bias"), 1e300 * random(77).double(), r": has values beyond float32"),
    "weight_rank": (proj_tensors, q("q_proj.weight"), random(7, 11, 13), r": shape is \(7, 11, 13\), want 2 axes"),
    "bias_rank": (proj_tensors, q("q_proj.bias"), random(1, 77), r": shape is \(1, 77\), want 1 axes"),
    "empty": (proj_tensors, q("q_proj.weight"), random(77, 0), r": shape is \(77, 0\), want 2 axes, none empty"),
    "packed_rows": (
        torch_tensors,
        "in_proj_weight",
        random(229, 77),
        r": packs W_q, W_k and W_v in 229 rows, want a multiple",
    ),
    "packed_bias": (torch_tensors, "in_proj_bias", random(3 * 73), r": as W_k.bias its shape is \(73,\), want \(77,\)"),
    "packed_missing": (
        torch_tensors,
        "in_proj_weight",
        None,
        r": missing beside the other tensors of the layer at the top of",
    ),
    "not_conv1d": (
        gpt2_tensors,
        "c_attn.weight",
        random(3 * 77, 77),
        r": packs W_q, W_k and W_v in 77 rows, want a multiple",
    ),
    "scoring_missing": (d2l_tensors, "attention.w_v.weight", None, r": missing beside"),
    "scoring_head_size": (d2l_tensors, "attention.W_k.weight", random(11, 13), r".* \(11, 13\), want \(11, 11\)"),
    "scoring_size": (d2l_tensors, "attention.w_v.weight", random(1, 13), r".* \(1, 13\), want \(1, 11\)"),
    "scoring_bias": (d2l_tensors, "attention.W_q.bias", random(11), r": left over"),
}


class TestTensors:
    @pytest.mark.parametrize(("base", "name", "tensor", "message"), SPOILT.values(), ids=SPOILT.keys())
    def test_wrong_ones_are_named(
        self,
        base: Callable[[], dict[str, Tensor]],
        name: str,
        tensor: Tensor | None,
        message: str,
        tmp_path: Path,
    ) -> None:
        """One wrong tensor, and the error says which by the file's own name, what it is and what it should be."""
        tensors = {key: value for key, value in base().items() if key != name}
        path = saved(tmp_path, tensors if tensor is None else {**tensors, name: tensor})
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.") + message) as error:
            load_layer(path, num_heads=HEADS)
        assert str(error.value).startswith(f"{path}: ")

    @pytest.mark.parametrize("base", [proj_tensors, d2l_tensors, torch_tensors, gpt2_tensors])
    def test_unspoilt_ones_load(self, base: Callable[[], dict[str, Tensor]], tmp_path: Path) -> None:
        """The files above are good before they are spoilt."""
        assert load_layer(saved(tmp_path, base()), num_heads=HEADS).layer.num_hiddens == NUM_HIDDENS

    @pytest.mark.parametrize("spoil", [Tensor.to_sparse, lambda tensor: tensor.to("meta")], ids=["sparse", "meta"])
    def test_without_dense_data(self, spoil: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
        """A pickle may hold tensors that are sparse or have no data: they are refused by name."""
        tensors = proj_tensors()
        tensors[q("q_proj.weight")] = spoil(tensors[q("q_proj.weight")])
        with pytest.raises(CheckpointError, match=r"q_proj.weight: is sparse or has no data, want a dense tensor"):
            load_layer(saved(tmp_path, tensors, "layer.pt"), num_heads=HEADS)


class TestHeads:
    @pytest.mark.parametrize("num_heads", [5, 0, -7, 78])
    def test_must_divide(self, num_heads: int, tmp_path: Path) -> None:
        """A number of heads that does not divide num_hiddens is refused with the tensor that says what that is."""
        message = rf"num_heads is {num_heads}, want a divisor of num_hiddens, which {PREFIX}.q_proj.weight says is 77"
        with pytest.raises(CheckpointError, match=message):
            load_layer(saved(tmp_path, proj_tensors()), num_heads=num_heads)

    def test_unknown(self, tmp_path: Path) -> None:
        """Neither an argument nor a config.json: the error says what to pass."""
        with pytest.raises(CheckpointError, match="gives the number of heads, pass --num-heads"):
            load_layer(saved(tmp_path, proj_tensors()))

    def test_config_stands_beside_the_file(self, tmp_path: Path) -> None:
        """The config.json of the file's own folder is read, and an argument goes before it."""
        (tmp_path / "config.json").write_text('{"decoder_attention_heads": 11}')
        path = saved(tmp_path, proj_tensors())
        assert load_layer(path).layer.num_heads == 11
        assert load_layer(path, num_heads=HEADS).layer.num_heads == HEADS

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            pytest.param('{"n_head": ', "config.json beside it cannot be read: Expecting value", id="broken"),
            pytest.param("\udcff", "config.json beside it cannot be read: ", id="not_utf8"),
            pytest.param("[" * 100_000, "config.json beside it cannot be read: ", id="too_deep"),
            pytest.param("[7]", "config.json beside it holds a list, want an object", id="list"),
            pytest.param('{"n_head": "7"}', "config.json: n_head is '7', want a positive integer", id="string"),
            pytest.param('{"n_head": true}', "config.json: n_head is True, want a positive integer", id="bool"),
            pytest.param('{"n_head": 7.0}', "config.json: n_head is 7.0, want a positive integer", id="float"),
            pytest.param('{"n_head": 0}', "config.json: n_head is 0, want a positive integer", id="zero"),
            pytest.param('{"hidden_size": 77}', "no config.json .* number of heads, pass --num-heads", id="no_key"),
            pytest.param('{"n_head": 5}', "num_heads is 5, want a divisor", id="indivisible"),
        ],
    )
    def test_bad_config(self, config: str, message: str, tmp_path: Path) -> None:
        """A config.json that is broken, or gives no usable number, is refused by what it says."""
        (tmp_path / "config.json").write_bytes(config.encode(errors="surrogateescape"))
        with pytest.raises(CheckpointError, match=message):
            load_layer(saved(tmp_path, proj_tensors()))

    def test_rotary_positions_are_refused_whoever_gives_the_heads(self, tmp_path: Path) -> None:
        """A config.json that says rotary is believed even where the number of heads is passed."""
        (tmp_path / "config.json").write_text('{"rope_theta": 10000.0, "num_attention_heads": 7}')
        with pytest.raises(
            CheckpointError, match=r"rope_theta is 10000.0: rotary .* would not compute the same function"
        ):
            load_layer(saved(tmp_path, proj_tensors()), num_heads=HEADS)
