// Rows backwards: which pass goes where, and how the gradients of parameters are added up.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "rows_gradients.hpp"

namespace ns {

// ---- one factor a segment

template <class T, Form F>
class OneFactor : RowsBackward<T, F> {
  using Base = RowsBackward<T, F>;
  using C = typename Base::C;
  using Base::c, Base::p, Base::r, Base::parameters, Base::cut, Base::threads, Base::grads, Base::stream, Base::far;

 public:
  OneFactor(const NsCall &call, const Problem &problem) : Base(call, problem, !shared(problem)) {}

  int run() {
    if (!parameters) return NS_NO_MEMORY;
    const bool split = inside(p, cut, threads);
    const bool kept = grads || split;
    Scratch memory((kept ? sizeof(Sums) * p.sets * cut.blocks : 0) + (split ? sizeof(Gradient<C>) * p.sets : 0));
    if (!memory) return NS_NO_MEMORY;
    Sums *of_block = kept ? memory.as<Sums>() : nullptr;
    if (split) {
      Gradient<C> *of_set = reinterpret_cast<Gradient<C> *>(of_block + p.sets * cut.blocks);
      if (this->summed() || grads)
        parallel_for(p.sets * cut.blocks, threads, [&](int64_t i) {
          const Offset set = p.kept.at(i / cut.blocks);
          of_block[i] = sums(set, cut.at(i % cut.blocks), this->scale_of(set.s));
        });
      parallel_for(p.sets, threads, [&](int64_t i) {
        const Offset set = p.kept.at(i);
        Sums g;
        if (this->summed())
          for (int64_t k = 0; k < cut.blocks; ++k) add(&g, set, cut.at(k), of_block[i * cut.blocks + k]);
        of_set[i] = this->gradient(set.s, this->scale_of(set.s), g);
      });
      if (c.dx)
        each_block_backwards(p, cut, threads, [&](int64_t i, int64_t k) {
          put(p.kept.at(i), cut.at(k), of_set[i], nullptr);
        });
    } else {
      parallel_for(p.sets, threads, [&](int64_t i) {
        const Offset set = p.kept.at(i);
        const Scale<C> s = this->scale_of(set.s);
        Sums g;
        if (this->summed() || grads)
          for (int64_t k = 0; k < cut.blocks; ++k) {
            const Sums block = sums(set, cut.at(k), s);
            if (of_block) of_block[i * cut.blocks + k] = block;
            add(&g, set, cut.at(k), block);
          }
        const Gradient<C> k = this->gradient(set.s, s, g);
        if (!c.dx) return;
        const bool more = far && i + 1 < p.sets;
        const Offset next = more ? p.kept.at(i + 1) : Offset{};
        for (int64_t b = cut.blocks; b-- > 0;) put(set, cut.at(b), k, more ? &next : nullptr);
      });
    }
    return grads ? fold(of_block) : int(NS_DONE);
  }

 private:
  // All segments of a set have the same parameter.
  static bool shared(const Problem &p) {
    for (int i = 0; i < p.erased.n; ++i)
      if (p.erased.loop[i].p) return false;
    return true;
  }

  C factor(const Offset &set, const Block &b) const {
    return parameters.factor[parameters.factor_at(set.p + p.erased.at(b.first).p)];
  }

  NS_ONE_COPY void add(Sums *g, const Offset &set, const Block &b, const Sums &of_block) const {
    const double f = factor(set, b);
    g->dy += f * of_block.dy, g->dy_xhat += f * of_block.dy_xhat;
  }

  NS_ONE_COPY Sums sums(const Offset &set, const Block &b, const Scale<C> &s) const {
    return sums_of<T, F, false>(b.first, b.last, b.size, s, nullptr,
                                [&](int64_t k) { return this->line(set, p.erased.at(k), b.begin); });
  }

  void put(const Offset &set, const Block &b, const Gradient<C> &k, const Offset *next) const {
    const C f = factor(set, b);
    for (int64_t i = b.last; i-- > b.first;) {
      const Line<T> line = this->line(set, p.erased.at(i), b.begin, k, next);
      with(stream && aligned(line.dx), [&](auto past) { dx_one<T, F, sizeof(T) <= 4 && past>(line, b.size, f); });
    }
  }

  // Blocks of all sets in order, each added to its parameter.
  int fold(const Sums *of_block) const {
    Scratch memory(sizeof(Sums) * p.parameters);
    if (!memory) return NS_NO_MEMORY;
    Sums *total = memory.as<Sums>();
    std::fill(total, total + p.parameters, Sums{});
    for (int64_t i = 0; i < p.sets; ++i) {
      const int64_t at = p.kept.at(i).p;
      for (int64_t k = 0; k < cut.blocks; ++k, ++of_block) {
        Sums &t = total[at + p.erased.at(cut.at(k).first).p];
        t.dy += of_block->dy, t.dy_xhat += of_block->dy_xhat;
      }
    }
    for (int64_t i = 0; i < p.parameters; ++i) {
      if (c.dweight) put_at(c.dweight, c.weight_dtype, i, r.gain * total[i].dy_xhat);
      if (c.dbias) put_at(c.dbias, c.weight_dtype, i, total[i].dy);
    }
    return NS_DONE;
  }
};

// ---- a factor for each element

// Rows gone through together; what they and their gradients take must stay in the cache.
constexpr int kTogether = 4;
constexpr int64_t kTogetherBytes = 1 << 20;

template <class T, Form F>
class EachFactor : RowsBackward<T, F> {
  using Base = RowsBackward<T, F>;
  using L = Lanes<T>;
  using C = typename Base::C;
  using Base::c, Base::p, Base::r, Base::parameters, Base::cut, Base::threads, Base::grads, Base::stream, Base::far;

 public:
  EachFactor(const NsCall &call, const Problem &problem)
      : Base(call, problem, true), together(2 * kTogether * p.set_size * int64_t(sizeof(T)) <= kTogetherBytes) {}

  int run() {
    if (!parameters) return NS_NO_MEMORY;
    // Few long sets with a parameter for each of their elements: each task has some parameters to itself.
    if (p.sets < 64 && p.set_size >= 8 * kBlock && p.parameters == p.set_size) return by_blocks();
    return by_sets();
  }

 private:
  const bool together;

  int kinds() const { return !grads ? 0 : c.dbias ? 2 : 1; }

  NS_ONE_COPY Sums sums(const Offset &set, const Block &b, const Scale<C> &s) const {
    const Offset segment = p.erased.at(b.first);
    return sums_of<T, F, true>(0, 1, b.size, s, parameters.factor + parameters.runs.at(set.p + segment.p + b.begin),
                               [&](int64_t) { return this->line(set, segment, b.begin); });
  }

  Gradient<C> gradient(const Offset &set) const {
    const Scale<C> s = this->scale_of(set.s);
    Sums g;
    if (this->summed() && c.dx)
      for (int64_t k = 0; k < cut.blocks; ++k) {
        const Sums block = sums(set, cut.at(k), s);
        g.dy += block.dy, g.dy_xhat += block.dy_xhat;
      }
    return this->gradient_of(set, s, g);
  }
  Gradient<C> gradient_of(const Offset &set, const Scale<C> &s, const Sums &g) const {
    return Base::gradient(set.s, s, g);
  }

  template <int R>
  void lines(const Line<T> *line, int64_t n, int64_t lane, C *dweight, C *dbias) const {
    const C *factor = parameters.factor + lane;
    const auto go = [&](auto dx, auto past) {
      constexpr bool d = decltype(dx)::value, s = decltype(past)::value;
      if (kinds() == 2) return dx_each<T, F, R, 2, d, s>(line, n, factor, dweight, dbias);
      if (kinds() == 1) return dx_each<T, F, R, 1, d, s>(line, n, factor, dweight, dbias);
      if constexpr (d) dx_each<T, F, R, 0, d, s>(line, n, factor, dweight, dbias);
    };
    if (!c.dx) return go(std::false_type{}, std::false_type{});
    bool past = stream;
    for (int k = 0; k < R; ++k) past = past && aligned(line[k].dx);
    with(past, [&](auto flag) {
      go(std::true_type{}, std::bool_constant<sizeof(T) <= 4 && R == kTogether && flag>{});
    });
  }

  // A block of R sets whose parameters are the same; `next`, R sets that are read after them, or null.
  template <int R>
  void block(const Offset *set, const Gradient<C> *k, const Block &b, C *dweight, C *dbias, const Offset *next) const {
    const Offset segment = p.erased.at(b.first);
    Line<T> line[R];
    for (int i = 0; i < R; ++i) line[i] = this->line(set[i], segment, b.begin, k[i], next ? next + i : nullptr);
    lines<R>(line, b.size, parameters.runs.at(set[0].p + segment.p + b.begin), dweight, dbias);
  }

  // Whether a set uses one parameter several times.
  bool repeats() const {
    for (int i = 0; i < p.erased.n; ++i)
      if (!p.erased.loop[i].p) return true;
    return false;
  }

  // Whether all sets have the same parameters, and kTogether of them are one addition to the sums.
  bool by_fours() const {
    for (int i = 0; i < p.kept.n; ++i)
      if (p.kept.loop[i].p) return false;
    return together;
  }

  // Sets in chunks, each with sums of its own for all parameters, added up in double in the order of chunks. To no sum
  // in compute values are added many more than kTerms: a chunk has several where its sets use parameters more often.
  int by_sets() {
    const bool fours = by_fours();
    const int64_t most = kTerms * (fours ? kTogether : 1);
    const int64_t uses = p.elements / p.parameters, share = std::clamp<int64_t>(uses / 32, kTerms, most);
    const int64_t a_chunk = ceil_div(p.sets, std::min(ceil_div(uses, share), p.sets));
    const int64_t chunks = ceil_div(p.sets, a_chunk), size = parameters.runs.size();
    const bool again = repeats();
    const int64_t additions = cut.blocks * (fours ? a_chunk / kTogether + kTogether - 1 : a_chunk);
    const int64_t sums = again ? additions / (kTerms - kTogether + 2) + 1 : 1;  // at most kTogether - 1 at once
    Scratch memory(sizeof(C) * size * kinds() * chunks * sums);
    if (!memory) return NS_NO_MEMORY;
    C *partial = memory.as<C>();
    parallel_for(chunks, threads, [&](int64_t chunk) {
      C *dweight = partial + chunk * sums * size * kinds(), *dbias = dweight + size;
      std::memset(static_cast<void *>(dweight), 0, sizeof(C) * size * kinds() * sums);
      int64_t added = 0;
      const int64_t end = std::min(p.sets, (chunk + 1) * a_chunk);
      for (int64_t i = chunk * a_chunk; i < end;) {
        Offset set[kTogether];
        Gradient<C> k[kTogether];
        int n = 0;
        for (; n < kTogether && i + n < end && (n == 0 || together); ++n) {
          set[n] = p.kept.at(i + n);
          if (set[n].p != set[0].p) break;
          k[n] = gradient(set[n]);
        }
        Offset next[kTogether];
        const bool more = far && n == kTogether && i + 2 * kTogether <= end;
        for (int j = 0; more && j < kTogether; ++j) next[j] = p.kept.at(i + kTogether + j);
        for (int64_t b = cut.blocks; b-- > 0;) {
          const int64_t more_added = n == kTogether ? 1 : n;
          if (again && (added += more_added) > kTerms)
            added = more_added, dweight += size * kinds(), dbias += size * kinds();
          const Block block_ = cut.at(b);
          const int64_t at = parameters.runs.at(set[0].p + p.erased.at(block_.first).p + block_.begin);
          if (n == kTogether) {
            block<kTogether>(set, k, block_, dweight + at, dbias + at, more ? next : nullptr);
          } else {
            for (int j = 0; j < n; ++j) block<1>(set + j, k + j, block_, dweight + at, dbias + at, nullptr);
          }
        }
        i += n;
      }
    });
    if (grads) fold(partial, chunks * sums, size);
    return NS_DONE;
  }

  int by_blocks() {
    Scratch memory(sizeof(Sums) * p.sets * cut.blocks + sizeof(Gradient<C>) * p.sets);
    if (!memory) return NS_NO_MEMORY;
    Sums *of_block = memory.as<Sums>();
    Gradient<C> *of_set = reinterpret_cast<Gradient<C> *>(of_block + p.sets * cut.blocks);
    const bool needed = this->summed() && c.dx;
    if (needed)
      parallel_for(p.sets * cut.blocks, threads, [&](int64_t i) {
        const Offset set = p.kept.at(i / cut.blocks);
        of_block[i] = sums(set, cut.at(i % cut.blocks), this->scale_of(set.s));
      });
    parallel_for(p.sets, threads, [&](int64_t i) {
      const Offset set = p.kept.at(i);
      Sums g;
      if (needed)
        for (int64_t k = 0; k < cut.blocks; ++k) {
          const Sums &block = of_block[i * cut.blocks + k];
          g.dy += block.dy, g.dy_xhat += block.dy_xhat;
        }
      of_set[i] = this->gradient_of(set, this->scale_of(set.s), g);
    });
    return parallel_for(cut.blocks, threads, [&](int64_t task) {
      const Block b = cut.at(cut.blocks - 1 - task);
      alignas(64) C sums[2][kBlock + 64];
      std::memset(static_cast<void *>(sums), 0, sizeof sums);
      for (int64_t i = 0; i < p.sets;) {
        Offset set[kTogether];
        const int n = p.sets - i >= kTogether ? kTogether : 1;
        for (int k = 0; k < n; ++k) set[k] = p.kept.at(i + k);
        if (n == kTogether) {
          block<kTogether>(set, of_set + i, b, sums[0], sums[1], nullptr);
        } else {
          block<1>(set, of_set + i, b, sums[0], sums[1], nullptr);
        }
        i += n;
      }
      const int64_t at = p.erased.at(b.first).p + b.begin;
      if (c.dweight) put(c.dweight, at, b.size, sums[0], 1, 0, r.gain);
      if (c.dbias) put(c.dbias, at, b.size, sums[1], 1, 0, 1);
    });
  }

  void fold(const C *partial, int64_t chunks, int64_t size) const {
    const int64_t step = chunks * size * kinds();
    const Runs<T> &runs = parameters.runs;
    const int64_t pieces = ceil_div(runs.inner, kBlock);
    parallel_for(runs.runs * pieces, step < kSerial ? 1 : threads, [&](int64_t task) {
      const int64_t run = task / pieces, begin = (task - run * pieces) * kBlock;
      const int64_t n = std::min(kBlock, runs.inner - begin);
      const C *from = partial + run * runs.pitch + begin;
      const int64_t at = run * runs.inner + begin;
      if (c.dweight) put(c.dweight, at, n, from, chunks, size * kinds(), r.gain);
      if (c.dbias) put(c.dbias, at, n, from + size, chunks, size * kinds(), 1);
    });
  }

  // n parameters' gradients from `at` on: gain times the sum over chunks, `step` apart.
  void put(void *out, int64_t at, int64_t n, const C *from, int64_t chunks, int64_t step, double gain) const {
    with_dtype(c.weight_dtype, [&](auto type) {
      using S = decltype(type);
      S *to = static_cast<S *>(out) + at;
      for (int64_t i = 0; i < n; i += L::kPack) {
        double total[L::kPack] = {};
        for (int64_t k = 0; k < chunks; ++k)
          for (int j = 0; j < L::kPack; ++j) total[j] += double(from[k * step + i + j]);
        const int some = int(std::min<int64_t>(L::kPack, n - i));
        if constexpr (std::is_same_v<S, T>) {
          C value[L::kPack];
          for (int j = 0; j < L::kPack; ++j) value[j] = C(gain * total[j]);
          const auto pack = load_lanes<L>(value);
          some == L::kPack ? L::store(to + i, pack) : L::store_part(to + i, pack, some);
        } else {
          for (int j = 0; j < some; ++j)
            to[i + j] = Lanes<S>::make(static_cast<typename Lanes<S>::C>(gain * total[lane_of<T>(j)]));
        }
      }
    });
  }
};

// ---- entries

template <class T, Form F>
int rows_backward(const NsCall &c, const Problem &p) {
  if (p.elements == 0) {
    for (int64_t i = 0; i < p.parameters; ++i) {
      if (c.dweight) put_at(c.dweight, c.weight_dtype, i, 0);
      if (c.dbias) put_at(c.dbias, c.weight_dtype, i, 0);
    }
    return NS_DONE;
  }
  return fenced(p.inner_p ? EachFactor<T, F>(c, p).run() : OneFactor<T, F>(c, p).run());
}

template <class T>
int rows_norm_backward(const NsCall &c, const Problem &p) {
  return c.recipe.options & 1 ? rows_backward<T, kCentered>(c, p) : rows_backward<T, kScaled>(c, p);
}

template <class T>
int rows_fixed_backward(const NsCall &c, const Problem &p) {
  return rows_backward<T, kFixed>(c, p);
}

}  // namespace ns
