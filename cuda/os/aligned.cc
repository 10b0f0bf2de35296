#include "os/aligned.h"

#include <sys/mman.h>

#include <algorithm>

#include "common.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14
#endif

namespace datastates {

PrivateMapping::PrivateMapping(size_t bytes) : bytes_(AlignUp(bytes, kAlignment)) {
  // Kernels before 6.7 do not align mappings, and only an aligned range can be backed by huge pages.
  const size_t spare = bytes_ >= kHugePage ? kHugePage - kAlignment : 0;
  void* mapped = mmap(nullptr, bytes_ + spare, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) {
    throw Failure("map", std::to_string(bytes_) + " bytes of staging memory", errno);
  }
  data_ = static_cast<uint8_t*>(mapped);
  if (spare != 0) Trim(spare);
  madvise(data_, bytes_, MADV_DONTFORK);
  madvise(data_, bytes_, MADV_HUGEPAGE);  // advice: not every kernel has huge pages
}

void PrivateMapping::Trim(size_t spare) {
  const size_t before =
      AlignUp(reinterpret_cast<uintptr_t>(data_), kHugePage) - reinterpret_cast<uintptr_t>(data_);
  if (before != 0) munmap(data_, before);
  data_ += before;
  if (before != spare) munmap(data_ + bytes_, spare - before);
}

PrivateMapping::~PrivateMapping() {
  // A forked child never had the mapping; something else may be at its address by now.
  if (home_.IsHere()) munmap(data_, bytes_);
}

// In pieces: while one is made resident, every other thread of the program that maps or unmaps memory waits.
void PrivateMapping::Prefault() {
  for (size_t at = 0; at < bytes_; at += kHugePage) {
    const size_t piece = std::min(kHugePage, bytes_ - at);
    if (madvise(data_ + at, piece, MADV_POPULATE_WRITE) == 0) continue;
    for (size_t page = at; page < at + piece; page += kAlignment) {
      reinterpret_cast<volatile uint8_t*>(data_)[page] = 0;
    }
  }
}

}  // namespace datastates
