// The end of short_decode.cu: warps' sums become the program's, and the cluster's programs exchange columns of them.
#pragma once

struct Common {
    u64 arrived;                        // barrier: what the programs of the cluster have sent
    float2 of_warps[WARPS][16];         // by pairs: highest score, sum of weights
    float2 of_programs[CLUSTER][16];
};

__device__ __forceinline__ void send2(u32 target, float2 value, u32 barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(target),
        "f"(value.x), "f"(value.y), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ void arrive_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void wait_cluster() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ float* sums_of(char* memory, int warp) {
    return reinterpret_cast<float*>(memory + RING_AT + warp * (STAGES * STAGE));
}

// A pair's sums lie by eights of columns, which are swizzled.
__device__ __forceinline__ int sum_place(int pair, int column) {
    return pair * HEAD + (column / 8 ^ pair % 8) * 8 + column % 8;
}

// Where the warp's ring was, whose keys are multiplied.
__device__ __forceinline__ void leave(const Sums& sums, char* memory, Common& common, int warp) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float* acc = sums_of(memory, warp);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        int pair = g + 8 * i;
        float total = sums.total[i];
        total += __shfl_xor_sync(ALL_LANES, total, 1);
        total += __shfl_xor_sync(ALL_LANES, total, 2);
        if (t == 0) common.of_warps[warp][pair] = make_float2(sums.highest[i], total);
        if (LIVE <= 8 && i == 1) break;
#pragma unroll
        for (int n = 0; n < PIECES; ++n)
            *reinterpret_cast<float2*>(acc + sum_place(pair, n * 8 + 2 * t)) =
                make_float2(sums.acc[n][2 * i], sums.acc[n][2 * i + 1]);
    }
}

// Add up the warps' sums, and send each program of the cluster the columns that it finishes.
__device__ __forceinline__ void send_sums(char* memory, Common& common, int rank) {
    constexpr int FOURS = HEAD / 4, ALL = LIVE * FOURS;
#pragma unroll
    for (int i = 0; i < (ALL + THREADS - 1) / THREADS; ++i) {
        int item = threadIdx.x + i * THREADS, pair = item / FOURS, column = item % FOURS * 4;
        if (item >= ALL) break;
        float highest = LOWEST, total = 0;
        float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) highest = fmaxf(highest, common.of_warps[warp][pair].x);
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) {
            float2 stats = common.of_warps[warp][pair];
            if (stats.y == 0.0f) continue;  // a warp without keys has left no sums
            float4 part = *reinterpret_cast<const float4*>(sums_of(memory, warp) + sum_place(pair, column));
            float weight = exp2_of(stats.x - highest);
            total += stats.y * weight;
            sum.x += part.x * weight;
            sum.y += part.y * weight;
            sum.z += part.z * weight;
            sum.w += part.w * weight;
        }
        u32 to = column / SLICE, arrived = address_in(to, &common.arrived);
        float* inbox = reinterpret_cast<float*>(memory + INBOX_AT) + (rank * 16 + pair) * SLICE + column % SLICE;
        send(address_in(to, inbox), sum, arrived);
        if (column % SLICE == 0)
            send2(address_in(to, &common.of_programs[rank][pair]), make_float2(highest, total), arrived);
    }
}

// Combine what the programs have sent, in their order, and store this program's columns.
__device__ __forceinline__ void finish(const Work& work, const Part& part, const char* memory, const Common& common) {
    constexpr int TWOS = SLICE / 2;
    const float* inbox = reinterpret_cast<const float*>(memory + INBOX_AT);
    for (int item = threadIdx.x; item < LIVE * TWOS; item += THREADS) {
        int pair = item / TWOS, column = item % TWOS * 2;
        float highest = LOWEST, total = 0;
        float2 sum = make_float2(0, 0);
#pragma unroll
        for (int rank = 0; rank < CLUSTER; ++rank) highest = fmaxf(highest, common.of_programs[rank][pair].x);
#pragma unroll
        for (int rank = 0; rank < CLUSTER; ++rank) {
            float2 stats = common.of_programs[rank][pair];
            float2 each = *reinterpret_cast<const float2*>(inbox + (rank * 16 + pair) * SLICE + column);
            float weight = exp2_of(stats.x - highest);
            total += stats.y * weight;
            sum.x += each.x * weight;
            sum.y += each.y * weight;
        }
        long long row = part.request * WIDTH + pair / GROUP, head = part.kv_head * GROUP + pair % GROUP;
        u16* to = work.out + (row * (KV_HEADS * GROUP) + head) * HEAD + part.rank * SLICE + column;
        *reinterpret_cast<u32*>(to) = round2(sum.x / total, sum.y / total);
    }
}
