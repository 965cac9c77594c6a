// The router of rows whose experts were drawn, for benchmarks: see mixture_routers.py, and route_few.cuh.

#include "route_few.cuh"

struct Drawn {
    const int* table;      // [STEPS, most, TOP_K]
    const long long* step;
    long long* last;       // [most, TOP_K]: the experts that rows have
    int steps, most;
    float bonus;
};

struct Moved {
    float bonus = 0.0f;

    __device__ __forceinline__ Moved(const Work& work, const Drawn& drawn, int row, int expert) {
        int step = static_cast<int>((*drawn.step + row / drawn.most) % drawn.steps);
        const int* own = drawn.table + (step * drawn.most + row % drawn.most) * TOP_K;
#pragma unroll
        for (int i = 0; i < TOP_K; ++i)
            if (own[i] == expert) bonus = drawn.bonus;
    }
    __device__ __forceinline__ float operator()(float logit) const { return logit + bonus; }
    __device__ __forceinline__ static void note(const Drawn& drawn, int row, int place, int expert) {
        if (row < drawn.most) drawn.last[row * TOP_K + place] = expert;
    }
};

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __maxnreg__(REGISTERS)
    route_few(const __grid_constant__ Work work, const __grid_constant__ Drawn drawn) {
    route<Moved>(work, drawn);
}
