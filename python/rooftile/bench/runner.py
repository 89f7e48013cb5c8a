# SPDX-License-Identifier: Apache-2.0
"""One family's cases, ours and the peers' taking turns: what is measured, what is left out and why."""

import contextlib
import gc
import importlib
import re
import sys
import time

import torch

from rooftile.bench.report import OURS, row
from rooftile.bench.timing import compare
from rooftile.errors import DeviceError

_A_PATH = re.compile(r"(?<![\w/:.])/(?:[^\s/:'\"]+/)+")  # the folders of an absolute path, not those of an URL


class Notes:
    """What a run leaves out: [{"case", "impl", "variant", "why", "failed"}]. failed: ours, and it should have run."""

    def __init__(self):
        self.left_out = []

    def leave_out(self, case, impl, variant, why, failed=False):
        """variant: "" of a peer as a whole. Of paths the file's name is kept. Also said on stderr."""
        why = f"{type(why).__name__}: {why}" if isinstance(why, Exception) and not str(why) else str(why)
        why = _A_PATH.sub("", why.strip().partition("\n")[0])[:300]
        self.left_out.append({"case": case, "impl": impl, "variant": variant, "why": why, "failed": failed})
        print(f"{case} {impl} {variant}".rstrip() + f" is left out: {why}", file=sys.stderr)

    @contextlib.contextmanager
    def guarded(self, case, impl, variant=""):
        """What fails inside is left out, and the run goes on; DeviceError if the device is lost."""
        try:
            yield
        except Exception as e:  # a peer may raise anything
            self.leave_out(case, impl, variant, e, failed=impl == OURS)
            _check_device(f"{case} {impl} {variant}".rstrip(), e)


def installed(peers, needs, notes):
    """The peers without those whose module cannot be imported. needs: {peer: module}."""
    found = set(peers)
    for peer in sorted(peers & needs.keys()):
        try:
            importlib.import_module(needs[peer])
        except Exception as e:  # also one that is built for another torch or driver
            notes.leave_out("every case", peer, "", e)
            found.discard(peer)
    return frozenset(found)


def checked(calls, check):
    """({kernel: call} of those whose answer is right, the largest error). check(call): its error, or it raises.

    Where none is right, what the last one raised.
    """
    right, error, wrong = {}, 0.0, None
    for kernel, call in calls.items():
        try:
            error = max(error, check(call))
        except Exception as e:  # wrong, or it does not take this shape
            wrong = e
        else:
            right[kernel] = call
    if not right:
        raise wrong
    return right, error


def _check_device(what, error):
    """A kernel that reads where nothing is takes the whole process's context with it."""
    if torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            raise DeviceError(f"bench: the device is lost after {what}: {error}") from error


def run(family, cases, peers, ceiling, timer, notes, *, advance=lambda: None, seconds=None):
    """Yields the rows of one case after the other.

    family: a module with `opened(peers, notes)`, which gives a function from a case to its entries. peers: names of
    the peers to time beside ours. advance(): once a case. seconds: cases that would begin later are left out.
    """
    begin, entries_of = time.monotonic(), family.opened(frozenset(peers), notes)
    for case in cases:
        if seconds is not None and time.monotonic() - begin > seconds:
            notes.leave_out(case, OURS, "", f"the run's {seconds:g} s were over")
        else:
            yield _rows(case, entries_of(case), ceiling, timer, notes)
            gc.collect()  # what was raised holds on to its tensors
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
        advance()


def _rows(case, entries, ceiling, timer, notes):
    def left_out(entry, error):
        with notes.guarded(case, entry.impl, entry.variant):
            raise error

    return [
        row(case, entry, kernel, times, ceiling) for entry, kernel, times in compare(entries, timer, ceiling, left_out)
    ]
