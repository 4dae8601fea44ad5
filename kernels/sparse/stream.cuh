// A warp's way through its stream of sparse weights (layout.py, geometry.py), after cuda/device.cuh.
//
// The warp keeps RING chunks of values in a ring of shared memory. Each lane reads a column of its own, bank = lane; the
// table says when lanes change columns and when another chunk must have arrived. The first 256 bytes of the ring are
// there twice, at its end too, so that a look at three rows never wraps.
// Macros: WARPS, GROUPS, TILES, UNROLL (the cut), HEAD, RING; HALF, the type of the numbers.
constexpr int CHUNK = 2048, RING_BYTES = RING * CHUNK, MIRROR = 256, PITCH = RING_BYTES + MIRROR;
constexpr int WINDOW = 2;                          // chunks in use at a time
constexpr int STEPS = TILES * GROUPS, PARTS = (TILES + 1) / 2, PART_BLOCKS = GROUPS / UNROLL, BLOCKS = PARTS * PART_BLOCKS;
constexpr int MOST = 2 * UNROLL;                   // steps in a block
constexpr int BAND = TILES * 16;                   // rows of a stream
static_assert(GROUPS % UNROLL == 0 && UNROLL <= 2 && HEAD <= RING && RING == 4, "see geometry.py and layout.py");

struct Bitmap { const u32* masks; const u8* values; const u32 *starts, *table; int streams, outputs, inputs; };
// Numbers that the compiler would load anew in every step, were they written in the source: one that picks each byte of
// a word in a dot product of bytes, and what a value moves the read position and the shift by.
struct Picks { u32 byte[4], position, shift; };

// What a mask of four stands for: two selectors that spread up to four packed values to their places, the low halves of
// `low` and `high`; place 3 is zero where it is not needed (and `low` all ones above, where it is). `high` >> 16: values.
struct Entry { u32 low, high; };
DEVICE Entry entry(u32 mask) {
  u32 select[4], count = 0;
#pragma unroll
  for (int e = 0; e < 4; e++) {
    const u32 place = mask >> e & 1u ? count++ : 3u;
    select[e] = (2 * place + 1) << 4 | 2 * place;
  }
  return {(mask == 15u ? 0xFFFF0000u : 0u) | select[1] << 8 | select[0], count << 16 | select[3] << 8 | select[2]};
}
DEVICE void fill_entries(Entry* entries) { if (threadIdx.x < 16) entries[threadIdx.x] = entry(threadIdx.x); }

DEVICE u32 load_once(const u32* from) {
  u32 v;
  asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(from));
  return v;
}

struct Stream {
  const u8* ring;            // in shared memory
  u32 at, full;              // the same as an address; its barriers, one a chunk
  const u8* next;            // chunk to fetch next
  u32 left, chunks, have;    // chunks to fetch, in all, waited for
  const u32 *masks, *table;  // of the block at hand
  u32 mask[MOST], moves, then;
  u32 position, column;      // 64 times the values taken from the column; its byte in a row
  u32 entries;
  Picks pick;

  // Starts the first copies. Every warp of the block calls it, then the block synchronises before the first step.
  DEVICE Stream(u8* memory, u64* barriers, const Entry* table_of_masks, const Bitmap& w, int number, int lane, const Picks& picks)
      : ring(memory), at(shared(memory)), full(shared(barriers)), have(0), position(0), column(lane * 4) {
    const u32 first = w.starts[number];
    chunks = HEAD + (w.starts[number + 1] - first + 15) / 16;
    const u8* tail = w.values + ((u64)w.streams * (HEAD * 16) + first) * 128;
    if (lane == 0) {
#pragma unroll
      for (int i = 0; i < RING; i++) barrier_init(full + i * 8, 1);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      const u8* head = w.values + (u64)number * (HEAD * CHUNK);
#pragma unroll
      for (int i = 0; i < RING; i++)
        if (i < HEAD || i < chunks) {
          expect(full + i * 8, CHUNK);
          bulk(at + i * CHUNK, i < HEAD ? head + i * CHUNK : tail + (i - HEAD) * CHUNK, CHUNK, full + i * 8);
        }
    }
    next = tail + (RING - HEAD) * CHUNK;
    left = chunks > RING ? chunks - RING : 0;
    masks = w.masks + (u64)number * (STEPS * 32) + lane;
    table = w.table + number * BLOCKS;
#pragma unroll
    for (int i = 0; i < MOST; i++) mask[i] = load_once(masks + i * 32);
    moves = __ldg(table), then = __ldg(table + 1);
    pick = picks, entries = shared(table_of_masks);
    asm volatile("" : "+r"(entries), "+r"(pick.byte[0]), "+r"(pick.byte[1]), "+r"(pick.byte[2]), "+r"(pick.byte[3]), "+r"(pick.position), "+r"(pick.shift));
  }

  // Another chunk; what is before the window is free for the chunk that comes next.
  DEVICE void wait_for_chunk(int lane) {
    if (have >= WINDOW && left > 0) {
      if (lane == 0) {
        const u32 slot = (have - WINDOW) % RING, barrier = full + slot * 8;
        expect(barrier, slot == 0 ? CHUNK + MIRROR : CHUNK);
        bulk(at + slot * CHUNK, next, CHUNK, barrier);
        if (slot == 0) bulk(at + RING_BYTES, next, MIRROR, barrier);
      }
      next += CHUNK, left--;
    }
    wait(full + have % RING * 8, have / RING & 1);
    have++;
  }

  // Step `i` of the block, which has SIZE: the operands of four matrix instructions. Fetches a mask of the next block.
  template <int SIZE> DEVICE void step(u32 (*a)[4], int i, int lane) {
    const u32 m = mask[i], move = __dp4a(moves, pick.byte[i], 0u);
    mask[i] = load_once(masks + (SIZE + i) * 32);
    position = __shfl_sync(~0u, position, lane + move);
    column = (move * 4 + column) & 127u;
    if (move >> 5) wait_for_chunk(lane);
    asm volatile("" : "+r"(column) :: "memory");
    u32 shift = position >> 2;  // 16 for every second value
    const u32 even = m & 0x78787878u, odd = __funnelshift_r(m, m, 4) & 0x78787878u;
#pragma unroll
    for (int g = 0; g < 8; g++) {
      const int j = g >> 1, h = g & 1;
      u32 low, high;
      asm("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(low), "=r"(high) : "r"(__dp4a(h ? odd : even, pick.byte[j], entries)));
      const u8* from = ring + ((position & (RING_BYTES - 128)) | column);
      const u32 w0 = *(const u32*)from, w1 = *(const u32*)(from + 128), w2 = *(const u32*)(from + 256);
      const u32 first = __funnelshift_r(w0, w1, shift), second = __funnelshift_r(w1, w2, shift) & (low | 0xFFFFu);
      a[j][h] = __byte_perm(first, second, low), a[j][h + 2] = __byte_perm(first, second, high);
      position = __dp2a_lo(high, pick.position, position);
      if (g < 7) shift = __dp2a_lo(high, pick.shift, shift);
    }
  }

  // To the next block. The words past the last block's are there, and mean nothing.
  template <int SIZE> DEVICE void advance() {
    masks += SIZE * 32, table++;
    moves = then, then = __ldg(table + 1);
  }
};

// Calls work.block<row tiles, first of them>(first group) for every block of the stream, in order, and after the blocks of
// the same row tiles work.done<row tiles, first of them>().
template <int PART = 0, class Work> DEVICE void each_block(Work& work) {
  constexpr int PAIR = TILES - 2 * PART >= 2 ? 2 : 1;
#pragma unroll 1
  for (int b = 0; b < PART_BLOCKS; b++) work.template block<PAIR, 2 * PART>(b * UNROLL);
  work.template done<PAIR, 2 * PART>();
  if constexpr (PART + 1 < PARTS) each_block<PART + 1>(work);
}
