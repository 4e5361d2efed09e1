// Products of codes with floats in whole numbers, where the CPU multiplies bytes four at a time (AVX-512 VNNI): the floats are scaled to
// 24-bit integers and cut into three signed digits of base 256, so that nothing is rounded but the scaling itself (2^-23 of the largest).
// Three multiplications for four that fp32 needs, no code is widened to a float, and sums do not depend on their order.
//
// Legend as in sides.h. A quad is four codes that one 32-bit lane takes in at once: four channels of a key, four tokens of the values.
#pragma once

#include "plan.h"

#if defined(__AVX512VNNI__) && defined(__AVX512VBMI__) && !defined(KVB_GENERIC)
#define KVB_DIGITS 1
#else
#define KVB_DIGITS 0
#endif

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

template <int kKind, int kPlane> KVB_INLINE Ints code_bytes(Ints packed) {
  constexpr int kBits = bits_of(kKind), kShift = kPlane * kBits;
  if (kShift) packed = _mm512_srli_epi16(packed, kShift);
  return kBits == 8 ? packed : _mm512_and_si512(packed, _mm512_set1_epi8((1 << kBits) - 1));
}

KVB_INLINE Ints broadcast_quad(const int8_t* p) {
  int32_t x;
  std::memcpy(&x, p, 4);
  return _mm512_set1_epi32(x);
}

// Keys ----------------------------------------------------------------------------------------------------------------------------------

// From dots to logits: scale * (by[t] * dot + zero[t] * sum).
struct ToLogits {
  const uint8_t *by, *zero;  // fp16 [slot] of a page; no zero where it is -half * by
  const float* sum;          // [G]
  float scale, half;
  bool add;  // to what is there
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

// Quads of the first 16 of 32 columns of four rows that lie in two registers.
alignas(64) static const uint8_t kPairs[64] = {0,  32, 64, 96,  1,  33, 65, 97,  2,  34, 66, 98,  3,  35, 67, 99,  4,  36,
                                                 68, 100, 5,  37, 69, 101, 6,  38, 70, 102, 7,  39, 71, 103, 8,  40, 72, 104,
                                                 9,  41, 73, 105, 10, 42, 74, 106, 11, 43, 75, 107, 12, 44, 76, 108, 13, 45,
                                                 77, 109, 14, 46, 78, 110, 15, 47, 79, 111};

// Four rows of 32 slots as two registers of quads.
KVB_INLINE void load_key_quads(const uint8_t* row, long T, Ints* out) {
  const Ints low = _mm512_load_si512(kPairs), high = _mm512_add_epi8(low, _mm512_set1_epi8(16));
  const Ints a = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)row)),
                                    _mm256_loadu_si256((const __m256i*)(row + T)), 1);
  const Ints b = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)(row + 2 * T))),
                                    _mm256_loadu_si256((const __m256i*)(row + 3 * T)), 1);
  out[0] = _mm512_permutex2var_epi8(a, low, b);
  out[1] = _mm512_permutex2var_epi8(a, high, b);
}

// Four rows of up to 16 bytes, `stride` apart.
KVB_INLINE Ints load_rows(const uint8_t* row, long stride, __mmask16 mask) {
  Ints x = _mm512_castsi128_si512(_mm_maskz_loadu_epi8(mask, row));
  x = _mm512_inserti32x4(x, _mm_maskz_loadu_epi8(mask, row + stride), 1);
  x = _mm512_inserti32x4(x, _mm_maskz_loadu_epi8(mask, row + 2 * stride), 2);
  return _mm512_inserti32x4(x, _mm_maskz_loadu_epi8(mask, row + 3 * stride), 3);
}

template <int kKind, int G, int kTiles, int kPlane>
KVB_INLINE void add_key_planes(const Ints* packed, const int8_t* q, long W, int w, Ints (&sum)[kTiles][G][kDigits]) {
  Ints codes[kTiles];
#pragma GCC unroll 8
  for (int u = 0; u < kTiles; u++) codes[u] = code_bytes<kKind, kPlane>(packed[u]);
#pragma GCC unroll 8
  for (int g = 0; g < G; g++)
#pragma GCC unroll 8
    for (int j = 0; j < kDigits; j++) {
      const Ints digits = broadcast_quad(q + (g * kDigits + j) * kQueryBytes + kPlane * W + w);
#pragma GCC unroll 8
      for (int u = 0; u < kTiles; u++) sum[u][g][j] = _mm512_dpbusd_epi32(sum[u][g][j], codes[u], digits);
    }
  if constexpr (kPlane + 1 < planes_of(kKind)) add_key_planes<kKind, G, kTiles, kPlane + 1>(packed, q, W, w, sum);
}

// The logits of a register of slots, `at` slots from where `to` and `out` begin.
template <int G>
KVB_INLINE void store_logits(const Ints (&sum)[G][kDigits], const float* back, const ToLogits& to, long at, __mmask16 lanes, float* out,
                             long out_stride) {
  const Vec scale = splat(to.scale), by = mul(scale, load_f16_lanes(lanes, to.by + 2 * at));
  const Vec zero = to.zero ? mul(scale, load_f16_lanes(lanes, to.zero + 2 * at)) : mul(by, splat(-to.half));
#pragma GCC unroll 8
  for (int g = 0; g < G; g++) {
    float* here = out + g * out_stride + at;
    Vec x = fma(from_digits(sum[g], splat(back[g])), by, mul(zero, splat(to.sum[g])));
    if (to.add) x = add(x, _mm512_maskz_loadu_ps(lanes, here));
    if (lanes == 0xffff) store(here, x);
    else _mm512_mask_storeu_ps(here, lanes, x);
  }
}

template <int kKind, int G, int kTiles>
KVB_INLINE void digit_tile(const uint8_t* codes, long T, long W, const int8_t* q, const float* back, ToLogits to, int first, int last,
                           __mmask16 mask, float* out, long out_stride) {
  Ints sum[kTiles][G][kDigits];
#pragma GCC unroll 8
  for (int u = 0; u < kTiles; u++)
#pragma GCC unroll 8
    for (int g = 0; g < G; g++)
#pragma GCC unroll 8
      for (int j = 0; j < kDigits; j++) sum[u][g][j] = _mm512_setzero_si512();
  const uint8_t* row = codes + first * T;
#pragma GCC unroll 4
  for (int w = first; w < last; w += 4, row += 4 * T) {
    Ints packed[kTiles];
    if constexpr (kTiles == 2) load_key_quads(row, T, packed);
    else packed[0] = quads(load_rows(row, T, mask));
    add_key_planes<kKind, G, kTiles, 0>(packed, q, W, w, sum);
  }
#pragma GCC unroll 8
  for (int u = 0; u < kTiles; u++) store_logits<G>(sum[u], back, to, u * kLanes, kTiles == 2 ? 0xffff : mask, out, out_stride);
}

// As digit_tile for at most eight slots, in registers of half the width, which take half the time.
template <int kKind, int G>
KVB_INLINE void narrow_tile(const uint8_t* codes, long T, long W, const int8_t* q, const float* back, ToLogits to, int first, int last,
                            __mmask16 mask, float* out, long out_stride) {
  constexpr int kBits = bits_of(kKind), P = planes_of(kKind);
  __m256i sum[G][kDigits];
#pragma GCC unroll 8
  for (int g = 0; g < G; g++)
#pragma GCC unroll 8
    for (int j = 0; j < kDigits; j++) sum[g][j] = _mm256_setzero_si256();
  const uint8_t* row = codes + first * T;
#pragma GCC unroll 2
  for (int w = first; w < last; w += 4, row += 4 * T) {
    auto slots = [&](long r) __attribute__((always_inline)) { return _mm_maskz_loadu_epi8(mask, row + r * T); };
    const __m128i a = _mm_unpacklo_epi8(slots(0), slots(1)), b = _mm_unpacklo_epi8(slots(2), slots(3));
    const __m256i packed = _mm256_set_m128i(_mm_unpackhi_epi16(a, b), _mm_unpacklo_epi16(a, b));
#pragma GCC unroll 8
    for (int p = 0; p < P; p++) {
      const __m256i shifted = _mm256_srli_epi16(packed, p * kBits);
      const __m256i bytes = kBits == 8 ? packed : _mm256_and_si256(shifted, _mm256_set1_epi8((1 << kBits) - 1));
#pragma GCC unroll 8
      for (int g = 0; g < G; g++)
#pragma GCC unroll 8
        for (int j = 0; j < kDigits; j++) {
          const Ints digits = broadcast_quad(q + (g * kDigits + j) * kQueryBytes + p * W + w);
          sum[g][j] = _mm256_dpbusd_epi32(sum[g][j], bytes, _mm512_castsi512_si256(digits));
        }
    }
  }
  Ints wide[G][kDigits];
#pragma GCC unroll 8
  for (int g = 0; g < G; g++)
#pragma GCC unroll 8
    for (int j = 0; j < kDigits; j++) wide[g][j] = _mm512_zextsi256_si512(sum[g][j]);
  store_logits<G>(wide, back, to, 0, mask, out, out_stride);
}

// Logits of G queries with slots [begin, end) of a page's K region, from bytes [first, last) of each slot; arguments as for key_dots.
template <int kKind, int G>
void digit_logits(const uint8_t* codes, long T, long W, long begin, long end, const int8_t* q, const float* back, ToLogits to, int first,
                  int last, float* out, long out_stride, Ahead& ahead) {
  const long each = (ahead.lines() * 2 * kLanes + end - begin - 1) / (end - begin);
  for (long slot = begin, next; slot < end; slot = next) {
    const long left = end - slot;
    next = slot + (left >= 2 * kLanes ? 2 * kLanes : kLanes);
    ToLogits here = to;
    here.by += 2 * slot;
    if (to.zero) here.zero += 2 * slot;
    float* at = out + slot - begin;
    ahead.some(each);
    if (left >= 2 * kLanes) digit_tile<kKind, G, 2>(codes + slot, T, W, q, back, here, first, last, 0xffff, at, out_stride);
    else if (left > kLanes / 2) digit_tile<kKind, G, 1>(codes + slot, T, W, q, back, here, first, last, first_lanes(left), at, out_stride);
    else narrow_tile<kKind, G>(codes + slot, T, W, q, back, here, first, last, first_lanes(left), at, out_stride);
  }
}

typedef void (*DigitLogits)(const uint8_t*, long, long, long, long, const int8_t*, const float*, ToLogits, int, int, float*, long, Ahead&);

// Values --------------------------------------------------------------------------------------------------------------------------------

// Digits of four tokens' weights: 16 bytes, digit j at 4 * j.
KVB_INLINE void store_weight_digits(int8_t* to, Vec weight) {
  const __m128i order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  _mm512_storeu_si512(to, _mm512_shuffle_epi8(digits_of(weight, splat(1.0f)), _mm512_broadcast_i32x4(order)));
}

// What becomes of the exponentials of a head: their sum, their sum weighted by the zero points (both lane by lane, added to what is there),
// and the digits of their products with scales, which have the factor of choose_scaling in them already.
// kExp: x holds logits, and e^(x - top), 1 at most, takes their place; else x holds the exponentials.
template <bool kExp>
static void weigh(float* x, long n, float top, const float* by, const float* zero, float* sum, float* zeros, int8_t* digits) {
  const Vec shift = splat(top);
  Vec total = load(sum), weighted = load(zeros);
  auto add_up = [&](Vec e, long t) __attribute__((always_inline)) {
    if (kExp) total = add(total, e);
    weighted = fma(e, load(zero + t), weighted);
    store_weight_digits(digits + 4 * t, mul(e, load(by + t)));
  };
  long t = 0;
#pragma GCC unroll 2
  for (; t + kLanes <= n; t += kLanes) {
    const Vec e = kExp ? exp_of(sub(load(x + t), shift)) : load(x + t);
    if (kExp) store(x + t, e);
    add_up(e, t);
  }
  if (t < n) {
    const __mmask16 lanes = first_lanes(n - t);
    Vec e = _mm512_maskz_loadu_ps(lanes, x + t);
    if (kExp) e = _mm512_maskz_mov_ps(lanes, exp_of(sub(e, shift)));
    if (kExp) _mm512_mask_storeu_ps(x + t, lanes, e);
    add_up(e, t);
  }
  store(sum, total);
  store(zeros, weighted);
}

// The values of slots [0, n) of consecutive pages, and the digits of their weights: [group][query head][4 * n, rounded up to a register].
struct DigitValues {
  const uint8_t *const *pages, *const *last_page;  // the last one that may be asked for ahead
  long codes, W, T, n;                             // where a page's V region begins
  const int8_t* digits;
  const float* back;  // [group]
  long group_stride, head_stride;
  int group_channels;
};

template <int kKind, int G, int kFirst, int kLast, bool kGrouped>
KVB_INLINE void digit_values(const DigitValues& v, long w, long padded, float* sum) {
  constexpr int P = planes_of(kKind), kPart = kLast - kFirst;
  Ints acc[kPart][G][kDigits];
  const int8_t* from[kPart];
#pragma GCC unroll 8
  for (int p = 0; p < kPart; p++) {
    from[p] = v.digits + (kGrouped ? ((kFirst + p) * v.W + w) / v.group_channels * v.group_stride : 0);
#pragma GCC unroll 8
    for (int g = 0; g < G; g++)
#pragma GCC unroll 8
      for (int j = 0; j < kDigits; j++) acc[p][g][j] = _mm512_setzero_si512();
  }
  long at = 0;
  const uint8_t* row;
  auto quad = [&](long at) __attribute__((always_inline)) {
    const Ints packed = quads(v.W == kLanes ? _mm512_loadu_si512(row) : load_rows(row, v.W, 0xffff));
    row += 4 * v.W;
    auto add_plane = [&](int p, Ints bytes) __attribute__((always_inline)) {
#pragma GCC unroll 8
      for (int g = 0; g < G; g++)
#pragma GCC unroll 8
        for (int j = 0; j < kDigits; j++)
          acc[p][g][j] = _mm512_dpbusd_epi32(acc[p][g][j], bytes, broadcast_quad(from[p] + g * v.head_stride + 4 * at + 4 * j));
    };
    add_plane(0, code_bytes<kKind, kFirst>(packed));
    if constexpr (kPart > 1) add_plane(1, code_bytes<kKind, kFirst + 1>(packed));
  };
  for (const uint8_t* const* page = v.pages; at < v.n; page++) {
    const long end = std::min(at + v.T, v.n);
    Ahead ahead;
    if (w == 0 && kFirst == 0 && page + kNextPages <= v.last_page) {
      ahead.at = page[kNextPages] + v.codes;
      ahead.end = ahead.at + v.W * v.T;
    }
    row = *page + v.codes + w;
    for (; at + 8 <= end; at += 8) {
      ahead.some((8 * v.W + 63) / 64);
      quad(at);
      quad(at + 4);
    }
    for (; at < end; at += 4) quad(at);
    at = end;
  }
#pragma GCC unroll 8
  for (int p = 0; p < kPart; p++) {
    const Vec back = splat(v.back[kGrouped ? ((kFirst + p) * v.W + w) / v.group_channels : 0]);
#pragma GCC unroll 8
    for (int g = 0; g < G; g++) {
      float* to = sum + (g * P + kFirst + p) * padded + w;
      store(to, add(load(to), from_digits(acc[p][g], back)));
    }
  }
  if constexpr (kLast < P) digit_values<kKind, G, kLast, (kLast + 2 < P ? kLast + 2 : P), kGrouped>(v, w, padded, sum);
}

// Adds n slots to the sums of G heads [G][P][padded], W a multiple of 16; slots are read four by four, and a page holds a multiple of eight.
template <int kKind, int G, bool kGrouped> void all_digit_values(const DigitValues& v, long padded, float* sum) {
  for (long w = 0; w < v.W; w += kLanes) digit_values<kKind, G, 0, (planes_of(kKind) > 1 ? 2 : 1), kGrouped>(v, w, padded, sum);
}

typedef void (*AllDigitValues)(const DigitValues&, long, float*);

#define KVB_CODES(NAME, ...) {NAME<kCode1, __VA_ARGS__>, NAME<kCode2, __VA_ARGS__>, NAME<kCode4, __VA_ARGS__>, NAME<kCode8, __VA_ARGS__>}

static const DigitLogits kDigitLogits[kMaxGroup][kCode8 + 1] = {KVB_CODES(digit_logits, 1), KVB_CODES(digit_logits, 2),
                                                                KVB_CODES(digit_logits, 3), KVB_CODES(digit_logits, 4)};
static const AllDigitValues kAllDigitValues[2][kMaxGroup][kCode8 + 1] = {
    {KVB_CODES(all_digit_values, 1, false), KVB_CODES(all_digit_values, 2, false), KVB_CODES(all_digit_values, 3, false),
     KVB_CODES(all_digit_values, 4, false)},
    {KVB_CODES(all_digit_values, 1, true), KVB_CODES(all_digit_values, 2, true), KVB_CODES(all_digit_values, 3, true),
     KVB_CODES(all_digit_values, 4, true)}};

#endif

}  // namespace kvb
