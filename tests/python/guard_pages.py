# SPDX-License-Identifier: Apache-2.0
"""Runs every op with each tensor against an unreadable page; prints what it is about to do. Run by test_poison.py."""

import ctypes
import functools
import mmap
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import cases
import closeness
import ops
import rooftile as rt
import torch

torch.set_num_threads(2)  # work is split, and not among all cores of a machine that runs other tests, too
PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)
_kept = []  # mappings, alive as long as their tensors may be


def beside_a_wall(t, at_end):
    """A contiguous copy of t whose last byte lies before an unreadable page (its first byte behind one)."""
    if not t.numel():
        return t
    size = t.numel() * t.element_size()
    pages = -(-size // PAGE)
    memory = mmap.mmap(-1, (pages + 2) * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for wall in (start, start + (pages + 1) * PAGE):
        if _libc.mprotect(ctypes.c_void_p(wall), PAGE, 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    _kept.append(memory)
    offset = PAGE + (pages * PAGE - size if at_end else 0)
    copy = torch.frombuffer(memory, dtype=t.dtype, count=t.numel(), offset=offset).view(t.shape)
    return copy.copy_(t)


def main():
    for op in ops.OPS:
        for dtype in cases.DTYPES:
            for plan in cases.PLANS if "plan" in op.arguments else cases.PLANS[:1]:
                for at_end in (True, False):
                    call, plain = op.call(dtype), op.call(dtype)
                    print(op.id, dtype, plan, "end" if at_end else "start", flush=True)
                    place = functools.partial(beside_a_wall, at_end=at_end)
                    for name, argument in op.arguments.items():
                        if isinstance(argument, ops.Tensor):
                            call.kwargs[name] = place(call.kwargs[name])
                        elif isinstance(argument, ops.Object):
                            call.kwargs[name] = argument.moved(call.kwargs[name], place)
                    call.run(plan=plan)
                    plain.run(plan=plan)
                    for a, b in zip(call.written(), plain.written(), strict=True):
                        closeness.assert_bits_equal(a, b, f"{op.id} {dtype} {plan}")
        _kept.clear()
    for bits in (4, 8):  # one row, which reads the weight by itself, and no columns in a last, partial tile
        w = ops.w4_weight(k=128, bits=bits)
        for plan in cases.PLANS:
            for at_end in (True, False):
                print(f"w{bits}a16_matmul of one row", plan, "end" if at_end else "start", flush=True)
                place = functools.partial(beside_a_wall, at_end=at_end)
                x, matmul = torch.ones(1, 128), getattr(rt, f"w{bits}a16_matmul")
                result = matmul(place(x), ops.W4.moved(w, place), plan=plan)
                closeness.assert_bits_equal(result, matmul(x, w, plan=plan), f"w{bits}a16_matmul {plan}")


if __name__ == "__main__":
    main()
