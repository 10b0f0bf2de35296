#include "os/aligned.h"

#include <sys/mman.h>

#include "common.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14
#endif

namespace datastates {

PrivateMapping::PrivateMapping(size_t bytes) : bytes_(AlignUp(bytes, kAlignment)) {
  void* mapped = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) {
    throw Failure("map", std::to_string(bytes_) + " bytes of staging memory", errno);
  }
  data_ = static_cast<uint8_t*>(mapped);
  madvise(data_, bytes_, MADV_DONTFORK);
  madvise(data_, bytes_, MADV_HUGEPAGE);  // a wish: not every kernel has huge pages
}

PrivateMapping::~PrivateMapping() {
  // A forked child never had the mapping; at its address something else may live by now.
  if (home_.IsHere()) munmap(data_, bytes_);
}

void PrivateMapping::Prefault() {
  if (madvise(data_, bytes_, MADV_POPULATE_WRITE) == 0) return;
  for (size_t at = 0; at < bytes_; at += kAlignment) {
    reinterpret_cast<volatile uint8_t*>(data_)[at] = 0;
  }
}

}  // namespace datastates
