# SPDX-License-Identifier: Apache-2.0
"""The cache of a sliding layer: pages behind the window are used again."""

import numpy as np
import torch

from rooftile.errors import ArgumentError
from rooftile.kv_cache import CONTIGUOUS_PAGE, GROUP, KVCache, check_rows, host, host_ints, ints, pages_for
from rooftile.kv_paged import PagedKVCache

# So many of the newest tokens may be taken back, or be stored before the first of them is attended.
BACK = 64


def ring_tokens(window):
    """Tokens that a row of a SlidingKVCache has memory for.

    A query reads whole groups. The pages that hold the first token it sees and the newest one may lie in part outside.
    """
    return (pages_for(window + BACK + GROUP, CONTIGUOUS_PAGE) + 1) * CONTIGUOUS_PAGE


def pieces(tokens, size, counts):
    """(slice, counts) for every `size` of so many tokens. counts: int32 [B] or None, as append takes it."""
    if tokens <= size:
        yield slice(None), counts
        return
    for begin in range(0, tokens, size):
        yield slice(begin, begin + size), None if counts is None else (counts - begin).clamp(0, size)


class SlidingKVCache:
    """The keys and values of one layer whose queries look back `window` tokens, in bounded memory: torch tensors.

    A row has a ring of pages, and its block table names them again and again: token t lies in the row's page
    (t / 64) % pages. No kernel reads behind the window, so results are bit for bit those of a cache that keeps
    everything. `view` is the cache as kernels take it; whoever attends it passes `window`. Methods are atomic, as those
    of a KVCache; an append that makes a longer table makes a new `view`, and the one before it refuses longer rows.
    """

    def __init__(self, window, cache):
        """cache: a KVCache of at most ring_tokens(window) tokens a row, of which this one starts as a copy."""
        self.window = window
        self._ring = cache.select(capacity=ring_tokens(window))
        self.beyond = 0  # tokens of the longest row that were taken back and not stored anew
        self._lay_table(self._ring.max_pages)

    def _lay_table(self, pages):
        """Makes `view`, of so many entries a row."""
        ring, arrays = self._ring, self._ring._arrays
        entries = torch.arange(pages, device=ring.device) % ring.max_pages
        table = (torch.arange(ring.max_rows, device=ring.device)[:, None] * ring.max_pages + entries).to(torch.int32)
        pool = arrays["pool"] if "pool" in arrays else (arrays["k_pool"], arrays["v_pool"])
        options = {"page_size": ring.page_size, "head_dim": ring.head_dim, "format": ring.format, "dtype": ring.dtype}
        if "ring_k" in arrays:
            options["ring"] = tuple(arrays[name] for name in ("ring_k", "ring_v", "raw_from"))
        self.view = PagedKVCache.view(pool, table, ring.seq_lens, **options)

    @property
    def format(self):
        return self._ring.format

    @property
    def device(self):
        return self._ring.device

    @property
    def batch(self):
        return self._ring.max_rows

    @property
    def lengths(self):
        return self.view.lengths

    @property
    def seq_lens(self):
        return self.view.seq_lens

    @property
    def nbytes(self):
        """Bytes allocated: the rings of pages, the raw tokens, the block table and lengths."""
        return self._ring.nbytes + self.view._arrays["block_table"].nbytes

    def append(self, k, v, *, counts=None, longest):
        """KVCache.append. longest: the tokens of no row are more afterwards, known without asking a GPU."""
        with self._alone("append"):
            if longest > self.view.capacity:
                self.view._check("append")
                self._lay_table(max(2 * self.view.max_pages, pages_for(longest, CONTIGUOUS_PAGE)))
            self.beyond = max(self.beyond - k.shape[1], 0)
            # a token of a call must not overwrite another one
            for piece, real in pieces(k.shape[1], self._ring.capacity - CONTIGUOUS_PAGE, counts):
                self.view.append(k[:, piece], v[:, piece], counts=real)

    def truncate(self, rows, lengths):
        """KVCache.truncate; ArgumentError where the window of the next query would reach tokens that are gone."""
        with self._alone("truncate"):
            self._truncate(rows, lengths)

    def _truncate(self, rows, lengths):
        before = self.lengths
        back = max((before[row] - length for row, length in zip(rows, lengths, strict=True)), default=0)
        if self.beyond + back > BACK and max(before, default=0) + self.beyond > self._ring.capacity:
            raise ArgumentError(
                f"truncate: lengths take {back} tokens back; a sliding layer whose window of {self.window} tokens is "
                f"full takes back {BACK - self.beyond} at most"
            )
        self.view.truncate(rows, lengths)
        self.beyond += back

    def _check(self, op, index=None):
        self.view._check(op, index)

    def reorder(self, index):
        """KVCache.reorder."""
        with self._alone("reorder"):
            index = host_ints("reorder", "index", index, self.batch)
            self._check("reorder", index)
            index = host(index).tolist()
            for array in self._row_arrays().values():
                array[:] = array[index]

    def select(self, rows=None):
        """KVCache.select."""
        rows = np.arange(self.batch, dtype=np.int32) if rows is None else host(ints("select", "rows", rows))
        check_rows(rows, self.batch)
        twin, ring = object.__new__(type(self)), self._ring
        shape = (len(rows), ring.capacity, ring.kv_heads, ring.head_dim)
        twin._ring = KVCache(*shape, format=ring.format, dtype=ring.dtype, device=ring.device)
        rows, targets = rows.tolist(), twin._row_arrays()
        with self._alone("select"):
            twin.window, twin.beyond = self.window, self.beyond
            for name, source in self._row_arrays().items():
                targets[name][:] = source[rows]
            twin._lay_table(self.view.max_pages)
        return twin

    def _alone(self, op):
        """The lock of the ring's pool, which is the view's."""
        return self._ring._handle.exclusive(op)

    def _row_arrays(self):
        return self._ring._row_arrays(self._ring.max_pages)

    def __getstate__(self):
        """What a pickle holds: bytes, as of a KVCache. The table is laid anew."""
        with self._alone("pickle"):
            ring = self._ring.__getstate__()
            return {"window": self.window, "beyond": self.beyond, "ring": ring, "pages": self.view.max_pages}

    def __setstate__(self, state):
        self.window, self.beyond, self._ring = state["window"], state["beyond"], object.__new__(KVCache)
        self._ring.__setstate__(state["ring"])
        self._lay_table(state["pages"])

    def __deepcopy__(self, memo):
        return self.select()
