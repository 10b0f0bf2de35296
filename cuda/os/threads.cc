#include "os/threads.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>

#include "os/numa.h"

namespace datastates {

void BeginThread(const char* name) noexcept {
  pthread_setname_np(pthread_self(), name);
  sigset_t left;
  sigfillset(&left);
  for (const int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT}) sigdelset(&left, own);
  pthread_sigmask(SIG_BLOCK, &left, nullptr);
}

void YieldToWakers() noexcept {
  const sched_param none{};
  if (sched_getscheduler(0) == SCHED_OTHER) sched_setscheduler(0, SCHED_BATCH, &none);
}

size_t UsableCores() noexcept {
  CpuSet allowed;
  if (!allowed.ReadAffinity()) return 1;
  return std::max<size_t>(1, allowed.Count());
}

}  // namespace datastates
