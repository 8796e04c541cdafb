// Mixture of experts (Shazeer et al., 2017): which experts a row uses, and the sum of their outputs.
//
// A place is a row for one of its experts. Places are sorted by expert, so that each expert multiplies consecutive rows.
// Scores, weights and sums are fp32, in an order that does not depend on the other rows. element: 0 fp32, 1 bf16.

#include "graph_capture.h"
#include "rows.h"
#include "scratch.h"
#include "simd.h"

extern "C" {

struct LineclearRouter {
  int64_t experts, inputs, chosen;  // chosen: experts of a row
  int64_t is_sigmoid;               // a score is a sigmoid of the expert's logit, else the softmax over all
  int64_t normalizes;               // weights are divided by the sum of a row's scores
  double scale;                     // multiplies the weights
  const float* weight;              // [experts, inputs]
  const float* bias;                // [experts], of the logits, or null
  const float* correction;          // [experts], added to the scores for the choice alone, or null
};

}  // extern "C"

namespace {

constexpr int BLOCK = 4;           // experts that share the loads of a row
constexpr int MAX_EXPERTS = 1024;  // as native_library.py has it

template <int COUNT, typename T>
void dots(const T* x, const float* weight, int64_t inputs, float* out) {
  vfloat sums[COUNT] = {};
  for (int64_t i = 0; i < inputs; i += LANES) {
    const vfloat v = load(x + i);
    for (int j = 0; j < COUNT; j++) sums[j] += v * load(weight + j * inputs + i);
  }
  for (int j = 0; j < COUNT; j++) out[j] = hsum(sums[j]);
}

template <typename T>
void score(const LineclearRouter& router, int64_t rows, const T* x, float* logits) {
  const int64_t blocks = (router.experts + BLOCK - 1) / BLOCK, inputs = router.inputs;
  for_each_row(rows * blocks, rows * router.experts * inputs > 4 * MIN_PARALLEL_ELEMENTS, [&](int64_t item) {
    const int64_t r = item / blocks, first = item % blocks * BLOCK;
    const T* row = x + r * inputs;
    float* out = logits + r * router.experts + first;
    const float* weight = router.weight + first * inputs;
    if (first + BLOCK <= router.experts)
      dots<BLOCK>(row, weight, inputs, out);
    else
      for (int64_t j = 0; first + j < router.experts; j++) dots<1>(row, weight + j * inputs, inputs, out + j);
  });
}

// Choose a row's experts: the highest scores, of equal ones the first. ids [chosen], in ascending order.
void choose(const LineclearRouter& router, const float* logits, int64_t* ids, float* weights) {
  float scores[MAX_EXPERTS], ranks[MAX_EXPERTS];
  float highest = -INFINITY, sum = 0.0f;
  for (int64_t e = 0; e < router.experts; e++) {
    scores[e] = ranks[e] = logits[e] + (router.bias ? router.bias[e] : 0.0f);
    highest = scores[e] > highest ? scores[e] : highest;
  }
  for (int64_t e = 0; e < router.experts; e++) {
    scores[e] = router.is_sigmoid ? 1.0f / (1.0f + std::exp(-scores[e])) : std::exp(scores[e] - highest);
    sum += scores[e];
  }
  const float whole = router.is_sigmoid ? 1.0f : sum;
  for (int64_t e = 0; router.correction && e < router.experts; e++) ranks[e] = scores[e] / whole + router.correction[e];
  bool is_chosen[MAX_EXPERTS] = {};
  for (int64_t j = 0; j < router.chosen; j++) {
    int64_t best = -1;  // an expert that is not chosen yet, whatever the numbers are
    for (int64_t e = 0; e < router.experts; e++)
      if (!is_chosen[e] && (best < 0 || ranks[e] > ranks[best])) best = e;
    is_chosen[best] = true;
  }
  float total = 0.0f;
  for (int64_t e = 0, j = 0; e < router.experts; e++)
    if (is_chosen[e]) {
      ids[j] = e;
      weights[j++] = scores[e];
      total += scores[e];
    }
  const float divisor = router.normalizes ? total + 1e-20f : whole;
  for (int64_t j = 0; j < router.chosen; j++) weights[j] = weights[j] / divisor * float(router.scale);
}

// Replace ids by places sorted by expert. counts [experts + 1]: places of each expert, then all. rows: the row of each place.
void sort(const LineclearRouter& router, int64_t num_rows, int64_t* counts, int64_t* rows, int64_t* places) {
  int64_t next[MAX_EXPERTS] = {};
  for (int64_t i = 0; i < num_rows * router.chosen; i++) next[places[i]]++;
  int64_t start = 0;
  for (int64_t e = 0; e < router.experts; e++) {
    counts[e] = next[e];
    next[e] = start;
    start += counts[e];
  }
  counts[router.experts] = start;
  for (int64_t i = 0; i < num_rows * router.chosen; i++) {
    const int64_t place = next[places[i]]++;
    rows[place] = i / router.chosen;
    places[i] = place;
  }
}

// Comparisons leave NaN as it is.
template <typename T>
void clamped_swiglu(int64_t rows, int64_t dim, float alpha, float limit, const T* gate_up, T* out) {
  for_each_row(rows, rows * dim > MIN_PARALLEL_ELEMENTS / 2, [&](int64_t r) {
    const T *gates = gate_up + r * 2 * dim, *ups = gates + dim;
    for (int64_t d = 0; d < dim; d += LANES) {
      const vfloat most = splat(limit);
      vfloat gate = load(gates + d), up = load(ups + d);
      gate = select(gate > most, most, gate);
      up = select(up > most, most, select(up < -most, -most, up));
      store(out + r * dim + d, gate / (1.0f + vexp(-alpha * gate)) * (up + 1.0f));
    }
  });
}

template <typename T>
void combine(int64_t rows, int64_t chosen, int64_t width, const T* from, const int64_t* places, const float* weights,
             bool adds, T* out) {
  for_each_row(rows, rows * chosen * width > MIN_PARALLEL_ELEMENTS, [&](int64_t r) {
    for (int64_t d = 0; d < width; d += LANES) {
      T* to = out + r * width + d;
      vfloat sum = adds ? load(to) : vfloat{};
      for (int64_t i = r * chosen; i < (r + 1) * chosen; i++) sum += load(from + places[i] * width + d) * weights[i];
      store(to, sum);
    }
  });
}

}  // namespace

extern "C" {

// Route x [num_rows, inputs]: places and weights [num_rows, chosen], by ascending expert; rows [num_rows * chosen]; counts:
// see `sort`.
void lineclear_route(const LineclearRouter* router, int64_t element, int64_t num_rows, const void* x, int64_t* counts,
                     int64_t* rows, int64_t* places, float* weights) {
  float* logits = scratch(num_rows * router->experts);
  if (element == 0)
    score(*router, num_rows, (const float*)x, logits);
  else
    score(*router, num_rows, (const bf16*)x, logits);
  const int64_t chosen = router->chosen;
  for_each_row(num_rows, num_rows * router->experts * chosen > MIN_PARALLEL_ELEMENTS, [&](int64_t r) {
    choose(*router, logits + r * router->experts, places + r * chosen, weights + r * chosen);
  });
  sort(*router, num_rows, counts, rows, places);
}

// out [rows, dim] = gate * sigmoid(alpha * gate) * (up + 1), of gate_up [rows, 2 * dim] with the gate cut off at `limit`, and
// up at both sides.
void lineclear_clamped_swiglu(int64_t element, int64_t rows, int64_t dim, float alpha, float limit, const void* gate_up,
                              void* out) {
  if (element == 0)
    clamped_swiglu(rows, dim, alpha, limit, (const float*)gate_up, (float*)out);
  else
    clamped_swiglu(rows, dim, alpha, limit, (const bf16*)gate_up, (bf16*)out);
}

// out [rows, width] = the sums of a row's places of `from` [rows * chosen, width] by their weights; added to it if `adds`.
void lineclear_combine(int64_t element, int64_t rows, int64_t chosen, int64_t width, const void* from,
                       const int64_t* places, const float* weights, int64_t adds, void* out) {
  if (element == 0)
    combine(rows, chosen, width, (const float*)from, places, weights, adds != 0, (float*)out);
  else
    combine(rows, chosen, width, (const bf16*)from, places, weights, adds != 0, (bf16*)out);
}
}

CAPTURABLE(lineclear_route)
CAPTURABLE(lineclear_clamped_swiglu)
CAPTURABLE(lineclear_combine)
