// Injected failures, so that tests can prove what happens when a disk or a machine fails. A plan is empty in
// production and then costs one branch per call.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "common.h"
#include "os/mutex.h"

namespace datastates {

// A plan is a comma-separated list of `operation:nth:effect`: at the nth call of the operation
// (1 is the first, 0 is every call) the effect happens. Effects: an errno name (ENOSPC, EIO and others,
// see faults.cc; handled as if the system had returned it), `short` (about half of the bytes are moved),
// `kill` (SIGKILL) and `stall=MS` (sleep). Operations are the names used in the error messages: open,
// reserve, write, truncate, sync, sync directory, read.
class Faults {
 public:
  // Throws Failure when `plan` cannot be read.
  explicit Faults(const std::string& plan);

  struct Effect {
    int error = 0;
    bool short_count = false;
  };

  // Counts one call of `operation` and returns how it must fail. Thread-safe.
  Effect Count(const char* operation);

 private:
  struct Entry {
    std::string operation;
    long nth;
    std::string effect;
  };
  std::vector<Entry> entries_;  // constant after construction
  Mutex mutex_;
  std::map<std::string, long> calls_ GUARDED_BY(mutex_);
};

}  // namespace datastates
