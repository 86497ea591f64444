// Sums of large tensors in training; `native.py` builds and calls it. Their order does not depend on the number of threads.

#include <omp.h>

#include <vector>

#include "simd.h"

namespace {

constexpr int64_t kBlock = 1 << 15;  // numbers in a block that is summed first

double square_sum_of_block(const float* x, int64_t count) {
  __m512d sums[4] = {};  // several, because consecutive additions to one would wait for each other
  const auto add = [&](Vec v, int at) {
    const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(v)), high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1));
    sums[at] = _mm512_fmadd_pd(low, low, sums[at]);
    sums[at + 1] = _mm512_fmadd_pd(high, high, sums[at + 1]);
  };
  int64_t i = 0;
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
    add(load(x + i), 0);
    add(load(x + i + kLanes), 2);
  }
  for (; i < count; i += kLanes) add(load(x + i, first_lanes(count - i)), 0);
  return _mm512_reduce_add_pd((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

}  // namespace

extern "C" {

double square_sum(const float* x, int64_t count, int threads) {
  const int64_t blocks = (count + kBlock - 1) / kBlock;
  std::vector<double> sums(blocks);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t b = 0; b < blocks; ++b) sums[b] = square_sum_of_block(x + b * kBlock, std::min(kBlock, count - b * kBlock));
  double total = 0;
  for (const double sum : sums) total += sum;
  return total;
}

// total += part
void add_to(float* total, const Number* part, int64_t count, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t block = 0; block < count; block += kBlock) {
    const int64_t stop = std::min(block + kBlock, count);
    int64_t i = block;
    for (; i + kLanes <= stop; i += kLanes) store(total + i, load(total + i) + load(part + i));
    if (i < stop) {
      const Lanes lanes = first_lanes(stop - i);
      store(total + i, load(total + i, lanes) + load(part + i, lanes), lanes);
    }
  }
}

}  // extern "C"
