// The parts of a decoder layer on a CPU, and whole layers one after another, in float32, for weights in few bits.
// Whatever is summed up is summed in an order that does not depend on other rows: a window has the results of its rows
// one by one, to the bit.

#include "argmax.h"
#include "attention.h"
#include "linear.h"
#include "team.h"
#include "vectors.h"

using namespace overlap_spec;

namespace {

struct Norm {
    const float* weight;
    float eps;
};

// out = residual + x W^T, and the norm of it.
void add_and_normalise(const Matrix& matrix, const Call& call, const Norm& norm, float* normed) {
    linear(matrix, call);
    const int64_t size = call.out_stride;
    Team::of_process().run(call.rows, call.rows < FEW_ROWS ? 1 : call.threads, [&](int64_t r) {
        normalise(call.out + r * size, norm.weight, size, norm.eps, normed + r * size);
    });
}

}  // namespace

extern "C" {

struct Layer {
    Matrix qkv, output, gate_up, down;
    Norm mlp_norm, next_norm;
    Heads heads;
    float* kept;  // [T, H], the layer's result; null: in memory that later layers use again
};

struct Stack {
    const Layer* layers;
    int64_t num_layers, hidden_size;
    int32_t threads;
};

int reads_half() {
#ifdef __F16C__
    return 1;
#else
    return 0;
#endif
}

// One linear, added to a residual if there is one. gated: the one part's rows are gate's, then as many of up's, and the
// result is silu(gate) * up.
void grouped_linear(const Matrix* matrix, const float* x, int64_t rows, int64_t stride, float* out, int64_t out_stride,
                    int32_t gated, int32_t threads) {
    linear(*matrix, Call{x, rows, stride, out, out_stride, nullptr, 0, bool(gated), threads});
}

// The column of each row's largest result; `none` where that is not finite. W has one part.
void grouped_argmax(const Matrix* matrix, const float* x, int64_t rows, int64_t stride, int64_t* columns, int64_t none,
                    int32_t threads) {
    argmax(*matrix, Call{x, rows, stride, nullptr, 0, nullptr, 0, false, threads}, none, columns);
}

// The sum of a linear and a residual, and the norm of it.
void grouped_sum(const Matrix* matrix, const float* x, int64_t rows, int64_t stride, float* out, int64_t out_stride,
                 int32_t threads, const float* residual, int64_t residual_stride, const Norm* norm, float* normed) {
    const Call call{x, rows, stride, out, out_stride, residual, residual_stride, false, threads};
    add_and_normalise(*matrix, call, *norm, normed);
}

// Shapes: qkv [T, (n + 2 nkv) d], queries [T, n d] (scratch), out [T, n d].
void paged_rows_attention(const Heads* heads, const Rows* rows, const float* qkv, float* queries, float* out,
                          int32_t threads) {
    attention(*heads, *rows, qkv, queries, out, threads);
}

// Layers one after another. Shapes: values [T, H] and normed [T, columns of the first qkv], which are read; out,
// out_normed [T, H].
void run_layers(const Stack* stack, const Rows* rows, const float* values, const float* normed, float* out,
                float* out_normed) {
    const int64_t count = rows->num_rows, hidden = stack->hidden_size;
    const int threads = stack->threads;
    static thread_local std::vector<float> qkv, queries, attended, gated, middle;
    middle.resize(count * hidden);
    for (int64_t l = 0; l < stack->num_layers; l++) {
        const Layer& layer = stack->layers[l];
        const int64_t width = layer.output.columns, gate = layer.down.columns, entered = layer.qkv.columns;
        const int64_t kv = 2 * layer.heads.num_kv_heads * layer.heads.head_dim;
        qkv.resize(count * (width + kv));
        queries.resize(count * width);
        attended.resize(count * width);
        gated.resize(count * gate);
        linear(layer.qkv, {normed, count, entered, qkv.data(), width + kv, nullptr, 0, false, threads});
        attention(layer.heads, *rows, qkv.data(), queries.data(), attended.data(), threads);
        const Call first{attended.data(), count, width, middle.data(), hidden, values, hidden, false, threads};
        add_and_normalise(layer.output, first, layer.mlp_norm, out_normed);
        linear(layer.gate_up, {out_normed, count, hidden, gated.data(), gate, nullptr, 0, true, threads});
        float* to = layer.kept ? layer.kept : out;
        const Call second{gated.data(), count, gate, to, hidden, middle.data(), hidden, false, threads};
        add_and_normalise(layer.down, second, layer.next_norm, out_normed);
        values = to;
        normed = out_normed;
    }
    if (values != out) std::memcpy(out, values, count * hidden * sizeof(float));
}
}
