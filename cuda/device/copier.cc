#include "device/copier.h"

#include <algorithm>
#include <chrono>
#include <thread>

namespace datastates {
namespace {

constexpr auto kRetryInterval = std::chrono::milliseconds(100);

}  // namespace

DeviceCopier::DeviceCopier(std::shared_ptr<Driver> driver, uint64_t most_bytes)
    : most_bytes_(most_bytes),
      driver_(std::move(driver)),
      context_(driver_->EnterContext()),
      device_(driver_->CurrentDevice()),
      last_(driver_, context_),
      stream_(driver_->CreateLowPriorityStream()) {}

DeviceCopier::~DeviceCopier() {
  const ContextScope scope(*driver_, context_);
  driver_->DestroyStream(stream_);
}

void DeviceCopier::StartAfter(CuStream trainer) {
  Event now(driver_, context_);
  driver_->Record(now.get(), trainer);
  driver_->StreamWait(stream_, now.get());
}

void DeviceCopier::HoldBack(CuStream trainer) const {
  Event now(driver_, context_);
  driver_->Record(now.get(), stream_);
  driver_->StreamWait(trainer, now.get());
}

void DeviceCopier::EnterThread() const {
  driver_->SetContext(context_);
  driver_->RelaxCapture();
}

void DeviceCopier::CopyRowsAtOnce(uint8_t* target, CuPointer source, size_t row_bytes, size_t row_step,
                                  size_t rows) {
  Enqueue(target, source, row_bytes, row_step, rows, false);
}

void DeviceCopier::CopyRows(uint8_t* target, CuPointer source, size_t row_bytes, size_t row_step,
                            size_t rows) {
  Enqueue(target, source, row_bytes, row_step, rows, true);
}

void DeviceCopier::Enqueue(uint8_t* target, CuPointer source, size_t row_bytes, size_t row_step, size_t rows,
                           bool bounded) {
  if (rows > 1 && row_step >= row_bytes && row_step <= Driver::kMostPitch) {
    driver_->CopyRowsToHost(target, source, row_bytes, row_step, rows, stream_);
    return Count(rows * row_bytes, bounded);
  }
  for (size_t i = 0; i < rows; ++i) {
    driver_->CopyToHost(target + i * row_bytes, source + i * row_step, row_bytes, stream_);
    Count(row_bytes, bounded);
  }
}

void DeviceCopier::CopyToDevice(CuPointer target, size_t target_step, const uint8_t* source,
                                size_t source_step, size_t row_bytes, size_t rows) {
  const auto fits = [row_bytes](size_t pitch) { return pitch >= row_bytes && pitch <= Driver::kMostPitch; };
  if (rows > 1 && fits(target_step) && fits(source_step)) {
    driver_->CopyRowsToDevice(target, target_step, source, source_step, row_bytes, rows, stream_);
    return Count(rows * row_bytes, true);
  }
  for (size_t i = 0; i < rows; ++i) {
    driver_->CopyToDevice(target + i * target_step, source + i * source_step, row_bytes, stream_);
    Count(row_bytes, true);
  }
}

void DeviceCopier::Count(uint64_t bytes, bool bounded) {
  Place now;
  uint64_t sum;
  {
    const MutexLock lock(marking_);
    now = ++enqueued_;
    sum = bytes_ += bytes;
    if (!bounded) return;
    if (now >= marked_.place + kCopiesPerEvent || sum >= marked_.bytes + kBytesPerEvent) MarkHere();
  }
  if (now > kMostInFlight) WaitFor(now - kMostInFlight);
  if (sum > most_bytes_) WaitUntil(&Mark::bytes, sum - most_bytes_);
}

void DeviceCopier::MarkHere() {
  Mark mark{enqueued_, bytes_, nullptr};  // before the event is recorded, which may cover more
  mark.event = std::make_shared<Event>(driver_, context_);
  driver_->Record(mark.event->get(), stream_);
  marks_.push_back(mark);
  marked_ = mark;
}

void DeviceCopier::WaitFor(Place place) { WaitUntil(&Mark::place, place); }

void DeviceCopier::WaitUntil(uint64_t Mark::* count, uint64_t least) {
  Mark mark;
  {
    const MutexLock lock(marking_);
    if (done_.*count >= least) return;
    if (marked_.*count < least) MarkHere();
    mark = *std::find_if(marks_.begin(), marks_.end(), [=](const Mark& m) { return m.*count >= least; });
  }
  driver_->Synchronize(mark.event->get());
  std::deque<Mark> over;  // destroyed after the lock
  const MutexLock lock(marking_);
  if (mark.place > done_.place) done_ = {mark.place, mark.bytes, nullptr};
  while (!marks_.empty() && marks_.front().place <= done_.place) {
    over.push_back(std::move(marks_.front()));
    marks_.pop_front();
  }
}

void DeviceCopier::WaitForAll() {
  const MutexLock lock(waiting_for_all_);
  driver_->Record(last_.get(), stream_);
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
