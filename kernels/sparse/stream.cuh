// A warp's way through its stream of sparse weights (layout.py, geometry.py), after cuda/device.cuh.
//
// The warp keeps RING chunks of values in a ring of shared memory. Each lane reads a column of its own, bank = lane; the
// table says when lanes change columns and when another chunk must have arrived. The first 256 bytes of the ring are
// there twice, at its end too, so that a look at three rows never wraps.
// Macros: WARPS, GROUPS, TILES, TOGETHER, UNROLL (the cut), HEAD, RING; RUN, streams that a warp goes through one after the
// other, neighbours along K, each with a ring of its own.
constexpr int CHUNK = 2048, RING_BYTES = RING * CHUNK, MIRROR = 256, PITCH = RING_BYTES + MIRROR;
constexpr int WINDOW = 2;                          // chunks in use at a time
constexpr int SETS = (TILES + TOGETHER - 1) / TOGETHER, SET_BLOCKS = GROUPS / UNROLL, BLOCKS = SETS * SET_BLOCKS;
constexpr int STEPS = TILES * GROUPS;
constexpr int MOST = TOGETHER * UNROLL, WORDS = (MOST + 3) / 4;  // steps in a block, words of the table for it
constexpr int LAST = (TILES - (SETS - 1) * TOGETHER) * UNROLL;   // steps in a stream's last block
constexpr int BAND = TILES * 16;                   // rows of a stream
static_assert(GROUPS % UNROLL == 0 && MOST <= 8 && HEAD <= RING && RING == 4, "see geometry.py and layout.py");

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
// The same, where a barrier follows that the compiler would move the load behind, were it free to.
DEVICE u32 load_early(const u32* from) {
  u32 v;
  asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}
// __byte_perm would mask the selector first, which may have more bits here than count.
DEVICE u32 permute(u32 a, u32 b, u32 selector) {
  u32 v;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(selector));
  return v;
}

struct Stream {
  u32 at, full;              // the ring in shared memory; its barriers, one a chunk
  const u8* next;            // chunk to fetch next
  u32 left, have;            // chunks to fetch, waited for
  const u32 *masks, *table;  // of the block at hand
  u32 mask[MOST], moves[WORDS], then[WORDS];
  u32 position, column;      // 64 times the values taken from the column; its byte in a row
  u32 entries;
  Picks pick;
  const u8* tails;           // rows beyond the heads
  u32 starts[RUN + 1];       // where those of this stream begin, and of the streams after it
  int after;                 // streams to come

  // Starts the first copies of `streams` streams from `number` on. Every warp of the block calls it, then the block
  // synchronises before the first step.
  DEVICE Stream(u8* memory, u64* barriers, const Entry* table_of_masks, const Bitmap& w, int number, int streams, int lane, const Picks& picks)
      : at(shared(memory)), full(shared(barriers)), after(streams - 1) {
    masks = w.masks + (u64)number * (STEPS * 32) + lane;
    table = w.table + number * (BLOCKS * WORDS);
#pragma unroll
    for (int s = 0; s <= RUN; s++) starts[s] = load_early(w.starts + number + min(s, streams));
#pragma unroll
    for (int i = 0; i < MOST; i++) mask[i] = load_early(masks + i * 32);
#pragma unroll
    for (int i = 0; i < WORDS; i++) moves[i] = load_early(table + i), then[i] = load_early(table + WORDS + i);
    tails = w.values + (u64)w.streams * (HEAD * CHUNK);
    if (lane == 0) {
#pragma unroll
      for (int i = 0; i < RING * RUN; i++) barrier_init(full + i * 8, 1);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#pragma unroll
      for (int s = 0; s < RUN; s++) {
        const u8 *head = w.values + (u64)(number + s) * (HEAD * CHUNK), *tail = tails + (u64)starts[s] * 128;
        const int rows = s < streams ? (int)(starts[s + 1] - starts[s]) : -HEAD * 16;
#pragma unroll
        for (int i = 0; i < RING; i++)
          if (i < HEAD ? s == 0 || s < streams : (i - HEAD) * 16 < rows) {
            const u32 barrier = full + (s * RING + i) * 8;
            expect(barrier, CHUNK);
            bulk(at + s * PITCH + i * CHUNK, i < HEAD ? head + i * CHUNK : tail + (i - HEAD) * CHUNK, CHUNK, barrier);
          }
      }
    }
    pick = picks, entries = shared(table_of_masks);
    asm volatile("" : "+r"(entries), "+r"(pick.byte[0]), "+r"(pick.byte[1]), "+r"(pick.byte[2]), "+r"(pick.byte[3]), "+r"(pick.position), "+r"(pick.shift));
  }

  // Before the first step of a stream; late, since it waits for words that the constructor has asked for.
  DEVICE void begin(int lane) {
    const u32 chunks = HEAD + (starts[1] - starts[0] + 15) / 16;
    next = tails + (u64)starts[0] * 128 + (RING - HEAD) * CHUNK;
    left = chunks > RING ? chunks - RING : 0;
    have = 0, position = 0, column = lane * 4;
  }

  // To the stream after this one, at the end of this one: the words at hand are its first, but for masks of a longer block.
  DEVICE void follow() {
    at += PITCH, full += RING * 8, after--;
#pragma unroll
    for (int s = 0; s < RUN; s++) starts[s] = starts[s + 1];
#pragma unroll
    for (int i = LAST; i < MOST; i++) mask[i] = load_once(masks + i * 32);
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
    const u32 m = mask[i], move = __dp4a(moves[i / 4], pick.byte[i % 4], 0u);
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
      u32 w0, w1, w2;
      const u32 from = at + ((position & (RING_BYTES - 128)) | column);
      asm("ld.shared.u32 %0, [%1];" : "=r"(w0) : "r"(from));
      asm("ld.shared.u32 %0, [%1 + 128];" : "=r"(w1) : "r"(from));
      asm("ld.shared.u32 %0, [%1 + 256];" : "=r"(w2) : "r"(from));
      const u32 first = __funnelshift_r(w0, w1, shift), second = __funnelshift_r(w1, w2, shift) & (low | 0xFFFFu);
      a[j][h] = permute(first, second, low), a[j][h + 2] = permute(first, second, high);
      position = __dp2a_lo(high, pick.position, position);
      if (g < 7) shift = __dp2a_lo(high, pick.shift, shift);
    }
  }

  // To the next block. The words past the last block's are there; they are the next stream's, or mean nothing.
  template <int SIZE> DEVICE void advance() {
    masks += SIZE * 32, table += WORDS;
#pragma unroll
    for (int i = 0; i < WORDS; i++) moves[i] = then[i], then[i] = __ldg(table + WORDS + i);
  }
};

// Calls work.block<row tiles, first of them>(first group) for every block of the stream, in order, and after the blocks of
// the same row tiles work.done<row tiles, first of them>().
template <int SET = 0, class Work> DEVICE void each_block(Work& work) {
  constexpr int SIZE = TILES - SET * TOGETHER < TOGETHER ? TILES - SET * TOGETHER : TOGETHER;
#pragma unroll 1
  for (int b = 0; b < SET_BLOCKS; b++) work.template block<SIZE, SET * TOGETHER>(b * UNROLL);
  work.template done<SIZE, SET * TOGETHER>();
  if constexpr (SET + 1 < SETS) each_block<SET + 1>(work);
}
// The same for every stream that the warp goes through.
template <class Work> DEVICE void each_stream(Work& work, int lane) {
#pragma unroll 1
  for (;;) {
    work.stream.begin(lane);
    each_block(work);
    if (RUN == 1 || work.stream.after == 0) break;
    work.stream.follow();
  }
}
