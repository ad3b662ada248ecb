// SPDX-License-Identifier: Apache-2.0
// Included before Highway by every unit with kernels: which instruction sets are compiled, and how
// a unit's functions of one of them are reached. Each further target costs compile time and code;
// what is missing here differs too little from its neighbour. Thread: none.
#pragma once

#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_AVX3_DL)

// Calls N_<target>::function(...) for the Highway target of value `target`.
#if defined(__x86_64__)
#define SPIN_CALL_FOR_TARGET(target, function, ...) \
  do {                                              \
    if ((target) == HWY_AVX3) {                     \
      N_AVX3::function(__VA_ARGS__);                \
    } else if ((target) == HWY_AVX2) {              \
      N_AVX2::function(__VA_ARGS__);                \
    } else if ((target) == HWY_SSE4) {              \
      N_SSE4::function(__VA_ARGS__);                \
    } else {                                        \
      HWY_STATIC_DISPATCH(function)(__VA_ARGS__);   \
    }                                               \
  } while (false)
#else
#define SPIN_CALL_FOR_TARGET(target, function, ...) HWY_STATIC_DISPATCH(function)(__VA_ARGS__)
#endif
