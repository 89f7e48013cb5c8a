# SPDX-License-Identifier: Apache-2.0
"""Batch 0, no tokens, no rows: the right empty answer, nothing written, and a right good call after it."""

import closeness
import ops
import pytest

EMPTIES = [pytest.param(op, build, id=f"{op.id}-{i}") for op in ops.OPS for i, build in enumerate(op.empties)]


@pytest.mark.parametrize("op, build", EMPTIES)
def test_empty_calls(op, build, dtype, device, plan):
    baseline = op.call(dtype, device)
    baseline.run(plan=plan)
    call = op.call(dtype, device, build)
    call.run(plan=plan)
    for guard in call.guards:
        guard.check_margins()
    if call.kwargs.get("rows", 0) is not None:  # reset() without rows is of all
        call.check_state()
    for name in op.tensors(written=True):  # of queries that see no key
        call.guard(name).check_written(name)
    given = {name: None for name in op.tensors(written=True) if op.arguments[name].optional}
    more = {"return_lse": True} if "return_lse" in op.arguments else {}
    results = call.run(plan=plan, **given, **more)
    results = () if not given else results if isinstance(results, tuple) else (results,)
    for result, t in zip(results, (call.kwargs[name] for name in given), strict=True):
        assert result.shape == t.shape and result.dtype == t.dtype and result.device == t.device
    after = op.call(dtype, device)
    after.run(plan=plan)
    for a, b in zip(after.written(), baseline.written(), strict=True):
        closeness.assert_bits_equal(a, b)
