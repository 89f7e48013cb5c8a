# SPDX-License-Identifier: Apache-2.0
"""A row's bits depend on that row alone: not on the batch it stands in, its neighbours or the number of threads."""

import closeness
import ops
import pytest
import rooftile as rt
import torch


def _rows_of(op, call, rows):
    """The call on some rows only: every argument that counts rows is narrowed to them."""
    narrowed = {}
    for name in op.tensors():
        dim, t = op.arguments[name].rows, call.kwargs[name]
        if dim is not None and t is not None:
            narrowed[name] = t.index_select(dim, torch.tensor(rows, device=t.device))
    return narrowed


WITH_ROWS = [op for op in ops.OPS if any(op.arguments[name].rows is not None for name in op.tensors())]


@pytest.mark.parametrize("op", WITH_ROWS, ids=lambda op: op.id)
def test_alone_as_in_a_batch(op, dtype, device, plan):
    whole = op.call(dtype, device)
    # a GPU's products promise it only where they are asked to
    asked = {"batch_invariant": True} if device == "cuda" and "batch_invariant" in op.arguments else {}
    whole.run(plan=plan, **asked)
    outputs = op.tensors(written=True)
    count = whole.kwargs[outputs[0]].shape[op.arguments[outputs[0]].rows]
    for rows in [[r] for r in range(count)] + [list(reversed(range(count))), [0] * (count + 1)]:
        part = op.call(dtype, device)
        changes = _rows_of(op, part, rows)
        part.run(plan=plan, **asked, **changes)
        for name in outputs:
            dim = op.arguments[name].rows
            expected = whole.kwargs[name].index_select(dim, torch.tensor(rows, device=device))
            closeness.assert_bits_equal(changes[name], expected, f"{name}, rows {rows} alone:")


@pytest.mark.parametrize("op", ops.OPS, ids=lambda op: op.id)
def test_any_number_of_threads(op, dtype, device, plan):
    threads = torch.get_num_threads()
    try:
        results = []
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            call = op.call(dtype, device, op.large)
            call.run(plan=plan)
            results.append(call.written())
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        for a, b in zip(other, results[0], strict=True):
            closeness.assert_bits_equal(a, b)


@pytest.mark.parametrize("op", ops.OPS, ids=lambda op: op.id)
def test_the_forced_plan_runs(op, plan):
    if "plan" not in op.arguments:
        return
    call = op.call()
    with rt.record_kernels() as names:
        call.run(plan=plan)
    assert names and all(f"_{plan}_" in name or name.endswith(f"_{plan}") for name in names), names
