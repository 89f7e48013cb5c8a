# SPDX-License-Identifier: Apache-2.0
"""16-bit products on every device that has kernels: streamed, in tiles, and where no tile can be used."""

import cases
import closeness
import numpy as np
import oracle
import product_checks as checks
import pytest
import rooftile as rt
import torch
from rooftile import _C
from test_linear import activated

ROWS = (1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 300)
# (N, K): tails of N, of K and of 16 bytes, every number of warps that share a row, K in chunks, many rows
SMALL = ((64, 64), (17, 96), (5, 50), (33, 100), (49, 7), (1, 1), (8, 8), (104, 576), (576, 72), (3, 0))
LARGE = ((64, 16384), (40, 16400), (3000, 520), (4096, 264), (20000, 136), (40000, 24))
DTYPES = ("float16", "bfloat16")


def shapes(device):
    return SMALL if device == "cpu" else SMALL + LARGE


def rows(device):
    return (1, 2, 17) if device == "cpu" else ROWS


def kind_of_tiles(device, m, n, k):
    """What must have run for a call whose tensors are all contiguous: None for the kernel that streams."""
    if device == "cpu" or k % 8 or k == 0:
        return None
    if torch.cuda.get_device_capability()[0] == 9 and "90a" in _C.gpu_backend():
        return "_tma" if m <= 64 or n % 8 else "_tile"
    return "_multistage" if m > 16 and n % 8 == 0 else None


def linear(*tensors, **options):
    """(rt.linear's result, name of the kernel)"""
    with rt.record_kernels() as names:
        y = rt.linear(*tensors, **options)
    return y, names[-1]


def cuda_only(device):
    if device == "cpu":
        pytest.skip("of the GPU's kernels")


@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_data_give_the_rounded_exact_product(dtype, device):
    for n, k in shapes(device):
        x, weight = (
            cases.exact_values((max(rows(device)), k), "exact x", k),
            cases.exact_values((n, k), "exact weight", n, k),
        )
        bias, residual = cases.exact_values((n,), "bias", n), cases.exact_values((len(x), n), "residual", n)
        exact = np.matmul(x, weight.T) + bias + residual
        tx, tw, tb, tr = (cases.tensor(v, dtype, device) for v in (x, weight, bias, residual))
        for m in rows(device):
            y, kernel = linear(tx[:m], tw, bias=tb, residual=tr[:m])
            closeness.assert_exact(y, exact[:m])
            kind = kind_of_tiles(device, m, n, k)
            assert device == "cpu" or (kind or "_linear_stream") in kernel, (m, n, k, kernel)
            closeness.assert_exact(rt.linear(tx[:m], tw), np.matmul(x[:m], weight.T))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_tile_and_splits_of_k(dtype, device):
    """On a large Hopper GPU every form runs here; elsewhere the same products must be right all the same."""
    cuda_only(device)
    kernels = set()
    for m, n, k in (
        (1024, 4096, 136),
        (300, 20000, 64),
        (520, 8200, 200),
        (300, 6200, 520),
        (250, 14000, 136),
        (100, 2056, 4096),
        (250, 4096, 8192),
        (40, 4096, 64),
        (130, 264, 4096),
        (4, 64, 16384),
        (12, 136, 4096),
        (20, 64, 1032),
        (64, 20000, 520),
    ):
        x, weight = (cases.tensor(cases.exact_values(s, "tiles", *s), dtype, device) for s in ((m, k), (n, k)))
        y, kernel = linear(x, weight)
        kernels.add(kernel.partition("_linear_")[2])
        exact = x.double() @ weight.double().T
        assert torch.equal(y, exact.to(y.dtype)), (m, n, k, kernel)
    if kind_of_tiles(device, 65, 8, 8) == "_tile" and torch.cuda.get_device_properties(0).multi_processor_count == 132:
        tiles = {"tile64x128", "tile128x256", "tile128x128", "tile192x128", "tile224x128"}
        split = {"tile64x128_split8", "tile64x128_split2", "tile128x128_split2"}
        assert tiles | split | {"tma8_split2", "tma16_split2", "tma32_split2", "tma64_split1"} <= kernels
    assert any(not kernel.endswith("_split1") for kernel in kernels if "split" in kernel)


@pytest.mark.parametrize("dtype", DTYPES)
def test_product(dtype, device):
    for n, k in shapes(device):
        x, weight = cases.values((max(rows(device)), k), dtype, "x", k), cases.values((n, k), dtype, "weight", n, k)
        exact, naive = np.matmul(x, weight.T), oracle.matmul_naive(x, weight, dtype)
        bound = oracle.EPS["float32"] * (k // 8 + 8) * np.matmul(np.abs(x), np.abs(weight).T) + oracle.quantum(
            exact, dtype
        )
        tx, tw = cases.tensor(x, dtype, device), cases.tensor(weight, dtype, device)
        for m in rows(device):
            y = rt.linear(tx[:m], tw)
            assert (np.abs(closeness.to_numpy64(y) - exact[:m]) <= bound[:m]).all(), (m, n, k)
            if exact[:m].size >= 256 and k > 0:
                closeness.assert_close(y, naive[:m], exact[:m], frobenius=closeness.MATMUL_BOUND[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_the_run_the_neighbours_or_in_a_bucket_the_rows(dtype, device):
    for n, k in (
        ((192, 576), (104, 1536), (64, 16384), (6200, 520), (33, 100)) if device == "cuda" else ((192, 576), (33, 100))
    ):
        x = cases.tensor(cases.values((1100, k), dtype, "rows", k), dtype, device)
        weight = cases.tensor(cases.values((n, k), dtype, "rows weight", n, k), dtype, device)
        seen = {}
        for m in (1, 2, 7, 8, 9, 15, 16, 17, 31, 64, 65, 128, 129, 200, 300, 700, 1100):
            y, kernel = linear(x[:m], weight)
            closeness.assert_bits_equal(rt.linear(x[:m], weight), y, f"run to run, {m} rows")
            other = x[:m].clone()
            other[1:] = float("nan")
            closeness.assert_bits_equal(rt.linear(other, weight)[:1], y[:1], f"neighbours, {m} rows")
            closeness.assert_bits_equal(
                rt.linear(x[m - 1 : m].expand(m, k).contiguous(), weight)[:1], y[m - 1 :], "place"
            )
            if m <= 16 or "_tma" in kernel:
                bucket = "few"
            elif "_tile" in kernel:
                bucket = min((m + 127) // 128, 3)  # up to 128 tokens, up to 256, more: in all tiles
            else:
                bucket = kernel
            first = seen.setdefault(bucket, y)
            closeness.assert_bits_equal(y[: len(first)], first, f"{m} and {len(first)} rows by {kernel}")


@pytest.mark.parametrize("m", [1, 3, 12, 19, 70])
@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_of_every_tensor(m, dtype, device):
    n, k = 40, 96
    x, weight, bias, residual = (cases.exact_values(s, "strides", *s) for s in ((m, k), (n, k), (n,), (m, n)))
    exact = x @ weight.T + bias + residual
    x, weight, bias, residual = (cases.tensor(t, dtype, device) for t in (x, weight, bias, residual))
    pitches = ((2 * k, 2), (1, m), (k + 3, 1), (k + 8, 1), (k, 1))
    weight_pitches = ((2 * k, 2), (1, n), (k + 3, 1), (k + 16, 1), (k, 1))
    out_pitches = ((3 * n, 3), (1, m), (n + 5, 1), (n + 8, 1), (n, 1))
    for i, strides in enumerate(pitches):
        for j, weight_strides in enumerate(weight_pitches):
            view = cases.guarded((m, k), dtype, device, strides=strides, values=x).tensor
            far_weight = cases.guarded((n, k), dtype, device, strides=weight_strides, values=weight).tensor
            out = cases.guarded((m, n), dtype, device, strides=out_pitches[(i + j) % 5])
            far_bias = cases.guarded((n,), dtype, device, strides=(4,) if j % 2 else (1,), values=bias).tensor
            far_residual = cases.guarded((m, n), dtype, device, strides=out_pitches[j], values=residual).tensor
            got = rt.linear(view, far_weight, bias=far_bias, residual=far_residual, out=out.tensor)
            closeness.assert_exact(got, exact)
            out.check_margins()
            out.check_written()
    for shape in ((2, m, 1, k), (1, m, 1, k)):  # leading dimensions that do not collapse, and such that do
        rows = x.reshape(1, m, 1, k).expand(shape)
        y = rt.linear(rows, weight, bias=bias, residual=residual.reshape(1, m, 1, n).expand(*shape[:-1], n))
        for part in y:
            closeness.assert_exact(part[:, 0], exact)
    for shift in (1, 4):  # elements from a multiple of 16 bytes
        flat = torch.empty(m * k + n * k + 16, dtype=x.dtype, device=device)
        moved = flat[shift : shift + m * k].view(m, k).copy_(x)
        closeness.assert_exact(rt.linear(moved, weight, bias=bias, residual=residual), exact)
        moved = flat[shift : shift + n * k].view(n, k).copy_(weight)
        closeness.assert_exact(rt.linear(x, moved, bias=bias, residual=residual), exact)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_share_memory_with_their_neighbours(dtype, device):
    """Whole pieces of 16 bytes all the same: streamed, on every GPU."""
    for n, k in ((40, 96), (17, 640), *(((64, 16384), (4096, 264)) if device == "cuda" else ())):
        flat = cases.tensor(cases.exact_values((8 * max(n, 20) + k,), "windows", n, k), dtype, device)
        weight = cases.tensor(cases.exact_values((n, k), "beside windows", n, k), dtype, device)
        for m in (2, 7, 9, 16, 20):
            x = flat.as_strided((m, k), (8, 1))
            windows = flat.as_strided((n, k), (8, 1))
            for rows, w in ((x, weight), (x[1:2].expand(m, k), weight), (weight[:m], windows)):
                y, kernel = linear(rows, w)
                assert torch.equal(y, (rows.double() @ w.double().T).to(y.dtype)), (m, n, k, kernel)
                assert device == "cpu" or "_linear_stream" in kernel, kernel


@pytest.mark.parametrize("activation", [None, "silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("m, n, k", [(5, 33, 64), (5, 40, 4096), (40, 40, 64), (300, 264, 576)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_epilogue(activation, m, n, k, dtype, device):
    x = oracle.round_to(cases.values((m, k), dtype, "epilogue") * 0.125, dtype)
    weight, bias, residual = (cases.values(s, dtype, "epilogue", *s) for s in ((n, k), (n,), (m, n)))
    exact = activated(x @ weight.T + bias, activation) + residual
    tx, tw, tb, tr = (cases.tensor(v, dtype, device) for v in (x, weight, bias, residual))
    options = {"bias": tb, "activation": activation}
    y = rt.linear(tx, tw, **options, residual=tr)
    closeness.assert_close(y, oracle.round_to(exact, dtype), exact, frobenius=closeness.MATMUL_BOUND[dtype])
    closeness.assert_bits_equal(rt.linear(tx, tw, **options, residual=tr.clone()), y, "again")
    out = tr.clone()
    closeness.assert_bits_equal(rt.linear(tx, tw, **options, residual=out, out=out), y, "into residual")
    plain = activated(x @ weight.T, activation)
    closeness.assert_close(
        rt.linear(tx, tw, activation=activation),
        oracle.round_to(plain, dtype),
        plain,
        frobenius=closeness.MATMUL_BOUND[dtype],
    )


def test_no_rows_and_nothing_to_add_up(device):
    weight = torch.ones(16, 64, device=device).half()
    for shape in ((0, 64), (2, 0, 64)):
        assert rt.linear(torch.empty(shape, device=device).half(), weight).shape == (*shape[:-1], 16)
    assert rt.linear(torch.ones(3, 64, device=device).half(), weight[:0]).shape == (3, 0)
    for m in (3, 40):
        y = rt.linear(torch.empty(m, 0, device=device).half(), weight[:, :0], bias=torch.ones(16, device=device).half())
        assert torch.equal(y, torch.ones_like(y))


@pytest.mark.parametrize("m", [1, 12, 40, 300])
def test_captured_in_a_graph(m, device):
    cuda_only(device)
    weight = cases.tensor(cases.values((104, 16384), "float16", "graph weight"), "float16", device)
    x = cases.tensor(cases.values((m, 16384), "float16", "graph"), "float16", device)
    checks.captured(lambda x, **out: rt.linear(x, weight, **out), x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_call_behind_another(dtype, device):
    """A kernel may start before the one ahead has ended, which writes its x, weight, bias or residual."""
    cuda_only(device)

    def chain(x, first, second):
        y = rt.linear(x, first, activation="silu")  # [m, 4096]
        weight = rt.linear(second, first)  # [64, 4096], a weight that the next call reads at once
        for _ in range(3):
            y = rt.linear(rt.linear(y, weight), first, residual=y)
        z = rt.linear(y, weight, bias=rt.linear(second[:1], second)[0])
        return rt.linear(z, weight.T, residual=y)

    first = cases.tensor(cases.values((4096, 64), dtype, "first") * 0.05, dtype, device)
    second = cases.tensor(cases.values((64, 64), dtype, "second") * 0.2, dtype, device)
    for m in (1, 16, 40):
        x = cases.tensor(cases.values((m, 64), dtype, "chain"), dtype, device)
        with pytest.MonkeyPatch.context() as patch:
            real = _C.linear

            def one_at_a_time(*arguments, real=real):
                name = real(*arguments)
                torch.cuda.synchronize()
                return name

            patch.setattr(_C, "linear", one_at_a_time)
            expected = chain(x, first, second)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = chain(x, first, second)
        for _ in range(20):
            closeness.assert_bits_equal(chain(x, first, second), expected)
            graph.replay()
            torch.cuda.synchronize()
            closeness.assert_bits_equal(captured, expected)


@pytest.mark.parametrize("streamed", [False, True])
def test_more_outputs_than_31_bits_count(streamed, device):
    cuda_only(device)
    m, n, k = 65544, 32776, 64
    if torch.cuda.mem_get_info()[0] < 8 << 30:
        pytest.skip("needs 8 GiB")
    x, weight = (cases.tensor(cases.exact_values(s, "vast"), "float16", device) for s in ((m, k), (n, k)))
    if streamed:
        x = x.T.contiguous().T
    y, kernel = linear(x, weight)
    assert y.numel() > 2**31 and ("_stream16" in kernel) == streamed
    for first in (0, 32768, m - 24):
        exact = x[first : first + 24].double() @ weight.double().T
        assert torch.equal(y[first : first + 24], exact.half()), f"rows from {first}"


def test_what_a_gpu_refuses_is_named(device):
    cuda_only(device)
    weight, x = torch.ones(64, 16384, device=device).half(), torch.ones(2, 16384, device=device).half()
    odd = torch.ones(2, 16385, device=device).half()[:, 1:]
    for call, error, text in (
        (lambda: rt.linear(x.float(), weight.float()), rt.NotSupportedError, "x must be float16 or bfloat16 on a GPU"),
        (lambda: rt.linear(x, weight.cpu()), rt.ArgumentError, "weight must be on x's device"),
        (lambda: rt.linear(x, weight, bias=torch.ones(64).half()), rt.ArgumentError, "bias must be on x's device"),
        (lambda: rt.linear(x, weight, out=x[:, :64]), rt.ArgumentError, "out must not share memory with x"),
        (lambda: rt.linear(x, weight, plan="avx2"), rt.NotSupportedError, "is no plan of the GPU kernels"),
        (
            lambda: _C.linear(odd, weight, None, None, None, x.new_empty(2, 64), None, None, None),
            rt.ArgumentError,
            "workspace must have .* bytes",
        ),
    ):
        with pytest.raises(error, match=text):
            call()
    assert torch.isfinite(rt.linear(x * 0.001, weight)).all()


@pytest.mark.parametrize("m", [3, 40])
def test_compiled_equals_eager(m, device):
    torch._dynamo.reset()
    x, weight, bias = (
        cases.tensor(cases.values(s, "bfloat16", "compiled"), "bfloat16", device) for s in ((m, 96), (40, 96), (40,))
    )

    def f(x, residual=None):
        return rt.linear(x, weight, bias=bias, activation="gelu", residual=residual)

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    first = f(x)
    closeness.assert_bits_equal(compiled(x), first)
    closeness.assert_bits_equal(compiled(x, first), f(x, first))
