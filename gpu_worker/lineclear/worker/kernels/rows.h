// Operations on each row of a matrix, on several threads where that pays.

#pragma once

#include <cstdint>

namespace {

constexpr int64_t MIN_PARALLEL_ELEMENTS = 1 << 15;  // below this a second thread costs more than it saves

// Call work(row) for each row. A few rows bypass OpenMP: a team of one thread costs as much as the row, and it replaces the
// team that the surrounding matrix products would reuse.
template <typename Work>
void for_each_row(int64_t rows, bool parallel, Work work) {
  if (!parallel) {
    for (int64_t r = 0; r < rows; r++) work(r);
    return;
  }
#pragma omp parallel for schedule(static)
  for (int64_t r = 0; r < rows; r++) work(r);
}

}  // namespace
