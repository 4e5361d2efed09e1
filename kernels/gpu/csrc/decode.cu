// Attention of one query token per sequence over lists of pages. kernels/reference/attention.py says what it means,
// kernels/format.py how a page lies; gpu/cuda_form.py writes `form.h` (what is known when this is compiled) and
// gpu/cuda_decode.py fills in `Call`.
//
// A list (one sequence, one KV head) is cut into parts of whole pages, how many depends on its own length alone. `plan`
// numbers the parts of all lists; the blocks of `decode` go through these numbers, so that no list's length decides how
// long the others wait. In a block one warp copies pages, and the others attend over what is there; their results are
// merged in shared memory, and the parts of a list by the block that ends last, in the order of the tokens. So a result
// depends on nothing but its own list. `scores` turns the exponentials that `decode` keeps into probabilities.
#include "merge.h"
#include "ring.h"

// starts[layer][list]: parts of the lists before. A block per layer.
KERNEL(256, 64) kvb_plan(PARAMETER Call call) {
  int* sums = (int*)shared_memory();
  int* starts = call.starts + (i64)block_index() * (call.lists + 1);
  const int thread = thread_index(), lane = thread % 32, warp = thread / 32;
  int before = 0;
  for (int begin = 0; begin < call.lists; begin += 256) {
    const int list = begin + thread;
    int count = 0;
    if (list < call.lists) {
      const Place p = place_of(call, list, call.offset + block_index() * call.heads);
      count = parts_of<A>(held_of(call, 0, p).total);
      if constexpr (F::TWO) count += parts_of<B>(held_of(call, 1, p).total);
    }
    int sum = count;
    for (int by = 1; by < 32; by *= 2) {
      const int other = shuffle_up(sum, by);
      if (lane >= by) sum += other;
    }
    if (lane == 31) sums[warp] = sum;
    sync_block();
    int all = 0;
    for (int i = 0; i < 8; ++i) {
      if (i < warp) sum += sums[i];
      all += sums[i];
    }
    if (list < call.lists) starts[list] = before + sum - count;
    before += all;
    sync_block();
  }
  if (thread == 0) starts[call.lists] = before;
}

// Keeps what becomes the scores of a turn.
template <class S> DEVICE void keep_exponentials(const Call& call, const Item& item, const float (&top)[2], const float (&x)[2][4], int page, int t0, int lane) {
  constexpr int TURNS = (S::SLOTS + TURN - 1) / TURN;
  const Tier& tier = call.tiers[item.second];
  const int g = lane / 4, c = lane % 4, token = page * S::SLOTS + t0 + 4 * g;
  if (page >= tier.columns) return;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int query = 2 * c + j;
    if (query >= F::G) continue;
    if (g == 0) tier.tops[((i64)item.list * tier.columns * TURNS + page * TURNS + t0 / TURN) * F::G + query] = top[j];
    u16* to = tier.weights + ((i64)item.list * tier.columns * S::SLOTS + token) * F::G + query;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (token + i < item.held_k && t0 + 4 * g + i < S::SLOTS) to[i * F::G] = pack_halves(x[i / 2][i % 2 * 2 + j], 0);
  }
}

// The part of an item that one warp attends over: every fourth turn.
template <class S>
DEVICE void attend(const Call& call, Shared& shared, State<S, F::D>& s, const Item& item, Local q, int pages, int warp, int lane) {
  constexpr int TURNS = turns<S>();
  const int g = lane / 4, begin = item.begin, end = item.end, total = item.total;
  const int paged = F::RING ? item.paged : item.end, held_k = F::RING ? item.held_k : total, held_v = F::RING ? item.held_v : total;
  const Local numbers = local(&item.by[2 * (lane % 4)]);
  int index = begin + warp / TURNS, within = warp % TURNS;
  for (; index < end; index += WARPS / TURNS, within += WARPS % TURNS) {
    if (WARPS % TURNS && within >= TURNS) {
      within -= TURNS;
      if (++index >= end) break;
    }
    const int t0 = within * TURN, first = index * S::SLOTS + t0;
    const u32 number = pages + index - begin, stage = number % STAGES;
    const Local page = local(shared.stages[stage]);
    const bool in_pool = !F::RING || index < paged;
    if (in_pool) wait(&shared.full[stage], number / STAGES & 1);
    const int live = S::SLOTS % TURN ? min(total - first, S::SLOTS - t0) : total - first;
    // Of a buffer that lost tokens a turn may hold none at all.
    const bool is_lost = F::RING && first >= held_k && first + TURN <= total - call.rk;
    if (live > 0 && !is_lost) {
      float x[2][4];
      const int live_k = min(held_k - first, live), live_v = min(held_v - first, live);
      if (!F::RING || live_k > 0) page_dots<F, S>(x, page, t0, q, numbers, lane);
      if (live_k < TURN) {
        float buffered[2][4] = {};
        if constexpr (F::RING > 0)
          ring_dots<F, S>(buffered, (const u16*)call.ring_k + item.ring_k, call.rk, first, item, q, lane);
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            float& it = x[i / 2][i % 2 * 2 + j];
            const int t = 4 * g + i;
            const bool is_buffered = F::RING && t < live && first + t >= total - call.rk;
            it = t < live_k ? it : is_buffered ? buffered[i / 2][i % 2 * 2 + j] : LOWEST;
          }
      }
      const float2 pair = load_pair(numbers);
      const float by[2] = {pair.x, pair.y};
      raise_top<F, S>(s, x, by);
      u32 p[2][2];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int j = 0; j < 4; ++j) x[m][j] = exp2_of(x[m][j] * by[j % 2] - s.top[j % 2]);
        p[m][0] = transpose(pack_halves(x[m][0], x[m][1])), p[m][1] = transpose(pack_halves(x[m][2], x[m][3]));
      }
      if (F::SCORES && live_k > 0) keep_exponentials<S>(call, item, s.top, x, index, t0, lane);
      if (live_v >= TURN) {
        add_page_values<F, S, false>(s, page, t0, p, TURN, lane);
      } else {
        if (live_v > 0) add_page_values<F, S, true>(s, page, t0, p, live_v, lane);
        else
          for (int m = 0; m < 2; ++m) mma(s.both, 0, ONES, 0, ONES, p[m][0], p[m][1]);
        if constexpr (F::RING > 0)
          add_ring_values<F, S>(s, (const u16*)call.ring_v + item.ring_v, call.rv, first, item, p, lane);
      }
    }
    if (in_pool) {
      sync_warp();
      if (lane == 0) {
        arrive(&shared.empty[stage]);
        if (RELEASES > TURNS && t0 == 0)  // for a page of the other tier, which has more turns
          for (int i = TURNS; i < RELEASES; ++i) arrive(&shared.empty[stage]);
      }
    }
  }
}

template <class S> DEVICE void consume_item(const Call& call, Shared& shared, Ahead& at, const Item& item, int warp, int lane) {
  State<S, F::D> s;
  clear(s);
  attend<S>(call, shared, s, item, local(shared.q[at.items % BUFFERS][0][lane]), at.pages, warp, lane);
  at.pages += max(0, min(item.end, item.paged) - item.begin);
  merge_warps<S>(shared, s, warp, lane);
}

KERNEL(THREADS, F::REGISTERS) kvb_decode(PARAMETER Call call) {
  Shared& shared = *(Shared*)shared_memory();
  const int thread = thread_index(), warp = thread >> 5, lane = thread & 31;
  if (thread == 0) {
    for (int i = 0; i < STAGES; ++i) init_barrier(&shared.full[i], COPY_ARRIVALS), init_barrier(&shared.empty[i], RELEASES);
    for (int i = 0; i < BUFFERS; ++i) init_barrier(&shared.ready[i], 1), init_barrier(&shared.done[i], WARPS);
    publish_barriers();
  }
  sync_block();
  const int* starts = call.starts + (i64)(call.offset / call.heads) * (call.lists + 1);
  if (warp == WARPS) {
    produce(call, shared, starts, lane);
    return;
  }
  const int count = starts[call.lists];
  Ahead at = {0, 0};
  for (int number = block_index(); number < count; number += num_blocks(), ++at.items) {
    const int buffer = at.items % BUFFERS;
    wait(&shared.ready[buffer], at.items / BUFFERS & 1);
    const Item& item = shared.items[buffer];
    if (F::TWO && item.second) consume_item<B>(call, shared, at, item, warp, lane);
    else consume_item<A>(call, shared, at, item, warp, lane);
    finish_item(call, shared, item, thread);
    sync_warp();
    if (lane == 0) arrive(&shared.done[buffer]);
  }
}

// The scores of a tier's slots, 256 a block: probabilities raised to a power, and reduced over the query heads.
template <class S> DEVICE void make_scores(const Call& call, int tier_index, int block, int thread) {
  constexpr int TURNS = turns<S>();
  const Tier& tier = call.tiers[tier_index];
  const int width = tier.columns * S::SLOTS, blocks = (width + 255) / 256, list = block / blocks;
  const int slot = block % blocks * 256 + thread, page = slot / S::SLOTS, t = slot % S::SLOTS;
  if (slot >= width) return;
  const Place p = place_of(call, list, call.offset);
  const bool live = slot < held_of(call, tier_index, p).k;
  float score = 0;
  if (live) {
    const u16* weights = tier.weights + ((i64)list * width + slot) * F::G;
    const float* tops = tier.tops + ((i64)list * tier.columns * TURNS + page * TURNS + t / TURN) * F::G;
#pragma unroll
    for (int query = 0; query < F::G; ++query) {
      float x = unpack_halves(weights[query]).x * exp2_of(tops[query] - call.lse2[(i64)list * F::G + query]);
      if (call.power == 2) x *= x;
      score = call.rule == 2 ? fmaxf(score, x) : score + x;
    }
    if (call.rule == 1) score /= F::G;
  }
  if (tier.scores) {
    tier.scores[(i64)list * width + slot] = score;
  } else if (live) {
    const i64 at = p.which * tier.entries + (tier.reversed ? tier.entries - 1 - page : page);
    u8* its = call.pages + (i64)load_int(tier.table, at, tier.wide_table) * S::PAGE;
    float* field = (float*)(its + S::SCORE) + t;
    if (call.near > 0 && call.seen[list / call.heads] - ((const int*)(its + S::POS))[t] < call.near) score = 0;
    *field = call.replace ? score : *field + score;
  }
}

#ifndef KVB_HOST
extern "C" __device__ int kvb_sizes[2] = {sizeof(Shared), sizeof(Call)};  // which gpu/cuda_load.py reads
#endif

KERNEL(256, 64) kvb_scores(PARAMETER Call call) {
  const int first = (call.tiers[0].columns * A::SLOTS + 255) / 256 * call.lists;
  if (block_index() < first) make_scores<A>(call, 0, block_index(), thread_index());
  else if constexpr (F::TWO) make_scores<B>(call, 1, block_index() - first, thread_index());
}
