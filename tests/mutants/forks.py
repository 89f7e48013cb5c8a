# SPDX-License-Identifier: Apache-2.0
"""Runs test files in forks of one warm interpreter: a mutant costs its tests, not their imports."""

import collections
import contextlib
import importlib
import json
import os
import re
import resource
import selectors
import shutil
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from reach import Reach

WARM = (
    "numpy torch pytest hypothesis ml_dtypes safetensors.torch gguf tokenizers compressed_tensors transformers"
    " transformers.models.llama.modeling_llama"
).split()
MEMORY = 8 << 30  # bytes of private memory a child may take
HANGS = 120.0  # seconds after which a test that uses a GPU hangs


@dataclass(frozen=True)
class Test:
    """A C++ test binary (c:NAME) or a file of tests/python (test_NAME.py), or some of its tests."""

    name: str
    ids: tuple = ()  # of pytest; empty: all of them
    seconds: float = 30.0  # that they take without a fault
    cpu: float = 180.0
    but: tuple = ()  # ids that are left out
    first: tuple = ()  # ids and names of test functions that run before the others, where a fault is built in


def named_test(by):
    """The Test of what Outcome.by names: of one test, or of a whole file or binary."""
    if "::" not in by:
        return Test(by.removesuffix(" as a whole"))
    name = by.partition("::")[0]
    return Test(name if name.startswith("c:") else Path(name).stem.removeprefix("test_"), (by,))


@dataclass
class Outcome:
    """how: passed, failed, crashed or timed out. by: the id of the test that did not pass."""

    how: str
    by: str = ""


@dataclass
class Job:
    number: int  # of the mutant; 0: none
    tests: list  # in the order in which they run
    outcome: Outcome | None = None  # of the first that did not pass
    package: Path | None = None  # the folder that holds rooftile; default: the tree's


class Watch:
    """A pytest plugin that notes which test runs, and which failed first."""

    def __init__(self, note):
        self.note, self.failed = note, False

    def pytest_runtest_logstart(self, nodeid):
        self._write(nodeid)

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self._write(report.nodeid)
            self.failed = True

    def pytest_collectreport(self, report):
        if report.failed:
            self._write("")
            self.failed = True

    def _write(self, text):
        if not self.failed:
            self.note.write_text(text)


class Interleaved:
    """A pytest plugin: what is named in `first` (ids, then names of functions), then the first case of every test
    function, then every second case, and so on. Most faults fail the first cases of some function; a survivor takes
    all cases of all files."""

    def __init__(self, first=()):
        self.first = first

    def pytest_collection_modifyitems(self, items):
        seen = collections.Counter()
        order = {}
        for item in items:
            function = item.nodeid.partition("[")[0]
            names = [item.nodeid, function.rpartition("::")[2]]
            rank = next((i for i, name in enumerate(names) if name in self.first), len(names))
            order[item.nodeid] = rank, seen[function]
            seen[function] += 1
        items.sort(key=lambda item: order[item.nodeid])


class Forks:
    def __init__(self, tree, jobs, switch=True):
        """tree: the instrumented copy. switch: False where the fault is built in and cannot be turned off (GPU); no
        test of a child may then take longer than HANGS, however many there are."""
        self.tree, self.jobs, self.switch, self.work = tree, jobs, switch, tree.parent / "work"
        self.started = 0
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir(parents=True)
        for name in WARM:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        assert "rooftile" not in sys.modules, "a child imports rooftile itself, with its mutant"

    def survey(self, names, numbers, done):
        """Runs each file of tests without a fault and tells done(name, Reach): which test reaches which mutant."""
        waiting = collections.deque(names)

        def start():
            name = waiting.popleft()
            reach = Reach(self.work / f"{name.replace(':', '.')}.reach", numbers)
            reach.make()
            return Test(name, seconds=600.0, cpu=3600.0), 0, reach

        def ended(test, reach, outcome, seconds, cpu):
            reach.end(test.name, outcome, seconds, cpu)
            done(test.name, reach)

        self._all(waiting, start, ended)

    def run(self, jobs, done, minutes=None):
        """Runs the tests of each Job until one does not pass; tells done(job), which may return a Job to run next.

        All jobs run their first test before one runs its second: most mutants are killed soon, and a run that is cut
        short, after so many minutes, has seen every mutant. Of jobs that are not finished then nothing is told.
        """
        queue = collections.deque(jobs)

        def start():
            job = queue.popleft()
            return job.tests.pop(0), job.number, job

        def ended(test, job, outcome, seconds, cpu):
            if outcome.how != "passed":
                job.outcome = outcome
                if test.name.startswith("c:"):
                    outcome.by = f"{test.name}::{outcome.by}"
                outcome.by = outcome.by or f"{test.name} as a whole"
            if not job.outcome and job.tests:
                queue.append(job)
            elif more := done(job):
                queue.appendleft(more)

        self._all(queue, start, ended, time.monotonic() + 60 * minutes if minutes else float("inf"))

    def _all(self, queue, start, ended, end=float("inf")):
        """Keeps `jobs` children at work as long as the queue has something to start, and time is left."""
        selector, running = selectors.DefaultSelector(), {}
        while queue or running:
            if time.monotonic() > end:
                for fd, state in running.items():
                    self._end(fd, state)
                return
            while queue and len(running) < self.jobs:
                self._start(*start(), selector, running)
            ready = [key.fd for key, _ in selector.select(timeout=1.0)]
            ready += [fd for fd, state in running.items() if self._late(state) and fd not in ready]
            for fd in ready:
                state = running.pop(fd)
                selector.unregister(fd)
                ended(state["test"], state["of"], *self._end(fd, state))

    def _start(self, test, number, of, selector, running):
        self.started += 1
        note = self.work / f"{self.started}.{number}.{test.name.replace(':', '.')}"
        pid = os.fork()
        if pid == 0:
            self._child(test, number, note, of)
        fd = os.pidfd_open(pid)
        until = time.monotonic() + 20 * test.seconds + 60
        running[fd] = {"of": of, "test": test, "pid": pid, "note": note, "began": time.monotonic(), "until": until}
        selector.register(fd, selectors.EVENT_READ)

    def _late(self, state):
        if self.switch:
            return time.monotonic() > state["until"]
        with contextlib.suppress(FileNotFoundError):  # a new test has begun since the note was written
            return time.time() - state["note"].stat().st_mtime > HANGS
        return time.monotonic() - state["began"] > HANGS

    def _end(self, fd, state):
        late = self._late(state)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(state["pid"], signal.SIGKILL)  # what is left of its own children; itself where it is late
        _, status, used = os.wait4(state["pid"], 0)
        os.close(fd)
        note, seconds = state["note"], time.monotonic() - state["began"]
        by = note.read_text() if note.exists() else self._failed(note)
        shutil.rmtree(f"{note}.tmp", ignore_errors=True)
        how = "passed"
        if os.WIFSIGNALED(status):
            out_of_time = late or os.WTERMSIG(status) == signal.SIGXCPU
            how = "timed out" if out_of_time else "crashed"
        elif os.WEXITSTATUS(status):
            how = "failed"
        if how == "passed":
            for left in (note, Path(f"{note}.log")):
                left.unlink(missing_ok=True)
        return Outcome(how, by if how != "passed" else ""), round(seconds, 2), round(used.ru_utime + used.ru_stime, 2)

    @staticmethod
    def _failed(note):
        """What GoogleTest's output names: the test that failed, or the one that ran last."""
        text = Path(f"{note}.log").read_text(encoding="utf-8", errors="replace")
        named = re.findall(r"\[  FAILED  \] (\w+\.[\w/]+)", text)[:1] or re.findall(r"\[ RUN      \] (\S+)", text)[-1:]
        return named[0] if named else ""

    def _child(self, test, number, note, of):
        code, reach = 70, of if isinstance(of, Reach) else None
        package = str(getattr(of, "package", None) or self.tree / "python")
        try:
            os.setpgid(0, 0)
            if self.switch:
                cpu_seconds = int(5 * test.cpu + 60)
                resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 5))
                resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))  # a CUDA driver maps more than that
                os.environ["CUDA_VISIBLE_DEVICES"] = ""
            else:
                sys.modules["torch"].set_num_threads(1)  # the other children have the other cores
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.environ["ROOFTILE_MUTANT"] = str(number)
            if reach:
                os.environ["ROOFTILE_REACHED"] = str(reach.path)
            os.environ["PYTHONPATH"] = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
            os.chdir(self.tree)
            out = os.open(f"{note}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1)
            os.dup2(out, 2)
            if test.name.startswith("c:"):
                binary = self.tree / "build/cpu/tests/cpp" / test.name.removeprefix("c:")
                os.execv(binary, [str(binary), *([] if reach else ["--gtest_fail_fast"])])
            import pytest

            sys.path[:0] = [package]
            file = f"tests/python/test_{test.name}.py"
            arguments = ["-q", "--tb=short", "-p", "no:cacheprovider", f"--basetemp={note}.tmp"]
            arguments += [f"--rootdir={self.tree}", "-c", str(self.tree / "pyproject.toml")]
            arguments += [] if reach else ["-x"]
            arguments += ["-m", "not slow and not model"]
            arguments += [] if self.switch else ["-k", "cuda or gpu or device"]
            arguments += [f"--deselect={name}" for name in test.but]
            arguments += test.ids or [file]
            plugins = [reach or Watch(note), *([] if self.switch else [Interleaved(test.first)])]
            code = int(pytest.main(arguments, plugins=plugins))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def save(path, data):
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")
