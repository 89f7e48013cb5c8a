# SPDX-License-Identifier: Apache-2.0
"""Faults to plant in the GPU kernels. Each is compiled alone, and linked with all else as it is."""

import glob
import json
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import forks
import instrumented
import places

DECODE, FUSED, KV_CACHE, GEMM = (f"cpp/kernels/{family}/" for family in ("decode", "fused", "kv_cache", "gemm"))
INSTANCES = "build/cuda/cpp/kernels/instances/"  # sources that CMake writes (cpp/kernels/CMakeLists.txt)


@dataclass
class Fault:
    what: str
    file: str
    sound: str  # occurs once
    faulty: str
    sources: str = ""  # the .cu or .cpp files that are compiled with the fault, a pattern; default: see SOURCES
    first: str = ""  # test functions, spaces between: expected to see the fault, they run before the others


FAULTS = {
    "mask_end": Fault(
        "a row's end is one token late",
        DECODE + "logits.cuh",
        "if (at < v.begin[i & 1] || at >= v.end[i & 1]) s[mt][i] = -INFINITY;",
        "if (at < v.begin[i & 1] || at > v.end[i & 1]) s[mt][i] = -INFINITY;",
    ),
    "window_begin": Fault(
        "a window begins one token early",
        DECODE + "queries.cuh",
        "position >= p.window ? position + 1 - p.window : 0",
        "position >= p.window ? position - p.window : 0",
        first="test_options test_a_window_of_many_queries",
    ),
    "swizzle_signs": Fault(
        "a swizzle's strides are added where they are to be subtracted",
        DECODE + "smem_layouts.cuh",
        "(own_ & bit) != 0 ? -bit : bit",
        "bit",
        INSTANCES + "decode_bits16_up_to_128.cu",
    ),
    "tree_factors": Fault(
        "partials are added without their maxima's factors",
        DECODE + "tree_reduction.cuh",
        "{0.0f, factors.x, factors.y}",
        "{0.0f, 1.0f, 1.0f}",
    ),
    "merge_sums": Fault(
        "sums of weights keep their own maximum at the end of a KV split",
        DECODE + "warp_softmax.cuh",
        "make_float2(l[0] * weight[0], l[1] * weight[1])",
        "make_float2(l[0], l[1])",
    ),
    "second_page": Fault(
        "a tile's second page is taken to be its first",
        DECODE + "pages.cuh",
        "return {first, crosses ? at(index + 1) : first};",
        "return {first, crosses ? first : first};",
    ),
    "page_check": Fault(
        "a tile's second page is not checked",
        DECODE + "pages.cuh",
        "static_cast<unsigned>(at.first) < pages && static_cast<unsigned>(at.second) < pages",
        "static_cast<unsigned>(at.first) < pages",
    ),
    "raw_last": Fault(
        "the values of a kivi row's last raw token are left out",
        DECODE + "raw_tokens.cuh",
        "[from = begin - token, to = end - token](int i)",
        "[from = begin - token, to = end - token - half % 2](int i)",
        INSTANCES + "decode_int4_kivi_[ua]*",
    ),
    "channel_zero_point": Fault(
        "8-bit codes with a scale per channel keep their zero point",
        DECODE + "code_scores.cuh",
        "const float group_factor = factor[n][i & 1] * group.scale;",
        "const float group_factor = factor[n][i & 1] * group.scale;\n        zp_correction[n][i & 1] = 0;",
        INSTANCES + "decode_int8_kivi_sym_*",
    ),
    "channel_scales": Fault(
        "8-bit codes of four words take the scales of the first word's channels",
        DECODE + "code_scores.cuh",
        "(x.k_scale() + channel + 4 * w);",
        "(x.k_scale() + channel);",
        INSTANCES + "decode_int8_kivi_sym_*",
    ),
    "append_channel_bytes": Fault(
        "8-bit V codes of the slice's tokens past the fourth go to the first four's place",
        KV_CACHE + "encode.cuh",
        "channel_codes[i * channel_words / append_slice_tokens][j] |=",
        "channel_codes[0][j] |=",
    ),
    "divisor": Fault(
        "the reciprocal of 5 is wrong",
        "cpp/core/divisor.h",
        "    shift = bits - 1;",
        "    shift = bits - 1 + (b == 5);",
        first="test_any_ratio_of_heads",
    ),
    # a race that takes a warp as long as a load from memory to lose: racecheck sees it, no result does
    "queries_sync": Fault(
        "queries may arrive before the previous tile range's partials have been read",
        DECODE + "split_kv.cuh",
        "__syncthreads(); constexpr int gmem_floats",
        "constexpr int gmem_floats",
        first="test_a_row_in_a_batch_has_the_bits_it_has_alone test_every_replay_has_the_bits_of_a_call",
    ),
    "wait_group": Fault(
        "a tile is read before its copies are waited for",
        DECODE + "kv_ring.cuh",
        "cute::cp_async_wait<stages - 1>(); sync();",
        "cute::cp_async_wait<stages>(); sync();",
    ),
    "pv_masked": Fault(
        "a weight of 0 meets a NaN of a later token",
        DECODE + "mainloop.cuh",
        "if (p_.tokens == 1 || see.all(first, 16))",
        "if (p_.tokens >= 1 || see.all(first, 16))",
        INSTANCES + "decode_[fb]*16_*",
        first="test_what_a_later_token_holds_does_not_reach_an_earlier_query",
    ),
    "o_scale_growth": Fault(
        "sums are not rescaled when the output scale grows",
        DECODE + "warp_softmax.cuh",
        "change = grows ? state_.o_scale * inverse_pow2(o_scale) : 1.0f;",
        "change = 1.0f;",
    ),
    "step_barrier": Fault(
        "16 packed rows: K is read before all threads' copies have arrived",
        DECODE + "kv_ring.cuh",
        "__syncthreads(); load_v(read_stage_ + stages - 1",
        "load_v(read_stage_ + stages - 1",
    ),
    "cluster_last": Fault(
        "a cluster forgets the last of sixteen KV splits",
        DECODE + "cluster_reduction.cuh",
        "return split < w.splits ? ml : make_float2(-INFINITY, 0.0f);",
        "return split < w.splits - (w.splits == 16) ? ml : make_float2(-INFINITY, 0.0f);",
    ),
    "append_slot": Fault(
        "scales of tokens behind the 64th of a page go elsewhere",
        KV_CACHE + "encode.cuh",
        "w.template section<T>(plane, plane.scale, page, head)[offset] = ",
        "w.template section<T>(plane, plane.scale, page, head)[offset & 63] = ",
    ),
    "tile_zero": Fault(
        "row g + 8 is decoded with row g's zero",
        GEMM + "wgmma_codes_mainloop.cuh",
        "Decode::set_zeros(rZero_, sZeros_(0, reader_.group(k_block)), sZeros_(1,",
        "Decode::set_zeros(rZero_, sZeros_(0, reader_.group(k_block)), sZeros_(0,",
    ),
    "tile_second_sum": Fault(
        "groups of 64: the second sum of a step is scaled with the first group's scale",
        GEMM + "wgmma_codes_mainloop.cuh",
        "scale_pair(scales[s])",
        "scale_pair(scales[0])",
    ),
    "tile_scale": Fault(
        "row g + 8 is scaled with row g's scale",
        GEMM + "wgmma_codes_mainloop.cuh",
        "fmaf(i / 2 % 2 == 0 ? scale.x : scale.y,",
        "fmaf(scale.x,",
    ),
    "tile_tail": Fault(
        "a scale block past the end of K is scaled with what lies there",
        GEMM + "code_loader.cuh",
        ".with(groups_left_ > 0)",
        ".with(true)",
    ),
    "tile_parity": Fault(
        "a stage is read before its bytes have come, every other time round",
        GEMM + "wgmma_codes_mainloop.cuh",
        "tile::wait_barrier(smem_.full[stage], state_.phase());",
        "tile::wait_barrier(smem_.full[stage], 0);",
    ),
    "tile_half": Fault(
        "both CTAs of a cluster load the first half of the tokens",
        GEMM + "wgmma_codes_producer.cuh",
        "tma_partition(atom, cta_rank_, ctas,",
        "tma_partition(atom, 0, ctas,",
    ),
    "tile_next": Fault(
        "the next work tile gets the codes behind this one's",
        GEMM + "wgmma_codes_producer.cuh",
        "    work = scheduler.next();\n    codes = loader_of(work);\n",
        "    work = scheduler.next();\n",
    ),
    "tile_end": Fault(
        "a CTA may exit before its peer's last multicast write and arrival have landed",
        GEMM + "wgmma_codes_producer.cuh",
        "for (int i = 0; i < Traits::stages; ++i, ++state)",
        "for (int i = Traits::stages; i < Traits::stages; ++i, ++state)",
    ),
    "stream_k_wait": Fault(
        "fix-up sums are read before they are written",
        GEMM + "wgmma_codes_scheduler.cuh",
        "  if (threadIdx.x % 32 == 0) tile::wait_semaphore(params.semaphores + cta, params.semaphore_value);\n",
        "",
    ),
    "stream_k_clear": Fault(
        "a replay finds the semaphore of the replay before it released",
        GEMM + "wgmma_codes.cuh",
        "params.semaphores[scheduler.fixup_cta()] = 0;",
        "params.semaphores[scheduler.fixup_cta()] = params.semaphore_value;",
    ),
    "stream_k_fixup": Fault(
        "fix-up sums are read from the peer CTA's part of the workspace",
        GEMM + "wgmma_codes.cuh",
        "w4_read_fixup<Traits>(params, scheduler.fixup_cta(), rAcc)",
        "w4_read_fixup<Traits>(params, scheduler.fixup_cta() ^ 1, rAcc)",
        first="test_stream_k_is_exact test_bits_do_not_depend_on_stream_k",
    ),
    "stream_k_longer": Fault(
        "work ranges with one more step end one step too early",
        GEMM + "wgmma_codes_scheduler.cuh",
        "end_ = params.range_begin(range + 1);",
        "end_ = next_ + params.range_steps;",
    ),
    "minimum_row": Fault(
        "row g + 8 is given row g's minimum",
        GEMM + "wgmma_codes_mainloop.cuh",
        "recast<std::uint32_t>(rMinima_)(k_block), zeros)",
        "__byte_perm(recast<std::uint32_t>(rMinima_)(k_block), 0, 0x1010), zeros)",
        first="test_exact_data_give_the_rounded_exact_product",
    ),
    "scale_block": Fault(
        "every k-block of a step is given the first scale block",
        GEMM + "wgmma_codes_mainloop.cuh",
        "recast<std::uint32_t>(rScales_)(k_block)",
        "recast<std::uint32_t>(rScales_)(0)",
    ),
    "expand_chunk": Fault(
        "every chunk of expanded rows holds the first one's",
        GEMM + "expand.cuh",
        "tile_row = p.first_tile_row + row,",
        "tile_row = row,",
        first="test_many_tokens_on_an_expanded_weight_have_the_same_bits",
    ),
    "expand_block": Fault(
        "scale blocks of expanded rows are those of the next k-block",
        GEMM + "expand.cuh",
        "static_cast<int>(step * 4 + k_block) >> p.group_shift",
        "static_cast<int>(step * 4 + k_block + 1) >> p.group_shift",
        first="test_many_tokens_on_an_expanded_weight_have_the_same_bits",
    ),
    "expand_wait": Fault(
        "a chunk is written while the product before it may still read the workspace",
        GEMM + "expand.cuh",
        "  tile::wait_for_previous_kernel();\n",
        "",
        first="test_expanded_rows_and_the_sums_of_the_product_before_them",
    ),
    "weight_row": Fault(
        "row g + 8 is given row g's scale and minimum",
        "cpp/tile/dequant_weight.cuh",
        "dequant_pair(rA2(i), i % 2)",
        "dequant_pair(rA2(i), 0)",
    ),
    "weight_zero": Fault(
        "the zeros of row g + 8 are off by 64",
        "cpp/tile/dequant_weight.cuh",
        "fma_f16x2(rZero_(1), one, splat(0x6380))",
        "fma_f16x2(rZero_(1), one, splat(0x6400))",
    ),
    "byte_row": Fault(
        "row g + 8 of a weight of 8 bits is decoded from row g's bytes",
        "cpp/tile/dequant_weight.cuh",
        "fma(__byte_perm(first, 0, 0x4341), raise, g8)",
        "fma(first & 0x00ff00ff, raise, g8)",
        INSTANCES + "*_codes_8.cu",
    ),
    "byte_step": Fault(
        "the second 16 k of 32 in 8 bits are decoded from the first's words",
        "cpp/tile/dequant_weight.cuh",
        "decode_words(rCodes(0, k), rCodes(1, k), rZero(0), rZero(1), a);",
        "decode_words(rCodes(0, 0), rCodes(1, 0), rZero(0), rZero(1), a);",
        INSTANCES + "*_codes_8.cu",
    ),
    "last_fragments": Fault(
        "the last fragment block of a step in 8 bits is not copied: the stage holds the one of an earlier step",
        GEMM + "code_loader.cuh",
        "for (int f = 0; f < blocks; ++f)",
        "for (int f = 0; f < (blocks == 4 ? 3 : blocks); ++f)",
        INSTANCES + "*_codes_8.cu",
    ),
    "ring_fragments": Fault(
        "few tokens: the last fragment block of a step in 8 bits is not copied",
        GEMM + "code_ring.cuh",
        "for (int f = 0; f < blocks; ++f)",
        "for (int f = 0; f < (blocks == 4 ? 3 : blocks); ++f)",
        INSTANCES + "*_codes_8.cu",
    ),
    "ring_tail": Fault(
        "few tokens: a scale block past the end of K is scaled with what lies there",
        GEMM + "code_ring.cuh",
        ".with(groups_left_ > 0)",
        ".with(true)",
    ),
    "ring_zero": Fault(
        "few tokens: row g + 8 is decoded with row g's zero point",
        GEMM + "stage_reader.cuh",
        "sZ(lane(), 1, group(k_block), stage)",
        "sZ(lane(), 0, group(k_block), stage)",
    ),
    "ring_scale": Fault(
        "few tokens: row g + 8 is scaled with row g's scale",
        GEMM + "stream_codes_mainloop.cuh",
        "i % 4 < 2 ? scale.x : scale.y",
        "scale.x",
    ),
    "ring_wait": Fault(
        "few tokens: a step is read before its copies have come",
        GEMM + "stream_codes_mainloop.cuh",
        "        cp_async_wait<S - 2>();\n        __syncwarp();",
        "        __syncwarp();",
    ),
    "x_tile_tail": Fault(
        "few tokens: what lies behind a row of x is read as part of it",
        GEMM + "x_tiles.cuh",
        "gmem_x.with(k0 + get<1>(tXcX(0, n, k)) < p_.k)",
        "gmem_x.with(true)",
    ),
    "copy_order": Fault(
        "the order of columns is ignored from column 2048 on",
        GEMM + "gather_x.cuh",
        "if (p.w.perm)",
        "if (p.w.perm && k0 < w4_gather_columns)",
        first="test_act_order",
    ),
    "copy_launch": Fault(
        "a second launch gathers the first one's tokens",
        GEMM + "gather_x.cuh",
        "p.x.offset(p.first_token + token)",
        "p.x.offset(token)",
        first="test_more_tokens_than_are_prepared_at_once",
    ),
    # only calls of more than 2^30 tokens have a second launch without a copy of x: x alone takes 64 GiB
    "box_launch": Fault(
        "a second launch multiplies the first one's tokens",
        GEMM + "w4a16.cpp",
        "static_cast<const std::uint16_t*>(a.x.data) + p.first_token * p.x_stride;",
        "static_cast<const std::uint16_t*>(a.x.data);",
        first="test_more_tokens_than_a_launch_takes",
    ),
    "copy_sync": Fault(
        "a 16-byte vector is read before other threads have written its columns",
        GEMM + "gather_x.cuh",
        "    __syncthreads();\n    const uint4 vec =",
        "    const uint4 vec =",
    ),
    "split_k_order": Fault(
        "the last split of K is forgotten",
        GEMM + "split_k.cu",
        "sum_in_order(p.splits, ",
        "sum_in_order(p.splits - 1, ",
    ),
    "linear_ring": Fault(
        "a step of W is read before its copies have come",
        GEMM + "stream_bits16.cuh",
        "cute::cp_async_wait<S - 2>();",
        "cute::cp_async_wait<S - 1>();",
    ),
    "linear_slices": Fault(
        "a warp's share of K is left out of the sum",
        GEMM + "stream_bits16.cuh",
        "sum_in_order(slices, ",
        "sum_in_order(max(slices - 1, 1), ",
    ),
    "linear_tail": Fault(
        "one element behind the end of K counts",
        GEMM + "stream_bits16.cuh",
        "if (i < left) words",
        "if (i <= left) words",
    ),
    "linear_wait": Fault(
        "W and x are read while the kernel that writes them still runs",
        GEMM + "stream_bits16.cuh",
        "  tile::wait_for_previous_kernel();\n\n#pragma unroll",
        "#pragma unroll",
    ),
    "linear_tma_x": Fault(
        "both tiles of a step meet the first one's x",
        GEMM + "tma_bits16.cuh",
        "tile_at(tCrX, s * ring.stage_bytes + k_tile * Ring::x_bytes)",
        "tile_at(tCrX, s * ring.stage_bytes)",
    ),
    "linear_tma_step": Fault(
        "the last step of K is left out",
        GEMM + "tma_bits16.cuh",
        "p.steps - first_step)",
        "p.steps - first_step - 1)",
    ),
    "linear_tma_tail": Fault(
        "what lies behind the end of a row of W counts",
        GEMM + "linear.cpp",
        ".columns = p.k, .stride = p.w_stride",
        ".columns = p.w_stride, .stride = p.w_stride",
    ),
    "linear_tma_split": Fault(
        "the last split of K is forgotten",
        GEMM + "tma_bits16.cuh",
        "sum_in_order(cluster, ",
        "sum_in_order(max(cluster - 1, 1), ",
    ),
    "linear_tma_sums": Fault(
        "sums are added before the other CTAs have stored theirs",
        GEMM + "tma_bits16.cuh",
        "tile::sync_cluster();",
        "",
    ),
    "linear_tma_wait": Fault(
        "W and x are read while the kernel that writes them still runs",
        GEMM + "tma_bits16.cuh",
        "  tile::wait_for_previous_kernel();\n  TmaStage at{.parity = 1};",
        "  TmaStage at{.parity = 1};",
    ),
    "linear_residual": Fault(
        "tiles forget the residual",
        GEMM + "collective.cuh",
        "{p.residual.data != nullptr}, {p.activation}",
        "{false}, {p.activation}",
    ),
    "norm_wait": Fault(
        "a norm reads its rows while the kernel that writes them still runs",
        FUSED + "norm.cu",
        "  wait_for_previous_kernel();\n\n  uint4 s[vecs]",
        "  uint4 s[vecs]",
        first="test_a_chain_waits_for_each_call",
    ),
    "norm_early_weights": Fault(
        "a thread's second vector meets the first one's weights",
        FUSED + "norm.cu",
        "load_early<vector>(p.weight, first(k), n)",
        "load_early<vector>(p.weight, first(0), n)",
    ),
    "norm_early_biases": Fault(
        "a thread's second vector meets the first one's biases where a norm has few rows",
        FUSED + "norm.cu",
        "load_early<vector>(p.bias, first(k), n)",
        "load_early<vector>(p.bias, first(0), n)",
    ),
    "norm_mean_error": Fault(
        "the mean is not corrected by the sum of the deviations",
        FUSED + "norm.cu",
        "error = sums[0][1] / n;",
        "error = 0 * sums[0][1];",
    ),
    "norm_barrier": Fault(
        "the warps' sums are read before all are written",
        "cpp/tile/reduce.cuh",
        "  __syncthreads();  // all warps",
        "  // all warps",
        FUSED + "norm.cu",
    ),
    "norm_last_warps": Fault(
        "the first eight warps' sums count twice, the last eight's not at all",
        "cpp/tile/reduce.cuh",
        "if constexpr (step == WarpPartials::most) return x.at[first];",
        "if constexpr (step == WarpPartials::most) return x.at[first % 8];",
        FUSED + "norm.cu",
    ),
    "norm_coarse_sums": Fault(
        "a thread that stands for two adds both threads' squares to one sum",
        FUSED + "norm.cu",
        "sums[k % coarsening][0] += squares;",
        "sums[0][0] += squares;",
        first="test_few_rows_as_among_many",
    ),
    "norm_coarse_left_over": Fault(
        "with an odd number of warps the last threads that stand for two count elements of others again",
        "cpp/tile/strided_rows.cuh",
        "at.thread + lanes < stride ? at.thread + lanes : past_rows;",
        "at.thread + lanes;",
        FUSED + "norm.cu",
        first="test_few_rows_as_among_many",
    ),
    "norm_pair_second": Fault(
        "the second of two norms begins with the rows that the first one has done",
        FUSED + "norm.cu",
        "blockIdx.x - (is_second ? p.first_ctas : 0)",
        "blockIdx.x",
    ),
    "embedding_wait": Fault(
        "an embedding reads its ids while the kernel that writes them still runs",
        FUSED + "embedding.cu",
        "  wait_for_previous_kernel();\n  const std::int64_t id = ",
        "  const std::int64_t id = ",
        first="test_a_chain_waits_for_each_call",
    ),
    "embedding_bounds": Fault(
        "an embedding reads the row behind the table's last",
        FUSED + "embedding.cu",
        "id < p.vocabulary",
        "id <= p.vocabulary",
    ),
    "embedding_scale": Fault(
        "an embedding is not scaled",
        FUSED + "embedding.cu",
        "if (p.scale != 1) {",
        "if (false) {",
    ),
    "gated_wait": Fault(
        "a gated activation reads its inputs while the kernel that writes them still runs",
        FUSED + "elementwise.cu",
        "  wait_for_previous_kernel();\n  const uint4 g = ",
        "  const uint4 g = ",
        first="test_a_chain_waits_for_each_call",
    ),
    "rope_wait": Fault(
        "rope reads q while the kernel that writes it still runs",
        FUSED + "rope.cu",
        "  wait_for_previous_kernel();\n  const std::int64_t position",
        "  const std::int64_t position",
        first="test_a_chain_waits_for_each_call",
    ),
    "softmax_padding": Fault(
        "elements past the end of a row count as 0, not as -inf",
        FUSED + "elementwise.cu",
        "load_vec<vector>(x, first(k), n, minus_infinity<T>)",
        "load_vec<vector>(x, first(k), n)",
    ),
    "linear_collective_split": Fault(
        "every split multiplies the first split's k",
        GEMM + "collective.cuh",
        "p.splits > 1 ? k : 0",
        "0",
    ),
    "linear_collective_partial": Fault(
        "every split stores its partial sums where the first one does",
        GEMM + "collective.cuh",
        "output(p.padded_n(), p.tokens * p.padded_n())",
        "output(p.padded_n(), 0)",
    ),
}


# A header's faults are compiled in some of the sources that include it; the other sources stay sound.
SOURCES = {
    DECODE: INSTANCES + "decode_int4_up_to_128.cu",
    "cpp/core/divisor.h": DECODE + "dispatch.cpp",
    KV_CACHE: KV_CACHE + "launch.cu",
    GEMM + "expand.cuh": GEMM + "prepare.cu",
    GEMM + "gather_x.cuh": GEMM + "prepare.cu",
    GEMM + "collective.cuh": INSTANCES + "collective_*",
    GEMM + "stream_bits16.cuh": INSTANCES + "stream_bits16*",
    GEMM + "tma_bits16.cuh": INSTANCES + "tma*",
    GEMM: INSTANCES + "*_codes_4*",
    "cpp/tile/dequant_weight.cuh": INSTANCES + "*_codes_4*",
}
W4_TESTS = "w4a16_device w4a16 w4a16_modules many_rows workspaces poison layout_invariance streams cuda"
DECODE_TESTS = "decode_attention decode_attention_gpu decode_attention_gpu_many decode_attention_gpu_faults"
DECODE_TESTS += " streams cuda"
LINEAR_TESTS = "linear_device linear many_rows workspaces poison layout_invariance streams cuda"
TESTS = {  # by the beginning of the sources' path, the first that fits
    INSTANCES + "decode": DECODE_TESTS,
    INSTANCES + "*_codes": W4_TESTS,
    INSTANCES: LINEAR_TESTS,
    DECODE: DECODE_TESTS,
    KV_CACHE: "kv_cache_gpu kv_cache_device decode_attention_gpu",
    GEMM + "split_k.cu": "w4a16_device linear_device w4a16 linear",
    GEMM + "prepare.cu": W4_TESTS,
    GEMM + "w4a16.cpp": W4_TESTS,
    GEMM: LINEAR_TESTS,
    FUSED: "fused row_independence many_rows merge_attention streams cuda",
}


def first_of(table, path):
    return next(value for start, value in table.items() if path.startswith(start))


def sources_of(fault):
    """A pattern of paths."""
    if fault.sources or fault.file.endswith((".cu", ".cpp")):
        return fault.sources or fault.file
    return first_of(SOURCES, fault.file)


def tests_of(fault, killer=""):
    """One forks.Test of all files, so that a fault costs one CUDA context. killer: of the recorded run; runs first."""
    names = first_of(TESTS, sources_of(fault)).split()
    first = (killer, *fault.first.split())
    return [forks.Test(names[0], tuple(f"tests/python/test_{name}.py" for name in names), first=first)]


def lines(tree):
    """[(fault, its line)] of every fault. Raises SystemExit for one whose place is gone."""
    found = []
    for fault in FAULTS.values():
        text = (Path(tree) / fault.file).read_text()
        found.append((fault, places.line_of(text, places.find(text, fault)[0])))
    return found


def rows(tree, recorded):
    """What kills.json says of them. recorded: what it said so far. A result stays, with the commit it was found at,
    as long as the fault's text does, also in a file of another name."""
    known = {}
    for r in recorded["mutants"]:
        if r["rule"] == "GPU" and r["result"] != "needs GPU":
            commit = r.get("commit", recorded["gpu"]["commit"])
            known[r["what"], r["original"], r["mutated"]] = r["result"], r["by"], commit
    for fault, line in lines(tree):
        text = places.one_line(fault.sound), places.one_line(fault.faulty)
        result, by, commit = known.get((fault.what, *text), ("needs GPU", "", ""))
        yield {"file": fault.file, "line": line, "rule": "GPU", "what": fault.what, "original": text[0],
               "mutated": text[1], "result": result, "by": by, "commit": commit}  # fmt: skip


def plant(name, tree, to=None):
    """Puts the fault into the file of `tree`, or into its copy below `to`."""
    fault = FAULTS[name]
    text = (Path(tree) / fault.file).read_text()
    begin, end = places.find(text, fault)
    path = Path(to or tree) / fault.file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text[:begin] + fault.faulty + text[end:])
    return path


def check_name(name):
    if name not in FAULTS:
        sys.exit(f"mutants: no fault is called {name!r}; there are {', '.join(FAULTS)}")


def plant_one(tree, name, to):
    check_name(name)
    if to.resolve() == tree:
        sys.exit("mutants: TREE is this very tree; take a copy, such as a git worktree")
    plant(name, to)


class Build:
    """One sound build of a copy of the tree, and beside it one extension for each fault."""

    def __init__(self, tree):
        self.origin, self.tree = tree, tree / "build/mutants/gpu"
        self.folder = self.tree / "build/cuda"

    def compile_sound(self):
        instrumented.copy(self.origin, self.tree)
        configure = ["cmake", "--preset", "cuda", f"-DPython_EXECUTABLE={sys.executable}", "-DROOFTILE_WERROR=OFF",
                     "-DROOFTILE_BENCH=OFF", "-DROOFTILE_TESTS=OFF", "-DROOFTILE_CUDA_ARCHITECTURES=90a-real",
                     "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"]  # fmt: skip
        self.ninja = str(Path(sys.executable).parent / "ninja")
        if Path(self.ninja).exists():
            configure.append(f"-DCMAKE_MAKE_PROGRAM={self.ninja}")
        else:
            self.ninja = "ninja"
        subprocess.run(configure, cwd=self.tree, check=True, stdout=subprocess.DEVNULL)
        subprocess.run(["cmake", "--build", "--preset", "cuda"], cwd=self.tree, check=True, stdout=subprocess.DEVNULL)
        self.compiles = {c["file"]: c for c in json.loads((self.folder / "compile_commands.json").read_text())}
        said = subprocess.run(
            [self.ninja, "-t", "commands"], cwd=self.folder, capture_output=True, text=True, check=True
        )
        self.link_line = next(line for line in said.stdout.splitlines() if " -shared " in line and "_C.abi3.so" in line)

    def compile(self, name):
        """Whether the fault compiles; its objects lie in faults/NAME."""
        fault, to = FAULTS[name], self.tree / "faults" / name
        planted = plant(name, self.tree, to)
        for source, command, made in self.commands(name):
            words, there = shlex.split(command["command"]), self.object_of(command)
            words = [word.replace(there, str(made)) for word in words]
            if source == str(self.tree / fault.file):
                words = [str(planted) if word == source else word for word in words]
            first = next(i for i, word in enumerate(words) if word.startswith("-I"))
            words.insert(first, f"-I{to / 'cpp'}")  # found before the sound header
            done = subprocess.run(words, cwd=command["directory"], capture_output=True, text=True)
            if done.returncode:
                print(f"{name} does not compile:\n{done.stdout}{done.stderr}", flush=True)
                return False
        return True

    def commands(self, name):
        """[(source, its compile command, the object with the fault)] of the fault's sources."""
        pattern = f"{glob.escape(str(self.tree))}/{sources_of(FAULTS[name])}"
        found = [(source, command) for source, command in self.compiles.items() if fnmatchcase(source, pattern)]
        if not found:
            sys.exit(f"mutants: {name}: the build has no source {sources_of(FAULTS[name])}")
        to = self.tree / "faults" / name
        return [(*pair, to / f"object{i}.o") for i, pair in enumerate(found)]

    @staticmethod
    def object_of(command):
        words = shlex.split(command["command"])
        return words[words.index("-o") + 1]

    def package(self, name):
        """The folder that holds a rooftile with the fault, or will."""
        return self.tree / "faults" / name / "python"

    def link(self, first, to):
        """An extension in which the objects `first` stand for those of the archive that have their symbols."""
        words = shlex.split(self.link_line)
        library = next(word for word in words if word.endswith("_C.abi3.so"))
        archive = next(word for word in words if word.endswith("librooftile_cpp.a"))
        objects = " ".join(str(path) for path in first)
        line = self.link_line.replace(f"-o {library}", f"-o {to}").replace(f" {archive} ", f" {objects} {archive} ")
        subprocess.run(line, shell=True, cwd=self.folder, check=True, stdout=subprocess.DEVNULL)

    def link_package(self, name):
        """Whether the fault is in the extension: not where the compiler drops it, or its source does not use it."""
        to, library = self.tree / "faults" / name, self.package(name) / "rooftile/_C.abi3.so"
        shutil.copytree(self.tree / "python/rooftile", library.parent, dirs_exist_ok=True,
                        ignore=shutil.ignore_patterns("*.so", "__pycache__"))  # fmt: skip
        commands = self.commands(name)
        self.link([made for *_, made in commands], library)
        self.link([self.object_of(command) for _, command, _ in commands], to / "sound.so")
        changed = library.read_bytes() != (to / "sound.so").read_bytes()
        (to / "sound.so").unlink()
        if not changed:
            print(f"{name}: the machine code of {sources_of(FAULTS[name])} is the same with the fault", flush=True)
        return changed


def compile_all(tree, names, jobs):
    """A rooftile for each fault, below build/mutants/gpu. Returns the names of those that are not there then."""
    build = Build(tree)
    build.compile_sound()
    with ThreadPoolExecutor(jobs) as pool:
        there = dict(
            zip(names, pool.map(lambda name: build.compile(name) and build.link_package(name), names), strict=True)
        )
    return [name for name in names if not there[name]]


def run(tree, names, jobs, done, minutes=None, killers=()):
    """Tests what compile_all() made on the GPU; tells done(fault, how, by) of each. minutes: as of Forks.run().
    killers: {what: the test that killed the fault in the recorded run}.

    Returns the names of those that survived, and of those whose killer is no judge: it does not pass without a fault
    either.
    """
    build = Build(tree)
    runner = forks.Forks(build.tree, jobs, switch=False)
    sound = build.tree / "python"
    killed, verdicts = {}, {}  # {killer: its faults}; {killer: how it ends without a fault}
    survived, unjudged = [], []

    def tell(name, how, by):
        done(FAULTS[name], how, by)
        print(f"{how:9} {name}: {FAULTS[name].what} [{by}]", flush=True)

    def settle(killer):
        for name, how in killed[killer]:
            if verdicts[killer] == "passed":
                tell(name, how, killer)
            else:
                unjudged.append(name)
                print(f"{how:9} {name}, but {killer} {verdicts[killer]} without a fault", flush=True)
        killed[killer].clear()

    def ended(job):
        """A killer runs without a fault at once: what is known stays known where the run is cut short."""
        if job.package == sound:
            killer = list(killed)[job.number]
            verdicts[killer] = job.outcome.how if job.outcome else "passed"
            settle(killer)
            return None
        name = names[job.number]
        if not job.outcome:
            survived.append(name)
            tell(name, "survived", "")
            return None
        killer, new = job.outcome.by, job.outcome.by not in killed
        killed.setdefault(killer, []).append((name, job.outcome.how))
        if killer in verdicts:
            settle(killer)
        return forks.Job(len(killed) - 1, [forks.named_test(killer)], package=sound) if new else None

    work = []
    for i, name in enumerate(names):
        fault = FAULTS[name]
        tests = tests_of(fault, dict(killers).get(fault.what, ""))
        work.append(forks.Job(i, tests, package=build.package(name)))
    runner.run(work, ended, minutes)
    return survived, unjudged
