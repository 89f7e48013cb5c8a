# SPDX-License-Identifier: Apache-2.0
"""The mutation runner: faults fit the sources as they are, rules give what they say, kills.json is what a run wrote."""

import ctypes
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import by_hand
import cpp_rules
import forks
import gpu_faults
import instrumented
import places
import pytest
import python_rules

TREE = Path(__file__).resolve().parents[2]
FOLDER = TREE / "tests/mutants"
_spec = importlib.util.spec_from_file_location("mutants_command", FOLDER / "__main__.py")
runner = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(runner)


@pytest.fixture(scope="module")
def draw():
    return instrumented.Draw(TREE, 5)


@pytest.mark.parametrize("name", gpu_faults.FAULTS)
def test_every_gpu_fault_has_its_place(name):
    fault = gpu_faults.FAULTS[name]
    begin, end = places.find((TREE / fault.file).read_text(), fault)
    assert begin < end and fault.sound != fault.faulty
    (of,) = gpu_faults.tests_of(fault)
    texts = [(TREE / file).read_text() for file in of.ids]
    for function in fault.first.split():
        assert any(f"def {function}(" in text for text in texts), f"{function} is in none of {of.ids}"


@pytest.mark.parametrize("fault", by_hand.FAULTS, ids=lambda fault: fault.what)
def test_every_fault_written_by_hand_has_its_place(fault):
    begin, end = places.find((TREE / fault.file).read_text(), fault)
    assert begin < end and fault.sound != fault.faulty
    if by_hand.is_expression(fault):  # in C++ it stands in brackets, beside the faulty one
        assert all(text.count("(") == text.count(")") for text in (fault.sound, fault.faulty))
        assert not fault.sound.startswith(("if ", "for ", "while "))


def test_a_gpu_fault_is_planted_in_a_copy_alone(tmp_path):
    def run(*arguments):
        return subprocess.run([sys.executable, FOLDER, "plant", *arguments], capture_output=True, text=True)

    name, fault = next(iter(gpu_faults.FAULTS.items()))
    copy, text = tmp_path / fault.file, (TREE / fault.file).read_text()
    begin, end = places.find(text, fault)
    copy.parent.mkdir(parents=True)
    copy.write_text(text)
    assert run(name, tmp_path).returncode == 0
    assert copy.read_text() == text[:begin] + fault.faulty + text[end:]
    again = run(name, tmp_path)
    assert again.returncode != 0 and "expected once" in again.stderr
    assert "very tree" in run(name, TREE).stderr
    assert "no fault" in run("nothing", tmp_path).stderr


def test_every_file_gives_three_or_all_it_has(draw):
    for file in places.sources(TREE):
        rules = python_rules if file.endswith(".py") else cpp_rules
        drawn = [m for m in draw.chosen[file] if m.rule != "by hand"]
        assert len(drawn) >= 3 or len(drawn) == len(draw.chosen[file]) or not draw.waiting[file], file
        assert draw.few[file] >= 3 and len(rules.mutants(file, draw.text[file])) >= len(drawn)
    drawn = draw.all()
    assert sum(m.rule == "by hand" for m in drawn) == len(by_hand.FAULTS) >= 30
    assert sum(m.rule != "by hand" for m in drawn) >= 200
    assert len({m.number for m in drawn}) == len(drawn)


def test_what_is_planted_in_python_compiles(draw):
    """All faults of a file at once, those by rule and those written by hand."""
    files = {file: chosen for file, chosen in draw.chosen.items() if file.endswith(".py")}
    for file, chosen in files.items():
        compile(python_rules.planted(draw.text[file], chosen), file, "exec")
    assert any(m.rule == "by hand" for chosen in files.values() for m in chosen)


def test_the_seed_decides_what_is_drawn(draw):
    assert instrumented.Draw(TREE, 5).all() == draw.all() != instrumented.Draw(TREE, 6).all()


CPP = """\
void f(int a, int b, const int* x, std::vector<int> v) {
  check(a, b);
  if (a < b && b != 3) return;
  total += x[a] * 2 - b;
  const int c = a > b ? a : b;   // a < b
  g("a < b", c, v[0]);
}
"""


def changes(found):
    return {(m.rule, m.original, m.mutated) for m in found}


def test_rules_of_cpp():
    found = changes(cpp_rules.mutants("f.cpp", CPP))
    assert {
        ("comparison flipped", "a < b", "a <= b"),
        ("comparison flipped", "b != 3", "b == 3"),
        ("condition dropped", "a < b && b != 3", "a < b"),
        ("condition dropped", "a < b && b != 3", "b != 3"),
        ("condition never met", "a < b && b != 3", "false"),
        ("constant one more", "b != 3", "b != 4"),
        ("sign flipped", "x[a] * 2 - b", "x[a] * 2 + b"),
        ("term dropped", "x[a] * 2 - b", "x[a] * 2"),
        ("factor dropped", "x[a] * 2", "x[a]"),
        ("index one more", "a", "a + 1"),
        ("branches swapped", "a > b ? a : b", "a > b ? b : a"),
        ("arguments swapped", 'g("a < b", c, v[0])', 'g("a < b", v[0], c)'),
        ("check dropped", "check(a, b);", ""),
        ("statement dropped", "total += x[a] * 2 - b;", ""),
    } <= found
    assert not any("//" in original for _, original, _ in found)


def test_mutants_of_cpp_stand_beside_their_originals_on_the_same_lines():
    m = next(m for m in cpp_rules.mutants("f.cpp", CPP) if m.mutated == "x[a] * 2 + b")
    text = cpp_rules.planted(CPP, [m])
    assert text.count("\n") == CPP.count("\n")
    assert f"total += (rooftile_mutant({m.number}) ? (x[a] * 2 + b) : (x[a] * 2 - b));" in text


def test_code_that_this_build_leaves_out_has_no_mutants():
    text = "#ifdef ROOFTILE_AVX512\nint f(int a) { return a + 1; }\n#else\nint f(int a) { return a - 2; }\n#endif\n"
    assert {original for _, original, _ in changes(cpp_rules.mutants("f.cpp", text))} == {"a - 2"}


PYTHON = '''\
"""a < b"""
def f(a, b):
    if a < b and b:
        raise ValueError(f"{a + b}")
    c = [a]
    c.append(b)
    return sorted(c, reverse=True)[1:]
'''


def test_rules_of_python():
    found = changes(python_rules.mutants("f.py", PYTHON))
    assert {
        ("comparison flipped", "a < b", "a <= b"),
        ("condition dropped", "a < b and b", "b"),
        ("check dropped", "a < b and b", "False"),
        ("statement dropped", "c.append(b)", ""),
        ("keyword dropped", "sorted(c, reverse=True)", "sorted(c)"),
        ("bound one more", "1", "1 + 1"),
    } <= found
    assert not any("a + b" in original for _, original, _ in found)  # the text of an error


@pytest.mark.parametrize("m", python_rules.mutants("f.py", PYTHON), ids=lambda m: f"{m.rule}-{m.mutated}")
def test_a_mutant_of_python_is_chosen_by_its_number(m, monkeypatch):
    text = python_rules.planted(PYTHON, [m])
    mutated = PYTHON[: m.begin] + (m.mutated or "pass") + PYTHON[m.end :]
    switch = type(sys)("rooftile_mutant")
    monkeypatch.setitem(sys.modules, "rooftile_mutant", switch)

    def said(source, active):
        switch.chosen = lambda number: number == active
        names = {}
        exec(compile(source, "f.py", "exec"), names)
        try:
            return names["f"](5, 4), names["f"](5, 5)
        except Exception as error:
            return type(error)

    assert said(text, 0) == said(PYTHON, 0)
    assert said(text, m.number) == said(mutated, 0)


def test_equivalent_mutants_have_their_reasons():
    for entry in json.loads((FOLDER / "equivalent.json").read_text()):
        assert set(entry) - {"line"} == {"file", "rule", "original", "mutated", "reason"}
        lines = [line.strip() for line in (TREE / entry["file"]).read_text().splitlines()]
        assert "line" not in entry or entry["line"] in lines
        assert len(entry["reason"].split()) >= 5


def test_the_recorded_run():
    """Whole, of an unchanged tree, and nearly every fault that a test can see was seen."""
    recorded = json.loads((FOLDER / "kills.json").read_text())
    rows = [row for row in recorded["mutants"] if row["rule"] != "GPU"]
    assert recorded["seed"] == runner.SEED and re.fullmatch("[0-9a-f]{40}", recorded["commit"])
    assert recorded["changed"] is False and recorded["counts"] == runner.counted(rows)
    assert not [row for row in rows if row["result"] == "not finished"]
    assert not [row for row in rows if row["result"] != "survived" and not row["by"]]
    written = sum(row["rule"] == "by hand" for row in rows)
    assert written >= 30 and len(rows) - written >= 200
    killed, survived = recorded["counts"]["killed"], recorded["counts"]["survived"]
    assert killed >= 0.95 * (killed + survived)


def test_a_part_goes_into_the_record():
    def rows(*files, **more):
        return [{"file": file, "rule": "rule", "result": "failed", **more} for file in files]

    gpu = [{"file": "a", "rule": "GPU", "result": "failed"}]
    recorded = {
        "commit": "1",
        "changed": False,
        "seed": 3,
        "gpu": {},
        "counts": {},
        "mutants": rows("a", "b", "b") + gpu,
    }
    head = {"commit": "2", "changed": False, "seed": 3}
    whole, merged = runner.with_part(recorded, head, rows("b", "c"), {"a"})
    assert whole == {"commit": "1", "changed": False, "seed": 3}
    assert merged == rows("a") + rows("b", "c", commit="2")
    for wrong, others in (({"changed": True}, set()), ({"seed": 4}, set()), ({}, {"c"})):
        with pytest.raises(SystemExit):
            runner.with_part(recorded, head | wrong, rows("b", "c"), others)
    with pytest.raises(SystemExit):
        runner.with_part(recorded, {"commit": "2", "seed": 3}, rows("b"), set())


def test_what_is_read_of_a_survivor():
    marked = {"f: rule: a -> b": [("x = a", "the same"), ("y = a", "needs a GPU: there"), (None, "anywhere")]}
    text = "x = a\n  y = a\nz = a\n"
    assert runner.read(marked, "f: rule: a -> b", text, 1, "") == ("equivalent", "the same")
    assert runner.read(marked, "f: rule: a -> b", text, 2, "") == ("needs GPU", "needs a GPU: there")
    assert runner.read(marked, "f: rule: a -> b", text, 3, "") == ("equivalent", "anywhere")
    del marked["f: rule: a -> b"][-1]
    assert runner.read(marked, "f: rule: a -> b", text, 3, runner.UNREACHED) == ("survived", runner.UNREACHED)
    assert runner.read(marked, "f: rule: a -> c", text, 1, "") == ("survived", "")


C_COMPILER = shutil.which("cc")


@pytest.mark.skipif(not C_COMPILER, reason="no C compiler")
@pytest.mark.parametrize("value, changed", [(2, True), (1, False)])
def test_an_extension_holds_its_fault(tmp_path, capsys, value, changed):
    """The faulty object stands for the archive's; one that changes nothing is named, and counts as no fault."""

    def compiled(source, text):
        (tmp_path / f"{source}.c").write_text(text)
        subprocess.run([C_COMPILER, "-fPIC", "-c", f"{source}.c", "-o", f"{source}.o"], cwd=tmp_path, check=True)

    compiled("number", "int number(void) { return 1; }")
    compiled("more", "int more(void) { return 10; }")
    compiled("main", "int number(void), more(void); int asked(void) { return number() + more(); }")
    subprocess.run(["ar", "qc", "librooftile_cpp.a", "number.o", "more.o"], cwd=tmp_path, check=True)
    build, name = gpu_faults.Build(tmp_path), "raw_last"
    build.tree = build.folder = tmp_path
    build.link_line = f"{C_COMPILER} -shared -s -o {tmp_path}/_C.abi3.so main.o -L. librooftile_cpp.a -lm"
    instances = tmp_path / gpu_faults.INSTANCES
    build.compiles = {
        str(instances / "decode_int4_kivi_above_128.cu"): {"command": "cc -o number.o"},
        str(instances / "decode_int4_kivi_sym_above_128.cu"): {"command": "cc -o none.o"},
        str(instances / "decode_int4_kivi_up_to_128.cu"): {"command": "cc -o more.o"},
    }
    (tmp_path / "python/rooftile").mkdir(parents=True)
    compiled("faulty", f"int number(void) {{ return {value}; }}")
    (tmp_path / f"faults/{name}").mkdir(parents=True)
    (tmp_path / "faulty.o").rename(tmp_path / f"faults/{name}/object0.o")
    shutil.copy(tmp_path / "more.o", tmp_path / f"faults/{name}/object1.o")
    assert build.link_package(name) is changed
    assert ctypes.CDLL(str(build.package(name) / "rooftile/_C.abi3.so")).asked() == value + 10
    assert ("is the same with the fault" in capsys.readouterr().out) is not changed


GPU_TESTS = """
import os, time
from pathlib import Path

import pytest

MUTANT = os.environ["ROOFTILE_MUTANT"]

@pytest.mark.parametrize("i", range(3))
def test_first(i):
    with open(os.environ["ORDER"], "a") as order:
        print(MUTANT, "first", i, file=order)
    if (MUTANT, i) == ("2", 1):
        [note] = Path(os.environ["NOTES"]).glob("*.2.gpu")
        os.utime(note, (0, 0))  # as if this test had begun long ago
        time.sleep(60)

@pytest.mark.parametrize("i", range(3))
def test_second(i):
    with open(os.environ["ORDER"], "a") as order:
        print(MUTANT, "second", i, file=order)
    assert (MUTANT, i) != ("1", 0)

@pytest.mark.slow
def test_that_takes_much():
    raise AssertionError
"""
GPU_RUN = """
import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
import forks

forks.WARM = ["pytest", "torch"]
tests = [forks.Test("gpu", ("tests/python/test_gpu.py",))]
jobs = [forks.Job(number, list(tests), package=Path(sys.argv[2])) for number in range(3)]
named = ("test_second", "tests/python/test_gpu.py::test_first[2]")
jobs.append(forks.Job(3, [dataclasses.replace(tests[0], first=named)], package=Path(sys.argv[2])))
forks.Forks(Path(sys.argv[2]), 1, switch=False).run(jobs, lambda job: print(job.number, job.outcome))
"""


@pytest.mark.slow
def test_faults_of_gpu_kernels_meet_the_first_case_of_every_function_first(tmp_path):
    """Behind the tests that are named. And a test that takes too long ends its run."""
    tree = tmp_path / "tree"
    (tree / "tests/python").mkdir(parents=True)
    (tree / "tests/python/test_gpu.py").write_text(GPU_TESTS)
    (tree / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["slow", "model"]\n')
    order = tmp_path / "order"
    environment = {**os.environ, "ORDER": str(order), "NOTES": str(tmp_path / "work")}
    command = [sys.executable, "-c", GPU_RUN, str(FOLDER), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=True)
    test = "tests/python/test_gpu.py::test"
    assert done.stdout.splitlines() == [
        "0 None",
        f"1 Outcome(how='failed', by='{test}_second[0]')",
        f"2 Outcome(how='timed out', by='{test}_first[1]')",
        "3 None",
    ]
    ran = order.read_text().splitlines()
    assert ran[:6] == [f"0 {name} {i}" for i in range(3) for name in ("first", "second")]
    assert ran[6:11] == ["1 first 0", "1 second 0", "2 first 0", "2 second 0", "2 first 1"]
    assert ran[11:] == ["3 first 2", "3 second 0", "3 second 1", "3 second 2", "3 first 0", "3 first 1"]


@pytest.mark.parametrize(
    "test_began, run_began, late",
    [(0, 0, False), (0, 1000, False), (1000, 1000, True), (None, 0, False), (None, 1000, True)],
)
def test_what_hangs_is_a_test_not_the_many(tmp_path, test_began, run_began, late):
    """began: seconds ago; None: no test has begun. All tests of a fault of the GPU kernels may take longer together."""
    note = tmp_path / "note"
    if test_began is not None:
        note.touch()
        os.utime(note, times=(time.time() - test_began,) * 2)
    children = forks.Forks.__new__(forks.Forks)  # without the folder and the imports of a run
    children.switch = False
    assert children._late({"note": note, "began": time.monotonic() - run_began}) is late


@pytest.mark.parametrize("cut", [None, 3, 5])
def test_what_killed_a_fault_of_a_gpu_kernel_runs_without_it_at_once(tmp_path, monkeypatch, cut):
    """A run that is cut short keeps what it knows by then. cut: jobs that end before that."""
    killers = {"divisor": "a::one", "mask_end": "a::one", "window_begin": "", "tree_factors": "b::always"}

    class OneAfterAnother:
        def __init__(self, tree, jobs, switch):
            pass

        def run(self, jobs, done, minutes):
            queue, ended = list(jobs), 0
            while queue and ended != cut:
                job = queue.pop(0)
                by = killers.get(job.package.parent.name, job.tests[0].ids[0])
                fails = by and (job.package != tmp_path / "build/mutants/gpu/python" or by.endswith("always"))
                job.outcome = forks.Outcome("failed", by) if fails else None
                queue[:0] = [more] if (more := done(job)) else []
                ended += 1

    monkeypatch.setattr(forks, "Forks", OneAfterAnother)
    told = []
    survived, unjudged = gpu_faults.run(
        tmp_path, list(killers), 1, lambda fault, how, by: told.append((fault.what, how, by)), minutes=1
    )
    what = {name: gpu_faults.FAULTS[name].what for name in killers}
    expected = [
        (what["divisor"], "failed", "a::one"),
        (what["mask_end"], "failed", "a::one"),
        (what["window_begin"], "survived", ""),
    ]
    assert told == (expected[:2] if cut == 3 else expected)
    assert survived == ([] if cut == 3 else ["window_begin"]) and unjudged == ([] if cut else ["tree_factors"])
