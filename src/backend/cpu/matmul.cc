// SPDX-License-Identifier: Apache-2.0
// The product is tiled as follows, from the outside in:
//   chunks of kChunkRows rows of x, packed once for all threads (second cache);
//   tasks = a range of columns x a range of row blocks, claimed by the pool;
//   slices of kSliceUnits along k: one panel's slice is 32 KiB and stays in the first cache while
//   every row block passes over it; sums rest in a tile between slices, which is exact.
// With one row block there is nothing to reuse, and a panel is read as one stream.
#include "backend/cpu/matmul.h"

#include <algorithm>

#include "base/checked_math.h"

namespace spin::backend::cpu {
namespace {

constexpr int64_t kSliceUnits = 128;
constexpr int64_t kChunkRows = 1152;    // x 2 bytes x k: within the second or third cache
constexpr int64_t kTaskBlocks = 16;     // row blocks of a task at most
constexpr int64_t kTasksPerThread = 4;  // so that a thread that is held up does not hold up all
constexpr int64_t kThinTaskBytes = 32 << 10;  // weights that a task of few rows reads at least
constexpr int64_t kSerialPackFloats = 1 << 14;

using base::ceil_div;

class Product {
 public:
  Product(const MatmulCall& call, const MatmulKernel& kernel, base::ThreadPool& pool)
      : call_(call),
        kernel_(kernel),
        pool_(pool),
        units_(call.w->dtype() == layout::DType::kBF16 ? (call.x.cols + 1) / 2 : call.x.cols),
        b_unit_bytes_(4),
        column_units_(ceil_div(call.out.cols, kPanelUnit)) {}

  Status run(WorkspacePool& workspace) {
    const int64_t rows = std::min(call_.x.rows, kChunkRows);
    const int64_t a_bytes = rows * units_ * kernel_.a_unit_bytes;
    const int64_t a_space = ceil_div<int64_t>(a_bytes, 64) * 64;
    const int64_t tile_floats = std::min(rows, kTaskBlocks * kernel_.block_rows) * kPanelCols;
    const int64_t tiles_bytes = tile_floats * static_cast<int64_t>(sizeof(float)) * pool_.threads();
    SPIN_ASSIGN_OR_RETURN(auto lease, workspace.take(static_cast<size_t>(a_space + tiles_bytes)));
    a_ = lease.data();
    tiles_ = reinterpret_cast<float*>(lease.data() + a_space);
    tile_floats_ = tile_floats;
    for (int64_t first = 0; first < call_.x.rows; first += kChunkRows) {
      first_row_ = first;
      rows_ = std::min(kChunkRows, call_.x.rows - first);
      run_chunk();
    }
    return ok_status();
  }

 private:
  const float* x_row(int64_t row) const {
    return static_cast<const float*>(call_.x.data) + (first_row_ + row) * call_.x.row_stride;
  }
  float* out_row(int64_t row) const {
    return static_cast<float*>(call_.out.data) + (first_row_ + row) * call_.out.row_stride;
  }
  int64_t rows_of_block(int64_t block) const {
    return std::min(block_rows_, rows_ - block * block_rows_);
  }
  char* a_block(int64_t block) const {
    return a_ + block * block_rows_ * units_ * kernel_.a_unit_bytes;
  }

  void pack_block(int64_t block) {
    kernel_.pack_block(x_row(block * block_rows_), call_.x.row_stride, rows_of_block(block),
                       call_.x.cols, a_block(block));
  }

  void run_chunk() {
    const int64_t blocks = ceil_div(rows_, kernel_.block_rows);
    // 8 rows are two blocks of 4, not 6 and 2: few sums in flight leave the multipliers idle.
    block_rows_ = ceil_div(rows_, blocks);
    if (rows_ * call_.x.cols <= kSerialPackFloats) {
      for (int64_t block = 0; block < blocks; ++block) pack_block(block);
    } else {
      pool_.parallel_for(static_cast<size_t>(blocks), [this](size_t block, uint32_t) {
        pack_block(static_cast<int64_t>(block));
      });
    }
    const int64_t wanted = kTasksPerThread * pool_.threads();
    // Columns of a task in units of 16: whole panels when there are many rows; with few rows the
    // weights' bytes decide.
    int64_t task_units = kPanelCols / kPanelUnit;
    if (blocks <= 4) {
      const int64_t unit_bytes = kPanelUnit * units_ * b_unit_bytes_;
      task_units = std::max(ceil_div(kThinTaskBytes, unit_bytes), ceil_div(column_units_, wanted));
    }
    const int64_t column_tasks = ceil_div(column_units_, task_units);
    // Rows are divided evenly, and only as far as there are threads to feed.
    const int64_t most_blocks = std::min(kTaskBlocks, std::max<int64_t>(4, blocks));
    int64_t row_tasks = ceil_div(blocks, most_blocks);
    if (blocks > 4 && column_tasks * row_tasks < wanted) {
      row_tasks = std::min(ceil_div(wanted, column_tasks), ceil_div<int64_t>(blocks, 4));
    }
    const int64_t task_blocks = ceil_div(blocks, row_tasks);
    row_tasks = ceil_div(blocks, task_blocks);
    pool_.parallel_for(
        static_cast<size_t>(column_tasks * row_tasks), [&](size_t index, uint32_t slot) {
          const int64_t column_task = static_cast<int64_t>(index) / row_tasks;
          const int64_t first_block = static_cast<int64_t>(index) % row_tasks * task_blocks;
          const int64_t first_unit = column_task * task_units;
          run_task(first_unit, std::min(first_unit + task_units, column_units_), first_block,
                   std::min(first_block + task_blocks, blocks),
                   tiles_ + static_cast<int64_t>(slot) * tile_floats_);
        });
  }

  void run_task(
      int64_t unit, int64_t last_unit, int64_t first_block, int64_t last_block, float* tile) {
    constexpr int64_t kPanelUnits = kPanelCols / kPanelUnit;
    while (unit < last_unit) {
      const int64_t panel_end = (unit / kPanelUnits + 1) * kPanelUnits;
      const int64_t count = std::min(last_unit, panel_end) - unit;
      run_columns(unit / kPanelUnits, unit % kPanelUnits * kPanelUnit, count * kPanelUnit,
                  first_block, last_block, tile);
      unit += count;
    }
  }

  // Columns [column, column + cols) of a panel for row blocks [first_block, last_block).
  void run_columns(int64_t panel,
                   int64_t column,
                   int64_t cols,
                   int64_t first_block,
                   int64_t last_block,
                   float* tile) {
    const int64_t width = call_.w->panel_width(panel);
    const char* b = static_cast<const char*>(call_.w->panel(panel)) + column * b_unit_bytes_;
    const int64_t out_column = panel * kPanelCols + column;
    const int64_t first_row = first_block * block_rows_;
    // Straight into the output where nothing is added and no column is padding.
    const bool direct =
        !call_.accumulate && call_.bias == nullptr && out_column + cols <= call_.out.cols;
    float* c = direct ? out_row(first_row) + out_column : tile;
    const int64_t c_stride = direct ? call_.out.row_stride : kPanelCols;
    const int64_t slice = last_block - first_block > 1 ? kSliceUnits : units_;
    for (int64_t u = 0; u < units_; u += slice) {
      const int64_t count = std::min(slice, units_ - u);
      for (int64_t block = first_block; block < last_block; ++block) {
        const int64_t rows = rows_of_block(block);
        const char* here = b + u * width * b_unit_bytes_;
        kernel_.multiply(a_block(block) + u * rows * kernel_.a_unit_bytes, rows, here, width, cols,
                         count, u > 0, c + (block - first_block) * block_rows_ * c_stride, c_stride,
                         prefetch_address(here + count * width * b_unit_bytes_,
                                          count * MatmulKernel::kPrefetchBytes, block - first_block,
                                          last_block - first_block));
      }
    }
    if (direct) return;
    const int64_t last_row = std::min(last_block * block_rows_, rows_);
    for (int64_t row = first_row; row < last_row; ++row) {
      add_row(tile + (row - first_row) * kPanelCols, out_column,
              std::min(cols, call_.out.cols - out_column), out_row(row) + out_column);
    }
  }

  // While two blocks pass over a slice, each fetches half of what lies behind it: the first pass
  // over a slice waits for memory otherwise and the later ones leave the memory idle. Reading past
  // the matrix is harmless for a prefetch.
  static const char* prefetch_address(const char* behind,
                                      int64_t half_bytes,
                                      int64_t pass,
                                      int64_t passes) {
    if (passes < 2 || pass >= 2) return nullptr;
    return reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(behind) +
                                         static_cast<uintptr_t>(pass * half_bytes));
  }

  void add_row(const float* sums, int64_t out_column, int64_t cols, float* out) const {
    const float* bias = call_.bias == nullptr ? nullptr : call_.bias + out_column;
    if (bias != nullptr && call_.accumulate) {
      for (int64_t j = 0; j < cols; ++j) out[j] += sums[j] + bias[j];
    } else if (bias != nullptr) {
      for (int64_t j = 0; j < cols; ++j) out[j] = sums[j] + bias[j];
    } else if (call_.accumulate) {
      for (int64_t j = 0; j < cols; ++j) out[j] += sums[j];
    } else {
      std::copy_n(sums, cols, out);
    }
  }

  const MatmulCall& call_;
  const MatmulKernel& kernel_;
  base::ThreadPool& pool_;
  const int64_t units_;         // along k
  const int64_t b_unit_bytes_;  // of one column: a float, or a pair of bf16
  const int64_t column_units_;  // of 16 columns
  char* a_ = nullptr;           // the chunk's packed rows
  float* tiles_ = nullptr;      // one per slot
  int64_t tile_floats_ = 0;
  int64_t first_row_ = 0;  // of the chunk
  int64_t rows_ = 0;
  int64_t block_rows_ = 0;  // at most the kernel's
};

}  // namespace

Status run_matmul(const MatmulCall& call,
                  const MatmulKernel& kernel,
                  base::ThreadPool& pool,
                  WorkspacePool& workspace) {
  if (call.x.rows == 0) return ok_status();
  return Product(call, kernel, pool).run(workspace);
}

}  // namespace spin::backend::cpu
