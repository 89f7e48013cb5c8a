# SPDX-License-Identifier: Apache-2.0
"""W8A16 products against the same products in 16 bit."""

import torch

import rooftile as rt
from rooftile.bench import products

CASES = products.cases((products.SHAPES, (1, 16, 64, 256, 1024)))
_GROUP = 128
_DEVICE = "cuda"


def parse(case):
    """(K, N, M) from a case's name."""
    return products.parse("w8a16", case)


def steps(cases):
    """How often run() calls advance()."""
    return len(cases)


def run(cases, peers, ceiling, advance):
    """(rows, names of peers without one). advance(): once a case."""

    def weights(k, n):
        torch.manual_seed(0)
        weight = torch.randn(n, k, dtype=torch.float16, device=_DEVICE) * k**-0.5
        copies, exact = products.packed_copies(rt.W8Weight.quantize(weight, group_size=_GROUP))
        return copies, exact, products.dense_copies(exact.half()) if peers else None

    def rows(case, m, weights):
        copies, exact, dense = weights
        torch.manual_seed(m)
        x = torch.randn(m, exact.shape[1], dtype=torch.float16, device=_DEVICE)
        expected = x.float() @ exact.T
        found = [products.ours(case, f"int8-g{_GROUP}", rt.w8a16_matmul, x, copies, expected, ceiling)]
        return found + ([products.cublas(case, x, dense, expected, ceiling)] if peers else [])

    return products.run("w8a16", cases, weights, rows, advance), set()
