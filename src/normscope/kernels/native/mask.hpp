// Masks: which elements count, as lists, so that sums go over what counts and over nothing else.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>

#include "lower.hpp"
#include "normscope.h"
#include "parallel.hpp"

namespace ns {

// Neighbours of which some count, or all: where the first stands in x-like and y-like tensors and in the mask, how many
// they are, and how many of the row count before them.
struct Counted {
  int64_t x, y, mask, size, before;
};

// What counts of each row of a mask. A row is what counts of the elements of `inner`, for each step of `outer`.
class Valid {
 public:
  static constexpr int64_t kMixed = 256;

  // Neighbours are stretches of which all count; with `mixed`, up to kMixed where these are shorter. Mixed ones must have
  // their bytes side by side.
  Valid(const NsCall &c, const Problem &p, const Loops &outer, const Loop &inner, bool mixed)
      : mask_(c.mask), inner_(inner), mixed_(mixed && inner.m == 1) {
    rows_.emplace(std::size_t(p.mask_rows + 1) * sizeof(int64_t));
    counts_.emplace(std::size_t(p.mask_rows) * sizeof(int64_t));
    if (!*rows_ || !*counts_) return;
    int64_t *first = rows_->as<int64_t>(), *counts = counts_->as<int64_t>(), all = 0;
    for (int64_t row = 0; row < p.mask_rows; ++row) {
      first[row] = all, counts[row] = 0;
      scan(p, row, outer, [&](const Offset &, int64_t, int64_t, int64_t found) { ++all, counts[row] += found; });
      most_ = std::max(most_, counts[row]);
    }
    first[p.mask_rows] = all;
    list_.emplace(std::size_t(all) * sizeof(Counted));
    if (!*list_) return;
    Counted *next = list_->as<Counted>();
    for (int64_t row = 0; row < p.mask_rows; ++row) {
      int64_t before = 0;
      scan(p, row, outer, [&](const Offset &o, int64_t begin, int64_t size, int64_t found) {
        *next++ = {o.x + begin * inner_.x, o.y + begin * inner_.y, o.m + begin * inner_.m, size, before};
        before += found;
      });
    }
  }

  explicit operator bool() const { return list_ && *list_; }

  int64_t count(int64_t row) const { return counts_->as<int64_t>()[row]; }
  int64_t most() const { return most_; }
  const Loop &inner() const { return inner_; }
  const uint8_t *bytes(const Counted &c) const { return mask_ + c.mask; }

  // f(neighbours, how many count, those of them to skip, those to take) for the begin-th to before the end-th that count.
  template <class F>
  void each(int64_t row, int64_t begin, int64_t end, F &&f) const {
    end = std::min(end, count(row));
    if (begin >= end) return;
    const int64_t *first = rows_->as<int64_t>() + row;
    const Counted *list = list_->as<Counted>();
    const Counted *last = list + first[1];
    const Counted *at = std::upper_bound(list + first[0], last, begin,
                                         [](int64_t value, const Counted &c) { return value < c.before; }) - 1;
    for (; begin < end; ++at) {
      const int64_t beyond = at + 1 < last ? at[1].before : count(row), to = std::min(end, beyond);
      f(*at, beyond - at->before, begin - at->before, to - begin);
      begin = to;
    }
  }

 private:
  const uint8_t *mask_;
  Loop inner_;
  bool mixed_;
  std::optional<Scratch> rows_, counts_, list_;
  int64_t most_ = 0;

  // f(offset of the line, first, size, how many count) for neighbours on a line of a row.
  template <class F>
  void scan(const Problem &p, int64_t row, const Loops &outer, F &&f) const {
    int64_t row_at = 0;
    for (int i = 0; i < p.kept.n; ++i)
      if (const Loop &l = p.kept.loop[i]; l.r) row_at += row / l.r % l.size * l.m;
    const int64_t lines = outer.count(), size = inner_.size, step = inner_.m;
    for (int64_t line = 0; line < lines; ++line) {
      Offset o = outer.at(line);
      o.m += row_at;
      const uint8_t *valid = mask_ + o.m;
      for (int64_t i = 0; i < size;) {
        const int64_t begin = next(valid, i, size, step, 1);
        if (begin == size) break;
        i = next(valid, begin, size, step, 0);
        int64_t found = i - begin;
        if (mixed_ && found < kMixed && i < size) {
          i = std::min(size, begin + kMixed), found = 0;
          for (int64_t k = begin; k < i; ++k) found += valid[k];
        }
        f(o, begin, i - begin, found);
      }
    }
  }

  // The first of [i, size) that is `wanted`.
  static int64_t next(const uint8_t *valid, int64_t i, int64_t size, int64_t step, int wanted) {
    if (step == 0) return valid[0] == wanted ? i : size;
    if (step == 1) {
      for (const int64_t near = std::min(size, i + 8); i < near; ++i)  // a call takes longer than a few of them
        if (valid[i] == wanted) return i;
      const void *found = std::memchr(valid + i, wanted, std::size_t(size - i));
      return found ? static_cast<const uint8_t *>(found) - valid : size;
    }
    while (i < size && valid[i * step] != wanted) ++i;
    return i;
  }
};

}  // namespace ns
