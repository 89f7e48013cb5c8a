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
from dataclasses import dataclass, field
from pathlib import Path

WARM = (
    "numpy torch pytest hypothesis ml_dtypes safetensors.torch gguf tokenizers compressed_tensors transformers"
    " transformers.models.llama.modeling_llama"
).split()
MEMORY = 8 << 30  # bytes of private memory a child may take


@dataclass
class Outcome:
    """how: passed, failed, crashed or timed out. by: the id of the test that did not pass."""

    how: str
    by: str = ""
    seconds: float = 0.0
    cpu: float = 0.0


@dataclass
class Job:
    number: int  # of the mutant; 0: none
    tests: list  # in the order in which they run
    passed: list = field(default_factory=list)
    outcome: Outcome | None = None  # of the first that did not pass
    only: str = ""  # the id of one test
    of: "Job | None" = None  # the job whose outcome this one holds against the code without a fault


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


class Forks:
    def __init__(self, tree, jobs, switch=True):
        """tree: the instrumented copy. switch: False where the fault is built in and cannot be turned off (GPU)."""
        self.tree, self.jobs, self.switch, self.work = tree, jobs, switch, tree.parent / "work"
        self.times = tree.parent / "times.json"
        self.usual = json.loads(self.times.read_text()) if self.times.exists() else {}  # test -> seconds, CPU seconds
        self.sound = set()  # ids of tests that pass without a fault
        self.left_out = {}  # test -> ids of its tests that fail without a fault; "" stands for all
        self.started = 0
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir(parents=True)
        for name in WARM:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        assert "rooftile" not in sys.modules, "a child imports rooftile itself, with its mutant"

    def run(self, jobs, done, minutes=None):
        """Runs each Job until a test does not pass, which must pass without a fault; tells done(job).

        All jobs run their first test before one runs its second: most mutants are killed soon, and a run that is cut
        short, after so many minutes, has seen every mutant.
        """
        end = time.monotonic() + 60 * minutes if minutes else float("inf")
        queue, selector, running = collections.deque(jobs), selectors.DefaultSelector(), {}
        while queue or running:
            if time.monotonic() > end:
                queue.clear()
            while queue and len(running) < self.jobs:
                self._start(queue.popleft(), selector, running)
            ready = [key.fd for key, _ in selector.select(timeout=1.0)]
            ready += [fd for fd, state in running.items() if time.monotonic() > state["until"] and fd not in ready]
            for fd in ready:
                state = running.pop(fd)
                selector.unregister(fd)
                self._judge(state["job"], state["test"], self._end(fd, state), queue, done)

    def _judge(self, job, test, outcome, queue, done):
        put = queue.append
        if job.of is not None:
            if outcome.how == "passed":
                self.sound.add(job.of.outcome.by)
                return done(job.of)
            print(f"{job.of.outcome.by} {outcome.how} without a fault: it is left out", flush=True)
            self.left_out.setdefault(test, []).append(job.only)
            job, put = job.of, queue.appendleft
            job.outcome = None
        elif outcome.how == "passed":
            self.usual[test] = outcome.seconds, outcome.cpu
            save(self.times, self.usual)
            job.passed.append(test)
        else:
            job.outcome, only = outcome, outcome.by
            outcome.by = outcome.by or f"{test} as a whole"
            if outcome.by in self.sound or not self.switch:
                return done(job)
            return queue.appendleft(Job(0, [test], only=only, of=job))
        return put(job) if self._next_of(job) else done(job)

    def _next_of(self, job):
        return next((t for t in job.tests if t not in job.passed and "" not in self.left_out.get(t, ())), None)

    def _start(self, job, selector, running):
        test = self._next_of(job) if job.of is None else job.tests[0]
        seconds, cpu = self.usual.get(test, (30.0, 180.0))
        self.started += 1
        note = self.work / f"{self.started}.{job.number}.{test.replace(':', '.')}"
        pid = os.fork()
        if pid == 0:
            self._child(job, test, note, int(5 * cpu + 60))
        fd = os.pidfd_open(pid)
        until = time.monotonic() + 20 * seconds + 300
        running[fd] = {"job": job, "test": test, "pid": pid, "note": note, "began": time.monotonic(), "until": until}
        selector.register(fd, selectors.EVENT_READ)

    def _end(self, fd, state):
        late = time.monotonic() > state["until"]
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
        return Outcome(how, by if how != "passed" else "", round(seconds, 2), round(used.ru_utime + used.ru_stime, 2))

    @staticmethod
    def _failed(note):
        """What GoogleTest's output names: the test that failed, or the one that ran last."""
        text = Path(f"{note}.log").read_text(errors="replace")
        named = re.findall(r"\[  FAILED  \] (\w+\.[\w/]+)", text)[:1] or re.findall(r"\[ RUN      \] (\S+)", text)[-1:]
        return named[0] if named else ""

    def _child(self, job, test, note, cpu_seconds):
        code = 70
        try:
            os.setpgid(0, 0)
            resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 5))
            if self.switch:  # a CUDA driver maps more than that
                resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.environ["ROOFTILE_MUTANT"] = str(job.number)
            os.environ["PYTHONPATH"] = str(self.tree / "python")
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
            os.chdir(self.tree)
            out = os.open(f"{note}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1)
            os.dup2(out, 2)
            if test.startswith("c:"):
                binary = self.tree / "build/cpu/tests/cpp" / test.removeprefix("c:")
                chosen = job.only or "-" + ":".join(self.left_out.get(test, ()))
                os.execv(binary, [str(binary), "--gtest_fail_fast", f"--gtest_filter={chosen}"])
            import pytest

            sys.path[:0] = [str(self.tree / "python")]
            arguments = ["-q", "-x", "--tb=short", "-p", "no:cacheprovider", f"--basetemp={note}.tmp"]
            arguments += [f"--rootdir={self.tree}", "-c", str(self.tree / "pyproject.toml")]
            arguments += [f"--deselect={name}" for name in self.left_out.get(test, ())]
            arguments.append(job.only or f"tests/python/test_{test}.py")
            code = int(pytest.main(arguments, plugins=[Watch(note)]))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def save(path, data):
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")
