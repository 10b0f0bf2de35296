// Waits for 0.1 seconds, beside a system clock that is set back by an hour after each look at it.
#if __has_include(<bits/c++config.h>)
#include <bits/c++config.h>
#undef _GLIBCXX_USE_PTHREAD_COND_CLOCKWAIT  // as it is for a glibc older than 2.30
#endif

#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "os/mutex.h"

extern "C" int clock_gettime(clockid_t clock, timespec* now) noexcept {
  const long failed = syscall(SYS_clock_gettime, clock, now);
  if (failed == 0 && clock == CLOCK_REALTIME) now->tv_sec += 3600;  // to whoever waits, it is that late now
  return static_cast<int>(failed);
}

int main() {
  using datastates::CondVar;
  datastates::Mutex mutex;
  CondVar changed;
  const datastates::MutexLock lock(mutex);
  const auto deadline = datastates::DeadlineAfter(0.1);
  while (changed.WaitUntil(mutex, deadline)) continue;
  return CondVar::Clock::now() < deadline ? 1 : 0;
}
