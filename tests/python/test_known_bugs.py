# SPDX-License-Identifier: Apache-2.0
"""Every bug of known_bugs.py has a test that is there, or a reason why it has none."""

import ast
import functools
import re
from pathlib import Path

import pytest
from known_bugs import BUGS

TESTS = Path(__file__).resolve().parents[1]


@functools.cache
def python_tests(file):
    """The tests of a file. Read, not collected: on a machine without a GPU pytest collects none of some files."""
    tree = ast.parse((TESTS / "python" / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


@functools.cache
def cpp_tests():
    listed = (TESTS / "cpp" / "CMakeLists.txt").read_text()
    found = set()
    for path in (TESTS / "cpp").glob("*/test_*.c*"):
        assert f"{path.parent.name}/{path.name}" in listed, f"{path} is built by nobody"
        found |= {".".join(t) for t in re.findall(r"^TEST(?:_[FP])?\((\w+), (\w+)\)", path.read_text(), re.MULTILINE)}
    return found


def is_there(name):
    if name.endswith(".sh"):
        run = (TESTS.parent / ".ci" / "run").read_text()
        return (TESTS / name).exists() and f"tests/{name}" in run
    file, _, test = name.partition("::")
    if test:
        return (TESTS / "python" / file).exists() and test in python_tests(file)
    return name in cpp_tests()


def test_every_bug_is_listed_once():
    assert list(BUGS) == [f"B{number:02}" for number in range(1, 127)]
    assert len({bug.what for bug in BUGS.values()}) == len(BUGS)


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_has_a_test_or_a_reason(name):
    bug = BUGS[name]
    assert bug.what.strip() and (bug.tests or bug.reason.strip())
    assert len(set(bug.tests)) == len(bug.tests)
    missing = [test for test in bug.tests if not is_there(test)]
    assert not missing, f"{name} names tests that are not there: {missing}"


@pytest.mark.parametrize(
    "name",
    ["test_known_bugs.py::test_nothing", "test_nothing.py::test_limits", "Divisor.Nothing", "packaging/nothing.sh"],
)
def test_a_name_of_nothing_is_seen(name):
    assert not is_there(name)
