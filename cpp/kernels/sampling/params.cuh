// SPDX-License-Identifier: Apache-2.0
// The parameters of sample_rows.
#pragma once

#include "tile/strided_rows.cuh"

namespace rooftile::gpu {

struct SampleParams {
  tile::Rows logits, token_ids, seeds, positions, tokens;  // [rows, V], [rows, L], [rows], [rows], [rows]
  int vocabulary = 0;                                      // V
  int slice = 0;                                           // tokens of a thread, a multiple of 8
  int cluster = 1;                                         // CTAs of a row
  bool keep_keys = false;                                  // in shared memory
  bool use_candidates = false;   // few tokens may be left: they are listed (candidates.cuh) before a radix search
  std::uint32_t candidates = 0;  // tokens listed first, the largest ones; 0: all up to min_p's key
  int seen = 0;                  // L if token_ids are penalised, else 0
  float penalty = 1, per_temperature = 0;
  double top_p = 1;
  std::uint32_t top_k = 0, min_p_key = 0;  // top_k 0: all tokens
  bool min_p_first = false, greedy = false;
  bool wide_token_ids = false, wide_positions = false, wide_tokens = false;  // int64
};

}  // namespace rooftile::gpu
