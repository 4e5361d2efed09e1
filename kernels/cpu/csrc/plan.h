// What the Python side hands over (kernels/cpu/backend.py mirrors these structs), and how a call is cut into pieces of work.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "unpack.h"

namespace kvb {

constexpr float kLowest = -1e30f;
constexpr long kChunkSlots = 2048;  // less, and the work that each chunk begins with shows; more, and few lists leave threads idle

enum Scale { kNoScale, kF16Scale, kE4m3Scale, kE8m0Scale };
enum Fit { kUniform, kLargest, kNorm, kLevels, kLargestUp, kRangeUp, kWholeZero, kExtreme, kSquares, kEither };

// How the numbers of one side are written: kernels/codes.py.
struct Code {
  int32_t kind, groups, scale, fit, zero, centre, apart, unused;  // apart: elements of a vector whose rest is kept apart
  double unit, deviation;
  float levels[16];   // of every code, where they lie in a table
  uint8_t table[16];  // the same
};

struct Tier {
  int32_t slots_per_page, num_columns, k_channel_group, k_channels;  // channels stored of a key, the first ones; 0 = all
  Code k, v;
  int64_t k_codes, v_codes, k_scale, k_zero, v_scale, v_zero, k_apart, k_where, v_apart, v_where, score, pos;  // byte offsets in a page, -1 where not tracked
  const int64_t *ids, *num_k, *num_v;                                      // [list, columns], [list], [list]
  float* scores;                                                           // [list, columns * slots], or null
  const float *cos, *sin;                                                  // [S, columns, rotated / 2, slots], or null; behind the next, [rotated / 2, slots]
  const float *first_cos, *first_sin;                                      // [S, columns, rotated / 2] of pages' first slots, or null
  const float *channel_scale, *channel_zero;                               // [head, D] of keys, or null where pages have their own
};

struct Ring {
  uint8_t *k, *v;
  const int64_t *num_tokens, *rows;                                        // [list]; [S] rows of the buffers, or null: 0, 1, ..
  int64_t k_row_stride, k_head_stride, v_row_stride, v_head_stride;         // bytes
  int32_t k_length, v_length, kind, num_rows;                               // rows there are in the buffers
};

struct Call {
  const float* q;  // [S, H * G, D]
  uint8_t* pages;
  const Tier* tiers;
  Ring* ring;  // or null
  float *out, *lse;
  const int64_t* seen;  // [S] position of the query, for skip_near
  const float* sinks;   // [H * G] a logit of each query head that belongs to no key (of a step [L, H * G]), or null
  int64_t page_bytes, num_pages, seq_stride;  // `list` in the tables of tiers and rings is sequence * seq_stride + head
  int32_t num_seq, num_heads, group_size, head_dim, num_tiers, power, reduce, num_threads, rotated, update, skip_near;
  float scale, cap;  // a logit x becomes cap * tanh(x / cap); 0: it stays
};

enum Reduce { kNone, kSum, kMean, kMax };
// What a call returns, and then what is wrong with its numbers (kernels/cpu/abi.py has the sentences).
enum Status { kDone, kNoMemory, kNoPage, kNoSlot, kNoCount, kNoRow, kNoLayer };

enum Update { kReturn, kAdd, kReplace };  // what becomes of scores: handed back, added to those in the pages, or put in their place

struct TierPlan {
  long slots, chunk_slots, num_chunks, first_chunk;  // of the longest list
  int k_kind, v_kind;    // as the loops read elements: some are unpacked first
  float k_unit, v_unit;  // unpacked_unit
  long k_width, v_width, v_padded, score_begin;
  bool v_direct;  // is_direct
};

struct Buffer {  // written before it is read, so it need not be cleared
  std::unique_ptr<float[]> data;
  long size = 0;
  void reserve(long wanted) {
    if (wanted <= size) return;
    data.reset(new float[wanted]);
    size = wanted;
  }
  float* get() const { return data.get(); }
};

struct Plan {
  std::vector<TierPlan> tiers;
  long num_lists, chunks_per_list, G, D, score_slots;
  std::vector<float> max, sum;  // [list][chunk][G]
  Buffer acc, probability;      // [list][chunk][G][D]; [list][G][score_slots]
};

static long key_channels(const Tier& tier, long D) { return tier.k_channels ? tier.k_channels : D; }

// Calls f(element, rest) for what the elements of a slot of T have beyond their codes.
template <class F> static void for_apart(const Code& code, const uint8_t* apart, const uint8_t* where, long T, long slot, long D, F f) {
  for (long i = 0; i < code.apart; i++) {
    uint16_t half;
    std::memcpy(&half, apart + 2 * (i * T + slot), 2);
    if (where[i * T + slot] < D) f(long(where[i * T + slot]), scalar_f16(half));
  }
}

static bool scaled(const Code& code) { return code.scale != kNoScale; }
static long scale_bytes(const Code& code) { return code.scale == kF16Scale ? 2 : 1; }

// What 8-bit scales stand for.
struct Powers {
  float value[256];
  Powers() {
    for (int byte = 0; byte < 256; byte++) value[byte] = byte == 255 ? scalar_of_bits(0x7fc00000u) : std::ldexp(1.0f, byte - 127);
  }
};
static const Powers kE8m0Values;

static float scale_of(const Code& code, const uint8_t* p) {
  uint16_t half;
  if (code.scale != kF16Scale) return (code.scale == kE4m3Scale ? kFp8Values.value[*p] : kE8m0Values.value[*p]) * float(code.unit);
  std::memcpy(&half, p, 2);
  return scalar_f16(half);
}

// n scales that lie side by side.
static void widen_scales(const Code& code, const uint8_t* p, long n, float* out) {
  if (code.scale == kF16Scale) return widen<kF16>(p, n, out);
  const float unit = float(code.unit);
  long i = 0;
  if (code.scale == kE4m3Scale)
    for (; i + kLanes <= n; i += kLanes) store(out + i, mul(splat(unit), load_fp8(p + i)));
#if defined(KVB_UNPACK)
  else
    for (; i + kLanes <= n; i += kLanes) store(out + i, mul(splat(unit), load_e8m0(p + i)));
#endif
  for (; i < n; i++) out[i] = scale_of(code, p + i);
}

static long row_of(const Call& call, long list) { return list / call.num_heads * call.seq_stride + list % call.num_heads; }

static long list_slots(const Call& call, const Tier& tier, long row) {
  return call.ring ? call.ring->num_tokens[row] : tier.num_k[row];
}

// Whether no register of values spans two groups of channels, where a plane has `width` of them.
static bool is_direct(const Tier& tier, long D, long width) {
  const long channels = D / (scaled(tier.v) ? tier.v.groups : 1);
  bool direct = true;
  for (long plane = 0; plane < D; plane += width)
    for (long w = 0; w < width; w += kLanes) direct &= (plane + w) / channels == (plane + std::min(w + kLanes, width) - 1) / channels;
  return direct;
}

// Whether codes of 5 bits are multiplied as they lie (digits.h): whole registers and quads, of which none spans two groups of channels.
static bool keys_of_5_bits(const Tier& tier, long D) {
  return KVB_DIGITS && tier.k.kind == kCode5 && !tier.k_channel_group && D % 32 == 0 && D / tier.k.groups % 4 == 0;
}
static bool values_of_5_bits(const Tier& tier, long D) { return KVB_DIGITS && tier.v.kind == kCode5 && D % 32 == 0 && is_direct(tier, D, D / 2); }

// A plan is kept from call to call: its memory is not asked for again.
static void make_plan(const Call& call, Plan& plan) {
  plan.tiers.clear();
  plan.num_lists = (long)call.num_seq * call.num_heads;
  plan.G = call.group_size;
  plan.D = call.head_dim;
  plan.chunks_per_list = plan.score_slots = 0;
  for (int i = 0; i < call.num_tiers; i++) {
    const Tier& tier = call.tiers[i];
    TierPlan p;
    p.slots = tier.slots_per_page;
    p.chunk_slots = p.slots * std::max<long>(1, kChunkSlots / p.slots);
    long longest = 0;
    for (long list = 0; list < plan.num_lists; list++) longest = std::max(longest, list_slots(call, tier, row_of(call, list)));
    p.num_chunks = (longest + p.chunk_slots - 1) / p.chunk_slots;
    p.first_chunk = plan.chunks_per_list;
    plan.chunks_per_list += p.num_chunks;
    p.score_begin = plan.score_slots;
    plan.score_slots += p.num_chunks * p.chunk_slots;
    p.k_kind = keys_of_5_bits(tier, plan.D) ? kCode5 : unpacked_keys(tier.k.kind, p.slots, plan.D);
    p.k_unit = unpacked_unit(tier.k.kind, p.k_kind);
    p.k_width = key_channels(tier, plan.D) / planes_of(p.k_kind);
    p.v_kind = values_of_5_bits(tier, plan.D) ? kCode5 : unpacked_values(tier.v.kind, plan.D);
    if (tier.v.kind < kNumKinds && !is_direct(tier, plan.D, plan.D / planes_of(p.v_kind))) p.v_kind = tier.v.kind;
    p.v_unit = unpacked_unit(tier.v.kind, p.v_kind);
    p.v_width = plan.D / planes_of(p.v_kind);
    p.v_padded = (p.v_width + kLanes - 1) / kLanes * kLanes;
    p.v_direct = is_direct(tier, plan.D, p.v_width);
    plan.tiers.push_back(p);
  }
  const long parts = plan.num_lists * plan.chunks_per_list * plan.G;
  plan.max.assign(parts, kLowest);
  plan.sum.assign(parts, 0.0f);
  plan.acc.reserve(parts * plan.D);
  if (call.reduce != kNone) plan.probability.reserve(plan.num_lists * plan.G * plan.score_slots);
}

}  // namespace kvb
