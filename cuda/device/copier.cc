#include "device/copier.h"

#include <algorithm>
#include <chrono>
#include <thread>

namespace datastates {
namespace {

constexpr auto kRetryInterval = std::chrono::milliseconds(100);
constexpr int kMostRefusals = 50;  // what passes (no memory, a graph's capture) has passed by then

// Whether a row of that many bytes, and that distance to the next, can be part of a copy of several.
bool Fits(size_t step, size_t bytes) { return step >= bytes && step <= Driver::kMostPitch; }

}  // namespace

DeviceCopier::DeviceCopier(std::shared_ptr<Driver> driver, uint64_t most_bytes)
    : most_bytes_(std::max<uint64_t>(most_bytes, 1)),
      driver_(std::move(driver)),
      context_(driver_->EnterContext()),
      device_(driver_->CurrentDevice()),
      reached_(driver_, context_),
      last_(driver_, context_),
      stream_(driver_->CreateLowPriorityStream()) {}

DeviceCopier::~DeviceCopier() {
  const ContextScope scope(*driver_, context_);
  driver_->DestroyStream(stream_);
}

void DeviceCopier::StartAfter(CuStream trainer) {
  MarkCopies();
  Event now(driver_, context_);
  driver_->Record(now.get(), trainer);
  driver_->StreamWait(stream_, now.get());
}

void DeviceCopier::MarkCopies() {
  const Place place = enqueued_;  // read before the record, as in WaitFor
  {
    const MutexLock lock(waiting_);
    if (done_ >= place) return;
  }
  Mark mark{place, std::make_shared<Event>(driver_, context_)};
  driver_->Record(mark.event->get(), stream_);
  const MutexLock lock(waiting_);
  marks_.push_back(std::move(mark));
}

std::shared_ptr<Event> DeviceCopier::MarkFor(Place* place) {
  while (!marks_.empty() && marks_.front().place <= done_) marks_.pop_front();
  for (const Mark& mark : marks_) {
    if (mark.place < *place) continue;
    *place = mark.place;
    return mark.event;
  }
  return nullptr;
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
  if (rows > 1 && Fits(row_step, row_bytes)) {
    driver_->CopyRowsToHost(target, source, row_bytes, row_step, rows, stream_);
    Count(rows * row_bytes);
    return;
  }
  for (size_t i = 0; i < rows; ++i) {
    driver_->CopyToHost(target + i * row_bytes, source + i * row_step, row_bytes, stream_);
    Count(row_bytes);
  }
}

void DeviceCopier::CopyRows(uint8_t* target, CuPointer source, size_t row_bytes, size_t row_step,
                            size_t rows) {
  const MutexLock turn(turns_);
  EnqueueRows({row_step, row_bytes, row_bytes, rows}, [&](size_t row, size_t at, size_t bytes, size_t count) {
    uint8_t* const to = target + row * row_bytes + at;
    const CuPointer from = source + row * row_step + at;
    if (count > 1) return driver_->CopyRowsToHost(to, from, bytes, row_step, count, stream_);
    driver_->CopyToHost(to, from, bytes, stream_);
  });
}

void DeviceCopier::CopyToDevice(CuPointer target, size_t target_step, const uint8_t* source,
                                size_t source_step, size_t row_bytes, size_t rows) {
  const MutexLock turn(turns_);
  EnqueueRows({target_step, source_step, row_bytes, rows},
              [&](size_t row, size_t at, size_t bytes, size_t count) {
                const CuPointer to = target + row * target_step + at;
                const uint8_t* const from = source + row * source_step + at;
                if (count > 1) {
                  return driver_->CopyRowsToDevice(to, target_step, from, source_step, bytes, count, stream_);
                }
                driver_->CopyToDevice(to, from, bytes, stream_);
              });
}

template <typename Copy>
void DeviceCopier::EnqueueRows(const Rows& rows, const Copy& copy) {
  if (rows.bytes == 0) return;
  // Several rows in one call, as long as they may be in flight together; or a row, if need be in pieces.
  const bool one_call = Fits(rows.device_step, rows.bytes) && Fits(rows.host_step, rows.bytes);
  const size_t at_once = one_call ? std::max<size_t>(most_bytes_ / rows.bytes, 1) : 1;
  for (size_t row = 0; row < rows.count;) {
    const size_t count = std::min(at_once, rows.count - row);
    for (size_t at = 0; at < rows.bytes;) {
      const size_t bytes = count > 1 ? rows.bytes : std::min<size_t>(rows.bytes - at, most_bytes_);
      MakeRoom(count * bytes);
      copy(row, at, bytes, count);
      Count(count * bytes);
      at += bytes;
    }
    row += count;
  }
}

void DeviceCopier::Count(uint64_t bytes) {
  const MutexLock lock(counting_);
  ++enqueued_;
  bytes_ += bytes;
}

void DeviceCopier::MakeRoom(uint64_t bytes) {
  Sums now;
  {
    const MutexLock lock(counting_);
    now = {enqueued_, bytes_};
    const bool fits = now.bytes - done_sums_.bytes + bytes <= most_bytes_ || hurries_;
    if (now.place == done_sums_.place || (fits && now.place - done_sums_.place < kMostInFlight)) return;
  }
  WaitFor(now.place);
  const MutexLock lock(counting_);
  if (done_sums_.place < now.place) done_sums_ = now;
}

void DeviceCopier::NoteIfEmpty(Place place) {
  const MutexLock lock(counting_);
  if (enqueued_ == place) done_sums_ = {place, bytes_};
}

void DeviceCopier::WaitFor(Place place) {
  MutexLock lock(waiting_);
  while (done_ < place) {
    if (is_awaited_) {
      progress_.Wait(waiting_);
      continue;
    }
    is_awaited_ = true;
    Place now = place;
    std::shared_ptr<Event> mark = MarkFor(&now);
    lock.Unlock();
    try {
      if (!mark) {
        const Place enqueued = enqueued_;  // read before the record, which so covers as many copies
        driver_->Record(reached_.get(), stream_);
        // If StartAfter came between, the record waits for the trainer; the mark that it made does not.
        lock.Lock();
        mark = MarkFor(&now);
        lock.Unlock();
        if (!mark) now = enqueued;
      }
      driver_->Synchronize(mark ? mark->get() : reached_.get());
    } catch (...) {
      lock.Lock();
      is_awaited_ = false;  // another thread tries
      progress_.NotifyAll();
      throw;
    }
    NoteIfEmpty(now);
    lock.Lock();
    is_awaited_ = false;
    done_ = now;
    progress_.NotifyAll();
  }
}

void DeviceCopier::WaitForAll() {
  const MutexLock lock(waiting_for_all_);
  driver_->Record(last_.get(), stream_);
  driver_->Synchronize(last_.get());
}

bool DeviceCopier::Drain() noexcept {
  for (int refusals = 1;; ++refusals) {
    try {
      driver_->SetContext(context_);  // this thread may not have entered it
      const RelaxedCapture relaxed(*driver_);
      WaitForAll();
      refuses_ = false;
      return true;
    } catch (const ContextLost&) {
      return true;
    } catch (const std::exception&) {
      if (refusals >= kMostRefusals) refuses_ = true;
      if (refuses_) return false;
      std::this_thread::sleep_for(kRetryInterval);
    }
  }
}

}  // namespace datastates
