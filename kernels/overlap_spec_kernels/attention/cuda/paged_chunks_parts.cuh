// What a program of paged_chunks.cu works on: rows of a request, a KV head, a share of the keys.
#pragma once

// The rows of a cluster: CLUSTER * ROWS of one request or less, or none.
struct Rows {
    int request = 0, first = 0, end = 0;
};

// Of the tiles of all requests, one request after another, the one of this number. A warp looks together: a lane for
// each request.
__device__ __forceinline__ Rows rows_of_tile(const Work& work, int number) {
    Rows rows;
    int lane = threadIdx.x % 32;
    for (int first = 0; first < work.num_requests; first += 32) {
        int request = min(first + lane, work.num_requests - 1);
        int begin = work.row_starts[request], end = work.row_starts[request + 1];
        int own = first + lane < work.num_requests ? quotient_up(end - begin, CLUSTER * ROWS) : 0, until = own;
        for (int step = 1; step < 32; step *= 2) {
            int others = __shfl_up_sync(ALL_LANES, until, step);
            if (lane >= step) until += others;
        }
        int row = begin + (number - (until - own)) * CLUSTER * ROWS;
        if (u32 later = __ballot_sync(ALL_LANES, number < until)) {
            int finder = __ffs(later) - 1;
            rows.request = first + finder;
            rows.first = __shfl_sync(ALL_LANES, row, finder);
            rows.end = min(__shfl_sync(ALL_LANES, end, finder), rows.first + CLUSTER * ROWS);
            return rows;
        }
        number -= __shfl_sync(ALL_LANES, until, 31);
    }
    return rows;
}

struct Part {
    int request, kv_head, split;
    int first_row, end_row;              // of this program; none if the first is not below the end
    int first_key, end_key, num_tiles;   // the same in all programs of a cluster
    bool divided;                        // whether other splits have keys of these rows, too

    // Of a (row, head) pair of this program; a row beyond `end_row` if there is none.
    __device__ __forceinline__ int row_of(int pair) const {
        return pair < ROWS * GROUP ? first_row + pair / GROUP : 0x7fffffff;
    }
    __device__ __forceinline__ int head_of(int pair) const { return kv_head * GROUP + pair % GROUP; }
};

// The last tiles begin first: of a prompt they have the most keys, and what begins last is to be short. Where a KV head's
// tiles fill the GPU, one head comes after another, and its keys stay in the L2 cache: 8 have 134 MB of 32,768 keys.
__device__ __forceinline__ Part part_of_program(const Work& work, u32 rank) {
    int of_head = gridDim.x / CLUSTER / KV_HEADS, number = (gridDim.x - 1 - blockIdx.x) / CLUSTER;
    Part part;
    part.kv_head = work.by_head ? number / of_head : number % KV_HEADS;
    number = work.by_head ? number % of_head : number / KV_HEADS;
    part.split = number % work.num_splits;
    Rows rows = rows_of_tile(work, number / work.num_splits);
    part.request = rows.request;
    part.first_row = rows.first + rank * ROWS;
    part.end_row = min(rows.end, part.first_row + ROWS);
    part.first_key = part.end_key = 0;
    part.divided = false;
    if (rows.first < rows.end) {
        int num_keys = static_cast<int>(work.positions[rows.end - 1]) + 1;
        part.divided = work.num_splits > 1 && num_keys >= work.least_keys;
        int share = quotient_up(quotient_up(num_keys, part.divided ? work.num_splits : 1), KEYS) * KEYS;
        part.first_key = part.split * share;
        part.end_key = min(num_keys, part.first_key + share);
    }
    part.num_tiles = max(quotient_up(part.end_key - part.first_key, KEYS), 0);
    return part;
}
