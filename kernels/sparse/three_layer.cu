// y[M, N] = x[M, K] w[N, K]^T for M <= 8 NT, the weights in three layers: two 2:4 operands of tensor cores.
//
// A block owns a band of rows; its warps have tiles side by side along K, and their sums meet in shared memory in warp
// order. Macros beside those of layers.cuh and tokens.cuh: NT.

// c[16 rows, 8 tokens] += a[16 rows, 32 inputs] b[32 inputs, 8 tokens]: of every four inputs `a` has two, and `pairs` of
// lanes 0 and 1 of a quad (SECOND: 2 and 3) says which.
template <int SECOND> DEVICE void mma_sparse(float* c, const Quad& a, const u32* b, u32 pairs) {
#define MMA(TYPES) asm volatile("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col." TYPES " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9,%10,%11}, {%0,%1,%2,%3}, %12, %13;" \
    : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) \
    : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(pairs), "n"(SECOND))
  if constexpr (HALF) MMA("f32.f16.f16.f32");
  else MMA("f32.bf16.bf16.f32");
#undef MMA
}

// 32 inputs of the tile at hand.
template <int SECOND>
DEVICE void multiply(float (*first)[4], float (*second)[4], const Walk& walk, const Tokens<NT>& x, int group, u32 pairs, int lane) {
  const int at = (group * 2 + SECOND) * 512 + lane * 16;
  const Quad kept = *(const Quad*)(walk.kept + at), others = *(const Quad*)(walk.others + at);
#pragma unroll
  for (int n = 0; n < NT; n++) {
    mma_sparse<SECOND>(first[n], kept, x.piece[n][SECOND].at, pairs);
    mma_sparse<SECOND>(second[n], others, x.piece[n][SECOND].at, complement(pairs));
  }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) three_layer(const u16* x, Layers w, Output out) {
  extern __shared__ __align__(1024) u8 memory[];
  __shared__ __align__(8) u64 barriers[WARPS * STAGES];
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  let_next_start();
  Walk walk(memory + warp * PITCH, barriers + warp * STAGES, w, blockIdx.x * WARPS + warp, lane);
  wait_for_previous();
  float sum[TILES][NT][4] = {};
#pragma unroll 1
  for (int step = 0; step < STEPS; step++) {
    const int input = (warp * STEPS + step) * 256 + (lane & 3) * 8;
    const u16* from = x + (i64)(lane >> 2) * w.inputs + input;
    Tokens<NT> now[4];
#pragma unroll
    for (int g = 0; g < 4; g++) now[g].load(from + g * 64, w, out.tokens, input + g * 64, lane);
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      float more[1][4] = {};  // the second operand's sums where NT is 1: each instruction would wait for the one before
      float (*others)[4] = NT == 1 ? more : sum[t];
      walk.open(lane);
#pragma unroll
      for (int g = 0; g < 4; g++) {
        const u32 pairs = *(const u32*)(walk.kept + PAIRS_AT + g * 128 + lane * 4);
        multiply<0>(sum[t], others, walk, now[g], g, pairs, lane);
        multiply<1>(sum[t], others, walk, now[g], g, pairs, lane);
      }
      walk.close(lane);
      if (NT == 1) {
#pragma unroll
        for (int e = 0; e < 4; e++) sum[t][0][e] += more[0][e];
      }
    }
  }
  __syncthreads();
  add_up<WARPS>(out, w, blockIdx.x * BAND, memory, warp, lane, sum);
}
