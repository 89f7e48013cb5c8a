# SPDX-License-Identifier: Apache-2.0
"""Faults written by hand: mistakes that a person makes, and those that tests once did not see."""

import ast
from dataclasses import dataclass

SIMD = "cpp/cpu/simd/"
MERGE = SIMD + "attention_merge.cpp"
DECODE, PREFILL, MATH = SIMD + "attention_decode.cpp", SIMD + "attention_prefill.cpp", SIMD + "attention_math.h"
APPEND = SIMD + "kv_cache.cpp"
W4_ROUND = "cpp/core/w4_round.h"
KV_OPS, ATTENTION_OPS, ROPE_OPS = "cpp/ops/kv_cache.cpp", "cpp/ops/attention.cpp", "cpp/ops/rope.cpp"
PAGES, PAGED, REASONS = (f"python/rooftile/{name}.py" for name in ("kv_pages", "kv_paged", "_reasons"))
CALLS = "python/rooftile/_calls.py"
FETCH, GGUF = "python/rooftile/loaders/fetch.py", "python/rooftile/loaders/gguf_file.py"
SOURCES, CONVERT, WRITER = (f"python/rooftile/checkpoints/{name}.py" for name in ("sources", "convert", "writer"))


@dataclass
class Fault:
    what: str
    file: str
    sound: str  # occurs once: an expression, or a statement that declares nothing
    faulty: str


def is_expression(fault):
    if not fault.file.endswith(".py"):
        return not fault.sound.endswith(";")
    try:
        ast.parse(fault.sound, mode="eval")
    except SyntaxError:
        return False
    return True


FAULTS = [
    Fault("decode forgets the last of ten or more chunks", DECODE, "c < u.chunks", "c < u.chunks - (u.chunks > 9)"),
    Fault("the merge forgets the last of ten or more chunks", DECODE, "c < u.tasks", "c < u.tasks - (u.tasks > 9)"),
    Fault(
        "decode ignores the window from the ninth query on",
        DECODE,
        "window > 0 && position - window + 1 > first_token ? position - window + 1 - first_token : 0",
        "window > 0 && i / group_ < 8 && position - window + 1 > first_token ? position - window + 1 - first_token : 0",
    ),
    Fault(
        "the chunk where a work tile's window begins is the last query's",
        DECODE,
        "u.first_chunk = first / chunk",
        "u.first_chunk = (first + u.real - 1) / chunk",
    ),
    Fault("a raw group ends one query early", DECODE, "row_at(tile_first + tile)", "row_at(tile_first + tile - 1)"),
    Fault("a sink counts for padding", MATH, "p.sinks && real", "p.sinks != nullptr"),
    Fault(
        "all logits -inf: they are subtracted from each other",
        MATH,
        "state.top == minus_infinity ? 0.0f : state.top",
        "state.top",
    ),
    Fault(
        "prefill takes cached values to be finite",
        PREFILL,
        "probe = fma(load(v + t * width_ + d), F32{}, probe)",
        "probe",
    ),
    Fault("prefill takes new values to be finite", PREFILL, "probe = fma(load(v + d), F32{}, probe)", "probe"),
    Fault(
        "a window behind a query that is not causal is one token longer",
        PREFILL,
        "r.last[i] = position + window - 1",
        "r.last[i] = position + window",
    ),
    Fault("a group of zeros of both signs has minimum -0", APPEND, "r.low + 0.0f", "r.low"),
    Fault(
        "a group is encoded from the ring's first half",
        APPEND,
        "first % c_.ring_size * d",
        "first % kv_group * d",
    ),
    Fault("of two sides without keys one is taken", MERGE, "only_a && only_b", "false"),
    Fault(
        "page == pages is a page for an append", KV_OPS, "page >= 0 && page < c.pages", "page >= 0 && page <= c.pages"
    ),
    Fault(
        "page == pages is a page for attention",
        ATTENTION_OPS,
        "page >= 0 && page < cache.pages",
        "page >= 0 && page <= cache.pages",
    ),
    Fault("fork does not check dst's pages", KV_OPS, "check_pages(op, c, dst, begin, length);", ""),
    Fault("fork does not check src's pages", KV_OPS, "check_pages(op, c, src, begin, length);", ""),
    Fault(
        "what the ring has overwritten counts as raw",
        KV_OPS,
        "std::max<std::int64_t>(c.raw_from[row], std::int64_t{c.lengths[row]} - c.ring_size)",
        "std::int64_t{c.raw_from[row]}",
    ),
    Fault(
        "a kivi row is cut by one token too many", KV_OPS, "from - to <= kv_step_back", "from - to <= kv_step_back + 1"
    ),
    Fault("a copied ring forgets where its raw tokens begin", KV_OPS, "c.raw_from[to] = c.raw_from[from];", ""),
    Fault("a saved row forgets where its raw tokens begin", KV_OPS, "c_.raw_from[row] = raw_from_", "c_.raw_from[row]"),
    Fault("rows that others still read are overwritten", KV_OPS, "!done[at(i)] && readers[at(i)] == 0", "!done[at(i)]"),
    Fault("dequantize reads raw tokens that are gone", KV_OPS, "coded >= raw_begin(c, row)", "true"),
    Fault(
        "of several queries after a cut only the last is checked",
        ATTENTION_OPS,
        "length > count ? length - count : 0",
        "length > 1 ? length - 1 : 0",
    ),
    Fault(
        "prefill over a cut row reads raw tokens that are gone",
        ATTENTION_OPS,
        "sequences[b].cached % kv_group",
        "false",
    ),
    Fault("rope reads the row behind cos", ROPE_OPS, "p >= 0 && p < cos.shape[0]", "p >= 0 && p <= cos.shape[0]"),
    Fault("-inf becomes the largest minimum", W4_ROUND, "x != infinity && x != -infinity", "x != infinity"),
    Fault("an error of a task is lost", "cpp/core/parallel.cpp", "error = std::current_exception()", "error"),
    Fault(
        "a loop ends while its tasks run",
        "cpp/core/thread_pool.cpp",
        "(done = done_.load(std::memory_order_acquire)) != count",
        "(done = done_.load(std::memory_order_acquire)) > count",
    ),
    Fault(
        "more threads than asked for take tasks",
        "cpp/core/thread_pool.cpp",
        "i >= tasks || thread >= threads_.load(std::memory_order_relaxed)",
        "i >= tasks",
    ),
    Fault(
        "threads without a task never sleep",
        "cpp/core/thread_pool.cpp",
        "std::chrono::steady_clock::now() < end",
        "true",
    ),
    Fault(
        "three rows share before one copies",
        PAGES,
        "then.get(page, users[page]) > 1",
        "then.get(page, users[page]) > 2",
    ),
    Fault("a change that an exception cuts is not taken back", CALLS, "list(back)", "back"),
    Fault(
        "a signal handler comes between the calls of a change",
        CALLS,
        "map(_call, itertools.chain(calls, [functools.partial(undo.clear)]))",
        "(call() for call in itertools.chain(calls, [functools.partial(undo.clear)]))",
    ),
    Fault("fork keeps the pages that dst had", PAGES, "users[self.held(dst)] -= 1", "pass"),
    Fault(
        "a copy on another device hands out pages that are held",
        PAGED,
        "twin._pages.users[:] = self._pages.here().users",
        "pass",
    ),
    Fault("a ring is made for rows with open groups", PAGED, "length % GROUP", "length % 16"),
    Fault("a layer that shares its weight is rounded", REASONS, "self.holders[parameter] > 1", "False"),
    Fault("a cached download is used unhashed", FETCH, "_sha256(target) == file.sha256", "True"),
    Fault("a count is held against single bytes", GGUF, "n * item_bytes > left", "n > left"),
    Fault(
        "tensors that overlap by a float32 pass",
        GGUF,
        "a.offset + a.nbytes > b.offset",
        "a.offset + a.nbytes > b.offset + 4",
    ),
    Fault("classes that a config names stay in it", SOURCES, 'key == "auto_map"', "False"),
    Fault("a link leads out of the folder", CONVERT, "_inside(file, path)", "True"),
    Fault("what appears at the target is replaced", WRITER, "replace and path.exists()", "path.exists()"),
    Fault("a model that could not be replaced is not put back", WRITER, "old.rename(path)", "None"),
]
