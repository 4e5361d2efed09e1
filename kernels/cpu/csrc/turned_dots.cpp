// Keys of a page, scaled channel by channel and rotated, against queries, for every kind of element. Legend as in sides.h.
#include "sides.h"

namespace kvb {

// Channels a and b of kTiles registers of slots: scaled, turned as a pair, and added to the sums of G queries.
template <int G, int kTiles, bool kScaled>
KVB_INLINE void add_pair(const Vec (&first)[kTiles], const Vec (&second)[kTiles], long a, long b, const Channels& channels, const float* cos,
                         const float* sin, const float* q, Vec (&sum)[kTiles][G]) {
  Vec x[kTiles], y[kTiles];
#pragma GCC unroll 8
  for (int u = 0; u < kTiles; u++) {
    x[u] = kScaled ? fma(first[u], splat(channels.by[a]), splat(channels.zero[a])) : first[u];
    y[u] = kScaled ? fma(second[u], splat(channels.by[b]), splat(channels.zero[b])) : second[u];
    const Vec c = load(cos + u * kLanes), s = load(sin + u * kLanes), before = x[u];
    x[u] = fnma(y[u], s, mul(before, c));
    y[u] = fma(before, s, mul(y[u], c));
  }
#pragma GCC unroll 8
  for (int g = 0; g < G; g++) {
    const Vec by_a = splat(q[g * kQueryStride + a]), by_b = splat(q[g * kQueryStride + b]);
#pragma GCC unroll 8
    for (int u = 0; u < kTiles; u++) sum[u][g] = fma(y[u], by_b, fma(x[u], by_a, sum[u][g]));
  }
}

// kTiles registers of slots from `slot` on against G queries.
template <int kKind, int G, int kTiles, bool kScaled>
KVB_INLINE void turned_tile(const uint8_t* codes, long T, long W, long slot, const float* q, const Channels& channels, const float* cos,
                            const float* sin, const Book& book, float* out, long out_stride) {
  constexpr int P = planes_of(kKind), kUnit = unit_bytes_of(kKind);
  Vec sum[kTiles][G];
#pragma GCC unroll 8
  for (int u = 0; u < kTiles; u++)
#pragma GCC unroll 8
    for (int g = 0; g < G; g++) sum[u][g] = splat(0.0f);
  if constexpr (P == 1) {
    const long half = W / 2;
    for (long w = 0; w < half; w++) {
      Vec first[kTiles], second[kTiles];
#pragma GCC unroll 8
      for (int u = 0; u < kTiles; u++) {
        auto none = [] { return Ints(); };
        for_planes<kKind, 0, 1>(codes + (w * T + slot + u * kLanes) * kUnit, none, book, [&](int, Vec x) { first[u] = x; });
        for_planes<kKind, 0, 1>(codes + ((w + half) * T + slot + u * kLanes) * kUnit, none, book, [&](int, Vec x) { second[u] = x; });
      }
      add_pair<G, kTiles, kScaled>(first, second, w, w + half, channels, cos + w * T + slot, sin + w * T + slot, q, sum);
    }
  } else {
    const long behind = W / 2;
    for (long w = 0; w < W; w++) {
      Vec value[P][kTiles];
#pragma GCC unroll 8
      for (int u = 0; u < kTiles; u++) {
        const uint8_t* at = codes + (w * T + slot + u * kLanes) * kUnit;
        auto upper = [&] { return shift_then_256(load_u8(codes + (W + w % behind) * T + slot + u * kLanes), w >= behind); };
        auto keep = [&](int p, Vec x) { value[p][u] = x; };
        for_planes<kKind, 0, (P > 4 ? 4 : P)>(at, upper, book, keep);
        if constexpr (P > 4) for_planes<kKind, P - 4, P>(at, upper, book, [&](int p, Vec x) { value[p + 4][u] = x; });
      }
#pragma GCC unroll 4
      for (int p = 0; p < P / 2; p++) {
        const long a = p * W + w;
        add_pair<G, kTiles, kScaled>(value[p], value[p + P / 2], a, a + P / 2 * W, channels, cos + a * T + slot, sin + a * T + slot, q, sum);
      }
    }
  }
#pragma GCC unroll 8
  for (int u = 0; u < kTiles; u++)
#pragma GCC unroll 8
    for (int g = 0; g < G; g++) store(out + g * out_stride + u * kLanes, sum[u][g]);
}

// See TurnedDots.
template <int kKind, int G>
void turned_dots(const uint8_t* codes, long T, long W, long begin, long end, const float* q, Channels channels, const float* cos, const float* sin,
                 const float* levels, float* out, long out_stride) {
  constexpr bool kScaled = is_code(kKind);
  float every[16];
  const Book book = book_of<kKind>(levels, every);
  constexpr int kTiles = kRegisters >= 32 || (planes_of(kKind) <= 2 && G <= 3) ? 2 : 1;
  long slot = begin;
  for (; kTiles > 1 && end - slot >= kLanes * kTiles; slot += kLanes * kTiles)
    turned_tile<kKind, G, kTiles, kScaled>(codes, T, W, slot, q, channels, cos, sin, book, out + slot - begin, out_stride);
  for (; end - slot >= kLanes; slot += kLanes)
    turned_tile<kKind, G, 1, kScaled>(codes, T, W, slot, q, channels, cos, sin, book, out + slot - begin, out_stride);
  if (slot < end) {  // the rest: a whole register that begins early enough to stay inside the page
    const long early = std::min(slot, T - kLanes);
    float spare[G * kLanes];
    turned_tile<kKind, G, 1, kScaled>(codes, T, W, early, q, channels, cos, sin, book, spare, kLanes);
    for (int g = 0; g < G; g++)
      for (long t = slot; t < end; t++) out[g * out_stride + t - begin] = spare[g * kLanes + t - early];
  }
}

const TurnedDots kTurnedDots[kMaxGroup][kNumKinds] = {
    KVB_KINDS(turned_dots, 1), KVB_KINDS(turned_dots, 2), KVB_KINDS(turned_dots, 3), KVB_KINDS(turned_dots, 4)};

}  // namespace kvb
