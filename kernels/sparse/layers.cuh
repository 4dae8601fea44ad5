// A warp's way through its tiles of a weight in three layers (three_layer.py), after cuda/device.cuh.
//
// The copy engine brings the tiles, STAGES of them ahead. The warp turns a tile, where it lies, into two 2:4 operands:
// values that were moved into empty slots leave these for their own, in the second operand, and so do the remaining ones.
// Macros: WARPS, GROUPS, TILES (the cut, STEPS tiles of 256 inputs along K), STAGES.
constexpr int SLOT_BYTES = 4096, PAIRS_AT = SLOT_BYTES, STARTS_AT = 4608, MOVES_AT = 4736, TILE_BYTES = 5248;
constexpr int PITCH = STAGES * TILE_BYTES + SLOT_BYTES;  // shared memory of a warp
constexpr int STEPS = GROUPS / 4, COUNT = STEPS * TILES, BAND = TILES * 16;
static_assert(GROUPS % 4 == 0 && STAGES <= COUNT, "see three_layer.py");

constexpr int AT_ONCE = WARPS > 8 ? 8 : 16;  // moves for which registers are left

struct Layers { const u8* tiles; const u32 *starts, *rest; int outputs, inputs; };

DEVICE void move_to(u8* operand, u32 word) { *(u16*)(operand + (word & 0xFFFFu)) = (u16)(word >> 16); }

// Byte `e` of both words, the one of `low` below the other; their highest bits are not set.
DEVICE u32 bytes(u32 low, u32 high, int e) {
  u32 d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(low), "r"(high), "r"(0xC480u + 0x1111u * e));
  return d;
}

struct Walk {
  u8 *kept, *others;      // the two operands of the tile at hand, in shared memory: slots of two bytes
  u8* ring;
  u32 full;               // its barriers, one a stage
  const u8* next;         // tile to fetch next
  const u32 *edges, *rest;
  u32 from, to, after;    // where remaining values of the next tile begin, where they end, where the ones after it end
  u32 word;               // one of the next tile's
  int stage, parity, left;  // stage of the tile at hand; tiles to fetch

  // Starts the first copies.
  DEVICE Walk(u8* memory, u64* barriers, const Layers& w, int number, int lane)
      : others(memory + STAGES * TILE_BYTES), ring(memory), full(shared(barriers)), rest(w.rest), stage(0), parity(0), left(COUNT - STAGES) {
    const i64 first = (i64)number * COUNT;
    next = w.tiles + first * TILE_BYTES;
    if (lane == 0) {
#pragma unroll
      for (int i = 0; i < STAGES; i++) barrier_init(full + i * 8, 1);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#pragma unroll
      for (int i = 0; i < STAGES; i++) fetch(i);
    }
    __syncwarp();
    edges = w.starts + first;
    from = __ldg(edges), to = __ldg(edges + 1), after = __ldg(edges + 2);
    edges += 3;
    word = from + lane < to ? __ldg(rest + from + lane) : 0;
  }

  DEVICE void fetch(int into) {  // one lane's
    expect(full + into * 8, TILE_BYTES);
    bulk(shared(ring) + into * TILE_BYTES, next, TILE_BYTES, full + into * 8);
    next += TILE_BYTES;
  }

  // The next tile becomes the one at hand. `starts` is as long as this looks ahead.
  DEVICE void open(int lane) {
    kept = ring + stage * TILE_BYTES;
#pragma unroll
    for (int i = 0; i < 8; i++) *(Quad*)(others + i * 512 + lane * 16) = {0, 0, 0, 0};
    const u32 begin = from + lane, end = to, mine = word;
    from = to, to = after, after = __ldg(edges++);
    word = from + lane < to ? __ldg(rest + from + lane) : 0;
    __syncwarp();
    wait(full + stage * 8, parity);
    move(lane);
    if (begin < end) move_to(others, mine);
#pragma unroll 1
    for (u32 i = begin + 32; i < end; i += 32) move_to(others, __ldg(rest + i));
    __syncwarp();
  }

  // What this lane moves: 16 steps, four bits from source to source and four from destination to destination.
  DEVICE void move(int lane) {
    u32 at = *(const u32*)(kept + STARTS_AT + lane * 4);  // bytes passed: of the sources below, of the destinations above
    const Words<4> steps = *(const Words<4>*)(kept + MOVES_AT + lane * 16);
#pragma unroll
    for (int first = 0; first < 16; first += AT_ONCE) {
      u32 place[AT_ONCE], value[AT_ONCE], real[AT_ONCE / 4];
#pragma unroll
      for (int j = 0; j < AT_ONCE / 4; j++) {
        u32 low = steps.at[first / 4 + j] & 0x0F0F0F0Fu, high = steps.at[first / 4 + j] >> 4 & 0x0F0F0F0Fu;
        const u32 low_some = low + 0x0F0F0F0Fu, high_some = high + 0x0F0F0F0Fu;  // bit 4 of a byte: it is not zero
        const u32 none = ~(low_some | high_some) & 0x10101010u, both = none - (none >> 4);
        low = (low + both) * 2, high = (high + both) * 2;
        real[j] = low_some & high_some;
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int i = j * 4 + e;
          place[i] = at += bytes(low, high, e);
          if (real[j] >> (8 * e + 4) & 1u) value[i] = *(const u16*)(kept + (at & 0xFFFFu) - 2);
        }
      }
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++)
        if (real[i / 4] >> (8 * (i % 4) + 4) & 1u) {
          *(u16*)(kept + (place[i] & 0xFFFFu) - 2) = 0;
          *(u16*)(others + (place[i] >> 16) - 2) = (u16)value[i];
        }
    }
  }

  // The tile at hand is done with: its place is free for another.
  DEVICE void close(int lane) {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the copy engine writes where this warp wrote
    __syncwarp();
    if (left > 0) {
      if (lane == 0) fetch(stage);
      left--;
    }
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

// Positions of the second operand's values, for those of the first: of every four bits, the two positions not named.
DEVICE u32 complement(u32 pairs) {
  const u32 crossed = (~pairs >> 3 | pairs >> 1) & 0x11111111u;
  return pairs ^ 0x55555555u ^ crossed * 15u;
}
