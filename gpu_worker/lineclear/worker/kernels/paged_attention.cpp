// Attention over KV pages on a CPU: one call a layer writes the step's keys and values into their cells and attends.
//
// Decode rows and prompt chunks are the same thing here: a chunk is `num_queries` consecutive positions of a sequence, and
// the query heads that share a KV head are rows of one small matrix product. Softmax is taken online over tiles of keys,
// in fp32. The keys of a page lie side by side (K is stored transposed), so a score needs no horizontal sum.
//
// The file is compiled once per instruction set; the compiler's vector types carry the rest. Plain C ABI: no Python, no
// torch headers. The layouts of the pools are private to this file; in either, blocks of num_kv_heads * head_dim *
// block_size elements lie one after another.
//
// Pools of bytes have a scale for each token and head, beside them. Queries are made bytes as well then, and scores are
// sums of integers: they are exact, so they do not depend on how the work is cut.

#include "bytes.h"
#include "recorded.h"

namespace {

constexpr int MAX_ROWS = 8;    // query rows of one work item
constexpr int TILE_KEYS = 64;  // keys between two updates of the running maximum


// How many registers side by side each of `rows` rows can sum into: 4, 2 or 1.
constexpr int width_for(int rows) { return rows * 4 <= ACCUMULATORS ? 4 : rows * 2 <= ACCUMULATORS ? 2 : 1; }

struct Geometry {
  int64_t block_size, num_heads, num_kv_heads, head_dim;
  int64_t page_k(int64_t block, int64_t head) const { return (block * num_kv_heads + head) * head_dim * block_size; }
};

// A page of K: [dim, token] in fp32, [dim / 2, token, 2] in bf16, [dim / 4, token, 4] in bytes, which are offset by 128.
template <typename T>
inline int64_t k_cell(const Geometry& g, int64_t token, int64_t dim) {
  if (sizeof(T) == 1) return (dim / 4) * g.block_size * 4 + token * 4 + (dim & 3);
  if (sizeof(T) == 2) return (dim / 2) * g.block_size * 2 + token * 2 + (dim & 1);
  return dim * g.block_size + token;
}

// Scores of ROWS queries [ROWS, dim] against LANES keys at each of GROUPS places: acc[r][g].
template <typename T, int ROWS, int GROUPS>
inline void dot(const float* q, const T* const* k, int64_t dim, int64_t block_size, vfloat acc[ROWS][GROUPS]) {
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int g = 0; g < GROUPS; g++) acc[r][g] = vfloat{};
  for (int64_t d = 0; d < dim; d += 2) {
    vfloat even[GROUPS], odd[GROUPS];
#pragma GCC unroll 4
    for (int g = 0; g < GROUPS; g++) {
      if constexpr (sizeof(T) == 2) {
        const vuint pairs = load_pairs(k[g] + d * block_size);
        even[g] = first(pairs), odd[g] = second(pairs);
      } else {
        even[g] = load(k[g] + d * block_size), odd[g] = load(k[g] + (d + 1) * block_size);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
      for (int g = 0; g < GROUPS; g++) {
        acc[r][g] += even[g] * splat(q[r * dim + d]);
        acc[r][g] += odd[g] * splat(q[r * dim + d + 1]);
      }
  }
}

// Queries as bytes: [ROWS, dim], a scale each, and 128 times the sum of each, which is what offset keys add to its scores.
template <int ROWS>
struct ByteQueries {
  alignas(64) int8_t bytes[ROWS * 512];
  float scale[ROWS];
  int32_t excess[ROWS];

  void take(int row, const float* query, int64_t dim) {
    uint8_t offset[512];
    scale[row] = quantise(query, dim, offset);
    int32_t sum = 0;
    for (int64_t d = 0; d < dim; d++) {
      bytes[row * dim + d] = int8_t(offset[d] ^ 0x80);
      sum += int32_t(offset[d]) - 128;
    }
    excess[row] = sum * 128;
  }
};

// As `dot`, of bytes: whole numbers, still to be scaled.
template <int ROWS, int GROUPS>
inline void dot_bytes(const ByteQueries<ROWS>& q, const uint8_t* const* k, int64_t dim, int64_t block_size,
                      vfloat acc[ROWS][GROUPS]) {
#if defined(__AVX512VNNI__)
  vint sums[ROWS][GROUPS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int g = 0; g < GROUPS; g++) sums[r][g] = vint{} - q.excess[r];
  for (int64_t d = 0; d < dim; d += 4) {
    vint keys[GROUPS];
#pragma GCC unroll 4
    for (int g = 0; g < GROUPS; g++) std::memcpy(&keys[g], k[g] + d * block_size, sizeof(vint));
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
      int32_t four;
      std::memcpy(&four, q.bytes + r * dim + d, 4);
      const vint query = vint{} + four;
#pragma GCC unroll 4
      for (int g = 0; g < GROUPS; g++)  // not the intrinsic: see int8_product.cpp
        asm("vpdpbusd %2, %1, %0" : "+v"(sums[r][g]) : "v"(keys[g]), "v"(query));
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int g = 0; g < GROUPS; g++) acc[r][g] = __builtin_convertvector(sums[r][g], vfloat);
#else
  // In fp32, which holds these whole numbers: 512 * 255 * 127 < 2^24.
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int g = 0; g < GROUPS; g++) acc[r][g] = splat(float(-q.excess[r]));
  for (int64_t d = 0; d < dim; d++) {
    vfloat keys[GROUPS];
#pragma GCC unroll 4
    for (int g = 0; g < GROUPS; g++) {
      vint four;
      std::memcpy(&four, k[g] + d / 4 * 4 * block_size, sizeof(vint));
      keys[g] = __builtin_convertvector(four >> int(d % 4 * 8) & 255, vfloat);
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
      for (int g = 0; g < GROUPS; g++) acc[r][g] += keys[g] * float(q.bytes[r * dim + d]);
  }
#endif
}

struct Task {
  const void* const* queries;  // per row
  void* const* outs;
  const int64_t* limits;  // per row: the position after the last key it sees
  const int64_t* lows;    // per row: the first key it sees
  const float* sinks;     // per row, or null
};

struct Layer {
  Geometry g;
  const void *k_pool, *v_pool;
  float scaling, softcap;
  const float *k_scales, *v_scales;  // [block, kv head, token], of pools of bytes
};

// `W` registers of values of one token, from dimension d on. Those of bf16 hold every other one: the first register of
// each two the even ones, the second the odd ones; `place` undoes that at the end.
template <typename T, int W>
inline void load_values(const T* v, vfloat values[W]) {
  if constexpr (sizeof(T) == 2 && W % 2 == 0) {
#pragma GCC unroll 4
    for (int w = 0; w < W; w += 2) {
      const vuint pairs = load_pairs(v + w * LANES);
      values[w] = first(pairs), values[w + 1] = second(pairs);
    }
  } else {
#pragma GCC unroll 4
    for (int w = 0; w < W; w++) values[w] = load(v + w * LANES);
  }
}

// Where in a row of sums the value of dimension `d` is: in pairs for all that `weigh` takes two or more registers at once.
template <typename T, int WIDE>
inline int64_t place(int64_t d, int64_t dim) {
  if (sizeof(T) != 2 || WIDE % 2 || d >= dim / (WIDE * LANES) * (WIDE * LANES)) return d;
  const int64_t inside = d % (2 * LANES);
  return d - inside + inside / 2 + inside % 2 * LANES;
}

// out[r][0 .. W * LANES) += p[r][t] * v[t], for `count` tokens of one page.
template <typename T, int ROWS, int W>
inline void weigh(const T* v, int64_t stride, int count, const float* p, float* out, int64_t dim) {
  vfloat acc[ROWS][W];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int w = 0; w < W; w++) acc[r][w] = load(out + r * dim + w * LANES);
  for (int t = 0; t < count; t++) {
    vfloat values[W];
    load_values<T, W>(v + t * stride, values);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
      for (int w = 0; w < W; w++) acc[r][w] += values[w] * splat(p[r * TILE_KEYS + t]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int w = 0; w < W; w++) store(out + r * dim + w * LANES, acc[r][w]);
}

// Where the scale of a position is, and after it those of the positions that follow in its block.
inline int64_t scale_at(const Geometry& g, const int32_t* table, int64_t at, int64_t head) {
  return (int64_t(table[at / g.block_size]) * g.num_kv_heads + head) * g.block_size + at % g.block_size;
}

// T: of queries and outputs; K, V: of the pools.
template <typename T, typename K, typename V, int ROWS>
void attend_rows(const Layer& layer, const Task& task, const int32_t* table, int64_t head) {
  constexpr bool BYTES = sizeof(K) == 1;
  const Geometry& g = layer.g;
  const int64_t dim = g.head_dim, size = g.block_size;
  const K* k_pool = static_cast<const K*>(layer.k_pool);
  const V* v_pool = static_cast<const V*>(layer.v_pool);
  alignas(64) float q[ROWS * 512];
  ByteQueries<BYTES ? ROWS : 1> byte_queries;
  float largest[ROWS], total[ROWS];
  alignas(64) float out[ROWS * 512];
  alignas(64) float p[ROWS * TILE_KEYS];
  int64_t low = task.lows[0], limit = task.limits[0];
  for (int r = 0; r < ROWS; r++) {
    const T* query = static_cast<const T*>(task.queries[r]);
    for (int64_t d = 0; d < dim; d += LANES) store(q + r * dim + d, load(query + d));
    if constexpr (BYTES) byte_queries.take(r, q + r * dim, dim);
    largest[r] = task.sinks ? task.sinks[r] : -INFINITY;
    total[r] = task.sinks ? 1.0f : 0.0f;
    low = task.lows[r] < low ? task.lows[r] : low;
    limit = task.limits[r] > limit ? task.limits[r] : limit;
  }
  std::memset(out, 0, sizeof(float) * ROWS * dim);

  constexpr int GROUPS = width_for(ROWS);
  vint lane;
  for (int i = 0; i < LANES; i++) lane[i] = i;
  for (int64_t tile = low / LANES * LANES; tile < limit; tile += TILE_KEYS) {
    const int64_t stop = tile + TILE_KEYS < limit ? tile + TILE_KEYS : limit;
    const int groups = int((stop - tile + LANES - 1) / LANES);
    for (int first = 0; first < groups; first += GROUPS) {
      const K* keys[GROUPS];
      for (int i = 0; i < GROUPS; i++) {  // a group past the end repeats the last one; it is masked below
        int64_t at = tile + int64_t(first + i < groups ? first + i : groups - 1) * LANES;
        keys[i] = k_pool + g.page_k(table[at / size], head) + k_cell<K>(g, at % size, 0);
      }
      vfloat acc[ROWS][GROUPS];
      if constexpr (BYTES)
        dot_bytes<ROWS, GROUPS>(byte_queries, keys, dim, size, acc);
      else
        dot<T, ROWS, GROUPS>(q, keys, dim, size, acc);
      for (int i = 0; i < GROUPS && first + i < groups; i++) {
        vint position = lane + int32_t(tile + (first + i) * LANES);
        vfloat key_scale;
        if constexpr (BYTES) key_scale = load(layer.k_scales + scale_at(g, table, tile + (first + i) * LANES, head));
        for (int r = 0; r < ROWS; r++) {
          vfloat score = acc[r][i] * layer.scaling;
          if constexpr (BYTES) score = score * byte_queries.scale[r] * key_scale;
          if (layer.softcap > 0) score = vtanh(score / layer.softcap) * layer.softcap;
          vint seen = (position >= int32_t(task.lows[r])) & (position < int32_t(task.limits[r]));
          *reinterpret_cast<vfloat*>(p + r * TILE_KEYS + (first + i) * LANES) = select(seen, score, splat(-INFINITY));
        }
      }
    }
    for (int r = 0; r < ROWS; r++) {
      float* row = p + r * TILE_KEYS;
      vfloat best = splat(-INFINITY);
      for (int i = 0; i < groups; i++) best = vmax(*reinterpret_cast<vfloat*>(row + i * LANES), best);
      float top = hmax(best);
      // A NaN score fails every comparison above; it still reaches `total` below, and so the output.
      if (top == -INFINITY && largest[r] == -INFINITY) {
        bool nan = false;
        for (int i = 0; i < groups * LANES; i++) nan |= row[i] != row[i];
        if (!nan) {
          for (int i = 0; i < groups * LANES; i++) row[i] = 0;
          continue;
        }
        top = 0;
      }
      if (top > largest[r]) {
        float shrink = std::exp(largest[r] - top);
        total[r] *= shrink;
        for (int64_t d = 0; d < dim; d += LANES) {
          vfloat_u* cell = reinterpret_cast<vfloat_u*>(out + r * dim + d);
          *cell = *cell * shrink;
        }
        largest[r] = top;
      }
      vfloat sum = vfloat{};
      for (int i = 0; i < groups; i++) {
        vfloat* cell = reinterpret_cast<vfloat*>(row + i * LANES);
        vfloat hidden = *cell;
        vfloat e = vexp(hidden - largest[r]);
        e = select(hidden == -INFINITY, vfloat{}, e);
        e = select(hidden == hidden, e, hidden);
        sum += e;
        if constexpr (BYTES) e *= load(layer.v_scales + scale_at(g, table, tile + i * LANES, head));
        *cell = e;
      }
      total[r] += hsum(sum);
    }
    for (int64_t at = tile; at < stop;) {
      const int64_t offset = at % size;
      const int64_t end = at - offset + size < stop ? at - offset + size : stop;
      const V* values = v_pool + g.page_k(table[at / size], head) + offset * dim;
      const float* weights = p + (at - tile);
      int64_t d = 0;
      constexpr int WIDE = width_for(ROWS);
      for (; d + WIDE * LANES <= dim; d += WIDE * LANES)
        weigh<V, ROWS, WIDE>(values + d, dim, int(end - at), weights, out + d, dim);
      for (; d < dim; d += LANES) weigh<V, ROWS, 1>(values + d, dim, int(end - at), weights, out + d, dim);
      at = end;
    }
  }
  for (int r = 0; r < ROWS; r++) {
    T* to = static_cast<T*>(task.outs[r]);
    const float share = 1.0f / total[r];
    for (int64_t d = 0; d < dim; d++) from_float(out[r * dim + place<V, width_for(ROWS)>(d, dim)] * share, to + d);
  }
}

template <typename T, typename K, typename V>
void attend(int rows, const Layer& layer, const Task& task, const int32_t* table, int64_t head) {
  switch (rows) {
    case 1: return attend_rows<T, K, V, 1>(layer, task, table, head);
    case 2: return attend_rows<T, K, V, 2>(layer, task, table, head);
    case 3: return attend_rows<T, K, V, 3>(layer, task, table, head);
    case 4: return attend_rows<T, K, V, 4>(layer, task, table, head);
    case 5: return attend_rows<T, K, V, 5>(layer, task, table, head);
    case 6: return attend_rows<T, K, V, 6>(layer, task, table, head);
    case 7: return attend_rows<T, K, V, 7>(layer, task, table, head);
    default: return attend_rows<T, K, V, 8>(layer, task, table, head);
  }
}

}  // namespace

extern "C" {

// A layer of a step. Pointers are to contiguous arrays; element type: 0 fp32, 1 bf16.
struct LineclearLayer {
  int64_t element, block_size, num_heads, num_kv_heads, head_dim, window;
  float scaling, softcap;
  void *k_pool, *v_pool;
  const float* sinks;           // [num_heads] or null
  float *k_scales, *v_scales;  // [block, kv head, token]; null: the pools are of the element type, not bytes
};

// What all layers of a step share.
struct LineclearBatch {
  int64_t num_tokens, num_chunks, num_items;
  const int64_t* cells;        // [num_tokens]
  const int64_t* first;        // [num_chunks]: the chunk's first packed query
  const int64_t* num_queries;  // [num_chunks]
  const int64_t* start;        // [num_chunks]: position of the first query
  const int64_t* table;        // [num_chunks]: where its block table begins in `blocks`
  const int32_t* blocks;
};

int64_t lineclear_queries_per_item(int64_t num_heads, int64_t num_kv_heads);

}  // extern "C"

namespace {

// The key and value [dim] of one head into their cell.
template <typename T, typename K, typename V>
inline void write(const Geometry& g, const LineclearLayer& layer, int64_t block, int64_t head, int64_t offset, const T* key,
                  const T* value) {
  K* page = static_cast<K*>(layer.k_pool) + g.page_k(block, head);
  V* values = static_cast<V*>(layer.v_pool) + g.page_k(block, head) + offset * g.head_dim;
  if constexpr (sizeof(K) == 1) {
    const int64_t scale = (block * g.num_kv_heads + head) * g.block_size + offset;
    uint8_t bytes[512];
    layer.k_scales[scale] = quantise(key, g.head_dim, bytes);
    for (int64_t d = 0; d < g.head_dim; d += 4) std::memcpy(page + k_cell<K>(g, offset, d), bytes + d, 4);
    layer.v_scales[scale] = quantise(value, g.head_dim, bytes);
    for (int64_t d = 0; d < g.head_dim; d++) values[d] = int8_t(bytes[d] ^ 0x80);
  } else {
    for (int64_t d = 0; d < g.head_dim; d++) page[k_cell<K>(g, offset, d)] = key[d];
    std::memcpy(values, value, g.head_dim * sizeof(T));
  }
}

template <typename T, typename K, typename V>
void run(const LineclearLayer& layer, const LineclearBatch& batch, const T* query, const T* key, const T* value, T* out) {
  const Layer inner = {{layer.block_size, layer.num_heads, layer.num_kv_heads, layer.head_dim},
                       layer.k_pool, layer.v_pool, layer.scaling, layer.softcap, layer.k_scales, layer.v_scales};
  const Geometry& g = inner.g;
  const int64_t heads = g.num_heads, kv_heads = g.num_kv_heads, dim = g.head_dim, share = heads / kv_heads;
  // Rows of a work item: whole queries where their heads fit into it, else part of one query's heads.
  const int64_t queries_per_item = lineclear_queries_per_item(heads, kv_heads);
  const int64_t slices = (share + MAX_ROWS - 1) / MAX_ROWS;

#pragma omp parallel
  {
#pragma omp for schedule(static)
    for (int64_t t = 0; t < batch.num_tokens; t++) {
      const int64_t block = batch.cells[t] / g.block_size, offset = batch.cells[t] % g.block_size;
      for (int64_t h = 0; h < kv_heads; h++) {
        const int64_t at = (t * kv_heads + h) * dim;
        write<T, K, V>(g, layer, block, h, offset, key + at, value + at);
      }
    }
    // One item: a few queries of a chunk, one KV head. Longest chunks are last in the batch, so hand them out first.
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t item = 0; item < batch.num_items * kv_heads; item++) {
      int64_t rest = item / kv_heads, chunk = batch.num_chunks - 1;
      const int64_t kv_head = item % kv_heads;
      for (;; chunk--) {
        const int64_t here = (batch.num_queries[chunk] + queries_per_item - 1) / queries_per_item;
        if (rest < here) break;
        rest -= here;
      }
      const int64_t from = rest * queries_per_item;
      const int64_t to = from + queries_per_item < batch.num_queries[chunk] ? from + queries_per_item : batch.num_queries[chunk];
      for (int64_t slice = 0; slice < slices; slice++) {
        const void* queries[MAX_ROWS];
        void* outs[MAX_ROWS];
        int64_t limits[MAX_ROWS], lows[MAX_ROWS];
        float sinks[MAX_ROWS];
        int rows = 0;
        for (int64_t i = from; i < to; i++) {
          const int64_t position = batch.start[chunk] + i;
          for (int64_t s = slice * MAX_ROWS; s < share && s < (slice + 1) * MAX_ROWS; s++) {
            const int64_t head = kv_head * share + s;
            const int64_t at = ((batch.first[chunk] + i) * heads + head) * dim;
            queries[rows] = query + at;
            outs[rows] = out + at;
            limits[rows] = position + 1;
            lows[rows] = layer.window > 0 && position + 1 > layer.window ? position + 1 - layer.window : 0;
            sinks[rows] = layer.sinks ? layer.sinks[head] : 0;
            rows++;
          }
        }
        const Task task = {queries, outs, limits, lows, layer.sinks ? sinks : nullptr};
        attend<T, K, V>(rows, inner, task, batch.blocks + batch.table[chunk], kv_head);
      }
    }
  }
}

template <typename T>
void run(const LineclearLayer& layer, const LineclearBatch& batch, const T* query, const T* key, const T* value, T* out) {
  if (layer.k_scales)
    run<T, uint8_t, int8_t>(layer, batch, query, key, value, out);
  else
    run<T, T, T>(layer, batch, query, key, value, out);
}

}  // namespace

extern "C" {

// Changes whenever a struct or a function of these files changes its meaning.
int64_t lineclear_abi(void) { return 7; }

// A chunk is cut into work items of so many queries; `num_items` of a batch are all of them, before the factor of KV heads.
int64_t lineclear_queries_per_item(int64_t num_heads, int64_t num_kv_heads) {
  const int64_t share = num_heads / num_kv_heads;
  return share >= MAX_ROWS ? 1 : MAX_ROWS / share;
}

// Write keys and values, attend. query [num_tokens, num_heads, head_dim], key and value [num_tokens, num_kv_heads,
// head_dim], out like query. head_dim is a multiple of 16 and at most 512, block_size a multiple of 16.
void lineclear_attend(const LineclearLayer* layer, const LineclearBatch* batch, const void* query, const void* key,
                      const void* value, void* out) {
  if (layer->element == 0)
    run(*layer, *batch, static_cast<const float*>(query), static_cast<const float*>(key),
        static_cast<const float*>(value), static_cast<float*>(out));
  else
    run(*layer, *batch, static_cast<const bf16*>(query), static_cast<const bf16*>(key),
        static_cast<const bf16*>(value), static_cast<bf16*>(out));
}
}

RECORDABLE(lineclear_attend)
