// What a block shares, and the warp that fills it: the items of a block, their queries and their pages.
#pragma once

#include "call.h"
#include "turn.h"

KNOWN int most(int a, int b) { return a > b ? a : b; }
constexpr int READ = F::TWO ? most(A::READ, B::READ) : A::READ;
template <class S> KNOWN int turns() { return (S::SLOTS + TURN - 1) / TURN; }  // of a page
// A warp takes every fourth turn. It may wait for a page only if it saw the one that was in this stage before: of a
// barrier's phases just even and odd ones can be told apart.
template <class S> KNOWN int least_stages() { return turns<S>() % 4 == 0 ? 1 : turns<S>() % 2 == 0 ? 2 : 4; }
constexpr int LEAST_STAGES = most(2, F::TWO ? most(least_stages<A>(), least_stages<B>()) : least_stages<A>());
constexpr int STAGES = most(LEAST_STAGES, F::STAGE_BYTES / READ >= 8 ? 8 : F::STAGE_BYTES / READ >= 4 ? 4 : 2);  // pages under way
constexpr int RELEASES = F::TWO ? most(turns<A>(), turns<B>()) : turns<A>();  // of a page, before the next one may come
struct Shared {
  u8 stages[STAGES][READ];
  u32 q[BUFFERS][F::D / 32][32][4];
  Item items[BUFFERS];
  float merged[WARPS][F::G][F::D];
  float tops[WARPS][8], norms[WARPS][8];
  u64 full[STAGES], empty[STAGES], ready[BUFFERS], done[BUFFERS];
  int is_last;
};

// The list of a number: the last one that begins at it or before. A warp looks at 32 at once.
DEVICE int find_list(const int* starts, int lists, int number, int lane) {
  int low = 0, size = lists;
  while (size > 1) {
    const int step = (size + 31) / 32, at = low + lane * step;
    const u32 found = vote(lane * step < size && starts[at] <= number);
    int last = 0;  // lanes before it have found theirs, too
    for (u32 bits = found; bits >>= 1;) ++last;
    size = min(step, size - last * step), low += last * step;
  }
  return low;
}

// Prepares the queries of an item: fp16, over a power of two that brings the largest element below 1, and over what the
// codes of a plane are too large by.
template <class S> DEVICE void prepare_queries(const Call& call, Item& item, u32 (&to)[F::D / 32][32][4], int lane) {
  using K = Keys<S, F::D>;
  const int g = lane / 4, c = lane % 4;
  const u16* q = (const u16*)call.q + ((i64)item.list * F::G + (g < F::G ? g : 0)) * F::D + 2 * c;
  float2 x[K::BLOCKS];
  float largest = 0;
#pragma unroll
  for (int r = 0; r < K::BLOCKS; ++r) {
    const u32 raw = g < F::G ? *(const u32*)(q + 8 * r) : 0;
    if constexpr (F::QUERY == 2) x[r] = {float_of(raw << 16), float_of(raw & 0xffff0000)};
    else x[r] = unpack_halves(raw);
    largest = fmaxf(largest, fmaxf(fabsf(x[r].x), fabsf(x[r].y)));
  }
  largest = fmaxf(largest, shuffle_xor(largest, 1)), largest = fmaxf(largest, shuffle_xor(largest, 2));
  u32 exponent = bits_of(largest) >> 23;
  if (exponent == 0 || exponent > 252) exponent = 126;  // nothing but zeros, or no number
  const float by = float_of((253 - exponent) << 23);
  float sum = 0, less = 0;
#pragma unroll
  for (int r = 0; r < K::BLOCKS; ++r) {
    x[r].x *= by, x[r].y *= by;
    const float less_by = K::PER_CHANNEL ? 1.0f : 1.0f / (1 << (S::K_BITS * K::plane(r)));
    const u32 made = pack_halves(x[r].x * less_by, x[r].y * less_by);
    to[r / 4][lane][r % 4] = made;
    if constexpr (!K::PER_CHANNEL) {
      const float2 rounded = unpack_halves(made);
      sum += x[r].x + x[r].y, less += rounded.x + rounded.y;
    }
  }
  if constexpr (!K::PER_CHANNEL)
    for (int mask = 1; mask < 4; mask *= 2) sum += shuffle_xor(sum, mask), less += shuffle_xor(less, mask);
  if (c == 0) {
    item.by[g] = call.scale2 * float_of((exponent + 1) << 23);
    item.query_sum[g] = sum, item.less[g] = -MAGIC * less - S::K_CENTRE * sum;
  }
}

struct Ahead {  // how far a warp has come
  int pages, items;
};

// Copies a page of an item once there is room for it. ids: those of the lane's page among 32.
template <class S> DEVICE void copy_page(const Call& call, Shared& shared, int number, int page, int lane) {
  const int stage = number % STAGES, turn = number / STAGES;
  if (turn > 0) wait(&shared.empty[stage], (turn - 1) & 1);
  copy_to_shared<S::READ>(shared.stages[stage], call.pages + (i64)page * S::PAGE, &shared.full[stage], lane);
}

template <class S> DEVICE void produce_item(const Call& call, Shared& shared, Ahead& at, const Place& p, Item& item, int lane) {
  const Tier& tier = call.tiers[item.second];
  const int buffer = at.items % BUFFERS, count = min(item.end, item.paged) - item.begin;
  const i64 first = p.which * tier.entries + (tier.reversed ? tier.entries - 1 - item.begin : item.begin);
  int ids = 0;
  auto look_up = [&](int n) {
    if (n + lane < count) ids = load_int(tier.table, first + (tier.reversed ? -n - lane : n + lane), tier.wide_table);
  };
  look_up(0);
  if (count > 0) copy_page<S>(call, shared, at.pages, shuffle(ids, 0), lane);
  prepare_queries<S>(call, item, shared.q[buffer], lane);  // while the first page is under way
  sync_warp();
  if (lane == 0) arrive(&shared.ready[buffer]);
#pragma unroll 1
  for (int n = 1; n < count; ++n) {
    if (n % 32 == 0) look_up(n);
    copy_page<S>(call, shared, at.pages + n, shuffle(ids, n % 32), lane);
  }
  at.pages += max(0, count);
}

// Copies pages, part after part.
DEVICE void produce(const Call& call, Shared& shared, const int* starts, int lane) {
  const int count = starts[call.lists];
  Ahead at = {0, 0};
  for (int number = block_index(); number < count; number += num_blocks(), ++at.items) {
    const int buffer = at.items % BUFFERS;
    Item& item = shared.items[buffer];
    if (at.items >= BUFFERS) wait(&shared.done[buffer], (at.items / BUFFERS - 1) & 1);
    const int list = find_list(starts, call.lists, number, lane), first = starts[list];
    const Place p = place_of(call, list, call.offset);
    Held held = held_of(call, 0, p);
    int part = number - first, second = 0, share, slots = A::SLOTS;
    if constexpr (F::TWO) {
      const int parts = parts_of<A>(held.total);
      if (part >= parts) part -= parts, second = 1, slots = B::SLOTS, held = held_of(call, 1, p);
    }
    const int pages = (held.total + slots - 1) / slots;
    share = second ? share_of<B>(pages) : share_of<A>(pages);
    if (lane == 0) {
      const int head = list % call.heads;
      item.list = list, item.first_part = first, item.parts = starts[list + 1] - first, item.part = number;
      item.begin = min(part * share, pages), item.end = min((part + 1) * share, pages);
      item.paged = min((max(held.k, held.v) + slots - 1) / slots, call.tiers[second].columns);
      item.held_k = held.k, item.held_v = held.v, item.total = held.total, item.second = second;
      item.ring_k = p.row * call.rk_row + head * call.rk_head, item.ring_v = p.row * call.rv_row + head * call.rv_head;
    }
    sync_warp();
    if (F::TWO && second) produce_item<B>(call, shared, at, p, item, lane);
    else produce_item<A>(call, shared, at, p, item, lane);
  }
}

