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

// The lower `bits` of codes shifted right, in `planes` planes.
static void pack_planes(const uint8_t* codes, int shift, int bits, long D, uint8_t* out) {
  const int planes = 8 / bits;
  const long width = D / planes;
  const uint8_t mask = uint8_t((1 << bits) - 1);
  for (long w = 0; w < width; w++) out[w] = codes[w] >> shift & mask;
  for (int p = 1; p < planes; p++)
    for (long w = 0; w < width; w++) out[w] |= uint8_t((codes[p * width + w] >> shift & mask) << (p * bits));
}

static void pack(const uint8_t* codes, int kind, long D, uint8_t* out) {
  const int bits = lower_bits(kind);
  pack_planes(codes, 0, bits, D, out);
  if (bits < bits_of(kind)) pack_planes(codes, bits, 1, D, out + D * bits / 8);
}

// Codes of n channels that are the nearest magnitudes of a table, the sign in their top bit, and the sum of the magnitudes' squares.
static double encode_magnitudes(const float* x, long n, const Code& code, float factor, bool divides, uint8_t* codes) {
  const bool up = code.fit == kLargestUp;  // what lies on a border; otherwise to the even code
  const int sign = bits_of(code.kind) - 1, count = 1 << sign;
  float size[16], border[16];
  for (int i = 0; i < count; i++) size[i] = code.levels[i] - float(code.centre);
  for (int i = 0; i + 1 < count; i++) border[i] = (size[i] + size[i + 1]) / 2;
  double squares = 0;
  for (long i = 0; i < n; i++) {
    const float u = std::fabs(divides ? x[i] / factor : x[i] * factor);
    int index = 0;
    for (int j = 0; j + 1 < count; j++) index += up || j % 2 ? u >= border[j] : u > border[j];
    squares += double(size[index]) * size[index];
    codes[i] = uint8_t(index | (up ? x[i] < 0 : std::signbit(x[i])) << sign);
  }
  return squares;
}

// The byte of the scale that puts a table's largest magnitude at `most`.
static uint16_t byte_scale(const Code& code, float most) {
  const float top = float(double(code.levels[(1 << (bits_of(code.kind) - 1)) - 1] - code.centre) * code.unit);
  if (code.scale == kE4m3Scale) return to_fp8(most / top);
  if (!(most < INFINITY)) return 255;
  const float sixth = std::max(most / top, 1e-10f);
  const int exponent = code.fit == kLargestUp ? int(bits_of_scalar(sixth) + 0x7fffff >> 23) : int(bits_of_scalar(most) >> 23) - 2;
  return uint16_t(std::min(254, std::max(2, exponent)));
}

// The square of what codes of a table lose under a stored scale.
static double lost_by(const float* x, long n, const Code& code, const uint8_t* codes, float by) {
  double lost = 0;
  for (long i = 0; i < n; i++) {
    const float missed = x[i] - (code.levels[codes[i]] - float(code.centre)) * by;
    lost += double(missed) * missed;
  }
  return lost;
}

// Codes of a table under a scale that is stored as a byte.
static void encode_table(const float* x, long n, const Code& code, uint16_t byte, uint8_t* codes) {
  const float by = scale_of(code, (const uint8_t*)&byte);
  if (by > 0 && by < INFINITY) encode_magnitudes(x, n, code, by, true, codes);
  else std::memset(codes, 0, n);
}

// Codes of n channels as llama.cpp and vLLM round them: times the reciprocal of the fp32 scale, halves up.
static void encode_up(const float* x, long n, const Code& code, uint8_t* codes, uint16_t* scale16, uint16_t* zero16) {
  float low = x[0], high = x[0], extreme = x[0];
  bool nan = false;
  for (long i = 0; i < n; i++) {
    low = x[i] < low ? x[i] : low, high = x[i] > high ? x[i] : high;
    extreme = std::fabs(x[i]) > std::fabs(extreme) ? x[i] : extreme, nan |= x[i] != x[i];
  }
  if (nan) low = high = extreme = NAN;
  low += 0.0f, extreme += 0.0f;
  const int top = (1 << bits_of(code.kind)) - 1;
  float scale = code.zero ? (high - low + 0.0f) / float(top) : code.fit == kLargestUp ? std::fabs(extreme) / float(code.centre - 1) : extreme / float(-code.centre);
  if (code.fit == kWholeZero && scale < 1e-6f) scale = 1e-6f;
  float zero = low;
  const bool finite = std::fabs(scale) < INFINITY;
  const float by = scale == 0 ? 0.0f : 1.0f / scale;
  const float point = code.fit == kWholeZero && finite ? std::min(float(top), std::max(0.0f, std::trunc(-low / scale + 0.5f))) : 0.0f;
  if (code.fit == kWholeZero) zero = finite ? (0.0f - point) * scale : scale;
  for (long i = 0; i < n && finite; i++) {
    float level = 0.0f;
    if (code.fit == kSquares)
      for (int j = 0; j < top; j++) level += x[i] * by >= (code.levels[j] + code.levels[j + 1]) / 2 - float(code.centre);
    else if (code.fit == kLargestUp) level = float(code.centre) + std::round(x[i] * by);
    else if (code.fit == kWholeZero) level = std::trunc(x[i] * by + point + 0.5f);
    else if (code.zero) level = std::trunc((x[i] - low) * by + 0.5f);
    else level = std::trunc(x[i] * by + (float(code.centre) + 0.5f));
    codes[i] = uint8_t(std::min(float(top), std::max(0.0f, level)));
  }
  if (!finite) std::memset(codes, 0, n);
  if (code.fit == kSquares && scale == 0) scale = 0.0f;
  else if (code.fit == kSquares && finite) {  // weighted by their squares, in fp64 as norms are
    double dots = 0, squares = 0;
    for (long i = 0; i < n; i++) {
      const double wide = x[i], level = code.levels[codes[i]] - float(code.centre), weight = wide * wide;
      dots += weight * level * wide;
      squares += weight * (level * level);
    }
    scale = float(dots / squares);
  }
  *scale16 = to_f16(scale);
  *zero16 = to_f16(zero);
}

// Codes of n channels with one scale that is made of their largest magnitude, or of their norm; the bytes of the scale in `scale16`.
static void encode_scaled(const float* x, long n, const Code& code, uint8_t* codes, uint16_t* scale16) {
  bool dead;
  if (code.fit == kNorm) {
    double square = 0;  // in fp64, so that its rounding to fp32 does not depend on the order
    for (long i = 0; i < n; i++) square += double(x[i]) * x[i];
    dead = !(square > 0 && square < INFINITY);
    const float factor = float(code.deviation * std::sqrt(double(n) / (dead ? 1.0 : square)));
    const double coded = encode_magnitudes(x, n, code, factor, false, codes);
    *scale16 = to_f16(float(dead ? square : std::sqrt(square / coded)));
  } else {
    float most = 0.0f;
    bool nan = false;
    for (long i = 0; i < n; i++) most = std::fabs(x[i]) > most ? std::fabs(x[i]) : most, nan |= x[i] != x[i];
    if (nan) most = scalar_of_bits(0x7fc00000u);
    if (code.scale == kF16Scale) *scale16 = to_f16(most / 448.0f);
    else *scale16 = byte_scale(code, most);
    dead = false;
    if (code.fit == kEither) {
      uint8_t others[kMaxChannels];
      const uint16_t other = byte_scale(code, most * 1.5f);
      encode_table(x, n, code, *scale16, codes);
      encode_table(x, n, code, other, others);
      const bool less = lost_by(x, n, code, others, scale_of(code, (const uint8_t*)&other)) < lost_by(x, n, code, codes, scale_of(code, (const uint8_t*)scale16));
      if (less) std::memcpy(codes, others, n), *scale16 = other;
      return;
    }
  }
  const float by = scale_of(code, (const uint8_t*)scale16);
  dead |= !(by > 0 && by < INFINITY);
  if (dead) std::memset(codes, 0, n);
  else if (code.kind == kFp8)
    for (long i = 0; i < n; i++) codes[i] = to_fp8(x[i] / by);
  else if (code.fit != kNorm) encode_magnitudes(x, n, code, by, true, codes);
}

// Codes of n numbers that are levels of a table already, once `zero` is taken off and they are divided by `by`.
static void encode_levels(const float* x, long n, const Code& code, float zero, float by, uint8_t* codes) {
  const int last = (1 << bits_of(code.kind)) - 1;
  for (long i = 0; i < n; i++) {
    const float level = (x[i] - zero) / by;
    int found = 0;
    for (int lower = 0; lower < last; lower++) {
      const float border = (code.levels[lower] + code.levels[lower + 1]) / 2;
      found += lower % 2 ? level >= border : level > border;
    }
    codes[i] = uint8_t(found);
  }
}

// The largest ones of n sizes, from the largest on, the first of equal ones first, and before them what is no number.
static void largest_of(const float* size, long n, long count, uint8_t* where, bool* taken) {
  std::fill(taken, taken + n, false);
  for (long i = 0; i < count; i++) {
    long best = -1;
    for (long d = 0; d < n; d++)
      if (!taken[d] && (best < 0 || size[d] > size[best] || (size[d] != size[d] && size[best] == size[best]))) best = d;
    taken[where[i] = uint8_t(best)] = true;
  }
}

// The same with a scale and a zero of their own, which those that are `taken` do not count for.
static void encode_book(const float* x, long n, const Code& code, const bool* taken, uint8_t* codes, uint16_t* scale16, uint16_t* zero16) {
  float low = INFINITY, high = -INFINITY;
  bool nan = false;
  for (long i = 0; i < n; i++)
    if (!taken[i]) low = x[i] < low ? x[i] : low, high = x[i] > high ? x[i] : high, nan |= x[i] != x[i];
  if (nan) low = high = NAN;
  low += 0.0f;
  *scale16 = to_f16((high - low + 0.0f) / 255.0f);
  *zero16 = to_f16(low);
  const float by = scalar_f16(*scale16);
  if (by > 0 && by < INFINITY) encode_levels(x, n, code, scalar_f16(*zero16), by, codes);
  else std::memset(codes, 0, n);
}

// The byte of an e5m2 float, halves to even, saturating.
static uint8_t to_e5m2(float x) {
  if (x != x) return 0x7f;
  const float size = std::min(std::fabs(x), 57344.0f);
  const uint32_t raw = bits_of_scalar(size), sign = bits_of_scalar(x) >> 24 & 0x80;
  if (size < 0x1p-14f) return uint8_t(sign | uint32_t(std::nearbyint(size * 0x1p16f)));  // multiples of 2^-16
  return uint8_t(sign | (((raw + 0xfffff + (raw >> 21 & 1)) >> 21) - ((127 - 15) << 2)));
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
    else if (kind == kE5m2) out[d] = to_e5m2(x[d]);
    else std::memcpy(out + 2 * d, &half, 2);
  }
}

struct Encoder {
  uint8_t codes[kMaxChannels], bytes[kMaxChannels * 4];
  uint16_t scale[kMaxChannels], zero[kMaxChannels];
  uint16_t apart[kMaxChannels];  // what elements `where` have beyond their codes
  uint8_t where[kMaxChannels];
  bool taken[kMaxChannels];

  // Codes or elements of one vector into `bytes`, metadata into `scale` and `zero`.
  void encode(const Code& code, bool metadata_first, const float* x, long D) {
    if (!scaled(code)) {
      if (!is_code(code.kind)) return encode_elements(x, D, code.kind, bytes);
      encode_levels(x, D, code, 0.0f, 1.0f, codes);
      if (code.apart) {
        float missed[kMaxChannels];
        for (long d = 0; d < D; d++) missed[d] = std::fabs(x[d] - code.levels[codes[d]]);
        largest_of(missed, D, code.apart, where, taken);
        for (long i = 0; i < code.apart; i++) apart[i] = to_f16(x[where[i]] - code.levels[codes[where[i]]]);
      }
      return pack(codes, code.kind, D, bytes);
    }
    const long n = D / code.groups;
    if (code.fit == kLevels) {
      std::fill(taken, taken + D, false);
      if (code.apart) {
        float size[kMaxChannels];
        for (long d = 0; d < D; d++) size[d] = std::fabs(x[d]);
        largest_of(size, D, code.apart, where, taken);
      }
    }
    for (int r = 0; r < code.groups; r++)
      if (code.fit == kLevels) encode_book(x + r * n, n, code, taken + r * n, codes + r * n, scale + r, zero + r);
      else if (code.fit >= kLargestUp && code.scale == kF16Scale) encode_up(x + r * n, n, code, codes + r * n, scale + r, zero + r);
      else if (code.fit == kUniform) encode_group(x + r * n, n, bits_of(code.kind), !code.zero, metadata_first, codes + r * n, scale + r, zero + r);
      else encode_scaled(x + r * n, n, code, codes + r * n, scale + r);
    for (long i = 0; i < code.apart; i++) {
      const float coded = code.levels[codes[where[i]]] * scalar_f16(scale[0]);
      apart[i] = to_f16(x[where[i]] - (coded + scalar_f16(zero[0])));
    }
    if (code.kind == kFp8) std::memcpy(bytes, codes, D);
    else pack(codes, code.kind, D, bytes);
  }
};

static void put_apart(const Tier& tier, const Code& code, uint8_t* apart, uint8_t* where, long slot, const Encoder& e) {
  for (long i = 0; i < code.apart; i++) {
    const long at = i * tier.slots_per_page + slot;
    std::memcpy(apart + 2 * at, e.apart + i, 2);
    where[at] = e.where[i];
  }
}

static void put_metadata(const Tier& tier, const Code& code, uint8_t* page, int64_t scale_at, int64_t zero_at, long slot, const Encoder& e) {
  if (!scaled(code)) return;
  const long unit = scale_bytes(code);
  for (int r = 0; r < code.groups; r++) {
    const long at = r * (long)tier.slots_per_page + slot;
    std::memcpy(page + scale_at + unit * at, e.scale + r, unit);
    if (code.zero) std::memcpy(page + zero_at + 2 * at, e.zero + r, 2);
  }
}

static void write_key(const Tier& tier, uint8_t* page, long slot, const float* x, long D, Encoder& e) {
  D = key_channels(tier, D);
  e.encode(tier.k, tier.k_channel_group > 0, x, D);
  const long width = units_of(tier.k.kind, D / planes_of(tier.k.kind)), unit = unit_bytes_of(tier.k.kind), T = tier.slots_per_page;
  uint8_t* to = page + tier.k_codes + slot * unit;
  if (unit == 1)
    for (long w = 0; w < width; w++) to[w * T] = e.bytes[w];
  else
    for (long w = 0; w < width; w++) std::memcpy(to + w * T * unit, e.bytes + w * unit, unit);
  put_metadata(tier, tier.k, page, tier.k_scale, tier.k_zero, slot, e);
  put_apart(tier, tier.k, page + tier.k_apart, page + tier.k_where, slot, e);
}

static void write_value(const Tier& tier, uint8_t* page, long slot, const float* x, long D, Encoder& e) {
  if (tier.v.kind == kKeys) return;
  e.encode(tier.v, tier.k_channel_group > 0, x, D);
  const long row = units_of(tier.v.kind, D / planes_of(tier.v.kind)) * unit_bytes_of(tier.v.kind);
  std::memcpy(page + tier.v_codes + slot * row, e.bytes, row);
  put_metadata(tier, tier.v, page, tier.v_scale, tier.v_zero, slot, e);
  put_apart(tier, tier.v, page + tier.v_apart, page + tier.v_where, slot, e);
}

// A group of consecutive tokens with one key scale per channel; rows[t] is a token's key.
static void write_key_group(const Tier& tier, uint8_t* page, long slot, const float* const* rows, long D, Encoder& e) {
  const long group = tier.k_channel_group, T = tier.slots_per_page, width = units_of(tier.k.kind, D / planes_of(tier.k.kind));
  std::vector<float> column(group);
  std::vector<uint8_t> codes(group * D), one(group);
  for (long d = 0; d < D; d++) {
    for (long t = 0; t < group; t++) column[t] = rows[t][d];
    encode_group(column.data(), group, bits_of(tier.k.kind), !tier.k.zero, true, one.data(), e.scale + d, e.zero + d);
    for (long t = 0; t < group; t++) codes[t * D + d] = one[t];
  }
  for (long t = 0; t < group; t++) {
    pack(codes.data() + t * D, tier.k.kind, D, e.bytes);
    for (long w = 0; w < width; w++) page[tier.k_codes + w * T + slot + t] = e.bytes[w];
  }
  const long at = slot / group * D * 2;
  std::memcpy(page + tier.k_scale + at, e.scale, 2 * D);
  if (tier.k.zero) std::memcpy(page + tier.k_zero + at, e.zero, 2 * D);
}

// One side of one slot as floats, with the two roundings of the reference (multiply, then add).
static void read_side(const Tier& tier, const uint8_t* page, long slot, bool key, long D, float* out) {
  key = key || tier.v.kind == kKeys;
  const Code& code = key ? tier.k : tier.v;
  const int kind = code.kind, unit = unit_bytes_of(kind);
  const long held = key ? key_channels(tier, D) : D, T = tier.slots_per_page, width = held / planes_of(kind), units = units_of(kind, width);
  uint8_t row[kMaxChannels * 4];
  if (key)
    for (long w = 0; w < units; w++) std::memcpy(row + w * unit, page + tier.k_codes + (w * T + slot) * unit, unit);
  else std::memcpy(row, page + tier.v_codes + slot * units * unit, units * unit);
  std::fill(out + held, out + D, 0.0f);
  for (long d = 0; d < held; d++) {
    out[d] = scalar_element(kind, row, int(width), int(d));
    if (in_table(kind)) out[d] = code.levels[int(out[d])];
  }
  const uint8_t *apart = page + (key ? tier.k_apart : tier.v_apart), *where = page + (key ? tier.k_where : tier.v_where);
  auto add_rest = [&] { for_apart(code, apart, where, T, slot, D, [&](long d, float rest) { out[d] += rest; }); };
  if (!scaled(code)) return add_rest();
  const bool channel = key && tier.k_channel_group;
  const long channels = D / code.groups;
  const uint8_t *scales = page + (key ? tier.k_scale : tier.v_scale), *zeros = page + (key ? tier.k_zero : tier.v_zero);
  for (long d = 0; d < D; d++) {
    const long at = channel ? slot / tier.k_channel_group * D + d : d / channels * T + slot;
    const float scale = scale_of(code, scales + scale_bytes(code) * at);
    uint16_t zero = 0;
    if (code.zero) std::memcpy(&zero, zeros + 2 * at, 2);
    out[d] = code.zero ? out[d] * scale + scalar_f16(zero) : (out[d] - float(code.centre)) * scale;
  }
  add_rest();
}

// Copies `rows` runs of `unit` bytes that lie `stride` apart.
static void copy_strided(const uint8_t* from, uint8_t* to, long rows, long stride, long unit) {
  for (long r = 0; r < rows; r++) std::memcpy(to + r * stride, from + r * stride, unit);
}

static void move_slot(const Tier& tier, const uint8_t* from, long source, uint8_t* to, long target, long D) {
  const int k_kind = tier.k.kind, v_kind = tier.v.kind;
  const long T = tier.slots_per_page, k_unit = unit_bytes_of(k_kind), k_units = units_of(k_kind, key_channels(tier, D) / planes_of(k_kind));
  const long v_row = units_of(v_kind, D / planes_of(v_kind)) * unit_bytes_of(v_kind);
  copy_strided(from + tier.k_codes + source * k_unit, to + tier.k_codes + target * k_unit, k_units, T * k_unit, k_unit);
  std::memcpy(to + tier.v_codes + target * v_row, from + tier.v_codes + source * v_row, v_row);
  auto copy_metadata = [&](const Code& code, int64_t scales, int64_t zeros, int64_t apart, int64_t where) {
    copy_strided(from + apart + 2 * source, to + apart + 2 * target, code.apart, 2 * T, 2);
    copy_strided(from + where + source, to + where + target, code.apart, T, 1);
    const long unit = scale_bytes(code);
    if (scaled(code)) copy_strided(from + scales + unit * source, to + scales + unit * target, code.groups, unit * T, unit);
    if (code.zero) copy_strided(from + zeros + 2 * source, to + zeros + 2 * target, code.groups, 2 * T, 2);
  };
  copy_metadata(tier.k, tier.k_scale, tier.k_zero, tier.k_apart, tier.k_where);
  copy_metadata(tier.v, tier.v_scale, tier.v_zero, tier.v_apart, tier.v_where);
  for (int64_t at : {tier.score, tier.pos})
    if (at >= 0) std::memcpy(to + at + 4 * target, from + at + 4 * source, 4);
}

}  // namespace kvb
