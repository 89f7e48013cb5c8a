// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "core/kernel_name.h"
#include "core/sampling.h"
#include "kernels/backend.h"
#include "ops/check.h"
#include "rooftile/sampling.h"

namespace rooftile {
namespace {

constexpr const char* op = "sample";
// Keys of smaller temperatures overflow; those of larger ones are the same for logits that float32 tells apart.
constexpr double least_temperature = 1e-6, most_temperature = 100;
constexpr std::int64_t most_token_ids = std::int64_t{1} << 30;  // of a row; kernels count them in 32 bits

// The leading dimensions of [..., N].
TensorView leading(const TensorView& x) {
  TensorView t = x;
  --t.ndim;
  return t;
}

void check_rows(const char* argument, const TensorView& t, const TensorView& logits) {
  ROOFTILE_CHECK(same_shape(t, leading(logits)), op, ": ", argument, " must have logits' leading dimensions ",
                 shape_text(leading(logits)), ", got ", describe(t));
}

void check_settings(const SampleArgs& a) {
  const SampleSettings& s = a.settings;
  ROOFTILE_CHECK(s.temperature == 0 || (s.temperature >= least_temperature && s.temperature <= most_temperature), op,
                 ": temperature must be 0 (greedy) or lie in [", least_temperature, ", ", most_temperature, "], got ",
                 s.temperature);
  ROOFTILE_CHECK(s.top_k >= 0, op, ": top_k must be at least 1, got ", s.top_k);
  ROOFTILE_CHECK(s.top_p >= 0 && s.top_p <= 1, op, ": top_p must lie in [0, 1], got ", s.top_p);
  ROOFTILE_CHECK(s.min_p >= 0 && s.min_p <= 1, op, ": min_p must lie in [0, 1], got ", s.min_p);
  const float penalty = static_cast<float>(s.repetition_penalty);
  ROOFTILE_CHECK(penalty > 0 && std::isfinite(penalty), op,
                 ": repetition_penalty must be positive and finite in float32, got ", s.repetition_penalty);
  ROOFTILE_CHECK_KIND(type, s.repetition_penalty == 1 || a.token_ids.given(), op,
                      ": token_ids must be a tensor, the tokens that repetition_penalty applies to, got None");
  ROOFTILE_CHECK_KIND(type, a.greedy() || a.seeds.given(), op,
                      ": seeds must be a tensor, int64, one a row (temperature 0 needs none), got None");
}

}  // namespace

KernelName sample(const Context& ctx, TensorView logits, TensorView token_ids, TensorView seeds, TensorView positions,
                  const SampleSettings& settings, TensorView tokens) {
  using check::Arg;
  const SampleArgs a{logits, token_ids, seeds, positions, tokens, settings};
  Arg(op, "logits", logits).given().activation().ndim(1, TensorView::max_ndim);
  ROOFTILE_CHECK(logits.last() >= 1 && logits.last() <= max_vocabulary, op,
                 ": logits must have a last dimension of 1 to ", max_vocabulary, ", got ", describe(logits));
  check_settings(a);
  if (token_ids.given()) {
    Arg(op, "token_ids", token_ids).dtype({DType::i32, DType::i64}).ndim(logits.ndim, logits.ndim).countable();
    Arg(op, "token_ids", token_ids).device(logits.device, "logits");
    ROOFTILE_CHECK(token_ids.last() <= most_token_ids, op, ": token_ids must have a last dimension of at most ",
                   most_token_ids, ", got ", describe(token_ids));
    ROOFTILE_CHECK(same_shape(leading(token_ids), leading(logits)), op,
                   ": token_ids must have logits' leading dimensions ", shape_text(leading(logits)), ", got ",
                   describe(token_ids));
  }
  if (seeds.given()) {
    Arg(op, "seeds", seeds).dtype({DType::i64}).device(logits.device, "logits");
    check_rows("seeds", seeds, logits);
  }
  if (positions.given()) {
    Arg(op, "positions", positions).dtype({DType::i32, DType::i64}).device(logits.device, "logits");
    check_rows("positions", positions, logits);
  }
  Arg(op, "out", tokens).given().dtype({DType::i32, DType::i64}).device(logits.device, "logits").writable();
  check_rows("out", tokens, logits);
  check::check_disjoint(op, "out", tokens,
                        {{"logits", logits}, {"token_ids", token_ids}, {"seeds", seeds}, {"positions", positions}});
  if (check::on_gpu(ctx)) {
    check::refuse_gpu_plan(op, ctx);
    return gpu::sample(ctx, a);
  }
  const cpu::Kernels& k = check::cpu_kernels(op, ctx);
  if (tokens.numel() > 0) k.sample(Parallel(ctx.threads), a);
  return kernel_name("cpu_", k.variant, "_", name(logits.dtype));
}

}  // namespace rooftile
