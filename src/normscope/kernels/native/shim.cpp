// The operators normscope::* for CPU tensors, registered with PyTorch's dispatcher: take the arguments apart, check them,
// make the results, run the kernels. Python calls ns_register once; kernels/ops.py holds their schemas.
#include <initializer_list>

#include "torch_c.hpp"

namespace ns {
namespace {

enum Want { kDx = 1, kDweight = 2, kDbias = 4 };
constexpr int64_t kFewSets = 64;  // statistics of so many that nobody wants stay on the stack

// A recipe comes as six numbers, or packed as one tensor of them, which PyTorch hands over faster.
NsRecipe unpacked(const Tensor &packed) {
  if (packed.dtype != NS_FLOAT64 || packed.numel() != 6) throw Failure("normscope: a packed recipe is six float64 numbers");
  const double *numbers = static_cast<const double *>(packed.data);
  NsRecipe r;
  r.axes = int64_t(numbers[0]), r.split = int64_t(numbers[1]), r.options = int64_t(numbers[2]);
  r.eps = numbers[3], r.gain = numbers[4], r.offset = numbers[5];
  return r;
}

template <bool packed>
NsRecipe recipe_of(Arguments &arguments) {
  if (packed) return unpacked(arguments.tensor());
  NsRecipe r;
  r.axes = arguments.integer(), r.split = arguments.integer(), r.options = arguments.integer();
  r.eps = arguments.number(), r.gain = arguments.number(), r.offset = arguments.number();
  return r;
}

bool centered(const NsRecipe &r) { return r.options & 1; }

// How many statistic sets and parameters a recipe has on an input, and the shape that the parameters have.
struct Geometry {
  int64_t sets = 1, parameters = 1;
  int64_t parameter_sizes[kMostDims];
  int parameter_dims = 0;

  Geometry(const Tensor &x, const NsRecipe &r) {
    const int64_t split_dim = (r.split >> 40) - 1, given = r.split & ((int64_t(1) << 39) - 1);
    int axis = 0;
    int64_t on_dim = 1;  // parameters on the dimension at hand
    bool lives = false;
    auto take = [&](int64_t size) {
      const int code = int(r.axes >> (4 * axis++)) & 15;
      if (code & 1) sets *= size;
      if (code & 2) parameters *= size, on_dim *= size, lives = true;
    };
    auto close = [&] {
      if (lives) parameter_sizes[parameter_dims++] = on_dim;
      on_dim = 1, lives = false;
    };
    if (split_dim >= x.dim) throw Failure("normscope: the axes of another input: no dimension %d", int(split_dim));
    for (int64_t d = 0; d < x.dim; ++d) {
      if (d != split_dim) {
        take(x.sizes[d]);
        close();
        continue;
      }
      if (given <= 0 || x.sizes[d] % given)
        throw Failure("normscope: dimension %d of size %lld is not divisible by %lld", int(d), (long long)x.sizes[d],
                      (long long)given);
      const bool inner = r.split >> 39 & 1;
      take(inner ? x.sizes[d] / given : given);
      take(inner ? given : x.sizes[d] / given);
      close();
    }
  }
};

// Checks -------------------------------------------------------------------------------------------------------------

void check_dtype(const Tensor &t, const char *name) {
  if (t && t.dtype == kOtherDtype)
    throw Failure("normscope: %s is not of dtype float32, float64, bfloat16 or float16", name);
}

void check_input(const Tensor &x) {
  check_dtype(x, "x");
  if (x.dim > kMostDims) throw Failure("normscope: x has %lld dimensions, the most is %d", (long long)x.dim, kMostDims);
}

void check_like(const Tensor &t, const Tensor &x, const char *name) {
  if (!t) return;
  bool same = t.dim == x.dim && t.dtype == x.dtype;
  for (int64_t d = 0; same && d < x.dim; ++d) same = t.sizes[d] == x.sizes[d];
  if (!same) throw Failure("normscope: %s is not of x's shape and dtype", name);
}

// One value for each of `count`, side by side.
void check_vector(Tensor &t, int64_t count, const char *name, const char *each) {
  if (!t) return;
  check_dtype(t, name);
  if (t.dim > kMostDims || t.numel() != count)
    throw Failure("normscope: %s has %lld values where there are %lld %s", name, (long long)t.numel(), (long long)count,
                  each);
  t.pack();
}

// Boolean, of x's axes, each of its size or 1.
void check_mask(Tensor &mask, const Tensor &x) {
  bool fits = mask.dim == x.dim && mask.is_boolean();
  for (int64_t d = 0; fits && d < x.dim; ++d) fits = mask.sizes[d] == x.sizes[d] || mask.sizes[d] == 1;
  if (!fits) throw Failure("normscope: mask is not boolean, or not of x's axes, each of its size or 1");
}

void check_stats(Tensor &stats, const Tensor &x, const NsRecipe &r, int64_t sets, int rows = 0) {
  check_vector(stats, sets * (rows + (centered(r) ? 3 : 1)), "stats", "statistics");
  if (stats.dtype != (x.dtype == NS_FLOAT64 ? NS_FLOAT64 : NS_FLOAT32))
    throw Failure("normscope: stats are float32, or float64 where x is");
}

void check_stored(Tensor &mean, Tensor &var, int64_t sets) {
  check_vector(mean, sets, "mean", "sets");
  check_vector(var, sets, "var", "sets");
  if (mean.dtype != var.dtype) var = var.copied(var.strides, mean.dtype);
}

void check_parameters(Tensor &weight, Tensor &bias, int64_t parameters) {
  check_vector(weight, parameters, "weight", "parameters");
  check_vector(bias, parameters, "bias", "parameters");
  if (weight && bias && weight.dtype != bias.dtype) bias = bias.copied(bias.strides, weight.dtype);
}

// Calls that Python makes come unchecked, since a check takes longer there than a small normalization: what is not plainly
// regular is refused, and Python looks closer. Parameters have their very shape, and one dtype: x's, or float32 beside a
// half type.
void check_regular(const Tensor &x, const Tensor &weight, const Tensor &bias, const Geometry &g) {
  bool regular = true;
  for (const Tensor *t : {&weight, &bias}) {
    if (!*t) continue;
    regular = regular && t->dim == g.parameter_dims;
    for (int d = 0; regular && d < g.parameter_dims; ++d) regular = t->sizes[d] == g.parameter_sizes[d];
    const bool half = x.dtype == NS_BFLOAT16 || x.dtype == NS_FLOAT16;
    regular = regular && (t->dtype == x.dtype || (half && t->dtype == NS_FLOAT32));
  }
  if (!regular || (weight && bias && weight.dtype != bias.dtype)) throw Failure("normscope: not a regular call");
}

// Running ------------------------------------------------------------------------------------------------------------

// One call of the kernels. `x` and what lies as it lies, and `y` and what lies as that, are packed where their strides
// are such that no kernel serves them.
struct Run {
  NsCall call = {};
  Tensor *x, *x_mate = nullptr, *y;           // y: what has y_strides, y or dx
  Tensor *y_mate = nullptr, *dy = nullptr, *dsum = nullptr;  // sum; and the gradients

  Run(NsWhat what, const NsRecipe &recipe, Tensor &in, Tensor &out, const Tensor &weight, const Tensor &bias)
      : x(&in), y(&out) {
    call.what = what, call.recipe = recipe, call.dtype = in.dtype;
    call.weight_dtype = weight ? weight.dtype : bias ? bias.dtype : in.dtype;
    call.weight = weight.data, call.bias = bias.data;
    call.ndim = int32_t(in.dim), call.sizes = in.sizes;
    uint32_t threads = 1;
    check(torch.threads(&threads), "tell the number of threads");
    call.threads = int32_t(threads);
  }

  void under(const Tensor &mask) {
    for (int64_t d = 0; d < mask.dim; ++d) mask_strides_[d] = mask.sizes[d] > 1 ? mask.strides[d] : 0;
    call.mask = static_cast<const uint8_t *>(mask.data), call.mask_strides = mask_strides_;
  }

  void operator()() {
    if (run()) return;
    x->pack();
    for (Tensor *t : {x_mate, dy, dsum})
      if (t) t->pack();
    // The results are written packed, then to where they belong.
    const Tensor::Strides packed = y->contiguous();
    Tensor out = Tensor::empty(y->dim, y->sizes, packed.of, y->dtype), mate;
    if (y_mate) mate = Tensor::empty(y->dim, y->sizes, packed.of, y->dtype);
    Tensor *true_y = std::exchange(y, &out), *true_mate = y_mate;
    if (y_mate) y_mate = &mate;
    if (!run()) throw Failure("normscope: no native kernel serves these axes");
    if (dy || wants_y) true_y->fill(out);
    if (true_mate) true_mate->fill(mate);
  }

 private:
  int64_t mask_strides_[kMostDims];

  bool run() {
    call.x_strides = x->strides, call.y_strides = y->strides;
    call.x = x->data, call.residual = x_mate ? x_mate->data : nullptr;
    call.sum = y_mate ? y_mate->data : nullptr;
    call.dy = dy ? dy->data : nullptr, call.dsum = dsum ? dsum->data : nullptr;
    (dy ? call.dx : call.y) = y->data;
    if (dy && !wants_dx) call.dx = nullptr;
    if (!dy && !wants_y) call.y = nullptr;
    const int result = ns_run(&call);
    if (result == NS_NO_MEMORY) throw Failure("normscope: out of memory");
    return result == NS_DONE;
  }

 public:
  bool wants_dx = true, wants_y = true;
};

// `more` rows than the usual ones: under a mask, of the numbers of elements.
Tensor statistics(const Tensor &x, const NsRecipe &r, int64_t sets, int more = 0) {
  const int64_t sizes[] = {more + (centered(r) ? 3 : 1), sets}, strides[] = {sets > 1 ? sets : 1, 1};
  return Tensor::empty(2, sizes, strides, x.dtype == NS_FLOAT64 ? NS_FLOAT64 : NS_FLOAT32);
}

Tensor vector(int64_t count, int32_t dtype) {
  const int64_t one = 1;
  return Tensor::empty(1, &count, &one, dtype);
}

void zero(Tensor &t) {
  if (t) check(torch.zero(t.handle()), "fill a tensor");
}

void give(Value *stack, std::initializer_list<Tensor *> results) {
  for (Tensor *t : results) *stack++ = reinterpret_cast<Value>(t->hand_over());
}

// The operators ------------------------------------------------------------------------------------------------------

// Statistics go into `stats`; where that is null they are not wanted.
void normalize(Tensor &x, Tensor &weight, Tensor &bias, const NsRecipe &recipe, Tensor &y, Tensor *stats, bool strict) {
  const Geometry g(x, recipe);
  if (strict) check_regular(x, weight, bias, g);
  check_parameters(weight, bias, g.parameters);
  double few[3 * kFewSets];
  Tensor made;
  const bool small = !stats && g.sets <= kFewSets;
  if (!small) made = statistics(x, recipe, g.sets);
  if (x.numel() == 0) {
    zero(made);
  } else {
    Run run(NS_NORM, recipe, x, y, weight, bias);
    run.call.stats = small ? few : made.data;
    run();
  }
  if (stats) *stats = std::move(made);
}

template <bool packed>
void norm(Value *stack) {
  Arguments arguments(stack);
  Tensor x = arguments.tensor(), weight = arguments.optional(), bias = arguments.optional(), stats;
  const NsRecipe recipe = recipe_of<packed>(arguments);
  check_input(x);
  Tensor y = x.like();
  normalize(x, weight, bias, recipe, y, &stats, packed);
  give(stack, {&y, &stats});
}

template <bool packed>
void norm_out(Value *stack) {
  Arguments arguments(stack);
  Tensor x = arguments.tensor(), weight = arguments.optional(), bias = arguments.optional();
  const NsRecipe recipe = recipe_of<packed>(arguments);
  Tensor out = arguments.tensor();
  check_input(x);
  check_like(out, x, "out");
  normalize(x, weight, bias, recipe, out, nullptr, packed);
}

void norm_only(Value *stack) {
  Arguments arguments(stack);
  Tensor x = arguments.tensor(), weight = arguments.optional(), bias = arguments.optional();
  const NsRecipe recipe = recipe_of<true>(arguments);
  check_input(x);
  Tensor y = x.like();
  normalize(x, weight, bias, recipe, y, nullptr, true);
  give(stack, {&y});
}

template <bool packed>
void add_norm(Value *stack) {
  Arguments arguments(stack);
  Tensor x = arguments.tensor(), residual = arguments.tensor();
  Tensor weight = arguments.optional(), bias = arguments.optional();
  const NsRecipe recipe = recipe_of<packed>(arguments);
  check_input(x);
  check_like(residual, x, "residual");
  const Geometry g(x, recipe);
  check_parameters(weight, bias, g.parameters);
  Tensor y = x.like();
  if (!residual.lies(x.strides)) x.lay(y.strides), residual.lay(y.strides);
  Tensor sum = Tensor::empty(y.dim, y.sizes, y.strides, y.dtype), stats = statistics(x, recipe, g.sets);
  if (x.numel() == 0) {
    zero(stats);
  } else {
    Run run(NS_NORM, recipe, x, y, weight, bias);
    run.x_mate = &residual, run.y_mate = &sum, run.call.stats = stats.data;
    run();
  }
  give(stack, {&y, &sum, &stats});
}

template <bool packed>
void fixed(Value *stack) {
  Arguments arguments(stack);
  Tensor x = arguments.tensor(), mean = arguments.tensor(), var = arguments.tensor();
  Tensor weight = arguments.optional(), bias = arguments.optional();
  const NsRecipe recipe = recipe_of<packed>(arguments);
  check_input(x);
  const Geometry g(x, recipe);
  if (packed) check_regular(x, weight, bias, g);
  check_parameters(weight, bias, g.parameters);
  check_stored(mean, var, g.sets);
  Tensor y = x.like();
  if (x.numel() != 0) {
    Run run(NS_FIXED, recipe, x, y, weight, bias);
    run.call.mean = mean.data, run.call.var = var.data, run.call.stored_dtype = mean.dtype;
    run();
  }
  give(stack, {&y});
}

// Statistics of what counts, and where `y` is given, the normalization.
Tensor normalize_masked(Tensor &x, Tensor &mask, const NsRecipe &recipe, Tensor &weight, Tensor &bias, Tensor *y) {
  check_input(x);
  const Geometry g(x, recipe);
  check_parameters(weight, bias, g.parameters);
  if (mask) check_mask(mask, x);
  Tensor stats = statistics(x, recipe, g.sets, bool(mask));
  if (x.numel() == 0) {
    zero(stats);
    return stats;
  }
  Run run(NS_NORM, recipe, x, y ? *y : x, weight, bias);
  run.wants_y = y;
  if (mask) run.under(mask);
  run.call.stats = stats.data;
  run();
  return stats;
}

void norm_masked(Value *stack) {
  Arguments arguments(stack);
  Tensor x = arguments.tensor(), mask = arguments.tensor();
  Tensor weight = arguments.optional(), bias = arguments.optional();
  const NsRecipe recipe = recipe_of<false>(arguments);
  check_input(x);
  Tensor y = x.like(), stats = normalize_masked(x, mask, recipe, weight, bias, &y);
  give(stack, {&y, &stats});
}

void moments(Value *stack) {
  Arguments arguments(stack);
  Tensor x = arguments.tensor(), mask = arguments.optional(), none;
  const NsRecipe recipe = recipe_of<false>(arguments);
  Tensor stats = normalize_masked(x, mask, recipe, none, none, nullptr);
  give(stack, {&stats});
}

// Gradients, by the statistics of the input or by stored ones.
void backward(Value *stack, Tensor &dy, Tensor &dsum, Tensor &x, Tensor &weight, Run &run, const Geometry &g,
              int64_t want) {
  check_like(dy, x, "dy");
  check_like(dsum, x, "dsum");
  Tensor &dx = *run.y;
  dy.lay(dx.strides), dsum.lay(dx.strides);
  // Where only a bias is there, whose dtype nobody says here, its gradient keeps all digits.
  const int32_t dtype = weight ? weight.dtype : x.dtype == NS_FLOAT64 ? NS_FLOAT64 : NS_FLOAT32;
  run.call.weight_dtype = dtype;
  Tensor dweight = vector(want & kDweight ? g.parameters : 0, dtype);
  Tensor dbias = vector(want & kDbias ? g.parameters : 0, dtype);
  if (x.numel() == 0) {
    zero(dweight), zero(dbias);
  } else {
    run.dy = &dy, run.wants_dx = want & kDx;
    if (dsum) run.dsum = &dsum;
    if (want & kDweight) run.call.dweight = dweight.data;
    if (want & kDbias) run.call.dbias = dbias.data;
    run();
  }
  if (!(want & kDx)) dx = vector(0, x.dtype);
  give(stack, {&dx, &dweight, &dbias});
}

template <bool packed>
void norm_backward(Value *stack) {
  Arguments arguments(stack);
  Tensor dy = arguments.tensor(), dsum = arguments.optional(), x = arguments.tensor(), stats = arguments.tensor();
  Tensor weight = arguments.optional();
  const NsRecipe recipe = recipe_of<packed>(arguments);
  const int64_t want = arguments.integer();
  check_input(x);
  const Geometry g(x, recipe);
  check_vector(weight, g.parameters, "weight", "parameters");
  check_stats(stats, x, recipe, g.sets);
  Tensor dx = x.like();
  Run run(NS_NORM_BACKWARD, recipe, x, dx, weight, Tensor());
  run.call.stats = stats.data;
  backward(stack, dy, dsum, x, weight, run, g, want);
}

template <bool packed>
void fixed_backward(Value *stack) {
  Arguments arguments(stack);
  Tensor dy = arguments.tensor(), x = arguments.tensor(), mean = arguments.tensor(), var = arguments.tensor();
  Tensor weight = arguments.optional(), none;
  const NsRecipe recipe = recipe_of<packed>(arguments);
  const int64_t want = arguments.integer();
  check_input(x);
  const Geometry g(x, recipe);
  check_vector(weight, g.parameters, "weight", "parameters");
  check_stored(mean, var, g.sets);
  Tensor dx = x.like();
  Run run(NS_FIXED_BACKWARD, recipe, x, dx, weight, Tensor());
  run.call.mean = mean.data, run.call.var = var.data, run.call.stored_dtype = mean.dtype;
  backward(stack, dy, none, x, weight, run, g, want);
}

void norm_masked_backward(Value *stack) {
  Arguments arguments(stack);
  Tensor dy = arguments.tensor(), x = arguments.tensor(), mask = arguments.tensor(), stats = arguments.tensor();
  Tensor weight = arguments.optional(), none;
  const NsRecipe recipe = recipe_of<false>(arguments);
  const int64_t want = arguments.integer();
  check_input(x);
  check_mask(mask, x);
  const Geometry g(x, recipe);
  check_vector(weight, g.parameters, "weight", "parameters");
  check_stats(stats, x, recipe, g.sets, 1);
  Tensor dx = x.like();
  Run run(NS_NORM_BACKWARD, recipe, x, dx, weight, none);
  run.under(mask);
  run.call.stats = stats.data;
  backward(stack, dy, none, x, weight, run, g, want);
}

void norm_backward_by(Value *stack) {
  Arguments arguments(stack);
  Tensor dy = arguments.tensor(), x = arguments.tensor(), stats = arguments.tensor(), sums = arguments.tensor();
  Tensor weight = arguments.optional(), none;
  const NsRecipe recipe = recipe_of<false>(arguments);
  check_input(x);
  check_like(dy, x, "dy");
  const Geometry g(x, recipe);
  check_vector(weight, g.parameters, "weight", "parameters");
  check_vector(sums, 2 * g.sets, "sums", "sums");
  if (sums.dtype != NS_FLOAT64) throw Failure("normscope: sums are float64");
  check_stats(stats, x, recipe, g.sets);
  Tensor dx = x.like();
  if (x.numel() != 0) {
    dy.lay(dx.strides);
    Run run(NS_NORM_BACKWARD, recipe, x, dx, weight, none);
    run.dy = &dy;
    run.call.stats = stats.data, run.call.sums = static_cast<const double *>(sums.data);
    run();
  }
  give(stack, {&dx});
}

// mean += momentum (batch mean - mean), the same for var with the corrected variance; the sets that share one stored value
// are averaged, and follow one another in steps of the number of stored values.
template <class State, class T>
void follow(const Tensor &mean_of, const Tensor &var_of, const Tensor &stats, int64_t sets, double momentum,
            double unbias) {
  State *mean = static_cast<State *>(mean_of.data), *var = static_cast<State *>(var_of.data);
  const T *means = static_cast<const T *>(stats.data), *lost = means + sets, *r = lost + sets;
  const int64_t stored = mean_of.numel();
  for (int64_t c = 0; c < stored; ++c) {
    double m = 0, v = 0;
    for (int64_t s = c; s < sets; s += stored) m += double(means[s]) + lost[s], v += double(r[s]) * r[s];
    const double share = double(stored) / double(sets);
    mean[c] = State((1 - momentum) * mean[c] + momentum * share * m);
    var[c] = State((1 - momentum) * var[c] + momentum * share * unbias * v);
  }
}

void update_running(Value *stack) {
  Arguments arguments(stack);
  Tensor mean = arguments.tensor(), var = arguments.tensor(), stats = arguments.tensor();
  const double momentum = arguments.number(), count = arguments.number(), correction = arguments.number();
  check_vector(stats, stats.numel(), "stats", "statistics");
  check_dtype(mean, "mean");
  check_dtype(var, "var");
  const int64_t sets = stats.numel() / 3, stored = mean.numel();
  if (stats.dim != 2 || stats.sizes[0] != 3 || var.numel() != stored || (stored ? sets % stored : sets))
    throw Failure("normscope: %lld means and %lld variances for the statistics of %lld sets", (long long)stored,
                  (long long)var.numel(), (long long)sets);
  // As they are, where they are of the statistics' dtype and side by side; else as float64, put back afterwards.
  const double unbias = count / (count - correction);
  const int32_t dtype = stats.dtype;
  if (mean.dtype == dtype && var.dtype == dtype && mean.lies(mean.contiguous().of) && var.lies(var.contiguous().of)) {
    if (dtype == NS_FLOAT64)
      follow<double, double>(mean, var, stats, sets, momentum, unbias);
    else
      follow<float, float>(mean, var, stats, sets, momentum, unbias);
    return;
  }
  Tensor mean_copy = mean.copied(mean.contiguous().of, NS_FLOAT64);
  Tensor var_copy = var.copied(var.contiguous().of, NS_FLOAT64);
  if (dtype == NS_FLOAT64)
    follow<double, double>(mean_copy, var_copy, stats, sets, momentum, unbias);
  else
    follow<double, float>(mean_copy, var_copy, stats, sets, momentum, unbias);
  mean.fill(mean_copy), var.fill(var_copy);
}

// Registration -------------------------------------------------------------------------------------------------------

// Whether the operator ran; what is wrong goes into `text`. Kept apart from its caller, which an exception of PyTorch's
// passes through: that one must hold nothing to clean up, and no exception handler of this library's C++ runtime.
template <void (*operate)(Value *)>
__attribute__((noinline)) bool runs(Value *stack, char *text) noexcept {
  try {
    operate(stack);
    return true;
  } catch (const Failure &failure) {
    std::memcpy(text, failure.text, sizeof failure.text);
    return false;
  }
}

template <void (*operate)(Value *)>
void boxed(Value *stack, uint64_t, uint64_t) {
  char text[sizeof(Failure::text)];
  if (!runs<operate>(stack, text)) torch.raise(false, "normscope", "shim.cpp", 0, text);
}

struct Operator {
  const char *name;
  Kernel kernel;
};

const Operator kOperators[] = {
    {"norm", boxed<norm<false>>},
    {"norm_backward", boxed<norm_backward<false>>},
    {"norm_out", boxed<norm_out<false>>},
    {"add_norm", boxed<add_norm<false>>},
    {"fixed", boxed<fixed<false>>},
    {"fixed_backward", boxed<fixed_backward<false>>},
    {"update_running", boxed<update_running>},
    {"norm_masked", boxed<norm_masked>},
    {"norm_masked_backward", boxed<norm_masked_backward>},
    {"moments", boxed<moments>},
    {"norm_backward_by", boxed<norm_backward_by>},
    // with gradients, which kernels/autograd.py registers
    {"normalize", boxed<norm<false>>},
    {"add_normalize", boxed<add_norm<false>>},
    {"normalize_by", boxed<fixed<false>>},
    {"normalize_masked", boxed<norm_masked>},
    // for calls that Python makes
    {"norm_packed", boxed<norm<true>>},
    {"norm_only_packed", boxed<norm_only>},
    {"norm_backward_packed", boxed<norm_backward<true>>},
    {"norm_out_packed", boxed<norm_out<true>>},
    {"add_norm_packed", boxed<add_norm<true>>},
    {"fixed_packed", boxed<fixed<true>>},
    {"fixed_backward_packed", boxed<fixed_backward<true>>},
};

enum Registered { kRegistered = 0, kUntested = 1, kLacking = 2, kRefused = 3 };

}  // namespace
}  // namespace ns

// Implements the operators for CPU tensors. `version` is PyTorch's, "2.13.0+cpu"; older ones than that are not tried.
extern "C" NS_EXPORT int ns_register(const char *version) {
  int major = 0, minor = 0;
  if (std::sscanf(version, "%d.%d", &major, &minor) != 2 || major != 2 || minor < 13) return ns::kUntested;
  if (!ns::torch.find()) return ns::kLacking;
  ns::TorchLibrary *library = nullptr;  // never freed: its registrations live as long as it does
  if (ns::torch.init_impl("normscope", "CPU", "shim.cpp", 0, &library) != 0) return ns::kRefused;
  for (const ns::Operator &o : ns::kOperators)
    if (ns::torch.implement(library, o.name, o.kernel, ns::torch.version) != 0) return ns::kRefused;
  return ns::kRegistered;
}
