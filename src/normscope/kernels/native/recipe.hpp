// What a recipe says about one set and one parameter: the denominator, and (offset + weight) * gain.
#pragma once
#include <cmath>
#include <cstdint>
#include <limits>

#include "lower.hpp"
#include "normscope.h"
#include "vec.hpp"

namespace ns {

struct Recipe {
  bool center, round_first;
  int scale, eps_at;
  double eps, gain, offset, correction;
  double n;        // elements of a set
  double divisor;  // n - correction, n, or 1: what the sum of squares is divided by
  double to_s2;    // r^2 * to_s2 = what stands under the root

  Recipe(const NsRecipe &c, const Problem &p)
      : center(c.options & 1),
        round_first(c.options & 32),
        scale(int(c.options >> 1) & 3),
        eps_at(int(c.options >> 3) & 3),
        eps(c.eps),
        gain(c.gain),
        offset(c.offset),
        correction(double((c.options >> 8) & 255)) {
    count(double(p.set_size));
  }

  // The same for a set of another number of elements.
  Recipe of(double elements) const {
    Recipe other = *this;
    other.count(elements);
    return other;
  }

  // Whether a sum of squares that was summed in float has lost nothing to float's range. Where eps drowns squares that are
  // too small for it, they need no second look; a NaN is out of range.
  bool fits_float(double squares) const {
    const double least = eps_at == NS_VARIANCE && eps >= 1e-20 ? 0 : 1e-30;
    return squares >= least * n && squares <= std::numeric_limits<double>::max();
  }

  // The stored root r of a sum of squares.
  double root(double squares) const { return std::sqrt(scale == NS_L2 ? squares : squares / n); }

  // 1 / D for a set with root r.
  double inverse(double r) const {
    const double s2 = r * r * to_s2;
    if (eps_at == NS_VARIANCE) return 1 / std::sqrt(s2 + eps);
    const double s = std::sqrt(s2);
    return 1 / (eps_at == NS_DEVIATION ? s + eps : s < eps ? eps : s);  // a NaN stays one
  }

  // q of the backward formula: how much D moves with the deviation, 1 where eps stands inside the root.
  double motion(double r) const {
    if (eps_at == NS_VARIANCE) return 1;
    const double s = std::sqrt(r * r * to_s2);
    if (eps_at == NS_DEVIATION) return s == 0 ? 0 : (s + eps) / s;
    return s < eps ? 0 : 1;
  }

  // 1 / D for a stored variance.
  double inverse_of_variance(double v) const {
    if (eps_at == NS_VARIANCE) return 1 / std::sqrt(v + eps);
    const double s = std::sqrt(v);
    return 1 / (eps_at == NS_DEVIATION ? s + eps : s < eps ? eps : s);
  }

 private:
  void count(double elements) {
    n = elements;
    divisor = scale == NS_L2 ? 1 : scale == NS_STD ? n - correction : n;
    to_s2 = scale == NS_L2 ? 1 : n / divisor;
  }
};

// One value of an array of any dtype.
NS_INLINE double value_at(const void *p, int dtype, int64_t i) {
  switch (dtype) {
    case NS_FLOAT32: return ((const float *)p)[i];
    case NS_BFLOAT16: return widen(((const BFloat16 *)p)[i]);
    case NS_FLOAT16: return widen(((const Float16 *)p)[i]);
    default: return ((const double *)p)[i];
  }
}
NS_INLINE void put_at(void *p, int dtype, int64_t i, double v) {
  switch (dtype) {
    case NS_FLOAT32: ((float *)p)[i] = float(v); return;
    case NS_BFLOAT16: ((BFloat16 *)p)[i] = narrow_bf16(float(v)); return;
    case NS_FLOAT16: ((Float16 *)p)[i] = narrow_f16(float(v)); return;
    default: ((double *)p)[i] = v;
  }
}

// f(the array as one of its dtype), so that loops over it need not ask for every value.
template <class F>
NS_INLINE void as_dtype(const void *p, int dtype, F &&f) {
  switch (dtype) {
    case NS_FLOAT32: f((const float *)p); return;
    case NS_BFLOAT16: f((const BFloat16 *)p); return;
    case NS_FLOAT16: f((const Float16 *)p); return;
    default: f((const double *)p);
  }
}

}  // namespace ns
