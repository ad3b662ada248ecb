// SPDX-License-Identifier: Apache-2.0
// What every backend's sketch operations must do (backend/sketch_ops.h), against the definitions
// written down in double. Instantiated as OpsConformance is. All memory is read back by copies.
#pragma once

#include <cstdint>
#include <vector>

#include "backend/sketch_ops.h"
#include "backend/sparse_ops.h"
#include "layout/kv_geometry.h"
#include "tests/backend/ops_conformance.h"

namespace spin::testing {

struct SketchShape {
  uint32_t kv_heads = 2;
  uint32_t group = 2;
  uint32_t head_dim = 64;
  uint32_t page_tokens = 8;
  uint32_t bits = 2;
  layout::DType dtype = layout::DType::kF32;
};

class SketchConformance : public OpsConformance {
 protected:
  // Sketches of one plane on the device and, after read(), on the host.
  struct Sketches {
    backend::Buffer memory;
    backend::SketchArray array;
    std::vector<uint32_t> codes;
    std::vector<base::Fp16> scales;
    std::vector<float> means;

    const float* mean(uint32_t head, uint64_t token, const SketchShape& shape) const {
      return &means[((token < array.split ? 0 : shape.kv_heads) + head) * shape.head_dim];
    }
  };

  // Random keys and values of `tokens` tokens in pages.
  void make_tokens(const SketchShape& shape, uint64_t tokens, uint64_t seed);
  // Requires: tokens lie on the device.
  void put_tokens();
  Sketches make_sketches(uint64_t capacity, uint32_t bits, uint64_t split);
  // The first mean is that of tokens [0, first), the second one that of tokens [0, split).
  void set_means(Sketches& out, backend::Plane plane, uint64_t first);
  void encode(Sketches& out, backend::Plane plane, uint64_t first, uint64_t count);
  void read(Sketches& sketches);

  float& element(backend::Plane plane, uint32_t head, uint64_t token, uint32_t d);
  // Level of a dimension, from the codes read back.
  double level(const Sketches& s, uint32_t head, uint64_t token, uint32_t d) const;
  double scale_of(const Sketches& s, uint32_t head, uint64_t token) const;
  // H (x - mean) in double.
  std::vector<double> rotated(const float* x, const float* mean) const;
  // Scores by the definition out of the codes read back, and how far they may be off.
  std::vector<Bounded> token_scores(
      const Sketches& keys, const float* q, uint32_t head, uint64_t tokens, float scale) const;

  SketchShape shape_;
  layout::KvGeometry geometry_;
  uint64_t tokens_ = 0;
  std::vector<float> planes_[2];  // [kv_heads, tokens, head_dim], as stored
  backend::Buffer pool_;
  backend::Buffer slots_;
  layout::PagedTokens paged_;
};

}  // namespace spin::testing
