// Row operations of a decoder layer between its matrix products: residual and RMS norm, rotary embedding, gated activation,
// argmax, gather. One pass over memory each, sums in fp32, results rounded once.
//
// Rows are contiguous. element: 0 fp32, 1 bf16. Widths are multiples of 16.

#include "graph_capture.h"
#include "simd.h"

namespace {

constexpr int64_t CHUNK = 512;
constexpr int64_t MIN_PARALLEL_ELEMENTS = 1 << 15;  // below this a second thread costs more than it saves

// Call work(row) for each row. A few rows bypass OpenMP: a team of one thread costs as much as the row, and it replaces the
// team that the surrounding matrix products would reuse.
template <typename Work>
void for_each_row(int64_t rows, bool parallel, Work work) {
  if (!parallel) {
    for (int64_t r = 0; r < rows; r++) work(r);
    return;
  }
#pragma omp parallel for schedule(static)
  for (int64_t r = 0; r < rows; r++) work(r);
}

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
void scale_row(const T* x, const T* weight, float inverse_rms, T* out, int64_t dim) {
  for (int64_t d = 0; d < dim; d += LANES) store(out + d, load(x + d) * inverse_rms * load(weight + d));
}

template <typename T>
void add_norm(int64_t rows, int64_t dim, const T* add, float add_scale, T* residual, const T* weight, float eps, T* out) {
  for_each_row(rows, rows * dim > MIN_PARALLEL_ELEMENTS, [&](int64_t r) {
    T* x = residual + r * dim;
    if (add) {
      const T* y = add + r * dim;
      for (int64_t d = 0; d < dim; d += LANES) store(x + d, load(x + d) + load(y + d) * add_scale);
    }
    if (weight) scale_row(x, weight, 1.0f / std::sqrt(sum_of_squares(x, dim) / dim + eps), out + r * dim, dim);
  });
}

// Norm one head, if `weight` is given, and rotate its first `rotary` elements: (a, b) -> (a cos - b sin, b cos + a sin).
template <typename T>
void rotate_head(const T* x, const T* weight, float inverse_rms, const float* cosine, const float* sine, int64_t rotary,
               T* out, int64_t dim) {
  float head[512];
  for (int64_t d = 0; d < dim; d += LANES) {
    vfloat v = load(x + d);
    if (weight) v = v * inverse_rms * load(weight + d);
    store(head + d, v);
  }
  const int64_t half = rotary / 2;
  for (int64_t d = 0; d < half; d++) {
    const float a = head[d], b = head[d + half];
    head[d] = a * cosine[d] - b * sine[d];
    head[d + half] = b * cosine[d + half] + a * sine[d + half];
  }
  for (int64_t d = 0; d < dim; d += LANES) store(out + d, load(head + d));
}

template <typename T>
void split_heads(int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim, int64_t rotary, const T* qkv,
                 const float* cosine, const float* sine, const T* q_weight, const T* k_weight, bool whole, float eps,
                 T* q, T* k, T* v) {
  const int64_t width = (heads + 2 * kv_heads) * dim;
  for_each_row(rows, rows * width > MIN_PARALLEL_ELEMENTS, [&](int64_t r) {
    const T* from = qkv + r * width;
    const float *c = cosine + r * rotary, *s = sine + r * rotary;
    const auto rotate = [&](const T* x, const T* weight, int64_t count, T* out) {
      float inverse = weight && whole ? 1.0f / std::sqrt(sum_of_squares(x, count * dim) / (count * dim) + eps) : 1.0f;
      for (int64_t h = 0; h < count; h++) {
        const T* head = x + h * dim;
        if (weight && !whole) inverse = 1.0f / std::sqrt(sum_of_squares(head, dim) / dim + eps);
        rotate_head(head, weight ? weight + (whole ? h * dim : 0) : nullptr, inverse, c, s, rotary, out + h * dim, dim);
      }
    };
    rotate(from, q_weight, heads, q + r * heads * dim);
    rotate(from + heads * dim, k_weight, kv_heads, k + r * kv_heads * dim);
    std::memcpy(v + r * kv_heads * dim, from + (heads + kv_heads) * dim, kv_heads * dim * sizeof(T));
  });
}

template <typename T>
void gated_activation(int64_t rows, int64_t dim, int64_t activation, const T* gate_up, T* out) {
  for_each_row(rows, rows * dim > MIN_PARALLEL_ELEMENTS / 2, [&](int64_t r) {
    const T* g = gate_up + r * 2 * dim;
    for (int64_t d = 0; d < dim; d += LANES) {
      vfloat x = load(g + d);
      vfloat y = activation == 0 ? x / (1.0f + vexp(-x))
                                 : 0.5f * x * (1.0f + vtanh(0.7978845608028654f * (x + 0.044715f * x * x * x)));
      store(out + r * dim + d, y * load(g + dim + d));
    }
  });
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

// residual += add * add_scale, unless `add` is null; out = rms_norm(residual) * weight, unless `weight` is null.
void lineclear_add_norm(int64_t element, int64_t rows, int64_t dim, const void* add, float add_scale, void* residual,
                        const void* weight, float eps, void* out) {
  if (element == 0)
    add_norm(rows, dim, (const float*)add, add_scale, (float*)residual, (const float*)weight, eps, (float*)out);
  else
    add_norm(rows, dim, (const bf16*)add, add_scale, (bf16*)residual, (const bf16*)weight, eps, (bf16*)out);
}

// Split qkv [rows, (heads + 2 kv_heads) * dim] into q, k and v. q and k are rotated, and normed first where there are
// weights: over each head, or over the `whole` row. cosine and sine [rows, rotary], fp32.
void lineclear_split_heads(int64_t element, int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim, int64_t rotary,
                           const void* qkv, const float* cosine, const float* sine, const void* q_weight,
                           const void* k_weight, int64_t whole, float eps, void* q, void* k, void* v) {
  if (element == 0)
    split_heads(rows, heads, kv_heads, dim, rotary, (const float*)qkv, cosine, sine, (const float*)q_weight,
                (const float*)k_weight, whole != 0, eps, (float*)q, (float*)k, (float*)v);
  else
    split_heads(rows, heads, kv_heads, dim, rotary, (const bf16*)qkv, cosine, sine, (const bf16*)q_weight,
                (const bf16*)k_weight, whole != 0, eps, (bf16*)q, (bf16*)k, (bf16*)v);
}

// out [rows, dim] = activation(gate) * up, gate_up [rows, 2 * dim]. activation: 0 silu, 1 gelu (tanh).
void lineclear_gated_activation(int64_t element, int64_t rows, int64_t dim, int64_t activation, const void* gate_up, void* out) {
  if (element == 0)
    gated_activation(rows, dim, activation, (const float*)gate_up, (float*)out);
  else
    gated_activation(rows, dim, activation, (const bf16*)gate_up, (bf16*)out);
}

// out[r] = from[indices[r]]; a row has `bytes` bytes.
void lineclear_gather_rows(int64_t rows, int64_t bytes, const void* from, const int64_t* indices, void* out) {
  for_each_row(rows, rows * bytes > MIN_PARALLEL_ELEMENTS * 8, [&](int64_t r) { std::memcpy((char*)out + r * bytes, (const char*)from + indices[r] * bytes, bytes); });
}
}

CAPTURABLE(lineclear_argmax)
CAPTURABLE(lineclear_add_norm)
CAPTURABLE(lineclear_split_heads)
CAPTURABLE(lineclear_gated_activation)
CAPTURABLE(lineclear_gather_rows)
