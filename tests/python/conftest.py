# SPDX-License-Identifier: Apache-2.0
"""Fixtures that every test shares. Tests that take `device` run on each device that has kernels."""

import os

import cases
import pytest
import torch

# Tests hand over arrays of JAX's CPU. Its GPU client would take most of a GPU's memory and may leave another device
# current.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# Small calls one after another: waking a second thread for each costs more than it brings, on a busy machine many times
# more. test_row_independence.py runs every op on several.
torch.set_num_threads(1)


def take_turns_at_gpus(environ, gpus):
    """Each process of pytest-xdist begins with another GPU, and sees all of them. Before CUDA is initialised."""
    worker = environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    if gpus > 1 and worker.isdigit() and "CUDA_VISIBLE_DEVICES" not in environ:
        first = int(worker) % gpus
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(str((first + i) % gpus) for i in range(gpus))


take_turns_at_gpus(os.environ, torch.cuda.device_count())

BAD_INPUTS = pytest.StashKey[int]()


@pytest.fixture(autouse=True)
def current_device_stays():
    yield
    if torch.cuda.is_initialized():
        left = torch.cuda.current_device()
        torch.cuda.set_device(0)
        assert left == 0, "the test left another device current"


@pytest.fixture(autouse=True)
def large_memory_goes_back():
    """Processes share a GPU: what torch keeps of a test's large tensors is another process's out of memory."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 1 << 30:
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def gradients_stay():
    before = torch.is_grad_enabled()
    yield
    left = torch.is_grad_enabled()
    torch.set_grad_enabled(before)
    assert left is before, "the test left torch's gradients switched"


@pytest.fixture
def inference():
    """Modules are called as in inference: under torch.no_grad()."""
    with torch.no_grad():
        yield


@pytest.fixture(params=cases.devices())
def device(request):
    return request.param


@pytest.fixture(params=cases.DTYPES)
def dtype(request):
    return request.param


@pytest.fixture(params=cases.PLANS)
def plan(request):
    """Every kernel variant that this machine can run. On a GPU there is one, which is None."""
    return plan_of(request)


def plan_of(request):
    return None if _params(request.node).get("device") == "cuda" else request.param


def _params(item):
    return item.callspec.params if hasattr(item, "callspec") else {}


def pytest_collection_modifyitems(config, items):
    """Leaves out plans of an op that takes none (one stands for none), those that are another plan's code, and what a
    GPU has not: float32, plans, ops without GPU kernels."""

    def there(item):
        params = _params(item)
        supersets = {"avx512vnni": ("amx", "avx512bf16"), "avx512": ("avx512vnni",)}.get(params.get("plan"), ())
        if any(plan in cases.PLANS and not _of_own_kernels(item, plan) for plan in supersets):
            return False
        one_plan = params.get("plan", cases.PLANS[0]) == cases.PLANS[0]
        if "plan" not in getattr(params.get("op"), "arguments", ("plan",)) and not one_plan:
            return False
        return params.get("device") != "cuda" or (
            params.get("dtype") != "float32" and one_plan and getattr(params.get("op"), "gpu", True)
        )

    kept = [item for item in items if there(item)]
    config.hook.pytest_deselected(items=[item for item in items if not there(item)])
    items[:] = kept


def _of_own_kernels(item, plan):
    """Whether a test is of what avx512vnni, avx512bf16 or amx has kernels of its own for."""
    own = ("w4a16_matmul", "w8a16_matmul"), ("test_w4a16",)
    attention = {"avx512bf16": "prefill_attention", "amx": "decode_attention"}.get(plan)
    if attention is not None:
        own = (*own[0], attention), (*own[1], f"test_{attention}")
    op = _params(item).get("op")
    return op.name in own[0] if op else item.path.name.startswith(own[1])


@pytest.fixture
def count_bad_input(pytestconfig):
    """Adds to the number of bad calls tried, which the summary prints. A test that tried none fails."""
    before = pytestconfig.stash.get(BAD_INPUTS, 0)

    def add(n):
        pytestconfig.stash[BAD_INPUTS] = pytestconfig.stash.get(BAD_INPUTS, 0) + n

    yield add
    assert pytestconfig.stash.get(BAD_INPUTS, 0) > before, "the test made no bad call"


def pytest_sessionfinish(session):
    """Under pytest-xdist each process hands over its count, and pytest_testnodedown adds them up."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["bad_inputs"] = session.config.stash.get(BAD_INPUTS, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    stash = node.config.stash
    stash[BAD_INPUTS] = stash.get(BAD_INPUTS, 0) + getattr(node, "workeroutput", {}).get("bad_inputs", 0)


def pytest_terminal_summary(terminalreporter, config):
    if config.stash.get(BAD_INPUTS, 0):
        terminalreporter.write_line(f"bad inputs tried: {config.stash[BAD_INPUTS]}")
