# SPDX-License-Identifier: Apache-2.0
"""W4A16 products against the same products in 16 bit and against the 4-bit kernels of others."""

import torch

import rooftile as rt
from rooftile.bench import products
from rooftile.bench.report import left_out, row
from rooftile.bench.timing import copies_for, time_calls
from rooftile.bench.vllm_products import products as vllm_products

# the second ones heat the chip: they come last
CASES = products.cases((1, 2, 4, 8, 16, 32, 64, 128, 256), (1024, 4096, 8192))
_GROUP = 128


def parse(case):
    """(K, N, M) from a case's name."""
    return products.parse("w4a16", case)


def steps(cases):
    """How often run() calls advance()."""
    return len(cases)


def run(cases, peers, ceiling, advance):
    """(rows, names of peers without one). advance(): once a case."""
    rows, weights = [], {}
    for case in cases:
        k, n, m = parse(case)
        if (k, n) not in weights:
            weights.clear()
            torch.cuda.empty_cache()
            weights[k, n] = _Weights(k, n, peers)
        rows += weights[k, n].rows(case, m, peers, ceiling)
        advance()
    return rows, {"marlin", "machete"} - {r["impl"] for r in rows} if peers else set()


class _Weights:
    """One weight in every form that is timed, each as often as the L2 needs to forget it."""

    def __init__(self, k, n, peers):
        torch.manual_seed(0)
        self.k, self.n = k, n
        weight = torch.randn(n, k, dtype=torch.float16, device="cuda") * k**-0.5
        w = rt.W4Weight.quantize(weight, group_size=_GROUP)
        self.exact = w.dequantize("float32").to("cuda")
        self.ours = [w] + [w.to("cuda") for _ in range(copies_for(w.nbytes) - 1)]
        if peers:
            half = self.exact.half()
            self.dense = [half] + [half.clone() for _ in range(copies_for(half.nbytes) - 1)]
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
        flops, activations = 2 * m * self.n * self.k, 2 * m * (self.k + self.n)
        with rt.record_kernels() as names:
            out = rt.w4a16_matmul(x, self.ours[0])
        error = products.error(f"{case} rooftile", out, expected, products.TOLERANCE["float16"])
        times = time_calls([lambda w=w: rt.w4a16_matmul(x, w, out=out) for w in self.ours])
        nbytes = self.ours[0].nbytes + activations
        rows = [row(case, "rooftile", f"int4-g{_GROUP}", names[-1], times, nbytes, flops, error, ceiling)]
        if not peers:
            return rows
        error = products.error(f"{case} cublas", x @ self.dense[0].T, expected, products.TOLERANCE["float16"])
        times = time_calls([lambda w=w: torch.mm(x, w.T, out=out) for w in self.dense])
        nbytes = self.dense[0].nbytes + activations
        rows.append(row(case, "cublas", "fp16", "torch.mm", times, nbytes, flops, error, ceiling))
        if m <= 128:
            x16 = x.bfloat16()
            call = torch._weight_int4pack_mm
            error = products.error(
                f"{case} tinygemm", call(x16, self.tiny[0][0], _GROUP, self.tiny[0][1]), expected, 1e-2
            )  # bf16
            times = time_calls([lambda w=w: call(x16, w[0], _GROUP, w[1]) for w in self.tiny])
            nbytes = self.tiny[0][0].nbytes + self.tiny[0][1].nbytes + activations
            rows.append(
                row(case, "tinygemm", f"int4-g{_GROUP}", "_weight_int4pack_mm", times, nbytes, flops, error, ceiling)
            )
        nbytes = self.n * (self.k // 2 + 2 * self.k // _GROUP) + activations
        for name, (forms, call) in self.vllm.items():
            try:
                error = products.error("checked", call(x, forms[0]), expected, products.TOLERANCE["float16"])
                times = time_calls([lambda form=form, call=call: call(x, form) for form in forms])
            except Exception as e:  # wrong, refused, or what another version calls otherwise
                left_out(f"{case} {name}", e)
                continue
            rows.append(row(case, name, f"int4-g{_GROUP}", f"vllm.{name}", times, nbytes, flops, error, ceiling))
        return rows
