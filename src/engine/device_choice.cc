// SPDX-License-Identifier: Apache-2.0
#include "engine/device_choice.h"

#include <optional>

#include <fmt/format.h>

#include "backend/cpu/cpu_device.h"
#ifdef SPIN_CUDA
#include "backend/cuda/cuda_device.h"
#endif
#include "base/parse_number.h"
#include "base/quote.h"
#include "spin/device_name.h"

namespace spin {

Result<DeviceName> parse_device_name(std::string_view text) {
  constexpr std::string_view kCuda = "cuda";
  constexpr uint64_t kMostOrdinal = 1023;
  if (text == "cpu") return DeviceName{DeviceKind::kCpu, 0};
  if (text == kCuda) return DeviceName{DeviceKind::kCuda, 0};
  if (text.substr(0, kCuda.size() + 1) == "cuda:") {
    const std::optional<uint64_t> ordinal = base::parse_decimal(text.substr(kCuda.size() + 1));
    if (ordinal && *ordinal <= kMostOrdinal) {
      return DeviceName{DeviceKind::kCuda, static_cast<int>(*ordinal)};
    }
  }
  return Status(StatusCode::kInvalidArgument,
                fmt::format("device must be {}, found {}", kDeviceNames, base::quote_text(text)),
                "device");
}

namespace engine {
namespace {

Result<std::unique_ptr<backend::Device>> create_gpu([[maybe_unused]] int ordinal) {
#ifdef SPIN_CUDA
  backend::cuda::CudaDeviceOptions options;
  options.ordinal = ordinal;
  return backend::cuda::create_cuda_device(options);
#else
  return Status(StatusCode::kUnsupported,
                "this build has no CUDA backend; it has one if it is configured with "
                "-DSPIN_CUDA=ON");
#endif
}

}  // namespace

Result<std::unique_ptr<backend::Device>> create_device(const std::string& name, uint32_t threads) {
  SPIN_ASSIGN_OR_RETURN(const DeviceName device, parse_device_name(name));
  if (device.kind == DeviceKind::kCpu) {
    backend::cpu::CpuDeviceOptions options;
    options.threads = threads;
    return backend::cpu::create_cpu_device(options);
  }
  auto made = create_gpu(device.ordinal);
  if (!made.ok() && made.status().code() == StatusCode::kUnsupported) {
    return Status(StatusCode::kUnsupported, made.status().message(), "device");
  }
  return made;
}

}  // namespace engine
}  // namespace spin
