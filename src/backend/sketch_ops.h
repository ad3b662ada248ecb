// SPDX-License-Identifier: Apache-2.0
// Low-bit sketches of keys (and values) and the items of the operations on them (SparseOps).
//
// A sketch of a vector x of one KV head, with an offset mu (one for the tokens before
// SketchArray::split, another one from there on, so that a few tokens are enough to begin with):
//
//   y = H (x - mu)      H: normalised Walsh-Hadamard matrix of the size of the head; where that is
//                       no power of two, one block per power of two, the largest first
//   code_d              of y_d / rms(y): the nearest of 2^bits levels, Lloyd-Max for a unit
//                       Gaussian, as integers: 1 bit +-1; 2 bits +-3, +-10; 4 bits +-6 .. +-127
//   a = <y, c> / <c, c> in fp16, c the integer levels; 0 for x = mu
//
// so that x is about mu + a H c. Queries are rotated as well and rounded to 8 bits:
// r_d = round((H q)_d / t), t = max |H q| / 127. Then q . (x - mu) is about a t <c, r>, and <c, r>
// is an integer: every backend finds the same.
//
// Record (one layer and head): codes of 16 tokens lie together, word by word:
//
//   codes  u32 [tokens / 16][words][16]   dimension word * (32 / bits) + i of a token in bits
//                                         [i * bits, (i + 1) * bits) of its word
//   scales fp16 [tokens]
//
// so that a vector of 16 lanes, or 16 threads, read one word of 16 tokens in one piece; a byte
// permute expands the masked codes of a word to 8-bit levels. Codes of tokens not yet there are 0.
// Thread: plain data, pure functions.
#pragma once

#include <array>
#include <cstdint>
#include <type_traits>

#include "base/fp16.h"
#include "layout/head_pages.h"
#include "layout/paged_tokens.h"

namespace spin::backend {

inline constexpr uint32_t kSketchBlockTokens = 16;

// Levels minus the lowest one, by code; `offset` is minus the lowest level.
struct SketchLevels {
  std::array<uint8_t, 16> shifted{};
  int32_t offset = 0;
  float unit = 1.0f;  // one integer step as a multiple of the rms
};

// Requires: bits is 1, 2 or 4.
constexpr SketchLevels sketch_levels(uint32_t bits) {
  if (bits == 1) return {{0, 2}, 1, 0.797885f};
  if (bits == 2) return {{0, 7, 13, 20}, 10, 0.151f};
  return {{0, 31, 52, 69, 83, 96, 109, 121, 133, 145, 158, 171, 185, 202, 223, 254},
          127,
          2.7326f / 127};
}

constexpr uint32_t sketch_words(uint32_t head_dim, uint32_t bits) {
  return (head_dim * bits + 31) / 32;
}

enum class Plane : uint8_t { kKeys, kValues };

// Sketches of one layer of a sequence.
struct SketchArray {
  uint32_t* codes = nullptr;     // [kv_heads, capacity / 16, words, 16]
  base::Fp16* scales = nullptr;  // [kv_heads, capacity]
  float* means = nullptr;        // [2, kv_heads, head_dim]
  uint64_t capacity = 0;         // tokens, a multiple of 16
  uint64_t split = 0;            // tokens from this one on have the second mean; a multiple of 16
  uint32_t bits = 2;             // 1, 2 or 4

  uint32_t* head_codes(uint32_t head, uint32_t words) const {
    return codes + head * capacity * words;
  }
  base::Fp16* head_scales(uint32_t head) const { return scales + head * capacity; }
};
static_assert(std::is_trivially_copyable_v<SketchArray>);

// mean = (begin ? 0 : mean) + the sum of tokens [first, first + count), one by one; then times
// `factor` unless that is 0. So a mean can be gathered piece by piece, with the same bits.
struct SketchMeanItem {
  layout::PagedTokens tokens;
  Plane plane = Plane::kKeys;
  bool begin = false;
  uint64_t first = 0;
  uint64_t count = 0;
  float factor = 0.0f;
  float* mean = nullptr;  // [kv_heads, head_dim]
};

// Sketches of tokens [first, first + count) of `tokens` become those of tokens out_first and so on.
// A block of 16 is cleared when its first token is written: tokens come in ascending order.
struct EncodeSketchItem {
  layout::PagedTokens tokens;
  uint64_t first = 0;
  uint64_t count = 0;
  uint64_t out_first = 0;
  SketchArray out;
  Plane plane = Plane::kKeys;
};

// Scores of pages by sketches of their tokens, s_t = scale * (a_t t <c_t, r> + q . mu_t):
//   score of a page = max over the group's query heads g and the page's tokens of (s_g,t - lse_g),
// lse_g over all tokens of pages [first, first + count). Natural logarithms.
struct ScoreSketchItem {
  uint64_t row = 0;  // of q
  SketchArray keys;
  uint32_t first = 0;       // pages
  uint32_t count = 0;       // all full
  float* scores = nullptr;  // out [kv_heads, score_stride]
  uint64_t score_stride = 0;
};

// Attention to tokens [0, tokens) whose pages are not on `list`, out of their sketches:
//   s_t as above,  v_t = nu_t + b_t H d_t, nu_t its offset,
//   part = sum_t e^(s_t) v_t / den,  den = sum_t e^(s_t),  lse = ln den.
struct EstimateSketchItem {
  uint64_t row = 0;
  SketchArray keys;
  SketchArray values;            // 2 bits
  uint64_t tokens = 0;           // whole pages
  layout::PageList list;         // attended exactly; ascending
  float* part = nullptr;         // out [q_heads, head_dim]
  float* log_sum_exp = nullptr;  // out [q_heads]; -infinity and a part of zeros: nothing estimated
};

}  // namespace spin::backend
