// How packed_products.cu multiplies few rows of x: by products of warps, m16n8k16, whose sums lie in registers as those
// of a warpgroup do. They end twice as fast as products of warpgroups, each of which waits for the one before where all of K
// belongs to one sum. A warp holds the operands of a tile of 64 columns while it loads those of the next one.
#pragma once

constexpr int X_BLOCKS = FEW ? 1 : ROWS / 8;  // of 8 rows of x

struct Operands {
    uint4 values[TILES][2];         // of W, as they are stored: two runs of two slices
    u32 x[4][X_BLOCKS][2];
};

// Those of tile `k_tile` of a stage. Piece c of row r of x lies at c ^ r of its 8 places.
__device__ __forceinline__ void load_operands(Operands& operands, const char* stage, int k_tile, int group) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        const char* at = Source(stage, group, tile).values(k_tile);
        operands.values[tile][0] = *reinterpret_cast<const uint4*>(at);
        operands.values[tile][1] = *reinterpret_cast<const uint4*>(at + 512);
    }
    u32 x = shared(stage) + k_tile * X_TILE_BYTES + lane % 8 * 128;
#pragma unroll
    for (int i = 0; i < 2 * X_BLOCKS; ++i) {
        int block = i / 2, s = i % 2 * 2;  // slices s and s + 1: four matrices of 8 columns
        u32(&low)[2] = operands.x[s][block], (&high)[2] = operands.x[s + 1][block];
        load_matrices(x + block * 1024 + ((2 * s + lane / 8) ^ lane % 8) * 16, low[0], low[1], high[0], high[1]);
    }
}

// Add the products of a tile of columns, slice after slice.
__device__ __forceinline__ void multiply_tile(Sums& sums, const Operands& operands) {
#pragma unroll
    for (int s = 0; s < 4; ++s) {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            const uint4& words = operands.values[tile][s / 2];
            u32 w[4];
            unpack_8_bits(w, s % 2 ? words.z : words.x, s % 2 ? words.w : words.y);
#pragma unroll
            for (int block = 0; block < X_BLOCKS; ++block)
                multiply16(*reinterpret_cast<float(*)[4]>(sums.of[tile] + 4 * block), w, operands.x[s][block]);
        }
    }
}

__device__ __forceinline__ void multiply_item(
    Sums& sums, const Item& item, const char* ring, Barriers* barriers, Place& place, int group
) {
    Operands operands[2];
    wait(&barriers->full[place.stage], place.parity);
    load_operands(operands[0], ring + place.stage * STAGE_PITCH, 0, group);
    for (int at = item.begin; at < item.end; ++at) {
        const char* stage = ring + place.stage * STAGE_PITCH;
        u64* read = &barriers->empty[place.stage];
        place.advance();
#pragma unroll
        for (int k_tile = 0; k_tile < K_TILES; ++k_tile) {
            Operands& next = operands[(k_tile + 1) % 2];
            if (k_tile + 1 < K_TILES) {
                load_operands(next, stage, k_tile + 1, group);
            } else if (at + 1 < item.end) {
                wait(&barriers->full[place.stage], place.parity);
                load_operands(next, ring + place.stage * STAGE_PITCH, 0, group);
            }
            multiply_tile(sums, operands[k_tile % 2]);
        }
        __syncwarp();  // all lanes have read the stage
        release(read);
    }
}
