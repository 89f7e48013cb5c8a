# SPDX-License-Identifier: Apache-2.0
"""pipeline() and evaluation harnesses, which call a model for one text after the other and know nothing of caches."""

import random

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import rooftile as rt  # noqa: E402
import tokenizers  # noqa: E402
from rooftile.integrations._models import CACHE  # noqa: E402
from test_transformers import SIZES, prompts, tiny  # noqa: E402

LETTERS = [chr(0x100 + i) for i in range(SIZES["vocab_size"] - 3)]
LENGTHS = (4, 130, 47, 66, 32, 9)
WAYS = {
    "attention": lambda model: model.set_attn_implementation("rooftile"),
    "fp32": lambda model: rt.set_kv_cache(model, "fp32"),
    "int4-kivi": lambda model: rt.set_kv_cache(model, "int4-kivi"),
}


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def tokenizer():
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<bos>", "<eos>", *LETTERS])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    made.decoder = tokenizers.decoders.Fuse()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special)


def language_model(name="llama"):
    model, theirs = tiny(name)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = 2, 0
    return model, theirs


def texts(lengths=LENGTHS):
    draw = random.Random(0)
    return ["".join(draw.choice(LETTERS) for _ in range(n)) for n in lengths]


def written(model, tokenizer, batch_size):
    run = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    options = {"max_new_tokens": 20, "do_sample": False, "return_full_text": False}
    return [result[0]["generated_text"] for result in run(texts(), batch_size=batch_size, **options)]


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("way", WAYS)
def test_a_pipeline_over_several_prompts(name, way, tokenizer):
    """Twice each: by batches, whose padding is on the left, and one prompt after the other."""
    model, theirs = language_model(name)
    model.set_attn_implementation(theirs)
    expected = written(model, tokenizer, 1)
    WAYS[way](model)
    alone = written(model, tokenizer, 1)
    assert written(model, tokenizer, 2) == written(model, tokenizer, 4) == alone
    assert len(set(alone)) == len(LENGTHS)
    assert (alone == expected) == (way != "int4-kivi")


class Harness:
    """The calls of lm-eval 0.4.13's HFLM, nothing more: _model_call, _model_generate and what pads for them."""

    def __init__(self, model, tokenizer, batch_size, mixed_precision_dtype=None):
        self.model, self.tokenizer, self.batch_size = model, tokenizer, batch_size
        self.mixed = {
            "device_type": "cpu",
            "dtype": mixed_precision_dtype,
            "enabled": mixed_precision_dtype is not None,
        }

    def loglikelihood(self, requests):
        """requests: (ids, how many of them are the continuation). Padded on the right, and no mask is given."""
        sums, order = {}, sorted(range(len(requests)), key=lambda i: -len(requests[i][0]))
        for begin in range(0, len(order), self.batch_size):
            batch = order[begin : begin + self.batch_size]
            rows = [torch.tensor(requests[i][0][:-1]) for i in batch]
            with torch.no_grad(), torch.autocast(**self.mixed):
                logits = self.model(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)).logits
            scores = torch.log_softmax(logits, -1, dtype=torch.float32)
            for i, row, score in zip(batch, rows, scores, strict=True):
                ids, count = requests[i]
                sums[i] = score[len(row) - count : len(row)].gather(1, torch.tensor(ids[-count:])[:, None]).sum().item()
        return torch.tensor([sums[i] for i in range(len(requests))])

    def generate_until(self, prompts):
        out, order = {}, sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        for begin in range(0, len(order), self.batch_size):
            batch = order[begin : begin + self.batch_size]
            given = self.tokenizer(
                [prompts[i] for i in batch], padding="longest", padding_side="left", return_tensors="pt"
            )
            length = given["input_ids"].shape[1]
            with torch.autocast(**self.mixed):
                ids = self.model.generate(
                    input_ids=given["input_ids"],
                    attention_mask=given["attention_mask"],
                    max_length=length + 20,
                    stopping_criteria=transformers.StoppingCriteriaList(),
                    pad_token_id=self.tokenizer.pad_token_id,
                    use_cache=True,
                    do_sample=False,
                )
            out.update(zip(batch, (self.tokenizer.decode(row[length:]) for row in ids), strict=True))
        return [out[i] for i in range(len(prompts))]


def scored(tokenizer):
    """Contexts with continuations of several lengths; and whole texts, as loglikelihood_rolling has them."""
    ids = tokenizer(texts())["input_ids"]
    return [(row, min(len(row) - 1, 1 + i)) for i, row in enumerate(ids)] + [(row, len(row) - 1) for row in ids]


@pytest.mark.parametrize("way", WAYS)
def test_a_harness(way, tokenizer):
    model, theirs = language_model()
    model.set_attn_implementation(theirs)
    base = Harness(model, tokenizer, 1)
    expected, generated = base.loglikelihood(scored(tokenizer)), base.generate_until(texts())
    WAYS[way](model)
    alone = Harness(model, tokenizer, 1).generate_until(texts())
    assert (alone == generated) == (way != "int4-kivi") and len(set(alone)) == len(LENGTHS)
    for batch_size in (1, 4):
        harness = Harness(model, tokenizer, batch_size)
        for _ in range(2):
            # one forward a text, which attends its keys and values as they are: no format changes it
            torch.testing.assert_close(harness.loglikelihood(scored(tokenizer)), expected, rtol=1e-4, atol=1e-4)
        assert harness.generate_until(texts()) == alone


@pytest.mark.parametrize("way", ["attention", "no cache", "bf16", "int4-kivi"])
def test_mixed_precision(way, tokenizer):
    """mixed_precision_dtype of HFLM: under autocast the rotary embedding leaves queries and keys in float32, and the
    values are in 16 bits."""
    model, theirs = language_model()
    model.set_attn_implementation(theirs)
    requests = scored(tokenizer)
    exact = Harness(model, tokenizer, 1).loglikelihood(requests)
    naive = Harness(model, tokenizer, 1, torch.bfloat16).loglikelihood(requests)
    model.config.use_cache = way != "no cache"
    WAYS["attention"](model) if way in ("attention", "no cache") else rt.set_kv_cache(model, way)
    harness = Harness(model, tokenizer, 4, torch.bfloat16)
    assert (harness.loglikelihood(requests) - exact).norm() <= 2 * (naive - exact).norm()
    if way == "int4-kivi":
        assert len(set(harness.generate_until(texts()))) == len(LENGTHS)
        with torch.autocast("cpu", torch.bfloat16):
            assert getattr(model(prompts(1)[0]), CACHE).layers[0].cache.dtype == "bfloat16"


@pytest.mark.parametrize("format", ["int8", "int4-kivi"])
def test_a_harness_may_score_what_a_cache_holds(format, tokenizer):
    """stepwise: what test_stepwise_equals_single_steps shows of a layer, through a whole model."""
    model, theirs = language_model()
    model.set_attn_implementation(theirs)
    requests = scored(tokenizer)
    exact = Harness(model, tokenizer, 1).loglikelihood(requests)
    rt.set_kv_cache(model, format)
    alone = Harness(model, tokenizer, 1).loglikelihood(requests)  # attended as they are
    rt.set_kv_cache(model, format, stepwise=True)
    got = Harness(model, tokenizer, 1).loglikelihood(requests)
    torch.testing.assert_close(Harness(model, tokenizer, 4).loglikelihood(requests), got, rtol=1e-5, atol=1e-4)
    assert (got - exact).abs().max() > 100 * (alone - exact).abs().max()


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt-oss"])
@pytest.mark.parametrize("use_cache", [True, False])
def test_the_attention_alone_takes_any_padding(name, use_cache):
    """Tokenizers pad on the right unless told otherwise, and texts are scored so."""
    model, theirs = tiny(name)
    ids, mask = prompts(3)
    mask[0, 30:] = 0
    mask[1, 20:22] = 0
    model.set_attn_implementation(theirs)
    expected = model(ids, attention_mask=mask, use_cache=use_cache).logits
    model.set_attn_implementation("rooftile")
    got = model(ids, attention_mask=mask, use_cache=use_cache).logits
    torch.testing.assert_close(got[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen2-window", "mistral", "gemma2"])
def test_the_attention_alone_takes_packed_texts(name):
    """Two texts in one row, told apart by their positions: each has the logits that it has alone."""
    model, theirs = tiny(name)
    ids, _ = prompts(2, 70)
    model.set_attn_implementation(theirs)
    expected = torch.cat([model(text, use_cache=False).logits for text in (ids[:, :30], ids[:, 30:])], 1)
    model.set_attn_implementation("rooftile")
    positions = torch.cat([torch.arange(30), torch.arange(40)])[None]
    logits = model(ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
