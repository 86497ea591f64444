// Kernels of the embedded engine for CPUs with AVX-512 or AVX2; `kernels.py` builds and calls them.
//
// All parts of a layer except matrix products: norms, the gate, rotation and attention over the cache, and the draw. Every output
// number is computed by one thread, in an order that depends only on its own row. So the results of a sequence are the same to the
// bit whatever else is in the batch.

#include <omp.h>

#include <type_traits>
#include <vector>

#include "simd.h"

namespace {

constexpr int kQueries = 48;  // most queries (tokens · heads of a group) that share a pass over keys
constexpr int kBlock = 256;   // tokens of the vocabulary whose probabilities are summed first
constexpr int kKeys = 2 * kLanes;  // keys that are scored at once: two registers of one key a lane

#ifdef BFLOAT16

// Up to 32 keys and values, laid out for dot products of pairs; places beyond the last key are 0.
template <int D>
struct Block {
  static constexpr int kTogether = D <= 64 ? 4 : D <= 128 ? 2 : 1;  // as many sums as there are registers
  __m512i keys[D / 2][2];           // dimensions 2r and 2r + 1 of one key in each lane
  __m512i values[kKeys / 2][D / 16];  // keys 2j and 2j + 1 of one dimension in each lane, dimensions in `unpack`'s order

  void read(const Number* k, const Number* v, int count, bool) {
    const __m512i zero = _mm512_setzero_si512();
    for (int half = 0; half < 2; ++half)
      for (int c = 0; c < D / 32; ++c) {
        __m512i r[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) {
          const int key = 16 * half + i;
          r[i] = key < count ? _mm512_loadu_si512(k + key * D + 32 * c) : zero;
        }
        transpose(r);
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) keys[16 * c + i][half] = r[i];
      }
    for (int j = 0; j < (count + 1) / 2; ++j)
      for (int c = 0; c < D / 32; ++c) {
        const __m512i a = _mm512_loadu_si512(v + 2 * j * D + 32 * c);
        const __m512i b = 2 * j + 1 < count ? _mm512_loadu_si512(v + (2 * j + 1) * D + 32 * c) : zero;
        values[j][2 * c] = _mm512_unpacklo_epi16(a, b);
        values[j][2 * c + 1] = _mm512_unpackhi_epi16(a, b);
      }
  }

  template <int N>
  void score(const Number* const* query, Vec s[N][2]) const {
    for (int r = 0; r < D / 2; ++r)
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        const Bits pair = _mm512_set1_epi32(reinterpret_cast<const int32_t*>(query[n])[r]);
        s[n][0] = dot(s[n][0], keys[r][0], pair);
        s[n][1] = dot(s[n][1], keys[r][1], pair);
      }
  }

  template <int N>
  void add(const Number (*weights)[kKeys], int count, Vec (*sums)[D / 16]) const {
    Vec s[N][D / 16];
    for (int n = 0; n < N; ++n)
      for (int c = 0; c < D / 16; ++c) s[n][c] = sums[n][c];
    for (int j = 0; j < (count + 1) / 2; ++j)
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        int32_t both;
        std::memcpy(&both, &weights[n][2 * j], sizeof both);
        const Bits pair = _mm512_set1_epi32(both);
#pragma GCC unroll 16
        for (int c = 0; c < D / 16; ++c) s[n][c] = dot(s[n][c], values[j][c], pair);
      }
    for (int n = 0; n < N; ++n)
      for (int c = 0; c < D / 16; ++c) sums[n][c] = s[n][c];
  }

  static void keep(Number* weights, Vec x, Vec y) { _mm512_store_si512(weights, (Bits)_mm512_cvtne2ps_pbh(y, x)); }

  static void write(const Vec* sums, Vec by, Number* out) {
    for (int c = 0; c < D / 32; ++c) {  // undoes the order that `unpack` made within 128 bits
      const Vec a = sums[2 * c] * by, b = sums[2 * c + 1] * by;
      const Vec low = _mm512_shuffle_f32x4(a, b, 0x44), high = _mm512_shuffle_f32x4(a, b, 0xee);
      store(out + 32 * c, _mm512_shuffle_f32x4(low, low, 0xd8));
      store(out + 32 * c + 16, _mm512_shuffle_f32x4(high, high, 0xd8));
    }
  }
};

#else

inline void fetch(const float* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }

// Up to `kKeys` keys, transposed, and their values; places beyond the last key are 0. The next keys are prefetched meanwhile:
// arithmetic and memory take equally long, so neither has to wait for the other.
template <int D>
struct Block {
  static constexpr int kTogether = 4;
  Bits keys[D][2];  // a dimension of one key in each lane
  const float *values, *next_keys, *next_values;

  void read(const float* k, const float* v, int count, bool more) {
    for (int half = 0; half < 2; ++half)
      for (int c = 0; c < D; c += kLanes) {
        Bits r[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
          const int key = kLanes * half + i;
          r[i] = key < count ? load_bits(k + key * D + c) : Bits{};
        }
        transpose(r);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) keys[c + i][half] = r[i];
      }
    values = v;
    next_keys = more ? k + kKeys * D : k;
    next_values = more ? v + kKeys * D : v;
  }

  template <int N>
  void score(const float* const* query, Vec s[N][2]) const {
    for (int d = 0; d < D; ++d) {
      fetch(next_keys + d * kKeys);
      fetch(next_keys + d * kKeys + kKeys / 2);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        const Vec q = all(query[n][d]);
        s[n][0] = fma((Vec)keys[d][0], q, s[n][0]);
        s[n][1] = fma((Vec)keys[d][1], q, s[n][1]);
      }
    }
  }

  template <int N>
  void add(const float (*weights)[kKeys], int count, Vec (*sums)[D / kLanes]) const {
    for (int c = 0; c < D / kLanes; c += 2) {
      Vec s[N][2];
      for (int n = 0; n < N; ++n) s[n][0] = sums[n][c], s[n][1] = sums[n][c + 1];
      for (int j = 0; j < count; ++j) {
        fetch(next_values + j * D + c * kLanes);
        fetch(next_values + j * D + (c + 1) * kLanes);
        const Vec a = load(values + j * D + c * kLanes), b = load(values + j * D + (c + 1) * kLanes);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
          const Vec w = all(weights[n][j]);
          s[n][0] = fma(w, a, s[n][0]);
          s[n][1] = fma(w, b, s[n][1]);
        }
      }
      for (int n = 0; n < N; ++n) sums[n][c] = s[n][0], sums[n][c + 1] = s[n][1];
    }
  }

  static void keep(float* weights, Vec x, Vec y) {
    store(weights, x);
    store(weights + kLanes, y);
  }

  static void write(const Vec* sums, Vec by, float* out) {
    for (int c = 0; c < D / kLanes; ++c) store(out + c * kLanes, sums[c] * by);
  }
};

#endif

// x / sqrt(mean(x²) + eps) · weight
void norm_row(const Number* x, const Number* weight, Number* out, int64_t size, float eps) {
  Vec squares = all(0);
  for (int64_t i = 0; i < size; i += kLanes) {
    const Vec v = load(x + i, first_lanes(size - i));
    squares = fma(v, v, squares);
  }
  const Vec by = all(1.0f / std::sqrt(sum(squares) / size + eps));
  for (int64_t i = 0; i < size; i += kLanes) {
    const Lanes lanes = first_lanes(size - i);
    store(out + i, load(x + i, lanes) * by * load(weight + i, lanes), lanes);
  }
}

// Rotary positions on one head in place, first half against second half; cosine [dim], sine [dim / 2].
template <int D>
void rotate(Number* x, const Number* cos, const Number* sin) {
  for (int i = 0; i < D / 2; i += kLanes) {
    const Vec a = load(x + i), b = load(x + D / 2 + i), s = load(sin + i);
    store(x + i, fma(-b, s, a * load(cos + i)));
    store(x + D / 2 + i, fma(a, s, b * load(cos + D / 2 + i)));
  }
}

// Calls f(number of queries, first query) with N queries at a time, and with the remaining ones.
template <int N, class F>
void together(int q, int end, F&& f) {
  for (; q + N <= end; q += N) f(std::integral_constant<int, N>(), q);
  if constexpr (N > 1)
    if (q < end) together<N - 1>(q, end, f);
}

// Queries that share keys, with their attention so far: a softmax that is continued from block to block.
template <int D>
struct Tile {
  alignas(64) Vec sums[kQueries][D / kLanes];
  alignas(64) Number weights[kQueries][kKeys];
  float peak[kQueries], total[kQueries];  // largest score (in powers of 2), sum of 2^(score - peak)
  const Number* query[kQueries];
  int first[kQueries], stop[kQueries];    // keys of the current span that each query sees
  int count = 0;

  void add(const Number* q) {
    for (auto& one : sums[count]) one = all(0);
    peak[count] = -INFINITY;
    total[count] = 0;
    query[count++] = q;
  }

  void weigh(int q, const Vec s[2], int start, float scale) {
    const int from = std::max(first[q] - start, 0), to = std::min(stop[q] - start, kKeys);
    if (to <= from) {  // all weights 0, and no -inf - -inf
      std::memset(weights[q], 0, sizeof weights[q]);
      return;
    }
    const Lanes low = lanes_of(from, to), high = lanes_of(from - kLanes, to - kLanes);
    const Vec never = all(-INFINITY), by = all(scale);
    const Vec a = pick(low, s[0] * by, never), b = pick(high, s[1] * by, never);
    const float top = std::max(peak[q], largest(larger(a, b)));
    const Vec tops = all(top), none = all(0);
    const Vec x = pick(low, exp2(a - tops), none), y = pick(high, exp2(b - tops), none);
    if (top != peak[q]) {
      const float shrink = std::exp2f(peak[q] - top);
      total[q] *= shrink;
      for (auto& one : sums[q]) one = one * all(shrink);
      peak[q] = top;
    }
    total[q] += sum(x + y);
    Block<D>::keep(weights[q], x, y);
  }

  // Queries [q, end) attend to the keys of one row; `first` and `stop` say which ones.
  void attend(const Number* k, const Number* v, int q, int end, float scale) {
    const int begin = *std::min_element(first + q, first + end) / kKeys * kKeys;  // blocks of a row begin at the same keys always
    const int last = *std::max_element(stop + q, stop + end);
    Block<D> block;
    for (int start = begin; start < last; start += kKeys) {
      const int keys = std::min(kKeys, last - start);
      block.read(k + (int64_t)start * D, v + (int64_t)start * D, keys, start + kKeys < last);
      together<4>(q, end, [&](auto size, int i) {
        Vec s[size][2] = {};
        block.template score<size>(query + i, s);
        for (int n = 0; n < size; ++n) weigh(i + n, s[n], start, scale);
      });
      together<Block<D>::kTogether>(q, end, [&](auto size, int i) { block.template add<size>(weights + i, keys, sums + i); });
    }
  }

  void write(int q, Number* out) const { Block<D>::write(sums[q], all(1.0f / total[q]), out); }
};

}  // namespace

extern "C" {

// Tokens in the order of the plan. The tokens of a tile share a prompt, and adjacent tokens may share their own row.
struct Plan {
  int64_t heads, kv_heads, dim, tokens, tiles;
  float scale;
  const int32_t* token;          // its line in `qkv`
  const int32_t* own_slab;
  const int32_t* own_row;
  const int32_t* own_length;     // tokens in its own row, itself included
  const int32_t* prompt_slab;
  const int32_t* prompt_row;
  const int32_t* prompt_length;  // 0: no shared prompt
  const int32_t* tile;           // [tiles + 1] first tokens
  const int64_t* capacity;       // of each slab
};

// The tensors of one layer. Without a table of cosines there is no rotation, without norms no norm of queries and keys.
struct Layer {
  Number* qkv;                // [T, heads + 2 · kv_heads, dim]; queries and keys are overwritten
  Number* out;                // [T, heads · dim]
  const int64_t* keys;      // address of each slab's keys [rows, kv_heads, capacity, dim], and of its values
  const int64_t* values;
  const int64_t* position;  // [T]
  const Number* cos;
  const Number* sin;
  const Number* query_norm;
  const Number* key_norm;
  float eps;
  int64_t window;           // 0: every token before
};

}  // extern "C"

namespace {

template <int D>
void attend_all(const Plan& p, const Layer& layer, int threads) {
  const int64_t width = p.heads + 2 * p.kv_heads, group = p.heads / p.kv_heads;
  const float scale = p.scale * kLog2E;
  const auto place = [&](const int64_t* bases, int slab, int64_t row, int64_t head) {
    return reinterpret_cast<Number*>(bases[slab]) + (row * p.kv_heads + head) * p.capacity[slab] * D;
  };
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < p.tokens; ++i) {
      const int64_t t = p.token[i], position = layer.position[t];
      Number* heads = layer.qkv + t * width * D;
      for (int64_t h = 0; h < p.heads + p.kv_heads; ++h) {
        const Number* norm = h < p.heads ? layer.query_norm : layer.key_norm;
        if (norm) norm_row(heads + h * D, norm, heads + h * D, D, layer.eps);
        if (layer.cos) rotate<D>(heads + h * D, layer.cos + position * D, layer.sin + position * (D / 2));
      }
      for (int64_t h = 0; h < p.kv_heads; ++h) {
        const int64_t at = (p.own_length[i] - 1) * D;
        std::memcpy(place(layer.keys, p.own_slab[i], p.own_row[i], h) + at, heads + (p.heads + h) * D, D * sizeof(Number));
        std::memcpy(place(layer.values, p.own_slab[i], p.own_row[i], h) + at, heads + (p.heads + p.kv_heads + h) * D, D * sizeof(Number));
      }
    }  // all keys are stored before any query reads them
#pragma omp for schedule(dynamic, p.tiles >= 8 * threads ? p.kv_heads : 1)  // the heads of a row are neighbours in memory
    for (int64_t unit = 0; unit < p.tiles * p.kv_heads; ++unit) {
      const int64_t head = unit % p.kv_heads;
      const int begin = p.tile[unit / p.kv_heads], end = p.tile[unit / p.kv_heads + 1];
      Tile<D> tile;
      for (int i = begin; i < end; ++i)
        for (int64_t g = 0; g < group; ++g) tile.add(layer.qkv + (p.token[i] * width + head * group + g) * D);
      // Lets the queries of tokens [from, to) see the first `length` keys of a span that `before` other keys precede.
      const auto see = [&](int from, int to, const auto& length, const auto& before) {
        for (int i = from; i < to; ++i)
          for (int64_t g = 0; g < group; ++g) {
            const int64_t q = (i - begin) * group + g, all = p.prompt_length[i] + p.own_length[i];
            const int64_t oldest = layer.window ? std::max<int64_t>(all - layer.window, 0) : 0;
            tile.stop[q] = length(i);
            tile.first[q] = std::min<int64_t>(std::max<int64_t>(oldest - before(i), 0), tile.stop[q]);
          }
      };
      if (p.prompt_length[begin]) {
        see(begin, end, [&](int i) { return p.prompt_length[i]; }, [](int) { return 0; });
        const int slab = p.prompt_slab[begin], row = p.prompt_row[begin];
        tile.attend(place(layer.keys, slab, row, head), place(layer.values, slab, row, head), 0, tile.count, scale);
      }
      see(begin, end, [&](int i) { return p.own_length[i]; }, [&](int i) { return p.prompt_length[i]; });
      for (int i = begin, next; i < end; i = next) {
        const int slab = p.own_slab[i], row = p.own_row[i];
        for (next = i + 1; next < end && p.own_slab[next] == slab && p.own_row[next] == row;) ++next;
        tile.attend(place(layer.keys, slab, row, head), place(layer.values, slab, row, head), (i - begin) * group, (next - begin) * group, scale);
      }
      for (int q = 0; q < tile.count; ++q)
        tile.write(q, layer.out + (p.token[begin + q / group] * p.heads + head * group + q % group) * D);
    }
  }
}

// Returns the token at which the cumulative sum of 2^((logit - highest) · scale) passes the share u of the total. Tokens `banned`
// are not drawn; the log-probability is that of the whole distribution.
void draw_row(const Number* logits, int64_t size, float temperature, double u, bool greedy, const int64_t* banned, int64_t bans,
              int64_t* token, float* logprob) {
  const Vec never = all(-INFINITY);
  const auto top_of = [&](int64_t start, int64_t stop) {
    Vec tops = never;
    for (int64_t i = start; i < stop; i += kLanes)
      tops = larger(pick(first_lanes(stop - i), load(logits + i, first_lanes(stop - i)), never), tops);
    return largest(tops);
  };
  const auto value = [&](int64_t i) { return load(logits + i, first_lanes(1))[0]; };
  const auto allowed = [&](int64_t i) { return std::find(banned, banned + bans, i) == banned + bans; };
  const float top = top_of(0, size), by = kLog2E / temperature;
  float drawn_top = top;  // highest allowed logit: relative to a much higher banned one, all allowed weights would be 0
  if (std::any_of(banned, banned + bans, [&](int64_t t) { return value(t) == top; })) {
    drawn_top = -INFINITY;
    for (int64_t i = 0; i < size; ++i)
      if (value(i) > drawn_top && allowed(i)) drawn_top = value(i);
    if (drawn_top == -INFINITY) drawn_top = top;
  }
  const auto weights = [&](int64_t i, float most) {
    const Lanes lanes = first_lanes(size - i);
    return pick(lanes, exp2((load(logits + i, lanes) - all(most)) * all(by)), all(0));
  };
  float each[kBlock];  // weights of one block
  const auto fill = [&](int64_t start) {
    double sum = 0;
    const int64_t stop = std::min(start + kBlock, size);
    for (int64_t i = start; i < stop; i += kLanes) store(each + (i - start), weights(i, drawn_top));
    for (int64_t i = 0; i < bans; ++i)
      if (banned[i] >= start && banned[i] < stop) each[banned[i] - start] = 0;
    for (int64_t i = start; i < stop; ++i) sum += each[i - start];
    return sum;
  };
  thread_local std::vector<double> sums;  // cumulative weights of the allowed tokens, block by block
  sums.clear();
  double every = 0, whole = 0;
  for (int64_t block = 0; block < size; block += kBlock) {
    const auto total_of = [&](float most) {
      Vec part = all(0);
      for (int64_t i = block; i < std::min(block + kBlock, size); i += kLanes) part = part + weights(i, most);
      return sum(part);
    };
    const double total = total_of(top);
    const bool cut = std::any_of(banned, banned + bans, [&](int64_t t) { return t >= block && t < block + kBlock; });
    every += total;
    sums.push_back(whole += cut ? fill(block) : drawn_top == top ? total : total_of(drawn_top));
  }
  // Never beyond the last entry that has a probability, however sums are rounded.
  const auto inside = [](double target, double last) { return std::min(std::max(target, 0.0), std::nextafter(last, 0.0)); };
  double target = inside(u * whole, whole);
  const int64_t block = std::upper_bound(sums.begin(), sums.end(), target) - sums.begin();
  const int64_t start = std::min<int64_t>(block, sums.size() - 1) * kBlock, stop = std::min(start + kBlock, size);
  target = inside(target - (start ? sums[start / kBlock - 1] : 0.0), fill(start));
  int64_t found = start;
  for (double so_far = each[0]; so_far <= target && found + 1 < stop;) so_far += each[++found - start];
  if (greedy) {
    found = -1;
    for (int64_t block = 0; block < size; block += kBlock) {
      const int64_t end = std::min(block + kBlock, size);
      if (found >= 0 && top_of(block, end) <= value(found)) continue;
      for (int64_t i = block; i < end; ++i)
        if ((found < 0 || value(i) > value(found)) && allowed(i)) found = i;
    }
    found = std::max<int64_t>(found, 0);
  }
  *token = found;
  *logprob = static_cast<float>((value(found) - top) / temperature - std::log(every));
}

}  // namespace

extern "C" {

// 0, or 1 for a head dimension that was not compiled.
int attend(const Plan* plan, const Layer* layer, int threads) {
  switch (plan->dim) {
    case 32: attend_all<32>(*plan, *layer, threads); return 0;
    case 64: attend_all<64>(*plan, *layer, threads); return 0;
    case 96: attend_all<96>(*plan, *layer, threads); return 0;
    case 128: attend_all<128>(*plan, *layer, threads); return 0;
    case 256: attend_all<256>(*plan, *layer, threads); return 0;
    default: return 1;
  }
}

void rms_norm(const Number* x, const Number* weight, Number* out, int64_t rows, int64_t size, float eps, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < rows; ++i) norm_row(x + i * size, weight, out + i * size, size, eps);
}

// silu(gate) · up of [rows, 2 · size]
void silu_gate(const Number* both, Number* out, int64_t rows, int64_t size, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t i = 0; i < size; i += kLanes) {
      const Lanes lanes = first_lanes(size - i);
      const Vec gate = load(both + row * 2 * size + i, lanes), up = load(both + row * 2 * size + size + i, lanes);
      store(out + row * size + i, gate / (all(1) + exp2(gate * all(-kLog2E))) * up, lanes);
    }
}

// Row i may not draw banned[bans[i]] … banned[bans[i + 1] - 1].
void draw(const Number* logits, const float* temperatures, const double* uniforms, const uint8_t* greedy, const int64_t* banned,
          const int64_t* bans, int64_t* tokens, float* logprobs, int64_t rows, int64_t size, int threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic)
  for (int64_t i = 0; i < rows; ++i)
    draw_row(logits + i * size, size, temperatures[i], uniforms[i], greedy && greedy[i], bans ? banned + bans[i] : nullptr,
             bans ? bans[i + 1] - bans[i] : 0, tokens + i, logprobs + i);
}

}  // extern "C"
