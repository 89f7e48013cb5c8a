# SPDX-License-Identifier: Apache-2.0
"""A StepProgram over one RooftileCache on a GPU: a CUDA graph, whose launch is one decode step."""

import functools

import torch

from rooftile import _C
from rooftile._calls import ran
from rooftile.integrations.step_calls import StepCalls
from rooftile.integrations.step_program import run_calls


class StepGraph(StepCalls):
    """The first step runs call by call, so that its kernels are loaded; the second one is captured, unless the program
    says that its steps become no graphs.

    What changes from step to step lies in arrays that kernels read: the new tokens, the lengths of the cache. A cache
    that has grown has other arrays, and takes another graph.
    """

    def __init__(self, program, caches):
        super().__init__(program, caches)
        self._arrays = [array for cache in caches for array in cache._arrays.values()]
        self._places = list(map(torch.Tensor.data_ptr, self._arrays))
        self._graph = None

    def _make_calls(self, capacity):
        program = self.program
        self._ids = torch.zeros(program.batch, 1, dtype=torch.int64, device=program.device)
        super()._make_calls(capacity)
        embedding, ids = program.embedding.detach(), self._ids.view(-1)
        self._calls.insert(0, functools.partial(_C.embedding, ids, embedding, 1.0, program.x, None, None))

    def fits(self, program, caches):
        """As of StepCalls, and whether the caches' arrays are where they were."""
        return super().fits(program, caches) and list(map(torch.Tensor.data_ptr, self._arrays)) == self._places

    def run(self, ids, begin):
        """Logits [batch, 1, vocabulary] of one token a row, ids int64 [batch, 1]. The next step writes them anew.

        begin is called before the first kernel that writes a cache.
        """
        self._take_stream()
        self._ids.copy_(ids, non_blocking=True)
        self._rotate()
        if self._graph is None and self._kernels and self.program.cuda_graphs:
            self._capture()
        begin()
        if self._graph is None:
            self._kernels = run_calls(self._calls)
        else:
            self._graph.launch(self.program.stream.cuda_stream)
        ran(*self._kernels)
        return self._logits

    def _take_stream(self):
        """Work of this step behind that of the program's last one, which may be of another thread and stream."""
        stream, before = torch.cuda.current_stream(self.program.device), self.program.stream
        if before is not None and before != stream:
            stream.wait_stream(before)
        self.program.stream = stream

    def _capture(self):
        device = self.program.device
        graph = _C.CudaGraph(device.index)
        with torch.cuda.stream(torch.cuda.ExternalStream(graph.stream, device)):
            graph.capture(self._calls)
        self._graph = graph
