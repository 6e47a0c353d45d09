// Enough of CUDA to run a kernel that was written for an NVIDIA card on a CPU: threads of a block are fibers, which
// take turns where they wait for one another; the instructions of tensor cores do what the PTX manual says of their
// registers. Copies to shared memory arrive when they are waited for and no sooner, and shared memory starts as NaNs.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define __global__
#define __device__
#define __launch_bounds__(count)
#define __grid_constant__
#define __restrict__

struct Index {
    unsigned x, y, z;
};
static Index threadIdx, blockIdx, blockDim, gridDim;

using std::exp;
using std::fma;
using std::log;
using std::max;
using std::min;

static float from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

static uint32_t to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

struct __nv_bfloat16 {
    uint16_t bits;
    __nv_bfloat16() = default;
    // To the nearest, ties to even.
    explicit __nv_bfloat16(float value) {
        uint32_t all = to_bits(value);
        bits = std::isnan(value) ? 0x7FFF : (all + 0x7FFF + (all >> 16 & 1)) >> 16;
    }
    operator float() const { return from_bits(uint32_t(bits) << 16); }
};

struct __half {
    _Float16 value;
    __half() = default;
    explicit __half(float from) : value(_Float16(from)) {}
    operator float() const { return float(value); }
};

namespace emulated {

const unsigned PLANE = 32;

struct Copy {
    char *to;
    const char *from;
};

struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    std::vector<Copy> copies;
    Index index;
    bool done;
};

struct Meeting {
    unsigned arrived = 0;
    unsigned generation = 0;
};

// What the units of a plane give one another.
struct Exchange {
    Meeting meeting;
    uint32_t in[PLANE][10];
    uint32_t out[PLANE][4];
};

static std::vector<Fiber> fibers;
static std::vector<Exchange> planes;
static Meeting block;
static ucontext_t scheduler;
static unsigned current;
static std::vector<char> memory;
static char *shared;
static unsigned progress;

[[noreturn]] static void fail(const char *what) {
    std::fprintf(stderr, "CUDA on the CPU: %s\n", what);
    std::abort();
}

static unsigned lane() { return current % PLANE; }

static Exchange &plane() { return planes[current / PLANE]; }

static void yield() {
    unsigned self = current;
    swapcontext(&fibers[self].context, &scheduler);
    threadIdx = fibers[self].index;
}

// Waits until `count` fibers are here; the last does `all`.
template <class All>
static void meet(Meeting &meeting, unsigned count, All all) {
    unsigned generation = meeting.generation;
    if (++meeting.arrived == count) {
        all();
        meeting.arrived = 0;
        ++meeting.generation;
        ++progress;
        return;
    }
    while (meeting.generation == generation) yield();
}

static char *shared_at(uint32_t address) {
    if (address % 16 != 0) fail("an address in shared memory that is no multiple of 16 bytes");
    if (address + 16 > memory.size()) fail("an address beyond shared memory");
    return shared + address;
}

static void copy(uint32_t to, const void *from) {
    if (reinterpret_cast<uintptr_t>(from) % 16 != 0) fail("a copy from an address that is no multiple of 16 bytes");
    fibers[current].copies.push_back({shared_at(to), static_cast<const char *>(from)});
}

static void commit() {}

static void wait() {
    for (Copy copy : fibers[current].copies) std::memcpy(copy.to, copy.from, 16);
    fibers[current].copies.clear();
}

static void power_of_two(float &d, float a) { d = std::exp2(a); }

// Element `i` of a register of two.
template <class T>
static float element(uint32_t pair, unsigned i) {
    T value;
    uint16_t half = i == 0 ? pair : pair >> 16;
    std::memcpy(&value, &half, 2);
    return float(value);
}

template <bool TURNED>
static void ldmatrix(uint32_t &d0, uint32_t &d1, uint32_t &d2, uint32_t &d3, uint32_t address) {
    Exchange &all = plane();
    all.in[lane()][0] = address;
    meet(all.meeting, PLANE, [&] {
        for (unsigned to = 0; to < PLANE; ++to) {
            for (unsigned matrix = 0; matrix < 4; ++matrix) {
                uint32_t pair = 0;
                for (unsigned i = 0; i < 2; ++i) {
                    unsigned row = TURNED ? to % 4 * 2 + i : to / 4;
                    unsigned column = TURNED ? to / 4 : to % 4 * 2 + i;
                    uint16_t value;
                    std::memcpy(&value, shared_at(all.in[matrix * 8 + row][0]) + 2 * column, 2);
                    pair |= uint32_t(value) << (16 * i);
                }
                all.out[to][matrix] = pair;
            }
        }
    });
    uint32_t *out = all.out[lane()];
    d0 = out[0], d1 = out[1], d2 = out[2], d3 = out[3];
}

// `d = a · b + c` for `a [16, 16]`, `b [16, 8]`.
template <class T>
static void mma(float &d0, float &d1, float &d2, float &d3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                uint32_t b0, uint32_t b1, float c0, float c1, float c2, float c3) {
    Exchange &all = plane();
    const uint32_t in[10] = {a0, a1, a2, a3, b0, b1, to_bits(c0), to_bits(c1), to_bits(c2), to_bits(c3)};
    std::memcpy(all.in[lane()], in, sizeof in);
    meet(all.meeting, PLANE, [&] {
        float a[16][16], b[16][8];
        for (unsigned l = 0; l < PLANE; ++l) {
            for (unsigned i = 0; i < 2; ++i) {
                unsigned group = l / 4, pair = l % 4 * 2 + i;
                for (unsigned r = 0; r < 4; ++r)
                    a[group + r % 2 * 8][pair + r / 2 * 8] = element<T>(all.in[l][r], i);
                for (unsigned r = 0; r < 2; ++r) b[pair + r * 8][group] = element<T>(all.in[l][4 + r], i);
            }
        }
        for (unsigned l = 0; l < PLANE; ++l) {
            for (unsigned r = 0; r < 4; ++r) {
                unsigned row = l / 4 + r / 2 * 8, column = l % 4 * 2 + r % 2;
                float sum = from_bits(all.in[l][6 + r]);
                for (unsigned k = 0; k < 16; ++k) sum += a[row][k] * b[k][column];
                all.out[l][r] = to_bits(sum);
            }
        }
    });
    uint32_t *out = all.out[lane()];
    d0 = from_bits(out[0]), d1 = from_bits(out[1]), d2 = from_bits(out[2]), d3 = from_bits(out[3]);
}

static void (*body)();

static void fiber() {
    body();
    fibers[current].done = true;
    ++progress;
    swapcontext(&fibers[current].context, &scheduler);
}

// Runs the block that `blockIdx` names.
static void run_block(unsigned shared_bytes) {
    unsigned count = blockDim.x * blockDim.y * blockDim.z;
    memory.assign(shared_bytes, char(0xFF));
    shared = memory.data();
    block = Meeting();
    planes.assign((count + PLANE - 1) / PLANE, Exchange());
    fibers.resize(count);
    for (unsigned i = 0; i < count; ++i) {
        Fiber &f = fibers[i];
        f.stack.resize(1 << 17);
        f.copies.clear();
        f.done = false;
        f.index = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = f.stack.data();
        f.context.uc_stack.ss_size = f.stack.size();
        f.context.uc_link = &scheduler;
        makecontext(&f.context, fiber, 0);
    }
    for (unsigned done = 0; done < count;) {
        unsigned before = progress;
        done = 0;
        for (current = 0; current < count; ++current) {
            if (fibers[current].done) {
                ++done;
                continue;
            }
            threadIdx = fibers[current].index;
            swapcontext(&scheduler, &fibers[current].context);
        }
        if (progress == before && done < count) fail("threads wait for others that never come");
    }
}

}  // namespace emulated

static void __syncthreads() {
    emulated::meet(emulated::block, blockDim.x * blockDim.y * blockDim.z, [] {});
}

static unsigned __activemask() { return 0xFFFFFFFFu; }

static float __shfl_xor_sync(unsigned, float value, unsigned mask) {
    emulated::Exchange &all = emulated::plane();
    all.in[emulated::lane()][0] = to_bits(value);
    emulated::meet(all.meeting, emulated::PLANE, [&] {
        for (unsigned l = 0; l < emulated::PLANE; ++l) all.out[l][0] = all.in[l ^ mask][0];
    });
    return from_bits(all.out[emulated::lane()][0]);
}

static uint32_t __umulhi(uint32_t a, uint32_t b) { return uint64_t(a) * b >> 32; }

static uint32_t __cvta_generic_to_shared(const void *pointer) {
    return static_cast<const char *>(pointer) - emulated::shared;
}

// The kernel's own names for these types are not the system's.
#define uint64_t kernel_uint64_t
#define int64_t kernel_int64_t
