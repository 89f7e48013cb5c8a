#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Markdown tables of results files, and the pages that show them.

tables.py RESULTS.json [PATTERN ...]   prints the table of `rooftile bench`, `rooftile demo` or `rooftile ppl`; of cases
                                       that match a shell pattern if any are given, and of our variants that match X
                                       where there are patterns variant=X
tables.py --into PAGE ...              writes every table of these pages anew, between the markers
                                       `<!-- table: MACHINE/FAMILY [PATTERN ...] -->` and `<!-- end of table -->`, from
                                       bench/results/MACHINE/FAMILY.json; MACHINE/standing sums all families up,
                                       MACHINE/measured names the GPUs of all results
tables.py --machine OLD=NEW --into ... the same, and tables of OLD become tables of NEW where that has the file
"""

import argparse
import json
import re
import sys
from fnmatch import fnmatchcase
from pathlib import Path

OURS = "rooftile"


def microseconds(us):
    return f"{us:.0f}" if us >= 100 else f"{us:.1f}"


def table(result, patterns=()):
    """The table's text; ValueError where no case matches. Patterns choose cases and variants of `rooftile bench`."""
    if result["family"] in VARIANT_ROWS:
        head, cells = VARIANT_ROWS[result["family"]]
        lines = [["", *head], ["---", *["---:"] * len(head)]]
        lines += [[row["name"], *cells(row, result)] for row in result["rows"] if not row.get("missing")]
        return _markdown(lines) + "\n" + _where(result) + "\n"
    cases = {}
    for row in _chosen(beside_peers(result), patterns):
        cases.setdefault(row["case"], []).append(row)
    if not cases:
        raise ValueError(f"no case of {result['family']} matches {' or '.join(patterns) or 'anything'}")
    variants = list(dict.fromkeys(r["variant"] for rows in cases.values() for r in rows if r["impl"] == OURS))
    peers = any(r["impl"] != OURS for rows in cases.values() for r in rows)
    head = ["case", *variants, *(["fastest peer", "peer / ours"] if peers else [])]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for case, rows in cases.items():
        ours = {r["variant"]: r for r in rows if r["impl"] == OURS}
        cells = [case + (" (warm)" if {r["l2"] for r in rows} == {"warm"} else "")]
        cells += [f"{_us(ours[v])} ({ours[v]['percent_of_roof']:.0f} %)" if v in ours else "" for v in variants]
        if peers:
            held = [ours[v] for v in variants if v in ours and ours[v]["peer"]]
            fastest = {r["impl"]: r for r in sorted(rows, key=lambda r: -r["us"])}  # of each peer the fastest row
            names = dict.fromkeys(r["peer"] for r in held)
            cells += [
                "<br>".join(f"{_us(fastest[name])} {name}" for name in names),
                " / ".join(_ratio(r) for r in held),
            ]
        lines.append(cells)
    return _markdown(lines) + "\n" + caption(result) + "\n"


def _us(row):
    spread = f" ± {(row['us_p90'] - row['us_p10']) / 2:.1f}" if "us_p90" in row else ""
    return microseconds(row["us"]) + spread


def _ratio(row):
    return "level" if row["level"] else f"{row['peer_ratio']:.2f}"


def beside_peers(result):
    """The rows, ours with their fastest peer: as the file has it, or worked out for a file without turns and spread."""
    rows = result["rows"]
    if all("level" in r for r in rows if r["impl"] == OURS):
        return rows
    best = {}
    for r in rows:
        if r["impl"] != OURS:
            best[r["case"]] = min(best.get(r["case"], r), r, key=lambda r: r["us"])

    def beside(r):
        p = best.get(r["case"])
        found = {"peer": p["impl"], "peer_ratio": p["us"] / r["us"]} if p else {"peer": None, "peer_ratio": None}
        return r | found | {"level": False}

    return [beside(r) if r["impl"] == OURS else r for r in rows]


def standing(results):
    """How often each variant of ours is faster than the fastest peer, level with it and slower; results: of bench."""
    lines = [["", "cases", "faster", "level", "slower", "peer / ours at best", "at worst"]]
    lines.append(["---", *["---:"] * (len(lines[0]) - 1)])
    for result in results:
        rows = [r for r in beside_peers(result) if r["impl"] == OURS and r["peer"]]
        for variant in dict.fromkeys(r["variant"] for r in rows):
            held = sorted((r for r in rows if r["variant"] == variant), key=lambda r: r["peer_ratio"])
            level = sum(r["level"] for r in held)
            faster = sum(not r["level"] and r["peer_ratio"] > 1 for r in held)
            ends = [f"{r['peer_ratio']:.2f} {r['case']} ({r['peer']})" for r in (held[-1], held[0])]
            counts = [len(held), faster, level, len(held) - faster - level]
            lines.append([f"{result['family']} {variant}", *map(str, counts), *ends])
    gpus = dict.fromkeys(result["machine"]["gpu"] for result in results)
    commits = dict.fromkeys(f"{result['commit']} ({result['date']})" for result in results)
    return _markdown(lines) + f"\n{', '.join(gpus)}, commit {', '.join(commits)}.\n"


GPUS = "A100", "H100", "H200", "L40S", "RTX 30", "RTX 40", "RTX 50", "B200"


def measured(results):
    """Which GPUs the results are of, and which well-known ones they are not."""
    gpus = dict.fromkeys(result["machine"]["gpu"] for result in results)
    others = [name for name in GPUS if not any(name in gpu for gpu in gpus)]
    return f"Measured on one {' and one '.join(gpus)}, and on no other GPU: never on {', '.join(others)}.\n"


def _chosen(rows, patterns):
    of_variant = [p.removeprefix("variant=") for p in patterns if p.startswith("variant=")]
    of_case = [p for p in patterns if not p.startswith("variant=")]

    def matches(text, patterns):
        return not patterns or any(fnmatchcase(text, pattern) for pattern in patterns)

    rows = [r for r in rows if matches(r["case"], of_case) and (r["impl"] != OURS or matches(r["variant"], of_variant))]
    ours = {r["case"] for r in rows if r["impl"] == OURS}
    return [r for r in rows if r["case"] in ours or not of_variant]  # no case that has peers alone


def _markdown(lines):
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def _range(values, unit):
    return f"{'-'.join(str(v) for v in sorted(set(values)))} {unit}" if values else ""


def _where(result):
    """Machine, commit and date."""
    machine = result["machine"]
    if "gpu" in machine:
        what = f"{machine['gpu']}, driver {machine['driver']}"
    else:
        what = f"{machine['cpu']}, {machine['cores']} cores"
    return f"{what}, torch {machine['torch']}. Commit {result['commit']}, {result['date']}."


def caption(result):
    """What was measured, where and how."""
    machine, ceiling = result["machine"], result["ceiling"]
    missing = f"; peers not measured: {', '.join(result['missing'])}" if result["missing"] else ""
    if "bf16_burst_tflop_s" not in ceiling:  # of a harness that measured in another order, and the clock at rest
        return (
            f"Microseconds (percent of the roof). Roof: {ceiling['read_gb_s']:.0f} GB/s read, "
            f"{ceiling['bf16_tflop_s']:.0f} TFLOP/s bf16, a rate under the power limit that short products exceed. "
            f"{result['harness']}{missing}. {_where(result)}"
        )
    load = [_range(machine["sm_clock_mhz"], "MHz"), _range(machine["power_w"], "W")]
    load = f" Under load {', '.join(part for part in load if part)}." if any(load) else ""
    return (
        "Microseconds ± half of the middle eight tenths of the rounds (percent of the roof); level: these meet. Roof, "
        f"measured in the same run: {ceiling['read_gb_s']:.0f} GB/s read, {ceiling['bf16_burst_tflop_s']:.0f} TFLOP/s "
        f"bf16 in a burst ({ceiling['bf16_sustained_tflop_s']:.0f} sustained). {result['harness']}{missing}.{load} "
        f"{_where(result)}"
    )


def demo_cells(row, result):
    quality, mib = row["quality"], 2**20
    change = (
        "baseline" if row["name"] == result["run"]["baseline"] else f"{quality['percent']:+.2f} %" if quality else ""
    )
    return [
        f"{row['weight_bytes'] / mib:.1f}",
        f"{row['cache_bytes'] / mib:.1f}",
        f"{row['prefill_tok_s']:.0f}",
        f"{row['decode_tok_s']:.1f}",
        f"{row['decode_speedup']:.2f}x",
        change,
    ]


def ppl_cells(row, result):
    error = "" if row["dnll_se"] is None else f" ± {row['dnll_se']:.5f}"
    return [
        f"{row['perplexity']:.3f}",
        f"{row['vs_baseline_percent']:+.2f} %",
        f"{row['dnll']:+.5f}{error}",
        f"{row['kl']:.5f}",
        f"{100 * row['top1']:.2f} %",
    ]


# family: (columns, their cells of a row)
VARIANT_ROWS = {
    "demo": (
        ["weights MiB", "cache MiB", "prefill tok/s", "decode tok/s", "decode vs transformers", "perplexity"],
        demo_cells,
    ),
    "ppl": (["perplexity", "change", "nats per token ± s.e.", "KL", "top-1 same"], ppl_cells),
}


RESULTS = Path(__file__).parent / "results"
BENCH = "decode", "w4a16", "w8a16", "linear", "ops"
MARKER = r"<!-- table: (?P<machine>[\w.-]+)/(?P<family>\w+)(?P<patterns>(?: [^ \n]+)*?) -->\n"


def fill(text, results=RESULTS, machines=()):
    """`text` with its tables written anew, and how many there are. machines: {old: new}. ValueError: no such file."""

    def written(found):
        machine, family, patterns = found["machine"], found["family"], found["patterns"].split()
        new = dict(machines).get(machine, machine)
        if family in ("standing", "measured"):
            folder, machine = new if family == "standing" else "*", new
            paths = [path for f in BENCH for path in sorted(results.glob(f"{folder}/{f}.json"))]
            body = (standing if family == "standing" else measured)([json.loads(path.read_text()) for path in paths])
        else:
            machine = new if (results / new / f"{family}.json").exists() else machine
            path = results / machine / f"{family}.json"
            if not path.exists():
                raise ValueError(f"{machine}/{family}: there is no {path}")
            body = table(json.loads(path.read_text()), patterns)
        return f"<!-- table: {' '.join([f'{machine}/{family}', *patterns])} -->\n{body}<!-- end of table -->"

    return re.subn(MARKER + r"(?:(?!<!-- table).)*?<!-- end of table -->", written, text, flags=re.DOTALL)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="?")
    parser.add_argument("patterns", nargs="*", metavar="PATTERN")
    parser.add_argument("--into", nargs="+", type=Path, default=[], metavar="PAGE")
    parser.add_argument("--machine", action="append", default=[], metavar="OLD=NEW")
    args = parser.parse_args(arguments)
    if bool(args.results) == bool(args.into):
        parser.error("give a results file to print, or --into and pages")
    try:
        if args.results:
            result = json.loads(args.results.read_text())
            if result.get("schema") != 1:
                parser.error(f"{args.results}: schema {result.get('schema')}, this script reads 1")
            print(table(result, args.patterns), end="")
        for page in args.into:
            text, count = fill(page.read_text(), machines=[pair.split("=", 1) for pair in args.machine])
            if count == 0:
                parser.error(f"{page}: no `<!-- table: MACHINE/FAMILY -->` with an `<!-- end of table -->`")
            page.write_text(text)
            print(f"{page}: {count} tables")
    except ValueError as e:
        parser.error(str(e))
    return 0


if __name__ == "__main__":
    sys.exit(main())
