// SPDX-License-Identifier: Apache-2.0
// What every backend's Ops must do, against tests/backend/reference_ops.h. A backend instantiates
// it with a name and a factory:
//
//   INSTANTIATE_TEST_SUITE_P(Cpu, OpsConformance, ::testing::Values(OpsBackend{"best", make}),
//                            backend_name);
//
// All data goes through stream copies, so memory need not be visible to the host.
#pragma once

#include <cstring>
#include <functional>
#include <memory>
#include <ostream>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "backend/device.h"
#include "backend/ops.h"
#include "tests/backend/reference_ops.h"

namespace spin::testing {

struct OpsBackend {
  std::string name;
  // An error kUnsupported skips the tests: this machine cannot run the backend.
  std::function<Result<std::unique_ptr<backend::Device>>()> create;
};

inline void PrintTo(const OpsBackend& backend, std::ostream* out) { *out << backend.name; }

inline std::string backend_name(const ::testing::TestParamInfo<OpsBackend>& info) {
  return info.param.name;
}

class OpsConformance : public ::testing::TestWithParam<OpsBackend> {
 protected:
  void SetUp() override;

  backend::Ops& ops() { return device_->ops(); }
  backend::Stream& stream() { return *stream_; }

  // Memory of the fast tier holding a copy of `values`.
  template <typename T>
  backend::Buffer upload(std::span<const T> values) {
    auto buffer =
        backend::Buffer::allocate(device_->memory(backend::MemoryKind::kFast), values.size_bytes());
    EXPECT_TRUE(buffer.ok()) << buffer.status().to_string();
    stream_->enqueue_copy(buffer->data(), values.data(), values.size_bytes());
    EXPECT_TRUE(stream_->wait_idle().ok());
    return std::move(buffer).value();
  }

  // A tensor in fast memory whose rows lie `extra` elements further apart than they are long; the
  // gaps hold a pattern that expect_close() looks at.
  struct Tensor {
    backend::Buffer buffer;
    backend::TensorRef ref;
  };
  Tensor upload_matrix(const Matrix& matrix, int64_t extra = 0);
  Tensor empty_matrix(int64_t rows, int64_t cols, int64_t extra = 0);
  Matrix download(const Tensor& tensor);

  std::unique_ptr<backend::PackedMatrix> pack(const Matrix& matrix, layout::DType dtype);
  Matrix matmul(const Matrix& x,
                const backend::PackedMatrix& w,
                const Matrix* bias = nullptr,
                const Matrix* added = nullptr,
                int64_t extra = 0);

  void expect_close(const Matrix& found, const BoundedMatrix& expected);

  std::unique_ptr<backend::Device> device_;
  std::unique_ptr<backend::Stream> stream_;
};

}  // namespace spin::testing
