#include "device/copier.h"

#include <algorithm>

namespace datastates {
namespace {

// Copies shorter than this are passed to the driver many at a time, if it has a call for that.
constexpr size_t kShortBytes = size_t{1} << 20;

}  // namespace

DeviceCopier::DeviceCopier(std::shared_ptr<Driver> driver)
    : driver_(std::move(driver)),
      context_(driver_->CurrentContext()),
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

void DeviceCopier::CopyAtOnce(const std::vector<Transfer>& transfers) { Enqueue(transfers, false); }

void DeviceCopier::CopyRowsAtOnce(uint8_t* target, CuPointer source, size_t row_bytes, size_t row_step,
                                  size_t rows) {
  driver_->CopyRowsToHost(target, source, row_bytes, row_step, rows, stream_);
  Count(1, false);
}

void DeviceCopier::Copy(const std::vector<Transfer>& transfers) { Enqueue(transfers, true); }

void DeviceCopier::Enqueue(const std::vector<Transfer>& transfers, bool bounded) {
  CuPointer targets[kCopiesPerEvent], sources[kCopiesPerEvent];
  size_t bytes[kCopiesPerEvent];
  const auto enqueue_one = [&](const Transfer& transfer) {
    driver_->CopyToHost(transfer.target, transfer.source, transfer.bytes, stream_);
    Count(1, bounded);
  };
  for (size_t i = 0; i < transfers.size();) {
    size_t count = 0;
    for (; i + count < transfers.size() && count < kCopiesPerEvent; ++count) {
      const Transfer& transfer = transfers[i + count];
      if (transfer.bytes >= kShortBytes) break;
      targets[count] = reinterpret_cast<CuPointer>(transfer.target);
      sources[count] = transfer.source;
      bytes[count] = transfer.bytes;
    }
    if (count > 1 && EnqueueBatch(targets, sources, bytes, count)) {
      Count(count, bounded);
    } else {
      count = std::max<size_t>(count, 1);
      for (size_t one = i; one < i + count; ++one) enqueue_one(transfers[one]);
    }
    i += count;
  }
}

bool DeviceCopier::EnqueueBatch(CuPointer* targets, CuPointer* sources, size_t* bytes, size_t count) {
  try {
    return driver_->CopyBatchToHost(targets, sources, bytes, count, stream_);
  } catch (const Failure&) {
    enqueued_ += count;  // some may be in the stream: waits for Enqueued() must cover them
    throw;
  }
}

void DeviceCopier::CopyRows(uint8_t* target, CuPointer source, size_t row_bytes, size_t row_step,
                            size_t rows) {
  if (rows > 1 && row_step >= row_bytes && row_step <= Driver::kMostPitch) {
    driver_->CopyRowsToHost(target, source, row_bytes, row_step, rows, stream_);
    return Count(1, true);
  }
  for (size_t i = 0; i < rows; ++i) {
    driver_->CopyToHost(target + i * row_bytes, source + i * row_step, row_bytes, stream_);
    Count(1, true);
  }
}

void DeviceCopier::CopyToDevice(CuPointer target, size_t target_step, const uint8_t* source,
                                size_t source_step, size_t row_bytes, size_t rows) {
  const auto fits = [row_bytes](size_t pitch) { return pitch >= row_bytes && pitch <= Driver::kMostPitch; };
  if (rows > 1 && fits(target_step) && fits(source_step)) {
    driver_->CopyRowsToDevice(target, target_step, source, source_step, row_bytes, rows, stream_);
    return Count(1, true);
  }
  for (size_t i = 0; i < rows; ++i) {
    driver_->CopyToDevice(target + i * target_step, source + i * source_step, row_bytes, stream_);
    Count(1, true);
  }
}

void DeviceCopier::Count(size_t copies, bool bounded) {
  const Place now = enqueued_ += copies;
  if (!bounded) return;
  {
    const MutexLock lock(marking_);
    if (now >= marked_ + kCopiesPerEvent) MarkHere();
  }
  if (now > kMostInFlight) WaitFor(now - kMostInFlight);
}

void DeviceCopier::MarkHere() {
  const Place place = enqueued_;  // before the event is recorded, which may cover more
  auto event = std::make_shared<Event>(driver_, context_);
  driver_->Record(event->get(), stream_);
  marks_.push_back({place, std::move(event)});
  marked_ = place;
}

void DeviceCopier::WaitFor(Place place) {
  Mark mark;
  {
    const MutexLock lock(marking_);
    if (done_ >= place) return;
    if (marked_ < place) MarkHere();
    mark = *std::find_if(marks_.begin(), marks_.end(), [=](const Mark& m) { return m.place >= place; });
  }
  driver_->Synchronize(mark.event->get());
  std::deque<Mark> over;  // destroyed after the lock
  const MutexLock lock(marking_);
  done_ = std::max(done_, mark.place);
  while (!marks_.empty() && marks_.front().place <= done_) {
    over.push_back(std::move(marks_.front()));
    marks_.pop_front();
  }
}

void DeviceCopier::WaitForAll() {
  const MutexLock lock(waiting_for_all_);
  driver_->Record(last_.get(), stream_);
  driver_->Synchronize(last_.get());
}

}  // namespace datastates
