// SPDX-License-Identifier: Apache-2.0
// Pseudo-random Unicode text, the same as tools/make_tokenizer_golden.py makes. Tests only.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

namespace spin::testing {

class SplitMix64 {
 public:
  explicit SplitMix64(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    state_ += 0x9E3779B97F4A7C15ull;
    uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
  }
  // Uniform in [0, bound) up to the bias of the remainder. Requires: bound > 0.
  uint64_t below(uint64_t bound) { return next() % bound; }

 private:
  uint64_t state_;
};

class RandomText {
 public:
  // `golden`: tests/data/tokenizer/golden.json, for its alphabet.
  explicit RandomText(const nlohmann::json& golden);
  std::string make(uint64_t seed, uint64_t index) const;

 private:
  std::vector<std::pair<char32_t, char32_t>> ranges_;
  std::vector<std::string> words_;
};

}  // namespace spin::testing
