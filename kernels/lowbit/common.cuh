// Shared by decode.cu and gemm.cu, after cuda/device.cuh: the code -> number conversions.
// A source is specialised by these macros, set by its launcher, and HALF, the type of the output:
//   NARROW  1 = 8-bit activations, 0 = activations of the output's type
//   BITS  4 or 8, width of a weight code;  FLOATING  1 = codes are E2M1 or E4M3, scales bytes (floats.py), 0 = integers
//   With NARROW, FLOATING is what is multiplied, E4M3 or int8: 4-bit codes are integers that become either.
//   GROUPED  1 = scales change along K;  NG  scales a row in a block (1, 2, 4, and 8 of the floating ones)
//   ZERO  0 = symmetric, 1 = integer zeros in a byte (two rows' nibbles), 2 = zeros in the activations' type
#pragma once
constexpr int CHUNKS = BITS / 2;       // 16-byte pieces a lane holds of a 16 x 128 tile of codes
constexpr int STEPS = NARROW ? 4 : 8;  // matrix instructions along a block
constexpr int SCALES = NARROW ? (BITS == 4 ? 32 : 0) : !FLOATING ? 32 * NG : GROUPED ? 16 * NG : 0;  // bytes of scales of a tile and block
template <bool B, class T, class F> struct Pick { typedef T type; };
template <class T, class F> struct Pick<false, T, F> { typedef F type; };
typedef Pick<NARROW && !FLOATING, int, float>::type Product;  // what the tensor cores accumulate in
typedef Pick<GROUPED, float, Product>::type Sum;              // what is added from one block of inputs to the next

// ---- numbers ----
DEVICE u32 sub2(u32 a, u32 b) {
  u32 d;
  if constexpr (HALF) asm("sub.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  else asm("sub.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
DEVICE u32 mul2(u32 a, u32 b) {
  u32 d;
  if constexpr (HALF) asm("mul.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  else asm("mul.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
template <u32 MASK, u32 MAGIC> DEVICE u32 take(u32 w) {  // (w & MASK) | MAGIC
  u32 d;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(d) : "r"(w), "n"(MASK), "n"(MAGIC));
  return d;
}
DEVICE u32 twice(u32 pair, int high) {  // said so that it becomes a modifier of the operation that takes it
  u32 d;
  if (high) asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {h, h};}" : "=r"(d) : "r"(pair));
  else asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {l, l};}" : "=r"(d) : "r"(pair));
  return d;
}
// 8-bit code `which` (0, 1) of both halves of a word, exact, as two numbers: bit 7 weighs -128, the others add to it.
DEVICE u32 signed_pair(u32 w, int which) {
  const u32 b = which ? w >> 8 : w;
  if constexpr (HALF) return sub2(take<0x007F007Fu, 0x64006400u>(b), take<0x00800080u, 0x64006400u>(b));
  return sub2(take<0x007F007Fu, 0x43004300u>(b), take<0x00800080u, 0x43004300u>(b));
}
DEVICE u32 turned(u32 w, int left) { u32 d; asm("shf.l.wrap.b32 %0, %1, %1, %2;" : "=r"(d) : "r"(w), "r"(left)); return d; }
// Floating-point code `which` of both halves of a word, as two numbers too small by a power of two; subnormal for small
// codes, which products with scales take.
DEVICE u32 floating_pair(u32 w, int which) {
  u32 v;
  if constexpr (BITS == 8) v = which ? (w << 4 & 0x80F080F0u) | (w >> 4 & 0x07000700u) : w & 0x87F087F0u;
  else if (which == 0) v = w & 0x81C081C0u;
  else if (which == 1) v = w << 3 & 0x81C081C0u;
  else if (which == 2) v = turned(w, 6) & 0x81C081C0u;
  else v = (turned(w, 6) & 0x001B001Bu) * 0x888u & 0x81C081C0u;
  if constexpr (HALF) v = (v & 0x80008000u) | (v & 0x7FFF7FFFu) << 3;
  return v;
}
// Scale `which` of a word of bytes (row r, row r + 8, twice), as numbers too large by the power of two of the codes, or
// in bfloat16 by another: TOP holds the uppermost bits of exponents.
template <u32 TOP = 0x70007000u> DEVICE u32 scale_pair(u32 w, int which) {
  const u32 v = which ? turned(w, 8) : w;
  return HALF ? (v & 0x0FF00FF0u) << 3 : take<0x0FF00FF0u, TOP>(v);
}
constexpr u32 UNIT = BITS == 4 ? HALF ? 0x74007400u : 0x7E807E80u : HALF ? 0x5C005C00u : 0x7B807B80u;  // such a scale of one
