# SPDX-License-Identifier: Apache-2.0
"""Where a decode step's time goes: every op of a layer in the chain of a whole step, and in a row of its own.

The ops are those of rt.accelerate's step program over a model with random weights and caches filled with random
tokens. "In the chain" is the time from the end of the op before to the end of this one, the mean over layers: on a GPU
as torch's profiler saw the kernels of the step's CUDA graph, on the CPU by a clock between the calls. "Alone" is the
same op of all layers, one behind the other, again and again: its inputs come from memory where those of all layers
exceed the last cache, but no other op's code or data stands between, and on a GPU each launch overlaps the one before.
"Left out", on a GPU, is what a graph of all other ops takes less. What the chain takes above the sum of the ops alone
is what putting them together costs.
"""

import functools
import math
import statistics
import types
import warnings

import torch

import rooftile as rt
from rooftile.bench import e2e
from rooftile.bench.timing import GpuTimer
from rooftile.errors import DeviceError
from rooftile.integrations._models import head_dim
from rooftile.integrations.step_calls import StepCalls
from rooftile.integrations.step_graph import StepGraph
from rooftile.integrations.step_program import StepProgram, run_calls

_STEPS = 8  # of the chain that are looked at
_ROUNDS, _REPEATS = 5, 32
_SHORTEST = 2e3  # us an op is repeated for
_MARK = "spin_kernel"  # torch.cuda._sleep, on a GPU's timeline


def label(call):
    """ "w4a16_matmul 4096 -> 14336 silu_mul" of a call of a step, a functools.partial."""
    name = call.func.__name__
    if name not in ("linear", "w4a16_matmul", "w8a16_matmul"):
        return name
    x, _, _, activation, residual, out = call.args[:6]
    words = [name, str(x.shape[-1]), "->", str(out.shape[-1]), activation, residual is not None and "+ residual"]
    return " ".join(filter(None, words))


class Step:
    """A step program over caches of random tokens, and its calls: .calls, of which layer i has .layers[i], a range."""

    def __init__(self, model, kv_cache, batch, tokens):
        config, weight = model.config.get_text_config(decoder=True), model.get_input_embeddings().weight
        self.device, self.program = weight.device.type, StepProgram(model, batch)
        heads, like = (config.num_key_value_heads, head_dim(config)), {"dtype": weight.dtype, "device": weight.device}
        capacity = tokens + _REPEATS + 4  # calls in a row store more tokens than a step; reset() takes them back
        self.caches = []
        for _ in range(config.num_hidden_layers):
            cache = rt.KVCache(batch, capacity, *heads, format=kv_cache, **like)
            cache.append(*(torch.randn(batch, tokens, *heads, **like) for _ in range(2)))
            self.caches.append(cache)
        self._lengths = self.caches[0].seq_lens.clone()
        self._ids = torch.zeros(batch, 1, dtype=torch.int64, device=weight.device)
        self._step = (StepCalls if self.device == "cpu" else StepGraph)(self.program, self.caches)
        self._given = self.program.embed(self._ids) if self.device == "cpu" else self._ids
        self.calls = self._step._calls
        attention = [i for i, call in enumerate(self.calls) if call.func.__name__ == "decode_attention"]
        before, _, behind = self.program._recorded[0]
        self.layers = [range(i - 1 - len(before), i + 1 + len(behind)) for i in attention]

    def reset(self):
        """The caches are as long as they were."""
        for cache in self.caches:
            cache.seq_lens.copy_(self._lengths)

    def run(self):
        """One step as generate() takes it, from the second one on as a list of calls in C++ or as a graph."""
        self.reset()
        self._step.run(self._given, lambda: None)

    @property
    def graph(self):
        """The CUDA graph of a step, once run() has captured it, as timers take it."""
        stream = torch.cuda.current_stream(self._step.program.device).cuda_stream
        return types.SimpleNamespace(replay=functools.partial(self._step._graph.launch, stream))

    def same_op(self, i):
        """Which calls do in the other layers what call i of layer 0 does; of a call outside the layers, itself."""
        return [layer[i - self.layers[0].start] for layer in self.layers] if i in self.layers[0] else [i]


def _kernels(run):
    """(begin, end, name) of the kernels that run() starts, in us and in order of their beginning."""
    from torch.profiler import ProfilerActivity, profile

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a profile holds one cycle's events
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            run()
            torch.cuda.synchronize()
    kernels = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sorted((e.time_range.start, e.time_range.end, e.name) for e in kernels)


def _kernels_of_calls(step):
    """How many kernels each call of a step starts. A kernel of torch's marks where a call ends."""

    def marked():
        step.reset()
        torch.cuda._sleep(100)
        for call in step.calls:
            call()
            torch.cuda._sleep(100)

    counts = []
    for _, _, name in _kernels(marked):
        if _MARK in name:
            counts.append(0)
        elif counts:
            counts[-1] += 1
    return counts[:-1]


def chain_on_gpu(step, timer):
    """(us of a step's graph, the median of _ROUNDS replays; us from end to end of each call under the profiler, the
    mean of _STEPS steps).
    """
    counts = _kernels_of_calls(step)
    for _ in range(3):
        step.run()
    graph = step.graph
    whole = []
    for _ in range(_ROUNDS):
        step.reset()
        whole.append(timer.replay(graph))
    sums, steps = [0.0] * len(counts), 0

    def one():
        step.reset()
        torch.cuda._sleep(100_000)  # the graph is queued before the GPU begins it
        graph.replay()

    for _ in range(_STEPS):
        kernels = _kernels(one)
        first = 1 + max(i for i, (_, _, name) in enumerate(kernels) if _MARK in name)
        kernels = kernels[first:]
        if len(kernels) != sum(counts):  # the profiler lost some
            continue
        at, end, steps = 0, kernels[0][0], steps + 1
        for i, count in enumerate(counts):
            if count:
                last = max(e for _, e, _ in kernels[at : at + count])
                sums[i] += last - end
                at, end = at + count, last
    if not steps:
        raise DeviceError(f"bench layer: torch's profiler saw {len(kernels)} kernels in a step of {sum(counts)}")
    return statistics.median(whole), [us / steps for us in sums]


def chain_on_cpu(step):
    """(us of a step, us of each call), medians of _STEPS steps."""
    whole, each = [], []
    step.run()
    for _ in range(_STEPS):
        step.reset()
        whole.append(1e6 * e2e.seconds(step.run, "cpu"))
        step.reset()
        each.append([1e6 * e2e.seconds(call, "cpu") for call in step.calls])
    return statistics.median(whole), [statistics.median(us) for us in zip(*each, strict=True)]


def _fastest(step, calls, repeats, timer):
    """us of these calls, one behind the other, so many times."""
    if timer is None:
        run = functools.partial(run_calls, calls * repeats)
    else:
        graph = timer.capture(calls, repeats)
    found = []
    for _ in range(1 + _ROUNDS):
        step.reset()
        found.append(1e6 * e2e.seconds(run, "cpu") if timer is None else timer.replay(graph))
    return min(found[1:])


def alone(step, same, expected, timer):
    """us of one of the calls `same`, in a row of them."""
    repeats = max(1, min(math.ceil(_SHORTEST / max(expected, 0.5) / len(same)), _REPEATS))
    return _fastest(step, [step.calls[i] for i in same], repeats, timer) / repeats / len(same)


def measure(model, kv_cache, batch, tokens, advance=lambda: None):
    """The figures of a model: a dict with "step_us", "chain_us" and "alone_us" (sums over a step), and "ops"."""
    with torch.inference_mode():
        step = Step(model, kv_cache, batch, tokens)
        timer = None if step.device == "cpu" else GpuTimer()
        whole, each = chain_on_cpu(step) if timer is None else chain_on_gpu(step, timer)
        advance()
        all_calls, ops = timer and _fastest(step, step.calls, 1, timer), []
        for i in range(len(step.calls)):
            if step.layers[0].stop <= i < step.layers[-1].stop:
                continue  # the layers behind the first are in its rows
            same = step.same_op(i)
            us = statistics.mean(each[j] for j in same)
            others = [call for j, call in enumerate(step.calls) if j not in same]
            ops.append(
                {
                    "op": label(step.calls[i]),
                    "times": len(same),
                    "chain_us": us,
                    "alone_us": alone(step, same, us, timer),
                    "left_out_us": timer and (all_calls - _fastest(step, others, 1, timer)) / len(same),
                }
            )
            advance()
    sums = {name: sum(op["times"] * op[name] for op in ops) for name in ("chain_us", "alone_us")}
    return {"batch": batch, "step_us": whole, **sums, "ops": ops}


def parts(model, kv_cache, batch, tokens):
    """(us of a step, its ops): of all calls with one label, the longest first, "times", "us" of all together, and
    "bytes", the weights and cached tokens that they read.
    """
    with torch.inference_mode():
        step = Step(model, kv_cache, batch, tokens)
        whole, each = chain_on_cpu(step) if step.device == "cpu" else chain_on_gpu(step, GpuTimer())
    _, of_caches = e2e.bytes_a_step(model, kv_cache, batch, tokens)
    found = {}
    for call, us in zip(step.calls, each, strict=True):
        op = found.setdefault(label(call), {"op": label(call), "times": 0, "us": 0.0, "bytes": 0})
        op["times"] += 1
        op["us"] += us
        op["bytes"] += getattr(call, "weight_bytes", 0)
        if call.func.__name__ == "decode_attention":
            op["bytes"] += of_caches // len(step.layers)
    return whole, sorted(found.values(), key=lambda op: -op["us"])


def table(found):
    """What the terminal shows of one batch size, a rich.table.Table."""
    from rich import box
    from rich.table import Table

    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    shown.add_column(f"batch {found['batch']}", no_wrap=True)
    for title in ("times", "in the chain us", "alone us", "more", "of the step", "left out us"):
        shown.add_column(title, justify="right", no_wrap=True)
    for op in found["ops"]:
        chain, own, times, left = op["chain_us"], op["alone_us"], op["times"], op["left_out_us"]
        left = "-" if left is None else f"{left:.2f}"
        share = f"{100 * times * chain / found['chain_us']:.1f} %"
        shown.add_row(op["op"], str(times), f"{chain:.2f}", f"{own:.2f}", f"{chain - own:+.2f}", share, left)
    shown.add_section()
    chain, own = found["chain_us"], found["alone_us"]
    shown.add_row("together", "", f"{chain:.0f}", f"{own:.0f}", f"{chain - own:+.0f}", "100 %", "")
    shown.add_row("the step without a profiler", "", f"{found['step_us']:.0f}", "", "", "", "")
    return shown
