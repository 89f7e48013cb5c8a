# SPDX-License-Identifier: Apache-2.0
"""Every argument of every op x every class of fault: a typed error that begins with the op's public name and names the
argument, before anything is written, and the next good call is right. The summary line counts them."""

import inspect
import itertools
import re

import badinput
import closeness
import ops
import pytest
import rooftile as rt
import torch


def _names(text, *names):
    return any(re.search(rf"(?<![A-Za-z0-9_]){re.escape(n)}(?![A-Za-z0-9_])", text) for n in names)


def _wrong(op, name, fault, call, changes):
    """What is wrong with how `op` takes the fault, or None."""
    others = [name]
    if fault.relational and (isinstance(op.arguments[name], ops.Object) or op.arguments[name].primary):
        others = list(op.arguments)
    try:
        call.run(**{**changes, **fault.beside, name: fault.value})
    except rt.RooftileError as e:
        if not str(e).startswith(f"{op.name}: "):
            return f"the error does not start with the op's name: {e}"
        if not _names(str(e).removeprefix(f"{op.name}: "), *others):
            return f"the error does not name {' or '.join(others)}: {e}"
    except Exception as e:
        return f"{type(e).__name__} is not a rooftile error: {e}"
    else:
        return "accepted"
    return None


def _check(op, name, dtype, device, omit_outputs):
    baseline = op.call(dtype, device)
    baseline.run()
    changes = {n: None for n in op.tensors(written=True) if n != name} if omit_outputs else {}
    problems, count = [], 0
    for fault in badinput.faults(op, name, op.call(dtype, device)):
        if omit_outputs and fault.relational:
            continue  # an output made to measure may make it a right call
        count += 1
        call = op.call(dtype, device)
        problem = _wrong(op, name, fault, call, changes)
        try:
            call.check_untouched()
            fault.check_untouched()
        except AssertionError as e:
            problem = f"{problem or 'right error'}; but {e}"
        if problem:
            problems.append(f"{fault.label}: {problem}")
        if not omit_outputs:
            _assert_good_call(op, dtype, device, baseline, fault.label)
    _assert_good_call(op, dtype, device, baseline, "all of them")
    return problems, count


def _assert_good_call(op, dtype, device, baseline, after):
    call = op.call(dtype, device)
    call.run()
    for a, b in zip(call.written(), baseline.written(), strict=True):
        closeness.assert_bits_equal(a, b, f"the good call after {after}")


def _cases():
    """(op, argument, dtype, outputs) of every call that differs from the others.

    The checks know nothing of a case's kind or format, so bfloat16 is tried in the first case of an op alone. Without
    outputs only what is optional can be left out, and not while an output itself is tried.
    """
    first = {op.name: op.case for op in reversed(ops.OPS)}
    for op, dtype, outputs in itertools.product(ops.OPS, ("float32", "bfloat16"), ("given", "omitted")):
        if dtype == "bfloat16" and op.case != first[op.name]:
            continue
        written = op.tensors(written=True)
        if outputs == "omitted" and not (written and all(op.arguments[n].optional for n in written)):
            continue
        for name, argument in op.arguments.items():
            if isinstance(argument, ops.Absent | ops.Self) or (outputs == "omitted" and name in written):
                continue
            marks = [pytest.mark.slow] if (dtype, outputs) != ("float32", "given") else []
            yield pytest.param(op, name, dtype, outputs, marks=marks, id=f"{op.id}-{name}-{dtype}-{outputs}")


@pytest.mark.parametrize("op, name, dtype, outputs", list(_cases()))
def test_every_fault_is_a_typed_error(op, name, dtype, outputs, device, count_bad_input):
    problems, count = _check(op, name, dtype, device, outputs == "omitted")
    count_bad_input(count)
    assert not problems, f"{len(problems)} of {count} bad calls of {op.name}({name}=):\n  " + "\n  ".join(problems)


@pytest.mark.parametrize("op, name", [pytest.param(op, n, id=f"{op.id}-{n}") for op in ops.OPS for n in op.tensors()])
def test_inside_a_functorch_transform(op, name, device, count_bad_input):
    """Under vmap and grad a tensor's type is torch.Tensor but its memory is not the caller's."""
    call = op.call("bfloat16" if device == "cuda" else "float32", device)
    t = call.kwargs[name]
    transforms = {"vmap": lambda f: torch.vmap(f)(torch.stack([t, t]))}
    if t.dtype.is_floating_point:
        transforms["grad"] = lambda f: torch.func.grad(lambda x: f(x).sum())(t.clone())
    for label, transform in transforms.items():

        def inside(x, label=label):
            count_bad_input(1)
            with pytest.raises(rt.RooftileError) as caught:
                call.run(**{name: x})
            assert _names(str(caught.value), name), f"{label}: {caught.value}"
            return x * 1

        transform(inside)
    call.check_untouched()


def test_the_table_is_complete():
    """Every public function that takes a plan is in the table, with every argument."""
    listed = {op.function for op in ops.OPS}
    for name in rt.__all__:
        function = getattr(rt, name)
        if inspect.isfunction(function) and "plan" in inspect.signature(function).parameters:
            assert function in listed, f"{name} is not in ops.py"
    for op in ops.OPS:
        parameters = list(inspect.signature(op.function).parameters)
        assert sorted(parameters) == sorted(op.arguments), op.name


@pytest.mark.parametrize("op", ops.OPS, ids=lambda op: op.id)
def test_unknown_and_missing_arguments(op, count_bad_input):
    call = op.call()
    count_bad_input(1)
    with pytest.raises(TypeError, match="no_such_argument"):
        call.run(no_such_argument=1)
    parameters = inspect.signature(op.function).parameters.values()
    required = [p.name for p in parameters if p.default is p.empty and p.name in op.arguments]
    for name in required:
        kwargs = {k: v for k, v in call.kwargs.items() if k != name}
        count_bad_input(1)
        with pytest.raises(TypeError, match=name):
            op.function(**kwargs)


@pytest.mark.parametrize("op", ops.OPS, ids=lambda op: op.id)
def test_no_grad_takes_parameters(op):
    """What is refused under grad mode is welcome outside it."""
    call, other = op.call(), op.call()
    call.run()
    with torch.no_grad():
        for name in op.tensors(written=False):
            if other.kwargs[name] is not None and other.kwargs[name].dtype.is_floating_point:
                other.kwargs[name] = torch.nn.Parameter(other.kwargs[name].clone())
        other.run()
    for a, b in zip(other.written(), call.written(), strict=True):
        closeness.assert_bits_equal(a, b)
