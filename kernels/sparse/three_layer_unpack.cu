// The dense weight [N, K], from the tiles that three_layer.cu multiplies: a block a band of rows, a warp its tiles.

// Two of a group's four weights, the second two with `half`: of the values in both operands, those at these positions.
DEVICE u32 two_of(u32 kept, u32 others, u32 pair, int half) {
  const u32 named = 1u << (pair & 3u) | 1u << (pair >> 2);
  u32 select = 0;
#pragma unroll
  for (int e = 0; e < 2; e++) {
    const u32 position = half * 2 + e, below = (1u << position) - 1u;
    const u32 value = named >> position & 1u ? __popc(named & below) : 2 + __popc(~named & below);
    select |= (value * 0x22u + 0x10u) << 8 * e;
  }
  return __byte_perm(kept, others, select);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) three_layer_unpack(Layers w, u16* dense) {
  extern __shared__ __align__(1024) u8 memory[];
  __shared__ __align__(8) u64 barriers[WARPS * STAGES];
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  let_next_start();
  Walk walk(memory + warp * PITCH, barriers + warp * STAGES, w, blockIdx.x * WARPS + warp, lane);
  wait_for_previous();  // which may still read what is written here
  const int r = lane >> 2, upper = lane >> 1 & 1, half = lane & 1;  // a lane has eight neighbouring inputs at a time
#pragma unroll 1
  for (int tile = 0; tile < COUNT; tile++) {
    walk.open(lane);
    const int row = blockIdx.x * BAND + tile % TILES * 16 + r, input = (warp * STEPS + tile / TILES) * 256 + (lane & 3) * 8;
#pragma unroll 4
    for (int part = 0; part < 16; part++) {  // 32 inputs of eight rows
      const int i = part >> 1, h = part & 1, n = row + h * 8, k = input + i * 32;
      u32 word[4];
#pragma unroll
      for (int q = 0; q < 4; q++) {
        const int group = 2 * q + upper, t = group & 3, far = group >> 2;
        const int at = (i * 32 + r * 4 + t) * 16 + far * 8 + h * 4;
        const u32 pairs = *(const u32*)(walk.kept + PAIRS_AT + (i >> 1) * 128 + (r * 4 + (i & 1) * 2 + far) * 4);
        word[q] = two_of(*(const u32*)(walk.kept + at), *(const u32*)(walk.others + at), pairs >> (h * 16 + t * 4) & 15u, half);
      }
      if (n < w.outputs && (EXACT || k < w.inputs)) *(Quad*)(dense + (i64)n * w.inputs + k) = {word[0], word[1], word[2], word[3]};
    }
    walk.close(lane);
  }
}
