# SPDX-License-Identifier: Apache-2.0
"""`torch.ops.rooftile.<op>`: every functional op for torch.compile, torch.export and the dispatcher.

Imported when torch.compile first meets an op, or by hand. The public functions call these ops while they are traced
and the kernels directly otherwise, so eager calls do not pay for the dispatcher. Each op comes twice: `<op>`, which
returns new contiguous tensors, and `<op>_out`, which writes the tensors it is given. There is no autograd: inference
only.
"""

from dataclasses import dataclass

import torch

from rooftile import fused, gemm
from rooftile.errors import NotSupportedError

_library = torch.library.Library("rooftile", "DEF")


@dataclass(frozen=True)
class _Op:
    inputs: str  # schema of the arguments
    outputs: tuple  # names of the function's output arguments
    function: object  # the public function
    fake: object  # (inputs) -> one shape per output; its dtype and device are the first argument's


def _like_first(count=1):
    return lambda x, *_: [x.shape] * count


def _w4a16_matmul(
    x, codes, scales, offsets, perm, n, k, group_size, kind, scale_dtype, bias, activation, residual, **options
):
    layout = {"shape": (n, k), "group_size": group_size, "kind": kind, "scale_dtype": scale_dtype}
    w = gemm.W4Weight(codes, scales, offsets, perm=perm, **layout)
    return gemm.w4a16_matmul(x, w, bias=bias, activation=activation, residual=residual, **options)


OPS = {
    "rms_norm": _Op("Tensor x, Tensor? weight, float eps", ("out",), fused.rms_norm, _like_first()),
    "add_rms_norm": _Op(
        "Tensor x, Tensor residual, Tensor? weight, float eps",
        ("out", "residual_out"),
        fused.add_rms_norm,
        _like_first(2),
    ),
    "layer_norm": _Op("Tensor x, Tensor? weight, Tensor? bias, float eps", ("out",), fused.layer_norm, _like_first()),
    "add_layer_norm": _Op(
        "Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps",
        ("out", "residual_out"),
        fused.add_layer_norm,
        _like_first(2),
    ),
    "rope": _Op(
        "Tensor q, Tensor k, Tensor cos, Tensor sin, Tensor positions",
        ("q_out", "k_out"),
        fused.rope,
        lambda q, k, *_: [q.shape, k.shape],
    ),
    "silu_mul": _Op("Tensor gate_up", ("out",), fused.silu_mul, lambda x: [(*x.shape[:-1], x.shape[-1] // 2)]),
    "gelu_mul": _Op(
        "Tensor gate_up, str approximate",
        ("out",),
        lambda x, approximate, **options: fused.gelu_mul(x, approximate=approximate, **options),
        lambda x, _: [(*x.shape[:-1], x.shape[-1] // 2)],
    ),
    "softmax": _Op("Tensor x", ("out",), fused.softmax, _like_first()),
    "w4a16_matmul": _Op(
        "Tensor x, Tensor codes, Tensor scales, Tensor? offsets, Tensor? perm, int n, int k, int group_size, str kind, "
        "str scale_dtype, Tensor? bias, str? activation, Tensor? residual",
        ("out",),
        _w4a16_matmul,
        lambda x, codes, scales, offsets, perm, n, *_: [(*x.shape[:-1], n)],
    ),
}


def _register(name, op):
    single = len(op.outputs) == 1
    returns = "Tensor" if single else "(" + ", ".join(["Tensor"] * len(op.outputs)) + ")"
    written = ", ".join(f"Tensor({letter}!) {out}" for letter, out in zip("abcdef", op.outputs, strict=False))
    _library.define(f"{name}({op.inputs}, *, str? plan=None) -> {returns}")
    _library.define(f"{name}_out({op.inputs}, *, {written}, str? plan=None) -> ()")

    def run(*inputs, plan=None):
        return op.function(*inputs, plan=plan)

    def run_out(*inputs, plan=None, **outputs):
        op.function(*inputs, plan=plan, **outputs)

    def fake(*inputs, plan=None):
        results = tuple(inputs[0].new_empty(shape) for shape in op.fake(*inputs))
        return results[0] if single else results

    def fake_out(*inputs, plan=None, **outputs):
        return None

    for suffix, implementation, stand_in in (("", run, fake), ("_out", run_out, fake_out)):
        _library.impl(name + suffix, implementation, "CPU")
        torch.library.register_fake(f"rooftile::{name}{suffix}", stand_in, lib=_library)


for _name, _op in OPS.items():
    _register(_name, _op)


def call(name, inputs, outputs, stream, plan):
    """The op as the public function calls it while it is traced. outputs: given tensors, or None for new ones."""
    if stream is not None:
        raise NotSupportedError(f"{name}: stream cannot be given under torch.compile; it uses torch's current stream")
    if all(out is None for out in outputs):
        return getattr(torch.ops.rooftile, name)(*inputs, plan=plan)
    if any(out is None for out in outputs):
        raise NotSupportedError(f"{name}: under torch.compile give all outputs or none")
    written = dict(zip(OPS[name].outputs, outputs, strict=True))
    getattr(torch.ops.rooftile, name + "_out")(*inputs, plan=plan, **written)
    return outputs[0] if len(outputs) == 1 else outputs
