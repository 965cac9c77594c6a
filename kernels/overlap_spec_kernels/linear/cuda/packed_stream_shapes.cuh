// The linears of packed_stream.cu: what follows from the constants of each.
#pragma once

enum ScaleType { ROW_FLOAT32, FLOAT32, BFLOAT16, FLOAT16, BLOCK_FLOAT32 };
constexpr int SCALE_BYTES[] = {0, 64, 32, 32, 16};  // of a group in a row of tiles
constexpr int BLOCKS = ROWS / 8;                    // of 8 rows of x, as a product takes them

template <int INDEX, class First, class... Rest>
struct Given : Given<INDEX - 1, Rest...> {};

template <class First, class... Rest>
struct Given<0, First, Rest...> {
    using Constants = First;
};

template <class...>
constexpr int count_of = 0;
template <class First, class... Rest>
constexpr int count_of<First, Rest...> = 1 + count_of<Rest...>;

constexpr int COUNT = count_of<LINEARS>;

// Linear number `I` of the kernel.
template <int I>
struct Linear : Given<I, LINEARS>::Constants {
    using C = typename Given<I, LINEARS>::Constants;
    using Next = Linear<I + 1>;

    // Groups that so many tiles belong to.
    static constexpr int groups_of(int tiles) { return C::GROUP ? tiles * 64 / (C::GROUP + !C::GROUP) : 0; }

    static constexpr int INDEX = I;
    static constexpr bool IS_LAST = I == COUNT - 1;
    static constexpr int HALVES = C::GATED ? 2 : 1;        // rows of tiles of an item
    static constexpr int DEPTH = C::K_TILES / C::CLUSTER;  // tiles of a program in a row of tiles
    static constexpr int STAGE_TILES = WARPS * C::TILES;
    static constexpr int STEPS = (DEPTH + STAGE_TILES - 1) / STAGE_TILES;  // stages that they take
    static constexpr int LAST_TILES = DEPTH - (STEPS - 1) * STAGE_TILES;   // of the last one
    static constexpr int LAST_SHARE = (LAST_TILES + WARPS - 1) / WARPS;    // of a warp in it, at most
    static constexpr int SHARE = (STEPS - 1) * C::TILES + LAST_SHARE;      // of a warp in a row of tiles
    static constexpr int TILE_BYTES = 128 * C::BITS;
    static constexpr int ENTRY = SCALE_BYTES[C::SCALE];
    static constexpr int ZERO_ENTRY = C::ZEROS ? 32 : 0;
    static constexpr int SCALES_AT = STAGE_TILES * TILE_BYTES;
    static constexpr int ZEROS_AT = SCALES_AT + groups_of(STAGE_TILES) * ENTRY;
    static constexpr int BYTES = ZEROS_AT + groups_of(STAGE_TILES) * ZERO_ENTRY;  // of a stage

    // What a warp leaves, four floats each; behind that of all warps is what other programs send.
    static constexpr int SUMS = HALVES * BLOCKS * 32;
    static constexpr int SEND_AT = WARPS * 2 * SUMS * 16;
    static constexpr int SUMS_BYTES = SEND_AT + (C::CLUSTER - 1) * 2 * SUMS * 16;  // a multiple of 512

    static_assert(C::K_TILES % C::CLUSTER == 0, "whole tiles");
    static_assert(groups_of(DEPTH) * C::GROUP == (C::GROUP ? DEPTH * 64 : 0), "whole groups");
    static_assert(groups_of(STAGE_TILES) * C::GROUP == (C::GROUP ? STAGE_TILES * 64 : 0), "a stage has whole groups");
};

constexpr int larger(int a, int b) { return a > b ? a : b; }

// The most that any linear needs.
template <int I>
struct Most {
    using Rest = Most<I - 1>;
    static constexpr int CLUSTER = larger(Linear<I>::CLUSTER, Rest::CLUSTER);
    static constexpr int BYTES = larger(Linear<I>::BYTES, Rest::BYTES);
    static constexpr int SUMS_BYTES = larger(Linear<I>::SUMS_BYTES, Rest::SUMS_BYTES);
    static_assert(Linear<I>::CLUSTER == 1 || Linear<I>::CLUSTER == CLUSTER, "a whole cluster divides K, or none");
};

template <>
struct Most<-1> {
    static constexpr int CLUSTER = 1, BYTES = 0, SUMS_BYTES = 0;
};

constexpr int CLUSTER = Most<COUNT - 1>::CLUSTER;
constexpr int STAGE_BYTES = Most<COUNT - 1>::BYTES;
constexpr int RING_AT = Most<COUNT - 1>::SUMS_BYTES;  // behind the sums
