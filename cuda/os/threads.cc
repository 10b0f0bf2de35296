#include "os/threads.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>

#include "os/numa.h"

namespace datastates {

void NameThread(const char* name) noexcept { pthread_setname_np(pthread_self(), name); }

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
