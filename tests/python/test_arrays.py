# SPDX-License-Identifier: Apache-2.0
"""The record of kernels that ran."""

import threading

import pytest
import rooftile as rt
import torch

X = torch.ones(2, 4)


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
