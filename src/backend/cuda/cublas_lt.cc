// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/cublas_lt.h"

#include <string>
#include <string_view>

#include "backend/cuda/tensor_views.h"

namespace spin::backend::cuda {
namespace {

constexpr int kMostCandidates = 16;

Status cublas_status(cublasStatus_t status, std::string_view doing) {
  if (status == CUBLAS_STATUS_SUCCESS) return ok_status();
  const StatusCode code =
      status == CUBLAS_STATUS_ALLOC_FAILED ? StatusCode::kResourceExhausted : StatusCode::kInternal;
  return Status(code, std::string(doing) + ": " + cublasLtGetStatusName(status));
}

// cuBLASLt counts columns first: it is told of out^T [n, m] = w [n, k] * x^T [k, m], where w, k
// elements to a column, is taken transposed.
struct Layouts {
  cublasLtMatrixLayoutOpaque_t w;
  cublasLtMatrixLayoutOpaque_t x;
  cublasLtMatrixLayoutOpaque_t out;
};

Status make_layouts(
    const GemmShape& shape, int64_t m, int64_t x_stride, int64_t out_stride, Layouts* layouts) {
  const auto n = static_cast<uint64_t>(shape.n);
  const auto k = static_cast<uint64_t>(shape.k);
  const auto rows = static_cast<uint64_t>(m);
  const cudaDataType type = shape.dtype == layout::DType::kBF16 ? CUDA_R_16BF : CUDA_R_32F;
  constexpr std::string_view kDoing = "describe a matrix";
  SPIN_RETURN_IF_ERROR(
      cublas_status(cublasLtMatrixLayoutInit(&layouts->w, type, k, n, shape.k), kDoing));
  SPIN_RETURN_IF_ERROR(
      cublas_status(cublasLtMatrixLayoutInit(&layouts->x, type, k, rows, x_stride), kDoing));
  return cublas_status(cublasLtMatrixLayoutInit(&layouts->out, CUDA_R_32F, n, rows, out_stride),
                       kDoing);
}

// The layouts of operands that lie densely, as far as alignment lets them.
Status make_dense_layouts(const GemmShape& shape, int64_t m, Layouts* layouts) {
  constexpr int64_t kUnit = kVectorBytes / sizeof(float);
  return make_layouts(shape, m, shape.k, (shape.n + kUnit - 1) / kUnit * kUnit, layouts);
}

Status make_preference(cublasLtMatmulPreferenceOpaque_t* preference) {
  constexpr std::string_view kDoing = "set a search preference";
  const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    return cublas_status(
        cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value)), kDoing);
  };
  SPIN_RETURN_IF_ERROR(cublas_status(cublasLtMatmulPreferenceInit(preference), kDoing));
  SPIN_RETURN_IF_ERROR(
      set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t{kGemmWorkspaceBytes}));
  SPIN_RETURN_IF_ERROR(set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                           static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_NONE)));
  for (const auto attribute :
       {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
    SPIN_RETURN_IF_ERROR(set(attribute, static_cast<uint32_t>(kVectorBytes)));
  }
  return ok_status();
}

// Whether a sum over k is formed in one piece, as far as the algorithm says.
bool is_unsplit(const cublasLtMatmulAlgo_t& algorithm) {
  int32_t parts = 0;
  uint32_t reduction = 0;
  size_t written = 0;
  return cublasLtMatmulAlgoConfigGetAttribute(&algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &parts,
                                              sizeof(parts), &written) == CUBLAS_STATUS_SUCCESS &&
         cublasLtMatmulAlgoConfigGetAttribute(&algorithm, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME,
                                              &reduction, sizeof(reduction),
                                              &written) == CUBLAS_STATUS_SUCCESS &&
         (parts == 0 || parts == 1) && reduction == CUBLASLT_REDUCTION_SCHEME_NONE;
}

}  // namespace

Result<std::unique_ptr<CublasLt>> CublasLt::create() {
  std::unique_ptr<CublasLt> made(new CublasLt);
  SPIN_RETURN_IF_ERROR(cublas_status(cublasLtCreate(&made->handle_), "start cuBLASLt"));
  SPIN_RETURN_IF_ERROR(
      cublas_status(cublasLtMatmulDescCreate(&made->operation_, CUBLAS_COMPUTE_32F, CUDA_R_32F),
                    "describe a product"));
  const cublasOperation_t transposed = CUBLAS_OP_T;
  SPIN_RETURN_IF_ERROR(
      cublas_status(cublasLtMatmulDescSetAttribute(made->operation_, CUBLASLT_MATMUL_DESC_TRANSA,
                                                   &transposed, sizeof(transposed)),
                    "describe a product"));
  return made;
}

CublasLt::~CublasLt() {
  if (operation_ != nullptr) (void)cublasLtMatmulDescDestroy(operation_);
  if (handle_ != nullptr) (void)cublasLtDestroy(handle_);
}

std::vector<cublasLtMatmulAlgo_t> CublasLt::candidates(const GemmShape& shape, int64_t m) const {
  Layouts layouts;
  cublasLtMatmulPreferenceOpaque_t preference;
  if (!make_dense_layouts(shape, m, &layouts).ok() || !make_preference(&preference).ok()) return {};
  cublasLtMatmulHeuristicResult_t found[kMostCandidates] = {};
  int count = 0;
  if (cublasLtMatmulAlgoGetHeuristic(handle_, operation_, &layouts.w, &layouts.x, &layouts.out,
                                     &layouts.out, &preference, kMostCandidates, found,
                                     &count) != CUBLAS_STATUS_SUCCESS) {
    return {};
  }
  std::vector<cublasLtMatmulAlgo_t> algorithms;
  for (int i = 0; i < count; ++i) {
    if (found[i].state == CUBLAS_STATUS_SUCCESS && found[i].workspaceSize <= kGemmWorkspaceBytes &&
        is_unsplit(found[i].algo)) {
      algorithms.push_back(found[i].algo);
    }
  }
  return algorithms;
}

bool CublasLt::supports(const GemmShape& shape,
                        int64_t m,
                        const cublasLtMatmulAlgo_t& algorithm) const {
  Layouts layouts;
  cublasLtMatmulHeuristicResult_t found = {};
  return make_dense_layouts(shape, m, &layouts).ok() &&
         cublasLtMatmulAlgoCheck(handle_, operation_, &layouts.w, &layouts.x, &layouts.out,
                                 &layouts.out, &algorithm, &found) == CUBLAS_STATUS_SUCCESS &&
         found.workspaceSize <= kGemmWorkspaceBytes;
}

Status CublasLt::multiply(const GemmShape& shape,
                          const GemmOperands& operands,
                          const cublasLtMatmulAlgo_t& algorithm,
                          cudaStream_t stream) const {
  Layouts layouts;
  SPIN_RETURN_IF_ERROR(
      make_layouts(shape, operands.m, operands.x_stride, operands.out_stride, &layouts));
  const float alpha = 1.0f;
  const float beta = operands.accumulate ? 1.0f : 0.0f;
  return cublas_status(
      cublasLtMatmul(handle_, operation_, &alpha, operands.w, &layouts.w, operands.x, &layouts.x,
                     &beta, operands.out, &layouts.out, operands.out, &layouts.out, &algorithm,
                     operands.workspace, kGemmWorkspaceBytes, stream),
      "multiply matrices");
}

}  // namespace spin::backend::cuda
