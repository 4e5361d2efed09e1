// What the warps found of an item becomes a part, and the parts of a list its output.
#pragma once

#include "produce.h"

// What the warps found of an item, as one part: output over the sum of exponentials is still to be divided.
template <class S> DEVICE void merge_warps(Shared& shared, State<S, F::D>& s, int warp, int lane) {
  using V = Values<S, F::D>;
  const int g = lane / 4, c = lane % 4;
  if (g == 0)
    for (int j = 0; j < 2; ++j) shared.tops[warp][2 * c + j] = s.top[j], shared.norms[warp][2 * c + j] = s.both[2 + j];
  sync_some(1, CONSUMERS);
  float by[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    float top = shared.tops[0][2 * c + j];
    for (int i = 1; i < WARPS; ++i) top = fmaxf(top, shared.tops[i][2 * c + j]);
    by[j] = exp2_of(s.top[j] - top);
  }
  float zeros[V::GROUPS][2];
#pragma unroll
  for (int i = 0; i < V::GROUPS; ++i)
    for (int j = 0; j < 2; ++j) zeros[i][j] = V::GROUPS == 1 ? s.both[j] : shuffle(s.both[j], 4 * i + c);
  for_each<V::TILES>([&](auto tile) {
    constexpr int TILE = decltype(tile)::value, PLANE = V::plane_of(TILE), BITS = S::V_BITS, GROUP = V::group_of(TILE);
    constexpr bool EXACT = is_exact<BITS, PLANE>();
    constexpr float BY = EXACT ? 1.0f : code_scale<BITS, PLANE>(), LESS = S::V_CENTRE + (EXACT ? 0.0f : code_offset<BITS, PLANE>());
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (2 * c + j >= F::G) continue;
      const float rest = zeros[GROUP][j] - LESS * s.sums[GROUP / 2][GROUP % 2 * 2 + j];
      float2 found = {(s.acc[TILE][j] * BY + rest) * by[j], (s.acc[TILE][j + 2] * BY + rest) * by[j]};
      *(float2*)&shared.merged[warp][2 * c + j][V::channel(TILE, g)] = found;
    }
  });
  sync_some(1, CONSUMERS);
}

DEVICE u32 output_pair(float low, float high) { return F::OUT == 2 ? pack_bfloats(low, high) : pack_halves(low, high); }

// The last step: divides by the sum, and puts a head's sink beside it.
DEVICE void store_output(const Call& call, int list, int query, int at, float4 x, float top, float norm) {
  if (call.sinks) {
    const int head = (call.offset + list % call.heads) * F::G + query;
    const float sink = call.sinks[head] * LOG2_E, now = fmaxf(top, sink), shrink = exp2_of(top - now);
    if (sink > LOWEST) norm = norm * shrink + exp2_of(sink - now), x.x *= shrink, x.y *= shrink, x.z *= shrink, x.w *= shrink, top = now;
  }
  const float by = norm == 0 ? float_of(0x7fc00000) : 1 / norm;  // nothing was read: not a number
  const i64 to = ((i64)list * F::G + query) * F::D + at;
  x.x *= by, x.y *= by, x.z *= by, x.w *= by;
  if constexpr (F::OUT == 0) store_four((float*)call.out + to, x);
  else *(uint2*)((u16*)call.out + to) = {output_pair(x.x, x.y), output_pair(x.z, x.w)};
  if (at == 0) {
    const float lse2 = norm == 0 ? float_of(0xff800000) : top + log2_of(norm);
    call.lse[(i64)list * F::G + query] = lse2 * LN_2, call.lse2[(i64)list * F::G + query] = lse2;
  }
}

// Sums up what the warps found; the block that comes last to a list merges its parts.
DEVICE void finish_item(const Call& call, Shared& shared, const Item& item, int thread) {
  constexpr int FOURS = F::G * F::D / 4;
  for (int i = thread; i < FOURS; i += CONSUMERS) {
    const int query = 4 * i / F::D, at = 4 * i % F::D;
    float top = shared.tops[0][query], norm = 0;
    for (int w = 1; w < WARPS; ++w) top = fmaxf(top, shared.tops[w][query]);
    float4 x = {0, 0, 0, 0};
    for (int w = 0; w < WARPS; ++w) {
      const float4 y = *(const float4*)&shared.merged[w][query][at];
      x.x += y.x, x.y += y.y, x.z += y.z, x.w += y.w;
      norm += shared.norms[w][query] * exp2_of(shared.tops[w][query] - top);
    }
    if (item.parts == 1) {
      store_output(call, item.list, query, at, x, top, norm);
    } else {
      const i64 to = (i64)item.part * F::G + query;
      store_four(call.part_out + to * F::D + at, x);
      if (at == 0) call.part_top[to] = top, call.part_sum[to] = norm;
    }
  }
  if (item.parts == 1) return;
  fence();
  sync_some(1, CONSUMERS);
  if (thread == 0) shared.is_last = add_atomically(&call.arrived[item.list], 1) == item.parts - 1;
  sync_some(1, CONSUMERS);
  if (!shared.is_last) return;
  fence();
  if (thread == 0) call.arrived[item.list] = 0;  // for the next launch
  for (int i = thread; i < FOURS; i += CONSUMERS) {
    const int query = 4 * i / F::D, at = 4 * i % F::D;
    float top = LOWEST, norm = 0;
    for (int part = 0; part < item.parts; ++part) top = fmaxf(top, load_fresh(call.part_top + (i64)(item.first_part + part) * F::G + query));
    float4 x = {0, 0, 0, 0};
#pragma unroll 4
    for (int part = 0; part < item.parts; ++part) {
      const i64 from = (i64)(item.first_part + part) * F::G + query;
      const float by = exp2_of(load_fresh(call.part_top + from) - top);
      const float4 y = load_fresh((const float4*)(call.part_out + from * F::D + at));
      norm += by * load_fresh(call.part_sum + from), x.x += by * y.x, x.y += by * y.y, x.z += by * y.z, x.w += by * y.w;
    }
    store_output(call, item.list, query, at, x, top, norm);
  }
}

