// The router of few rows: see route_few.cuh. Where it is launched: route.py.
//
//     BIASED   1: a bias is added to each logit

#include "route_few.cuh"

struct Nothing {};

struct Biased {
    float bias = 0.0f;

    __device__ __forceinline__ Biased(const Work& work, Nothing, int row, int expert) {
        if (BIASED) bias = bfloat16(work.bias[expert]);
    }
    __device__ __forceinline__ float operator()(float logit) const { return BIASED ? logit + bias : logit; }
    __device__ __forceinline__ static void note(Nothing, int row, int place, int expert) {}
};

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __maxnreg__(REGISTERS)
    route_few(const __grid_constant__ Work work) {
    route<Biased>(work, Nothing());
}
