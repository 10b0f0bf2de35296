#include "os/fork.h"

#include <pthread.h>
#include <unistd.h>

#include <mutex>
#include <set>

#include "common.h"

namespace datastates {
namespace {

// Leaked on purpose: atfork handlers may run while statics are being destroyed.
struct Registry {
  std::mutex mutex;
  std::set<int> descriptors GUARDED_BY(mutex);
};

Registry& TheRegistry() {
  static Registry* registry = [] {
    auto* made = new Registry;
    // The lock is taken around the fork, so that the child never inherits it held by another thread.
    pthread_atfork([] { TheRegistry().mutex.lock(); }, [] { TheRegistry().mutex.unlock(); },
                   [] {
                     for (int fd : TheRegistry().descriptors) close(fd);
                     TheRegistry().descriptors.clear();
                     TheRegistry().mutex.unlock();
                   });
    return made;
  }();
  return *registry;
}

}  // namespace

void CloseInForkedChild(int fd) {
  std::lock_guard<std::mutex> lock(TheRegistry().mutex);
  TheRegistry().descriptors.insert(fd);
}

void ForgetDescriptor(int fd) {
  std::lock_guard<std::mutex> lock(TheRegistry().mutex);
  TheRegistry().descriptors.erase(fd);
}

HomeProcess::HomeProcess() : pid_(getpid()) {}

bool HomeProcess::IsHere() const { return getpid() == pid_; }

}  // namespace datastates
