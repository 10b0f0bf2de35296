// The call that moves bytes from memory into an open file. It is one verb, so that another way (io_uring,
// say) is one more class under the same tests; short writes, refusals, order and durability are DataFile's.
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

  // Like pwrite(2): returns the number of bytes written, which may be fewer, or -1 with errno set. `data` may
  // be reused afterwards. Thread-safe: writes to different places of one file may run at once.
  virtual ssize_t Write(int fd, const uint8_t* data, size_t bytes, off_t offset) = 0;

  // Returns whether written bytes end up in the file. If not, no space is reserved and no file becomes
  // durable.
  virtual bool Keeps() const { return true; }

  // Returns the back end of this name, which is never destroyed. Throws Failure if there is none. Besides
  // Names() there is "discard", which drops all bytes, to measure copies without a disk.
  static WriteBackend* Named(const std::string& name);
  static std::vector<std::string> Names();  // those that keep what is written
};

}  // namespace datastates
