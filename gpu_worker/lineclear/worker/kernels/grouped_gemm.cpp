// Matrix products with quantized weights (quantization/grouped_weight.py): activations are quantized at each call, each
// group of a row by itself, and multiplied with the values of the weights as integers.
//
// A group of inputs has one scale for the row and one for the output channel:
//
//   y = sum over groups of (sum(x8 * (value - offset)) * channel's scale - sum(x8) * channel's minimum) * row's scale
//
// Integer sums are exact, and groups are added in their order by fp32 multiply-adds. So a row's result depends neither on
// the other rows, nor on the threads, nor on the instruction set.
//
// Weights are stored in blocks of CHANNELS output channels, which are read in order. A block has for each group the scales,
// the minima and the values. Four consecutive inputs of a channel form one 32-bit lane. 4-bit values lie in pairs: the low
// halves of a lane are four inputs, the high halves the next four. 6-bit values lie in sixteens: two such pairs with their low
// halves, and a lane with the high two bits of all, those of the first four inputs lowest.
//
// With AVX2, 8-bit values are multiplied by magnitude. Activations of negative values are negated for that, an operation for
// each row that only two of four ports can do on Zen 3. In large groups bits are flipped instead, which gives -x - 1, and the
// sum of the negative values, which a block has for each channel, corrects it (FLIPPED).

#include <type_traits>

#include "int8_quant.h"
#include "graph_capture.h"
#include "scratch.h"

#if defined(_OPENMP)
#include <omp.h>
#endif

extern "C" {

// One matrix of a product. Arrays of channels are padded with zeros to whole blocks.
struct LineclearGroupedWeight {
  int64_t inputs, outputs;
  int64_t group;        // inputs of a group, a multiple of 16
  int64_t kind;         // 0: 8 bits, 1: 4 bits, 2: 4 bits, places in the table, 3: 8 bits, which hold -32 to 31
  int64_t offset;       // subtracted from every value
  int64_t has_minimum;  // whether blocks have minima
  int64_t column;       // of the output, of the first channel
  int64_t stride;       // columns of the output
  uint8_t* blocks;      // [blocks][groups]: fp16 scales, fp16 minima or nothing, int32 sums or nothing, values
  const float* scale;   // [blocks * CHANNELS], multiplies the scales and minima of a channel
  const float* bias;    // [blocks * CHANNELS] or null
  const uint8_t* table; // [16], at most 31, or null
  const int32_t* order; // [inputs]: the input that each column multiplies, or null
};

}  // extern "C"

namespace {

typedef LineclearGroupedWeight Weight;
typedef int32_t vint_u __attribute__((vector_size(4 * LANES), aligned(4)));
enum Kind { BYTES, NIBBLES, PLACES, SIXES, FLIPPED };  // FLIPPED: 8 bits in large groups with AVX2

constexpr int64_t PREFETCH_BYTES = 1024;
constexpr int64_t TASK_BYTES = 1 << 15;  // weights that a thread claims at a time

constexpr int64_t FLIPPED_GROUP = 128;   // in smaller groups, the sums of negative values take too much memory

// acc[lane] += dot product of the lane's four values with four activations, which are the same for all lanes.
#if defined(__AVX512VNNI__)
constexpr int TILE_ROWS = 6, VECTORS = 4, BYTE_OFFSET = 128;  // values are unsigned here
inline void dot(vint& acc, vint values, vint x) {
  // Inline assembly: with the intrinsic GCC copies the 24 sums, which then no longer fit into registers.
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(values), "v"(x));
}
#elif defined(__AVX2__)
// Products of bytes are added in pairs to 16 bits, of which 127 * (15 * 16) and 127 * (31 * 8) still fit. So sums of 4-bit
// values stay in 16 bits for 32 inputs, and those of a table for 16. Of 8 bits, 128 * 127 * 2 fits.
#define SHORT_SUMS 1
typedef int16_t vshort __attribute__((vector_size(4 * LANES)));
#if defined(__AVX512BW__)
constexpr int TILE_ROWS = 6, VECTORS = 4, BYTE_OFFSET = 0;
inline vshort products(vint values, vint x) { return (vshort)_mm512_maddubs_epi16((__m512i)values, (__m512i)x); }
inline vint widen(vshort sums) { return (vint)_mm512_madd_epi16((__m512i)sums, _mm512_set1_epi16(1)); }
inline vint magnitude(vint values) { return (vint)_mm512_abs_epi8((__m512i)values); }
inline vint with_sign(vint x, vint values) {
  return (vint)_mm512_mask_sub_epi8((__m512i)x, _mm512_movepi8_mask((__m512i)values), __m512i{}, (__m512i)x);
}
#else
#define FLIPS 1
constexpr int TILE_ROWS = 4, VECTORS = 2, BYTE_OFFSET = 0;
inline vint flips_of(vint values) { return (vint)_mm256_cmpgt_epi8(__m256i{}, (__m256i)values); }
inline vshort products(vint values, vint x) { return (vshort)_mm256_maddubs_epi16((__m256i)values, (__m256i)x); }
inline vint widen(vshort sums) { return (vint)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(1)); }
inline vint magnitude(vint values) { return (vint)_mm256_abs_epi8((__m256i)values); }
inline vint with_sign(vint x, vint values) { return (vint)_mm256_sign_epi8((__m256i)x, (__m256i)values); }
#endif
// GCC would put off additions, and spill what waits for them.
template <typename V>
inline void add_now(V& sum, V term) {
  sum += term;
  asm volatile("" : "+v"(sum));
}
inline void dot(vint& acc, vint values, vint x) { add_now(acc, widen(products(magnitude(values), with_sign(x, values)))); }
#else
constexpr int TILE_ROWS = 4, VECTORS = 2, BYTE_OFFSET = 0;
inline void dot(vint& acc, vint values, vint x) {
  for (int shift = 24; shift >= 0; shift -= 8) acc += (values << shift >> 24) * (x << shift >> 24);
}
#endif
constexpr int CHANNELS = VECTORS * LANES;
#if !defined(__AVX512F__)
#define SIX_BITS 1  // not measured with AVX-512
#endif

Kind kind_of(const Weight& w) {
#if defined(FLIPS)
  if (w.kind == BYTES && w.group >= FLIPPED_GROUP) return FLIPPED;
#endif
  return Kind(w.kind);
}

inline vint splat(int32_t x) { return x - vint{}; }
inline vint load_bytes(const void* p) { return *reinterpret_cast<const vint_u*>(p); }
inline vint load_four(const void* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  return splat(four);
}

inline vfloat load_half(const uint8_t* p) {
#if defined(__AVX512F__)
  return (vfloat)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
  return (vfloat)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  const vuint half = __builtin_convertvector(*reinterpret_cast<const vshort_u*>(p), vuint);
  const vfloat magnitude = (vfloat)((half & 0x7fff) << 13) * 0x1p112f;  // finite
  return (vfloat)((vuint)magnitude | (half & 0x8000) << 16);
#endif
}

// Look up 16 entries by the low halves of bytes below 16.
inline vint look_up(const uint8_t* table, vint places) {
#if defined(__AVX512BW__)
  const __m128i entries = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return (vint)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(entries), (__m512i)places);
#elif defined(__AVX2__)
  const __m128i entries = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return (vint)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(entries), (__m256i)places);
#else
  uint8_t bytes[4 * LANES];
  std::memcpy(bytes, &places, sizeof(bytes));
  for (auto& byte : bytes) byte = table[byte];
  return load_bytes(bytes);
#endif
}

constexpr bool is_byte(Kind kind) { return kind == BYTES || kind == FLIPPED; }
template <Kind KIND>
constexpr int64_t step_bytes() {  // of the values of a block for four inputs
  return is_byte(KIND) ? CHANNELS * 4 : KIND == SIXES ? CHANNELS * 3 : CHANNELS * 2;
}
constexpr int64_t head_bytes(Kind kind, bool minimum) {  // of a group of a block, before the values
  return CHANNELS * ((minimum ? 4 : 2) + (kind == FLIPPED ? 4 : 0));
}

// Return the values of LANES channels, four inputs each.
template <Kind KIND>
inline vint values_of(const uint8_t* values, int step, int v, const uint8_t* table) {
  if (is_byte(KIND)) return load_bytes(values + step * step_bytes<BYTES>() + v * LANES * 4);
  const int lane = KIND == SIXES ? step / 4 * 3 + step % 4 / 2 : step / 2;
  const vint pair = load_bytes(values + lane * CHANNELS * 4 + v * LANES * 4);
  const vint places = (step % 2 ? pair >> 4 : pair) & 0x0f0f0f0f;
  if (KIND == SIXES) {
    const vint high = load_bytes(values + (step / 4 * 3 + 2) * CHANNELS * 4 + v * LANES * 4);
    return places | ((step % 4 == 3 ? high >> 2 : high << (4 - step % 4 * 2)) & 0x30303030);
  }
  return KIND == PLACES ? look_up(table, places) : places;
}

// Activations as integers, with a scale for each group.
struct Rows {
  int64_t inputs, groups;
  int8_t* bytes;      // [rows, inputs]
  float* scale;       // [rows, groups]
  float* scaled_sum;  // [rows, groups]: scale * sum(bytes)
  int32_t* start;     // [rows, groups]: -offset * sum(bytes)

  Rows from(int64_t row) const {
    const int64_t first = row * groups;
    return {inputs, groups, bytes + row * inputs, scale + first, scaled_sum + first, start + first};
  }
};

// acc = the products of INPUTS inputs. With SHORT_SUMS, those of 4-bit values as sums of 16 bits.
template <Kind KIND, int ROWS, int INPUTS, typename V>
inline void multiply(V acc[ROWS][VECTORS], const uint8_t* values, const int8_t* x, int64_t inputs, const uint8_t* table) {
#pragma GCC unroll 8
  for (int step = 0; step < INPUTS / 4; step++) {
    vint here[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) here[v] = values_of<KIND>(values, step, v, table);
#if defined(FLIPS)
    vint flips[VECTORS];
    for (int v = 0; v < VECTORS && KIND == FLIPPED; v++) flips[v] = flips_of(here[v]), here[v] = magnitude(here[v]);
#endif
    for (int64_t line = 0; step % 2 == 0 && line < 2 * step_bytes<KIND>(); line += 64)
      __builtin_prefetch(values + step * step_bytes<KIND>() + line + PREFETCH_BYTES);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
      const vint four = load_four(x + r * inputs + step * 4);
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++) {
#if defined(FLIPS)
        if constexpr (KIND == FLIPPED) {
          add_now(acc[r][v], widen(products(here[v], four ^ flips[v])));
          continue;
        }
#endif
#if defined(SHORT_SUMS)
        if constexpr (sizeof(V{}[0]) == 2) {
          if (step)
            add_now(acc[r][v], products(here[v], four));
          else
            acc[r][v] = products(here[v], four);
          continue;
        }
#endif
        if constexpr (sizeof(V{}[0]) == 4) dot(acc[r][v], here[v], four);
      }
    }
  }
}

// Compute ROWS rows of a block: out [ROWS, CHANNELS], without the channels' scale and bias.
template <Kind KIND, bool MINIMUM, int ROWS>
void tile(const Weight& w, const uint8_t* block, const Rows& x, float* out) {
  for (int i = 0; i < ROWS * CHANNELS; i += LANES) store(out + i, vfloat{});
  for (int64_t g = 0; g < x.groups; g++) {
    const uint8_t* values = block + head_bytes(KIND, MINIMUM);
    const int8_t* bytes = x.bytes + g * w.group;
    // Add the sums of the group, in integers so far.
    const auto finish = [&](const vint (&acc)[ROWS][VECTORS]) {
      vfloat scale[VECTORS], minimum[VECTORS];
      vint negative[VECTORS] = {};  // sums
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++) {
        scale[v] = load_half(block + v * LANES * 2);
        if (MINIMUM) minimum[v] = load_half(block + (CHANNELS + v * LANES) * 2);
        if (KIND == FLIPPED) negative[v] = load_bytes(values + (v * LANES - CHANNELS) * 4);
      }
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) {
        const int64_t at = r * x.groups + g;
        const vint start = load_four(x.start + at);
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
          float* to = out + r * CHANNELS + v * LANES;
          vfloat y = load(to) + __builtin_convertvector(acc[r][v] - negative[v] + start, vfloat) * (scale[v] * x.scale[at]);
          if (MINIMUM) y -= minimum[v] * x.scaled_sum[at];
          store(to, y);
        }
      }
    };
#if defined(SHORT_SUMS)
    constexpr int INPUTS = KIND == NIBBLES ? 32 : 16;
    if constexpr (!is_byte(KIND)) {
      const auto widened = [&](auto inputs, int64_t k, vint (&acc)[ROWS][VECTORS]) {
        vshort sums[ROWS][VECTORS];
        multiply<KIND, ROWS, inputs.value>(sums, values + k / 4 * step_bytes<KIND>(), bytes + k, x.inputs, w.table);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
          for (int v = 0; v < VECTORS; v++) acc[r][v] += widen(sums[r][v]);
      };
      vint acc[ROWS][VECTORS] = {};
      const std::integral_constant<int, INPUTS> most;
      if (w.group == INPUTS) {  // sums stay in registers
        widened(most, 0, acc);
        finish(acc);
      } else {
        int64_t k = 0;
        for (; k + INPUTS <= w.group; k += INPUTS) widened(most, k, acc);
        if (k < w.group) widened(std::integral_constant<int, 16>{}, k, acc);
        finish(acc);
      }
      block = values + w.group / 4 * step_bytes<KIND>();
      continue;
    }
#endif
    vint acc[ROWS][VECTORS] = {};
    for (int64_t k = 0; k < w.group; k += 16)
      multiply<KIND, ROWS, 16>(acc, values + k / 4 * step_bytes<KIND>(), bytes + k, x.inputs, w.table);
    finish(acc);
    block = values + w.group / 4 * step_bytes<KIND>();
  }
}

#if defined(SIX_BITS)
// As `tile`, of 6-bit values. In such small groups it would take twice as long: more operations on sums than products.
template <int GROUP, bool MINIMUM, int ROWS>
void tile_of_sixes(const Weight& w, const uint8_t* block, const Rows& x, float* out) {
  vfloat sums[ROWS][VECTORS] = {};
  for (int64_t g = 0; g < x.groups; g++) {
    const uint8_t* values = block + head_bytes(SIXES, MINIMUM);
    vint here[GROUP / 4][VECTORS];
    vfloat scale[VECTORS], minimum[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) {
#pragma GCC unroll 8
      for (int step = 0; step < GROUP / 4; step++) here[step][v] = values_of<SIXES>(values, step, v, nullptr);
      scale[v] = load_half(block + v * LANES * 2);
      if (MINIMUM) minimum[v] = load_half(block + (CHANNELS + v * LANES) * 2);
    }
    const uint8_t* end = values + GROUP / 4 * step_bytes<SIXES>();
    for (; block < end; block += 64) __builtin_prefetch(block + PREFETCH_BYTES);
    block = end;
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
      const int8_t* bytes = x.bytes + r * x.inputs + g * GROUP;
      const int64_t at = r * x.groups + g;
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++) {
        vint acc = load_four(x.start + at);
#pragma GCC unroll 8
        for (int step = 0; step < GROUP / 4; step += 2) {
          const vint first = load_four(bytes + step * 4), second = load_four(bytes + step * 4 + 4);
#if defined(SHORT_SUMS)
          acc += widen(products(here[step][v], first) + products(here[step + 1][v], second));  // at most 63 * 127 * 4
#else
          dot(acc, here[step][v], first), dot(acc, here[step + 1][v], second);
#endif
        }
        sums[r][v] += __builtin_convertvector(acc, vfloat) * (scale[v] * x.scale[at]);
        if (MINIMUM) sums[r][v] -= minimum[v] * x.scaled_sum[at];
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) store(out + r * CHANNELS + v * LANES, sums[r][v]);
}
#endif

typedef void (*Tile)(const Weight&, const uint8_t*, const Rows&, float*);
template <Kind KIND, bool MINIMUM>
constexpr Tile TILES[] = {nullptr, tile<KIND, MINIMUM, 1>, tile<KIND, MINIMUM, 2>, tile<KIND, MINIMUM, 3>,
                          tile<KIND, MINIMUM, 4>,
#if defined(__AVX512BW__)
                          tile<KIND, MINIMUM, 5>, tile<KIND, MINIMUM, 6>
#endif
};
#if defined(SIX_BITS)
template <int GROUP, bool MINIMUM>
constexpr Tile TILES_OF_SIXES[] = {nullptr, tile_of_sixes<GROUP, MINIMUM, 1>, tile_of_sixes<GROUP, MINIMUM, 2>,
                                   tile_of_sixes<GROUP, MINIMUM, 3>, tile_of_sixes<GROUP, MINIMUM, 4>};
#endif
static_assert(sizeof(TILES<BYTES, true>) / sizeof(Tile) == TILE_ROWS + 1, "a function for each number of rows");

const Tile* tiles_of(const Weight& w) {
  const bool minimum = w.has_minimum;
#if defined(FLIPS)
  if (kind_of(w) == FLIPPED) return minimum ? TILES<FLIPPED, true> : TILES<FLIPPED, false>;
#endif
  if (w.kind == BYTES) return minimum ? TILES<BYTES, true> : TILES<BYTES, false>;
#if defined(SIX_BITS)
  if (w.kind == SIXES && w.group == 16) return minimum ? TILES_OF_SIXES<16, true> : TILES_OF_SIXES<16, false>;
  if (w.kind == SIXES) return minimum ? TILES_OF_SIXES<32, true> : TILES_OF_SIXES<32, false>;
#endif
  if (w.kind == NIBBLES) return minimum ? TILES<NIBBLES, true> : TILES<NIBBLES, false>;
  return minimum ? TILES<PLACES, true> : TILES<PLACES, false>;
}

int64_t bytes_of_block(const Weight& w) {
  const int64_t values = w.inputs * (w.kind == BYTES ? 4 : w.kind == SIXES ? 3 : 2) / 4;
  return CHANNELS * values + w.inputs / w.group * head_bytes(kind_of(w), w.has_minimum);
}

// Quantize a row: its groups, each as `quantize` of int8_quant.h, without the offset.
template <typename T>
void quantize_row(const T* x, const Weight& w, const Rows& out) {
  const int64_t group = w.group;
  for (int64_t g = 0; g < out.groups; g++) {
    const T* from = x + g * group;
    int8_t* to = out.bytes + g * group;
    const float largest = max_magnitude(from, group);
    const float inverse = largest < 1e-30f ? 0.0f : 127.0f / largest;  // smaller values count as zero
    vint sums = vint{};
    for (int64_t i = 0; i < group; i += LANES) {
      // Adding 1.5 * 2^23 leaves the rounded integer, ties to even, in the low bits.
      const vint whole = (vint)(load(from + i) * inverse + 12582912.0f) - 0x4b400000;
      sums += whole;
      *reinterpret_cast<vsigned_u*>(to + i) = __builtin_convertvector(whole, vsigned_u);
    }
    int32_t sum = 0;
    for (int l = 0; l < LANES; l++) sum += sums[l];
    out.scale[g] = largest / 127.0f;
    out.scaled_sum[g] = out.scale[g] * sum;
    out.start[g] = int32_t(-w.offset * sum);
  }
}

template <typename T>
void quantize_row_in_order(const T* x, const Weight& w, float* ordered, const Rows& out) {
  for (int64_t i = 0; i < w.inputs; i++) ordered[i] = to_float(x[w.order[i]]);
  quantize_row(ordered, w, out);
}

// Multiply one row of sums by the channels' scales, add the bias and store it.
template <typename T>
inline void store_row(const Weight& w, int64_t channel, const float* sums, T* out) {
  for (int64_t c = channel; c < channel + CHANNELS; c += LANES) {
    vfloat y = load(sums + c - channel) * load(w.scale + c);
    if (w.bias) y += load(w.bias + c);
    if (c + LANES <= w.outputs)
      store(out + c, y);
    else
      for (int i = 0; c + i < w.outputs; i++) from_float(y[i], out + c + i);
  }
}

template <typename T>
void block_rows(const Weight& w, int64_t block, const uint8_t* at, const Rows& x, int64_t rows, Tile tile, T* out) {
  float sums[TILE_ROWS * CHANNELS];
  tile(w, at, x, sums);
  for (int64_t r = 0; r < rows; r++) store_row(w, block * CHANNELS, sums + r * CHANNELS, out + r * w.stride + w.column);
}

bool same_inputs(const Weight& a, const Weight& b) {
  return a.group == b.group && a.offset == b.offset && a.order == b.order;
}

template <typename T>
void gemm(const Weight* parts, int64_t count, int64_t rows, const T* x, T* out) {
  const int64_t inputs = parts->inputs, tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
  int64_t most_groups = 0;
  bool ordered = false;
  for (int64_t p = 0; p < count; p++) {
    most_groups = inputs / parts[p].group > most_groups ? inputs / parts[p].group : most_groups;
    ordered |= parts[p].order != nullptr;
  }
  float* memory = scratch(rows * (inputs / 4 + 3 * most_groups + (ordered ? inputs : 0)));
  float* scales = memory + rows * inputs / 4;
  float* in_order = scales + 3 * rows * most_groups;
#if defined(_OPENMP)
  const int64_t threads = omp_get_max_threads();
#else
  const int64_t threads = 1;
#endif
#pragma omp parallel
  for (int64_t p = 0; p < count; p++) {
    const Weight& w = parts[p];
    const int64_t groups = inputs / w.group;
    const Rows all{inputs, groups, reinterpret_cast<int8_t*>(memory), scales, scales + rows * groups,
                   reinterpret_cast<int32_t*>(scales + 2 * rows * groups)};
    if (p == 0 || !same_inputs(w, parts[p - 1])) {
#pragma omp barrier
#pragma omp for schedule(static)
      for (int64_t r = 0; r < rows; r++)
        if (w.order)
          quantize_row_in_order(x + r * inputs, w, in_order + r * inputs, all.from(r));
        else
          quantize_row(x + r * inputs, w, all.from(r));
    }
    // A block's weights are read once for all rows. With fewer blocks than threads, rows are split into parts as well.
    const int64_t blocks = (w.outputs + CHANNELS - 1) / CHANNELS, wanted = (2 * threads + blocks - 1) / blocks;
    const int64_t shares = wanted < tiles ? wanted : tiles, bytes = bytes_of_block(w), fit = TASK_BYTES / bytes;
    const int64_t most = blocks * shares / (4 * threads), task = fit < most ? fit : most;
    const Tile* by_rows = tiles_of(w);
#pragma omp for schedule(dynamic, task > 0 ? task : 1) nowait
    for (int64_t item = 0; item < blocks * shares; item++) {
      const int64_t block = item / shares, share = item % shares;
      for (int64_t t = tiles * share / shares; t < tiles * (share + 1) / shares; t++) {
        const int64_t from = rows * t / tiles, here = rows * (t + 1) / tiles - from;
        block_rows(w, block, w.blocks + block * bytes, all.from(from), here, by_rows[here], out + from * w.stride);
      }
    }
  }
}

// Put the eight 4-bit values of four bytes in the order of `Kind::NIBBLES`.
inline uint32_t in_pairs(uint32_t codes) {
  codes = (codes & 0xff0000ff) | (codes & 0x00ff0000) >> 8 | (codes & 0x0000ff00) << 8;
  return (codes & 0xf00ff00f) | (codes & 0x0f000f00) >> 4 | (codes & 0x00f000f0) << 4;
}

// Write a channel's values of one group into a block, behind the sums of negative values.
void pack_channel(const Weight& w, const uint8_t* codes, uint8_t* to) {
  int32_t negative = 0;
  for (int64_t i = 0; kind_of(w) == FLIPPED && i < w.group; i++) negative += codes[i] & 128 ? codes[i] - 256 : 0;
  if (kind_of(w) == FLIPPED) std::memcpy(to - CHANNELS * 4, &negative, 4);
  for (int64_t i = 0; w.kind == SIXES && i < w.group; i += 16, to += CHANNELS * 12) {
    uint32_t fours[4], high = 0;
    std::memcpy(fours, codes + i, 16);
    for (int n = 0; n < 4; n++) {
      fours[n] = (fours[n] & 0x3f3f3f3f) ^ 0x20202020;  // plus 32
      high |= (fours[n] >> 4 & 0x03030303) << 2 * n;
      fours[n] &= 0x0f0f0f0f;
    }
    const uint32_t lanes[] = {fours[0] | fours[1] << 4, fours[2] | fours[3] << 4, high};
    for (int n = 0; n < 3; n++) std::memcpy(to + n * CHANNELS * 4, lanes + n, 4);
  }
  for (int64_t at = 0; at < (w.kind == BYTES ? w.group : w.kind == SIXES ? 0 : w.group / 2); at += 4) {
    uint32_t four;
    std::memcpy(&four, codes + at, 4);
    four = w.kind == BYTES ? four ^ BYTE_OFFSET * 0x01010101u : in_pairs(four);
    std::memcpy(to + at * CHANNELS, &four, 4);
  }
}

// Quantize a group of inputs as `quantize` of quantization/grouped_weight.py. A NaN makes the scale NaN.
template <typename T>
void quantize_group(bool four_bits, int64_t group, const T* x, uint8_t* codes, float* scale, float* minimum) {
  vuint low_bits = {}, high_bits = {};  // of numbers of one sign, larger magnitudes are larger integers
  for (int64_t i = 0; i < group; i += LANES) {
    const vuint bits = (vuint)load(x + i), negative = (vuint)((vint)bits >> 31);
    const vuint below = bits & negative, above = bits & ~negative;
    low_bits = below > low_bits ? below : low_bits;
    high_bits = above > high_bits ? above : high_bits;
  }
  uint32_t low = 0, high = 0;
  for (int l = 0; l < LANES; l++) {
    low = low_bits[l] > low ? low_bits[l] : low;
    high = high_bits[l] > high ? high_bits[l] : high;
  }
  if (!four_bits) high = (low & 0x7fffffff) > high ? low & 0x7fffffff : high, low = 0;
  float range[2];
  std::memcpy(range, &low, 4), std::memcpy(range + 1, &high, 4);
  float step = (range[1] - range[0]) / (four_bits ? 15 : 127);
  uint32_t rounded;  // up to a number of bfloat16
  std::memcpy(&rounded, &step, 4);
  rounded = step == step ? (rounded + 0xffff) & ~0xffff : 0x7fc00000;
  std::memcpy(&step, &rounded, 4);
  *scale = step;
  const float divisor = step > 0 ? step : 1, zero = std::nearbyint(-range[0] / divisor);
  if (four_bits) *minimum = zero * step;
  for (int64_t i = 0; i < group; i += LANES) {
    // Adding 1.5 * 2^23 leaves the rounded integer, ties to even, in the low bits.
    vint whole = (vint)((load(x + i) / divisor + zero) + 12582912.0f) - 0x4b400000;
    if (!four_bits) {
      *reinterpret_cast<vsigned_u*>(codes + i) = __builtin_convertvector(whole, vsigned_u);
      continue;
    }
    whole = whole < 0 ? vint{} : whole > 15 ? vint{} + 15 : whole;
    for (int l = 0; l < LANES; l += 2) codes[(i + l) / 2] = uint8_t(whole[l] | whole[l + 1] << 4);
  }
}

template <typename T>
void quantize_groups(bool four_bits, int64_t groups, int64_t group, const T* x, uint8_t* codes, float* scale, float* minimum) {
#pragma omp parallel for schedule(static)
  for (int64_t g = 0; g < groups; g++)
    quantize_group(four_bits, group, x + g * group, codes + g * group / (four_bits ? 2 : 1), scale + g, minimum + g);
}

// Return the values of 16 inputs of GroupedWeight.codes. buffer: where they are put unless they lie there as they are.
inline const int8_t* sixteen_values(int64_t bits, const uint8_t* codes, const uint8_t* table, int8_t* buffer) {
  if (bits == 8) return reinterpret_cast<const int8_t*>(codes);
  typedef uint8_t bytes_u __attribute__((vector_size(8), aligned(1)));
  typedef uint16_t pairs __attribute__((vector_size(16)));
  pairs both = __builtin_convertvector(*reinterpret_cast<const bytes_u*>(codes), pairs);
  both = (both & 15) | both >> 4 << 8;
  std::memcpy(buffer, &both, 16);
  for (int i = 0; table && i < 16; i++) buffer[i] = int8_t(table[buffer[i]]);
  return buffer;
}

template <typename T>
void dequantize(int64_t bits, int64_t groups, int64_t group, const uint8_t* codes, const uint8_t* table, const float* scale,
                const float* minimum, T* out) {
#pragma omp parallel for schedule(static) if (groups * group > TASK_BYTES)
  for (int64_t g = 0; g < groups; g++)
    for (int64_t i = g * group; i < (g + 1) * group; i += 16) {
      int8_t buffer[16];
      const int8_t* values = sixteen_values(bits, codes + i * bits / 8, table, buffer);
      for (int l = 0; l < 16; l += LANES) {
        vfloat y = load(values + l) * scale[g];
        asm("" : "+m"(y));  // rounded here, without a fused multiply-add
        store(out + i + l, minimum ? y - minimum[g] : y);
      }
    }
}

}  // namespace

extern "C" {

// Number of channels of a block.
int64_t lineclear_grouped_channels() { return CHANNELS; }

// Number of bytes of `blocks`. Sets `kind` to how this library holds the values.
int64_t lineclear_grouped_size(LineclearGroupedWeight* w) {
#if defined(SIX_BITS)
  if (w->kind == SIXES && w->group > 32) w->kind = BYTES;
#else
  if (w->kind == SIXES) w->kind = BYTES;
#endif
  return (w->outputs + CHANNELS - 1) / CHANNELS * bytes_of_block(*w);
}

// Quantize `groups` groups of inputs, a multiple of 16, to codes of 4 or 8 bits. element, of x: 0 fp32, 1 bf16. With 8 bits
// there are no minima.
void lineclear_quantize_groups(int64_t element, int64_t bits, int64_t groups, int64_t group, const void* x, uint8_t* codes,
                               float* scale, float* minimum) {
  if (element == 0)
    quantize_groups(bits == 4, groups, group, (const float*)x, codes, scale, minimum);
  else
    quantize_groups(bits == 4, groups, group, (const bf16*)x, codes, scale, minimum);
}

// out [groups * group] = value * scale - minimum of each group of a GroupedWeight. table: [16], or null; minimum may be null.
// element, of out: as above.
void lineclear_dequantize(int64_t element, int64_t bits, int64_t groups, int64_t group, const uint8_t* codes,
                          const uint8_t* table, const float* scale, const float* minimum, void* out) {
  if (element == 0)
    dequantize(bits, groups, group, codes, table, scale, minimum, (float*)out);
  else
    dequantize(bits, groups, group, codes, table, scale, minimum, (bf16*)out);
}

// Fill `blocks`, which are zeros, and add to `offset` what is added to the values. codes: those of a GroupedWeight. scale and minimum: fp16 [outputs, groups].
void lineclear_pack_grouped(LineclearGroupedWeight* w, const uint8_t* codes, const uint16_t* scale, const uint16_t* minimum) {
  w->offset += w->kind == BYTES ? BYTE_OFFSET : w->kind == SIXES ? 32 : 0;
  const int64_t groups = w->inputs / w->group, bytes = bytes_of_block(*w), group_bytes = bytes / groups;
  const int64_t row_bytes = w->inputs * (w->kind == BYTES || w->kind == SIXES ? 2 : 1) / 2;
#pragma omp parallel for schedule(static)
  for (int64_t block = 0; block < (w->outputs + CHANNELS - 1) / CHANNELS; block++)
    for (int64_t c = 0; c < CHANNELS && block * CHANNELS + c < w->outputs; c++)
      for (int64_t g = 0, channel = block * CHANNELS + c; g < groups; g++) {
        uint8_t* to = w->blocks + block * bytes + g * group_bytes;
        std::memcpy(to + c * 2, scale + channel * groups + g, 2);
        if (minimum) std::memcpy(to + (CHANNELS + c) * 2, minimum + channel * groups + g, 2);
        pack_channel(*w, codes + channel * row_bytes + g * (row_bytes / groups), to + head_bytes(kind_of(*w), minimum) + c * 4);
      }
}

// out [rows, stride] = x [rows, inputs] * each of `count` weights + bias, at its column. element, of x and out: 0 fp32, 1 bf16.
void lineclear_grouped_gemm(const LineclearGroupedWeight* parts, int64_t count, int64_t element, int64_t rows, const void* x, void* out) {
  if (rows == 0) return;
  if (element == 0)
    gemm(parts, count, rows, (const float*)x, (float*)out);
  else
    gemm(parts, count, rows, (const bf16*)x, (bf16*)out);
}

// As `lineclear_grouped_gemm` for the matrices of `experts`, parts[e] to each, with the next counts[e] rows.
void lineclear_grouped_gemm_experts(const LineclearGroupedWeight* const* weights, const int64_t* parts, int64_t experts,
                                    int64_t element, const int64_t* counts, const void* x, void* out) {
  const int64_t bytes = element == 0 ? sizeof(float) : sizeof(bf16);
  for (int64_t e = 0, row = 0; e < experts; row += counts[e++])
    lineclear_grouped_gemm(weights[e], parts[e], element, counts[e], (const char*)x + row * weights[e]->inputs * bytes,
                           (char*)out + row * weights[e]->stride * bytes);
}
}

CAPTURABLE(lineclear_grouped_gemm)
CAPTURABLE(lineclear_grouped_gemm_experts)
