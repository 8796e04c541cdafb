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

constexpr int BLOCK = 4;  // rows of A that share the loads of x

// out[j] = scale * dot(x, a[j]) for `COUNT` rows of a [COUNT, length].
template <int COUNT>
void dots(const float* x, const float* a, int64_t length, float scale, float* out) {
  vfloat sums[COUNT] = {};
  for (int64_t i = 0; i < length; i += LANES) {
    const vfloat v = load(x + i);
    for (int j = 0; j < COUNT; j++) sums[j] += v * load(a + j * length + i);
  }
  for (int j = 0; j < COUNT; j++) out[j] = scale * hsum(sums[j]);
}

template <int COUNT>
void dots(const bf16* x, const bf16* a, int64_t length, float scale, float* out) {
  vfloat sums[COUNT] = {}, others[COUNT] = {};
  int64_t i = 0;
  for (; i + 2 * LANES <= length; i += 2 * LANES) {
    const vuint v = load_pairs(x + i);
    const vfloat low = first(v), high = second(v);
    for (int j = 0; j < COUNT; j++) {
      const vuint w = load_pairs(a + j * length + i);
      sums[j] += low * first(w);
      others[j] += high * second(w);
    }
  }
  for (; i < length; i += LANES)
    for (int j = 0; j < COUNT; j++) sums[j] += load(x + i) * load(a + j * length + i);
  for (int j = 0; j < COUNT; j++) out[j] = scale * hsum(sums[j] + others[j]);
}

// out[column + ...] += sum over k of t[k] * b[k], for `vectors` registers of columns.
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
  const int64_t blocks = (max_rank + BLOCK - 1) / BLOCK;
  int64_t tiles[8] = {};  // of each part, summed up
  for (int64_t p = 0; p < parts; p++) tiles[p + 1] = tiles[p] + (table[p].outputs + TILE - 1) / TILE;
#pragma omp parallel if (parallel)
  {
#pragma omp for schedule(static)
    for (int64_t item = 0; item < parts * blocks; item++)
      for (int64_t r = 0; r < rows; r++) {
        const int64_t p = item / blocks, k = item % blocks * BLOCK;
        const LineclearLoraPart& part = table[adapters[r] * parts + p];
        const T *row = x + r * inputs, *a = (const T*)part.a + k * inputs;
        float* to = t + (r * parts + p) * max_rank + k;
        if (k + BLOCK <= part.rank)
          dots<BLOCK>(row, a, inputs, float(part.scale), to);
        else
          for (int64_t j = 0; k + j < part.rank; j++) dots<1>(row, a + j * inputs, inputs, float(part.scale), to + j);
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
