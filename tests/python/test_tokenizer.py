# SPDX-License-Identifier: Apache-2.0
"""The tokenizer out of a GGUF file."""

import pytest

pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

import tiny_gguf  # noqa: E402
from rooftile.cli import main  # noqa: E402
from rooftile.errors import ArgumentError, NotSupportedError  # noqa: E402
from rooftile.loaders import load_tokenizer, read_gguf  # noqa: E402


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def tokenizer(request, tmp_path_factory):
    return load_tokenizer(tiny_gguf.write(tmp_path_factory.mktemp("gguf") / "a.gguf", request.param))


def pieces(tokenizer, text):
    return tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])


def test_bytes_and_merges(tokenizer):
    assert pieces(tokenizer, "hello wo") == ["hello", "Ġw", "o"]
    assert pieces(tokenizer, "é\n") == ["Ã", "©", "Ċ"]


def test_digits_are_single(tokenizer):
    """The merge "1 2" is in the vocabulary and must never be used: both pre-tokenizers split digits."""
    assert pieces(tokenizer, "120") == ["1", "2", "0"]


def test_splits_differ_as_the_models_do(tmp_path):
    smollm, qwen2 = (load_tokenizer(tiny_gguf.write(tmp_path / f"{a}.gguf", a)) for a in ("llama", "qwen2"))
    # SmolLM (GPT-2's words) keeps a space with punctuation and line ends apart; Qwen2 joins punctuation and line ends
    words = [[w for w, _ in t.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a.\n\nb 12")] for t in (smollm, qwen2)]
    assert words[0] == ["a", ".", "Ċ", "Ċ", "b", "Ġ", "1", "2"]
    assert words[1] == ["a", ".ĊĊ", "b", "Ġ", "1", "2"]


def test_qwen2_composes_characters(tmp_path):
    t = load_tokenizer(tiny_gguf.write(tmp_path / "a.gguf", "qwen2"))
    assert t("e\u0301")["input_ids"] == t("\u00e9")["input_ids"]


@pytest.mark.parametrize("text", ["", "hello", " two  spaces\n\n\ttab", "naïve — Ω 漢字 🙂", "it's 12,345.6"])
def test_decode_gives_the_text_back(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_special_tokens(tokenizer):
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    assert tokenizer("<|im_start|>h<|im_end|>")["input_ids"] == [tiny_gguf.BOS, ord("h") - ord("!") + 33, tiny_gguf.EOS]
    assert tokenizer.decode([tiny_gguf.BOS, tiny_gguf.EOS], skip_special_tokens=True) == ""
    think = tokenizer("<think>")["input_ids"]  # user-defined: one token, but not special
    assert len(think) == 1 and tokenizer.decode(think, skip_special_tokens=True) == "<think>"
    assert len(tokenizer) == tiny_gguf.VOCAB


def test_no_bos_unless_the_file_says_so(tokenizer, tmp_path):
    assert tokenizer("h")["input_ids"][0] != tiny_gguf.BOS
    path = tiny_gguf.write(tmp_path / "a.gguf", extra_meta={"tokenizer.ggml.add_bos_token": (True, "bool")})
    assert load_tokenizer(path)("h")["input_ids"][0] == tiny_gguf.BOS


@pytest.mark.parametrize("bos", ["$A", "$B", "$0", "a b", " ", "x:1", "<s>:1", "<s> a:b", "", "bos", "\n", "a"])
def test_the_text_of_a_bos_is_no_template(bos, tmp_path):
    """Whatever the file calls it, it is one token in front of each text; after convert too."""
    tokens, types = list(tiny_gguf.TOKENS), list(tiny_gguf.TOKEN_TYPES)
    place = tokens.index(bos) if bos in tokens else 300
    tokens[place], types[place] = bos, 3
    meta = {
        "tokenizer.ggml.add_bos_token": (True, "bool"),
        "tokenizer.ggml.tokens": (tokens, "array"),
        "tokenizer.ggml.token_type": (types, "array"),
        "tokenizer.ggml.bos_token_id": (place, "uint32"),
    }
    path = tiny_gguf.write(tmp_path / "a.gguf", extra_meta=meta)
    assert main(["convert", str(path), str(tmp_path / "folder")]) == 0
    hello = tokens.index("hello")
    for tokenizer in (load_tokenizer(path), transformers.AutoTokenizer.from_pretrained(tmp_path / "folder")):
        assert tokenizer("hello")["input_ids"] == [place, hello]
        assert tokenizer("hello", "hello")["input_ids"] == [place, hello, place, hello]
        assert (tokenizer.bos_token, tokenizer.bos_token_id) == (bos, place)
        assert tokenizer.decode([place, hello], skip_special_tokens=True) == "hello"


def test_chat_template_and_padding(tokenizer, tmp_path):
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert text == "<|im_start|>user\nhello<|im_end|>\n"
    meta = {name: value for name, value in tiny_gguf.metadata("llama").items() if name != "tokenizer.chat_template"}
    assert load_tokenizer(tiny_gguf.write(tmp_path / "a.gguf", meta=meta)).chat_template is None
    batch = tokenizer(["hello", "hello hello"], padding=True)
    assert batch["attention_mask"][0][0] == 0 and batch["attention_mask"][0][-1] == 1


def test_what_the_header_says_of_the_tokenizer_is_kept(tmp_path):
    """Token 0 too, an unknown token, the context; spaces before punctuation stay when it decodes."""
    meta = {
        "tokenizer.ggml.unknown_token_id": (0, "uint32"),
        "tokenizer.ggml.padding_token_id": (tiny_gguf.VOCAB - 1, "uint32"),
    }
    path = tiny_gguf.write(tmp_path / "a.gguf", extra_meta=meta)
    tokenizer, tokens = load_tokenizer(path), read_gguf(path).get("tokenizer.ggml.tokens", list)
    assert (tokenizer.unk_token, tokenizer.pad_token) == (tokens[0], tokens[-1])
    assert tokenizer.model_max_length == read_gguf(path).get("llama.context_length", int)
    assert tokenizer.padding_side == "left" and not tokenizer.clean_up_tokenization_spaces
    assert tokenizer.decode(tokenizer("hello , you .")["input_ids"]) == "hello , you ."


def test_takes_a_header_that_was_read(tmp_path):
    path = tiny_gguf.write(tmp_path / "a.gguf")
    assert load_tokenizer(read_gguf(path))("hello")["input_ids"] == load_tokenizer(path)("hello")["input_ids"]


@pytest.mark.parametrize(
    ("key", "value", "error", "words"),
    [
        ("tokenizer.ggml.model", ("llama", "string"), NotSupportedError, ("'llama'", "gpt2")),
        ("tokenizer.ggml.model", None, ArgumentError, ("missing",)),
        ("tokenizer.ggml.pre", ("llama-bpe", "string"), NotSupportedError, ("'llama-bpe'", "smollm", "qwen2")),
        ("tokenizer.ggml.pre", None, ArgumentError, ("missing",)),
        ("tokenizer.ggml.tokens", ("abc", "string"), ArgumentError, ("list", "'abc'")),
        ("tokenizer.ggml.tokens", ([1, 2], "array"), ArgumentError, ("element 0", "str")),
        ("tokenizer.ggml.tokens", (["a", "b", "a"], "array"), ArgumentError, ("token_type", "320", "3")),
        ("tokenizer.ggml.tokens", (["a"] * tiny_gguf.VOCAB, "array"), ArgumentError, ("'a' twice",)),
        ("tokenizer.ggml.token_type", ([1, 1], "array"), ArgumentError, ("2 entries", "320")),
        ("tokenizer.ggml.merges", (["h"], "array"), ArgumentError, ("element 0", "'h'")),
        ("tokenizer.ggml.merges", (["h e", "q zz"], "array"), ArgumentError, ("element 1", "'q zz'")),
        ("tokenizer.ggml.merges", (["x y"], "array"), ArgumentError, ("'x y'",)),
        ("tokenizer.ggml.bos_token_id", (320, "uint32"), ArgumentError, ("320",)),
        ("tokenizer.ggml.bos_token_id", None, ArgumentError, ("add_bos_token", "missing")),
        ("tokenizer.ggml.add_bos_token", (1, "uint32"), ArgumentError, ("bool",)),
        ("tokenizer.ggml.add_eos_token", (True, "bool"), NotSupportedError, ()),
        ("tokenizer.chat_template", (["a", "b"], "array"), ArgumentError, ("str",)),
    ],
)
def test_faults(tmp_path, key, value, error, words):
    meta = {**tiny_gguf.metadata("llama"), "tokenizer.ggml.add_bos_token": (True, "bool")}
    if value is None:
        del meta[key]
    else:
        meta[key] = value
    path = tiny_gguf.write(tmp_path / "a.gguf", meta=meta)
    with pytest.raises(error) as caught:
        load_tokenizer(path)
    for word in (path, key, *words):
        assert word in str(caught.value)
