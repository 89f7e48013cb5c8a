# SPDX-License-Identifier: Apache-2.0
"""Rounding a whole model's linear layers in place."""

import fnmatch
from collections.abc import Collection
from dataclasses import dataclass

from rooftile.errors import ArgumentError, ArgumentTypeError
from rooftile.gemm import WEIGHTS, names_of

_DTYPES = ("float32", "float16", "bfloat16")


class _Rounding:
    """What W4A16 and W8A16 share. bits: of a weight; _zeros: what `zeros` may be."""

    def __post_init__(self):
        name = type(self).__name__
        if self.zeros not in self._zeros:
            raise ArgumentError(f"{name}: zeros must be {names_of(self._zeros)}, got {self.zeros!r}")
        if isinstance(self.group_size, bool) or not isinstance(self.group_size, int) or self.group_size <= 0:
            raise ArgumentError(f"{name}: group_size must be 32, 64, 128 or K, got {self.group_size!r}")

    def check(self, where, shape):
        """Raises ArgumentError, beginning with `where`, for a weight [N, K] that cannot be rounded so."""
        from rooftile import _C

        try:
            _C.w4_sizes(where, "weight", *shape, self.bits, self.group_size, self.zeros)
        except ArgumentError as e:
            raise ArgumentError(f"{e}; choose another group_size or skip the layer") from None

    def weight_of(self, array):
        """The W4Weight or W8Weight of an array [N, K]."""
        return WEIGHTS[self.bits].quantize(array, group_size=self.group_size, zeros=self.zeros)

    def module_of(self, linear):
        """The W4Linear or W8Linear in an nn.Linear's place."""
        from rooftile import nn

        kind = nn.LINEARS[self.bits]
        return kind.from_linear(linear, group_size=self.group_size, zeros=self.zeros)


@dataclass(frozen=True)
class W4A16(_Rounding):
    """4-bit weights, 16-bit activations. zeros: "symmetric" or "minima"; see W4Weight.quantize."""

    group_size: int = 128
    zeros: str = "symmetric"
    bits, _zeros = 4, ("symmetric", "minima")


@dataclass(frozen=True)
class W8A16(_Rounding):
    """8-bit weights, 16-bit activations, symmetric; see W8Weight.quantize."""

    group_size: int = 128
    bits, _zeros, zeros = 8, ("symmetric",), "symmetric"


def rounding_of(op, bits, group_size, zeros):
    """The W4A16 or W8A16 of what a caller of `op` gives."""
    if type(bits) is not int or bits not in WEIGHTS:
        raise ArgumentError(f"{op}: bits must be {' or '.join(map(str, WEIGHTS))}, got {bits!r}")
    if bits == 4:
        return W4A16(group_size, zeros)
    if zeros != W8A16.zeros:
        raise ArgumentError(f"{op}: zeros must be {W8A16.zeros!r} with 8 bits, got {zeros!r}")
    return W8A16(group_size)


def quantize_(model, config=None, *, skip=(), progress=True):
    """Replaces every nn.Linear but the output head, in place, by one rounded to nearest. Returns how many.

    model: a torch module. config: a W4A16 (default: group 128, symmetric), which makes modules of rooftile.nn.W4Linear,
    or a W8A16: W8Linear. skip: names or shell patterns of modules to
    leave as they are, such as "*.mlp.down_proj". Left alone always: `lm_head`, the module of
    `model.get_output_embeddings()`, any layer that shares its weight with another module, subclasses of nn.Linear
    (LoRA layers, `MultiheadAttention.out_proj`) and layers whose weight is computed (parametrised, pruned). progress:
    a bar on stderr, or lines where that is no terminal.

    All layers are checked before the first is replaced, and errors name the layer: ArgumentError where in_features is
    not a multiple of group_size or the weight is on the meta device, ArgumentTypeError where the weight is not float32,
    float16 or bfloat16.
    """
    import torch

    from rooftile._progress import progress_bar

    if not isinstance(model, torch.nn.Module):
        raise ArgumentTypeError(f"quantize_: model must be a torch.nn.Module, got {type(model).__name__}")
    config = W4A16() if config is None else config
    if not isinstance(config, _Rounding):
        raise ArgumentTypeError(f"quantize_: config must be a rooftile.W4A16 or W8A16, got {type(config).__name__}")
    layers = linear_layers("quantize_", model, skip)
    for name, layer in layers:
        config.check(f"quantize_: {name}", layer.weight.shape)
        if layer.weight.device.type == "meta":
            raise ArgumentError(f"quantize_: {name}: weight has no memory behind it (meta device)")
        dtype = str(layer.weight.dtype).removeprefix("torch.")
        if dtype not in _DTYPES:
            raise ArgumentTypeError(f"quantize_: {name}: weight must be {', '.join(_DTYPES)}, got {dtype}")
    with progress_bar("Quantising", len(layers), show=progress) as advance:
        for name, layer in layers:
            new = config.module_of(layer)
            new.train(layer.training)
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, new)
            advance()
    return len(layers)


def name_patterns(op, skip):
    """`skip` as a list of str. op: whose name errors begin with."""
    patterns = (skip,) if isinstance(skip, str) else skip
    if not (isinstance(patterns, Collection) and all(isinstance(p, str) for p in patterns)):
        raise ArgumentTypeError(f"{op}: skip must be names or patterns of modules, got {skip!r}")
    return list(patterns)


def linear_layers(op, model, skip):
    """[(name, nn.Linear)] of what quantize_ would replace. op: whose name errors begin with."""
    import torch

    patterns = name_patterns(op, skip)

    head = getattr(model, "get_output_embeddings", lambda: None)()
    modules = dict(model.named_modules())
    holders = {}  # how many modules hold each weight
    for module in modules.values():
        for parameter in module.parameters(recurse=False):
            holders[parameter] = holders.get(parameter, 0) + 1
    if isinstance(model, torch.nn.Linear):
        raise ArgumentError(
            f"{op}: model is itself an nn.Linear, which cannot be replaced in place; use W4Linear.from_linear"
        )
    return [
        (name, module)
        for name, module in modules.items()
        if type(module) is torch.nn.Linear  # what a subclass adds would be lost
        and module._parameters.get("weight") is not None
        and module is not head
        and name.rpartition(".")[2] != "lm_head"
        and holders[module.weight] == 1
        and not any(fnmatch.fnmatchcase(name, p) for p in patterns)
    ]
