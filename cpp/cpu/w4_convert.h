// SPDX-License-Identifier: Apache-2.0
// Weights [N, K] of 4 or 8 bits between their canonical form, the packed layout and floating point, on the host.
// Arguments have been checked by ops. One compiled version for every CPU, so the bits are the same on all of them.
//   canonical: codes uint8 [N, K * bits / 8], scales and offsets [N, K / group]   packed: core/w4_layout.h, flat bytes
#pragma once

#include "core/op_args.h"
#include "core/parallel.h"

namespace rooftile::cpu {

void w4_pack(const Parallel&, const W4Arrays& canonical, const W4Arrays& packed, int bits);
void w4_unpack(const Parallel&, const W4View&, const W4Arrays& canonical);
// weight [N, K]. canonical.offsets: minima, or absent if symmetric.
void w4_quantize(const Parallel&, const TensorView& weight, int bits, int group, const W4Arrays& canonical);
// to [N, K]; the columns of a weight with perm return to their places.
void w4_dequantize(const Parallel&, const W4View&, const TensorView& to);

}  // namespace rooftile::cpu
