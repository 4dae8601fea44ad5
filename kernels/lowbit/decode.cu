// y[M, N] = x[M, K] w[N, K]^T for M <= 8 NT and 16-bit activations: the weights stream once.
//
// A block owns a range of 16-row tiles and, with CLUSTER = 2, half of K. Its warps split K further: block by block, which
// memory likes, or, where half of K is little, in ranges. Each copies the tiles it multiplies DEPTH pairs ahead into a
// ring of its own. x comes XSTAGES blocks ahead: with COUNTED by the lanes, among the copies of the weights, which suits
// few tokens; else by the copy engine, which suits many. Partial sums meet in shared memory in warp order.
// Macros beside common.cuh's: NT, WARPS, PAIRS (of tiles a round), DEPTH, XSTAGES, CLUSTER, COUNTED, SPREAD: 1 where M is
// 1 and codes have scales of groups, and these are to be applied to sums (decode_tile.cuh).
constexpr int PARTIAL = TILES * WARPS * NT * 32;
constexpr int AHEAD = (PAIRS - 1 + DEPTH) / PAIRS;  // blocks of inputs that the ring is ahead, at most
static_assert(DEPTH <= 2 * PAIRS, "the first copies reach the second round at most");
static_assert(DEPTH > 1 && (!COUNTED || DEPTH <= XSTAGES * PAIRS), "x must arrive with the weights that meet it");
static_assert(!SPREAD || (FLOATING && GROUPED && NT == 1 && (NG == 4 || NG == 8)), "eight columns are eight steps");

// ---- x ----
DEVICE bool own_column(int j, int lane) { return (lane & 7) == j * 2 + (lane >> 4); }  // else zeros take its place
#if COUNTED  // rows are padded, so that eight of them fall into different banks; tokens past M repeat the last one
constexpr int PITCH = 272;
struct Input { const u8* x; int K; };
DEVICE void fetch_tokens(u32 stage, const Input& in, int M, int block, int lane, bool when) {
  const int piece = lane % 16, k = block * 128 + piece * 8;
  const bool inside = k < in.K;
  const u8* from = in.x + (u64)(inside ? k : 0) * 2;
#pragma unroll
  for (int i = 0; i < NT * 4; i++) {
    const int row = lane / 16 + i * 2;
    copy_async(stage + row * PITCH + piece * 16, from + (u64)(u32)(row * in.K) * 2, when && row < M, inside ? 16 : 0);
  }
}
DEVICE u32 piece_of_row(u32 stage, int M, int n, int j, int lane) {
  if (SPREAD) return stage + (own_column(j, lane) ? (j * 4 + (lane >> 3)) * 16 : 256);
  const int row = min(n * 8 + (lane & 7), M - 1);
  return stage + row * PITCH + (j * 4 + (lane >> 3)) * 16;
}
#else  // two boxes of 8 NT swizzled rows of 128 bytes
constexpr int BOX = NT * 1024, XSTAGE = 2 * BOX;
struct Input { Map map; };
DEVICE void fetch_tokens(u32 stage, const Input& in, int block, u32 full) {
  expect(full, XSTAGE);
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %2, %3}], [%4];" ::"r"(stage), "l"(&in.map), "r"(0), "r"(block * 2), "r"(full) : "memory");
}
DEVICE u32 piece_of_row(u32 stage, int, int n, int j, int lane) {
  const u32 piece = j % 2 * 4 + (lane >> 3), row = SPREAD ? !own_column(j, lane) : n * 8 + (lane & 7);
  return stage + j / 2 * BOX + row * 128 + (piece ^ (SPREAD ? row : lane & 7)) * 16;
}
#endif
DEVICE void read_tokens(Tokens& b, Totals& total, u32 stage, int M, int lane) {
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int j = 0; j < STEPS / 2; j++)
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(b[n][4 * j]), "=r"(b[n][4 * j + 1]), "=r"(b[n][4 * j + 2]), "=r"(b[n][4 * j + 3])
                   : "r"(piece_of_row(stage, M, n, j, lane)) : "memory");
  if constexpr (SPREAD && !HALF)
#pragma unroll
    for (int i = 0; i < STEPS * 2; i++) b[0][i] = mul2(b[0][i], LIFT);
  if constexpr (!SHIFTED) return;
  constexpr u32 one = HALF ? 0x3C003C00u : 0x3F803F80u;
  const u32 ones[4] = {one, one, one, one};
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int i = 0; i < NG; i++) {
      float c[2][4] = {};  // by the engine: two chains, so that fewer products wait for each other
#pragma unroll
      for (int k = i * STEPS / NG; k < (i + 1) * STEPS / NG; k++) mma(c[COUNTED ? 0 : k & 1], ones, b[n][2 * k], b[n][2 * k + 1]);
      total[n][i][0] = COUNTED ? c[0][0] : c[0][0] + c[1][0], total[n][i][1] = COUNTED ? c[0][1] : c[0][1] + c[1][1];
    }
}

// ---- the end ----
struct Output { u16* y; const u16* bias; const float *row_scale, *token_scale; int M, N; };
DEVICE void store(const Output& out, int tile, int n, int lane, const float* v) {
#pragma unroll
  for (int e = 0; e < 4; e++) {
    const int row = tile * 16 + (lane >> 2) + (e >> 1) * 8, m = n * 8 + (lane & 3) * 2 + (e & 1);
    if (row >= out.N || m >= out.M) continue;
    float value = out.row_scale ? v[e] * out.row_scale[row] : v[e];
    if (out.bias) value += low_float(out.bias[row]);
    out.y[(i64)m * out.N + row] = (u16)round_pair(value, 0.f);
  }
}

// Adds the warps' partial sums of `count` tiles in warp order, then the two halves of K in rank order, and stores.
DEVICE void finish(float* partial, float* exchange, const Output& out, int first, int begin, int count, int rank) {
  for (int pass = 0; pass < CLUSTER; pass++) {
    for (int i = threadIdx.x; i < count * NT * 32; i += WARPS * 32) {
      const int lane = i & 31, unit = i >> 5, n = unit % NT, tile = unit / NT;
      float* mine = partial + ((tile * WARPS * NT + n) * 32 + lane) * 4;
      if (first + tile < begin) continue;  // a pair's even tile that is another block's
      const bool owner = CLUSTER == 1 || (unit & 1) == rank;
      if (pass == 0) {
        float v[4] = {mine[0], mine[1], mine[2], mine[3]};
#pragma unroll 3
        for (int w = 1; w < WARPS; w++)
#pragma unroll
          for (int e = 0; e < 4; e++) v[e] += mine[w * NT * 128 + e];
        if (CLUSTER == 1) store(out, first + tile, n, lane, v);
        else if (owner) { mine[0] = v[0], mine[1] = v[1], mine[2] = v[2], mine[3] = v[3]; }
        else {
          const u32 to = in_rank(shared(exchange + i * 4), rank ^ 1);
          const u32* bits = (const u32*)v;
          asm volatile("st.shared::cluster.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(bits[0]), "r"(bits[1]), "r"(bits[2]), "r"(bits[3]) : "memory");
        }
      } else if (owner) {
        float v[4];
#pragma unroll
        for (int e = 0; e < 4; e++) v[e] = mine[e] + exchange[i * 4 + e];
        store(out, first + tile, n, lane, v);
      }
    }
    if (CLUSTER > 1 && pass == 0) cluster_sync();
  }
}

// ---- what a warp does, and where ----
struct Range { int begin, end; };
DEVICE Range share(int all, int parts, int part) { return {(int)((u32)all * part / parts), (int)((u32)all * (part + 1) / parts)}; }
struct Part {
  Range mine;              // tiles of the block
  int warp, lane, rank;
  int first, step, count;  // blocks of inputs of the warp
  DEVICE Part(int tiles, int unit, int blocks) : warp(threadIdx.x >> 5), lane(threadIdx.x & 31), rank(CLUSTER > 1 ? cluster_rank() : 0) {
    mine = share(tiles / unit, gridDim.x / CLUSTER, blockIdx.x / CLUSTER);
    mine = {mine.begin * unit, mine.end * unit};
    if (CLUSTER > 1) {
      const Range slice = share(blocks, CLUSTER * WARPS, rank * WARPS + warp);
      first = slice.begin, step = 1, count = slice.end - slice.begin;
    } else first = warp, step = WARPS, count = (blocks - warp + WARPS - 1) / WARPS;
  }
  DEVICE int own() const { return count; }
  DEVICE int block(int index) const { return first + index * step; }
  DEVICE int even() const { return mine.begin & ~1; }  // pairs start at even tiles
  DEVICE int rounds() const { return (mine.end - even() + TILES - 1) / TILES; }
};
struct Places { float *partial, *exchange; u32 ring, stages, full; int stage_bytes; };
DEVICE Places places(u8* raw, int warp, int M) {
  Places p;
#if COUNTED  // a warp's stages of x follow its ring
  p.stage_bytes = M * PITCH;
  p.partial = (float*)raw;
  const int per_warp = DEPTH * SLOT + XSTAGES * p.stage_bytes;
#else        // the warps' stages of x come first, aligned as swizzled rows must be
  __shared__ __align__(8) u64 barriers[WARPS * XSTAGES];
  u8* aligned = raw + (1024 - (shared(raw) & 1023)) % 1024;
  p.stage_bytes = XSTAGE;
  p.stages = shared(aligned) + warp * XSTAGES * XSTAGE;
  p.full = shared(barriers + warp * XSTAGES);
  p.partial = (float*)(aligned + WARPS * XSTAGES * XSTAGE);
  constexpr int per_warp = DEPTH * SLOT;
#endif
  p.exchange = p.partial + PARTIAL * 4;  // two of them when CLUSTER is 2
  p.ring = shared(p.exchange + (CLUSTER > 1 ? 2 * TILES * NT * 128 : 0)) + warp * per_warp;
  if constexpr (COUNTED) p.stages = p.ring + DEPTH * SLOT;
  return p;
}

// The copies that a warp starts: pairs of tiles into its ring, x into its stages.
struct Feed {
  const Input& in; const Output& out; const Part& part; const Places& at; Weights w;
  u32 slot;         // in use, and then filled
  int ahead, left;  // x: next block to fetch, fetches left
  DEVICE Feed(const Input& in, const Output& out, const Part& part, const Places& at, const Weights& w)
      : in(in), out(out), part(part), at(at), w(w), slot(at.ring), ahead(0), left(part.own() * part.rounds()) {
    this->w.codes += part.lane * 16, this->w.scales += part.lane * 16, this->w.zeros += part.lane * 16;
  }
  DEVICE void step() { slot = slot + SLOT == at.ring + DEPTH * SLOT ? at.ring : slot + SLOT; }
  DEVICE void tiles(int tile, int block) {  // into the ring's place at hand, which it leaves
    const bool any = block < part.own();
    fetch(slot + part.lane * 16, w, tile, part.block(block), part.lane, any && tile >= part.mine.begin && tile < part.mine.end, any && tile + 1 < part.mine.end);
    copies_commit();
    step();
  }
  DEVICE void tokens(int stage) {
    const u32 to = at.stages + stage * at.stage_bytes;
#if COUNTED
    fetch_tokens(to, in, out.M, part.block(ahead), part.lane, left > 0);
#else
    if (part.lane == 0 && left > 0) fetch_tokens(to, in, part.block(ahead), at.full + stage * 8);
#endif
    left--, ahead = ahead + 1 == part.own() ? 0 : ahead + 1;
  }
  DEVICE void item(int index) {  // of the first ones, before the loop: perhaps in the second round already
    const int block = index / PAIRS, next = block >= part.own();
    tiles(part.even() + index % PAIRS * 2 + (next ? TILES : 0), next ? block - part.own() : block);
  }
  DEVICE void start() {
#if !COUNTED
    if (part.lane == 0) {
      for (int i = 0; i < XSTAGES; i++) barrier_init(at.full + i * 8, 1);
      asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;\nprefetch.tensormap [%0];" ::"l"(&in.map) : "memory");
    }
    __syncwarp();
#else
    if (SPREAD && part.lane < XSTAGES)  // behind a row, where no copy writes
      asm volatile("st.shared.v4.u32 [%0], {%1,%1,%1,%1};" ::"r"(at.stages + part.lane * at.stage_bytes + 256), "r"(0) : "memory");
#endif
    constexpr int BEFORE = COUNTED ? 2 : DEPTH;  // pairs of tiles asked for before x
#pragma unroll
    for (int i = 0; i < BEFORE; i++) item(i);
    wait_for_previous();
#pragma unroll
    for (int i = 0; i < XSTAGES; i++) tokens(i);
#if COUNTED
    copies_commit();
#pragma unroll
    for (int i = BEFORE; i < DEPTH; i++) item(i);
    copies_wait<DEPTH - BEFORE>();
    __syncwarp();
#endif
  }
};

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
decode(const __grid_constant__ Input in, Weights w, Output out, int tiles, int unit) {
  extern __shared__ __align__(16) u8 memory[];
  const Part part(tiles, unit, w.blocks);
  const Places at = places(memory, part.warp, out.M);
  const int own = part.own(), lane = part.lane;
  let_next_start();
  Feed feed(in, out, part, at, w);
  feed.start();
  int stage = 0, parity = 0;
  for (int first = part.even(); first < part.mine.end; first += TILES) {
    float sum[TILES][NT][4];
#pragma unroll
    for (int i = 0; i < TILES * NT * 4; i++) (&sum[0][0][0])[i] = 0;
    for (int g = 0; g < own; g++) {
      int next_first[AHEAD + 1], next_g[AHEAD + 1];  // where the ring is, so many blocks ahead: perhaps in the next round
#pragma unroll
      for (int i = 0; i <= AHEAD; i++) {
        const bool wraps = i > 0 && next_g[i - 1] + 1 == own;
        next_g[i] = i == 0 ? g : wraps ? 0 : next_g[i - 1] + 1, next_first[i] = i == 0 ? first : next_first[i - 1] + (wraps ? TILES : 0);
      }
      Tokens b; Totals total;
      if constexpr (COUNTED) copies_wait<DEPTH - 1>(), __syncwarp();
      else wait(at.full + stage * 8, parity);
      read_tokens(b, total, at.stages + stage * at.stage_bytes, out.M, lane);
      __syncwarp();
      feed.tokens(stage);
      if (++stage == XSTAGES) stage = 0, parity ^= 1;
#pragma unroll
      for (int t = 0; t < TILES; t += 2) {
        copies_wait<DEPTH - 1>();
        __syncwarp();  // scales come by other lanes
        const Item item[2] = {take(feed.slot, 0, lane), take(feed.slot, 1, lane)};
        __syncwarp();
        feed.tiles(next_first[(t / 2 + DEPTH) / PAIRS] + (t / 2 + DEPTH) % PAIRS * 2, next_g[(t / 2 + DEPTH) / PAIRS]);
        const bool even = first + t >= part.mine.begin && first + t < part.mine.end, odd = first + t + 1 < part.mine.end;
        if constexpr (SPREAD) {
          if (even && odd) multiply_spread<2>(sum + t, item, b, lane);
          else if (even) multiply_spread<1>(sum + t, item, b, lane);
          else if (odd) multiply_spread<1>(sum + t + 1, item + 1, b, lane);
        } else if constexpr (FLOATING) {
          if (even && odd) multiply_floating<2>(sum + t, item, b);
          else if (even) multiply_floating<1>(sum + t, item, b);
          else if (odd) multiply_floating<1>(sum + t + 1, item + 1, b);
        } else {
          if (even) multiply(sum[t], item[0], b, total);
          if (odd) multiply(sum[t + 1], item[1], b, total);
        }
      }
    }
    const int count = min(TILES, part.mine.end - first);
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
      for (int n = 0; n < NT; n++)
        if (t < count) {
          if (SPREAD) add_columns(sum[t][n]);
          float* p = at.partial + (((t * WARPS + part.warp) * NT + n) * 32 + lane) * 4;
          p[0] = sum[t][n][0], p[1] = sum[t][n][1], p[2] = sum[t][n][2], p[3] = sum[t][n][3];
        }
    __syncthreads();
    float* exchange = at.exchange + ((first - part.even()) / TILES & 1) * TILES * NT * 128;
    finish(at.partial, exchange, out, first, part.mine.begin, count, part.rank);
    if (first + TILES < part.mine.end) __syncthreads();
  }
}
