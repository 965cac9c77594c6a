// Windows of Gated DeltaNet on Hopper, in one launch: a program has a head of a request, and its whole state. See
// gated_delta.py, whose kernels for other GPUs and sizes have the same bits: sums have their orders, and no product is
// added before it is rounded, but in the norm, where they do so, too.
//
// Columns that were accepted are known before the kernels ahead have ended: until then the state is read, goes on, and
// is written, and so are inputs. New rows come after the wait. The programs of a cluster share a key head, whose inputs
// and window its first program writes, when all have read them. The last program of a request writes its position.
//
// WARPS threads share four columns of a state. Row CLASSES i + c of a state is the i-th of class c; of a thread's
// classes each has its own sum. Queries and keys lie as threads read them.
//
// Of more heads than run at once a program has several, one after another. While one goes on, the next state arrives in
// shared memory.
//
//     HEADS, KEY_HEADS                       STORED   bytes of a number of a state: 4 float32, 2 bfloat16
//     APART   1: rates and decays are from a linear of their own
#include "bfloat16.cuh"

// What the kernel is given; the same fields in delta_window.py.
struct Work {
    const u16 *projected, *gates;  // [T, STRIDE], rates and decays of the first row, PITCH apart
    const long long *slots, *positions;  // [B], [T]
    char* memory;         // [S, HEADS, DIM, DIM]
    u16 *inputs, *window;  // [S, 3, CHANNELS], [S, most, ROW]
    long long* position;   // [S]
    const u16* conv;       // [CHANNELS, 4]
    const float *steepness, *offset, *norm;  // [HEADS] twice, [DIM]
    u16* out;       // [T, HEADS DIM]
    u32* counters;  // [B], zeros between launches
    float scale, eps;
    int most, width;
    int heads;  // of all requests
};

constexpr int WARPS = 8, THREADS = 32 * WARPS, PROGRAMS = 2;  // on a multiprocessor: registers are enough for them
constexpr int DIM = 128, KERNEL = 4, GROUP = HEADS / KEY_HEADS;
constexpr int CHANNELS = 2 * KEY_HEADS * DIM + HEADS * DIM, ROW = CHANNELS + 2 * HEADS;
constexpr int STRIDE = CHANNELS + HEADS * DIM + (APART ? 0 : 2 * HEADS), PITCH = APART ? 2 * HEADS : STRIDE;
constexpr int Z = APART ? CHANNELS : ROW;
constexpr int CLASSES = 32 / STORED, OF_CLASS = DIM / CLASSES;  // threads of a Triton program that share a column; rows
constexpr int STATE = DIM * DIM * STORED;  // bytes of a head
constexpr int OWN = CLASSES / WARPS, ROWS = DIM / WARPS;  // of a thread: classes, rows
constexpr int APART_BY = ROWS + 4;  // numbers from a thread's to the next one's: other banks
constexpr int MOST_ROWS = 32;
constexpr float EPS = 1e-6f;
constexpr u32 ALL_LANES = 0xffffffff;
static_assert(HEADS == KEY_HEADS * GROUP && GROUP <= 8);

// ---- arithmetic, as Triton has it ----

// Of 1 to 2, as libdevice has it.
__device__ __forceinline__ float logarithm(float x) {
    constexpr u32 FACTORS[] = {0x3e1039f6, 0xbdf8cdcc, 0x3e0f2955, 0xbe2ad8b9,
                               0x3e4ced0b, 0xbe7fff22, 0x3eaaaa78, 0xbf000000};
    u32 power = __float_as_uint(x) - 0x3f2aaaab & 0xff800000;
    float y = __fadd_rn(__uint_as_float(__float_as_uint(x) - power), -1.0f), sum = __uint_as_float(0xbe055027);
#pragma unroll
    for (u32 factor : FACTORS) sum = __fmaf_rn(sum, y, __uint_as_float(factor));
    float exponent = __fmul_rn(static_cast<float>(static_cast<int>(power)), 1.1920929e-7f);
    sum = __fmaf_rn(exponent, __uint_as_float(0x3f317218), __fmaf_rn(__fmul_rn(y, sum), y, y));
    return x <= 2.0f ? sum : x;  // NaN
}

__device__ __forceinline__ float softplus(float x) {
    return __fadd_rn(fmaxf(x, 0.0f), logarithm(__fadd_rn(exponential(0.0f - fabsf(x)), 1.0f)));
}

__device__ __forceinline__ float sum_of_lanes(float sum) {
    for (int step = 16; step > 0; step /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(ALL_LANES, sum, step));
    return sum;
}

// ---- four numbers next to each other ----

struct Four {
    float values[4];

    __device__ __forceinline__ Four() {}
    __device__ __forceinline__ Four(float4 four) : values{four.x, four.y, four.z, four.w} {}
    __device__ __forceinline__ Four(uint2 pairs)
        : values{bfloat16(pairs.x), bfloat16(pairs.x >> 16), bfloat16(pairs.y), bfloat16(pairs.y >> 16)} {}
    __device__ __forceinline__ float operator[](int i) const { return values[i]; }
    __device__ __forceinline__ float& operator[](int i) { return values[i]; }
    __device__ __forceinline__ float4 whole() const { return make_float4(values[0], values[1], values[2], values[3]); }
    __device__ __forceinline__ uint2 narrow() const {
        return make_uint2(rounded(values[0]) | rounded(values[1]) << 16, rounded(values[2]) | rounded(values[3]) << 16);
    }
};

__device__ __forceinline__ const uint2* four_at(const u16* place) { return reinterpret_cast<const uint2*>(place); }
__device__ __forceinline__ uint2* four_at(u16* place) { return reinterpret_cast<uint2*>(place); }

// ---- what a token has beside the state ----

struct Token {
    alignas(16) float q[WARPS * APART_BY], k[WARPS * APART_BY], v[DIM];
    float decay, divisor;
};

// Where a head of a request is.
struct Place {
    int head, request;
    long long slot;

    __device__ __forceinline__ Place(const Work& work, int number)
        : head(number % HEADS), request(number / HEADS), slot(work.slots[request]) {}
    __device__ __forceinline__ char* state(const Work& work) const {
        return work.memory + (slot * HEADS + head) * STATE;
    }
    __device__ __forceinline__ u16* inputs(const Work& work) const {
        return work.inputs + slot * (KERNEL - 1) * CHANNELS;
    }
    __device__ __forceinline__ u16* window(const Work& work) const { return work.window + slot * work.most * ROW; }
};

// The first three warps have q, k and v, a lane four channels; the next one rates and decays.
struct Own {
    int role, lane, channel, head;
    bool writes;  // to inputs and window
    uint2 weights[4];  // of a channel each
    uint2 rows[KERNEL];  // of the convolution; the last one is the token's
    float steepness, offset;

    __device__ __forceinline__ Own(const Work& work, int warp, int lane, int head)
        : role(warp), lane(lane), head(head), writes(warp == 2 || warp < 2 && head % GROUP == 0) {
        channel = (warp < 2 ? warp * KEY_HEADS + head / GROUP : 2 * KEY_HEADS + head) * DIM + lane * 4;
        if (role == 3) steepness = work.steepness[head], offset = work.offset[head];
        for (int i = 0; i < 4 && is_mixed(); ++i) weights[i] = *four_at(work.conv + (channel + i) * KERNEL);
    }
    __device__ __forceinline__ bool is_mixed() const { return role < 3; }
    __device__ __forceinline__ void take_inputs(const u16* inputs) {
#pragma unroll
        for (int i = 0; i < KERNEL - 1 && is_mixed(); ++i) rows[i] = *four_at(inputs + i * CHANNELS + channel);
    }
    __device__ __forceinline__ void take(const u16* row, const u16* gates) {
        if (is_mixed()) rows[KERNEL - 1] = *four_at(row + channel);
        if (role == 3) rows[KERNEL - 1] = make_uint2(gates[head], gates[HEADS + head]);
    }
    __device__ __forceinline__ void write_inputs(u16* inputs) const {
#pragma unroll
        for (int i = 0; i < KERNEL - 1 && writes; ++i) *four_at(inputs + i * CHANNELS + channel) = rows[i];
    }
    __device__ __forceinline__ void write_row(u16* row) const {
        if (writes) *four_at(row + channel) = rows[KERNEL - 1];
        if (role != 3 || lane > 0) return;
        row[CHANNELS + head] = static_cast<u16>(rows[KERNEL - 1].x);
        row[CHANNELS + HEADS + head] = static_cast<u16>(rows[KERNEL - 1].y);
    }

    __device__ __forceinline__ Four mixed() const {
        Four x[KERNEL], result;
#pragma unroll
        for (int i = 0; i < KERNEL; ++i) x[i] = Four(rows[i]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            Four w(weights[i]);
            float sum = __fmul_rn(w[0], x[0][i]);
#pragma unroll
            for (int k = 1; k < KERNEL; ++k) sum = __fadd_rn(sum, __fmul_rn(w[k], x[k][i]));
            result[i] = silu(sum);
        }
        return result;
    }

    // Write the token, and go on to the next one, which is not there yet.
    __device__ __forceinline__ void prepare(Token& token, float scale) {
        if (role == 3 && lane == 0) {
            float size = softplus(__fadd_rn(bfloat16(rows[KERNEL - 1].y), offset));
            token.decay = exponential(__fmul_rn(0.0f - steepness, size));
            token.divisor = __fadd_rn(exponential(0.0f - bfloat16(rows[KERNEL - 1].x)), 1.0f);
        }
        if (!is_mixed()) return;
        Four x = mixed();
        if (role == 2) {
            *reinterpret_cast<float4*>(token.v + lane * 4) = x.whole();
        } else {
            float squares = __fmul_rn(x[0], x[0]);
#pragma unroll
            for (int i = 1; i < 4; ++i) squares = __fadd_rn(squares, __fmul_rn(x[i], x[i]));
            float length = root_of(__fadd_rn(sum_of_lanes(squares), EPS));
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int row = lane * 4 + i, of_class = row % CLASSES;
                int at = of_class % WARPS * APART_BY + of_class / WARPS * OF_CLASS + row / CLASSES;
                float unit = quotient(x[i], length);
                (role ? token.k : token.q)[at] = role ? unit : __fmul_rn(unit, scale);
            }
        }
#pragma unroll
        for (int i = 0; i + 1 < KERNEL; ++i) rows[i] = rows[i + 1];
    }
};

// ---- four columns of a state, in WARPS threads ----

struct State {
    Four rows[ROWS];
    int share;
    char* at;  // of the first

    __device__ __forceinline__ State(int share, char* memory) : share(share), at(memory + share * (DIM * STORED)) {}
    __device__ __forceinline__ char* place(int row) const {
        return at + (row % OF_CLASS * CLASSES + row / OF_CLASS * WARPS) * (DIM * STORED);
    }
    __device__ __forceinline__ void take() {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            if constexpr (STORED == 4) rows[i] = Four(__ldcs(reinterpret_cast<const float4*>(place(i))));
            else rows[i] = Four(__ldcs(reinterpret_cast<const uint2*>(place(i))));
        }
    }
    // From where the whole state is, of which the thread's first number is `from`.
    __device__ __forceinline__ void take(const char* from) {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const char* row = from + (place(i) - at) + share * (DIM * STORED);
            if constexpr (STORED == 4) rows[i] = Four(*reinterpret_cast<const float4*>(row));
            else rows[i] = Four(*reinterpret_cast<const uint2*>(row));
        }
    }
    __device__ __forceinline__ void write() const {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            if constexpr (STORED == 4) __stcs(reinterpret_cast<float4*>(place(i)), rows[i].whole());
            else __stcs(reinterpret_cast<uint2*>(place(i)), rows[i].narrow());
        }
    }

    // Over all rows of the state, from those of each class: a lane gets that of its column lane / 8.
    __device__ __forceinline__ static float total(Four (&sums)[OWN]) {
#pragma unroll
        for (int half = OWN / 2; half > 0; half /= 2)
#pragma unroll
            for (int i = 0; i < half; ++i)
#pragma unroll
                for (int c = 0; c < 4; ++c) sums[i][c] = __fadd_rn(sums[i][c], sums[i + half][c]);
        const Four& of = sums[0];
        bool upper = threadIdx.x & 16, second = threadIdx.x & 8;
        float a = __fadd_rn(upper ? of[2] : of[0], __shfl_xor_sync(ALL_LANES, upper ? of[0] : of[2], 16));
        float b = __fadd_rn(upper ? of[3] : of[1], __shfl_xor_sync(ALL_LANES, upper ? of[1] : of[3], 16));
        float sum = __fadd_rn(second ? b : a, __shfl_xor_sync(ALL_LANES, second ? a : b, 8));
        return __fadd_rn(sum, __shfl_xor_sync(ALL_LANES, sum, 4));
    }

    // Go on by a token, and return what its query finds in column lane / 8, if it READS.
    template <bool READS>
    __device__ __forceinline__ float step(const Token& token, int column) {
        const float4 *keys = reinterpret_cast<const float4*>(token.k + share * APART_BY),
                     *queries = reinterpret_cast<const float4*>(token.q + share * APART_BY);
        Four sums[OWN], learnt;
        float value = token.v[column + threadIdx.x % 32 / 8], decay = token.decay, divisor = token.divisor;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            float key = Four(keys[i / 4])[i % 4];
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                rows[i][c] = __fmul_rn(rows[i][c], decay);
                float product = __fmul_rn(rows[i][c], key);
                sums[i / OF_CLASS][c] = i % OF_CLASS ? __fadd_rn(sums[i / OF_CLASS][c], product) : product;
            }
        }
        value = quotient(__fadd_rn(value, -total(sums)), divisor);
#pragma unroll
        for (int c = 0; c < 4; ++c) learnt[c] = __shfl_sync(ALL_LANES, value, c * 8 + threadIdx.x % 8);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            float key = Four(keys[i / 4])[i % 4], query = READS ? Four(queries[i / 4])[i % 4] : 0.0f;
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                float next = __fadd_rn(rows[i][c], __fmul_rn(key, learnt[c]));
                rows[i][c] = STORED == 4 ? next : bfloat16(rounded(next));
                float product = READS ? __fmul_rn(rows[i][c], query) : 0.0f;
                sums[i / OF_CLASS][c] = READS && i % OF_CLASS ? __fadd_rn(sums[i / OF_CLASS][c], product) : product;
            }
        }
        return READS ? total(sums) : 0.0f;
    }
};

// ---- the norm of a head, and its gate, by a warp ----

__device__ __forceinline__ void finish(const u16* found, Four gate, Four weight, float eps, u16* out) {
    Four x(*four_at(found)), result;
    float squares = __fmaf_rn(x[0], x[0], __fmul_rn(x[1], x[1]));
    squares = __fmaf_rn(x[3], x[3], __fmaf_rn(x[2], x[2], squares));
    float factor = quotient(1.0f, root_of(__fmaf_rn(sum_of_lanes(squares), 1.0f / DIM, eps)));
#pragma unroll
    for (int i = 0; i < 4; ++i)
        result[i] = __fmul_rn(__fmul_rn(__fmul_rn(x[i], factor), weight[i]), silu(gate[i]));
    *four_at(out) = result.narrow();
}

__device__ __forceinline__ void arrive_cluster() {
    if (GROUP > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void wait_cluster() {
    if (GROUP > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

extern "C" __global__ void __cluster_dims__(GROUP, 1, 1) __launch_bounds__(THREADS, PROGRAMS)
    delta_window(const __grid_constant__ Work work) {
    extern __shared__ __align__(128) char ahead[];  // the next state
    __shared__ Token tokens[2];
    __shared__ alignas(16) u16 found[MOST_ROWS][DIM];
    __shared__ int count;  // of accepted columns
    __shared__ u64 arrived;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, turn = 0, number = blockIdx.x;
    int column = warp * (DIM / WARPS) + lane % (32 / WARPS) * 4;
    bool counts = threadIdx.x == THREADS - 64, asks = SEVERAL && threadIdx.x == THREADS - 32;
    let_next_begin();
    if (asks) {
        set_up(&arrived, 1);
        show_to_copies();
    }
    Place place(work, number);
#pragma unroll 1
    do {
        bool is_first = !SEVERAL || number == blockIdx.x, has_next = SEVERAL && number + gridDim.x < work.heads;
        int head = place.head, request = place.request;
        long long slot = place.slot, begin = static_cast<long long>(request) * work.width, start = 0, before = 0;
        // By one thread: slots that no request has change while they are read. Its warp waits least for new rows.
        if (counts) start = work.positions[begin], before = work.position[slot];
        u16 *inputs = place.inputs(work), *window = place.window(work);
        Own own(work, warp, lane, head);
        own.take(window, window + CHANNELS);  // if one was accepted
        own.take_inputs(inputs);
        State state(lane / (32 / WARPS), place.state(work) + column * STORED);
        if (is_first) state.take();
        if (has_next) place = Place(work, number + gridDim.x);
        if (counts) count = static_cast<int>(min(max(start - before, 0ll), static_cast<long long>(work.most)));
        if (!is_first) {
            wait(&arrived, number / gridDim.x % 2 ^ 1);
            state.take(ahead + column * STORED);
        }
        __syncthreads();
        if (asks && has_next) {
            expect(&arrived, STATE);
            copy_bytes_once(shared(ahead), place.state(work), STATE, shared(&arrived));
        }
        int accepted = count;
        for (int token = 0; token < accepted; ++token, ++turn) {
            own.prepare(tokens[turn % 2], work.scale);
            const u16* next = window + (token + 1) * ROW;
            if (token + 1 < accepted) own.take(next, next + CHANNELS);
            __syncthreads();
            state.step<false>(tokens[turn % 2], column);
        }
        arrive_cluster();
        if (accepted > 0) state.write();
        wait_cluster();  // all have read
        if (accepted > 0) own.write_inputs(inputs);
        float4 weight = *reinterpret_cast<const float4*>(work.norm + lane * 4);
        wait_for_kernels_before();
        const u16 *rows = work.projected + begin * STRIDE, *gates = work.gates + begin * PITCH;
        own.take(rows, gates);
        int row = WARPS - 1 - warp, at = head * DIM + lane * 4;  // the first one that this warp finishes
        uint2 z;
        if (row < work.width) z = *four_at(rows + row * STRIDE + Z + at);
        if (counts && atomicInc(work.counters + request, HEADS - 1) == HEADS - 1) work.position[slot] = start;
        for (int i = 0; i < work.width; ++i, ++turn) {
            own.write_row(window + i * ROW);
            own.prepare(tokens[turn % 2], work.scale);
            if (i + 1 < work.width) own.take(rows + (i + 1) * STRIDE, gates + (i + 1) * PITCH);
            __syncthreads();
            float read = state.step<true>(tokens[turn % 2], column);
            if (lane % 8 < 4) found[i][column + lane / 8] = rounded(read);
        }
        __syncthreads();
        for (; row < work.width; row += WARPS) {
            u16* out = work.out + (begin + row) * (HEADS * DIM) + at;
            finish(found[row] + lane * 4, Four(z), Four(weight), work.eps, out);
            z = *four_at(rows + (row + WARPS < work.width ? row + WARPS : row) * STRIDE + Z + at);
        }
        number += gridDim.x;
    } while (SEVERAL && number < work.heads);
}
