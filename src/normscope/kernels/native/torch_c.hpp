// As much of PyTorch as the operators need, through its stable C interface: functions found by name in the library that
// Python has loaded, declared here by hand. Nothing of PyTorch is compiled in or linked.
//
// What the interface asks for, and what this file takes care of: a boxed kernel owns its arguments and must free them;
// every function tells by its return value whether it failed; a failure must reach PyTorch as PyTorch's own exception.
#pragma once
#include <dlfcn.h>

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <utility>

#include "normscope.h"

namespace ns {

// What is wrong, in words for the user. Thrown and caught within this library.
struct Failure {
  char text[360];
  __attribute__((format(printf, 2, 3))) explicit Failure(const char *format, ...) {
    va_list values;
    va_start(values, format);
    std::vsnprintf(text, sizeof text, format, values);
    va_end(values);
  }
};

using Value = uint64_t;  // one argument or result of an operator: a number's bits, or a pointer
struct TorchTensor;      // owned by whoever holds the pointer
struct TorchLibrary;
using Kernel = void (*)(Value *stack, uint64_t arguments, uint64_t results);

constexpr int32_t kCpu = 0, kMostDims = 16, kOtherDtype = 4;

struct Torch {
  int32_t (*init_impl)(const char *space, const char *key, const char *file, uint32_t line, TorchLibrary **);
  int32_t (*implement)(TorchLibrary *, const char *name, Kernel, uint64_t version);
  int32_t (*call)(const char *name, const char *overload, Value *stack, uint64_t version);
  int32_t (*data)(TorchTensor *, void **);
  int32_t (*sizes)(TorchTensor *, int64_t **);
  int32_t (*strides)(TorchTensor *, int64_t **);
  int32_t (*dim)(TorchTensor *, int64_t *);
  int32_t (*dtype)(TorchTensor *, int32_t *);
  int32_t (*empty_strided)(int64_t dim, const int64_t *sizes, const int64_t *strides, int32_t dtype, int32_t device,
                           int32_t index, TorchTensor **);
  int32_t (*share)(TorchTensor *, TorchTensor **);
  int32_t (*copy)(TorchTensor *to, TorchTensor *from, int32_t non_blocking);
  int32_t (*zero)(TorchTensor *);
  int32_t (*release)(TorchTensor *);
  int32_t (*release_value)(Value *);
  int32_t (*threads)(uint32_t *);
  void (*raise)(bool fine, const char *function, const char *file, uint32_t line, const char *text);
  int32_t dtypes[4];  // PyTorch's number of each NsDtype
  int32_t boolean;
  uint64_t version;   // of the interface that this file is written for

  // False where this PyTorch lacks one of them.
  bool find() {
    void *library = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    if (!library) return false;
    bool found = true;
    auto get = [&](auto &function, const char *name) {
      void *symbol = dlsym(library, name);
      static_assert(sizeof symbol == sizeof function, "a function is a pointer");
      std::memcpy(&function, &symbol, sizeof symbol);
      found = found && symbol;
    };
    get(init_impl, "aoti_torch_library_init_impl");
    get(implement, "torch_library_impl");
    get(call, "torch_call_dispatcher");
    get(data, "aoti_torch_get_data_ptr");
    get(sizes, "aoti_torch_get_sizes");
    get(strides, "aoti_torch_get_strides");
    get(dim, "aoti_torch_get_dim");
    get(dtype, "aoti_torch_get_dtype");
    get(empty_strided, "aoti_torch_empty_strided");
    get(share, "aoti_torch_new_tensor_handle");
    get(copy, "aoti_torch_copy_");
    get(zero, "aoti_torch_zero_");
    get(release, "aoti_torch_delete_tensor_object");
    get(release_value, "torch_delete_stable_ivalue");
    get(threads, "torch_get_num_threads");
    get(raise, "aoti_torch_check");
    static const char *const names[] = {"aoti_torch_dtype_float32", "aoti_torch_dtype_bfloat16",
                                        "aoti_torch_dtype_float16", "aoti_torch_dtype_float64"};
    for (int i = 0; i < 4; ++i) {
      int32_t (*number)() = nullptr;
      get(number, names[i]);
      if (number) dtypes[i] = number();
    }
    int32_t (*number)() = nullptr;
    get(number, "aoti_torch_dtype_bool");
    if (number) boolean = number();
    version = uint64_t(2) << 56 | uint64_t(13) << 48;
    return found;
  }
};

inline Torch torch;

inline void check(int32_t code, const char *what) {
  if (code != 0) throw Failure("normscope: PyTorch could not %s", what);
}

// A tensor that is owned, or none; with what a kernel asks of it, read once.
class Tensor {
 public:
  void *data = nullptr;
  int64_t *sizes = nullptr, *strides = nullptr, dim = 0;
  int32_t dtype = 0;  // an NsDtype, or kOtherDtype

  Tensor() = default;
  explicit Tensor(TorchTensor *owned) : Tensor() {
    handle_ = owned;
    read();
  }
  Tensor(Tensor &&other) noexcept { *this = std::move(other); }
  Tensor &operator=(Tensor &&other) noexcept {
    std::swap(handle_, other.handle_);
    data = other.data, sizes = other.sizes, strides = other.strides, dim = other.dim, dtype = other.dtype;
    return *this;
  }
  ~Tensor() {
    if (handle_) torch.release(handle_);
  }

  static Tensor empty(int64_t dim, const int64_t *sizes, const int64_t *strides, int32_t dtype) {
    TorchTensor *made = nullptr;
    check(torch.empty_strided(dim, sizes, strides, torch.dtypes[dtype], kCpu, 0, &made), "allocate a tensor");
    return Tensor(made);
  }

  explicit operator bool() const { return handle_ != nullptr; }
  TorchTensor *handle() const { return handle_; }
  bool is_boolean() const {
    int32_t number = 0;
    check(torch.dtype(handle_, &number), "tell a tensor's dtype");
    return number == torch.boolean;
  }
  TorchTensor *hand_over() { return std::exchange(handle_, nullptr); }

  int64_t numel() const {
    int64_t n = 1;
    for (int64_t d = 0; d < dim; ++d) n *= sizes[d];
    return n;
  }

  // Whether elements stand where those of a tensor of the same sizes and these strides stand.
  bool lies(const int64_t *wanted) const {
    for (int64_t d = 0; d < dim; ++d)
      if (sizes[d] > 1 && strides[d] != wanted[d]) return false;
    return true;
  }

  // The same elements at these strides; in this dtype, where one is given.
  Tensor copied(const int64_t *wanted, int32_t to = -1) const {
    Tensor made = empty(dim, sizes, wanted, to < 0 ? dtype : to);
    made.fill(*this);
    return made;
  }
  void fill(const Tensor &from) { check(torch.copy(handle_, from.handle_, 0), "copy a tensor"); }

  // Moves to memory of these strides unless it lies so already.
  void lay(const int64_t *wanted) {
    if (*this && !lies(wanted)) *this = copied(wanted);
  }

  // Strides of a contiguous tensor.
  struct Strides {
    int64_t of[kMostDims];
  };
  Strides contiguous() const {
    Strides s;
    int64_t step = 1;
    for (int64_t d = dim - 1; d >= 0; --d) s.of[d] = step, step *= sizes[d] > 1 ? sizes[d] : 1;
    return s;
  }
  void pack() {
    if (*this) lay(contiguous().of);
  }

  // Every element once and none between: what empty_like gives the strides of, as they are.
  bool dense() const {
    bool done[kMostDims] = {};
    int64_t step = 1, left = 0;
    for (int64_t d = 0; d < dim; ++d) {
      if (sizes[d] == 0) return true;
      left += sizes[d] > 1;
    }
    for (; left > 0; --left) {
      int64_t d = 0;
      while (d < dim && (done[d] || sizes[d] <= 1 || strides[d] != step)) ++d;
      if (d == dim) return false;
      done[d] = true, step *= sizes[d];
    }
    return true;
  }

  // As torch.empty_like.
  Tensor like() const {
    if (dense()) return empty(dim, sizes, strides, dtype);
    Value stack[6] = {};  // the tensor, and every option None
    TorchTensor *mine = nullptr;
    check(torch.share(handle_, &mine), "share a tensor");
    stack[0] = reinterpret_cast<Value>(mine);
    check(torch.call("aten::empty_like", "", stack, torch.version), "allocate a tensor");
    return Tensor(reinterpret_cast<TorchTensor *>(stack[0]));
  }

 private:
  TorchTensor *handle_ = nullptr;

  void read() {
    int32_t number = 0;
    check(torch.dim(handle_, &dim), "tell a tensor's dimensions");
    check(torch.sizes(handle_, &sizes), "tell a tensor's sizes");
    check(torch.strides(handle_, &strides), "tell a tensor's strides");
    check(torch.data(handle_, &data), "tell a tensor's memory");
    check(torch.dtype(handle_, &number), "tell a tensor's dtype");
    while (dtype < kOtherDtype && torch.dtypes[dtype] != number) ++dtype;
  }
};

// The arguments of one call, from left to right. All are taken, and so owned, before anything is found wrong with one.
class Arguments {
 public:
  explicit Arguments(Value *stack) : stack_(stack) {}

  Tensor tensor() { return Tensor(reinterpret_cast<TorchTensor *>(std::exchange(stack_[at_++], 0))); }
  Tensor optional() {
    Value *boxed = reinterpret_cast<Value *>(std::exchange(stack_[at_++], 0));
    if (!boxed) return Tensor();
    TorchTensor *inside = reinterpret_cast<TorchTensor *>(*boxed);
    check(torch.release_value(boxed), "free an argument");
    return Tensor(inside);
  }
  int64_t integer() { return static_cast<int64_t>(stack_[at_++]); }
  double number() {
    double value;
    std::memcpy(&value, &stack_[at_++], sizeof value);
    return value;
  }

 private:
  Value *stack_;
  int at_ = 0;
};

}  // namespace ns
