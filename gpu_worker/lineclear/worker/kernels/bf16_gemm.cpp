// Matrix products with bf16 weights that never change, for processors whose own bf16 instruction is the slower way.
//
// On many of them (Sapphire Rapids without AMX: a quarter of the rate, half of the work a second) widening two bf16 to
// fp32 and multiplying those is faster than their dot product, and it is the only way where there is none. Weights are
// laid out in panels of 16 outputs, read once from memory for all rows; sums are fp32, taken in the order of the inputs
// by one register for each row and output: what a row gives does not depend on the rows beside it.

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
constexpr int PREFETCH = 512;           // bytes ahead; a panel is read in order

// A tile of rows x panels has its sums in registers, and leaves some for a weight of each panel and one input.
#if defined(__AVX512F__)
constexpr int MOST_ROWS = 13, SUMS = 26;
#elif defined(__AVX2__)
constexpr int MOST_ROWS = 4, SUMS = 8;
#else
constexpr int MOST_ROWS = 4, SUMS = 18;
#endif
constexpr int panels_for(int rows) {
  return rows * 4 * VECTORS + 6 <= SUMS ? 4 : rows * 2 * VECTORS <= SUMS ? 2 : 1;
}

constexpr int64_t TASK_PANELS = 4;    // one thread's piece of work; whoever is free takes the next
constexpr int64_t MOST_GROUPS = 9;  // of rows whose inputs stay in the cache while the weights pass by

struct Product {
  int64_t inputs, outputs;
  const bf16* weights;  // [panel, inputs / 2, 16, 2]
  const float* bias;    // a whole number of panels, or null
};

// What a thread multiplies with next: one panel of it is fetched into the outer cache during each tile of what it does
// now. Otherwise the first group of rows of every piece of work would wait for memory, and the others leave it idle.
struct Ahead {
  const char *at, *end;
  const char* take(int64_t bytes) {
    if (at == end) return nullptr;
    at += bytes;
    return at - bytes;
  }
};

// Sums of one row, with the bias and rounded. The last panel may be wider than the matrix.
inline void finish(const Product& p, const float* sums, int64_t column, int64_t count, bf16* out) {
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

// [ROWS x PANELS * 16] outputs from `column` on. inputs: fp32 [inputs, ROWS]. ahead: a panel to fetch, or null.
template <int ROWS, int PANELS>
void tile(const Product& p, const float* inputs, int64_t column, const char* ahead, bf16* out) {
  constexpr int N = PANELS * VECTORS;
  const bf16* weights = p.weights + column * p.inputs;
  if (!ahead) ahead = (const char*)weights;  // is there already
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
      if (n % VECTORS == 0) __builtin_prefetch((const char*)at + PREFETCH);
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
  float all[ROWS][N * LANES];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) store(all[r] + n * LANES, sums[r][n]);
  for (int r = 0; r < ROWS; r++) finish(p, all[r], column, N * LANES, out + r * p.outputs);
}

template <int ROWS>
void tiles(const Product& p, const float* inputs, int64_t panel, int64_t end, Ahead ahead, bf16* out) {
  constexpr int PANELS = panels_for(ROWS);
  const int64_t size = p.inputs * PANEL * sizeof(bf16);
  for (; panel + PANELS <= end; panel += PANELS)
    tile<ROWS, PANELS>(p, inputs, panel * PANEL, ahead.take(size), out);
  for (; panel < end; panel++) tile<ROWS, 1>(p, inputs, panel * PANEL, ahead.take(size), out);
}

typedef void (*Tiles)(const Product&, const float*, int64_t, int64_t, Ahead, bf16*);
constexpr Tiles TILES[] = {nullptr,   tiles<1>,  tiles<2>,  tiles<3>,  tiles<4>,
#if defined(__AVX512F__)
                           tiles<5>,  tiles<6>,  tiles<7>,  tiles<8>,  tiles<9>,
                           tiles<10>, tiles<11>, tiles<12>, tiles<13>
#endif
};
static_assert(sizeof(TILES) / sizeof(Tiles) == MOST_ROWS + 1, "a function for each number of rows");

// fp32 [inputs, rows] of bf16 [rows, inputs].
void turn(const bf16* x, int64_t rows, int64_t inputs, float* out) {
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

// Whether two fp32 products are at least about as fast as one bf16 dot product here. Measures for about a millisecond;
// the answers lie far apart (1/2 and 2 and more), so it is the same at every start.
int64_t lineclear_widening_pays() {
#if defined(__AVX512BF16__)
  constexpr int CHAINS = 12, ROUNDS = 4000;
  __m512 sums[CHAINS] = {};
  const auto hold = [&] {
    for (auto& sum : sums) asm volatile("" : "+v"(sum));
  };
  const double dots = seconds([&] {
    for (int i = 0; i < ROUNDS; i++) {
      for (auto& sum : sums) sum = _mm512_dpbf16_ps(sum, __m512bh{}, __m512bh{});
      hold();
    }
  });
  const double products = seconds([&] {
    for (int i = 0; i < ROUNDS; i++) {
      for (auto& sum : sums) sum = _mm512_fmadd_ps(__m512{}, __m512{}, sum);
      hold();
    }
  });
  return products * 2 < dots * 1.5;
#elif defined(__x86_64__)
  return 1;
#else
  return 0;  // not measured there
#endif
}

// How many elements `lineclear_bf16_lay_out` writes.
int64_t lineclear_bf16_size(int64_t outputs, int64_t inputs) { return (outputs + PANEL - 1) / PANEL * PANEL * inputs; }

// bf16 [outputs, inputs] into panels; `inputs` is a multiple of 16.
void lineclear_bf16_lay_out(int64_t outputs, int64_t inputs, const void* matrix, void* panels) {
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

// out [rows, outputs] = x [rows, inputs] * panels (+ bias, where it is not null); contiguous, bf16 except for the bias:
// fp32, as long as the panels are wide.
void lineclear_bf16_product(int64_t rows, int64_t inputs, int64_t outputs, const void* x, const void* panels,
                            const void* bias, void* out) {
  if (rows == 0) return;  // a step that samples nothing asks for no logits
  const Product product{inputs, outputs, (const bf16*)panels, (const float*)bias};
  const int64_t groups = (rows + MOST_ROWS - 1) / MOST_ROWS, all = (outputs + PANEL - 1) / PANEL;
  const auto row = [&](int64_t group) { return group * rows / groups; };  // groups of nearly the same size
  const int64_t blocks = (groups + MOST_GROUPS - 1) / MOST_GROUPS, most = (groups + blocks - 1) / blocks;
  float* turned = scratch(most * MOST_ROWS * inputs);
  std::atomic<int64_t> claimed;
#pragma omp parallel
  for (int64_t begin = 0; begin < groups; begin += most) {
    const int64_t end = begin + most < groups ? begin + most : groups, size = inputs * PANEL * sizeof(bf16);
    const auto place = [&](int64_t group) { return turned + (row(group) - row(begin)) * inputs; };
#pragma omp single nowait
    claimed = 0;
#pragma omp for schedule(static)
    for (int64_t g = begin; g < end; g++)
      turn((const bf16*)x + row(g) * inputs, row(g + 1) - row(g), inputs, place(g));
    // A piece of work is claimed while the one before it is done, so that its weights can come meanwhile.
    int64_t now = claimed.fetch_add(TASK_PANELS);
    while (now < all) {
      const int64_t next = claimed.fetch_add(TASK_PANELS), stop = now + TASK_PANELS < all ? now + TASK_PANELS : all;
      const int64_t coming = next + TASK_PANELS <= all ? TASK_PANELS : next < all ? all - next : 0;
      for (int64_t g = begin; g < end; g++) {
        // Its panels, shared out among the groups; with one group alone memory never rests.
        const auto panel = [&](int64_t n) { return (const char*)panels + (next + coming * n / (end - begin)) * size; };
        const Ahead ahead{panel(g - begin), end - begin > 1 ? panel(g - begin + 1) : panel(g - begin)};
        TILES[row(g + 1) - row(g)](product, place(g), now, stop, ahead, (bf16*)out + row(g) * outputs);
      }
      now = next;
    }
#pragma omp barrier
  }
}
}

RECORDABLE(lineclear_bf16_product)
