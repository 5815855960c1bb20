/* The driver's functions that cuda.py calls, with the emulated kernels behind them, for device 1. */
#include <map>
#include <string>

typedef void (*EmulatedKernel)(unsigned, unsigned, unsigned, unsigned, void **, int);
static std::map<std::string, EmulatedKernel> emulated_kernels;
static char the_context, the_module, the_stream;
static void *current_context;

enum { INVALID_VALUE = 1, INVALID_DEVICE = 101, INVALID_IMAGE = 200, INVALID_CONTEXT = 201, NOT_FOUND = 500 };

#define DRIVER extern "C" __attribute__((visibility("default"))) int

DRIVER cuInit(unsigned flags) { return flags ? INVALID_VALUE : 0; }
DRIVER cuDeviceGet(int *device, int ordinal) {
    *device = 40 + ordinal;
    return ordinal == 1 ? 0 : INVALID_DEVICE;
}
DRIVER cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = &the_context;
    return device == 41 ? 0 : INVALID_DEVICE;
}
DRIVER cuCtxSetCurrent(void *context) {
    current_context = context;
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
    *function = (void *)emulated_kernels[name];
    return 0;
}
DRIVER cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned threads_x,
                      unsigned threads_y, unsigned threads_z, unsigned shared_bytes, void *stream,
                      void **arguments, void **extra) {
    if (current_context != &the_context) return INVALID_CONTEXT;
    if (!x || !y || !z || threads_y != 1 || threads_z != 1 || shared_bytes || stream != &the_stream || extra)
        return INVALID_VALUE;
    current_context = nullptr; /* so that each launch must make it current */
    ((EmulatedKernel)function)(x, y, z, threads_x, arguments, 0);
    return 0;
}
DRIVER cuGetErrorString(int code, const char **text) {
    *text = code == INVALID_DEVICE ? "no such device" : code == INVALID_IMAGE ? "no such image" : nullptr;
    return *text ? 0 : INVALID_VALUE;
}
extern "C" __attribute__((visibility("default"))) void *fake_stream() { return &the_stream; }
