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
  alignas(16) float by[8], query_sum[8], less[8];  // of each query: factor on logits, sum, what products begin with
};

// Where those of a lane's two queries are, from its own address on.
constexpr int QUERY_SUM = 32, LESS = 64;
DEVICE float2 load_pair(Local at) {
  const uint2 x = load_two(at);
  return {float_of(x.x), float_of(x.y)};
}

template <class S, int D> struct State {
  float top[2];                            // running maximum of queries 2c and 2c + 1
  float acc[D / 16][4];                    // output, tile by tile of channels
  float both[4];                           // zeros times probabilities (of group g), and the sum of probabilities
  float sums[(Values<S, D>::GROUPS + 1) / 2][4];  // of scaled probabilities, of two groups of channels each
};

template <class S, int D> DEVICE void clear(State<S, D>& s) {
  s.top[0] = s.top[1] = LOWEST;
#pragma unroll
  for (int i = 0; i < D / 16; ++i)
    for (int j = 0; j < 4; ++j) s.acc[i][j] = 0;
  for (int j = 0; j < 4; ++j) s.both[j] = 0;
#pragma unroll
  for (int i = 0; i < (Values<S, D>::GROUPS + 1) / 2; ++i)
    for (int j = 0; j < 4; ++j) s.sums[i][j] = 0;
}

// A lane's part of the queries, four blocks every 512 bytes: in shared memory, or it would take the registers that the values need.
template <int BLOCKS> DEVICE void load_queries(u32 (&q)[BLOCKS], Local from) {
#pragma unroll
  for (int i = 0; i < BLOCKS / 4; ++i) {
    const uint4 x = load_four(from + 512 * i);
    q[4 * i] = x.x, q[4 * i + 1] = x.y, q[4 * i + 2] = x.z, q[4 * i + 3] = x.w;
  }
}

// Products of the turn's keys in a page with the queries, times what the queries were divided by.
template <class F, class S> DEVICE void page_dots(float (&dot)[2][4], Local page, int t0, Local queries, Local item, int lane) {
  using K = Keys<S, F::D>;
  const int g = lane / 4, c = lane % 4;
  if constexpr (K::PER_CHANNEL) {
    // Scales go into the queries; zeros, and what codes are too large by, are one key more, to which all tokens are added.
    // The upper rows of a product are blocks 0 and 1 of four, the lower rows blocks 2 and 3: each has its own queries.
    u32 scaled[K::BLOCKS];
    float upper[4] = {}, lower[4] = {};
    const Local meta = page + 2 * (t0 / S::K_GROUP * F::D), scales = settled(meta + lane / 8 * 16);
    const Local zeros = settled(meta + (lane / 16 + lane / 8 % 2 * 2) * 16);
#pragma unroll
    for (int i = 0; i < K::BLOCKS; i += 4) {
      const uint4 four = load_four(queries + 128 * i);
      const u32 q[4] = {four.x, four.y, four.z, four.w};
      u32 scale[4], zero[4];
      load_matrices(scale, scales + (S::K_SCALE + 16 * i));
      load_matrices(zero, zeros + (S::K_ZERO + 16 * i));
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const u32 half = (15 - S::K_BITS * K::plane(i + b)) << 10;  // by what codes of the plane are too large
        scaled[i + b] = mul_halves(q[b], scale[b]);
        if (K::plane(i + b) > 0) scaled[i + b] = mul_halves(scaled[i + b], half | half << 16);
      }
      mma(upper, zero[0], zero[1], zero[2], zero[3], q[0], q[1]);
      mma(lower, zero[0], zero[1], zero[2], zero[3], q[2], q[3]);
#pragma unroll
      for (int b = 0; b < 4; b += 2) mma(upper, 0xe400e400, 0xe400e400, 0xe400e400, 0xe400e400, scaled[i + b], scaled[i + b + 1]);
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) dot[0][j] = dot[0][j + 2] = dot[1][j] = dot[1][j + 2] = upper[j] + lower[j + 2];
    add_key_codes<S, F::D>(dot, page + (S::K_CODES + t0), scaled, g, c);
  } else {
    u32 q[K::BLOCKS];
    load_queries(q, queries);
    const float2 less = load_pair(item + LESS);
#pragma unroll
    for (int m = 0; m < 2; ++m) dot[m][0] = dot[m][2] = less.x, dot[m][1] = dot[m][3] = less.y;
    add_key_codes<S, F::D>(dot, page + (S::K_CODES + t0), q, g, c);
    const Local meta = settled(page + 2 * (t0 + 4 * g));
    const uint2 scales = load_two(meta + S::K_SCALE);
    const float2 s[2] = {unpack_halves(scales.x), unpack_halves(scales.y)};
    if constexpr (S::K_ZERO >= 0) {
      const uint2 zeros = load_two(meta + S::K_ZERO);
      const float2 z[2] = {unpack_halves(zeros.x), unpack_halves(zeros.y)}, sum = load_pair(item + QUERY_SUM);
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

// Raises the running maximum where a logit, x times `by`, exceeds it by more than the slack; LOWEST is none.
template <class F, class S> DEVICE void raise_top(State<S, F::D>& s, const float (&x)[2][4], const float (&by)[2]) {
  float most[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) most[j] = by[j] * fmaxf(fmaxf(x[0][j], x[0][j + 2]), fmaxf(x[1][j], x[1][j + 2]));
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
    for_each<Values<S, F::D>::GROUPS>([&](auto group) {  // of the others nothing is kept
      constexpr int GROUP = decltype(group)::value;
      if constexpr (has_offsets<S, F::D, GROUP>()) s.sums[GROUP / 2][GROUP % 2 * 2 + j] *= shrink;
    });
  }
}

// Of two tokens of a word, those before `live`.
DEVICE u32 live_halves(u32 x, int live) { return live >= 2 ? x : live == 1 ? x & 0xffff : 0; }
DEVICE uint4 live_eight(uint4 x, int live) {
  return {live_halves(x.x, live), live_halves(x.y, live - 2), live_halves(x.z, live - 4), live_halves(x.w, live - 6)};
}

// Adds the values of a turn in a page. p: probabilities as columns; of tokens from `live` on scales may be anything.
template <class F, class S, bool EDGE>
DEVICE void add_page_values(State<S, F::D>& s, Local page, int t0, const u32 (&p)[2][2], int live, int lane) {
  using V = Values<S, F::D>;
  const int g = lane / 4, c = lane % 4;
  const Local meta = settled(page + 2 * (t0 + 8 * c)), zero_at = V::GROUPS == 1 ? meta : settled(meta + 2 * g * S::SLOTS);
  const Local codes = settled(page + (t0 * V::BYTES + 8 * c * V::BYTES + V::first_byte(0, g)));
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    u32 zero[2] = {0, 0};  // row g of a product: of group g; rows that have none are of no use, whatever they read
    if constexpr (S::V_ZERO >= 0) {
      uint4 zeros = load_four(zero_at + S::V_ZERO);
      if constexpr (EDGE) zeros = live_eight(zeros, live - 8 * c);
      in_columns(zero, zeros, m);
    }
    mma(s.both, zero[0], ONES, zero[1], ONES, p[m][0], p[m][1]);
    u32 raw[2][2][V::WORDS];
    load_value_words<S, F::D>(raw, codes + S::V_CODES, m);
    for_each<V::GROUPS>([&](auto group) {
      constexpr int GROUP = decltype(group)::value;
      uint4 scales = load_four(meta + (S::V_SCALE + 2 * GROUP * S::SLOTS));
      if constexpr (EDGE) scales = live_eight(scales, live - 8 * c);
      u32 b[2];
      in_columns(b, scales, m);
      b[0] = mul_halves(b[0], p[m][0]), b[1] = mul_halves(b[1], p[m][1]);
      if constexpr (has_offsets<S, F::D, GROUP>()) {
        constexpr u32 UPPER = GROUP % 2 ? 0 : ONES, LOWER = GROUP % 2 ? ONES : 0;
        mma(s.sums[GROUP / 2], UPPER, LOWER, UPPER, LOWER, b[0], b[1]);
      }
      for_each<V::TILES>([&](auto tile) {
        constexpr int TILE = decltype(tile)::value;
        if constexpr (V::group_of(TILE) == GROUP) add_value_codes<S, F::D, TILE>(s.acc[TILE], raw, b);
      });
    });
  }
}
