// SPDX-License-Identifier: Apache-2.0
// The next token of each row of logits.
#pragma once

#include "rooftile/context.h"
#include "rooftile/tensor.h"

namespace rooftile {

// Which tokens top_p takes its part of: those of top_k, min_p afterwards (transformers), or those that min_p left
// (vLLM). The other settings do not depend on the order.
enum class SampleOrder : std::uint8_t { transformers, vllm };

struct SampleSettings {
  double temperature = 1;         // 0: greedy, the first of the largest logits
  std::int64_t top_k = 0;         // the likeliest tokens, with all that equal the last of them; 0: all
  double top_p = 1;               // the likeliest tokens that make up this part of the probability; 1: all
  double min_p = 0;               // tokens of at least this part of the likeliest token's probability
  double repetition_penalty = 1;  // of tokens in token_ids: divides a positive logit, multiplies a negative one
  SampleOrder order = SampleOrder::transformers;
};

// logits [..., V] -> tokens [...], int32 or int64. token_ids [..., L] (int32 or int64; entries outside [0, V) are no
// tokens), seeds [...] (int64) and positions [...] (int32 or int64; absent: 0) may be absent; seeds only if greedy. A
// row draws with the random bits of (seed, position). A row with NaN or +inf, or without a finite logit, has no
// probabilities and gets the token -1; greedy takes the first NaN as the largest, as torch.argmax does.
KernelName sample(const Context&, TensorView logits, TensorView token_ids, TensorView seeds, TensorView positions,
                  const SampleSettings&, TensorView tokens);

}  // namespace rooftile
