// SPDX-License-Identifier: Apache-2.0
// Transposes 16 x 16 words of 32 bits. Include isa.h and vec.h first.
#pragma once

namespace rooftile::cpu::ROOFTILE_ISA {

// to [16][to_stride] = from [16][from_stride] transposed.
ROOFTILE_INLINE void transpose16(const float* from, int from_stride, float* to, int to_stride) {
#ifdef ROOFTILE_AVX512
  __m512 a[16], b[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_ps(from + i * from_stride);
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    b[2 * i] = _mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]);
    b[2 * i + 1] = _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)  // rows 4 i .. 4 i + 3: a[4 i + j] has column 4 * lane + j of the four
#pragma GCC unroll 2
    for (int z = 0; z < 2; ++z) {
      const __m512d x = _mm512_castps_pd(b[4 * i + z]), y = _mm512_castps_pd(b[4 * i + 2 + z]);
      a[4 * i + 2 * z] = _mm512_castpd_ps(_mm512_unpacklo_pd(x, y));
      a[4 * i + 2 * z + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(x, y));
    }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m512 low01 = _mm512_shuffle_f32x4(a[j], a[4 + j], 0x44),
                 high01 = _mm512_shuffle_f32x4(a[j], a[4 + j], 0xee);
    const __m512 low23 = _mm512_shuffle_f32x4(a[8 + j], a[12 + j], 0x44),
                 high23 = _mm512_shuffle_f32x4(a[8 + j], a[12 + j], 0xee);
    _mm512_storeu_ps(to + j * to_stride, _mm512_shuffle_f32x4(low01, low23, 0x88));
    _mm512_storeu_ps(to + (4 + j) * to_stride, _mm512_shuffle_f32x4(low01, low23, 0xdd));
    _mm512_storeu_ps(to + (8 + j) * to_stride, _mm512_shuffle_f32x4(high01, high23, 0x88));
    _mm512_storeu_ps(to + (12 + j) * to_stride, _mm512_shuffle_f32x4(high01, high23, 0xdd));
  }
#else
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 16; ++j) to[j * to_stride + i] = from[i * from_stride + j];
#endif
}

}  // namespace rooftile::cpu::ROOFTILE_ISA
