// The warpgroup of latent_decode.cu that copies. A thread has a piece of 16 bytes of four keys of each box.
#pragma once

// Where the cache has four keys of a block; -1 where there is none.
struct Rows {
    int rows[4];

    __device__ __forceinline__ void find(const Work& work, int request, int block, int end) {
        const int* pages = work.page_table + static_cast<long long>(request) * work.table_stride;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int key = block + threadIdx.x / 8 + 16 * i;
            rows[i] = key < end ? pages[key / PAGE_SIZE] * PAGE_SIZE + key % PAGE_SIZE : -1;
        }
    }
};

__device__ __forceinline__ void copy_block(
    const Work& work, const Rows& rows, char* memory, Common& common, Place& place
) {
    int key = threadIdx.x / 8, piece = threadIdx.x % 8;
    const u16* from[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
        from[i] = work.cache + static_cast<long long>(max(rows.rows[i], 0)) * ROW + piece * 8;
    u32 within = RING_AT + key * 128 + (piece ^ key % 8) * 16;
    for (int box = 0; box < OF_BLOCK; ++box) {
        wait(&common.empty[place.box], place.parity ^ 1);
        u32 target = shared(memory) + within + place.box * BOX_BYTES;
        int column = box == 0 ? RANK : (box - 1) * 64;
#pragma unroll
        for (int i = 0; i < 4; ++i) copy_piece(target + i * (16 * 128), from[i] + column, rows.rows[i] >= 0);
        arrive_after_pieces(&common.full[place.box]);
        place.advance(1);
    }
}

__device__ __forceinline__ void copy_keys(
    const Work& work, const Items& items, int parts, char* memory, Common& common
) {
    Place place;
    bool waits = READ_BEFORE_WAIT;
    for (int turn = 0, number; (number = items.at_turn(turn)) < items.total * parts; ++turn) {
        Item item = items.item(parts > 1 ? number / PARTS : number);
        int keys = common.keys[item.request];
        for (int piece = item.first; piece < item.end; ++piece) {
            int block = piece_start(piece), end = min(piece_start(piece + 1), keys);
            Rows rows, next;
            next.find(work, item.request, block, end);
            for (; block < end; block += KEYS) {
                rows = next;
                next.find(work, item.request, block + KEYS, end);
                if (waits && block + KEYS > common.keys_before[item.request]) {
                    wait_for_kernels_before();
                    waits = false;
                }
                copy_block(work, rows, memory, common, place);
            }
        }
    }
    wait_for_pieces();
}
