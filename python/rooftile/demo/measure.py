# SPDX-License-Identifier: Apache-2.0
"""The variants of the demo, and what is measured about each: memory, speed, quality, the kernels that ran."""

import dataclasses
import itertools
import math
import statistics
import time

import torch
from transformers import DynamicCache

import rooftile as rt
from rooftile import evaluate
from rooftile.bench.e2e import Clock
from rooftile.integrations._models import CACHE
from rooftile.integrations.transformers import RooftileCache


@dataclasses.dataclass(frozen=True)
class Variant:
    """One row of the demo. format: of the KV cache; None: transformers' own DynamicCache and sdpa, the yardstick."""

    name: str
    format: str | None
    w4a16: bool = False


YARDSTICK = Variant("transformers sdpa", None)
VARIANTS = (
    Variant("bf16 cache", "bf16"),
    Variant("int8 cache", "int8"),
    Variant("fp8 cache", "fp8"),
    Variant("int8-kivi-sym", "int8-kivi-sym"),
    Variant("int4 cache", "int4"),
    Variant("int4-kivi-sym", "int4-kivi-sym"),
    Variant("int4-kivi", "int4-kivi"),
    Variant("W4A16", "bf16", w4a16=True),
    Variant("W4A16 + int4-kivi", "int4-kivi", w4a16=True),
)
BASELINE = VARIANTS[0]


def weight_bytes(model):
    """Bytes of all parameters and buffers, tied ones once."""
    tensors = {t.data_ptr(): t.nbytes for t in [*model.parameters(), *model.buffers()]}
    return sum(tensors.values())


def cache_bytes(cache):
    if isinstance(cache, RooftileCache):
        return cache.nbytes
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


class Runner:
    """One variant on its model: makes its caches and notes the kernels that rooftile ran. Called like the model."""

    def __init__(self, variant, model):
        self.variant, self.model = variant, model
        self.config, self.device = model.config, model.device
        self.set_attn_implementation = model.set_attn_implementation
        self.attention = "sdpa" if variant.format is None else "rooftile"
        self.kernels = set()
        self.cache = self.ids = None  # ids [1, tokens]: the prompt and what was written
        self.prefill_seconds, self.decode_seconds = [], []

    def new_cache(self, capacity, stepwise=False):
        if self.variant.format is None:
            return DynamicCache(config=self.config)
        options = {"capacity": capacity, "stepwise": stepwise, "turns": not stepwise}
        return RooftileCache(self.config, format=self.variant.format, **options)

    @torch.inference_mode()
    def __call__(self, ids, **options):
        with rt.record_kernels() as kernels:
            out = self.model(ids, **options)
        self.kernels.update(kernels)
        return out

    def wait(self):
        """Until the work before is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def prefill(self, prompt, capacity):
        """Times one forward over the prompt [1, T] into a fresh cache, and starts the text anew."""
        self.set_attn_implementation(self.attention)
        self.cache = self.new_cache(capacity)
        self.wait()
        start = time.perf_counter()
        out = self(prompt, **{CACHE: self.cache}, use_cache=True, logits_to_keep=1)
        self.wait()
        self.prefill_seconds.append(time.perf_counter() - start)
        self.ids = torch.cat([prompt, out.logits[:, -1].argmax(-1, keepdim=True)], 1)

    def decode(self, steps):
        """Times greedy steps, from token to token of a generate() that goes on with the text."""
        self.set_attn_implementation(self.attention)
        clock, options = Clock(), {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        with rt.record_kernels() as kernels:
            self.ids = self.model.generate(
                self.ids,
                attention_mask=torch.ones_like(self.ids),
                max_new_tokens=steps + 1,
                streamer=clock,
                **{CACHE: self.cache},
                **options,
            )
        self.kernels.update(kernels)
        self.decode_seconds += [after - before for before, after in itertools.pairwise(clock.at[1:])]


def measure_speed(runners, prompt, steps, rounds, advance):
    """Prefill and decode of all runners, taking turns, so that a slow moment of the machine hits all of them alike."""
    turns = 4
    capacity = prompt.shape[1] + steps + turns  # each turn begins with one token more
    # First calls: pages, thread pools, code paths. On a GPU everything once, because torch's attention may plan its
    # work anew for every length it has not seen, which costs more than the attention itself.
    first, first_steps = (prompt, steps) if prompt.is_cuda else (prompt[:, :64], 2)
    for runner in runners:
        runner.prefill(first, first.shape[1] + first_steps + 1)
        runner.decode(first_steps)
        runner.prefill_seconds.clear()
        runner.decode_seconds.clear()
        advance()
    for _ in range(rounds):
        for runner in runners:
            runner.prefill(prompt, capacity)
            advance()
    for turn in range(turns):
        share = steps * (turn + 1) // turns - steps * turn // turns
        for runner in runners:
            runner.decode(share)
            advance()


def speed_forwards(runners, rounds):
    """How often measure_speed calls advance()."""
    return len(runners) * (1 + rounds + 4)


def speed_figures(runner, prompt_tokens, yardstick):
    """Medians of what measure_speed timed; the speedup is over the yardstick's decode."""
    decode = statistics.median(runner.decode_seconds)
    return {
        "prefill_tok_s": prompt_tokens / statistics.median(runner.prefill_seconds),
        "decode_tok_s": 1 / decode,
        "decode_ms": [1e3 * seconds for seconds in (min(runner.decode_seconds), decode, max(runner.decode_seconds))],
        "decode_speedup": statistics.median(yardstick.decode_seconds) / decode,
    }


def measure_quality(runners, chunks):
    """Scores [one evaluate.Score per runner] on chunks [n, tokens] as decoding sees them; the first is the baseline.

    Blocks of 32 tokens, stored before they are attended, are exactly token by token.
    """
    tokens = chunks.shape[1]
    variants = [
        evaluate.Variant(r.variant.name, r, lambda batch, r=r: r.new_cache(tokens, stepwise=True), 32, r.attention)
        for r in runners
    ]
    return evaluate.compare(variants, chunks)


def quality_figures(score, baseline):
    difference, error = score.difference(baseline)
    return {
        "perplexity": score.perplexity,
        "dnll": difference,
        "dnll_se": None if math.isnan(error) else error,
        "percent": 100 * math.expm1(difference),
        "percent_se": None if math.isnan(error) else 100 * math.exp(difference) * error,
        "kl": float(score.kl.mean()),
        "top1": float(score.top1.mean()),
    }


def wrong_kernels(report):
    """What contradicts a row's claim, as sentences: another cache format or weight format, another variant, nothing."""
    native = report["run"]["native_variant"]
    formats = {row["format"] for row in report["rows"]} - {None, BASELINE.format}
    wrong = []
    for row in report["rows"]:
        if row["missing"]:
            continue
        parts = {kernel: kernel.split("_") for kernel in row["kernels"]}
        if row["format"] is None:
            wrong += [f"{row['name']}: it is transformers' own row, but {kernel} ran" for kernel in parts]
            continue
        for kernel, words in parts.items():
            if words[: len(native)] != native:
                wrong.append(f"{row['name']}: {kernel} ran, this machine's variant is {'_'.join(native)}")
            if formats.intersection(words) - {row["format"]}:
                wrong.append(f"{row['name']}: {kernel} ran, the row's cache format is {row['format']}")
        attention = [words for words in parts.values() if "append" not in words]
        if not any(row["format"] in words[len(native) :] for words in attention):
            wrong.append(f"{row['name']}: no attention kernel of the cache format {row['format']} ran")
        w4a16 = any(word.startswith("w4") for words in parts.values() for word in words)
        if w4a16 != (row["weights"] == "w4a16"):
            wrong.append(f"{row['name']}: {'a' if w4a16 else 'no'} W4A16 kernel ran, its weights are {row['weights']}")
    return wrong
