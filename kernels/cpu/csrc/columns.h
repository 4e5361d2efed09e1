// Column sums of attention probabilities over a block of prompt queries: exponentials, causal mask, powers and sums in one pass over each
// row of logits while it is in the first cache. The logits themselves are the caller's (a matrix product). kernels/reference/attention.py
// says what it means (column_scores), kernels/cpu/scores.py calls it.
#pragma once

#include <algorithm>
#include <vector>

#include "simd.h"

namespace kvb {

// A block of consecutive queries.
struct Columns {
  float* logits;       // [heads][num_queries][width], overwritten; the last query sees all `width` keys, each one before it one less
  float* sums;         // [heads][sum_stride], added to
  const float* sinks;  // [heads] a logit of each head that belongs to no key, or null
  int64_t num_heads, num_queries, width, sum_stride;
  int64_t skip_near;   // a query does not count for keys nearer than this
  int32_t power;       // of the probabilities: 1 or 2
  int32_t below;       // count, as -1 each, the probabilities below 1 / (keys seen) instead
  int32_t num_threads;
  float cap;           // a logit x becomes cap * tanh(x / cap); 0: it stays
};

// The first n < kLanes floats of p, with `rest` behind them.
KVB_INLINE Vec load_some(const float* p, long n, float rest) {
  float lanes[kLanes];
  for (long i = 0; i < kLanes; i++) lanes[i] = i < n ? p[i] : rest;
  return load(lanes);
}

static float row_peak(const float* x, long n) {
  Vec high = splat(-INFINITY), more = high;
  long j = 0;
  for (; j + 2 * kLanes <= n; j += 2 * kLanes) high = max_of(high, load(x + j)), more = max_of(more, load(x + j + kLanes));
  for (; j + kLanes <= n; j += kLanes) high = max_of(high, load(x + j));
  float lanes[kLanes];
  store(lanes, max_of(max_of(high, more), load_some(x + j, n - j, -INFINITY)));
  return *std::max_element(lanes, lanes + kLanes);
}

// Replaces n logits by exp(x - shift); returns their sum.
static float exponentials(float* x, long n, float shift) {
  const Vec top = splat(shift);
  Vec total = splat(0.0f), more = total;
  long j = 0;
  for (; j + 2 * kLanes <= n; j += 2 * kLanes) {
    const Vec a = exp_of(sub(load(x + j), top)), b = exp_of(sub(load(x + j + kLanes), top));
    store(x + j, a), store(x + j + kLanes, b);
    total = add(total, a), more = add(more, b);
  }
  float sum = 0.0f;
  for (; j < n; j += kLanes) {
    const long count = std::min<long>(kLanes, n - j);
    float lanes[kLanes];
    store(lanes, exp_of(sub(load_some(x + j, count, shift), top)));
    for (long i = 0; i < count; i++) sum += x[j + i] = lanes[i];
  }
  return sum + sum_of(add(total, more));
}

// to[j] += the probability x[j] * factor, squared, or -1 where it is below a threshold.
static void add_row(const Columns& c, const float* x, long n, float factor, float threshold, float* to) {
  if (c.below) {
    for (long j = 0; j < n; j++) to[j] -= x[j] * factor < threshold ? 1.0f : 0.0f;
    return;
  }
  const Vec f = splat(factor);
  long j = 0;
  for (; j + kLanes <= n; j += kLanes) {
    const Vec p = mul(load(x + j), f);
    store(to + j, c.power == 2 ? fma(p, p, load(to + j)) : add(load(to + j), p));
  }
  for (; j < n; j++) {
    const float p = x[j] * factor;
    to[j] += c.power == 2 ? p * p : p;
  }
}

// One query head. The block's sums are made apart and added once, so that a long prompt is not summed one by one in fp32.
static void sum_columns(const Columns& c, long head) {
  static thread_local std::vector<float> block;
  block.assign(c.width, 0.0f);
  for (long i = 0; i < c.num_queries; i++) {
    float* x = c.logits + (head * c.num_queries + i) * c.width;
    const long seen = c.width - c.num_queries + i + 1, counted = std::max<long>(0, seen - c.skip_near);
    if (c.cap != 0.0f) cap_logits(x, seen, c.cap);
    const float peak = row_peak(x, seen);
    float total = exponentials(x, seen, peak);
    if (c.sinks) total += std::exp(c.sinks[head] - peak);
    add_row(c, x, counted, 1.0f / total, 1.0f / float(seen), block.data());
  }
  float* to = c.sums + head * c.sum_stride;
  for (long j = 0; j < c.width; j++) to[j] += block[j];
}

}  // namespace kvb
