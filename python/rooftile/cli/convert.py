# SPDX-License-Identifier: Apache-2.0
"""`rooftile convert`: a checkpoint into a folder of 4-bit or 8-bit weights that from_pretrained reads."""

import argparse
import os
import re

from rooftile._rounding_report import kind_of, notes
from rooftile.cli._files import check_writable, write_json
from rooftile.cli._tables import print_whole
from rooftile.quantize import rounding_of

SUMMARY = (
    "a checkpoint (16-bit, compressed-tensors, GPTQ, AWQ, MXFP4, GGUF) into 4-bit or 8-bit weights for from_pretrained"
)

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def add_arguments(parser):
    add = parser.add_argument
    add("source", metavar="SOURCE", help="a folder with config.json and safetensors files, or a GGUF file")
    add("target", metavar="TARGET", help="the folder to write; must not be there yet, or be empty")
    add(
        "--group-size",
        type=int,
        metavar="N",
        help="round what is not packed yet in groups of N (16-bit folders, MXFP4: 128 unless given), or in the largest "
        "smaller ones that fit a layer",
    )
    add("--bits", type=int, choices=(4, 8), help="to how many bits they are rounded (default: 4)")
    add("--zeros", choices=("symmetric", "minima"), help="how they are rounded (default: symmetric; minima: of 4 bits)")
    add("--skip", action="append", default=[], metavar="PATTERN", help="leave these of them as they are; repeatable")
    add(
        "--dtype", choices=("bfloat16", "float16", "float32"), help="of a GGUF file's other tensors (default: bfloat16)"
    )
    add("--shard-size", type=_bytes, default="4GB", metavar="SIZE", help="the most in one file (default: %(default)s)")
    add("--overwrite", action="store_true", help="replace TARGET where it is a model's folder")
    add("--json", metavar="FILE", help="write what became of every weight as JSON")


def _bytes(text):
    match = re.fullmatch(r"(\d+)([KMG]I?B)", text.upper())
    if not match or not int(match[1]):
        raise argparse.ArgumentTypeError(f"expected a size such as 500MB, 4GB or 2GiB, got {text!r}")
    return int(match[1]) * _UNITS[match[2]]


def run(args):
    check_writable(args.json, "--json", SOURCE=args.source, TARGET=args.target)
    rounding = None
    if any(given is not None for given in (args.bits, args.group_size, args.zeros)):
        group_size = 128 if args.group_size is None else args.group_size
        rounding = rounding_of("convert", args.bits or 4, group_size, args.zeros or "symmetric")
    from rich.console import Console

    from rooftile.checkpoints import convert

    report = convert(
        args.source,
        args.target,
        rounding=rounding,
        skip=args.skip,
        dtype=args.dtype,
        shard_bytes=args.shard_size,
        overwrite=args.overwrite,
    )
    if args.json:
        write_json(args.json, report, "--json")
    console = Console()
    _print(console, report)
    if args.json:
        console.print(f"What became of every weight: {args.json}", soft_wrap=True)
    console.print(*_loading_lines(report["target"]), sep="\n", soft_wrap=True, highlight=False, markup=False)
    return 0


def _print(console, report):
    from rich.table import Table
    from rich.text import Text

    kinds = {}  # rows of the table: all weights of one kind with one fate
    for row in report["rows"]:
        kind = (kind_of(row["name"]), row["from"], row["to"], row["outcome"])
        count, before, after = kinds.get(kind, (0, 0, 0))
        kinds[kind] = (count + 1, before + row["bytes_before"], after + row["bytes_after"])
    table = Table(title=Text(f"{report['source']} ({report['form']})"), title_justify="left", box=None)
    for name in ("weights", "number", "from", "to", "outcome", "MiB before", "MiB after"):
        table.add_column(name, justify="right" if name == "number" or "MiB" in name else "left")
    for (kind, *words), (count, before, after) in kinds.items():
        table.add_row(kind, str(count), *words, _mib(before), _mib(after))
    table.add_section()
    sums = [sum(row[key] for row in report["rows"]) for key in ("bytes_before", "bytes_after")]
    table.add_row("all", str(len(report["rows"])), "", "", "", *map(_mib, sums))
    print_whole(console, table)
    left = {row["name"]: (row["elements"], row["why"]) for row in report["left"]}
    lines = notes(report["group_size"], report["smaller_groups"], left, report["elements"])
    lines += [f"Left out: {line}" for line in report["left_out"]]
    if report["copied"]:
        lines.append(f"Copied: {', '.join(report['copied'])}")
    lines.append(f"Written: {report['target']}")
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False, markup=False)  # names in a file may look like markup


def _loading_lines(target):
    """The Python that loads what was written."""
    return [
        "",
        "To load it:",
        "",
        "    import rooftile.integrations.transformers  # before from_pretrained: it registers the weights' format",
        "    import transformers",
        "",
        f'    model = transformers.AutoModelForCausalLM.from_pretrained({os.path.abspath(target)!r}, dtype="auto")',
    ]


def _mib(size):
    return f"{size / 2**20:,.2f}"
