// Keys of a page against queries, for every kind of element. Legend as in sides.h.
#include "sides.h"

namespace kvb {

// kTiles registers of slots from `slot` on against G queries; bytes (or elements) [first, last) of each slot. With kApart each plane has sums
// of its own, [P][G].
template <int kKind, int G, int kTiles, bool kApart>
KVB_INLINE void dot_tile(const uint8_t* codes, long T, long W, long slot, const float* q, int first, int last, const Book& book, float* out,
                         long out_stride) {
  constexpr int P = planes_of(kKind), kUnit = unit_bytes_of(kKind), kSums = kApart ? P * G : G;
  Vec sum[kTiles][kSums];
#pragma GCC unroll 8
  for (int u = 0; u < kTiles; u++)
#pragma GCC unroll 8
    for (int g = 0; g < kSums; g++) sum[u][g] = splat(0.0f);
  const uint8_t* row = codes + (first * T + slot) * kUnit;
  const long behind = W / 2;
  for (int w = first; w < last; w++, row += T * kUnit) {
    if constexpr (P == 1) {  // one register of elements after the other leaves the most room for sums
      Vec factor[G];
#pragma GCC unroll 8
      for (int g = 0; g < G; g++) factor[g] = splat(q[g * kQueryStride + w]);
#pragma GCC unroll 8
      for (int u = 0; u < kTiles; u++)
        for_planes<kKind, 0, 1>(row + u * kLanes * kUnit, [] { return Ints(); }, book, [&](int, Vec x) __attribute__((always_inline)) {
#pragma GCC unroll 8
          for (int g = 0; g < G; g++) sum[u][g] = fma(x, factor[g], sum[u][g]);
        });
      continue;
    }
#pragma GCC unroll 2
    for (int half = 0; half < (P > 4 ? 2 : 1); half++) {
      constexpr int kPart = P > 4 ? 4 : P;
      Vec value[kTiles][kPart];
#pragma GCC unroll 8
      for (int u = 0; u < kTiles; u++) {
        auto keep = [&](int p, Vec x) { value[u][p] = x; };
        auto upper = [&] { return shift_then_256(load_u8(codes + (W + w % behind) * T + slot + u * kLanes), w >= behind); };
        if (half == 0) for_planes<kKind, 0, kPart>(row + u * kLanes * kUnit, upper, book, keep);
        else for_planes<kKind, P - kPart, P>(row + u * kLanes * kUnit, upper, book, keep);
      }
#pragma GCC unroll 8
      for (int p = 0; p < kPart; p++)
#pragma GCC unroll 8
        for (int g = 0; g < G; g++) {
          const Vec factor = splat(q[(g * P + half * kPart + p) * kQueryStride + w]);
          const int to = kApart ? p * G + g : g;
#pragma GCC unroll 8
          for (int u = 0; u < kTiles; u++) sum[u][to] = fma(value[u][p], factor, sum[u][to]);
        }
    }
  }
#pragma GCC unroll 8
  for (int u = 0; u < kTiles; u++)
#pragma GCC unroll 8
    for (int g = 0; g < kSums; g++) store(out + g * out_stride + u * kLanes, sum[u][g]);
}

// See KeyDots.
template <int kKind, int G, bool kApart>
void key_dots(const uint8_t* codes, long T, long W, long begin, long end, const float* q, int first, int last, const float* levels, float* out,
              long out_stride) {
  float every[16];
  const Book book = book_of<kKind>(levels, every);
  constexpr int kSums = kApart ? planes_of(kKind) * G : G;
  constexpr bool kFew = planes_of(kKind) == 1;
  constexpr int kTiles = kRegisters >= 32 ? (kSums >= 4 || planes_of(kKind) > 2 ? 2 : 4) : kFew ? (kSums >= 4 ? 2 : 4) : (kSums >= 4 && !(kApart && kSums <= 6) ? 1 : 2);
  long slot = begin;
  for (; end - slot >= kLanes * kTiles; slot += kLanes * kTiles)
    dot_tile<kKind, G, kTiles, kApart>(codes, T, W, slot, q, first, last, book, out + slot - begin, out_stride);
  if constexpr (kFew && kTiles > 2)
    for (; end - slot >= 2 * kLanes; slot += 2 * kLanes)
      dot_tile<kKind, G, 2, kApart>(codes, T, W, slot, q, first, last, book, out + slot - begin, out_stride);
  for (; end - slot >= kLanes; slot += kLanes)
    dot_tile<kKind, G, 1, kApart>(codes, T, W, slot, q, first, last, book, out + slot - begin, out_stride);
  if (slot < end) {  // the rest: a whole register that begins early enough to stay inside the page
    const long early = slot + kLanes <= T ? slot : T > kLanes ? T - kLanes : 0;
    float spare[kSums * kLanes];
    dot_tile<kKind, G, 1, kApart>(codes, T, W, early, q, first, last, book, spare, kLanes);
    for (int g = 0; g < kSums; g++)
      for (long t = slot; t < end; t++) out[g * out_stride + t - begin] = spare[g * kLanes + t - early];
  }
}

const KeyDots kKeyDots[kMaxGroup][kNumKinds] = {
    KVB_KINDS(key_dots, 1, false), KVB_KINDS(key_dots, 2, false), KVB_KINDS(key_dots, 3, false), KVB_KINDS(key_dots, 4, false)};

const KeyDots kKeyDotsApart[kMaxGroup][2] = {{key_dots<kCode4, 1, true>, key_dots<kBook4, 1, true>},
                                             {key_dots<kCode4, 2, true>, key_dots<kBook4, 2, true>},
                                             {key_dots<kCode4, 3, true>, key_dots<kBook4, 3, true>},
                                             {key_dots<kCode4, 4, true>, key_dots<kBook4, 4, true>}};

}  // namespace kvb
