# SPDX-License-Identifier: Apache-2.0
"""What the library makes lies on its arguments' device, not on torch's default device (set_default_device)."""

import contextlib
import functools

import closeness
import ops
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import rooftile as rt  # noqa: E402
from rooftile.integrations._models import CACHE  # noqa: E402
from rooftile.integrations.transformers import RooftileCache  # noqa: E402
from rooftile.quantize import W4A16, W8A16, quantize_  # noqa: E402
from test_transformers import padded, tiny  # noqa: E402


@pytest.mark.parametrize("op", ops.OPS, ids=lambda op: op.id)
def test_ops_make_their_outputs_where_their_inputs_are(op, device):
    made = {name: None for name in op.tensors(written=True) if op.arguments[name].optional}
    made |= {"return_lse": True} if "return_lse" in op.arguments else {}
    call, again = op.call("float16", device), op.call("float16", device)
    expected = call.run(**made)
    with torch.device("meta"):
        results = again.run(**made)
    results, expected = (
        [x for x in (r if isinstance(r, tuple) else (r,)) if isinstance(x, torch.Tensor)] for r in (results, expected)
    )
    assert [x.device for x in results] == [x.device for x in expected]
    for a, b in zip(results, expected, strict=True):
        closeness.assert_bits_equal(a, b)
    for a, b in zip(again.written(), call.written(), strict=True):
        closeness.assert_bits_equal(a, b)


def logits(model, cache, ids, mask, pieces):
    model.set_attn_implementation("rooftile")
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    said, begin = [], 0
    for length in pieces:
        end = begin + length
        options = {"attention_mask": mask[:, :end], "position_ids": positions[:, begin:end], CACHE: cache}
        said.append(model(ids[:, begin:end], **options).logits)
        begin = end
    return torch.cat(said, 1)


@pytest.mark.parametrize("name", ["llama", "qwen2-window", "mistral"])
@pytest.mark.parametrize("format", [None, "int4-kivi"])
def test_a_model_with_a_cache(name, format, device):
    model, _ = tiny(name, device, "float32" if device == "cpu" else "float16")
    ids, mask = padded((9, 0), 60, device)
    pieces = (30, 1, 1, 24, 4)
    chosen = {} if format is None else {"format": format}
    expected = logits(model, RooftileCache(model.config, **chosen), ids, mask, pieces)
    with torch.device("meta"):
        said = logits(model, RooftileCache(model.config, **chosen), ids, mask, pieces)
    closeness.assert_bits_equal(said, expected)


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_and_their_modules(bits, device):
    dtype = torch.float32 if device == "cpu" else torch.float16
    x = torch.linspace(-1, 1, 3 * 64, device=device, dtype=dtype).view(3, 64)

    def product():
        torch.manual_seed(0)
        holder = torch.nn.Sequential(torch.nn.Linear(64, 48, device=device, dtype=dtype)).requires_grad_(False)
        given = holder[0].weight.clone()
        with inside():
            quantize_(holder, W4A16(group_size=32) if bits == 4 else W8A16(group_size=32))
            weight = (rt.W4Weight if bits == 4 else rt.W8Weight).quantize(given, group_size=32)
            return holder(x), weight.dequantize(), weight.to(device).dequantize()

    inside = contextlib.nullcontext
    expected = product()
    inside = functools.partial(torch.device, "meta")
    for a, b in zip(product(), expected, strict=True):
        closeness.assert_bits_equal(a, b)


@pytest.mark.parametrize("module", [rt.nn.W4Linear, rt.nn.W8Linear], ids=lambda module: module.__name__)
def test_an_empty_module_lies_on_the_device_it_was_given(module):
    with torch.device("meta"):
        empty = module(64, 48, group_size=32, act_order=True, device="cpu")
        state = empty.state_dict()
    assert {name: tensor.device.type for name, tensor in state.items()} == dict.fromkeys(state, "cpu")
    assert {"weight", "codes", "scales", "perm", "_extra_state"} <= set(state)
