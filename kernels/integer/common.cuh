// Shared by every kernel of this folder, after cuda/device.cuh: the code -> number conversions.
// A source is specialised by these macros, set by its launcher, and HALF, the type of the output:
//   INT8  1 = int8 activations with a scale a token, 0 = activations of the output's type
//   BITS  4 or 8, width of a weight code;  GROUPED  1 = scales change along K;  NG  scales a row in a block (1, 2, 4)
//   ZERO  0 = symmetric, 1 = integer zeros in a byte (two rows' nibbles), 2 = zeros in the activations' type
#pragma once
constexpr bool INTEGER = INT8;
constexpr int CHUNKS = INTEGER ? 4 : BITS / 2;  // 16-byte pieces a lane holds of a 16 x 128 tile of codes
constexpr int STEPS = INTEGER ? 4 : 8;          // matrix instructions along a block
template <bool B, class T, class F> struct Pick { typedef T type; };
template <class T, class F> struct Pick<false, T, F> { typedef F type; };
typedef Pick<INTEGER, int, float>::type Sum;  // what the tensor cores accumulate in

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
// 8-bit code `which` (0, 1) of both halves of a word, exact, as two numbers: bit 7 weighs -128, the others add to it.
DEVICE u32 signed_pair(u32 w, int which) {
  const u32 b = which ? w >> 8 : w;
  if constexpr (HALF) return sub2(take<0x007F007Fu, 0x64006400u>(b), take<0x00800080u, 0x64006400u>(b));
  return sub2(take<0x007F007Fu, 0x43004300u>(b), take<0x00800080u, 0x43004300u>(b));
}
