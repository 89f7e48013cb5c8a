# SPDX-License-Identifier: Apache-2.0
"""`rooftile bench FAMILY`: the kernels against the machine's roof, and against their peers, on one GPU."""

import argparse
import math

from rooftile import _C
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
    add("--without", metavar="PEER", action="append", help="not this peer (may be given again)")
    add("--seconds", metavar="N", type=_seconds, help="begin no case after so long; what is left out is listed")
    add("--only", metavar="TEXT", action="append", help="cases whose name holds TEXT (may be given again)")
    add("--case", metavar="NAME", action="append", help="these cases, also such as are not in the list")
    add("--list", action="store_true", help="print the names of the cases and stop")
    add("--commit", metavar="NAME", help=COMMIT_HELP)
    add("--json", metavar="FILE", help="write the results file")


def _seconds(text):
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


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
        try:
            family.parse(case)
        except ArgumentError as e:
            raise ArgumentError(f"--case: {e}{_C.did_you_mean(case, *family.CASES)}") from None
    for peer in args.without or ():
        if peer not in family.PEERS:
            hint = _C.did_you_mean(peer, *family.PEERS)
            raise ArgumentError(f"--without {peer}: the peers of {args.family} are {', '.join(family.PEERS)}{hint}")
    check_writable(args.json, "--json")

    import torch
    from rich.console import Console

    from rooftile._progress import progress_bar
    from rooftile.bench import report, runner, timing

    if _C.gpu_backend().startswith("none") or not torch.cuda.is_available():
        raise DeviceError(
            f"bench needs a GPU; kernels: {_C.gpu_backend()}; torch sees {torch.cuda.device_count()} GPUs"
        )
    peers = [name for name in family.PEERS if name not in (args.without or ())] if args.peers else []
    rows, notes, lost = [], runner.Notes(), None
    with torch.inference_mode():
        facts, timer = machine("cuda"), timing.GpuTimer()
        ceiling = timing.ceilings(timer)

        def result():
            return report.report(args.family, rows, ceiling, peers, notes, facts, args.commit)

        with progress_bar(f"Timing {args.family}", len(cases)) as advance:
            run = runner.run(family, cases, peers, ceiling, timer, notes, advance=advance, seconds=args.seconds)
            try:
                for found in run:
                    rows += found
                    if args.json:  # a run that is stopped leaves what it has
                        write_json(args.json, result(), "--json")
            except DeviceError as e:
                lost = e
    if args.json:
        write_json(args.json, result(), "--json")
    print_whole(Console(), report.table(result()))
    if lost:
        raise lost
    return int(any(note["failed"] for note in notes.left_out))
