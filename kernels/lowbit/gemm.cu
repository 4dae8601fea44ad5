// y[M, N] = x[M, K] w[N, K]^T for many tokens: 128 rows x TOKENS tokens a block, wgmma with the weights as register operand.
//
// One more warp feeds a ring of STAGES blocks of 128 inputs: codes, scales and zeros by bulk copies, x by the tensor
// copy engine, in the swizzle that wgmma reads. Eight warps turn codes into numbers half a block of inputs at a time, so
// that the other half's products run meanwhile; with WAYS = 2, sixteen warps take the inputs in turn. Blocks of a
// cluster are PAIR row tiles that fetch x for each other, or DEPTH parts of K whose sums meet in shared memory. Beyond
// that, the result's tiles from number `whole` on are made in `splits` parts of K: the part that arrives last adds all in
// order. Macros beside common.cuh's: TOKENS, STAGES, WAYS, PAIR, DEPTH (one of the two is 1), PER_SM, and EXACT: 1 keeps
// no sum in the matrix units for longer than a block of inputs, because those of 8-bit floats keep few digits. The
// launcher puts `wgmma(Sum*, const u32*, u64, bool add)` for COLUMNS columns in front.
constexpr int BLOCK = 128;  // inputs in a block
constexpr int WARPS = 8 * WAYS, THREADS = WARPS * 32, CLUSTER = PAIR * DEPTH, HALF_STEPS = STEPS / 2;
constexpr int X_BYTES = TOKENS * (NARROW ? 128 : 256), W_BYTES = 8 * CHUNKS * 512;
constexpr int S_BYTES = GROUPED ? 8 * SCALES : 0, Z_BYTES = !GROUPED || ZERO == 0 ? 0 : ZERO == 1 ? 64 * NG : 256 * NG;
constexpr int BYTES = X_BYTES + W_BYTES + S_BYTES + Z_BYTES, STAGE = (BYTES + 1023) / 1024 * 1024;
constexpr bool WIDE = TOKENS > 128;  // then registers move from the feeding warps, a whole group of four, to the others
constexpr int COLUMNS = EXACT && TOKENS > 128 ? TOKENS / 2 : TOKENS;  // tokens of one matrix instruction
constexpr int FEEDERS = WIDE ? 128 : 32;
constexpr bool FEW = TOKENS <= 32;  // the ends of such products are a good part of their time
constexpr int INBOX = FEW && DEPTH > 1 && WAYS == 1 ? TOKENS * 512 : 0;  // bytes, after the ring: sums of the whole cluster
static_assert(PAIR == 1 || DEPTH == 1, "a cluster shares tokens or divides K, not both");
constexpr int PITCH = 272;  // bytes a token of the finished tile takes: 128 rows and a pad against bank conflicts

struct Weights { const u8 *codes, *scales, *zeros; int blocks, row_tiles; };
struct Output { u16* y; const u16* bias; const float *row_scale, *token_scale; int M, N; };

// ---- copies, places ----
DEVICE void workers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

struct Plan { int whole, splits, swizzle; };  // tiles made in one part, parts of the others, row tiles walked together
struct Place { int row_tile, token_tile, tile, part, parts, first, steps, rank; };  // `steps` blocks of K from block `first`
DEVICE Place place(const Weights& w, int M, const Plan& plan) {  // neighbours in time share rows and tokens in the L2 cache
  Place p;
  const int tokens = (M + TOKENS - 1) / TOKENS, rows = (w.row_tiles + PAIR - 1) / PAIR, at = blockIdx.x / CLUSTER;
  p.rank = CLUSTER > 1 ? cluster_rank() : 0;
  p.parts = at < plan.whole ? 1 : plan.splits;
  p.tile = at < plan.whole ? at : plan.whole + (at - plan.whole) / plan.splits;
  p.part = at < plan.whole ? 0 : (at - plan.whole) % plan.splits;
  const int band = plan.swizzle * tokens, first = p.tile / band * plan.swizzle, size = min(rows - first, plan.swizzle);
  p.row_tile = (first + p.tile % band % size) * PAIR + (PAIR > 1 ? p.rank : 0), p.token_tile = p.tile % band / size;
  const int slice = p.part * DEPTH + (DEPTH > 1 ? p.rank : 0), slices = p.parts * DEPTH;
  p.first = w.blocks * slice / slices, p.steps = w.blocks * (slice + 1) / slices - p.first;
  return p;
}

struct Ring { u32 stages, full, empty; };
DEVICE void fetch_weights(const Ring& ring, const Weights& w, const Place& p, int step) {
  const int slot = step % STAGES;
  const u32 to = ring.stages + slot * STAGE + X_BYTES, b = ring.full + slot * 8;
  const u64 at = (u64)min(p.row_tile, w.row_tiles - 1) * w.blocks + p.first + step;
  expect(b, BYTES);
  bulk(to, w.codes + at * W_BYTES, W_BYTES, b);
  if constexpr (S_BYTES > 0) bulk(to + W_BYTES, w.scales + at * S_BYTES, S_BYTES, b);
  if constexpr (Z_BYTES > 0) bulk(to + W_BYTES + S_BYTES, w.zeros + at * Z_BYTES, Z_BYTES, b);
}
DEVICE void fetch_tokens(const Ring& ring, const Map* map, const Place& p, int step) {
  constexpr int BOXES = NARROW ? 1 : 2, SHARE = TOKENS / PAIR;
  const int own = PAIR > 1 ? p.rank * SHARE : 0;
  const int slot = step % STAGES;
#pragma unroll
  for (int i = 0; i < BOXES; i++)
    box<(PAIR > 1)>(ring.stages + slot * STAGE + (i * TOKENS + own) * 128, map, (p.first + step) * BLOCK + i * BLOCK / BOXES,
        p.token_tile * TOKENS + own, ring.full + slot * 8);
}
DEVICE void feed(const Ring& ring, const Map* map, const Weights& w, const Place& p) {
  wait_for_previous();
  for (int s = 0; s < p.steps; s++) {
    if (s >= STAGES) {
      wait(ring.empty + s % STAGES * 8, (s / STAGES - 1) & 1);
      fetch_weights(ring, w, p, s);  // the first STAGES are on their way already
    }
    fetch_tokens(ring, map, p, s);
  }
}

// ---- codes to numbers ----
struct Meaning { u32 scale[2], zero[2]; };  // of rows r and r + 8, twice in a word
DEVICE u32 load_byte(u32 address) { u32 v; asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(address)); return v; }
DEVICE void set_zero(Meaning& m, u32 z) {
  constexpr u32 base = HALF ? 0x64006400u : 0x43004300u;
#pragma unroll
  for (int i = 0; i < 2; i++) m.zero[i] = ZERO == 2 ? twice(z, i) : (z >> (4 * i) & 15u) * 0x10001u | base;
}
DEVICE Meaning meaning(u32 stage, const Meaning& fixed, int row, int group) {
  if constexpr (!GROUPED) return fixed;
  Meaning m;
  const u32 at = stage + X_BYTES + W_BYTES;
  const u32 s = load<1>(at + (row * NG + group) * 4).at[0];
  m.scale[0] = twice(s, 0), m.scale[1] = twice(s, 1);
  if constexpr (ZERO == 1) set_zero(m, load_byte(at + S_BYTES + row * NG + group));
  if constexpr (ZERO == 2) set_zero(m, load<1>(at + S_BYTES + (row * NG + group) * 4).at[0]);
  return m;
}
DEVICE u32 number(u32 w, int i, const Meaning& m, int row) {  // code i of both halves of a word, as scaled numbers
  u32 v;
  if constexpr (FLOATING) v = floating_pair(w, i);
  else if constexpr (BITS == 8) v = signed_pair(w, i);
  else {
    v = take<0x000F000Fu, HALF ? 0x64006400u : 0x43004300u>(w >> (4 * i));
    v = sub2(v, ZERO == 1 ? m.zero[row] : HALF ? 0x64086408u : 0x43084308u);
  }
  if constexpr (ZERO == 2) v = sub2(v, m.zero[row]);
  return mul2(v, m.scale[row]);
}
DEVICE void operands(u32 (*a)[4], u32 stage, const Meaning& fixed, int half, int warp, int lane) {
  constexpr int EACH = STEPS / CHUNKS, LOADS = CHUNKS / 2;  // matrix steps a 16-byte piece holds, pieces in half a block
  const int row = warp * 8 + (lane >> 2);
  constexpr bool IN_BYTES = FLOATING && GROUPED;
  constexpr int SCALE_WORDS = IN_BYTES ? NG / 4 : 1;  // of a lane, for half a block
  Words<SCALE_WORDS> bytes;
  if constexpr (IN_BYTES) bytes = load<SCALE_WORDS>(stage + X_BYTES + W_BYTES + (row * NG + half * NG / 2) * 2);
#pragma unroll
  for (int i = 0; i < LOADS; i++) {
    const Words<4> w = load<4>(stage + X_BYTES + ((warp * CHUNKS + half * LOADS + i) * 32 + lane) * 16);
#pragma unroll
    for (int j = 0; j < EACH; j++) {
      const int step = i * EACH + j;
      if constexpr (NARROW) {
#pragma unroll
        for (int p = 0; p < 4; p++) a[step][p] = w.at[p];
      } else {
        Meaning m;
        if constexpr (IN_BYTES) {
          const int group = step * NG / STEPS;
          const u32 pair = scale_pair(bytes.at[group / 2], group % 2);
          m.scale[0] = twice(pair, 0), m.scale[1] = twice(pair, 1);
        } else m = meaning(stage, fixed, row, (half * HALF_STEPS + step) * NG / STEPS);
#pragma unroll
        for (int p = 0; p < 4; p++) a[step][p] = number(w.at[p], j, m, p & 1);
      }
    }
  }
}

// Waits for all products; the sums change behind the compiler's back, so no copy may move above the wait.
template <int N> DEVICE void settle(Sum* sum) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int i = 0; i < N; i++) {
    if constexpr (NARROW && !FLOATING) asm volatile("" : "+r"(*(int*)(sum + i)) :: "memory");
    else asm volatile("" : "+f"(*(float*)(sum + i)) :: "memory");
  }
}
DEVICE u64 tokens_at(u32 stage) { return (u64)1 << 62 | (u64)64 << 32 | (u64)1 << 16 | (u64)((stage & 0x3FFFFu) >> 4); }  // 128-byte swizzle
DEVICE void release(const Ring& ring, int slot, int lane) {
  if (lane >= PAIR) return;
  const u32 empty = ring.empty + slot * 8;
  arrive(PAIR > 1 ? in_rank(empty, lane) : empty);
}

// As `multiply` below, block after block: while one warpgroup adds, the other's products run.
DEVICE void multiply_exactly(Sum* sum, const Ring& ring, const Place& p, int way, int warp, int lane) {
  int slot = way, parity = 0;
  for (int s = way; s < p.steps; s += WAYS) {
    const u32 stage = ring.stages + slot * STAGE;
    u32 a[2][HALF_STEPS][4];
    wait(ring.full + slot * 8, parity);
    operands(a[0], stage, {}, 0, warp, lane), operands(a[1], stage, {}, 1, warp, lane);
#pragma unroll
    for (int c = 0; c < TOKENS; c += COLUMNS) {
      Sum part[COLUMNS / 2];
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int k = 0; k < STEPS; k++) wgmma(part, a[k / HALF_STEPS][k % HALF_STEPS], tokens_at(stage) + c * 8 + k * 2, k > 0);
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      settle<COLUMNS / 2>(part);
#pragma unroll
      for (int i = 0; i < COLUMNS / 2; i++) sum[c / 2 + i] += part[i];
    }
    release(ring, slot, lane);
    slot += WAYS;
    if (slot >= STAGES) slot -= STAGES, parity ^= 1;
  }
}

// This warp's 16 rows x TOKENS tokens over every WAYS-th block of K, from its way's first on.
DEVICE void multiply(Sum* sum, const Ring& ring, const Weights& w, const Place& p, int way, int warp, int lane) {
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

// ---- what happens to the sums: OWN eight-token columns of the tile are this thread's to finish ----
constexpr int PARTS = WAYS * DEPTH, EIGHTS = TOKENS / 8 / DEPTH, OWN = (EIGHTS + WAYS - 1) / WAYS;

// Adds the sums of the cluster in order: every block sends every block its columns, and waits for its own.
struct Inbox { u32 parts, arrived; };  // [DEPTH][EIGHTS][256] sums of four; a barrier that waits for all of them
DEVICE void exchange(Sum (*own)[4], const Sum (*sum)[4], const Inbox& inbox, int rank, int thread) {
#pragma unroll
  for (int j = 0; j < TOKENS / 8; j++) {
    const u32* v = (const u32*)sum[j];
    const u32 to = in_rank(inbox.parts + ((rank * EIGHTS + j % EIGHTS) * 256 + thread) * 16, j / EIGHTS), b = in_rank(inbox.arrived, j / EIGHTS);
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(to), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]), "r"(b) : "memory");
  }
  wait(inbox.arrived, 0);
#pragma unroll
  for (int i = 0; i < EIGHTS; i++)
#pragma unroll
    for (int q = 0; q < DEPTH; q++) {
      const Words<4> part = load<4>(inbox.parts + ((q * EIGHTS + i) * 256 + thread) * 16);
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const Sum v = *(const Sum*)&part.at[e];
        own[i][e] = q == 0 ? v : own[i][e] + v;
      }
    }
}

// Adds the sums of the ways and of the cluster, in that order; each way is left with its columns of the block's share.
DEVICE void gather(Sum (*own)[4], const Sum* sum, u8* memory, const Place& p, int way, int thread) {
  Quad* parts = (Quad*)memory;  // [WAYS][TOKENS / 8][256]
  workers_sync();               // every warp has read its last stage
#pragma unroll
  for (int j = 0; j < TOKENS / 8; j++) parts[(way * (TOKENS / 8) + j) * 256 + thread] = *(const Quad*)(sum + 4 * j);
  if (DEPTH > 1) cluster_sync(); else workers_sync();
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    const int column = i * WAYS + way, j = (DEPTH > 1 ? p.rank * EIGHTS : 0) + column;
    Sum v[PARTS][4];
#pragma unroll
    for (int q = 0; q < PARTS; q++) {
      u32* bits = (u32*)v[q];
      u32 from = shared(parts + (q % WAYS * (TOKENS / 8) + (column < EIGHTS ? j : 0)) * 256 + thread);
      if (DEPTH > 1) from = in_rank(from, q / WAYS);
      asm volatile("ld.shared::cluster.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(bits[0]), "=r"(bits[1]), "=r"(bits[2]), "=r"(bits[3]) : "r"(from) : "memory");
    }
#pragma unroll
    for (int e = 0; e < 4; e++) {
      own[i][e] = v[0][e];
#pragma unroll
      for (int q = 1; q < PARTS; q++) own[i][e] += v[q][e];
    }
  }
  if (DEPTH > 1) cluster_sync(); else workers_sync();  // all have read: the memory is free for the finished tile
}

// Leaves this part's sums in the workspace; true for the part that arrives last, with the sums of all parts.
DEVICE bool add_parts(Sum (*own)[4], Quad* workspace, int* arrivals, int* last, const Place& p, int whole) {
  const int unit = (p.tile - whole) * CLUSTER + p.rank;
  Quad* slots = workspace + (i64)unit * p.parts * OWN * THREADS + threadIdx.x;  // [parts][OWN][THREADS]
#pragma unroll
  for (int i = 0; i < OWN; i++) slots[(p.part * OWN + i) * THREADS] = *(Quad*)own[i];
  __threadfence();
  workers_sync();
  if (threadIdx.x == 0) {
    *last = atomicAdd(arrivals + unit, 1) == p.parts - 1;
    if (*last) arrivals[unit] = 0;  // ready for the next launch
    __threadfence();
  }
  workers_sync();
  if (!*last) return false;
  constexpr int BATCH = OWN < 8 ? OWN : 8;  // loads in flight
#pragma unroll
  for (int first = 0; first < OWN; first += BATCH)
    for (int part = 0; part < p.parts; part++) {
      Sum v[BATCH][4];
#pragma unroll
      for (int i = 0; i < BATCH; i++) {
        u32* bits = (u32*)v[i];
        asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(bits[0]), "=r"(bits[1]), "=r"(bits[2]), "=r"(bits[3]) : "l"(slots + (part * OWN + first + i) * THREADS) : "memory");
      }
#pragma unroll
      for (int i = 0; i < BATCH; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) own[first + i][e] = part == 0 ? v[i][e] : own[first + i][e] + v[i][e];
    }
  return true;
}

DEVICE int first_token(const Place& p) { return p.token_tile * TOKENS + (DEPTH > 1 ? p.rank * EIGHTS * 8 : 0); }

// What this thread's sums are multiplied by, and what is added: of its rows, and of its tokens. For FEW they are read before
// the products, so that the end waits for no memory.
struct Factors { float row[2], bias[2], token[OWN][2]; };
DEVICE Factors factors(const Output& out, const Place& p, int way, int warp, int lane) {
  const int row = p.row_tile * 128 + warp * 16 + (lane >> 2);
  Factors f = {{1.f, 1.f}, {0.f, 0.f}};
#pragma unroll
  for (int i = 0; i < 2; i++)
    if (out.row_scale && row + 8 * i < out.N) f.row[i] = out.row_scale[row + 8 * i];
  if (FEW) wait_for_previous();  // the scales of tokens come with x, and the bias may have been converted
#pragma unroll
  for (int i = 0; i < 2; i++)
    if (out.bias && row + 8 * i < out.N) f.bias[i] = low_float(out.bias[row + 8 * i]);
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    const int m = first_token(p) + (i * WAYS + way) * 8 + (lane & 3) * 2;
#pragma unroll
    for (int e = 0; e < 2; e++) f.token[i][e] = NARROW ? out.token_scale[min(m + e, out.M - 1)] : 1.f;
  }
  return f;
}

DEVICE void store(const Sum (*own)[4], const Factors& f, u8* memory, const Output& out, const Place& p, int way, int warp, int lane) {
  const int first = first_token(p);
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    const int column = i * WAYS + way;
    u32 v[2];
#pragma unroll
    for (int e = 0; e < 2; e++)
      v[e] = round_pair((float)own[i][2 * e] * (f.token[i][0] * f.row[e]) + f.bias[e], (float)own[i][2 * e + 1] * (f.token[i][1] * f.row[e]) + f.bias[e]);
    if (column < EIGHTS)
      asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};" ::"r"(shared(memory) + (column * 8 + (lane & 7)) * PITCH + (warp * 16 + (lane >> 3 & 1) * 8) * 2), "r"(v[0]), "r"(v[1]) : "memory");
  }
  workers_sync();
  for (int i = threadIdx.x; i < EIGHTS * 128; i += THREADS) {
    const int m = first + (i >> 4), n = p.row_tile * 128 + (i & 15) * 8;
    if (m >= out.M || n >= out.N) continue;
    const u8* from = memory + (i >> 4) * PITCH + (i & 15) * 16;
    u16* to = out.y + (i64)m * out.N + n;
    if (out.N % 8 == 0) *(Quad*)to = *(const Quad*)from;
    else for (int e = 0; e < 8 && n + e < out.N; e++) to[e] = ((const u16*)from)[e];
  }
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
    for (int s = 0; s < STAGES && s < p.steps; s++) fetch_weights(ring, w, p, s);
  }
  __syncwarp();
  let_next_start();
  if (PAIR > 1 || INBOX) cluster_meet(); else __syncthreads();
  if (warp >= WARPS) {
    if constexpr (WIDE) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp == WARPS && lane == 0) feed(ring, &x_map, w, p);
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
    if constexpr (EXACT) multiply_exactly(&sum[0][0], ring, p, way, warp & 7, lane);
    else multiply(&sum[0][0], ring, w, p, way, warp & 7, lane);
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
