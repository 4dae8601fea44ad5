// Of gemm.cu: sizes, which tile a block makes, and the ring of stages that one warp fills.
constexpr int BLOCK = 128;  // inputs in a block
constexpr int WARPS = 8 * WAYS, THREADS = WARPS * 32, CLUSTER = PAIR * DEPTH, HALF_STEPS = STEPS / 2;
constexpr int X_BYTES = TOKENS * (NARROW ? 128 : 256), W_BYTES = 8 * CHUNKS * 512;
constexpr int S_BYTES = GROUPED ? 8 * SCALES : 0, Z_BYTES = !GROUPED || ZERO == 0 ? 0 : ZERO == 1 ? 64 * NG : 256 * NG;
constexpr int T_BYTES = NARROW && GROUPED && BITS == 8 ? 4 * TOKENS : 0;  // scales that tokens have for this block of inputs
constexpr int BYTES = X_BYTES + W_BYTES + S_BYTES + Z_BYTES, STAGE = (BYTES + T_BYTES + 1023) / 1024 * 1024;
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
// Scales of tokens are [blocks of inputs, M to the next multiple of four]: 16-byte pieces, as the copy engine wants.
DEVICE int pitch(int M) { return (M + 3) / 4 * 4; }
DEVICE int token_scale_bytes(const Place& p, int M) { return T_BYTES > 0 ? 4 * min(TOKENS, pitch(M) - p.token_tile * TOKENS) : 0; }
DEVICE void fetch_weights(const Ring& ring, const Weights& w, const Place& p, int M, int step) {
  const int slot = step % STAGES;
  const u32 to = ring.stages + slot * STAGE + X_BYTES, b = ring.full + slot * 8;
  const u64 at = (u64)min(p.row_tile, w.row_tiles - 1) * w.blocks + p.first + step;
  expect(b, BYTES + token_scale_bytes(p, M));
  bulk(to, w.codes + at * W_BYTES, W_BYTES, b);
  if constexpr (S_BYTES > 0) bulk(to + W_BYTES, w.scales + at * S_BYTES, S_BYTES, b);
  if constexpr (Z_BYTES > 0) bulk(to + W_BYTES + S_BYTES, w.zeros + at * Z_BYTES, Z_BYTES, b);
}
DEVICE void fetch_tokens(const Ring& ring, const Map* map, const Output& out, const Place& p, int step) {
  constexpr int BOXES = NARROW ? 1 : 2, SHARE = TOKENS / PAIR;
  const int own = PAIR > 1 ? p.rank * SHARE : 0;
  const int slot = step % STAGES;
#pragma unroll
  for (int i = 0; i < BOXES; i++)
    box<(PAIR > 1)>(ring.stages + slot * STAGE + (i * TOKENS + own) * 128, map, (p.first + step) * BLOCK + i * BLOCK / BOXES,
        p.token_tile * TOKENS + own, ring.full + slot * 8);
  if constexpr (T_BYTES > 0) {
    const float* from = out.token_scale + (i64)(p.first + step) * pitch(out.M) + p.token_tile * TOKENS;
    bulk(ring.stages + slot * STAGE + BYTES, (const u8*)from, token_scale_bytes(p, out.M), ring.full + slot * 8);
  }
}
DEVICE void feed(const Ring& ring, const Map* map, const Weights& w, const Output& out, const Place& p) {
  wait_for_previous();
  for (int s = 0; s < p.steps; s++) {
    if (s >= STAGES) {
      wait(ring.empty + s % STAGES * 8, (s / STAGES - 1) & 1);
      fetch_weights(ring, w, p, out.M, s);  // the first STAGES are on their way already
    }
    fetch_tokens(ring, map, out, p, s);
  }
}
