# SPDX-License-Identifier: Apache-2.0
"""A row's bits depend on that row alone: not on the batch it stands in, its neighbours or the number of threads."""

import cases
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


NORMS = {
    "rms_norm": lambda x: rt.rms_norm(x, x[0], 1e-5),
    "add_rms_norm": lambda x: torch.stack(rt.add_rms_norm(x, x.flip(1), x[0], 1e-5)),
    "layer_norm": lambda x: rt.layer_norm(x, x[0], x[1], 1e-5),
    "softmax": rt.softmax,
    "silu_mul": rt.silu_mul,
    "gelu_mul": rt.gelu_mul,
}


@pytest.mark.skipif("cuda" not in cases.devices(), reason="no GPU, or a build without GPU kernels")
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("hidden", [1040, 1536, 3584, 4096, 8192])  # 3, 3, 7, 8 and 16 warps of two vectors a thread
def test_few_rows_as_among_many(name, hidden, kind):
    """The number of rows chooses how many of a row's elements a thread takes, and how they are loaded."""
    many = (64 << 20) // (2 * hidden) + 3  # more bytes than stay in L2
    generator = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(many, hidden, device="cuda", generator=generator).to(kind)
    whole = NORMS[name](x)
    for rows in (2, 32, 34, 140, 2000):
        part = NORMS[name](x[:rows])
        closeness.assert_bits_equal(part, whole[..., :rows, :], f"{rows} of {many} rows:")


def test_a_promise_of_one_order_is_kept_or_refused(dtype, device, plan):
    """`batch_invariant=True` is refused by what does not know it; where it is taken, a row has the same bits alone, in
    every kernel that its neighbours would choose."""
    keepers = set()
    for op in ops.OPS:
        if not op.gpu and device == "cuda":
            continue
        call = op.call(dtype, device)
        if "batch_invariant" not in op.arguments:
            with pytest.raises(TypeError, match="batch_invariant"):
                call.run(batch_invariant=True)
            continue
        keepers.add(op.name)
        w, x = call.kwargs["w"], call.kwargs["x"].flatten(0, -2)
        function = getattr(rt, op.name)
        alone = function(x[:1], w, batch_invariant=True, plan=plan)
        for m in (2, 7, 8, 9, 16, 17, 33, 64, 65, 130):
            rows = x[torch.arange(m, device=device) % len(x)]
            for at in (0, m - 1):
                rows[at] = x[0]
            y = function(rows, w, batch_invariant=True, plan=plan)
            for at in (0, m - 1):
                closeness.assert_bits_equal(y[at], alone[0], f"{op.id}, row {at} of {m}:")
    assert keepers == {"w4a16_matmul", "w8a16_matmul"}


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
