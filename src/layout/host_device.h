// SPDX-License-Identifier: Apache-2.0
// Marks plain functions that kernels of a device may call as well as the host. Thread: none.
#pragma once

#if defined(__CUDACC__)
#define SPIN_HOST_DEVICE __host__ __device__
#else
#define SPIN_HOST_DEVICE
#endif
