/* cpu.c for one set of instructions, with the flags of pyproject.toml. Each build has a source of its own, so that
 * they can be compiled at the same time. */
#include "../cpu.c"
