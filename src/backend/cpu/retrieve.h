// SPDX-License-Identifier: Apache-2.0
// Look-up, victims and fetches of one step, over the heads of all sequences.
// Thread: runs on a stream's thread and the pool's workers; a head is one worker's.
#pragma once

#include <span>

#include "backend/kv_ops.h"
#include "base/thread_pool.h"
#include "spin/status.h"

namespace spin::backend::cpu {

// Errors: kInternal if a head's cache entries cannot hold what is wanted.
Status run_retrieve(std::span<const RetrieveItem> items,
                    const TieredPoolRef& pool,
                    base::ThreadPool& threads);

}  // namespace spin::backend::cpu
