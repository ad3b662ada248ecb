// SPDX-License-Identifier: Apache-2.0
// The worked example of docs/guides/add_an_algorithm.md: the first page, the newest tokens and
// every n-th page between them, another n-th in every step. It has no use but to be short and
// complete. Thread: as sparse/sparse_algorithm.h says.
#pragma once

#include <memory>

#include "sparse/registry.h"

namespace spin::testing {

// Options: stride (every so many pages, 1 to 64), recent (newest tokens always attended to).
Result<std::unique_ptr<sparse::SparseAlgorithm>> create_strided_pages(
    const sparse::SparseSpec& spec, const sparse::AlgorithmContext& context);

// The line that src/sparse/registry.cc would have.
inline constexpr sparse::RegisteredAlgorithm kStridedPages = {
    "strided", "recent tokens and every n-th page", create_strided_pages};

}  // namespace spin::testing
