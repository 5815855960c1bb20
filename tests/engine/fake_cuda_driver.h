/* The driver's functions that the engine calls, with the emulated kernels behind them, for one device of several. Being C,
 * they see what ctypes really passes. */
#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <thread>

typedef void (*EmulatedKernel)(unsigned, unsigned, unsigned, unsigned, void **, int);
struct Emulated {
    EmulatedKernel run;
    const char *name, *kinds;
};
static std::map<std::string, Emulated> emulated_kernels;
static char the_context, the_module, the_stream;
/* The number of the device that has the context, and how many there are. */
static int the_ordinal, num_devices = 1;
/* Of each thread. A launch forgets it, so that each launch must make it current again. */
static thread_local void *current_context;
/* Torch, too, makes the context current, in each thread that uses it. */
static thread_local bool has_used_torch;
/* Host memory that is pinned: whole pages, first byte -> the one after the last. */
static std::map<uintptr_t, uintptr_t> registered;
/* Whether streams write and wait for values, as they do not under Windows. */
static bool has_stream_values = true;
/* Has a stream wait that is not the one that computes. */
static int (*wait_elsewhere)(void *stream, uintptr_t address, uint32_t value);
/* Threads pin and ask at once: ctypes holds no lock of Python's during a call. */
static std::mutex registering;

enum {
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    NOT_FOUND = 500,
    ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713,
};
static const uintptr_t PAGE = 4096;

#define EXPORT extern "C" __attribute__((visibility("default")))
#define DRIVER EXPORT int

DRIVER cuInit(unsigned flags) { return flags ? INVALID_VALUE : 0; }
DRIVER cuDeviceGet(int *device, int ordinal) {
    *device = 40 + ordinal;
    return ordinal >= 0 && ordinal < num_devices ? 0 : INVALID_DEVICE;
}
DRIVER cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = &the_context;
    return device == 40 + the_ordinal ? 0 : INVALID_DEVICE;
}
DRIVER cuCtxSetCurrent(void *context) {
    current_context = context;
    return 0;
}
/* Whoever uses torch finds its context current. */
DRIVER cuCtxGetCurrent(void **context) {
    *context = has_used_torch ? &the_context : current_context;
    return 0;
}
DRIVER cuModuleLoadData(void **module, const void *image) {
    *module = &the_module;
    return current_context != &the_context ? INVALID_CONTEXT
           : memcmp(image, "\177ELF", 4)   ? INVALID_IMAGE
                                           : 0;
}
DRIVER cuModuleGetFunction(void **function, void *module, const char *name) {
    if (module != &the_module || !emulated_kernels.count(name)) return NOT_FOUND;
    *function = &emulated_kernels[name];
    return 0;
}
DRIVER cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned threads_x,
                      unsigned threads_y, unsigned threads_z, unsigned shared_bytes, void *stream,
                      void **arguments, void **extra) {
    if (current_context != &the_context) return INVALID_CONTEXT;
    if (!x || !y || !z || y > 65535 || z > 65535 || x > 0x7fffffff || threads_x > 1024 || threads_x % 32)
        return INVALID_VALUE;
    if (threads_y != 1 || threads_z != 1 || shared_bytes || stream != &the_stream || extra)
        return INVALID_VALUE;
    current_context = nullptr;
    ((Emulated *)function)->run(x, y, z, threads_x, arguments, 0);
    return 0;
}
DRIVER cuMemHostRegister_v2(void *address, size_t num_bytes, unsigned flags) {
    if (!current_context && !has_used_torch) return INVALID_CONTEXT;
    const uintptr_t begin = (uintptr_t)address / PAGE * PAGE;
    const uintptr_t end = ((uintptr_t)address + num_bytes + PAGE - 1) / PAGE * PAGE;
    if (!num_bytes || flags > 3) return INVALID_VALUE;
    const std::lock_guard<std::mutex> guard(registering);
    for (const auto &[other, other_end] : registered)
        if (begin < other_end && other < end) return ALREADY_REGISTERED;
    registered[begin] = end;
    return 0;
}
DRIVER cuMemHostUnregister(void *address) {
    const std::lock_guard<std::mutex> guard(registering);
    return registered.erase((uintptr_t)address / PAGE * PAGE) ? 0 : NOT_REGISTERED;
}
/* The address is the card's, too. */
DRIVER cuMemHostGetDevicePointer_v2(uintptr_t *on_card, void *address, unsigned flags) {
    const std::lock_guard<std::mutex> guard(registering);
    const auto after = registered.upper_bound((uintptr_t)address);
    *on_card = (uintptr_t)address;
    return flags || after == registered.begin() || (uintptr_t)address >= std::prev(after)->second ? INVALID_VALUE : 0;
}

/* What is queued on the stream that computes runs at once, but for odd values, which are written as late as allowed: when
 * somebody waits for a value. So whoever forgets to wait meets what was there before. */
static std::atomic<uint32_t> *late_target;
static uint32_t late_value;
EXPORT void fake_late_write() {
    const std::lock_guard<std::mutex> guard(registering);
    if (late_target) late_target->store(late_value);
    late_target = nullptr;
}
DRIVER cuMemcpyDtoHAsync_v2(void *target, uintptr_t source, size_t num_bytes, void *stream) {
    if (current_context != &the_context) return INVALID_CONTEXT;
    if (stream != &the_stream) return INVALID_VALUE;
    memcpy(target, (const void *)source, num_bytes);
    return 0;
}
DRIVER cuStreamWriteValue32_v2(void *stream, uintptr_t address, uint32_t value, unsigned flags) {
    if (current_context != &the_context) return INVALID_CONTEXT;
    if (stream != &the_stream || flags || !has_stream_values) return INVALID_VALUE;
    fake_late_write();
    if (value % 2 == 0) ((std::atomic<uint32_t> *)address)->store(value);
    else {
        const std::lock_guard<std::mutex> guard(registering);
        late_target = (std::atomic<uint32_t> *)address, late_value = value;
    }
    return 0;
}
DRIVER cuStreamWaitValue32_v2(void *stream, uintptr_t address, uint32_t value, unsigned flags) {
    if (current_context != &the_context) return INVALID_CONTEXT;
    if (flags || !has_stream_values) return INVALID_VALUE;
    if (stream != &the_stream) return wait_elsewhere(stream, address, value);
    fake_late_write();
    while ((int32_t)(((std::atomic<uint32_t> *)address)->load() - value) < 0) std::this_thread::yield();
    return 0;
}
DRIVER cuGetErrorString(int code, const char **text) {
    *text = code == INVALID_DEVICE    ? "no such device"
            : code == INVALID_IMAGE   ? "no such image"
            : code == INVALID_CONTEXT ? "no context is current"
                                      : nullptr;
    return *text ? 0 : INVALID_VALUE;
}

/* What a pretended card asks and tells. */
EXPORT void *fake_stream() { return &the_stream; }
EXPORT const char *fake_kernel_name(void *function) { return ((Emulated *)function)->name; }
EXPORT const char *fake_kernel_kinds(void *function) { return ((Emulated *)function)->kinds; }
EXPORT void fake_use_of_torch() { has_used_torch = true; }
EXPORT unsigned fake_num_registered() {
    const std::lock_guard<std::mutex> guard(registering);
    return registered.size();
}
EXPORT int fake_is_registered(void *address, size_t num_bytes) {
    const std::lock_guard<std::mutex> guard(registering);
    auto after = registered.upper_bound((uintptr_t)address);
    return after != registered.begin() && (uintptr_t)address + num_bytes <= (--after)->second;
}
EXPORT void fake_stream_values(bool there) { has_stream_values = there; }
EXPORT void fake_waits_elsewhere(int (*wait)(void *, uintptr_t, uint32_t)) { wait_elsewhere = wait; }
EXPORT void fake_reset(int ordinal, int count) {
    has_stream_values = true;
    the_ordinal = ordinal;
    num_devices = count;
    current_context = nullptr;
    const std::lock_guard<std::mutex> guard(registering);
    registered.clear();
    late_target = nullptr;
}
