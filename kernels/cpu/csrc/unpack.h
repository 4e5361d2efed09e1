// Elements that are dear to widen, made cheap a page at a time: codes of tables become bytes of levels, which the loops read as codes of 8 bits,
// and e4m3 floats become fp16, whose widening from memory is one instruction. A register holds 32 bytes of either, so that this takes a tenth of
// an instruction per code and a quarter per float; in the loops, where a register holds eight floats, it would take several times as many.
// Meanwhile the bytes of `ahead` are asked for, about as many as are read: a page's worth at once would let the reads wait behind it.
//
// Legend as in sides.h.
#pragma once

#include "sides.h"

namespace kvb {

// Codes of 5 bits as bytes: of `rows` rows of W bytes each and the upper bits behind them, `run` codes that lie side by side at a time.
static void unpack_code5(const uint8_t* from, long rows, long D, long run, uint8_t* __restrict out) {
  const long W = D / 2, each = D / 8;
  for (long row = 0; row < rows; row++, from += (W + each) * run, out += D * run)
    for (int p = 0; p < 8; p++) {
      const uint8_t *lower = from + p % 4 * each * run, *upper = from + W * run;
      uint8_t* to = out + p * each * run;
      const int shift = p / 4 * 4;
      long i = 0;
      for (; i + 8 <= each * run; i += 8) {  // eight at once in any build: of values there are often no more
        uint64_t low, high;
        std::memcpy(&low, lower + i, 8);
        std::memcpy(&high, upper + i, 8);
        low = (low >> shift & 0x0f0f0f0f0f0f0f0fu) | (high >> p & 0x0101010101010101u) << 4;
        std::memcpy(to + i, &low, 8);
      }
      for (; i < each * run; i++) to[i] = uint8_t((lower[i] >> shift & 15) | (upper[i] >> p & 1) << 4);
    }
}

// e5m2 floats are the upper halves of fp16.
static void unpack_e5m2(const uint8_t* from, long n, uint8_t* __restrict out) {
  for (long i = 0; i < n; i++) {
    const uint16_t half = uint16_t(from[i] << 8);
    std::memcpy(out + 2 * i, &half, 2);
  }
}

#if defined(KVB_UNPACK)

KVB_INLINE Ints both_halves(const uint8_t* table) { return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table)); }
KVB_INLINE Ints bytes_of(int byte) { return _mm256_set1_epi8(char(byte)); }

// The levels of the lower and of the upper half of each byte; `shuffle` looks at no bits but the lowest four and the highest.
KVB_INLINE Ints lower_levels(Ints book, Ints codes) { return _mm256_shuffle_epi8(book, codes); }
KVB_INLINE Ints upper_levels(Ints book, Ints codes) { return _mm256_shuffle_epi8(book, _mm256_srli_epi16(codes, 4)); }

// Codes of 3 bits, a half byte each: planes 0 and 2, and planes 1 and 3. `thirds` holds the third bit of plane p in bit 2p.
KVB_INLINE Ints even_planes(Ints packed, Ints thirds) {
  return _mm256_or_si256(_mm256_and_si256(packed, bytes_of(0x33)), _mm256_and_si256(_mm256_slli_epi16(thirds, 2), bytes_of(0x44)));
}
KVB_INLINE Ints odd_planes(Ints packed, Ints thirds) {
  return _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(packed, 2), bytes_of(0x33)), _mm256_and_si256(thirds, bytes_of(0x44)));
}

KVB_INLINE Ints load_32(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
KVB_INLINE void store_32(uint8_t* p, Ints x) { _mm256_storeu_si256((__m256i*)p, x); }
KVB_INLINE Ints load_two_16(const uint8_t* low, const uint8_t* high) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)low)), _mm_loadu_si128((const __m128i*)high), 1);
}
KVB_INLINE void store_two_16(uint8_t* low, uint8_t* high, Ints x) {
  _mm_storeu_si128((__m128i*)low, _mm256_castsi256_si128(x));
  _mm_storeu_si128((__m128i*)high, _mm256_extracti128_si256(x, 1));
}

// Calls f(first byte) for all runs of 32 among n bytes, n at least 32, the last of which may overlap the one before it.
template <class F> KVB_INLINE void for_runs(long n, F f) {
  long i = 0;
  for (; i + 128 <= n; i += 128)
#pragma GCC unroll 4
    for (long more = 0; more < 128; more += 32) f(i + more);
  for (; i + 32 <= n; i += 32) f(i);
  if (n % 32) f(n - 32);
}

// n bytes of e4m3 floats, at least 32, in fp16 and 256 times smaller. NaN is looked for in all of them at once: 0x7f is the largest byte with a
// sign, and 0xff without.
static void unpack_fp8(const uint8_t* from, long n, uint8_t* out, Ahead& ahead) {
  Ints largest = bytes_of(0x80), highest = bytes_of(0);
  for_runs(n, [&](long i) __attribute__((always_inline)) {
    const Ints bytes = load_32(from + i);
    Ints low, high;
    if (i % 64 == 0) ahead.some(1);
    largest = _mm256_max_epi8(largest, bytes);
    highest = _mm256_max_epu8(highest, bytes);
    halves_of_fp8(bytes, &low, &high);
    store_32(out + 2 * i, low);
    store_32(out + 2 * i + 32, high);
  });
  const Ints none = _mm256_or_si256(_mm256_cmpeq_epi8(largest, bytes_of(0x7f)), _mm256_cmpeq_epi8(highest, bytes_of(0xff)));
  if (_mm256_testz_si256(none, none)) return;
  const uint16_t missing = 0x7e00;
  for (long i = 0; i < n; i++)
    if ((from[i] & 0x7f) == 0x7f) std::memcpy(out + 2 * i, &missing, 2);
}

// A page's keys [D][T] as levels, or in fp16; no fewer than 32 bytes lie in half a plane of them (unpacked_keys).
static __attribute__((noinline)) void unpack_key_tables(int kind, const uint8_t* table, const uint8_t* codes, long T, long D, uint8_t* out, Ahead& ahead) {
  if (kind == kFp8) return unpack_fp8(codes, D * T, out, ahead);
  const Ints book = both_halves(table);
  if (kind == kBook4) {
    const long plane = D / 2 * T;
    for_runs(plane, [&](long i) __attribute__((always_inline)) {
      const Ints packed = load_32(codes + i);
      if (i % 64 == 0) ahead.some(1);
      store_32(out + i, lower_levels(book, _mm256_and_si256(packed, bytes_of(15))));
      store_32(out + plane + i, lower_levels(book, _mm256_and_si256(_mm256_srli_epi16(packed, 4), bytes_of(15))));
    });
    return;
  }
  const long plane = D / 4 * T, half = plane / 2;
  for_runs(half, [&](long i) __attribute__((always_inline)) {
    const Ints both = load_32(codes + plane + i);
    ahead.some(i % 64 ? 1 : 2);
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
      uint8_t* to = out + h * half + i;
      const Ints packed = load_32(codes + h * half + i), thirds = h ? _mm256_srli_epi16(both, 1) : both;
      const Ints even = even_planes(packed, thirds), odd = odd_planes(packed, thirds);
      store_32(to, lower_levels(book, even));
      store_32(to + plane, lower_levels(book, odd));
      store_32(to + 2 * plane, upper_levels(book, even));
      store_32(to + 3 * plane, upper_levels(book, odd));
    }
  });
}

// A page's first n values (of codes of 3 bits, n rounded up to two) [n][D] as levels, or in fp16.
static __attribute__((noinline)) void unpack_value_tables(int kind, const uint8_t* table, const uint8_t* codes, long n, long D, uint8_t* out, Ahead& ahead) {
  if (kind == kFp8) return unpack_fp8(codes, n * D, out, ahead);
  const Ints book = both_halves(table);
  const long W = D / planes_of(kind), S = units_of(kind, W), half = W / 2;
  if (kind == kBook4) {
    for (long t = 0; t < n; t++, codes += S, out += D) {
      ahead.some(1);
      for (long w = 0; w < W; w += 32) {
        const Ints packed = load_32(codes + w);
        store_32(out + w, lower_levels(book, _mm256_and_si256(packed, bytes_of(15))));
        store_32(out + W + w, lower_levels(book, _mm256_and_si256(_mm256_srli_epi16(packed, 4), bytes_of(15))));
      }
    }
    return;
  }
  for (long w = 0; w < W; w += 16) {
    // Eight third bits at a time: those of the plane's second half lie one bit higher.
    const long low = w % half, high = (w + 8) % half;
    const __m128i by = _mm_set_epi64x(w + 8 >= half, w >= half);
    const Ints both = _mm256_set_m128i(by, by);
    const uint8_t* row = codes;
    uint8_t* to = out + w;
    for (long t = 0; t < n; t += 2, row += 2 * S, to += 2 * D) {
      auto thirds_of = [&](const uint8_t* upper) __attribute__((always_inline)) {
        return _mm_unpacklo_epi64(_mm_loadl_epi64((const __m128i*)(upper + low)), _mm_loadl_epi64((const __m128i*)(upper + high)));
      };
      const Ints packed = load_two_16(row + w, row + S + w);
      ahead.some(1);
      const Ints thirds = _mm256_srlv_epi64(_mm256_set_m128i(thirds_of(row + S + W), thirds_of(row + W)), both);
      const Ints even = even_planes(packed, thirds), odd = odd_planes(packed, thirds);
      store_two_16(to, to + D, lower_levels(book, even));
      store_two_16(to + W, to + D + W, lower_levels(book, odd));
      store_two_16(to + 2 * W, to + D + 2 * W, upper_levels(book, even));
      store_two_16(to + 3 * W, to + D + 3 * W, upper_levels(book, odd));
    }
  }
}

// n values of codes of 5 bits, 32 codes at a time. False where a run of highest bits does not divide a register, nor the other way round.
static bool unpack_fives(const uint8_t* codes, long n, long D, uint8_t* out) {
  const long W = D / 2, each = D / 8, S = W + each;
  if (each != 8 && each != 16 && each % 32) return false;
  for (long w = 0; w < W; w += 32) {
    alignas(32) uint8_t bit[32];
    for (long i = 0; i < 32; i++) bit[i] = uint8_t(1 << (w + i) / each);
    const Ints low = load_32(bit), high = _mm256_slli_epi16(low, 4), fifth = bytes_of(16), lower = bytes_of(15);
    const uint8_t* row = codes;
    uint8_t* to = out + w;
    for (long t = 0; t < n; t++, row += S, to += D) {
      const Ints packed = load_32(row + w);
      int64_t eight;
      std::memcpy(&eight, row + W, 8);
      const Ints upper = each == 8 ? _mm256_set1_epi64x(eight) : each == 16 ? both_halves(row + W) : load_32(row + W + w % each);
      auto with_fifth = [&](Ints four, Ints which) __attribute__((always_inline)) {
        const Ints set = _mm256_cmpeq_epi8(_mm256_and_si256(upper, which), which);
        return _mm256_or_si256(_mm256_and_si256(four, lower), _mm256_and_si256(set, fifth));
      };
      store_32(to, with_fifth(packed, low));
      store_32(to + W, with_fifth(_mm256_srli_epi16(packed, 4), high));
    }
  }
  return true;
}

static int cheap_keys(int kind, long T, long D) {
  const bool any = D * T >= 256;
  return any && (kind == kBook3 || kind == kBook4) ? kCode8 : any && kind == kFp8 ? kF16 : kind;
}
static int cheap_values(int kind, long D) {
  return D % 64 == 0 && (kind == kBook3 || kind == kBook4) ? kCode8 : D >= 32 && kind == kFp8 ? kF16 : kind;
}

#else

static void unpack_key_tables(int, const uint8_t*, const uint8_t*, long, long, uint8_t*, Ahead&) {}
static void unpack_value_tables(int, const uint8_t*, const uint8_t*, long, long, uint8_t*, Ahead&) {}
static bool unpack_fives(const uint8_t*, long, long, uint8_t*) { return false; }
static int cheap_keys(int kind, long, long) { return kind; }
static int cheap_values(int kind, long) { return kind; }

#endif

// What a kind of element is unpacked to, or itself where it is not: keys of T slots, of which all are; values of D channels.
static int unpacked_keys(int kind, long T, long D) { return kind == kCode5 ? kCode8 : kind == kE5m2 ? kF16 : cheap_keys(kind, T, D); }
static int unpacked_values(int kind, long D) {
  return kind == kCode5 ? kCode8 : kind == kE5m2 ? kF16 : kind == kKeys ? kF32 : cheap_values(kind, D);
}

static void unpack_keys(int kind, const uint8_t* table, const uint8_t* codes, long T, long D, uint8_t* out, Ahead& ahead) {
  if (kind < kNumKinds) return unpack_key_tables(kind, table, codes, T, D, out, ahead);
  if (kind == kCode5) unpack_code5(codes, 1, D, T, out);
  else unpack_e5m2(codes, D * T, out);
}
static void unpack_values(int kind, const uint8_t* table, const uint8_t* codes, long n, long D, uint8_t* out, Ahead& ahead) {
  if (kind < kNumKinds) return unpack_value_tables(kind, table, codes, n, D, out, ahead);
  if (kind == kE5m2) unpack_e5m2(codes, n * D, out);
  else if (!unpack_fives(codes, n, D, out)) unpack_code5(codes, n, D, 1, out);
}

// What numbers are smaller than those they stand for.
static float unpacked_unit(int kind, int unpacked) { return kind == kFp8 && unpacked == kF16 ? 256.0f : 1.0f; }

}  // namespace kvb
