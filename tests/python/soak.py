# SPDX-License-Identifier: Apache-2.0
"""Mixed generation for minutes on end: the same call has to write the same tokens each time, and memory must not grow.

    python tests/python/soak.py --minutes 5 --state soak.json [--device cuda]

Models of every family that rt.accelerate knows lie in memory together. Calls of generate() are drawn at random: greedy,
sampled, with rows that end early, in two turns over one cache, cut off by an error of the caller's, two models in two
threads. Runs with one --state add up: it keeps what every call wrote, and each run's seconds, calls and memory. The
exit status is 1 after a difference or a leak.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import gc
import hashlib
import itertools
import json
import os
import random
import sys
import time
from pathlib import Path

import rooftile as rt
import torch
from rooftile._progress import progress_bar
from rooftile.integrations._models import CACHE
from rooftile.integrations.step_program import FAMILIES
from rooftile.integrations.transformers import RooftileCache
from test_step_loop import make, prompt

WAYS = ("greedy", "long", "sampled", "ending", "turns", "cut off")
OTHER_DTYPES = {"cpu": ("fp16", "bf16"), "cuda": ("fp32", "bf16")}  # formats of elements that the models do not have
ROUNDED = (None, "w4a16", "w8a16")
ROOM = {"host_bytes": 64 << 20, "device_bytes": 1 << 20}  # by which memory may grow: the host's allocator keeps some


class CutOff(Exception):
    """Of a streamer, between two tokens."""


class Impatient:
    """A streamer that raises at its ninth token."""

    def __init__(self):
        self.left = 9

    def put(self, tokens):
        self.left -= 1
        if not self.left:
            raise CutOff

    def end(self):
        pass


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of generate(). Equal calls write equal tokens."""

    family: str
    kv_cache: str
    weights: str | None
    batch: int
    way: str

    @property
    def name(self):
        return " ".join(map(str, dataclasses.astuple(self)))

    @property
    def draws(self):
        """Whether it takes torch's random numbers, which no other thread may do meanwhile."""
        return self.way == "sampled"


def calls_for(device, families=tuple(FAMILIES)):
    """All calls, each family with formats and rounded weights in turn."""
    formats = [name for name in rt.KV_FORMATS if name not in OTHER_DTYPES[device]]
    kinds = itertools.cycle(itertools.product(ROUNDED, formats))
    return [
        Call(family, kv_cache, weights, batch, way)
        for family in families
        for weights, kv_cache in itertools.islice(kinds, 3)
        for batch, way in zip(itertools.cycle((1, 2, 5)), WAYS, strict=False)
    ]


class Models:
    """The models of calls, made at their first use."""

    def __init__(self, device):
        self.device, self.made = device, {}

    def of(self, call):
        key = call.family, call.kv_cache, call.weights
        if key not in self.made:
            options = {"attn_logit_softcapping": None} if call.family == "Gemma2" and self.device == "cuda" else {}
            self.made[key] = make(self.device, call.family, call.kv_cache, call.weights, **options)  # torch has none
        return self.made[key]

    def run(self, call):
        """The digest of what the call writes."""
        model, inputs = self.of(call), prompt(self.device, call.batch)
        options = {"max_new_tokens": 160 if call.way == "long" else 24, "do_sample": False}
        if call.way == "sampled":
            torch.manual_seed(7)
            options |= {"do_sample": True, "top_k": 20, "temperature": 0.8}
        elif call.way == "ending":
            options["eos_token_id"] = list(range(3, 40))
        elif call.way == "cut off":  # the text after it has to be a greedy one
            with contextlib.suppress(CutOff):
                model.generate(**prompt(self.device, 1), **options, streamer=Impatient())
        if call.way == "turns":
            inputs = prompt(self.device, 1)
            options[CACHE] = RooftileCache(model.config, format=call.kv_cache, turns=True)
        ids = model.generate(**inputs, **options)
        if call.way == "turns":
            more = torch.cat([ids, ids[:, 15:22]], 1)
            mask = torch.ones_like(more)
            mask[:, : inputs["attention_mask"].shape[1]] = inputs["attention_mask"]
            ids = model.generate(more, attention_mask=mask, **options)
        return hashlib.sha256(ids.cpu().numpy().tobytes()).hexdigest()[:16]


def memory(device):
    """What the process and the device hold after a collection."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    found = {"host_bytes": pages * os.sysconf("SC_PAGE_SIZE")}
    if device != "cpu":
        torch.cuda.synchronize()
        found["device_bytes"] = torch.cuda.memory_allocated()
    return found


def soak(state, device, seconds, calls, advance=lambda n: None, models=None):
    """Runs calls for so long, at least each of them once, and adds a slice to `state`. Returns what was wrong."""
    models = models or Models(device)
    digests, wrong = state.setdefault("digests", {}), []
    slices = state.setdefault("slices", [])
    draw = random.Random(len(slices))
    begin, count, warm = time.monotonic(), 0, None

    def check(call, digest):
        expected = digests.setdefault(call.name, digest)
        if digest != expected:
            wrong.append(f"{call.name}: wrote {digest}, before {expected}")

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        alone = [[call] for call in calls]
        pairs = [pair for pair in itertools.pairwise(calls) if not all(call.draws for call in pair)]
        todo = [*alone, *alone, *pairs]  # after these nothing is set up any more, in the two threads neither
        while todo or time.monotonic() - begin < seconds:
            if todo:
                batch = todo.pop(0)
            else:
                warm = warm or memory(device)
                batch = draw.sample(calls, 2)
                if all(call.draws for call in batch):
                    del batch[1:]
            if len(batch) == 1:
                check(batch[0], models.run(batch[0]))
            else:
                for call, digest in zip(batch, threads.map(models.run, batch), strict=True):
                    check(call, digest)
            count += len(batch)
            advance(time.monotonic() - begin)
    last = memory(device)
    for kind, now in last.items():
        if warm and now > warm[kind] + ROOM[kind]:
            wrong.append(f"{kind} grew from {warm[kind]} to {now}")
    took = round(time.monotonic() - begin, 1)
    slices.append({"seconds": took, "calls": count, "warm": warm or last, "last": last, "wrong": wrong})
    return wrong


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=5, help="of this run (default: %(default)s)")
    parser.add_argument("--state", metavar="FILE", type=Path, required=True, help="what runs before it wrote, if any")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--family", action="append", choices=FAMILIES, help="not all of them (may be given again)")
    args = parser.parse_args(arguments)
    state = json.loads(args.state.read_text()) if args.state.exists() else {"device": args.device}
    if state["device"] != args.device:
        parser.error(f"--state: {args.state} is of {state['device']}, --device says {args.device}")
    seconds, done = 60 * args.minutes, 0
    with progress_bar("Generating", max(1, round(seconds))) as tick:

        def advance(now):
            nonlocal done
            while done < min(now, seconds) - 1:
                done += 1
                tick()

        wrong = soak(state, args.device, seconds, calls_for(args.device, args.family or tuple(FAMILIES)), advance)
    args.state.write_text(json.dumps(state, indent=1))
    total = [sum(one[what] for one in state["slices"]) for what in ("seconds", "calls")]
    print(f"{total[1]} calls in {total[0] / 60:.1f} minutes, {len(state['slices'])} runs")
    for line in wrong:
        print(f"wrong: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
