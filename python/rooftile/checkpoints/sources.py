# SPDX-License-Identifier: Apache-2.0
"""What there is to convert: every tensor of a source with its place in the model, read one at a time."""

import copy
import dataclasses
import functools
import os
import re
import typing

import torch

from rooftile.checkpoints import trial
from rooftile.checkpoints.folder import TensorFolder
from rooftile.checkpoints.formats import from_mxfp4
from rooftile.checkpoints.schemes import Mxfp4, scheme_of
from rooftile.errors import ArgumentError, ArgumentTypeError, NotSupportedError
from rooftile.experts import STACKS, PackedStack, stack_rows
from rooftile.gemm import WEIGHTS
from rooftile.loaders.gguf import open_gguf
from rooftile.quantize import W4A16, W8A16, RoundingPlan, expert_forms, name_patterns

LOSSLESS = {bits: f"{bits} bits, lossless" for bits in WEIGHTS}
ROUNDED = {bits: f"{bits} bits, rounded to nearest" for bits in WEIGHTS}
KEPT, CONVERTED, DEQUANTISED = "kept", "converted", "dequantised"  # as stored, to another float type, from codes
_OP = "convert"
_EXPECTED = "a folder with config.json and safetensors files, or a GGUF file"
_LAYERS = re.compile(r"(num_|n_)?((hidden|encoder|decoder)_)?layers?")  # what models call their number
_HEADS = re.compile(r"(num|n)_((attention|key_value|kv)_)?heads?")
_SIZES = {"hidden_size", "vocab_size", "head_dim", "n_embd", "d_model", "num_hidden_layers"}
_MAY_BE_0 = {"intermediate_size", "ffn_dim", "n_inner", "d_ff"}
_MOST = 2**31 - 1
_FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_EXPERT_PARTS = {"gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")), "down_proj": (("down_proj",), ("w2",))}
_EXPERT = re.compile(r"\.experts\.\d+\.\w+$")
_ROUNDED_FROM = ("F32", "F16", "BF16")


@dataclasses.dataclass(frozen=True)
class Entry:
    """One weight of the model.

    name: of the module, where `read` gives a W4Weight or W8Weight, else of the tensor. form: how the source stores it.
    outcome: one of the above. nbytes: in the source. read: () -> W4Weight, W8Weight or torch.Tensor.
    """

    name: str
    form: str
    outcome: str
    nbytes: int
    read: typing.Callable


@dataclasses.dataclass(frozen=True)
class Source:
    """form: what the source is, in words. model_class: in transformers. config: the dict for config.json, without
    quantisation. entries: in the order of the model. left_out: tensors that are not carried over, and why. rounding:
    left, smaller_groups and elements of convert's report."""

    path: str
    form: str
    model_class: type
    config: dict
    entries: list
    left_out: list
    rounding: dict


def open_source(path, *, rounding=None, skip=(), dtype=None):
    """A Source, of which headers alone were read. Arguments and errors as of `convert`."""
    if rounding is not None and not isinstance(rounding, W4A16 | W8A16):
        kind = type(rounding).__name__
        raise ArgumentTypeError(f"{_OP}: rounding must be a rooftile.W4A16 or W8A16 or None, got {kind}")
    if not os.path.lexists(path):
        raise ArgumentError(f"{path}: No such file or folder; expected {_EXPECTED}{_how_to_download(path)}")
    if os.path.isdir(path):
        if dtype is not None:
            raise ArgumentError(f"{_OP}: dtype is for GGUF files, {path} is a folder and keeps its own; got {dtype!r}")
        return _FolderSource(path, rounding, skip).source()
    return _gguf_source(path, rounding, skip, str(dtype or "bfloat16").removeprefix("torch."))


def _how_to_download(path):
    """What to do about a path that is not there and may be a name on a hub."""
    name = os.fspath(path)
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):
        return ""
    folder = name.rpartition("/")[2]
    return f". A model of the Hugging Face hub is downloaded first: hf download {name} --local-dir {folder}"


def without_code(value, where, left_out):
    """A JSON object without the fields that make transformers run code of the checkpoint's choice: classes (auto_map)
    and attention or expert kernels of a hub; nor attribute_map, by which any other field would be one of these.
    left_out: gets a line for each, which begins with `where`."""
    if isinstance(value, list):
        return [without_code(item, where, left_out) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {}
    for key, item in value.items():
        if key == "attribute_map":
            left_out.append(f"{where}: {key}: fields are read by the names that transformers has for them")
        elif key == "auto_map" or key.endswith(("_implementation", "_implementation_internal")):
            left_out.append(f"{where}: {key}: code that a checkpoint names is never run")
        else:
            kept[key] = without_code(item, where, left_out)
    return kept


def _plan(model, rounding, skip, packed, only=None):
    """The RoundingPlan, or None without a rounding. packed: names of modules that are in 4 or 8 bits already. only: as
    of RoundingPlan."""
    patterns = name_patterns(_OP, skip)
    if rounding is not None:
        return RoundingPlan(_OP, model, rounding, patterns, only, packed)
    if patterns:
        raise ArgumentError(
            f"{_OP}: skip is for layers that would be rounded, and without a rounding (bits, group_size, zeros) the "
            f"source keeps all that is not in 4 or 8 bits; got {skip!r}"
        )
    return None


def _rounded(rounding, name, weight):
    return rounding.weight_of(rounding.in_range(f"{_OP}: {name}", weight))


def _rounding_report(model, plan, entries):
    """What convert's report says of weights that are not lossless in 4 or 8 bits."""
    parameters, reasons = dict(model.named_parameters()), plan.report.left if plan else {}
    kept = [e.name for e in entries if e.outcome not in (*LOSSLESS.values(), *ROUNDED.values())]
    return {
        "elements": sum(p.numel() for p in parameters.values()),
        "left": [
            {"name": n, "elements": parameters[n].numel(), "why": reasons.get(n, (0, "as in the source"))[1]}
            for n in kept
            if n in parameters
        ],
        "group_size": plan.report.group_size if plan else None,
        "smaller_groups": plan.report.smaller_groups if plan else {},
    }


# ---------------------------------------------------------------- a folder of safetensors


class _FolderSource:
    def __init__(self, path, rounding, skip):
        self.folder = TensorFolder(path)
        self.where = str(self.folder.path / "config.json")
        self.scheme = scheme_of(self.where, self.folder.config, self.folder.tensors)
        self.main = self.scheme.main if self.scheme else None  # the tensor that every packed linear layer has
        self.left_out = []
        config = {k: v for k, v in self.folder.config.items() if k not in ("quantization_config", "compression_config")}
        self.config = without_code(config, "config.json", self.left_out)
        self.model = self.empty_model()
        self.rounding, self.only = rounding, None
        if rounding is None and not self.main:
            self.rounding = W4A16()
            if isinstance(self.scheme, Mxfp4):
                self.only = {name.removesuffix("_blocks") for name in self.folder.tensors if name.endswith("_blocks")}
        self.skip = skip
        self.forms = expert_forms(self.model)
        self.left = dict(self.folder.tensors)  # those without a place yet

    @functools.cached_property
    def plan(self):
        """The RoundingPlan; made once a tensor is known to have the shape that config.json says."""
        main = f".{self.main}" if self.main else None
        packed = [name.removesuffix(main) for name in self.folder.tensors if main and name.endswith(main)]
        return _plan(self.model, self.rounding, self.skip, packed, self.only)

    def source(self):
        tied = self.tied_names()
        entries, missing = [], []
        for name, parameter in self.model.state_dict().items():
            module, _, suffix = name.rpartition(".")
            stored = name if name in self.left else _mixtral(name)
            if suffix == "weight" and self.main and f"{module}.{self.main}" in self.left:
                if name in tied:
                    raise NotSupportedError(
                        f"{self.where}: tie_word_embeddings is set, but '{module}' has packed weights of its own"
                    )
                entries.append(self.packed(module))
            elif stored in self.left:
                entries.append(self.plain(name, stored, parameter))
            elif self.is_mxfp4(name):
                entries.append(self.mxfp4(name))
            elif module in self.forms and suffix in STACKS and self.expert_names(module, suffix):
                entries.append(self.experts(name, *self.expert_names(module, suffix)))
            elif name not in tied:
                missing.append(name)
        self.leave_out()
        if missing:
            raise ArgumentError(f"{self.folder.path}: tensor '{missing[0]}' is missing ({len(missing)} such tensors)")
        self.check_experts(entries)
        rounding = _rounding_report(self.model, self.plan, entries)
        path, form, kind = str(self.folder.path), self.form(entries), type(self.model)
        return Source(path, form, kind, self.config, entries, self.left_out, rounding)

    def check_experts(self, entries):
        """Raises NotSupportedError where experts would be packed in part, which no module of ours holds."""
        names = {entry.name for entry in entries}
        for path in self.forms:
            packed = [stack in names for stack in (f"{path}.{stack}" for stack in STACKS.values())]
            if any(packed) and not all(packed):
                states = ", ".join(
                    f"{name} in {'4 or 8' if there else '16 or 32'} bits"
                    for name, there in zip(STACKS, packed, strict=True)
                )
                raise NotSupportedError(
                    f"{self.where}: '{path}' would have {states}; expected both in 4 or 8 bits: give a rounding (bits, "
                    "group_size, zeros) and skip neither"
                )

    def form(self, entries):
        if not self.main:
            return self.scheme.name if self.scheme else "safetensors"
        bits = [f"{b}-bit" for b, outcome in LOSSLESS.items() if any(e.outcome == outcome for e in entries)]
        return " ".join((self.scheme.name, " and ".join(bits))).strip()

    def empty_model(self):
        """The model that config.json describes, on the meta device."""
        import transformers

        kind = self.config.get("model_type")
        if not isinstance(kind, str):
            raise ArgumentError(f"{self.where}: model_type must be a string, got {kind!r}")
        if kind not in transformers.CONFIG_MAPPING:
            raise NotSupportedError(f"{self.where}: model_type '{kind}' is not one that transformers knows by itself")
        self.check_sizes("", self.config)
        text = self.config.get("text_config")
        self.check_sizes("text_config.", text if isinstance(text, dict) else {})

        def make():
            config = transformers.CONFIG_MAPPING[kind].from_dict(copy.deepcopy(self.config))
            with torch.device("meta"):
                return transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)

        if reason := trial.refusal(make):  # whatever a wrong field leads to: transformers loops as often as one says
            raise ArgumentError(f"{self.where}: transformers makes no causal language model of it: {reason}")
        return make()

    def check_sizes(self, prefix, fields):
        """Raises ArgumentError naming a size that no model has, before as much is made: transformers takes any int.
        What is no int it refuses by name."""
        for key, size in fields.items():
            least = 1 if key in _SIZES or _HEADS.fullmatch(key) else 0
            if type(size) is not int or not (least or key in _MAY_BE_0 or _LAYERS.fullmatch(key)):
                continue
            if _LAYERS.fullmatch(key) and size > len(self.folder.tensors):
                raise ArgumentError(
                    f"{self.where}: {prefix}{key} is {size}, but there are {len(self.folder.tensors)} tensors"
                )
            if not least <= size <= _MOST:
                raise ArgumentError(f"{self.where}: {prefix}{key} must be {least} to {_MOST}, got {size}")

    def tied_names(self):
        """Names of parameters that are another one's tensor."""
        own = dict(self.model.named_parameters())  # each parameter once
        return {name for name, _ in self.model.named_parameters(remove_duplicate=False)} - own.keys()

    def packed(self, name):
        module = _Module(self, name)
        linear = self.model.get_submodule(name)
        if type(linear) is not torch.nn.Linear:
            raise NotSupportedError(
                f"{module.where}: packed weights of a {type(linear).__name__} are not read; read: those of a Linear"
            )
        nbytes = sum(self.left.pop(f"{name}.{s}").nbytes for s in module.unread)

        def read():
            weight = self.scheme.read(module, linear.out_features, linear.in_features)
            module.check_all_read()
            return weight

        return Entry(name, self.scheme.name, LOSSLESS[self.scheme.bits_of(module)], nbytes, read)

    def plain(self, name, stored, parameter):
        info = self.take(stored, tuple(parameter.shape), _FLOATS if parameter.is_floating_point() else None)
        return self.unpacked(name, info.dtype, info.nbytes, lambda: self.folder.read(stored))

    def take(self, stored, shape, dtypes=_FLOATS):
        """The TensorInfo of a tensor that now has its place. dtypes: those that are read, None for all."""
        info = self.left.pop(stored, None)
        if info is None:
            raise ArgumentError(f"{self.folder.path}: tensor '{stored}' is missing")
        if info.shape != shape:
            raise ArgumentError(
                f"{info.file}: tensor '{stored}' has shape {list(info.shape)}, expected {list(shape)} by config.json"
            )
        if dtypes and info.dtype not in dtypes:
            here = "here" if self.scheme else "without a quantization_config"
            raise NotSupportedError(
                f"{info.file}: tensor '{stored}' has dtype {info.dtype}, which is not read {here}; read: "
                f"{', '.join(dtypes)}"
            )
        return info

    def unpacked(self, name, dtype, nbytes, read):
        """The Entry of a parameter that the source holds in 16 or 32 bits: rounded or kept. read: gives the tensor."""
        path = name.rpartition(".")[0]
        form = _FLOATS.get(dtype, dtype)
        rounding = self.plan.roundings.get(name) if self.plan else None
        if rounding is None:
            return Entry(name, form, KEPT, nbytes, read)
        if dtype not in _ROUNDED_FROM:
            raise NotSupportedError(
                f"{self.folder.path}: tensor '{name}' has dtype {dtype}, rounded are {', '.join(_ROUNDED_FROM)}"
            )
        if path in self.forms:
            experts = self.forms[path]
            return self.rounded_experts(name, rounding, form, nbytes, lambda: experts.each(read()))
        return Entry(path, form, ROUNDED[rounding.bits], nbytes, lambda: _rounded(rounding, path, read()))

    def rounded_experts(self, name, rounding, form, nbytes, weights):
        """The Entry of a parameter of experts that is rounded. weights: gives [out_features, in_features] of each."""
        path, _, suffix = name.rpartition(".")
        stack, outcome = f"{path}.{STACKS[suffix]}", ROUNDED[rounding.bits]
        in_range = functools.partial(rounding.in_range, f"{_OP}: {name}")
        return Entry(stack, form, outcome, nbytes, lambda: PackedStack.rounded(map(in_range, weights()), rounding))

    def is_mxfp4(self, name):
        path, _, suffix = name.rpartition(".")
        stored = isinstance(self.scheme, Mxfp4) and {f"{name}_blocks", f"{name}_scales"} & self.left.keys()
        return bool(stored) and path in self.forms and suffix in STACKS

    def mxfp4(self, name):
        """The Entry of a parameter of experts that the source holds in MXFP4, which is read one expert at a time."""
        path, _, suffix = name.rpartition(".")
        form, blocks, scales = self.forms[path], f"{name}_blocks", f"{name}_scales"
        n, k = form.shape(suffix)
        if k % 32:
            raise ArgumentError(
                f"{self.folder.path}: tensor '{blocks}' holds blocks of 32, which do not make the rows of {k} that "
                "config.json asks for"
            )
        grid = form.experts, n, k // 32
        infos = self.take(blocks, (*grid, 16), ("U8",)), self.take(scales, grid, ("U8",))

        def weights():
            for expert in range(form.experts):
                where = f"{infos[1].file}: tensor '{scales}' [{expert}]"
                yield from_mxfp4(where, self.folder.read(blocks, expert), self.folder.read(scales, expert))

        nbytes, rounding = sum(info.nbytes for info in infos), self.plan.roundings.get(name)
        if rounding is None:
            return Entry(name, self.scheme.name, DEQUANTISED, nbytes, lambda: form.fused(weights()))
        return self.rounded_experts(name, rounding, self.scheme.name, nbytes, weights)

    def expert_names(self, path, suffix):
        """For gate_up_proj or down_proj of experts that the source holds one by one: a list for each part (gates, ups),
        of one module name for each expert. None where it holds none."""
        ends = {"weight", self.main or "weight"}
        for base in (path, _mixtral(path)):
            for parts in _EXPERT_PARTS[suffix]:
                if any(f"{base}.0.{parts[0]}.{end}" in self.left for end in ends):
                    return [_Names(base, part, self.forms[path].experts) for part in parts]
        return None

    def experts(self, name, *parts):
        """The Entry of experts that the source holds one by one. parts: as of `expert_names`."""
        path, _, suffix = name.rpartition(".")
        form, first = self.forms[path], next(iter(parts[0]))
        n, k = form.shape(suffix)
        n //= len(parts)
        if form.transposed or form.gate.interleaved:
            raise NotSupportedError(f"{self.where}: experts one by one, such as '{first}', are not read for this model")
        if not (self.main and f"{first}.{self.main}" in self.left):
            infos = [[self.take(f"{module}.weight", (n, k)) for module in part] for part in parts]
            dtypes = sorted({info.dtype for part in infos for info in part})
            if len(dtypes) > 1:
                raise NotSupportedError(
                    f"{self.where}: '{name}' has experts in {' and '.join(dtypes)}; read: one dtype"
                )
            stored = [[info.name for info in part] for part in infos]

            def fused():
                return torch.cat([torch.stack([self.folder.read(x) for x in part]) for part in stored], dim=1)

            return self.unpacked(name, dtypes[0], sum(info.nbytes for part in infos for info in part), fused)

        modules = [[_Module(self, module) for module in part] for part in parts]
        taken = [f"{m.name}.{suffix}" for part in modules for m in part for suffix in m.unread]
        nbytes = sum(self.left.pop(x).nbytes for x in taken)

        def read():
            weights = [[self.scheme.read(m, n, k) for m in part] for part in modules]
            for module in (m for part in modules for m in part):
                module.check_all_read()
            try:
                return stack_rows(*weights)
            except ArgumentError as e:  # each is sound, but not together
                raise NotSupportedError(f"{modules[0][0].where}, and the experts beside it: {e}") from None

        outcome = LOSSLESS[self.scheme.bits_of(modules[0][0])]
        return Entry(f"{path}.{STACKS[suffix]}", self.scheme.name, outcome, nbytes, read)

    def leave_out(self):
        """What has no place in the model: refused, but for what changes nothing."""
        for name, info in self.left.items():
            module, _, suffix = name.rpartition(".")
            if suffix == "inv_freq":
                self.left_out.append(f"{name}: computed from config.json")
            elif suffix == "bias" and self.scheme and self.has_linear(module) and not self.folder.read(name).any():
                self.left_out.append(f"{name}: all zeros, and the model has no such bias")
            else:
                hint = "" if self.scheme or suffix == "weight" else " (config.json has no quantization_config)"
                raise NotSupportedError(
                    f"{info.file}: tensor '{name}' has no place in a {self.config['model_type']} model{hint}; leaving "
                    "it out would change the model"
                )

    def has_linear(self, name):
        modules = dict(self.model.named_modules())
        return isinstance(modules.get(name), torch.nn.Linear) or _EXPERT.search(name) is not None


def _mixtral(name):
    """What checkpoints of Mixtral call a part of the model's `mlp`."""
    return name.replace(".mlp.", ".block_sparse_moe.")


@dataclasses.dataclass(frozen=True)
class _Names:
    """Module names of one part of each expert."""

    base: str
    part: str
    count: int

    def __iter__(self):
        return (f"{self.base}.{i}.{self.part}" for i in range(self.count))


class _Module:
    """The packed tensors of one linear layer, as a scheme asks for them."""

    def __init__(self, owner, name):
        self.folder, self.name = owner.folder, name
        main = self.folder.tensors.get(f"{name}.{owner.scheme.main}")
        if main is None:
            raise ArgumentError(f"{self.folder.path}: tensor '{name}.{owner.scheme.main}' is missing")
        self.where = f"{main.file}: {name}"
        self.unread = {s for s in owner.scheme.suffixes if f"{name}.{s}" in owner.folder.tensors}

    def check_all_read(self):
        if self.unread:
            raise ArgumentError(
                f"{self.where}: {min(self.unread)} is there, but config.json has no use for it; leaving it out would "
                "change the weight"
            )

    def tensor(self, suffix, shape, dtypes, optional=False):
        """The tensor with this suffix, of this shape and one of these dtypes; None where it may be missing and is."""
        info = self.folder.tensors.get(f"{self.name}.{suffix}")
        if info is None:
            if optional:
                return None
            raise ArgumentError(f"{self.where}: {suffix} is missing")
        self.unread.discard(suffix)
        if info.dtype not in dtypes:
            raise ArgumentError(
                f"{info.file}: {self.name}: {suffix} has dtype {info.dtype}, expected {' or '.join(dtypes)}"
            )
        if info.shape != shape:
            raise ArgumentError(
                f"{info.file}: {self.name}: {suffix} has shape {list(info.shape)}, expected {list(shape)} by "
                "config.json"
            )
        return self.folder.read(info.name)

    def group_size(self, size, k):
        size = k if size is None else size
        if k % size:
            raise NotSupportedError(f"{self.where}: group_size {size} does not divide the layer's {k} columns")
        return size

    def divides(self, what, size, divisor):
        if size % divisor:
            raise NotSupportedError(f"{self.where}: {what} hold {divisor} each, which do not make {size}")


# ---------------------------------------------------------------- a GGUF file


def _gguf_source(path, rounding, skip, dtype):
    model, parameters = open_gguf(path, dtype=dtype, weights="w4a16")
    plan = _plan(model, rounding, skip, [p.name.removesuffix(".weight") for p in parameters if p.keeps_codes])
    rounded, entries = plan.roundings if plan else {}, []
    for p in parameters:
        module, form = p.name.removesuffix(".weight"), p.type
        if p.keeps_codes:
            entries.append(Entry(module, form, LOSSLESS[4], p.nbytes, lambda p=p: p.read().weight))
        elif p.name in rounded:
            fitting = rounded[p.name]
            read = lambda p=p, module=module, fitting=fitting: _rounded(fitting, module, p.read("float32"))  # noqa: E731
            entries.append(Entry(module, form, ROUNDED[fitting.bits], p.nbytes, read))
        else:
            stored = _FLOATS.get(form)
            outcome = KEPT if stored == dtype else CONVERTED if stored else DEQUANTISED
            entries.append(Entry(p.name, form, outcome, p.nbytes, p.read))
    config = {**model.config.to_diff_dict(), "architectures": [type(model).__name__]}
    report = _rounding_report(model, plan, entries)
    return Source(str(path), "GGUF", type(model), config, entries, [], report)
