# SPDX-License-Identifier: Apache-2.0
"""Who holds which page of a paged cache. Why all of it lies in arrays: docs/design/015-pages-in-arrays.md; how a change
stays whole where a signal handler cuts it: docs/design/074-changes-that-are-cut.md."""

import itertools
import sys
from threading import get_ident

import numpy as np

from rooftile import _C
from rooftile._calls import at_once, ran
from rooftile._registry import CACHE_PARTS, STORING, StoringOp
from rooftile.errors import ArgumentError, ArgumentTypeError, NotSupportedError, OutOfPagesError
from rooftile.kv_cache import ARRAYS, GROUP, KIVI, append, current_stream, device_of, host, ints, pages_for


class Pages:
    """Hands out the pages of one cache and takes them back.

    users: int32 [num_pages], how many rows hold a page. A row's pages are the entries of its row of the table that are
    not negative; they come first. On the CPU table and lengths are the cache's own arrays. On a GPU they are given: the
    host's copies, int32 [max_rows, max_pages] and [max_rows], which run ahead of the device. Nothing else lasts from
    one call to the next, so an operator in a graph makes a Pages of the tensors that it is handed.

    A change is several steps, between which Python may run a signal handler or a finaliser. So `_pending` says, from
    before the first step to after the last one, who changes the books and what makes them whole should the change be
    cut: (op, the held lock, thread, function, arguments). The function may itself be cut, and called again.
    """

    _pending = None

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

    def begin(self, op, held):
        """A call begins that no other may enter, under the lock `held`; `mend` or `end` ends it."""
        if self._pending is not None:
            self._refuse_or_mend(op)
        self._pending = op, held, get_ident(), None, ()

    def end(self):
        self._pending = None

    def _if_cut(self, function, *arguments):
        """What makes the books whole from now on, in one assignment."""
        self._pending = *self._pending[:3], function, arguments

    def mend(self):
        """Makes the books whole after an exception."""
        if self._pending is not None:
            *_, function, arguments = self._pending
            if function is not None:
                self.here()
                function(*arguments)
                self.publish()
            self._pending = None

    def _refuse_or_mend(self, op):
        """What a call does that finds the change of another one: refuses, where that is still under way."""
        running, held, thread, *_ = self._pending
        if thread == get_ident() and _still_held(held):  # else a fork left the thread behind, or `mend` was cut too
            raise NotSupportedError(
                f"{op}: this cache is in the middle of {running}, which a signal handler or a finaliser (__del__) of "
                f"the same thread interrupts; call {op} after {running} has returned"
            )
        self.mend()

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

    def _write(self, row, i, page):
        """Puts a page, or -1, into the row's place i."""
        if self.device != "cpu":
            self._stale.append((row, i))
        self._table[row, i] = page

    def publish(self):
        """Sends what changed in the table to the GPU, behind the work that is queued there."""
        if not self._stale:
            return
        rows, columns = np.array(list(dict.fromkeys(self._stale)), np.int64).T
        sent = np.stack([rows, columns, self.table[rows, columns]])
        rows, columns, pages = ints("append", "table", sent, self.device)
        self._arrays["block_table"].index_put_((rows, columns), pages.int())
        self._stale = []

    def cut_rows(self, change):
        """change(), which shortens rows; the pages behind their new lengths are given back."""
        self._if_cut(self.settle)
        change()
        self.settle()

    def settle(self):
        """The host's lengths are the device's again, and pages behind them are given back."""
        self._take_lengths()
        keep = -(-self.lengths // self.page_size)
        rows, places = np.nonzero((self.table >= 0) & (np.arange(self.table.shape[1]) >= keep[:, None]))
        if len(rows):
            entries, users = self.table.copy(), self.users.copy()
            freed = entries[rows, places]
            np.subtract.at(users, freed[freed < len(users)], 1)
            entries[rows, places] = -1
            before = self._pending
            self._if_cut(self._put, slice(None), entries, users)
            self._put(slice(None), entries, users)
            self._pending = before
        self.publish()

    def _take_lengths(self):
        if self.device != "cpu":
            self.lengths[:] = host(self._arrays["lengths"])

    def _put(self, rows, entries, users):
        """The books become these: entries of `rows` of the table, and the users of all pages."""
        if self.device != "cpu":
            changed = np.argwhere(self.table[rows] != entries)
            changed[:, 0] = np.arange(len(self.table))[rows][changed[:, 0]]
            self._stale += map(tuple, changed.tolist())
        self.table[rows] = entries
        self.users[:] = users

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
        with self._handle.exclusive(op) as held:
            if self._pending is not None:
                self._refuse_or_mend(op)
            behind, changes, grown = False, [], []
            self._pending = op, held, get_ident(), self._undo, (changes, grown)
            try:
                self.here()
                behind = self.catch_up()
                if behind:
                    self._fault[0] = 0
                self._grow(op, k, rows, counts, changes, grown)
                if changes:
                    copies = [(old, new) for _, _, old, new, _ in changes if old >= 0]
                    if copies:
                        src, dst = np.array(copies, np.int32).T
                        _C.kv_copy_pages(held, src, dst, current_stream(self.device))
                    self.publish()
                if on_gpu:
                    rows, counts = ints(op, "rows", rows, self.device), ints(op, "counts", counts, self.device)
                name = kernel(held, rows, counts)
                if on_gpu:
                    for row, _, tokens in grown:
                        self.lengths[row] += tokens
                self._pending = None
            except BaseException:
                self.mend()
                if behind and self._fault[0] == 0:  # a graph throws away what was settled
                    self._fault[0] = _C.kv_fault_raised
                raise
            return name

    def _grow(self, op, k, rows, counts, changes, grown):
        """Gives every row the pages that its new tokens need, and its own copy of shared pages they would write.

        Arguments that make no sense are left alone here: append refuses them, before it writes, in its own words.
        changes: gets (row, place, page before or -1, page now, users of the page before), each ahead of the change, as
        `_undo` may be called at any time. grown: gets (row, its length, tokens), ahead of its changes.
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
            grown.append((row, begin, tokens))
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
                    changes.append((row, i, page, new, users[page] if page >= 0 else 0))
                    if page >= 0:
                        users[page] -= 1
                    users[new] = 1
                    self._write(row, i, new)

    def _undo(self, changes, grown):
        """After a call that was cut: no row has changed, or all have, as the kernel counts the tokens of all at once.

        A row that a GPU's kernel left alone keeps no page either.
        """
        self._take_lengths()
        if not any(self._lengths[row] == begin + tokens for row, begin, tokens in grown):
            for row, i, old, new, users in reversed(changes):
                self._users[new] = 0
                if old >= 0:
                    self._users[old] = users
                self._write(row, i, old)
        if self.device != "cpu":
            self.settle()

    def share(self, src, dst, full, length, copy_row, *arguments):
        """Row dst holds the first `full` pages of src, and free pages for the rest of `length` tokens.

        copy_row(*arguments), of the binding, copies the tokens of these and all else. Returns False, and changes
        nothing, where there are too few.
        """
        own, before, shared = pages_for(length, self.page_size) - full, self.held(dst), self.held(src)[:full]
        users = self.users.copy()
        users[shared] += 1
        users[before] -= 1
        new = np.flatnonzero(users == 0)[:own]
        if len(new) < own:
            return False
        users[new] = 1
        entries = np.full((1, self.table.shape[1]), -1, np.int32)
        entries[0, : full + own] = *shared, *new
        done, books = [], ([dst], entries, users)
        self._if_cut(self._either, done, books, ([dst], self.table[[dst]], self.users.copy()))
        self._put(*books)
        self.publish()
        at_once(copy_row, [arguments], done)
        if self.device != "cpu":
            self.lengths[dst] = length
        return True

    def _either(self, done, books, before):
        self._put(*(books if done else before))
        self._take_lengths()

    def reorder(self, index, move):
        """Row i holds what row index[i] held. move(done) moves all but the table; `done` as Cache._reorder fills it."""
        done = []
        arguments = done, index, self.table.copy(), self.users.copy()
        self._if_cut(self._reordered, *arguments)
        move(done)
        self._reordered(*arguments)
        self.publish()

    def _reordered(self, done, index, table, users):
        if not done:
            return
        for array, rows, values in done[0] or ():
            array[rows] = values
        self._take_lengths()
        entries, users = table[index], users.copy()
        np.add.at(users, entries[entries >= 0], 1)
        np.subtract.at(users, table[table >= 0], 1)
        self._put(slice(None), entries, users)


def _still_held(lock):
    """Whether a block `with handle.exclusive(op) as lock` has not ended: the binding takes no other one."""
    none = np.empty(0, np.int32)
    try:
        _C.kv_copy_pages(lock, none, none, None)
    except ArgumentTypeError:
        return False
    return True


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
