# SPDX-License-Identifier: Apache-2.0
"""A StepProgram over one RooftileCache on a GPU: a CUDA graph, whose launch is one decode step."""

import functools
import operator

import torch

from rooftile._calls import ran, record_kernels
from rooftile.integrations.step_program import run_calls


class StepGraph:
    """The first step runs call by call, so that its kernels are loaded; the second one is captured.

    What changes from step to step lies in arrays that kernels read: the new tokens, the lengths of the cache. A cache
    that has grown has other arrays, and takes another graph.
    """

    def __init__(self, program, caches):
        """caches: an rt.KVCache a layer."""
        self.program, self._caches = program, caches
        self._arrays = [array for cache in caches for array in cache._arrays.values()]
        self._places = list(map(torch.Tensor.data_ptr, self._arrays))
        self._graph, self._kernels = None, []
        with torch.inference_mode(False), torch.no_grad():  # so that steps in and out of it may write the buffers
            self._make_calls(min(cache.capacity for cache in caches))

    def _make_calls(self, capacity):
        program, lengths, of_device = self.program, self._caches[0].seq_lens, {"device": self.program.device}
        self._ids = torch.zeros(program.batch, 1, dtype=torch.int64, **of_device)
        self._logits = program.new_logits()
        rows = torch.arange(program.batch, dtype=torch.int32, **of_device)[:, None]
        embed = functools.partial(torch.index_select, program.embedding.detach(), 0, self._ids.view(-1), out=program.x)
        if program.table_of_positions:
            positions = torch.empty_like(rows)
            table = program.rotation(program.x, torch.arange(capacity, **of_device))
            first = [embed, functools.partial(torch.Tensor.copy_, positions, lengths[:, None])]
            self._rotation = None
        else:  # a row of a table for each batch row, written before each step
            positions, first = rows, [embed]
            table = self._rotation = program.rotation(program.x, lengths)
        self._calls = first + program.calls(table, positions, [cache._handle for cache in self._caches], self._logits)

    def fits(self, program, caches):
        """Whether this is a graph of such a step: of that program, and of arrays where they are."""
        return (
            program is self.program
            and all(map(operator.is_, caches, self._caches))
            and list(map(torch.Tensor.data_ptr, self._arrays)) == self._places
        )

    def run(self, ids, begin):
        """Logits [batch, 1, vocabulary] of one token a row, ids int64 [batch, 1]. The next step writes them anew.

        begin is called before the first kernel that writes a cache.
        """
        self._take_stream()
        self._ids.copy_(ids, non_blocking=True)
        if self._rotation is not None:
            now = self.program.rotation(self.program.x, self._caches[0].seq_lens)
            for array, new in zip(self._rotation, now, strict=True):
                array.copy_(new)
        if self._graph is None and self._kernels:
            self._capture()
        begin()
        if self._graph is None:
            self._kernels = run_calls(self._calls)
        else:
            self._graph.replay()
        ran(*self._kernels)
        return self._logits

    def _take_stream(self):
        """Work of this step behind that of the program's last one, which may be of another thread and stream."""
        stream, before = torch.cuda.current_stream(self.program.device), self.program.stream
        if before is not None and before != stream:
            stream.wait_stream(before)
        self.program.stream = stream

    def _capture(self):
        graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.program.device)
        aside = torch.cuda.Stream(self.program.device)  # a graph is not captured on the default stream
        aside.wait_stream(here)
        with torch.cuda.stream(aside), record_kernels():
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                run_calls(self._calls)
            finally:
                graph.capture_end()
        here.wait_stream(aside)
        self._graph = graph

    def __deepcopy__(self, memo):  # a copied cache has other arrays
        return None

    def __reduce__(self):
        return type(None), ()
