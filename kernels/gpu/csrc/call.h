// What the kernels take, where a list lies, and how it is cut into parts.
#pragma once

#include "form.h"

#include "warp.h"

constexpr int WARPS = 4, CONSUMERS = 32 * WARPS, THREADS = CONSUMERS + 32;
constexpr int MOST_PARTS = 24, LEAST_SLOTS = 256;  // of a list in a tier, and of each of its parts
constexpr int BUFFERS = 2;                         // of items: the next one is prepared meanwhile
constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

struct Tier {
  const void *table, *num_k, *num_v;
  u16* weights;  // [lists, columns * slots, G] exponentials in halves, or null
  float* tops;   // [lists, columns * turns, G] the maxima that they are relative to
  float* scores;  // [lists, columns * slots], or null where they go into the pages
  int columns, entries, reversed, wide_table, wide_counts, unused;
};

struct Call {
  const void* q;
  u8* pages;
  const i64 *rows, *seen;
  const float* sinks;
  void* out;
  float *lse, *lse2, *part_top, *part_sum, *part_out;
  int *arrived, *starts;
  const void *ring_k, *ring_v, *ring_tokens;
  i64 rk_row, rk_head, rv_row, rv_head;
  Tier tiers[2];
  float scale2;
  int lists, heads, per_row, offset, rk, rv, in_table, counts_in_table, wide_rings;
  int power, rule, replace, near, unused;
};

// Integers of 64 bits are read by their lower halves.
DEVICE int load_int(const void* p, i64 index, int wide) { return ((const int*)p)[wide ? 2 * index : index]; }

// Where a list lies: in arrays of the step, in page tables, and the sequence's row.
struct Place {
  i64 row, which, counted;
  int flat;
};
DEVICE Place place_of(const Call& call, int list, int offset) {
  const int seq = list / call.heads, head = list % call.heads;
  Place p;
  p.row = call.rows ? call.rows[seq] : seq;
  p.flat = seq * call.per_row + offset + head;
  p.which = call.in_table ? p.row * call.per_row + offset + head : p.flat;
  p.counted = call.counts_in_table ? p.which : p.flat;
  return p;
}

struct Held {
  int k, v, total;
};
DEVICE Held held_of(const Call& call, int tier, const Place& p) {
  const Tier& t = call.tiers[tier];
  Held h;
  h.k = load_int(t.num_k, p.counted, t.wide_counts), h.v = load_int(t.num_v, p.counted, t.wide_counts);
  h.total = F::RING ? load_int(call.ring_tokens, p.flat, call.wide_rings) : h.k;
  h.v = min(h.v, h.total);
  return h;
}

// Pages of each part of so many, and how many parts that are.
template <class S> DEVICE int share_of(int pages) {
  constexpr int LEAST = (LEAST_SLOTS + S::SLOTS - 1) / S::SLOTS;
  return max(LEAST, (pages + MOST_PARTS - 1) / MOST_PARTS);
}
template <class S> DEVICE int parts_of(int total) {
  const int pages = (total + S::SLOTS - 1) / S::SLOTS, share = share_of<S>(pages);
  return max(1, (pages + share - 1) / share);
}

