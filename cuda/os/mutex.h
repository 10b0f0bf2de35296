// A mutex, its lock and its condition variable, annotated for clang's thread-safety analysis, which `make
// lint` runs if there is a clang. For every other compiler they only wrap std::mutex and pthread_cond_t.
//
// Belongs here: locking. Does not belong here: any state that a lock protects.
#pragma once

#include <pthread.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <mutex>

#if defined(__clang__)
#define MDS_ANNOTATION(x) __attribute__((x))
#else
#define MDS_ANNOTATION(x)
#endif
#define CAPABILITY(name) MDS_ANNOTATION(capability(name))
#define SCOPED_CAPABILITY MDS_ANNOTATION(scoped_lockable)
#define GUARDED_BY(mutex) MDS_ANNOTATION(guarded_by(mutex))  // a member is used under this mutex only
#define REQUIRES(...) MDS_ANNOTATION(requires_capability(__VA_ARGS__))  // the caller holds it
#define ACQUIRE(...) MDS_ANNOTATION(acquire_capability(__VA_ARGS__))
#define RELEASE(...) MDS_ANNOTATION(release_capability(__VA_ARGS__))
#define NO_THREAD_SAFETY_ANALYSIS MDS_ANNOTATION(no_thread_safety_analysis)

namespace datastates {

class CAPABILITY("mutex") Mutex {
 public:
  void Lock() ACQUIRE() { mutex_.lock(); }
  void Unlock() RELEASE() { mutex_.unlock(); }

 private:
  friend class CondVar;
  std::mutex mutex_;
};

// Holds a mutex for a scope; may be released and reacquired within it.
class SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) ACQUIRE(mutex) : mutex_(mutex) { Lock(); }
  ~MutexLock() RELEASE() {
    if (held_) mutex_.Unlock();
  }
  void Lock() ACQUIRE() {
    mutex_.Lock();
    held_ = true;
  }
  void Unlock() RELEASE() {
    held_ = false;
    mutex_.Unlock();
  }

  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
  bool held_ = false;
};

// Releases, for a scope, a mutex that the caller holds, and reacquires it at the end, also after an
// exception.
class SCOPED_CAPABILITY MutexUnlock {
 public:
  explicit MutexUnlock(Mutex& mutex) RELEASE(mutex) : mutex_(mutex) { mutex_.Unlock(); }
  ~MutexUnlock() RELEASE() { mutex_.Lock(); }

  MutexUnlock(const MutexUnlock&) = delete;
  MutexUnlock& operator=(const MutexUnlock&) = delete;

 private:
  Mutex& mutex_;
};

// Any number is allowed: what is longer than the clock can count is as good as for ever, and NaN is now.
inline std::chrono::steady_clock::time_point DeadlineAfter(double seconds) {
  using Clock = std::chrono::steady_clock;
  constexpr double kForEver = 1e9;
  const std::chrono::duration<double> bounded(std::min(kForEver, std::max(0.0, seconds)));
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(bounded);
}

// Waits may return spuriously: call them in a loop that checks the condition.
//
// Not std::condition_variable: built for a glibc older than 2.30, as wheels are, it waits by the system's
// clock. If that is set back meanwhile, a wait of 0.1 seconds takes as much longer.
class CondVar {
 public:
  using Clock = std::chrono::steady_clock;  // CLOCK_MONOTONIC

  CondVar() noexcept {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&changed_, &attributes);
    pthread_condattr_destroy(&attributes);
  }
  ~CondVar() { pthread_cond_destroy(&changed_); }
  CondVar(const CondVar&) = delete;
  CondVar& operator=(const CondVar&) = delete;

  void Wait(Mutex& mutex) REQUIRES(mutex) { pthread_cond_wait(&changed_, mutex.mutex_.native_handle()); }
  // Returns false once the deadline has passed.
  bool WaitUntil(Mutex& mutex, Clock::time_point deadline) REQUIRES(mutex) {
    const std::chrono::nanoseconds at = deadline.time_since_epoch();
    const timespec until{at.count() / 1'000'000'000, at.count() % 1'000'000'000};
    return pthread_cond_timedwait(&changed_, mutex.mutex_.native_handle(), &until) == 0;
  }
  void NotifyOne() noexcept { pthread_cond_signal(&changed_); }
  void NotifyAll() noexcept { pthread_cond_broadcast(&changed_); }

 private:
  pthread_cond_t changed_;
};

}  // namespace datastates
