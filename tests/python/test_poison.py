# SPDX-License-Identifier: Apache-2.0
"""Outputs start as poison between poisoned margins: a call writes every element of them and not a byte beside, writes
no input, and reads nothing past one (poison is NaN: what is read from a margin shows in the result; a protected page
behind the last byte shows in a signal)."""

import subprocess
import sys
from pathlib import Path

import cases
import closeness
import ops
import pytest
import torch


@pytest.mark.parametrize("op", ops.OPS, ids=lambda op: op.id)
def test_writes_its_own_elements_and_all_of_them(op, dtype, device, plan):
    call = op.call(dtype, device)
    call.run(plan=plan)
    written = op.tensors(written=True)
    for name in op.tensors():
        if call.kwargs[name] is not None:
            guard = call.guard(name)
            guard.check_margins(name)
            guard.check_written(name) if name in written else guard.check_untouched(name)
    for guard in call.guards:  # those of the arrays inside an object too
        guard.check_margins("an array")
    for name in written:
        assert not torch.isnan(call.kwargs[name].float()).any(), f"{name} holds poison: something outside was read"


@pytest.mark.parametrize("op", ops.OPS, ids=lambda op: op.id)
def test_strided_outputs_leave_the_gaps(op, dtype, device, plan):
    """Outputs with holes between their elements and rows: the holes stay poison."""
    plain, holes = op.call(dtype, device), op.call(dtype, device)
    plain.run(plan=plan)
    guards = {}
    for name in op.tensors(written=True):
        t = holes.kwargs[name]
        strides, step = [], 2
        for size in reversed(t.shape):
            strides.insert(0, step)
            step = step * size + 3
        guards[name] = cases.guarded(t.shape, t.dtype, device, strides=strides)
        holes.kwargs[name] = guards[name].tensor
    holes.run(plan=plan)
    for name, guard in guards.items():
        guard.check_margins(name)
        guard.check_written(name)
        closeness.assert_bits_equal(holes.kwargs[name], plain.kwargs[name], name)


@pytest.mark.parametrize("op", ops.OPS, ids=lambda op: op.id)
def test_same_call_same_bits(op, dtype, device, plan):
    first = op.call(dtype, device)
    first.run(plan=plan)
    for _ in range(5):
        again = op.call(dtype, device)
        again.run(plan=plan)
        for a, b in zip(again.written(), first.written(), strict=True):
            closeness.assert_bits_equal(a, b)


def test_reads_and_writes_nothing_past_the_end():
    """Every tensor in turn ends where an unreadable page begins, then begins where one ends. In a child process: a
    fault is a signal."""
    child = subprocess.run(
        [sys.executable, Path(__file__).with_name("guard_pages.py")], capture_output=True, text=True, timeout=300
    )
    assert child.returncode == 0, f"exit {child.returncode}; last: {child.stdout[-300:]}\n{child.stderr[-2000:]}"
