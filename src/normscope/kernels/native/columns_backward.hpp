// Columns: gradients of the input and of the parameters.
#pragma once
#include <cstdint>

#include "columns_forward.hpp"
#include "columns_lines.hpp"
#include "columns_plan.hpp"
#include "columns_sets.hpp"
#include "parallel.hpp"

namespace ns {
namespace columns {

// One value a column: dx = (dy * slope + (x - mean) * curve + level) * inverse, which needs no square of the inverse, that
// would leave the range of float first; by stored statistics dx = dy * slope. Before the sums over lines are known, slope
// and level are scale and shift of xhat.
template <class T>
struct Slopes {
  static constexpr int64_t n = 5;
  Compute<T> *mean, *slope, *curve, *level, *inverse;
  static Slopes in(Compute<T> *memory, int64_t pitch) {
    return {memory, memory + pitch, memory + 2 * pitch, memory + 3 * pitch, memory + 4 * pitch};
  }
};

// Sums over lines, of each column: of dy and dy * (x - mean); where parameters differ from line to line, of g and g * xhat.
struct Products {
  double *sum, *product;
  static Products in(double *memory, int64_t pitch) { return {memory, memory + pitch}; }
};

// A call backwards: what it wants and by which statistics.
template <class T>
struct Backward {
  const Context<T> x;
  const bool own;     // the statistics are the input's own, and gradients flow through them
  const bool stream;

  Backward(const NsCall &c, const Problem &problem, bool own_)
      : x(c, problem), own(own_), stream(streams(x, c.dx) && own_) {}

  bool parameters() const { return x.c.dweight || x.c.dbias; }
  bool sums() const { return (own && !x.c.sums) || parameters(); }

  BackStretch<T> stretch(const Offset &at, const Span &s) const {
    const int64_t y = at.y + s.begin;
    const NsCall &c = x.c;
    return {(const T *)c.x + at.x + s.begin, (const T *)c.dy + y, c.dsum ? (const T *)c.dsum + y : nullptr,
            c.dx ? (T *)c.dx + y : nullptr, 0, 0, 0, s.width};
  }

  // body(stretch, first line) over lines [begin, end), the rest of the lines too at the end.
  template <class F>
  void each_stretch(const Offset &at, int64_t begin, int64_t end, const Span &s, F &&body) const {
    const BackStretch<T> all = stretch(at, s);
    const auto moved = [&](int64_t to_x, int64_t to_y) {
      BackStretch<T> b = all;
      b.x += to_x, b.dy += to_y;
      if (b.dsum) b.dsum += to_y;
      if (b.dx) b.dx += to_y;
      return b;
    };
    x.p.stretches(at, begin, end, [&](const Offset &o, int64_t line, int64_t n, const Loop &loop) {
      BackStretch<T> b = moved(o.x, o.y);
      b.x_stride = loop.x, b.y_stride = loop.y, b.lines = n;
      body(b, line);
    });
    if (const int64_t width = x.p.rest_in(s); width && end == x.p.lines) {
      BackStretch<T> b = moved(x.p.rest_at().x, x.p.rest_at().y);
      b.lines = 1, b.width = width;
      body(b, 0);
    }
  }

  // Statistics, and the arrays that the sums need.
  void start(int64_t outer, const Offset &at, const Span &s, Sets<T> &sets, const Slopes<T> &by) const {
    if (own) {
      get_statistics(x, at, s, sets);
    } else {
      get_stored(x, at, s, sets);
    }
    spread(x, outer, s, sets, false, Affine<T>{by.mean, by.slope, by.level});
  }

  // The sums over some lines; `work` holds two values a column, `line_sums` two for each line of the position, or for
  // each element of the lines from the span's first column on.
  void sum(int64_t outer, const Offset &at, int64_t begin, int64_t end, const Span &s, const Slopes<T> &by,
           const Products &out, Compute<T> *work, double *line_sums) const {
    using C = Compute<T>;
    // Lines summed in compute values: of those that are added one by one, fewer.
    const int64_t block = x.p.line_parameters ? 16 : 64;
    std::fill(out.sum, out.sum + s.padded, 0.0), std::fill(out.product, out.product + s.padded, 0.0);
    const auto add = [&] {
      for (int64_t i = 0; i < s.padded; ++i) out.sum[i] += double(work[i]);
      for (int64_t i = 0; i < s.padded; ++i) out.product[i] += double(work[s.padded + i]);
    };
    if (x.p.valid) {
      const T *x_list[kMostListed], *dy_list[kMostListed];
      int64_t filled = 0;
      const Loop &loop = x.p.valid->inner();
      const auto flush = [&] {
        std::fill(work, work + 2 * s.padded, C(0));
        add_products<T>(Listed<T>{x_list, loop.x}, Listed<T>{dy_list, loop.y}, filled, s.width, by.mean, work,
                        work + s.padded);
        add(), filled = 0;
      };
      each_stretch(at, begin, end, s, [&](const BackStretch<T> &lines, int64_t) {
        for (int64_t l = 0; l < lines.lines; ++l) {
          x_list[filled] = lines.x + l * lines.x_stride, dy_list[filled] = lines.dy + l * lines.y_stride;
          if (++filled == kMostListed) flush();
        }
      });
      if (filled) flush();
      return;
    }
    each_stretch(at, begin, end, s, [&](BackStretch<T> lines, int64_t line) {
      for (int64_t left = lines.lines; left > 0; left -= block) {
        lines.lines = std::min(left, block);
        std::fill(work, work + 2 * s.padded, C(0));
        if (x.p.element_parameters) {
          const int64_t at_line = line * x.p.padded;
          add_products_elements(lines, by.mean, by.slope, by.level, x.factor(outer) + at_line + s.begin, work,
                                work + s.padded, line_sums + at_line, line_sums + x.parameters() + at_line,
                                x.p.padded);
        } else if (x.p.line_parameters) {
          add_products_lines(lines, by.mean, by.slope, by.level, x.factor(outer) + line, work, work + s.padded,
                             line_sums + line, line_sums + x.p.lines + line);
        } else {
          add_products<T>(Strided<T>{lines.x, lines.x_stride}, Strided<T>{lines.dy, lines.y_stride}, lines.lines,
                          lines.width, by.mean, work, work + s.padded);
        }
        add();
        lines.x += block * lines.x_stride, lines.dy += block * lines.y_stride, line += block;
      }
    });
  }

  // From the sums over all lines: products become those with xhat, and slopes what dx is made with. `set_sums` holds two
  // values a set.
  void finish(int64_t outer, const Offset &at, const Span &s, const Sets<T> &sets, const Products &sums, const Slopes<T> &by,
              double *set_sums) const {
    using C = Compute<T>;
    const C *factor = x.p.line_parameters ? nullptr : x.factor(outer) + s.begin;
    const Recipe r = x.recipe(at);
    if (!x.p.line_parameters && this->sums())
      each_slot(x, s, [&](int64_t i, int64_t set) {
        sums.product[i] = sets.inverse[set] * (sums.product[i] - double(sets.low[set]) * sums.sum[i]);
      });
    if (own) {
      const int64_t n = x.sets(s);
      double *of_g = set_sums, *of_gx = set_sums + n;
      std::fill(set_sums, set_sums + 2 * n, 0.0);
      if (x.c.sums) {
        x.each_set(at, s, [&](int64_t i, int64_t k) { of_g[i] = x.c.sums[k], of_gx[i] = x.c.sums[x.p.p.sets + k]; });
      } else if (factor) {
        each_slot(x, s, [&](int64_t i, int64_t set) {
          of_g[set] += double(factor[i]) * sums.sum[i], of_gx[set] += double(factor[i]) * sums.product[i];
        });
      } else {
        each_slot(x, s, [&](int64_t i, int64_t set) { of_g[set] += sums.sum[i], of_gx[set] += sums.product[i]; });
      }
      // Sums that are given are divided already.
      const double center = !r.center ? 0 : x.c.sums ? 1 : 1 / r.n, divisor = x.c.sums ? 1 : r.divisor;
      for (int64_t i = 0; i < n; ++i) {
        const double curve = -sets.inverse[i] * (sets.motion[i] * of_gx[i] / divisor);
        of_g[i] = -(center ? of_g[i] * center : 0) - curve * double(sets.low[i]);
        of_gx[i] = curve;
      }
      each_slot(x, s, [&](int64_t i, int64_t set) { by.level[i] = C(of_g[set]), by.curve[i] = C(of_gx[set]); });
      each_slot(x, s, [&](int64_t i, int64_t set) { by.inverse[i] = C(sets.inverse[set]); });
      for (int64_t i = 0; i < s.padded; ++i) by.slope[i] = factor ? factor[i] : C(1);
    } else if (factor) {
      each_slot(x, s, [&](int64_t i, int64_t set) { by.slope[i] = C(sets.inverse[set] * double(factor[i])); });
    }
    // What is centered alone is always 0: not what rounding leaves of a difference of large values.
    if (own && r.center && r.n <= 1 && !x.c.sums)
      for (int64_t i = 0; i < s.padded; ++i) by.slope[i] *= 0, by.curve[i] *= 0, by.level[i] *= 0;
  }

  void apply(int64_t outer, const Offset &at, int64_t begin, int64_t end, const Span &s, const Slopes<T> &by) const {
    each_stretch(at, begin, end, s, [&](const BackStretch<T> &lines, int64_t line) {
      const auto go = [&](auto factors) {
        columns::with(lines.dsum, [&](auto with_sum) {
          if (!own) {
            apply_back_fixed<T, with_sum.value>(lines, by.slope, factors);
            return;
          }
          with_stream<T>(stream, [&](auto streaming) {
            apply_back<T, streaming.value, with_sum.value>(lines, by.mean, by.slope, by.curve, by.level, by.inverse,
                                                           factors);
          });
        });
      };
      const Compute<T> *factor = x.factor(outer);
      if (x.p.element_parameters) {
        factor += line * x.p.padded + s.begin;
        go([=, pitch = x.p.padded](int64_t l, int64_t j, PackOf<T> g) { return get<T>(factor + l * pitch + j) * g; });
      } else if (x.p.line_parameters) {
        factor += line;
        go([=](int64_t l, int64_t, PackOf<T> g) { return every<T>(factor[l]) * g; });
      } else {
        go([](int64_t, int64_t, PackOf<T> g) { return g; });
      }
    });
    if (stream) stream_fence();
  }

  // Parameters from their partial sums: `parts` arrays a family, `pitch` doubles from one to the next; each holds two
  // arrays of x.parameters() values, of dy and of dy * xhat.
  int write_parameters(double *partial, int64_t parts, int64_t pitch) const {
    const NsCall &c = x.c;
    const Plan &p = x.p;
    const int64_t n = x.parameters(), all = p.p.parameters;
    Arrays memory(2 * all * 8 + 128);
    if (!memory) return NS_NO_MEMORY;
    double *total = memory.take<double>(2 * all);
    std::fill(total, total + 2 * all, 0.0);
    for (int64_t family = 0; family < p.families; ++family) {
      double *sum = partial + family * parts * pitch;
      for (int64_t part = 1; part < parts; ++part)
        for (int64_t i = 0; i < 2 * n; ++i) sum[i] += sum[part * pitch + i];
      const int64_t at = p.p.kept.at(family * p.per_family).p;
      x.each_parameter([&](int64_t i, int64_t parameter) {
        total[at + parameter] += sum[i], total[all + at + parameter] += sum[n + i];
      });
    }
    for (int64_t i = 0; i < all; ++i) {
      if (c.dbias) put_at(c.dbias, c.weight_dtype, i, total[i]);
      if (c.dweight) put_at(c.dweight, c.weight_dtype, i, total[all + i] * x.r.gain);
    }
    return NS_DONE;
  }
};

// A tile of some outer positions after the other; each position is gone over again from the cache.
template <class T>
int backward_near(const Backward<T> &b) {
  using C = Compute<T>;
  const Context<T> &x = b.x;
  const Plan &p = x.p;
  // Partial sums of parameters: an array a family and group, and where they are sums over columns, a tile.
  const bool lines = p.line_parameters, across = lines && !p.element_parameters;
  const int64_t parts = p.groups * (across ? p.tiles : 1), pitch = 2 * x.parameters();
  Arrays partial(b.parameters() || lines ? p.families * parts * pitch * 8 : 0);
  if (!partial) return NS_NO_MEMORY;
  double *sums = partial.take<double>(0);
  const int result = parallel_for(p.families * p.groups * p.tiles, p.threads, [&](int64_t task) -> int {
    const int64_t tile = task % p.tiles, part = task / p.tiles, family = part / p.groups, group = part % p.groups;
    const Span s = p.span(tile);
    const int64_t n = x.sets(s);
    Arrays memory((Slopes<T>::n + 2) * s.padded * sizeof(C) + 2 * s.padded * 8 + Sets<T>::bytes(n) + 2 * n * 8 + 4 * 64);
    if (!memory) return NS_NO_MEMORY;
    const Slopes<T> by = Slopes<T>::in(memory.take<C>(Slopes<T>::n * s.padded), s.padded);
    C *work = memory.take<C>(2 * s.padded);
    const Products products = Products::in(memory.take<double>(2 * s.padded), s.padded);
    double *set_sums = memory.take<double>(2 * n);
    Sets<T> sets(memory, n);
    double *mine = sums + (across ? (part * p.tiles + tile) * pitch : part * pitch + s.begin);
    if (across) {
      std::fill(mine, mine + pitch, 0.0);
    } else if (lines || b.parameters()) {
      for (int64_t i = 0; i < pitch; i += p.padded) std::fill_n(mine + i, s.padded, 0.0);
    }
    for (int64_t outer = p.group_begin(family, group); outer < p.group_begin(family, group + 1); ++outer) {
      const Offset at = p.p.kept.at(outer);
      b.start(outer, at, s, sets, by);
      if (b.sums()) b.sum(outer, at, 0, p.lines, s, by, products, work, mine);
      b.finish(outer, at, s, sets, products, by, set_sums);
      if (!lines && b.parameters()) {
        for (int64_t i = 0; i < s.padded; ++i) mine[i] += products.sum[i];
        for (int64_t i = 0; i < s.padded; ++i) mine[p.padded + i] += products.product[i];
      }
      if (x.c.dx) b.apply(outer, at, 0, p.lines, s, by);
    }
    return NS_DONE;
  });
  return result == NS_DONE && b.parameters() ? b.write_parameters(sums, parts, pitch) : result;
}

// All chunks are summed, then the sets finished, then all chunks gone over, the last one first.
template <class T>
int backward_far(const Backward<T> &b) {
  using C = Compute<T>;
  const Context<T> &x = b.x;
  const Plan &p = x.p;
  const int64_t tasks = p.outer * p.chunks * p.tiles, pitch = 2 * p.padded;
  const int64_t arrays_of_one = Slopes<T>::n * p.padded;
  Arrays memory((b.sums() ? p.outer * p.chunks * pitch * 8 : 0) + p.outer * arrays_of_one * int64_t(sizeof(C)) + 128);
  if (!memory) return NS_NO_MEMORY;
  double *sums = memory.take<double>(b.sums() ? p.outer * p.chunks * pitch : 0);
  C *arrays = memory.take<C>(p.outer * arrays_of_one);
  const auto products = [&](int64_t outer, int64_t k, const Span &s) {
    return Products::in(sums + (outer * p.chunks + k) * pitch + s.begin, p.padded);
  };
  const auto slopes = [&](int64_t outer, const Span &s) {
    return Slopes<T>::in(arrays + outer * arrays_of_one + s.begin, p.padded);
  };
  const auto end = [&](int64_t k) { return std::min((k + 1) * p.chunk, p.lines); };
  // body(outer position, span, sets, two doubles a set) for spans that hold whole sets.
  const int64_t spans = p.apart ? p.tiles : 1;
  const auto each_span = [&](auto &&body) {
    return parallel_for(p.outer * spans, p.threads, [&](int64_t task) -> int {
      const Span s = p.apart ? p.span(task % spans) : p.whole();
      const int64_t n = x.sets(s);
      Arrays own_memory(Sets<T>::bytes(n) + 2 * n * 8 + 64);
      if (!own_memory) return NS_NO_MEMORY;
      Sets<T> sets(own_memory, n);
      body(task / spans, s, sets, own_memory.take<double>(2 * n));
      return NS_DONE;
    });
  };

  int result = each_span([&](int64_t outer, const Span &s, Sets<T> &sets, double *) {
    b.start(outer, p.p.kept.at(outer), s, sets, slopes(outer, s));
  });
  if (result == NS_DONE && b.sums())
    result = parallel_for(tasks, p.threads, [&](int64_t task) -> int {
      const int64_t part = task / p.tiles, outer = part / p.chunks, k = part % p.chunks;
      const Span s = p.span(task % p.tiles);
      Arrays work(2 * s.padded * sizeof(C));
      if (!work) return NS_NO_MEMORY;
      b.sum(outer, p.p.kept.at(outer), k * p.chunk, end(k), s, slopes(outer, s), products(outer, k, s),
            work.take<C>(2 * s.padded), nullptr);
      return NS_DONE;
    });
  if (result != NS_DONE) return result;
  result = each_span([&](int64_t outer, const Span &s, Sets<T> &sets, double *set_sums) {
    if (b.own) {
      get_statistics(x, p.p.kept.at(outer), s, sets);
    } else {
      get_stored(x, p.p.kept.at(outer), s, sets);
    }
    const Products all = b.sums() ? products(outer, 0, s) : Products{};
    for (int64_t k = 1; b.sums() && k < p.chunks; ++k) {
      const Products next = products(outer, k, s);
      for (int64_t i = 0; i < s.padded; ++i) all.sum[i] += next.sum[i];
      for (int64_t i = 0; i < s.padded; ++i) all.product[i] += next.product[i];
    }
    b.finish(outer, p.p.kept.at(outer), s, sets, all, slopes(outer, s), set_sums);
  });
  if (result == NS_DONE && x.c.dx)
    result = parallel_for(tasks, p.threads, [&](int64_t task) {
      const int64_t back = tasks - 1 - task, part = back / p.tiles, outer = part / p.chunks, k = part % p.chunks;
      const Span s = p.span(back % p.tiles);
      b.apply(outer, p.p.kept.at(outer), k * p.chunk, end(k), s, slopes(outer, s));
    });
  return result == NS_DONE && b.parameters() ? b.write_parameters(sums, p.per_family, p.chunks * pitch) : result;
}

template <class T>
int backward(const NsCall &c, const Problem &problem, bool own) {
  if (problem.elements == 0) {
    for (int64_t i = 0; i < problem.parameters; ++i) {
      if (c.dweight) put_at(c.dweight, c.weight_dtype, i, 0);
      if (c.dbias) put_at(c.dbias, c.weight_dtype, i, 0);
    }
    return NS_DONE;
  }
  if (!serves(c, problem)) return NS_UNSERVED;
  const Backward<T> b(c, problem, own);
  if (!b.x) return NS_NO_MEMORY;
  const int result = b.x.p.near ? backward_near(b) : backward_far(b);
  if (c.mask && c.dx) clear_masked(b.x, (T *)c.dx);
  return result;
}

}  // namespace columns
}  // namespace ns
