# SPDX-License-Identifier: Apache-2.0
"""Paged KV caches: with an allocator of their own (Kwon et al. 2023, arXiv 2309.06180), or views on a pool."""

from functools import partial

from rooftile import _C
from rooftile._arrays import must_be, shape_of
from rooftile._calls import compiling
from rooftile.errors import ArgumentError, ArgumentTypeError, NotSupportedError, OutOfPagesError
from rooftile.kv_cache import (
    ARRAYS,
    ELEMENT_DTYPES,
    GROUP,
    KIVI,
    Cache,
    atomic,
    check_device,
    check_format,
    device_of,
    dtype_name,
    host,
    integer,
    own_arrays,
    own_ring,
    undivided,
    zeros,
)
from rooftile.kv_pages import Pages


class PagedKVCache(Cache):
    """The keys and values of one layer in pages that rows take as they grow and can share.

    num_pages: pages of the pool. page_size: tokens, 16, 32, 64 or 128; 32 or more in the kivi formats. max_rows: rows.
    max_pages_per_row: default num_pages. format, dtype, device: as KVCache. A page that rows share is copied when one
    of them writes into it. A call that needs more pages than are free raises OutOfPagesError and changes nothing.
    Raises ArgumentError or ArgumentTypeError naming the argument, NotSupportedError for a device without cache kernels.

    On a GPU the host keeps its own table and lengths, so append waits for the device only to read rows or counts that
    are CUDA tensors. While a CUDA graph is captured append is refused, as a replay would take no pages: use a view
    with a table of your own there, or a KVCache.
    """

    _shared = ("lengths", "block_table")

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
        arrays = own_arrays(op, format, dtype, num_pages, page_size, kv_heads, head_dim, max_rows, device, max_pages)
        self.num_pages = num_pages
        super().__init__(op, format, dtype, page_size, kv_heads, head_dim, max_rows, max_pages, arrays)

    def _hold_arrays(self, op, arrays):
        super()._hold_arrays(op, arrays)
        on_host = () if self.device == "cpu" else (arrays["block_table"].cpu(), arrays["lengths"].cpu())
        self._page_state = (zeros((self.num_pages,), "int32"), *on_host)
        self._pages = Pages(self._flat(), self._handle, *self._page_state)

    def _host_lengths(self):
        return self._pages.here().lengths

    @undivided
    def to(self, device):
        """Cache.to; the copy hands out its own pages."""
        twin = super().to(device)
        twin._pages.users[:] = self._pages.here().users
        return twin

    def __getstate__(self):
        with self._handle.exclusive("pickle", True):
            users = self._pages.here().users.copy()
            return super().__getstate__() | {"num_pages": self.num_pages, "users": users}

    def __setstate__(self, state):
        users = state.pop("users")
        super().__setstate__(state)
        self._pages.users[:] = users

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
    @atomic
    def free_pages(self):
        """Pages that no row holds."""
        return self._pages.here().free

    @property
    def block_table(self):
        """int32 [max_rows, max_pages], -1 where a row has no page. Written by this cache alone."""
        return self._arrays["block_table"]

    @property
    @atomic
    def nbytes_used(self):
        """Bytes of the pages that rows hold, a shared page once, and of the raw tokens of open groups."""
        page = self.kv_heads * _C.kv_block_bytes(self.format, self.page_size, self.head_dim)
        raw = sum(self._row_bytes(tokens % GROUP) for tokens in self.lengths) if self.format in KIVI else 0
        return (self.num_pages - self.free_pages) * page + raw

    def _store(self, op, k, rows, counts, kernel):
        return self._pages._store(op, k, rows, counts, kernel)

    @undivided
    def truncate(self, rows, lengths):
        """KVCache.truncate; pages behind the new lengths are given back."""
        pages = self._pages.here()
        pages.check_table("truncate")
        pages.shorten(partial(super().truncate, rows, lengths), self._positions)

    @undivided
    def reset(self, rows=None):
        """KVCache.reset; the rows' pages are given back."""
        pages = self._pages.here()
        pages.check_table("reset")
        pages.shorten(partial(super().reset, rows), self._positions)

    @undivided
    def reorder(self, index):
        """Row i becomes what row index[i] was (beam search). index: [max_rows], a list of ints or an int32 array.

        Pages do not move: rows share them until one writes.
        """
        index = self._host_ints("reorder", "index", index)
        pages = self._pages.here()
        pages.check_table("reorder")
        self._check("reorder", index)
        move = self._reordering(index)
        pages.reorder(host(index), move)

    @undivided
    def fork(self, src, dst):
        """Row dst becomes a copy of row src: full pages are shared, the last, partial one is copied."""
        self._check("fork")
        pages = self._pages.here()
        pages.check_table("fork")
        pages.catch_up()
        src, dst = integer("fork", "src", src), integer("fork", "dst", dst)
        length = self._length("fork", "src", src)
        self._length("fork", "dst", dst)
        if src == dst:
            return
        full = length // self.page_size
        copy_row = partial(_C.kv_copy_row, self._handle, src, dst, full, self._stream())
        if not pages.share(src, dst, full, length, copy_row):
            raise OutOfPagesError(
                f"fork: row {dst} needs a page of {self.page_size} tokens, all {self.num_pages} are taken"
            )


class KVCacheView(Cache):
    """What PagedKVCache.view returns: the methods of a cache on pages that somebody else hands out."""

    def __init__(self, pool, block_table, seq_lens, format, dtype, page_size, head_dim, layout, ring):
        op = "PagedKVCache.view"
        device = device_of(seq_lens)
        dtype = dtype_name(op, check_format(op, format), dtype, device)
        if not isinstance(layout, str) or layout not in ("NHD", "HND"):
            raise ArgumentError(f"{op}: layout {must_be(('NHD', 'HND'), layout)}")
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
                sides = _halves(pool)
            for name, side in zip(("k_pool", "v_pool"), sides, strict=True):
                _shape(op, name, side, 4)
            self._sources, self._layout = (sides if sides is pool else (pool,)), layout
            arrays |= self._sides()
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
        own = {"ring_k", "ring_v", "raw_from"} if ring is None else set()
        if format in ELEMENT_DTYPES:
            own |= {"k_pool", "v_pool"}  # views of _sources, which are asked
        self._shared = tuple(name for name in ARRAYS if name not in own)
        super().__init__(op, format, dtype, page_size, kv_heads, head_dim, max_rows, max_pages, arrays)
        if format in KIVI and ring is None:
            lengths, raw_from = self._positions
            if any(length % GROUP for length in self.lengths):
                raise ArgumentError(
                    f"{op}: ring is needed where a row's length is not a multiple of {GROUP}, "
                    f"got seq_lens {self.lengths}"
                )
            raw_from[:] = lengths

    def _sides(self):
        """K and V in the caller's pool of elements, [pages, page_size, kv_heads, head_dim]."""
        sides = self._sources if len(self._sources) == 2 else _halves(*self._sources)
        sides = sides if self._layout == "NHD" else [side.swapaxes(1, 2) for side in sides]
        return dict(zip(("k_pool", "v_pool"), sides, strict=True))

    def _current_arrays(self):
        """In a graph K and V are views of the pool that it finds when it runs."""
        return self._arrays | self._sides() if self._sources and compiling() else self._arrays

    def __reduce_ex__(self, protocol):
        """NotSupportedError: the pool is the caller's, and may be that of other views too."""
        raise NotSupportedError(
            "PagedKVCache.view: a view is not pickled or deep-copied, its pool belongs to whoever made it; make a view "
            "on copies of pool, block_table, seq_lens and ring, or take .to(device), a copy with memory of its own"
        )

    def __deepcopy__(self, memo):
        self.__reduce_ex__(None)

    def reorder(self, index):
        """Rings and lengths: row i becomes what row index[i] was. The rows of the block table are the engine's to move.

        index: [max_rows], a list of ints or an int32 array.
        """
        self._reorder(index)

    def fork(self, src, dst):
        """Row dst becomes a copy of row src in the pages that its row of the block table names.

        Where both rows name the same page nothing is copied.
        """
        _C.kv_copy_row(self._handle, src, dst, 0, self._stream())


def _halves(pool):
    return pool[:, 0], pool[:, 1]


def _shape(op, name, array, ndim):
    shape = shape_of(array)
    if shape is None:
        raise ArgumentTypeError(
            f"{op}: {name} must be an array that speaks DLPack (torch, NumPy), got {type(array).__name__}"
        )
    if len(shape) != ndim:
        raise ArgumentError(f"{op}: {name} must have {ndim} dimensions, got shape {tuple(shape)}")
    return tuple(shape)
