// Matrix products with int8 weights: activation rows are quantized at each call, multiplied as integers, scaled once.
//
// A row and an output channel have one symmetric scale each: y = sum(x8 * w8) * row scale * channel scale. Integer sums are
// exact, so a row's result depends neither on the other rows nor on the instruction set.
//
// Weights are stored in blocks of 64 channels. In a block, four consecutive inputs of a channel form one 32-bit lane, as
// the VNNI instructions expect. These also need one unsigned operand: activations are stored as x8 + 128. The offset adds
// 128 * sum(w8) to a channel's sum; `correction` is minus that, computed when the weights are packed.

#include "int8_quant.h"
#include "graph_capture.h"
#include "scratch.h"

#if defined(_OPENMP)
#include <omp.h>
#endif

extern "C" {

// Arrays of channels are padded with zeros to whole blocks of 64. `inputs` is a multiple of 16.
struct LineclearInt8Weights {
  int64_t inputs, outputs;
  const int8_t* weights;      // [blocks][inputs / 4][64][4]
  const int32_t* correction;  // [blocks * 64]
  const float* scale;         // [blocks * 64]
  const float* bias;          // [blocks * 64] or null
};

}  // extern "C"

namespace {

constexpr int CHANNELS = 64;              // channels of a block
constexpr int64_t PREFETCH_BYTES = 2048;  // prefetch distance; the hardware prefetcher stops at each page

typedef int32_t vint_u __attribute__((vector_size(4 * LANES), aligned(4)));

// acc[lane] += dot product of the lane's four weights with four activations, which are the same for all lanes.
#if defined(__AVX512VNNI__)
constexpr int TILE_ROWS = 6, TILE_VECTORS = 4;
struct Weights {
  vint bytes;
  explicit Weights(vint w) : bytes(w) {}
};
struct Inputs {
  vint bytes;
  explicit Inputs(int32_t x) : bytes(vint{} + x) {}
};
inline void dot(vint& acc, const Inputs& x, const Weights& w) {
  // Inline assembly: with the intrinsic GCC copies the 24 sums, which then no longer fit into registers.
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(x.bytes), "v"(w.bytes));
}
#elif defined(__AVX2__)
constexpr int TILE_ROWS = 4, TILE_VECTORS = ACCUMULATORS / 4;
typedef int16_t vpairs __attribute__((vector_size(4 * LANES)));
struct Weights {
  vpairs even, odd;
  explicit Weights(vint w) : even((vpairs)w << 8 >> 8), odd((vpairs)w >> 8) {}
};
struct Inputs {
  vint even, odd;
  explicit Inputs(int32_t x) : even(vint{} + (x & 0xff00ff)), odd(vint{} + ((x >> 8) & 0xff00ff)) {}
};
inline vint multiply_add(vint x, vpairs w) {
#if defined(__AVX512BW__)
  return (vint)_mm512_madd_epi16((__m512i)x, (__m512i)w);
#else
  return (vint)_mm256_madd_epi16((__m256i)x, (__m256i)w);
#endif
}
inline void dot(vint& acc, const Inputs& x, const Weights& w) {
  acc += multiply_add(x.even, w.even) + multiply_add(x.odd, w.odd);
}
#else
constexpr int TILE_ROWS = 4, TILE_VECTORS = 2;
struct Weights {
  vint part[4];
  explicit Weights(vint w) : part{w << 24 >> 24, w << 16 >> 24, w << 8 >> 24, w >> 24} {}
};
struct Inputs {
  int32_t part[4];
  explicit Inputs(int32_t x) : part{x & 255, x >> 8 & 255, x >> 16 & 255, x >> 24 & 255} {}
};
inline void dot(vint& acc, const Inputs& x, const Weights& w) {
  for (int i = 0; i < 4; i++) acc += w.part[i] * x.part[i];
}
#endif

// Compute ROWS rows times TILE_VECTORS * LANES channels of a block, from its channel `first` on.
template <typename T, int ROWS>
inline void tile(const LineclearInt8Weights& w, int64_t block, int first, const uint8_t* x, const float* row_scale, T* out) {
  vint acc[ROWS][TILE_VECTORS];
  const int64_t channel = block * CHANNELS + first;
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int v = 0; v < TILE_VECTORS; v++)
      acc[r][v] = *reinterpret_cast<const vint_u*>(w.correction + channel + v * LANES);
  const int8_t* from = w.weights + block * CHANNELS * w.inputs + first * 4;
#pragma GCC unroll 1
  for (int64_t k = 0; k < w.inputs; k += 4) {
    const auto weights = [&](int v) {
      const int8_t* at = from + k * CHANNELS + v * LANES * 4;
      __builtin_prefetch(at + PREFETCH_BYTES);
      return Weights(*reinterpret_cast<const vint_u*>(at));
    };
    const Weights here[] = {weights(0), weights(1), weights(TILE_VECTORS > 2 ? 2 : 0), weights(TILE_VECTORS > 2 ? 3 : 0)};
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
      int32_t four;
      std::memcpy(&four, x + r * w.inputs + k, 4);
      const Inputs inputs(four);
#pragma GCC unroll 4
      for (int v = 0; v < TILE_VECTORS; v++) dot(acc[r][v], inputs, here[v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int v = 0; v < TILE_VECTORS; v++) {
      const int64_t c = channel + v * LANES;
      vfloat y = __builtin_convertvector(acc[r][v], vfloat) * load(w.scale + c) * row_scale[r];
      if (w.bias) y += load(w.bias + c);
      if (c + LANES <= w.outputs)
        store(out + r * w.outputs + c, y);
      else
        for (int i = 0; c + i < w.outputs; i++) from_float(y[i], out + r * w.outputs + c + i);
    }
}

template <typename T>
void block_rows(int rows, const LineclearInt8Weights& w, int64_t block, const uint8_t* x, const float* row_scale, T* out) {
  for (int first = 0; first < CHANNELS; first += TILE_VECTORS * LANES) switch (rows) {
      case 1: tile<T, 1>(w, block, first, x, row_scale, out); break;
      case 2: tile<T, 2>(w, block, first, x, row_scale, out); break;
      case 3: tile<T, 3>(w, block, first, x, row_scale, out); break;
      case 4: tile<T, 4>(w, block, first, x, row_scale, out); break;
#if defined(__AVX512VNNI__)
      case 5: tile<T, 5>(w, block, first, x, row_scale, out); break;
      default: tile<T, 6>(w, block, first, x, row_scale, out); break;
#endif
    }
}

template <typename T>
void gemm(const LineclearInt8Weights& w, int64_t rows, const T* x, uint8_t* bytes, float* row_scale, T* out) {
  const int64_t blocks = (w.outputs + CHANNELS - 1) / CHANNELS, tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
#if defined(_OPENMP)
  // A block's weights are read once for all rows. With fewer blocks than threads, rows are split into parts as well.
  const int64_t threads = omp_get_max_threads(), wanted = (2 * threads + blocks - 1) / blocks;
#else
  const int64_t wanted = 1;
#endif
  const int64_t parts = wanted < tiles ? wanted : tiles;
#pragma omp parallel
  {
#pragma omp for schedule(static)
    for (int64_t r = 0; r < rows; r++) row_scale[r] = quantize(x + r * w.inputs, w.inputs, bytes + r * w.inputs);
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t item = 0; item < blocks * parts; item++) {
      const int64_t block = item / parts, part = item % parts;
      for (int64_t t = tiles * part / parts; t < tiles * (part + 1) / parts; t++) {
        const int64_t from = rows * t / tiles, to = rows * (t + 1) / tiles;
        block_rows(int(to - from), w, block, bytes + from * w.inputs, row_scale + from, out + from * w.outputs);
      }
    }
  }
}

}  // namespace

extern "C" {

// out [rows, outputs] = x [rows, inputs] * weights + bias. element, of x and out: 0 fp32, 1 bf16.
void lineclear_int8_gemm(const LineclearInt8Weights* w, int64_t element, int64_t rows, const void* x, void* out) {
  float* row_scale = scratch(rows * (w->inputs / 4 + 1));
  uint8_t* bytes = reinterpret_cast<uint8_t*>(row_scale + rows);
  if (element == 0)
    gemm(*w, rows, (const float*)x, bytes, row_scale, (float*)out);
  else
    gemm(*w, rows, (const bf16*)x, bytes, row_scale, (bf16*)out);
}
}

CAPTURABLE(lineclear_int8_gemm)
