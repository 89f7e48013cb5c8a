# SPDX-License-Identifier: Apache-2.0
"""The kernel that measures how fast memory is read: what it refuses; where there is a GPU, that it runs."""

import pytest
import rooftile as rt
import torch
from rooftile import _C


def sink(device="cpu"):
    return torch.zeros(1, dtype=torch.int32, device=device)


def bytes_of(n, device="cpu"):
    return torch.zeros(n, dtype=torch.uint8, device=device)


@pytest.mark.parametrize(
    ("x", "says"),
    [
        (bytes_of(24), "a multiple of them, got .*24"),
        (bytes_of(16 * 64)[::2], "must be contiguous"),
        (bytes_of(64)[8:56], "aligned to 16 bytes"),
        (bytes_of(64).view(4, 16), r"x must be \[.*\]|x must have 1"),
        (torch.zeros(64), "x must be uint8|x must have dtype"),
        (bytes_of(0), "x must be on a GPU"),
        (bytes_of(64), "x must be on a GPU"),
        (bytes_of(16).as_strided((1,), (3,)), "multiple of them"),
    ],
)
def test_what_it_cannot_read_is_refused(x, says):
    with pytest.raises(rt.RooftileError, match=says):
        _C.read_bytes(x, sink())


def test_a_cpu_has_another_error_than_a_wrong_array():
    with pytest.raises(rt.NotSupportedError, match="read_bytes: x must be on a GPU"):
        _C.read_bytes(bytes_of(32), sink())


def test_sink_is_one_int32_apart_from_x():
    x = bytes_of(64)
    for wrong in (torch.zeros(2, dtype=torch.int32), torch.zeros(1), x[:4].view(torch.int32)):
        with pytest.raises(rt.RooftileError, match="read_bytes: sink"):
            _C.read_bytes(x, wrong)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_it_runs_on_a_gpu():
    assert "read" in _C.read_bytes(bytes_of(1 << 20, "cuda"), sink("cuda"))
