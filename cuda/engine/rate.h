// A limit on bytes per second that threads share (the options copy-limit and write-limit).
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>

#include "common.h"
#include "os/mutex.h"

namespace datastates {

class RateLimit {
 public:
  // `bytes_per_second` 0 means no limit.
  explicit RateLimit(uint64_t bytes_per_second) : bytes_per_second_(bytes_per_second) {}

  // Waits until `bytes` more fit under the limit, or `give_up` returns true: it is called at first, when
  // bytes that are given up do not count, and at least every 20 ms.
  void Spend(uint64_t bytes, const std::function<bool()>& give_up);

 private:
  using Clock = std::chrono::steady_clock;
  const uint64_t bytes_per_second_;
  Mutex mutex_;
  Clock::time_point next_ GUARDED_BY(mutex_) = Clock::now();
};

}  // namespace datastates
