// Values of consecutive pages, weighted by digits, for every kind of code. Legend as in digits.h.
#include "digit_values.h"

#if KVB_DIGITS
namespace kvb {

// Where the highest bits of the codes in bytes [w, w + 16) of a row lie: of byte w in byte w % each behind the planes, shifted by w / each.
template <int kKind> struct UpperBytes {
  long W, each, start, direct;  // the first of them; how many lanes there are from there on, before the others begin anew
  Ints order, shifts;
  UpperBytes(long W, long w) : W(W), each(W / lower_bits(kKind)), start(each > kLanes ? w % each : 0), direct(std::min<long>(each - start, kLanes)) {
    alignas(64) uint8_t from[64];
    alignas(64) int32_t by[kLanes];
    long place = w % each, shift = w / each;
    for (int i = 0; i < kLanes; i++) {
      by[i] = int32_t(shift);
      for (int row = 0; row < 4; row++) from[4 * i + row] = uint8_t(kLanes * row + (each > kLanes ? i : place));
      if (++place == each) place = 0, shift++;
    }
    order = _mm512_load_si512(from);
    shifts = _mm512_load_si512(by);
  }
  // The quads of four rows, S apart.
  __attribute__((always_inline)) Ints quads_of(const uint8_t* row, long S) const {
    const __mmask16 mask = first_lanes(direct);
    Ints x = load_rows(row + W + start, S, mask);
    if (each > kLanes && direct < kLanes) x = _mm512_or_si512(x, load_rows(row + W - direct, S, __mmask16(~mask)));
    return _mm512_srlv_epi32(_mm512_permutexvar_epi8(order, x), shifts);
  }
};
struct NoUpperBytes {
  NoUpperBytes(long, long) {}
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
  const Ints table = load_table(v.table);
  const std::conditional_t<has_upper(kKind), UpperBytes<kKind>, NoUpperBytes> above(v.W, w);
  auto quad = [&](long at) __attribute__((always_inline)) {
    const Ints packed = quads(v.S == kLanes ? _mm512_loadu_si512(row) : load_rows(row, v.S, 0xffff));
    Ints upper = packed;
    if constexpr (has_upper(kKind)) upper = above.quads_of(row - w, v.S);
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
    for (; at < end; at += 8) {  // a page holds a multiple of eight, and the weights past the last slot are zero
      ahead.some((8 * v.S + 63) / 64);
      quad(at);
      quad(at + 4);
    }
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

// See AllDigitValues.
template <int kKind, int G, bool kGrouped> void all_digit_values(const DigitValues& v, long padded, float* sum) {
  for (long w = 0; w < v.W; w += kLanes) digit_values<kKind, G, 0, (planes_of(kKind) > 1 ? 2 : 1), kGrouped>(v, w, padded, sum);
}

const AllDigitValues kAllDigitValues[2][kMaxGroup][kNumCodes] = {
    {KVB_CODES(all_digit_values, 1, false), KVB_CODES(all_digit_values, 2, false), KVB_CODES(all_digit_values, 3, false),
     KVB_CODES(all_digit_values, 4, false)},
    {KVB_CODES(all_digit_values, 1, true), KVB_CODES(all_digit_values, 2, true), KVB_CODES(all_digit_values, 3, true),
     KVB_CODES(all_digit_values, 4, true)}};

}  // namespace kvb
#endif
