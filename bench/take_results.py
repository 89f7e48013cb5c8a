#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a run on a GPU left in a folder becomes the results of this tree, and its tables.

take_results.py FOLDER     FAMILY.json of `rooftile bench`, demo.json of `rooftile demo --device cuda` and tests.json
                           of bench/run_on_gpu.sh go to bench/results/MACHINE, after the GPU's name; README and
                           docs/kernels show that machine from then on, but for pages that have a machine's name, and
                           bench/results/outdated.txt no longer names what was replaced
"""

import argparse
import importlib.util
import json
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def _script(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TABLES, LOGS = _script("tables"), _script("read_logs")
TAKEN = *TABLES.BENCH, "demo", "tests"


def machine_folder(gpu):
    """ "h200" of "NVIDIA H200", "h100" of "NVIDIA H100 80GB HBM3"."""
    return gpu.lower().removeprefix("nvidia ").split()[0]


def fault(path, result):
    """Why a file may not be taken, or None."""
    family = result.get("family")
    if result.get("schema") != 1 or family != path.stem or family not in TAKEN:
        return f"schema {result.get('schema')} of family {family}"
    if family == "tests":
        if result.get("digest") != LOGS.digest(result):
            return "it is not what bench/read_logs.py wrote"
        return "; ".join(LOGS.failures(result)) or None
    if not result["rows"]:
        return "it has no rows"
    if family == "demo":
        return None
    failed = [f"{n['case']} {n['variant']}: {n['why']}" for n in result["left_out"] if n["failed"]]
    return "; ".join(failed) or None


def take(folder, root=ROOT):
    """What was done, a line each; ValueError where a file may not be taken, before anything is written."""
    found = {path: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    found = {path: r for path, r in found.items() if path.stem in TAKEN}
    faults = [f"{path}: {why}" for path, result in found.items() if (why := fault(path, result))]
    machines = {machine_folder(result["machine"]["gpu"]) for result in found.values()}
    if faults or len(machines) != 1:
        raise ValueError("\n".join(faults) or f"{folder}: results of {len(machines)} machines, expected one")
    (machine,) = machines
    results, said = root / "bench" / "results", []
    (results / machine).mkdir(exist_ok=True)
    for path in found:
        shutil.copyfile(path, results / machine / path.name)
        said.append(f"bench/results/{machine}/{path.name}")
    outdated, replaced = results / "outdated.txt", {f"{machine}/{path.name}" for path in found}
    kept = [line for line in outdated.read_text().splitlines() if line.partition(" ")[0] not in replaced]
    outdated.write_text("".join(line + "\n" for line in kept))
    gpus = [path.name for path in results.iterdir() if any((path / f"{f}.json").exists() for f in TABLES.BENCH)]
    for page in (root / "README.md", *sorted((root / "docs" / "kernels").glob("*.md"))):
        text, count = TABLES.fill(page.read_text(), results, {} if page.stem in gpus else dict.fromkeys(gpus, machine))
        page.write_text(text)
        said.append(f"{page.relative_to(root)}: {count} tables")
    return said


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    try:
        print("\n".join(take(parser.parse_args(arguments).folder)))
    except ValueError as e:
        parser.error(str(e))
    return 0


if __name__ == "__main__":
    sys.exit(main())
