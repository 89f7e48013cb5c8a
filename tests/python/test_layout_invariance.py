# SPDX-License-Identifier: Apache-2.0
"""Every tensor argument of every op in every memory layout gives the contiguous call's bits."""

import cases
import closeness
import layouts
import numpy as np
import ops
import pytest
import rooftile as rt
import torch
from conftest import plan_of

PAIRS = [pytest.param(op, name, id=f"{op.id}-{name}") for op in ops.OPS for name in op.tensors()]


def _refused(argument, t):
    return t.device.type in argument.contiguous and not t.is_contiguous()


@pytest.fixture(params=(cases.PLANS[0], pytest.param("reference", marks=pytest.mark.slow)))
def plan(request):
    """The portable and vector variants are one source: the fastest stands for all of them here."""
    return plan_of(request)


@pytest.fixture(params=[d if d == "float16" else pytest.param(d, marks=pytest.mark.slow) for d in cases.DTYPES])
def dtype(request):
    """Layouts are followed by one code for every dtype."""
    return request.param


def _run(op, dtype, device, plan, **changes):
    """The call's written tensors as contiguous copies, after the tensors in `changes` took the place of the plain ones:
    name -> function from the plain tensor to its stand-in."""
    call = op.call(dtype, device)
    for name, change in changes.items():
        call.kwargs[name] = change(call.kwargs[name])
    call.run(plan=plan)
    return [t.clone() if isinstance(t, torch.Tensor) else np.array(t) for t in call.written()]


def _assert_same(results, expected, what):
    for a, b in zip(results, expected, strict=True):
        closeness.assert_bits_equal(a, b, what)


@pytest.mark.parametrize("op, name", PAIRS)
def test_torch_layouts(op, name, dtype, device, plan):
    expected = _run(op, dtype, device, plan)
    call = op.call(dtype, device)
    plain = call.kwargs[name]
    for layout, (make, ndim) in layouts.TORCH.items():
        if plain.ndim >= ndim and _refused(op.arguments[name], make(plain)):
            with pytest.raises(rt.ArgumentError, match=f"{name} must be contiguous"):
                call.run(**{name: make(plain)})
            call.check_untouched()
        elif plain.ndim >= ndim:
            _assert_same(_run(op, dtype, device, plan, **{name: make}), expected, f"{name} {layout}:")


@pytest.mark.parametrize("op", ops.OPS, ids=lambda op: op.id)
def test_layouts_that_differ(op, dtype, device, plan):
    _check_layouts_that_differ(op, dtype, device, plan)


@pytest.mark.parametrize("op", [op for op in ops.OPS if "plan" in op.arguments], ids=lambda op: op.id)
def test_layouts_that_differ_in_the_reference(op):
    """With all dtypes this is slow; strides are followed by one code for all of them."""
    _check_layouts_that_differ(op, "float16", "cpu", "reference")


def _check_layouts_that_differ(op, dtype, device, plan):
    """Each argument in another layout than its neighbours, so that no one's strides can stand for another's."""
    expected = _run(op, dtype, device, plan)
    plain = op.call(dtype, device).kwargs
    for turn in range(len(layouts.TORCH)):
        changes = {}
        for i, name in enumerate(op.tensors()):
            fitting = [
                make
                for make, ndim in layouts.TORCH.values()
                if plain[name].ndim >= ndim and not _refused(op.arguments[name], make(plain[name]))
            ]
            changes[name] = fitting[(turn + 5 * i) % len(fitting)]
        _assert_same(_run(op, dtype, device, plan, **changes), expected, f"turn {turn}:")


@pytest.mark.parametrize("op, name", [p for p in PAIRS if p.values[0].arguments[p.values[1]].expandable])
def test_expanded_inputs(op, name, dtype, device, plan):
    """Stride 0 reads like its materialised copy."""
    for dim in op.arguments[name].expandable:
        both = [
            _run(op, dtype, device, plan, **{name: lambda t, i=i, dim=dim: layouts.expanded(t, dim)[i]}) for i in (0, 1)
        ]
        _assert_same(both[1], both[0], f"{name} expanded in dimension {dim}:")


@pytest.mark.parametrize("op, name", [p for p in PAIRS if "cpu" not in p.values[0].arguments[p.values[1]].contiguous])
def test_numpy_layouts(op, name, dtype):
    """All arguments as NumPy arrays, one of them reversed, in Fortran order, read-only or off its alignment."""
    expected = _run(op, dtype, "cpu", None)
    numpy = {n: lambda t: _as_numpy(t) for n in op.tensors()}
    written = op.arguments[name].written
    for layout, (make, ndim) in layouts.NUMPY.items():
        if op.call(dtype).kwargs[name].ndim < ndim or (written and layout == "read only"):
            continue
        results = _run(op, dtype, "cpu", None, **{**numpy, name: lambda t, make=make: make(_as_numpy(t))})
        for a, b in zip(results, expected, strict=True):
            assert np.array_equal(closeness.to_bytes(a), closeness.to_bytes(b)), f"{name} {layout}"


def _as_numpy(t):
    name = closeness.dtype_name(t)
    return cases.numpy_array(closeness.to_numpy64(t), name) if t.is_floating_point() else t.numpy().copy()
