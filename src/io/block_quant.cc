// SPDX-License-Identifier: Apache-2.0
// One decoder per format. Each computes in the same order as ggml's reference, in f32 and without
// fused multiply-add, so the results are equal bit for bit.
#include "io/block_quant.h"

#include <array>
#include <cstring>

#include <fmt/format.h>

#include "base/bf16.h"
#include "base/check.h"
#include "base/checked_math.h"
#include "base/fp16.h"

namespace spin::io {
namespace {

using base::Bf16;
using base::Fp16;

template <typename T>
T load(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

float half_at(const std::byte* from) { return base::to_float(Fp16{load<uint16_t>(from)}); }

uint32_t byte_at(const std::byte* from, size_t i) { return std::to_integer<uint32_t>(from[i]); }

void decode_f32_values(const std::byte* in, size_t count, float* out) {
  std::memcpy(out, in, count * sizeof(float));
}

void decode_f16(const std::byte* in, size_t count, float* out) {
  for (size_t i = 0; i < count; ++i) out[i] = half_at(in + 2 * i);
}

void decode_bf16(const std::byte* in, size_t count, float* out) {
  for (size_t i = 0; i < count; ++i) out[i] = base::to_float(Bf16{load<uint16_t>(in + 2 * i)});
}

// Formats of 32 values: byte j of the nibbles holds value j (low half) and value j + 16 (high).
constexpr size_t kHalf = 16;

// [d f16][16 bytes of nibbles]: d * (q - 8)
void decode_q4_0(const std::byte* in, size_t count, float* out) {
  for (size_t block = 0; block < count; ++block, in += 18, out += 32) {
    const float d = half_at(in);
    for (size_t j = 0; j < kHalf; ++j) {
      const uint32_t q = byte_at(in + 2, j);
      out[j] = d * static_cast<float>(static_cast<int>(q & 0xF) - 8);
      out[j + kHalf] = d * static_cast<float>(static_cast<int>(q >> 4) - 8);
    }
  }
}

// [d f16][m f16][16 bytes of nibbles]: d * q + m
void decode_q4_1(const std::byte* in, size_t count, float* out) {
  for (size_t block = 0; block < count; ++block, in += 20, out += 32) {
    const float d = half_at(in);
    const float m = half_at(in + 2);
    for (size_t j = 0; j < kHalf; ++j) {
      const uint32_t q = byte_at(in + 4, j);
      out[j] = d * static_cast<float>(q & 0xF) + m;
      out[j + kHalf] = d * static_cast<float>(q >> 4) + m;
    }
  }
}

// Five-bit values of a block: nibbles in `low`, fifth bits in the u32 at `high`.
struct FiveBits {
  uint32_t first;   // value j
  uint32_t second;  // value j + 16
};
FiveBits five_bits(const std::byte* low, uint32_t high, size_t j) {
  const uint32_t q = byte_at(low, j);
  return {(q & 0xF) | (((high >> j) & 1) << 4), (q >> 4) | (((high >> (j + kHalf)) & 1) << 4)};
}

// [d f16][fifth bits u32][16 bytes of nibbles]: d * (q - 16)
void decode_q5_0(const std::byte* in, size_t count, float* out) {
  for (size_t block = 0; block < count; ++block, in += 22, out += 32) {
    const float d = half_at(in);
    const uint32_t high = load<uint32_t>(in + 2);
    for (size_t j = 0; j < kHalf; ++j) {
      const FiveBits q = five_bits(in + 6, high, j);
      out[j] = d * static_cast<float>(static_cast<int>(q.first) - 16);
      out[j + kHalf] = d * static_cast<float>(static_cast<int>(q.second) - 16);
    }
  }
}

// [d f16][m f16][fifth bits u32][16 bytes of nibbles]: d * q + m
void decode_q5_1(const std::byte* in, size_t count, float* out) {
  for (size_t block = 0; block < count; ++block, in += 24, out += 32) {
    const float d = half_at(in);
    const float m = half_at(in + 2);
    const uint32_t high = load<uint32_t>(in + 4);
    for (size_t j = 0; j < kHalf; ++j) {
      const FiveBits q = five_bits(in + 8, high, j);
      out[j] = d * static_cast<float>(q.first) + m;
      out[j + kHalf] = d * static_cast<float>(q.second) + m;
    }
  }
}

// [d f16][32 x i8]: d * q
void decode_q8_0(const std::byte* in, size_t count, float* out) {
  for (size_t block = 0; block < count; ++block, in += 34, out += 32) {
    const float d = half_at(in);
    for (size_t j = 0; j < 32; ++j) out[j] = d * static_cast<float>(load<int8_t>(in + 2 + j));
  }
}

// Six-bit scale and minimum of sub-block j (0..7), packed in 12 bytes: the first four of each have
// bytes of their own, whose two top bits hold the upper bits of the last four.
struct ScaleMin {
  float scale;
  float min;
};
ScaleMin scale_min(const std::byte* packed, size_t j) {
  const auto at = [packed](size_t i) { return byte_at(packed, i); };
  if (j < 4) return {static_cast<float>(at(j) & 63), static_cast<float>(at(j + 4) & 63)};
  const uint32_t scale = (at(j + 4) & 0xF) | ((at(j - 4) >> 6) << 4);
  const uint32_t min = (at(j + 4) >> 4) | ((at(j) >> 6) << 4);
  return {static_cast<float>(scale), static_cast<float>(min)};
}

// [d f16][dmin f16][scales 12][128 bytes of nibbles]: eight sub-blocks of 32 values,
// d * scale * q - dmin * min; sub-blocks 2k and 2k+1 are the low and high nibbles of 32 bytes.
void decode_q4_k(const std::byte* in, size_t count, float* out) {
  for (size_t block = 0; block < count; ++block, in += 144, out += 256) {
    const float d = half_at(in);
    const float dmin = half_at(in + 2);
    for (size_t sub = 0; sub < 8; ++sub) {
      const ScaleMin sm = scale_min(in + 4, sub);
      const float scale = d * sm.scale;
      const float min = dmin * sm.min;
      const std::byte* nibbles = in + 16 + sub / 2 * 32;
      for (size_t j = 0; j < 32; ++j) {
        const uint32_t q = (byte_at(nibbles, j) >> (sub % 2 * 4)) & 0xF;
        out[sub * 32 + j] = scale * static_cast<float>(q) - min;
      }
    }
  }
}

// [d f16][dmin f16][scales 12][fifth bits 32][128 bytes of nibbles]: as Q4_K; bit `sub` of fifth
// byte j belongs to value j of that sub-block.
void decode_q5_k(const std::byte* in, size_t count, float* out) {
  for (size_t block = 0; block < count; ++block, in += 176, out += 256) {
    const float d = half_at(in);
    const float dmin = half_at(in + 2);
    for (size_t sub = 0; sub < 8; ++sub) {
      const ScaleMin sm = scale_min(in + 4, sub);
      const float scale = d * sm.scale;
      const float min = dmin * sm.min;
      const std::byte* nibbles = in + 48 + sub / 2 * 32;
      for (size_t j = 0; j < 32; ++j) {
        const uint32_t low = (byte_at(nibbles, j) >> (sub % 2 * 4)) & 0xF;
        const uint32_t high = (byte_at(in + 16, j) >> sub) & 1;
        out[sub * 32 + j] = scale * static_cast<float>(low | (high << 4)) - min;
      }
    }
  }
}

// [low nibbles 128][high pairs 64][16 x i8 scales][d f16]: d * scale * (q - 32), a scale for 16
// values. Two halves of 128 values; in each, value group g (0..3) of 32 takes nibble g / 2 of low
// byte 32 * (g % 2) + j and bit pair g of high byte j.
void decode_q6_k(const std::byte* in, size_t count, float* out) {
  for (size_t block = 0; block < count; ++block, in += 210, out += 256) {
    const float d = half_at(in + 208);
    for (size_t i = 0; i < 256; ++i) {
      const size_t half = i / 128;
      const size_t group = i % 128 / 32;
      const size_t j = i % 32;
      const uint32_t low = byte_at(in + half * 64, group % 2 * 32 + j) >> (group / 2 * 4) & 0xF;
      const uint32_t high = byte_at(in + 128 + half * 32, j) >> (group * 2) & 3;
      const float scale = d * static_cast<float>(load<int8_t>(in + 192 + i / 16));
      out[i] = scale * static_cast<float>(static_cast<int>(low | (high << 4)) - 32);
    }
  }
}

// By ElementType.
constexpr std::array<BlockFormat, 11> kFormats = {{
    {ElementType::kF32, "F32", 1, 4, decode_f32_values},
    {ElementType::kF16, "F16", 1, 2, decode_f16},
    {ElementType::kBF16, "BF16", 1, 2, decode_bf16},
    {ElementType::kQ4_0, "Q4_0", 32, 18, decode_q4_0},
    {ElementType::kQ4_1, "Q4_1", 32, 20, decode_q4_1},
    {ElementType::kQ5_0, "Q5_0", 32, 22, decode_q5_0},
    {ElementType::kQ5_1, "Q5_1", 32, 24, decode_q5_1},
    {ElementType::kQ8_0, "Q8_0", 32, 34, decode_q8_0},
    {ElementType::kQ4_K, "Q4_K", 256, 144, decode_q4_k},
    {ElementType::kQ5_K, "Q5_K", 256, 176, decode_q5_k},
    {ElementType::kQ6_K, "Q6_K", 256, 210, decode_q6_k},
}};

constexpr bool formats_are_in_order() {
  for (size_t i = 0; i < kFormats.size(); ++i) {
    if (static_cast<size_t>(kFormats[i].type) != i) return false;
  }
  return kFormats.size() == static_cast<size_t>(ElementType::kUnsupported);
}
static_assert(formats_are_in_order());

}  // namespace

const BlockFormat& block_format(ElementType type) {
  SPIN_CHECK(type < ElementType::kUnsupported);
  return kFormats[static_cast<size_t>(type)];
}

std::string_view element_type_name(ElementType type) {
  return type < ElementType::kUnsupported ? block_format(type).name : "unsupported";
}

std::optional<uint64_t> encoded_size(ElementType type, uint64_t elements) {
  const BlockFormat& format = block_format(type);
  if (elements % format.block_elements != 0) return std::nullopt;
  return base::checked_mul<uint64_t>(elements / format.block_elements, format.block_bytes);
}

Status decode_f32(ElementType type, std::span<const std::byte> encoded, std::span<float> out) {
  if (type >= ElementType::kUnsupported) {
    return Status(StatusCode::kUnsupported, "the element type cannot be decoded");
  }
  const BlockFormat& format = block_format(type);
  if (encoded_size(type, out.size()) != encoded.size()) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("expected {} blocks of {} bytes for {} values of {}, found {} bytes",
                              out.size() / format.block_elements, format.block_bytes, out.size(),
                              format.name, encoded.size()));
  }
  if (!out.empty()) format.decode(encoded.data(), out.size() / format.block_elements, out.data());
  return ok_status();
}

}  // namespace spin::io
