# SPDX-License-Identifier: Apache-2.0
"""Fixtures that every test shares. Tests that take `device` run on each device that has kernels."""

import cases
import pytest


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
