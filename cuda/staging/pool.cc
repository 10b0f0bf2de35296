#include "staging/pool.h"

#include <algorithm>
#include <chrono>

namespace datastates {
namespace {

constexpr size_t kSegmentBytes = size_t{64} << 20;  // made, prefaulted and page-locked at a time

}  // namespace

Slot& Slot::operator=(Slot&& other) noexcept {
  Return();
  std::swap(pool_, other.pool_);
  std::swap(data_, other.data_);
  return *this;
}

void Slot::Return() noexcept {
  if (data_ != nullptr) pool_->Return(data_);
  data_ = nullptr;
  pool_ = nullptr;
}

SlotPool::SlotPool(size_t slot_bytes, size_t most_slots) : slot_bytes_(slot_bytes), most_slots_(most_slots) {}

SlotPool::~SlotPool() {
  std::thread thread;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    thread.swap(thread_);
  }
  wake_.notify_all();
  if (thread.joinable()) thread.join();
  for (Segment& segment : segments_) {
    if (segment.registered) driver_->UnregisterHost(segment.mapping->data());
  }
}

void SlotPool::Grow(size_t slots) {
  std::lock_guard<std::mutex> lock(mutex_);
  wanted_ = std::max(wanted_, std::min(slots, most_slots_));
  if (wanted_ > made_) trouble_.clear();  // memory may be there by now
  if (!thread_.joinable()) thread_ = std::thread(&SlotPool::Work, this);
  wake_.notify_all();
}

void SlotPool::Register(std::shared_ptr<Driver> driver, CuContext context) {
  std::lock_guard<std::mutex> lock(mutex_);
  driver_ = std::move(driver);
  context_ = context;
  page_lock_ = true;
  wake_.notify_all();
}

Slot SlotPool::Acquire(const std::function<bool()>& give_up) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (idle_.empty()) {
    if (give_up()) return Slot();
    if (made_ == 0 && !trouble_.empty()) throw Failure("make staging slots", "", 0, trouble_);
    free_.wait_for(lock, std::chrono::milliseconds(100));
  }
  uint8_t* data = idle_.back();
  idle_.pop_back();
  return Slot(this, data);
}

size_t SlotPool::slots() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return made_;
}

void SlotPool::Return(uint8_t* data) noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  idle_.push_back(data);
  free_.notify_all();
}

void SlotPool::Work() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stop_) {
    const bool unregistered = page_lock_ && std::any_of(segments_.begin(), segments_.end(),
                                                        [](const Segment& s) { return !s.registered; });
    const bool short_of_slots = made_ < wanted_ && trouble_.empty();
    if (!unregistered && !short_of_slots) {
      wake_.wait(lock);
      continue;
    }
    const size_t slots = std::min(std::max<size_t>(1, kSegmentBytes / slot_bytes_), wanted_ - made_);
    const auto driver = driver_;
    const CuContext context = context_;
    lock.unlock();
    std::string trouble;
    try {
      if (unregistered) {
        RegisterSegments(driver, context);
      } else {
        AddSegment(slots);
      }
    } catch (const Failure& failure) {
      trouble = failure.what();
    }
    lock.lock();
    if (!trouble.empty()) {
      trouble_ = trouble;
      // Unlocked memory still works, only slower: registration is not tried again.
      if (unregistered) page_lock_ = false;
      free_.notify_all();
    }
  }
}

void SlotPool::AddSegment(size_t slots) {
  Segment segment{std::make_unique<PrivateMapping>(slots * slot_bytes_)};
  segment.mapping->Prefault();
  uint8_t* const first = segment.mapping->data();
  std::lock_guard<std::mutex> lock(mutex_);
  segments_.push_back(std::move(segment));
  for (size_t i = 0; i < slots; ++i) idle_.push_back(first + i * slot_bytes_);
  made_ += slots;
  free_.notify_all();
}

void SlotPool::RegisterSegments(const std::shared_ptr<Driver>& driver, CuContext context) {
  driver->SetContext(context);
  driver->RelaxCapture();
  for (size_t i = 0;; ++i) {
    PrivateMapping* mapping;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (i >= segments_.size()) return;
      if (segments_[i].registered) continue;
      mapping = segments_[i].mapping.get();
    }
    driver->RegisterHost(mapping->data(), mapping->bytes());
    std::lock_guard<std::mutex> lock(mutex_);
    segments_[i].registered = true;
  }
}

}  // namespace datastates
