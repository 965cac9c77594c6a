// A linear: y = x W^T, for a W of 4- or 8-bit integers with a scale, and perhaps an offset, for each group of a row; or
// for a W in bfloat16 or float32, whose groups are whole rows, without a scale.
//
//     W[o, i] = scale[o, g] * q[o, i] + offset[o, g]        g = i / group
//     y[t, o] = sum over g of  scale[o, g] * (sum of x[t, i] q[o, i]) + offset[o, g] * (sum of x[t, i])
//
// 16 rows of W are the lanes of a vector, and a panel of four vectors is contiguous, so that W is read once, in order.
// Where the processor multiplies bytes (VNNI), x is a 24-bit integer with a scale for each group (`fixed_point.h`), and the sums
// of a group are of integers, exact; elsewhere integers of W become floats in registers.

#pragma once

#include "fixed_point.h"
#include "team.h"
#include "vectors.h"

namespace overlap_spec {

constexpr int VECTORS = 4;  // of a panel: 64 rows of W, an item of work
constexpr int PANEL = VECTORS * LANES;
constexpr int AHEAD = 16 * PANEL;  // integers or numbers that are fetched before they are needed: a fourth of the time

struct Part {             // rows of W in one format
    const void* values;   // [panels, I, 64] bf16 or f32; [panels, I / 4, 64] of 4 i8; or [panels, I / 8, 64] of 8 nibbles
    const void* scales;   // [panels, I / group, 64] f16 or f32; null: 1
    const void* offsets;  // like scales, or null
    int64_t panels;
    int64_t rows;    // of W; what is beyond them in the last panel is zero
    int32_t bits;
    int32_t least;  // of 4 bits: what 0 means
    int32_t group;
    int32_t half;  // whether scales and offsets are f16
};

struct Vectors {  // of W: the one at `vector` of a panel, and those after it
    int64_t panel, vector;
    // Its place among vectors, where every row of W has so many.
    int64_t of(int64_t per_row) const { return panel * per_row * VECTORS + vector; }
};

struct Matrix {  // W: parts below one another
    const Part* parts;
    int64_t num_parts, columns;
};

struct Call {
    const float* x;
    int64_t rows, stride;
    float* out;
    int64_t out_stride;
    const float* residual;  // added to the result, or null
    int64_t residual_stride;
    bool gated;  // the one part's rows are gate's, then as many of up's; the result is silu(gate) * up
    int threads;
};

#ifdef __AVX512VNNI__

constexpr bool EXACT_INTEGERS = true;

// Adds 4 of x times 4 of each lane's row. As an instruction with x in memory: compilers keep x in vectors instead, which
// leaves too few for the sums.
inline void add_products(Ints& sum, Ints weights, const int8_t* x) {
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(weights), "m"(*reinterpret_cast<const int32_t*>(x)));
}

// Adds the products of a group with R rows of x, by digit. The weights are made positive: sums begin with what that
// changes.
template <int R, int NB, int BITS>
inline void add_group(const int32_t* values, int64_t group, const int8_t* x, Ints (&sums)[R][NB][DIGITS]) {
    constexpr int STEP = 32 / BITS, FOUR = R * DIGITS * 4;
    for (int64_t k = 0; k < group; k += STEP, values += PANEL, x += FOUR * STEP / 4)
        unrolled<NB>(UNROLLED(n) {
            const Ints packed = load<Ints>(values + n * LANES);
            __builtin_prefetch(values + n * LANES + AHEAD);
            unrolled<STEP / 4>(UNROLLED(half) {
                const Ints four = BITS == 8 ? packed ^ int32_t(0x80808080) : (packed >> (4 * half)) & 0x0f0f0f0f;
                unrolled<R>(UNROLLED(r) {
                    unrolled<DIGITS>(UNROLLED(d) {
                        add_products(sums[r][n][d], four, x + half * FOUR + (r * DIGITS + d) * 4);
                    });
                });
            });
        });
}

// R rows of x times NB vectors of W.
template <int R, int NB, int BITS>
inline void tile(const Part& w, const Call&, const Rounded& rounded, int64_t row, int64_t columns, Vectors at,
                 Floats (&y)[R][NB]) {
    const int64_t group = w.group, groups = columns / group;
    const int32_t* values = static_cast<const int32_t*>(w.values) + at.of(columns * BITS / 32) * LANES;
    const int8_t* x = rounded.digits(row);
    const GroupOfRow* of_groups = rounded.groups(row);
    unrolled<R>(UNROLLED(r) { unrolled<NB>(UNROLLED(n) { y[r][n] = Floats{}; }); });
    for (int64_t g = 0; g < groups; g++) {
        const GroupOfRow* of_rows = of_groups + g;
        Ints sums[R][NB][DIGITS];
        unrolled<R>(UNROLLED(r) {
            unrolled<NB>(UNROLLED(n) {
                unrolled<DIGITS>(UNROLLED(d) { sums[r][n][d] = Ints{} + of_rows[r * groups].starts[d]; });
            });
        });
        add_group<R, NB, BITS>(values + g * group * BITS / 32 * PANEL, group, x + g * group * R * DIGITS, sums);
        unrolled<NB>(UNROLLED(n) {
            const int64_t of_group = at.of(groups) + g * VECTORS + n;
            const Floats scale = load_scale(w.scales, of_group, w.half);
            const Floats offset = w.offsets ? load_scale(w.offsets, of_group, w.half) : Floats{};
            unrolled<R>(UNROLLED(r) {
                const Floats high = to_floats(sums[r][n][1] + (sums[r][n][2] << 8));
                const Floats whole = high * 256.f + to_floats(sums[r][n][0]);
                y[r][n] += scale * (whole * of_rows[r * groups].scale) + offset * of_rows[r * groups].sum;
            });
        });
    }
}

#else

constexpr bool EXACT_INTEGERS = false;

// The integers of one column, as floats.
template <int BITS>
inline Floats8 column(Ints8 values, int k, int32_t least) {
    if (BITS == 8) return __builtin_convertvector(values << (24 - 8 * k) >> 24, Floats8);
    return __builtin_convertvector(((values >> (8 * (k % 4) + k / 4 * 4)) & 15) + least, Floats8);
}

// Add the products of a group with R rows of x. `values`: of its first columns, eight rows of W.
template <int R, int NB, int BITS>
inline void add_group(const int32_t* values, int64_t group, const float* x, int64_t stride, int32_t least,
                      Floats8 (&sums)[R][NB]) {
    constexpr int STEP = 32 / BITS;
    for (int64_t first = 0; first < group; first += STEP, values += PANEL) {
        Ints8 packed[NB];
        unrolled<NB>(UNROLLED(n) {
            packed[n] = load<Ints8>(values + n * LANES);
            __builtin_prefetch(values + n * LANES + AHEAD);
        });
        unrolled<STEP>(UNROLLED(k) {
            unrolled<NB>(UNROLLED(n) {
                const Floats8 q = column<BITS>(packed[n], k, least);
                unrolled<R>(UNROLLED(r) { sums[r][n] += q * x[r * stride + first + k]; });
            });
        });
    }
}

// Half of the lanes of `tile`, from lane `lane` on.
template <int R, int NB, int BITS>
inline void half_tile(const Part& w, const Call& c, const Rounded& of_x, int64_t row, int64_t columns, Vectors at,
                      int lane, Floats8 (&y)[R][NB]) {
    const int64_t groups = columns / w.group;
    const int32_t* values = static_cast<const int32_t*>(w.values) + at.of(columns * BITS / 32) * LANES + lane;
    unrolled<R>(UNROLLED(r) { unrolled<NB>(UNROLLED(n) { y[r][n] = Floats8{}; }); });
    for (int64_t g = 0; g < groups; g++) {
        Floats8 sums[R][NB] = {};
        const float* x = c.x + row * c.stride + g * w.group;
        add_group<R, NB, BITS>(values + g * w.group * BITS / 32 * PANEL, w.group, x, c.stride, w.least, sums);
        unrolled<NB>(UNROLLED(n) {
            const int64_t of_group = (at.of(groups) + g * VECTORS + n) * LANES + lane;
            const Floats8 scale = load_scales8(w.scales, of_group, w.half);
            const Floats8 offset = w.offsets ? load_scales8(w.offsets, of_group, w.half) : Floats8{};
            unrolled<R>(UNROLLED(r) {
                y[r][n] += scale * sums[r][n];
                if (w.offsets) y[r][n] += offset * of_x.groups(row + r)[g].sum;
            });
        });
    }
}

// R rows of x times NB vectors of W.
template <int R, int NB, int BITS>
inline void tile(const Part& w, const Call& c, const Rounded& of_x, int64_t row, int64_t columns, Vectors at,
                 Floats (&y)[R][NB]) {
    for (int lane = 0; lane < LANES; lane += EIGHT) {
        Floats8 half[R][NB];
        half_tile<R, NB, BITS>(w, c, of_x, row, columns, at, lane, half);
        for (int r = 0; r < R; r++)
            for (int n = 0; n < NB; n++) std::memcpy(reinterpret_cast<float*>(&y[r][n]) + lane, &half[r][n], 32);
    }
}

#endif

// R rows of x times NB vectors of W in bfloat16 or float32: one column after another.
template <int R, int NB, int BITS>
inline void tile_of_floats(const Part& w, const Call& c, int64_t row, int64_t columns, Vectors at,
                           Floats (&y)[R][NB]) {
    const float* x = c.x + row * c.stride;
    for (int r = 0; r < R; r++)
        for (int n = 0; n < NB; n++) y[r][n] = Floats{};
#pragma GCC unroll 2
    for (int64_t k = 0; k < columns; k++)
        for (int n = 0; n < NB; n++) {
            const int64_t of_column = at.of(columns) + k * VECTORS + n;
            Floats q;
            if constexpr (BITS == 16) {
                const uint16_t* values = static_cast<const uint16_t*>(w.values) + of_column * LANES;
                q = load_bfloat16(values);
                if (n % 2 == 0) __builtin_prefetch(values + 2 * AHEAD);  // a cache line holds two vectors
            } else {
                const float* values = static_cast<const float*>(w.values) + of_column * LANES;
                q = load(values);
                __builtin_prefetch(values + AHEAD);
            }
            for (int r = 0; r < R; r++) y[r][n] += q * x[r * c.stride + k];
        }
}

inline void store(const Floats& v, const float* added, float* out, int64_t count) {
    std::memcpy(out, &v, sizeof(float) * (count < LANES ? count : LANES));
    if (added)
        for (int64_t i = 0; i < count && i < LANES; i++) out[i] += added[i];
}

template <int R, int NB, int BITS>
inline void any_tile(const Part& w, const Call& c, const Rounded& x, int64_t row, Vectors at, Floats (&y)[R][NB]) {
    if constexpr (BITS >= 16)
        tile_of_floats<R, NB, BITS>(w, c, row, x.columns(), at, y);
    else
        tile<R, NB, BITS>(w, c, x, row, x.columns(), at, y);
}

// R rows of x times a panel of W.
template <int R, int BITS>
void rows_of_panel(const Part& w, const Call& c, const Rounded& x, int64_t row, int64_t panel, int64_t first) {
    constexpr int NB = BITS >= 16 ? (R > 4 ? 2 : 4) : R > 4 ? 1 : R > 2 ? 2 : 4;
    const int64_t up = c.gated ? w.panels / 2 : 0, last = c.gated ? up * PANEL : w.rows;
    for (int vector = 0; vector < VECTORS; vector += NB) {
        Floats y[R][NB], second[R][NB];
        any_tile<R, NB, BITS>(w, c, x, row, {panel, vector}, y);
        if (c.gated) any_tile<R, NB, BITS>(w, c, x, row, {panel + up, vector}, second);
        for (int r = 0; r < R; r++)
            for (int n = 0; n < NB; n++) {
                const int64_t column = panel * PANEL + (vector + n) * LANES;
                if (column >= last) continue;
                const Floats v = c.gated ? silu(y[r][n]) * second[r][n] : y[r][n];
                const float* added = c.residual ? c.residual + (row + r) * c.residual_stride + first + column : nullptr;
                store(v, added, c.out + (row + r) * c.out_stride + first + column, last - column);
            }
    }
}

template <int BITS>
void panel_of_part(const Part& w, const Call& c, const Rounded& x, int64_t panel, int64_t first) {
    for (int64_t row = 0; row < c.rows; row += TILE) switch (c.rows - row) {
            case 1: rows_of_panel<1, BITS>(w, c, x, row, panel, first); break;
            case 2: rows_of_panel<2, BITS>(w, c, x, row, panel, first); break;
            case 3: rows_of_panel<3, BITS>(w, c, x, row, panel, first); break;
            case 4: rows_of_panel<4, BITS>(w, c, x, row, panel, first); break;
            case 5: rows_of_panel<5, BITS>(w, c, x, row, panel, first); break;
            case 6: rows_of_panel<6, BITS>(w, c, x, row, panel, first); break;
            case 7: rows_of_panel<7, BITS>(w, c, x, row, panel, first); break;
            default: rows_of_panel<8, BITS>(w, c, x, row, panel, first); break;
        }
}

inline void any_panel(const Part& w, const Call& c, const Rounded& x, int64_t panel, int64_t first) {
    switch (w.bits) {
        case 4: return panel_of_part<4>(w, c, x, panel, first);
        case 8: return panel_of_part<8>(w, c, x, panel, first);
        case 16: return panel_of_part<16>(w, c, x, panel, first);
        default: return panel_of_part<32>(w, c, x, panel, first);
    }
}

// The rows of x as a part needs them, in memory of this thread.
inline const Rounded& rounded(const Part& w, int64_t columns, const Call& call) {
    Rounded& x = Rounded::of_thread();
    x.resize(call.rows, columns, w.group, w.bits == 8 ? -128 : w.least);
    const auto round = [&](int64_t row) { x.round(row, call.x + row * call.stride, EXACT_INTEGERS); };
    if (w.bits < 16) Team::of_process().run(call.rows, call.rows < FEW_ROWS ? 1 : call.threads, round);
    return x;
}

// One linear, part by part.
inline void linear(const Matrix& matrix, const Call& call) {
    Team& team = Team::of_process();
    int64_t first = 0;
    for (int64_t p = 0; p < matrix.num_parts; p++) {
        const Part& w = matrix.parts[p];
        const Rounded& x = rounded(w, matrix.columns, call);
        const int64_t panels = call.gated ? w.panels / 2 : w.panels;
        team.run(panels, call.threads, [&](int64_t panel) { any_panel(w, call, x, panel, first); });
        first += w.rows;
    }
}

}  // namespace overlap_spec
