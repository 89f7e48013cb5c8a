# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are corrupt, contradict themselves or are not mapped: one typed error that names what is wrong."""

import json
import random
import shutil

import pytest

pytest.importorskip("safetensors")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import rooftile as rt  # noqa: E402
import safetensors.torch  # noqa: E402
import tiny_checkpoints as tiny  # noqa: E402
from rooftile.checkpoints import convert, load  # noqa: E402
from rooftile.checkpoints.folder import TensorFolder  # noqa: E402
from rooftile.checkpoints.patterns import matches  # noqa: E402
from rooftile.integrations.quantizer import RooftileConfig  # noqa: E402
from rooftile.nn import W4Linear  # noqa: E402

UP = "model.layers.1.mlp.up_proj"
SHAPE = tiny.MODULES[UP]
ARGUMENT, SUPPORTED = rt.ArgumentError, rt.NotSupportedError
GPTQ, AWQ, CT = tiny.gptq_config, tiny.awq_config, tiny.compressed_tensors_config
GROUP = CT()["config_groups"]["group_0"]


def gptq(**options):
    return lambda: tiny.tensors(tiny.gptq, {UP: tiny.weight(UP, SHAPE, **options)})


def zero_of_0():
    w = tiny.weight(UP, SHAPE, bits=8)
    w.zeros[5, 1] = 0
    return tiny.tensors(tiny.gptq, {UP: w})


def awq():
    return tiny.tensors(tiny.awq, {UP: tiny.weight(UP, SHAPE)})


def ct():
    return tiny.tensors(lambda w: tiny.compressed_tensors(w, False), {UP: tiny.weight(UP, SHAPE)})


def plain():
    return tiny.tensors(None, {})


def refused(source, tmp_path, error, *words, **options):
    with pytest.raises(error) as caught:
        convert(source, tmp_path / "target", progress=False, **options)
    for word in words:
        assert word in str(caught.value), str(caught.value)
    assert not [p for p in tmp_path.iterdir() if "target" in p.name]
    return str(caught.value)


# ---------------------------------------------------------------- what config.json says


@pytest.mark.parametrize(
    ("state", "config", "error", "words"),
    [
        (gptq(), GPTQ(bits=2), SUPPORTED, ("bits = 2", "read: 4 or 8")),
        (gptq(), GPTQ(bits=8), ARGUMENT, (UP, "qweight has shape [8, 128], expected [16, 128]")),
        (gptq(), GPTQ(bits=3), SUPPORTED, ("bits = 3",)),
        (gptq(), GPTQ(bits="4"), SUPPORTED, ("bits = '4'",)),
        (gptq(), GPTQ(bits=None), ARGUMENT, ("bits is missing",)),
        (gptq(), GPTQ(group_size=None), ARGUMENT, ("group_size is missing",)),
        (gptq(), GPTQ(group_size=0), ARGUMENT, ("group_size must be positive or -1, got 0",)),
        (gptq(), GPTQ(group_size=True), ARGUMENT, ("group_size must be int, got True",)),
        (gptq(), GPTQ(group_size=48), SUPPORTED, (UP, "group_size 48 does not divide", "64 columns")),
        (gptq(), GPTQ(group_size=64), ARGUMENT, (UP, "qzeros has shape [2, 16], expected [1, 16]")),
        (gptq(), GPTQ(sym=None), ARGUMENT, ("sym is missing",)),
        (gptq(), GPTQ(desc_act="yes"), ARGUMENT, ("desc_act must be bool, got 'yes'",)),
        (gptq(), GPTQ(sym=True), ARGUMENT, (UP, "qzeros gives the zero", "expected 8", "sym = true")),
        (gptq(symmetric=True), GPTQ(sym=True, checkpoint_format="gptq_v2"), ARGUMENT, (UP, "the zero 7")),
        (gptq(), GPTQ(checkpoint_format="marlin"), SUPPORTED, ("checkpoint_format = 'marlin'", "'gptq' or 'gptq_v2'")),
        (gptq(), GPTQ(is_marlin_format=True), SUPPORTED, ("is_marlin_format = True",)),
        (gptq(), GPTQ(pack_dtype="int16"), SUPPORTED, ("pack_dtype = 'int16'",)),
        (gptq(), GPTQ(dynamic={"+:.*up": {"bits": 8}}), SUPPORTED, ("dynamic =",)),
        (gptq(), GPTQ(dynamic={"-:.*up_proj": {}}), ARGUMENT, (UP, "has qweight", "leaves '-:.*up_proj' alone")),
        (gptq(), GPTQ(dynamic={"-:(": {}}), ARGUMENT, ("'re:('", "expected a regular expression", "unterminated")),
        (gptq(), GPTQ(adapter={"rank": 8}), SUPPORTED, ("adapter =", "read: null")),
        (gptq(), GPTQ(rotation="hadamard"), SUPPORTED, ("rotation = 'hadamard'", "read: null")),
        (gptq(), GPTQ(format="marlin"), SUPPORTED, ("format = 'marlin'", "'gptq' or 'gptq_v2'")),
        (gptq(), GPTQ(checkpoint_format="gptq", format="gptq_v2"), ARGUMENT,
         ("checkpoint_format = 'gptq', but format = 'gptq_v2'",)),
        (gptq(act_order=True), GPTQ(), ARGUMENT, (UP, "g_idx is not 0, 0", "desc_act = false")),
        (gptq(lowest=0), GPTQ(), ARGUMENT, (UP, "qzeros holds the code 15", "gptq_v2")),
        (zero_of_0, GPTQ(bits=8), ARGUMENT, (UP, "qzeros holds the code 255", "zero 256 or 0")),
        (gptq(bits=8), GPTQ(bits=8, sym=True), ARGUMENT, (UP, "expected 128", "sym = true")),
        (awq, AWQ(bits=8), SUPPORTED, ("bits = 8", "read: 4")),
        (awq, AWQ(version="gemv"), SUPPORTED, ("version = 'gemv'", "'gemm'")),
        (awq, AWQ(version=None, format="gemv"), SUPPORTED, ("format = 'gemv'", "'gemm'")),
        (awq, AWQ(version="gemm", format="gemv"), ARGUMENT, ("version = 'gemm', but format = 'gemv'",)),
        (awq, AWQ(zero_point=False), SUPPORTED, ("zero_point = False",)),
        (awq, AWQ(modules_to_not_convert=["up_proj"]), ARGUMENT, (UP, "modules_to_not_convert", "'up_proj'")),
        (awq, AWQ(modules_to_not_convert="up_proj"), ARGUMENT, ("modules_to_not_convert must be list",)),
        (awq, AWQ(modules_to_not_convert=[5]), ARGUMENT, ("modules_to_not_convert must hold names, got 5",)),
        (ct, CT({"num_bits": 3}), SUPPORTED, ("group_0: weights: num_bits = 3", "read: 4 or 8")),
        (ct, CT({"num_bits": 8}), ARGUMENT, (UP, "weight_packed has shape [128, 8], expected [128, 16]")),
        (ct, CT({"type": "float"}), SUPPORTED, ("type = 'float'",)),
        (ct, CT({"strategy": "tensor"}), SUPPORTED, ("strategy = 'tensor'", "'group' or 'channel'")),
        (ct, CT({"symmetric": None}), ARGUMENT, ("symmetric is missing",)),
        (ct, CT({"dynamic": True}), SUPPORTED, ("dynamic = True",)),
        (ct, CT({"block_structure": [16, 16]}), SUPPORTED, ("block_structure = [16, 16]",)),
        (ct, CT({"actorder": "some"}), SUPPORTED, ("actorder = 'some'",)),
        (ct, CT({"symmetric": False, "actorder": "group"}), ARGUMENT, (UP, "weight_g_idx is missing")),
        (ct, CT(format="marlin-24"), SUPPORTED, ("format = 'marlin-24'", "'pack-quantized'")),
        (ct, CT(kv_cache_scheme={"num_bits": 8}), SUPPORTED, ("kv_cache_scheme =",)),
        (ct, CT(sparsity_config={"format": "dense"}), SUPPORTED, ("sparsity_config =",)),
        (ct, CT({"symmetric": False}, ignore=["re:.*up_proj"]), ARGUMENT, (UP, "`ignore`")),
        (ct, CT(config_groups={}), ARGUMENT, (UP, "`targets` of no group")),
        (ct, CT(config_groups=[]), ARGUMENT, ("config_groups must be an object, got []",)),
        (ct, CT(ignore=["re:("]), ARGUMENT, ("'re:('", "expected a regular expression", "unterminated")),
        (ct, CT(ignore=["lm_head", 5]), ARGUMENT, ("ignore must hold names and 're:' expressions, got 5",)),
        (ct, CT(config_groups={"g": {"targets": ["Linear"]}}), ARGUMENT, ("g: weights must be an object",)),
        (ct, CT(config_groups={"a": GROUP, "b": GROUP}), ARGUMENT, ("'Linear' is a target of two groups",)),
        (plain, {"quant_method": "bitsandbytes"}, SUPPORTED, ("'bitsandbytes' is not read", "gptq, awq")),
        (plain, {"bits": 4}, ARGUMENT, ("quant_method is missing",)),
        (plain, "gptq", ARGUMENT, ("quantization_config must be an object, got 'gptq'",)),
        (awq, CT(), SUPPORTED, (f"{UP}.", "has no place in a llama model")),
    ],
)  # fmt: skip
def test_quantisation(tmp_path, state, config, error, words):
    source = tiny.write(tmp_path / "source", state(), config)
    refused(source, tmp_path, error, str(source), *words)


def test_columns_that_fill_no_words(tmp_path):
    state, few = gptq()(), SHAPE[0] - 2
    for name, t in state.items():
        if name.endswith("proj.weight") and SHAPE[0] in t.shape:
            state[name] = torch.zeros([few if n == SHAPE[0] else n for n in t.shape], dtype=t.dtype)
    source = tiny.write(tmp_path / "source", state, GPTQ(), intermediate_size=few)
    refused(source, tmp_path, SUPPORTED, UP, "the columns of qzeros hold 8 each", f"do not make {few}")


def test_packed_tensors_without_a_word_in_the_config(tmp_path):
    source = tiny.write(tmp_path / "source", awq())
    refused(source, tmp_path, SUPPORTED, f"{UP}.q", "has no quantization_config", rounding=rt.W4A16(32))


def test_activations(tmp_path):
    config = CT()
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8}
    source = tiny.write(tmp_path / "source", ct(), config)
    refused(source, tmp_path, SUPPORTED, "group_0: input_activations =", "read: null")


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"model_type": None}, ARGUMENT, ("model_type must be a string, got None",)),
        ({"model_type": "abacus"}, SUPPORTED, ("model_type 'abacus'",)),
        ({"model_type": "vit"}, ARGUMENT, ("no causal language model",)),
        ({"model_type": "own", "auto_map": {"AutoModel": "own.Model"}}, SUPPORTED, ("model_type 'own'",)),
        ({"hidden_size": "64"}, ARGUMENT, ("hidden_size", "expected int", "str", "'64'")),
        ({"hidden_size": 0}, ARGUMENT, ("hidden_size must be 1 to 2147483647, got 0",)),
        ({"hidden_size": 96}, ARGUMENT, ("model.embed_tokens.weight", "[96, 64]", "[96, 96]")),
        ({"num_hidden_layers": 10**9}, ARGUMENT, ("num_hidden_layers is 1000000000",)),
        ({"num_hidden_layers": -1}, ARGUMENT, ("num_hidden_layers must be 1 to 2147483647, got -1",)),
        ({"num_hidden_layers": 0}, ARGUMENT, ("num_hidden_layers must be 1 to 2147483647, got 0",)),
        ({"text_config": {"num_hidden_layers": -1}}, ARGUMENT, ("text_config.num_hidden_layers must be 1 to",)),
        ({"model_type": "gpt2", "n_head": 0}, ARGUMENT, ("n_head must be 1 to 2147483647, got 0",)),
        ({"model_type": "bart", "encoder_layers": -1}, ARGUMENT, ("encoder_layers must be 0 to 2147483647, got -1",)),
        ({"num_attention_heads": -1}, ARGUMENT, ("num_attention_heads must be 1 to 2147483647, got -1",)),
        ({"num_key_value_heads": 0}, ARGUMENT, ("num_key_value_heads must be 1 to 2147483647, got 0",)),
        ({"head_dim": -16}, ARGUMENT, ("head_dim must be 1 to 2147483647, got -16",)),
        ({"intermediate_size": -128}, ARGUMENT, ("intermediate_size must be 0 to 2147483647, got -128",)),
        ({"num_hidden_layers": 3}, ARGUMENT, ("model.layers.2.", "is missing")),
        ({"num_hidden_layers": 1}, SUPPORTED, ("model.layers.1.", "has no place in a llama model")),
        ({"attention_bias": False}, SUPPORTED, ("_proj.bias", "has no place")),
        ({"vocab_size": 2**62}, ARGUMENT, ("vocab_size must be 1 to 2147483647, got 4611686018427387904",)),
    ],
)
def test_models(tmp_path, changes, error, words):
    source = tiny.write(tmp_path / "source", plain(), **changes)
    refused(source, tmp_path, error, str(source), *words, rounding=rt.W4A16(32))


def test_of_a_long_reason_the_begin_is_told(tmp_path):
    source = tiny.write(tmp_path / "source", plain(), hidden_act="x" * 5000)
    said = refused(source, tmp_path, ARGUMENT, "causal language model of it: ", rounding=rt.W4A16(32))
    reason = said.partition("causal language model of it: ")[2]
    assert len(reason) == 300 and reason.endswith("xxx")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"model_type": 5}'])
def test_config_that_is_none(tmp_path, content):
    source = tiny.write(tmp_path / "source", plain())
    (source / "config.json").write_bytes(content)
    refused(source, tmp_path, ARGUMENT, str(source / "config.json"))


# ---------------------------------------------------------------- tensors


def changed(state, name, tensor):
    """The tensor replaced, or dropped (None)."""
    if tensor is None:
        del state[name]
    else:
        state[name] = tensor(state[name])
    return state


def first(value):
    """A tensor whose first element is another."""

    def change(tensor):
        tensor = tensor.clone()
        tensor.view(-1)[0] = value
        return tensor

    return change


@pytest.mark.parametrize(
    ("state", "config", "suffix", "change", "words"),
    [
        (gptq(), GPTQ(), "qzeros", None, ("qzeros is missing",)),
        (gptq(), GPTQ(), "scales", None, ("scales is missing",)),
        (gptq(), GPTQ(desc_act=True), "g_idx", None, ("g_idx is missing",)),
        (gptq(), GPTQ(), "qweight", lambda t: t[:-1].contiguous(), ("qweight has shape [7, 128], expected [8, 128]",)),
        (gptq(), GPTQ(), "qweight", lambda t: t.long(), ("qweight has dtype I64, expected I32",)),
        (gptq(), GPTQ(), "scales", lambda t: t.float(), ("scales has dtype F32, expected F16 or BF16",)),
        (gptq(), GPTQ(), "scales", lambda t: t[None], ("scales has shape [1, 2, 128], expected [2, 128]",)),
        (gptq(), GPTQ(desc_act=True), "g_idx", first(2), ("g_idx holds the group 2, expected 0 to 1",)),
        (gptq(), GPTQ(desc_act=True), "g_idx", first(-1), ("g_idx holds the group -1",)),
        (gptq(), GPTQ(desc_act=True), "g_idx", first(1), ("g_idx puts 31 columns into group 0", "group_size = 32")),
        (awq, AWQ(), "qzeros", lambda t: t[:1].contiguous(), ("qzeros has shape [1, 16], expected [2, 16]",)),
        (awq, AWQ(), "qweight", lambda t: t.t().contiguous(), ("qweight has shape [16, 64], expected [64, 16]",)),
        (ct, CT({"symmetric": False}), "weight_shape", first(129), ("weight_shape holds [129, 64]",)),
        (ct, CT({"symmetric": False}), "weight_shape", None, ("weight_shape is missing",)),
        (ct, CT({"symmetric": False}), "weight_zero_point", None, ("weight_zero_point is missing",)),
        (ct, CT({"symmetric": False}), "weight_zero_point", lambda t: t.to(torch.int8), ("dtype I8, expected I32",)),
        (ct, CT({"symmetric": False}), "weight_scale", lambda t: t[:, :1].clone(), ("weight_scale has shape",)),
    ],
)  # fmt: skip
def test_packed_tensors(tmp_path, state, config, suffix, change, words):
    source = tiny.write(tmp_path / "source", changed(state(), f"{UP}.{suffix}", change), config)
    refused(source, tmp_path, ARGUMENT, str(source / "model.safetensors"), UP, *words)


def test_symmetric_weights_with_zero_points(tmp_path):
    """A tensor that the config has no use for would be left out."""
    source = tiny.write(tmp_path / "source", ct(), CT())
    refused(source, tmp_path, ARGUMENT, UP, "weight_zero_point is there", "no use for it")


@pytest.mark.parametrize(
    ("name", "change", "error", "words"),
    [
        ("model.norm.weight", None, ARGUMENT, ("is missing",)),
        ("model.norm.weight", lambda t: t[:-1].contiguous(), ARGUMENT, ("shape [63], expected [64]",)),
        ("model.norm.weight", lambda t: t.to(torch.float8_e4m3fn), SUPPORTED, ("dtype F8_E4M3",)),
        (f"{UP}.weight", lambda t: t.to(torch.int8), SUPPORTED, ("dtype I8",)),
        (f"{UP}.weight", lambda t: t.double(), SUPPORTED, ("dtype F64", "rounded are F32, F16, BF16")),
        (f"{UP}.weight", lambda t: t[:, :32].contiguous(), ARGUMENT, ("shape [128, 32], expected [128, 64]",)),
    ],
)
def test_plain_tensors(tmp_path, name, change, error, words):
    source = tiny.write(tmp_path / "source", changed(plain(), name, change))
    refused(source, tmp_path, error, str(source), name, *words, rounding=rt.W4A16(32))


def test_tied_embeddings_with_a_head_in_four_bits(tmp_path):
    head = {"lm_head": tiny.weight("lm_head", (tiny.VOCAB, tiny.HIDDEN))}
    source = tiny.write(tmp_path / "source", tiny.tensors(tiny.awq, head), AWQ(), tie_word_embeddings=True)
    refused(source, tmp_path, SUPPORTED, "tie_word_embeddings", "'lm_head'")


def test_what_is_no_linear_layer(tmp_path):
    source = tiny.write(tmp_path / "source", plain(), AWQ())
    state = safetensors.torch.load_file(source / "model.safetensors")
    state["model.embed_tokens.qweight"] = state.pop("model.embed_tokens.weight")
    safetensors.torch.save_file(state, source / "model.safetensors")
    refused(source, tmp_path, SUPPORTED, "model.embed_tokens", "packed weights of a Embedding")


def test_rounding_arguments(tmp_path):
    source = tiny.write(tmp_path / "source", plain())
    odd = tiny.write(tmp_path / "odd", tiny.tensors(None, {}, hidden_size=72), hidden_size=72)  # has no group
    refused(odd, tmp_path, ARGUMENT, "model.layers.0.self_attn.q_proj", "K = 72; choose another group_size or skip the")
    refused(source, tmp_path, rt.ArgumentTypeError, "rounding must be a rooftile.W4A16", rounding=32)
    refused(source, tmp_path, rt.ArgumentTypeError, "skip must be names", rounding=rt.W4A16(32), skip=[5])
    refused(source, tmp_path, ARGUMENT, "dtype is for GGUF files", dtype="bfloat16")
    source = tiny.write(tmp_path / "awq", awq(), AWQ())
    refused(source, tmp_path, ARGUMENT, "skip is for layers that would be rounded", skip="*.q_proj")


def test_nothing_in_four_bits(tmp_path):
    source = tiny.write(tmp_path / "source", plain())
    refused(
        source, tmp_path, SUPPORTED, str(source), "no layer would be in 4 or 8 bits", rounding=rt.W4A16(32), skip="*"
    )


# ---------------------------------------------------------------- files


def test_a_pattern_that_skips_nothing(tmp_path):
    source = tiny.write(tmp_path / "source", plain())
    refused(source, tmp_path, ARGUMENT, "skip: no layer", "'*.mlpp.*'", rounding=rt.W4A16(32), skip=["*.mlpp.*"])


def test_empty_paths(tmp_path, monkeypatch):
    source = tiny.write(tmp_path / "source", plain())
    monkeypatch.chdir(tmp_path)
    for arguments, name in (((source, ""), "target"), (("", tmp_path / "target"), "source")):
        with pytest.raises(rt.ArgumentError, match=f"convert: {name} is empty"):
            convert(*arguments, progress=False)
    with pytest.raises(rt.ArgumentError, match="load: source is empty"):
        load("", progress=False)


def test_what_is_no_source(tmp_path):
    refused(tmp_path / "none", tmp_path, ARGUMENT, "none", "No such file")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", tmp_path, ARGUMENT, "config.json")
    (tmp_path / "file").write_text("{}")
    refused(tmp_path / "file", tmp_path, ARGUMENT, "file: not a GGUF file")
    with pytest.raises(rt.ArgumentError, match="file: not a folder; expected one with"):
        TensorFolder(tmp_path / "file")
    source = tiny.write(tmp_path / "source", plain())
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    refused(source, tmp_path, ARGUMENT, "model.safetensors.index.json: neither is there")
    (source / "pytorch_model.bin").rename(source / "model.safetensors")
    (source / "model.safetensors.index.json").write_text("{}")
    refused(source, tmp_path, ARGUMENT, "model.safetensors.index.json: both are there")


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "", "model.bin", "c:\\x.safetensors"]
)
def test_an_index_that_leads_out_of_the_folder(tmp_path, name):
    source = tiny.write(tmp_path / "source", plain(), shards=2)
    safetensors.torch.save_file({}, tmp_path / "x.safetensors")
    index = source / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    refused(source, tmp_path, ARGUMENT, str(index), repr(name), "in this folder")


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 1}}']
)
def test_an_index_that_is_none(tmp_path, content):
    source = tiny.write(tmp_path / "source", plain(), shards=2)
    (source / "model.safetensors.index.json").write_text(content)
    refused(source, tmp_path, ARGUMENT, "model.safetensors.index.json")


def test_an_index_that_is_wrong(tmp_path):
    source = tiny.write(tmp_path / "source", plain(), shards=3)
    files = sorted(source.glob("*.safetensors"))
    index = source / "model.safetensors.index.json"
    right = json.loads(index.read_text())
    for wrong in ({"model.norm.weight": files[0].name}, {"model.norm.weight": files[1].name}, {"more": files[2].name}):
        changed = {"weight_map": {**right["weight_map"], **wrong}}
        index.write_text(json.dumps(changed))
        if changed != {"weight_map": right["weight_map"]}:
            refused(source, tmp_path, ARGUMENT, next(iter(wrong)), "is missing", "says it is here")
    index.write_text(json.dumps(right))
    shutil.copy(files[0], source / "kept")
    shutil.copy(files[1], files[0])
    refused(source, tmp_path, ARGUMENT, "is in ", "too; expected in one file")
    shutil.copy(source / "kept", files[0])
    files[2].unlink()
    refused(source, tmp_path, ARGUMENT, str(files[2]), "No such file")


def test_files_cut_short_anywhere(tmp_path):
    """Every length of the header's beginning, some of the rest: an error that names the file, and no crash."""
    source = tiny.write(tmp_path / "source", awq(), AWQ())
    file = source / "model.safetensors"
    whole = file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for length in (*range(0, 24), header // 2, header - 1, header, header + 1, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        refused(source, tmp_path, ARGUMENT, str(file))
    for extra in (b"\0", whole):
        file.write_bytes(whole + extra)
        refused(source, tmp_path, ARGUMENT, str(file))


def test_headers_with_one_byte_changed(tmp_path):
    """Either the checkpoint is refused with a typed error, or it has still every tensor the model needs."""
    source = tiny.write(tmp_path / "source", awq(), AWQ())
    file = source / "model.safetensors"
    whole = file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    rng = random.Random(0)
    for position in (*range(8), *(rng.randrange(8, header) for _ in range(150))):
        data = bytearray(whole)
        data[position] ^= 1 << rng.randrange(8)
        file.write_bytes(data)
        try:
            convert(source, tmp_path / "target", overwrite=True, progress=False)
        except rt.RooftileError as e:
            assert str(source) in str(e)


@pytest.mark.parametrize("length", [0, 2**24, 2**31, 2**63 - 1, 2**64 - 1])
def test_header_lengths(tmp_path, length):
    source = tiny.write(tmp_path / "source", plain())
    file = source / "model.safetensors"
    file.write_bytes(length.to_bytes(8, "little") + file.read_bytes()[8:])
    refused(source, tmp_path, ARGUMENT, str(file))


@pytest.mark.parametrize(
    "tensor",
    [
        {"dtype": "F16", "shape": [64], "data_offsets": [0, 256]},
        {"dtype": "F16", "shape": [64], "data_offsets": [128, 0]},
        {"dtype": "F16", "shape": [64], "data_offsets": [64, 192]},
        {"dtype": "F16", "shape": [2**62, 2**62], "data_offsets": [0, 128]},
        {"dtype": "F16", "shape": [-64], "data_offsets": [0, 128]},
        {"dtype": "F99", "shape": [64], "data_offsets": [0, 128]},
        {"dtype": "F16", "shape": [64]},
        5,
    ],
)
def test_tensors_that_do_not_fit_their_file(tmp_path, tensor):
    source = tiny.write(tmp_path / "source", plain())
    file = source / "model.safetensors"
    header = json.dumps({"model.norm.weight": tensor}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(128))
    refused(source, tmp_path, ARGUMENT, str(file))


# ---------------------------------------------------------------- folders that convert wrote


@pytest.fixture
def written(tmp_path):
    source = tiny.write(tmp_path / "source", awq(), AWQ())
    convert(source, tmp_path / "target", progress=False)
    return tmp_path / "target"


def test_written_folders_with_a_tensor_gone_or_changed(written):
    """transformers alone would leave random bytes in its place, with a warning."""
    file = written / "model.safetensors"
    right = safetensors.torch.load_file(file)
    for suffix in ("codes", "scales", "offsets", "_extra_state"):
        state = dict(right)
        del state[f"{UP}.{suffix}"]
        safetensors.torch.save_file(state, file, metadata={"format": "pt"})
        with pytest.raises(rt.ArgumentError, match=rf"module '{UP}': tensor '{UP}\.{suffix}' is missing"):
            transformers.AutoModelForCausalLM.from_pretrained(written)
    state = {**right, f"{UP}.codes": right[f"{UP}.codes"][:-64].clone()}
    safetensors.torch.save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(rt.ArgumentError, match=r"codes' has shape \[\d+\], expected \["):
        transformers.AutoModelForCausalLM.from_pretrained(written)
    state = {**right, f"{UP}.codes": right[f"{UP}.codes"].view(torch.int8)}
    safetensors.torch.save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(rt.ArgumentError, match=r"codes' has dtype I8, expected U8"):
        transformers.AutoModelForCausalLM.from_pretrained(written)
    extra = right[f"{UP}._extra_state"].clone()
    extra[0] += 1
    safetensors.torch.save_file({**right, f"{UP}._extra_state": extra}, file, metadata={"format": "pt"})
    with pytest.raises(rt.ArgumentError, match="scales in layout 2; this module is"):
        transformers.AutoModelForCausalLM.from_pretrained(written)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda q: q.update(layout=2), SUPPORTED, "layout is 2, this rooftile reads 1"),
        (lambda q: q.pop("layout"), SUPPORTED, "layout is None"),
        (lambda q: q.pop("layouts"), ARGUMENT, "layouts is missing"),
        (lambda q: q.update(layouts={}), ARGUMENT, "layouts must be a list"),
        (lambda q: q.update(layouts=[[]]), ARGUMENT, r"layouts\[0\] must have bits, kind, group_size"),
        (lambda q: q["layouts"][0].pop("kind"), ARGUMENT, r"layouts\[0\] must have bits, kind, group_size"),
        (lambda q: q["layouts"][0].update(kind="cubic"), ARGUMENT, "got 'cubic'"),
        (lambda q: q["layouts"][0].update(bits=3), ARGUMENT, "bits must be 4 or 8, got 3"),
        (lambda q: q["layouts"][0].update(bits="4"), ARGUMENT, "bits must be int, got '4'"),
        (lambda q: q["layouts"][0].update(bits=8), ARGUMENT, "codes' has shape"),
        (lambda q: q["layouts"][0].update(bits=8, kind="minima"), ARGUMENT, "one of symmetric, integer and"),
        (lambda q: q["layouts"][0].update(group_size="32"), ARGUMENT, "group_size must be int, got '32'"),
        (lambda q: q["layouts"][0].update(group_size=48), ARGUMENT, "group_size"),
        (lambda q: q["layouts"][0].update(group_size=64), ARGUMENT, "scales' has shape"),
        (lambda q: q["layouts"][0].update(act_order=True), ARGUMENT, "perm' is missing"),
        (lambda q: q["layouts"][0]["modules"].append(UP), ARGUMENT, "modules must be different names"),
        (lambda q: q["layouts"][0]["modules"].append("model.none"), ARGUMENT, "'model.none' is not in a Llama"),
        (lambda q: q["layouts"][0]["modules"].append("model.norm"), ARGUMENT, "'model.norm' is a LlamaRMSNorm"),
        (lambda q: q.update(sparse=True), ARGUMENT, "sparse"),
    ],
)  # fmt: skip
def test_written_folders_with_another_config(written, change, error, words):
    config = json.loads((written / "config.json").read_text())
    change(config["quantization_config"])
    (written / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=words):
        transformers.AutoModelForCausalLM.from_pretrained(written)


@pytest.mark.parametrize(
    ("source", "change", "words"),
    [
        ((gptq(act_order=True)(), GPTQ(desc_act=True)), {"act_order": False}, r"perm' is there.* has no act-order"),
        ((awq(), AWQ()), {"kind": "symmetric"}, r"offsets' is there.* has no zeros or minima"),
    ],
)
def test_written_folders_that_hold_more_than_the_config_says(tmp_path, source, change, words):
    convert(tiny.write(tmp_path / "source", *source), tmp_path / "target", progress=False)
    file = tmp_path / "target" / "config.json"
    config = json.loads(file.read_text())
    for layout in config["quantization_config"]["layouts"]:
        layout.update(change)
    file.write_text(json.dumps(config))
    with pytest.raises(rt.ArgumentError, match=words):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "target")


def test_config_arguments(tmp_path):
    for bad, error in (
        ({"group_size": "32"}, ARGUMENT),
        ({"zeros": "integer"}, ARGUMENT),
        ({"bits": 3}, ARGUMENT),
        ({"bits": True}, ARGUMENT),
        ({"zeros": "minima", "bits": 8}, ARGUMENT),
        ({"skip": [5]}, rt.ArgumentTypeError),
        ({"quant_method": "gptq"}, ARGUMENT),
    ):
        with pytest.raises(error, match=next(iter(bad))):
            RooftileConfig(**bad)
    odd = tiny.write(tmp_path / "odd", tiny.tensors(None, {}, hidden_size=72), hidden_size=72)
    with pytest.raises(rt.ArgumentError, match=r"RooftileConfig: model.layers.0.self_attn.q_proj: .*choose another"):
        transformers.AutoModelForCausalLM.from_pretrained(odd, quantization_config=RooftileConfig(128))
    source = tiny.write(tmp_path / "source", plain())
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source, quantization_config=RooftileConfig(32, skip="*.q_proj")
    )
    assert sum(isinstance(m, W4Linear) for m in model.modules()) == 12


def test_expressions_are_matched_with_names_of_any_iterable():
    """Each once, however often it is given."""
    names, expressions = ["a.b", "a.c", "b"], ["re:a", "b", "re:a", "re:.*c"]
    found = matches("here", iter(expressions), iter(names))
    assert found == {"re:a": {"a.b", "a.c"}, "b": {"b"}, "re:.*c": {"a.c"}}
