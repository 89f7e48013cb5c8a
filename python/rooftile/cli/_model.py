# SPDX-License-Identifier: Apache-2.0
"""What `generate` and `chat` have in common: a model from a file or folder, made fast, and texts that it writes."""

import argparse
import math
import os
import sys
import time

from rooftile.cli._device import usable_device
from rooftile.cli.ppl import positive, threads
from rooftile.errors import ArgumentError, NotSupportedError
from rooftile.loaders.folder import folder_config, folder_model, folder_tokenizer, packed_by

ROUNDED = ("w4a16", "w8a16")
_NATIVE_FORMAT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def add_model_arguments(parser):
    add = parser.add_argument
    add("model", metavar="MODEL", help="a GGUF file, or a folder with config.json, safetensors files and a tokenizer")
    add(
        "--weights",
        choices=("stored", *ROUNDED),
        default="stored",
        help="w4a16, w8a16: round the layers that are in 16 bits (default: as the file stores them)",
    )
    add("--head", choices=ROUNDED, help="round the output head, too (default: as it is)")
    add("--kv-cache", metavar="FORMAT", help="of the KV cache, such as int8 or int4-kivi (default: of --dtype)")
    add("--dtype", choices=tuple(_NATIVE_FORMAT), default="bfloat16", help="of activations (default: %(default)s)")
    add("--device", default="cpu", help="cpu (default) or cuda")
    add("--threads", type=threads, metavar="N", help="CPU threads (default: as many as torch takes)")
    add("--max-new-tokens", type=positive, metavar="N", default=256, help="the most tokens of an answer (default: 256)")
    add("--temperature", type=not_negative, metavar="T", default=0.0, help="0 (default): always the likeliest token")
    add("--top-k", type=positive, metavar="N", help="sample among the N likeliest tokens")
    add("--top-p", type=not_negative, metavar="P", help="sample among the likeliest tokens that have this probability")
    add("--seed", type=seed, metavar="N", help="of the sampling, for the same text again")


def seed(text):
    """The type of an option that is a whole number as torch.manual_seed takes it."""
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 to 2^63 - 1, got {text!r}")
    return value


def not_negative(text):
    """The type of an option that is a number from 0 on."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number from 0 on, got {text!r}")
    return value


def check_sampling(args):
    """Raises before the model is loaded where an option would do nothing or is out of range."""
    if args.temperature == 0:
        for name in ("top_k", "top_p", "seed"):
            if getattr(args, name) is not None:
                raise ArgumentError(f"--{name.replace('_', '-')}: needs --temperature above 0, which samples")
    if args.top_p is not None and not 0 < args.top_p <= 1:
        raise ArgumentError(f"--top-p: expected a probability above 0 and at most 1, got {args.top_p}")


class Model:
    """A causal language model and its tokenizer, on one device, and how it writes.

    steps: "rt.accelerate", or why its decode steps run in transformers.
    """

    def __init__(self, args):
        """args: of add_model_arguments. Says on stderr what it could not make fast."""
        import torch
        import transformers

        import rooftile as rt

        check_sampling(args)
        self.device = usable_device(args.device)
        if args.kv_cache is not None and args.kv_cache not in rt.KV_FORMATS:
            hint = rt._C.did_you_mean(args.kv_cache, *rt.KV_FORMATS)
            raise ArgumentError(f"--kv-cache: expected one of {', '.join(rt.KV_FORMATS)}, got {args.kv_cache!r}{hint}")
        self.format = args.kv_cache or _NATIVE_FORMAT[args.dtype]
        if self.format in _NATIVE_FORMAT.values() and self.format != _NATIVE_FORMAT[args.dtype]:
            raise ArgumentError(
                f"--kv-cache: {self.format} is not of --dtype {args.dtype}; expected {_NATIVE_FORMAT[args.dtype]}, a "
                "format of codes such as int8, or another --dtype"
            )
        if not os.path.exists(args.model):
            raise ArgumentError(f"MODEL {args.model}: there is no such file or folder")
        if args.threads:
            torch.set_num_threads(args.threads)
        begin = time.perf_counter()
        transformers.logging.set_verbosity_error()
        load = _load_folder if os.path.isdir(args.model) else _load_file
        self.model, self.tokenizer = load(args, self.device)
        self.steps = _make_fast(self.model, args, self.format)
        self.load_seconds = time.perf_counter() - begin
        self._sampling = _sampling(args)
        if args.seed is not None:
            torch.manual_seed(args.seed)

    @property
    def weight_bytes(self):
        from rooftile.demo.measure import weight_bytes

        return weight_bytes(self.model)

    def new_cache(self):
        from rooftile.integrations.transformers import RooftileCache

        return RooftileCache(self.model.config, format=self.format, turns=True)

    def check_length(self, option, tokens, new):
        most = getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if most is not None and tokens + new > most:
            raise ArgumentError(
                f"{option}: {tokens} tokens and {new} new ones (--max-new-tokens) are more than the model's context of "
                f"{most}"
            )

    def write(self, ids, cache, most, show):
        """The text behind ids, int64 [1, tokens], of which `cache` may hold a beginning: (new ids, Timing).

        show: whether it goes to stdout, word by word.
        """
        import torch

        from rooftile.integrations._models import CACHE

        clock = _clock(self.tokenizer, show)
        begin = time.perf_counter()
        pad = self.tokenizer.pad_token_id
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=most,
            streamer=clock,
            pad_token_id=self.tokenizer.eos_token_id if pad is None else pad,
            **{CACHE: cache},
            **self._sampling,
        )
        return out[0, ids.shape[1] :], Timing(begin, clock.at, len(out[0]) - ids.shape[1])


class Timing:
    """Seconds to the first token of an answer, and tokens a second behind it (None for fewer than two)."""

    def __init__(self, begin, at, tokens):
        self.tokens = tokens
        self.first = at[0] - begin if at else 0.0
        self.rate = (len(at) - 1) / (at[-1] - at[0]) if len(at) > 1 else None

    def words(self):
        rate = "" if self.rate is None else f", {self.rate:.1f} tokens a second"
        return f"first of {self.tokens} tokens after {self.first:.2f} s{rate}"


def _clock(tokenizer, show):
    from transformers import TextStreamer

    class Clock(TextStreamer):
        """Notes when generate() hands over each token; the prompt is its first put()."""

        def __init__(self):
            super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
            self.at, self._prompt = [], True

        def put(self, value):
            if not self._prompt:
                self.at.append(time.perf_counter())
            self._prompt = False
            super().put(value)

        def on_finalized_text(self, text, stream_end=False):
            if show:
                print(text, end="\n" if stream_end else "", flush=True)

    return Clock()


def _sampling(args):
    if args.temperature == 0:
        return {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
    return {"do_sample": True, "temperature": args.temperature, "top_k": args.top_k or 0, "top_p": args.top_p or 1.0}


def _load_file(args, device):
    from rooftile.loaders import load_gguf, load_tokenizer, read_gguf

    tokenizer = load_tokenizer(read_gguf(args.model))  # what is quickly refused comes first
    weights = "dequantize" if args.weights == "w8a16" else "w4a16"
    return load_gguf(args.model, dtype=args.dtype, weights=weights, device=device), tokenizer


def _load_folder(args, device):
    packed_by(args.model)  # what is quickly refused comes first
    folder_config(args.model, "MODEL")
    tokenizer = folder_tokenizer(args.model, "MODEL")
    return folder_model(args.model, args.dtype, device, "MODEL"), tokenizer


def _make_fast(model, args, format):
    import rooftile as rt

    weights = None if args.weights == "stored" else args.weights
    try:
        rt.accelerate(model, weights=weights, kv_cache=format, head=args.head)
        return "rt.accelerate"
    except NotSupportedError as error:
        if args.head is not None:
            raise
        reason = str(error).removeprefix("accelerate: ")
    print(f"decode steps run in transformers: {reason}", file=sys.stderr)
    if weights is not None:
        rt.quantize_(model, {"w4a16": rt.W4A16(), "w8a16": rt.W8A16()}[weights])
    rt.set_kv_cache(model, format)
    return f"transformers: {reason}"
