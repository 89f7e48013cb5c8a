# SPDX-License-Identifier: Apache-2.0
"""What a stranger's numbers ask for is tried first in a child process, for a limited time and in limited memory."""

import os
import resource
import signal

SECONDS = 120  # the largest models that there are take 10
MEMORY = 4 * 2**30  # bytes beyond what this process has; they take some 0.2 GiB

_TOLD = 300  # characters of a reason, at most


def refusal(make):
    """Why make() cannot be called here: it raises, does not end in SECONDS or needs more than MEMORY. None: it can.

    make: computes on one thread and uses no GPU.
    """
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        _try(make, writes)
    os.close(writes)
    try:
        with open(reads, "rb") as pipe:
            reason = pipe.read()
        _, status = os.waitpid(child, 0)
    except BaseException:  # Ctrl-C
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGALRM:
        return f"it does not end within {SECONDS} s"
    if code != 0 and not reason:
        return f"a trial of it ended with exit code {code}"
    return reason.decode(errors="replace") or None


def _try(make, writes):
    """Never returns. Writes what make() raises."""
    code = 1
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process
        signal.alarm(SECONDS)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for said in (1, 2):  # make() says it again where it is called in earnest
            os.dup2(nowhere, said)
        with open("/proc/self/statm", encoding="ascii") as file:
            size, resident = (int(pages) * resource.getpagesize() for pages in file.read().split()[:2])
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = size + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
        try:
            make()
            code = 0
        except Exception as e:
            reason = str(e).strip().replace("\n", " ")[:_TOLD] or type(e).__name__
            taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - resident
            if isinstance(e, MemoryError) or taken > MEMORY // 2:  # without memory Python raises others, too
                reason = f"it needs more than {MEMORY / 2**30:.4g} GiB of memory to describe"
            os.write(writes, reason.encode(errors="replace"))
    finally:
        os._exit(code)
