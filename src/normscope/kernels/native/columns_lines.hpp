// Columns: loops over lines, some columns wide. Arrays of one value a column (`about`, `scale`, ..) are compute values in
// lane order, padded to whole packs.
#pragma once
#include <cstdint>

#include "lower.hpp"
#include "vec.hpp"

namespace ns {
namespace columns {

template <class T>
using Compute = typename Lanes<T>::C;
template <class T>
using PackOf = typename Lanes<T>::P;

template <class T>
NS_INLINE PackOf<T> every(Compute<T> value) {
  const typename Lanes<T>::V v = value - typename Lanes<T>::V{};
  return {v, v};
}

// How many elements of a pack there are.
struct Whole {};
struct Part {
  int n;
};
template <class T>
NS_INLINE PackOf<T> read(const T *p, Whole) {
  return Lanes<T>::load(p);
}
template <class T>
NS_INLINE PackOf<T> read(const T *p, Part part) {
  return Lanes<T>::load_part(p, part.n, 0);
}
template <bool Stream, class T>
NS_INLINE void write(T *p, PackOf<T> v, Whole) {
  if constexpr (Stream) {
    Lanes<T>::stream(p, v);
  } else {
    Lanes<T>::store(p, v);
  }
}
template <bool Stream, class T>
NS_INLINE void write(T *p, PackOf<T> v, Part part) {
  Lanes<T>::store_part(p, v, part.n);
}

// One value a column.
template <class T>
NS_INLINE PackOf<T> get(const Compute<T> *p) {
  using V = typename Lanes<T>::V;
  return {load_raw<V>(p), load_raw<V>(p + Lanes<T>::kWide)};
}
template <class T>
NS_INLINE void put(Compute<T> *p, PackOf<T> v) {
  store_raw(p, v.a), store_raw(p + Lanes<T>::kWide, v.b);
}

// body(column, Whole or Part) for each pack of a line.
template <class T, class Body>
NS_INLINE void each_pack(int64_t width, Body &&body) {
  constexpr int64_t pack = Lanes<T>::kPack;
  int64_t j = 0;
  for (; j + pack <= width; j += pack) body(j, Whole{});
  if (j < width) body(j, Part{int(width - j)});
}

// body(first line, lines at once as a constant): arrays of one value a column are then read once for several lines.
template <int At>
struct Lines {
  static constexpr int n = At;
};
// Sums go by these lines first: of equal terms, one added to a sum of many is rounded the same way each time.
template <class Body>
NS_INLINE void several_lines(int64_t lines, Body &&body) {
  int64_t l = 0;
  for (; l + 4 <= lines; l += 4) body(l, Lines<4>{});
  for (; l < lines; ++l) body(l, Lines<1>{});
}

// Reads ahead of a first pass over memory that the caches do not hold, by whole lines: the processor's own reading ahead
// stops at the borders of pages, and fetches what lies beyond a tile.
constexpr int64_t kAheadBytes = 8 << 10;
template <class T>
int64_t lines_ahead(int64_t stride) {
  const int64_t bytes = magnitude(stride) * int64_t(sizeof(T));
  return bytes ? (kAheadBytes + bytes - 1) / bytes * stride : 0;
}
template <class T>
NS_INLINE void fetch(const T *p) {
  __builtin_prefetch(p);
  if (sizeof(T) * Lanes<T>::kPack > 64) __builtin_prefetch((const char *)p + 64);
}

// Lines that are summed: of one stride, or under a mask, wherever they are.
template <class T>
struct Strided {
  const T *first;
  int64_t stride;
  NS_INLINE const T *operator()(int64_t line) const { return first + line * stride; }
};
template <class T>
struct Listed {
  const T *const *list;
  int64_t stride;  // of most
  NS_INLINE const T *operator()(int64_t line) const { return list[line]; }
};
constexpr int64_t kMostListed = 64;

// sum += x - about, squares += (x - about)^2; without Center about is 0 and only squares are summed.
template <class T, bool Center, class Rows>
void add_moments(const Rows x, int64_t lines, int64_t width, const Compute<T> *about, Compute<T> *sum,
                 Compute<T> *squares) {
  const int64_t ahead = lines_ahead<T>(x.stride);
  several_lines(lines, [&](int64_t l, auto at) {
    each_pack<T>(width, [&](int64_t j, auto part) {
      PackOf<T> q = every<T>(0);
      if constexpr (Center) {
        const PackOf<T> from = get<T>(about + j);
        PackOf<T> s = every<T>(0);
        for (int i = 0; i < at.n; ++i) {
          const T *line = x(l + i) + j;
          fetch(line + ahead);
          const PackOf<T> d = read(line, part) - from;
          s = s + d, q = multiply_add(d, d, q);
        }
        put<T>(sum + j, get<T>(sum + j) + s);
      } else {
        for (int i = 0; i < at.n; ++i) {
          const T *line = x(l + i) + j;
          fetch(line + ahead);
          const PackOf<T> v = read(line, part);
          q = multiply_add(v, v, q);
        }
      }
      put<T>(squares + j, get<T>(squares + j) + q);
    });
  });
}

// Two tensors' lines.
template <class T>
struct Stretch {
  const T *x;
  T *y;
  int64_t x_stride, y_stride, lines, width;
};

// y = (x - mean) * scale + shift
template <class T, bool Stream>
void apply(const Stretch<T> &at, const Compute<T> *mean, const Compute<T> *scale, const Compute<T> *shift) {
  several_lines(at.lines, [&](int64_t l, auto n) {
    each_pack<T>(at.width, [&](int64_t j, auto part) {
      const PackOf<T> m = get<T>(mean + j), f = get<T>(scale + j), b = get<T>(shift + j);
      for (int i = 0; i < n.n; ++i) {
        const PackOf<T> v = read(at.x + (l + i) * at.x_stride + j, part) - m;
        write<Stream>(at.y + (l + i) * at.y_stride + j, multiply_add(v, f, b), part);
      }
    });
  });
}

// The factor and the bias of a pack.
template <class T>
struct Parameters {
  PackOf<T> factor, bias;
};

// y = xhat * factor + bias with xhat = (x - mean) * scale + shift, rounded to T first with Round; parameters(line,
// column) gives the packs of factor and bias.
template <class T, bool Stream, bool Round, class F>
void apply_parameters(const Stretch<T> &at, const Compute<T> *mean, const Compute<T> *scale, const Compute<T> *shift,
                      F &&parameters) {
  for (int64_t l = 0; l < at.lines; ++l) {
    each_pack<T>(at.width, [&](int64_t j, auto part) {
      PackOf<T> v = read(at.x + l * at.x_stride + j, part) - get<T>(mean + j);
      v = multiply_add(v, get<T>(scale + j), get<T>(shift + j));
      if constexpr (Round) v = Lanes<T>::round(v);
      const Parameters<T> by = parameters(l, j);
      write<Stream>(at.y + l * at.y_stride + j, multiply_add(v, by.factor, by.bias), part);
    });
  }
}

// sum = x + residual
template <class T>
void add(const T *x, const T *residual, T *sum, int64_t width) {
  each_pack<T>(width, [&](int64_t j, auto part) {
    write<false>(sum + j, read(x + j, part) + read(residual + j, part), part);
  });
}

// Tensors' lines backwards: dy, dsum and dx have one stride.
template <class T>
struct BackStretch {
  const T *x, *dy, *dsum;
  T *dx;
  int64_t x_stride, y_stride, lines, width;
};

// sum += dy, product += dy * (x - mean)
template <class T, class Rows>
void add_products(const Rows x_lines, const Rows dy_lines, int64_t lines, int64_t width, const Compute<T> *mean,
                  Compute<T> *sum, Compute<T> *product) {
  const int64_t x_ahead = lines_ahead<T>(x_lines.stride), y_ahead = lines_ahead<T>(dy_lines.stride);
  several_lines(lines, [&](int64_t l, auto n) {
    each_pack<T>(width, [&](int64_t j, auto part) {
      const PackOf<T> m = get<T>(mean + j);
      PackOf<T> s = every<T>(0), q = every<T>(0);
      for (int i = 0; i < n.n; ++i) {
        const T *x = x_lines(l + i) + j, *dy = dy_lines(l + i) + j;
        fetch(x + x_ahead), fetch(dy + y_ahead);
        const PackOf<T> g = read(dy, part);
        s = s + g, q = multiply_add(g, read(x, part) - m, q);
      }
      put<T>(sum + j, get<T>(sum + j) + s), put<T>(product + j, get<T>(product + j) + q);
    });
  });
}

// The same with g = factor * dy and xhat = (x - mean) * scale + shift in place of dy and x - mean, the factor one of each
// line; and for each line the sums over its columns of dy and dy * xhat.
template <class T>
void add_products_lines(const BackStretch<T> &at, const Compute<T> *mean, const Compute<T> *scale,
                        const Compute<T> *shift, const Compute<T> *factor, Compute<T> *sum, Compute<T> *product,
                        double *line_sum, double *line_product) {
  const int64_t x_ahead = lines_ahead<T>(at.x_stride), y_ahead = lines_ahead<T>(at.y_stride);
  for (int64_t l = 0; l < at.lines; ++l) {
    const PackOf<T> f = every<T>(factor[l]);
    PackOf<T> over = every<T>(0), over_product = every<T>(0);
    each_pack<T>(at.width, [&](int64_t j, auto part) {
      const T *x = at.x + l * at.x_stride + j, *dy = at.dy + l * at.y_stride + j;
      fetch(x + x_ahead), fetch(dy + y_ahead);
      const PackOf<T> g = read(dy, part);
      PackOf<T> v = read(x, part) - get<T>(mean + j);
      v = multiply_add(v, get<T>(scale + j), get<T>(shift + j));
      over = over + g, over_product = multiply_add(g, v, over_product);
      const PackOf<T> fg = f * g;
      put<T>(sum + j, get<T>(sum + j) + fg);
      put<T>(product + j, multiply_add(fg, v, get<T>(product + j)));
    });
    line_sum[l] += sum_lanes(over.a) + sum_lanes(over.b);
    line_product[l] += sum_lanes(over_product.a) + sum_lanes(over_product.b);
  }
}

// The same with a factor of each element, `pitch` from one line to the next, and sums of each element.
template <class T>
void add_products_elements(const BackStretch<T> &at, const Compute<T> *mean, const Compute<T> *scale,
                           const Compute<T> *shift, const Compute<T> *factor, Compute<T> *sum, Compute<T> *product,
                           double *element_sum, double *element_product, int64_t pitch) {
  constexpr int pack = Lanes<T>::kPack;
  for (int64_t l = 0; l < at.lines; ++l) {
    each_pack<T>(at.width, [&](int64_t j, auto part) {
      const PackOf<T> g = read(at.dy + l * at.y_stride + j, part);
      PackOf<T> v = read(at.x + l * at.x_stride + j, part) - get<T>(mean + j);
      v = multiply_add(v, get<T>(scale + j), get<T>(shift + j));
      const PackOf<T> fg = get<T>(factor + l * pitch + j) * g;
      put<T>(sum + j, get<T>(sum + j) + fg);
      put<T>(product + j, multiply_add(fg, v, get<T>(product + j)));
      Compute<T> terms[2 * pack];
      put<T>(terms, g), put<T>(terms + pack, g * v);
      for (int i = 0; i < pack; ++i) {
        element_sum[l * pitch + j + i] += double(terms[i]);
        element_product[l * pitch + j + i] += double(terms[pack + i]);
      }
    });
  }
}

// dx = (dy * slope + (x - mean) * curve + level) * inverse + dsum, dy given its factor first by factors(line, column, dy).
template <class T, bool Stream, bool Sum, class F>
void apply_back(const BackStretch<T> &at, const Compute<T> *mean, const Compute<T> *slope, const Compute<T> *curve,
                const Compute<T> *level, const Compute<T> *inverse, F &&factors) {
  several_lines(at.lines, [&](int64_t l, auto n) {
    each_pack<T>(at.width, [&](int64_t j, auto part) {
      const PackOf<T> m = get<T>(mean + j), a = get<T>(slope + j), b = get<T>(curve + j), c = get<T>(level + j);
      const PackOf<T> r = get<T>(inverse + j);
      for (int i = 0; i < n.n; ++i) {
        const PackOf<T> g = factors(l + i, j, read(at.dy + (l + i) * at.y_stride + j, part));
        PackOf<T> d = multiply_add(read(at.x + (l + i) * at.x_stride + j, part) - m, b, c);
        d = multiply_add(g, a, d);
        d = Sum ? multiply_add(d, r, read(at.dsum + (l + i) * at.y_stride + j, part)) : d * r;
        write<Stream>(at.dx + (l + i) * at.y_stride + j, d, part);
      }
    });
  });
}

// dx = dy * slope + dsum, as above.
template <class T, bool Sum, class F>
void apply_back_fixed(const BackStretch<T> &at, const Compute<T> *slope, F &&factors) {
  for (int64_t l = 0; l < at.lines; ++l) {
    each_pack<T>(at.width, [&](int64_t j, auto part) {
      PackOf<T> d = factors(l, j, read(at.dy + l * at.y_stride + j, part)) * get<T>(slope + j);
      if constexpr (Sum) d = d + read(at.dsum + l * at.y_stride + j, part);
      write<false>(at.dx + l * at.y_stride + j, d, part);
    });
  }
}

}  // namespace columns
}  // namespace ns
