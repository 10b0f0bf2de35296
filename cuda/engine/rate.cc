#include "engine/rate.h"

#include <algorithm>
#include <thread>

namespace datastates {

void RateLimit::Spend(uint64_t bytes, const std::function<bool()>& give_up) {
  if (bytes_per_second_ == 0 || give_up()) return;  // what is not moved takes nothing from the others
  Clock::time_point due;
  {
    const MutexLock lock(mutex_);
    const std::chrono::duration<double> cost(static_cast<double>(bytes) /
                                             static_cast<double>(bytes_per_second_));
    next_ = std::max(next_, Clock::now()) + std::chrono::duration_cast<Clock::duration>(cost);
    due = next_;
  }
  while (Clock::now() < due && !give_up()) {
    std::this_thread::sleep_for(std::min<Clock::duration>(due - Clock::now(), std::chrono::milliseconds(20)));
  }
}

}  // namespace datastates
