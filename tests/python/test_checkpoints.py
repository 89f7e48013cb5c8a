# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of other libraries through `convert` and from_pretrained: the weights they stand for, bit for bit."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import textwrap

import numpy as np
import pytest

pytest.importorskip("safetensors")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import gguf  # noqa: E402
import rooftile as rt  # noqa: E402
import safetensors.torch  # noqa: E402
import tiny_checkpoints as tiny  # noqa: E402
import tiny_gguf  # noqa: E402
from rooftile import checkpoints  # noqa: E402
from rooftile.checkpoints import convert, formats  # noqa: E402
from rooftile.checkpoints.folder import safetensors_header  # noqa: E402
from rooftile.cli import main  # noqa: E402
from rooftile.integrations.quantizer import RooftileConfig  # noqa: E402
from rooftile.nn import PackedLinear, W4Linear, W8Linear  # noqa: E402

IDS = torch.tensor([[5, 80, 26, 7, 30, 44, 58, 9, 12, 0, 31]])


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield


def load(folder, dtype=torch.float32, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)


def layers(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, PackedLinear)}


def assert_same_tensors(a, b):
    a, b = a.state_dict(), b.state_dict()
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert value.dtype == b[name].dtype and torch.equal(value, b[name]), name


# ---------------------------------------------------------------- 4-bit and 8-bit folders

GPTQ, AWQ, CT = tiny.gptq_config, tiny.awq_config, tiny.compressed_tensors_config
FORMATS = {
    "gptq-v1": (tiny.gptq, {}, GPTQ(), "integer"),
    "gptq-v1-symmetric": (tiny.gptq, {"symmetric": True}, GPTQ(sym=True, checkpoint_format="gptq"), "symmetric"),
    "gptq-v1-act-order": (tiny.gptq, {"act_order": True}, GPTQ(desc_act=True), "integer"),
    "gptq-v2": (
        lambda w: tiny.gptq(w, "gptq_v2"),
        {"lowest": 0},
        GPTQ(checkpoint_format="gptq_v2", group_size=64),
        "integer",
    ),
    "gptq-v2-act-order-symmetric": (
        lambda w: tiny.gptq(w, "gptq_v2"),
        {"act_order": True, "symmetric": True},
        GPTQ(format="gptq_v2", desc_act=True, sym=True),
        "symmetric",
    ),
    "gptq-whole-rows-no-g_idx": (lambda w: tiny.gptq(w, g_idx=False), {}, GPTQ(group_size=-1), "integer"),
    "awq": (tiny.awq, {"lowest": 0}, AWQ(), "integer"),
    "awq-without-zero_point": (tiny.awq, {"lowest": 0}, AWQ(zero_point=None), "integer"),
    "awq-64": (tiny.awq, {"lowest": 0}, AWQ(group_size=64, modules_to_not_convert=["lm_head"]), "integer"),
    "ct": (lambda w: tiny.compressed_tensors(w, True), {"symmetric": True, "dtype": torch.bfloat16}, CT(), "symmetric"),
    "ct-asymmetric": (
        lambda w: tiny.compressed_tensors(w, False),
        {"lowest": 0},
        CT({"symmetric": False}),
        "integer",
    ),
    "ct-channel": (
        lambda w: tiny.compressed_tensors(w, True),
        {"symmetric": True},
        CT({"strategy": "channel", "group_size": None}),
        "symmetric",
    ),
    "ct-act-order": (
        lambda w: tiny.compressed_tensors(w, False, g_idx=True),
        {"act_order": True},
        CT({"symmetric": False, "actorder": "group"}),
        "integer",
    ),
    "ct-act-order-static": (
        lambda w: tiny.compressed_tensors(w, True),
        {"symmetric": True},
        CT({"actorder": "weight"}, ignore=["re:.*lm_head"]),
        "symmetric",
    ),
    "gptq-8": (tiny.gptq, {"bits": 8}, GPTQ(bits=8), "integer"),
    "gptq-8-v2-act-order-symmetric": (
        lambda w: tiny.gptq(w, "gptq_v2"),
        {"bits": 8, "act_order": True, "symmetric": True},
        GPTQ(bits=8, checkpoint_format="gptq_v2", desc_act=True, sym=True, group_size=64),
        "symmetric",
    ),
    "ct-8": (
        lambda w: tiny.compressed_tensors(w, True),
        {"bits": 8, "symmetric": True, "dtype": torch.bfloat16},
        CT({"num_bits": 8}),
        "symmetric",
    ),
    "ct-8-channel-asymmetric": (
        lambda w: tiny.compressed_tensors(w, False),
        {"bits": 8, "lowest": 0},
        CT({"num_bits": 8, "strategy": "channel", "group_size": None, "symmetric": False}),
        "integer",
    ),
    "ct-8-act-order": (
        lambda w: tiny.compressed_tensors(w, False, g_idx=True),
        {"bits": 8, "act_order": True},
        CT({"num_bits": 8, "symmetric": False, "actorder": "group"}),
        "integer",
    ),
}


def group_size(config):
    if "config_groups" in config:
        return config["config_groups"]["group_0"]["weights"]["group_size"] or -1
    return config["group_size"]


@pytest.fixture(scope="module", params=FORMATS)
def case(request, tmp_path_factory):
    """(source folder, target folder, the Weights, kind, report)"""
    pack, options, config, kind = FORMATS[request.param]
    path = tmp_path_factory.mktemp(request.param)
    weights = {n: tiny.weight(n, shape, group_size(config), **options) for n, shape in tiny.MODULES.items()}
    kept = "model.layers.1.mlp.up_proj"
    del weights[kept]  # a layer left alone
    source = tiny.write(path / "source", tiny.tensors(pack, weights), config, shards=2)
    report = convert(source, path / "target", progress=False)
    return source, path / "target", weights, kind, report


def test_weights_are_those_of_the_format(case):
    _, target, weights, kind, _ = case
    ours = layers(load(target))
    assert ours.keys() == weights.keys()
    for name, w in weights.items():
        packed = ours[name].weight
        assert torch.equal(packed.dequantize(), w.dense), name
        assert packed.BITS == w.bits
        assert packed.kind == kind and packed.scale_dtype == str(w.scales.dtype).removeprefix("torch.")
        assert (packed.perm is not None) == (w.groups != np.sort(w.groups)).any()


def test_logits_are_those_of_the_dequantised_model(case):
    _, target, weights, _, _ = case
    plain = tiny.model(torch.float32)
    plain.load_state_dict(tiny.model().state_dict())
    for name, w in weights.items():
        plain.get_submodule(name).weight.copy_(w.dense)
    ours, theirs = load(target)(IDS).logits, plain(IDS).logits
    assert (ours - theirs).abs().max() <= 2e-5 * theirs.abs().max()


def test_all_else_is_kept_and_reported(case):
    source, target, weights, _, report = case
    stored = {}
    for file in source.glob("*.safetensors"):
        stored.update(safetensors.torch.load_file(file))
    written = safetensors.torch.load_file(target / "model.safetensors")
    kept = [name for name in stored if name.rpartition(".")[0] not in weights or name.endswith(".bias")]
    for name in kept:
        assert torch.equal(stored[name], written[name]) and stored[name].dtype == written[name].dtype
    rows = {row["name"]: row for row in report["rows"]}
    assert rows.keys() == {*weights, *kept} and len(report["rows"]) == len(rows)
    for name, row in rows.items():
        assert row["outcome"] == (f"{weights[name].bits} bits, lossless" if name in weights else "kept")
    assert sum(row["bytes_before"] for row in report["rows"]) == sum(t.nbytes for t in stored.values())
    assert sum(row["bytes_after"] for row in report["rows"]) == sum(t.nbytes for t in written.values())
    assert report["copied"] == ["tokenizer_config.json"] and report["left_out"] == []
    assert sorted(p.name for p in target.iterdir()) == ["config.json", "model.safetensors", "tokenizer_config.json"]


def test_saved_again_is_the_same(case, tmp_path):
    _, target, _, _, _ = case
    first = load(target, torch.float16)
    first.save_pretrained(tmp_path / "again")
    again = load(tmp_path / "again", torch.float16)
    assert_same_tensors(first, again)
    assert torch.equal(first(IDS).logits, again(IDS).logits)
    configs = [json.loads((p / "config.json").read_text()) for p in (target, tmp_path / "again")]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]


def test_a_header_of_any_length(case, tmp_path):
    """The data of a safetensors file may begin at any byte: of the source, and of what convert wrote."""
    source, target, *_ = case
    source = tiny.unalign(shutil.copytree(source, tmp_path / "source"))
    convert(source, tmp_path / "target", progress=False)
    aligned = load(target)
    assert_same_tensors(load(tmp_path / "target"), aligned)
    again = load(tiny.unalign(tmp_path / "target"), torch.float16)
    assert_same_tensors(again, load(target, torch.float16))
    assert torch.equal(again(IDS).logits, load(target, torch.float16)(IDS).logits)


def test_loaded_without_a_folder(case):
    source, target, _, _, _ = case
    ours, through = checkpoints.load(source, progress=False), load(target, torch.float16)
    assert_same_tensors(ours, through)
    assert torch.equal(ours(IDS).logits, through(IDS).logits) and ours.dtype == torch.float16 and not ours.training


# ---------------------------------------------------------------- against compressed-tensors itself


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("symmetric", "n", "k", "group"),
    [(True, 20, 96, 32), (False, 20, 96, 32), (False, 64, 128, 128), (True, 3, 36, None), (False, 13, 36, None)],
)
@pytest.mark.parametrize("bits", [4, 8])
def test_compressed_tensors_own_packing_and_unpacking(bits, symmetric, n, k, group, dtype):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors needs Python 3.11")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    strategy = "channel" if group is None else "group"
    args = QuantizationArgs(num_bits=bits, symmetric=symmetric, strategy=strategy, group_size=group)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    w = tiny.weight(f"{n} {k}", (n, k), group or -1, bits=bits, symmetric=symmetric, dtype=dtype, lowest=0)
    if bits == 8:  # so that w is exact in bfloat16, and rounds to its codes
        w.scales = torch.exp2(torch.floor(torch.log2(w.scales)))
    state = {
        "weight": w.dense.to(dtype),
        "weight_scale": w.scales,
        "weight_zero_point": torch.from_numpy(w.zeros - 2**bits // 2).to(torch.int8),
    }
    library = BaseCompressor.get_value_from_registry("pack-quantized")
    packed = library.compress(state, scheme)
    by_hand = tiny.compressed_tensors(w, symmetric)
    assert packed.keys() == by_hand.keys()
    for name, tensor in by_hand.items():
        assert torch.equal(packed[name], tensor), name
    size = group or k
    zeros = packed.get("weight_zero_point")
    ours = formats.from_compressed_tensors("here", bits, packed["weight_packed"], w.scales, n, k, size, zeros)
    assert torch.equal(ours.dequantize(dtype), library.decompress(packed, scheme)["weight"])


# ---------------------------------------------------------------- 16-bit folders


@pytest.mark.parametrize("rounding", [rt.W4A16(64, "minima"), rt.W8A16(32)], ids=["4 bits", "8 bits"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_that_of_quantize(tmp_path, tied, dtype, rounding):
    """Through convert, through from_pretrained with a config, and in place: the same bytes."""
    skip = ["*.1.mlp.up_proj", "*.0.self_attn.o_proj"]
    state = {n: t.to(dtype) for n, t in tiny.tensors(None, {}, tie_word_embeddings=tied).items()}
    source = tiny.write(tmp_path / "source", state, shards=2, tie_word_embeddings=tied)
    report = convert(source, tmp_path / "target", rounding=rounding, skip=skip, progress=False)
    in_place = load(source, dtype)
    rt.quantize_(in_place, rounding, skip=skip, progress=False)
    config = RooftileConfig(rounding.group_size, rounding.zeros, skip, bits=rounding.bits)
    on_the_fly = load(source, dtype, quantization_config=config)
    rounded = f"{rounding.bits} bits, rounded to nearest"
    assert len(layers(in_place)) == 12 == sum(row["outcome"] == rounded for row in report["rows"])
    assert_same_tensors(load(tmp_path / "target", dtype), in_place)
    assert_same_tensors(on_the_fly, in_place)
    assert not any(layer.bias.requires_grad for layer in layers(on_the_fly).values() if layer.bias is not None)
    on_the_fly.save_pretrained(tmp_path / "saved")
    in_place.save_pretrained(tmp_path / "saved too", max_shard_size="40KB")
    assert len(list((tmp_path / "saved too").glob("*.safetensors"))) > 1
    for folder in ("saved", "saved too"):
        again = load(tmp_path / folder, dtype)
        assert_same_tensors(again, in_place)
        assert torch.equal(again(IDS).logits, in_place(IDS).logits)

    tiny.unalign(source)  # tensors are parts of the mapped file, which begin between their elements
    convert(source, tmp_path / "target of it", rounding=rounding, skip=skip, progress=False)
    again = load(source, dtype)
    assert all(p.data_ptr() % 2 for p in again.parameters())
    rt.quantize_(again, rounding, skip=skip, progress=False)
    on_the_fly = load(source, dtype, quantization_config=config)
    for model in (load(tmp_path / "target of it", dtype), again, on_the_fly):
        assert_same_tensors(model, in_place)
        assert torch.equal(model(IDS).logits, in_place(IDS).logits)


def test_a_model_in_4_and_8_bits_is_a_checkpoint(tmp_path):
    model = load(tiny.write(tmp_path / "source", tiny.tensors(None, {})), torch.float16)
    rt.quantize_(model, rt.W8A16(64), skip=["*.mlp.*"], progress=False)
    rt.quantize_(model, rt.W4A16(32, "minima"), skip=["*.0.mlp.up_proj"], progress=False)
    model.save_pretrained(tmp_path / "mixed")
    again = load(tmp_path / "mixed", torch.float16)
    assert_same_tensors(again, model)
    kinds = {name: type(module) for name, module in layers(again).items()}
    assert len(kinds) == 13 and kinds == {n: W4Linear if ".mlp." in n else W8Linear for n in kinds}
    assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_a_model_that_initialises_the_weights_of_layers_below(tmp_path):
    torch.manual_seed(0)
    config = transformers.MambaConfig(vocab_size=96, hidden_size=64, num_hidden_layers=1)
    model = transformers.MambaForCausalLM(config).eval()
    rt.quantize_(model, rt.W4A16(32), skip=["*.dt_proj"], progress=False)  # whose K = 4 holds no group
    model.save_pretrained(tmp_path / "saved")
    assert_same_tensors(load(tmp_path / "saved"), model)


@pytest.mark.parametrize(
    "four, eight",
    [
        (["Linear"], ["re:.*mlp.*"]),
        (["re:.*"], [name for name in tiny.MODULES if "mlp" in name]),
        (["re:model", "Linear"], ["re:.*mlp.*"]),  # expressions in their alphabetical order
    ],
)
@pytest.mark.parametrize("eight_first", [True, False])
def test_layers_of_both_bits_in_one_folder(tmp_path, four, eight, eight_first):
    """As groups of compressed-tensors, of which a module belongs to the one that names it most closely, wherever that
    stands in the file."""
    config = CT()
    groups = [
        CT({"num_bits": bits})["config_groups"]["group_0"] | {"targets": targets}
        for bits, targets in ((4, four), (8, eight))
    ]
    config["config_groups"] = dict(zip(("group_0", "group_1"), groups[::-1] if eight_first else groups, strict=True))
    weights = {
        name: tiny.weight(name, shape, bits=8 if "mlp" in name else 4, symmetric=True)
        for name, shape in tiny.MODULES.items()
    }
    state = tiny.tensors(lambda w: tiny.compressed_tensors(w, True), weights)
    report = convert(tiny.write(tmp_path / "source", state, config), tmp_path / "target", progress=False)
    assert report["form"] == "compressed-tensors 4-bit and 8-bit"
    ours = layers(load(tmp_path / "target"))
    assert ours.keys() == weights.keys()
    for name, w in weights.items():
        assert ours[name].weight.BITS == w.bits and torch.equal(ours[name].weight.dequantize(), w.dense)


def test_a_folder_of_before_there_were_8_bits(tmp_path):
    """Its layouts say nothing of bits."""
    convert(
        tiny.write(tmp_path / "source", tiny.tensors(None, {})), tmp_path / "w4", rounding=rt.W4A16(32), progress=False
    )
    expected, path = load(tmp_path / "w4", torch.float16), tmp_path / "w4" / "config.json"
    config = json.loads(path.read_text())
    assert [entry.pop("bits") for entry in config["quantization_config"]["layouts"]] == [4]
    path.write_text(json.dumps(config))
    old = load(tmp_path / "w4", torch.float16)
    assert len(layers(old)) == 14 and all(isinstance(layer, W4Linear) for layer in layers(old).values())
    assert_same_tensors(old, expected)


def test_a_model_may_be_loaded_in_another_dtype_than_stored(tmp_path):
    """bfloat16 on disk, float32 asked for: as if loaded so and then rounded."""
    source = tiny.write(tmp_path / "source", {n: t.bfloat16() for n, t in tiny.tensors(None, {}).items()})
    for dtype in (torch.float32, torch.float16):
        expected = load(source, dtype)
        rt.quantize_(expected, rt.W4A16(32), progress=False)
        assert_same_tensors(load(source, dtype, quantization_config=RooftileConfig(32)), expected)


def test_one_config_for_two_models(tmp_path):
    config, counts = RooftileConfig(32), []
    for layers in (2, 1):
        state = tiny.tensors(None, {}, num_hidden_layers=layers)
        source = tiny.write(tmp_path / str(layers), state, num_hidden_layers=layers)
        model = transformers.LlamaForCausalLM.from_pretrained(source, quantization_config=config)
        counts.append(len(model.config.quantization_config.modules))
    assert counts == [14, 7] and config.modules is None


def assert_base_loads(folder):
    """In the dtype that is stored: transformers 5.17 converts no tensor whose name gets a prefix."""
    base = transformers.AutoModel.from_pretrained(folder, dtype=torch.float16)
    assert torch.equal(base(IDS).last_hidden_state, load(folder, torch.float16).model(IDS).last_hidden_state)


def test_a_base_model_may_lack_the_head_and_nothing_else(tmp_path):
    """Its folder may be of a model with a head, which it has not; a layer that is in neither is an error."""
    source = tiny.write(tmp_path / "source", tiny.tensors(None, {}))
    transformers.AutoModel.from_pretrained(source, quantization_config=RooftileConfig(32)).save_pretrained(
        tmp_path / "base"
    )
    config = json.loads((tmp_path / "base/config.json").read_text())
    modules = config["quantization_config"]["layouts"][0]["modules"]
    modules.append("lm_head")
    (tmp_path / "base/config.json").write_text(json.dumps(config))
    transformers.AutoModel.from_pretrained(tmp_path / "base")
    modules[-1] = "model.layers.9.mlp.up_proj"
    (tmp_path / "base/config.json").write_text(json.dumps(config))
    with pytest.raises(rt.ArgumentError, match=r"module 'model\.layers\.9\.mlp\.up_proj' is not in a LlamaModel"):
        transformers.AutoModel.from_pretrained(tmp_path / "base")


def test_a_base_model_saved_alone(tmp_path):
    source = tiny.write(tmp_path / "source", tiny.tensors(None, {}))
    base = transformers.AutoModel.from_pretrained(source, quantization_config=RooftileConfig(32))
    base.save_pretrained(tmp_path / "base")
    again = transformers.AutoModel.from_pretrained(tmp_path / "base")
    whole = load(tmp_path / "base", torch.float16)  # with a head of random weights, as transformers says
    assert_same_tensors(again, base)
    assert torch.equal(again(IDS).last_hidden_state, base(IDS).last_hidden_state)
    assert torch.equal(whole.model(IDS).last_hidden_state, base(IDS).last_hidden_state)


@pytest.mark.parametrize("of", ["the base model inside", "the base model read alone"])
def test_the_base_model_of_a_converted_folder_saved_alone(tmp_path, of):
    """config.json still says the layers' names in the whole model, the tensors have those in the base model."""
    source = tiny.write(tmp_path / "source", tiny.tensors(None, {}))
    convert(source, tmp_path / "target", rounding=rt.W4A16(32), progress=False)
    whole = load(tmp_path / "target", torch.float16)
    base = transformers.AutoModel.from_pretrained(tmp_path / "target", dtype=torch.float16)
    (whole.model if of == "the base model inside" else base).save_pretrained(tmp_path / "base")
    again = transformers.AutoModel.from_pretrained(tmp_path / "base", dtype=torch.float16)
    assert_same_tensors(again, whole.model)
    assert torch.equal(again(IDS).last_hidden_state, whole.model(IDS).last_hidden_state)
    inside = load(tmp_path / "base", torch.float16)
    assert torch.equal(inside.model(IDS).last_hidden_state, whole.model(IDS).last_hidden_state)


def test_nothing_is_rounded_that_is_in_4_bits_already(tmp_path):
    """Whatever transformers asks of the quantizer of such a folder."""
    convert(tiny.write(tmp_path / "source", tiny.tensors(None, {})), tmp_path / "w4", progress=False,
            rounding=rt.W4A16(32))  # fmt: skip
    model = load(tmp_path / "w4")
    assert not model.hf_quantizer.param_needs_quantization(model, "lm_head.weight")


def test_the_model_without_its_head(tmp_path):
    source = tiny.write(tmp_path / "source", tiny.tensors(None, {}))
    convert(source, tmp_path / "target", rounding=rt.W4A16(32), progress=False)
    assert_base_loads(tmp_path / "target")


def test_four_bit_folders_may_be_rounded_further(tmp_path):
    w = {name: tiny.weight(name, shape) for name, shape in list(tiny.MODULES.items())[:3]}
    source = tiny.write(tmp_path / "source", tiny.tensors(tiny.awq, w), tiny.awq_config())
    report = convert(source, tmp_path / "target", rounding=rt.W4A16(64), skip="*.1.*", progress=False)
    model = load(tmp_path / "target")
    assert len(layers(model)) == 7 and sum("rounded" in row["outcome"] for row in report["rows"]) == 4
    for name, weight in w.items():
        assert torch.equal(model.get_submodule(name).weight.dequantize(), weight.dense)


def test_a_head_in_four_bits(tmp_path):
    w = {"lm_head": tiny.weight("lm_head", (tiny.VOCAB, tiny.HIDDEN))}
    source = tiny.write(tmp_path / "source", tiny.tensors(tiny.gptq, w), tiny.gptq_config(lm_head=True))
    convert(source, tmp_path / "target", progress=False)
    assert torch.equal(load(tmp_path / "target").lm_head.weight.dequantize(), w["lm_head"].dense)
    assert_base_loads(tmp_path / "target")


def test_biases_that_are_nothing_are_left_out(tmp_path):
    w = {"model.layers.0.mlp.up_proj": tiny.weight("up", (128, 64))}
    state = tiny.tensors(tiny.awq, w)
    state["model.layers.0.mlp.up_proj.bias"] = torch.zeros(128)
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    report = convert(tiny.write(tmp_path / "a", state, tiny.awq_config()), tmp_path / "b", progress=False)
    assert [line.partition(":")[0].rpartition(".")[2] for line in report["left_out"]] == ["bias", "inv_freq"]
    state["model.layers.0.mlp.up_proj.bias"][5] = 1
    source = tiny.write(tmp_path / "c", state, tiny.awq_config())
    with pytest.raises(rt.NotSupportedError, match=r"up_proj\.bias' has no place in a llama model"):
        convert(source, tmp_path / "d", progress=False)


# ---------------------------------------------------------------- GGUF


def gguf_rows(data, name, heads):
    """float32 values of a tensor by the gguf package, rows in transformers' order: the two halves of each head."""
    values = gguf.quants.dequantize(*data[name])
    if heads is None:
        return values
    half = len(values) // heads // 2
    return np.stack([values[h * 2 * half + 2 * i + x] for h in range(heads) for x in (0, 1) for i in range(half)])


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_gguf(tmp_path, arch):
    path, data = tiny_gguf.write(tmp_path / "tiny.gguf", arch), tiny_gguf.tensors(arch)
    report = convert(path, tmp_path / "target", dtype="float32", progress=False)
    model = load(tmp_path / "target")
    names = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"}
    names |= {"self_attn.o_proj": "attn_output"} | {f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")}
    for i in range(tiny_gguf.LAYERS):
        for ours, theirs in names.items():
            heads = {"attn_q": tiny_gguf.HEADS, "attn_k": tiny_gguf.KV_HEADS}.get(theirs) if arch == "llama" else None
            expected = torch.from_numpy(gguf_rows(data, f"blk.{i}.{theirs}.weight", heads))
            module = model.get_submodule(f"model.layers.{i}.{ours}")
            kept = tiny_gguf.LINEAR_TYPES[theirs].name in ("Q4_0", "Q4_1")
            assert isinstance(module, W4Linear) == kept
            assert torch.equal(module.weight.dequantize() if kept else module.weight, expected), theirs
    exact = tiny_gguf.forward(arch, data, IDS[0].numpy())
    assert np.abs(model(IDS).logits[0].double().numpy() - exact).max() <= 2e-5 * np.abs(exact).max()
    outcomes = {row["from"]: row["outcome"] for row in report["rows"]}
    assert outcomes == {
        "Q4_0": "4 bits, lossless",
        "Q4_1": "4 bits, lossless",
        "Q4_K": "dequantised",
        "Q8_0": "dequantised",
        "F32": "kept",
        "F16": "converted",
        "BF16": "converted",
    }
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "target")
    assert "tokenizer.json" in report["copied"] and tokenizer.decode(tokenizer("hello w")["input_ids"]) == "hello w"


def test_gguf_loaded_without_a_folder(tmp_path):
    path = tiny_gguf.write(tmp_path / "tiny.gguf")
    convert(path, tmp_path / "target", dtype="float32", progress=False)
    ours, through = checkpoints.load(path, dtype="float32", progress=False), load(tmp_path / "target")
    assert_same_tensors(ours, through)
    assert torch.equal(ours(IDS).logits, through(IDS).logits)


def test_gguf_rounded_further(tmp_path):
    path = tiny_gguf.write(tmp_path / "tiny.gguf")
    convert(path, tmp_path / "target", rounding=rt.W4A16(64), skip="*.v_proj", progress=False)
    model, data = load(tmp_path / "target", torch.bfloat16), tiny_gguf.tensors("llama")
    assert len(layers(model)) == 12
    expected = torch.from_numpy(gguf_rows(data, "blk.1.ffn_gate.weight", None))
    ours = model.model.layers[1].mlp.gate_proj.weight
    assert torch.equal(ours.dequantize(), rt.W4Weight.quantize(expected, group_size=64).dequantize())


# ---------------------------------------------------------------- the folder that is written


def test_shards(tmp_path):
    source = tiny.write(tmp_path / "source", tiny.tensors(None, {}))
    for name, size in (("one", 10**9), ("many", 20_000)):
        convert(source, tmp_path / name, rounding=rt.W4A16(32), shard_bytes=size, progress=False)
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 3 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert all(file.stat().st_size < 20_000 + 4_000 for file in files)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(
        t.nbytes for f in files for t in safetensors.torch.load_file(f).values()
    )
    assert_same_tensors(load(tmp_path / "many"), load(tmp_path / "one"))
    texts = [
        tmp_path / "one" / "config.json",
        *(tmp_path / "many" / f"{x}.json" for x in ("config", "model.safetensors.index")),
    ]
    assert all(file.read_text().endswith("\n}\n") for file in texts)
    readable = stat.S_IMODE((tmp_path / "one" / "config.json").stat().st_mode)
    assert all(stat.S_IMODE(f.stat().st_mode) == readable for f in files)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_interrupted_leaves_nothing(tmp_path, monkeypatch, error):
    source = tiny.write(tmp_path / "source", tiny.tensors(None, {}))
    calls = []

    def save(*args, **options):
        calls.append(args)
        if len(calls) == 2:
            raise error
        open(args[1], "wb").close()

    monkeypatch.setattr(safetensors.torch, "save_file", save)
    with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else rt.ArgumentError):
        convert(source, tmp_path / "target", rounding=rt.W4A16(32), shard_bytes=20_000, progress=False)
    assert len(calls) == 2 and os.listdir(tmp_path) == ["source"]


def test_targets(tmp_path):
    source = tiny.write(tmp_path / "source", tiny.tensors(None, {}))
    target = tmp_path / "target"

    def refused(where, words, **options):
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(rt.ArgumentError, match=words):
            convert(source, where, rounding=rt.W4A16(32), progress=False, **options)
        assert sorted(tmp_path.rglob("*")) == before

    refused(tmp_path / "no" / "folder", "no does not exist")
    refused(source, "expected a folder beside it")
    refused(source / "inside", "expected a folder beside it")
    refused(tmp_path, "expected a folder beside it", overwrite=True)
    refused(source / "config.json", "expected a folder beside it")
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file", "is there and is not a folder", overwrite=True)
    (tmp_path / "dangling").symlink_to("nowhere")
    refused(tmp_path / "dangling", "is there and is not a folder")
    (tmp_path / "dangling").unlink()
    target.mkdir()
    convert(source, target, rounding=rt.W4A16(32), progress=False)  # an empty folder is as good as none
    refused(target, "not empty; --overwrite replaces it")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "precious").write_text("x")
    refused(tmp_path / "other", "no model to replace", overwrite=True)
    (target / "old").write_text("x")
    convert(source, target, rounding=rt.W4A16(64), overwrite=True, progress=False)
    assert not (target / "old").exists() and sorted(os.listdir(tmp_path)) == ["file", "other", "source", "target"]
    with pytest.raises(rt.NotSupportedError, match="quant_method is 'rooftile': nothing is left to convert"):
        convert(target, tmp_path / "again", progress=False)


# ---------------------------------------------------------------- read by transformers alone


def test_no_random_weights_where_rooftile_is_not_imported(tmp_path):
    """transformers warns of the unknown quant_method and goes on with linear layers: a shape must stop it."""
    source = tiny.write(tmp_path / "source", tiny.tensors(None, {}))
    convert(source, tmp_path / "w4", rounding=rt.W4A16(64), shard_bytes=40_000, progress=False)
    convert(source, tmp_path / "w8", rounding=rt.W8A16(32), progress=False)
    load(tmp_path / "w4").save_pretrained(tmp_path / "saved")
    folders = [tmp_path / name for name in ("w4", "w8", "saved")]
    done = subprocess.run(
        [sys.executable, "-c", tiny.READ_WITHOUT_ROOFTILE, *folders],
        env={**os.environ, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stdout.count("refused:") == len(folders), done.stderr
    lines = [line for line in done.stderr.splitlines() if "q_proj.weight" in line]  # what transformers says of each
    assert len(lines) == len(folders) and all("MISMATCH" in line for line in lines)


def without_markers(folder):
    """The folder as it was written before there were markers."""
    file = folder / "model.safetensors"
    state = safetensors.torch.load_file(file)
    markers = [f"{name}.weight" for name in tiny.MODULES]
    assert all(state.pop(name).shape == (1,) for name in markers)
    safetensors.torch.save_file(state, file, metadata={"format": "pt"})


@pytest.mark.parametrize("old", [False, True], ids=["marked", "of before there were markers"])
def test_a_folder_loads_without_a_warning(tmp_path, capfd, old):
    source = tiny.write(tmp_path / "source", tiny.tensors(None, {}))
    expected = load(source, torch.float16)
    rt.quantize_(expected, rt.W4A16(32), progress=False)
    convert(source, tmp_path / "target", rounding=rt.W4A16(32), progress=False)
    if old:
        without_markers(tmp_path / "target")
    capfd.readouterr()
    model = load(tmp_path / "target", torch.float16)
    assert "LOAD REPORT" not in capfd.readouterr().err
    assert_same_tensors(model, expected)
    # in the mapped file: safetensors puts what is behind its header at a multiple of 8
    assert all(b.data_ptr() % 8 == 0 for layer in layers(model).values() for b in layer.buffers())


# ---------------------------------------------------------------- the command


def test_the_command(tmp_path, capsys):
    w = {name: tiny.weight(name, shape) for name, shape in tiny.MODULES.items() if "down_proj" in name}
    source = tiny.write(tmp_path / "source", tiny.tensors(tiny.awq, w), tiny.awq_config())
    command = ["convert", str(source), str(tmp_path / "target"), "--group-size", "32", "--zeros", "minima"]
    assert main([*command, "--skip", "*.q_proj", "--skip", "*.k_proj", "--json", str(tmp_path / "report.json")]) == 0
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    assert ["down_proj", "2", "AWQ", "integer,", "groups", "of", "32,", "float16", "scales"] in [x[:9] for x in lines]
    assert any(line[:2] == ["up_proj", "2"] and "rounded" in line for line in lines)
    assert any(line[:5] == ["q_proj", "2", "float16", "float16", "kept"] for line in lines)
    assert "Copied: tokenizer_config.json" in out and f"Written: {tmp_path / 'target'}" in out
    names = {}
    exec(textwrap.dedent(out.partition("To load it:\n")[2]), names)  # the last lines
    assert len(layers(names["model"])) == 10 and names["model"].dtype == torch.float16
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["form"] == "AWQ 4-bit" and {row["outcome"] for row in report["rows"]} == {
        "4 bits, lossless",
        "4 bits, rounded to nearest",
        "kept",
    }
    assert len(layers(load(tmp_path / "target"))) == 10
    capsys.readouterr()
    assert main(command) == 2  # the target is there
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("rooftile convert: error: ") and "--overwrite" in err
    assert main([*command, "--overwrite", "--shard-size", "20KB"]) == 0
    assert len(list((tmp_path / "target").glob("*.safetensors"))) > 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none", "TARGET"], ("none", "No such file")),
        (["SOURCE", "SOURCE/inside"], ("expected a folder beside it",)),
        (["SOURCE", "TARGET", "--json", "no/such/folder/a.json"], ("--json", "does not exist")),
        (["SOURCE", "TARGET", "--group-size", "-1"], ("group_size must be",)),
        (["SOURCE", "TARGET", "--bits", "8", "--zeros", "minima"], ("zeros must be 'symmetric' with 8 bits",)),
        (["SOURCE", "TARGET", "--group-size", "48"], ("q_proj", "group_size must be 32, 64, 128 or K = 64, got 48")),
        (["SOURCE", "TARGET", "--dtype", "float16"], ("dtype is for GGUF files",)),
    ],
)
def test_mistakes_on_the_command_line(tmp_path, capsys, arguments, words):
    source = tiny.write(tmp_path / "source", tiny.tensors(None, {}))
    places = {"SOURCE": str(source), "TARGET": str(tmp_path / "target"), "SOURCE/inside": str(source / "inside")}
    assert main(["convert", *(places.get(a, a) for a in arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert all(word in err for word in words), err
    assert os.listdir(tmp_path) == ["source"]


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize(
    "path, name",
    [
        ("source/config.json", "SOURCE"),
        ("source/report.json", "SOURCE"),
        ("other/../source/model.safetensors", "SOURCE"),
        ("link/config.json", "SOURCE"),
        ("hard", "SOURCE"),
        ("target", "TARGET"),
        ("target/report.json", "TARGET"),
    ],
)
def test_the_report_is_no_file_of_a_model(tmp_path, capsys, path, name, there):
    """there: whether the target is."""
    source = tiny.write(tmp_path / "source", tiny.tensors(None, {}))
    (tmp_path / "link").symlink_to("source")
    (tmp_path / "other").mkdir()
    if there:
        shutil.copytree(source, tmp_path / "target")
    (tmp_path / "hard").hardlink_to(source / "config.json")
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    given = [str(source if path != "hard" else source / "config.json"), str(tmp_path / "target")]
    assert main(["convert", *given, "--overwrite", "--json", str(tmp_path / path)]) == 2
    assert f"--json {tmp_path / path}: is (or lies in) {name}; expected another file" in capsys.readouterr().err
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize(
    "number, ignored, turned",
    [
        ("SIGTERM", False, None),
        pytest.param("SIGHUP", False, None, marks=pytest.mark.slow),
        pytest.param("SIGHUP", True, None, marks=pytest.mark.slow),
        pytest.param("SIGINT", False, None, marks=pytest.mark.slow),
        pytest.param("SIGINT", True, None, marks=pytest.mark.slow),
        ("SIGINT", False, "ValueError"),  # as torch.tensor makes of whatever a handler raises inside it
        pytest.param("SIGINT", False, "rooftile.ArgumentError", marks=pytest.mark.slow),
        pytest.param("SIGTERM", False, "ValueError", marks=pytest.mark.slow),
    ],
)
def test_a_signal_leaves_no_draft(tmp_path, number, ignored, turned):
    """As one that a keyboard, a scheduler or a closed terminal sends; what `nohup` ignores goes on. turned: the error
    that the interrupted code makes of it."""
    tiny.write(tmp_path / "source", tiny.tensors(None, {}))
    code = f"""
import os, signal, sys
import rooftile
from rooftile.checkpoints import writer
from rooftile.cli import main

add = writer.ShardWriter.add

def signalled(self, tensors):
    add(self, tensors)
    try:
        os.kill(os.getpid(), signal.{number})
        sys.stdin.read()  # a handler runs by now
    except BaseException:
        raise {turned + "('could not determine the shape')" if turned else ""}

writer.ShardWriter.add = signalled
own = signal.default_int_handler if signal.{number} == signal.SIGINT else signal.SIG_DFL  # whoever runs the tests may
signal.signal(signal.{number}, signal.SIG_IGN if {ignored} else own)  # ignore it: nohup, a shell's background
sys.exit(main(["convert", "source", "target", "--group-size", "32"]))
"""
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(rt.__file__))}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=environment, input=""
    )
    left = sorted(os.listdir(tmp_path))
    if ignored:
        assert done.returncode == 0 and left == ["source", "target"]
    else:
        assert done.returncode == 128 + getattr(signal, number) and left == ["source"], done.stderr
        said = "interrupted" if number == "SIGINT" else f"ended by {number}"
        assert done.stderr == f"rooftile convert: error: {said}\n"


@pytest.mark.parametrize("size", ["4", "0MB", "-1GB", "big", "1TB"])
def test_shard_sizes(size, capsys):
    with pytest.raises(SystemExit):
        main(["convert", "a", "b", f"--shard-size={size}"])
    assert f"expected a size such as 500MB, 4GB or 2GiB, got '{size}'" in capsys.readouterr().err


def test_the_cache_and_the_weights_need_one_import():
    code = (
        "import rooftile.integrations.transformers\nfrom transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING\n"
    )
    path = os.path.dirname(os.path.dirname(rt.__file__))
    done = subprocess.run(
        [sys.executable, "-c", code + "assert 'rooftile' in AUTO_QUANTIZER_MAPPING"],
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0


@pytest.mark.slow
def test_a_config_is_utf_8_whatever_the_locale(tmp_path):
    source = tiny.write(tmp_path / "source", tiny.tensors(None, {}), note="K\u00e4se")
    text = (source / "config.json").read_text(encoding="utf-8").replace("K\\u00e4se", "K\u00e4se")
    (source / "config.json").write_text(text, encoding="utf-8")
    script = f"import rooftile.checkpoints as c; c.convert({str(source)!r}, {str(tmp_path / 'out')!r}, progress=False)"
    plain = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    subprocess.run([sys.executable, "-c", script], env=os.environ | plain, check=True)


def test_bytes_of_stored_tensors(tmp_path):
    names = "float64 int64 float32 int32 float16 bfloat16 uint8 int8".split()
    stored = {name: torch.zeros(3, 5, dtype=getattr(torch, name)) for name in names}
    safetensors.torch.save_file(stored, tmp_path / "a.safetensors")
    found = {info.name: info.nbytes for info in safetensors_header(tmp_path / "a.safetensors")}
    assert found == {name: tensor.nbytes for name, tensor in stored.items()}
