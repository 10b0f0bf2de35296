#include "os/fork.h"

#include <pthread.h>
#include <unistd.h>

#include <set>

#include "common.h"
#include "os/mutex.h"

namespace datastates {
namespace {

struct Registry {
  Mutex mutex;
  std::set<int> descriptors GUARDED_BY(mutex);
};

// Leaked on purpose: atfork handlers may run while statics are being destroyed. Made when the module is
// loaded, not at first use: a process forked meanwhile would wait for ever for the thread that made it.
Registry& registry = *new Registry;

// The lock is held across the fork, so that the child never inherits it locked by another thread.
void BeforeFork() NO_THREAD_SAFETY_ANALYSIS { registry.mutex.Lock(); }
void InParent() NO_THREAD_SAFETY_ANALYSIS { registry.mutex.Unlock(); }
void InChild() NO_THREAD_SAFETY_ANALYSIS {
  for (int fd : registry.descriptors) close(fd);
  registry.descriptors.clear();
  registry.mutex.Unlock();
}

[[maybe_unused]] const int handled = pthread_atfork(BeforeFork, InParent, InChild);

}  // namespace

void CloseInForkedChild(int fd) {
  const MutexLock lock(registry.mutex);
  registry.descriptors.insert(fd);
}

void CloseInForkedChildOrNow(int fd) {
  try {
    CloseInForkedChild(fd);
  } catch (const std::bad_alloc&) {
    close(fd);
    throw;
  }
}

void ForgetDescriptor(int fd) {
  const MutexLock lock(registry.mutex);
  registry.descriptors.erase(fd);
}

HomeProcess::HomeProcess() : pid_(getpid()) {}

bool HomeProcess::IsHere() const { return getpid() == pid_; }

}  // namespace datastates
