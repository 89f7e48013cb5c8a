# SPDX-License-Identifier: Apache-2.0
"""`torch.ops.rooftile.<op>`: every functional op for torch.compile, torch.export and the dispatcher.

Imported when torch.compile first meets an op, or by hand. The public functions call these ops while they are traced
and the kernels directly otherwise, so eager calls do not pay for the dispatcher. Each op comes twice: `<op>`, which
returns new contiguous tensors, and `<op>_out`, which writes the tensors it is given. There is no autograd: inference
only.
"""

import torch
from torch.autograd import forward_ad

from rooftile._registry import CACHE, OPS, STORING
from rooftile.errors import ArgumentError, NotSupportedError

_library = torch.library.Library("rooftile", "DEF")


# A cache among the arguments of an op that stores: what an append writes. K and V of an element format are two views of
# one pool. Not the word of faults: what is written a graph may hand over as a clone, and the kernels' word is one place
# in memory. What a PagedKVCache gives besides, Cache._page_state, follows at the end.
_WRITTEN = ("pool", "k_pool", "v_pool", "block_table", "lengths", "ring_k", "ring_v", "raw_from")
_PAGES = "Tensor(i!)? users=None, Tensor(j!)? host_table=None, Tensor(k!)? host_lengths=None"


def _written_cache():
    parts = []
    for part in CACHE.split(", "):
        kind, name = part.split(" ")
        if name in _WRITTEN:
            letter = "abcdefgh"[_WRITTEN.index(name)]
            kind = kind.replace("Tensor", f"Tensor({letter}!)")
        parts.append(f"{kind} {name}")
    return ", ".join(parts)


def _register(name, op):
    single = len(op.outputs) == 1
    returns = "Tensor" if single else "(" + ", ".join(["Tensor"] * len(op.outputs)) + ")"
    dtypes = [dtype and getattr(torch, dtype) for dtype in op.dtypes]
    written = ", ".join(f"Tensor({letter}!) {out}" for letter, out in zip("abcdef", op.outputs, strict=False))
    _library.define(f"{name}({op.inputs}, *, str? plan=None) -> {returns}")
    _library.define(f"{name}_out({op.inputs}, *, {written}, str? plan=None) -> ()")

    def run(*inputs, plan=None):
        return op.function(*inputs, plan=plan)

    def run_out(*inputs, plan=None, **outputs):
        op.function(*inputs, plan=plan, **outputs)

    def fake(*inputs, plan=None):
        shapes = zip(op.shapes(*inputs), dtypes, strict=False)
        results = tuple(inputs[0].new_empty(shape, dtype=dtype) for shape, dtype in shapes)
        return results[0] if single else results

    def fake_out(*inputs, plan=None, **outputs):
        return None

    for suffix, implementation, stand_in in (("", run, fake), ("_out", run_out, fake_out)):
        for key in ("CPU", "CUDA"):
            _library.impl(name + suffix, implementation, key)
        torch.library.register_fake(f"rooftile::{name}{suffix}", stand_in, lib=_library)


for _name, _op in OPS.items():
    _register(_name, _op)


def _register_storing(name, op):
    arguments = f"{op.inputs}, {_written_cache()}, Tensor? rows, Tensor? counts, {_PAGES}, *, str? plan=None"
    _library.define(f"{name}({arguments}) -> {op.returns}")
    for device in ("CPU", "CUDA"):
        _library.impl(name, op.function, device)
    torch.library.register_fake(f"rooftile::{name}", lambda *inputs, plan=None: op.fake(*inputs), lib=_library)


for _name, _op in STORING.items():
    _register_storing(_name, _op)


def _names(schema):
    return [part.split("=")[0].split(" ")[-1] for part in schema.split(", ")]


_NAMES = {name: [*_names(op.inputs), *op.outputs] for name, op in OPS.items()}
_NAMES |= {name: _names(op.inputs) for name, op in STORING.items()}


def _refuse_grad(name, inputs):
    """As the bindings refuse them. A graph would detach what requires grad, and hides which tensors are dual."""
    if torch.is_grad_enabled():
        for argument, x in zip(_NAMES[name], inputs, strict=True):
            if isinstance(x, torch.Tensor) and x.requires_grad:
                raise ArgumentError(
                    f"{name}: {argument} requires grad; rooftile is for inference: call it under torch.no_grad() or "
                    "inference_mode()"
                )
    if forward_ad._current_level >= 0:
        raise NotSupportedError(f"{name}: cannot be compiled inside torch.autograd.forward_ad.dual_level()")


def store(name, inputs, cache, rows, counts, stream, plan):
    """append or rope_append as Cache.append and rope_append call them while they are traced."""
    if stream is not None:
        raise NotSupportedError(f"{name}: stream cannot be given under torch.compile; it uses torch's current stream")
    _refuse_grad(name, inputs)
    return getattr(torch.ops.rooftile, name)(*inputs, *cache._flat(), rows, counts, *cache._page_state, plan=plan)


def call(name, inputs, outputs, stream, plan):
    """The op as the public function calls it while it is traced. outputs: given tensors, or None for new ones."""
    if stream is not None:
        raise NotSupportedError(f"{name}: stream cannot be given under torch.compile; it uses torch's current stream")
    _refuse_grad(name, (*inputs, *outputs))
    if all(out is None for out in outputs):
        return getattr(torch.ops.rooftile, name)(*inputs, plan=plan)
    if any(out is None for out in outputs):
        raise NotSupportedError(f"{name}: under torch.compile give all outputs or none")
    written = dict(zip(OPS[name].outputs, outputs, strict=True))
    getattr(torch.ops.rooftile, name + "_out")(*inputs, plan=plan, **written)
    return outputs[0] if len(outputs) == 1 else outputs
