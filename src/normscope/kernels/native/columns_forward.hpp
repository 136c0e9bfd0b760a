// Columns: normalization, by a call's own statistics or by stored ones.
#pragma once
#include <cstdint>
#include <cstring>

#include "columns_lines.hpp"
#include "columns_plan.hpp"
#include "columns_sets.hpp"
#include "parallel.hpp"

namespace ns {
namespace columns {

// Outputs of more bytes than this are written past the caches: they would not stay in a core's own, and memory need not be
// read before it is written. Measured to pay for float32 alone, also where the next operator reads the output at once.
constexpr int64_t kStreamBytes = 8 << 20;

template <class T>
bool streams(const Context<T> &x, const void *out) {
  const auto whole = [](const Loops &loops) {
    return std::all_of(loops.loop, loops.loop + loops.n, [](const Loop &l) { return l.y * sizeof(T) % 64 == 0; });
  };
  return sizeof(T) == 4 && x.p.p.elements * int64_t(sizeof(T)) > kStreamBytes && uintptr_t(out) % 64 == 0 &&
         whole(x.p.p.kept) && whole(x.p.p.erased);
}

// f(std::true_type) or f(std::false_type).
template <class F>
NS_INLINE void with(bool flag, F &&f) {
  if (flag) {
    f(std::true_type{});
  } else {
    f(std::false_type{});
  }
}

template <class T, class F>
NS_INLINE void with_stream(bool stream, F &&f) {
  if constexpr (sizeof(T) == 4) {
    columns::with(stream, f);
  } else {
    f(std::false_type{});
  }
}

template <class T>
void apply_lines(const Context<T> &x, int64_t outer, const Offset &at, int64_t begin, int64_t end, const Span &s,
                 const Affine<T> &by, bool stream) {
  using C = Compute<T>;
  const Plan &p = x.p;
  const auto go = [&](const Stretch<T> &lines, int64_t line) {
    with_stream<T>(stream, [&](auto streaming) {
      if (!p.line_parameters && !x.r.round_first) {
        apply<T, streaming.value>(lines, by.mean, by.scale, by.shift);
        return;
      }
      columns::with(x.r.round_first, [&](auto round) {
        const C *factor = x.factor(outer), *bias = x.bias(outer);
        const auto go_by = [&](auto parameters) {
          apply_parameters<T, streaming.value, round.value>(lines, by.mean, by.scale, by.shift, parameters);
        };
        if (p.element_parameters) {
          factor += line * p.padded + s.begin, bias += line * p.padded + s.begin;
          go_by([=, pitch = p.padded](int64_t l, int64_t j) {
            return Parameters<T>{get<T>(factor + l * pitch + j), get<T>(bias + l * pitch + j)};
          });
        } else if (p.line_parameters) {
          factor += line, bias += line;
          go_by([=](int64_t l, int64_t) { return Parameters<T>{every<T>(factor[l]), every<T>(bias[l])}; });
        } else {
          factor += s.begin, bias += s.begin;
          go_by([=](int64_t, int64_t j) { return Parameters<T>{get<T>(factor + j), get<T>(bias + j)}; });
        }
      });
    });
  };
  const T *from = (const T *)x.c.x + at.x + s.begin;
  T *to = (T *)x.c.y + at.y + s.begin;
  p.stretches(at, begin, end, [&](const Offset &o, int64_t line, int64_t n, const Loop &loop) {
    go({from + o.x, to + o.y, loop.x, loop.y, n, s.width}, line);
  });
  if (const int64_t width = p.rest_in(s); width && end == p.lines)
    go({from + p.rest_at().x, to + p.rest_at().y, 0, 0, 1, width}, 0);
  if (stream) stream_fence();
}

// Moments, sets, and arrays to apply, for tasks that see a span of an outer position from beginning to end.
template <class T>
void moments(const Context<T> &x, const Offset &at, int64_t begin, int64_t end, const Span &s, const Moments &m,
             Compute<T> *work) {
  columns::with(x.r.center, [&](auto center) {
    moments_of<T, center.value>(x.p, (const T *)x.c.x, at, begin, end, s, m, work);
  });
}

template <class T>
void finish(const Context<T> &x, int64_t outer, const Offset &at, const Span &s, const Moments *m, Sets<T> &sets,
            const Affine<T> &by) {
  if (m) {
    join_columns(x, s, *m, at, sets);
    put_statistics(x, at, s, sets);
  } else {
    get_stored(x, at, s, sets);
  }
  spread(x, outer, s, sets, !x.p.line_parameters && !x.r.round_first, by);
}

// Every outer position a tile at a time: read, and gone over again from the cache.
template <class T>
int forward_near(const Context<T> &x, bool own, bool stream) {
  using C = Compute<T>;
  const Plan &p = x.p;
  return parallel_for(p.outer * p.tiles, p.threads, [&](int64_t task) -> int {
    const int64_t outer = task / p.tiles;
    const Span s = p.span(task % p.tiles);
    const Offset at = p.p.kept.at(outer);
    Arrays memory(3 * s.padded * (sizeof(C) + sizeof(double)) + Sets<T>::bytes(x.sets(s)) + 3 * 64);
    if (!memory) return NS_NO_MEMORY;
    const Moments m = Moments::in(memory.take<double>(3 * s.padded), s.padded);
    C *arrays = memory.take<C>(3 * s.padded);
    Sets<T> sets(memory, x.sets(s));
    if (own) moments(x, at, 0, p.lines, s, m, arrays);
    const Affine<T> by = Affine<T>::in(arrays, s.padded);
    finish(x, outer, at, s, own ? &m : nullptr, sets, by);
    if (x.c.y) apply_lines(x, outer, at, 0, p.lines, s, by, stream);
    return NS_DONE;
  });
}

// All chunks are read, then the sets finished, then all chunks gone over, the last one first.
template <class T>
int forward_far(const Context<T> &x, bool own, bool stream) {
  using C = Compute<T>;
  const Plan &p = x.p;
  const int64_t tasks = p.outer * p.chunks * p.tiles;
  Arrays memory((own ? p.outer * p.chunks * 3 * p.padded * 8 : 0) + p.outer * 3 * p.padded * int64_t(sizeof(C)) + 128);
  if (!memory) return NS_NO_MEMORY;
  double *sums = memory.take<double>(own ? p.outer * p.chunks * 3 * p.padded : 0);
  C *arrays = memory.take<C>(p.outer * 3 * p.padded);
  const auto chunk = [&](int64_t outer, int64_t k, const Span &s) {
    return Moments::in(sums + (outer * p.chunks + k) * 3 * p.padded + s.begin, p.padded);
  };
  const auto lines = [&](const Offset &at, int64_t k) {
    return std::clamp<int64_t>(p.lines_at(at) - k * p.chunk, 0, p.chunk);
  };
  const auto each = [&](int64_t task, auto &&body) {
    const int64_t part = task / p.tiles, outer = part / p.chunks, k = part % p.chunks;
    body(outer, k, p.span(task % p.tiles));
  };
  if (own) {
    const int result = parallel_for(tasks, p.threads, [&](int64_t task) -> int {
      int done = NS_DONE;
      each(task, [&](int64_t outer, int64_t k, const Span &s) {
        Arrays own_memory(3 * s.padded * sizeof(C));
        if (!own_memory) {
          done = NS_NO_MEMORY;
          return;
        }
        const Offset at = p.p.kept.at(outer);
        moments(x, at, k * p.chunk, k * p.chunk + lines(at, k), s, chunk(outer, k, s), own_memory.take<C>(3 * s.padded));
      });
      return done;
    });
    if (result != NS_DONE) return result;
  }
  const int64_t spans = p.apart ? p.tiles : 1;
  const int result = parallel_for(p.outer * spans, p.threads, [&](int64_t task) -> int {
    const int64_t outer = task / spans;
    const Span s = p.apart ? p.span(task % spans) : p.whole();
    Arrays own_memory(Sets<T>::bytes(x.sets(s)));
    if (!own_memory) return NS_NO_MEMORY;
    Sets<T> sets(own_memory, x.sets(s));
    const Offset at = p.p.kept.at(outer);
    const Moments m = own ? chunk(outer, 0, s) : Moments{};
    for (int64_t k = 1; own && k < p.chunks; ++k)
      merge(x.r.center, double(k * p.chunk), m, double(lines(at, k)), chunk(outer, k, s), s.padded);
    finish(x, outer, at, s, own ? &m : nullptr, sets,
           Affine<T>::in(arrays + outer * 3 * p.padded + s.begin, p.padded));
    return NS_DONE;
  });
  if (result != NS_DONE || !x.c.y) return result;
  return parallel_for(tasks, p.threads, [&](int64_t task) {
    each(tasks - 1 - task, [&](int64_t outer, int64_t k, const Span &s) {
      const Offset at = p.p.kept.at(outer);
      apply_lines(x, outer, at, k * p.chunk, k * p.chunk + lines(at, k), s,
                  Affine<T>::in(arrays + outer * 3 * p.padded + s.begin, p.padded), stream);
    });
  });
}

template <class T>
void add_residual(const NsCall &c, const Problem &p) {
  const int64_t lines = p.erased.count();
  parallel_for(p.kept.count() * lines, p.elements < kSerialElements ? 1 : c.threads, [&](int64_t task) {
    const Offset outer = p.kept.at(task / lines), line = p.erased.at(task % lines);
    const int64_t x = outer.x + line.x, y = outer.y + line.y;
    add((const T *)c.x + x, (const T *)c.residual + x, (T *)c.sum + y, p.inner);
  });
}

// A mask is of lines whose parameters are the same.
inline bool serves(const NsCall &c, const Problem &p) {
  for (int i = 0; c.mask && i < p.erased.n; ++i)
    if (p.erased.loop[i].p) return false;
  return true;
}

// Zeros in the lines that do not count.
template <class T>
void clear_masked(const Context<T> &x, T *to) {
  constexpr int64_t some = 64;
  const Problem &p = x.p.p;
  const int64_t lines = p.erased.count(), parts = ceil_div(lines, some);
  parallel_for(p.kept.count() * parts, x.p.threads, [&](int64_t task) {
    const Offset outer = p.kept.at(task / parts);
    const int64_t begin = task % parts * some;
    for (int64_t l = begin; l < std::min(begin + some, lines); ++l) {
      const Offset line = p.erased.at(l);
      if (!x.c.mask[outer.m + line.m]) std::memset((void *)(to + outer.y + line.y), 0, p.inner * sizeof(T));
    }
  });
}

template <class T>
int forward(const NsCall &c, const Problem &problem, bool own) {
  if (problem.elements == 0) return NS_DONE;
  if (!serves(c, problem)) return NS_UNSERVED;
  const Context<T> x(c, problem);
  if (!x) return NS_NO_MEMORY;
  const bool stream = streams(x, c.y);
  const int result = x.p.near ? forward_near(x, own, stream) : forward_far(x, own, stream);
  if (c.mask && c.y) clear_masked(x, (T *)c.y);
  return result;
}

}  // namespace columns
}  // namespace ns
