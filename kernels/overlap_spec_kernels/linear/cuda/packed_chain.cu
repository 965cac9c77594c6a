// A layer from its attention on, for 1 to 8 rows on Hopper (sm_90a), with float8 weights in fragment order:
//
//     h = residual + output(x),    g = silu(gate(norm(h))) * up(norm(h)),    h + down(g), ready for the next norm
//
// Each linear needs all of the one before it, and what waits is not to stop memory. So programs stay: one on each
// multiprocessor, with a ring that is filled with the next linear's W while the last tiles of the one before are still
// added up elsewhere. Every result has the bits of packed_products.cu, in one order of sums (ordered_quantized.py).
//
//     ring   [stage] | x: [8, 64] swizzled by 128 bytes, for each 64 columns | W: up to 8 tiles of 16 rows |
//     w      of a stage: its tiles of W have arrived
//     x      of a stage: its columns of x have arrived, or it takes those of the stage before it
//     empty  of a stage: all multiplying warps have read it
//
// A warp has a tile of 16 rows of W, of gate two: stages hold gate and up in turns. One warp copies W, ahead of all
// others, and a thread x, as soon as the linear before has ended, which a counter in global memory tells. W on its way
// keeps x waiting, so at most AHEAD stages are on theirs. K of output and down may have parts, whose sums are left in
// global memory; the last program of a tile adds them in their order, and finishes it. All programs run at once.
//
//     STAGES  of the ring    AHEAD  stages of W on their way    DEPTH  columns of a stage: 128 or 256

#include "hopper.cuh"
#include "fragments.cuh"

constexpr int PHASES = 3;  // output; gate and up; down
constexpr int WARPS = 8;   // that multiply, of a tile each
constexpr int ROWS = 8;    // of x, padded
constexpr int SLICES = DEPTH / 16;         // of a stage, which a product takes
constexpr int X_TILE_BYTES = ROWS * 128;
constexpr int X_BYTES = ROWS * DEPTH * 2;
constexpr int TILE_BYTES = 16 * DEPTH;     // of W, of a warp in a stage
constexpr int STAGE_BYTES = X_BYTES + WARPS * TILE_BYTES;
constexpr int COPY_WARPS = 4;
constexpr int COLUMNS = 16 * WARPS;  // of a result, of an item
constexpr int HELPERS = 3;           // sums of squares of a row, as packed_products.cu has them

// A linear. The same fields in packed_chain.py.
struct Phase {
    const char* weight;     // [O / 16, K / 64] tiles
    const float* scales;    // [O], of rows of W
    const u16* residual;    // [T, N], rows residual_stride apart, where one is added
    const u16* norm;        // [N]
    u16* out;               // [T, N]
    u16* weighted;          // [T, N], times the norm's weight
    float* sums;            // [N / 64, T], of squares
    float* parts;           // [N / 128, splits, T, 128], sums of parts of K
    u32* counters;          // [N / 128], parts that are there; zero between launches
    int size_n;             // N, columns of the result
    int size_k;
    int tiles;              // of 16 columns, of an item
    int items;              // groups of tiles, times parts of K
    int splits;
    int residual_stride;
};

struct Work {
    Phase phases[PHASES];
    u32* ended;  // [PHASES]: items of a linear, of all parts of K, that are finished; zero between launches
    int num_rows;
    float eps;   // of the norm before gate and up
};

struct Barriers {
    u64 w[STAGES], x[STAGES], empty[STAGES];
    u64 scaled;  // `of_row` is there
    u64 ended;   // gate and up have ended everywhere
};

struct Common {
    Barriers barriers;
    float of_row[ROWS];
    float helpers[HELPERS][ROWS];
    int is_last;
};

// A place in the ring, and the parity of its barriers' phase.
struct Place {
    int stage = 0;
    u32 parity = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

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

// What this thread wrote is seen by copies that are begun after others have read that it is there.
__device__ __forceinline__ void show_to_all_copies() { asm volatile("fence.proxy.async;" ::: "memory"); }

__device__ __forceinline__ void await_end(const Work& work, int phase) {
    while (counted(work.ended + phase) < ends(work.phases[phase])) {}
}

struct Maps {
    const TensorMap* x[PHASES];
};

// ---- a warp that copies W, of which each lane takes a tile ----

// Tiles of an item that the result has.
__device__ __forceinline__ int tiles_of(const Phase& phase, const Item& item) {
    return min(phase.tiles, phase.size_n / 16 - item.group * phase.tiles);
}

__device__ __forceinline__ void copy_stage(
    const Phase& phase, const Item& item, int matrix, int at, char* stage, u64* full
) {
    int lane = threadIdx.x % 32, tiles = tiles_of(phase, item);
    if (lane == 0) expect(full, tiles * TILE_BYTES);
    __syncwarp();
    if (lane >= tiles) return;
    long long row = matrix * (phase.size_n / 16) + item.group * phase.tiles + lane;
    const char* source = phase.weight + row * (phase.size_k * 16) + at * TILE_BYTES;
    copy_bytes(shared(stage + X_BYTES + lane * TILE_BYTES), source, TILE_BYTES, shared(full));
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
                    wait(&barriers.w[arrived.stage], arrived.parity);
                    arrived.advance();
                } else {
                    ++on_their_way;
                }
                wait(&barriers.empty[place.stage], place.parity ^ 1);
                int matrix = step % matrices(phase), at = item.begin + step / matrices(phase);
                copy_stage(of, item, matrix, at, ring + place.stage * STAGE_BYTES, &barriers.w[place.stage]);
                __syncwarp();
            }
        }
    }
}

// ---- a thread that copies x ----

__device__ __forceinline__ void copy_x(const Maps& maps, const Work& work, char* ring, Barriers& barriers) {
    Place place;
    wait_for_kernels_before();
    for (int phase = 0; phase < PHASES; ++phase) {
        const Phase& of = work.phases[phase];
        if (phase > 0 && blockIdx.x < of.items) {
            await_end(work, phase - 1);
            show_to_all_copies();
            if (phase == 2) arrive(&barriers.ended);
        }
        for (int number = blockIdx.x; number < of.items; number += gridDim.x) {
            Item item(of, number);
            int steps = (item.end - item.begin) * matrices(phase);
            for (int step = 0; step < steps; ++step, place.advance()) {
                wait(&barriers.empty[place.stage], place.parity ^ 1);
                u64* full = &barriers.x[place.stage];
                if (step % matrices(phase) != 0) {
                    arrive(full);
                    continue;
                }
                int column = (item.begin + step / matrices(phase)) * DEPTH;
                u32 target = shared(ring + place.stage * STAGE_BYTES);
                expect(full, X_BYTES);
#pragma unroll
                for (int tile = 0; tile < DEPTH / 64; ++tile)
                    copy_tile(target + tile * X_TILE_BYTES, maps.x[phase], full, column + tile * 64, 0);
            }
        }
    }
}

// ---- a warp that computes the norm's scales of rows ----

__device__ __forceinline__ void scale_rows(const Work& work, Common& common) {
    wait_for_kernels_before();
    if (blockIdx.x >= work.phases[1].items) return;
    int lane = threadIdx.x % 32, row = lane / HELPERS, helper = lane % HELPERS;
    const Phase& before = work.phases[0];
    if (lane == 0) await_end(work, 0);
    __syncwarp();
    if (row < work.num_rows) {
        float sum = 0;
#pragma unroll 8
        for (int part = helper; part < before.size_n / 64; part += HELPERS)
            sum += before.sums[part * work.num_rows + row];
        common.helpers[helper][row] = sum;
    }
    __syncwarp();
    if (lane < work.num_rows) {
        float sum = common.helpers[0][lane] + common.helpers[1][lane] + common.helpers[2][lane];
        common.of_row[lane] = rsqrtf(sum / before.size_n + work.eps);
    }
    __syncwarp();
    if (lane == 0) arrive(&common.barriers.scaled);
}

// ---- the warps that multiply ----

// Operands of x of a stage: for each slice of 16 columns. Piece c of row r lies at c ^ r of its 8 places.
__device__ __forceinline__ void load_x(u32 (&x)[SLICES][2], const char* stage) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < SLICES; i += 2) {
        u32 at = shared(stage) + i / 4 * X_TILE_BYTES + lane % 8 * 128 + ((i % 4 * 2 + lane / 8) ^ lane % 8) * 16;
        load_matrices(at, x[i][0], x[i][1], x[i + 1][0], x[i + 1][1]);
    }
}

// Add the products of a stage, slice after slice, of the tile of W at `at`.
__device__ __forceinline__ void multiply_stage(float (&sums)[4], const u32 (&x)[SLICES][2], const char* at) {
#pragma unroll
    for (int first = 0; first < SLICES; first += 8) {
        uint4 words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            words[i] = *reinterpret_cast<const uint4*>(at + (first / 2 + i) * 512 + threadIdx.x % 32 * 16);
#pragma unroll
        for (int slice = 0; slice < 8; ++slice) {
            const uint4& both = words[slice / 2];
            u32 w[4];
            unpack_8_bits(w, slice % 2 ? both.z : both.x, slice % 2 ? both.w : both.y);
            multiply16(sums, w, x[first + slice]);
        }
    }
}

template <int MATRICES>
__device__ __forceinline__ void multiply_item(
    float (&sums)[MATRICES][4], const Item& item, int tiles, const char* ring, Barriers& barriers, Place& place
) {
    int warp = threadIdx.x / 32 - COPY_WARPS;
    u32 x[SLICES][2];
    for (int at = item.begin; at < item.end; ++at) {
#pragma unroll
        for (int matrix = 0; matrix < MATRICES; ++matrix) {
            const char* stage = ring + place.stage * STAGE_BYTES;
            wait(&barriers.x[place.stage], place.parity);
            if (matrix == 0) load_x(x, stage);
            wait(&barriers.w[place.stage], place.parity);
            if (warp < tiles) multiply_stage(sums[matrix], x, stage + X_BYTES + warp * TILE_BYTES);
            __syncwarp();  // all lanes have read the stage
            if (threadIdx.x % 32 == 0) arrive(&barriers.empty[place.stage]);
            place.advance();
        }
    }
}

// ---- the end of output and down ----

// What a thread adds to eight columns of a row, and the weights of the norm.
struct Addends {
    uint4 residual = {0, 0, 0, 0}, norm = {0, 0, 0, 0};
};

__device__ __forceinline__ void unpack(float (&values)[8], const uint4& packed) {
    const u32 pairs[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        values[2 * i] = widen_bfloat16(pairs[i]).x;
        values[2 * i + 1] = widen_bfloat16(pairs[i]).y;
    }
}

__device__ __forceinline__ uint4 round8(const float (&values)[8]) {
    u32 low = round_bfloat16(values[0], values[1]), next = round_bfloat16(values[2], values[3]);
    return {low, next, round_bfloat16(values[4], values[5]), round_bfloat16(values[6], values[7])};
}

// Eight columns of a row of a group of tiles: its place among the threads that finish one.
struct Spot {
    int thread, row, in_group, column;

    __device__ __forceinline__ Spot(int group)
        : thread(threadIdx.x - 32 * COPY_WARPS), row(thread / 16), in_group(thread % 16 * 8),
          column(group * COLUMNS + in_group) {}
};

__device__ __forceinline__ Addends addends_of(const Phase& phase, const Spot& spot, int num_rows) {
    Addends found;
    if (spot.row >= num_rows) return found;
    const u16* of_row = phase.residual + static_cast<long long>(spot.row) * phase.residual_stride;
    found.residual = *reinterpret_cast<const uint4*>(of_row + spot.column);
    found.norm = *reinterpret_cast<const uint4*>(phase.norm + spot.column);
    return found;
}

__device__ __forceinline__ float* part_of(const Phase& phase, int group, int part, int num_rows) {
    return phase.parts + static_cast<long long>(group * phase.splits + part) * num_rows * COLUMNS;
}

// Leave the sums of a part of K. True for the threads of the last program of this tile.
__device__ __forceinline__ bool leave_part(
    const float (&sums)[4], const Phase& phase, const Item& item, float upper, float lower, int num_rows, int* is_last
) {
    int lane = threadIdx.x % 32, column = (threadIdx.x / 32 - COPY_WARPS) * 16 + lane / 4;
    float* part = part_of(phase, item.group, item.part, num_rows) + column;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        int row = lane % 4 * 2 + i;
        if (row < num_rows) {
            part[row * COLUMNS] = __fmul_rn(sums[i], upper);
            part[row * COLUMNS + 8] = __fmul_rn(sums[2 + i], lower);
        }
    }
    meet_threads(1, 32 * WARPS);
    if (threadIdx.x == 32 * COPY_WARPS) {
        u32* counter = phase.counters + item.group;
        *is_last = count(counter) == static_cast<u32>(phase.splits - 1);
        if (*is_last) *counter = 0;
    }
    meet_threads(1, 32 * WARPS);
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

// Add to the residual; prepare the norm; the sum of squares of 64 columns of a row.
__device__ __forceinline__ void write_sum(
    float (&y)[8], const Phase& phase, const Spot& spot, const Addends& addends, int num_rows
) {
    bool valid = spot.row < num_rows;
    float values[8], weights[8], squares[8];
    unpack(values, addends.residual);
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = __fadd_rn(y[i], values[i]);
    uint4 rounded = round8(y);
    unpack(values, rounded);
    unpack(weights, addends.norm);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        squares[i] = valid ? __fmul_rn(values[i], values[i]) : 0;
        weights[i] = __fmul_rn(weights[i], values[i]);
    }
    if (valid) {
        long long at = static_cast<long long>(spot.row) * phase.size_n + spot.column;
        *reinterpret_cast<uint4*>(phase.out + at) = rounded;
        *reinterpret_cast<uint4*>(phase.weighted + at) = round8(weights);
    }
#pragma unroll
    for (int step = 1; step < 8; step *= 2)  // neighbours first, as ordered_quantized.py adds them
#pragma unroll
        for (int i = 0; i < 8; i += 2 * step) squares[i] = __fadd_rn(squares[i], squares[i + step]);
    float sum = squares[0];
#pragma unroll
    for (int lanes = 1; lanes < 8; lanes *= 2) sum += __shfl_xor_sync(0xffffffff, sum, lanes);
    if (spot.thread % 8 == 0 && valid) phase.sums[spot.column / 64 * num_rows + spot.row] = sum;
}

// One more end. The last of all is seen by no program that still waits, so counters are put back to zero.
__device__ __forceinline__ void end_one(const Work& work, int phase) {
    u32 before = count(work.ended + phase);
    if (phase == PHASES - 1 && before == static_cast<u32>(ends(work.phases[phase]) - 1))
        for (int i = 0; i < PHASES; ++i) work.ended[i] = 0;
}

template <int PHASE>
__device__ __forceinline__ void run_addition(const Work& work, const char* ring, Common& common, Place& place) {
    const Phase& phase = work.phases[PHASE];
    int row = threadIdx.x % 32 / 4 + (threadIdx.x / 32 - COPY_WARPS) * 16;
    for (int number = blockIdx.x; number < phase.items; number += gridDim.x) {
        Item item(phase, number);
        const float* scales = phase.scales + item.group * COLUMNS + row;
        float upper = scales[0], lower = scales[8], sums[1][4] = {};
        Spot spot(item.group);
        multiply_item<1>(sums, item, phase.tiles, ring, common.barriers, place);
        Addends addends = addends_of(phase, spot, work.num_rows);
        if (!leave_part(sums[0], phase, item, upper, lower, work.num_rows, &common.is_last)) continue;
        if (spot.thread < 16 * ROWS) {
            float y[8] = {};
            if (spot.row < work.num_rows) add_parts(y, phase, spot, item.group, work.num_rows);
            write_sum(y, phase, spot, addends, work.num_rows);
            show_to_all_copies();
            meet_threads(2, 16 * ROWS);
            if (spot.thread == 0) end_one(work, PHASE);
        }
    }
}

// ---- the end of gate and up ----

__device__ __forceinline__ void run_gates(const Work& work, const char* ring, Common& common, Place& place) {
    const Phase& phase = work.phases[1];
    int warp = threadIdx.x / 32 - COPY_WARPS, lane = threadIdx.x % 32;
    for (int number = blockIdx.x; number < phase.items; number += gridDim.x) {
        Item item(phase, number);
        int column = (item.group * phase.tiles + warp) * 16 + lane / 4;
        bool inside = warp < phase.tiles && column < phase.size_n;
        float scales[4] = {}, sums[2][4] = {};
        if (inside)
#pragma unroll
            for (int i = 0; i < 4; ++i) scales[i] = phase.scales[i / 2 * phase.size_n + column + i % 2 * 8];
        multiply_item<2>(sums, item, phase.tiles, ring, common.barriers, place);
        wait(&common.barriers.scaled, 0);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int row = lane % 4 * 2 + i % 2;
            if (!inside || row >= work.num_rows) continue;
            float gate = __fmul_rn(__fmul_rn(sums[0][i], scales[i / 2]), common.of_row[row]);
            float up = __fmul_rn(__fmul_rn(sums[1][i], scales[2 + i / 2]), common.of_row[row]);
            u16 rounded = static_cast<u16>(round_bfloat16(gated(gate, up), 0));
            phase.out[static_cast<long long>(row) * phase.size_n + column + i / 2 * 8] = rounded;
        }
        show_to_all_copies();
        meet_threads(1, 32 * WARPS);
        if (threadIdx.x == 32 * COPY_WARPS) end_one(work, 1);
    }
}

// ---- a warp that brings what the ends of output and down read into the L2 cache: memory would bring it after W ----

__device__ __forceinline__ void prefetch_residual(const Phase& phase, int num_rows) {
    Item item(phase, blockIdx.x);
    int row = threadIdx.x % 32;
    if (row < num_rows)
        prefetch_lines(
            phase.residual + static_cast<long long>(row) * phase.residual_stride + item.group * COLUMNS, 2 * COLUMNS, 0, 1
        );
}

__device__ __forceinline__ void prefetch_all(const Work& work, Barriers& barriers) {
    const Phase &output = work.phases[0], &down = work.phases[2];
    bool in_output = blockIdx.x < output.items, in_down = blockIdx.x < down.items;
    int lane = threadIdx.x % 32;
    if (in_output) prefetch_lines(output.norm + Item(output, blockIdx.x).group * COLUMNS, 2 * COLUMNS, lane, 32);
    if (in_down) prefetch_lines(down.norm + Item(down, blockIdx.x).group * COLUMNS, 2 * COLUMNS, lane, 32);
    wait_for_kernels_before();
    if (in_output) prefetch_residual(output, work.num_rows);
    if (!in_down) return;
    wait(&barriers.ended, 0);
    prefetch_residual(down, work.num_rows);
}

// ---- the whole ----

extern "C" __global__ void __launch_bounds__(32 * (COPY_WARPS + WARPS), 1) packed_chain(
    const __grid_constant__ TensorMap x0, const __grid_constant__ TensorMap x1, const __grid_constant__ TensorMap x2,
    const __grid_constant__ Work work
) {
    extern __shared__ __align__(1024) char ring[];
    __shared__ Common common;
    Barriers& barriers = common.barriers;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            set_up(&barriers.w[stage], 1);
            set_up(&barriers.x[stage], 1);
            set_up(&barriers.empty[stage], WARPS);
        }
        set_up(&barriers.scaled, 1);
        set_up(&barriers.ended, 1);
        show_barriers_to_cluster();
    }
    __syncthreads();
    let_next_begin();
    int warp = threadIdx.x / 32;
    if (warp < COPY_WARPS) {
        Maps maps{{&x0, &x1, &x2}};
        if (warp == 0) copy_w(work, ring, barriers);
        if (threadIdx.x == 32) copy_x(maps, work, ring, barriers);
        if (warp == 2) scale_rows(work, common);
        if (warp == 3) prefetch_all(work, barriers);
        __syncwarp();
    } else {
        wait_for_kernels_before();
        Place place;
        run_addition<0>(work, ring, common, place);
        run_gates(work, ring, common, place);
        run_addition<2>(work, ring, common, place);
    }
}
