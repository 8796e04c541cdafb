// Row operations of a decoder layer between its matrix products: residual and norm, rotary embedding, activation,
// argmax, gather. One pass over memory each, sums in fp32, results rounded once.
//
// Rows are contiguous. element: 0 fp32, 1 bf16. Widths are multiples of 16.

#include "graph_capture.h"
#include "rows.h"
#include "simd.h"

namespace {

constexpr int64_t CHUNK = 512;

template <typename T>
float sum_of_squares(const T* x, int64_t dim) {
  vfloat sum = vfloat{};
  for (int64_t d = 0; d < dim; d += LANES) {
    vfloat v = load(x + d);
    sum += v * v;
  }
  return hsum(sum);
}

// out = x / rms(x) * weight.
template <typename T>
void scale_row(const T* x, const float* weight, float inverse_rms, T* out, int64_t dim) {
  for (int64_t d = 0; d < dim; d += LANES) store(out + d, load(x + d) * inverse_rms * load(weight + d));
}

// out = (x - mean(x)) / deviation(x) * weight + bias.
template <typename T>
void layer_norm_row(const T* x, const float* weight, const float* bias, float eps, T* out, int64_t dim) {
  vfloat sum = vfloat{}, squares = vfloat{};
  for (int64_t d = 0; d < dim; d += LANES) sum += load(x + d);
  const float mean = hsum(sum) / dim;
  for (int64_t d = 0; d < dim; d += LANES) {
    const vfloat v = load(x + d) - mean;
    squares += v * v;
  }
  const float inverse = 1.0f / std::sqrt(hsum(squares) / dim + eps);
  for (int64_t d = 0; d < dim; d += LANES)
    store(out + d, (load(x + d) - mean) * inverse * load(weight + d) + load(bias + d));
}

template <typename T>
void add_norm(int64_t rows, int64_t dim, const T* add, float add_scale, T* residual, const float* weight, const float* bias,
              float eps, T* out) {
  for_each_row(rows, rows * dim > MIN_PARALLEL_ELEMENTS, [&](int64_t r) {
    T* x = residual + r * dim;
    if (add) {
      const T* y = add + r * dim;
      for (int64_t d = 0; d < dim; d += LANES) store(x + d, load(x + d) + load(y + d) * add_scale);
    }
    if (bias)
      layer_norm_row(x, weight, bias, eps, out + r * dim, dim);
    else if (weight)
      scale_row(x, weight, 1.0f / std::sqrt(sum_of_squares(x, dim) / dim + eps), out + r * dim, dim);
  });
}

// Norm one head, if `weight` is given, and rotate its first 2 * rotary elements: (a, b) -> (a cos - b sin, b cos + a sin).
// a and b are `rotary` elements apart, or neighbours if `pairs`.
template <typename T>
void rotate_head(const T* x, const float* weight, float inverse_rms, const float* cosine, const float* sine, int64_t rotary,
                 bool pairs, T* out, int64_t dim) {
  float head[512];
  for (int64_t d = 0; d < dim; d += LANES) {
    vfloat v = load(x + d);
    if (weight) v = v * inverse_rms * load(weight + d);
    store(head + d, v);
  }
  if (pairs) {
    for (int64_t d = 0; d < rotary; d++) {
      const float a = head[2 * d], b = head[2 * d + 1];
      head[2 * d] = a * cosine[d] - b * sine[d];
      head[2 * d + 1] = b * cosine[d] + a * sine[d];
    }
  } else {
    for (int64_t d = 0; d < rotary; d++) {
      const float a = head[d], b = head[d + rotary];
      head[d] = a * cosine[d] - b * sine[d];
      head[d + rotary] = b * cosine[d] + a * sine[d];
    }
  }
  for (int64_t d = 0; d < dim; d += LANES) store(out + d, load(head + d));
}

struct HeadLayout {
  int64_t heads, kv_heads, dim, rotary;
  bool pairs, grouped;
};

template <typename T>
void split_heads(int64_t rows, const HeadLayout& layout, const T* qkv, const float* cosine, const float* sine,
                 const float* q_weight, const float* k_weight, bool whole, float eps, T* q, T* k, T* v) {
  const int64_t heads = layout.heads, kv_heads = layout.kv_heads, dim = layout.dim, rotary = layout.rotary;
  const int64_t width = (heads + 2 * kv_heads) * dim, stride = layout.grouped ? 3 * dim : dim;
  const int64_t k_at = layout.grouped ? dim : heads * dim, v_at = layout.grouped ? 2 * dim : (heads + kv_heads) * dim;
  for_each_row(rows, rows * width > MIN_PARALLEL_ELEMENTS, [&](int64_t r) {
    const T* from = qkv + r * width;
    const float *c = cosine + r * rotary, *s = sine + r * rotary;
    const auto rotate = [&](const T* x, const float* weight, int64_t count, T* out) {
      float inverse = weight && whole ? 1.0f / std::sqrt(sum_of_squares(x, count * dim) / (count * dim) + eps) : 1.0f;
      for (int64_t h = 0; h < count; h++) {
        const T* head = x + h * stride;
        if (weight && !whole) inverse = 1.0f / std::sqrt(sum_of_squares(head, dim) / dim + eps);
        const float* own = weight ? weight + (whole ? h * dim : 0) : nullptr;
        rotate_head(head, own, inverse, c, s, rotary, layout.pairs, out + h * dim, dim);
      }
    };
    rotate(from, q_weight, heads, q + r * heads * dim);
    rotate(from + k_at, k_weight, kv_heads, k + r * kv_heads * dim);
    const int64_t pieces = layout.grouped ? kv_heads : 1, piece = kv_heads * dim / pieces;
    for (int64_t i = 0; i < pieces; i++)
      std::memcpy(v + r * kv_heads * dim + i * piece, from + v_at + i * stride, piece * sizeof(T));
  });
}

// out = function(x), or function(gate) * up of rows [gate, up].
template <typename T, typename Function>
void activate(int64_t rows, int64_t dim, bool gated, const T* x, T* out, Function function) {
  for_each_row(rows, rows * dim > MIN_PARALLEL_ELEMENTS / 2, [&](int64_t r) {
    const T* from = x + r * dim * (gated ? 2 : 1);
    T* to = out + r * dim;
    if (gated)
      for (int64_t d = 0; d < dim; d += LANES) store(to + d, function(load(from + d)) * load(from + dim + d));
    else
      for (int64_t d = 0; d < dim; d += LANES) store(to + d, function(load(from + d)));
  });
}

template <typename T>
void activation(int64_t rows, int64_t dim, int64_t kind, bool gated, const T* x, T* out) {
  const auto apply = [&](auto function) { activate(rows, dim, gated, x, out, function); };
  if (kind == 0) apply([](vfloat v) { return v / (1.0f + vexp(-v)); });
  if (kind == 1) apply([](vfloat v) { return 0.5f * v * (1.0f + vtanh(0.7978845608028654f * (v + 0.044715f * v * v * v))); });
  if (kind == 2) apply([](vfloat v) { return 0.5f * v * (1.0f + verf(v * 0.7071067811865476f)); });
  if (kind == 3) apply([](vfloat v) { return select(v < 0.0f, vfloat{}, v); });
  if (kind == 4) apply([](vfloat v) { return select(v < 0.0f, vfloat{}, v * v); });
}

// x = cap * tanh(x / cap). NaN stays NaN.
template <typename T>
void cap_row(T* x, int64_t width, float cap) {
  const auto capped = [&](vfloat v) { return select(v == v, vtanh(v / cap) * cap, v); };
  int64_t d = 0;
  for (; d + LANES <= width; d += LANES) store(x + d, capped(load(x + d)));
  T rest[LANES] = {};
  std::memcpy(rest, x + d, (width - d) * sizeof(T));
  store(rest, capped(load(rest)));
  std::memcpy(x + d, rest, (width - d) * sizeof(T));
}

// Maximum of a row and its index. NaN counts as the maximum; the first of equal elements wins.
template <typename T>
void argmax(const T* x, int64_t width, float* value, int64_t* index) {
  float top = -INFINITY;
  int64_t at = 0;
  for (int64_t chunk = 0; chunk < width; chunk += CHUNK) {  // the index is searched only where the maximum rises
    const int64_t end = chunk + CHUNK < width ? chunk + CHUNK : width;
    vfloat highest = splat(-INFINITY);
    vint nans = vint{};
    int64_t i = chunk;
    for (; i + LANES <= end; i += LANES) {
      const vfloat v = load(x + i);
      highest = vmax(v, highest);
      nans |= v != v;
    }
    float high = hmax(highest);
    bool nan = false;
    for (int lane = 0; lane < LANES; lane++) nan |= nans[lane] != 0;
    for (; i < end; i++) {
      const float v = to_float(x[i]);
      high = v > high ? v : high;
      nan |= v != v;
    }
    if (!nan && !(high > top)) continue;
    for (i = chunk; i < end; i++) {
      const float v = to_float(x[i]);
      if (nan ? v != v : v == high) break;
    }
    top = to_float(x[i]);
    at = i;
    if (nan) break;
  }
  *value = top;
  *index = at;
}

}  // namespace

extern "C" {

// values [rows], fp32, and indices [rows] of the maximum of each row of x [rows, width].
void lineclear_argmax(int64_t element, int64_t rows, int64_t width, const void* x, float* values, int64_t* indices) {
  for_each_row(rows, rows * width > MIN_PARALLEL_ELEMENTS, [&](int64_t r) {
    if (element == 0)
      argmax((const float*)x + r * width, width, values + r, indices + r);
    else
      argmax((const bf16*)x + r * width, width, values + r, indices + r);
  });
}

// x = cap * tanh(x / cap), x [rows, width].
void lineclear_cap(int64_t element, int64_t rows, int64_t width, float cap, void* x) {
  for_each_row(rows, rows * width > MIN_PARALLEL_ELEMENTS, [&](int64_t r) {
    if (element == 0)
      cap_row((float*)x + r * width, width, cap);
    else
      cap_row((bf16*)x + r * width, width, cap);
  });
}

// residual += add * add_scale, unless `add` is null; out = norm(residual), unless `weight` is null: the RMS norm, or with
// `bias` the layer norm. weight, bias [dim], fp32.
void lineclear_add_norm(int64_t element, int64_t rows, int64_t dim, const void* add, float add_scale, void* residual,
                        const float* weight, const float* bias, float eps, void* out) {
  if (element == 0)
    add_norm(rows, dim, (const float*)add, add_scale, (float*)residual, weight, bias, eps, (float*)out);
  else
    add_norm(rows, dim, (const bf16*)add, add_scale, (bf16*)residual, weight, bias, eps, (bf16*)out);
}

// Split qkv [rows, (heads + 2 kv_heads) * dim] into q, k and v. q and k are rotated, and normed first where there are
// weights: over each head, or over the `whole` row. cosine and sine [rows, rotary], fp32, as the weights. `pairs`: neighbours
// rotate together. `grouped`: qkv is [rows, heads, 3, dim].
void lineclear_split_heads(int64_t element, int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim, int64_t rotary,
                           int64_t pairs, int64_t grouped, const void* qkv, const float* cosine, const float* sine,
                           const float* q_weight, const float* k_weight, int64_t whole, float eps, void* q, void* k,
                           void* v) {
  const HeadLayout layout = {heads, kv_heads, dim, rotary, pairs != 0, grouped != 0};
  if (element == 0)
    split_heads(rows, layout, (const float*)qkv, cosine, sine, q_weight, k_weight, whole != 0, eps, (float*)q, (float*)k,
                (float*)v);
  else
    split_heads(rows, layout, (const bf16*)qkv, cosine, sine, q_weight, k_weight, whole != 0, eps, (bf16*)q, (bf16*)k,
                (bf16*)v);
}

// out [rows, dim] = activation(x), x [rows, dim]; or activation(gate) * up, if `gated`: x [rows, 2 * dim] holds both.
// activation: 0 silu, 1 gelu (tanh), 2 gelu (erf), 3 relu, 4 squared relu.
void lineclear_activation(int64_t element, int64_t rows, int64_t dim, int64_t kind, int64_t gated, const void* x, void* out) {
  if (element == 0)
    activation(rows, dim, kind, gated != 0, (const float*)x, (float*)out);
  else
    activation(rows, dim, kind, gated != 0, (const bf16*)x, (bf16*)out);
}

// out[r] = from[indices[r]]; a row has `bytes` bytes.
void lineclear_gather_rows(int64_t rows, int64_t bytes, const void* from, const int64_t* indices, void* out) {
  for_each_row(rows, rows * bytes > MIN_PARALLEL_ELEMENTS * 8, [&](int64_t r) { std::memcpy((char*)out + r * bytes, (const char*)from + indices[r] * bytes, bytes); });
}
}

CAPTURABLE(lineclear_argmax)
CAPTURABLE(lineclear_cap)
CAPTURABLE(lineclear_add_norm)
CAPTURABLE(lineclear_split_heads)
CAPTURABLE(lineclear_activation)
CAPTURABLE(lineclear_gather_rows)
