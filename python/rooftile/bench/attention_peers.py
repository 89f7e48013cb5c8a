# SPDX-License-Identifier: Apache-2.0
"""Decode attention of others over the same rows: torch's back ends, FlashInfer and FlashAttention-3."""

import dataclasses
import functools
import inspect

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from rooftile.bench.timing import rotation

_FA3 = "vllm.vllm_flash_attn.flash_attn_interface"
MODULES = {
    "flashinfer": "flashinfer",
    "flashinfer.fp8": "flashinfer",
    "flashinfer.xqa": "flashinfer",
    "flash_attn_3": _FA3,
}
NAMES = ("torch.sdpa.cudnn", "torch.sdpa.flash", "torch.eager", *MODULES)


@dataclasses.dataclass(frozen=True)
class Problem:
    """q [B, T, Hq, D]; tokens of every row; table int32 [B, pages of the longest row]; window: 0 is none."""

    q: torch.Tensor
    tokens: list
    table: torch.Tensor
    page: int
    kv_heads: int
    window: int

    def pages(self):
        """Of every row."""
        return [-(-n // self.page) for n in self.tokens]


@dataclasses.dataclass(frozen=True)
class Pool:
    """k and v [pages, page, Hkv, D] in as many copies as the L2 needs to forget them, and the rows' tables.

    tokens, capacity: how many of the places for tokens hold some.
    """

    copies: list
    l2: str
    table: torch.Tensor
    tokens: int
    capacity: int

    @classmethod
    def of(cls, rows, page, shared):
        """rows: k and v [1, tokens, Hkv, D] of every row. shared: all of them have the first one's pages."""
        held = rows[:1] if shared else rows
        pages = [-(-k.shape[1] // page) for k, _ in held]
        table = torch.zeros(len(rows), max(pages), dtype=torch.int32)
        first = 0
        for b, count in enumerate(pages):
            table[b, :count] = torch.arange(first, first + count)
            first += count
        if shared:
            table[:] = table[0]
        pair = []
        for i in range(2):
            _, _, heads, d = rows[0][i].shape
            pool = rows[0][i].new_zeros(sum(pages), page, heads, d)
            for b, row in enumerate(held):
                begin = int(table[b, 0]) * page
                pool.view(-1, heads, d)[begin : begin + row[i].shape[1]] = row[i][0]
            pair.append(pool)
        count, l2 = rotation(sum(x.nbytes for x in pair))
        copies = [tuple(pair), *(tuple(x.clone() for x in pair) for _ in range(count - 1))]
        tokens = sum(k.shape[1] for k, _ in held)
        return cls(copies, l2, table.to(pair[0].device), tokens, sum(pages) * page)


def visible(tokens, keys, window, device):
    """[tokens, keys]: which keys each of the newest tokens sees."""
    back = torch.arange(keys - tokens, keys, device=device)[:, None] - torch.arange(keys, device=device)
    return (back >= 0) & (back < (window or keys))


def takes(name, problem, plain):
    """Whether a peer is to be asked for this problem. plain: rows of one length, without pages."""
    several = problem.q.shape[1] > 1
    if name.startswith("torch."):
        masked = several and problem.window
        return plain and not (several and name == "torch.sdpa.cudnn") and not (masked and name != "torch.eager")
    if name == "flashinfer.xqa":
        return problem.page == 64 and not several
    if name == "flash_attn_3":  # a build without a head_dim's kernels ends the process when it is asked for them
        return problem.q.shape[3] == 128
    return not (several and problem.window)


def prepare(name, problem, pool):
    """(variant, copies, {kernel: call}, truth): call(copy) is [B, T, Hq, D]; truth(b) is k and v [1, tokens, Hkv, D]
    that the peer's own cache stands for, None where that is the pool's.

    The package is imported here; what it refuses it raises.
    """
    own = {torch.float16: "fp16", torch.bfloat16: "bf16"}[problem.q.dtype]
    if name.startswith("torch."):
        return own, pool.copies, _torch(name, problem), None
    if name == "flash_attn_3":
        return own, pool.copies, _flash_attention_3(problem), None
    if name == "flashinfer.xqa":
        return own, pool.copies, {name: _xqa(problem)}, None
    if name == "flashinfer":
        return own, pool.copies, {name: _flashinfer(problem, problem.q.dtype)}, None
    small = tuple(
        x.to(torch.float8_e4m3fn) for x in pool.copies[0]
    )  # its numbers fit, so no scale of a tensor is needed
    copies = [small, *(tuple(x.clone() for x in small) for _ in range(rotation(sum(x.nbytes for x in small))[0] - 1))]

    def truth(b):
        pages = problem.table[b, : problem.pages()[b]].long()
        return tuple(x[pages].float().reshape(1, -1, *x.shape[2:])[:, : problem.tokens[b]] for x in small)

    return "fp8", copies, {name: _flashinfer(problem, torch.float8_e4m3fn)}, truth


def _torch(name, problem):
    """Of several new tokens flash attention is told that they are the last ones; eager has a mask."""
    (batch, t, heads, d), tokens = problem.q.shape, problem.tokens[0]
    queries, group = problem.q.transpose(1, 2), heads // problem.kv_heads

    def rows(copy):
        return (x.view(batch, tokens, problem.kv_heads, d).transpose(1, 2) for x in copy)

    if name == "torch.eager":
        hidden = ~visible(t, tokens, problem.window, queries.device).repeat(group, 1) if t > 1 else None

        def call(copy):
            k, v = rows(copy)
            scores = queries.reshape(batch, problem.kv_heads, group * t, d) @ k.transpose(-1, -2) * d**-0.5
            if hidden is not None:
                scores = scores.masked_fill(hidden, float("-inf"))
            out = scores.softmax(-1, dtype=torch.float32).to(queries.dtype) @ v
            return out.reshape_as(queries).transpose(1, 2)

        return {name: call}
    backend = SDPBackend.CUDNN_ATTENTION if name == "torch.sdpa.cudnn" else SDPBackend.FLASH_ATTENTION
    causal = {"attn_mask": causal_lower_right(t, tokens)} if t > 1 else {}

    def call(copy):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(queries, *rows(copy), enable_gqa=True, **causal).transpose(1, 2)

    return {name + (" causal_lower_right" if t > 1 else ""): call}


def _starts(counts, device):
    return torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)


def _flashinfer(problem, kv_dtype):
    """Its paged kernels on tensor cores: the decode wrapper for one token, the prefill one for several."""
    import flashinfer

    batch, t, heads, d = problem.q.shape
    device, pages = problem.q.device, problem.pages()
    workspace = torch.empty(512 << 20, dtype=torch.uint8, device=device)
    table = torch.cat([row[:n] for row, n in zip(problem.table, pages, strict=True)])
    last = torch.tensor(
        [n - (p - 1) * problem.page for n, p in zip(problem.tokens, pages, strict=True)], dtype=torch.int32
    )
    shape = _starts(pages, device), table, last.to(device), heads, problem.kv_heads, d, problem.page
    types = {"q_data_type": problem.q.dtype, "kv_data_type": kv_dtype}
    if t == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True, backend="fa2")
        wrapper.plan(*shape, **types)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
        wrapper.plan(_starts([t] * batch, device), *shape, causal=True, **types)
    flat = problem.q.reshape(batch * t, heads, d)
    return lambda copy: wrapper.run(flat, copy).view(batch, t, heads, d)


def _xqa(problem):
    """TensorRT-LLM's decode kernel, as FlashInfer compiles it."""
    from flashinfer.decode import xqa_batch_decode_with_kv_cache

    batch, _, heads, d = problem.q.shape
    workspace = torch.zeros(136 << 20, dtype=torch.uint8, device=problem.q.device)  # semaphores: zero at first
    lengths = torch.tensor(problem.tokens, dtype=torch.int32, device=problem.q.device).view(torch.uint32)
    rest = workspace, problem.table, lengths, max(problem.tokens)
    scales = {"bmm1_scale": d**-0.5, "bmm2_scale": 1.0}
    return lambda copy: xqa_batch_decode_with_kv_cache(problem.q[:, 0], copy, *rest, **scales).view(batch, 1, heads, d)


def _flash_attention_3(problem):
    """vLLM's, over pages; with the work split planned ahead, which saves a small kernel a call, and without."""
    from vllm.vllm_flash_attn import flash_attn_interface as interface

    batch, t, heads, d = problem.q.shape
    device, longest = problem.q.device, max(problem.tokens)
    lengths = torch.tensor(problem.tokens, dtype=torch.int32, device=device)
    window = (problem.window - 1, 0) if problem.window and t > 1 else (-1, -1)
    flat, starts = problem.q.reshape(batch * t, heads, d), _starts([t] * batch, device)
    options = {"seqused_k": lengths, "block_table": problem.table, "causal": True, "window_size": window}
    if "fa_version" in inspect.signature(interface.flash_attn_varlen_func).parameters:
        options["fa_version"] = 3

    def call(copy, **planned):
        out = interface.flash_attn_varlen_func(flat, *copy, t, starts, longest, **options, **planned)
        return out.view(batch, t, heads, d)

    @functools.cache
    def plan():
        sizes = batch, t, longest, heads, problem.kv_heads, d, lengths
        types = {"qkv_dtype": problem.q.dtype, "cu_seqlens_q": starts, "page_size": problem.page}
        return interface.get_scheduler_metadata(*sizes, **types, causal=True, window_size=window)

    return {"flash_attn_3": call, "flash_attn_3 planned": lambda copy: call(copy, scheduler_metadata=plan())}
