// Of gemm.cu: what happens to the sums. OWN eight-token columns of the tile are this thread's to finish.
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
    for (int e = 0; e < 2; e++) f.token[i][e] = NARROW && T_BYTES == 0 ? out.token_scale[min(m + e, out.M - 1)] : 1.f;
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
