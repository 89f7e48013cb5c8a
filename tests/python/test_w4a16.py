# SPDX-License-Identifier: Apache-2.0
"""Weights of 4 and 8 bits and the products with them, against the float64 oracle."""

import cases
import closeness
import gguf
import numpy as np
import oracle
import pytest
import rooftile as rt
import torch
from rooftile import _C

FORMS = ((4, "symmetric"), (4, "integer"), (4, "minima"), (8, "symmetric"), (8, "integer"))
ROUNDED = ((4, "symmetric"), (4, "minima"), (8, "symmetric"))
WEIGHT = {4: rt.W4Weight, 8: rt.W8Weight}
FAST = [p for p in cases.PLANS if p != "reference"]
# (N, K, group): groups of every size, tails of N, of K (96, 576) and of the last tile, and real layers
WEIGHTS = (
    (1, 32, 32),
    (16, 64, 64),
    (17, 96, 32),
    (5, 50, 50),
    (33, 96, 96),
    (192, 576, 32),
    (100, 576, 64),
    (48, 1536, 128),
    (17, 576, 576),
    (16, 320, 64),
    (576, 64, 64),
    (1000, 96, 32),
)
ROWS = (0, 1, 2, 5, 16, 17, 33, 64, 130)


def parts(n, k, group, kind, scale_dtype="float16", exact=False, bits=4):
    """A random weight in canonical form: codes uint8, scales and zeros as float64 (zeros None if symmetric)."""
    rng = cases.generator("w4", n, k, group, kind)
    codes = rng.integers(0, 256, (n, k * bits // 8)).astype(np.uint8)
    shape = (n, k // group)
    if exact:
        scales = cases.powers_of_two(shape, "scales", n, k, lowest=-2, highest=0)
        minima = cases.exact_values(shape, "minima", n, k)
    else:
        scales = oracle.round_to(rng.uniform(0.001, 0.1, shape), scale_dtype)
        minima = oracle.round_to(rng.uniform(-1, 0, shape), scale_dtype)
    zeros = {"symmetric": None, "integer": rng.integers(0, 2**bits, shape).astype(np.float64), "minima": minima}[kind]
    return codes, scales, zeros


def weight(codes, scales, zeros, kind, scale_dtype="float16", group=None, perm=None, bits=4):
    if zeros is not None:
        zeros = cases.tensor(zeros, "uint8" if kind == "integer" else scale_dtype)
    perm = None if perm is None else torch.from_numpy(perm.astype(np.int32))
    scales = cases.tensor(scales, scale_dtype)
    return WEIGHT[bits].from_canonical(torch.from_numpy(codes), scales, zeros, kind=kind, group_size=group, perm=perm)


def both(n, k, group, kind, perm=None, **options):
    """(W4Weight or W8Weight, the dense float64 weight it stands for). options: scale_dtype, exact, bits."""
    codes, scales, zeros = parts(n, k, group, kind, **options)
    options.pop("exact", None)
    w = weight(codes, scales, zeros, kind, group=group, perm=perm, **options)
    return w, oracle.w4_decode(codes, scales, kind, zeros, perm, options.get("bits", 4))


def with_bad_scales(bits):
    """A weight [20, 128] in groups of 32: of row 3 one scale is NaN, of row 17 one is infinite."""
    codes = torch.randint(0, 256, (20, 128 * bits // 8), dtype=torch.uint8)
    scales = torch.rand(20, 4, dtype=torch.float16)
    scales[3, 1], scales[17, 3] = float("nan"), float("inf")
    return WEIGHT[bits].from_canonical(codes, scales, kind="symmetric", group_size=32)


def matmul(x, w, **options):
    """The product by the op for w's bits."""
    return {4: rt.w4a16_matmul, 8: rt.w8a16_matmul}[w.BITS](x, w, **options)


# ---------------------------------------------------------------- products


class Expected:
    """What a product may be: within the worst case of the sum, element by element, and where outputs are many as close
    as a naive product."""

    def __init__(self, x, dense, dtype):
        self.dtype, self.exact, self.naive = dtype, oracle.w4a16_matmul(x, dense), oracle.matmul_naive(x, dense, dtype)
        steps = -(-x.shape[-1] // 64) * 4 + 6  # multiply-adds of one lane, then the lanes, and the weight's rounding
        self.bound = oracle.EPS["float32"] / 2 * steps * (np.abs(x) @ np.abs(dense).T)
        self.bound += oracle.quantum(self.exact, dtype)
        self.weights = oracle.EPS[dtype] / 2 * (np.abs(x) @ np.abs(dense).T)  # what their rounding to dtype may add
        self.integers = closeness.integer_row_bound(x, dense)  # what that of one row of x may add

    def check(self, y, what="", rounded=False, plan=None):
        """rounded: the weights were rounded to dtype before the product. plan: that ran, default the CPU's best."""
        m, plan = len(y), plan or cases.PLANS[0]
        rounded = rounded or takes_rounded_weights(m, self.dtype, plan)
        exact = self.exact[:m]
        error = np.abs(closeness.to_numpy64(y) - exact)
        assert error.shape == exact.shape
        bound = self.bound[:m] + (self.weights[:m] if rounded else 0)
        if m == 1 and self.dtype != "float32" and plan in ("amx", "avx512bf16", "avx512vnni"):
            bound = bound + self.integers[:m]
        assert (error <= bound).all(), f"{what}: off by {(error / bound).max():.2f} of the worst case"
        if exact.size >= 256:
            closeness.assert_close(y, self.naive[:m], exact, frobenius=closeness.matmul_bound(self.dtype, rounded))


def takes_rounded_weights(rows, dtype, plan):
    """Whether a CPU's plan rounds weights to bf16 for so many rows."""
    return plan in ("amx", "avx512bf16") and dtype == "bfloat16" and rows >= 17


def rows_of(plan, reference, slow, fast):
    """Numbers of rows to try: fewer on variants that are slow or share the best one's code."""
    return reference if plan == "reference" else fast if plan == cases.PLANS[0] else slow


@pytest.mark.parametrize("bits, kind", FORMS)
@pytest.mark.parametrize("n, k, group", WEIGHTS)
def test_product(n, k, group, bits, kind, dtype):
    w, dense = both(n, k, group, kind, bits=bits, scale_dtype="bfloat16" if dtype == "bfloat16" else "float16")
    x = cases.values((max(ROWS), k), dtype, "x", k)
    expected, x = Expected(x, dense, dtype), cases.tensor(x, dtype)
    for plan in cases.PLANS:
        for m in rows_of(plan, (1, 2), (1, 2, 17), ROWS):
            expected.check(matmul(x[:m], w, plan=plan), f"{plan}, {m} rows", plan=plan)


@pytest.mark.parametrize("bits, kind", FORMS)
@pytest.mark.parametrize("n, k, group", WEIGHTS)
def test_exact_data_give_the_rounded_exact_product(n, k, group, bits, kind, dtype):
    w, dense = both(n, k, group, kind, bits=bits, exact=True)
    x, bias = cases.exact_values((33, k), "exact x", k), cases.exact_values((n,), "bias", n)
    exact = oracle.w4a16_matmul(x, dense, bias)
    x, bias = cases.tensor(x, dtype), cases.tensor(bias, dtype)
    for plan in cases.PLANS:
        for m in rows_of(plan, (1,), (1, 7), (1, 2, 7, 33)):
            closeness.assert_exact(matmul(x[:m], w, bias=bias, plan=plan), exact[:m])


@pytest.mark.parametrize("plan", FAST)
@pytest.mark.parametrize("n, k, group", WEIGHTS)
def test_a_row_has_the_same_bits_at_every_number_of_rows(n, k, group, plan):
    for (bits, kind), dtype in zip(FORMS, (*cases.DTYPES, "float32", "float16"), strict=True):
        w, _ = both(n, k, group, kind, bits=bits)
        x = cases.tensor(cases.values((200, k), dtype, "rows", k), dtype)
        rounded = takes_rounded_weights(200, dtype, plan)
        whole = matmul(x, w, plan=plan, batch_invariant=rounded)
        closeness.assert_bits_equal(matmul(x, w, plan=plan, batch_invariant=rounded), whole, "run to run")
        for m in (1, 2, 7, 97):
            for first in (0, 200 - m):
                some = matmul(x[first : first + m], w, plan=plan, batch_invariant=True)
                closeness.assert_bits_equal(some, whole[first : first + m], f"{m} rows from {first}")


def test_threads_change_no_bit():
    w, _ = both(192, 576, 32, "minima")
    large, small = (cases.tensor(cases.values((m, 576), "float32", "threads"), "float32") for m in (150, 1))
    one = [matmul(x, w) for x in (large, small)]
    wide, _ = both(1536, 576, 32, "minima")
    alone = matmul(small, wide)
    torch.set_num_threads(2)
    try:
        for x, y in zip((large, small), one, strict=True):
            closeness.assert_bits_equal(matmul(x, w), y)
        closeness.assert_bits_equal(matmul(small, wide), alone)
    finally:
        torch.set_num_threads(1)


def test_any_shape_of_x_and_many_rows():
    w, dense = both(17, 96, 32, "minima")
    for shape in ((96,), (2, 3, 96), (2, 0, 96), (1, 2, 1, 3, 96)):
        x = cases.values(shape, "float32", "shape", *shape)
        y = matmul(cases.tensor(x, "float32"), w)
        Expected(x.reshape(-1, 96), dense, "float32").check(y.reshape(-1, 17))
        assert y.shape == (*shape[:-1], 17)
    x = cases.exact_values((50_000, 96), "many")  # more than one panel of x
    w, dense = both(17, 96, 32, "minima", exact=True)
    closeness.assert_exact(matmul(cases.tensor(x, "float32"), w), x @ dense.T)


@pytest.mark.parametrize("m", [1, 2, 19])
def test_strides_of_every_tensor(m, dtype, plan):
    n, k = 33, 96
    w, _ = both(n, k, 32, "minima")
    x, bias, residual = (cases.tensor(cases.values(s, dtype, "strides", *s), dtype) for s in ((m, k), (n,), (m, n)))
    expected = matmul(x, w, bias=bias, residual=residual, plan=plan)
    for strides in ((2 * k, 2), (1, m), (k + 3, 1)):
        view = cases.guarded((m, k), dtype, strides=strides, values=x).tensor
        out = cases.guarded((m, n), dtype, strides={2 * k: (3 * n, 3), 1: (1, m), k + 3: (n + 5, 1)}[strides[0]])
        far_bias = cases.guarded((n,), dtype, strides=(4,), values=bias).tensor
        far_residual = cases.guarded((m, n), dtype, strides=(2 * n, 2), values=residual).tensor
        got = matmul(view, w, bias=far_bias, residual=far_residual, out=out.tensor, plan=plan)
        assert got is out.tensor
        closeness.assert_bits_equal(got, expected)
        out.check_margins()
        out.check_written()


@pytest.mark.parametrize("activation", [None, "silu", "gelu", "gelu_tanh"])
def test_epilogue(activation, dtype, plan):
    n, k, m = 33, 64, 3
    w, dense = both(n, k, 64, "symmetric")
    x, bias, residual = (cases.values(s, dtype, "epilogue", *s) for s in ((m, k), (n,), (m, n)))
    exact = torch.from_numpy(oracle.w4a16_matmul(x, dense, bias))
    gelu = torch.nn.functional.gelu
    exact = {
        None: lambda: exact,
        "silu": lambda: torch.nn.functional.silu(exact),
        "gelu": lambda: gelu(exact),
        "gelu_tanh": lambda: gelu(exact, approximate="tanh"),
    }[activation]().numpy() + residual
    tx, tb, tr = (cases.tensor(v, dtype) for v in (x, bias, residual))
    y = matmul(tx, w, bias=tb, activation=activation, residual=tr, plan=plan)
    closeness.assert_close(y, oracle.round_to(exact, dtype), exact, frobenius=closeness.MATMUL_BOUND[dtype])
    closeness.assert_bits_equal(
        matmul(tx, w, bias=tb, activation=activation, residual=tr, out=tr, plan=plan), y, "into residual"
    )


@pytest.mark.parametrize("bits", WEIGHT)
@pytest.mark.parametrize("n, k, group", [(32, 64, 64), (38, 96, 32), (2, 64, 32)])
@pytest.mark.parametrize("plan", cases.PLANS)
def test_gated(n, k, group, bits, dtype, plan):
    w, dense = both(n, k, group, "integer", bits=bits)
    m = 7
    x = oracle.round_to(cases.values((m, k), dtype, "gated", k) * (0.25 if bits == 4 else 2**-6), dtype)
    bias = cases.values((n,), dtype, "gated bias", n)
    product = oracle.w4a16_matmul(x, dense, bias)
    gate, up = product[:, : n // 2], product[:, n // 2 :]
    exact = gate / (1 + np.exp(-gate)) * up
    x, bias = cases.tensor(x, dtype), cases.tensor(bias, dtype)
    y = matmul(x, w, bias=bias, activation="silu_mul", plan=plan)
    bound = 2 * closeness.MATMUL_BOUND[dtype]
    # a few outputs of which the naive ones are the exact ones, rounded
    closeness.assert_close(y, oracle.round_to(exact, dtype), exact, frobenius=bound, slack=8)
    alone = matmul(x[:1], w, bias=bias, activation="silu_mul", batch_invariant=True, plan=plan)
    closeness.assert_bits_equal(alone, y[:1])
    strided = torch.stack((bias, bias + 1), 1)[:, 0]  # every second element
    closeness.assert_bits_equal(matmul(x, w, bias=strided, activation="silu_mul", plan=plan), y)


@pytest.mark.parametrize("bits", WEIGHT)
@pytest.mark.parametrize("m", [1, 4])
def test_act_order(m, bits, dtype, plan):
    n, k = 20, 192
    w, dense = both(n, k, 64, "integer", perm=cases.generator("perm").permutation(k), bits=bits)
    closeness.assert_close(w.dequantize(), dense, dense)
    x = cases.values((m, k), dtype, "act-order")
    y = matmul(cases.tensor(x, dtype), w, plan=plan)
    Expected(x, dense, dtype).check(y, plan=plan)


@pytest.mark.parametrize("bits", WEIGHT)
def test_what_a_weight_is_made_of_stays(bits):
    """A call goes by the arrays that were checked: others, put in their place, would be ignored without a word."""
    w, dense = both(16, 64, 32, "integer", perm=np.arange(64), bits=bits)
    for name in ("codes", "scales", "offsets", "perm", "shape", "group_size", "kind", "scale_dtype"):
        with pytest.raises(AttributeError, match=f"'{name}'"):
            setattr(w, name, getattr(w, name))
    w.layout["group_size"] = 64
    assert w.group_size == 32 and w.layout["group_size"] == 32
    closeness.assert_close(w.dequantize(), dense, dense)


@pytest.mark.parametrize("zeros", ["symmetric", "minima"])
def test_rounding_writes_scales_of_any_strides(zeros):
    """As the extension may be asked, though the package asks for contiguous ones."""
    x = torch.from_numpy(cases.values((6, 128), "float32", "strides")).float()
    offsets = zeros == "minima"
    codes, scales, minima = (torch.zeros(6, 64, dtype=torch.uint8), *torch.zeros(2, 6, 4).half())
    wide = torch.zeros(2, 6, 8).half()
    strided = torch.zeros(6, 64, dtype=torch.uint8), *wide[:, :, ::2]
    for parts in ((codes, scales, minima), strided):
        rt._C.w4_quantize("quantize", x, 4, 32, zeros, *parts[:2], parts[2] if offsets else None)
    for a, b in zip((codes, scales, minima), strided, strict=True):
        assert torch.equal(a, b)
    assert (scales > 0).all() and not wide[:, :, 1::2].any()


def test_repr_says_act_order():
    plain, reordered = (both(16, 64, 32, "integer", perm=perm)[0] for perm in (None, np.arange(64)[::-1]))
    assert repr(plain) == "W4Weight([16, 64], integer, group_size=32, float16 scales)"
    assert repr(reordered) == repr(plain)[:-1] + ", act-order)"


@pytest.mark.parametrize("bits", WEIGHT)
@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("group", [32, 64])
def test_every_code_at_every_zero(group, m, bits, plan):
    """x = one unit vector a column reads the weight itself."""
    k = max(group, 2**bits)
    u = np.tile(np.arange(k) % 2**bits, (16, 1))
    zeros = np.arange(16.0 * (k // group)).reshape(k // group, 16).T
    codes, scales = oracle.w4_pack_nibbles(u) if bits == 4 else u.astype(np.uint8), np.full(zeros.shape, 0.375)
    forms = [("symmetric", None), ("integer", zeros), ("integer", zeros + 256 - zeros.size)]
    for kind, offsets in [*forms, ("minima", zeros - 8)] if bits == 4 else forms:
        w = weight(codes, scales, offsets, kind, group=group, bits=bits)
        dense = oracle.w4_decode(codes, scales, kind, offsets, bits=bits)
        closeness.assert_exact(w.dequantize(), dense)
        eye = torch.eye(k)
        got = torch.cat([matmul(eye[i : i + m], w, plan=plan) for i in range(0, k, m)])
        closeness.assert_exact(got.T, dense)


@pytest.mark.parametrize("scale_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("bits", WEIGHT)
def test_scales_at_the_edges(bits, m, scale_dtype, plan):
    """0, the smallest subnormal, the largest, infinity and NaN: each stays in its own output."""
    n, k = 16, 96  # the last block is half padding
    edges = [0.0, oracle.SMALLEST[scale_dtype], -oracle.SMALLEST[scale_dtype], np.inf, np.nan, 1.0]
    if scale_dtype == "float16":
        edges.append(oracle.LARGEST[scale_dtype])
    codes = np.full((n, k * bits // 8), 0xFF if bits == 4 else 135, np.uint8)
    scales = np.ones((n, 3))
    scales[: len(edges), 2] = edges
    forms = [("symmetric", None), ("integer", np.full((n, 3), 3.0 if bits == 4 else 123.0))]
    for kind, zeros in [*forms, ("minima", np.full((n, 3), 0.5))] if bits == 4 else forms:
        w = weight(codes, scales, zeros, kind, scale_dtype, bits=bits)
        dense = oracle.w4_decode(codes, scales, kind, zeros, bits=bits)
        x = np.abs(cases.exact_values((m, k), "edges", zeros=0)) + 1
        y = matmul(cases.tensor(x, "float32"), w, plan=plan)
        with np.errstate(invalid="ignore"):
            closeness.assert_close(y, oracle.matmul_naive(x, dense, "float32"), x @ dense.T)
        closeness.assert_exact(w.dequantize(), dense)


@pytest.mark.parametrize("bits", WEIGHT)
def test_special_values_of_x_stay_in_their_row(bits, plan):
    w, _ = both(16, 64, 32, "symmetric", bits=bits)
    for special in (np.nan, np.inf):
        x = torch.ones(3, 64)
        x[1, 7] = special
        y = matmul(x, w, plan=plan)
        assert torch.isfinite(y[[0, 2]]).all()
        assert (~torch.isfinite(y[1])).all()


# ---------------------------------------------------------------- forms


@pytest.mark.parametrize("bits, kind", FORMS)
@pytest.mark.parametrize("scale_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("n, k, group", WEIGHTS[:6])
def test_any_bits_survive_packing(n, k, group, bits, kind, scale_dtype):
    rng = cases.generator("bits", n, k)
    codes = rng.integers(0, 256, (n, k * bits // 8)).astype(np.uint8)
    groups = (n, k // group)
    scales = torch.from_numpy(rng.integers(0, 2**16, groups).astype(np.uint16)).view(cases.torch_dtype(scale_dtype))
    zeros = {
        "symmetric": None,
        "integer": torch.from_numpy(rng.integers(0, 256, groups).astype(np.uint8)),
        "minima": torch.from_numpy(rng.integers(0, 2**16, groups).astype(np.uint16)).view(scales.dtype),
    }[kind]
    w = WEIGHT[bits].from_canonical(torch.from_numpy(codes), scales, zeros)
    assert (w.shape, w.group_size, w.kind, w.scale_dtype) == ((n, k), group, kind, scale_dtype)
    assert np.array_equal(w.codes.numpy(), oracle.w4_kernel_codes(codes, bits))
    bits = scales.view(torch.int16).numpy()
    assert np.array_equal(w.scales.view(torch.int16).numpy(), oracle.w4_kernel_scales(bits))
    assert w.nbytes == sum(t.numel() for t in (w.codes, w.scales, w.offsets) if t is not None)
    for ours, theirs in zip(w.unpack(), (torch.from_numpy(codes), scales, zeros), strict=True):
        assert (ours is None and theirs is None) or closeness.assert_bits_equal(ours, theirs) is None


def test_strided_canonical_form():
    codes, scales, zeros = parts(33, 96, 32, "minima")
    expected = weight(codes, scales, zeros, "minima")
    views = [
        torch.from_numpy(codes).T.contiguous().T,
        *(cases.tensor(a.T.copy(), "float16").T for a in (scales, zeros)),
    ]
    w = rt.W4Weight.from_canonical(*views)
    for name in ("codes", "scales", "offsets"):
        assert torch.equal(getattr(w, name), getattr(expected, name))


@pytest.mark.parametrize("bits, kind", [(4, "minima"), (8, "symmetric")])
def test_numpy_and_jax_give_the_same_as_torch(bits, kind):
    codes, scales, zeros = parts(17, 96, 32, kind, bits=bits)
    w = WEIGHT[bits].from_canonical(
        codes, scales.astype(np.float16), None if zeros is None else zeros.astype(np.float16)
    )
    assert isinstance(w.codes, np.ndarray)
    reference = weight(codes, scales, zeros, kind, bits=bits)
    for dtype in cases.DTYPES:
        x = cases.values((2, 96), dtype, "numpy")
        expected = matmul(cases.tensor(x, dtype), reference)
        y = matmul(cases.numpy_array(x, dtype), w)
        assert isinstance(y, np.ndarray)
        closeness.assert_bits_equal(y, expected)
        closeness.assert_bits_equal(w.dequantize(dtype), reference.dequantize(dtype))
    jax = pytest.importorskip("jax")
    got = matmul(jax.device_put(np.asarray(x, np.float32), jax.devices("cpu")[0]), w)
    closeness.assert_bits_equal(got, matmul(cases.tensor(x, "float32"), reference))


@pytest.mark.parametrize("bits, kind", ROUNDED)
@pytest.mark.parametrize("n, k, group", [(5, 64, 32), (16, 128, 128), (3, 50, 50)])
def test_quantize_is_the_documented_rounding(n, k, group, bits, kind, dtype):
    x = cases.values((n, k), dtype, "quantize", n, k)
    x[0, :group] = 0
    x[1, :group] = cases.values((), dtype, "constant") + 1
    x[2, 0] = {"float32": np.nan, "float16": np.inf, "bfloat16": -np.inf}[dtype]
    x[2, -1] = 5e-8 if dtype != "bfloat16" else 2.0**-130
    if n > 3:
        x[3, :group] = oracle.round_to(
            x[3, :group] * {"float32": 3e-8, "float16": 3e-7, "bfloat16": 1e-38}[dtype], dtype
        )
        x[4, :group] = oracle.round_to(x[4, :group] * {"float32": 1e6, "float16": 1e4, "bfloat16": 3e37}[dtype], dtype)
    x = oracle.round_to(x, dtype)
    w = WEIGHT[bits].quantize(cases.tensor(x, dtype), group_size=group, zeros=kind)
    scale_dtype = oracle.scale_dtype(dtype)
    assert (w.kind, w.scale_dtype, w.group_size) == (kind, scale_dtype, group)
    codes, scales, minima = oracle.w4_quantize(x, group, kind, scale_dtype, bits)
    got = w.unpack()
    assert np.array_equal(got[0].numpy(), codes)
    closeness.assert_exact(got[1], scales)
    assert (got[2] is None) == (minima is None)
    if minima is not None:
        closeness.assert_exact(got[2], minima)
    strided = cases.guarded((n, k), dtype, strides=(1, n), values=cases.tensor(x, dtype)).tensor
    assert torch.equal(WEIGHT[bits].quantize(strided, group_size=group, zeros=kind).codes, w.codes)


@pytest.mark.parametrize("bits, kind", ROUNDED)
def test_quantize_of_what_is_finite_is_finite(bits, kind, dtype):
    """Also where the distance from least to greatest is not."""
    x = np.zeros((2, 32))
    x[0, :3] = np.array([-0.9, 0.9, 0.3]) * oracle.LARGEST[dtype]
    x[1, :2] = 0.996 * oracle.LARGEST[dtype], 0
    x = oracle.round_to(x, dtype)
    w = WEIGHT[bits].quantize(cases.tensor(x, dtype), group_size=32, zeros=kind)
    codes, scales, minima = oracle.w4_quantize(x, 32, kind, oracle.scale_dtype(dtype), bits)
    got = w.unpack()
    assert np.array_equal(got[0].numpy(), codes)
    closeness.assert_exact(got[1], scales)
    if kind == "minima":
        closeness.assert_exact(got[2], minima)
    assert torch.isfinite(w.dequantize("float32")).all()


@pytest.mark.parametrize("bits, kind", ROUNDED)
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_the_scale_of_zeros_is_plus_zero(bits, kind, dtype, zero):
    """+0 and not -0, whichever zero comes first: the same weights are the same bytes."""
    x = np.full((2, 64), zero)
    x[1, 0] = 0.0
    _, scales, _ = WEIGHT[bits].quantize(cases.tensor(x, dtype), group_size=32, zeros=kind).unpack()
    assert (scales.view(torch.int16) == 0).all()


@pytest.mark.parametrize("bits, name", [(4, "Q4_0"), (4, "Q4_1"), (8, "Q8_0")])
def test_gguf_blocks_are_imported_without_loss(bits, name):
    weight_type = WEIGHT[bits]
    ggml_type = getattr(gguf.GGMLQuantizationType, name)
    n, k = 19, 96
    x = cases.generator("gguf").standard_normal((n, k)).astype(np.float32)
    data = gguf.quantize(x, ggml_type)
    expected = gguf.dequantize(data, ggml_type)
    raw = data.reshape(n, k // 32, -1)
    for source in (data, data.tobytes(), torch.from_numpy(data), memoryview(data.tobytes())):
        w = weight_type.from_gguf(source, ggml_type, (n, k))
        dense = w.dequantize()
        assert (w.group_size, w.kind) == (32, {"Q4_0": "symmetric", "Q4_1": "minima", "Q8_0": "symmetric"}[name])
        assert isinstance(dense, torch.Tensor) == isinstance(source, torch.Tensor)
        assert np.array_equal(np.asarray(dense), expected)
        assert np.array_equal(
            np.asarray(dense, np.float64), getattr(oracle, f"gguf_{name.lower()}")(raw).reshape(n, k)
        ) or (
            name == "Q4_1"  # the file's own sum is rounded once to float32
        )
    for same in (name, int(ggml_type)):
        assert np.array_equal(weight_type.from_gguf(data, same, (n, k)).codes, np.asarray(w.codes))
    assert weight_type.from_gguf(b"", name, (0, k)).shape == (0, k)
    for bad in (data.tobytes()[:-1], b"", data.tobytes() + b"\0"):
        with pytest.raises(rt.ArgumentError, match=r"from_gguf: data must have \d+ bytes for " + name):
            weight_type.from_gguf(bad, name, (n, k))


def test_signed_form_packed_along_k():
    codes, scales, _ = parts(17, 128, 32, "symmetric")
    w = weight(codes, scales, None, "symmetric")
    packed, packed_scales = w.to_kpacked()
    u = oracle.w4_unpack_nibbles(codes) - 8
    words = np.zeros((16, 17), np.int64)
    for i in range(8):
        words |= (u[:, i::8].T & 15) << 4 * i
    assert packed.dtype == torch.int32
    assert np.array_equal(packed.numpy(), words.astype(np.uint32).view(np.int32))
    closeness.assert_exact(packed_scales, scales.T)
    assert torch.equal(rt.W4Weight.from_kpacked(packed, packed_scales).codes, w.codes)
    # compressed-tensors' weight_packed, int32 [N, K/8] of u, is the canonical form under another name
    weight_packed = np.zeros((17, 16), np.int64)
    for i in range(8):
        weight_packed |= (u[:, i::8] + 8) << 4 * i
    assert np.array_equal(weight_packed.astype(np.uint32).view(np.uint8).reshape(17, 64), w.unpack()[0].numpy())


@pytest.mark.parametrize("kind", ["integer", "minima"])
def test_the_signed_form_of_weights_with_zeros_is_refused(kind):
    with pytest.raises(rt.NotSupportedError, match="to_kpacked: the signed form holds symmetric weights"):
        both(17, 128, 32, kind)[0].to_kpacked()


# ---------------------------------------------------------------- bad input


def sample(bits=4):
    return both(16, 64, 32, "symmetric", bits=bits)[0]


@pytest.mark.parametrize(
    "call, error, text",
    [
        (
            lambda w: w.quantize(torch.zeros(4, 100), group_size=64),
            rt.ArgumentError,
            "^W4Weight.quantize: group_size = 64 must divide .* K = 100",
        ),
        *(
            (lambda w, g=g: w.quantize(torch.zeros(4, 768), group_size=g), rt.ArgumentError, f"group_size.*got {g}")
            for g in (8, 16, 24, 48, 256, 0, -1)
        ),
        (
            lambda w: w.quantize(torch.zeros(4, 768), group_size=32.0),
            rt.ArgumentTypeError,
            "group_size must be an integer",
        ),
        (
            lambda w: w.quantize(torch.zeros(4, 33), group_size=33),
            rt.ArgumentError,
            "^W4Weight.quantize: weight must have an even number",
        ),
        (lambda w: w.quantize(torch.zeros(4), group_size=32), rt.ArgumentError, "weight must have two dimensions"),
        (lambda w: w.quantize(None), rt.ArgumentTypeError, "weight"),
        (lambda w: w.quantize(torch.zeros(4, 64, dtype=torch.int32)), rt.ArgumentError, "group_size"),
        (lambda w: w.quantize(torch.zeros(4, 128, dtype=torch.int32)), rt.ArgumentTypeError, "weight must be float32"),
        (lambda w: w.quantize(torch.zeros(4, 128), zeros="integer"), rt.ArgumentError, "zeros must be"),
        (
            lambda w: w.from_canonical(torch.zeros(4, 32), torch.zeros(4, 1)),
            rt.ArgumentTypeError,
            "codes must be uint8",
        ),
        (
            lambda w: w.from_canonical(torch.zeros(4, 32, dtype=torch.uint8), torch.zeros(4, 1)),
            rt.ArgumentTypeError,
            "scale",
        ),
        (
            lambda w: w.from_canonical(torch.zeros(4, 32, dtype=torch.uint8), torch.zeros(3, 1).half()),
            rt.ArgumentError,
            "scales must be",
        ),
        (
            lambda w: w.from_canonical(
                torch.zeros(4, 32, dtype=torch.uint8), torch.zeros(4, 1).half(), torch.zeros(4, 2)
            ),
            rt.ArgumentTypeError,
            "zeros must be float16",
        ),
        (
            lambda w: w.from_canonical(torch.zeros(4, 32, dtype=torch.uint8), torch.zeros(4, 1).half(), kind="minima"),
            rt.ArgumentError,
            "zeros must be given",
        ),
        (lambda w: w.from_gguf(b"", "Q4_K", (4, 256)), rt.NotSupportedError, '"Q4_0" or "Q4_1"'),
        (lambda w: w.from_gguf(b"", np.array([2, 3]), (4, 32)), rt.NotSupportedError, '"Q4_0" or "Q4_1"'),
        (lambda w: w.from_gguf(b"", 2.0, (4, 32)), rt.NotSupportedError, '"Q4_0" or "Q4_1"'),
        (lambda w: w.concat(None), rt.ArgumentTypeError, "weights must be a list of W4Weight, got NoneType"),
        (lambda w: w.from_gguf(b"", "Q4_0", (4, 48)), rt.ArgumentError, "multiple of 32"),
        (lambda w: w.from_gguf(b"", "Q4_0", (4, 0)), rt.ArgumentError, "K must be a positive multiple of 32"),
        (lambda w: w.from_gguf(None, "Q4_0", (4, 32)), rt.ArgumentTypeError, "data must be bytes"),
        (lambda w: w.from_gguf(np.zeros(72, np.int8), "Q4_0", (4, 32)), rt.ArgumentTypeError, "data must be bytes"),
        (lambda w: w.from_gguf(b"", "Q4_0", 7), rt.ArgumentError, "shape"),
        (lambda w: w.dequantize("int8"), rt.ArgumentTypeError, "dtype must be float32, float16, bfloat16, got 'int8'"),
        (lambda w: w.dequantize("nonsense"), rt.ArgumentTypeError, "dtype"),
        (lambda w: rt.w4a16_matmul(torch.zeros(2, 63), w), rt.ArgumentError, "x must have a last dimension of K = 64"),
        (lambda w: rt.w4a16_matmul(torch.zeros(2, 64), None), rt.ArgumentTypeError, "w must be a rooftile.W4Weight"),
        (lambda w: rt.w4a16_matmul(None, w), rt.ArgumentTypeError, "x must be"),
        (
            lambda w: rt.w4a16_matmul(torch.zeros(2, 64), w, bias=torch.zeros(15)),
            rt.ArgumentError,
            r"bias must be \[N\] = \[16\]",
        ),
        (
            lambda w: rt.w4a16_matmul(torch.zeros(2, 64), w, residual=torch.zeros(16)),
            rt.ArgumentError,
            "residual must be",
        ),
        (
            lambda w: rt.w4a16_matmul(torch.zeros(2, 64), w, out=torch.zeros(2, 16).half()),
            rt.ArgumentTypeError,
            "out must be float32",
        ),
        (lambda w: rt.w4a16_matmul(torch.zeros(2, 64), w, activation="relu"), rt.ArgumentError, "activation must be"),
        (
            lambda w: rt.w4a16_matmul(torch.zeros(2, 64), both(15, 64, 32, "symmetric")[0], activation="silu_mul"),
            rt.ArgumentError,
            r'activation "silu_mul" needs a weight of rows \[gate \| up\], an even number N, got N = 15',
        ),
        (
            lambda w: rt.w4a16_matmul(torch.zeros(2, 64), w, activation="gelu_mul", residual=torch.zeros(2, 16)),
            rt.ArgumentError,
            "residual must be x's shape with N / 2 = 8 last",
        ),
        (lambda w: w.concat([]), rt.ArgumentError, "weights must have at least one"),
        (lambda w: w.concat([w, None]), rt.ArgumentTypeError, r"weights\[1\] must be a W4Weight, got NoneType"),
        *(
            (
                lambda w, other=other: w.concat([w, both(*other)[0]]),
                rt.ArgumentError,
                f"weights\\[1\\] must have .*{what}",
            )
            for other, what in (
                ((16, 128, 32, "symmetric"), "K = 64, got 128"),
                ((16, 64, 64, "symmetric"), "group_size = 32, got 64"),
                ((16, 64, 32, "minima"), "kind = symmetric, got minima"),
            )
        ),
    ],
)
def test_bad_input_is_named(call, error, text):
    w = sample()
    with pytest.raises(error, match=text):
        call(w)
    assert torch.isfinite(rt.w4a16_matmul(torch.ones(1, 64), w)).all()  # the next good call works


@pytest.mark.parametrize(
    "call, error, text",
    [
        (
            lambda w: w.quantize(torch.zeros(4, 100), group_size=64),
            rt.ArgumentError,
            "^W8Weight.quantize: group_size = 64 must divide .* K = 100",
        ),
        (
            lambda w: w.quantize(torch.zeros(4, 64), group_size=32, zeros="minima"),
            rt.ArgumentError,
            "^W8Weight.quantize: zeros must be None or \"symmetric\", got 'minima'",
        ),
        (
            lambda w: w.quantize(torch.zeros(4, 64).int(), group_size=32),
            rt.ArgumentTypeError,
            "^W8Weight.quantize: weight",
        ),
        (
            lambda w: w.from_canonical(*w.unpack()[:2], kind="minima"),
            rt.ArgumentError,
            '^W8Weight.from_canonical: kind must be "symmetric" or "integer", got \'minima\'',
        ),
        (
            lambda w: w.from_canonical(*w.unpack()[:2], torch.zeros(16, 2).half()),
            rt.ArgumentTypeError,
            "^W8Weight.from_canonical: zeros must be uint8",
        ),
        (
            lambda w: w.from_canonical(torch.zeros(4, 64, dtype=torch.uint8), torch.zeros(4, 3).half(), group_size=32),
            rt.ArgumentError,
            r"^W8Weight.from_canonical: scales must be \[N, K / group_size\] = \[4, 2\]",
        ),
        (
            lambda w: rt.W8Weight(w.codes[:-1], w.scales, None, **w.layout),
            rt.ArgumentError,
            r"^W8Weight: codes must be flat bytes = \[1024\]",
        ),
        (
            lambda w: w.from_gguf(b"", "Q4_0", (4, 32)),
            rt.NotSupportedError,
            '^W8Weight.from_gguf: ggml_type must be "Q8_0"',
        ),
        (lambda w: w.from_gguf(b"", "Q8_0", (4, 32)), rt.ArgumentError, "must have 136 bytes"),
        (lambda w: w.dequantize("int8"), rt.ArgumentTypeError, "^W8Weight.dequantize: dtype must be float32"),
        (lambda w: w.to(None), rt.ArgumentTypeError, "^W8Weight.to: device"),
        (lambda w: w.concat([w, sample()]), rt.ArgumentTypeError, r"weights\[1\] must be a W8Weight, got W4Weight"),
        (
            lambda w: rt.w8a16_matmul(torch.zeros(2, 63), w),
            rt.ArgumentError,
            "^w8a16_matmul: x must have a last dimension",
        ),
        (
            lambda w: rt.w8a16_matmul(torch.zeros(2, 64), None),
            rt.ArgumentTypeError,
            "^w8a16_matmul: w must be a rooftile.W8Weight, got NoneType",
        ),
        (
            lambda w: rt.w8a16_matmul(torch.zeros(2, 64), sample()),
            rt.ArgumentTypeError,
            "^w8a16_matmul: w must be a W8Weight, of 8 bits, got one of 4",
        ),
        (
            lambda w: rt.w4a16_matmul(torch.zeros(2, 64), w),
            rt.ArgumentTypeError,
            "^w4a16_matmul: w must be a W4Weight, of 4 bits, got one of 8",
        ),
    ],
)
def test_bad_input_of_8_bits_is_named(call, error, text):
    w = sample(8)
    with pytest.raises(error, match=text):
        call(w)
    assert torch.isfinite(rt.w8a16_matmul(torch.ones(1, 64), w)).all()  # the next good call works


def test_8_bits_need_no_even_k():
    n, k = 17, 35
    w, dense = both(n, k, k, "integer", bits=8, exact=True)
    x = cases.exact_values((3, k), "odd")
    for plan in cases.PLANS:
        for m in (1, 3):
            closeness.assert_exact(rt.w8a16_matmul(cases.tensor(x[:m], "float32"), w, plan=plan), x[:m] @ dense.T)
    assert torch.equal(rt.W8Weight.from_canonical(*w.unpack()).codes, w.codes)


@pytest.mark.parametrize("groups", [0, 3, 4])
def test_kpacked_scales_must_fit(groups):
    """Of K = 64 two groups of 32, or one; before memory is made."""
    with pytest.raises(
        rt.ArgumentError, match=rf"packed's K = 64 and group_size 32, 64, 128 or K, got \[{groups}, 5\]"
    ):
        rt.W4Weight.from_kpacked(torch.zeros(8, 5, dtype=torch.int32), torch.zeros(groups, 5).half())


def test_act_order_must_be_a_permutation():
    codes, scales, _ = parts(16, 64, 64, "symmetric")
    for perm, text in (
        (np.zeros(64), "0 occurs twice"),
        (np.arange(64) + 1, "outside"),
        (np.arange(63), r"\[K\] = \[64\]"),
    ):
        with pytest.raises(rt.ArgumentError, match=text):
            weight(codes, scales, None, "symmetric", perm=perm)


def test_weights_of_another_act_order_are_not_joined():
    codes, scales, _ = parts(16, 64, 64, "symmetric")
    plain, turned = (weight(codes, scales, None, "symmetric", perm=p) for p in (None, np.arange(64)[::-1]))
    for pair in ((plain, turned), (turned, plain)):
        with pytest.raises(rt.ArgumentError, match=r"weights\[1\] must have weights\[0\]'s act-order"):
            rt.W4Weight.concat(pair)
    assert (rt.W4Weight.concat([turned, turned]).perm == turned.perm).all()


def test_the_kernel_that_ran_has_its_name():
    with rt.record_kernels() as names:
        rt.w4a16_matmul(torch.zeros(1, 64), sample(), plan="portable")
        rt.w8a16_matmul(torch.zeros(1, 64), sample(8), plan="portable")
    assert names == ["cpu_portable_float32_w4g32_symmetric", "cpu_portable_float32_w8g32_symmetric"]
    assert _C.w4_layout_version == 1
