// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <filesystem>
#include <initializer_list>
#include <memory>
#include <utility>

#include <fmt/format.h>

#include "backend/cpu/cpu_device.h"
#include "base/checked_math.h"
#include "io/text_file.h"
#include "kv/table_bytes.h"
#include "layout/head_pages.h"
#include "layout/residency.h"
#include "model/decoder.h"
#include "model/load.h"
#include "model/memory_plan.h"
#include "model/model_config.h"
#include "model/rope.h"
#include "sparse/registry.h"
#include "sparse/sparse_sequence.h"
#include "spin/plan.h"

namespace spin::engine {
namespace {

// What a flat layout must hold ready for each partition when partitions may have any size: room for
// so many pages (clusters of 16 tokens on average, eight times that at worst).
constexpr uint64_t kWorstPagesPerPartition = 16;
constexpr uint64_t kPartitionRecordBytes = 16;  // first page, pages, fill, flags
constexpr uint64_t kPartitionOffsetBytes = 8;
constexpr uint64_t kPageEntryBytes = 8;

constexpr uint64_t kMaxConfigBytes = 1 << 20;

// Weights that are not there: shapes are enough for planning.
class AbsentWeights final : public backend::SideWeights {
 public:
  bool contains(std::string_view) const override { return true; }
  Result<std::vector<float>> read(std::string_view, std::span<const int64_t> shape) const override {
    uint64_t size = 1;
    for (const int64_t extent : shape) size *= static_cast<uint64_t>(extent);
    return std::vector<float>(size, 0.0f);
  }
  Result<std::string> setting(std::string_view key) const override {
    return Status(StatusCode::kNotFound, fmt::format("no setting {}", key));
  }
};

class AbsentWeightSource final : public backend::SideWeightSource {
 public:
  Result<std::unique_ptr<backend::SideWeights>> open(std::string_view) override {
    return std::unique_ptr<backend::SideWeights>(std::make_unique<AbsentWeights>());
  }
};

// A directory with config.json, that file alone, or a whole checkpoint.
Result<model::ModelConfig> read_config(const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  const fs::path given(path);
  const fs::path config = fs::is_directory(given, ignored) ? given / "config.json" : given;
  if (config.filename() == "config.json" && fs::exists(config, ignored)) {
    SPIN_ASSIGN_OR_RETURN(const std::string text,
                          io::read_text_file(config.string(), kMaxConfigBytes));
    return model::config_from_json(text);
  }
  SPIN_ASSIGN_OR_RETURN(model::ModelFiles files, model::open_model(path));
  return std::move(files.config);
}

struct Planner {
  const PlanQuestion& question;
  const model::ModelConfig& config;
  layout::KvGeometry geometry;
  kv::SequenceShape shape;
  uint64_t lease = 0;        // per head of a layer that is not dense
  uint64_t index_bytes = 0;  // of one request
  bool sparse = false;
  Plan plan;
  bool too_large = false;  // a number of bytes does not fit into 64 bits

  uint64_t heads() const { return uint64_t{geometry.layers} * geometry.kv_heads; }
  uint64_t dense_heads() const { return uint64_t{shape.dense_layers} * geometry.kv_heads; }
  uint64_t slots_per_request(uint64_t per_head) const {
    return (heads() - dense_heads()) * per_head + dense_heads() * shape.max_page_ids;
  }

  uint64_t product(std::initializer_list<uint64_t> factors) {
    const auto result = base::checked_product({factors.begin(), factors.size()});
    too_large = too_large || !result;
    return result.value_or(0);
  }
  void add_to(uint64_t& sum, uint64_t bytes) {
    too_large = __builtin_add_overflow(sum, bytes, &sum) || too_large;
  }

  void add(std::string name,
           std::string tier,
           uint64_t bytes,
           std::string formula,
           bool metadata = false) {
    add_to(tier == "fast" ? plan.fast_bytes : plan.host_bytes, bytes);
    if (metadata && tier == "fast") add_to(plan.fast_metadata_bytes, bytes);
    plan.lines.push_back({std::move(name), std::move(tier), bytes, metadata, std::move(formula)});
  }

  void add_model() {
    const uint64_t weights = model::weight_bytes(config, geometry.dtype);
    add("weights", "fast", weights,
        fmt::format("{} parameters in {}", model::parameter_count(config),
                    layout::dtype_name(geometry.dtype)));
    add("workspace", "fast",
        model::Decoder::workspace_bytes(config, question.max_num_batched_tokens),
        fmt::format("activations of {} tokens", question.max_num_batched_tokens));
    if (!sparse) return;
    const uint64_t tokens = question.context_tokens;
    const uint64_t staged =
        geometry.pages_per_head(tokens) * geometry.kv_heads * geometry.page_bytes();
    add("prefill staging", "fast", staged,
        fmt::format("one layer's KV of {} tokens, one prompt at a time", tokens));
    add("prefill hidden states", "fast", tokens * config.hidden * sizeof(float),
        fmt::format("{} tokens x {} x 4 B", tokens, config.hidden));
  }

  void add_slots() {
    const uint64_t batch = question.batch;
    const uint64_t page = geometry.page_bytes();
    const uint64_t mandatory = slots_per_request(plan.mandatory_pages);
    const uint64_t leased = slots_per_request(lease);
    add("mandatory pages", "fast", product({batch, mandatory, page}),
        fmt::format("{} requests x {} heads x {} pages x {} B{}", batch, heads(),
                    plan.mandatory_pages, page,
                    shape.dense_layers > 0 ? ", dense layers whole" : ""));
    add("buffering pages", "fast", product({batch, leased - mandatory, page}),
        fmt::format("{} more pages a head", lease - plan.mandatory_pages));
    plan.kv_buffer_bytes = product({batch, leased, page});
    if (index_bytes > 0) {
      add("summaries", "fast", product({batch, index_bytes}),
          fmt::format("{} requests x {:.1f} B per token and head", batch,
                      static_cast<double>(index_bytes) /
                          static_cast<double>(heads() * question.context_tokens)));
    }
  }

  void add_tables(uint32_t extent_pages) {
    const uint64_t batch = question.batch;
    const kv::TableBytes one =
        kv::table_bytes(geometry, shape, lease, extent_pages, /*has_host=*/sparse);
    const auto table = [&](std::string name, uint64_t bytes, std::string formula) {
      if (bytes == 0) return;
      add(std::move(name), "fast", product({batch, bytes}), std::move(formula), true);
    };
    table("head records", one.heads, fmt::format("{} B a head", sizeof(layout::HeadPages)));
    table("leases", one.leases, "slot and page id of each leased page, 8 B (flat: 4 B)");
    table("resident look-up", one.look_up,
          fmt::format("{} entries of 4 B a head, load at most 0.5",
                      layout::residency_table_size(lease)));
    table("LRU stamps", one.stamps, "1 B a leased page");
    table("directory", one.directory, fmt::format("8 B for {} pages", extent_pages));
    const kv::GhostLists ghosts = kv::ghost_lists(geometry, shape);
    table("ghost lists", one.ghosts,
          fmt::format("{} pages of 4 B in {} of {} heads", ghosts.pages, ghosts.heads, heads()));
    table("tail slots", one.tail_slots, fmt::format("{} pages of 4 B a head", shape.tail_pages));
  }

  void add_host(uint32_t extent_pages) {
    if (!sparse) return;
    const layout::HostExtentLayout extent{extent_pages, geometry.page_bytes()};
    const uint64_t extents = base::ceil_div<uint64_t>(shape.max_page_ids, extent_pages) * heads();
    const uint64_t pages = product({extents, extent_pages, geometry.page_bytes()});
    add("host pages", "host", product({question.batch, pages}),
        fmt::format("{} requests x {} heads x {} pages in whole extents of {}", question.batch,
                    heads(), shape.max_page_ids, extent_pages));
    const uint64_t both = product({extents, extent.bytes()});
    add("host page tags", "host", product({question.batch, both - pages}), "16 B a page, beside it",
        true);
  }

  void add_flat_layouts() {
    const uint64_t pages =
        product({question.batch, heads(), geometry.pages_per_head(question.context_tokens)});
    plan.flat_plain_bytes = product({pages, kPageEntryBytes});
    const uint64_t record = kPartitionRecordBytes + kPartitionOffsetBytes +
                            kWorstPagesPerPartition * 2 * kPageEntryBytes;
    plan.flat_worst_bytes = product({pages, record});
    plan.flat_worst_formula = fmt::format(
        "one partition a page, each with a record of {} B, an offset of {} B and two page tables "
        "with room for {} pages of {} B",
        kPartitionRecordBytes, kPartitionOffsetBytes, kWorstPagesPerPartition, kPageEntryBytes);
  }

  // Requests of this context that each tier holds by itself.
  void add_fit() {
    const uint64_t batch = question.batch;
    uint64_t fixed_fast = 0;
    for (const PlanLine& line : plan.lines) {
      if (line.name == "weights" || line.name == "workspace" || line.name.starts_with("prefill ")) {
        fixed_fast += line.bytes;
      }
    }
    const uint64_t fast_each = (plan.fast_bytes - fixed_fast) / batch;
    const uint64_t host_each = plan.host_bytes / batch;
    if (question.fast_memory_bytes > fixed_fast && fast_each > 0) {
      plan.batch_by_fast = (question.fast_memory_bytes - fixed_fast) / fast_each;
    }
    if (question.host_memory_bytes > 0 && host_each > 0) {
      plan.batch_by_host = question.host_memory_bytes / host_each;
    }
  }
};

Status describe_sequence(Planner& planner, const model::RopeTable& rope) {
  const PlanQuestion& question = planner.question;
  SPIN_ASSIGN_OR_RETURN(const sparse::SparseSpec spec, sparse::parse_sparse_spec(question.sparse));
  const uint64_t pages = planner.geometry.pages_per_head(question.context_tokens);
  if (spec.name == "dense") {
    planner.shape.max_tokens = question.context_tokens;
    planner.shape.max_page_ids = pages;
    planner.lease = planner.plan.mandatory_pages = pages;
    planner.plan.attended_tokens = question.context_tokens;
    return ok_status();
  }
  backend::cpu::CpuDeviceOptions one_thread;
  one_thread.threads = 1;
  SPIN_ASSIGN_OR_RETURN(auto device, backend::cpu::create_cpu_device(one_thread));
  AbsentWeightSource weights;
  sparse::AlgorithmContext context;
  context.device = device.get();
  context.shape.geometry = planner.geometry;
  context.shape.q_heads = planner.config.q_heads;
  context.shape.rope = {rope.inv_freq, rope.attention_factor};
  context.side_weights = &weights;
  SPIN_ASSIGN_OR_RETURN(auto algorithm, sparse::create_algorithm(spec, context));
  planner.sparse = true;
  planner.shape = sparse::sequence_shape(*algorithm, context.shape, question.context_tokens);
  planner.index_bytes = algorithm->needs(question.context_tokens).index_bytes;
  Plan& plan = planner.plan;
  plan.mandatory_pages = planner.shape.mandatory_pages(planner.shape.dense_layers);
  const auto buffer =
      static_cast<uint64_t>(question.buffer_ratio * static_cast<double>(plan.mandatory_pages));
  planner.lease = std::min(plan.mandatory_pages + buffer, planner.shape.max_page_ids);
  const uint64_t attended_pages =
      uint64_t{planner.shape.pinned_pages()} + planner.shape.selected_pages;
  plan.attended_tokens =
      std::min(attended_pages * planner.geometry.page_tokens, question.context_tokens);
  return ok_status();
}

Result<Plan> make_plan(const PlanQuestion& question) {
  SPIN_ASSIGN_OR_RETURN(const model::ModelConfig config, read_config(question.model));
  if (question.context_tokens == 0 || question.context_tokens > config.max_positions) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("the context must be 1 to {} tokens for this model, found {}",
                              config.max_positions, question.context_tokens),
                  "context_tokens");
  }
  if (question.batch == 0) {
    return Status(StatusCode::kInvalidArgument, "the batch must be at least 1", "batch");
  }
  const layout::DType dtype =
      question.dtype == DTypeChoice::kFloat32 ? layout::DType::kF32 : layout::DType::kBF16;
  Planner planner{question, config, config.kv_geometry(question.page_tokens, dtype),
                  {},       0,      0,
                  false,    {},     false};
  const model::RopeTable rope = model::make_rope_table(config.rope, config.head_dim, {});
  SPIN_RETURN_IF_ERROR(describe_sequence(planner, rope));
  const uint32_t extent_pages =
      kv::extent_pages_for(planner.geometry.pages_per_head(question.context_tokens));
  planner.add_model();
  planner.add_slots();
  planner.add_tables(extent_pages);
  planner.add_host(extent_pages);
  planner.add_flat_layouts();
  if (planner.too_large) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("{} requests of {} tokens take more bytes than 64 bits can count",
                              question.batch, question.context_tokens),
                  "batch");
  }
  planner.plan.lease_pages = planner.lease;
  planner.add_fit();
  return std::move(planner.plan);
}

}  // namespace
}  // namespace spin::engine

namespace spin {

Result<Plan> plan_serving(const PlanQuestion& question) { return engine::make_plan(question); }

}  // namespace spin
