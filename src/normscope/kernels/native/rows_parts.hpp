// What the kernels of rows share: how a set is cut into blocks, the walk over packs, and parameters of each element.
//
// A set is a number of segments of `inner` contiguous elements. How it is cut depends on its shape alone, and what blocks
// yield is merged in their order, so that a result has the same bits for any number of threads.
#pragma once
#include <algorithm>
#include <cstdint>
#include <optional>
#include <type_traits>

#include "lower.hpp"
#include "normscope.h"
#include "parallel.hpp"
#include "recipe.hpp"
#include "vec.hpp"

namespace ns {

constexpr int64_t kBlock = 4096;    // elements summed in compute precision before double takes over; 16 KiB of float32
constexpr int64_t kSerial = 32768;  // fewer elements than this are not worth waking a second thread

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int threads_for(const NsCall &c, const Problem &p) { return p.elements < kSerial ? 1 : c.threads; }

// ---- cutting a set

// Elements [begin, begin + size) of each of the segments [first, last).
struct Block {
  int64_t first, last, begin, size;
  double count() const { return double(last - first) * double(size); }
};

// A long segment is several blocks; several short ones are one block, unless each must stand `alone`.
struct Cut {
  int64_t inner, segments, pieces, piece, together = 1, blocks;

  Cut(const Problem &p, bool alone) : inner(p.inner), segments(p.erased.count()) {
    piece = ceil_div(ceil_div(inner, ceil_div(inner, kBlock)), 64) * 64;  // whole packs of every dtype
    pieces = ceil_div(inner, piece);
    if (pieces == 1 && !alone) together = std::clamp<int64_t>(kBlock / inner, 1, segments);
    blocks = pieces > 1 ? segments * pieces : ceil_div(segments, together);
  }

  Block at(int64_t i) const {
    if (pieces == 1) return {i * together, std::min((i + 1) * together, segments), 0, inner};
    const int64_t segment = i / pieces, begin = (i - segment * pieces) * piece;
    return {segment, segment + 1, begin, std::min(piece, inner - begin)};
  }
};

// Sets are few and long: threads share one set instead of taking one each.
inline bool inside(const Problem &p, const Cut &cut, int threads) {
  return threads > 1 && cut.blocks > 1 && p.sets < 4 * int64_t(threads);
}

// body(set, block) for every block of every set, the last one first: it is still in the cache after a pass forwards.
template <class F>
int each_block_backwards(const Problem &p, const Cut &cut, int threads, F &&body) {
  const int64_t last = p.sets * cut.blocks - 1;
  return parallel_for(last + 1, threads, [&](int64_t task) {
    const int64_t set = (last - task) / cut.blocks;
    body(set, (last - task) - set * cut.blocks);
  });
}

// ---- packs

template <class T>
struct Whole {
  using L = Lanes<T>;
  NS_INLINE typename L::P load(const T *p, typename L::C) const { return L::load(p); }
  NS_INLINE void store(T *p, typename L::P v) const { L::store(p, v); }
  NS_INLINE void stream(T *p, typename L::P v) const { L::stream(p, v); }
};
template <class T>
struct Part {
  using L = Lanes<T>;
  int n;
  NS_INLINE typename L::P load(const T *p, typename L::C fill) const { return L::load_part(p, n, fill); }
  NS_INLINE void store(T *p, typename L::P v) const { L::store_part(p, v, n); }
  NS_INLINE void stream(T *p, typename L::P v) const { store(p, v); }
};

// f(i, span, slot) for every pack of n elements: i where it starts, span how to load and store it, slot which of two sets
// of accumulators is free.
template <class T, class F>
NS_INLINE void sweep(int64_t n, F &&f) {
  constexpr int64_t pack = Lanes<T>::kPack;
  constexpr std::integral_constant<int, 0> even;
  constexpr std::integral_constant<int, 1> odd;
  int64_t i = 0;
  for (; i + 2 * pack <= n; i += 2 * pack) {
    f(i, Whole<T>{}, even);
    f(i + pack, Whole<T>{}, odd);
  }
  if (i + pack <= n) f(i, Whole<T>{}, even), i += pack;
  if (i < n) f(i, Part<T>{int(n - i)}, odd);
}

template <class L>
NS_INLINE typename L::P load_lanes(const typename L::C *p) {
  return {load_raw<typename L::V>(p), load_raw<typename L::V>(p + L::kWide)};
}
template <class L>
NS_INLINE void store_lanes(typename L::C *p, typename L::P v) {
  store_raw(p, v.a), store_raw(p + L::kWide, v.b);
}

// f(std::true_type) or f(std::false_type): a flag of the call becomes one of the compiler.
template <class F>
NS_INLINE auto with(bool flag, F &&f) {
  return flag ? f(std::true_type{}) : f(std::false_type{});
}

// f(S{}) with the element type of a dtype code.
template <class F>
NS_INLINE auto with_dtype(int dtype, F &&f) {
  switch (dtype) {
    case NS_FLOAT32: return f(float{});
    case NS_BFLOAT16: return f(BFloat16{});
    case NS_FLOAT16: return f(Float16{});
    default: return f(double{});
  }
}

// ---- streaming stores

// Outputs of more bytes than this bypass the caches.
constexpr int64_t kStream = int64_t{1} << 40;

template <class T>
bool streams(const Problem &p) {
  return Lanes<T>::kStreams && p.elements * int64_t(sizeof(T)) > kStream;
}
inline bool aligned(const void *p) { return reinterpret_cast<uintptr_t>(p) % 64 == 0; }

// ---- parameters of each element

// Arrays over the parameters in compute precision, in the order of lanes. Parameters come in runs of `inner`; each run is
// padded to whole packs, so that the last pack of a segment can be read like any other.
template <class T>
struct Runs {
  using L = Lanes<T>;
  int64_t inner, runs, pitch;

  explicit Runs(const Problem &p)
      : inner(p.inner), runs(p.parameters / p.inner), pitch(ceil_div(p.inner, L::kPack) * L::kPack) {}

  int64_t size() const { return runs * pitch; }
  // Where the parameter of number p stands, p the first of a run or a whole number of packs after it.
  int64_t at(int64_t p) const {
    if (pitch == inner || runs == 1) return p;
    const int64_t run = p / inner;
    return run * pitch + (p - run * inner);
  }
};

// (offset + source) * gain, laid out in lanes; source of type S.
template <class T, class S>
void to_lanes(const Runs<T> &runs, const S *source, double offset, double gain, typename Lanes<T>::C *out) {
  using L = Lanes<T>;
  using C = typename L::C;
  const bool plain = offset == 0 && gain == 1;
  for (int64_t run = 0; run < runs.runs; ++run) {
    const S *from = source + run * runs.inner;
    C *to = out + run * runs.pitch;
    for (int64_t i = 0; i < runs.inner; i += L::kPack) {
      C value[L::kPack] = {};
      const int n = int(std::min<int64_t>(L::kPack, runs.inner - i));
      if constexpr (std::is_same_v<S, T>) {
        if (plain) {
          store_lanes<L>(to + i, n == L::kPack ? L::load(from + i) : L::load_part(from + i, n, 0));
          continue;
        }
      }
      for (int j = 0; j < n; ++j) value[j] = plain ? C(Lanes<S>::value(from[i + j])) : C((offset + Lanes<S>::value(from[i + j])) * gain);
      for (int j = 0; j < L::kPack; ++j) to[i + lane_of<T>(j)] = value[j];
    }
  }
}

// The factors (offset + weight) * gain and biases of each element; `bias` is null where there is none.
template <class T>
class Each {
 public:
  using L = Lanes<T>;
  using C = typename L::C;
  const Runs<T> runs;
  const C *factor = nullptr, *bias = nullptr;

  Each(const NsCall &c, const Problem &p, const Recipe &r, bool with_bias) : runs(p) {
    const bool usable = !L::kSplit && runs.pitch == runs.inner && c.weight_dtype == (sizeof(C) == 4 ? NS_FLOAT32 : NS_FLOAT64);
    const bool own_factor = !(usable && c.weight && r.offset == 0 && r.gain == 1);
    const bool own_bias = with_bias && c.bias && !usable;
    if (!own_factor) factor = static_cast<const C *>(c.weight);
    if (with_bias && usable) bias = static_cast<const C *>(c.bias);
    if (!own_factor && !own_bias) return;
    memory_.emplace((own_factor + own_bias) * runs.size() * sizeof(C));
    if (!*memory_) return;
    C *next = memory_->template as<C>();
    if (own_factor) {
      if (c.weight) {
        fill(c.weight, c.weight_dtype, r.offset, r.gain, next);
      } else {
        std::fill(next, next + runs.size(), C(r.gain));
      }
      factor = next, next += runs.size();
    }
    if (own_bias) fill(c.bias, c.weight_dtype, 0, 1, next), bias = next;
  }

  explicit operator bool() const { return factor != nullptr; }

 private:
  std::optional<Scratch> memory_;

  void fill(const void *source, int dtype, double offset, double gain, C *out) {
    with_dtype(dtype, [&](auto type) {
      to_lanes<T>(runs, static_cast<const decltype(type) *>(source), offset, gain, out);
    });
  }
};

// ---- statistics

// What a set is shifted and scaled by: xhat = (x - high) * inverse + minus, the mean being high + low and minus -low *
// inverse. So its rounding costs nothing.
template <class C>
struct Scale {
  C high, minus, inverse;
};

// A mean as the sum of two values of C: the nearest one, and what that lost.
template <class C>
struct Mean {
  C high, low;
  // Of a + b, a being a value of C.
  static Mean of(double a, double b) {
    const C high = C(a + b);
    const double part = double(high) - a;
    return {high, C((a - (double(high) - part)) + (b - part))};
  }
};

template <class C>
Scale<C> scale(Mean<C> mean, double inverse) {
  return {mean.high, C(-double(mean.low) * inverse), C(inverse)};
}

// By stored statistics.
template <class C>
Scale<C> stored_scale(const NsCall &c, const Recipe &r, int64_t set) {
  const double mean = r.center ? value_at(c.mean, c.stored_dtype, set) : 0;
  return scale<C>(Mean<C>::of(0, mean), r.inverse_of_variance(value_at(c.var, c.stored_dtype, set)));
}

// Rows of the array of statistics.
template <class C>
void put_statistics(const NsCall &c, const Problem &p, bool center, int64_t set, Mean<C> mean, double root) {
  C *out = static_cast<C *>(c.stats);
  if (!out) return;
  if (center) out[set] = mean.high, out[p.sets + set] = mean.low, out += 2 * p.sets;
  out[set] = C(root);
}

}  // namespace ns
