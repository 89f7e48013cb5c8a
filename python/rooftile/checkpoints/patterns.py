# SPDX-License-Identifier: Apache-2.0
"""The names and `re:` expressions by which compressed-tensors says which modules are meant.

An expression comes with the checkpoint, and one that backtracks takes for ever, which nothing in this process could
end. So another process matches, for a limited time and in 1 GiB of memory.
"""

import json
import os
import subprocess
import sys

from rooftile.errors import ArgumentError

SECONDS = 10  # for all expressions of a checkpoint; those in use take milliseconds

# reads the names and then an expression a line, writes for each the indices of the names it matches, or why it cannot
_MATCHER = """
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
names = json.loads(sys.stdin.readline())
for line in sys.stdin:
    try:
        match = re.compile(json.loads(line)).match
        found = [i for i, name in enumerate(names) if match(name)]
    except Exception as e:
        found = f"{type(e).__name__}: {e}"
    print(json.dumps(found), flush=True)
"""


def matches(where, patterns, names):
    """pattern -> the set of `names` that it means: one name, or after "re:" an expression that matches from a name's
    beginning (re.match). Raises ArgumentError, beginning with `where`, for an expression that is none or does not end.
    """
    names, patterns = list(names), list(dict.fromkeys(patterns))
    expressions = [p for p in patterns if p.startswith("re:")]
    means = {p: {p} & set(names) for p in patterns}
    if not expressions:
        return means
    lines = [json.dumps(names), *(json.dumps(e.removeprefix("re:")) for e in expressions)]
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _MATCHER],
            input="\n".join(lines).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=SECONDS,
            # without what the caller preloads: a sanitizer's address space is larger than the limit
            env={name: value for name, value in os.environ.items() if name != "LD_PRELOAD"},
        )
        answers, why = done.stdout, f"the process that matches it ended with exit code {done.returncode}"
    except subprocess.TimeoutExpired as e:
        answers, why = e.stdout or b"", f"it is not matched with {len(names)} names within {SECONDS} s"
    answers = [json.loads(line) for line in answers.splitlines(keepends=True) if line.endswith(b"\n")]
    for i, expression in enumerate(expressions):
        found = answers[i] if i < len(answers) else why
        if isinstance(found, str):
            raise ArgumentError(f"{where}: {expression!r:.120}: expected a regular expression that matches: {found}")
        means[expression] = {names[j] for j in found}
    return means
