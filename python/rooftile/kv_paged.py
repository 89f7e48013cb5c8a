# SPDX-License-Identifier: Apache-2.0
"""Paged KV caches: with an allocator of their own (Kwon et al. 2023, arXiv 2309.06180), or views on a pool."""

import contextlib
import itertools

import numpy as np

from rooftile import _C
from rooftile.errors import ArgumentError, ArgumentTypeError, OutOfPagesError
from rooftile.kv_cache import (
    ELEMENT_DTYPES,
    GROUP,
    KIVI,
    Cache,
    check_device,
    check_format,
    dtype_name,
    host,
    integer,
    ints,
    own_arrays,
    own_ring,
    pages_for,
    zeros,
)


class PagedKVCache(Cache):
    """The keys and values of one layer in pages that rows take as they grow and can share.

    num_pages: pages of the pool. page_size: tokens, 16, 32, 64 or 128; 32 or more in the kivi formats. max_rows: rows.
    max_pages_per_row: default num_pages. format, dtype: as KVCache. A page that rows share is copied when one of them
    writes into it. A call that needs more pages than are free raises OutOfPagesError and changes nothing.
    """

    def __init__(
        self,
        num_pages,
        page_size,
        kv_heads,
        head_dim,
        *,
        max_rows,
        max_pages_per_row=None,
        format="int4-kivi",
        dtype=None,
        device=None,
    ):
        op = "PagedKVCache"
        dtype = dtype_name(check_format(op, format), dtype)
        check_device(op, device)
        num_pages, page_size = integer(op, "num_pages", num_pages), integer(op, "page_size", page_size, 1)
        kv_heads, head_dim = integer(op, "kv_heads", kv_heads, 1), integer(op, "head_dim", head_dim, 1)
        max_rows = integer(op, "max_rows", max_rows)
        max_pages = num_pages if max_pages_per_row is None else integer(op, "max_pages_per_row", max_pages_per_row)
        arrays = own_arrays(format, dtype, num_pages, page_size, kv_heads, head_dim, max_rows)
        arrays["block_table"] = zeros((max_rows, max_pages), "int32")
        super().__init__(op, format, dtype, page_size, kv_heads, head_dim, max_rows, max_pages, arrays)
        self.num_pages = num_pages
        self._table = host(arrays["block_table"])
        self._table[:] = -1
        self._free = list(range(num_pages))[::-1]  # the lowest page is taken first
        self._users = [0] * num_pages  # rows that hold a page
        self._pages = [[] for _ in range(max_rows)]

    @staticmethod
    def view(
        pool,
        block_table,
        seq_lens,
        *,
        format,
        dtype=None,
        page_size=None,
        head_dim=None,
        layout="NHD",
        ring=None,
    ):
        """A cache on an engine's own pool and tables: nothing is copied, nothing allocated but a missing ring.

        pool: quantised formats: uint8 [pages, kv_heads, block_bytes], the two outer dims of any strides (multiples of
        16 bytes); page_size and head_dim are needed then. Element formats: [pages, 2, page_size, kv_heads, head_dim]
        (layout "NHD": vLLM, FlashInfer) or [pages, 2, kv_heads, page_size, head_dim] ("HND"), or a pair (k_pool,
        v_pool) of those without the dim of 2, each of its own outer strides.
        block_table: int32 [max_rows, max_pages]; only the entries of stored tokens, and of those being stored, are
        read. seq_lens: int32 [max_rows], tokens stored; append and truncate write it.
        ring: kivi formats: (ring_k, ring_v, raw_from), [max_rows, kv_heads, 64, head_dim] twice in `dtype` and int32
        [max_rows], which belong to the rows and outlive the view. Without it a new ring is made, and every length must
        be a multiple of 32: the raw tokens of an open group are nowhere else.
        Raises ArgumentError or ArgumentTypeError naming the argument.
        """
        return KVCacheView(pool, block_table, seq_lens, format, dtype, page_size, head_dim, layout, ring)

    @property
    def free_pages(self):
        """Pages that no row holds."""
        return len(self._free)

    @property
    def block_table(self):
        """int32 [max_rows, max_pages], -1 where a row has no page. Written by this cache alone."""
        return self._arrays["block_table"]

    @property
    def nbytes_used(self):
        """Bytes of the pages that rows hold, a shared page once, and of the raw tokens of open groups."""
        page = self.kv_heads * _C.kv_block_bytes(self.format, self.page_size, self.head_dim)
        raw = sum(self._row_bytes(tokens % GROUP) for tokens in self.lengths) if self.format in KIVI else 0
        return (self.num_pages - len(self._free)) * page + raw

    @contextlib.contextmanager
    def room(self, op, k, rows, counts):
        """Rows take pages as they grow, or OutOfPagesError is raised; after an error they are given back."""
        changes = []
        try:
            self._make_room(op, k, rows, counts, changes)
            copies = [(old, new) for _, _, old, new in changes if old >= 0]
            if copies:
                src, dst = np.array(copies, np.int32).T
                _C.kv_copy_pages(self._handle, src, dst)
            yield
        except BaseException:
            self._undo(changes)
            raise

    def _make_room(self, op, k, rows, counts, changes):
        """Gives every row the pages that its new tokens need, and its own copy of shared pages they would write.

        Arguments that make no sense are left alone here: append refuses them, before it writes, in its own words.
        """
        given = {name: values for name, values in (("rows", rows), ("counts", counts)) if values is not None}
        for name, array in (("k", k), *given.items()):
            _C.check_array(op, name, array)
        shape = tuple(k.shape)
        if len(shape) != 4 or (rows is None and shape[0] > self.max_rows):
            return
        if any(tuple(v.shape) != shape[:1] or str(v.dtype) not in ("int32", "torch.int32") for v in given.values()):
            return
        try:
            rows = range(shape[0]) if rows is None else host(rows).tolist()
            counts = itertools.repeat(shape[1]) if counts is None else host(counts).tolist()
        except RuntimeError:  # inside a functorch transform
            return
        kivi = self.format in KIVI
        for row, tokens in zip(rows, counts, strict=False):
            if not 0 <= row < self.max_rows or not 0 < tokens <= shape[1]:
                continue
            begin = self._lengths[row].item()
            end = begin + tokens
            if end > self.capacity:
                continue
            pages = self._pages[row]
            # a group that closes is written as a whole, an open one not at all
            first, last = (begin // GROUP * GROUP, end // GROUP * GROUP) if kivi else (begin, end)
            behind = min(pages_for(last, self.page_size), len(pages)) if first < last else 0
            for i in range(first // self.page_size, behind):
                if self._users[pages[i]] > 1:
                    self._set_page(op, row, i, changes)
            for i in range(len(pages), pages_for(end, self.page_size)):
                self._set_page(op, row, i, changes)

    def _set_page(self, op, row, i, changes):
        """Puts a free page at place i of a row, in place of a shared one or behind the last."""
        if not self._free:
            raise OutOfPagesError(
                f"{op}: row {row} needs another page of {self.page_size} tokens, all {self.num_pages} are taken"
            )
        new, pages, old = self._free.pop(), self._pages[row], -1
        self._users[new] = 1
        if i == len(pages):
            pages.append(new)
        else:
            old, pages[i] = pages[i], new
            self._users[old] -= 1
        self._table[row, i] = new
        changes.append((row, i, old, new))

    def _undo(self, changes):
        for row, i, old, new in reversed(changes):
            self._users[new] = 0
            self._free.append(new)
            self._table[row, i] = old
            if old < 0:
                self._pages[row].pop()
            else:
                self._pages[row][i] = old
                self._users[old] += 1

    def truncate(self, rows, lengths):
        """KVCache.truncate; pages behind the new lengths are given back."""
        rows = ints("truncate", "rows", rows)
        super().truncate(rows, lengths)
        self._give_back(host(rows).tolist())

    def reset(self, rows=None):
        """KVCache.reset; the rows' pages are given back."""
        rows = ints("reset", "rows", rows)
        super().reset(rows)
        self._give_back(range(self.max_rows) if rows is None else host(rows).tolist())

    def _give_back(self, rows):
        """The pages that lie behind the tokens of the rows."""
        for row in rows:
            self._shorten(row, pages_for(self._lengths[row].item(), self.page_size))

    def _shorten(self, row, pages):
        self._release(self._pages[row][pages:])
        del self._pages[row][pages:]
        self._table[row, pages:] = -1

    def _release(self, pages):
        for page in reversed(pages):
            self._users[page] -= 1
            if self._users[page] == 0:
                self._free.append(page)

    def _hold(self, row, pages):
        self._pages[row] = pages
        self._table[row, : len(pages)] = pages
        self._table[row, len(pages) :] = -1

    def reorder(self, index):
        """Row i becomes what row index[i] was (beam search). index: [max_rows], a list of ints or an int32 array.

        Pages do not move: rows share them until one writes.
        """
        index = ints("reorder", "index", index)
        _C.kv_reorder(self._handle, index, False)
        before = self._pages
        after = [list(before[source]) for source in host(index).tolist()]
        for page in (page for pages in after for page in pages):
            self._users[page] += 1
        for row, pages in enumerate(after):
            self._release(before[row])
            self._hold(row, pages)

    def fork(self, src, dst):
        """Row dst becomes a copy of row src: full pages are shared, the last, partial one is copied."""
        length = self._length("fork", "src", src)
        self._length("fork", "dst", dst)
        if src == dst:
            return
        full, needed = length // self.page_size, pages_for(length, self.page_size)
        given_back = sum(self._users[page] == 1 for page in self._pages[dst])
        if needed - full > len(self._free) + given_back:
            raise OutOfPagesError(
                f"fork: row {dst} needs a page of {self.page_size} tokens, all {self.num_pages} are taken"
            )
        shared = self._pages[src][:full]
        for page in shared:
            self._users[page] += 1
        self._release(self._pages[dst])
        own = [self._free.pop() for _ in range(needed - full)]
        for page in own:
            self._users[page] = 1
        self._hold(dst, shared + own)
        _C.kv_copy_row(self._handle, src, dst, full)


class KVCacheView(Cache):
    """What PagedKVCache.view returns: the methods of a cache on pages that somebody else hands out."""

    def __init__(self, pool, block_table, seq_lens, format, dtype, page_size, head_dim, layout, ring):
        op = "PagedKVCache.view"
        dtype = dtype_name(check_format(op, format), dtype)
        if layout not in ("NHD", "HND"):
            raise ArgumentError(f'{op}: layout must be "NHD" or "HND", got {layout!r}')
        max_rows, max_pages = _shape(op, "block_table", block_table, 2)
        arrays = {"block_table": block_table, "lengths": seq_lens}
        if format in ELEMENT_DTYPES:
            if isinstance(pool, (tuple, list)) and len(pool) == 2:
                sides = pool
            else:
                _, two, *_ = _shape(op, "pool", pool, 5)
                if two != 2:
                    raise ArgumentError(
                        f"{op}: pool must hold K and V in its second dimension, got shape {tuple(pool.shape)}"
                    )
                sides = (pool[:, 0], pool[:, 1])
            for name, side in zip(("k_pool", "v_pool"), sides, strict=True):
                _shape(op, name, side, 4)
                arrays[name] = side if layout == "NHD" else side.swapaxes(1, 2)
            _, own_page_size, kv_heads, own_head_dim = arrays["k_pool"].shape
            page_size = own_page_size if page_size is None else integer(op, "page_size", page_size, 1)
            head_dim = own_head_dim if head_dim is None else integer(op, "head_dim", head_dim, 1)
        else:
            _, kv_heads, _ = _shape(op, "pool", pool, 3)
            if page_size is None or head_dim is None:
                raise ArgumentTypeError(f"{op}: page_size and head_dim are needed with format {format!r}")
            page_size, head_dim = integer(op, "page_size", page_size, 1), integer(op, "head_dim", head_dim, 1)
            arrays["pool"] = pool
        if format in KIVI:
            if ring is not None and not (isinstance(ring, (tuple, list)) and len(ring) == 3):
                raise ArgumentTypeError(f"{op}: ring must be (ring_k, ring_v, raw_from), got {type(ring).__name__}")
            if ring is None:
                arrays.update(own_ring(format, dtype, kv_heads, head_dim, max_rows))
            else:
                arrays.update(zip(("ring_k", "ring_v", "raw_from"), ring, strict=True))
        elif ring is not None:
            raise ArgumentError(f"{op}: ring is given, but format {format!r} keeps no raw tokens")
        super().__init__(op, format, dtype, page_size, kv_heads, head_dim, max_rows, max_pages, arrays)
        if format in KIVI and ring is None:
            if (self._lengths % GROUP).any():
                raise ArgumentError(
                    f"{op}: ring is needed where a row's length is not a multiple of {GROUP}, "
                    f"got seq_lens {self.lengths}"
                )
            host(arrays["raw_from"])[:] = self._lengths

    def reorder(self, index):
        """Rings and lengths: row i becomes what row index[i] was. The rows of the block table are the engine's to move.

        index: [max_rows], a list of ints or an int32 array.
        """
        _C.kv_reorder(self._handle, ints("reorder", "index", index), False)

    def fork(self, src, dst):
        """Row dst becomes a copy of row src in the pages that its row of the block table names.

        Where both rows name the same page nothing is copied.
        """
        _C.kv_copy_row(self._handle, src, dst, 0)


def _shape(op, name, array, ndim):
    shape = getattr(array, "shape", None)
    if shape is None:
        raise ArgumentTypeError(
            f"{op}: {name} must be an array that speaks DLPack (torch, NumPy), got {type(array).__name__}"
        )
    if len(shape) != ndim:
        raise ArgumentError(f"{op}: {name} must have {ndim} dimensions, got shape {tuple(shape)}")
    return tuple(shape)
