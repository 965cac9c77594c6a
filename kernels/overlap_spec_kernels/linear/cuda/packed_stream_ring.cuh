// The ring of packed_stream.cu: how it is filled, and the products of what it holds.
//
// Steps are counted through all linears: in each, step s is step s % STEPS of row s / STEPS of the program's tiles,
// which are gate and up in turns if GATED.
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

// Copy the tiles of step s of a linear to a stage, with the scales and zero points of their groups.
template <class L>
__device__ __forceinline__ void copy_step(const Program& program, int s, u32 target, u32 full) {
    const Work& work = program.work<L>();
    int item = program.common.items[L::INDEX].first + s / L::STEPS / L::HALVES, half = s / L::STEPS % L::HALVES;
    int row = item + half * (work.size_n / 16), step = s % L::STEPS;
    int tile = program.rank<L>() * L::DEPTH + step * L::STAGE_TILES;
    int tiles = step == L::STEPS - 1 ? L::LAST_TILES : L::STAGE_TILES, groups = L::groups_of(tiles);
    expect(full, tiles * L::TILE_BYTES + groups * (L::ENTRY + L::ZERO_ENTRY));
    long long at = row * L::K_TILES + tile;
    copy_bytes(target, work.weight + at * L::TILE_BYTES, tiles * L::TILE_BYTES, full);
    if constexpr (L::GROUP > 0) {
        at = row * L::groups_of(L::K_TILES) + L::groups_of(tile);
        copy_bytes(target + L::SCALES_AT, work.scales + at * L::ENTRY, groups * L::ENTRY, full);
        if (L::ZEROS) copy_bytes(target + L::ZEROS_AT, work.zeros + at * L::ZERO_ENTRY, groups * L::ZERO_ENTRY, full);
    }
}

// The same for step s of all, which is in linear L or after it.
template <class L>
__device__ __forceinline__ void copy_any_step(const Program& program, const Ring& ring, int s, int stage) {
    if constexpr (!L::IS_LAST)
        if (s >= program.common.items[L::INDEX + 1].first_step)
            return copy_any_step<typename L::Next>(program, ring, s, stage);
    int first_step = program.common.items[L::INDEX].first_step;
    copy_step<L>(program, s - first_step, shared(ring.first) + stage * STAGE_BYTES, ring.full(stage));
}

// Fill the ring.
__device__ __forceinline__ void begin_copies(const Program& program, const Ring& ring) {
    int count = min(STAGES, program.common.num_steps());
    for (int s = 0; s < count; ++s) copy_any_step<Linear<0>>(program, ring, s, s);
}

// Bring a part of what the next launch reads first into the L2 cache: between the last stage that this launch asks for
// and the next one's first, memory would have nothing to do.
__device__ __forceinline__ void prefetch_ahead(const Run& run, int part) {
    int all = run.bytes_ahead, share = (all / (STAGES * gridDim.x) + 16) / 16 * 16;
    int at = (part * gridDim.x + blockIdx.x) * share;
    if (at < all) prefetch_bytes(run.ahead + at, min(share, all - at));
}

// Copy what comes next to the stage of step `read`, if it is this warp's turn. The warp has read that stage.
template <class L>
__device__ __forceinline__ void refill(const Program& program, const Ring& ring, int read) {
    if ((read + 1) % WARPS != threadIdx.x / 32) return;
    int next = read + STAGES, num_steps = program.common.num_steps();
    if (threadIdx.x % 32 == 0 && next < num_steps) {
        int stage = read % STAGES;
        wait(ring.empty(stage), read / STAGES % 2);
        copy_any_step<L>(program, ring, next, stage);
    } else if (COUNT > 1 && threadIdx.x % 32 == 0) {
        prefetch_ahead(program.run, next - num_steps);
    }
    __syncwarp();
}

// ---- products ----

// The scales of rows g and g + 8 in an entry of a group.
template <class L>
__device__ __forceinline__ float2 scales_of(const char* entry) {
    int g = threadIdx.x % 32 / 4;
    if constexpr (L::SCALE == FLOAT32) {
        return reinterpret_cast<const float2*>(entry)[g];
    } else if constexpr (L::SCALE == BLOCK_FLOAT32) {
        float scale = *reinterpret_cast<const float*>(entry);
        return make_float2(scale, scale);
    } else if constexpr (L::SCALE == BFLOAT16) {
        return widen_bfloat16(reinterpret_cast<const u32*>(entry)[g]);
    } else {
        u32 pair = reinterpret_cast<const u32*>(entry)[g];
        return make_float2(widen_float16(pair & 0xffff), widen_float16(pair >> 16));
    }
}

// Add the products of slices [first, first + SLICES) of a tile. `words`: of the lane, those of the slices.
template <class L, int SLICES>
__device__ __forceinline__ void multiply_slices(
    float (&sums)[BLOCKS][4], const u32 (&x)[4][BLOCKS][2], const u32* words, int first, u32 upper, u32 lower
) {
#pragma unroll
    for (int s = first; s < first + SLICES; ++s) {
        u32 a[4];
        if constexpr (L::BITS == 4) {
            unpack_64ths(a, words[s], upper, lower);
        } else {
            unpack_8_bits(a, words[2 * s], words[2 * s + 1]);
        }
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) multiply16(sums[block], a, x[s][block]);
    }
}

// Add the products of SLICES slices that share a scale; `entry` of their group.
template <class L, int SLICES>
__device__ __forceinline__ void multiply_group(
    float (&sums)[BLOCKS][4], const u32 (&x)[4][BLOCKS][2], const u32* words, int first, const char* stage, int entry
) {
    u32 upper = 0xbe00be00, lower = upper;  // -8 / 64
    if constexpr (L::ZEROS) {
        const u32* at = reinterpret_cast<const u32*>(stage + L::ZEROS_AT + entry * L::ZERO_ENTRY);
        u32 zeros = unpack_zeros(at[threadIdx.x % 32 / 4]);
        upper = __byte_perm(zeros, 0, 0x1010);
        lower = __byte_perm(zeros, 0, 0x3232);
    }
    float part[BLOCKS][4] = {};
    multiply_slices<L, SLICES>(part, x, words, first, upper, lower);
    float2 scales = scales_of<L>(stage + L::SCALES_AT + entry * L::ENTRY);
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[block][i] += part[block][i] * (i < 2 ? scales.x : scales.y);
    }
}

// Add the products of tile `tile` of a stage.
template <class L>
__device__ __forceinline__ void multiply_tile(
    float (&sums)[BLOCKS][4], const u32 (&x)[4][BLOCKS][2], const char* stage, int tile
) {
    u32 words[L::BITS];
#pragma unroll
    for (int run = 0; run < L::BITS / 4; ++run) {
        const char* at = stage + tile * L::TILE_BYTES + run * 512 + threadIdx.x % 32 * 16;
        *reinterpret_cast<uint4*>(&words[4 * run]) = *reinterpret_cast<const uint4*>(at);
    }
    if constexpr (L::GROUP == 0) {
        multiply_slices<L, 4>(sums, x, words, 0, 0, 0);
    } else if constexpr (L::GROUP == 32) {
        multiply_group<L, 2>(sums, x, words, 0, stage, 2 * tile);
        multiply_group<L, 2>(sums, x, words, 2, stage, 2 * tile + 1);
    } else {
        multiply_group<L, 4>(sums, x, words, 0, stage, L::groups_of(tile));
    }
}

// Add the products of the warp's columns in one row of tiles. The stage of the step before the one that was just read
// is refilled: the other warps have most likely read it, so the wait is short.
template <class L>
__device__ __forceinline__ void multiply_tiles(
    float (&sums)[BLOCKS][4], const Operands<L>& x, const Program& program, Ring& ring, int first_step
) {
#pragma unroll
    for (int step = 0; step < L::STEPS; ++step, ring.advance()) {
        wait(ring.full(ring.stage), ring.parity);
#pragma unroll
        for (int k = 0; k < L::TILES; ++k) {
            constexpr int LAST = L::SHARE - 1;
            int i = step * L::TILES + k;
            if (has_tile<L>(step, k))
                multiply_tile<L>(sums, x[i < LAST ? i : LAST], ring.memory(), first_tile<L>(step) + k);
        }
        __syncwarp();  // all lanes have read the stage
        if (threadIdx.x % 32 == 0) arrive(ring.empty(ring.stage));
        if (ring.step > first_step) refill<L>(program, ring, ring.step - 1);
    }
}
