// One vocabulary of vector operations for three kinds of machine: AVX-512, AVX2 with FMA and F16C, and everything else (NEON included)
// through the compilers' portable vectors. The kernels are written once, over `kLanes` floats at a time.
//
// Rule for NaN: `max_of(a, b)` returns b when either is NaN, so callers put the data second and NaN survives.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#define KVB_INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__) && !defined(KVBENCH_PORTABLE)
#if defined(__AVX512BF16__)
#if defined(__AMX_BF16__)
#define KVB_PATH "amx"
#define KVB_AMX 1  // products of whole matrices of bf16 numbers are one instruction
#else
#define KVB_PATH "avx512bf16"
#endif
#define KVB_BF16_PAIRS 1  // products of pairs of bf16 numbers are one instruction
#elif defined(__AVX512VNNI__) && defined(__AVX512VBMI__)
#define KVB_PATH "avx512vnni"
#else
#define KVB_PATH "avx512"
#endif
#include <immintrin.h>
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && !defined(KVBENCH_PORTABLE)
#define KVB_PATH "avx2"
#define KVB_UNPACK 1     // codes of tables become bytes, and e4m3 floats fp16, a page at a time before they become floats
#include <immintrin.h>
#else
#define KVB_PATH "portable"
#define KVB_GENERIC 1
#endif

#if defined(__AVX512VNNI__) && defined(__AVX512VBMI__) && !defined(KVB_GENERIC)
#define KVB_DIGITS 1  // the CPU multiplies bytes four at a time: digits.h
#else
#define KVB_DIGITS 0
#endif

namespace kvb {

// fp16 and bf16 of single numbers, by their bits: no compiler or CPU support is assumed.
KVB_INLINE float scalar_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

KVB_INLINE float scalar_f16(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000u) << 16, exponent = (half >> 10) & 31u, mantissa = half & 0x3ffu;
  if (exponent == 31) return scalar_of_bits(sign | 0x7f800000u | (mantissa << 13));
  if (exponent) return scalar_of_bits(sign | ((exponent + 112u) << 23) | (mantissa << 13));
  const float small = float(mantissa) * 5.9604644775390625e-8f;  // 2^-24
  return sign ? -small : small;
}

KVB_INLINE float scalar_bf16(uint16_t half) { return scalar_of_bits(uint32_t(half) << 16); }

KVB_INLINE uint32_t bits_of_scalar(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

// Rounding is half to even, as torch's conversions do it.
KVB_INLINE uint16_t to_f16(float x) {
  const uint32_t bits = bits_of_scalar(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return uint16_t(sign | 0x7e00u);
  if (magnitude >= 0x47800000u) return uint16_t(sign | 0x7c00u);                 // 65536 and more
  if (magnitude < 0x38800000u) {                                                  // below 2^-14: a multiple of 2^-24
    const float shifted = scalar_of_bits(magnitude) + 0.5f;                       // whose last bit is 2^-24
    return uint16_t(sign | (bits_of_scalar(shifted) - 0x3f000000u));
  }
  return uint16_t(sign | (((magnitude + 0xfffu + (magnitude >> 13 & 1u)) >> 13) - 0x1c000u));
}

KVB_INLINE uint16_t to_bf16(float x) {
  const uint32_t bits = bits_of_scalar(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
  return uint16_t((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

KVB_INLINE uint8_t to_fp8(float x) {  // e4m3, saturating
  const uint32_t bits = bits_of_scalar(x), sign = bits >> 24 & 0x80u;
  uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return uint8_t(sign | 0x7fu);
  if (magnitude > 0x43e00000u) magnitude = 0x43e00000u;                           // 448
  if (magnitude < 0x3c800000u) {                                                  // below 2^-6: a multiple of 2^-9
    const float shifted = scalar_of_bits(magnitude) + 16384.0f;
    return uint8_t(sign | (bits_of_scalar(shifted) - 0x46800000u));
  }
  return uint8_t(sign | (((magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20) - (120u << 3)));
}

struct Fp8Table {
  float value[256];
  Fp8Table() {
    for (int byte = 0; byte < 256; byte++) {
      const int exponent = (byte >> 3) & 15, mantissa = byte & 7;
      float x = exponent ? std::ldexp(float(8 + mantissa), exponent - 10) : std::ldexp(float(mantissa), -9);
      if ((byte & 127) == 127) x = scalar_of_bits(0x7fc00000u);
      value[byte] = byte & 128 ? -x : x;
    }
  }
};
static const Fp8Table kFp8Values;  // e4m3, no infinities

#if defined(__AVX512F__) && !defined(KVB_GENERIC)

constexpr int kLanes = 16;
constexpr int kRegisters = 32;
typedef __m512 Vec;
typedef __m512i Ints;

KVB_INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
KVB_INLINE void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
KVB_INLINE Vec splat(float x) { return _mm512_set1_ps(x); }
KVB_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
KVB_INLINE Vec fnma(Vec a, Vec b, Vec c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a * b
KVB_INLINE Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
KVB_INLINE Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
KVB_INLINE Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
KVB_INLINE Vec max_of(Vec a, Vec b) { return _mm512_max_ps(a, b); }
KVB_INLINE Vec min_of(Vec a, Vec b) { return _mm512_min_ps(a, b); }
KVB_INLINE Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
KVB_INLINE void store_u8(uint8_t* p, Vec x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x))); }
KVB_INLINE void store_f16(uint8_t* p, Vec x) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x, 0)); }
KVB_INLINE float sum_of(Vec a) { return _mm512_reduce_add_ps(a); }
// The sums of four vectors, each in the same order wherever it stands; panels.h relies on it.
KVB_INLINE void sums_of(const Vec* four, float* sums) {
  const Vec ab = _mm512_add_ps(_mm512_unpacklo_ps(four[0], four[1]), _mm512_unpackhi_ps(four[0], four[1]));
  const Vec cd = _mm512_add_ps(_mm512_unpacklo_ps(four[2], four[3]), _mm512_unpackhi_ps(four[2], four[3]));
  const Vec all = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}
#ifdef KVB_BF16_PAIRS
// Adds to every lane the products of two pairs of bf16 numbers, of which each vector has the bits.
KVB_INLINE Vec add_bf16_pairs(Vec a, Vec b, Vec c) { return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b); }
#endif
KVB_INLINE Ints load_u8(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
template <int kShift, int kBits> KVB_INLINE Vec plane(Ints x) {
  if (kShift) x = _mm512_srli_epi32(x, kShift);
  if (kShift + kBits < 8) x = _mm512_and_si512(x, _mm512_set1_epi32((1 << kBits) - 1));
  return _mm512_cvtepi32_ps(x);
}
KVB_INLINE Vec load_f16(const uint8_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
KVB_INLINE Vec load_bf16(const uint8_t* p) {
  const Ints wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
// 2 * kLanes bf16 numbers: those at even places, and those at odd ones, whose bits are the upper half of a lane already.
KVB_INLINE void load_bf16_pairs(const uint8_t* p, Vec* even, Vec* odd) {
  const Ints both = _mm512_loadu_si512(p);
  *even = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
  *odd = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(int(0xffff0000u))));
}
// An e4m3 float has the bits of an fp16 whose exponent is 8 lower.
KVB_INLINE Vec load_fp8(const uint8_t* p) {
  const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p)), size = _mm256_and_si256(wide, _mm256_set1_epi16(0x7f));
  const __m256i half = _mm256_or_si256(_mm256_slli_epi16(_mm256_xor_si256(wide, size), 8), _mm256_slli_epi16(size, 7));
  const Vec x = _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f));
  return _mm512_mask_mov_ps(x, _mm256_cmpeq_epi16_mask(size, _mm256_set1_epi16(0x7f)), _mm512_set1_ps(NAN));
}
// Bits of codes, and the levels that they stand for: whole numbers below 256. Above up to 3 bits may lie anything, above 4 nothing.
template <int kMask> KVB_INLINE Ints masked(Ints x) { return _mm512_and_si512(x, _mm512_set1_epi32(kMask)); }
template <int kShift> KVB_INLINE Ints shifted(Ints x) { return kShift ? _mm512_srli_epi32(x, kShift) : x; }
KVB_INLINE Ints either(Ints a, Ints b) { return _mm512_or_si512(a, b); }
KVB_INLINE Ints shift_then_256(Ints x, int shift) { return _mm512_slli_epi32(_mm512_srl_epi32(x, _mm_cvtsi32_si128(shift)), 8); }
typedef Vec Book;
KVB_INLINE Book load_book(const float* levels) { return load(levels); }
template <int kBits> KVB_INLINE Vec look_up(const Book& book, Ints codes) { return _mm512_permutexvar_ps(codes, book); }
KVB_INLINE Vec round_of(Vec x) { return _mm512_roundscale_ps(x, 8); }
KVB_INLINE Vec times_power_of_two(Vec x, Vec n) { return _mm512_scalef_ps(x, n); }

#elif !defined(KVB_GENERIC)

constexpr int kLanes = 8;
constexpr int kRegisters = 16;
typedef __m256 Vec;
typedef __m256i Ints;

KVB_INLINE Vec load(const float* p) { return _mm256_loadu_ps(p); }
KVB_INLINE void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
KVB_INLINE Vec splat(float x) { return _mm256_set1_ps(x); }
KVB_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
KVB_INLINE Vec fnma(Vec a, Vec b, Vec c) { return _mm256_fnmadd_ps(a, b, c); }
KVB_INLINE Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
KVB_INLINE Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
KVB_INLINE Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
KVB_INLINE Vec max_of(Vec a, Vec b) { return _mm256_max_ps(a, b); }
KVB_INLINE Vec min_of(Vec a, Vec b) { return _mm256_min_ps(a, b); }
KVB_INLINE Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
KVB_INLINE void store_u8(uint8_t* p, Vec x) {
  const Ints whole = _mm256_cvtps_epi32(x);
  const __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
  _mm_storel_epi64((__m128i*)p, _mm_packus_epi16(halves, halves));
}
KVB_INLINE void store_f16(uint8_t* p, Vec x) { _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x, 0)); }
KVB_INLINE float sum_of(Vec a) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
}
KVB_INLINE void sums_of(const Vec* four, float* sums) {
  const Vec ab = _mm256_add_ps(_mm256_unpacklo_ps(four[0], four[1]), _mm256_unpackhi_ps(four[0], four[1]));
  const Vec cd = _mm256_add_ps(_mm256_unpacklo_ps(four[2], four[3]), _mm256_unpackhi_ps(four[2], four[3]));
  const Vec all = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
  _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
}
KVB_INLINE Ints load_u8(const uint8_t* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
template <int kShift, int kBits> KVB_INLINE Vec plane(Ints x) {
  if (kShift) x = _mm256_srli_epi32(x, kShift);
  if (kShift + kBits < 8) x = _mm256_and_si256(x, _mm256_set1_epi32((1 << kBits) - 1));
  return _mm256_cvtepi32_ps(x);
}
KVB_INLINE Vec load_f16(const uint8_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
KVB_INLINE Vec load_bf16(const uint8_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
KVB_INLINE void load_bf16_pairs(const uint8_t* p, Vec* even, Vec* odd) {
  const Ints both = _mm256_loadu_si256((const __m256i*)p);
  *even = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
  *odd = _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(int(0xffff0000u))));
}
// 32 e4m3 floats in fp16, 256 times smaller, NaN as 480 / 256. Each becomes the upper byte of 16 bits; after the shift the sign lies in bits 14
// and 15, of which fp16 has it in 15.
KVB_INLINE void halves_of_fp8(Ints bytes, Ints* low, Ints* high) {
  const Ints pairs = _mm256_permute4x64_epi64(bytes, 0xd8), none = _mm256_setzero_si256(), kept = _mm256_set1_epi16(short(0xbfff));
  *low = _mm256_and_si256(_mm256_srai_epi16(_mm256_unpacklo_epi8(none, pairs), 1), kept);
  *high = _mm256_and_si256(_mm256_srai_epi16(_mm256_unpackhi_epi8(none, pairs), 1), kept);
}
KVB_INLINE Vec load_fp8(const uint8_t* p) {
  const __m128i half = _mm_and_si128(_mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)p)), 7), _mm_set1_epi16(short(0xbfff)));
  const __m128i full = _mm_set1_epi16(0x3f80), none = _mm_cmpeq_epi16(_mm_and_si128(half, full), full);
  return _mm256_mul_ps(_mm256_cvtph_ps(_mm_or_si128(half, none)), _mm256_set1_ps(256.0f));
}
// Powers of two by their exponent, which is also that of an fp32 number but for the lowest one, 2^-127, and NaN.
KVB_INLINE Vec load_e8m0(const uint8_t* p) {
  const Ints exponent = load_u8(p), lowest = _mm256_cmpeq_epi32(exponent, _mm256_setzero_si256()), none = _mm256_cmpeq_epi32(exponent, _mm256_set1_epi32(255));
  const Ints rest = _mm256_or_si256(_mm256_and_si256(lowest, _mm256_set1_epi32(0x400000)), _mm256_srli_epi32(none, 9));
  return _mm256_castsi256_ps(_mm256_or_si256(_mm256_slli_epi32(exponent, 23), rest));
}
template <int kMask> KVB_INLINE Ints masked(Ints x) { return _mm256_and_si256(x, _mm256_set1_epi32(kMask)); }
template <int kShift> KVB_INLINE Ints shifted(Ints x) { return kShift ? _mm256_srli_epi32(x, kShift) : x; }
KVB_INLINE Ints either(Ints a, Ints b) { return _mm256_or_si256(a, b); }
KVB_INLINE Ints shift_then_256(Ints x, int shift) { return _mm256_slli_epi32(_mm256_srl_epi32(x, _mm_cvtsi32_si128(shift)), 8); }
// Up to eight levels as floats, which the lower three bits of a lane choose from; sixteen as bytes, which are chosen before they are widened.
struct Book {
  Vec eight;
  Ints sixteen;
};
KVB_INLINE Book load_book(const float* levels) {
  alignas(32) uint8_t bytes[32];
  for (int i = 0; i < 32; i++) bytes[i] = uint8_t(levels[i % 16]);
  return {load(levels), _mm256_load_si256((const __m256i*)bytes)};
}
template <int kBits> KVB_INLINE Vec look_up(const Book& book, Ints codes) {
  if constexpr (kBits < 4) return _mm256_permutevar8x32_ps(book.eight, codes);
  const Ints lowest_bytes = _mm256_or_si256(codes, _mm256_set1_epi32(int(0x80808000)));  // the others become 0
  return _mm256_cvtepi32_ps(_mm256_shuffle_epi8(book.sixteen, lowest_bytes));
}
KVB_INLINE Vec round_of(Vec x) { return _mm256_round_ps(x, 8); }
KVB_INLINE Vec times_power_of_two(Vec x, Vec n) {
  const Ints exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(x, _mm256_castsi256_ps(exponent));
}

#else

constexpr int kLanes = 4;  // one NEON or SSE register
constexpr int kRegisters = 16;
typedef float Vec __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(16)));

KVB_INLINE Vec load(const float* p) {
  Vec x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
KVB_INLINE void store(float* p, Vec x) { std::memcpy(p, &x, sizeof x); }
KVB_INLINE Vec splat(float x) { return Vec{x, x, x, x}; }
KVB_INLINE Vec fma(Vec a, Vec b, Vec c) {
#if defined(__FP_FAST_FMAF)
  Vec x;
  for (int i = 0; i < kLanes; i++) x[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return x;
#else
  return a * b + c;
#endif
}
KVB_INLINE Vec fnma(Vec a, Vec b, Vec c) { return fma(-a, b, c); }
KVB_INLINE Vec mul(Vec a, Vec b) { return a * b; }
KVB_INLINE Vec add(Vec a, Vec b) { return a + b; }
KVB_INLINE Vec sub(Vec a, Vec b) { return a - b; }
KVB_INLINE Vec max_of(Vec a, Vec b) {
  Vec x;
  for (int i = 0; i < kLanes; i++) x[i] = a[i] > b[i] ? a[i] : b[i];
  return x;
}
KVB_INLINE Vec min_of(Vec a, Vec b) {
  Vec x;
  for (int i = 0; i < kLanes; i++) x[i] = a[i] < b[i] ? a[i] : b[i];
  return x;
}
KVB_INLINE Vec div(Vec a, Vec b) { return a / b; }
KVB_INLINE void store_u8(uint8_t* p, Vec x) {
  for (int i = 0; i < kLanes; i++) p[i] = uint8_t(x[i]);
}
KVB_INLINE void store_f16(uint8_t* p, Vec x) {
  for (int i = 0; i < kLanes; i++) {
    const uint16_t half = to_f16(x[i]);
    std::memcpy(p + 2 * i, &half, 2);
  }
}
KVB_INLINE float sum_of(Vec a) { return (a[0] + a[2]) + (a[1] + a[3]); }
KVB_INLINE void sums_of(const Vec* four, float* sums) {
  for (int i = 0; i < 4; i++) sums[i] = sum_of(four[i]);
}
KVB_INLINE Ints load_u8(const uint8_t* p) { return Ints{p[0], p[1], p[2], p[3]}; }
template <int kShift, int kBits> KVB_INLINE Vec plane(Ints x) {
  return __builtin_convertvector((x >> kShift) & ((1 << kBits) - 1), Vec);
}
template <class Convert> KVB_INLINE Vec load_halves(const uint8_t* p, Convert convert) {
  uint16_t half[kLanes];
  std::memcpy(half, p, sizeof half);
  return Vec{convert(half[0]), convert(half[1]), convert(half[2]), convert(half[3])};
}
KVB_INLINE Vec load_f16(const uint8_t* p) {
#if defined(__aarch64__)
  typedef __fp16 Halves __attribute__((vector_size(8)));
  Halves x;
  std::memcpy(&x, p, sizeof x);
  return __builtin_convertvector(x, Vec);
#else
  return load_halves(p, [](uint16_t half) { return scalar_f16(half); });
#endif
}
KVB_INLINE Vec load_bf16(const uint8_t* p) {
  return load_halves(p, [](uint16_t half) { return scalar_bf16(half); });
}
KVB_INLINE void load_bf16_pairs(const uint8_t* p, Vec* even, Vec* odd) {
  uint16_t half[2 * kLanes];
  std::memcpy(half, p, sizeof half);
  for (int i = 0; i < kLanes; i++) (*even)[i] = scalar_bf16(half[2 * i]), (*odd)[i] = scalar_bf16(half[2 * i + 1]);
}
KVB_INLINE Vec load_fp8(const uint8_t* p) { return Vec{kFp8Values.value[p[0]], kFp8Values.value[p[1]], kFp8Values.value[p[2]], kFp8Values.value[p[3]]}; }
template <int kMask> KVB_INLINE Ints masked(Ints x) { return x & kMask; }
template <int kShift> KVB_INLINE Ints shifted(Ints x) { return x >> kShift; }
KVB_INLINE Ints either(Ints a, Ints b) { return a | b; }
KVB_INLINE Ints shift_then_256(Ints x, int shift) { return x >> shift << 8; }
struct Book {
  const float* levels;
};
KVB_INLINE Book load_book(const float* levels) { return {levels}; }
template <int kBits> KVB_INLINE Vec look_up(const Book& book, Ints codes) {
  codes &= (1 << kBits) - 1;
  return Vec{book.levels[codes[0]], book.levels[codes[1]], book.levels[codes[2]], book.levels[codes[3]]};
}
KVB_INLINE Vec round_of(Vec x) {
  const Vec shift = splat(12582912.0f);  // 1.5 * 2^23: adding it leaves no bits for a fraction
  return (x + shift) - shift;
}
KVB_INLINE Vec times_power_of_two(Vec x, Vec n) {
  const Ints exponent = (__builtin_convertvector(n, Ints) + 127) << 23;
  Vec power;
  std::memcpy(&power, &exponent, sizeof power);
  return x * power;
}

#endif

// e^x for x <= 0, to 2e-7 of itself (4e-7 below e^-20); below -87 it stays at e^-87, and NaN stays NaN.
// 2^n * 2^r with n whole and |r| <= 1/2; 2^r by the polynomial of degree 6 with the smallest relative error there (2e-9).
KVB_INLINE Vec exp_of(Vec x) {
  const Vec log2_e = splat(1.44269504f);
  x = max_of(splat(-87.0f), x);
  const Vec n = round_of(mul(x, log2_e)), r = fma(x, log2_e, sub(splat(0.0f), n));
  Vec p = splat(1.53458122e-4f);
  p = fma(p, r, splat(1.33999315e-3f));
  p = fma(p, r, splat(9.61848896e-3f));
  p = fma(p, r, splat(5.55032878e-2f));
  p = fma(p, r, splat(2.40226469e-1f));
  p = fma(p, r, splat(6.93147206e-1f));
  p = fma(p, r, splat(1.0f));
  return times_power_of_two(p, n);
}

// tanh x to 2e-7; NaN stays NaN.
KVB_INLINE Vec tanh_of(Vec x) {
  const Vec minus = sub(splat(0.0f), x), size = max_of(minus, x), e = exp_of(mul(splat(-2.0f), size));
  const Vec sign = max_of(splat(-1.0f), min_of(splat(1.0f), mul(x, splat(1e30f))));
  return mul(sign, div(sub(splat(1.0f), e), add(splat(1.0f), e)));
}

// Puts n logits x behind a soft cap: cap * tanh(x / cap).
inline void cap_logits(float* x, long n, float cap) {
  const Vec most = splat(cap), part = splat(1.0f / cap);
  for (; n >= kLanes; n -= kLanes, x += kLanes) store(x, mul(most, tanh_of(mul(load(x), part))));
  float rest[kLanes] = {0};
  std::memcpy(rest, x, n * sizeof(float));
  store(rest, mul(most, tanh_of(mul(load(rest), part))));
  std::memcpy(x, rest, n * sizeof(float));
}

}  // namespace kvb
