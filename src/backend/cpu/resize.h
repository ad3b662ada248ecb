// SPDX-License-Identifier: Apache-2.0
// Moves the resident pages of a layer's heads to leases of another size or form.
// Thread: runs on a stream's thread and the pool's workers; a head is one worker's.
#pragma once

#include "backend/kv_ops.h"
#include "base/thread_pool.h"
#include "spin/status.h"

namespace spin::backend::cpu {

// Errors: kInternal if `after` has more pinned pages or entries than there are slots for.
Status run_resize(const ResizeItem& item, const TieredPoolRef& pool, base::ThreadPool& threads);

}  // namespace spin::backend::cpu
