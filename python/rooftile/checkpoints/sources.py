# SPDX-License-Identifier: Apache-2.0
"""What there is to convert: every tensor of a source with its place in the model, read one at a time."""

import copy
import dataclasses
import os
import re
import typing

import torch

from rooftile.checkpoints.folder import TensorFolder
from rooftile.checkpoints.schemes import scheme_of
from rooftile.errors import ArgumentError, ArgumentTypeError, NotSupportedError
from rooftile.gemm import WEIGHTS
from rooftile.loaders.gguf import open_gguf
from rooftile.quantize import W4A16, W8A16, RoundingPlan

LOSSLESS = {bits: f"{bits} bits, lossless" for bits in WEIGHTS}
ROUNDED = {bits: f"{bits} bits, rounded to nearest" for bits in WEIGHTS}
KEPT, CONVERTED, DEQUANTISED = "kept", "converted", "dequantised"  # as stored, to another float type, from codes
_OP = "convert"
_EXPECTED = "a folder with config.json and safetensors files, or a GGUF file"
_LAYERS = re.compile(r"(num_|n_)?((hidden|encoder|decoder)_)?layers?")  # what models call their number
_FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
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
    quantisation. entries: in the order of the model. left_out: tensors that are not carried over, and why."""

    path: str
    form: str
    model_class: type
    config: dict
    entries: list
    left_out: list


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
    and attention or expert kernels of a hub. left_out: gets a line for each, which begins with `where`."""
    if isinstance(value, list):
        return [without_code(item, where, left_out) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {}
    for key, item in value.items():
        if key == "auto_map" or key.endswith(("_implementation", "_implementation_internal")):
            left_out.append(f"{where}: {key}: code that a checkpoint names is never run")
        else:
            kept[key] = without_code(item, where, left_out)
    return kept


def _rounded(model, rounding, skip):
    """Name of a parameter -> the W4A16 or W8A16 that it is rounded with."""
    if rounding is None and skip:
        raise ArgumentError(
            f"{_OP}: skip is for layers that would be rounded, and without a rounding (bits, group_size, zeros) the "
            f"source keeps all that is not in 4 or 8 bits; got {skip!r}"
        )
    return {} if rounding is None else RoundingPlan(_OP, model, rounding, skip).roundings


# ---------------------------------------------------------------- a folder of safetensors


class _FolderSource:
    def __init__(self, path, rounding, skip):
        self.folder = TensorFolder(path)
        self.where = str(self.folder.path / "config.json")
        self.scheme = scheme_of(self.where, self.folder.config, self.folder.tensors)
        self.left_out = []
        config = {k: v for k, v in self.folder.config.items() if k not in ("quantization_config", "compression_config")}
        self.config = without_code(config, "config.json", self.left_out)
        self.model = self.empty_model()
        self.rounding = W4A16() if rounding is None and self.scheme is None else rounding
        self.rounded = _rounded(self.model, self.rounding, skip)
        self.left = dict(self.folder.tensors)  # those without a place yet

    def source(self):
        tied = self.tied_names()
        entries, missing = [], []
        for name, parameter in self.model.state_dict().items():
            module, _, suffix = name.rpartition(".")
            if suffix == "weight" and self.scheme and f"{module}.{self.scheme.main}" in self.left:
                if name in tied:
                    raise NotSupportedError(
                        f"{self.where}: tie_word_embeddings is set, but '{module}' has packed weights of its own"
                    )
                entries.append(self.packed(module))
            elif name in self.left:
                entries.append(self.plain(name, module, suffix, parameter))
            elif name not in tied:
                missing.append(name)
        self.leave_out()
        if missing:
            raise ArgumentError(f"{self.folder.path}: tensor '{missing[0]}' is missing ({len(missing)} such tensors)")
        return Source(str(self.folder.path), self.form(entries), type(self.model), self.config, entries, self.left_out)

    def form(self, entries):
        if not self.scheme:
            return "safetensors"
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
        text = self.config.get("text_config")
        fields = {**self.config, **(text if isinstance(text, dict) else {})}
        for key, layers in fields.items():
            counts = type(layers) is int and _LAYERS.fullmatch(key)
            if counts and layers > len(self.folder.tensors):  # before as many are made
                raise ArgumentError(
                    f"{self.where}: {key} is {layers}, but there are {len(self.folder.tensors)} tensors"
                )
        try:
            config = transformers.CONFIG_MAPPING[kind].from_dict(copy.deepcopy(self.config))
            with torch.device("meta"):
                return transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        except Exception as e:  # whatever a wrong field leads to
            reason = str(e).strip().replace("\n", " ")[:300]
            raise ArgumentError(f"{self.where}: transformers makes no causal language model of it: {reason}") from e

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

    def plain(self, name, module, suffix, parameter):
        info = self.left.pop(name)
        if info.shape != tuple(parameter.shape):
            raise ArgumentError(
                f"{info.file}: tensor '{name}' has shape {list(info.shape)}, expected {list(parameter.shape)} by "
                "config.json"
            )
        if parameter.is_floating_point() and info.dtype not in _FLOATS:
            raise NotSupportedError(
                f"{info.file}: tensor '{name}' has dtype {info.dtype}, which is not read without a "
                f"quantization_config; read: {', '.join(_FLOATS)}"
            )
        form = _FLOATS.get(info.dtype, info.dtype)
        rounding = self.rounded.get(name)
        if rounding is not None:
            if info.dtype not in _ROUNDED_FROM:
                raise NotSupportedError(
                    f"{info.file}: tensor '{name}' has dtype {info.dtype}, rounded are {', '.join(_ROUNDED_FROM)}"
                )
            outcome = ROUNDED[rounding.bits]
            return Entry(module, form, outcome, info.nbytes, lambda: rounding.weight_of(self.folder.read(name)))
        return Entry(name, form, KEPT, info.nbytes, lambda: self.folder.read(name))

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
        return isinstance(modules.get(name), torch.nn.Linear)


class _Module:
    """The packed tensors of one linear layer, as a scheme asks for them."""

    def __init__(self, owner, name):
        self.folder, self.name = owner.folder, name
        file = self.folder.tensors[f"{name}.{owner.scheme.main}"].file
        self.where = f"{file}: {name}"
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
    rounded = _rounded(model, rounding, skip)
    entries = []
    for p in parameters:
        module, form = p.name.removesuffix(".weight"), p.type
        if p.keeps_codes:
            entries.append(Entry(module, form, LOSSLESS[4], p.nbytes, lambda p=p: p.read().weight))
        elif p.name in rounded:
            fitting = rounded[p.name]
            read = lambda p=p, fitting=fitting: fitting.weight_of(p.read("float32"))  # noqa: E731
            entries.append(Entry(module, form, ROUNDED[fitting.bits], p.nbytes, read))
        else:
            stored = _FLOATS.get(form)
            outcome = KEPT if stored == dtype else CONVERTED if stored else DEQUANTISED
            entries.append(Entry(p.name, form, outcome, p.nbytes, p.read))
    config = {**model.config.to_diff_dict(), "architectures": [type(model).__name__]}
    return Source(str(path), "GGUF", type(model), config, entries, [])
