# SPDX-License-Identifier: Apache-2.0
"""rt.accelerate: decode steps of a model of transformers as one program. The oracle is transformers' own forward."""

import copy
import functools
import mmap
import operator
import os
import pickle
import re
import threading
import warnings

import cases
import pytest
import rooftile as rt
import step_models
import torch
import torch.nn.utils.prune
import transformers
from rooftile.integrations import step_products
from rooftile.integrations._models import CACHE
from rooftile.integrations.step_program import FAMILIES, StepProgram
from rooftile.integrations.transformers import RooftileCache

SIZES = {
    "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 512, "bos_token_id": 1,
    "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


def make(family="Llama", dtype=torch.float32, **options):
    torch.manual_seed(0)
    config = step_models.config_of(family, **SIZES | options)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(dtype).eval()
    for parameter in model.parameters():  # larger than their initial values, so that layers matter
        parameter.data.normal_(0, 0.08 if parameter.ndim == 2 else 0.3).add_(0 if parameter.ndim == 2 else 1)
    return model


def pair(family="Llama", kv_cache="fp32", dtype=torch.float32, **options):
    """The same model accelerated, and over transformers' own forward."""
    model = make(family, dtype, **options)
    plain = copy.deepcopy(model)
    rt.set_kv_cache(plain, kv_cache)
    return rt.accelerate(model, kv_cache=kv_cache), plain


class Forwards:
    """Counts what runs in transformers: tokens a row of every forward of a class of models."""

    def __init__(self, monkeypatch, model):
        self.tokens = []
        forward = type(model).forward

        @functools.wraps(forward)  # of the same module: a program does not run for a forward that somebody replaced
        def counted(model, input_ids=None, *args, **kwargs):
            self.tokens.append(None if input_ids is None else input_ids.shape[1])
            return forward(model, input_ids, *args, **kwargs)

        monkeypatch.setattr(type(model), "forward", counted)


@pytest.fixture
def ids():
    torch.manual_seed(1)
    return torch.randint(3, 300, (2, 37))


def padded(ids):
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    return mask


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kv_cache", ["fp32", "int8", "int4-kivi"])
def test_greedy_tokens_are_those_of_transformers(family, kv_cache, ids, monkeypatch):
    model, plain = pair(family, kv_cache)
    for mask in (torch.ones_like(ids), padded(ids)):
        options = {"attention_mask": mask, "max_new_tokens": 40, "do_sample": False}
        expected = plain.generate(ids, **options)
        with monkeypatch.context() as patched:
            forwards = Forwards(patched, model)
            assert torch.equal(model.generate(ids, **options), expected)
        assert forwards.tokens == [37]  # the prompt alone


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype, kv_cache", [(torch.float16, "fp16"), (torch.bfloat16, "bf16")])
def test_logits_in_16_bits_are_nearer_to_float32(family, dtype, kv_cache, ids):
    """Than those of transformers, or as near: the program rounds less often."""
    model, plain = pair(family, kv_cache, dtype)
    exact = copy.deepcopy(plain).float()
    rt.set_kv_cache(exact, "fp32")
    models, errors = (model, plain, exact), torch.zeros(2)
    with torch.no_grad():
        outs = [m(ids) for m in models]
        for token in range(3, 40):
            new = torch.full((2, 1), token)
            outs = [m(new, **{CACHE: out[CACHE]}) for m, out in zip(models, outs, strict=True)]
            assert outs[0].logits.shape == (2, 1, 300) and outs[0].logits.dtype == dtype
            ours, theirs, right = (out.logits.float() for out in outs)
            errors += torch.stack([(x - right).square().sum() for x in (ours, theirs)])
    assert 0 < errors[0] <= 1.2 * errors[1]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh"])
def test_what_a_layer_says(bias, activation, ids):
    model, plain = pair(attention_bias=bias, mlp_bias=bias, hidden_act=activation, tie_word_embeddings=bias)
    assert torch.equal(model.generate(ids, max_new_tokens=9), plain.generate(ids, max_new_tokens=9))


@pytest.mark.parametrize("kv_cache", ["fp32", "int4-kivi"])
@pytest.mark.parametrize(
    "family, options",
    [
        ("Granite", {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 7.0,
                     "attention_multiplier": 0.1}),
        ("Granite", {"attention_bias": True, "mlp_bias": True, "residual_multiplier": 0.4}),
        ("Phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}),
        ("Phi3", {"sliding_window": 300, "hidden_act": "gelu"}),
        ("Phi3", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 16,
                                      "long_factor": [2.0] * 16}, "original_max_position_embeddings": 64}),
        ("Olmo2", {"attention_bias": True}),
    ],
    ids=lambda of: of if isinstance(of, str) else "-".join(of),
)  # fmt: skip
def test_what_a_family_has_of_its_own(family, options, kv_cache, ids, monkeypatch):
    if "original_max_position_embeddings" in options:
        cases.begins_anew()
    model, plain = pair(family, kv_cache, **options)
    expected = plain.generate(ids, max_new_tokens=40)
    forwards = Forwards(monkeypatch, model)
    assert torch.equal(model.generate(ids, max_new_tokens=40), expected)
    assert forwards.tokens[0] == 37 and len(forwards.tokens) <= 2  # longrope: the text is computed anew once


@pytest.mark.parametrize(
    "name, value", [("residual_multiplier", 0.5), ("embedding_multiplier", 2.0), ("logits_scaling", 0.5)]
)
def test_multipliers_may_change(name, value, ids):
    model, plain = pair("Granite", residual_multiplier=0.8, logits_scaling=2.0)
    before = model.generate(ids, max_new_tokens=9)
    for of in (model, plain):
        holder = {"residual_multiplier": of.model.layers[1], "embedding_multiplier": of.model}.get(name, of.config)
        setattr(holder, name, value)
    with torch.no_grad():
        outs = [of(ids) for of in (model, plain)]
        steps = [of(ids[:, :1], **{CACHE: out[CACHE]}).logits for of, out in zip((model, plain), outs, strict=True)]
    torch.testing.assert_close(*steps, rtol=1e-4, atol=1e-4)
    assert outs[0][CACHE].steps == 1 and before.shape == (2, 46)


@pytest.mark.parametrize("family, joined", [("Llama", 0), ("Olmo2", 1), ("Gemma2", 6), ("Gemma3", 6)])
def test_sums_that_a_norm_follows_are_one_call_with_it(family, joined):
    program = StepProgram(make(family), 2)
    calls = [call.func for before, _, behind in program._recorded for call in before + behind]
    calls += [call.func for call in program._last]
    assert calls.count(rt._C.add_rms_norm) == joined
    assert calls.count(torch.Tensor.add_) == (5 if family == "Olmo2" else 0)  # no norm comes before its products


@pytest.mark.parametrize("family, joined", [("Llama", 0), ("Olmo2", 0), ("Qwen3", 1), ("Gemma3", 1)])
def test_norms_of_q_and_k_are_one_call(family, joined):
    """Those of heads, with one eps; OLMo-2's are of all heads together."""
    model = make(family)

    def norms():
        layers = [[call.func for call in before] for before, _, _ in StepProgram(model, 2)._recorded]
        return [(layer.count(rt._C.qk_rms_norm), layer.count(rt._C.rms_norm)) for layer in layers]

    together = norms()
    assert [pair for pair, _ in together] == [joined] * 3
    if joined:
        setattr(model.model.layers[1].self_attn.k_norm, FAMILIES[family].norm_eps, 1e-3)
        assert norms() == [together[0], (0, together[1][1] + 2), together[2]]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_cuda_graphs_are_a_setting_of_the_model(copied):
    model = rt.accelerate(make("Llama"), kv_cache="bf16", cuda_graphs=False)
    for of in (model, copied(model)):
        assert of.forward._recorded(1).cuda_graphs is False
    assert rt.accelerate(model, kv_cache=None).forward._recorded(1).cuda_graphs is True
    with pytest.raises(rt.ArgumentTypeError, match="accelerate: cuda_graphs must be True or False, got int"):
        rt.accelerate(model, cuda_graphs=1)


def both_logits(model, plain, ids):
    """Of the last of two steps behind a prompt: the program's and transformers'."""
    with torch.no_grad():
        outs = [m(ids) for m in (model, plain)]
        for token in (7, 8):
            new = torch.full((len(ids), 1), token)
            outs = [m(new, **{CACHE: out[CACHE]}) for m, out in zip((model, plain), outs, strict=True)]
    return [out.logits for out in outs]


def all_full(config):
    config.layer_types[:] = ["full_attention"] * 3


def other_config(config):
    config = copy.deepcopy(config)
    config.final_logit_softcapping = 1.0
    return config


CONFIG_CHANGES = {
    "cap": lambda model: setattr(model.config, "final_logit_softcapping", 2.0),
    "no cap": lambda model: setattr(model.config, "final_logit_softcapping", None),
    "window": lambda model: setattr(model.config, "sliding_window", 8),
    "window of a layer": lambda model: setattr(model.model.layers[0].self_attn, "sliding_window", 8),
    "types": lambda model: setattr(model.config, "layer_types", ["full_attention"] * 3),
    "types in place": lambda model: all_full(model.config),
    "another config": lambda model: setattr(model, "config", other_config(model.config)),
    "scale": lambda model: model.model.embed_tokens.embed_scale.mul_(0.5),
}


@pytest.mark.filterwarnings("ignore:rooftile. decode steps run in transformers")
@pytest.mark.parametrize("change", CONFIG_CHANGES)
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Gemma2", "Gemma3"])
def test_what_the_config_says_later(family, change, ids):
    """It takes effect as in transformers, in a program or without one."""
    if (family, change) == ("Llama", "types in place") or (change == "scale" and not family.startswith("Gemma")):
        return  # it has none
    window = {} if family == "Llama" else {"sliding_window": 30}
    window |= {"use_sliding_window": True, "max_window_layers": 0} if family == "Qwen2" else {}
    model, plain = pair(family, "fp32", **window)
    before = both_logits(model, plain, ids)
    for m in (model, plain):
        CONFIG_CHANGES[change](m)
    ours, theirs = both_logits(model, plain, ids)
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(*before, rtol=1e-3, atol=1e-3)


def test_a_scale_of_another_type_is_refused():
    model = make("Gemma3", torch.bfloat16)
    embedding = model.model.embed_tokens
    embedding.embed_scale = torch.nn.Buffer(embedding.embed_scale.float(), persistent=False)
    with pytest.raises(rt.NotSupportedError, match=r"embed_scale of torch\.float32 for weights of"):
        rt.accelerate(model)
    del embedding.embed_scale
    embedding.embed_scale = torch.nn.Parameter(torch.ones(()))
    with pytest.raises(rt.NotSupportedError, match="whose embed_scale is computed"):
        rt.accelerate(model)


def test_a_dropout_that_is_on_is_refused():
    model = make("Phi3")
    model.model.layers[1].resid_mlp_dropout.train()
    with pytest.raises(rt.NotSupportedError, match="resid_mlp_dropout is in training mode"):
        rt.accelerate(model)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 64},
    ],
    ids=lambda rope: rope["rope_type"],
)  # fmt: skip
def test_rotary_tables(rope, ids):
    model, plain = pair(rope_parameters={**rope, "rope_theta": 10000.0})
    assert torch.equal(model.generate(ids, max_new_tokens=300), plain.generate(ids, max_new_tokens=300))


def test_windows(ids, monkeypatch):
    model, plain = pair("Mistral", sliding_window=16)
    expected = plain.generate(ids, max_new_tokens=300)
    forwards = Forwards(monkeypatch, model)
    with pytest.warns(UserWarning, match="decode steps run in transformers where the window of a layer slides"):
        assert torch.equal(model.generate(ids, max_new_tokens=300), expected)
    # as long as the layers' caches do not slide the program runs
    assert forwards.tokens[0] == 37 and 100 < len(forwards.tokens) < 200


def test_beams_sampling_and_drafts(ids):
    model, plain = pair()
    sampled = {
        "do_sample": True,
        "top_k": 20,
        "typical_p": 0.9,
    }  # which takes transformers' processors and torch's draw
    for options in ({"num_beams": 3}, sampled, {"prompt_lookup_num_tokens": 4}):
        rows = ids if "prompt_lookup_num_tokens" not in options else ids[:1]
        results = []
        for m in (model, plain):
            torch.manual_seed(5)
            results.append(m.generate(rows, max_new_tokens=20, **options))
        assert torch.equal(*results)


def test_the_cache_grows_and_is_reused(ids):
    model, plain = pair(kv_cache="int4-kivi")
    caches = [RooftileCache(m.config, format="int4-kivi", capacity=40, turns=True) for m in (model, plain)]
    turn = ids
    for _ in range(3):  # past 64, the page, and over what a table of rotations was made for
        outs = [m.generate(turn, max_new_tokens=50, **{CACHE: c}) for m, c in zip((model, plain), caches, strict=True)]
        assert torch.equal(*outs)
        turn = torch.cat([outs[0], ids[:, :5]], 1)
    assert caches[0].layers[0].cache.lengths == caches[1].layers[0].cache.lengths


STEPS = {
    "grad": lambda m, new, cache: m(new, **{CACHE: cache}),
    "hidden states": lambda m, new, cache: m(new, output_hidden_states=True, **{CACHE: cache}),
    "tuple": lambda m, new, cache: m(new, return_dict=False, **{CACHE: cache}),
    "labels": lambda m, new, cache: m(new, labels=new, **{CACHE: cache}),
    "embeddings": lambda m, new, cache: m(inputs_embeds=m.get_input_embeddings()(new), **{CACHE: cache}),
    "two tokens": lambda m, new, cache: m(new.repeat(1, 2), **{CACHE: cache}),
    "kept": lambda m, new, cache: m(new, logits_to_keep=torch.tensor([0]), **{CACHE: cache}),
    "none kept": lambda m, new, cache: m(new, logits_to_keep=-1, **{CACHE: cache}),
}


@pytest.mark.parametrize("what", STEPS)
def test_other_forwards_are_those_of_transformers(what, ids, monkeypatch):
    model, plain = (m.requires_grad_(False) for m in pair())
    new = torch.tensor([[7], [8]])
    results = []
    with torch.no_grad():
        caches = [m(ids)[CACHE] for m in (model, plain)]
    forwards = Forwards(monkeypatch, model)
    for m, cache in zip((model, plain), caches, strict=True):
        with torch.set_grad_enabled(what == "grad"):
            out = STEPS[what](m, new, cache)
        results.append(out[0] if what == "tuple" else out.logits)
    assert torch.equal(*results) and len(forwards.tokens) == 2
    with torch.no_grad():  # and the next step is the program's again
        after = [m(new, **{CACHE: cache}).logits for m, cache in zip((model, plain), caches, strict=True)]
    torch.testing.assert_close(*after)
    assert len(forwards.tokens) == 3


def test_autocast_is_not_ignored(ids):
    errors = []
    for model in pair():
        with torch.no_grad():
            cache = model(ids)[CACHE]
            with torch.autocast("cpu"), pytest.raises(rt.ArgumentTypeError) as raised:
                model(ids[:, :1], **{CACHE: cache})
        errors.append(str(raised.value))
    assert errors[0] == errors[1]


@pytest.mark.parametrize(
    "options", [{"position_ids": torch.tensor([[3], [3]])}, {"attention_mask": torch.ones(2, 30, dtype=torch.int64)}]
)
def test_what_contradicts_the_cache_is_judged_by_transformers(options, ids):
    model, plain = pair()
    results = []
    with torch.no_grad():
        for m in (model, plain):
            cache = m(ids)[CACHE]
            try:
                results.append(m(ids[:, :1], **options, **{CACHE: cache}).logits)
            except (rt.RooftileError, ValueError, RuntimeError) as error:
                results.append(str(error))
    assert results[0] == results[1] if isinstance(results[0], str) else torch.equal(*results)


def change_data(model):
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(-1)


def move_data(model):
    weight = model.model.layers[0].self_attn.q_proj.weight
    weight.data = -weight.data


def replace_parameter(model):
    norm = model.model.norm
    norm.weight = torch.nn.Parameter(-2 * norm.weight.detach())


def replace_module(model):
    linear = torch.nn.Linear(128, 192, bias=False)
    linear.weight.data = -model.model.layers[2].mlp.up_proj.weight.detach()
    model.model.layers[2].mlp.up_proj = linear


def round_weights(model):
    rt.quantize_(model, rt.W4A16(group_size=32), progress=False)


def other_type(model):
    model.to(torch.float64).to(torch.float32)


def other_eps(model):
    model.model.layers[0].input_layernorm.variance_epsilon = 0.5


def other_scaling(model):
    model.model.layers[2].self_attn.scaling *= 3


def other_table(model):
    model.model.rotary_emb.inv_freq = torch.nn.Buffer(model.model.rotary_emb.inv_freq * 2, persistent=False)


def other_strength(model):
    model.model.rotary_emb.attention_scaling = 0.7


def fewer_layers(model):
    model.config.num_hidden_layers = 2
    model.model.layers = model.model.layers[:2]


def more_tokens(model):
    model.resize_token_embeddings(320, mean_resizing=False)
    for embedding in (model.lm_head, model.get_input_embeddings()):
        embedding.weight.data[300:] = 9 * embedding.weight.data[:20]


def tables_in_place(model):
    model.model.rotary_emb.inv_freq.mul_(0.5)


def more_tokens_of_a_tied_model(model):
    model.lm_head.weight = model.get_input_embeddings().weight
    model.config.tie_word_embeddings = True
    model.resize_token_embeddings(317, mean_resizing=False)
    model.lm_head.weight.data[300:] = 9 * model.lm_head.weight.data[:17]


@pytest.mark.parametrize(
    "change",
    [
        tables_in_place,
        more_tokens_of_a_tied_model,
        other_eps,
        other_scaling,
        other_table,
        other_strength,
        fewer_layers,
        more_tokens,
        change_data,
        move_data,
        replace_parameter,
        replace_module,
        round_weights,
        other_type,
    ],
)
def test_a_model_that_changes(change, ids, monkeypatch):
    model, plain = pair()
    before = model.generate(ids, max_new_tokens=12)
    for m in (model, plain):
        change(m)
    expected = plain.generate(ids, max_new_tokens=12)
    after = model.generate(ids, max_new_tokens=12)
    assert torch.equal(after, expected)
    forwards = Forwards(monkeypatch, model)  # another forward of the class: the program is recorded anew
    assert torch.equal(model.generate(ids, max_new_tokens=12), expected) and len(forwards.tokens) == 1
    assert torch.equal(after, before) is (change is other_type)


def pruned(model):
    torch.nn.utils.prune.l1_unstructured(model.model.layers[0].mlp.up_proj, "weight", 0.5)


def parametrised(model):
    torch.nn.utils.parametrizations.weight_norm(model.model.layers[0].mlp.up_proj)


def other_activation(model):
    model.model.layers[0].mlp.act_fn = torch.nn.Tanh()


def mixed_dtypes(model):
    model.model.norm.to(torch.float16)


def a_pre_hook(model):
    model.model.norm.register_forward_pre_hook(lambda module, args: (2 * args[0],))


def other_forward(model):
    mlp = model.model.layers[1].mlp
    mlp.forward = lambda x, forward=mlp.forward: -forward(x)


def other_class(model):
    mlp = model.model.layers[1].mlp
    mlp.__class__ = type("Mine", (type(mlp),), {"forward": lambda self, x: -type(self).__mro__[1].forward(self, x)})


def hook_of_an_activation(model):
    model.model.layers[1].mlp.act_fn.register_forward_hook(lambda module, args, out: -out)


def no_weight(model):
    norm = model.model.norm
    weight = -norm.weight.detach()
    del norm.weight
    norm.weight = weight


def renormalised(model):
    model.model.embed_tokens.max_norm = 0.3


def smaller_mlp(model):
    mlp = model.model.layers[1].mlp
    for name, rows in (("gate_proj", slice(64)), ("up_proj", slice(64)), ("down_proj", (slice(None), slice(64)))):
        linear = getattr(mlp, name)
        linear.weight = torch.nn.Parameter(linear.weight.detach()[rows].clone())


@pytest.mark.parametrize(
    "change",
    [
        pruned,
        parametrised,
        other_activation,
        a_pre_hook,
        other_forward,
        other_class,
        hook_of_an_activation,
        no_weight,
        renormalised,
        smaller_mlp,
    ],
)
def test_a_model_that_has_no_program_any_more(change, ids):
    model, plain = pair()
    for m in (model, plain):
        m.generate(ids, max_new_tokens=3)
        change(m)
    with pytest.warns(UserWarning, match="decode steps run in transformers: model: no step program"):
        ours = model.generate(ids, max_new_tokens=12)
    assert torch.equal(ours, plain.generate(ids, max_new_tokens=12))


def test_tensors_of_several_dtypes_are_refused():
    model = make()
    mixed_dtypes(model)
    with pytest.raises(rt.NotSupportedError, match="several dtypes: the embedding is torch"):
        rt.accelerate(model)


def test_batches_of_several_sizes_in_turns(ids, monkeypatch):
    model, plain = pair()
    expected = [plain.generate(ids[:rows], max_new_tokens=5) for rows in (1, 2)]
    for _ in range(2):
        for rows in (1, 2):
            assert torch.equal(model.generate(ids[:rows], max_new_tokens=5), expected[rows - 1])
    programs = dict(model.forward._programs)
    model.generate(ids, max_new_tokens=5)
    assert model.forward._programs == programs and set(programs) == {1, 2}
    for rows in range(3, 9):
        model.generate(ids[:1].repeat(rows, 1), max_new_tokens=3)
    assert list(model.forward._programs) == [5, 6, 7, 8]


def test_a_cache_of_another_model(ids):
    results = []
    for m in pair():
        torch.manual_seed(0)
        cache = RooftileCache(transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 4}), format="fp32")
        with torch.no_grad():
            m(ids, **{CACHE: cache})
            try:
                results.append(m(ids[:, :1], **{CACHE: cache}).logits)
            except rt.RooftileError as error:
                results.append(str(error))
    assert results[0] == results[1] if isinstance(results[0], str) else torch.equal(*results)


def test_a_compiled_model_is_transformers(ids):
    model, plain = pair()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        outs = [m(ids) for m in (compiled, plain)]
        logits = [m(ids[:, :1], **{CACHE: out[CACHE]}).logits for m, out in zip((compiled, plain), outs, strict=True)]
    torch.testing.assert_close(*logits)


def test_inference_mode_and_no_grad_in_turns(ids):
    model, plain = pair(kv_cache="int8")
    with torch.inference_mode():
        caches = [m(ids)[CACHE] for m in (model, plain)]
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            logits = [m(ids[:, :1], **{CACHE: c}).logits for m, c in zip((model, plain), caches, strict=True)]
        torch.testing.assert_close(*logits)


def test_twice(ids):
    model, plain = pair(kv_cache="int8")
    forward = model.forward
    assert rt.accelerate(model, kv_cache="int4-kivi") is model and model.forward is forward
    rt.set_kv_cache(plain, "int4-kivi")
    assert torch.equal(model.generate(ids, max_new_tokens=9), plain.generate(ids, max_new_tokens=9))
    rt.accelerate(model, head="w8a16")
    head = model.lm_head
    assert rt.accelerate(model, head="w8a16").lm_head is head
    codes = torch.as_tensor(head.weight.dequantize())
    assert isinstance(rt.accelerate(model, head=rt.W4A16(32)).lm_head, rt.nn.W4Linear)
    expected = rt.W4Weight.quantize(codes, group_size=32).dequantize()
    assert torch.equal(model.lm_head.weight.dequantize(), expected)


def test_a_head_of_another_class():
    class Head(torch.nn.Linear):
        pass

    model = make()
    model.lm_head = Head(128, 300, bias=False)
    with pytest.raises(rt.NotSupportedError, match="no step program of a Head; expected"):
        rt.accelerate(model, head="w8a16")


def test_a_model_with_a_forward_of_its_own():
    model = make()
    model.forward = model.forward
    with pytest.raises(rt.NotSupportedError, match="accelerate: model has a forward of its own"):
        rt.accelerate(model)


def test_a_model_with_a_generate_of_its_own():
    _model, plain = pair()
    for call in (rt.accelerate, lambda m: rt.set_kv_cache(m, "int8")):
        own = plain.generate = functools.partial(type(plain).generate, plain, max_new_tokens=9)
        with pytest.raises(rt.NotSupportedError, match="model has a generate of its own"):
            call(plain)
        assert plain.generate is own and "forward" not in vars(plain)


def test_a_model_made_fast_under_inference_mode_can_be_trained(ids):
    _, model = pair()
    with torch.inference_mode():
        rt.accelerate(model, kv_cache=None)
    assert not any(p.is_inference() for p in model.parameters())
    model.set_attn_implementation("eager")
    model(ids, labels=ids, use_cache=False).loss.backward()


def test_a_model_without_a_program_is_recorded_once_a_text(ids, monkeypatch):
    model, _ = pair()
    model.model.layers[1].register_forward_hook(lambda *_: None)
    tried, record = [], StepProgram._record
    monkeypatch.setattr(StepProgram, "_record", lambda *args: tried.append(1) or record(*args))
    with pytest.warns(UserWarning, match="decode steps run in transformers") as seen:
        model.generate(ids, max_new_tokens=9)
    assert len(tried) == 1 and [warning.filename for warning in seen] == [__file__]  # the line of the user
    model.generate(ids, max_new_tokens=9)
    assert len(tried) == 2


def test_hooks_are_not_bypassed(ids, monkeypatch):
    model, _ = pair()
    seen = []
    model.generate(ids, max_new_tokens=4)
    layer = model.model.layers[1]
    handle = layer.register_forward_hook(lambda *_: seen.append(1))
    with pytest.warns(
        UserWarning, match="decode steps run in transformers: model: no step program, because 1 has forward"
    ):
        model.generate(ids, max_new_tokens=4)
    assert len(seen) == 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        model.generate(ids, max_new_tokens=4)
        handle.remove()
        forwards = Forwards(monkeypatch, model)
        model.generate(ids, max_new_tokens=4)
    assert len(forwards.tokens) == 1 and len(seen) == 8


def test_copies_are_models_of_their_own(ids):
    model, plain = pair()
    expected = plain.generate(ids, max_new_tokens=8)
    model.generate(ids, max_new_tokens=8)
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    change_data(model)
    for each in copies:
        assert each.forward.model is each
        assert torch.equal(each.generate(ids, max_new_tokens=8), expected)
    assert not torch.equal(model.generate(ids, max_new_tokens=8), expected)


def test_threads_take_turns(ids):
    model, plain = pair(kv_cache="int8")
    texts = [ids, ids.flip(1), ids[:1], ids[:, 5:]]
    expected = [plain.generate(text, max_new_tokens=30) for text in texts]
    results = [None] * len(texts)

    def run(i):
        results[i] = model.generate(texts[i], max_new_tokens=30)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(map(torch.equal, results, expected))


@pytest.mark.parametrize("weights, head", [("w4a16", "w8a16"), (rt.W8A16(32), rt.W4A16(64)), ("w4a16", None)])
def test_rounded_weights_and_head(weights, head, ids):
    model = rt.accelerate(make(tie_word_embeddings=True), weights=weights, head=head, kv_cache="int8", progress=False)
    output = model.get_output_embeddings()
    assert isinstance(output, rt.nn.PackedLinear if head else torch.nn.Linear)
    assert isinstance(model.model.layers[0].mlp.up_proj, rt.nn.PackedLinear)
    assert model.get_input_embeddings().weight.dtype == torch.float32
    plain = copy.deepcopy(model)
    del plain.forward
    assert torch.equal(model.generate(ids, max_new_tokens=20), plain.generate(ids, max_new_tokens=20))


@pytest.mark.parametrize("kv_cache", ["bf16", "int4-kivi"])
def test_a_row_alone_as_in_a_batch(kv_cache):
    """With batch_invariant=True the logits of steps have the same bits."""
    options = {"weights": "w4a16", "head": "w8a16", "kv_cache": kv_cache, "progress": False}
    model = rt.accelerate(make(dtype=torch.bfloat16), batch_invariant=True, **options)
    ids = torch.randint(3, 300, (3, 70), generator=torch.Generator().manual_seed(5))

    def logits(rows):
        with torch.no_grad():
            out, found = model(ids[rows, :37]), []
            for at in range(37, 70):
                out = model(ids[rows, at : at + 1], **{CACHE: out[CACHE]})
                found.append(out.logits)
        return torch.cat(found, 1)

    whole = logits([0, 1, 2])
    assert torch.equal(torch.cat([logits([row]) for row in range(3)]), whole)
    assert all(m.batch_invariant for m in model.modules() if isinstance(m, rt.nn.PackedLinear))
    rt.accelerate(model, kv_cache=kv_cache, progress=False)  # takes it back
    assert not any(m.batch_invariant for m in model.modules() if isinstance(m, rt.nn.PackedLinear))
    if "avx512vnni" in cases.PLANS:  # or a superset of it
        assert not torch.equal(torch.cat([logits([row]) for row in range(3)]), whole)


@pytest.mark.parametrize("family", ("Llama", "Granite"))
def test_the_head_behind_a_prompt_reads_rows_without_gaps(ids, family):
    """torch would copy the whole weight for a slice of a prompt's states. The logits are transformers' own."""
    model = make(family)
    plain = copy.deepcopy(model)
    rt.accelerate(model, kv_cache="fp32")
    seen = []
    model.lm_head.register_forward_pre_hook(lambda module, given: seen.append(given[0].stride()))
    for kept in (1, 3, 0):
        for new in (ids[:1, :12], ids[:, :12]):
            with torch.no_grad():
                cache = RooftileCache(model.config, format="fp32")
                got = model(new, logits_to_keep=kept, **{CACHE: cache})
                expected = plain(new, logits_to_keep=kept)
            torch.testing.assert_close(got.logits, expected.logits, rtol=1e-5, atol=1e-5)
            hidden = model.config.hidden_size
            assert seen.pop() == ((kept or 12) * hidden, hidden, 1) and cache.get_seq_length() == 12


def packed_arrays(model):
    return [
        array
        for m in model.modules()
        if isinstance(m, rt.nn.PackedLinear)
        for array in (m.codes, m.scales, m.offsets, m.perm)
        if array is not None
    ]


def test_packed_weights_lie_in_the_order_of_a_step(ids):
    model = make(dtype=torch.float32)  # whose greedy tokens are the same with and without the program
    rt.quantize_(model, rt.W4A16(), progress=False)
    plain = copy.deepcopy(model)
    before = [array.clone() for array in packed_arrays(model)]
    rt.accelerate(model, kv_cache="fp32")
    assert all(map(torch.equal, packed_arrays(model), before))
    assert len({array.untyped_storage().data_ptr() for array in packed_arrays(model)}) == 1
    layers = [(x.self_attn.k_proj, x.self_attn.o_proj, x.mlp.up_proj, x.mlp.down_proj) for x in model.model.layers]
    places = [linear.codes.data_ptr() for layer in layers for linear in layer]
    assert places == sorted(places) and all(place % 64 == 0 for place in places)
    if hasattr(mmap, "MADV_HUGEPAGE") and os.path.exists("/sys/kernel/mm/transparent_hugepage"):
        assert "hg" in flags_of(places[0])
    rt.accelerate(model, kv_cache="fp32")  # stays where it is
    assert [linear.codes.data_ptr() for layer in layers for linear in layer] == places
    rt.set_kv_cache(plain, "fp32")
    assert torch.equal(model.generate(ids, max_new_tokens=8), plain.generate(ids, max_new_tokens=8))


def flags_of(address):
    """VmFlags of the mapping of this process that has an address (Linux)."""
    inside = False
    with open("/proc/self/smaps", encoding="utf-8") as maps:
        for line in maps:
            if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                inside = int(found[1], 16) <= address < int(found[2], 16)
            elif inside and line.startswith("VmFlags:"):
                return line.split()[1:]
    return []


def test_weights_that_processes_share_stay():
    model = make(dtype=torch.bfloat16)
    rt.quantize_(model, rt.W4A16(), progress=False)
    model.model.layers[1].share_memory()
    shared = packed_arrays(model.model.layers[1])
    places = [array.data_ptr() for array in shared]
    rt.accelerate(model, kv_cache="bf16")
    assert [array.data_ptr() for array in shared] == places and all(array.is_shared() for array in shared)


def test_memories_have_whole_products(ids, monkeypatch):
    monkeypatch.setattr(step_products, "_MEMORY", 30000)
    model = make()  # in float32, whose tokens are transformers' on every CPU
    rt.quantize_(model, rt.W4A16(), progress=False)
    plain = copy.deepcopy(model)
    for layer in model.model.layers[1:]:
        layer.mlp = model.model.layers[0].mlp  # read by every layer, moved once
    rt.accelerate(model, kv_cache="fp32")
    places = [array.data_ptr() for array in packed_arrays(model)]
    memories = [array.untyped_storage().data_ptr() for array in packed_arrays(model)]
    assert 1 < len(set(memories)) < 12
    for layer in model.model.layers:
        of_one = [linear.codes.untyped_storage().data_ptr() for linear in (layer.mlp.gate_proj, layer.mlp.up_proj)]
        assert len(set(of_one)) == 1
    rt.accelerate(model, kv_cache="fp32")
    assert [array.data_ptr() for array in packed_arrays(model)] == places
    for layer in plain.model.layers[1:]:
        layer.mlp = plain.model.layers[0].mlp
    rt.set_kv_cache(plain, "fp32")
    assert torch.equal(model.generate(ids, max_new_tokens=8), plain.generate(ids, max_new_tokens=8))


def test_where_memory_cannot_be_mapped_weights_stay(ids, monkeypatch):
    def refuse(*args, **options):
        raise OSError(12, "Cannot allocate memory")

    model = make(dtype=torch.bfloat16)
    rt.quantize_(model, rt.W4A16(), progress=False)
    place = model.model.layers[0].mlp.down_proj.codes.data_ptr()
    monkeypatch.setattr(step_products.mmap, "mmap", refuse)
    rt.accelerate(model, kv_cache="bf16")
    assert model.model.layers[0].mlp.down_proj.codes.data_ptr() == place
    assert model.generate(ids, max_new_tokens=4).shape[1] == ids.shape[1] + 4


def test_a_rounded_model_can_be_saved(ids, tmp_path):
    model = rt.accelerate(make(), weights="w4a16", kv_cache="int8", progress=False)
    model.save_pretrained(tmp_path)
    again = rt.accelerate(transformers.AutoModelForCausalLM.from_pretrained(tmp_path), kv_cache="int8")
    assert torch.equal(model.generate(ids, max_new_tokens=20), again.generate(ids, max_new_tokens=20))


def test_padding_without_positions_counts_columns_as_transformers_does(ids):
    mask, one = padded(ids), torch.ones(2, 1, dtype=torch.int64)
    logits = []
    with torch.no_grad():
        for m in pair():
            cache = m(ids, attention_mask=mask)[CACHE]
            logits.append(m(ids[:, :1], attention_mask=torch.cat([mask, one], 1), **{CACHE: cache}).logits)
    torch.testing.assert_close(*logits)


def test_data_of_another_type(ids, monkeypatch):
    models, logits = pair(kv_cache="int8"), []
    models[0].generate(ids, max_new_tokens=3)
    for m in models:
        for parameter in m.parameters():
            parameter.data = parameter.data.half()
    with torch.no_grad():
        caches = [m(ids)[CACHE] for m in models]
        forwards = Forwards(monkeypatch, models[0])
        logits = [m(ids[:, :1], **{CACHE: c}).logits for m, c in zip(models, caches, strict=True)]
    assert len(forwards.tokens) == 1 and logits[0].dtype == torch.float16
    assert (logits[0] - logits[1]).float().norm() < 0.02 * logits[1].float().norm()


def test_hooks_of_all_modules(ids):
    model, plain = pair()
    model.generate(ids, max_new_tokens=3)
    name = type(model.model.layers[0].mlp)
    handle = torch.nn.modules.module.register_module_forward_hook(lambda m, a, o: -o if type(m) is name else None)
    try:
        with pytest.warns(UserWarning, match="decode steps run in transformers"):
            ours = model.generate(ids, max_new_tokens=9)
        assert torch.equal(ours, plain.generate(ids, max_new_tokens=9))
    finally:
        handle.remove()


def test_a_class_whose_forward_somebody_replaced(ids, monkeypatch):
    model, plain = pair()
    model.generate(ids, max_new_tokens=3)
    mlp = type(model.model.layers[0].mlp)
    monkeypatch.setattr(mlp, "forward", lambda self, x, forward=mlp.forward: -forward(self, x))
    with pytest.warns(UserWarning, match="LlamaMLP.forward was replaced"):
        ours = model.generate(ids, max_new_tokens=9)
    assert torch.equal(ours, plain.generate(ids, max_new_tokens=9))


def test_a_rounded_head_is_untied_and_not_saved(ids, tmp_path):
    model = rt.accelerate(make(tie_word_embeddings=True), head=rt.W8A16(32), kv_cache="int8")
    model.tie_weights()
    assert isinstance(model.lm_head, rt.nn.W8Linear)
    with pytest.raises(rt.NotSupportedError, match="save_pretrained: rt"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(rt.NotSupportedError, match="resize_token_embeddings: this model's output head is packed"):
        model.resize_token_embeddings(310)
    assert len(model.get_input_embeddings().weight) == 300  # nothing has changed
    wild = make()
    wild.lm_head.weight.data[0, 0] = 3e7
    with pytest.raises(rt.ArgumentError, match="accelerate: head: weight must lie within"):
        rt.accelerate(wild, head=rt.W8A16(32))


def test_export_records_transformers(ids):
    exported = []
    for m in pair():
        with torch.no_grad():
            program = torch.export.export(m, (ids[:, :5],), {"use_cache": False}, strict=False)
            exported.append(program.module()(ids[:, :5], use_cache=False).logits)
    torch.testing.assert_close(*exported)


def test_a_wrong_token_leaves_the_cache_as_it_was(ids):
    model, plain = pair()
    with torch.no_grad():
        caches = [m(ids)[CACHE] for m in (model, plain)]
        with pytest.raises(IndexError):
            model(torch.tensor([[5], [300]]), **{CACHE: caches[0]})
        new = torch.tensor([[5], [6]])
        logits = [m(new, **{CACHE: cache}).logits for m, cache in zip((model, plain), caches, strict=True)]
    torch.testing.assert_close(*logits)


def test_a_step_that_fails_half_way_is_remembered(ids):
    model, _ = pair()
    with torch.no_grad():
        cache = model(ids)[CACHE]
        model(ids[:, :1], **{CACHE: cache})
        rest = model.forward._programs[2]._recorded[2][2]
        good, rest[0] = rest[0], functools.partial(operator.truediv, 1, 0)
        cache.calls = None  # or they are what they were
        with pytest.raises(ZeroDivisionError):
            model(ids[:, :1], **{CACHE: cache})
        rest[0] = good
        for then in (
            lambda: model(ids[:, :1], **{CACHE: cache}),
            lambda: cache.crop(38),
            lambda: cache.reorder_cache(torch.tensor([1, 0])),
            lambda: cache.batch_select_indices(torch.tensor([1, 0])),
        ):
            with pytest.raises(rt.NotSupportedError, match="the tokens of an earlier forward were not stored"):
                then()
        cache.reset()
        model(ids, **{CACHE: cache})


def test_a_list_of_calls_that_fails_half_way_is_remembered(ids):
    """From the second step on a step is one call."""
    model, _ = pair()
    with torch.no_grad():
        cache = model(ids)[CACHE]
        for _ in range(2):
            model(ids[:, :1], **{CACHE: cache})
        lengths = cache.layers[2].cache.seq_lens
        lengths.fill_(-1)
        with pytest.raises(rt.ArgumentError, match="lengths"):
            model(ids[:, :1], **{CACHE: cache})
        lengths.fill_(39)
        assert cache.layers[0].cache.lengths[0] == 40
        with pytest.raises(rt.NotSupportedError, match="the tokens of an earlier forward were not stored"):
            model(ids[:, :1], **{CACHE: cache})


def test_the_list_of_calls_is_of_one_cache_and_one_program(ids):
    """Steps of two caches in turns, a cache that grows, and weights that move."""
    model, plain = pair()
    with torch.no_grad():
        ours, theirs = ([of(ids)[CACHE] for _ in range(2)] for of in (model, plain))
        for i in range(60):
            if i == 40:
                for module in (model, plain):
                    module.model.layers[0].mlp.down_proj.weight.data = (
                        module.model.layers[0].mlp.down_proj.weight.data.clone().mul_(1.5)
                    )
            which, token = i % 2, ids[:, i % 37 : i % 37 + 1]
            got, expected = (of(token, **{CACHE: c[which]}).logits for of, c in ((model, ours), (plain, theirs)))
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        assert [cache.steps for cache in ours] == [30, 30]


def test_logits_are_the_callers(ids):
    """The next step writes into memory of its own, not into what the last one returned."""
    model, _ = pair()
    with torch.no_grad():
        cache = model(ids)[CACHE]
        outputs = [model(ids[:, i : i + 1], **{CACHE: cache}).logits for i in range(3)]
        kept = [logits.clone() for logits in outputs]
        model(ids[:, 5:6], **{CACHE: cache})
    for logits, as_returned in zip(outputs, kept, strict=True):
        assert torch.equal(logits, as_returned)


@pytest.mark.parametrize("place", ["rotation_table", "calls", "new_logits", "embed"])
def test_an_interrupt_before_the_kernels_leaves_the_cache_as_it_was(place, ids, monkeypatch):
    model, plain = pair()
    with torch.no_grad():
        caches = [of(ids)[CACHE] for of in (model, plain)]
        with monkeypatch.context() as patched:
            patched.setattr(StepProgram, place, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                model(ids[:, :1], **{CACHE: caches[0]})
        assert caches[0].get_seq_length() == 37
        for i in range(2):
            tokens = ids[:, i : i + 1]
            ours, theirs = (of(tokens, **{CACHE: c}) for of, c in zip((model, plain), caches, strict=True))
            torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-4, atol=1e-4)
        assert caches[0].steps == 2


def test_kernels_are_recorded(ids):
    model, _ = pair(kv_cache="int8")
    with torch.no_grad():
        cache = model(ids)[CACHE]
        with rt.record_kernels() as kernels:
            model(ids[:, :1], **{CACHE: cache})
    assert len(kernels) == 3 * 9 + 2 and any("int8" in name for name in kernels)


def gpt2(**_):
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50))


def odd_layer(**_):
    model = make()

    class Mine(type(model.model.layers[0].mlp)):
        pass

    model.model.layers[0].mlp.__class__ = Mine
    return model


def odd_forward(**_):
    model = make()
    model.model.layers[0].forward = model.model.layers[0].forward
    return model


@pytest.mark.parametrize(
    "model, said",
    [
        (gpt2, "no step program for GPT2LMHeadModel; there is one for LlamaForCausalLM, "),
        (lambda: transformers.LlamaModel(make().config), "no step program for LlamaModel; there is one for Llama"),
        (odd_layer, "because mlp is a Mine, expected a LlamaMLP"),
        (odd_forward, "because 0 has a forward of its own"),
        (lambda: make(hidden_act="relu"), "no step program with the activation 'relu'"),
        (lambda: make(dtype=torch.float64), "is of float32, float16 or bfloat16, got torch.float64"),
        (lambda: make().to("meta"), "a step program runs on the CPU or on a GPU, got meta"),
    ],
)  # fmt: skip
def test_models_without_a_program_are_refused_before_they_change(model, said):
    model = model()
    before = [(name, type(module)) for name, module in model.named_modules()]
    with pytest.raises(rt.NotSupportedError, match=said):
        rt.accelerate(model, weights="w4a16", progress=False)
    assert [(name, type(module)) for name, module in model.named_modules()] == before
    assert "forward" not in vars(model) and "generate" not in vars(model)


@pytest.mark.parametrize(
    "options, error, said",
    [
        ({"weights": "w4a17"}, rt.ArgumentError, "accelerate: weights must be"),
        ({"kv_cache": "int5"}, rt.ArgumentError, "accelerate: kv_cache: "),
        ({"batch_invariant": 1}, rt.ArgumentTypeError, "accelerate: batch_invariant must be"),
        ({"head": 4}, rt.ArgumentTypeError, "accelerate: head must be None, a name, a W4A16 or a W8A16, got int"),
        ({"head": rt.W4A16(group_size=384)}, rt.ArgumentError, "accelerate: head"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_changes(options, error, said):
    model = make()
    with pytest.raises(error, match=said):
        rt.accelerate(model, **options)
    assert type(model.lm_head) is torch.nn.Linear and "forward" not in vars(model)


def test_layers_in_other_bits_are_named():
    model = rt.accelerate(make(dtype=torch.bfloat16), weights="w4a16", head="w8a16", progress=False)
    layers = [type(m) for m in model.modules()]
    rt.accelerate(model, weights="w4a16", progress=False)  # packed so already
    with pytest.raises(rt.ArgumentError, match=r"accelerate: weights: 'model\.layers\.0\..*' is a W4Linear already"):
        rt.accelerate(model, weights="w8a16", progress=False)
    assert [type(m) for m in model.modules()] == layers


def test_not_a_model():
    with pytest.raises(rt.ArgumentTypeError, match="accelerate: model must be a model of transformers, got Linear"):
        rt.accelerate(torch.nn.Linear(2, 2))
