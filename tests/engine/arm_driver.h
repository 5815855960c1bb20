/* A process that calls the functions of cpu.c for arm_kernels.py. A call comes through stdin: the function's number, the
 * number of arguments, and for each argument a letter and what belongs to it: `i` a whole number, `f` a float, `b` and
 * `o` a length and as many bytes. The answer through stdout is the result and all buffers `o`. Each buffer ends where
 * forbidden memory begins. */
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MAX_ARGUMENTS = 32 };
typedef int64_t function(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                         int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                         int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, float, float, float, float);

static void take(void *to, size_t size) {
    if (size && fread(to, size, 1, stdin) != 1) exit(feof(stdin) ? 0 : 1);
}

typedef struct {
    char *pages, *at;
    int64_t size, num_bytes;
    char letter;
} buffer;
static buffer take_buffer(char letter) {
    const int64_t page = sysconf(_SC_PAGESIZE);
    buffer b = {.letter = letter};
    take(&b.size, sizeof b.size);
    b.num_bytes = (b.size + page - 1) / page * page + page;
    b.pages = mmap(NULL, b.num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (b.pages == MAP_FAILED || mprotect(b.pages + b.num_bytes - page, page, PROT_NONE)) exit(2);
    b.at = b.pages + b.num_bytes - page - b.size;
    take(b.at, b.size);
    return b;
}

/* ARM passes whole numbers and floats in registers of their own, each in order, and further whole numbers in slots of 8
 * bytes: one type of function calls all. */
int main(void) {
    for (;;) {
        int32_t head[2];
        int64_t n[MAX_ARGUMENTS] = {0};
        float f[4] = {0};
        buffer buffers[MAX_ARGUMENTS];
        int num_numbers = 0, num_floats = 0, num_buffers = 0;
        take(head, sizeof head);
        for (int i = 0; i < head[1]; i++) {
            char letter;
            take(&letter, 1);
            if (letter == 'i') take(&n[num_numbers++], sizeof *n);
            else if (letter == 'f') take(&f[num_floats++], sizeof *f);
            else {
                buffers[num_buffers] = take_buffer(letter);
                n[num_numbers++] = (int64_t)buffers[num_buffers++].at;
            }
        }
        const int64_t result = ((function *)FUNCTIONS[head[0]])(
            n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], n[11], n[12], n[13], n[14], n[15], n[16],
            n[17], n[18], n[19], n[20], n[21], n[22], n[23], n[24], n[25], n[26], n[27], f[0], f[1], f[2], f[3]);
        fwrite(&result, sizeof result, 1, stdout);
        for (int i = 0; i < num_buffers; i++) {
            if (buffers[i].letter == 'o') fwrite(buffers[i].at, buffers[i].size, 1, stdout);
            munmap(buffers[i].pages, buffers[i].num_bytes);
        }
        fflush(stdout);
    }
}
