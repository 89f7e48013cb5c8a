# SPDX-License-Identifier: Apache-2.0
"""Weights of 4 and 8 bits and their products on every device that has kernels; the same bytes everywhere."""

import itertools

import cases
import closeness
import numpy as np
import oracle
import product_checks as checks
import pytest
import rooftile as rt
import test_w4a16 as w4
import torch
from rooftile import _C
from rooftile.nn import W4Linear, W8Linear

ROWS = (1, 2, 7, 8, 9, 16, 17, 33, 64, 65, 128, 300)
# (N, K, group): tails of N, of K and of a tile, every span of a scale, chunks of K, more rows than a CTA takes
SMALL = (
    (64, 64, 32),
    (17, 96, 32),
    (96, 96, 96),
    (5, 50, 50),
    (100, 576, 64),
    (33, 576, 576),
    (48, 1536, 128),
    (576, 64, 64),
)
LARGE = ((64, 4096, 128), (64, 4096, 32), (64, 4096, 4096), (4096, 576, 64), (300, 4096, 64), (4096, 96, 32))
DTYPES = ("float16", "bfloat16")


def shapes(device):
    return SMALL if device == "cpu" else SMALL + LARGE


def rows(device):
    return (1, 2, 17) if device == "cpu" else ROWS


def weight(n, k, group, kind, device, act_order=False, **options):
    perm = cases.generator("perm", n, k).permutation(k) if act_order else None
    w, dense = w4.both(n, k, group, kind, perm=perm, **options)
    return w.to(device), dense


def takes_tiles(device, m):
    """Whether Hopper's kernel for more tokens must have run."""
    return device != "cpu" and torch.cuda.get_device_capability()[0] == 9 and m > 16


def rounds_weights(device, m, group, kind, bits):
    """Whether that kernel multiplies weights rounded to x's type: scale blocks below 128 k, and minima.

    Up to 64 tokens blocks of 64 codes of 4 bits stay exact.
    """
    small = group == 32 or (group == 64 and (bits == 8 or m > 64))
    return takes_tiles(device, m) and (kind == "minima" or small)


def matmul_on_tiles(x, w, **options):
    """The product, by the kernel that its rows ask for."""
    with rt.record_kernels() as kernels:
        y = w4.matmul(x, w, **options)
    assert ("_tile" in kernels[-1]) == takes_tiles(x.device.type, x[..., 0].numel()), kernels
    return y


def cuda_only(device):
    if device == "cpu":
        pytest.skip("of the GPU's kernels")


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("bits, kind", w4.FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_data_give_the_rounded_exact_product(bits, kind, act_order, dtype, device):
    for n, k, group in shapes(device):
        w, dense = weight(n, k, group, kind, device, act_order, exact=True, bits=bits)
        x = cases.exact_values((max(rows(device)), k), "exact x", k)
        bias = cases.exact_values((n,), "bias", n)
        exact = oracle.w4a16_matmul(x, dense, bias)
        tx, tb = cases.tensor(x, dtype, device), cases.tensor(bias, dtype, device)
        for m in rows(device):
            closeness.assert_exact(matmul_on_tiles(tx[:m], w, bias=tb), exact[:m])
            closeness.assert_exact(w4.matmul(tx[:m], w, bias=tb, batch_invariant=True), exact[:m])


def views(x):
    """x at other strides, with NaN wherever nothing of it lies."""
    m, k = x.shape
    for strides in ((k + 3, 1), (k + 8, 1), (2 * k, 2), (1, m), (1, m + 5)):
        yield cases.guarded((m, k), x.dtype, x.device, strides=strides, values=x).tensor
    late = cases.guarded((m, k + 1), x.dtype, x.device, strides=(k + 7 & -8, 1)).tensor[:, 1:]
    late.copy_(x)
    yield late


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("bits, kind", w4.FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_x_of_any_strides_is_exact(bits, kind, act_order, dtype, device):
    for n, k, group in ((100, 576, 64), (33, 96, 32), (17, 50, 50), (40, 2304, 128)):
        w, dense = weight(n, k, group, kind, device, act_order, exact=True, bits=bits)
        for m in (3, 20) if device == "cpu" else (20, 70, 300):
            x = cases.exact_values((m, k), "any strides", m, k)
            exact = oracle.w4a16_matmul(x, dense)
            tx = cases.tensor(x, dtype, device)
            for view in views(tx):
                closeness.assert_exact(matmul_on_tiles(view, w), exact)
            closeness.assert_exact(matmul_on_tiles(tx[-1:].expand(m, k), w), np.broadcast_to(exact[-1:], exact.shape))
            uneven = tx[None, :, None].expand(2, m, 3, k)  # leading dimensions that do not collapse
            y = matmul_on_tiles(uneven, w)
            closeness.assert_exact(y.reshape(-1, n), np.broadcast_to(exact[None, :, None], (2, m, 3, n)).reshape(-1, n))
        step = 8  # rows that overlap
        x = cases.exact_values((k + 40 * step,), "windows", k)
        windows = np.lib.stride_tricks.sliding_window_view(x, k)[::step]
        tx = cases.tensor(x, dtype, device).unfold(0, k, step)
        closeness.assert_exact(matmul_on_tiles(tx, w), oracle.w4a16_matmul(windows, dense))


@pytest.mark.parametrize("bits, kind", w4.FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_more_tokens_than_are_prepared_at_once(bits, kind, dtype, device):
    cuda_only(device)
    for m, n, k, group in ((4096 + 130, 72, 256, 32), (4096 + 17, 33, 2304, 128), (32768 + 130, 24, 128, 32)):
        x = cases.exact_values((m, k), "many", k)
        tx = cases.tensor(x, dtype, device)
        odd = cases.guarded((m, k), dtype, device, strides=(k + 1, 1), values=tx).tensor
        residual = cases.exact_values((m, n), "many", n)
        tr = cases.tensor(residual, dtype, device)
        for act_order in (False, True):
            w, dense = weight(n, k, group, kind, device, act_order, exact=True, bits=bits)
            exact = oracle.w4a16_matmul(x, dense) + residual
            for view in (tx, odd):
                closeness.assert_exact(matmul_on_tiles(view, w, residual=tr), exact)


def workspace_bytes(call):
    """What a call borrows: its outputs are given."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


def test_expanded_rows_and_the_sums_of_the_product_before_them(device):
    """Both lie in the workspace, the same memory where they are equally large, and the kernel that expands may start
    while the product before it still runs.
    """
    cuda_only(device)
    k, expanded_k = 32768, 2048
    x, w = (cases.tensor(cases.values(s, "float16", "sums", s[0]), "float16", device) for s in ((128, k), (512, k)))
    y = torch.empty(128, 512, dtype=torch.float16, device=device)
    borrowed = workspace_bytes(lambda: rt.linear(x, w, out=y))
    n = borrowed // (2 * expanded_k)  # as many rows in 16 bits take the same memory
    assert n * 2 * expanded_k == borrowed and n % 128 == 0
    packed, _ = weight(n, expanded_k, 32, "minima", device)
    m = 1024
    while not explained_expansion(m, packed):  # more tokens, until it pays
        m *= 2
    many = cases.tensor(cases.values((m, expanded_k), "float16", "many"), "float16", device)
    out = torch.empty(m, n, dtype=torch.float16, device=device)
    assert workspace_bytes(lambda: rt.w4a16_matmul(many, packed, out=out)) == borrowed
    sums, product = y.clone(), out.clone()
    torch.cuda.synchronize()
    torch.cuda._sleep(10_000_000)  # the calls below are all in the queue when the first one starts
    found = []
    for _ in range(20):
        rt.linear(x, w, out=y)
        rt.w4a16_matmul(many, packed, out=out)
        found.append((y.clone(), out.clone()))
    for i, (before, after) in enumerate(found):
        closeness.assert_bits_equal(before, sums, f"sums {i}")
        closeness.assert_bits_equal(after, product, f"product {i}")


def explained_expansion(m, w):
    assert m <= 1 << 16
    return "expand" in rt.explain("w4a16_matmul", (m, w.shape[1]), w, dtype="float16", device="cuda").kernel


@pytest.mark.parametrize("group", [32, 128])  # W is expanded, and read as it is
def test_more_tokens_than_a_launch_takes(group, device):
    """2^30 of one launch and 40 of the next. The rows of x overlap in memory."""
    cuda_only(device)
    tokens, n, k = (1 << 30) + 40, 16, 128
    needed = 2 * (8 * tokens + k) + 2 * n * tokens
    if torch.cuda.mem_get_info()[0] < needed + (8 << 30):
        pytest.skip(f"needs {needed >> 30} GiB of the GPU's memory")
    w, dense = weight(n, k, group, "symmetric", device)
    try:
        memory = torch.empty(8 * tokens + k, dtype=torch.float16, device=device).uniform_(-1, 1)
        y = torch.empty(tokens, n, dtype=torch.float16, device=device)
        x = memory.as_strided((tokens, k), (8, 1))
        rt.w4a16_matmul(x, w, out=y)
    except (torch.OutOfMemoryError, rt.OutOfMemoryError):
        pytest.skip("other processes have the GPU's memory")
    last = slice(tokens - 80, None)
    found, xs = y[last].clone(), x[last].double().cpu().numpy()
    del memory, x, y
    exact, naive = oracle.w4a16_matmul(xs, dense), oracle.matmul_naive(xs, dense, "float16")
    closeness.assert_close(found, naive, exact, frobenius=closeness.matmul_bound("float16", group == 32))


@pytest.mark.parametrize("scale_dtype", DTYPES)
@pytest.mark.parametrize("bits, kind", w4.FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_tokens_on_an_expanded_weight_have_the_same_bits(bits, kind, dtype, scale_dtype, device):
    # small scale blocks and minima: with many tokens W is written in x's type, a chunk of rows at a time
    cuda_only(device)
    for m, n, k, group in ((4000, 8200, 2048, 64), (2048, 16640, 1088, 32), (2048, 4096, 2048, 2048)):
        w, dense = weight(n, k, group, kind, device, scale_dtype=scale_dtype, bits=bits)
        x, residual = (cases.tensor(cases.values(s, dtype, "expanded", *s), dtype, device) for s in ((m, k), (m, n)))
        bias = cases.tensor(cases.values((n,), dtype, "expanded", n), dtype, device)
        options = {"bias": bias, "activation": "silu", "residual": residual}
        expands = rounds_weights(device, m, group, kind, bits)
        with rt.record_kernels() as kernels:
            y = w4.matmul(x, w, **options)
            odd = cases.guarded((m, n), dtype, device, strides=(n + 1, 1))  # on the kernel that rounds in registers
            w4.matmul(x, w, **options, out=odd.tensor)
        if torch.cuda.get_device_capability()[0] == 9:
            assert ["_expand" in name for name in kernels] == [expands, False], kernels
        closeness.assert_bits_equal(y, odd.tensor)
        odd.check_margins()
        plain = w4.matmul(x, w)[:40]
        xs, exact = x[:40].double().cpu().numpy(), oracle.w4a16_matmul(x[:40].double().cpu().numpy(), dense)
        naive = oracle.matmul_naive(xs, dense, dtype)
        closeness.assert_close(plain, naive, exact, frobenius=closeness.matmul_bound(dtype, expands))


@pytest.mark.parametrize("bits", w4.WEIGHT)
@pytest.mark.parametrize("m", [1, 8, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_beyond_fp16_that_cancel(dtype, m, bits, device):
    """Half of K adds up to 600 * 7 * 2048, the other half takes it away again: a partial sum in fp16 is infinite."""
    n, k, group = 24, 4096, 128
    codes = np.full((n, k), 15 if bits == 4 else 135, np.uint8)  # 7 above the middle, and in the other half 7 below
    codes[:, k // 2 :] = 1 if bits == 4 else 121
    codes[:, -1] += np.arange(n, dtype=np.uint8) % 3  # what is left: 600 times 0, 1 or 2
    packed = torch.from_numpy(codes[:, ::2] | codes[:, 1::2] << 4 if bits == 4 else codes)
    w = w4.WEIGHT[bits].from_canonical(packed, torch.ones(n, k // group).half()).to(device)
    x = torch.full((m, k), 600.0, dtype=getattr(torch, dtype), device=device)
    left = 600.0 * (np.arange(n) % 3)
    closeness.assert_exact(w4.matmul(x, w), oracle.round_to(np.broadcast_to(left, (m, n)), dtype))


@pytest.mark.parametrize("bits", w4.WEIGHT)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_integer_zero_is_exact(dtype, bits, device):
    for n, k, group in ((40, 128, 32), (33, 576, 64), (17, 96, 96)):
        codes, scales, zeros = w4.parts(n, k, group, "integer", exact=True, bits=bits)
        zeros[:] = cases.generator("far zeros", n, k).integers(0, 256, zeros.shape)
        zeros.flat[:8] = (0, 15, 16, 63, 64, 127, 128, 255)
        w = w4.weight(codes, scales, zeros, "integer", group=group, bits=bits).to(device)
        # one value a row, a power of two: the product is (u - zero) * scale * x, exact
        x = np.zeros((min(rows(device)[-1], k), k))
        x[np.arange(len(x)), np.arange(len(x)) * 7 % k] = 2.0 ** (np.arange(len(x)) % 5 - 2)
        exact = oracle.w4a16_matmul(x, oracle.w4_decode(codes, scales, "integer", zeros, bits=bits))
        tx = cases.tensor(x, dtype, device)
        for m in rows(device):
            closeness.assert_exact(w4.matmul(tx[:m], w), exact[:m])


@pytest.mark.parametrize("bits, kind", w4.FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_product(bits, kind, dtype, device):
    for n, k, group in shapes(device):
        w, dense = weight(n, k, group, kind, device, scale_dtype=dtype, bits=bits)
        x = cases.values((max(rows(device)), k), dtype, "x", k)
        expected, tx = w4.Expected(x, dense, dtype), cases.tensor(x, dtype, device)
        for m in rows(device):
            rounded = rounds_weights(device, m, group, kind, bits)
            expected.check(matmul_on_tiles(tx[:m], w), f"[{n}, {k}] group {group}, {m} rows", rounded)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_the_run_the_neighbours_or_if_asked_the_rows(dtype, device):
    for (n, k, group), (bits, kind) in zip(
        ((192, 576, 32), (100, 1536, 128), (64, 4096, 64), (100, 1536, 128), (64, 4096, 32)), w4.FORMS, strict=True
    ):
        w, _ = weight(n, k, group, kind, device, bits=bits)
        x = cases.tensor(cases.values((300, k), dtype, "rows", k), dtype, device)
        whole = w4.matmul(x, w, batch_invariant=True)
        for m in (1, 2, 8, 9, 16, 31, 33, 64, 65, 200):
            y = w4.matmul(x[:m], w)
            closeness.assert_bits_equal(w4.matmul(x[:m], w), y, f"run to run, {m} rows")
            other = x[:m].clone()
            other[1:] = float("nan")
            closeness.assert_bits_equal(w4.matmul(other, w)[:1], y[:1], f"neighbours, {m} rows")
            for first in (0, 300 - m):
                some = w4.matmul(x[first : first + m], w, batch_invariant=True)
                closeness.assert_bits_equal(some, whole[first : first + m], f"{m} rows from {first}")
        # rows of one regime: one row is one of its own on a CPU that takes it in integers
        for low, high in ((1 if device == "cuda" else 2, 8), (9, 16), (17, 32), (33, 64), (129, 192)):
            alone, many = w4.matmul(x[:low], w), w4.matmul(x[:high], w)
            closeness.assert_bits_equal(alone, many[:low], f"{low} and {high} rows")


@pytest.mark.parametrize("m", [1, 3, 19, 70])
@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_of_every_tensor(m, dtype, device):
    n, k = 33, 96
    w, _ = weight(n, k, 32, "minima", device)
    x, bias, residual = (
        cases.tensor(cases.values(s, dtype, "strides", *s), dtype, device) for s in ((m, k), (n,), (m, n))
    )
    expected = rt.w4a16_matmul(x, w, bias=bias, residual=residual)
    for strides in ((2 * k, 2), (1, m), (k + 3, 1), (k + 2, 1)):
        view = cases.guarded((m, k), dtype, device, strides=strides, values=x).tensor
        out_strides = {2 * k: (3 * n, 3), 1: (1, m), k + 3: (n + 5, 1), k + 2: (n, 1)}[strides[0]]
        out = cases.guarded((m, n), dtype, device, strides=out_strides)
        far_bias = cases.guarded((n,), dtype, device, strides=(4,), values=bias).tensor
        far_residual = cases.guarded((m, n), dtype, device, strides=(2 * n, 2), values=residual).tensor
        got = rt.w4a16_matmul(view, w, bias=far_bias, residual=far_residual, out=out.tensor)
        closeness.assert_bits_equal(got, expected)
        out.check_margins()
        out.check_written()
    rows = x.reshape(1, m, 1, k).expand(2, m, 1, k)  # leading dimensions that do not collapse
    bits = rt.w4a16_matmul(
        rows, w, bias=bias, residual=residual.reshape(1, m, 1, n).expand(2, m, 1, n), batch_invariant=True
    )
    one = rt.w4a16_matmul(x, w, bias=bias, residual=residual, batch_invariant=True)
    for i in range(2):
        closeness.assert_bits_equal(bits[i, :, 0], one)


@pytest.mark.parametrize("activation", [None, "silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("k", [64, 4096])
@pytest.mark.parametrize("dtype", DTYPES)
def test_epilogue(activation, k, dtype, device):
    n, m = 33, 5
    w, dense = weight(n, k, 64, "symmetric", device)
    x = oracle.round_to(cases.values((m, k), dtype, "epilogue") * 0.25, dtype)
    bias, residual = (cases.values(s, dtype, "epilogue", *s) for s in ((n,), (m, n)))
    exact = torch.from_numpy(oracle.w4a16_matmul(x, dense, bias))
    functional = torch.nn.functional
    exact = {
        None: lambda: exact,
        "silu": lambda: functional.silu(exact),
        "gelu": lambda: functional.gelu(exact),
        "gelu_tanh": lambda: functional.gelu(exact, approximate="tanh"),
    }[activation]().numpy() + residual
    tx, tb, tr = (cases.tensor(v, dtype, device) for v in (x, bias, residual))
    y = rt.w4a16_matmul(tx, w, bias=tb, activation=activation, residual=tr)
    closeness.assert_close(y, oracle.round_to(exact, dtype), exact, frobenius=closeness.MATMUL_BOUND[dtype])
    into = rt.w4a16_matmul(tx, w, bias=tb, activation=activation, residual=tr, out=tr)
    closeness.assert_bits_equal(into, y, "into residual")


GATES = {
    "silu_mul": torch.nn.functional.silu,
    "gelu_mul": torch.nn.functional.gelu,
    "gelu_tanh_mul": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize("bits, kind", w4.FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated(activation, bits, kind, dtype, device):
    # outputs: whole tiles or not, gates that share a tile with ups, more than a CTA; K whole, cut in two and in more
    shapes = ((32, 64, 64), (34, 96, 32), (26, 50, 50), (192, 576, 64))
    shapes += ((160, 4096, 128), (2, 4096, 32), (4128, 128, 64))
    for n, k, group in shapes[: 4 if device == "cpu" else None]:
        w, dense = weight(n, k, group, kind, device, scale_dtype=dtype, bits=bits)
        m = max(rows(device))
        x = oracle.round_to(cases.values((m, k), dtype, "gated", k) * (0.25 if bits == 4 else 2**-6), dtype)
        bias, residual = (cases.values(s, dtype, "gated", *s) for s in ((n,), (m, n // 2)))
        tx, tb, tr = (cases.tensor(v, dtype, device) for v in (x, bias, residual))
        for with_bias in (False, True):
            product = torch.from_numpy(oracle.w4a16_matmul(x, dense, bias if with_bias else None))
            exact = (GATES[activation](product[:, : n // 2]) * product[:, n // 2 :]).numpy() + with_bias * residual
            options = {"bias": tb} if with_bias else {}
            for rows_now in rows(device):
                if with_bias:
                    options["residual"] = tr[:rows_now]
                expected = exact[:rows_now]
                y = w4.matmul(tx[:rows_now], w, activation=activation, **options)
                rounded = rounds_weights(device, rows_now, group, kind, bits)
                rounded = rounded or (device == "cpu" and w4.takes_rounded_weights(rows_now, dtype, cases.PLANS[0]))
                bound = 2 * closeness.matmul_bound(dtype, rounded)  # of two products
                closeness.assert_close(y, oracle.round_to(expected, dtype), expected, frobenius=bound)
        strided = cases.guarded((m, n // 2), dtype, device, strides=(n + 3, 2))
        w4.matmul(tx, w, activation=activation, **options, out=strided.tensor)
        closeness.assert_bits_equal(strided.tensor, y)
        strided.check_margins()


@pytest.mark.parametrize("bits", w4.WEIGHT)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gated_product_of_exact_data_is_rounded_once(dtype, bits, device):
    for n, k, group in ((64, 576, 64), (66, 96, 32), (256, 4096, 128)):
        w, dense = weight(n, k, group, "symmetric", device, exact=True, bits=bits)
        x = np.zeros((max(rows(device)), k))  # one value a row, a power of two: few bits
        x[np.arange(len(x)), np.arange(len(x)) * 7 % k] = 2.0 ** (np.arange(len(x)) % 3 + 4 - bits)
        bias = np.where(np.arange(n) < n // 2, 128.0, 0.0)  # gates so large that silu(x) = x
        product = oracle.w4a16_matmul(x, dense, bias)
        assert product[:, : n // 2].min() > 64
        exact = product[:, : n // 2] * product[:, n // 2 :]
        tx, tb = cases.tensor(x, dtype, device), cases.tensor(bias, dtype, device)
        for m in rows(device):
            closeness.assert_exact(w4.matmul(tx[:m], w, bias=tb, activation="silu_mul"), exact[:m])


@pytest.mark.parametrize("bits, kind", w4.FORMS)
def test_joined_weights_are_their_products_side_by_side(bits, kind, device):
    k, m = 192, 5
    parts = [weight(n, k, 64, kind, device, bits=bits)[0] for n in (32, 7, 1, 40)]
    joined = w4.WEIGHT[bits].concat(parts)
    assert joined.shape == (80, k)
    for ours, theirs in zip(joined.unpack(), zip(*(w.unpack() for w in parts), strict=True), strict=True):
        assert ours is None or torch.equal(ours, torch.cat(theirs))
    x = cases.tensor(cases.values((m, k), "float16", "joined"), "float16", device)
    each = torch.cat([w4.matmul(x, w) for w in parts], -1)
    closeness.assert_bits_equal(w4.matmul(x, joined), each)


@pytest.mark.parametrize("bits", w4.WEIGHT)
@pytest.mark.parametrize("m", [1, 20])
@pytest.mark.parametrize("dtype", DTYPES)
def test_act_order(m, bits, dtype, device):
    n, k = 20, 192
    w, dense = weight(n, k, 64, "integer", device, act_order=True, bits=bits)
    closeness.assert_close(w.dequantize(), dense, dense)
    x = cases.values((m, k), dtype, "act-order")
    y = w4.matmul(cases.tensor(x, dtype, device), w)
    w4.Expected(x, dense, dtype).check(y, rounded=rounds_weights(device, m, 64, "integer", bits))


@pytest.mark.parametrize("m", [2, 40])
@pytest.mark.parametrize("column", [64, -1, -(2**31)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_column_order_that_leaves_x_reads_as_nan(m, column, dtype, device):
    cuda_only(device)
    w, _ = weight(16, 64, 64, "symmetric", device)
    perm = torch.arange(64, dtype=torch.int32, device=device)
    perm[3] = column
    w = rt.W4Weight(w.codes, w.scales, w.offsets, perm=perm, **w.layout)
    assert rt.w4a16_matmul(torch.ones(m, 64, device=device, dtype=getattr(torch, dtype)), w).isnan().all()


def test_no_rows(device):
    w, _ = weight(17, 96, 32, "minima", device)
    for shape in ((0, 96), (2, 0, 96)):
        assert rt.w4a16_matmul(torch.empty(shape, device=device).half(), w).shape == (*shape[:-1], 17)
    none = rt.W4Weight.quantize(torch.empty(0, 64, device=device), group_size=64)
    assert rt.w4a16_matmul(torch.ones(3, 64, device=device).half(), none).shape == (3, 0)


@pytest.mark.parametrize("bits, kind", w4.FORMS)
@pytest.mark.parametrize("scale_dtype", DTYPES)
def test_a_weight_has_the_same_bits_on_every_device(bits, kind, scale_dtype, device):
    for n, k, group in w4.WEIGHTS:
        codes, scales, zeros = w4.parts(n, k, group, kind, scale_dtype, bits=bits)
        here = w4.weight(codes, scales, zeros, kind, scale_dtype, group=group, bits=bits)
        parts = [None if p is None else p.to(device) for p in here.unpack()]
        w = w4.WEIGHT[bits].from_canonical(*parts, kind=kind, group_size=group)
        for ours, theirs in zip((w.codes, w.scales, w.offsets), (here.codes, here.scales, here.offsets), strict=True):
            assert theirs is None or torch.equal(ours.cpu(), theirs)
        for ours, theirs in zip(w.unpack(), parts, strict=True):
            assert theirs is None or closeness.assert_bits_equal(ours, theirs) is None
        for dtype in cases.DTYPES:
            closeness.assert_bits_equal(w.dequantize(dtype), here.dequantize(dtype))
        assert here.to("cpu") is here and here.to(device).codes.device.type == device


@pytest.mark.parametrize("bits, kind", w4.ROUNDED)
@pytest.mark.parametrize("n, k, group", [(9, 64, 32), (17, 128, 128), (6, 50, 50), (33, 576, 64)])
def test_rounding_gives_the_same_bits_on_every_device(n, k, group, bits, kind, dtype, device):
    x = cases.values((n, k), dtype, "quantize", n, k)
    x[0, :group] = 0
    x[0, 1:group:2] = -0.0
    x[1, :group] = np.abs(x[1, :group])
    x[1, 2:group:3] = -0.0
    x[2, 0] = np.nan
    x[3, -1] = np.inf
    x[4] = oracle.round_to(x[4] * {"float32": 3e-8, "float16": 3e-7, "bfloat16": 1e-38}[dtype], dtype)
    x[5] = oracle.round_to(x[5] * {"float32": 1e6, "float16": 1e4, "bfloat16": 3e37}[dtype], dtype)
    x = cases.tensor(x, dtype)
    here, there = (w4.WEIGHT[bits].quantize(t, group_size=group, zeros=kind) for t in (x, x.to(device)))
    for name in ("codes", "scales", "offsets"):
        ours, theirs = getattr(there, name), getattr(here, name)
        assert (ours is None and theirs is None) or torch.equal(ours.cpu(), theirs), name
    strided = x.T.contiguous().T.to(device)
    assert torch.equal(w4.WEIGHT[bits].quantize(strided, group_size=group, zeros=kind).codes, there.codes)


@pytest.mark.parametrize("bits, kind", w4.FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_another_kernel_left_in_shared_memory_does_not_matter(bits, kind, dtype, device):
    cuda_only(device)
    codes, scales, zeros = w4.parts(4096, 512, 32, kind, dtype, bits=bits)
    scales[:] = np.nan
    if kind == "minima":
        zeros[:] = np.nan
    poison = w4.weight(codes, scales, zeros, kind, dtype, group=32, bits=bits).to(device)
    for k in (96, 160, 224):  # the last step of K has room for groups that are not there
        w, dense = weight(4096, k, 32, kind, device, exact=True, bits=bits)
        x = cases.exact_values((130, k), "exact x", k)
        exact, tx = oracle.w4a16_matmul(x, dense), cases.tensor(x, dtype, device)
        for m in (1, 9, 17, 40, 130):
            w4.matmul(torch.ones(m, 512, device=device).to(tx.dtype), poison)
            closeness.assert_exact(w4.matmul(tx[:m], w), exact[:m])


# (M, N, K, group): products that run stream-K on an H200 or H100. 128 and 64 tokens a work tile, several m-blocks, CTAs
# without a cluster, and so few work tiles more than work ranges that a CTA has to wait for its fix-up sums.
STREAM_K = (
    (140, 40 * 256, 704, 32),
    (600, 16 * 256, 704, 64),
    (50, 80 * 256, 512, 128),
    (140, 77 * 128 - 5, 704, 64),
    (130, 34 * 256, 1536, 128),
)


def matmul_stream_k(x, w, **options):
    """The product, by stream-K where the device has as many SMs as STREAM_K is made for."""
    with rt.record_kernels() as kernels:
        y = w4.matmul(x, w, **options)
    of_hopper, sms = takes_tiles(x.device.type, 17), torch.cuda.get_device_properties(x.device).multi_processor_count
    assert ("_streamk" in kernels[-1]) or not of_hopper or sms != 132, kernels
    return y


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("bits, kind", w4.FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_stream_k_is_exact(bits, kind, act_order, dtype, device):
    cuda_only(device)
    for m, n, k, group in STREAM_K:
        w, dense = weight(n, k, group, kind, device, act_order, exact=True, bits=bits)
        x = cases.exact_values((m, k), "shares", k)
        exact, tx = oracle.w4a16_matmul(x, dense), cases.tensor(x, dtype, device)
        closeness.assert_exact(matmul_stream_k(tx, w), exact)
        closeness.assert_exact(matmul_stream_k(tx.flip(0), w), exact[::-1])  # another call's fix-up sums are not used


@pytest.mark.parametrize("bits, kind", w4.FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_stream_k(bits, kind, dtype, device):
    """In a smaller weight work ranges end elsewhere or do not exist; a token has the same bits in every m-block."""
    cuda_only(device)
    n, k, group = 40 * 256, 1152, 64
    codes, scales, zeros = w4.parts(n, k, group, kind, dtype, bits=bits)
    whole = w4.weight(codes, scales, zeros, kind, dtype, group=group, bits=bits).to(device)
    x = cases.tensor(cases.values((128, k), dtype, "shares"), dtype, device).repeat(2, 1)
    y = matmul_stream_k(x, whole)
    closeness.assert_bits_equal(y[:128], y[128:])
    for few in (33 * 256, 36 * 256):
        some = (codes[:few], scales[:few], None if zeros is None else zeros[:few])
        some = w4.weight(*some, kind, dtype, group=group, bits=bits).to(device)
        closeness.assert_bits_equal(y[:, :few], w4.matmul(x, some), f"{few} rows of W")


@pytest.mark.parametrize("bits, kind", w4.FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_splits_in_a_cluster_have_the_bits_of_splits_in_the_workspace(bits, kind, dtype, device):
    cuda_only(device)
    if not takes_tiles(device, 17):
        pytest.skip("clusters need Hopper")
    # (N, K, group, splits that leave none of them empty)
    shapes = ((384, 4096, 128, range(2, 9)), (32, 8192, 32, range(2, 9)), (300, 3200, 64, (2, 3, 4, 5, 7)))
    for n, k, group, all_splits in shapes:
        w, _ = weight(n, k, group, kind, device, scale_dtype=dtype, bits=bits)
        x, bias, residual = (
            cases.tensor(cases.values(s, dtype, "clusters", *s), dtype, device) for s in ((16, k), (n,), (16, n // 2))
        )
        gates_beside_ups = n % 32 == 0
        for m, splits, gated in itertools.product((1, 3, 8, 9, 16), all_splits, (False, True)[: 1 + gates_beside_ups]):
            options = {"bias": bias} | ({"activation": "silu_mul", "residual": residual[:m]} if gated else {})
            plan = f"stream config={0 if m <= 8 else 1} splits={splits} cluster="
            in_cluster, apart = (w4.matmul(x[:m], w, plan=plan + str(c), **options) for c in (splits, 1))
            closeness.assert_bits_equal(in_cluster, apart, f"{n} x {k}, {m} tokens, {splits} splits")


@pytest.mark.parametrize("m, n, k, group", STREAM_K)
def test_replays_of_stream_k(m, n, k, group, device):
    """A replay finds what the one before left: fix-up sums of other tokens, and its own semaphore unless cleared."""
    cuda_only(device)
    w, _ = weight(n, k, group, "symmetric", device)
    xs = [cases.tensor(cases.values((m, k), "float16", "replays", i), "float16", device) for i in range(4)]
    expected = [matmul_stream_k(x, w) for x in xs]
    x, y = torch.empty_like(xs[0]), torch.empty_like(expected[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rt.w4a16_matmul(x, w, out=y)
    for i in range(200):
        x.copy_(xs[i % 4])
        graph.replay()
        closeness.assert_bits_equal(y, expected[i % 4], f"replay {i}")


@pytest.mark.parametrize("bits", w4.WEIGHT)
@pytest.mark.parametrize("m", [1, 16, 64, 128, 300])
def test_loads_that_come_late(m, bits, device):
    """Memory is busy with copies on another stream: what is read before it has come would be another step's."""
    cuda_only(device)
    n, k = 2048, 8192
    w, _ = weight(n, k, 128, "integer", device, bits=bits)
    xs = [cases.tensor(cases.values((m, k), "float16", "late", i), "float16", device) for i in range(2)]
    alone = [w4.matmul(x, w) for x in xs]
    source = torch.empty(1 << 29, dtype=torch.uint8, device=device).random_()
    target, busy = torch.empty_like(source), torch.cuda.Stream()
    busy.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(busy):
        for _ in range(40):
            target.copy_(source)
    found = [w4.matmul(xs[i % 2], w) for i in range(60)]
    torch.cuda.synchronize()
    for i, y in enumerate(found):
        closeness.assert_bits_equal(y, alone[i % 2], f"call {i}")


def test_x_that_comes_late(device):
    """W stays in L2 and x does not: many tokens, the same 128 again and again, meet few rows of W."""
    cuda_only(device)
    n, k, repeats = 128, 8192, 128
    w, _ = weight(n, k, 128, "integer", device)
    some = cases.tensor(cases.values((128, k), "float16", "late x"), "float16")
    expected = rt.w4a16_matmul(some, w.to("cpu")).double()
    x = some.to(device).repeat(repeats, 1)
    for _ in range(10):
        y = rt.w4a16_matmul(x, w).view(repeats, 128, n)
        assert (y[0].cpu().double() - expected).norm() <= 1e-3 * expected.norm()
        closeness.assert_bits_equal(y, y[:1].expand_as(y), "the same tokens")


@pytest.mark.parametrize(("m", "n", "k"), [(17, 4096, 4096), (20, 4096, 256), (128, 4096, 256)])
def test_a_hundred_thousand_products(m, n, k, device):
    """A CTA that ends while the other one of its cluster still sends to it would spoil the next kernel now and then."""
    cuda_only(device)
    w = rt.W4Weight.quantize(torch.randn(n, k, generator=torch.Generator().manual_seed(1)).half()).to(device)
    x = cases.tensor(cases.values((m, k), "float16", "often"), "float16", device)
    expected = rt.w4a16_matmul(x, w)
    outs = [torch.empty_like(expected) for _ in range(50)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for out in outs:
            rt.w4a16_matmul(x, w, out=out)
    for _ in range(2000):
        graph.replay()
    torch.cuda.synchronize()
    for out in outs:
        closeness.assert_bits_equal(out, expected)


@pytest.mark.parametrize("m", [1, 40])
@pytest.mark.parametrize(
    ("bits", "kind", "act_order"), [(4, "integer", False), (4, "minima", True), (8, "symmetric", True)]
)
def test_captured_in_a_graph(bits, kind, act_order, m, device):
    cuda_only(device)
    w, _ = weight(100, 4096, 128, kind, device, act_order, bits=bits)
    x = cases.tensor(cases.values((m, 4096), "float16", "graph"), "float16", device)
    checks.captured(lambda x, **out: w4.matmul(x, w, **out), x)


def test_what_a_gpu_refuses_is_named(device):
    cuda_only(device)
    w, _ = weight(64, 4096, 128, "symmetric", device)
    x = torch.ones(2, 4096, device=device).half()
    for call, error, text in (
        (lambda: rt.w4a16_matmul(x.float(), w), rt.NotSupportedError, "x must be float16 or bfloat16 on a GPU"),
        (lambda: rt.w4a16_matmul(x.cpu(), w), rt.ArgumentError, "x must be on the weight's device"),
        (lambda: rt.w4a16_matmul(x, w.to("cpu")), rt.ArgumentError, "x must be on the weight's device"),
        (lambda: rt.w4a16_matmul(x, w, out=x[:, :64]), rt.ArgumentError, "out must not share memory with x"),
        (
            lambda: _C.w4a16_matmul(x, w._handle, None, None, None, x.new_empty(2, 64), False, None, None, None),
            rt.ArgumentError,
            "workspace must have .* bytes",
        ),
        (
            lambda: rt.W4Weight(torch.cat([w.codes[:1], w.codes])[1:], w.scales, None, **w.layout),
            rt.ArgumentError,
            "codes must start at a multiple of 16 bytes",
        ),
    ):
        with pytest.raises(error, match=text):
            call()
    assert torch.isfinite(rt.w4a16_matmul(x, w)).all()
    w = weight(64, 4096, 128, "symmetric", device, bits=8)[0]
    with pytest.raises(rt.NotSupportedError, match=r"^w8a16_matmul: x must be float16 or bfloat16 on a GPU"):
        rt.w8a16_matmul(x.float(), w)
    with pytest.raises(rt.ArgumentError, match=r"^w8a16_matmul: workspace must have .* bytes"):
        _C.w8a16_matmul(x, w._handle, None, None, None, x.new_empty(2, 64), False, None, None, None)


@pytest.mark.parametrize(
    "module, config", [(W4Linear, rt.W4A16(64, "minima")), (W8Linear, rt.W8A16(64))], ids=["W4", "W8"]
)
def test_modules_move(module, config, device):
    with torch.no_grad():
        layer = torch.nn.Linear(128, 48).half()
        here, there = (module.from_linear(x, group_size=64, zeros=config.zeros) for x in (layer, layer.to(device)))
        moved = here.to(device)
        x = torch.randn(3, 128, device=device).half()
        closeness.assert_bits_equal(moved(x), there(x))
        torch._dynamo.reset()
        closeness.assert_bits_equal(torch.compile(moved, fullgraph=True, backend="eager")(x), there(x))
        assert moved.weight.codes.device.type == device
        model = torch.nn.Sequential(torch.nn.Linear(128, 64), torch.nn.Linear(64, 32)).half().to(device)
        assert len(rt.quantize_(model, config, progress=False).group_sizes) == 2
        assert isinstance(model[0], module) and torch.isfinite(model(x)).all()
