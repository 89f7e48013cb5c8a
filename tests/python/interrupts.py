# SPDX-License-Identifier: Apache-2.0
"""Signal handlers that run at a chosen place of a call."""

import _thread
import signal

import torch


class _Trip(dict):
    """trip[number]: a signal of this number is there, for which Python runs the handler at its next place for handlers.

    Without a call: after one that place is here.
    """

    __missing__ = _thread.interrupt_main


class Handler:
    """Runs act(), in a signal handler, at the n-th place of a call where Python runs handlers.

    At each of the places before, the handler only trips the signal for the next one. So these are the places of this
    Python: where a function begins, a loop jumps back, a function in C has returned. again: KeyboardInterrupt is raised
    instead at that place, and act() is run so many places later.
    """

    SIGNAL = signal.SIGUSR1

    def __init__(self, act, at, again=0):
        self.act, self.left, self.again, self.trip = act, at, again, _Trip()

    def _handle(self, signum, frame):
        if self.left == 0:
            return None
        self.left -= 1
        if self.left > 0:
            return self.trip[signum]
        if not self.again:
            self.act()
            return None
        self.left, self.again = self.again, 0
        self.trip[signum]
        raise KeyboardInterrupt

    def run(self, body):
        """Returns whether act() was run: whether the call has so many places."""
        outer, gradients = signal.signal(self.SIGNAL, self._handle), torch.is_grad_enabled()
        try:
            self.trip[self.SIGNAL]
            body()
        except KeyboardInterrupt:
            pass
        finally:
            came, self.left = self.left == self.again == 0, 0
            signal.signal(self.SIGNAL, outer)
            same = torch.is_grad_enabled() is gradients
            torch.set_grad_enabled(gradients)
        assert same, "a call that was cut left torch's gradients switched"
        return came


def interrupt():
    raise KeyboardInterrupt
