# SPDX-License-Identifier: Apache-2.0
"""What torch may do, between two calls, to an array that a weight or a cache is over.

    moved_memory.py [--no-table] SUBJECT..

Run by test_moved_memory.py as a process of its own, which a wrong pointer may end. Every array of the subject is moved
in every way and then given other bytes: the next call has the bits of a fresh subject on those bytes, or raises an
error that names the array. Prints how many changes it made. --no-table: as with a torch that has no DLPack exchange
table.
"""

import sys

import rooftile as rt
import torch
from rooftile import nn


def weight(cls, **options):
    torch.manual_seed(0)
    source, other = (cls.quantize(torch.randn(48, 128), group_size=32, **options) for _ in range(2))
    perms = [torch.randperm(128).int() for _ in range(2)]

    def arrays(w, perm):
        return {"codes": w.codes, "scales": w.scales, "perm": perm} | (
            {} if w.offsets is None else {"offsets": w.offsets}
        )

    def make(codes, scales, perm, offsets=None):
        return cls(codes, scales, offsets, perm=perm, **source.layout)

    x = torch.randn(3, 128)
    product = rt.w4a16_matmul if cls is rt.W4Weight else rt.w8a16_matmul
    return arrays(source, perms[0]), arrays(other, perms[1]), make, lambda w: product(x, w)


def module():
    first, second, make, _ = weight(rt.W4Weight, zeros="minima")
    x = torch.randn(3, 128)
    return first, second, lambda **arrays: nn.W4Linear.from_weight(make(**arrays)), lambda m: m(x)


def filled(format, dtype):
    """A paged cache and another of the same lengths with other tokens in other pages."""
    caches = []
    for seed in range(2):
        torch.manual_seed(seed)
        cache = rt.PagedKVCache(8, 32, 2, 32, max_rows=2, max_pages_per_row=3, format=format, dtype=dtype)
        for row in (0, 1) if seed else (1, 0):
            k = torch.randn(1, 70, 2, 32).to(getattr(torch, dtype))
            cache.append(k, k + 1, rows=[row])
        caches.append(cache)
    return caches


def attend(dtype):
    q = torch.randn(2, 4, 32).to(getattr(torch, dtype))
    return lambda cache: torch.cat(
        [rt.decode_attention(q, cache).float().flatten(), *(x.flatten() for x in cache.dequantize())]
    )


def view(format, dtype):
    names = ("pool", "block_table", "lengths", "ring_k", "ring_v", "raw_from")
    first, second = ({n: c._arrays[n] for n in names if n in c._arrays} for c in filled(format, dtype))

    def make(pool, block_table, lengths, ring_k=None, ring_v=None, raw_from=None):
        ring = None if ring_k is None else (ring_k, ring_v, raw_from)
        return rt.PagedKVCache.view(
            pool, block_table, lengths, format=format, dtype=dtype, page_size=32, head_dim=32, ring=ring
        )

    return first, second, make, attend(dtype)


def elements(layout, pair):
    def arrays(cache):
        sides = [cache._arrays[n] for n in ("k_pool", "v_pool")]  # NHD
        if layout == "HND":
            sides = [side.transpose(1, 2) for side in sides]
        pools = dict(zip(("pool", "v_pool"), sides, strict=True)) if pair else {"pool": torch.stack(sides, 1)}
        return pools | {"block_table": cache.block_table, "lengths": cache.seq_lens}

    def make(pool, block_table, lengths, v_pool=None):
        pool = pool if v_pool is None else (pool, v_pool)
        return rt.PagedKVCache.view(pool, block_table, lengths, format="fp16", layout=layout)

    return *map(arrays, filled("fp16", "float16")), make, attend("float16")


SUBJECTS = {
    "W4Weight": lambda: weight(rt.W4Weight, zeros="minima"),
    "W8Weight": lambda: weight(rt.W8Weight),
    "W4Linear": module,
    "view-kivi": lambda: view("int4-kivi", "float32"),
    "view-int8": lambda: view("int8", "float16"),
    "view-NHD": lambda: elements("NHD", False),
    "view-HND-pair": lambda: elements("HND", True),
}


def data(x):
    x.data = x.clone()


def swap(x):
    torch.utils.swap_tensors(x, x.clone())


def grow(x):
    x.untyped_storage().resize_(x.untyped_storage().nbytes() + 4096)


def in_place(x):
    """No move: values alone change."""


# ---- after these the array's own bytes are gone


def empty(x):
    x.untyped_storage().resize_(0)


def shrink(x):
    x.untyped_storage().resize_(x.untyped_storage().nbytes() // 2)


def shrink_to_the_same_place(x):
    """Storage that was given back may be handed out again, at the same address and less of it."""
    size = x.untyped_storage().nbytes()
    for _ in range(2):
        x.untyped_storage().resize_(0)
        x.untyped_storage().resize_(size - 4)


def reshape(x):
    x.resize_(x.shape[0] - 1, *x.shape[1:])


def widen(x):
    x.resize_(*x.shape[:-1], x.shape[-1] + 16)


MOVES = (torch.Tensor.share_memory_, data, swap, grow, in_place)
LOSSES = (empty, shrink, shrink_to_the_same_place, reshape, widen)


def copies(arrays):
    return {name: x.clone(memory_format=torch.contiguous_format) for name, x in arrays.items()}


def check(name):
    first, second, make, run = SUBJECTS[name]()
    changes = 0
    expected = run(make(**copies(first)))
    for array in first:
        others = copies(first) | {array: second[array]}
        changed = run(make(**copies(others)))
        # of an element format a view is over views of the pool: they go with its storage, not with the tensor
        fixed = array.endswith("pool") and name in ("view-NHD", "view-HND-pair")
        for change in (*MOVES, *LOSSES):
            what = f"{name}: {array}, {change.__name__}"
            arrays = copies(first)
            subject = make(**arrays)
            assert torch.equal(run(subject), expected), what
            try:
                change(arrays[array])
            except RuntimeError as error:  # torch's own refusal: a pool with views, storage that NumPy reads too
                refusals = "use_count", "gradient edge", "not resizable"
                assert any(text in str(error) for text in refusals), f"{what}: {error}"
                continue
            if change in MOVES and not (fixed and change is data):
                arrays[array].copy_(second[array])
                assert torch.equal(run(subject), changed), what
            elif array.endswith("pool") and (change is reshape or (fixed and change is widen)):
                # less its last page, which no row has; or the caller's tensor alone was given another shape
                assert torch.equal(run(subject), expected), what
            else:
                refused(subject, run, {"lengths": "seq_lens", "v_pool": "pool"}.get(array, array), what)
                if not fixed:
                    arrays[array].data = second[array].clone(memory_format=torch.contiguous_format)
                    assert torch.equal(run(subject), changed), f"{what}, and mended"
            changes += 1
    return changes


def refused(subject, run, array, what):
    for _ in range(2):
        try:
            run(subject)
        except rt.errors.RooftileError as error:
            assert array in str(error), f"{what}: {error}"
        else:
            raise AssertionError(f"{what}: accepted")


if __name__ == "__main__":
    subjects = sys.argv[1:]
    if "--no-table" in subjects:
        subjects.remove("--no-table")
        for tensor in (torch.Tensor, nn.torch.nn.Parameter):
            if "__dlpack_c_exchange_api__" in vars(tensor):
                del tensor.__dlpack_c_exchange_api__
        assert not hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
    with torch.no_grad():
        print(sum(map(check, subjects)))
