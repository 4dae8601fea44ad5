// y[M, N] = x[M, K] w[N, K]^T for M <= 8 NT: the sparse weights stream once, through the registers of a matrix operand.
//
// A block owns a band of rows; its warps have RUN streams each, side by side along K, and their sums meet in shared memory
// in warp order. Macros beside those of stream.cuh and tokens.cuh: NT.
constexpr int BLOCK_WARPS = (WARPS + RUN - 1) / RUN;
constexpr bool AHEAD = NT == 1 || BLOCK_WARPS <= 8 || NT == 2 && TILES <= 2;  // registers are left to hold x a group ahead

struct Work {
  Stream& stream;
  const u16* from;  // this lane's x of the group at hand
  const Bitmap& w;
  int tokens, input, lane;  // `input`: the lane's first of the group at hand
  Tokens<NT> now, next;
  float sum[TILES][NT][4];

  DEVICE void ask(int by) {  // for the x of the group that is `by` inputs further on
    if (AHEAD) next.load(from + by, w, tokens, input + by, lane);
  }
  // The x of the group at hand, `by` inputs before the one after it, of which there is none unless `more`.
  DEVICE void take(int by, bool more) {
    if (AHEAD) now = next;
    if (more) ask(by);
    if (!AHEAD) now.load(from, w, tokens, input, lane);
    from += by, input += by;
  }

  template <int SIZE, int TILE> DEVICE void block(int group) {
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      const bool end = u == UNROLL - 1 && group == GROUPS - UNROLL, last = TILE + SIZE == TILES;
      take(end && !last ? 64 - GROUPS * 64 : 64, !end || !last || stream.after > 0);
#pragma unroll
      for (int t = 0; t < SIZE; t++) {
        u32 a[4][4];
        stream.step<SIZE * UNROLL>(a, u * SIZE + t, lane);
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
          for (int n = 0; n < NT; n++) mma(sum[TILE + t][n], a[j], now.piece[n][j / 2].at[j % 2 * 2], now.piece[n][j / 2].at[j % 2 * 2 + 1]);
      }
    }
    stream.advance<SIZE * UNROLL>();
  }
  template <int SIZE, int TILE> DEVICE void done() {}
};

extern "C" __global__ void __launch_bounds__(BLOCK_WARPS * 32, 1) decode(const u16* x, Bitmap w, Output out, Picks picks) {
  extern __shared__ __align__(1024) u8 memory[];
  __shared__ __align__(128) Entry entries[16];
  __shared__ __align__(8) u64 barriers[WARPS * RING];
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  let_next_start();
  const int first = warp * RUN, streams = min(RUN, WARPS - first);
  Stream stream(memory + first * PITCH, barriers + first * RING, entries, w, blockIdx.x * WARPS + first, streams, lane, picks);
  fill_entries(entries);
  __syncthreads();
  wait_for_previous();
  const int input = first * GROUPS * 64 + (lane & 3) * 8;
  Work work = {stream, x + (i64)(lane >> 2) * w.inputs + input, w, out.tokens, input, lane, {}, {}, {}};
  work.ask(0);
  each_stream(work, lane);
  __syncthreads();
  add_up<BLOCK_WARPS>(out, w, blockIdx.x * BAND, memory, warp, lane, work.sum);
}
