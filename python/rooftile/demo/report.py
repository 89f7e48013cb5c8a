# SPDX-License-Identifier: Apache-2.0
"""The demo's figures as tables for a terminal of 80 columns or more, and as one picture."""

import math
import os

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rooftile.errors import ArgumentError

_OUTLIER = 8


def _table(title, *columns):
    """Names on the left, figures on the right; without columns: names and running text."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        padding=(0, 1),
        pad_edge=False,
        show_header=bool(columns),
    )
    table.add_column(no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    if not columns:
        table.add_column(overflow="fold")
    return table


def _mib(n):
    return f"{n / 2**20:.1f}"


def _note(text):
    return Padding(Text(text, style="dim"), (0, 0, 1, 1))


def _not_yet(report):
    """What stands in place of the figures of a row whose kernels are not there."""
    return f"not on {report['run']['device'].partition(':')[0]} yet"


def _on_gpu(report):
    return "gpu" in report["machine"]


def speed_table(report):
    table = _table(
        "Memory and speed",
        "weights\nMiB",
        "cache\nMiB",
        "prefill\ntok/s",
        "decode\ntok/s",
        "decode vs\ntransformers",
    )
    for row in report["rows"]:
        if row["missing"]:
            table.add_row(row["name"], *[""] * 4, _not_yet(report))
            continue
        table.add_row(
            row["name"],
            _mib(row["weight_bytes"]),
            _mib(row["cache_bytes"]),
            f"{row['prefill_tok_s']:.0f}",
            f"{row['decode_tok_s']:.1f}",
            f"{row['decode_speedup']:.2f}x",
        )
        if row["format"] is None:
            table.add_section()
    run = report["run"]
    where = report["machine"]["gpu"] if _on_gpu(report) else f"{run['torch_threads']} threads"
    how = " Steps of rooftile's rows run as one program (rt.accelerate)."
    if _on_gpu(report):
        how += " Prompts ran on torch's sdpa in every row: prefill has no GPU kernel yet."
    return Group(
        table,
        _note(
            f"Prompt of {run['prompt_tokens']} tokens, then {run['decode_tokens']} greedy steps of one token; all rows "
            f"take turns in one process; medians; {where}, bfloat16 activations. Cache: bytes for these "
            f"{run['context_tokens']} tokens, with scales and the 64 newest tokens kivi formats keep raw.{how}"
        ),
    )


def _signed(value, error):
    return f"{value:+.4f}" + ("" if error is None else f" ± {error:.4f}")


def quality_table(report):
    table = _table("Quality", "perplexity", "change", "nats per token\n(± s.e.)", "KL\nnats", "top-1\nsame")
    for row in report["rows"]:
        if row["missing"]:
            table.add_row(row["name"], "", "", _not_yet(report), "", "")
            continue
        q = row["quality"]
        if q is None:
            continue
        if row["name"] == report["run"]["baseline"]:
            table.add_row(row["name"], f"{q['perplexity']:#.5g}", "baseline", "", "", "")
            continue
        table.add_row(
            row["name"],
            f"{q['perplexity']:#.5g}",
            f"{q['percent']:+.2f} %",
            _signed(q["dnll"], q["dnll_se"]),
            f"{q['kl']:.4f}",
            f"{100 * q['top1']:.1f}%",
        )
    run = report["run"]
    return Group(
        table,
        _note(
            f"Lower is better. Text: {run['text']}. {run['chunks']} chunks of {run['chunk_tokens']} tokens, seen as "
            f"decoding sees them. Differences are paired with '{run['baseline']}', standard errors are over chunks. "
            "KL: distance between the predictions. top-1 same: how often the likeliest token is the same one."
        ),
    )


def words_table(report):
    table = _table("What each one writes after the prompt")
    for row in report["rows"]:
        table.add_row(row["name"], Text(_not_yet(report) if row["missing"] else " ".join(row["words"].split())))
    return Group(table, _note(f"The prompt ends: … {report['run']['prompt_end']}"))


def kernels_table(report):
    """The variant all kernels share is said once, in the title."""
    variant = "_".join(report["run"]["native_variant"])
    table = _table(f"Kernels that ran ({variant})")
    for row in report["rows"]:
        if row["missing"]:
            table.add_row(row["name"], _not_yet(report))
            continue
        names = ", ".join(kernel.removeprefix(variant + "_") for kernel in row["kernels"])
        table.add_row(row["name"], names or "none of rooftile's")
    return table


def tables(report):
    return Group(speed_table(report), quality_table(report), words_table(report), kernels_table(report))


def check_picture(path, option):
    """Raises before the work starts where `draw` would after it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    known = FigureCanvasAgg.get_supported_filetypes()
    ending = os.path.splitext(path)[1][1:]
    if ending and ending.lower() not in known:
        raise ArgumentError(f"{option} {path}: expected a name that ends in one of {', '.join(sorted(known))}")


def _reach(ends):
    """How far a panel's scale goes: to the longest bar, without those more than _OUTLIER times as long as the next one.
    They would flatten the others and are cut."""
    ends = sorted(end for end in ends if end > 0)
    while len(ends) > 1 and ends[-1] > _OUTLIER * ends[-2]:
        ends.pop()
    return ends[-1] if ends else 1e-9


def draw(report, path):
    """The picture: memory, decode speed and quality as bars, one line per variant. PNG, or what `path` ends in."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows, run = report["rows"], report["run"]
    grey, blue, orange, green = "#b3bac4", "#2f6db5", "#e08a2e", "#3f9b6c"
    figure, (weights, cache, speed, quality) = pyplot.subplots(
        1, 4, figsize=(15, 0.46 * len(rows) + 1.9), sharey=True, layout="constrained"
    )

    def bars(axes, title, values, texts, colours, errors=None):
        """Returns whether a bar is cut."""
        ends = [max(v, 0) + e for v, e in zip(values, errors or [0] * len(rows), strict=True)]
        reach = _reach(ends)
        # none where there is no error, or where the bar is cut
        whiskers = errors and [e if e and end <= reach else math.nan for e, end in zip(errors, ends, strict=True)]
        widths = [min(v, reach) for v in values]
        axes.barh(range(len(rows)), widths, xerr=whiskers, color=colours, error_kw={"elinewidth": 1, "capsize": 3})
        for i, (end, text) in enumerate(zip(ends, texts, strict=True)):
            axes.text(min(end, reach) + 0.02 * reach, i, text, va="center", fontsize=9.5)
            if end > reach:  # as far as the longest of the others, and broken
                axes.text(0.85 * reach, i, "//", va="center", color="white", fontsize=15, fontweight="bold")
        low = min(0, *(v - e for v, e in zip(values, errors or [0] * len(rows), strict=True)))
        axes.set_xlim(1.1 * low, 1.5 * reach)
        axes.axvline(0, color="black", linewidth=0.8)
        axes.set_title(title, fontsize=11)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(left=False)
        return max(ends) > reach

    def figures(key, text):
        """Values and texts of one panel; a row that is missing has none."""
        values = [0 if row["missing"] else row[key] for row in rows]
        return values, ["" if row["missing"] else text(row) for row in rows]

    def mib(axes, title, key, colour):
        def text(row):
            less = f"  ({rows[0][key] / row[key]:.1f}x less)" if 1.1 * row[key] < rows[0][key] else ""
            return _mib(row[key]) + less

        values, texts = figures(key, text)
        bars(axes, title, [v / 2**20 for v in values], texts, [grey] + [colour] * (len(rows) - 1))

    mib(weights, "Weights, MiB", "weight_bytes", green)
    mib(cache, f"KV cache of {run['context_tokens']} tokens, MiB", "cache_bytes", orange)
    rates, texts = figures(
        "decode_tok_s",
        lambda row: f"{row['decode_tok_s']:.1f}" + ("" if row is rows[0] else f"  ({row['decode_speedup']:.2f}x)"),
    )
    texts = [_not_yet(report) if row["missing"] else text for row, text in zip(rows, texts, strict=True)]
    bars(speed, "Decode, tokens per second\n(higher is better)", rates, texts, [grey] + [blue] * (len(rows) - 1))
    speed.axvline(rates[0], color="#555555", linewidth=1, linestyle=":", zorder=0)

    scored, texts = figures(
        "quality", lambda row: f"{row['quality']['percent']:+.2f} %" if row["quality"] else "not scored"
    )
    scored = [q or {"percent": 0, "percent_se": 0} for q in scored]
    for i, row in enumerate(rows):
        if row["name"] == run["baseline"]:
            texts[i] = f"baseline: {row['quality']['perplexity']:.2f}"
    title = "Perplexity, change\n(lower is better; ± 1 s.e."
    cut = bars(
        quality,
        f"{title})",
        [q["percent"] for q in scored],
        texts,
        blue,
        [q["percent_se"] or 0 for q in scored],
    )
    if cut:
        quality.set_title(f"{title}; // not to scale)", fontsize=11)
    weights.set_yticks(range(len(rows)), [row["name"] for row in rows])
    weights.invert_yaxis()
    where = report["machine"]["gpu" if _on_gpu(report) else "cpu"]
    how = "prompts on torch's sdpa" if _on_gpu(report) else f"{run['torch_threads']} threads"
    figure.suptitle(f"rooftile demo: {run['model']} on {where}, {how}", fontsize=12)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
