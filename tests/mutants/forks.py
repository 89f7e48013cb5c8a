# SPDX-License-Identifier: Apache-2.0
"""Runs test files in forks of one warm interpreter: a mutant costs its tests, not their imports."""

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
from dataclasses import dataclass, field
from pathlib import Path

WARM = (
    "numpy torch pytest hypothesis ml_dtypes safetensors.torch gguf tokenizers compressed_tensors transformers"
    " transformers.models.llama.modeling_llama"
).split()
MEMORY = 8 << 30  # bytes of private memory a child may take


@dataclass
class Outcome:
    """passed, failed, crashed or timed out; by: the first test that failed."""

    how: str
    by: str = ""
    seconds: float = 0.0
    cpu: float = 0.0


@dataclass
class Job:
    number: int
    tests: list  # names, in the order in which they run
    outcomes: dict = field(default_factory=dict)  # test -> Outcome


class First:
    """A pytest plugin that notes the first test that fails."""

    def __init__(self, note):
        self.note = note

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self._write(report.nodeid)

    def pytest_collectreport(self, report):
        if report.failed:
            self._write(f"{report.nodeid} (collection)")

    def _write(self, text):
        if not self.note.exists():
            self.note.write_text(text)


class Forks:
    def __init__(self, tree, jobs):
        """tree: the instrumented copy."""
        self.tree, self.jobs, self.work = tree, jobs, tree.parent / "work"
        self.left_out = {}  # test -> ids of its tests that fail without a fault
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir(parents=True)
        for name in WARM:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        assert "rooftile" not in sys.modules, "a child imports rooftile itself, with its mutant"

    def run(self, queue, limits, done):
        """Runs each Job of `queue` until a test fails. limits: test -> Outcome without a fault. done(job) is told."""
        queue, selector, running = list(queue)[::-1], selectors.DefaultSelector(), {}
        while queue or running:
            while queue and len(running) < self.jobs:
                job = queue.pop()
                self._next(job, limits, selector, running)
            ready = selector.select(timeout=1.0)
            ends = [key.fd for key, _ in ready]
            ends += [fd for fd, state in running.items() if time.monotonic() > state["until"] and fd not in ends]
            for fd in ends:
                state = running.pop(fd)
                selector.unregister(fd)
                job, outcome = state["job"], self._end(fd, state)
                job.outcomes[state["test"]] = outcome
                if outcome.how == "passed" and len(job.outcomes) < len(job.tests):
                    self._next(job, limits, selector, running)
                else:
                    done(job)

    def _next(self, job, limits, selector, running):
        test = job.tests[len(job.outcomes)]
        usual = limits.get(test, Outcome("passed", seconds=300.0, cpu=300.0))
        note = self.work / f"{job.number}.{test.replace(':', '.')}"
        pid = os.fork()
        if pid == 0:
            self._child(job.number, test, note, int(5 * usual.cpu + 60))
        fd = os.pidfd_open(pid)
        running[fd] = {"job": job, "test": test, "pid": pid, "note": note, "began": time.monotonic(),
                       "until": time.monotonic() + 10 * usual.seconds + 120}  # fmt: skip
        selector.register(fd, selectors.EVENT_READ)

    def _end(self, fd, state):
        late = time.monotonic() > state["until"]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(state["pid"], signal.SIGKILL)  # what is left of its own children; itself where it is late
        _, status, used = os.wait4(state["pid"], 0)
        os.close(fd)
        note, seconds = state["note"], time.monotonic() - state["began"]
        by = note.read_text() if note.exists() else self._failed(note, state["test"])
        shutil.rmtree(f"{note}.tmp", ignore_errors=True)
        how = "passed"
        if os.WIFSIGNALED(status):
            out_of_time = late or os.WTERMSIG(status) == signal.SIGXCPU
            how = "timed out" if out_of_time else "crashed"
            by = state["test"]
        elif os.WEXITSTATUS(status):
            how = "failed"
        if how == "passed":
            for left in (note, Path(f"{note}.log")):
                left.unlink(missing_ok=True)
        return Outcome(how, by if how != "passed" else "", round(seconds, 2), round(used.ru_utime + used.ru_stime, 2))

    @staticmethod
    def _failed(note, test):
        """What GoogleTest's output names."""
        named = re.search(r"\[  FAILED  \] (\w+\.\S+?)[,\s]", Path(f"{note}.log").read_text(errors="replace"))
        return f"{test} {named[1]}" if test.startswith("c:") and named else test

    def _child(self, number, test, note, cpu_seconds):
        code = 70
        try:
            os.setpgid(0, 0)
            resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 5))
            resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.environ["ROOFTILE_MUTANT"] = str(number)
            os.environ["PYTHONPATH"] = str(self.tree / "python")
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
            os.chdir(self.tree)
            out = os.open(f"{note}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1)
            os.dup2(out, 2)
            if test.startswith("c:"):
                binary = self.tree / "build/cpu/tests/cpp" / test.removeprefix("c:")
                but = ":".join(name.partition(" ")[2] for name in self.left_out.get(test, ()))
                os.execv(binary, [str(binary), "--gtest_fail_fast", "--gtest_brief=1", f"--gtest_filter=-{but}"])
            import pytest

            sys.path[:0] = [str(self.tree / "python")]
            arguments = ["-q", "-x", "--tb=short", "-p", "no:cacheprovider", f"--basetemp={note}.tmp"]
            arguments += [f"--rootdir={self.tree}", "-c", str(self.tree / "pyproject.toml")]
            arguments += [f"--deselect={name}" for name in self.left_out.get(test, ())]
            code = int(
                pytest.main([*arguments, str(self.tree / f"tests/python/test_{test}.py")], plugins=[First(note)])
            )
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def save(path, data):
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")
