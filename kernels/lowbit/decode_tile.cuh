// A tile of weights in decode.cu: copied to a ring of shared memory, taken from there, and multiplied.
// What a lane copies are its own shares of the matrix operands (layout.py). Copies are waited for by count, where loads
// to registers would share one scoreboard and all be waited for at once.
constexpr int TILES = 2 * PAIRS;
// A place in the ring: the codes of two tiles, then their scales and zeros, all as they lie in memory.
constexpr int CODES = CHUNKS * 512, ZEROS = ZERO == 0 ? 0 : ZERO == 1 ? 8 * NG : 32 * NG;
constexpr int SLOT = 2 * (CODES + SCALES + ZEROS);
constexpr int ROW_WORDS = SCALES == 0 ? 1 : SCALES / 32;         // of scales of two rows
constexpr int SCALE_WORDS = SPREAD ? 1 : ROW_WORDS;              // of a lane
constexpr bool SHIFTED = !FLOATING && (BITS == 4 || ZERO != 0);  // codes stand for numbers less a zero
constexpr float BASE = BITS == 8 ? 0.f : HALF ? 16.f : 128.f;    // what a raw 4-bit integer is read on top of

DEVICE void copy_async(u32 to, const u8* from, bool when) {  // 16 bytes
  asm volatile("{.reg .pred q;\nsetp.ne.b32 q, %2, 0;\n@q cp.async.cg.shared.global [%0], [%1], 16;}" ::"r"(to), "l"(from), "r"((int)when) : "memory");
}
DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> DEVICE void copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

struct Weights { const u8 *codes, *scales, *zeros; int blocks, row_tiles; };
struct Item { u32 code[CHUNKS][4]; Words<SCALE_WORDS> scale; Words<ZERO == 1 ? 1 : NG> zero; };

// Starts the copies of two neighbouring tiles, the first one even. `to` and `w` are offset by 16 bytes a lane.
DEVICE void fetch(u32 to, const Weights& w, int tile, int block, int lane, bool even, bool odd) {
  const u32 at = ((u32)tile / 8 * w.blocks + block) * 8 + tile % 8u, own = GROUPED ? at : tile;
#pragma unroll
  for (int i = 0; i < 2 * CHUNKS; i++) copy_async(to + 512 * i, w.codes + (u64)at * CODES + 512 * i, i < CHUNKS ? even : odd);
  if constexpr (SCALES > 0) copy_async(to + 2 * CODES, w.scales + (u64)own * SCALES, (even || odd) && lane < SCALES / 8);
  if constexpr (ZEROS > 0) copy_async(to + 2 * (CODES + SCALES), w.zeros + (u64)own * ZEROS, (even || odd) && lane < ZEROS / 8);
}
DEVICE Item take(u32 slot, int tile, int lane) {
  Item item;
#pragma unroll
  for (int i = 0; i < CHUNKS; i++) {
    const Words<4> v = load<4>(slot + lane * 16 + tile * CODES + 512 * i);
#pragma unroll
    for (int p = 0; p < 4; p++) item.code[i][p] = v.at[p];
  }
  const u32 scale = slot + 2 * CODES + tile * SCALES + (lane >> 2) * (4 * ROW_WORDS) + (SPREAD ? (lane & 3) * NG / 8 * 4 : 0), zero = slot + 2 * (CODES + SCALES) + tile * ZEROS;
  if constexpr (SCALES > 0) item.scale = load<SCALE_WORDS>(scale);
  if constexpr (ZERO == 1) item.zero.at[0] = load<1>(zero + ((lane >> 2) * NG & ~3)).at[0] >> ((lane >> 2) * NG % 4 * 8);
  if constexpr (ZERO == 2) item.zero = load<ZERO == 1 ? 1 : NG>(zero + (lane >> 2) * (4 * NG));
  return item;
}

DEVICE u32 raw_pair(u32 w, int i) {
  if constexpr (BITS == 8) return signed_pair(w, i);
  if constexpr (HALF) return take<0x03C003C0u, 0x4C004C00u>(i == 0 ? w << 6 : i == 1 ? w << 2 : i == 2 ? w >> 2 : w >> 6);
  return take<0x000F000Fu, 0x43004300u>(w >> (4 * i));
}
DEVICE void fragment(u32* a, const Item& item, int step) {  // the A operand of one matrix instruction
  constexpr int EACH = STEPS / CHUNKS;
  if constexpr (SPREAD) {
#pragma unroll
    for (int p = 0; p < 4; p++) a[p] = floating_pair(item.code[step / EACH][p], step % EACH);
  } else if constexpr (FLOATING) {
    const int group = step * NG / STEPS;
    const u32 scale = SCALES == 0 ? UNIT : scale_pair(item.scale.at[group / 2], group % 2);
#pragma unroll
    for (int p = 0; p < 4; p++) a[p] = mul2(floating_pair(item.code[step / EACH][p], step % EACH), SCALES == 0 ? UNIT : twice(scale, p & 1));
  } else {
#pragma unroll
    for (int p = 0; p < 4; p++) a[p] = raw_pair(item.code[step / EACH][p], step % EACH);
  }
}
DEVICE void offsets(const Item& item, int group, float& low, float& high) {  // -(BASE + zero) of rows r and r + 8
  if constexpr (ZERO == 0) low = high = BITS == 8 ? 0.f : -(BASE + 8.f);
  if constexpr (ZERO == 1) {
    const u32 z = item.zero.at[0] >> (8 * group);  // an integer under 2^23's exponent is that float plus the integer
    low = (8388608.f - BASE) - __uint_as_float(0x4B000000u | (z & 15u));
    high = (8388608.f - BASE) - __uint_as_float(0x4B000000u | ((z >> 4) & 15u));
  }
  if constexpr (ZERO == 2) {
    constexpr float shift = BITS == 8 ? 0.f : BASE + 8.f;
    low = -(shift + low_float(item.zero.at[group])), high = -(shift + high_float(item.zero.at[group]));
  }
}

typedef u32 Tokens[NT][STEPS * 2];   // B operands of a block of x
typedef float Totals[NT][NG][2];     // sum(x) of each scale group, for this lane's two tokens

// Where SPREAD, step k of the only token is column k of b and the others are zero, so that a column's sum is that of one
// scale. Scales go into these few sums, and codes enter as they are: subnormal, which matrix units take. What they lack in
// size is shared by x (finite below 2^64) and the scales.
constexpr u32 LIFT = 0x5F805F80u, LIFTED = 0x50005000u;  // 2^64; the top of the exponents of scales, less that

// The products of a tile and a block, and then `settle`, which scales and adds them to `sum`: apart, so that the matrix
// units are done with a tile when its products are asked for. What is left of a tile that is another block's is anything.
//
// Integers enter as BASE + code and zeros leave through sum(x): scale * (sum((BASE + code) x) - (BASE + zero) sum(x)), so
// that no code is converted more than once.
constexpr bool HALVES = NG == 1;  // two chains, so that fewer products wait for each other
constexpr int CHAINS = SPREAD || HALVES ? 2 : NG;
struct Products {
  float c[CHAINS][NT][4];
  DEVICE Products() {
#pragma unroll
    for (int i = 0; i < CHAINS * NT * 4; i++) asm("" : "=f"((&c[0][0][0])[i]));
  }
  DEVICE void multiply(const Item& item, const Tokens& b, const Totals& total) {
#pragma unroll
    for (int i = 0; i < CHAINS; i++) {
      float low = 0.f, high = 0.f;
      if (SHIFTED && i < NG) offsets(item, i, low, high);
#pragma unroll
      for (int n = 0; n < NT; n++) {
        const float t0 = SHIFTED && i < NG ? total[n][i][0] : 0.f, t1 = SHIFTED && i < NG ? total[n][i][1] : 0.f;
        c[i][n][0] = low * t0, c[i][n][1] = low * t1, c[i][n][2] = high * t0, c[i][n][3] = high * t1;
      }
    }
    u32 a[4];
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
      fragment(a, item, k);
#pragma unroll
      for (int n = 0; n < NT; n++) mma(c[HALVES || SPREAD ? k & 1 : k * NG / STEPS][n], a, b[n][2 * k], b[n][2 * k + 1]);
    }
  }
  DEVICE void settle(float (*sum)[4], const Item& item, int lane) const {
    if constexpr (SPREAD) {
      const u32 w = item.scale.at[0];  // of columns 2 (lane % 4) and the next: two groups, or one of two
      const u32 even = scale_pair<LIFTED>(NG == 8 ? w : turned(w, lane % 2 * 8), 0), odd = NG == 8 ? scale_pair<LIFTED>(w, 1) : even;
      sum[0][0] += low_float(even) * c[0][0][0], sum[0][1] += low_float(odd) * c[1][0][1];
      sum[0][2] += high_float(even) * c[0][0][2], sum[0][3] += high_float(odd) * c[1][0][3];
    } else {
#pragma unroll
      for (int i = 0; i < NG; i++) {
        const float low = low_float(item.scale.at[i]), high = high_float(item.scale.at[i]);
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
          for (int e = 0; e < 4; e++) sum[n][e] += (e < 2 ? low : high) * (HALVES ? c[0][n][e] + c[1][n][e] : c[i][n][e]);
      }
    }
  }
};
// Floating-point codes enter scaled: the product of code and scale is exact. Their sums stay with the matrix units, apart
// for even and odd steps.
DEVICE void multiply_scaled(float (*even)[4], float (*odd)[4], const Item& item, const Tokens& b) {
  u32 a[4];
#pragma unroll
  for (int k = 0; k < STEPS; k++) {
    fragment(a, item, k);
#pragma unroll
    for (int n = 0; n < NT; n++) mma(k % 2 ? odd[n] : even[n], a, b[n][2 * k], b[n][2 * k + 1]);
  }
}
DEVICE void add_columns(float* sum) {  // of all groups, into column 0
  sum[0] += sum[1], sum[2] += sum[3];
#pragma unroll
  for (int i = 1; i < 4; i *= 2) sum[0] += __shfl_xor_sync(~0u, sum[0], i), sum[2] += __shfl_xor_sync(~0u, sum[2], i);
}
