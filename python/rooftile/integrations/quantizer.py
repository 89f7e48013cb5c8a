# SPDX-License-Identifier: Apache-2.0
"""Hugging Face transformers (>= 5.17): 4-bit and 8-bit weights through from_pretrained and save_pretrained.

    from rooftile.integrations.quantizer import RooftileConfig       # also registers quant_method "rooftile"

    model = AutoModelForCausalLM.from_pretrained("converted-folder")
    model = AutoModelForCausalLM.from_pretrained("bf16-folder", quantization_config=RooftileConfig(group_size=64))

A converted folder says in config.json which modules are W4Linear or W8Linear and what their bytes mean; these replace
the linear layers before the weights are read. A 16-bit folder is rounded layer by layer while it is read: when the
weight of a linear layer comes, the layer becomes a W4Linear or W8Linear, so the model is never in memory as a whole in
16 bits.
"""

import re

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightRenaming, rename_source_key
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils import logging
from transformers.utils.quantization_config import QuantizationConfigMixin

from rooftile._arrays import aligned
from rooftile.checkpoints.folder import safetensors_header
from rooftile.checkpoints.manifest import QUANT_METHOD, layout_of, read_manifest, write_manifest
from rooftile.errors import ArgumentError, NotSupportedError
from rooftile.experts import STACKS, PackedExperts, PackedStack, experts_form
from rooftile.gemm import ARRAYS
from rooftile.nn import LINEARS, Packed, PackedLinear, check_tensors, take_over
from rooftile.quantize import RoundingPlan, name_patterns, rounding_of

_logger = logging.get_logger(__name__)
_DTYPES = {torch.uint8: "U8", torch.int32: "I32", torch.int64: "I64"}


@register_quantization_config(QUANT_METHOD)
class RooftileConfig(QuantizationConfigMixin):
    """How from_pretrained rounds a 16-bit model: to 4 or 8 `bits`; group_size and zeros as in rt.W4A16 and rt.W8A16
    (zeros "symmetric"), skip as in rt.quantize_.

    layout, layouts: of a model that is in 4 or 8 bits already; config.json holds them (rooftile convert and
    save_pretrained write it).
    """

    def __init__(
        self,
        group_size=128,
        zeros="symmetric",
        skip=(),
        *,
        bits=4,
        layout=None,
        layouts=None,
        quant_method=None,
        **unknown,
    ):
        if unknown:
            raise ArgumentError(f"RooftileConfig: there is no field {min(unknown)!r}")
        if quant_method not in (None, QUANT_METHOD):
            raise ArgumentError(f"RooftileConfig: quant_method must be {QUANT_METHOD!r}, got {quant_method!r}")
        self.quant_method = QUANT_METHOD
        self.rounding = rounding_of("RooftileConfig", bits, group_size, zeros)
        self.skip = name_patterns("RooftileConfig", skip)
        self.modules = None if layouts is None else read_manifest(layout, layouts)

    @classmethod
    def of(cls, model):
        """Of a model that holds W4Linear or W8Linear modules already (rt.quantize_, load_gguf).

        `model.config.quantization_config = RooftileConfig.of(model)`, and save_pretrained writes a folder to load.
        """
        config = cls()
        config.modules = {}
        for name, module in model.named_modules():
            if isinstance(module, PackedLinear):
                config.modules[name] = layout_of(module.weight)
            elif isinstance(module, PackedStack):
                config.modules[name] = layout_of(module[0])
        return config

    def to_dict(self):
        if self.modules is not None:
            return write_manifest(self.modules)
        return {
            "quant_method": QUANT_METHOD,
            "bits": self.rounding.bits,
            "group_size": self.rounding.group_size,
            "zeros": self.rounding.zeros,
            "skip": self.skip,
        }


@register_quantizer(QUANT_METHOD)
class RooftileQuantizer(HfQuantizer):
    """What transformers calls while it loads and saves a model with a RooftileConfig.

    report: of a model that is rounded while it is read, its RoundingReport (`model.hf_quantizer.report`).
    """

    requires_calibration = False

    def __init__(self, quantization_config, **kwargs):
        super().__init__(quantization_config, **kwargs)
        if self.pre_quantized and quantization_config.modules is None:
            raise ArgumentError("config.json: quantization_config: layouts is missing; expected what convert writes")

    def _process_model_before_weight_loading(self, model, checkpoint_files=None, **kwargs):
        if self.pre_quantized:
            self._replace(model, checkpoint_files)
            return
        config = self.quantization_config
        self.plan = RoundingPlan("RooftileConfig", model, config.rounding, config.skip)
        self.report = self.plan.report

    def _replace(self, model, checkpoint_files):
        """Empty W4Linear and W8Linear modules in the places that config.json names."""
        prefix, names = f"{model.base_model_prefix}.", {name for name, _ in model.named_modules()}
        text = _text_model(model)
        tensors, markers = _tensors(model, checkpoint_files), set()
        for name, layout in self.quantization_config.modules.items():
            where = f"config.json: quantization_config: module '{name}'"
            # either this model or the one that was saved may be the base model alone; the text model may have been
            # rounded alone, whose config is one of the whole model's
            forms = (name, name.removeprefix(prefix), prefix + name, *([f"{text}.{name}"] if text else ()))
            places = [n for n in forms if {n, _experts_of(n)} & names]
            stack = places and places[0] not in names
            for form in forms:
                holder, kind = (_experts_of(form), PackedExperts) if stack else (form, PackedLinear)
                markers.add(f"{holder}.{kind.MARKER[0]}")
            if not places:
                if not hasattr(model, model.base_model_prefix) and not name.startswith(prefix):
                    continue  # a head, and this is the base model alone
                raise ArgumentError(f"{where} is not in a {type(model).__name__}")
            module = (_empty_stack if stack else _empty_linear)(where, model, places[0], layout)
            if tensors:  # from_pretrained may be given a state_dict instead
                _check_tensors(where, module, forms, tensors)
        for name, module in model.named_modules():
            if isinstance(module, PackedExperts) and None in (module.gate_up, module.down):
                raise ArgumentError(
                    f"config.json: quantization_config: '{name}' has one of {', '.join(STACKS.values())}, expected both"
                )
        model._keys_to_ignore_on_load_unexpected = {
            *(model._keys_to_ignore_on_load_unexpected or ()),
            rf"^({'|'.join(map(re.escape, sorted(markers)))})$",
        }

    def param_needs_quantization(self, model, param_name, **kwargs):
        _refuse_meshes(model)  # before a weight is read; what is in 4 or 8 bits already is not asked for
        return not self.pre_quantized and param_name in self.plan.roundings

    def get_quantize_ops(self):
        return _Round(self)

    def _process_model_after_weight_loading(self, model, **kwargs):
        _refuse_meshes(model)
        if not self.pre_quantized:
            _logger.warning("%s", self.report)
            # another object: the caller may round another model with theirs
            self.quantization_config = model.config.quantization_config = RooftileConfig.of(model)
        for module in model.modules():
            if isinstance(module, PackedLinear | PackedExperts):
                for bias in module.parameters():
                    bias.requires_grad_(False)
                    bias.data = aligned(bias.data)
            if isinstance(module, Packed):
                for name, array in module.named_buffers(recurse=False):  # bytes, and scales of two
                    setattr(module, name, aligned(array, max(2, array.element_size())))

    def is_serializable(self, *args, **kwargs):
        return True

    @property
    def is_trainable(self):
        return False

    @property
    def is_compileable(self):
        return True


class _Round(ConversionOps):
    """A weight, just read: the linear layer or the experts that it is of become packed ones."""

    def __init__(self, quantizer):
        self.quantizer = quantizer

    def convert(self, input_dict, *, model, full_layer_name, missing_keys=None, **kwargs):
        (value,) = input_dict.values()
        value = value[0] if isinstance(value, list) else value
        self.quantizer.plan.check(full_layer_name, value)
        self.quantizer.plan.round(model, full_layer_name, value)
        if missing_keys is not None:
            missing_keys.discard(full_layer_name)
        return {}


def _text_model(model):
    """The name of the module that is the text model of a model with vision or audio towers; "": the model is one."""
    config = model.config.get_text_config(decoder=True)
    parts = ((name, getattr(part, "config", None)) for name, part in model.named_modules())
    return next((name for name, own in parts if own is config), "")


def _refuse_meshes(model):
    """transformers wraps the forwards that hold its collectives before the weights come, and cuts no packed buffer."""
    mesh = getattr(model, "_device_mesh", None)
    if mesh is not None and mesh.size() > 1:
        raise NotSupportedError(
            f"RooftileConfig: distributed_config spreads the model over {mesh.size()} devices, and modules in 4 or 8 "
            "bits are not cut into shards; expected one device a model (leave distributed_config out)"
        )


def _tensors(model, checkpoint_files):
    """name -> TensorInfo, by the names in the files and by those that transformers gives them while it reads."""
    tensors = {info.name: info for file in checkpoint_files or () for info in safetensors_header(file)}
    renamings = [entry for entry in get_model_conversion_mapping(model) if isinstance(entry, WeightRenaming)]
    for name, info in list(tensors.items()):
        tensors.setdefault(rename_source_key(name, renamings, [])[0], info)
    return tensors


def _experts_of(name):
    """The experts module that a stack of this name is in; None for any other name."""
    parent, _, last = name.rpartition(".")
    return parent if last in STACKS.values() else None


def _empty_stack(where, model, name, layout):
    """An empty PackedStack in the place of a parameter of an experts module."""
    parent, _, stack = name.rpartition(".")
    experts = model.get_submodule(parent)
    if not isinstance(experts, PackedExperts):
        form = experts_form(experts)
        if form is None:
            raise ArgumentError(f"{where} is in a {type(experts).__name__}, expected experts of a known form")
        before, experts = experts, PackedExperts(experts, form)
        take_over(experts, before)
        model.set_submodule(parent, experts)
    parameter = next(key for key, value in STACKS.items() if value == stack)
    n, k = experts.form.shape(parameter)
    module = PackedStack(experts.form.experts, k, n, device="meta", **layout)
    experts.pack(parameter, module)
    return module


def _empty_linear(where, model, name, layout):
    """An empty W4Linear or W8Linear in the place of a linear layer."""
    linear = model.get_submodule(name)
    if type(linear) is not torch.nn.Linear:
        raise ArgumentError(f"{where} is a {type(linear).__name__}, expected a Linear")
    keywords = {key: value for key, value in layout.items() if key != "bits"}
    module = LINEARS[layout["bits"]](
        linear.in_features,
        linear.out_features,
        linear.bias is not None,
        device="meta",
        dtype=linear.weight.dtype,
        **keywords,
    )
    take_over(module, linear)
    model.set_submodule(name, module)
    return module


def _check_tensors(where, module, forms, tensors):
    """check_tensors of what the files hold: a missing one would be random bytes with a warning, one that config.json
    knows nothing of left unread. forms: of the module's name; the files have one of them."""
    expected = module.state_dict()
    name = next((form for form in forms if any(f"{form}.{suffix}" in tensors for suffix in expected)), forms[0])

    def place(suffix, info):
        return f"{where}: tensor '{name}.{suffix}'" if info is None else f"{info.file}: tensor '{info.name}'"

    came = {suffix: tensors.get(f"{name}.{suffix}") for suffix in (*expected, *ARRAYS)}
    check_tensors(module, expected, came, place, _DTYPES.get)
