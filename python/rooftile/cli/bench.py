# SPDX-License-Identifier: Apache-2.0
"""`rooftile bench FAMILY`: the kernels against the machine's roof, and against their peers, on one GPU."""

from rooftile._results import COMMIT_HELP, machine
from rooftile.cli._files import check_writable, write_json
from rooftile.cli._tables import print_whole
from rooftile.errors import ArgumentError, DeviceError

SUMMARY = "time one kernel family on a GPU: microseconds, share of the measured roof, peers beside it"
FAMILIES = ("decode", "w4a16", "w8a16", "linear", "ops")


def add_arguments(parser):
    add = parser.add_argument
    add(
        "family",
        choices=FAMILIES,
        help="decode: attention over a cache, append; w4a16, w8a16, linear: products; ops: what lies between",
    )
    add("--peers", action="store_true", help="also time torch's own kernels, and what else is installed")
    add("--only", metavar="TEXT", action="append", help="cases whose name holds TEXT (may be given again)")
    add("--case", metavar="NAME", action="append", help="these cases, also such as are not in the list")
    add("--list", action="store_true", help="print the names of the cases and stop")
    add("--commit", metavar="NAME", help=COMMIT_HELP)
    add("--json", metavar="FILE", help="write the results file")


def run(args):
    import importlib

    family = importlib.import_module(f"rooftile.bench.{args.family}")
    cases = tuple(args.case or family.CASES)
    if args.only:
        cases = tuple(case for case in cases if any(text in case for text in args.only))
    if not cases:
        raise ArgumentError(f"--only: no case of {args.family} holds {' or '.join(args.only)}; see --list")
    if args.list:
        print("\n".join(cases))
        return 0
    for case in cases:
        family.parse(case)
    check_writable(args.json, "--json")

    import torch
    from rich.console import Console

    from rooftile import _C
    from rooftile._progress import progress_bar
    from rooftile.bench import report, timing

    if _C.gpu_backend().startswith("none") or not torch.cuda.is_available():
        raise DeviceError(
            f"bench needs a GPU; kernels: {_C.gpu_backend()}; torch sees {torch.cuda.device_count()} GPUs"
        )
    with torch.inference_mode():
        before = machine("cuda")
        ceiling = timing.ceilings()
        with progress_bar(f"Timing {args.family}", family.steps(cases)) as advance:
            rows, missing = family.run(cases, args.peers, ceiling, advance)
        result = report.report(args.family, rows, ceiling, missing, (before, machine("cuda")), args.commit)
    print_whole(Console(), report.table(result))
    if args.json:
        write_json(args.json, result, "--json")
    return 0
