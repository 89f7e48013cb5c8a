# SPDX-License-Identifier: Apache-2.0
"""generate() of an accelerated model: its loop over tokens gives what transformers' loop over the same forward does.

transformers' loop is reached by return_dict_in_generate=True.
"""

import contextlib
import copy
import warnings

import cases
import pytest
import rooftile as rt
import step_models
import tiny_gguf
import torch
import transformers
from rooftile.integrations import step_loop
from rooftile.integrations._models import CACHE
from rooftile.integrations.step_program import FAMILIES, StepProgram
from rooftile.integrations.transformers import RooftileCache
from rooftile.loaders import load_gguf, load_tokenizer, read_gguf

SIZES = {
    "hidden_size": 256, "intermediate_size": 320, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 1024, "bos_token_id": 1,
    "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
DTYPE = {"cpu": torch.float32, "cuda": torch.float16}
devices = pytest.mark.parametrize("device", cases.devices())


def make(device, family="Llama", kv_cache="int8", weights=None, dtype=None, **options):
    torch.manual_seed(0)
    config = step_models.config_of(family, **SIZES | options)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(dtype or DTYPE[device]).eval()
    for parameter in model.parameters():  # larger than their initial values, so that layers matter
        parameter.data.normal_(0, 0.08 if parameter.ndim == 2 else 0.3).add_(0 if parameter.ndim == 2 else 1)
    return rt.accelerate(model.to(device), weights=weights, kv_cache=kv_cache, progress=False)


def prompt(device, batch=2, length=37):
    seed = torch.Generator(device).manual_seed(1)  # its own: other threads make prompts, too
    ids = torch.randint(3, 300, (batch, length), device=device, generator=seed)
    mask = torch.ones_like(ids)
    mask[-1, : length // 4] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.fixture
def taken(monkeypatch):
    """How many tokens a row came from the loop under test, one number a generate()."""
    counts, steps = [], step_loop._steps

    def counted(ids, *rest):
        out = steps(ids, *rest)
        counts.append(out.shape[1] - ids.shape[1])
        return out

    monkeypatch.setattr(step_loop, "_steps", counted)
    return counts


class Streamer:
    def __init__(self):
        self.seen, self.ended = [], 0

    def put(self, tokens):
        assert tokens.device.type == "cpu" and not self.ended
        self.seen.append(tokens.clone())

    def end(self):
        self.ended += 1


def both(model, inputs, **options):
    """(ids of our loop, of transformers'), each with its random numbers from one seed."""
    ids = []
    for own in (True, False):
        torch.manual_seed(7)
        out = model.generate(**inputs, **options, return_dict_in_generate=not own)
        ids.append(out if own else out.sequences)
    return ids


@devices
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_sample": True, "top_k": 20, "temperature": 0.8, "typical_p": 0.9},
        {"do_sample": True, "top_k": 20, "temperature": 1e-8},
        {"do_sample": True, "top_k": 20, "temperature": float("inf")},
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
        {"min_new_tokens": 30, "eos_token_id": list(range(3, 150))},
        {"max_time": 60.0},
    ],
    ids=lambda options: "-".join(options) or "greedy",
)
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_the_tokens_are_those_of_transformers_loop(device, options, batch, taken):
    model, inputs = make(device), prompt(device, batch)
    ours, theirs = both(model, inputs, max_new_tokens=40, **options)
    assert torch.equal(ours, theirs)
    assert len(taken) == 1 and taken[0] == ours.shape[1] - 37 - 2


@pytest.fixture
def drawn(monkeypatch):
    """What every step had to draw from: (ids, logits, processors, tokens)."""
    steps, call = [], step_loop._NextTokens.__call__

    def recorded(self, ids, logits):
        tokens = call(self, ids, logits)
        steps.append((ids.clone(), logits.float().clone(), self.processors, tokens))
        return tokens

    monkeypatch.setattr(step_loop._NextTokens, "__call__", recorded)
    return steps


SAMPLED = (
    {"top_k": 20, "temperature": 0.8, "top_p": 0.9},
    {"top_k": 0, "temperature": 1.5, "min_p": 0.2, "repetition_penalty": 1.4},
    {"num_return_sequences": 3},
)


@devices
@pytest.mark.parametrize("options", SAMPLED, ids="-".join)
@pytest.mark.parametrize("batch", [1, 5])
def test_sampled_tokens_are_what_the_processors_leave(device, options, batch, taken, drawn):
    """The same seed of torch's gives the same text, which is another one than transformers'."""
    model, inputs = make(device), prompt(device, batch)
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts.append(model.generate(**inputs, max_new_tokens=40, do_sample=True, **options))
    assert torch.equal(texts[0], texts[1]) and not torch.equal(texts[0], texts[2])
    assert len(taken) == 3 and len(drawn) == 3 * 38
    rows = batch * options.get("num_return_sequences", 1)
    for ids, logits, processors, tokens in drawn:
        left = processors(ids, logits)
        equal = logits == logits.gather(1, tokens[:, None])  # of equal tokens top_p may keep other ones
        assert tokens.shape == (rows,) and (equal & left.isfinite()).any(1).all()
    assert len(torch.cat([tokens for *_, tokens in drawn]).unique()) > 30


def test_sampled_rows_are_drawn_apart(drawn):
    """One prompt several times: every row and every step has random bits of its own."""
    model, inputs = make("cpu"), prompt("cpu", 1)
    torch.manual_seed(3)
    ids = model.generate(
        **inputs, max_new_tokens=30, do_sample=True, top_k=0, temperature=50.0, num_return_sequences=8
    )[:, 37 + 2 :]
    assert len(torch.unique(ids, dim=0)) == 8 and all(len(row.unique()) > 20 for row in ids)


def test_logits_without_probabilities_are_refused(monkeypatch):
    model, inputs = make("cpu"), prompt("cpu", 2)
    monkeypatch.setattr(step_loop, "sample", lambda logits, **options: rt.sample(logits * float("nan"), **options))
    with pytest.raises(rt.ArgumentError, match="logits leave nothing to draw from"):
        model.generate(**inputs, max_new_tokens=10, do_sample=True)


def test_processors_with_settings_of_their_own_stay():
    process = transformers.generation.logits_process
    assert step_loop._arguments_of([]) == {}
    assert step_loop._arguments_of([process.TemperatureLogitsWarper(0.5), process.TopPLogitsWarper(0.9)]) == {
        "temperature": 0.5,
        "top_p": 0.9,
    }
    assert step_loop._arguments_of([process.TopKLogitsWarper(3, min_tokens_to_keep=7)]) == {"top_k": 7}
    for processors in (
        [process.TopPLogitsWarper(0.9), process.TemperatureLogitsWarper(0.5)],  # another order
        [process.TopKLogitsWarper(9), process.TopKLogitsWarper(5)],
        [process.TopKLogitsWarper(9, filter_value=-1e4)],
        [process.TopPLogitsWarper(0.9, min_tokens_to_keep=2)],
        [process.MinPLogitsWarper(0.1, min_tokens_to_keep=2)],
        [process.RepetitionPenaltyLogitsProcessor(1.2, prompt_ignore_length=4)],
        [process.TypicalLogitsWarper(0.9)],
        [process.TemperatureLogitsWarper(float("inf"))],
        [process.TemperatureLogitsWarper(101.0)],
        [process.RepetitionPenaltyLogitsProcessor(float("inf"))],
        [lambda ids, scores: scores],
    ):
        assert step_loop._arguments_of(processors) is None


@devices
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kv_cache", ["int8", "int4-kivi"])
@pytest.mark.parametrize("weights", [None, "w4a16"])
def test_every_family(device, family, kv_cache, weights, taken):
    options = {"sliding_window": None} if family == "Mistral" else {}
    if family == "Gemma2" and device == "cuda":  # whose prompts run on torch's attention, which has no soft cap
        options = {"attn_logit_softcapping": None}
    ours, theirs = both(make(device, family, kv_cache, weights, **options), prompt(device), max_new_tokens=50)
    assert torch.equal(ours, theirs) and taken == [48]


@devices
def test_the_model_is_looked_through_once(device, taken, monkeypatch):
    """Not before every step."""
    calls, still_valid = [], StepProgram.still_valid
    monkeypatch.setattr(StepProgram, "still_valid", lambda self: calls.append(self) or still_valid(self))
    make(device).generate(**prompt(device), max_new_tokens=30)
    assert taken == [28] and len(calls) <= 2


@devices
def test_rows_end_at_their_own_tokens(device, taken):
    """One row after the other meets its end; the last one ends the text. Whoever ended is filled up with padding."""
    model, inputs = make(device), prompt(device, 4)
    whole = model.generate(**inputs, max_new_tokens=40)[:, 37:]
    ends = [int(whole[row, n]) for row, n in enumerate((5, 30, 11, 1))]
    for eos in (ends, ends[:1], ends[1:2], [int(t) for t in whole[:, 0]], [int(t) for t in whole[:, 1]]):
        for streamer in (None, Streamer()):
            options = {"max_new_tokens": 40, "eos_token_id": eos}
            if streamer is not None:
                options["streamer"] = streamer
            ours = model.generate(**inputs, **options)
            theirs = model.generate(**inputs, max_new_tokens=40, eos_token_id=eos, return_dict_in_generate=True)
            assert torch.equal(ours, theirs.sequences)
            if streamer is not None:
                assert streamer.ended == 1
                assert torch.equal(streamer.seen[0], inputs["input_ids"].cpu())
                assert torch.equal(torch.stack(streamer.seen[1:], 1), ours[:, 37:].cpu())


@devices
@pytest.mark.parametrize("eos", [False, True])
def test_a_cache_of_the_callers_holds_all_but_the_last_token(device, eos, taken):
    """What was computed one step too far is taken back, and a next turn goes on behind it."""
    model, inputs = make(device, kv_cache="int4-kivi"), prompt(device, 1)
    inputs = {"input_ids": inputs["input_ids"]}
    end = int(model.generate(**inputs, max_new_tokens=20)[0, 37 + 11]) if eos else None
    turns = []
    for own in (True, False):
        cache = RooftileCache(model.config, format="int4-kivi", turns=True)
        options = {CACHE: cache, "max_new_tokens": 20, "eos_token_id": end, "return_dict_in_generate": not own}
        out = model.generate(**inputs, **options)
        first = out if own else out.sequences
        assert cache.get_seq_length() == first.shape[1] - 1
        assert [layer.cache.lengths for layer in cache.layers] == [[first.shape[1] - 1]] * 3
        again = torch.cat([first, inputs["input_ids"][:, :9]], 1)
        out = model.generate(again, **{**options, "eos_token_id": None})
        turns.append((first, out if own else out.sequences))
    assert torch.equal(turns[0][0], turns[1][0]) and torch.equal(turns[0][1], turns[1][1])
    assert len(taken) == (3 if eos else 2)


@devices
@pytest.mark.parametrize("left_out", [0, 1, 9])
def test_a_turn_without_a_new_token_is_refused(device, left_out):
    """transformers appends the whole text to what a cache holds then, or fails in torch."""
    model, inputs = make(device), {"input_ids": prompt(device, 1)["input_ids"]}
    cache = RooftileCache(model.config, format="int8", turns=True)
    first = model.generate(**inputs, max_new_tokens=5, **{CACHE: cache})
    ids = first[:, : cache.get_seq_length() - left_out]
    said = f"generate: input_ids has {ids.shape[1]} tokens a row, {CACHE} holds"
    for args, kwargs in (((ids,), {}), ((), {"input_ids": ids}), ((), {"inputs": ids})):
        with pytest.raises(rt.ArgumentError, match=said):
            model.generate(*args, max_new_tokens=5, **{CACHE: cache}, **kwargs)
    assert cache.get_seq_length() == first.shape[1] - 1
    assert model.generate(first, max_new_tokens=5, **{CACHE: cache}).shape[1] == first.shape[1] + 5
    cache.reset()
    assert torch.equal(model.generate(**inputs, max_new_tokens=5, **{CACHE: cache}), first)


@devices
def test_stop_strings(device, taken, tmp_path):
    """In our loop; in transformers', which returns a dict, over the same steps."""
    path = tiny_gguf.write(tmp_path / "tiny.gguf")
    tokenizer = load_tokenizer(read_gguf(path))
    model = rt.accelerate(load_gguf(path, dtype=DTYPE[device], device=device), kv_cache="int8", progress=False)
    inputs = {"input_ids": torch.randint(3, 60, (1, 9), generator=torch.Generator().manual_seed(2)).to(device)}
    plain = model.generate(**inputs, max_new_tokens=24, eos_token_id=None)
    word = next(w for w in map(tokenizer.decode, plain[0, 13:].tolist()) if w.isascii() and w.isprintable() and w)
    options = {"max_new_tokens": 24, "eos_token_id": None, "tokenizer": tokenizer, "stop_strings": [word, "none of it"]}
    assert len(taken) == 1
    found = model.generate(**inputs, **options)
    assert torch.equal(found, plain[:, : found.shape[1]]) and len(taken) == 2
    assert word in tokenizer.decode(found[0, 9:]) and found.shape[1] < plain.shape[1]
    cache = RooftileCache(model.config, format="int8")
    out = model.generate(**inputs, **options, return_dict_in_generate=True, **{CACHE: cache})
    assert torch.equal(out.sequences, found) and cache.steps == found.shape[1] - 10 and len(taken) == 2
    model.generation_config.stop_strings = [word]  # transformers makes the criterion, and keeps the loop
    del options["stop_strings"]
    assert torch.equal(model.generate(**inputs, **options), found) and len(taken) == 2


@devices
def test_beams_and_dicts_take_transformers_loop(device, taken):
    model, inputs = make(device), prompt(device)
    for options in (
        {"num_beams": 2},
        {"output_scores": True, "return_dict_in_generate": True},
        {"use_cache": False},
        {"prefill_chunk_size": 8},
    ):
        asked = [name for name in options if name not in ("output_scores", "use_cache")]
        said = f"generate: {''.join(asked)} asks for transformers' loop"
        with pytest.warns(UserWarning, match=said) if asked else contextlib.nullcontext():
            model.generate(**inputs, max_new_tokens=6, **options)
        with warnings.catch_warnings():  # once
            warnings.simplefilter("error", UserWarning)
            model.generate(**inputs, max_new_tokens=6, **options)
    assert taken == []


@devices
def test_a_rotation_of_two_lengths_takes_transformers_loop(device, taken):
    """Phi-3 computes a text anew where it becomes longer than the short rotation is for."""
    cases.begins_anew()
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 32, "long_factor": [2.0] * 32}
    model, inputs = make(device, "Phi3", rope_parameters=rope, original_max_position_embeddings=64), prompt(device, 1)
    ours, theirs = both(model, inputs, max_new_tokens=50)
    assert torch.equal(ours, theirs) and taken == []


@devices
def test_embeddings_take_transformers_loop(device, taken):
    model, inputs = make(device), prompt(device, 1)
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    ours = model.generate(inputs_embeds=embeds, max_new_tokens=6)
    assert torch.equal(ours, model.generate(inputs["input_ids"], max_new_tokens=6)[:, 37:]) and len(taken) == 1


@pytest.mark.parametrize("name", ["token_healing", "use_mtp", "prompt_lookup_num_tokens", "stop_strings"])
def test_other_loops_are_known_by_what_is_set(name):
    assert step_loop.other_loop({}.get) is None
    for value, own in ((None, True), (False, True), (True, False), (0, False), (torch.zeros(2, 3), False)):
        assert step_loop.other_loop({name: value}.get) == (None if own else name)


@devices
@pytest.mark.parametrize("kind", ["hook", "pre-hook", "inputs"])
def test_what_hangs_on_the_model_itself_is_not_bypassed(device, kind, taken):
    """A hook of the model, or how this one prepares inputs, sees every token, as in transformers' loop."""
    model, inputs, seen = make(device), prompt(device), []
    prepare = model.prepare_inputs_for_generation

    def after(module, args, out):
        seen.append(1)
        out.logits[..., 7] += 100
        return out

    def prepared(*args, **kwargs):
        seen.append(1)
        return prepare(*args, **kwargs)

    if kind == "inputs":
        model.prepare_inputs_for_generation = prepared
    elif kind == "hook":
        handle = model.register_forward_hook(after)
    else:
        handle = model.register_forward_pre_hook(lambda *_: seen.append(1))
    ids = model.generate(**inputs, max_new_tokens=8)
    assert len(seen) == 8 and taken == [] and (kind != "hook" or bool((ids[:, 37:] == 7).all()))
    if kind == "inputs":
        del model.prepare_inputs_for_generation
    else:
        handle.remove()
    model.generate(**inputs, max_new_tokens=8)
    assert len(seen) == 8 and taken == [6]


@devices
def test_windows_that_will_slide_take_transformers_loop(device, taken):
    model, inputs = make(device, "Mistral", sliding_window=48), prompt(device)
    for tokens, own in ((20, True), (300, False)):
        taken.clear()
        ours, theirs = both(model, inputs, max_new_tokens=tokens)
        assert torch.equal(ours, theirs) and bool(taken) is own


@devices
@pytest.mark.parametrize("kept", [True, False])
def test_memory_that_moves_in_between(device, kept):
    """A layer's weights that somebody moves while tokens are streamed are read where they are; a layer that has become
    one without a program ends the text with an error."""
    model, inputs = make(device, weights="w4a16"), prompt(device)
    expected = model.generate(**inputs, max_new_tokens=30)

    class Meddler(Streamer):
        def put(self, tokens):
            super().put(tokens)
            layer = model.model.layers[1]
            if len(self.seen) == 9:
                for array in layer.mlp.down_proj.buffers():
                    array.data = array.data.clone()
                if not kept:
                    layer.register_forward_hook(lambda *_: None)

    if kept:
        assert torch.equal(model.generate(**inputs, max_new_tokens=30, streamer=Meddler()), expected)
        return
    with pytest.warns(UserWarning, match="decode steps run in transformers"):
        with pytest.raises(rt.NotSupportedError, match="lost the program of its decode steps"):
            model.generate(**inputs, max_new_tokens=30, streamer=Meddler())


def test_weights_of_a_joined_product_that_change_in_between():
    """q is a part of one product with k and v: other memory with other values is read from the next step on."""
    found = []
    for own in (True, False):
        model, inputs = make("cpu"), prompt("cpu")

        class Meddler(Streamer):
            def put(self, tokens, model=model):
                super().put(tokens)
                if len(self.seen) == 9:
                    weight = model.model.layers[1].self_attn.q_proj.weight
                    weight.data = -3 * weight.data

        out = model.generate(**inputs, max_new_tokens=30, streamer=Meddler(), return_dict_in_generate=not own)
        found.append(out if own else out.sequences)
    assert torch.equal(*found)
    assert not torch.equal(found[0], make("cpu").generate(**inputs, max_new_tokens=30))


@devices
def test_an_error_of_the_callers_leaves_the_model_usable(device):
    model, inputs = make(device), prompt(device)
    expected = model.generate(**inputs, max_new_tokens=30)

    class Full(Streamer):
        def put(self, tokens):
            super().put(tokens)
            if len(self.seen) == 9:
                raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        model.generate(**inputs, max_new_tokens=30, streamer=Full())
    assert torch.equal(model.generate(**inputs, max_new_tokens=30), expected)


@devices
def test_criteria_of_the_callers(device, taken):
    """A criterion sees every token, and ends the text."""
    model, inputs = make(device), prompt(device)
    seen = []

    class After(transformers.StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            assert input_ids.is_contiguous()
            seen.append(input_ids.clone())
            return torch.full((len(input_ids),), input_ids.shape[1] >= 37 + 12, device=input_ids.device)

    for own in (True, False):
        criteria = transformers.StoppingCriteriaList([After()])
        out = model.generate(**inputs, max_new_tokens=40, stopping_criteria=criteria, return_dict_in_generate=not own)
        ids = out if own else out.sequences
        assert ids.shape[1] == 37 + 12
    assert taken == [10] and torch.equal(ids, seen[11]) and seen[0].shape[1] == 38


@devices
def test_weights_that_lie_apart_again(device):
    """A copy on another device, or a layer with new weights, has the same program from several products."""
    model, inputs = make(device, weights="w4a16"), prompt(device)
    expected = model.generate(**inputs, max_new_tokens=30)
    other = copy.deepcopy(model)
    attention = other.model.layers[1].self_attn
    for linear in (attention.q_proj, attention.k_proj):
        for array in linear.buffers():
            array.data = array.data.clone()
    found = other.generate(**inputs, max_new_tokens=30)
    assert list(other.forward._programs) == [2]
    if device == "cpu":  # on a GPU the splits of K depend on N
        assert torch.equal(found, expected)


def test_many_tokens_may_be_allowed():
    """Memory is for the tokens that come, not for those that may."""
    model, inputs = make("cpu"), prompt("cpu")
    end = int(model.generate(**inputs, max_new_tokens=9)[0, 37 + 8])

    class After(transformers.StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return (input_ids[:, -1] == end) | (input_ids.shape[1] > 60)

    ids = model.generate(**inputs, max_new_tokens=10**13, stopping_criteria=[After()])
    assert ids.shape[1] <= 61


@devices
def test_a_new_cache_has_room_for_what_will_be_stored(device):
    """All but the last token, which takes no step: 64 are a page, 65 would be two."""
    model, inputs = make(device), prompt(device, 1)
    cache = RooftileCache(model.config, format="int8")
    model.generate(**inputs, **{CACHE: cache}, max_new_tokens=65 - 37)
    assert [(layer.cache.capacity, layer.columns) for layer in cache.layers] == [(64, 64)] * 3


def test_a_default_device_is_not_that_of_a_step():
    model, inputs = make("cpu"), prompt("cpu", 1)
    expected = model.generate(**inputs, max_new_tokens=9)
    cache = RooftileCache(model.config, format="int8")
    with torch.no_grad():
        model(expected[:, :-1], **{CACHE: cache})
        with torch.device("meta"):
            assert int(model(expected[:, -2:-1], **{CACHE: cache}).logits.argmax()) >= 0
    assert cache.steps == 1
