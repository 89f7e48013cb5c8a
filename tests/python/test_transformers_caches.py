# SPDX-License-Identifier: Apache-2.0
"""Which cache a transformers model gets, what is said about a wrong one, and layers that slide."""

import copy
import functools
import itertools
import pickle
import types
import warnings

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import rooftile as rt  # noqa: E402
import transformers  # noqa: E402
from interrupts import Handler, interrupt  # noqa: E402
from rooftile.integrations import _tensors  # noqa: E402
from rooftile.integrations import transformers as integration  # noqa: E402
from rooftile.integrations._models import CACHE  # noqa: E402
from rooftile.integrations.transformers import RooftileCache, RooftileLayer, rooftile_attention, rooftile_mask  # noqa: E402
from rooftile.kv_sliding import BACK, SlidingKVCache  # noqa: E402
from test_transformers import (  # noqa: E402
    FORMATS,
    assert_same_bytes,
    attend,
    feed,
    generate,
    layer_inputs,
    padded,
    prompts,
    stored,
    tiny,
    whole,
)

DynamicCache = transformers.DynamicCache


def steps(model, attention, ids, cache):
    """Logits of a prompt of 20 tokens, then a token, then five, with what the model returns as its cache."""
    model.set_attn_implementation(attention)
    logits, begin = [], 0
    for end in (20, 21, 26):
        out = model(ids[:, begin:end], **{CACHE: cache})
        logits.append(out.logits)
        cache, begin = getattr(out, CACHE), end
    return torch.cat(logits, 1)


# ---- the attention alone ----


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt-oss"])
@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}, {"use_cache": False}], ids=str)
def test_the_attention_alone_changes_no_token(name, options):
    """Several prompts one after the other, with the caches that transformers makes."""
    model, theirs = tiny(name)
    for ids, mask in (padded((9, 0), 30), prompts(1, 20, seed=4)):
        expected = generate(model, theirs, ids, mask, new=10, **options)
        assert torch.equal(generate(model, "rooftile", ids, mask, new=10, **options), expected)


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=str)
def test_the_attention_alone_in_other_searches(options):
    model, theirs = tiny()
    ids, mask = padded((9, 0), 30) if "num_beams" in options else prompts(1, 30)
    expected = generate(model, theirs, ids, mask, new=10, **options)
    assert torch.equal(generate(model, "rooftile", ids, mask, new=10, **options), expected)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "afmoe", "jetmoe"])
def test_forwards_over_other_caches(name):
    model, theirs = tiny(name)
    ids, _ = prompts(2)
    for make in (lambda: None, DynamicCache, lambda: DynamicCache(config=model.config)):
        expected = steps(model, theirs, ids, make())
        torch.testing.assert_close(steps(model, "rooftile", ids, make()), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pads", [(0,), (9, 0)], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen2-window", "mistral", "gemma2", "gpt-oss"])
def test_forwards_over_a_static_cache(name, pads):
    """Its length is a tensor of transformers' own, which counts on while the layers of a forward are attended."""
    model, _ = tiny(name)
    ids, mask = padded(pads, 60)
    real = mask.bool()
    expected = whole(model, "eager", ids, mask)[real]
    cache = transformers.StaticCache(config=model.config, max_cache_len=64)
    for pieces in ([60], [20] + [1] * 40, [20, 40], [20, 5, 35]):
        torch.testing.assert_close(feed(model, ids, mask, pieces, cache)[real], expected, rtol=1e-4, atol=1e-4)
        cache.reset()


@pytest.mark.parametrize("shape", [(1, 45), (2, 44), (2, 46)], ids=str)
def test_a_mask_of_another_shape_is_refused_without_a_cache(shape):
    model, _ = tiny()
    model.set_attn_implementation("rooftile")
    with pytest.raises(rt.ArgumentError, match=rf"attention_mask: .*\[2, 45\].* got \[{shape[0]}, {shape[1]}\]"):
        model(prompts(2)[0], attention_mask=torch.ones(shape, dtype=torch.long), use_cache=False)


def test_masks_of_other_caches_may_be_whole():
    model, theirs = tiny()
    ids, _ = prompts(2)
    mask = torch.ones(45, 45, dtype=torch.bool).tril()[None, None].repeat(2, 1, 1, 1)
    mask[0, :, 20:, 3] = False
    model.set_attn_implementation(theirs)
    expected = model(ids, attention_mask=mask).logits
    model.set_attn_implementation("rooftile")
    torch.testing.assert_close(model(ids, attention_mask=mask).logits, expected, rtol=1e-4, atol=1e-4)


# ---- a new cache for every call ----


def test_every_generate_gets_a_cache_of_the_format():
    model, theirs = tiny()
    kept = {}
    expected = [generate(model, theirs, *given) for given in (padded(), prompts(1, 30, seed=3))]
    rt.set_kv_cache(model, "fp32")
    for given, want in zip((padded(), prompts(1, 30, seed=3)), expected, strict=True):
        out = generate(model, "rooftile", *given, return_dict_in_generate=True)
        assert torch.equal(out.sequences, want)
        kept[id(getattr(out, CACHE))] = getattr(out, CACHE)
    assert len(kept) == 2 and all(type(cache) is RooftileCache for cache in kept.values())
    rt.set_kv_cache(model, "int4-kivi", capacity=200)
    with rt.record_kernels() as kernels:
        generate(model, "rooftile", *padded())
    assert "int4-kivi" in " ".join(kernels)


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"use_cache": False}], ids=str)
def test_every_search_gets_a_cache_of_the_format(options):
    model, theirs = tiny()
    ids, mask = prompts(1) if "prompt_lookup_num_tokens" in options else padded()
    expected = generate(model, theirs, ids, mask, **options)
    rt.set_kv_cache(model, "fp32")
    for _ in range(2):
        with rt.record_kernels() as kernels:
            assert torch.equal(generate(model, "rooftile", ids, mask, **options), expected)
        assert ("append" in " ".join(kernels)) == ("use_cache" not in options)


def test_an_assistant_has_its_own_cache():
    model, theirs = tiny()
    assistant = tiny("qwen2")[0]
    ids, mask = prompts(1)
    expected = generate(model, theirs, ids, mask, assistant_model=assistant)
    for each in (model, assistant):
        rt.set_kv_cache(each, "fp32")
    assert torch.equal(generate(model, "rooftile", ids, mask, assistant_model=assistant), expected)


def test_forwards_without_a_cache_get_one():
    """What evaluation harnesses score, and a loop of one's own."""
    model, theirs = tiny()
    ids, _ = prompts(2)
    model.set_attn_implementation(theirs)
    expected, loop = model(ids).logits, steps(model, theirs, ids, None)
    rt.set_kv_cache(model, "fp32")
    out = model(ids)
    assert type(getattr(out, CACHE)) is RooftileCache
    torch.testing.assert_close(out.logits, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(steps(model, "rooftile", ids, None), loop, rtol=1e-4, atol=1e-4)
    assert getattr(model(ids, use_cache=False), CACHE) is None
    model.config.use_cache = False
    assert getattr(model(ids), CACHE) is None


@pytest.mark.parametrize("where", ("argument", "given config", "the model's config"))
def test_a_dynamic_cache_that_is_asked_for_by_name_is_of_the_format(where):
    model, theirs = tiny()
    ids, mask = prompts(1)
    expected = generate(model, theirs, ids, mask)
    rt.set_kv_cache(model, "fp32")
    config, options = copy.deepcopy(model.generation_config), {}
    config.cache_implementation = "dynamic"
    if where == "argument":
        options["cache_implementation"] = "dynamic"
    elif where == "given config":
        options["generation_config"] = config
    else:
        model.generation_config = config
    out = generate(model, "rooftile", ids, mask, return_dict_in_generate=True, **options)
    assert type(getattr(out, CACHE)) is RooftileCache and torch.equal(out.sequences, expected)
    assert config.cache_implementation == "dynamic"


def test_positional_arguments_of_generate_arrive():
    """The third is the logits processors."""
    model, _ = tiny()
    ids, mask = prompts(1, 9)
    rt.set_kv_cache(model, "fp32")
    config = transformers.GenerationConfig(max_new_tokens=4, do_sample=False, cache_implementation="dynamic")
    only = transformers.LogitsProcessorList([lambda seen, scores: scores.index_fill(1, torch.tensor([7]), 1e9)])
    assert model.generate(ids, config, only, attention_mask=mask)[0, 9:].tolist() == [7] * 4


def test_a_cache_that_is_given_is_used():
    model, _ = tiny()
    ids, mask = prompts(1)
    rt.set_kv_cache(model, "int4")
    for cache in (DynamicCache(), RooftileCache(model.config, format="fp32")):
        out = generate(model, "rooftile", ids, mask, cache, return_dict_in_generate=True)
        assert getattr(out, CACHE) is cache and cache.get_seq_length() == 45 + 23
    out = generate(model, "rooftile", ids, mask, cache_implementation="static", return_dict_in_generate=True)
    assert type(getattr(out, CACHE)) is transformers.StaticCache
    config = transformers.GenerationConfig(use_cache=False, max_new_tokens=2)
    assert getattr(model.generate(ids, config, return_dict_in_generate=True), CACHE) is None


def test_a_cache_goes_in_by_the_name_that_the_forward_knows(monkeypatch):
    """transformers 5.24 renamed past_key_values to cache, and warns of the old name; code of a model may be older."""
    model, _ = tiny()
    ids, mask = prompts(1)
    rt.set_kv_cache(model, "int4")
    given = RooftileCache(model.config, format="fp32")
    made = []
    monkeypatch.setattr(integration._FreshCache, "make", lambda self, model: made.append(model) or given)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        generate(model, "rooftile", ids, mask, given)
        assert not made
        given.reset()
        assert getattr(model(ids), CACHE) is given and len(made) == 1
        given.reset()
        assert getattr(model(ids, None, None, None), CACHE) is given and len(made) == 2
        given.reset()
        generate(model, "rooftile", ids, mask)
        assert len(made) == 3

    class Older(transformers.LlamaForCausalLM):
        def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, **options):
            return super().forward(input_ids, attention_mask, position_ids, **{CACHE: past_key_values}, **options)

    older = Older(model.config).eval().requires_grad_(False)
    rt.set_kv_cache(older, "int4")
    given.reset()
    assert getattr(older(ids), CACHE) is given and len(made) == 4


def test_set_kv_cache_can_be_copied_and_taken_back():
    model, theirs = tiny()
    ids, mask = prompts(1)
    expected = generate(model, theirs, ids, mask)
    rt.set_kv_cache(model, "int4")
    rt.set_kv_cache(model, "fp32")
    for twin in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        out = generate(twin, "rooftile", ids, mask, return_dict_in_generate=True)
        assert torch.equal(out.sequences, expected) and getattr(out, CACHE).layers[0].format == "fp32"
        assert twin.generate.args[0] is twin
    rt.set_kv_cache(model, None)
    out = generate(model, "rooftile", ids, mask, return_dict_in_generate=True)
    assert type(getattr(out, CACHE)) is DynamicCache and not model._forward_pre_hooks
    assert torch.equal(out.sequences, expected)


def test_set_kv_cache_over_another_generate():
    """A method that somebody else has bound to the model gives way, whatever its kind."""
    model, theirs = tiny()
    ids, mask = prompts(1)
    expected = generate(model, theirs, ids, mask)
    for bound in (functools.partial(type(model).generate, model), types.MethodType(type(model).generate, model)):
        model.generate = bound
        rt.set_kv_cache(model, "fp32")
        assert torch.equal(generate(model, "rooftile", ids, mask), expected)
        rt.set_kv_cache(model, None)


def test_a_mask_selects_rows():
    """As it does of a DynamicCache; it is no order of rows."""
    model, _ = tiny()
    ids, mask = padded()
    cache, chosen = RooftileCache(model.config, format="fp32"), torch.arange(len(ids)) != 0
    model.set_attn_implementation("rooftile")
    model(ids, attention_mask=mask, **{CACHE: cache})
    lengths = cache.layers[0].cache.lengths
    for wrong in (chosen[:1], chosen[:, None]):
        with pytest.raises(rt.ArgumentError, match=r"batch_select_indices: indices .*bool"):
            cache.batch_select_indices(wrong)
    with pytest.raises(rt.ArgumentTypeError, match=r"reorder_cache: beam_idx .*bool"):
        cache.reorder_cache(chosen)
    assert cache.layers[0].cache.lengths == lengths
    cache.batch_select_indices(chosen)
    assert [layer.cache.lengths for layer in cache.layers] == [lengths[1:]] * len(cache.layers)


def test_bad_arguments_of_set_kv_cache():
    model, _ = tiny()
    with pytest.raises(rt.ArgumentTypeError, match=r"set_kv_cache: model .*Linear"):
        rt.set_kv_cache(torch.nn.Linear(2, 2))
    with pytest.raises(rt.ArgumentError, match="int5"):
        rt.set_kv_cache(model, "int5")
    with pytest.raises(rt.ArgumentError, match="capacity"):
        rt.set_kv_cache(model, "int8", capacity=0)
    for options in ({"stepwise": "no"}, {"capacity": True}, {"capacity": 2**40}, {"capacity": 1.5}):
        (name,) = options
        for make in (functools.partial(rt.set_kv_cache, model, "int8"), functools.partial(RooftileCache, model.config)):
            with pytest.raises((rt.ArgumentError, rt.ArgumentTypeError), match=f"RooftileCache: {name} must"):
                make(**options)
    with pytest.raises(rt.ArgumentTypeError, match="RooftileCache: turns must be True or False, got str"):
        RooftileCache(model.config, turns="no")
    assert "generate" not in vars(model) and not model._forward_pre_hooks


def test_no_flag_takes_any_truthy_value():
    from rooftile import checkpoints, evaluate
    from rooftile.loaders import fetch, gguf

    for name, call in (
        ("progress", lambda: rt.quantize_(torch.nn.Linear(2, 2), progress="no")),
        ("progress", lambda: evaluate.compare([], torch.zeros(0), progress="no")),
        ("progress", lambda: checkpoints.convert("nowhere", "there", progress="no")),
        ("overwrite", lambda: checkpoints.convert("nowhere", "there", overwrite="no")),
        ("progress", lambda: checkpoints.load("nowhere", progress="no")),
        ("progress", lambda: gguf.load_gguf("nowhere", progress="no")),
        ("progress", lambda: fetch.fetch(None, progress="no")),
    ):
        with pytest.raises(rt.ArgumentTypeError, match=f"{name} must be True or False, got str"):
            call()


# ---- one cache, one text ----


def image_reader():
    """(model, inputs of generate()) of a Llava with two layers in the vision tower and in the text model."""
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "intermediate_size": 64}
    tower = {"hidden_size": 32, "num_attention_heads": 2, "image_size": 32, "patch_size": 16, **sizes}
    decoder = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 90, **sizes}
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**decoder),
        vision_config=transformers.CLIPVisionConfig(**tower),
        image_token_index=89,
        image_seq_length=4,
    )
    image = {"pixel_values": torch.randn(1, 3, 32, 32)}
    inputs = {"input_ids": torch.tensor([[1, 2, *[89] * 4, 5, 6, 7]]), **image}
    return transformers.LlavaForConditionalGeneration(config).eval(), inputs | {"max_new_tokens": 8, "do_sample": False}


def test_a_model_that_reads_images():
    """set_kv_cache leaves the vision tower its attention; where that is "rooftile", too, torch attends there."""
    model, inputs = image_reader()
    expected = model.generate(**inputs)
    rt.set_kv_cache(model, "fp32")
    assert model.config.vision_config._attn_implementation == "sdpa"
    assert model.config.text_config._attn_implementation == "rooftile"
    assert torch.equal(model.generate(**inputs), expected)
    rt.set_kv_cache(model, None)
    model.set_attn_implementation("rooftile")
    assert model.config.vision_config._attn_implementation == "rooftile"
    assert torch.equal(model.generate(**inputs), expected)


@pytest.mark.parametrize("whole", [False, True], ids=["text model", "whole model"])
def test_a_model_that_reads_images_in_four_bits(whole, tmp_path):
    """Its text model may be rounded alone: what is saved is what is loaded."""
    model, inputs = image_reader()
    rt.quantize_(model if whole else model.model.language_model, rt.W4A16(32), progress=False)
    expected = model.generate(**inputs)
    model.save_pretrained(tmp_path)
    again = transformers.LlavaForConditionalGeneration.from_pretrained(tmp_path)
    packed = {name for name, module in again.named_modules() if isinstance(module, rt.nn.W4Linear)}
    assert packed == {name for name, module in model.named_modules() if isinstance(module, rt.nn.W4Linear)}
    assert any("language_model" in name for name in packed) and whole == any("vision" in name for name in packed)
    assert torch.equal(again.generate(**inputs), expected)


def test_the_attention_alone_in_an_encoder_and_over_it():
    torch.manual_seed(0)
    layers = {f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in
              (("layers", 2), ("ffn_dim", 64), ("attention_heads", 4))}  # fmt: skip
    ids = {"vocab_size": 90, "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    model = transformers.BartForConditionalGeneration(transformers.BartConfig(d_model=32, **layers, **ids)).eval()
    text = torch.randint(3, 90, (2, 12))
    mask = torch.ones_like(text)
    mask[1, 8:] = 0
    tokens = {}
    for attention in ("sdpa", "rooftile"):
        model.set_attn_implementation(attention)
        tokens[attention] = model.generate(text, attention_mask=mask, max_new_tokens=8, do_sample=False)
    assert torch.equal(tokens["rooftile"], tokens["sdpa"])


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"s_aux": torch.tensor([0.5, -1.0])}], ids=str)
def test_attention_both_ways(options):
    """Against the textbook in float64."""
    q, k, v = (torch.randn(1, heads, 6, 16) for heads in (2, 1, 1))
    out = rooftile_attention(types.SimpleNamespace(is_causal=False), q, k, v, None, scaling=0.3, **options)[0]
    logits = q.double() @ k.double().mT * 0.3
    if "softcap" in options:
        logits = 5.0 * torch.tanh(logits / 5.0)
    sink = options.get("s_aux", torch.full((2,), -torch.inf)).double().view(1, 2, 1, 1).expand(1, 2, 6, 1)
    weights = torch.cat([logits, sink], -1).softmax(-1)[..., :-1]
    torch.testing.assert_close(out.double(), (weights @ v.double()).transpose(1, 2), rtol=1e-5, atol=1e-5)


def test_a_second_text_in_one_cache_is_refused():
    model, theirs = tiny()
    first, second = prompts(1), prompts(1, 100, seed=8)
    cache = RooftileCache(model.config, format="fp32")
    generate(model, "rooftile", *first, cache)
    with pytest.raises(rt.ArgumentError, match=rf"{CACHE}: .*68 columns.*reset\(\).*set_kv_cache.*turns=True"):
        generate(model, "rooftile", *second, cache)
    cache.reset()
    assert torch.equal(generate(model, "rooftile", *second, cache), generate(model, theirs, *second))


def test_a_cache_of_another_model_is_refused():
    model, _ = tiny()
    config = copy.deepcopy(model.config)
    config.num_hidden_layers, config.layer_types = 1, None
    model.set_attn_implementation("rooftile")
    with pytest.raises(rt.ArgumentError, match=rf"{CACHE}: .*with 1 layers.* layer 1;"):
        model(prompts(1)[0], **{CACHE: RooftileCache(config)})


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (lambda: transformers.T5Config(), "t5 is an encoder-decoder"),
        (lambda: transformers.DeepseekV3Config(), "multi-head latent attention: kv_lora_rank"),
        (lambda: transformers.MambaConfig(), "mamba has no attention layers"),
        (lambda: transformers.JambaConfig(), "jamba has layers of other kinds: linear_attention"),
        (lambda: transformers.Qwen3NextConfig(), "linear_attention"),
        (lambda: transformers.BloomConfig(), "BloomForCausalLM does not take its attention from"),
    ],
    ids=["encoder-decoder", "mla", "mamba", "jamba", "linear", "bloom"],
)
def test_models_that_a_cache_is_not_for(config, reason):
    with pytest.raises(rt.NotSupportedError, match=f"config: .*{reason}"):
        RooftileCache(config())


def test_what_is_no_config_of_a_decoder_is_told():
    with pytest.raises(rt.ArgumentTypeError, match=r"config: expected a model's config \(model.config\), got str$"):
        RooftileCache("llama")
    several = transformers.MusicgenConfig(  # a text model beside the decoder
        text_encoder=transformers.T5Config(),
        audio_encoder=transformers.EncodecConfig(),
        decoder=transformers.MusicgenDecoderConfig(),
    )
    with pytest.raises(rt.NotSupportedError, match=r"config: .*musicgen_decoder is an encoder-decoder"):
        RooftileCache(several)


def test_export_of_a_model_with_a_cache_is_refused_by_name():
    model = copy.deepcopy(tiny()[0])
    rt.set_kv_cache(model, "int8")
    ids, _ = prompts(1, 4)
    with torch.no_grad():
        with pytest.raises(rt.NotSupportedError, match=r"set_kv_cache: torch.export .*use_cache=False"):
            torch.export.export(model, (ids,))
        exported = torch.export.export(model, (ids,), kwargs={"use_cache": False}).module()
        torch.testing.assert_close(exported(ids, use_cache=False).logits, model(ids, use_cache=False).logits)


def test_a_class_of_ones_own_without_the_interface():
    class Own(transformers.LlamaForCausalLM):
        _supports_attention_backend = False

    model = Own(tiny()[0].config)
    with pytest.raises(rt.NotSupportedError, match="model: Own does not take its attention from"):
        rt.set_kv_cache(model, "int8")
    assert "generate" not in vars(model)


def test_keys_and_values_of_two_shapes():
    q, k, v = layer_inputs(4)
    with pytest.raises(rt.NotSupportedError, match=rf"{CACHE}: .*one shape.*16.*8"):
        attend(RooftileCache(tiny()[0].config), q, k, v[..., :8])


def test_models_whose_attention_is_their_own():
    """They change what the cache hands out, or the mask: named, with any cache."""
    sizes = {"head_dim": 16, "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 32, "vocab_size": 211}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    ids, _ = prompts(1, 10)
    torch.manual_seed(0)
    model = transformers.DiffLlamaForCausalLM(transformers.DiffLlamaConfig(**sizes, **heads)).eval()
    model.requires_grad_(False).set_attn_implementation("rooftile")
    with pytest.raises(rt.NotSupportedError, match="attention layers change the keys or values"):
        model(ids, **{CACHE: RooftileCache(model.config)})
    doge = transformers.DogeForCausalLM(transformers.DogeConfig(**sizes, **heads)).eval().requires_grad_(False)
    doge.set_attn_implementation("rooftile")
    with pytest.raises(rt.NotSupportedError, match="attention_mask: this model reads the mask itself"):
        doge(ids)


# ---- sliding layers ----

WINDOW = 24


def sliding(batch, length=10, window=WINDOW):
    """What the mask function makes for `length` columns of a sliding layer."""
    function = transformers.masking_utils.sliding_window_causal_mask_function(window)
    return rooftile_mask(batch, length, length, mask_function=function)


def keeping(monkeypatch):
    """From here on no layer slides."""
    monkeypatch.setattr(integration, "ring_tokens", lambda window: 1 << 30)


PIECES = (300, 1, 1, 16, 70, 1, 40, 1, 3, 200, 1, 1)


@pytest.mark.parametrize("format", FORMATS)
def test_sliding_layers_give_the_bits_of_layers_that_keep_everything(format, monkeypatch):
    def texts(stepwise):
        cache = RooftileCache(tiny("mistral")[0].config, format=format, stepwise=stepwise)
        outs, begin = [], 0
        q, k, v = layer_inputs(sum(PIECES), batch=2)
        for n in PIECES:
            part = (x[:, :, begin : begin + n] for x in (q, k, v))
            outs.append(attend(cache, *part, mask=sliding(2)))
            begin += n
        return cache, torch.cat(outs, 1)

    for stepwise in (False, True):
        monkeypatch.undo()
        cache, out = texts(stepwise)
        layer = cache.layers[0].cache
        assert type(layer) is SlidingKVCache and layer.lengths == [sum(PIECES)] * 2
        keeping(monkeypatch)
        every, expected = texts(stepwise)
        assert type(every.layers[0].cache) is rt.KVCache
        assert torch.equal(out, expected)
        assert cache.nbytes < every.nbytes / 2


@pytest.mark.parametrize("name", ["mistral", "gemma2", "qwen2-window"])
def test_long_texts_over_sliding_layers_equal_transformers(name):
    model, theirs = tiny(name)
    ids, mask = padded((17, 0, 150), 260)
    cache = RooftileCache(model.config, format="fp32", turns=True)
    expected = generate(model, theirs, ids, mask, new=40)
    assert torch.equal(generate(model, "rooftile", ids, mask, cache, new=40), expected)
    assert sum(type(layer.cache) is SlidingKVCache for layer in cache.layers) == {"mistral": 2}.get(name, 1)


@pytest.mark.parametrize("change", ["crop", "reorder_cache", "batch_select_indices", "deepcopy"])
@pytest.mark.parametrize("format", ["int8", "int4-kivi"])
def test_rows_of_sliding_layers_change_as_of_others(change, format, monkeypatch):
    def run():
        cache = RooftileCache(tiny("mistral")[0].config, format=format)
        q, k, v = layer_inputs(330, batch=3)
        for begin, end in ((0, 300), (300, 310)):
            attend(cache, *(x[:, :, begin:end] for x in (q, k, v)), mask=sliding(3))
        if change == "crop":
            cache.crop(-9)
            cache.crop(-5)
        elif change == "deepcopy":
            attended, cache = cache, copy.deepcopy(cache)
            attend(attended, *(x[:, :, 0:200] for x in (q, k, v)), mask=sliding(3))
        else:
            getattr(cache, change)(torch.tensor([2, 2, 0]))
        outs = [attend(cache, *(x[:, :, n : n + 1] for x in (q, k, v)), mask=sliding(3)) for n in range(310, 330)]
        return cache.layers[0], torch.cat(outs, 1)

    layer, out = run()
    assert type(layer.cache) is SlidingKVCache
    keeping(monkeypatch)
    every, expected = run()
    assert type(every.cache) is rt.KVCache and torch.equal(out, expected)
    assert layer.cache.lengths == every.cache.lengths


def test_a_sliding_layer_takes_back_what_it_still_has():
    caches = [RooftileCache(tiny("mistral")[0].config, format="int8") for _ in range(2)]
    for cache in caches:
        attend(cache, *layer_inputs(400), mask=sliding(1))
    caches[0].crop(-BACK)
    with pytest.raises(rt.ArgumentError, match=rf"{CACHE}: truncate: lengths .*window of 24 .* takes back 0"):
        caches[0].crop(-1)
    with pytest.raises(rt.ArgumentError, match="takes back 64"):
        caches[1].crop(-BACK - 1)
    assert [cache.layers[0].cache.lengths for cache in caches] == [[400 - BACK], [400]]
    attend(caches[0], *layer_inputs(3), mask=sliding(1))
    caches[0].crop(-3)


def test_a_window_does_not_change():
    for mask in (None, sliding(1, window=25)):
        cache = RooftileCache(tiny("mistral")[0].config, format="int8")
        attend(cache, *layer_inputs(400), mask=sliding(1))
        with pytest.raises(rt.NotSupportedError, match="slid over 24 tokens"):
            attend(cache, *layer_inputs(1), mask=mask)


def test_bytes_beside_transformers_own_cache():
    """Gemma 3, five sliding layers in six, 6,000 tokens: less than the 16-bit cache of transformers."""
    config = transformers.Gemma3TextConfig(num_hidden_layers=6, sliding_window=512)
    cache, theirs = RooftileCache(config, format="int4-kivi"), DynamicCache(config=config)
    x = torch.randn(1, 1, 6000, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    for layer, kind in enumerate(config.layer_types):
        attend(cache, x, x, x, layer, mask=sliding(1, window=512) if kind == "sliding_attention" else None)
        theirs.update(x, x, layer)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in theirs.layers)
    assert cache.nbytes_dynamic == held
    assert cache.nbytes < 0.45 * held


# ---- a prompt, and a long turn, on a GPU: by torch ----


@pytest.mark.parametrize("window", [None, 40, 20, 1])
@pytest.mark.parametrize("kv_heads", [6, 2])
def test_a_prompt_through_torch_is_prefill_attention(kv_heads, window):
    draw = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(3, 40, heads, 32, generator=draw) for heads in (6, kv_heads, kv_heads))
    for counts in (None, torch.tensor([40, 0, 17], dtype=torch.int32)):
        exact = rt.prefill_attention(q, k, v, counts=counts, window=window, scale=0.7)
        out = _tensors.prompt(q, k, v, counts, scale=0.7, window=window, softcap=None, sinks=None)
        torch.testing.assert_close(out, exact, rtol=0, atol=2e-6)


@pytest.mark.parametrize("given", [{"softcap": 20.0}, {"sinks": torch.zeros(2)}])
def test_a_prompt_through_torch_refuses_what_torch_has_not(given):
    q = torch.zeros(1, 3, 2, 32)
    (name,) = given
    with pytest.raises(rt.NotSupportedError, match=rf"^{name}: on a GPU .*RooftileCache\(\.\.\., stepwise=True\)"):
        _tensors.prompt(q, q, q, None, **{"scale": None, "window": None, "softcap": None, "sinks": None, **given})


@pytest.mark.parametrize("format", ["bf16", "int8", "fp8", "int4", "int4-kivi-sym", "int4-kivi", "int8-kivi-sym"])
@pytest.mark.parametrize("window", [None, 50, 590, 700])  # 590: more than all cached tokens but the queries' number
@pytest.mark.parametrize("lengths", [(600, 600), (517, 0), (96, 300)], ids=str)
def test_torch_behind_a_cache_is_prefill_attention(format, window, lengths, monkeypatch):
    monkeypatch.setattr(_tensors, "_SCRATCH", 512)
    draw = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, 40, heads, 64, generator=draw).bfloat16() for heads in (6, 2, 2))
    cache = rt.KVCache(2, 640, 2, 64, format=format, dtype="bfloat16")
    past = [torch.randn(2, 600, 2, 64, generator=draw).bfloat16() for _ in range(2)]
    cache.append(*past, counts=list(lengths))
    for counts in (None, torch.tensor([40, 17], dtype=torch.int32)):
        exact = rt.prefill_attention(q, k, v, cache=cache, counts=counts, window=window, scale=0.2).float()
        out = _tensors.behind(q, k, v, cache, list(lengths), counts, scale=0.2, window=window).float()
        torch.testing.assert_close(out, exact, rtol=0, atol=4 * torch.finfo(torch.bfloat16).eps)


@pytest.mark.parametrize("rows, tokens", [(1, 512), (3, 128)])
def test_torch_behind_a_cache_decodes_a_part_of_it_at_a_time(rows, tokens, monkeypatch):
    """As many whole pages as _SCRATCH tokens of all rows and KV heads hold."""
    seen, decode = [], _tensors._dequantize.tokens

    def noted(cache, where, begin, end, length):
        seen.append((begin, end))
        return decode(cache, where, begin, end, length)

    monkeypatch.setattr(_tensors, "_SCRATCH", 512)
    monkeypatch.setattr(_tensors._dequantize, "tokens", noted)
    q, k, v = (torch.randn(rows, 4, heads, 64) for heads in (4, 1, 1))
    cache = rt.KVCache(rows, 2048, 1, 64, format="fp32", dtype="float32")
    cache.append(*(torch.randn(rows, 1600, 1, 64) for _ in range(2)))
    _tensors.behind(q, k, v, cache, [1600] * rows, None, scale=0.2, window=None)
    assert seen == [(begin, min(begin + tokens, 1600)) for begin in range(0, 1600, tokens)]


def test_torch_with_a_window_decodes_the_pages_of_the_window(monkeypatch):
    """The pages of the window alone, whatever the table says of those behind."""
    seen, decode = [], _tensors._dequantize.tokens

    def noted(cache, where, begin, end, length):
        seen.append((begin, end))
        return decode(cache, where, begin, end, length)

    monkeypatch.setattr(_tensors._dequantize, "tokens", noted)
    q, k, v, *past = (torch.randn(1, rows, 1, 64) for rows in (4, 4, 4, 600, 600))
    table = torch.tensor([[*range(38), 10**6]], dtype=torch.int32)
    lengths = torch.zeros(1, dtype=torch.int32)
    cache = rt.PagedKVCache.view(torch.zeros(38, 2, 16, 1, 64), table, lengths, format="fp32")
    cache.append(*past)
    out = _tensors.behind(q, k, v, cache, [600], None, scale=0.2, window=50)
    assert seen == [(544, 600)]  # 551 is the first token that is seen, in the page from 544
    exact = rt.prefill_attention(q, k, v, cache=cache, window=50, scale=0.2)
    torch.testing.assert_close(out, exact, rtol=0, atol=64 * torch.finfo(torch.float32).eps)


def test_a_long_turn_through_torch(monkeypatch):
    """The way of a GPU, run on the CPU: it stores the bytes of the other way."""
    model, _ = tiny("qwen2-window")
    ids, mask = padded((17, 0, 5), 400)
    pieces = (300, 1, 50, 1, 48)
    logits, caches = [], []
    for attend_and_store in (integration.RooftileLayer._attend_and_store, through_torch):
        monkeypatch.setattr(integration.RooftileLayer, "_attend_and_store", attend_and_store)
        caches.append(RooftileCache(model.config, format="int8"))
        logits.append(feed(model, ids, mask, pieces, caches[-1]))
    real = mask.bool()
    torch.testing.assert_close(logits[1][real], logits[0][real], rtol=1e-3, atol=1e-3)
    assert caches[0].layers[0].pads == [17, 0, 5]
    for row in range(3):
        theirs, ours = (stored(cache, row) for cache in caches)
        assert_same_bytes(theirs, ours)


def through_torch(self, q, k, v, counts, before, options):
    lengths = [before] * len(q) if self.pads is None else [max(before - pad, 0) for pad in self.pads]
    if before:
        scale, window = options["scale"], options["window"]
        out = _tensors.behind(q, k, v, self._pages, lengths, counts, scale=scale, window=window)
    else:
        out = _tensors.prompt(q, k, v, counts, **options)
    self._append(k, v, counts, before + k.shape[1])
    return out


# ---- what is taken back ----


@pytest.mark.parametrize("format", ["int8", "int4-kivi"])
def test_crop_into_the_padding(format):
    """A row of which nothing is left begins anew behind its padding."""
    model, _ = tiny()
    ids, mask = padded((17, 0), 30)
    cache, fresh = (RooftileCache(model.config, format=format) for _ in range(2))
    expected = feed(model, ids, mask, (14, 16), fresh)
    feed(model, ids, mask, (30,), cache)
    cache.crop(-16)
    assert cache.get_seq_length() == 14 and cache.layers[0].cache.lengths == [0, 14]
    positions = (mask.cumsum(1) - 1).clamp_min(0)[:, 14:]
    logits = model(ids[:, 14:], attention_mask=mask, position_ids=positions, **{CACHE: cache}).logits
    assert torch.equal(logits[mask[:, 14:].bool()], expected[:, 14:][mask[:, 14:].bool()])
    for row in range(2):
        assert_same_bytes(stored(cache, row), stored(fresh, row))


def test_a_crop_that_is_cut():
    """By a signal handler, wherever Python runs one, and by another while the exception goes up: all layers or none."""
    cache = RooftileCache(tiny("mistral")[0].config, format={"default": "int8", -1: "int4-kivi"})
    inputs = layer_inputs(300)

    def store(columns):
        for layer in range(len(cache.layers)):
            attend(cache, *(x[:, :, columns] for x in inputs), layer=layer, mask=sliding(1))

    def positions():
        facts = [(layer.columns, layer.stored, layer.begun, layer.cache.lengths) for layer in cache.layers]
        return [*facts, cache.layers[0].cache.beyond]

    store(slice(None))
    before = positions()
    cache.crop(-9)
    after, cut = positions(), 0
    for at in itertools.count(1):
        for again in (0, 1, 2, 4, 8):
            if positions() != before:
                store(slice(291, 300))
            came = Handler(interrupt, at, again).run(lambda: cache.crop(-9))
            assert positions() in (before, after)
            if again == 0 and not came:
                assert cut > 50 and positions() == after
                return
            cut += positions() == before


# ---- torch.compile ----


def test_a_compiled_model_has_no_graph_breaks():
    """fullgraph: a graph for the prompt, one for a step, and that one for any number of columns. It slides, too."""
    model, _ = tiny("mistral")
    ids, mask = padded((17, 0), 49)
    pieces = (45, 1, 1, 1, 1)
    expected = feed(model, ids, mask, pieces, RooftileCache(model.config, format="int4-kivi"))
    torch._dynamo.reset()
    graphs = []
    model.forward = torch.compile(
        model.forward, fullgraph=True, backend=lambda graph, _: (graphs.append(graph), graph.forward)[1]
    )
    cache = RooftileCache(model.config, format="int4-kivi")
    out = feed(model, ids, mask, pieces, cache)
    assert torch.equal(out, expected) and len(graphs) <= 3
    assert cache.get_seq_length() == 49 and cache.layers[1].cache.lengths == [32, 49]
    before = [stored(cache, row) for row in range(2)]
    twin = copy.deepcopy(cache)
    model(ids[:, -1:], attention_mask=torch.cat([mask, mask[:, :1] | 1], 1), **{CACHE: twin})
    assert twin.layers[0].cache.lengths == [33, 50]
    for row in range(2):
        assert_same_bytes(stored(cache, row), before[row])


def test_generate_with_a_compiled_forward():
    model, theirs = tiny()
    ids, mask = padded((9, 0), 30)
    expected = generate(model, theirs, ids, mask, new=6)
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend="eager")
    rt.set_kv_cache(model, "fp32")
    with rt.record_kernels() as kernels:
        assert torch.equal(generate(model, "rooftile", ids, mask, new=6), expected)
    assert "append" in " ".join(kernels)


@pytest.mark.parametrize("attention", ["sdpa", pytest.param("eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("setting", ["cache", pytest.param("set_kv_cache", marks=pytest.mark.slow)])
def test_a_compiled_model_with_another_attention(setting, attention):
    """The error of an eager model: another attention function would attend the new tokens alone."""
    model, _ = tiny()
    ids, mask = prompts(1, 30)
    cache = RooftileCache(model.config, format="fp32") if setting == "cache" else None
    if cache is None:
        rt.set_kv_cache(model, "int4-kivi")
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend="eager")
    with pytest.raises(rt.NotSupportedError, match="only be read by the attention function 'rooftile'"):
        generate(model, attention, ids, mask, cache, new=6)


def test_forwards_of_a_compiled_model_with_another_attention():
    model, _ = tiny()
    ids, _ = prompts(1, 40)
    cache = RooftileCache(model.config, format="fp32")
    torch._dynamo.reset()
    model.set_attn_implementation("sdpa")
    model.forward = torch.compile(model.forward, backend="eager")
    for piece in (ids[:, :30], ids[:, 30:]):
        with pytest.raises(rt.NotSupportedError, match="only be read by the attention function 'rooftile'"):
            model(piece, **{CACHE: cache})
        cache.reset()


def test_a_compiled_model_that_changes_its_keys(monkeypatch):
    """A tensor in the keys' place would not name its layer, and be attended as a prompt alone."""
    model, _ = tiny()
    update = RooftileCache.update

    def changed(*args, **options):
        keys, values = update(*args, **options)
        return keys.clone(), values

    monkeypatch.setattr(RooftileCache, "update", changed)
    ids, mask = prompts(1, 30)
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend="eager")
    with pytest.raises(rt.NotSupportedError, match="attention layers change the keys or values"):
        generate(model, "rooftile", ids, mask, RooftileCache(model.config, format="fp32"), new=6)


def test_a_graph_serves_every_cache():
    """Each generate() may bring a cache of its own: no cache is worth a graph."""
    model, _ = tiny()
    ids, mask = padded((17, 0), 30)
    torch._dynamo.reset()
    graphs = []
    forward = model.forward
    model.forward = torch.compile(
        forward, fullgraph=True, backend=lambda graph, _: (graphs.append(graph), graph.forward)[1]
    )
    caches = [RooftileCache(model.config, format="int8") for _ in range(12)]
    outs = [feed(model, ids, mask, (27, 1, 1, 1), cache) for cache in caches]
    assert len(graphs) <= 3
    model.forward = forward
    expected = feed(model, ids, mask, (27, 1, 1, 1), RooftileCache(model.config, format="int8"))
    for out, cache in zip(outs, caches, strict=True):
        assert torch.equal(out, expected) and [layer.cache.lengths for layer in cache.layers] == [[13, 30]] * 2


@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_layers_in_graphs_of(backend):
    """Of the default backend, too, which has the layers' counts of columns as symbols from the second forward on."""
    model, _ = tiny()
    module = torch.nn.Identity().eval()

    def layers(inputs, cache):
        columns = cache.get_seq_length()
        outs = [rooftile_attention(module, q, *cache.update(k, v, i), None) for i, (q, k, v) in enumerate(inputs)]
        return columns, outs

    torch._dynamo.reset()
    compiled = torch.compile(layers, fullgraph=True, backend=backend)
    with torch.inference_mode():  # in which a server may make its caches
        cache, twin = (RooftileCache(model.config, format="int4-kivi") for _ in range(2))
    for tokens in (20, 1, 1, 5, 1, 20):
        inputs = [layer_inputs(tokens, seed=seed) for seed in (1, 2)]
        assert str(compiled(inputs, cache)) == str(layers(inputs, twin))
    for i in range(2):
        assert_same_bytes(stored(cache, layer=i), stored(twin, layer=i))


@pytest.mark.parametrize(("stop", "then"), [("compiled", "compiled"), ("compiled", "eager"), ("eager", "compiled")])
def test_a_forward_behind_one_that_stopped_half_way(stop, then, monkeypatch):
    model, _ = tiny()
    ids, mask = prompts(1, 8)
    cache = RooftileCache(model.config, format="fp32")
    feed(model, ids, mask, (5, 1), cache)
    torch._dynamo.reset()
    forwards = {"compiled": torch.compile(model.forward, fullgraph=True, backend="eager"), "eager": model.forward}
    attend = RooftileLayer.attend

    def interrupted(layer, *args):
        if layer is cache.layers[1]:
            raise KeyboardInterrupt
        return attend(layer, *args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RooftileLayer, "attend", interrupted)
        forwards[stop](ids[:, 6:7], **{CACHE: cache})
    for _ in range(2):
        with pytest.raises(rt.RooftileError, match=r"half way.*; reset\(\) this cache"):
            forwards[then](ids[:, 7:], **{CACHE: cache})
    cache.reset()
    feed(model, ids, mask, (8,), cache)
    assert cache.get_seq_length() == 8


def test_a_layer_that_is_behind_is_noticed_in_a_graph():
    model, _ = tiny()
    ids, mask = prompts(1, 8)
    caches = [RooftileCache(model.config, format="fp32") for _ in range(2)]
    for cache in caches:
        feed(model, ids, mask, (5, 1), cache)
    attend(caches[1], *layer_inputs(1))  # the first layer alone
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, fullgraph=True, backend="eager")
    for _ in range(2):
        model(ids[:, -1:], **{CACHE: caches[0]})
    with pytest.raises(rt.ArgumentError, match="a layer would hold 7 columns, the layer before it 8"):
        model(ids[:, -1:], **{CACHE: caches[1]})


@pytest.mark.slow
@pytest.mark.parametrize("format", ["fp32", "int4-kivi"])
def test_a_model_compiled_by_inductor(format):
    model, _ = tiny()
    ids, mask = padded((17, 0), 49)
    pieces = (20, 1, 1, 1, 5, 1, 20)
    expected = feed(model, ids, mask, pieces, RooftileCache(model.config, format=format))
    rt.set_kv_cache(model, format)
    texts = generate(model, "rooftile", ids, mask, new=6)
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, fullgraph=True)
    for _ in range(2):
        cache = RooftileCache(model.config, format=format)
        out = feed(model, ids, mask, pieces, cache)
        torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3)
        assert cache.get_seq_length() == 49 and cache.layers[1].cache.lengths == [32, 49]
        assert torch.equal(generate(model, "rooftile", ids, mask, new=6), texts)
