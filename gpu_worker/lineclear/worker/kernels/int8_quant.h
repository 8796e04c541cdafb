// Symmetric int8 quantization of rows, one scale each: for activations, keys and values.

#pragma once

#include "simd.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

typedef uint8_t vbyte_u __attribute__((vector_size(LANES), aligned(1)));
typedef int16_t vword __attribute__((vector_size(2 * LANES)));
typedef int8_t vsigned_u __attribute__((vector_size(LANES), aligned(1)));

// Largest magnitude of a row. Magnitudes are compared as integers, where NaN > infinity > every number. So a row with a NaN
// gets NaN as its scale, and every result computed from it is NaN.
template <typename T>
float max_magnitude(const T* x, int64_t dim) {
  vint top = vint{};
  for (int64_t d = 0; d < dim; d += LANES) {
    const vint bits = (vint)load(x + d) & 0x7fffffff, above = bits > top;
    top = (bits & above) | (top & ~above);
  }
  int32_t best = 0;
  for (int i = 0; i < LANES; i++) best = top[i] > best ? top[i] : best;
  float largest;
  std::memcpy(&largest, &best, 4);
  return largest;
}

// out = round(x / scale) + 128. Returns the scale.
template <typename T>
float quantize(const T* x, int64_t dim, uint8_t* out) {
  const float largest = max_magnitude(x, dim);
  const float inverse = largest < 1e-30f ? 0.0f : 127.0f / largest;  // smaller values count as zero
  for (int64_t d = 0; d < dim; d += LANES) {
    // Adding 1.5 * 2^23 leaves the rounded integer, ties to even, in the low bits.
    const vint whole = (vint)(load(x + d) * inverse + 12582912.0f) - 0x4b400000;
    *reinterpret_cast<vbyte_u*>(out + d) = __builtin_convertvector(whole + 128, vbyte_u);
  }
  return largest / 127.0f;
}

inline vfloat load(const int8_t* p) {
  // Intrinsics: GCC splits a conversion that widens a vector four times at once.
#if defined(__AVX512F__)
  const vint whole = (vint)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX2__)
  const vint whole = (vint)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  const vword wide = __builtin_convertvector(*reinterpret_cast<const vsigned_u*>(p), vword);
  const vint whole = __builtin_convertvector(wide, vint);
#endif
  return __builtin_convertvector(whole, vfloat);
}

}  // namespace
