// The two inner loops of attention over a page: keys against queries (key_dots.cpp), and weights against values (add_values.cpp), for every
// kind of element; and what they are made of.
//
// Legend: D channels; T slots per page; P planes of a coded byte; W = D / P bytes (or elements) of one slot; G query heads that are
// worked on at once, 1 to 4, so that each element is read and widened once for all of them.
#pragma once

#include <type_traits>

#include "simd.h"

namespace kvb {

// Codes that are whole numbers themselves; elements; codes that stand for whole numbers in a table. Of 3 bits, the lower two lie as codes of
// 2 bits do, in W = D / 4 bytes, and the third as codes of 1 bit, in the D / 8 bytes behind those (`upper`). Kinds from kNumKinds on are unpacked
// to others (unpack.h) before any loop sees them, but those of digits.h: codes of 5 bits, whose lower four lie as codes of 4 bits do, e5m2 floats,
// and values that are a page's keys (kKeys), of which no byte is stored.
enum Kind { kCode1, kCode2, kCode4, kCode8, kF16, kBF16, kF32, kFp8, kBook2, kBook3, kBook4, kNumKinds, kCode5 = kNumKinds, kE5m2, kKeys };

constexpr int kMaxChannels = 576;  // a latent vector of 512 and a rotary key of 64
// Stride between the planes of a query: no multiple of 4 KiB, so that the planes do not compete for the same cache sets.
constexpr int kQueryStride = kMaxChannels + 16;
constexpr int kMaxGroup = 4;

constexpr bool in_table(int kind) { return kind >= kBook2 && kind <= kBook4; }
constexpr bool is_code(int kind) { return kind <= kCode8 || in_table(kind) || kind == kCode5; }
constexpr int bits_of(int kind) {
  if (kind >= kNumKinds) return kind == kCode5 ? 5 : 8;
  return kind <= kCode8 ? 1 << kind : kind >= kBook2 ? kind - kBook2 + 2 : kind == kF32 ? 32 : kind == kFp8 ? 8 : 16;
}
// Of 3 and 5 bits, those that lie in planes together, without the highest.
constexpr int lower_bits(int kind) { return bits_of(kind) == 3 || bits_of(kind) == 5 ? bits_of(kind) - 1 : bits_of(kind); }
constexpr bool has_upper(int kind) { return lower_bits(kind) < bits_of(kind); }
constexpr int planes_of(int kind) { return is_code(kind) ? 8 / lower_bits(kind) : 1; }
// Bytes (or elements) of one slot, from those that its planes lie in.
constexpr long units_of(int kind, long width) { return width + (has_upper(kind) ? width / lower_bits(kind) : 0); }
constexpr int unit_bytes_of(int kind) { return kind == kF32 ? 4 : kind == kF16 || kind == kBF16 ? 2 : kind == kKeys ? 0 : 1; }

constexpr long kNextPages = 2;  // a page may be done before a byte asked for at its begin has come

// Bytes that are needed soon: two runs, asked for a few lines at a time, because a CPU waits where too many are asked for at once. They are
// asked for into the second cache: the first one takes no more requests than the loads of the page at hand leave it.
struct Ahead {
  const uint8_t *at = nullptr, *end = nullptr, *more = nullptr, *more_end = nullptr;
  __attribute__((always_inline)) long lines() const { return ((end - at) + (more_end - more)) / 64 + 2; }
  __attribute__((always_inline)) void some(long count) {
    count -= ask(at, end, count);
    ask(more, more_end, count);
  }
  __attribute__((always_inline)) void rest() { some(lines() + 2); }

 private:
  // Asks for up to `count` lines of a run, which begins behind them from then on.
  __attribute__((always_inline)) static long ask(const uint8_t*& from, const uint8_t* to, long count) {
    const long lines = std::max<long>(0, std::min<long>(count, (to - from + 63) / 64));
    const uint8_t* const stop = from + 64 * lines;
#pragma GCC unroll 4
    for (; from != stop; from += 64) __builtin_prefetch(from, 0, 2);
    return lines;
  }
};

// The levels of a kind's codes, repeated where there are fewer than a table has room for, so that no look-up has to clear upper bits.
// `every` holds them, for as long as the book is used.
template <int kKind> KVB_INLINE Book book_of(const float* levels, float* every) {
  if constexpr (kKind == kBook2 || kKind == kBook3)
    for (int i = 0; i < 16; i++) every[i] = levels[i & ((1 << bits_of(kKind)) - 1)];
  return load_book(kKind == kBook2 || kKind == kBook3 ? every : levels);
}

// Calls f(first head, how many of them) for G heads, up to kMaxGroup at a time; how many is known when it is compiled.
template <class F> KVB_INLINE void for_heads(long G, F f) {
  static_assert(kMaxGroup == 4, "a case for each number");
  for (long g = 0; g < G; g += kMaxGroup) switch (G - g) {
      case 1: f(g, std::integral_constant<int, 1>()); break;
      case 2: f(g, std::integral_constant<int, 2>()); break;
      case 3: f(g, std::integral_constant<int, 3>()); break;
      default: f(g, std::integral_constant<int, 4>());
    }
}

// One register of elements, before and after its planes are taken apart.
template <int kKind> KVB_INLINE Vec load_elements(const uint8_t* p) {
  if constexpr (kKind == kF16) return load_f16(p);
  else if constexpr (kKind == kBF16) return load_bf16(p);
  else if constexpr (kKind == kF32) return load((const float*)p);
  else return load_fp8(p);
}

template <int kKind, int kPlane> KVB_INLINE Vec element(Ints packed, const Book& book) {
  if constexpr (kKind < kBook2) return plane<kPlane * bits_of(kKind), bits_of(kKind)>(packed);
  else if constexpr (kKind == kBook2) return look_up<2>(book, shifted<2 * kPlane>(packed));
  else if constexpr (kKind == kBook4) return look_up<4>(book, kPlane ? shifted<4>(packed) : masked<15>(packed));
  else {
    const Ints code = masked<0x103>(shifted<2 * kPlane>(packed));
    return look_up<3>(book, either(code, shifted<6>(code)));
  }
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
  const int bits = lower_bits(kind);
  const long w = channel % width, plane = channel / width, each = width / bits;
  const int code = byte(w) >> (plane * bits) & ((1 << bits) - 1);
  return bits == bits_of(kind) ? code : code | (byte(width + w % each) >> (channel / each) & 1) << bits;
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
    case kE5m2: return scalar_f16(uint16_t(*p << 8));
    default: return float(code_at(kind, width, channel, [&](long w) { return row[w]; }));
  }
}

// Widens n elements of one plane to floats.
template <int kKind> inline void widen(const uint8_t* p, long n, float* out) {
  long i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, load_elements<kKind>(p + i * unit_bytes_of(kKind)));
  for (; i < n; i++) out[i] = scalar_element(kKind, p, int(n), int(i));
}

// Tables --------------------------------------------------------------------------------------------------------------------------------

// A loop is compiled for every kind of element and every number of query heads, which takes a while: the two tables of them are files of
// their own, which a build compiles side by side.
#define KVB_KINDS(NAME, ...)                                                                                          \
  {NAME<kCode1, __VA_ARGS__>, NAME<kCode2, __VA_ARGS__>, NAME<kCode4, __VA_ARGS__>, NAME<kCode8, __VA_ARGS__>,          \
   NAME<kF16, __VA_ARGS__>,   NAME<kBF16, __VA_ARGS__>,  NAME<kF32, __VA_ARGS__>,   NAME<kFp8, __VA_ARGS__>,          \
   NAME<kBook2, __VA_ARGS__>, NAME<kBook3, __VA_ARGS__>, NAME<kBook4, __VA_ARGS__>}

// Raw dots of G queries [G][P][kQueryStride] with slots [begin, end) of a page's K region. Where T < kLanes, up to kLanes - T
// elements after the region are read, and come to nothing.
// out[g * out_stride + slot - begin].
typedef void (*KeyDots)(const uint8_t*, long, long, long, long, const float*, int, int, const float*, float*, long);

// What each channel of a key is multiplied by, and what is added then.
struct Channels {
  const float *by, *zero;
};

// Dots of G queries [G][kQueryStride] with keys of slots [begin, end), whose channels c and c + D / 2 are turned as a pair first, by the cosine and
// sine of [c][slot]; T is at least kLanes. out[g * out_stride + slot - begin].
typedef void (*TurnedDots)(const uint8_t*, long, long, long, long, const float*, Channels, const float*, const float*, const float*, float*, long);

// Weights of a page's slots: [group][query head][slot].
struct Weights {
  const float* at;
  long group_stride, head_stride;
  int group_channels;
};

// Adds n weighted slots to the sums of G heads [G][P][padded]; `padded` is W rounded up to whole registers.
typedef void (*AddValues)(const uint8_t*, long, long, long, Weights, long, const float*, float*);

extern const KeyDots kKeyDots[kMaxGroup][kNumKinds];
// The same for codes of 4 bits (kCode4, kBook4), the dots of each of the two planes apart: out[(plane * G + g) * out_stride + slot - begin].
extern const KeyDots kKeyDotsApart[kMaxGroup][2];
extern const TurnedDots kTurnedDots[kMaxGroup][kNumKinds];  // codes have scales of their channels, elements have none
extern const AddValues kAddValues[2][kMaxGroup][kNumKinds];  // the second ones for several groups of channels

}  // namespace kvb
