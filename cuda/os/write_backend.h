// How bytes get from memory into an open file. One verb, so that another way (io_uring, say) is one more
// class and runs under the same tests; everything around it (short writes, refusals, order, durability) is
// DataFile's.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace datastates {

class WriteBackend {
 public:
  virtual ~WriteBackend() = default;

  // As pwrite(2): gives the bytes written, which may be fewer, or -1 with errno. Returns when `data` may be
  // used again. Thread-safe: writes to different places of one file run at once.
  virtual ssize_t Write(int fd, const uint8_t* data, size_t bytes, off_t offset) = 0;

  // Whether what was written is in the file. If not, no space is reserved and no file becomes durable.
  virtual bool Keeps() const { return true; }

  // The back end of this name, which lives for ever. Throws Failure if there is none. Besides those of
  // Names there is "discard", which drops all bytes: it measures copies without a disk.
  static WriteBackend* Named(const std::string& name);
  static std::vector<std::string> Names();  // of those that keep what is written
};

}  // namespace datastates
