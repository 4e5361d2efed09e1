// Products of a few rows with a matrix as it lies: y = x w' + bias, w [out, in]. Each number of w is read from memory once for all rows.
// kernels/cpu/products.py calls it.
#include <algorithm>
#include <new>
#include <vector>

#include "plan.h"

namespace kvb {

struct Products {
  const uint8_t *x, *w, *bias;  // [rows][in], [out][in], [out] or null
  uint8_t* y;                   // [rows][out]
  int64_t rows, in, out;
  int32_t num_threads;
};

constexpr long kStep = 2 * kLanes;  // numbers of a row of w that are multiplied at a time
constexpr long kOutputs = 8;        // rows of w that a thread takes at a time

// Elements of x, w and y. pair: kStep of them in two registers; place: where in x, as floats, the number lies that meets the i-th of a step.
struct F32 {
  static constexpr long kBytes = 4;
  static void pair(const uint8_t* p, Vec* a, Vec* b) { *a = load((const float*)p), *b = load((const float*)p + kLanes); }
  static long place(long i) { return i; }
  static float number(const uint8_t* p) { return scalar_of_bits(*(const uint32_t*)p); }
  static void put(uint8_t* p, float x) { std::memcpy(p, &x, 4); }
};
struct F16 {
  static constexpr long kBytes = 2;
  static void pair(const uint8_t* p, Vec* a, Vec* b) { *a = load_f16(p), *b = load_f16(p + kBytes * kLanes); }
  static long place(long i) { return i; }
  static float number(const uint8_t* p) { return scalar_f16(*(const uint16_t*)p); }
  static void put(uint8_t* p, float x) {
    const uint16_t half = to_f16(x);
    std::memcpy(p, &half, 2);
  }
};
struct BF16 {
  static constexpr long kBytes = 2;
  static void pair(const uint8_t* p, Vec* a, Vec* b) { load_bf16_pairs(p, a, b); }
  static long place(long i) { return i % 2 * kLanes + i / 2; }
  static float number(const uint8_t* p) { return scalar_bf16(*(const uint16_t*)p); }
  static void put(uint8_t* p, float x) {
    const uint16_t half = to_bf16(x);
    std::memcpy(p, &half, 2);
  }
};

// x as floats in the order of E::place, each row followed by zeros up to a whole step.
template <class E> static const float* prepare(const Products& p, long width, std::vector<float>& room) {
  if (E::kBytes == 4 && width == p.in) return (const float*)p.x;
  room.assign(p.rows * width, 0.0f);
  for (long b = 0; b < p.rows; b++)
    for (long i = 0; i < p.in; i++) room[b * width + i / kStep * kStep + E::place(i % kStep)] = E::number(p.x + (b * p.in + i) * E::kBytes);
  return room.data();
}

// kR outputs of kB rows. Every sum is formed in the same order whatever kR and kB are, so that a row's answer does not depend on the others.
template <class E, int kR, int kB> KVB_INLINE void tile(const Products& p, long o, long b, const float* x, long width) {
  Vec sum[kR][kB];
#pragma GCC unroll 8
  for (int r = 0; r < kR; r++)
#pragma GCC unroll 8
    for (int c = 0; c < kB; c++) sum[r][c] = splat(0.0f);
  const uint8_t* w = p.w + o * p.in * E::kBytes;
  const long row = p.in * E::kBytes, ahead = kOutputs * row;
  x += b * width;
  auto step = [&](const uint8_t* from, int r, long i) __attribute__((always_inline)) {
    Vec low, high;
    E::pair(from, &low, &high);
#pragma GCC unroll 8
    for (int c = 0; c < kB; c++) sum[r][c] = fma(low, load(x + c * width + i), sum[r][c]);
#pragma GCC unroll 8
    for (int c = 0; c < kB; c++) sum[r][c] = fma(high, load(x + c * width + i + kLanes), sum[r][c]);
  };
  long i = 0;
  for (; i + kStep <= p.in; i += kStep)
#pragma GCC unroll 8
    for (int r = 0; r < kR; r++) {
      const uint8_t* from = w + r * row + i * E::kBytes;
      // What the next outputs need. A row is too short for the processor to foretell where the next one goes on.
      for (long line = 0; line < kStep * E::kBytes; line += 64) __builtin_prefetch(from + ahead + line);
      step(from, r, i);
    }
  if (i < p.in)
#pragma GCC unroll 8
    for (int r = 0; r < kR; r++) {
      uint8_t rest[kStep * E::kBytes] = {};
      std::memcpy(rest, w + r * row + i * E::kBytes, (p.in - i) * E::kBytes);
      step(rest, r, i);
    }
  for (int r = 0; r < kR; r++)
    for (int c = 0; c < kB; c++) {
      const float add = p.bias ? E::number(p.bias + (o + r) * E::kBytes) : 0.0f;
      E::put(p.y + ((b + c) * p.out + o + r) * E::kBytes, p.bias ? sum_of(sum[r][c]) + add : sum_of(sum[r][c]));
    }
}

// `count` outputs of kB rows, as many at a time as there are registers for.
template <class E, int kB> KVB_INLINE void outputs(const Products& p, long o, long count, long b, const float* x, long width) {
  constexpr int kR = std::min<int>(kOutputs, kRegisters / 2 / kB);
  long done = 0;
  for (; done + kR <= count; done += kR) tile<E, kR, kB>(p, o + done, b, x, width);
  for (; done < count; done++) tile<E, 1, kB>(p, o + done, b, x, width);
}

template <class E> static int products(const Products& p) {
  static thread_local std::vector<float> room;
  const long width = (p.in + kStep - 1) / kStep * kStep;
  const float* x;
  try {
    x = prepare<E>(p, width, room);
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  }
#pragma omp parallel for num_threads(p.num_threads) schedule(static) if (p.num_threads > 1)
  for (long o = 0; o < p.out; o += kOutputs) {
    const long count = std::min(kOutputs, p.out - o);
    long b = 0;
    for (; b + 4 <= p.rows; b += 4) outputs<E, 4>(p, o, count, b, x, width);
    if (b + 2 <= p.rows) outputs<E, 2>(p, o, count, b, x, width), b += 2;
    if (b < p.rows) outputs<E, 1>(p, o, count, b, x, width);
  }
  return kDone;
}

}  // namespace kvb

// kind: of the elements of x, w, bias and y. Returns a Status (plan.h).
extern "C" int kvb_products(int kind, const uint8_t* x, const uint8_t* w, const uint8_t* bias, uint8_t* y, long rows, long in, long out,
                            int num_threads) {
  const kvb::Products p{x, w, bias, y, rows, in, out, num_threads};
  return kind == kvb::kF16 ? kvb::products<kvb::F16>(p) : kind == kvb::kBF16 ? kvb::products<kvb::BF16>(p) : kvb::products<kvb::F32>(p);
}
