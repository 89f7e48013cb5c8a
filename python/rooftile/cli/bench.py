# SPDX-License-Identifier: Apache-2.0
"""`rooftile bench FAMILY`: the kernels against the machine's roof, and against their peers, on one GPU; `rooftile bench
e2e`: a whole model, on a GPU or the CPU."""

import argparse
import math
import os

from rooftile import _C
from rooftile._results import COMMIT_HELP, head, machine
from rooftile.cli._device import usable_device
from rooftile.cli._files import check_writable, write_json
from rooftile.cli._tables import print_whole
from rooftile.cli.ppl import positive
from rooftile.errors import ArgumentError, DeviceError

SUMMARY = "time a whole model, or one kernel family on a GPU: share of the measured roof, peers beside it"
FAMILIES = {
    "decode": "attention over a cache, append",
    "w4a16": "products with weights in 4 bits",
    "w8a16": "products with weights in 8 bits",
    "linear": "products with weights in 16 bits",
    "ops": "what lies between: norms, rotary embedding, activations, softmax",
}
_E2E = "a whole model, token by token: transformers, rooftile's steps, rounded weights"


def add_arguments(parser):
    families = parser.add_subparsers(dest="family", metavar="FAMILY", required=True)
    for name, what in FAMILIES.items():
        _add_kernel_arguments(families.add_parser(name, help=what, description=what))
    _add_e2e_arguments(families.add_parser("e2e", help=_E2E, description=_E2E))


def _add_kernel_arguments(parser):
    add = parser.add_argument
    add("--peers", action="store_true", help="also time torch's own kernels, and what else is installed")
    add("--without", metavar="PEER", action="append", help="not this peer (may be given again)")
    add("--seconds", metavar="N", type=_seconds, help="begin no case after so long; what is left out is listed")
    add("--only", metavar="TEXT", action="append", help="cases whose name holds TEXT (may be given again)")
    add("--case", metavar="NAME", action="append", help="these cases, also such as are not in the list")
    add("--list", action="store_true", help="print the names of the cases and stop")
    add("--commit", metavar="NAME", help=COMMIT_HELP)
    add("--json", metavar="FILE", help="write the results file")


def _add_e2e_arguments(parser):
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--config", default="llama3.1-8b", help="shapes of the model, random weights (llama3.1-8b)")
    source.add_argument("--model", metavar="PATH", help="a GGUF file, or a folder of transformers")
    add("--batch", type=_sizes, default=(1, 16), metavar="LIST", help="rows at once, with commas (default: 1,16)")
    add("--prompt", type=positive, default=512, metavar="N", help="tokens of the prompt (default: %(default)s)")
    add("--tokens", type=_two_or_more, default=256, metavar="N", help="tokens written (default: %(default)s)")
    add("--device", default="cuda", help="cuda (default) or cpu")
    add("--threads", type=positive, metavar="N", help="CPU threads (default: as many as torch takes)")
    add("--commit", metavar="NAME", help=COMMIT_HELP)
    add("--json", metavar="FILE", help="write the results file")


def _sizes(text):
    return tuple(positive(size) for size in text.split(","))


def _two_or_more(text):
    if positive(text) < 2:
        raise argparse.ArgumentTypeError("expected at least 2: a token's time is a difference, got 1")
    return int(text)


def _seconds(text):
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


def run(args):
    return _run_e2e(args) if args.family == "e2e" else _run_kernels(args)


def _run_e2e(args):
    check_writable(args.json, "--json", **{"--model": args.model})
    device = usable_device(args.device)
    import torch
    from rich.console import Console

    from rooftile._progress import progress_bar
    from rooftile.bench import e2e

    if args.model is None and args.config not in e2e.CONFIGS:
        raise ArgumentError(
            f"--config: expected one of {', '.join(e2e.CONFIGS)}, got {args.config!r}"
            f"{_C.did_you_mean(args.config, *e2e.CONFIGS)}"
        )
    if args.model is not None and not os.path.exists(args.model):
        raise ArgumentError(f"--model {args.model}: there is no such file or folder")
    if args.threads:
        torch.set_num_threads(args.threads)
    source = args.model or args.config
    with progress_bar(f"Timing {os.path.basename(source)}", len(e2e.ROWS) * len(args.batch)) as advance:
        rows, read = e2e.run(source, args.batch, args.prompt, args.tokens, device, advance=advance)
    result = {
        **head("e2e", args.commit),
        "machine": machine(device),
        "run": {
            "model": os.path.basename(source),
            "weights": "random" if args.model is None else "stored",
            "prompt": args.prompt,
            "tokens": args.tokens,
            "device": device,
            "threads": torch.get_num_threads(),
        },
        "read_gb_s": read,
        "rows": rows,
    }
    if args.json:
        write_json(args.json, result, "--json")
    run = result["run"]
    console = Console()
    console.print(
        f"{run['model']}, {run['weights']} weights, prompt of {args.prompt} tokens and {args.tokens} greedy ones, on "
        f"{machine(device).get('gpu') or machine(device)['cpu']}, which reads {read:.0f} GB/s",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    print_whole(console, e2e.table(rows))
    return 0


def _run_kernels(args):
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
