#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the tests of bench/run_on_gpu.sh counted, out of their logs, as one JSON file; none if anything failed.

read_logs.py LOG ... --json FILE     tests.log is pytest's, test_NAME.log that of a C++ test program, test_NAME.TOOL.log
                                     the program's under a tool of compute-sanitizer; other logs are no tests

The file is sealed: "digest" is over all the rest, so a file that somebody wrote into is told from one that was not.
"""

import argparse
import hashlib
import json
import re
import sys
from pathlib import Path


def pytest_counts(text):
    """{"passed", "skipped", "failed", "errors", "deselected", "seconds"} from pytest's last line; None without one."""
    found = re.findall(r"^(?:=+ )?((?:\d+ [a-z]+, )*\d+ [a-z]+) in ([\d.]+)s(?: \([\d:]+\))?(?: =+)?$", text, re.M)
    if not found:
        return None
    words, seconds = found[-1]
    counts = {
        word.removesuffix("s") if word == "errors" else word: int(n) for n, word in re.findall(r"(\d+) (\w+)", words)
    }
    names = {
        "passed": "passed",
        "skipped": "skipped",
        "failed": "failed",
        "errors": "error",
        "deselected": "deselected",
    }
    return {name: counts.get(word, 0) for name, word in names.items()} | {"seconds": float(seconds)}


def program_counts(text):
    """{"passed", "skipped", "failed"} from what GoogleTest prints last; None if the program did not come so far."""
    if not re.search(r"^\[=+\] \d+ tests? from .* ran\.", text, re.M):
        return None
    counts = {
        name: re.search(rf"^\[ +{name.upper()} +\] (\d+) tests?", text, re.M)
        for name in ("passed", "skipped", "failed")
    }
    return {name: int(found[1]) if found else 0 for name, found in counts.items()}


def sanitizer_errors(text):
    """The errors that compute-sanitizer counted, of racecheck the hazards; None if it did not come so far."""
    found = re.findall(r"^=+ (?:ERROR SUMMARY: (\d+) errors?|RACECHECK SUMMARY: (\d+) hazards?)", text, re.M)
    return int("".join(found[-1])) if found else None


def read(logs):
    """{"pytest", "programs": {name: counts}, "sanitizers": {name: {tool: errors}}} of the logs at these paths."""
    out = {"pytest": None, "programs": {}, "sanitizers": {}}
    for path in map(Path, logs):
        name, _, tool = path.stem.partition(".")
        text = path.read_text(errors="replace")
        if path.name == "tests.log":
            out["pytest"] = pytest_counts(text)
        elif name.startswith("test_") and tool:
            out["sanitizers"].setdefault(name, {})[tool] = sanitizer_errors(text)
        elif name.startswith("test_"):
            out["programs"][name] = program_counts(text)
    return out


def failures(counted):
    """One line for everything in what read() gives that failed, or did not come to its end."""
    found = []
    for name, counts in (("pytest", counted["pytest"]), *counted["programs"].items()):
        if counts and counts["passed"] == 0 and counts["failed"] == 0:
            found.append(f"{name}: nothing passed")
        if counts:
            found += [f"{name}: {counts[k]} {k}" for k in ("failed", "errors") if counts.get(k)]
        elif name != "pytest":
            found.append(f"{name}: did not come to its end")
    for name, tools in counted["sanitizers"].items():
        for tool, errors in tools.items():
            if errors != 0:
                found.append(
                    f"{name} under {tool}: {'did not come to its end' if errors is None else f'{errors} errors'}"
                )
    return found


def digest(report):
    """SHA-256 over all of a report but its digest."""
    rest = {key: value for key, value in report.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="*", metavar="LOG")
    parser.add_argument("--json", required=True, type=Path, metavar="FILE")
    parser.add_argument("--commit", metavar="NAME")
    parser.add_argument("--mode", default="usual")
    parser.add_argument("--left-out", nargs="*", default=[], metavar="WHAT")
    args = parser.parse_args(arguments)
    args.json.unlink(missing_ok=True)  # what an earlier run wrote is not this one's
    counted = read(args.logs)
    failed = failures(counted)
    if counted["pytest"] is None and "tests.log" in {Path(log).name for log in args.logs}:
        failed.append("pytest: did not come to its end")
    if failed:
        print(f"{args.json} is not written: " + "; ".join(failed), file=sys.stderr)
        return 1
    if counted == read([]):  # every test was left out, or skipped
        return 0
    import torch
    from rooftile._results import head, machine

    facts = {**machine("cuda"), "gpus": torch.cuda.device_count()}
    report = {**head("tests", args.commit), "machine": facts, "mode": args.mode, "left_out": args.left_out} | counted
    args.json.write_text(json.dumps(report | {"digest": digest(report)}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
