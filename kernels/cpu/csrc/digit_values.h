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
  auto add_up = [&](Vec e, Vec by, Vec zero, long t) __attribute__((always_inline)) {
    if (kExp) total = add(total, e);
    weighted = fma(e, zero, weighted);
    store_weight_digits(digits + 4 * t, mul(e, by));
  };
  long t = 0;
#pragma GCC unroll 2
  for (; t + kLanes <= n; t += kLanes) {
    const Vec e = kExp ? exp_of(sub(load(x + t), shift)) : load(x + t);
    if (kExp) store(x + t, e);
    add_up(e, load(by + t), load(zero + t), t);
  }
  if (t < n) {  // behind n lies what an earlier call left: no weight of zero makes a number of it
    const __mmask16 lanes = first_lanes(n - t);
    Vec e = _mm512_maskz_loadu_ps(lanes, x + t);
    if (kExp) e = _mm512_maskz_mov_ps(lanes, exp_of(sub(e, shift)));
    if (kExp) _mm512_mask_storeu_ps(x + t, lanes, e);
    add_up(e, _mm512_maskz_loadu_ps(lanes, by + t), _mm512_maskz_loadu_ps(lanes, zero + t), t);
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

// Adds n slots to the sums of G heads [G][P][padded], W a multiple of 16; slots are read four by four, and a page holds a multiple of eight.
typedef void (*AllDigitValues)(const DigitValues&, long, float*);
extern const AllDigitValues kAllDigitValues[2][kMaxGroup][kNumCodes];  // the second ones for several groups of channels

#endif

}  // namespace kvb
