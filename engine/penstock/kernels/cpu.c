/* CPU kernels of Penstock: the arithmetic of kernels/reference.py, fast and batch-invariant.
 *
 * This source is compiled several times with different -m flags; cpu_builds.py loads the best library that the
 * processor runs. The source needs no torch header and no OpenMP: torch brings its own copy of OpenMP's runtime,
 * and two copies would compete for the cores. A pool of plain threads serves instead.
 *
 * Invariant of all kernels: the value of an output element depends on its own row (and its own sequence's K and
 * V) alone. Which rows share a call, how rows are tiled and which thread computes them never changes the order
 * of a floating-point sum. Integer sums are exact in any order.
 */
#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
#define NOINLINE static __attribute__((noinline))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

#include "cpu/threads.h"
#include "cpu/tuning.h"
#include "cpu/vectors.h"
#include "cpu/reader.h"
#include "cpu/linear/linear.h"
#include "cpu/rows.h"
#include "cpu/gates.h"
#include "cpu/router.h"
#include "cpu/experts.h"
#include "cpu/low_rank.h"
#include "cpu/attention.h"
#include "cpu/attended.h"
#include "cpu/heads.h"
#include "cpu/recurrence.h"
#include "cpu/sublayers/attention_sublayer.h"
#include "cpu/sublayers/mixer.h"
#include "cpu/sublayers/recurrent_sublayer.h"
#include "cpu/sublayers/layers.h"
#include "cpu/sublayers/mixture_layers.h"
#include "cpu/handed_product.h"
#include "cpu/crossing.h"
#include "cpu/weights.h"
