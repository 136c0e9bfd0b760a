// ns_run: lowers a call and hands it to the kernel of its layout and dtype.
#include "lower.hpp"
#include "normscope.h"
#include "vec.hpp"

namespace ns {

template <class T>
int run(const NsCall &c, const Problem &p);  // run.hpp

}  // namespace ns

extern "C" {

int ns_run(const NsCall *call) {
  ns::Problem problem;
  if (!ns::lower(*call, &problem)) return NS_UNSERVED;
  switch (call->dtype) {
    case NS_FLOAT32: return ns::run<float>(*call, problem);
    case NS_BFLOAT16: return ns::run<ns::BFloat16>(*call, problem);
    case NS_FLOAT16: return ns::run<ns::Float16>(*call, problem);
    case NS_FLOAT64: return ns::run<double>(*call, problem);
    default: return NS_UNSERVED;
  }
}

// The loops of a call, for tests of the lowering: per loop (size, x, y, parameter and set stride, kept), outer loops of
// sets, then of elements, then the innermost; returns their number, or -1 where a packed copy is needed.
int ns_lowered(const NsCall *call, int64_t *out, int capacity) {
  ns::Problem p;
  if (!ns::lower(*call, &p)) return -1;
  int n = 0;
  auto put = [&](const ns::Loop &l) {
    if (n < capacity) {
      const int64_t row[6] = {l.size, l.x, l.y, l.p, l.s, l.kept};
      for (int i = 0; i < 6; ++i) out[6 * n + i] = row[i];
    }
    ++n;
  };
  for (int i = 0; i < p.kept.n; ++i) put(p.kept.loop[i]);
  for (int i = 0; i < p.erased.n; ++i) put(p.erased.loop[i]);
  ns::Loop inner;
  if (p.columns) {
    inner.size = p.inner / p.merge, inner.x = inner.y = p.merge, inner.p = p.group_p, inner.s = p.group_s;
    inner.kept = true;
    put(inner);
    inner = ns::Loop();
    inner.size = p.merge;
  } else {
    inner.size = p.inner;
  }
  inner.x = inner.y = 1, inner.p = p.inner_p;
  put(inner);
  return n;
}

const char *ns_isa(void) {
#if defined(__AVX512F__)
  return "avx512";
#elif defined(__AVX2__)
  return "avx2";
#else
  return "base";
#endif
}
}
