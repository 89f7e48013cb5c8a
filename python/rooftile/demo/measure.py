# SPDX-License-Identifier: Apache-2.0
"""The variants of the demo, and what is measured about each: memory, speed, quality, the kernels that ran."""

import dataclasses
import math
import statistics
import time

import torch
from transformers import DynamicCache

import rooftile as rt
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
    """One variant on its model: makes its caches, forwards, and notes the kernels that rooftile ran."""

    def __init__(self, variant, model):
        self.variant, self.model = variant, model
        self.kernels = set()
        self.cache = None
        self.prefill_seconds, self.decode_seconds, self.written = [], [], []

    def new_cache(self, capacity, stepwise=False):
        if self.variant.format is None:
            return DynamicCache(config=self.model.config)
        return RooftileCache(self.model.config, format=self.variant.format, capacity=capacity, stepwise=stepwise)

    @torch.no_grad()
    def forward(self, ids, cache, last_only):
        """Logits [1, T or 1, vocabulary] of ids [1, T] after what the cache holds."""
        self.model.set_attn_implementation("sdpa" if self.variant.format is None else "rooftile")
        with rt.record_kernels() as kernels:
            logits = self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=int(last_only)).logits
        self.kernels.update(kernels)
        return logits

    def prefill(self, prompt, capacity):
        """Times one forward over the prompt [1, T] into a fresh cache, and starts the text anew."""
        self.cache = self.new_cache(capacity)
        start = time.perf_counter()
        logits = self.forward(prompt, self.cache, last_only=True)
        self.prefill_seconds.append(time.perf_counter() - start)
        self.written = [int(logits[0, -1].argmax())]

    def decode(self, steps):
        """Times greedy steps, one by one."""
        for _ in range(steps):
            token = torch.tensor([[self.written[-1]]])
            start = time.perf_counter()
            logits = self.forward(token, self.cache, last_only=True)
            self.decode_seconds.append(time.perf_counter() - start)
            self.written.append(int(logits[0, -1].argmax()))

    def log_probabilities(self, ids):
        """Log softmax [T - 1, vocabulary] fp32 of every next token of ids [T], the cache as decoding sees it.

        The text is fed in aligned blocks of 32, stored before they are attended: exactly token by token.
        """
        cache = self.new_cache(len(ids), stepwise=True)
        logits = torch.cat([self.forward(block[None], cache, last_only=False)[0] for block in ids.split(32)])
        return logits[:-1].float().log_softmax(-1)


def measure_speed(runners, prompt, steps, rounds, advance):
    """Prefill and decode of all runners, taking turns, so that a slow moment of the machine hits all of them alike."""
    capacity = prompt.shape[1] + steps
    for runner in runners:  # first calls: pages, thread pools, code paths
        runner.prefill(prompt[:, :64], 66)
        runner.decode(2)
        runner.prefill_seconds.clear()
        runner.decode_seconds.clear()
        advance()
    for _ in range(rounds):
        for runner in runners:
            runner.prefill(prompt, capacity)
            advance()
    turns = 4
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


def measure_quality(runners, chunks, advance):
    """Mean NLL per chunk, KL from the first runner, and how often the likeliest token is the same, per runner.

    chunks: 1-D token tensors of equal length; position 0 of each is not scored.
    """
    results = [{"nll": [], "kl": [], "top1": []} for _ in runners]
    for ids in chunks:
        reference = None
        for runner, result in zip(runners, results, strict=True):
            logp = runner.log_probabilities(ids)
            if reference is None:
                reference = logp
            result["nll"].append(-logp.gather(1, ids[1:, None]).mean().item())
            result["kl"].append(
                torch.nn.functional.kl_div(logp, reference, reduction="batchmean", log_target=True).item()
            )
            result["top1"].append((logp.argmax(1) == reference.argmax(1)).float().mean().item())
            advance()
    return results


def quality_figures(result, baseline):
    """Perplexity, its change with the standard error of the paired difference over chunks, KL and top-1 agreement."""
    differences = [a - b for a, b in zip(result["nll"], baseline["nll"], strict=True)]
    n = len(differences)
    error = statistics.stdev(differences) / math.sqrt(n) if n > 1 else None
    perplexity = math.exp(statistics.fmean(result["nll"]))
    return {
        "perplexity": perplexity,
        "dnll": statistics.fmean(differences),
        "dnll_se": error,
        "percent": 100 * math.expm1(statistics.fmean(differences)),
        "percent_se": None if error is None else 100 * math.exp(statistics.fmean(differences)) * error,
        "kl": statistics.fmean(result["kl"]),
        "top1": statistics.fmean(result["top1"]),
    }


def wrong_kernels(report):
    """What contradicts a row's claim, as sentences: another cache format or weight format, another variant, nothing."""
    native = report["run"]["native_variant"]
    formats = {row["format"] for row in report["rows"]} - {None, BASELINE.format}
    wrong = []
    for row in report["rows"]:
        parts = {kernel: kernel.split("_") for kernel in row["kernels"]}
        if row["format"] is None:
            wrong += [f"{row['name']}: it is transformers' own row, but {kernel} ran" for kernel in parts]
            continue
        for kernel, words in parts.items():
            if words[: len(native)] != native:
                wrong.append(f"{row['name']}: {kernel} ran, this machine's variant is {'_'.join(native)}")
            if formats.intersection(words) - {row["format"]}:
                wrong.append(f"{row['name']}: {kernel} ran, the row's cache format is {row['format']}")
        if not any(row["format"] in words[len(native) :] for words in parts.values()):
            wrong.append(f"{row['name']}: no kernel of the cache format {row['format']} ran")
        w4a16 = any(word.startswith("w4a16") for words in parts.values() for word in words)
        if w4a16 != (row["weights"] == "w4a16"):
            wrong.append(f"{row['name']}: {'a' if w4a16 else 'no'} W4A16 kernel ran, its weights are {row['weights']}")
    return wrong
