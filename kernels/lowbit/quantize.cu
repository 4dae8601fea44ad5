// codes[M, K] = x[M, K] / scales[M], rounded and in 8 bits: the arithmetic of activations.py, code for code.
//
// BLOCKS blocks make a token, and each keeps its inputs in registers between measuring and rounding them, PIECES times 16
// bytes a thread. What they need of each other is the largest magnitude: with EXCHANGE they are a cluster, and every warp
// sends what it found to all of them; without, every block reads the whole token, as a block alone does.
// Macros: THREADS, BLOCKS, PIECES, EXCHANGE; HALF, and WIDE: 1 = inputs are float32; FLOATING: 1 = codes are E4M3, 0 =
// int8; GIVEN: 0 = a scale a token, found here, else one for all, 1 = in float32, 2 = float16, 3 = bfloat16.
constexpr int INPUTS = WIDE ? 4 : 8;  // in 16 bytes
constexpr int WARPS = THREADS / 32;
constexpr bool SEARCHES = GIVEN == 0, SENDS = SEARCHES && EXCHANGE && BLOCKS > 1;
constexpr bool READS_ALL = SEARCHES && !SENDS;
constexpr int READ = READS_ALL ? PIECES * BLOCKS : PIECES;
constexpr float REACH = FLOATING ? 448.f : 127.5f;  // the magnitude that a scale of one is for
constexpr float TINY = WIDE ? 0x1p-23f : HALF ? 0x1p-10f : 0x1p-7f;  // the scale of a token of zeros

// ---- global memory ----
DEVICE Quad read(const u8* from) {  // in order: nothing of x may be read before the wait
  Quad v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
  return v;
}
DEVICE float given_scale(const void* given) {
  if constexpr (GIVEN == 1) return *(const float*)given;
  const u32 bits = *(const u16*)given;
  if constexpr (GIVEN == 3) return __uint_as_float(bits << 16);
  float f;
  asm("{.reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h;}" : "=f"(f) : "r"(bits));
  return f;
}

// ---- the largest magnitude: as integers, which order as magnitudes do, NaN above all ----
DEVICE u32 larger(u32 a, u32 b) {  // of two, or of two pairs
  u32 d;
  if constexpr (WIDE) return max(a, b);
  asm("max.u16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
DEVICE u32 measured(u32 most, const Quad& v) {
  constexpr u32 SIGNLESS = WIDE ? 0x7FFFFFFFu : 0x7FFF7FFFu;
  most = larger(most, larger(v.x & SIGNLESS, v.y & SIGNLESS));
  return larger(most, larger(v.z & SIGNLESS, v.w & SIGNLESS));
}
DEVICE u32 of_warp(u32 most) {
  u32 d;
  asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(d) : "r"(most));
  return d;
}
// Where a warp leaves what it found, and what tells of the others'. With SENDS that is a barrier, which waits for the word
// of every warp of the cluster; lane i sends to block i.
struct Mail { u32 words, barrier, to, to_barrier; };
DEVICE Mail mail(u32* found, u64* barrier, int rank) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  Mail m = {shared(found), shared(barrier), shared(found + warp), 0};
  if constexpr (SENDS) {
    if (threadIdx.x == 0) {
      barrier_init(m.barrier, 1), expect(m.barrier, BLOCKS * WARPS * 4);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
    m.to = in_rank(shared(found + rank * WARPS + warp), lane % BLOCKS), m.to_barrier = in_rank(m.barrier, lane % BLOCKS);
    cluster_meet();  // nobody sends before all can receive
  }
  return m;
}
DEVICE u32 of_token(u32 most, const Mail& m) {  // the largest of what all threads of the token pass
  constexpr int WORDS = SENDS ? BLOCKS * WARPS : WARPS;
  const int lane = threadIdx.x & 31;
  if constexpr (!WIDE) most = max(most & 0xFFFFu, most >> 16);
  most = of_warp(most);
  if constexpr (SENDS) {
    if (lane < BLOCKS)
      asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(m.to), "r"(most), "r"(m.to_barrier) : "memory");
    wait(m.barrier, 0);
  } else {
    if (lane == 0) asm volatile("st.shared.u32 [%0], %1;" ::"r"(m.to), "r"(most) : "memory");
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < WORDS; i += 32)
    if (i + lane < WORDS) most = max(most, load<1>(m.words + (i + lane) * 4).at[0]);
  return of_warp(most);
}

// ---- numbers ----
DEVICE float rounded(float v) { return WIDE ? v : low_float(round_pair(v, 0.f)); }  // to the type of x
DEVICE void unpack(float* x, const Quad& v) {
  const u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if constexpr (WIDE) x[i] = __uint_as_float(w[i]);
    else x[2 * i] = low_float(w[i]), x[2 * i + 1] = high_float(w[i]);
  }
}
DEVICE u32 four_codes(const float* q) {
  u32 d;
  if constexpr (FLOATING) {
    asm("{.reg .b16 l, h;\ncvt.rn.satfinite.e4m3x2.f32 l, %2, %1;\ncvt.rn.satfinite.e4m3x2.f32 h, %4, %3;\nmov.b32 %0, {l, h};}"
        : "=r"(d) : "f"(q[0]), "f"(q[1]), "f"(q[2]), "f"(q[3]));
    return d;
  }
  u32 bits[4];  // 1.5 * 2^23 leaves a sum no room for a fraction: halves go to even, and the low byte is the code
#pragma unroll
  for (int i = 0; i < 4; i++) bits[i] = __float_as_uint(fminf(fmaxf(q[i], -128.f), 127.f) + 12582912.f);
  return __byte_perm(__byte_perm(bits[0], bits[1], 0x0040), __byte_perm(bits[2], bits[3], 0x0040), 0x5410);
}
// No quotient of two 16-bit numbers lies near enough to a change of rounding for a product with the inverse to differ from
// it, as long as the inverse is neither infinite nor subnormal: `lift`, a power of two, sees to that.
struct Unit { float scale, lift, inverse; };
DEVICE Unit unit(float scale) {
  const float lift = scale < 0x1p-100f ? 0x1p64f : scale > 0x1p100f ? 0x1p-64f : 1.f;
  return {scale, lift, __frcp_rn(scale * lift)};
}
DEVICE void encode(u8* to, const Quad& v, const Unit& unit) {
  float q[INPUTS];
  unpack(q, v);
#pragma unroll
  for (int i = 0; i < INPUTS; i++) q[i] = WIDE ? __fdiv_rn(q[i], unit.scale) : q[i] * unit.inverse * unit.lift;
  if constexpr (WIDE) *(u32*)to = four_codes(q);
  else {
#pragma unroll
    for (int i = 0; i < INPUTS; i += 2) {
      const u32 pair = round_pair(q[i], q[i + 1]);
      q[i] = low_float(pair), q[i + 1] = high_float(pair);
    }
    *(u64*)to = four_codes(q) | (u64)four_codes(q + 4) << 32;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
quantize(const u8* x, const void* given, u8* codes, float* scales, int K) {
  __shared__ u32 found[SENDS ? BLOCKS * WARPS : WARPS];
  __shared__ __align__(8) u64 barrier;
  constexpr int STEP = BLOCKS * THREADS;  // from a piece of this thread to the next
  const int rank = blockIdx.x % BLOCKS, first = (READS_ALL ? 0 : rank * THREADS) + threadIdx.x, pieces = K / INPUTS;
  const i64 token = blockIdx.x / BLOCKS;
  let_next_start();
  const Mail m = mail(found, &barrier, rank);
  const u8* from = x + (token * pieces + first) * 16;
  u8* to = codes + (token * pieces + rank * THREADS + threadIdx.x) * INPUTS;
  wait_for_previous();
  Quad v[READ], own[PIECES];
#pragma unroll
  for (int i = 0; i < READ; i++) {
    const int at = i * (READS_ALL ? THREADS : STEP);
    v[i] = {0, 0, 0, 0};
    if (first + at < pieces) v[i] = read(from + at * 16);
  }
  u32 most = 0;
#pragma unroll
  for (int i = 0; i < READ; i++) {
    if (SEARCHES) most = measured(most, v[i]);
    if (!READS_ALL) own[i] = v[i];
    else if (i % BLOCKS == rank) own[i / BLOCKS] = v[i];
  }
  float scale;
  if constexpr (SEARCHES) {
    most = of_token(most, m);
    scale = rounded(__fdiv_rn(WIDE ? __uint_as_float(most) : low_float(most), REACH));
    if (scale == 0.f) scale = TINY;
  } else scale = rounded(given_scale(given));
  const Unit u = unit(scale);
#pragma unroll
  for (int i = 0; i < PIECES; i++)
    if (rank * THREADS + threadIdx.x + i * STEP < pieces) encode(to + i * STEP * INPUTS, own[i], u);
  if (rank == 0 && threadIdx.x == 0) scales[token] = scale;
}
