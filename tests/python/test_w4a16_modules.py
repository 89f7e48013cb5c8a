# SPDX-License-Identifier: Apache-2.0
"""W4Linear, W8Linear and quantize_."""

import copy
import io
import pickle

import closeness
import pytest
import rooftile as rt
import torch
import torch.nn.utils.prune
from cases import linear
from rooftile._rounding_report import kind_of
from rooftile.experts import PackedStack
from rooftile.nn import W4Linear, W8Linear

pytestmark = pytest.mark.usefixtures("inference")


class Tied(torch.nn.Module):
    """A model in small: tied embeddings, one layer twice."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(64, 64)
        self.blocks = torch.nn.ModuleList(
            [torch.nn.ModuleDict({"up": linear(64, 128), "down": linear(128, 64)}) for _ in range(2)]
        )
        self.lm_head = torch.nn.Linear(64, 64, bias=False)
        self.lm_head.weight = self.embed.weight


@pytest.mark.parametrize("bias", [True, False])
def test_from_linear(bias):
    layer = linear(bias=bias)
    ours = W4Linear.from_linear(layer, group_size=32, zeros="minima")
    x = torch.randn(2, 3, 64)
    dense = ours.weight.dequantize()
    expected = torch.nn.functional.linear(x.double(), dense.double(), layer.bias.double() if bias else None)
    closeness.assert_close(ours(x), expected.float().numpy(), expected.numpy(), frobenius=2e-6)
    assert (ours.in_features, ours.out_features, ours.bias is not None) == (64, 48, bias)
    assert not any(p.requires_grad for p in ours.parameters())
    assert f"in_features=64, out_features=48, bias={bias}, minima, group_size=32" in repr(ours)


def test_from_a_weight_in_numpy():
    w = rt.W4Weight.quantize(torch.randn(48, 64).numpy(), group_size=64)
    ours = W4Linear.from_weight(w)
    x = torch.randn(5, 64)
    closeness.assert_bits_equal(ours(x), rt.w4a16_matmul(x, w))
    assert ours.codes.data_ptr() == w.codes.ctypes.data
    with pytest.raises(rt.ArgumentTypeError, match="weight must be a W4Weight"):
        W4Linear.from_weight(torch.zeros(48, 64))
    with pytest.raises(rt.ArgumentError, match=r"bias must be \[48\]"):
        W4Linear.from_weight(w, torch.zeros(47))


def test_saved_and_loaded():
    x = torch.randn(5, 64)
    ours = W4Linear.from_linear(linear(), group_size=32, zeros="minima")
    expected = ours(x)
    file = io.BytesIO()
    torch.save(ours.state_dict(), file)
    file.seek(0)
    empty = W4Linear(64, 48, group_size=32, kind="minima")
    empty.load_state_dict(torch.load(file, weights_only=True))
    for same in (empty, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        closeness.assert_bits_equal(same(x), expected)
        assert same.codes.data_ptr() != ours.codes.data_ptr()
    again = pickle.loads(pickle.dumps(ours.weight))
    assert torch.equal(again.dequantize(), ours.weight.dequantize())
    other = W4Linear(64, 48, group_size=32, kind="minima", scale_dtype="bfloat16")
    with pytest.raises(rt.ArgumentError, match="float16 scales in layout 1; this module is"):
        other.load_state_dict(ours.state_dict())


def test_a_linear_layer_does_not_take_the_checkpoint():
    """Not even where missing and unexpected keys are let through: the marker has another shape."""
    ours = W4Linear.from_linear(linear(), group_size=32)
    state = ours.state_dict()
    assert state["weight"].shape == (1,) and "weight" not in W4Linear(64, 48, group_size=32, device="meta").state_dict()
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        linear().load_state_dict(state, strict=False)
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"weight"'):
        ours.load_state_dict({**state, "weight": linear().weight})
    del state["weight"]  # as it was before there were markers
    empty = W4Linear(64, 48, group_size=32)
    empty.load_state_dict(state)
    assert torch.equal(empty.codes, ours.codes)


def ordered(k=64, bits=4):
    """A module with every array: an act-order and minima (integer zeros in 8 bits)."""
    cls = W4Linear if bits == 4 else W8Linear
    codes, scales, zeros = cls.WEIGHT.quantize(torch.randn(48, k), group_size=32).unpack()
    zeros = torch.full_like(scales, 3, dtype=torch.uint8)
    perm = torch.randperm(k, dtype=torch.int32)
    weight = cls.WEIGHT.from_canonical(codes, scales, zeros, kind="integer", perm=perm)
    return cls.from_weight(weight, torch.randn(48))


def stack():
    return PackedStack.from_weights([ordered().weight, ordered().weight])


def empty_of(module):
    """An empty module that takes `module`'s state_dict."""
    layout = dict(module._layout, act_order=module.perm is not None)
    n, k = layout.pop("shape")
    if isinstance(module, PackedStack):
        return PackedStack(len(module), k, n, **layout)
    return type(module)(k, n, module.bias is not None, **layout)


KINDS = {"w4": ordered, "w8": lambda: ordered(bits=8), "stack": stack}
TENSORS = ("codes", "scales", "offsets", "perm", "_extra_state")


@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_of_another_dtype_or_shape_is_not_loaded(kind, assign):
    """torch converts what it copies: half of a code would be gone."""
    ours = KINDS[kind]()
    state, name = ours.state_dict(), type(ours).__name__
    wrong_dtypes = [("codes", torch.float32), ("codes", torch.int8), ("scales", torch.int64), ("offsets", torch.half)]
    for tensor, to in (*wrong_dtypes, ("perm", torch.int64), ("_extra_state", torch.float64)):
        model = torch.nn.ModuleDict({"up": empty_of(ours)})
        wrong = {f"up.{key}": value.to(to) if key == tensor else value for key, value in state.items()}
        expected = str(state[tensor].dtype).removeprefix("torch.")
        came = str(to).removeprefix("torch.")
        with pytest.raises(
            rt.ArgumentError, match=f"^{name}: tensor 'up.{tensor}' has dtype {came}, expected {expected}$"
        ):
            model.load_state_dict(wrong, assign=assign)
        assert all(not buffer.any() for key, buffer in model.up.named_buffers() if key != "perm"), "nothing is loaded"
    for tensor in ("codes", "scales", "offsets", "perm"):
        wrong = state | {tensor: state[tensor][..., :-1]}
        with pytest.raises(rt.ArgumentError, match=rf"^{name}: tensor '{tensor}' has shape \[.*\], expected \["):
            empty_of(ours).load_state_dict(wrong, strict=False, assign=assign)
    with pytest.raises(rt.ArgumentTypeError, match=f"^{name}: tensor 'codes' must be a torch tensor, got list"):
        empty_of(ours).load_state_dict(state | {"codes": [1]}, strict=False, assign=assign)


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_is_loaded_whole_or_not_at_all(kind):
    """Also where missing and unexpected keys are let through: what is missing would be of another weight, or zeros."""
    ours = KINDS[kind]()
    state, name = ours.state_dict(), type(ours).__name__
    for tensor in TENSORS:
        part = {key: value for key, value in state.items() if key != tensor}
        module = empty_of(ours)
        with pytest.raises(rt.ArgumentError, match=f"^{name}: tensor '{tensor}' is missing .*'codes'|'scales'"):
            module.load_state_dict(part, strict=False)
        assert not module.codes.any()
        with pytest.raises(rt.ArgumentError, match=f"^{name}: tensor 'up.{tensor}' is missing"):
            torch.nn.ModuleDict({"up": module}).load_state_dict({f"up.{k}": v for k, v in part.items()}, strict=False)
    before = ours.codes.clone()
    ours.load_state_dict({}, strict=False)  # what is for other modules alone, as adapters are
    assert torch.equal(ours.codes, before)
    if kind != "stack":
        ours.load_state_dict({"bias": torch.ones(48)}, strict=False)
        assert torch.equal(ours.codes, before) and ours.bias.eq(1).all()


def test_a_tensor_that_a_module_has_no_use_for_is_not_dropped():
    """Without its order or its zeros a weight is another one."""
    ours = ordered()
    layout = {"group_size": 32, "kind": "integer"}
    with pytest.raises(rt.ArgumentError, match=r"^W4Linear: tensor 'perm' is there, .* no act-order"):
        W4Linear(64, 48, **layout).load_state_dict(ours.state_dict(), strict=False)
    state = ours.state_dict() | {"_extra_state": W4Linear(64, 48, group_size=32).get_extra_state()}
    with pytest.raises(rt.ArgumentError, match=r"^W4Linear: tensor 'offsets' is there, .* symmetric"):
        W4Linear(64, 48, group_size=32, act_order=True).load_state_dict(state, strict=False)


@pytest.mark.parametrize("name", ["codes", "scales", "offsets", "perm"])
def test_a_deleted_buffer_is_named(name):
    ours = ordered()
    expected = ours(torch.ones(1, 64))
    buffer = getattr(ours, name)
    delattr(ours, name)
    assert not hasattr(ours, name)
    with pytest.raises(rt.ArgumentError, match=f"^W4Linear: its buffer '{name}' was deleted"):
        ours(torch.ones(1, 64))
    ours.register_buffer(name, buffer)
    closeness.assert_bits_equal(ours(torch.ones(1, 64)), expected)
    experts = stack()
    delattr(experts, name)
    with pytest.raises(rt.ArgumentError, match=f"^PackedStack: its buffer '{name}' was deleted"):
        experts[0]


@pytest.mark.parametrize("module", [ordered, stack])
def test_an_order_that_is_taken_away_is_named(module):
    """The same codes without their order are another weight, as are others with one."""
    ours = module()
    name, perm = type(ours).__name__, ours.perm
    ours.perm = None
    with pytest.raises(rt.ArgumentError, match=rf"^{name}: its buffer 'perm' must be an int32 tensor, .*got NoneType"):
        ours.weight if module is ordered else ours[0]
    ours.perm = perm
    assert ours.weight if module is ordered else ours[0]
    plain = W4Linear.from_linear(linear(), group_size=32)
    plain.perm = torch.arange(64, dtype=torch.int32)
    with pytest.raises(rt.ArgumentError, match=r"^W4Linear: its buffer 'perm' must be None, .* without act-order, got"):
        plain(torch.ones(1, 64))


@pytest.mark.parametrize("name", ["codes", "scales", "offsets", "perm"])
def test_a_stack_whose_storage_shrank(name):
    experts = stack()
    storage = getattr(experts, name).untyped_storage()
    size = storage.nbytes()
    storage.resize_(16)
    with pytest.raises(rt.ArgumentError, match=f"^PackedStack: {name} needs {size} bytes .* resized to 16$"):
        experts[1]
    with pytest.raises(IndexError):
        stack()[2]


def test_loading_into_used_module_is_seen():
    a, b = (W4Linear.from_linear(torch.nn.Linear(64, 48), group_size=32) for _ in range(2))
    x = torch.randn(1, 64)
    a(x)
    a.load_state_dict(b.state_dict())
    closeness.assert_bits_equal(a(x), b(x))
    a.load_state_dict(W4Linear.from_linear(torch.nn.Linear(64, 48), group_size=32).state_dict(), assign=True)
    assert not torch.equal(a(x), b(x))


@pytest.mark.parametrize("name", ["dtype", "device", "div_", "T"])
def test_a_packed_weight_is_no_tensor(name):
    """Modules of some models ask a layer for its weight's dtype: the error says what to do."""
    weight = W4Linear(128, 32).weight
    assert not hasattr(weight, name)
    with pytest.raises(rt.NotSupportedError, match=rf"W4Weight of \[32, 128\].*no tensor and has no '{name}'.*skip"):
        getattr(weight, name)
    with pytest.raises(AttributeError, match="no attribute 'abacus'"):
        _ = weight.abacus


def test_the_weight_is_made_once():
    """And again where a buffer is another tensor."""
    ours = W4Linear.from_linear(linear(), group_size=32)
    weight = ours.weight
    assert ours.weight is weight
    ours.scales = ours.scales.clone()
    assert ours.weight is not weight and ours.weight.scales is ours.scales


def test_dtype_moves_the_bias_and_no_code():
    ours = W4Linear.from_linear(linear(), group_size=32)
    codes = ours.codes.clone()
    ours.to(torch.bfloat16)
    assert torch.equal(ours.codes, codes) and ours.bias.dtype == torch.bfloat16
    assert ours(torch.randn(2, 64).bfloat16()).dtype == torch.bfloat16


def test_quantize_leaves_the_head_and_what_is_skipped():
    model = Tied()
    before = model.blocks[0]["up"]
    report = rt.quantize_(model, rt.W4A16(group_size=64), skip="*.1.down", progress=False)
    assert report.group_sizes == dict.fromkeys(("blocks.0.up", "blocks.0.down", "blocks.1.up"), 64)
    assert isinstance(model.lm_head, torch.nn.Linear) and isinstance(model.blocks[1]["down"], torch.nn.Linear)
    up = model.blocks[0]["up"]
    assert isinstance(up, W4Linear)
    closeness.assert_bits_equal(up.weight.dequantize(), rt.W4Weight.quantize(before.weight, group_size=64).dequantize())
    report = rt.quantize_(model, rt.W4A16(group_size=64))  # what was left, with a bar
    assert report.group_sizes == {"blocks.1.down": 64}


def test_quantize_leaves_a_tied_output_of_any_name():
    model = Tied()
    model.out = model._modules.pop("lm_head")
    assert len(rt.quantize_(model, rt.W4A16(group_size=64), progress=False).group_sizes) == 4
    assert isinstance(model.out, torch.nn.Linear)


@pytest.mark.parametrize("act_order", [False, True])
def test_traces_with_other_arrays_than_it_was_made_with(act_order):
    ours = W4Linear.from_linear(linear(), group_size=32, zeros="minima")
    if act_order:
        codes, scales, minima = ours.weight.unpack()
        perm = torch.randperm(64, dtype=torch.int32)
        ours = W4Linear.from_weight(rt.W4Weight.from_canonical(codes, scales, minima, perm=perm), ours.bias)
    x = torch.randn(2, 64)
    expected = ours(x)
    for name, array in ours.named_buffers():  # what .to(device) does
        setattr(ours, name, array.clone())
    torch._dynamo.reset()
    closeness.assert_bits_equal(torch.compile(ours, fullgraph=True, backend="eager")(x), expected)


def test_on_the_meta_device():
    ours = W4Linear.from_linear(linear(), group_size=32, zeros="minima")
    with torch.device("meta"):
        empty = W4Linear(64, 48, group_size=32, kind="minima")
    x = torch.randn(2, 64)
    assert all(t.is_meta for t in (*empty.buffers(), *empty.parameters())) and "minima" in repr(empty)
    with pytest.raises(rt.ArgumentTypeError, match=r"W4Weight: .* meta"):
        empty(x)
    for there in (copy.deepcopy(empty).to_empty(device="cpu"), copy.deepcopy(empty)):
        there.load_state_dict(ours.state_dict(), assign=there.codes.is_meta)
        closeness.assert_bits_equal(there(x), ours(x))


@pytest.mark.parametrize("scale_dtype", ["float32", None, torch.float16])
def test_scale_dtype_is_checked(scale_dtype):
    with pytest.raises(rt.ArgumentTypeError, match='W4Linear: scale_dtype must be "float16" or "bfloat16", got'):
        W4Linear(64, 48, group_size=32, scale_dtype=scale_dtype)


class LowRank(torch.nn.Linear):
    """A layer whose forward does more than its weight: a subclass of nn.Linear."""

    def __init__(self, *args):
        super().__init__(*args)
        self.delta = torch.nn.Parameter(torch.ones(self.out_features, self.in_features))

    def forward(self, x):
        return super().forward(x) + x @ self.delta.T


@pytest.mark.parametrize(
    "special",
    [
        lambda: LowRank(64, 48),
        lambda: torch.nn.MultiheadAttention(64, 2),  # reads out_proj.weight itself
        lambda: torch.nn.utils.parametrizations.weight_norm(linear()),
        lambda: torch.nn.utils.prune.l1_unstructured(linear(), "weight", 4),  # a weight computed before each forward
    ],
    ids=["subclass", "attention", "parametrised", "pruned"],
)
def test_quantize_leaves_what_is_more_than_a_linear(special):
    model = torch.nn.ModuleDict({"special": special(), "plain": linear()})
    before = dict(model.special.named_modules())
    assert len(rt.quantize_(model, rt.W4A16(group_size=64), progress=False).group_sizes) == 1
    assert isinstance(model.plain, W4Linear) and dict(model.special.named_modules()) == before


def test_quantize_refuses_before_it_changes_anything():
    model = Tied()
    model.odd = linear(80, 32)
    with pytest.raises(rt.ArgumentError, match=r"quantize_: odd: .*K = 80.*choose another group_size or skip"):
        rt.quantize_(model, rt.W4A16(group_size=64), progress=False)
    model.odd = linear().double()
    with pytest.raises(rt.ArgumentTypeError, match=r"quantize_: odd: weight must be float32, .*, got float64"):
        rt.quantize_(model, rt.W4A16(group_size=64), progress=False)
    assert not any(isinstance(m, W4Linear) for m in model.modules())
    for config, error in ((32, rt.ArgumentTypeError), ("w4a16", rt.ArgumentTypeError)):
        with pytest.raises(error, match="config must be"):
            rt.quantize_(model, config)
    with pytest.raises(rt.ArgumentTypeError, match="model must be"):
        rt.quantize_([model])
    with pytest.raises(rt.ArgumentError, match="cannot be replaced in place"):
        rt.quantize_(linear())
    with pytest.raises(rt.ArgumentError, match="zeros must be"):
        rt.W4A16(zeros="integer")
    with pytest.raises(rt.ArgumentError, match="group_size must be"):
        rt.W4A16(group_size="128")


@pytest.mark.parametrize("config", [rt.W4A16(), rt.W4A16(zeros="minima"), rt.W8A16()], ids=repr)
def test_a_smaller_group_where_the_groups_divide_no_row(config, capsys):
    """K = 576 is the demo model's."""
    model = torch.nn.Sequential(linear(256, 576), linear(576, 96), linear(96, 64), linear(64, 256))
    before = [layer.weight for layer in model]
    report = rt.quantize_(model, config)
    assert report.group_sizes == {"0": 128, "1": 64, "2": 32, "3": 64}
    assert report.smaller_groups == {"1": 64, "2": 32, "3": 64}
    for layer, weight, size in zip(model, before, (128, 64, 32, 64), strict=True):
        expected = layer.WEIGHT.quantize(weight, group_size=size, zeros=config.zeros)
        assert torch.equal(layer.weight.dequantize(), expected.dequantize())
    printed = capsys.readouterr().err
    assert "Groups of 64, since 128 does not divide their columns: 1 1, 1 3" in printed
    assert "Groups of 32, since 128 does not divide their columns: 1 2" in printed


def test_what_is_left_is_named_and_measured():
    model = Tied()
    model.out = linear(64, 128, bias=False)
    report = rt.quantize_(model, rt.W4A16(64), skip=["out"], progress=False)
    assert report.left["embed.weight"] == (64 * 64, "embeddings")  # the head's too
    assert report.left["out.weight"] == (64 * 128, "skipped")
    assert report.left["blocks.0.up.bias"] == (128, "norms and biases")
    assert report.rounded == 4 * 64 * 128
    assert report.total == report.rounded + sum(elements for elements, _ in report.left.values())
    assert "Rounded to 4 bits: 72.1 % of 45,440 parameters, groups of 64" in str(report)
    assert "Left as they were, skipped: 18.0 %" in str(report)
    again = rt.quantize_(model, rt.W8A16(64), progress=False)
    assert (again.packed, again.rounded, again.total) == (report.rounded, 64 * 128, report.total)


class Routed(torch.nn.Module):
    """A mixture of 24 experts, in a list, with layers beside them that must not be rounded."""

    def __init__(self):
        super().__init__()
        self.experts = torch.nn.ModuleList([linear(64, 64) for _ in range(24)])
        self.gate, self.chooses = linear(64, 64), linear(64, 24)
        self.router = torch.nn.Sequential(linear(64, 64), linear(64, 24))
        self.shared, self.shared_gate = linear(64, 64), linear(64, 1)


def test_routers_are_not_rounded():
    model = torch.nn.ModuleDict({"mlp": Routed(), "other": linear(64, 24)})
    report = rt.quantize_(model, rt.W4A16(64), progress=False)
    routers = {"mlp.gate", "mlp.chooses", "mlp.router.0", "mlp.router.1"}
    assert {name.removesuffix(".weight") for name, (_, why) in report.left.items() if why == "routers"} == routers
    assert report.left["mlp.shared_gate.weight"] == (64, "fewer than 16 outputs")
    assert report.group_sizes.keys() == {f"mlp.experts.{i}" for i in range(24)} | {"mlp.shared", "other"}
    assert all(type(model.get_submodule(name)) is torch.nn.Linear for name in routers)


@pytest.mark.parametrize("bias", [True, False])
def test_8_bits(bias):
    layer = linear(bias=bias)
    ours = W8Linear.from_linear(layer, group_size=32)
    assert isinstance(ours.weight, rt.W8Weight)
    x = torch.randn(5, 64)
    closeness.assert_bits_equal(ours(x), rt.w8a16_matmul(x, ours.weight, bias=layer.bias))
    assert (ours.weight.dequantize() - layer.weight).abs().max() <= layer.weight.abs().max() / 250
    empty = W8Linear(64, 48, bias, group_size=32)
    empty.load_state_dict(ours.state_dict())
    for same in (empty, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        closeness.assert_bits_equal(same(x), ours(x))
    assert torch.equal(pickle.loads(pickle.dumps(ours.weight)).dequantize(), ours.weight.dequantize())
    torch._dynamo.reset()
    closeness.assert_bits_equal(torch.compile(ours, fullgraph=True, backend="eager")(x), ours(x))
    with pytest.raises(rt.ArgumentError, match=r"^W4Linear: tensor 'codes' has shape \[3072\], expected \[1536\]"):
        W4Linear(64, 48, bias, group_size=32).load_state_dict(ours.state_dict())


def test_quantize_to_8_bits():
    model = Tied()
    before = model.blocks[0]["up"].weight
    assert len(rt.quantize_(model, rt.W8A16(group_size=64), progress=False).group_sizes) == 4
    up = model.blocks[0]["up"]
    assert isinstance(up, W8Linear) and isinstance(model.lm_head, torch.nn.Linear)
    closeness.assert_bits_equal(up.weight.dequantize(), rt.W8Weight.quantize(before, group_size=64).dequantize())
    with pytest.raises(rt.ArgumentError, match=r"quantize_: 0: .*K = 80.*choose another group_size or skip"):
        rt.quantize_(torch.nn.Sequential(linear(80, 32)), rt.W8A16(64), progress=False)
    with pytest.raises(rt.ArgumentError, match=r"^W8A16: group_size must be"):
        rt.W8A16(group_size=0)


def test_each_module_refuses_the_others_weight():
    four, eight = (t.quantize(torch.randn(48, 64), group_size=32) for t in (rt.W4Weight, rt.W8Weight))
    with pytest.raises(rt.ArgumentTypeError, match=r"^W4Linear.from_weight: weight must be a W4Weight, got W8Weight"):
        W4Linear.from_weight(eight)
    with pytest.raises(rt.ArgumentTypeError, match=r"^W8Linear.from_weight: weight must be a W8Weight, got W4Weight"):
        W8Linear.from_weight(four)
    with pytest.raises(rt.ArgumentError, match=r'^W8Linear: kind must be "symmetric" or "integer", got .minima'):
        W8Linear(64, 48, group_size=32, kind="minima")
    with pytest.raises(rt.ArgumentError, match=r"^W8Weight.quantize: zeros must be None"):
        W8Linear.from_linear(linear(), group_size=32, zeros="minima")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.layers.3.self_attn.q_proj.weight", "q_proj"),
        ("model.layers.3.mlp.down_proj.bias", "down_proj.bias"),
        ("model.layers.3.mlp.experts.gate_up_proj", "experts.gate_up_proj"),
        ("lm_head.weight", "lm_head"),
        ("0.bias", "bias"),
        ("7", "7"),
    ],
)
def test_a_report_names_layers_by_their_kind(name, kind):
    assert kind_of(name) == kind
