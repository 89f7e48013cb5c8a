// SPDX-License-Identifier: Apache-2.0
#include "cpu/w4_convert.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/half.h"
#include "core/w4_layout.h"
#include "core/w4_round.h"
#include "cpu/element.h"

namespace rooftile::cpu {
namespace {

template <class T>
T& at(const TensorView& t, std::int64_t i, std::int64_t j) {
  return t.as<T>()[i * t.stride[0] + j * t.stride[1]];
}

// Calls f with a zero of the offsets' width, uint8_t (zeros) or uint16_t (minima): what is moved is bits.
template <class F>
void with_offset_element(bool zeros, F&& f) {
  if (zeros) return f(std::uint8_t{});
  f(std::uint16_t{});
}

// Scales or offsets, canonical [N, groups] <-> packed [N / 16][groups][16].
template <class T>
void pack_groups(const TensorView& from, T* to) {
  const std::int64_t rows = from.shape[0], groups = from.shape[1];
  std::fill_n(to, w4_tiles_n(rows) * w4_tile_n * groups, T{});
  for (std::int64_t n = 0; n < rows; ++n)
    for (std::int64_t g = 0; g < groups; ++g) to[w4_scale_index(groups, n, g)] = at<T>(from, n, g);
}
template <class T>
void unpack_groups(const T* from, const TensorView& to) {
  const std::int64_t rows = to.shape[0], groups = to.shape[1];
  for (std::int64_t n = 0; n < rows; ++n)
    for (std::int64_t g = 0; g < groups; ++g) at<T>(to, n, g) = from[w4_scale_index(groups, n, g)];
}

}  // namespace

void w4_pack(const Parallel& parallel, const W4Arrays& canonical, const W4Arrays& packed, int bits) {
  const TensorView& codes = canonical.codes;
  const std::int64_t in_byte = 8 / bits, rows = codes.shape[0], columns = codes.shape[1] * in_byte;
  const std::int64_t tiles_k = w4_tiles_k(columns), tile_row = tiles_k * w4_tile_bytes(bits);
  parallel.run(w4_tiles_n(rows), [&](std::int64_t tile, int) {
    std::uint8_t* to = packed.codes.as<std::uint8_t>();
    std::fill_n(to + tile * tile_row, tile_row, std::uint8_t{0});
    for (std::int64_t n = tile * w4_tile_n; n < std::min(rows, (tile + 1) * w4_tile_n); ++n)
      for (std::int64_t k = 0; k < columns; ++k) {
        const std::int64_t index = w4_code_index(bits, tiles_k, n, k);
        to[index / in_byte] |= static_cast<std::uint8_t>(
            w4_code(&at<std::uint8_t>(codes, n, k / in_byte), bits, k % in_byte) << (bits * (index % in_byte)));
      }
  });
  pack_groups(canonical.scales, packed.scales.as<std::uint16_t>());
  if (canonical.offsets.given())
    with_offset_element(canonical.offsets.dtype == DType::u8,
                        [&](auto e) { pack_groups(canonical.offsets, packed.offsets.as<decltype(e)>()); });
}

void w4_unpack(const Parallel& parallel, const W4View& w, const W4Arrays& canonical) {
  const int in_byte = 8 / w.bits;
  const std::int64_t tiles_k = w4_tiles_k(w.k);
  parallel.run(w4_tiles_n(w.n), [&](std::int64_t tile, int) {
    for (std::int64_t n = tile * w4_tile_n; n < std::min(w.n, (tile + 1) * w4_tile_n); ++n)
      for (std::int64_t k = 0; k < w.k; k += in_byte) {
        int byte = 0;
        for (int i = 0; i < in_byte; ++i)
          byte |= w4_code(w.codes, w.bits, w4_code_index(w.bits, tiles_k, n, k + i)) << (w.bits * i);
        at<std::uint8_t>(canonical.codes, n, k / in_byte) = static_cast<std::uint8_t>(byte);
      }
  });
  unpack_groups(reinterpret_cast<const std::uint16_t*>(w.scales), canonical.scales);
  if (canonical.offsets.given())
    with_offset_element(w.zeros == W4Zeros::integer, [&](auto e) {
      unpack_groups(reinterpret_cast<const decltype(e)*>(w.offsets), canonical.offsets);
    });
}

void w4_quantize(const Parallel& parallel, const TensorView& weight, int bits, int group, const W4Arrays& canonical) {
  const auto& [codes, scales, minima] = canonical;
  const std::int64_t rows = scales.shape[0], groups = scales.shape[1];
  const DType dtype = scales.dtype;
  const bool affine = minima.given();
  parallel.run(rows, [&, &codes = codes, &scales = scales, &minima = minima](std::int64_t n, int) {
    std::vector<float> x(static_cast<std::size_t>(group));  // [group]
    for (std::int64_t g = 0; g < groups; ++g) {
      float low = std::numeric_limits<float>::infinity(), high = -low;
      bool finite = true;
      for (int i = 0; i < group; ++i) {
        const float v = read(weight, n * weight.stride[0] + (g * group + i) * weight.stride[1]);
        x[static_cast<std::size_t>(i)] = v;
        finite &= std::isfinite(v);
        low = std::min(low, v);
        high = std::max(high, v);
      }
      const W4Group rounded = W4Group::of(low, high, finite, affine, bits, dtype);
      write(scales, n * scales.stride[0] + g * scales.stride[1], rounded.scale);
      if (affine) write(minima, n * minima.stride[0] + g * minima.stride[1], rounded.minimum);
      const auto code = [&](int i) { return rounded.code(x[static_cast<std::size_t>(i)]); };
      for (int i = 0; i < group; i += 8 / bits)
        at<std::uint8_t>(codes, n, (g * group + i) / (8 / bits)) =
            static_cast<std::uint8_t>(bits == 4 ? code(i) | code(i + 1) << 4 : code(i));
    }
  });
}

void w4_dequantize(const Parallel& parallel, const W4View& w, const TensorView& to) {
  const std::int64_t groups = w.k / w.group, tiles_k = w4_tiles_k(w.k);
  const auto element = [&](const std::byte* p, std::int64_t i) {
    return w.scale_dtype == DType::f16 ? to_float(reinterpret_cast<const Half*>(p)[i])
                                       : to_float(reinterpret_cast<const BFloat16*>(p)[i]);
  };
  parallel.run(w.n, [&](std::int64_t n, int) {
    for (std::int64_t k = 0; k < w.k; ++k) {
      const std::int64_t group = w4_scale_index(groups, n, k / w.group);
      const int u = w4_code(w.codes, w.bits, w4_code_index(w.bits, tiles_k, n, k));
      const float scale = element(w.scales, group);
      float x = 0;
      switch (w.zeros) {
        case W4Zeros::symmetric:
          x = static_cast<float>(u - w4_zero_point(w.bits)) * scale;
          break;
        case W4Zeros::integer:
          x = static_cast<float>(u - std::to_integer<int>(w.offsets[group])) * scale;
          break;
        case W4Zeros::minima:
          x = static_cast<float>(u) * scale + element(w.offsets, group);
          break;
      }
      const std::int64_t column = w.perm ? w.perm[k] : k;
      write(to, n * to.stride[0] + column * to.stride[1], x);
    }
  });
}

}  // namespace rooftile::cpu
