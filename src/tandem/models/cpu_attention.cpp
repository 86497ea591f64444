// Attention of packed sequences in training, forward and backward; `cpu_attention.py` builds and calls it.
//
// A tile of queries, one per lane, is multiplied with one block of keys at a time. The softmax of a query is updated from
// block to block (FlashAttention-2, arXiv:2307.08691), so the whole matrix of scores never exists. Blocks that are masked for
// a whole tile are skipped. One thread computes one head of all sequences that share a prompt, so the order of every sum does
// not depend on the number of threads.

#include <omp.h>

#include <cstdlib>
#include <memory>
#include <utility>
#include <vector>

#include "simd.h"

namespace {

constexpr int kPair = 4 / sizeof(Number);    // numbers in a 32-bit word; `dot` sums their products
constexpr int kQueries = 2 * kLanes;         // queries of a tile
constexpr int kKeys = 32;                    // keys of a block
constexpr int kQueryWords = kQueries / kPair;
constexpr int kKeyWords = kKeys / kPair;
constexpr int kColumns = kLanes == 16 ? 4 : 2;  // neighbouring registers in one product
constexpr float kHidden = -3e38f;            // score of a masked key: its `exp2` is 0; finite, to avoid -inf - -inf

#ifdef BFLOAT16

// Interleaves two rows into words (a[i], b[i]).
inline Bits pair(const Number* a, const Number* b) {
  const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(a)));
  const __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(b)));
  return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}
inline Bits pair(Vec a, Vec b) {
  const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(a));
  const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(b));
  return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

#else

inline Vec dot(Vec sum, Bits a, Bits b) { return fma((Vec)a, (Vec)b, sum); }
inline Bits pair(const Number* a, const Number*) { return load_bits(a); }
inline Bits pair(Vec a, Vec) { return (Bits)a; }

#endif

#ifdef __AVX512F__
inline Bits all_words(int32_t x) { return _mm512_set1_epi32(x); }
inline void store_bits(Bits* p, Bits x) { _mm512_storeu_si512(p, x); }
#else
inline Bits all_words(int32_t x) { return _mm256_set1_epi32(x); }
inline void store_bits(Bits* p, Bits x) { _mm256_storeu_si256(p, x); }
#endif

// Rows of numbers in memory; rows from `count` on read as zeros.
struct Rows {
  const Number* start;
  int64_t stride;
  int count;

  const Number* operator[](int i) const {
    static const Number zeros[512] = {};
    return i < count ? start + i * stride : zeros;
  }
};

// c [M, N registers] (+)= a [M, words] · b [words, N registers]
template <int N, int M>
inline void multiply(const int32_t* a, int64_t a_stride, const Bits* b, int64_t b_stride, float* c, int64_t c_stride, int words, bool add) {
  Vec s[M][N];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) s[m][n] = add ? load(c + m * c_stride + n * kLanes) : all(0);
  for (int w = 0; w < words; ++w) {
    Bits x[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) x[n] = load_bits(b + w * b_stride + n);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const Bits y = all_words(a[m * a_stride + w]);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) s[m][n] = dot(s[m][n], x[n], y);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) store(c + m * c_stride + n * kLanes, s[m][n]);
}

template <int N, int M>
inline void multiply_rows(int from, int count, const int32_t* a, int64_t a_stride, const Bits* b, int64_t b_stride, float* c,
                          int64_t c_stride, int words, bool add) {
  for (; from + M <= count; from += M) multiply<N, M>(a + from * a_stride, a_stride, b, b_stride, c + from * c_stride, c_stride, words, add);
  if constexpr (M > 1)
    if (from < count) multiply_rows<N, M / 2>(from, count, a, a_stride, b, b_stride, c, c_stride, words, add);
}

// The same for `count` rows and `columns` registers. Strides of a in words, of b in registers, of c in floats.
void product(int count, int columns, const void* a, int64_t a_stride, const Bits* b, int64_t b_stride, float* c, int64_t c_stride, int words,
             bool add) {
  constexpr int kRows = kLanes == 16 ? 8 : 4;
  const int32_t* given = static_cast<const int32_t*>(a);
  int n = 0;
  if constexpr (kColumns == 4)
    for (; n + 4 <= columns; n += 4)
      multiply_rows<4, kRows / 2>(0, count, given, a_stride, b + n, b_stride, c + n * kLanes, c_stride, words, add);
  for (; n + 2 <= columns; n += 2) multiply_rows<2, kRows>(0, count, given, a_stride, b + n, b_stride, c + n * kLanes, c_stride, words, add);
  for (; n < columns; ++n) multiply_rows<1, kRows>(0, count, given, a_stride, b + n, b_stride, c + n * kLanes, c_stride, words, add);
}

// Transposes queries to [word][query], the layout for products with keys.
void lay_words(const Rows& rows, int dim, Bits* out) {
  for (int half = 0; half < 2; ++half)
    for (int w = 0; w < dim / kPair; w += kLanes) {
      Bits r[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) r[i] = load_bits(rows[half * kLanes + i] + w * kPair);
      transpose(r);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) store_bits(out + (w + i) * 2 + half, r[i]);
    }
}

// Interleaves neighbouring queries to [kQueryWords][dim], the layout for products with weights [keys, queries].
void lay_pairs(const Rows& rows, int dim, Bits* out) {
  for (int w = 0; w < kQueryWords; ++w)
    for (int c = 0; c < dim / kLanes; ++c)
      store_bits(out + w * (dim / kLanes) + c, pair(rows[w * kPair] + c * kLanes, rows[w * kPair + kPair - 1] + c * kLanes));
}

// Transposes the keys (or values) of a block to [dim][kKeys].
void lay_columns(const Rows& rows, int dim, Number* out) {
  for (int w = 0; w < kKeyWords; w += kLanes)
    for (int c = 0; c < dim; c += kLanes) {
      Bits r[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) r[i] = pair(rows[(w + i) * kPair] + c, rows[(w + i) * kPair + kPair - 1] + c);
      transpose(r);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) store_bits(reinterpret_cast<Bits*>(out + (c + i) * kKeys) + w / kLanes, r[i]);
    }
}

// Writes sums [dim][kQueries] as rows of queries, each multiplied by the query's factor in `by`.
void write_rows(const float* sums, const Vec by[2], int dim, Number* out, int64_t stride, int count) {
  for (int half = 0; half < 2; ++half)
    for (int c = 0; c < dim; c += kLanes) {
      Bits r[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) r[i] = (Bits)(load(sums + (c + i) * kQueries + half * kLanes) * by[half]);
      transpose(r);
      for (int i = 0; i < kLanes && half * kLanes + i < count; ++i) store(out + (half * kLanes + i) * stride + c, (Vec)r[i]);
    }
}

// A range of neighbouring keys, and the number of its first block.
struct Span {
  int64_t start, count;
  int first_block;
};

}  // namespace

extern "C" {

// A segment: queries (which belong to the last keys), keys, and the keys of a preceding prompt that segments may share.
struct QueryRange {
  int64_t query, queries, key, keys, prompt, prompt_keys;
};

struct Call {
  int64_t heads, kv_heads, dim, groups, query_tokens, key_tokens;
  int64_t window;  // number of keys to which a query attends, including its own; 0: all preceding keys
  float scale;
  const int64_t* group;    // [groups + 1]: first segment of each group; groups share no keys
  const QueryRange* segment;
  const Number *q, *k, *v;  // [tokens, heads or kv_heads, dim], the last dimension dense
  int64_t q_token, q_head, k_token, k_head, v_token, v_head;  // strides
  Number* out;  // [query_tokens, heads, dim]
  float* peak;  // [heads, query_tokens]: log2 of the sum of 2^score
  // backward only:
  const Number* grad;  // of `out`
  int64_t grad_token, grad_head;
  Number *q_grad, *k_grad, *v_grad;  // dense
  float* sums;                       // [2, heads, key_tokens, dim]: gradients of keys and values per query head
};

}  // extern "C"

namespace {

// Memory of one thread, kept between calls.
template <class T>
class Room {
 public:
  T* of(size_t count) {
    if (count > size_) {
      held_.reset(static_cast<T*>(std::aligned_alloc(64, (count * sizeof(T) + 63) / 64 * 64)));
      size_ = count;
    }
    return held_.get();
  }

 private:
  struct Free {
    void operator()(T* p) const { std::free(p); }
  };
  std::unique_ptr<T, Free> held_;
  size_t size_ = 0;
};

// Computes one head of one group.
class Unit {
 public:
  Unit(const Call& call, int64_t group, int64_t head) : p(call), head(head), kv(head / (call.heads / call.kv_heads)), dim(call.dim) {
    const auto find = [&](int64_t start, int64_t count) {
      for (const Span& span : spans)
        if (span.start == start && span.count == count) return;
      if (!count) return;
      spans.push_back({start, count, blocks});
      blocks += (count + kKeys - 1) / kKeys;
    };
    begin = p.group[group];
    end = p.group[group + 1];
    for (int64_t s = begin; s < end; ++s) {
      find(p.segment[s].prompt, p.segment[s].prompt_keys);
      find(p.segment[s].key, p.segment[s].keys);
    }
  }

  void forward() {
    thread_local Room<Number> columns_room;
    thread_local Room<float> sums_room;
    Number* columns = columns_room.of(static_cast<size_t>(blocks) * dim * kKeys);
    lay_blocks(p.v, p.v_token, p.v_head, columns);
    float* sums = sums_room.of(dim * kQueries);
    each_tile([&](const QueryRange& s, int64_t first, int count) {
      thread_local Room<Bits> words_room;
      Bits* words = words_room.of(dim / kPair * 2);
      lay_words(queries(p.q, p.q_token, p.q_head, s.query + first, count), dim, words);
      Vec peak[2] = {all(kHidden), all(kHidden)}, total[2] = {all(0), all(0)};
      bool fresh = true;
      each_block(s, first, count, [&](const Rows& keys, const Rows&, int block, int64_t, const auto& visible) {
        alignas(64) float scores[kKeys * kQueries];
        alignas(64) Bits weights[kKeyWords * 2];
        product(keys.count, 2, keys.start, keys.stride / kPair, words, 2, scores, kQueries, dim / kPair, false);
        const Vec by = all(p.scale * kLog2E), never = all(kHidden);
        for (int half = 0; half < 2; ++half) {
          Vec top = peak[half];
          for (int j = 0; j < keys.count; ++j) {
            float* at = scores + j * kQueries + half * kLanes;
            const Vec x = pick(visible(j, half), load(at) * by, never);
            store(at, x);
            top = larger(top, x);
          }
          const Vec safe = larger(top, all(-1e30f));  // so that weights are 0 and not 2^0 in a lane with only masked keys
          const Vec shrink = exp2(peak[half] - safe);
          peak[half] = top;
          total[half] = total[half] * shrink;
          if (!fresh)
            for (int d = 0; d < dim; ++d) {
              float* at = sums + d * kQueries + half * kLanes;
              store(at, load(at) * shrink);
            }
          for (int w = 0; w * kPair < keys.count; ++w) {
            Vec x[2] = {all(0), all(0)};
            for (int i = 0; i < kPair && w * kPair + i < keys.count; ++i) {
              x[i] = exp2(load(scores + (w * kPair + i) * kQueries + half * kLanes) - safe);
              total[half] = total[half] + x[i];
            }
            store_bits(weights + w * 2 + half, pair(x[0], x[1]));
          }
        }
        product(dim, 2, columns + static_cast<int64_t>(block) * dim * kKeys, kKeyWords, weights, 2, sums, kQueries, (keys.count + kPair - 1) / kPair, !fresh);
        fresh = false;
      });
      const Vec by[2] = {all(1) / total[0], all(1) / total[1]};
      write_rows(sums, by, dim, p.out + ((s.query + first) * p.heads + head) * dim, p.heads * dim, count);
      for (int i = 0; i < count; ++i)
        p.peak[head * p.query_tokens + s.query + first + i] = peak[i / kLanes][i % kLanes] + std::log2(total[i / kLanes][i % kLanes]);
    });
  }

  void backward() {
    thread_local Room<Number> columns_room;
    thread_local Room<float> sums_room;
    thread_local Room<Bits> layouts;
    Number* columns = columns_room.of(static_cast<size_t>(blocks) * dim * kKeys);
    lay_blocks(p.k, p.k_token, p.k_head, columns);
    float* sums = sums_room.of(dim * kQueries);
    const int per_words = dim / kPair * 2, per_pairs = kQueryWords * (dim / kLanes);
    Bits* q_words = layouts.of(2 * (per_words + per_pairs));
    Bits *grad_words = q_words + per_words, *q_pairs = grad_words + per_words, *grad_pairs = q_pairs + per_pairs;
    float *k_sums = p.sums + head * p.key_tokens * dim, *v_sums = k_sums + p.heads * p.key_tokens * dim;
    for (const Span& span : spans) {
      std::fill_n(k_sums + span.start * dim, span.count * dim, 0.0f);
      std::fill_n(v_sums + span.start * dim, span.count * dim, 0.0f);
    }
    each_tile([&](const QueryRange& s, int64_t first, int count) {
      const int64_t query = s.query + first;
      const Rows q = queries(p.q, p.q_token, p.q_head, query, count), grad = queries(p.grad, p.grad_token, p.grad_head, query, count);
      const Rows out = queries(p.out, p.heads * dim, dim, query, count);
      lay_words(q, dim, q_words);
      lay_words(grad, dim, grad_words);
      lay_pairs(q, dim, q_pairs);
      lay_pairs(grad, dim, grad_pairs);
      alignas(64) float mean[kQueries] = {}, peak[kQueries];  // mean gradient; peak: no weight beyond the last query
      std::fill_n(peak, kQueries, -kHidden);
      for (int i = 0; i < count; ++i) {
        Vec each = all(0);
        for (int c = 0; c < dim; c += kLanes) each = fma(load(out[i] + c), load(grad[i] + c), each);
        mean[i] = sum(each);
        peak[i] = p.peak[head * p.query_tokens + query + i];
      }
      bool fresh = true;
      each_block(s, first, count, [&](const Rows& keys, const Rows& values, int block, int64_t at, const auto& visible) {
        alignas(64) float scores[kKeys * kQueries], slopes[kKeys * kQueries];
        alignas(64) Number weights[kKeys * kQueries], bends[kKeys * kQueries];
        alignas(64) Bits bend_words[kKeyWords * 2];
        product(keys.count, 2, keys.start, keys.stride / kPair, q_words, 2, scores, kQueries, dim / kPair, false);
        product(keys.count, 2, values.start, values.stride / kPair, grad_words, 2, slopes, kQueries, dim / kPair, false);
        const Vec by = all(p.scale * kLog2E), scale = all(p.scale);
        for (int half = 0; half < 2; ++half) {
          const Vec least = load(peak + half * kLanes), middle = load(mean + half * kLanes);
          for (int w = 0; w * kPair < keys.count; ++w) {
            Vec bend[2] = {all(0), all(0)};
            for (int i = 0; i < kPair && w * kPair + i < keys.count; ++i) {
              const int j = w * kPair + i, place = j * kQueries + half * kLanes;
              const Vec weight = pick(visible(j, half), exp2(load(scores + place) * by - least), all(0));
              bend[i] = weight * (load(slopes + place) - middle) * scale;
              store(weights + place, weight);
              store(bends + place, bend[i]);
            }
            store_bits(bend_words + w * 2 + half, pair(bend[0], bend[1]));
          }
        }
        const int wide = dim / kLanes;
        product(keys.count, wide, weights, kQueryWords, grad_pairs, wide, v_sums + at * dim, dim, kQueryWords, true);
        product(keys.count, wide, bends, kQueryWords, q_pairs, wide, k_sums + at * dim, dim, kQueryWords, true);
        product(dim, 2, columns + static_cast<int64_t>(block) * dim * kKeys, kKeyWords, bend_words, 2, sums, kQueries, (keys.count + kPair - 1) / kPair, !fresh);
        fresh = false;
      });
      const Vec by[2] = {all(1), all(1)};
      write_rows(sums, by, dim, p.q_grad + (query * p.heads + head) * dim, p.heads * dim, count);
    });
  }

 private:
  Rows queries(const Number* base, int64_t token, int64_t of_head, int64_t first, int count) const {
    return {base + first * token + head * of_head, token, count};
  }

  Rows keys(const Number* base, int64_t token, int64_t of_head, int64_t first, int count) const {
    return {base + first * token + kv * of_head, token, count};
  }

  void lay_blocks(const Number* base, int64_t token, int64_t of_head, Number* columns) const {
    for (const Span& span : spans)
      for (int64_t i = 0; i < span.count; i += kKeys)
        lay_columns(keys(base, token, of_head, span.start + i, std::min<int64_t>(kKeys, span.count - i)), dim,
                    columns + (span.first_block + i / kKeys) * dim * kKeys);
  }

  // Calls f(segment, first query, number of queries) for each tile.
  template <class F>
  void each_tile(F&& f) const {
    for (int64_t s = begin; s < end; ++s)
      for (int64_t first = 0; first < p.segment[s].queries; first += kQueries)
        f(p.segment[s], first, static_cast<int>(std::min<int64_t>(kQueries, p.segment[s].queries - first)));
  }

  // Calls f(keys, values, number of the block, its first key, function: lanes that attend to key j in a half) for each block
  // that is not masked for the whole tile.
  template <class F>
  void each_block(const QueryRange& s, int64_t first, int count, F&& f) const {
    const int64_t position = s.prompt_keys + s.keys - s.queries + first;  // of the first query
    const int64_t oldest = p.window ? position - p.window + 1 : 0;        // first key to which the first query attends
    const auto walk = [&](int64_t start, int64_t number, int64_t before) {
      if (!number) return;
      int first_block = 0;
      for (const Span& span : spans)
        if (span.start == start && span.count == number) first_block = span.first_block;
      for (int64_t i = 0; i < number && before + i < position + count; i += kKeys) {
        const int here = std::min<int64_t>({kKeys, number - i, position + count - before - i});
        if (before + i + here <= oldest) continue;
        const auto visible = [&](int j, int half) {  // queries from this key to the end of its window
          const int64_t from = before + i + j - position - half * kLanes;
          return lanes_of(from, p.window ? from + p.window : kLanes);
        };
        f(keys(p.k, p.k_token, p.k_head, start + i, here), keys(p.v, p.v_token, p.v_head, start + i, here),
          static_cast<int>(first_block + i / kKeys), start + i, visible);
      }
    };
    walk(s.prompt, s.prompt_keys, 0);
    walk(s.key, s.keys, s.prompt_keys);
  }

  const Call& p;
  const int64_t head, kv;
  const int dim;
  int64_t begin, end;
  int blocks = 0;
  std::vector<Span> spans;
};

}  // namespace

extern "C" {

void attend(const Call* call, int threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic)
  for (int64_t i = 0; i < call->groups * call->heads; ++i) Unit(*call, i / call->heads, i % call->heads).forward();
}

void attend_backward(const Call* call, int threads) {
  const int64_t group = call->heads / call->kv_heads, dim = call->dim;
  std::vector<char> seen(call->key_tokens);  // keys to which no query attends have a gradient of 0 and no sums
  for (const QueryRange* s = call->segment; s != call->segment + call->group[call->groups]; ++s) {
    std::fill_n(seen.begin() + s->prompt, s->prompt_keys, 1);
    std::fill_n(seen.begin() + s->key, s->keys, 1);
  }
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < call->groups * call->heads; ++i) Unit(*call, i / call->heads, i % call->heads).backward();
#pragma omp for schedule(static)
    for (int64_t token = 0; token < call->key_tokens; ++token)
      for (int which = 0; which < 2; ++which)
        for (int64_t h = 0; h < call->kv_heads; ++h)
          for (int64_t c = 0; c < dim; c += kLanes) {
            Vec all_heads = all(0);
            for (int64_t g = 0; g < (seen[token] ? group : 0); ++g)
              all_heads = all_heads + load(call->sums + (((which * call->heads + h * group + g) * call->key_tokens) + token) * dim + c);
            store((which ? call->v_grad : call->k_grad) + (token * call->kv_heads + h) * dim + c, all_heads);
          }
  }
}

}  // extern "C"
