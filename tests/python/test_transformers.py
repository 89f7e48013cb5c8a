# SPDX-License-Identifier: Apache-2.0
"""RooftileCache and the attention "rooftile" in transformers, on tiny random models: no network.

Tests that take `device` run on a GPU too, with the heads and dtypes that it has kernels for.
"""

import copy
import types

import cases
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import rooftile as rt  # noqa: E402
import transformers  # noqa: E402
from rooftile.integrations._models import CACHE  # noqa: E402
from rooftile.integrations.transformers import RooftileCache, rooftile_attention, rooftile_mask  # noqa: E402
from rooftile.kv_cache import KIVI  # noqa: E402

FORMATS = ("fp32", "int8", "int4", "int4-kivi-sym", "int4-kivi", "fp8", "int8-kivi-sym")
# device, dtype of the model, the cache format that keeps it as it is
KINDS = [("cpu", "float32", "fp32"), ("cuda", "float16", "fp16"), ("cuda", "bfloat16", "bf16")]
kinds = pytest.mark.parametrize(("device", "dtype", "raw"), [kind for kind in KINDS if kind[0] in cases.devices()])
on_a_gpu = pytest.mark.skipif("cuda" not in cases.devices(), reason="no GPU, or a build without GPU kernels")
HEAD_DIM = {"cpu": 16, "cuda": 64}
SIZES = {
    "hidden_size": 144,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "vocab_size": 211,
    "max_position_embeddings": 1024,
}
MODELS = {
    "llama": ("Llama", {}, "sdpa"),
    "qwen2": ("Qwen2", {}, "sdpa"),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}, "sdpa"),
    "mistral": ("Mistral", {"sliding_window": 24}, "sdpa"),
    "gemma2": ("Gemma2", {"sliding_window": 24, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0}, "eager"),
    "afmoe": ("Afmoe", {"sliding_window": 24, "num_experts": 2, "num_experts_per_tok": 2}, "sdpa"),
    "jetmoe": ("JetMoe", {"kv_channels": 16, "num_local_experts": 3, "num_experts_per_tok": 3}, "sdpa"),
    "gpt-oss": ("GptOss", {"sliding_window": 24, "num_local_experts": 2, "num_experts_per_tok": 1}, "eager"),
}


def tiny(name="llama", device="cpu", dtype="float32"):
    """A random model whose predictions depend strongly on the text, and the attention it is compared with."""
    kind, extra, theirs = MODELS[name]
    torch.manual_seed(7)
    config = getattr(transformers, kind + "Config")(**{**SIZES, **extra, "head_dim": HEAD_DIM[device]})
    model = getattr(transformers, kind + "ForCausalLM")(config).eval().requires_grad_(False)
    for key, parameter in model.named_parameters():
        parameter.normal_(0, 0.1 if parameter.ndim > 1 else 0.5)
        if key.endswith("norm.weight"):
            parameter.add_(1)
    return model.to(device, getattr(torch, dtype)), theirs


def prompts(batch=3, length=45, seed=0, device="cpu"):
    ids = torch.randint(3, SIZES["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed))
    return ids.to(device), torch.ones_like(ids, device=device)


def padded(pads=(17, 0, 5), length=45, device="cpu"):
    ids, mask = prompts(len(pads), length, device=device)
    for row, pad in enumerate(pads):
        mask[row, :pad] = 0
        ids[row, :pad] = 0
    return ids, mask


def feed(model, ids, mask, pieces, cache):
    """Logits [B, columns, vocabulary] of columns that come in several forwards over `cache`."""
    model.set_attn_implementation("rooftile")
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    logits, begin = [], 0
    for end in torch.tensor(pieces).cumsum(0).tolist():
        options = {"attention_mask": mask[:, :end], "position_ids": positions[:, begin:end], CACHE: cache}
        logits.append(model(ids[:, begin:end], **options).logits)
        begin = end
    return torch.cat(logits, 1)


def whole(model, attention, ids, mask):
    """The same of one forward without a cache."""
    model.set_attn_implementation(attention)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    return model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits


def generate(model, attention, ids, mask, cache=None, new=24, **options):
    model.set_attn_implementation(attention)
    return model.generate(
        ids, attention_mask=mask, **{CACHE: cache}, max_new_tokens=new, do_sample=False, eos_token_id=None,
        pad_token_id=0, **options,
    )  # fmt: skip


def attend(cache, q, k, v, layer=0, **options):
    """One layer's call as a transformers model makes it: q [B, Hq, T, D], k, v [B, Hkv, T, D] -> [B, T, Hq, D]."""
    keys, values = cache.update(k, v, layer)
    module = types.SimpleNamespace(is_causal=True)
    return rooftile_attention(
        module, q, keys, values, options.pop("mask", None), scaling=q.shape[-1] ** -0.5, **options
    )[0]


def layer_inputs(tokens, batch=1, seed=1, device="cpu", dtype="float32"):
    draw = torch.Generator().manual_seed(seed)
    heads = (SIZES["num_attention_heads"], SIZES["num_key_value_heads"], SIZES["num_key_value_heads"])
    shapes = [(batch, h, tokens, HEAD_DIM[device]) for h in heads]
    return [torch.randn(shape, generator=draw).to(device, getattr(torch, dtype)) for shape in shapes]


def exact_attention(q, k, v):
    """float64: q [Hq, D] of one query over k, v [tokens, Hkv, D]; on the CPU."""
    q, k, v = q.cpu(), k.cpu(), v.cpu()
    group = q.shape[0] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    weights = torch.einsum("hd,jhd->hj", q.double(), k).mul(q.shape[-1] ** -0.5).softmax(-1)
    return torch.einsum("hj,jhd->hd", weights, v)


def stored(cache, row=0, layer=0):
    """What a row holds, in logical order, as a flat list of arrays."""

    def leaves(x):
        if isinstance(x, dict):
            return [leaf for key in sorted(x) for leaf in leaves(x[key])]
        if isinstance(x, (tuple, list)):
            return [leaf for item in x for leaf in leaves(item)]
        return [] if x is None else [torch.as_tensor(x)]

    return leaves(cache.layers[layer].cache.dump(row))


def assert_same_bytes(a, b):
    assert len(a) == len(b) > 0
    for x, y in zip(a, b, strict=True):
        assert x.shape == y.shape and torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0))


# ---- equal to transformers' own ----


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_greedy_tokens_equal_sdpa_for_256_tokens(name):
    model, theirs = tiny(name)
    ids, mask = prompts(1)
    expected = generate(model, theirs, ids, mask, new=256)
    with rt.record_kernels() as kernels:
        cache = RooftileCache(model.config, format="fp32")
        assert torch.equal(generate(model, "rooftile", ids, mask, cache, new=256), expected)
    assert cache.get_seq_length() == 45 + 255 and any("fp32" in kernel for kernel in kernels)
    assert len(set(expected[0, 45:].tolist())) > 20, "a degenerate text would not test much"


@pytest.mark.parametrize("name", [name for name in MODELS if name != "jetmoe"])  # which changes a cache's keys
def test_left_padded_batch_and_second_turn_equal_transformers(name):
    model, theirs = tiny(name)
    ids, mask = padded()
    cache = RooftileCache(model.config, format="fp32", turns=True)
    for turn, more in enumerate((30, 5)):
        expected = generate(model, theirs, ids, mask)
        assert torch.equal(generate(model, "rooftile", ids, mask, cache), expected), f"turn {turn}"
        extra, _ = prompts(len(ids), more, seed=turn + 5)
        ids = torch.cat([expected, extra], 1)
        mask = torch.cat([mask, torch.ones(len(ids), ids.shape[1] - mask.shape[1], dtype=mask.dtype)], 1)


def test_beam_search_equals_transformers():
    model, theirs = tiny()
    ids, mask = padded()
    expected = generate(model, theirs, ids, mask, num_beams=3)
    cache = RooftileCache(model.config, format="fp32", capacity=64)
    assert torch.equal(generate(model, "rooftile", ids, mask, cache, num_beams=3), expected)


def test_assisted_generation_crops_the_cache():
    model, theirs = tiny()
    ids = prompts(1)[0].repeat(1, 2)
    mask = torch.ones_like(ids)
    expected = generate(model, theirs, ids, mask, prompt_lookup_num_tokens=3)
    cache = RooftileCache(model.config, format="fp32")
    assert torch.equal(generate(model, "rooftile", ids, mask, cache, prompt_lookup_num_tokens=3), expected)


def assert_as_good(ours, theirs, exact, mask):
    """Logits at most twice as far from float64 as those of transformers in the same dtype, padding apart."""
    real = mask.bool().cpu()
    error, naive = ((x.cpu().double() - exact)[real].norm() for x in (ours, theirs))
    assert error <= 2 * naive + 1e-6 * exact[real].norm(), f"{error:.3e}, transformers {naive:.3e}"


@kinds
@pytest.mark.parametrize("name", ["llama", "qwen2-window", "mistral"])
def test_forward_without_a_cache_equals_transformers(name, device, dtype, raw):
    model, theirs = tiny(name, device, dtype)
    ids, mask = padded(device=device)
    expected = whole(model, theirs, ids, mask)
    exact = whole(copy.deepcopy(model).to("cpu", torch.float64), theirs, ids.cpu(), mask.cpu())
    assert_as_good(whole(model, "rooftile", ids, mask), expected, exact, mask)


@kinds
@pytest.mark.parametrize("name", ["llama", "qwen2", "mistral"])
@pytest.mark.parametrize(
    ("pads", "pieces"),
    [
        ((0,), (45, 1, 1, 5, 60, 1, 17)),  # a prompt, steps, a short and a long second turn, a step
        ((17, 0, 5), (45, 1, 1, 5, 60, 1, 17)),
        # rows whose tokens begin in the first piece, in a short one (stored, then attended) and in a long one
        ((17, 0, 31), (14, 6, 25)),
        ((3, 0, 31), (20, 1, 1, 10, 40)),
    ],
    ids=str,
)
def test_a_text_in_pieces_is_as_good_as_transformers(name, pads, pieces, device, dtype, raw):
    model, theirs = tiny(name, device, dtype)
    ids, mask = padded(pads, sum(pieces), device)
    expected = whole(model, theirs, ids, mask)
    exact = whole(copy.deepcopy(model).to("cpu", torch.float64), theirs, ids.cpu(), mask.cpu())
    cache = RooftileCache(model.config, format=raw)
    with rt.record_kernels() as kernels:
        assert_as_good(feed(model, ids, mask, pieces, cache), expected, exact, mask)
    assert cache.layers[0].cache.lengths == [sum(pieces) - pad for pad in pads]
    assert {kernel.split("_")[0] for kernel in kernels} == {device}


@kinds
def test_generate_chooses_what_sdpa_chooses(device, dtype, raw):
    """sdpa sees the whole text in one forward; its best token may be another one only within rounding."""
    model, theirs = tiny(device=device, dtype=dtype)
    ids, mask = padded(device=device)
    tokens = generate(model, "rooftile", ids, mask, RooftileCache(model.config, format=raw), new=64)
    mask = torch.cat([mask, mask.new_ones(len(ids), 64)], 1)
    logits = whole(model, theirs, tokens, mask)[:, 44:-1].float()
    chosen = logits.gather(-1, tokens[:, 45:, None])[..., 0]
    rounding = 16 * torch.finfo(getattr(torch, dtype)).eps * logits.abs().max()
    assert (logits.max(-1).values - chosen).max() <= rounding < logits.std()


@kinds
@pytest.mark.parametrize("format", ["int8", "int4-kivi"])
def test_a_second_turn_over_codes(format, device, dtype, raw):
    """generate() twice with one cache: the kernels of the format run, and padding does not change what a row writes."""
    model, _ = tiny(device=device, dtype=dtype)
    ids, mask = padded((9, 0), device=device)
    cache = RooftileCache(model.config, format=format, turns=True)
    with rt.record_kernels() as kernels:
        first = generate(model, "rooftile", ids, mask, cache)
        ids = torch.cat([first, prompts(2, 40, seed=3, device=device)[0]], 1)
        mask = torch.cat([mask, mask.new_ones(2, ids.shape[1] - mask.shape[1])], 1)
        second = generate(model, "rooftile", ids, mask, cache)
    assert cache.layers[0].cache.lengths == [second.shape[1] - 1 - 9, second.shape[1] - 1]
    assert f"{dtype}_{format}" in " ".join(kernels) and torch.equal(second[:, : ids.shape[1]], ids)


@pytest.mark.parametrize("cached", [True, False])
@kinds
def test_outputs_at_padding_are_0(cached, device, dtype, raw):
    q, k, v = layer_inputs(6, batch=2, device=device, dtype=dtype)
    tokens = torch.tensor([[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    mask = rooftile_mask(2, 6, 6, attention_mask=tokens.to(device))
    if cached:
        out = attend(RooftileCache(tiny()[0].config, format="int8"), q, k, v, mask=mask)
    else:
        out = rooftile_attention(types.SimpleNamespace(is_causal=True), q, k, v, mask)[0]
    assert (out[~tokens.bool()] == 0).all() and (out[tokens.bool()] != 0).all()


def test_a_mask_names_places_that_there_are():
    """torch.take_along_dim of some versions counts on from the start; others refuse such an index."""
    mask = rooftile_mask(2, 6, 6, attention_mask=torch.tensor([[0, 0, 0, 0, 1, 1], [0, 1, 1, 1, 1, 1]]))
    rooftile_attention(types.SimpleNamespace(is_causal=True), *layer_inputs(6, batch=2), mask)
    assert mask.to_tokens.flatten(1).tolist() == [[4, 5, 0, 1, 2, 3], [1, 2, 3, 4, 5, 0]]
    assert mask.to_columns.flatten(1).tolist() == [[2, 3, 4, 5, 0, 1], [5, 0, 1, 2, 3, 4]]


def test_a_mask_follows_the_layers_to_their_device():
    """The meta device stands for another GPU: the op names what it cannot read there, where indices would not match."""
    q, k, v = (x.to("meta") for x in layer_inputs(6, batch=2))
    tokens = torch.tensor([[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    mask = rooftile_mask(2, 6, 6, attention_mask=tokens)
    with pytest.raises(rt.ArgumentTypeError, match=r"prefill_attention: q .*meta"):
        rooftile_attention(types.SimpleNamespace(is_causal=True), q, k, v, mask)
    there = mask.on(q.device)
    assert there is mask.on(q.device) is not mask and there.counts.is_meta and mask.on(tokens.device) is mask


@on_a_gpu
def test_a_mask_on_the_host_for_layers_on_a_gpu():
    q, k, v = layer_inputs(6, batch=2, device="cuda", dtype="float16")
    tokens = torch.tensor([[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    outs = [
        attend(RooftileCache(tiny()[0].config, format="int8"), q, k, v, mask=rooftile_mask(2, 6, 6, attention_mask=m))
        for m in (tokens, tokens.cuda())
    ]
    assert torch.equal(*outs)


@pytest.mark.skipif(torch.cuda.device_count() < 2 or "cuda" not in cases.devices(), reason="fewer than two GPUs")
def test_a_padded_batch_on_a_model_over_two_gpus():
    model, _ = tiny(device="cuda", dtype="float16")
    ids, mask = padded(length=64, device="cuda")
    pieces = (14, 20, 1, 1, 5, 22, 1)
    expected = feed(model, ids, mask, pieces, RooftileCache(model.config, format="int8"))

    def moved_to(device):
        move = lambda x: x.to(device)  # noqa: E731
        return lambda _, *given: torch.utils._pytree.tree_map_only(torch.Tensor, move, given)

    model.model.layers[1].to("cuda:1").register_forward_pre_hook(moved_to("cuda:1"), with_kwargs=True)
    model.model.norm.register_forward_pre_hook(moved_to("cuda:0"), with_kwargs=True)
    cache = RooftileCache(model.config, format="int8")
    assert torch.equal(feed(model, ids, mask, pieces, cache), expected)
    assert [layer.cache.device for layer in cache.layers] == ["cuda:0", "cuda:1"]


@pytest.mark.parametrize("move", ["reorder_cache", "batch_select_indices"])
def test_rows_that_move_take_their_padding_along(move):
    model, theirs = tiny()
    ids, mask = padded()
    order = torch.tensor([2, 0, 1])
    cache = RooftileCache(model.config, format="fp32")
    model.set_attn_implementation("rooftile")
    positions = (mask.cumsum(1) - 1).clamp_min(0)[:, :40]
    model(ids[:, :40], attention_mask=mask[:, :40], position_ids=positions, **{CACHE: cache})
    getattr(cache, move)(order)
    ids, mask = ids[order], mask[order]
    expected = generate(model, theirs, ids, mask)
    assert torch.equal(generate(model, "rooftile", ids, mask, cache), expected)


# ---- what is stored ----


@pytest.mark.parametrize("format", ["raw", *FORMATS[1:]])
@kinds
def test_padding_is_never_stored(format, device, dtype, raw, monkeypatch):
    format = raw if format == "raw" else format
    model, _ = tiny(device=device, dtype=dtype)
    ids, mask = padded(device=device)
    seen = []
    update = RooftileCache.update
    monkeypatch.setattr(
        RooftileCache, "update", lambda self, k, v, i, *a, **kw: (seen.append((k, v)), update(self, k, v, i))[1]
    )
    cache = RooftileCache(model.config, format=format)
    model.set_attn_implementation("rooftile")
    model(ids, attention_mask=mask, **{CACHE: cache})
    monkeypatch.undo()
    for row, pad in enumerate((17, 0, 5)):
        alone = RooftileCache(model.config, format=format)
        k, v = (x[row : row + 1, :, pad:] for x in seen[0])
        attend(alone, k.repeat(1, 3, 1, 1), k, v)
        assert_same_bytes(stored(cache, row), stored(alone))
        assert cache.layers[0].cache.lengths[row] == 45 - pad
    assert cache.get_seq_length() == 45


@pytest.mark.parametrize("format", FORMATS)
def test_growing_keeps_the_bytes(format):
    small, large = (RooftileCache(tiny()[0].config, format=format, capacity=c) for c in (1, 512))
    for tokens in (50, 1, 1, 90, 1, 100):
        q, k, v = layer_inputs(tokens, batch=2, seed=tokens)
        assert torch.equal(attend(small, q, k, v), attend(large, q, k, v))
    assert small.layers[0].cache.capacity > 64
    for row in range(2):
        assert_same_bytes(stored(small, row), stored(large, row))


@pytest.mark.parametrize("format", ["raw", *FORMATS[1:]])
@kinds
def test_steps_match_float64_over_the_dequantised_cache(format, device, dtype, raw):
    cache = RooftileCache(tiny()[0].config, format=raw if format == "raw" else format)
    q, k, v = layer_inputs(128, device=device, dtype=dtype)
    near = {"rtol": 1e-5, "atol": 1e-5}
    if device == "cuda":
        near = {"rtol": 0, "atol": 4 * torch.finfo(q.dtype).eps}
    first = attend(cache, q[:, :, :70], k[:, :, :70], v[:, :, :70])
    for t in (0, 40, 69):  # the prompt attends raw keys and values
        new = (x[0, :, : t + 1].transpose(0, 1) for x in (k, v))
        torch.testing.assert_close(first[0, t].double().cpu(), exact_attention(q[0, :, t], *new), **near)
    for start, stop in ((70, 71), (71, 87), (87, 90)):
        out = attend(cache, *(x[:, :, start:stop] for x in (q, k, v)))
        for t in range(start, stop):
            seen = (torch.as_tensor(x[0])[: t + 1] for x in cache.layers[0].cache.dequantize(at=t))
            torch.testing.assert_close(out[0, t - start].double().cpu(), exact_attention(q[0, :, t], *seen), **near)


@pytest.mark.parametrize("format", ["raw", *FORMATS[1:]])
@kinds
def test_stepwise_equals_single_steps(format, device, dtype, raw):
    format = raw if format == "raw" else format
    config = tiny()[0].config
    q, k, v = layer_inputs(96, device=device, dtype=dtype)
    single = RooftileCache(config, format=format, stepwise=True)
    steps = torch.cat([attend(single, *(x[:, :, t : t + 1] for x in (q, k, v))) for t in range(96)], 1)
    for lengths in ((32, 32, 32), (96,), (5, 91)):
        together = RooftileCache(config, format=format, stepwise=True)
        outs = [attend(together, *parts) for parts in zip(*(x.split(lengths, 2) for x in (q, k, v)), strict=True)]
        # a GPU's sums are in another order where a call's tokens lie in two groups: then the last bits may differ
        across = device == "cuda" and format in KIVI and lengths == (5, 91)
        near = {"rtol": 0, "atol": 4 * torch.finfo(q.dtype).eps if across else 0}
        torch.testing.assert_close(torch.cat(outs, 1), steps, **near)
        assert_same_bytes(stored(together), stored(single))


@pytest.mark.parametrize("format", ["int8", "int4-kivi"])
@kinds
def test_a_long_second_turn_reads_the_cache_as_codes(format, device, dtype, raw):
    """More than 16 new tokens are attended before they are stored: raw among themselves."""
    cache = RooftileCache(tiny()[0].config, format=format)
    q, k, v = layer_inputs(80, device=device, dtype=dtype)
    attend(cache, *(x[:, :, :40] for x in (q, k, v)))
    past = [torch.as_tensor(x[0]).cpu() for x in cache.layers[0].cache.dequantize(at=40)]
    out = attend(cache, *(x[:, :, 40:] for x in (q, k, v))).cpu()
    near = {"rtol": 1e-5, "atol": 1e-5} if device == "cpu" else {"rtol": 0, "atol": 4 * torch.finfo(q.dtype).eps}
    for t in (40, 60, 79):
        new = (x[0, :, 40 : t + 1].transpose(0, 1).cpu() for x in (k, v))
        seen = (torch.cat([p, x]) for p, x in zip(past, new, strict=True))
        torch.testing.assert_close(out[0, t - 40].double(), exact_attention(q[0, :, t], *seen), **near)


def test_format_per_layer_and_bytes():
    model, _ = tiny()
    cache = RooftileCache(model.config, format={"default": "int4-kivi", 0: "fp32"})
    ids, mask = prompts(2)
    generate(model, "rooftile", ids, mask, cache, new=4)
    assert [layer.cache.format for layer in cache.layers] == ["fp32", "int4-kivi"]
    assert cache.nbytes == sum(layer.cache.nbytes for layer in cache.layers) > 0


def test_reset_takes_another_batch():
    model, theirs = tiny()
    cache = RooftileCache(model.config, format="fp32")
    for pads in ((9, 0), (0, 3, 4)):
        ids, mask = padded(pads)
        assert torch.equal(generate(model, "rooftile", ids, mask, cache), generate(model, theirs, ids, mask))
        cache.reset()
        assert cache.get_seq_length() == 0


def test_a_copied_prompt_is_reused():
    """copy.deepcopy of a filled cache, as transformers' guide does it for a shared prefix."""
    model, theirs = tiny()
    ids, mask = prompts(1)
    prefix = RooftileCache(model.config, format="fp32")
    model.set_attn_implementation("rooftile")
    model(ids[:, :40], **{CACHE: prefix})
    for _ in range(2):
        cache = copy.deepcopy(prefix)
        assert torch.equal(generate(model, "rooftile", ids, mask, cache), generate(model, theirs, ids, mask))
    assert prefix.layers[0].cache.lengths == [40]


def test_crop():
    q, k, v = layer_inputs(100)
    config = tiny()[0].config
    for format, back in (("int8", 51), ("int4-kivi", 36), ("int4-kivi", 3)):
        cache, fresh = (RooftileCache(config, format=format, stepwise=True) for _ in range(2))
        for start in range(0, 100, 25):
            attend(cache, *(x[:, :, start : start + 25] for x in (q, k, v)))
        cache.crop(-back if format == "int8" else 100 - back)  # what to take back, or what to keep as before 5.18
        assert cache.get_seq_length() == 100 - back
        for start in range(0, 100 - back):
            attend(fresh, *(x[:, :, start : start + 1] for x in (q, k, v)))
        new = layer_inputs(1, seed=9)
        assert torch.equal(attend(cache, *new), attend(fresh, *new))
    with pytest.raises(rt.ArgumentError, match="length"):
        cache.crop(-30)


def test_a_format_for_each_layer():
    config = tiny()[0].config
    formats = lambda format: [layer.format for layer in RooftileCache(config, format=format).layers]  # noqa: E731
    assert formats("int8") == ["int8", "int8"]
    assert formats({"default": "int4-kivi", -1: "bf16"}) == ["int4-kivi", "bf16"]
    assert formats({0: "fp32", 1: "int8"}) == ["fp32", "int8"]
    for format in ({"first": "int8", "default": "int4"}, 8):
        with pytest.raises(rt.ArgumentTypeError, match="format"):
            RooftileCache(config, format=format)


def test_a_refused_crop_changes_no_layer():
    cache = RooftileCache(tiny()[0].config, format={"default": "int4-kivi", 0: "int8"})
    for piece in (100, 7):
        q, k, v = layer_inputs(piece)
        for layer in range(2):
            attend(cache, q, k, v, layer)
    before = [stored(cache, layer=layer) for layer in range(2)]
    with pytest.raises(rt.ArgumentError, match=rf"{CACHE}: .*at most 16; row 0 .*num_assistant_tokens"):
        cache.crop(-20)
    assert [layer.columns for layer in cache.layers] == [107, 107]
    for layer in range(2):
        assert_same_bytes(stored(cache, layer=layer), before[layer])
    cache.crop(-16)
    assert [layer.cache.lengths for layer in cache.layers] == [[91], [91]]


def test_assisted_generation_with_a_kivi_cache():
    model, assistant = tiny()[0], tiny("qwen2")[0]
    assistant.generation_config.assistant_confidence_threshold = 0.0  # as many as it may propose
    ids, mask = prompts(1)
    options = {"new": 80, "assistant_model": assistant}
    with pytest.raises(rt.ArgumentError, match="num_assistant_tokens"):  # 20 by default
        generate(model, "rooftile", ids, mask, RooftileCache(model.config, format="int4-kivi"), **options)
    assistant.generation_config.num_assistant_tokens = 16
    cache = RooftileCache(model.config, format="int4-kivi")
    assert generate(model, "rooftile", ids, mask, cache, **options).shape[1] == ids.shape[1] + 80


def test_select_and_repeat_rows():
    config = tiny()[0].config
    cache = RooftileCache(config, format="int4-kivi")
    attend(cache, *layer_inputs(70, batch=2))
    before = [stored(cache, row) for row in range(2)]
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0, 1]))
    for row, source in enumerate((1, 0, 0)):
        assert_same_bytes(stored(cache, row), before[source])


# ---- refused ----


def test_other_attention_functions_fail_at_once():
    model, _ = tiny()
    ids, mask = prompts(1)
    for attention in ("sdpa", "eager"):
        cache = RooftileCache(model.config, format="int8")
        with pytest.raises(rt.NotSupportedError, match="set_attn_implementation"):
            generate(model, attention, ids, mask, cache)
        model.set_attn_implementation("rooftile")
        with pytest.raises(rt.NotSupportedError, match="reset"):
            model(ids, **{CACHE: cache})
        cache.reset()
        assert generate(model, "rooftile", ids, mask, cache, new=2).shape == (1, 47)


@pytest.mark.parametrize("columns", [slice(40, 45), slice(20, 22)], ids=["right", "hole"])
def test_padding_elsewhere_is_refused(columns):
    model, _ = tiny()
    ids, mask = prompts(2)
    mask[1, columns] = 0
    model.set_attn_implementation("rooftile")
    with pytest.raises(
        rt.ArgumentError, match=f"attention_mask: row 1 has padding at column {columns.start}"
    ) as caught:
        model(ids, attention_mask=mask, **{CACHE: RooftileCache(model.config, format="int8")})
    assert caught.type is rt.ArgumentError, "the name of a private class says nothing to a user"


def test_a_mask_that_contradicts_the_cache_is_refused():
    model, _ = tiny()
    ids, mask = padded()
    model.set_attn_implementation("rooftile")
    for later in (torch.ones(3, 46, dtype=torch.long), None):
        cache = RooftileCache(model.config, format="int8")
        model(ids, attention_mask=mask, **{CACHE: cache})
        with pytest.raises(rt.ArgumentError, match="row 0"):
            model(ids[:, :1], attention_mask=later, **{CACHE: cache})


def test_a_cache_and_use_cache_false_are_refused():
    """transformers passes the whole text at every step then, and a mask of it alone."""
    model, _ = tiny()
    cache = RooftileCache(model.config, format="int8")
    with pytest.raises(rt.ArgumentError, match=r"attention_mask: .*\[3, 91\].* got \[3, 46\].*use_cache=False"):
        generate(model, "rooftile", *padded(), cache, use_cache=False)


@on_a_gpu
def test_on_a_gpu_a_contradicting_mask_is_raised_at_the_next_forward():
    model, _ = tiny(device="cuda", dtype="bfloat16")
    ids, mask = padded(device="cuda")
    model.set_attn_implementation("rooftile")
    step, ones = ids[:, :1], mask.new_ones(3, 1)
    hidden = torch.cat([mask, ones], 1)
    hidden[1, 45] = 0  # the new token is called padding
    cache = RooftileCache(model.config, format="int8")
    for later in (torch.cat([torch.ones_like(mask), ones], 1), hidden):
        model(ids, attention_mask=mask, **{CACHE: cache})
        model(step, attention_mask=torch.cat([mask, ones], 1), **{CACHE: cache})
        torch.cuda.synchronize()
        model(step, attention_mask=torch.cat([later, ones], 1), **{CACHE: cache})
        torch.cuda.synchronize()
        with pytest.raises(rt.ArgumentError, match="attention_mask: in an earlier forward"):
            model(step, attention_mask=torch.cat([mask, ones, ones, ones], 1), **{CACHE: cache})
        cache.reset()
    model(ids, attention_mask=mask, **{CACHE: cache})
    with pytest.raises(rt.ArgumentError, match="row 0"):
        model(step, **{CACHE: cache})


@on_a_gpu
@pytest.mark.parametrize("pads", [(0, 0), (17, 0)], ids=str)
@pytest.mark.parametrize("tokens", [1, 40])
def test_a_later_forward_does_not_wait_for_the_gpu(pads, tokens):
    model, _ = tiny(device="cuda", dtype="bfloat16")
    ids, mask = padded(pads, 60 + 2 * tokens, device="cuda")
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    cache = RooftileCache(model.config, format="int4-kivi", capacity=256)
    model.set_attn_implementation("rooftile")
    for begin, end in ((0, 60), (60, 60 + tokens), (60 + tokens, 60 + 2 * tokens)):
        options = {"attention_mask": mask[:, :end], "position_ids": positions[:, begin:end], CACHE: cache}
        torch.cuda.set_sync_debug_mode("error" if begin > 60 else "default")
        try:
            model(ids[:, begin:end], **options)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert cache.layers[0].cache.lengths == [60 + 2 * tokens - pad for pad in pads]


@on_a_gpu
def test_what_a_gpu_has_not_is_named():
    q, k, v = layer_inputs(20, device="cuda", dtype="bfloat16")
    config = tiny()[0].config
    with pytest.raises(rt.NotSupportedError, match=r"softcap: on a GPU.*stepwise=True"):
        attend(RooftileCache(config, format="int8"), q, k, v, softcap=5.0)
    with pytest.raises(rt.NotSupportedError, match="sinks: on a GPU"):
        attend(RooftileCache(config, format="int8"), q, k, v, s_aux=torch.zeros(9, device="cuda"))
    cache = RooftileCache(config, format="int8", stepwise=True)
    assert attend(cache, q, k, v, softcap=5.0, s_aux=torch.zeros(9, device="cuda")).shape == (1, 20, 9, 64)
    with pytest.raises(rt.NotSupportedError, match="prefill_attention: tensors are on"):
        rt.prefill_attention(*(x.transpose(1, 2) for x in (q, k, v)))


def test_what_is_not_implemented_is_refused():
    model, _ = tiny()
    ids, _ = prompts(2)
    model.set_attn_implementation("rooftile")

    def cache():
        return RooftileCache(model.config, format="int8")

    with pytest.raises(rt.NotSupportedError, match="attention_mask"):
        model(ids, attention_mask=torch.ones(2, 1, 45, 45, dtype=torch.bool), **{CACHE: cache()})
    q, k, v = layer_inputs(4)
    with pytest.raises(rt.NotSupportedError, match=r"attention_mask: .*custom masks"):
        attend(cache(), q, k, v, mask=rooftile_mask(1, 4, 4, mask_function=lambda *_: True))
    chunked = transformers.masking_utils.chunked_causal_mask_function(2, torch.zeros(1, dtype=torch.int))
    for function, window in ((lambda *_: True, None), (lambda *_: True, 2), (chunked, None)):
        with pytest.raises(rt.NotSupportedError, match=r"attention_mask: .*custom masks"):  # as torch.compile traces it
            rooftile_mask(1, 4, 4, mask_function=function).traced_window(window)
    utils = transformers.masking_utils
    both_ways = utils.and_masks(utils.sliding_window_overlay(2), utils.bidirectional_mask_function)
    with pytest.raises(rt.NotSupportedError, match=r"attention_mask: .*custom masks"):
        attend(cache(), q, k, v, mask=rooftile_mask(1, 4, 4, mask_function=both_ways))
    with pytest.raises(rt.NotSupportedError, match="dropout"):
        attend(cache(), q, k, v, dropout=0.1)
    with pytest.raises(rt.NotSupportedError, match="output_attentions"):
        attend(cache(), q, k, v, output_attentions=True)
    with pytest.raises(rt.NotSupportedError, match="is_causal"):
        attend(cache(), q, k, v, is_causal=False)


def test_a_cache_is_for_one_batch_and_unbroken():
    config = tiny()[0].config
    cache = RooftileCache(config, format="int8")
    attend(cache, *layer_inputs(4, batch=2))
    with pytest.raises(rt.ArgumentError, match="holds 2 rows"):
        attend(cache, *layer_inputs(1, batch=3))
    attend(cache, *layer_inputs(1, batch=2))
    with pytest.raises(rt.ArgumentError, match="half way"):
        attend(cache, *layer_inputs(1, batch=2), layer=1)


def test_gradients_pass_through_no_cache_of_ours():
    model, _ = tiny()
    model.requires_grad_(True)
    ids, mask = prompts(1)
    model.set_attn_implementation("rooftile")
    with pytest.raises(rt.RooftileError, match="grad"):
        model(ids, attention_mask=mask, **{CACHE: RooftileCache(model.config, format="fp32")})


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt-oss"])
@pytest.mark.parametrize("training", [False, True])
def test_gradients_are_those_of_transformers(name, training):
    ids, mask = prompts(2)
    found = []
    for ours in (True, False):
        model, theirs = tiny(name)
        model.requires_grad_(True).train(training)
        if ours:
            rt.set_kv_cache(model, "int8")
        else:
            model.set_attn_implementation(theirs)
        out = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
        assert type(out[CACHE]) is not RooftileCache
        out.loss.backward()
        found.append((out.loss.detach(), *(p.grad for p in model.parameters())))
        if ours:
            with torch.no_grad():
                assert type(model(ids, attention_mask=mask)[CACHE]) is RooftileCache
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "error", "names"),
    [
        ({"format": "int5"}, rt.ArgumentError, "int4-kivi"),
        ({"format": {0: "int8"}}, rt.ArgumentError, "format"),
        ({"format": {"default": "int8", 2: "fp32"}}, rt.ArgumentError, "format names layer 2, there are 2"),
        ({"capacity": 0}, rt.ArgumentError, "capacity"),
        ({"capacity": "many"}, rt.ArgumentTypeError, "capacity"),
    ],
)
def test_bad_arguments_of_the_cache(options, error, names):
    with pytest.raises(error, match=names):
        RooftileCache(tiny()[0].config, **options)


@pytest.mark.parametrize(
    "format, dtype, error, text",
    [
        ("int8", "fp16", rt.ArgumentTypeError, "dtype must be .*, got 'fp16', did you mean \"float16\"?"),
        ("int4-kivi", torch.int8, rt.ArgumentTypeError, "dtype must be float32, float16, bfloat16, got torch.int8"),
        ({"default": "int8", 1: "bf16"}, "float16", rt.ArgumentTypeError, "format bf16 stores bfloat16, so dtype"),
    ],
)
def test_a_wrong_dtype_is_refused_before_any_forward(format, dtype, error, text):
    model, *_ = tiny()
    for make in (
        lambda: RooftileCache(model.config, format=format, dtype=dtype),
        lambda: rt.set_kv_cache(model, format, dtype=dtype),
    ):
        with pytest.raises(error, match=text):
            make()


def test_models_with_other_layers_are_refused():
    config = transformers.Llama4TextConfig(**SIZES, num_local_experts=2, layer_types=["chunked_attention"] * 2)
    with pytest.raises(rt.NotSupportedError, match="chunked_attention"):
        RooftileCache(config)
