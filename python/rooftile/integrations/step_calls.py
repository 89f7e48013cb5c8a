# SPDX-License-Identifier: Apache-2.0
"""A StepProgram over one RooftileCache: the calls of a decode step on arrays that stay, on the CPU as a list in C++."""

import functools
import itertools
import operator

import torch

from rooftile import _C
from rooftile._calls import ran
from rooftile.integrations.step_program import run_calls


class StepCalls:
    """The first step on the CPU runs call by call, and bindings keep their arguments as they took them; later ones are
    one call for each run of our ops.

    What changes from step to step lies in arrays: the new tokens' embeddings, their positions. A cache that has grown
    has other arrays, and takes other calls.
    """

    def __init__(self, program, caches):
        """caches: an rt.KVCache a layer."""
        self.program, self._caches = program, caches
        self._kernels, self._parts = [], None
        with torch.inference_mode(False), torch.no_grad():  # so that steps in and out of it may write the buffers
            self._make_calls(min(cache.capacity for cache in caches))

    def _make_calls(self, capacity):
        program, lengths = self.program, self._caches[0].seq_lens
        self._logits = program.new_logits()
        rows = torch.arange(program.batch, dtype=torch.int32, device=program.device)[:, None]
        if program.table_of_positions:
            positions = torch.zeros_like(rows)
            table = program.rotation_table(capacity)
            self._calls = [functools.partial(torch.Tensor.copy_, positions, lengths[:, None])]
            self._rotation = None
        else:  # a row of a table for each batch row, written before each step
            positions, self._calls = rows, []
            table = self._rotation = program.rotation(program.x, lengths)
        self._calls += program.calls(table, positions, [cache._handle for cache in self._caches], self._logits)

    def fits(self, program, caches):
        """Whether these are the calls of such a step: of that program, and of those caches."""
        return program is self.program and all(map(operator.is_, caches, self._caches))

    def run(self, x, begin):
        """On the CPU: logits [batch, 1, vocabulary] of one token a row, x as of StepProgram.embed(). The next step
        writes them anew.

        begin is called before the first kernel that writes a cache.
        """
        self.program.x.copy_(x)
        self._rotate()
        begin()
        if self._parts is None:
            self._kernels = self._first_step()
        else:
            run_calls(self._parts)
        ran(*self._kernels)
        return self._logits

    def _rotate(self):
        if self._rotation is None:
            return
        now = self.program.rotation(self.program.x, self._caches[0].seq_lens)
        for array, new in zip(self._rotation, now, strict=True):
            array.copy_(new)

    def _first_step(self):
        """The names of our kernels. As in run_calls, no signal handler comes between two calls."""
        first, parts = [], []
        for ours, calls in itertools.groupby(self._calls, lambda call: type(call.func) is type(_C.linear)):
            if ours:
                kept = _C.Calls()
                first.append(functools.partial(kept.record, list(calls)))
                parts.append(functools.partial(kept.run))
            else:
                calls = list(calls)
                first += calls
                parts += calls
        results = list(map(functools.partial.__call__, first))
        self._parts = parts  # a step that fails leaves none
        return [name for result in results if type(result) is list for name in result]

    def __deepcopy__(self, memo):  # a copied cache has other arrays
        return None

    def __reduce__(self):
        return type(None), ()
