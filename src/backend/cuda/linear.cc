// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/linear.h"

#include <algorithm>
#include <span>
#include <string>

#include "backend/cuda/cublas_lt.h"
#include "backend/cuda/cuda_status.h"
#include "backend/cuda/linear_kernels.h"
#include "backend/cuda/matmul_plan.h"
#include "backend/cuda/tensor_views.h"

namespace spin::backend::cuda {
namespace {

// Floats that go to the GPU at a time while packing: 4 MiB of pinned memory.
constexpr int64_t kStageFloats = 1 << 20;

// Most rows and columns of a matrix, so that no index of cuBLASLt's overflows.
constexpr int64_t kMostSide = 1 << 26;

constexpr size_t kScratchAlignment = 256;

int64_t filled_up(int64_t elements, size_t element_bytes) {
  const auto unit = static_cast<int64_t>(kVectorBytes / element_bytes);
  return (elements + unit - 1) / unit * unit;
}

Status check_shape(int64_t rows, int64_t cols) {
  if (rows >= 1 && cols >= 1 && rows <= kMostSide && cols <= kMostSide) return ok_status();
  std::string shape("[");
  shape.append(std::to_string(rows)).append(", ").append(std::to_string(cols)).append("]");
  return Status(StatusCode::kInvalidArgument,
                rows < 1 || cols < 1 ? "expected a matrix of at least 1 x 1, found " + shape
                                     : "a matrix of " + shape + " is too large");
}

// Where a product's operands lie in scratch, for `rows` rows at a time.
struct ScratchLayout {
  bool copies_x = false;
  bool moves_out = false;
  int64_t out_stride = 0;
  size_t x_bytes = 0;
  size_t out_bytes = 0;

  ScratchLayout(const TensorRef& x, const CudaMatrix& w, const TensorRef& out, int64_t rows) {
    copies_x = w.dtype() != x.dtype || w.stride() != w.cols() || !is_aligned(x);
    moves_out = !is_aligned(out);
    out_stride = filled_up(w.rows(), sizeof(float));
    if (copies_x) {
      x_bytes = static_cast<size_t>(rows * w.stride()) * layout::dtype_bytes(w.dtype());
      x_bytes = (x_bytes + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment;
    }
    if (moves_out) out_bytes = static_cast<size_t>(rows * out_stride) * sizeof(float);
  }
};

}  // namespace

Linear::Linear(int ordinal, MemoryResource& fast, MemoryResource& host)
    : ordinal_(ordinal), fast_(fast), host_(host) {}

Result<std::unique_ptr<Linear>> Linear::create(int ordinal,
                                               MemoryResource& fast,
                                               MemoryResource& host) {
  std::unique_ptr<Linear> made(new Linear(ordinal, fast, host));
  SPIN_RETURN_IF_ERROR(cuda_status(cudaSetDevice(ordinal), "select the GPU"));
  SPIN_RETURN_IF_ERROR(cuda_status(cudaStreamCreateWithFlags(&made->stream_, cudaStreamNonBlocking),
                                   "create a stream"));
  SPIN_ASSIGN_OR_RETURN(made->lt_, CublasLt::create());
  made->planner_ = std::make_unique<MatmulPlanner>(*made->lt_, fast, host, made->stream_);
  return made;
}

Linear::~Linear() {
  (void)cudaSetDevice(ordinal_);
  planner_.reset();
  lt_.reset();
  // Idle: whoever used it waited.
  if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
}

Result<std::unique_ptr<PackedMatrix>> Linear::pack(int64_t rows,
                                                   int64_t cols,
                                                   layout::DType dtype,
                                                   const RowSource& source) {
  SPIN_RETURN_IF_ERROR(check_shape(rows, cols));
  SPIN_RETURN_IF_ERROR(cuda_status(cudaSetDevice(ordinal_), "select the GPU"));
  const size_t element = layout::dtype_bytes(dtype);
  const int64_t stride = filled_up(cols, element);
  // The plan first: its trials' memory is free again when the matrix takes its own.
  SPIN_ASSIGN_OR_RETURN(const MatmulPlan* const plan,
                        planner_->plan_for({.n = rows, .k = stride, .dtype = dtype}));
  SPIN_ASSIGN_OR_RETURN(
      Buffer buffer,
      Buffer::allocate(fast_, static_cast<size_t>(rows * stride) * element, kScratchAlignment));
  SPIN_RETURN_IF_ERROR(fill(rows, cols, dtype, stride, source, buffer));
  return std::unique_ptr<PackedMatrix>(
      std::make_unique<CudaMatrix>(rows, cols, dtype, stride, std::move(buffer), *plan));
}

Status Linear::fill(int64_t rows,
                    int64_t cols,
                    layout::DType dtype,
                    int64_t stride,
                    const RowSource& source,
                    const Buffer& buffer) {
  const int64_t piece = std::clamp<int64_t>(kStageFloats / cols, 1, rows);
  SPIN_ASSIGN_OR_RETURN(const Buffer stage,
                        Buffer::allocate(host_, static_cast<size_t>(piece * cols) * sizeof(float)));
  const size_t row_bytes = static_cast<size_t>(stride) * layout::dtype_bytes(dtype);
  for (int64_t first = 0; first < rows; first += piece) {
    const int64_t count = std::min(piece, rows - first);
    SPIN_RETURN_IF_ERROR(
        source(first, count, {stage.as<float>(), static_cast<size_t>(count * cols)}));
    // The kernel reads pinned memory through the bus.
    launch_round_rows(stage.as<float>(), cols, count, cols, dtype,
                      buffer.as<char>() + static_cast<size_t>(first) * row_bytes, stride, stream_);
    SPIN_RETURN_IF_ERROR(cuda_status(cudaGetLastError(), "pack a matrix"));
    SPIN_RETURN_IF_ERROR(cuda_status(cudaStreamSynchronize(stream_), "pack a matrix"));
  }
  return ok_status();
}

void Linear::enqueue(TensorRef x,
                     const CudaMatrix& w,
                     const float* bias,
                     bool accumulate,
                     TensorRef out,
                     CudaStream& stream) {
  const ScratchLayout layout(x, w, out, std::min(x.rows, kMostGemmRows));
  auto* const workspace =
      static_cast<char*>(stream.scratch(kGemmWorkspaceBytes + layout.x_bytes + layout.out_bytes));
  if (workspace == nullptr) return;
  char* const scratch = workspace + kGemmWorkspaceBytes;
  for (int64_t first = 0; first < x.rows; first += kMostGemmRows) {
    const int64_t m = std::min(kMostGemmRows, x.rows - first);
    const auto* const from = static_cast<const float*>(x.data) + first * x.row_stride;
    auto* const to = static_cast<float*>(out.data) + first * out.row_stride;
    GemmOperands operands = {.w = w.data(),
                             .x = from,
                             .x_stride = x.row_stride,
                             .out = to,
                             .out_stride = out.row_stride,
                             .m = m,
                             .accumulate = accumulate || bias != nullptr,
                             .workspace = workspace};
    if (layout.copies_x) {
      launch_round_rows(from, x.row_stride, m, w.cols(), w.dtype(), scratch, w.stride(),
                        stream.handle());
      operands.x = scratch;
      operands.x_stride = w.stride();
    }
    if (layout.moves_out) {
      operands.out = reinterpret_cast<float*>(scratch + layout.x_bytes);
      operands.out_stride = layout.out_stride;
    }
    if (bias != nullptr || (accumulate && layout.moves_out)) {
      launch_add_bias(accumulate ? to : nullptr, out.row_stride, bias, m, w.rows(), operands.out,
                      operands.out_stride, stream.handle());
    }
    stream.fail(lt_->multiply(w.plan().shape, operands, w.plan().algorithm(m), stream.handle()));
    if (layout.moves_out) {
      launch_add_bias(operands.out, operands.out_stride, nullptr, m, w.rows(), to, out.row_stride,
                      stream.handle());
    }
  }
  stream.end("matmul");
}

}  // namespace spin::backend::cuda
