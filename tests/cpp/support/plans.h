// SPDX-License-Identifier: Apache-2.0
// What tests of forced plans share.
#pragma once

#include <string>

#include "rooftile/error.h"

namespace rooftile::support {

// "value: ..." or "not_supported: ...": what a call throws; "" if it throws nothing.
template <class Call>
std::string error_of(const Call& call) {
  try {
    call();
  } catch (const Error& e) {
    return (e.kind() == ErrorKind::value ? "value: " : "not_supported: ") + std::string(e.what());
  }
  return "";
}

}  // namespace rooftile::support
