// Self-attention of rows over a paged cache of K and V: rotate queries and keys, write K and V of all rows, then let
// the row at position p attend to the keys 0..p of its request, or to the last of them. A row of a tree attends to the
// keys of a prefix, then to those of its ancestors, then to its own: in the order that they have in a sequence.

#pragma once

#include <vector>

#include "team.h"
#include "vectors.h"

namespace overlap_spec {

constexpr int64_t MASK_BITS = 64;

struct Rows {  // places of the rows of a forward
    const int64_t* positions;   // [T]
    const int64_t* cache_rows;  // [T]
    const int32_t* row_starts;  // [B + 1]
    const int32_t* pages;       // [B, page_stride]
    int64_t num_rows, num_requests, page_stride, page_size;
    const int64_t* prefix;      // of trees [B]: keys at places 0..prefix - 1; null: rows of sequences
    const int64_t* near_rows;   // [B, num_near]: cache rows of the other keys, ancestors before what follows them
    const int64_t* near_positions;  // [B, num_near]: their positions
    const int64_t* masks;       // [T, num_words]: bit i % 64 of word i / 64: the row attends to other key i
    int64_t num_near, num_words;

    // The cache rows of the other keys that row r of request b attends to from position `earliest` on, in their order.
    void near_of(int64_t r, int64_t b, int64_t earliest, std::vector<int64_t>& found) const {
        found.clear();
        for (int64_t i = 0; prefix && i < num_near; i++) {
            const bool seen = masks[r * num_words + i / MASK_BITS] >> (i % MASK_BITS) & 1;
            const int64_t key = b * num_near + i;
            if (seen && near_positions[key] >= earliest) found.push_back(near_rows[key]);
        }
    }
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

struct Keys {  // where the keys of one head are that a row attends to: places first..end - 1 of its request, and others
    const int32_t* pages;
    int64_t page_size, stride, head, first, end;
    const int64_t* others;  // cache rows
    int64_t num_others;

    int64_t count() const { return end - first + num_others; }

    // visit(j, its place in the cache) for the j-th key. One loop for keys of both kinds: the same instructions add up.
    template <class Visit>
    void each(const Visit& visit) const {
        const int64_t in_pages = end - first, all = count();
        for (int64_t j = 0; j < all;) {
            const int64_t key = first + j;
            const bool paged = j < in_pages;
            const int64_t row = paged ? pages[key / page_size] * page_size + key % page_size : others[j - in_pages];
            const int64_t side_by_side = paged ? (key / page_size + 1) * page_size - key : 1;
            const int64_t stop = paged && j + side_by_side > in_pages ? in_pages : j + side_by_side;
            for (int64_t place = row * stride + head; j < stop; j++, place += stride) visit(j, place);
        }
    }
};

// One query over the keys of its row, for heads of 16 PARTS values; zeros without keys. Every query has the same order
// of sums.
template <int PARTS>
void attend(const float* query, const Keys& keys, const float* k_cache, const float* v_cache, float scale,
            float* weights, float* out) {
    const int64_t count = keys.count();
    float highest = -INFINITY;
    keys.each([&](int64_t j, int64_t place) {
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
    keys.each([&](int64_t j, int64_t place) {
        unrolled<PARTS>(UNROLLED(n) { mixed[n] += load(v_cache + place + n * LANES) * weights[j]; });
    });
    const float whole = count ? total(sums) : 1.f;
    unrolled<PARTS>(UNROLLED(n) {
        const Floats v = mixed[n] / whole;
        std::memcpy(out + n * LANES, &v, sizeof v);
    });
}

typedef void Attend(const float*, const Keys&, const float*, const float*, float, float*, float*);

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
    int64_t longest = 0;  // most keys of a row
    for (int64_t b = 0; b < rows.num_requests; b++)
        for (int64_t r = rows.row_starts[b]; r < rows.row_starts[b + 1]; r++) {
            const int64_t most = rows.prefix ? rows.prefix[b] + rows.num_near : rows.positions[r] + 1;
            request_of[r] = b, longest = most > longest ? most : longest;
        }
    Attend* const attend = attend_of(d);
    Team& team = Team::of_process();
    team.run(rows.num_rows, rows.num_rows < FEW_ROWS ? 1 : threads,
             [&](int64_t r) { write_row(heads, rows, r, qkv, queries); });
    team.run(rows.num_rows * heads.num_kv_heads, threads, [&](int64_t item) {
        static thread_local std::vector<float> weights;
        static thread_local std::vector<int64_t> near;
        weights.resize(longest + LANES);
        const int64_t r = item / heads.num_kv_heads, head = item % heads.num_kv_heads, b = request_of[r];
        const int64_t earliest = heads.window ? rows.positions[r] - heads.window + 1 : 0;
        const int64_t stop = rows.prefix ? rows.prefix[b] : rows.positions[r] + 1;
        const int64_t first = earliest < 0 ? 0 : earliest < stop ? earliest : stop;
        rows.near_of(r, b, earliest, near);
        const int32_t* pages = rows.pages + b * rows.page_stride;
        const Keys keys{pages, rows.page_size, kv, head * d, first, stop, near.data(), int64_t(near.size())};
        for (int64_t q = r * heads.num_heads + head * share, end = q + share; q < end; q++)
            attend(queries + q * d, keys, heads.k_cache, heads.v_cache, heads.scale, weights.data(), out + q * d);
    });
}

}  // namespace overlap_spec
