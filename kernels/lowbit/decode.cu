// y[M, N] = x[M, K] w[N, K]^T for M <= 8 NT and 16-bit activations: the weights stream once.
//
// A block owns a range of 16-row tiles and, with CLUSTER = 2, half of K. Its warps split K further: block by block, which
// memory likes, or, where half of K is little, in ranges. Each copies the tiles it multiplies DEPTH pairs ahead into a
// ring of its own; the copy engine brings x, XSTAGES blocks ahead. Partial sums meet in shared memory in warp order.
// Macros beside common.cuh's: NT, WARPS, PAIRS (of tiles a round), DEPTH, XSTAGES, CLUSTER, SPREAD: 1 where M is 1 and
// codes have scales of groups, and these are to be applied to sums (decode_tile.cuh).
constexpr int AHEAD = (PAIRS - 1 + DEPTH) / PAIRS;  // blocks of inputs that the ring is ahead, at most
static_assert(DEPTH > 1 && DEPTH <= 2 * PAIRS, "the first copies reach the second round at most");
static_assert(!SPREAD || (FLOATING && GROUPED && NT == 1 && (NG == 4 || NG == 8)), "eight columns are eight steps");

// ---- x ----
// Two boxes of 8 NT swizzled rows of 128 bytes; rows past M are zeros, which take the place of others' columns where SPREAD.
constexpr int BOX = NT * 1024, XSTAGE = 2 * BOX;
struct Input { Map map; };
DEVICE void fetch_tokens(u32 stage, const Input& in, int block, u32 full) {
  expect(full, XSTAGE);
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %2, %3}], [%4];" ::"r"(stage), "l"(&in.map), "r"(0), "r"(block * 2), "r"(full) : "memory");
}
DEVICE u32 piece_of_row(u32 stage, int n, int j, int lane) {
  const bool own = (lane & 7) == j * 2 + (lane >> 4);
  const u32 piece = j % 2 * 4 + (lane >> 3), row = SPREAD ? !own : n * 8 + (lane & 7);
  return stage + j / 2 * BOX + row * 128 + (piece ^ (SPREAD ? row : lane & 7)) * 16;
}
DEVICE void read_tokens(Tokens& b, Totals& total, u32 stage, int lane) {
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int j = 0; j < STEPS / 2; j++)
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(b[n][4 * j]), "=r"(b[n][4 * j + 1]), "=r"(b[n][4 * j + 2]), "=r"(b[n][4 * j + 3])
                   : "r"(piece_of_row(stage, n, j, lane)) : "memory");
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
      for (int k = i * STEPS / NG; k < (i + 1) * STEPS / NG; k++) mma(c[k & 1], ones, b[n][2 * k], b[n][2 * k + 1]);
      total[n][i][0] = c[0][0] + c[1][0], total[n][i][1] = c[0][1] + c[1][1];
    }
}

// ---- the end ----
struct Output { u16* y; const u16* bias; const float *row_scale, *token_scale; int M, N; };
// What a row is times, and what is added to it. A thread asks for those of one row while the weights stream.
struct Row { float scale; u32 bias; };
DEVICE Row ask(const Output& out, int row) {
  const bool inside = (int)threadIdx.x < TILES * 16 && row < out.N;
  return {inside && out.row_scale ? out.row_scale[row] : 1.f, inside && out.bias ? out.bias[row] : 0u};
}
// A warp's sums of a tile: eight rows of a token side by side, placed so that what lanes write at once has its own banks.
constexpr int PARTIAL = NT * 128;
static_assert(WARPS * 32 >= TILES * 16, "a thread for every row");
DEVICE int eight(int m, int half) { return (m * 2 + half ^ (m >> 1 & 3)) * 8; }
DEVICE void leave(u32 to, const float (*sum)[NT][4], int M, int lane) {  // of all tiles
#pragma unroll
  for (int e = 0; e < 4; e++) {
    if (SPREAD && e % 2) continue;
    const int m = (lane & 3) * 2 + (e & 1);
    const u32 at = to + (eight(m, e >> 1) + (lane >> 2)) * 4;
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int t = 0; t < TILES; t++)
        asm volatile("{.reg .pred p;\nsetp.lt.s32 p, %2, %3;\n@p st.shared.f32 [%0], %1;}" ::"r"(at + (t * WARPS * PARTIAL + n * 128) * 4), "f"(sum[t][n][e]), "r"(n * 8 + m), "r"(M) : "memory");
  }
}
DEVICE void store(const Output& out, const Row* rows, int row, int m, float low, float high) {  // two neighbouring rows
  const u32 pair = round_pair(low * rows[0].scale + low_float(rows[0].bias), high * rows[1].scale + low_float(rows[1].bias));
  u16* to = out.y + (i64)m * out.N + row;
  if (row < out.N) to[0] = (u16)pair;
  if (row + 1 < out.N) to[1] = (u16)(pair >> 16);
}
// Adds the warps' sums of `count` tiles in warp order, then the two halves of K in rank order, and stores. Little code:
// it is not in the cache of instructions when it is needed.
DEVICE void finish(u32 partial, const Row* rows, float* exchange, const Output& out, int first, int begin, int count, int rank) {
  const int bits = 32 - __clz(out.M - 1);  // of a token's number
#pragma unroll 1
  for (int pass = 0; pass < CLUSTER; pass++) {
#pragma unroll 1
    for (int i = threadIdx.x; i < count * 8 << bits; i += WARPS * 32) {
      const int row = (i & 7) * 2, m = i >> 3 & (1 << bits) - 1, tile = i >> 3 + bits;
      const bool last = pass == CLUSTER - 1, own = CLUSTER == 1 || (tile & 1) == rank;
      if (m >= out.M || first + tile < begin || own != last) continue;  // an even tile may be another block's
      const u32 from = partial + (tile * WARPS * PARTIAL + eight(m, row >> 3) + row % 8) * 4;
      float low = 0.f, high = 0.f;
#pragma unroll
      for (int w = 0; w < WARPS; w++) {
        const Words<2> v = load<2>(from + w * PARTIAL * 4);
        low += __uint_as_float(v.at[0]), high += __uint_as_float(v.at[1]);
      }
      float* other = exchange + i * 2;
      if (CLUSTER > 1 && !last)
        asm volatile("st.shared::cluster.v2.f32 [%0], {%1,%2};" ::"r"(in_rank(shared(other), rank ^ 1)), "f"(low), "f"(high) : "memory");
      else
        store(out, rows + tile * 16 + row, (first + tile) * 16 + row, m, CLUSTER > 1 ? low + other[0] : low, CLUSTER > 1 ? high + other[1] : high);
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
struct Places { Row* rows; float *partial, *exchange; u32 ring, stages, full; };
DEVICE Places places(u8* raw, int warp) {
  __shared__ __align__(8) u64 barriers[WARPS * XSTAGES];
  u8* aligned = raw + (1024 - (shared(raw) & 1023)) % 1024;  // as swizzled rows must be
  Places p;
  p.stages = shared(aligned) + warp * XSTAGES * XSTAGE;
  p.full = shared(barriers + warp * XSTAGES);
  p.rows = (Row*)(aligned + WARPS * XSTAGES * XSTAGE);
  p.partial = (float*)(p.rows + TILES * 16);
  p.exchange = p.partial + TILES * WARPS * PARTIAL;  // two of them when CLUSTER is 2
  p.ring = shared(p.exchange + (CLUSTER > 1 ? 2 * TILES * PARTIAL : 0)) + warp * DEPTH * SLOT;
  return p;
}

// The copies that a warp starts: pairs of tiles into its ring, x into its stages.
struct Feed {
  const Input& in; const Part& part; const Places& at; Weights w;
  u32 slot;         // in use, and then filled
  int ahead, left;  // x: next block to fetch, fetches left
  DEVICE Feed(const Input& in, const Part& part, const Places& at, const Weights& w)
      : in(in), part(part), at(at), w(w), slot(at.ring), ahead(0), left(part.own() * part.rounds()) {
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
    if (part.lane == 0 && left > 0) fetch_tokens(at.stages + stage * XSTAGE, in, part.block(ahead), at.full + stage * 8);
    left--, ahead = ahead + 1 == part.own() ? 0 : ahead + 1;
  }
  DEVICE void item(int index) {  // of the first ones, before the loop: perhaps in the second round already
    const int block = index / PAIRS, next = block >= part.own();
    tiles(part.even() + index % PAIRS * 2 + (next ? TILES : 0), next ? block - part.own() : block);
  }
  DEVICE void start() {
    if (part.lane == 0) {
      for (int i = 0; i < XSTAGES; i++) barrier_init(at.full + i * 8, 1);
      asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;\nprefetch.tensormap [%0];" ::"l"(&in.map) : "memory");
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < DEPTH; i++) item(i);
    wait_for_previous();
#pragma unroll
    for (int i = 0; i < XSTAGES; i++) tokens(i);
  }
};

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
decode(const __grid_constant__ Input in, Weights w, Output out, int tiles, int unit) {
  extern __shared__ __align__(16) u8 memory[];
  const Part part(tiles, unit, w.blocks);
  const Places at = places(memory, part.warp);
  const int own = part.own(), lane = part.lane;
  let_next_start();
  Feed feed(in, part, at, w);
  feed.start();
  int stage = 0, parity = 0;
  for (int first = part.even(); first < part.mine.end; first += TILES) {
    const Row row = ask(out, first * 16 + threadIdx.x);
    float sum[TILES][NT][4], odd_sum[TILES][NT][4];  // these where FLOATING and not SPREAD
#pragma unroll
    for (int i = 0; i < TILES * NT * 4; i++) (&sum[0][0][0])[i] = (&odd_sum[0][0][0])[i] = 0;
    for (int g = 0; g < own; g++) {
      int next_first[AHEAD + 1], next_g[AHEAD + 1];  // where the ring is, so many blocks ahead: perhaps in the next round
#pragma unroll
      for (int i = 0; i <= AHEAD; i++) {
        const bool wraps = i > 0 && next_g[i - 1] + 1 == own;
        next_g[i] = i == 0 ? g : wraps ? 0 : next_g[i - 1] + 1, next_first[i] = i == 0 ? first : next_first[i - 1] + (wraps ? TILES : 0);
      }
      Tokens b; Totals total;
      wait(at.full + stage * 8, parity);
      read_tokens(b, total, at.stages + stage * XSTAGE, lane);
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
        if constexpr (FLOATING && !SPREAD) {
          if (even) multiply_scaled(sum[t], odd_sum[t], item[0], b);
          if (odd) multiply_scaled(sum[t + 1], odd_sum[t + 1], item[1], b);
        } else if constexpr (SPREAD) {
          Products products[2];
          if (even) products[0].multiply(item[0], b, total);
          if (odd) products[1].multiply(item[1], b, total);
          products[0].settle(sum[t], item[0], lane);
          products[1].settle(sum[t + 1], item[1], lane);
        } else {
          Products products;
          if (even) products.multiply(item[0], b, total), products.settle(sum[t], item[0], lane);
          if (odd) products.multiply(item[1], b, total), products.settle(sum[t + 1], item[1], lane);
        }
      }
    }
    const int count = min(TILES, part.mine.end - first);
#pragma unroll
    for (int i = 0; i < TILES * NT * 4; i++) (&sum[0][0][0])[i] += (&odd_sum[0][0][0])[i];
    if constexpr (SPREAD)
#pragma unroll
      for (int t = 0; t < TILES; t++) add_columns(sum[t][0]);
    leave(shared(at.partial + part.warp * PARTIAL), sum, out.M, lane);
    if (threadIdx.x < TILES * 16) at.rows[threadIdx.x] = row;
    __syncthreads();
    float* exchange = at.exchange + ((first - part.even()) / TILES & 1) * TILES * PARTIAL;
    finish(shared(at.partial), at.rows, exchange, out, first, part.mine.begin, count, part.rank);
    if (first + TILES < part.mine.end) __syncthreads();
  }
}
