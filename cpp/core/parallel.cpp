// SPDX-License-Identifier: Apache-2.0
#include "core/parallel.h"

#include <dlfcn.h>
#include <link.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <exception>
#include <fstream>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>

#include "core/thread_pool.h"
#include "rooftile/build.h"

namespace rooftile {
namespace {

// ---- the process' own OpenMP runtime, if one is loaded --------------------------------------------------------------

struct OpenMp {
  void (*parallel)(void (*fn)(void*), void* data, unsigned threads, unsigned flags) = nullptr;  // GOMP_parallel
  int (*max_threads)() = nullptr;
  int (*thread_num)() = nullptr;
  int (*in_parallel)() = nullptr;
  bool usable() const { return parallel && max_threads && thread_num && in_parallel; }
};

int look_for_runtime(dl_phdr_info* info, std::size_t, void* found) {
  const char* path = info->dlpi_name;
  const char* base = path ? std::strrchr(path, '/') : nullptr;
  base = base ? base + 1 : path;
  if (base && (std::strncmp(base, "libgomp", 7) == 0 || std::strncmp(base, "libiomp", 7) == 0 ||
               std::strncmp(base, "libomp", 6) == 0)) {
    *static_cast<std::string*>(found) = path;
    return 1;
  }
  return 0;
}

OpenMp find_openmp() {
  OpenMp runtime;
  std::string path;
  dl_iterate_phdr(look_for_runtime, &path);
  if (path.empty()) return runtime;
  void* library = dlopen(path.c_str(), RTLD_NOLOAD | RTLD_LAZY);  // already loaded: only its handle
  if (!library) return runtime;
  const auto get = [&](auto& function, const char* symbol) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, symbol));
  };
  get(runtime.parallel, "GOMP_parallel");
  get(runtime.max_threads, "omp_get_max_threads");
  get(runtime.thread_num, "omp_get_thread_num");
  get(runtime.in_parallel, "omp_in_parallel");
  return runtime;
}

// Number of libraries this process has loaded so far.
unsigned long long libraries_loaded() {
  unsigned long long count = 0;
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* to) {
        *static_cast<unsigned long long*>(to) = info->dlpi_adds;
        return 1;  // every entry says the same
      },
      &count);
  return count;
}

// The lookup repeats after every library load until it finds a runtime: torch may be imported after rooftile.
const OpenMp& openmp() {
  static std::mutex mutex;
  static OpenMp runtime;
  static const OpenMp none;
  static std::atomic<bool> ready{false};
  static std::atomic<unsigned long long> looked_at{0};
  if (ready.load(std::memory_order_acquire)) return runtime;
  const unsigned long long loaded = libraries_loaded();
  if (looked_at.load(std::memory_order_relaxed) == loaded) return none;
  std::lock_guard lock(mutex);
  if (ready.load(std::memory_order_relaxed)) return runtime;
  const OpenMp found = find_openmp();
  if (!found.usable()) {
    looked_at.store(loaded, std::memory_order_relaxed);
    return none;
  }
  runtime = found;
  ready.store(true, std::memory_order_release);
  return runtime;
}

// Whether this process was forked and has not called exec since: PF_FORKNOEXEC of its flags in /proc/self/stat.
bool is_forked() {
  std::ifstream file("/proc/self/stat");
  std::string line;
  std::getline(file, line);
  const std::size_t name_end = line.rfind(')');  // fields behind it: state, five ids, flags
  if (name_end == std::string::npos) return false;
  std::istringstream fields(line.substr(name_end + 1));
  std::string skipped;
  unsigned long flags = 0;
  for (int i = 0; i < 6; ++i) fields >> skipped;
  return fields >> flags && (flags & 0x40) != 0;
}

// The process whose OpenMP threads are certain to be its own: the one that loaded this library, unless it is a forked
// child that found a runtime. A child has none of its parent's threads and would wait for them forever.
const pid_t openmp_owner = is_forked() && find_openmp().usable() ? 0 : getpid();

bool openmp_is_ours() { return getpid() == openmp_owner; }

int usable_cores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1u, std::thread::hardware_concurrency());
}

// ---- the loop, common to both kinds of threads ----------------------------------------------------

// Neighbouring tasks read neighbouring memory, so of n threads thread t begins with the t-th of n parts of the tasks; a
// thread whose part is taken helps with the next one.
struct Loop {
  Loop(void (*task)(const void*, std::int64_t, int), const void* body, std::int64_t tasks, int threads)
      : task(task), body(body), tasks(tasks), parts(std::min(threads, max_parts)) {}

  static constexpr int max_parts = 16;  // more threads share parts
  struct Part {
    alignas(64) std::atomic<std::int64_t> taken{0};  // on a cache line of its own
  };

  void (*task)(const void*, std::int64_t, int);
  const void* body;
  std::int64_t tasks;
  int parts;
  std::array<Part, max_parts> part;
  std::atomic<bool> failed{false};
  std::exception_ptr error;
  std::mutex error_mutex;

  // After an error the tasks that are left are skipped.
  void run_task(std::int64_t i, int thread) {
    if (failed.load(std::memory_order_relaxed)) return;
    try {
      task(body, i, thread);
    } catch (...) {
      std::lock_guard lock(error_mutex);
      if (!error) error = std::current_exception();
      failed.store(true, std::memory_order_relaxed);
    }
  }
  // Runs a task that no thread has taken. False: there is none.
  bool run_next(int thread) {
    for (int i = 0; i < parts; ++i) {
      const int p = (thread + i) % parts;
      const std::int64_t begin = begin_of(p), count = begin_of(p + 1) - begin;
      std::atomic<std::int64_t>& taken = part[static_cast<std::size_t>(p)].taken;
      if (taken.load(std::memory_order_relaxed) >= count) continue;
      const std::int64_t mine = taken.fetch_add(1, std::memory_order_relaxed);
      if (mine >= count) continue;
      run_task(begin + mine, thread);
      return true;
    }
    return false;
  }
  void work(int thread) {
    while (run_next(thread)) {}
  }

 private:
  // The first task of a part. The first tasks % parts parts have one more than the others.
  std::int64_t begin_of(int p) const { return tasks / parts * p + std::min<std::int64_t>(p, tasks % parts); }
};

ThreadPool& own_pool() {
  // A forked child leaves the parent's pool undestroyed: it would join threads that are not there.
  static struct Owner {
    std::unique_ptr<ThreadPool> pool = std::make_unique<ThreadPool>();
    ~Owner() {
      if (pool->of_parent()) (void)pool.release();
    }
  } owner;
  return *owner.pool;
}

}  // namespace

Parallel::Parallel(int threads) : threads_(threads) {
  if (threads_ > 0) return;
  const OpenMp& runtime = openmp();
  threads_ = runtime.usable() ? std::max(1, runtime.max_threads()) : usable_cores();
}

void Parallel::run_erased(std::int64_t tasks, Task task, const void* body) const {
  if (tasks == 0) return;
  const int width = static_cast<int>(std::min<std::int64_t>(threads_, tasks));
  Loop loop(task, body, tasks, width);
  const OpenMp& runtime = openmp();
  if (width <= 1 || (runtime.usable() && runtime.in_parallel())) {
    loop.work(0);
  } else if (runtime.usable() && openmp_is_ours()) {
    struct Team {
      Loop* loop;
      int (*thread_num)();
    } team{&loop, runtime.thread_num};
    runtime.parallel([](void* t) { static_cast<Team*>(t)->loop->work(static_cast<Team*>(t)->thread_num()); }, &team,
                     static_cast<unsigned>(threads_),
                     0);  // always the full team: libgomp keeps threads alive for one team size only
  } else {
    const auto run_next = [](void* l, std::int64_t, int thread) { static_cast<Loop*>(l)->run_next(thread); };
    if (!own_pool().run(tasks, width, run_next, &loop)) loop.work(0);
  }
  if (loop.error) std::rethrow_exception(loop.error);
}

const char* parallel_backend() { return openmp().usable() ? "openmp (shared)" : "rooftile"; }

}  // namespace rooftile
