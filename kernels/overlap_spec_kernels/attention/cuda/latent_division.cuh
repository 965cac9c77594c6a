// How the keys of requests are divided into pieces, as by `division` of _latent_attention_kernel.py, for latent_decode.cu
// and latent_pieces.cu. A request has one tile.
#pragma once

// Pieces of the keys 0 .. num_keys - 1: 16 of UNIT, 8 of 2 UNIT, 120 of 4 UNIT, others of 8 UNIT.
__device__ __forceinline__ int pieces_of(int num_keys) {
    int near = quotient_up(min(num_keys, 16 * UNIT), UNIT);
    int middle = quotient_up(min(max(num_keys - 16 * UNIT, 0), 16 * UNIT), 2 * UNIT);
    int far = quotient_up(min(max(num_keys - 32 * UNIT, 0), 480 * UNIT), 4 * UNIT);
    return near + middle + far + quotient_up(max(num_keys - 512 * UNIT, 0), 8 * UNIT);
}

// The first key of a piece.
__device__ __forceinline__ int piece_start(int piece) {
    if (piece < 16) return piece * UNIT;
    if (piece < 24) return 16 * UNIT + (piece - 16) * (2 * UNIT);
    if (piece < 144) return 32 * UNIT + (piece - 24) * (4 * UNIT);
    return 512 * UNIT + (piece - 144) * (8 * UNIT);
}

// Pieces of a request that a program takes at a turn, and where it leaves what it finds.
struct Item {
    int request, first, end, slot;
};

// All items of a launch. A warp looks together: a lane for each request.
struct Items {
    const int* keys;  // of each request, in shared memory
    int num_requests, total;
    bool by_piece;  // an item is a piece, or all pieces of a request where they would be more than slots

    __device__ __forceinline__ Items(const int* keys, int num_requests, int num_slots)
        : keys(keys), num_requests(num_requests) {
        int pieces = 0;
        for (int first = 0; first < num_requests; first += 32) pieces += __reduce_add_sync(ALL_LANES, lane_pieces(first));
        by_piece = pieces <= num_slots;
        total = by_piece ? pieces : num_requests;
    }

    __device__ __forceinline__ int lane_pieces(int first) const {
        int request = first + threadIdx.x % 32;
        return request < num_requests ? pieces_of(keys[request]) : 0;
    }

    // The longest pieces of a request come first. So turns of a program go to and fro.
    __device__ __forceinline__ int at_turn(int turn) const {
        int place = turn % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x;
        return turn * gridDim.x + place;
    }

    __device__ __forceinline__ Item item(int number) const {
        if (!by_piece) return {number, 0, pieces_of(keys[number]), number};
        int left = number, lane = threadIdx.x % 32;
        for (int first = 0; first < num_requests; first += 32) {
            int own = lane_pieces(first), until = own;
            for (int step = 1; step < 32; step *= 2) {
                int others = __shfl_up_sync(ALL_LANES, until, step);
                if (lane >= step) until += others;
            }
            if (u32 later = __ballot_sync(ALL_LANES, left < until)) {
                int finder = __ffs(later) - 1;
                int pieces = __shfl_sync(ALL_LANES, own, finder), before = __shfl_sync(ALL_LANES, until, finder) - pieces;
                int piece = pieces - 1 - (left - before);
                return {first + finder, piece, piece + 1, number - (left - before) + piece};
            }
            left -= __shfl_sync(ALL_LANES, until, 31);
        }
        return {0, 0, 0, 0};
    }
};
