# SPDX-License-Identifier: Apache-2.0
"""`rooftile generate` and `rooftile chat`: what they write is what the model's generate() writes, and mistakes are one
line before anything is loaded."""

import io
import json
import sys

import pytest

pytest.importorskip("gguf")
pytest.importorskip("torch")
pytest.importorskip("transformers")

import cases
import rooftile as rt
import tiny_gguf
import torch
import transformers
from rooftile.cli import chat, main
from rooftile.cli._model import Model
from rooftile.loaders import load_gguf, load_tokenizer

PROMPT = "hello world 12"
DEVICES = cases.devices()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_gguf.write(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    """The same model and tokenizer as transformers saves them."""
    path = tmp_path_factory.mktemp("folder") / "tiny"
    load_gguf(model, dtype="float32").save_pretrained(path)
    load_tokenizer(model).save_pretrained(path)
    return str(path)


def expected(path, prompt, count, weights="w4a16"):
    """Greedy ids behind `prompt` by transformers' own cache, attention and loop, in float32."""
    tokenizer, plain = load_tokenizer(path), load_gguf(path, dtype="float32", weights=weights)
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    out = plain.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return out[0, ids.shape[1] :].tolist()


def generate(source, out, *options):
    given = ["generate", source, "--prompt", PROMPT, "--max-new-tokens", "24", "--json", str(out), *options]
    assert main(given) == 0
    return json.loads(out.read_text())


def test_what_a_file_writes(model, tmp_path, capsys):
    report = generate(model, tmp_path / "out.json", "--dtype", "float32")
    printed = capsys.readouterr()
    assert report["tokens"] == expected(model, PROMPT, 24)
    assert report["steps"] == "rt.accelerate" and report["kv_cache"] == "fp32"
    assert printed.out == report["text"] + "\n"
    assert report["text"] == load_tokenizer(model).decode(report["tokens"], skip_special_tokens=True)
    assert "tokens a second" in printed.err and report["cache_bytes"] > 0 and report["weight_bytes"] > 0


def test_what_a_folder_writes(model, folder, tmp_path):
    report = generate(folder, tmp_path / "out.json", "--dtype", "float32")
    assert report["tokens"] == expected(model, PROMPT, 24, "dequantize")


def test_what_a_converted_folder_writes(folder, tmp_path):
    assert main(["convert", folder, str(tmp_path / "packed"), "--group-size", "32"]) == 0
    with rt.record_kernels() as kernels:
        report = generate(str(tmp_path / "packed"), tmp_path / "out.json", "--dtype", "float32")
    assert any("w4g32" in name for name in kernels) and len(report["tokens"]) == 24
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype=torch.float32).eval()
    ids = torch.tensor([report["prompt_tokens"]])
    plain = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
    assert report["tokens"] == plain[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("source", ["model", "folder"])
def test_rounded_weights_head_and_cache(source, device, tmp_path, request):
    options = ("--weights", "w8a16", "--head", "w8a16", "--kv-cache", "int4-kivi", "--device", device)
    with rt.record_kernels() as kernels:
        report = generate(request.getfixturevalue(source), tmp_path / "out.json", *options)
    assert report["kv_cache"] == "int4-kivi" and report["steps"] == "rt.accelerate" and len(report["tokens"]) == 24
    assert any("int4-kivi" in kernel for kernel in kernels)
    assert any("w8" in kernel for kernel in kernels)
    plain = generate(request.getfixturevalue(source), tmp_path / "plain.json", "--device", device)
    assert plain["kv_cache"] == "bf16"
    assert report["weight_bytes"] < 0.75 * plain["weight_bytes"] or source == "model"  # which has 4-bit codes


def test_sampling_is_repeated_with_its_seed(model, tmp_path):
    sampled = ("--temperature", "1.5", "--top-k", "50", "--top-p", "0.95", "--seed")
    first, again, other = (generate(model, tmp_path / "out.json", *sampled, seed)["tokens"] for seed in "778")
    assert first == again != other


def test_a_prompt_from_standard_input_and_from_a_file(model, tmp_path, capsys, monkeypatch):
    out, text = tmp_path / "out.json", tmp_path / "prompt.txt"
    text.write_text(PROMPT)
    wanted = generate(model, out)["prompt_tokens"]
    rest = ["generate", model, "--max-new-tokens", "1", "--json", str(out)]
    assert main([*rest, "--prompt-file", str(text)]) == 0
    assert json.loads(out.read_text())["prompt_tokens"] == wanted
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT))
    assert main(rest) == 0
    assert json.loads(out.read_text())["prompt_tokens"] == wanted


def test_a_model_without_decode_steps_of_ours_says_so(folder, tmp_path, capsys, monkeypatch):
    config = transformers.AutoConfig.from_pretrained(folder)
    kept = {name: getattr(config, name) for name in ("hidden_size", "num_hidden_layers", "vocab_size")}
    other = transformers.Starcoder2ForCausalLM(transformers.Starcoder2Config(**kept, num_attention_heads=4,
                                             num_key_value_heads=4, intermediate_size=96))  # fmt: skip
    path = tmp_path / "other"
    other.save_pretrained(path)
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(path)
    report = generate(str(path), tmp_path / "out.json", "--dtype", "float32")
    assert report["steps"].startswith("transformers: ") and len(report["tokens"]) == 24
    assert "decode steps run in transformers: " in capsys.readouterr().err
    ids = torch.tensor([report["prompt_tokens"]])
    plain = other.float().eval().generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
    assert report["tokens"] == plain[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["none.gguf", "--prompt", "a"], ("MODEL none.gguf", "no such file")),
        (["TEXT", "--prompt", "a"], ("not a GGUF file",)),
        (["EMPTY", "--prompt", "a"], ("config.json",)),
        (["MODEL", "--prompt", ""], ("--prompt", "no tokens")),
        (["MODEL", "--prompt-file", "none.txt"], ("--prompt-file none.txt", "No such file")),
        (["MODEL", "--prompt-file", "MODEL"], ("--prompt-file", "UTF-8")),
        (["MODEL", "--prompt", "text\udce9"], ("--prompt", "not UTF-8")),
        (["MODEL", "--prompt", "a", "--max-new-tokens", "4000"], ("--prompt", "context of 512")),
        (["MODEL", "--prompt", "a", "--kv-cache", "int4-kiwi"], ("--kv-cache", 'did you mean "int4-kivi"')),
        (["MODEL", "--prompt", "a", "--kv-cache", "fp16"], ("--kv-cache", "fp16", "--dtype bfloat16")),
        (["MODEL", "--prompt", "a", "--top-k", "5"], ("--top-k", "--temperature")),
        (["MODEL", "--prompt", "a", "--seed", "5"], ("--seed", "--temperature")),
        (["MODEL", "--prompt", "a", "--temperature", "1", "--top-p", "1.5"], ("--top-p", "1.5")),
        (["MODEL", "--prompt", "a", "--device", "abacus"], ("--device", "abacus")),
        (["MODEL", "--prompt", "a", "--json", "MODEL"], ("--json", "is (or lies in) MODEL")),
    ],
)
def test_mistakes(model, tmp_path, capsys, options, words):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("a text")
    paths = {"MODEL": model, "EMPTY": str(tmp_path / "empty"), "TEXT": str(tmp_path / "text")}
    assert main(["generate", *(paths.get(o, o) for o in options)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "Traceback" not in printed.err
    last = printed.err.splitlines()[-1]
    assert last.startswith("rooftile generate: error: ")
    for word in words:
        assert word in last


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "warm"])
def test_a_temperature_that_is_none(model, value, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["generate", model, f"--temperature={value}"])
    assert caught.value.code == 2 and f"expected a number from 0 on, got '{value}'" in capsys.readouterr().err


# ---------------------------------------------------------------- chat


def conversation(model, capsys, monkeypatch, lines, *options):
    """What is answered to `lines`, and what stderr says."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    assert main(["chat", model, "--max-new-tokens", "20", *options]) == 0
    printed = capsys.readouterr()
    return printed.out, printed.err


def test_turns_are_those_of_the_whole_conversation(model, capsys, monkeypatch):
    out, err = conversation(model, capsys, monkeypatch, ["hello", "12 hello", "hello 1"], "--dtype", "float32")
    tokenizer, text = load_tokenizer(model), ""
    messages = []
    for said in ("hello", "12 hello", "hello 1"):
        messages.append({"role": "user", "content": said})
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        answer = tokenizer.decode(expected(model, prompt, 20), skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer})
        text += answer + "\n"
    assert out == text
    assert err.count("tokens in the cache") == 3


@pytest.mark.parametrize("format", ["bf16", "int8", "int4-kivi"])
def test_a_turn_goes_on_from_the_cache(model, monkeypatch, format):
    """The second turn hands the model no token that the cache holds already."""
    args = cli_arguments(model, "--kv-cache", format)
    talk, given = chat.Conversation(Model(args), None, 8), []
    forward = talk.model.model.forward

    def noting(*positional, **named):
        given.append(named.get("input_ids", positional[0] if positional else None).shape[1])
        return forward(*positional, **named)

    monkeypatch.setattr(talk.model.model, "forward", noting)
    first = talk.say("hello world " * 20)
    held = talk.tokens
    given.clear()
    talk.say("12")
    assert first.tokens and given[0] <= len(talk._held) - held + 40  # what the template adds, and a group of 32


def cli_arguments(*arguments):
    import argparse

    parser = argparse.ArgumentParser()
    chat.add_arguments(parser)
    return parser.parse_args(arguments)


def test_reset_and_exit(model, capsys, monkeypatch):
    out, _ = conversation(model, capsys, monkeypatch, ["hello", "/reset", "", "hello", "/exit", "never"])
    half = len(out) // 2
    assert half > 1 and out[:half] == out[half:]


def test_a_system_message_comes_first(model):
    talk = chat.Conversation(Model(cli_arguments(model)), "12", 4)
    assert talk.messages == [{"role": "system", "content": "12"}]
    talk.say("hello")
    assert [m["role"] for m in talk.messages] == ["system", "user", "assistant"]
    talk.reset()
    assert talk.messages == [{"role": "system", "content": "12"}] and talk.tokens == 0


def test_a_refused_turn_leaves_the_others(model):
    talk = chat.Conversation(Model(cli_arguments(model, "--dtype", "float32")), None, 4)
    talk.say("hello")
    messages, tokens = list(talk.messages), talk.tokens
    with pytest.raises(ValueError, match="context of 512"):
        talk.say("hello " * 600)
    assert talk.messages == messages and talk.tokens == tokens


def test_a_model_without_a_chat_template(tmp_path, capsys):
    meta = tiny_gguf.metadata("llama")
    del meta["tokenizer.chat_template"]
    path = tiny_gguf.write(tmp_path / "tiny.gguf", meta=meta)
    assert main(["chat", path]) == 2
    assert "has no chat template" in capsys.readouterr().err.splitlines()[-1]


def test_a_template_that_refuses(tmp_path, capsys, monkeypatch):
    meta = tiny_gguf.metadata("llama")
    meta["tokenizer.chat_template"] = ("{{ raise_exception('no system here') }}", "string")
    path = tiny_gguf.write(tmp_path / "tiny.gguf", meta=meta)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    assert main(["chat", path]) == 2
    assert "chat template refuses this conversation: no system here" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["generate", "chat", "chat --system"])
def test_bytes_that_are_no_text(model, capsys, monkeypatch, command):
    """Python reads bytes of standard input that are no UTF-8 as surrogates."""
    monkeypatch.setattr("sys.stdin", io.StringIO("text\udce9\n"))
    command, *option = command.split()
    assert main([command, model, *option, *(["text\udce9"] if option else [])]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"rooftile {command}: error: {option[0] if option else 'standard input'}: not UTF-8 text")
