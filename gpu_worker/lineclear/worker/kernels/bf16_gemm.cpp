// Matrix products with constant bf16 weights, in fp32 multiply-adds.
//
// On many processors the bf16 dot product is the slower way: on Sapphire Rapids without AMX it runs at a quarter of the
// rate, half of the work per second. Widening two bf16 to fp32 and multiplying those is faster there, and the only way
// where there is no such instruction. Weights are packed into panels of 16 outputs, and a panel is read from memory once
// for all rows. Sums are fp32, taken in the order of the inputs by one register per row and output. So a row's result does
// not depend on the other rows.

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
constexpr int MAX_ROWS = 13, SUMS = 26;
#elif defined(__AVX2__)
constexpr int MAX_ROWS = 4, SUMS = 8;
#else
constexpr int MAX_ROWS = 4, SUMS = 18;
#endif
constexpr int panels_for(int rows) {
  return rows * 4 * VECTORS + 6 <= SUMS ? 4 : rows * 2 * VECTORS <= SUMS ? 2 : 1;
}

constexpr int64_t TASK_PANELS = 4;  // panels that a thread claims at a time
constexpr int64_t MAX_GROUPS = 9;   // groups of rows whose inputs stay in the cache while the weights stream by

struct Gemm {
  int64_t inputs, outputs;
  const bf16* weights;  // [panel, inputs / 2, 16, 2]
  const float* bias;    // a whole number of panels, or null
};

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
inline void store_row(const Gemm& p, const float* sums, int64_t column, int64_t count, bf16* out) {
  for (int64_t j = 0; j < count; j += LANES) {
    const int64_t left = p.outputs - column - j;
    const vfloat sum = p.bias ? load(sums + j) + load(p.bias + column + j) : load(sums + j);
    if (left >= LANES) {
      store(out + column + j, sum);
    } else if (left > 0) {
      bf16 rounded[LANES];
      store(rounded, sum);
      std::memcpy(out + column + j, rounded, left * sizeof(bf16));
    }
  }
}

// Compute outputs [ROWS, PANELS * 16] from `column` on. inputs: fp32 [inputs, ROWS]. ahead: a panel to prefetch, or null.
template <int ROWS, int PANELS>
void tile(const Gemm& p, const float* inputs, int64_t column, const char* ahead, bf16* out) {
  constexpr int N = PANELS * VECTORS;
  const bf16* weights = p.weights + column * p.inputs;
  if (!ahead) ahead = (const char*)weights;  // already in the cache
  vfloat sums[ROWS][N];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) sums[r][n] = vfloat{};
  for (int64_t i = 0; i < p.inputs; i += 2) {
    if (ROWS > 1) __builtin_prefetch(ahead + i * PANEL * sizeof(bf16), 0, 1);
    vuint pairs[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) {
      const bf16* at = weights + ((n / VECTORS) * p.inputs + i) * PANEL + (n % VECTORS) * LANES * 2;
      if (n % VECTORS == 0) __builtin_prefetch((const char*)at + PREFETCH_BYTES);
      pairs[n] = load_pairs(at);
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
      for (int n = 0; n < N; n++) sums[r][n] += first(pairs[n]) * splat(inputs[i * ROWS + r]);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
      for (int n = 0; n < N; n++) sums[r][n] += second(pairs[n]) * splat(inputs[(i + 1) * ROWS + r]);
  }
  float num_panels[ROWS][N * LANES];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) store(num_panels[r] + n * LANES, sums[r][n]);
  for (int r = 0; r < ROWS; r++) store_row(p, num_panels[r], column, N * LANES, out + r * p.outputs);
}

template <int ROWS>
void tiles(const Gemm& p, const float* inputs, int64_t panel, int64_t end, Prefetcher ahead, bf16* out) {
  constexpr int PANELS = panels_for(ROWS);
  const int64_t size = p.inputs * PANEL * sizeof(bf16);
  for (; panel + PANELS <= end; panel += PANELS)
    tile<ROWS, PANELS>(p, inputs, panel * PANEL, ahead.next(size), out);
  for (; panel < end; panel++) tile<ROWS, 1>(p, inputs, panel * PANEL, ahead.next(size), out);
}

typedef void (*Tiles)(const Gemm&, const float*, int64_t, int64_t, Prefetcher, bf16*);
constexpr Tiles TILES[] = {nullptr,   tiles<1>,  tiles<2>,  tiles<3>,  tiles<4>,
#if defined(__AVX512F__)
                           tiles<5>,  tiles<6>,  tiles<7>,  tiles<8>,  tiles<9>,
                           tiles<10>, tiles<11>, tiles<12>, tiles<13>
#endif
};
static_assert(sizeof(TILES) / sizeof(Tiles) == MAX_ROWS + 1, "a function for each number of rows");

// Transpose and widen: out fp32 [inputs, rows], x bf16 [rows, inputs].
void transpose(const bf16* x, int64_t rows, int64_t inputs, float* out) {
  for (int64_t i = 0; i < inputs; i += LANES)
    for (int64_t r = 0; r < rows; r++) {
      const vfloat v = load(x + r * inputs + i);
      for (int l = 0; l < LANES; l++) out[(i + l) * rows + r] = v[l];
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

// Number of elements that `lineclear_bf16_pack` writes.
int64_t lineclear_bf16_packed_size(int64_t outputs, int64_t inputs) { return (outputs + PANEL - 1) / PANEL * PANEL * inputs; }

// Pack bf16 [outputs, inputs] into panels. `inputs` is a multiple of 16.
void lineclear_bf16_pack(int64_t outputs, int64_t inputs, const void* matrix, void* panels) {
  const bf16* from = (const bf16*)matrix;
  bf16* to = (bf16*)panels;
#pragma omp parallel for schedule(static)
  for (int64_t panel = 0; panel < (outputs + PANEL - 1) / PANEL; panel++)
    for (int64_t i = 0; i < inputs; i += 2)
      for (int64_t j = 0; j < PANEL; j++) {
        const int64_t output = panel * PANEL + j;
        bf16* pair = to + (panel * inputs + i) * PANEL + j * 2;
        pair[0] = output < outputs ? from[output * inputs + i] : 0;
        pair[1] = output < outputs ? from[output * inputs + i + 1] : 0;
      }
}

// out [rows, outputs] = x [rows, inputs] * panels + bias. All are contiguous bf16, except for the bias: fp32, padded to
// whole panels, or null.
void lineclear_bf16_gemm(int64_t rows, int64_t inputs, int64_t outputs, const void* x, const void* panels,
                            const void* bias, void* out) {
  if (rows == 0) return;  // a step that samples nothing computes no logits
  const Gemm gemm{inputs, outputs, (const bf16*)panels, (const float*)bias};
  const int64_t groups = (rows + MAX_ROWS - 1) / MAX_ROWS, num_panels = (outputs + PANEL - 1) / PANEL;
  const auto row = [&](int64_t group) { return group * rows / groups; };  // groups of nearly equal size
  const int64_t blocks = (groups + MAX_GROUPS - 1) / MAX_GROUPS, groups_per_block = (groups + blocks - 1) / blocks;
  float* transposed = scratch(groups_per_block * MAX_ROWS * inputs);
  std::atomic<int64_t> num_claimed;
#pragma omp parallel
  for (int64_t begin = 0; begin < groups; begin += groups_per_block) {
    const int64_t end = begin + groups_per_block < groups ? begin + groups_per_block : groups, size = inputs * PANEL * sizeof(bf16);
    const auto group_inputs = [&](int64_t group) { return transposed + (row(group) - row(begin)) * inputs; };
#pragma omp single nowait
    num_claimed = 0;
#pragma omp for schedule(static)
    for (int64_t g = begin; g < end; g++)
      transpose((const bf16*)x + row(g) * inputs, row(g + 1) - row(g), inputs, group_inputs(g));
    // The next task is claimed before the current one runs, so that its weights are prefetched in time.
    int64_t now = num_claimed.fetch_add(TASK_PANELS);
    while (now < num_panels) {
      const int64_t next = num_claimed.fetch_add(TASK_PANELS), stop = now + TASK_PANELS < num_panels ? now + TASK_PANELS : num_panels;
      const int64_t next_count = next + TASK_PANELS <= num_panels ? TASK_PANELS : next < num_panels ? num_panels - next : 0;
      for (int64_t g = begin; g < end; g++) {
        // The next task's panels, divided among the groups. A single group already keeps memory busy.
        const auto panel = [&](int64_t n) { return (const char*)panels + (next + next_count * n / (end - begin)) * size; };
        const Prefetcher ahead{panel(g - begin), end - begin > 1 ? panel(g - begin + 1) : panel(g - begin)};
        TILES[row(g + 1) - row(g)](gemm, group_inputs(g), now, stop, ahead, (bf16*)out + row(g) * outputs);
      }
      now = next;
    }
#pragma omp barrier
  }
}
}

CAPTURABLE(lineclear_bf16_gemm)
