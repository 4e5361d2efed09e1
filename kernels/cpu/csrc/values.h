// Exponentials of logits, and the values of one page weighted by them: out = sum (p * s) * code + sum p * z.
#pragma once

#include "digit_values.h"
#include "turned.h"

namespace kvb {

// e^(x - top) of n logits in place; the sum is added to `sum`, lane by lane.
static void exponentials(float* x, long n, float top, float* sum) {
  Vec total = load(sum), rests = splat(0.0f);
  const Vec shift = splat(top);
  long t = 0;
  for (; t + 2 * kLanes <= n; t += 2 * kLanes) {  // two at once, so that one need not wait for the other
    const Vec a = exp_of(sub(load(x + t), shift)), b = exp_of(sub(load(x + t + kLanes), shift));
    store(x + t, a);
    store(x + t + kLanes, b);
    total = add(total, a);
    rests = add(rests, b);
  }
  for (; t + kLanes <= n; t += kLanes) {
    const Vec e = exp_of(sub(load(x + t), shift));
    store(x + t, e);
    rests = add(rests, e);
  }
  store(sum, add(total, rests));
  if (t == n) return;
  float tail[kLanes] = {0};
  std::memcpy(tail, x + t, (n - t) * sizeof(float));
  store(tail, exp_of(sub(load(tail), shift)));
  for (long i = 0; i < n - t; i++) sum[0] += tail[i];
  std::memcpy(x + t, tail, (n - t) * sizeof(float));
}

// The largest of n logits, no lower than kLowest; a NaN is passed over here and met by the sum.
static float largest(const float* x, long n) {
  float top = kLowest, lanes[kLanes];
  Vec tops = splat(kLowest), more = tops;
  long t = 0;
  for (; t + 2 * kLanes <= n; t += 2 * kLanes) {
    tops = max_of(load(x + t), tops);
    more = max_of(load(x + t + kLanes), more);
  }
  for (; t + kLanes <= n; t += kLanes) tops = max_of(load(x + t), tops);
  store(lanes, max_of(more, tops));
  for (float lane : lanes) top = std::max(top, lane);
  for (; t < n; t++) top = std::max(top, x[t]);
  return top;
}

// What scales leave of a code at 0: nothing, its zero point, or the middle of the codes.
enum Rest { kNothing, kZeroPoint, kMiddle };

// The weights p[g * stride + t] of a page's slots times their scales, and what the rests add, lane by lane.
template <int kHeads, Rest kRest>
KVB_INLINE void scale_weights(const float* p, long stride, long n, const float* by, const float* zero, float middle, float* out, long padded, float* lanes,
                              long apart) {
  Vec sum[kHeads];
#pragma GCC unroll 8
  for (int g = 0; g < kHeads; g++) sum[g] = load(lanes + g * apart);
  const Vec middles = splat(middle);
  long t = 0;
  for (; t + kLanes <= n; t += kLanes) {
    const Vec scale = load(by + t), rest = kRest == kZeroPoint ? load(zero + t) : middles;
#pragma GCC unroll 8
    for (int g = 0; g < kHeads; g++) {
      const Vec x = load(p + g * stride + t), scaled = mul(x, scale);
      store(out + g * padded + t, scaled);
      if (kRest != kNothing) sum[g] = fma(kRest == kZeroPoint ? x : scaled, rest, sum[g]);
    }
  }
#pragma GCC unroll 8
  for (int g = 0; g < kHeads; g++) store(lanes + g * apart, sum[g]);
  for (; t < n; t++)
    for (int g = 0; g < kHeads; g++) {
      const float x = p[g * stride + t], scaled = x * by[t];
      out[g * padded + t] = scaled;
      if (kRest != kNothing) lanes[g * apart] += kRest == kZeroPoint ? x * zero[t] : scaled * middle;
    }
}

// Adds what the first n values of a page have beyond their codes, weighted by p[g * stride + t].
static void add_values_apart(const Call& call, const Tier& tier, const uint8_t* page, long n, long T, const float* p, long stride, Scratch& s) {
  const long G = call.group_size, D = call.head_dim;
  s.row.resize(std::max<long>(s.row.size(), T));
  for (long i = 0; i < tier.v.apart; i++) {
    widen<kF16>(page + tier.v_apart + 2 * i * T, n, s.row.data());
    const uint8_t* where = page + tier.v_where + i * T;
    for_heads(G, [&](long first, auto count) __attribute__((always_inline)) {
      const float *rest = s.row.data(), *from = p + first * stride;
      float* const sums = s.loose.data() + first * D;
      for (long t = 0; t < n; t++) {
        const long d = where[t];
        if (d >= D) continue;
#pragma GCC unroll 8
        for (int g = 0; g < decltype(count)::value; g++) sums[g * D + d] += from[g * stride + t] * rest[t];
      }
    });
  }
}

// Adds the first n values of a page, weighted by p[g * stride + t].
static void page_values(const Call& call, const Tier& tier, const TierPlan& plan, const uint8_t* page, long n, const float* p, long stride,
                        Ahead ahead, Scratch& s) {
  const int kind = plan.v_kind, P = planes_of(kind);
  const long G = call.group_size, D = call.head_dim, T = plan.slots, groups = scaled(tier.v) ? tier.v.groups : 1;
  const long padded = (T + kLanes - 1) / kLanes * kLanes;
  const uint8_t* codes = page + tier.v_codes;
  Weights weights = {p, 0, stride, int(D / groups)};
  if (scaled(tier.v)) {
    const float half = float(tier.v.centre);
    s.v_meta.resize(2 * groups * T + kLanes);
    s.weight.resize(groups * G * padded);
    weights = {s.weight.data(), G * padded, padded, int(D / groups)};
    float *every_by = s.v_meta.data(), *every_zero = every_by + groups * T;
    widen_scales(tier.v, page + tier.v_scale, groups * T, every_by);
    if (tier.v.zero) widen<kF16>(page + tier.v_zero, groups * T, every_zero);
    for (long r = 0; r < groups; r++)
      for_heads(G, [&](long g, auto count) __attribute__((always_inline)) {
        constexpr int kHeads = decltype(count)::value;
        const float *from = p + g * stride, *by = every_by + r * T, *zero = every_zero + r * T;
        float *w = s.weight.data() + (r * G + g) * padded, *lanes = &s.z_lanes[(g * groups + r) * kLanes];
        const long apart = groups * kLanes;
        if (tier.v.zero) scale_weights<kHeads, kZeroPoint>(from, stride, n, by, zero, 0.0f, w, padded, lanes, apart);
        else if (tier.v.centre) scale_weights<kHeads, kMiddle>(from, stride, n, by, zero, -half, w, padded, lanes, apart);
        else scale_weights<kHeads, kNothing>(from, stride, n, by, zero, 0.0f, w, padded, lanes, apart);
      });
  }
  if (kind != tier.v.kind) {
    s.values.resize((D * T + kLanes) * unit_bytes_of(kind));
    if (tier.v.kind == kKeys) keys_as_values(call, tier, page, n, T, s, (float*)s.values.data());
    else unpack_values(tier.v.kind, tier.v.table, codes, n, D, s.values.data(), ahead);
    codes = s.values.data();
  }
  if (scaled(tier.v)) ahead.rest();
  else ahead.some(ahead.lines() / 2);  // as page_logits does it
  if (plan.v_direct && kind < kNumKinds) {
    for (long g = 0; g < G; g += kMaxGroup) {
      const long count = std::min<long>(kMaxGroup, G - g);
      Weights part = weights;
      part.at += g * weights.head_stride;
      kAddValues[groups > 1][count - 1][kind](codes, plan.v_width, T, n, part, plan.v_padded, tier.v.levels, s.sum.data() + g * P * plan.v_padded);
    }
    ahead.rest();
    return;
  }
  for (long t = 0; t < n; t++)  // groups narrower than a register, or scales of codes of 5 bits that are not finite: rare, and worth no code of its own
    for (long d = 0; d < D; d++) {
      float code = scalar_element(kind, codes + t * units_of(kind, plan.v_width), plan.v_width, d);
      if (in_table(kind)) code = tier.v.levels[int(code)];
      const long at = d / weights.group_channels * weights.group_stride + t;
      for (long g = 0; g < G; g++) s.loose[g * D + d] += weights.at[at + g * weights.head_stride] * code;
    }
}

constexpr long kValueSlots = 512;  // slots whose codes stay in the first cache while all of their registers are passed over

// Whether values are weighted by digits: whole registers, none of which spans two groups of channels, and codes with scales.
static bool values_by_digits(const Tier& tier, const TierPlan& p) {
  return kHasDigits && scaled(tier.v) && is_code(tier.v.kind) && p.v_kind == tier.v.kind && p.v_direct && p.v_width % kLanes == 0;
}

#if KVB_DIGITS
// Exponentials of the logits x[g * stride + t] of a chunk's first n slots, and its values weighted by them, in one go. `sums` [G][kLanes]
// takes the sums of exponentials, s.sum and s.z_sum the values. Returns false, with nothing done, where a scale is not finite.
static bool weighted_values(const Call& call, const Tier& tier, const TierPlan& plan, const uint8_t* const* pages, long n, float* x,
                            long stride, const float* top, float* sums, Scratch& s) {
  const long G = call.group_size, T = plan.slots, R = tier.v.groups, padded = plan.chunk_slots + kLanes;
  const float half = float(tier.v.centre);
  s.v_meta.resize(2 * R * padded);
  float *by = s.v_meta.data(), *zero = by + R * padded;
  s.v_largest.resize(R);
  __mmask16 finite = 0xffff;
  for (long r = 0; r < R; r++) {
    Vec most = splat(0.0f);
    for (long at = 0; at < n; at += T) {
      const long held = std::min(T, n - at);
      const bool wide = tier.v.scale != kF16Scale;
      if (wide) widen_scales(tier.v, pages[at / T] + tier.v_scale + r * T, held, by + r * padded + at);
      for (long t = 0; t < held; t += kLanes) {  // what is written past a page, the next one overwrites
        const __mmask16 lanes = first_lanes(held - t);
        const uint8_t *scale16 = pages[at / T] + tier.v_scale + 2 * (r * T + t), *zero16 = pages[at / T] + tier.v_zero + 2 * (r * T + t);
        const Vec scale = wide ? _mm512_maskz_loadu_ps(lanes, by + r * padded + at + t) : load_f16_lanes(lanes, scale16);
        const Vec size = _mm512_abs_ps(scale);
        store(by + r * padded + at + t, scale);
        store(zero + r * padded + at + t, tier.v.zero ? load_f16_lanes(lanes, zero16) : mul(splat(-half), scale));
        most = _mm512_max_ps(size, most);
        finite &= _mm512_cmp_ps_mask(size, splat(kHuge), _CMP_LT_OQ);
      }
    }
    s.v_largest[r] = _mm512_reduce_max_ps(most);
  }
  if (finite != 0xffff) return false;
  const long each = (n + kLanes - 1) / kLanes * 64;
  s.w_digits.resize(R * G * each);
  s.w_back.resize(R);
  for (long r = 0; r < R; r++) {
    float factor, *scale = by + r * padded;
    choose_scaling(s.v_largest[r], &factor, &s.w_back[r]);
    for (long t = 0; t < n; t += kLanes) store(scale + t, mul(splat(factor), load(scale + t)));
    for (long g = 0; g < G; g++) {
      float zeros[kLanes] = {0};
      (r ? weigh<false> : weigh<true>)(x + g * stride, n, top[g], scale, zero + r * padded, sums + g * kLanes, zeros,
                                       &s.w_digits[(r * G + g) * each]);
      s.z_sum[g * R + r] += sum_of(load(zeros));
    }
  }
  const uint8_t* const* last_page = pages + (n - 1) / T;
  const long block = T * std::max<long>(1, kValueSlots / T);
  for (long at = 0; at < n; at += block)
    for (long g = 0; g < G; g += kMaxGroup) {
      const DigitValues values = {pages + at / T, last_page, tier.v_codes, plan.v_width, units_of(tier.v.kind, plan.v_width), T, std::min(block, n - at), tier.v.table,
                                  &s.w_digits[g * each + 4 * at], s.w_back.data(), G * each, each, int(call.head_dim / R)};
      kAllDigitValues[R > 1][std::min<long>(kMaxGroup, G - g) - 1][index_of(tier.v.kind)](values, plan.v_padded,
                                                                                &s.sum[g * planes_of(tier.v.kind) * plan.v_padded]);
    }
  return true;
}
#endif

}  // namespace kvb
