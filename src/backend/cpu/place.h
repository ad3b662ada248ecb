// SPDX-License-Identifier: Apache-2.0
// What puts tokens into pages and pages into tiers: a prompt's layer, new tokens, tail pages that
// are sealed or dealt out anew.
// Thread: runs on a stream's thread and the pool's workers; a head's tables are one worker's.
#pragma once

#include <span>

#include "backend/kv_ops.h"
#include "base/thread_pool.h"
#include "spin/status.h"

namespace spin::backend::cpu {

// Errors of all: kInternal where a page has no place in a tier in which it must have one.
Status run_place(const PlaceItem& item, const TieredPoolRef& pool, base::ThreadPool& threads);
Status run_tail_append(const TensorRef& k,
                       const TensorRef& v,
                       std::span<const TailAppendItem> items,
                       const TieredPoolRef& pool,
                       base::ThreadPool& threads);
Status run_seal(std::span<const SealItem> items,
                const TieredPoolRef& pool,
                base::ThreadPool& threads);
Status run_repack_tail(const RepackTailItem& item,
                       const TieredPoolRef& pool,
                       base::ThreadPool& threads);

}  // namespace spin::backend::cpu
