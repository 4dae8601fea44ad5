// y[M, N] = x[M, K] w[N, K]^T for M <= 8 NT: the sparse weights stream once, through the registers of a matrix operand.
//
// A block owns a band of rows; its warps have a stream each, side by side along K, and their sums meet in shared memory
// in warp order. Macros beside those of stream.cuh and tokens.cuh: NT.
constexpr bool AHEAD = NT == 1 || TILES <= 2;  // whether registers are left to hold x a group ahead

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
  Tokens<NT> now, next;
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
  add_up(out, w, blockIdx.x * BAND, memory, warp, lane, work.sum);
}
