# SPDX-License-Identifier: Apache-2.0
"""What ptxas and the PTX say of every GPU kernel, held to kernel_budgets.json: registers, static shared memory, no
spills, no stack, no performance warnings, and the instructions that the kernel's cost model counts on; and that every
kernel was compiled without assertions, for every target of the build that its line has.

check_kernels.py FOLDER TARGET...             FOLDER holds what keep_reports.py left beside the objects of cpp/kernels;
                                              targets: sm_80 sm_90a, and compute_80 for PTX in the binary
check_kernels.py FOLDER TARGET... --measured  prints the table for what is there now, registers rounded up to eights
check_kernels.py FOLDER TARGET... --selftest  plants faults in copies of the reports and expects each to be found

A line of the table is a pattern of kernel names with the registers allowed on each architecture that has the kernel,
the bytes of shared memory, and what must, and what must not (no_ptx), be found in the PTX of each kernel it matches
(regular expressions); on the architectures that it calls empty the kernel does nothing. Registers are handed out in
eights, so the slack of a budget that is a multiple of eight costs nothing. Spills and stack are 0 unless a line says
how many bytes it takes, on which architecture, to keep a kernel within the registers that let two or three CTAs share
an SM.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

BUDGETS = Path(__file__).with_name("kernel_budgets.json")
WARNING = re.compile(r"\bC75\d\d\b|performance|ptxas\s*:?\s*warning", re.IGNORECASE)
# In no kernel: local memory; atomics (bits would depend on who comes first) but those of integers in shared memory;
# calls of functions.
INTEGERS = r"(?!shared\S*\.(add|or)\.[ubs]\d+\b)"
NEVER = (r"\b(ld|st)\.local\b", rf"(?m)^\s*(@\S+\s+)?(atom|red)\.{INTEGERS}", r"(?m)^\s*(@\S+\s+)?call\b")


@dataclass
class Kernel:
    where: str  # the object and the architecture
    symbol: str
    architecture: str
    name: str = ""
    registers: int = 0
    stack: int = 0
    spills: int = 0
    shared: int = 0
    ptx: str | None = None


def short_names(symbols):
    """split_kv<Fp16D128> of what the compiler made of it."""
    done = subprocess.run(["c++filt"], input="\n".join(symbols), check=True, capture_output=True, text=True)
    for symbol, text in zip(symbols, done.stdout.splitlines(), strict=True):
        text = re.sub(r"\(anonymous namespace\)::|rooftile::(gpu::)?", "", text).removeprefix("void ")
        text = re.sub(r"\((\w+)\)(\d+)", r"\2", text).replace("> >", ">>")  # (KvFormat)3
        yield symbol, text[: text.rindex("(")] if text.endswith(")") else text


def ptx_of_entries(path):
    """{symbol: text} of a PTX file."""
    text = path.read_text()
    headers = re.finditer(r"(?m)^(?:\.visible |\.weak )?\.(?:entry|func)[^\n]*?(\w+)\(", text)
    starts = [(m.start(), m[1]) for m in headers]
    ends = [*(start for start, _ in starts[1:]), len(text)][: len(starts)]
    return {symbol: text[start:end] for (start, symbol), end in zip(starts, ends, strict=True)}


def read(folder):
    """All kernels, and what is wrong already."""
    kernels, problems = [], []
    for report in sorted(folder.rglob("*.cu.o.ptxas")):
        where = report.name.removesuffix(".o.ptxas")
        kernel = None
        for line in report.read_text().splitlines():
            if WARNING.search(line):
                problems.append(f"{where}: {line.strip()}")
            elif m := re.search(r"Compiling entry function '(\w+)' for '(\w+)'", line):
                kernel = Kernel(f"{where} {m[2]}", m[1], m[2])
                kernels.append(kernel)
            elif m := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
                kernel.stack = max(kernel.stack, int(m[1]))  # a function it calls has a line of its own
                kernel.spills += int(m[2]) + int(m[3])
            elif m := re.search(r"Used (\d+) registers", line):
                kernel.registers = int(m[1])
                kernel.shared = int(m[1]) if (m := re.search(r"(\d+) bytes smem", line)) else 0
        for architecture in {k.architecture for k in kernels if k.where.startswith(f"{where} ")}:
            ptx = report.with_name(f"{report.name.removesuffix('.ptxas')}.{architecture}.ptx")
            entries = ptx_of_entries(ptx) if ptx.exists() else {}
            for k in kernels:
                if k.where == f"{where} {architecture}":
                    k.ptx = entries.get(k.symbol)
    names = dict(short_names(sorted({k.symbol for k in kernels})))
    for kernel in kernels:
        kernel.name = names[kernel.symbol]
    if not kernels:
        problems.append(f"{folder}: no reports of kernels")
    return kernels, problems


def lines_for(kernel, budgets):
    return [pattern for pattern in budgets if fnmatchcase(kernel.name, pattern)]


def machine_code(target):
    return target.replace("compute_", "sm_")


def wrong_commands(folder, targets, architectures):
    """architectures: {file: those that the lines of its kernels name}. PTX of compute_80 goes with sm_80."""
    for report in sorted(folder.rglob("*.cu.o.ptxas")):
        where = report.name.removesuffix(".o.ptxas")
        path = report.with_suffix(".command")
        command = path.read_text().splitlines() if path.exists() else []
        if "-DNDEBUG" not in command:
            yield f"{where}: compiled without -DNDEBUG"
        built = {code for codes in re.findall(r"code=\[([^]]*)\]", " ".join(command)) for code in codes.split(",")}
        needed = [t for t in targets if machine_code(t) in architectures.get(where, ())] or targets
        yield from (f"{where}: holds nothing for {target}" for target in needed if target not in built)


def check(folder, budgets, targets):
    kernels, problems = read(folder)
    there = {(k.where, k.name) for k in kernels}
    used, named = set(), {}
    for k in kernels:
        patterns = lines_for(k, budgets)
        used.update(patterns)
        if len(patterns) != 1:
            problems.append(f"{k.where}: {k.name} has {len(patterns)} lines in {BUDGETS.name}: {patterns}")
            continue
        budget = budgets[patterns[0]]
        file = k.where.removesuffix(k.architecture)
        named.setdefault(file.rstrip(), set()).update(budget["registers"])
        if not budget["registers"].keys() & {machine_code(t) for t in targets}:
            continue  # a kernel for Hopper, empty in a build without it
        problems += [
            f"{k.where}: {k.name} is not there for {architecture}"
            for architecture in budget["registers"]
            if architecture in targets and (file + architecture, k.name) not in there
        ]
        for what, is_, allowed in (
            ("registers", k.registers, budget["registers"].get(k.architecture, 0)),
            ("bytes of shared memory", k.shared, budget["shared"]),
            ("bytes of stack", k.stack, budget.get("stack", {}).get(k.architecture, 0)),
            ("bytes of spills", k.spills, budget.get("spills", {}).get(k.architecture, 0)),
        ):
            if is_ > allowed:
                problems.append(f"{k.where}: {k.name} has {is_} {what}, its budget is {allowed}")
        if k.ptx is None:
            problems.append(f"{k.where}: {k.name} has no PTX")
            continue
        claims = [r"\{\s+ret;"] if k.architecture in budget.get("empty", ()) else budget["ptx"]
        for claim in claims:
            if not re.search(claim, k.ptx):
                problems.append(f"{k.where}: {k.name} has no {claim} in its PTX")
        for claim in (*NEVER, *budget.get("no_ptx", ())):
            if found := re.search(claim, k.ptx):
                problems.append(f"{k.where}: {k.name} has {found[0].strip()} in its PTX")
    problems += wrong_commands(folder, targets, named)
    problems += [f"{BUDGETS.name}: no kernel is {pattern}" for pattern in budgets if pattern not in used]
    return problems, len(kernels)


def measured(folder, budgets):
    kernels, _ = read(folder)
    own = ("registers", "shared", "stack", "spills")
    table = {
        pattern: {"registers": {}, "shared": 0, **{key: x for key, x in line.items() if key not in own}}
        for pattern, line in budgets.items()
    }
    for k in sorted(kernels, key=lambda k: k.name):
        for pattern in lines_for(k, budgets) or [k.name]:
            line = table.setdefault(pattern, {"registers": {}, "shared": 0, "ptx": []})
            line["registers"][k.architecture] = max(line["registers"].get(k.architecture, 0), -(-k.registers // 8) * 8)
            line["shared"] = max(line["shared"], k.shared)
            for what, is_ in (("stack", k.stack), ("spills", k.spills)):
                if is_:
                    line.setdefault(what, {})
                    line[what][k.architecture] = max(line[what].get(k.architecture, 0), is_)
    return "{\n" + ",\n".join(f"{json.dumps(p)}: {json.dumps(line)}" for p, line in table.items()) + "\n}"


def planted(text, old, new):
    assert re.search(old, text), f"nothing to plant a fault in: {old}"
    return re.sub(old, new, text, count=1)


def selftest(folder, budgets, targets):
    """Each fault: a change of one file's text, and what has to be said about it."""
    decode = "decode_bits16_up_to_128.cu.o"
    ptx = next(folder.rglob(f"{decode}.*.ptx")).name
    architecture = next(t for t in targets if t.startswith("sm_"))

    def planted_ptx(instruction, said):
        return ptx, r"\n(?=\s*ret;)", f"\n{instruction}\n", f"has {said} in"

    faults = [
        (f"{decode}.ptxas", r"0 bytes spill stores", "8 bytes spill stores", "bytes of spills"),
        (f"{decode}.ptxas", r"0 bytes stack frame", "16 bytes stack frame", "bytes of stack"),
        (f"{decode}.ptxas", r"Used \d+ registers", "Used 255 registers", "255 registers"),
        (f"{decode}.ptxas", r"(Used \d+ registers)[^\n]*", r"\1, 999999 bytes smem", "999999 bytes of shared memory"),
        (f"{decode}.ptxas", r"split_kv", "split_kw", "has 0 lines"),
        (f"{decode}.ptxas", r"\A", "ptxas info    : (C7510) Potential Performance Loss: 'wgmma'\n", "C7510"),
        (ptx, r"(?s)\bmma\.sync.*", "", "has no mma"),
        (ptx, r"(?s).*", "", "has no PTX"),
        (f"{decode}.ptxas", f"for '{architecture}'", "for 'sm_70'", f"is not there for {architecture}"),
        (f"{decode}.command", r"-DNDEBUG", "", "compiled without -DNDEBUG"),
        *((f"{decode}.command", rf"(code=\[[^]]*?)\b{t}\b", r"\1", f"holds nothing for {t}") for t in targets),
        planted_ptx("st.local.u32 [%r1], %r2;", "st.local"),
        planted_ptx("@%p1 atom.global.add.u32 %r1, [%rd1], %r2;", "@%p1 atom."),
        planted_ptx("red.global.add.f32 [%rd1], %f1;", "red."),
        planted_ptx("call.uni (retval0), vprintf, (param0);", "call"),
        planted_ptx("add.f64 %fd1, %fd2, %fd3;", ".f64"),
    ]
    if "sm_90a" in targets:
        hopper = "tma_bits16.cu.o"
        faults += [
            (f"{hopper}.command", r"(code=\[[^]]*?)\bsm_90a\b", r"\1", "holds nothing for sm_90a"),
            (f"{hopper}.sm_90a.ptx", r"(?s)\bwgmma\.mma_async.*", "", "has no wgmma"),
            ("multistage.cu.o.sm_90a.ptx", r"(\{\s+)ret;", r"\1mov.b32 %r1, %r2;\nret;", r"has no \{\s+ret; in"),
        ]
    if "sm_80" in targets:
        faults.append(("multistage.cu.o.sm_80.ptx", r"(?s)\bmma\.sync.*", "", "has no mma"))
    for file, old, new, expected in faults:
        with tempfile.TemporaryDirectory() as copy:
            source = file[: file.index(".cu.o")]
            for path in (p for end in ("ptxas", "ptx", "command") for p in folder.rglob(f"{source}.cu.o*.{end}")):
                shutil.copy(path, copy)
            path = Path(copy) / file
            own = {p: line for p, line in budgets.items() if any(fnmatchcase(k.name, p) for k in read(Path(copy))[0])}
            if before := check(Path(copy), own, targets)[0]:
                yield f"found without a fault: {before[0]}"
            path.write_text(planted(path.read_text(), old, new))
            found = check(Path(copy), own, targets)[0]
            if not any(expected in problem for problem in found):
                yield f"not found: {expected!r} after {old!r} became {new!r} in {file}"
    found = check(folder, {**budgets, "no_such_kernel": next(iter(budgets.values()))}, targets)[0]
    if not any("no kernel is no_such_kernel" in problem for problem in found):
        yield "not found: a budget without a kernel"


if __name__ == "__main__":
    folder, budgets = Path(sys.argv[1]), json.loads(BUDGETS.read_text())
    targets = [argument for argument in sys.argv[2:] if not argument.startswith("--")]
    if "--measured" in sys.argv:
        print(measured(folder, budgets))
        sys.exit()
    if "--selftest" in sys.argv:
        problems, summary = list(selftest(folder, budgets, targets)), "every planted fault was found"
    else:
        problems, count = check(folder, budgets, targets)
        summary = f"{count} kernels within their budgets"
    print("\n".join(problems) or summary)
    sys.exit(bool(problems))
