// A data file while it is being read. Any thread may read any part of it.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "os/faults.h"

namespace datastates {

class InputFile {
 public:
  // Throws Failure. `direct`: try O_DIRECT and fall back to buffered reads where it is refused, at open or at
  // the first read. `faults` must outlive the file.
  InputFile(const std::string& path, bool direct, Faults* faults);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  // Reads the file's bytes [begin, end) into `buffer`, which has room for AlignUp(end - begin, kAlignment)
  // bytes. `buffer` and `begin` are multiples of kAlignment. Thread-safe. Short reads are resumed. Throws
  // Failure.
  void ReadAt(uint8_t* buffer, uint64_t begin, uint64_t end);

 private:
  int Open(int flags);  // returns an errno, or 0

  const std::string path_;
  Faults* const faults_;
  int fd_ = -1;  // constant after construction
  std::atomic<bool> direct_;
};

}  // namespace datastates
