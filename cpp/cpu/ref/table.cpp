// SPDX-License-Identifier: Apache-2.0
#include "cpu/ref/kernels_ref.h"

namespace rooftile::cpu {

const Kernels& reference_kernels() {
  static const Kernels table{
      "reference",
      reference::decode_attention,
      reference::prefill_attention,
      reference::merge_attention,
      reference::kv_append,
      reference::w4a16_matmul,
      reference::linear,
      reference::norm,
      reference::embedding,
      reference::rope,
      reference::gated,
      reference::softmax,
      reference::sample,
  };
  return table;
}

}  // namespace rooftile::cpu
