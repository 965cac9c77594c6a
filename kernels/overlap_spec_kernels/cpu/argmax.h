// The column of each row's largest logit, of equal ones the first, without writing the logits to memory.

#pragma once

#include "linear.h"

namespace overlap_spec {

struct Best {  // of the logits of a row in some panels
    float value;
    int64_t column;
};

// NaN is larger than all.
inline bool is_better(float v, float best) { return v > best || (v != v && best == best); }

inline Best best_of_panel(const float* logits, int64_t first) {
    Floats largest = load(logits);
    Ints vectors = {};
    for (int v = 1; v < VECTORS; v++) {
        const Floats each = load(logits + v * LANES);
        const Ints better = (each > largest) | (each != each);
        largest = better ? each : largest;
        vectors = better ? Ints{} + v : vectors;
    }
    Best best{largest[0], vectors[0] * LANES};
    for (int i = 1; i < LANES; i++) {
        const int64_t column = vectors[i] * LANES + i;
        if (is_better(largest[i], best.value) || (largest[i] == best.value && column < best.column))
            best = {largest[i], column};
    }
    return {best.value, first + best.column};
}

// Shapes: x [T, I] -> columns [T]; `none` where the largest logit is NaN or infinite. W has one part.
inline void argmax(const Matrix& matrix, const Call& call, int64_t none, int64_t* columns) {
    const Part& w = matrix.parts[0];
    const Rounded& x = rounded(w, matrix.columns, call);
    static thread_local std::vector<Best> all;
    all.resize(w.panels * call.rows);
    Best* best = all.data();  // [panels, T]
    Team::of_process().run(w.panels, call.threads, [&](int64_t panel) {
        static thread_local std::vector<float> logits;
        logits.assign(call.rows * PANEL, -INFINITY);  // where W has no row
        Call of_panel = call;
        of_panel.out = logits.data();
        of_panel.out_stride = PANEL;
        any_panel(w, of_panel, x, panel, -panel * PANEL);
        for (int64_t r = 0; r < call.rows; r++)
            best[panel * call.rows + r] = best_of_panel(logits.data() + r * PANEL, panel * PANEL);
    });
    for (int64_t r = 0; r < call.rows; r++) {
        Best found = best[r];
        for (int64_t panel = 1; panel < w.panels; panel++)
            if (is_better(best[panel * call.rows + r].value, found.value)) found = best[panel * call.rows + r];
        columns[r] = std::fabs(found.value) < INFINITY ? found.column : none;
    }
}

}  // namespace overlap_spec
