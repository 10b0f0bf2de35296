// Copies between one device and host memory on a stream of our own, ordered after the trainer's.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <vector>

#include "device/driver.h"
#include "os/mutex.h"

namespace datastates {

// An event that is destroyed with its last user.
class Event {
 public:
  // `context` is current on this thread; the end may come on any other.
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
// A stream accepts about a thousand operations; whoever enqueues more waits in the driver, and where streams
// share a hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1) the trainer's launches wait, too. So no more than
// kMostInFlight copies, and a batch, are in the stream at a time: a worker thread that comes with more waits
// for the oldest. One event is recorded for every kCopiesPerEvent copies, not for each.
class DeviceCopier {
 public:
  // A place in the order of the stream: after that many copies.
  using Place = uint64_t;
  static constexpr Place kMostInFlight = 256;
  static constexpr Place kCopiesPerEvent = 64;

  // Contiguous bytes on the device, to page-locked memory.
  struct Transfer {
    uint8_t* target;
    CuPointer source;
    size_t bytes;
  };

  // Made on the trainer's thread, in its current context. Throws Failure.
  explicit DeviceCopier(std::shared_ptr<Driver> driver);
  ~DeviceCopier();
  DeviceCopier(const DeviceCopier&) = delete;
  DeviceCopier& operator=(const DeviceCopier&) = delete;

  // -- any thread in the context; these never wait for the device --------------------------------------

  // Later copies run after everything that `trainer` has been given until now.
  void StartAfter(CuStream trainer);
  // `trainer` runs what it is given from now on after every copy enqueued so far.
  void HoldBack(CuStream trainer) const;
  // Enqueues copies beyond the bound: for a number of them that is bounded otherwise.
  void CopyAtOnce(const std::vector<Transfer>& transfers);
  // The same for `rows` of `bytes`, `row_step` apart on the device: one copy.
  void CopyRowsAtOnce(uint8_t* target, CuPointer source, size_t bytes, size_t row_step, size_t rows);
  // The place after everything that this thread has enqueued.
  Place Enqueued() const { return enqueued_; }

  // -- worker threads; these wait for the device --------------------------------------------------------

  // Once per worker thread and before any of the calls below; the trainer's thread is in the context.
  void EnterThread() const;
  void Copy(const std::vector<Transfer>& transfers);
  // `rows` of `bytes`, `row_step` apart on the device, one after the other: in one call if it can be.
  void CopyRows(uint8_t* target, CuPointer source, size_t bytes, size_t row_step, size_t rows);
  // `rows` of `bytes`, `source_step` apart in host memory, to rows `target_step` apart on the device.
  void CopyToDevice(CuPointer target, size_t target_step, const uint8_t* source, size_t source_step,
                    size_t bytes, size_t rows);
  // Returns when the stream has come to that place.
  void WaitFor(Place place);
  // For everything enqueued so far. Makes no event: it works where there is no memory for one.
  void WaitForAll();

  const std::shared_ptr<Driver>& driver() const { return driver_; }
  CuContext context() const { return context_; }
  int device() const { return device_; }

 private:
  // Done when the first `place` copies are.
  struct Mark {
    Place place;
    std::shared_ptr<Event> event;
  };

  void Enqueue(const std::vector<Transfer>& transfers, bool bounded);
  bool EnqueueBatch(CuPointer* targets, CuPointer* sources, size_t* bytes, size_t count);
  void Count(size_t copies, bool bounded);
  void MarkHere() REQUIRES(marking_);

  const std::shared_ptr<Driver> driver_;
  const CuContext context_;
  const int device_;
  Mutex waiting_for_all_;  // one at a time records last_
  const Event last_;
  CuStream stream_;  // constant after construction

  // Counted after the driver's call, so an event that is recorded after reading it covers so many copies.
  std::atomic<Place> enqueued_{0};
  Mutex marking_;
  std::deque<Mark> marks_ GUARDED_BY(marking_);  // in the order of their places
  Place marked_ GUARDED_BY(marking_) = 0;        // of the last mark that there was
  Place done_ GUARDED_BY(marking_) = 0;
};

}  // namespace datastates
