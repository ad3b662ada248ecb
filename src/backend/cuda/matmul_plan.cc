// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/matmul_plan.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "backend/cuda/cuda_status.h"
#include "backend/cuda/linear_kernels.h"
#include "backend/cuda/tensor_views.h"
#include "base/check.h"

namespace spin::backend::cuda {
namespace {

using Algorithms = std::vector<cublasLtMatmulAlgo_t>;

constexpr size_t kRanges = kRangeEnds.size();

// Rows of a trial: no tile has more, so that all its places are looked at.
constexpr int64_t kTrialRows = 256;
// Columns of the result: the matrix's own, or this many and n modulo it, which aligns alike.
constexpr int64_t kTrialColumns = 256;

int64_t range_begin(size_t range) { return range == 0 ? 1 : kRangeEnds[range - 1] + 1; }

GemmShape trial_shape(GemmShape shape) {
  if (shape.n >= 2 * kTrialColumns) shape.n = kTrialColumns + shape.n % kTrialColumns;
  return shape;
}

// Random operands, and the products that all algorithms of a plan must give: without and with
// something in `out` before.
class Trial {
 public:
  Trial(const CublasLt& lt, const GemmShape& shape, cudaStream_t stream)
      : lt_(lt), shape_(trial_shape(shape)), stream_(stream) {}

  Status prepare(MemoryResource& fast, MemoryResource& host);

  // Makes `algorithm` the reference; false if it does not run.
  Result<bool> set_reference(const cublasLtMatmulAlgo_t& algorithm);
  // Whether it gives the reference's bits for the last m rows, which lie at other places of its
  // tiles than they do among all.
  Result<bool> agrees(const cublasLtMatmulAlgo_t& algorithm, int64_t m);

 private:
  Status fill(layout::DType dtype, uint64_t count, uint32_t seed, const Buffer& to);
  // The last m rows' product; false if it does not run. Blocks until it has.
  Result<bool> multiply(const cublasLtMatmulAlgo_t& algorithm,
                        int64_t m,
                        bool accumulate,
                        const Buffer& out);
  Status wait() { return cuda_status(cudaStreamSynchronize(stream_), "try an algorithm"); }

  const CublasLt& lt_;
  const GemmShape shape_;
  const cudaStream_t stream_;
  int64_t out_stride_ = 0;
  Buffer w_, x_, found_;
  std::array<Buffer, 2> expected_;  // by `accumulate`
  Buffer workspace_;
  Buffer differ_;  // uint32_t, pinned
};

Status Trial::fill(layout::DType dtype, uint64_t count, uint32_t seed, const Buffer& to) {
  launch_fill_random(dtype, count, seed, to.data(), stream_);
  return cuda_status(cudaGetLastError(), "fill a trial's matrix");
}

Status Trial::prepare(MemoryResource& fast, MemoryResource& host) {
  constexpr int64_t kUnit = kVectorBytes / sizeof(float);
  constexpr size_t kAlignment = 256;
  out_stride_ = (shape_.n + kUnit - 1) / kUnit * kUnit;
  const auto w_count = static_cast<uint64_t>(shape_.n * shape_.k);
  const auto x_count = static_cast<uint64_t>(kTrialRows * shape_.k);
  const size_t element = layout::dtype_bytes(shape_.dtype);
  const size_t out_bytes = static_cast<size_t>(kTrialRows * out_stride_) * sizeof(float);
  SPIN_ASSIGN_OR_RETURN(w_, Buffer::allocate(fast, w_count * element, kAlignment));
  SPIN_ASSIGN_OR_RETURN(x_, Buffer::allocate(fast, x_count * element, kAlignment));
  SPIN_ASSIGN_OR_RETURN(found_, Buffer::allocate(fast, out_bytes, kAlignment));
  for (Buffer& expected : expected_) {
    SPIN_ASSIGN_OR_RETURN(expected, Buffer::allocate(fast, out_bytes, kAlignment));
  }
  SPIN_ASSIGN_OR_RETURN(workspace_, Buffer::allocate(fast, kGemmWorkspaceBytes, kAlignment));
  SPIN_ASSIGN_OR_RETURN(differ_, Buffer::allocate(host, sizeof(uint32_t)));
  const Status filled_w = fill(shape_.dtype, w_count, 1, w_);
  const Status filled_x = fill(shape_.dtype, x_count, 2, x_);
  const Status waited = wait();  // in any case: the buffers may go now
  SPIN_RETURN_IF_ERROR(filled_w);
  SPIN_RETURN_IF_ERROR(filled_x);
  return waited;
}

Result<bool> Trial::multiply(const cublasLtMatmulAlgo_t& algorithm,
                             int64_t m,
                             bool accumulate,
                             const Buffer& out) {
  // What was there before: 0.747 to be added to, or NaN that must go.
  const int before = accumulate ? 0x3F : 0xFF;
  SPIN_RETURN_IF_ERROR(cuda_status(cudaMemsetAsync(out.data(), before, out.size_bytes(), stream_),
                                   "clear a trial's result"));
  const int64_t first = kTrialRows - m;
  const size_t row_bytes = static_cast<size_t>(shape_.k) * layout::dtype_bytes(shape_.dtype);
  const GemmOperands operands = {.w = w_.data(),
                                 .x = x_.as<char>() + static_cast<size_t>(first) * row_bytes,
                                 .x_stride = shape_.k,
                                 .out = out.as<float>() + first * out_stride_,
                                 .out_stride = out_stride_,
                                 .m = m,
                                 .accumulate = accumulate,
                                 .workspace = workspace_.data()};
  const bool runs = lt_.multiply(shape_, operands, algorithm, stream_).ok();
  if (!runs) (void)cudaGetLastError();  // a refused launch, if it was one
  SPIN_RETURN_IF_ERROR(wait());
  return runs;
}

Result<bool> Trial::set_reference(const cublasLtMatmulAlgo_t& algorithm) {
  for (const bool accumulate : {false, true}) {
    SPIN_ASSIGN_OR_RETURN(const bool runs,
                          multiply(algorithm, kTrialRows, accumulate, expected_[accumulate]));
    if (!runs) return false;
  }
  return true;
}

Result<bool> Trial::agrees(const cublasLtMatmulAlgo_t& algorithm, int64_t m) {
  auto* const differ = differ_.as<uint32_t>();
  for (const bool accumulate : {false, true}) {
    SPIN_ASSIGN_OR_RETURN(const bool runs, multiply(algorithm, m, accumulate, found_));
    if (!runs) return false;
    *differ = 0;
    const int64_t offset = (kTrialRows - m) * out_stride_;
    launch_compare_rows(found_.as<float>() + offset, expected_[accumulate].as<float>() + offset, m,
                        shape_.n, out_stride_, differ, stream_);
    const Status launched = cuda_status(cudaGetLastError(), "compare a trial's results");
    SPIN_RETURN_IF_ERROR(wait());
    SPIN_RETURN_IF_ERROR(launched);
    if (*differ != 0) return false;
  }
  return true;
}

// Chooses for one shape.
class Choice {
 public:
  Choice(const CublasLt& lt, const GemmShape& shape, Trial& trial)
      : lt_(lt), shape_(shape), trial_(trial) {
    for (size_t range = 0; range < kRanges; ++range) {
      candidates_[range] = lt.candidates(shape, kRangeEnds[range]);
    }
  }

  // Nothing if no choice of a reference leaves an algorithm to every range.
  Result<std::optional<MatmulPlan>> choose() {
    for (const cublasLtMatmulAlgo_t& reference : candidates_.back()) {
      SPIN_ASSIGN_OR_RETURN(const bool runs, trial_.set_reference(reference));
      if (!runs) continue;
      MatmulPlan plan = {.shape = shape_, .algorithms = {}};
      size_t range = 0;
      for (; range < kRanges; ++range) {
        SPIN_ASSIGN_OR_RETURN(const bool found,
                              choose_for(range, reference, &plan.algorithms[range]));
        if (!found) break;
      }
      most_rows_ = std::max(most_rows_, range == 0 ? 0 : kRangeEnds[range - 1]);
      if (range == kRanges) return std::optional(plan);
    }
    return std::optional<MatmulPlan>();
  }

  // If nothing was found: so many rows had an algorithm that agreed with a reference.
  int64_t most_rows() const { return most_rows_; }

 private:
  Result<bool> choose_for(size_t range,
                          const cublasLtMatmulAlgo_t& reference,
                          cublasLtMatmulAlgo_t* chosen) {
    Algorithms algorithms = candidates_[range];
    algorithms.push_back(reference);
    for (const cublasLtMatmulAlgo_t& algorithm : algorithms) {
      SPIN_ASSIGN_OR_RETURN(const bool usable, is_usable(algorithm, range));
      if (!usable) continue;
      *chosen = algorithm;
      return true;
    }
    return false;
  }

  // Beyond kTrialRows rows there is nothing new to a tile: the algorithm is tried on that many.
  Result<bool> is_usable(const cublasLtMatmulAlgo_t& algorithm, size_t range) {
    for (const int64_t m : {range_begin(range), kRangeEnds[range]}) {
      if (!lt_.supports(shape_, m, algorithm)) return false;
      SPIN_ASSIGN_OR_RETURN(const bool agrees, trial_.agrees(algorithm, std::min(m, kTrialRows)));
      if (!agrees) return false;
    }
    return true;
  }

  const CublasLt& lt_;
  const GemmShape shape_;
  Trial& trial_;
  std::array<Algorithms, kRanges> candidates_;
  int64_t most_rows_ = 0;
};

std::string shape_text(const GemmShape& shape) {
  return "n " + std::to_string(shape.n) + ", k " + std::to_string(shape.k) + ", " +
         std::string(layout::dtype_name(shape.dtype));
}

}  // namespace

const cublasLtMatmulAlgo_t& MatmulPlan::algorithm(int64_t m) const {
  SPIN_CHECK(m >= 1 && m <= kMostGemmRows);
  const auto range = std::lower_bound(kRangeEnds.begin(), kRangeEnds.end(), m);
  return algorithms[static_cast<size_t>(range - kRangeEnds.begin())];
}

Result<const MatmulPlan*> MatmulPlanner::plan_for(const GemmShape& shape) {
  base::MutexLock lock(mutex_);
  const auto known = plans_.find(shape);
  if (known != plans_.end()) return known->second.get();
  SPIN_ASSIGN_OR_RETURN(auto made, make_plan(shape));
  const MatmulPlan* const plan = made.get();
  plans_.emplace(shape, std::move(made));
  return plan;
}

Result<std::unique_ptr<const MatmulPlan>> MatmulPlanner::make_plan(const GemmShape& shape) {
  Trial trial(lt_, shape, stream_);
  SPIN_RETURN_IF_ERROR(trial.prepare(fast_, host_));
  Choice choice(lt_, shape, trial);
  SPIN_ASSIGN_OR_RETURN(const std::optional<MatmulPlan> plan, choice.choose());
  if (!plan.has_value()) {
    return Status(StatusCode::kUnsupported,
                  "expected algorithms of cuBLASLt that agree for every number of rows, found them "
                  "for up to " +
                      std::to_string(choice.most_rows()) + " rows of a matrix of " +
                      shape_text(shape));
  }
  return std::unique_ptr<const MatmulPlan>(std::make_unique<MatmulPlan>(*plan));
}

}  // namespace spin::backend::cuda
