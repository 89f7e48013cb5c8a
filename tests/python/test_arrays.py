# SPDX-License-Identifier: Apache-2.0
"""Memory for outputs and workspaces by whose array asks for it; the record of kernels that ran."""

import threading

import cases
import pytest
import rooftile as rt
import torch
from closeness import assert_bits_equal
from rooftile import _C

X = torch.ones(2, 4)

# ---------------------------------------------------------------- arrays on a GPU that are not torch's


class Foreign:
    """A torch tensor as an array of another framework, such as CuPy's."""

    def __init__(self, tensor, device=None):
        self.tensor, self.device = tensor, device
        self.shape, self.dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")

    def __dlpack_device__(self):
        return self.device or self.tensor.__dlpack_device__()

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options)


def test_an_output_like_an_array_on_a_gpu_is_asked_for():
    x = Foreign(torch.ones(2, 128), (2, 1))  # kDLCUDA
    for call in (lambda: rt.rms_norm(x), lambda: rt.decode_attention(x, None), lambda: rt.W4Weight.quantize(x)):
        with pytest.raises(rt.NotSupportedError, match=r"Foreign on cuda:1: .* torch\.from_dlpack"):
            call()
    assert_bits_equal(torch.as_tensor(rt.rms_norm(Foreign(X))), rt.rms_norm(X))  # in host memory: NumPy


gpus = pytest.mark.skipif("cuda" not in cases.devices(), reason="no GPU, or a build without GPU kernels")


@gpus
def test_arrays_on_a_gpu_that_are_not_torchs():
    x = torch.randn(3, 4096, device="cuda").half()
    out = torch.empty_like(x)
    rt.rms_norm(Foreign(x), out=out)
    assert_bits_equal(out, rt.rms_norm(x))
    w = rt.W4Weight.quantize(torch.randn(64, 4096, device="cuda").half(), group_size=128)
    y = torch.empty(3, 64, device="cuda").half()
    rt.w4a16_matmul(Foreign(x), w, out=y)  # K is cut in chunks: torch, whose output it is, lends the workspace
    assert_bits_equal(y, rt.w4a16_matmul(x, w))
    with pytest.raises(rt.NotSupportedError, match=r"Foreign on cuda:0: .*workspace.* torch\.from_dlpack"):
        rt.w4a16_matmul(Foreign(x), w, out=Foreign(y))


def _lent_to(op, array=lambda x: x, rows=2):
    """A call of the binding of `op` that needs a workspace, by what lends it. array: what tensors are handed in as."""
    x, w = torch.randn(rows, 16385, device="cuda").half(), torch.randn(64, 16384, device="cuda").half()
    y = array(x.new_empty(rows, 64))
    if op == "linear":  # rows that no copy engine reads
        return lambda lend: _C.linear(array(x[:, 1:]), array(w), None, None, None, y, lend, None, None)
    if op == "w4a16_matmul":
        handle = rt.W4Weight.quantize(w)._handle
        return lambda lend: _C.w4a16_matmul(array(x[:, :-1]), handle, None, None, None, y, False, lend, None, None)
    cache = rt.KVCache(8, 8192, 1, 64, dtype="float16", device="cuda")
    k = torch.randn(8, 8192, 1, 64, device="cuda").half()
    cache.append(k, k)
    q = torch.randn(4 * rows, 3, 64, device="cuda").half()
    which, out = array(torch.arange(4 * rows, dtype=torch.int32, device="cuda") % 8), array(torch.empty_like(q))
    return lambda lend: _C.decode_attention(array(q), cache, out, None, which, *[None] * 5, lend, None, None)


@gpus
@pytest.mark.parametrize("op", ["decode_attention", "w4a16_matmul", "linear"])
def test_what_lends_a_workspace_is_checked(op):
    call, sizes = _lent_to(op, Foreign), []

    def sound(asking, like, size):
        assert isinstance(like, Foreign) and asking == op
        sizes.append(size)
        return torch.empty(size, dtype=torch.uint8, device="cuda")

    call(sound)
    assert len(sizes) == 1 and sizes[0] > 0
    for lend, error, text in (
        (
            lambda op, x, n: sound(op, x, n + 16)[4:-12],
            rt.ArgumentError,
            "must start at a multiple of 16 bytes",
        ),
        (lambda op, x, n: sound(op, x, n)[:-1], rt.ArgumentError, "must have [0-9]+ bytes, got"),
        (lambda op, x, n: sound(op, x, 2 * n)[::2], rt.ArgumentError, "must be one contiguous dimension"),
        (lambda op, x, n: sound(op, x, n)[None], rt.ArgumentError, "must be one contiguous dimension"),
        (
            lambda op, x, n: sound(op, x, n).cpu(),
            rt.ArgumentError,
            "must be one contiguous dimension on cuda:0",
        ),
        (lambda op, x, n: n, rt.ArgumentTypeError, "must be an array"),
        (None, rt.ArgumentError, "must have [0-9]+ bytes, got 0"),
    ):
        with pytest.raises(error, match=rf"^{op}: workspace {text}"):
            call(lend)
    with pytest.raises(KeyError, match="no memory"):
        call(lambda op, x, n: {}["no memory"])


@gpus
@pytest.mark.parametrize("op", ["decode_attention", "w4a16_matmul", "linear"])
def test_a_workspace_is_not_left(op):
    """At every number of rows: not a byte beside the lent ones is written."""
    margin = 4096
    for rows in (1, 2, 3, 7, 8, 16, 17, 33, 64, 65, 128, 129, 300, 512, 1024, 2048, 4096, 4097, 8192):
        lent = []

        def lend(op, like, size, lent=lent):
            lent.append(torch.full((size + 2 * margin,), 0xA5, dtype=torch.uint8, device="cuda"))
            return lent[-1][margin:-margin]

        _lent_to(op, Foreign, rows)(lend)
        for memory in lent:
            assert (memory[:margin] == 0xA5).all() and (memory[-margin:] == 0xA5).all(), f"{rows} rows"


@gpus
@pytest.mark.parametrize("op", ["decode_attention", "w4a16_matmul", "linear"])
def test_torch_lends_a_workspace_for_one_call(op):
    call, asked = _lent_to(op), []

    def python(op, like, size):
        asked.append(size)
        return rt._arrays.workspace(op, like, size)

    call(python)
    before = torch.cuda.memory_stats()
    call(python)
    after = torch.cuda.memory_stats()
    assert after["allocated_bytes.all.current"] == before["allocated_bytes.all.current"]
    assert after["allocated_bytes.all.allocated"] > before["allocated_bytes.all.allocated"]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call(python)
    assert side.cuda_stream in {segment["stream"] for segment in torch.cuda.memory_snapshot()}
    assert len(asked) == (0 if hasattr(torch.Tensor, "__dlpack_c_exchange_api__") else 3)


@gpus
def test_a_workspace_that_torch_has_not():
    """Python asks again and says whose memory it was; the cause is what torch raises."""
    x, w = torch.randn(4096, 16385, device="cuda").half(), torch.randn(64, 16384, device="cuda").half()
    w, y = rt.W4Weight.quantize(w), x.new_empty(4096, 64)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-6)
    try:
        with pytest.raises(rt.OutOfMemoryError, match="w4a16_matmul: no memory for workspace") as caught:
            rt.w4a16_matmul(x[:, :-1], w, out=y)  # 128 MB: a copy of x
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert_bits_equal(rt.w4a16_matmul(x[:, :-1], w, out=y), rt.w4a16_matmul(x[:, :-1].contiguous(), w))


# ---------------------------------------------------------------- record_kernels


def test_blocks_nest():
    with rt.record_kernels() as outer:
        with rt.record_kernels() as inner:
            rt.rms_norm(X)
        rt.softmax(X)
    rt.softmax(X)
    assert [len(inner), len(outer)] == [1, 2] and outer[0] == inner[0]


def test_a_block_ends_with_an_error():
    with pytest.raises(KeyError), rt.record_kernels() as names:
        raise KeyError
    rt.rms_norm(X)
    assert names == []


def test_a_block_sees_its_own_thread():
    with rt.record_kernels() as names:
        other = threading.Thread(target=rt.rms_norm, args=(X,))
        other.start()
        other.join()
        assert names == []
        rt.rms_norm(X)
    assert len(names) == 1
