# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M out of the package index: what it answers, its text and tokens. Run with `pytest -m model`."""

import pytest

pytest.importorskip("gguf")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import numpy as np  # noqa: E402
import oracle  # noqa: E402
import rooftile as rt  # noqa: E402
from rooftile.errors import FetchError  # noqa: E402
from rooftile.integrations._models import CACHE  # noqa: E402
from rooftile.integrations.transformers import RooftileCache, rooftile_attention, rooftile_mask  # noqa: E402
from rooftile.loaders import demo_model, demo_text, load_gguf, load_tokenizer  # noqa: E402

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def path():
    try:
        return demo_model()
    except FetchError as e:
        pytest.skip(str(e))


@pytest.fixture(scope="module")
def tokenizer(path):
    return load_tokenizer(path)


@pytest.mark.parametrize("weights", ["dequantize", "w4a16"])
def test_it_knows_paris(path, tokenizer, weights):
    model = load_gguf(path, dtype="bfloat16", weights=weights)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(text, return_tensors="pt")
    out = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert tokenizer.decode(out[0, inputs["input_ids"].shape[1] :]) == "The capital of France is Paris.<|im_end|>"


def test_text_and_tokens(tokenizer):
    text = demo_text()
    assert len(text) == pytest.approx(2_770_000, rel=1e-3)
    assert text.startswith("Anarchism\n\nAnarchism is a political philosophy that advocates self-governed societies")
    left = sum(text.count(markup) for markup in ("[[", "<ref", "'''"))  # where the source itself is malformed
    assert left < 20
    ids = tokenizer(text, verbose=False)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert len(ids) == pytest.approx(618_486, rel=1e-3)  # the count of another stripper
    assert ids[:8] == [2089, 818, 918, 198, 198, 2089, 818, 918]


# ---- transformers' own attention and RooftileCache on the same weights, in float32 ----

QUESTIONS = (
    "What is the capital of France?",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "Explain step by step why the sky is blue, and why sunsets are red.",
)


@pytest.fixture(scope="module")
def model(path):
    return load_gguf(path, dtype="float32")


def chat(tokenizer, *questions):
    """Left-padded ids and mask of one-question chats."""
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": q}], tokenize=False, add_generation_prompt=True)
        for q in questions
    ]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    return inputs["input_ids"], inputs["attention_mask"]


def greedy(model, attention, ids, mask, cache, new):
    """ids with `new` greedy tokens behind them, and the logits that chose them [B, new, vocabulary]."""
    model.set_attn_implementation(attention)
    out = model.generate(
        ids, attention_mask=mask, **{CACHE: cache}, max_new_tokens=new, do_sample=False, eos_token_id=None,
        pad_token_id=0, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    return out.sequences, torch.stack(out.logits, 1)


def assert_same_text(ours, theirs, atol):
    """The same tokens, from the same logits: a wrong scale can leave the choices as they are."""
    (tokens, logits), (expected, expected_logits) = ours, theirs
    apart = (tokens != expected).nonzero()
    if len(apart):
        row, column = apart[apart[:, 1].argmin()].tolist()
        best = expected_logits[row, column - tokens.shape[1]].topk(2).values
        raise AssertionError(
            f"row {row} differs from token {column} on, where the best two logits are {best[0] - best[1]:.2e} apart"
        )
    torch.testing.assert_close(logits, expected_logits, rtol=0, atol=atol)


@pytest.mark.parametrize(
    "questions",
    [
        pytest.param(QUESTIONS[:1], id="one"),
        pytest.param(QUESTIONS[1:2], id="other", marks=pytest.mark.slow),
        pytest.param(QUESTIONS, id="padded-batch", marks=pytest.mark.slow),
    ],
)
def test_256_greedy_tokens_are_those_of_sdpa(model, tokenizer, questions):
    """sdpa sees the whole text in one forward, without a cache, and must choose each of its tokens again."""
    ids, mask = chat(tokenizer, *questions)
    assert len(questions) == 1 or not mask.all()
    tokens, logits = greedy(model, "rooftile", ids, mask, RooftileCache(model.config, format="fp32"), 256)
    model.set_attn_implementation("sdpa")
    mask = torch.cat([mask, torch.ones(len(ids), 255, dtype=mask.dtype)], 1)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    expected = model(tokens[:, :-1], attention_mask=mask, position_ids=positions, use_cache=False, logits_to_keep=256)
    assert_same_text((tokens, logits), (torch.cat([ids, expected.logits.argmax(-1)], 1), expected.logits), atol=2e-3)


def meaning(q, k, v):
    """One row of an int4-kivi RooftileCache in float64: q [T, Hq, D], the newest tokens; k, v all of them, raw."""
    before = len(k) - len(q)
    if before == 0:
        return oracle.attention_reference(q, k, v)[0]
    if len(q) > 16:
        return oracle.prefill_over_cache(q, k[before:], v[before:], k[:before], v[:before], "int4-kivi", "float32")[0]
    return oracle.decode_attention(q, k, v, "int4-kivi", "float32")[0]


def test_chat_turns_on_a_compressed_cache_attend_what_the_format_says(model, tokenizer, monkeypatch):
    """Every attention of three turns against the oracle on the same raw keys: codes alone can differ, not meanings."""
    raw = [[] for _ in range(model.config.num_hidden_layers)]  # per layer, one (k, v) [tokens, Hkv, D] a forward
    update = RooftileCache.update

    def recording(self, k, v, layer, *args, **kwargs):
        raw[layer].append([x[0].transpose(0, 1).numpy().copy() for x in (k, v)])
        return update(self, k, v, layer)

    lengths = set()

    def checked(module, query, *args, scaling, position_ids, **kwargs):
        out, _ = rooftile_attention(module, query, *args, scaling=scaling, **kwargs)
        k, v = (np.concatenate(x) for x in zip(*raw[module.layer_idx], strict=True))
        tokens = out.shape[1]
        lengths.add(tokens)
        assert scaling == 64**-0.5 and position_ids.tolist() == [list(range(len(k) - tokens, len(k)))]
        exact = torch.from_numpy(meaning(query[0].transpose(0, 1).numpy(), k, v)).float()
        torch.testing.assert_close(out[0], exact, rtol=1e-4, atol=1e-4)
        return out, None

    monkeypatch.setattr(RooftileCache, "update", recording)
    transformers.AttentionInterface.register("checked", checked)
    transformers.AttentionMaskInterface.register("checked", rooftile_mask)
    cache = RooftileCache(model.config, format="int4-kivi", turns=True)
    ids, _ = chat(tokenizer, QUESTIONS[0])
    for question in ("And of Italy? Tell me what one can see there.", "Thanks!", None):
        ids, _ = greedy(model, "checked", ids, torch.ones_like(ids), cache, 16)
        if question:
            turn = f"<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
            ids = torch.cat([ids, tokenizer(turn, return_tensors="pt")["input_ids"]], 1)
    assert cache.layers[0].cache.lengths == [ids.shape[1] - 1] and min(lengths) == 1 and 1 < len(lengths)


def test_chat_turns_on_an_fp32_cache_equal_sdpa(model, tokenizer):
    caches = {"rooftile": RooftileCache(model.config, format="fp32", turns=True), "sdpa": transformers.DynamicCache()}
    ids, _ = chat(tokenizer, QUESTIONS[0])
    for question in ("And of Italy?", None):
        ours, theirs = (greedy(model, name, ids, torch.ones_like(ids), cache, 16) for name, cache in caches.items())
        assert_same_text(ours, theirs, atol=2e-3)
        if question:
            turn = f"<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
            ids = torch.cat([ours[0], tokenizer(turn, return_tensors="pt")["input_ids"]], 1)


# ---- steps of rt.accelerate in 16 bits against the dequantised model in float32 ----


def _step_logits(model, ids, format, prompt=300, steps=32):
    """float32 [1 + steps, vocabulary] of a prompt's last token and of steps over the tokens behind it."""
    cache = RooftileCache(model.config, format=format)
    with torch.no_grad():
        out = [model(ids[:, :prompt], **{CACHE: cache}, use_cache=True, logits_to_keep=1).logits]
        for n in range(prompt, prompt + steps):
            out.append(model(ids[:, n : n + 1], **{CACHE: cache}, use_cache=True).logits)
    return torch.cat([x[:, -1] for x in out]).float(), cache.steps


# most: of the relative Frobenius error; transformers' own is 1.4e-2 and 1.2e-2
@pytest.mark.parametrize(("dtype", "format", "most"), [("bfloat16", "bf16", 1.5e-2), ("float16", "int4-kivi", 1.8e-2)])
def test_steps_are_nearer_to_the_dequantised_model_than_transformers(path, tokenizer, dtype, format, most):
    ids = torch.tensor([tokenizer(demo_text()[:4000])["input_ids"][:340]])
    exact, ours, theirs = (load_gguf(path, dtype=kind, weights=weights, progress=False) for kind, weights in
                           (("float32", "dequantize"), (dtype, "w4a16"), (dtype, "dequantize")))  # fmt: skip
    rt.accelerate(ours, kv_cache=format, progress=False)
    plain = "fp32" if format in ("fp16", "bf16") else format  # of codes: by the same rule of what is visible
    for model, kind in ((exact, plain), (theirs, format)):
        rt.set_kv_cache(model, kind)
    right, _ = _step_logits(exact, ids, plain)
    (found, steps), (other, none) = (_step_logits(model, ids, format) for model in (ours, theirs))
    assert steps == 32 and none == 0
    error, of_theirs = (float((x - right).norm() / right.norm()) for x in (found, other))
    assert error <= most and error <= 1.2 * of_theirs, (error, of_theirs)
