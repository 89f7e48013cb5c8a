# SPDX-License-Identifier: Apache-2.0
"""Mixture-of-experts models: experts in 4 and 8 bits, rounded in place and while read, saved and loaded."""

import copy
import functools
import io
import json
import re
import subprocess
import sys

import pytest

pytest.importorskip("safetensors")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import closeness  # noqa: E402
import rooftile as rt  # noqa: E402
import safetensors.torch  # noqa: E402
import tiny_checkpoints as tiny  # noqa: E402
from rooftile import _calls  # noqa: E402
from rooftile.checkpoints import convert  # noqa: E402
from rooftile.cli import main  # noqa: E402
from rooftile.experts import PackedExperts, PackedStack  # noqa: E402
from rooftile.integrations.quantizer import RooftileConfig  # noqa: E402
from rooftile.nn import PackedLinear  # noqa: E402

IDS = torch.tensor([[5, 80, 26, 7, 30, 44, 58, 9, 12, 0, 31], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]])
COMMON = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
}
FAMILIES = {
    "mixtral": {"intermediate_size": 96, "num_local_experts": 18},
    "qwen2_moe": {"moe_intermediate_size": 96, "shared_expert_intermediate_size": 64, "num_experts": 5},
    "qwen3_moe": {"moe_intermediate_size": 96, "num_experts": 5, "head_dim": 16, "num_experts_per_tok": 3},
    "gpt_oss": {"intermediate_size": 96, "num_local_experts": 5, "head_dim": 16},
}


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


def model(family, dtype=torch.float32, **changes):
    """Random weights and biases, so large that every expert and every clamp counts."""
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[family](**COMMON | FAMILIES[family] | changes)
    made = transformers.AutoModelForCausalLM.from_config(config).eval()
    made.set_experts_implementation("eager")  # the others know no float64
    for name, parameter in made.named_parameters():
        size = 1.5 if name.endswith("bias") else 0.25
        parameter.data = (torch.randn(parameter.shape) * size).to(dtype)  # .to of the model would round inv_freq too
    return made


def dequantised(plain, ours):
    """`plain` with the weights that `ours` stands for."""
    plain = copy.deepcopy(plain)
    for name, module in ours.named_modules():
        if isinstance(module, PackedLinear):
            plain.get_submodule(name).weight.copy_(module.weight.dequantize())
        elif isinstance(module, PackedExperts):
            there = plain.get_submodule(name)
            for parameter, stack in ((there.gate_up_proj, module.gate_up), (there.down_proj, module.down)):
                dense = torch.stack([stack[i].dequantize() for i in range(len(stack))])
                parameter.copy_(dense.transpose(1, 2) if there.is_transposed else dense)
    return plain


def assert_same_weights(a, b):
    ours, theirs = a.state_dict(), b.state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert value.dtype == theirs[name].dtype and torch.equal(value, theirs[name]), name


def assert_same_model(a, b):
    assert_same_weights(a, b)
    assert torch.equal(a(IDS).logits, b(IDS).logits)


def load(folder, **options):
    options |= {"experts_implementation": "eager"}  # of experts that are not packed, as in model()
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)


@pytest.mark.parametrize("rounding", [rt.W4A16(64), rt.W4A16(32, "minima"), rt.W8A16(64)], ids=repr)
def test_logits_are_those_of_the_dequantised_weights(family, rounding):
    ours, plain = model(family), model(family)
    report = rt.quantize_(ours, rounding, progress=False)
    got, expected = ours(IDS).logits, dequantised(plain, ours)(IDS).logits
    assert (got - expected).abs().max() <= 2e-5 * expected.abs().max()
    assert (plain(IDS).logits - got).abs().max() > 1e-3 * expected.abs().max()
    experts = {f"model.layers.{i}.mlp.experts.{name}" for i in (0, 1) for name in ("gate_up_proj", "down_proj")}
    assert experts <= report.group_sizes.keys() and len(report.group_sizes) >= 12
    sizes = {report.group_sizes[name] for name in experts if name.endswith("down_proj")}
    assert sizes == {32} and report.smaller_groups.keys() >= {
        n for n in experts if "down" in n and rounding.group_size > 32
    }
    routers = {name for name, (_, why) in report.left.items() if why == "routers"}
    expected = {"gpt_oss": "mlp.router.weight"}.get(family, "mlp.gate.weight")
    assert {name.rpartition("layers.0.")[2] for name in routers} >= {expected}
    gate = report.left.get("model.layers.1.mlp.shared_expert_gate.weight")
    assert gate == ((64, "fewer than 16 outputs") if family == "qwen2_moe" else None)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_in_16_bits(family, dtype):
    """The experts alone, since routers choose differently where they are close."""
    ours, plain = model(family, dtype), model(family, dtype)
    rt.quantize_(ours, rt.W4A16(32), progress=False)
    block, there = ours.model.layers[0].mlp.experts, dequantised(plain, ours).model.layers[0].mlp.experts
    x, weights = torch.randn(7, 64).to(dtype), torch.rand(7, 3).to(dtype)
    chosen = torch.stack([torch.randperm(5)[:3] for _ in range(7)])
    got, naive = block(x, chosen, weights), there(x, chosen, weights)
    exact = there.double()(x.double(), chosen, weights.double())
    assert got.dtype == dtype
    closeness.assert_close(got, naive.double().numpy(), exact.numpy())


def test_a_token_does_not_depend_on_its_neighbours(family):
    ours = model(family)
    rt.quantize_(ours, rt.W4A16(32), progress=False)
    experts = ours.model.layers[0].mlp.experts
    x, weights = torch.randn(9, 64), torch.rand(9, 2)
    chosen = torch.stack([torch.randperm(5)[:2] for _ in range(9)])
    alone = torch.cat([experts(x[i : i + 1], chosen[i : i + 1], weights[i : i + 1]) for i in range(9)])
    closeness.assert_bits_equal(experts(x, chosen, weights), alone)
    closeness.assert_bits_equal(experts(x[:0], chosen[:0], weights[:0]), x[:0])
    nobody = torch.full_like(chosen, experts.form.experts)  # what expert parallelism calls an expert elsewhere
    assert not experts(x, nobody, weights).any()


def test_a_model_rounded_in_place_is_saved_and_loaded(family, tmp_path, capfd):
    ours = model(family)
    rt.quantize_(ours, rt.W4A16(64), progress=False)
    ours.save_pretrained(tmp_path / "saved")
    load(tmp_path / "saved")
    assert "LOAD REPORT" not in capfd.readouterr().err  # no tensor is missing or without a place
    assert_same_model(load(tmp_path / "saved"), ours)


@pytest.mark.slow
def test_experts_are_not_random_where_rooftile_is_not_imported(tmp_path):
    """Of a model whose linear layers are all in 16 bits: what stops transformers is in the experts."""
    folders = []
    for family in FAMILIES:
        ours = model(family)
        report = rt.quantize_(ours, rt.W4A16(32), skip=["*_proj"], progress=False)
        assert report.group_sizes == {}
        ours = model(family)
        beside = {part for name, _ in ours.named_modules() for part in name.split(".")} & {"self_attn", "shared_expert"}
        rt.quantize_(ours, rt.W4A16(32), skip=[f"*.{part}.*" for part in beside], progress=False)
        assert not any(isinstance(module, PackedLinear) for module in ours.modules())
        ours.save_pretrained(tmp_path / family)
        assert_same_weights(load(tmp_path / family), ours)
        folders.append(tmp_path / family)
    done = subprocess.run([sys.executable, "-c", tiny.READ_WITHOUT_ROOFTILE, *folders], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("refused:") == len(FAMILIES), done.stderr


def test_rounded_while_it_is_read(family, tmp_path):
    ours = model(family)
    ours.save_pretrained(tmp_path / "source")
    on_the_fly = load(tmp_path / "source", quantization_config=RooftileConfig(64))
    report = rt.quantize_(ours, rt.W4A16(64), progress=False)
    assert_same_model(on_the_fly, ours)
    assert on_the_fly.hf_quantizer.report == report and not on_the_fly.hf_quantizer.is_trainable
    assert not any(
        p.requires_grad for m in on_the_fly.modules() if isinstance(m, PackedExperts) for p in m.parameters()
    )
    on_the_fly.save_pretrained(tmp_path / "saved")
    assert_same_model(load(tmp_path / "saved"), ours)


def test_experts_may_be_skipped(tmp_path):
    ours = model("qwen3_moe")
    report = rt.quantize_(ours, rt.W4A16(32), skip="*.0.mlp.experts", progress=False)
    assert report.left["model.layers.0.mlp.experts.gate_up_proj"] == (5 * 192 * 64, "skipped")
    kinds = [type(layer.mlp.experts) for layer in ours.model.layers]
    assert kinds[1] is PackedExperts and kinds[0] is not PackedExperts
    ours.save_pretrained(tmp_path / "saved")
    assert_same_weights(load(tmp_path / "saved"), ours)


@pytest.mark.parametrize("skip", ["*.down_proj", "*.gate_up_proj", "model.layers.?.mlp.experts.down_proj"])
def test_experts_of_which_one_tensor_is_skipped_stay_whole(family, skip, tmp_path):
    """In place, while they are read and in a converted folder; the report says so."""
    ours, skip = model(family), [skip]
    ours.save_pretrained(tmp_path / "source")
    report = rt.quantize_(ours, rt.W4A16(32), skip=skip, progress=False)
    reasons = {"gate_up_proj": "experts whose down_proj is left", "down_proj": "experts whose gate_up_proj is left"}
    reasons["down_proj" if "down" in skip[0] else "gate_up_proj"] = "skipped"
    for layer in ours.model.layers:
        assert not isinstance(layer.mlp.experts, PackedExperts) and isinstance(layer.self_attn.q_proj, PackedLinear)
    assert {name: report.left[f"model.layers.1.mlp.experts.{name}"][1] for name in reasons} == reasons
    assert all(reason in str(report) for reason in reasons.values())
    assert ours(IDS).logits.isfinite().all()
    ours.save_pretrained(tmp_path / "saved")
    converted = convert(tmp_path / "source", tmp_path / "target", rounding=rt.W4A16(32), skip=skip, progress=False)
    assert {row["name"]: (row["elements"], row["why"]) for row in converted["left"]} == report.left
    read = load(tmp_path / "source", quantization_config=RooftileConfig(32, skip=skip))
    assert read.hf_quantizer.report == report
    for other in (read, load(tmp_path / "saved"), load(tmp_path / "target")):
        assert_same_weights(other, ours)
        assert (other(IDS).logits - ours(IDS).logits).abs().max() <= 2e-5 * ours(IDS).logits.abs().max()


def test_torch_before_2_7_does_not_say_that_it_exports(monkeypatch):
    monkeypatch.delattr(torch.compiler, "is_exporting")
    _calls.refuse_export("KVCache", "no reason")


def test_export_of_packed_experts_is_refused_by_name():
    ours = model("mixtral")
    rt.quantize_(ours, rt.W4A16(32), progress=False)
    with torch.no_grad(), pytest.raises(rt.NotSupportedError, match=r"PackedExperts: torch.export .*on the host"):
        torch.export.export(ours, (torch.ones(1, 4, dtype=torch.long),), kwargs={"use_cache": False})


@pytest.mark.parametrize("index", [-1, 18, 10**6, 10**11])
def test_an_index_that_is_no_experts_adds_nothing(index):
    ours = model("mixtral")
    rt.quantize_(ours, rt.W4A16(32), progress=False)
    experts = ours.model.layers[0].mlp.experts
    x, chosen, weights = torch.randn(3, 64), torch.tensor([[0, 1], [2, 1], [2, 3]]), torch.full((3, 2), 0.5)
    assert len(experts.down) == 18
    expected = experts(x, chosen, weights * torch.tensor([[1.0, 1.0], [0.0, 1.0], [1.0, 1.0]]))
    chosen[1, 0] = index
    assert torch.equal(experts(x, chosen, weights), expected)


@pytest.mark.parametrize("name", ["gate", "router", "router_gate", "mlp_router", "gate_proj"])
def test_a_router_is_known_by_its_name(name):
    block = torch.nn.ModuleDict({name: torch.nn.Linear(64, 32), "up": torch.nn.Linear(64, 32)})
    report = rt.quantize_(block, rt.W4A16(32), progress=False)
    assert set(report.group_sizes) == ({"gate_proj", "up"} if name == "gate_proj" else {"up"})


def test_experts_with_another_gate_are_left_and_named():
    ours = model("qwen3_moe", hidden_act="relu")
    report = rt.quantize_(ours, rt.W4A16(32), progress=False)
    left = {name for name, (_, why) in report.left.items() if why == "experts of a form not known"}
    assert left == {f"model.layers.{i}.mlp.experts.{name}" for i in (0, 1) for name in ("gate_up_proj", "down_proj")}
    assert "Left as they were, experts of a form not known: 82.9 %" in str(report)


def test_hooks_of_experts_go_over():
    ours, seen = model("mixtral"), []
    left, hooked = (layer.mlp.experts for layer in ours.model.layers)
    left.forward = functools.partial(left.forward)  # of the instance, as accelerate sets it
    hooked.eval().register_forward_hook(lambda module, args, y: seen.append(type(module)))
    report = rt.quantize_(ours, rt.W4A16(32), progress=False)
    ours(IDS)
    assert seen == [PackedExperts] and not ours.model.layers[1].mlp.experts.training
    assert ours.model.layers[0].mlp.experts is left
    reasons = {why for name, (_, why) in report.left.items() if ".0.mlp.experts." in name}
    assert reasons == {"forward or another attribute overridden"}


def test_experts_at_two_places_are_one_module():
    ours = model("mixtral")
    layers = ours.model.layers
    layers[1].mlp.experts = layers[0].mlp.experts
    report = rt.quantize_(ours, rt.W4A16(32), progress=False)
    assert type(layers[0].mlp.experts) is PackedExperts and layers[1].mlp.experts is layers[0].mlp.experts
    assert "model.layers.1.mlp.experts.down_proj" not in report.group_sizes
    assert report.total == sum(p.numel() for p in model("mixtral").parameters()) - 3 * 18 * 64 * 96


def test_values_that_no_scale_holds_are_refused(tmp_path, caplog):
    """In place, while they are read, and by convert: before anything is written."""
    ours = model("mixtral")
    ours.model.layers[1].mlp.experts.down_proj.data[3, 5, 7] = 1e30
    ours.save_pretrained(tmp_path / "source")
    says = r"layers.1.mlp.experts.down_proj: weight must lie within \+-458528, .* got a value of 1e\+30"
    with pytest.raises(rt.ArgumentError, match=f"^quantize_: .*{says}"):
        rt.quantize_(ours, rt.W4A16(32), progress=False)
    with pytest.raises(rt.ArgumentError, match=f"^convert: .*{says}"):
        convert(tmp_path / "source", tmp_path / "target", rounding=rt.W4A16(32), progress=False)
    assert not (tmp_path / "target").exists()
    with pytest.raises(RuntimeError, match="CONVERSION"):  # transformers' word for what it has logged
        load(tmp_path / "source", quantization_config=RooftileConfig(32))
    assert re.search(f"RooftileConfig: .*{says}", caplog.text)


def test_one_stack_without_the_other_is_refused(tmp_path):
    ours = model("mixtral")
    rt.quantize_(ours, rt.W4A16(32), progress=False)
    ours.save_pretrained(tmp_path / "saved")
    path = tmp_path / "saved" / "config.json"
    config = json.loads(path.read_text())
    for entry in config["quantization_config"]["layouts"]:
        entry["modules"] = [name for name in entry["modules"] if not name.endswith("1.mlp.experts.down")]
    path.write_text(json.dumps(config))
    with pytest.raises(rt.ArgumentError, match=r"'model.layers.1.mlp.experts' has one of gate_up, down, expected both"):
        load(tmp_path / "saved")


def test_copies_and_moves():
    ours = model("gpt_oss")
    rt.quantize_(ours, rt.W4A16(32), progress=False)
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    for other in (copy.deepcopy(ours), torch.load(file, weights_only=False)):
        assert_same_model(other, ours)
    half = copy.deepcopy(ours).to(torch.bfloat16)
    assert half.model.layers[0].mlp.experts.gate_up_proj_bias.dtype == torch.bfloat16
    assert torch.equal(half.model.layers[0].mlp.experts.down.codes, ours.model.layers[0].mlp.experts.down.codes)


@pytest.mark.parametrize(
    "before", [{"quant_method": "gptq"}, transformers.BitsAndBytesConfig()], ids=["dict", "config"]
)
def test_what_another_library_quantised_is_refused(before):
    ours = model("mixtral")
    ours.config.quantization_config = before
    with pytest.raises(rt.NotSupportedError, match=r"^quantize_: model has a quantization_config of (gptq|bitsandb)"):
        rt.quantize_(ours, rt.W4A16(32), progress=False)
    assert not any(isinstance(module, PackedLinear | PackedExperts) for module in ours.modules())


def test_stacks():
    def weight(seed, **options):
        torch.manual_seed(seed)
        return rt.W4Weight.quantize(torch.randn(48, 64), group_size=32, **options)

    codes, scales, _ = weight(1).unpack()
    zeros = torch.randint(0, 16, scales.shape, dtype=torch.uint8)
    perm = torch.randperm(64).to(torch.int32)
    mixed = [
        weight(0),
        rt.W4Weight.from_canonical(codes, scales, zeros),
        rt.W4Weight.from_canonical(codes, scales, perm=perm),
    ]
    stack = PackedStack.from_weights(mixed)
    assert len(stack) == 3 and "experts=3, in_features=64, out_features=48, integer, group_size=32" in repr(stack)
    for ours, theirs in zip(stack, mixed, strict=True):
        assert torch.equal(ours.dequantize(), theirs.dequantize()) and ours.kind == "integer" and ours.perm is not None
    empty = PackedStack(3, 64, 48, group_size=32, kind="integer", act_order=True)
    empty.load_state_dict(stack.state_dict())
    x = torch.randn(2, 64)
    closeness.assert_bits_equal(rt.w4a16_matmul(x, empty[2]), rt.w4a16_matmul(x, mixed[2]))
    with pytest.raises(rt.ArgumentError, match="experts must be of one kind, got minima and symmetric"):
        PackedStack.from_weights([weight(0), weight(1, zeros="minima")])
    with pytest.raises(
        rt.ArgumentError, match=r"expert 1 must have the first one's shape = \(48, 64\), got \(32, 64\)"
    ):
        PackedStack.from_weights([weight(0), rt.W4Weight.quantize(torch.zeros(32, 64), group_size=32)])
    with pytest.raises(rt.ArgumentError, match="expert 1 must be a W4Weight, got a W8Weight"):
        PackedStack.from_weights([weight(0), rt.W8Weight.quantize(torch.zeros(48, 64), group_size=32)])
    with pytest.raises(rt.ArgumentError, match="PackedStack: bits must be 4 or 8, got 2"):
        PackedStack(3, 64, 48, bits=2)


# ---------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("source_form", ["as transformers writes it", "fused"])
def test_16_bit_folders(family, source_form, tmp_path):
    """transformers writes experts one by one, but gpt-oss's; a folder may hold them fused as well."""
    ours, source = model(family, torch.float16), tmp_path / "source"
    ours.save_pretrained(source)
    if source_form == "fused":
        safetensors.torch.save_file(ours.state_dict(), source / "model.safetensors", metadata={"format": "pt"})
    report = convert(source, tmp_path / "target", rounding=rt.W4A16(64), skip="*.1.mlp.experts", progress=False)
    plan = rt.quantize_(ours, rt.W4A16(64), skip="*.1.mlp.experts", progress=False)
    assert_same_weights(load(tmp_path / "target"), ours.float())
    left = {row["name"]: (row["elements"], row["why"]) for row in report["left"]}
    assert left == plan.left and report["smaller_groups"] == plan.smaller_groups and report["elements"] == plan.total
    assert left["model.layers.1.mlp.experts.gate_up_proj"][1] == "skipped"


EXPERTS = 4
CHECKPOINTS = {
    "gptq-act-order": (tiny.gptq, {"act_order": True}, tiny.gptq_config(desc_act=True), "integer"),
    "gptq-symmetric": (tiny.gptq, {"symmetric": True}, tiny.gptq_config(sym=True), "symmetric"),
    "gptq-8": (tiny.gptq, {"bits": 8}, tiny.gptq_config(bits=8), "integer"),
    "awq": (tiny.awq, {"lowest": 0}, tiny.awq_config(), "integer"),
    "ct": (
        lambda w: tiny.compressed_tensors(w, True),
        {"symmetric": True},
        tiny.compressed_tensors_config(ignore=["lm_head", "re:.*gate$", "re:.*self_attn.*", "re:.*shared_expert.*"]),
        "symmetric",
    ),
}
PARTS = {"gate_proj": (96, 64), "up_proj": (96, 64), "down_proj": (64, 96)}
MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def packed_folder(path, family, form, **changed):
    """A folder with packed experts under the names of the family; their Weights by (layer, expert, part)."""
    pack, options, config, _ = CHECKPOINTS[form]
    count = {"num_local_experts" if family == "mixtral" else "num_experts": EXPERTS}
    plain = model(family, torch.float16, **count)
    state, weights = dict(plain.state_dict()), {}
    for layer in range(2):
        place = f"model.layers.{layer}.mlp"
        stored = place.replace("mlp", "block_sparse_moe") if family == "mixtral" else place
        state[f"{stored}.gate.weight"] = state.pop(f"{place}.gate.weight")
        for fused in ("gate_up_proj", "down_proj"):
            del state[f"{place}.experts.{fused}"]
        for expert in range(EXPERTS):
            for part, shape in PARTS.items():
                w = tiny.weight(f"{layer} {expert} {part}", shape, **options | changed.get(part, {}))
                if part == "up_proj" and "up_proj" not in changed:  # what flows into both is the same
                    w.groups = weights[layer, expert, "gate_proj"].groups
                weights[layer, expert, part] = w
                name = f"{stored}.experts.{expert}.{MIXTRAL[part] if family == 'mixtral' else part}"
                state.update((f"{name}.{suffix}", tensor) for suffix, tensor in pack(w).items())
    plain.save_pretrained(path)
    safetensors.torch.save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(fields | {"quantization_config": config}))
    return plain.float(), weights


@pytest.mark.parametrize(
    ("family", "form"),
    [*((family, form) for family in ("mixtral", "qwen2_moe") for form in CHECKPOINTS), ("qwen3_moe", "awq")],
)
def test_packed_experts(family, form, tmp_path):
    plain, weights = packed_folder(tmp_path / "source", family, form)
    report = convert(tmp_path / "source", tmp_path / "target", progress=False)
    ours = load(tmp_path / "target")
    for layer in range(2):
        experts, there = ours.model.layers[layer].mlp.experts, plain.model.layers[layer].mlp.experts
        for i in range(EXPERTS):
            gate, up, down = (weights[layer, i, part].dense for part in PARTS)
            assert torch.equal(experts.gate_up[i].dequantize(), torch.cat((gate, up)))
            assert torch.equal(experts.down[i].dequantize(), down)
            there.gate_up_proj[i], there.down_proj[i] = torch.cat((gate, up)), down
        assert experts.down[0].kind == CHECKPOINTS[form][3]
        assert (experts.gate_up.perm is not None) == ("act-order" in form)
    expected = plain(IDS).logits
    assert (ours(IDS).logits - expected).abs().max() <= 2e-5 * expected.abs().max()
    bits = 8 if form == "gptq-8" else 4
    outcomes = {row["name"]: row["outcome"] for row in report["rows"]}
    assert outcomes["model.layers.1.mlp.experts.gate_up"] == f"{bits} bits, lossless"
    assert outcomes["model.layers.1.mlp.gate.weight"] == "kept"


def test_experts_that_cannot_be_stacked_are_refused(tmp_path):
    packed_folder(tmp_path / "orders", "qwen2_moe", "gptq-act-order", up_proj={})
    with pytest.raises(rt.NotSupportedError, match=r"experts.0.gate_proj, and the experts beside it: .*act-order"):
        convert(tmp_path / "orders", tmp_path / "target", progress=False)
    packed_folder(tmp_path / "source", "mixtral", "awq")
    file = tmp_path / "source" / "model.safetensors"
    state = safetensors.torch.load_file(file)
    del state["model.layers.1.block_sparse_moe.experts.2.w3.qweight"]
    safetensors.torch.save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(rt.ArgumentError, match=r"1.block_sparse_moe.experts.2.w3.qweight' is missing"):
        convert(tmp_path / "source", tmp_path / "target", progress=False)


def test_experts_that_a_source_holds_packed_in_part(tmp_path):
    """They are rounded too, where a rounding is given; a folder with one of both nobody reads."""
    _, weights = packed_folder(tmp_path / "source", "mixtral", "awq")
    file = tmp_path / "source" / "model.safetensors"
    state = safetensors.torch.load_file(file)
    for layer, expert in ((i, j) for i in range(2) for j in range(EXPERTS)):
        name = f"model.layers.{layer}.block_sparse_moe.experts.{expert}.w2"
        for suffix in ("qweight", "qzeros", "scales"):
            del state[f"{name}.{suffix}"]
        state[f"{name}.weight"] = weights[layer, expert, "down_proj"].dense.to(torch.float16)
    safetensors.torch.save_file(state, file, metadata={"format": "pt"})
    for options in ({}, {"rounding": rt.W4A16(32), "skip": "*.down_proj"}):
        with pytest.raises(
            rt.NotSupportedError, match=r"experts' would have gate_up_proj in 4 or 8 bits, down_proj in 16 or 32 bits"
        ):
            convert(tmp_path / "source", tmp_path / "target", **options, progress=False)
    convert(tmp_path / "source", tmp_path / "target", rounding=rt.W4A16(32), progress=False)
    assert isinstance(load(tmp_path / "target").model.layers[1].mlp.experts, PackedExperts)


def test_a_tensor_of_an_expert_that_means_nothing_is_named(tmp_path):
    model("qwen2_moe", torch.float16).save_pretrained(tmp_path / "source")
    file = tmp_path / "source/model.safetensors"
    state = safetensors.torch.load_file(file)
    for name in ("None", "qweight"):
        extra = f"model.layers.0.mlp.experts.0.gate_proj.{name}"
        safetensors.torch.save_file({**state, extra: torch.zeros(1)}, file, metadata={"format": "pt"})
        with pytest.raises(rt.NotSupportedError, match=f"tensor '{extra}' has no place"):
            convert(tmp_path / "source", tmp_path / "target", rounding=rt.W4A16(32), progress=False)


def test_the_command_says_what_is_left(tmp_path, capsys):
    model("qwen2_moe", torch.float16).save_pretrained(tmp_path / "source")
    assert main(["convert", str(tmp_path / "source"), str(tmp_path / "target")]) == 0
    out = capsys.readouterr().out
    assert "Groups of 32, since 128 does not divide their columns: 2 experts.down_proj" in out
    assert "Left as they were, routers: 0." in out and "(gate)" in out
    assert "Left as they were, fewer than 16 outputs: 0." in out and "(shared_expert_gate)" in out


def test_convolutions_are_no_experts():
    """A Linear with as many outputs as a convolution beside it has channels is no router."""
    plain = torch.nn.Sequential(torch.nn.Conv1d(64, 64, 3), torch.nn.Linear(64, 64))
    report = rt.quantize_(plain, rt.W4A16(32), progress=False)
    assert isinstance(plain[1], PackedLinear)
    assert {why for _, why in report.left.values()} == {"no weight of a plain Linear", "norms and biases"}


def test_an_encoder_with_convolutions_is_rounded():
    shapes = {f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in (("layers", 1), ("ffn_dim", 128))}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_mel_bins": 64}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = transformers.WhisperConfig(
        vocab_size=128, d_model=64, max_source_positions=100, max_target_positions=64, **shapes, **heads, **tokens
    )
    report = rt.quantize_(transformers.WhisperForConditionalGeneration(config), rt.W4A16(32), progress=False)
    reasons = {name: why for name, (_, why) in report.left.items()}
    assert not {"routers", "experts of a form not known"} & set(reasons.values())
    assert not [name for name in reasons if "_proj.weight" in name or "fc2.weight" in name]
