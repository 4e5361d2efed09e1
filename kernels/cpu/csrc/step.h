// One layer of a decode step: write the new token where the step's plan says (or append it to the residual buffer), attend, update the
// tracked scores, and quantise what leaves the buffer. Everything that does not change from layer to layer is prepared once per step.
#pragma once

#include "attend.h"
#include "limits.h"
#include "write.h"

namespace kvb {

// Lists of a step are counted [S][L][H]; `list` of the tables below too.
struct Step {
  Call call;                                   // pointers of layer 0; q and out are given layer by layer
  const int64_t *page, *slot;                  // where each list's new token goes, or null behind a residual buffer
  const int64_t *old_k, *old_v, *new_k, *new_v;  // behind a residual buffer: tokens in pages before and after this step
  int32_t num_layers, tier, flush_first;
};

static void put_in_ring(const Ring& ring, uint8_t* base, long length, long token, const float* x, long D) {
  encode_elements(x, D, ring.kind, base + token % length * D * unit_bytes_of(ring.kind));
}

// Whether the tokens [from, to) of one list may leave the buffer, with the new one in it, for the pages of tier 0.
static int check_flush(const Call& call, long length, long group, long row, int64_t from, int64_t to) {
  const Tier& tier = call.tiers[0];
  const int64_t total = call.ring->num_tokens[row];
  if (check_count(tier, to) || from < 0 || from > to || to > total || total - from > length || from % group || to % group) return kNoCount;
  for (int64_t token = from; token < to; token++)
    if (!in_range(tier.ids[row * tier.num_columns + token / tier.slots_per_page], call.num_pages)) return kNoPage;
  return kDone;
}

// Where the new token of one list goes, and which ones leave the buffer for it.
static int check_new(const Step& step, const Call& call, long list, long offset) {
  const long row = row_of(call, list), at = row + offset;
  if (step.page) return check_slots(call.tiers[step.tier], call.num_pages, 1, 1, step.page + at, step.slot + at);
  if (call.ring->num_tokens[row] < 1) return kNoCount;
  const long group = std::max(1, call.tiers[0].k_channel_group);
  const int status = check_flush(call, call.ring->k_length, group, row, step.old_k[at], step.new_k[at]);
  return status ? status : check_flush(call, call.ring->v_length, 1, row, step.old_v[at], step.new_v[at]);
}

// Tokens [from, to) of one list leave the buffer for the pages of tier 0.
static void flush_side(const Call& call, const Tier& tier, const uint8_t* base, long length, bool key, long row, long from, long to,
                       Encoder& e) {
  if (from >= to) return;
  const long D = call.head_dim, T = tier.slots_per_page, unit = unit_bytes_of(call.ring->kind);
  const long group = key && tier.k_channel_group ? tier.k_channel_group : 1;
  std::vector<float> dense(group * D);
  std::vector<const float*> rows(group);
  for (long token = from; token + group <= to; token += group) {
    uint8_t* page = call.pages + tier.ids[row * tier.num_columns + token / T] * call.page_bytes;
    for (long i = 0; i < group; i++) {
      widen_any(call.ring->kind, base + (token + i) % length * D * unit, D, &dense[i * D]);
      rows[i] = &dense[i * D];
    }
    if (!key) write_value(tier, page, token % T, dense.data(), D, e);
    else if (group > 1) write_key_group(tier, page, token % T, rows.data(), D, e);
    else write_key(tier, page, token % T, dense.data(), D, e);
  }
}

static void flush_list(const Step& step, const Call& call, long list, long offset, Encoder& e) {
  const Ring& ring = *call.ring;
  const long seq = ring.rows ? ring.rows[list / call.num_heads] : list / call.num_heads, head = list % call.num_heads;
  const long row = row_of(call, list), at = row + offset;
  flush_side(call, call.tiers[0], ring.k + seq * ring.k_row_stride + head * ring.k_head_stride, ring.k_length, true, row, step.old_k[at],
             step.new_k[at], e);
  flush_side(call, call.tiers[0], ring.v + seq * ring.v_row_stride + head * ring.v_head_stride, ring.v_length, false, row, step.old_v[at],
             step.new_v[at], e);
}

// Puts the new token of one list where it belongs, before attention.
static void write_new(const Step& step, const Call& call, long list, long offset, const float* k, const float* v, Encoder& e) {
  const long D = call.head_dim, row = row_of(call, list), at = row + offset;
  k += list * D;
  v += list * D;
  if (step.page) {
    const Tier& tier = call.tiers[step.tier];
    uint8_t* page = call.pages + step.page[at] * call.page_bytes;
    write_key(tier, page, step.slot[at], k, D, e);
    write_value(tier, page, step.slot[at], v, D, e);
    return;
  }
  const Ring& ring = *call.ring;
  const long seq = ring.rows ? ring.rows[list / call.num_heads] : list / call.num_heads, head = list % call.num_heads;
  const long newest = ring.num_tokens[row] - 1;
  put_in_ring(ring, ring.k + seq * ring.k_row_stride + head * ring.k_head_stride, ring.k_length, newest, k, D);
  put_in_ring(ring, ring.v + seq * ring.v_row_stride + head * ring.v_head_stride, ring.v_length, newest, v, D);
  if (step.flush_first) flush_list(step, call, list, offset, e);
}

}  // namespace kvb
