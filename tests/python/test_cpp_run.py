# SPDX-License-Identifier: Apache-2.0
"""tests/cpp/run.sh, with which `make test` runs the C++ tests: it installs GoogleTest where it can, and says so where
they did not run. With programs that pretend."""

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "cpp" / "run.sh"
CMAKE = """#!/bin/sh
echo "cmake $1" >> calls
[ "$1" = --preset ] || exit 0
mkdir -p build/$2
[ -e googletest ] && found=ON || found=OFF
echo "ROOFTILE_GTEST:INTERNAL=$found" > build/$2/CMakeCache.txt
"""
APT = """#!/bin/sh
echo "apt-get $1" >> calls
[ "$1" = update ] || [ ! -e network ] || touch googletest
"""


@pytest.fixture
def tree(tmp_path):
    """The script in a tree of its own; who asks is root unless a test says otherwise."""

    def program(path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    (tmp_path / "tests" / "cpp").mkdir(parents=True)
    shutil.copy(SCRIPT, tmp_path / "tests" / "cpp")
    program(tmp_path / ".venv" / "bin" / "cmake", CMAKE)
    program(tmp_path / ".venv" / "bin" / "ctest", '#!/bin/sh\necho "ctest" >> calls\n')
    program(tmp_path / "bin" / "apt-get", APT)
    program(tmp_path / "bin" / "id", "#!/bin/sh\n[ -e nobody ] && echo 1000 || echo 0\n")
    return tmp_path


def run(tree, *arguments):
    """(exit status, what it printed, the programs it called)"""
    done = subprocess.run(
        [tree / "tests" / "cpp" / "run.sh", "test", *arguments],
        capture_output=True,
        text=True,
        env={"PATH": f"{tree / 'bin'}:/usr/bin:/bin"},
    )
    return done.returncode, done.stdout + done.stderr, (tree / "calls").read_text().splitlines()


def test_where_googletest_is(tree):
    (tree / "googletest").touch()
    status, said, calls = run(tree, "--strict")
    assert status == 0 and "GoogleTest" not in said
    assert calls == ["cmake --preset", "cmake --build", "ctest"]


def test_root_installs_it(tree):
    (tree / "network").touch()
    status, said, calls = run(tree, "--strict")
    assert status == 0 and "DID NOT RUN" not in said
    assert calls == ["cmake --preset", "apt-get update", "apt-get install", "cmake --preset", "cmake --build", "ctest"]


@pytest.mark.parametrize("who", ["root without a network", "somebody else"])
def test_where_it_stays_missing_the_end_says_so(tree, who):
    if who == "somebody else":
        (tree / "nobody").touch()
    status, said, calls = run(tree)
    assert status == 0 and calls[-1] == "ctest"
    last = said.splitlines()[-4:]
    assert "THE C++ TESTS DID NOT RUN" in last[1] and "apt-get install -y libgtest-dev" in last[2]
    assert ("apt-get install" in calls) == (who != "somebody else")
    assert run(tree, "--strict")[0] == 1


def test_building_alone(tree):
    (tree / "googletest").touch()
    assert run(tree, "--build")[2] == ["cmake --preset", "cmake --build"]
