// Vector types as wide as the instruction set's registers, and their operations on fp32 and bf16 elements.
//
// Compiler vector types (GCC, Clang) instead of intrinsics: one source compiles for AVX-512, AVX2, NEON and others.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;         // floats in a register
constexpr int ACCUMULATORS = 16;  // registers for sums: half of all
#elif defined(__AVX2__)
constexpr int LANES = 8;
constexpr int ACCUMULATORS = 8;
#else
constexpr int LANES = 4;
constexpr int ACCUMULATORS = 8;
#endif

typedef float vfloat __attribute__((vector_size(4 * LANES), aligned(4 * LANES)));
typedef float vfloat_u __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t vint __attribute__((vector_size(4 * LANES), aligned(4 * LANES)));
typedef uint32_t vuint __attribute__((vector_size(4 * LANES), aligned(4 * LANES)));
typedef uint16_t vshort_u __attribute__((vector_size(2 * LANES), aligned(2)));

typedef uint16_t bf16;

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  uint32_t bits = uint32_t(x) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

inline void from_float(float x, float* out) { *out = x; }
inline void from_float(float x, bf16* out) {  // round to nearest, ties to even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    *out = bf16((bits >> 16) | 0x40);
    return;
  }
  *out = bf16((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

inline vfloat splat(float x) { return x - vfloat{}; }  // 0 + x changes -0 and costs an addition
inline vfloat load(const float* p) { return *reinterpret_cast<const vfloat_u*>(p); }
inline vfloat load(const bf16* p) {
  vuint wide = __builtin_convertvector(*reinterpret_cast<const vshort_u*>(p), vuint) << 16;
  return (vfloat)wide;
}
inline vfloat select(vint mask, vfloat yes, vfloat no) {
  vint bits = ((vint)yes & mask) | ((vint)no & ~mask);
  return (vfloat)bits;
}
inline vfloat vmax(vfloat a, vfloat b) { return select(a > b, a, b); }
// Reduces all lanes by halving: a chain through every lane takes four times as long.
inline float hmax(vfloat v) {
  float lane[LANES];
  std::memcpy(lane, &v, sizeof(v));
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; i++) lane[i] = lane[i + width] > lane[i] ? lane[i + width] : lane[i];
  return lane[0];
}
inline float hsum(vfloat v) {
  float lane[LANES];
  std::memcpy(lane, &v, sizeof(v));
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; i++) lane[i] += lane[i + width];
  return lane[0];
}

// Two bf16 in 32 bits, widened with one operation each: keeping neighbours together would cost a shuffle.
inline vuint load_pairs(const bf16* p) {
  vuint pairs;
  std::memcpy(&pairs, p, sizeof(pairs));
  return pairs;
}
inline vfloat first(vuint pairs) { return (vfloat)(pairs << 16); }
inline vfloat second(vuint pairs) { return (vfloat)(pairs & 0xffff0000u); }

// e^x for x <= 88: range reduction by ln 2 and a degree-6 polynomial (coefficients: Cephes expf).
inline vfloat vexp(vfloat x) {
  x = vmax(x, splat(-87.0f));
  x = select(x < 88.0f, x, splat(88.0f));
  vfloat t = x * 1.44269504088896341f + 0.5f;
  vint whole = __builtin_convertvector(t, vint);
  vfloat back = __builtin_convertvector(whole, vfloat);
  vint above = back > t;  // truncation went up for negatives
  whole += above;         // above is -1 where true
  back = __builtin_convertvector(whole, vfloat);
  vfloat r = x - back * 0.693359375f + back * 2.12194440e-4f;
  vfloat p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  vfloat y = p * r * r + r + 1.0f;
  vint exponent = (whole + 127) << 23;
  return y * (vfloat)exponent;
}
inline vfloat vtanh(vfloat x) {
  vfloat e = vexp(x * 2.0f);
  return 1.0f - 2.0f / (e + 1.0f);
}

// Abramowitz and Stegun 7.1.26, to 1.5e-7.
inline vfloat verf(vfloat x) {
  const vfloat size = select(x < 0.0f, -x, x), t = 1.0f / (1.0f + 0.3275911f * size);
  vfloat p = splat(1.061405429f);
  p = p * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  const vfloat y = 1.0f - p * t * vexp(-size * size);
  return select(x < 0.0f, -y, y);
}

inline void store(float* p, vfloat v) { *reinterpret_cast<vfloat_u*>(p) = v; }
inline void store(bf16* p, vfloat v) {  // rounds like from_float
  vuint bits = (vuint)v;
  vuint rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  vuint nan = (bits >> 16) | 0x40u;
  vint is_nan = v != v;
  vuint result = (rounded & ~(vuint)is_nan) | (nan & (vuint)is_nan);
  *reinterpret_cast<vshort_u*>(p) = __builtin_convertvector(result, vshort_u);
}

}  // namespace
