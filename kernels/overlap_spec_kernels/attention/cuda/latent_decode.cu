// Latent attention of windows of decode on Hopper (sm_90a): what the kernel of _latent_attention_kernel.py computes of
// few rows of each request, in the same order, so with the same bits.
//
// Programs take one piece of a request's keys after another, for all of its (row, head) pairs; where pieces are too few
// for all multiprocessors, for a part of the pairs. Lengths decide, so one captured launch does either. A pair is a
// column of products, each a sum in one order whatever columns are beside it: its bits do not depend on the division.
//
// One warpgroup copies, two multiply. All products are transposed: keys, and then columns of values, are the 64 rows of
// a product, and pairs are its columns. A key lies in shared memory once, for its score and for its value.
//
//     queries  [9][PADDED pairs][64 columns]       as products read them; the rotated columns come first, here too
//     weights  [2][PADDED pairs][64 keys]          of a block and of the next one
//     ring     [BOXES][64 keys][64 columns]        a block of 64 keys has nine boxes, one after another
//     full     of a box: its copies have arrived
//     empty    of a box: the warps that read it last have done so
//
// The warpgroups take turns at scores: each has those of every other block, whose weights it leaves to both; the scores
// of one are multiplied while the weights of the one before it are computed. Of many pairs the ring has no room for two
// blocks, nor a thread registers for their scores: each warpgroup has half of the pairs of every block. Both add up
// weights times values, each of half of the columns, whose sums stay in registers.
//
// What a piece has found lies in memory in the order of the threads' registers, which latent_pieces.cu adds. Where
// pieces are more than there is memory for, a program takes all pieces of a request one after another and adds them as
// it goes, by the operations of latent_pieces.cu: this finds one piece, then.
//
// The command line defines WIDTH (rows of a request), HEADS, PAGE_SIZE, UNIT, BOXES and READ_BEFORE_WAIT: whether
// all but queries and the rows' own keys is there before the kernels before this one end. `latent_products.h` is written
// for PADDED and PART. latent_decode.py chooses.

#include "bfloat16.cuh"
#include "latent_products.h"  // PADDED, PART, multiply_keys(scores, keys, q, add), multiply_values(sums, values, p)

struct Work {
    const u16* q;                // [T, HEADS, RANK + 64]
    const u16* cache;            // [pages, PAGE_SIZE, RANK + 64]
    const int* page_table;       // [B, ..]
    const long long* positions;  // [T]
    float* sums;                 // [slots][PADDED / 8][RANK / 64][128 threads][4]
    float* stats;                // [slots][highest score, denominator][PADDED]
    float scale_log2;
    int q_row_stride, q_head_stride, table_stride;
    int num_requests;  // B
    int num_slots;
};

constexpr int RANK = 512;
constexpr int ROW = RANK + 64;  // numbers of a key
constexpr int KEYS = 64;        // of a block
constexpr int TILES = 4;        // of 64 columns of values, of a warpgroup
constexpr int OF_BLOCK = ROW / 64;
constexpr int BOX_BYTES = KEYS * 128;
constexpr int WEIGHTS_AT = OF_BLOCK * PADDED * 128;
constexpr int RING_AT = WEIGHTS_AT + 2 * PADDED * 128;
constexpr int PAIRS = WIDTH * HEADS;
constexpr int MOST_REQUESTS = 256;
constexpr bool SPLIT = PADDED > 40;  // pairs among the warpgroups, which otherwise take turns
constexpr int PARTS = PADDED / PART;
constexpr int MOST_TURNS = SPLIT ? 2 : 1;  // of programs that have parts: with more, reading keys again takes longer
constexpr float LOWEST = -1.0e30f;  // finite: no NaN with -inf
constexpr u32 ALL_LANES = 0xffffffff;
static_assert(PADDED % PART == 0 && PART % (SPLIT ? 16 : 8) == 0 && PAIRS <= PADDED && UNIT % KEYS == 0);
static_assert(BOXES >= (SPLIT ? OF_BLOCK : 2 * OF_BLOCK - 1));  // rotated columns are free once scores are multiplied

#include "latent_division.cuh"  // pieces_of, Items

// What both warpgroups know of each pair at a block; `weights` of the same number belong to it.
struct State {
    float highest[PADDED], denominator[PADDED], rescale[PADDED];
};

struct Common {
    u64 full[BOXES], empty[BOXES], ready[2], free[2];
    State states[2];
    float highest[2][4][PADDED];  // by warpgroup, of its warps' keys
    int sums[2][4][PADDED];
    float kept[PADDED], added[PADDED];
    int positions[WIDTH];  // of a request's rows
    int keys[MOST_REQUESTS], keys_before[MOST_REQUESTS];  // of requests; and before their rows' own
};

// A place in the ring, and the parity of its barriers' phase.
struct Place {
    int box = 0;
    u32 parity = 0;

    __device__ __forceinline__ void advance(int boxes) {
        box += boxes;
        if (box >= BOXES) {
            box -= BOXES;
            parity ^= 1;
        }
    }
    __device__ __forceinline__ Place after(int boxes) const {
        Place place = *this;
        place.advance(boxes);
        return place;
    }
};

#include "latent_decode_copies.cuh"
#include "latent_decode_blocks.cuh"

extern "C" __global__ void __launch_bounds__(384, 1) latent_decode(const __grid_constant__ Work work) {
    extern __shared__ __align__(1024) char memory[];
    __shared__ Common common;
    if (threadIdx.x == 0) {
        for (int box = 0; box < BOXES; ++box) {
            set_up(&common.full[box], 128);
            set_up(&common.empty[box], 4);
        }
        for (int i = 0; i < 2; ++i) {
            set_up(&common.ready[i], SPLIT ? 256 : 128);
            set_up(&common.free[i], 4);
        }
        show_barriers_to_cluster();
    }
    let_next_begin();
    if (!READ_BEFORE_WAIT) wait_for_kernels_before();
    for (int request = threadIdx.x; request < work.num_requests; request += 384) {
        common.keys[request] = static_cast<int>(work.positions[(request + 1) * WIDTH - 1]) + 1;
        common.keys_before[request] = static_cast<int>(work.positions[request * WIDTH]);
    }
    __syncthreads();
    Items items(common.keys, work.num_requests, work.num_slots);
    bool divided = PARTS > 1 && items.by_piece && items.total * PARTS <= MOST_TURNS * static_cast<int>(gridDim.x);
    if (threadIdx.x < 128) {
        give_registers<40>();
        copy_keys(work, items, divided ? PARTS : 1, memory, common);
    } else {
        take_registers<232>();
        if (divided)
            attend<PART>(work, items, memory, common);
        else
            attend<PADDED>(work, items, memory, common);
    }
}
