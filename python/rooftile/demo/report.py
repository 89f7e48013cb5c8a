# SPDX-License-Identifier: Apache-2.0
"""The demo's figures as tables for a terminal of 80 columns or more, and as one picture."""

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text


def _table(title, first, *columns):
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _mib(n):
    return f"{n / 2**20:.1f}"


def _note(text):
    return Padding(Text(text, style="dim"), (0, 0, 1, 1))


def speed_table(report):
    table = _table("Memory and speed", "", "weights\nMiB", "cache\nMiB", "prefill\ntok/s", "decode\ntok/s", "decode vs\ntransformers")
    for row in report["rows"]:
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
    return Group(
        table,
        _note(
            f"Prompt of {run['prompt_tokens']} tokens, then {run['decode_tokens']} greedy steps of one token; all rows take turns "
            f"in one process; medians; {run['torch_threads']} threads, bfloat16 activations. Cache: bytes for these "
            f"{run['context_tokens']} tokens, scales and the kivi formats' newest 64 raw tokens included."
        ),
    )


def _signed(value, error, digits):
    if error is None:
        return f"{value:+.{digits}f}"
    return f"{value:+.{digits}f} ± {error:.{digits}f}"


def quality_table(report):
    table = _table("Quality", "", "perplexity", "change, %\n(± s.e.)", "nats per token\n(± s.e.)", "KL,\nnats", "same top\ntoken, %")
    for row in report["rows"]:
        q = row["quality"]
        if q is None:
            continue
        if row["name"] == report["run"]["baseline"]:
            table.add_row(row["name"], f"{q['perplexity']:.3f}", "baseline", "", "", "")
            continue
        table.add_row(
            row["name"],
            f"{q['perplexity']:.3f}",
            _signed(q["percent"], q["percent_se"], 2),
            _signed(q["dnll"], q["dnll_se"], 4),
            f"{q['kl']:.4f}",
            f"{100 * q['top1']:.1f}",
        )
    run = report["run"]
    return Group(
        table,
        _note(
            f"Text: {run['text']}. {run['chunks']} chunks of {run['chunk_tokens']} tokens, fed as decoding sees them. Differences "
            f"are paired with the row '{run['baseline']}', their standard error is over the chunks. Lower is better; KL is "
            "the distance between the two models' predictions."
        ),
    )


def words_table(report):
    table = Table(title="What each one writes after the prompt", title_justify="left", title_style="bold", box=SIMPLE_HEAD,
                  padding=(0, 1), pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in report["rows"]:
        table.add_row(row["name"], Text(" ".join(row["words"].split())))
    return Group(table, _note(f"The prompt ends: … {report['run']['prompt_end']}"))


def kernels_table(report):
    table = Table(title="Kernels that ran", title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1),
                  pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in report["rows"]:
        table.add_row(row["name"], ", ".join(row["kernels"]) or "none of rooftile's")
    return table


def tables(report):
    return Group(speed_table(report), quality_table(report), words_table(report), kernels_table(report))


def draw(report, path):
    """The picture: memory, decode speed and quality as bars, one row per variant. PNG or whatever `path` ends in."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = report["rows"]
    names = [row["name"] for row in rows]
    y = range(len(rows))
    grey, blue, orange = "#b8bec6", "#2f6db5", "#e08a2e"
    figure, (memory, speed, quality) = pyplot.subplots(
        1, 3, figsize=(13, 0.48 * len(rows) + 2.0), sharey=True, width_ratios=(1.15, 1, 1), layout="constrained"
    )

    weights = [row["weight_bytes"] / 2**20 for row in rows]
    caches = [row["cache_bytes"] / 2**20 for row in rows]
    memory.barh(y, weights, color=grey, label="weights")
    memory.barh(y, caches, left=weights, color=orange, label="KV cache")
    for i, (w, c) in enumerate(zip(weights, caches, strict=True)):
        memory.text(w + c, i, f" {w:.0f} + {c:.1f}", va="center", fontsize=9)
    memory.set_title(f"Memory, MiB\n({report['run']['context_tokens']} tokens of context)", fontsize=11)
    memory.set_xlim(0, 1.3 * max(w + c for w, c in zip(weights, caches, strict=True)))
    memory.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=2, frameon=False, fontsize=9)

    rates = [row["decode_tok_s"] for row in rows]
    speed.barh(y, rates, color=[grey if row["format"] is None else blue for row in rows])
    for i, (rate, row) in enumerate(zip(rates, rows, strict=True)):
        ratio = "" if row["format"] is None else f"  ({row['decode_speedup']:.2f}x)"
        speed.text(rate, i, f" {rate:.1f}{ratio}", va="center", fontsize=9)
    speed.axvline(rates[0], color="#555555", linewidth=1, linestyle=":")
    speed.set_title("Decode, tokens per second\n(higher is better)", fontsize=11)
    speed.set_xlim(0, 1.35 * max(rates))

    changes = [row["quality"]["percent"] if row["quality"] else None for row in rows]
    shown = [change or 0 for change in changes]
    errors = [(row["quality"] or {}).get("percent_se") or 0 for row in rows]
    quality.barh(y, shown, xerr=errors, color=blue, error_kw={"elinewidth": 1, "capsize": 3})
    reach = max(max(a + e for a, e in zip(shown, errors, strict=True)), 0.1)
    for i, (change, error) in enumerate(zip(changes, errors, strict=True)):
        if change is None:
            text = "not scored"
        elif names[i] == report["run"]["baseline"]:
            text = f"baseline {rows[i]['quality']['perplexity']:.2f}"
        else:
            text = f"{change:+.2f} %"
        quality.text(max(shown[i], 0) + error + 0.02 * reach, i, text, va="center", fontsize=9)
    quality.set_title("Perplexity, change in %\n(lower is better; bars: ± 1 s.e.)", fontsize=11)
    quality.set_xlim(min(0, 1.1 * min(a - e for a, e in zip(shown, errors, strict=True))), 1.35 * reach)

    memory.set_yticks(y, names)
    memory.invert_yaxis()
    for axes in (memory, speed, quality):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(left=False)
    run = report["run"]
    figure.suptitle(f"rooftile demo: {run['model']}, {run['machine']}, {run['torch_threads']} threads", fontsize=12)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
