# SPDX-License-Identifier: Apache-2.0
"""What makes or converts caches and weights: every argument x every fault is a typed error that begins with the op and
names the argument, and the next good call works."""

import numpy as np
import pytest
import rooftile as rt
import torch
from rooftile import _C
from rooftile.errors import DeviceError, RooftileError
from rooftile.nn import W4Linear, W8Linear

torch.manual_seed(0)


class Strange:
    def __repr__(self):
        return "Strange()"


NO_ARRAYS = [None, "x", b"xx", 3, 1.5, [1], Strange()]
NO_INTEGERS = ["x", 1.5, float("nan"), [1], (1, 2), Strange(), np.zeros(2), torch.zeros(2)]
SIZE = [None, *NO_INTEGERS, -1, 2**31, 2**70]
POSITIVE = [*SIZE, 0]
NAME = ["", "x", 3, 1.5, [1], Strange(), np.zeros(2)]
DEVICE = ["abacus", "cuda:99", "cpu:x:y", 1.5, [1], Strange()]


def arrays(good, *dtypes):
    """What may not stand where this tensor is: other dtypes, ranks and sizes, and what is no array."""
    yield from NO_ARRAYS
    for dtype in (torch.float64, torch.int64, torch.bool, torch.int8):
        yield good.to(dtype)
    yield torch.zeros((), dtype=good.dtype)
    yield good[None]
    yield good.flatten()[:1]
    yield torch.zeros([n + 1 for n in good.shape], dtype=good.dtype)
    yield good.to("meta")


CACHE = {
    "batch": 2,
    "capacity": 64,
    "kv_heads": 2,
    "head_dim": 64,
    "format": "int8",
    "dtype": "float16",
    "device": "cpu",
}
CACHE_FAULTS = {
    "batch": SIZE,
    "capacity": SIZE,
    "kv_heads": POSITIVE,
    "head_dim": POSITIVE,
    "format": [None, *NAME],
    "dtype": ["float64", "x", 3, 1.5, [1], Strange(), torch.int32],
    "device": DEVICE,
}
PAGED = {
    "num_pages": 4,
    "page_size": 32,
    "kv_heads": 2,
    "head_dim": 64,
    "max_rows": 2,
    "max_pages_per_row": 2,
    **{name: CACHE[name] for name in ("format", "dtype", "device")},
}
PAGED_FAULTS = {
    "num_pages": SIZE,
    "page_size": [*POSITIVE, 17, 256],
    "max_rows": SIZE,
    "max_pages_per_row": [*NO_INTEGERS, -1, 2**31, 2**26, 2**31 - 1],
    **{name: CACHE_FAULTS[name] for name in ("kv_heads", "head_dim", "format", "dtype", "device")},
}

TABLES = {
    "block_table": torch.arange(4, dtype=torch.int32).reshape(2, 2),
    "seq_lens": torch.zeros(2, dtype=torch.int32),
}
ELEMENT_VIEW = {
    "pool": torch.zeros(4, 2, 32, 2, 64, dtype=torch.float16),
    **TABLES,
    "format": "fp16",
    "dtype": "float16",
    "page_size": 32,
    "head_dim": 64,
    "layout": "NHD",
    "ring": None,
}
RING = (*(torch.zeros(2, 2, 64, 64, dtype=torch.float16) for _ in range(2)), torch.zeros(2, dtype=torch.int32))
KIVI_VIEW = {
    **ELEMENT_VIEW,
    "pool": torch.zeros(4, 2, _C.kv_block_bytes("int4-kivi", 32, 64), dtype=torch.uint8),
    "format": "int4-kivi",
    "ring": RING,
}
VIEW_FAULTS = {
    "block_table": [x for x in arrays(TABLES["block_table"]) if getattr(x, "shape", None) != (3, 3)],  # larger is right
    "seq_lens": arrays(TABLES["seq_lens"]),
    "format": [None, *NAME],
    "dtype": ["float64", "x", 3],
    "layout": [None, *NAME],
}
VIEW_SIZES = {"page_size": [*NO_INTEGERS, -1, 0, 16, 2**31, 2**70], "head_dim": [*NO_INTEGERS, -1, 0, 48, 2**31, 2**70]}


def kivi_rings():
    for place, good in enumerate(RING):
        for bad in arrays(good):
            yield (*RING[:place], bad, *RING[place + 1 :])
    yield from (RING[:2], 3, "ring", [None] * 3)


def pools(good):
    yield from (bad for bad in arrays(good))
    yield (good[:, 0],)


W4 = rt.W4Weight.quantize(torch.randn(16, 64), group_size=32, zeros="minima")
W8 = rt.W8Weight.from_canonical(
    torch.zeros(16, 64, dtype=torch.uint8), torch.ones(16, 2).half(), torch.ones(16, 2, dtype=torch.uint8)
)
PERM = torch.arange(64, dtype=torch.int32)
KERNEL_FORM = {"codes": W4.codes, "scales": W4.scales, "offsets": W4.offsets, **W4.layout, "perm": PERM}
SHAPES = [None, 3, 1.5, "xy", (16,), (16, 64, 1), (16, 65), (16, 0), (-1, 64), (2**62, 64), (16, 2**40), (16.5, 64)]
SHAPES += [(float("inf"), 64), (None, 64), ("16", "64"), Strange(), (17, 64), (16, 96)]
GROUP = [None, "x", 1.5, [1], Strange(), -1, 0, 16, 48, 2**31, 2**70]
KERNEL_FAULTS = {
    "codes": list(arrays(W4.codes)),
    "scales": list(arrays(W4.scales)),
    "offsets": list(arrays(W4.offsets)),
    "shape": SHAPES,
    "group_size": GROUP,
    "kind": [None, "symmetric", *NAME],
    "scale_dtype": [None, "float32", *NAME],
    "perm": [x for x in arrays(PERM) if x is not None],
}
LINEAR = {"in_features": 64, "out_features": 16, "group_size": 32, "kind": "symmetric", "scale_dtype": "float16"}
LINEAR |= {"device": "cpu", "dtype": torch.float16}
LINEAR_FAULTS = {
    "in_features": [*POSITIVE, 63],
    "out_features": SIZE,
    "group_size": GROUP,
    "kind": [None, *NAME],
    "scale_dtype": [None, "float32", *NAME],
    "device": DEVICE,
    "dtype": ["float16", 3, 1.5, [1], np.float16],
}

FILLED = rt.KVCache(2, 64, 2, 64, format="int8", dtype="float16")
FILLED.append(*torch.randn(2, 2, 10, 2, 64).half())
ROWS = ["x", 3, 1.5, ["x"], [1.5], [2], [-1], [2**31], [2**70], Strange(), torch.zeros(1), torch.zeros(1, 1).int()]
ROWS += [torch.zeros(1, dtype=torch.int64), np.zeros(1)]


def model():
    return torch.nn.Sequential(torch.nn.Linear(64, 16))


# op: (call, good arguments, argument -> bad values)
OPS = {
    "KVCache": (rt.KVCache, CACHE, CACHE_FAULTS),
    "ModelKVCache": (
        rt.ModelKVCache,
        {"num_layers": 2, **CACHE},
        {"num_layers": SIZE, **CACHE_FAULTS, "format": [*CACHE_FAULTS["format"], {}, {5: "int8"}, {"default": "x"}]},
    ),
    "PagedKVCache": (rt.PagedKVCache, PAGED, PAGED_FAULTS),
    "PagedKVCache.view": (
        rt.PagedKVCache.view,
        ELEMENT_VIEW,
        {"pool": pools(ELEMENT_VIEW["pool"]), **VIEW_FAULTS, **VIEW_SIZES, "ring": [RING, 3]},
    ),
    "PagedKVCache.view kivi": (
        rt.PagedKVCache.view,
        KIVI_VIEW,
        {"pool": arrays(KIVI_VIEW["pool"]), **VIEW_SIZES, "ring": kivi_rings()},
    ),
    "select": (FILLED.select, {"rows": [0], "capacity": 64}, {"rows": ROWS, "capacity": [*NO_INTEGERS, -1, 2**31]}),
    "to": (FILLED.to, {"device": "cpu"}, {"device": DEVICE}),
    "dequantize": (
        FILLED.dequantize,
        {"row": 0, "at": 9},
        {"row": [*NO_INTEGERS, 2, -1], "at": [*NO_INTEGERS, -1, 99]},
    ),
    "dump": (FILLED.dump, {"row": 0}, {"row": [None, *NO_INTEGERS, 2, -1]}),
    "W4Weight": (rt.W4Weight, KERNEL_FORM, KERNEL_FAULTS),
    "W8Weight": (
        rt.W8Weight,
        {"codes": W8.codes, "scales": W8.scales, "offsets": W8.offsets, **W8.layout, "perm": PERM},
        KERNEL_FAULTS
        | {"kind": [None, "symmetric", "minima", *NAME]}
        | {name: list(arrays(getattr(W8, name))) for name in ("codes", "scales", "offsets")},
    ),
    "W4Weight.from_gguf": (
        rt.W4Weight.from_gguf,
        {"data": bytes(16 * 2 * 18), "ggml_type": "Q4_0", "shape": (16, 64)},
        {
            "data": [None, "x", 3, 1.5, [1], Strange(), b"", bytes(16 * 2 * 18 + 1), torch.zeros(16 * 2 * 18)],
            "ggml_type": [None, "", "Q4_K", 99, 1.5, [1], Strange()],
            "shape": SHAPES,
        },
    ),
    "W4Weight.dequantize": (W4.dequantize, {"dtype": "float32"}, {"dtype": [*NAME, None, torch.zeros(2), torch.int32]}),
    "W4Weight.to": (W4.to, {"device": "cpu"}, {"device": [None, *DEVICE, torch.zeros(2)]}),
    "W4Linear": (W4Linear, LINEAR, LINEAR_FAULTS),
    "W8Linear": (W8Linear, LINEAR, LINEAR_FAULTS),
    "W4Linear.from_weight": (
        W4Linear.from_weight,
        {"weight": W4, "bias": torch.zeros(16)},
        {
            "weight": [*NO_ARRAYS, torch.zeros(16, 64)],
            "bias": [x for x in NO_ARRAYS if x is not None] + [torch.zeros(17)],
        },
    ),
    "quantize_": (
        lambda model=None, **options: rt.quantize_(model, progress=False, **options),
        {"config": rt.W4A16(32), "skip": ()},
        {
            "model": [None, 3, "x", Strange()],
            "config": [3, "x", Strange()],
            "skip": [None, 3, 1.5, [1], [None], Strange()],
        },
    ),
    "W8A16": (rt.W8A16, {"group_size": 32}, {"group_size": [None, "x", 1.5, [1], True, 0, -1]}),
    "W4A16": (
        rt.W4A16,
        {"group_size": 32, "zeros": "minima"},
        {"group_size": [None, "x", 1.5, [1], True, 0, -1], "zeros": [None, "x", 3, [1]]},
    ),
}
# An argument that the others are measured against may be right and one of those wrong.
MEASURE = {
    "pool": ("page_size", "head_dim", "kv_heads", "v_pool"),
    "page_size": ("pool",),
    "head_dim": ("pool", "ring_k"),
    "seq_lens": ("lengths",),
    "block_table": ("seq_lens", "lengths"),
    "format": ("pool", "dtype"),
    "dtype": ("pool", "ring_k", "format"),
    "ring": ("ring_k", "ring_v", "raw_from"),
    "shape": ("codes", "K", "perm", "data", "group_size"),
    "group_size": ("codes", "scales"),
    "kind": ("codes", "offsets"),
    "scale_dtype": ("scales",),
}
CASES = [
    pytest.param(op, argument, list(bad), id=f"{op}-{argument}")
    for op, (_, _, faults) in OPS.items()
    for argument, bad in faults.items()
]


@pytest.mark.parametrize(("op", "argument", "faults"), CASES)
def test_is_refused_by_name(op, argument, faults, count_bad_input):
    call, good, _ = OPS[op]
    if op == "quantize_":
        good = {"model": model(), **good}
    begins = (
        op.split()[0],
        *{"ModelKVCache": ["KVCache"], "W4Linear": ["W4Weight"], "W8Linear": ["W8Weight"]}.get(op, []),
    )  # made of those
    wrong = []
    for bad in faults:
        if bad is good[argument] or (
            type(bad) is type(good[argument]) and isinstance(bad, str) and bad == good[argument]
        ):
            continue
        count_bad_input(1)
        what = f"{type(bad).__name__} {bad!r:.60}"
        try:
            call(**{**good, argument: bad})
            wrong.append(f"{what}: accepted")
        except RooftileError as e:
            text = str(e)
            if not text.startswith(begins) or not any(name in text for name in (argument, *MEASURE.get(argument, ()))):
                wrong.append(f"{what}: {text}")
        except Exception as e:
            wrong.append(f"{what}: {type(e).__name__} {str(e)[:100]}")
    assert wrong == [], "\n".join(wrong)
    call(**good)


@pytest.mark.parametrize("format", ["fp32", "int8", "int4-kivi"])
@pytest.mark.parametrize("head_dim", [64, 2**31 - 1])
def test_more_than_memory_is_a_typed_error(format, head_dim):
    """2**60 bytes and, with the larger head_dim, more than a size can say."""
    for call, sizes in ((rt.KVCache, (2**20, 2**20)), (rt.PagedKVCache, (2**30, 32))):
        rows = {"max_rows": 2, "max_pages_per_row": 2} if call is rt.PagedKVCache else {}
        with pytest.raises((DeviceError, rt.ArgumentError, rt.NotSupportedError), match=f"{call.__name__}: .*head_dim"):
            call(*sizes, 2**20, head_dim, format=format, **rows)


def test_a_shape_whose_bytes_overflow_is_refused():
    nothing = torch.zeros(0, dtype=torch.uint8)
    with pytest.raises(rt.ArgumentError, match="W4Weight: shape must be"):
        rt.W4Weight(nothing, nothing, None, shape=(2**62, 64), group_size=32, kind="symmetric", scale_dtype="float16")


def test_true_is_row_one():
    assert torch.equal(FILLED.dequantize(True)[0], FILLED.dequantize(1)[0])
