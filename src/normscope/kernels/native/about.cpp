// What a library says about itself: whether it fits the Python side, what it was made with, whose threads it runs on.
#include <algorithm>
#include <cstddef>
#include <iterator>

#include "normscope.h"
#include "parallel.hpp"

int ns_abi(void) { return NS_ABI; }

const char *ns_compiler(void) {
#ifdef __clang__
  return "clang " __clang_version__;
#else
  return "gcc " __VERSION__;
#endif
}

const char *ns_pool(void) { return ns::Pool::get().file(); }

int ns_struct_layout(int64_t *numbers) {
  static const int64_t layout[] = {
      sizeof(NsRecipe), offsetof(NsRecipe, axes), offsetof(NsRecipe, split), offsetof(NsRecipe, options),
      offsetof(NsRecipe, eps), offsetof(NsRecipe, gain), offsetof(NsRecipe, offset),
      sizeof(NsCall), offsetof(NsCall, what), offsetof(NsCall, dtype), offsetof(NsCall, weight_dtype),
      offsetof(NsCall, stored_dtype), offsetof(NsCall, ndim), offsetof(NsCall, threads), offsetof(NsCall, recipe),
      offsetof(NsCall, sizes), offsetof(NsCall, x_strides), offsetof(NsCall, y_strides), offsetof(NsCall, x),
      offsetof(NsCall, residual), offsetof(NsCall, weight), offsetof(NsCall, bias), offsetof(NsCall, mean),
      offsetof(NsCall, var), offsetof(NsCall, dy), offsetof(NsCall, dsum), offsetof(NsCall, y), offsetof(NsCall, sum),
      offsetof(NsCall, stats), offsetof(NsCall, dx), offsetof(NsCall, dweight), offsetof(NsCall, dbias),
      offsetof(NsCall, mask), offsetof(NsCall, mask_strides), offsetof(NsCall, sums),
  };
  std::copy(std::begin(layout), std::end(layout), numbers);
  return static_cast<int>(std::size(layout));
}
