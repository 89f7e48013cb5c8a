# SPDX-License-Identifier: Apache-2.0
"""The quantization_config of a rooftile checkpoint: its W4Linear and W8Linear modules, and what their bytes mean."""

from rooftile import _C
from rooftile.errors import ArgumentError, NotSupportedError
from rooftile.gemm import WEIGHTS

QUANT_METHOD = "rooftile"
_FIELDS = {"bits": int, "kind": str, "group_size": int, "scale_dtype": str, "act_order": bool, "modules": list}


def layout_of(weight):
    """What the manifest says of a weight: its bits, and the keywords that its module takes beside sizes."""
    return {
        "bits": weight.BITS,
        "kind": weight.kind,
        "group_size": weight.group_size,
        "scale_dtype": weight.scale_dtype,
        "act_order": weight.perm is not None,
    }


def write_manifest(modules):
    """The object for config.json. modules: module name -> layout_of its weight."""
    layouts = {}
    for name, layout in modules.items():
        layouts.setdefault(tuple(layout.items()), []).append(name)
    return {
        "quant_method": QUANT_METHOD,
        "layout": _C.w4_layout_version,
        "layouts": [{**dict(layout), "modules": names} for layout, names in layouts.items()],
    }


def read_manifest(layout, layouts):
    """What write_manifest was given. Raises ArgumentError naming the field, and NotSupportedError for another layout of
    bytes."""
    if layout != _C.w4_layout_version:
        raise NotSupportedError(
            f"quantization_config: layout is {layout!r}, this rooftile reads {_C.w4_layout_version}; convert again"
        )
    if not isinstance(layouts, list):
        raise ArgumentError(f"quantization_config: layouts must be a list, got {layouts!r:.60}")
    modules = {}
    for i, entry in enumerate(layouts):
        where = f"quantization_config: layouts[{i}]"
        if isinstance(entry, dict):
            entry = {"bits": 4, **entry}  # which folders did not say while there were no others
        if not isinstance(entry, dict) or entry.keys() != _FIELDS.keys():
            raise ArgumentError(f"{where} must have {', '.join(_FIELDS)}, got {entry!r:.120}")
        for field, kind in _FIELDS.items():
            if type(entry[field]) is not kind:
                raise ArgumentError(f"{where}: {field} must be {kind.__name__}, got {entry[field]!r:.60}")
        if entry["bits"] not in WEIGHTS:
            raise ArgumentError(f"{where}: bits must be {' or '.join(map(str, WEIGHTS))}, got {entry['bits']}")
        kinds = WEIGHTS[entry["bits"]].KINDS
        if entry["kind"] not in kinds or entry["scale_dtype"] not in ("float16", "bfloat16"):
            raise ArgumentError(
                f"{where}: kind and scale_dtype must be one of {', '.join(kinds)} and one of float16, bfloat16, "
                f"got {entry['kind']!r} and {entry['scale_dtype']!r}"
            )
        for name in entry["modules"]:
            if not isinstance(name, str) or name in modules:
                raise ArgumentError(f"{where}: modules must be different names, got {name!r:.60}")
            modules[name] = {key: value for key, value in entry.items() if key != "modules"}
    return modules
