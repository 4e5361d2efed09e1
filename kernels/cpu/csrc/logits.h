// The logits of one list's queries with the keys of one page. Dequantisation is folded into the product: logit = s * (q . code) + z * sum(q).
#pragma once

#include "digits.h"

namespace kvb {

struct Scratch {
  std::vector<float> q, scaled_q, q_sum, q_back, dots, logit, weight, w_back, k_meta, v_meta, sum, lanes, v_largest, loose, z_sum, z_lanes, row, factor, dense;
  std::vector<int8_t> q_digits, w_digits;
  std::vector<uint8_t> keys, values;
  std::vector<const uint8_t*> pages;

  // All that a call may find here of an earlier one becomes no number.
  void spoil() {
    for (auto* each : {&q, &scaled_q, &q_sum, &q_back, &dots, &logit, &weight, &w_back, &k_meta, &v_meta, &sum, &lanes, &v_largest, &loose, &z_sum, &z_lanes, &row, &factor, &dense})
      each->assign(each->capacity(), NAN);
    for (auto* each : {&q_digits, &w_digits}) each->assign(each->capacity(), -1);
    for (auto* each : {&keys, &values}) each->assign(each->capacity(), 0xff);
  }
};

// Queries as the key loops want them: [G][P][kQueryStride], channels outside [first, last) zero; and the sums over those channels.
static void arrange_queries(const float* q, long G, long D, int num_planes, long first, long last, float* out, float* sum) {
  const long width = D / num_planes;
  for (long g = 0; g < G; g++) {
    const float* x = q + g * D;
    Vec total = splat(0.0f);
    long d = first;
    for (; d + kLanes <= last; d += kLanes) total = add(total, load(x + d));
    sum[g] = sum_of(total);
    for (; d < last; d++) sum[g] += x[d];
    for (long plane = 0; plane < num_planes; plane++) {
      const long begin = std::max(first, plane * width), end = std::min(last, (plane + 1) * width);
      float* to = out + (g * num_planes + plane) * kQueryStride;
      if (end - begin < width) std::fill(to, to + width, 0.0f);
      if (begin < end) std::memcpy(to + begin - plane * width, x + begin, (end - begin) * sizeof(float));
    }
  }
}

// Whether the products with a page's keys, bytes [first, last) of each slot, are made of digits.
static bool keys_by_digits(int kind, long width, long first, long last) {
  return kHasDigits && is_code(kind) && first % 4 == 0 && last % 4 == 0 && (!has_upper(kind) || width % (4 * lower_bits(kind)) == 0);
}

// Dots of slots [begin, end) of one page's K region with all G queries, four at a time.
static void all_dots(int kind, const float* levels, const uint8_t* codes, long T, long W, long begin, long end, const float* q, long G, int first, int last,
                     float* out, long stride) {
  for (long g = 0; g < G; g += kMaxGroup)
    kKeyDots[std::min<long>(kMaxGroup, G - g) - 1][kind](codes, T, W, begin, end, q + g * planes_of(kind) * kQueryStride, first, last, levels,
                                                         out + g * stride, stride);
}

// Where the dots of query head g with a plane lie: up to four heads at a time have one plane's, then the other's.
static long row_apart(long G, long g, long plane) {
  const long begin = g / kMaxGroup * kMaxGroup;
  return begin + g + plane * std::min<long>(kMaxGroup, G - begin);
}

// The dots of slots [0, n) with each of two planes, in rows of `stride` (row_apart).
static void all_dots_apart(const Code& code, const uint8_t* codes, long T, long W, long n, const float* q, long G, int first, int last, float* out,
                           long stride) {
  for (long g = 0; g < G; g += kMaxGroup)
    kKeyDotsApart[std::min<long>(kMaxGroup, G - g) - 1][code.kind == kBook4](codes, T, W, 0, n, q + g * 2 * kQueryStride, first, last, code.levels,
                                                                            out + 2 * g * stride, stride);
}

#if KVB_DIGITS
// Logits straight from the digits of all G queries.
static void all_digit_logits(int kind, const uint8_t* codes, long T, long W, long begin, long end, const int8_t* digits, const float* back,
                             ToLogits to, long G, int first, int last, float* out, long stride, Ahead& ahead) {
  for (long g = 0; g < G; g += kMaxGroup, to.sum += kMaxGroup)
    kDigitLogits[std::min<long>(kMaxGroup, G - g) - 1][index_of(kind)](codes, T, W, begin, end, digits + g * kDigits * kQueryBytes, back + g, to, first,
                                                             last, out + g * stride, stride, ahead);
}
#endif

static void widen_any(int kind, const uint8_t* p, long n, float* out) {
  if (kind == kF16) widen<kF16>(p, n, out);
  else if (kind == kBF16) widen<kBF16>(p, n, out);
  else widen<kF32>(p, n, out);
}

static float dot(const float* a, const float* b, long n) {
  Vec sum = splat(0.0f);
  long i = 0;
  for (; i + kLanes <= n; i += kLanes) sum = fma(load(a + i), load(b + i), sum);
  float total = sum_of(sum);
  for (; i < n; i++) total += a[i] * b[i];
  return total;
}

static void add_scaled(float weight, const float* x, long n, float* sum) {
  const Vec factor = splat(weight);
  long i = 0;
  for (; i + kLanes <= n; i += kLanes) store(sum + i, fma(factor, load(x + i), load(sum + i)));
  for (; i < n; i++) sum[i] += weight * x[i];
}

// Which bytes of a slot hold the channels of group r; all of them where a group spans several planes.
static std::pair<long, long> key_bytes_of_group(const Tier& tier, const TierPlan& p, long D, long r) {
  if (tier.k.groups == 1) return {0, p.k_width};
  const long channels = D / tier.k.groups, first = r * channels % p.k_width;
  return p.k_width % channels ? std::make_pair(0L, p.k_width) : std::make_pair(first, first + channels);
}

// Whether groups of channels lie in one plane each, so that one pass over their bytes makes the dots of two groups.
static bool keys_apart(const Tier& tier, const TierPlan& p, long D) {
  return scaled(tier.k) && !tier.k_channel_group && tier.k.groups > 1 && planes_of(p.k_kind) == 2 && p.k_width % (D / tier.k.groups) == 0;
}

// Queries of one list as page_logits wants them.
static void prepare_queries(const Call& call, const Tier& tier, const TierPlan& p, const float* q, Scratch& s) {
  const long G = call.group_size, D = call.head_dim, groups = scaled(tier.k) && !tier.k_channel_group ? tier.k.groups : 1;
  const long channels = D / groups;
  const int P = planes_of(p.k_kind);
  s.q.resize(groups * G * P * kQueryStride);
  s.q_sum.resize(groups * G);
  s.q_digits.resize(groups * G * kDigits * kQueryBytes);
  s.q_back.resize(groups * G);
  if (keys_apart(tier, p, D) && !keys_by_digits(p.k_kind, p.k_width, 0, channels)) {
    for (long r = 0; r < groups; r++) arrange_queries(q, G, D, P, r * channels, (r + 1) * channels, s.q.data(), &s.q_sum[r * G]);
    arrange_queries(q, G, D, P, 0, D, s.q.data(), s.q_back.data());
    return;
  }
  for (long r = 0; r < groups; r++) {
    float* to = s.q.data() + r * G * P * kQueryStride;
    arrange_queries(q, G, D, P, r * channels, (r + 1) * channels, to, &s.q_sum[r * G]);
    if (tier.k_channel_group) continue;  // digits made anew for every group of tokens would cost more than they save
    const auto [first, last] = key_bytes_of_group(tier, p, D, r);
#if KVB_DIGITS
    if (keys_by_digits(p.k_kind, p.k_width, first, last))
      query_digits(to, G, P, p.k_width, &s.q_sum[r * G], &s.q_digits[r * G * kDigits * kQueryBytes], &s.q_back[r * G]);
#endif
  }
}

// The dots of a page's keys, group by group, and the scales and zero points [group][T] that make logits of them.
struct GroupDots {
  const float *by, *zero, *dots;  // zero: null where there are none; dots: one group's [G][alone], or [group][G][padded]
  long T, padded, groups, apart;  // apart: how many groups lie between the two that come one after the other, or 0
  long alone;  // from head to head where there is one group

  long group(long index) const { return apart ? index / 2 + index % 2 * apart : index; }

  const float* row(long G, long g, long index) const {
    if (groups == 1) return dots + g * alone;
    return dots + (apart ? index / 2 * 2 * G + row_apart(G, g, index % 2) : index * G + g) * padded;
  }

  // factor * sum of (by * dot + zero * q_sum), or of by * (dot - half * q_sum), of all heads: out[g * stride + t]. One group's dots may lie where
  // the logits go.
  template <bool kZero> void to_logits(long G, long n, const float* q_sum, float half, float factor, float* out, long stride) const {
    for (long index = 0; index < groups; index++)
      for_heads(G, [&](long begin, auto count) __attribute__((always_inline)) {
        if (index) to_logits_of<decltype(count)::value, kZero, true>(G, begin, index, n, q_sum, half, factor, out + begin * stride, stride);
        else to_logits_of<decltype(count)::value, kZero, false>(G, begin, index, n, q_sum, half, factor, out + begin * stride, stride);
      });
  }

 private:
  template <int kHeads, bool kZero, bool kMore>
  __attribute__((always_inline)) void to_logits_of(long G, long begin, long index, long n, const float* q_sum, float half, float factor, float* out, long stride) const {
    const long r = group(index);
    const float *scale = by + r * T, *lowest = zero + r * T, *found[kHeads];
    float every[kHeads];
    for (int g = 0; g < kHeads; g++) {
      found[g] = row(G, begin + g, index);
      every[g] = q_sum[r * G + begin + g] * (kZero ? 1.0f : -half);
    }
    const Vec factors = splat(factor);
    long t = 0;
    for (; t + kLanes <= n; t += kLanes) {
      const Vec b = mul(load(scale + t), factors), z = kZero ? mul(load(lowest + t), factors) : b;
#pragma GCC unroll 8
      for (int g = 0; g < kHeads; g++) {
        const Vec x = load(found[g] + t), constant = splat(every[g]), logit = kZero ? fma(b, x, mul(z, constant)) : mul(b, add(x, constant));
        store(out + g * stride + t, kMore ? add(logit, load(out + g * stride + t)) : logit);
      }
    }
    for (; t < n; t++)
      for (int g = 0; g < kHeads; g++) {
        const float b = scale[t] * factor, x = kZero ? b * found[g][t] + lowest[t] * factor * every[g] : b * (found[g][t] + every[g]);
        out[g * stride + t] = kMore ? out[g * stride + t] + x : x;
      }
  }
};

// Logits of the first n slots of a page: out[g * stride + t]. Meanwhile the bytes of `ahead` are asked for.
static void page_logits(const Call& call, const Tier& tier, const TierPlan& p, const uint8_t* page, long n, Ahead ahead, Scratch& s,
                        float* out, long stride) {
  const int kind = p.k_kind, P = planes_of(kind);
  const long G = call.group_size, D = call.head_dim, T = p.slots, unit = unit_bytes_of(kind);
  const uint8_t* codes = page + tier.k_codes;
  const long W = p.k_width, region = units_of(kind, W) * T * unit, after = call.page_bytes - tier.k_codes - region;
  if (kind != tier.k.kind) {
    s.keys.resize((D * T + kLanes) * unit);
    unpack_keys(tier.k.kind, tier.k.table, codes, T, D, s.keys.data(), ahead);
    codes = s.keys.data();
  } else if (after < (kLanes - T) * unit) {  // a page so short that the loops would read past its end
    s.keys.assign(region + kLanes * unit, 0);
    std::memcpy(s.keys.data(), codes, region);
    codes = s.keys.data();
  }
  const float factor = call.scale * p.k_unit;
  if (!scaled(tier.k)) {
    ahead.some(ahead.lines() / 2);  // a page of 16-bit numbers has so many lines that the loads of this one would wait for all of them
    all_dots(kind, tier.k.levels, codes, T, W, 0, n, s.q.data(), G, 0, p.k_width, out, stride);
    ahead.rest();
    for (long g = 0; g < G; g++)
      for (long t = 0; t < n; t++) out[g * stride + t] *= factor;
    return;
  }
  const float half = float(tier.k.centre);
  if (tier.k_channel_group) {
    const long group = tier.k_channel_group;
    s.k_meta.resize(2 * D);
    s.scaled_q.resize(s.q.size());
    for (long begin = 0; begin < n; begin += group) {
      const long end = std::min(begin + group, n), index = begin / group;
      float *by = s.k_meta.data(), *zero = by + D;
      widen<kF16>(page + tier.k_scale + index * D * 2, D, by);
      if (tier.k.zero) widen<kF16>(page + tier.k_zero + index * D * 2, D, zero);
      else for (long d = 0; d < D; d++) zero[d] = -half * by[d];
      for (long g = 0; g < G; g++) {
        float constant = 0.0f;
        for (int plane = 0; plane < P; plane++) {
          const long at = (g * P + plane) * kQueryStride, d0 = plane * p.k_width;
          Vec partial = splat(0.0f);
          long w = 0;
          for (; w + kLanes <= p.k_width; w += kLanes) {
            const Vec x = load(s.q.data() + at + w);
            store(s.scaled_q.data() + at + w, mul(x, load(by + d0 + w)));
            partial = fma(x, load(zero + d0 + w), partial);
          }
          constant += sum_of(partial);
          for (; w < p.k_width; w++) {
            s.scaled_q[at + w] = s.q[at + w] * by[d0 + w];
            constant += s.q[at + w] * zero[d0 + w];
          }
        }
        s.q_sum[g] = constant;
      }
      ahead.rest();
      all_dots(kind, tier.k.levels, codes, T, W, begin, end, s.scaled_q.data(), G, 0, p.k_width, out + begin, stride);
      for (long g = 0; g < G; g++)
        for (long t = begin; t < end; t++) out[g * stride + t] = (out[g * stride + t] + s.q_sum[g]) * factor;
    }
    return;
  }
  const long groups = tier.k.groups, padded = (T + kLanes - 1) / kLanes * kLanes, channels = D / groups;
  const bool apart = keys_apart(tier, p, D) && !keys_by_digits(kind, W, 0, channels);
  s.k_meta.resize(2 * groups * T + kLanes);
  if (groups > 1) s.dots.resize(groups * G * padded);
  const GroupDots found = {s.k_meta.data(), tier.k.zero ? s.k_meta.data() + groups * T : nullptr, groups > 1 ? s.dots.data() : out, T, padded, groups, apart ? W / channels : 0, stride};
  bool widened = false;
  for (long index = 0; index < groups; index++) {
    const long r = found.group(index);
    const auto [first, last] = key_bytes_of_group(tier, p, D, r);
#if KVB_DIGITS
    if (keys_by_digits(kind, W, first, last)) {
      const bool wide = tier.k.scale != kF16Scale;
      const uint8_t *by16 = wide ? nullptr : page + tier.k_scale + r * T * 2, *zero16 = tier.k.zero ? page + tier.k_zero + r * T * 2 : nullptr;
      if (wide) widen_scales(tier.k, page + tier.k_scale + r * T, n, s.k_meta.data());
      const int planes = (2 << ((r + 1) * channels - 1) / W) - (1 << r * channels / W);  // others have no channel of the group
      all_digit_logits(kind, codes, T, p.k_width, 0, n, &s.q_digits[r * G * kDigits * kQueryBytes], &s.q_back[r * G],
                       {by16, zero16, wide ? s.k_meta.data() : nullptr, tier.k.table, &s.q_sum[r * G], call.scale, half, planes, r > 0}, G, first, last, out, stride, ahead);
      continue;
    }
#endif
    if (!widened) {
      widen_scales(tier.k, page + tier.k_scale, groups * T, s.k_meta.data());
      if (tier.k.zero) widen<kF16>(page + tier.k_zero, groups * T, s.k_meta.data() + groups * T);
      widened = true;
    }
    if (!apart || index % 2 == 0) ahead.some(ahead.lines() / (apart ? (groups - index) / 2 : groups - index) + 2);
    if (groups == 1) all_dots(kind, tier.k.levels, codes, T, W, 0, n, s.q.data(), G, first, last, out, stride);
    else if (!apart) all_dots(kind, tier.k.levels, codes, T, W, 0, n, s.q.data() + r * G * P * kQueryStride, G, first, last, s.dots.data() + index * G * padded, padded);
    else if (index % 2 == 0) all_dots_apart(tier.k, codes, T, W, n, s.q.data(), G, first, last, s.dots.data() + index * G * padded, padded);
  }
  if (!widened) return;
  if (tier.k.zero) found.to_logits<true>(G, n, s.q_sum.data(), half, factor, out, stride);
  else found.to_logits<false>(G, n, s.q_sum.data(), half, factor, out, stride);
}

}  // namespace kvb
