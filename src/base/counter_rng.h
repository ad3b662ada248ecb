// SPDX-License-Identifier: Apache-2.0
// Random numbers as a pure function of (seed, stream, position): Philox 4x32 with 10 rounds
// (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"). No state, so a draw does not
// depend on what else was drawn. Thread: pure functions.
#pragma once

#include <array>
#include <cstdint>

namespace spin::base {

// 128 random bits for the key and counter.
inline std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, uint64_t key) {
  uint32_t key0 = static_cast<uint32_t>(key);
  uint32_t key1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53u} * counter[0];
    const uint64_t product1 = uint64_t{0xCD9E8D57u} * counter[2];
    counter = {
        static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key0, static_cast<uint32_t>(product1),
        static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key1, static_cast<uint32_t>(product0)};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

// Uniform in [0, 1) with 53 bits.
inline double counter_uniform(uint64_t seed, uint32_t stream, uint64_t position) {
  const auto bits = philox4x32(
      {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), stream, 0}, seed);
  const uint64_t wide = (uint64_t{bits[0]} << 32) | bits[1];
  return static_cast<double>(wide >> 11) * 0x1.0p-53;
}

// A well-mixed 64-bit hash of `value` (the finaliser of splitmix64).
inline uint64_t mix64(uint64_t value) {
  value += 0x9E3779B97F4A7C15u;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
  return value ^ (value >> 31);
}

}  // namespace spin::base
