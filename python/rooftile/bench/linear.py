# SPDX-License-Identifier: Apache-2.0
"""16-bit products against cuBLAS, by way of torch."""

import torch

import rooftile as rt
from rooftile.bench import products
from rooftile.bench.report import row
from rooftile.bench.timing import copies_for, time_calls

CASES = products.cases(  # many rows heat the chip: they come last
    (products.SHAPES, (1, 2, 4, 8, 16, 32, 64, 128, 256)),
    (products.SHAPES, (1024, 4096)),
)
_DEVICE = "cuda"
_VARIANTS = {"fp16": torch.float16, "bf16": torch.bfloat16}


def parse(case):
    """(K, N, M) from a case's name."""
    return products.parse("linear", case)


def steps(cases):
    """How often run() calls advance()."""
    return len(cases)


def run(cases, peers, ceiling, advance):
    """(rows, names of peers without one). advance(): once a case."""

    def weights(k, n):
        return {variant: _weights(k, n, dtype) for variant, dtype in _VARIANTS.items()}

    def rows(case, m, weights):
        return [r for v, copies in weights.items() for r in _rows(case, m, v, copies, peers, ceiling)]

    return products.run("linear", cases, weights, rows, advance), set()


def _weights(k, n, dtype):
    """Copies of one weight that a cache cannot hold together."""
    torch.manual_seed(k + n)
    weight = (torch.randn(n, k, device=_DEVICE) * k**-0.5).to(dtype)
    return [weight, *(weight.clone() for _ in range(copies_for(weight.nbytes) - 1))]


def _rows(case, m, variant, weights, peers, ceiling):
    n, k = weights[0].shape
    torch.manual_seed(m)
    x = torch.randn(m, k, device=_DEVICE).to(weights[0].dtype)
    expected = x.float() @ weights[0].float().T
    bound = products.TOLERANCE[str(x.dtype).removeprefix("torch.")]
    nbytes, flops = weights[0].nbytes + 2 * m * (k + n), 2 * m * n * k
    with rt.record_kernels() as names:
        out = rt.linear(x, weights[0])
    error = products.error(f"{case} {variant} rooftile", out, expected, bound)
    times = time_calls([lambda w=w: rt.linear(x, w, out=out) for w in weights])
    rows = [row(case, "rooftile", variant, names[-1], times, nbytes, flops, error, ceiling)]
    if peers:
        theirs = torch.nn.functional.linear
        error = products.error(f"{case} {variant} cublas", theirs(x, weights[0]), expected, bound)
        times = time_calls([lambda w=w: theirs(x, w) for w in weights])
        rows.append(row(case, "cublas", variant, "torch.nn.functional.linear", times, nbytes, flops, error, ceiling))
    return rows
