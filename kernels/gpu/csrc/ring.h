// The tokens of a turn that lie in residual buffers: elements of 16 bits, read where they lie.
#pragma once

#include "turn.h"

// F::RING: 1 = fp16, 2 = bf16.
template <class F> DEVICE u32 ring_pair(float low, float high) {
  return F::RING == 2 ? pack_bfloats(low, high) : pack_halves(low, high);
}
template <class F> DEVICE void ring_mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  if constexpr (F::RING == 2) mma_bfloats(c, a0, a1, a2, a3, b0, b1);
  else mma(c, a0, a1, a2, a3, b0, b1);
}

// Products of queries with the keys of tokens `first` + 4g .. + 3; of those that are not in the buffer, anything finite.
template <class F, class S>
DEVICE void ring_dots(float (&dot)[2][4], const u16* ring, int length, int first, const Item& item, Local queries, int lane) {
  using K = Keys<S, F::D>;
  const int g = lane / 4, c = lane % 4;
  const u16* rows[4];
  bool live[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int token = first + 4 * g + j;
    live[j] = token >= item.held_k && token < item.total && token >= item.total - length;
    rows[j] = ring + (live[j] ? token % length : 0) * F::D + 2 * c;
  }
#pragma unroll 1  // or all loads are begun at once, and find no registers
  for (int r = 0; r < K::BLOCKS; r += 2) {
    const uint2 pair = load_two(queries + (r / 4 * 512 + r % 4 * 4));
    const u32 q[2] = {pair.x, pair.y};
    u32 b[2], a[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 x = unpack_halves(q[i]);
      const float by = K::PER_CHANNEL ? 1.0f : float_of((127 + S::K_BITS * K::plane(r)) << 23);
      b[i] = ring_pair<F>(x.x * by, x.y * by);
#pragma unroll
      for (int j = 0; j < 4; ++j) a[i][j] = live[j] ? *(const u32*)(rows[j] + 8 * (r + i)) : 0;
    }
    ring_mma<F>(dot[0], a[0][0], a[0][1], a[1][0], a[1][1], b[0], b[1]);
    ring_mma<F>(dot[1], a[0][2], a[0][3], a[1][2], a[1][3], b[0], b[1]);
  }
}

// Adds the values of the turn's tokens that are in the buffer; p: probabilities as columns, in halves.
template <class F, class S>
DEVICE void add_ring_values(State<S, F::D>& s, const u16* ring, int length, int first, const Item& item, const u32 (&p)[2][2], int lane) {
  using V = Values<S, F::D>;
  const int g = lane / 4, c = lane % 4;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const u16* rows[4];
    bool live[4];  // tokens 2m and 2m + 4 of the lane's eight, then 2m + 1 and 2m + 5
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int token = first + 8 * c + 2 * m + j / 2 + 4 * (j % 2);
      live[j] = token >= item.held_v && token < item.total && token >= item.total - length;
      rows[j] = ring + (live[j] ? token % length : 0) * F::D;
    }
    const float2 low = unpack_halves(p[m][0]), high = unpack_halves(p[m][1]);
    for_each<V::TILES>([&](auto tile) {
      constexpr int TILE = decltype(tile)::value, PLANE = V::plane_of(TILE), BITS = S::V_BITS;
      constexpr float by = is_exact<BITS, PLANE>() ? 1.0f : 1.0f / code_scale<BITS, PLANE>();
      u32 x[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j] = live[j] ? *(const u32*)(rows[j] + V::channel(TILE, g)) : 0;
      ring_mma<F>(s.acc[TILE], prmt(x[0], x[1], 0x5410), prmt(x[0], x[1], 0x7632), prmt(x[2], x[3], 0x5410),
                  prmt(x[2], x[3], 0x7632), ring_pair<F>(low.x * by, low.y * by), ring_pair<F>(high.x * by, high.y * by));
    });
  }
}
