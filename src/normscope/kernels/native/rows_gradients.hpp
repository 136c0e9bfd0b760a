// Passes of the kernels of rows backwards. With g = factor * dy, per set: the sums of g and of g xhat, then
//   dx = (g - sum g / n - xhat q sum(g xhat) / N) / D
// (normscope.h), and for the parameters dy xhat and dy, summed over what each is shared by.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "rows_parts.hpp"

namespace ns {

// dx = g * inverse + xhat * slope + level.
template <class C>
struct Gradient {
  Scale<C> x;
  C slope, level;
};

// Which terms dx has: of stored statistics, of a scale alone, of both statistics.
enum Form { kFixed, kScaled, kCentered };

struct Sums {
  double dy = 0, dy_xhat = 0;
};

template <class T, Form F>
NS_INLINE typename Lanes<T>::P normalized(typename Lanes<T>::P x, const Scale<typename Lanes<T>::C> &s) {
  using L = Lanes<T>;
  if constexpr (F == kScaled) return x * spread<L>(s.inverse);
  return multiply_add(x - spread<L>(s.high), spread<L>(s.inverse), spread<L>(s.minus));
}

// One segment of what the tensors hold, or a part of one, and what is read after it, which is sent for meanwhile.
template <class T>
struct Line {
  const T *x, *dy, *dsum;
  T *dx;
  Gradient<typename Lanes<T>::C> k;
  const T *next_x, *next_dy;

  NS_INLINE void send_for_next(int64_t i) const {
    if (next_x) send_for<T>(next_x + i), send_for<T>(next_dy + i);
  }
};

// Sums over n elements of each of the lines at(k): of factor * dy where each element has a factor, else of dy.
template <class T, Form F, bool Each, class At>
Sums sums_of(int64_t first, int64_t last, int64_t n, const Scale<typename Lanes<T>::C> &s,
             const typename Lanes<T>::C *factor, At &&at) {
  using L = Lanes<T>;
  Accumulator<T> one, two;
  sweep_lines<T>(
      first, last, n, at,
      [&](const Line<T> &line, int64_t i, auto span, auto slot) {
        // Beyond the end dy is 0 and x the mean, so that xhat is finite there.
        const auto xhat = normalized<T, F>(span.load(line.x + i, s.high), s);
        auto g = span.load(line.dy + i, 0);
        if constexpr (Each) g = g * load_lanes<L>(factor + i);
        one.part[slot] = one.part[slot] + g;
        two.part[slot] = multiply_add(g, xhat, two.part[slot]);
      },
      [&] { one.fold(), two.fold(); });
  return {one.total(), two.total()};
}

// dx = g * inverse + (xhat * slope + level)
template <class T, Form F>
NS_INLINE typename Lanes<T>::P dx_of(const Gradient<typename Lanes<T>::C> &k, typename Lanes<T>::P g,
                                     typename Lanes<T>::P xhat) {
  using L = Lanes<T>;
  auto d = g * spread<L>(k.x.inverse);
  if constexpr (F == kScaled) d = multiply_add(xhat, spread<L>(k.slope), d);
  if constexpr (F == kCentered) d = d + multiply_add(xhat, spread<L>(k.slope), spread<L>(k.level));
  return d;
}

// The same, and what reaches the sum from elsewhere.
template <class T, Form F, bool Stream, class Span>
NS_INLINE void put_dx(const Line<T> &line, int64_t i, Span span, typename Lanes<T>::P g, typename Lanes<T>::P xhat) {
  auto d = dx_of<T, F>(line.k, g, xhat);
  if (line.dsum) d = d + span.load(line.dsum + i, 0);
  span.template store<Stream>(line.dx + i, d);
}

// R lines with a factor for each element, and their share of the parameters' gradients, loaded once for all R.
// Grads: 0 none, 1 of the weight, 2 also of the bias.
template <class T, Form F, int R, int Grads, bool Dx, bool Stream>
void dx_each(const Line<T> *lines, int64_t n, const typename Lanes<T>::C *factor, typename Lanes<T>::C *dweight,
             typename Lanes<T>::C *dbias) {
  using L = Lanes<T>;
  using P = typename L::P;
  Line<T> line[R];
  std::copy(lines, lines + R, line);
  const auto step = [&](int64_t i, auto span) {
    const P f = load_lanes<L>(factor + i);
    P w{}, b{};  // of these lines alone: of equal terms, one added to a sum of many is rounded the same way each time
    for (int k = 0; k < R; ++k) {
      const P dy = span.load(line[k].dy + i, 0);
      line[k].send_for_next(i);
      const P xhat = normalized<T, F>(span.load(line[k].x + i, line[k].k.x.high), line[k].k.x);
      if constexpr (Grads > 0) w = multiply_add(dy, xhat, w);
      if constexpr (Grads > 1) b = b + dy;
      if constexpr (Dx) put_dx<T, F, Stream>(line[k], i, span, dy * f, xhat);
    }
    if constexpr (Grads > 0) store_lanes<L>(dweight + i, load_lanes<L>(dweight + i) + w);
    if constexpr (Grads > 1) store_lanes<L>(dbias + i, load_lanes<L>(dbias + i) + b);
  };
  int64_t i = 0;
  for (; i + L::kPack <= n; i += L::kPack) step(i, Whole<T>{});
  if (i < n) step(i, Part<T>{int(n - i)});
}

// One line with one factor.
template <class T, Form F, bool Stream>
void dx_one(const Line<T> &given, int64_t n, typename Lanes<T>::C factor) {
  using L = Lanes<T>;
  const Line<T> line = given;
  sweep<T>(n, [&](int64_t i, auto span, auto) {
    const auto g = span.load(line.dy + i, 0) * spread<L>(factor);
    line.send_for_next(i);
    const auto xhat = F == kFixed ? g : normalized<T, F>(span.load(line.x + i, line.k.x.high), line.k.x);
    put_dx<T, F, Stream>(line, i, span, g, xhat);
  });
}

// What both drivers below know of a call.
template <class T, Form F>
class RowsBackward {
 public:
  using C = typename Lanes<T>::C;

 protected:
  const NsCall &c;
  const Problem &p;
  const Recipe r;
  const Parameters<T> parameters;
  const Cut cut;
  const int threads;
  const bool grads, stream, far;

  RowsBackward(const NsCall &call, const Problem &problem, bool alone)
      : c(call),
        p(problem),
        r(call.recipe, problem),
        parameters(call, problem, r, false),
        cut(problem, alone),
        threads(threads_for(call, problem)),
        grads(call.dweight || call.dbias),
        stream(streams<T>(problem)),
        far(from_afar<T>(problem, 2)) {}

  // Whether the sums of each set are needed: not those that are given, nor for an affine map.
  bool summed() const { return F != kFixed && !c.sums; }

  // The factors are left in the sums over g by the caller.
  Gradient<C> gradient(int64_t set, const Scale<C> &s, Sums g) const { return gradient(set, s, g, r); }
  // `of`: the recipe for the number of elements of the set.
  NS_ONE_COPY Gradient<C> gradient(int64_t set, const Scale<C> &s, Sums g, const Recipe &of) const {
    if constexpr (F == kFixed) return {s, 0, 0};
    const double motion = of.motion(double(root(set)));
    double slope = motion * g.dy_xhat / of.divisor, level = F == kCentered ? g.dy / of.n : 0;
    if (c.sums) level = F == kCentered ? c.sums[set] : 0, slope = motion * c.sums[p.sets + set];
    return {s, C(-slope * double(s.inverse)), C(-level * double(s.inverse))};
  }

  Scale<C> scale_of(int64_t set) const { return scale_of(set, r); }
  NS_ONE_COPY Scale<C> scale_of(int64_t set, const Recipe &of) const {
    if constexpr (F == kFixed) return stored_scale<C>(c, of, set);
    const C *stats = static_cast<const C *>(c.stats);
    Mean<C> mean{0, 0};
    if constexpr (F == kCentered) mean = {stats[set], stats[p.sets + set]};
    return scale<C>(mean, of.inverse(double(root(set))));
  }

  // `next`: the set that is read after this one, or null.
  Line<T> line(const Offset &set, const Offset &segment, int64_t begin, const Gradient<C> &k = {},
               const Offset *next = nullptr) const {
    const int64_t x = segment.x + begin, y = segment.y + begin;
    const T *all_x = static_cast<const T *>(c.x) + x, *all_dy = static_cast<const T *>(c.dy) + y;
    return {all_x + set.x,
            all_dy + set.y,
            c.dsum ? static_cast<const T *>(c.dsum) + y + set.y : nullptr,
            c.dx ? static_cast<T *>(c.dx) + y + set.y : nullptr,
            k,
            next ? all_x + next->x : nullptr,
            next ? all_dy + next->y : nullptr};
  }

 private:
  C root(int64_t set) const { return static_cast<const C *>(c.stats)[(F == kCentered ? 2 * p.sets : 0) + set]; }
};

}  // namespace ns
