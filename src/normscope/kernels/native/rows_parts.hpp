// What the kernels of rows share: how a set is cut into blocks, the walk over packs, and parameters of each element.
//
// A set is a number of segments of `inner` contiguous elements. How it is cut depends on its shape alone, and what
// blocks yield is merged in their order, so that a result has the same bits for any number of threads.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <type_traits>

#include "lower.hpp"
#include "normscope.h"
#include "parallel.hpp"
#include "recipe.hpp"
#include "vec.hpp"

namespace ns {

constexpr int64_t kBlock = 2048;    // elements whose sums are merged with those of others
constexpr int64_t kTerms = 16;      // added one after another in compute precision, then double takes over
constexpr int64_t kSerial = 65536;  // fewer elements than this, 10 to 15 us of work, are not worth waking a second thread

// Two copies of one expression, inlined at two places, may be contracted to other fused operations and so differ in
// their last bit. What both ways through the kernels compute (threads between sets, threads inside a set) is one function.
#define NS_ONE_COPY __attribute__((noinline))

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

  Cut(const Problem &p, bool alone) : Cut(p.inner, p.erased.count(), alone) {}
  Cut(int64_t elements, int64_t lines, bool alone) : inner(elements), segments(lines) {
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
  template <bool Stream>
  NS_INLINE void store(T *p, typename L::P v) const {
    if constexpr (Stream) {
      L::stream(p, v);
    } else {
      L::store(p, v);
    }
  }
};
template <class T>
struct Part {
  using L = Lanes<T>;
  int n;
  NS_INLINE typename L::P load(const T *p, typename L::C fill) const { return L::load_part(p, n, fill); }
  template <bool Stream>
  NS_INLINE void store(T *p, typename L::P v) const {
    L::store_part(p, v, n);
  }
};

// f(i, span, slot) for every pack of n elements: i where it starts, span how to load and store it, slot which of two
// sets of accumulators is free.
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
template <class L>
NS_INLINE typename L::P spread(typename L::C v) {
  return {typename L::V{} + v, typename L::V{} + v};
}

// Sums over elements: two packs of accumulators, so that an addition need not wait for the one before. Of equal terms,
// one added to a sum of many is rounded the same way each time: after kTerms, what has come together goes to double.
template <class T>
struct Accumulator {
  typename Lanes<T>::P part[2] = {};
  f64x8 folded = {};
  NS_INLINE void fold() {
    const auto both = part[0] + part[1];
    const auto sum = both.a + both.b;
    if constexpr (sizeof(sum[0]) == 4) {
      using f32x8 = float __attribute__((vector_size(32)));
      f32x8 half[2];
      std::memcpy(half, &sum, sizeof sum);
      folded = folded + (__builtin_convertvector(half[0], f64x8) + __builtin_convertvector(half[1], f64x8));
    } else {
      folded = folded + sum;
    }
    part[0] = part[1] = typename Lanes<T>::P{};
  }
  double total() const { return sum_lanes(folded); }
};

// step(line, i, span, slot), as in a sweep over n elements, for each of the lines at(k), and fold() after every kTerms
// steps of a slot: a line may have more than those, or be one of many short ones.
template <class T, class At, class Step, class Fold>
NS_INLINE void sweep_lines(int64_t first, int64_t last, int64_t n, At &&at, Step &&step, Fold &&fold) {
  constexpr int64_t both = 2 * Lanes<T>::kPack, most = kTerms * both;
  // A division takes as long as a short line.
  const int64_t lines = last - first == 1 || 2 * n > most ? 1 : int(kTerms) / int(ceil_div(n, both));
  for (int64_t some = first; some < last; some += lines) {
    const int64_t end = std::min(some + lines, last);
    for (int64_t begin = 0; begin < n; begin += most) {
      for (int64_t k = some; k < end; ++k) {
        const auto line = at(k);
        sweep<T>(std::min(most, n - begin),
                 [&](int64_t i, auto span, auto slot) { step(line, begin + i, span, slot); });
      }
      fold();
    }
  }
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

// A set of at most so many bytes is still in the second-level cache, together with the next one, when it is gone over
// again.
constexpr int64_t kNearBytes = 512 << 10;

// Sets come from memory one by one, each read once: what comes next is worth sending for. `tensors` are read.
template <class T>
bool from_afar(const Problem &p, int tensors) {
  const int64_t size = sizeof(T);
  return p.set_size * size <= kNearBytes && p.elements * size * tensors > 4 * kNearBytes;
}

// Asks for the pack at p, which need not be there.
template <class T>
NS_INLINE void send_for(const T *p) {
  for (int line = 0; line < Lanes<T>::kPack * int(sizeof(T)); line += 64)
    __builtin_prefetch(reinterpret_cast<const char *>(p) + line, 0, 2);
}

// ---- streaming stores

// Outputs of more bytes than this bypass the caches: several times what a core's own cache holds, they would leave it
// before anyone reads them, and the line need not be read before it is written.
constexpr int64_t kStreamBytes = 8 << 20;

template <class T>
bool streams(const Problem &p) {
  return sizeof(T) <= 4 && p.elements * int64_t(sizeof(T)) > kStreamBytes;
}
// Once at the end of a call, since it waits for all of them. What other threads streamed is ordered by the locked
// addition with which they leave parallel_for.
inline int fenced(int result) {
  stream_fence();
  return result;
}

inline bool aligned(const void *p) { return reinterpret_cast<uintptr_t>(p) % 64 == 0; }

// ---- parameters

// Arrays over the parameters in compute precision. Where each element has its own they are in the order of lanes: they
// come in runs of `inner`, each padded to whole packs, so that the last pack of a segment is like any other.
// Else a segment has one, and they are in their own order.
template <class T>
struct Runs {
  using L = Lanes<T>;
  bool each;
  int64_t inner, runs, pitch;

  explicit Runs(const Problem &p)
      : each(p.inner_p != 0), inner(each ? p.inner : p.parameters), runs(p.parameters / inner) {
    pitch = each ? ceil_div(inner, L::kPack) * L::kPack : inner;
  }

  int64_t size() const { return runs * pitch; }
  // Where the parameter of number p stands, p the first of a run or a whole number of packs after it.
  int64_t at(int64_t p) const {
    if (runs == 1 || pitch == inner) return p;
    const int64_t run = p / inner;
    return run * pitch + (p - run * inner);
  }
};

// (offset + source) * gain for source of type S.
template <class T, class S>
void convert(const Runs<T> &runs, const S *source, double offset, double gain, typename Lanes<T>::C *out) {
  using L = Lanes<T>;
  using C = typename L::C;
  const bool plain = offset == 0 && gain == 1;
  const auto one = [=](S v) { return plain ? C(Lanes<S>::value(v)) : C((offset + Lanes<S>::value(v)) * gain); };
  if (!runs.each) {
    for (int64_t i = 0; i < runs.size(); ++i) out[i] = one(source[i]);
    return;
  }
  for (int64_t run = 0; run < runs.runs; ++run, source += runs.inner, out += runs.pitch) {
    int64_t i = 0;
    for (; i + L::kPack <= runs.inner; i += L::kPack) {
      if constexpr (std::is_same_v<S, T>) {
        if (plain) {
          store_lanes<L>(out + i, L::load(source + i));
          continue;
        }
      }
      for (int j = 0; j < L::kPack; ++j) out[i + lane_of<T>(j)] = one(source[i + j]);
    }
    if (i == runs.inner) continue;
    std::fill(out + i, out + runs.pitch, C(0));
    for (int j = 0; i + j < runs.inner; ++j) out[i + lane_of<T>(j)] = one(source[i + j]);
  }
}

// The factors (offset + weight) * gain, and the biases, null where there are none. Used where they lie if they can be.
template <class T>
class Parameters {
 public:
  using L = Lanes<T>;
  using C = typename L::C;
  const Runs<T> runs;
  const C *factor = nullptr, *bias = nullptr;

  Parameters(const NsCall &c, const Problem &p, const Recipe &r, bool with_bias) : runs(p) {
    const bool lie_right = c.weight_dtype == (sizeof(C) == 4 ? NS_FLOAT32 : NS_FLOAT64) && runs.pitch == runs.inner &&
                           !(runs.each && L::kSplit);
    if (!c.weight && !runs.each) {
      single_ = C(r.gain), factor = &single_;
    } else if (lie_right && c.weight && r.offset == 0 && r.gain == 1) {
      factor = static_cast<const C *>(c.weight);
    }
    const bool biased = with_bias && c.bias;
    if (biased && lie_right) bias = static_cast<const C *>(c.bias);
    const int arrays = !factor + (biased && !bias);
    if (arrays == 0) return;
    memory_.emplace(arrays * runs.size() * sizeof(C));
    if (!*memory_) return;
    C *next = memory_->template as<C>();
    if (!factor) {
      if (c.weight) {
        fill(c.weight, c.weight_dtype, r.offset, r.gain, next);
      } else {
        std::fill(next, next + runs.size(), C(r.gain));
      }
      factor = next, next += runs.size();
    }
    if (biased && !bias) fill(c.bias, c.weight_dtype, 0, 1, next), bias = next;
  }
  Parameters(const Parameters &) = delete;

  // False where there was no memory.
  explicit operator bool() const { return !memory_ || *memory_; }

  // Of a parameter's number to where its factor and bias stand.
  int64_t factor_at(int64_t p) const { return factor == &single_ ? 0 : runs.at(p); }

 private:
  std::optional<Scratch> memory_;
  C single_ = 0;

  void fill(const void *source, int dtype, double offset, double gain, C *out) {
    with_dtype(dtype, [&](auto type) {
      convert<T>(runs, static_cast<const decltype(type) *>(source), offset, gain, out);
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
NS_ONE_COPY Scale<C> scale(Mean<C> mean, double inverse) {
  return {mean.high, C(-double(mean.low) * inverse), C(inverse)};
}

// By stored statistics.
template <class C>
NS_ONE_COPY Scale<C> stored_scale(const NsCall &c, const Recipe &r, int64_t set) {
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
