# SPDX-License-Identifier: Apache-2.0
"""Do the tests see faults? Plants them, builds, runs the tests that can reach each, and records which test killed it.

python tests/mutants list                 what is drawn, and the faults of the GPU kernels
python tests/mutants run                  all of them on the CPU; --again for the survivors
python tests/mutants run --only TEXT      those of files whose path has the text; --record puts them into the record
python tests/mutants run --sample N       N of those that the recorded run killed, each with the test that killed it
python tests/mutants reread               the recorded survivors once more, after equivalent.json has changed
python tests/mutants gpu [NAME ...]       faults of the GPU kernels, an extension each; needs nvcc and a GPU
python tests/mutants plant NAME TREE      one fault of the GPU kernels into a copy of the tree

Results go to tests/mutants/kills.json with --record. See docs/contributing.md.
"""

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import forks
import gpu_faults
import instrumented
import places

TREE = Path(__file__).resolve().parents[2]
WORK = TREE / "build/mutants"
KILLS = TREE / "tests/mutants/kills.json"
EQUIVALENT = TREE / "tests/mutants/equivalent.json"
# Of the recorded run. The next one takes the next number: tests were written for the survivors of this draw
SEED = 11
MANY = 200  # ids; where more tests of a file reach a mutant, the file runs whole
UNREACHED = "no test reaches it"
# Tests of the sources' texts, of other builds and of what an installation holds
NOT_HERE = (
    "mutants",
    "readme",
    "results",
    "instruction_sets",
    "cpp_run",
    "run_on_gpu",
    "known_bugs",
    "stub",
    "host_cost",
)


def git(*arguments):
    return subprocess.run(["git", *arguments], cwd=TREE, capture_output=True, text=True, check=True).stdout.strip()


def tree_state(commit):
    """commit: of a tree without a git of its own, as its user says, who alone knows whether it was changed; default:
    what git says of this one."""
    if commit:
        return {"commit": commit}
    return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain", "-uno"))}


def machine():
    name = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
            break
    return {"cpu": name, "cores": os.cpu_count(), "python": platform.python_version(), "system": platform.system()}


def equivalent():
    """key -> [(line, why no test can tell the mutant from the original, or none without a GPU ("needs a GPU: .."))].

    line: of the source, where the mutant begins; it tells places with the same text apart.
    """
    entries = {}
    for e in json.loads(EQUIVALENT.read_text()):
        key = f"{e['file']}: {e['rule']}: {e['original']} -> {e['mutated']}"
        entries.setdefault(key, []).append((e.get("line"), e["reason"]))
    return entries


def read(marked, key, text, line, by):
    """(result, by) of a mutant that no test killed. marked: equivalent(). text, line: the file, and where it is there.
    by: what the run said."""
    here = text.splitlines()[line - 1].strip()
    why = next((why for where, why in marked.get(key, ()) if where in (None, here)), None)
    if why is None:
        return "survived", by
    return "needs GPU" if why.startswith("needs a GPU: ") else "equivalent", why


class Record:
    """What is known of every mutant of this build; kept in build/mutants while a run goes on."""

    def __init__(self, draw, mutants, seed, commit):
        self.path, self.text, self.mutants = WORK / "record.json", draw.text, mutants
        self.data = {
            **tree_state(commit),
            "seed": seed,
            "machine": machine(),
            "tests_left_out": [],
            "results": {},
        }

    def add(self, m, how, by):
        self.data["results"][str(m.number)] = [how, by]
        forks.save(self.path, self.data)

    def rows(self):
        marked = equivalent()
        for m in self.mutants:
            how, by = self.data["results"].get(str(m.number), ("not finished", ""))
            line = places.line_of(self.text[m.file], m.begin)
            if how == "passed":
                how, by = read(marked, m.key, self.text[m.file], line, by)
            row = {"file": m.file, "line": line, "rule": m.rule}
            if m.what:
                row["what"] = m.what
            row.update(original=places.one_line(m.original), mutated=places.one_line(m.mutated), result=how, by=by)
            yield row


def counted(rows):
    counts = {}
    for row in rows:
        killed = row["result"] in ("failed", "crashed", "timed out")
        result = "killed" if killed else row["result"]
        counts[result] = counts.get(result, 0) + 1
    judged = counts.get("killed", 0) + counts.get("survived", 0)
    counts["share killed"] = round(counts.get("killed", 0) / judged, 4) if judged else None
    return counts


def run(args):
    seed = SEED if args.seed is None else args.seed
    refused = WORK / "refused.json"
    draw = instrumented.Draw(TREE, seed, json.loads(refused.read_text()) if refused.exists() else ())
    if args.sample:
        draw.sample(args.sample, args.sample_seed, seen_here(known_killers()))
        if not draw.all():
            sys.exit(f"mutants: {KILLS} records no kill of a mutant that is still there: run with --record first")
    copy = instrumented.Copy(TREE, draw)
    began = time.monotonic()
    mutants = copy.make(args.jobs)
    print(f"{len(mutants)} mutants in one build: {time.monotonic() - began:.0f} s", flush=True)
    record = Record(draw, mutants, seed, args.commit)
    results = record.data["results"]
    if args.again and record.path.exists():
        old = json.loads(record.path.read_text())
        if old["seed"] == seed:
            results.update({n: result for n, result in old["results"].items() if result[0] != "passed"})
    queue = {m.number: m for m in mutants if args.only in f"{m.file} {m.what}" and str(m.number) not in results}
    runner, killers = forks.Forks(copy.to, args.jobs), known_killers()
    if args.sample:
        tests = {m.number: [forks.named_test(killers[m.key])] for m in queue.values()}
    else:
        reach = surveyed(runner, copy.to, sorted(m.number for m in mutants))
        tests = {m.number: tests_that_reach(reach, m.number, killers.get(m.key, "")) for m in queue.values()}
        record.data["tests_left_out"] = [t[0] for entry in reach.values() for t in entry["tests"] if not t[2]]

    def done(job):
        m = queue[job.number]
        outcome = job.outcome or forks.Outcome("passed", "" if tests[job.number] else UNREACHED)
        record.add(m, outcome.how, outcome.by)
        where = f"{m.file}:{places.line_of(draw.text[m.file], m.begin)}"
        how = "SURVIVED" if outcome.how == "passed" else outcome.how
        change = f"{places.one_line(m.original)[:70]} -> {places.one_line(m.mutated)[:70]}"
        print(f"{how:9} {where} {m.what or m.rule}: {change} [{outcome.by}]", flush=True)

    jobs = [forks.Job(number, list(of)) for number, of in tests.items()]
    for job in jobs:
        if not job.tests:
            done(job)
    runner.run([job for job in jobs if job.tests], done, args.minutes)
    rows = [row for row in record.rows() if args.only in f"{row['file']} {row.get('what', '')}"]
    counts = counted(rows)
    print(json.dumps(counts))
    if args.record:
        head = {key: value for key, value in record.data.items() if key != "results"}
        if args.only:
            head, rows = with_part(
                kills(), head, rows, {m.file for m in mutants if args.only not in f"{m.file} {m.what}"}
            )
        forks.save(KILLS, {**head, **gpu_record(), "counts": counted(rows), "mutants": rows + gpu_rows()})
    if args.at_least and counts["share killed"] is not None and counts["share killed"] < args.at_least:
        sys.exit(f"mutants: {counts['share killed']:.0%} killed, at least {args.at_least:.0%} expected")


def with_part(recorded, head, rows, others):
    """(head, rows) of the recorded run with these rows, of whole files, in place of those that it has of the files.

    Each says of which commit it is. head: of the run of this part. others: files of which it left something out.
    """
    files = {row["file"] for row in rows}
    if files & others:
        sys.exit(
            f"mutants: --only with --record takes whole files; of {', '.join(sorted(files & others))} some are not run"
        )
    if head.get("changed") is not False or head["seed"] != recorded["seed"]:
        sys.exit(f"mutants: a part is recorded of an unchanged tree, with the record's seed {recorded['seed']}")
    kept = [row for row in recorded["mutants"] if row["rule"] != "GPU" and row["file"] not in files]
    rows = kept + [row | {"commit": head["commit"]} for row in rows]
    return {k: v for k, v in recorded.items() if k not in ("gpu", "counts", "mutants")}, rows


def reread(args):
    """The sources are those of the commit that was run."""
    recorded, marked = kills(), equivalent()
    for row in recorded["mutants"]:
        if row["rule"] != "GPU" and row["result"] in ("survived", "equivalent", "needs GPU"):
            text = git("show", f"{row.get('commit', recorded['commit'])}:{row['file']}")
            by = row["by"] if row["result"] == "survived" else ""
            row["result"], row["by"] = read(marked, key_of(row), text, row["line"], by)
    recorded["counts"] = counted(row for row in recorded["mutants"] if row["rule"] != "GPU")
    print(json.dumps(recorded["counts"]))
    forks.save(KILLS, recorded)


def kills():
    return json.loads(KILLS.read_text()) if KILLS.exists() else {"mutants": []}


def gpu_record():
    return {"gpu": kills()["gpu"]} if "gpu" in kills() else {}


def gpu_rows():
    return list(gpu_faults.rows(TREE, kills()))


def gpu_machine():
    """Asked of another process: one that has begun to use CUDA cannot fork children that use it."""
    asked = "import torch; print(torch.cuda.get_device_name(), torch.version.cuda, sep='\\n')"
    said = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True).stdout
    return dict(zip(("device", "cuda"), said.splitlines(), strict=True))


def gpu(args):
    recorded, seen, where = kills(), {}, tree_state(args.commit)
    if not args.compile_only:
        where |= gpu_machine()

    def done(fault, how, by):
        seen[fault.what] = {"result": how, "by": by, "commit": where["commit"]}
        if args.record:
            save()

    def save():
        rows = [r for r in recorded["mutants"] if r["rule"] != "GPU"]
        for row in gpu_rows():
            rows.append(row | seen.get(row["what"], {}))
        head = {**where, "counts": counted(r for r in rows if r["rule"] == "GPU")}
        forks.save(KILLS, {**recorded, "gpu": head, "mutants": rows})

    names = args.names or list(gpu_faults.FAULTS)
    for name in names:
        gpu_faults.check_name(name)
    survived = unjudged = ()
    failed = [] if args.compiled else gpu_faults.compile_all(TREE, names, args.jobs)
    if not args.compile_only:
        names = [name for name in names if name not in failed]
        killers = {r["what"]: r["by"] for r in recorded["mutants"] if r["rule"] == "GPU"}
        survived, unjudged = gpu_faults.run(TREE, names, args.jobs, done, args.minutes, killers)
    groups = {
        "have no extension": failed,
        "survived": survived,
        "killed by a test that fails without a fault": unjudged,
    }
    wrong = [f"{how}: {', '.join(names)}" for how, names in groups.items() if names]
    sys.exit(f"mutants: {'; '.join(wrong)}" if wrong else 0)


def surveyed(runner, copy, numbers):
    """{file of tests: what Reach.saved() says}; of files whose tests have not changed since, what was found before."""
    path, folder = WORK / "reach.json", copy / "tests/python"
    old = json.loads(path.read_text()) if path.exists() else {}
    helpers = b"".join(f.read_bytes() for f in sorted(folder.glob("*.py")) if not f.name.startswith("test_"))
    texts = {f.stem.removeprefix("test_"): f.read_bytes() for f in folder.glob("test_*.py")}
    texts |= {f"c:{f.name}": f.read_bytes() for f in (copy / "build/cpu/tests/cpp").glob("test_*") if not f.suffix}
    now = {
        name: hashlib.sha256(repr(numbers).encode() + helpers + text).hexdigest()
        for name, text in texts.items()
        if name not in NOT_HERE
    }
    found = {name: entry for name, entry in old.items() if entry["of"] == now.get(name)}
    waiting = [name for name in now if name not in found]
    waiting.sort(key=lambda name: -old.get(name, {}).get("seconds", 0.0))

    def done(name, reach):
        found[name] = {"of": now[name], **reach.saved()}
        forks.save(path, found)
        wrong = sum(not passed for _, _, passed, _ in reach.tests)
        left_out = f", {wrong} left out that do not pass without a fault" if wrong else ""
        left_out += "" if reach.whole else ", and all behind these: it crashed without a fault"
        print(f"{len(found)}/{len(now)} {name}: {len(reach.tests)} tests, {reach.seconds:.0f} s{left_out}", flush=True)

    runner.survey(waiting, numbers, done)
    return found


def tests_that_reach(reach, number, killer):
    """[forks.Test]: the one that killed the mutant in the recorded run first, then what takes the least time."""
    tests = []
    for name, entry in reach.items():
        able = [t for t in entry["tests"] if t[2]]
        chosen = able if number in entry["always"] else [t for t in able if number in t[3]]
        if not chosen:
            continue
        seconds = 3.0 + sum(t[1] for t in chosen)
        cpu = 10.0 + entry["cpu"] * min(1.0, seconds / max(1.0, entry["seconds"]))
        ids, but = tuple(t[0] for t in sorted(chosen, key=lambda t: t[1])), ()
        if name.startswith("c:") or len(ids) > MANY:
            ids, but = (), tuple(t[0] for t in entry["tests"] if not t[2])
        tests.append(forks.Test(name, ids, seconds, cpu, but))
    first = forks.named_test(killer).name
    return sorted(tests, key=lambda test: (test.name != first, test.seconds))


def key_of(row):
    """places.Mutant.key of a recorded mutant."""
    return f"{row['file']}: {row['rule']}: {row['original']} -> {row['mutated']}"


def known_killers():
    """key -> the test that killed the mutant in the recorded run."""
    return {
        key_of(row): row["by"]
        for row in kills()["mutants"]
        if row["result"] in ("failed", "crashed", "timed out") and row["rule"] != "GPU"
    }


def seen_here(killers):
    """Without those of instructions that this CPU has not got: their tests are skipped."""
    cpu = Path("/proc/cpuinfo")
    flags = cpu.read_text(encoding="utf-8") if cpu.exists() else ""
    own = {"avx512_vnni": "test_w4a16_integer_row.py", "avx512_bf16": "test_w4a16_bf16_rows.py"}
    skipped = [file for flag, file in own.items() if flag not in flags]
    return {key: by for key, by in killers.items() if not any(file in by for file in skipped)}


def list_all(args):
    draw = instrumented.Draw(TREE, SEED if args.seed is None else args.seed)
    for m in draw.all():
        print(f"{m.file}:{places.line_of(draw.text[m.file], m.begin)}: {m.what or m.rule}: "
              f"{places.one_line(m.original)} -> {places.one_line(m.mutated)}")  # fmt: skip
    for fault, line in gpu_faults.lines(TREE):
        print(f"{fault.file}:{line}: needs GPU: {fault.what}")
    for file, few in draw.few.items():
        if sum(m.rule != "by hand" for m in draw.chosen[file]) < few:
            print(f"{file}: has no more places than {len(draw.chosen[file])}")


def main():
    parser = argparse.ArgumentParser(
        prog="mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="name all faults")
    running = commands.add_parser("run", help="plant, build, run the tests, record kills")
    for command in (listing, running):
        command.add_argument("--seed", type=int, help=f"decides which places are drawn; default {SEED}")
    running.add_argument("--sample", type=int, metavar="N", help="N of those that the recorded run killed")
    running.add_argument("--sample-seed", type=int, default=0, help="decides which those are; default 0")
    running.add_argument("--only", default="", metavar="TEXT", help="mutants whose file or description has this text")
    running.add_argument("--again", action="store_true", help="those not killed yet, with the tests as they are now")
    running.add_argument("--at-least", type=float, metavar="SHARE", help="fail if a smaller share is killed")
    commands.add_parser("reread", help="what equivalent.json says of the recorded survivors")
    on_gpu = commands.add_parser("gpu", help="faults of the GPU kernels, each in an extension of its own")
    on_gpu.add_argument("names", nargs="*", help="default: all")
    made = on_gpu.add_mutually_exclusive_group()
    made.add_argument("--compile-only", action="store_true", help="make the extensions; needs nvcc, no GPU")
    made.add_argument("--compiled", action="store_true", help="run those that were made before; needs a GPU, no nvcc")
    for command in (running, on_gpu):
        command.add_argument("--minutes", type=float, help="stop after so many; the rest is not finished")
        command.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time")
        command.add_argument("--record", action="store_true", help=f"write {KILLS.name}")
        command.add_argument("--commit", help="what the record calls this tree; default: git's name of it")
    planting = commands.add_parser("plant", help="one fault of the GPU kernels into a copy of the tree")
    planting.add_argument("name")
    planting.add_argument("tree", type=Path)
    args = parser.parse_args()
    if args.command == "list":
        list_all(args)
    elif args.command == "run":
        run(args)
    elif args.command == "reread":
        reread(args)
    elif args.command == "gpu":
        gpu(args)
    else:
        gpu_faults.plant_one(TREE, args.name, args.tree)


if __name__ == "__main__":
    main()
