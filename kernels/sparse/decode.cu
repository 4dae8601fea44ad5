// y[M, N] = x[M, K] w[N, K]^T for M <= 8 NT: the sparse weights stream once, through the registers of a matrix operand.
//
// A block owns a band of rows; its warps have a stream each, side by side along K, and their sums meet in shared memory
// in warp order. Macros beside stream.cuh's: NT; EXACT, 1 where the inputs need no bounds.
constexpr bool AHEAD = NT == 1 || TILES <= 2;  // whether registers are left to hold x a group ahead

struct Tokens {  // a lane's share of x for a group of inputs: of each eight tokens, one token's two pieces
  Words<4> piece[NT][2];
  DEVICE void load(const u16* x, const Bitmap& w, int tokens, int input, int lane) {
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        piece[n][i] = {};
        const int token = n * 8 + (lane >> 2), at = input + i * 32 + (lane & 3) * 8;
        if (token < tokens && (EXACT || at < w.inputs)) {
          u32* v = piece[n][i].at;
          asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "l"(x + (i64)token * w.inputs + at));
        }
      }
  }
};
DEVICE void touch(const u16* x, const Bitmap& w, int tokens, int input, int lane) {  // a group of x, into the first cache
  if (lane >= tokens) return;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if (EXACT || input + i * 16 < w.inputs) asm volatile("{.reg .b32 ignored;\nld.global.u32 ignored, [%0];}" ::"l"(x + (i64)lane * w.inputs + input + i * 16));
  }
}

struct Work {
  Stream& stream;
  const u16* x;
  const Bitmap& w;
  int tokens, first, lane;  // `first` input of the stream
  Tokens now, next;
  float sum[TILES][NT][4];

  template <int PAIR, int TILE> DEVICE void block(int group) {
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      const int after = first + (group + u + 1 < GROUPS ? group + u + 1 : 0) * 64;
      if (AHEAD) {
        now = next;
        next.load(x, w, tokens, after, lane);
      } else {
        touch(x, w, tokens, after, lane);
        now.load(x, w, tokens, first + (group + u) * 64, lane);
      }
#pragma unroll
      for (int t = 0; t < PAIR; t++) {
        u32 a[4][4];
        stream.step<PAIR * UNROLL>(a, u * PAIR + t, lane);
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
          for (int n = 0; n < NT; n++) mma(sum[TILE + t][n], a[j], now.piece[n][j / 2].at[j % 2 * 2], now.piece[n][j / 2].at[j % 2 * 2 + 1]);
      }
    }
    stream.advance<PAIR * UNROLL>();
  }
  template <int PAIR, int TILE> DEVICE void done() {}
};

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) decode(const u16* x, Bitmap w, Output out, Picks picks) {
  extern __shared__ __align__(1024) u8 memory[];
  __shared__ __align__(128) Entry entries[16];
  __shared__ __align__(8) u64 barriers[WARPS * RING];
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  let_next_start();
  Stream stream(memory + warp * PITCH, barriers + warp * RING, entries, w, blockIdx.x * WARPS + warp, lane, picks);
  fill_entries(entries);
  __syncthreads();
  wait_for_previous();
  Work work = {stream, x, w, out.tokens, warp * GROUPS * 64, lane, {}, {}, {}};
  if (AHEAD) work.next.load(x, w, out.tokens, work.first, lane);
  each_block(work);
  __syncthreads();
  Quad* parts = (Quad*)memory;  // [TILES][WARPS][NT][32]
#pragma unroll
  for (int t = 0; t < TILES; t++)
#pragma unroll
    for (int n = 0; n < NT; n++)
      if (n * 8 + (lane & 3) * 2 < out.tokens) parts[((t * WARPS + warp) * NT + n) * 32 + lane] = *(const Quad*)work.sum[t][n];
  __syncthreads();
  for (int i = threadIdx.x; i < TILES * NT * 32; i += WARPS * 32) {
    const int n = i / 32 % NT, t = i / 32 / NT;
    if (n * 8 + (lane & 3) * 2 >= out.tokens) continue;
    float total[4] = {};
#pragma unroll
    for (int v = 0; v < WARPS; v++) {
      const Quad part = parts[((t * WARPS + v) * NT + n) * 32 + lane];
      total[0] += __uint_as_float(part.x), total[1] += __uint_as_float(part.y), total[2] += __uint_as_float(part.z), total[3] += __uint_as_float(part.w);
    }
    store(out, w, blockIdx.x * BAND + t * 16, n * 8, lane, total);
  }
}
