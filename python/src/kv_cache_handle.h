// SPDX-License-Identifier: Apache-2.0
// The cache argument of an op: a checked view of arrays that it keeps alive.
#pragma once

#include <nanobind/nanobind.h>

#include "rooftile/kv_cache.h"

namespace rooftile::python {

// The view behind a cache argument: a `_C.KvCache`, or an object that holds one as `_handle` (rooftile.KVCache and the
// others of rooftile.kv_cache). Anything else is a type error that names `op`. Valid as long as the argument lives.
const KvCacheView& cache_view(nanobind::handle cache, const char* op);

}  // namespace rooftile::python
