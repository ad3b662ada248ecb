// SPDX-License-Identifier: Apache-2.0
#include "tests/backend/ops_conformance.h"

#include <cmath>

namespace spin::testing {
namespace {

constexpr float kGap = -12345.5f;  // what lies between the rows of a tensor

}  // namespace

void OpsConformance::SetUp() {
  auto device = GetParam().create();
  if (!device.ok() && device.status().code() == StatusCode::kUnsupported) {
    GTEST_SKIP() << device.status().to_string();
  }
  ASSERT_TRUE(device.ok()) << device.status().to_string();
  device_ = std::move(device).value();
  auto stream = device_->create_stream("conformance");
  ASSERT_TRUE(stream.ok()) << stream.status().to_string();
  stream_ = std::move(stream).value();
}

OpsConformance::Tensor OpsConformance::upload_matrix(const Matrix& matrix, int64_t extra) {
  const int64_t stride = matrix.cols + extra;
  std::vector<float> values(static_cast<size_t>(std::max<int64_t>(1, matrix.rows * stride)), kGap);
  for (int64_t r = 0; r < matrix.rows; ++r) {
    for (int64_t c = 0; c < matrix.cols; ++c) {
      values[static_cast<size_t>(r * stride + c)] = matrix.at(r, c);
    }
  }
  Tensor tensor;
  tensor.buffer = upload<float>(values);
  tensor.ref = {tensor.buffer.data(), layout::DType::kF32, matrix.rows, matrix.cols, stride};
  return tensor;
}

OpsConformance::Tensor OpsConformance::empty_matrix(int64_t rows, int64_t cols, int64_t extra) {
  Matrix matrix(rows, cols);
  for (float& value : matrix.values) value = std::nanf("");  // unwritten results show
  return upload_matrix(matrix, extra);
}

Matrix OpsConformance::download(const Tensor& tensor) {
  const backend::TensorRef& ref = tensor.ref;
  std::vector<float> values(tensor.buffer.size_bytes() / sizeof(float));
  stream_->enqueue_copy(values.data(), tensor.buffer.data(), tensor.buffer.size_bytes());
  const Status status = stream_->wait_idle();
  EXPECT_TRUE(status.ok()) << status.to_string();
  Matrix out(ref.rows, ref.cols);
  for (int64_t r = 0; r < ref.rows; ++r) {
    for (int64_t c = 0; c < ref.row_stride; ++c) {
      const float value = values[static_cast<size_t>(r * ref.row_stride + c)];
      if (c < ref.cols) {
        out.at(r, c) = value;
      } else if (value != kGap) {
        ADD_FAILURE() << "row " << r << ": written past its end, at " << c;
        return out;
      }
    }
  }
  return out;
}

std::unique_ptr<backend::PackedMatrix> OpsConformance::pack(const Matrix& matrix,
                                                            layout::DType dtype) {
  auto packed = ops().pack_matrix(
      matrix.rows, matrix.cols, dtype, [&](int64_t first, int64_t rows, std::span<float> out) {
        std::memcpy(out.data(), &matrix.values[static_cast<size_t>(first * matrix.cols)],
                    static_cast<size_t>(rows * matrix.cols) * sizeof(float));
        return ok_status();
      });
  EXPECT_TRUE(packed.ok()) << packed.status().to_string();
  return std::move(packed).value();
}

Matrix OpsConformance::matmul(const Matrix& x,
                              const backend::PackedMatrix& w,
                              const Matrix* bias,
                              const Matrix* added,
                              int64_t extra) {
  const Tensor in = upload_matrix(x, extra);
  const Tensor out =
      added != nullptr ? upload_matrix(*added, extra) : empty_matrix(x.rows, w.rows(), extra);
  const backend::Buffer bias_buffer =
      bias != nullptr ? upload<float>(bias->values) : backend::Buffer();
  ops().enqueue_matmul(in.ref, w, bias_buffer.as<float>(), added != nullptr, out.ref, stream());
  return download(out);
}

void OpsConformance::expect_close(const Matrix& found, const BoundedMatrix& expected) {
  ASSERT_EQ(found.rows, expected.rows);
  ASSERT_EQ(found.cols, expected.cols);
  for (size_t i = 0; i < found.values.size(); ++i) {
    const double difference = std::abs(found.values[i] - expected.values[i].value);
    // Written so that NaN fails.
    if (difference <= expected.values[i].tolerance) continue;
    ADD_FAILURE() << "element [" << static_cast<int64_t>(i) / found.cols << ", "
                  << static_cast<int64_t>(i) % found.cols << "]: found " << found.values[i]
                  << ", expected " << expected.values[i].value << " +- "
                  << expected.values[i].tolerance;
    return;
  }
}

namespace {

using layout::DType;

std::string shape_text(int64_t m, int64_t n, int64_t k, DType dtype) {
  return "m " + std::to_string(m) + " n " + std::to_string(n) + " k " + std::to_string(k) + " " +
         std::string(layout::dtype_name(dtype));
}

TEST_P(OpsConformance, MatmulOfAnyShapeIsWithinItsRoundingBound) {
  const int64_t shapes[][3] = {{1, 1, 1},     {1, 16, 2},    {2, 15, 3},     {3, 17, 31},
                               {5, 64, 32},   {6, 65, 33},   {7, 63, 64},    {8, 128, 127},
                               {13, 80, 96},  {31, 33, 257}, {33, 100, 576}, {97, 192, 300},
                               {1, 576, 576}, {200, 48, 40}, {1, 1000, 7}};
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const auto& [m, n, k] : shapes) {
      SCOPED_TRACE(shape_text(m, n, k, dtype));
      const Matrix x = random_matrix(m, k, 1);
      const Matrix w = random_matrix(n, k, 2);
      const auto packed = pack(w, dtype);
      expect_close(matmul(x, *packed, nullptr, nullptr, 5),
                   reference_matmul(x, w, dtype, nullptr, nullptr));
    }
  }
}

TEST_P(OpsConformance, MatmulAddsBiasAndPreviousOutput) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t m : {1, 4, 9, 130}) {
      SCOPED_TRACE(shape_text(m, 70, 600, dtype));
      const Matrix x = random_matrix(m, 600, 3);
      const Matrix w = random_matrix(70, 600, 4);
      const Matrix bias = random_matrix(1, 70, 5);
      const Matrix before = random_matrix(m, 70, 6);
      const auto packed = pack(w, dtype);
      expect_close(matmul(x, *packed, &bias, nullptr, 3),
                   reference_matmul(x, w, dtype, &bias, nullptr));
      expect_close(matmul(x, *packed, nullptr, &before),
                   reference_matmul(x, w, dtype, nullptr, &before));
      expect_close(matmul(x, *packed, &bias, &before, 1),
                   reference_matmul(x, w, dtype, &bias, &before));
    }
  }
}

TEST_P(OpsConformance, MatmulRowDoesNotDependOnTheOtherRows) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const auto& [n, k] : {std::pair<int64_t, int64_t>{100, 1100}, {64, 65}, {130, 576}}) {
      const Matrix x = random_matrix(200, k, 7);
      const Matrix bias = random_matrix(1, n, 9);
      const auto packed = pack(random_matrix(n, k, 8), dtype);
      const Matrix all = matmul(x, *packed, &bias);
      for (const int64_t m : {1, 2, 3, 4, 5, 6, 7, 8, 16, 31, 32, 33, 64, 100}) {
        SCOPED_TRACE(shape_text(m, n, k, dtype));
        // The last m rows: other positions within every tile.
        Matrix part(m, k);
        std::copy_n(x.values.end() - m * k, m * k, part.values.begin());
        const Matrix found = matmul(part, *packed, &bias);
        EXPECT_EQ(std::memcmp(found.values.data(), &all.values[static_cast<size_t>((200 - m) * n)],
                              found.values.size() * sizeof(float)),
                  0);
      }
    }
  }
}

TEST_P(OpsConformance, MatmulOfNoRowsIsNothing) {
  const auto packed = pack(random_matrix(3, 5, 1), DType::kF32);
  EXPECT_EQ(matmul(Matrix(0, 5), *packed).values.size(), 0u);
}

TEST_P(OpsConformance, PackingReportsTheSourcesErrorAndRefusesEmptyShapes) {
  const auto failing = [](int64_t first, int64_t, std::span<float>) {
    return first == 0 ? Status(StatusCode::kIoError, "disk gone") : ok_status();
  };
  EXPECT_EQ(ops().pack_matrix(4, 4, DType::kF32, failing).status().code(), StatusCode::kIoError);
  EXPECT_EQ(ops().pack_matrix(0, 4, DType::kF32, failing).status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(
      ops().pack_matrix(int64_t{1} << 40, int64_t{1} << 40, DType::kF32, failing).status().code(),
      StatusCode::kInvalidArgument);
}

TEST_P(OpsConformance, PackedMatrixIsHeldOnce) {
  const uint64_t before = device_->memory(backend::MemoryKind::kFast).bytes_in_use();
  const auto packed = pack(random_matrix(576, 192, 1), DType::kBF16);
  EXPECT_EQ(packed->size_bytes(), 576u * 192 * 2);
  EXPECT_EQ(device_->memory(backend::MemoryKind::kFast).bytes_in_use() - before,
            packed->size_bytes());
}

TEST_P(OpsConformance, EmbeddingReturnsTheTablesRows) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{1, 1}, {150, 33}, {70, 64}}) {
      const Matrix table = random_matrix(rows, cols, 10);
      const auto packed = pack(table, dtype);
      std::vector<uint32_t> ids;
      for (uint32_t i = 0; i < 40; ++i) ids.push_back((i * 37) % static_cast<uint32_t>(rows));
      ids.push_back(static_cast<uint32_t>(rows - 1));
      const backend::Buffer device_ids = upload<uint32_t>(ids);
      const Tensor out = empty_matrix(static_cast<int64_t>(ids.size()), cols, 2);
      ops().enqueue_embedding(*packed, device_ids.as<uint32_t>(), out.ref, stream());
      const Matrix found = download(out);
      for (size_t i = 0; i < ids.size(); ++i) {
        for (int64_t c = 0; c < cols; ++c) {
          ASSERT_EQ(found.at(static_cast<int64_t>(i), c), rounded(table.at(ids[i], c), dtype));
        }
      }
    }
  }
}

TEST_P(OpsConformance, RmsNormOverRowsAndHeadsAlsoInPlace) {
  for (const auto& [cols, size] :
       {std::pair<int64_t, int64_t>{1, 1}, {7, 7}, {576, 576}, {192, 64}, {96, 24}, {1000, 1000}}) {
    SCOPED_TRACE(cols);
    Matrix x = random_matrix(9, cols, 11);
    for (int64_t c = 0; c < cols; ++c) x.at(4, c) *= 1e-8f;  // epsilon decides
    for (int64_t c = 0; c < cols; ++c) x.at(5, c) *= 1e8f;
    const Matrix weight = random_matrix(1, size, 12);
    const backend::Buffer device_weight = upload<float>(weight.values);
    const Tensor in = upload_matrix(x, 3);
    const Tensor out = empty_matrix(9, cols, 1);
    ops().enqueue_rms_norm(in.ref, device_weight.as<float>(), size, 1e-5f, out.ref, stream());
    const BoundedMatrix expected = reference_rms_norm(x, weight, 1e-5f);
    expect_close(download(out), expected);
    ops().enqueue_rms_norm(in.ref, device_weight.as<float>(), size, 1e-5f, in.ref, stream());
    expect_close(download(in), expected);
  }
}

TEST_P(OpsConformance, RopeIsAccurateUpToMillionsOfTokens) {
  for (const int64_t head_dim : {2, 8, 64, 80, 128}) {
    SCOPED_TRACE(head_dim);
    const Matrix x = random_matrix(8, 3 * head_dim, 13);
    const std::vector<uint32_t> positions = {0, 1, 2, 255, 8191, 131071, 1048577, 134217727u};
    std::vector<float> inv_freq;
    for (int64_t i = 0; i < head_dim / 2; ++i) {
      inv_freq.push_back(
          std::pow(10000.0f, -2.0f * static_cast<float>(i) / static_cast<float>(head_dim)));
    }
    const backend::Buffer device_positions = upload<uint32_t>(positions);
    const Tensor tensor = upload_matrix(x, 5);
    ops().enqueue_rope(tensor.ref, head_dim, device_positions.as<uint32_t>(), {inv_freq, 1.25f},
                       stream());
    expect_close(download(tensor), reference_rope(x, head_dim, positions, inv_freq, 1.25f));
  }
}

TEST_P(OpsConformance, SiluMulOverTheWholeRangeOfExp) {
  for (const int64_t width : {1, 15, 16, 17, 1536}) {
    Matrix gate_up = random_matrix(5, 2 * width, 14);
    for (int64_t c = 0; c < width; ++c) {
      gate_up.at(1, c) *= 100;
      gate_up.at(2, c) *= 1e4f;
      gate_up.at(3, c) = -87.0f - gate_up.at(3, c);
    }
    const Tensor in = upload_matrix(gate_up, 2);
    const Tensor out = empty_matrix(5, width, 3);
    ops().enqueue_silu_mul(in.ref, out.ref, stream());
    expect_close(download(out), reference_silu_mul(gate_up));
  }
}

TEST_P(OpsConformance, ExponentialIsAccurateAlongItsRange) {
  // silu(g) * (1 / g) is 1 / (1 + exp(-g)): a fine sweep over all exponents of the result.
  const int64_t width = 1 << 15;
  Matrix gate_up(1, 2 * width);
  for (int64_t c = 0; c < width; ++c) {
    const float gate = (static_cast<float>(c) + 0.37f) * (200.0f / static_cast<float>(width)) - 100;
    gate_up.at(0, c) = gate;
    gate_up.at(0, width + c) = 1.0f / gate;
  }
  const Tensor in = upload_matrix(gate_up);
  const Tensor out = empty_matrix(1, width);
  ops().enqueue_silu_mul(in.ref, out.ref, stream());
  expect_close(download(out), reference_silu_mul(gate_up));
}

TEST_P(OpsConformance, SiluMulOfNanIsNan) {
  Matrix gate_up(1, 40);
  for (int64_t c = 0; c < 40; ++c) gate_up.at(0, c) = 1.0f;
  gate_up.at(0, 3) = std::nanf("");
  gate_up.at(0, 25) = std::nanf("");
  const Tensor in = upload_matrix(gate_up);
  const Tensor out = empty_matrix(1, 20);
  ops().enqueue_silu_mul(in.ref, out.ref, stream());
  const Matrix found = download(out);
  for (int64_t c = 0; c < 20; ++c) EXPECT_EQ(std::isnan(found.at(0, c)), c == 3 || c == 5) << c;
}

TEST_P(OpsConformance, GatherCopiesRowsInAnyOrder) {
  const Matrix x = random_matrix(10, 33, 15);
  const std::vector<uint32_t> ids = {9, 0, 0, 4};
  const backend::Buffer device_ids = upload<uint32_t>(ids);
  const Tensor in = upload_matrix(x, 1);
  const Tensor out = empty_matrix(4, 33, 2);
  ops().enqueue_gather_rows(in.ref, device_ids.as<uint32_t>(), out.ref, stream());
  const Matrix found = download(out);
  for (size_t i = 0; i < ids.size(); ++i) {
    for (int64_t c = 0; c < 33; ++c) {
      EXPECT_EQ(found.at(static_cast<int64_t>(i), c), x.at(ids[i], c));
    }
  }
}

}  // namespace
}  // namespace spin::testing
