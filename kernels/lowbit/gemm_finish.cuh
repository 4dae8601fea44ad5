// Of gemm.cu: what happens to the sums. OWN eight-token columns of the tile are this thread's to finish.
constexpr int PARTS = WAYS * DEPTH, EIGHTS = TOKENS / 8 / DEPTH, OWN = (EIGHTS + WAYS - 1) / WAYS;

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

DEVICE void store(const Sum (*own)[4], u8* memory, const Output& out, const Place& p, int way, int warp, int lane) {
  const int row = p.row_tile * 128 + warp * 16 + (lane >> 2), first = p.token_tile * TOKENS + (DEPTH > 1 ? p.rank * EIGHTS * 8 : 0);
  float scale[2] = {1.f, 1.f}, bias[2] = {0.f, 0.f};
#pragma unroll
  for (int i = 0; i < 2; i++)
    if (row + 8 * i < out.N) {
      if (out.row_scale) scale[i] = out.row_scale[row + 8 * i];
      if (out.bias) bias[i] = low_float(out.bias[row + 8 * i]);
    }
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    const int column = i * WAYS + way, m = first + column * 8 + (lane & 3) * 2;
    float t[2] = {1.f, 1.f};
    if (NARROW && T_BYTES == 0) t[0] = out.token_scale[min(m, out.M - 1)], t[1] = out.token_scale[min(m + 1, out.M - 1)];
    u32 v[2];
#pragma unroll
    for (int e = 0; e < 2; e++)
      v[e] = round_pair((float)own[i][2 * e] * (t[0] * scale[e]) + bias[e], (float)own[i][2 * e + 1] * (t[1] * scale[e]) + bias[e]);
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
