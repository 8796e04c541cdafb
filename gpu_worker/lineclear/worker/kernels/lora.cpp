// LoRA on the rows of a batch, each with its own adapter: out[r] += scale * B (A x[r]) (Hu et al., 2021; rows of several
// adapters in one call as in Punica, Chen et al., 2023).
//
// Sums in fp32 in a fixed order, so that a row's result does not depend on the other rows. element: 0 fp32, 1 bf16.
// Widths are multiples of 16.

#include "graph_capture.h"
#include "simd.h"

// One module's factors of one adapter, for the columns [offset, offset + outputs) of the product. rank 0: none.
struct LineclearLoraPart {
  int64_t rank, offset, outputs;
  const void* a;  // [rank, inputs]
  const void* b;  // [rank, outputs]: transposed
  double scale;
};

namespace {

constexpr int64_t TILE = 4 * LANES;                // columns whose sums stay in registers
constexpr int64_t MIN_PARALLEL_PRODUCTS = 1 << 15;  // below this a second thread costs more than it saves

template <typename T>
float dot(const T* x, const T* y, int64_t length) {
  vfloat sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * LANES <= length; i += 4 * LANES)
    for (int j = 0; j < 4; j++) sums[j] += load(x + i + j * LANES) * load(y + i + j * LANES);
  for (; i < length; i += LANES) sums[0] += load(x + i) * load(y + i);
  return hsum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

template <typename T>
void add_product(const float* t, const T* b, int64_t rank, int64_t outputs, int64_t column, int64_t vectors, T* out) {
  vfloat sums[4] = {};
  for (int64_t k = 0; k < rank; k++)
    for (int j = 0; j < vectors; j++) sums[j] += t[k] * load(b + k * outputs + column + j * LANES);
  for (int j = 0; j < vectors; j++) store(out + column + j * LANES, load(out + column + j * LANES) + sums[j]);
}

template <typename T>
void lora(int64_t rows, int64_t inputs, int64_t width, int64_t parts, int64_t max_rank, const int32_t* adapters,
          const LineclearLoraPart* table, const T* x, T* out, float* t) {
  const bool parallel = rows * (inputs + width) * max_rank > MIN_PARALLEL_PRODUCTS;
  int64_t tiles[8] = {};  // of each part, summed up
  for (int64_t p = 0; p < parts; p++) tiles[p + 1] = tiles[p] + (table[p].outputs + TILE - 1) / TILE;
#pragma omp parallel if (parallel)
  {
#pragma omp for schedule(static)
    for (int64_t item = 0; item < parts * max_rank; item++)
      for (int64_t r = 0; r < rows; r++) {
        const LineclearLoraPart& part = table[adapters[r] * parts + item / max_rank];
        const int64_t k = item % max_rank;
        if (k < part.rank)
          t[r * parts * max_rank + item] = float(part.scale) * dot(x + r * inputs, (const T*)part.a + k * inputs, inputs);
      }
#pragma omp for schedule(static)
    for (int64_t tile = 0; tile < tiles[parts]; tile++) {
      int64_t p = 0;
      while (tile >= tiles[p + 1]) p++;
      const int64_t column = (tile - tiles[p]) * TILE;
      for (int64_t r = 0; r < rows; r++) {
        const LineclearLoraPart& part = table[adapters[r] * parts + p];
        if (!part.rank) continue;
        const int64_t left = (part.outputs - column) / LANES;
        add_product(t + (r * parts + p) * max_rank, (const T*)part.b, part.rank, part.outputs, column, left < 4 ? left : 4,
                    out + r * width + part.offset);
      }
    }
  }
}

}  // namespace

extern "C" {

// x [rows, inputs], out [rows, width]. adapters [rows]: which `parts` entries of `table` belong to a row. t: scratch of
// rows * parts * max_rank floats. At most 7 parts; entries of one part have the same offset and outputs.
void lineclear_lora(int64_t element, int64_t rows, int64_t inputs, int64_t width, int64_t parts, int64_t max_rank,
                    const void* adapters, const void* table, const void* x, void* out, void* t) {
  if (element == 0)
    lora(rows, inputs, width, parts, max_rank, (const int32_t*)adapters, (const LineclearLoraPart*)table, (const float*)x,
         (float*)out, (float*)t);
  else
    lora(rows, inputs, width, parts, max_rank, (const int32_t*)adapters, (const LineclearLoraPart*)table, (const bf16*)x,
         (bf16*)out, (float*)t);
}
}

CAPTURABLE(lineclear_lora)
