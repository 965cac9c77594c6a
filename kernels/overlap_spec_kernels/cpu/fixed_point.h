// Rows of x as integers of 24 bits with a scale for each group, in three digits of a byte.
//
//     x[i] = scale * (d0 + 256 d1 + 65536 d2)        each digit from -128 to 127
//
// The scale is a power of two, so a value loses nothing but what is below a 2^22nd of its group's largest: about what a
// sum in float32 loses too. A row's digits depend on the row alone.

#pragma once

#include <vector>

#include "vectors.h"

namespace overlap_spec {

constexpr int DIGITS = 3;
constexpr int TILE = 8;  // rows that are multiplied at once

typedef int8_t Bytes __attribute__((vector_size(LANES)));

struct GroupOfRow {
    float scale, sum;  // of x, to be multiplied by W's offset
    int32_t starts[DIGITS];  // what sums of products begin with, by digit
};

class Rounded {
  public:
    // The calling thread's, whose memory serves one linear after another.
    static Rounded& of_thread() {
        static thread_local Rounded rounded;
        return rounded;
    }

    // zero: added to every integer of W, for what is multiplied has no sign.
    void resize(int64_t rows, int64_t columns, int64_t group, int32_t zero) {
        rows_ = rows, columns_ = columns, group_ = group, groups_ = columns / group, zero_ = zero;
        digits_.resize(rows * DIGITS * columns);
        of_groups_.resize(rows * groups_);
    }

    // Digits of rows 8 n .. 8 n + 7, or as many as there are: 4 columns' of each digit of each row side by side.
    const int8_t* digits(int64_t row) const { return digits_.data() + row * DIGITS * columns_; }

    // One row. Without digits, only the sums of its groups.
    void round(int64_t row, const float* x, bool digits) {
        for (int64_t g = 0; g < groups_; g++)
            if (digits)
                round_group(row, g, x + g * group_);
            else
                of_groups_[row * groups_ + g].sum = sum_of(x + g * group_);
    }

    int64_t columns() const { return columns_; }
    const GroupOfRow* groups(int64_t row) const { return of_groups_.data() + row * groups_; }

  private:
    static constexpr int32_t FINITE = 0x7f800000, LEAST_EXPONENT = 22;  // as floats store them

    float sum_of(const float* x) const {
        Floats sum = {};
        for (int64_t i = 0; i < group_; i += LANES) sum += load(x + i);
        return total(sum);
    }

    // The bits of the largest value: they have the order of the values.
    int32_t largest_of(const float* x) const {
        Ints bits = {};
        for (int64_t i = 0; i < group_; i += LANES) {
            const Ints each = load<Ints>(x + i) & 0x7fffffff;
            bits = each > bits ? each : bits;
        }
        return largest(bits);
    }

    void round_group(int64_t row, int64_t g, const float* x) {
        const int32_t largest = largest_of(x);
        const int32_t exponent = largest >> 23 < LEAST_EXPONENT ? LEAST_EXPONENT : largest >> 23;
        const float inverse = as_float((275 - exponent) << 23);  // the largest becomes < 2^22
        const float scale = largest < FINITE ? as_float((exponent - 21) << 23) : NAN;
        const int64_t in_tile = row % TILE, before = row - in_tile;
        const int64_t side_by_side = rows_ - before < TILE ? rows_ - before : TILE;
        int8_t* to = digits_.data() + before * DIGITS * columns_ + in_tile * DIGITS * 4;
        Ints sum = {}, sums[DIGITS] = {};
        for (int64_t i = 0; i < group_; i += LANES) {
            const Floats scaled = load(x + i) * inverse;
            Ints rest = __builtin_convertvector(scaled + (scaled < 0.f ? -0.5f : 0.5f), Ints);
            sum += rest;
            for (int d = 0; d < DIGITS; d++) {
                const Ints digit = rest << 24 >> 24;
                const Bytes bytes = __builtin_convertvector(digit, Bytes);
                for (int64_t k = 0; k < LANES; k += 4) {
                    const int64_t four = (g * group_ + i + k) / 4 * side_by_side * DIGITS + d;
                    std::memcpy(to + four * 4, reinterpret_cast<const char*>(&bytes) + k, 4);
                }
                sums[d] += digit;
                rest = (rest - digit) >> 8;
            }
        }
        GroupOfRow& of_group = of_groups_[row * groups_ + g];
        for (int d = 0; d < DIGITS; d++) of_group.starts[d] = zero_ ? zero_ * total(sums[d]) : 0;
        of_group.scale = scale;
        of_group.sum = scale * float(total(sum));
    }

    int64_t rows_ = 0, columns_ = 0, group_ = 0, groups_ = 0;
    int32_t zero_ = 0;
    std::vector<int8_t> digits_;
    std::vector<GroupOfRow> of_groups_;
};

}  // namespace overlap_spec
