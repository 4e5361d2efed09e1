// Keys of a page against queries in whole numbers. Legend as in digits.h.
#include "digits.h"

#if KVB_DIGITS
namespace kvb {

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

// kPlanes: bit p: plane p counts, as ToLogits has it.
template <int kKind, int kPlanes, int G, int kTiles, int kPlane>
KVB_INLINE void add_key_planes(const Ints* packed, const Ints* upper, Ints table, const int8_t* q, long W, int w, Ints (&sum)[kTiles][G][kDigits]) {
  if constexpr (kPlanes >> kPlane & 1) {
    Ints codes[kTiles];
#pragma GCC unroll 8
    for (int u = 0; u < kTiles; u++) codes[u] = code_bytes<kKind, kPlane>(packed[u], upper[u], table);
#pragma GCC unroll 8
    for (int g = 0; g < G; g++)
#pragma GCC unroll 8
      for (int j = 0; j < kDigits; j++) {
        const Ints digits = broadcast_quad(q + (g * kDigits + j) * kQueryBytes + kPlane * W + w);
#pragma GCC unroll 8
        for (int u = 0; u < kTiles; u++) sum[u][g][j] = _mm512_dpbusd_epi32(sum[u][g][j], codes[u], digits);
      }
  }
  if constexpr (kPlane + 1 < planes_of(kKind)) add_key_planes<kKind, kPlanes, G, kTiles, kPlane + 1>(packed, upper, table, q, W, w, sum);
}

// Where the highest bits of rows w to w + 3 lie: in as many rows behind the planes, shifted. A run of rows is a multiple of four long.
template <int kKind> struct UpperRows {
  long W, each, row, shift;
  UpperRows(long W, long w) : W(W), each(has_upper(kKind) ? W / lower_bits(kKind) : W), row(w % each), shift(w / each) {}
  __attribute__((always_inline)) const uint8_t* in(const uint8_t* codes, long T) const { return codes + (W + row) * T; }
  __attribute__((always_inline)) void next() {
    if ((row += 4) == each) row = 0, shift++;
  }
};

// The logits of a register of slots, `at` slots from where `to` and `out` begin.
template <int G>
KVB_INLINE void store_logits(const Ints (&sum)[G][kDigits], const float* back, const ToLogits& to, long at, __mmask16 lanes, float* out,
                             long out_stride) {
  const Vec scale = splat(to.scale);
  const Vec by = mul(scale, to.wide ? _mm512_maskz_loadu_ps(lanes, to.wide + at) : load_f16_lanes(lanes, to.by + 2 * at));
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

template <int kKind, int kPlanes, int G, int kTiles>
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
  const Ints table = load_table(to.table);
  UpperRows<kKind> above(W, first);
#pragma GCC unroll 4
  for (int w = first; w < last; w += 4, row += 4 * T) {
    Ints packed[kTiles], upper[kTiles] = {};
    if constexpr (kTiles == 2) load_key_quads(row, T, packed);
    else packed[0] = quads(load_rows(row, T, mask));
    if constexpr (has_upper(kKind)) {
      if constexpr (kTiles == 2) load_key_quads(above.in(codes, T), T, upper);
      else upper[0] = quads(load_rows(above.in(codes, T), T, mask));
#pragma GCC unroll 2
      for (int u = 0; u < kTiles; u++) upper[u] = shift_right(upper[u], above.shift);
      above.next();
    }
    add_key_planes<kKind, kPlanes, G, kTiles, 0>(packed, upper, table, q, W, w, sum);
  }
#pragma GCC unroll 8
  for (int u = 0; u < kTiles; u++) store_logits<G>(sum[u], back, to, u * kLanes, kTiles == 2 ? 0xffff : mask, out, out_stride);
}

template <int kKind, int kPlane> KVB_INLINE Ints narrow_plane(Ints packed, Ints upper, Ints table) {
  if constexpr (kPlane < planes_of(kKind)) return code_bytes<kKind, kPlane>(packed, upper, table);
  else return packed;
}

// As digit_tile for at most eight slots, in registers of half the width, which take half the time.
template <int kKind, int kPlanes, int G>
KVB_INLINE void narrow_tile(const uint8_t* codes, long T, long W, const int8_t* q, const float* back, ToLogits to, int first, int last,
                            __mmask16 mask, float* out, long out_stride) {
  constexpr int P = planes_of(kKind);
  const Ints table = load_table(to.table);
  __m256i sum[G][kDigits];
#pragma GCC unroll 8
  for (int g = 0; g < G; g++)
#pragma GCC unroll 8
    for (int j = 0; j < kDigits; j++) sum[g][j] = _mm256_setzero_si256();
  const uint8_t* row = codes + first * T;
  UpperRows<kKind> above(W, first);
#pragma GCC unroll 2
  for (int w = first; w < last; w += 4, row += 4 * T) {
    auto load = [&](const uint8_t* from) __attribute__((always_inline)) {
      auto slots = [&](long r) __attribute__((always_inline)) { return _mm_maskz_loadu_epi8(mask, from + r * T); };
      const __m128i a = _mm_unpacklo_epi8(slots(0), slots(1)), b = _mm_unpacklo_epi8(slots(2), slots(3));
      return _mm512_zextsi256_si512(_mm256_set_m128i(_mm_unpackhi_epi16(a, b), _mm_unpacklo_epi16(a, b)));
    };
    const Ints packed = load(row);
    Ints upper = packed;
    if constexpr (has_upper(kKind)) {
      upper = shift_right(load(above.in(codes, T)), above.shift);
      above.next();
    }
    const Ints planes[8] = {narrow_plane<kKind, 0>(packed, upper, table), narrow_plane<kKind, 1>(packed, upper, table),
                            narrow_plane<kKind, 2>(packed, upper, table), narrow_plane<kKind, 3>(packed, upper, table),
                            narrow_plane<kKind, 4>(packed, upper, table), narrow_plane<kKind, 5>(packed, upper, table),
                            narrow_plane<kKind, 6>(packed, upper, table), narrow_plane<kKind, 7>(packed, upper, table)};
#pragma GCC unroll 8
    for (int p = 0; p < P; p++) {
      if (!(kPlanes >> p & 1)) continue;
      const __m256i bytes = _mm512_castsi512_si256(planes[p]);
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

template <int kKind, int kPlanes, int G>
static void logits_of_planes(const uint8_t* codes, long T, long W, long begin, long end, const int8_t* q, const float* back, ToLogits to, int first,
                             int last, float* out, long out_stride, Ahead& ahead) {
  const long each = (ahead.lines() * 2 * kLanes + end - begin - 1) / (end - begin);
  for (long slot = begin, next; slot < end; slot = next) {
    const long left = end - slot;
    next = slot + (left >= 2 * kLanes ? 2 * kLanes : kLanes);
    ToLogits here = to;
    if (to.by) here.by += 2 * slot;
    if (to.wide) here.wide += slot;
    if (to.zero) here.zero += 2 * slot;
    float* at = out + slot - begin;
    ahead.some(each);
    if (left >= 2 * kLanes) digit_tile<kKind, kPlanes, G, 2>(codes + slot, T, W, q, back, here, first, last, 0xffff, at, out_stride);
    else if (left > kLanes / 2) digit_tile<kKind, kPlanes, G, 1>(codes + slot, T, W, q, back, here, first, last, first_lanes(left), at, out_stride);
    else narrow_tile<kKind, kPlanes, G>(codes + slot, T, W, q, back, here, first, last, first_lanes(left), at, out_stride);
  }
}

// See DigitLogits. Planes that do not count are left out where there are two; asked in the loops, it would cost all others a quarter.
template <int kKind, int G>
void digit_logits(const uint8_t* codes, long T, long W, long begin, long end, const int8_t* q, const float* back, ToLogits to, int first,
                  int last, float* out, long out_stride, Ahead& ahead) {
  constexpr int kAll = (1 << planes_of(kKind)) - 1;
  auto chosen = logits_of_planes<kKind, kAll, G>;
  if constexpr (kAll == 3) chosen = to.planes == 1 ? logits_of_planes<kKind, 1, G> : to.planes == 2 ? logits_of_planes<kKind, 2, G> : chosen;
  chosen(codes, T, W, begin, end, q, back, to, first, last, out, out_stride, ahead);
}

const DigitLogits kDigitLogits[kMaxGroup][kNumCodes] = {KVB_CODES(digit_logits, 1), KVB_CODES(digit_logits, 2),
                                                                KVB_CODES(digit_logits, 3), KVB_CODES(digit_logits, 4)};

}  // namespace kvb
#endif
