# SPDX-License-Identifier: Apache-2.0
"""16-bit products (and fp32 ones on the CPU) on every device that has kernels, against float64."""

import cases
import closeness
import numpy as np
import oracle
import pytest
import rooftile as rt
import torch

# (N, K): tails of N, of K, of a tile of 16 rows and of a vector, nothing to add up, and a real layer
SHAPES = ((1, 1), (16, 64), (17, 96), (5, 50), (33, 100), (192, 576), (49, 7), (3, 0), (100, 320))
ROWS = (1, 2, 5, 16, 17, 33, 130)


def rows_of(plan):
    """Numbers of rows to try: fewer on variants that are slow or share the best one's code."""
    return (1, 2) if plan == "reference" else ROWS if plan == cases.PLANS[0] else (1, 2, 17)


def activated(exact, activation):
    """float64, by torch's own functions."""
    gelu, silu = torch.nn.functional.gelu, torch.nn.functional.silu
    x = torch.from_numpy(exact)
    y = {
        None: lambda: x,
        "silu": lambda: silu(x),
        "gelu": lambda: gelu(x),
        "gelu_tanh": lambda: gelu(x, approximate="tanh"),
    }[activation]()
    return y.numpy()


@pytest.mark.parametrize("n, k", SHAPES)
def test_exact_data_give_the_rounded_exact_product(n, k, dtype, plan):
    x, weight = cases.exact_values((max(ROWS), k), "exact x", k), cases.exact_values((n, k), "exact weight", n, k)
    bias, residual = cases.exact_values((n,), "bias", n), cases.exact_values((max(ROWS), n), "residual", n)
    exact = np.einsum("mk,nk->mn", x, weight) + bias + residual
    tx, tw, tb, tr = (cases.tensor(v, dtype) for v in (x, weight, bias, residual))
    for m in rows_of(plan):
        closeness.assert_exact(rt.linear(tx[:m], tw, bias=tb, residual=tr[:m], plan=plan), exact[:m])


@pytest.mark.parametrize("n, k", SHAPES)
def test_product(n, k, dtype, plan):
    x, weight = cases.values((max(ROWS), k), dtype, "x", k), cases.values((n, k), dtype, "weight", n, k)
    exact = np.einsum("mk,nk->mn", x, weight)
    steps = -(-k // 64) * 4 + 6  # multiply-adds of one lane, then the lanes
    bound = oracle.EPS["float32"] / 2 * steps * (np.abs(x) @ np.abs(weight).T) + oracle.quantum(exact, dtype)
    tx, tw = cases.tensor(x, dtype), cases.tensor(weight, dtype)
    for m in rows_of(plan):
        y = rt.linear(tx[:m], tw, plan=plan)
        assert (np.abs(closeness.to_numpy64(y) - exact[:m]) <= bound[:m]).all()
        if exact[:m].size >= 256 and k > 0:
            naive = oracle.matmul_naive(x[:m], weight, dtype)
            closeness.assert_close(y, naive, exact[:m], frobenius=closeness.MATMUL_BOUND[dtype])


@pytest.mark.parametrize("plan", [p for p in cases.PLANS if p != "reference"])
@pytest.mark.parametrize("n, k", SHAPES)
def test_a_row_has_the_same_bits_at_every_number_of_rows(n, k, plan, dtype):
    x = cases.tensor(cases.values((200, k), dtype, "rows", k), dtype)
    weight = cases.tensor(cases.values((n, k), dtype, "weight", n, k), dtype)
    whole = rt.linear(x, weight, plan=plan)
    closeness.assert_bits_equal(rt.linear(x, weight, plan=plan), whole, "run to run")
    for m in (1, 2, 7, 97):
        for first in (0, 200 - m):
            some = rt.linear(x[first : first + m], weight, plan=plan)
            closeness.assert_bits_equal(some, whole[first : first + m], f"{m} rows from {first}")


def test_threads_change_no_bit():
    weight = cases.tensor(cases.values((1536, 576), "float32", "threads weight"), "float32")
    xs = [cases.tensor(cases.values((m, 576), "float32", "threads"), "float32") for m in (150, 1)]
    alone = [rt.linear(x, weight) for x in xs]
    torch.set_num_threads(2)
    try:
        for x, y in zip(xs, alone, strict=True):
            closeness.assert_bits_equal(rt.linear(x, weight), y)
    finally:
        torch.set_num_threads(1)


def test_any_shape_of_x_and_many_rows():
    weight = cases.exact_values((17, 96), "shape weight")
    for shape in ((96,), (2, 3, 96), (2, 0, 96), (1, 2, 1, 3, 96)):
        x = cases.exact_values(shape, "shape", *shape)
        y = rt.linear(cases.tensor(x, "float32"), cases.tensor(weight, "float32"))
        assert y.shape == (*shape[:-1], 17)
        closeness.assert_exact(y, x @ weight.T)
    x = cases.exact_values((50_000, 96), "many")  # more than one panel of x
    closeness.assert_exact(rt.linear(cases.tensor(x, "float32"), cases.tensor(weight, "float32")), x @ weight.T)


@pytest.mark.parametrize("m", [1, 2, 19])
def test_strides_of_every_tensor(m, dtype, plan):
    n, k = 33, 96
    x, weight, bias, residual = (
        cases.tensor(cases.values(s, dtype, "strides", *s), dtype) for s in ((m, k), (n, k), (n,), (m, n))
    )
    expected = rt.linear(x, weight, bias=bias, residual=residual, plan=plan)
    for strides, out_strides in (((2 * k, 2), (3 * n, 3)), ((1, m), (1, m)), ((k + 3, 1), (n + 5, 1))):
        view = cases.guarded((m, k), dtype, strides=strides, values=x).tensor
        far_weight = cases.guarded(
            (n, k), dtype, strides=(2 * k, 2) if strides[1] == 2 else (1, n), values=weight
        ).tensor
        out = cases.guarded((m, n), dtype, strides=out_strides)
        far_bias = cases.guarded((n,), dtype, strides=(4,), values=bias).tensor
        far_residual = cases.guarded((m, n), dtype, strides=(2 * n, 2), values=residual).tensor
        got = rt.linear(view, far_weight, bias=far_bias, residual=far_residual, out=out.tensor, plan=plan)
        assert got is out.tensor
        closeness.assert_bits_equal(got, expected)
        out.check_margins()
        out.check_written()


@pytest.mark.parametrize("activation", [None, "silu", "gelu", "gelu_tanh"])
def test_epilogue(activation, dtype, plan):
    n, k, m = 33, 64, 3
    x = oracle.round_to(cases.values((m, k), dtype, "epilogue") * 0.25, dtype)
    weight, bias, residual = (cases.values(s, dtype, "epilogue", *s) for s in ((n, k), (n,), (m, n)))
    exact = activated(x @ weight.T + bias, activation) + residual
    tx, tw, tb, tr = (cases.tensor(v, dtype) for v in (x, weight, bias, residual))
    options = {"bias": tb, "activation": activation, "residual": tr, "plan": plan}
    y = rt.linear(tx, tw, **options)
    closeness.assert_close(y, oracle.round_to(exact, dtype), exact, frobenius=closeness.MATMUL_BOUND[dtype])
    closeness.assert_bits_equal(rt.linear(tx, tw, **options, out=tr), y, "into residual")


def test_special_values_stay_in_their_row_and_column(plan):
    for special in (np.nan, np.inf):
        x, weight = torch.ones(3, 70), torch.ones(20, 70)
        x[1, 7], weight[4, 69] = special, special
        y = rt.linear(x, weight, plan=plan)
        wrong = ~torch.isfinite(y)
        assert wrong[1].all() and wrong[:, 4].all() and wrong.sum() == 20 + 2


def test_numpy_gives_the_same_as_torch():
    for dtype in cases.DTYPES:
        x, weight = cases.values((2, 96), dtype, "numpy"), cases.values((17, 96), dtype, "numpy weight")
        expected = rt.linear(cases.tensor(x, dtype), cases.tensor(weight, dtype))
        y = rt.linear(cases.numpy_array(x, dtype), cases.numpy_array(weight, dtype))
        assert isinstance(y, np.ndarray)
        closeness.assert_bits_equal(y, expected)


X, W = torch.zeros(2, 64), torch.zeros(16, 64)


@pytest.mark.parametrize(
    "call, error, text",
    [
        (lambda: rt.linear(None, W), rt.ArgumentTypeError, "^linear: x must be"),
        (lambda: rt.linear(X, None), rt.ArgumentTypeError, "^linear: weight must be"),
        (
            lambda: rt.linear(X[:, :63], W),
            rt.ArgumentError,
            r"weight must be \[N, K\] with x's K = 63, got float32\[16",
        ),
        (lambda: rt.linear(X, W[0]), rt.ArgumentError, "weight must have 2 dimensions"),
        (lambda: rt.linear(X, W.half()), rt.ArgumentTypeError, "weight must be float32, got float16"),
        (lambda: rt.linear(X.int(), W), rt.ArgumentTypeError, "x must be float32 or float16 or bfloat16"),
        (lambda: rt.linear(torch.zeros(()), W), rt.ArgumentError, "x must have 1 to"),
        (lambda: rt.linear(X, W, bias=torch.zeros(15)), rt.ArgumentError, r"bias must be \[N\] = \[16\]"),
        (lambda: rt.linear(X, W, residual=torch.zeros(16)), rt.ArgumentError, "residual must be x's shape with N = 16"),
        (lambda: rt.linear(X, W, out=torch.zeros(2, 16).half()), rt.ArgumentTypeError, "out must be float32"),
        (lambda: rt.linear(X, W, out=torch.zeros(2, 15)), rt.ArgumentError, r"out must be x's shape .*\[2, 16\]"),
        (lambda: rt.linear(X, W, out=W[:2, :16]), rt.ArgumentError, "out must not share memory with weight"),
        (lambda: rt.linear(X, W, out=X[:, :16]), rt.ArgumentError, "out must not share memory with x"),
        (lambda: rt.linear(X, W, activation="relu"), rt.ArgumentError, 'activation must be "silu"'),
        (lambda: rt.linear(X, W, activation=3), rt.ArgumentTypeError, "activation must be"),
        (lambda: rt.linear(X, W, activation="silu_mul"), rt.ArgumentError, 'or "gelu_tanh", got "silu_mul"'),
        (lambda: rt.linear(X, W, plan="mmx"), rt.NotSupportedError, 'plan "mmx" is no CPU variant'),
        (lambda: rt.linear(X, torch.zeros(1, 64).expand(2**31, 64)), rt.ArgumentError, "N and K of at most"),
    ],
)
def test_bad_input_is_named(call, error, text):
    with pytest.raises(error, match=text):
        call()
    assert torch.isfinite(rt.linear(X, W)).all()  # the next good call works


def test_the_kernel_that_ran_has_its_name():
    with rt.record_kernels() as names:
        rt.linear(X, W, plan="portable")
    assert names == ["cpu_portable_float32_linear"]
