/* cpu.c for one set of instructions, with the flags of setup.py. Each build has a source of its own, so that
 * they can be compiled at the same time. */
#include "../../cpu.c"
