# SPDX-License-Identifier: Apache-2.0
"""From any source to a folder that from_pretrained reads, or to a model."""

import fnmatch
import os
import pathlib
import shutil

from rooftile import __version__
from rooftile._arrays import check_flag
from rooftile._progress import progress_bar
from rooftile.checkpoints.folder import read_json
from rooftile.checkpoints.manifest import layout_of, write_manifest
from rooftile.checkpoints.sources import LOSSLESS, ROUNDED, open_source, without_code
from rooftile.checkpoints.writer import ShardWriter, check_target, write_json, written_whole
from rooftile.errors import ArgumentError, ArgumentTypeError, NotSupportedError
from rooftile.experts import STACKS, PackedExperts, PackedStack
from rooftile.gemm import PackedWeight
from rooftile.loaders.regular import check_regular
from rooftile.loaders.tokenizer import load_tokenizer
from rooftile.nn import linear_of

# what goes along as it is: tokenizers, generation, terms of use
_COMPANIONS = (
    "*token*.json",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "generation_config.json",
    "LICENSE*",
    "NOTICE*",
    "USAGE_POLICY*",
)
SHARD_BYTES = 4 * 10**9


def convert(
    source, target, *, rounding=None, skip=(), dtype=None, shard_bytes=SHARD_BYTES, overwrite=False, progress=True
):
    """Writes `target`, a folder that transformers reads once rooftile.integrations.quantizer is imported.

    source: a folder with config.json and safetensors, 16-bit, 4-bit or 8-bit (compressed-tensors pack-quantized, GPTQ,
    in 4 bits AWQ gemm, experts in MXFP4), or a GGUF file. What is in 4 or 8 bits already is repacked, lossless; but
    MXFP4 is rounded, from the values it stands for. rounding: a W4A16 or W8A16 for linear layers and experts that are
    not repacked, except the output head and `skip` (names or shell patterns); None is W4A16() for a 16-bit folder and
    for experts in MXFP4, and keeps what is in 16 bits in every other source. dtype: what a GGUF file's other tensors
    become, "bfloat16" unless given. shard_bytes: the most in one file. overwrite: replace `target`, which must be a
    model's folder. progress: a bar on stderr, or lines where that is no terminal.

    One weight of the source and one file of the target are in memory at a time. `target` is written beside its place
    and renamed: it is there whole or not at all. Returns a report: source, target, form, rows (one for each weight:
    name, from, to, outcome, bytes_before, bytes_after), left (one for each weight that stays in 16 or 32 bits: name,
    elements, why), smaller_groups (name -> group size of what is rounded in smaller groups than asked), elements (of
    the model), left_out (what is not carried over, and why), copied (files).

    The source need not be trusted: no code is run that lies in it or that it names, its expressions are matched for a
    limited time, only regular files are opened, and no tokenizer file comes from behind a link out of it. Raises
    ArgumentError naming file, module and field for what is corrupt, missing or contradicts itself, NotSupportedError
    for what is sound but not mapped, and ArgumentTypeError for a source or target that is no path.
    """
    check_flag("convert", "overwrite", overwrite)
    check_flag("convert", "progress", progress)
    _check_path("convert", "source", source)
    _check_path("convert", "target", target)
    check_target(target, source, overwrite)
    opened = _open(source, rounding, skip, dtype)
    rows, layouts = [], {}
    with written_whole(target, overwrite) as folder:
        copied, left_out = _companions(opened, folder)
        shards = ShardWriter(folder, shard_bytes)
        for entry, value, tensors in _weights(opened, layouts, "Converting", progress):
            shards.add(tensors)
            rows.append(
                {
                    "name": entry.name,
                    "from": entry.form,
                    "to": _form(value),
                    "outcome": entry.outcome,
                    "bytes_before": entry.nbytes,
                    "bytes_after": sum(t.nbytes for t in tensors.values()),
                }
            )
        shards.close()
        write_json(folder / "config.json", {**opened.config, "quantization_config": write_manifest(layouts)})
        check_target(target, source, overwrite)  # hours later something else may be there
    return {
        "rooftile": __version__,
        "source": str(source),
        "target": str(target),
        "form": opened.form,
        "rows": rows,
        **opened.rounding,
        "left_out": opened.left_out + left_out,
        "copied": copied,
    }


def load(source, *, rounding=None, skip=(), dtype=None, device_map=None, progress=True):
    """The model of `source`, without a folder in between: what `convert` and then from_pretrained give.

    source, rounding, skip, progress, errors: as of `convert`. dtype: of activations and of all that is not packed;
    as stored unless given ("bfloat16" for GGUF). device_map: as of from_pretrained. All weights lie in host memory.
    """
    check_flag("load", "progress", progress)
    _check_path("load", "source", source)
    import transformers

    import rooftile.integrations.quantizer  # noqa: F401  registers quant_method "rooftile"

    opened = _open(source, rounding, skip, None if os.path.isdir(source) else dtype)
    layouts, state = {}, {}
    for _, _, tensors in _weights(opened, layouts, "Loading", progress):
        state.update(tensors)
    config = {**opened.config, "quantization_config": write_manifest(layouts)}
    config = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(config)
    dtype = "auto" if dtype is None else dtype
    return opened.model_class.from_pretrained(None, config=config, state_dict=state, dtype=dtype, device_map=device_map)


def _check_path(op, name, path):
    if not isinstance(path, str | os.PathLike):
        raise ArgumentTypeError(f"{op}: {name} must be a path, got {path!r:.60}")
    if not os.fspath(path):
        raise ArgumentError(f"{op}: {name} is empty; expected a path ('.' is the current folder)")


def _open(source, rounding, skip, dtype):
    opened = open_source(source, rounding=rounding, skip=skip, dtype=dtype)
    if not any(e.outcome in (*LOSSLESS.values(), *ROUNDED.values()) for e in opened.entries):
        raise NotSupportedError(
            f"{source}: no layer would be in 4 or 8 bits: none is stored so, and none is a Linear to be "
            "rounded (those of a GGUF file are where a rounding is given, that is --bits, --group-size or --zeros)"
        )
    return opened


def _weights(source, layouts, doing, progress):
    """Yields (entry, value, tensors by their names in the model) of each weight; fills layouts for the manifest."""
    what, total = f"{doing} {os.path.basename(os.path.abspath(source.path))}", sum(e.nbytes for e in source.entries)
    with progress_bar(what, total, unit="bytes", show=progress) as advance:
        for entry in source.entries:
            value = entry.read()
            if isinstance(value, PackedWeight):
                layouts[entry.name] = layout_of(value)
                yield entry, value, linear_of(value).state_dict(prefix=f"{entry.name}.")
            elif isinstance(value, PackedStack):
                layouts[entry.name] = layout_of(value[0])
                experts, _, stack = entry.name.rpartition(".")
                marker = PackedExperts.marker(f"{experts}.") if STACKS[PackedExperts.MARKER[0]] == stack else {}
                yield entry, value, value.state_dict(prefix=f"{entry.name}.") | marker
            else:
                yield entry, value, {entry.name: value}
            advance(entry.nbytes)


def _form(value):
    if isinstance(value, PackedStack):
        value = value[0]
    if not isinstance(value, PackedWeight):
        return str(value.dtype).removeprefix("torch.")
    order = ", act-order" if value.perm is not None else ""
    return f"{value.kind}, groups of {value.group_size}, {value.scale_dtype} scales{order}"


def _companions(source, folder):
    """Brings the tokenizer and the like; returns what came, and what did not and why."""
    path = pathlib.Path(source.path)
    if not path.is_dir():
        try:
            load_tokenizer(path).save_pretrained(folder)
        except NotSupportedError as e:
            return [], [f"tokenizer: {e}"]
        return sorted(os.listdir(folder)), []
    copied, left_out = [], []
    for file in sorted(f for f in path.iterdir() if _goes_along(f.name)):
        try:
            check_regular(file, file.name)
        except ArgumentError as e:
            left_out.append(str(e))
            continue
        if not _inside(file, path):
            left_out.append(f"{file.name}: a link to a file outside the folder")
            continue
        if file.name == "generation_config.json":
            try:
                read_json(file)
            except ArgumentError as e:
                left_out.append(str(e).replace(str(file), file.name, 1))
                continue
        shutil.copyfile(file, folder / file.name)
        if file.name == "tokenizer_config.json":
            config = read_json(file)
            clean = without_code(config, file.name, left_out)
            if clean != config:
                write_json(folder / file.name, clean)
        copied.append(file.name)
    return copied, left_out


def _inside(file, folder):
    """Whether a file, its links followed, lies in its folder, or in a hub's cache, where snapshots/* link to blobs/."""
    file, folder = file.resolve(), folder.resolve()
    blobs = folder.parent.parent / "blobs"
    return file.is_relative_to(folder) or (folder.parent.name == "snapshots" and file.is_relative_to(blobs))


def _goes_along(name):
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in _COMPANIONS)
