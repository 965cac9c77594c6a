// The warpgroups of latent_decode.cu that multiply.
//
// Thread t of a warpgroup has, of a product's 64 rows, t / 32 * 16 + t % 32 / 4 and 8 below, and of its pairs
// 8 j + t % 4 * 2 and the next: values[4 j], values[4 j + 1], and of the row below values[4 j + 2], values[4 j + 3].
#pragma once

constexpr int BOTH = 1, ALONE = 2;  // barriers of threads; ALONE + warpgroup

__device__ __forceinline__ void release(u64* barrier) {
    if (threadIdx.x % 32 == 0) arrive(barrier);
}

// Store two 8 x 8 matrices of 16 bits, each of them transposed; lanes 0 to 15 have the address of a row.
__device__ __forceinline__ void store_turned(u32 address, u32 a, u32 b) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b)
                 : "memory");
}

// Some pairs' queries, as products read them; zeros where there is no pair. Both warpgroups copy.
template <int COUNT>
__device__ __forceinline__ void place_queries(const Work& work, int request, int first, char* memory) {
    constexpr int PIECES = ROW / 8;
    const u16* rows = work.q + static_cast<long long>(request) * WIDTH * work.q_row_stride;
#pragma unroll 4
    for (int at = threadIdx.x - 128; at < COUNT * PIECES; at += 256) {
        int pair = at / PIECES, piece = at % PIECES, box = piece / 8 == RANK / 64 ? 0 : piece / 8 + 1;
        u32 place = (box * PADDED + pair) * 128 + (piece % 8 ^ pair % 8) * 16;
        pair += first;
        const u16* from = rows + pair / HEADS * work.q_row_stride + pair % HEADS * work.q_head_stride + piece * 8;
        copy_piece(shared(memory) + place, pair < PAIRS ? from : work.q, pair < PAIRS);
    }
    wait_for_pieces();
    show_to_copies();
}

// One warpgroup's part of a program, whose items have COUNT pairs.
template <int COUNT>
struct Group {
    static constexpr int OWN = SPLIT ? COUNT / 2 : COUNT;
    static constexpr int EIGHTS = COUNT / 8;
    using Scores = float[OWN / 2];
    using Sums = float[TILES][COUNT / 2];

    const Work& work;
    char* memory;
    Common& common;
    int number, thread;  // of the warpgroup; in it
    int block = 0;       // of all that the program has had
    int part = 0;        // of the request's pairs
    Place place;         // of the block's first box
    Sums sums;

    __device__ __forceinline__ Group(const Work& work, char* memory, Common& common)
        : work(work), memory(memory), common(common), number(threadIdx.x / 128 - 1), thread(threadIdx.x % 128) {}

    __device__ __forceinline__ int warp() const { return thread / 32; }
    __device__ __forceinline__ int first_pair() const { return thread % 4 * 2; }
    __device__ __forceinline__ bool is_own() const { return SPLIT || block % 2 == number; }
    __device__ __forceinline__ int first_own() const { return SPLIT ? number * OWN : 0; }
    __device__ __forceinline__ int first_of_part() const { return COUNT < PADDED ? part * COUNT : 0; }
    __device__ __forceinline__ u64 place_of(int at) const { return described(shared(memory) + at); }

    // The phase of the barriers `ready` and `free` of a block's number.
    __device__ __forceinline__ u32 phase() const { return block / 2 % 2; }

    __device__ __forceinline__ void advance() {
        ++block;
        place.advance(OF_BLOCK);
    }
    __device__ __forceinline__ void go_back() {
        --block;
        place.advance(BOXES - OF_BLOCK);
        place.parity ^= 1;
    }

    __device__ __forceinline__ void wait_for_box(const Place& box) {
        wait(&common.full[box.box], box.parity);
        show_to_copies();
    }

    // scores = the block's keys times the warpgroup's queries
    __device__ __forceinline__ void multiply_block(Scores& scores) {
#pragma unroll
        for (int i = 0; i < OF_BLOCK; ++i) {
            Place box = place.after(i);
            wait_for_box(box);
            begin_products();  // after each wait: or the assembler lets products wait for each other
            u64 keys = place_of(RING_AT + box.box * BOX_BYTES), q = place_of((i * PADDED + first_own()) * 128);
#pragma unroll
            for (int k = 0; k < 4; ++k) multiply_keys(scores, keys + 2 * k, q + 2 * k, i + k > 0);
        }
        commit_products();
        wait_products<0>();
        if (!SPLIT) release(&common.empty[place.box]);
    }

    // Scores become powers of two, -inf where a pair does not see a key.
    __device__ __forceinline__ void hide(Scores& scores, int first_key) {
        const int* positions = common.positions;
        bool all_seen = first_key + KEYS - 1 <= positions[0];
        int key = first_key + warp() * 16 + thread % 32 / 4;
#pragma unroll
        for (int i = 0; i < OWN / 2; ++i) scores[i] = __fmul_rn(scores[i], work.scale_log2);
        if (all_seen) return;
#pragma unroll
        for (int j = 0; j < OWN / 8; ++j) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                int pair = first_of_part() + first_own() + 8 * j + first_pair() + i;
                int position = pair < PAIRS ? positions[pair / HEADS] : -1;
                if (key > position) scores[4 * j + i] = __int_as_float(0xff800000);
                if (key + 8 > position) scores[4 * j + i + 2] = __int_as_float(0xff800000);
            }
        }
    }

    // Of values of each of a thread's pairs, those of all of the warp's keys: of the first pair of eight where the
    // thread's row is even, of the second where it is odd. What does not depend on each other is side by side.
    template <class T, class Join>
    __device__ __forceinline__ void over_keys(T (&found)[OWN / 8], const T (&given)[OWN / 4], Join join) const {
        bool odd = thread / 4 % 2;
#pragma unroll
        for (int j = 0; j < OWN / 8; ++j) {
            T other = __shfl_xor_sync(ALL_LANES, odd ? given[2 * j] : given[2 * j + 1], 4);
            found[j] = join(odd ? given[2 * j + 1] : given[2 * j], other);
        }
#pragma unroll
        for (int step = 8; step < 32; step *= 2) {
#pragma unroll
            for (int j = 0; j < OWN / 8; ++j) found[j] = join(found[j], __shfl_xor_sync(ALL_LANES, found[j], step));
        }
    }

    // Wait for the state after the block before this one.
    __device__ __forceinline__ void wait_for_state() {
        go_back();
        wait(&common.ready[block % 2], phase());
        advance();
    }

    // The highest scores of the warp's keys, for the whole warpgroup.
    __device__ __forceinline__ void find_highest(const Scores& scores) {
        float given[OWN / 4], found[OWN / 8];
#pragma unroll
        for (int i = 0; i < OWN / 4; ++i) given[i] = fmaxf(scores[i / 2 * 4 + i % 2], scores[i / 2 * 4 + i % 2 + 2]);
        over_keys(found, given, [](float a, float b) { return fmaxf(a, b); });
        int row = thread % 32 / 4;
#pragma unroll
        for (int j = 0; j < OWN / 8; ++j)
            if (row < 2) common.highest[number][warp()][8 * j + first_pair() + row] = found[j];
        meet_threads(ALONE + number, 128);
    }

    // Scores become weights, relative to the highest score of the block and those before it.
    __device__ __forceinline__ void exponentiate(Scores& scores, const float* before) const {
        float2 top[OWN / 8];
#pragma unroll
        for (int j = 0; j < OWN / 8; ++j) {
            int pair = 8 * j + first_pair();
            top[j] = make_float2(LOWEST, LOWEST);
            if (before) top[j] = *reinterpret_cast<const float2*>(before + pair);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float2 other = *reinterpret_cast<const float2*>(common.highest[number][i] + pair);
                top[j] = make_float2(fmaxf(top[j].x, other.x), fmaxf(top[j].y, other.y));
            }
        }
#pragma unroll
        for (int i = 0; i < OWN / 2; ++i)
            scores[i] = exp2_of(__fadd_rn(scores[i], -(i % 2 ? top[i / 4].y : top[i / 4].x)));
    }

    // Sums of weights, as whole numbers of 2^-23, of the warp's keys.
    __device__ __forceinline__ void add_weights(const Scores& weights) {
        int given[OWN / 4], found[OWN / 8], row = thread % 32 / 4;
#pragma unroll
        for (int i = 0; i < OWN / 4; ++i) {
            const float* w = weights + i / 2 * 4 + i % 2;
            given[i] = __float_as_int(__fadd_rn(w[0], 1.0f)) + __float_as_int(__fadd_rn(w[2], 1.0f)) - 2 * 0x3f800000;
        }
        over_keys(found, given, [](int a, int b) { return a + b; });
#pragma unroll
        for (int j = 0; j < OWN / 8; ++j)
            if (row < 2) common.sums[number][warp()][8 * j + first_pair() + row] = found[j];
    }

    // Weights of the block, and the state after it.
    __device__ __forceinline__ void weigh(Scores& scores, bool is_first) {
        int slot = block % 2, first = first_own(), lane = thread % 32;
        find_highest(scores);
        if (!SPLIT && !is_first) wait_for_state();
        if (!SPLIT) wait(&common.free[slot], phase() ^ 1);
        const State& before = common.states[slot ^ 1];
        State& after = common.states[slot];
        if (thread < OWN) {
            float old = is_first ? LOWEST : before.highest[first + thread], top = old;
#pragma unroll
            for (int i = 0; i < 4; ++i) top = fmaxf(top, common.highest[number][i][thread]);
            after.highest[first + thread] = top;
            after.rescale[first + thread] = exp2_of(__fadd_rn(old, -top));
        }
        exponentiate(scores, is_first ? nullptr : before.highest + first);
        u32 weights = shared(memory) + WEIGHTS_AT + (slot * PADDED + first + lane % 8) * 128;
        weights += ((2 * warp() + lane / 8 % 2) ^ lane % 8) * 16;
#pragma unroll
        for (int j = 0; j < OWN / 8; ++j) {
            const float* w = scores + 4 * j;
            store_turned(weights + j * (8 * 128), round2(w[0], w[1]), round2(w[2], w[3]));
        }
        show_to_copies();
        add_weights(scores);
        meet_threads(ALONE + number, 128);
        if (thread < OWN) {
            int sum = 0;
#pragma unroll
            for (int i = 0; i < 4; ++i) sum += common.sums[number][i][thread];
            float own = __fmul_rn(static_cast<float>(sum), 1.0f / (1 << 23));
            float old = is_first ? 0.0f : before.denominator[first + thread];
            after.denominator[first + thread] = __fmaf_rn(old, after.rescale[first + thread], own);
        }
        arrive(&common.ready[slot]);
    }

    // Of a tile after the other, as their products end.
    template <int TILE>
    __device__ __forceinline__ void release_values() {
        wait_products<TILES - 1 - TILE>();
        release(&common.empty[place.after(1 + number * TILES + TILE).box]);
        if constexpr (TILE + 1 < TILES) release_values<TILE + 1>();
    }

    // sums = sums * rescale + weights times values, of the block
    __device__ __forceinline__ void add_values() {
        int slot = block % 2;
        if (SPLIT || !is_own()) wait(&common.ready[slot], phase());
        if (SPLIT && number == 0) release(&common.empty[place.box]);  // both have multiplied the rotated columns
        if (!is_own()) {
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) wait_for_box(place.after(1 + number * TILES + tile));
        }
        const float* rescale = common.states[slot].rescale;
#pragma unroll
        for (int j = 0; j < EIGHTS; ++j) {
            float2 factor = *reinterpret_cast<const float2*>(rescale + 8 * j + first_pair());
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile) {
                    float& sum = sums[tile][4 * j + i];
                    sum = __fmul_rn(sum, i % 2 ? factor.y : factor.x);
                }
        }
        u64 weights = place_of(WEIGHTS_AT + slot * (PADDED * 128));
        begin_products();
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            Place box = place.after(1 + number * TILES + tile);
            u64 values = place_of(RING_AT + box.box * BOX_BYTES);
#pragma unroll
            for (int k = 0; k < 4; ++k) multiply_values(sums[tile], values + 128 * k, weights + 2 * k);
            commit_products();
        }
        release_values<0>();
        if (!is_own()) release(&common.free[slot]);
    }

    // A softmax over the keys of a piece, whose state is that of the last block.
    __device__ __forceinline__ void attend_to_piece(int first_key, int end_key) {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
            for (int i = 0; i < COUNT / 2; ++i) sums[tile][i] = 0.0f;
        bool is_late = false;  // whether values of the block before have yet to be added
        for (int key = first_key; key < end_key; key += KEYS) {
            bool is_first = key == first_key;
            if (is_own()) {
                Scores scores;
                multiply_block(scores);
                hide(scores, key);
                weigh(scores, is_first);
                if (is_late) add_late();
                add_values();
                is_late = false;
            } else {
                is_late = true;
            }
            advance();
        }
        if (is_late) add_late();
    }

    __device__ __forceinline__ void add_late() {
        go_back();
        add_values();
        advance();
    }

    // After a piece: leave what was found, or add it to that of the pieces before.
    __device__ __forceinline__ void leave(int slot, bool by_piece, bool is_first) {
        wait_for_state();
        const State& state = common.states[(block - 1) % 2];
        int own = first_own() + thread;
        float *stats = work.stats + static_cast<long long>(slot) * (2 * PADDED) + first_of_part() + own, highest, denominator;
        bool has_stats = thread < OWN && (SPLIT || (block - 1) % 2 == number);  // who wrote them
        if (has_stats) {
            highest = state.highest[own];
            denominator = state.denominator[own];
            if (!by_piece) {
                float old = is_first ? LOWEST : stats[0], top = fmaxf(old, highest);
                float kept = exp2_of(__fadd_rn(old, -top)), added = exp2_of(__fadd_rn(highest, -top));
                denominator = __fmaf_rn(is_first ? 0.0f : stats[PADDED], kept, __fmul_rn(denominator, added));
                highest = top;
                common.kept[own] = kept;
                common.added[own] = added;
            }
            stats[0] = highest;
            stats[PADDED] = denominator;
        }
        if (!by_piece) meet_threads(BOTH, 256);
        float* to = work.sums + (static_cast<long long>(slot) * PADDED + first_of_part()) * RANK;
        to += (number * TILES * 128 + thread) * 4;
#pragma unroll
        for (int j = 0; j < EIGHTS; ++j)
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                float* s = sums[tile] + 4 * j;
                float4* place = reinterpret_cast<float4*>(to + (j * (RANK / 64) + tile) * 512);
                if (!by_piece) {
                    float4 old = is_first ? make_float4(0, 0, 0, 0) : *place;
                    float* before = &old.x;
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        int pair = 8 * j + first_pair() + i % 2;
                        s[i] = __fmaf_rn(before[i], common.kept[pair], __fmul_rn(s[i], common.added[pair]));
                    }
                }
                *place = make_float4(s[0], s[1], s[2], s[3]);
            }
        if (!by_piece) meet_threads(BOTH, 256);
    }
};

template <int COUNT>
__device__ __forceinline__ void attend(const Work& work, const Items& items, char* memory, Common& common) {
    Group<COUNT> group(work, memory, common);
    int request = -1;
    if (READ_BEFORE_WAIT) wait_for_kernels_before();
    constexpr int DIVISOR = PADDED / COUNT;
    for (int turn = 0, number; (number = items.at_turn(turn)) < items.total * DIVISOR; ++turn) {
        Item item = items.item(number / DIVISOR);
        if (item.request != request || DIVISOR > 1) {
            request = item.request;  // the queries of another one are multiplied: its last state was waited for
            group.part = number % DIVISOR;
            place_queries<COUNT>(work, request, group.first_of_part(), memory);
            if (group.number == 0 && group.thread < WIDTH)
                common.positions[group.thread] = static_cast<int>(work.positions[request * WIDTH + group.thread]);
            meet_threads(BOTH, 256);  // queries are placed
        }
        int keys = common.keys[request];
        for (int piece = item.first; piece < item.end; ++piece) {
            group.attend_to_piece(piece_start(piece), min(piece_start(piece + 1), keys));
            group.leave(item.slot, items.by_piece, piece == item.first);
        }
    }
}
