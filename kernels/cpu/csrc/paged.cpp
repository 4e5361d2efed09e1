// The C functions that kernels/cpu/*.py call. Those that return a number return a Status (plan.h).
#include <atomic>
#include <memory>
#include <new>
#include <thread>

#include "attend.h"
#include "columns.h"
#include "limits.h"
#include "reduce.h"
#include "step.h"
#include "write.h"

namespace kvb {

// Runs f(i) for 0 <= i < n, on several threads when there is enough to do; f returns a Status.
template <class F> static int for_all(long n, int num_threads, F f) {
  std::atomic<int> status{kDone};
#pragma omp parallel for num_threads(num_threads) schedule(static) if (num_threads > 1)
  for (long i = 0; i < n; i++) {
    try {
      if (const int found = f(i)) status = found;
    } catch (const std::bad_alloc&) {
      status = kNoMemory;
    }
  }
  return status;
}

// Slots x query heads x channels that are worth a thread: where threads sleep between calls, waking one takes about as long as a half of them.
static double work_per_thread = 1e6;
static bool spoil_scratch = false;  // before each call

static int threads_for(const Call& call) {
  double slots = 0;
  for (int i = 0; i < call.num_tiers; i++)
    for (long list = 0; list < (long)call.num_seq * call.num_heads; list++) slots += list_slots(call, call.tiers[i], row_of(call, list));
  return int(std::min<double>(call.num_threads, std::max(1.0, slots * call.group_size * call.head_dim / work_per_thread)));
}

// Attention of a call whose counts and rows were checked; before(list) and after(list) run for every list, before its first chunk and after
// its merge. Threads take chunks as they come, and whoever ends a list's last one merges it: nobody waits for all others in between.
template <class Before, class After> static int attend(const Call& call, Before before, After after) {
  static thread_local Plan plan_of_thread;
  Plan& plan = plan_of_thread;
  const int num_threads = threads_for(call);
  std::unique_ptr<std::atomic<long>[]> ready, left;  // of each list: 2 once `before` is done, 1 while it runs; chunks that are not done
  try {
    make_plan(call, plan);
    ready.reset(new std::atomic<long>[plan.num_lists]);
    left.reset(new std::atomic<long>[plan.num_lists]);
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  }
  const long chunks = std::max(1L, plan.chunks_per_list), work = plan.num_lists * chunks;
  for (long list = 0; list < plan.num_lists; list++) ready[list] = 0, left[list] = chunks;
  std::atomic<int> status{kDone};
  std::atomic<long> next{0};
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
    static thread_local Scratch scratch;
    if (spoil_scratch) scratch.spoil();
    auto guarded = [&](auto f) {
      try {
        if (!f()) status = kNoPage;
      } catch (const std::bad_alloc&) {
        status = kNoMemory;
      }
    };
    for (long i; (i = next.fetch_add(1)) < work;) {
      const long list = i / chunks, chunk = i % chunks;
      long untouched = 0;
      if (ready[list].compare_exchange_strong(untouched, 1)) {
        guarded([&] { return before(list), true; });
        ready[list] = 2;
      }
      while (ready[list] != 2) std::this_thread::yield();
      if (plan.chunks_per_list) {
        int tier = call.num_tiers - 1;
        while (chunk < plan.tiers[tier].first_chunk) tier--;
        guarded([&] { return run_chunk(call, plan, list, tier, chunk - plan.tiers[tier].first_chunk, scratch); });
      }
      if (left[list].fetch_sub(1) == 1)
        guarded([&] {
          if (status) return true;  // a page id of this list may be out of range
          merge_list(call, plan, list, scratch);
          return after(list), true;
        });
    }
  }
  return status;
}

}  // namespace kvb

extern "C" {

const char* kvb_path() { return KVB_PATH; }

// For tests, which would need long lists to reach a second thread otherwise.
void kvb_set_work_per_thread(double work) { kvb::work_per_thread = work; }

// For tests: no result may depend on what an earlier call left in memory that is kept.
void kvb_spoil_scratch(int whether) { kvb::spoil_scratch = whether; }

int kvb_max_channels() { return kvb::kMaxChannels; }

int kvb_paged_decode(const kvb::Call* call) {
  for (long list = 0; list < (long)call->num_seq * call->num_heads; list++)
    if (const int status = kvb::check_list(*call, list)) return status;
  auto nothing = [](long) {};
  return kvb::attend(*call, nothing, nothing);
}

// One layer of a step: q [S, H * G, D], k and v [S, H, D], out as q.
int kvb_step(const kvb::Step* step, int layer, float* q, const float* k, const float* v, float* out, float scale) {
  using namespace kvb;
  if (!in_range(layer, step->num_layers)) return kNoLayer;
  Call call = step->call;
  Tier tiers[4];  // as many as kernels/checks.py lets a call have
  const long offset = (long)layer * call.num_heads;
  for (int i = 0; i < call.num_tiers; i++) {
    tiers[i] = call.tiers[i];
    tiers[i].ids += offset * tiers[i].num_columns;
    tiers[i].num_k += offset;
    tiers[i].num_v += offset;
  }
  Ring ring;
  if (call.ring) {
    ring = *call.ring;
    ring.k += offset * ring.k_head_stride;
    ring.v += offset * ring.v_head_stride;
    ring.num_tokens += offset;
    call.ring = &ring;
  }
  if (call.sinks) call.sinks += offset * call.group_size;
  call.tiers = tiers;
  call.q = q;
  call.out = out;
  call.scale = scale;
  for (long list = 0; list < (long)call.num_seq * call.num_heads; list++) {
    if (const int status = check_list(call, list)) return status;
    if (const int status = check_new(*step, call, list, offset)) return status;
  }
  static thread_local Encoder encoder;
  return attend(
      call, [&](long list) { write_new(*step, call, list, offset, k, v, encoder); },
      [&](long list) {
        if (!step->page && !step->flush_first) flush_list(*step, call, list, offset, encoder);
      });
}

// Adds each tier's scores to the fp32 scores that its pages track.
int kvb_add_scores(uint8_t* pages, long page_bytes, long num_pages, const kvb::Tier* tier, long num_lists, int num_threads) {
  using namespace kvb;
  for (long list = 0; list < num_lists; list++) {
    if (const int status = check_count(*tier, tier->num_k[list])) return status;
    if (const int status = check_pages(*tier, num_pages, list, tier->num_k[list])) return status;
  }
  const long T = tier->slots_per_page, width = tier->num_columns * T;
  return for_all(num_lists, num_threads, [&](long list) {
    for (long begin = 0; begin < tier->num_k[list]; begin += T) {
      float* to = (float*)(pages + tier->ids[list * tier->num_columns + begin / T] * page_bytes + tier->score);
      const float* from = tier->scores + list * width + begin;
      const long n = std::min<long>(T, tier->num_k[list] - begin);
      for (long t = 0; t < n; t++) to[t] += from[t];
    }
    return kDone;
  });
}

// Encodes n vectors x [n, D] into the key or value side of slots; with per-channel keys, aligned runs of a whole group.
int kvb_write(uint8_t* pages, long page_bytes, long num_pages, const kvb::Tier* tier, int key, long n, const int64_t* page,
              const int64_t* slot, const float* x, long D, int num_threads) {
  using namespace kvb;
  const long group = key && tier->k_channel_group ? tier->k_channel_group : 1;
  if (const int status = check_slots(*tier, num_pages, n, group, page, slot)) return status;
  return for_all(n / group, num_threads, [&](long i) {
    static thread_local Encoder encoder;
    const long at = i * group;
    uint8_t* to = pages + page[at] * page_bytes;
    if (group > 1) {
      std::vector<const float*> rows(group);
      for (long t = 0; t < group; t++) rows[t] = x + (at + t) * D;
      write_key_group(*tier, to, slot[at], rows.data(), D, encoder);
    } else if (key) {
      write_key(*tier, to, slot[at], x + at * D, D, encoder);
    } else {
      write_value(*tier, to, slot[at], x + at * D, D, encoder);
    }
    return kDone;
  });
}

// Decodes n slots into keys and values [n, D].
int kvb_read(const uint8_t* pages, long page_bytes, long num_pages, const kvb::Tier* tier, long n, const int64_t* page,
             const int64_t* slot, float* k, float* v, long D, int num_threads) {
  using namespace kvb;
  if (const int status = check_slots(*tier, num_pages, n, 1, page, slot)) return status;
  return for_all(n, num_threads, [&](long i) {
    read_side(*tier, pages + page[i] * page_bytes, slot[i], true, D, k + i * D);
    read_side(*tier, pages + page[i] * page_bytes, slot[i], false, D, v + i * D);
    return kDone;
  });
}

// Copies the bytes of n slots; no source is a target.
int kvb_move(uint8_t* pages, long page_bytes, long num_pages, const kvb::Tier* tier, long n, const int64_t* src_page,
             const int64_t* src_slot, const int64_t* dst_page, const int64_t* dst_slot, long D, int num_threads) {
  using namespace kvb;
  if (const int status = check_slots(*tier, num_pages, n, 1, src_page, src_slot)) return status;
  if (const int status = check_slots(*tier, num_pages, n, 1, dst_page, dst_slot)) return status;
  return for_all(n, num_threads, [&](long i) {
    move_slot(*tier, pages + src_page[i] * page_bytes, src_slot[i], pages + dst_page[i] * page_bytes, dst_slot[i], D);
    return kDone;
  });
}

// The smallest slot of every list.
int kvb_search(const uint8_t* pages, long page_bytes, long num_pages, const kvb::Tier* tier, const kvb::Search* search, long num_lists) {
  using namespace kvb;
  return for_all(num_lists, search->num_threads, [&](long list) {
    int status = check_count(*tier, tier->num_k[list]);
    if (!status) status = check_pages(*tier, num_pages, list, tier->num_k[list]);
    if (!status) search_list(pages, page_bytes, *tier, *search, list);
    return status;
  });
}

// Column sums of a block of prompt queries.
int kvb_column_sums(const kvb::Columns* columns) {
  return kvb::for_all(columns->num_heads, columns->num_threads, [&](long head) {
    kvb::sum_columns(*columns, head);
    return kvb::kDone;
  });
}
}
