# SPDX-License-Identifier: Apache-2.0
"""RooftileCache and the attention "rooftile" in transformers, on tiny random models: no network."""

import copy
import types

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import rooftile as rt  # noqa: E402
import transformers  # noqa: E402
from rooftile.integrations.transformers import RooftileCache, rooftile_attention, rooftile_mask  # noqa: E402

FORMATS = ("fp32", "int8", "int4", "int4-kivi-sym", "int4-kivi")
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
    "gpt-oss": ("GptOss", {"sliding_window": 24, "num_local_experts": 2, "num_experts_per_tok": 1}, "eager"),
}


def tiny(name="llama", **changes):
    """A random model whose predictions depend strongly on the text, and the attention it is compared with."""
    kind, extra, theirs = MODELS[name]
    torch.manual_seed(7)
    config = getattr(transformers, kind + "Config")(**SIZES, **extra, **changes)
    model = getattr(transformers, kind + "ForCausalLM")(config).eval().requires_grad_(False)
    for key, parameter in model.named_parameters():
        parameter.normal_(0, 0.1 if parameter.ndim > 1 else 0.5)
        if key.endswith("norm.weight"):
            parameter.add_(1)
    return model, theirs


def prompts(batch=3, length=45, seed=0):
    ids = torch.randint(3, SIZES["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed))
    return ids, torch.ones_like(ids)


def padded(pads=(17, 0, 5), length=45):
    ids, mask = prompts(len(pads), length)
    for row, pad in enumerate(pads):
        mask[row, :pad] = 0
        ids[row, :pad] = 0
    return ids, mask


def generate(model, attention, ids, mask, cache=None, new=24, **options):
    model.set_attn_implementation(attention)
    return model.generate(
        ids, attention_mask=mask, past_key_values=cache, max_new_tokens=new, do_sample=False, eos_token_id=None,
        pad_token_id=0, **options,
    )  # fmt: skip


def attend(cache, q, k, v, layer=0, **options):
    """One layer's call as a transformers model makes it: q [B, Hq, T, D], k, v [B, Hkv, T, D] -> [B, T, Hq, D]."""
    keys, values = cache.update(k, v, layer)
    module = types.SimpleNamespace(is_causal=True)
    return rooftile_attention(
        module, q, keys, values, options.pop("mask", None), scaling=q.shape[-1] ** -0.5, **options
    )[0]


def layer_inputs(tokens, batch=1, seed=1):
    draw = torch.Generator().manual_seed(seed)
    heads = (SIZES["num_attention_heads"], SIZES["num_key_value_heads"], SIZES["num_key_value_heads"])
    return [torch.randn(batch, h, tokens, SIZES["head_dim"], generator=draw) for h in heads]


def exact_attention(q, k, v):
    """float64: q [Hq, D] of one query over k, v [tokens, Hkv, D]."""
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


@pytest.mark.parametrize("name", list(MODELS))
def test_left_padded_batch_and_second_turn_equal_transformers(name):
    model, theirs = tiny(name)
    ids, mask = padded()
    cache = RooftileCache(model.config, format="fp32")
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


def test_forward_without_a_cache_equals_transformers():
    model, theirs = tiny()
    ids, mask = padded()
    model.set_attn_implementation(theirs)
    expected = model(ids, attention_mask=mask, use_cache=False).logits
    model.set_attn_implementation("rooftile")
    logits = model(ids, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-4)


def test_a_padded_prompt_in_pieces_equals_transformers():
    """Rows whose tokens begin in the first piece, in a short one (stored, then attended) and in a long one."""
    model, theirs = tiny()
    pads = (17, 0, 31)
    ids, mask = padded(pads)
    model.set_attn_implementation(theirs)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    expected = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    model.set_attn_implementation("rooftile")
    cache = RooftileCache(model.config, format="fp32")
    for start, stop in ((0, 14), (14, 20), (20, 45)):
        options = {"attention_mask": mask[:, :stop], "position_ids": positions[:, start:stop], "past_key_values": cache}
        logits, real = model(ids[:, start:stop], **options).logits, mask[:, start:stop].bool()
        torch.testing.assert_close(logits[real], expected[:, start:stop][real], rtol=1e-4, atol=1e-4)
    assert cache.layers[0].cache.lengths == [45 - pad for pad in pads]


@pytest.mark.parametrize("cached", [True, False])
def test_outputs_at_padding_are_0(cached):
    q, k, v = layer_inputs(6, batch=2)
    tokens = torch.tensor([[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    mask = rooftile_mask(2, 6, 6, attention_mask=tokens)
    if cached:
        out = attend(RooftileCache(tiny()[0].config, format="int8"), q, k, v, mask=mask)
    else:
        out = rooftile_attention(types.SimpleNamespace(is_causal=True), q, k, v, mask)[0]
    assert (out[~tokens.bool()] == 0).all() and (out[tokens.bool()] != 0).all()


@pytest.mark.parametrize("move", ["reorder_cache", "batch_select_indices"])
def test_rows_that_move_take_their_padding_along(move):
    model, theirs = tiny()
    ids, mask = padded()
    order = torch.tensor([2, 0, 1])
    cache = RooftileCache(model.config, format="fp32")
    model.set_attn_implementation("rooftile")
    positions = (mask.cumsum(1) - 1).clamp_min(0)[:, :40]
    model(ids[:, :40], attention_mask=mask[:, :40], position_ids=positions, past_key_values=cache)
    getattr(cache, move)(order)
    ids, mask = ids[order], mask[order]
    expected = generate(model, theirs, ids, mask)
    assert torch.equal(generate(model, "rooftile", ids, mask, cache), expected)


# ---- what is stored ----


@pytest.mark.parametrize("format", FORMATS)
def test_padding_is_never_stored(format, monkeypatch):
    model, _ = tiny()
    ids, mask = padded()
    seen = []
    update = RooftileCache.update
    monkeypatch.setattr(
        RooftileCache, "update", lambda self, k, v, i, *a, **kw: (seen.append((k, v)), update(self, k, v, i))[1]
    )
    cache = RooftileCache(model.config, format=format)
    model.set_attn_implementation("rooftile")
    model(ids, attention_mask=mask, past_key_values=cache)
    monkeypatch.undo()
    for row, pad in enumerate((17, 0, 5)):
        alone = RooftileCache(model.config, format=format)
        attend(alone, torch.zeros(1, 9, 45 - pad, 16), *(x[row : row + 1, :, pad:] for x in seen[0]))
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


@pytest.mark.parametrize("format", FORMATS)
def test_steps_match_float64_over_the_dequantised_cache(format):
    cache = RooftileCache(tiny()[0].config, format=format)
    q, k, v = layer_inputs(90)
    first = attend(cache, q[:, :, :70], k[:, :, :70], v[:, :, :70])
    for t in (0, 40, 69):  # the prompt attends raw keys and values
        raw = (x[0, :, : t + 1].transpose(0, 1) for x in (k, v))
        torch.testing.assert_close(first[0, t].double(), exact_attention(q[0, :, t], *raw), rtol=1e-5, atol=1e-5)
    for start, stop in ((70, 71), (71, 87), (87, 90)):
        out = attend(cache, *(x[:, :, start:stop] for x in (q, k, v)))
        for t in range(start, stop):
            seen = (torch.as_tensor(x[0])[: t + 1] for x in cache.layers[0].cache.dequantize(at=t))
            torch.testing.assert_close(
                out[0, t - start].double(), exact_attention(q[0, :, t], *seen), rtol=1e-5, atol=1e-5
            )


@pytest.mark.parametrize("format", FORMATS)
def test_stepwise_equals_single_steps(format):
    together, single = (RooftileCache(tiny()[0].config, format=format, stepwise=True) for _ in range(2))
    q, k, v = layer_inputs(96)
    for start in range(0, 96, 32):
        block = attend(together, *(x[:, :, start : start + 32] for x in (q, k, v)))
        steps = [attend(single, *(x[:, :, t : t + 1] for x in (q, k, v))) for t in range(start, start + 32)]
        assert torch.equal(block, torch.cat(steps, 1))
    assert_same_bytes(stored(together), stored(single))


def test_a_long_second_turn_reads_the_cache_as_codes():
    """More than 16 new tokens go through prefill attention, before they are stored."""
    cache = RooftileCache(tiny()[0].config, format="int8")
    q, k, v = layer_inputs(80)
    attend(cache, *(x[:, :, :40] for x in (q, k, v)))
    past = [torch.as_tensor(x[0]) for x in cache.layers[0].cache.dequantize()]
    out = attend(cache, *(x[:, :, 40:] for x in (q, k, v)))
    for t in (40, 60, 79):
        seen = (torch.cat([p, x[0, :, 40 : t + 1].transpose(0, 1)]) for p, x in zip(past, (k, v), strict=True))
        torch.testing.assert_close(out[0, t - 40].double(), exact_attention(q[0, :, t], *seen), rtol=1e-5, atol=1e-5)


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
    model(ids[:, :40], past_key_values=prefix)
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
            model(ids, past_key_values=cache)
        cache.reset()
        assert generate(model, "rooftile", ids, mask, cache, new=2).shape == (1, 47)


def test_other_caches_are_refused():
    model, _ = tiny()
    ids, mask = prompts(1)
    with pytest.raises(rt.NotSupportedError, match="RooftileCache"):
        generate(model, "rooftile", ids, mask)


@pytest.mark.parametrize("columns", [slice(40, 45), slice(20, 22)], ids=["right", "hole"])
def test_padding_elsewhere_is_refused(columns):
    model, _ = tiny()
    ids, mask = prompts(2)
    mask[1, columns] = 0
    model.set_attn_implementation("rooftile")
    with pytest.raises(rt.ArgumentError, match=f"attention_mask: row 1 has padding at column {columns.start}"):
        model(ids, attention_mask=mask, past_key_values=RooftileCache(model.config, format="int8"))


def test_a_mask_that_contradicts_the_cache_is_refused():
    model, _ = tiny()
    ids, mask = padded()
    model.set_attn_implementation("rooftile")
    for later in (torch.ones(3, 46, dtype=torch.long), None):
        cache = RooftileCache(model.config, format="int8")
        model(ids, attention_mask=mask, past_key_values=cache)
        with pytest.raises(rt.ArgumentError, match="row 0"):
            model(ids[:, :1], attention_mask=later, past_key_values=cache)


def test_what_is_not_implemented_is_refused():
    model, _ = tiny()
    ids, _ = prompts(2)
    model.set_attn_implementation("rooftile")

    def cache():
        return RooftileCache(model.config, format="int8")

    with pytest.raises(rt.NotSupportedError, match="attention_mask"):
        model(ids, attention_mask=torch.ones(2, 1, 45, 45, dtype=torch.bool), past_key_values=cache())
    with pytest.raises(rt.NotSupportedError, match="attention_mask"):
        model(ids, position_ids=torch.arange(45).remainder(20)[None].expand(2, -1), use_cache=False)
    q, k, v = layer_inputs(4)
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


def test_training_is_refused():
    model, _ = tiny()
    model.requires_grad_(True)
    ids, mask = prompts(1)
    model.set_attn_implementation("rooftile")
    with pytest.raises(rt.RooftileError, match="grad"):
        model(ids, attention_mask=mask, past_key_values=RooftileCache(model.config, format="fp32"))


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"format": "int5"}, "int4-kivi"),
        ({"format": {0: "int8"}}, "format"),
        ({"format": {"default": "int8", 2: "fp32"}}, "0..1"),
        ({"capacity": 0}, "capacity"),
        ({"capacity": "many"}, "capacity"),
    ],
)
def test_bad_arguments_of_the_cache(options, names):
    with pytest.raises(rt.ArgumentError, match=names):
        RooftileCache(tiny()[0].config, **options)


def test_models_with_other_layers_are_refused():
    config = transformers.Llama4TextConfig(**SIZES, num_local_experts=2, layer_types=["chunked_attention"] * 2)
    with pytest.raises(rt.NotSupportedError, match="chunked_attention"):
        RooftileCache(config)
