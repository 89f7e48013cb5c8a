# SPDX-License-Identifier: Apache-2.0
"""W8A16 products against the same products in 16 bit."""

import torch

import rooftile as rt
from rooftile.bench import products
from rooftile.bench.report import OURS

CASES = products.cases((products.SHAPES, (1, 16, 64, 256, 1024)))
PEERS = ("cublas",)
_GROUP = 128
_DEVICE = "cuda"


def parse(case):
    """(K, N, M) from a case's name."""
    return products.parse("w8a16", case)


def opened(peers, notes):
    """A function from a case to its entries."""

    def weights(k, n):
        torch.manual_seed(0)
        weight = torch.randn(n, k, dtype=torch.float16, device=_DEVICE) * k**-0.5
        copies, exact = products.packed_copies(rt.W8Weight.quantize(weight, group_size=_GROUP))
        return copies, exact, products.dense_copies(exact.half()) if "cublas" in peers else None

    def entries(case, m, weights):
        copies, exact, dense = weights
        torch.manual_seed(m)
        x = torch.randn(m, exact.shape[1], dtype=torch.float16, device=_DEVICE)
        expected, found = x.float() @ exact.T, []
        with notes.guarded(case, OURS, f"int8-g{_GROUP}"):
            found.append(products.ours(f"int8-g{_GROUP}", rt.w8a16_matmul, x, copies, expected))
        if "cublas" in peers:
            with notes.guarded(case, "cublas"):
                found.append(products.cublas("fp16", x, dense, expected))
        return found

    return products.opened("w8a16", weights, entries)
