# SPDX-License-Identifier: Apache-2.0
"""Memory for outputs and workspaces by whose array asks for it; the record of kernels that ran."""

import threading

import cases
import pytest
import rooftile as rt
import torch
from closeness import assert_bits_equal

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


@pytest.mark.skipif("cuda" not in cases.devices(), reason="no GPU, or a build without GPU kernels")
def test_arrays_on_a_gpu_that_are_not_torchs():
    x = torch.randn(3, 4096, device="cuda").half()
    out = torch.empty_like(x)
    rt.rms_norm(Foreign(x), out=out)
    assert_bits_equal(out, rt.rms_norm(x))
    w = rt.W4Weight.quantize(torch.randn(64, 4096, device="cuda").half(), group_size=128)
    y = torch.empty(3, 64, device="cuda").half()
    assert rt._C.w4a16_workspace(x, w._handle, None, False) > 0  # K is cut in chunks
    with pytest.raises(rt.NotSupportedError, match=r"Foreign on cuda:0: .*workspace.* torch\.from_dlpack"):
        rt.w4a16_matmul(Foreign(x), w, out=y)


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
