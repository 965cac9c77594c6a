// What kernels of expert_stream.cu and expert_sum_ring.cu are given beside the map of W; the same fields in
// quantized_streams.py.
#pragma once

#include "hopper.cuh"

struct Work {
    const float* scales;       // [E, I / 128, scale_columns], of float8
    const u16* x;              // rows x_stride apart; in bfloat16, or float16, as all that has 16 bits
    const long long* experts;  // [T, TOP_K]
    u16* out;
    const int* counts;         // [E], and
    const int* listed;         // [E, T]: places, if LISTED
    const float* weights;      // [T, TOP_K]
    const u16 *shared, *residual;  // [T, O], rows of the residual residual_stride apart
    const void* norm;          // [O], float32 if WIDE, else as x
    u16* weighted;             // [T, O]
    float* squares;            // [O / 16, T]
    int x_stride, residual_stride;
    int size_n;                // columns of the result
    int num_rows;              // T
    int scale_columns, scale_rows;
    int per_row, num_experts;  // places of a row of x
};
