// The router of one row whose experts were drawn, for benchmarks: see mixture_routers.py, and route_row.cuh.

#include "route_row.cuh"

struct Drawn {
    const int* table;      // [STEPS, most, TOP_K]
    const long long* step;
    long long* last;       // [TOP_K]: the experts that the row has
    int steps, most;
    float bonus;
};

struct Moved {
    float bonus = 0.0f;

    __device__ __forceinline__ Moved(const Work& work, const Drawn& drawn, int expert) {
        const int* own = drawn.table + *drawn.step % drawn.steps * drawn.most * TOP_K;
#pragma unroll
        for (int i = 0; i < TOP_K; ++i)
            if (own[i] == expert) bonus = drawn.bonus;
    }
    __device__ __forceinline__ float operator()(float logit) const { return logit + bonus; }
    __device__ __forceinline__ static void note(const Drawn& drawn, int place, int expert) { drawn.last[place] = expert; }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    route_row(const __grid_constant__ Work work, const __grid_constant__ Drawn drawn) {
    route<Moved>(work, drawn);
}
