// Rows forwards: statistics of each set, then y. A set is read from memory once where it fits into the cache.
#pragma once
#include <cmath>
#include <cstdint>
#include <limits>

#include "rows_parts.hpp"

namespace ns {

// ---- statistics

// Mean, counted from a value near it, and the sum of squares about the mean.
struct Moments {
  double pivot = 0, mean = 0, squares = 0, n = 0;

  // Chan, Golub and LeVeque 1979, eq. 2.1.
  NS_ONE_COPY void add(const Moments &o) {
    if (n == 0) {
      *this = o;
      return;
    }
    const double together = n + o.n, step = (o.pivot - pivot) + (o.mean - mean);
    mean += step * (o.n / together);
    squares += o.squares + step * step * (n * o.n / together);
    n = together;
  }
};

// Where the elements of a set are read: strides of x, or of y for the sum of x and the residual.
template <class T>
struct Source {
  const T *base;
  bool as_y;
  const T *at(const Offset &set, const Offset &segment) const {
    return base + (as_y ? set.y + segment.y : set.x + segment.x);
  }
};

// A value near the mean: that of the first pack. It is exact where all are equal.
template <class T>
NS_INLINE typename Lanes<T>::C near_mean(const T *x, int64_t n) {
  using L = Lanes<T>;
  if (n < L::kPack) return L::value(*x);
  const auto v = L::load(x);
  return typename L::C(sum_lanes(v.a + v.b) / L::kPack);
}

// In one pass, with values shifted by one near the mean, which keeps their digits. Where it turns out to be far from
// the mean (by more than two deviations), squares have lost digits, and another pass follows with a better one.
template <class T, bool Center>
NS_ONE_COPY Moments block_moments(const Problem &p, const Source<T> &x, const Offset &set, const Block &b) {
  using L = Lanes<T>;
  using C = typename L::C;
  Moments m;
  m.n = b.count();
  C shift = Center ? near_mean(x.at(set, p.erased.at(b.first)) + b.begin, b.size) : C(0);
  for (int trial = 0;; ++trial) {
    Accumulator<T> sum, squares;
    const auto level = spread<L>(shift);
    sweep_lines<T>(
        b.first, b.last, b.size, [&](int64_t k) { return x.at(set, p.erased.at(k)) + b.begin; },
        [&](const T *row, int64_t i, auto span, auto slot) {
          auto v = span.load(row + i, shift);
          if constexpr (Center) v = v - level, sum.part[slot] = sum.part[slot] + v;
          squares.part[slot] = multiply_add(v, v, squares.part[slot]);
        },
        [&] {
          if constexpr (Center) sum.fold();
          squares.fold();
        });
    m.squares = squares.total();
    if constexpr (!Center) return m;
    const double total = sum.total(), mean = total / m.n, off = mean * total;
    m.pivot = shift, m.mean = mean, m.squares -= off;
    if (!(off > 4 * m.squares) || trial == 3) break;
    shift = C(shift + mean);
  }
  if (m.squares < 0) m.squares = 0;
  return m;
}

// In double throughout, for sets whose squares leave the range of float, and for those with an infinity or a NaN.
// each_row(f) calls f(row, its elements) for all n elements.
template <class T, class F>
Moments wide_moments(double n, bool center, F &&each_row) {
  constexpr int lanes = 8;
  Moments m;
  m.n = n;
  for (int pass = center ? 0 : 1; pass < 2; ++pass) {
    double s[lanes] = {}, q[lanes] = {};
    each_row([&](const T *row, int64_t size) {
      for (int64_t i = 0; i < size; i += lanes) {
        const int some = int(std::min<int64_t>(lanes, size - i));
        for (int j = 0; j < some; ++j) {
          const double d = Lanes<T>::value(row[i + j]) - m.pivot;
          s[j] += d, q[j] += d * d;
        }
      }
    });
    double sum = 0, squares = 0;
    for (int j = 0; j < lanes; ++j) sum += s[j], squares += q[j];
    m.squares = squares;
    if (center && pass == 0) m.pivot = sum / m.n;
    if (center && pass == 1) m.mean = sum / m.n, m.squares -= m.mean * sum;
  }
  if (m.squares < 0) m.squares = 0;
  return m;
}

// ---- y

template <class T>
using Apply = void (*)(const T *x, T *y, int64_t n, const Scale<typename Lanes<T>::C> &s,
                       const typename Lanes<T>::C *factor, const typename Lanes<T>::C *bias, const T *ahead);

// One segment. Each: factor and bias have one value an element, else one for all. Memory would rest meanwhile, so what
// is read next, `ahead`, is sent for; it may be null.
template <class T, bool Center, bool Each, bool Bias, bool Round, bool Stream>
void apply(const T *x, T *y, int64_t n, const Scale<typename Lanes<T>::C> &s, const typename Lanes<T>::C *factor,
           const typename Lanes<T>::C *bias, const T *ahead) {
  using L = Lanes<T>;
  using P = typename L::P;
  if (Stream && !aligned(y)) return apply<T, Center, Each, Bias, Round, false>(x, y, n, s, factor, bias, ahead);
  const P high = spread<L>(s.high), minus = spread<L>(s.minus), inverse = spread<L>(s.inverse);
  const P one_factor = spread<L>(*factor), one_bias = spread<L>(Bias ? *bias : 0);
  const P joint = inverse * one_factor, rest = multiply_add(minus, one_factor, one_bias);
  sweep<T>(n, [&](int64_t i, auto span, auto) {
    P v = span.load(x + i, 0);
    if (ahead) send_for<T>(ahead + i);
    if constexpr (Center) v = v - high;
    if constexpr (!Each && !Round) {
      v = Center || Bias ? multiply_add(v, joint, rest) : v * joint;
    } else {
      v = Center ? multiply_add(v, inverse, minus) : v * inverse;
      if constexpr (Round) v = L::round(v);
      const P f = Each ? load_lanes<L>(factor + i) : one_factor;
      if constexpr (Bias) {
        v = multiply_add(v, f, Each ? load_lanes<L>(bias + i) : one_bias);
      } else {
        v = v * f;
      }
    }
    span.template store<Stream>(y + i, v);
  });
}

template <class T>
Apply<T> pick_apply(bool center, bool each, bool bias, bool round, bool stream) {
  constexpr bool half = sizeof(T) == 2, can_stream = sizeof(T) <= 4;
  return with(center, [=](auto c) {
    return with(each, [=](auto e) {
      return with(bias, [=](auto b) {
        return with(round && half, [=](auto r) {
          return with(stream && can_stream, [=](auto s) -> Apply<T> {
            return apply<T, c, e, b, half && r, can_stream && s>;
          });
        });
      });
    });
  });
}

template <class T>
void add_segments(const T *x, const T *residual, T *sum, int64_t n) {
  sweep<T>(n, [&](int64_t i, auto span, auto) {
    span.template store<false>(sum + i, span.load(x + i, 0) + span.load(residual + i, 0));
  });
}

// ---- drivers

// Short sets are gone through some at a time: while the statistics of one wait for its last sums, those of the others
// proceed.
constexpr int kAtATime = 4;
constexpr int64_t kShort = 2048;

template <class T>
class RowsForward {
 public:
  using C = typename Lanes<T>::C;

  RowsForward(const NsCall &call, const Problem &problem)
      : c(call),
        p(problem),
        r(call.recipe, problem),
        cut(problem, false),
        threads(threads_for(call, problem)),
        parameters(call, problem, r, true),
        apply(pick_apply<T>(r.center, p.inner_p != 0, parameters.bias != nullptr, r.round_first, streams<T>(p))),
        source{static_cast<const T *>(c.residual ? c.sum : c.x), c.residual != nullptr} {}

  int by_batch() {
    if (!parameters) return NS_NO_MEMORY;
    if (inside(p, cut, threads)) return by_blocks();
    const int at_a_time = p.set_size <= kShort ? kAtATime : 1;
    const bool far = from_afar<T>(p, 1);
    return parallel_for(ceil_div(p.sets, at_a_time), threads, [&](int64_t task) {
      Offset set[kAtATime];
      Moments m[kAtATime];
      Scale<C> s[kAtATime];
      const int n = int(std::min<int64_t>(at_a_time, p.sets - task * at_a_time));
      for (int i = 0; i < n; ++i) {
        set[i] = p.kept.at(task * at_a_time + i);
        for (int64_t k = 0; k < cut.blocks; ++k) m[i].add(moments(set[i], cut.at(k)));
      }
      for (int i = 0; i < n; ++i) s[i] = finish(set[i], m[i]);
      if (!c.y) return;
      for (int i = n; i-- > 0;) {
        const int64_t next = (task + 1) * at_a_time + i;
        const bool more = far && next < p.sets;
        const Offset ahead = more ? p.kept.at(next) : Offset{};
        for (int64_t k = cut.blocks; k-- > 0;) put(set[i], cut.at(k), s[i], more ? &ahead : nullptr);
      }
    });
  }

  int by_stored() {
    if (!parameters) return NS_NO_MEMORY;
    return parallel_for(p.sets * cut.blocks, threads, [&](int64_t i) {
      const Offset set = p.kept.at(i / cut.blocks);
      put(set, cut.at(i % cut.blocks), stored_scale<C>(c, r, set.s), nullptr);
    });
  }

 private:
  const NsCall &c;
  const Problem &p;
  const Recipe r;
  const Cut cut;
  const int threads;
  const Parameters<T> parameters;
  const Apply<T> apply;
  const Source<T> source;

  int by_blocks() {
    Scratch memory(sizeof(Moments) * p.sets * cut.blocks + sizeof(Scale<C>) * p.sets);
    if (!memory) return NS_NO_MEMORY;
    Moments *of_block = memory.as<Moments>();
    Scale<C> *of_set = reinterpret_cast<Scale<C> *>(of_block + p.sets * cut.blocks);
    parallel_for(p.sets * cut.blocks, threads, [&](int64_t i) {
      of_block[i] = moments(p.kept.at(i / cut.blocks), cut.at(i % cut.blocks));
    });
    parallel_for(p.sets, threads, [&](int64_t i) {
      Moments m;
      for (int64_t k = 0; k < cut.blocks; ++k) m.add(of_block[i * cut.blocks + k]);
      of_set[i] = finish(p.kept.at(i), m);
    });
    if (!c.y) return NS_DONE;
    return each_block_backwards(
        p, cut, threads, [&](int64_t i, int64_t k) { put(p.kept.at(i), cut.at(k), of_set[i], nullptr); });
  }

  Moments moments(const Offset &set, const Block &b) const {
    if (c.residual)
      for (int64_t k = b.first; k < b.last; ++k) {
        const Offset segment = p.erased.at(k);
        const int64_t x = set.x + segment.x + b.begin, y = set.y + segment.y + b.begin;
        add_segments(static_cast<const T *>(c.x) + x, static_cast<const T *>(c.residual) + x,
                     static_cast<T *>(c.sum) + y, b.size);
      }
    return r.center ? block_moments<T, true>(p, source, set, b) : block_moments<T, false>(p, source, set, b);
  }

  NS_ONE_COPY Scale<C> finish(const Offset &set, Moments m) const {
    if constexpr (sizeof(C) == 4) {
      if (!r.fits_float(m.squares))
        m = wide_moments<T>(m.n, r.center, [&](auto &&f) {
          for (int64_t k = 0; k < cut.segments; ++k) f(source.at(set, p.erased.at(k)), p.inner);
        });
    }
    const Mean<C> mean = Mean<C>::of(m.pivot, m.mean);
    const double root = r.root(m.squares);
    put_statistics<C>(c, p, r.center, set.s, mean, root);
    return scale<C>(mean, r.inverse(root));
  }

  void put(const Offset &set, const Block &b, const Scale<C> &s, const Offset *ahead) const {
    for (int64_t k = b.last; k-- > b.first;) {
      const Offset segment = p.erased.at(k);
      const T *x = source.at(set, segment) + b.begin;
      T *y = static_cast<T *>(c.y) + set.y + segment.y + b.begin;
      const int64_t at = set.p + segment.p + (p.inner_p ? b.begin : 0);
      apply(x, y, b.size, s, parameters.factor + parameters.factor_at(at),
            parameters.bias ? parameters.bias + parameters.runs.at(at) : nullptr,
            ahead ? static_cast<const T *>(c.x) + ahead->x + segment.x + b.begin : nullptr);
    }
  }
};

template <class T>
int rows_norm(const NsCall &c, const Problem &p) {
  using C = typename Lanes<T>::C;
  if (p.elements == 0) {  // sets of nothing have no mean
    const bool center = c.recipe.options & 1;
    constexpr C nan = std::numeric_limits<C>::quiet_NaN();
    if (c.stats) std::fill_n(static_cast<C *>(c.stats), (center ? 3 : 1) * p.sets, nan);
    return NS_DONE;
  }
  return fenced(RowsForward<T>(c, p).by_batch());
}

template <class T>
int rows_fixed(const NsCall &c, const Problem &p) {
  return p.elements == 0 ? int(NS_DONE) : fenced(RowsForward<T>(c, p).by_stored());
}

}  // namespace ns
