// The plain C interface between the kernels and whoever calls them (the dispatcher operators in shim.cpp, ctypes in
// library.py). One call, one struct; no torch, no Python.
//
// What is computed, per statistic set of n elements (N is n - correction for std, n for rms, 1 for l2):
//   m = mean(x), or 0 where not centered        r = sqrt(sum (x - m)^2 / n), for l2 sqrt(sum x^2)
//   D = sqrt(r^2 n/N' + eps) | sqrt(..) + eps | max(sqrt(..), eps)       xhat = (x - m) / D
//   y = (offset + weight) * gain * xhat + bias
// and backwards with g = (offset + weight) * gain * dy and q = (D'(s) D / s) for D as a function of s = sqrt(r^2 n/N'),
// which is 1 where eps stands inside the root:
//   dx = (g - mean(g) - xhat * q * sum(g xhat) / N) / D        (without mean(g) where not centered)
//   dweight = gain * sum(dy xhat), dbias = sum(dy), each over what the parameter is shared by.
// Under a mask, n and all sums are over the elements that count, y and dx are 0 at the others, and nothing that stands
// there has a part in anything.
#pragma once
#include <cstdint>

// The libraries are compiled with hidden symbols: what is declared with this is all that others see of them.
#define NS_EXPORT __attribute__((visibility("default")))

// Grows by one with every change of what a call means or of how its structs lie in memory; library.py has the same number.
#define NS_ABI 2

extern "C" {

enum NsWhat { NS_NORM = 0, NS_NORM_BACKWARD = 1, NS_FIXED = 2, NS_FIXED_BACKWARD = 3 };
enum NsDtype { NS_FLOAT32 = 0, NS_BFLOAT16 = 1, NS_FLOAT16 = 2, NS_FLOAT64 = 3 };
enum NsScale { NS_STD = 0, NS_RMS = 1, NS_L2 = 2 };
enum NsEpsAt { NS_VARIANCE = 0, NS_DEVIATION = 1, NS_MAX = 2 };
enum NsResult { NS_DONE = 0, NS_UNSERVED = 1, NS_NO_MEMORY = 2 };

// Everything that does not change between two calls of one layer.
//   axes: 4 bits an elementary axis, the first axis lowest: bit 0 kept, bit 1 the parameters live on it.
//   split: 0, or ((dim + 1) << 40) | size: input dimension `dim` is two elementary axes, (size, rest); with bit 39 set the
//   size is that of the inner one: (rest, size).
//   options: bit 0 center; 1-2 NsScale; 3-4 NsEpsAt; 5 round xhat to x's dtype before the weight; 8-15 correction.
struct NsRecipe {
  int64_t axes, split, options;
  double eps, gain, offset;
};

// Strides in elements. `y`, `sum`, `dy`, `dsum` and `dx` share `y_strides`; `x` and `residual` share `x_strides`
// (backward of residual + norm reads the sum as x, then x_strides == y_strides).
// Parameters are contiguous over their axes in the order of the input's axes.
// stats: 3 rows (mean, what rounding the mean lost, r) of `sets` values each, or 1 row (r) where not centered; float, and
// double for NS_FLOAT64; sets in the order of the kept elementary axes. Under a mask one row more, of n.
// NS_NORM with `y` null: the statistics alone. NS_NORM_BACKWARD with `sums`: dx alone, by sums that are given.
// mask: a byte an element, 1 where it counts, else 0; strides of 0 where it is one for all. It must be one for all
// elements that share a parameter's place: the mask of positions of a batch, not of its channels.
struct NsCall {
  int32_t what, dtype, weight_dtype, stored_dtype, ndim, threads;
  NsRecipe recipe;
  const int64_t *sizes, *x_strides, *y_strides;
  const void *x, *residual, *weight, *bias;
  const void *mean, *var;       // NS_FIXED*: stored statistics, one per set, of stored_dtype
  const void *dy, *dsum;        // dsum: gradient that reaches the sum from elsewhere, added to dx; may be null
  void *y, *sum, *stats;
  void *dx, *dweight, *dbias;   // null where not wanted; of x's and the parameters' dtype
  const uint8_t *mask;          // null: everything counts
  const int64_t *mask_strides;
  const double *sums;           // sum(g) / n and sum(g xhat) / N, a row of each over the sets; null: those of the call
};

NS_EXPORT int ns_run(const NsCall *call);
NS_EXPORT int ns_lowered(const NsCall *call, int64_t *out, int capacity);  // for tests: see kernels.cpp
NS_EXPORT const char *ns_isa(void);

// What a library says about itself (about.cpp).
NS_EXPORT int ns_abi(void);
NS_EXPORT const char *ns_compiler(void);
NS_EXPORT const char *ns_pool(void);                // the file whose threads it runs on, "" where it found none
NS_EXPORT int ns_struct_layout(int64_t *numbers);   // sizeof and the offsets of NsRecipe, then of NsCall; returns how many
}
