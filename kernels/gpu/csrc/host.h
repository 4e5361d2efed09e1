// warp.h for a CPU: every thread of a block is a fiber, and a warp's lanes meet at what they do together, so that the
// kernel's own source can be run and compared where there is no GPU. Blocks run one after the other.
//
// A copy into shared memory is made when a thread waits for its barrier, and not before: who does not wait reads stale
// bytes, as on a GPU. Memory that a block shares begins as NaN.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define DEVICE static inline
#define KERNEL(threads, registers) static void
#define PARAMETER const
#define KNOWN constexpr

struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
using std::max;
using std::min;

namespace host {

struct Fiber {
  ucontext_t begin;
  jmp_buf at;
  std::vector<char> stack;
  bool started = false, ended = false;
};
struct Warp {
  int arrived = 0;
  u64 generation = 0;
  u32 in[32][10], out[32][4];
};
struct Copy {
  u64* barrier;
  u8* to;
  const u8* from;
  int bytes;
};
struct Block {
  int index, count, threads, running = 0;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::vector<u8> memory;
  int arrived[16] = {};
  u64 generation[16] = {};
  std::vector<Copy> copies;
  std::function<void()> body;
  jmp_buf scheduler;
};
inline Block* block = nullptr;

inline void yield() {
  Fiber& mine = block->fibers[block->running];
  if (!_setjmp(mine.at)) _longjmp(block->scheduler, 1);
}
inline void enter() {
  block->body();
  block->fibers[block->running].ended = true;
  _longjmp(block->scheduler, 1);
}

// Runs a kernel block by block; no two blocks at once, and none waits for another one.
inline void run(int blocks, int threads, size_t bytes, const std::function<void()>& body) {
  for (int index = 0; index < blocks; ++index) {
    auto made = std::make_unique<Block>();
    block = made.get();
    block->index = index, block->count = blocks, block->threads = threads, block->body = body;
    block->memory.assign(bytes + 128, 0xff);
    block->warps.resize(threads / 32);
    block->fibers.resize(threads);
    volatile int left = threads;
    while (left) {
      for (volatile int i = 0; i < threads; i = i + 1) {
        Fiber& fiber = block->fibers[i];
        if (fiber.ended) continue;
        block->running = i;
        if (!_setjmp(block->scheduler)) {
          if (fiber.started) _longjmp(fiber.at, 1);
          fiber.started = true;
          fiber.stack.resize(96 << 10);
          getcontext(&fiber.begin);
          fiber.begin.uc_stack.ss_sp = fiber.stack.data();
          fiber.begin.uc_stack.ss_size = fiber.stack.size();
          fiber.begin.uc_link = nullptr;
          makecontext(&fiber.begin, enter, 0);
          setcontext(&fiber.begin);
        }
        if (block->fibers[i].ended) left = left - 1;
      }
    }
    block = nullptr;
  }
}

inline Warp& warp() { return block->warps[block->running / 32]; }
inline int lane() { return block->running % 32; }

// All lanes of a warp bring `in`; the last one to come makes everybody's `out`.
template <class Make> void together(const Make& make) {
  Warp& w = warp();
  const u64 mine = w.generation;
  if (++w.arrived == 32) {
    make(w);
    w.arrived = 0;
    ++w.generation;
  } else {
    while (w.generation == mine) yield();
  }
}

inline float half_value(u16 h) {
  static const std::vector<float> table = [] {
    std::vector<float> made(65536);
    for (int i = 0; i < 65536; ++i) {
      const int e = i >> 10 & 31, m = i & 1023;
      const float size = e == 0 ? std::ldexp((float)m, -24) : e == 31 ? (m ? NAN : INFINITY) : std::ldexp((float)(m + 1024), e - 25);
      made[i] = i >> 15 ? -size : size;
    }
    return made;
  }();
  return table[h];
}
inline u16 half_of(double x) {  // to the nearest, halves to even; `double` so that a sum of products is rounded once
  const u16 sign = std::signbit(x) ? 0x8000 : 0;
  const double size = std::fabs(x);
  if (std::isnan(x)) return 0x7fff;
  if (size >= 65520.0) return sign | 0x7c00;
  if (size == 0) return sign;
  int e;
  std::frexp(size, &e);
  const int unit = std::max(e - 11, -24);  // of the last place
  const int steps = (int)std::nearbyint(std::ldexp(size, -unit));
  return sign | (u16)(unit == -24 ? steps : ((unit + 24) << 10) + steps);
}
inline u32 bits(float x) {
  u32 r;
  std::memcpy(&r, &x, 4);
  return r;
}
inline float value(u32 x) {
  float r;
  std::memcpy(&r, &x, 4);
  return r;
}
inline float bfloat_value(u16 x) { return value((u32)x << 16); }
inline u16 bfloat_of(float x) {
  const u32 raw = bits(x);
  return std::isnan(x) ? 0x7fff : (raw + 0x7fff + (raw >> 16 & 1)) >> 16;
}

template <float (*VALUE)(u16)> void multiply(Warp& w) {
  float a[16][16], b[16][8];
  for (int l = 0; l < 32; ++l)
    for (int half = 0; half < 2; ++half) {
      const int g = l / 4, k = 2 * (l % 4) + half;
      auto at = [&](int i) { return VALUE((u16)(w.in[l][i] >> (16 * half))); };
      a[g][k] = at(0), a[g + 8][k] = at(1), a[g][k + 8] = at(2), a[g + 8][k + 8] = at(3), b[k][g] = at(4), b[k + 8][g] = at(5);
    }
  for (int l = 0; l < 32; ++l)
    for (int i = 0; i < 4; ++i) {
      const int row = l / 4 + i / 2 * 8, column = 2 * (l % 4) + i % 2;
      float sum = value(w.in[l][6 + i]);
      for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k][column];
      w.out[l][i] = bits(sum);
    }
}

inline void mma(float (&c)[4], const u32 (&ab)[6], void (*make)(Warp&)) {
  Warp& w = warp();
  const int l = lane();
  for (int i = 0; i < 6; ++i) w.in[l][i] = ab[i];
  for (int i = 0; i < 4; ++i) w.in[l][6 + i] = bits(c[i]);
  together(make);
  for (int i = 0; i < 4; ++i) c[i] = value(w.out[l][i]);
}

// A barrier in shared memory: arrivals that a phase needs, those that are left, and the phases so far.
struct Barrier {
  u16 needed, left;
  u32 phase;
};
inline void arrive(u64* at) {
  Barrier& b = *(Barrier*)at;
  if (--b.left == 0) b.left = b.needed, ++b.phase;
}
}  // namespace host

DEVICE int thread_index() { return host::block->running; }
DEVICE int block_index() { return host::block->index; }
DEVICE int num_blocks() { return host::block->count; }
DEVICE u8* shared_memory() { return (u8*)(((size_t)host::block->memory.data() + 127) / 128 * 128); }

DEVICE u32 prmt(u32 a, u32 b, u32 selector) {
  const u64 all = (u64)b << 32 | a;
  u32 r = 0;
  for (int i = 0; i < 4; ++i) r |= (u32)(all >> (8 * (selector >> (4 * i) & 7)) & 255) << (8 * i);
  return r;
}
template <u32 MASK, u32 OTHER> u32 and_or(u32 x) { return (x & MASK) | OTHER; }
template <class Each> u32 each_half(const Each& each) {
  return host::half_of(each(0)) | (u32)host::half_of(each(16)) << 16;
}
DEVICE u32 fma_halves(u32 a, u32 b, u32 c) {
  return each_half([&](int s) {
    return (double)host::half_value(a >> s) * host::half_value(b >> s) + host::half_value(c >> s);
  });
}
DEVICE u32 mul_halves(u32 a, u32 b) {
  return each_half([&](int s) { return (double)host::half_value(a >> s) * host::half_value(b >> s); });
}
DEVICE u32 pack_halves(float low, float high) { return each_half([&](int s) { return s ? high : low; }); }
DEVICE u32 pack_bfloats(float low, float high) { return host::bfloat_of(low) | (u32)host::bfloat_of(high) << 16; }
DEVICE float2 unpack_halves(u32 x) { return {host::half_value(x), host::half_value(x >> 16)}; }
DEVICE float exp2_of(float x) { return exp2f(x); }
DEVICE float log2_of(float x) { return log2f(x); }
DEVICE u32 bits_of(float x) { return host::bits(x); }
DEVICE float float_of(u32 x) { return host::value(x); }

template <class Give> u32 exchange(u32 x, const Give& give) {
  host::Warp& w = host::warp();
  const int l = host::lane();
  w.in[l][0] = x;
  host::together([&](host::Warp& all) {
    for (int i = 0; i < 32; ++i) all.out[i][0] = give(all, i);
  });
  return w.out[l][0];
}
// Each lane says which other one it reads from: kept beside its number, since lanes may differ.
DEVICE u32 exchange_from(u32 x, int from) {
  host::warp().in[host::lane()][1] = from;
  return exchange(x, [](host::Warp& w, int i) { return w.in[w.in[i][1] & 31][0]; });
}
DEVICE int shuffle(int x, int lane) { return exchange_from(x, lane); }
DEVICE float shuffle(float x, int lane) { return float_of(exchange_from(bits_of(x), lane)); }
DEVICE int shuffle_up(int x, int by) { return exchange_from(x, std::max(0, host::lane() - by)); }
DEVICE float shuffle_xor(float x, int mask) { return float_of(exchange_from(bits_of(x), host::lane() ^ mask)); }
DEVICE u32 vote(bool x) {
  return exchange(x, [](host::Warp& w, int) {
    u32 r = 0;
    for (int i = 0; i < 32; ++i) r |= (w.in[i][0] & 1) << i;
    return r;
  });
}
DEVICE void sync_warp() { host::together([](host::Warp&) {}); }
DEVICE u32 transpose(u32 x) {
  return exchange(x, [](host::Warp& w, int i) {
    auto element = [&](int row, int column) { return w.in[4 * row + column / 2][0] >> (16 * (column % 2)) & 0xffff; };
    const int row = i / 4, column = 2 * (i % 4);
    return element(column, row) | element(column + 1, row) << 16;
  });
}
DEVICE void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  host::mma(c, {a0, a1, a2, a3, b0, b1}, host::multiply<host::half_value>);
}
DEVICE void mma_bfloats(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  host::mma(c, {a0, a1, a2, a3, b0, b1}, host::multiply<host::bfloat_value>);
}
struct Local {
  const u8* at;
};
DEVICE Local local(const void* p) { return {(const u8*)p}; }
DEVICE Local operator+(Local a, int by) { return {a.at + by}; }
DEVICE Local settled(Local a) { return a; }
template <class T> T load_as(Local a) {
  T r;
  std::memcpy(&r, a.at, sizeof r);
  return r;
}
DEVICE u32 load_short(Local a) { return load_as<u16>(a); }
DEVICE u32 load_word(Local a) { return load_as<u32>(a); }
DEVICE uint2 load_two(Local a) { return load_as<uint2>(a); }
DEVICE uint4 load_four(Local a) { return load_as<uint4>(a); }
DEVICE void load_matrices(u32 (&r)[4], Local row) {
  host::Warp& w = host::warp();
  const int l = host::lane();
  std::memcpy(w.in[l], &row.at, sizeof row.at);
  host::together([](host::Warp& all) {
    for (int i = 0; i < 32; ++i)
      for (int m = 0; m < 4; ++m) {
        const u8* from;
        std::memcpy(&from, all.in[8 * m + i / 4], sizeof from);
        std::memcpy(&all.out[i][m], from + 4 * (i % 4), 4);
      }
  });
  for (int m = 0; m < 4; ++m) r[m] = w.out[l][m];
}

DEVICE void sync_some(int id, int threads) {
  host::Block& b = *host::block;
  const u64 mine = b.generation[id];
  if (++b.arrived[id] == threads) {
    b.arrived[id] = 0;
    ++b.generation[id];
  } else {
    while (b.generation[id] == mine) host::yield();
  }
}
DEVICE void sync_block() { sync_some(0, host::block->threads); }
DEVICE void init_barrier(u64* barrier, int arrivals) { *(host::Barrier*)barrier = {(u16)arrivals, (u16)arrivals, 0}; }
DEVICE void arrive(u64* barrier) { host::arrive(barrier); }
DEVICE void wait(u64* barrier, u32 parity) {
  host::Barrier& b = *(host::Barrier*)barrier;
  for (;; host::yield()) {
    auto& copies = host::block->copies;
    for (size_t i = 0; i < copies.size(); ++i)
      if (copies[i].barrier == barrier) {
        std::memcpy(copies[i].to, copies[i].from, copies[i].bytes);
        copies.erase(copies.begin() + i--);
        host::arrive(barrier);
      }
    if ((b.phase & 1) != parity) return;
  }
}
DEVICE void publish_barriers() {}
constexpr int COPY_ARRIVALS = 1;
template <int BYTES> void copy_to_shared(u8* to, const u8* from, u64* barrier, int lane) {
  sync_warp();
  if (lane == 0) host::block->copies.push_back({barrier, to, from, BYTES});
}

DEVICE void fence() {}
DEVICE int add_atomically(int* at, int x) { return (*at += x) - x; }
DEVICE float load_fresh(const float* at) { return *at; }
DEVICE float4 load_fresh(const float4* at) { return *at; }
DEVICE void store_four(float* at, float4 x) { *(float4*)at = x; }
