# SPDX-License-Identifier: Apache-2.0
"""The results file of `rooftile bench` (schema 1) and the table people read."""

import sys

from rooftile._results import head
from rooftile.bench.timing import harness


def report(family, rows, ceiling, missing, facts, commit_name=None):
    """facts: the machine from before and from after the runs."""
    before, after = facts
    clocks = sorted({before["sm_clock_mhz"], after["sm_clock_mhz"]} - {None})
    return {
        **head(family, commit_name),
        "machine": {**after, "sm_clock_mhz": clocks},
        "harness": harness(),
        "ceiling": ceiling,
        "missing": sorted(missing),
        "rows": rows,
    }


def row(case, impl, variant, kernel, times, nbytes, flops, error, ceiling, l2="cold"):
    """One measured line. nbytes: what the call must move through memory at least; flops: what it must compute."""
    us, fastest, slowest = times
    gb_s = nbytes / us / 1e3
    return {
        "case": case,
        "impl": impl,
        "variant": variant,
        "kernel": kernel,
        "l2": l2,
        "us": round(us, 2),
        "us_min": round(fastest, 2),
        "us_max": round(slowest, 2),
        "bytes": int(nbytes),
        "flops": int(flops),
        "gb_s": round(gb_s, 1),
        "tflop_s": round(flops / us / 1e6, 2),
        "percent_of_roof": round(100 * max(gb_s / ceiling["read_gb_s"], flops / us / 1e6 / ceiling["bf16_tflop_s"]), 1),
        "rel_err": float(f"{error:.2g}"),
    }


def left_out(what, error):
    """Says on stderr which peer has no row, and why."""
    print(f"{what} is left out: {str(error).partition(chr(10))[0]}", file=sys.stderr)


def table(result):
    """A rich table: every case's rows together, the fastest peer beside ours."""
    from rich.table import Table

    machine, ceiling = result["machine"], result["ceiling"]
    out = Table(
        title=f"{result['family']} on {machine['gpu']}: reads at most {ceiling['read_gb_s']:.0f} GB/s, "
        f"bf16 {ceiling['bf16_tflop_s']:.0f} TFLOP/s",
        caption=result["harness"] + (f"; not measured: {', '.join(result['missing'])}" if result["missing"] else ""),
    )
    for name, justify in (
        ("case", "left"),
        ("by", "left"),
        ("variant", "left"),
        ("us", "right"),
        ("GB/s", "right"),
        ("TFLOP/s", "right"),
        ("% of roof", "right"),
        ("x best peer", "right"),
    ):
        out.add_column(name, justify=justify)
    best = {}
    for r in result["rows"]:
        if r["impl"] != "rooftile":
            best[r["case"]] = min(best.get(r["case"], r["us"]), r["us"])
    last = None
    for r in result["rows"]:
        ours = r["impl"] == "rooftile"
        ratio = f"{best[r['case']] / r['us']:.2f}" if ours and r["case"] in best else ""
        if last not in (None, r["case"]):
            out.add_section()
        last = r["case"]
        cells = (
            r["case"],
            r["impl"],
            r["variant"],
            f"{r['us']:.1f}",
            f"{r['gb_s']:.0f}",
            f"{r['tflop_s']:.0f}",
            f"{r['percent_of_roof']:.1f}",
            ratio,
        )
        out.add_row(*cells, style="bold" if ours else None)
    return out
