# SPDX-License-Identifier: Apache-2.0
"""A mutant: a place in a source file and what stands there instead."""

import hashlib
from dataclasses import dataclass

FOLDERS = {
    "cpp/core": (".cpp", ".h"),
    "cpp/cpu": (".cpp", ".h"),
    "cpp/ops": (".cpp", ".h"),
    "python/rooftile/loaders": (".py",),
    "python/rooftile/checkpoints": (".py",),
    "python/rooftile/integrations": (".py",),
}
MODULES = (
    "kv_cache",
    "kv_pages",
    "kv_paged",
    "attention",
    "gemm",
    "fused",
    "nn",
    "quantize",
    "_reasons",
    "torch_ops",
    "_arrays",
    "_calls",
)


@dataclass(frozen=True)
class Mutant:
    file: str  # from the root of the tree
    begin: int  # [begin, end): offsets into the file's text
    end: int
    original: str
    mutated: str  # "" where a statement is left out
    rule: str
    form: str  # "expression" or "statement"
    what: str = ""  # of a fault written by hand: what goes wrong

    @property
    def key(self):
        """Names the mutant in any version of the file that still has its text."""
        return f"{self.file}: {self.rule}: {one_line(self.original)} -> {one_line(self.mutated)}"

    @property
    def number(self):
        """What the switch is set to: of the key and the place, so that other mutants do not change it."""
        return int(hashlib.sha256(f"{self.key} {self.begin}".encode()).hexdigest()[:7], 16) + 1


def one_line(text):
    return " ".join(text.split())


def line_of(text, offset):
    return text.count("\n", 0, offset) + 1


def find(text, fault):
    """[begin, end) of what a fault stands for in its file's text. How lines are broken and spaced does not count.

    Raises SystemExit unless it occurs once.
    """
    at = [i for i, character in enumerate(text) if not character.isspace()]
    squeezed, wanted = "".join(text[i] for i in at), "".join(fault.sound.split())
    if (times := squeezed.count(wanted)) != 1:
        raise SystemExit(
            f"mutants: {fault.what}: {fault.file} has its text {times} times, expected once: {fault.sound!r}"
        )
    first = squeezed.index(wanted)
    return at[first], at[first + len(wanted) - 1] + 1


def overlaps(a, b, text):
    """Whether two mutants touch a common line: a compiler's message names lines."""
    first, last = line_of(text, a.begin), line_of(text, max(a.begin, a.end - 1))
    return not (line_of(text, max(b.begin, b.end - 1)) < first or line_of(text, b.begin) > last)


def sources(tree):
    """Every file that is mutated by rule."""
    found = [p for folder, ends in FOLDERS.items() for p in (tree / folder).rglob("*") if p.suffix in ends]
    found += [p for p in (tree / "python/rooftile").glob("*.py") if p.stem in MODULES]
    return sorted(p.relative_to(tree).as_posix() for p in found)
