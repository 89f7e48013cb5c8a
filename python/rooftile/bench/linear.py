# SPDX-License-Identifier: Apache-2.0
"""16-bit products against cuBLAS, by way of torch."""

import torch

import rooftile as rt
from rooftile.bench import products
from rooftile.bench.report import OURS

CASES = products.cases(
    (products.SHAPES, (1, 2, 4, 8, 16, 32, 64, 128, 256)),
    (products.SHAPES, (1024, 4096)),
)
PEERS = ("cublas",)
_DEVICE = "cuda"
_VARIANTS = {"fp16": torch.float16, "bf16": torch.bfloat16}


def parse(case):
    """(K, N, M) from a case's name."""
    return products.parse("linear", case)


def opened(peers, notes):
    """A function from a case to its entries."""

    def weights(k, n):
        return {variant: _weights(k, n, dtype) for variant, dtype in _VARIANTS.items()}

    def entries(case, m, weights):
        found = []
        for variant, copies in weights.items():
            weight = copies[0][0]
            torch.manual_seed(m)
            x = torch.randn(m, weight.shape[1], device=_DEVICE).to(weight.dtype)
            expected = x.float() @ weight.float().T
            with notes.guarded(case, OURS, variant):
                found.append(products.ours(variant, rt.linear, x, copies, expected))
            if "cublas" in peers:
                with notes.guarded(case, "cublas", variant):
                    found.append(products.cublas(variant, x, copies, expected))
        return found

    return products.opened("linear", weights, entries)


def _weights(k, n, dtype):
    """Copies of one weight that a cache cannot hold together."""
    torch.manual_seed(k + n)
    return products.dense_copies((torch.randn(n, k, device=_DEVICE) * k**-0.5).to(dtype))
