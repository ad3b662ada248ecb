// SPDX-License-Identifier: Apache-2.0
// What scores and estimates by sketches share: queries made ready for the codes, and the scores of
// a tile of up to 1,024 tokens by a block of 256 threads, each four tokens and up to eight query
// heads. Tiles lie at fixed places of the sequence, so that no bit depends on the grid, the batch
// or which other tokens are scored.
//
// Bytes per token and KV head: codes and scale, head_dim * bits / 8 + 2, once (34 for 128
// dimensions of 2 bits; a group of more than eight query heads reads them again, from the L2
// cache). Codes are loaded 16 bytes a lane: four neighbouring lanes read the 64 bytes of a word of
// 16 tokens and go on with the next 64. What binds is arithmetic: per token head_dim / 4 four-way
// products for each query head, at half rate, and about 0.7 head_dim operations that expand codes
// (2 bits).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

#include "backend/cuda/score_support.cuh"
#include "backend/cuda/sketch_support.cuh"

namespace spin::backend::cuda {

inline constexpr uint32_t kSketchTile = 1024;  // tokens at most: as many as are scored at once
inline constexpr uint32_t kSketchThreads = kSketchTile / 4;
inline constexpr uint32_t kPartHeads = 8;  // query heads that one pass over the codes serves
static_assert(kPartHeads <= kSketchThreads / kWarp);  // a warp each for what follows the scores

// What all kernels of a call know.
struct SketchCall {
  const float* q = nullptr;
  int64_t row_stride = 0;
  uint32_t kv_heads = 0;
  uint32_t group = 0;
  uint32_t head_dim = 0;
  uint32_t page_tokens = 0;
  uint32_t tile_pages = 0;  // tiles hold whole pages and begin where blocks of sketches do
  float scale = 1.0f;

  uint64_t q_heads() const { return uint64_t{kv_heads} * group; }
};

// Requires: page_tokens at most 64, or few enough common multiples with 16.
SketchCall make_sketch_call(const TensorRef& q, const layout::KvGeometry& geometry, float scale);

// ---- Queries.
//
// The codes of a word are taken in steps: step s shifts it right by s * bits, so that every nibble
// ends in a code; each half of the word gives four levels, a byte each, by a permutation of bytes.
// Byte b of half h of step s is dimension  n b + s + 4 n h  of the word, n = 4 / bits steps.
// Queries lie in the same order. Of one (row, KV head), in 32-bit words:
//
//   rounded  of the first 8 query heads, the next 8, ...:  [steps of all words][8 or fewer][2]
//   terms    [3][group]  scale * t, then scale * q . mu for both means

__host__ __device__ constexpr uint32_t rounded_words(uint32_t head_dim, uint32_t bits) {
  return sketch_words(head_dim, bits) * (8 / bits);  // of a query head
}

__host__ __device__ constexpr uint64_t prepared_words(uint32_t head_dim,
                                                      uint32_t bits,
                                                      uint32_t group) {
  return uint64_t{group} * (rounded_words(head_dim, bits) + 3);
}

inline uint64_t prepared_bytes(const SketchCall& call, const SketchArray& keys) {
  return scratch_part(call.kv_heads * prepared_words(call.head_dim, keys.bits, call.group) *
                      sizeof(uint32_t));
}

struct PrepareItem {
  SketchArray keys;
  uint64_t row = 0;
  uint32_t* prepared = nullptr;  // [kv_heads, prepared_words]
};

// sketch_score.cu.
void launch_prepare_queries(std::span<const PrepareItem> items,
                            const SketchCall& call,
                            CudaStream& stream);

// ---- Tiles.

// Tokens [begin, end) of the tile that starts with token `origin`, which begins a block.
struct SketchTile {
  uint64_t origin = 0;
  uint64_t begin = 0;
  uint64_t end = 0;
};

// Pages [first, first + count) in tile `index` of the sequence.
__device__ inline SketchTile sketch_tile(const SketchCall& call,
                                         uint64_t index,
                                         uint64_t first,
                                         uint64_t count) {
  const uint64_t page = index * call.tile_pages;
  SketchTile tile;
  tile.origin = page * call.page_tokens;
  tile.begin = max(page, first) * call.page_tokens;
  tile.end = min(page + call.tile_pages, first + count) * call.page_tokens;
  return tile;
}

// Shared memory of a tile: scores [heads, kSketchTile], then the query's steps.
inline size_t tile_shared_bytes(uint32_t head_dim, uint32_t bits, uint32_t heads) {
  return heads * (kSketchTile * sizeof(float) + rounded_words(head_dim, bits) * sizeof(uint32_t));
}

// Levels of the eight codes at the ends of the nibbles of `codes`.
template <int kBits>
__device__ inline uint2 expand_levels(uint32_t codes) {
  if constexpr (kBits == 4) {
    const uint32_t index = codes & 0x7777'7777u;
    const uint32_t upper = (codes >> 3) & 0x1111'1111u;
    uint32_t out[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t at = index >> (16 * half);
      const uint32_t low = __byte_perm(level_bytes(4, 0), level_bytes(4, 4), at);
      const uint32_t high = __byte_perm(level_bytes(4, 8), level_bytes(4, 12), at);
      const uint32_t mask = __byte_perm(0x0000'FF00u, 0, upper >> (16 * half));
      out[half] = (high & mask) | (low & ~mask);
    }
    return {out[0], out[1]};
  } else {
    const uint32_t index = codes & (kBits == 2 ? 0x3333'3333u : 0x1111'1111u);
    return {__byte_perm(level_bytes(kBits, 0), 0, index),
            __byte_perm(level_bytes(kBits, 0), 0, index >> 16)};
  }
}

__device__ inline void load_scales(const base::Fp16* scales, float (&to)[4]) {
  const uint2 raw = __ldg(reinterpret_cast<const uint2*>(scales));
  const uint32_t words[2] = {raw.x, raw.y};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    to[i] = __half2float(__ushort_as_half(static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16))));
  }
}

// Part `part` of a prepared query into shared memory: query [steps][kGroup], terms [3][kGroup].
template <int kBits, int kGroup>
__device__ inline void stage_prepared(
    const uint32_t* prepared, const SketchCall& call, uint32_t part, uint2* query, float* terms) {
  const uint32_t words = rounded_words(call.head_dim, kBits);
  const uint32_t* rounded = prepared + part * kPartHeads * words;
  auto* const to = reinterpret_cast<uint32_t*>(query);
  for (uint32_t i = threadIdx.x; i < words * kGroup; i += kSketchThreads) to[i] = rounded[i];
  const auto* const from =
      reinterpret_cast<const float*>(prepared + call.group * words) + part * kPartHeads;
  for (uint32_t i = threadIdx.x; i < 3 * kGroup; i += kSketchThreads) {
    terms[i] = from[i / kGroup * call.group + i % kGroup];
  }
}

// sums[g][t] += <levels of token t, r_g> over one word. query: its steps, [4 / kBits][kGroup].
template <int kBits, int kGroup>
__device__ inline void add_word_products(const uint4& raw,
                                         const uint2* query,
                                         int (&sums)[kGroup][4]) {
  const uint32_t word[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int s = 0; s < 4 / kBits; ++s) {
    uint2 levels[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) levels[t] = expand_levels<kBits>(word[t] >> (s * kBits));
#pragma unroll
    for (int g = 0; g < kGroup; ++g) {
      const uint2 r = query[s * kGroup + g];
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        sums[g][t] = __dp4a(static_cast<int>(levels[t].x), static_cast<int>(r.x), sums[g][t]);
        sums[g][t] = __dp4a(static_cast<int>(levels[t].y), static_cast<int>(r.y), sums[g][t]);
      }
    }
  }
}

// The same over all words of this lane's four tokens.
template <int kBits, int kGroup>
__device__ inline void add_code_products(const uint4* codes,
                                         uint32_t words,
                                         const uint2* query,
                                         int (&sums)[kGroup][4]) {
  constexpr uint32_t kAhead = 4;  // loads in flight
  for (uint32_t w = 0; w < words; w += kAhead) {
    uint4 raw[kAhead];
#pragma unroll
    for (uint32_t i = 0; i < kAhead; ++i) {
      if (w + i < words) raw[i] = __ldg(codes + (w + i) * (kSketchBlockTokens / 4));
    }
#pragma unroll
    for (uint32_t i = 0; i < kAhead; ++i) {
      if (w + i < words) {
        add_word_products<kBits>(raw[i], query + (w + i) * (4 / kBits) * kGroup, sums);
      }
    }
  }
}

// Scores of this thread's four tokens, those from tile.origin + 4 * threadIdx.x on; -infinity for
// those that the tile does not have. query, terms: of stage_prepared().
template <int kBits, int kGroup>
__device__ inline void score_tokens(const SketchArray& keys,
                                    uint32_t head,
                                    uint32_t head_dim,
                                    const SketchTile& tile,
                                    const uint2* query,
                                    const float* terms,
                                    float (&scores)[kGroup][4]) {
  const uint64_t token = tile.origin + 4 * threadIdx.x;
#pragma unroll
  for (int g = 0; g < kGroup; ++g) {
#pragma unroll
    for (int t = 0; t < 4; ++t) scores[g][t] = -INFINITY;
  }
  if (token >= tile.end || token + 4 <= tile.begin) return;
  float scales[4];
  load_scales(keys.scales + head * keys.capacity + token, scales);
  const uint32_t words = sketch_words(head_dim, kBits);
  const uint4* codes =
      sketch_codes(keys, head, words, token / kSketchBlockTokens) + token % kSketchBlockTokens / 4;
  int sums[kGroup][4] = {};
  add_code_products<kBits>(codes, words, query, sums);
  const float* biases = terms + (token >= keys.split ? 2 : 1) * kGroup;  // split begins a block
#pragma unroll
  for (int g = 0; g < kGroup; ++g) {
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      if (token + t < tile.begin || token + t >= tile.end) continue;
      scores[g][t] = fmaf(scales[t], terms[g] * static_cast<float>(sums[g][t]), biases[g]);
    }
  }
}

template <int kGroup>
__device__ inline void store_scores(const float (&scores)[kGroup][4], float4* to) {
#pragma unroll
  for (int g = 0; g < kGroup; ++g) {
    to[g * kSketchThreads + threadIdx.x] =
        make_float4(scores[g][0], scores[g][1], scores[g][2], scores[g][3]);
  }
}

// ---- Launches.

// use(std::integral_constant<int, query heads>, part) for all parts of a group.
template <typename Use>
void with_parts(uint32_t group, Use&& use) {
  for (uint32_t first = 0; first < group; first += kPartHeads) {
    const uint32_t part = first / kPartHeads;
    switch (std::min(kPartHeads, group - first)) {
      case 1:
        use(std::integral_constant<int, 1>{}, part);
        break;
      case 2:
        use(std::integral_constant<int, 2>{}, part);
        break;
      case 3:
        use(std::integral_constant<int, 3>{}, part);
        break;
      case 4:
        use(std::integral_constant<int, 4>{}, part);
        break;
      case 5:
        use(std::integral_constant<int, 5>{}, part);
        break;
      case 6:
        use(std::integral_constant<int, 6>{}, part);
        break;
      case 7:
        use(std::integral_constant<int, 7>{}, part);
        break;
      default:
        use(std::integral_constant<int, 8>{}, part);
    }
  }
}

// Calls launch(bits, query heads, pack, tiles, count, part), the first two integral constants, for
// packs of units of one number of bits and all parts of a group. A unit has item.keys and tiles().
template <typename Unit, typename Launch>
void launch_tiles(std::span<const Unit> units, uint32_t group, Launch&& launch) {
  const auto same = [](const Unit& a, const Unit& b) {
    return a.item.keys.bits == b.item.keys.bits;
  };
  for_runs(units, same, [&](std::span<const Unit> run) {
    launch_packs(run, [&](const ItemPack<Unit>& pack, uint32_t count, size_t first) {
      uint32_t tiles = 0;
      for (const Unit& unit : run.subspan(first, count)) tiles = std::max(tiles, unit.tiles());
      if (tiles == 0) return;
      with_bits(run.front().item.keys.bits, [&](auto bits) {
        with_parts(group, [&](auto heads, uint32_t part) {
          launch(bits, heads, pack, tiles, count, part);
        });
      });
    });
  });
}

// Cuts units into waves whose scratch, bytes_of(unit) each, stays in the L2 cache unless one alone
// takes more: run(wave, scratch). All waves use the same memory, one after another.
template <typename Unit, typename BytesOf, typename Run>
void run_waves(std::span<Unit> units, CudaStream& stream, BytesOf&& bytes_of, Run&& run) {
  constexpr uint64_t kWaveBytes = uint64_t{32} << 20;
  uint64_t most = 0;
  std::vector<size_t> counts;
  for (size_t i = 0; i < units.size(); i += counts.back()) {
    uint64_t bytes = bytes_of(units[i]);
    size_t count = 1;
    for (; i + count < units.size(); ++count) {
      const uint64_t more = bytes_of(units[i + count]);
      if (bytes + more > kWaveBytes) break;
      bytes += more;
    }
    most = std::max(most, bytes);
    counts.push_back(count);
  }
  auto* const scratch = static_cast<std::byte*>(stream.scratch(most));
  if (scratch == nullptr) return;
  for (const size_t count : counts) {
    run(units.first(count), scratch);
    units = units.subspan(count);
  }
}

}  // namespace spin::backend::cuda
