// Lowering: sizes, strides and axis codes to the loops that a kernel runs over. The readable form is kernels/layout.py.
#pragma once
#include <cstdint>

#include "normscope.h"

namespace ns {

constexpr int kMostAxes = 12;
constexpr int64_t kShortPiece = 48;

// One loop over memory: strides of x-like and y-like tensors, of the parameters, of the statistic sets, of the mask, and
// for kept loops of its rows: sets of one row have the same elements that count.
struct Loop {
  int64_t size = 1, x = 0, y = 0, p = 0, s = 0, m = 0, r = 0;
  bool kept = false;
};

struct Offset {
  int64_t x = 0, y = 0, p = 0, s = 0, m = 0, r = 0;
};

struct Loops {
  Loop loop[kMostAxes];
  int n = 0;

  void push(const Loop &l) { loop[n++] = l; }
  int64_t count() const {
    int64_t c = 1;
    for (int i = 0; i < n; ++i) c *= loop[i].size;
    return c;
  }
  // Where the i-th iteration stands, the last loop fastest.
  Offset at(int64_t i) const {
    Offset o;
    for (int k = n - 1; k >= 0; --k) {
      const Loop &l = loop[k];
      const int64_t q = k ? i / l.size : 0, r = i - q * l.size;
      o.x += r * l.x, o.y += r * l.y, o.p += r * l.p, o.s += r * l.s, o.m += r * l.m, o.r += r * l.r;
      i = q;
    }
    return o;
  }
};

// Rows: a set is count(erased) segments of `inner` contiguous elements; set i starts at kept.at(i).
// Columns: for each of count(kept) outer positions, count(erased) lines of `inner` contiguous columns; `merge` adjacent
// columns are one set. Column j has parameter (j / merge) * group_p + (j % merge) * inner_p and set (j / merge) * group_s,
// each plus the offset of its outer position (and, for parameters, of its line).
struct Problem {
  bool columns = false;
  Loops kept, erased;
  int64_t inner = 1, inner_p = 0, inner_m = 0;
  int64_t merge = 1, group_p = 0, group_s = 0;
  int64_t mask_rows = 1;
  int64_t elements = 1, sets = 1, set_size = 1, parameters = 1;
};

inline int64_t magnitude(int64_t v) { return v < 0 ? -v : v; }

// False where these strides need a packed copy first.
inline bool lower(const NsCall &c, Problem *out) {
  Problem &p = *out;
  Loop axis[kMostAxes];
  int n = 0;
  const int split_dim = int(c.recipe.split >> 40) - 1;
  const int64_t given = c.recipe.split & ((int64_t(1) << 39) - 1);
  const bool inner_given = (c.recipe.split >> 39) & 1;
  for (int d = 0; d < c.ndim; ++d) {
    const int64_t size = c.sizes[d], x = c.x_strides[d], y = c.y_strides[d], m = c.mask ? c.mask_strides[d] : 0;
    if (n + (d == split_dim ? 2 : 1) > kMostAxes) return false;
    if (d == split_dim) {
      if (given <= 0 || size % given) return false;
      const int64_t inner = inner_given ? given : size / given;
      axis[n].size = size / (inner ? inner : 1), axis[n].x = x * inner, axis[n].y = y * inner, axis[n].m = m * inner, ++n;
      axis[n].size = inner, axis[n].x = x, axis[n].y = y, axis[n].m = m, ++n;
    } else {
      axis[n].size = size, axis[n].x = x, axis[n].y = y, axis[n].m = m, ++n;
    }
  }
  for (int i = n - 1; i >= 0; --i) {
    const int code = int(c.recipe.axes >> (4 * i)) & 15;
    axis[i].kept = code & 1;
    if (code & 2) axis[i].p = p.parameters, p.parameters *= axis[i].size;
    if (code & 1) {
      axis[i].s = p.sets, p.sets *= axis[i].size;
    } else {
      p.set_size *= axis[i].size;
    }
    p.elements *= axis[i].size;
  }

  // In the order of the output's memory (the input may repeat itself): a stable insertion sort, axes of size 1 left out.
  Loop loop[kMostAxes];
  int m = 0;
  for (int i = 0; i < n; ++i) {
    if (axis[i].size == 1) continue;
    int at = m++;
    while (at > 0 && magnitude(loop[at - 1].y) < magnitude(axis[i].y)) loop[at] = loop[at - 1], --at;
    loop[at] = axis[i];
  }
  // Neighbours that are one loop over every tensor, joined.
  int k = 0;
  for (int i = 0; i < m; ++i) {
    const Loop &l = loop[i];
    if (k && loop[k - 1].kept == l.kept && loop[k - 1].x == l.size * l.x && loop[k - 1].y == l.size * l.y &&
        loop[k - 1].p == l.size * l.p && loop[k - 1].m == l.size * l.m && (!l.kept || loop[k - 1].s == l.size * l.s)) {
      const int64_t size = loop[k - 1].size;
      loop[k - 1] = l;
      loop[k - 1].size *= size;
    } else {
      loop[k++] = l;
    }
  }

  if (k == 0) return true;  // one element
  const Loop last = loop[k - 1];
  if (last.x != 1 || last.y != 1 || (last.p != 0 && last.p != 1) || (last.m != 0 && last.m != 1)) return false;
  p.inner = last.size, p.inner_p = last.p, p.inner_m = last.m;
  int rest = k - 1;
  if (last.kept) {
    p.columns = true;
    p.inner_p = 0, p.group_p = last.p, p.group_s = last.s;
  } else if (k >= 3 && !last.m && last.size <= kShortPiece && loop[k - 2].kept && !loop[k - 3].kept &&
             loop[k - 2].x == last.size && loop[k - 2].y == last.size) {
    p.columns = true;
    p.merge = last.size, p.inner = loop[k - 2].size * last.size;
    p.group_p = loop[k - 2].p, p.group_s = loop[k - 2].s;
    rest = k - 2;
  }
  if (p.columns && (last.m || loop[rest].m)) return false;  // columns of a line count together
  for (int i = rest - 1; i >= 0; --i)
    if (loop[i].kept && loop[i].m) loop[i].r = p.mask_rows, p.mask_rows *= loop[i].size;
  for (int i = 0; i < rest; ++i) (loop[i].kept ? p.kept : p.erased).push(loop[i]);
  return true;
}

}  // namespace ns
