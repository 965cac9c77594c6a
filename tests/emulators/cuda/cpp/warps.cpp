// What the lanes of a warp do together, and the products of warpgroups, warp by warp.

#include <cmath>

#include "machine.h"
#include "ptx_products.h"

namespace emulator {

namespace {

Meeting& meeting_of(Warp& warp, const char* what, u32 mask) {
    for (Meeting& meeting : warp.meetings) {
        if (meeting.mask == mask && strcmp(meeting.what, what) == 0 && !(meeting.arrived >> current->lane & 1)) return meeting;
        if (meeting.arrived & mask) fail("%s, while lanes %08x are at %s", what, meeting.arrived, meeting.what);
    }
    warp.meetings.push_back({what, mask, 0, {}, {}});
    return warp.meetings.back();
}

}  // namespace

void together(const char* what, u32 mask, void* operands, const std::function<void(void**)>& act) {
    Warp& warp = *current->warp;
    if (!(mask >> current->lane & 1)) fail("%s of lanes %08x, without this one", what, mask);
    if (mask & ~warp.lanes) fail("%s of lanes %08x; the warp has %08x", what, mask, warp.lanes);
    Meeting& meeting = meeting_of(warp, what, mask);
    meeting.operands[current->lane] = operands;
    meeting.arrived |= 1u << current->lane;
    if (meeting.arrived != mask) return block(meeting.waiting, {"lanes", reinterpret_cast<u64>(what), mask});
    act(meeting.operands);
    for (auto at = warp.meetings.begin(); at != warp.meetings.end(); ++at)
        if (&*at == &meeting) {
            wake(at->waiting);
            warp.meetings.erase(at);
            return;
        }
}

// ---- products ----

namespace {

Warpgroup& warpgroup_of(const Warp& warp) { return warp.program->warpgroups[warp.number / 4]; }

// Run the next product if all warps have issued it.
bool run_next_product(Warpgroup& group) {
    for (Warp* warp : group.warps)
        if (warp == nullptr || warp->begun == warp->products.size()) return false;
    for (Warp* warp : group.warps) {
        Product& product = warp->products[warp->begun++];
        product.run(product.sums->values.data());
        product.run = nullptr;
    }
    return true;
}

void check_last_product(const Warp& warp) {
    size_t last = warp.products.size() - 1;
    for (const Warp* other : warpgroup_of(warp).warps) {
        if (other == nullptr) fail("a product of a warpgroup that has less than four warps");
        if (other->products.size() > last && other->products[last].operands != warp.products[last].operands)
            fail("warps of a warpgroup give a product different descriptors");
    }
}

Accumulators& accumulators_of(Warp& warp, std::vector<float*> registers) {
    for (Accumulators& sums : warp.sums) {
        if (sums.registers == registers) return sums;
        if (sums.registers[0] == registers[0]) fail("products under way share some of their accumulators");
    }
    Accumulators& sums = warp.sums.emplace_back();
    for (float* sum : registers) sums.values.push_back(*sum);
    for (float* sum : registers) *sum = NAN;
    sums.registers = std::move(registers);
    return sums;
}

void give_back(Warp& warp, Accumulators* sums) {
    if (--sums->products) return;
    for (size_t i = 0; i < sums->values.size(); ++i) *sums->registers[i] = sums->values[i];
    warp.sums.remove_if([&](const Accumulators& other) { return &other == sums; });
}

}  // namespace

void add_product(u64 operands, std::vector<float*> registers, std::function<void(float* values)> run) {
    Warp& warp = *current->warp;
    if (!warp.fenced) fail("a product without wgmma.fence before it");
    Accumulators& sums = accumulators_of(warp, std::move(registers));
    ++sums.products;
    warp.products.push_back({operands, std::move(run), &sums});
    check_last_product(warp);
    Warpgroup& group = warpgroup_of(warp);
    wake(group.waiting);
    add_task([&group] { run_next_product(group); });  // of which a fourth finds something to do
}

void commit_products() { current->warp->groups.push_back(current->warp->products.size()); }

void wait_products(u32 pending) {
    Warp& warp = *current->warp;
    while (warp.groups_ended + pending < warp.groups.size()) {
        u32 end = warp.groups[warp.groups_ended++];
        while (warp.begun < end)
            if (!run_next_product(warpgroup_of(warp))) block(warpgroup_of(warp).waiting, {"the other warps' products"});
        for (; warp.ended < end; ++warp.ended) give_back(warp, warp.products[warp.ended].sums);
    }
    if (warp.sums.empty()) warp.fenced = false;
}

}  // namespace emulator

namespace ptx {

__attribute__((optimize("O3"))) void add_products(float* sums, const float (&a)[16][16], const std::vector<float>& b, int n, bool adds) {
    std::vector<float> row(n);
    for (int r = 0; r < 16; ++r) {
        std::fill(row.begin(), row.end(), 0.0f);
        for (int k = 0; k < 16; ++k)
            for (int column = 0; column < n; ++column) row[column] += a[r][k] * b[k * n + column];
        for (int column = 0; column < n; ++column) {
            int lane = r % 8 * 4 + column % 8 / 2;
            float& sum = sums[lane * n / 2 + column / 8 * 4 + r / 8 * 2 + column % 2];
            sum = adds ? sum + row[column] : row[column];
        }
    }
}

}  // namespace ptx
