# SPDX-License-Identifier: Apache-2.0
"""Rounding a whole model's linear layers in place."""

import fnmatch
import math
import sys
from collections.abc import Collection
from dataclasses import dataclass, replace

from rooftile import _C
from rooftile._arrays import check_flag, must_be, shown
from rooftile._reasons import Reasons
from rooftile._rounding_report import RoundingReport
from rooftile.errors import ArgumentError, ArgumentTypeError, NotSupportedError
from rooftile.gemm import WEIGHTS

_DTYPES = ("float32", "float16", "bfloat16")
_GROUPS = _C.w4_group_sizes  # largest first
_LARGEST_FLOAT16 = 65504


class _Rounding:
    """What W4A16 and W8A16 share. bits: of a weight; _zeros: what `zeros` may be."""

    def __post_init__(self):
        name = type(self).__name__
        if self.zeros not in self._zeros:
            raise ArgumentError(f"{name}: zeros {must_be(self._zeros, self.zeros)}")
        even = "an even number " if self.bits == 4 else ""
        expected = f"group_size must be 32, 64, 128 or all columns of a layer ({even}up to 2**31 - 1)"
        size = self.group_size
        if isinstance(size, bool) or not isinstance(size, int) or size <= 0:
            raise ArgumentError(f"{name}: {expected}, got {shown(size)}")
        try:
            _C.w4_sizes(name, "group_size", 1, size, self.bits, size, self.zeros)
        except ArgumentError:
            raise ArgumentError(f"{name}: {expected}, got {size}") from None

    def check(self, where, shape):
        """Raises ArgumentError, beginning with `where`, for a weight [N, K] that cannot be rounded so."""
        try:
            _C.w4_sizes(where, "weight", *shape, self.bits, self.group_size, self.zeros)
        except ArgumentError as e:
            raise ArgumentError(f"{e}; choose another group_size or skip the layer") from None

    def fitting(self, where, shape):
        """This rounding for a weight [N, K]; where a group of 128 or 64 does not divide K, with the largest smaller one
        that does. Raises ArgumentError, beginning with `where`, where there is none."""
        k, smaller = shape[1], _GROUPS[_GROUPS.index(self.group_size) + 1 :] if self.group_size in _GROUPS else ()
        size = next((size for size in (self.group_size, *smaller) if k % size == 0), self.group_size)
        fitting = self if size == self.group_size else replace(self, group_size=size)
        fitting.check(where, shape)
        return fitting

    @property
    def largest(self):
        """The greatest |value| of a float32 weight whose scales and minima float16 holds."""
        return _LARGEST_FLOAT16 * (2 ** (self.bits - 1) - 1 if self.zeros == "symmetric" else 1)

    def in_range(self, where, weight):
        """The torch tensor itself. Raises ArgumentError, beginning with `where`, where rounding would clamp a value."""
        if str(weight.dtype) == "torch.float32" and weight.numel() > 0:
            greatest = max(abs(float(end)) for end in weight.detach().aminmax())
            if self.largest < greatest < math.inf:
                raise ArgumentError(
                    f"{where}: weight must lie within +-{self.largest}, what {self.bits} bits with float16 scales "
                    f"hold, got a value of {greatest:.6g}; skip the layer or make the weight bfloat16"
                )
        return weight

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
        raise ArgumentError(f"{op}: bits must be {' or '.join(map(str, WEIGHTS))}, got {shown(bits)}")
    if bits == 4:
        return W4A16(group_size, zeros)
    if zeros != W8A16.zeros:
        raise ArgumentError(f"{op}: zeros must be {W8A16.zeros!r} with 8 bits, got {shown(zeros)}")
    return W8A16(group_size)


def quantize_(model, config=None, *, skip=(), progress=True):
    """Rounds every nn.Linear but the output head, and the experts of mixture-of-experts layers, to nearest, in place.

    model: a torch module. config: a W4A16 (default: group 128, symmetric), which makes modules of rooftile.nn.W4Linear,
    or a W8A16: W8Linear. Experts as transformers holds them, in three-dimensional parameters, become
    rooftile.experts.PackedExperts. A layer whose in_features its groups of 128 or 64 do not divide takes the largest
    smaller group that does. skip: names or shell patterns of layers to leave as they are, such as "*.mlp.down_proj",
    "model.layers.0.*" or "*.experts"; each must match one. progress: a bar on stderr, or lines where that is no
    terminal, and the report at the end.

    Left alone always: `lm_head`, the module of `model.get_output_embeddings()`, any layer that shares its weight with
    another module, subclasses of nn.Linear (LoRA layers), layers whose weight is computed (parametrised, pruned), a
    layer with a forward of its own (accelerate's), parameters or state_dict hooks besides, or a bias of another dtype
    than its weight, the layers of nn.TransformerEncoderLayer and nn.MultiheadAttention, which read their weights
    themselves, layers with fewer than 16 outputs, experts of which one of the two tensors is left, and routers: an
    nn.Linear named `gate` or with the word
    `router` (`router_gate`), or inside of one so named, or one with as many outputs as there are experts beside it.

    A module used at several places becomes one module at all of them. Forward and backward hooks and other attributes
    go over to the new module.

    Returns a RoundingReport: what was rounded, in which groups; what was left, why, and how much of the model it is.
    A transformers model gets its `config.quantization_config`, so that save_pretrained writes a folder to load. So call
    this on the whole model, with `skip` for what is to stay, or on its text model: from_pretrained refuses the folder
    of a model of which other parts alone were rounded.

    All layers are checked before the first is replaced, and errors name the layer: ArgumentError where in_features has
    no such group, the weight is on the meta device or a float32 weight has a value that float16 scales do not hold
    (beyond 65504 * 7; of 8 bits 65504 * 127; with minima 65504), ArgumentTypeError where the weight is not float32,
    float16 or bfloat16, NotSupportedError where another library has quantised the model already.
    """
    check_flag("quantize_", "progress", progress)
    import torch

    from rooftile._progress import progress_bar

    if not isinstance(model, torch.nn.Module):
        raise ArgumentTypeError(f"quantize_: model must be a torch.nn.Module, got {type(model).__name__}")
    config = W4A16() if config is None else config
    if not isinstance(config, _Rounding):
        raise ArgumentTypeError(f"quantize_: config must be a rooftile.W4A16 or W8A16, got {type(config).__name__}")
    declare = _declaration(model)
    plan = RoundingPlan("quantize_", model, config, skip)
    for name in plan.roundings:
        plan.check(name, model.get_parameter(name))
    with progress_bar("Quantising", len(plan.roundings), show=progress) as advance:
        for name in plan.roundings:
            plan.round(model, name, model.get_parameter(name))
            advance()
    declare()
    if progress:
        print(plan.report, file=sys.stderr)
    return plan.report


def _declaration(model):
    """What writes the quantization_config of a transformers model; nothing to write for any other module."""
    transformers = sys.modules.get("transformers.modeling_utils")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return lambda: None
    from rooftile.integrations.quantizer import RooftileConfig

    before = getattr(model.config, "quantization_config", None)
    if not (before is None or isinstance(before, RooftileConfig)):
        method = before.get("quant_method") if isinstance(before, dict) else getattr(before, "quant_method", None)
        method = getattr(method, "value", method)
        raise NotSupportedError(
            f"quantize_: model has a quantization_config of {method} already, and config.json can hold one only; "
            "expected a model in 16 or 32 bits"
        )

    def declare():
        model.config.quantization_config = RooftileConfig.of(model)

    return declare


def name_patterns(op, skip):
    """`skip` as a list of str. op: whose name errors begin with."""
    patterns = (skip,) if isinstance(skip, str) else skip
    if not (isinstance(patterns, Collection) and all(isinstance(p, str) for p in patterns)):
        raise ArgumentTypeError(f"{op}: skip must be names or patterns of modules, got {shown(skip)}")
    return list(patterns)


def _check_patterns(op, patterns, places):
    """Raises ArgumentError for a pattern of `skip` that no name of a module with parameters of its own matches."""
    own = {module: [suffix for suffix, _ in module.named_parameters(recurse=False)] for module in places}
    modules = [name for module, names in places.items() if own[module] for name in names]
    parameters = [f"{name}.{suffix}" for module, names in places.items() for name in names for suffix in own[module]]
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in (*modules, *parameters)):
            inside = f"{pattern}.*"
            hint = (
                f"; {inside!r} is all inside of it"
                if any(fnmatch.fnmatchcase(name, inside) for name in modules)
                else _C.did_you_mean(pattern, *modules)
            )
            raise ArgumentError(f"{op}: skip: no layer of the model has a name like {shown(pattern)}{hint}")


class RoundingPlan:
    """Which weights of a model are rounded and how, before anything is changed.

    roundings: name of a parameter -> its W4A16 or W8A16. report: the RoundingReport. only: names of the parameters that
    may be rounded; all others are left as in the source. leave: names of modules that stay as if skipped, but need not
    be there. Errors begin with `op`, and are as of quantize_.
    """

    def __init__(self, op, model, rounding, skip, only=None, leave=()):
        import torch

        patterns = name_patterns(op, skip)
        if isinstance(model, torch.nn.Linear):
            raise ArgumentError(
                f"{op}: model is itself an nn.Linear, which cannot be replaced in place; use W4Linear.from_linear"
            )
        self._op, self.roundings, self._forms = op, {}, expert_forms(model)
        group_sizes, left, rounded, packed, total, seen = {}, {}, 0, 0, 0, set()
        reason = Reasons(model, [*patterns, *leave], self._forms, only)
        _check_patterns(op, patterns, reason.places)
        self._places = {names[0]: names for names in reason.places.values()}
        for path, module in model.named_modules():
            packed += _packed_elements(module)
            for suffix, parameter in module.named_parameters(recurse=False):
                if parameter in seen:
                    continue
                seen.add(parameter)
                total += parameter.numel()
                name = f"{path}.{suffix}" if path else suffix
                why = reason(module, suffix, parameter)
                if why is not None:
                    left[name] = parameter.numel(), why
                    continue
                shape = self._forms[path].shape(suffix) if path in self._forms else parameter.shape
                layer = name.removesuffix(".weight")
                self.roundings[name] = rounding.fitting(f"{op}: {layer}", shape)
                group_sizes[layer] = self.roundings[name].group_size
                rounded += parameter.numel()
        sums = rounded, packed, total + packed
        self.report = RoundingReport(rounding.bits, rounding.group_size, group_sizes, left, *sums)

    def check(self, name, value):
        """Raises where `value` cannot be rounded in the place of the parameter `name`."""
        where = f"{self._op}: {name.removesuffix('.weight')}"
        if value.device.type == "meta":
            raise ArgumentError(f"{where}: weight has no memory behind it (meta device)")
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype not in _DTYPES:
            raise ArgumentTypeError(f"{where}: weight must be {', '.join(_DTYPES)}, got {dtype}")
        self.roundings[name].in_range(where, value)

    def round(self, model, name, value):
        """Puts what `value` is rounded to into the place of the parameter `name`."""
        import torch

        from rooftile.experts import PackedExperts

        path, _, suffix = name.rpartition(".")
        module, rounding = model.get_submodule(path), self.roundings[name]
        if path in self._forms:
            if not isinstance(module, PackedExperts):
                module = self._replace(model, path, PackedExperts(module, self._forms[path]))
            module.round(suffix, value, rounding)
            return
        if value is not module.weight:
            module.weight = torch.nn.Parameter(value, requires_grad=False)
        self._replace(model, path, rounding.module_of(module))

    def _replace(self, model, path, module):
        """Puts the module into all places of the one at `path`, whose mode, hooks and attributes go over to it."""
        from rooftile.nn import take_over

        take_over(module, model.get_submodule(path))
        for place in self._places[path]:
            model.set_submodule(place, module)
        return module


def expert_forms(model):
    """name of a module -> its ExpertsForm."""
    from rooftile.experts import experts_form

    forms = ((name, experts_form(module)) for name, module in model.named_modules())
    return {name: form for name, form in forms if form is not None}


def _packed_elements(module):
    from rooftile.experts import PackedStack
    from rooftile.nn import PackedLinear

    if not isinstance(module, PackedLinear | PackedStack):
        return 0
    experts = len(module) if isinstance(module, PackedStack) else 1
    return experts * module.out_features * module.in_features
