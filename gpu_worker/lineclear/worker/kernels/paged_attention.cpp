// Attention over KV pages on a CPU (PagedAttention, Kwon et al. 2023): one call per layer writes the step's keys and values
// into their cells and computes the attention output.
//
// Decodes and prompt chunks take the same path: a chunk is `num_queries` consecutive positions of one sequence. The query
// heads that share a KV head are the rows of one small matrix product. Softmax is computed online over tiles of keys, in
// fp32 (FlashAttention, Dao et al. 2022): a running maximum and sum per row rescale the output when the maximum grows.
// K pages are stored transposed, so a register holds one dimension of LANES keys and a score needs no horizontal sum.
//
// The file is compiled once per instruction set, with the compiler's vector types. It has a plain C ABI and includes
// neither Python nor torch headers. Only this file knows the layout of a block; callers know the distance of blocks in a
// layer, `block_stride` elements.
//
// int8 pools have a scale for each token and head. Queries are then quantized as well, and scores are integer sums. These
// are exact, so they do not depend on how the work is split.
//
// Decodes are bound by memory bandwidth: a step reads each key and value once for a few rows. Pages are small and scattered,
// so the hardware prefetcher cannot predict the next page. `NextRange` returns it, and its cache lines are prefetched one by
// one between the loads of the current tile.

#include <atomic>

#include "int8_quant.h"
#include "graph_capture.h"

namespace {

constexpr int MAX_ROWS = 8;    // query rows of one work item
constexpr int TILE_KEYS = 64;  // keys between two updates of the running maximum

// Accumulator registers per row that fit for `rows` rows: 4, 2 or 1.
constexpr int width_for(int rows) { return rows * 4 <= ACCUMULATORS ? 4 : rows * 2 <= ACCUMULATORS ? 2 : 1; }

struct Geometry {
  int64_t block_size, num_heads, num_kv_heads, head_dim, block_stride;
  int64_t page(int64_t block, int64_t head) const { return block * block_stride + head * head_dim * block_size; }
};

// Index of one element in a K page: [dim, token] in fp32, [dim / 2, token, 2] in bf16, [dim / 4, token, 4] in int8. Int8
// keys are stored with an offset of 128, as uint8.
template <typename T>
inline int64_t k_cell(const Geometry& g, int64_t token, int64_t dim) {
  if (sizeof(T) == 1) return (dim / 4) * g.block_size * 4 + token * 4 + (dim & 3);
  if (sizeof(T) == 2) return (dim / 2) * g.block_size * 2 + token * 2 + (dim & 1);
  return dim * g.block_size + token;
}

// Prefetch a cache line of the next tile into L2: misses there do not delay the loads of the current tile.
inline void prefetch(const void* line) { __builtin_prefetch(line, 0, 2); }

// acc[r][g] = scores of query r against LANES keys at k[g]. q [ROWS, dim], fp32. Prefetches the same amount from `ahead`.
template <typename T, int ROWS, int GROUPS>
inline void dot(const float* q, const T* const* k, const T* const* ahead, int64_t dim, int64_t block_size,
                vfloat acc[ROWS][GROUPS]) {
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int g = 0; g < GROUPS; g++) acc[r][g] = vfloat{};
  for (int64_t d = 0; d < dim; d += 2) {
    vfloat even[GROUPS], odd[GROUPS];
#pragma GCC unroll 4
    for (int g = 0; g < GROUPS; g++) {
      prefetch(ahead[g] + d * block_size);
      if constexpr (sizeof(T) == 2) {
        const vuint pairs = load_pairs(k[g] + d * block_size);
        even[g] = first(pairs), odd[g] = second(pairs);
      } else {
        prefetch(ahead[g] + (d + 1) * block_size);
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

// Quantized queries [ROWS, dim] with a scale per row. `offset_sum`: 128 * sum(row), which the offset of the keys adds to
// its scores.
template <int ROWS>
struct Int8Queries {
  alignas(64) int8_t bytes[ROWS * 512];
  float scale[ROWS];
  int32_t offset_sum[ROWS];

  void set(int row, const float* query, int64_t dim) {
    uint8_t offset[512];
    scale[row] = quantize(query, dim, offset);
    int32_t sum = 0;
    for (int64_t d = 0; d < dim; d++) {
      bytes[row * dim + d] = int8_t(offset[d] ^ 0x80);
      sum += int32_t(offset[d]) - 128;
    }
    offset_sum[row] = sum * 128;
  }
};

// `dot` for int8 queries and keys. The results are integers without the scales.
template <int ROWS, int GROUPS>
inline void dot_int8(const Int8Queries<ROWS>& q, const uint8_t* const* k, const uint8_t* const* ahead, int64_t dim,
                      int64_t block_size, vfloat acc[ROWS][GROUPS]) {
#if defined(__AVX512VNNI__)
  vint sums[ROWS][GROUPS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int g = 0; g < GROUPS; g++) sums[r][g] = vint{} - q.offset_sum[r];
  for (int64_t d = 0; d < dim; d += 4) {
    vint keys[GROUPS];
#pragma GCC unroll 4
    for (int g = 0; g < GROUPS; g++) {
      prefetch(ahead[g] + d * block_size);
      std::memcpy(&keys[g], k[g] + d * block_size, sizeof(vint));
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
      int32_t four;
      std::memcpy(&four, q.bytes + r * dim + d, 4);
      const vint query = vint{} + four;
#pragma GCC unroll 4
      for (int g = 0; g < GROUPS; g++)  // inline assembly instead of the intrinsic: see int8_gemm.cpp
        asm("vpdpbusd %2, %1, %0" : "+v"(sums[r][g]) : "v"(keys[g]), "v"(query));
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int g = 0; g < GROUPS; g++) acc[r][g] = __builtin_convertvector(sums[r][g], vfloat);
#else
  // fp32 holds these integers exactly: 512 * 255 * 127 < 2^24.
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int g = 0; g < GROUPS; g++) acc[r][g] = splat(float(-q.offset_sum[r]));
  for (int64_t d = 0; d < dim; d++) {
    vfloat keys[GROUPS];
#pragma GCC unroll 4
    for (int g = 0; g < GROUPS; g++) {
      vint four;
      if (d % 4 == 0) prefetch(ahead[g] + d * block_size);
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

struct QueryRows {
  const void* const* queries;  // per row
  void* const* outs;
  const int64_t* limits;  // per row: the position after its last visible key
  const int64_t* lows;    // per row: the position of its first visible key
  const float* sinks;     // per row, or null
};

// Keys and values of one KV head at positions [low, limit) of one sequence.
struct KeyRange {
  const int32_t* table;
  int64_t head, low, limit;
  // Tiles lie at multiples of TILE_KEYS in the sequence. So a query's sums have one order in every chunk, also in a window.
  int64_t begin() const { return low / TILE_KEYS * TILE_KEYS; }
};

struct Layer {
  Geometry g;
  const void *k_pool, *v_pool;
  float scaling, softcap;
  const float *k_scales, *v_scales;  // [block, kv head, token], for int8 pools
};

// Load W registers of one token's value. bf16 pairs are split: of two registers, the first holds the even dimensions and
// the second the odd ones. `sum_index` restores the order at the end.
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

// Index of dimension `d` in a row of output sums: split into pairs where `add_values` uses two or more registers.
template <typename T, int WIDTH>
inline int64_t sum_index(int64_t d, int64_t dim) {
  if (sizeof(T) != 2 || WIDTH % 2 || d >= dim / (WIDTH * LANES) * (WIDTH * LANES)) return d;
  const int64_t inside = d % (2 * LANES);
  return d - inside + inside / 2 + inside % 2 * LANES;
}

// out[r][0 .. W * LANES) += p[r][t] * v[t] for `count` tokens of one page. Prefetches the same amount from `ahead`.
template <typename T, int ROWS, int W>
inline void add_values(const T* v, const T* ahead, int64_t stride, int count, const float* p, float* out, int64_t dim) {
  vfloat acc[ROWS][W];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int w = 0; w < W; w++) acc[r][w] = load(out + r * dim + w * LANES);
  for (int t = 0; t < count; t++) {
    vfloat values[W];
    load_values<T, W>(v + t * stride, values);
    for (int w = 0; w < W * LANES; w += 64 / int(sizeof(T))) prefetch(ahead + t * stride + w);
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

// Index of a position's scale. The scales of the next positions in its block follow it.
inline int64_t scale_index(const Geometry& g, const KeyRange& range, int64_t at) {
  return (int64_t(range.table[at / g.block_size]) * g.num_kv_heads + range.head) * g.block_size + at % g.block_size;
}

// Addresses of a tile's keys and values, one per group of LANES positions. A group past the end repeats the first one.
template <typename K, typename V>
struct Tile {
  static constexpr int GROUPS = TILE_KEYS / LANES;
  const K* keys[GROUPS];
  const V* values[GROUPS];

  Tile(const Layer& layer, const KeyRange& range, int64_t from) {
    const Geometry& g = layer.g;
    for (int i = 0; i < GROUPS; i++) {
      const int64_t at = from + i * LANES < range.limit ? from + i * LANES : from;
      const int64_t page = g.page(range.table[at / g.block_size], range.head), offset = at % g.block_size;
      keys[i] = static_cast<const K*>(layer.k_pool) + page + k_cell<K>(g, offset, 0);
      values[i] = static_cast<const V*>(layer.v_pool) + page + offset * g.head_dim;
    }
  }
};

// Attention of ROWS query rows over one range of keys. T: element type of queries and outputs; K, V: of the pools.
// `next_range` is called once, at the last tile, and returns the range that this thread reads next.
template <typename T, typename K, typename V, int ROWS, typename NextRange>
void attend_rows(const Layer& layer, const QueryRows& query_rows, const KeyRange& range, NextRange& next_range) {
  constexpr bool INT8 = sizeof(K) == 1;
  const Geometry& g = layer.g;
  const int64_t dim = g.head_dim, size = g.block_size;
  alignas(64) float q[ROWS * 512];
  Int8Queries<INT8 ? ROWS : 1> int8_queries;
  float largest[ROWS], total[ROWS];
  alignas(64) float out[ROWS * 512];
  alignas(64) float p[ROWS * TILE_KEYS];
  for (int r = 0; r < ROWS; r++) {
    const T* query = static_cast<const T*>(query_rows.queries[r]);
    for (int64_t d = 0; d < dim; d += LANES) store(q + r * dim + d, load(query + d));
    if constexpr (INT8) int8_queries.set(r, q + r * dim, dim);
    largest[r] = query_rows.sinks ? query_rows.sinks[r] : -INFINITY;
    total[r] = query_rows.sinks ? 1.0f : 0.0f;
  }
  std::memset(out, 0, sizeof(float) * ROWS * dim);

  constexpr int GROUPS = width_for(ROWS);
  vint lane;
  for (int i = 0; i < LANES; i++) lane[i] = i;
  Tile<K, V> tile(layer, range, range.begin());
  for (int64_t start = range.begin(); start < range.limit; start += TILE_KEYS) {
    const bool last = start + TILE_KEYS >= range.limit;
    const int64_t stop = last ? range.limit : start + TILE_KEYS;
    const int groups = int((stop - start + LANES - 1) / LANES);
    const KeyRange next = last ? next_range() : range;
    const Tile<K, V> ahead(layer, next, last ? next.begin() : stop);
    for (int first = 0; first < groups; first += GROUPS) {
      vfloat acc[ROWS][GROUPS];
      if constexpr (INT8)
        dot_int8<ROWS, GROUPS>(int8_queries, tile.keys + first, ahead.keys + first, dim, size, acc);
      else
        dot<T, ROWS, GROUPS>(q, tile.keys + first, ahead.keys + first, dim, size, acc);
      for (int i = 0; i < GROUPS && first + i < groups; i++) {
        vint position = lane + int32_t(start + (first + i) * LANES);
        vfloat key_scale;
        if constexpr (INT8) key_scale = load(layer.k_scales + scale_index(g, range, start + (first + i) * LANES));
        for (int r = 0; r < ROWS; r++) {
          vfloat score = acc[r][i] * layer.scaling;
          if constexpr (INT8) score = score * int8_queries.scale[r] * key_scale;
          if (layer.softcap > 0) score = vtanh(score / layer.softcap) * layer.softcap;
          vint seen = (position >= int32_t(query_rows.lows[r])) & (position < int32_t(query_rows.limits[r]));
          *reinterpret_cast<vfloat*>(p + r * TILE_KEYS + (first + i) * LANES) = select(seen, score, splat(-INFINITY));
        }
      }
    }
    for (int r = 0; r < ROWS; r++) {
      float* row = p + r * TILE_KEYS;
      vfloat best = splat(-INFINITY);
      for (int i = 0; i < groups; i++) best = vmax(*reinterpret_cast<vfloat*>(row + i * LANES), best);
      float top = hmax(best);
      // A NaN score fails every comparison above. It still reaches `total` below, and so the output.
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
        if constexpr (INT8) e *= load(layer.v_scales + scale_index(g, range, start + i * LANES));
        *cell = e;
      }
      total[r] += hsum(sum);
    }
    for (int i = 0; i < groups; i++) {
      const int count = start + (i + 1) * LANES < stop ? LANES : int(stop - start) - i * LANES;
      const V *values = tile.values[i], *ahead_values = ahead.values[i];
      const float* weights = p + i * LANES;
      int64_t d = 0;
      constexpr int WIDTH = width_for(ROWS);
      for (; d + WIDTH * LANES <= dim; d += WIDTH * LANES)
        add_values<V, ROWS, WIDTH>(values + d, ahead_values + d, dim, count, weights, out + d, dim);
      for (; d < dim; d += LANES) add_values<V, ROWS, 1>(values + d, ahead_values + d, dim, count, weights, out + d, dim);
    }
    for (int i = groups; i < Tile<K, V>::GROUPS; i++)  // a short tile has too few loads to prefetch all of the next one
      for (int64_t d = 0; d < LANES * dim; d += 64 / int64_t(sizeof(V))) prefetch(ahead.values[i] + d);
    tile = ahead;
  }
  for (int r = 0; r < ROWS; r++) {
    T* to = static_cast<T*>(query_rows.outs[r]);
    const float inverse = 1.0f / total[r];
    for (int64_t d = 0; d < dim; d++) from_float(out[r * dim + sum_index<V, width_for(ROWS)>(d, dim)] * inverse, to + d);
  }
}

template <typename T, typename K, typename V, typename NextRange>
void attend(int rows, const Layer& layer, const QueryRows& query_rows, const KeyRange& range, NextRange& next_range) {
  switch (rows) {
    case 1: return attend_rows<T, K, V, 1>(layer, query_rows, range, next_range);
    case 2: return attend_rows<T, K, V, 2>(layer, query_rows, range, next_range);
    case 3: return attend_rows<T, K, V, 3>(layer, query_rows, range, next_range);
    case 4: return attend_rows<T, K, V, 4>(layer, query_rows, range, next_range);
    case 5: return attend_rows<T, K, V, 5>(layer, query_rows, range, next_range);
    case 6: return attend_rows<T, K, V, 6>(layer, query_rows, range, next_range);
    case 7: return attend_rows<T, K, V, 7>(layer, query_rows, range, next_range);
    default: return attend_rows<T, K, V, 8>(layer, query_rows, range, next_range);
  }
}

}  // namespace

extern "C" {

// One layer: `_Layer` in attention/cpu_native.py mirrors it. All arrays are contiguous. element: 0 fp32,
// 1 bf16.
struct LineclearLayer {
  int64_t element, block_size, num_heads, num_kv_heads, head_dim, block_stride, window, chunk;
  float scaling, softcap;
  void *k_pool, *v_pool;
  const float* sinks;           // [num_heads] or null
  float *k_scales, *v_scales;  // [block, kv head, token] for int8 pools; null: the pools have the element type
};

// One step, for all layers: `_Batch` in attention/cpu_native.py mirrors this struct.
struct LineclearBatch {
  int64_t num_tokens, num_chunks, num_items;
  const int64_t* cells;        // [num_tokens]: block * block_size + offset
  const int64_t* first;        // [num_chunks]: index of the chunk's first packed query
  const int64_t* num_queries;  // [num_chunks]
  const int64_t* start;        // [num_chunks]: position of the first query
  const int64_t* table;        // [num_chunks]: index of its block table in `blocks`
  const int32_t* blocks;
};

int64_t lineclear_queries_per_item(int64_t num_heads, int64_t num_kv_heads);

}  // extern "C"

namespace {

// Write the key and value [dim] of one head into their cell.
template <typename T, typename K, typename V>
inline void write_kv(const Geometry& g, const LineclearLayer& layer, int64_t block, int64_t head, int64_t offset, const T* key,
                  const T* value) {
  K* page = static_cast<K*>(layer.k_pool) + g.page(block, head);
  V* values = static_cast<V*>(layer.v_pool) + g.page(block, head) + offset * g.head_dim;
  if constexpr (sizeof(K) == 1) {
    const int64_t scale = (block * g.num_kv_heads + head) * g.block_size + offset;
    uint8_t bytes[512];
    layer.k_scales[scale] = quantize(key, g.head_dim, bytes);
    for (int64_t d = 0; d < g.head_dim; d += 4) std::memcpy(page + k_cell<K>(g, offset, d), bytes + d, 4);
    layer.v_scales[scale] = quantize(value, g.head_dim, bytes);
    for (int64_t d = 0; d < g.head_dim; d++) values[d] = int8_t(bytes[d] ^ 0x80);
  } else {
    for (int64_t d = 0; d < g.head_dim; d++) page[k_cell<K>(g, offset, d)] = key[d];
    std::memcpy(values, value, g.head_dim * sizeof(T));
  }
}

// Queries [from, to) of a chunk, for one KV head.
struct WorkItem {
  int64_t chunk, from, to;
  KeyRange range;
};

// One thread's view of the shared queue of work items. The longest chunks are last in the batch and are claimed first.
class WorkQueue {
 public:
  WorkQueue(const LineclearBatch& batch, const LineclearLayer& layer, std::atomic<int64_t>* num_claimed)
      : batch_(batch), layer_(layer), num_claimed_(num_claimed), chunk_(batch.num_chunks - 1),
        size_(lineclear_queries_per_item(layer.num_heads, layer.num_kv_heads)) {}

  // Claim the next item. Returns false and leaves `item` unchanged when none is left.
  bool claim(WorkItem* item) {
    const int64_t number = num_claimed_->fetch_add(1, std::memory_order_relaxed), kv_heads = layer_.num_kv_heads;
    if (number >= batch_.num_items * kv_heads) return false;
    for (; number / kv_heads >= num_before_ + num_items(); chunk_--) num_before_ += num_items();
    const int64_t start = batch_.start[chunk_], most = batch_.num_queries[chunk_];
    const int64_t from = (number / kv_heads - num_before_) * size_, to = from + size_ < most ? from + size_ : most;
    const int32_t* table = batch_.blocks + batch_.table[chunk_];
    *item = {chunk_, from, to, {table, number % kv_heads, low(start + from), start + to}};
    return true;
  }

  // First position that the query at `position` sees.
  int64_t low(int64_t position) const {
    if (layer_.chunk > 0) return position / layer_.chunk * layer_.chunk;
    return layer_.window > 0 && position >= layer_.window ? position + 1 - layer_.window : 0;
  }

 private:
  int64_t num_items() const { return (batch_.num_queries[chunk_] + size_ - 1) / size_; }

  const LineclearBatch& batch_;
  const LineclearLayer& layer_;
  std::atomic<int64_t>* num_claimed_;
  int64_t chunk_, num_before_ = 0;  // chunk of the last claimed item; items per head before that chunk
  const int64_t size_;              // queries of an item
};

template <typename T, typename K, typename V>
void run(const LineclearLayer& layer, const LineclearBatch& batch, const T* query, const T* key, const T* value, T* out) {
  const Layer layer_view = {{layer.block_size, layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.block_stride},
                       layer.k_pool, layer.v_pool, layer.scaling, layer.softcap, layer.k_scales, layer.v_scales};
  const Geometry& g = layer_view.g;
  const int64_t heads = g.num_heads, kv_heads = g.num_kv_heads, dim = g.head_dim, group = heads / kv_heads;
  // An item holds whole queries where their heads fit into MAX_ROWS, else the heads of one query are processed in slices.
  const int64_t slices = (group + MAX_ROWS - 1) / MAX_ROWS;
  std::atomic<int64_t> num_claimed{0};

#pragma omp parallel
  {
#pragma omp for schedule(static)
    for (int64_t t = 0; t < batch.num_tokens; t++) {
      const int64_t block = batch.cells[t] / g.block_size, offset = batch.cells[t] % g.block_size;
      for (int64_t h = 0; h < kv_heads; h++) {
        const int64_t at = (t * kv_heads + h) * dim;
        write_kv<T, K, V>(g, layer, block, h, offset, key + at, value + at);
      }
    }
    WorkQueue work_queue(batch, layer, &num_claimed);
    WorkItem item;
    for (bool has_item = work_queue.claim(&item); has_item;) {
      WorkItem next = item;
      has_item = false;
      const KeyRange& range = item.range;
      for (int64_t slice = 0; slice < slices; slice++) {
        const auto next_range = [&] {
          if (slice + 1 == slices) has_item = work_queue.claim(&next);
          return next.range;
        };
        const void* queries[MAX_ROWS];
        void* outs[MAX_ROWS];
        int64_t limits[MAX_ROWS], lows[MAX_ROWS];
        float sinks[MAX_ROWS];
        int rows = 0;
        for (int64_t i = item.from; i < item.to; i++) {
          const int64_t position = batch.start[item.chunk] + i;
          for (int64_t s = slice * MAX_ROWS; s < group && s < (slice + 1) * MAX_ROWS; s++) {
            const int64_t head = range.head * group + s;
            const int64_t at = ((batch.first[item.chunk] + i) * heads + head) * dim;
            queries[rows] = query + at;
            outs[rows] = out + at;
            limits[rows] = position + 1;
            lows[rows] = work_queue.low(position);
            sinks[rows] = layer.sinks ? layer.sinks[head] : 0;
            rows++;
          }
        }
        const QueryRows query_rows = {queries, outs, limits, lows, layer.sinks ? sinks : nullptr};
        attend<T, K, V>(rows, layer_view, query_rows, range, next_range);
      }
      item = next;
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

// Raised with every change to a struct or an exported function; native_library.py refuses libraries with another number.
int64_t lineclear_abi(void) { return 18; }

// Queries of a work item. `num_items` of a batch counts the items of all chunks for one KV head.
int64_t lineclear_queries_per_item(int64_t num_heads, int64_t num_kv_heads) {
  const int64_t group = num_heads / num_kv_heads;
  return group >= MAX_ROWS ? 1 : MAX_ROWS / group;
}

// Write keys and values, then compute attention. query and out [num_tokens, num_heads, head_dim], key and value
// [num_tokens, num_kv_heads, head_dim]. head_dim is a multiple of 16 and at most 512, block_size a multiple of 16.
void lineclear_paged_attention(const LineclearLayer* layer, const LineclearBatch* batch, const void* query, const void* key,
                      const void* value, void* out) {
  if (layer->element == 0)
    run(*layer, *batch, static_cast<const float*>(query), static_cast<const float*>(key),
        static_cast<const float*>(value), static_cast<float*>(out));
  else
    run(*layer, *batch, static_cast<const bf16*>(query), static_cast<const bf16*>(key),
        static_cast<const bf16*>(value), static_cast<bf16*>(out));
}
}

CAPTURABLE(lineclear_paged_attention)
