#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Markdown tables of results files. `rooftile bench`: a row a case, microseconds and percent of the roof of each of our
formats, and the fastest peer. `rooftile demo` and `rooftile ppl`: a row a variant.

tables.py RESULTS.json [PATTERN ...]     prints the table, of cases that match a shell pattern if any are given, and of
                                         our variants that match X where there are patterns variant=X
tables.py RESULTS.json --into FILE ...   writes it between the markers `<!-- table: FAMILY [PATTERN ...] -->` and
                                         `<!-- end of table -->` of these files
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
        return _markdown(lines)
    cases = {}
    for row in _chosen(result["rows"], patterns):
        cases.setdefault(row["case"], []).append(row)
    if not cases:
        raise ValueError(f"no case of {result['family']} matches {' or '.join(patterns) or 'anything'}")
    variants = list(dict.fromkeys(r["variant"] for rows in cases.values() for r in rows if r["impl"] == OURS))
    peers = any(r["impl"] != OURS for rows in cases.values() for r in rows)
    head = ["case", *variants, *(["best peer", "peer / ours"] if peers else [])]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for case, rows in cases.items():
        ours = {r["variant"]: r for r in rows if r["impl"] == OURS}
        cells = [case]
        for variant in variants:
            r = ours.get(variant)
            cells.append(f"{microseconds(r['us'])} ({r['percent_of_roof']:.0f} %)" if r else "")
        if peers:
            best = min((r for r in rows if r["impl"] != OURS), key=lambda r: r["us"], default=None)
            ratios = [f"{best['us'] / ours[v]['us']:.2f}" for v in variants if best and v in ours]
            cells += [f"{microseconds(best['us'])} {best['impl']}" if best else "", " / ".join(ratios)]
        lines.append(cells)
    return _markdown(lines) + "\n" + caption(result) + "\n"


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


def caption(result):
    """What was measured, where and how."""
    machine, ceiling = result["machine"], result["ceiling"]
    clocks = "-".join(str(mhz) for mhz in sorted(set(machine["sm_clock_mhz"])))
    clocks = f"SM clock {clocks} MHz, " if clocks else ""
    missing = f"; peers not measured: {', '.join(result['missing'])}" if result["missing"] else ""
    return (
        f"Microseconds (percent of the roof). {machine['gpu']}, {clocks}driver {machine['driver']}, "
        f"torch {machine['torch']}; the roof, measured in the same run: {ceiling['read_gb_s']:.0f} GB/s read, "
        f"{ceiling['bf16_tflop_s']:.0f} TFLOP/s bf16. {result['harness']}{missing}. "
        f"Commit {result['commit']}, {result['date']}."
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


def fill(text, result):
    """`text` with the family's tables between their markers written anew, and how many there were."""
    pattern = rf"(<!-- table: {result['family']}((?: [^ \n]+)*?) -->\n)(?:(?!<!-- table).)*?(<!-- end of table -->)"
    return re.subn(pattern, lambda m: f"{m[1]}{table(result, m[2].split())}{m[3]}", text, flags=re.DOTALL)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("patterns", nargs="*", metavar="PATTERN")
    parser.add_argument("--into", nargs="+", type=Path, default=[], metavar="FILE")
    args = parser.parse_args(arguments)
    result = json.loads(args.results.read_text())
    if result.get("schema") != 1:
        parser.error(f"{args.results}: schema {result.get('schema')}, this script reads 1")
    if not args.into:
        try:
            print(table(result, args.patterns), end="")
        except ValueError as e:
            parser.error(str(e))
    for path in args.into:
        text, count = fill(path.read_text(), result)
        if count == 0:
            parser.error(f"{path}: no `<!-- table: {result['family']} -->` with an `<!-- end of table -->`")
        path.write_text(text)
        print(f"{path}: {count} tables")
    return 0


if __name__ == "__main__":
    sys.exit(main())
