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
  for (const Segment& segment : segments_) {
    if (!segment.locked_by) continue;
    const ContextScope scope(*segment.locked_by, segment.context);
    segment.locked_by->UnregisterHost(segment.mapping->data());
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
  lock_trouble_.clear();
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

SlotPool::Facts SlotPool::facts() const {
  std::lock_guard<std::mutex> lock(mutex_);
  Facts facts;
  facts.slots = made_;
  facts.idle = idle_.size();
  for (const Segment& segment : segments_) {
    if (segment.locked_by) facts.page_locked_bytes += segment.mapping->bytes();
  }
  const bool both = !trouble_.empty() && !lock_trouble_.empty();
  facts.trouble = trouble_ + (both ? "; " : "") + lock_trouble_;
  return facts;
}

void SlotPool::Return(uint8_t* data) noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  idle_.push_back(data);
  free_.notify_all();
}

void SlotPool::Work() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stop_) {
    const auto unlocked = std::find_if(segments_.begin(), segments_.end(),
                                       [](const Segment& segment) { return !segment.locked_by; });
    if (page_lock_ && unlocked != segments_.end()) {
      PageLock(&*unlocked, &lock);
    } else if (made_ < wanted_ && trouble_.empty()) {
      AddSegment(&lock);
    } else {
      wake_.wait(lock);
    }
  }
}

void SlotPool::AddSegment(std::unique_lock<std::mutex>* lock) {
  const size_t slots = std::min(std::max<size_t>(1, kSegmentBytes / slot_bytes_), wanted_ - made_);
  Segment segment;
  lock->unlock();
  std::string trouble;
  try {
    segment.mapping = std::make_unique<PrivateMapping>(slots * slot_bytes_);
    segment.mapping->Prefault();
  } catch (const std::exception& error) {
    trouble = error.what();
  }
  lock->lock();
  free_.notify_all();
  if (!trouble.empty()) {
    trouble_ = trouble;
    return;
  }
  // Before a slot of it is lent: a copy into memory that is not page-locked makes its caller wait.
  if (page_lock_) PageLock(&segment, lock);
  for (size_t i = 0; i < slots; ++i) idle_.push_back(segment.mapping->data() + i * slot_bytes_);
  segments_.push_back(std::move(segment));
  made_ += slots;
  free_.notify_all();
}

void SlotPool::PageLock(Segment* segment, std::unique_lock<std::mutex>* lock) {
  const auto driver = driver_;
  const CuContext context = context_;
  lock->unlock();
  std::string trouble;
  try {
    driver->SetContext(context);
    driver->RelaxCapture();
    driver->RegisterHost(segment->mapping->data(), segment->mapping->bytes());
  } catch (const Failure& failure) {
    trouble = failure.what();
  }
  lock->lock();
  if (trouble.empty()) {
    segment->locked_by = driver;
    segment->context = context;
  } else {
    lock_trouble_ = "staging memory is not page-locked, so copies from a device are slow: " + trouble;
    if (driver_ == driver && context_ == context) page_lock_ = false;  // not tried again before Register
  }
}

}  // namespace datastates
