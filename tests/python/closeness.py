# SPDX-License-Identifier: Apache-2.0
"""When a result is right. Bounds are derived (a naive version's error, the dtype's own rounding), never tuned."""

import numpy as np
import oracle

# Relative Frobenius error that a kernel with fp32 accumulation may have.
ATTENTION_BOUND = {"float32": 2e-6, "float16": 6e-4, "bfloat16": 3e-3}
MATMUL_BOUND = {"float32": 2e-6, "float16": 4e-4, "bfloat16": 2e-3}


def matmul_bound(dtype, rounded=False):
    """MATMUL_BOUND. rounded: of weights that were rounded to dtype before the product, an independent error of the same
    size as that of rounding outputs."""
    return MATMUL_BOUND[dtype] * (2**0.5 if rounded else 1)


def integer_row_bound(x, dense):
    """What a product may err because each row of x became 16-bit integers, element by element: each x by 1 / 32639 of
    the largest of its block of 64, or by 2^-55."""
    k = x.shape[1]
    blocks = np.abs(np.pad(x, ((0, 0), (0, -k % 64)))).reshape(len(x), -(-k // 64), 64)
    largest = np.repeat(blocks.max(-1, initial=0), 64, 1)[:, :k]
    return np.maximum(largest / 32639, 2.0**-55) @ np.abs(dense).T


def dtype_name(array):
    return str(array.dtype).removeprefix("torch.")


def to_numpy64(array):
    """Any framework's array as a float64 NumPy copy; every value of a 16-bit type is exact in it."""
    if type(array).__module__.partition(".")[0] == "torch":
        return array.detach().cpu().double().numpy()
    return np.asarray(array).astype(np.float64)


def to_bytes(array):
    """The elements' bytes in logical order, uint8 [..., itemsize], whatever the strides."""
    if type(array).__module__.partition(".")[0] == "torch":
        import torch

        array = array.detach().cpu().contiguous()
        return array.reshape(*array.shape, 1).view(torch.uint8).numpy()
    array = np.ascontiguousarray(np.asarray(array))
    return array.reshape(*array.shape, 1).view(np.uint8)


def _where(index):
    return "[" + ", ".join(str(int(i)) for i in index) + "]"


def assert_same_shape(ours, exact):
    assert tuple(ours.shape) == tuple(np.shape(exact)), f"shape {tuple(ours.shape)}, expected {np.shape(exact)}"


def assert_close(ours, naive, exact, slack=2.0, frobenius=None, dtype=None):
    """ours errs at most `slack` times what the naive version in the same dtype errs; exact and naive are float64.

    frobenius: also bound the relative Frobenius error, and the worst row's at 4 times that, where the data are ordinary
    (a row whose values cancel to nothing has no relative error worth the name: it is measured against the mean row).
    """
    dtype = dtype or dtype_name(ours)
    got, naive, exact = to_numpy64(ours), np.asarray(naive, np.float64), np.asarray(exact, np.float64)
    assert_same_shape(got, exact)
    # What overflows the dtype is infinite in any right answer; everything else must be finite where the truth is.
    expected = oracle.round_to(exact, dtype)
    special = ~np.isfinite(expected)
    wrong = special != ~np.isfinite(got)
    wrong |= special & (np.isnan(expected) != np.isnan(got))
    wrong |= np.isinf(expected) & np.isinf(got) & (np.sign(expected) != np.sign(got))
    if wrong.any():
        at = tuple(np.argwhere(wrong)[0])
        raise AssertionError(
            f"not finite where it should be, or the reverse, at {_where(at)}: {got[at]}, exact {exact[at]}"
        )
    finite = ~special
    if not finite.any():
        return
    error = np.where(finite, np.abs(np.where(finite, got, 0) - np.where(finite, exact, 0)), 0)
    naive_error = np.abs(np.where(finite & np.isfinite(naive), naive - np.where(finite, exact, 0), 0)).max()
    floor = oracle.EPS[dtype] * np.abs(exact[finite]).max()
    if not error.max() <= slack * naive_error + floor:
        at = np.unravel_index(error.argmax(), error.shape)
        raise AssertionError(
            f"off by {error.max():.3e} at {_where(at)}: {got[at]!r}, exact {exact[at]!r}; a naive {dtype} version errs "
            f"{naive_error:.3e}, allowed {slack} x that + {floor:.3e}"
        )
    if frobenius is not None and finite.all():
        norm = np.linalg.norm(exact)
        relative = np.linalg.norm(error) / norm if norm else 0.0
        assert relative <= frobenius, f"relative Frobenius error {relative:.3e}, allowed {frobenius:.1e}"
        rows = exact.reshape(-1, exact.shape[-1])
        row_norm = np.maximum(np.linalg.norm(rows, axis=1), norm / np.sqrt(len(rows)))
        row_error = np.linalg.norm(error.reshape(rows.shape), axis=1) / np.where(row_norm, row_norm, 1)
        worst = row_error.argmax()
        assert row_error[worst] <= 4 * frobenius, (
            f"row {worst} has relative error {row_error[worst]:.3e}, allowed {4 * frobenius:.1e}"
        )


def ulp_error(ours, exact, dtype, terms=0.0):
    """Distance in units of the last place of `dtype` at the exact value, or at the largest of the `terms` it is the sum
    of: what cancels has no digits to keep."""
    got, exact = to_numpy64(ours), np.asarray(exact, np.float64)
    with np.errstate(invalid="ignore"):
        rounded = oracle.round_to(exact, dtype)
        same = (got == rounded) | (np.isnan(got) & np.isnan(rounded))
        distance = np.abs(got - exact) / oracle.quantum(
            np.maximum(np.where(np.isfinite(exact), np.abs(exact), 1.0), np.abs(terms)), dtype
        )
    return np.where(same, 0.0, np.where(np.isnan(distance), np.inf, distance))


def assert_ulp(ours, exact, dtype=None, max_ulp=2, share=0.999, terms=0.0):
    """At least `share` of the elements within 1 unit in the last place of the exact value, all within `max_ulp`."""
    dtype = dtype or dtype_name(ours)
    assert_same_shape(ours, exact)
    error = ulp_error(ours, exact, dtype, terms)
    if error.size == 0:
        return
    at = np.unravel_index(error.argmax(), error.shape)
    text = f"{error.max():.2f} ulp at {_where(at)}: {to_numpy64(ours)[at]!r}, exact {np.asarray(exact)[at]!r}"
    assert error.max() <= max_ulp, f"off by {text}, allowed {max_ulp}"
    within = (error <= 1).mean()
    assert within >= share, f"only {within:.5f} of the elements within 1 ulp, expected {share}; worst {text}"


def assert_exact(ours, exact, dtype=None):
    """Equal to the correctly rounded exact value: for data on which every step is exactly representable."""
    dtype = dtype or dtype_name(ours)
    assert_same_shape(ours, exact)
    got, expected = to_numpy64(ours), oracle.round_to(exact, dtype)
    wrong = ~((got == expected) | (np.isnan(got) & np.isnan(expected)))
    if wrong.any():
        at = tuple(np.argwhere(wrong)[0])
        raise AssertionError(
            f"{wrong.sum()} of {wrong.size} differ, first at {_where(at)}: {got[at]!r}, exact {expected[at]!r}"
        )


def assert_bits_equal(a, b, what=""):
    """The same bytes in every element, NaN payloads and the sign of zero included."""
    assert dtype_name(a) == dtype_name(b), f"{what} dtype {dtype_name(a)} and {dtype_name(b)}"
    assert tuple(a.shape) == tuple(b.shape), f"{what} shape {tuple(a.shape)} and {tuple(b.shape)}"
    differ = (to_bytes(a) != to_bytes(b)).any(axis=-1)
    if differ.any():
        at = tuple(np.argwhere(differ)[0])
        raise AssertionError(
            f"{what} {differ.sum()} of {differ.size} elements differ in their bits, first at {_where(at)}: "
            f"{to_numpy64(a)[at]!r} and {to_numpy64(b)[at]!r}"
        )
