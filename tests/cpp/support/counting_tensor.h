// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cute/tensor.hpp>

namespace rooftile {

// A tensor whose elements are their own offsets.
template <class Layout>
auto counting_tensor(const Layout& layout) {
  return cute::make_tensor(cute::counting_iterator<int>(0), layout);
}

}  // namespace rooftile
