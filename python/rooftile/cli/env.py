# SPDX-License-Identifier: Apache-2.0
"""rooftile env: what this installation is and what it can run."""

import contextlib
import json

from rooftile.env import env, format_markdown, format_text

SUMMARY = "what is installed here and which kernels it can run"


def add_arguments(parser):
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", metavar="FILE", nargs="?", const="-", help="JSON, to FILE or the terminal")
    form.add_argument("--markdown", action="store_true", help="two tables, to paste into an issue")


def run(args):
    with contextlib.suppress(ImportError):
        import torch  # noqa: F401  so that the report says whether its exchange table is there, and whose threads we use
    facts = env()
    if args.json is None:
        print(format_markdown(facts) if args.markdown else format_text(facts))
    elif args.json == "-":
        print(json.dumps(facts, indent=2))
    else:
        with open(args.json, "w") as f:
            json.dump(facts, f, indent=2)
    return 0
