# SPDX-License-Identifier: Apache-2.0
"""Which test reaches which mutant: code beside a mutant marks a byte of a file that all processes of a test share."""

import json
import mmap
from pathlib import Path

BYTES = (1 << 28) + 1  # one for each number of a mutant; a file with holes


class Reach:
    """What one file of tests reaches. In the child that runs it this is a pytest plugin.

    tests: [[id, seconds, whether it passed, numbers of mutants]]; of a C++ binary one entry, without an id. What is
    reached before the first test, while modules are imported, counts for every test: `always`.
    """

    def __init__(self, path, numbers):
        self.path, self.numbers, self.note = path, numbers, Path(f"{path}.tests")
        self.tests, self.always, self.seconds, self.cpu = [], [], 0.0, 0.0
        self.spent, self.passed, self.first, self.whole = 0.0, True, True, True

    def make(self):
        with open(self.path, "wb") as file:
            file.truncate(BYTES)

    def taken(self):
        """The numbers that are marked, which are cleared."""
        with open(self.path, "r+b") as file, mmap.mmap(file.fileno(), BYTES) as marks:
            found = [n for n in self.numbers if marks[n]]
            for n in found:
                marks[n] = 0
        return found

    def pytest_runtest_logstart(self, nodeid):
        if self.first:
            self._write("", 0.0, True)
        self.first, self.spent, self.passed = False, 0.0, True

    def pytest_runtest_logreport(self, report):
        self.spent += report.duration
        self.passed = self.passed and not report.failed
        if report.when == "teardown":
            self._write(report.nodeid, round(self.spent, 3), self.passed)

    def _write(self, *what):
        with self.note.open("a") as file:
            file.write(json.dumps([*what, self.taken()]) + "\n")

    def end(self, name, outcome, seconds, cpu):
        """In the parent, when the child has ended."""
        self.seconds, self.cpu, self.whole = seconds, cpu, outcome.how in ("passed", "failed")
        if name.startswith("c:"):
            self.tests = [["", seconds, outcome.how == "passed", self.taken()]]
        elif self.note.exists():
            lines = [json.loads(line) for line in self.note.read_text().splitlines()]
            self.always, self.tests = lines[0][3], lines[1:]
        self.path.unlink()
        self.note.unlink(missing_ok=True)

    def saved(self):
        return {"seconds": self.seconds, "cpu": self.cpu, "always": self.always, "tests": self.tests}
