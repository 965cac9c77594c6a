// softmax(q K^T) V of chunks of prompts on Hopper (sm_90a), causal, with keys and values in pages: what the kernel of
// paged_attention.py computes, in the manner of FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608).
//
// A program has 128 (row, head) pairs of one request and one KV head: 64 for each of two warpgroups, whose scores, sums
// and softmax stay in registers. A third warpgroup copies. While one warpgroup multiplies, the other one exponentiates:
// they take turns at beginning products. Within one, the sums of a tile of keys are multiplied while the scores of the
// next tile are exponentiated. CLUSTER neighbouring programs have neighbouring rows and the same keys: each copies its
// part of a tile to all of them, or the L2 cache would bound 128 pairs.
//
//     ring    [stage] | [128 / 8 keys][HEAD_DIM / 64][8 keys][64] |      keys and values in turn: K0 K1 V0 K2 V1 ..
//     full    of a stage: its bytes have arrived, from all programs of the cluster
//     empty   of a stage: the multiplying warpgroups of all programs of the cluster have read it
//
// q stays in registers: a product that read both operands from shared memory would, with the copies that arrive beside
// it, need all of its 128 bytes a clock.
//
// Counted for heads of 128, a tile of 128 keys takes 2048 clocks of the tensor cores. Beside these, 16384 exponentials
// take 1024 clocks, and 9 warps issue about 700 instructions on each scheduler. 64 KB come for CLUSTER programs. At the
// limit of its power the GPU clocks down, so each instruction and byte less makes long prompts faster.
//
// In this order of a stage a copy brings whole keys of a page, and both products find rows at even distances: K is read
// along its rows, V across them.
//
// The keys of a tile may be divided among `splits`; then sums are not divided by their weights, as `_combine_kernel` of
// paged_attention.py expects. What is divided also takes that kernel's time. So a tile with few keys is left whole: one
// program has all of them, and its stats say so.
//
// The command line defines GROUP (query heads of a KV head), KV_HEADS, HEAD_DIM, PAGE_SIZE, BOX (keys of a copy),
// STAGES and CLUSTER; `attention_products.h` is written for HEAD_DIM and the type. paged_chunks.py chooses.

#include "hopper.cuh"
#include "attention_products.h"  // MOST, multiply_keys(scores, q, k, add), multiply_values(sums, p, v), round2

// What the kernel is given beside the tensor maps; the same fields in paged_chunks.py.
struct Work {
    const u16* q;                // [T, heads, HEAD_DIM]
    u16* out;                    // [T, heads, HEAD_DIM], of tiles that are not divided
    float* sums;                 // [T, heads, splits, HEAD_DIM]; or null if there is one split, as is
    float* stats;                // [T, heads, splits, 2]: a score, sum of weights relative to it; or (0, WHOLE)
    const int* page_table;       // [B, ..]
    const int* row_starts;       // [B + 1]
    const long long* positions;  // [T]
    float scale_log2;
    int q_row_stride;
    int q_head_stride;
    int table_stride;
    int num_requests;  // B
    int num_splits;
    int least_keys;  // of a tile that is divided
    int by_head;     // whether the heads' tiles begin one head after another
};

constexpr int GROUPS = 2;   // warpgroups that multiply
constexpr int PAIRS = 64;   // of a warpgroup
constexpr int KEYS = 128;   // of a tile
constexpr int ROWS = GROUPS * PAIRS / GROUP;  // of a program
constexpr int EIGHT_KEYS = HEAD_DIM / 64 * 1024;  // bytes of eight keys
constexpr int TILE_BYTES = KEYS * HEAD_DIM * 2;
constexpr int BOXES = KEYS / BOX / CLUSTER;  // of a tile, that one program copies
constexpr int SCORES = KEYS / 2;             // of a thread: 64 x KEYS over 128 threads
constexpr int SUMS = HEAD_DIM / 2;
constexpr float WHOLE = -1.0f;      // instead of a sum of weights
constexpr float LOWEST = -1.0e30f;  // finite: a row whose keys so far are all masked subtracts it without a NaN
constexpr u32 ALL_LANES = 0xffffffff;
static_assert(BOXES > 0 && BOXES <= 32 && PAGE_SIZE % BOX == 0, "a lane of a warp begins a copy, within a page");

struct Barriers {
    u64 full[STAGES];
    u64 empty[STAGES];
};

using Place = RingPlace<STAGES>;

#include "paged_chunks_parts.cuh"  // Part, part_of_program(work, rank)
#include "paged_chunks_softmax.cuh"  // Softmax

// ---- the warpgroup that copies: one warp of it ----

// Where the cache has this lane's box of a tile: its first key, in eights. Beyond the last key, the last box again.
__device__ __forceinline__ int eight_of_box(const Work& work, const Part& part, int tile, u32 rank) {
    int lane = threadIdx.x % 32;
    int key = part.first_key + tile * KEYS + (rank * BOXES + min(lane, BOXES - 1)) * BOX;
    key = min(key, (part.end_key - 1) / BOX * BOX);
    int page = work.page_table[static_cast<long long>(part.request) * work.table_stride + key / PAGE_SIZE];
    return (page * PAGE_SIZE + key % PAGE_SIZE) / 8;
}

__device__ __forceinline__ void bring_tile(
    const TensorMap* map, const Part& part, int eight, Place& place, char* ring, Barriers& barriers, u32 rank
) {
    int lane = threadIdx.x % 32, box = rank * BOXES + lane;
    u64* full = &barriers.full[place.stage];
    wait(&barriers.empty[place.stage], place.parity ^ 1);
    if (lane == 0) expect(full, TILE_BYTES);
    __syncwarp();
    u32 target = shared(ring + place.stage * TILE_BYTES) + box * (BOX / 8 * EIGHT_KEYS);
    if (lane < BOXES) {
#if CLUSTER > 1
        send_box(target, map, full, part.kv_head * (HEAD_DIM / 64), eight, (1 << CLUSTER) - 1);
#else
        copy_box(target, map, full, part.kv_head * (HEAD_DIM / 64), eight);
#endif
    }
    __syncwarp();
    place.advance();
}

__device__ __forceinline__ void copy_all(
    const TensorMap* k_map, const TensorMap* v_map, const Work& work, const Part& part, char* ring, Barriers& barriers,
    u32 rank
) {
    Place place;
    int eight = 0, before = 0;
    for (int tile = 0; tile <= part.num_tiles; ++tile) {
        before = eight;
        if (tile < part.num_tiles) {
            eight = eight_of_box(work, part, tile, rank);
            bring_tile(k_map, part, eight, place, ring, barriers, rank);
        }
        if (tile > 0) bring_tile(v_map, part, before, place, ring, barriers, rank);
    }
}

// ---- the warpgroups that multiply ----

constexpr int OWN = 1, TURN = OWN + GROUPS;  // barriers of threads, by warpgroup

__device__ __forceinline__ void take_turn(int group) { meet_threads(TURN + group, GROUPS * 128); }
__device__ __forceinline__ void pass_turn(int group) { pass_threads(TURN + 1 - group, GROUPS * 128); }

// The thread's columns of its pairs of q, as products take them; zeros where there is no row.
using Q = u32[HEAD_DIM / 4];

__device__ __forceinline__ void load_q(Q& q, const Work& work, const Part& part, int group) {
    int thread = threadIdx.x % 128, first = group * PAIRS + thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
    for (int below = 0; below < 2; ++below) {
        int row = part.row_of(first + 8 * below), head = part.head_of(first + 8 * below);
        const u16* from = work.q + static_cast<long long>(row) * work.q_row_stride + head * work.q_head_stride;
#pragma unroll
        for (int k = 0; k < HEAD_DIM / 8; ++k) {
            const u16* two = from + k * 8 + thread % 4 * 2;
            q[k / 2 * 4 + k % 2 * 2 + below] = row < part.end_row ? *reinterpret_cast<const u32*>(two) : 0;
        }
    }
}

// Zeros for values of keys after the last: their weights are zero, but a page may hold anything. Both warpgroups write
// them, so that neither waits for the other.
__device__ __forceinline__ void clear_after(const Part& part, char* tile, int group) {
    constexpr int PIECES = HEAD_DIM / 8;
    int valid = part.end_key - part.first_key - (part.num_tiles - 1) * KEYS;
    if (valid == KEYS) return;
    for (int i = valid * PIECES + threadIdx.x % 128; i < KEYS * PIECES; i += 128) {
        int key = i / PIECES, piece = i % PIECES;
        int at = key / 8 * EIGHT_KEYS + piece / 8 * 1024 + key % 8 * 128 + piece % 8 * 16;
        *reinterpret_cast<uint4*>(tile + at) = make_uint4(0, 0, 0, 0);
    }
    show_to_copies();
    meet_threads(OWN + group, 128);
}

// The low word of a tile's descriptor; that of a place in it is a constant more. In a cluster, higher bits of an address
// in shared memory tell the program.
__device__ __forceinline__ u32 low_word(const char* tile) { return (shared(tile) & 0x3FFFF) >> 4; }

__device__ __forceinline__ u64 descriptor(u32 low) {
    return static_cast<u64>(1u << 30 | EIGHT_KEYS >> 4) << 32 | low;
}

__device__ __forceinline__ void begin_scores(float (&scores)[SCORES], const Q& q, const char* tile) {
    u32 keys = low_word(tile);
    begin_products();
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; ++k)
        multiply_keys(scores, &q[4 * k], descriptor(keys + (k / 4 * 1024 + k % 4 * 32) / 16), k > 0);
    commit_products();
}

__device__ __forceinline__ void begin_sums(float (&sums)[SUMS], const u32 (&weights)[SCORES / 2], const char* tile) {
    u32 values = low_word(tile) | 1024 / 16 << 16;  // from 64 columns to the next
    begin_products();
#pragma unroll
    for (int k = 0; k < KEYS / 16; ++k)
        multiply_values(sums, &weights[4 * k], descriptor(values + 2 * k * EIGHT_KEYS / 16));
    commit_products();
}

__device__ __forceinline__ void release(Barriers& barriers, const Place& place) {
    u32 thread = threadIdx.x % 128;
    if (thread < CLUSTER) arrive_at(&barriers.empty[place.stage], thread);
}

__device__ __forceinline__ void attend(
    const Work& work, const Part& part, char* ring, Barriers& barriers, int group
) {
    float scores[SCORES], sums[SUMS];
    u32 weights[SCORES / 2];
    Q q;
    load_q(q, work, part, group);
    Softmax softmax(work, part, group);
    Place place;
    if (group == 1) pass_turn(group);

    wait(&barriers.full[0], 0);
    take_turn(group);
    begin_scores(scores, q, ring);
    pass_turn(group);
    wait_products<0>();
    release(barriers, place);
    softmax.take_anew<true>(scores, 0);
    softmax.weigh(weights, scores);
#pragma unroll
    for (int i = 0; i < SUMS; ++i) sums[i] = 0.0f;

    for (int tile = 1; tile < part.num_tiles; ++tile) {
        place.advance();
        Place values = place;
        values.advance();
        const char* keys = ring + place.stage * TILE_BYTES;
        wait(&barriers.full[place.stage], place.parity);
        take_turn(group);
        begin_scores(scores, q, keys);
        wait(&barriers.full[values.stage], values.parity);
        begin_sums(sums, weights, ring + values.stage * TILE_BYTES);
        pass_turn(group);
        wait_products<1>();  // the scores
        softmax.take(scores, tile);
        // The assembler puts a wait for products as early as it can, and what is to run beside them behind it; but not
        // before this meeting, which depends on all weights.
        bool anew = any_of_threads(OWN + group, 128, softmax.exceeds());
        if (!anew) release(barriers, place);
        wait_products<0>();
        release(barriers, values);
        if (anew) {
            begin_scores(scores, q, keys);
            wait_products<0>();
            release(barriers, place);
            softmax.take_anew<false>(scores, tile);
            softmax.rescale(sums);
        }
        softmax.weigh(weights, scores);
        place = values;
    }

    place.advance();
    wait(&barriers.full[place.stage], place.parity);
    clear_after(part, ring + place.stage * TILE_BYTES, group);
    take_turn(group);
    begin_sums(sums, weights, ring + place.stage * TILE_BYTES);
    if (group == 0) pass_turn(group);
    wait_products<0>();
    softmax.finish(sums, work, part);
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(128 * (GROUPS + 1), 1) attention_of_chunks(
    const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map, const __grid_constant__ Work work
) {
    extern __shared__ __align__(1024) char ring[];
    __shared__ Barriers barriers;
    u32 rank = rank_in_cluster();
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            set_up(&barriers.full[stage], 1);
            set_up(&barriers.empty[stage], GROUPS * CLUSTER);
        }
        show_barriers_to_cluster();
    }
    let_next_begin();
    wait_for_kernels_before();
    Part part = part_of_program(work, rank);
    if (part.split > 0 && !part.divided) return;  // as the rest of the cluster does
    meet_cluster();
    if (threadIdx.x < 128) {
        give_registers<24>();
        if (threadIdx.x < 32) copy_all(&k_map, &v_map, work, part, ring, barriers, rank);
    } else {
        take_registers<240>();
        int group = threadIdx.x / 128 - 1;
        if (part.num_tiles > 0)
            attend(work, part, ring, barriers, group);
        else if (part.first_row < part.end_row)
            Softmax(work, part, group).note(work, part);
    }
    meet_cluster();  // no program leaves while the other may send to it
}
