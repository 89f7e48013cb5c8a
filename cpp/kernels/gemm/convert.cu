// SPDX-License-Identifier: Apache-2.0
// Conversions of a weight of 4 or 8 bits on the device: canonical <-> packed layout, quantise, dequantise. The same
// bits as on the CPU: rounding has one definition (core/w4_round.h), and no fused multiply-add can change a result (a
// code times a scale is exact).
//   codes [N, K / 2], in 8 bits [N, K]   scales, offsets [N, groups], any strides   packed layout: core/w4_layout.h
// A thread writes one element (a 32-bit word of codes, a byte, a scale; quantize: a warp rounds one group), so writes
// are coalesced and reads gathered. Bandwidth is the roof; once a weight.
#include <cstddef>
#include <type_traits>

#include "core/w4_layout.h"
#include "core/w4_round.h"
#include "kernels/backend.h"
#include "kernels/launch.h"
#include "tile/copy.cuh"

namespace rooftile::gpu {
namespace {

constexpr int threads = 256;

__device__ std::int64_t thread_index() { return static_cast<std::int64_t>(blockIdx.x) * threads + threadIdx.x; }

void launch_over(const DeviceScope& scope, std::int64_t elements, auto kernel, const auto& params) {
  scope.launch(kernel, (elements + threads - 1) / threads, threads, 0, params);
}

struct Matrix {
  void* data;
  std::int64_t rows, columns, row_stride, column_stride;
  explicit Matrix(const TensorView& t)
      : data(t.data), rows(t.shape[0]), columns(t.shape[1]), row_stride(t.stride[0]), column_stride(t.stride[1]) {}
  template <class T>
  __device__ T& at(std::int64_t i, std::int64_t j) const {
    return static_cast<T*>(data)[i * row_stride + j * column_stride];
  }
};

// ---- canonical <-> packed layout ----------------------------------------------------------------

struct PackParams {
  Matrix canonical;     // [N, bytes of K codes]
  std::uint8_t* codes;  // [N / 16][K / 64] tiles
  int bits;
  ROOFTILE_HD int in_byte() const { return 8 / bits; }
  ROOFTILE_HD std::int64_t k() const { return canonical.columns * in_byte(); }
};

// A thread packs one 32-bit word.
__global__ void __launch_bounds__(threads) pack_codes(const __grid_constant__ PackParams p) {
  const std::int64_t tiles_k = w4_tiles_k(p.k()), index = thread_index();
  const int words = w4_tile_bytes(p.bits) / 4, in_word = 32 / p.bits;
  if (index >= w4_tiles_n(p.canonical.rows) * tiles_k * words) return;
  const std::int64_t tile = index / words, tile_n = tile / tiles_k, tile_k = tile - tile_n * tiles_k;
  std::uint32_t packed = 0;
  for (int i = 0; i < in_word; ++i) {
    const W4Element at = w4_element_of_tile(p.bits, static_cast<int>(index % words) * in_word + i);
    const std::int64_t n = tile_n * w4_tile_n + at.n, k = tile_k * w4_tile_k + at.k;
    if (n >= p.canonical.rows || k >= p.k()) continue;
    const int code = w4_code(&p.canonical.at<std::uint8_t>(n, k / p.in_byte()), p.bits, k % p.in_byte());
    packed |= static_cast<std::uint32_t>(code) << (p.bits * i);
  }
  tile::store_vec_at(p.codes + index * 4, packed);
}

__global__ void __launch_bounds__(threads) unpack_codes(const __grid_constant__ PackParams p) {
  const std::int64_t index = thread_index();
  if (index >= p.canonical.rows * p.canonical.columns) return;
  const std::int64_t n = index / p.canonical.columns, column = index - n * p.canonical.columns,
                     tiles_k = w4_tiles_k(p.k());
  int byte = 0;
  for (int i = 0; i < p.in_byte(); ++i)
    byte |= w4_code(p.codes, p.bits, w4_code_index(p.bits, tiles_k, n, column * p.in_byte() + i)) << (p.bits * i);
  p.canonical.at<std::uint8_t>(n, column) = static_cast<std::uint8_t>(byte);
}

struct GroupsParams {
  Matrix canonical;  // [N, groups]
  void* flat;        // [N / 16][group][16]
};

template <class T>
__global__ void __launch_bounds__(threads) pack_groups(const __grid_constant__ GroupsParams p) {
  const std::int64_t index = thread_index(), groups = p.canonical.columns;
  if (index >= w4_tiles_n(p.canonical.rows) * w4_tile_n * groups) return;
  const std::int64_t group = index / w4_tile_n % groups,
                     n = index / (w4_tile_n * groups) * w4_tile_n + index % w4_tile_n;
  static_cast<T*>(p.flat)[index] = n < p.canonical.rows ? p.canonical.at<T>(n, group) : T{};
}
template <class T>
__global__ void __launch_bounds__(threads) unpack_groups(const __grid_constant__ GroupsParams p) {
  const std::int64_t index = thread_index(), groups = p.canonical.columns;
  if (index >= p.canonical.rows * groups) return;
  const std::int64_t n = index / groups, group = index - n * groups;
  p.canonical.at<T>(n, group) = static_cast<const T*>(p.flat)[w4_scale_index(groups, n, group)];
}

void launch_groups(const DeviceScope& scope, const TensorView& canonical, void* flat, bool pack) {
  const GroupsParams p{Matrix(canonical), flat};
  const bool bytes = canonical.dtype == DType::u8;
  if (pack) {
    launch_over(scope, w4_tiles_n(p.canonical.rows) * w4_tile_n * p.canonical.columns,
                bytes ? pack_groups<std::uint8_t> : pack_groups<std::uint16_t>, p);
  } else {
    launch_over(scope, p.canonical.rows * p.canonical.columns,
                bytes ? unpack_groups<std::uint8_t> : unpack_groups<std::uint16_t>, p);
  }
}

// ---- quantisation -------------------------------------------------------------------------------

struct QuantizeParams {
  Matrix weight;                 // [N, K]
  Matrix codes, scales, minima;  // [N, bytes of K codes], [N, groups]; minima without data: symmetric
  int bits, group;
};

template <class T>
__device__ void store_as(const Matrix& to, std::int64_t i, std::int64_t j, float x) {
  to.at<T>(i, j) = from_float<T>(x);
}

// A warp rounds one group.
template <class T, class Scale>
__global__ void __launch_bounds__(threads) quantize(const __grid_constant__ QuantizeParams p) {
  const std::int64_t index = thread_index() / 32, groups = p.scales.columns;
  if (index >= p.scales.rows * groups) return;
  const std::int64_t n = index / groups, group = index - n * groups, k0 = group * p.group;
  const int lane = threadIdx.x % 32;
  const auto value = [&](int i) { return to_float(p.weight.at<T>(n, k0 + i)); };

  float low = INFINITY, high = -INFINITY;
  bool finite = true;
  for (int i = lane; i < p.group; i += 32) {
    const float x = value(i);
    finite &= x - x == 0;
    low = fminf(low, x);
    high = fmaxf(high, x);
  }
  for (int step = 16; step > 0; step /= 2) {
    low = fminf(low, __shfl_xor_sync(0xffffffffu, low, step));
    high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, step));
  }
  finite = __all_sync(0xffffffffu, finite);
  // a minimum of 0 takes the sign of the first zero of the group, as in a loop over the elements
  if (low == 0) {
    for (int i = 0; i < p.group; i += 32) {
      const float x = i + lane < p.group ? value(i + lane) : 1.0f;
      const unsigned zeros = __ballot_sync(0xffffffffu, x == 0);
      if (zeros == 0) continue;
      low = __shfl_sync(0xffffffffu, x, __ffs(zeros) - 1);
      break;
    }
    if (high == 0) high = low;
  }

  const bool affine = p.minima.data;
  const DType dtype = std::is_same_v<Scale, Half> ? DType::f16 : DType::bf16;
  const W4Group rounded = W4Group::of(low, high, finite, affine, p.bits, dtype);
  if (lane == 0) {
    store_as<Scale>(p.scales, n, group, rounded.scale);
    if (affine) store_as<Scale>(p.minima, n, group, rounded.minimum);
  }
  const int in_byte = 8 / p.bits;
  for (int i = in_byte * lane; i < p.group; i += in_byte * 32) {
    const int first = rounded.code(value(i)), byte = in_byte == 1 ? first : first | rounded.code(value(i + 1)) << 4;
    p.codes.at<std::uint8_t>(n, (k0 + i) / in_byte) = static_cast<std::uint8_t>(byte);
  }
}

// ---- dequantisation -----------------------------------------------------------------------------

struct DequantizeParams {
  W4View w;
  Matrix to;  // [N, K]
};

__device__ float group_value(const W4View& w, const std::byte* data, std::int64_t at) {
  return w.scale_dtype == DType::f16 ? to_float(tile::load_vec_at<Half>(data + 2 * at))
                                     : to_float(tile::load_vec_at<BFloat16>(data + 2 * at));
}

template <class T>
__global__ void __launch_bounds__(threads) dequantize(const __grid_constant__ DequantizeParams p) {
  const W4View& w = p.w;
  const std::int64_t index = thread_index();
  if (index >= w.n * w.k) return;
  const std::int64_t n = index / w.k, k = index - n * w.k;
  const std::int64_t at = w4_scale_index(w.k / w.group, n, k / w.group);
  const int u = w4_code(w.codes, w.bits, w4_code_index(w.bits, w4_tiles_k(w.k), n, k));
  const float scale = group_value(w, w.scales, at);
  float x = 0;
  switch (w.zeros) {
    case W4Zeros::symmetric:
      x = static_cast<float>(u - w4_zero_point(w.bits)) * scale;
      break;
    case W4Zeros::integer:
      x = static_cast<float>(u - static_cast<int>(w.offsets[at])) * scale;
      break;
    case W4Zeros::minima:
      x = __fadd_rn(__fmul_rn(static_cast<float>(u), scale), group_value(w, w.offsets, at));
      break;
  }
  const std::int64_t column = w.perm ? w.perm[k] : k;
  if (column >= 0 && column < w.k) store_as<T>(p.to, n, column, x);
}

// Calls f with a value of the host's element type, whose conversions give the same bits on host and device.
void with_element(DType t, auto&& f) {
  switch (t) {
    case DType::f16:
      return f(Half{});
    case DType::bf16:
      return f(BFloat16{});
    default:
      return f(float{});
  }
}

}  // namespace

void w4_pack(const char* op, const Context& ctx, const W4Arrays& canonical, const W4Arrays& packed, int bits) {
  const DeviceScope scope(op, ctx);
  const PackParams codes{Matrix(canonical.codes), packed.codes.as<std::uint8_t>(), bits};
  launch_over(scope, packed.codes.numel() / 4, pack_codes, codes);
  launch_groups(scope, canonical.scales, packed.scales.data, true);
  if (canonical.offsets.given()) launch_groups(scope, canonical.offsets, packed.offsets.data, true);
}

void w4_unpack(const char* op, const Context& ctx, const W4View& w, const W4Arrays& canonical) {
  const DeviceScope scope(op, ctx);
  launch_over(scope, canonical.codes.numel(), unpack_codes,
              PackParams{Matrix(canonical.codes), const_cast<std::uint8_t*>(w.codes), w.bits});
  launch_groups(scope, canonical.scales, const_cast<std::byte*>(w.scales), false);
  if (canonical.offsets.given()) launch_groups(scope, canonical.offsets, const_cast<std::byte*>(w.offsets), false);
}

void w4_quantize(const char* op, const Context& ctx, const TensorView& weight, int bits, int group,
                 const W4Arrays& canonical) {
  const DeviceScope scope(op, ctx);
  const QuantizeParams p{
      Matrix(weight), Matrix(canonical.codes), Matrix(canonical.scales), Matrix(canonical.offsets), bits, group};
  with_element(weight.dtype, [&](auto element) {
    using T = decltype(element);
    launch_over(scope, canonical.scales.numel() * 32,
                canonical.scales.dtype == DType::f16 ? quantize<T, Half> : quantize<T, BFloat16>, p);
  });
}

void w4_dequantize(const char* op, const Context& ctx, const W4View& w, const TensorView& to) {
  const DeviceScope scope(op, ctx);
  with_element(to.dtype, [&](auto element) {
    launch_over(scope, w.n * w.k, dequantize<decltype(element)>, DequantizeParams{w, Matrix(to)});
  });
}

}  // namespace rooftile::gpu
