// Columns: how the work is cut. What a result depends on is cut by the shape alone, never by the number of threads.
//
// An outer position is a plane of lines and columns. Lines are cut into chunks, whose sums are taken apart and merged in
// order; columns into tiles, which do not depend on each other. Where a tile of a whole position fits the cache
// (`near`), one task reads it, finishes its statistics and goes over it again; otherwise all chunks are read first.
//
// Lines narrower than vectors like them, and contiguous, are folded: k lines become one of k times the columns, and a
// set then has k columns more. What is left of the lines stands at the end as `rest` columns of a last, shorter line.
//
// Under a mask the lines are those that count, numbered one after the other: work is cut, and so sums are, as if there
// were no others.
#pragma once
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <optional>

#include "lower.hpp"
#include "mask.hpp"
#include "recipe.hpp"
#include "vec.hpp"

namespace ns {
namespace columns {

constexpr int64_t kChunkBytes = 128 << 10;  // of a chunk at least, and so many lines:
constexpr int64_t kChunkLines = 128;
constexpr int64_t kMostChunks = 64;
constexpr int64_t kNearBytes = 1 << 20;     // of x in a tile that is gone over twice: half a second-level cache
constexpr int64_t kTileColumns = 1024;      // arrays of one value a column stay in the first-level cache
constexpr int64_t kLeastTile = 256;
constexpr int64_t kFoldColumns = 2048;
constexpr int64_t kSomeTasks = 8;           // enough to keep threads busy
constexpr int64_t kMostGroups = 64;         // partial sums of parameters
constexpr int64_t kSerialElements = 65536;  // fewer are not worth waking a thread

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Plan {
  Problem p;
  int64_t outer, families, per_family;  // outer positions: those that differ in their parameters, and how many each
  int64_t lines = 0, columns;           // of an outer position, folded; under a mask, of the one that has most
  int64_t fold = 1, rest = 0;
  int64_t sets;                         // of an outer position
  bool line_parameters, element_parameters;  // they differ from line to line; from column to column too

  int64_t chunk, chunks;  // lines of a chunk
  int64_t tile, tiles;    // columns of a tile
  int64_t padded = 0;     // columns up to whole packs
  bool apart;             // each column is a set of its own, so that sets do not reach over tiles
  bool near;              // each task finishes a tile of an outer position
  std::optional<Valid> valid;  // the lines that count
  int64_t groups;  // of the outer positions of a family that one task sums parameters over
  int threads;

  Plan(const NsCall &c, const Problem &problem, int64_t pack, int64_t bytes) : p(problem) {
    // Loops with parameters of their own outermost, so that the positions of a family follow each other.
    std::stable_partition(p.kept.loop, p.kept.loop + p.kept.n, [](const Loop &l) { return l.p != 0; });
    outer = p.kept.count(), families = 1;
    for (int i = 0; i < p.kept.n; ++i)
      if (p.kept.loop[i].p) families *= p.kept.loop[i].size;
    per_family = families ? outer / families : 0;
    line_parameters = std::any_of(p.erased.loop, p.erased.loop + p.erased.n, [](const Loop &l) { return l.p != 0; });
    element_parameters = line_parameters && (p.group_p || p.inner_p);
    columns = p.inner;
    sets = columns / p.merge;
    Loops outer_lines = p.erased;
    const Loop line = p.erased.n ? p.erased.loop[--outer_lines.n] : Loop();
    if (c.mask) {
      valid.emplace(c, p, outer_lines, line, false);
      if (!*valid) return;
    } else if (!line_parameters) {
      fold_lines(pack);
    }
    lines = valid ? valid->most() : p.erased.count();
    padded = ceil_div(columns, pack) * pack;

    apart = p.merge == 1 && fold == 1;
    const bool small = (valid ? outer * lines * columns : p.elements) < kSerialElements;
    threads = small ? 1 : c.threads;
    tile = apart ? std::min(padded, kTileColumns) : padded;
    const auto narrow_until = [&](auto enough) {
      while (!enough() && tile > kLeastTile) tile = ceil_div(tile / 2, pack) * pack;
    };
    const auto fits = [&] {
      return lines * tile * bytes <= kNearBytes && (small || outer * ceil_div(columns, tile) >= kSomeTasks);
    };
    if (apart) narrow_until(fits);
    near = line_parameters || lines == 0 || fits();
    chunks = 1, chunk = lines;
    if (!near) {
      chunks = std::clamp<int64_t>(lines / std::max(kChunkLines, kChunkBytes / (columns * bytes)), 1, kMostChunks);
      chunk = ceil_div(ceil_div(lines, chunks), 8) * 8;
      chunks = ceil_div(lines, chunk);
      tile = std::min(padded, kTileColumns);
      narrow_until([&] { return outer * chunks * ceil_div(columns, tile) >= 2 * kSomeTasks; });
    }
    tiles = ceil_div(columns, tile);
    groups = element_parameters ? 1 : std::clamp<int64_t>(kMostGroups / (families * tiles), 1, per_family);
  }

  // Lines of an outer position.
  int64_t lines_at(const Offset &at) const { return valid ? valid->count(at.r) : lines; }

  // Columns of a tile; `padded` up to whole packs.
  struct Span {
    int64_t begin, width, padded;
  };
  Span span(int64_t i) const {
    const int64_t begin = i * tile;
    return {begin, std::min(tile, columns - begin), std::min(tile, padded - begin)};
  }
  Span whole() const { return {0, columns, padded}; }

  // f(column, its set, its parameter, to which outer position and line add).
  template <class F>
  NS_INLINE void each_column(F &&f) const {
    for (int64_t k = 0, j = 0; k < fold; ++k) {
      if (p.merge == 1 && p.group_p == 1) {  // the usual loop, so plain that it becomes one of vectors
        for (int64_t set = 0; set < sets; ++set) f(j + set, set, set);
        j += sets;
        continue;
      }
      for (int64_t set = 0; set < sets; ++set)
        for (int64_t i = 0; i < p.merge; ++i, ++j) f(j, set, set * p.group_p + i * p.inner_p);
    }
  }

  // The first outer position of a group of a family, and where the group ends.
  int64_t group_begin(int64_t family, int64_t group) const {
    return family * per_family + group * per_family / groups;
  }

  // f(offset, first line, lines, the loop they run in) for lines [begin, end) of an outer position, in stretches of one
  // stride.
  template <class F>
  NS_INLINE void stretches(const Offset &at, int64_t begin, int64_t end, F &&f) const {
    if (valid) {
      const Loop &loop = valid->inner();
      valid->each(at.r, begin, end, [&](const Counted &lines, int64_t, int64_t skip, int64_t n) {
        Offset o;
        o.x = lines.x + skip * loop.x, o.y = lines.y + skip * loop.y;
        f(o, lines.before + skip, n, loop);
      });
      return;
    }
    const Loop innermost = p.erased.n ? p.erased.loop[p.erased.n - 1] : Loop();
    while (begin < end) {
      const int64_t n = std::min(end - begin, innermost.size - begin % innermost.size);
      f(p.erased.at(begin), begin, n, innermost);
      begin += n;
    }
  }

  // The rest of the lines: where it stands in its outer position, and how many columns of it are in a span.
  Offset rest_at() const {
    Offset o;
    if (rest) o.x = lines * p.erased.loop[0].x, o.y = lines * p.erased.loop[0].y;
    return o;
  }
  int64_t rest_in(const Span &s) const { return std::clamp<int64_t>(rest - s.begin, 0, s.width); }

 private:
  void fold_lines(int64_t pack) {
    if (!p.erased.n || columns % pack == 0) return;
    Loop &l = p.erased.loop[p.erased.n - 1];
    if (l.x != columns || l.y != columns) return;
    const int64_t k = std::min({pack / std::gcd(columns, pack), l.size, kFoldColumns / columns});
    if (k < 2 || (p.erased.n > 1 && l.size % k)) return;
    fold = k, rest = l.size % k * columns, columns *= k;
    l.size /= k, l.x *= k, l.y *= k;
  }
};

}  // namespace columns
}  // namespace ns
