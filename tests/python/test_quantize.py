# SPDX-License-Identifier: Apache-2.0
"""quantize_: what it replaces, what goes over to the new modules, what it leaves and refuses."""

import copy
import functools

import closeness
import pytest
import rooftile as rt
import torch
from cases import linear
from rooftile.nn import W4Linear, W8Linear

pytestmark = pytest.mark.usefixtures("inference")


def quantized(model, config=None, **options):
    return rt.quantize_(model, config or rt.W4A16(32), progress=False, **options)


def reasons(report):
    return {name.removesuffix(".weight"): why for name, (_, why) in report.left.items() if "bias" not in name}


# ---------------------------------------------------------------- a module at several places


@pytest.mark.parametrize("config", [rt.W4A16(32), rt.W8A16(32)], ids=repr)
def test_a_module_at_two_places_is_one_module_at_both(config):
    shared, block = linear(64, 64), torch.nn.Sequential(linear(64, 64))
    model = torch.nn.ModuleDict({"a": torch.nn.Sequential(shared, shared), "b": shared, "c": block, "d": block})
    report = quantized(model, config)
    assert type(model.b) is (W4Linear if config.bits == 4 else W8Linear)
    assert model.a[0] is model.a[1] is model.b and model.c is model.d is block and type(block[0]) is type(model.b)
    assert report.group_sizes == {"a.0": 32, "c.0": 32} and report.rounded == 2 * 64 * 64
    assert report.total == report.rounded + sum(elements for elements, _ in report.left.values()) == 2 * 65 * 64
    x = torch.randn(2, 64)
    closeness.assert_bits_equal(model.a[1](x), model.b(x))


@pytest.mark.parametrize("place", ["b.0", "lm_head", "router"])
def test_every_name_of_a_module_counts(place):
    """What is skipped, the head or a router by its second name is so by its first."""
    shared = linear(64, 64)
    model = torch.nn.ModuleDict({"a": shared, "b": torch.nn.Sequential(linear()), "c": linear()})
    parent, _, last = place.rpartition(".")
    model.get_submodule(parent)._modules[last] = shared
    report = quantized(model, skip="b.0")
    assert type(model.a) is torch.nn.Linear and model.get_submodule(place) is model.a
    assert reasons(report)["a"] == {"b.0": "skipped", "lm_head": "output head", "router": "routers"}[place]
    assert "c" in report.group_sizes


@pytest.mark.parametrize(
    ("skip", "words"),
    [
        ("*.mlpp.*", ("no layer of the model has a name like '*.mlpp.*'",)),
        (["a.0", "b.1"], ("'b.1'", 'did you mean "b.0"')),
        ("a", ("'a'", "'a.*' is all inside of it")),
    ],
)
def test_a_pattern_that_skips_nothing_is_an_error(skip, words):
    model = torch.nn.ModuleDict({"a": torch.nn.Sequential(linear()), "b": torch.nn.Sequential(linear())})
    with pytest.raises(rt.ArgumentError) as raised:
        quantized(model, skip=skip)
    assert all(word in str(raised.value) for word in ("quantize_: skip: ", *words)), raised.value
    assert not any(isinstance(m, W4Linear) for m in model.modules())
    assert quantized(model, skip=["a.*", "b.0.weight"]).rounded == 0


# ---------------------------------------------------------------- hooks and attributes


def test_forward_hooks_go_over():
    model, seen = torch.nn.Sequential(linear(64, 64)).eval(), []
    x = torch.randn(2, 64)
    model[0].register_forward_pre_hook(lambda module, args: (args[0] * 0,))
    model[0].register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True)
    handle = model[0].register_forward_hook(lambda module, args, y: y * 0 + 5)
    model[0].register_forward_hook(lambda module, args, kwargs, y: seen.append(type(module)), with_kwargs=True)
    model[0].register_forward_hook(lambda module, args, y: seen.append("always"), always_call=True)
    quantized(model)
    assert (model(x) == 5).all() and seen == [{}, W4Linear, "always"] and not model[0].training
    handle.remove()  # of the layer that is gone
    closeness.assert_bits_equal(model(x), model[0].bias.expand(2, 64))
    with pytest.raises(rt.ArgumentError):
        model(x[:, :3])
    assert seen[-1] == "always"


def test_backward_hooks_go_over():
    model, seen = torch.nn.Sequential(linear(64, 64)), []
    before = [
        model[0].register_full_backward_pre_hook(lambda module, grad: seen.append("before")),
        model[0].register_full_backward_hook(lambda module, into, out: seen.append("after")),
    ]
    quantized(model)
    assert type(model[0]) is W4Linear and len(model[0]._backward_pre_hooks) == len(model[0]._backward_hooks) == 1
    assert model[0]._is_full_backward_hook
    for handle in before:
        handle.remove()
    assert not model[0]._backward_pre_hooks and not model[0]._backward_hooks


def test_attributes_go_over():
    model = torch.nn.Sequential(linear())
    model[0].layer_index, model[0].in_what = 7, (model,)
    quantized(model)
    assert model[0].layer_index == 7 and model[0].in_what == (model,)
    assert (model[0].in_features, model[0].out_features, set(dict(model[0].named_parameters()))) == (64, 48, {"bias"})


def patched(attribute):
    """A layer with an attribute of the class set on the instance, as accelerate and Module.compile do."""
    layer = linear(64, 64)
    inner = layer.forward
    setattr(layer, attribute, functools.wraps(inner)(lambda x: inner(x) * 0 + 7))
    return layer


def with_buffer():
    layer = linear(64, 64)
    layer.register_buffer("scale", torch.ones(1))
    return layer


def with_parameter():
    layer = linear(64, 64, bias=False)
    layer.gain = torch.nn.Parameter(torch.ones(1))
    return layer


def with_state_hook(register):
    layer = linear(64, 64)
    getattr(layer, register)(lambda *args: None)
    return layer


def with_bias(dtype):
    layer = linear(64, 64).bfloat16()
    layer.bias = torch.nn.Parameter(layer.bias.to(dtype))
    return layer


def with_codes():
    layer = linear(64, 64)
    layer.codes = "what a W4Linear has a buffer for"
    return layer


OVERRIDDEN, MORE = "forward or another attribute overridden", "more than a weight and a bias"
STATE, BIASES = "hooks on their state_dict", "biases of another dtype than the weight"
LEFT = {
    "forward": (lambda: patched("forward"), OVERRIDDEN),
    "compiled": (lambda: patched("_compiled_call_impl"), OVERRIDDEN),
    "codes": (with_codes, OVERRIDDEN),
    "buffer": (with_buffer, MORE),
    "parameter": (with_parameter, MORE),
    "saved": (lambda: with_state_hook("register_state_dict_post_hook"), STATE),
    "before_saving": (lambda: with_state_hook("register_state_dict_pre_hook"), STATE),
    "loaded": (lambda: with_state_hook("register_load_state_dict_post_hook"), STATE),
    "before_loading": (lambda: with_state_hook("register_load_state_dict_pre_hook"), STATE),
    "float32": (lambda: with_bias(torch.float32), BIASES),
    "float16": (lambda: with_bias(torch.float16), BIASES),
}


@pytest.mark.parametrize("config", [rt.W4A16(32), rt.W8A16(32)], ids=repr)
@pytest.mark.parametrize("name", LEFT)
def test_what_a_packed_layer_cannot_stand_for_is_left_and_named(name, config):
    make, why = LEFT[name]
    layer = make()
    model = torch.nn.ModuleDict({"special": layer, "plain": linear()})
    report = quantized(model, config)
    assert model.special is layer and reasons(report)["special"] == why
    assert report.group_sizes == {"plain": 32} and f"Left as they were, {why}: " in str(report)


def test_a_forward_that_is_the_class_own_is_none_to_leave():
    """What accelerate leaves behind when its hooks are removed."""
    model = torch.nn.Sequential(linear(64, 64))
    model[0].forward = model[0].forward
    quantized(model)
    x = torch.randn(2, 64)
    assert type(model[0]) is W4Linear
    closeness.assert_bits_equal(model(x), rt.w4a16_matmul(x, model[0].weight, bias=model[0].bias))


def test_a_bias_of_the_weights_dtype_is_none_to_leave():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        model = torch.nn.Sequential(linear().to(dtype))
        quantized(model)
        assert model[0](torch.zeros(1, 64, dtype=dtype)).dtype == dtype


class Doubled(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_a_subclass_keeps_its_forward():
    model = torch.nn.Sequential(Doubled(64, 64))
    x = torch.randn(2, 64)
    before = model(x)
    assert reasons(quantized(model)) == {"0": "no weight of a plain Linear"}
    closeness.assert_bits_equal(model(x), before)


# ---------------------------------------------------------------- torch's own transformer layers


@pytest.mark.parametrize("training", [False, True])
def test_torchs_encoder_runs_as_before(training):
    """In eval mode it hands its layers' weights to a kernel of its own."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 64, dropout=0.0, batch_first=True)
    model = torch.nn.ModuleDict({"encoder": torch.nn.TransformerEncoder(layer, 2), "out": linear()}).train(training)
    x = torch.randn(2, 3, 64)
    before, report = model.encoder(x), quantized(model)
    closeness.assert_bits_equal(model.encoder(x), before)
    read = {f"encoder.layers.{i}.{name}" for i in (0, 1) for name in ("linear1", "linear2", "self_attn.out_proj")}
    why = "weights that the module around reads itself"
    assert {name for name, reason in reasons(report).items() if reason == why} == read
    assert report.group_sizes == {"out": 32}


def test_torchs_decoder_is_rounded():
    """It calls its linear layers; its attention is as the encoder's."""
    model = torch.nn.TransformerDecoderLayer(64, 4, 64, batch_first=True).eval()
    assert quantized(model).group_sizes == {"linear1": 32, "linear2": 32}
    x = torch.randn(2, 3, 64)
    assert model(x, x).isfinite().all()


# ---------------------------------------------------------------- values, sizes, names


@pytest.mark.parametrize(
    ("config", "largest"),
    [(rt.W4A16(32), 65504 * 7), (rt.W4A16(32, "minima"), 65504), (rt.W8A16(32), 65504 * 127)],
    ids=repr,
)
def test_values_that_no_scale_holds_are_refused(config, largest):
    model = torch.nn.Sequential(linear(64, 64), linear(64, 64))
    model[1].weight[3, 5] = -largest
    kept = copy.deepcopy(model)
    quantized(kept, config)
    assert abs(kept[1].weight.dequantize()[3, 5] + largest) <= 1e-3 * largest
    model[1].weight[3, 5] = -1.01 * largest
    with pytest.raises(rt.ArgumentError, match=rf"^quantize_: 1: weight must lie within \+-{largest}, .* got a "):
        quantized(model, config)
    assert all(type(layer) is torch.nn.Linear for layer in model)
    quantized(model.bfloat16(), config)
    assert abs(model[1].weight.dequantize()[3, 5] + 1.01 * largest) <= 0.02 * largest


def test_what_is_not_finite_reads_back_as_nan():
    for value in (float("nan"), float("inf"), float("-inf")):
        model = torch.nn.Sequential(linear(64, 64))
        model[0].weight[3, 5] = value
        quantized(model)
        assert model[0].weight.dequantize()[3, :32].isnan().all()


@pytest.mark.parametrize("size", [33, 1, 2**31 - 1, 2**31, 2**62])
def test_group_sizes_that_no_weight_has_are_refused(size):
    expected = r"group_size must be 32, 64, 128 or all columns of a layer \(.*up to 2\*\*31 - 1\), got "
    with pytest.raises(rt.ArgumentError, match=f"^W4A16: {expected}{size}$"):
        rt.W4A16(size)
    if size < 2**31:
        assert rt.W8A16(size).group_size == size
    else:
        with pytest.raises(rt.ArgumentError, match=f"^W8A16: {expected}{size}$"):
            rt.W8A16(size)


def test_a_group_may_be_all_columns():
    model = torch.nn.Sequential(linear(34, 48))
    assert quantized(model, rt.W4A16(34)).group_sizes == {"0": 34}


def test_few_outputs_are_no_router():
    model = torch.nn.ModuleDict({"head": linear(64, 2), "gate": linear(64, 2), "wide": linear(64, 16)})
    report = quantized(model)
    assert reasons(report) == {"head": "fewer than 16 outputs", "gate": "routers"}
    assert report.group_sizes == {"wide": 32}


# ---------------------------------------------------------------- what a checkpoint says of a module


@pytest.mark.parametrize(
    ("state", "got"),
    [
        (torch.zeros(3), r"torch.float32 \[3\] on cpu"),
        (torch.zeros(6, dtype=torch.int64, device="meta"), r"torch.int64 \[6\] on meta"),
        (torch.zeros(()), r"torch.float32 \[\] on cpu"),
        (torch.tensor([1, 48, 64, 32, 9, 0]), r"\[1, 48, 64, 32, 9, 0\]"),
        (torch.tensor([1, 48, 64, 32, 0, -1]), r"\[1, 48, 64, 32, 0, -1\]"),
        (torch.full((6,), float("nan")), r"\[nan, .*"),
        ([1, 48, 64, 32, 0, 0], "list"),
        (None, "NoneType"),
    ],
    ids=str,
)
def test_an_extra_state_of_another_form_is_refused(state, got):
    module = W4Linear(64, 48, group_size=32)
    held = {**module.state_dict(), "_extra_state": state}
    error = rt.ArgumentError if isinstance(state, torch.Tensor) else rt.ArgumentTypeError
    expected = r"^W4Linear: _extra_state must be \[1, 48, 64, 32, 0, 0\] \(layout version, .*, got "
    with pytest.raises(error, match=f"{expected}{got}$"):
        module.load_state_dict(held)


def test_layers_that_share_a_weight_are_left():
    model = torch.nn.ModuleDict({"a": linear(64, 64), "b": linear(64, 64), "c": linear(64, 64)})
    model.b.weight = model.a.weight
    report = quantized(model)
    assert type(model.a) is type(model.b) is torch.nn.Linear and model.a.weight is model.b.weight
    assert reasons(report) == {"a": "shared with another module"} and report.group_sizes == {"c": 32}
