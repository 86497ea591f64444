// Kernels of the embedded engine for CPUs with AVX-512 and bfloat16 dot products; `kernels.py` builds and calls them.
//
// Everything but the matrix products of a layer: norms, the gate, rotation and attention over the cache, and the draw. Numbers
// are stored as bfloat16 and computed in float32. Every output number is computed by one thread in one order, which depends on
// nothing but its own row: what a sequence gets is the same to the bit whatever runs beside it.

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

using bf16 = uint16_t;

namespace {

constexpr float kLog2E = 1.44269504088896341f;
constexpr int kKeys = 32;     // keys that are scored at once: two registers of one key a lane
constexpr int kQueries = 48;  // most queries (tokens · heads of a group) that share a pass over keys
constexpr int kBlock = 256;   // tokens of the vocabulary whose probabilities are summed first

inline __m512 widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
inline __m512 load(const bf16* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline __m512 load(const bf16* p, __mmask16 lanes) { return widen(_mm256_maskz_loadu_epi16(lanes, p)); }
inline void store(bf16* p, __m512 x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(x)); }
inline void store(bf16* p, __m512 x, __mmask16 lanes) { _mm256_mask_storeu_epi16(p, lanes, (__m256i)_mm512_cvtneps_pbh(x)); }
inline __mmask16 first_lanes(int64_t count) { return count >= 16 ? 0xffff : static_cast<__mmask16>((1u << count) - 1); }
inline __m512 dot(__m512 sum, __m512i a, __m512i b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }

// 2^x with a relative error of 1e-7; 0 and infinity far out.
inline __m512 exp2(__m512 x) {
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 rest = _mm512_sub_ps(x, whole);
  __m512 y = _mm512_set1_ps(1.5252733804e-5f);
  for (const float c : {1.5403530393e-4f, 1.3333558146e-3f, 9.6181291076e-3f, 5.5504108665e-2f, 2.4022650696e-1f, 6.9314718056e-1f, 1.0f})
    y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(c));
  return _mm512_scalef_ps(y, whole);
}

// x / sqrt(mean(x²) + eps) · weight
void norm_row(const bf16* x, const bf16* weight, bf16* out, int64_t size, float eps) {
  __m512 squares = _mm512_setzero_ps();
  for (int64_t i = 0; i < size; i += 16) {
    const __m512 v = load(x + i, first_lanes(size - i));
    squares = _mm512_fmadd_ps(v, v, squares);
  }
  const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / size + eps));
  for (int64_t i = 0; i < size; i += 16) {
    const __mmask16 lanes = first_lanes(size - i);
    store(out + i, _mm512_mul_ps(_mm512_mul_ps(load(x + i, lanes), scale), load(weight + i, lanes)), lanes);
  }
}

// Rotary positions on one head in place, first half against second half; cosine [dim], sine [dim / 2].
template <int D>
void rotate(bf16* x, const bf16* cos, const bf16* sin) {
  for (int i = 0; i < D / 2; i += 16) {
    const __m512 a = load(x + i), b = load(x + D / 2 + i), s = load(sin + i);
    store(x + i, _mm512_fnmadd_ps(b, s, _mm512_mul_ps(a, load(cos + i))));
    store(x + D / 2 + i, _mm512_fmadd_ps(a, s, _mm512_mul_ps(b, load(cos + D / 2 + i))));
  }
}

// 16 × 16 numbers of 32 bits, rows to columns: pairs, quadruples, then 128-bit lanes twice.
inline void transpose(__m512i r[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    t[j] = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88);
    t[4 + j] = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88);
    t[8 + j] = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xdd);
    t[12 + j] = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xdd);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    r[j] = _mm512_shuffle_i32x4(t[j], t[4 + j], 0x88);
    r[8 + j] = _mm512_shuffle_i32x4(t[j], t[4 + j], 0xdd);
    r[4 + j] = _mm512_shuffle_i32x4(t[8 + j], t[12 + j], 0x88);
    r[12 + j] = _mm512_shuffle_i32x4(t[8 + j], t[12 + j], 0xdd);
  }
}

// Up to 32 keys and values, laid out for dot products of pairs; what is beyond the last key is 0.
template <int D>
struct Block {
  __m512i keys[D / 2][2];           // dimensions 2r and 2r + 1 of one key in each lane
  __m512i values[kKeys / 2][D / 16];  // keys 2j and 2j + 1 of one dimension in each lane, dimensions in `unpack`'s order

  void read(const bf16* k, const bf16* v, int count) {
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
};

// Queries that share keys, with what they have attended to so far: a softmax that is continued from block to block.
template <int D>
struct Tile {
  alignas(64) __m512 sums[kQueries][D / 16];
  alignas(64) bf16 weights[kQueries][kKeys];
  float peak[kQueries], total[kQueries];  // largest score (in powers of 2), sum of 2^(score - peak)
  const int32_t* query[kQueries];         // dimensions in pairs
  int first[kQueries], stop[kQueries];    // keys of the current span that each query sees
  int count = 0;

  void add(const bf16* q) {
    for (auto& sum : sums[count]) sum = _mm512_setzero_ps();
    peak[count] = -INFINITY;
    total[count] = 0;
    query[count++] = reinterpret_cast<const int32_t*>(q);
  }

  template <int N>
  void score(const Block<D>& block, int q, int start, float scale) {
    __m512 s[N][2];
    for (int n = 0; n < N; ++n) s[n][0] = s[n][1] = _mm512_setzero_ps();
    for (int r = 0; r < D / 2; ++r)
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        const __m512i pair = _mm512_set1_epi32(query[q + n][r]);
        s[n][0] = dot(s[n][0], block.keys[r][0], pair);
        s[n][1] = dot(s[n][1], block.keys[r][1], pair);
      }
    for (int n = 0; n < N; ++n) weigh(q + n, s[n], start, scale);
  }

  void weigh(int q, const __m512 s[2], int start, float scale) {
    const int from = std::max(first[q] - start, 0), to = std::min(stop[q] - start, kKeys);
    const uint32_t seen = to <= from ? 0 : static_cast<uint32_t>((((uint64_t)1 << to) - 1) & ~(((uint64_t)1 << from) - 1));
    if (!seen) {  // all weights 0, and no -inf - -inf
      std::memset(weights[q], 0, sizeof weights[q]);
      return;
    }
    const __mmask16 low = seen & 0xffff, high = seen >> 16;
    const __m512 never = _mm512_set1_ps(-INFINITY), by = _mm512_set1_ps(scale);
    const __m512 a = _mm512_mask_mul_ps(never, low, s[0], by), b = _mm512_mask_mul_ps(never, high, s[1], by);
    const float top = std::max(peak[q], _mm512_reduce_max_ps(_mm512_max_ps(a, b)));
    const __m512 tops = _mm512_set1_ps(top);
    const __m512 x = _mm512_maskz_mov_ps(low, exp2(_mm512_sub_ps(a, tops)));
    const __m512 y = _mm512_maskz_mov_ps(high, exp2(_mm512_sub_ps(b, tops)));
    if (top != peak[q]) {
      const float shrink = std::exp2f(peak[q] - top);
      total[q] *= shrink;
      for (auto& sum : sums[q]) sum = _mm512_mul_ps(sum, _mm512_set1_ps(shrink));
      peak[q] = top;
    }
    total[q] += _mm512_reduce_add_ps(_mm512_add_ps(x, y));
    _mm512_store_si512(weights[q], (__m512i)_mm512_cvtne2ps_pbh(y, x));
  }

  template <int N>
  void accumulate(const Block<D>& block, int q, int pairs) {
    __m512 s[N][D / 16];
    for (int n = 0; n < N; ++n)
      for (int c = 0; c < D / 16; ++c) s[n][c] = sums[q + n][c];
    for (int j = 0; j < pairs; ++j)
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        int32_t both;
        std::memcpy(&both, &weights[q + n][2 * j], sizeof both);
        const __m512i pair = _mm512_set1_epi32(both);
#pragma GCC unroll 16
        for (int c = 0; c < D / 16; ++c) s[n][c] = dot(s[n][c], block.values[j][c], pair);
      }
    for (int n = 0; n < N; ++n)
      for (int c = 0; c < D / 16; ++c) sums[q + n][c] = s[n][c];
  }

  // Queries [q, end) attend to the keys of one row; `first` and `stop` say which ones.
  void attend(const bf16* k, const bf16* v, int q, int end, float scale) {
    constexpr int kTogether = D <= 64 ? 4 : D <= 128 ? 2 : 1;  // as many sums as there are registers
    const int begin = *std::min_element(first + q, first + end) / kKeys * kKeys;  // blocks of a row begin at the same keys always
    const int last = *std::max_element(stop + q, stop + end);
    Block<D> block;
    for (int start = begin; start < last; start += kKeys) {
      const int count = std::min(kKeys, last - start);
      block.read(k + (int64_t)start * D, v + (int64_t)start * D, count);
      int i = q;
      for (; i + 4 <= end; i += 4) score<4>(block, i, start, scale);
      if (end - i == 3) score<3>(block, i, start, scale);
      if (end - i == 2) score<2>(block, i, start, scale);
      if (end - i == 1) score<1>(block, i, start, scale);
      for (i = q; i + kTogether <= end; i += kTogether) accumulate<kTogether>(block, i, (count + 1) / 2);
      for (; i < end; ++i) accumulate<1>(block, i, (count + 1) / 2);
    }
  }

  void write(int q, bf16* out) const {
    const __m512 by = _mm512_set1_ps(1.0f / total[q]);
    for (int c = 0; c < D / 32; ++c) {  // undoes the order that `unpack` made within 128 bits
      const __m512 a = _mm512_mul_ps(sums[q][2 * c], by), b = _mm512_mul_ps(sums[q][2 * c + 1], by);
      const __m512 low = _mm512_shuffle_f32x4(a, b, 0x44), high = _mm512_shuffle_f32x4(a, b, 0xee);
      store(out + 32 * c, _mm512_shuffle_f32x4(low, low, 0xd8));
      store(out + 32 * c + 16, _mm512_shuffle_f32x4(high, high, 0xd8));
    }
  }
};

}  // namespace

extern "C" {

// Tokens in the order of the plan; those of a tile share the prompt before them, and neighbours may share their own row.
struct Plan {
  int64_t heads, kv_heads, dim, tokens, tiles;
  float scale;
  const int32_t* token;          // its line in `qkv`
  const int32_t* own_slab;
  const int32_t* own_row;
  const int32_t* own_length;     // tokens in its own row, itself included
  const int32_t* prompt_slab;
  const int32_t* prompt_row;
  const int32_t* prompt_length;  // 0: no prompt that it shares
  const int32_t* tile;           // [tiles + 1] first tokens
  const int64_t* capacity;       // of each slab
};

// What differs from layer to layer. A missing table of cosines: no rotation; a missing norm: none of queries and keys.
struct Layer {
  bf16* qkv;                // [T, heads + 2 · kv_heads, dim]; queries and keys are overwritten
  bf16* out;                // [T, heads · dim]
  const int64_t* keys;      // address of each slab's keys [rows, kv_heads, capacity, dim], and of its values
  const int64_t* values;
  const int64_t* position;  // [T]
  const bf16* cos;
  const bf16* sin;
  const bf16* query_norm;
  const bf16* key_norm;
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
    return reinterpret_cast<bf16*>(bases[slab]) + (row * p.kv_heads + head) * p.capacity[slab] * D;
  };
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < p.tokens; ++i) {
      const int64_t t = p.token[i], position = layer.position[t];
      bf16* heads = layer.qkv + t * width * D;
      for (int64_t h = 0; h < p.heads + p.kv_heads; ++h) {
        const bf16* norm = h < p.heads ? layer.query_norm : layer.key_norm;
        if (norm) norm_row(heads + h * D, norm, heads + h * D, D, layer.eps);
        if (layer.cos) rotate<D>(heads + h * D, layer.cos + position * D, layer.sin + position * (D / 2));
      }
      for (int64_t h = 0; h < p.kv_heads; ++h) {
        const int64_t at = (p.own_length[i] - 1) * D;
        std::memcpy(place(layer.keys, p.own_slab[i], p.own_row[i], h) + at, heads + (p.heads + h) * D, D * sizeof(bf16));
        std::memcpy(place(layer.values, p.own_slab[i], p.own_row[i], h) + at, heads + (p.heads + p.kv_heads + h) * D, D * sizeof(bf16));
      }
    }  // all keys are there before any query looks at them
#pragma omp for schedule(dynamic)
    for (int64_t unit = 0; unit < p.tiles * p.kv_heads; ++unit) {
      const int64_t head = unit % p.kv_heads;
      const int begin = p.tile[unit / p.kv_heads], end = p.tile[unit / p.kv_heads + 1];
      Tile<D> tile;
      for (int i = begin; i < end; ++i)
        for (int64_t g = 0; g < group; ++g) tile.add(layer.qkv + (p.token[i] * width + head * group + g) * D);
      // Queries [q, to) of tokens [from, to) see so many keys of a span that `before` others precede.
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

// The token at which the cumulative sum of 2^((logit - top) · scale) passes u of the whole. Tokens `banned` cannot be drawn; the
// log-probability is that of the whole distribution.
void draw_row(const bf16* logits, int64_t size, float temperature, double u, bool greedy, const int64_t* banned, int64_t bans,
              int64_t* token, float* logprob) {
  __m512 tops = _mm512_set1_ps(-INFINITY);
  const __m512 never = tops;
  for (int64_t i = 0; i < size; i += 16)
    tops = _mm512_max_ps(_mm512_mask_mov_ps(never, first_lanes(size - i), load(logits + i, first_lanes(size - i))), tops);
  const float top = _mm512_reduce_max_ps(tops), scale = kLog2E / temperature;
  const auto weights = [&](int64_t i) {
    const __mmask16 lanes = first_lanes(size - i);
    const __m512 x = _mm512_mul_ps(_mm512_sub_ps(load(logits + i, lanes), _mm512_set1_ps(top)), _mm512_set1_ps(scale));
    return _mm512_maskz_mov_ps(lanes, exp2(x));
  };
  float each[kBlock];  // weights of one block
  const auto fill = [&](int64_t start) {
    double sum = 0;
    const int64_t stop = std::min(start + kBlock, size);
    for (int64_t i = start; i < stop; i += 16) _mm512_storeu_ps(each + (i - start), weights(i));
    for (int64_t i = 0; i < bans; ++i)
      if (banned[i] >= start && banned[i] < stop) each[banned[i] - start] = 0;
    for (int64_t i = start; i < stop; ++i) sum += each[i - start];
    return sum;
  };
  thread_local std::vector<double> sums;  // cumulative, block by block, of those that may be drawn
  sums.clear();
  double all = 0, whole = 0;
  for (int64_t block = 0; block < size; block += kBlock) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = block; i < std::min(block + kBlock, size); i += 16) sum = _mm512_add_ps(sum, weights(i));
    const double total = _mm512_reduce_add_ps(sum);
    const bool cut = std::any_of(banned, banned + bans, [&](int64_t t) { return t >= block && t < block + kBlock; });
    all += total;
    sums.push_back(whole += cut ? fill(block) : total);
  }
  // Never beyond the last entry that has a probability, however sums are rounded.
  const auto inside = [](double target, double last) { return std::min(std::max(target, 0.0), std::nextafter(last, 0.0)); };
  double target = inside(u * whole, whole);
  const int64_t block = std::upper_bound(sums.begin(), sums.end(), target) - sums.begin();
  const int64_t start = std::min<int64_t>(block, sums.size() - 1) * kBlock, stop = std::min(start + kBlock, size);
  const double sum = fill(start);
  target = inside(target - (start ? sums[start / kBlock - 1] : 0.0), sum);
  int64_t found = start;
  for (double so_far = each[0]; so_far <= target && found + 1 < stop;) so_far += each[++found - start];
  const auto value = [&](int64_t i) { return _mm512_cvtss_f32(load(logits + i, 1)); };
  if (greedy) {
    found = -1;
    for (int64_t i = 0; i < size; ++i)
      if ((found < 0 || value(i) > value(found)) && std::find(banned, banned + bans, i) == banned + bans) found = i;
    found = std::max<int64_t>(found, 0);
  }
  *token = found;
  *logprob = static_cast<float>((value(found) - top) / temperature - std::log(all));
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

void rms_norm(const bf16* x, const bf16* weight, bf16* out, int64_t rows, int64_t size, float eps, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < rows; ++i) norm_row(x + i * size, weight, out + i * size, size, eps);
}

// silu(gate) · up of [rows, 2 · size]
void silu_gate(const bf16* both, bf16* out, int64_t rows, int64_t size, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t i = 0; i < size; i += 16) {
      const __mmask16 lanes = first_lanes(size - i);
      const __m512 gate = load(both + row * 2 * size + i, lanes), up = load(both + row * 2 * size + size + i, lanes);
      const __m512 below = _mm512_add_ps(_mm512_set1_ps(1.0f), exp2(_mm512_mul_ps(gate, _mm512_set1_ps(-kLog2E))));
      store(out + row * size + i, _mm512_mul_ps(_mm512_div_ps(gate, below), up), lanes);
    }
}

// Row i may not draw banned[bans[i]] … banned[bans[i + 1] - 1].
void draw(const bf16* logits, const float* temperatures, const double* uniforms, const uint8_t* greedy, const int64_t* banned,
          const int64_t* bans, int64_t* tokens, float* logprobs, int64_t rows, int64_t size, int threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic)
  for (int64_t i = 0; i < rows; ++i)
    draw_row(logits + i * size, size, temperatures[i], uniforms[i], greedy && greedy[i], bans ? banned + bans[i] : nullptr,
             bans ? bans[i + 1] - bans[i] : 0, tokens + i, logprobs + i);
}

}  // extern "C"
