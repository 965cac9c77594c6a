// The logits of several rows, for route_few.cuh, which includes this.
//
// The programs of a cluster have 16 experts, and divide K: otherwise each would read all of x, which takes longer than
// to meet. A warp has a part of 128 columns of eight experts, and all rows: x of 16 of them is one operand of a product.
// Each program adds up the parts of EACH experts, which the others send it.
#pragma once

constexpr int WARPS = THREADS / 32, TILES = (ROWS + 15) / 16;  // of a program; of 16 rows
static_assert(CLUSTER == PARTS / CLUSTER && WARPS == 2 * CLUSTER && EACH * CLUSTER == 16);

// What all programs of the cluster write: parts of this one's experts, by rows.
struct Inbox {
    alignas(16) float parts[PARTS][ROWS * EACH];
    u64 arrived;
};

// The scale of each row, by a warp.
__device__ __forceinline__ void scale_all(float (&scales)[ROWS], const Work& work) {
#pragma unroll
    for (int row = threadIdx.x / 32; row < ROWS; row += WARPS) {
        float squares[4], scale = 1.0f;
        if (work.squares) {
            take_row(squares, work.squares + min(row, work.num_rows - 1), work.num_rows);
            scale = scale_of_row(squares, work.eps);
        }
        if (threadIdx.x % 32 == 0) scales[row] = scale;
    }
}

// The products of a tile's rows with the lane's part of eight experts. It scales x.
__device__ __forceinline__ void multiply_tile(float (&sums)[4], Columns* x, const Columns& w, const float* scales) {
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
        u32 a[4] = {0, 0, 0, 0}, b[2] = {w.pairs[i].x, w.pairs[i].y};
#pragma unroll
        for (int half = 0; half < 2 && half * 8 < ROWS; ++half) {
            float scale = scales[half * 8 + threadIdx.x % 32 / 4];
            uint2& pair = x[half].pairs[i];
            a[half] = pair.x = scaled(pair.x, scale);
            a[half + 2] = pair.y = scaled(pair.y, scale);
        }
        multiply16(sums, a, b);
    }
}

template <class Moved, class Given>
__device__ __forceinline__ void multiply_rows(const Work& work, const Given& given) {
    __shared__ Inbox inbox;
    __shared__ float scales[ROWS];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, cluster = blockIdx.x / CLUSTER, half = warp / CLUSTER;
    int part = rank_in_cluster() * (PARTS / CLUSTER) + warp % CLUSTER, first = part * 128 + lane % 4 * 4;
    int row = threadIdx.x / EACH % ROWS, own = blockIdx.x * EACH + threadIdx.x % EACH;
    Columns w, x[ROWS / 8];
    w.take(work.weight + (cluster * 16 + half * 8 + lane / 4) * HIDDEN, first);
    Moved moved(work, given, row, own);
    if (threadIdx.x == 0) {
        set_up(&inbox.arrived, 1);
        show_barriers_to_cluster();
        expect(&inbox.arrived, sizeof inbox.parts);
    }
    meet_cluster();
    wait_for_kernels_before();
#pragma unroll
    for (int i = 0; i < ROWS / 8; ++i) x[i].take(work.x + min(i * 8 + lane / 4, work.num_rows - 1) * HIDDEN, first);
    scale_all(scales, work);
    __syncthreads();
    u32 to = half * 2 + lane % 4 / 2, barrier = address_in(to, &inbox.arrived);
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        multiply_tile(sums, x + tile * 2, w, scales + tile * 16);
#pragma unroll
        for (int i = 0; i < 2 && i * 8 < ROWS; ++i) {
            int at = (tile * 16 + i * 8 + lane / 4) * EACH + lane % 2 * 2;
            send(address_in(to, &inbox.parts[part][at]), sums[i * 2], sums[i * 2 + 1], barrier);
        }
    }
    if (threadIdx.x < ROWS * EACH) {
        wait(&inbox.arrived, 0);
        float logit = 0.0f;
#pragma unroll
        for (int i = 0; i < PARTS; ++i) logit += inbox.parts[i][threadIdx.x];
        if (row < work.num_rows) give_logit(work, row, own, moved(logit));
    }
    if (!work.squares || cluster > 0 || half > 0) return;
#pragma unroll
    for (int i = 0; i < ROWS / 8; ++i) {
        if (i * 8 + lane / 4 >= work.num_rows) break;
        u16* target = work.rows + (i * 8 + lane / 4) * HIDDEN + first;
#pragma unroll
        for (int j = 0; j < STEPS; ++j) *reinterpret_cast<uint2*>(target + j * 16) = x[i].pairs[j];
    }
}
