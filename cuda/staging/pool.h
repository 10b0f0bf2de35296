// The staging pool: fixed-size slots of page-locked host memory, lent one by one.
//
// Invariant (no deadlock): a slot is returned by its own write (or checksum, in a rehearsal) or by the
// cancellation of its save, all done by worker threads of the engine. Nothing that returns a slot ever waits
// for the trainer's thread, for Python's lock, for another rank or for a commit. So a pool of one slot makes
// progress.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "device/driver.h"
#include "os/aligned.h"

namespace datastates {

class SlotPool;

// A borrowed slot; its end returns it.
class Slot {
 public:
  Slot() = default;
  Slot(SlotPool* pool, uint8_t* data) : pool_(pool), data_(data) {}
  Slot(Slot&& other) noexcept { *this = std::move(other); }
  Slot& operator=(Slot&& other) noexcept;
  ~Slot() { Return(); }

  explicit operator bool() const { return data_ != nullptr; }
  uint8_t* data() const { return data_; }
  void Return() noexcept;

 private:
  SlotPool* pool_ = nullptr;
  uint8_t* data_ = nullptr;
};

class SlotPool {
 public:
  // `slot_bytes` is a multiple of kAlignment. No memory is taken until Grow.
  SlotPool(size_t slot_bytes, size_t most_slots);
  ~SlotPool();  // every slot has been returned

  // Has at least min(`slots`, most_slots) slots made in the background, prefaulted, and page-locked
  // once the driver is known.
  void Grow(size_t slots);
  // Page-locks what there is and what will be, for copies from devices of this context.
  void Register(std::shared_ptr<Driver> driver, CuContext context);

  // Waits for a slot. Gives an empty one when `give_up` says so (asked at least every 100 ms). Throws
  // Failure if not one slot could be made.
  Slot Acquire(const std::function<bool()>& give_up);

  size_t slot_bytes() const { return slot_bytes_; }
  size_t slots() const;
  size_t most_slots() const { return most_slots_; }

 private:
  friend class Slot;
  struct Segment {
    std::unique_ptr<PrivateMapping> mapping;
    bool page_locked = false;
  };

  void Return(uint8_t* data) noexcept;
  void Work();
  // Both let go of the lock while they work. Only the background thread changes segments_.
  void AddSegment(std::unique_lock<std::mutex>* lock);
  bool PageLock(const PrivateMapping& mapping, std::unique_lock<std::mutex>* lock);

  const size_t slot_bytes_;
  const size_t most_slots_;
  mutable std::mutex mutex_;
  std::condition_variable wake_;  // the background thread has something to do, or stops
  std::condition_variable free_;  // a slot came back or was made, or making one failed
  std::vector<uint8_t*> idle_ GUARDED_BY(mutex_);
  std::vector<Segment> segments_ GUARDED_BY(mutex_);
  size_t made_ GUARDED_BY(mutex_) = 0;
  size_t wanted_ GUARDED_BY(mutex_) = 0;
  std::shared_ptr<Driver> driver_ GUARDED_BY(mutex_);
  CuContext context_ GUARDED_BY(mutex_) = nullptr;
  bool page_lock_ GUARDED_BY(mutex_) = false;
  std::string trouble_ GUARDED_BY(mutex_);
  bool stop_ GUARDED_BY(mutex_) = false;
  std::thread thread_ GUARDED_BY(mutex_);
};

}  // namespace datastates
