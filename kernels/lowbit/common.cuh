// Shared by every kernel of this folder: types, loads, barriers and the code -> number conversions.
// Compiled by NVRTC without headers. A source is specialised by these macros, set by its launcher:
//   NARROW  1 = 8-bit activations with a scale a token, 0 = activations of the output's type;  HALF  that type: 1 = float16
//   BITS  4 or 8, width of a weight code;  FLOATING  1 = codes are E2M1 or E4M3, scales bytes (floats.py), 0 = integers
//   GROUPED  1 = scales change along K;  NG  scales a row in a block (1, 2, 4, and 8 of the floating ones)
//   ZERO  0 = symmetric, 1 = integer zeros in a byte (two rows' nibbles), 2 = zeros in the activations' type
#pragma once
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEVICE __device__ __forceinline__
constexpr int CHUNKS = NARROW ? 4 : BITS / 2;  // 16-byte pieces a lane holds of a 16 x 128 tile of codes
constexpr int STEPS = NARROW ? 4 : 8;          // matrix instructions along a block
constexpr int SCALES = !FLOATING ? 32 * NG : GROUPED ? 16 * NG : 0;  // bytes of scales of a tile and block
struct alignas(16) Quad { u32 x, y, z, w; };

template <bool B, class T, class F> struct Pick { typedef T type; };
template <class T, class F> struct Pick<false, T, F> { typedef F type; };
typedef Pick<NARROW && !FLOATING, int, float>::type Sum;  // what the tensor cores accumulate in

// ---- global memory ----
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
DEVICE u32 sub2(u32 a, u32 b) {
  u32 d;
  if constexpr (HALF) asm("sub.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  else asm("sub.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
DEVICE u32 mul2(u32 a, u32 b) {
  u32 d;
  if constexpr (HALF) asm("mul.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  else asm("mul.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
template <u32 MASK, u32 MAGIC> DEVICE u32 take(u32 w) {  // (w & MASK) | MAGIC
  u32 d;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(d) : "r"(w), "n"(MASK), "n"(MAGIC));
  return d;
}
DEVICE u32 twice(u32 pair, int high) {  // said so that it becomes a modifier of the operation that takes it
  u32 d;
  if (high) asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {h, h};}" : "=r"(d) : "r"(pair));
  else asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {l, l};}" : "=r"(d) : "r"(pair));
  return d;
}
// 8-bit code `which` (0, 1) of both halves of a word, exact, as two numbers: bit 7 weighs -128, the others add to it.
DEVICE u32 signed_pair(u32 w, int which) {
  const u32 b = which ? w >> 8 : w;
  if constexpr (HALF) return sub2(take<0x007F007Fu, 0x64006400u>(b), take<0x00800080u, 0x64006400u>(b));
  return sub2(take<0x007F007Fu, 0x43004300u>(b), take<0x00800080u, 0x43004300u>(b));
}
DEVICE u32 turned(u32 w, int left) { u32 d; asm("shf.l.wrap.b32 %0, %1, %1, %2;" : "=r"(d) : "r"(w), "r"(left)); return d; }
// Floating-point code `which` of both halves of a word, as two numbers too small by a power of two; subnormal for small
// codes, which products with scales take.
DEVICE u32 floating_pair(u32 w, int which) {
  u32 v;
  if constexpr (BITS == 8) v = which ? (w << 4 & 0x80F080F0u) | (w >> 4 & 0x07000700u) : w & 0x87F087F0u;
  else if (which == 0) v = w & 0x81C081C0u;
  else if (which == 1) v = w << 4 & 0x81C081C0u;
  else if (which == 2) v = turned(w, 26) & 0x81C081C0u;
  else v = (turned(w, 30) & 0x81808180u) | (w << 6 & 0x00400040u);
  if constexpr (HALF) v = (v & 0x80008000u) | (v & 0x7FFF7FFFu) << 3;
  return v;
}
// Scale `which` of a word of bytes (row r, row r + 8, twice), as numbers too large by the power of two of the codes.
DEVICE u32 scale_pair(u32 w, int which) {
  const u32 v = __byte_perm(w, 0, which ? 0x3322 : 0x1100) & 0x0FF00FF0u;
  return HALF ? v << 3 : v | 0x70007000u;
}
constexpr u32 UNIT = BITS == 4 ? HALF ? 0x74007400u : 0x7E807E80u : HALF ? 0x5C005C00u : 0x7B807B80u;  // such a scale of one
