// The kernel of a lowered call. One source file each makes the kernels of one dtype (run_*.cpp), so that compiling them
// takes all cores.
#pragma once
#include "columns.hpp"
#include "lower.hpp"
#include "normscope.h"
#include "rows.hpp"
#include "vec.hpp"

namespace ns {

template <class T>
int run(const NsCall &c, const Problem &p) {
  if (c.mask && (c.what == NS_FIXED || c.what == NS_FIXED_BACKWARD || c.residual || c.dsum)) return NS_UNSERVED;
  if (c.mask && !p.columns) return c.what == NS_NORM ? rows_masked<T>(c, p) : rows_masked_backward<T>(c, p);
  switch (c.what) {
    case NS_NORM: return p.columns ? columns_norm<T>(c, p) : rows_norm<T>(c, p);
    case NS_NORM_BACKWARD: return p.columns ? columns_norm_backward<T>(c, p) : rows_norm_backward<T>(c, p);
    case NS_FIXED: return p.columns ? columns_fixed<T>(c, p) : rows_fixed<T>(c, p);
    case NS_FIXED_BACKWARD: return p.columns ? columns_fixed_backward<T>(c, p) : rows_fixed_backward<T>(c, p);
    default: return NS_UNSERVED;
  }
}

}  // namespace ns
