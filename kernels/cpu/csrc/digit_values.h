// Values weighted by digits: as digits.h, a quad being four tokens.
#pragma once

#include "digits.h"

namespace kvb {

#if KVB_DIGITS

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
  long codes, W, S, T, n;                          // where a page's V region begins; W bytes of planes, S from slot to slot
  const uint8_t* table;                            // [16] levels of codes
  const int8_t* digits;
  const float* back;  // [group]
  long group_stride, head_stride;
  int group_channels;
};

// Without what a shift brought into the lanes of a mask, in each of the four rows.
KVB_INLINE Ints upper_lanes(Ints x, __mmask16 mask) {
  return _mm512_maskz_mov_epi8(~(0x0001000100010001ull * mask), x);
}

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
  const Ints table = load_table(v.table);
  const long behind = v.W / 2, direct = std::min<long>(std::max<long>(behind - w, 0), kLanes);  // lanes whose third bits are not shifted
  auto quad = [&](long at) __attribute__((always_inline)) {
    const Ints packed = quads(v.S == kLanes ? _mm512_loadu_si512(row) : load_rows(row, v.S, 0xffff));
    Ints upper = packed;
    if constexpr (kKind == kBook3) {
      const uint8_t* above = row + v.W;  // of this register's first byte
      const __mmask16 mask = first_lanes(direct);
      upper = direct == kLanes ? load_rows(above, v.S, 0xffff) : shift_one(load_rows(above - behind, v.S, __mmask16(~mask)), true);
      if (direct > 0 && direct < kLanes) upper = _mm512_or_si512(upper_lanes(upper, mask), load_rows(above, v.S, mask));
      upper = quads(upper);
    }
    row += 4 * v.S;
    auto add_plane = [&](int p, Ints bytes) __attribute__((always_inline)) {
#pragma GCC unroll 8
      for (int g = 0; g < G; g++)
#pragma GCC unroll 8
        for (int j = 0; j < kDigits; j++)
          acc[p][g][j] = _mm512_dpbusd_epi32(acc[p][g][j], bytes, broadcast_quad(from[p] + g * v.head_stride + 4 * at + 4 * j));
    };
    add_plane(0, code_bytes<kKind, kFirst>(packed, upper, table));
    if constexpr (kPart > 1) add_plane(1, code_bytes<kKind, kFirst + 1>(packed, upper, table));
  };
  for (const uint8_t* const* page = v.pages; at < v.n; page++) {
    const long end = std::min(at + v.T, v.n);
    Ahead ahead;
    if (w == 0 && kFirst == 0 && page + kNextPages <= v.last_page) {
      ahead.at = page[kNextPages] + v.codes;
      ahead.end = ahead.at + v.S * v.T;
    }
    row = *page + v.codes + w;
    for (; at + 8 <= end; at += 8) {
      ahead.some((8 * v.S + 63) / 64);
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

static const AllDigitValues kAllDigitValues[2][kMaxGroup][kNumCodes] = {
    {KVB_CODES(all_digit_values, 1, false), KVB_CODES(all_digit_values, 2, false), KVB_CODES(all_digit_values, 3, false),
     KVB_CODES(all_digit_values, 4, false)},
    {KVB_CODES(all_digit_values, 1, true), KVB_CODES(all_digit_values, 2, true), KVB_CODES(all_digit_values, 3, true),
     KVB_CODES(all_digit_values, 4, true)}};

#endif

}  // namespace kvb
