#include "staging/pool.h"

#include <algorithm>
#include <chrono>
#include <system_error>

#include "os/threads.h"

namespace datastates {
namespace {

constexpr size_t kSegmentBytes = size_t{64} << 20;  // built at a time
constexpr size_t kMostThreads = 4;                  // that build segments

// Returns what the error says or, if there is no memory for it, a text so short that it needs none.
std::string Describe(const std::exception& error) noexcept {
  try {
    return error.what();
  } catch (const std::bad_alloc&) {
    return "out of memory";
  }
}

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

void Slot::Abandon() noexcept {
  if (data_ != nullptr) pool_->Abandon();
  data_ = nullptr;
  pool_ = nullptr;
}

SlotPool::SlotPool(size_t slot_bytes, size_t most_slots)
    : slot_bytes_(slot_bytes),
      slots_in_segment_(std::max<size_t>(1, kSegmentBytes / std::max<size_t>(1, slot_bytes))),
      most_slots_(most_slots) {}

SlotPool::~SlotPool() {
  std::vector<std::thread> threads;
  {
    const MutexLock lock(mutex_);
    stop_ = true;
    threads.swap(threads_);
  }
  wake_.NotifyAll();
  for (std::thread& thread : threads) thread.join();
  for (Segment& segment : segments_) {
    if (!has_abandoned_) {
      if (!segment.locked_by) continue;
      const ContextScope scope(*segment.locked_by, segment.context);
      const RelaxedCapture relaxed(*segment.locked_by);
      if (segment.locked_by->UnregisterHost(segment.mapping->data())) continue;
    }
    static_cast<void>(segment.mapping.release());  // leaked: the driver or the device may still use it
  }
}

void SlotPool::Grow(size_t slots) {
  const MutexLock lock(mutex_);
  wanted_ = std::max(wanted_, std::min(slots, most_slots_));
  if (wanted_ > made_) trouble_.clear();  // try again: there may be memory by now
  StartThreads();
}

void SlotPool::Limit(size_t most_slots) {
  const MutexLock lock(mutex_);
  most_slots_ = most_slots;
}

void SlotPool::Register(std::shared_ptr<Driver> driver, CuContext context, const NumaNode& node) {
  const MutexLock lock(mutex_);
  driver_ = std::move(driver);
  context_ = context;
  node_ = node;
  ++registration_;
  lock_trouble_.clear();
  StartThreads();
}

void SlotPool::StartThreads() {
  const size_t to_lock =
      std::count_if(segments_.begin(), segments_.end(), [](const Segment& s) { return !s.locked_by; });
  const size_t to_make = (wanted_ - made_ + slots_in_segment_ - 1) / slots_in_segment_;
  const size_t threads =
      std::min({to_make + (registration_ != 0 ? to_lock : 0), kMostThreads, UsableCores()});
  try {
    while (threads_.size() < threads) threads_.emplace_back(&SlotPool::Work, this);
  } catch (const std::system_error& error) {
    // Threads that did start do the work.
    if (threads_.empty()) throw Failure("start staging memory", "thread", error.code().value());
  }
  wake_.NotifyAll();
}

Slot SlotPool::Acquire(const std::function<bool()>& give_up, double* growing_seconds) {
  MutexLock lock(mutex_);
  while (idle_.empty()) {
    if (give_up()) return Slot();
    if (made_ + making_ == 0 && !trouble_.empty()) {
      Failure failure("make staging slots", "", 0, trouble_);  // the text names the code already
      failure.code = trouble_code_;
      throw failure;
    }
    const bool is_growing = IsGrowing();
    const auto before = std::chrono::steady_clock::now();
    wake_.NotifyOne();  // builds slots in place of abandoned ones
    free_.WaitUntil(mutex_, before + std::chrono::milliseconds(100));
    if (!is_growing || growing_seconds == nullptr) continue;
    *growing_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - before).count();
  }
  uint8_t* data = idle_.back();
  idle_.pop_back();
  return Slot(this, data);
}

SlotPool::Facts SlotPool::facts() const {
  const MutexLock lock(mutex_);
  Facts facts;
  facts.slots = made_;
  facts.idle = idle_.size();
  for (const Segment& segment : segments_) {
    if (segment.locked_by) facts.page_locked_bytes += segment.mapping->bytes();
  }
  facts.trouble = trouble_;
  if (lock_trouble_.empty()) return facts;
  if (!trouble_.empty()) facts.trouble += "; ";
  facts.trouble += "staging memory is not page-locked, so copies from a device are slow: " + lock_trouble_;
  return facts;
}

void SlotPool::Return(uint8_t* data) noexcept {
  const MutexLock lock(mutex_);
  idle_.push_back(data);  // AddSegment has reserved room
  free_.NotifyAll();
}

void SlotPool::Abandon() noexcept {
  const MutexLock lock(mutex_);
  --made_;
  has_abandoned_ = true;
}

void SlotPool::Work() {
  BeginThread("ds-pool");
  MutexLock lock(mutex_);
  while (!stop_) {
    if (Segment* const unlocked = FindUnlocked()) {
      PageLock(unlocked);
    } else if (made_ + making_ < wanted_ && trouble_.empty()) {
      AddSegment();
    } else {
      wake_.Wait(mutex_);
    }
  }
}

SlotPool::Segment* SlotPool::FindUnlocked() {
  const uint64_t now = registration_;
  const auto found = std::find_if(segments_.begin(), segments_.end(), [now](const Segment& segment) {
    return !segment.locked_by && !segment.busy && segment.registration != now;
  });
  return found == segments_.end() ? nullptr : &*found;
}

void SlotPool::AddSegment() {
  const size_t slots = std::min(slots_in_segment_, wanted_ - made_ - making_);
  const NumaNode node = node_;
  making_ += slots;
  // An exception would end the process, so all that allocates is in the `try`: room in idle_ for every slot,
  // which Return relies on, and the future element of segments_.
  std::list<Segment> built;
  std::string trouble;
  int code = 0;
  try {
    idle_.reserve(made_ + making_);
    Segment& segment = built.emplace_back();
    const MutexUnlock unlocked(mutex_);
    segment.mapping = std::make_unique<PrivateMapping>(slots * slot_bytes_);
    BindMemory(segment.mapping->data(), segment.mapping->bytes(), node);
    segment.mapping->Prefault();
    segment.node = node.number;
  } catch (const std::exception& error) {
    trouble = Describe(error);
    if (const auto* failure = dynamic_cast<const Failure*>(&error)) code = failure->code;
  }
  // Before a slot is lent: a copy into memory that is not page-locked blocks its caller.
  while (trouble.empty() && !stop_ && !built.front().locked_by &&
         built.front().registration != registration_) {
    PageLock(&built.front());
  }
  making_ -= slots;
  free_.NotifyAll();
  if (!trouble.empty()) {
    trouble_ = std::move(trouble);
    trouble_code_ = code;
    return;
  }
  for (size_t i = 0; i < slots; ++i) idle_.push_back(built.front().mapping->data() + i * slot_bytes_);
  segments_.splice(segments_.end(), built);
  made_ += slots;
}

void SlotPool::PageLock(Segment* segment) {
  const auto driver = driver_;
  const CuContext context = context_;
  const NumaNode node = node_;
  segment->registration = registration_;
  segment->busy = true;
  std::string trouble;
  {
    const MutexUnlock unlocked(mutex_);
    try {
      // A segment built before the node was known moves now; page-locked memory cannot.
      if (segment->node != node.number) BindMemory(segment->mapping->data(), segment->mapping->bytes(), node);
      driver->SetContext(context);
      driver->RelaxCapture();
      driver->RegisterHost(segment->mapping->data(), segment->mapping->bytes());
    } catch (const std::exception& error) {
      trouble = Describe(error);
    }
  }
  segment->busy = false;
  segment->node = node.number;
  if (trouble.empty()) {
    segment->locked_by = driver;
    segment->context = context;
  } else if (segment->registration == registration_) {  // else a later Register tries again
    lock_trouble_ = std::move(trouble);
  }
}

}  // namespace datastates
