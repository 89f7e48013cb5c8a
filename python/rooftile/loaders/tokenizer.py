# SPDX-License-Identifier: Apache-2.0
"""The tokenizer inside a GGUF file, as a transformers tokenizer."""

from rooftile.errors import ArgumentError, NotSupportedError
from rooftile.loaders.gguf_file import GGUFFile, read_gguf

# tokenizer.ggml.token_type
_CONTROL, _USER_DEFINED = 3, 4

# Qwen2's pre-tokenizer, part of the format: contractions, words, single digits, punctuation, line ends, spaces
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _smollm():
    from tokenizers import pre_tokenizers

    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    return pre_tokenizers.Sequence(steps), None


def _qwen2():
    from tokenizers import Regex, normalizers, pre_tokenizers

    steps = [
        pre_tokenizers.Split(Regex(_QWEN2_SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    return pre_tokenizers.Sequence(steps), normalizers.NFC()


# tokenizer.ggml.pre -> (pre-tokenizer, normalizer)
_PRE_TOKENIZERS = {"smollm": _smollm, "qwen2": _qwen2}


def load_tokenizer(path):
    """The tokenizer of a GGUF file, as a transformers.PreTrainedTokenizerFast.

    path: the file, or the GGUFFile that read_gguf returned. Byte-level BPE (`tokenizer.ggml.model` = gpt2) with the
    pre-tokenizers smollm and qwen2; special tokens, BOS/EOS/PAD and the chat template come from the file, and padding
    is on the left, as generation needs it. A BOS is put in front only where the file says so.
    Raises ArgumentError naming the key for a corrupt file, NotSupportedError for another kind of tokenizer.
    """
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    file = path if isinstance(path, GGUFFile) else read_gguf(path)
    model = file.get("tokenizer.ggml.model", str)
    if model != "gpt2":
        raise NotSupportedError(
            f"{file.path}: tokenizer model '{model}' (tokenizer.ggml.model) is not supported; supported: gpt2"
        )
    pre = file.get("tokenizer.ggml.pre", str)
    if pre not in _PRE_TOKENIZERS:
        raise NotSupportedError(
            f"{file.path}: pre-tokenizer '{pre}' (tokenizer.ggml.pre) is not supported; "
            f"supported: {', '.join(_PRE_TOKENIZERS)}"
        )
    if file.get("tokenizer.ggml.add_eos_token", bool, False):
        raise NotSupportedError(f"{file.path}: tokenizer.ggml.add_eos_token = true is not supported")

    tokens = _list(file, "tokenizer.ggml.tokens", str)
    types = _list(file, "tokenizer.ggml.token_type", int)
    if len(types) != len(tokens):
        raise ArgumentError(
            f"{file.path}: tokenizer.ggml.token_type has {len(types)} entries, tokenizer.ggml.tokens {len(tokens)}"
        )
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(token for i, token in enumerate(tokens) if vocab[token] != i)
        raise ArgumentError(f"{file.path}: tokenizer.ggml.tokens holds {twice!r} twice")

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=_merges(file, vocab)))
    tokenizer.pre_tokenizer, normalizer = _PRE_TOKENIZERS[pre]()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [
            tokenizers.AddedToken(token, special=special, normalized=False)
            for token, type_ in zip(tokens, types, strict=True)
            if type_ == kind
        ]
        tokenizer.add_special_tokens(added) if special else tokenizer.add_tokens(added)

    bos, eos, pad, unknown = (_token(file, tokens, key) for key in ("bos", "eos", "padding", "unknown"))
    if file.get("tokenizer.ggml.add_bos_token", bool, False):
        if bos is None:
            raise ArgumentError(f"{file.path}: add_bos_token is true, but tokenizer.ggml.bos_token_id is missing")
        # the template is a syntax of its own ($A, NAME:1): it has a name for the token, never the file's text
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single="bos $A",
            pair="bos $A bos:1 $B:1",
            special_tokens=[{"id": "bos", "ids": [vocab[bos]], "tokens": [bos]}],
        )
    context = f"{file.get('general.architecture', str)}.context_length"
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=eos,
        pad_token=pad if pad is not None else eos,
        unk_token=unknown,
        chat_template=file.get("tokenizer.chat_template", str, "") or None,
        model_max_length=file.get(context, int) if context in file.metadata else None,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def _list(file, key, kind):
    values = file.get(key, list)
    for i, value in enumerate(values):
        if type(value) is not kind:
            raise ArgumentError(
                f"{file.path}: element {i} of {key} must be {kind.__name__}, got {type(value).__name__}"
            )
    return values


def _merges(file, vocab):
    merges = []
    for i, merge in enumerate(_list(file, "tokenizer.ggml.merges", str)):
        parts = tuple(merge.split(" "))
        if len(parts) != 2 or not all(part in vocab for part in (*parts, "".join(parts))):
            raise ArgumentError(
                f"{file.path}: element {i} of tokenizer.ggml.merges is {merge!r}, "
                "expected two tokens of the vocabulary whose join is one too"
            )
        merges.append(parts)
    return merges


def _token(file, tokens, name):
    key = f"tokenizer.ggml.{name}_token_id"
    if key not in file.metadata:
        return None
    index = file.get(key, int)
    if not 0 <= index < len(tokens):
        raise ArgumentError(f"{file.path}: metadata key '{key}' is {index}, expected a token below {len(tokens)}")
    return tokens[index]
