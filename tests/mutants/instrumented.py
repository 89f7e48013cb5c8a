# SPDX-License-Identifier: Apache-2.0
"""A copy of the tree in which every mutant stands beside its original; the variable ROOFTILE_MUTANT chooses one.

The copy lies in build/mutants/tree. Its extension and C++ tests are built once. A mutant that does not compile is left
out and the next one of its file is drawn.
"""

import json
import platform
import random
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import by_hand
import cpp_rules
import places
import python_rules
from places import Mutant
from reach import BYTES

HEADER = """#pragma once
#include <fcntl.h>
#include <sys/mman.h>
#include <cstdlib>
inline const int rooftile_active = [] {
  const char* number = std::getenv("ROOFTILE_MUTANT");
  return number ? std::atoi(number) : 0;
}();
inline unsigned char* const rooftile_reached = [] {
  const char* path = std::getenv("ROOFTILE_REACHED");
  const int file = path ? open(path, O_RDWR) : -1;
  void* map = file < 0 ? MAP_FAILED : mmap(nullptr, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  return map == MAP_FAILED ? nullptr : static_cast<unsigned char*>(map);
}();
[[gnu::noinline, gnu::cold]] inline void rooftile_reach(int number) { rooftile_reached[number] = 1; }
constexpr bool rooftile_mutant(int number) {
  if (rooftile_active == number) return true;
  if (!rooftile_active && rooftile_reached) rooftile_reach(number);
  return false;
}
""".replace("BYTES", str(BYTES))
# The SIMD sources are one text for every instruction set: the copy builds one of them, without -O3, and what
# avx512vnni and avx512bf16 have of their own.
X86 = (
    ("cpp/cpu/CMakeLists.txt", "set(isas portable)", "set(isas)"),
    ("cpp/cpu/CMakeLists.txt", "isas avx2 avx512 avx512vnni avx512bf16 amx)", "isas avx2 avx512vnni avx512bf16)"),
    ("cpp/cpu/dispatch.cpp", "{amx_kernels, has_amx},", ""),
    ("cpp/cpu/CMakeLists.txt", "-O1,-O3>", "-O1,-O2>"),
    ("cpp/cpu/dispatch.cpp", "{avx512_kernels, has_avx512},", ""),
    ("cpp/cpu/simd/table.cpp", "kernels = avx512_kernels();", "kernels = avx2_kernels();"),
    ("cpp/cpu/dispatch.cpp", "{portable_kernels, always},", ""),
    ("cpp/cpu/dispatch.cpp", "return portable_kernels();", "return reference_kernels();"),
)
MODULE = """import mmap
import os

active, mark = int(os.environ.get("ROOFTILE_MUTANT", "0")), None
if "ROOFTILE_REACHED" in os.environ:
    from torch._dynamo import assume_constant_result

    with open(os.environ["ROOFTILE_REACHED"], "r+b") as file:
        marks = mmap.mmap(file.fileno(), 0)

    @assume_constant_result  # torch.compile calls it while it traces
    def mark(number):
        marks[number] = 1


def chosen(number):
    if mark is not None:
        mark(number)
    return active == number
"""
MESSAGE = re.compile(r"^(/[^:\s]+):(\d+):(?:\d+:)? (error|note|  )?", re.M)


class Draw:
    """Mutants of a tree: those written by hand, and by rule some of every file, in an order that the seed decides."""

    def __init__(self, tree, seed, refused=()):
        """refused: numbers of mutants that are known not to compile."""
        self.tree, self.seed, self.refused = tree, seed, set(refused)
        self.text, self.waiting, self.chosen, self.few = {}, {}, {}, {}
        for file in places.sources(tree):
            self.text[file] = (tree / file).read_text()
            rules = python_rules if file.endswith(".py") else cpp_rules
            found = [m for m in rules.mutants(file, self.text[file]) if not self._contracted(m)]
            self.waiting[file] = self._mixed(found, random.Random(f"{seed} {file}"))
            self.chosen[file] = []
            self.few[file] = 3 + len(found) // 400
        for fault in by_hand.FAULTS:
            self._hand(fault)
        for file in self.waiting:
            self.fill(file)

    def _contracted(self, m):
        """Whether the line says that the compiler makes one instruction of it: a mutant beside it would unmake that."""
        text = self.text[m.file]
        return "// contracted" in text[text.rfind("\n", 0, m.begin) + 1 : text.find("\n", m.end)]

    @staticmethod
    def _mixed(found, rng):
        """One of every rule in turn, so that common rules do not crowd out rare ones. The last one is drawn first."""
        by_rule = {}
        for m in found:
            by_rule.setdefault(m.rule, []).append(m)
        for of_rule in by_rule.values():
            rng.shuffle(of_rule)
        order = []
        while by_rule:
            for rule in rng.sample(sorted(by_rule), len(by_rule)):
                order.append(by_rule[rule].pop())
                if not by_rule[rule]:
                    del by_rule[rule]
        return order[::-1]

    def _hand(self, fault):
        text = self.text.setdefault(fault.file, (self.tree / fault.file).read_text())
        begin, end = places.find(text, fault)
        form = "expression" if by_hand.is_expression(fault) else "statement"
        m = Mutant(fault.file, begin, end, text[begin:end], fault.faulty, "by hand", form, fault.what)
        for other in self.chosen.setdefault(fault.file, []):
            if places.overlaps(m, other, text):
                raise SystemExit(f"mutants: {fault.what!r} and {other.what!r} share a line of {fault.file}")
        self.chosen[fault.file].append(m)
        self.waiting.setdefault(fault.file, [])

    def fill(self, file):
        """Draws until the file has its number by rule, or no place is left."""
        chosen, text = self.chosen[file], self.text[file]
        while sum(m.rule != "by hand" for m in chosen) < self.few.get(file, 0) and self.waiting[file]:
            m = self.waiting[file].pop()
            if m.number in self.refused or cpp_rules.declares(m):
                continue
            if not any(places.overlaps(m, other, text) for other in chosen):
                chosen.append(m)

    def drop(self, m):
        self.refused.add(m.number)
        self.chosen[m.file].remove(m)
        self.fill(m.file)

    def all(self):
        return [m for file in sorted(self.chosen) for m in sorted(self.chosen[file], key=lambda m: m.begin)]

    def sample(self, n, seed, keys):
        """Keeps n of those whose keys are given."""
        able = [m for m in self.all() if m.key in keys]
        kept = set(random.Random(f"{seed} sample").sample(able, min(n, len(able))))
        for file in self.chosen:
            self.chosen[file] = [m for m in self.chosen[file] if m in kept]
            self.few[file] = sum(m.rule != "by hand" for m in self.chosen[file])


def write(path, text):
    """Only where it differs: what is built from the file stays. Whether it did."""
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return True
    return False


def copy(tree, to, but=()):
    """The files that git knows or would take, except `but`. Python files that are gone are removed."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=tree,
        capture_output=True,
        check=True,
    )
    names = [n for n in listed.stdout.decode().split("\0") if n and (tree / n).is_file()]
    for name in set(names).difference(but):
        data, target = (tree / name).read_bytes(), to / name
        if not target.exists() or target.read_bytes() != data:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
            target.chmod((tree / name).stat().st_mode)
    for folder in ("tests", "python"):
        for path in (to / folder).rglob("*.py"):
            if path.relative_to(to).as_posix() not in names:
                path.unlink()


class Copy:
    def __init__(self, tree, draw):
        self.tree, self.draw, self.to = tree, draw, tree / "build/mutants/tree"
        self.refused = tree / "build/mutants/refused.json"
        copy(tree, self.to, {*draw.chosen, *(file for file, _, _ in X86)})
        write(self.to / "mutant.h", HEADER)
        write(self.to / "python/rooftile_mutant.py", MODULE)

    def plant(self):
        planted = {}
        for file, chosen in self.draw.chosen.items():
            rules = python_rules if file.endswith(".py") else cpp_rules
            text = rules.planted(self.draw.text[file], chosen)
            if file.endswith(".py"):
                compile(text, file, "exec")
            planted[file] = text
        for file, usual, here in X86 if platform.machine() in ("x86_64", "AMD64") else ():
            text = planted.get(file) or (self.tree / file).read_text()
            if usual not in text:
                raise SystemExit(f"mutants: {file} no longer has {usual!r}; say in instrumented.py what it is now")
            planted[file] = text.replace(usual, here)
        changed = [file for file, text in planted.items() if write(self.to / file, text)]
        return bool(changed)

    def configure(self):
        command = ["cmake", "--preset", "cpu", f"-DPython_EXECUTABLE={sys.executable}", "-DROOFTILE_WERROR=OFF"]
        command += [f"-DCMAKE_CXX_FLAGS=-include {self.to / 'mutant.h'}", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"]
        # a mutant in an array's size is no constant: refused in its own line, not where the array is used
        command += ["-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG -Werror=vla"]
        ninja = Path(sys.executable).parent / "ninja"
        if ninja.exists():
            command.append(f"-DCMAKE_MAKE_PROGRAM={ninja}")
        subprocess.run(command, cwd=self.to, check=True, stdout=subprocess.DEVNULL)

    def syntax(self, jobs):
        """Drops what does not compile, one file at a time and without code, until every file compiles."""
        commands = json.loads((self.to / "build/cpu/compile_commands.json").read_text())
        left = [c for c in commands if "/tests/" not in c["file"]]
        while left:
            with ThreadPoolExecutor(jobs) as pool:
                said = list(pool.map(self._check, left))
            left = [c for c, text in zip(left, said, strict=True) if text]
            self._blame("".join(said))

    @staticmethod
    def _check(command):
        words = shlex.split(command["command"])
        if words and Path(words[0]).name == "ccache":
            words = words[1:]
        at = words.index("-o")
        words[at : at + 2] = ["-fsyntax-only", "-O0"]
        done = subprocess.run(words, cwd=command["directory"], capture_output=True, text=True)
        return done.stderr if done.returncode else ""

    def _blame(self, said):
        """Drops the mutants on whose lines the compiler found errors."""
        if not said:
            return
        lines = {"error": set(), "other": set()}
        for path, line, kind in MESSAGE.findall(said):
            lines["error" if kind == "error" else "other"].add((path, int(line)))
        dropped = set()
        for kind in ("error", "other"):
            for m in self.draw.all():
                text, path = self.draw.text[m.file], str(self.to / m.file)
                first, last = places.line_of(text, m.begin), places.line_of(text, m.end - 1)
                if any((path, n) in lines[kind] for n in range(first, last + 1)):
                    dropped.add(m)
            if dropped:
                break
        if not dropped:
            raise SystemExit(f"mutants: the copy does not compile, and not because of a mutant:\n{said[-4000:]}")
        by_rule = [m for m in dropped if m.rule != "by hand"]
        for m in by_rule:
            self.draw.drop(m)
        self.refused.write_text(json.dumps(sorted(self.draw.refused)))
        if not by_rule:
            raise SystemExit("\n".join(f"mutants: the fault {m.what!r} of {m.file} does not compile" for m in dropped))
        print(f"{len(dropped)} mutants do not compile; drew others", flush=True)
        self.plant()

    def build(self, jobs):
        while True:
            command = ["cmake", "--build", "--preset", "cpu", f"-j{jobs}", "--", "-k", "0"]
            done = subprocess.run(command, cwd=self.to, capture_output=True, text=True)
            if not done.returncode:
                return
            self._blame(done.stdout + done.stderr)

    def make(self, jobs):
        changed = self.plant()
        self.configure()
        if changed:
            self.syntax(jobs)
        self.build(jobs)
        return self.draw.all()
