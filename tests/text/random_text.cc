// SPDX-License-Identifier: Apache-2.0
#include "tests/text/random_text.h"

#include "base/utf8.h"

namespace spin::testing {

RandomText::RandomText(const nlohmann::json& golden)
    : words_(golden["words"].get<std::vector<std::string>>()) {
  for (const auto& range : golden["ranges"]) {
    ranges_.emplace_back(range[0].get<uint32_t>(), range[1].get<uint32_t>());
  }
}

std::string RandomText::make(uint64_t seed, uint64_t index) const {
  SplitMix64 rng(seed * 1000003 + index);
  std::string text;
  const uint64_t parts = rng.below(24);
  for (uint64_t i = 0; i < parts; ++i) {
    if (rng.below(2) == 0) {
      text += words_[rng.below(words_.size())];
      continue;
    }
    const auto [first, last] = ranges_[rng.below(ranges_.size())];
    const uint64_t count = 1 + rng.below(4);
    for (uint64_t k = 0; k < count; ++k) {
      base::append_utf8(static_cast<char32_t>(first + rng.below(last - first + 1)), text);
    }
  }
  return text;
}

}  // namespace spin::testing
