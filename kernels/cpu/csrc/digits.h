// Products of codes with floats in whole numbers, where the CPU multiplies bytes four at a time (AVX-512 VNNI): the floats are scaled to
// 24-bit integers and cut into three signed digits of base 256, so that nothing is rounded but the scaling itself (2^-23 of the largest).
// Three multiplications for four that fp32 needs, no code is widened to a float, and sums do not depend on their order.
//
// Legend as in sides.h. A quad is four codes that one 32-bit lane takes in at once: four channels of a key, four tokens of the values.
#pragma once

#include "plan.h"

namespace kvb {

constexpr bool kHasDigits = KVB_DIGITS;
constexpr int kDigits = 3;
constexpr int kQueryBytes = kMaxChannels + 64;  // stride between the digits of a query
constexpr float kHuge = 3e38f;
constexpr uint32_t kLargestMantissa = 0x7e0000;  // of what is scaled to nearly 2^23: no more than 127 * (1 + 256 + 65536)
constexpr float kNegligible = 1e-30f;  // factors that are all smaller count as zero: their scaling would overflow

#if KVB_DIGITS

// Byte j * 16 + i of the result is byte 4 * i + j of the argument; `quads` undoes it.
KVB_INLINE Ints bytes_apart(Ints x) {
  alignas(64) static const uint8_t kIndex[64] = {0,  4,  8,  12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60, 1,  5,  9,  13, 17, 21,
                                                 25, 29, 33, 37, 41, 45, 49, 53, 57, 61, 2,  6,  10, 14, 18, 22, 26, 30, 34, 38, 42, 46,
                                                 50, 54, 58, 62, 3,  7,  11, 15, 19, 23, 27, 31, 35, 39, 43, 47, 51, 55, 59, 63};
  return _mm512_permutexvar_epi8(_mm512_load_si512(kIndex), x);
}

KVB_INLINE Ints quads(Ints x) {
  alignas(64) static const uint8_t kIndex[64] = {0,  16, 32, 48, 1,  17, 33, 49, 2,  18, 34, 50, 3,  19, 35, 51, 4,  20, 36, 52, 5,  21,
                                                 37, 53, 6,  22, 38, 54, 7,  23, 39, 55, 8,  24, 40, 56, 9,  25, 41, 57, 10, 26, 42, 58,
                                                 11, 27, 43, 59, 12, 28, 44, 60, 13, 29, 45, 61, 14, 30, 46, 62, 15, 31, 47, 63};
  return _mm512_permutexvar_epi8(_mm512_load_si512(kIndex), x);
}

KVB_INLINE __mmask16 first_lanes(long n) { return n >= 16 ? 0xffff : (__mmask16)((1u << n) - 1); }

KVB_INLINE Vec load_f16_lanes(__mmask16 lanes, const uint8_t* p) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lanes, p)); }

// What floats up to `largest` are multiplied by to become whole numbers, and what takes them back: powers of two, so that neither rounds.
static void choose_scaling(float largest, float* factor, float* back) {
  if (!(largest >= kNegligible && largest <= kHuge)) {
    *factor = 0.0f;
    *back = largest <= kHuge ? 0.0f : NAN;
    return;
  }
  const uint32_t bits = bits_of_scalar(largest);
  const int exponent = int(bits >> 23) - ((bits & 0x7fffff) <= kLargestMantissa ? 149 : 148);
  *factor = scalar_of_bits(uint32_t(127 - exponent) << 23);
  *back = scalar_of_bits(uint32_t(127 + exponent) << 23);
}

// Sixteen floats as digits: byte j of each lane is digit j, byte 3 is of no use.
KVB_INLINE Ints digits_of(Vec x, Vec factor) {
  const Ints half = _mm512_set1_epi32(0x808080);
  return _mm512_xor_si512(_mm512_add_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(x, factor)), half), half);
}

KVB_INLINE Vec from_digits(const Ints* sum, Vec back) {
  Vec x = _mm512_cvtepi32_ps(sum[2]);
  x = fma(x, splat(256.0f), _mm512_cvtepi32_ps(sum[1]));
  x = fma(x, splat(256.0f), _mm512_cvtepi32_ps(sum[0]));
  return mul(x, back);
}

// The levels of one plane of codes, as bytes. Of 3 and 5 bits, `upper` holds the highest one where `packed` has the first.
template <int kKind, int kPlane> KVB_INLINE Ints code_bytes(Ints packed, Ints upper, Ints table) {
  constexpr int kBits = lower_bits(kKind), kShift = kPlane * kBits;
  if (kShift) packed = _mm512_srli_epi16(packed, kShift);
  if (kBits < 8) packed = _mm512_and_si512(packed, _mm512_set1_epi8((1 << kBits) - 1));
  if constexpr (has_upper(kKind)) {
    if constexpr (kShift < kBits) upper = _mm512_slli_epi16(upper, kBits - kShift);
    if constexpr (kShift > kBits) upper = _mm512_srli_epi16(upper, kShift - kBits);
    packed = _mm512_or_si512(packed, _mm512_and_si512(upper, _mm512_set1_epi8(1 << kBits)));
  }
  if constexpr (in_table(kKind)) packed = _mm512_shuffle_epi8(table, packed);
  return packed;
}

KVB_INLINE Ints load_table(const uint8_t* table) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table)); }
KVB_INLINE Ints shift_right(Ints x, long by) { return _mm512_srl_epi16(x, _mm_cvtsi64_si128(by)); }

KVB_INLINE Ints broadcast_quad(const int8_t* p) {
  int32_t x;
  std::memcpy(&x, p, 4);
  return _mm512_set1_epi32(x);
}

// Four rows of up to 16 bytes, `stride` apart.
KVB_INLINE Ints load_rows(const uint8_t* row, long stride, __mmask16 mask) {
  Ints x = _mm512_castsi128_si512(_mm_maskz_loadu_epi8(mask, row));
  x = _mm512_inserti32x4(x, _mm_maskz_loadu_epi8(mask, row + stride), 1);
  x = _mm512_inserti32x4(x, _mm_maskz_loadu_epi8(mask, row + 2 * stride), 2);
  return _mm512_inserti32x4(x, _mm_maskz_loadu_epi8(mask, row + 3 * stride), 3);
}

// Keys ----------------------------------------------------------------------------------------------------------------------------------

// From dots to logits: scale * (by[t] * dot + zero[t] * sum).
struct ToLogits {
  const uint8_t *by, *zero;  // fp16 [slot] of a page; no zero where it is -half * by
  const float* wide;         // the scales as floats where they are bytes, or null
  const uint8_t* table;      // [16] levels of codes
  const float* sum;          // [G]
  float scale, half;
  int planes;  // bit p: some channel of plane p counts
  bool add;    // to what is there
};

// Digits of G queries as arrange_queries (logits.h) leaves them: out [G][digit][kQueryBytes], channel by channel; `sum` carries a NaN on.
static void query_digits(const float* q, long G, int num_planes, long width, const float* sum, int8_t* out, float* back) {
  for (long g = 0; g < G; g++, out += kDigits * kQueryBytes) {
    Vec most = splat(0.0f);
    for (long p = 0; p < num_planes; p++)
      for (long w = 0; w < width; w += kLanes)
        most = _mm512_max_ps(_mm512_abs_ps(_mm512_maskz_loadu_ps(first_lanes(width - w), q + (g * num_planes + p) * kQueryStride + w)), most);
    float factor;
    choose_scaling(_mm512_reduce_max_ps(most), &factor, &back[g]);
    if (!std::isfinite(sum[g])) back[g] = NAN;
    for (long p = 0; p < num_planes; p++)
      for (long w = 0; w < width; w += kLanes) {
        const float* from = q + (g * num_planes + p) * kQueryStride + w;
        const Ints digits = bytes_apart(digits_of(_mm512_maskz_loadu_ps(first_lanes(width - w), from), splat(factor)));
        int8_t* to = out + p * width + w;  // what is written past the width is overwritten by the next plane, or lies in the stride
        _mm_storeu_si128((__m128i*)to, _mm512_castsi512_si128(digits));
        _mm_storeu_si128((__m128i*)(to + kQueryBytes), _mm512_extracti32x4_epi32(digits, 1));
        _mm_storeu_si128((__m128i*)(to + 2 * kQueryBytes), _mm512_extracti32x4_epi32(digits, 2));
      }
  }
}

#define KVB_CODES(NAME, ...)                                                                                     \
  {NAME<kCode1, __VA_ARGS__>, NAME<kCode2, __VA_ARGS__>, NAME<kCode4, __VA_ARGS__>, NAME<kCode8, __VA_ARGS__>,     \
   NAME<kBook2, __VA_ARGS__>, NAME<kBook3, __VA_ARGS__>, NAME<kBook4, __VA_ARGS__>, NAME<kCode5, __VA_ARGS__>}

constexpr int kNumCodes = 8;
constexpr int index_of(int kind) { return kind <= kCode8 ? kind : kind == kCode5 ? kNumCodes - 1 : kind - kBook2 + kCode8 + 1; }  // in the tables below

// Logits of G queries with slots [begin, end) of a page's K region, from bytes [first, last) of each slot; arguments as for key_dots.
typedef void (*DigitLogits)(const uint8_t*, long, long, long, long, const int8_t*, const float*, ToLogits, int, int, float*, long, Ahead&);
extern const DigitLogits kDigitLogits[kMaxGroup][kNumCodes];

#endif

}  // namespace kvb
