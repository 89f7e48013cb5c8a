# SPDX-License-Identifier: Apache-2.0
"""The caches of a whole model: one KVCache a layer."""

import contextlib
from functools import partial

from rooftile import _C
from rooftile._calls import all_or_none, setting_back
from rooftile.errors import ArgumentError, ArgumentTypeError
from rooftile.kv_cache import KVCache, host, host_ints, integer


class ModelKVCache:
    """One KVCache for every layer; what changes rows changes them in all layers, or in none.

    format: one name, or a dict of layer -> name, negative layers counted from the end, with "default" for the others:
    `{"default": "int4-kivi", 0: "bf16", -1: "bf16"}`. The rest as KVCache; a layer of an element format has that
    format's dtype unless `dtype` is given. `cache[i]` is layer i's cache: append and attend there.
    Raises ArgumentError or ArgumentTypeError for a `format` that names a layer that is not there or leaves one out, and
    what KVCache raises.
    """

    def __init__(self, num_layers, batch, capacity, kv_heads, head_dim, *, format="int4-kivi", dtype=None, device=None):
        formats = _formats(integer("ModelKVCache", "num_layers", num_layers), format)
        self.layers = [
            KVCache(batch, capacity, kv_heads, head_dim, format=name, dtype=dtype, device=device) for name in formats
        ]

    def __len__(self):
        return len(self.layers)

    def __getitem__(self, layer):
        return self.layers[layer]

    def __iter__(self):
        return iter(self.layers)

    def truncate(self, rows, lengths):
        """KVCache.truncate in every layer; an error in one leaves all as they were."""
        rows, lengths = self._host_ints("truncate", "rows", rows), self._host_ints("truncate", "lengths", lengths)
        self._change("truncate", lambda layer: partial(_C.kv_truncate, layer._handle, rows, lengths, layer._stream()))

    def reorder(self, index):
        """KVCache.reorder in every layer."""
        index = self._host_ints("reorder", "index", index)
        if str(getattr(index, "dtype", None)) == "torch.int32" and not index.is_cuda:
            index = host(index)  # NumPy's is read in C; torch's, before 2.10, in Python that a signal handler can cut
        self._change("reorder", lambda layer: layer._reordering(index))

    def reset(self, rows=None):
        """KVCache.reset in every layer."""
        rows = self._host_ints("reset", "rows", rows)
        self._change("reset", lambda layer: partial(_C.kv_reset, layer._handle, rows, layer._stream()))

    def fork(self, src, dst):
        """KVCache.fork in every layer."""
        src, dst = integer("fork", "src", src), integer("fork", "dst", dst)
        self._change("fork", lambda layer: partial(_C.kv_copy_row, layer._handle, src, dst, 0, layer._stream()))

    def _host_ints(self, op, name, values):
        """A copy: `values` may lie in the memory of a layer, which changes before the next one reads them."""
        return host_ints(op, name, values, max((layer.max_rows for layer in self.layers), default=0))

    def _change(self, op, change):
        """change(layer)() of every layer, or none, in one step in which no signal handler runs (see all_or_none).

        A layer that refuses a call is as it was; the layers before it have at most changed their lengths. (What kernels
        found wrong is raised before the first layer changes. Else reorder and fork are refused for arguments that all
        layers judge alike, so by the first layer or by none.)
        """
        with contextlib.ExitStack() as held:
            for layer in self.layers:
                held.enter_context(layer._handle.exclusive(op))
            for layer in self.layers:
                layer._check(op)
            positions = [array for layer in self.layers for array in layer._positions]
            all_or_none([change(layer) for layer in self.layers], setting_back(positions))

    @property
    def lengths(self):
        """Tokens stored in every row, of the first layer."""
        return self.layers[0].lengths if self.layers else []

    @property
    def nbytes(self):
        """Bytes allocated by all layers."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def nbytes_used(self):
        """Bytes the stored tokens of all layers need."""
        return sum(layer.nbytes_used for layer in self.layers)


def set_kv_cache(model, format="int4-kivi", *, capacity=None, dtype=None, stepwise=False):
    """Gives every generate() of a transformers model, and every forward without a cache, a new cache of this format.

    model: a causal language model of transformers; its attention becomes "rooftile". format, capacity, dtype,
    stepwise: as rooftile.integrations.transformers.RooftileCache takes them; with stepwise a text that is scored in one
    forward is scored as the cache holds it. format=None takes it back: the model keeps the caches of transformers
    again, which the attention "rooftile" serves too. A cache that a call is given is used as it is, and so is one that
    it asks for by a `cache_implementation` other than "dynamic".

        rt.set_kv_cache(model, "int4-kivi")
        model.generate(**inputs)          # also through a pipeline

    Raises ArgumentError or ArgumentTypeError naming the argument, NotSupportedError for models without such a cache.
    """
    from rooftile.integrations import transformers as integration

    integration.set_kv_cache(model, format, {"capacity": capacity, "dtype": dtype, "stepwise": stepwise})


def _formats(num_layers, format):
    if isinstance(format, str):
        return [format] * num_layers
    if not isinstance(format, dict):
        raise ArgumentTypeError(
            f"ModelKVCache: format must be a name or a dict of layer -> name, got {type(format).__name__}"
        )
    names = {}
    for layer, name in format.items():
        if layer == "default":
            continue
        if not -num_layers <= integer("ModelKVCache", "a layer of format", layer, -num_layers) < num_layers:
            raise ArgumentError(f"ModelKVCache: format names layer {layer}, there are {num_layers}")
        names[layer % num_layers] = name
    if "default" not in format and len(names) < num_layers:
        raise ArgumentError('ModelKVCache: format must have a "default", or name every layer')
    return [names.get(layer, format.get("default")) for layer in range(num_layers)]
