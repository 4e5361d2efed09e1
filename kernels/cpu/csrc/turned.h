// The logits of one list's queries with the keys of one page, where keys are rotated, have scales of their channels, or numbers kept apart.
#pragma once

#include "logits.h"

namespace kvb {

// The first n slots of a page's keys [D][T] as floats, codes as the numbers or levels that they are.
template <int kKind> static void widen_keys(const uint8_t* codes, long T, long W, long n, const float* levels, float* out) {
  constexpr int P = planes_of(kKind), kUnit = unit_bytes_of(kKind);
  float every[16];
  const Book book = book_of<kKind>(levels, every);
  const long half = W / 2;
  for (long w = 0; w < W; w++)
    for (long slot = 0; slot < n; slot += kLanes) {
      const long t = std::min(slot, T - kLanes);  // the last register begins early enough to stay inside the row
      auto upper = [&] { return shift_then_256(load_u8(codes + (W + w % half) * T + t), w >= half); };
#pragma GCC unroll 2
      for (int part = 0; part < P; part += 4) {
        auto put = [&](int plane, Vec x) { store(out + ((part + plane) * W + w) * T + t, x); };
        if (part == 0) for_planes<kKind, 0, (P > 4 ? 4 : P)>(codes + (w * T + t) * kUnit, upper, book, put);
        else for_planes<kKind, (P > 4 ? P - 4 : 0), P>(codes + (w * T + t) * kUnit, upper, book, put);
      }
    }
}

typedef void (*WidenKeys)(const uint8_t*, long, long, long, const float*, float*);
static const WidenKeys kWidenKeys[kNumKinds] = {widen_keys<kCode1>, widen_keys<kCode2>, widen_keys<kCode4>, widen_keys<kCode8>,
                                                widen_keys<kF16>,   widen_keys<kBF16>,  widen_keys<kF32>,   widen_keys<kFp8>,
                                                widen_keys<kBook2>, widen_keys<kBook3>, widen_keys<kBook4>};

// x = x * by + zero, each a float for all n numbers or one for each of them.
static void scale_and_add(float* __restrict x, long n, float by, float zero) {
  for (long t = 0; t < n; t++) x[t] = x[t] * by + zero;
}
static void scale_and_add(float* __restrict x, long n, const float* __restrict by, const float* __restrict zero) {
  for (long t = 0; t < n; t++) x[t] = x[t] * by[t] + zero[t];
}
static void rotate_pair(float* __restrict a, float* __restrict b, const float* __restrict cos, const float* __restrict sin, long n) {
  for (long t = 0; t < n; t++) {
    const float first = a[t], second = b[t];
    a[t] = first * cos[t] - second * sin[t];
    b[t] = second * cos[t] + first * sin[t];
  }
}

// The first n slots of a page's keys [D][T] as floats, before any scale.
static void plain_keys(const Tier& tier, const uint8_t* codes, long T, long D, long n, float* out) {
  const int kind = tier.k.kind, unit = unit_bytes_of(kind);
  const long width = D / planes_of(kind);
  if (T >= kLanes && kind < kNumKinds && (kind != kBook3 || width % 2 == 0)) return kWidenKeys[kind](codes, T, width, n, tier.k.levels, out);
  for (long d = 0; d < D; d++)
    for (long t = 0; t < n; t++) {
      const uint8_t* column = codes + t * unit;
      if (!is_code(kind)) {
        out[d * T + t] = scalar_element(kind, column + d * T * unit, 1, 0);
        continue;
      }
      const int code = code_at(kind, width, d, [&](long w) { return column[w * T]; });
      out[d * T + t] = in_table(kind) ? tier.k.levels[code] : float(code);
    }
}

// How one page's keys are turned: slot t by cos and sin [rotated / 2][T], null where they are not; and by those of the page's first slot
// [rotated / 2] before, where there are any.
struct PageTurn {
  const float *cos, *sin, *first_cos, *first_sin;
};

static PageTurn turn_of_page(const Call& call, const Tier& tier, long seq, long column) {
  const long half = call.rotated / 2, page = seq * tier.num_columns + column;
  if (!tier.cos) return {};
  if (!tier.first_cos) return {tier.cos + page * half * tier.slots_per_page, tier.sin + page * half * tier.slots_per_page, nullptr, nullptr};
  return {tier.cos, tier.sin, tier.first_cos + page * half, tier.first_sin + page * half};
}

// Queries as the loops want them, [G][kQueryStride]; turned against the page's first slot, which is as good as turning its keys.
static void turn_queries(const float* q, long G, long D, long half, const PageTurn& turn, float* out) {
  for (long g = 0; g < G; g++, q += D, out += kQueryStride) {
    std::memcpy(out, q, D * sizeof(float));
    if (turn.first_cos)
      for (long d = 0; d < half; d++) {
        const float c = turn.first_cos[d], s = turn.first_sin[d];
        out[d] = q[d] * c + q[d + half] * s;
        out[d + half] = q[d + half] * c - q[d] * s;
      }
  }
}

// Adds to the logits of kHeads queries what each key has beyond its code in channel where[t]. Which half of the channels that is nobody can foretell,
// so there is no branch.
template <int kHeads>
KVB_INLINE void add_rests(const float* rest, const uint8_t* where, long n, long T, long D, long half, const float* by, const float* cos, const float* sin,
                          const float* q, float* out, long stride) {
  for (long t = 0; t < n; t++) {
    const long d = where[t];
    if (d >= D) continue;
    const float x = by ? rest[t] * by[d] : rest[t];
    if (d >= 2 * half) {
#pragma GCC unroll 8
      for (int g = 0; g < kHeads; g++) out[g * stride + t] += x * q[g * kQueryStride + d];
      continue;
    }
    const long upper = -long(d >= half), angle = (d - (half & upper)) * T + t, other = d + half - 2 * (half & upper);
    const float c = x * cos[angle], e = x * sin[angle] * float(1 + 2 * upper);
#pragma GCC unroll 8
    for (int g = 0; g < kHeads; g++) out[g * stride + t] += c * q[g * kQueryStride + d] + e * q[g * kQueryStride + other];
  }
}

// Adds to the logits what the keys of the first n slots have beyond their codes; q as turn_queries made them.
static void add_keys_apart(const Call& call, const Tier& tier, const uint8_t* page, long n, long T, const float* by, const PageTurn& turn,
                           const float* q, Scratch& s, float* out, long stride) {
  const long D = call.head_dim, half = turn.cos ? call.rotated / 2 : 0;
  s.row.resize(std::max<long>(s.row.size(), T));
  for (long i = 0; i < tier.k.apart; i++) {
    widen<kF16>(page + tier.k_apart + 2 * i * T, n, s.row.data());
    const uint8_t* where = page + tier.k_where + i * T;
    for_heads(call.group_size, [&](long g, auto count) __attribute__((always_inline)) {
      add_rests<decltype(count)::value>(s.row.data(), where, n, T, D, half, by, turn.cos, turn.sin, q + g * kQueryStride, out + g * stride, stride);
    });
  }
}

// The dots of a page's keys, without what is kept apart, where the loops of turned_dots.cpp take them: all channels are turned, and their scales
// of codes are those of channels, of elements there are none. False where they do not.
static bool turned_page(const Call& call, const Tier& tier, const TierPlan& p, const uint8_t* page, long n, long head, const PageTurn& turn,
                        const float* q, Ahead ahead, Scratch& s, float* out, long stride) {
  const long G = call.group_size, D = call.head_dim, T = p.slots, group = tier.k_channel_group;
  const int kind = p.k_kind, unit = unit_bytes_of(kind);
  if (!turn.cos || call.rotated != D || T < kLanes || (kind == kBook3 && p.k_width % 2) || (scaled(tier.k) && !group)) return false;
  if (is_code(kind) != (group || tier.channel_scale)) return false;
  const uint8_t* codes = page + tier.k_codes;
  if (kind != tier.k.kind) {
    s.keys.resize(D * T * unit);
    unpack_keys(tier.k.kind, tier.k.table, codes, T, D, s.keys.data(), ahead);
    codes = s.keys.data();
  }
  ahead.rest();
  Channels channels = {nullptr, nullptr};
  if (tier.channel_scale) channels = {tier.channel_scale + head * D, tier.channel_zero + head * D};
  for (long begin = 0; begin < n; begin += group ? group : n) {
    const long end = group ? std::min(begin + group, n) : n;
    if (group) {
      s.k_meta.resize(2 * D + kLanes);
      float *by = s.k_meta.data(), *zero = by + D;
      const long at = begin / group * D;
      widen_scales(tier.k, page + tier.k_scale + scale_bytes(tier.k) * at, D, by);
      if (tier.k.zero) widen<kF16>(page + tier.k_zero + 2 * at, D, zero);
      else for (long d = 0; d < D; d++) zero[d] = -float(tier.k.centre) * by[d];
      channels = {by, zero};
    }
    for (long g = 0; g < G; g += kMaxGroup)
      kTurnedDots[std::min<long>(kMaxGroup, G - g) - 1][kind](codes, T, p.k_width, begin, end, q + g * kQueryStride, channels, turn.cos, turn.sin,
                                                                             tier.k.levels, out + g * stride + begin, stride);
  }
  return true;
}

// The first n slots of a page's keys [D][T] as floats with their scales, without what is kept apart.
static float* dense_keys(const Call& call, const Tier& tier, const uint8_t* page, long n, long T, long head, Scratch& s) {
  const long D = call.head_dim, groups = tier.k.groups, channels = D / groups;
  s.dense.resize(D * T + kLanes);
  float* keys = s.dense.data();
  plain_keys(tier, page + tier.k_codes, T, D, n, keys);
  if (tier.channel_scale)
    for (long d = 0; d < D; d++) scale_and_add(keys + d * T, n, tier.channel_scale[head * D + d], tier.channel_zero[head * D + d]);
  else if (scaled(tier.k)) {  // checks.py lets no keys have both
    const long group = tier.k_channel_group, count = group ? (n + group - 1) / group * D : groups * T;
    s.k_meta.resize(2 * count + kLanes);
    float *by = s.k_meta.data(), *zero = by + count;
    widen_scales(tier.k, page + tier.k_scale, count, by);
    if (tier.k.zero) widen<kF16>(page + tier.k_zero, count, zero);
    else for (long i = 0; i < count; i++) zero[i] = -float(tier.k.centre) * by[i];
    for (long d = 0; d < D; d++) {
      if (!group) scale_and_add(keys + d * T, n, by + d / channels * T, zero + d / channels * T);
      else for (long t = 0; t < n; t += group)
          scale_and_add(keys + d * T + t, std::min(group, n - t), by[t / group * D + d], zero[t / group * D + d]);
    }
  }
  return keys;
}

// The first n keys of a page as values [n][D].
static void keys_as_values(const Call& call, const Tier& tier, const uint8_t* page, long n, long T, Scratch& s, float* out) {
  constexpr long kRun = 16;  // channels whose rows stay in the first cache while all slots are passed over
  const long D = call.head_dim;
  const float* keys = dense_keys(call, tier, page, n, T, 0, s);
  for (long first = 0; first < D; first += kRun)
    for (long t = 0; t < n; t++)
      for (long d = first; d < std::min(first + kRun, D); d++) out[t * D + d] = keys[d * T + t];
  for (long t = 0; t < n && tier.k.apart; t++)
    for_apart(tier.k, page + tier.k_apart, page + tier.k_where, T, t, D, [&](long d, float rest) { out[t * D + d] += rest; });
}

// The same as turned_page does where that does not: keys become floats first.
static void dense_page(const Call& call, const Tier& tier, const uint8_t* page, long n, long T, long head, const PageTurn& turn, const float* q,
                       Scratch& s, float* out, long stride) {
  const long G = call.group_size, D = call.head_dim, half = turn.cos ? call.rotated / 2 : 0;
  float* const keys = dense_keys(call, tier, page, n, T, head, s);
  for (long d = 0; d < half; d++) rotate_pair(keys + d * T, keys + (d + half) * T, turn.cos + d * T, turn.sin + d * T, n);
  all_dots(kF32, tier.k.levels, (const uint8_t*)keys, T, D, 0, n, q, G, 0, D, out, stride);
}

// Logits of the first n slots of a page whose keys get the scales of their channels, or are turned, first.
static void turned_logits(const Call& call, const Tier& tier, const TierPlan& p, const uint8_t* page, long n, long head, const PageTurn& turn,
                          const float* q, Ahead ahead, Scratch& s, float* out, long stride) {
  const long G = call.group_size;
  s.scaled_q.resize(std::max<size_t>(s.scaled_q.size(), G * kQueryStride));
  float* const turned = s.scaled_q.data();
  turn_queries(q, G, call.head_dim, call.rotated / 2, turn, turned);
  const bool direct = turned_page(call, tier, p, page, n, head, turn, turned, ahead, s, out, stride);
  if (!direct) dense_page(call, tier, page, n, p.slots, head, turn, turned, s, out, stride);
  const float factor = call.scale * (direct ? p.k_unit : 1.0f);
  if (tier.k.apart) {
    const float* by = tier.channel_scale ? tier.channel_scale + head * call.head_dim : nullptr;
    add_keys_apart(call, tier, page, n, p.slots, by, turn, turned, s, out, stride);
  }
  for (long g = 0; g < G; g++)
    for (long t = 0; t < n; t++) out[g * stride + t] *= factor;
}

}  // namespace kvb
