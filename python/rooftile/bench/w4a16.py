# SPDX-License-Identifier: Apache-2.0
"""W4A16 products against the same products in 16 bit and against the 4-bit kernels of others."""

import torch

import rooftile as rt
from rooftile.bench import products
from rooftile.bench.report import OURS
from rooftile.bench.runner import checked, installed
from rooftile.bench.timing import Entry
from rooftile.bench.vllm_products import products as vllm_products

_ALSO = (4096, 6144), (4096, 28672), (3840, 15360), (4096, 128256), (8192, 8192)
CASES = products.cases(
    (products.SHAPES, (1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512, 1024, 4096, 8192)),
    (_ALSO[:1], (1, 16, 256, 384, 512)),
    (_ALSO[1:], (1, 16, 256)),
)
_VLLM = ("marlin", "machete")
PEERS = ("cublas", "tinygemm", *_VLLM)
_GROUP, _MINIMA_GROUP = 128, 32
_INVARIANT_ROWS, _MINIMA_ROWS = (16, 64, 256), (1, 16, 64, 256, 1024, 4096)  # of SHAPES: the other variants of ours
_TINYGEMM_ROWS = 128
_DEVICE = "cuda"


def parse(case):
    """(K, N, M) from a case's name."""
    return products.parse("w4a16", case)


def opened(peers, notes):
    """A function from a case to its entries."""
    peers = installed(peers, dict.fromkeys(_VLLM, "vllm._custom_ops"), notes)
    return products.opened(
        "w4a16", lambda k, n: _Weights(k, n, peers, notes), lambda case, m, weights: weights.entries(case, m)
    )


class _Weights:
    """One weight in every form that is timed, each as often as the L2 needs to forget it."""

    def __init__(self, k, n, peers, notes):
        torch.manual_seed(0)
        self.k, self.n, self.peers, self.notes = k, n, peers, notes
        weight = torch.randn(n, k, dtype=torch.float16, device=_DEVICE) * k**-0.5
        w = rt.W4Weight.quantize(weight, group_size=_GROUP)
        self.ours, self.exact = products.packed_copies(w)
        if (k, n) in products.SHAPES:
            self.minima = products.packed_copies(rt.W4Weight.quantize(weight, group_size=_MINIMA_GROUP, zeros="minima"))
        codes, scales, _ = w.unpack()
        self.packed_bytes = codes.nbytes + scales.nbytes
        if "cublas" in peers:
            self.dense = products.dense_copies(self.exact.half())
        self.packed = {}  # peer: (copies of its arrays, l2, {kernel: call(x, arrays)})
        if "tinygemm" in peers:
            with notes.guarded(f"k{k}_n{n}", "tinygemm"):
                self.packed["tinygemm"] = *_tinygemm(codes, scales), {"_weight_int4pack_mm": _call_tinygemm}
        theirs = {}
        if peers & set(_VLLM):
            with notes.guarded(f"k{k}_n{n}", "vllm"):
                theirs = vllm_products(codes, scales, _GROUP)
        for name in sorted(peers & set(theirs)):
            pack, calls = theirs[name]
            with notes.guarded(f"k{k}_n{n}", name):
                self.packed[name] = *products.copies(pack()), calls

    def entries(self, case, m):
        torch.manual_seed(m)
        x = torch.randn(m, self.k, dtype=torch.float16, device=_DEVICE)
        expected = x.float() @ self.exact.T
        found, guarded = [], self.notes.guarded

        def ours(variant, weights, expected, **options):
            with guarded(case, OURS, variant):
                found.append(products.ours(variant, rt.w4a16_matmul, x, weights, expected, **options))

        ours(f"int4-g{_GROUP}", self.ours, expected)
        if (self.k, self.n) in products.SHAPES and m in _MINIMA_ROWS:
            weights, exact = self.minima
            ours(f"int4-g{_MINIMA_GROUP}-minima", weights, x.float() @ exact.T)
        if (self.k, self.n) in products.SHAPES and m in _INVARIANT_ROWS:
            ours(f"int4-g{_GROUP}-invariant", self.ours, expected, batch_invariant=True)
        if "cublas" in self.peers:
            with guarded(case, "cublas"):
                found.append(products.cublas("fp16", x, self.dense, expected))
        for name in self.packed:
            if name != "tinygemm" or m <= _TINYGEMM_ROWS:
                with guarded(case, name):
                    found.append(self._peer(name, x, expected))
        return found

    def _peer(self, name, x, expected):
        arrays, l2, calls = self.packed[name]
        bound = 1e-3  # they round each weight times its scale
        if name == "tinygemm":
            x, bound = x.bfloat16(), 1e-2  # its scales and activations are bf16
        calls, error = checked(calls, lambda call: products.error(call(x, arrays[0]), expected, bound))
        choices = {kernel: [lambda a=a, call=call: call(x, a) for a in arrays] for kernel, call in calls.items()}
        (m, k), n = x.shape, self.n
        nbytes = self.packed_bytes + 2 * m * (k + n)
        return Entry(name, f"int4-g{_GROUP}", choices, nbytes, 2 * m * n * k, error, l2)


def _tinygemm(codes, scales):
    """(copies, l2) for torch's own 4-bit product: bf16, unsigned codes around a zero in the scale's units."""
    packed = (codes >> 4) | ((codes & 15) << 4)  # it takes the first of two codes from the high half
    packed = torch._convert_weight_to_int4pack(packed.contiguous(), 8)
    pairs = torch.stack([scales.bfloat16(), torch.zeros_like(scales, dtype=torch.bfloat16)], -1)
    return products.copies((packed, pairs.transpose(0, 1).contiguous()))


def _call_tinygemm(x, arrays):
    return torch._weight_int4pack_mm(x, arrays[0], _GROUP, arrays[1])
