# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks of all products share: their cases, and when an answer may be timed."""

import re

import torch
import torch.nn.functional as F

import rooftile as rt
from rooftile.bench.report import OURS
from rooftile.bench.timing import Entry, rotation
from rooftile.errors import ArgumentError

SHAPES = ((4096, 4096), (4096, 14336), (14336, 4096))
TOLERANCE = {"float16": 4e-4, "bfloat16": 2e-3}  # relative Frobenius error of a product rounded to that type


def cases(*parts):
    """Names of cases. parts: (shapes, numbers of rows), one behind the other."""
    return tuple(f"k{k}_n{n}_m{m}" for shapes, rows in parts for k, n in shapes for m in rows)


def parse(family, case):
    """(K, N, M) from a case's name."""
    found = re.fullmatch(r"k(\d+)_n(\d+)_m(\d+)", case)
    if not found:
        raise ArgumentError(f"bench {family}: {case!r} is no case; they look like k4096_n14336_m1")
    return tuple(map(int, found.groups()))


def opened(family, weight_of, entries_of):
    """A function from a case to its entries. weight_of(k, n): a weight in every form, held as long as cases have its
    shape; entries_of(case, m, weight).
    """
    shape, weight = None, None

    def entries(case):
        nonlocal shape, weight
        k, n, m = parse(family, case)
        if (k, n) != shape:
            weight = None
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
            shape, weight = (k, n), weight_of(k, n)
        return entries_of(case, m, weight)

    return entries


def error(got, expected, bound):
    """The relative Frobenius error; an answer beyond `bound` is not timed."""
    relative = float((got.float() - expected).norm() / expected.norm())
    if not relative <= bound:
        raise RuntimeError(f"wrong answer, relative error {relative:.2e}; it is not timed")
    return relative


def copies(arrays):
    """(copies, l2) of a tuple of tensors and Nones, the first one itself, as many as the L2 needs to forget them."""
    count, l2 = rotation(sum(a.nbytes for a in arrays if a is not None))
    return [arrays, *(tuple(None if a is None else a.clone() for a in arrays) for _ in range(count - 1))], l2


def packed_copies(w):
    """((copies of a W4Weight or W8Weight, l2), what it stands for). `.to` would give w itself."""
    arrays, l2 = copies((w.codes, w.scales, w.offsets))
    return ([w, *(type(w)(*a, **w.layout) for a in arrays[1:])], l2), w.dequantize("float32")


def dense_copies(weight):
    """(copies of a weight in 16 bits, l2)."""
    arrays, l2 = copies((weight,))
    return [a for (a,) in arrays], l2


def ours(variant, op, x, weights, expected, **options):
    """op(x, w) with copies of a packed weight, as packed_copies gives them."""
    weights, l2 = weights
    with rt.record_kernels() as names:
        out = op(x, weights[0], **options)
    found = error(out, expected, TOLERANCE[str(x.dtype).removeprefix("torch.")])
    calls = [lambda w=w: op(x, w, out=out, **options) for w in weights]
    return Entry(OURS, variant, {names[-1]: calls}, *work(x, weights[0]), found, l2)


def cublas(variant, x, weights, expected):
    """torch.nn.functional.linear with copies of a weight in 16 bits, as dense_copies gives them."""
    weights, l2 = weights
    found = error(F.linear(x, weights[0]), expected, TOLERANCE[str(x.dtype).removeprefix("torch.")])
    calls = {"torch.nn.functional.linear": [lambda w=w: F.linear(x, w) for w in weights]}
    return Entry("cublas", variant, calls, *work(x, weights[0]), found, l2)


def work(x, weight):
    """Bytes and flops of one product."""
    (m, k), n = x.shape, weight.shape[0]
    return weight.nbytes + 2 * m * (k + n), 2 * m * n * k
