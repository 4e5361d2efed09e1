// Which numbers a call may hold: counts within tables and buffers, pages within the pool, slots within a page. The Python side checks shapes
// (kernels/checks.py); what tensors contain is checked here, before anything is sized by it, read or written.
#pragma once

#include "plan.h"

namespace kvb {

static bool in_range(int64_t x, int64_t end) { return x >= 0 && x < end; }

// The pages that hold the first `held` slots of a list.
static int check_pages(const Tier& tier, int64_t num_pages, long row, long held) {
  const int64_t* ids = tier.ids + row * tier.num_columns;
  for (long begin = 0, i = 0; begin < held; begin += tier.slots_per_page, i++)
    if (!in_range(ids[i], num_pages)) return kNoPage;
  return kDone;
}

static int check_count(const Tier& tier, int64_t count) {
  return in_range(count, (int64_t)tier.num_columns * tier.slots_per_page + 1) ? kDone : kNoCount;
}

// n addresses of slots; runs of `group` lie next to each other, aligned, in one page.
static int check_slots(const Tier& tier, int64_t num_pages, long n, long group, const int64_t* page, const int64_t* slot) {
  if (n % group) return kNoSlot;
  for (long i = 0; i < n; i++) {
    const long t = i % group, first = i - t;
    if (!in_range(page[i], num_pages)) return kNoPage;
    if (!in_range(slot[i], tier.slots_per_page)) return kNoSlot;
    if (t ? page[i] != page[first] || slot[i] != slot[first] + t : slot[i] % group) return kNoSlot;
  }
  return kDone;
}

// What one list holds. Behind a residual buffer a token lies in a page or in the buffer.
static int check_list(const Call& call, long list) {
  const long row = row_of(call, list);
  for (int i = 0; i < call.num_tiers; i++)
    if (check_count(call.tiers[i], call.tiers[i].num_k[row]) || check_count(call.tiers[i], call.tiers[i].num_v[row])) return kNoCount;
  if (!call.ring) return kDone;
  const Ring& ring = *call.ring;
  if (ring.rows && !in_range(ring.rows[list / call.num_heads], ring.num_rows)) return kNoRow;
  const int64_t total = ring.num_tokens[row], k = call.tiers[0].num_k[row], v = call.tiers[0].num_v[row];
  // In this order, so that no sum can overflow.
  const bool fits = total >= k && total >= v && total - k <= ring.k_length && total - v <= ring.v_length;
  return fits ? kDone : kNoCount;
}

}  // namespace kvb
