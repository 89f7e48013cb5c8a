# SPDX-License-Identifier: Apache-2.0
"""GGUF files: right models from sound ones, one typed error from everything else."""

import os
import struct
import weakref

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import rooftile as rt  # noqa: E402
import tiny_gguf  # noqa: E402
from rooftile.errors import ArgumentError, ArgumentTypeError, NotSupportedError, RooftileError  # noqa: E402
from rooftile.loaders import gguf as loader  # noqa: E402
from rooftile.loaders import load_gguf, load_tokenizer, read_gguf  # noqa: E402
from rooftile.loaders.gguf import gguf_config, half_split_rows  # noqa: E402

IDS = np.array([5, 80, 260, 7, 300, 44, 258, 99, 12, 0, 319])


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def tiny(request, tmp_path_factory):
    data = tiny_gguf.tensors(request.param)
    return (
        request.param,
        tiny_gguf.write(tmp_path_factory.mktemp("gguf") / f"{request.param}.gguf", request.param),
        data,
    )


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny_gguf.write(tmp_path_factory.mktemp("gguf") / "llama.gguf")


def test_logits_match_a_float64_forward(tiny):
    arch, path, data = tiny
    model = load_gguf(path, dtype=torch.float32)
    with torch.no_grad():
        ours = model(torch.tensor(IDS)[None], use_cache=False).logits[0].double().numpy()
    exact = tiny_gguf.forward(arch, data, IDS)
    assert np.abs(ours - exact).max() <= 2e-5 * np.abs(exact).max()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_weights_are_rounded_once(llama, dtype):
    model = load_gguf(llama, dtype=dtype)
    exact = load_gguf(llama, dtype="float32").state_dict()
    assert model.dtype == model.config.dtype == getattr(torch, dtype)
    for name, value in model.state_dict().items():
        assert torch.equal(value, exact[name].to(value.dtype)), name


def test_the_device_changes_nothing_else(llama, device):
    here, there = load_gguf(llama, weights="w4a16"), load_gguf(llama, weights="w4a16", device=device)
    assert all(x.device.type == device for x in (*there.parameters(), *there.buffers()))
    tied = load_gguf(llama, device=device)
    assert tied.lm_head.weight.data_ptr() == tied.model.embed_tokens.weight.data_ptr()
    theirs = there.state_dict()
    for name, value in here.state_dict().items():
        assert torch.equal(value, theirs[name].cpu()), name


def test_little_of_a_model_lies_in_host_memory_on_its_way_to_another_device(llama, monkeypatch):
    read, place, living, most = loader._read_parameter, loader._place, [], []

    def tracked(*args):
        value = read(*args)
        living.append(weakref.ref(value))
        return value

    def counted(*args):
        most.append(sum(value() is not None for value in living))
        place(*args)

    monkeypatch.setattr(loader, "_read_parameter", tracked)
    monkeypatch.setattr(loader, "_place", counted)
    load_gguf(llama, device="meta")
    assert len(most) == 20 and max(most) <= 2 * min(4, os.cpu_count())


def test_header_equals_the_gguf_packages_reader(tiny):
    _, path, _ = tiny
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    fields = {key: f.contents() for key, f in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == fields
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    for t in theirs.tensors:
        info = ours.tensors[t.name]
        assert (info.type, info.shape, info.offset) == (t.tensor_type, tuple(t.shape.tolist())[::-1], t.data_offset)
        assert np.array_equal(ours.read(t.name), t.data.reshape(-1).view(np.uint8))


def test_config(tiny):
    arch, path, _ = tiny
    config = gguf_config(read_gguf(path))
    assert config.model_type == arch
    assert config.rope_parameters["rope_theta"] == tiny_gguf.THETA
    assert config.rms_norm_eps == pytest.approx(tiny_gguf.EPS)
    assert (config.bos_token_id, config.eos_token_id) == (tiny_gguf.BOS, tiny_gguf.EOS)
    assert config.tie_word_embeddings == (arch == "llama")
    assert (config.vocab_size, config.max_position_embeddings) == (tiny_gguf.VOCAB, 512)


def test_tied_head_is_one_tensor(llama):
    model = load_gguf(llama)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert not model.training and not any(p.requires_grad for p in model.parameters())


def test_half_split_rows_undoes_the_interleaving():
    rows = np.array([f"{h}{xy}{i}" for h in "ab" for i in range(3) for xy in "xy"])
    assert rows[half_split_rows(12, 2)].tolist() == [f"{h}{xy}{i}" for h in "ab" for xy in "xy" for i in range(3)]


@pytest.mark.parametrize(
    ("kind", "factor", "scale"),
    [("linear", 2.0, 2), (None, 2.0, 2), (None, 0.0, 1), ("none", 2.0, 1)],  # as llama.cpp reads them
)
def test_linear_rope_scaling(tmp_path, kind, factor, scale):
    extra = {"llama.rope.scaling.factor": (factor, "float32")}
    if kind is not None:
        extra["llama.rope.scaling.type"] = (kind, "string")
    path = tiny_gguf.write(tmp_path / "a.gguf", extra_meta=extra)
    rope = load_gguf(path).model.rotary_emb
    plain = load_gguf(tiny_gguf.write(tmp_path / "b.gguf")).model.rotary_emb
    assert torch.equal(rope.inv_freq, plain.inv_freq / scale)


def expect(error, path, *words):
    """Whatever is asked of the file, the error is `error` and names the file and `words`."""
    with pytest.raises(error) as caught:
        load_gguf(path)
    for word in (str(path), *words):
        assert word in str(caught.value)
    return str(caught.value)


def with_meta(tmp_path, changes):
    """A llama file with metadata keys changed, or dropped (None)."""
    meta = tiny_gguf.metadata("llama")
    for key, value in changes.items():
        if value is None:
            del meta[key]
        else:
            meta[key] = value
    return tiny_gguf.write(tmp_path / "changed.gguf", meta=meta)


@pytest.mark.parametrize(
    ("key", "value", "error", "words"),
    [
        ("llama.block_count", None, ArgumentError, ("missing",)),
        ("llama.block_count", (3, "uint32"), ArgumentError, ("blk.2.", "missing")),
        ("llama.block_count", (1, "uint32"), NotSupportedError, ("blk.1.",)),
        ("llama.block_count", (2**32 - 1, "uint32"), ArgumentError, ("4294967295",)),
        ("llama.block_count", (2**30, "uint32"), ArgumentError, ("1073741824",)),
        ("llama.block_count", (0, "uint32"), ArgumentError, ("got 0",)),
        ("llama.block_count", (-2, "int32"), ArgumentError, ("got -2",)),
        ("llama.block_count", ("two", "string"), ArgumentError, ("'two'", "int")),
        ("llama.embedding_length", (512, "uint32"), ArgumentError, ("token_embd.weight", "[320, 512]", "[320, 256]")),
        ("llama.feed_forward_length", (256, "uint32"), ArgumentError, ("ffn_", "[256, 256]", "[512, 256]")),
        ("llama.attention.head_count", (3, "uint32"), ArgumentError, ("does not divide", "256")),
        ("llama.attention.head_count", ([4, 4], "array"), NotSupportedError, ("differs by layer",)),
        ("llama.attention.head_count_kv", (3, "uint32"), ArgumentError, ("does not divide",)),
        ("llama.attention.head_count_kv", (4, "uint32"), ArgumentError, ("attn_k.weight", "[128, 256]")),
        ("llama.attention.layer_norm_rms_epsilon", None, ArgumentError, ("missing",)),
        ("llama.attention.layer_norm_rms_epsilon", (float("nan"), "float32"), ArgumentError, ("nan",)),
        ("llama.attention.layer_norm_rms_epsilon", (1, "uint32"), ArgumentError, ("float", "int 1")),
        ("llama.attention.key_length", (65, "uint32"), ArgumentError, ()),
        ("llama.attention.value_length", (32, "uint32"), NotSupportedError, ("32", "64")),
        ("llama.rope.dimension_count", (32, "uint32"), NotSupportedError, ("32", "64")),
        ("llama.rope.freq_base", (0.0, "float32"), ArgumentError, ("got 0.0",)),
        ("llama.rope.scaling.type", ("yarn", "string"), NotSupportedError, ("'yarn'", "linear")),
        ("llama.expert_count", (8, "uint32"), NotSupportedError, ("8",)),
        ("llama.expert_group_count", (0, "uint32"), NotSupportedError, ("not mapped",)),
        ("llama.attention.sliding_window", (128, "uint32"), NotSupportedError, ("128",)),
        ("llama.vocab_size", (319, "uint32"), ArgumentError, ("319", "320")),
        ("llama.context_length", None, ArgumentError, ("missing",)),
        ("tokenizer.ggml.eos_token_id", (320, "uint32"), ArgumentError, ("320",)),
        ("general.alignment", (48, "uint32"), ArgumentError, ("48", "power of two")),
        ("general.alignment", (0, "uint32"), ArgumentError, ("0", "power of two")),
        ("llama.context_length", (2**31, "uint32"), ArgumentError, ("from 1 to 2^31 - 1", "2147483648")),
    ],
)
def test_metadata_faults(tmp_path, key, value, error, words):
    if key == "general.alignment":  # the writer would use it
        path = corrupt(tiny_gguf.write(tmp_path / "a.gguf", extra_meta={"general.alignmenT": value}), b"menT", b"ment")
    else:
        path = with_meta(tmp_path, {key: value})
    message = expect(error, path, *words)
    assert key in message or "tensor '" in message  # the key, or the tensor that contradicts it


def test_expert_count_zero_is_no_experts(tmp_path):
    load_gguf(with_meta(tmp_path, {"llama.expert_count": (0, "uint32")}))


def test_unknown_architecture(tmp_path):
    path = tiny_gguf.write(tmp_path / "a.gguf", "mamba")
    expect(NotSupportedError, path, "'mamba'", "llama", "qwen2")


@pytest.mark.parametrize("name", ["token_embd.weight", "output_norm.weight", "blk.1.attn_k.weight"])
def test_missing_tensor(tmp_path, name):
    data = tiny_gguf.tensors("llama")
    del data[name]
    expect(ArgumentError, tiny_gguf.write(tmp_path / "a.gguf", data=data), name, "missing")


def test_missing_bias_of_qwen2(tmp_path):
    data = tiny_gguf.tensors("qwen2")
    del data["blk.0.attn_v.bias"]
    expect(ArgumentError, tiny_gguf.write(tmp_path / "a.gguf", "qwen2", data=data), "blk.0.attn_v.bias", "missing")


@pytest.mark.parametrize("name", ["rope_freqs.weight", "blk.0.attn_q.bias"])
def test_tensor_that_has_no_place(tmp_path, name):
    data = tiny_gguf.tensors("llama")
    data[name] = (np.ones(32, np.float32), gguf.GGMLQuantizationType.F32)
    expect(NotSupportedError, tiny_gguf.write(tmp_path / "a.gguf", data=data), name)


@pytest.mark.parametrize("shape", [(256, 128), (1, 256, 256), (65536,)])
def test_wrong_shape(tmp_path, shape):
    data = tiny_gguf.tensors("llama")
    data["blk.0.attn_q.weight"] = (np.zeros(shape, np.float32), gguf.GGMLQuantizationType.F32)
    path = tiny_gguf.write(tmp_path / "a.gguf", data=data)
    expect(ArgumentError, path, "blk.0.attn_q.weight", str(list(shape)), "[256, 256]")


def test_type_that_is_not_dequantised(tmp_path):
    data = tiny_gguf.tensors("llama")
    data["blk.0.attn_norm.weight"] = (np.ones(256, np.int32), gguf.GGMLQuantizationType.I32)
    expect(NotSupportedError, tiny_gguf.write(tmp_path / "a.gguf", data=data), "blk.0.attn_norm.weight", "I32")


@pytest.mark.parametrize("kind", ["F32", "F16", *(kind.name for kind in gguf.quants._type_traits)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_type_is_dequantised_as_gguf_does(tmp_path, monkeypatch, kind, dtype):
    """Random blocks, NaN and infinite scales among them; in pieces, and with rows put into half-split order."""
    monkeypatch.setattr(loader, "_CHUNK_ELEMENTS", 512)
    kind = gguf.GGMLQuantizationType[kind]
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    rows, columns = 8, 2 * 256
    row_bytes = columns // elements * size
    blocks = np.random.default_rng(kind.value).integers(0, 256, (rows, row_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        exact = gguf.quants.dequantize(blocks, kind)
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tensor("t", blocks, raw_dtype=kind)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    file = read_gguf(tmp_path / "one.gguf")
    for heads in (None, 2):
        ours = loader._read_parameter(file, "t", heads, getattr(torch, dtype))
        order = slice(None) if heads is None else half_split_rows(rows, heads)
        expected = torch.from_numpy(exact[order]).to(ours.dtype)
        assert ours.shape == (rows, columns) and torch.equal(ours.isnan(), expected.isnan())
        assert torch.equal(ours.nan_to_num(0, 1, -1), expected.nan_to_num(0, 1, -1))
    assert np.isfinite(exact).mean() > 0.5  # not a test of NaN alone


def corrupt(path, old, new, at=0):
    """Replaces bytes of the file: the first `old`, `at` bytes behind its start."""
    with open(path, "rb") as f:
        content = bytearray(f.read())
    start = content.index(old) + at
    content[start : start + len(new)] = new
    with open(path, "wb") as f:
        f.write(content)
    return path


NORM = b"output_norm.weight"  # F32, one dimension: name, dims 4 bytes, size 8, type 4, offset 8


@pytest.mark.parametrize(
    ("old", "new", "at", "error", "words"),
    [
        (b"GGUF", b"GGML", 0, ArgumentError, ("not a GGUF file", "GGML")),
        (b"GGUF", b"PK\3\4", 0, ArgumentError, ("not a GGUF file",)),
        (b"GGUF", struct.pack("<I", 1), 4, NotSupportedError, ("version 1", "2, 3")),
        (b"GGUF", struct.pack("<I", 77), 4, NotSupportedError, ("version 77",)),
        (b"GGUF", struct.pack(">I", 3), 4, NotSupportedError, ("big-endian",)),
        (b"GGUF", struct.pack("<Q", 2**60), 8, ArgumentError, ("tensor count", str(2**60))),
        (b"GGUF", struct.pack("<Q", 2**64 - 1), 16, ArgumentError, ("metadata count",)),
        (b"general.architecture", struct.pack("<I", 13), 20, ArgumentError, ("general.architecture", "13")),
        (b"general.architecture", struct.pack("<Q", 2**63), 24, ArgumentError, ("general.architecture", "length")),
        (b"general.architecture", b"\xff\xfe", 32, ArgumentError, ("general.architecture", "UTF-8")),
        (b"tokenizer.ggml.tokens", struct.pack("<Q", 2**40), 29, ArgumentError, ("tokenizer.ggml.tokens", "length")),
        (b"tokenizer.ggml.tokens", struct.pack("<I", 99), 25, ArgumentError, ("tokenizer.ggml.tokens", "99")),
        (b"tokenizer.ggml.token_type", struct.pack("<Q", 2**62), 33, ArgumentError, ("token_type", "length")),
        (NORM, struct.pack("<I", 0), 18, ArgumentError, ("output_norm.weight", "0 dimensions")),
        (NORM, struct.pack("<I", 2**31), 18, ArgumentError, ("output_norm.weight", "dimensions")),
        (NORM, struct.pack("<Q", 0), 22, ArgumentError, ("output_norm.weight", "empty")),
        (NORM, struct.pack("<Q", 2**63), 22, ArgumentError, ("output_norm.weight", "truncated")),
        (NORM, struct.pack("<I", 500), 30, NotSupportedError, ("output_norm.weight", "500", "Q4_1")),
        (NORM, struct.pack("<Q", 2**50), 34, ArgumentError, ("output_norm.weight", "truncated")),
        (NORM, struct.pack("<Q", 2**64 - 32), 34, ArgumentError, ("output_norm.weight", "truncated")),
        (NORM, struct.pack("<Q", 0), 34, ArgumentError, ("output_norm.weight", "overlap")),
        (NORM, struct.pack("<Q", 33), 34, ArgumentError, ("output_norm.weight", "33", "multiple of 32")),
        (NORM, b"outputXnorm.weight", 0, ArgumentError, ("output_norm.weight", "missing")),
        (b"blk.1.attn_norm.weight", b"blk.0.attn_norm.weight", 0, ArgumentError, ("blk.0.attn_norm.weight", "twice")),
        (b"llama.context_length", b"llama.embeddinglengt", 0, NotSupportedError, ("llama.embeddinglengt",)),
    ],
)
def test_corrupt_header(tmp_path, old, new, at, error, words):
    path = corrupt(tiny_gguf.write(tmp_path / "a.gguf"), old, new, at)
    expect(error, path, *words)


def string(text):
    return struct.pack("<Q", len(text)) + text


def key(kind, *parts):
    """The beginning of a file without tensors whose one key is of the type `kind`."""
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string(b"a") + struct.pack("<I", kind) + b"".join(parts)


@pytest.mark.parametrize(
    "kind, bytes_, value",
    [
        (0, b"\xfe", 254),
        (1, b"\xfe", -2),
        (2, b"\xfe\xff", 65534),
        (3, b"\xfe\xff", -2),
        (4, b"\xfe\xff\xff\xff", 2**32 - 2),
        (5, b"\xfe\xff\xff\xff", -2),
        (6, b"\0\0\xc0\xbf", -1.5),
        (7, b"\1", True),
        (8, b"\2\0\0\0\0\0\0\0ab", "ab"),
        (10, b"\xfe" + b"\xff" * 7, 2**64 - 2),
        (11, b"\xfe" + b"\xff" * 7, -2),
        (12, b"\0" * 6 + b"\xf8\xbf", -1.5),
    ],
)
def test_every_type_of_a_value(tmp_path, kind, bytes_, value):
    """By the numbers of the GGUF specification: one value, and an array of two."""
    path = tmp_path / "a.gguf"
    for content, expected in (
        (key(kind, bytes_), value),
        (key(9, struct.pack("<IQ", kind, 2), bytes_, bytes_), [value, value]),
    ):
        path.write_bytes(content + bytes(-len(content) % 32))
        found = read_gguf(path).metadata["a"]
        assert found == expected and type(found) is type(expected)


def test_a_boolean_is_0_or_1(tmp_path):
    path = tmp_path / "a.gguf"
    for value in (2, 255):
        content = key(7, bytes([value]))
        path.write_bytes(content + bytes(-len(content) % 32))
        with pytest.raises(ArgumentError, match=rf"must be a boolean \(0 or 1\), got {value}"):
            read_gguf(path)


ARRAY = {kind: key(9, struct.pack("<I", kind)) for kind in (4, 7, 8, 9, 12)}
COUNTS = {  # the file up to the number, its name, the least bytes of one, the bytes behind the number
    "tensors": (b"GGUF" + struct.pack("<I", 3), "tensor count", 24, 8 + 30 * 24),
    "keys": (b"GGUF" + struct.pack("<IQ", 3, 0), "metadata count", 13, 30 * 13),
    "string": (key(8), "length of metadata key 'a'", 1, 30),
    "uint32": (ARRAY[4], "length of metadata key 'a'", 4, 30 * 4),
    "float64": (ARRAY[12], "length of metadata key 'a'", 8, 30 * 8),
    "bool": (ARRAY[7], "length of metadata key 'a'", 1, 30),
    "strings": (ARRAY[8], "length of metadata key 'a'", 8, 30 * 8),
    "arrays": (ARRAY[9], "length of metadata key 'a'", 12, 30 * 12),
}


@pytest.mark.parametrize("name", COUNTS)
def test_counts_that_just_fit_the_file(tmp_path, name):
    """One more than the rest of the file can hold is refused before so many are read; as many are not."""
    begin, what, size, rest = COUNTS[name]
    path = tmp_path / "a.gguf"

    def outcome(number):
        path.write_bytes(begin + struct.pack("<Q", number) + bytes(rest))
        try:
            return str(read_gguf(path).metadata)
        except ArgumentError as e:
            return str(e)

    most = rest // size
    assert f"{what} is {most + 1}, more than the {rest} bytes left can hold" in outcome(most + 1)
    assert "can hold" not in outcome(most)


def directory(*tensors):
    """A file of 512 bytes of data. tensors: (name, elements of float32, offset)."""
    entries = [string(name) + struct.pack("<IQIQ", 1, n, 0, offset) for name, n, offset in tensors]
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 0) + b"".join(entries)
    return header + bytes(-len(header) % 32) + bytes(512)


@pytest.mark.parametrize(
    ("tensors", "overlap"),
    [
        ([(b"a", 64, 0), (b"b", 64, 256)], None),
        ([(b"b", 64, 256), (b"a", 64, 0)], None),
        ([(b"a", 64, 0), (b"b", 64, 224)], "'a' and 'b' overlap"),
        ([(b"b", 64, 224), (b"a", 64, 0)], "'a' and 'b' overlap"),
        ([(b"a", 57, 0), (b"b", 64, 224)], "'a' and 'b' overlap"),  # by four bytes
        ([(b"a", 64, 0), (b"b", 64, 0)], "'a' and 'b' overlap"),
        ([(b"a", 128, 0), (b"b", 8, 64)], "'a' and 'b' overlap"),  # one in the other
        ([(b"a", 128, 0), (b"b", 8, 64), (b"c", 8, 256)], "'a' and 'b' overlap"),
        ([(b"c", 8, 0), (b"a", 64, 32), (b"b", 8, 256)], "'a' and 'b' overlap"),
    ],
)
def test_tensors_that_overlap(tmp_path, tensors, overlap):
    path = tmp_path / "a.gguf"
    path.write_bytes(directory(*tensors))
    if overlap is None:
        assert {name.encode() for name in read_gguf(path).tensors} == {name for name, _, _ in tensors}
    else:
        with pytest.raises(ArgumentError, match=overlap):
            read_gguf(path)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_scales_that_are_not_finite(tmp_path, kind):
    """Kept as they are: the codes of such a block stand for what dequantising them gives."""
    from rooftile.gemm import W4Weight, W8Weight

    kind = gguf.GGMLQuantizationType[kind]
    values = np.random.default_rng(0).standard_normal((8, 256)).astype(np.float32)
    stored = gguf.quants.quantize(values, kind)
    blocks = stored.reshape(8, 8, -1)
    special = np.array([np.inf, -np.inf, np.nan], np.float16)
    for i in range(2 if kind.name == "Q4_1" else 1):  # the scale, and the minimum
        blocks[[0, 1, 2], i, 2 * i : 2 * i + 2] = special[:, None].view(np.uint8)
    with np.errstate(all="ignore"):
        exact = gguf.quants.dequantize(stored, kind)
    assert not np.isfinite(exact[:3]).all(1).any() and np.isfinite(exact[3:]).all()
    weight = (W8Weight if kind.name == "Q8_0" else W4Weight).from_gguf(stored, kind, (8, 256))
    assert np.array_equal(weight.dequantize(), exact, equal_nan=True)


def test_key_that_occurs_twice(tmp_path):
    path = tiny_gguf.write(tmp_path / "b.gguf", extra_meta={"llama.block_counX": (2, "uint32")})
    expect(ArgumentError, corrupt(path, b"counX", b"count"), "llama.block_count", "twice")


def test_arrays_nested_without_end(tmp_path):
    deep = struct.pack("<IQ", 9, 1) * 5000 + struct.pack("<IQ", 0, 0)
    key = b"a"
    path = tmp_path / "a.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, len(key)) + key + struct.pack("<I", 9) + deep)
    with pytest.raises(ArgumentError, match="'a'"):
        read_gguf(path)


def test_truncated_anywhere(llama, tmp_path):
    with open(llama, "rb") as f:
        content = f.read()
    info = read_gguf(llama).tensors.values()
    data_start, end = min(t.offset for t in info), max(t.offset + t.nbytes for t in info)
    cut = tmp_path / "cut.gguf"
    offsets = [*range(0, 64), *range(64, data_start, 37), *range(data_start, end, 50021), end - 1]
    for size in offsets:
        cut.write_bytes(content[:size])
        with pytest.raises(ArgumentError) as caught:
            read_gguf(cut)
        assert str(cut) in str(caught.value)


def test_any_corrupt_byte_gives_a_model_or_a_typed_error(llama, tmp_path):
    """One or two random bytes of the header changed: nothing but RooftileError ever comes out."""
    with open(llama, "rb") as f:
        content = f.read()
    size = min(t.offset for t in read_gguf(llama).tensors.values())
    rng = np.random.default_rng(0)
    path = tmp_path / "flipped.gguf"
    refused = 0
    for round_ in range(300):
        flipped = bytearray(content)
        for at in rng.integers(0, size, 1 + round_ % 2):
            flipped[at] = rng.integers(0, 256)
        path.write_bytes(flipped)
        for use in (gguf_config, load_tokenizer):
            try:
                use(read_gguf(path))
            except RooftileError:
                refused += 1
    assert refused > 50


def test_file_cut_after_its_header_was_read(tmp_path):
    path = tiny_gguf.write(tmp_path / "a.gguf")
    file = read_gguf(path)
    os.truncate(path, os.path.getsize(path) // 2)
    last = max(file.tensors.values(), key=lambda info: info.offset)
    with pytest.raises(ArgumentError, match="cut short"):
        file.read(last.name)
    os.remove(path)
    with pytest.raises(ArgumentError, match="No such file"):
        file.read(last.name)


def test_no_file(tmp_path):
    expect(ArgumentError, tmp_path / "none.gguf", "No such file")
    expect(ArgumentError, tmp_path, "directory")
    (tmp_path / "empty.gguf").write_bytes(b"")
    expect(ArgumentError, tmp_path / "empty.gguf", "not a GGUF file")


def test_wrong_options(llama):
    with pytest.raises(ArgumentTypeError, match=r"dtype.*float64"):
        load_gguf(llama, dtype=torch.float64)
    with pytest.raises(ArgumentError, match=r"weights.*'int3'"):
        load_gguf(llama, weights="int3")
    with pytest.raises(ArgumentError, match="device must be one that torch can use, got 'abacus'"):
        load_gguf(llama, device="abacus")


@pytest.fixture(scope="module")
def w4(tiny):
    pytest.importorskip("rooftile.nn")
    _, path, _ = tiny
    return load_gguf(path, dtype="float32"), load_gguf(path, dtype="float32", weights="w4a16")


def test_w4a16_keeps_the_codes(w4):
    """Q4_0 and Q4_1 layers, permuted rows too, and a Q8_0 head read back as what dequantising gives, bit for bit."""
    from rooftile.nn import PackedLinear, W8Linear

    plain, packed = w4
    kept = {name: module for name, module in packed.named_modules() if isinstance(module, PackedLinear)}
    assert {name.split(".")[-1] for name in kept} == {"q_proj", "k_proj", "down_proj", "lm_head"}
    assert [name for name, module in kept.items() if isinstance(module, W8Linear)] == ["lm_head"]
    for name, module in kept.items():
        assert np.array_equal(np.asarray(module.weight.dequantize()), plain.get_submodule(name).weight.numpy()), name
    for name, value in packed.state_dict().items():
        if name in plain.state_dict() and name.removesuffix(".weight") not in kept:  # there a marker
            assert torch.equal(value, plain.state_dict()[name]), name


def test_a_tied_head_of_q8_0_is_a_module_of_its_own(llama):
    plain, packed = load_gguf(llama, dtype="float32"), load_gguf(llama, dtype="float32", weights="w4a16")
    assert plain.config.tie_word_embeddings and plain.lm_head.weight is plain.get_input_embeddings().weight
    assert packed.config.tie_word_embeddings is False
    assert torch.equal(packed.get_input_embeddings().weight, plain.get_input_embeddings().weight)
    assert np.array_equal(np.asarray(packed.lm_head.weight.dequantize()), plain.lm_head.weight.numpy())


def test_accelerate_keeps_a_head_of_q8_0(llama):
    model = load_gguf(llama, dtype="float32", weights="w4a16")
    head = model.lm_head
    assert rt.accelerate(model, head="w8a16", kv_cache="int8").lm_head is head
    plain = load_gguf(llama, dtype="float32")
    rt.set_kv_cache(plain, "int8")
    options = {"max_new_tokens": 9, "do_sample": False}
    ids = torch.tensor(IDS)[None]
    assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))


def test_w4a16_leaves_what_is_no_layer_of_a_block(tmp_path):
    """Embeddings and a head of Q4_1, as small models have them, are dequantised."""
    data = tiny_gguf.tensors("qwen2")
    for name in ("token_embd.weight", "output.weight"):
        values = gguf.quants.dequantize(*data[name])
        data[name] = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q4_1), gguf.GGMLQuantizationType.Q4_1
    path = tiny_gguf.write(tmp_path / "a.gguf", "qwen2", data=data)
    plain, packed = load_gguf(path, dtype="float32"), load_gguf(path, dtype="float32", weights="w4a16")
    assert type(packed.lm_head) is torch.nn.Linear and type(packed.get_input_embeddings()) is torch.nn.Embedding
    assert torch.equal(packed.lm_head.weight, plain.lm_head.weight)
    assert torch.equal(packed.get_input_embeddings().weight, plain.get_input_embeddings().weight)


def test_w4a16_is_saved_and_loaded(w4, tmp_path):
    w4[1].save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    ours = w4[1].state_dict()
    assert again.keys() == ours.keys() and all(torch.equal(again[name], value) for name, value in ours.items())


def test_w4a16_logits(w4, tiny):
    arch, _, data = tiny
    exact = tiny_gguf.forward(arch, data, IDS)
    with torch.no_grad():
        ours = w4[1](torch.tensor(IDS)[None], use_cache=False).logits[0].double().numpy()
    assert np.abs(ours - exact).max() <= 2e-5 * np.abs(exact).max()
