// Self-attention of rows over a paged cache of K and V: rotate queries and keys, write K and V of all rows, then let
// the row at position p attend to the keys 0..p of its request, or to the last of them.

#pragma once

#include <vector>

#include "team.h"
#include "vectors.h"

namespace overlap_spec {

struct Rows {  // places of the rows of a forward
    const int64_t* positions;   // [T]
    const int64_t* cache_rows;  // [T]
    const int32_t* row_starts;  // [B + 1]
    const int32_t* pages;       // [B, page_stride]
    int64_t num_rows, num_requests, page_stride, page_size;
};

struct Heads {  // of a layer, and its cache
    const float* cos_sin;  // [positions, d]
    float* k_cache;        // [cache rows, nkv, d]
    float* v_cache;
    int64_t num_heads, num_kv_heads, head_dim;
    int64_t window;  // keys that a row sees, its own included; 0: all
    float scale;
};

// (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), for pairs that are half a head apart.
inline void rotate(const float* head, const float* cos_sin, int64_t d, float* to) {
    const int64_t half = d / 2;
    for (int64_t i = 0; i < half; i++) {
        const float first = head[i], second = head[half + i], cos = cos_sin[i], sin = cos_sin[half + i];
        to[i] = first * cos - second * sin;
        to[half + i] = second * cos + first * sin;
    }
}

struct Keys {  // where the keys of one head of a request are
    const int32_t* pages;
    int64_t page_size, stride, head;

    // visit(j, its place in the cache) for the j-th of the keys first..last.
    template <class Visit>
    void each(int64_t first, int64_t last, const Visit& visit) const {
        for (int64_t key = first; key <= last;) {
            const int64_t end = (key / page_size + 1) * page_size;
            int64_t place = (pages[key / page_size] * page_size + key % page_size) * stride + head;
            for (; key < end && key <= last; key++, place += stride) visit(key - first, place);
        }
    }
};

// One query over the keys first..last of its request, for heads of 16 PARTS values. Every query has the same order of
// sums.
template <int PARTS>
void attend(const float* query, const Keys& keys, const float* k_cache, const float* v_cache, int64_t first,
            int64_t last, float scale, float* weights, float* out) {
    const int64_t count = last - first + 1;
    float highest = -INFINITY;
    keys.each(first, last, [&](int64_t j, int64_t place) {
        Floats sum = {};
        unrolled<PARTS>(UNROLLED(n) { sum += load(query + n * LANES) * load(k_cache + place + n * LANES); });
        weights[j] = total(sum) * scale;
        highest = weights[j] > highest ? weights[j] : highest;
    });
    Floats sums = {};
    for (int64_t j = 0; j < count; j += LANES) {
        Floats weight = load(weights + j) - highest;
        for (int i = 0; i < LANES; i++) weight[i] = j + i < count ? weight[i] : -INFINITY;
        weight = exponential(weight);
        for (int i = 0; i < LANES; i++) weight[i] = j + i < count ? weight[i] : 0.f;
        sums += weight;
        std::memcpy(weights + j, &weight, sizeof weight);
    }
    Floats mixed[PARTS] = {};
    keys.each(first, last, [&](int64_t j, int64_t place) {
        unrolled<PARTS>(UNROLLED(n) { mixed[n] += load(v_cache + place + n * LANES) * weights[j]; });
    });
    const float whole = total(sums);
    unrolled<PARTS>(UNROLLED(n) {
        const Floats v = mixed[n] / whole;
        std::memcpy(out + n * LANES, &v, sizeof v);
    });
}

typedef void Attend(const float*, const Keys&, const float*, const float*, int64_t, int64_t, float, float*, float*);

inline Attend* attend_of(int64_t head_dim) {
    static constexpr Attend* of_parts[] = {
        attend<1>, attend<2>,  attend<3>,  attend<4>,  attend<5>,  attend<6>,  attend<7>,  attend<8>,
        attend<9>, attend<10>, attend<11>, attend<12>, attend<13>, attend<14>, attend<15>, attend<16>,
    };
    return of_parts[head_dim / LANES - 1];
}

// Rotates a row's queries and keys, and writes its K and V.
inline void write_row(const Heads& heads, const Rows& rows, int64_t r, const float* qkv, float* queries) {
    const int64_t d = heads.head_dim, n = heads.num_heads, kv = heads.num_kv_heads * d;
    const float *row = qkv + r * (n * d + 2 * kv), *angles = heads.cos_sin + rows.positions[r] * d;
    for (int64_t h = 0; h < n; h++) rotate(row + h * d, angles, d, queries + (r * n + h) * d);
    float* k = heads.k_cache + rows.cache_rows[r] * kv;
    for (int64_t h = 0; h < heads.num_kv_heads; h++) rotate(row + (n + h) * d, angles, d, k + h * d);
    std::memcpy(heads.v_cache + rows.cache_rows[r] * kv, row + n * d + kv, kv * sizeof(float));
}

// Shapes: qkv [T, (n + 2 nkv) d], queries [T, n d] (scratch), out [T, n d].
inline void attention(const Heads& heads, const Rows& rows, const float* qkv, float* queries, float* out, int threads) {
    const int64_t d = heads.head_dim, kv = heads.num_kv_heads * d, share = heads.num_heads / heads.num_kv_heads;
    std::vector<int64_t> request_of(rows.num_rows);
    int64_t longest = 0;
    for (int64_t b = 0; b < rows.num_requests; b++)
        for (int64_t r = rows.row_starts[b]; r < rows.row_starts[b + 1]; r++) request_of[r] = b;
    for (int64_t r = 0; r < rows.num_rows; r++) longest = rows.positions[r] > longest ? rows.positions[r] : longest;
    Attend* const attend = attend_of(d);
    Team& team = Team::of_process();
    team.run(rows.num_rows, rows.num_rows < FEW_ROWS ? 1 : threads,
             [&](int64_t r) { write_row(heads, rows, r, qkv, queries); });
    team.run(rows.num_rows * heads.num_kv_heads, threads, [&](int64_t item) {
        static thread_local std::vector<float> weights;
        weights.resize(longest + 1 + LANES);
        const int64_t r = item / heads.num_kv_heads, head = item % heads.num_kv_heads, last = rows.positions[r];
        const int64_t first = heads.window && last - heads.window + 1 > 0 ? last - heads.window + 1 : 0;
        const Keys keys{rows.pages + request_of[r] * rows.page_stride, rows.page_size, kv, head * d};
        for (int64_t q = r * heads.num_heads + head * share, end = q + share; q < end; q++)
            attend(queries + q * d, keys, heads.k_cache, heads.v_cache, first, last, heads.scale, weights.data(),
                   out + q * d);
    });
}

}  // namespace overlap_spec
