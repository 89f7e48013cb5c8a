# SPDX-License-Identifier: Apache-2.0
"""What torch.library is told of every op. The modules of the ops declare theirs, torch_ops registers them."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Op:
    """An op that returns new tensors, or writes the outputs that it is given."""

    inputs: str  # schema of the arguments
    outputs: tuple  # names of the function's output arguments
    function: Callable  # (*inputs, plan=, **outputs): the public function, or one in its place
    shapes: Callable  # (*inputs) -> one shape an output; the device is the first argument's
    dtypes: tuple = (None, None)  # of the outputs, by name; None: the first argument's


@dataclass(frozen=True)
class StoringOp:
    """An op that changes a cache. It has no form that is given its outputs."""

    inputs: str  # schema of the arguments before the cache's
    returns: str
    function: Callable  # (*inputs, plan=)
    fake: Callable  # (*inputs) -> what it returns


OPS, STORING = {}, {}  # by name, in the order of their declaration

# A cache among an operator's arguments: Cache._flat().
CACHE = (
    "str format, str dtype, int page_size, int head_dim, int kv_heads, int max_rows, int max_pages, Tensor? pool, "
    "Tensor? k_pool, Tensor? v_pool, Tensor? block_table, Tensor lengths, Tensor? ring_k, Tensor? ring_v, "
    "Tensor? raw_from, Tensor? fault"
)
CACHE_PARTS = CACHE.count(",") + 1


def like_first(count=1):
    """Op.shapes of outputs that all have the first argument's shape."""
    return lambda x, *_: [x.shape] * count
