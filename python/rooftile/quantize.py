# SPDX-License-Identifier: Apache-2.0
"""Rounding a whole model's linear layers in place."""

import fnmatch
import sys
from collections.abc import Collection
from dataclasses import dataclass, replace

from rooftile.errors import ArgumentError, ArgumentTypeError, NotSupportedError
from rooftile.gemm import WEIGHTS, names_of

_DTYPES = ("float32", "float16", "bfloat16")
_GROUPS = (128, 64, 32)
_FEW = 16  # rows of a tile: a layer of fewer takes as much memory in 4 bits


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

    def fitting(self, where, shape):
        """This rounding for a weight [N, K]; where a group of 128 or 64 does not divide K, with the largest smaller one
        that does. Raises ArgumentError, beginning with `where`, where there is none."""
        k, smaller = shape[1], _GROUPS[_GROUPS.index(self.group_size) + 1 :] if self.group_size in _GROUPS else ()
        size = next((size for size in (self.group_size, *smaller) if k % size == 0), self.group_size)
        fitting = self if size == self.group_size else replace(self, group_size=size)
        fitting.check(where, shape)
        return fitting

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
    """Rounds every nn.Linear but the output head, and the experts of mixture-of-experts layers, to nearest, in place.

    model: a torch module. config: a W4A16 (default: group 128, symmetric), which makes modules of rooftile.nn.W4Linear,
    or a W8A16: W8Linear. Experts as transformers holds them, in three-dimensional parameters, become
    rooftile.experts.PackedExperts. A layer whose in_features its groups of 128 or 64 do not divide takes the largest
    smaller group that does. skip: names or shell patterns of modules to leave as they are, such as "*.mlp.down_proj" or
    "*.experts". progress: a bar on stderr, or lines where that is no terminal, and the report at the end.

    Left alone always: `lm_head`, the module of `model.get_output_embeddings()`, any layer that shares its weight with
    another module, subclasses of nn.Linear (LoRA layers, `MultiheadAttention.out_proj`), layers whose weight is
    computed (parametrised, pruned), and routers: an nn.Linear named `gate` or `router` or inside of one so named, one
    with as many outputs as there are experts beside it, and one with fewer than 16 outputs.

    Returns a RoundingReport: what was rounded, in which groups; what was left, why, and how much of the model it is.
    A transformers model gets its `config.quantization_config`, so that save_pretrained writes a folder to load.

    All layers are checked before the first is replaced, and errors name the layer: ArgumentError where in_features has
    no such group or the weight is on the meta device, ArgumentTypeError where the weight is not float32, float16 or
    bfloat16, NotSupportedError where another library has quantised the model already.
    """
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
        weight = model.get_parameter(name)
        name = name.removesuffix(".weight")
        if weight.device.type == "meta":
            raise ArgumentError(f"quantize_: {name}: weight has no memory behind it (meta device)")
        dtype = str(weight.dtype).removeprefix("torch.")
        if dtype not in _DTYPES:
            raise ArgumentTypeError(f"quantize_: {name}: weight must be {', '.join(_DTYPES)}, got {dtype}")
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
        raise ArgumentTypeError(f"{op}: skip must be names or patterns of modules, got {skip!r}")
    return list(patterns)


@dataclass(frozen=True)
class RoundingReport:
    """What became of a model's weights.

    bits, group_size: as asked. group_sizes: name of a layer (of experts: of their parameter) -> its group size. left:
    name of a parameter that stays as it was -> (number of elements, why). packed: elements that were in 4 or 8 bits
    before. total: elements of the model, shared ones once. str() of it is a summary.
    """

    bits: int
    group_size: int
    group_sizes: dict
    left: dict
    rounded: int
    packed: int
    total: int

    @property
    def smaller_groups(self):
        """group_sizes of the layers that take smaller groups than asked."""
        return {name: size for name, size in self.group_sizes.items() if size != self.group_size}

    def __str__(self):
        share = f"{self._share(self.rounded)} of {self.total:,} parameters"
        lines = [f"Rounded to {self.bits} bits: {share}, groups of {self.group_size}"]
        if self.packed:
            lines.append(f"In 4 or 8 bits before: {self._share(self.packed)}")
        return "\n".join(lines + notes(self.group_size, self.smaller_groups, self.left, self.total))

    def _share(self, elements):
        return _percent(elements, self.total)


def notes(group_size, smaller_groups, left, total):
    """Lines that say which layers take smaller groups than asked and what was left. Arguments as of RoundingReport."""
    lines, sizes, reasons = [], {}, {}
    for name, size in smaller_groups.items():
        kinds = sizes.setdefault(size, {})
        kinds[kind_of(name)] = kinds.get(kind_of(name), 0) + 1
    for size, kinds in sizes.items():
        names = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        lines.append(f"Groups of {size}, since {group_size} does not divide their columns: {names}")
    for name, (elements, why) in left.items():
        before, kinds = reasons.get(why, (0, {}))
        reasons[why] = before + elements, kinds | {kind_of(name): None}
    for why, (elements, kinds) in sorted(reasons.items(), key=lambda item: -item[1][0]):
        lines.append(f"Left as they were, {why}: {_percent(elements, total)} ({', '.join(kinds)})")
    return lines


def _percent(elements, total):
    return f"{100 * elements / max(total, 1):.1f} %"


def kind_of(name):
    """q_proj of model.layers.3.self_attn.q_proj, and what of it."""
    parts = [part for part in name.removesuffix(".weight").split(".") if not part.isdigit()]
    last = parts[-1:] if parts else [name]
    return ".".join(parts[-2:]) if last[0] == "bias" else last[0]


class RoundingPlan:
    """Which weights of a model are rounded and how, before anything is changed.

    roundings: name of a parameter -> its W4A16 or W8A16. report: the RoundingReport. Errors begin with `op`, and are as
    of quantize_.
    """

    def __init__(self, op, model, rounding, skip):
        import torch

        patterns = name_patterns(op, skip)
        if isinstance(model, torch.nn.Linear):
            raise ArgumentError(
                f"{op}: model is itself an nn.Linear, which cannot be replaced in place; use W4Linear.from_linear"
            )
        self.roundings, self._forms = {}, expert_forms(model)
        group_sizes, left, rounded, packed, total, seen = {}, {}, 0, 0, 0, set()
        reason = _Reasons(model, patterns, self._forms)
        for path, module in model.named_modules():
            packed += _packed_elements(module)
            for suffix, parameter in module.named_parameters(recurse=False):
                if parameter in seen:
                    continue
                seen.add(parameter)
                total += parameter.numel()
                name = f"{path}.{suffix}" if path else suffix
                why = reason(path, module, suffix, parameter)
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

    def round(self, model, name, value):
        """Puts what `value` is rounded to into the place of the parameter `name`."""
        import torch

        from rooftile.experts import PackedExperts

        path, _, suffix = name.rpartition(".")
        module, rounding = model.get_submodule(path), self.roundings[name]
        if path in self._forms:
            if not isinstance(module, PackedExperts):
                module = PackedExperts(module, self._forms[path]).train(module.training)
                model.set_submodule(path, module)
            module.round(suffix, value, rounding)
            return
        if value is not module.weight:
            module.weight = torch.nn.Parameter(value, requires_grad=False)
        model.set_submodule(path, rounding.module_of(module).train(module.training))


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


class _Reasons:
    """Why a parameter stays as it is; None for one to be rounded."""

    def __init__(self, model, patterns, forms):
        from rooftile.experts import PackedExperts

        self.patterns, self.forms = patterns, forms
        self.head = getattr(model, "get_output_embeddings", lambda: None)()
        self.holders = {}  # how many modules hold each parameter
        blocks = {}  # the module around experts, and how many they are
        for path, module in model.named_modules():
            own = list(module.parameters(recurse=False))
            for parameter in own:
                self.holders[parameter] = self.holders.get(parameter, 0) + 1
            stacked = {len(parameter) for parameter in own if parameter.ndim == 3}
            if isinstance(module, PackedExperts):
                blocks[path] = module.form.experts
            elif len(stacked) == 1:
                blocks[path] = stacked.pop()
            elif path.rpartition(".")[2] == "experts" and hasattr(module, "__len__"):
                blocks[path] = len(module)
        self.blocks = {path.rpartition(".")[0]: (path, count) for path, count in blocks.items()}

    def __call__(self, path, module, suffix, parameter):
        import torch

        name, last = f"{path}.{suffix}", path.rpartition(".")[2]
        linear = type(module) is torch.nn.Linear and suffix == "weight"  # what a subclass adds would be lost
        experts = path in self.forms and parameter.ndim == 3
        if parameter.ndim < 2 or suffix.endswith("bias"):
            return "norms and biases"
        if isinstance(module, torch.nn.Embedding):
            return "embeddings"
        if module is self.head or last == "lm_head":
            return "output head"
        if self._is_router(path, module, parameter, linear):
            return "routers"
        if any(fnmatch.fnmatchcase(n, p) for n in (path, name) for p in self.patterns):
            return "skipped"
        if self.holders[parameter] > 1:
            return "shared with another module"
        if linear or experts:
            return None
        return "experts of a form not known" if parameter.ndim == 3 else "no weight of a plain Linear"

    def _is_router(self, path, module, parameter, linear):
        """Routers and gates are named so; of any name, a Linear with one output for each expert beside it; and a Linear
        with so few outputs that rounding saves nothing."""
        if parameter.ndim != 2:
            return False
        if any(part in ("gate", "router") or part.endswith("_router") for part in path.split(".")):
            return True
        if not linear:
            return False
        around = path
        while len(parameter) >= _FEW and around:
            around = around.rpartition(".")[0]
            inside, count = self.blocks.get(around, ("", None))
            if len(parameter) == count and not f"{path}.".startswith(f"{inside}."):
                return True
        return len(parameter) < _FEW
