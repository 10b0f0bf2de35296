// Copies between one device and host memory on a stream of our own, ordered behind the trainer's.
#pragma once

#include <memory>
#include <mutex>

#include "device/driver.h"

namespace datastates {

// An event that is destroyed with its last user.
class Event {
 public:
  // `context` is current on this thread; the end may come on any other.
  Event(std::shared_ptr<Driver> driver, CuContext context)
      : driver_(std::move(driver)), context_(context), event_(driver_->CreateEvent()) {}
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

// Thread-safe: the driver orders calls on one stream. Allocates no device memory, and never waits for
// the device but in Wait, which worker threads call.
class DeviceCopier {
 public:
  // Made on the trainer's thread, in its current context. Throws Failure.
  explicit DeviceCopier(std::shared_ptr<Driver> driver);
  ~DeviceCopier();
  DeviceCopier(const DeviceCopier&) = delete;
  DeviceCopier& operator=(const DeviceCopier&) = delete;

  // Later copies run after everything that `trainer` has been given until now.
  void StartAfter(CuStream trainer);
  // `trainer` runs what it is given from now on after `event`.
  void HoldBack(CuStream trainer, const Event& event) const { driver_->StreamWait(trainer, event.get()); }

  // Once per worker thread and before any of the calls below; the trainer's thread is in the context.
  void EnterThread() const;
  void Copy(void* target, CuPointer source, size_t bytes) {
    driver_->CopyToHost(target, source, bytes, stream_);
  }
  // `pieces` of `bytes`, `step_bytes` apart on the device, one behind the other: in one call if it can be.
  void CopyPieces(uint8_t* target, CuPointer source, size_t bytes, size_t step_bytes, size_t pieces);
  // `pieces` of `bytes`, `source_step` apart in host memory, to pieces `target_step` apart on the device.
  void CopyToDevice(CuPointer target, size_t target_step, const uint8_t* source, size_t source_step,
                    size_t bytes, size_t pieces);
  std::shared_ptr<Event> Record();
  void Wait(const Event& event) const { driver_->Synchronize(event.get()); }
  // For everything enqueued so far. Makes no event: it works where there is no memory for one.
  void WaitForAll();

  const std::shared_ptr<Driver>& driver() const { return driver_; }
  CuContext context() const { return context_; }
  int device() const { return device_; }

 private:
  const std::shared_ptr<Driver> driver_;
  const CuContext context_;
  const int device_;
  std::mutex waiting_for_all_;  // one at a time records last_
  const Event last_;
  CuStream stream_;  // constant after construction
};

}  // namespace datastates
