# SPDX-License-Identifier: Apache-2.0
"""No argument is taken and ignored: another value of it changes what the call leaves behind, or is refused."""

import ops
import pytest
import rooftile as rt
import torch

OTHER = {  # another value than the good call's, which is right as well or refused by what the others say
    "eps": 0.5,
    "scale": 0.01,
    "window": 2,
    "softcap": 0.5,
    "causal": False,
    "activation": "silu",
    "approximate": "none",
    "temperature": 0.2,
    "top_k": 2,
    "top_p": 0.1,
    "min_p": 0.9,
    "repetition_penalty": 9.0,
    "weight_offset": 0.75,
    "order": "vllm",
    "return_lse": True,
    "group_size": 96,
    "kind": "integer",
    "zeros": "minima",
    "src": 1,
    "dst": 1,
    "row": 0,
    "at": 3,
    "cu_seqlens_q": torch.tensor([0, 3, 4, 9], dtype=torch.int32),
    "cu_seqlens_k": torch.tensor([0, 4, 7, 12], dtype=torch.int32),
}
# They say where or how a result is computed, never what it is; batch_invariant: on the CPU a row's bits never depend on
# the number of rows (test_row_independence.py).
NOT_THE_RESULT = ("stream", "plan", "batch_invariant")


def _other(name, value):
    if name in OTHER and not isinstance(value, torch.Tensor | type(None)):
        return OTHER[name] if value != OTHER[name] else "symmetric"
    if name.startswith("cu_seqlens") or value is None:
        return OTHER.get(name)
    if name == "rows":
        return torch.where(value == 2, 1, value)
    if value.dtype.is_floating_point:
        return (value * 0.5 + 0.25).flip(-1)
    return value.flip(0) if name in ("perm", "index", "counts") else (value - 1).clip(min=0)


CASES = [
    (op, name)
    for op in ops.OPS
    for name, argument in op.arguments.items()
    if isinstance(argument, ops.Scalar) or (isinstance(argument, ops.Tensor) and not argument.written)
    if name not in NOT_THE_RESULT
]


@pytest.mark.parametrize(("op", "name"), CASES, ids=lambda x: getattr(x, "id", x))
def test_another_value_changes_the_result(op, name):
    good, call = op.call(), op.call()
    good.run()
    other = _other(name, call.kwargs.get(name))
    assert other is not None, f"no other value of {name} is known"
    try:
        call.run(**{name: other})
    except rt.RooftileError as e:
        assert str(e).startswith(f"{op.name}: ")
        return
    before, after = good.written(), call.written()
    same = len(before) == len(after) and all(
        a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(before, after, strict=True)
    )
    assert not same or type(good.returned) is not type(call.returned), f"{op.id}: {name} changes nothing"
