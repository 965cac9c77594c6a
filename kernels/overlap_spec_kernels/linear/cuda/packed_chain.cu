// Linears of 1 to 8 rows on Hopper (sm_90a), with float8 weights in fragment order: a layer from its attention on,
//
//     h = residual + output(x),    g = silu(gate(norm(h))) * up(norm(h)),    h + down(g), ready for the next norm
//
// Each linear needs all of the one before it, and what waits is not to stop memory. So programs stay: one on each
// multiprocessor, with a ring that is filled with the next linear's W while the last tiles of the one before are still
// added up elsewhere. Every result has the bits of packed_products.cu, in one order of sums (ordered_quantized.py).
//
//     x      rows of an item's columns, in pieces, of which a barrier tells when each is there
//     ring   [stage] | W: TILES tiles of 16 rows for each multiplying warp
//     full   of a stage: its tiles have arrived
//     empty  of a stage: all multiplying warps have read it
//
// A warp has every WARPS-th tile of an item; stages hold gate and up in turns. One warp asks the copy engine for W, ahead
// of all others. The multiplying warps load x themselves, as soon as the linear before has ended, which a counter
// in global memory tells: the copy engine would bring it after all of W that it was asked for. K of output and down may
// have parts, whose sums are left in global memory; the last program of a tile adds them in their order, and finishes
// it. All programs run at once.
//
//     WARPS   that multiply                  ROWS       of x, for which there is room: 1, 2, 4 or 8
//     TILES   of a warp                      X_COLUMNS  of x, the most of an item
//     STAGES  of the ring                    DEPTH      columns of a stage: 128 or 256
//     AHEAD   stages of W on their way       PIECES     of an item's x

#include "additions.cuh"
#include "hopper.cuh"

constexpr int PHASES = 3;  // output; gate and up; down
constexpr int CHUNKS = DEPTH / 64;     // of a stage, each of which has four slices of 16 columns, as a product takes them
constexpr int TILE_BYTES = 16 * DEPTH;  // of W, in a stage
constexpr int STAGE_BYTES = WARPS * TILES * TILE_BYTES;
constexpr int X_PITCH = X_COLUMNS * 2 + 16;  // bytes of a row, so that 8 rows' pieces lie in different banks
constexpr int X_BYTES = (ROWS * X_PITCH + 127) / 128 * 128;
constexpr int OTHER_WARPS = 2;         // one that copies W, one that computes scales of rows
constexpr int FIRST = 32 * OTHER_WARPS;  // thread that multiplies
constexpr int THREADS = 32 * WARPS;    // that multiply
constexpr int COLUMNS = 16 * WARPS * TILES;  // of a result, of an item
constexpr int OF_ROW = THREADS / ROWS;   // threads that load a row of x
constexpr int HELPERS = 3;             // sums of squares of a row, as packed_products.cu has them
static_assert(CHUNKS % 2 == 0, "operands are in two places by turns");
static_assert(WARPS * TILES == 8 && THREADS >= 128, "the threads that multiply finish 128 columns of 8 rows");

// A linear. The same fields in packed_chain.py.
struct Phase {
    const u16* x;           // [T, K], rows x_stride apart
    const char* weight;     // [O / 16, K / 64] tiles
    const float* scales;    // [O], of rows of W
    const u16* residual;    // [T, N], rows residual_stride apart, where one is added
    const u16* norm;        // [N]
    u16* out;               // [T, N]
    u16* weighted;          // [T, N], times the norm's weight
    float* sums;            // [N / 64, T], of squares
    float* parts;           // [N / 128, splits, T, 128], sums of parts of K
    u32* counters;          // [N / 128], parts that are there; zero between launches
    int x_stride, residual_stride;
    int size_n;             // N, columns of the result
    int size_k;
    int tiles;              // of 16 columns, of an item
    int items;              // groups of tiles, times parts of K
    int splits;
};

struct Work {
    Phase phases[PHASES];
    const float* squares;  // [num_squares, T], of the norm before the linear that is scaled
    u32* ended;            // [PHASES]: items of a linear, of all parts of K, that are finished; zero between launches
    int num_squares;
    int num_rows;
    float eps;             // of that norm
};

constexpr int SCALED = 1;  // the phase whose results a norm scales

struct Barriers {
    u64 full[STAGES], empty[STAGES];
    u64 x[PIECES];
    u64 ended;   // the linear before the one that is scaled has ended everywhere
    u64 scaled;  // `of_row` is there
};

struct Common {
    Barriers barriers;
    float of_row[8];
    float helpers[HELPERS][8];
    int is_last;
    uint4 zeros;  // in place of rows that x does not have
};

using Place = RingPlace<STAGES>;

// Tiles of a linear, and a part of its K.
struct Item {
    int group, part, begin, end;  // stages begin..end - 1

    __device__ __forceinline__ Item(const Phase& phase, int number)
        : group(number / phase.splits), part(number % phase.splits) {
        int stages = phase.size_k / DEPTH;
        begin = part * stages / phase.splits;
        end = (part + 1) * stages / phase.splits;
    }
};

__device__ __forceinline__ constexpr int matrices(int phase) { return phase == 1 ? 2 : 1; }

// What counts as one of a linear's ends.
__device__ __forceinline__ int ends(const Phase& phase) { return phase.items / phase.splits; }

__device__ __forceinline__ void await_end(const Work& work, int phase) {
    while (counted(work.ended + phase) < ends(work.phases[phase])) {}
}

// ---- a warp that copies W, of which each lane takes a tile ----

__device__ __forceinline__ void copy_stage(
    const Phase& phase, const Item& item, int matrix, int at, char* stage, u64* full
) {
    int lane = threadIdx.x % 32, tiles = min(phase.tiles, phase.size_n / 16 - item.group * phase.tiles);
    if (lane == 0) expect(full, tiles * TILE_BYTES);
    __syncwarp();
    if (lane >= tiles) return;
    long long row = matrix * (phase.size_n / 16) + item.group * phase.tiles + lane;
    const char* source = phase.weight + row * (phase.size_k * 16) + at * TILE_BYTES;
    copy_bytes_once(shared(stage + lane * TILE_BYTES), source, TILE_BYTES, shared(full));
}

__device__ __forceinline__ void copy_w(const Work& work, char* ring, Barriers& barriers) {
    Place place, arrived;
    int on_their_way = 0;
    for (int phase = 0; phase < PHASES; ++phase) {
        const Phase& of = work.phases[phase];
        for (int number = blockIdx.x; number < of.items; number += gridDim.x) {
            Item item(of, number);
            int steps = (item.end - item.begin) * matrices(phase);
            for (int step = 0; step < steps; ++step, place.advance()) {
                if (on_their_way == AHEAD) {
                    wait(&barriers.full[arrived.stage], arrived.parity);
                    arrived.advance();
                } else {
                    ++on_their_way;
                }
                wait(&barriers.empty[place.stage], place.parity ^ 1);
                int matrix = step % matrices(phase), at = item.begin + step / matrices(phase);
                copy_stage(of, item, matrix, at, ring + place.stage * STAGE_BYTES, &barriers.full[place.stage]);
                __syncwarp();
            }
        }
    }
}

// ---- a warp that computes the norm's scales of rows ----

// Bring what ends read beside W into the L2 cache: memory would bring it after W.
__device__ __forceinline__ void prefetch_constants(const Work& work) {
    int lane = threadIdx.x % 32;
    for (int phase = 0; phase < PHASES; ++phase) {
        const Phase& of = work.phases[phase];
        if (blockIdx.x >= of.items) continue;
        int columns = of.tiles * 16, first = Item(of, blockIdx.x).group * columns;
        columns = min(columns, of.size_n - first);
        for (int matrix = 0; matrix < matrices(phase); ++matrix)
            prefetch_lines(of.scales + matrix * of.size_n + first, 4 * columns, lane, 32);
        if (of.norm != nullptr) prefetch_lines(of.norm + first, 2 * columns, lane, 32);
    }
}

__device__ __forceinline__ void scale_rows(const Work& work, Common& common) {
    prefetch_constants(work);
    wait_for_kernels_before();
    if (blockIdx.x >= work.phases[SCALED].items) return;
    int lane = threadIdx.x % 32, row = lane / HELPERS, helper = lane % HELPERS;
    wait(&common.barriers.ended, 0);
    if (row < work.num_rows) {
        float sum = 0;
#pragma unroll 8
        for (int part = helper; part < work.num_squares; part += HELPERS)
            sum += work.squares[part * work.num_rows + row];
        common.helpers[helper][row] = sum;
    }
    __syncwarp();
    if (lane < work.num_rows) {
        float sum = common.helpers[0][lane] + common.helpers[1][lane] + common.helpers[2][lane];
        common.of_row[lane] = rsqrtf(sum / work.phases[SCALED].size_k + work.eps);
    }
    __syncwarp();
    if (lane == 0) arrive(&common.barriers.scaled);
}

// ---- the warps that multiply ----

// Stages first_of(piece)..first_of(piece + 1) - 1 of an item multiply a piece of x. The first piece has some.
__device__ __forceinline__ int first_of(const Item& item, int piece) {
    return (piece * (item.end - item.begin) + PIECES - 1) / PIECES;
}

// Ask for x of an item.
template <int PHASE>
__device__ __forceinline__ void load_x(const Work& work, const Item& item, char* x, Barriers& barriers, bool is_first) {
    const Phase& phase = work.phases[PHASE];
    int thread = threadIdx.x - FIRST, row = thread / OF_ROW;
    if (PHASE > 0 && thread == 0) {
        await_end(work, PHASE - 1);
        if (PHASE == SCALED && is_first) arrive(&barriers.ended);
    }
    meet_threads(1, THREADS);  // all have read x of the item before
    const u16* source = phase.x + static_cast<long long>(row) * phase.x_stride + item.begin * DEPTH;
#pragma unroll 1
    for (int piece = 0; piece < PIECES; ++piece) {
        int first = first_of(item, piece) * (DEPTH / 8), end = first_of(item, piece + 1) * (DEPTH / 8);
        if (row < work.num_rows)
            for (int at = first + thread % OF_ROW; at < end; at += OF_ROW)
                copy_piece(shared(x + row * X_PITCH + at * 16), source + at * 8);
        arrive_after_pieces(&barriers.x[piece]);
    }
}

// The pieces of x that are there. Barriers are in the same phase: each item has all pieces, some of them without a stage.
struct Pieces {
    u32 parity = 0;
    int piece, next;  // the last one that was waited for, and the first stage of the one after it

    __device__ __forceinline__ void begin(const Item& item, Barriers& barriers) {
        piece = 0;
        next = first_of(item, 1);
        wait(&barriers.x[0], parity);
    }

    __device__ __forceinline__ void await(const Item& item, Barriers& barriers, int stage) {
        while (piece + 1 < PIECES && stage >= next) {
            wait(&barriers.x[++piece], parity);
            next = first_of(item, piece + 1);
        }
    }
};

// Where a lane finds its row of a matrix of operands of x.
struct Source {
    u32 at;
    int step;  // bytes of 16 columns; 0 in a row that x does not have

    __device__ __forceinline__ Source(const char* x, const Common& common, int num_rows) {
        int lane = threadIdx.x % 32, row = lane % 8;
        at = row < num_rows ? shared(x) + row * X_PITCH + lane / 8 * 16 : shared(&common.zeros);
        step = row < num_rows ? 32 : 0;
    }
};

// Of 64 columns.
struct Operands {
    uint4 w[TILES][2];  // as they are stored: two runs of two slices
    u32 x[4][2];
};

// The multiplying warp, and its tiles of an item. Where the last item has fewer tiles, it has one of these again.
struct Tiles {
    int at[TILES];

    __device__ __forceinline__ explicit Tiles(int count) {
#pragma unroll
        for (int i = 0; i < TILES; ++i) at[i] = min(of(i), count - 1);
    }

    static __device__ __forceinline__ int of(int i) { return threadIdx.x / 32 - OTHER_WARPS + i * WARPS; }
};

// Those of a chunk of a stage. `column`: of x, in chunks from the item's first one.
__device__ __forceinline__ void load_operands(
    Operands& operands, const char* stage, int chunk, const Tiles& tiles, const Source& source, int column
) {
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
        const char* at = stage + tiles.at[i] * TILE_BYTES + chunk * 1024 + threadIdx.x % 32 * 16;
        operands.w[i][0] = *reinterpret_cast<const uint4*>(at);
        operands.w[i][1] = *reinterpret_cast<const uint4*>(at + 512);
    }
    u32 x = source.at + column * 4 * source.step;
#pragma unroll
    for (int s = 0; s < 4; s += 2) {
        u32(&low)[2] = operands.x[s], (&high)[2] = operands.x[s + 1];
        load_matrices(x + s * source.step, low[0], low[1], high[0], high[1]);
    }
}

// Add the products of 64 columns, slice after slice.
__device__ __forceinline__ void multiply_chunk(float (&sums)[TILES][4], const Operands& operands) {
#pragma unroll
    for (int s = 0; s < 4; ++s) {
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            const uint4& words = operands.w[i][s / 2];
            u32 w[4];
            unpack_8_bits(w, s % 2 ? words.z : words.x, s % 2 ? words.w : words.y);
            multiply16(sums[i], w, operands.x[s]);
        }
    }
}

// A warp holds the operands of a chunk while it loads those of the next one.
template <int MATRICES>
__device__ __forceinline__ void multiply_item(
    float (&sums)[MATRICES][TILES][4], const Item& item, const Tiles& tiles, const Source& source, const char* ring,
    Barriers& barriers, Place& place, Pieces& pieces
) {
    Operands operands[2];
    pieces.begin(item, barriers);
    wait(&barriers.full[place.stage], place.parity);
    load_operands(operands[0], ring + place.stage * STAGE_BYTES, 0, tiles, source, 0);
    int count = item.end - item.begin;
    for (int at = 0; at < count; ++at) {
#pragma unroll
        for (int matrix = 0; matrix < MATRICES; ++matrix) {
            const char* stage = ring + place.stage * STAGE_BYTES;
            u64* read = &barriers.empty[place.stage];
            int next_at = at + (matrix + 1) / MATRICES;
            place.advance();
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; ++chunk) {
                Operands& next = operands[(chunk + 1) % 2];
                if (chunk + 1 < CHUNKS) {
                    load_operands(next, stage, chunk + 1, tiles, source, at * CHUNKS + chunk + 1);
                } else if (next_at < count) {
                    pieces.await(item, barriers, next_at);
                    wait(&barriers.full[place.stage], place.parity);
                    load_operands(next, ring + place.stage * STAGE_BYTES, 0, tiles, source, next_at * CHUNKS);
                }
                multiply_chunk(sums[matrix], operands[chunk % 2]);
            }
            __syncwarp();  // all lanes have read the stage
            if (threadIdx.x % 32 == 0) arrive(read);
        }
    }
    pieces.await(item, barriers, count);  // those without a stage
    pieces.parity ^= 1;
}

// Those of rows g and g + 8 of a lane's tiles, of which the item's first one is `first`.
template <int MATRICES>
__device__ __forceinline__ void load_scales(
    float (&scales)[MATRICES][TILES][2], const Phase& phase, const Tiles& tiles, int first
) {
#pragma unroll
    for (int matrix = 0; matrix < MATRICES; ++matrix)
#pragma unroll
        for (int i = 0; i < 2 * TILES; ++i) {
            int row = (first + tiles.at[i / 2]) * 16 + threadIdx.x % 32 / 4 + i % 2 * 8;
            scales[matrix][i / 2][i % 2] = phase.scales[matrix * phase.size_n + row];
        }
}

// What the multiplying warps share.
struct Memory {
    char *x, *ring;
    Common& common;
    Pieces pieces;
};

// ---- the end of output and down ----

// Eight columns of a row of a group of tiles: its place among the threads that finish one.
struct Spot {
    int thread, row, in_group, column;

    __device__ __forceinline__ Spot(int group)
        : thread(threadIdx.x - FIRST), row(thread / 16), in_group(thread % 16 * 8), column(group * COLUMNS + in_group) {}
};

__device__ __forceinline__ Addends addends_of(const Phase& phase, const Spot& spot, int num_rows) {
    const u16* of_row = phase.residual + static_cast<long long>(spot.row) * phase.residual_stride;
    return Addends(of_row, phase.norm, spot.column, spot.row < num_rows);
}

__device__ __forceinline__ float* part_of(const Phase& phase, int group, int part, int num_rows) {
    return phase.parts + static_cast<long long>(group * phase.splits + part) * num_rows * COLUMNS;
}

// Leave the sums of a part of K. True for the threads of the last program of this tile.
__device__ __forceinline__ bool leave_part(
    const float (&sums)[TILES][4], const float (&scales)[TILES][2], const Phase& phase, const Item& item, int num_rows,
    int* is_last
) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 4 * TILES; ++i) {
        int row = lane % 4 * 2 + i % 2, column = Tiles::of(i / 4) * 16 + lane / 4 + i % 4 / 2 * 8;
        float* part = part_of(phase, item.group, item.part, num_rows) + row * COLUMNS + column;
        if (row < num_rows) *part = __fmul_rn(sums[i / 4][i % 4], scales[i / 4][i % 4 / 2]);
    }
    meet_threads(1, THREADS);
    if (threadIdx.x == FIRST) {
        u32* counter = phase.counters + item.group;
        *is_last = count(counter) == static_cast<u32>(phase.splits - 1);
        if (*is_last) *counter = 0;
    }
    meet_threads(1, THREADS);
    return *is_last;
}

// The sums of all parts of K, in their order; of several, a zero before them, as packed_products.cu adds them.
__device__ __forceinline__ void add_parts(float (&y)[8], const Phase& phase, const Spot& spot, int group, int num_rows) {
#pragma unroll 4
    for (int part = 0; part < phase.splits; ++part) {
        const float* at = part_of(phase, group, part, num_rows) + spot.row * COLUMNS + spot.in_group;
        float4 low = reinterpret_cast<const float4*>(at)[0], high = reinterpret_cast<const float4*>(at)[1];
        const float values[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) y[i] = phase.splits == 1 ? values[i] : __fadd_rn(y[i], values[i]);
    }
}

// One more end. The last of all is seen by no program that still waits, so counters are put back to zero.
__device__ __forceinline__ void end_one(const Work& work, int phase) {
    u32 before = count(work.ended + phase);
    if (phase == PHASES - 1 && before == static_cast<u32>(ends(work.phases[phase]) - 1))
        for (int i = 0; i < PHASES; ++i) work.ended[i] = 0;
}

template <int PHASE>
__device__ __forceinline__ void run_addition(const Work& work, Memory& memory, Place& place) {
    const Phase& phase = work.phases[PHASE];
    for (int number = blockIdx.x; number < phase.items; number += gridDim.x) {
        Item item(phase, number);
        Spot spot(item.group);
        Tiles tiles(phase.tiles);
        float scales[1][TILES][2], sums[1][TILES][4] = {};
        load_scales(scales, phase, tiles, item.group * phase.tiles);
        load_x<PHASE>(work, item, memory.x, memory.common.barriers, number == blockIdx.x);
        Addends addends = addends_of(phase, spot, work.num_rows);
        Source source(memory.x, memory.common, work.num_rows);
        multiply_item<1>(sums, item, tiles, source, memory.ring, memory.common.barriers, place, memory.pieces);
        if (!leave_part(sums[0], scales[0], phase, item, work.num_rows, &memory.common.is_last)) continue;
        if (spot.thread < 16 * 8) {
            float y[8] = {};
            bool inside = spot.row < work.num_rows;
            if (inside) add_parts(y, phase, spot, item.group, work.num_rows);
            long long at = static_cast<long long>(spot.row) * phase.size_n + spot.column;
            float sum = write_sum(y, addends, phase.out, phase.weighted, at, inside);
            if (spot.thread % 8 == 0 && inside) phase.sums[spot.column / 64 * work.num_rows + spot.row] = sum;
            meet_threads(2, 16 * 8);
            if (spot.thread == 0) end_one(work, PHASE);
        }
    }
}

// ---- the end of gate and up, and of a linear alone ----

// What a lane has of a tile: rows g and g + 8 of W, rows 2 t and 2 t + 1 of x.
template <int MATRICES>
__device__ __forceinline__ void write_tile(
    const float (&sums)[MATRICES][TILES][4], const float (&scales)[MATRICES][TILES][2], const Work& work,
    const Phase& phase, const Common& common, int tile, int column
) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        int row = threadIdx.x % 4 * 2 + i % 2, n = column + i / 2 * 8;
        if (row >= work.num_rows) continue;
        float y[MATRICES];
#pragma unroll
        for (int matrix = 0; matrix < MATRICES; ++matrix) {
            float scaled = __fmul_rn(sums[matrix][tile][i], scales[matrix][tile][i / 2]);
            y[matrix] = __fmul_rn(scaled, common.of_row[row]);
        }
        if constexpr (MATRICES == 2) y[0] = gated(y[0], y[MATRICES - 1]);
        phase.out[static_cast<long long>(row) * phase.size_n + n] = static_cast<u16>(round_bfloat16(y[0], 0));
    }
}

template <int PHASE>
__device__ __forceinline__ void run_scaled(const Work& work, Memory& memory, Place& place) {
    constexpr int MATRICES = matrices(PHASE);
    const Phase& phase = work.phases[PHASE];
    for (int number = blockIdx.x; number < phase.items; number += gridDim.x) {
        Item item(phase, number);
        int first = item.group * phase.tiles, count = min(phase.tiles, phase.size_n / 16 - first);
        Tiles tiles(count);
        float scales[MATRICES][TILES][2], sums[MATRICES][TILES][4] = {};
        load_scales(scales, phase, tiles, first);
        load_x<PHASE>(work, item, memory.x, memory.common.barriers, number == blockIdx.x);
        Source source(memory.x, memory.common, work.num_rows);
        multiply_item<MATRICES>(sums, item, tiles, source, memory.ring, memory.common.barriers, place, memory.pieces);
        wait(&memory.common.barriers.scaled, 0);
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            int column = (first + Tiles::of(i)) * 16 + threadIdx.x % 32 / 4;
            if (Tiles::of(i) < count) write_tile(sums, scales, work, phase, memory.common, i, column);
        }
        meet_threads(1, THREADS);
        if (threadIdx.x == FIRST) end_one(work, PHASE);
    }
}

// ---- the whole ----

extern "C" __global__ void __launch_bounds__(FIRST + THREADS, 1) packed_chain(const __grid_constant__ Work work) {
    extern __shared__ __align__(128) char shared_memory[];
    __shared__ Common common;
    Memory memory{shared_memory, shared_memory + X_BYTES, common, {}};
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            set_up(&common.barriers.full[stage], 1);
            set_up(&common.barriers.empty[stage], WARPS);
        }
        for (int piece = 0; piece < PIECES; ++piece) set_up(&common.barriers.x[piece], THREADS);
        set_up(&common.barriers.ended, 1);
        set_up(&common.barriers.scaled, 1);
        common.zeros = {0, 0, 0, 0};
        show_barriers_to_cluster();
    }
    __syncthreads();
    let_next_begin();
    int warp = threadIdx.x / 32;
    if (warp == 0) {
        copy_w(work, memory.ring, common.barriers);
    } else if (warp == 1) {
        scale_rows(work, common);
    } else {
        wait_for_kernels_before();
        Place place;
        run_addition<0>(work, memory, place);
        run_scaled<1>(work, memory, place);
        run_addition<2>(work, memory, place);
    }
}
