# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks of all products share: their cases, and when an answer may be timed."""

import re

import torch

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
