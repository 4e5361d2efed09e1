// Products of bf16 rows with matrices in AMX tiles: y = x w' + bias. products.cpp includes it.
//
// A sum runs along `in` in one tile, 32 numbers a step from the first to the last, so its order depends on `in` alone. Of w, 16 outputs by a step
// are one tile as they lie; of x, a step of 16 rows is a tile of pairs, which is packed once. Sums lie [output][row], and are transposed at the end.
#pragma once

#include <immintrin.h>

namespace kvb {

constexpr long kTileRows = 16;                    // of w or of x in a tile
constexpr long kTileStep = 32;                    // numbers of a row in a tile
constexpr long kTileBytes = 1024;
constexpr long kTileOutputs = 2 * kTileRows;      // outputs of a block of work
constexpr long kPartRows = 128;                   // rows of x that are packed at once: with a block of w they lie in the second-level cache

struct alignas(64) TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// 16 vectors of 16 words. Words are moved, not computed with.
KVB_INLINE void transpose16(__m512* r) {
  __m512 t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]), t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  const auto low = [&](int a, int b) { return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(t[a]), _mm512_castps_pd(t[b]))); };
  const auto high = [&](int a, int b) { return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(t[a]), _mm512_castps_pd(t[b]))); };
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) r[i] = low(i, i + 2), r[i + 1] = high(i, i + 2), r[i + 2] = low(i + 1, i + 3), r[i + 3] = high(i + 1, i + 3);
  // Quarter q of r[4 i + c] is column 4 q + c of rows 4 i to 4 i + 3.
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++) {
    const __m512 even = _mm512_shuffle_f32x4(r[c], r[4 + c], 0x88), even_next = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0x88);
    const __m512 odd = _mm512_shuffle_f32x4(r[c], r[4 + c], 0xdd), odd_next = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0xdd);
    t[c] = _mm512_shuffle_f32x4(even, even_next, 0x88), t[4 + c] = _mm512_shuffle_f32x4(odd, odd_next, 0x88);
    t[8 + c] = _mm512_shuffle_f32x4(even, even_next, 0xdd), t[12 + c] = _mm512_shuffle_f32x4(odd, odd_next, 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) r[i] = t[i];
}

// Rows [first, first + rows) of p as tiles [group of 16 rows][step]: word [pair][row], zeros where there is no number.
struct PackedRows {
  const Products& p;
  long first, rows, groups, steps;
  uint8_t* tiles;

  PackedRows(const Products& p, long first, long rows)
      : p(p), first(first), rows(rows), groups((rows + kTileRows - 1) / kTileRows), steps((p.in + kTileStep - 1) / kTileStep), tiles(nullptr) {}
  long bytes() const { return groups * steps * kTileBytes; }
  void pack(long group) const {
    uint8_t* to = tiles + group * steps * kTileBytes;
    const long count = std::min(kTileRows, rows - group * kTileRows);
    const uint8_t* from = p.x + (first + group * kTileRows) * p.in * 2;
    for (long step = 0; step < steps; step++, to += kTileBytes, from += 2 * kTileStep) {
      const long n = std::min(kTileStep, p.in - step * kTileStep);
      const __mmask32 mask = n == kTileStep ? ~0u : (1u << n) - 1;
      __m512 r[16];
#pragma GCC unroll 16
      for (long c = 0; c < 16; c++)
        r[c] = c < count ? _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(mask, from + c * p.in * 2)) : _mm512_setzero_ps();
      transpose16(r);
#pragma GCC unroll 16
      for (long j = 0; j < 16; j++) _mm512_store_ps(to + j * 64, r[j]);
    }
  }
};

// Sums of one or two tiles of outputs with one or two groups of rows, at sums[output tile][group][output][row]. w: of the first output, rows of
// w_row bytes, whole steps of it; rest: the last step of kTileOutputs rows where it is not whole, or null; next: where w goes on, to be fetched, or null.
template <int kOut, int kGroups>
static void tile_sums(const uint8_t* w, long w_row, const uint8_t* rest, const uint8_t* next, const uint8_t* x, long steps, float* sums) {
  _tile_zero(0);
  if constexpr (kGroups == 2) _tile_zero(1);
  if constexpr (kOut == 2) _tile_zero(2);
  if constexpr (kOut == 2 && kGroups == 2) _tile_zero(3);
  const uint8_t* x_next = x + steps * kTileBytes;
  const auto step = [&](const uint8_t* from, long row, long i) __attribute__((always_inline)) {
    _tile_loadd(6, x + i * kTileBytes, 64);
    if constexpr (kGroups == 2) _tile_loadd(7, x_next + i * kTileBytes, 64);
    _tile_loadd(4, from, row);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kGroups == 2) _tile_dpbf16ps(1, 4, 7);
    if constexpr (kOut == 2) {
      _tile_loadd(5, from + 16 * row, row);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (kGroups == 2) _tile_dpbf16ps(3, 5, 7);
    }
  };
  const long whole = rest ? steps - 1 : steps;
  for (long i = 0; i < whole; i++) {
    if (next)
      for (long r = 0; r < kOut * 16; r++) __builtin_prefetch(next + r * w_row + i * 64, 0, 2);
    step(w + i * 64, w_row, i);
  }
  if (rest) step(rest, 64, whole);
  _tile_stored(0, sums, 64);
  if constexpr (kGroups == 2) _tile_stored(1, sums + 256, 64);
  if constexpr (kOut == 2) _tile_stored(2, sums + 512, 64);
  if constexpr (kOut == 2 && kGroups == 2) _tile_stored(3, sums + 768, 64);
}

// A tile of sums [output][row] as y of `outputs` outputs from o on and `rows` rows from `row` on.
static void put_tile(const float* sums, const Matrix& matrix, long o, long outputs, long row, long rows) {
  const __mmask16 mask = outputs == 16 ? 0xffff : (1u << outputs) - 1;
  __m512 r[16], bias = _mm512_setzero_ps();
  if (matrix.bias) bias = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, matrix.bias + 2 * o)), 16));
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) r[i] = _mm512_load_ps(sums + 16 * i);
  transpose16(r);
  for (long i = 0; i < rows; i++) {
    uint8_t* to = matrix.y + ((row + i) * matrix.out + o) * 2;
    alignas(32) uint8_t whole[32];
    BF16::put_of<BF16::BitsAll, BF16::HalvesAll>(&(r[i] = _mm512_add_ps(r[i], bias)), 16, whole);
    _mm256_mask_storeu_epi16(to, mask, _mm256_load_si256((const __m256i*)whole));
  }
}

// Outputs [o, o + count) of a matrix, at most kTileOutputs, for all packed rows.
static void tile_block(const PackedRows& x, const Matrix& matrix, long o, long count, std::vector<uint8_t>& room) {
  const long w_row = x.p.in * 2, whole = x.p.in / kTileStep;
  const uint8_t *w = matrix.w + o * w_row, *rest = nullptr, *next = w + kTileOutputs * w_row;
  alignas(64) uint8_t last[kTileOutputs * 64];
  long row = w_row;
  if (count % kTileRows) {  // no tile of w may begin in one row of memory and end behind the matrix
    row = x.steps * 64;
    room.assign(kTileOutputs * row, 0);
    for (long r = 0; r < count; r++) std::memcpy(room.data() + r * row, w + r * w_row, w_row);
    w = room.data();
  } else if (whole < x.steps) {
    std::memset(last, 0, sizeof last);
    for (long r = 0; r < count; r++) std::memcpy(last + r * 64, w + r * w_row + whole * 64, w_row - whole * 64);
    rest = last;
  }
  if (o + 2 * kTileOutputs > matrix.out) next = nullptr;
  const bool both = count > kTileRows;
  alignas(64) float sums[4 * 256];
  for (long group = 0; group < x.groups; group += 2, next = nullptr) {
    const uint8_t* tiles = x.tiles + group * x.steps * kTileBytes;
    const bool pair = group + 1 < x.groups;
    const auto of = both ? (pair ? tile_sums<2, 2> : tile_sums<2, 1>) : (pair ? tile_sums<1, 2> : tile_sums<1, 1>);
    of(w, row, rest, next, tiles, x.steps, sums);
    for (long a = 0; a <= both; a++)
      for (long g = 0; g <= pair; g++) {
        const long at = (group + g) * kTileRows;
        put_tile(sums + (2 * a + g) * 256, matrix, o + a * kTileRows, std::min(kTileRows, count - a * kTileRows), x.first + at, std::min(kTileRows, x.rows - at));
      }
  }
}

static int tile_products(const Products& p) {
  static thread_local std::vector<uint8_t> packed, room;
  const long blocks = blocks_of(p, kTileOutputs), parts = (p.rows + kPartRows - 1) / kPartRows;
  int status = kDone;
  for (long part = 0; part < parts && status == kDone; part++) {
    const long first = part * p.rows / parts;
    PackedRows x(p, first, (part + 1) * p.rows / parts - first);
    try {
      packed.resize(std::max<size_t>(packed.size(), x.bytes() + 64));
    } catch (const std::bad_alloc&) {
      return kNoMemory;
    }
    x.tiles = packed.data() + -(uintptr_t)packed.data() % 64;
#pragma omp parallel num_threads(p.num_threads) if (p.num_threads > 1)
    {
      const TileConfig config;
#pragma omp for schedule(static)
      for (long i = 0; i < x.groups; i++) x.pack(i);
      _tile_loadconfig(&config);
#pragma omp for schedule(dynamic)
      for (long i = 0; i < blocks; i++) {
        const At at = block_at(p, kTileOutputs, i);
        try {
          tile_block(x, *at.matrix, at.begin, std::min(kTileOutputs, at.matrix->out - at.begin), room);
        } catch (const std::bad_alloc&) {
#pragma omp atomic write
          status = kNoMemory;
        }
      }
      _tile_release();
    }
  }
  return status;
}

}  // namespace kvb
