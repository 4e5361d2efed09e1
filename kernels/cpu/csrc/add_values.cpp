// Values of a page, weighted, for every kind of element. Legend as in sides.h.
#include <type_traits>

#include "sides.h"

namespace kvb {

// Adds n weighted slots to kTiles registers of bytes from `w` on, planes [kFirst, kLast), G heads. `padded` is W rounded up to whole
// registers, sum is [G][P][padded]. In the last register of a row the lanes past W gather what follows it; nobody reads them.
template <int kKind, int G, int kTiles, int kFirst, int kLast, bool kGrouped>
KVB_INLINE void value_tile(const uint8_t* codes, long W, long T, long n, Weights weights, long w, long padded, const Book& book, float* sum) {
  constexpr int P = planes_of(kKind), kPart = kLast - kFirst, kUnit = unit_bytes_of(kKind);
  const long S = units_of(kKind, W);  // from slot to slot
  // Sums of every other slot are apart where there are too few of them to keep the adders busy.
  constexpr int kSets = kGrouped && kKind == kCode8 && kTiles == 2 && G < 4 && kRegisters < 32 ? 2 : 1;
  Vec acc[kSets][kTiles][kPart][G];
  const float* from[kGrouped ? kPart : 1];
  for (int p = 0; p < (kGrouped ? kPart : 1); p++)
    from[p] = weights.at + (kGrouped ? ((kFirst + p) * W + w) / weights.group_channels * weights.group_stride : 0);
#pragma GCC unroll 8
  for (int u = 0; u < kTiles; u++)
#pragma GCC unroll 8
    for (int p = 0; p < kPart; p++)
#pragma GCC unroll 8
      for (int g = 0; g < G; g++) {
        acc[0][u][p][g] = load(sum + (g * P + kFirst + p) * padded + w + u * kLanes);
        if constexpr (kSets > 1) acc[1][u][p][g] = splat(0.0f);
      }
  auto step = [&](const uint8_t* row, long t, int set) __attribute__((always_inline)) {  // row: the bytes from w on
    Vec factor[kGrouped ? kPart : 1][G];
#pragma GCC unroll 8
    for (int p = 0; p < (kGrouped ? kPart : 1); p++)
#pragma GCC unroll 8
      for (int g = 0; g < G; g++) factor[p][g] = splat(from[p][g * weights.head_stride + t]);
#pragma GCC unroll 8
    for (int u = 0; u < kTiles; u++) {
      for_planes<kKind, kFirst, kLast>(
          row + u * kLanes * kUnit, [&] { return load_upper(codes + t * S, W, w + u * kLanes); }, book,
          [&](int p, Vec x) __attribute__((always_inline)) {
#pragma GCC unroll 8
            for (int g = 0; g < G; g++) acc[set][u][p][g] = fma(x, factor[kGrouped ? p : 0][g], acc[set][u][p][g]);
          });
    }
  };
  long inside = n;  // slots whose register stays within the V region
  if (w + kTiles * kLanes > W) inside = (T * S - w - kLanes) / S + 1;
  inside = inside < 0 || T * S < w + kLanes ? 0 : inside < n ? inside : n;
  const uint8_t* row = codes + w * kUnit;
  long begin = 0;
  if constexpr (kSets > 1)
    for (; begin + 2 <= inside; begin += 2, row += 2 * S * kUnit) {
      step(row, begin, 0);
      step(row + S * kUnit, begin + 1, 1);
    }
  for (long t = begin; t < inside; t++, row += S * kUnit) step(row, t, 0);
  if constexpr (kTiles == 1)  // several registers at once are always inside
    for (long t = inside; t < n; t++, row += S * kUnit) {
      uint8_t copy[kLanes * 4] = {0};
      std::memcpy(copy, row, (W - w) * kUnit);
      step(copy, t, 0);
    }
#pragma GCC unroll 8
  for (int u = 0; u < kTiles; u++)
#pragma GCC unroll 8
    for (int p = 0; p < kPart; p++)
#pragma GCC unroll 8
      for (int g = 0; g < G; g++) {
        if constexpr (kSets > 1) acc[0][u][p][g] = add(acc[0][u][p][g], acc[1][u][p][g]);
        store(sum + (g * P + kFirst + p) * padded + w + u * kLanes, acc[0][u][p][g]);
      }
}

template <int kKind, int G, int kTiles, int kFirst, bool kGrouped>
KVB_INLINE void value_planes(const uint8_t* codes, long W, long T, long n, Weights weights, long w, long padded, const Book& book, float* sum) {
  constexpr int P = planes_of(kKind), kLimit = kRegisters >= 32 || kKind == kBook3 ? 4 : 2, kLast = kFirst + kLimit < P ? kFirst + kLimit : P;
  value_tile<kKind, G, kTiles, kFirst, kLast, kGrouped>(codes, W, T, n, weights, w, padded, book, sum);
  if constexpr (kLast < P) value_planes<kKind, G, kTiles, kLast, kGrouped>(codes, W, T, n, weights, w, padded, book, sum);
}

template <int kKind, int G, bool kGrouped>
void add_values(const uint8_t* codes, long W, long T, long n, Weights weights, long padded, const float* levels, float* sum) {
  float every[16];
  const Book book = book_of<kKind>(levels, every);
  // Several registers of a row at once share the broadcast weights, and give the adders something to do while one waits. A group
  // of channels must not change between them.
  constexpr int P = planes_of(kKind), kMany = P > 2 ? 1 : kRegisters >= 32 || (P == 1 && G < 4) ? 4 / P : 2 / P;
  constexpr int kWide = kGrouped && kKind != kCode8 ? 1 : kMany;
  long w = 0;
  auto pass = [&](auto registers) __attribute__((always_inline)) {
    constexpr int kThese = decltype(registers)::value;
    if (kGrouped && kThese > 1 && weights.group_channels % (kThese * kLanes)) return;
    for (; w + kThese * kLanes <= W || (kThese == 1 && w < W); w += kThese * kLanes)
      value_planes<kKind, G, kThese, 0, kGrouped>(codes, W, T, n, weights, w, padded, book, sum);
  };
  pass(std::integral_constant<int, kWide>());
  if constexpr (kWide > 2) pass(std::integral_constant<int, 2>());
  if constexpr (kWide > 1) pass(std::integral_constant<int, 1>());
}

const AddValues kAddValues[2][kMaxGroup][kNumKinds] = {
    {KVB_KINDS(add_values, 1, false), KVB_KINDS(add_values, 2, false), KVB_KINDS(add_values, 3, false), KVB_KINDS(add_values, 4, false)},
    {KVB_KINDS(add_values, 1, true), KVB_KINDS(add_values, 2, true), KVB_KINDS(add_values, 3, true), KVB_KINDS(add_values, 4, true)}};

}  // namespace kvb
