# SPDX-License-Identifier: Apache-2.0
"""Perplexity, paired differences, KL and agreement, against plain float64 sums over a tiny model."""

import math
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from rooftile.errors import ArgumentError  # noqa: E402
from rooftile.evaluate import Score, Variant, compare, split_chunks  # noqa: E402
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM  # noqa: E402

VOCAB = 61


def tiny_model(seed):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def models():
    return tiny_model(0), tiny_model(1)


@pytest.fixture(scope="module")
def chunks():
    return torch.randint(0, VOCAB, (5, 70), generator=torch.Generator().manual_seed(2))


def log_probabilities(model, chunks):
    with torch.no_grad():
        return model(chunks, use_cache=False).logits[:, :-1].double().log_softmax(-1)


def test_figures_are_the_definitions(models, chunks):
    base, other = models
    scores = compare([Variant("base", base), Variant("other", other)], chunks, batch=2, progress=False)
    p, q = log_probabilities(base, chunks), log_probabilities(other, chunks)
    targets = chunks[:, 1:, None]
    for score, logp in zip(scores, (p, q), strict=True):
        nll = -logp.gather(-1, targets)[..., 0]
        assert score.nll == pytest.approx(nll.mean(1).numpy(), rel=1e-5)
        assert score.perplexity == pytest.approx(math.exp(nll.mean()), rel=1e-5)
    assert scores[1].kl == pytest.approx((p.exp() * (p - q)).sum(-1).mean(1).numpy(), rel=1e-4)
    assert scores[1].top1 == pytest.approx((p.argmax(-1) == q.argmax(-1)).double().mean(1).numpy())
    assert scores[0].kl.tolist() == [0] * 5 and scores[0].top1.tolist() == [1] * 5


@pytest.mark.parametrize("step", [1, 32, 69, 70, 100])
def test_steps_through_a_cache_are_the_whole_chunk(models, chunks, step):
    made = []

    def make_cache(batch):
        made.append(batch)
        return DynamicCache(config=models[0].config)

    stepped = Variant("stepped", models[0], make_cache, step=step)
    base, other = compare([Variant("base", models[0]), stepped], chunks, batch=2, progress=False)
    assert made == [2, 2, 1]
    assert other.nll == pytest.approx(base.nll, abs=1e-5)
    assert other.kl == pytest.approx(0, abs=1e-6)
    assert other.top1.tolist() == [1] * 5


class Wrapper:
    """Called like the model that it holds, without naming the arguments."""

    def __init__(self, model):
        self.model, self.config, self.device = model, model.config, model.device

    def __call__(self, ids, **options):
        return self.model(ids, **options)


def test_what_is_called_like_a_model(models, chunks):
    stepped = Variant("stepped", Wrapper(models[0]), lambda rows: DynamicCache(config=models[0].config), step=32)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # a cache under its older name
        base, other = compare([Variant("base", models[0]), stepped], chunks, progress=False)
    assert other.nll == pytest.approx(base.nll, rel=1e-4)


def test_result_does_not_depend_on_the_batch(models, chunks):
    variants = [Variant("base", models[0]), Variant("other", models[1])]
    one, many = (compare(variants, chunks, batch=b, progress=False) for b in (1, None))
    for a, b in zip(one, many, strict=True):
        for figure in ("nll", "kl", "top1"):
            assert getattr(a, figure) == pytest.approx(getattr(b, figure), rel=1e-4, abs=1e-6)


def test_attention_is_set(models, chunks):
    compare([Variant("eager", models[0], attention="eager")], chunks[:1], progress=False)
    assert models[0].config._attn_implementation == "eager"
    compare([Variant("sdpa", models[0], attention="sdpa")], chunks[:1], progress=False)
    assert models[0].config._attn_implementation == "sdpa"


def test_paired_difference():
    zero = np.zeros(4)
    a, b = (Score("", np.array(nll), zero, zero) for nll in ([1.0, 2, 3, 4], [1.1, 2.3, 3.2, 4.2]))
    mean, error = b.difference(a)
    assert mean == pytest.approx(0.2)
    assert error == pytest.approx(np.std([0.1, 0.3, 0.2, 0.2], ddof=1) / 2)
    assert math.isnan(Score("", np.ones(1), zero, zero).difference(Score("", np.ones(1), zero, zero))[1])


def test_split_chunks_is_even_and_does_not_overlap():
    ids = np.arange(100)
    assert split_chunks(ids, 10).tolist() == ids.reshape(10, 10).tolist()
    assert split_chunks(ids, 10, 3)[:, 0].tolist() == [0, 30, 60]
    assert split_chunks(np.arange(618_486), 512, 32)[:, 0].tolist() == [512 * (i * 1207 // 32) for i in range(32)]
    for count in (0, 11, -1):
        with pytest.raises(ArgumentError, match=f"10 chunks of 10; asked for {count}"):
            split_chunks(ids, 10, count)


@pytest.mark.parametrize(
    ("chunks", "words"),
    [
        (torch.zeros(3, 1, dtype=torch.int64), "chunks"),
        (torch.zeros(0, 8, dtype=torch.int64), "chunks"),
        (torch.zeros(8, dtype=torch.int64), "chunks"),
        (torch.zeros(2, 8), "float32"),
        (torch.full((2, 8), VOCAB), "to 61"),
        (torch.full((2, 8), -1), "from -1"),
    ],
)
def test_bad_chunks(models, chunks, words):
    with pytest.raises(ArgumentError, match=words):
        compare([Variant("base", models[0])], chunks, progress=False)


def test_bad_options(models, chunks):
    with pytest.raises(ArgumentError, match="variants"):
        compare([], chunks)
    with pytest.raises(ArgumentError, match="batch"):
        compare([Variant("base", models[0])], chunks, batch=0)
    with pytest.raises(ArgumentError, match="step"):
        compare([Variant("base", models[0], DynamicCache, step=0)], chunks)
    with pytest.raises(ArgumentError, match="make_cache"):
        compare([Variant("base", models[0], step=32)], chunks)
