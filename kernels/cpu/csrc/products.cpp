// Products of rows with matrices as they lie: y = x w' + bias, w [out, in]; and what stands between them in a layer of a
// decoder. kernels/cpu/products.py calls it.
//
// Every number is summed along `in` in one order, which `in` and the elements decide alone: kLanes sums side by side, a step at a time from the
// first to the last, and these by `sums_of`. Tiles, blocks and threads divide rows and outputs, and what interrupts a sum keeps it as it is. So a
// row's answer depends neither on the other rows nor on the number of threads.
#include <algorithm>
#include <new>
#include <vector>

#include "plan.h"

namespace kvb {

struct Matrix {
  const uint8_t *w, *bias;  // [out][in], [out] or null
  uint8_t* y;               // [rows][out]
  int64_t out;
};
// Of the same rows with one matrix or several.
struct Products {
  const uint8_t* x;  // [rows][in]
  int64_t rows, in;
  const Matrix* matrices;
  int64_t count;
  int32_t num_threads;
};

constexpr long kOutputs = 64;  // that a thread takes at a time
constexpr long kSteps = 64;    // of a sum, before the next outputs of a block are begun
constexpr long kTiles = 6;     // of rows that meet a block of outputs one after the other
constexpr long kBlocks = 8;    // such groups of tiles, of which x is put in order at once
constexpr long kLine = 16;     // floats of a line of a cache; a vector that lies in two takes as long as two

// Where few tiles have the next rows of w brought to. On AMD's processors (Zen 4) lines that are asked for in the first-level cache push x out of
// it, and hold up its loads. On Intel's (Ice Lake) they do not while x is short: up to kShort rows take 0.88 of the time in fp32, more rows 1.05.
constexpr long kShort = 4;
static const bool kNextInSecondLevel = [] {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_cpu_init();
  return !__builtin_cpu_is("intel");
#else
  return true;
#endif
}();

// Elements of x, w and y. A step takes kStep numbers of a row of w in kParts vectors; x is kept in the order in which it meets them. Up to four
// results are put at a time. kNumbers: each lane takes one number after the other, and fma adds it.
struct F32 {
  static constexpr long kBytes = 4, kStep = kLanes, kParts = 1;
  static constexpr bool kNumbers = true;
  KVB_INLINE void step(const uint8_t* p, Vec* w) { w[0] = load((const float*)p); }
  KVB_INLINE void keep(const uint8_t* p, long n, float* to) { std::memcpy(to, p, n * 4); }
  KVB_INLINE Vec mul_add(Vec w, Vec x, Vec sum) { return fma(w, x, sum); }
  static float number(const uint8_t* p) { return scalar_of_bits(*(const uint32_t*)p); }
  KVB_INLINE void put(const float* x, long n, uint8_t* to) { std::memcpy(to, x, 4 * n); }
  KVB_INLINE Vec lanes(const uint8_t* p) { return load((const float*)p); }
  KVB_INLINE void put_lanes(Vec x, uint8_t* to) { store((float*)to, x); }
};
struct F16 {
  static constexpr long kBytes = 2, kStep = kLanes, kParts = 1;
  static constexpr bool kNumbers = true;
  KVB_INLINE void step(const uint8_t* p, Vec* w) { w[0] = load_f16(p); }
  KVB_INLINE void keep(const uint8_t* p, long n, float* to) {
    for (long i = 0; i < n; i++) to[i] = number(p + 2 * i);
  }
  KVB_INLINE Vec mul_add(Vec w, Vec x, Vec sum) { return fma(w, x, sum); }
  static float number(const uint8_t* p) { return scalar_f16(*(const uint16_t*)p); }
  KVB_INLINE void put(const float* x, long n, uint8_t* to) {
    uint16_t halves[4];
    for (int i = 0; i < 4; i++) halves[i] = to_f16(x[i]);
    std::memcpy(to, halves, 2 * n);
  }
  KVB_INLINE Vec lanes(const uint8_t* p) { return load_f16(p); }
  KVB_INLINE void put_lanes(Vec x, uint8_t* to) { store_f16(to, x); }
};
struct BF16 {
  static constexpr long kBytes = 2, kStep = 2 * kLanes;
#ifdef KVB_BF16_PAIRS
  static constexpr long kParts = 1;
  static constexpr bool kNumbers = false;
  KVB_INLINE void step(const uint8_t* p, Vec* w) { w[0] = load((const float*)p); }
  KVB_INLINE void keep(const uint8_t* p, long n, float* to) { std::memcpy(to, p, n * 2); }
  KVB_INLINE Vec mul_add(Vec w, Vec x, Vec sum) { return add_bf16_pairs(w, x, sum); }
#else
  static constexpr long kParts = 2;
  static constexpr bool kNumbers = true;
  KVB_INLINE void step(const uint8_t* p, Vec* w) { load_bf16_pairs(p, w, w + 1); }
  KVB_INLINE void keep(const uint8_t* p, long n, float* to) {
    for (long i = 0; i < n; i++) to[i % 2 * kLanes + i / 2] = number(p + 2 * i);
  }
  KVB_INLINE Vec mul_add(Vec w, Vec x, Vec sum) { return fma(w, x, sum); }
#endif
  static float number(const uint8_t* p) { return scalar_bf16(*(const uint16_t*)p); }
  // n numbers of a vector, as `to_bf16` rounds them.
  template <class Bits, class Halves> KVB_INLINE void put_of(const void* x, long n, uint8_t* to) {
    Bits bits;
    std::memcpy(&bits, x, sizeof bits);
    const Bits is_nan = (bits & 0x7fffffffu) > 0x7f800000u, rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    const Halves halves = __builtin_convertvector((is_nan & 0x7fc0u) | (~is_nan & rounded), Halves);
    std::memcpy(to, &halves, 2 * n);
  }
  typedef uint32_t Bits4 __attribute__((vector_size(16)));
  typedef uint16_t Halves4 __attribute__((vector_size(8)));
  typedef uint32_t BitsAll __attribute__((vector_size(4 * kLanes)));
  typedef uint16_t HalvesAll __attribute__((vector_size(2 * kLanes)));
  KVB_INLINE void put(const float* x, long n, uint8_t* to) { put_of<Bits4, Halves4>(x, n, to); }
  KVB_INLINE Vec lanes(const uint8_t* p) { return load_bf16(p); }
  KVB_INLINE void put_lanes(Vec x, uint8_t* to) { put_of<BitsAll, HalvesAll>(&x, kLanes, to); }
};

// The i-th of all matrices' blocks of `size` outputs: its matrix, and its first output.
struct At {
  const Matrix* matrix;
  long begin;
};
static At block_at(const Products& p, long size, long i) {
  const Matrix* matrix = p.matrices;
  for (long own; i >= (own = (matrix->out + size - 1) / size); matrix++) i -= own;
  return {matrix, i * size};
}
static long blocks_of(const Products& p, long size) {
  long blocks = 0;
  for (long i = 0; i < p.count; i++) blocks += (p.matrices[i].out + size - 1) / size;
  return blocks;
}

}  // namespace kvb
#ifdef KVB_AMX
#include "amx.h"
#endif
namespace kvb {

// Sums of a tile that lie in registers, beside a step of x and one of w; and rows of a tile at most, with 4 outputs.
template <class E> constexpr int kMostRows = (kRegisters == 32 ? 6 : 3) - (E::kParts - 1) * (kRegisters == 32 ? 2 : 1);

// Rows [first, first + rows) of p in tiles of nearly the same number of them. x: in the order of tiles, steps, rows of a tile, parts of a step.
template <class E> struct Tiles {
  const Products& p;
  long first, rows, count, steps;
  const float* x;

  Tiles(const Products& p, long first, long rows)
      : p(p), first(first), rows(rows), count((rows + kMostRows<E> - 1) / kMostRows<E>), steps((p.in + E::kStep - 1) / E::kStep), x(nullptr) {}
  long begin(long tile) const { return tile * (rows / count) + std::min(tile, rows % count); }
  long floats_per_row() const { return steps * E::kParts * kLanes; }
  // Puts a tile's rows in order, with zeros up to a whole step.
  void keep(long tile, float* room) const {
    const long b = begin(tile), size = begin(tile + 1) - b;
    float* to = room + b * floats_per_row();
    for (long i = 0; i < steps; i++)
      for (long c = 0; c < size; c++, to += E::kParts * kLanes) {
        const uint8_t* from = p.x + ((first + b + c) * p.in + i * E::kStep) * E::kBytes;
        const long n = p.in - i * E::kStep;
        if (n >= E::kStep) {
          E::keep(from, E::kStep, to);
        } else {
          std::fill(to, to + E::kParts * kLanes, 0.0f);
          E::keep(from, n, to);
        }
      }
  }
};

// What several tiles and a block of a matrix's outputs have in common: steps [begin, end), sums that wait for the next ones, and the tile of a
// group that asks for a part of the next outputs of w, and how many of them there are (0: they are near already).
template <class E> struct Block {
  const Tiles<E>& tiles;
  const Matrix& matrix;
  long o, b, begin, end, share, shares;  // the block's first output, and its first row
  float* sums;
};

// kR outputs from o on of kB rows from b on.
template <class E, int kR, int kB> static void tile(const Block<E>& t, long o, long b) {
  constexpr long kStepBytes = E::kStep * E::kBytes, kVector = E::kParts * kLanes;
  const Products& p = t.tiles.p;
  const long w_row = p.in * E::kBytes;
  const Matrix& matrix = t.matrix;
  const uint8_t* w = matrix.w + o * w_row;
  const float* x = t.tiles.x + b * t.tiles.floats_per_row();
  float* kept = t.sums + ((b - t.b) * kOutputs + o - t.o) * kLanes;
  Vec sum[kB][kR];
#pragma GCC unroll 8
  for (int c = 0; c < kB; c++)
#pragma GCC unroll 8
    for (int r = 0; r < kR; r++) sum[c][r] = t.begin ? load(kept + (c * kOutputs + r) * kLanes) : splat(0.0f);
  auto step = [&](const uint8_t* from, long row, long i) __attribute__((always_inline)) {
    Vec xs[kB][E::kParts];
#pragma GCC unroll 8
    for (int c = 0; c < kB; c++)
#pragma GCC unroll 2
      for (int part = 0; part < E::kParts; part++) xs[c][part] = load(x + (i * kB + c) * kVector + part * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kR; r++) {
      Vec ws[E::kParts];
      E::step(from + r * row, ws);
#pragma GCC unroll 2
      for (int part = 0; part < E::kParts; part++)
#pragma GCC unroll 8
        for (int c = 0; c < kB; c++) sum[c][r] = E::mul_add(ws[part], xs[c][part], sum[c][r]);
    }
  };
  const long whole = std::min(t.end, p.in / E::kStep), shares = t.shares ? t.shares : kR, share = t.shares ? t.share : kR;
  const bool second = shares <= kR && (kNextInSecondLevel || p.rows > kShort);
  for (long i = t.begin; i < whole; i++) {
    // A row is too short for the processor to foretell where the next one goes on.
    for (long r = share; r < kR; r += shares) {
      const uint8_t* next = w + (kR + r) * w_row + i * kStepBytes;
      if (second) __builtin_prefetch(next, 0, 2);
      else __builtin_prefetch(next);
    }
    step(w + i * kStepBytes, w_row, i);
  }
  if (whole < t.end) {
    uint8_t rest[kR][kStepBytes] = {};
    for (int r = 0; r < kR; r++) std::memcpy(rest[r], w + r * w_row + whole * kStepBytes, w_row - whole * kStepBytes);
    step(rest[0], kStepBytes, whole);
  }
#pragma GCC unroll 8
  for (int c = 0; c < kB; c++)
#pragma GCC unroll 2
    for (int r = 0; r < kR; r += 4) {
      constexpr int kHere = kR < 4 ? kR : 4;
      if (t.end < t.tiles.steps) {
#pragma GCC unroll 4
        for (int j = 0; j < kHere; j++) store(kept + (c * kOutputs + r + j) * kLanes, sum[c][r + j]);
        continue;
      }
      Vec four[4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) four[j] = j < kHere ? sum[c][r + j] : splat(0.0f);
      float found[4];
      sums_of(four, found);
      if (matrix.bias)
        for (int j = 0; j < kHere; j++) found[j] += E::number(matrix.bias + (o + r + j) * E::kBytes);
      E::put(found, kHere, matrix.y + ((t.tiles.first + b + c) * matrix.out + o + r) * E::kBytes);
    }
}

template <class E, int kR, int kB> static void rows_of(const Block<E>& t, long o, long b, long rows) {
  if constexpr (kB > 1)
    if (rows < kB) return rows_of<E, kR, kB - 1>(t, o, b, rows);
  tile<E, kR, kB>(t, o, b);
}

// kR outputs from o on of tiles [first, end).
template <class E, int kR> static void outputs(Block<E>& t, long o, long first, long end) {
  constexpr int kB = kR == 8 ? kMostRows<E> / 2 : kMostRows<E>;
  for (long i = first; i < end; i++, t.share++) {
    const long b = t.tiles.begin(i);
    rows_of<E, kR, kB>(t, o, b, t.tiles.begin(i + 1) - b);
  }
  t.share = 0;
}

// `count` outputs from o on of all tiles. w comes from memory for the first group of them, and from a cache for the others.
template <class E> static void block(const Tiles<E>& tiles, const Matrix& matrix, long o, long count) {
  alignas(4 * kLine) static thread_local float sums[kTiles * 6 * kOutputs * kLanes];
  for (long first = 0; first < tiles.count; first += kTiles) {
    const long end = std::min(first + kTiles, tiles.count);
    const bool few = tiles.begin(1) <= kMostRows<E> / 2;  // whose sums leave registers for more outputs
    for (long step = 0; step < tiles.steps; step += kSteps) {
      Block<E> t{tiles, matrix, o, tiles.begin(first), step, std::min(step + kSteps, tiles.steps), 0, first ? 0 : end, sums};
      long done = 0;
      for (; few && done + 8 <= count; done += 8) outputs<E, 8>(t, o + done, first, end);
      for (; done + 4 <= count; done += 4) outputs<E, 4>(t, o + done, first, end);
      for (; done < count; done++) outputs<E, 1>(t, o + done, first, end);
    }
  }
}

// n elements, with zeros behind them, and back.
template <class E> KVB_INLINE Vec some(const uint8_t* p, long n) {
  if (n == kLanes) return E::lanes(p);
  uint8_t whole[4 * kLanes] = {};
  std::memcpy(whole, p, n * E::kBytes);
  return E::lanes(whole);
}
template <class E> KVB_INLINE void put_some(Vec x, long n, uint8_t* to) {
  if (n == kLanes) return E::put_lanes(x, to);
  uint8_t whole[4 * kLanes];
  E::put_lanes(x, whole);
  std::memcpy(to, whole, n * E::kBytes);
}

}  // namespace kvb
#include "panels.h"
namespace kvb {

template <class E> static int products(const Products& p) {
#ifdef KVB_AMX
  if constexpr (std::is_same_v<E, BF16>) return tile_products(p);
#endif
  static thread_local std::vector<float> room;
  if constexpr (E::kNumbers)
    if (p.rows >= kMany) return panel_products<E>(p);
  const long most = kBlocks * kTiles * kMostRows<E>, parts = (p.rows + most - 1) / most;
  long outputs = 0;
  for (long i = 0; i < p.count; i++) outputs += p.matrices[i].out;
  // Fewer outputs at a time where every thread would not get some otherwise.
  const long size = std::clamp((outputs / p.num_threads + 7) / 8 * 8, 8L, kOutputs);
  const long blocks = blocks_of(p, size);
  for (long part = 0; part < parts; part++) {
    const long first = part * p.rows / parts;
    Tiles<E> tiles(p, first, (part + 1) * p.rows / parts - first);
    try {
      room.resize(std::max<size_t>(room.size(), tiles.rows * tiles.floats_per_row() + kLine));
    } catch (const std::bad_alloc&) {
      return kNoMemory;
    }
    float* to = room.data() + (-(uintptr_t)room.data() % (4 * kLine)) / 4;
    tiles.x = to;
#pragma omp parallel num_threads(p.num_threads) if (p.num_threads > 1)
    {
#pragma omp for schedule(static)
      for (long i = 0; i < tiles.count; i++) tiles.keep(i, to);
#pragma omp for schedule(dynamic)
      for (long i = 0; i < blocks; i++) {
        const At at = block_at(p, size, i);
        block<E>(tiles, *at.matrix, at.begin, std::min(size, at.matrix->out - at.begin));
      }
    }
  }
  return kDone;
}

// Calls `of(where, n)` for all elements of a row in turn: kLanes of them, and the rest, which `of` puts into whole lanes.
template <class E, class Of> static void each_lanes(long size, Of of) {
  for (long i = 0; i < size; i += kLanes) of(i * E::kBytes, std::min<long>(kLanes, size - i));
}
// y = w x / sqrt(mean of x^2 + eps), row by row.
template <class E> static void norm(const uint8_t* x, const uint8_t* w, uint8_t* y, long rows, long width, float eps, int num_threads) {
#pragma omp parallel for num_threads(num_threads) schedule(static) if (num_threads > 1)
  for (long row = 0; row < rows; row++) {
    const uint8_t* from = x + row * width * E::kBytes;
    uint8_t* to = y + row * width * E::kBytes;
    Vec squares = splat(0.0f);
    each_lanes<E>(width, [&](long at, long n) {
      const Vec one = some<E>(from + at, n);
      squares = fma(one, one, squares);
    });
    const Vec scale = splat(1.0f / std::sqrt(sum_of(squares) / width + eps));
    each_lanes<E>(width, [&](long at, long n) { put_some<E>(mul(mul(some<E>(from + at, n), scale), some<E>(w + at, n)), n, to + at); });
  }
}

// A feed-forward layer, down(silu(gate(x)) * up(x)), as products with gate, up and down; the y of the first two is not used.

template <class E> static int gated(const Products& p) {
  static thread_local std::vector<uint8_t> room;
  constexpr long kPiece = 4096;  // elements that a thread takes at a time
  const long most = E::kNumbers ? kMostInPanels : kBlocks * kTiles * kMostRows<E>, parts = (p.rows + most - 1) / most;
  for (long part = 0; part < parts; part++) {
    const long first = part * p.rows / parts, rows = (part + 1) * p.rows / parts - first, mid = p.matrices[0].out, size = rows * mid;
    try {
      room.resize(std::max<size_t>(room.size(), 2 * size * E::kBytes));
    } catch (const std::bad_alloc&) {
      return kNoMemory;
    }
    uint8_t *gate = room.data(), *up = gate + size * E::kBytes;
    const uint8_t* x = p.x + first * p.in * E::kBytes;
    Matrix both[2] = {p.matrices[0], p.matrices[1]}, down = p.matrices[2];
    both[0].y = gate, both[1].y = up, down.y += first * down.out * E::kBytes;
    if (const int status = products<E>({x, rows, p.in, both, 2, p.num_threads})) return status;
#pragma omp parallel for num_threads(p.num_threads) schedule(static) if (p.num_threads > 1 && size > kPiece)
    for (long begin = 0; begin < size; begin += kPiece)
      each_lanes<E>(std::min(kPiece, size - begin), [&](long at, long n) {
        uint8_t* to = gate + begin * E::kBytes + at;
        const Vec zero = splat(0.0f), g = some<E>(to, n), e = exp_of(min_of(g, sub(zero, g)));
        const Vec silu = div(fma(min_of(g, zero), e, max_of(g, zero)), add(splat(1.0f), e));
        put_some<E>(mul(silu, some<E>(up + begin * E::kBytes + at, n)), n, to);
      });
    if (const int status = products<E>({gate, rows, mid, &down, 1, p.num_threads})) return status;
  }
  return kDone;
}

// Calls `of` with the elements of a kind.
template <class Of> static auto by_kind(int kind, Of of) {
  return kind == kF16 ? of(F16()) : kind == kBF16 ? of(BF16()) : of(F32());
}

}  // namespace kvb

// kind: of the elements of x and of the matrices. Return a Status (plan.h).
extern "C" int kvb_products(int kind, const uint8_t* x, long rows, long in, const kvb::Matrix* matrices, long count, int num_threads) {
  const kvb::Products p{x, rows, in, matrices, count, num_threads};
  return kvb::by_kind(kind, [&](auto element) { return kvb::products<decltype(element)>(p); });
}
// matrices: gate, up and down.
extern "C" int kvb_gated(int kind, const uint8_t* x, long rows, long in, const kvb::Matrix* matrices, int num_threads) {
  const kvb::Products p{x, rows, in, matrices, 3, num_threads};
  return kvb::by_kind(kind, [&](auto element) { return kvb::gated<decltype(element)>(p); });
}
extern "C" void kvb_norm(int kind, const uint8_t* x, const uint8_t* w, uint8_t* y, long rows, long width, float eps, int num_threads) {
  kvb::by_kind(kind, [&](auto element) { kvb::norm<decltype(element)>(x, w, y, rows, width, eps, num_threads); });
}
