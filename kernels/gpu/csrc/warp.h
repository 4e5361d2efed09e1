// What one thread, a warp and a block can do, as functions of their own: here for NVIDIA's GPUs, in host.h for a CPU,
// so that the kernel's source is the same on both. No header of the toolkit is included: NVRTC needs none.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

#ifdef KVB_HOST
#include "host.h"
#else

#define DEVICE __device__ __forceinline__
#define KERNEL(threads, registers) extern "C" __global__ void __maxnreg__(registers)
#define PARAMETER const __grid_constant__
#define KNOWN __host__ __device__ constexpr  // when this is compiled

DEVICE int thread_index() { return threadIdx.x; }
DEVICE int block_index() { return blockIdx.x; }
DEVICE int num_blocks() { return gridDim.x; }
DEVICE u8* shared_memory() {
  extern __shared__ __align__(128) u8 raw[];
  return raw;
}

// ---- numbers of one thread
DEVICE u32 prmt(u32 a, u32 b, u32 selector) {
  u32 r;
  asm("prmt.b32 %0,%1,%2,%3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
  return r;
}
// (x & mask) | other in one instruction.
template <u32 MASK, u32 OTHER> DEVICE u32 and_or(u32 x) {
  u32 r;
  asm("lop3.b32 %0,%1,%2,%3,0xea;" : "=r"(r) : "r"(x), "n"(MASK), "r"(OTHER));
  return r;
}
DEVICE u32 fma_halves(u32 a, u32 b, u32 c) {
  u32 r;
  asm("fma.rn.f16x2 %0,%1,%2,%3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
DEVICE u32 mul_halves(u32 a, u32 b) {
  u32 r;
  asm("mul.rn.f16x2 %0,%1,%2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
DEVICE u32 pack_halves(float low, float high) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0,%1,%2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
DEVICE u32 pack_bfloats(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
DEVICE float2 unpack_halves(u32 x) {
  float2 r;
  asm("{.reg .b16 a,b; mov.b32 {a,b},%2; cvt.f32.f16 %0,a; cvt.f32.f16 %1,b;}" : "=f"(r.x), "=f"(r.y) : "r"(x));
  return r;
}
DEVICE float exp2_of(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(r) : "f"(x));
  return r;
}
DEVICE float log2_of(float x) { return __log2f(x); }
DEVICE u32 bits_of(float x) { return __float_as_uint(x); }
DEVICE float float_of(u32 x) { return __uint_as_float(x); }

// ---- a warp: all of its lanes call these together
DEVICE int shuffle(int x, int lane) { return __shfl_sync(~0u, x, lane); }
DEVICE float shuffle(float x, int lane) { return __shfl_sync(~0u, x, lane); }
DEVICE int shuffle_up(int x, int by) { return __shfl_up_sync(~0u, x, by); }
DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(~0u, x, mask); }
DEVICE u32 vote(bool x) { return __ballot_sync(~0u, x); }
DEVICE void sync_warp() { __syncwarp(); }
// 8 x 8 halves, of which a lane has two neighbours of row lane / 4, transposed.
DEVICE u32 transpose(u32 x) {
  u32 r;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0,%1;" : "=r"(r) : "r"(x));
  return r;
}
// c += a b of 16 x 16 and 16 x 8 halves.
DEVICE void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEVICE void mma_bfloats(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEVICE u32 in_shared(const void* p) { return (u32)__cvta_generic_to_shared(p); }
// An address in shared memory. What is a fixed way from a `settled` one is read with one instruction: the compiler does
// not see how it came about, and so does not compute each address anew.
struct Local {
  u32 at;
};
DEVICE Local local(const void* p) { return {in_shared(p)}; }
DEVICE Local operator+(Local a, int by) { return {a.at + by}; }
DEVICE Local settled(Local a) {
  asm volatile("" : "+r"(a.at));
  return a;
}
DEVICE u32 load_short(Local a) {
  u16 r;
  asm volatile("ld.shared.u16 %0,[%1];" : "=h"(r) : "r"(a.at));
  return r;
}
DEVICE u32 load_word(Local a) {
  u32 r;
  asm volatile("ld.shared.u32 %0,[%1];" : "=r"(r) : "r"(a.at));
  return r;
}
DEVICE uint2 load_two(Local a) {
  uint2 r;
  asm volatile("ld.shared.v2.u32 {%0,%1},[%2];" : "=r"(r.x), "=r"(r.y) : "r"(a.at));
  return r;
}
DEVICE uint4 load_four(Local a) {
  uint4 r;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "r"(a.at));
  return r;
}
// Four matrices of 8 x 8 halves; lane i names row i % 8 of matrix i / 8.
DEVICE void load_matrices(u32 (&r)[4], Local row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(row.at));
}

// ---- a block
DEVICE void sync_block() { __syncthreads(); }
// Waits until so many threads of the block, whole warps, have come to barrier `id`.
DEVICE void sync_some(int id, int threads) { asm volatile("bar.sync %0,%1;" ::"r"(id), "r"(threads) : "memory"); }
DEVICE void init_barrier(u64* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0],%1;" ::"r"(in_shared(barrier)), "r"(arrivals) : "memory");
}
DEVICE void arrive(u64* barrier) {
  asm volatile("{.reg .b64 s; mbarrier.arrive.shared::cta.b64 s,[%0];}" ::"r"(in_shared(barrier)) : "memory");
}
// Waits for the end of a phase of a barrier: of those that the barrier has gone through, even and odd ones take turns.
DEVICE void wait(u64* barrier, u32 parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile("{.reg .pred p; W: mbarrier.try_wait.parity.shared::cta.b64 p,[%0],%1; @!p bra W;}" ::"r"(in_shared(barrier)),
               "r"(parity) : "memory");
#else
  asm volatile("{.reg .pred p; W: mbarrier.test_wait.parity.shared::cta.b64 p,[%0],%1; @!p bra W;}" ::"r"(in_shared(barrier)),
               "r"(parity) : "memory");
#endif
}
DEVICE void publish_barriers() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// Copies a run of bytes, a multiple of 16, into shared memory, called by a whole warp; `COPY_ARRIVALS` arrivals at the
// barrier say that it is there, and that what the warp wrote into shared memory before can be read.
#if __CUDA_ARCH__ >= 900
constexpr int COPY_ARRIVALS = 1;
template <int BYTES> DEVICE void copy_to_shared(u8* to, const u8* from, u64* barrier, int lane) {
  if (lane == 0) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;" ::"r"(in_shared(barrier)), "r"(BYTES) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];" ::"r"(in_shared(to)),
                 "l"(from), "r"(BYTES), "r"(in_shared(barrier)) : "memory");
  }
  __syncwarp();
}
#else
constexpr int COPY_ARRIVALS = 32;
template <int BYTES> DEVICE void copy_to_shared(u8* to, const u8* from, u64* barrier, int lane) {
  for (int at = lane * 16; at < BYTES; at += 512)
    asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(in_shared(to + at)), "l"(from + at) : "memory");
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(in_shared(barrier)) : "memory");
}
#endif

// ---- the whole device
DEVICE void fence() { __threadfence(); }
DEVICE int add_atomically(int* at, int x) { return atomicAdd(at, x); }
// What other blocks wrote in this launch.
DEVICE float load_fresh(const float* at) { return __ldcg(at); }
DEVICE float4 load_fresh(const float4* at) { return __ldcg(at); }
DEVICE void store_four(float* at, float4 x) {
  asm volatile("st.global.v4.f32 [%0],{%1,%2,%3,%4};" ::"l"(at), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
}
#endif
