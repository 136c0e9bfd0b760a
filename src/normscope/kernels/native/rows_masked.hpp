// Rows under a mask. Sums go over what counts, gathered block by block: they are those of a tensor that never had the
// rest, bit for bit, and so nothing depends on how far a batch was padded. y and dx are gone over where they lie.
//
// A set is a number of streams, one for each parameter that it uses (the channels of a group); the elements that count
// are the same in each.
#pragma once
#include <cstdint>
#include <cstring>

#include "compact.hpp"
#include "mask.hpp"
#include "rows_forward.hpp"
#include "rows_gradients.hpp"

namespace ns {

// Bytes as lanes. By hand, since GCC moves them one by one.
template <class I>
NS_INLINE I lanes_of(const uint8_t *bytes) {
  I lanes;
#if defined(__AVX512F__)
  if constexpr (sizeof(lanes[0]) == 4) {
    lanes = I(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)bytes)));
  } else {
    lanes = I(_mm512_cvtepi8_epi64(_mm_loadl_epi64((const __m128i *)bytes)));
  }
#elif defined(__AVX2__)
  __m256i half[2];
  if constexpr (sizeof(lanes[0]) == 4) {
    half[0] = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)bytes));
    half[1] = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(bytes + 8)));
  } else {
    half[0] = _mm256_cvtepi8_epi64(_mm_cvtsi32_si128(load_raw<int>(bytes)));
    half[1] = _mm256_cvtepi8_epi64(_mm_cvtsi32_si128(load_raw<int>(bytes + 4)));
  }
  std::memcpy(&lanes, half, sizeof lanes);
#else
  constexpr int n = sizeof lanes / sizeof lanes[0];
  for (int i = 0; i < n; ++i) lanes[i] = bytes[i];
#endif
  return lanes;
}

// What counts of a pack, 0 elsewhere.
template <class T>
NS_INLINE typename Lanes<T>::P chosen(const uint8_t *valid, typename Lanes<T>::P v, Whole<T>) {
  using L = Lanes<T>;
  using I = std::conditional_t<sizeof(typename L::C) == 4, i32x16, i64x8>;
  I a, b;
  if constexpr (L::kSplit) {
    const u32x16 both = __builtin_convertvector(load_raw<u16x16>(valid), u32x16);
    a = I(both & 0xffu), b = I(both >> 8);
  } else {
    a = lanes_of<I>(valid), b = lanes_of<I>(valid + L::kWide);
  }
  const typename L::V zero{};
  return {a != 0 ? v.a : zero, b != 0 ? v.b : zero};
}
template <class T>
NS_INLINE typename Lanes<T>::P chosen(const uint8_t *valid, typename Lanes<T>::P v, Part<T> part) {
  alignas(64) uint8_t few[Lanes<T>::kPack] = {};
  copy_few(few, valid, part.n);
  if (part.n & 1) few[part.n - 1] = valid[part.n - 1];
  return chosen<T>(few, v, Whole<T>{});
}

// f(i, span, whether stores may stream) for every pack of n elements, in places that may overlap at the end: a whole pack
// takes less time than a part of one.
template <class T, bool Stream, class F>
NS_INLINE void sweep_over(int64_t n, F &&f) {
  constexpr int64_t pack = Lanes<T>::kPack;
  int64_t i = 0;
  for (; i + pack <= n; i += pack) f(i, Whole<T>{}, std::bool_constant<Stream>{});
  if (i == n) return;
  if (n >= pack) {
    f(n - pack, Whole<T>{}, std::false_type{});
  } else {
    f(i, Part<T>{int(n - i)}, std::false_type{});
  }
}

// One segment: y = (x - high) * (inverse * factor) + rest where it counts, else 0. All is fused by hand here, since an
// element has the same bits wherever in a segment it stands.
template <class T, bool Stream>
void apply_masked(const T *x, const uint8_t *valid, T *y, int64_t n, const Scale<typename Lanes<T>::C> &s,
                  typename Lanes<T>::C factor, typename Lanes<T>::C bias) {
  using L = Lanes<T>;
  using P = typename L::P;
  const P high = spread<L>(s.high), f = spread<L>(factor);
  const P joint = spread<L>(s.inverse) * f, rest = fused(spread<L>(s.minus), f, spread<L>(bias));
  sweep_over<T, Stream>(n, [&](int64_t i, auto span, auto past) {
    const P v = fused(span.load(x + i, 0) - high, joint, rest);
    span.template store<past>(y + i, chosen<T>(valid + i, v, span));
  });
}

// dx = g * inverse + (xhat * slope + level); where nothing is centered, high, minus and level are 0.
template <class T, bool Stream>
void dx_masked(const Line<T> &given, const uint8_t *valid, int64_t n, typename Lanes<T>::C factor) {
  using L = Lanes<T>;
  using P = typename L::P;
  const Line<T> line = given;
  const Scale<typename L::C> &s = line.k.x;
  const P high = spread<L>(s.high), minus = spread<L>(s.minus), inverse = spread<L>(s.inverse);
  const P slope = spread<L>(line.k.slope), level = spread<L>(line.k.level);
  sweep_over<T, Stream>(n, [&](int64_t i, auto span, auto past) {
    const P g = span.load(line.dy + i, 0) * spread<L>(factor);
    const P xhat = fused(span.load(line.x + i, s.high) - high, inverse, minus);
    span.template store<past>(line.dx + i, chosen<T>(valid + i, fused(g, inverse, fused(xhat, slope, level)), span));
  });
}

// The streams of a set, and their elements that count.
template <class T>
class Streams {
 public:
  // Memory of a block. What is compacted at its end may be some elements more.
  struct Gathered {
    alignas(64) T elements[kBlock + Valid::kMixed + kOverrun];
  };

  Loops own, segments;  // of a set: one step a stream; and of a stream
  const Valid valid;

  Streams(const NsCall &c, const Problem &p)
      : own(some(p, true)), segments(some(p, false)), valid(c, p, segments, innermost(p), true) {}

  // Of a set: how many count, and how many blocks they are.
  int64_t count(const Offset &set) const { return own.count() * valid.count(set.r); }
  int64_t most_blocks() const { return valid.most() ? own.count() * Cut(valid.most(), 1, true).blocks : 0; }

  // f(offset of the stream, number of the block in its set, first of those that count, how many) for each block of a set.
  template <class F>
  void each_block(const Offset &set, F &&f) const {
    const int64_t n = valid.count(set.r), streams = own.count();
    if (n == 0) return;
    const Cut cut(n, 1, true);
    for (int64_t stream = 0; stream < streams; ++stream)
      for (int64_t k = 0; k < cut.blocks; ++k) {
        const Block b = cut.at(k);
        f(at(set, stream), stream * cut.blocks + k, b.begin, b.size);
      }
  }
  // The same for one block by its number, where the set has so many.
  template <class F>
  void block(const Offset &set, int64_t number, F &&f) const {
    const int64_t n = valid.count(set.r);
    if (n == 0) return;
    const Cut cut(n, 1, true);
    const int64_t stream = number / cut.blocks;
    if (stream >= own.count()) return;
    const Block b = cut.at(number - stream * cut.blocks);
    f(at(set, stream), number, b.begin, b.size);
  }

  // Elements of a block side by side: where they lie, if they lie so, else in `memory`. `start` is of the stream.
  template <bool AsY>
  const T *gathered(const T *start, int64_t row, int64_t begin, int64_t n, Gathered &memory) const {
    const T *lie = nullptr;
    T *next = memory.elements;
    valid.each(row, begin, begin + n, [&](const Counted &at, int64_t count, int64_t skip, int64_t some) {
      const T *from = start + (AsY ? at.y : at.x);
      if (count < at.size) {
        compact(from, valid.bytes(at), at.size, next);
        if (skip) std::memmove(static_cast<void *>(next), next + skip, std::size_t(some) * sizeof(T));
      } else if (some == n) {
        lie = from + skip;
      } else {
        std::memcpy(static_cast<void *>(next), from + skip, std::size_t(some) * sizeof(T));
      }
      next += some;
    });
    return lie ? lie : memory.elements;
  }

 private:
  static Loops some(const Problem &p, bool with_parameters) {
    Loops loops;
    for (int i = 0; i < p.erased.n; ++i)
      if ((p.erased.loop[i].p != 0) == with_parameters) loops.push(p.erased.loop[i]);
    return loops;
  }
  static Loop innermost(const Problem &p) {
    Loop l;
    l.size = p.inner, l.x = l.y = 1, l.m = p.inner_m;
    return l;
  }
  Offset at(const Offset &set, int64_t stream) const {
    const Offset o = own.at(stream);
    return {set.x + o.x, set.y + o.y, set.p + o.p, set.s, 0, set.r};
  }
};

// What both ways through share: the walk over elements where they lie.
template <class T>
class RowsMasked {
 public:
  using C = typename Lanes<T>::C;

  // Whether these kernels can: one parameter a stream, one mask for all streams of a set.
  static bool serves(const NsCall &c, const Problem &p) {
    bool can = !p.inner_p && !c.residual && !c.dsum && !c.sums && !(c.recipe.options & 32);
    for (int i = 0; i < p.erased.n; ++i) can = can && !(p.erased.loop[i].p && p.erased.loop[i].m);
    return can;
  }

 protected:
  const NsCall &c;
  const Problem &p;
  const Recipe r;
  const Parameters<T> parameters;
  const Streams<T> streams_;
  const Cut places;
  const int threads;
  const bool stream;

  RowsMasked(const NsCall &call, const Problem &problem, bool with_bias)
      : c(call),
        p(problem),
        r(call.recipe, problem),
        parameters(call, problem, r, with_bias),
        streams_(call, problem),
        places(problem, false),
        threads(threads_for(call, problem)),
        stream(streams<T>(problem)) {}

  bool ready() const { return parameters && streams_.valid; }
  bool split() const { return threads > 1 && streams_.most_blocks() > 1 && p.sets < 4 * int64_t(threads); }
  Recipe recipe(const Offset &set) const { return r.of(double(streams_.count(set))); }

  // f(offset of the place in its set, where its elements begin, how many, which count) for each place of a block, the last
  // one first: it is still in the cache. Which count is null where all do, and a place where none does is `empty`.
  template <class F, class Empty>
  void each_place(const Offset &set, const Block &b, F &&f, Empty &&empty) const {
    for (int64_t k = b.last; k-- > b.first;) {
      const Offset segment = p.erased.at(k);
      const uint8_t *valid = c.mask + set.m + segment.m;
      if (p.inner_m) {
        f(segment, b.begin, b.size, valid + b.begin);
      } else if (*valid) {
        f(segment, b.begin, b.size, nullptr);
      } else {
        empty(segment, b.begin, b.size);
      }
    }
  }

  C factor(int64_t at) const { return parameters.factor[parameters.factor_at(at)]; }
};

template <class T>
class RowsMaskedForward : RowsMasked<T> {
  using Base = RowsMasked<T>;
  using C = typename Base::C;
  using Base::c, Base::p, Base::r, Base::parameters, Base::streams_, Base::places, Base::threads, Base::stream;

 public:
  RowsMaskedForward(const NsCall &call, const Problem &problem) : Base(call, problem, true) {
    whole_.inner = kBlock;
  }

  int run() {
    if (!this->ready()) return NS_NO_MEMORY;
    if (!this->split())
      return parallel_for(p.sets, threads, [&](int64_t i) {
        const Offset set = p.kept.at(i);
        Moments m;
        streams_.each_block(set, [&](const Offset &at, int64_t, int64_t begin, int64_t n) {
          m.add(moments(at, begin, n));
        });
        const Scale<C> s = finish(set, m);
        if (!c.y) return;
        for (int64_t k = places.blocks; k-- > 0;) put(set, places.at(k), s);
      });
    const int64_t most = streams_.most_blocks();
    Scratch memory(sizeof(Moments) * p.sets * most + sizeof(Scale<C>) * p.sets);
    if (!memory) return NS_NO_MEMORY;
    Moments *of_block = memory.as<Moments>();
    Scale<C> *of_set = reinterpret_cast<Scale<C> *>(of_block + p.sets * most);
    parallel_for(p.sets * most, threads, [&](int64_t i) {
      streams_.block(p.kept.at(i / most), i % most, [&](const Offset &at, int64_t, int64_t begin, int64_t n) {
        of_block[i] = moments(at, begin, n);
      });
    });
    parallel_for(p.sets, threads, [&](int64_t i) {
      const Offset set = p.kept.at(i);
      Moments m;
      streams_.each_block(set, [&](const Offset &, int64_t k, int64_t, int64_t) { m.add(of_block[i * most + k]); });
      of_set[i] = finish(set, m);
    });
    if (!c.y) return NS_DONE;
    return each_block_backwards(p, places, threads,
                                [&](int64_t i, int64_t k) { put(p.kept.at(i), places.at(k), of_set[i]); });
  }

 private:
  Problem whole_;  // of a gathered block

  const T *gathered(const Offset &at, int64_t begin, int64_t n, typename Streams<T>::Gathered &memory) const {
    return streams_.template gathered<false>(static_cast<const T *>(c.x) + at.x, at.r, begin, n, memory);
  }

  Moments moments(const Offset &at, int64_t begin, int64_t n) const {
    typename Streams<T>::Gathered memory;
    const Source<T> source{gathered(at, begin, n, memory), false};
    const Block block{0, 1, 0, n};
    return r.center ? block_moments<T, true>(whole_, source, Offset{}, block)
                    : block_moments<T, false>(whole_, source, Offset{}, block);
  }

  Scale<C> finish(const Offset &set, Moments m) const {
    const Recipe of = this->recipe(set);
    if constexpr (sizeof(C) == 4) {
      if (of.n > 0 && !of.fits_float(m.squares))
        m = wide_moments<T>(of.n, r.center, [&](auto &&f) {
          streams_.each_block(set, [&](const Offset &at, int64_t, int64_t begin, int64_t n) {
            typename Streams<T>::Gathered memory;
            f(gathered(at, begin, n, memory), n);
          });
        });
    }
    const Mean<C> mean = Mean<C>::of(m.pivot, m.mean);
    const double root = of.n > 0 ? of.root(m.squares) : 0;
    put_statistics<C>(c, p, r.center, set.s, mean, root);
    if (c.stats) static_cast<C *>(c.stats)[(r.center ? 3 : 1) * p.sets + set.s] = C(of.n);
    return scale<C>(mean, of.n > 0 ? of.inverse(root) : 0);
  }

  void put(const Offset &set, const Block &b, const Scale<C> &s) const {
    int64_t known = -1;  // the parameter at hand, mostly one for all
    C factor = 0, bias = 0;
    this->each_place(
        set, b,
        [&](const Offset &segment, int64_t begin, int64_t n, const uint8_t *valid) {
          const T *x = static_cast<const T *>(c.x) + set.x + segment.x + begin;
          T *y = this->y(set, segment, begin);
          if (const int64_t at = set.p + segment.p; at != known) {
            known = at, factor = this->factor(at);
            if (parameters.bias) bias = parameters.bias[parameters.runs.at(at)];
          }
          with(stream && aligned(y), [&](auto past) {
            constexpr bool streaming = sizeof(T) <= 4 && past;
            if (valid) {
              apply_masked<T, streaming>(x, valid, y, n, s, factor, bias);
            } else {
              apply<T, true, false, true, false, streaming>(x, y, n, s, &factor, &bias, nullptr);
            }
          });
        },
        [&](const Offset &segment, int64_t begin, int64_t n) { std::memset(y(set, segment, begin), 0, n * sizeof(T)); });
  }
  T *y(const Offset &set, const Offset &segment, int64_t begin) const {
    return static_cast<T *>(c.y) + set.y + segment.y + begin;
  }
};

template <class T, Form F>
class RowsMaskedBackward : RowsMasked<T> {
  using Base = RowsMasked<T>;
  using C = typename Base::C;
  using Base::c, Base::p, Base::r, Base::parameters, Base::streams_, Base::places, Base::threads, Base::stream;

 public:
  RowsMaskedBackward(const NsCall &call, const Problem &problem) : Base(call, problem, false) {}

  int run() {
    if (!this->ready()) return NS_NO_MEMORY;
    const int64_t most = streams_.most_blocks();
    Scratch memory(sizeof(Sums) * p.sets * most + sizeof(Gradient<C>) * p.sets);
    if (!memory) return NS_NO_MEMORY;
    Sums *of_block = memory.as<Sums>();
    Gradient<C> *of_set = reinterpret_cast<Gradient<C> *>(of_block + p.sets * most);
    if (this->split()) {
      parallel_for(p.sets * most, threads, [&](int64_t i) {
        const Offset set = p.kept.at(i / most);
        streams_.block(set, i % most, [&](const Offset &at, int64_t, int64_t begin, int64_t n) {
          of_block[i] = sums(at, begin, n, scale_of(set, this->recipe(set)));
        });
      });
      parallel_for(p.sets, threads, [&](int64_t i) { of_set[i] = gradient(p.kept.at(i), of_block + i * most); });
      if (c.dx)
        each_block_backwards(p, places, threads,
                             [&](int64_t i, int64_t k) { put(p.kept.at(i), places.at(k), of_set[i]); });
    } else {
      parallel_for(p.sets, threads, [&](int64_t i) {
        const Offset set = p.kept.at(i);
        const Scale<C> s = scale_of(set, this->recipe(set));
        streams_.each_block(set, [&](const Offset &at, int64_t k, int64_t begin, int64_t n) {
          of_block[i * most + k] = sums(at, begin, n, s);
        });
        if (!c.dx) return;
        const Gradient<C> k = gradient(set, of_block + i * most);
        for (int64_t b = places.blocks; b-- > 0;) put(set, places.at(b), k);
      });
    }
    return c.dweight || c.dbias ? fold(of_block, most) : int(NS_DONE);
  }

 private:
  Scale<C> scale_of(const Offset &set, const Recipe &of) const {
    const C *stats = static_cast<const C *>(c.stats) + set.s;
    Mean<C> mean{0, 0};
    if constexpr (F == kCentered) mean = {stats[0], stats[p.sets]};
    return scale<C>(mean, of.n > 0 ? of.inverse(root(set)) : 0);
  }
  double root(const Offset &set) const {
    return static_cast<const C *>(c.stats)[(F == kCentered ? 2 * p.sets : 0) + set.s];
  }

  Gradient<C> gradient(const Offset &set, const Sums *of_block) const {
    const Recipe of = this->recipe(set);
    const Scale<C> s = scale_of(set, of);
    // What is centered alone is always 0: not what rounding leaves of a difference.
    if (of.n == 0 || (F == kCentered && of.n == 1)) return {{s.high, 0, 0}, 0, 0};
    Sums g;
    streams_.each_block(set, [&](const Offset &at, int64_t k, int64_t, int64_t) {
      const double f = this->factor(at.p);
      g.dy += f * of_block[k].dy, g.dy_xhat += f * of_block[k].dy_xhat;
    });
    const double slope = of.motion(root(set)) * g.dy_xhat / of.divisor, level = F == kCentered ? g.dy / of.n : 0;
    return {s, C(-slope * double(s.inverse)), C(-level * double(s.inverse))};
  }

  Sums sums(const Offset &at, int64_t begin, int64_t n, const Scale<C> &s) const {
    typename Streams<T>::Gathered memory[2];
    const T *x = streams_.template gathered<false>(static_cast<const T *>(c.x) + at.x, at.r, begin, n, memory[0]);
    const T *dy = streams_.template gathered<true>(static_cast<const T *>(c.dy) + at.y, at.r, begin, n, memory[1]);
    const Line<T> line{x, dy, nullptr, nullptr, {}, nullptr, nullptr};
    return sums_of<T, F, false>(0, 1, n, s, nullptr, [&](int64_t) { return line; });
  }

  void put(const Offset &set, const Block &b, const Gradient<C> &k) const {
    this->each_place(
        set, b,
        [&](const Offset &segment, int64_t begin, int64_t n, const uint8_t *valid) {
          const int64_t x = set.x + segment.x + begin, y = set.y + segment.y + begin;
          const Line<T> line{static_cast<const T *>(c.x) + x, static_cast<const T *>(c.dy) + y, nullptr,
                             static_cast<T *>(c.dx) + y,      k,                                nullptr,
                             nullptr};
          const C factor = this->factor(set.p + segment.p);
          with(stream && aligned(line.dx), [&](auto past) {
            constexpr bool streaming = sizeof(T) <= 4 && past;
            if (valid) {
              dx_masked<T, streaming>(line, valid, n, factor);
            } else {
              dx_one<T, F, streaming>(line, n, factor);
            }
          });
        },
        [&](const Offset &segment, int64_t begin, int64_t n) {
          std::memset(static_cast<T *>(c.dx) + set.y + segment.y + begin, 0, n * sizeof(T));
        });
  }

  // Blocks of all sets in order, each added to its parameter.
  int fold(const Sums *of_block, int64_t most) const {
    Scratch memory(sizeof(Sums) * p.parameters);
    if (!memory) return NS_NO_MEMORY;
    Sums *total = memory.as<Sums>();
    std::fill(total, total + p.parameters, Sums{});
    for (int64_t i = 0; i < p.sets; ++i)
      streams_.each_block(p.kept.at(i), [&](const Offset &at, int64_t k, int64_t, int64_t) {
        const Sums &block = of_block[i * most + k];
        total[at.p].dy += block.dy, total[at.p].dy_xhat += block.dy_xhat;
      });
    for (int64_t i = 0; i < p.parameters; ++i) {
      if (c.dweight) put_at(c.dweight, c.weight_dtype, i, r.gain * total[i].dy_xhat);
      if (c.dbias) put_at(c.dbias, c.weight_dtype, i, total[i].dy);
    }
    return NS_DONE;
  }
};

template <class T>
int rows_masked(const NsCall &c, const Problem &p) {
  if (!RowsMasked<T>::serves(c, p)) return NS_UNSERVED;
  return fenced(RowsMaskedForward<T>(c, p).run());
}

template <class T>
int rows_masked_backward(const NsCall &c, const Problem &p) {
  if (!RowsMasked<T>::serves(c, p)) return NS_UNSERVED;
  return fenced(c.recipe.options & 1 ? RowsMaskedBackward<T, kCentered>(c, p).run()
                                     : RowsMaskedBackward<T, kScaled>(c, p).run());
}

}  // namespace ns
