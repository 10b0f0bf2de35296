// The staging pool: fixed-size slots of page-locked host memory, lent one by one. Its size is the budget's,
// never the checkpoint's: a shard of any size streams through it.
//
// Several background threads make it, each a segment of its own at a time: mapped, bound to the device's NUMA
// node where that is known, prefaulted, page-locked. A segment is looked after by one thread at most.
//
// Invariant (no deadlock). A slot is lent to a staging thread, which fills it and passes it on, if a device
// fills it to the thread that awaits the device, then to the queue of the writing threads, which return it. A
// lent slot comes back when these have happened, and nothing else:
//   - the staging thread copied host memory, or enqueued copies, for which it may have had to wait until
//   older
//     copies of the same stream were done (in a rehearsal: also until these were);
//   - the device came to the chunk's copy; that is after what the trainer's stream had been given when the
//     save began, and after nothing that comes later;
//   - the writing threads took what was queued before it, and it;
//   - the write returned, in time or with an error; it is left out if the save has failed.
// A chunk whose time has not come (lazy copies from a device) holds no slot yet.
// Whoever holds a slot never asks for another, and a thread that waits for one holds nothing that any of the
// above needs: no lock, no place in the writers' queue. It gives up within 100 ms of its save's failure or
// cancellation. So returning a slot never depends on the trainer's thread, Python's lock, another rank, a
// commit, the seal of any save (a footer has memory of its own) or another slot: one slot makes progress.
// A writer held up by one file's disk delays the chunks after it, for no longer than that write.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
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
  // Page-locks in the background what there is and what will be. Done with one context, it serves copies
  // from devices of any. Where it fails, slots work all the same, and only their copies are slower; a segment
  // that failed is tried again at the next call. What is not page-locked yet moves to `node` first.
  void Register(std::shared_ptr<Driver> driver, CuContext context, const NumaNode& node = NumaNode());

  // Waits for a slot. Returns an empty one when `give_up` says so (asked at least every 100 ms). Adds to
  // `growing_seconds`, if there is one, what it waited while slots that were asked for were still being made.
  // Throws Failure if not one slot could be made.
  Slot Acquire(const std::function<bool()>& give_up, double* growing_seconds = nullptr);

  size_t slot_bytes() const { return slot_bytes_; }
  struct Facts {
    size_t slots = 0, idle = 0;
    size_t page_locked_bytes = 0;
    std::string trouble;  // why there are fewer slots than wanted, or why they are not page-locked
  };
  Facts facts() const;

 private:
  friend class Slot;
  struct Segment {
    std::unique_ptr<PrivateMapping> mapping;
    std::shared_ptr<Driver> locked_by;  // null: not page-locked
    CuContext context = nullptr;
    int node = -1;              // to which it was bound
    uint64_t registration = 0;  // the last one that it was to be page-locked for; 0: none
    bool busy = false;          // a background thread is page-locking it
  };

  void Return(uint8_t* data) noexcept;
  void Work();
  void StartThreads() REQUIRES(mutex_);      // as many as have something to do
  Segment* FindUnlocked() REQUIRES(mutex_);  // one to be page-locked, if there is one
  bool IsGrowing() const REQUIRES(mutex_) { return making_ != 0 || (made_ < wanted_ && trouble_.empty()); }
  // Both release the mutex while they work, and take it again.
  void AddSegment() REQUIRES(mutex_);
  void PageLock(Segment* segment) REQUIRES(mutex_);

  const size_t slot_bytes_;
  const size_t most_slots_;
  const size_t slots_in_segment_;
  mutable Mutex mutex_;
  CondVar wake_;  // the background threads have something to do, or stop
  CondVar free_;  // a slot came back or was made, or making one failed
  std::vector<uint8_t*> idle_ GUARDED_BY(mutex_);
  std::deque<Segment> segments_ GUARDED_BY(mutex_);  // only added to, so that one stays where it is
  // Slots: in segments_, in segments that are being made, asked for. Invariant: made_ + making_ <= wanted_.
  size_t made_ GUARDED_BY(mutex_) = 0;
  size_t making_ GUARDED_BY(mutex_) = 0;
  size_t wanted_ GUARDED_BY(mutex_) = 0;
  std::shared_ptr<Driver> driver_ GUARDED_BY(mutex_);
  CuContext context_ GUARDED_BY(mutex_) = nullptr;
  NumaNode node_ GUARDED_BY(mutex_);
  uint64_t registration_ GUARDED_BY(mutex_) = 0;  // counts Register; 0: nothing is page-locked
  std::string trouble_ GUARDED_BY(mutex_), lock_trouble_ GUARDED_BY(mutex_);
  bool stop_ GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_ GUARDED_BY(mutex_);
};

}  // namespace datastates
