// Attention of one query token per sequence over compressed pages, without ever writing a dense key or value: dequantisation is folded
// into the two products, logit = s * (q . code) + z * sum(q) and out = sum (p * s) * code + sum p * z. kernels/reference/attention.py says what it
// means, kernels/format.py how a page lies, kernels/cpu/backend.py fills in the structs below.
//
// A list (one sequence, one KV head) is cut into chunks of a fixed number of pages. Each chunk is worked on by one thread, alone, and the
// chunks of a list are merged in their order, so a result depends neither on the number of threads nor on the other lists of the batch.
#pragma once

#include "values.h"

namespace kvb {

// Pages lie anywhere: the next one's keys, and the scales of both sides, are asked for while this one is worked on.
static Ahead keys_ahead(const Tier& tier, const TierPlan& p, const uint8_t* page) {
  if (!page) return {};
  const long scales = scaled(tier.v) ? scale_bytes(tier.v) * p.slots * tier.v.groups : 0;
  const long meta_end = tier.v.zero ? tier.v_zero + 2 * p.slots * tier.v.groups : tier.v_scale + scales;
  return {page + tier.k_codes, page + tier.v_codes, page + tier.k_scale, page + meta_end};
}

static Ahead values_ahead(const Tier& tier, const TierPlan& p, long D, const uint8_t* page) {
  if (!page || tier.v.kind == kKeys) return keys_ahead(tier, p, page);
  const uint8_t* codes = page + tier.v_codes;
  return {codes, codes + p.slots * units_of(tier.v.kind, D / planes_of(tier.v.kind)) * unit_bytes_of(tier.v.kind)};
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
  const long head = list % call.num_heads, n = end - begin;
  const long held_k = std::max<long>(0, std::min(n, num_k - begin)), held_v = std::max<long>(0, std::min(n, num_v - begin));
  auto page_at = [&](long index) -> const uint8_t* {
    const int64_t id = index < tier.num_columns ? tier.ids[row * tier.num_columns + index] : -1;
    return id >= 0 && id < call.num_pages ? call.pages + id * call.page_bytes : nullptr;
  };
  s.pages.clear();
  for (long at = 0; at < std::max(held_k, held_v); at += T) {
    s.pages.push_back(page_at((begin + at) / T));
    if (!s.pages.back()) return false;
  }
  s.pages.push_back(page_at(end / T));  // the next chunk's first, or null
  const uint8_t *const *pages = s.pages.data(), *next_chunk = s.pages.back();
  const float* q = call.q + list * G * D;
  prepare_queries(call, tier, p, q, s);
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
  for (long at = 0; at < held_k; at += T) {
    const long held = std::min(T, held_k - at), index = at / T;
    const long ahead_by = index + kNextPages, first_value = ahead_by - (held_k + T - 1) / T;
    const Ahead ahead = first_value < 0               ? keys_ahead(tier, p, pages[ahead_by])
                        : first_value * T < held_v ? values_ahead(tier, p, D, pages[first_value])
                                                   : Ahead();
    if (tier.cos || tier.channel_scale || tier.k.apart) {
      const PageTurn turn = turn_of_page(call, tier, list / call.num_heads, begin / T + index);
      turned_logits(call, tier, p, pages[index], held, head, turn, q, ahead, s, p_chunk + at, stride);
    } else {
      page_logits(call, tier, p, pages[index], held, ahead, s, p_chunk + at, stride);
    }
  }
  for (long t = held_k; t < n; t++) {
    if (begin + t < k_alive) {
      for (long g = 0; g < G; g++) p_chunk[g * stride + t] = kLowest;
      continue;
    }
    const long entry = (begin + t) % ring->k_length;
    widen_any(ring->kind, ring->k + seq * ring->k_row_stride + head * ring->k_head_stride + entry * D * ring_unit, D, s.row.data());
    for (long g = 0; g < G; g++) {
      p_chunk[g * stride + t] = call.scale * dot(q + g * D, s.row.data(), D);
      if (call.cap != 0.0f) cap_logits(p_chunk + g * stride + t, 1, call.cap);
    }
  }
  for (long g = 0; g < G && call.cap != 0.0f; g++) cap_logits(p_chunk + g * stride, held_k, call.cap);
  const long part = (list * plan.chunks_per_list + p.first_chunk + chunk) * G;
  for (long g = 0; g < G; g++) plan.max[part + g] = largest(p_chunk + g * stride, n);
  const float* top = &plan.max[part];
  const int VP = planes_of(p.v_kind);
  const long v_groups = scaled(tier.v) ? tier.v.groups : 1;
  s.sum.assign(G * VP * p.v_padded, 0.0f);
  s.z_sum.assign(G * v_groups, 0.0f);
  s.z_lanes.assign(G * v_groups * kLanes, 0.0f);
  s.lanes.assign(G * kLanes, 0.0f);
  float* sums = s.lanes.data();
  bool done = false;
#if KVB_DIGITS
  done = held_v && values_by_digits(tier, p) && weighted_values(call, tier, p, pages, held_v, p_chunk, stride, top, sums, s);
#endif
  const long apart = done ? held_v : 0;  // slots whose exponentials are made there
  for (long g = 0; g < G; g++) exponentials(p_chunk + g * stride + apart, n - apart, top[g], sums + g * kLanes);
  for (long at = 0; at < held_v && !done; at += T) {
    const Ahead ahead = at + T < held_v ? values_ahead(tier, p, D, pages[at / T + 1]) : keys_ahead(tier, p, next_chunk);
    page_values(call, tier, p, pages[at / T], std::min(T, held_v - at), p_chunk + at, stride, ahead, s);
  }
  for (long at = 0; at < held_v && tier.v.apart; at += T)
    add_values_apart(call, tier, pages[at / T], std::min(T, held_v - at), T, p_chunk + at, stride, s);
  for (long t = held_v; ring && t < n; t++) {  // without a buffer, values past num_v count as zero
    if (begin + t < v_alive) continue;
    const long entry = (begin + t) % ring->v_length;
    widen_any(ring->kind, ring->v + seq * ring->v_row_stride + head * ring->v_head_stride + entry * D * ring_unit, D, s.row.data());
    for (long g = 0; g < G; g++) add_scaled(p_chunk[g * stride + t], s.row.data(), D, &s.loose[g * D]);
  }
  const long channels = D / v_groups;
  for (long g = 0; g < G; g++) {
    plan.sum[part + g] = sum_of(load(sums + g * kLanes));
    float* out = plan.acc.get() + (part + g) * D;
    for (long plane = 0; plane < VP; plane++)
      for (long w = 0; w < p.v_width; w++) out[plane * p.v_width + w] = s.sum[(g * VP + plane) * p.v_padded + w] * p.v_unit;
    for (long r = 0; r < v_groups; r++) s.z_sum[g * v_groups + r] += sum_of(load(&s.z_lanes[(g * v_groups + r) * kLanes]));
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
    if (call.sinks) most = std::max(most, call.sinks[list % call.num_heads * G + g]);
    for (long c = 0; c < chunks; c++)
      if (sum[c * G] != 0.0f) total += (s.factor[c * G + g] = std::exp(top[c * G] - most)) * sum[c * G];
    if (call.sinks) total += std::exp(call.sinks[list % call.num_heads * G + g] - most);
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
