// A handful of tokens in a kernel whose warps share K: x as matrix operands take it, sums that meet, the result.
//
// Comes after cuda/device.cuh. Macro: EXACT, 1 where the inputs need no bounds.
struct Output { u16* y; const u16* bias; int tokens; };

template <int EIGHTS> struct Tokens {  // a lane's share of x for 64 inputs: of each eight tokens, one token's two pieces
  Words<4> piece[EIGHTS][2];
  // `from`: of the lane's first token, at the lane's first input, which is `input`. Tokens that are not there mean nothing.
  template <class Weight> DEVICE void load(const u16* from, const Weight& w, int tokens, int input, int lane) {
#pragma unroll
    for (int n = 0; n < EIGHTS; n++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        if (!EXACT) piece[n][i] = {};
        if (n * 8 + (lane >> 2) < tokens && (EXACT || input + i * 32 < w.inputs)) {
          u32* v = piece[n][i].at;
          asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "l"(from + (i64)(n * 8) * w.inputs + i * 32));
        }
      }
  }
};

// Sums of 16 rows (from `row` on) and eight tokens (from `token` on), as the matrix instructions leave them.
template <class Weight> DEVICE void store(const Output& out, const Weight& w, int row, int token, int lane, const float* sums) {
#pragma unroll
  for (int e = 0; e < 4; e++) {
    const int n = row + (lane >> 2) + (e >> 1) * 8, m = token + (lane & 3) * 2 + (e & 1);
    if (n >= w.outputs || m >= out.tokens) continue;
    const float bias = out.bias ? low_float(out.bias[n]) : 0.f;
    out.y[(i64)m * w.outputs + n] = (u16)round_pair(sums[e] + bias, 0.f);
  }
}

// The sums of COUNT warps over TALL times 16 rows (from `row` on), added in the order of warps in `memory`, free by now.
template <int COUNT, class Weight, int TALL, int EIGHTS>
DEVICE void add_up(const Output& out, const Weight& w, int row, u8* memory, int warp, int lane, const float (&sum)[TALL][EIGHTS][4]) {
  Quad* parts = (Quad*)memory;  // [TALL][COUNT][EIGHTS][32]
#pragma unroll
  for (int t = 0; t < TALL; t++)
#pragma unroll
    for (int n = 0; n < EIGHTS; n++)
      if (n * 8 + (lane & 3) * 2 < out.tokens) parts[((t * COUNT + warp) * EIGHTS + n) * 32 + lane] = *(const Quad*)sum[t][n];
  __syncthreads();
  for (int i = threadIdx.x; i < TALL * EIGHTS * 32; i += COUNT * 32) {
    const int n = i / 32 % EIGHTS, t = i / 32 / EIGHTS;
    if (n * 8 + (lane & 3) * 2 >= out.tokens) continue;
    float total[4] = {};
#pragma unroll
    for (int v = 0; v < COUNT; v++) {
      const Quad part = parts[((t * COUNT + v) * EIGHTS + n) * 32 + lane];
      total[0] += __uint_as_float(part.x), total[1] += __uint_as_float(part.y), total[2] += __uint_as_float(part.z), total[3] += __uint_as_float(part.w);
    }
    store(out, w, row + t * 16, n * 8, lane, total);
  }
}
