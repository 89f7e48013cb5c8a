# SPDX-License-Identifier: Apache-2.0
"""rooftile env: what this installation is and what it can run."""

import contextlib
import json

from rooftile.cli._files import check_writable, write_json
from rooftile.env import env, format_markdown, format_text

SUMMARY = "what is installed here and which kernels it can run"


def add_arguments(parser):
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", metavar="FILE", nargs="?", const="-", help="JSON, to FILE or the terminal")
    form.add_argument("--markdown", action="store_true", help="two tables, to paste into an issue")


def run(args):
    to_file = args.json not in (None, "-")
    if to_file:
        check_writable(args.json, "--json")
    with contextlib.suppress(ImportError, OSError):  # the second: a library that torch needs is not there
        import torch  # noqa: F401  so that the report says whether its exchange table is there, and whose threads we use
    facts = env()
    if to_file:
        write_json(args.json, facts, "--json")
    elif args.json:
        print(json.dumps(facts, indent=1))
    else:
        print(format_markdown(facts) if args.markdown else format_text(facts))
    return 0
