# SPDX-License-Identifier: Apache-2.0
"""What device code keeps to, so that it can be read: no C++ line above 120 columns; in cpp/kernels and cpp/tile no file
above 400 lines and no function above 120; inline asm at 12 places at most, all in cpp/tile; in cpp/kernels no address
arithmetic on pointers of a reinterpret_cast.

check_limits.py ROOT            checks the tree; exits 1 with a line for each place that does not
check_limits.py ROOT --selftest plants a breach of each in a copy of the tree and expects it to be found
"""

import re
import shutil
import sys
import tempfile
from pathlib import Path

COLUMNS, FILE_LINES, FUNCTION_LINES, ASM_PLACES = 120, 400, 120, 12
SUFFIXES = {".h", ".cpp", ".cuh", ".cu"}
DEVICE = ("cpp/kernels/", "cpp/tile/")
NOT_CODE = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'', re.S)
ASM = re.compile(r"\b(?:asm|__asm|__asm__)\b(?:\s+(?:volatile|__volatile__|goto|inline))*\s*\(")
CAST = re.compile(r"\breinterpret_cast\s*<([^;{}()]*)>\s*\(")  # the type, up to the operand
HEAD = re.compile(r"\)\s*(?:(?:const|noexcept|mutable|override|final)\b\s*|&{1,2}\s*|->[^;{}]*|:[^;{}]*)*$")


def sources(root):
    for folder in ("cpp", "python/src", "tests/cpp", "bench"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in SUFFIXES:
                yield path.relative_to(root).as_posix(), path.read_text()


def bare(text):
    """The code alone, each comment and literal as as many blanks: lines and columns stay."""
    return NOT_CODE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)


def functions(code):
    """(first line, number of lines) of every block whose head ends like a function's, lambdas and loops among them."""
    opened, head = [], 0
    for found in re.finditer(r"[{};]", code):
        at = found.start()
        if found[0] == "{":
            before = code[head:at]
            begin = head + len(before) - len(before.lstrip())
            opened.append((begin, HEAD.search(before)))
        elif found[0] == "}" and opened:
            begin, function = opened.pop()
            if function:
                yield code.count("\n", 0, begin) + 1, code.count("\n", begin, at) + 1
        head = found.end()


def arithmetic_on_casts(code):
    """Where a cast to a pointer has a sum as its operand, or is added to or indexed."""
    for found in CAST.finditer(code):
        if "*" not in found[1]:
            continue
        depth, end, summed = 1, found.end(), False
        while depth and end < len(code):
            depth += (code[end] in "([") - (code[end] in ")]")
            summed |= depth == 1 and re.match(r"[\w\])]\s*[+-]\s*[\w(]", code[end - 1 : end + 4]) is not None
            end += 1
        if summed or re.match(r"\s*(?:\[|\+|-[^>])", code[end : end + 4]):
            yield code.count("\n", 0, found.start()) + 1


def problems(root):
    asm = []
    for name, text in sources(root):
        lines, code, device = text.splitlines(), bare(text), name.startswith(DEVICE)
        for number, line in enumerate(lines, 1):
            if len(line) > COLUMNS:
                yield f"{name}:{number}: {len(line)} columns, at most {COLUMNS}"
        if device and len(lines) > FILE_LINES:
            yield f"{name}: {len(lines)} lines, at most {FILE_LINES}"
        for first, count in functions(code) if device else ():
            if count > FUNCTION_LINES:
                yield f"{name}:{first}: a function of {count} lines, at most {FUNCTION_LINES}"
        for number in arithmetic_on_casts(code) if name.startswith("cpp/kernels/") else ():
            yield f"{name}:{number}: address arithmetic on a reinterpret_cast pointer"
        if name.startswith("cpp/") and not name.startswith("cpp/cpu/"):  # the compiler of CPU code is another
            asm += [f"{name}:{code.count(chr(10), 0, found.start()) + 1}" for found in ASM.finditer(code)]
    yield from (f"{place}: inline asm outside of cpp/tile" for place in asm if not place.startswith("cpp/tile/"))
    if len(asm) > ASM_PLACES:
        yield f"inline asm at {len(asm)} places, at most {ASM_PLACES}: {', '.join(asm)}"


def selftest(root):
    body = "  x += '}';  // {\n" * FUNCTION_LINES + "}\n"
    faults = {
        "cpp/core/half.h": (" " * COLUMNS + "x\n", "columns"),
        "cpp/tile/mma.cuh": ("\n" * FILE_LINES, "lines, at most 400"),
        "cpp/tile/copy.cuh": ("void f(int x) const {\n" + body, "a function of"),
        "cpp/tile/warps.cuh": ("void f(int x) const noexcept override {\n" + body, "a function of"),
        "cpp/kernels/launch.h": ('inline void f() { asm volatile("exit;"); }\n', "outside of cpp/tile"),
        "cpp/kernels/warmup.h": ('inline void f() { __asm__ __volatile__("exit;"); }\n', "outside of cpp/tile"),
        "cpp/kernels/device.h": ("inline int f(int* p) { return *reinterpret_cast<int*>(p + 1); }\n", "address arith"),
        "cpp/kernels/backend.h": ("inline int f(int* p) { return reinterpret_cast<int*>(p)[1]; }\n", "address arith"),
        "cpp/kernels/tensor_map.h": ("inline int* f(int* p) { return reinterpret_cast<int*>(p) + 1; }\n", "address"),
        "cpp/tile/element.cuh": ('inline void f() { asm("exit;"); }\n' * (ASM_PLACES + 1), "places, at most"),
    }
    for name, (text, said) in faults.items():
        with tempfile.TemporaryDirectory() as copy:
            for folder in ("cpp", "python/src", "tests/cpp", "bench"):
                shutil.copytree(root / folder, Path(copy) / folder)
            with (Path(copy) / name).open("a") as file:
                file.write(text)
            if not any(said in problem for problem in problems(Path(copy))):
                yield f"not found: {said!r} in {name}"


if __name__ == "__main__":
    check = selftest if "--selftest" in sys.argv else problems
    found = list(check(Path(sys.argv[1])))
    print("\n".join(found) or "every file keeps to the limits")
    sys.exit(bool(found))
