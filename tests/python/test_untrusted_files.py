# SPDX-License-Identifier: Apache-2.0
"""Checkpoints from somebody else: no code of theirs runs, nothing hangs, nothing outside their folder is read, and what
stood at the target before is there or replaced, never lost."""

import errno
import json
import os
import signal
import socket
import sys
import time

import pytest

pytest.importorskip("safetensors")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import rooftile as rt  # noqa: E402
import tiny_checkpoints as tiny  # noqa: E402
from rooftile.checkpoints import convert, load, patterns, trial, writer  # noqa: E402
from rooftile.cli import main  # noqa: E402
from rooftile.loaders import read_gguf  # noqa: E402

UP = "model.layers.1.mlp.up_proj"
ROUNDING = rt.W4A16(32)


def plain(path, **config):
    return tiny.write(path, tiny.tensors(None, {}), **config)


def packed(path, **config):
    """compressed-tensors, one packed layer."""
    weights = {UP: tiny.weight(UP, tiny.MODULES[UP], symmetric=True)}
    state = tiny.tensors(lambda w: tiny.compressed_tensors(w, True), weights)
    return tiny.write(path, state, tiny.compressed_tensors_config(**config))


def refused(source, tmp_path, *words, error=rt.ArgumentError, **options):
    with pytest.raises(error) as caught:
        convert(source, tmp_path / "target", progress=False, **options)
    for word in words:
        assert word in str(caught.value), str(caught.value)
    assert not [p for p in tmp_path.iterdir() if "target" in p.name]


# ---------------------------------------------------------------- code that a checkpoint names

OWN = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model", "AutoTokenizer": ["own.Tokenizer", None]}


@pytest.fixture
def traps(tmp_path, monkeypatch):
    """A function that puts code into a folder, which says when it has run. Nobody is asked anything."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked whether to run remote code"))

    def put(folder):
        (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
        (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 64, "auto_map": OWN}))
        return folder

    yield put
    assert not (tmp_path / "ran").exists()


def test_classes_of_the_checkpoint_are_not_used(tmp_path, traps):
    nested = {"auto_map": OWN, "kept": [1, {"auto_map": OWN}]}
    source = traps(plain(tmp_path / "source", auto_map=OWN, further=nested))
    report = convert(source, tmp_path / "target", rounding=ROUNDING, progress=False)
    written = {p.name: p.read_text() for p in (tmp_path / "target").glob("*.json")}
    assert written.keys() == {"config.json", "tokenizer_config.json"} and "auto_map" not in "".join(written.values())
    assert json.loads(written["config.json"])["further"] == {"kept": [1, {}]}
    assert json.loads(written["tokenizer_config.json"]) == {"model_max_length": 64}
    said = [line for line in report["left_out"] if "auto_map" in line]
    assert [line.partition(":")[0] for line in said] == ["config.json"] * 3 + ["tokenizer_config.json"]
    assert all("never run" in line for line in said)
    load(source, rounding=ROUNDING, progress=False)


def test_another_name_for_a_field_is_not_followed(tmp_path, traps, monkeypatch):
    """config.json's own attribute_map: transformers would set auto_map, or the attention, by a field of any name."""
    seen = []
    make = transformers.AutoModelForCausalLM.from_config
    monkeypatch.setattr(
        transformers.AutoModelForCausalLM,
        "from_config",
        lambda config, **options: (seen.append((config, options)), make(config, **options))[1],
    )
    names = {"further": "auto_map", "kernel": "_attn_implementation"}
    text = {"attribute_map": names, "further": OWN}
    source = traps(
        plain(tmp_path / "source", attribute_map=names, further=OWN, kernel="some/kernel", kept={"text": [text]})
    )
    report = convert(source, tmp_path / "target", rounding=ROUNDING, progress=False)
    written = json.loads((tmp_path / "target" / "config.json").read_text())
    assert "attribute_map" not in json.dumps(written) and written["kept"] == {"text": [{"further": OWN}]}
    said = [line for line in report["left_out"] if "attribute_map" in line]
    assert len(said) == 2 and all(line.startswith("config.json: attribute_map: ") for line in said)
    ((config, options),) = seen
    assert options["trust_remote_code"] is False
    assert not hasattr(config, "auto_map") and config._attn_implementation != "some/kernel"
    load(source, rounding=ROUNDING, progress=False)


def test_a_model_that_only_the_checkpoint_knows(tmp_path, traps):
    """transformers has no causal language model of this type, and would ask for the checkpoint's."""
    source = traps(plain(tmp_path / "source", model_type="vit", auto_map=OWN))
    refused(source, tmp_path, "no causal language model")
    source = traps(plain(tmp_path / "own", model_type="own", auto_map=OWN))
    refused(source, tmp_path, "model_type 'own'", error=rt.NotSupportedError)


def test_attention_kernels_of_a_hub_are_not_fetched(tmp_path, monkeypatch):
    fetched = []
    monkeypatch.setattr(transformers.modeling_utils, "lazy_import_flash_attention", lambda *a, **_: fetched.append(a))
    names = {"attn_implementation": "some/kernel", "_attn_implementation": "some/kernel"}
    source = plain(tmp_path / "source", **names, further=names, experts_implementation="some/experts")
    report = convert(source, tmp_path / "target", rounding=ROUNDING, progress=False)
    assert fetched == [] and sum("_implementation" in line for line in report["left_out"]) == 5
    assert "some/" not in (tmp_path / "target" / "config.json").read_text()


# ---------------------------------------------------------------- expressions


@pytest.mark.parametrize("key", ["ignore", "targets"])
def test_an_expression_without_end(tmp_path, monkeypatch, key):
    monkeypatch.setattr(patterns, "SECONDS", 1)
    endless = "re:(.|.)*!"
    if key == "ignore":
        source = packed(tmp_path / "source", ignore=[endless])
    else:
        group = tiny.compressed_tensors_config()["config_groups"]["group_0"] | {"targets": [endless]}
        source = packed(tmp_path / "source", config_groups={"group_0": group})
    begin = time.monotonic()
    refused(source, tmp_path, str(source / "config.json"), repr(endless), "within 1 s")
    assert time.monotonic() - begin < 60


def test_an_expression_matches_from_the_beginning_of_a_name(tmp_path):
    """re.match, as compressed-tensors does: these ignore nothing, and found anywhere they would."""
    source = packed(tmp_path / "source", ignore=["re:up_proj", "re:mlp", "re:layers.1", "up_proj", "re:Linear"])
    report = convert(source, tmp_path / "target", progress=False)
    assert [row["name"] for row in report["rows"] if row["outcome"] == "4 bits, lossless"] == [UP]


EXPRESSIONS = ["re:.*up_proj", "re:up_proj", "re:model", "re:$", "re:", "re:(?!.*mlp)", "re:.*mlp.up$", "re:(?i)MODEL"]
EXPRESSIONS += [UP, "mlp"]


def test_expressions_mean_what_they_mean_to_compressed_tensors():
    match = pytest.importorskip("compressed_tensors.utils.match", reason="compressed-tensors needs Python 3.11")
    names = [*tiny.MODULES, "lm_head", "up_proj", "model", "mlp.up"]
    means = patterns.matches("here", EXPRESSIONS, names)
    for expression in EXPRESSIONS:
        assert means[expression] == {name for name in names if match.match_name(name, expression)}, expression


@pytest.mark.parametrize("expression", ["re:(", "re:a{99999999999999999999}", "re:" + "(" * 5000, "re:(?P<1>a)"])
def test_an_expression_that_is_none(tmp_path, expression):
    source = packed(tmp_path / "source", ignore=["re:.*lm_head", expression])
    refused(source, tmp_path, str(source / "config.json"), repr(expression)[:100], "expected a regular expression")


# ---------------------------------------------------------------- what is no regular file


def special(path, kind):
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as s:
            s.bind(os.path.relpath(path))  # a path of a socket is short
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    return path


@pytest.mark.parametrize("kind", ["FIFO", "socket", "directory", "character device"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json", "a.gguf"])
def test_a_file_that_is_none(tmp_path, monkeypatch, name, kind):
    """A FIFO would block until somebody writes, a device never ends."""
    monkeypatch.chdir(tmp_path)
    if name == "a.gguf":
        path = special(tmp_path / name, kind)
        with pytest.raises(rt.ArgumentError, match=f"{name}': is a {kind}, expected a regular file"):
            read_gguf(path)
        if kind == "directory":
            return  # a folder, and so another kind of source
        source = path
    else:
        source = tiny.write(tmp_path / "source", tiny.tensors(None, {}), shards=2 if "index" in name else 1)
        (source / name).unlink()
        special(source / name, kind)
    refused(source, tmp_path, name, f"is a {kind}, expected a regular file", rounding=ROUNDING)


def test_what_lies_beside_the_model_and_is_no_file(tmp_path):
    source = plain(tmp_path / "source")
    os.mkfifo(source / "tokenizer.json")
    (source / "merges.txt").symlink_to("nowhere")
    report = convert(source, tmp_path / "target", rounding=ROUNDING, progress=False)
    assert report["copied"] == ["tokenizer_config.json"]
    assert report["left_out"] == [
        "merges.txt: No such file or directory",
        "tokenizer.json: is a FIFO, expected a regular file",
    ]


@pytest.mark.parametrize(("text", "reason"), [("[]", "expected a JSON object, got list"), ("{", "not JSON: ")])
def test_a_generation_config_that_is_none_stays_behind(tmp_path, text, reason):
    """Else transformers fails on the converted folder, in words of its own."""
    source = plain(tmp_path / "source")
    (source / "generation_config.json").write_text(text)
    report = convert(source, tmp_path / "target", rounding=ROUNDING, progress=False)
    assert report["copied"] == ["tokenizer_config.json"]
    (left,) = report["left_out"]
    assert left.startswith(f"generation_config.json: {reason}")
    assert not (tmp_path / "target" / "generation_config.json").exists()


# ---------------------------------------------------------------- links


def test_links_out_of_the_folder_are_not_followed(tmp_path):
    """Else a checkpoint could bring a private file into what is passed on."""
    (tmp_path / "secret").write_text("of the user")
    source = plain(tmp_path / "source")
    (source / "tokenizer.json").symlink_to(tmp_path / "secret")
    (source / "merges.txt").symlink_to("../secret")
    (source / "vocab.txt").symlink_to("README.md")
    report = convert(source, tmp_path / "target", rounding=ROUNDING, progress=False)
    assert report["copied"] == ["tokenizer_config.json", "vocab.txt"]
    assert report["left_out"] == [f"{n}: a link to a file outside the folder" for n in ("merges.txt", "tokenizer.json")]
    assert (tmp_path / "target" / "vocab.txt").read_text() == "not copied"


def test_the_cache_of_a_hub_is_made_of_links(tmp_path):
    """snapshots/REVISION/NAME -> ../../blobs/HASH"""
    home = tmp_path / "models--some--model"
    (home / "blobs").mkdir(parents=True)
    (home / "snapshots").mkdir()
    source = plain(home / "snapshots" / "0123")
    for i, file in enumerate(sorted(source.iterdir())):
        file.rename(home / "blobs" / str(i))
        file.symlink_to(f"../../blobs/{i}")
    (home / "secret").write_text("of the user")
    (source / "tokenizer.json").symlink_to("../../secret")
    report = convert(source, tmp_path / "target", rounding=ROUNDING, progress=False)
    assert report["copied"] == ["tokenizer_config.json"]
    assert report["left_out"] == ["tokenizer.json: a link to a file outside the folder"]


# ---------------------------------------------------------------- JSON and safetensors


def test_json_of_any_depth_and_size(tmp_path, monkeypatch):
    source = plain(tmp_path / "source")
    config = source / "config.json"
    fields = json.loads(config.read_text())
    for depth in (101, 300, 900, 5000):
        config.write_text(json.dumps(fields)[:-1] + ', "deep": ' + "[" * depth + "]" * depth + "}")
        refused(source, tmp_path, str(config), rounding=ROUNDING)
    config.write_text(json.dumps({**fields, "deep": json.loads("[" * 98 + "]" * 98)}))
    convert(source, tmp_path / "deep", rounding=ROUNDING, progress=False)
    with open(config, "r+b") as file:
        file.truncate(100 * 2**20 + 1)
    refused(source, tmp_path, str(config), f"expected at most {100 * 2**20} bytes", rounding=ROUNDING)
    config.write_text(json.dumps(fields))
    monkeypatch.setattr("rooftile.checkpoints.folder._JSON_BYTES", 100)
    refused(source, tmp_path, str(config), "expected at most 100 bytes", rounding=ROUNDING)


def test_text_that_no_file_can_hold(tmp_path):
    """Half of a surrogate pair: JSON can say it, UTF-8 cannot."""
    source = plain(tmp_path / "source", note="\ud800", unité="é")
    convert(source, tmp_path / "target", rounding=ROUNDING, progress=False)
    written = json.loads((tmp_path / "target" / "config.json").read_text())
    assert written["note"] == "\ud800" and written["unité"] == "é"


def test_a_null_character_in_the_name_of_a_file(tmp_path):
    source = tiny.write(tmp_path / "source", tiny.tensors(None, {}), shards=2)
    index = source / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "\0.safetensors"}}))
    refused(source, tmp_path, "null", rounding=ROUNDING)


def entry(begin, end):
    return f'{{"dtype": "F16", "shape": [64], "data_offsets": [{begin}, {end}]}}'


@pytest.mark.parametrize(
    "header",
    [
        f'{{"model.norm.weight": {entry(0, 128)}, "model.norm.weight": {entry(128, 256)}}}',  # twice
        f'{{"a": {entry(0, 128)}, "b": {entry(64, 192)}, "c": {entry(128, 256)}}}',  # overlapping
        f'{{"a": {entry(0, 128)}, "b": {entry(0, 128)}, "c": {entry(128, 256)}}}',  # the same bytes twice
        f'{{"a": {entry(0, 128)}}}',  # bytes that are nothing's
        '{"a": ' + "[" * 10_000 + "]" * 10_000 + "}",
    ],
)
def test_headers_of_safetensors(tmp_path, header):
    source = plain(tmp_path / "source")
    file = source / "model.safetensors"
    header = header.encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(256))
    refused(source, tmp_path, str(file), rounding=ROUNDING)


@pytest.mark.parametrize(
    ("kind", "field"), [("llama", "num_hidden_layers"), ("gpt2", "n_layer"), ("bart", "decoder_layers")]
)
def test_more_layers_than_tensors(tmp_path, kind, field):
    """Found before they are made, whatever the model calls them."""
    source = plain(tmp_path / "source", **{"model_type": kind, field: 10**9})
    refused(source, tmp_path, f"{field} is 1000000000, but there are", rounding=ROUNDING)


@pytest.mark.parametrize(
    "field, seconds, memory, why",
    [
        ({"num_labels": 10**10}, 60, 2**26, "needs more than 0.0625 GiB of memory"),
        ({"num_labels": 10**10}, 1, 2**40, "does not end within 1 s"),
        (
            {
                "model_type": "gemma3",
                "text_config": {"num_hidden_layers": 1, "hidden_size": 64},
                "vision_config": {"num_hidden_layers": 10**8, "hidden_size": 64, "num_attention_heads": 1},
            },
            2,
            2**40,
            "does not end within 2 s",
        ),
    ],
    ids=["labels: memory", "labels: time", "layers of a vision tower"],
)
def test_a_field_that_counts_a_loop_of_transformers(tmp_path, monkeypatch, capfd, field, seconds, memory, why):
    monkeypatch.setattr(trial, "SECONDS", seconds)
    monkeypatch.setattr(trial, "MEMORY", memory)
    folder = plain(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | field))
    refused(folder, tmp_path, "config.json: transformers makes no causal language model of it: it ", why)
    assert capfd.readouterr() == ("", "")


def test_a_trial_that_needs_little_says_why_it_ends(monkeypatch):
    """Memory that this process had before does not count."""
    with open("/proc/self/statm", encoding="ascii") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    monkeypatch.setattr(trial, "MEMORY", resident)
    assert trial.refusal(lambda: 1 / 0) == "division by zero"


def test_a_trial_that_is_left_ends(monkeypatch):
    """One that is interrupted leaves no process."""
    assert trial.refusal(lambda: None) is None
    assert trial.refusal(lambda: 1 / 0) == "division by zero"
    assert trial.refusal(lambda: os.kill(os.getpid(), signal.SIGKILL)) == "a trial of it ended with exit code -9"
    pid, forked = os.getpid(), []
    fork = os.fork

    def recorded():
        child = fork()
        forked.append(child)
        return child

    monkeypatch.setattr(os, "fork", recorded)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            trial.refusal(lambda: time.sleep(60))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert os.getpid() == pid and len(forked) == 1
    with pytest.raises(ProcessLookupError):
        os.kill(forked[0], 0)


def test_names_that_look_like_markup(tmp_path, capsys):
    """Of a tensor, of a file, of the folder: printed as they are."""
    state = tiny.tensors(None, {})
    state["[/bold].inv_freq"] = torch.ones(8)
    source = tiny.write(tmp_path / "[bold]source", state)
    (source / "tokenizer[ bold].json").write_text("{}")
    (source / "[red]token.json").write_text("{}")
    assert main(["convert", str(source), str(tmp_path / "[b]target"), "--group-size", "32"]) == 0
    out = capsys.readouterr().out
    for name in (
        "[bold]source (",
        "Left out: [/bold].inv_freq",
        "tokenizer[ bold].json",
        "[red]token.json",
        "[b]target",
    ):
        assert name in out, name


# ---------------------------------------------------------------- what stands at the target


def content(folder):
    return {p.name: p.read_text() for p in folder.iterdir()}


OLD, NEW = {"config.json": "old", "old": "old"}, {"config.json": "new", "new": "new"}


@pytest.fixture
def models(tmp_path):
    """A model at tmp_path/target, and a function that replaces it by another."""
    target = tmp_path / "target"
    target.mkdir()
    for name, text in OLD.items():
        (target / name).write_text(text)

    def replace():
        with writer.written_whole(target, replace=True) as folder:
            for name, text in NEW.items():
                (folder / name).write_text(text)

    return target, replace


STEPS = {
    "os.fsync": (os, "fsync"),
    "exchange": (writer, "_exchange"),
    "first rename": (writer.pathlib.Path, "rename"),
    "second rename": (writer.pathlib.Path, "rename"),
    "both renames": (writer.pathlib.Path, "rename"),
    "all renames": (writer.pathlib.Path, "rename"),
    "rmtree": (writer.shutil, "rmtree"),
}


def fails(step, how):
    """A stand-in for STEPS[step] that fails at its turn; `how`: called then."""
    module, name = STEPS[step]
    real, calls = getattr(module, name), []
    turns = {"second rename": (2,), "both renames": (1, 2), "all renames": (2, 3)}.get(step, (1,))

    def stand_in(*args, **options):
        calls.append(args)
        if len(calls) in turns:
            how()
        return real(*args, **options)

    return module, name, stand_in


def raise_(error):
    raise error


ERRORS = [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("step", STEPS)
def test_replacing_that_fails_keeps_the_old_model(models, monkeypatch, step, error):
    target, replace = models
    if "rename" in step:
        monkeypatch.setattr(writer, "_exchange", lambda a, b: False)
    if step == "rmtree":
        error = KeyboardInterrupt()  # what cannot be deleted stays; an interrupt comes through
    with monkeypatch.context() as m:
        m.setattr(*fails(step, lambda: raise_(error)))
        with pytest.raises((rt.ArgumentError, KeyboardInterrupt)) as caught:
            replace()
    if step == "all renames":  # not even putting it back
        (kept,) = (p for p in target.parent.iterdir() if ".old-" in p.name)
        assert content(kept) == OLD and (error is ERRORS[1] or str(kept) in str(caught.value))
    elif step == "rmtree":  # the new one is in place
        assert content(target) == NEW
    else:
        assert content(target) == OLD and os.listdir(target.parent) == ["target"]
        replace()
        assert content(target) == NEW and os.listdir(target.parent) == ["target"]


def test_replacing_with_a_c_library_that_exchanges_nothing(models, monkeypatch):
    target, replace = models
    monkeypatch.setattr(writer.ctypes, "CDLL", lambda *args, **options: object())
    assert writer._exchange(target, target) is False
    replace()
    assert content(target) == NEW and os.listdir(target.parent) == ["target"]


@pytest.mark.parametrize("step", ["os.fsync", "exchange", "after exchange", "rmtree"])
def test_a_killed_process_leaves_the_old_model_or_the_new_one(models, monkeypatch, step):
    target, replace = models
    child = os.fork()
    if child == 0:  # nothing of this process may go on
        try:
            if step == "after exchange":
                real = writer._exchange
                writer._exchange = lambda a, b: (real(a, b), os._exit(7))
            else:
                setattr(*fails(step, lambda: os._exit(7)))
            replace()
        finally:
            os._exit(8)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert content(target) == (NEW if step in ("after exchange", "rmtree") else OLD)


def test_a_killed_process_between_two_renames(models, monkeypatch):
    """Where the file system exchanges nothing: the old model lies beside its place."""
    target, replace = models
    monkeypatch.setattr(writer, "_exchange", lambda a, b: False)
    child = os.fork()
    if child == 0:
        try:
            setattr(*fails("second rename", lambda: os._exit(7)))
            replace()
        finally:
            os._exit(8)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    (kept,) = (p for p in target.parent.iterdir() if p.name.startswith("target.old-"))
    assert content(kept) == OLD


def test_a_failed_overwrite_through_the_command(tmp_path, monkeypatch, capsys):
    source = plain(tmp_path / "source")
    command = ["convert", str(source), str(tmp_path / "target"), "--group-size", "32"]
    assert main(command) == 0
    before = {p.name: p.read_bytes() for p in (tmp_path / "target").iterdir()}
    monkeypatch.setattr(writer, "_exchange", lambda a, b: raise_(OSError(errno.EBUSY, "Device or resource busy")))
    assert main([*command, "--overwrite", "--bits", "8"]) == 2
    assert "Device or resource busy" in capsys.readouterr().err
    assert {p.name: p.read_bytes() for p in (tmp_path / "target").iterdir()} == before
    assert sorted(os.listdir(tmp_path)) == ["source", "target"]
    monkeypatch.undo()
    assert main([*command, "--overwrite", "--bits", "8"]) == 0
    assert '"bits": 8' in (tmp_path / "target" / "config.json").read_text()


def test_what_is_there_goes_only_where_that_is_asked_for(models):
    target, _ = models
    with pytest.raises(rt.ArgumentError, match="not empty"), writer.written_whole(target) as folder:
        (folder / "config.json").write_text("new")
    assert content(target) == OLD and os.listdir(target.parent) == ["target"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_appears_at_the_target_meanwhile_is_not_replaced(tmp_path, monkeypatch, overwrite):
    source = plain(tmp_path / "source")

    def write_json(path, value):
        (tmp_path / "target").mkdir()
        (tmp_path / "target" / "precious").write_text("x")
        writer.write_json(path, value)

    monkeypatch.setattr(sys.modules["rooftile.checkpoints.convert"], "write_json", write_json)
    with pytest.raises(rt.ArgumentError, match="target"):
        convert(source, tmp_path / "target", rounding=ROUNDING, overwrite=overwrite, progress=False)
    assert content(tmp_path / "target") == {"precious": "x"}
    assert sorted(os.listdir(tmp_path)) == ["source", "target"]


def test_the_exchange_is_one_of_this_system(tmp_path):
    """So that the tests above run the path that is in use."""
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text(name)
    assert writer._exchange(tmp_path / "a", tmp_path / "b")
    assert content(tmp_path / "a") == {"x": "b"} and content(tmp_path / "b") == {"x": "a"}
    with pytest.raises(OSError) as caught:
        writer._exchange(tmp_path / "a", tmp_path / "none")
    assert caught.value.errno == errno.ENOENT


# ---------------------------------------------------------------- the name of a model on a hub


@pytest.mark.parametrize("name", ["org/some-Model.2", "gpt2"])
def test_the_name_of_a_model_on_a_hub(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    folder = name.rpartition("/")[2]
    refused(name, tmp_path, "No such file or folder", "GGUF file", f"hf download {name} --local-dir {folder}")
    with pytest.raises(rt.ArgumentError) as caught:
        convert(tmp_path / "no" / "such", tmp_path / "target")
    assert "hf download" not in str(caught.value)


@pytest.mark.parametrize("arguments", [(5, "target"), ("source", None)])
def test_paths_that_are_none(arguments):
    with pytest.raises(rt.ArgumentTypeError, match=r"convert: (source|target) must be a path, got (5|None)"):
        convert(*arguments)
