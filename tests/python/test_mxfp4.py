# SPDX-License-Identifier: Apache-2.0
"""gpt-oss as it is published, its experts in MXFP4, through `convert`."""

import copy
import json
import shutil

import numpy as np
import pytest

pytest.importorskip("safetensors")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import oracle  # noqa: E402
import rooftile as rt  # noqa: E402
import safetensors.torch  # noqa: E402
import tiny_checkpoints  # noqa: E402
from cases import generator  # noqa: E402
from rooftile.checkpoints import convert, folder  # noqa: E402
from rooftile.checkpoints import load as load_source  # noqa: E402
from rooftile.cli import main  # noqa: E402
from rooftile.experts import PackedExperts  # noqa: E402
from rooftile.integrations.quantizer import RooftileConfig  # noqa: E402
from rooftile.nn import PackedLinear  # noqa: E402
from test_moe import assert_same_model, assert_same_weights, load, model  # noqa: E402

EXPERTS = 5
SHAPES = {"gate_up_proj": (192, 64), "down_proj": (64, 96)}  # [out_features, in_features]
CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
FIRST = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield


def random_bytes(name, shape, low=0, high=256):
    return torch.from_numpy(generator(name).integers(low, high, shape).astype(np.uint8))


def state_of(plain):
    """The tensors of a folder: those of a gpt-oss, with experts of random blocks, whose values `plain` gets too."""
    state = dict(plain.state_dict())
    for layer, block in enumerate(plain.model.layers):
        for name, (n, k) in SHAPES.items():
            place = f"model.layers.{layer}.mlp.experts.{name}"
            del state[place]
            blocks = random_bytes(f"{place} blocks", (EXPERTS, n, k // 32, 16))
            scales = random_bytes(f"{place} scales", (EXPERTS, n, k // 32), 122, 126)
            state |= {f"{place}_blocks": blocks, f"{place}_scales": scales}
            values = torch.from_numpy(oracle.mxfp4(blocks.numpy(), scales.numpy()))
            parameter = getattr(block.mlp.experts, name)
            parameter.copy_(values.transpose(1, 2))
            assert torch.equal(parameter.double(), values.transpose(1, 2))  # bfloat16 holds them all
    return state


def write(path, plain, state, config=CONFIG):
    plain.save_pretrained(path)
    safetensors.torch.save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(fields | {"quantization_config": config}))
    return path


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """(folder, the same model in bfloat16)"""
    with torch.no_grad():
        plain = model("gpt_oss", torch.bfloat16)
        return write(tmp_path_factory.mktemp("published") / "source", plain, state_of(plain)), plain


def again(published):
    """The folder's tensors, to be changed."""
    source, plain = published
    return plain, safetensors.torch.load_file(source / "model.safetensors")


def test_the_values_are_those_that_transformers_reads(published):
    """transformers' own reading of such a folder, in bfloat16."""
    source, plain = published
    config = transformers.Mxfp4Config(dequantize=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto", quantization_config=config)
    assert_same_weights(theirs, plain)


ROUNDINGS = [rt.W4A16(64), rt.W4A16(32, "minima"), rt.W8A16(32)]


@pytest.mark.parametrize("rounding", ROUNDINGS, ids=repr)
def test_rounded_like_the_same_model_in_16_bits(published, rounding, tmp_path):
    source, plain = published
    plain.save_pretrained(tmp_path / "16 bits")
    expected = convert(tmp_path / "16 bits", tmp_path / "expected", rounding=rounding, progress=False)
    report = convert(source, tmp_path / "target", rounding=rounding, progress=False)
    ours = load(tmp_path / "target")
    assert_same_model(ours, load(tmp_path / "expected"))
    assert_same_weights(load_source(source, rounding=rounding, dtype=torch.float32, progress=False), ours)
    rows = {row["name"]: row for row in report["rows"]}
    assert rows.keys() == {row["name"] for row in expected["rows"]} and report["form"] == "MXFP4"
    assert {key: report[key] for key in ("left", "smaller_groups", "elements")} == {
        key: expected[key] for key in ("left", "smaller_groups", "elements")
    }
    row = rows["model.layers.1.mlp.experts.down"]
    assert (row["from"], row["outcome"]) == ("MXFP4", f"{rounding.bits} bits, rounded to nearest")
    assert row["bytes_before"] == EXPERTS * 64 * 96 // 32 * 17


def test_a_header_of_any_length(published, tmp_path):
    """Biases in 16 bits begin between their elements then, and experts of a 16-bit folder, however it is read."""
    source, plain = published
    rounding = rt.W4A16(64)
    convert(source, tmp_path / "expected", rounding=rounding, progress=False)
    expected = load(tmp_path / "expected")
    plain.save_pretrained(tmp_path / "16 bits")
    blocks = tiny_checkpoints.unalign(shutil.copytree(source, tmp_path / "blocks"))
    floats = tiny_checkpoints.unalign(shutil.copytree(tmp_path / "16 bits", tmp_path / "floats"))
    for i, path in enumerate((blocks, floats)):
        convert(path, tmp_path / f"target {i}", rounding=rounding, progress=False)
        assert_same_model(load(tmp_path / f"target {i}"), expected)
    assert_same_model(load(tiny_checkpoints.unalign(tmp_path / "expected")), expected)
    on_the_fly = load(tmp_path / "16 bits", quantization_config=RooftileConfig(64))
    assert_same_model(load(floats, quantization_config=RooftileConfig(64)), on_the_fly)
    in_place = load(floats)
    rt.quantize_(in_place, rounding, progress=False)
    assert_same_model(in_place, on_the_fly)


def test_weights_are_those_of_the_specification(published, tmp_path):
    """Against float64 from the specifications of both formats; nothing of rooftile but the reading."""
    source, _ = published
    convert(source, tmp_path / "target", rounding=rt.W4A16(32), progress=False)
    ours, stored = load(tmp_path / "target"), safetensors.torch.load_file(source / "model.safetensors")
    for layer in range(2):
        for name, stack in (("gate_up_proj", "gate_up"), ("down_proj", "down")):
            place = f"model.layers.{layer}.mlp.experts.{name}"
            dense = oracle.mxfp4(stored[f"{place}_blocks"].numpy(), stored[f"{place}_scales"].numpy())
            for i in range(EXPERTS):
                weight = getattr(ours.model.layers[layer].mlp.experts, stack)[i]
                codes, scales, _ = oracle.w4_quantize(dense[i], 32, dtype="bfloat16")
                assert np.array_equal(weight.dequantize().double().numpy(), oracle.w4_decode(codes, scales))
        experts = ours.model.layers[layer].mlp.experts
        for name in SHAPES:
            bias = f"{name}_bias"
            expected = stored[f"model.layers.{layer}.mlp.experts.{bias}"]
            assert expected.any() and torch.equal(getattr(experts, bias), expected.float())


def test_without_a_rounding_the_experts_alone_are_rounded(published, tmp_path):
    source, plain = published
    report = convert(source, tmp_path / "target", progress=False)
    ours = copy.deepcopy(plain)
    rt.quantize_(ours, rt.W4A16(), skip="*.self_attn.*", progress=False)
    there = load(tmp_path / "target")
    assert_same_weights(there, ours.float())
    assert not any(isinstance(module, PackedLinear) for module in there.modules())
    assert all(isinstance(layer.mlp.experts, PackedExperts) for layer in there.model.layers)
    reasons = {row["name"]: row["why"] for row in report["left"]}
    assert reasons["model.layers.0.self_attn.q_proj.weight"] == "as in the source"
    assert reasons["model.layers.0.mlp.router.weight"] == "routers"
    assert report["smaller_groups"] == {
        f"model.layers.{layer}.mlp.experts.{name}": {"gate_up_proj": 64, "down_proj": 32}[name]
        for layer in range(2)
        for name in SHAPES
    }


def test_skipped_experts_become_16_bits(published, tmp_path):
    source, plain = published
    report = convert(source, tmp_path / "target", rounding=rt.W4A16(32), skip="*.0.mlp.experts", progress=False)
    experts = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype="auto").model.layers
    for name in SHAPES:
        value = getattr(experts[0].mlp.experts, name)
        assert value.dtype == torch.bfloat16 and torch.equal(value, getattr(plain.model.layers[0].mlp.experts, name))
    assert isinstance(experts[1].mlp.experts, PackedExperts)
    rows = {row["name"]: row for row in report["rows"]}
    assert (rows[FIRST]["from"], rows[FIRST]["to"], rows[FIRST]["outcome"]) == ("MXFP4", "bfloat16", "dequantised")
    assert {row["name"]: row["why"] for row in report["left"]}[FIRST] == "skipped"


def test_one_expert_is_in_memory_at_a_time(published, tmp_path, monkeypatch):
    source, _ = published
    read, sizes = folder.TensorFolder.read, []

    def counted(self, name, *index):
        tensor = read(self, name, *index)
        if name.endswith(("_blocks", "_scales")):
            sizes.append(tensor.numel())
        return tensor

    monkeypatch.setattr(folder.TensorFolder, "read", counted)
    convert(source, tmp_path / "target", progress=False)
    assert max(sizes) == 192 * 64 // 2 and len(sizes) == 2 * 2 * 2 * EXPERTS


def test_every_code_and_every_scale(tmp_path):
    """All bytes of codes, under all scales that are read."""
    plain = model("gpt_oss", torch.bfloat16)
    state = state_of(plain)
    blocks, scales = state[f"{FIRST}_blocks"], state[f"{FIRST}_scales"]
    blocks.copy_(torch.arange(blocks.numel()).reshape(blocks.shape) * 37 % 256)
    scales.copy_(torch.arange(scales.numel()).reshape(scales.shape) % 253)
    source = write(tmp_path / "source", plain, state)
    there = load_source(source, rounding=rt.W4A16(32), skip="*.0.mlp.experts", progress=False)
    got = there.model.layers[0].mlp.experts.gate_up_proj
    expected = oracle.mxfp4(blocks.numpy(), scales.numpy())
    assert np.array_equal(got.transpose(1, 2).double().numpy(), expected)


def changed(suffix, change):
    def state(state):
        name = FIRST + suffix
        value = change(state.pop(name))
        return state if value is None else state | {name: value}

    return state


def put(value):
    def change(scales):
        scales[3, 7, 1] = value
        return scales

    return change


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (changed("_scales", lambda t: None), rt.ArgumentError, f"tensor '{FIRST}_scales' is missing"),
        (changed("_blocks", lambda t: None), rt.ArgumentError, f"tensor '{FIRST}_blocks' is missing"),
        (
            changed("_scales", lambda t: t[..., :1].clone()),
            rt.ArgumentError,
            f"tensor '{FIRST}_scales' has shape [5, 192, 1], expected [5, 192, 2] by config.json",
        ),
        (
            changed("_blocks", lambda t: t[:4].clone()),
            rt.ArgumentError,
            f"tensor '{FIRST}_blocks' has shape [4, 192, 2, 16], expected [5, 192, 2, 16] by config.json",
        ),
        (
            changed("_blocks", lambda t: t.flatten(2)),
            rt.ArgumentError,
            f"tensor '{FIRST}_blocks' has shape [5, 192, 32], expected [5, 192, 2, 16] by config.json",
        ),
        (
            changed("_scales", lambda t: t.to(torch.bfloat16)),
            rt.NotSupportedError,
            f"tensor '{FIRST}_scales' has dtype BF16, which is not read here; read: U8",
        ),
        (
            changed("_blocks", lambda t: t.view(torch.int8)),
            rt.NotSupportedError,
            f"tensor '{FIRST}_blocks' has dtype I8, which is not read here; read: U8",
        ),
        (
            changed("_scales", put(255)),
            rt.ArgumentError,
            f"tensor '{FIRST}_scales' [3] holds 255, expected 0 to 252 (255 is NaN",
        ),
        (changed("_scales", put(253)), rt.ArgumentError, f"tensor '{FIRST}_scales' [3] holds 253, expected 0 to 252"),
        (
            lambda state: state | {FIRST: torch.zeros(5, 64, 192, dtype=torch.bfloat16)},
            rt.NotSupportedError,
            f"tensor '{FIRST}_blocks' has no place in a gpt_oss model",
        ),
        (
            lambda state: state | {"model.layers.0.self_attn.q_proj.weight_blocks": torch.zeros(1, dtype=torch.uint8)},
            rt.NotSupportedError,
            "tensor 'model.layers.0.self_attn.q_proj.weight_blocks' has no place in a gpt_oss model",
        ),
    ],
)
def test_wrong_folders(published, tmp_path, change, error, words):
    plain, state = again(published)
    source = write(tmp_path / "source", plain, change(state))
    with pytest.raises(error) as caught:
        convert(source, tmp_path / "target", progress=False)
    assert words in str(caught.value) and str(source) in str(caught.value)
    assert not (tmp_path / "target").exists()


def test_rows_that_blocks_do_not_make_up(published, tmp_path):
    plain, state = again(published)
    source = write(tmp_path / "source", plain, state)
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"intermediate_size": 80}))
    state = {name: t for name, t in state.items() if "gate_up" not in name}
    for layer in range(2):
        place = f"model.layers.{layer}.mlp.experts.gate_up_proj"
        state |= {
            f"{place}_blocks": torch.zeros(5, 160, 2, 16, dtype=torch.uint8),
            f"{place}_scales": torch.zeros(5, 160, 2, dtype=torch.uint8),
            f"{place}_bias": torch.zeros(5, 160, dtype=torch.bfloat16),
        }
    safetensors.torch.save_file(state, source / "model.safetensors", metadata={"format": "pt"})
    words = "down_proj_blocks' holds blocks of 32, which do not make the rows of 80"
    with pytest.raises(rt.ArgumentError, match=words):
        convert(source, tmp_path / "target", rounding=rt.W4A16(32), skip="*.experts", progress=False)


@pytest.mark.parametrize(
    "config", [None, {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}]
)
def test_blocks_without_a_word_in_the_config(published, tmp_path, config):
    plain, state = again(published)
    source = write(tmp_path / "source", plain, state, config)
    with pytest.raises(rt.NotSupportedError, match=r"experts.*_(blocks|scales)' has no place in a gpt_oss model"):
        convert(source, tmp_path / "target", rounding=rt.W4A16(32), progress=False)


def test_the_command(published, tmp_path, capsys):
    source, _ = published
    assert main(["convert", str(source), str(tmp_path / "target")]) == 0
    out = capsys.readouterr().out
    assert "source (MXFP4)" in out and "Left as they were, as in the source: " in out
