# SPDX-License-Identifier: Apache-2.0
"""KV caches in every format of docs/guide/cache-formats.md: contiguous, paged, and views on an engine's own pool.

A cache belongs to one attention layer; `ModelKVCache` is one for every layer of a model. Any number of threads may call
on one cache: each call sees the cache as the calls before it left it (docs/guide/cache-formats.md, Threads).
"""

import copy
import functools
import itertools
import operator
import re
import sys
from array import array as c_array

import numpy as np

from rooftile import _C
from rooftile._arrays import (
    activation_dtype,
    copied,
    numpy_dtype,
    refuse_mask,
    shown,
    torch_of,
)
from rooftile._calls import compiling, needs_torch_stream, on_stream, ran, torch_store
from rooftile.errors import (
    ArgumentError,
    ArgumentTypeError,
    NotSupportedError,
    OutOfMemoryError,
    RooftileError,
)

CONTIGUOUS_PAGE = 64  # tokens; a contiguous cache is a pool whose pages follow each other
KV_FORMATS = _C.kv_formats
GROUP = _C.kv_group  # tokens that become codes together in the kivi formats
RING = _C.kv_ring  # raw tokens a row of a kivi cache keeps

ELEMENT_DTYPES = _C.kv_element_formats  # name: dtype
KIVI = _C.kv_kivi_formats
ARRAYS = (
    "pool",
    "k_pool",
    "v_pool",
    "block_table",
    "lengths",
    "ring_k",
    "ring_v",
    "raw_from",
    "fault",
)


def check_format(op, format):
    _C.check_kv_format(op, format)
    return format


def dtype_name(op, format, dtype, device="cpu"):
    """The dtype of a cache's k and v: the element format's own, else float32 (float16 on a GPU) unless given."""
    if dtype is None:
        name = ELEMENT_DTYPES.get(format, "float32" if device == "cpu" else "float16")
    else:
        name = activation_dtype(op, dtype)
    if device != "cpu" and name == "float32":
        raise NotSupportedError(f"{op}: dtype float32: such caches run on the CPU; on {device} use float16 or bfloat16")
    return name


def check_device(op, device):
    """ "cpu" or "cuda:N" from what a caller gives: None, a name, a torch.device."""
    name = "cpu" if device is None else str(device)
    if re.fullmatch(r"cpu(:\d+)?", name):
        return "cpu"
    backend = _C.gpu_backend()
    if name.split(":")[0] != "cuda" or backend.startswith("none"):
        known = f"cpu{_gpu_names()}"
        raise NotSupportedError(
            f"{op}: device {shown(name)} has no cache kernels in this build of rooftile; it runs: {known}"
        )
    try:
        import torch
    except ImportError:
        raise NotSupportedError(f"{op}: device caches on {name} are made of torch tensors; install torch") from None
    if not torch.cuda.is_available():
        raise NotSupportedError(f"{op}: device {name} is not there, torch finds no GPU; there is: cpu")
    index = name.partition(":")[2] or str(torch.cuda.current_device())
    if not (index.isdecimal() and int(index) < torch.cuda.device_count()):
        raise ArgumentError(f"{op}: device {name} is not there; there are: cpu{_gpu_names()}")
    return f"cuda:{int(index)}"


def _gpu_names():
    if _C.gpu_backend().startswith("none"):
        return ""
    torch = sys.modules.get("torch")
    return "".join(f", cuda:{i}" for i in range(torch.cuda.device_count())) if torch else ", cuda"


def device_of(array):
    """The device of an array as check_device names it; on a GPU caches are made of torch tensors."""
    return str(array.device) if getattr(array, "is_cuda", False) else "cpu"


def integer(op, name, value, at_least=0, bits=31):
    """A Python int from anything that is one exactly."""
    try:
        value = int(operator.index(value))  # True is 1, which indexing would take for a mask
    except TypeError:
        raise ArgumentTypeError(f"{op}: {name} must be an integer, got {type(value).__name__}") from None
    if not at_least <= value < 2**bits:
        raise ArgumentError(f"{op}: {name} must lie in [{at_least}, 2**{bits}), got {shown(value)}")
    return value


def pages_for(tokens, page_size):
    return -(-tokens // page_size)


def zeros(shape, dtype, device="cpu"):
    """torch where it is imported, else NumPy."""
    torch = sys.modules.get("torch")
    if torch is not None:
        return torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
    return np.zeros(shape, numpy_dtype(dtype))


def ints(op, name, values, device="cpu"):
    """A list becomes int32 on the device; for a GPU a NumPy array of integers goes there too.

    Any other array is passed on as it is (the binding takes int32 only).
    """
    if values is None:
        return None
    if not hasattr(values, "__dlpack__"):
        try:
            values = list(values)
            if any(type(value) is not int and is_bool(value) for value in values):
                raise TypeError  # a mask, of which True is not row 1
            values = np.array(c_array("i", values))  # which never narrows, as NumPy below 2 does
        except OverflowError:
            raise ArgumentError(f"{op}: {name} does not fit 32 bits: {shown(values)}") from None
        except TypeError:
            raise ArgumentTypeError(
                f"{op}: {name} must be a list of integers or an int32 array, got {shown(values)}"
            ) from None
    if device != "cpu" and isinstance(values, np.ndarray) and values.dtype in (np.int32, np.int64):
        torch = sys.modules["torch"]
        if torch.cuda.is_current_stream_capturing():  # a replay would copy from memory that is gone
            raise ArgumentError(
                f"{op}: {name} must be an int32 tensor on {device} while a graph is captured, got {values.tolist()}"
            )
        return torch.from_numpy(np.array(values)).to(device, non_blocking=True)
    return values


def is_bool(value):
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")


def host(array):
    """An int32 array as NumPy: the same memory if it lies on the host."""
    if not hasattr(array, "numpy"):
        return np.asarray(array)
    return (array.cpu() if getattr(array, "is_cuda", False) else array).numpy()


def host_ints(op, name, values, most):
    """ints(), as a copy on the host: the call may write the memory of the caller's array, such as the lengths.

    What is no list of at most `most` values stays where it is, before memory is made for it: the binding refuses it.
    """
    if not hasattr(values, "__dlpack__"):
        return ints(op, name, values)
    _C.check_array(op, name, values)
    if values.ndim == 1 and len(values) <= most:
        if getattr(values, "is_cuda", False) is True:
            return values.cpu()
        return copied(values)
    return values


def current_stream(device):
    """The stream of what changes rows: torch's current one, None on the CPU."""
    return None if device == "cpu" else sys.modules["torch"].cuda.current_stream(device).cuda_stream


def append(cache, k, v, rows, counts, stream, plan):
    """Cache.append outside a trace. cache: a Cache, or the Pages of one."""
    if stream is not None and needs_torch_stream(stream, k):
        return on_stream(append, k, locals())
    rows, counts = ints("append", "rows", rows), ints("append", "counts", counts)

    def kernel(cache, rows, counts):
        return _C.kv_append, (cache, k, v, rows, counts, stream, plan)

    ran(cache._store("append", k, rows, counts, kernel))


def check_rows(rows, batch):
    """Raises ArgumentError where `rows` of select, int32 [n] on the host, names a row that is not there. An array that
    repeats one number may have more rows than there is memory for.
    """
    if len(rows) and not 0 <= rows.min() <= rows.max() < batch:
        wrong = next(row for row in rows if not 0 <= row < batch)
        raise ArgumentError(f"select: rows must lie in [0, {batch}), got {wrong}")


def bytes_of(array):
    """A copy of an array's bytes, uint8 in NumPy; the last dimension counts bytes."""
    torch = torch_of(array)
    if torch is not None:
        array = array.detach().clone(memory_format=torch.contiguous_format).view(torch.uint8).cpu().numpy()
    return np.array(array, order="C").view(np.uint8)


def assign(target, source):
    """The same bytes in another array; torch on any device, or NumPy. source: of target's dtype, or bytes_of one."""
    torch = torch_of(target)
    if torch_of(source) is None:  # as bytes: NumPy's bfloat16 is not torch's
        source = np.ascontiguousarray(source).view(np.uint8)
        if torch is None:
            source = source.view(target.dtype)
        else:
            target, source = target.view(torch.uint8), torch.from_numpy(source)
    target[:] = source


def atomic(method, undivided=False):
    """The method under the lock of the cache's pool: what other threads call comes before it or after it.

    undivided: another such call that a signal handler or finaliser begins in the middle of it is refused.
    """
    op = method.__name__.lstrip("_")

    @functools.wraps(method)
    def call(self, *args, **options):
        with self._handle.exclusive(op, undivided):
            return method(self, *args, **options)

    return call


undivided = functools.partial(atomic, undivided=True)


def row_bytes(format, dtype, page_size, kv_heads, head_dim, tokens):
    """Bytes that the tokens of one row need: codes, scales and minima of encoded tokens, the elements of raw ones."""
    raw = tokens % GROUP if format in KIVI else 0
    block = _C.kv_block_bytes(format, page_size, head_dim)
    element = 4 if dtype == "float32" else 2
    return kv_heads * ((tokens - raw) * block // page_size + raw * 2 * head_dim * element)


class Cache:
    """What contiguous, paged and viewed caches have in common."""

    _page_state = ()  # what an operator that stores is given besides _flat(): Pages.__init__
    _shared = ("lengths",)  # names of the arrays that others can reach, whose memory torch may therefore move
    _sources = ()  # the caller's arrays of which those of a view are views in turn

    def __init__(self, op, format, dtype, page_size, kv_heads, head_dim, max_rows, max_pages, arrays):
        self.format = format
        self.dtype = dtype
        self.page_size = page_size
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.max_rows = max_rows
        self.max_pages = max_pages
        self._hold_arrays(op, arrays)

    def _hold_arrays(self, op, arrays):
        self.device = device_of(arrays["lengths"])
        if self.device != "cpu":  # kernels report here what the host could not check
            torch = sys.modules["torch"]
            arrays["fault"] = torch.zeros(1, dtype=torch.int32, device="cpu").pin_memory()
        self._arrays = arrays
        self._handle = _C.KvCache(*self._flat(), op, self._shared, self._sources)

    @property
    def _positions(self):
        """What truncate changes: lengths, and where raw tokens begin. On the CPU NumPy arrays over the same memory."""
        arrays = [self._arrays[name] for name in ("lengths", "raw_from") if name in self._arrays]
        return arrays if self.device != "cpu" else [host(array) for array in arrays]

    def _host_lengths(self):
        """The lengths where single ones are read: on the host, if it knows them without asking a device."""
        return self._positions[0]

    def _flat(self):
        """The cache as plain values and arrays, as _C.KvCache and torch.ops.rooftile.decode_attention take it."""
        shape = (self.page_size, self.head_dim, self.kv_heads, self.max_rows, self.max_pages)
        arrays = self._current_arrays()
        return self.format, self.dtype, *shape, *(arrays.get(name) for name in ARRAYS)

    def _current_arrays(self):
        return self._arrays

    @property
    def capacity(self):
        """Tokens a row can hold."""
        return self.max_pages * self.page_size

    @property
    @atomic
    def lengths(self):
        """Tokens stored in every row: a list of `max_rows` ints. On a GPU this waits for the work before it."""
        return self._positions[0].tolist()

    @property
    def seq_lens(self):
        """int32 [max_rows], the lengths as the kernels read them."""
        return self._arrays["lengths"]

    @property
    def nbytes(self):
        """Bytes allocated: pool, rings, block table and lengths."""
        return sum(array.nbytes for name, array in self._arrays.items() if name != "fault")

    @property
    def nbytes_used(self):
        """Bytes the stored tokens need: codes, scales and minima of encoded tokens, the elements of raw ones."""
        return sum(self._row_bytes(tokens) for tokens in self.lengths)

    def _row_bytes(self, tokens):
        return row_bytes(self.format, self.dtype, self.page_size, self.kv_heads, self.head_dim, tokens)

    def append(self, k, v, *, rows=None, counts=None, stream=None, plan=None):
        """Stores new tokens behind those that are there.

        k, v: [batch, tokens, kv_heads, head_dim] in the cache's dtype, any strides. Entry b goes to cache row rows[b]
        (row b without `rows`) and stores its first counts[b] tokens (all without `counts`; 0 for a padding row, of
        which nothing is stored). rows, counts: [batch], lists of ints or int32 arrays. A row is written once a call.
        All arguments are checked, and pages taken, before anything is written: after an error the cache is as it was.
        stream: a CUDA stream's handle, default the framework's current stream. plan: what `rt.explain` returned, or a
        plan's text: a CPU kernel variant, or on a GPU a plan that fits the call.
        Raises ArgumentError, ArgumentTypeError, or OutOfPagesError.
        Under torch.compile rows and counts are int32 tensors; a PagedKVCache takes them on the host.
        """
        if compiling():
            torch_store("append", (k, v), self, rows, counts, stream, plan)
        else:
            append(self, k, v, rows, counts, stream, plan)

    def _store(self, op, k, rows, counts, kernel):
        """What kernel(cache, rows, counts) gives is called: a function of the binding, its arguments.

        The kernel is given the cache as bindings take it and the others where kernels read them.
        The rows have the memory that appending k takes; an error of the kernel gives it back. op: whose name errors
        begin with.
        """
        device = self.device
        function, arguments = kernel(self._handle, ints(op, "rows", rows, device), ints(op, "counts", counts, device))
        return function(*arguments)

    def truncate(self, rows, lengths):
        """Cuts rows[i] to its first lengths[i] tokens. rows, lengths: lists of ints or int32 arrays of one size.

        Per-token and element formats take any length up to the stored one. The kivi formats take any multiple of 32,
        or up to 16 tokens back: only those raw values are still there. Anything else is an ArgumentError, and no row
        is cut.
        """
        rows, lengths = self._host_ints("truncate", "rows", rows), self._host_ints("truncate", "lengths", lengths)
        _C.kv_truncate(self._handle, rows, lengths, self._stream())

    def _host_ints(self, op, name, values):
        return host_ints(op, name, values, self.max_rows)

    def _check(self, op, index=None):
        """Waits for the work before it and raises what a kernel found wrong there, in the name of `op`.

        Before a change of several steps, of which none is done then. index: as reorder takes it, refused like there.
        """
        _C.kv_check(op, self._handle, index, self._stream())

    @atomic
    def _reorder(self, index):
        """Row i of all that belongs to the rows becomes what row index[i] was: pages too where no table names them."""
        self._reordering(self._host_ints("reorder", "index", index))()

    def _reordering(self, index):
        """_reorder as a function in C without arguments: no signal handler runs inside. index: on the host."""
        tabled = "block_table" in self._arrays
        if index is None:
            raise ArgumentTypeError("reorder: index must be a list of integers or an int32 array, got None")
        if self.device == "cpu":
            return functools.partial(_C.kv_reorder, self._handle, index, not tabled, None)
        self._check("reorder", index)
        moved = [(row, source) for row, source in enumerate(host(index).tolist()) if row != source]
        if not moved:
            return functools.partial(list)
        lengths = self.lengths
        pages = 0 if tabled else pages_for(max(lengths[source] for _, source in moved), self.page_size)
        rows, sources = map(itertools.repeat, sys.modules["torch"].tensor(moved, device=self.device).T)
        arrays = list(self._row_arrays(pages).values())
        # array[rows] = array[sources], for one array after another
        moves = map(operator.setitem, arrays, rows, map(operator.getitem, arrays, sources))
        return functools.partial(list, moves)

    def _row_arrays(self, pages):
        """name -> array of which row i belongs to row i: of a pool without a table the rows' first `pages` pages."""
        arrays = {name: x for name, x in self._arrays.items() if name not in ("fault", "block_table")}
        for name in ("pool", "k_pool", "v_pool"):
            if name in arrays:
                pool = arrays.pop(name)
                if pages:
                    arrays[name] = pool.reshape(self.max_rows, self.max_pages, *pool.shape[1:])[:, :pages]
        return arrays

    def _stream(self):
        return current_stream(self.device)

    @atomic
    def to(self, device):
        """A copy of the cache with the same bytes on `device` ("cpu", "cuda", "cuda:1", a torch.device).

        The copy has memory of its own; of a view's pool it has the rows' table and every page.
        """
        device = check_device("to", device)
        dtype_name("to", self.format, self.dtype, device)
        twin = copy.copy(self)
        twin._hold_copies("to", self._arrays, device)
        return twin

    def _hold_copies(self, op, sources, device):
        """Takes memory of its own on `device`. sources: name -> array of the bytes to be there."""
        pages = next(sources[name].shape[0] for name in ("pool", "k_pool") if name in sources)
        shape = (self.page_size, self.kv_heads, self.head_dim, self.max_rows)
        arrays = own_arrays(op, self.format, self.dtype, pages, *shape, device)
        if "block_table" in sources:
            arrays["block_table"] = zeros((self.max_rows, self.max_pages), "int32", device)
        for name, array in arrays.items():
            assign(array, sources[name])
        self._sources = ()
        self._hold_arrays(op, arrays)

    def __getstate__(self):
        """What a pickle holds: the bytes of all arrays, so that whoever reads it has memory of its own."""
        facts = ("format", "dtype", "page_size", "kv_heads", "head_dim", "max_rows", "max_pages", "device")
        with self._handle.exclusive("pickle"):
            arrays = {name: bytes_of(array) for name, array in self._arrays.items() if name != "fault"}
        return {name: getattr(self, name) for name in facts} | {"arrays": arrays}

    def __setstate__(self, state):
        arrays, device = state.pop("arrays"), check_device(type(self).__name__, state.pop("device"))
        self.__dict__.update(state)
        self._hold_copies(type(self).__name__, arrays, device)

    def __deepcopy__(self, memo):
        return self.to(self.device)

    def __copy__(self):
        """The same memory."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin

    def reset(self, rows=None):
        """Empties the given rows (a list of ints or an int32 array), or all. ArgumentError for a row not there."""
        _C.kv_reset(self._handle, self._host_ints("reset", "rows", rows), self._stream())

    @atomic
    def dequantize(self, row=None, at=None):
        """K and V as the query at position `at` sees them, in float32.

        The kivi formats show such a query the groups that were full before `at` as codes, and its own group raw.
        row: one row -> k, v [tokens, kv_heads, head_dim]. Without it all rows -> [max_rows, longest, kv_heads,
        head_dim], zeros past a row's tokens. `at` (an int) defaults to each row's newest token; a row's length stands
        for the token to come. Raises ArgumentError where a kivi cache was truncated so that raw values are gone.
        """
        if self.device != "cpu":
            return tuple(x.to(self.device) for x in self.to("cpu").dequantize(row, at))
        if row is not None:
            length = self._length("dequantize", "row", row)
            at = max(length - 1, 0) if at is None else integer("dequantize", "at", at)
            return self._dequantize_row("dequantize", row, at, length)
        at = None if at is None else integer("dequantize", "at", at)
        lengths = [self._length("dequantize", "row", r) for r in range(self.max_rows)]
        ends = [max(length - 1, 0) if at is None else at for length in lengths]
        tokens = [min(end + 1, length) for end, length in zip(ends, lengths, strict=True)]
        shape = (self.max_rows, max(tokens, default=0), self.kv_heads, self.head_dim)
        k, v = zeros(shape, "float32"), zeros(shape, "float32")
        for r, (end, n) in enumerate(zip(ends, tokens, strict=True)):
            _C.kv_dequantize("dequantize", self._handle, r, end, k[r, :n], v[r, :n])
        return k, v

    def _dequantize_row(self, op, row, at, length):
        tokens = min(at + 1, length)
        k, v = (zeros((tokens, self.kv_heads, self.head_dim), "float32") for _ in range(2))
        _C.kv_dequantize(op, self._handle, row, at, k, v)
        return k, v

    def _length(self, op, name, row):
        row = integer(op, name, row)
        if row >= self.max_rows:
            raise ArgumentError(f"{op}: {name} must lie in [0, {self.max_rows}), got {row}")
        length = self._host_lengths()[row].item()
        if not 0 <= length <= self.capacity:  # an engine may share the array; before memory is made for so many
            raise ArgumentError(f"{op}: cache lengths[{row}] must lie in [0, {self.capacity}], got {length}")
        return length

    @atomic
    def dump(self, row):
        """What a row stores, in logical order: a dict.

        "length"; of quantised formats "k_codes", "v_codes" int8 [tokens, kv_heads, head_dim] (of fp8 uint8, the bits of
        torch.float8_e4m3fn) and, in float32, "k_scale", "v_scale" (and "k_min", "v_min" of int4-kivi): [tokens,
        kv_heads, 1], or [groups, kv_heads, head_dim] for K of the kivi formats. "k_raw", "v_raw" [tokens, kv_heads,
        head_dim] in float32: the tokens kept as elements, all of them in an element format, the open group in a kivi
        format (absent from the others).
        """
        if self.device != "cpu":
            facts = self.to("cpu").dump(row)
            return {name: x if name == "length" else x.to(self.device) for name, x in facts.items()}
        length = self._length("dump", "row", row)
        facts = {"length": length}
        kivi, heads, dim = self.format in KIVI, self.kv_heads, self.head_dim
        coded = length // GROUP * GROUP if kivi else length
        if self.format not in ELEMENT_DTYPES:
            kind = "uint8" if _C.kv_code_formats.get(self.format) == "e4m3" else "int8"
            facts["k_codes"], facts["v_codes"] = (zeros((coded, heads, dim), kind) for _ in range(2))
            _C.kv_dump_codes(self._handle, row, facts["k_codes"], facts["v_codes"])
            for side, shape in (
                ("k", (coded // GROUP, heads, dim) if kivi else (coded, heads, 1)),
                ("v", (coded, heads, 1)),
            ):
                for kind in ("scale", "min")[: 2 if self.format in _C.kv_minima_formats else 1]:
                    facts[f"{side}_{kind}"] = zeros(shape, "float32")
                    _C.kv_dump_scales(self._handle, row, side == "v", kind == "min", facts[f"{side}_{kind}"])
        if kivi or self.format in ELEMENT_DTYPES:
            k, v = self._dequantize_row("dump", row, length, length)
            raw = coded if kivi else 0
            facts["k_raw"], facts["v_raw"] = k[raw:], v[raw:]
        return facts

    def __repr__(self):
        return (
            f"{type(self).__name__}(format={self.format!r}, dtype={self.dtype!r}, max_rows={self.max_rows}, "
            f"capacity={self.capacity}, page_size={self.page_size}, kv_heads={self.kv_heads}, head_dim={self.head_dim}"
            + (")" if self.device == "cpu" else f", device={self.device!r})")
        )


def own_arrays(op, format, dtype, pages, page_size, kv_heads, head_dim, max_rows, device="cpu", table_pages=None):
    """Zeroed memory of a cache, with a block table of `table_pages` a row if given, all -1. Raises OutOfMemoryError
    where there is not as much."""
    try:
        arrays = _own_arrays(op, format, dtype, pages, page_size, kv_heads, head_dim, max_rows, device)
        if table_pages is not None:
            arrays["block_table"] = zeros((max_rows, table_pages), "int32", device)
            arrays["block_table"][:] = -1
        return arrays
    except RooftileError:
        raise
    except (RuntimeError, MemoryError, TypeError, ValueError) as e:  # the last two are overflows of a size
        raise OutOfMemoryError(
            f"{op}: no memory on {device} for {max_rows} rows and {pages} pages: page_size {page_size}, "
            f"kv_heads {kv_heads}, head_dim {head_dim} ({str(e).partition(chr(10))[0]})"
        ) from e


def _own_arrays(op, format, dtype, pages, page_size, kv_heads, head_dim, max_rows, device):
    arrays = {
        "lengths": zeros((max_rows,), "int32", device),
        **own_ring(format, dtype, kv_heads, head_dim, max_rows, device),
    }
    if format in ELEMENT_DTYPES:
        pool = zeros((pages, kv_heads, 2, page_size, head_dim), dtype, device)
        arrays["k_pool"], arrays["v_pool"] = (pool[:, :, side].swapaxes(1, 2) for side in range(2))
    else:
        block = _C.kv_block_bytes(format, page_size, head_dim, op)
        arrays["pool"] = zeros((pages, kv_heads, block), "uint8", device)
    return arrays


def own_ring(format, dtype, kv_heads, head_dim, max_rows, device="cpu"):
    if format not in KIVI:
        return {}
    shape = (max_rows, kv_heads, RING, head_dim)
    return {
        "ring_k": zeros(shape, dtype, device),
        "ring_v": zeros(shape, dtype, device),
        "raw_from": zeros((max_rows,), "int32", device),
    }


class KVCache(Cache):
    """The keys and values of one layer, a fixed room for every row.

    batch: rows. capacity: tokens a row can hold, rounded up to whole pages of 64. format: one of KV_FORMATS, such as
    "int4-kivi" (Liu et al. 2024, arXiv 2402.02750), "int8" or "fp16". dtype: of k and v, "float32", "float16",
    "bfloat16" or the torch dtype of that name; default the element format's own, for the quantised formats
    float32, on a GPU float16. device: "cpu" (default), "cuda", "cuda:1" or a torch.device; `cache.device` names it.
    Memory is torch's where torch is imported, else NumPy's; on a GPU always torch's. Raises ArgumentError or
    ArgumentTypeError naming the argument, NotSupportedError for a device without cache kernels.
    """

    def __init__(
        self,
        batch,
        capacity,
        kv_heads,
        head_dim,
        *,
        format="int4-kivi",
        dtype=None,
        device=None,
    ):
        op = "KVCache"
        device = check_device(op, device)
        dtype = dtype_name(op, check_format(op, format), dtype, device)
        batch, capacity = integer(op, "batch", batch), integer(op, "capacity", capacity)
        kv_heads, head_dim = integer(op, "kv_heads", kv_heads, 1), integer(op, "head_dim", head_dim, 1)
        pages = pages_for(capacity, CONTIGUOUS_PAGE)
        arrays = own_arrays(op, format, dtype, batch * pages, CONTIGUOUS_PAGE, kv_heads, head_dim, batch, device)
        super().__init__(op, format, dtype, CONTIGUOUS_PAGE, kv_heads, head_dim, batch, pages, arrays)

    @property
    def batch(self):
        return self.max_rows

    def reorder(self, index):
        """Row i becomes what row index[i] was (beam search). index: [batch], a list of ints or an int32 array.

        Raises ArgumentError for another number of rows or a row that is not there, and moves none.
        """
        self._reorder(index)

    def fork(self, src, dst):
        """Row dst becomes a copy of row src. Raises ArgumentError for a row that is not there."""
        _C.kv_copy_row(self._handle, src, dst, 0, self._stream())

    @atomic
    def select(self, rows=None, *, capacity=None):
        """A new cache whose row i is a copy of row rows[i], bit for bit; all rows in order without `rows`.

        rows: list of ints or an int32 array, repeats allowed. capacity: of the new cache, default this one's.
        Raises ArgumentError for a row that is not there or does not fit.
        """
        refuse_mask("select", "rows", rows)
        if hasattr(rows, "__dlpack__"):
            _C.check_array("select", "rows", rows)
        rows = np.arange(self.batch, dtype=np.int32) if rows is None else host(ints("select", "rows", rows))
        if rows.dtype != np.int32 or rows.ndim != 1:
            raise ArgumentTypeError(
                f"select: rows must be a list of integers or an int32 array, got {rows.dtype}{list(rows.shape)}"
            )
        check_rows(rows, self.batch)
        capacity = self.capacity if capacity is None else integer("select", "capacity", capacity)
        shape = (len(rows), capacity, self.kv_heads, self.head_dim)
        chosen = KVCache(*shape, format=self.format, dtype=self.dtype, device=self.device)
        rows, lengths = rows.tolist(), self.lengths
        longest = max((lengths[row] for row in rows), default=0)
        if longest > chosen.capacity:
            raise ArgumentError(f"select: capacity {capacity} is less than the {longest} tokens that a row holds")
        pages = pages_for(longest, CONTIGUOUS_PAGE)
        targets = chosen._row_arrays(pages)
        for name, source in self._row_arrays(pages).items():
            targets[name][:] = source[rows]
        return chosen

    def __deepcopy__(self, memo):
        return self.select()
