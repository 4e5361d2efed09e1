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

// Rows of a page table are far apart in memory: what a later page tracks is asked for while this one is searched.
constexpr long kPagesAhead = 3;

static void prefetch_field(const uint8_t* field, long n) {
  for (long at = 0; at < 4 * n; at += 64) __builtin_prefetch(field + at);
}

static bool holds(const int32_t* positions, long n, int32_t wanted) {
  int found = 0;
  for (long t = 0; t < n; t++) found |= positions[t] == wanted;
  return found;
}

constexpr long kPart = 1024;

// The values of n <= kPart slots; infinity at a position outside [low, high) where `any` says that positions are asked for.
static void slot_values(const Search& s, const float* scores, const int32_t* positions, long n, int32_t floor, int32_t seen, bool any,
                        int32_t low, int32_t high, float* values) {
  if (s.by == 2) for (long t = 0; t < n; t++) values[t] = float(positions[t]);
  else if (s.by == 1) std::memcpy(values, scores, 4 * n);
  else
    for (long t = 0; t < n; t++) {
      const int32_t origin = positions[t] > floor ? positions[t] : floor, count = seen - origin;
      values[t] = scores[t] / float(count > 1 ? count : 1);
    }
  if (any)
    for (long t = 0; t < n; t++) values[t] = positions[t] >= low && positions[t] < high ? values[t] : INFINITY;
}

// One list, whose count and pages were checked.
static void search_list(const uint8_t* pages, int64_t page_bytes, const Tier& tier, const Search& s, long list) {
  const long T = tier.slots_per_page, held = tier.num_k[list], count = (held + T - 1) / T;
  const int64_t* ids = tier.ids + list * tier.num_columns;
  const int64_t first = s.exact ? s.exact[list] : s.first, last = s.exact ? first + 1 : s.before ? s.before[list] : INT32_MAX;
  const int32_t low = int32_t(std::max<int64_t>(first, 0)), high = int32_t(std::min<int64_t>(last, INT32_MAX));
  const int32_t floor = int32_t(s.floor ? std::max<int64_t>(s.floor[list], INT32_MIN) : INT32_MIN), seen = int32_t(s.seen[list]);
  const bool any = s.exact || s.before || s.first;  // otherwise also slots without a position
  float best = INFINITY;
  int64_t best_slot = -1, best_pos = INT64_MAX;
  int32_t no_positions[kPart];
  float no_scores[kPart], values[kPart];
  if (tier.pos < 0) std::fill(no_positions, no_positions + kPart, -1);
  if (tier.score < 0) std::fill(no_scores, no_scores + kPart, 0.0f);
  for (long step = -kPagesAhead; step < count; step++) {
    // New tokens are at the end as long as nothing makes room for them, so a position is looked for from there on.
    const long index = s.exact ? count - 1 - step : step, ahead = s.exact ? index - kPagesAhead : index + kPagesAhead;
    if (ahead >= 0 && ahead < count) {
      if (tier.pos >= 0) prefetch_field(pages + ids[ahead] * page_bytes + tier.pos, std::min(T, held - ahead * T));
      if (tier.score >= 0 && !s.exact) prefetch_field(pages + ids[ahead] * page_bytes + tier.score, std::min(T, held - ahead * T));
    }
    if (step < 0) continue;
    const uint8_t* page = pages + ids[index] * page_bytes;
    const long begin = index * T, in_page = std::min(T, held - begin);
    for (long part = 0; part < in_page; part += kPart) {
      const long n = std::min(kPart, in_page - part);
      const int32_t* positions = tier.pos >= 0 ? (const int32_t*)(page + tier.pos) + part : no_positions;
      if (s.exact && !holds(positions, n, low)) continue;
      const float* scores = tier.score >= 0 ? (const float*)(page + tier.score) + part : no_scores;
      slot_values(s, scores, positions, n, floor, seen, any, low, high, values);
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
    if (s.exact && best_slot >= 0) break;
  }
  s.value[list] = best;
  s.slot[list] = best_slot;
  s.pos[list] = best_slot < 0 ? -1 : best_pos;
}

}  // namespace kvb
