# SPDX-License-Identifier: Apache-2.0
"""Who holds which page of a paged cache. Why all of it lies in arrays: docs/design/015-pages-in-arrays.md.

A change is computed first and then made in one step, so a signal handler's exception leaves it done or not done:
docs/design/075-changes-in-one-step.md.
"""

import itertools
import sys
from functools import partial
from operator import setitem

import numpy as np

from rooftile import _C
from rooftile._calls import all_or_none, ran, setting_back
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
        """Raises ArgumentError where the table, which others can reach, names a page that is not there, or none for
        tokens that are stored."""
        max_pages = self.table.shape[1]
        lengths = np.where(self.lengths <= max_pages * self.page_size, self.lengths, 0)  # others are refused as such
        stored = np.arange(max_pages) * self.page_size < lengths[:, None]
        bad = np.argwhere((self.table >= len(self.users)) | (stored & (self.table < 0)))
        if len(bad):
            self._refuse_page(op, *bad[0].tolist())

    def _refuse_page(self, op, row, i):
        raise ArgumentError(
            f"{op}: block_table[{row}, {i}] must be a page in [0, {len(self.users)}), got {self._table[row, i]}"
        )

    def _change(self, rows, places, pages, users, of, lengths):
        """(calls, undo) for all_or_none: the table's places get these pages, page p is held by users[p] rows.

        rows, places, pages: one entry for each place. lengths[of] = `lengths` in the host's copy of a GPU's lengths.
        """
        calls, undo = self._change_on_gpu(rows, places, pages, of, lengths)
        if len(rows):
            at, before, held = (rows, places), self.table[rows, places], self.users.copy()
            calls += partial(setitem, self.table, at, pages), partial(setitem, self.users, ..., users)
            undo += partial(setitem, self.table, at, before), partial(setitem, self.users, ..., held)
        return calls, undo

    def _change_on_gpu(self, rows, places, pages, of, lengths):
        """The part of a change that a cache on the CPU does not have; the table's follows the work that is queued."""
        calls, undo = [], []
        if self.device != "cpu":
            before = self.lengths[of].copy()
            calls.append(partial(setitem, self.lengths, of, lengths))
            undo.append(partial(setitem, self.lengths, of, before))
            if len(rows):
                sent = np.array([rows, places, pages, self.table[rows, places]], np.int64)
                *at, pages, before = ints("append", "table", sent, self.device)
                put = self._arrays["block_table"].index_put_
                calls.append(partial(put, at, pages.int()))
                undo.append(partial(put, at, before.int()))
        return calls, undo

    def settle(self):
        """The host's lengths are the device's again, and pages behind them are given back."""
        all_or_none(*self._settling())

    def _settling(self):
        """(calls, undo) of settle."""
        lengths = host(self._arrays["lengths"])
        behind = np.arange(self.table.shape[1]) >= -(-lengths // self.page_size)[:, None]
        rows, places = np.nonzero(behind & (self.table >= 0))
        users, freed = self.users.copy(), self.table[rows, places]
        np.subtract.at(users, freed[freed < len(users)], 1)
        return self._change(rows, places, np.full(len(rows), -1), users, ..., lengths)

    def shorten(self, change, positions):
        """change(), which shortens rows; the pages behind their new lengths are given back.

        positions: the arrays that it writes.
        """
        undo = setting_back(positions)

        def calls():
            change()
            settling, back = self._settling()
            undo.extend(back)
            yield from settling

        all_or_none(calls(), undo)

    def catch_up(self):
        """Settles where any call on the cache raised that an earlier one left a row alone. True: all is well now."""
        if self._fault is None or self._fault[0] != _C.kv_fault_raised:
            return False
        self.settle()
        return self._fault[0] == _C.kv_fault_raised

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
        with self._handle.exclusive(op, True) as held:
            self.here()
            behind = self._fault is not None and self.catch_up()
            changes, users, grown = self._growth(op, k, rows, counts)
            if on_gpu:
                rows, counts = ints(op, "rows", rows, self.device), ints(op, "counts", counts, self.device)
            store, arguments = kernel(held, rows, counts)
            if not changes and not on_gpu:
                return store(*arguments)
            calls, undo = self._growing(held, changes, users, grown)
            calls.append(partial(store, *arguments))
            if behind:
                self._fault[0] = 0
            try:
                return all_or_none(calls, undo)[-1]
            except BaseException:
                if on_gpu:
                    if self._fault is None or self._fault[0] == _C.kv_fault_raised:  # a row did not grow
                        self.settle()
                    elif behind and self._fault[0] == 0:  # a graph throws away what was settled
                        self._fault[0] = _C.kv_fault_raised
                raise

    def _growth(self, op, k, rows, counts):
        """What gives every row the pages that its new tokens need, and its own copy of shared pages they would write.

        Arguments that make no sense are left alone here: append refuses them, before it writes, in its own words.
        Returns [(row, place, page before or -1, page then)], {page: its users then}, {row: its length then}.
        """
        changes, then, grown = [], {}, {}
        max_rows, max_pages = self.table.shape
        _C.check_array(op, "k", k)
        shape = tuple(k.shape)
        for name, array in (("rows", rows), ("counts", counts)):
            if array is not None:
                _C.check_array(op, name, array)
                if tuple(array.shape) != shape[:1] or str(array.dtype) not in ("int32", "torch.int32"):
                    return changes, then, grown
        if len(shape) != 4 or (rows is None and shape[0] > max_rows):
            return changes, then, grown
        try:
            rows = range(shape[0]) if rows is None else host(rows).tolist()
            counts = itertools.repeat(shape[1]) if counts is None else host(counts).tolist()
        except RuntimeError:  # inside a functorch transform
            return changes, then, grown
        page_size, kivi, free = self.page_size, self.format in KIVI, None
        table, lengths, users = self._table, self._lengths, self._users
        for row, tokens in zip(rows, counts, strict=False):
            if not 0 <= row < max_rows or not 0 < tokens <= shape[1] or row in grown:
                continue
            begin = lengths[row]
            end = begin + tokens
            if begin < 0 or end > max_pages * page_size:
                continue
            grown[row] = end
            # a group that closes is written as a whole, an open one not at all
            first, last = (begin // GROUP * GROUP, end // GROUP * GROUP) if kivi else (begin, end)
            written = pages_for(last, page_size) if first < last else 0
            for i in range(first // page_size, pages_for(end, page_size)):
                page = table[row, i]
                if page >= len(users) or (page < 0 and i * page_size < begin):  # a page of stored tokens is there
                    self._refuse_page(op, row, i)
                if page < 0 or (i < written and then.get(page, users[page]) > 1):
                    if free is None:
                        free = iter(np.flatnonzero(self.users == 0).tolist())
                    new = next(free, None)
                    if new is None:
                        raise OutOfPagesError(
                            f"{op}: row {row} needs another page of {page_size} tokens, all {len(users)} are taken"
                        )
                    changes.append((row, i, page, new))
                    if page >= 0:
                        then[page] = then.get(page, users[page]) - 1
                    then[new] = 1
        return changes, then, grown

    def _growing(self, held, changes, users, grown):
        """(calls, undo) of what `_growth` returned."""
        calls, undo = [], []
        if self.device != "cpu":
            rows, places, _, pages = np.array(changes, np.int32).reshape(-1, 4).T
            calls, undo = self._change_on_gpu(rows, places, pages, list(grown), list(grown.values()))
        for row, i, before, page in changes:
            calls.append(partial(setitem, self._table, (row, i), page))
            undo.append(partial(setitem, self._table, (row, i), before))
        for page, rows_of_it in users.items():
            calls.append(partial(setitem, self._users, page, rows_of_it))
            undo.append(partial(setitem, self._users, page, self._users[page]))
        copies = [change[2:] for change in changes if change[2] >= 0]
        if copies:
            src, dst = np.array(copies, np.int32).T
            calls.append(partial(_C.kv_copy_pages, held, src, dst, current_stream(self.device)))
        return calls, undo

    def share(self, src, dst, full, length, copy_row):
        """Row dst holds the first `full` pages of src, and free pages for the rest of `length` tokens.

        copy_row: as all_or_none takes it, copies the tokens of these and all else. Returns False, and changes nothing,
        where there are too few.
        """
        own, shared = pages_for(length, self.page_size) - full, self.held(src)[:full]
        users = self.users.copy()
        users[shared] += 1
        users[self.held(dst)] -= 1
        new = np.flatnonzero(users == 0)[:own]
        if len(new) < own:
            return False
        users[new] = 1
        entries = np.full(self.table.shape[1], -1, np.int32)
        entries[: full + own] = *shared, *new
        places = np.flatnonzero(entries != self.table[dst])
        rows = np.full(len(places), dst)
        calls, undo = self._change(rows, places, entries[places], users, [dst], length)
        all_or_none([*calls, copy_row], undo)
        return True

    def reorder(self, index, move):
        """Row i holds what row index[i] held. move: as all_or_none takes it, moves all but the table."""
        entries, users = self.table[index], self.users.copy()
        np.add.at(users, entries[entries >= 0], 1)
        np.subtract.at(users, self.table[self.table >= 0], 1)
        rows, places = np.nonzero(entries != self.table)
        lengths = host(self._arrays["lengths"])[index]
        calls, undo = self._change(rows, places, entries[rows, places], users, ..., lengths)
        all_or_none([move, *calls], undo)


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
