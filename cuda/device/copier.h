// Copies between one device and host memory, on a low-priority stream that is ordered after the trainer's.
// The order of copies and waits belongs here; the calls of the driver are device/driver.h's.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <vector>

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
// copy of the trainer's waits for the copies that were enqueued before it, which share the device's copy
// engine. So at most kMostInFlight copies and `most_bytes` are in the stream at a time (and one more copy);
// a thread with more waits for the oldest. An event is recorded for every kCopiesPerEvent copies or
// kBytesPerEvent.
//
// Two other orders are for benchmarks (benchmarks/gpu/small_copies.py), until one is known to be better:
// `bursts` waits for all that is in the stream, once that much is, so that the copy engine is idle before the
// next burst; `two_streams` changes the stream after each event, which the next stream waits for, so that
// the copy engine changes its queue.
//
// Each copy is a call of its own. cuMemcpyBatchAsync (12.8) takes many, but large and repeated submissions
// are reported to hang or crash with driver 580 (vllm-project/vllm#49276), and it takes addresses of the host
// for those of the device, which they are not everywhere (sgl-project/sglang#40232).
class DeviceCopier {
 public:
  // A position in the order of the stream: the number of copies before it.
  using Place = uint64_t;
  static constexpr Place kMostInFlight = 256;
  static constexpr Place kCopiesPerEvent = 64;
  static constexpr uint64_t kBytesPerEvent = uint64_t{2} << 20;

  // Created on the trainer's thread, for its current context. Throws Failure.
  DeviceCopier(std::shared_ptr<Driver> driver, uint64_t most_bytes, bool bursts, bool two_streams);
  ~DeviceCopier();
  DeviceCopier(const DeviceCopier&) = delete;
  DeviceCopier& operator=(const DeviceCopier&) = delete;

  // -- any thread in the context; these never wait for the device --------------------------------------

  // Orders later copies after everything enqueued on `trainer` so far.
  void StartAfter(CuStream trainer);
  // Orders what is enqueued on `trainer` from now on after every copy enqueued so far.
  void HoldBack(CuStream trainer);
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
  // The same after an error, on any thread: returns once nothing that was enqueued can touch memory any more.
  // As long as the driver refuses the wait for another reason than a lost context, the copies may still run:
  // then this waits on, as for a device that hangs.
  void Drain() noexcept;

  const std::shared_ptr<Driver>& driver() const { return driver_; }
  CuContext context() const { return context_; }
  int device() const { return device_; }

 private:
  // What was enqueued up to some moment: copies, and their bytes together.
  struct Sums {
    Place place = 0;
    uint64_t bytes = 0;
  };
  // An event that is done when those copies are.
  struct Mark {
    Sums sums;
    std::shared_ptr<Event> event;
  };

  // Enqueues one copy by `copy`, a function of a stream.
  template <typename Copy>
  Sums Enqueue(uint64_t bytes, const Copy& copy);
  // Enqueues copies of rows, and calls `then` with the sums after each.
  template <typename Then>
  void EnqueueRows(uint8_t* target, CuPointer source, size_t row_bytes, size_t row_step, size_t rows,
                   const Then& then);
  // Waits for copies if there are too many, after one was enqueued that made the sums `now`.
  void Bound(Sums now) REQUIRES(turns_);
  // Returns when the stream has reached the first mark at which that count is at least `least`.
  void WaitUntil(uint64_t Sums::* count, uint64_t least);
  void MarkHere() REQUIRES(enqueuing_);

  const uint64_t most_bytes_;
  const bool bursts_;
  const std::shared_ptr<Driver> driver_;
  const CuContext context_;
  const int device_;
  Mutex waiting_for_all_;  // one thread at a time records last_
  const Event last_;

  // Held while a copy is enqueued and others are waited for, so that no other thread adds to what is in
  // flight. Those that must not wait for the device do not take it.
  Mutex turns_;
  Sums burst_ GUARDED_BY(turns_);  // before the current burst

  // Held while anything is enqueued or counted, and never while the device is waited for: a mark covers what
  // its sums count.
  Mutex enqueuing_;
  CuStream stream_ GUARDED_BY(enqueuing_);
  CuStream other_ GUARDED_BY(enqueuing_) = nullptr;  // of two_streams; takes turns with stream_
  std::atomic<Place> enqueued_{0};
  uint64_t bytes_ GUARDED_BY(enqueuing_) = 0;      // of those copies
  std::deque<Mark> marks_ GUARDED_BY(enqueuing_);  // in the order of their places
  Sums marked_ GUARDED_BY(enqueuing_);             // of the last one made
  Sums done_ GUARDED_BY(enqueuing_);               // up to which copies are known to be done
  std::vector<std::shared_ptr<Event>> spare_ GUARDED_BY(enqueuing_);  // of earlier marks, to be used again
};

}  // namespace datastates
