// A mutex, its lock and its condition variable, annotated for clang's thread-safety analysis, which `make
// lint` runs if there is a clang. For every other compiler they only wrap std's.
//
// Belongs here: locking. Does not belong here: any state that a lock protects.
#pragma once

#include <chrono>
#include <condition_variable>
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

inline std::chrono::steady_clock::time_point DeadlineAfter(double seconds) {
  using Clock = std::chrono::steady_clock;
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

// Waits may return spuriously: call them in a loop that checks the condition.
class CondVar {
 public:
  using Clock = std::chrono::steady_clock;

  void Wait(Mutex& mutex) REQUIRES(mutex) {
    std::unique_lock<std::mutex> lock(mutex.mutex_, std::adopt_lock);
    changed_.wait(lock);
    lock.release();
  }
  // Returns false once the deadline has passed.
  bool WaitUntil(Mutex& mutex, Clock::time_point deadline) REQUIRES(mutex) {
    std::unique_lock<std::mutex> lock(mutex.mutex_, std::adopt_lock);
    const bool in_time = changed_.wait_until(lock, deadline) == std::cv_status::no_timeout;
    lock.release();
    return in_time;
  }
  void NotifyOne() noexcept { changed_.notify_one(); }
  void NotifyAll() noexcept { changed_.notify_all(); }

 private:
  std::condition_variable changed_;
};

}  // namespace datastates
