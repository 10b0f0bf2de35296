// Preloaded: one thread of those that a program starts begins to run late, as on a machine that is busy.
#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>

namespace {

using Run = void* (*)(void*);
using Create = int (*)(pthread_t*, const pthread_attr_t*, Run, void*);

struct Late {
  Run run;
  void* argument;
};

std::atomic<int> before_it{-1};

void* RunLate(void* given) {
  const Late late = *static_cast<Late*>(given);
  delete static_cast<Late*>(given);
  sleep(1);
  return late.run(late.argument);
}

}  // namespace

extern "C" {

// Delays the thread that is started after so many others.
void delay_thread(int others) { before_it = others; }

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, Run run, void* argument) noexcept {
  static const auto create = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
  if (before_it >= 0 && before_it-- == 0) return create(thread, attributes, RunLate, new Late{run, argument});
  return create(thread, attributes, run, argument);
}

}  // extern "C"
