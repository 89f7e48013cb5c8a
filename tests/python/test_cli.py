# SPDX-License-Identifier: Apache-2.0
"""The command line: what is mistyped gives one line and status 2; ppl runs from text and from token ids."""

import importlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

pytest.importorskip("gguf")
pytest.importorskip("torch")
pytest.importorskip("transformers")

import cases
import rooftile
import tiny_gguf
import transformers
from rooftile import _results
from rooftile.cli import main

CHUNKS = [[(7 * i + j) % 300 for j in range(40)] for i in range(3)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_gguf.write(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture
def ids(tmp_path):
    path = tmp_path / "ids.json"
    path.write_text(json.dumps({"what": "numbers", "chunks": CHUNKS}))
    return str(path)


def test_help_lists_the_commands_and_loads_no_torch():
    code = (
        "import sys; from rooftile.cli import main; status = main([]); print('torch' in sys.modules); sys.exit(status)"
    )
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(rooftile.__file__))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 2 and done.stdout.splitlines()[-1] == "False"
    assert " ppl " in done.stdout


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0 and capsys.readouterr().out == f"rooftile {rooftile.__version__}\n"


def test_a_package_that_is_missing(monkeypatch, capsys):
    """The command that helps, which works before there is a release: the packages of the extra by their names."""
    project = pathlib.Path(__file__).parents[2] / "pyproject.toml"
    extras = dict(re.findall(r"^(torch|hf|demo) = \[(.*)\]$", project.read_text(), re.M))
    packages = re.findall(r'"([a-z]+)>=', ", ".join(extras[name] for name in ("torch", "hf", "demo")))

    def run(args):
        raise ModuleNotFoundError("No module named 'tokenizers.models'", name="tokenizers.models")

    monkeypatch.setattr("rooftile.cli.ppl.run", run)
    assert main(["ppl"]) == 1
    assert one_line(capsys).endswith(f"needs the package 'tokenizers.models': pip install {' '.join(packages)}\n")
    monkeypatch.setattr("rooftile.cli.ppl.run", lambda args: importlib.import_module("no_such_module"))
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):  # a fault of ours
        main(["ppl"])


def one_line(capsys):
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("rooftile ppl: error: ")
    return err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "none.gguf", "--token-ids", "IDS"], ("none.gguf", "No such file")),
        (["--model", "IDS", "--token-ids", "IDS"], ("not a GGUF file",)),
        (["--model", "MODEL", "--token-ids", "none.json"], ("--token-ids none.json", "No such file")),
        (["--model", "MODEL", "--token-ids", "MODEL"], ("--token-ids", "UTF-8")),
        (["--model", "MODEL", "--text", "MODEL"], ("--text", "UTF-8")),
        (["--model", "MODEL", "--text", "none.txt"], ("--text none.txt", "No such file")),
        (["--model", "MODEL", "--text", "IDS", "--chunks", "9"], ("--text", "tokens", "9 asked for")),
        (["--model", "MODEL", "--text", "IDS", "--chunk-tokens", "1"], ("--chunk-tokens", "at least 2")),
        (["--model", "MODEL", "--token-ids", "IDS", "--chunks", "4"], ("--chunks", "4", "has 3")),
        (["--model", "MODEL", "--token-ids", "IDS", "--chunk-tokens", "8"], ("--chunk-tokens",)),
        (["--model", "MODEL", "--token-ids", "IDS", "--formats", "int3"], ("--formats", "'int3'", "int4-kivi")),
        (["--model", "MODEL", "--token-ids", "IDS", "--json", "no/such/folder/a.json"], ("--json", "does not exist")),
        (["--model", "MODEL", "--token-ids", "IDS", "--json", "."], ("--json .", "is a folder")),
        (["--model", "MODEL", "--token-ids", "IDS", "--device", "abacus"], ("--device", "abacus", "cpu")),
        pytest.param(
            ["--model", "MODEL", "--token-ids", "IDS", "--device", "cuda"],
            ("--device", "cuda", "cpu"),
            marks=pytest.mark.skipif("cuda" in cases.devices(), reason="there is a GPU"),
        ),
    ],
)
def test_mistakes(model, ids, capsys, arguments, words):
    arguments = [{"MODEL": model, "IDS": ids}.get(a, a) for a in arguments]
    assert main(["ppl", *arguments]) == 2
    line = one_line(capsys)
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["pl"], "ppl"),
        (["converts", "a", "b"], "convert"),
        (["ppl", "--formats", "int5"], "int8"),
        (["ppl", "--formats", "int8,int4-kiwi"], "int4-kivi"),
        (["ppl", "--weights", "w4a6"], "w4a16"),
        (["ppl", "--dtype", "bfloat"], "bfloat16"),
        (["convert", "a", "b", "--zeros", "symmetrik"], "symmetric"),
        (["convert", "a", "b", "--dtype", "flaot16"], "float16"),
        (["bench", "decoder"], "decode"),
        (["bench", "ops", "--case", "rmsnorm_t64_h4096"], "rms_norm_t64_h4096"),
        (["bench", "linear", "--case", "k4096_n4096"], "k4096_n4096_m1"),
        (["bench", "linear", "--without", "cublass"], "cublas"),
    ],
)
def test_what_was_meant(capsys, arguments, meant):
    try:
        status = main(arguments)
    except SystemExit as e:  # argparse's own
        status = e.code
    assert status == 2
    assert capsys.readouterr().err.endswith(f', did you mean "{meant}"?\n')


def test_what_is_like_nothing_has_no_hint(capsys):
    for arguments in (["xyz"], ["ppl", "--weights", "???"], ["convert", "a", "b", "--bits", "5"]):
        with pytest.raises(SystemExit):
            main(arguments)
        err = capsys.readouterr().err
        assert "invalid choice" in err and "did you mean" not in err
    assert main(["ppl", "--formats", "xyz"]) == 2
    assert "did you mean" not in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--chunks", "--chunk-tokens", "--threads"])
@pytest.mark.parametrize("value", ["-1", "0", "x", "1.5"])
def test_numbers(option, value, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["ppl", option, value])
    assert caught.value.code == 2
    assert f"expected a whole number from 1 on, got '{value}'" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["-1", "0", "x", "nan", "inf"])
def test_seconds_of_a_benchmark(value, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["bench", "ops", "--list", "--seconds", value])
    assert caught.value.code == 2
    assert f"--seconds: expected a number above 0, got '{value}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "{}",
        '{"chunks": 5}',
        '{"chunks": []}',
        '{"chunks": [[]]}',
        '{"chunks": [[1]]}',
        '{"chunks": [[1, 2], [1]]}',
        '{"chunks": [[1, "2"]]}',
        '{"chunks": [[1, -2]]}',
        '{"chunks": [[1, 320]]}',
        "[" * 100_000,
    ],
)
def test_bad_token_ids(model, tmp_path, capsys, content):
    path = tmp_path / "ids.json"
    path.write_text(content)
    assert main(["ppl", "--model", model, "--token-ids", str(path)]) == 2
    one_line(capsys)


@pytest.mark.parametrize("weights", ["dequantize", "w4a16", "both"])
def test_ppl(model, ids, tmp_path, capsys, weights):
    out = tmp_path / "out.json"
    command = ["ppl", "--model", model, "--token-ids", ids, "--formats", "fp32,int4-kivi", "--weights", weights]
    assert main([*command, "--chunks", "2", "--commit", "abc1234", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    rows = {row["name"]: row for row in report["rows"]}
    plain, packed = ["fp32", "int4-kivi"], ["W4A16", "W4A16 + fp32", "W4A16 + int4-kivi"]
    assert list(rows) == ["baseline", *{"dequantize": plain, "w4a16": packed, "both": plain + packed}[weights]]
    prefix = "W4A16 + " if weights == "w4a16" else ""
    assert report["family"] == "ppl" and report["commit"] == "abc1234" and report["seconds"] > 0
    assert report["machine"] == _results.machine("cpu")
    assert report["run"]["chunks"] == 2 and report["run"]["scored_tokens"] == 78
    assert rows[prefix + "fp32"]["bits"] == 64
    assert rows[prefix + "fp32"]["dnll"] == pytest.approx(0, abs=1e-5)
    assert rows[prefix + "int4-kivi"]["kl"] > 1e-6
    printed = capsys.readouterr().out
    for name in rows:
        assert name in printed


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    """The same model and tokenizer as transformers saves them."""
    from rooftile.loaders import load_gguf, load_tokenizer

    path = tmp_path_factory.mktemp("folder") / "tiny"
    load_gguf(model, dtype="float32").save_pretrained(path)
    load_tokenizer(model).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def packed(folder, tmp_path_factory):
    """The folder's model with rounded layers."""
    path = tmp_path_factory.mktemp("folder") / "packed"
    assert main(["convert", str(folder), str(path), "--group-size", "32"]) == 0
    return path


def ppl_rows(source, out, *options):
    assert main(["ppl", "--model", str(source), *options, "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    return report, {row["name"]: row for row in report["rows"]}


def test_ppl_of_a_folder(model, folder, ids, tmp_path):
    given = ("--token-ids", ids, "--formats", "fp32,int4-kivi", "--dtype", "float32")
    _, of_file = ppl_rows(model, tmp_path / "file.json", *given)
    report, of_folder = ppl_rows(folder, tmp_path / "folder.json", *given, "--weights", "both")
    assert report["run"]["file"] == "tiny" and report["run"]["tokenizer"] == "token ids as given"
    assert list(of_folder) == [*of_file, "W4A16", "W4A16 + fp32", "W4A16 + int4-kivi"]
    for name, row in of_file.items():  # the same weights
        assert of_folder[name]["nll_per_chunk"] == pytest.approx(row["nll_per_chunk"], rel=1e-6)
        assert of_folder[name]["weights"] == "stored" and row["weights"] == "dequantize"
    assert of_folder["W4A16"]["kl"] > 1e-6 and of_folder["W4A16"]["weights"] == "w4a16"


@pytest.mark.parametrize("family", ["Qwen2", "Mixtral"])
def test_ppl_of_a_config_without_head_dim(family, ids, tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
             "num_key_value_heads": 1, "vocab_size": 300}  # fmt: skip
    made = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**sizes))
    made.save_pretrained(tmp_path / "made")
    config = json.loads((tmp_path / "made/config.json").read_text())
    config.pop("head_dim", None)
    (tmp_path / "made/config.json").write_text(json.dumps(config))
    _, rows = ppl_rows(tmp_path / "made", tmp_path / "out.json", "--token-ids", ids, "--formats", "int8")
    assert 16 <= rows["int8"]["bits"] < 18


def test_ppl_of_a_folder_and_a_text(model, folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("hello world 12 " * 60)
    given = ("--text", str(text), "--formats", "int8", "--chunk-tokens", "16", "--chunks", "2", "--dtype", "float32")
    _, of_file = ppl_rows(model, tmp_path / "file.json", *given)
    report, of_folder = ppl_rows(folder, tmp_path / "folder.json", *given)
    assert of_folder["int8"]["nll_per_chunk"] == pytest.approx(of_file["int8"]["nll_per_chunk"], rel=1e-6)
    assert report["run"]["tokenizer"].endswith(" of the folder")


def test_ppl_of_a_folder_of_rounded_weights(packed, ids, tmp_path, capsys):
    """Its baseline is the model as it is stored, and there is nothing to round."""
    _, rows = ppl_rows(packed, tmp_path / "out.json", "--token-ids", ids, "--formats", "fp32,int8")
    assert rows["fp32"]["dnll"] == pytest.approx(0, abs=1e-5) and rows["baseline"]["weights"] == "stored"
    for weights in ("w4a16", "both"):
        capsys.readouterr()
        assert main(["ppl", "--model", str(packed), "--token-ids", ids, "--weights", weights]) == 2
        error = one_line(capsys)
        assert f"--weights {weights}" in error and "rounded already" in error


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_ppl_of_a_folder_without_a_file(folder, tmp_path, capsys, missing):
    text = tmp_path / "text.txt"
    text.write_text("hello world 12 " * 60)
    path = shutil.copytree(folder, tmp_path / "part")
    (path / missing).unlink()
    capsys.readouterr()
    assert main(["ppl", "--model", str(path), "--text", str(text), "--chunk-tokens", "16", "--chunks", "2"]) == 2
    assert str(path) in one_line(capsys)


@pytest.mark.parametrize("option", ["--model", "--text", "--token-ids"])
def test_the_figures_do_not_replace_what_was_read(model, ids, capsys, option):
    given = {"--model": model, "--text": ids, "--token-ids": ids}[option]
    content = pathlib.Path(given).read_bytes()
    rest = [] if option == "--model" else ["--model", model]
    assert main(["ppl", *rest, option, given, "--json", given]) == 2
    assert f"--json {given}: is (or lies in) {option}; expected another file" in one_line(capsys)
    assert pathlib.Path(given).read_bytes() == content


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize("command", ["env", pytest.param("ppl", marks=pytest.mark.slow)])
def test_a_full_disk_below_the_output(model, ids, tmp_path, command):
    """One line, status 1; the figures are in their file."""
    out = tmp_path / "out.json"
    arguments = {
        "env": ["env", "--markdown"],
        "ppl": ["ppl", "--model", model, "--token-ids", ids, "--formats", "fp32", "--chunks", "1", "--json", str(out)],
    }[command]
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(rooftile.__file__))}
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "rooftile", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
    assert done.returncode == 1
    assert done.stderr == f"rooftile {command}: error: standard output: No space left on device\n"
    assert command == "env" or json.loads(out.read_text())["family"] == "ppl"


@pytest.mark.skipif("cuda" not in cases.devices(), reason="no GPU, or a build without GPU kernels")
def test_ppl_on_a_gpu(model, ids, tmp_path, capsys):
    out = tmp_path / "out.json"
    command = ["ppl", "--model", model, "--token-ids", ids, "--device", "cuda"]
    assert main([*command, "--weights", "w4a16", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    formats = [None, None, "int8", "int4", "int4-kivi-sym", "int4-kivi", "fp8", "int8-kivi-sym"]
    assert [row["format"] for row in report["rows"]] == formats
    assert report["run"]["device"] == "cuda:0" and report["run"]["dtype"] == "bfloat16"
    assert all(row["kl"] >= 0 for row in report["rows"]) and "on cuda:0" in capsys.readouterr().out
    assert all(row["kl"] < 0.1 for row in report["rows"] if row["format"] in (None, "int8", "int4-kivi"))


@pytest.mark.parametrize("arguments", [["env"], ["--help"], ["--version"]])
def test_a_closed_output(arguments):
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(rooftile.__file__))}
    command = 'exec "$0" -m rooftile "$@" >&-'
    done = subprocess.run(
        ["sh", "-c", command, sys.executable, *arguments], stderr=subprocess.PIPE, text=True, env=environment
    )
    assert done.returncode == 1
    assert done.stderr == "rooftile: error: standard output: is closed\n"
