// Vectors of 16 (AVX-512) or 8 (AVX2) floats for the compiled kernels, which `native.py` builds.
//
// `Number` is the stored type of tensors: bfloat16 if BFLOAT16 is defined, else float32. Kernels compute in float32.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr float kLog2E = 1.44269504088896341f;

#ifdef __AVX512F__

using Vec = __m512;
using Bits = __m512i;
using Lanes = __mmask16;  // a set of lanes of a register
constexpr int kLanes = 16;

inline Vec all(float x) { return _mm512_set1_ps(x); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec larger(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec pick(Lanes lanes, Vec yes, Vec no) { return _mm512_mask_mov_ps(no, lanes, yes); }
inline float sum(Vec x) { return _mm512_reduce_add_ps(x); }
inline float largest(Vec x) { return _mm512_reduce_max_ps(x); }
inline Lanes first_lanes(int64_t count) { return count >= 16 ? 0xffff : count <= 0 ? 0 : static_cast<Lanes>((1u << count) - 1); }
inline Lanes lanes_of(int64_t from, int64_t to) { return first_lanes(to) & ~first_lanes(from); }
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline Vec load(const float* p, Lanes lanes) { return _mm512_maskz_loadu_ps(lanes, p); }
inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
inline void store(float* p, Vec x, Lanes lanes) { _mm512_mask_storeu_ps(p, lanes, x); }
inline Bits load_bits(const void* p) { return _mm512_loadu_si512(p); }
inline Vec round(Vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec scale(Vec x, Vec power) { return _mm512_scalef_ps(x, power); }
inline Vec within(Vec x) { return x; }  // `scale` handles overflow and underflow

// Transposes 16 × 16 32-bit numbers: pairs, quadruples, then 128-bit lanes twice.
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

#else

using Vec = __m256;
using Bits = __m256i;
using Lanes = __m256i;  // all bits of a lane are set, or none
constexpr int kLanes = 8;

inline Vec all(float x) { return _mm256_set1_ps(x); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec larger(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec pick(Lanes lanes, Vec yes, Vec no) { return _mm256_blendv_ps(no, yes, (__m256)lanes); }
inline float sum(Vec x) {
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}
inline float largest(Vec x) {
  __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_max_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}
inline Lanes lanes_of(int64_t from, int64_t to) {
  const auto bound = [](int64_t x) { return _mm256_set1_epi32(static_cast<int>(std::min<int64_t>(std::max<int64_t>(x, 0), kLanes))); };
  const __m256i number = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_andnot_si256(_mm256_cmpgt_epi32(bound(from), number), _mm256_cmpgt_epi32(bound(to), number));
}
inline Lanes first_lanes(int64_t count) { return lanes_of(0, count); }
inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline Vec load(const float* p, Lanes lanes) { return _mm256_maskload_ps(p, lanes); }
inline void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
inline void store(float* p, Vec x, Lanes lanes) { _mm256_maskstore_ps(p, lanes, x); }
inline Bits load_bits(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline Vec round(Vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec scale(Vec x, Vec power) {  // in two steps, because 2^power itself may not be representable
  const __m256i whole = _mm256_cvtps_epi32(power), half = _mm256_srai_epi32(whole, 1);
  const auto two_to = [](__m256i n) { return (__m256)_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23); };
  return x * two_to(half) * two_to(_mm256_sub_epi32(whole, half));
}
inline Vec within(Vec x) { return _mm256_max_ps(all(-160.0f), _mm256_min_ps(all(160.0f), x)); }  // NaN stays NaN

// Transposes 8 × 8 32-bit numbers: pairs, quadruples, then halves.
inline void transpose(__m256i r[8]) {
  __m256i t[8];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x20);
    t[i + 4] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x31);
  }
  std::copy(t, t + 8, r);
}

#endif

// 2^x with a relative error of 1e-7; 0 on underflow and infinity on overflow.
inline Vec exp2(Vec x) {
  x = within(x);
  const Vec whole = round(x), rest = x - whole;
  Vec y = all(1.5252733804e-5f);
  for (const float c : {1.5403530393e-4f, 1.3333558146e-3f, 9.6181291076e-3f, 5.5504108665e-2f, 2.4022650696e-1f, 6.9314718056e-1f, 1.0f})
    y = fma(y, rest, all(c));
  return scale(y, whole);
}

#ifdef BFLOAT16  // set explicitly, because a compiler may enable the instructions by default

using Number = uint16_t;

inline Vec widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
inline Vec load(const Number* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline Vec load(const Number* p, Lanes lanes) { return widen(_mm256_maskz_loadu_epi16(lanes, p)); }
inline void store(Number* p, Vec x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(x)); }
inline void store(Number* p, Vec x, Lanes lanes) { _mm256_mask_storeu_epi16(p, lanes, (__m256i)_mm512_cvtneps_pbh(x)); }
inline Vec dot(Vec sum, Bits a, Bits b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }

#else

using Number = float;

#endif

}  // namespace
