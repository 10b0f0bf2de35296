// Frees what has staging memory without waiting for ever: the driver may hang where background threads
// page-lock memory, and where it is unlocked.
#pragma once

#include <chrono>
#include <future>
#include <memory>
#include <system_error>
#include <thread>
#include <utility>

#include "os/threads.h"

namespace datastates {

// Drops a reference on a thread of its own. The destructor joins it if it is done, else it is abandoned.
template <typename Object>
class Freeing {
 public:
  explicit Freeing(std::shared_ptr<Object> object) {
    std::packaged_task<void()> free([object = std::move(object)]() mutable {
      BeginThread("ds-free");
      object.reset();
    });
    done_ = free.get_future();
    try {
      thread_ = std::thread(std::move(free));
    } catch (const std::system_error&) {
      // There is no thread: it was freed here.
    }
  }
  ~Freeing() {
    if (thread_.joinable()) Wait(0) ? thread_.join() : thread_.detach();
  }
  Freeing(const Freeing&) = delete;
  Freeing& operator=(const Freeing&) = delete;

  // Returns whether it is done within that time.
  bool Wait(double seconds) const {
    return done_.wait_for(std::chrono::duration<double>(seconds)) == std::future_status::ready;
  }

 private:
  std::future<void> done_;
  std::thread thread_;
};

}  // namespace datastates
