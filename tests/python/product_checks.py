# SPDX-License-Identifier: Apache-2.0
"""What every product on a GPU must do."""

import closeness
import torch


def captured(product, x):
    """A graph of product(x, out=...) gives the bits of a call, with what x holds when it is replayed."""
    expected = product(x)
    still, out = torch.zeros_like(x), torch.zeros_like(expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        product(still, out=out)
    still.copy_(x)
    for _ in range(2):
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        closeness.assert_bits_equal(out, expected)
