// SPDX-License-Identifier: Apache-2.0
// y = activation(x W^T + bias) + residual for any kind of weight. The caller's Weights type converts a tile of 16 rows
// x 64 k of W to fp32.
//
//   One row: weights go through registers, 16 accumulators a tile. Bound by the bytes of W.
//   More: a strip of 16 rows of W is converted in L1 and multiplied with a block of rows of x. Bound by multiply-adds.
//         In fp32 (Fp32Rows) a strip has 256 k; bf16_rows.h has strips of bf16.
// In fp32 lanes are positions of k. Every output has one accumulator of 16 lanes, which adds k-blocks of 64 in order;
// the lanes are summed at the end. The order of the sum is the same for every M.
// A task of the thread pool is a range of tiles for one block of rows; no two tasks write the same output.
// Include isa.h, vec.h and activation.h first.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/op_args.h"
#include "core/parallel.h"
#include "cpu/element.h"
#include "cpu/scratch.h"

namespace rooftile::cpu::ROOFTILE_ISA {

constexpr int tile_n = 16, block_k = 64;
constexpr int k_vecs = block_k / lanes;  // vectors of a k-block
constexpr int row_floats = block_k;      // one row of a tile in fp32
constexpr int tile_floats = tile_n * block_k;
constexpr std::int64_t strip_bytes = 16 * 1024;                 // half an L1
constexpr std::int64_t m_block_bytes = std::int64_t{16} << 20;  // packed x of one m-block, at most (one row at least)
constexpr std::int64_t product_worth_a_thread = 192 * 1024;     // multiply-adds: about 10 us
constexpr std::int64_t task_weights = 64 * 1024;

template <class T = float>
T* at(const Scratch& scratch, std::int64_t byte) {
  return reinterpret_cast<T*>(scratch.data() + byte);
}

// `count` elements of a strided row as fp32.
template <class T>
ROOFTILE_INLINE void widen(const T* p, std::int64_t stride, std::int64_t count, float* to) {
  std::int64_t i = 0;
  if (stride == 1)
    for (; i + lanes <= count; i += lanes) store(to + i, load(p + i));
  for (; i < count; ++i) to[i] = to_float(p[i * stride]);
}

// ---- outputs ------------------------------------------------------------------------------------

// Sixteen (or the last few) elements along the last dimension.
inline F32 load_tile(const TensorView& t, std::int64_t offset, int count) {
  F32 v{};
  with_element(t.dtype, [&](auto e) {
    const auto* p = t.as<decltype(e)>() + offset;
    const std::int64_t stride = t.last_stride();
    if (stride == 1) {
      v = load_some(p, count);
    } else {
      for (int i = 0; i < count; ++i) v[i] = to_float(p[i * stride]);
    }
  });
  return v;
}
inline void store_tile(const TensorView& t, std::int64_t offset, int count, F32 v) {
  with_element(t.dtype, [&](auto e) {
    auto* p = t.as<decltype(e)>() + offset;
    const std::int64_t stride = t.last_stride();
    if (stride == 1) {
      store_some(p, v, count);
    } else {
      for (int i = 0; i < count; ++i) p[i * stride] = from_float<decltype(e)>(v[i]);
    }
  });
}

inline F32 activate(Activation a, F32 x) {
  switch (a) {
    case Activation::none:
      return x;
    case Activation::silu:
      return Silu::apply(x);
    case Activation::gelu_tanh:
      return GeluTanh::apply(x);
    case Activation::gelu_erf:
      return GeluErf::apply(x);
  }
  return x;
}

// Bias, activation, gate and residual of sixteen neighbouring outputs of a row. Args: see op_args.h.
template <class Args>
class Epilogue {
 public:
  Epilogue(const Args& a, std::int64_t tile)
      : a_(a), n_(tile * tile_n), count_(static_cast<int>(std::min<std::int64_t>(tile_n, a.outputs() - n_))) {
    if (!a.bias.given()) return;
    bias_ = load_tile(a.bias, n_ * a.bias.stride[0], count_);
    if (a.gated) up_bias_ = load_tile(a.bias, (n_ + a.outputs()) * a.bias.stride[0], count_);
  }
  // up: the up projection's product if gated. y_row, residual_row: offsets of the row in elements.
  void operator()(F32 product, F32 up, std::int64_t y_row, std::int64_t residual_row) const {
    if (a_.bias.given()) product += bias_;
    product = activate(a_.activation, product);
    if (a_.gated) product *= a_.bias.given() ? up + up_bias_ : up;
    if (a_.residual.given()) product += load_tile(a_.residual, residual_row + n_ * a_.residual.last_stride(), count_);
    store_tile(a_.y, y_row + n_ * a_.y.last_stride(), count_, product);
  }

 private:
  const Args& a_;
  std::int64_t n_;
  int count_;
  F32 bias_{}, up_bias_{};
};

// ---- many rows of x -----------------------------------------------------------------------------

#ifdef ROOFTILE_AVX512
constexpr int micro_rows = 6, micro_n = 4;  // accumulators of the inner kernel: 24 of 32 registers
#else
constexpr int micro_rows = 4, micro_n = 2;  // 8 of 16
#endif

// acc[row][16 n] += x[row] . strip[n] over `blocks` k-blocks, for Rows rows, micro_n of the sixteen n and as many lanes
// as a register holds.
template <int Rows>
void micro(const float* strip, const float* x, std::int64_t x_row, int blocks, bool first, float* acc) {
  Register r[Rows][micro_n];
#pragma GCC unroll 8
  for (int m = 0; m < Rows; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < micro_n; ++n) r[m][n] = first ? Register{} : load_raw<Register>(acc + (m * tile_n + n) * lanes);
  for (int b = 0; b < blocks; ++b, strip += tile_floats, x += block_k) {
#pragma GCC unroll 4
    for (int q = 0; q < k_vecs; ++q) {
      Register w[micro_n];
#pragma GCC unroll 4
      for (int n = 0; n < micro_n; ++n) w[n] = load_raw<Register>(strip + n * row_floats + q * lanes);
#pragma GCC unroll 8
      for (int m = 0; m < Rows; ++m) {
        const Register xv = load_raw<Register>(x + m * x_row + q * lanes);
#pragma GCC unroll 4
        for (int n = 0; n < micro_n; ++n) r[m][n] = w[n] * xv + r[m][n];
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < Rows; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < micro_n; ++n) store_raw(acc + (m * tile_n + n) * lanes, r[m][n]);
}

template <int Rows>
void micro_at_most(int rows, const float* strip, const float* x, std::int64_t x_row, int blocks, bool first,
                   float* acc) {
  if constexpr (Rows > 1)
    if (rows < Rows) return micro_at_most<Rows - 1>(rows, strip, x, x_row, blocks, first, acc);
  micro<Rows>(strip, x, x_row, blocks, first, acc);
}

// Rows of x that are packed and multiplied at once.
struct MBlock {
  std::int64_t first_row, rows;
  std::int64_t blocks;               // k-blocks
  float* x;                          // rows * Rows::row_size(blocks) words of 32 bits, as Rows::pack lays them out
  std::int64_t *y_at, *residual_at;  // [rows] offsets in elements
  std::int64_t k() const { return blocks * block_k; }
};

// Products of many rows in fp32: acc [rows][16 n] of vectors of k.
struct Fp32Rows {
  static constexpr bool one_row_apart = true;     // one row alone goes through Weights::one_row, with the same bits
  static constexpr int pack_rows = 1;             // rows of floats that pack() takes as a buffer
  static constexpr std::int64_t padding = 0;      // words behind packed x
  static constexpr int step_rows = micro_rows;    // blocks of rows are multiples of these
  static constexpr std::int64_t block_rows = 96;  // rows against one strip: their accumulators stay in L2
  static constexpr int acc_vecs = tile_n;         // of a row
  static constexpr int strip_blocks = strip_bytes / (tile_floats * 4);  // k-blocks of 64

  // Words of a packed row of x of `blocks` k-blocks.
  static std::int64_t row_size(std::int64_t blocks) { return blocks * block_k; }
  // Packs row `m` of the block.
  template <class Weights>
  static void pack(const Weights& w, const TensorView& x, const MBlock& p, std::int64_t m, float* buffer) {
    w.pack_row(x, p.first_row + m, p.k(), buffer, p.x + m * p.k());
  }
  // One tile of W against `rows` rows of x from m0 on, into acc.
  template <class Weights>
  static void multiply(const Weights& w, std::int64_t tile, const MBlock& p, std::int64_t m0, int rows, float* strip,
                       F32* acc) {
    const std::int64_t blocks = p.blocks, x_row = p.k();
    const float* const x = p.x + m0 * x_row;
    if (blocks == 0) std::fill_n(acc, rows * tile_n, F32{});
    for (std::int64_t begin = 0; begin < blocks; begin += strip_blocks) {
      const int here = static_cast<int>(std::min<std::int64_t>(strip_blocks, blocks - begin));
      for (int b = 0; b < here; ++b) w.tile(tile, begin + b, strip + b * tile_floats);
      for (int m = 0; m < rows; m += micro_rows)
        for (int n = 0; n < tile_n; n += micro_n)
          for (int lane = 0; lane < lanes; lane += register_lanes)
            micro_at_most<micro_rows>(std::min(micro_rows, rows - m), strip + n * row_floats + lane,
                                      x + m * x_row + begin * block_k + lane, x_row, here, begin == 0,
                                      reinterpret_cast<float*>(acc + m * tile_n + n) + lane);
    }
  }
  static F32 outputs(const F32* acc, std::int64_t row) { return sums(acc + row * tile_n); }  // of 16 n
};

// ---- the product of one m-block of rows of x -----------------------------------------------------

template <class Args, class Weights>
void pack_m_block(const Parallel& parallel, const Args& a, const Weights& w, const MBlock& p, float* workspace) {
  const auto pack_row = [&](std::int64_t m, int thread) {
    Weights::Rows::pack(w, a.x, p, m, workspace + thread * Weights::Rows::pack_rows * p.k());
    p.y_at[m] = a.y.row_offset(p.first_row + m);
    p.residual_at[m] = a.residual.given() ? a.residual.row_offset(p.first_row + m) : 0;
  };
  constexpr std::int64_t task_rows = 8;
  const auto pack_rows = [&](std::int64_t task, int thread) {
    for (std::int64_t m = task * task_rows; m < std::min(p.rows, (task + 1) * task_rows); ++m) pack_row(m, thread);
  };
  if (p.rows * p.k() < product_worth_a_thread / 4) {
    for (std::int64_t m = 0; m < p.rows; ++m) pack_row(m, 0);
  } else {
    parallel.run((p.rows + task_rows - 1) / task_rows, pack_rows);
  }
}

// to[row] (count x 16): the products of `count` rows of the m-block from m0 on with sixteen rows of W from n on. If n
// is no multiple of sixteen, the rows of W lie in two tiles and each tile fills its lanes.
template <class Weights>
void products(const Weights& w, std::int64_t n, const MBlock& p, std::int64_t m0, std::int64_t count, float* strip,
              F32* acc, F32* to) {
  using Rows = typename Weights::Rows;
  const int from = static_cast<int>(n % tile_n);  // lane 0 of `to` is lane `from` of the first tile
  for (std::int64_t tile = n / tile_n;
       tile <= std::min((n + tile_n - 1) / tile_n, (w.rows() + tile_n - 1) / tile_n - 1); ++tile) {
    const bool one_row = Rows::one_row_apart && p.rows == 1;
    if (!one_row) Rows::multiply(w, tile, p, m0, static_cast<int>(count), strip, acc);
    const int first = static_cast<int>(tile * tile_n - n);  // lane 0 of this tile is lane `first` of `to`
    for (std::int64_t m = 0; m < count; ++m) {
      const F32 sixteen = one_row ? w.one_row(tile, p.x) : Rows::outputs(acc, m);
      if (from == 0) {
        to[m] = sixteen;
      } else {
        for (int i = std::max(0, first); i < std::min(tile_n, first + tile_n); ++i) to[m][i] = sixteen[i - first];
      }
    }
  }
}

template <class Args, class Weights>
void multiply_m_block(const Parallel& parallel, const Args& a, const Weights& w, const MBlock& p) {
  const std::int64_t tiles = (a.outputs() + tile_n - 1) / tile_n,
                     tile_weights = tile_n * block_k * std::max<std::int64_t>(p.blocks, 1) * (a.gated ? 2 : 1);
  using Rows = typename Weights::Rows;
  const std::int64_t row_blocks = (p.rows + Rows::block_rows - 1) / Rows::block_rows;
  const std::int64_t rows = ((p.rows + row_blocks - 1) / row_blocks + Rows::step_rows - 1) / Rows::step_rows *
                            Rows::step_rows;  // of a row block
  const std::int64_t tiles_per_task =
      std::max<std::int64_t>(1, task_weights / (tile_weights * std::min(p.rows, rows)));  // tiles a task
  const std::int64_t tile_ranges = (tiles + tiles_per_task - 1) / tiles_per_task;
  const bool serial = p.rows * tiles * tile_weights < product_worth_a_thread;

  const std::int64_t acc_bytes = rows * Rows::acc_vecs * lanes * 4, out_bytes = rows * lanes * 4;
  const std::int64_t workspace = 2 * out_bytes + (Rows::one_row_apart && p.rows == 1 ? 0 : strip_bytes + acc_bytes);
  const Scratch scratch(static_cast<std::size_t>(workspace * (serial ? 1 : parallel.threads())));
  const auto task = [&](std::int64_t t, int thread) {
    const std::int64_t row_block = t / tile_ranges, begin = (t % tile_ranges) * tiles_per_task,
                       end = std::min(tiles, begin + tiles_per_task);
    const std::int64_t m0 = row_block * rows, count = std::min(rows, p.rows - m0);
    for (std::int64_t tile = begin; tile < end; ++tile) {
      const Epilogue epilogue(a, tile);
      F32* out = at<F32>(scratch, workspace * thread);
      F32* up = at<F32>(scratch, workspace * thread + out_bytes);
      float* strip = at(scratch, workspace * thread + 2 * out_bytes);
      F32* acc = at<F32>(scratch, workspace * thread + 2 * out_bytes + strip_bytes);
      products(w, tile * tile_n, p, m0, count, strip, acc, out);
      if (a.gated) products(w, a.outputs() + tile * tile_n, p, m0, count, strip, acc, up);
      for (std::int64_t m = 0; m < count; ++m)
        epilogue(out[m], a.gated ? up[m] : F32{}, p.y_at[m0 + m], p.residual_at[m0 + m]);
    }
  };
  const std::int64_t row_blocks_used = (p.rows + rows - 1) / rows;  // row blocks that have rows after rounding up
  if (serial) {
    for (std::int64_t t = 0; t < row_blocks_used * tile_ranges; ++t) task(t, 0);
  } else {
    parallel.run(row_blocks_used * tile_ranges, task);
  }
}

// The whole product. Weights offers
//   rows()                               rows of W
//   pack_row(x, m, padded, buffer, to)   row m of x as fp32 in the order of the codes; buffer: `padded` floats
//   tile(tile, block, to)                converts 16 rows x 64 k of W to fp32
//   one_row(tile, x)                     products of sixteen rows of W with one row of x, as pack_row left it
//   Rows                                 a type that packs x and multiplies many rows: Fp32Rows or Bf16Rows
template <class Args, class Weights>
void multiply(const Parallel& parallel, const Args& a, std::int64_t k, const Weights& w) {
  const std::int64_t total = a.x.rows(), blocks = (k + block_k - 1) / block_k, x_row = Weights::Rows::row_size(blocks);
  if (total == 0 || a.y.last() == 0) return;
  const std::int64_t at_once =
      std::min(total, std::max<std::int64_t>(1, m_block_bytes / (std::max<std::int64_t>(x_row, 1) * 4)));
  const std::int64_t x_bytes = (at_once * x_row + Weights::Rows::padding) * 4,
                     workspace_bytes = Weights::Rows::pack_rows * blocks * block_k * 4 * parallel.threads();
  const Scratch buffer(static_cast<std::size_t>(x_bytes + workspace_bytes + at_once * 16));
  for (std::int64_t first = 0; first < total; first += at_once) {
    const MBlock p{first,
                   std::min(at_once, total - first),
                   blocks,
                   at(buffer, 0),
                   at<std::int64_t>(buffer, x_bytes + workspace_bytes),
                   at<std::int64_t>(buffer, x_bytes + workspace_bytes + at_once * 8)};
    pack_m_block(parallel, a, w, p, at(buffer, x_bytes));
    multiply_m_block(parallel, a, w, p);
  }
}

}  // namespace rooftile::cpu::ROOFTILE_ISA
