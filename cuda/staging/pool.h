// The staging pool: fixed-size slots of host memory, page-locked for copies from devices, lent one by one.
// The budget sets its size, not the checkpoint: a shard of any size streams through it. Memory belongs here;
// what is in a slot is its borrower's business.
//
// Several background threads build the pool, each one segment at a time: map it, bind it to the device's NUMA
// node if that is known, prefault it, page-lock it. At most one thread works on a segment.
//
// Invariant (no deadlock). A slot is lent to a staging thread, which fills it and hands it on: to the thread
// that awaits the device if a device fills it, then to the queue of the writing threads, which return it. A
// lent slot is returned once these have happened, and depends on nothing else:
//   - the staging thread copied host memory, or enqueued copies, for which it may have had to wait until
//     older copies of the same stream were done (in a first pass, also until these copies were);
//   - the device reached the chunk's copy, which is ordered after what was on the trainer's stream when the
//     save began, and after nothing later;
//   - its save's file was opened and its space reserved, or the save has failed;
//   - the writing threads took what was queued before it and could be written, and then it;
//   - the write returned, with or without an error; it is skipped if the save has failed.
// A chunk that may not be copied yet (a lazy copy from a device) holds no slot.
// A thread that holds a slot never asks for another, and a thread that waits for one holds nothing that any
// of the above needs: no lock, no place in the writers' queue. It stops waiting within 100 ms of its save's
// failure or cancellation. So returning a slot never depends on the trainer's thread, the GIL, another rank,
// publishing, the footer of any save (footers have memory of their own) or another slot: a single slot makes
// progress. A writer blocked by one file's disk delays the chunks queued after it, for no longer than that
// call. Chunks whose file is still being opened delay no others in the queue, but they keep their slots.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "device/driver.h"
#include "os/aligned.h"
#include "os/mutex.h"
#include "os/numa.h"

namespace datastates {

class SlotPool;

// A borrowed slot; the destructor returns it.
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
  // Keeps it from being lent again or unmapped, because a device may use it at any time. The pool may then
  // build another one.
  void Abandon() noexcept;

 private:
  SlotPool* pool_ = nullptr;
  uint8_t* data_ = nullptr;
};

class SlotPool {
 public:
  // `slot_bytes` is a multiple of kAlignment. No memory is taken until Grow.
  SlotPool(size_t slot_bytes, size_t most_slots);
  ~SlotPool();  // every slot must have been returned or abandoned

  // Starts building up to min(`slots`, most_slots) slots in the background: prefaulted, and page-locked once
  // the driver is known. Throws Failure if not even one thread can be started.
  void Grow(size_t slots);
  // Replaces `most_slots` for later calls of Grow. Slots that are built, or requested, stay.
  void Limit(size_t most_slots);
  // Page-locks present and future segments in the background. Memory that is page-locked in one context
  // serves copies in any. If it fails, slots still work, with slower copies, and the next call tries those
  // segments again. Memory that is not page-locked yet is first moved to `node`. Throws as Grow does.
  void Register(std::shared_ptr<Driver> driver, CuContext context, const NumaNode& node = NumaNode());

  // Waits for a slot. Returns an empty one once `give_up` returns true (called at least every 100 ms). Adds
  // to `growing_seconds`, unless null, the part of the wait during which requested slots were still being
  // built. Throws Failure if not even one slot could be built.
  Slot Acquire(const std::function<bool()>& give_up, double* growing_seconds = nullptr);

  struct Facts {
    size_t slots = 0, idle = 0;
    size_t page_locked_bytes = 0;
    std::string trouble;  // why there are fewer slots than requested, or why they are not page-locked
  };
  Facts facts() const;

 private:
  friend class Slot;
  struct Segment {
    std::unique_ptr<PrivateMapping> mapping;
    std::shared_ptr<Driver> locked_by;  // null: not page-locked
    CuContext context = nullptr;
    int node = -1;              // the NUMA node that it was bound to
    uint64_t registration = 0;  // the last Register that it was page-locked for; 0: none
    bool busy = false;          // a background thread is page-locking it
  };

  void Return(uint8_t* data) noexcept;
  void Abandon() noexcept;
  void Work();
  void StartThreads() REQUIRES(mutex_);      // as many as have work
  Segment* FindUnlocked() REQUIRES(mutex_);  // null if there is none
  bool IsGrowing() const REQUIRES(mutex_) { return making_ != 0 || (made_ < wanted_ && trouble_.empty()); }
  // Both release the mutex while they work, and reacquire it.
  void AddSegment() REQUIRES(mutex_);
  void PageLock(Segment* segment) REQUIRES(mutex_);

  const size_t slot_bytes_;
  const size_t slots_in_segment_;
  mutable Mutex mutex_;
  size_t most_slots_ GUARDED_BY(mutex_);
  CondVar wake_;                                    // the background threads have work, or must stop
  CondVar free_;                                    // a slot was returned or built, or building one failed
  std::vector<uint8_t*> idle_ GUARDED_BY(mutex_);   // has room for made_ + making_: Return never throws
  std::list<Segment> segments_ GUARDED_BY(mutex_);  // only appended to
  // Slots in segments_, in segments being built, and requested. Invariant: made_ + making_ <= wanted_.
  size_t made_ GUARDED_BY(mutex_) = 0;
  size_t making_ GUARDED_BY(mutex_) = 0;
  size_t wanted_ GUARDED_BY(mutex_) = 0;
  std::shared_ptr<Driver> driver_ GUARDED_BY(mutex_);
  CuContext context_ GUARDED_BY(mutex_) = nullptr;
  NumaNode node_ GUARDED_BY(mutex_);
  uint64_t registration_ GUARDED_BY(mutex_) = 0;  // number of calls of Register; 0: nothing is page-locked
  // Why a segment could not be built, or page-locked; empty if none failed.
  std::string trouble_ GUARDED_BY(mutex_), lock_trouble_ GUARDED_BY(mutex_);
  int trouble_code_ GUARDED_BY(mutex_) = 0;  // errno of trouble_, or 0
  bool stop_ GUARDED_BY(mutex_) = false;
  bool has_abandoned_ GUARDED_BY(mutex_) = false;  // some slot, which is no longer counted
  std::vector<std::thread> threads_ GUARDED_BY(mutex_);
};

}  // namespace datastates
