# SPDX-License-Identifier: Apache-2.0
"""W4A16 products against the same products in 16 bit and against the 4-bit kernels of others."""

import torch

import rooftile as rt
from rooftile.bench import products
from rooftile.bench.report import left_out, row
from rooftile.bench.timing import copies_for, time_calls
from rooftile.bench.vllm_products import products as vllm_products

_ALSO = (4096, 6144), (4096, 28672), (3840, 15360), (4096, 128256), (8192, 8192)
CASES = products.cases(  # many rows heat the chip: they come last
    (products.SHAPES, (1, 2, 4, 8, 16, 32, 64, 128, 256)),
    (_ALSO, (1, 16, 256)),
    ((*products.SHAPES, _ALSO[0]), (384, 512)),
    (products.SHAPES, (1024, 4096, 8192)),
)
_GROUP, _MINIMA_GROUP = 128, 32
_INVARIANT_ROWS, _MINIMA_ROWS = (16, 64, 256), (1, 16, 64, 256, 1024)  # of SHAPES: the other variants of ours


def parse(case):
    """(K, N, M) from a case's name."""
    return products.parse("w4a16", case)


def steps(cases):
    """How often run() calls advance()."""
    return len(cases)


def run(cases, peers, ceiling, advance):
    """(rows, names of peers without one). advance(): once a case."""

    def rows_of(case, m, weight):
        return weight.rows(case, m, peers, ceiling)

    rows = products.run("w4a16", cases, lambda k, n: _Weights(k, n, peers), rows_of, advance)
    return rows, {"marlin", "machete"} - {r["impl"] for r in rows} if peers else set()


class _Weights:
    """One weight in every form that is timed, each as often as the L2 needs to forget it."""

    def __init__(self, k, n, peers):
        torch.manual_seed(0)
        self.k, self.n = k, n
        weight = torch.randn(n, k, dtype=torch.float16, device="cuda") * k**-0.5
        w = rt.W4Weight.quantize(weight, group_size=_GROUP)
        self.ours, self.exact = products.packed_copies(w)
        if (k, n) in products.SHAPES:
            self.minima = products.packed_copies(rt.W4Weight.quantize(weight, group_size=_MINIMA_GROUP, zeros="minima"))
        if peers:
            self.dense = products.dense_copies(self.exact.half())
            self.tiny = self._tinygemm(w)
            codes, scales, _ = w.unpack()
            self.vllm = {}
            for name, (pack, call) in vllm_products(codes, scales, _GROUP).items():
                try:
                    self.vllm[name] = [pack() for _ in range(copies_for(codes.nbytes + scales.nbytes))], call
                except Exception as e:  # another version, or a GPU that it does not know
                    left_out(f"k{k}_n{n} {name}", e)

    def _tinygemm(self, w):
        """torch's own 4-bit product: bf16, unsigned codes around a zero in the scale's units."""
        codes, scales, _ = w.unpack()
        packed = (codes >> 4) | ((codes & 15) << 4)  # it takes the first of two codes from the high half
        packed = torch._convert_weight_to_int4pack(packed.contiguous(), 8)
        pairs = torch.stack([scales.bfloat16(), torch.zeros_like(scales, dtype=torch.bfloat16)], -1)
        pairs = pairs.transpose(0, 1).contiguous()
        count = copies_for(packed.nbytes)
        return [(packed.clone(), pairs.clone()) for _ in range(count)]

    def rows(self, case, m, peers, ceiling):
        torch.manual_seed(m)
        x = torch.randn(m, self.k, dtype=torch.float16, device="cuda")
        expected = x.float() @ self.exact.T
        flops, activations, bound = 2 * m * self.n * self.k, 2 * m * (self.k + self.n), products.TOLERANCE["float16"]

        def ours(variant, weights, expected, **options):
            return products.ours(case, variant, rt.w4a16_matmul, x, weights, expected, ceiling, **options)

        rows = [ours(f"int4-g{_GROUP}", self.ours, expected)]
        if (self.k, self.n) in products.SHAPES and m in _MINIMA_ROWS:
            weights, exact = self.minima
            rows.append(ours(f"int4-g{_MINIMA_GROUP}-minima", weights, x.float() @ exact.T))
        if (self.k, self.n) in products.SHAPES and m in _INVARIANT_ROWS:
            rows.append(ours(f"int4-g{_GROUP}-invariant", self.ours, expected, batch_invariant=True))
        if not peers:
            return rows
        rows.append(products.cublas(case, x, self.dense, expected, ceiling))
        if m <= 128:
            x16 = x.bfloat16()
            call = torch._weight_int4pack_mm
            got = call(x16, self.tiny[0][0], _GROUP, self.tiny[0][1])
            error = products.error(f"{case} tinygemm", got, expected, 1e-2)  # its scales and activations are bf16
            times = time_calls([lambda w=w: call(x16, w[0], _GROUP, w[1]) for w in self.tiny])
            nbytes = self.tiny[0][0].nbytes + self.tiny[0][1].nbytes + activations
            rows.append(
                row(case, "tinygemm", f"int4-g{_GROUP}", "_weight_int4pack_mm", times, nbytes, flops, error, ceiling)
            )
        nbytes = self.n * (self.k // 2 + 2 * self.k // _GROUP) + activations
        for name, (forms, call) in self.vllm.items():
            try:
                error = products.error("checked", call(x, forms[0]), expected, bound)
                times = time_calls([lambda form=form, call=call: call(x, form) for form in forms])
            except Exception as e:  # wrong, refused, or what another version calls otherwise
                left_out(f"{case} {name}", e)
                continue
            rows.append(row(case, name, f"int4-g{_GROUP}", f"vllm.{name}", times, nbytes, flops, error, ceiling))
        return rows
