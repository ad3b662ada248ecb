// SPDX-License-Identifier: Apache-2.0
#include "sparse/sparse_spec.h"
