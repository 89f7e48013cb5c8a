# SPDX-License-Identifier: Apache-2.0
"""Decode attention on a GPU, many thousand times: rows alone and in batches, replays of a graph. Bits are compared on
the device and asked for once a test."""

import bisect

import attention_checks as checks
import cases
import numpy as np
import pytest
import rooftile as rt
import torch

if cases.devices() == ("cpu",):
    pytest.skip("no GPU, or a build without GPU kernels", allow_module_level=True)

stores = pytest.mark.parametrize(("format", "dtype"), checks.GPU_STORES)
HEADS, KV_HEADS = 8, 2
PAIRS, REPLAYS = 20_000, 20_000  # of all cases together, at least


def noise(shape, dtype, generator):
    return torch.randn(shape, generator=generator, device="cuda").to(cases.torch_dtype(dtype))


def seeded(rng):
    return torch.Generator("cuda").manual_seed(int(rng.integers(2**31)))


def bits_differ(a, b):
    """Of each batch entry, whether any bit does."""
    whole = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return (a.view(whole) != b.view(whole)).flatten(1).any(1)


def append_noise(places, length, heads, dim, dtype, generator):
    """The same tokens to one row of several caches. places: (cache, row)."""
    if length:
        k, v = (noise((1, length, heads, dim), dtype, generator) for _ in range(2))
        for cache, row in places:
            cache.append(k, v, rows=[row])


def nan_outputs(q):
    return torch.full_like(q, torch.nan), torch.full(q.shape[:-1], torch.nan, device=q.device)


def attend(q, cache, **options):
    out, lse = nan_outputs(q)
    rt.decode_attention(q, cache, out=out, lse=lse, **options)
    return out, lse


# ---------------------------------------------------------------- the same row, the same bits

# Where a KV split ends and where splits grow; in kivi rows, whose last tokens are raw, up to 32 tokens later.
SPLIT_TOKENS = (256, 3072, 4096, 8192, 16384, 65536)
# Up to how many tokens of capacity small batches are clusters of 2, 4 and 8 CTAs; one more capacity without.
CLUSTERS = (1024, 2048, 4096)
CAPACITIES = (*CLUSTERS, 20032)
LENGTHS = sorted(
    {0, 1, 31, 32, 33, 1000, 20000}
    | {n + more for n in SPLIT_TOKENS for more in (0, 1, 32, 33)}
    | {n + more for n in CLUSTERS for more in (0, 1)}
)
BATCHES = (1, 2, 7, 20, 40, 64, 512)
EVEN = BATCHES[1:-1]  # of rows that are all as long: their work tiles go to CTAs in another way
SHAPES = ((64, 1, 128), (128, 1, 32), (128, 4, 64))  # head_dim, T, page size
COUNTS = {1: (1, 1, 0), 4: (4, 4, 3, 1, 0)}  # real queries of the entries that each row has
GRAPHS = (("capacity 4096", 7), ("shuffled pages", 64))  # caches and batches, each replayed
TIMES = 20


class Pairs:
    """Entries of batches beside the same entries alone."""

    def __init__(self, entries, out, lse):
        self.entries, self.out, self.lse, self.seen = entries, out, lse, []

    def add(self, where, chosen, index, out, lse):
        differ = bits_differ(out, self.out[index]) | bits_differ(lse, self.lse[index])
        self.seen.append((where, chosen, differ))

    def check(self):
        """How many there were, all of them equal."""
        differ = torch.cat([x for *_, x in self.seen]).tolist()
        names = [(where, len(chosen), at, e) for where, chosen, _ in self.seen for at, e in enumerate(chosen)]
        bad = [name for name, wrong in zip(names, differ, strict=True) if wrong]
        if bad:
            where, batch, at, e = bad[0]
            row, length, count = self.entries[e]
            raise AssertionError(
                f"{len(bad)} of {len(differ)} pairs differ, first {where}, entry {at} of {batch}: row {row} of "
                f"{length} tokens, {count} queries"
            )
        return len(differ)


def shuffled_pages(lengths, page, dim, format, dtype, rng):
    """An empty view with pages for rows of these lengths, in random places of a pool full of NaN."""
    held = [-(-length // page) for length in lengths]
    table = np.full((len(lengths), max(held)), -1, np.int32)
    for row, pages in enumerate(np.split(rng.permutation(sum(held)), np.cumsum(held)[:-1])):
        table[row, : len(pages)] = pages
    shape, kind, sizes = (2, page, KV_HEADS, dim), cases.torch_dtype(dtype), {}
    if format not in checks.ELEMENT:
        shape, kind = (KV_HEADS, rt._C.kv_block_bytes(format, page, dim)), torch.uint8
        sizes = {"page_size": page, "head_dim": dim}
    pool = torch.empty((sum(held), *shape), dtype=kind, device="cuda")
    pool.view(torch.uint8).fill_(0xFF)
    table, empty = torch.from_numpy(table).cuda(), torch.zeros(len(lengths), dtype=torch.int32, device="cuda")
    return rt.PagedKVCache.view(pool, table, empty, format=format, dtype=dtype, **sizes)


def on_device(draws):
    return torch.from_numpy(np.concatenate(draws)).cuda().split([len(draw) for draw in draws])


@pytest.mark.parametrize(("dim", "t", "page"), SHAPES)
@stores
def test_a_row_in_a_batch_has_the_bits_it_has_alone(format, dtype, dim, t, page):
    """A row is what it stores, its queries and how many are real. It has them at any place in a batch of any size,
    beside rows of any length and itself, in caches of any capacity and in pages anywhere, called and replayed."""
    rng = cases.generator("many", format, dtype, dim, t)
    generator = seeded(rng)
    lengths = sorted([*LENGTHS, *LENGTHS, *rng.integers(1, 5000, 6).tolist()])
    options = {"format": format, "dtype": dtype, "device": "cuda"}
    caches = {  # each with the first rows, as many as fit
        f"capacity {capacity}": rt.KVCache(bisect.bisect(lengths, capacity), capacity, KV_HEADS, dim, **options)
        for capacity in CAPACITIES
    }
    caches["shuffled pages"] = shuffled_pages(lengths, page, dim, format, dtype, rng)
    entries = [(row, length, count) for row, length in enumerate(lengths) for count in COUNTS[t]]
    row_of, length_of, count_of = np.array(entries, np.int32).T
    q = noise((len(entries), t, HEADS, dim), dtype, generator)
    alone = []
    for row, length in enumerate(lengths):
        own = rt.KVCache(1, max(length, 1), KV_HEADS, dim, **options)
        places = [(own, 0), *((cache, row) for cache in caches.values() if row < cache.max_rows)]
        append_noise(places, length, KV_HEADS, dim, dtype, generator)
        for count in COUNTS[t]:
            e = len(alone)
            alone.append(attend(q[e : e + 1], own, counts=None if count == t else [count]))
    out, lse = (torch.cat(x) for x in zip(*alone, strict=True))
    assert not (out.isnan().any() or lse.isnan().any())

    pairs, expected = Pairs(entries, out, lse), 0
    gpu_rows, gpu_counts = (torch.from_numpy(x.copy()).cuda() for x in (row_of, count_of))
    for name, cache in caches.items():
        here = cache.max_rows * len(COUNTS[t])
        draws = [rng.integers(0, here, batch) for batch in BATCHES for _ in range(2)]
        expected += 2 * sum(BATCHES)
        for length in sorted({*lengths[: cache.max_rows]} - {0}):
            same = np.flatnonzero((length_of == length) & (count_of > 0))
            draws += [rng.choice(same, batch) for batch in EVEN]
            expected += sum(EVEN)
        for chosen, index in zip(draws, on_device(draws), strict=True):
            real = None if (count_of[chosen] == t).all() else gpu_counts[index]
            pairs.add(name, chosen, index, *attend(q[index], cache, rows=gpu_rows[index], counts=real))

    rt.warmup()
    for name, batch in GRAPHS:
        cache, sources = caches[name], (q, gpu_rows, gpu_counts)
        inputs = [x[:batch].clone() for x in sources]
        outputs = nan_outputs(inputs[0])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            rt.decode_attention(inputs[0], cache, rows=inputs[1], counts=inputs[2], out=outputs[0], lse=outputs[1])
        draws = [rng.integers(0, cache.max_rows * len(COUNTS[t]), batch) for _ in range(TIMES)]
        expected += TIMES * batch
        for chosen, index in zip(draws, on_device(draws), strict=True):
            for given, source in zip(inputs, sources, strict=True):
                given.copy_(source[index])
            for x in outputs:
                x.fill_(torch.nan)
            graph.replay()
            pairs.add(f"{name} replayed", chosen, index, *outputs)

    assert pairs.check() == expected
    assert expected * len(checks.GPU_STORES) * len(SHAPES) >= PAIRS


@pytest.mark.parametrize("batch", [32, 40])
@stores
def test_many_work_tiles_of_a_small_batch(format, dtype, batch):
    """Several times as many as the device runs CTAs, most of them whole in one CTA, some shared, some without a key;
    up to 32 rows every CTA counts the work itself."""
    heads, kv_heads, dim = 64, 32, 64
    rng = cases.generator("tiles", format, dtype, batch)
    generator = seeded(rng)
    lengths = [0, 33, *rng.integers(1, 700, batch - 3).tolist(), 0]
    options = {"format": format, "dtype": dtype, "device": "cuda"}
    cache = rt.KVCache(batch, 700, kv_heads, dim, **options)
    q = noise((batch, 1, heads, dim), dtype, generator)
    alone = []
    for row, length in enumerate(lengths):
        own = rt.KVCache(1, max(length, 1), kv_heads, dim, **options)
        append_noise([(own, 0), (cache, row)], length, kv_heads, dim, dtype, generator)
        alone.append(attend(q[row : row + 1], own))
    out, lse = attend(q, cache)
    expected, expected_lse = (torch.cat(x) for x in zip(*alone, strict=True))
    assert not (bits_differ(out, expected) | bits_differ(lse, expected_lse)).nonzero().tolist()


# ---------------------------------------------------------------- replays

PAGED = ((64, 80), (128, 160))  # head_dim, pages of 32 for a row: with room for 2560 tokens clusters, for 5120 a grid


@pytest.mark.parametrize(("dim", "pages"), PAGED)
@stores
def test_every_replay_has_the_bits_of_a_call(format, dtype, dim, pages):
    """Lengths, pages and queries change before each."""
    page, rows = 32, 5
    replays = -(-REPLAYS // (len(checks.GPU_STORES) * len(PAGED)))
    generator = seeded(cases.generator("replays", format, dtype, dim))
    options = {"max_rows": rows, "max_pages_per_row": pages, "format": format, "dtype": dtype, "device": "cuda"}
    cache = rt.PagedKVCache(rows * pages, page, KV_HEADS, dim, **options)
    cache.append(*(noise((rows, pages * page, KV_HEADS, dim), dtype, generator) for _ in range(2)))
    if format in checks.KIVI:  # whatever its ring holds is a row's last group, at any length
        cache._arrays["raw_from"].zero_()
    q = noise((rows, 1, HEADS, dim), dtype, generator)
    out, lse = nan_outputs(q)
    called, called_lse = attend(q, cache)
    rt.warmup()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rt.decode_attention(q, cache, out=out, lse=lse)
    lengths = torch.empty((replays, rows), dtype=torch.int32, device="cuda")
    lengths.random_(0, pages * page + 1, generator=generator)
    differ = torch.zeros(replays, dtype=torch.bool, device="cuda")
    for i in range(replays):
        cache.seq_lens.copy_(lengths[i])
        cache.block_table.copy_(torch.randperm(rows * pages, generator=generator, device="cuda").view(rows, pages))
        q.normal_(generator=generator)
        for x in (out, lse):
            x.fill_(torch.nan)
        graph.replay()
        rt.decode_attention(q, cache, out=called, lse=called_lse)
        differ[i] = (bits_differ(out, called) | bits_differ(lse, called_lse)).any()
    bad = differ.nonzero().flatten().tolist()
    assert not bad, f"{len(bad)} of {replays} replays differ, first number {bad[0]}: lengths {lengths[bad[0]].tolist()}"
