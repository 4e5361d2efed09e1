// Reductions over the tracked fields of a tier: which slot of each list is smallest, without gathering them.
#pragma once

#include "plan.h"

namespace kvb {

struct Search {
  const int64_t *seen, *floor;    // [lists]: for means, score / max(1, seen - max(pos, floor))
  const int64_t *before, *exact;  // [lists] or null: only positions below; only this position
  int64_t first;                  // only positions from here on
  int32_t by;                     // 0 mean, 1 score, 2 position
  int32_t num_threads;
  float* value;                   // [lists] out; infinity, -1, -1 where no slot is eligible
  int64_t *slot, *pos;
};

static float smallest(const float* x, long n) {
  Vec low = splat(INFINITY), more = low;
  long t = 0;
  for (; t + 2 * kLanes <= n; t += 2 * kLanes) low = min_of(load(x + t), low), more = min_of(load(x + t + kLanes), more);
  float lanes[kLanes], least = INFINITY;
  store(lanes, min_of(low, more));
  for (float lane : lanes) least = lane < least ? lane : least;
  for (; t < n; t++) least = x[t] < least ? x[t] : least;
  return least;
}

// Returns false on a page id out of range.
static bool search_list(const uint8_t* pages, int64_t page_bytes, int64_t num_pages, const Tier& tier, const Search& s, long list) {
  const long T = tier.slots_per_page, held = tier.num_k[list];
  const int64_t first = s.exact ? s.exact[list] : s.first, last = s.exact ? first + 1 : s.before ? s.before[list] : INT32_MAX;
  const int32_t low = int32_t(std::max<int64_t>(first, 0)), high = int32_t(std::min<int64_t>(last, INT32_MAX));
  const int32_t floor = int32_t(s.floor ? std::max<int64_t>(s.floor[list], INT32_MIN) : INT32_MIN), seen = int32_t(s.seen[list]);
  float best = INFINITY;
  int64_t best_slot = -1, best_pos = INT64_MAX;
  int32_t positions[1024];
  float values[1024];
  for (long begin = 0; begin < held; begin += T) {
    const long index = begin / T;
    const int64_t id = index < tier.num_columns ? tier.ids[list * tier.num_columns + index] : -1;
    if (id < 0 || id >= num_pages) return false;
    const uint8_t* page = pages + id * page_bytes;
    for (long part = 0; part < std::min(T, held - begin); part += 1024) {
      const long n = std::min<long>(1024, std::min(T, held - begin) - part);
      if (tier.pos >= 0) std::memcpy(positions, page + tier.pos + 4 * part, 4 * n);
      else std::fill(positions, positions + n, -1);
      if (s.by == 2) for (long t = 0; t < n; t++) values[t] = float(positions[t]);
      else if (tier.score >= 0) std::memcpy(values, page + tier.score + 4 * part, 4 * n);
      else std::fill(values, values + n, 0.0f);
      if (s.by == 0)
        for (long t = 0; t < n; t++) {
          const int32_t origin = positions[t] > floor ? positions[t] : floor, count = seen - origin;
          values[t] /= float(count > 1 ? count : 1);
        }
      const bool any = s.exact || s.before || s.first;  // otherwise also slots without a position
      if (any)
        for (long t = 0; t < n; t++) values[t] = positions[t] >= low && positions[t] < high ? values[t] : INFINITY;
      const float least = smallest(values, n);
      if (least > best) continue;
      for (long t = 0; t < n; t++) {
        if (values[t] != least || (any && (positions[t] < low || positions[t] >= high))) continue;
        if (least < best || best_slot < 0 || positions[t] < best_pos) {
          best = least;
          best_slot = begin + part + t;
          best_pos = positions[t];
        }
      }
    }
  }
  s.value[list] = best;
  s.slot[list] = best_slot;
  s.pos[list] = best_slot < 0 ? -1 : best_pos;
  return true;
}

}  // namespace kvb
