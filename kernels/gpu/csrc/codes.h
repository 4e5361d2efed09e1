// From the bytes of a page to fragments of tensor cores (mma.m16n8k16): which bytes a lane reads, which channels and
// tokens they are, and the halves that their codes become. kernels/format.py says how a page lies.
//
// A turn is 32 tokens of a page. With g = lane / 4 and c = lane % 4:
//   keys (transposed in the page): a lane reads tokens 4g .. 4g + 3 of bytes 8j + 2c and 8j + 2c + 1. Row g of tile m
//     is token 4g + 2m, row 8 + g the next one; queries are the columns. Eight neighbouring channels are a block.
//   values: a lane reads tokens 8c .. 8c + 7, which are the columns of those tiles once they are transposed, and of each
//     VALUE_BYTES / 8 bytes. The rows of a tile are 16 channels of one plane: 2g and 2g + 1, or 4g + 2h and the next.
#pragma once

#include "warp.h"

constexpr u32 ONES = 0x3c003c00;   // two halves
constexpr float MAGIC = 1024.0f;   // a code set into the mantissa of this half is that much too large
constexpr int TURN = 32;           // tokens

// Calls f with the numbers below N as types, whose `value` is known when this is compiled.
template <int N> struct Number {
  static constexpr int value = N;
};
template <int N, int I = 0, class Call> DEVICE void for_each(const Call& f) {
  if constexpr (I < N) {
    f(Number<I>());
    for_each<N, I + 1>(f);
  }
}

// A side of a page. S: the page's layout, a struct that gpu/cuda_form.py writes.
template <class S, int D> struct Keys {
  static constexpr int PLANES = 8 / S::K_BITS, BYTES = D / PLANES;
  static constexpr int BLOCKS = D / 8;  // of channels: so many registers hold a lane's part of the queries
  static constexpr bool PER_CHANNEL = S::K_GROUP > 0;
  // A lane's part of a block are two channels, 8 block + 2c and the next one, of one plane.
  static KNOWN int plane(int block) { return block / (BYTES / 8); }
};
template <class S, int D> struct Values {
  static constexpr int PLANES = 8 / S::V_BITS, BYTES = D / PLANES, TILES = D / 16;
  static constexpr int LANE_BYTES = BYTES / 8, WORDS = LANE_BYTES < 4 ? 1 : LANE_BYTES / 4, PAIRS = LANE_BYTES < 4 ? 1 : 2;
  static constexpr int GROUPS = S::V_GROUPS;
  static constexpr bool RUNS = GROUPS == 1 || WORDS == 1;  // a lane's bytes lie together
  static KNOWN int tile(int plane, int word, int pair) { return (plane * WORDS + word) * PAIRS + pair; }
  static KNOWN int plane_of(int tile) { return tile / (WORDS * PAIRS); }
  static KNOWN int word_of(int tile) { return tile / PAIRS % WORDS; }
  static KNOWN int pair_of(int tile) { return tile % PAIRS; }
  // The first of a lane's bytes in word w: WORDS words lie together, or 32 bytes apart.
  static KNOWN int first_byte(int word, int g) { return RUNS ? g * LANE_BYTES + 4 * word : 32 * word + 4 * g; }
  // The lane's channel in row g of a tile; row 8 + g is the next one.
  static KNOWN int channel(int tile, int g) {
    return plane_of(tile) * BYTES + first_byte(word_of(tile), g) + 2 * pair_of(tile);
  }
  static KNOWN int group_of(int tile) { return channel(tile, 0) / (D / GROUPS); }
};

// Codes are taken where they lie: those of plane P are 2^(BITS P) too large.
template <int BITS, int P> KNOWN float code_scale() { return 1.0f / (1 << (BITS * P)); }
// What a code is too large by, once it was divided by that.
template <int BITS, int P> KNOWN float code_offset() { return MAGIC * code_scale<BITS, P>(); }
// Of values the sums of offsets and probabilities would drown what is in the low bits: where an offset exceeds 80, or
// some times the largest code, it is taken off at once. Of keys it goes into what the product begins with.
template <int BITS, int P> KNOWN bool is_exact() { return BITS < 8 && code_offset<BITS, P>() > 80.0f; }

// The codes of plane P in bytes 0 and 2 of x (of 8 bits: in the bytes that `prepared` has moved), as two halves.
template <int BITS, int P> DEVICE u32 codes_of(u32 x) {
  if constexpr (BITS == 8) {
    return x;
  } else {
    constexpr u32 MASK = ((1u << BITS) - 1) << (BITS * P);
    return and_or<(MASK | MASK << 16), 0x64006400>(x);
  }
}
template <int BITS, int P> DEVICE u32 value_codes(u32 x) {
  const u32 h = codes_of<BITS, P>(x);
  if constexpr (is_exact<BITS, P>()) {
    constexpr u32 BY = (15 - BITS * P) << 10, LESS = ((25 - BITS * P) << 10) | 0x8000;
    return fma_halves(h, BY | BY << 16, LESS | LESS << 16);
  }
  return h;
}
// Bytes 0 and 2 of x, or 1 and 3, where `codes_of` takes them.
template <int BITS, int WHICH> DEVICE u32 prepared(u32 x) {
  if constexpr (BITS == 8) return prmt(x, 0x64646464, WHICH ? 0x4341 : 0x4240);
  return WHICH ? x >> 8 : x;
}

// The four tokens of a lane in its two bytes (x and y), a register each.
template <int BITS> DEVICE void split_tokens(u32 (&t)[4], u32 x, u32 y) {
  if constexpr (BITS == 8) {
    const u32 low = prmt(x, y, 0x5410), high = prmt(x, y, 0x7632);
    t[0] = prepared<8, 0>(low), t[1] = prepared<8, 1>(low), t[2] = prepared<8, 0>(high), t[3] = prepared<8, 1>(high);
  } else {
    t[0] = prmt(x, y, 0x0400), t[1] = prmt(x, y, 0x0501), t[2] = prmt(x, y, 0x0602), t[3] = prmt(x, y, 0x0703);
  }
}

// dot += codes x queries for a turn. `codes`: the page's key codes at the turn's first token; q: by blocks, fp16.
template <class S, int D> DEVICE void add_key_codes(float (&dot)[2][4], Local codes, const u32 (&q)[D / 8], int g, int c) {
  using K = Keys<S, D>;
  const Local at = settled(codes + (2 * c * S::SLOTS + 4 * g));
#pragma unroll
  for (int j = 0; j < K::BYTES / 8; j += 2) {
    u32 a[4], b[4];
    split_tokens<S::K_BITS>(a, load_word(at + 8 * j * S::SLOTS), load_word(at + (8 * j + 1) * S::SLOTS));
    split_tokens<S::K_BITS>(b, load_word(at + (8 * j + 8) * S::SLOTS), load_word(at + (8 * j + 9) * S::SLOTS));
    for_each<K::PLANES>([&](auto plane) {
      constexpr int P = decltype(plane)::value, BITS = S::K_BITS;
      const u32 *by = q + P * (K::BYTES / 8) + j;
#pragma unroll
      for (int m = 0; m < 2; ++m)
        mma(dot[m], codes_of<BITS, P>(a[2 * m]), codes_of<BITS, P>(a[2 * m + 1]), codes_of<BITS, P>(b[2 * m]),
            codes_of<BITS, P>(b[2 * m + 1]), by[0], by[1]);
    });
  }
}

// Scales or zeros of eight tokens of a lane, 8c .. 8c + 7, as the columns of tile m: of each half of its rows.
DEVICE void in_columns(u32 (&to)[2], uint4 x, int m) {
  const u32 low = m ? x.y : x.x, high = m ? x.w : x.z;
  to[0] = prmt(low, high, 0x5410), to[1] = prmt(low, high, 0x7632);
}

// Of the values of the lane's tokens 2m, 2m + 1, 2m + 4 and 2m + 5 what it has: raw[k][which][word] of token
// 2m + k + 4 which. `codes`: of the first of the lane's eight tokens, its first byte.
template <class S, int D> DEVICE void load_value_words(u32 (&raw)[2][2][Values<S, D>::WORDS], Local codes, int m) {
  using V = Values<S, D>;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    u32(&to)[V::WORDS] = raw[j % 2][j / 2];
    const Local at = codes + (2 * m + j % 2 + j / 2 * 4) * V::BYTES;
    if constexpr (V::LANE_BYTES == 2) {
      to[0] = load_short(at);
    } else if constexpr (V::RUNS && V::LANE_BYTES == 8) {
      const uint2 x = load_two(at);
      to[0] = x.x, to[1] = x.y;
    } else if constexpr (V::RUNS && V::LANE_BYTES % 16 == 0) {
#pragma unroll
      for (int i = 0; i < V::WORDS; i += 4) {
        const uint4 x = load_four(at + 4 * i);
        to[i] = x.x, to[i + 1] = x.y, to[i + 2] = x.z, to[i + 3] = x.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < V::WORDS; ++i) to[i] = load_word(at + V::first_byte(i, 0));
    }
  }
}

// Bytes 2h and 2h + 1 of two tokens' words, side by side.
DEVICE u32 token_pair(u32 a, u32 b, int h) { return prmt(a, b, h ? 0x7632 : 0x5410); }

// One tile of values times scaled probabilities. b: of the tile's group of channels.
template <class S, int D, int TILE>
DEVICE void add_value_codes(float (&acc)[4], const u32 (&raw)[2][2][Values<S, D>::WORDS], const u32 (&b)[2]) {
  using V = Values<S, D>;
  constexpr int P = V::plane_of(TILE), W = V::word_of(TILE), H = V::pair_of(TILE), BITS = S::V_BITS;
  const u32 x = token_pair(raw[0][0][W], raw[0][1][W], H), y = token_pair(raw[1][0][W], raw[1][1][W], H);
  mma(acc, value_codes<BITS, P>(prepared<BITS, 0>(x)), value_codes<BITS, P>(prepared<BITS, 1>(x)),
      value_codes<BITS, P>(prepared<BITS, 0>(y)), value_codes<BITS, P>(prepared<BITS, 1>(y)), b[0], b[1]);
}

// Whether a group of channels has values whose codes are too large: the sum of its scaled probabilities takes that off.
template <class S, int D, int GROUP, int TILE = 0> KNOWN bool has_offsets() {
  using V = Values<S, D>;
  if constexpr (TILE == V::TILES) return false;
  else if constexpr (V::group_of(TILE) == GROUP && (S::V_CENTRE != 0 || !is_exact<S::V_BITS, V::plane_of(TILE)>())) return true;
  else return has_offsets<S, D, GROUP, TILE + 1>();
}
