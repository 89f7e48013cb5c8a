# SPDX-License-Identifier: Apache-2.0
"""Fixtures that every test shares. Tests that take `device` run on each device that has kernels."""

import cases
import pytest
import torch

# Small calls one after another: waking a second thread for each costs more than it brings, on a busy machine many times
# more. test_row_independence.py runs every op on several.
torch.set_num_threads(1)

BAD_INPUTS = pytest.StashKey[int]()


@pytest.fixture(params=cases.devices())
def device(request):
    return request.param


@pytest.fixture(params=cases.DTYPES)
def dtype(request):
    return request.param


@pytest.fixture(params=cases.PLANS)
def plan(request):
    """Every kernel variant that this machine can run."""
    return request.param


@pytest.fixture
def count_bad_input(pytestconfig):
    """Adds to the number of bad calls tried, which the summary prints."""

    def add(n):
        pytestconfig.stash[BAD_INPUTS] = pytestconfig.stash.get(BAD_INPUTS, 0) + n

    return add


def pytest_terminal_summary(terminalreporter, config):
    if BAD_INPUTS in config.stash:
        terminalreporter.write_line(f"bad inputs tried: {config.stash[BAD_INPUTS]}")
