// The two inner loops of attention over a page: keys against queries, and weights against values, for every kind of element.
//
// Legend: D channels; T slots per page; P planes of a coded byte; W = D / P bytes (or elements) of one slot; G query heads that are
// worked on at once, 1 to 4, so that each element is read and widened once for all of them.
#pragma once

#include "simd.h"

namespace kvb {

// Codes that are whole numbers themselves; elements; codes that stand for whole numbers in a table. Of 3 bits, the lower two lie as codes of
// 2 bits do, in W = D / 4 bytes, and the third as codes of 1 bit, in the D / 8 bytes behind those (`upper`).
enum Kind { kCode1, kCode2, kCode4, kCode8, kF16, kBF16, kF32, kFp8, kBook2, kBook3, kBook4, kNumKinds };

constexpr int kMaxChannels = 512;
// Stride between the planes of a query: no multiple of 4 KiB, so that the planes do not compete for the same cache sets.
constexpr int kQueryStride = kMaxChannels + 16;
constexpr int kMaxGroup = 4;

constexpr bool is_code(int kind) { return kind <= kCode8 || kind >= kBook2; }
constexpr int bits_of(int kind) {
  return kind <= kCode8 ? 1 << kind : kind >= kBook2 ? kind - kBook2 + 2 : kind == kF32 ? 32 : kind == kFp8 ? 8 : 16;
}
constexpr int planes_of(int kind) { return is_code(kind) ? 8 / (bits_of(kind) == 3 ? 2 : bits_of(kind)) : 1; }
// Bytes (or elements) of one slot, from those that its planes lie in.
constexpr long units_of(int kind, long width) { return kind == kBook3 ? width + width / 2 : width; }
constexpr int unit_bytes_of(int kind) { return kind == kF32 ? 4 : kind == kF16 || kind == kBF16 ? 2 : 1; }

constexpr long kNextPages = 2;  // a page may be done before a byte asked for at its begin has come

// Bytes that are needed soon: two runs, asked for a few lines at a time, because a CPU waits where too many are asked for at once. They are
// asked for into the second cache: the first one takes no more requests than the loads of the page at hand leave it.
struct Ahead {
  const uint8_t *at = nullptr, *end = nullptr, *more = nullptr, *more_end = nullptr;
  __attribute__((always_inline)) long lines() const { return ((end - at) + (more_end - more)) / 64 + 2; }
  __attribute__((always_inline)) void some(long count) {
    for (; count > 0 && at < end; count--, at += 64) __builtin_prefetch(at, 0, 2);
    for (; count > 0 && more < more_end; count--, more += 64) __builtin_prefetch(more, 0, 2);
  }
  __attribute__((always_inline)) void rest() { some(lines() + 2); }
};

// One register of elements, before and after its planes are taken apart.
template <int kKind> KVB_INLINE Vec load_elements(const uint8_t* p) {
  if constexpr (kKind == kF16) return load_f16(p);
  else if constexpr (kKind == kBF16) return load_bf16(p);
  else if constexpr (kKind == kF32) return load((const float*)p);
  else return load_fp8(p);
}

template <int kKind, int kPlane> KVB_INLINE Vec element(Ints packed, const Book& book) {
  if constexpr (kKind < kBook2) return plane<kPlane * bits_of(kKind), bits_of(kKind)>(packed);
  else if constexpr (kKind != kBook3) return look_up(book, code_bits<kPlane * bits_of(kKind), (1 << bits_of(kKind)) - 1>(packed));
  else return look_up(book, either(code_bits<2 * kPlane, 3>(packed), code_bits<2 * kPlane + 6, 4>(packed)));
}

// Calls f(plane, vector) for the planes [kFirst, kLast) of the elements at p; of 3 bits, the upper ones from upper().
template <int kKind, int kFirst, int kLast, class Upper, class F>
KVB_INLINE void for_planes(const uint8_t* p, Upper upper, const Book& book, F f) {
  if constexpr (!is_code(kKind)) {
    f(0, load_elements<kKind>(p));
  } else {
    Ints packed = load_u8(p);
    if constexpr (kKind == kBook3) packed = either(packed, upper());
    f(0, element<kKind, kFirst>(packed, book));
    if constexpr (kLast - kFirst > 1) f(1, element<kKind, kFirst + 1>(packed, book));
    if constexpr (kLast - kFirst > 2) f(2, element<kKind, kFirst + 2>(packed, book));
    if constexpr (kLast - kFirst > 3) f(3, element<kKind, kFirst + 3>(packed, book));
  }
}

// The upper bits of the codes in bytes [w, w + kLanes) of a row, times 256; those past the row's W are anything.
KVB_INLINE Ints load_upper(const uint8_t* row, long W, long w) {
  const long half = W / 2;
  if (w + kLanes <= half || (w >= half && w - half + kLanes <= half)) return shift_then_256(load_u8(row + W + w % half), w >= half);
  uint8_t bytes[kLanes];
  for (long i = 0; i < kLanes; i++) bytes[i] = w + i < half ? row[W + w + i] : w + i < W ? row[half + w + i] >> 1 : 0;
  return shift_then_256(load_u8(bytes), 0);
}

// One code of a row whose bytes are byte(0), byte(1), ..
template <class Byte> KVB_INLINE int code_at(int kind, long width, long channel, Byte byte) {
  const long w = channel % width, plane = channel / width, half = width / 2;
  if (kind != kBook3) return byte(w) >> (plane * bits_of(kind)) & ((1 << bits_of(kind)) - 1);
  return (byte(w) >> 2 * plane & 3) | (byte(width + w % half) >> (2 * plane + w / half) & 1) << 2;
}

// An element, or a code as it is.
inline float scalar_element(int kind, const uint8_t* row, int width, int channel) {
  const uint8_t* p = row + (long)(channel % width) * unit_bytes_of(kind);
  uint16_t half;
  float value;
  switch (kind) {
    case kF16: std::memcpy(&half, p, 2); return scalar_f16(half);
    case kBF16: std::memcpy(&half, p, 2); return scalar_bf16(half);
    case kF32: std::memcpy(&value, p, 4); return value;
    case kFp8: return kFp8Values.value[*p];
    default: return float(code_at(kind, width, channel, [&](long w) { return row[w]; }));
  }
}

// Widens n elements of one plane to floats.
template <int kKind> inline void widen(const uint8_t* p, long n, float* out) {
  long i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, load_elements<kKind>(p + i * unit_bytes_of(kKind)));
  for (; i < n; i++) out[i] = scalar_element(kKind, p, int(n), int(i));
}

// Keys ----------------------------------------------------------------------------------------------------------------------------------

// kTiles registers of slots from `slot` on against G queries; bytes (or elements) [first, last) of each slot.
template <int kKind, int G, int kTiles>
KVB_INLINE void dot_tile(const uint8_t* codes, long T, long W, long slot, const float* q, int first, int last, const Book& book, float* out,
                         long out_stride) {
  constexpr int P = planes_of(kKind), kUnit = unit_bytes_of(kKind);
  Vec sum[kTiles][G];
#pragma GCC unroll 8
  for (int u = 0; u < kTiles; u++)
#pragma GCC unroll 8
    for (int g = 0; g < G; g++) sum[u][g] = splat(0.0f);
  const uint8_t* row = codes + (first * T + slot) * kUnit;
  const long behind = W / 2;
  for (int w = first; w < last; w++, row += T * kUnit) {
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
#pragma GCC unroll 8
          for (int u = 0; u < kTiles; u++) sum[u][g] = fma(value[u][p], factor, sum[u][g]);
        }
    }
  }
#pragma GCC unroll 8
  for (int u = 0; u < kTiles; u++)
#pragma GCC unroll 8
    for (int g = 0; g < G; g++) store(out + g * out_stride + u * kLanes, sum[u][g]);
}

// Raw dots of G queries [G][P][kQueryStride] with slots [begin, end) of a page's K region. Where T < kLanes, up to kLanes - T
// elements after the region are read, and come to nothing.
// out[g * out_stride + slot - begin].
template <int kKind, int G>
void key_dots(const uint8_t* codes, long T, long W, long begin, long end, const float* q, int first, int last, const float* levels, float* out,
              long out_stride) {
  const Book book = load_book(levels);
  constexpr int kTiles = kRegisters >= 32 ? (G >= 4 || planes_of(kKind) > 2 ? 2 : 4) : (G >= 4 ? 1 : 2);
  long slot = begin;
  for (; end - slot >= kLanes * kTiles; slot += kLanes * kTiles)
    dot_tile<kKind, G, kTiles>(codes, T, W, slot, q, first, last, book, out + slot - begin, out_stride);
  for (; end - slot >= kLanes; slot += kLanes)
    dot_tile<kKind, G, 1>(codes, T, W, slot, q, first, last, book, out + slot - begin, out_stride);
  if (slot < end) {  // the rest: a whole register that begins early enough to stay inside the page
    const long early = slot + kLanes <= T ? slot : T > kLanes ? T - kLanes : 0;
    float spare[G * kLanes];
    dot_tile<kKind, G, 1>(codes, T, W, early, q, first, last, book, spare, kLanes);
    for (int g = 0; g < G; g++)
      for (long t = slot; t < end; t++) out[g * out_stride + t - begin] = spare[g * kLanes + t - early];
  }
}

typedef void (*KeyDots)(const uint8_t*, long, long, long, long, const float*, int, int, const float*, float*, long);

// Values --------------------------------------------------------------------------------------------------------------------------------

// Weights of a page's slots: [group][query head][slot].
struct Weights {
  const float* at;
  long group_stride, head_stride;
  int group_channels;
};

// Adds n weighted slots to kTiles registers of bytes from `w` on, planes [kFirst, kLast), G heads. `padded` is W rounded up to whole
// registers, sum is [G][P][padded]. In the last register of a row the lanes past W gather what follows it; nobody reads them.
template <int kKind, int G, int kTiles, int kFirst, int kLast, bool kGrouped>
KVB_INLINE void value_tile(const uint8_t* codes, long W, long T, long n, Weights weights, long w, long padded, const Book& book, float* sum) {
  constexpr int P = planes_of(kKind), kPart = kLast - kFirst, kUnit = unit_bytes_of(kKind);
  const long S = units_of(kKind, W);  // from slot to slot
  Vec acc[kTiles][kPart][G];
  const float* from[kGrouped ? kPart : 1];
  for (int p = 0; p < (kGrouped ? kPart : 1); p++)
    from[p] = weights.at + (kGrouped ? ((kFirst + p) * W + w) / weights.group_channels * weights.group_stride : 0);
#pragma GCC unroll 8
  for (int u = 0; u < kTiles; u++)
#pragma GCC unroll 8
    for (int p = 0; p < kPart; p++)
#pragma GCC unroll 8
      for (int g = 0; g < G; g++) acc[u][p][g] = load(sum + (g * P + kFirst + p) * padded + w + u * kLanes);
  auto step = [&](const uint8_t* row, long t) __attribute__((always_inline)) {  // row: the bytes from w on
    Vec factor[kGrouped ? kPart : 1][G];
#pragma GCC unroll 8
    for (int p = 0; p < (kGrouped ? kPart : 1); p++)
#pragma GCC unroll 8
      for (int g = 0; g < G; g++) factor[p][g] = splat(from[p][g * weights.head_stride + t]);
#pragma GCC unroll 8
    for (int u = 0; u < kTiles; u++)
      for_planes<kKind, kFirst, kLast>(
          row + u * kLanes * kUnit, [&] { return load_upper(codes + t * S, W, w + u * kLanes); }, book,
          [&](int p, Vec x) __attribute__((always_inline)) {
#pragma GCC unroll 8
            for (int g = 0; g < G; g++) acc[u][p][g] = fma(x, factor[kGrouped ? p : 0][g], acc[u][p][g]);
          });
  };
  long inside = n;  // slots whose register stays within the V region
  if (w + kTiles * kLanes > W) inside = (T * S - w - kLanes) / S + 1;
  inside = inside < 0 || T * S < w + kLanes ? 0 : inside < n ? inside : n;
  const uint8_t* row = codes + w * kUnit;
  for (long t = 0; t < inside; t++, row += S * kUnit) step(row, t);
  for (long t = inside; t < n; t++, row += S * kUnit) {
    uint8_t copy[kLanes * 4] = {0};
    std::memcpy(copy, row, (W - w) * kUnit);
    step(copy, t);
  }
#pragma GCC unroll 8
  for (int u = 0; u < kTiles; u++)
#pragma GCC unroll 8
    for (int p = 0; p < kPart; p++)
#pragma GCC unroll 8
      for (int g = 0; g < G; g++) store(sum + (g * P + kFirst + p) * padded + w + u * kLanes, acc[u][p][g]);
}

template <int kKind, int G, int kTiles, int kFirst, bool kGrouped>
KVB_INLINE void value_planes(const uint8_t* codes, long W, long T, long n, Weights weights, long w, long padded, const Book& book, float* sum) {
  constexpr int P = planes_of(kKind), kLimit = kRegisters >= 32 ? 4 : 2, kLast = kFirst + kLimit < P ? kFirst + kLimit : P;
  value_tile<kKind, G, kTiles, kFirst, kLast, kGrouped>(codes, W, T, n, weights, w, padded, book, sum);
  if constexpr (kLast < P) value_planes<kKind, G, kTiles, kLast, kGrouped>(codes, W, T, n, weights, w, padded, book, sum);
}

template <int kKind, int G, bool kGrouped>
void add_values(const uint8_t* codes, long W, long T, long n, Weights weights, long padded, const float* levels, float* sum) {
  const Book book = load_book(levels);
  // Several registers of a row at once share the broadcast weights, and give the adders something to do while one waits. A group
  // of channels must not change between them.
  constexpr int kWide = kGrouped || kRegisters < 32 ? 1 : planes_of(kKind) == 1 ? 4 : planes_of(kKind) == 2 ? 2 : 1;
  long w = 0;
  for (; w + kWide * kLanes <= W; w += kWide * kLanes)
    value_planes<kKind, G, kWide, 0, kGrouped>(codes, W, T, n, weights, w, padded, book, sum);
  for (; w < W; w += kLanes) value_planes<kKind, G, 1, 0, kGrouped>(codes, W, T, n, weights, w, padded, book, sum);
}

typedef void (*AddValues)(const uint8_t*, long, long, long, Weights, long, const float*, float*);

// Tables --------------------------------------------------------------------------------------------------------------------------------

#define KVB_KINDS(NAME, ...)                                                                                          \
  {NAME<kCode1, __VA_ARGS__>, NAME<kCode2, __VA_ARGS__>, NAME<kCode4, __VA_ARGS__>, NAME<kCode8, __VA_ARGS__>,          \
   NAME<kF16, __VA_ARGS__>,   NAME<kBF16, __VA_ARGS__>,  NAME<kF32, __VA_ARGS__>,   NAME<kFp8, __VA_ARGS__>,          \
   NAME<kBook2, __VA_ARGS__>, NAME<kBook3, __VA_ARGS__>, NAME<kBook4, __VA_ARGS__>}

static const KeyDots kKeyDots[kMaxGroup][kNumKinds] = {
    KVB_KINDS(key_dots, 1), KVB_KINDS(key_dots, 2), KVB_KINDS(key_dots, 3), KVB_KINDS(key_dots, 4)};
static const AddValues kAddValues[2][kMaxGroup][kNumKinds] = {
    {KVB_KINDS(add_values, 1, false), KVB_KINDS(add_values, 2, false), KVB_KINDS(add_values, 3, false), KVB_KINDS(add_values, 4, false)},
    {KVB_KINDS(add_values, 1, true), KVB_KINDS(add_values, 2, true), KVB_KINDS(add_values, 3, true), KVB_KINDS(add_values, 4, true)}};

}  // namespace kvb
