# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M out of the package index: what it answers, its text and tokens. Run with `pytest -m model`."""

import pytest

pytest.importorskip("gguf")
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from rooftile.errors import FetchError  # noqa: E402
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
