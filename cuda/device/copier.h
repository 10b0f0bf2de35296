// Copies between one device and host memory, on a stream that is ordered after the trainer's.
// The order of copies and waits belongs here; the calls of the driver are device/driver.h's.
#pragma once

#include <atomic>
#include <deque>
#include <memory>

#include "device/driver.h"
#include "os/mutex.h"

namespace datastates {

// A CUDA event, destroyed with its last user.
class Event {
 public:
  // `context` is current on this thread; any thread may destroy the event.
  Event(std::shared_ptr<Driver> driver, CuContext context, bool timing = false)
      : driver_(std::move(driver)), context_(context), event_(driver_->CreateEvent(timing)) {}
  ~Event() {
    const ContextScope scope(*driver_, context_);
    driver_->DestroyEvent(event_);
  }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  CuEvent get() const { return event_; }

 private:
  const std::shared_ptr<Driver> driver_;
  const CuContext context_;
  const CuEvent event_;
};

// Thread-safe. Allocates no device memory.
//
// A stream accepts about a thousand operations; a thread that enqueues more blocks in the driver, and where
// streams share a hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1) the trainer's launches block, too. A small
// copy of the trainer's waits until this stream is empty. So copies go in bursts: once kMostInFlight copies
// or `most_bytes` are in the stream, all of them are waited for before the next is enqueued. While the
// trainer waits for the copies itself (Hurry), only their number is bounded.
//
// Calls of the driver take locks that the trainer's launches take, too, and it may be launching all the time:
// the fewer calls, the better. So bursts are large, and one thread at a time waits for the device, for all.
//
// Each copy is a call of its own. cuMemcpyBatchAsync (12.8) takes many, but large and repeated submissions
// are reported to hang or crash with driver 580 (vllm-project/vllm#49276), and it takes addresses of the host
// for those of the device, which they are not everywhere (sgl-project/sglang#40232).
class DeviceCopier {
 public:
  // A position in the order of the stream: the number of copies before it.
  using Place = uint64_t;
  static constexpr Place kMostInFlight = 256;

  // Created on the trainer's thread, for its current context. Throws Failure.
  DeviceCopier(std::shared_ptr<Driver> driver, uint64_t most_bytes);
  ~DeviceCopier();
  DeviceCopier(const DeviceCopier&) = delete;
  DeviceCopier& operator=(const DeviceCopier&) = delete;

  // -- any thread in the context; these never wait for the device --------------------------------------

  // Orders later copies after everything enqueued on `trainer` so far.
  void StartAfter(CuStream trainer);
  // Orders what is enqueued on `trainer` from now on after every copy enqueued so far.
  void HoldBack(CuStream trainer) const;
  // Whether bytes in flight are unbounded, because the trainer waits for the copies and does nothing else.
  void Hurry(bool hurries) { hurries_ = hurries; }
  // CopyRows without regard to kMostInFlight; the caller bounds the number of copies.
  void CopyRowsAtOnce(uint8_t* target, CuPointer source, size_t row_bytes, size_t row_step, size_t rows);
  // Returns a place after everything that this thread has enqueued.
  Place Enqueued() const { return enqueued_; }

  // -- worker threads; these wait for the device --------------------------------------------------------

  // Makes the context current. Called once per worker thread, before any of the calls below.
  void EnterThread() const;
  // Copies `rows` of `row_bytes`, `row_step` apart on the device, to contiguous page-locked memory; in one
  // call if possible.
  void CopyRows(uint8_t* target, CuPointer source, size_t row_bytes, size_t row_step, size_t rows);
  // Copies `rows` of `row_bytes`, `source_step` apart in host memory, to places `target_step` apart on the
  // device.
  void CopyToDevice(CuPointer target, size_t target_step, const uint8_t* source, size_t source_step,
                    size_t row_bytes, size_t rows);
  // Returns when the stream has reached that place.
  void WaitFor(Place place);
  // Waits for everything enqueued so far. Creates no event, so it works without memory for one.
  void WaitForAll();
  // The same after an error, on any thread: returns true once nothing that was enqueued can touch memory any
  // more. As long as the driver refuses the wait for another reason than a lost context (an unknown error, a
  // context that somebody destroyed), the copies may still run: false, if it does so for seconds. The caller
  // then abandons the slots.
  bool Drain() noexcept;

  const std::shared_ptr<Driver>& driver() const { return driver_; }
  CuContext context() const { return context_; }
  int device() const { return device_; }

 private:
  // What was enqueued up to some moment: copies, and their bytes together.
  struct Sums {
    Place place = 0;
    uint64_t bytes = 0;
  };
  // An event that is done when the first `place` copies are.
  struct Mark {
    Place place;
    std::shared_ptr<Event> event;
  };
  // Rows of one copy, as far apart on the device and on the host.
  struct Rows {
    size_t device_step, host_step, bytes, count;
  };

  // Marks the copies so far, before the stream waits for the trainer: whoever waits for them later does not
  // wait for what the trainer has enqueued since.
  void MarkCopies();
  // Returns the first mark that covers *place, and where it is; null if none does.
  std::shared_ptr<Event> MarkFor(Place* place) REQUIRES(waiting_);
  // Calls `copy` for parts of the rows: with a row, a place in it, a number of bytes and of rows.
  template <typename Copy>
  void EnqueueRows(const Rows& rows, const Copy& copy) REQUIRES(turns_);
  // Before a copy of so many bytes, at most most_bytes_: waits for those in flight if it does not fit.
  void MakeRoom(uint64_t bytes) REQUIRES(turns_);
  void Count(uint64_t bytes);     // a copy that was enqueued
  void NoteIfEmpty(Place place);  // the device has reached it: is that all?

  const uint64_t most_bytes_;
  const std::shared_ptr<Driver> driver_;
  const CuContext context_;
  const int device_;
  const Event reached_;    // recorded by the thread for which is_awaited_ is true
  Mutex waiting_for_all_;  // one thread at a time records last_
  const Event last_;
  const CuStream stream_;

  // Held while copies are enqueued and earlier ones waited for, so that no other thread adds to what is in
  // flight. Those that must not wait for the device do not take it.
  Mutex turns_;
  std::atomic<bool> hurries_{false};
  std::atomic<bool> refuses_{false};  // the driver has refused for so long: the next Drain tries only once
  // Counted after the driver's call, so that an event recorded after reading it covers at least as many
  // copies.
  std::atomic<Place> enqueued_{0};
  Mutex counting_;                            // held where enqueued_ grows, so that copies and bytes agree
  uint64_t bytes_ GUARDED_BY(counting_) = 0;  // of those copies
  // What came before is done. Moves on only where the stream is empty, or a burst is over: a burst is not to
  // grow while it runs, because the trainer's copies may wait for all of it.
  Sums done_sums_ GUARDED_BY(counting_);

  Mutex waiting_;
  Place done_ GUARDED_BY(waiting_) = 0;           // so many copies are known to be done
  bool is_awaited_ GUARDED_BY(waiting_) = false;  // some thread waits for the device
  std::deque<Mark> marks_ GUARDED_BY(waiting_);   // in the order of their places
  CondVar progress_;                              // done_ grew, or nobody waits any more
};

}  // namespace datastates
