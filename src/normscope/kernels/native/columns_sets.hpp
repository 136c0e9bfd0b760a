// Columns: from sums over the lines to statistic sets, and from those back to one value a column. All in double.
//
// Values of columns stand in lane order ("slots", relative to their span). Sets stand in slots too where each column is a
// set, in their own order otherwise: `Context::place`.
#pragma once
#include <cmath>
#include <cstdint>

#include "columns_lines.hpp"
#include "columns_plan.hpp"
#include "normscope.h"
#include "parallel.hpp"
#include "recipe.hpp"
#include "vec.hpp"

namespace ns {
namespace columns {

using Span = Plan::Span;

template <class T>
NS_INLINE int64_t slot(int64_t column) {
  constexpr int64_t pack = Lanes<T>::kPack;
  if constexpr (!Lanes<T>::kSplit) return column;
  return column / pack * pack + lane_of<T>(int(column % pack));
}

// Arrays one behind the other in one piece of scratch memory.
class Arrays {
 public:
  explicit Arrays(int64_t bytes) : memory_(std::size_t(bytes)), next_(memory_.as<char>()) {}
  explicit operator bool() const { return bool(memory_); }
  template <class V>
  V *take(int64_t n) {
    V *array = reinterpret_cast<V *>(next_);
    next_ += ceil_div(n * int64_t(sizeof(V)), 64) * 64;
    return array;
  }

 private:
  Scratch memory_;
  char *next_;
};

// What all tasks of a call share.
template <class T>
struct Context {
  using C = Compute<T>;
  const NsCall &c;
  const Plan p;
  const Recipe r;
  Arrays memory;
  int32_t *set_of = nullptr;  // of each slot, where columns are not apart
  C *factors, *biases;        // per family: of each slot, of each line, or of each slot of each line

  Context(const NsCall &call, const Problem &problem)
      : c(call),
        p(call, problem, Lanes<T>::kPack, sizeof(T)),
        r(call.recipe, problem),
        memory(2 * (p.families * parameters() * int64_t(sizeof(C)) + 64) + p.padded * 4 + 64) {
    if (!*this) return;
    factors = memory.template take<C>(p.families * parameters());
    biases = memory.template take<C>(p.families * parameters());
    if (!p.apart) {
      set_of = memory.template take<int32_t>(p.padded);
      std::fill(set_of, set_of + p.padded, 0);
      p.each_column([&](int64_t j, int64_t set, int64_t) { set_of[slot<T>(j)] = int32_t(set); });
    }
    parallel_for(p.families, p.threads, [&](int64_t family) { convert_parameters(family); });
  }

  // False where there was no memory.
  explicit operator bool() const { return memory && (!p.valid || *p.valid); }

  // The recipe of the sets of an outer position.
  Recipe recipe(const Offset &at) const { return p.valid ? r.of(double(p.lines_at(at) * p.p.merge)) : r; }

  int64_t parameters() const {
    return p.element_parameters ? p.lines * p.padded : p.line_parameters ? p.lines : p.padded;
  }
  const C *factor(int64_t outer) const { return factors + outer / p.per_family * parameters(); }
  const C *bias(int64_t outer) const { return biases + outer / p.per_family * parameters(); }

  // f(place in `factors`, parameter that its family adds to), maybe several places with one parameter.
  template <class F>
  void each_parameter(F &&f) const {
    if (!p.line_parameters) {
      p.each_column([&](int64_t j, int64_t, int64_t parameter) { f(slot<T>(j), parameter); });
      return;
    }
    p.stretches({}, 0, p.lines, [&](const Offset &o, int64_t line, int64_t n, const Loop &loop) {
      for (int64_t i = 0; i < n; ++i) {
        const int64_t at = o.p + i * loop.p;
        if (p.element_parameters) {
          p.each_column([&](int64_t j, int64_t, int64_t parameter) {
            f((line + i) * p.padded + slot<T>(j), at + parameter);
          });
        } else {
          f(line + i, at);
        }
      }
    });
  }

  // Sets of a span, and where those of its columns are.
  int64_t sets(const Span &s) const { return p.apart ? s.padded : p.sets; }
  int64_t first_set(const Span &s) const { return p.apart ? s.begin : 0; }
  int64_t real_sets(const Span &s) const { return p.apart ? s.width : p.sets; }
  NS_INLINE int64_t place(int64_t set) const { return p.apart ? slot<T>(set) : set; }

  // Where the statistics of a span's sets are: f(place, index in the arrays of statistics).
  template <class F>
  NS_INLINE void each_set(const Offset &at, const Span &s, F &&f) const {
    const int64_t n = real_sets(s), first = at.s + first_set(s) * p.p.group_s;
    if (p.p.group_s == 1 && (!p.apart || !Lanes<T>::kSplit)) {
      for (int64_t i = 0; i < n; ++i) f(i, first + i);
    } else {
      for (int64_t i = 0; i < n; ++i) f(place(i), first + i * p.p.group_s);
    }
  }

 private:
  void convert_parameters(int64_t family) {
    const int64_t at = p.p.kept.at(family * p.per_family).p;
    C *factor = factors + family * parameters(), *bias = biases + family * parameters();
    std::fill(factor, factor + parameters(), C(0)), std::fill(bias, bias + parameters(), C(0));
    if (c.weight) {
      as_dtype(c.weight, c.weight_dtype, [&](auto *weight) { convert(weight + at, r.offset, r.gain, factor); });
    } else {
      each_parameter([&, gain = C(r.gain)](int64_t i, int64_t) { factor[i] = gain; });
    }
    if (c.bias) as_dtype(c.bias, c.weight_dtype, [&](auto *given) { convert(given + at, 0, 1, bias); });
  }

  template <class W>
  void convert(const W *from, double offset, double gain, C *to) const {
    each_parameter([=](int64_t i, int64_t parameter) {
      to[i] = C((offset + double(Lanes<W>::value(from[parameter]))) * gain);
    });
  }
};

// Per column: mean (as a sum of two values), and the sum of squares about it; about 0 where not centered.
struct Moments {
  double *mean, *low, *squares;
  static Moments in(double *memory, int64_t padded) { return {memory, memory + padded, memory + 2 * padded}; }
};

// Joins the moments of nb lines to those of na.
NS_INLINE void merge(bool center, double na, const Moments &a, double nb, const Moments &b, int64_t padded) {
  if (nb == 0) return;
  const double part = nb / (na + nb), weight = na * part;
  if (center) {
    for (int64_t i = 0; i < padded; ++i) {
      const double delta = (b.mean[i] - a.mean[i]) + (b.low[i] - a.low[i]);
      a.low[i] += delta * part;
      a.squares[i] += b.squares[i] + delta * delta * weight;
    }
  } else {
    for (int64_t i = 0; i < padded; ++i) a.squares[i] += b.squares[i];
  }
}

// Moments of the columns of some lines. Blocks of lines are summed in compute values about the mean so far, and joined
// in double. A block is at most twice as long as what the mean is of: so its squares are never more than four times those
// about the final mean, and nothing cancels, whatever the level of the data. The first block is about the first line.
template <class T, bool Center>
void moments_of(const Plan &p, const T *all, const Offset &at, int64_t begin, int64_t end, const Span &s,
                const Moments &out, Compute<T> *work) {
  using C = Compute<T>;
  constexpr int64_t first = 8, longest = 64;
  const T *x = all + at.x;
  end = std::min(end, p.lines_at(at));
  if (begin >= end)
    for (double *none : {out.mean, out.low, out.squares}) std::fill(none, none + s.padded, 0.0);
  C *about = work, *sum = work + s.padded, *squares = work + 2 * s.padded;
  double n = 0;
  int64_t filled = 0, room = first;
  const auto clear = [&] { std::fill(sum, sum + 2 * s.padded, C(0)); };
  // Lines under a mask are summed a block at once, wherever they are: not by their stretches, which padding breaks.
  const T *list[kMostListed];
  static_assert(longest <= kMostListed);
  const auto flush = [&] {
    if (p.valid)
      add_moments<T, Center>(Listed<T>{list, p.valid->inner().x}, filled, s.width, about, sum, squares);
    const double m = double(filled), each = 1 / m, part = m / (n + m), weight = n * part;
    if (Center && n == 0) {
      for (int64_t i = 0; i < s.padded; ++i) {
        const double low = double(sum[i]) * each;
        out.mean[i] = double(about[i]), out.low[i] = low;
        out.squares[i] = double(squares[i]) - double(sum[i]) * low;
        about[i] = C(out.mean[i] + low);
      }
    } else if (Center) {
      for (int64_t i = 0; i < s.padded; ++i) {
        const double low = double(sum[i]) * each;
        const double delta = (double(about[i]) - out.mean[i]) + (low - out.low[i]);
        out.low[i] += delta * part;
        out.squares[i] += (double(squares[i]) - double(sum[i]) * low) + delta * delta * weight;
        about[i] = C(out.mean[i] + out.low[i]);
      }
    } else {
      for (int64_t i = 0; i < s.padded; ++i) out.squares[i] = (n == 0 ? 0 : out.squares[i]) + double(squares[i]);
    }
    clear();
    n += m, filled = 0, room = std::min(longest, 2 * int64_t(n));
  };
  clear();
  p.stretches(at, begin, end, [&](const Offset &o, int64_t, int64_t lines, const Loop &loop) {
    const T *line = x + o.x + s.begin;
    if (Center && n == 0 && filled == 0)
      each_pack<T>(s.width, [&](int64_t j, auto part) { put<T>(about + j, read(line + j, part)); });
    while (lines > 0) {
      const int64_t take = std::min(lines, room - filled);
      if (p.valid) {
        for (int64_t i = 0; i < take; ++i) list[filled + i] = line + i * loop.x;
      } else {
        add_moments<T, Center>(Strided<T>{line, loop.x}, take, s.width, about, sum, squares);
      }
      filled += take, lines -= take, line += take * loop.x;
      if (filled == room) flush();
    }
  });
  if (filled) flush();
}

// Per set: the mean as high + low, 1 / D, and how much D moves with the deviation (backwards only).
template <class T>
struct Sets {
  Compute<T> *high, *low;
  double *inverse, *motion;

  static int64_t bytes(int64_t n) { return n * (2 * sizeof(Compute<T>) + 16) + 4 * 64; }
  Sets(Arrays &memory, int64_t n)
      : high(memory.take<Compute<T>>(n)),
        low(memory.take<Compute<T>>(n)),
        inverse(memory.take<double>(n)),
        motion(memory.take<double>(n)) {}

  void mean(int64_t i, double a, double b) {
    const Compute<T> h = Compute<T>(a + b);
    high[i] = h, low[i] = Compute<T>((a - double(h)) + b);
  }
};

// The mean of a set and its sum of squares by a plain loop in double, for what leaves the range of float. `at` is the
// outer position, and `set` counts from there. About the first value, then about the mean: no digits are lost, and of
// equal values the mean is exact.
template <class T>
double wide_moments(const Context<T> &x, const Offset &at, int64_t set, Sets<T> &sets, int64_t place) {
  const Plan &p = x.p;
  const T *from = (const T *)x.c.x + at.x;
  const double n = x.recipe(at).n;
  const auto each = [&](auto &&f) {
    for (int64_t k = 0; k < p.fold; ++k)
      for (int64_t i = 0; i < p.p.merge; ++i) {
        const int64_t j = k * (p.columns / p.fold) + set * p.p.merge + i;
        p.stretches(at, 0, p.lines, [&](const Offset &o, int64_t, int64_t lines, const Loop &loop) {
          for (int64_t l = 0; l < lines; ++l) f(double(Lanes<T>::value(from[o.x + l * loop.x + j])));
        });
        if (j < p.rest) f(double(Lanes<T>::value(from[p.rest_at().x + j])));
      }
  };
  int64_t first = 0;  // where the first line is
  p.stretches(at, 0, 1, [&](const Offset &o, int64_t, int64_t, const Loop &) { first = o.x; });
  double pivot = x.r.center ? double(Lanes<T>::value(from[first + set * p.p.merge])) : 0, delta = 0, squares = 0;
  for (int pass = x.r.center ? 0 : 1; pass < 2; ++pass) {
    pivot += delta, delta = squares = 0;
    each([&](double v) { delta += v - pivot, squares += (v - pivot) * (v - pivot); });
    delta = x.r.center ? delta / n : 0;
  }
  sets.mean(place, pivot, delta);
  return squares - n * delta * delta;
}

// From the moments of all lines of a span; `at` is its outer position. Leaves roots in `motion`.
template <class T>
void join_columns(const Context<T> &x, const Span &s, const Moments &m, const Offset &at, Sets<T> &sets) {
  const Plan &p = x.p;
  const Recipe r = x.recipe(at);  // a copy, which no array can lie over: its loops become ones of vectors
  const double lines = double(p.lines_at(at));
  const T *rest = (const T *)x.c.x + at.x + p.rest_at().x;
  if (r.n == 0) {
    for (int64_t i = 0; i < x.sets(s); ++i) sets.mean(i, 0, 0), sets.motion[i] = sets.inverse[i] = 0;
    return;
  }
  if (p.apart) {
    for (int64_t i = 0; i < s.padded; ++i) {
      if (x.r.center) {
        sets.mean(i, m.mean[i], m.low[i]);
      } else {
        sets.mean(i, 0, 0);
      }
      sets.motion[i] = m.squares[i];
    }
  } else {
    const auto each = [&](int64_t set, auto column, auto single) {
      for (int64_t k = 0; k < p.fold; ++k)
        for (int64_t i = 0, j = k * (p.columns / p.fold) + set * p.p.merge; i < p.p.merge; ++i, ++j) {
          column(slot<T>(j));
          if (j < p.rest) single(double(Lanes<T>::value(rest[j])));
        }
    };
    for (int64_t set = 0; set < p.sets; ++set) {
      double squares = 0;
      if (x.r.center) {
        // Two passes about the mean of the first column.
        const double pivot = m.mean[slot<T>(set * p.p.merge)];
        double delta = 0;
        each(set, [&](int64_t i) { delta += lines * ((m.mean[i] - pivot) + m.low[i]); },
             [&](double v) { delta += v - pivot; });
        delta /= r.n;
        each(set,
             [&](int64_t i) {
               const double d = ((m.mean[i] - pivot) + m.low[i]) - delta;
               squares += m.squares[i] + lines * d * d;
             },
             [&](double v) { squares += ((v - pivot) - delta) * ((v - pivot) - delta); });
        sets.mean(set, pivot, delta);
      } else {
        each(set, [&](int64_t i) { squares += m.squares[i]; }, [&](double v) { squares += v * v; });
        sets.mean(set, 0, 0);
      }
      sets.motion[set] = squares;
    }
  }
  const int64_t n = x.sets(s);
  double *squares = sets.motion;
  const auto not_negative = [](double v) { return v < 0 ? 0 : v; };  // by rounding; a NaN stays one
  for (int64_t i = 0; i < n; ++i) squares[i] = not_negative(squares[i]);
  if constexpr (sizeof(Compute<T>) == 4) {
    for (int64_t set = 0; set < x.real_sets(s); ++set) {
      double &of_set = squares[x.place(set)];
      if (!r.fits_float(of_set))
        of_set = not_negative(wide_moments(x, at, x.first_set(s) + set, sets, x.place(set)));
    }
  }
  for (int64_t i = 0; i < n; ++i) sets.motion[i] = r.root(squares[i]);
  for (int64_t i = 0; i < n; ++i) sets.inverse[i] = r.inverse(sets.motion[i]);
}

template <class T>
void put_statistics(const Context<T> &x, const Offset &at, const Span &s, const Sets<T> &sets) {
  Compute<T> *out = (Compute<T> *)x.c.stats;
  if (!out) return;
  if (x.r.center) {
    x.each_set(at, s, [&](int64_t i, int64_t k) { out[k] = sets.high[i]; });
    x.each_set(at, s, [&](int64_t i, int64_t k) { out[x.p.p.sets + k] = sets.low[i]; });
    out += 2 * x.p.p.sets;
  }
  x.each_set(at, s, [&](int64_t i, int64_t k) { out[k] = Compute<T>(sets.motion[i]); });
  if (x.p.valid) {
    out += x.p.p.sets;
    x.each_set(at, s, [&, n = x.recipe(at).n](int64_t, int64_t k) { out[k] = Compute<T>(n); });
  }
}

template <class T>
void get_statistics(const Context<T> &x, const Offset &at, const Span &s, Sets<T> &sets) {
  const Compute<T> *in = (const Compute<T> *)x.c.stats;
  const Recipe r = x.recipe(at);
  const int64_t n = x.sets(s);
  for (int64_t i = 0; i < n; ++i) sets.high[i] = sets.low[i] = 0, sets.motion[i] = 0;
  if (x.r.center) {
    x.each_set(at, s, [&](int64_t i, int64_t k) { sets.high[i] = in[k]; });
    x.each_set(at, s, [&](int64_t i, int64_t k) { sets.low[i] = in[x.p.p.sets + k]; });
    in += 2 * x.p.p.sets;
  }
  x.each_set(at, s, [&](int64_t i, int64_t k) { sets.motion[i] = double(in[k]); });
  for (int64_t i = 0; i < n; ++i) sets.inverse[i] = r.n > 0 ? r.inverse(sets.motion[i]) : 0;
  for (int64_t i = 0; i < n; ++i) sets.motion[i] = r.motion(sets.motion[i]);
  for (int64_t i = x.real_sets(s); i < n; ++i) sets.inverse[x.place(i)] = 0;  // beyond the columns: must not make a NaN
}

// The statistics that a call normalizes by, where they are not its own.
template <class T>
void get_stored(const Context<T> &x, const Offset &at, const Span &s, Sets<T> &sets) {
  const Recipe r = x.r;
  const int64_t n = x.sets(s);
  std::fill(sets.high, sets.high + n, Compute<T>(0)), std::fill(sets.low, sets.low + n, Compute<T>(0));
  std::fill(sets.inverse, sets.inverse + n, 1.0);
  const auto load = [&](const void *stored, auto &&f) {
    as_dtype(stored, x.c.stored_dtype, [&](auto *in) {
      x.each_set(at, s, [&](int64_t i, int64_t k) { f(i, Lanes<std::decay_t<decltype(*in)>>::value(in[k])); });
    });
  };
  if (r.center && x.c.mean) load(x.c.mean, [&](int64_t i, double v) { sets.mean(i, v, 0); });
  load(x.c.var, [&](int64_t i, double v) { sets.inverse[i] = v; });
  for (int64_t i = 0; i < n; ++i) sets.inverse[i] = r.inverse_of_variance(sets.inverse[i]);
  for (int64_t i = x.real_sets(s); i < n; ++i) sets.inverse[x.place(i)] = 0;  // beyond the columns: must not make a NaN
}

// f(slot, place of its set) for each slot of a span.
template <class T, class F>
NS_INLINE void each_slot(const Context<T> &x, const Span &s, F &&f) {
  if (x.p.apart) {
    for (int64_t i = 0; i < s.padded; ++i) f(i, i);
  } else {
    for (int64_t i = 0; i < s.padded; ++i) f(i, int64_t(x.set_of[s.begin + i]));
  }
}

// One value a column: y = (x - mean) * scale + shift, or with a factor of 1 and no bias, xhat.
template <class T>
struct Affine {
  Compute<T> *mean, *scale, *shift;
  static Affine in(Compute<T> *memory, int64_t pitch) { return {memory, memory + pitch, memory + 2 * pitch}; }
};

template <class T>
void spread(const Context<T> &x, int64_t outer, const Span &s, const Sets<T> &sets, bool parameters, Affine<T> out) {
  using C = Compute<T>;
  each_slot(x, s, [&](int64_t i, int64_t set) { out.mean[i] = sets.high[set]; });
  if (parameters) {
    const C *factor = x.factor(outer) + s.begin, *bias = x.bias(outer) + s.begin;
    each_slot(x, s, [&](int64_t i, int64_t set) {
      const double scale = sets.inverse[set] * double(factor[i]);
      out.scale[i] = C(scale), out.shift[i] = C(double(bias[i]) - double(sets.low[set]) * scale);
    });
  } else {
    each_slot(x, s, [&](int64_t i, int64_t set) {
      out.scale[i] = C(sets.inverse[set]);
      out.shift[i] = C(-double(sets.low[set]) * sets.inverse[set]);
    });
  }
}

}  // namespace columns
}  // namespace ns
