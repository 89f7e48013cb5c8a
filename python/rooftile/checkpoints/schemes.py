# SPDX-License-Identifier: Apache-2.0
"""What config.json says of a source's quantisation: read into a scheme, or refused by the name of the field."""

import torch

from rooftile.checkpoints import formats
from rooftile.checkpoints.patterns import matches
from rooftile.errors import ArgumentError, NotSupportedError

_16_BIT = ("F16", "BF16")
_MISSING = object()


def scheme_of(where, config, tensors):
    """The scheme of config["quantization_config"], or None where weights are plain. `where` begins every error.
    tensors: the names of all tensors."""
    fields = config.get("quantization_config")
    if fields is None:
        fields = config.get("compression_config")  # what compressed-tensors wrote at first
    if fields is None:
        return None
    fields = _Fields(where, "quantization_config", fields)
    method = fields.get("quant_method", str)
    if method == "rooftile":
        raise NotSupportedError(f"{where}: quantization_config: quant_method is 'rooftile': nothing is left to convert")
    if method not in _SCHEMES:
        raise NotSupportedError(
            f"{where}: quantization_config: quant_method '{method}' is not read; read: {', '.join(_SCHEMES)}"
        )
    return _SCHEMES[method](fields, tensors)


class _Fields:
    """An object in config.json whose fields are asked for by name and type."""

    def __init__(self, where, name, value):
        if not isinstance(value, dict):
            raise ArgumentError(f"{where}: {name} must be an object, got {value!r:.60}")
        self.where, self.name, self.value = where, name, value

    def get(self, key, kind, default=_MISSING):
        """The field, of type `kind`; null is as good as missing, which needs a default."""
        value = self.value.get(key)
        if value is None:
            if default is _MISSING:
                raise ArgumentError(f"{self.where}: {self.name}: {key} is missing, expected {kind.__name__}")
            return default
        if type(value) is not kind:
            raise ArgumentError(f"{self.where}: {self.name}: {key} must be {kind.__name__}, got {value!r:.60}")
        return value

    def child(self, key):
        return _Fields(self.where, f"{self.name}: {key}", self.value.get(key))

    def refuse(self, key, expected):
        value = self.value.get(key)
        raise NotSupportedError(f"{self.where}: {self.name}: {key} = {value!r:.60} is not read; read: {expected}")

    def expect(self, key, *allowed, default=_MISSING):
        """Refuses every value of the field but these."""
        value = self.value.get(key)
        if value is None and default is not _MISSING:
            return default
        if value is None:
            raise ArgumentError(f"{self.where}: {self.name}: {key} is missing, expected {_words(allowed)}")
        if not any(type(value) is type(a) and value == a for a in allowed):
            self.refuse(key, _words(allowed))
        return value

    def name_of(self, first, second):
        """Which of the two names that a field has is in use; refuses two values that differ."""
        a, b = self.value.get(first), self.value.get(second)
        if a is not None and b is not None and a != b:
            raise ArgumentError(
                f"{self.where}: {self.name}: {first} = {a!r:.60}, but {second} = {b!r:.60}; expected one"
            )
        return second if a is None else first

    def absent(self, *keys):
        """Refuses fields that say something: whatever is not null, false or empty."""
        for key in keys:
            if self.value.get(key):
                self.refuse(key, "null")

    def group_size(self):
        """A number of columns, or None for all of them, which is written -1."""
        size = self.get("group_size", int)
        if size != -1 and size <= 0:
            raise ArgumentError(f"{self.where}: {self.name}: group_size must be positive or -1, got {size}")
        return None if size == -1 else size


def _words(values):
    return " or ".join(repr(v) if isinstance(v, str) else str(v).lower() for v in values)


class _Gptq:
    """qweight, qzeros, scales and g_idx, of 4 or 8 bits; see formats.from_gptq."""

    name = "GPTQ"
    main = "qweight"
    suffixes = ("qweight", "qzeros", "scales", "g_idx")

    def __init__(self, fields, tensors):
        self.bits = fields.expect("bits", 4, 8)
        fields.expect("pack_dtype", "int32", default="int32")
        fields.absent("is_marlin_format", "adapter", "rotation")
        self.size = fields.group_size()
        self.symmetric = fields.get("sym", bool)
        self.act_order = fields.get("desc_act", bool)
        key = fields.name_of("checkpoint_format", "format")
        self.version = fields.expect(key, "gptq", "gptq_v2", default="gptq")
        patterns = fields.get("dynamic", dict, {})
        if any(not str(pattern).startswith("-:") for pattern in patterns):
            fields.refuse("dynamic", "patterns that begin with '-:' (layers left alone)")
        self.left_alone = _matched(fields, [f"re:{p.removeprefix('-:')}" for p in patterns], tensors, self.main)

    def bits_of(self, module):
        return self.bits

    def read(self, module, n, k):
        for expression, modules in self.left_alone.items():
            if module.name in modules:
                pattern = expression.removeprefix("re:")
                raise ArgumentError(
                    f"{module.where}: has qweight, but dynamic of config.json leaves '-:{pattern}' alone"
                )
        group, of_word = module.group_size(self.size, k), 32 // self.bits
        module.divides("the columns of qzeros", n, of_word)
        module.divides("in_features", k, of_word)
        qweight = module.tensor("qweight", (k // of_word, n), ("I32",))
        qzeros = module.tensor("qzeros", (k // group, n // of_word), ("I32",))
        scales = module.tensor("scales", (k // group, n), _16_BIT)
        g_idx = module.tensor("g_idx", (k,), ("I32",), optional=not self.act_order)
        if (
            g_idx is not None
            and not self.act_order
            and not torch.equal(g_idx, torch.arange(k, device=g_idx.device) // group)
        ):
            raise ArgumentError(
                f"{module.where}: g_idx is not 0, 0, .. 1, 1, ..; expected that, since the config says desc_act = false"
            )
        return formats.from_gptq(
            module.where,
            self.bits,
            qweight,
            qzeros,
            scales,
            k,
            group,
            stored_minus_one=self.version == "gptq",
            symmetric=self.symmetric,
            g_idx=g_idx,
        )


class _Awq:
    """qweight, qzeros and scales, of 4 bits; see formats.from_awq."""

    name = "AWQ"
    main = "qweight"
    suffixes = ("qweight", "qzeros", "scales")

    def __init__(self, fields, tensors):
        fields.expect("bits", 4)
        fields.expect("zero_point", True, default=True)
        key = fields.name_of("version", "format")
        if fields.get(key, str, "gemm").lower() != "gemm":
            fields.refuse(key, "'gemm'")
        self.size = fields.group_size()
        self.plain = _names(fields, "modules_to_not_convert", "names", [])

    def bits_of(self, module):
        return 4

    def read(self, module, n, k):
        for name in self.plain:
            if name in module.name:
                raise ArgumentError(
                    f"{module.where}: has qweight, but modules_to_not_convert of config.json names '{name}'"
                )
        group = module.group_size(self.size, k)
        module.divides("the columns of qweight", n, 8)
        qweight = module.tensor("qweight", (k, n // 8), ("I32",))
        qzeros = module.tensor("qzeros", (k // group, n // 8), ("I32",))
        scales = module.tensor("scales", (k // group, n), _16_BIT)
        return formats.from_awq(module.where, qweight, qzeros, scales, k, group)


class _CompressedTensors:
    """Format pack-quantized: weight_packed, weight_scale, weight_shape and what else a group asks for."""

    name = "compressed-tensors"
    main = "weight_packed"
    suffixes = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")

    def __init__(self, fields, tensors):
        fields.absent("kv_cache_scheme", "sparsity_config", "transform_config")
        fields.expect("quantization_status", "compressed", "frozen", default="compressed")
        self.ignore = _names(fields, "ignore", _PATTERNS, [])
        groups = fields.child("config_groups")
        self.groups = [_WeightGroup(fields, groups.child(name)) for name in groups.value]
        self.of_target = {}  # target -> its group
        for group in self.groups:
            for target in group.targets:
                if self.of_target.setdefault(target, group) is not group:
                    raise ArgumentError(
                        f"{fields.where}: {fields.name}: config_groups: '{target:.60}' is a target of two groups"
                    )
        self.means = _matched(fields, [*self.ignore, *self.of_target], tensors, self.main)

    def named(self, pattern, module):
        return pattern == "Linear" or module.name in self.means[pattern]

    def group_of(self, module):
        """As compressed-tensors chooses: a module's name goes before expressions, in their alphabetical order, and
        these before the name of its class."""
        if any(self.named(pattern, module) for pattern in self.ignore):
            raise ArgumentError(f"{module.where}: has weight_packed, but `ignore` of config.json matches it")
        targets = sorted(self.of_target, key=lambda target: (target == "Linear", target.startswith("re:"), target))
        target = next((target for target in targets if self.named(target, module)), None)
        if target is None:
            raise ArgumentError(f"{module.where}: has weight_packed, but `targets` of no group in config.json match it")
        return self.of_target[target]

    def bits_of(self, module):
        return self.group_of(module).bits

    def read(self, module, n, k):
        group = self.group_of(module)
        size, of_word = module.group_size(group.size, k), 32 // group.bits
        shape = module.tensor("weight_shape", (2,), ("I64", "I32")).tolist()
        if shape != [n, k]:
            raise ArgumentError(f"{module.where}: weight_shape holds {shape}, expected [{n}, {k}]")
        return formats.from_compressed_tensors(
            module.where,
            group.bits,
            module.tensor("weight_packed", (n, -(-k // of_word)), ("I32",)),
            module.tensor("weight_scale", (n, k // size), _16_BIT),
            n,
            k,
            size,
            None if group.symmetric else module.tensor("weight_zero_point", (-(-n // of_word), k // size), ("I32",)),
            module.tensor("weight_g_idx", (k,), ("I32", "I64")) if group.act_order else None,
        )


_INERT = {"observer", "observer_kwargs", "scale_dtype", "zp_dtype"}  # how codes were found; dtypes that tensors tell
_READ = {"num_bits", "type", "symmetric", "strategy", "group_size", "actorder", "dynamic"}


class _WeightGroup:
    """One of config_groups: what its weights are."""

    def __init__(self, top, fields):
        (top if fields.value.get("format") is None else fields).expect("format", "pack-quantized")
        fields.absent("input_activations", "output_activations")
        self.targets = _names(fields, "targets", _PATTERNS)
        weights = fields.child("weights")
        self.bits = weights.expect("num_bits", 4, 8)
        weights.expect("type", "int")
        weights.absent("dynamic", *sorted(set(weights.value) - _INERT - _READ))
        self.symmetric = weights.get("symmetric", bool)
        strategy = weights.expect("strategy", "group", "channel")
        self.size = weights.group_size() if strategy == "group" else None
        order = weights.expect("actorder", False, "group", "dynamic", "weight", "static", default=None)
        self.act_order = order in ("group", "dynamic")  # "weight": the order of quantising, not of storing


def _matched(fields, patterns, tensors, main):
    """patterns.matches() with the modules that have a tensor of the name `main`."""
    suffix = f".{main}"
    modules = [name.removesuffix(suffix) for name in tensors if name.endswith(suffix)]
    return matches(f"{fields.where}: {fields.name}", patterns, modules)


_PATTERNS = "names and 're:' expressions"


def _names(fields, key, what, default=_MISSING):
    values = fields.get(key, list, default)
    for value in values:
        if not isinstance(value, str):
            raise ArgumentError(f"{fields.where}: {fields.name}: {key} must hold {what}, got {value!r:.60}")
    return values


class Mxfp4:
    """Fused experts as NAME_blocks and NAME_scales, see formats.from_mxfp4; everything else is plain. Which experts
    these are the tensors say, whatever modules_to_not_convert names."""

    name = "MXFP4"
    main = None

    def __init__(self, fields, tensors):
        pass


_SCHEMES = {"compressed-tensors": _CompressedTensors, "gptq": _Gptq, "awq": _Awq, "mxfp4": Mxfp4}
