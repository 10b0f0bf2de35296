// Page-aligned memory, as direct I/O needs it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "os/fork.h"

namespace datastates {

constexpr size_t kAlignment = 4096;  // of offsets, lengths and buffers of every direct write and read
constexpr size_t kHugePage = size_t{2} << 20;

inline uint64_t AlignUp(uint64_t value, uint64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

// An anonymous mapping that forked children do not inherit: direct I/O on pages shared with a child corrupts
// data, and copying the page tables of gigabytes makes a fork slow. Prefault() makes it resident, in huge
// pages where it is large enough and the system has them. The constructor throws Failure (mmap).
class PrivateMapping {
 public:
  explicit PrivateMapping(size_t bytes);
  ~PrivateMapping();
  PrivateMapping(const PrivateMapping&) = delete;
  PrivateMapping& operator=(const PrivateMapping&) = delete;

  void Prefault();

  uint8_t* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  void Trim(size_t spare);  // unmaps what lies before the first huge page and after the last byte

  const HomeProcess home_;
  uint8_t* data_;
  size_t bytes_;
};

}  // namespace datastates
