// Wrappers of Hopper's PTX that CUDA C++ has no functions for: barriers, the copy engine, clusters, warpgroup products.
#pragma once

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

struct alignas(64) TensorMap {
    u64 opaque[16];
};

__device__ __forceinline__ u32 shared(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// A value that the compiler keeps in a register, and does not compute again where it is used.
__device__ __forceinline__ u32 kept(u32 value) {
    u32 copy;
    asm volatile("mov.u32 %0, %1;" : "=r"(copy) : "r"(value));
    return copy;
}

// ---- clusters: programs on neighbouring multiprocessors, which see each other's shared memory ----

__device__ __forceinline__ u32 rank_in_cluster() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void meet_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// ---- barriers in shared memory that count arrivals and bytes ----

// A barrier is given by its address, or by a pointer.
__device__ __forceinline__ void set_up(u32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void set_up(u64* barrier, int arrivals) { set_up(shared(barrier), arrivals); }

__device__ __forceinline__ void show_barriers_to_cluster() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// What this thread wrote to shared memory, a barrier too, is seen by copies that it begins after this.
__device__ __forceinline__ void show_to_copies() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Arrive at a barrier of this program. Writes before it are seen after a wait.
__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void arrive(u64* barrier) { arrive(shared(barrier)); }

__device__ __forceinline__ void expect(u32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void expect(u64* barrier, int bytes) { expect(shared(barrier), bytes); }

// Arrive at the barrier at the same address in another program of the cluster, or in this one. The arrival has no
// release order at cluster scope, which would cost a fence of the whole GPU. None is needed: the memory that a barrier
// guards here is read by products that have ended, and written by the copy engine.
__device__ __forceinline__ void arrive_at(u64* barrier, u32 rank) {
    asm volatile(
        "{ .reg .b32 there;\n"
        "  mapa.shared::cluster.u32 there, %0, %1;\n"
        "  mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(shared(barrier)), "r"(rank)
        : "memory");
}

__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again:\n"
        "  mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "  @done bra ready;\n"
        "  bra again;\n"
        "ready: }" ::"r"(barrier), "r"(parity)
        : "memory");
}

__device__ __forceinline__ void wait(u64* barrier, u32 parity) { wait(shared(barrier), parity); }

// A place in a ring: a stage, and the parity of its barriers' phase.
template <int RING_STAGES>
struct RingPlace {
    int stage = 0;
    u32 parity = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == RING_STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

__device__ __forceinline__ int quotient_up(int numerator, int denominator) {
    return (numerator + denominator - 1) / denominator;
}

// ---- the copy engine ----

__device__ __forceinline__ void copy_tile(u32 target, const TensorMap* map, u64* barrier, int k, int row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
        ::"r"(target), "l"(map), "r"(shared(barrier)), "r"(k), "r"(row)
        : "memory");
}

// Bring a map, which lies with the arguments of a launch, to where copies find it: the first one would wait for that.
__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Copy to the same address in all programs of `ranks`, one bit each; each program's barrier counts its own bytes.
__device__ __forceinline__ void send_tile(u32 target, const TensorMap* map, u64* barrier, int k, int row, u16 ranks) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(target), "l"(map), "r"(shared(barrier)), "r"(k), "r"(row), "h"(ranks)
        : "memory");
}

// Copy a box of a tensor of four dimensions.
__device__ __forceinline__ void copy_box(
    u32 target, const TensorMap* map, u64* barrier, int first, int second, int third, int fourth
) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}],"
        " [%2];" ::"r"(target), "l"(map), "r"(shared(barrier)), "r"(first), "r"(second), "r"(third), "r"(fourth)
        : "memory");
}

// One that is whole in the first two; to all programs of `ranks`, one bit each, at the same address. Each program's
// barrier counts its own bytes.
__device__ __forceinline__ void copy_box(u32 target, const TensorMap* map, u64* barrier, int third, int fourth) {
    copy_box(target, map, barrier, 0, 0, third, fourth);
}

__device__ __forceinline__ void send_box(
    u32 target, const TensorMap* map, u64* barrier, int third, int fourth, u16 ranks
) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%3, %3, %4, %5}], [%2], %6;" ::"r"(target), "l"(map), "r"(shared(barrier)), "r"(0), "r"(third),
        "r"(fourth), "h"(ranks)
        : "memory");
}

// Copy a run of memory; address and size are multiples of 16 bytes.
__device__ __forceinline__ void copy_bytes(u32 target, const void* source, int bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
        "l"(source), "r"(bytes), "r"(barrier)
        : "memory");
}

// The same, of memory that is not read again soon: it leaves the L2 cache first.
__device__ __forceinline__ void copy_bytes_once(u32 target, const void* source, int bytes, u32 barrier) {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
        ::"r"(target), "l"(source), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}

// Copy 16 bytes by this thread, which sees those of all its copies after `wait_for_pieces`.
__device__ __forceinline__ void copy_piece(u32 target, const void* source) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
}

// Or write zeros.
__device__ __forceinline__ void copy_piece(u32 target, const void* source, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(there ? 16 : 0)
                 : "memory");
}

// The same of 4 bytes.
__device__ __forceinline__ void copy_word(u32 target, const void* source) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(target), "l"(source) : "memory");
}

// Arrive at a barrier when the copies that this thread has begun are there.
__device__ __forceinline__ void arrive_after_pieces(u64* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared(barrier)) : "memory");
}

__device__ __forceinline__ void wait_for_pieces() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Bring the line of an address into the L2 cache.
__device__ __forceinline__ void prefetch_line(const void* address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address) : "memory");
}

// The lines of a run of memory, of which each of `threads` threads asks for some.
__device__ __forceinline__ void prefetch_lines(const void* first, int bytes, int thread, int threads) {
    constexpr int LINE = 128;
    const char* from = static_cast<const char*>(first);
    for (int at = thread * LINE; at < bytes + LINE - 1; at += threads * LINE) prefetch_line(from + min(at, bytes - 1));
}

// The address of the same place in another program of the cluster.
__device__ __forceinline__ u32 address_in(u32 rank, const void* pointer) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared(pointer)), "r"(rank));
    return there;
}

// Write to an address in the cluster.
__device__ __forceinline__ void store(u32 target, float value) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(target), "f"(value) : "memory");
}

// Write four floats to another program, whose barrier counts their bytes.
__device__ __forceinline__ void send(u32 target, float4 value, u32 barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(target),
        "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(barrier)
        : "memory");
}

// The same of two.
__device__ __forceinline__ void send(u32 target, float first, float second, u32 barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(target),
        "f"(first), "f"(second), "r"(barrier)
        : "memory");
}

// ---- products of a warp ----

// Load four 8 x 8 matrices of 16 bits from shared memory; each lane has the address of a row.
__device__ __forceinline__ void load_matrices(u32 address, u32& a, u32& b, u32& c, u32& d) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
                 : "r"(address)
                 : "memory");
}

// sums += a b: a [16, 16], b [16, 8] in bfloat16.
__device__ __forceinline__ void multiply16(float (&sums)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// ---- products of a warpgroup ----

// The descriptor of a matrix in shared memory with rows of 128 swizzled bytes. Eight rows are `eight_rows` bytes from
// the next eight. `next_columns`: where rows do not lie along K, bytes from 64 columns to the next 64.
__device__ __forceinline__ u64 described(u32 address, int eight_rows = 1024, int next_columns = 0) {
    u64 strides = static_cast<u64>(eight_rows >> 4) << 32 | static_cast<u64>(next_columns >> 4) << 16;
    return (static_cast<u64>(1) << 62) | strides | ((address & 0x3FFFF) >> 4);
}

__device__ __forceinline__ void begin_products() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void commit_products() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int PENDING>
__device__ __forceinline__ void wait_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Store four 8 x 8 matrices of 16 bits from a product's registers to shared memory; each lane has the address of a row.
__device__ __forceinline__ void store_matrices(u32 address, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
                 "r"(c), "r"(d)
                 : "memory");
}

// ---- threads ----

__device__ __forceinline__ void meet_threads(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Arrive at a barrier of threads without waiting; `threads` counts those that wait too.
__device__ __forceinline__ void pass_threads(int barrier, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Meet, and learn whether any thread gave true. The vote tells the compiler that a warp agrees.
__device__ __forceinline__ bool any_of_threads(int barrier, int threads, bool own) {
    u32 any;
    asm volatile(
        "{ .reg .pred own, any; setp.ne.u32 own, %1, 0;\n"
        "  bar.red.or.pred any, %2, %3, own;\n"
        "  selp.u32 %0, 1, 0, any; }"
        : "=r"(any)
        : "r"(static_cast<u32>(own)), "r"(barrier), "r"(threads)
        : "memory");
    return __any_sync(0xffffffff, any);
}

template <int COUNT>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// ---- arithmetic ----

// Not moved behind a later wait for products, beside which it is to run.
__device__ __forceinline__ float exp2_of(float x) {
    float result;
    asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

// By the instructions that Triton makes of a / b, exp(x) and sqrt(x): the same bits.
__device__ __forceinline__ float quotient(float a, float b) {
    float result;
    asm("div.full.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}

__device__ __forceinline__ float exponential(float x) {
    float result;
    asm("ex2.approx.f32 %0, %1;" : "=f"(result) : "f"(__fmul_rn(x, __int_as_float(0x3fb8aa3b))));
    return result;
}

// The smaller and the larger one; NaN if one is.
__device__ __forceinline__ float least(float a, float b) {
    float result;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}

__device__ __forceinline__ float most(float a, float b) {
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}

__device__ __forceinline__ float root_of(float x) {
    float result;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

__device__ __forceinline__ float silu(float x) { return quotient(x, __fadd_rn(1.0f, exponential(0.0f - x))); }

__device__ __forceinline__ float gated(float gate, float up) { return __fmul_rn(silu(gate), up); }

// ---- counters in global memory, by which programs wait for each other ----

// Add one. Returns the count before. What the threads that met before this call have written is visible to those that
// meet after a thread of theirs has read this count.
__device__ __forceinline__ u32 count(u32* counter) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}

__device__ __forceinline__ u32 counted(const u32* counter) {
    u32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
    return value;
}

// The expert at a place of one row, which is below 0 until the router has chosen it. It may still run.
__device__ __forceinline__ int chosen(const long long* place) {
    long long expert;
    do {
        asm volatile("ld.relaxed.gpu.global.s64 %0, [%1];" : "=l"(expert) : "l"(place) : "memory");
    } while (expert < 0);
    return static_cast<int>(expert);
}

// `let_next_begin`: the next kernel, if it is a dependent launch, begins as soon as there is room for it.
// `wait_for_kernels_before`: a kernel that began early waits until all kernels before it have ended.
__device__ __forceinline__ void let_next_begin() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

__device__ __forceinline__ void wait_for_kernels_before() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}
