// SPDX-License-Identifier: Apache-2.0
// The part of the backends' conformance suite about sparse selection: summaries, scores, ranking,
// lists of pages, estimation (backend/sparse_ops.h). Instantiated like OpsConformance.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backend/sparse_ops.h"
#include "layout/paged_tokens.h"
#include "tests/backend/ops_conformance.h"

namespace spin::testing {

struct SelectShape {
  uint32_t kv_heads = 1;
  uint32_t group = 1;
  uint32_t head_dim = 64;
  uint32_t page_tokens = 8;
  layout::DType dtype = layout::DType::kF32;

  layout::KvGeometry geometry() const { return {1, kv_heads, head_dim, page_tokens, dtype}; }
  std::string text() const;
};

// Keys of one sequence in scattered pages of a pool that holds NaN elsewhere.
struct PagedKeys {
  backend::Buffer pool;
  backend::Buffer slots;
  layout::PagedTokens tokens;
  Matrix keys;  // [tokens, kv_heads * head_dim], as stored
};

// Vectors [kv_heads, count, head_dim] in device memory, with room between the heads.
struct DeviceVectors {
  backend::Buffer buffer;
  backend::HeadVectors ref;
  Matrix values;  // [kv_heads * count, head_dim], as stored
};

class SparseOpsConformance : public OpsConformance {
 protected:
  backend::SparseOps& sparse() { return device_->sparse_ops(); }

  template <typename T>
  std::vector<T> read_back(const void* from, size_t count) {
    std::vector<T> out(count);
    stream_->enqueue_copy(out.data(), from, count * sizeof(T));
    EXPECT_TRUE(stream_->wait_idle().ok());
    return out;
  }
  template <typename T>
  backend::Buffer filled(size_t count, T value) {
    const std::vector<T> values(count, value);
    return upload(std::span<const T>(values));
  }

  PagedKeys make_keys(const SelectShape& shape, const Matrix& keys);
  DeviceVectors make_vectors(const SelectShape& shape, uint32_t count, uint64_t seed);
  DeviceVectors make_vectors(const SelectShape& shape, uint32_t count, const Matrix& values);
  // Room for vectors; all elements are `fill` before.
  DeviceVectors empty_vectors(const SelectShape& shape, uint32_t count, float fill);
  // [kv_heads * count, head_dim]
  Matrix read_vectors(const SelectShape& shape, const DeviceVectors& vectors, uint32_t count);
};

struct ScoreCase {
  SelectShape shape;
  uint32_t first = 0;
  uint32_t count = 0;
  uint32_t keys_per_partition = 1;
  bool holes = false;  // every third partition has no size
  bool boxes = false;
  backend::Aggregation aggregation = backend::Aggregation::kSoftmaxMax;
};

// One product q . key times scale, or the bound of a box.
Bounded reference_score(
    const float* q, const float* low, const float* high, uint32_t head_dim, float scale);

class ScoreConformance : public SparseOpsConformance {
 protected:
  void check(const ScoreCase& c);
};

class RankConformance : public SparseOpsConformance {
 protected:
  void check(const std::vector<float>& scores, uint32_t most, float least, bool ranked);
};

class ListConformance : public SparseOpsConformance {
 protected:
  struct List {
    backend::Buffer pages;
    backend::Buffer tokens;
    backend::Buffer counts;
    backend::Buffer attended;
    layout::PageList ref;
  };
  // Everything holds a pattern; 1000 tokens were attended before.
  List empty_list(uint32_t heads, uint32_t stride);
  void expect_list(const List& list,
                   uint32_t head,
                   const std::vector<uint32_t>& pages,
                   const std::vector<uint8_t>& tokens);
};

}  // namespace spin::testing
