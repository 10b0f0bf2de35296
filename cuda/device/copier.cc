#include "device/copier.h"

#include <algorithm>
#include <chrono>
#include <thread>

namespace datastates {
namespace {

constexpr auto kRetryInterval = std::chrono::milliseconds(100);

}  // namespace

DeviceCopier::DeviceCopier(std::shared_ptr<Driver> driver, uint64_t most_bytes, bool bursts, bool two_streams)
    : most_bytes_(most_bytes),
      bursts_(bursts),
      driver_(std::move(driver)),
      context_(driver_->EnterContext()),
      device_(driver_->CurrentDevice()),
      last_(driver_, context_),
      stream_(driver_->CreateLowPriorityStream()) {
  if (two_streams) other_ = driver_->CreateLowPriorityStream();
}

DeviceCopier::~DeviceCopier() {
  const ContextScope scope(*driver_, context_);
  driver_->DestroyStream(stream_);
  if (other_ != nullptr) driver_->DestroyStream(other_);
}

void DeviceCopier::StartAfter(CuStream trainer) {
  Event now(driver_, context_);
  driver_->Record(now.get(), trainer);
  const MutexLock lock(enqueuing_);
  driver_->StreamWait(stream_, now.get());
}

void DeviceCopier::HoldBack(CuStream trainer) {
  Event now(driver_, context_);
  {
    const MutexLock lock(enqueuing_);
    driver_->Record(now.get(), stream_);
  }
  driver_->StreamWait(trainer, now.get());
}

void DeviceCopier::EnterThread() const {
  driver_->SetContext(context_);
  driver_->RelaxCapture();
}

void DeviceCopier::CopyRowsAtOnce(uint8_t* target, CuPointer source, size_t row_bytes, size_t row_step,
                                  size_t rows) {
  EnqueueRows(target, source, row_bytes, row_step, rows, [](Sums) {});
}

void DeviceCopier::CopyRows(uint8_t* target, CuPointer source, size_t row_bytes, size_t row_step,
                            size_t rows) {
  const MutexLock turn(turns_);
  const auto bound = [this](Sums now) NO_THREAD_SAFETY_ANALYSIS { Bound(now); };  // under turns_
  EnqueueRows(target, source, row_bytes, row_step, rows, bound);
}

template <typename Then>
void DeviceCopier::EnqueueRows(uint8_t* target, CuPointer source, size_t row_bytes, size_t row_step,
                               size_t rows, const Then& then) {
  if (rows > 1 && row_step >= row_bytes && row_step <= Driver::kMostPitch) {
    return then(Enqueue(rows * row_bytes, [&](CuStream stream) {
      driver_->CopyRowsToHost(target, source, row_bytes, row_step, rows, stream);
    }));
  }
  for (size_t i = 0; i < rows; ++i) {
    then(Enqueue(row_bytes, [&](CuStream stream) {
      driver_->CopyToHost(target + i * row_bytes, source + i * row_step, row_bytes, stream);
    }));
  }
}

void DeviceCopier::CopyToDevice(CuPointer target, size_t target_step, const uint8_t* source,
                                size_t source_step, size_t row_bytes, size_t rows) {
  const MutexLock turn(turns_);
  const auto fits = [row_bytes](size_t pitch) { return pitch >= row_bytes && pitch <= Driver::kMostPitch; };
  if (rows > 1 && fits(target_step) && fits(source_step)) {
    return Bound(Enqueue(rows * row_bytes, [&](CuStream stream) {
      driver_->CopyRowsToDevice(target, target_step, source, source_step, row_bytes, rows, stream);
    }));
  }
  for (size_t i = 0; i < rows; ++i) {
    Bound(Enqueue(row_bytes, [&](CuStream stream) {
      driver_->CopyToDevice(target + i * target_step, source + i * source_step, row_bytes, stream);
    }));
  }
}

template <typename Copy>
DeviceCopier::Sums DeviceCopier::Enqueue(uint64_t bytes, const Copy& copy) {
  const MutexLock lock(enqueuing_);
  copy(stream_);
  return {++enqueued_, bytes_ += bytes};
}

void DeviceCopier::Bound(Sums now) {
  if (bursts_) {
    if (now.place - burst_.place < kMostInFlight && now.bytes - burst_.bytes < most_bytes_) return;
    WaitFor(now.place);
    burst_ = now;
    return;
  }
  {
    const MutexLock lock(enqueuing_);
    const bool is_due =
        now.place >= marked_.place + kCopiesPerEvent || now.bytes >= marked_.bytes + kBytesPerEvent;
    if (is_due) MarkHere();
  }
  if (now.place > kMostInFlight) WaitFor(now.place - kMostInFlight);
  if (now.bytes > most_bytes_) WaitUntil(&Sums::bytes, now.bytes - most_bytes_);
}

void DeviceCopier::MarkHere() {
  Mark mark{{enqueued_, bytes_}, nullptr};
  if (spare_.empty()) {
    mark.event = std::make_shared<Event>(driver_, context_);
  } else {
    mark.event = std::move(spare_.back());
    spare_.pop_back();
  }
  driver_->Record(mark.event->get(), stream_);
  marks_.push_back(mark);
  marked_ = mark.sums;
  if (other_ == nullptr) return;
  driver_->StreamWait(other_, mark.event->get());
  std::swap(stream_, other_);
}

void DeviceCopier::WaitFor(Place place) { WaitUntil(&Sums::place, place); }

void DeviceCopier::WaitUntil(uint64_t Sums::* count, uint64_t least) {
  Mark mark;
  {
    const MutexLock lock(enqueuing_);
    if (done_.*count >= least) return;
    if (marked_.*count < least) MarkHere();
    mark = *std::find_if(marks_.begin(), marks_.end(), [=](const Mark& m) { return m.sums.*count >= least; });
  }
  driver_->Synchronize(mark.event->get());
  std::vector<std::shared_ptr<Event>> dropped;  // destroyed after the lock
  const MutexLock lock(enqueuing_);
  if (mark.sums.place > done_.place) done_ = mark.sums;
  mark.event.reset();
  while (!marks_.empty() && marks_.front().sums.place <= done_.place) {
    const bool is_awaited = marks_.front().event.use_count() > 1;  // by another thread
    (is_awaited ? dropped : spare_).push_back(std::move(marks_.front().event));
    marks_.pop_front();
  }
}

void DeviceCopier::WaitForAll() {
  const MutexLock waiting(waiting_for_all_);
  {
    const MutexLock lock(enqueuing_);
    driver_->Record(last_.get(), stream_);
  }
  driver_->Synchronize(last_.get());
}

void DeviceCopier::Drain() noexcept {
  while (true) {
    try {
      driver_->SetContext(context_);  // this thread may not have entered it
      const RelaxedCapture relaxed(*driver_);
      return WaitForAll();
    } catch (const ContextLost&) {
      return;
    } catch (const std::exception&) {
      std::this_thread::sleep_for(kRetryInterval);
    }
  }
}

}  // namespace datastates
