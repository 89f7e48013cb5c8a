# SPDX-License-Identifier: Apache-2.0
"""Who holds which page of a paged cache. Why all of it lies in arrays: docs/design/015-pages-in-arrays.md."""

import itertools
import sys

import numpy as np

from rooftile import _C
from rooftile._calls import ran
from rooftile._registry import CACHE_PARTS, STORING, StoringOp
from rooftile.errors import ArgumentError, NotSupportedError, OutOfPagesError
from rooftile.kv_cache import ARRAYS, GROUP, KIVI, append, current_stream, device_of, host, ints, pages_for


class Pages:
    """Hands out the pages of one cache and takes them back.

    users: int32 [num_pages], how many rows hold a page. A row's pages are the entries of its row of the table that are
    not negative; they come first. On the CPU table and lengths are the cache's own arrays. On a GPU they are given: the
    host's copies, int32 [max_rows, max_pages] and [max_rows], which run ahead of the device. Nothing else lasts from
    one call to the next, so an operator in a graph makes a Pages of the tensors that it is handed.
    """

    def __init__(self, flat, handle, users, table=None, lengths=None):
        """flat: Cache._flat(). handle: the _C.KvCache made of it."""
        arrays = dict(zip(ARRAYS, flat[-len(ARRAYS) :], strict=True))
        self._handle, self._arrays = handle, arrays
        self.format, self.page_size = flat[0], flat[2]
        self.device = device_of(arrays["lengths"])
        self._kept = [
            users,
            arrays["block_table"] if table is None else table,
            arrays["lengths"] if lengths is None else lengths,
        ]
        self._fault = None if arrays["fault"] is None else memoryview(host(arrays["fault"]))
        self._stale = []  # places of a GPU's table that differ from `table`
        self._read_again()

    def _read_again(self):
        """Takes the arrays from where they are now."""
        self._times_taken = self._handle.times_taken
        self.users, self.table, self.lengths = map(host, self._kept)
        # the same memory, of which single values are read faster
        self._users, self._table, self._lengths = map(memoryview, (self.users, self.table, self.lengths))

    def here(self):
        """These pages; torch may have moved their arrays. What is called on them is called under the cache's lock."""
        if self._handle.times_taken != self._times_taken:
            self._read_again()
        return self

    @property
    def free(self):
        """How many pages no row holds."""
        return int(np.count_nonzero(self.users == 0))

    def held(self, row):
        """The row's pages."""
        entries = self.table[row]
        return entries[: np.count_nonzero(entries >= 0)].copy()

    def check_table(self, op):
        """Raises ArgumentError where the table, which others can reach, names a page that is not there."""
        bad = np.argwhere(self.table >= len(self.users))
        if len(bad):
            self._refuse_page(op, *bad[0].tolist())

    def _refuse_page(self, op, row, i):
        raise ArgumentError(
            f"{op}: block_table[{row}, {i}] must be a page in [0, {len(self.users)}), got {self._table[row, i]}"
        )

    def _free_pages(self):
        """Yields free pages, the lowest first."""
        yield from np.flatnonzero(self.users == 0).tolist()

    def _write(self, row, begin, pages):
        """Puts pages into the row's places from `begin` on."""
        self.table[row, begin : begin + len(pages)] = pages
        if self.device != "cpu":
            self._stale += [(row, i) for i in range(begin, begin + len(pages))]

    def publish(self):
        """Sends what changed in the table to the GPU, behind the work that is queued there."""
        if not self._stale:
            return
        rows, columns = np.array(list(dict.fromkeys(self._stale)), np.int64).T
        self._stale = []
        sent = np.stack([rows, columns, self.table[rows, columns]])
        rows, columns, pages = ints("append", "table", sent, self.device)
        self._arrays["block_table"].index_put_((rows, columns), pages.int())

    def settle(self, rows=None):
        """The host's lengths are the device's again; pages behind those of `rows`, by default all, are given back."""
        if self.device != "cpu":
            self.lengths[:] = host(self._arrays["lengths"])
        for row in range(len(self.table)) if rows is None else rows:
            self._shorten(row, pages_for(self.lengths[row].item(), self.page_size))
        self.publish()

    def catch_up(self):
        """Settles where any call on the cache raised that an earlier one left a row alone. True: all is well now."""
        if self._fault is None or self._fault[0] != _C.kv_fault_raised:
            return False
        self.settle()
        return self._fault[0] == _C.kv_fault_raised

    def _shorten(self, row, pages):
        freed = self.held(row)[pages:]
        self.users[freed] -= 1
        self._write(row, pages, [-1] * len(freed))

    def _store(self, op, k, rows, counts, kernel):
        """Cache._store: rows take pages as they grow, or OutOfPagesError is raised; after an error they are given back.

        Other threads' calls on the pool wait until it is over.
        """
        on_gpu = self.device != "cpu"
        if on_gpu and sys.modules["torch"].cuda.is_current_stream_capturing():
            raise NotSupportedError(
                f"{op}: a PagedKVCache takes its pages on the host, which a graph that is captured would not repeat; "
                "use a KVCache, or PagedKVCache.view with a table of your own"
            )
        with self._handle.exclusive(op) as held:
            self.here()
            behind, changes, grown = self.catch_up(), [], []
            if behind:
                self._fault[0] = 0
            try:
                self._grow(op, k, rows, counts, changes, grown)
                if changes:
                    copies = [(old, new) for _, _, old, new in changes if old >= 0]
                    if copies:
                        src, dst = np.array(copies, np.int32).T
                        _C.kv_copy_pages(held, src, dst, current_stream(self.device))
                    self.publish()
                if on_gpu:
                    rows, counts = ints(op, "rows", rows, self.device), ints(op, "counts", counts, self.device)
                name = kernel(held, rows, counts)
            except BaseException:
                self._undo(changes)
                if on_gpu:
                    if self._fault is None or self._fault[0] == _C.kv_fault_raised:  # a row did not grow
                        self.settle()
                    else:
                        self.publish()
                        if behind and self._fault[0] == 0:  # a graph throws away what was settled
                            self._fault[0] = _C.kv_fault_raised
                raise
            if on_gpu:
                for row, tokens in grown:
                    self.lengths[row] += tokens
            return name

    def _grow(self, op, k, rows, counts, changes, grown):
        """Gives every row the pages that its new tokens need, and its own copy of shared pages they would write.

        Arguments that make no sense are left alone here: append refuses them, before it writes, in its own words.
        changes: gets (row, place, page before or -1, page now). grown: gets (row, tokens).
        """
        max_rows, max_pages = self.table.shape
        _C.check_array(op, "k", k)
        shape = tuple(k.shape)
        for name, array in (("rows", rows), ("counts", counts)):
            if array is not None:
                _C.check_array(op, name, array)
                if tuple(array.shape) != shape[:1] or str(array.dtype) not in ("int32", "torch.int32"):
                    return
        if len(shape) != 4 or (rows is None and shape[0] > max_rows):
            return
        try:
            rows = range(shape[0]) if rows is None else host(rows).tolist()
            counts = itertools.repeat(shape[1]) if counts is None else host(counts).tolist()
        except RuntimeError:  # inside a functorch transform
            return
        page_size, kivi, free = self.page_size, self.format in KIVI, self._free_pages()
        table, lengths, users = self._table, self._lengths, self._users
        for row, tokens in zip(rows, counts, strict=False):
            if not 0 <= row < max_rows or not 0 < tokens <= shape[1]:
                continue
            begin = lengths[row]
            end = begin + tokens
            if begin < 0 or end > max_pages * page_size:
                continue
            grown.append((row, tokens))
            # a group that closes is written as a whole, an open one not at all
            first, last = (begin // GROUP * GROUP, end // GROUP * GROUP) if kivi else (begin, end)
            written = pages_for(last, page_size) if first < last else 0
            for i in range(first // page_size, pages_for(end, page_size)):
                page = table[row, i]
                if page >= len(users):
                    self._refuse_page(op, row, i)
                if page < 0 or (i < written and users[page] > 1):
                    new = next(free, None)
                    if new is None:
                        raise OutOfPagesError(
                            f"{op}: row {row} needs another page of {page_size} tokens, all {len(self.users)} are taken"
                        )
                    changes.append((row, i, page, new))
                    self._replace(row, i, page, new)

    def _replace(self, row, i, old, new):
        """Place i of the row gets page `new` instead of `old`; either may be -1."""
        for page, users in ((old, -1), (new, 1)):
            if page >= 0:
                self.users[page] += users
        self._write(row, i, [new])

    def _undo(self, changes):
        for row, i, old, new in reversed(changes):
            self._replace(row, i, new, old)

    def share(self, src, dst, full, length):
        """Row dst holds the first `full` pages of src, and free pages for the rest of `length` tokens.

        Returns False, and changes nothing, where there are too few.
        """
        own, before = pages_for(length, self.page_size) - full, self.held(dst)
        if own > self.free + np.count_nonzero(self.users[before] == 1):
            return False
        shared = self.held(src)[:full]
        self.users[shared] += 1
        self.users[before] -= 1
        pages = [*shared.tolist(), *itertools.islice(self._free_pages(), own)]
        self.users[pages[full:]] = 1
        self._write(dst, 0, pages + [-1] * (len(before) - len(pages)))
        self.publish()
        return True

    def reorder(self, index):
        """Row i holds what row index[i] held."""
        before = self.table.copy()
        self.table[:] = before[index]
        np.add.at(self.users, self.table[self.table >= 0], 1)
        np.subtract.at(self.users, before[before >= 0], 1)
        if self.device != "cpu":
            self._stale += map(tuple, np.argwhere(self.table != before).tolist())
        self.settle(())


def stored_to(inputs):
    """What follows an operator's own tensors as (cache, rows, counts), the cache a _C.KvCache or Pages."""
    flat, (rows, counts, *state) = inputs[:CACHE_PARTS], inputs[CACHE_PARTS:]
    handle, state = _C.KvCache(*flat), [x for x in state if x is not None]
    if not state:
        return handle, rows, counts
    # a NumPy array is sent to the device once pages are taken
    rows, counts = (x.numpy() if x is not None and x.is_cpu else x for x in (rows, counts))
    return Pages(flat, handle, *state), rows, counts


def _append(k, v, *inputs, plan=None):
    cache, rows, counts = stored_to(inputs)
    if isinstance(cache, Pages):
        append(cache, k, v, rows, counts, None, plan)
    else:
        ran(_C.kv_append(cache, k, v, rows, counts, None, plan))


STORING["append"] = StoringOp("Tensor k, Tensor v", "()", _append, lambda *_: None)
