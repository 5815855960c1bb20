/* What the .cu files use of CUDA, on the CPU: a block's threads are fibers of one thread, which take turns
 * where they wait for each other. One block runs at a time. Not emulated: time, caches, and anything that
 * would be a race; run the fibers forwards and backwards (emulate_order) and compare to see a missing
 * barrier. */
#include <algorithm>
#include <csetjmp>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <ucontext.h>
#include <utility>

#define __global__
#define __device__
#define __shared__ static
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)

struct Index {
    unsigned x, y, z;
};
static Index threadIdx, blockIdx, blockDim, gridDim;

struct __align__(16) int4 {
    int x, y, z, w;
};
struct __align__(16) float4 {
    float x, y, z, w;
};
struct __align__(8) uint2 {
    unsigned x, y;
};
struct __align__(8) int2 {
    int x, y;
};
static inline int2 make_int2(int x, int y) { return {x, y}; }
static inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }
static inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }

/* ---- fibers ---- */

struct Barrier {
    unsigned size, arrived, generation;
};
struct Fiber {
    ucontext_t entry;
    jmp_buf state;
    bool is_started, is_done;
    const Barrier *waits_for;
    unsigned generation;
};
enum { STACK_BYTES = 64 << 10, MAX_THREADS = 1024 };

/* Made once: from block to block a fiber goes on behind the end of the last one. */
static Fiber fibers[MAX_THREADS];
static char stacks[MAX_THREADS][STACK_BYTES];
static unsigned current;
static jmp_buf scheduler;
static ucontext_t scheduler_entry;
static Barrier block_barrier, warp_barriers[MAX_THREADS / 32];
static void (*kernel_body)(void **);
static void **kernel_arguments;
static int is_backwards;

static void fiber_main() {
    for (;;) {
        kernel_body(kernel_arguments);
        fibers[current].is_done = true;
        if (!_setjmp(fibers[current].state)) _longjmp(scheduler, 1);
    }
}

static void wait_at(Barrier &barrier) {
    Fiber &me = fibers[current];
    me.generation = barrier.generation;
    if (++barrier.arrived == barrier.size) {
        barrier.arrived = 0;
        barrier.generation++;
        return;
    }
    me.waits_for = &barrier;
    if (!_setjmp(me.state)) _longjmp(scheduler, 1);
}

/* Until it waits or ends. */
static void resume(unsigned index) {
    Fiber &fiber = fibers[index];
    current = index;
    threadIdx = {index, 0, 0};
    fiber.waits_for = nullptr;
    if (_setjmp(scheduler)) return;
    if (fiber.is_started) _longjmp(fiber.state, 1);
    fiber.is_started = true;
    getcontext(&fiber.entry);
    fiber.entry.uc_stack.ss_sp = stacks[index];
    fiber.entry.uc_stack.ss_size = STACK_BYTES;
    makecontext(&fiber.entry, fiber_main, 0);
    swapcontext(&scheduler_entry, &fiber.entry);
}

/* One turn for each of a warp's threads that need not wait; how many have moved. */
static unsigned run_warp(unsigned warp, unsigned &num_done) {
    unsigned num_moved = 0;
    for (unsigned n = 0; n < 32; n++) {
        const unsigned thread = 32 * warp + (is_backwards ? 31 - n : n);
        const Fiber &fiber = fibers[thread];
        if (fiber.is_done || (fiber.waits_for && fiber.waits_for->generation == fiber.generation)) continue;
        resume(thread);
        num_moved++;
        num_done += fiber.is_done;
    }
    return num_moved;
}

/* A warp goes as far as it can before the next one goes: as far apart as barriers let them. */
static void run_block() {
    const unsigned num_threads = blockDim.x, num_warps = num_threads / 32;
    for (unsigned thread = 0; thread < num_threads; thread++) fibers[thread].is_done = false;
    block_barrier = {num_threads, 0, 0};
    for (unsigned warp = 0; warp < num_warps; warp++) warp_barriers[warp] = {32, 0, 0};
    for (unsigned num_done = 0; num_done < num_threads;) {
        unsigned num_moved = 0;
        for (unsigned n = 0; n < num_warps; n++)
            while (unsigned moved = run_warp(is_backwards ? num_warps - 1 - n : n, num_done))
                num_moved += moved;
        if (!num_moved) {
            fprintf(stderr, "emulated CUDA: threads of a block wait for each other at different places\n");
            abort();
        }
    }
}

static inline void __syncthreads() { wait_at(block_barrier); }

/* Two sets of slots by turns: nobody is two exchanges ahead of the others. */
template <class T> static inline T __shfl_xor_sync(unsigned mask, T value, int distance) {
    static T slots[2][MAX_THREADS];
    static unsigned char turns[MAX_THREADS];
    if (mask != 0xffffffffu) abort();
    const unsigned thread = current;
    T *turn = slots[turns[thread] ^= 1];
    turn[thread] = value;
    wait_at(warp_barriers[thread / 32]);
    return turn[thread ^ distance];
}

/* ---- arithmetic ---- */

template <class T> static inline T __ldg(const T *at) { return *at; }
static inline float __int_as_float(int bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static inline float __uint_as_float(unsigned bits) { return __int_as_float((int)bits); }
static inline unsigned __float_as_uint(float value) {
    unsigned bits;
    memcpy(&bits, &value, 4);
    return bits;
}
static inline int __float2int_rn(float value) { return std::isnan(value) ? 0 : (int)nearbyintf(value); }
static inline int __dp4a(int a, int b, int sum) {
    for (int shift = 0; shift < 32; shift += 8) sum += (int8_t)(a >> shift) * (int8_t)(b >> shift);
    return sum;
}
static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const uint64_t bytes = (uint64_t)y << 32 | x;
    unsigned chosen = 0;
    for (int i = 0; i < 4; i++) chosen |= (unsigned)(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return chosen;
}
static inline float half_to_float(unsigned short bits) {
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    float value = exponent == 0 ? ldexpf(mantissa, -24) : ldexpf(mantissa + 1024, exponent - 25);
    if (exponent == 31) value = mantissa ? NAN : INFINITY;
    return bits & 0x8000 ? -value : value;
}
static inline unsigned short float_to_half(float value) {
    const unsigned sign = __float_as_uint(value) >> 16 & 0x8000;
    value = fabsf(value);
    if (std::isnan(value)) return 0x7fff;
    if (value >= 65520.0f) return sign | 0x7c00;
    if (value == 0.0f) return sign; /* frexpf would give it the exponent of 0.5 */
    int exponent;
    frexpf(value, &exponent); /* value < 2^exponent; a unit in the last place is 2^(exponent - 11) */
    exponent = std::max(exponent, -13);
    const unsigned units = (unsigned)nearbyintf(ldexpf(value, 11 - exponent));
    return sign | (units + ((unsigned)(exponent + 13) << 10));
}

/* ---- launching: void **arguments, as cuLaunchKernel takes them ---- */

template <class T> constexpr char kind() {
    return std::is_pointer<T>::value ? 'P' : std::is_same<T, float>::value ? 'F' : sizeof(T) == 8 ? 'N' : 'I';
}
template <class... T> constexpr bool takes(void (*)(T...), const char *kinds) {
    for (char have : {kind<T>()...})
        if (have != *kinds++) return false;
    return *kinds == 0;
}
template <class... T, size_t... N>
static void call(void (*kernel)(T...), void **arguments, std::index_sequence<N...>) {
    kernel(*(T *)arguments[N]...);
}
template <class... T> static void call(void (*kernel)(T...), void **arguments) {
    call(kernel, arguments, std::index_sequence_for<T...>{});
}

static void launch(void (*body)(void **), unsigned x, unsigned y, unsigned z, unsigned num_threads,
                   void **arguments, int order) {
    kernel_body = body, kernel_arguments = arguments, is_backwards = order;
    gridDim = {x, y, z}, blockDim = {num_threads, 1, 1};
    for (blockIdx.z = 0; blockIdx.z < z; blockIdx.z++)
        for (blockIdx.y = 0; blockIdx.y < y; blockIdx.y++)
            for (blockIdx.x = 0; blockIdx.x < x; blockIdx.x++) run_block();
}

/* One function for each kernel; `kinds` are the types of its parameters as launcher.py packs them. */
#define EMULATE(name, kinds)                                                                       \
    static_assert(takes(name, kinds), "launcher.py passes other arguments to " #name);        \
    extern "C" __attribute__((visibility("default"))) void emulate_##name(                         \
        unsigned x, unsigned y, unsigned z, unsigned num_threads, void **arguments, int order) {   \
        launch([](void **values) { call(name, values); }, x, y, z, num_threads, arguments, order); \
    }                                                                                              \
    static const bool has_##name =                                                                 \
        emulated_kernels.emplace(#name, Emulated{emulate_##name, #name, kinds}).second;
