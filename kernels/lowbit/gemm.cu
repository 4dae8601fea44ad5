// y[M, N] = x[M, K] w[N, K]^T for many tokens: 128 rows x TOKENS tokens a block, wgmma with the weights as register operand.
//
// One more warp feeds a ring of STAGES blocks of 128 inputs: codes, scales and zeros by bulk copies, x by the tensor
// copy engine, in the swizzle that wgmma reads. Eight warps turn codes into numbers half a block of inputs at a time, so
// that the other half's products run meanwhile; with WAYS = 2, sixteen warps take the inputs in turn. Blocks of a
// cluster are PAIR row tiles that fetch x for each other, or DEPTH parts of K whose sums meet in shared memory. Beyond
// that, the result's tiles from number `whole` on are made in `splits` parts of K: the part that arrives last adds all in
// order. Macros beside common.cuh's: TOKENS, STAGES, WAYS, PAIR, DEPTH (one of the two is 1), PER_SM, and EXACT: 1 keeps
// no sum in the matrix units for longer than a block of inputs, because those of 8-bit floats keep few digits, or because
// the block has scales of its own (NARROW and GROUPED): float32 [row tiles, blocks] and [blocks, tokens] of 8-bit codes,
// those of rows of 4-bit codes. The launcher puts `wgmma(Product*, const u32*, u64, bool add)` for COLUMNS columns in
// front, then gemm_tile.cuh, gemm_numbers.cuh and gemm_finish.cuh.
DEVICE void hold(u32& v) { asm volatile("" : "+r"(v) :: "memory"); }
DEVICE void hold(int& v) { asm volatile("" : "+r"(v) :: "memory"); }
DEVICE void hold(float& v) { asm volatile("" : "+f"(v) :: "memory"); }
// Waits for all products; the sums change behind the compiler's back, so no copy may move above the wait.
template <int N> DEVICE void settle(Product* sum) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int i = 0; i < N; i++) hold(sum[i]);
}
DEVICE u64 tokens_at(u32 stage) { return (u64)1 << 62 | (u64)64 << 32 | (u64)1 << 16 | (u64)((stage & 0x3FFFFu) >> 4); }  // 128-byte swizzle
DEVICE void release(const Ring& ring, int slot, int lane) {
  if (lane >= PAIR) return;
  const u32 empty = ring.empty + slot * 8;
  arrive(PAIR > 1 ? in_rank(empty, lane) : empty);
}

DEVICE void both_operands(u32 (*a)[HALF_STEPS][4], u32 stage, int warp, int lane) {
  operands(a[0], stage, {}, 0, warp, lane), operands(a[1], stage, {}, 1, warp, lane);
}
// Starts the products of a block of 8-bit inputs with COLUMNS tokens from `first` on.
DEVICE void multiply_block(Product* part, const u32 (*a)[HALF_STEPS][4], u32 stage, int first) {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int k = 0; k < STEPS; k++) wgmma(part, a[k / HALF_STEPS][k % HALF_STEPS], tokens_at(stage) + first * 8 + k * 2, k > 0);
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// As `multiply` below, block after block: while one warpgroup adds, the other's products run.
DEVICE void multiply_exactly(Sum* sum, const Ring& ring, const Place& p, int way, int warp, int lane) {
  int slot = way, parity = 0;
  for (int s = way; s < p.steps; s += WAYS) {
    const u32 stage = ring.stages + slot * STAGE;
    u32 a[2][HALF_STEPS][4];
    wait(ring.full + slot * 8, parity);
    both_operands(a, stage, warp, lane);
#pragma unroll
    for (int c = 0; c < TOKENS; c += COLUMNS) {
      Product part[COLUMNS / 2];
      multiply_block(part, a, stage, c);
      settle<COLUMNS / 2>(part);
#pragma unroll
      for (int i = 0; i < COLUMNS / 2; i++) sum[c / 2 + i] += part[i];
    }
    release(ring, slot, lane);
    slot += WAYS;
    if (slot >= STAGES) slot -= STAGES, parity ^= 1;
  }
}

// The scale of 128 rows for block `step` of inputs, where they share one.
DEVICE float block_scale(const Weights& w, const Place& p, int step) {
  if constexpr (T_BYTES == 0) return 1.f;
  float v;
  const float* at = (const float*)w.scales + (i64)min(p.row_tile, w.row_tiles - 1) * w.blocks + p.first + step;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(v) : "l"(at));
  return v;
}
// Adds what a block of inputs gives to COLUMNS tokens from `first` on, times the scales that rows and tokens have for it.
DEVICE void add_block(Sum* sum, const Product* part, float scale, u32 stage, int first, int warp, int lane) {
  float row[2] = {scale, scale};
  if constexpr (GROUPED && BITS == 4) {
    const u32 pair = load<1>(stage + X_BYTES + W_BYTES + (warp * 8 + (lane >> 2)) * 4).at[0];
    row[0] = low_float(pair) * NARROW_UNIT, row[1] = high_float(pair) * NARROW_UNIT;
  }
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; j++) {
    float token[2] = {1.f, 1.f};
    if constexpr (T_BYTES > 0) {
      const Words<2> t = load<2>(stage + BYTES + (first + j * 8 + (lane & 3) * 2) * 4);
      token[0] = __uint_as_float(t.at[0]), token[1] = __uint_as_float(t.at[1]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) sum[4 * j + i] += part[4 * j + i] * (row[i / 2] * token[i % 2]);
  }
}

// The same where blocks have scales of their own: the operands for the next block are made while the products of this
// one run.
DEVICE void multiply_scaled(Sum* sum, const Ring& ring, const Weights& w, const Place& p, int way, int warp, int lane) {
  static_assert(STAGES > WAYS, "the next block of inputs comes before this one is released");
  u32 a[2][HALF_STEPS][4], next[2][HALF_STEPS][4];
  int slot = way, parity = 0;
  if (way < p.steps) wait(ring.full + slot * 8, parity), both_operands(next, ring.stages + slot * STAGE, warp, lane);
  for (int s = way; s < p.steps; s += WAYS) {
    const int now = slot;
    const u32 stage = ring.stages + now * STAGE;
    const float scale = block_scale(w, p, s);
    slot += WAYS;
    if (slot >= STAGES) slot -= STAGES, parity ^= 1;
#pragma unroll
    for (int i = 0; i < STEPS * 4; i++) (&a[0][0][0])[i] = (&next[0][0][0])[i];
#pragma unroll
    for (int c = 0; c < TOKENS; c += COLUMNS) {
      Product part[COLUMNS / 2];
      multiply_block(part, a, stage, c);
      if (c == 0 && s + WAYS < p.steps) wait(ring.full + slot * 8, parity), both_operands(next, ring.stages + slot * STAGE, warp, lane);
      settle<COLUMNS / 2>(part);
#pragma unroll
      for (int i = 0; i < STEPS * 4; i++) hold((&a[0][0][0])[i]);  // read until here: nothing else may take their place
      add_block(sum + c / 2, part, scale, stage, c, warp, lane);
    }
    __syncwarp();  // every lane has read its scales
    release(ring, now, lane);
  }
}

// This warp's 16 rows x TOKENS tokens over every WAYS-th block of K, from its way's first on.
DEVICE void multiply(Product* sum, const Ring& ring, const Weights& w, const Place& p, int way, int warp, int lane) {
  u32 a[2][HALF_STEPS][4];
  Meaning fixed;
  if constexpr (FLOATING) fixed.scale[0] = fixed.scale[1] = UNIT;
  else if constexpr (!GROUPED && !NARROW) {
    const int at = (min(p.row_tile, w.row_tiles - 1) * 8 + warp) * 8 + (lane >> 2);
    const u32 s = ((const u32*)w.scales)[at];
    fixed.scale[0] = twice(s, 0), fixed.scale[1] = twice(s, 1);
    if constexpr (ZERO == 1) set_zero(fixed, w.zeros[at]);
    if constexpr (ZERO == 2) set_zero(fixed, ((const u32*)w.zeros)[at]);
  }
  int slot = way, before = 0, parity = 0;
  for (int s = way; s < p.steps; s += WAYS) {
    const u32 stage = ring.stages + slot * STAGE;
    wait(ring.full + slot * 8, parity);
    const u64 x = tokens_at(stage);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      operands(a[h], stage, fixed, h, warp, lane);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int k = 0; k < HALF_STEPS; k++) wgmma(sum, a[h][k], x + (NARROW ? h * HALF_STEPS * 2 : h * TOKENS * 8) + k * 2, true);
      asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;" ::: "memory");
      if (h == 0 && s >= WAYS) release(ring, before, lane);  // the stage before is read
    }
    before = slot, slot += WAYS;
    if (slot >= STAGES) slot -= STAGES, parity ^= 1;
  }
  settle<TOKENS / 2>(sum);
}

extern "C" __global__ void __launch_bounds__(THREADS + FEEDERS, PER_SM)
gemm(const __grid_constant__ Map x_map, Weights w, Output out, Quad* workspace, int* arrivals, Plan plan) {
  extern __shared__ u8 raw[];
  __shared__ __align__(8) u64 barriers[2 * STAGES + 1];
  __shared__ int last;
  u8* memory = raw + (1024 - (shared(raw) & 1023)) % 1024;
  const Ring ring = {shared(memory), shared(barriers), shared(barriers + STAGES)};
  const Inbox inbox = {shared(memory + STAGES * STAGE), shared(barriers + 2 * STAGES)};
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const Place p = place(w, out.M, plan);
  if (warp == WARPS && lane == 0) {
    for (int i = 0; i < STAGES; i++) barrier_init(ring.full + i * 8, 1), barrier_init(ring.empty + i * 8, 8 * PAIR);
    if (INBOX) barrier_init(inbox.arrived, 1), expect(inbox.arrived, INBOX);
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;\nprefetch.tensormap [%0];" ::"l"(&x_map) : "memory");
    for (int s = 0; s < STAGES && s < p.steps; s++) fetch_weights(ring, w, p, out.M, s);
  }
  __syncwarp();
  let_next_start();
  if (PAIR > 1 || INBOX) cluster_meet(); else __syncthreads();
  if (warp >= WARPS) {
    if constexpr (WIDE) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp == WARPS && lane == 0) feed(ring, &x_map, w, out, p);
    __syncwarp();
    if (DEPTH > 1 && !INBOX) cluster_sync(), cluster_sync();
  } else {
    if constexpr (WIDE) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int way = WAYS > 1 ? warp >> 3 : 0;
    Sum sum[TOKENS / 8][4], own[OWN][4];
    Factors f;
    if (FEW) f = factors(out, p, way, warp & 7, lane);
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i++) (&sum[0][0])[i] = 0;
    if constexpr (NARROW && GROUPED) multiply_scaled(&sum[0][0], ring, w, p, way, warp & 7, lane);
    else if constexpr (EXACT) multiply_exactly(&sum[0][0], ring, p, way, warp & 7, lane);
    else multiply((Product*)&sum[0][0], ring, w, p, way, warp & 7, lane);
    if constexpr (INBOX > 0) {
      exchange(own, sum, inbox, p.rank, threadIdx.x);
      workers_sync();  // every warp has read its last stage: the memory is free for the finished tile
    } else if constexpr (PARTS > 1) gather(own, &sum[0][0], memory, p, way, threadIdx.x & 255);
    else {
#pragma unroll
      for (int i = 0; i < TOKENS / 2; i++) (&own[0][0])[i] = (&sum[0][0])[i];
      workers_sync();
    }
    const bool mine = p.parts == 1 || add_parts(own, workspace, arrivals, &last, p, plan.whole);
    if (mine && p.row_tile < w.row_tiles) {
      if (!FEW) f = factors(out, p, way, warp & 7, lane);
      store(own, f, memory, out, p, way, warp & 7, lane);
    }
  }
  if (PAIR > 1) cluster_meet();  // nobody leaves while the other block may still signal it
}
