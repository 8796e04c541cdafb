// Attention over KV pages on a CPU: one call a layer writes the step's keys and values into their cells and attends.
//
// Decode rows and prompt chunks are the same thing here: a chunk is `num_queries` consecutive positions of a sequence, and
// the query heads that share a KV head are rows of one small matrix product. Softmax is taken online over tiles of keys,
// in fp32. The keys of a page lie side by side (K is stored transposed), so a score needs no horizontal sum.
//
// The file is compiled once per instruction set; the compiler's vector types carry the rest. Plain C ABI: no Python, no
// torch headers. The layout of a block, num_kv_heads * head_dim * block_size keys and as many values of a layer, is private
// to this file; where the blocks of a layer lie, `block_stride` elements apart, is not.
//
// Pools of bytes have a scale for each token and head, beside them. Queries are made bytes as well then, and scores are
// sums of integers: they are exact, so they do not depend on how the work is cut.
//
// Decodes are bound by memory: each key and value is used for a few rows and not again in this step. Pages are small and
// lie anywhere, so the processor cannot guess the next one; `Following` says which it is, and its lines are fetched one
// by one beside the loads of the current tile, which keeps as many on their way as there can be.

#include <atomic>

#include "int8_quant.h"
#include "graph_capture.h"

namespace {

constexpr int MAX_ROWS = 8;    // query rows of one work item
constexpr int TILE_KEYS = 64;  // keys between two updates of the running maximum


// How many registers side by side each of `rows` rows can sum into: 4, 2 or 1.
constexpr int width_for(int rows) { return rows * 4 <= ACCUMULATORS ? 4 : rows * 2 <= ACCUMULATORS ? 2 : 1; }

struct Geometry {
  int64_t block_size, num_heads, num_kv_heads, head_dim, block_stride;
  int64_t page(int64_t block, int64_t head) const { return block * block_stride + head * head_dim * block_size; }
};

// A page of K: [dim, token] in fp32, [dim / 2, token, 2] in bf16, [dim / 4, token, 4] in bytes, which are offset by 128.
template <typename T>
inline int64_t k_cell(const Geometry& g, int64_t token, int64_t dim) {
  if (sizeof(T) == 1) return (dim / 4) * g.block_size * 4 + token * 4 + (dim & 3);
  if (sizeof(T) == 2) return (dim / 2) * g.block_size * 2 + token * 2 + (dim & 1);
  return dim * g.block_size + token;
}

// A line that the next tile reads: into the second-level cache, whose misses do not hold up the loads of this tile.
inline void fetch(const void* line) { __builtin_prefetch(line, 0, 2); }

// Scores of ROWS queries [ROWS, dim] against LANES keys at each of GROUPS places: acc[r][g]. Meanwhile `ahead`, as many
// keys, is fetched.
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
      fetch(ahead[g] + d * block_size);
      if constexpr (sizeof(T) == 2) {
        const vuint pairs = load_pairs(k[g] + d * block_size);
        even[g] = first(pairs), odd[g] = second(pairs);
      } else {
        fetch(ahead[g] + (d + 1) * block_size);
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
inline void dot_bytes(const ByteQueries<ROWS>& q, const uint8_t* const* k, const uint8_t* const* ahead, int64_t dim,
                      int64_t block_size, vfloat acc[ROWS][GROUPS]) {
#if defined(__AVX512VNNI__)
  vint sums[ROWS][GROUPS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int g = 0; g < GROUPS; g++) sums[r][g] = vint{} - q.excess[r];
  for (int64_t d = 0; d < dim; d += 4) {
    vint keys[GROUPS];
#pragma GCC unroll 4
    for (int g = 0; g < GROUPS; g++) {
      fetch(ahead[g] + d * block_size);
      std::memcpy(&keys[g], k[g] + d * block_size, sizeof(vint));
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
      int32_t four;
      std::memcpy(&four, q.bytes + r * dim + d, 4);
      const vint query = vint{} + four;
#pragma GCC unroll 4
      for (int g = 0; g < GROUPS; g++)  // not the intrinsic: see int8_gemm.cpp
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
      if (d % 4 == 0) fetch(ahead[g] + d * block_size);
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

// What a work item reads: the keys and values of one KV head, at positions low to limit of one sequence.
struct Span {
  const int32_t* table;
  int64_t head, low, limit;
  int64_t begin() const { return low / LANES * LANES; }
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

// out[r][0 .. W * LANES) += p[r][t] * v[t], for `count` tokens of one page. Meanwhile those at `ahead` are fetched.
template <typename T, int ROWS, int W>
inline void weigh(const T* v, const T* ahead, int64_t stride, int count, const float* p, float* out, int64_t dim) {
  vfloat acc[ROWS][W];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int w = 0; w < W; w++) acc[r][w] = load(out + r * dim + w * LANES);
  for (int t = 0; t < count; t++) {
    vfloat values[W];
    load_values<T, W>(v + t * stride, values);
    for (int w = 0; w < W * LANES; w += 64 / int(sizeof(T))) fetch(ahead + t * stride + w);
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
inline int64_t scale_at(const Geometry& g, const Span& span, int64_t at) {
  return (int64_t(span.table[at / g.block_size]) * g.num_kv_heads + span.head) * g.block_size + at % g.block_size;
}

// Where the keys and values of a tile lie, by groups of LANES positions. A group past the end is the first one again.
template <typename K, typename V>
struct Tile {
  static constexpr int GROUPS = TILE_KEYS / LANES;
  const K* keys[GROUPS];
  const V* values[GROUPS];

  Tile(const Layer& layer, const Span& span, int64_t from) {
    const Geometry& g = layer.g;
    for (int i = 0; i < GROUPS; i++) {
      const int64_t at = from + i * LANES < span.limit ? from + i * LANES : from;
      const int64_t page = g.page(span.table[at / g.block_size], span.head), offset = at % g.block_size;
      keys[i] = static_cast<const K*>(layer.k_pool) + page + k_cell<K>(g, offset, 0);
      values[i] = static_cast<const V*>(layer.v_pool) + page + offset * g.head_dim;
    }
  }
};

// T: of queries and outputs; K, V: of the pools. `following` is asked once, late, for what this thread reads next.
template <typename T, typename K, typename V, int ROWS, typename Following>
void attend_rows(const Layer& layer, const Task& task, const Span& span, Following& following) {
  constexpr bool BYTES = sizeof(K) == 1;
  const Geometry& g = layer.g;
  const int64_t dim = g.head_dim, size = g.block_size;
  alignas(64) float q[ROWS * 512];
  ByteQueries<BYTES ? ROWS : 1> byte_queries;
  float largest[ROWS], total[ROWS];
  alignas(64) float out[ROWS * 512];
  alignas(64) float p[ROWS * TILE_KEYS];
  for (int r = 0; r < ROWS; r++) {
    const T* query = static_cast<const T*>(task.queries[r]);
    for (int64_t d = 0; d < dim; d += LANES) store(q + r * dim + d, load(query + d));
    if constexpr (BYTES) byte_queries.take(r, q + r * dim, dim);
    largest[r] = task.sinks ? task.sinks[r] : -INFINITY;
    total[r] = task.sinks ? 1.0f : 0.0f;
  }
  std::memset(out, 0, sizeof(float) * ROWS * dim);

  constexpr int GROUPS = width_for(ROWS);
  vint lane;
  for (int i = 0; i < LANES; i++) lane[i] = i;
  Tile<K, V> tile(layer, span, span.begin());
  for (int64_t start = span.begin(); start < span.limit; start += TILE_KEYS) {
    const bool last = start + TILE_KEYS >= span.limit;
    const int64_t stop = last ? span.limit : start + TILE_KEYS;
    const int groups = int((stop - start + LANES - 1) / LANES);
    const Span then = last ? following() : span;
    const Tile<K, V> ahead(layer, then, last ? then.begin() : stop);
    for (int first = 0; first < groups; first += GROUPS) {
      vfloat acc[ROWS][GROUPS];
      if constexpr (BYTES)
        dot_bytes<ROWS, GROUPS>(byte_queries, tile.keys + first, ahead.keys + first, dim, size, acc);
      else
        dot<T, ROWS, GROUPS>(q, tile.keys + first, ahead.keys + first, dim, size, acc);
      for (int i = 0; i < GROUPS && first + i < groups; i++) {
        vint position = lane + int32_t(start + (first + i) * LANES);
        vfloat key_scale;
        if constexpr (BYTES) key_scale = load(layer.k_scales + scale_at(g, span, start + (first + i) * LANES));
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
        if constexpr (BYTES) e *= load(layer.v_scales + scale_at(g, span, start + i * LANES));
        *cell = e;
      }
      total[r] += hsum(sum);
    }
    for (int i = 0; i < groups; i++) {
      const int count = start + (i + 1) * LANES < stop ? LANES : int(stop - start) - i * LANES;
      const V *values = tile.values[i], *fetched = ahead.values[i];
      const float* weights = p + i * LANES;
      int64_t d = 0;
      constexpr int WIDE = width_for(ROWS);
      for (; d + WIDE * LANES <= dim; d += WIDE * LANES)
        weigh<V, ROWS, WIDE>(values + d, fetched + d, dim, count, weights, out + d, dim);
      for (; d < dim; d += LANES) weigh<V, ROWS, 1>(values + d, fetched + d, dim, count, weights, out + d, dim);
    }
    for (int i = groups; i < Tile<K, V>::GROUPS; i++)  // a short tile has fewer loads beside which to fetch
      for (int64_t d = 0; d < LANES * dim; d += 64 / int64_t(sizeof(V))) fetch(ahead.values[i] + d);
    tile = ahead;
  }
  for (int r = 0; r < ROWS; r++) {
    T* to = static_cast<T*>(task.outs[r]);
    const float share = 1.0f / total[r];
    for (int64_t d = 0; d < dim; d++) from_float(out[r * dim + place<V, width_for(ROWS)>(d, dim)] * share, to + d);
  }
}

template <typename T, typename K, typename V, typename Following>
void attend(int rows, const Layer& layer, const Task& task, const Span& span, Following& following) {
  switch (rows) {
    case 1: return attend_rows<T, K, V, 1>(layer, task, span, following);
    case 2: return attend_rows<T, K, V, 2>(layer, task, span, following);
    case 3: return attend_rows<T, K, V, 3>(layer, task, span, following);
    case 4: return attend_rows<T, K, V, 4>(layer, task, span, following);
    case 5: return attend_rows<T, K, V, 5>(layer, task, span, following);
    case 6: return attend_rows<T, K, V, 6>(layer, task, span, following);
    case 7: return attend_rows<T, K, V, 7>(layer, task, span, following);
    default: return attend_rows<T, K, V, 8>(layer, task, span, following);
  }
}

}  // namespace

extern "C" {

// A layer of a step. Pointers are to contiguous arrays; element type: 0 fp32, 1 bf16.
struct LineclearLayer {
  int64_t element, block_size, num_heads, num_kv_heads, head_dim, block_stride, window;
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
  K* page = static_cast<K*>(layer.k_pool) + g.page(block, head);
  V* values = static_cast<V*>(layer.v_pool) + g.page(block, head) + offset * g.head_dim;
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

// A work item: a few queries of a chunk, one KV head.
struct Item {
  int64_t chunk, from, to;
  Span span;
};

// The items of a batch as one thread comes by them. Longest chunks are last in the batch, so they are handed out first.
class Hand {
 public:
  Hand(const LineclearBatch& batch, const LineclearLayer& layer, std::atomic<int64_t>* taken)
      : batch_(batch), layer_(layer), taken_(taken), chunk_(batch.num_chunks - 1),
        size_(lineclear_queries_per_item(layer.num_heads, layer.num_kv_heads)) {}

  // The next one that no thread has; false if there is none, and `item` is as it was.
  bool take(Item* item) {
    const int64_t number = taken_->fetch_add(1, std::memory_order_relaxed), kv_heads = layer_.num_kv_heads;
    if (number >= batch_.num_items * kv_heads) return false;
    for (; number / kv_heads >= before_ + parts(); chunk_--) before_ += parts();
    const int64_t start = batch_.start[chunk_], most = batch_.num_queries[chunk_];
    const int64_t from = (number / kv_heads - before_) * size_, to = from + size_ < most ? from + size_ : most;
    const int32_t* table = batch_.blocks + batch_.table[chunk_];
    *item = {chunk_, from, to, {table, number % kv_heads, low(start + from), start + to}};
    return true;
  }

  // The first position that the query at `position` sees.
  int64_t low(int64_t position) const {
    return layer_.window > 0 && position >= layer_.window ? position + 1 - layer_.window : 0;
  }

 private:
  int64_t parts() const { return (batch_.num_queries[chunk_] + size_ - 1) / size_; }

  const LineclearBatch& batch_;
  const LineclearLayer& layer_;
  std::atomic<int64_t>* taken_;
  int64_t chunk_, before_ = 0;  // the chunk of the item taken last, and the items before it, for one head
  const int64_t size_;          // queries of an item
};

template <typename T, typename K, typename V>
void run(const LineclearLayer& layer, const LineclearBatch& batch, const T* query, const T* key, const T* value, T* out) {
  const Layer inner = {{layer.block_size, layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.block_stride},
                       layer.k_pool, layer.v_pool, layer.scaling, layer.softcap, layer.k_scales, layer.v_scales};
  const Geometry& g = inner.g;
  const int64_t heads = g.num_heads, kv_heads = g.num_kv_heads, dim = g.head_dim, share = heads / kv_heads;
  // Rows of a work item: whole queries where their heads fit into it, else one query's heads in slices.
  const int64_t slices = (share + MAX_ROWS - 1) / MAX_ROWS;
  std::atomic<int64_t> taken{0};

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
    Hand hand(batch, layer, &taken);
    Item item;
    for (bool some = hand.take(&item); some;) {
      Item then = item;
      some = false;
      const Span& span = item.span;
      for (int64_t slice = 0; slice < slices; slice++) {
        const auto following = [&] {
          if (slice + 1 == slices) some = hand.take(&then);
          return then.span;
        };
        const void* queries[MAX_ROWS];
        void* outs[MAX_ROWS];
        int64_t limits[MAX_ROWS], lows[MAX_ROWS];
        float sinks[MAX_ROWS];
        int rows = 0;
        for (int64_t i = item.from; i < item.to; i++) {
          const int64_t position = batch.start[item.chunk] + i;
          for (int64_t s = slice * MAX_ROWS; s < share && s < (slice + 1) * MAX_ROWS; s++) {
            const int64_t head = span.head * share + s;
            const int64_t at = ((batch.first[item.chunk] + i) * heads + head) * dim;
            queries[rows] = query + at;
            outs[rows] = out + at;
            limits[rows] = position + 1;
            lows[rows] = hand.low(position);
            sinks[rows] = layer.sinks ? layer.sinks[head] : 0;
            rows++;
          }
        }
        const Task task = {queries, outs, limits, lows, layer.sinks ? sinks : nullptr};
        attend<T, K, V>(rows, inner, task, span, following);
      }
      item = then;
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
int64_t lineclear_abi(void) { return 9; }

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
