// Decode attention over short contexts, in one launch: rotates q and k, writes k and v into the cache, attends.
//
// The programs of a cluster share the keys of a request and a KV head. Keys go to them in chunks of 16, in turn, and so
// they go to a program's warps: each warp has its own keys and its own softmax. The last program also takes the new
// rows. With a window the first chunk is that of the first key that the first row sees. In the end each program adds up
// its warps' sums, sends every program of the cluster the columns that it finishes, and finishes its own. So sums never
// go through global memory, and no program waits for a counter.
//
// With TREE the new rows are columns of a tree, from FIRST on: they lie in the cache one after another, as rows of a
// chain do, but each has a position of its own, and sees the columns whose bits are set.
//
//     q       [16 pairs][HEAD]                          pairs are (row, head); swizzled, as keys are
//     new     [K, V][16 keys][HEAD]                     of the new rows; in the last program
//     ring    [warp][stage][K, V][16 keys][HEAD]        later [warp][16 pairs][HEAD] sums in float32
//     inbox   [program of the cluster][16 pairs][SLICE] sums in float32
#include "bfloat16.cuh"

struct Work {
    const u16* qkv;              // [T, (KV_HEADS * GROUP + 2 KV_HEADS) HEAD], rows qkv_stride apart
    const float* cos_sin;        // [positions, HEAD]
    const long long* positions;  // [T]
    const int* page_table;       // [B, table_columns], rows table_stride apart
    u16* k_cache;                // [pages, PAGE_SIZE, KV_HEADS, HEAD]
    u16* v_cache;
    u16* out;  // [T, KV_HEADS * GROUP * HEAD]
    const long long* prefix;  // [B], keys before a tree; if TREE, as the next
    const u64* mask;  // [B, WIDTH]: which columns of the tree a row sees
    const void *q_norm, *k_norm;  // [HEAD], if NORMED
    float scale_log2, eps;
    int qkv_stride, table_stride, table_columns;
};

constexpr int THREADS = 32 * WARPS;
constexpr int PIECES = HEAD / 8;  // of 16 bytes, of a head
constexpr int LIVE = WIDTH * GROUP;  // pairs
constexpr int KEYS = 16;  // of a chunk
constexpr int MATRIX = KEYS * HEAD * 2;
constexpr int STAGE = 2 * MATRIX;
constexpr int SLICE = HEAD / CLUSTER;  // columns that a program finishes
constexpr int NEW_AT = MATRIX;
constexpr int RING_AT = NEW_AT + STAGE;
constexpr int INBOX_AT = RING_AT + WARPS * STAGES * STAGE;
constexpr int SENT_BYTES = LIVE * (SLICE * 4 + 8);  // from a program to a program
constexpr float LOWEST = -1.0e30f;  // finite: no NaN with -inf
constexpr u32 ALL_LANES = 0xffffffff;
static_assert(LIVE <= 16 && PAGE_SIZE % KEYS == 0 && SLICE % 4 == 0 && !(TREE && WINDOW));

// Which keys a program has.
struct Part {
    int request, kv_head, rank;
    int cached;  // keys before the new rows
    int begin;  // the first chunk with a key that a row sees

    __device__ __forceinline__ void find_keys(const Work& work) {
        cached = static_cast<int>(TREE ? work.prefix[request] + FIRST : work.positions[request * WIDTH]);
        begin = WINDOW ? max(cached - (WINDOW - 1), 0) / KEYS : 0;
    }
    __device__ __forceinline__ int chunk(int warp, int step) const {
        return begin + (step * WARPS + warp) * CLUSTER + rank;
    }
    __device__ __forceinline__ bool takes_new() const { return rank == CLUSTER - 1; }
    __device__ __forceinline__ long long position(const Work& work, int row) const {
        return TREE ? work.positions[request * WIDTH + row] : cached + row;
    }
};

// Pieces of eight rows lie in eight places, whose banks differ.
__device__ __forceinline__ int place_of(int row, int piece) { return row * (HEAD * 2) + (piece ^ row % 8) * 16; }

#include "short_decode_rows.cuh"
#include "short_decode_softmax.cuh"
#include "short_decode_sums.cuh"

// ---- cached keys ----

__device__ __forceinline__ int page_of(const Work& work, const Part& part, int chunk) {
    int column = chunk * KEYS / PAGE_SIZE;
    return column < work.table_columns ? work.page_table[part.request * work.table_stride + column] : 0;
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// A warp's keys on their way: its chunks of 16 in turn, through its stages. Lane i has the page of the i-th chunk.
struct Ring {
    u32 stages;  // address
    int pages, chunks;  // of all warps

    __device__ __forceinline__ u32 stage(int step) const { return stages + step % STAGES * STAGE; }

    // Begin to copy a chunk; zeros behind the last key. Copies are counted by steps, with keys or without.
    __device__ __forceinline__ void ask(const Work& work, const Part& part, int warp, int step) const {
        int lane = threadIdx.x % 32, piece = lane % PIECES, chunk = part.chunk(warp, step), first = chunk * KEYS;
        long long page = __shfl_sync(ALL_LANES, pages, step % 32);
        if (chunk < chunks) {
            long long at = ((page * PAGE_SIZE + first % PAGE_SIZE) * KV_HEADS + part.kv_head) * HEAD + piece * 8;
#pragma unroll
            for (int key = lane / PIECES; key < KEYS; key += 32 / PIECES) {
                bool there = first + key < part.cached;
                long long from = there ? at + key * (KV_HEADS * HEAD) : 0;
                copy_piece(stage(step) + place_of(key, piece), work.k_cache + from, there);
                copy_piece(stage(step) + MATRIX + place_of(key, piece), work.v_cache + from, there);
            }
        }
        commit_copies();
    }
};

// Which columns of a tree the rows of a lane's two pairs see.
struct Seen {
    u64 columns[2];

    __device__ __forceinline__ Seen(const Work& work, const Part& part) {
        int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < 2; ++i)
            columns[i] = TREE ? work.mask[part.request * WIDTH + min((lane / 4 + 8 * i) / GROUP, WIDTH - 1)] : 0;
    }
    __device__ __forceinline__ bool column(int pair, int column) const { return columns[pair / 8] >> column & 1; }
    __device__ __forceinline__ bool new_row(int pair, int row) const {
        return TREE ? column(pair, FIRST + row) : row <= pair / GROUP;
    }
    // `key`: of those before the new rows, the last of which are columns of the tree if FIRST > 0.
    __device__ __forceinline__ bool before(int pair, int key, int left) const {
        int at = key - (left - FIRST);
        return FIRST == 0 || at < 0 || column(pair, at);
    }
};

__device__ __forceinline__ void attend_to_cache(
    Sums& sums, const Queries& queries, const Ring& ring, const Seen& seen, const Work& work, const Part& part, int warp
) {
    for (int step = 0, chunk; (chunk = part.chunk(warp, step)) < ring.chunks; ++step) {
        wait_copies<STAGES - 1>();
        __syncwarp();
        int left = part.cached - chunk * KEYS, far = left - WINDOW;  // with a window a row sees none up to far + row
        attend(sums, queries, ring.stage(step), work.scale_log2, [&seen, left, far](int pair, int key) {
            return key < left && (!WINDOW || key > far + pair / GROUP) && seen.before(pair, key, left);
        });
        __syncwarp();
        ring.ask(work, part, warp, step + STAGES);
    }  // copies of all chunks have arrived, and are read: sums may take their place
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    short_decode(const __grid_constant__ Work work) {
    extern __shared__ __align__(128) char memory[];
    __shared__ Common common;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (!READ_BEFORE_WAIT) wait_for_kernels_before();
    int unit = blockIdx.x / CLUSTER;
    Part part = {unit / KV_HEADS, unit % KV_HEADS, static_cast<int>(rank_in_cluster()), 0, 0};
    if (threadIdx.x == 0) {
        set_up(&common.arrived, 1);
        expect(&common.arrived, CLUSTER * SENT_BYTES);
        show_barriers_to_cluster();
    }
    Ring ring = {shared(memory) + RING_AT + warp * (STAGES * STAGE), 0, 0};
    if (WINDOW) part.find_keys(work);
    ring.pages = page_of(work, part, part.chunk(warp, lane));  // else before the number of keys is known: one wait less
    if (!WINDOW) part.find_keys(work);
    __syncwarp();
    arrive_cluster();
    ring.chunks = (part.cached + KEYS - 1) / KEYS;
    Seen seen(work, part);
#pragma unroll
    for (int step = 0; step < STAGES; ++step) ring.ask(work, part, warp, step);
    Rotated<GROUP> q;
    NewRows rows;
    q.ask_angles(work, part, work.q_norm);
    if (part.takes_new()) rows.ask_places(work, part);
    if (READ_BEFORE_WAIT) wait_for_kernels_before();
    let_next_begin();  // now that all keys are asked for, which what it copies will not be ahead of
    q.ask(work, part, part.kv_head * GROUP);
    if (part.takes_new()) rows.ask(work, part);
    q.place(memory, work);
    if (part.takes_new()) rows.place(memory + NEW_AT, work, part);
    __syncthreads();
    Sums sums;
    bool takes_new = part.takes_new() && warp == WARPS - 1;
    if (takes_new || part.chunk(warp, 0) < ring.chunks) {
        Queries queries;
        load_queries(queries, shared(memory));
        if (takes_new)
            attend(sums, queries, shared(memory) + NEW_AT, work.scale_log2,
                   [&seen](int pair, int key) { return seen.new_row(pair, key); });
        attend_to_cache(sums, queries, ring, seen, work, part, warp);
        leave(sums, memory, common, warp);
    } else if (lane < 16) {
        common.of_warps[warp][lane] = make_float2(LOWEST, 0.0f);
    }
    __syncthreads();
    wait_cluster();  // the others' barriers are set up
    send_sums(memory, common, part.rank);
    wait(&common.arrived, 0);
    finish(work, part, memory, common);
}
