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
  void add(const Moments &o) {
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

// In one pass, with values shifted by one near the mean, which keeps their digits. Where it turns out to be far from the
// mean (by more than two deviations), squares have lost digits, and another pass follows with a better one.
template <class T, bool Center>
Moments block_moments(const Problem &p, const Source<T> &x, const Offset &set, const Block &b) {
  using L = Lanes<T>;
  using C = typename L::C;
  using V = typename L::V;
  Moments m;
  m.n = b.count();
  C shift = Center ? near_mean(x.at(set, p.erased.at(b.first)) + b.begin, b.size) : C(0);
  for (int trial = 0;; ++trial) {
    V s[4] = {}, q[4] = {};
    for (int64_t k = b.first; k < b.last; ++k) {
      const T *row = x.at(set, p.erased.at(k)) + b.begin;
      sweep<T>(b.size, [&](int64_t i, auto span, auto slot) {
        constexpr int j = 2 * decltype(slot)::value;
        auto v = span.load(row + i, shift);
        if constexpr (Center) {
          v.a -= shift, v.b -= shift;
          s[j] += v.a, s[j + 1] += v.b;
        }
        q[j] += v.a * v.a, q[j + 1] += v.b * v.b;
      });
    }
    m.squares = sum_lanes((q[0] + q[1]) + (q[2] + q[3]));
    if constexpr (!Center) return m;
    const double sum = sum_lanes((s[0] + s[1]) + (s[2] + s[3])), mean = sum / m.n, off = mean * sum;
    m.pivot = shift, m.mean = mean, m.squares -= off;
    if (!(off > 4 * m.squares) || trial == 3) break;
    shift = C(shift + mean);
  }
  if (m.squares < 0) m.squares = 0;
  return m;
}

// In double throughout, for sets whose squares leave the range of float, and for those with an infinity or a NaN.
template <class T>
Moments wide_moments(const Problem &p, const Source<T> &x, const Offset &set, bool center) {
  constexpr int lanes = 8;
  Moments m;
  m.n = double(p.set_size);
  const int64_t segments = p.erased.count();
  for (int pass = center ? 0 : 1; pass < 2; ++pass) {
    double s[lanes] = {}, q[lanes] = {};
    for (int64_t k = 0; k < segments; ++k) {
      const T *row = x.at(set, p.erased.at(k));
      for (int64_t i = 0; i < p.inner; i += lanes) {
        const int n = int(std::min<int64_t>(lanes, p.inner - i));
        for (int j = 0; j < n; ++j) {
          const double d = Lanes<T>::value(row[i + j]) - m.pivot;
          s[j] += d, q[j] += d * d;
        }
      }
    }
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
                       const typename Lanes<T>::C *factor, const typename Lanes<T>::C *bias);

// One segment. Each: factor and bias have one value an element, else one for all.
template <class T, bool Center, bool Each_, bool Bias, bool Round, bool Stream>
void apply(const T *x, T *y, int64_t n, const Scale<typename Lanes<T>::C> &s, const typename Lanes<T>::C *factor,
           const typename Lanes<T>::C *bias) {
  using L = Lanes<T>;
  using C = typename L::C;
  using V = typename L::V;
  using P = typename L::P;
  if (Stream && !aligned(y)) return apply<T, Center, Each_, Bias, Round, false>(x, y, n, s, factor, bias);
  const C high = s.high, minus = s.minus, inverse = s.inverse;
  const C one_factor = *factor, one_bias = Bias ? *bias : C(0);
  const C joint = inverse * one_factor, constant = minus * one_factor + one_bias;
  sweep<T>(n, [&](int64_t i, auto span, auto) {
    P v = span.load(x + i, C(0));
    if constexpr (Center) v.a -= high, v.b -= high;
    if constexpr (!Each_ && !Round) {
      if constexpr (Center || Bias) {
        v.a = v.a * joint + constant, v.b = v.b * joint + constant;
      } else {
        v.a *= joint, v.b *= joint;
      }
    } else {
      if constexpr (Center) {
        v.a = v.a * inverse + minus, v.b = v.b * inverse + minus;
      } else {
        v.a *= inverse, v.b *= inverse;
      }
      if constexpr (Round) v = L::round(v);
      P f{V{} + one_factor, V{} + one_factor}, add{V{} + one_bias, V{} + one_bias};
      if constexpr (Each_) f = load_lanes<L>(factor + i);
      if constexpr (Each_ && Bias) add = load_lanes<L>(bias + i);
      if constexpr (Bias) {
        v.a = v.a * f.a + add.a, v.b = v.b * f.b + add.b;
      } else {
        v.a *= f.a, v.b *= f.b;
      }
    }
    if constexpr (Stream) {
      span.stream(y + i, v);
    } else {
      span.store(y + i, v);
    }
  });
  if constexpr (Stream) stream_fence();
}

template <class T>
Apply<T> pick_apply(bool center, bool each, bool bias, bool round, bool stream) {
  return with(center, [=](auto c) {
    return with(each, [=](auto e) {
      return with(bias, [=](auto b) {
        return with(round && sizeof(T) == 2, [=](auto r) {
          return with(stream, [=](auto s) -> Apply<T> {
            return apply<T, decltype(c)::value, decltype(e)::value, decltype(b)::value,
                         decltype(r)::value && sizeof(T) == 2, decltype(s)::value>;
          });
        });
      });
    });
  });
}

template <class T>
void add_segments(const T *x, const T *residual, T *sum, int64_t n) {
  sweep<T>(n, [&](int64_t i, auto span, auto) {
    const auto a = span.load(x + i, 0), b = span.load(residual + i, 0);
    span.store(sum + i, {a.a + b.a, a.b + b.b});
  });
}

// ---- drivers

template <class T>
class RowsForward {
 public:
  using C = typename Lanes<T>::C;

  RowsForward(const NsCall &call, const Problem &problem)
      : c(call), p(problem), r(call.recipe, problem), cut(problem, false), threads(threads_for(call, problem)) {
    if (p.inner_p) each.emplace(c, p, r, true);
    apply = pick_apply<T>(r.center, p.inner_p != 0, p.inner_p ? each->bias != nullptr : c.bias != nullptr,
                          r.round_first, streams<T>(p));
    source = {static_cast<const T *>(c.residual ? c.sum : c.x), c.residual != nullptr};
    // Where eps drowns them, squares too small for float need no second look.
    least = r.eps_at == NS_VARIANCE && r.eps >= 1e-20 ? 0 : 1e-30;
  }

  int by_batch() {
    if (p.inner_p && !*each) return NS_NO_MEMORY;
    if (!inside(p, cut, threads)) {
      return parallel_for(p.sets, threads, [&](int64_t i) {
        const Offset set = p.kept.at(i);
        Moments m;
        for (int64_t k = 0; k < cut.blocks; ++k) m.add(moments(set, cut.at(k)));
        const Scale<C> s = finish(set, m);
        for (int64_t k = cut.blocks; k-- > 0;) put(set, cut.at(k), s);
      });
    }
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
    return each_block_backwards(p, cut, threads, [&](int64_t i, int64_t k) { put(p.kept.at(i), cut.at(k), of_set[i]); });
  }

  int by_stored() {
    if (p.inner_p && !*each) return NS_NO_MEMORY;
    return parallel_for(p.sets * cut.blocks, threads, [&](int64_t i) {
      const Offset set = p.kept.at(i / cut.blocks);
      put(set, cut.at(i % cut.blocks), stored_scale<C>(c, r, set.s));
    });
  }

 private:
  const NsCall &c;
  const Problem &p;
  const Recipe r;
  const Cut cut;
  const int threads;
  std::optional<Each<T>> each;
  Apply<T> apply;
  Source<T> source;
  double least;

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

  Scale<C> finish(const Offset &set, Moments m) const {
    if constexpr (sizeof(C) == 4) {
      const bool in_range = m.squares >= least * m.n && m.squares <= std::numeric_limits<double>::max();
      if (!in_range) m = wide_moments<T>(p, source, set, r.center);
    }
    const Mean<C> mean = Mean<C>::of(m.pivot, m.mean);
    const double root = r.root(m.squares);
    put_statistics<C>(c, p, r.center, set.s, mean, root);
    return scale<C>(mean, r.inverse(root));
  }

  void put(const Offset &set, const Block &b, const Scale<C> &s) const {
    for (int64_t k = b.last; k-- > b.first;) {
      const Offset segment = p.erased.at(k);
      const T *x = source.at(set, segment) + b.begin;
      T *y = static_cast<T *>(c.y) + set.y + segment.y + b.begin;
      const int64_t at = set.p + segment.p;
      if (p.inner_p) {
        const int64_t lane = each->runs.at(at + b.begin);
        apply(x, y, b.size, s, each->factor + lane, each->bias ? each->bias + lane : nullptr);
      } else {
        const C factor = factor_at<C>(c, r, at), bias = bias_at<C>(c, at);
        apply(x, y, b.size, s, &factor, &bias);
      }
    }
  }
};

template <class T>
int rows_norm(const NsCall &c, const Problem &p) {
  using C = typename Lanes<T>::C;
  if (p.elements == 0) {  // sets of nothing have no mean
    const bool center = c.recipe.options & 1;
    if (c.stats) std::fill_n(static_cast<C *>(c.stats), (center ? 3 : 1) * p.sets, std::numeric_limits<C>::quiet_NaN());
    return NS_DONE;
  }
  return RowsForward<T>(c, p).by_batch();
}

template <class T>
int rows_fixed(const NsCall &c, const Problem &p) {
  return p.elements == 0 ? int(NS_DONE) : RowsForward<T>(c, p).by_stored();
}

}  // namespace ns
