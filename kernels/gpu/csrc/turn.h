// A turn: one warp attends over 32 tokens of a list, in pages and in residual buffers.
//
// A lane has the logits and probabilities of tokens 4g .. 4g + 3 for queries 2c and 2c + 1: x[m][0] and x[m][1] of token
// 4g + 2m, x[m][2] and x[m][3] of the next one. Logits are of base 2.
#pragma once

#include "codes.h"

constexpr float LOWEST = -1e30f;  // stands for minus infinity, whose difference from itself would be NaN
// A probability may be 2^SLACK before the running maximum is raised, so that this seldom happens; halves hold it.
constexpr float SLACK = 4.0f;

// What a list holds and where, as the producer found it.
struct Item {
  int list, part, parts, first_part;  // parts: of the list, in both tiers; first_part: where they lie
  int begin, end, paged;              // pages of this part; those below `paged` are in the pool
  int held_k, held_v, total, second;  // tokens in pages, and with those in buffers; the tier
  i64 ring_k, ring_v;                 // where the list's buffers begin, in elements
  float by[8], query_sum[8], less[8];  // of each query: factor on logits, sum, and what products begin with
};

template <class S, int D> struct State {
  float top[2];                            // running maximum of queries 2c and 2c + 1
  float acc[D / 16][4];                    // output, tile by tile of channels
  float both[4];                           // zeros times probabilities (of group g), and the sum of probabilities
  float sums[Values<S, D>::GROUPS][2];     // of scaled probabilities
};

template <class S, int D> DEVICE void clear(State<S, D>& s) {
  s.top[0] = s.top[1] = LOWEST;
#pragma unroll
  for (int i = 0; i < D / 16; ++i)
    for (int j = 0; j < 4; ++j) s.acc[i][j] = 0;
  for (int j = 0; j < 4; ++j) s.both[j] = 0;
#pragma unroll
  for (int i = 0; i < Values<S, D>::GROUPS; ++i) s.sums[i][0] = s.sums[i][1] = 0;
}

// A lane's part of the queries: in shared memory, or it would take the registers that the values need.
template <int BLOCKS> DEVICE void load_queries(u32 (&q)[BLOCKS], const u32 (*from)[32][4], int lane) {
#pragma unroll
  for (int i = 0; i < BLOCKS / 4; ++i) {
    const uint4 x = *(const uint4*)from[i][lane];
    q[4 * i] = x.x, q[4 * i + 1] = x.y, q[4 * i + 2] = x.z, q[4 * i + 3] = x.w;
  }
}

// Products of the turn's keys in a page with the queries, times what the queries were divided by.
template <class F, class S> DEVICE void page_dots(float (&dot)[2][4], const u8* page, int t0, const u32 (*queries)[32][4], const Item& item, int lane) {
  using K = Keys<S, F::D>;
  const int g = lane / 4, c = lane % 4;
  if constexpr (K::PER_CHANNEL) {
    // Scales go into the queries; zeros, and what codes are too large by, are one key more, to which all tokens are added.
    u32 scaled[K::BLOCKS], in_order[K::BLOCKS];  // by their blocks, and as `add_key_codes` takes them
    float all[4] = {};
    const u8* meta = page + 2 * (t0 / S::K_GROUP * F::D + lane / 8 * 8);
#pragma unroll
    for (int i = 0; i < K::BLOCKS; i += 4) {
      const uint4 four = *(const uint4*)queries[i / 4][lane];
      const u32 q[4] = {four.x, four.y, four.z, four.w};
      u32 scale[4], zero[4];
      load_matrices(scale, meta + S::K_SCALE + 16 * i);
      load_matrices(zero, meta + S::K_ZERO + 16 * i);
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const int plane = (i + b) / (K::BYTES / 8);
        const u32 half = (15 - S::K_BITS * plane) << 10;  // by what codes of the plane are too large
        scaled[i + b] = mul_halves(q[b], scale[b]);
        if (plane > 0) scaled[i + b] = mul_halves(scaled[i + b], half | half << 16);
      }
#pragma unroll
      for (int b = 0; b < 4; b += 2) {
        mma(all, zero[b], zero[b], zero[b + 1], zero[b + 1], q[b], q[b + 1]);
        mma(all, 0xe400e400, 0xe400e400, 0xe400e400, 0xe400e400, scaled[i + b], scaled[i + b + 1]);
      }
    }
#pragma unroll
    for (int r = 0; r < K::BLOCKS; ++r) in_order[r] = scaled[K::block(r)];
#pragma unroll
    for (int m = 0; m < 2; ++m)
      for (int j = 0; j < 4; ++j) dot[m][j] = all[j];
    add_key_codes<S, F::D>(dot, page + S::K_CODES + t0, in_order, g, c);
  } else {
    u32 q[K::BLOCKS];
    load_queries(q, queries, lane);
    const float2 less = *(const float2*)&item.less[2 * c];
#pragma unroll
    for (int m = 0; m < 2; ++m) dot[m][0] = dot[m][2] = less.x, dot[m][1] = dot[m][3] = less.y;
    add_key_codes<S, F::D>(dot, page + S::K_CODES + t0, q, g, c);
    const uint2 scales = *(const uint2*)(page + S::K_SCALE + 2 * (t0 + 4 * g));
    const float2 s[2] = {unpack_halves(scales.x), unpack_halves(scales.y)};
    if constexpr (S::K_ZERO >= 0) {
      const uint2 zeros = *(const uint2*)(page + S::K_ZERO + 2 * (t0 + 4 * g));
      const float2 z[2] = {unpack_halves(zeros.x), unpack_halves(zeros.y)}, sum = *(const float2*)&item.query_sum[2 * c];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        dot[m][0] = dot[m][0] * s[m].x + sum.x * z[m].x, dot[m][1] = dot[m][1] * s[m].x + sum.y * z[m].x;
        dot[m][2] = dot[m][2] * s[m].y + sum.x * z[m].y, dot[m][3] = dot[m][3] * s[m].y + sum.y * z[m].y;
      }
    } else {
#pragma unroll
      for (int m = 0; m < 2; ++m) dot[m][0] *= s[m].x, dot[m][1] *= s[m].x, dot[m][2] *= s[m].y, dot[m][3] *= s[m].y;
    }
  }
}

// Raises the running maximum where a logit exceeds it by more than the slack; logits of LOWEST are none.
template <class F, class S> DEVICE void raise_top(State<S, F::D>& s, const float (&x)[2][4]) {
  float most[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) most[j] = fmaxf(fmaxf(x[0][j], x[0][j + 2]), fmaxf(x[1][j], x[1][j + 2]));
  if (!vote(most[0] > s.top[0] + SLACK || most[1] > s.top[1] + SLACK)) return;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) most[j] = fmaxf(most[j], shuffle_xor(most[j], mask));
    const float now = fmaxf(s.top[j], most[j]), shrink = exp2_of(s.top[j] - now);
    s.top[j] = now;
#pragma unroll
    for (int i = 0; i < F::D / 16; ++i) s.acc[i][j] *= shrink, s.acc[i][j + 2] *= shrink;
    s.both[j] *= shrink, s.both[j + 2] *= shrink;
#pragma unroll
    for (int i = 0; i < Values<S, F::D>::GROUPS; ++i) s.sums[i][j] *= shrink;
  }
}

// Of two tokens of a word, those before `live`.
DEVICE u32 live_halves(u32 x, int live) { return live >= 2 ? x : live == 1 ? x & 0xffff : 0; }
DEVICE uint4 live_eight(uint4 x, int live) {
  return {live_halves(x.x, live), live_halves(x.y, live - 2), live_halves(x.z, live - 4), live_halves(x.w, live - 6)};
}

// Adds the values of a turn in a page. p: probabilities as columns; of tokens from `live` on scales may be anything.
template <class F, class S, bool EDGE>
DEVICE void add_page_values(State<S, F::D>& s, const u8* page, int t0, const u32 (&p)[2][2], int live, int lane) {
  using V = Values<S, F::D>;
  const int g = lane / 4, c = lane % 4;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    u32 zero[2] = {0, 0};
    if constexpr (S::V_ZERO >= 0) {
      const int group = V::GROUPS == 1 ? 0 : g < V::GROUPS ? g : V::GROUPS - 1;
      uint4 zeros = *(const uint4*)(page + S::V_ZERO + 2 * (group * S::SLOTS + t0 + 8 * c));
      if constexpr (EDGE) zeros = live_eight(zeros, live - 8 * c);
      in_columns(zero, zeros, m);
    }
    mma(s.both, zero[0], ONES, zero[1], ONES, p[m][0], p[m][1]);
    u32 raw[2][2][V::WORDS];
    load_value_words<S, F::D>(raw, page + S::V_CODES + t0 * V::BYTES, m, g, c);
    for_each<V::GROUPS>([&](auto group) {
      constexpr int GROUP = decltype(group)::value;
      uint4 scales = *(const uint4*)(page + S::V_SCALE + 2 * (GROUP * S::SLOTS + t0 + 8 * c));
      if constexpr (EDGE) scales = live_eight(scales, live - 8 * c);
      u32 b[2];
      in_columns(b, scales, m);
      b[0] = mul_halves(b[0], p[m][0]), b[1] = mul_halves(b[1], p[m][1]);
      if constexpr (has_offsets<S, F::D, GROUP>()) {
        float sum[4] = {s.sums[GROUP][0], s.sums[GROUP][1], 0, 0};
        mma(sum, ONES, 0, ONES, 0, b[0], b[1]);
        s.sums[GROUP][0] = sum[0], s.sums[GROUP][1] = sum[1];
      }
      for_each<V::TILES>([&](auto tile) {
        constexpr int TILE = decltype(tile)::value;
        if constexpr (V::group_of(TILE) == GROUP) add_value_codes<S, F::D, TILE>(s.acc[TILE], raw, b);
      });
    });
  }
}
