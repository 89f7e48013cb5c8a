# SPDX-License-Identifier: Apache-2.0
"""Do the tests see faults? Plants them, builds, runs the tests that can reach each, and records which test killed it.

python tests/mutants list                 what is drawn, and the faults of the GPU kernels
python tests/mutants run                  all of them on the CPU; --sample N for N of them, --again for the survivors
python tests/mutants gpu [NAME ...]       faults of the GPU kernels, each built and tested alone; needs a GPU
python tests/mutants plant NAME TREE      one fault of the GPU kernels into a copy of the tree

Results go to tests/mutants/kills.json with --record. See docs/contributing.md.
"""

import argparse
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
from tests_for import tests_for

TREE = Path(__file__).resolve().parents[2]
WORK = TREE / "build/mutants"
KILLS = TREE / "tests/mutants/kills.json"
EQUIVALENT = TREE / "tests/mutants/equivalent.json"
SEED = 2


def git(*arguments):
    return subprocess.run(["git", *arguments], cwd=TREE, capture_output=True, text=True, check=True).stdout.strip()


def machine():
    name = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
            break
    return {"cpu": name, "cores": os.cpu_count(), "python": platform.python_version(), "system": platform.system()}


def equivalent():
    """key -> why no test can tell the mutant from the original."""
    return {
        f"{e['file']}: {e['rule']}: {e['original']} -> {e['mutated']}": e["reason"]
        for e in json.loads(EQUIVALENT.read_text())
    }


class Record:
    """What is known of every mutant of this build; kept in build/mutants while a run goes on."""

    def __init__(self, draw, mutants, seed):
        self.path, self.text, self.mutants = WORK / "record.json", draw.text, mutants
        self.data = {
            "commit": git("rev-parse", "HEAD"),
            "changed": bool(git("status", "--porcelain", "-uno")),
            "seed": seed,
            "machine": machine(),
            "tests_left_out": [],
            "results": {},
        }

    def add(self, m, outcome, left_out):
        self.data["results"][str(m.number)] = [outcome.how, outcome.by]
        self.data["tests_left_out"] = sorted(f"{test} {name}".strip() for test in left_out for name in left_out[test])
        forks.save(self.path, self.data)

    def rows(self):
        marked = equivalent()
        for m in self.mutants:
            how, by = self.data["results"].get(str(m.number), ("not finished", ""))
            if how == "passed":
                how = "survived"
            if how != "not finished" and m.key in marked:
                how, by = "equivalent", marked[m.key]
            row = {"file": m.file, "line": places.line_of(self.text[m.file], m.begin), "rule": m.rule}
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
        draw.sample(args.sample)
    copy = instrumented.Copy(TREE, draw)
    began = time.monotonic()
    mutants = copy.make(args.jobs)
    print(f"{len(mutants)} mutants in one build: {time.monotonic() - began:.0f} s", flush=True)
    record = Record(draw, mutants, seed)
    if args.again and record.path.exists():
        old = json.loads(record.path.read_text())
        if old["seed"] == seed:
            record.data["results"] = {n: result for n, result in old["results"].items() if result[0] != "passed"}
    runner, killers = forks.Forks(copy.to, args.jobs), known_killers()
    results = record.data["results"]
    queue = {m.number: m for m in mutants if args.only in f"{m.file} {m.what}" and str(m.number) not in results}

    def order(m):
        """The test that killed the mutant in the recorded run first."""
        return sorted(tests_for(m.file), key=lambda name: name != killers.get(m.key))

    def done(job):
        m, outcome = queue[job.number], job.outcome or forks.Outcome("passed")
        record.add(m, outcome, runner.left_out)
        where = f"{m.file}:{places.line_of(draw.text[m.file], m.begin)}"
        how = "SURVIVED" if outcome.how == "passed" else outcome.how
        change = f"{places.one_line(m.original)[:70]} -> {places.one_line(m.mutated)[:70]}"
        print(f"{how:9} {where} {m.what or m.rule}: {change} [{outcome.by}]", flush=True)

    runner.run([forks.Job(m.number, order(m)) for m in queue.values()], done, args.minutes)
    rows = list(record.rows())
    counts = counted(rows)
    print(json.dumps(counts))
    if args.record:
        rows += gpu_faults.rows(TREE)
        head = {key: value for key, value in record.data.items() if key != "results"}
        forks.save(KILLS, {**head, "counts": counted(rows), "mutants": rows})
    if args.at_least and counts["share killed"] is not None and counts["share killed"] < args.at_least:
        sys.exit(f"mutants: {counts['share killed']:.0%} killed, at least {args.at_least:.0%} expected")


def known_killers():
    """key -> the test file that killed the mutant in the recorded run: it is tried first."""
    if not KILLS.exists():
        return {}
    found = {}
    for row in json.loads(KILLS.read_text())["mutants"]:
        if row["result"] in ("failed", "crashed", "timed out"):
            key = f"{row['file']}: {row['rule']}: {row['original']} -> {row['mutated']}"
            found[key] = row["by"].partition("::")[0].rpartition("/")[2].removeprefix("test_").removesuffix(".py")
    return found


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
    running.add_argument("--sample", type=int, metavar="N", help="N of all, drawn by the seed")
    running.add_argument("--only", default="", metavar="TEXT", help="mutants whose file or description has this text")
    running.add_argument("--again", action="store_true", help="those not killed yet, with the tests as they are now")
    running.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time")
    running.add_argument("--minutes", type=float, help="start no test after so many; the rest is not finished")
    running.add_argument("--record", action="store_true", help=f"write {KILLS.name}")
    running.add_argument("--at-least", type=float, metavar="SHARE", help="fail if a smaller share is killed")
    gpu = commands.add_parser("gpu", help="faults of the GPU kernels, each built alone")
    gpu.add_argument("names", nargs="*", help="default: all")
    gpu.add_argument("--compile-only", action="store_true", help="plant all at once and build; needs nvcc, no GPU")
    planting = commands.add_parser("plant", help="one fault of the GPU kernels into a copy of the tree")
    planting.add_argument("name")
    planting.add_argument("tree", type=Path)
    args = parser.parse_args()
    if args.command == "list":
        list_all(args)
    elif args.command == "run":
        run(args)
    elif args.command == "gpu":
        gpu_faults.run(TREE, args.names, args.compile_only)
    else:
        gpu_faults.plant_one(TREE, args.name, args.tree)


if __name__ == "__main__":
    main()
