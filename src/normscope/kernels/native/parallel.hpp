// Work on several threads, and memory to work in.
//
// Threads are those of the OpenMP library that PyTorch has loaded, called through GOMP_parallel, the function that a
// compiler's `#pragma omp parallel` becomes. A pool of our own, or a second OpenMP library, would fight for the cores with
// PyTorch's workers, which keep spinning for a while after each of its operators. So nothing is linked: the function is
// looked up when first needed, and without it everything runs on the calling thread.
#pragma once
#include <dlfcn.h>
#include <pthread.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <type_traits>
#include <utility>

#include "normscope.h"

namespace ns {

// ---- the pool

// libgomp's workers do not survive fork(): a child that calls on them waits for ever. A child forked from a process of
// several threads therefore runs on its one thread; where the parent had no other thread there was no pool, and the child
// may start its own.
inline std::atomic<bool> pool_lost{false};

namespace detail {
inline bool was_alone = false;
inline void before_fork() {
  struct stat task;  // the directory of a process's threads has one link for each, and two of its own
  was_alone = stat("/proc/self/task", &task) == 0 && task.st_nlink == 3;
}
inline void in_child() {
  if (!was_alone) pool_lost = true;
}
}  // namespace detail

struct Pool {
  using Parallel = void (*)(void (*)(void *), void *, unsigned threads, unsigned flags);
  Parallel parallel = nullptr;
  int (*in_parallel)() = nullptr;

  static const Pool &get() {
    static const Pool pool;
    return pool;
  }

  const char *file() const {
    Dl_info info;
    return parallel && dladdr(reinterpret_cast<void *>(parallel), &info) && info.dli_fname ? info.dli_fname : "";
  }

 private:
  Pool() {
    find(RTLD_DEFAULT);
    // Loaded, but not for all to see. LLVM's and Intel's OpenMP have GNU's entry points too.
    for (const char *name : {"libgomp.so.1", "libiomp5.so", "libomp.so", "libomp.dylib"}) {
      if (parallel) break;
      if (void *handle = dlopen(name, RTLD_LAZY | RTLD_NOLOAD)) find(handle);
    }
    if (parallel && pthread_atfork(detail::before_fork, nullptr, detail::in_child) != 0) parallel = nullptr;
  }

  void find(void *handle) {
    void *start = dlsym(handle, "GOMP_parallel"), *inside = dlsym(handle, "omp_in_parallel");
    if (!start || !inside) return;
    parallel = reinterpret_cast<Parallel>(start);
    in_parallel = reinterpret_cast<int (*)()>(inside);
  }
};

// ---- loops

// body(task) for every task in [0, tasks), in any order, on at most `threads` threads. The body returns nothing, or an
// NsResult: the first that is not NS_DONE ends the loop early and is returned. Tasks are handed out as threads become free,
// because on a shared machine one thread may be kept waiting; so a result must not depend on which thread ran which task.
// An exception in the body ends the program: it could not pass through the pool.
template <class F>
int parallel_for(int64_t tasks, int threads, F &&body) noexcept {
  const auto run = [&body](int64_t task) -> int {
    if constexpr (std::is_void_v<decltype(body(task))>) {
      body(task);
      return NS_DONE;
    } else {
      return body(task);
    }
  };

  threads = static_cast<int>(std::min<int64_t>(threads, tasks));
  if (threads <= 1 || !Pool::get().parallel || Pool::get().in_parallel() || pool_lost.load(std::memory_order_relaxed)) {
    for (int64_t task = 0; task < tasks; ++task)
      if (const int result = run(task); result != NS_DONE) return result;
    return NS_DONE;
  }

  struct Loop {
    const decltype(run) &one;
    const int64_t tasks, portion;
    std::atomic<int64_t> next{0};
    std::atomic<int> result{NS_DONE};

    static void work(void *self) noexcept {
      Loop &loop = *static_cast<Loop *>(self);
      while (loop.result.load(std::memory_order_relaxed) == NS_DONE) {
        const int64_t begin = loop.next.fetch_add(loop.portion, std::memory_order_relaxed);
        if (begin >= loop.tasks) return;
        const int64_t end = std::min(begin + loop.portion, loop.tasks);
        for (int64_t task = begin; task < end; ++task)
          if (const int result = loop.one(task); result != NS_DONE) {
            loop.result = result;
            return;
          }
      }
    }
  };
  // Sixteen portions a thread: the last one ends soon after the others, and the counter is not what they wait for.
  Loop loop{run, tasks, std::max<int64_t>(1, tasks / (int64_t{16} * threads))};
  Pool::get().parallel(Loop::work, &loop, static_cast<unsigned>(threads), 0);
  return loop.result;
}

// ---- memory

namespace detail {
struct Block {
  void *data = nullptr;
  std::size_t size = 0;
};

struct Kept {
  Block blocks[2];
  ~Kept() {
    for (Block &block : blocks) std::free(block.data);
  }
};

inline thread_local Kept kept;
}  // namespace detail

// Uninitialized memory for the time of a scope, 64-byte aligned; false where there was none (NS_NO_MEMORY). Each thread
// keeps its last two small blocks, so that a call on a small tensor does not pay for malloc.
class Scratch {
 public:
  explicit Scratch(std::size_t bytes) noexcept : size_((bytes + 63) / 64 * 64) {
    if (bytes > SIZE_MAX - 63) return;
    for (detail::Block &block : detail::kept.blocks)
      if (block.data && block.size >= size_) {
        std::swap(data_, block.data);
        size_ = block.size;
        return;
      }
    if (posix_memalign(&data_, 64, std::max<std::size_t>(size_, 64)) != 0) data_ = nullptr;
  }

  ~Scratch() {
    if (data_ && size_ <= most_kept)
      for (detail::Block &block : detail::kept.blocks)
        if (!block.data || block.size < size_) {
          std::swap(data_, block.data);
          std::swap(size_, block.size);
          if (!data_) return;
        }
    std::free(data_);
  }

  Scratch(const Scratch &) = delete;
  Scratch &operator=(const Scratch &) = delete;

  explicit operator bool() const { return data_ != nullptr; }

  template <class T>
  T *as() const {
    return static_cast<T *>(data_);
  }

 private:
  static constexpr std::size_t most_kept = std::size_t{1} << 20;

  void *data_ = nullptr;
  std::size_t size_;
};

}  // namespace ns
