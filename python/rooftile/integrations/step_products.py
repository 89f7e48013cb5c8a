# SPDX-License-Identifier: Apache-2.0
"""Products of a decode step. Layers that read the same input, and whose weights lie side by side in memory, are one."""

import contextlib
import dataclasses
import functools
import itertools
import mmap

import torch

from rooftile import _C
from rooftile._arrays import workspace
from rooftile.errors import NotSupportedError
from rooftile.gemm import ARRAYS
from rooftile.nn import PackedLinear

_LINE, _MEMORY = 64, 32 << 20  # bytes of a cache line, and at least of a memory of weights
_MATMULS = {4: _C.w4a16_matmul, 8: _C.w8a16_matmul}


class KeptWorkspace:
    """`workspace` of bindings for calls that run one after another, and for CUDA graphs of them: its memory stays."""

    keeps_memory = True  # else bindings ask torch, without Python, for memory of one call

    def __init__(self):
        self._arrays = []  # the last one is the largest; graphs may have the others

    def __call__(self, op, like, size):
        if not self._arrays or self._arrays[-1].nbytes < size:
            self._arrays.append(workspace(op, like, size))
        return self._arrays[-1]


@dataclasses.dataclass
class Product:
    """x W^T + bias of one nn.Linear, W4Linear or W8Linear.

    arrays: (weight [N, K],) or the packed arrays. weight: None or the packed weight. bias: [N] or None.
    batch_invariant: of a packed one. workspace: as of the bindings.
    """

    arrays: tuple
    weight: object
    bias: object
    batch_invariant: bool = False
    workspace: object = workspace

    @classmethod
    def of(cls, linear, **options):
        if isinstance(linear, PackedLinear):
            arrays = tuple(linear._buffers.get(name) for name in ARRAYS)
            return cls(arrays, linear.weight, linear.bias, linear.batch_invariant, **options)
        if type(linear) is torch.nn.Linear:
            return cls((linear.weight,), None, linear.bias, **options)
        raise NotSupportedError(
            f"model: no step program of a {type(linear).__name__}; expected nn.Linear, W4Linear or W8Linear"
        )

    @property
    def packed(self):
        return self.weight is not None

    def __call__(self, x, out, activation=None, residual=None):
        """What computes it when it is called: out [batch, N] of x [batch, K]."""
        if self.packed:
            function, weight = _MATMULS[self.weight.BITS], self.weight._handle
            rest = (self.batch_invariant, self.workspace, None, None)
        else:
            function, weight, rest = _C.linear, self.arrays[0], (self.workspace, None, None)
        call = functools.partial(function, x, weight, self.bias, activation, residual, out, *rest)
        call.weight_bytes = sum(array.nbytes for array in self.arrays if array is not None)  # for benchmarks
        return call


def joined(products):
    """One Product of several with the same input; None where they are of several kinds or lie apart."""
    if not _alike(products):
        return None
    first = products[0]
    arrays = [_side_by_side(of_each) for of_each in zip(*(p.arrays for p in products), strict=True)]
    bias = _side_by_side([p.bias for p in products])
    if any(
        (array is None) != (own is None)
        for array, own in zip((*arrays, bias), (*first.arrays, first.bias), strict=True)
    ):
        return None
    weight = None
    if first.packed:
        n = sum(p.weight.shape[0] for p in products)
        layout = {**first.weight.layout, "shape": (n, first.weight.shape[1])}
        weight = type(first.weight)(*arrays[:3], **layout)
    return Product(tuple(arrays), weight, bias, first.batch_invariant, first.workspace)


def put_side_by_side(linears):
    """Moves the weights of layers with the same input to memory where they are one product, if they can be one.

    Weights that other processes share stay where they are.
    """
    products = [Product.of(linear) for linear in linears]
    if not _alike(products) or joined(products) is not None:
        return
    if any(array is not None and _shared(array) for p in products for array in p.arrays):
        return
    for of_each in zip(*((*p.arrays, p.bias) for p in products), strict=True):
        if of_each[0] is not None:
            with torch.inference_mode(any(array.is_inference() for array in of_each)):
                together = torch.cat([array.detach() for array in of_each])
            for array, part in zip(of_each, together.split(list(map(len, of_each))), strict=True):
                array.data = part


def put_in_step_order(groups):
    """Moves packed weights on the CPU into memories of huge pages, in the order in which a step reads them.

    groups: lists of layers, each of one product. A memory has whole groups, and 32 MiB or more but for the last.
    Weights that other processes share stay where they are, and so do all from where memory cannot be mapped.
    """
    sets, seen = [], set()  # of every group: codes of its layers, scales, ...
    for group in groups:
        packed = [linear for linear in group if isinstance(linear, PackedLinear) and id(linear) not in seen]
        seen.update(map(id, packed))
        of_group = zip(*(Product.of(linear).arrays for linear in packed), strict=True)
        sets.append([[array for array in of_each if array is not None] for of_each in of_group])
    while sets:
        together = []
        while sets and sum(_bytes(of_each) for of_each in together) < _MEMORY:
            together += sets.pop(0)
        arrays = [array for of_each in together for array in of_each]
        if not _movable(arrays) or _in_order(arrays):
            continue
        ends = list(itertools.accumulate(-(-_bytes(of_each) // _LINE) * _LINE for of_each in together))
        try:
            memory = _huge_pages(ends[-1])
        except OSError:
            return
        with torch.inference_mode(arrays[0].is_inference()):
            memory = torch.frombuffer(memory, dtype=torch.uint8)
            for begin, of_each in zip((0, *ends), together, strict=False):
                for array in of_each:
                    part = memory[begin : begin + array.nbytes].view(array.dtype).view(array.shape)
                    array.data = part.copy_(array.detach())
                    begin += array.nbytes


def _bytes(arrays):
    return sum(array.nbytes for array in arrays)


def _movable(arrays):
    one_kind = len({array.is_inference() for array in arrays}) == 1
    return one_kind and all(array.device.type == "cpu" and not _shared(array) for array in arrays)


def _shared(array):
    """Whether other processes may have the memory, too. Torch says so of all memory of a GPU."""
    return array.device.type == "cpu" and array.is_shared()


def _in_order(arrays):
    """Whether arrays lie in one memory, in this order."""
    places = [array.data_ptr() for array in arrays]
    return places == sorted(places) and len({array.untyped_storage().data_ptr() for array in arrays}) == 1


def _huge_pages(size):
    """A buffer of so many bytes, in huge pages where the system has them. OSError where there is no memory."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return mmap.mmap(-1, size)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # of a system without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _alike(products):
    """Whether the layers could be one product, if their memory allowed it."""
    first = products[0]
    if any(_form(p) != _form(first) for p in products):
        return False
    if first.packed:  # a tile of packed rows belongs to one layer; act-order orders one layer's columns
        whole = all(p.weight.shape[0] % _C.w4_tile_rows == 0 for p in products)
        return whole and first.weight.perm is None
    return all(p.arrays[0].is_contiguous() for p in products)


def _form(product):
    """What layers have in common that can be one product."""
    arrays = [array if array is None else (array.dtype, array.device) for array in (*product.arrays, product.bias)]
    if not product.packed:
        return arrays, product.arrays[0].shape[1]
    layout = {**product.weight.layout, "shape": product.weight.shape[1]}
    return arrays, type(product.weight), layout, product.batch_invariant


def _side_by_side(arrays):
    """One array over several that lie behind each other in one memory, or None."""
    first = arrays[0]
    if first is None:
        return None
    end, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    for array in arrays:
        if array.data_ptr() != end or array.untyped_storage().data_ptr() != storage:
            return None
        end += array.nbytes
    shape = (sum(map(len, arrays)), *first.shape[1:])
    return first.detach().as_strided(shape, first.stride(), first.storage_offset())
