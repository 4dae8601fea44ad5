// y[M, N] = x[M, K] w[N, K]^T for a batch of tokens, TOKENS at a time: wgmma with the sparse weights as register operand.
//
// Streams are those of decode.cu, dealt out differently: the four warps of a group take the same inputs of four bands of
// rows, 64 rows to an instruction, and share x, which they copy to shared memory in the order of inputs that layout.py
// gives a step, a group of inputs ahead. The WAYS groups of a block are neighbours along K; their sums go from one to the
// next through shared memory. What is left of K is in other blocks: who arrives last adds their sums in order.
// Macros beside those of stream.cuh and tokens.cuh: TOKENS, WAYS, SLOTS (places for sums on their way). The launcher puts
// `wgmma` for TOKENS columns in front.
constexpr int NT = TOKENS / 8, X_BYTES = TOKENS * 128, SLICES = (WARPS + WAYS * RUN - 1) / (WAYS * RUN);
constexpr int UNITS = (NT + 3) / 4;         // of eight tokens, that a warp copies of each group of inputs
constexpr bool ROOM = WAYS <= 2;            // 255 registers to a thread
constexpr bool BOTH = ROOM || TOGETHER * NT <= 8;  // registers are left for the operands of two steps
constexpr bool LATE = ROOM;                 // and to hold x on its way until the end of a group of inputs
static_assert(RUN == 1 || SETS == 1, "sums stay with the warp from stream to stream");
constexpr int SUMS = TILES * NT * 128;      // Quads of a block's result

DEVICE void group_sync(int way) { asm volatile("fence.proxy.async.shared::cta;\nbar.sync %0, 128;" ::"r"(1 + way) : "memory"); }
// The sums in `slot` are ready for group `way` (0: the slot is free again).
DEVICE void pass(int slot, int way) { asm volatile("bar.arrive %0, 256;" ::"r"(1 + WAYS + slot * WAYS + way) : "memory"); }
DEVICE void receive(int slot, int way) { asm volatile("bar.sync %0, 256;" ::"r"(1 + WAYS + slot * WAYS + way) : "memory"); }

struct Work {
  Stream& stream;
  const Bitmap& w;
  const Output& out;
  const u16* from;     // this lane's x of the group of inputs at hand, of its token in the warp's first unit
  u32 tiles;           // x of two groups of inputs, in shared memory
  Quad *sums, *parts;  // in shared memory; in the workspace, null where this block has all of K
  int input, token, band, way, last, lane;  // the lane's first input; first token, band of the warp; this group's number, that of the last one
  u32 turn;
  float sum[TOGETHER][NT][4];

  DEVICE void load(Words<4>* piece, int unit, int by) const {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      piece[i] = {};
      const int m = token + unit * 8 + (lane >> 2);
      if (unit < NT && m < out.tokens && (EXACT || input + by + i * 32 < w.inputs)) {
        u32* v = piece[i].at;
        asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "l"(from + (i64)((unit & ~3) * 8) * w.inputs + by + i * 32));
      }
    }
  }
  // As [matrix step][half of its inputs][unit][token][eight inputs]: 128 bytes to a warp's store.
  DEVICE void keep(const Words<4>* piece, int unit, u32 tile) const {
    if (unit >= NT) return;
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int q = 0; q < 4; q++) asm volatile("st.shared.u32 [%0], %1;" ::"r"(tile + ((i * 4 + q) * NT + unit) * 128 + lane * 4), "r"(piece[i].at[q]) : "memory");
  }
  DEVICE void begin() {
#pragma unroll
    for (int n = 0; n < TOGETHER * NT; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) sum[n / NT][n % NT][e] = 0.f;
  }

  template <int SIZE, int TILE> DEVICE void block(int group) {
    constexpr int EACH = LATE ? UNITS : (UNITS + SIZE - 1) / SIZE;
    const int member = threadIdx.x >> 5 & 3;
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      const u32 tile = tiles + turn * X_BYTES, other = tiles + (turn ^ 1) * X_BYTES;
      const u64 b = (u64)(128 >> 4) << 32 | (u64)(NT * 128 >> 4) << 16 | (u64)((tile & 0x3FFFFu) >> 4);  // no swizzle
      const bool end = u == UNROLL - 1 && group == GROUPS - UNROLL, over = TILE + SIZE == TILES;
      const bool more = !end || !over || stream.after > 0;
      const int by = end && !over ? 64 - GROUPS * 64 : 64;  // to the next group
      u32 a[2][4][4];
      Words<4> piece[EACH][2];
      group_sync(way);
#pragma unroll
      for (int t = 0; t < SIZE; t++) {
        if ((!LATE || t == 0) && t * EACH < UNITS && more) {
#pragma unroll
          for (int i = 0; i < EACH; i++) load(piece[i], member + 4 * (t * EACH + i), by);
        }
        stream.step<SIZE * UNROLL>(a[BOTH ? t & 1 : 0], u * SIZE + t, lane);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int j = 0; j < 4; j++) wgmma(&sum[t][0][0], a[BOTH ? t & 1 : 0][j], b + j * (2 * NT * 128 >> 4), true);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        if (!BOTH || t == SIZE - 1) asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        else if (t > 0) asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");  // its operands are free for the next step
        if ((LATE ? t == SIZE - 1 : t * EACH < UNITS) && more) {
#pragma unroll
          for (int i = 0; i < EACH; i++) keep(piece[i], member + 4 * ((LATE ? 0 : t) * EACH + i), other);
        }
      }
      from += by, input += by, turn ^= 1;
    }
    stream.advance<SIZE * UNROLL>();
  }

  // Adds what the groups before this one have, and passes it on.
  template <int SIZE, int TILE> DEVICE void done() {
    if (RUN > 1 && stream.after > 0) return;
#pragma unroll
    for (int n = 0; n < TOGETHER * NT; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) asm volatile("" : "+f"(sum[n / NT][n % NT][e]) :: "memory");  // no copy moves above the wait
#pragma unroll
    for (int t = 0; t < SIZE; t++) {
      constexpr int TURNS = SLOTS;
      const int slot = (TILE + t) % TURNS, thread = threadIdx.x & 127;
      Quad* place = sums + slot * NT * 128 + thread;
      if (way > 0) {
        receive(slot, way);
#pragma unroll
        for (int n = 0; n < NT; n++) {
          const Quad before = place[n * 128];
          const u32* bits = (const u32*)&before;
#pragma unroll
          for (int e = 0; e < 4; e++) sum[t][n][e] = __uint_as_float(bits[e]) + sum[t][n][e];
        }
      } else if (TILE + t >= TURNS && last > 0) receive(slot, 0);
      if (way < last) {
#pragma unroll
        for (int n = 0; n < NT; n++) place[n * 128] = *(const Quad*)sum[t][n];
        pass(slot, way + 1);
        continue;
      }
      if (TILE + t + TURNS < TILES && last > 0) pass(slot, 0);
#pragma unroll
      for (int n = 0; n < NT; n++)
        if (SLICES > 1) parts[((TILE + t) * NT + n) * 128 + thread] = *(const Quad*)sum[t][n];
        else if (band * WARPS < w.streams) store(out, w, band * BAND + (TILE + t) * 16, token + n * 8, lane, sum[t][n]);
    }
    begin();
  }
};

// The sums of all blocks of these rows, added in order along K.
DEVICE void add_slices(const Quad* parts, const Output& out, const Bitmap& w, int bands, int token) {
  const int lane = threadIdx.x & 31, band = bands + (threadIdx.x >> 5 & 3);
#pragma unroll 2
  for (int i = threadIdx.x; i < SUMS; i += WAYS * 128) {
    u32 v[SLICES][4];
#pragma unroll
    for (int s = 0; s < SLICES; s++)
      asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v[s][0]), "=r"(v[s][1]), "=r"(v[s][2]), "=r"(v[s][3]) : "l"(parts + s * SUMS + i) : "memory");
    float total[4] = {};
#pragma unroll
    for (int s = 0; s < SLICES; s++)
#pragma unroll
      for (int e = 0; e < 4; e++) total[e] += __uint_as_float(v[s][e]);
    if (band * WARPS < w.streams) store(out, w, band * BAND + i / (NT * 128) * 16, token + i / 128 % NT * 8, lane, total);
  }
}

extern "C" __global__ void __launch_bounds__(WAYS * 128, 1)
batch(const u16* x, Bitmap w, Output out, Quad* workspace, int* arrivals, Picks picks) {
  extern __shared__ __align__(1024) u8 memory[];
  __shared__ __align__(128) Entry entries[16];
  __shared__ __align__(8) u64 barriers[WAYS * 4 * RUN * RING];
  __shared__ int arrived;
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31, way = warp >> 2;
  const int slice = blockIdx.x % SLICES, bands = blockIdx.x / SLICES * 4, band = bands + (warp & 3);
  const int here = min(WAYS * RUN, WARPS - slice * WAYS * RUN), ways = (here + RUN - 1) / RUN;  // streams a band; groups that have one
  const int first = min(way, ways - 1) * RUN, number = min(band * WARPS, w.streams - WARPS) + slice * WAYS * RUN + first;
  const int unit = blockIdx.y * (gridDim.x / SLICES) + blockIdx.x / SLICES;
  Quad* parts = workspace + (i64)unit * SLICES * SUMS;
  u8* tiles = memory + WAYS * 4 * RUN * PITCH;
  let_next_start();
  Stream stream(memory + warp * RUN * PITCH, barriers + warp * RUN * RING, entries, w, number, min(RUN, here - first), lane, picks);
  fill_entries(entries);
  __syncthreads();
  wait_for_previous();
  if (way < ways) {
    const int input = (slice * WAYS * RUN + first) * GROUPS * 64 + (lane & 3) * 8, token = blockIdx.y * TOKENS;
    const u16* from = x + (i64)(token + (warp & 3) * 8 + (lane >> 2)) * w.inputs + input;
    Work work = {stream, w, out, from, shared(tiles) + way * 2 * X_BYTES, (Quad*)(tiles + WAYS * 2 * X_BYTES), parts + slice * SUMS,
                 input, token, band, way, ways - 1, lane, 0, {}};
    work.begin();
    for (int i = warp & 3; i < NT; i += 4) {
      Words<4> piece[2];
      work.load(piece, i, 0);
      work.keep(piece, i, work.tiles);
    }
    each_stream(work, lane);
  }
  if (SLICES == 1) return;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    arrived = atomicAdd(arrivals + unit, 1);
    if (arrived == SLICES - 1) arrivals[unit] = 0;  // ready for the next launch
    __threadfence();
  }
  __syncthreads();
  if (arrived == SLICES - 1) add_slices(parts, out, w, bands, blockIdx.y * TOKENS);
}
