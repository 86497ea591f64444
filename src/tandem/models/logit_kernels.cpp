// Softmax over the vocabulary for training; `logprobs.py` builds and calls it.
//
// Logits [rows, size] are read in their stored dtype and overwritten with their gradient, without a float32 copy. One thread
// computes each row, in a fixed order.

#include <omp.h>

#include "simd.h"

namespace {

constexpr float kLn2 = 0.69314718055994531f;
constexpr int kSums = 4;  // independent sums, because consecutive additions to one sum would wait for each other

// The softmax of a row, kept for the gradient.
struct Facts {
  float top, log_sum, logprob, entropy;  // log p = (z - top) - log_sum, precise for large logits
};

struct Row {
  float scale;  // 1 / temperature
  float cap;    // 0: none
};

// tanh, with an absolute error of 1e-7; NaN stays NaN.
inline Vec tanh(Vec x) { return all(1) - all(2) / (all(1) + exp2(larger(all(-60), x * all(2 * kLog2E)))); }

inline Vec saturation(Vec x, Row row) { return tanh(x * all(1 / row.cap)); }

template <bool kCapped>
inline Vec scaled(Vec x, Row row) {
  if (kCapped) x = saturation(x, row) * all(row.cap);
  return x * all(row.scale);
}

// 2^x; 0 for a logit of -infinity.
inline Vec weight(Vec x) { return exp2(larger(all(-200), x)); }

inline float one(const Number* p) { return load(p, first_lanes(1))[0]; }

template <bool kCapped>
Facts read_row(const Number* logits, int64_t size, int64_t target, Row row, bool entropy) {
  Vec tops[kSums], sums[kSums], means[kSums];
  for (int k = 0; k < kSums; ++k) tops[k] = all(-INFINITY), sums[k] = means[k] = all(0);
  const auto each = [&](auto&& take) {  // calls take(vector, lanes, number of the sum)
    int64_t i = 0;
    for (; i + kSums * kLanes <= size; i += kSums * kLanes)
#pragma GCC unroll 4
      for (int k = 0; k < kSums; ++k) take(load(logits + i + k * kLanes), first_lanes(kLanes), k);
    for (; i < size; i += kLanes) take(load(logits + i, first_lanes(size - i)), first_lanes(size - i), 0);
  };
  each([&](Vec x, Lanes lanes, int k) { tops[k] = larger(pick(lanes, x, all(-INFINITY)), tops[k]); });
  // the maximum may be taken first, because soft-capping and a positive temperature keep the order
  const float highest = largest(larger(larger(tops[0], tops[1]), larger(tops[2], tops[3])));
  const float top = scaled<kCapped>(all(highest), row)[0];
  each([&](Vec x, Lanes lanes, int k) {
    const Vec below = larger(all(-200), (scaled<kCapped>(x, row) - all(top)) * all(kLog2E));
    const Vec p = pick(lanes, exp2(below), all(0));
    sums[k] = sums[k] + p;
    if (entropy) means[k] = fma(p, below, means[k]);
  });
  const float total = sum(sums[0] + sums[1] + (sums[2] + sums[3]));
  const float log_sum = std::log(total);
  const float mean = entropy ? sum(means[0] + means[1] + (means[2] + means[3])) / total * kLn2 : 0;
  const float at = scaled<kCapped>(all(one(logits + target)), row)[0];
  return {top, log_sum, at - top - log_sum, entropy ? log_sum - mean : 0};
}

// d log p_y / dz_j = [j = y] - p_j, dH / dz_j = -p_j (log p_j + H)
template <bool kCapped, bool kEntropy>
void differentiate_row(Number* logits, int64_t size, int64_t target, Row row, Facts facts, float pull, float entropy_pull) {
  const auto outer = [&](Vec x, Vec slope) {  // from the gradient of z to that of the logit
    slope = slope * all(row.scale);
    if (kCapped) {
      const Vec t = saturation(x, row);
      slope = slope * (all(1) - t * t);
    }
    return slope;
  };
  const auto slope = [&](Vec x) {
    const Vec logp = scaled<kCapped>(x, row) - all(facts.top) - all(facts.log_sum);
    const Vec p = weight(logp * all(kLog2E));
    if (!kEntropy) return p * all(-pull);
    const Vec finite = larger(all(-1e30f), logp);  // finite, because it is multiplied by p = 0 for a logit of -infinity
    return p * fma(finite + all(facts.entropy), all(-entropy_pull), all(-pull));
  };
  const Vec chosen = all(one(logits + target));
  const Vec at_target = outer(chosen, slope(chosen) + all(pull));
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const Vec x = load(logits + i);
    store(logits + i, outer(x, slope(x)));
  }
  if (i < size) {
    const Lanes lanes = first_lanes(size - i);
    const Vec x = load(logits + i, lanes);
    store(logits + i, outer(x, slope(x)), lanes);
  }
  store(logits + target, at_target, first_lanes(1));
}

inline Row row_of(const float* temperatures, int64_t i, float cap) { return {temperatures ? 1 / temperatures[i] : 1, cap}; }

}  // namespace

extern "C" {

// `temperatures`: null if all are 1; `cap`: 0 for none.
void read_logits(const Number* logits, const int64_t* targets, const float* temperatures, float cap, int entropy, Facts* facts,
                 int64_t rows, int64_t size, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < rows; ++i) {
    const auto read = cap ? read_row<true> : read_row<false>;
    facts[i] = read(logits + i * size, size, targets[i], row_of(temperatures, i, cap), entropy);
  }
}

// Overwrites the logits with their gradient. `pulls`, `entropy_pulls` (null: none): gradients of log-probability, entropy.
void differentiate_logits(Number* logits, const int64_t* targets, const float* temperatures, float cap, const Facts* facts,
                          const float* pulls, const float* entropy_pulls, int64_t rows, int64_t size, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < rows; ++i) {
    const auto differentiate = cap ? (entropy_pulls ? differentiate_row<true, true> : differentiate_row<true, false>)
                                   : (entropy_pulls ? differentiate_row<false, true> : differentiate_row<false, false>);
    differentiate(logits + i * size, size, targets[i], row_of(temperatures, i, cap), facts[i], pulls[i],
                  entropy_pulls ? entropy_pulls[i] : 0);
  }
}

}  // extern "C"
