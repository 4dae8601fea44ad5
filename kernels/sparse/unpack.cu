// The dense weight [N, K], from the streams that decode.cu multiplies: a block a band of rows, a warp a stream.
struct Work {
  Stream& stream;
  const Bitmap& w;
  u16* dense;
  int row, input, lane;  // this lane's first

  template <int SIZE, int TILE> DEVICE void block(int group) {
#pragma unroll
    for (int s = 0; s < UNROLL * SIZE; s++) {
      u32 a[4][4];
      stream.step<SIZE * UNROLL>(a, s, lane);
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int n = row + (TILE + s % SIZE) * 16 + h * 8, k = input + (group + s / SIZE) * 64 + i * 32;
          if (n < w.outputs && (EXACT || k < w.inputs))
            *(Quad*)(dense + (i64)n * w.inputs + k) = {a[2 * i][h], a[2 * i][h + 2], a[2 * i + 1][h], a[2 * i + 1][h + 2]};
        }
    }
    stream.advance<SIZE * UNROLL>();
  }
  template <int SIZE, int TILE> DEVICE void done() {}
};

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) unpack(Bitmap w, u16* dense, Picks picks) {
  extern __shared__ __align__(1024) u8 memory[];
  __shared__ __align__(128) Entry entries[16];
  __shared__ __align__(8) u64 barriers[WARPS * RING];
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  let_next_start();
  Stream stream(memory + warp * PITCH, barriers + warp * RING, entries, w, blockIdx.x * WARPS + warp, 1, lane, picks);
  fill_entries(entries);
  __syncthreads();
  wait_for_previous();  // which may still read what is written here
  Work work = {stream, w, dense, blockIdx.x * BAND + (lane >> 2), warp * GROUPS * 64 + (lane & 3) * 8, lane};
  each_stream(work, lane);
}
