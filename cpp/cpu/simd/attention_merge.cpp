// SPDX-License-Identifier: Apache-2.0
// Two partial attention results over disjoint keys become one. Bound by memory: each element is read and written once.
#include <cmath>
#include <type_traits>

#include "core/kv_layout.h"
#include "cpu/element.h"
#include "cpu/kernels.h"
#include "cpu/scratch.h"
#include "cpu/simd/isa.h"
#include "cpu/simd/kernels_isa.h"
#include "cpu/simd/vec.h"
#include "cpu/simd/kv_tile.h"
#include "cpu/simd/attention_math.h"

namespace rooftile::cpu::ROOFTILE_ISA {

void merge_attention(const Parallel& parallel, const TensorView& out_a, const TensorView& lse_a,
                     const TensorView& out_b, const TensorView& lse_b, const TensorView& out, const TensorView& lse) {
  constexpr int channel_step = max_head_dim;  // channels of a step
  constexpr std::int64_t task_rows = 32;      // rows per task
  const std::int64_t dim = out.last();
  const int width = dim < channel_step ? (static_cast<int>(dim) + lanes - 1) / lanes * lanes : channel_step;
  const Scratch scratch(static_cast<std::size_t>(parallel.threads() * width * 2) * sizeof(float));
  parallel.run((out.rows() + task_rows - 1) / task_rows, [&](std::int64_t task, int thread) {
    float* x = reinterpret_cast<float*>(scratch.data()) + thread * width * 2;
    float* y = x + width;
    const std::int64_t end = (task + 1) * task_rows < out.rows() ? (task + 1) * task_rows : out.rows();
    for (std::int64_t row = task * task_rows; row < end; ++row) {
      const float a = lse_a.as<float>()[element_offset(lse_a, row)], b = lse_b.as<float>()[element_offset(lse_b, row)];
      const bool only_a = b == minus_infinity,
                 only_b = a == minus_infinity;  // out of a partial without keys is not read
      const float top = a > b ? a : b;
      const float wa = ::expf(a - top), wb = ::expf(b - top), total = wa + wb;
      for (std::int64_t first = 0; first < dim; first += channel_step) {
        const int n = dim - first < channel_step ? static_cast<int>(dim - first) : channel_step;
        const auto gather = [&](const TensorView& t, float* to) {
          gather_row(t, t.row_offset(row) + first * t.last_stride(), t.last_stride(), n, width, to);
        };
        if (only_a && only_b) {
          for (int d = 0; d < width; d += lanes) store(x + d, F32{});
        } else if (only_a || only_b) {
          gather(only_a ? out_a : out_b, x);
        } else {
          gather(out_a, x);
          gather(out_b, y);
          for (int d = 0; d < width; d += lanes) {
            const F32 part = load(x + d) * wa;
            store(x + d, fma(load(y + d), splat(wb), part) / total);
          }
        }
        scatter_row(x, n, out, out.row_offset(row) + first * out.last_stride(), out.last_stride());
      }
      if (lse.given()) lse.as<float>()[element_offset(lse, row)] = only_a ? a : only_b ? b : top + ::logf(total);
    }
  });
}

}  // namespace rooftile::cpu::ROOFTILE_ISA
