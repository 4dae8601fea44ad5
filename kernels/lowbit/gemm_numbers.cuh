// Of gemm.cu: codes in a stage to the numbers that the matrix units take, a half of a block of inputs at a time.
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
// Of eight 4-bit integers (plus 8) the even or the odd ones as int8, times 16, or as E4M3, times 2^-9: codes below 16
// are the numbers below 2^-5 in equal steps.
struct Bytes { u32 even, odd; };
constexpr float NARROW_UNIT = FLOATING ? 512.f : 1.f / 16;
DEVICE Bytes eight_bits(u32 w) {
  if constexpr (!FLOATING) return {(w << 4 ^ 0x88888888u) & 0xF0F0F0F0u, (w ^ 0x88888888u) & 0xF0F0F0F0u};
  const u32 below = ~w >> 3 & 0x11111111u;                         // 1 for a negative number
  const u32 size = ((w ^ below * 7) & 0x77777777u) + below;        // in nibbles: w - 8, or 8 - w
  return {(size & 0x0F0F0F0Fu) | (~w << 4 & 0x80808080u), (size >> 4 & 0x0F0F0F0Fu) | (~w & 0x80808080u)};
}
DEVICE void operands(u32 (*a)[4], u32 stage, const Meaning& fixed, int half, int warp, int lane) {
  constexpr int EACH = STEPS / CHUNKS, LOADS = CHUNKS / 2;  // matrix steps a 16-byte piece holds, pieces in half a block
  const int row = warp * 8 + (lane >> 2);
  constexpr bool IN_BYTES = FLOATING && GROUPED && !NARROW;
  constexpr int SCALE_WORDS = IN_BYTES ? NG / 4 : 1;  // of a lane, for half a block
  Words<SCALE_WORDS> bytes;
  if constexpr (IN_BYTES) bytes = load<SCALE_WORDS>(stage + X_BYTES + W_BYTES + (row * NG + half * NG / 2) * 2);
#pragma unroll
  for (int i = 0; i < LOADS; i++) {
    const Words<4> w = load<4>(stage + X_BYTES + ((warp * CHUNKS + half * LOADS + i) * 32 + lane) * 16);
#pragma unroll
    for (int j = 0; j < EACH; j++) {
      const int step = i * EACH + j;
      if constexpr (NARROW && BITS == 4) {  // inputs come in the order in which this unpacks: narrow.py
#pragma unroll
        for (int p = 0; p < 2; p++) {
          const Bytes v = eight_bits(w.at[2 * j + p]);
          a[step][p] = v.even, a[step][p + 2] = v.odd;
        }
      } else if constexpr (NARROW) {
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
