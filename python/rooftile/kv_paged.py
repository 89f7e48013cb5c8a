# SPDX-License-Identifier: Apache-2.0
"""Paged KV caches: with an allocator of their own (Kwon et al. 2023, arXiv 2309.06180), or views on a pool."""

import contextlib
import itertools

import numpy as np

from rooftile import _C
from rooftile.errors import ArgumentError, ArgumentTypeError, NotSupportedError, OutOfPagesError
from rooftile.kv_cache import (
    ELEMENT_DTYPES,
    GROUP,
    KIVI,
    Cache,
    check_device,
    check_format,
    device_of,
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
    max_pages_per_row: default num_pages. format, dtype, device: as KVCache. A page that rows share is copied when one
    of them writes into it. A call that needs more pages than are free raises OutOfPagesError and changes nothing.
    Raises ArgumentError or ArgumentTypeError naming the argument, NotSupportedError for a device without cache kernels.

    On a GPU the host keeps its own table and lengths, so append waits for the device only to read rows or counts that
    are CUDA tensors. A graph that captured an append does not take pages when it is replayed: use a view with a table
    of your own there, or a KVCache.
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
        device = check_device(op, device)
        dtype = dtype_name(op, check_format(op, format), dtype, device)
        num_pages, page_size = integer(op, "num_pages", num_pages), integer(op, "page_size", page_size, 1)
        kv_heads, head_dim = integer(op, "kv_heads", kv_heads, 1), integer(op, "head_dim", head_dim, 1)
        max_rows = integer(op, "max_rows", max_rows)
        max_pages = num_pages if max_pages_per_row is None else integer(op, "max_pages_per_row", max_pages_per_row)
        if max_pages * page_size >= 2**31:
            raise ArgumentError(
                f"{op}: max_pages_per_row must hold fewer than 2**31 tokens, got {max_pages} pages of {page_size}"
            )
        arrays = own_arrays(op, format, dtype, num_pages, page_size, kv_heads, head_dim, max_rows, device)
        arrays["block_table"] = zeros((max_rows, max_pages), "int32", device)
        arrays["block_table"][:] = -1
        super().__init__(op, format, dtype, page_size, kv_heads, head_dim, max_rows, max_pages, arrays)
        self.num_pages = num_pages
        self._free = list(range(num_pages))[::-1]  # the lowest page is taken first
        self._users = [0] * num_pages  # rows that hold a page
        self._pages = [[] for _ in range(max_rows)]

    def _hold_arrays(self, op, arrays):
        super()._hold_arrays(op, arrays)
        # On the CPU the cache's own memory; on a GPU copies that change with it, ahead of the device.
        self._table = host(arrays["block_table"])
        self._stale = []  # places of a GPU's table that differ from _table
        if self.device != "cpu":
            self._lengths = host(arrays["lengths"])

    def to(self, device):
        """Cache.to; the copy hands out its own pages."""
        twin = super().to(device)
        twin._free, twin._users, twin._pages = list(self._free), list(self._users), [list(p) for p in self._pages]
        return twin

    def _write(self, row, begin, pages):
        """Puts pages into the row's places from `begin` on."""
        self._table[row, begin : begin + len(pages)] = pages
        if self.device != "cpu":
            self._stale += [(row, i) for i in range(begin, begin + len(pages))]

    def _publish(self):
        """Sends what changed in the table to the GPU, behind the work that is queued there."""
        if not self._stale:
            return
        rows, columns = np.array(list(dict.fromkeys(self._stale)), np.int64).T
        self._stale = []
        sent = np.stack([rows, columns, self._table[rows, columns]])
        table = self._arrays["block_table"]
        rows, columns, pages = ints("append", "table", sent, self.device)
        table.index_put_((rows, columns), pages.int())

    def _settle(self, rows):
        """The host's lengths are the device's again; pages behind those of `rows` are given back."""
        if self.device != "cpu":
            self._lengths[:] = self.lengths
        for row in rows:
            self._shorten(row, pages_for(self._lengths[row].item(), self.page_size))
        self._publish()

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

    def check_traced(self, op):
        raise NotSupportedError(
            f"{op}: a PagedKVCache takes its pages on the host, which torch.compile cannot trace; use a KVCache, or "
            "PagedKVCache.view with a table of your own"
        )

    @contextlib.contextmanager
    def room(self, op, k, rows, counts):
        """Rows take pages as they grow, or OutOfPagesError is raised; after an error they are given back."""
        changes, grown = [], []
        try:
            self._make_room(op, k, rows, counts, changes, grown)
            copies = [(old, new) for _, _, old, new in changes if old >= 0]
            if copies:
                src, dst = np.array(copies, np.int32).T
                _C.kv_copy_pages(self._handle, src, dst, self._stream())
            self._publish()
            yield
        except BaseException:
            self._undo(changes)
            if self.device != "cpu":  # a fault of an earlier call: some row did not grow
                self._settle(range(self.max_rows))
            raise
        if self.device != "cpu":
            for row, tokens in grown:
                self._lengths[row] += tokens

    def _make_room(self, op, k, rows, counts, changes, grown):
        """Gives every row the pages that its new tokens need, and its own copy of shared pages they would write.

        Arguments that make no sense are left alone here: append refuses them, before it writes, in its own words.
        changes: gets (row, place, page before or -1, page now). grown: gets (row, tokens).
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
            grown.append((row, tokens))
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
        self._write(row, i, [new])
        changes.append((row, i, old, new))

    def _undo(self, changes):
        for row, i, old, new in reversed(changes):
            self._users[new] = 0
            self._free.append(new)
            self._write(row, i, [old])
            if old < 0:
                self._pages[row].pop()
            else:
                self._pages[row][i] = old
                self._users[old] += 1

    def truncate(self, rows, lengths):
        """KVCache.truncate; pages behind the new lengths are given back."""
        rows = self._host_ints("truncate", "rows", rows)
        super().truncate(rows, lengths)
        self._settle(host(rows).tolist())

    def reset(self, rows=None):
        """KVCache.reset; the rows' pages are given back."""
        rows = self._host_ints("reset", "rows", rows)
        super().reset(rows)
        self._settle(range(self.max_rows) if rows is None else host(rows).tolist())

    def _shorten(self, row, pages):
        freed = self._pages[row][pages:]
        self._release(freed)
        del self._pages[row][pages:]
        self._write(row, pages, [-1] * len(freed))

    def _release(self, pages):
        for page in reversed(pages):
            self._users[page] -= 1
            if self._users[page] == 0:
                self._free.append(page)

    def _hold(self, row, pages):
        before = len(self._pages[row])
        self._pages[row] = pages
        self._write(row, 0, pages + [-1] * (before - len(pages)))

    def reorder(self, index):
        """Row i becomes what row index[i] was (beam search). index: [max_rows], a list of ints or an int32 array.

        Pages do not move: rows share them until one writes.
        """
        index = self._host_ints("reorder", "index", index)
        _C.kv_reorder(self._handle, index, False, self._stream())
        before = self._pages
        after = [list(before[source]) for source in host(index).tolist()]
        for page in (page for pages in after for page in pages):
            self._users[page] += 1
        for row, pages in enumerate(after):
            self._release(before[row])
            self._hold(row, pages)
        self._settle(())

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
        self._publish()
        _C.kv_copy_row(self._handle, src, dst, full, self._stream())
        if self.device != "cpu":
            self._lengths[dst] = length


class KVCacheView(Cache):
    """What PagedKVCache.view returns: the methods of a cache on pages that somebody else hands out."""

    def __init__(self, pool, block_table, seq_lens, format, dtype, page_size, head_dim, layout, ring):
        op = "PagedKVCache.view"
        device = device_of(seq_lens)
        dtype = dtype_name(op, check_format(op, format), dtype, device)
        if not isinstance(layout, str) or layout not in ("NHD", "HND"):
            raise ArgumentError(f'{op}: layout must be "NHD" or "HND", got {layout!r}')
        max_rows, max_pages = _shape(op, "block_table", block_table, 2)
        if device != "cpu":
            check_device(op, device)
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
                arrays.update(own_ring(format, dtype, kv_heads, head_dim, max_rows, device))
            else:
                arrays.update(zip(("ring_k", "ring_v", "raw_from"), ring, strict=True))
        elif ring is not None:
            raise ArgumentError(f"{op}: ring is given, but format {format!r} keeps no raw tokens")
        super().__init__(op, format, dtype, page_size, kv_heads, head_dim, max_rows, max_pages, arrays)
        if format in KIVI and ring is None:
            lengths, raw_from = self.positions
            if any(length % GROUP for length in self.lengths):
                raise ArgumentError(
                    f"{op}: ring is needed where a row's length is not a multiple of {GROUP}, "
                    f"got seq_lens {self.lengths}"
                )
            raw_from[:] = lengths

    def reorder(self, index):
        """Rings and lengths: row i becomes what row index[i] was. The rows of the block table are the engine's to move.

        index: [max_rows], a list of ints or an int32 array.
        """
        _C.kv_reorder(self._handle, self._host_ints("reorder", "index", index), False, self._stream())

    def fork(self, src, dst):
        """Row dst becomes a copy of row src in the pages that its row of the block table names.

        Where both rows name the same page nothing is copied.
        """
        _C.kv_copy_row(self._handle, src, dst, 0, self._stream())


def _shape(op, name, array, ndim):
    shape = getattr(array, "shape", None)
    if shape is None:
        raise ArgumentTypeError(
            f"{op}: {name} must be an array that speaks DLPack (torch, NumPy), got {type(array).__name__}"
        )
    if len(shape) != ndim:
        raise ArgumentError(f"{op}: {name} must have {ndim} dimensions, got shape {tuple(shape)}")
    return tuple(shape)
