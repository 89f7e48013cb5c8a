# SPDX-License-Identifier: Apache-2.0
"""Steps of an accelerated model on a GPU: CUDA graphs of the program, over caches that come, grow and go."""

import concurrent.futures
import copy
import functools
import gc
import itertools
import json
import pickle
import threading
import weakref

import cases
import pytest
import rooftile as rt
import torch
from rooftile import _C
from rooftile.bench import e2e
from rooftile.cli import main
from rooftile.integrations._models import CACHE
from rooftile.integrations.step_graph import StepGraph
from rooftile.integrations.step_program import FAMILIES
from rooftile.integrations.transformers import RooftileCache
from test_step_loop import make, prompt

if "cuda" not in cases.devices():
    pytest.skip("no GPU, or a build without GPU kernels", allow_module_level=True)


@pytest.fixture
def captures(monkeypatch):
    """Counts graphs that were captured."""
    found, capture = [], StepGraph._capture
    monkeypatch.setattr(StepGraph, "_capture", lambda self: (found.append(self.program.batch), capture(self)))
    return found


def some_ids(batch, columns, seed=1):
    generator = torch.Generator().manual_seed(seed)  # torch's own one is shared by threads
    return torch.randint(3, 300, (batch, columns), generator=generator).cuda()


def text(model, cache, tokens=24, batch=1, after=None, seed=1):
    """Logits [tokens, batch, vocabulary] of a prompt and of steps over given tokens. after: called before each step."""
    ids = some_ids(batch, 37 + tokens, seed)
    logits = []
    with torch.no_grad():
        model(ids[:, :37], **{CACHE: cache}, use_cache=True, logits_to_keep=1)
        for n in range(tokens):
            if after is not None:
                after(n)
            out = model(ids[:, 37 + n : 38 + n], **{CACHE: cache}, use_cache=True)
            assert out[CACHE] is cache and out.logits.shape == (batch, 1, 300)
            logits.append(out.logits[:, 0])
    return torch.stack(logits)


def new_cache(model, format="int8", **options):
    return RooftileCache(model.config, format=format, **options)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("weights", [None, "w4a16", "w8a16"])
@pytest.mark.parametrize("format", ["fp16", "int4-kivi"])
def test_logits_are_as_near_to_float32_as_those_of_transformers(family, weights, format, captures):
    # torch's prompts have no soft cap of attention
    model = make("cuda", family, format, weights, **({"attn_logit_softcapping": None} if family == "Gemma2" else {}))
    exact = copy.deepcopy(model).to("cpu").float()
    for module in exact.modules():
        if isinstance(module, rt.nn.PackedLinear):
            module.bias = None if module.bias is None else torch.nn.Parameter(module.bias.float(), requires_grad=False)
    torch.manual_seed(1)
    errors = torch.zeros(2)
    forward = vars(model).pop("forward")
    for ids in torch.randint(3, 300, (3, 2, 61)):  # few large errors make most of the sum
        caches = [new_cache(model, kind) for kind in (format, format, "fp32" if format == "fp16" else format)]
        with torch.no_grad():
            for n in range(24):
                tokens = ids[:, :37] if n == 0 else ids[:, 36 + n : 37 + n]
                ours = (forward if n else model)(tokens.cuda(), **{CACHE: caches[0]}, use_cache=True).logits[:, -1]
                theirs = model(tokens.cuda(), **{CACHE: caches[1]}, use_cache=True).logits[:, -1]
                right = exact(tokens, **{CACHE: caches[2]}, use_cache=True).logits[:, -1]
                if n:
                    errors += torch.stack([(x.cpu().float() - right).square().sum() for x in (ours, theirs)])
        assert caches[0].steps == 23 and caches[1].steps == 0
    assert captures == [2, 2, 2]
    assert 0 < errors[0] <= 1.2 * errors[1]


@pytest.mark.parametrize("batch", [1, 2, 7, 16, 33])
def test_graph_on_or_off_the_bits_are_the_same(batch, captures):
    model = make("cuda", weights="w4a16", kv_cache="int4-kivi")
    with_graph, without = new_cache(model, "int4-kivi"), new_cache(model, "int4-kivi")
    expected = text(model, with_graph, batch=batch)
    assert captures == [batch]
    assert torch.equal(text(model, without, batch=batch, after=lambda n: setattr(without, "calls", None)), expected)
    assert captures == [batch]


@pytest.fixture
def small_shapes(monkeypatch):
    """A model of bench e2e and bench layer that a test has time for."""
    shapes = dict(e2e.CONFIGS["tiny"], hidden_size=128, num_attention_heads=2, head_dim=64)
    monkeypatch.setitem(e2e.CONFIGS, "tiny", shapes)


@pytest.mark.parametrize("weights", ["w4a16", "none"])
def test_the_ops_of_a_step(weights, small_shapes, tmp_path):
    out = tmp_path / "layer.json"
    given = ["--weights", weights, "--head", "none", "--tokens", "130", "--batch", "2", "--json", str(out)]
    assert main(["bench", "layer", "--config", "tiny", *given]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert [row["ops"][i]["op"] for i in (0, 1, -1)] == ["embedding", "copy_", "linear 128 -> 256"]
    assert all(op["chain_us"] > 0 and op["alone_us"] > 0 and op["left_out_us"] is not None for op in row["ops"])
    assert 0.5 * row["step_us"] < row["chain_us"] < 2 * row["step_us"]


def test_a_whole_model(small_shapes, tmp_path):
    out = tmp_path / "e2e.json"
    given = ["--only", "bit", "--prompt", "40", "--tokens", "20", "--batch", "1,3", "--json", str(out)]
    assert main(["bench", "e2e", "--config", "tiny", *given]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["name"], row["batch"]) for row in rows] == [
        (n, b) for n in e2e.rows_on("cuda", ["bit"]) for b in (1, 3)
    ]
    assert all(row["ms_per_token"] > 0 and row["peak_gib"] > 0 for row in rows)


def test_other_threads_draw_random_numbers_while_a_graph_is_captured(captures, monkeypatch):
    """torch.cuda.CUDAGraph takes torch's generator into its capture: another thread's torch.multinomial then fails."""
    drawn = []
    model = make("cuda", weights="w4a16", kv_cache="int4-kivi")
    with concurrent.futures.ThreadPoolExecutor(1) as other:

        def draw():
            drawn.append(other.submit(lambda: float(torch.rand(9, device="cuda").sum())).result())

        make_calls = StepGraph._make_calls

        def make_calls_and_draw(self, capacity):
            make_calls(self, capacity)
            self._calls.insert(1, functools.partial(draw))

        with monkeypatch.context() as patch:
            patch.setattr(StepGraph, "_make_calls", make_calls_and_draw)
            found = text(model, new_cache(model, "int4-kivi"))
    assert captures == [1] and len(drawn) == 2 and all(0 < x < 9 for x in drawn)  # the first step and the capture
    assert torch.equal(found, text(model, new_cache(model, "int4-kivi")))


@pytest.mark.parametrize("batch", [1, 3])
def test_the_workspace_of_a_graph_stays_its_own(batch, captures):
    """Products in splits and attention borrow memory, which must not go to what others make between two steps."""
    model = make("cuda", weights="w4a16", kv_cache="int4-kivi", hidden_size=1024, intermediate_size=4096)

    def litter(n):
        for size in (1 << 10, 1 << 14, 1 << 18, 1 << 22):
            torch.full((size,), float("nan"), device="cuda")

    found = text(model, new_cache(model, "int4-kivi"), batch=batch, after=litter)
    assert captures == [batch]
    rt.accelerate(model, kv_cache=None, cuda_graphs=False)
    assert torch.equal(found, text(model, new_cache(model, "int4-kivi"), batch=batch))


def test_a_failed_capture_leaves_the_stream_usable():
    graph, x = _C.CudaGraph(0), torch.zeros(4, device="cuda")

    def fail():
        raise ValueError("not this one")

    with pytest.raises(rt.errors.ArgumentError, match="CudaGraph: launch needs a graph, got none"):
        graph.launch(0)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.ExternalStream(graph.stream)):
        with pytest.raises(ValueError, match="not this one"):
            graph.capture([functools.partial(x.add_, 1), fail])
        assert graph.capture([functools.partial(x.add_, 1), lambda: 7])[1] == 7
    stream = torch.cuda.Stream()
    for _ in range(3):
        graph.launch(stream.cuda_stream)
    stream.synchronize()
    assert x.tolist() == [3, 3, 3, 3]


def test_without_cuda_graphs(captures):
    """The same kernels and bits; asked for on a model that had graphs, and taken back."""
    model = make("cuda", weights="w4a16", kv_cache="int4-kivi")
    cache = new_cache(model, "int4-kivi")
    expected = text(model, cache)
    for asked in (False, True):
        rt.accelerate(model, kv_cache=None, cuda_graphs=asked)
        captures.clear()
        cache = new_cache(model, "int4-kivi")
        assert torch.equal(text(model, cache), expected) and cache.steps == 24
        assert captures == [1] * asked


def test_a_cache_that_grows(captures):
    """Room for 64 tokens, then for twice as many, again and again: other memory, another graph, the same bits."""
    model = make("cuda")
    growing, roomy = new_cache(model, capacity=40), new_cache(model, capacity=512)
    assert torch.equal(text(model, growing, 200), text(model, roomy, 200))
    assert len(captures) == 3 + 1 and growing.layers[0].cache.capacity == 256


def test_caches_in_turns(captures):
    model = make("cuda")
    alone = [text(model, new_cache(model), seed=seed) for seed in (1, 2)]
    captures.clear()
    caches, logits = [new_cache(model) for _ in range(2)], [[], []]
    with torch.no_grad():
        for which, cache in enumerate(caches):
            cache.ids = some_ids(1, 61, 1 + which)
            model(cache.ids[:, :37], **{CACHE: cache}, use_cache=True)
        for n, which in itertools.product(range(24), range(2)):
            new = caches[which].ids[:, 37 + n : 38 + n]
            logits[which].append(model(new, **{CACHE: caches[which]}, use_cache=True).logits[:, 0])
    assert [torch.equal(torch.stack(ours), right) for ours, right in zip(logits, alone, strict=True)] == [True, True]
    assert captures == [1, 1]


def test_threads_on_streams_of_their_own():
    model = make("cuda", weights="w4a16")
    expected = [text(model, new_cache(model), 60, seed=seed) for seed in range(6)]
    torch.cuda.synchronize()
    found, errors = [None] * 6, []

    def run(which):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                found[which] = text(model, new_cache(model), 60, seed=which)
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(which,)) for which in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert [torch.equal(ours, right) for ours, right in zip(found, expected, strict=True)] == [True] * 6


@pytest.mark.parametrize("change", ["data", "moved", "swapped", "eps", "module"])
def test_what_changes_between_steps_is_seen(change, captures):
    """The steps behind a change are those of a model that was made so."""
    model = make("cuda", weights="w4a16")
    other = copy.deepcopy(model)

    def alter(model):
        layer = model.model.layers[1]
        if change == "data":
            layer.post_attention_layernorm.weight.data = layer.post_attention_layernorm.weight.data * 2
        elif change == "moved":
            for array in model.buffers():
                if array.dtype == torch.uint8:
                    array.data = array.data.clone()
        elif change == "swapped":
            layer.mlp.down_proj = model.model.layers[0].mlp.down_proj
        elif change == "eps":
            layer.input_layernorm.variance_epsilon = 0.5
        else:
            layer.self_attn = copy.deepcopy(model.model.layers[2].self_attn)
            layer.self_attn.layer_idx = 1

    before, cache, reference = 10, new_cache(model), new_cache(other)
    first = text(model, cache, before)
    assert torch.equal(text(other, reference, before), first)
    alter(model)
    alter(other)
    vars(other).pop("forward")
    ids = torch.randint(3, 300, (1, 8), device="cuda")
    with torch.no_grad():
        for n in range(8):
            ours = model(ids[:, n : n + 1], **{CACHE: cache}, use_cache=True).logits.float()
            theirs = other(ids[:, n : n + 1], **{CACHE: reference}, use_cache=True).logits.float()
            assert (ours - theirs).norm() <= 2e-2 * theirs.norm()
    assert cache.steps == 18 and reference.steps == 10 and len(captures) == 3


def test_copies_of_a_cache_go_their_own_ways():
    model = make("cuda", kv_cache="int4-kivi")
    cache = new_cache(model, "int4-kivi")
    text(model, cache, 9)
    copies = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]
    assert [c.calls for c in copies] == [None, None]
    ids = torch.randint(3, 300, (1, 9), device="cuda")
    with torch.no_grad():
        for n in range(9):
            logits = [model(ids[:, n : n + 1], **{CACHE: c}, use_cache=True).logits for c in (cache, *copies)]
            assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])


def test_a_mask_that_contradicts_the_cache_is_for_transformers():
    model = make("cuda")
    inputs, cache = prompt("cuda"), new_cache(model)
    ones = torch.ones(2, 1, dtype=torch.int64, device="cuda")
    with torch.no_grad():
        model(**inputs, **{CACHE: cache}, use_cache=True)
        mask = torch.cat([inputs["attention_mask"], ones], 1)
        positions = mask.sum(1, keepdim=True) - 1
        model(ones * 5, attention_mask=mask, position_ids=positions, **{CACHE: cache}, use_cache=True)
        assert cache.steps == 1
        mask = torch.cat([mask, ones], 1)
        model(ones * 5, attention_mask=mask, position_ids=positions, **{CACHE: cache}, use_cache=True)  # one too early
        assert cache.steps == 1 and cache.get_seq_length() == 39


@pytest.mark.parametrize("rope_type", ["linear", "dynamic", "yarn"])
def test_rotary_tables(rope_type):
    """Of kinds that depend on the position alone, and of one that depends on how long the text is."""
    options = {"original_max_position_embeddings": 128} if rope_type == "yarn" else {}
    rope = {"rope_type": rope_type, "factor": 2.0, "rope_theta": 10000.0, **options}
    model = make("cuda", rope_parameters=rope)
    model.config.max_position_embeddings = 64
    cache, reference = new_cache(model), new_cache(model)
    ours = text(model, cache, 60)
    vars(model).pop("forward")
    theirs = text(model, reference, 60)
    assert cache.steps == 60 and reference.steps == 0
    assert (ours - theirs).float().norm() <= 2e-2 * theirs.float().norm()


def test_a_graph_goes_with_its_cache():
    model = make("cuda")
    cache = new_cache(model)
    text(model, cache, 5)
    graph = weakref.ref(cache.calls)
    cache.reset()
    gc.collect()
    assert graph() is None
    assert torch.equal(text(model, cache, 5), text(model, new_cache(model), 5))


def test_float32_on_a_gpu_is_refused_by_name():
    with pytest.raises(rt.NotSupportedError, match=r"on a GPU is of float16 or bfloat16, got torch\.float32"):
        make("cuda", dtype=torch.float32)


def test_kernels_are_recorded():
    model = make("cuda", weights="w4a16")
    cache, found = new_cache(model), []
    for n in range(4):
        with rt.record_kernels() as kernels:
            text(model, cache, 1) if n == 0 else step(model, cache)
        found.append(kernels[-(3 * 8 + 2) :])
    assert found[1] == found[2] == found[3] and any("w4" in name for name in found[1])


@pytest.mark.parametrize("format", ["fp16", "int4-kivi"])
def test_a_row_alone_as_in_a_batch(format):
    """With batch_invariant=True the logits of steps have the same bits, where products are of 4 or 8 bits."""
    model = make("cuda", "Llama", format, "w4a16")
    with pytest.raises(
        rt.ArgumentError, match=r"batch_invariant=True needs every layer .* got 'lm_head' in torch.*head="
    ):
        rt.accelerate(model, kv_cache=format, batch_invariant=True)
    rt.accelerate(model, kv_cache=format, head="w8a16", batch_invariant=True, progress=False)
    ids = some_ids(9, 61)

    def logits(rows):
        cache, found = new_cache(model, format), []
        with torch.no_grad():
            for at in range(61):  # steps alone: torch's attention runs the prompts
                found.append(model(ids[rows, at : at + 1], **{CACHE: cache}, use_cache=True).logits)
        return torch.cat(found, 1)

    whole = logits(list(range(9)))
    for row in (0, 4, 8):
        assert torch.equal(logits([row]), whole[row : row + 1])


def step(model, cache):
    with torch.no_grad():
        return model(torch.full((1, 1), 7, device="cuda"), **{CACHE: cache}, use_cache=True)
