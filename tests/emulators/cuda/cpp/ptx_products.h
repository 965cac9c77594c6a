// Instructions of PTX that multiply matrices, and move their fragments between registers and shared memory.
#pragma once

#include "ptx.h"

namespace ptx {

// ---- mma.sync: A [16, k], B [k, 8] by columns, sums [16, 8] ----

struct MmaOperand {
    const uint32_t* a[8];
    const uint32_t* b[4];
    float c[4], d[4];
};

// A fragment of 32-bit registers has `per` numbers in each.
template <class T>
float number_of(uint32_t word, int i) {
    constexpr int size = 8 * sizeof(typename T::value);
    return T::widened(word >> size * i & ((1u << size) - 1));
}

template <class A, class B, int K>
void multiply_fragments(void** operands) {
    constexpr int PER = 4 / sizeof(typename A::value), QUARTER = 4 * PER;  // columns of K in a quad's registers
    float a[16][K], b[8][K];
    for (int lane = 0; lane < 32; ++lane) {
        auto& mine = *static_cast<MmaOperand*>(operands[lane]);
        int group = lane / 4, column = lane % 4 * PER;
        for (int k = 0; k < K; k += QUARTER)
            for (int i = 0; i < PER; ++i) {
                int r = k / QUARTER;
                a[group][k + column + i] = number_of<A>(*mine.a[2 * r], i);
                a[group + 8][k + column + i] = number_of<A>(*mine.a[2 * r + 1], i);
                b[group][k + column + i] = number_of<B>(*mine.b[r], i);
            }
    }
    for (int lane = 0; lane < 32; ++lane) {
        auto& mine = *static_cast<MmaOperand*>(operands[lane]);
        for (int i = 0; i < 4; ++i) {
            int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
            float sum = 0;
            for (int k = 0; k < K; ++k) sum += a[row][k] * b[column][k];
            mine.d[i] = mine.c[i] + sum;
        }
    }
}

template <class S, class D, class A, class B, class C, size_t NA, size_t NB, class RegisterC>
void mma_row_col(
    std::array<float*, 4> d, std::array<uint32_t*, NA> a, std::array<uint32_t*, NB> b, std::array<RegisterC*, 4> c
) {
    static_assert(S::m == 16 && S::n == 8 && sizeof(typename A::value) * S::k == 8 * NA && NB * 2 == NA, "an mma.sync of this shape");
    MmaOperand operand{};
    for (size_t i = 0; i < NA; ++i) operand.a[i] = a[i];
    for (size_t i = 0; i < NB; ++i) operand.b[i] = b[i];
    for (int i = 0; i < 4; ++i) operand.c[i] = *c[i];
    emulator::together("mma.sync", 0xffffffff, &operand, multiply_fragments<A, B, S::k>);
    for (int i = 0; i < 4; ++i) *d[i] = operand.d[i];
}

// ---- ldmatrix, stmatrix: matrices of 8 rows of 16 bytes; lane i has the address of row i % 8 of matrix i / 8 ----

struct MatrixOperand {
    char* row;
    uint32_t words[4];
};

template <bool LOADS, bool TRANSPOSED>
void move_matrices(void** operands, int count) {
    for (int matrix = 0; matrix < count; ++matrix)
        for (int lane = 0; lane < 32; ++lane)
            for (int i = 0; i < 2; ++i) {
                int row = lane / 4, column = lane % 4 * 2 + i;
                if (TRANSPOSED) std::swap(row, column);
                char* at = static_cast<MatrixOperand*>(operands[8 * matrix + row])->row + 2 * column;
                char* mine = reinterpret_cast<char*>(&static_cast<MatrixOperand*>(operands[lane])->words[matrix]) + 2 * i;
                LOADS ? memcpy(mine, at, 2) : memcpy(at, mine, 2);
            }
}

template <bool LOADS, bool TRANSPOSED, size_t N>
void matrices(const char* what, std::array<uint32_t*, N> registers, uint32_t address) {
    MatrixOperand operand{};
    if (static_cast<size_t>(emulator::current->lane) < 8 * N) operand.row = emulator::memory_at(address, 16, 16);
    for (size_t i = 0; i < N; ++i) operand.words[i] = *registers[i];
    emulator::together(what, 0xffffffff, &operand, [](void** operands) { move_matrices<LOADS, TRANSPOSED>(operands, N); });
    if (LOADS)
        for (size_t i = 0; i < N; ++i) *registers[i] = operand.words[i];
}

template <class S, class T, size_t N>
void ldmatrix_shared(std::array<uint32_t*, N> registers, uint32_t address) {
    matrices<true, false>("ldmatrix", registers, address);
}
template <class S, class T, size_t N>
void ldmatrix_trans_shared(std::array<uint32_t*, N> registers, uint32_t address) {
    matrices<true, true>("ldmatrix.trans", registers, address);
}
template <class S, class T, size_t N>
void stmatrix_shared(uint32_t address, std::array<uint32_t*, N> registers) {
    matrices<false, false>("stmatrix", registers, address);
}
template <class S, class T, size_t N>
void stmatrix_trans_shared(uint32_t address, std::array<uint32_t*, N> registers) {
    matrices<false, true>("stmatrix.trans", registers, address);
}

// ---- wgmma: a warp's 16 of 64 rows ----

// A matrix in shared memory whose rows lie along K, swizzled by 128 bytes; or `across`, whose rows lie along N, or M.
struct Described {
    emulator::Program* program;
    uint32_t start, eight_rows, next_columns;
    bool across;

    Described(emulator::Program* program, unsigned long long descriptor, bool across = false)
        : program(program), start((descriptor & 0x3fff) << 4), eight_rows((descriptor >> 32 & 0x3fff) << 4),
          next_columns((descriptor >> 16 & 0x3fff) << 4), across(across) {
        if (descriptor >> 62 != 1) emulator::fail("wgmma of a matrix that is not swizzled by 128 bytes is not modelled");
        if (descriptor >> 49 & 7) emulator::fail("wgmma with a base offset is not modelled");
    }

    // `row` of A or B, `k` of the sixteen.
    uint16_t at(int row, int k) const {
        uint32_t offset = start + row / 8 * eight_rows + row % 8 * 128 + k * 2;
        if (across) offset = start + k / 8 * eight_rows + k % 8 * 128 + row / 64 * next_columns + row % 64 * 2;
        uint16_t value;
        memcpy(&value, emulator::memory_at({program, offset ^ (offset >> 7 & 7) << 4}, 2, 2), 2);
        return value;
    }
};

template <size_t N>
struct WgmmaOperand {
    std::array<float*, N> sums;
    unsigned long long a_descriptor, b_descriptor;
    std::array<uint32_t, 4> a;
    bool adds, a_along_m, b_along_n;
};

// sums [lane][...] += a [16, 16] b [n, 16] transposed
void add_products(float* sums, const float (&a)[16][16], const std::vector<float>& b, int n, bool adds);

template <class T>
std::vector<float> numbers_of_b(const Described& matrix, int n) {
    std::vector<float> numbers(16 * n);
    for (int row = 0; row < n; ++row)
        for (int k = 0; k < 16; ++k) numbers[k * n + row] = T::widened(matrix.at(row, k));
    return numbers;
}

template <class S, class T, bool A_IN_REGISTERS>
void issue_wgmma(void** operands) {
    constexpr size_t N = S::n / 2;
    using Operand = WgmmaOperand<N>;
    auto& first = *static_cast<Operand*>(operands[0]);
    std::vector<float*> registers;
    std::array<std::array<uint32_t, 4>, 32> fragments;
    for (int lane = 0; lane < 32; ++lane) {
        auto& mine = *static_cast<Operand*>(operands[lane]);
        if (mine.b_descriptor != first.b_descriptor || mine.a_descriptor != first.a_descriptor || mine.adds != first.adds)
            emulator::fail("lanes give wgmma different descriptors");
        registers.insert(registers.end(), mine.sums.begin(), mine.sums.end());
        fragments[lane] = mine.a;
    }
    emulator::Warp& warp = *emulator::current->warp;
    int first_row = warp.number % 4 * 16;
    Described b(warp.program, first.b_descriptor, first.b_along_n);
    Described a(warp.program, A_IN_REGISTERS ? first.b_descriptor : first.a_descriptor, first.a_along_m);
    bool adds = first.adds;
    emulator::add_product(first.b_descriptor * 1024 + S::n * 2 + adds, std::move(registers), [=](float* sums) {
        float numbers[16][16];
        if (A_IN_REGISTERS) {
            for (int lane = 0; lane < 32; ++lane)
                for (int i = 0; i < 8; ++i)
                    numbers[lane / 4 + i / 2 % 2 * 8][lane % 4 * 2 + i % 2 + i / 4 * 8] = number_of<T>(fragments[lane][i / 2], i % 2);
        } else {
            for (int row = 0; row < 16; ++row)
                for (int k = 0; k < 16; ++k) numbers[row][k] = T::widened(a.at(first_row + row, k));
        }
        add_products(sums, numbers, numbers_of_b<T>(b, S::n), S::n, adds);
    });
}

template <class S, class D, class A, class B, size_t N>
void wgmma_mma_async(
    std::array<float*, N> sums, unsigned long long a, unsigned long long b, bool adds, int sign_a, int sign_b, int along_m, int along_n
) {
    static_assert(S::m == 64 && S::k == 16 && N == S::n / 2 && std::is_same_v<A, B>, "a wgmma of this shape");
    if (sign_a != 1 || sign_b != 1) emulator::fail("wgmma with signs is not modelled");
    WgmmaOperand<N> operand{sums, a, b, {}, adds, along_m != 0, along_n != 0};
    emulator::together("wgmma", 0xffffffff, &operand, issue_wgmma<S, A, false>);
}

template <class S, class D, class A, class B, size_t N>
void wgmma_mma_async(
    std::array<float*, N> sums, std::array<uint32_t*, 4> a, unsigned long long b, bool adds, int sign_a, int sign_b, int along_n
) {
    static_assert(S::m == 64 && S::k == 16 && N == S::n / 2 && std::is_same_v<A, B>, "a wgmma of this shape");
    if (sign_a != 1 || sign_b != 1) emulator::fail("wgmma with signs is not modelled");
    WgmmaOperand<N> operand{sums, 0, b, {*a[0], *a[1], *a[2], *a[3]}, adds, false, along_n != 0};
    emulator::together("wgmma", 0xffffffff, &operand, issue_wgmma<S, A, true>);
}

inline void wgmma_fence() {
    emulator::together("wgmma.fence", 0xffffffff, nullptr, [](void**) { emulator::current->warp->fenced = true; });
}
inline void wgmma_commit_group() {
    emulator::together("wgmma.commit_group", 0xffffffff, nullptr, [](void**) { emulator::commit_products(); });
}
inline void wgmma_wait_group(uint32_t pending) {
    emulator::together("wgmma.wait_group", 0xffffffff, &pending, [](void** operands) {
        emulator::wait_products(*static_cast<uint32_t*>(operands[0]));
    });
}

}  // namespace ptx
