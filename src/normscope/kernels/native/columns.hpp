// Columns: the innermost axis is kept, so that neighbours in memory belong to different statistic sets, and a set is a
// column of lines (batch norm of channels-last tensors), or some neighbouring columns (group norm of those).
#pragma once
#include <cstdint>

#include "columns_backward.hpp"
#include "columns_forward.hpp"

namespace ns {

template <class T>
int columns_norm(const NsCall &c, const Problem &p) {
  if (!c.residual) return columns::forward<T>(c, p, true);
  // The sum first, then its norm.
  NsCall of_sum = c;
  Problem sum = p;
  columns::add_residual<T>(c, p);
  of_sum.x = c.sum, of_sum.residual = nullptr, of_sum.x_strides = c.y_strides;
  for (Loop &l : sum.kept.loop) l.x = l.y;
  for (Loop &l : sum.erased.loop) l.x = l.y;
  return columns::forward<T>(of_sum, sum, true);
}

template <class T>
int columns_norm_backward(const NsCall &c, const Problem &p) {
  return columns::backward<T>(c, p, true);
}

template <class T>
int columns_fixed(const NsCall &c, const Problem &p) {
  return columns::forward<T>(c, p, false);
}

template <class T>
int columns_fixed_backward(const NsCall &c, const Problem &p) {
  return columns::backward<T>(c, p, false);
}

}  // namespace ns
