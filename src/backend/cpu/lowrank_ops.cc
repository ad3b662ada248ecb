// SPDX-License-Identifier: Apache-2.0
// Low-rank factors of keys on the CPU: a randomised range finder over the Gram matrix of the keys,
// and keys rebuilt from factors. Sums are chains in a fixed order (over tokens, over ranks), cut
// between threads by rows of the result, so that neither threads nor grouping change a bit.
// Thread: the stream's thread and the pool's workers.
#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

#include "backend/cpu/cpu_sparse_ops.h"
#include "backend/cpu/orthonormal.h"
#include "backend/cpu/packed_matrix.h"
#include "backend/cpu/rope_inverse.h"
#include "base/check.h"
#include "base/checked_math.h"
#include "base/counter_rng.h"

namespace spin::backend::cpu {
namespace {

using base::ceil_div;
using layout::KvGeometry;

constexpr int64_t kChunkTokens = 512;  // a chunk of a few hundred columns stays in the second cache
constexpr int64_t kMostBlockRows = 16;
constexpr uint64_t kStartSeed = 0x5350494E;  // of the fixed start matrix

int64_t padded(int64_t columns) { return ceil_div(columns, kPanelUnit) * kPanelUnit; }

// c [rows, cols] (+)= a [rows, k] b [k, cols]; a packed as [k][rows], rows at most a block.
void multiply(const KernelSet& kernels,
              const float* a,
              int64_t rows,
              const float* b,
              int64_t cols,
              int64_t k,
              bool add,
              float* c,
              int64_t c_stride) {
  for (int64_t j = 0; j < cols; j += kPanelCols) {
    kernels.matmul_f32.multiply(a, rows, b + j, cols, std::min(kPanelCols, cols - j), k, add, c + j,
                                c_stride, nullptr);
  }
}

class Factoring {
 public:
  Factoring(const FactorKeysItem& item,
            const RopeParams& rope,
            const KernelSet& kernels,
            base::ThreadPool& pool)
      : item_(item),
        rope_(rope),
        kernels_(kernels),
        pool_(pool),
        geometry_(item.tokens.geometry),
        tokens_(static_cast<int64_t>(item.tokens.tokens)),
        dim_(geometry_.head_dim),
        columns_(int64_t{geometry_.kv_heads} * dim_),
        width_(padded(columns_)),
        rank_(item.factors.rank),
        rank_width_(padded(rank_)),
        block_(kernels.matmul_f32.block_rows) {}

  Status run(WorkspacePool& workspace) {
    const int64_t per_thread = block_ * std::max(kChunkTokens, width_) + block_ * rank_width_;
    const int64_t floats = kChunkTokens * width_ + width_ * width_ + 2 * width_ * rank_width_ +
                           per_thread * pool_.threads();
    SPIN_ASSIGN_OR_RETURN(auto lease, workspace.take(static_cast<size_t>(floats) * sizeof(float)));
    keys_ = reinterpret_cast<float*>(lease.data());
    gram_ = keys_ + kChunkTokens * width_;
    basis_ = gram_ + width_ * width_;
    image_ = basis_ + width_ * rank_width_;
    scratch_ = image_ + width_ * rank_width_;
    scratch_floats_ = per_thread;
    std::fill_n(gram_, width_ * width_, 0.0f);
    for (int64_t first = 0; first < tokens_; first += kChunkTokens) add_to_gram(first);
    mirror_gram();
    find_basis();
    for (int64_t first = 0; first < tokens_; first += kChunkTokens) write_tokens(first);
    write_heads();
    return ok_status();
  }

 private:
  // Keys of tokens [first, first + count) turned back: keys_ [count, width_].
  int64_t load_chunk(int64_t first) {
    const int64_t count = std::min(kChunkTokens, tokens_ - first);
    pool_.parallel_for(static_cast<size_t>(count), [&](size_t i, uint32_t) {
      float cos[kLargestRopeDim / 2];
      float sin[kLargestRopeDim / 2];
      const auto token = static_cast<uint64_t>(first) + i;
      inverse_rope_table(kernels_, static_cast<uint32_t>(token), rope_, cos, sin);
      float* row = keys_ + static_cast<int64_t>(i) * width_;
      for (uint32_t head = 0; head < geometry_.kv_heads; ++head) {
        float* key = row + head * dim_;
        load_floats(item_.tokens.key(head, token), geometry_.dtype, dim_, key);
        kernels_.rope_head(key, cos, sin, dim_ / 2);
      }
      std::fill(row + columns_, row + width_, 0.0f);
    });
    return count;
  }

  float* scratch(uint32_t slot) const { return scratch_ + slot * scratch_floats_; }

  // The upper triangle, by whole panels.
  void add_to_gram(int64_t first) {
    const int64_t count = load_chunk(first);
    pool_.parallel_for(static_cast<size_t>(ceil_div(width_, block_)), [&](size_t i, uint32_t slot) {
      const int64_t row = static_cast<int64_t>(i) * block_;
      const int64_t rows = std::min(block_, width_ - row);
      float* a = scratch(slot);
      for (int64_t t = 0; t < count; ++t) {
        std::copy_n(keys_ + t * width_ + row, rows, a + t * rows);
      }
      for (int64_t j = row / kPanelCols * kPanelCols; j < width_; j += kPanelCols) {
        kernels_.matmul_f32.multiply(a, rows, keys_ + j, width_, std::min(kPanelCols, width_ - j),
                                     count, true, gram_ + row * width_ + j, width_, nullptr);
      }
    });
  }

  // Also scaled to a trace of about 1, so that powers neither overflow nor vanish.
  void mirror_gram() {
    double trace = 0;
    for (int64_t i = 0; i < width_; ++i) trace += gram_[i * width_ + i];
    const float scale = trace > 0 ? static_cast<float>(1 / trace) : 1.0f;
    for (int64_t i = 0; i < width_; ++i) {
      for (int64_t j = i; j < width_; ++j) {
        gram_[i * width_ + j] *= scale;
        gram_[j * width_ + i] = gram_[i * width_ + j];
      }
    }
  }

  // image = gram basis.
  void apply_gram() {
    pool_.parallel_for(static_cast<size_t>(ceil_div(width_, block_)), [&](size_t i, uint32_t slot) {
      const int64_t row = static_cast<int64_t>(i) * block_;
      const int64_t rows = std::min(block_, width_ - row);
      float* a = scratch(slot);
      kernels_.matmul_f32.pack_block(gram_ + row * width_, width_, rows, width_, a);
      multiply(kernels_, a, rows, basis_, rank_width_, width_, false, image_ + row * rank_width_,
               rank_width_);
    });
  }

  // basis_ [width_, rank_width_]: orthonormal columns, zeros in the padding.
  void find_basis() {
    std::fill_n(basis_, width_ * rank_width_, 0.0f);
    for (int64_t row = 0; row < columns_; ++row) {
      for (int64_t i = 0; i < rank_; ++i) {
        const auto at = static_cast<uint64_t>(row * rank_ + i);
        basis_[row * rank_width_ + i] =
            static_cast<float>(2 * base::counter_uniform(kStartSeed, 0, at) - 1);
      }
    }
    std::vector<double> y(static_cast<size_t>(columns_ * rank_));
    std::vector<double> reflectors(static_cast<size_t>((columns_ + 1) * rank_));
    for (uint32_t p = 0; p < std::max(1u, item_.power); ++p) {
      apply_gram();
      for (int64_t row = 0; row < columns_; ++row) {
        for (int64_t i = 0; i < rank_; ++i) {
          y[static_cast<size_t>(i * columns_ + row)] = image_[row * rank_width_ + i];
        }
      }
      orthonormalize(columns_, rank_, y, reflectors);
      for (int64_t row = 0; row < columns_; ++row) {
        for (int64_t i = 0; i < rank_; ++i) {
          basis_[row * rank_width_ + i] =
              static_cast<float>(y[static_cast<size_t>(i * columns_ + row)]);
        }
      }
    }
  }

  // token = keys basis.
  void write_tokens(int64_t first) {
    const int64_t count = load_chunk(first);
    const uint64_t row_bytes =
        static_cast<uint64_t>(rank_) * layout::dtype_bytes(item_.factors.dtype);
    pool_.parallel_for(static_cast<size_t>(ceil_div(count, block_)), [&](size_t i, uint32_t slot) {
      const int64_t row = static_cast<int64_t>(i) * block_;
      const int64_t rows = std::min(block_, count - row);
      float* a = scratch(slot);
      float* c = a + block_ * std::max(kChunkTokens, width_);
      kernels_.matmul_f32.pack_block(keys_ + row * width_, width_, rows, width_, a);
      multiply(kernels_, a, rows, basis_, rank_width_, width_, false, c, rank_width_);
      for (int64_t r = 0; r < rows; ++r) {
        store_floats(c + r * rank_width_, item_.factors.dtype, rank_,
                     static_cast<char*>(item_.factors.token) +
                         static_cast<uint64_t>(first + row + r) * row_bytes);
      }
    });
  }

  void write_heads() {
    std::vector<float> row(static_cast<size_t>(dim_));
    auto* out = static_cast<char*>(item_.factors.head);
    for (int64_t head = 0; head < int64_t{geometry_.kv_heads}; ++head) {
      for (int64_t i = 0; i < rank_; ++i) {
        for (int64_t d = 0; d < dim_; ++d) {
          row[static_cast<size_t>(d)] = basis_[(head * dim_ + d) * rank_width_ + i];
        }
        store_floats(row.data(), item_.factors.dtype, dim_, out);
        out += static_cast<uint64_t>(dim_) * layout::dtype_bytes(item_.factors.dtype);
      }
    }
  }

  const FactorKeysItem& item_;
  const RopeParams& rope_;
  const KernelSet& kernels_;
  base::ThreadPool& pool_;
  const KvGeometry& geometry_;
  const int64_t tokens_;
  const int64_t dim_;
  const int64_t columns_;  // of the key matrix
  const int64_t width_;    // columns_ padded
  const int64_t rank_;
  const int64_t rank_width_;  // rank_ padded
  const int64_t block_;       // rows of a product at once
  float* keys_ = nullptr;     // [kChunkTokens, width_]
  float* gram_ = nullptr;     // [width_, width_]
  float* basis_ = nullptr;    // [width_, rank_width_]
  float* image_ = nullptr;    // [width_, rank_width_]
  float* scratch_ = nullptr;  // [threads, scratch_floats_]
  int64_t scratch_floats_ = 0;
};

// Rebuilds keys of whole pages; one for both operations, so that both give the same bits.
class Rebuilding {
 public:
  Rebuilding(const KeyFactors& factors,
             const KvGeometry& geometry,
             const RopeParams& rope,
             const KernelSet& kernels)
      : factors_(factors),
        geometry_(geometry),
        rope_(rope),
        kernels_(kernels),
        dim_(geometry.head_dim),
        rank_(factors.rank),
        block_(kernels.matmul_f32.block_rows) {}

  static int64_t head_floats(const KeyFactors& factors, const KvGeometry& geometry) {
    return int64_t{factors.rank} * padded(geometry.head_dim);
  }
  // Scratch of page().
  static int64_t page_floats(const KeyFactors& factors, const KvGeometry& geometry) {
    return kMostBlockRows * (2 * int64_t{factors.rank} + padded(geometry.head_dim));
  }

  // The factors of one head as floats: [rank, padded head_dim].
  void load_head(uint32_t head, float* to) const {
    const int64_t width = padded(dim_);
    const uint64_t row_bytes = static_cast<uint64_t>(dim_) * layout::dtype_bytes(factors_.dtype);
    const char* from =
        static_cast<const char*>(factors_.head) + head * static_cast<uint64_t>(rank_) * row_bytes;
    for (int64_t i = 0; i < rank_; ++i) {
      load_floats(from, factors_.dtype, dim_, to);
      std::fill(to + dim_, to + width, 0.0f);
      to += width;
      from += row_bytes;
    }
  }

  // Keys of page `page` of a head whose factors are `head`, to the K plane at `keys`.
  void page(uint32_t page, const float* head, float* scratch, std::byte* keys) const {
    float cos[kLargestRopeDim / 2];
    float sin[kLargestRopeDim / 2];
    const int64_t width = padded(dim_);
    float* rows_in = scratch;  // [block_, rank]
    float* a = rows_in + block_ * rank_;
    float* c = a + block_ * rank_;
    const uint64_t row_bytes = static_cast<uint64_t>(rank_) * layout::dtype_bytes(factors_.dtype);
    const int64_t page_tokens = geometry_.page_tokens;
    for (int64_t first = 0; first < page_tokens; first += block_) {
      const int64_t rows = std::min(block_, page_tokens - first);
      const uint64_t token = uint64_t{page} * geometry_.page_tokens + static_cast<uint64_t>(first);
      load_floats(static_cast<const char*>(factors_.token) + token * row_bytes, factors_.dtype,
                  rows * rank_, rows_in);
      kernels_.matmul_f32.pack_block(rows_in, rank_, rows, rank_, a);
      multiply(kernels_, a, rows, head, width, rank_, false, c, width);
      for (int64_t r = 0; r < rows; ++r) {
        kernels_.rope_table(static_cast<uint32_t>(token + static_cast<uint64_t>(r)),
                            rope_.inv_freq.data(), dim_ / 2, rope_.attention_factor, cos, sin);
        kernels_.rope_head(c + r * width, cos, sin, dim_ / 2);
        store_floats(c + r * width, geometry_.dtype, dim_,
                     keys + static_cast<uint64_t>(first + r) * geometry_.row_bytes());
      }
    }
  }

 private:
  const KeyFactors& factors_;
  const KvGeometry& geometry_;
  const RopeParams& rope_;
  const KernelSet& kernels_;
  const int64_t dim_;
  const int64_t rank_;
  const int64_t block_;
};

void check_factors(const KeyFactors& factors, const KvGeometry& geometry, const RopeParams& rope) {
  SPIN_CHECK(geometry.head_dim > 0 && geometry.head_dim <= kLargestRopeDim);
  SPIN_CHECK(rope.inv_freq.size() * 2 == geometry.head_dim);
  SPIN_CHECK(factors.rank > 0);
  SPIN_CHECK(factors.rank <= uint64_t{geometry.kv_heads} * geometry.head_dim);
  SPIN_CHECK(factors.token != nullptr && factors.head != nullptr);
}

bool is_kept(const RebuildTokensItem& item, uint32_t head, uint32_t page) {
  if (item.kept.counts == nullptr) return false;
  const uint32_t* pages = item.kept.pages + uint64_t{head} * item.kept.stride;
  return std::binary_search(pages, pages + item.kept.counts[head], page);
}

}  // namespace

void CpuSparseOps::enqueue_factor_keys(const FactorKeysItem& item,
                                       const RopeParams& rope,
                                       StreamRef stream) {
  check_factors(item.factors, item.tokens.geometry, rope);
  stream.enqueue_task([this, item, rope]() -> Status {
    return Factoring(item, rope, kernels_, pool_).run(workspace_);
  });
}

void CpuSparseOps::enqueue_rebuild_tokens(const RebuildTokensItem& item,
                                          const RopeParams& rope,
                                          StreamRef stream) {
  const KvGeometry& g = item.tokens.geometry;
  check_factors(item.factors, g, rope);
  SPIN_CHECK(item.first_page <= item.end_page && item.base == item.tokens.base);
  SPIN_CHECK(uint64_t{item.end_page} * g.page_tokens <= item.tokens.tokens);
  SPIN_CHECK(kernels_.matmul_f32.block_rows <= kMostBlockRows);
  stream.enqueue_task([this, item, rope]() -> Status {
    const KvGeometry& geometry = item.tokens.geometry;
    const Rebuilding rebuilding(item.factors, geometry, rope, kernels_);
    const int64_t head_floats = Rebuilding::head_floats(item.factors, geometry);
    const int64_t page_floats = Rebuilding::page_floats(item.factors, geometry);
    const int64_t floats = head_floats * geometry.kv_heads + page_floats * pool_.threads();
    SPIN_ASSIGN_OR_RETURN(auto lease, workspace_.take(static_cast<size_t>(floats) * sizeof(float)));
    auto* heads = reinterpret_cast<float*>(lease.data());
    float* scratch = heads + head_floats * geometry.kv_heads;
    for (uint32_t head = 0; head < geometry.kv_heads; ++head) {
      rebuilding.load_head(head, heads + head * head_floats);
    }
    const uint32_t pages = item.end_page - item.first_page;
    pool_.parallel_for(pages, [&](size_t i, uint32_t slot) {
      const uint32_t page = item.first_page + static_cast<uint32_t>(i);
      for (uint32_t head = 0; head < geometry.kv_heads; ++head) {
        if (is_kept(item, head, page)) continue;
        const uint64_t at = item.tokens.slots[head * item.tokens.slot_stride + page];
        rebuilding.page(page, heads + head * head_floats, scratch + slot * page_floats,
                        item.base + at * geometry.page_bytes());
      }
    });
    return ok_status();
  });
}

void CpuSparseOps::enqueue_rebuild_pages(std::span<const RebuildPagesItem> items,
                                         const KvPoolRef& pool,
                                         const RopeParams& rope,
                                         StreamRef stream) {
  for (const RebuildPagesItem& item : items) check_factors(item.factors, pool.geometry, rope);
  SPIN_CHECK(kernels_.matmul_f32.block_rows <= kMostBlockRows);
  stream.enqueue_task([this, copies = std::vector(items.begin(), items.end()), pool,
                       rope]() -> Status {
    const KvGeometry& geometry = pool.geometry;
    int64_t floats = 0;
    for (const RebuildPagesItem& item : copies) {
      floats = std::max(floats, Rebuilding::head_floats(item.factors, geometry) +
                                    Rebuilding::page_floats(item.factors, geometry));
    }
    SPIN_ASSIGN_OR_RETURN(
        auto lease, workspace_.take(static_cast<size_t>(floats) * pool_.threads() * sizeof(float)));
    auto* memory = reinterpret_cast<float*>(lease.data());
    pool_.parallel_for(copies.size() * geometry.kv_heads, [&](size_t i, uint32_t slot) {
      const RebuildPagesItem& item = copies[i / geometry.kv_heads];
      const auto head = static_cast<uint32_t>(i % geometry.kv_heads);
      const uint64_t first = uint64_t{head} * item.list.stride;
      const uint32_t count = item.fetched_counts[head];
      if (count == 0) return;
      const Rebuilding rebuilding(item.factors, geometry, rope, kernels_);
      float* factors = memory + static_cast<int64_t>(slot) * floats;
      rebuilding.load_head(head, factors);
      float* scratch = factors + Rebuilding::head_floats(item.factors, geometry);
      for (uint32_t f = 0; f < count; ++f) {
        const uint64_t at = first + item.fetched[first + f];
        const uint32_t page = item.list.pages[at];
        if (page >= item.end_page) continue;
        rebuilding.page(
            page, factors, scratch,
            static_cast<std::byte*>(pool.base) + item.slots[at] * geometry.page_bytes());
      }
    });
    return ok_status();
  });
}

}  // namespace spin::backend::cpu
