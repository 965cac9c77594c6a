// The ring of packed_stream.cu: how it is filled, and the products of what it holds.
//
// Steps are counted through all rows of tiles of the program: step s is step s % STEPS of row s / STEPS, which are gate
// and up in turns if GATED.
#pragma once

// Where a warp reads next.
struct Ring {
    char* first;   // stage
    u32 barriers;  // `full` of each stage, then `empty`
    int step = 0, stage = 0;
    u32 parity = 0;

    __device__ __forceinline__ Ring(char* first, Barriers& barriers)
        : first(first), barriers(kept(shared(barriers.full))) {}

    __device__ __forceinline__ char* memory() const { return first + stage * STAGE_BYTES; }
    __device__ __forceinline__ u32 full(int stage) const { return barriers + stage * 8; }
    __device__ __forceinline__ u32 empty(int stage) const { return barriers + (STAGES + stage) * 8; }

    __device__ __forceinline__ void advance() {
        ++step;
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// ---- copies: a stage at a time, in the order in which they are read ----

struct Copies {
    int first_item, num_items, num_steps;
    u32 rank;

    __device__ __forceinline__ Copies(const Items& items, u32 rank)
        : first_item(items.first), num_items(items.of_all), num_steps(items.count * HALVES * STEPS), rank(rank) {}

    // Copy the tiles of step s to a stage, with the scales and zero points of their groups.
    __device__ __forceinline__ void ask(const Work& work, const Ring& ring, int s, int stage) const {
        int row = s / STEPS, step = s % STEPS;
        row = first_item + row / HALVES + row % HALVES * num_items;
        int tile = rank * DEPTH + step * STAGE_TILES, tiles = step == STEPS - 1 ? LAST_TILES : STAGE_TILES;
        u32 target = shared(ring.first) + stage * STAGE_BYTES, full = ring.full(stage);
        expect(full, tiles * TILE_BYTES + groups_of(tiles) * (ENTRY + ZERO_ENTRY));
        long long at = row * K_TILES + tile;
        copy_bytes(target, work.weight + at * TILE_BYTES, tiles * TILE_BYTES, full);
        if constexpr (GROUP > 0) {
            at = row * groups_of(K_TILES) + groups_of(tile);
            copy_bytes(target + SCALES_AT, work.scales + at * ENTRY, groups_of(tiles) * ENTRY, full);
            if (ZEROS) copy_bytes(target + ZEROS_AT, work.zeros + at * ZERO_ENTRY, groups_of(tiles) * ZERO_ENTRY, full);
        }
    }

    // Fill stages `first`.. of the ring for the first time.
    __device__ __forceinline__ void ask_all(const Work& work, const Ring& ring, int first, int end) const {
        for (int s = first; s < min(end, num_steps); ++s) ask(work, ring, s, s);
    }

    // Copy what comes next to the stage of the step before the one that this warp has read, if it is the warp's turn.
    // The other warps have most likely read that stage, so the wait is short.
    __device__ __forceinline__ void refill(const Work& work, const Ring& ring) const {
        int read = ring.step - 1, next = read + STAGES;
        if (ring.step % WARPS != threadIdx.x / 32 || read < 0 || next >= num_steps) return;
        if (threadIdx.x % 32 == 0) {
            int stage = read % STAGES;
            wait(ring.empty(stage), read / STAGES % 2);
            ask(work, ring, next, stage);
        }
        __syncwarp();
    }
};

// ---- products ----

// The scales of rows g and g + 8 in an entry of a group.
__device__ __forceinline__ float2 scales_of(const char* entry) {
    int g = threadIdx.x % 32 / 4;
    if constexpr (SCALE == FLOAT32) {
        return reinterpret_cast<const float2*>(entry)[g];
    } else if constexpr (SCALE == BLOCK_FLOAT32) {
        float scale = *reinterpret_cast<const float*>(entry);
        return make_float2(scale, scale);
    } else if constexpr (SCALE == BFLOAT16) {
        return widen_bfloat16(reinterpret_cast<const u32*>(entry)[g]);
    } else {
        u32 pair = reinterpret_cast<const u32*>(entry)[g];
        return make_float2(widen_float16(pair & 0xffff), widen_float16(pair >> 16));
    }
}

// Add the products of slices [first, first + COUNT) of tile i of the warp. `words`: of the lane, those of the slices.
template <int COUNT>
__device__ __forceinline__ void multiply_slices(
    float (&sums)[BLOCKS][4], const Operands& x, int i, const u32* words, int first
) {
#pragma unroll
    for (int s = first; s < first + COUNT; ++s) {
        u32 a[4];
        if constexpr (BITS == 4) {
            mask_4_bits(a, words[s]);
        } else {
            mask_8_bits(a[0], a[1], words[2 * s]);
            mask_8_bits(a[2], a[3], words[2 * s + 1]);
        }
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) multiply16(sums[block], a, x.pairs[i][s][block]);
    }
}

// The products of zero points, which masks leave out, with all x of a group's columns: where its sums begin.
__device__ __forceinline__ void begin_group(
    float (&sums)[BLOCKS][4], const float (&x_sums)[BLOCKS][2], const char* stage, int entry
) {
    float upper = 1, lower = ROW_G8;  // `x_sums` has symmetric zero points
    if constexpr (ZEROS) {
        const u32* at = reinterpret_cast<const u32*>(stage + ZEROS_AT + entry * ZERO_ENTRY);
        float2 zeros = widen_bfloat16(at[threadIdx.x % 32 / 4]);
        upper = zeros.x - 128;
        lower = (zeros.y - 128) * ROW_G8;
    }
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            sums[block][i] = BITS == 4 ? x_sums[block][i % 2] * (i < 2 ? upper : lower) : 0.0f;
    }
}

__device__ __forceinline__ void load_words(u32 (&words)[BITS], const char* stage, int tile) {
#pragma unroll
    for (int run = 0; run < BITS / 4; ++run) {
        const char* at = stage + tile * TILE_BYTES + run * 512 + threadIdx.x % 32 * 16;
        *reinterpret_cast<uint4*>(&words[4 * run]) = *reinterpret_cast<const uint4*>(at);
    }
}

__device__ __forceinline__ void end_group(
    float (&sums)[BLOCKS][4], const float (&part)[BLOCKS][4], const char* stage, int entry
) {
    float2 scales = scales_of(stage + SCALES_AT + entry * ENTRY);
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[block][i] += part[block][i] * (i < 2 ? scales.x : scales.y);
    }
}

// Add the products of tile `tile` of a stage, tile i of the warp, and of the others that share its scale.
__device__ __forceinline__ void multiply_tile(
    float (&sums)[BLOCKS][4], const Operands& x, int i, const char* stage, int tile
) {
    u32 words[BITS];
    if constexpr (GROUP == 0) {
        load_words(words, stage, tile);
        multiply_slices<4>(sums, x, i, words, 0);
    } else if constexpr (GROUP == 32) {
        load_words(words, stage, tile);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float part[BLOCKS][4];
            begin_group(part, x.sums[i][half], stage, 2 * tile + half);
            multiply_slices<2>(part, x, i, words, 2 * half);
            end_group(sums, part, stage, 2 * tile + half);
        }
    } else {
        float part[BLOCKS][4];
        begin_group(part, x.sums[i][0], stage, groups_of(tile));
#pragma unroll
        for (int k = 0; k < TOGETHER; ++k) {
            load_words(words, stage, tile + k);
            multiply_slices<4>(part, x, i + k, words, 0);
        }
        end_group(sums, part, stage, groups_of(tile));
    }
}

// Add the products of the warp's columns in one row of tiles.
__device__ __forceinline__ void multiply_tiles(
    float (&sums)[BLOCKS][4], const Operands& x, const Work& work, const Copies& copies, Ring& ring
) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step, ring.advance()) {
        wait(ring.full(ring.stage), ring.parity);
#pragma unroll
        for (int k = 0; k < TILES; k += TOGETHER) {
            constexpr int LAST = SHARE - TOGETHER;
            int i = step * TILES + k;
            if (has_tile(step, k)) multiply_tile(sums, x, i < LAST ? i : LAST, ring.memory(), first_tile(step) + k);
        }
        __syncwarp();  // all lanes have read the stage
        if (threadIdx.x % 32 == 0) arrive(ring.empty(ring.stage));
        copies.refill(work, ring);
    }
}
