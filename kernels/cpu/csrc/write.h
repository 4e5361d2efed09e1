// Encoding, reading and moving the slots of pages. kernels/reference/quant.py and kernels/reference/pages.py say what every byte means; here the same
// operations happen in the same order, so that the bytes are the same (no multiply-add is fused: the build sets -ffp-contract=off).
#pragma once

#include "plan.h"

namespace kvb {

struct Slot {  // where one vector goes or comes from
  int64_t page, slot;
};

// Codes of n channels at `step` apart (1, or a row of a group of tokens is coded elsewhere) with one scale and zero.
static void encode_group(const float* x, long n, int bits, bool symmetric, bool metadata_first, uint8_t* codes, uint16_t* scale16,
                         uint16_t* zero16) {
  float low = x[0], high = x[0];
  bool nan = false;
  long i = 0;
  if (n >= kLanes) {
    Vec lows = load(x), highs = lows;
    for (i = kLanes; i + kLanes <= n; i += kLanes) lows = min_of(lows, load(x + i)), highs = max_of(highs, load(x + i));
    float lanes[kLanes];
    store(lanes, lows);
    for (float lane : lanes) low = lane < low ? lane : low;
    store(lanes, highs);
    for (float lane : lanes) high = lane > high ? lane : high;
  }
  for (; i < n; i++) low = x[i] < low ? x[i] : low, high = x[i] > high ? x[i] : high;
  for (i = 0; i < n; i++) nan |= x[i] != x[i];
  if (nan) low = high = NAN;
  const float half = float(1 << (bits - 1)), top = float((1 << bits) - 1);
  low += 0.0f;  // -0 and 0 are equal: which of them is the smallest or largest may not show, here and in the scale
  const float most = std::fabs(low) > std::fabs(high) ? std::fabs(low) : std::fabs(high);
  const float scale = symmetric ? most / (half - 1) : (high - low + 0.0f) / top, zero = symmetric ? 0.0f : low;
  *scale16 = to_f16(scale);
  *zero16 = to_f16(zero);
  const bool dead = (*scale16 & 0x7fff) == 0;
  if (dead || nan) {
    std::memset(codes, symmetric && !nan ? int(half) : 0, n);
    return;
  }
  const float by = metadata_first ? scalar_f16(*scale16) : 1.0f / scale, from = metadata_first ? scalar_f16(*zero16) : zero;
  const float lowest = symmetric ? -half : 0.0f, highest = symmetric ? half - 1 : top, offset = symmetric ? half : 0.0f;
  for (i = 0; i + kLanes <= n; i += kLanes) {
    Vec c = sub(load(x + i), splat(from));
    c = round_of(metadata_first ? div(c, splat(by)) : mul(c, splat(by)));
    store_u8(codes + i, add(min_of(splat(highest), max_of(splat(lowest), c)), splat(offset)));
  }
  for (; i < n; i++) {
    float c = x[i] - from;
    c = std::nearbyint(metadata_first ? c / by : c * by);
    c = c < lowest ? lowest : c > highest ? highest : c;
    codes[i] = uint8_t(c + offset);
  }
}

static void pack(const uint8_t* codes, int kind, long D, uint8_t* out) {
  const int bits = bits_of(kind), planes = planes_of(kind);
  const long width = D / planes;
  if (planes == 1) {
    std::memcpy(out, codes, D);
    return;
  }
  for (long w = 0; w < width; w++) out[w] = codes[w];
  for (int p = 1; p < planes; p++)
    for (long w = 0; w < width; w++) out[w] |= uint8_t(codes[p * width + w] << (p * bits));
}

// Elements of a side that is not coded.
static void encode_elements(const float* x, long D, int kind, uint8_t* out) {
  if (kind == kF32) {
    std::memcpy(out, x, D * 4);
    return;
  }
  long d = 0;
  if (kind == kF16)
    for (; d + kLanes <= D; d += kLanes) store_f16(out + 2 * d, load(x + d));
  for (; d < D; d++) {
    const uint16_t half = kind == kF16 ? to_f16(x[d]) : kind == kBF16 ? to_bf16(x[d]) : 0;
    if (kind == kFp8) out[d] = to_fp8(x[d]);
    else std::memcpy(out + 2 * d, &half, 2);
  }
}

struct Encoder {
  uint8_t codes[kMaxChannels], bytes[kMaxChannels * 4];
  uint16_t scale[kMaxChannels], zero[kMaxChannels];

  // Codes or elements of one vector into `bytes`, metadata into `scale` and `zero`.
  void encode(const Tier& tier, int kind, int groups, const float* x, long D) {
    if (!coded(kind)) {
      encode_elements(x, D, kind, bytes);
      return;
    }
    const long n = D / groups;
    for (int r = 0; r < groups; r++)
      encode_group(x + r * n, n, bits_of(kind), tier.symmetric, tier.k_channel_group > 0, codes + r * n, scale + r, zero + r);
    pack(codes, kind, D, bytes);
  }
};

static void put_metadata(const Tier& tier, uint8_t* page, int64_t scale_at, int64_t zero_at, int groups, long slot, const Encoder& e) {
  for (int r = 0; r < groups; r++) {
    const long at = 2 * (r * (long)tier.slots_per_page + slot);
    std::memcpy(page + scale_at + at, e.scale + r, 2);
    if (!tier.symmetric) std::memcpy(page + zero_at + at, e.zero + r, 2);
  }
}

static void write_key(const Tier& tier, uint8_t* page, long slot, const float* x, long D, Encoder& e) {
  e.encode(tier, tier.k_kind, tier.k_groups, x, D);
  const long width = D / planes_of(tier.k_kind), unit = unit_bytes_of(tier.k_kind), T = tier.slots_per_page;
  uint8_t* to = page + tier.k_codes + slot * unit;
  if (unit == 1)
    for (long w = 0; w < width; w++) to[w * T] = e.bytes[w];
  else
    for (long w = 0; w < width; w++) std::memcpy(to + w * T * unit, e.bytes + w * unit, unit);
  if (coded(tier.k_kind)) put_metadata(tier, page, tier.k_scale, tier.k_zero, tier.k_groups, slot, e);
}

static void write_value(const Tier& tier, uint8_t* page, long slot, const float* x, long D, Encoder& e) {
  e.encode(tier, tier.v_kind, tier.v_groups, x, D);
  const long row = D / planes_of(tier.v_kind) * unit_bytes_of(tier.v_kind);
  std::memcpy(page + tier.v_codes + slot * row, e.bytes, row);
  if (coded(tier.v_kind)) put_metadata(tier, page, tier.v_scale, tier.v_zero, tier.v_groups, slot, e);
}

// A group of consecutive tokens with one key scale per channel; rows[t] is a token's key.
static void write_key_group(const Tier& tier, uint8_t* page, long slot, const float* const* rows, long D, Encoder& e) {
  const long group = tier.k_channel_group, T = tier.slots_per_page, width = D / planes_of(tier.k_kind);
  std::vector<float> column(group);
  std::vector<uint8_t> codes(group * D), one(group);
  for (long d = 0; d < D; d++) {
    for (long t = 0; t < group; t++) column[t] = rows[t][d];
    encode_group(column.data(), group, bits_of(tier.k_kind), tier.symmetric, true, one.data(), e.scale + d, e.zero + d);
    for (long t = 0; t < group; t++) codes[t * D + d] = one[t];
  }
  for (long t = 0; t < group; t++) {
    pack(codes.data() + t * D, tier.k_kind, D, e.bytes);
    for (long w = 0; w < width; w++) page[tier.k_codes + w * T + slot + t] = e.bytes[w];
  }
  const long at = slot / group * D * 2;
  std::memcpy(page + tier.k_scale + at, e.scale, 2 * D);
  if (!tier.symmetric) std::memcpy(page + tier.k_zero + at, e.zero, 2 * D);
}

// One side of one slot as floats, with the two roundings of the reference (multiply, then add).
static void read_side(const Tier& tier, const uint8_t* page, long slot, bool key, long D, float* out) {
  const int kind = key ? tier.k_kind : tier.v_kind, unit = unit_bytes_of(kind);
  const long T = tier.slots_per_page, width = D / planes_of(kind), half = coded(kind) ? 1 << (bits_of(kind) - 1) : 0;
  uint8_t row[kMaxChannels * 4];
  if (key)
    for (long w = 0; w < width; w++) std::memcpy(row + w * unit, page + tier.k_codes + (w * T + slot) * unit, unit);
  else std::memcpy(row, page + tier.v_codes + slot * width * unit, width * unit);
  for (long d = 0; d < D; d++) out[d] = scalar_element(kind, row, int(width), int(d));
  if (!coded(kind)) return;
  const bool channel = key && tier.k_channel_group;
  const long groups = key ? tier.k_groups : tier.v_groups, channels = D / groups;
  const uint8_t *scales = page + (key ? tier.k_scale : tier.v_scale), *zeros = page + (key ? tier.k_zero : tier.v_zero);
  for (long d = 0; d < D; d++) {
    const long at = 2 * (channel ? slot / tier.k_channel_group * D + d : d / channels * T + slot);
    uint16_t scale, zero = 0;
    std::memcpy(&scale, scales + at, 2);
    if (!tier.symmetric) std::memcpy(&zero, zeros + at, 2);
    out[d] = tier.symmetric ? (out[d] - float(half)) * scalar_f16(scale) : out[d] * scalar_f16(scale) + scalar_f16(zero);
  }
}

// Copies `rows` runs of `unit` bytes that lie `stride` apart.
static void copy_strided(const uint8_t* from, uint8_t* to, long rows, long stride, long unit) {
  for (long r = 0; r < rows; r++) std::memcpy(to + r * stride, from + r * stride, unit);
}

static void move_slot(const Tier& tier, const uint8_t* from, long source, uint8_t* to, long target, long D) {
  const long T = tier.slots_per_page, k_unit = unit_bytes_of(tier.k_kind), v_row = D / planes_of(tier.v_kind) * unit_bytes_of(tier.v_kind);
  copy_strided(from + tier.k_codes + source * k_unit, to + tier.k_codes + target * k_unit, D / planes_of(tier.k_kind), T * k_unit, k_unit);
  std::memcpy(to + tier.v_codes + target * v_row, from + tier.v_codes + source * v_row, v_row);
  struct Meta {
    bool there;
    int64_t at;
    long rows;
  };
  const bool zeros = !tier.symmetric;
  const Meta meta[] = {{coded(tier.k_kind), tier.k_scale, tier.k_groups}, {coded(tier.k_kind) && zeros, tier.k_zero, tier.k_groups},
                       {coded(tier.v_kind), tier.v_scale, tier.v_groups}, {coded(tier.v_kind) && zeros, tier.v_zero, tier.v_groups}};
  for (const Meta& m : meta)
    if (m.there) copy_strided(from + m.at + 2 * source, to + m.at + 2 * target, m.rows, 2 * T, 2);
  for (int64_t at : {tier.score, tier.pos})
    if (at >= 0) std::memcpy(to + at + 4 * target, from + at + 4 * source, 4);
}

}  // namespace kvb
