# SPDX-License-Identifier: Apache-2.0
"""Named shapes, exactly representable data and guarded memory for the tests of every op."""

import mmap

import numpy as np
import oracle
import pytest
import torch
from rooftile import _C

DTYPES = ("float32", "float16", "bfloat16")
PLANS = tuple(_C.cpu_variants().split(", "))  # every CPU variant this machine can run, "reference" among them

# (query heads, KV heads, head_dim): real models, odd ratios, head_dims on both sides of every vector width.
HEADS = {
    "smollm2": (9, 3, 64),
    "llama3": (8, 2, 128),
    "qwen2.5": (12, 2, 128),
    "gemma": (4, 1, 256),
    "mha": (4, 4, 64),
    "mqa": (5, 1, 32),
    "odd": (6, 2, 40),
    "odder": (3, 3, 59),
    "phi": (4, 2, 96),
    "d80": (2, 1, 80),
    "tiny": (1, 1, 1),
}
# Token counts on both sides of 16, of groups (32), of pages and ring (64) and of chunks.
LENGTHS = (0, 1, 2, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 95, 96, 97, 127, 128, 129, 255, 256, 257, 511, 512, 513)
# Hidden sizes on both sides of vector widths, and real ones.
HIDDEN = (1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 255, 257, 576, 896, 1536, 2048)
# (N, K) of weights; K = 576 and N = 49 are not multiples of a tile.
WEIGHTS = ((16, 64), (16, 128), (49, 64), (8, 576), (192, 576), (33, 320), (576, 1536), (1, 32), (7, 96), (128, 4096))


def begins_anew():
    """Skips a test where this transformers, before it mended that, gives Phi-3 the last token alone when its text
    becomes longer than the short rotation is for."""
    import inspect

    import transformers

    prepare = transformers.Phi3ForCausalLM.prepare_inputs_for_generation
    if "next_sequence_length" not in inspect.getsource(prepare):
        pytest.skip("transformers gives Phi-3 a token alone where its rotation changes")


def devices():
    gpu = torch.cuda.is_available() and not _C.gpu_backend().startswith("none")
    return ("cpu", "cuda") if gpu else ("cpu",)


def torch_dtype(dtype):
    return getattr(torch, dtype)


def generator(*key):
    """A random generator that depends on the key alone: tests stay the same whatever runs before them."""
    return np.random.default_rng([sum(b * 31**i for i, b in enumerate(str(part).encode())) % 2**63 for part in key])


def values(shape, dtype, *key, spread=1.0, mean=0.0):
    """Normal values that `dtype` can hold, float64."""
    return oracle.round_to(mean + spread * generator("values", *key).standard_normal(shape), dtype)


def exact_values(shape, *key, largest=3, zeros=0.5):
    """Small integers, many of them 0: products and sums of a few thousand are exact in float32."""
    rng = generator("exact", *key)
    whole = rng.integers(-largest, largest + 1, shape)
    return np.where(rng.random(shape) < zeros, 0, whole).astype(np.float64)


def powers_of_two(shape, *key, lowest=-3, highest=3):
    """Signed powers of two: multiplying by them is exact."""
    rng = generator("powers", *key)
    return np.ldexp(rng.choice([-1.0, 1.0], shape), rng.integers(lowest, highest + 1, shape))


def tensor(array, dtype, device="cpu"):
    """A torch tensor of `dtype` from float64 values that it can hold."""
    t = torch.from_numpy(np.array(array, np.float64)).to(torch_dtype(dtype))
    return t.to(device)


def numpy_array(array, dtype):
    """A NumPy array of `dtype` (bfloat16 as ml_dtypes has it)."""
    if dtype == "bfloat16":
        import ml_dtypes

        return np.asarray(array, np.float64).astype(np.float32).astype(ml_dtypes.bfloat16)
    return np.asarray(array, np.float64).astype(dtype)


class Guarded:
    """A tensor inside a larger buffer whose bytes, inside and around, are poison (0xFF: NaN in every float type).

    .tensor is the view to hand out. `check_margins()` fails if a byte outside its elements changed, `check_untouched()`
    if any byte did. strides: in elements, for a view with holes; default contiguous.
    """

    MARGIN = 512  # elements on either side

    def __init__(self, shape, dtype, device="cpu", strides=None, values=None):
        dtype = torch_dtype(dtype) if isinstance(dtype, str) else dtype
        shape = tuple(shape)
        if strides is None:
            strides = tuple(int(np.prod(shape[i + 1 :], dtype=np.int64)) for i in range(len(shape)))
        size = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        itemsize = torch.empty((), dtype=dtype).element_size()
        self.bytes = torch.full(((2 * self.MARGIN + size) * itemsize,), 0xFF, dtype=torch.uint8, device=device)
        self.tensor = self.bytes.view(dtype).as_strided(shape, strides, self.MARGIN)
        mine = torch.zeros(2 * self.MARGIN + size, dtype=torch.bool, device=device)
        mine.as_strided(shape, strides, self.MARGIN).fill_(True)
        self.mine = mine.repeat_interleave(itemsize)
        if values is not None:
            self.tensor.copy_(values)
        self.before = self.bytes.clone()

    def check_margins(self, what="output"):
        changed = (self.bytes != self.before) & ~self.mine
        assert not changed.any(), (
            f"{what}: byte {int(changed.nonzero()[0]) - self._first()} relative to its start was written"
        )

    def check_untouched(self, what="output"):
        changed = self.bytes != self.before
        assert not changed.any(), (
            f"{what}: byte {int(changed.nonzero()[0]) - self._first()} relative to its start was written"
        )

    def check_written(self, what="output"):
        """Every element lost its poison."""
        left = (self.bytes == 0xFF) | ~self.mine
        whole = left.reshape(-1, self.tensor.element_size()).all(1) & self.mine[:: self.tensor.element_size()]
        assert not whole.any(), f"{what}: element at offset {int(whole.nonzero()[0]) - self.MARGIN} was not written"

    def _first(self):
        return self.MARGIN * self.tensor.element_size()


def guarded(shape, dtype, device="cpu", strides=None, values=None):
    return Guarded(shape, dtype, device, strides, values)


def far_apart(shape, dtype, strides):
    """A tensor of zeros on the CPU at any strides: only the pages of memory that somebody touches are ever made."""
    size = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    dtype = torch_dtype(dtype) if isinstance(dtype, str) else dtype
    # Shared, so that no limit of private memory counts it; MAP_NORESERVE of Linux has no name in Python 3.10
    flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | 0x4000
    memory = mmap.mmap(-1, size * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)


def linear(k=64, n=48, bias=True):
    """An nn.Linear whose numbers follow from its size."""
    torch.manual_seed(k * n)
    return torch.nn.Linear(k, n, bias=bias)
