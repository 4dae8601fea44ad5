// What the CUDA kernels of every folder share: types, loads, barriers and copies, clusters, 16-bit numbers, one instruction.
// Compiled by NVRTC without headers, in front of a kernel's own source. The macro HALF says what 16-bit numbers are:
// 1 = float16, 0 = bfloat16.
#pragma once
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEVICE __device__ __forceinline__
struct alignas(16) Quad { u32 x, y, z, w; };

// ---- shared memory ----
DEVICE u32 shared(const void* p) { return (u32)__cvta_generic_to_shared(p); }
template <int N> struct Words { u32 at[N]; };
template <int N> DEVICE Words<N> load(u32 from) {  // N words of shared memory, N in {1, 2, 4}
  Words<N> v;
  if constexpr (N == 1) asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v.at[0]) : "r"(from) : "memory");
  if constexpr (N == 2) asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.at[0]), "=r"(v.at[1]) : "r"(from) : "memory");
  if constexpr (N == 4) asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.at[0]), "=r"(v.at[1]), "=r"(v.at[2]), "=r"(v.at[3]) : "r"(from) : "memory");
  return v;
}

// ---- barriers in shared memory, and copies that complete on them ----
struct alignas(64) Map { u64 opaque[16]; };
DEVICE void barrier_init(u32 b, int n) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(b), "r"(n) : "memory"); }
DEVICE void expect(u32 b, int bytes) { asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(b), "r"(bytes) : "memory"); }
DEVICE void arrive(u32 b) { asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(b) : "memory"); }
DEVICE void wait(u32 b, u32 parity) {
  asm volatile("{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra done;\nbra again;\ndone:\n}" ::"r"(b), "r"(parity) : "memory");
}
DEVICE void bulk(u32 to, const u8* from, int bytes, u32 b) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(b) : "memory");
}
// A box of 128-byte rows at input k and token `token`; to every block of a cluster of two with BOTH.
template <bool BOTH> DEVICE void box(u32 to, const Map* map, int k, int token, u32 b) {
  if constexpr (!BOTH)
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to), "l"(map), "r"(k), "r"(token), "r"(b) : "memory");
  else
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to), "l"(map), "r"(k), "r"(token), "r"(b), "h"((u16)3) : "memory");
}

// ---- programmatic dependent launch, clusters ----
DEVICE void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
DEVICE void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE u32 cluster_rank() { u32 r; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
DEVICE void cluster_sync() { asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory"); }
DEVICE void cluster_meet() { asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory"); }  // orders no memory
DEVICE u32 in_rank(u32 address, u32 rank) {  // the same shared-memory address in another block of the cluster
  u32 r;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(address), "r"(rank));
  return r;
}

// ---- numbers ----
DEVICE float low_float(u32 pair) {
  if constexpr (HALF) { float f; asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(f) : "r"(pair)); return f; }
  return __uint_as_float(pair << 16);
}
DEVICE float high_float(u32 pair) {
  if constexpr (HALF) { float f; asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(f) : "r"(pair)); return f; }
  return __uint_as_float(pair & 0xFFFF0000u);
}
DEVICE u32 round_pair(float low, float high) {  // two floats to one word of the output type
  u32 d;
  if constexpr (HALF) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

// c[16 rows, 8 tokens] += a[16 rows, 16 inputs] b[16 inputs, 8 tokens], in a lane's shares
DEVICE void mma(float* c, const u32* a, u32 b0, u32 b1) {
#define MMA(TYPES) asm volatile("mma.sync.aligned.m16n8k16.row.col." TYPES " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
    : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
  if constexpr (HALF) MMA("f32.f16.f16.f32");
  else MMA("f32.bf16.bf16.f32");
#undef MMA
}
