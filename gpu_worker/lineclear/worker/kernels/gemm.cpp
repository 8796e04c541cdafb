// Matrix products with constant bf16 or fp32 weights, in fp32 multiply-adds.
//
// On many processors the bf16 dot product is the slower way: on Sapphire Rapids without AMX it runs at a quarter of the
// rate, half of the work per second. Widening two bf16 to fp32 and multiplying those is faster there, and the only way
// where there is no such instruction. Weights are packed into panels of 16 outputs, and a panel is read from memory once
// for all rows. Sums are fp32, taken in the order of the inputs by one register per row and output. So a row's result does
// not depend on the other rows, nor on the threads. For fp32 weights oneDNN is as fast; this order is why they are here.

#include <atomic>

#include "graph_capture.h"
#include "scratch.h"
#include "simd.h"

#if defined(__AVX512BF16__)
#include <chrono>
#include <immintrin.h>
#endif

namespace {

constexpr int PANEL = 16;               // outputs side by side
constexpr int VECTORS = PANEL / LANES;  // registers for them
constexpr int PREFETCH_BYTES = 512;           // bytes ahead; a panel is read in order

// A tile of rows x panels keeps its sums in registers; the rest hold one weight of each panel and one input.
#if defined(__AVX512F__)
constexpr int MAX_ROWS = 13, ROWS_OF_4_PANELS = 5, ROWS_OF_2_PANELS = 13;
#elif defined(__AVX2__)
constexpr int MAX_ROWS = 6, ROWS_OF_4_PANELS = 1, ROWS_OF_2_PANELS = 2;
#else
constexpr int MAX_ROWS = 4, ROWS_OF_4_PANELS = 0, ROWS_OF_2_PANELS = 2;
#endif
constexpr int panels_for(int rows) { return rows <= ROWS_OF_4_PANELS ? 4 : rows <= ROWS_OF_2_PANELS ? 2 : 1; }

constexpr int64_t TASK_PANELS = 4;  // panels that a thread claims at a time
constexpr int64_t MAX_GROUPS = 9;   // groups of rows whose inputs stay in the cache while the weights stream by

template <typename T>
struct Gemm {
  int64_t inputs, outputs;
  const T* weights;   // bf16 [panel, inputs / 2, 16, 2], fp32 [panel, inputs, 16]
  const float* bias;  // a whole number of panels, or null
};

// Weights of an input and the next one, for LANES outputs.
template <typename T>
struct Pair;
template <>
struct Pair<bf16> {
  static constexpr int STRIDE = 2;  // elements between two outputs
#if defined(__AVX2__) && !defined(__AVX512F__)
  // Loaded twice: of 16 registers 12 hold sums, and none is left to keep it in.
  const bf16* at;
  void read(const bf16* from) { at = from; }
  vfloat even() const { return first(load_pairs(at)); }
  vfloat odd() const {
    const bf16* again = at;
    asm("" : "+r"(again));
    return second(load_pairs(again));
  }
#else
  vuint both;
  void read(const bf16* at) { both = load_pairs(at); }
  vfloat even() const { return first(both); }
  vfloat odd() const { return second(both); }
#endif
};
template <>
struct Pair<float> {
  static constexpr int STRIDE = 1;
  const float* at;
  void read(const float* from) { at = from; }  // a load costs no operation of its own
  vfloat even() const { return load(at); }
  vfloat odd() const { return load(at + PANEL); }
};

inline void multiply_add(vfloat& sum, vfloat weights, vfloat input) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  // Inline assembly: GCC would choose forms of the instruction that move sums between registers, and spill them.
  asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(weights), "x"(input));
#else
  sum += weights * input;
#endif
}

// The panels of a thread's next task. Each tile of the current task prefetches one of them into L2. Otherwise the first
// group of rows of each task would wait for memory, and the other groups would leave memory idle.
struct Prefetcher {
  const char *at, *end;
  const char* next(int64_t bytes) {
    if (at == end) return nullptr;
    at += bytes;
    return at - bytes;
  }
};

// Add the bias to one row of sums, round and store it. The last panel may be wider than the matrix.
template <typename T>
inline void store_row(const Gemm<T>& p, const float* sums, int64_t column, int64_t count, T* out) {
  for (int64_t j = 0; j < count; j += LANES) {
    const int64_t left = p.outputs - column - j;
    const vfloat sum = p.bias ? load(sums + j) + load(p.bias + column + j) : load(sums + j);
    if (left >= LANES) {
      store(out + column + j, sum);
    } else if (left > 0) {
      T rounded[LANES];
      store(rounded, sum);
      std::memcpy(out + column + j, rounded, left * sizeof(T));
    }
  }
}

// Compute outputs [ROWS, PANELS * 16] from `column` on. inputs: fp32 [inputs, ROWS]. ahead: a panel to prefetch, or null.
template <typename T, int ROWS, int PANELS>
void tile(const Gemm<T>& p, const float* inputs, int64_t column, const char* ahead, T* out) {
  constexpr int N = PANELS * VECTORS;
  const T* weights = p.weights + column * p.inputs;
  if (!ahead) ahead = (const char*)weights;  // already in the cache
  vfloat sums[ROWS][N];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) sums[r][n] = vfloat{};
  for (int64_t i = 0; i < p.inputs; i += 2) {
    constexpr int64_t BYTES = 2 * PANEL * sizeof(T);  // of a panel, for two inputs
    for (int64_t line = 0; ROWS > 1 && line < BYTES; line += 64) __builtin_prefetch(ahead + i / 2 * BYTES + line, 0, 1);
    Pair<T> pairs[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) {
      const T* at = weights + ((n / VECTORS) * p.inputs + i) * PANEL + (n % VECTORS) * LANES * Pair<T>::STRIDE;
      for (int64_t line = 0; n % VECTORS == 0 && line < BYTES; line += 64)
        __builtin_prefetch((const char*)at + PREFETCH_BYTES + line);
      pairs[n].read(at);
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
      for (int n = 0; n < N; n++) multiply_add(sums[r][n], pairs[n].even(), splat(inputs[i * ROWS + r]));
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
      for (int n = 0; n < N; n++) multiply_add(sums[r][n], pairs[n].odd(), splat(inputs[(i + 1) * ROWS + r]));
  }
  float num_panels[ROWS][N * LANES];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) store(num_panels[r] + n * LANES, sums[r][n]);
  for (int r = 0; r < ROWS; r++) store_row(p, num_panels[r], column, N * LANES, out + r * p.outputs);
}

template <typename T, int ROWS>
void tiles(const Gemm<T>& p, const float* inputs, int64_t panel, int64_t end, Prefetcher ahead, T* out) {
  constexpr int PANELS = panels_for(ROWS);
  const int64_t size = p.inputs * PANEL * sizeof(T);
  for (; panel + PANELS <= end; panel += PANELS)
    tile<T, ROWS, PANELS>(p, inputs, panel * PANEL, ahead.next(size), out);
  for (; panel < end; panel++) tile<T, ROWS, 1>(p, inputs, panel * PANEL, ahead.next(size), out);
}

template <typename T>
using Tiles = void (*)(const Gemm<T>&, const float*, int64_t, int64_t, Prefetcher, T*);
template <typename T>
constexpr Tiles<T> TILES[] = {nullptr,      tiles<T, 1>,  tiles<T, 2>,  tiles<T, 3>,  tiles<T, 4>,
#if defined(__AVX512F__)
                              tiles<T, 5>,  tiles<T, 6>,  tiles<T, 7>,  tiles<T, 8>,  tiles<T, 9>,
                              tiles<T, 10>, tiles<T, 11>, tiles<T, 12>, tiles<T, 13>
#elif defined(__AVX2__)
                              tiles<T, 5>,  tiles<T, 6>
#endif
};
static_assert(sizeof(TILES<bf16>) / sizeof(Tiles<bf16>) == MAX_ROWS + 1, "a function for each number of rows");

// Transpose and widen: out fp32 [inputs, rows], x [rows, inputs].
template <typename T>
void transpose(const T* x, int64_t rows, int64_t inputs, float* out) {
  for (int64_t i = 0; i < inputs; i += LANES)
    for (int64_t r = 0; r < rows; r++) {
      const vfloat v = load(x + r * inputs + i);
      for (int l = 0; l < LANES; l++) out[(i + l) * rows + r] = v[l];
    }
}

// Words of one float or of the two bf16 that stay side by side.
void pack(int64_t outputs, int64_t words, const uint32_t* from, uint32_t* panels) {
  constexpr int64_t LINE = 16;
#pragma omp parallel for schedule(static)
  for (int64_t panel = 0; panel < (outputs + PANEL - 1) / PANEL; panel++)
    for (int64_t begin = 0; begin < words; begin += LINE)
      for (int64_t j = 0; j < PANEL; j++) {  // a cache line of each output: their rows may share the sets of the cache
        const int64_t output = panel * PANEL + j, end = begin + LINE < words ? begin + LINE : words;
        uint32_t* to = panels + panel * words * PANEL + j;
        for (int64_t i = begin; i < end; i++) to[i * PANEL] = output < outputs ? from[output * words + i] : 0;
      }
}

template <typename T>
void gemm(int64_t rows, int64_t inputs, int64_t outputs, const T* x, const T* panels, const float* bias, T* out) {
  const Gemm<T> gemm{inputs, outputs, panels, bias};
  const int64_t groups = (rows + MAX_ROWS - 1) / MAX_ROWS, num_panels = (outputs + PANEL - 1) / PANEL;
  const auto row = [&](int64_t group) { return group * rows / groups; };  // groups of nearly equal size
  const int64_t blocks = (groups + MAX_GROUPS - 1) / MAX_GROUPS, groups_per_block = (groups + blocks - 1) / blocks;
  float* transposed = scratch(groups_per_block * MAX_ROWS * inputs);
  std::atomic<int64_t> num_claimed;
#pragma omp parallel
  for (int64_t begin = 0; begin < groups; begin += groups_per_block) {
    const int64_t end = begin + groups_per_block < groups ? begin + groups_per_block : groups, size = inputs * PANEL * sizeof(T);
    const auto group_inputs = [&](int64_t group) { return transposed + (row(group) - row(begin)) * inputs; };
#pragma omp single nowait
    num_claimed = 0;
#pragma omp for schedule(static)
    for (int64_t g = begin; g < end; g++) transpose(x + row(g) * inputs, row(g + 1) - row(g), inputs, group_inputs(g));
    // The next task is claimed before the current one runs, so that its weights are prefetched in time.
    int64_t now = num_claimed.fetch_add(TASK_PANELS);
    while (now < num_panels) {
      const int64_t next = num_claimed.fetch_add(TASK_PANELS), stop = now + TASK_PANELS < num_panels ? now + TASK_PANELS : num_panels;
      const int64_t next_count = next + TASK_PANELS <= num_panels ? TASK_PANELS : next < num_panels ? num_panels - next : 0;
      for (int64_t g = begin; g < end; g++) {
        // The next task's panels, divided among the groups. A single group already keeps memory busy.
        const auto panel = [&](int64_t n) { return (const char*)panels + (next + next_count * n / (end - begin)) * size; };
        const Prefetcher ahead{panel(g - begin), end - begin > 1 ? panel(g - begin + 1) : panel(g - begin)};
        TILES<T>[row(g + 1) - row(g)](gemm, group_inputs(g), now, stop, ahead, out + row(g) * outputs);
      }
      now = next;
    }
#pragma omp barrier
  }
}

#if defined(__AVX512BF16__)
template <typename Work>
double seconds(Work work) {
  double best = 1e9;
  for (int attempt = 0; attempt < 20; attempt++) {
    const auto begin = std::chrono::steady_clock::now();
    work();
    const double took = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    best = took < best ? took : best;
  }
  return best;
}
#endif

}  // namespace

extern "C" {

// Return 1 where two fp32 multiply-adds take at most about as long as one bf16 dot product. Measures for about a
// millisecond. Processors differ by factors (ratio 1/2, or 2 and more), so the result is the same at every start.
// Without the dot product, oneDNN widens too and takes 2 to 7 times as long (AVX-512 of Zen 4, 1 to 256 rows).
int64_t lineclear_bf16_gemm_is_faster() {
#if defined(__AVX512BF16__)
  constexpr int CHAINS = 12, ROUNDS = 4000;
  __m512 sums[CHAINS] = {};
  const auto keep_in_registers = [&] {
    for (auto& sum : sums) asm volatile("" : "+v"(sum));
  };
  const double dots = seconds([&] {
    for (int i = 0; i < ROUNDS; i++) {
      for (auto& sum : sums) sum = _mm512_dpbf16_ps(sum, __m512bh{}, __m512bh{});
      keep_in_registers();
    }
  });
  const double fmas = seconds([&] {
    for (int i = 0; i < ROUNDS; i++) {
      for (auto& sum : sums) sum = _mm512_fmadd_ps(__m512{}, __m512{}, sum);
      keep_in_registers();
    }
  });
  return fmas * 2 < dots * 1.5;
#elif defined(__x86_64__)
  return 1;
#else
  return 0;  // not measured
#endif
}

// Number of elements that `lineclear_pack` writes.
int64_t lineclear_packed_size(int64_t outputs, int64_t inputs) { return (outputs + PANEL - 1) / PANEL * PANEL * inputs; }

// Pack a matrix [outputs, inputs] into panels. `inputs` is a multiple of 16. element, here and below: 0 fp32, 1 bf16.
void lineclear_pack(int64_t element, int64_t outputs, int64_t inputs, const void* matrix, void* panels) {
  static_assert(Pair<float>::STRIDE == 1 && Pair<bf16>::STRIDE == 2);
  pack(outputs, element == 0 ? inputs : inputs / 2, (const uint32_t*)matrix, (uint32_t*)panels);
}

// out [rows, outputs] = x [rows, inputs] * panels + bias. All are contiguous and of the same type, except for the bias:
// fp32, padded to whole panels, or null.
void lineclear_gemm(int64_t element, int64_t rows, int64_t inputs, int64_t outputs, const void* x, const void* panels,
                    const void* bias, void* out) {
  if (rows == 0) return;  // a step that samples nothing computes no logits
  if (element == 0)
    gemm(rows, inputs, outputs, (const float*)x, (const float*)panels, (const float*)bias, (float*)out);
  else
    gemm(rows, inputs, outputs, (const bf16*)x, (const bf16*)panels, (const float*)bias, (bf16*)out);
}

// As `lineclear_gemm` for the matrices of `experts`, each with the next counts[e] rows.
void lineclear_gemm_experts(int64_t element, int64_t experts, int64_t inputs, int64_t outputs, const int64_t* counts,
                            const void* x, const void* const* panels, const void* const* bias, void* out) {
  const int64_t bytes = element == 0 ? sizeof(float) : sizeof(bf16);
  for (int64_t e = 0, row = 0; e < experts; row += counts[e++])
    lineclear_gemm(element, counts[e], inputs, outputs, (const char*)x + row * inputs * bytes, panels[e], bias[e],
                   (char*)out + row * outputs * bytes);
}
}

CAPTURABLE(lineclear_gemm)
CAPTURABLE(lineclear_gemm_experts)
