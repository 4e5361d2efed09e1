// Products of many rows: w is put in another order once for all of them, so that rows are multiplied with vectors of outputs and not outputs with
// vectors of a row. The sums are those of few rows, to the bit: each lane of theirs is a sum of its own here, and the lanes' sums are added as
// `sums_of` adds them. products.cpp includes it.
#pragma once

#ifdef _OPENMP
#include <omp.h>
#endif

namespace kvb {

constexpr long kMany = 96;                              // rows that are worth another order of w
constexpr long kTall = kRegisters == 32 ? 12 : 6;       // rows of a tile: its sums lie in registers beside two vectors of w and a number of x
constexpr long kPanel = 2 * kLanes;                     // outputs
constexpr long kMostInPanels = 384;                     // rows whose x is in order at once
constexpr int kRounds = kLanes == 16 ? 4 : kLanes == 8 ? 3 : 2;
static_assert(kLanes == 1 << kRounds);

// The lane that is i-th where neighbours are added first: `sums_of` adds lanes 0 and 2 of four, and 1 and 3, and with sixteen the fours likewise.
KVB_INLINE long lane_of(long i) {
  const auto turned = [](long j) { return (j & 1) << 1 | j >> 1; };
  return 4 * (kLanes == 16 ? turned(i >> 2) : i >> 2) + turned(i & 3);
}

// Transposes kLanes vectors in place.
#if defined(__AVX512F__) && !defined(KVB_GENERIC)
KVB_INLINE void transpose(Vec* x) {
  Vec y[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) y[i] = _mm512_unpacklo_ps(x[i], x[i + 1]), y[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 4)  // x[i + j]: lane j of each four lanes of rows i to i + 3
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) {
      x[i + 2 * j] = _mm512_shuffle_ps(y[i + j], y[i + 2 + j], 0x44);
      x[i + 2 * j + 1] = _mm512_shuffle_ps(y[i + j], y[i + 2 + j], 0xee);
    }
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    const Vec low = _mm512_shuffle_f32x4(x[j], x[4 + j], 0x88), high = _mm512_shuffle_f32x4(x[8 + j], x[12 + j], 0x88);
    const Vec low_odd = _mm512_shuffle_f32x4(x[j], x[4 + j], 0xdd), high_odd = _mm512_shuffle_f32x4(x[8 + j], x[12 + j], 0xdd);
    y[j] = _mm512_shuffle_f32x4(low, high, 0x88), y[8 + j] = _mm512_shuffle_f32x4(low, high, 0xdd);
    y[4 + j] = _mm512_shuffle_f32x4(low_odd, high_odd, 0x88), y[12 + j] = _mm512_shuffle_f32x4(low_odd, high_odd, 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) x[i] = y[i];
}
#elif !defined(KVB_GENERIC)
KVB_INLINE void transpose(Vec* x) {
  Vec y[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) y[i] = _mm256_unpacklo_ps(x[i], x[i + 1]), y[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4)
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) {
      x[i + 2 * j] = _mm256_shuffle_ps(y[i + j], y[i + 2 + j], 0x44);
      x[i + 2 * j + 1] = _mm256_shuffle_ps(y[i + j], y[i + 2 + j], 0xee);
    }
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) y[j] = _mm256_permute2f128_ps(x[j], x[4 + j], 0x20), y[4 + j] = _mm256_permute2f128_ps(x[j], x[4 + j], 0x31);
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) x[i] = y[i];
}
#else
KVB_INLINE void transpose(Vec* x) {
  for (int i = 0; i < kLanes; i++)
    for (int j = 0; j < i; j++) {
      const float one = x[i][j];
      x[i][j] = x[j][i], x[j][i] = one;
    }
}
#endif

// Of a sum: numbers of each lane along `in`, zeros up to a whole step included; numbers between two lanes, odd, so that those of all lanes do not
// meet in one set of a cache; and what goes through a lane before the next: tiles, and panels of long rows, which would push x out of a cache.
template <class E> struct Order {
  long depth, apart, tiles, panels;
  explicit Order(const Products& p) : depth((p.in + E::kStep - 1) / E::kStep * E::kParts), apart(depth | 1) {
    panels = std::clamp(depth / 64, 1L, 4L), tiles = panels > 1 ? 8 : 4;
  }
  long floats(long wide) const { return kLanes * apart * wide; }
  long kept() const { return tiles * panels * kRounds * kTall * kPanel; }
};

// Puts `count` rows from `from` on, `row_bytes` apart, side by side: to [lane][number of the lane][kWide], with zeros behind them.
template <class E, long kWide> static void put_beside(const uint8_t* from, long count, long row_bytes, const Order<E>& order, float* to) {
  constexpr long kStepBytes = E::kStep * E::kBytes, kAhead = 512;
  const long whole = row_bytes / kStepBytes, rest = row_bytes % kStepBytes;
  for (long first = 0; first < kWide; first += kLanes) {
    const long rows = std::clamp(count - first, 0L, (long)kLanes);
    constexpr long kHere = kWide < kLanes ? kWide : kLanes;
    for (long i = 0; i * E::kParts < order.depth; i++) {
      Vec part[E::kParts][kLanes];
#pragma GCC unroll 16
      for (long r = 0; r < kLanes; r++) {
        Vec numbers[E::kParts];
        if (r < rows && i < whole) {
          const uint8_t* numbers_of = from + (first + r) * row_bytes + i * kStepBytes;
          __builtin_prefetch(numbers_of + kAhead);
          E::step(numbers_of, numbers);
        } else {
          uint8_t bytes[kStepBytes] = {};
          if (r < rows) std::memcpy(bytes, from + (first + r) * row_bytes + i * kStepBytes, rest);
          E::step(bytes, numbers);
        }
        for (long j = 0; j < E::kParts; j++) part[j][r] = numbers[j];
      }
      for (long j = 0; j < E::kParts; j++) {
        transpose(part[j]);
#pragma GCC unroll 16
        for (long lane = 0; lane < kLanes; lane++)
          std::memcpy(to + (lane * order.apart + i * E::kParts + j) * kWide + first, &part[j][lane], kHere * sizeof(float));
      }
    }
  }
}

// What a tile's sums of the lanes before are added to, or wait for: those of the i-th lane, at a round of `sums_of`; true behind the last one.
template <int kRound> KVB_INLINE bool add_lanes(Vec (&sum)[kTall][2], long i, float* kept) {
  if constexpr (kRound == kRounds) {
    return true;
  } else {
    const bool waits = !(i >> kRound & 1);
#pragma GCC unroll 12
    for (int r = 0; r < kTall; r++)
#pragma GCC unroll 2
      for (int v = 0; v < 2; v++) {
        float* one = kept + ((kRound * kTall + r) * 2 + v) * kLanes;
        if (waits) store(one, sum[r][v]);
        else sum[r][v] = add(load(one), sum[r][v]);
      }
    return !waits && add_lanes<kRound + 1>(sum, i, kept);
  }
}

// Sums of one lane, the i-th of all, for a tile of rows and a panel; the last lane's are the products, which go to y.
template <class E> static void lane_tile(const float* x, const float* w, long depth, long i, float* kept, const Matrix& matrix, long o, long row) {
  Vec sum[kTall][2];
#pragma GCC unroll 12
  for (int r = 0; r < kTall; r++) sum[r][0] = sum[r][1] = splat(0.0f);
#pragma GCC unroll 2
  for (long d = 0; d < depth; d++, x += kTall, w += kPanel) {
    const Vec left = load(w), right = load(w + kLanes);
#pragma GCC unroll 12
    for (int r = 0; r < kTall; r++) {
      const Vec number = splat(x[r]);
      sum[r][0] = fma(left, number, sum[r][0]);
      sum[r][1] = fma(right, number, sum[r][1]);
    }
  }
  if (!add_lanes<0>(sum, i, kept)) return;
#pragma GCC unroll 2
  for (int v = 0; v < 2; v++) {
    const long at = o + v * kLanes, n = std::min<long>(kLanes, matrix.out - at);
    if (n > 0) {
      const Vec bias = matrix.bias ? some<E>(matrix.bias + at * E::kBytes, n) : splat(0.0f);
#pragma GCC unroll 12
      for (int r = 0; r < kTall; r++)
        put_some<E>(matrix.bias ? add(sum[r][v], bias) : sum[r][v], n, matrix.y + ((row + r) * matrix.out + at) * E::kBytes);
    }
  }
}

// Rows of a tile; the last one begins with rows of the one before where it would not be full.
KVB_INLINE long tile_row(long tile, long rows) { return std::min(tile * kTall, rows - kTall); }

// All rows of x, in order and in tiles from row `first` on, with panels of a matrix from output o on.
template <class E> static void block_in_panels(const float* x, const float* w, float* kept, const Order<E>& order, const Matrix& matrix, long o, long first, long rows) {
  const long tiles = (rows + kTall - 1) / kTall, panels = std::min(order.panels, (matrix.out - o + kPanel - 1) / kPanel);
  for (long begin = 0; begin < tiles; begin += order.tiles)
    for (long i = 0; i < kLanes; i++)
      for (long panel = 0; panel < panels; panel++)
        for (long t = begin; t < std::min(begin + order.tiles, tiles); t++) {
          const float* xs = x + t * order.floats(kTall) + lane_of(i) * order.apart * kTall;
          const float* ws = w + panel * order.floats(kPanel) + lane_of(i) * order.apart * kPanel;
          float* sums = kept + (panel * order.tiles + t - begin) * kRounds * kTall * kPanel;
          lane_tile<E>(xs, ws, order.depth, i, sums, matrix, o + panel * kPanel, first + tile_row(t, rows));
        }
}

template <class E> static int panel_products(const Products& p) {
  static thread_local std::vector<float> room;
  const Order<E> order(p);
  const long parts = (p.rows + kMostInPanels - 1) / kMostInPanels, row_bytes = p.in * E::kBytes, size = order.panels * kPanel;
  const long most = (p.rows + parts - 1) / parts, x_floats = (most + kTall - 1) / kTall * order.floats(kTall), w_floats = order.panels * order.floats(kPanel);
  const long of_thread = (w_floats + order.kept() + kLine - 1) / kLine * kLine, x_room = (x_floats + kLine - 1) / kLine * kLine;
  const auto blocks_of = [size](const Matrix& matrix) { return (matrix.out + size - 1) / size; };
  long blocks = 0;
  for (long i = 0; i < p.count; i++) blocks += blocks_of(p.matrices[i]);
  try {
    room.resize(std::max<size_t>(room.size(), x_room + p.num_threads * of_thread + kLine));
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  }
  float* x = room.data() + (-(uintptr_t)room.data() % (4 * kLine)) / 4;
#pragma omp parallel num_threads(p.num_threads) if (p.num_threads > 1)
  {
#ifdef _OPENMP
    float* w = x + x_room + omp_get_thread_num() * of_thread;
#else
    float* w = x + x_room;
#endif
    for (long part = 0; part < parts; part++) {
      const long first = part * p.rows / parts, rows = (part + 1) * p.rows / parts - first, tiles = (rows + kTall - 1) / kTall;
#pragma omp for schedule(static)
      for (long t = 0; t < tiles; t++) put_beside<E, kTall>(p.x + (first + tile_row(t, rows)) * row_bytes, kTall, row_bytes, order, x + t * order.floats(kTall));
#pragma omp for schedule(dynamic)
      for (long i = 0; i < blocks; i++) {
        const Matrix* matrix = p.matrices;
        long number = i;
        for (; number >= blocks_of(*matrix); matrix++) number -= blocks_of(*matrix);
        const long o = number * size;
        for (long panel = 0; panel < order.panels && o + panel * kPanel < matrix->out; panel++) {
          const long at = o + panel * kPanel;
          put_beside<E, kPanel>(matrix->w + at * row_bytes, std::min(kPanel, matrix->out - at), row_bytes, order, w + panel * order.floats(kPanel));
        }
        block_in_panels<E>(x, w, w + w_floats, order, *matrix, o, first, rows);
      }
    }
  }
  return kDone;
}

}  // namespace kvb
