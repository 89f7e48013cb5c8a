# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks of all products share: their cases, and when an answer may be timed."""

import re

import torch

import rooftile as rt
from rooftile.bench.report import row
from rooftile.bench.timing import copies_for, time_calls
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


def run(family, cases, weight_of, rows_of, advance):
    """Rows of all cases, in order. weight_of(k, n): a weight in every form, held as long as cases have its shape;
    rows_of(case, m, weight). advance(): once a case.
    """
    rows, shape, weight = [], None, None
    for case in cases:
        k, n, m = parse(family, case)
        if (k, n) != shape:
            weight = None
            torch.cuda.empty_cache()
            shape, weight = (k, n), weight_of(k, n)
        rows += rows_of(case, m, weight)
        advance()
    return rows


def error(name, got, expected, bound):
    """The relative Frobenius error; an answer beyond `bound` is not timed."""
    relative = float((got.float() - expected).norm() / expected.norm())
    if not relative <= bound:
        raise RuntimeError(f"{name}: wrong answer, relative error {relative:.2e}; it is not timed")
    return relative


def packed_copies(w):
    """As many of a W4Weight or W8Weight as the L2 needs to forget it, and what it stands for. `.to` would give w."""
    arrays = w.codes, w.scales, w.offsets
    others = ([None if a is None else a.clone() for a in arrays] for _ in range(copies_for(w.nbytes) - 1))
    return [w, *(type(w)(*a, **w.layout) for a in others)], w.dequantize("float32")


def dense_copies(weight):
    """The same of a weight in 16 bits."""
    return [weight, *(weight.clone() for _ in range(copies_for(weight.nbytes) - 1))]


def ours(case, variant, op, x, weights, expected, ceiling, **options):
    """The row of op(x, w) with copies of a packed weight."""
    with rt.record_kernels() as names:
        out = op(x, weights[0], **options)
    found = error(f"{case} rooftile {variant}", out, expected, TOLERANCE["float16"])
    times = time_calls([lambda w=w: op(x, w, out=out, **options) for w in weights])
    return row(case, "rooftile", variant, names[-1], times, *_work(x, weights[0]), found, ceiling)


def cublas(case, x, weights, expected, ceiling):
    """The row of torch.mm with copies of a weight in 16 bits."""
    out = x @ weights[0].T
    found = error(f"{case} cublas", out, expected, TOLERANCE["float16"])
    times = time_calls([lambda w=w: torch.mm(x, w.T, out=out) for w in weights])
    return row(case, "cublas", "fp16", "torch.mm", times, *_work(x, weights[0]), found, ceiling)


def _work(x, weight):
    """Bytes and flops of one product."""
    (m, k), n = x.shape, weight.shape[0]
    return weight.nbytes + 2 * m * (k + n), 2 * m * n * k
