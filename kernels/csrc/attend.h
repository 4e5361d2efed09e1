// Attention of one query token per sequence over compressed pages, without ever writing a dense key or value: dequantisation is folded
// into the two products, logit = s * (q . code) + z * sum(q) and out = sum (p * s) * code + sum p * z. kernels/torch_attention.py says what it
// means, kernels/format.py how a page lies, kernels/cpu.py fills in the structs below.
//
// A list (one sequence, one KV head) is cut into chunks of a fixed number of pages. Each chunk is worked on by one thread, alone, and the
// chunks of a list are merged in their order, so a result depends neither on the number of threads nor on the other lists of the batch.
#pragma once

#include "plan.h"

namespace kvb {

struct Scratch {
  std::vector<float> q, scaled_q, q_sum, dots, logit, weight, k_meta, v_meta, sum, loose, z_sum, row, factor, dense;
  std::vector<uint8_t> keys;
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

// Dots of slots [begin, end) of one page's K region with all G queries, four at a time.
static void all_dots(int kind, const uint8_t* codes, long T, long begin, long end, const float* q, long G, int first, int last, float* out,
                     long stride) {
  for (long g = 0; g < G; g += kMaxGroup) {
    const long count = std::min<long>(kMaxGroup, G - g);
    kKeyDots[count - 1][kind](codes, T, begin, end, q + g * planes_of(kind) * kQueryStride, first, last, out + g * stride, stride);
  }
}

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

// Logits of the first n slots of a page whose keys are rotated first; cos and sin are [rotated / 2][T].
static void rotated_logits(const Call& call, const Tier& tier, const TierPlan& p, const uint8_t* page, long n, const float* cos,
                           const float* sin, const float* q, Scratch& s, float* out, long stride) {
  const int kind = tier.k_kind, unit = unit_bytes_of(kind), half_code = coded(kind) ? 1 << (bits_of(kind) - 1) : 0;
  const long G = call.group_size, D = call.head_dim, T = p.slots, half = call.rotated / 2, channels = D / tier.k_groups;
  s.dense.resize(D * T);
  for (long d = 0; d < D; d++) {
    float* x = &s.dense[d * T];
    for (long t = 0; t < n; t++) {
      uint8_t row[4];
      std::memcpy(row, page + tier.k_codes + (d % p.k_width * T + t) * unit, unit);
      x[t] = coded(kind) ? float(row[0] >> (d / p.k_width * bits_of(kind)) & (2 * half_code - 1)) : scalar_element(kind, row, 1, 0);
    }
    if (!coded(kind)) continue;
    for (long t = 0; t < n; t++) {
      const long at = 2 * (tier.k_channel_group ? t / tier.k_channel_group * D + d : d / channels * T + t);
      uint16_t scale, zero = 0;
      std::memcpy(&scale, page + tier.k_scale + at, 2);
      if (!tier.symmetric) std::memcpy(&zero, page + tier.k_zero + at, 2);
      x[t] = tier.symmetric ? (x[t] - float(half_code)) * scalar_f16(scale) : x[t] * scalar_f16(scale) + scalar_f16(zero);
    }
  }
  for (long d = 0; d < half; d++) {
    float *a = &s.dense[d * T], *b = a + half * T;
    for (long t = 0; t < n; t++) {
      const float c = cos[d * T + t], e = sin[d * T + t], first = a[t], second = b[t];
      a[t] = first * c - second * e;
      b[t] = second * c + first * e;
    }
  }
  for (long g = 0; g < G; g++) {
    float* to = out + g * stride;
    std::fill(to, to + n, 0.0f);
    for (long d = 0; d < D; d++) add_scaled(q[g * D + d], &s.dense[d * T], n, to);
    for (long t = 0; t < n; t++) to[t] *= call.scale;
  }
}

// Queries of one list as page_logits wants them.
static void prepare_queries(const Call& call, const Tier& tier, const float* q, Scratch& s) {
  const long G = call.group_size, D = call.head_dim, groups = coded(tier.k_kind) && !tier.k_channel_group ? tier.k_groups : 1;
  const long channels = D / groups;
  const int P = planes_of(tier.k_kind);
  s.q.resize(groups * G * P * kQueryStride);
  s.q_sum.resize(groups * G);
  for (long r = 0; r < groups; r++)
    arrange_queries(q, G, D, P, r * channels, (r + 1) * channels, s.q.data() + r * G * P * kQueryStride, &s.q_sum[r * G]);
}

// Logits of the first n slots of a page: out[g * stride + t].
static void page_logits(const Call& call, const Tier& tier, const TierPlan& p, const uint8_t* page, long n, Scratch& s, float* out,
                        long stride) {
  const int kind = tier.k_kind, P = planes_of(kind);
  const long G = call.group_size, D = call.head_dim, T = p.slots, unit = unit_bytes_of(kind);
  const uint8_t* codes = page + tier.k_codes;
  const long region = p.k_width * T * unit, after = call.page_bytes - tier.k_codes - region;
  if (after < (kLanes - T) * unit) {  // a page so short that the loops would read past its end
    s.keys.assign(region + kLanes * unit, 0);
    std::memcpy(s.keys.data(), codes, region);
    codes = s.keys.data();
  }
  const Vec scale = splat(call.scale);
  if (!coded(kind)) {
    all_dots(kind, codes, T, 0, n, s.q.data(), G, 0, p.k_width, out, stride);
    for (long g = 0; g < G; g++)
      for (long t = 0; t < n; t++) out[g * stride + t] *= call.scale;
    return;
  }
  const float half = float(1 << (bits_of(kind) - 1));
  if (tier.k_channel_group) {
    const long group = tier.k_channel_group;
    s.k_meta.resize(2 * D);
    s.scaled_q.resize(s.q.size());
    for (long begin = 0; begin < n; begin += group) {
      const long end = std::min(begin + group, n), index = begin / group;
      float *by = s.k_meta.data(), *zero = by + D;
      widen<kF16>(page + tier.k_scale + index * D * 2, D, by);
      if (!tier.symmetric) widen<kF16>(page + tier.k_zero + index * D * 2, D, zero);
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
      all_dots(kind, codes, T, begin, end, s.scaled_q.data(), G, 0, p.k_width, out + begin, stride);
      for (long g = 0; g < G; g++)
        for (long t = begin; t < end; t++) out[g * stride + t] = (out[g * stride + t] + s.q_sum[g]) * call.scale;
    }
    return;
  }
  const long groups = tier.k_groups, channels = D / groups, padded = (T + kLanes - 1) / kLanes * kLanes;
  s.k_meta.resize(2 * padded);
  if (groups > 1) s.dots.resize(G * padded);
  for (long r = 0; r < groups; r++) {
    float *by = s.k_meta.data(), *zero = by + padded, *dots = groups > 1 ? s.dots.data() : out;
    widen<kF16>(page + tier.k_scale + r * T * 2, n, by);
    if (!tier.symmetric) widen<kF16>(page + tier.k_zero + r * T * 2, n, zero);
    else for (long t = 0; t < n; t++) zero[t] = -half * by[t];
    int first = 0, last = p.k_width;
    if (p.k_width % channels == 0) first = r * channels % p.k_width, last = first + channels;
    const long dots_stride = groups > 1 ? padded : stride;
    all_dots(kind, codes, T, 0, n, s.q.data() + r * G * P * kQueryStride, G, first, last, dots, dots_stride);
    for (long g = 0; g < G; g++) {
      const Vec total = splat(s.q_sum[r * G + g]);
      long t = 0;
      for (; t + kLanes <= n; t += kLanes) {
        Vec x = mul(scale, fma(load(by + t), load(dots + g * dots_stride + t), mul(load(zero + t), total)));
        if (r) x = add(x, load(out + g * stride + t));
        store(out + g * stride + t, x);
      }
      for (; t < n; t++) {
        const float x = call.scale * (by[t] * dots[g * dots_stride + t] + zero[t] * s.q_sum[r * G + g]);
        out[g * stride + t] = r ? out[g * stride + t] + x : x;
      }
    }
  }
}

// Adds the first n values of a page, weighted by p[g * stride + t].
static void page_values(const Call& call, const Tier& tier, const TierPlan& plan, const uint8_t* page, long n, const float* p, long stride,
                        Scratch& s) {
  const int kind = tier.v_kind, P = planes_of(kind);
  const long G = call.group_size, D = call.head_dim, T = plan.slots, groups = coded(kind) ? tier.v_groups : 1;
  const long padded = (T + kLanes - 1) / kLanes * kLanes;
  const uint8_t* codes = page + tier.v_codes;
  Weights weights = {p, 0, stride, int(D / groups)};
  if (coded(kind)) {
    const float half = float(1 << (bits_of(kind) - 1));
    s.v_meta.resize(2 * padded);
    s.weight.resize(groups * G * padded);
    weights = {s.weight.data(), G * padded, padded, int(D / groups)};
    for (long r = 0; r < groups; r++) {
      float *by = s.v_meta.data(), *zero = by + padded;
      widen<kF16>(page + tier.v_scale + r * T * 2, n, by);
      if (!tier.symmetric) widen<kF16>(page + tier.v_zero + r * T * 2, n, zero);
      for (long g = 0; g < G; g++) {
        float* w = s.weight.data() + (r * G + g) * padded;
        const float* source = p + g * stride;
        Vec sum = splat(0.0f);
        float rest = 0.0f;
        long t = 0;
        for (; t + kLanes <= n; t += kLanes) {
          const Vec x = load(source + t), scaled = mul(x, load(by + t));
          store(w + t, scaled);
          sum = tier.symmetric ? fma(splat(-half), scaled, sum) : fma(x, load(zero + t), sum);
        }
        for (; t < n; t++) {
          w[t] = source[t] * by[t];
          rest += tier.symmetric ? -half * w[t] : source[t] * zero[t];
        }
        s.z_sum[g * groups + r] += sum_of(sum) + rest;
      }
    }
  }
  if (plan.v_direct) {
    for (long g = 0; g < G; g += kMaxGroup) {
      const long count = std::min<long>(kMaxGroup, G - g);
      Weights part = weights;
      part.at += g * weights.head_stride;
      kAddValues[groups > 1][count - 1][kind](codes, plan.v_width, T, n, part, plan.v_padded, s.sum.data() + g * P * plan.v_padded);
    }
    return;
  }
  for (long t = 0; t < n; t++)  // groups narrower than a register: rare, and worth no code of its own
    for (long d = 0; d < D; d++) {
      const float code = scalar_element(kind, codes + t * plan.v_width, plan.v_width, d);
      const long at = d / weights.group_channels * weights.group_stride + t;
      for (long g = 0; g < G; g++) s.loose[g * D + d] += weights.at[at + g * weights.head_stride] * code;
    }
}

// Pages lie anywhere: the next one is asked for, codes and scales, while this one is worked on.
KVB_INLINE void prefetch_keys(const Tier& tier, const uint8_t* page) {
  prefetch(page + tier.k_codes, tier.v_codes - tier.k_codes);
  if (coded(tier.k_kind)) prefetch(page + tier.k_scale, tier.v_scale - tier.k_scale);
}

KVB_INLINE void prefetch_values(const Tier& tier, const uint8_t* page, long T, long width) {
  prefetch(page + tier.v_codes, T * width * unit_bytes_of(tier.v_kind));
  if (coded(tier.v_kind)) prefetch(page + tier.v_scale, 2 * T * tier.v_groups * (tier.symmetric ? 1 : 2));
}

// One chunk of one list: its maximum, its sum of exponentials and its unnormalised output. Returns false on a page id out of range.
static bool run_chunk(const Call& call, Plan& plan, long list, int tier_index, long chunk, Scratch& s) {
  const Tier& tier = call.tiers[tier_index];
  const TierPlan& p = plan.tiers[tier_index];
  const Ring* ring = call.ring;
  const long G = plan.G, D = plan.D, T = p.slots;
  const long row = row_of(call, list), total = list_slots(call, tier, row), begin = chunk * p.chunk_slots, end = std::min(total, begin + p.chunk_slots);
  if (begin >= end) return true;
  const long num_k = std::min<long>(tier.num_k[row], total), num_v = std::min<long>(tier.num_v[row], total);
  const long seq = ring && ring->rows ? ring->rows[list / call.num_heads] : list / call.num_heads;  // in the buffers
  const long head = list % call.num_heads, first_page = begin / T;
  auto page_at = [&](long index) -> const uint8_t* {
    const int64_t id = index < tier.num_columns ? tier.ids[row * tier.num_columns + index] : -1;
    return id >= 0 && id < call.num_pages ? call.pages + id * call.page_bytes : nullptr;
  };
  const float* q = call.q + list * G * D;
  prepare_queries(call, tier, q, s);
  float* p_chunk;
  long stride;
  if (call.reduce != kNone) {
    stride = plan.score_slots;
    p_chunk = plan.probability.get() + list * G * stride + p.score_begin + begin;
  } else {
    stride = p.chunk_slots;
    s.logit.resize(G * stride);
    p_chunk = s.logit.data();
  }
  s.loose.assign(G * D, 0.0f);
  if (ring) s.row.resize(D);
  const long ring_unit = ring ? unit_bytes_of(ring->kind) : 0;
  const long k_alive = ring ? std::max(num_k, total - ring->k_length) : 0, v_alive = ring ? std::max(num_v, total - ring->v_length) : 0;
  for (long at = begin; at < end; at += T) {
    const long block = std::min(T, end - at), held = std::max<long>(0, std::min(block, num_k - at));
    float* out = p_chunk + at - begin;
    if (held) {
      const long at_page = at / T;
      const uint8_t *page = page_at(at_page), *next = at + T < std::min(end, num_k) ? page_at(at / T + 1) : page_at(first_page);
      if (!page) return false;
      if (next && at + T < end) prefetch_keys(tier, next);
      else if (next) prefetch_values(tier, next, T, p.v_width);
      if (tier.cos) {
        const long at = (list / call.num_heads * tier.num_columns + at_page) * (call.rotated / 2) * T;
        rotated_logits(call, tier, p, page, held, tier.cos + at, tier.sin + at, q, s, out, stride);
      } else {
        page_logits(call, tier, p, page, held, s, out, stride);
      }
    }
    for (long t = held; t < block; t++) {
      if (at + t < k_alive) {
        for (long g = 0; g < G; g++) out[g * stride + t] = kLowest;
        continue;
      }
      const long entry = (at + t) % ring->k_length;
      widen_any(ring->kind, ring->k + seq * ring->k_row_stride + head * ring->k_head_stride + entry * D * ring_unit, D, s.row.data());
      for (long g = 0; g < G; g++) out[g * stride + t] = call.scale * dot(q + g * D, s.row.data(), D);
    }
  }
  const long n = end - begin, part = (list * plan.chunks_per_list + p.first_chunk + chunk) * G;
  for (long g = 0; g < G; g++) {
    float* x = p_chunk + g * stride;
    float top = kLowest;
    Vec tops = splat(kLowest), more = tops;  // two of each, so that one need not wait for the other
    long t = 0;
    for (; t + 2 * kLanes <= n; t += 2 * kLanes) {  // a NaN is passed over here and met by the sum
      tops = max_of(load(x + t), tops);
      more = max_of(load(x + t + kLanes), more);
    }
    for (; t + kLanes <= n; t += kLanes) tops = max_of(load(x + t), tops);
    float lanes[kLanes];
    store(lanes, max_of(more, tops));
    for (float lane : lanes) top = std::max(top, lane);
    for (; t < n; t++) top = std::max(top, x[t]);
    Vec sum = splat(0.0f), rests = sum;
    const Vec shift = splat(top);
    for (t = 0; t + 2 * kLanes <= n; t += 2 * kLanes) {
      const Vec a = exp_of(sub(load(x + t), shift)), b = exp_of(sub(load(x + t + kLanes), shift));
      store(x + t, a);
      store(x + t + kLanes, b);
      sum = add(sum, a);
      rests = add(rests, b);
    }
    sum = add(sum, rests);
    for (; t + kLanes <= n; t += kLanes) {
      const Vec e = exp_of(sub(load(x + t), shift));
      store(x + t, e);
      sum = add(sum, e);
    }
    float rest = 0.0f;
    if (t < n) {
      float tail[kLanes] = {0};
      std::memcpy(tail, x + t, (n - t) * sizeof(float));
      store(tail, exp_of(sub(load(tail), shift)));
      for (long i = 0; i < n - t; i++) rest += tail[i];
      std::memcpy(x + t, tail, (n - t) * sizeof(float));
    }
    plan.max[part + g] = top;
    plan.sum[part + g] = sum_of(sum) + rest;
  }
  const int VP = planes_of(tier.v_kind);
  const long v_groups = coded(tier.v_kind) ? tier.v_groups : 1;
  s.sum.assign(G * VP * p.v_padded, 0.0f);
  s.z_sum.assign(G * v_groups, 0.0f);
  for (long at = begin; at < end; at += T) {
    const long block = std::min(T, end - at), held = std::max<long>(0, std::min(block, num_v - at));
    const float* weight = p_chunk + at - begin;
    if (held) {
      const uint8_t *page = page_at(at / T), *next = at + T < std::min(end, num_v) ? page_at(at / T + 1) : nullptr;
      if (!page) return false;
      if (next) prefetch_values(tier, next, T, p.v_width);
      page_values(call, tier, p, page, held, weight, stride, s);
    }
    if (!ring) continue;  // values past num_v count as zero
    for (long t = held; t < block; t++) {
      if (at + t < v_alive) continue;
      const long entry = (at + t) % ring->v_length;
      widen_any(ring->kind, ring->v + seq * ring->v_row_stride + head * ring->v_head_stride + entry * D * ring_unit, D, s.row.data());
      for (long g = 0; g < G; g++) add_scaled(weight[g * stride + t], s.row.data(), D, &s.loose[g * D]);
    }
  }
  const long channels = D / v_groups;
  for (long g = 0; g < G; g++) {
    float* out = plan.acc.get() + (part + g) * D;
    for (long plane = 0; plane < VP; plane++)
      std::memcpy(out + plane * p.v_width, &s.sum[(g * VP + plane) * p.v_padded], p.v_width * sizeof(float));
    for (long r = 0; r < v_groups; r++)
      for (long d = r * channels; d < (r + 1) * channels; d++) out[d] += s.loose[g * D + d] + s.z_sum[g * v_groups + r];
  }
  return true;
}

// Probabilities of n slots, from exponentials e[g * stride + t], over the query heads of a list.
static void reduce_scores(const Call& call, const float* e, long stride, const float* factor, long G, long n, float* to) {
  for (long g = 0; g < G; g++) {
    const float by = factor[g], *from = e + g * stride;
    for (long t = 0; t < n; t++) {
      float x = from[t] * by;
      if (call.power == 2) x *= x;
      to[t] = g == 0 ? x : call.reduce == kMax ? (to[t] > x ? to[t] : x) : to[t] + x;
    }
  }
  if (call.reduce == kMean)
    for (long t = 0; t < n; t++) to[t] /= float(G);
}

// Adds a step's scores to the n first slots of a page, or puts them there.
static void update_scores(const Call& call, const Tier& tier, uint8_t* page, long seq, long n, const float* from) {
  float* to = (float*)(page + tier.score);
  const int32_t* pos = (const int32_t*)(page + tier.pos);
  for (long t = 0; t < n; t++) {
    const float x = call.skip_near && call.seen[seq] - pos[t] < call.skip_near ? 0.0f : from[t];
    to[t] = call.update == kAdd ? to[t] + x : x;
  }
}

// Merges the chunks of a list in their order, and writes output, log-sum-exp and scores.
static void merge_list(const Call& call, Plan& plan, long list, Scratch& s) {
  const long G = plan.G, D = plan.D, chunks = plan.chunks_per_list;
  s.factor.assign(chunks * G, 0.0f);  // what each chunk's exponentials are multiplied by to become probabilities
  for (long g = 0; g < G; g++) {
    const float* top = plan.max.data() + list * chunks * G + g;
    const float* sum = plan.sum.data() + list * chunks * G + g;
    float most = kLowest, total = 0.0f;
    for (long c = 0; c < chunks; c++) most = std::max(most, top[c * G]);
    for (long c = 0; c < chunks; c++)
      if (sum[c * G] != 0.0f) total += (s.factor[c * G + g] = std::exp(top[c * G] - most)) * sum[c * G];
    float* out = call.out + (list * G + g) * D;
    std::fill(out, out + D, total == 0.0f ? NAN : 0.0f);  // attention over nothing has no value
    for (long c = 0; c < chunks; c++) {
      if (sum[c * G] == 0.0f) continue;
      s.factor[c * G + g] /= total;
      add_scaled(s.factor[c * G + g], plan.acc.get() + ((list * chunks + c) * G + g) * D, D, out);
    }
    if (call.lse) call.lse[list * G + g] = most + std::log(total);
  }
  if (call.reduce == kNone) return;
  s.row.resize(std::max<long>(s.row.size(), plan.score_slots));
  const long row = row_of(call, list);
  for (int i = 0; i < call.num_tiers; i++) {
    const Tier& tier = call.tiers[i];
    const TierPlan& p = plan.tiers[i];
    const long width = (long)tier.num_columns * p.slots, held = std::min<long>(width, tier.num_k[row]);
    float* scores = call.update == kReturn ? tier.scores + list * width : s.row.data();
    if (call.update == kReturn) std::fill(scores + held, scores + width, 0.0f);
    for (long begin = 0; begin < held; begin += p.chunk_slots) {
      const long n = std::min(held - begin, p.chunk_slots);
      const float* factor = s.factor.data() + (p.first_chunk + begin / p.chunk_slots) * G;
      const float* e = plan.probability.get() + list * G * plan.score_slots + p.score_begin + begin;
      reduce_scores(call, e, plan.score_slots, factor, G, n, scores + begin);
    }
    if (call.update == kReturn) continue;
    for (long begin = 0; begin < held; begin += p.slots) {
      uint8_t* page = call.pages + tier.ids[row * tier.num_columns + begin / p.slots] * call.page_bytes;
      const long n = std::min(held - begin, p.slots);
      update_scores(call, tier, page, list / call.num_heads, n, scores + begin);
    }
  }
}

}  // namespace kvb
