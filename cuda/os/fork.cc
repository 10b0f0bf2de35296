#include "os/fork.h"

#include <pthread.h>
#include <unistd.h>

#include <set>

#include "common.h"
#include "os/mutex.h"

namespace datastates {
namespace {

// Leaked on purpose: atfork handlers may run while statics are being destroyed.
struct Registry {
  Mutex mutex;
  std::set<int> descriptors GUARDED_BY(mutex);
};

Registry& TheRegistry();

// The lock is held across the fork, so that the child never inherits it locked by another thread.
void BeforeFork() NO_THREAD_SAFETY_ANALYSIS { TheRegistry().mutex.Lock(); }
void InParent() NO_THREAD_SAFETY_ANALYSIS { TheRegistry().mutex.Unlock(); }
void InChild() NO_THREAD_SAFETY_ANALYSIS {
  for (int fd : TheRegistry().descriptors) close(fd);
  TheRegistry().descriptors.clear();
  TheRegistry().mutex.Unlock();
}

Registry& TheRegistry() {
  static Registry* registry = [] {
    auto* made = new Registry;
    pthread_atfork(BeforeFork, InParent, InChild);
    return made;
  }();
  return *registry;
}

}  // namespace

void CloseInForkedChild(int fd) {
  const MutexLock lock(TheRegistry().mutex);
  TheRegistry().descriptors.insert(fd);
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
  const MutexLock lock(TheRegistry().mutex);
  TheRegistry().descriptors.erase(fd);
}

HomeProcess::HomeProcess() : pid_(getpid()) {}

bool HomeProcess::IsHere() const { return getpid() == pid_; }

}  // namespace datastates
