# SPDX-License-Identifier: Apache-2.0
"""bench/run_on_gpu.sh without a GPU: what is read out of logs; what --strict refuses, with a Python that pretends."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import bench_scripts
import conftest
import pytest
import rooftile

BENCH = bench_scripts.BENCH
LOGS = bench_scripts.load("read_logs")

# ---------------------------------------------------------------- as the tools print it

GOOGLETEST = """\
[----------] Global test environment tear-down
[==========] 6 tests from 1 test suite ran. (5106 ms total)
[  PASSED  ] 5 tests.
[  FAILED  ] 1 test, listed below:
[  FAILED  ] Gpu.DecodeAttention

 1 FAILED TEST
"""
GOOGLETEST_PASSED = """\
[==========] 6 tests from 1 test suite ran. (4890 ms total)
[  PASSED  ] 6 tests.
"""
GOOGLETEST_SKIPPED = """\
[==========] 6 tests from 1 test suite ran. (0 ms total)
[  PASSED  ] 0 tests.
[  SKIPPED ] 6 tests, listed below:
[  SKIPPED ] Gpu.DecodeAttention
"""
MEMCHECK = "========= COMPUTE-SANITIZER\n" + GOOGLETEST_PASSED + "========= ERROR SUMMARY: {} errors\n"
RACECHECK = (
    "========= COMPUTE-SANITIZER\n"
    + GOOGLETEST
    + "========= Target application returned an error\n"
    + "========= RACECHECK SUMMARY: {} hazards displayed ({} errors, 0 warnings)\n"
)


def counts(passed=0, skipped=0, failed=0, errors=0, deselected=0, seconds=0.0):
    return {
        "passed": passed,
        "skipped": skipped,
        "failed": failed,
        "errors": errors,
        "deselected": deselected,
        "seconds": seconds,
    }


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("....s\n167 passed, 2 skipped in 14.36s\n", counts(167, 2, seconds=14.36)),
        ("=== 1 failed, 3 passed, 2 deselected in 0.45s ===\n", counts(3, failed=1, deselected=2, seconds=0.45)),
        ("1 error in 2.00s\n", counts(errors=1, seconds=2)),
        (
            "2 failed, 9120 passed, 31 skipped, 5 deselected, 1 xfailed, 7 warnings, 2 errors in 423.10s (0:07:03)\n",
            counts(9120, 31, 2, 2, 5, 423.1),
        ),
        ("the log says 3 passed in 5s, somewhere\n1 passed in 0.01s\n", counts(1, seconds=0.01)),
        ("no tests ran in 0.01s\n", None),
        ("..........F...\nFatal Python error: Segmentation fault\n", None),
        ("", None),
    ],
)
def test_pytests_last_line(text, means):
    assert LOGS.pytest_counts(text) == means


@pytest.mark.parametrize(
    ("text", "means"),
    [
        (GOOGLETEST, {"passed": 5, "skipped": 0, "failed": 1}),
        (GOOGLETEST_PASSED, {"passed": 6, "skipped": 0, "failed": 0}),
        (GOOGLETEST_SKIPPED, {"passed": 0, "skipped": 6, "failed": 0}),
        ("[ RUN      ] Gpu.RopeAppend\nSegmentation fault\n", None),
    ],
)
def test_what_a_program_prints(text, means):
    assert LOGS.program_counts(text) == means


@pytest.mark.parametrize(
    ("text", "errors"),
    [
        (MEMCHECK.format(0), 0),
        (MEMCHECK.format(12), 12),
        ("========= ERROR SUMMARY: 1 error\n", 1),
        (RACECHECK.format(0, 0), 0),
        (RACECHECK.format(3, 2), 3),
        ("========= COMPUTE-SANITIZER\n========= Internal Sanitizer Error\n", None),
    ],
)
def test_what_a_sanitizer_counts(text, errors):
    assert LOGS.sanitizer_errors(text) == errors


def test_logs_by_their_names(tmp_path):
    texts = {
        "install.log": "3 passed in 1.00s",
        "tests.log": "2 passed in 1.50s",
        "test_tile.log": GOOGLETEST_PASSED,
        "test_tile.memcheck.log": MEMCHECK.format(0),
        "test_tile.racecheck.log": RACECHECK.format(4, 4),
        "bench.decode.log": "",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    assert LOGS.read(tmp_path / name for name in texts) == {
        "pytest": counts(2, seconds=1.5),
        "programs": {"test_tile": {"passed": 6, "skipped": 0, "failed": 0}},
        "sanitizers": {"test_tile": {"memcheck": 0, "racecheck": 4}},
    }
    assert LOGS.read([]) == {"pytest": None, "programs": {}, "sanitizers": {}}


GREEN = {
    "pytest": counts(2),
    "programs": {"test_tile": {"passed": 6, "skipped": 0, "failed": 0}},
    "sanitizers": {"test_tile": {"memcheck": 0}},
}


@pytest.mark.parametrize(
    ("counted", "said"),
    [
        ({}, []),
        ({"pytest": None, "programs": {}, "sanitizers": {}}, []),
        ({"pytest": counts(2, failed=1, errors=3)}, ["pytest: 1 failed", "pytest: 3 errors"]),
        ({"pytest": counts(skipped=5)}, ["pytest: nothing passed"]),
        ({"programs": {"test_tile": None}}, ["test_tile: did not come to its end"]),
        ({"programs": {"test_tile": {"passed": 5, "skipped": 0, "failed": 1}}}, ["test_tile: 1 failed"]),
        ({"sanitizers": {"test_tile": {"memcheck": 4}}}, ["test_tile under memcheck: 4 errors"]),
        ({"sanitizers": {"test_tile": {"memcheck": None}}}, ["test_tile under memcheck: did not come to its end"]),
    ],
)
def test_what_counts_as_a_failure(counted, said):
    assert LOGS.failures(GREEN | counted) == said


def test_pytest_that_crashed(tmp_path, capsys):
    (tmp_path / "tests.log").write_text("....\nFatal Python error: Segmentation fault\n")
    assert LOGS.main([str(tmp_path / "tests.log"), "--json", str(tmp_path / "tests.json")]) == 1
    assert "pytest: did not come to its end" in capsys.readouterr().err and not (tmp_path / "tests.json").exists()


# ---------------------------------------------------------------- the script, as far as it goes without a GPU

PRETENDS = """\
#!/bin/sh
case "$*" in
  *read_logs.py*) exec {python} -c 'import runpy, sys, types
sys.modules["torch"] = types.SimpleNamespace(cuda=types.SimpleNamespace(device_count=lambda: 8))
from rooftile import _results
_results.machine = lambda device: {{"gpu": "A GPU", "driver": "1.2", "cuda": "13.0", "torch": "2.13.0"}}
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")' "$@" ;;
  *"-m pytest"*) {pytest} ;;
  *"-m tarfile"*) exec {python} "$@" ;;
  *"-m rooftile bench"*) echo "$PYTHONPATH $FLASHINFER_DISABLE_JIT: $*"; {bench} ;;
esac
"""
SANITIZER = f"""\
#!/bin/sh
if [ "$2" = racecheck ]; then cat <<'T'
{RACECHECK.format(0, 0)}T
else cat <<'T'
{MEMCHECK.format(0)}T
fi
"""
PATH = "/usr/bin:/bin"
TESTS = ("test_tile", "test_gpu_ops")
BENCHMARKS = ("peaks", "bench_decode", "bench_w4a16", "bench_linear", "bench_append", "bench_ops")
PROGRAMS = (*(f"tests/cpp/{name}" for name in TESTS), *(f"bench/cpp/{name}" for name in BENCHMARKS))


@pytest.fixture
def script(tmp_path):
    """Runs bench/run_on_gpu.sh on a machine that has everything but what `without` names."""

    def executable(path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def run(*options, without=(), pytest="echo '7 passed, 1 skipped in 2.50s'", bench=":"):
        executable(tmp_path / "python", PRETENDS.format(python=sys.executable, pytest=pytest, bench=bench))
        executable(tmp_path / "cuda" / "bin" / "nvcc", "#!/bin/sh\n")
        executable(tmp_path / "cuda" / "bin" / "compute-sanitizer", SANITIZER)
        for name in PROGRAMS:
            text = '{"benchmarks": []}' if name.startswith("bench") else GOOGLETEST_PASSED
            writes = 'for o; do case $o in --benchmark_out=*) echo "{}" > "${o#*=}" ;; esac; done\n'
            executable(tmp_path / "build" / name, f"#!/bin/sh\n{writes}cat <<'T'\n{text}\nT\n")
        for path in without:
            (tmp_path / path).unlink()
        environment = {k: v for k, v in os.environ.items() if k != "WHEELS"}
        environment |= {
            "PYTHON": str(tmp_path / "python"),
            "CUDACXX": str(tmp_path / "cuda" / "bin" / "nvcc"),
            "CUDA_HOME": str(tmp_path / "cuda"),
            "PATH": PATH,
            "PYTHONPATH": str(Path(rooftile.__file__).parents[1]),
        }
        command = ["bash", BENCH / "run_on_gpu.sh", "--build", tmp_path / "build", "--out", tmp_path / "out", *options]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        results = tmp_path / "out" / "tests.json"
        return done, json.loads(results.read_text()) if results.exists() else None

    return run


def test_all_there(script):
    done, report = script("--strict", "--commit", "abc1234")
    assert done.returncode == 0, done.stdout + done.stderr
    assert report["schema"] == 1 and report["family"] == "tests" and report["commit"] == "abc1234"
    assert report["machine"]["gpu"] == "A GPU" and report["machine"]["gpus"] == 8 and report["mode"] == "usual"
    assert report["left_out"] == [] and report["pytest"] == counts(7, 1, seconds=2.5)
    assert report["programs"] == {name: {"passed": 6, "skipped": 0, "failed": 0} for name in TESTS}
    assert report["sanitizers"] == {name: {"memcheck": 0, "racecheck": 0} for name in TESTS}
    assert report["digest"] == LOGS.digest(report) != LOGS.digest(report | {"left_out": ["it passes since"]})


@pytest.mark.skipif(shutil.which("compute-sanitizer", path=PATH) is not None, reason="it is on every PATH here")
def test_strict_refuses_what_is_missing(script):
    missing = ["build/tests/cpp/test_gpu_ops", "build/bench/cpp/peaks", "cuda/bin/compute-sanitizer"]
    done, report = script(without=missing)
    assert done.returncode == 0
    assert [text.partition(":")[0] for text in report["left_out"]] == ["test_gpu_ops", "sanitizers", "gbench.peaks"]
    strictly, same = script("--strict", without=missing)
    assert strictly.returncode == 1 and "--strict: 3 left out" in strictly.stderr and same == report


def test_what_one_skips_is_not_missing(script):
    done, report = script("--strict", "--skip", "sanitizers", "--skip", "tests")
    assert done.returncode == 0 and report is None  # of no test there is nothing to tell
    assert "skipped   tests" in done.stdout


def test_a_test_that_fails(script):
    """No file says how many of its tests failed: there is none, nor what an earlier run wrote."""
    assert script()[1] is not None
    done, report = script(pytest="echo '1 failed, 6 passed in 2.50s'; exit 1")
    assert done.returncode == 1 and report is None
    assert "FAILED    tests" in done.stdout and "tests.json is not written: pytest: 1 failed" in done.stderr


def test_logs_of_an_earlier_run_are_not_counted(script, tmp_path):
    script()
    _, report = script("--skip", "tests", without=["build/tests/cpp/test_tile"])
    assert (tmp_path / "out" / "tests.log").exists() and report["pytest"] is None
    assert list(report["programs"]) == ["test_gpu_ops"]


ONLY_BENCH = ("--skip", "tests", "--skip", "sanitizers", "--skip", "gbench", "--commit", "abc1234")
FAMILIES = ("w4a16", "decode", "linear", "w8a16", "ops")


def test_benchmarks_share_their_time_and_find_the_peers(script, tmp_path):
    peers = tmp_path / "peers"
    peers.mkdir()
    (tmp_path / "flashinfer.py").write_text("")
    with tarfile.open(peers / "peers-attention.tar.xz", "w:xz") as archive:
        archive.add(tmp_path / "flashinfer.py", "flashinfer.py")
    found = 'ls "${PYTHONPATH%%:*}"'
    done, report = script(*ONLY_BENCH, "--peers", str(peers), "--seconds", "1000", bench=found)
    assert done.returncode == 0 and report is None, done.stdout + done.stderr
    seconds = []
    for family in FAMILIES:
        log = (tmp_path / "out" / f"bench.{family}.log").read_text()
        assert f"bench {family} --peers --json" in log and "flashinfer.py" in log and " 1: " in log
        seconds.append(float(re.search(r"--seconds ([\d.]+)", log)[1]))
    assert seconds == pytest.approx([285, 499, 308, 246, 985], abs=20)  # of what the ones before left, which took none


def test_a_peer_that_loses_the_device_is_left_out_of_a_second_run(script, tmp_path):
    lost = "rooftile bench: error: bench: the device is lost after b8_kv4096 flashinfer.xqa: an error"
    bench = f"""case "$*" in *--without*) ;; *"bench decode"*) echo "{lost}" >&2; exit 1 ;; esac"""
    done, _ = script(*ONLY_BENCH, bench=bench)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAILED    bench.decode" in done.stdout and "passed    bench.decode.without.flashinfer.xqa" in done.stdout
    assert "--without flashinfer.xqa" in (tmp_path / "out" / "bench.decode.without.flashinfer.xqa.log").read_text()


def test_ours_that_fails_is_a_failure(script):
    done, _ = script(*ONLY_BENCH, bench='case "$*" in *"bench linear"*) exit 1 ;; esac')
    assert done.returncode == 1 and "FAILED    bench.linear" in done.stdout and "passed    bench.ops" in done.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [(("--seconds", "soon"), "--seconds soon: a whole number"), (("--peers", "."), "--peers: no peers-*.tar.xz in")],
)
def test_options_that_are_refused(script, options, words):
    done, _ = script(*ONLY_BENCH, *options)
    assert done.returncode == 2 and words in done.stderr


@pytest.mark.parametrize(
    ("environ", "gpus", "seen"),
    [
        ({"PYTEST_XDIST_WORKER": "gw0"}, 2, "0,1"),
        ({"PYTEST_XDIST_WORKER": "gw3"}, 2, "1,0"),
        ({"PYTEST_XDIST_WORKER": "gw6"}, 4, "2,3,0,1"),
        ({}, 2, "0,1"),
        ({"PYTEST_XDIST_WORKER": "gw3"}, 1, None),
        ({"PYTEST_XDIST_WORKER": "gw3"}, 0, None),
        ({"PYTEST_XDIST_WORKER": "gw3", "CUDA_VISIBLE_DEVICES": "1"}, 2, "1"),
    ],
)
def test_processes_take_turns_at_gpus(environ, gpus, seen):
    conftest.take_turns_at_gpus(environ, gpus)
    assert environ.get("CUDA_VISIBLE_DEVICES") == seen
