# SPDX-License-Identifier: Apache-2.0
"""The results file of `rooftile bench` (schema 1) and the table people read."""

from rooftile._results import head
from rooftile.bench.timing import HARNESS

OURS = "rooftile"


def report(family, rows, ceiling, peers, notes, facts, commit_name=None):
    """peers: names that were asked for; notes: what was left out; facts: of the machine."""
    under_load = {
        name: [min(seen), max(seen)] if (seen := [r[name] for r in rows if r[name] is not None]) else []
        for name in ("sm_clock_mhz", "power_w")
    }
    return {
        **head(family, commit_name),
        "machine": facts | under_load,
        "harness": HARNESS,
        "ceiling": ceiling,
        "missing": sorted(set(peers) - {r["impl"] for r in rows}),
        "left_out": notes.left_out,
        "rows": beside_peers(rows),
    }


def row(case, entry, kernel, times, ceiling):
    """One measured line."""
    us = times.median
    gb_s, tflop_s = entry.nbytes / us / 1e3, entry.flops / us / 1e6
    return {
        "case": case,
        "impl": entry.impl,
        "variant": entry.variant,
        "kernel": kernel,
        "l2": entry.l2,
        "us": round(us, 2),
        "us_min": round(times.fastest, 2),
        "us_p10": round(times.p10, 2),
        "us_p90": round(times.p90, 2),
        "us_max": round(times.slowest, 2),
        "sm_clock_mhz": times.mhz,
        "power_w": times.watts,
        "bytes": int(entry.nbytes),
        "flops": int(entry.flops),
        "gb_s": round(gb_s, 1),
        "tflop_s": round(tflop_s, 2),
        "percent_of_roof": round(100 * max(gb_s / ceiling["read_gb_s"], tflop_s / ceiling["bf16_burst_tflop_s"]), 1),
        "rel_err": float(f"{entry.error:.2g}"),
    }


_SIXTEEN_BITS = "fp16", "bf16"


def beside_peers(rows):
    """The rows, ours with "peer", the fastest one of the case, "peer_ratio", how much longer that takes, and "level".

    What reads 16 bits is held against what reads 16 bits, codes against all. Level: the middle eight tenths of the
    rounds of both meet. None where the case has no peer.
    """
    found = []
    for r in rows:
        if r["impl"] == OURS:
            peers = [p for p in rows if p["case"] == r["case"] and p["impl"] != OURS]
            if r["variant"] in _SIXTEEN_BITS:
                peers = [p for p in peers if p["variant"] in _SIXTEEN_BITS]
            best = min(peers, key=lambda p: p["us"], default=None)
            r = r | {"peer": None, "peer_ratio": None, "level": None}
            if best is not None:
                level = r["us_p10"] <= best["us_p90"] and best["us_p10"] <= r["us_p90"]
                r |= {"peer": best["impl"], "peer_ratio": round(best["us"] / r["us"], 3), "level": level}
        found.append(r)
    return found


def table(result):
    """A rich table: every case's rows together, the fastest peer beside ours."""
    from rich.table import Table

    machine, ceiling = result["machine"], result["ceiling"]
    out = Table(
        title=f"{result['family']} on {machine['gpu']}: reads at most {ceiling['read_gb_s']:.0f} GB/s, bf16 "
        f"{ceiling['bf16_burst_tflop_s']:.0f} TFLOP/s in a burst, {ceiling['bf16_sustained_tflop_s']:.0f} sustained",
        caption=result["harness"] + (f"; not measured: {', '.join(result['missing'])}" if result["missing"] else ""),
    )
    for name, justify in (
        ("case", "left"),
        ("by", "left"),
        ("variant", "left"),
        ("us", "right"),
        ("p10-p90", "right"),
        ("GB/s", "right"),
        ("TFLOP/s", "right"),
        ("% of roof", "right"),
        ("MHz", "right"),
        ("W", "right"),
        ("x best peer", "right"),
    ):
        out.add_column(name, justify=justify)
    last = None
    for r in result["rows"]:
        ours = r["impl"] == OURS
        if last not in (None, r["case"]):
            out.add_section()
        last = r["case"]
        cells = (
            r["case"],
            r["impl"],
            r["variant"],
            f"{r['us']:.1f}",
            f"{r['us_p10']:.1f}-{r['us_p90']:.1f}",
            f"{r['gb_s']:.0f}",
            f"{r['tflop_s']:.0f}",
            f"{r['percent_of_roof']:.1f}",
            "" if r["sm_clock_mhz"] is None else str(r["sm_clock_mhz"]),
            "" if r["power_w"] is None else str(r["power_w"]),
            "" if not (ours and r["peer"]) else "level" if r["level"] else f"{r['peer_ratio']:.2f}",
        )
        out.add_row(*cells, style="bold" if ours else None)
    return out
