// SPDX-License-Identifier: Apache-2.0
// A partition is a page; its sketches are made when it leaves the tail.
//
// Offsets. Keys are sketched relative to a mean, and to make the index the same for a prompt as for
// tokens that come one by one, the mean may only depend on tokens that are there in both cases:
//
//   tokens [0, split)    the mean of the first local + P tokens; whenever the first page leaves the
//                        tail, the tail (or the prompt) holds these
//   tokens [split, ...)  the mean of tokens [0, split), gathered page by page as they leave
//
// Scores include the offset's part q . mu, so tokens of both kinds compare.
#include "sparse/sketch.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "backend/sketch_ops.h"
#include "base/checked_math.h"
#include "sparse/range_algorithm.h"

namespace spin::sparse {
namespace {

using backend::Plane;
using backend::SketchArray;

struct SketchOptions {
  uint32_t bits = 2;    // of keys
  bool values = false;  // 2 bits of values, too
  uint64_t split = 0;
};

class Sketch final : public RangeAlgorithm {
 public:
  Sketch(const AlgorithmContext& context,
         Descriptor descriptor,
         const RangePartition& partition,
         const TokenBudget& budget,
         const SketchOptions& options)
      : RangeAlgorithm(context, std::move(descriptor), partition, budget), options_(options) {}

  void enqueue_estimate(backend::TensorRef q,
                        std::span<const EstimateItem> items,
                        uint32_t layer,
                        backend::StreamRef stream) const override {
    std::vector<backend::EstimateSketchItem> estimates;
    for (const EstimateItem& item : items) {
      const auto& index = static_cast<const RangeIndex&>(*item.index);
      backend::EstimateSketchItem estimate;
      estimate.row = item.row;
      estimate.keys = array(index, layer, Plane::kKeys);
      estimate.values = array(index, layer, Plane::kValues);
      estimate.tokens = item.tail_first_token;
      estimate.list = item.list;
      estimate.part = item.part;
      estimate.log_sum_exp = item.log_sum_exp;
      estimates.push_back(estimate);
    }
    ops().enqueue_estimate_sketch(q, estimates, shape().geometry, shape().scale, stream);
  }

 private:
  uint64_t summary_bytes(uint64_t most_partitions) const override {
    uint64_t bytes = plane_bytes(most_partitions, Plane::kKeys).total();
    if (options_.values) bytes += plane_bytes(most_partitions, Plane::kValues).total();
    return bytes * indexed_layers();
  }

  void enqueue_summaries(RangeIndex& index,
                         uint32_t layer,
                         const layout::PagedTokens& tokens,
                         uint32_t first,
                         uint32_t count,
                         uint32_t first_id,
                         backend::StreamRef stream) const override {
    enqueue_plane(array(index, layer, Plane::kKeys), Plane::kKeys, tokens, first, count, first_id,
                  stream);
    if (!options_.values) return;
    enqueue_plane(array(index, layer, Plane::kValues), Plane::kValues, tokens, first, count,
                  first_id, stream);
  }

  void enqueue_plane(const SketchArray& out,
                     Plane plane,
                     const layout::PagedTokens& tokens,
                     uint32_t first,
                     uint32_t count,
                     uint32_t first_id,
                     backend::StreamRef stream) const {
    const uint64_t page = partition().partition_tokens();
    const uint64_t begin = first_id * page;  // positions
    const uint64_t end = begin + count * page;
    backend::SketchMeanItem mean;
    mean.tokens = tokens;
    mean.plane = plane;
    mean.first = first * page;
    mean.begin = begin == 0;
    if (begin == 0) {
      mean.count = partition().local_tokens() + page;
      mean.factor = 1.0f / static_cast<float>(mean.count);
      mean.mean = out.means;
      ops().enqueue_sketch_mean({&mean, 1}, stream);
    }
    if (begin < out.split) {
      const uint64_t gathered = std::min(end, out.split);
      mean.count = gathered - begin;
      mean.factor = gathered == out.split ? 1.0f / static_cast<float>(out.split) : 0.0f;
      mean.mean = out.means + uint64_t{shape().geometry.kv_heads} * shape().geometry.head_dim;
      ops().enqueue_sketch_mean({&mean, 1}, stream);
    }
    backend::EncodeSketchItem item;
    item.tokens = tokens;
    item.first = first * page;
    item.count = end - begin;
    item.out_first = begin;
    item.out = out;
    item.plane = plane;
    ops().enqueue_encode_sketch({&item, 1}, stream);
  }

  void enqueue_scores(backend::TensorRef q,
                      std::span<const RangeScores> rows,
                      uint32_t layer,
                      backend::StreamRef stream) const override {
    std::vector<backend::ScoreSketchItem> items;
    for (const RangeScores& row : rows) {
      backend::ScoreSketchItem item;
      item.row = row.row;
      item.keys = array(*row.index, layer, Plane::kKeys);
      item.first = row.first;
      item.count = row.count;
      item.scores = row.scores;
      item.score_stride = row.score_stride;
      items.push_back(item);
    }
    ops().enqueue_score_sketch(q, items, shape().geometry, shape().scale, stream);
  }

  // Bytes of the parts of one layer's sketches of one plane.
  struct PlaneBytes {
    uint64_t codes = 0;
    uint64_t scales = 0;
    uint64_t means = 0;
    uint64_t total() const { return codes + scales + means; }
  };
  uint64_t capacity(uint64_t most_partitions) const {
    constexpr uint64_t kBlock = backend::kSketchBlockTokens;
    return base::ceil_div(most_partitions * partition().partition_tokens(), kBlock) * kBlock;
  }
  uint32_t bits(Plane plane) const { return plane == Plane::kKeys ? options_.bits : 2; }
  PlaneBytes plane_bytes(uint64_t most_partitions, Plane plane) const {
    const layout::KvGeometry& g = shape().geometry;
    const uint64_t tokens = g.kv_heads * capacity(most_partitions);
    const auto aligned = [](uint64_t size) { return base::ceil_div<uint64_t>(size, 64) * 64; };
    PlaneBytes bytes;
    bytes.codes = aligned(tokens * backend::sketch_words(g.head_dim, bits(plane)) * 4);
    bytes.scales = aligned(tokens * sizeof(base::Fp16));
    bytes.means = aligned(2 * uint64_t{g.kv_heads} * g.head_dim * sizeof(float));
    return bytes;
  }
  SketchArray array(const RangeIndex& index, uint32_t layer, Plane plane) const {
    const PlaneBytes bytes = plane_bytes(index.most_partitions(), plane);
    std::byte* base = index.summaries() + indexed_layer(layer) * bytes.total();
    if (plane == Plane::kValues) {
      base += plane_bytes(index.most_partitions(), Plane::kKeys).total() * indexed_layers();
    }
    SketchArray out;
    out.codes = reinterpret_cast<uint32_t*>(base);
    out.scales = reinterpret_cast<base::Fp16*>(base + bytes.codes);
    out.means = reinterpret_cast<float*>(base + bytes.codes + bytes.scales);
    out.capacity = capacity(index.most_partitions());
    out.split = options_.split;
    out.bits = bits(plane);
    return out;
  }

  const SketchOptions options_;
};

}  // namespace

Result<std::unique_ptr<SparseAlgorithm>> create_sketch(const SparseSpec& spec,
                                                       const AlgorithmContext& context) {
  SPIN_RETURN_IF_ERROR(check_shape(spec.name, context.shape));
  OptionReader reader(spec);
  const TokenBudget budget = reader.budget("budget", {128, 0});
  const ZoneOptions zones = read_zones(reader, {4, 64});
  constexpr std::string_view kBits[] = {"1", "2", "4"};
  constexpr std::string_view kValueBits[] = {"0", "2"};
  SketchOptions options;
  options.bits = static_cast<uint32_t>(reader.choice("bits", "2", kBits)[0] - '0');
  options.values = reader.choice("values", "0", kValueBits) != "0";
  options.split = reader.integer("offset", 1024, 16, uint64_t{1} << 20);
  SPIN_RETURN_IF_ERROR(reader.finish());
  if (options.split % backend::kSketchBlockTokens != 0) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("{}: offset must be a multiple of {}, found {}", spec.name,
                              backend::kSketchBlockTokens, options.split));
  }
  RangeSettings settings;
  settings.page_tokens = context.shape.geometry.page_tokens;
  settings.partition_tokens = settings.page_tokens;
  settings.sink_tokens = zones.sink_tokens;
  settings.local_tokens = zones.local_tokens;
  Descriptor descriptor;
  descriptor.name = spec.name;
  descriptor.settings = reader.resolved();
  descriptor.estimates = options.values;
  return std::unique_ptr<SparseAlgorithm>(std::make_unique<Sketch>(
      context, std::move(descriptor), RangePartition(settings), budget, options));
}

}  // namespace spin::sparse
